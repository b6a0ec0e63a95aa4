//! A call from the agent's request to its recorded answer.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::backend::{Clock, Ended, Outcome, Prepared, sampling_of};
use super::dialect::{Answer, Api, Asked, Dialect, Event};
use super::record::{Call, Ending};
use super::session::{Captured, Entry};
use super::{App, ProxyError};
use crate::http::{retry_after, uuid4};
use crate::openai::{ApiError, Delta, Events, Usage, parse_object};

/// Events that wait for a slow client before its answer waits, too.
const WAITING: usize = 64;

/// How long a stream may be silent before a comment keeps it from being cut.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The longest name of a model that is kept, in characters.
const MAX_MODEL: usize = 200;

/// What an agent is told that has used up its calls. An empty answer would read as a failure, and be
/// asked for again.
const OUT_OF_CALLS: &str = "There are no calls left for this session. Stop here.";

/// Names that agents have for their own conversations, in headers.
const CLIENT_SESSIONS: [&str; 3] = ["x-session-id", "x-claude-code-session-id", "session_id"];

/// Reads a body, which must be an object.
pub(super) fn read_body(
    app: &App,
    body: Result<Bytes, BytesRejection>,
) -> Result<Map<String, Value>, ProxyError> {
    let body = body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::TooLarge {
            limit: app.config.max_body_bytes,
        },
        _ => ApiError::Invalid {
            message: rejection.body_text(),
            param: None,
            code: None,
        },
    })?;
    Ok(parse_object(&body)?)
}

/// Returns an error in the shape of the API that the client speaks.
pub(super) fn failure(api: Api, error: &ProxyError) -> Response {
    let mut response = (error.status(), Json(api.error(error))).into_response();
    let pause = match error {
        ProxyError::Request(ApiError::TooOften { wait }) => Some(retry_after(*wait)),
        error => error.retry_after().map(retry_after),
    };
    let is_for_now = matches!(response.status().as_u16(), 429 | 503);
    if let Some(pause) = pause.or_else(|| is_for_now.then(|| HeaderValue::from_static("1"))) {
        response.headers_mut().insert(header::RETRY_AFTER, pause);
    }
    response
}

/// Answers a request of an agent.
pub(super) async fn answer(
    app: Arc<App>,
    api: Api,
    session: Option<String>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let clock = Clock::start();
    let under_way = async {
        let (session, attempt) = app.session(session.as_deref(), &headers).await?;
        let body = read_body(&app, body)?;
        let requested = sampling_of(&body);
        let asked = api.read(body)?;
        let entry = session.enter(attempt)?;
        let call = UnderWay {
            app: Arc::clone(&app),
            entry,
            api,
            clock,
            requested,
            client_session: client_session(&headers),
            model: model_name(&asked.body),
        };
        call.run(asked).await
    };
    match under_way.await {
        Ok(response) => response,
        Err(error) => failure(api, &error),
    }
}

fn client_session(headers: &HeaderMap) -> Option<String> {
    let value = CLIENT_SESSIONS.iter().find_map(|name| headers.get(*name))?;
    Some(value.to_str().ok()?.chars().take(128).collect())
}

/// Returns the model that a client asks for, at no more than its length.
fn model_name(body: &Map<String, Value>) -> String {
    let name = body.get("model").and_then(Value::as_str);
    name.unwrap_or_default().chars().take(MAX_MODEL).collect()
}

/// A call that was let in.
struct UnderWay {
    app: Arc<App>,
    entry: Entry,
    api: Api,
    clock: Clock,
    requested: Map<String, Value>,
    client_session: Option<String>,
    model: String,
}

impl UnderWay {
    async fn run(mut self, asked: Asked) -> Result<Response, ProxyError> {
        let Asked {
            body,
            is_streamed,
            mut dialect,
        } = asked;
        if self.entry.is_over_budget {
            return Ok(stop_answer(is_streamed, dialect.as_mut()));
        }
        let (app, session) = (Arc::clone(&self.app), Arc::clone(self.entry.session()));
        // Rendering and tokenizing a long conversation takes a while.
        let prepared = blocking(move || app.backend.prepare(&session, body, is_streamed)).await;
        let prepared = prepared.inspect_err(|error| self.entry.fail(error))?;
        if is_streamed {
            return self.stream(prepared, dialect).await;
        }
        let answer = match self.app.backend.answer(&prepared, &None).await {
            Ok(outcome) => self.record(prepared, outcome).await,
            Err(Ended::Failed(error)) => Err(error),
            Err(Ended::Gone) => Err(ProxyError::upstream("nobody waits for the answer")),
        };
        let answer = answer.inspect_err(|error| self.entry.fail(error))?;
        self.entry.spend();
        Ok(Json(dialect.whole(&answer)).into_response())
    }

    /// Keeps what came of the call, before the agent has the end of it: what goes on from an answer finds it.
    async fn record(&self, prepared: Prepared, outcome: Outcome) -> Result<Answer, ProxyError> {
        let Outcome {
            answer,
            unsaid,
            why_context,
        } = outcome;
        let call = Call {
            id: format!("call-{}", uuid4()),
            attempt: self.entry.attempt,
            dialect: self.api.name(),
            model: self.model.clone(),
            messages: Vec::new(),
            tools: Arc::default(),
            answer: Arc::new(answer.message.clone()),
            unsaid,
            ending: answer.ending.clone(),
            sampling: prepared.sampling,
            requested: self.requested.clone(),
            started: self.clock.started,
            latency: self.clock.elapsed(),
            client_session: self.client_session.clone(),
            tokens: answer.tokens.clone(),
            why_context: prepared.why_context.or(why_context),
        };
        let captured = Captured {
            call,
            messages: prepared.messages,
            tools: prepared.tools,
            setting: prepared.setting,
        };
        let session = Arc::clone(self.entry.session());
        blocking(move || session.record(captured)).await?;
        self.app.metrics.observe_call(&answer, self.clock.elapsed());
        Ok(answer)
    }

