//! Another server with the OpenAI API as the one who answers: vLLM, `wardian serve`, a gateway
//! in front of them.
//!
//! It is asked for its ids (`return_token_ids`, `logprobs`). What it says is bounded in bytes, in values
//! and in time, and checked: ids and log-probabilities must be as many as each other and as it counts. It is
//! not trusted to keep its own rules, only to answer.

mod answer;
mod sse;
mod tls;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::sync::{Semaphore, mpsc};

use self::answer::{Assembled, check_values, message_and_code, read};
use self::tls::tls_config;
use super::ProxyError;
use super::backend::{Ended, Outcome, Told, tell};
use super::dialect::Answer;
use super::record::Ending;
use crate::address::shown;
use crate::engine::BusyError;
use crate::http::asked_pause;
use crate::http::tls::{Credentials, Reloading, TlsError, TlsFiles};
use crate::openai::{ApiError, Delta};

#[cfg(any(fuzzing, test))]
pub use self::sse::fuzz_sse;
pub use self::sse::{SseError, SseEvent, SseParser};

/// Statuses whose message is the client's business.
const REFUSALS: [u16; 4] = [400, 413, 422, 429];

/// The longest message of an upstream that is passed on, in characters.
const MAX_MESSAGE: usize = 1000;

/// Most JSON values of an answer without ids.
const MAX_VALUES: usize = 1 << 18;

/// Most JSON values of an answer with ids and log-probabilities, which tell each token in some sixteen.
const MAX_VALUES_WITH_IDS: usize = 1 << 21;

/// Most JSON values of a list of models.
const MAX_MODEL_VALUES: usize = 1 << 16;

/// Pieces of an answer that wait for a slow client.
const WAITING: usize = 64;

/// Where the upstream is and how it is asked.
#[derive(Clone)]
pub struct UpstreamConfig {
    /// Its address, up to and with `/v1`.
    pub url: String,
    /// The model that it is asked for, in the place of the clients'; none passes theirs on.
    pub model: Option<String>,
    /// Sent as `Authorization: Bearer`.
    pub api_key: Option<String>,
    /// Whom it must be, and what it is shown, where its address is `https`. Default: the roots of the web,
    /// and nothing.
    pub tls: TlsFiles,
    /// Whether it is asked to stream its answers. Some versions of vLLM lose ids when they stream
    /// tool calls. Default: false.
    pub is_streamed: bool,
    /// Whether it is asked for ids and log-probabilities; a server that knows no such fields may
    /// refuse them. Default: true.
    pub asks_for_ids: bool,
    /// The longest that an answer may take. Default: 10 min.
    pub timeout: Duration,
    /// The longest that it may say nothing while it streams. Default: 2 min.
    pub stall_timeout: Duration,
    /// Most bytes of an answer. Default: 64 MiB.
    pub max_response_bytes: usize,
    /// Calls at a time; more are told to come back. Default: 256.
    pub max_calls: usize,
}

impl UpstreamConfig {
    /// Returns the settings for the server at `url`.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            model: None,
            api_key: None,
            tls: TlsFiles::default(),
            is_streamed: false,
            asks_for_ids: true,
            timeout: Duration::from_mins(10),
            stall_timeout: Duration::from_mins(2),
            max_response_bytes: 64 << 20,
            max_calls: 256,
        }
    }
}

impl fmt::Debug for UpstreamConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key stays out of every log.
        f.debug_struct("UpstreamConfig")
            .field("url", &shown(&self.url))
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

/// A server that answers.
#[derive(Debug, Clone)]
pub struct Upstream {
    config: Arc<UpstreamConfig>,
    agent: Arc<Reloading<ureq::Agent>>,
    slots: Arc<Semaphore>,
}

/// A request to the upstream.
#[derive(Debug, Clone)]
pub(super) struct UpstreamCall {
    body: Map<String, Value>,
    tells_logprobs: bool,
    is_trainable: bool,
}

