//! Answers that are sent piece by piece, as server-sent events, and those that are sent whole.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{ApiError, App};
use crate::engine::{
    EngineError, Finished, GenerateEvent, GeneratedToken, Generation, SamplingParams, TextStream,
    Tokenizer,
};

/// Events that wait for a slow client before its completion waits, too.
const WAITING_EVENTS: usize = 64;

/// What stands around every chunk of an answer.
#[derive(Debug, Clone)]
pub(crate) struct Envelope {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
}

impl Envelope {
    pub(crate) fn wrap(&self, choices: &[Value]) -> Value {
        json!({
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }
}

/// Tokens that an answer took.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) prompt: usize,
    pub(crate) completion: usize,
    pub(crate) cached: usize,
}

impl Usage {
    pub(crate) fn add(&mut self, finished: &Finished) {
        self.completion += finished.tokens.len();
        self.cached = self.cached.max(finished.prefix_hit_tokens.min(self.prompt));
    }

    pub(crate) fn to_json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}

/// Waits for all completions of a request.
pub(super) async fn collect(
    app: &App,
    mut generation: Generation,
    count: usize,
) -> Result<Vec<Finished>, ApiError> {
    let started = Instant::now();
    let mut all: Vec<Option<Finished>> = (0..count).map(|_| None).collect();
    while let Some(event) = generation.next().await {
        match event {
            GenerateEvent::Finished { index, finished } => {
                app.metrics.observe_request(started.elapsed());
                all[index] = Some(*finished);
            }
            GenerateEvent::Failed(error) => return Err(error.into()),
            GenerateEvent::Tokens { .. } => {}
        }
    }
    all.into_iter()
        .collect::<Option<Vec<Finished>>>()
        .ok_or_else(|| ApiError::Internal {
            message: "the engine stopped while it served this request".to_owned(),
        })
}

/// Makes the chunks of one kind of answer.
pub(super) trait Chunks: Send + 'static {
    /// Returns the choice that starts the answer, if one does.
    fn begin(&mut self, index: usize) -> Option<Value>;

    /// Returns the choice that tells new tokens, if they settle anything.
    fn tokens(
        &mut self,
        index: usize,
        tokens: &[GeneratedToken],
    ) -> Result<Option<Value>, ApiError>;

    /// Returns the choices that end a completion.
    fn finished(&mut self, index: usize, finished: &Finished) -> Result<Vec<Value>, ApiError>;
}

/// Sends an answer as it comes.
pub(super) struct Streamed<C> {
    pub(super) app: Arc<App>,
    pub(super) generation: Generation,
    pub(super) envelope: Envelope,
    pub(super) chunks: C,
    pub(super) count: usize,
    pub(super) usage: Usage,
    pub(super) tells_usage: bool,
    /// Told with the first chunk.
    pub(super) prompt_token_ids: Option<Vec<u32>>,
}

impl<C: Chunks> Streamed<C> {
    pub(super) fn into_response(self) -> Response {
        let (sender, receiver) = mpsc::channel(WAITING_EVENTS);
        // The task ends with the completion, or when the client is gone: then `send` fails, and
        // dropping the generation cancels it.
        tokio::spawn(async move {
            let _ = self.run(&sender).await;
        });
        Events(receiver).into_response()
    }

    async fn run(mut self, sender: &mpsc::Sender<Bytes>) -> Result<(), Gone> {
        let started = Instant::now();
        for index in 0..self.count {
            if let Some(choice) = self.chunks.begin(index) {
                self.send(sender, vec![choice]).await?;
            }
        }
        let mut has_begun = false;
        let mut left = self.count;
        loop {
            let event = tokio::select! {
                event = self.generation.next() => event,
                () = sender.closed() => return Err(Gone),
            };
            let made = match event {
                Some(GenerateEvent::Tokens { index, tokens }) => {
                    if !has_begun {
                        has_begun = true;
                        self.app.metrics.observe_first_token(started.elapsed());
                    }
                    self.chunks
                        .tokens(index, &tokens)
                        .map(|choice| choice.into_iter().collect())
                }
                Some(GenerateEvent::Finished { index, finished }) => {
                    self.app.metrics.observe_request(started.elapsed());
                    left -= 1;
                    self.usage.add(&finished);
                    self.chunks.finished(index, &finished)
                }
                Some(GenerateEvent::Failed(error)) => Err(error.into()),
                None => break,
            };
            match made {
                Ok(choices) => self.send(sender, choices).await?,
                Err(error) => return send(sender, &error.body()).await,
            }
        }
        if left > 0 {
            let error = ApiError::Internal {
                message: "the engine stopped while it served this request".to_owned(),
            };
            return send(sender, &error.body()).await;
        }
        if self.tells_usage {
            let mut chunk = self.envelope.wrap(&[]);
            chunk["usage"] = self.usage.to_json();
            send(sender, &chunk).await?;
        }
        sender
            .send(Bytes::from_static(b"data: [DONE]\n\n"))
            .await
            .map_err(|_| Gone)
    }

    async fn send(
        &mut self,
        sender: &mpsc::Sender<Bytes>,
        choices: Vec<Value>,
    ) -> Result<(), Gone> {
        for choice in choices {
            let mut chunk = self.envelope.wrap(&[choice]);
            if let Some(ids) = self.prompt_token_ids.take() {
                chunk["prompt_token_ids"] = json!(ids);
            }
            if self.tells_usage {
                chunk["usage"] = Value::Null;
            }
            send(sender, &chunk).await?;
        }
        Ok(())
    }
}

/// The client is gone.
struct Gone;

async fn send(sender: &mpsc::Sender<Bytes>, value: &Value) -> Result<(), Gone> {
    let event = Bytes::from(format!("data: {value}\n\n"));
    sender.send(event).await.map_err(|_| Gone)
}

/// The events of an answer as the body of a response.
pub(crate) struct Events(pub(crate) mpsc::Receiver<Bytes>);

impl IntoResponse for Events {
    fn into_response(self) -> Response {
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream"),
            (header::CACHE_CONTROL, "no-cache"),
        ];
        (headers, Body::from_stream(self)).into_response()
    }
}

impl Stream for Events {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|event| event.map(Ok))
    }
}

/// The text of a completion under way, as the engine reads it.
#[derive(Debug)]
pub(super) struct TextSoFar {
    stream: TextStream,
    stop_token_ids: Vec<u32>,
    min_tokens: usize,
    tokens: usize,
    is_stopped: bool,
    /// What is settled.
    pub(super) text: String,
}

impl TextSoFar {
    pub(super) fn new(tokenizer: &Tokenizer, params: &SamplingParams) -> Self {
        Self {
            stream: TextStream::new(tokenizer, &params.stop),
            stop_token_ids: params.stop_token_ids.clone(),
            min_tokens: params.min_new_tokens,
            tokens: 0,
            is_stopped: false,
            text: String::new(),
        }
    }

    pub(super) fn push(&mut self, tokens: &[GeneratedToken]) -> Result<(), EngineError> {
        for token in tokens {
            let token = token.token.token;
            self.tokens += 1;
            self.is_stopped |= self.stop_token_ids.contains(&token);
            if self.is_stopped {
                return Ok(());
            }
            if self.tokens < self.min_tokens {
                self.text += &self.stream.push_unstoppable(token)?;
            } else {
                let (text, stop) = self.stream.push(token)?;
                self.text += &text;
                self.is_stopped = stop.is_some();
            }
        }
        Ok(())
    }
}