    /// Streams the answer. What fails before its first event is a response of its own.
    async fn stream(
        self,
        prepared: Prepared,
        dialect: Box<dyn Dialect>,
    ) -> Result<Response, ProxyError> {
        let api = self.api;
        let (sender, mut events) = mpsc::channel(WAITING);
        let mut streamed = Streamed {
            call: self,
            dialect,
            sender,
            has_begun: false,
        };
        // Ends what still works for a client that is gone, whoever notices it first.
        let work = AbortOnDrop(tokio::spawn(async move {
            let _ = streamed.run(prepared).await;
        }));
        let mut first = None;
        tokio::select! {
            event = events.recv() => first = event,
            // The upstream thinks; a client should know that somebody is there.
            () = tokio::time::sleep(KEEP_ALIVE) => {}
        }
        let (bytes, body) = mpsc::channel(WAITING);
        match first {
            Some(Err(error)) => return Err(error),
            Some(Ok(event)) => {
                // There is room: nothing was sent before.
                let _ = bytes.send(event).await;
            }
            None => {}
        }
        tokio::spawn(async move {
            loop {
                let next = tokio::select! {
                    next = events.recv() => match next {
                        Some(Ok(event)) => event,
                        // The response has begun, with nothing but comments.
                        Some(Err(error)) => api.error_event(&error).to_bytes(),
                        None => break,
                    },
                    () = tokio::time::sleep(KEEP_ALIVE) => Bytes::from_static(b": waiting\n\n"),
                    () = bytes.closed() => break,
                };
                if bytes.send(next).await.is_err() {
                    break;
                }
            }
            drop(work);
        });
        Ok(Events(body).into_response())
    }
}

/// A task that ends with whoever waits for it.
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An answer that is told while it comes.
struct Streamed {
    call: UnderWay,
    dialect: Box<dyn Dialect>,
    sender: mpsc::Sender<Result<Bytes, ProxyError>>,
    has_begun: bool,
}

/// The client is gone.
struct Gone;

impl Streamed {
    async fn run(&mut self, prepared: Prepared) -> Result<(), Gone> {
        let (told, mut deltas) = mpsc::channel(WAITING);
        let app = Arc::clone(&self.call.app);
        let told = Some(told);
        let outcome = {
            let answering = app.backend.answer(&prepared, &told);
            tokio::pin!(answering);
            loop {
                tokio::select! {
                    biased;
                    Some(delta) = deltas.recv() => {
                        self.begin().await?;
                        let events = self.dialect.more(&delta);
                        self.send(events).await?;
                    }
                    outcome = &mut answering => break outcome,
                }
            }
        };
        // What was told right before the end.
        while let Ok(delta) = deltas.try_recv() {
            self.begin().await?;
            let events = self.dialect.more(&delta);
            self.send(events).await?;
        }
        let recorded = match outcome {
            Ok(outcome) => self.call.record(prepared, outcome).await,
            Err(Ended::Failed(error)) => Err(error),
            Err(Ended::Gone) => return Err(Gone),
        };
        match recorded.inspect_err(|error| self.call.entry.fail(error)) {
            Ok(answer) => {
                self.begin().await?;
                let events = self.dialect.end(&answer);
                self.send(events).await
            }
            Err(error) if self.has_begun => {
                let events = self.dialect.fail(&error);
                self.send(events).await
            }
            Err(error) => self.tell(Err(error)).await,
        }
    }

    async fn begin(&mut self) -> Result<(), Gone> {
        if self.has_begun {
            return Ok(());
        }
        self.has_begun = true;
        self.call.entry.spend();
        let events = self.dialect.begin();
        self.send(events).await
    }

    async fn send(&mut self, events: Vec<Event>) -> Result<(), Gone> {
        for event in events {
            self.tell(Ok(event.to_bytes())).await?;
        }
        Ok(())
    }

    /// Tells more, if there is room for it in time: who reads no further is as good as gone, and would hold
    /// a place that others wait for.
    async fn tell(&mut self, more: Result<Bytes, ProxyError>) -> Result<(), Gone> {
        let within = self.call.app.read_within;
        match tokio::time::timeout(within, self.sender.send(more)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(Gone),
        }
    }
}

/// Returns the answer to an agent whose calls are used up. It is not recorded.
fn stop_answer(is_streamed: bool, dialect: &mut dyn Dialect) -> Response {
    let answer = Answer {
        message: json!({"role": "assistant", "content": OUT_OF_CALLS}),
        ending: Ending::Stop,
        usage: Usage::default(),
        tokens: None,
        logprobs: Value::Null,
    };
    if !is_streamed {
        return Json(dialect.whole(&answer)).into_response();
    }
    let delta = Delta {
        reasoning: String::new(),
        content: OUT_OF_CALLS.to_owned(),
    };
    let mut events = dialect.begin();
    events.extend(dialect.more(&delta));
    events.extend(dialect.end(&answer));
    let (sender, body) = mpsc::channel(events.len());
    for event in events {
        // There is room for all.
        let _ = sender.try_send(event.to_bytes());
    }
    Events(body).into_response()
}

/// Runs what takes a while beside the tasks.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ProxyError> + Send + 'static,
) -> Result<T, ProxyError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| ProxyError::from(ApiError::internal(&error)))?
}