/// What an upstream answered, without its ids.
#[derive(Debug, Clone)]
pub struct Completion {
    /// The message, in the shape of chat completions; arguments of calls are text.
    pub message: Value,
    /// How it ended.
    pub ending: Ending,
    /// Tokens of the prompt and of the answer, as the upstream counts them, if it does.
    pub tokens: Option<(usize, usize)>,
}

enum Said {
    /// More of the answer, or a sign of life.
    More(Delta),
    Done(Result<Box<Outcome>, ProxyError>),
}

impl Upstream {
    /// Prepares to ask the server.
    ///
    /// # Errors
    ///
    /// Fails where the files for TLS cannot be used.
    pub fn new(config: UpstreamConfig) -> Result<Self, TlsError> {
        let quiet = match config.is_streamed {
            true => config.stall_timeout,
            false => config.timeout,
        };
        let timeout = config.timeout;
        // Past TLS a proxy of the environment's sees nothing; without it, it would read the key.
        let is_encrypted = config.url.starts_with("https://");
        let make = move |credentials: &Credentials| {
            let proxy = is_encrypted.then(ureq::Proxy::try_from_env).flatten();
            let agent = ureq::Agent::config_builder()
                .tls_config(tls_config(credentials)?)
                .proxy(proxy)
                .timeout_global(Some(timeout))
                .timeout_per_read(Some(quiet))
                .timeout_connect(Some(Duration::from_secs(10)))
                .http_status_as_error(false)
                // A key is for one server.
                .max_redirects(0)
                .build();
            Ok(ureq::Agent::new_with_config(agent))
        };
        Ok(Self {
            agent: Arc::new(Reloading::new(config.tls.clone(), make)?),
            slots: Arc::new(Semaphore::new(config.max_calls.min(Semaphore::MAX_PERMITS))),
            config: Arc::new(config),
        })
    }

    pub(super) fn asks_for_ids(&self) -> bool {
        self.config.asks_for_ids
    }

    pub(super) fn model(&self) -> Option<&str> {
        self.config.model.as_deref()
    }

    /// Makes the request of a client one for the upstream.
    pub(super) fn call(&self, mut body: Map<String, Value>, is_trainable: bool) -> UpstreamCall {
        let tells_logprobs = body.get("logprobs") == Some(&Value::Bool(true));
        let mut set = |name: &str, value: Value| body.insert(name.to_owned(), value);
        if let Some(model) = &self.config.model {
            set("model", Value::from(model.as_str()));
        }
        if self.config.asks_for_ids {
            set("return_token_ids", Value::Bool(true));
            set("logprobs", Value::Bool(true));
        }
        set("stream", Value::Bool(self.config.is_streamed));
        if self.config.is_streamed {
            set("stream_options", json!({"include_usage": true}));
        }
        UpstreamCall {
            body,
            tells_logprobs,
            is_trainable,
        }
    }

    /// Asks, and tells the text as it comes.
    pub(super) async fn answer(&self, call: &UpstreamCall, told: &Told) -> Result<Outcome, Ended> {
        let slot = Arc::clone(&self.slots).try_acquire_owned().map_err(|_| {
            ApiError::from(BusyError::Full {
                asked: 1,
                limit: self.config.max_calls,
            })
        })?;
        let (sender, mut receiver) = mpsc::channel(WAITING);
        let (agent, config) = (Arc::clone(&self.agent), Arc::clone(&self.config));
        let call = call.clone();
        // Whoever waits no longer drops the receiver, which ends this at the upstream's next word.
        tokio::task::spawn_blocking(move || {
            let exchange = Exchange {
                config: &config,
                call: &call,
                sender: Some(&sender),
            };
            let done = exchange.run(&agent.current()).map(Box::new);
            let _ = sender.blocking_send(Said::Done(done));
            drop(slot);
        });
        loop {
            match receiver.recv().await {
                Some(Said::More(delta)) => tell(told, delta).await?,
                Some(Said::Done(done)) => return Ok(*done?),
                None => return Err(ProxyError::upstream("the exchange with it broke off").into()),
            }
        }
    }

    /// Asks, and waits for the whole answer on this thread; `body` is a request in the shape of chat
    /// completions.
    ///
    /// # Errors
    ///
    /// Fails where the upstream does not answer, refuses, or says what cannot be read.
    pub fn complete(&self, body: Map<String, Value>) -> Result<Completion, ProxyError> {
        let call = self.call(body, false);
        let exchange = Exchange {
            config: &self.config,
            call: &call,
            sender: None,
        };
        let Answer {
            message,
            ending,
            usage,
            ..
        } = exchange.run(&self.agent.current())?.answer;
        Ok(Completion {
            message,
            ending,
            // No prompt is empty: this one was not counted.
            tokens: (usage.prompt > 0).then_some((usage.prompt, usage.completion)),
        })
    }

    /// Returns the upstream's own list of models; waits for it on this thread.
    ///
    /// # Errors
    ///
    /// Fails where the upstream does not answer with JSON.
    pub fn list_models(&self) -> Result<Value, ProxyError> {
        let config = &self.config;
        let url = format!("{}/models", config.url.trim_end_matches('/'));
        let mut request = self.agent.current().get(url);
        if let Some(key) = &config.api_key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let mut response = request.call().map_err(|error| failed(error, config))?;
        let status = response.status().as_u16();
        if status != 200 {
            return Err(ProxyError::Unavailable {
                status,
                retry_after: asked_pause(response.headers()),
            });
        }
        let body = response
            .body_mut()
            .with_config()
            .limit(1 << 20)
            .read_to_vec();
        let body = body.map_err(|error| failed(error, config))?;
        check_values(&body, MAX_MODEL_VALUES)?;
        serde_json::from_slice(&body)
            .map_err(|error| ProxyError::upstream(format!("its models are no JSON: {error}")))
    }

    /// Does what [`Upstream::list_models`] does, and waits elsewhere.
    pub(super) async fn models(&self) -> Result<Value, ProxyError> {
        let upstream = self.clone();
        tokio::task::spawn_blocking(move || upstream.list_models())
            .await
            .map_err(|error| ProxyError::upstream(error.to_string()))?
    }
}

/// One request and its answer, on a thread that may wait.
struct Exchange<'a> {
    config: &'a UpstreamConfig,
    call: &'a UpstreamCall,
    /// Where the text goes while it comes; nowhere if it is waited for whole.
    sender: Option<&'a mpsc::Sender<Said>>,
}

impl Exchange<'_> {
    fn run(&self, agent: &ureq::Agent) -> Result<Outcome, ProxyError> {
        let url = format!("{}/chat/completions", self.config.url.trim_end_matches('/'));
        let mut request = agent.post(url).content_type("application/json");
        if let Some(key) = &self.config.api_key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let body = Value::Object(self.call.body.clone()).to_string();
        let mut response = request.send(body).map_err(|error| self.failed(error))?;
        let status = response.status().as_u16();
        let retry_after = asked_pause(response.headers());
        let limit = self.config.max_response_bytes as u64;
        let is_stream = response.body().mime_type() == Some("text/event-stream");
        let mut body = response.body_mut().with_config().limit(limit);
        if status == 200 && is_stream {
            return self.read_stream(&mut body.reader());
        }
        if status != 200 {
            body = body.limit(limit.min(1 << 20));
        }
        let body = body.read_to_vec().map_err(|error| self.failed(error))?;
        if status != 200 {
            return Err(refused(status, retry_after, &body));
        }
        check_values(&body, self.max_values())?;
        let whole: Value = serde_json::from_slice(&body)
            .map_err(|error| ProxyError::upstream(format!("its answer is no JSON: {error}")))?;
        let outcome = self.read(&whole)?;
        let text = |key: &str| outcome.answer.text(key).to_owned();
        self.tell(Delta {
            reasoning: text("reasoning_content"),
            content: text("content"),
        })?;
        Ok(outcome)
    }

    fn read_stream(&self, body: &mut dyn std::io::Read) -> Result<Outcome, ProxyError> {
        let broken = |error: SseError| ProxyError::upstream(format!("its stream: {error}"));
        let mut parser = SseParser::new(self.config.max_response_bytes);
        let mut assembled = Assembled::new(self.max_values());
        let mut buffer = vec![0; 16 << 10];
        let (mut left, mut is_done) = (self.config.max_response_bytes, false);
        while !is_done {
            let read = body
                .read(&mut buffer)
                .map_err(|error| self.io_failed(error))?;
            if read == 0 {
                break;
            }
            left = left.checked_sub(read).ok_or_else(|| self.too_long())?;
            let mut delta = Delta::default();
            for event in parser.push(&buffer[..read]).map_err(broken)? {
                is_done |= assembled.push(&event, &mut delta)?;
            }
            self.tell(delta)?;
        }
        if !is_done {
            parser.finish().map_err(broken)?;
        }
        self.read(&assembled.whole()?)
    }

    fn read(&self, whole: &Value) -> Result<Outcome, ProxyError> {
        let mut outcome = read(whole, self.call.is_trainable)?;
        if !self.call.tells_logprobs {
            outcome.answer.logprobs = Value::Null;
        }
        Ok(outcome)
    }

    /// Passes on what came; fails when nobody waits for it.
    fn tell(&self, delta: Delta) -> Result<(), ProxyError> {
        let Some(sender) = self.sender else {
            return Ok(());
        };
        sender
            .blocking_send(Said::More(delta))
            .map_err(|_| ProxyError::upstream("nobody waits for its answer"))
    }

    fn max_values(&self) -> usize {
        match self.config.asks_for_ids || self.call.tells_logprobs {
            true => MAX_VALUES_WITH_IDS,
            false => MAX_VALUES,
        }
    }

    fn too_long(&self) -> ProxyError {
        let limit = self.config.max_response_bytes;
        ProxyError::upstream(format!("its answer has more than {limit} bytes"))
    }

    fn failed(&self, error: ureq::Error) -> ProxyError {
        failed(error, self.config)
    }

    fn io_failed(&self, error: std::io::Error) -> ProxyError {
        self.failed(ureq::Error::from(error))
    }
}

fn failed(error: ureq::Error, config: &UpstreamConfig) -> ProxyError {
    match error {
        ureq::Error::Timeout(ureq::Timeout::Global) => ProxyError::Stalled {
            waited: config.timeout,
        },
        ureq::Error::Timeout(ureq::Timeout::Connect) => {
            ProxyError::upstream("it could not be reached in time")
        }
        ureq::Error::Timeout(_) => ProxyError::Stalled {
            waited: match config.is_streamed {
                true => config.stall_timeout,
                false => config.timeout,
            },
        },
        ureq::Error::BodyExceedsLimit(limit) => {
            ProxyError::upstream(format!("its answer has more than {limit} bytes"))
        }
        ureq::Error::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            ProxyError::upstream(format!("it cannot be reached: {error}"))
        }
        error @ (ureq::Error::HostNotFound | ureq::Error::ConnectionFailed) => {
            ProxyError::upstream(format!("it cannot be reached: {error}"))
        }
        error => ProxyError::upstream(error.to_string()),
    }
}

/// Returns the error of a response that is none. Only what the client can do something about is told
/// in the upstream's words: others may hold what is not the client's, such as a part of our key.
fn refused(status: u16, retry_after: Option<Duration>, body: &[u8]) -> ProxyError {
    if !REFUSALS.contains(&status) {
        return ProxyError::Unavailable {
            status,
            retry_after,
        };
    }
    let (message, code) = message_and_code(body);
    let bounded = |text: String| text.chars().take(MAX_MESSAGE).collect();
    ProxyError::Refused {
        status,
        message: bounded(message),
        code: code.map(bounded),
        retry_after,
    }
}
