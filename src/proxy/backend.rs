//! Who answers: our own engine, which goes on from the ids of earlier calls, or an upstream.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::ProxyError;
use super::dialect::Answer;
use super::generation::{self, EngineCall};
use super::session::{Purpose, Session};
use super::upstream::{Upstream, UpstreamCall};
use crate::engine::EngineHandle;
use crate::openai::{ChatRequest, Delta, Fields, ServedModel};

/// Who answers the calls.
#[derive(Debug)]
pub enum Backend {
    /// Our own engine.
    Engine {
        /// Its thread.
        engine: EngineHandle,
        /// The model that it runs.
        model: ServedModel,
    },
    /// Another server with the OpenAI API.
    Upstream(Upstream),
}

/// A request that is ready to be answered.
pub(super) struct Prepared {
    pub(super) work: Work,
    /// The conversation and the tools, in the shape of chat completions.
    pub(super) messages: Vec<Value>,
    pub(super) tools: Vec<Value>,
    /// All else that a prompt is rendered from.
    pub(super) setting: Value,
    /// How it is sampled.
    pub(super) sampling: Map<String, Value>,
    /// Why nothing is to be learned from it, where that is so.
    pub(super) why_context: Option<String>,
}

pub(super) enum Work {
    Generate(Box<EngineCall>),
    Forward(Box<UpstreamCall>),
}

/// What came of a call.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) answer: Answer,
    /// The text of the ids that the answer does not have.
    pub(super) unsaid: String,
    /// Why nothing is to be learned from it, where that is only known now.
    pub(super) why_context: Option<String>,
}

/// Where the text of an answer goes while it comes; nowhere if nobody waits for it.
pub(super) type Told = Option<mpsc::Sender<Delta>>;

/// The client is gone, or the call failed.
#[derive(Debug)]
pub(super) enum Ended {
    Gone,
    Failed(ProxyError),
}

impl<E: Into<ProxyError>> From<E> for Ended {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl Backend {
    /// Returns the name of the model.
    pub(super) fn model(&self) -> &str {
        match self {
            Self::Engine { model, .. } => &model.name,
            Self::Upstream(upstream) => upstream.model().unwrap_or("upstream"),
        }
    }

    /// Reads a request in the shape of chat completions. It takes a while where the conversation is
    /// long.
    ///
    /// `is_streamed` says whether somebody waits for the text while it comes.
    pub(super) fn prepare(
        &self,
        session: &Session,
        mut body: Map<String, Value>,
        is_streamed: bool,
    ) -> Result<Prepared, ProxyError> {
        pin(&mut body, session)?;
        body.entry("model")
            .or_insert_with(|| Value::from(self.model()));
        match body.get("n") {
            None | Some(Value::Null) => {}
            Some(n) if n.as_f64() == Some(1.0) => {}
            Some(_) => {
                let message = "only one answer a call can be captured";
                return Err(ProxyError::invalid("n", message));
            }
        }
        match self {
            Self::Engine { engine, model } => {
                generation::prepare(engine, model, session, body, is_streamed)
            }
            Self::Upstream(upstream) => prepare_forward(upstream, session, body),
        }
    }

    /// Answers a request; text goes to `told` while it comes, all of it before this returns.
    pub(super) async fn answer(&self, work: &Prepared, told: &Told) -> Result<Outcome, Ended> {
        match (self, &work.work) {
            (Self::Engine { engine, model }, Work::Generate(call)) => {
                call.answer(engine, model, told).await
            }
            (Self::Upstream(upstream), Work::Forward(call)) => upstream.answer(call, told).await,
            _ => Err(ProxyError::upstream("the work is another backend's").into()),
        }
    }

    /// Returns how many tokens a request's prompt has; about how many where only the upstream could
    /// say.
    pub(super) fn count_tokens(&self, mut body: Map<String, Value>) -> Result<usize, ProxyError> {
        body.entry("model")
            .or_insert_with(|| Value::from(self.model()));
        match self {
            Self::Engine { engine, model } => {
                let request = ChatRequest::take(Fields::from(body))?;
                let conversation = request.conversation()?;
                Ok(generation::render(engine, model, &request, &conversation)?
                    .0
                    .len())
            }
            Self::Upstream(_) => {
                let text = |name: &str| body.get(name).map_or(0, |value| value.to_string().len());
                Ok((text("messages") + text("tools")).div_ceil(4))
            }
        }
    }

    /// Returns how long a context may be, where that is known.
    pub(super) fn max_context(&self) -> Option<usize> {
        match self {
            Self::Engine { engine, .. } => Some(engine.limits().max_context),
            Self::Upstream(_) => None,
        }
    }

    /// Returns whether there is nobody left to answer.
    pub(super) fn is_stopped(&self) -> bool {
        match self {
            Self::Engine { engine, .. } => engine.status().is_stopped,
            Self::Upstream(_) => false,
        }
    }
}

/// The parameters of a model's own distribution.
const NEUTRAL: [(&str, i8); 8] = [
    ("temperature", 1),
    ("top_p", 1),
    ("top_k", -1),
    ("min_p", 0),
    ("repetition_penalty", 1),
    ("presence_penalty", 0),
    ("frequency_penalty", 0),
    ("min_tokens", 0),
];

/// Returns the parameter that draws from another distribution than the model's own, if one does.
pub(super) fn distorts(body: &Map<String, Value>) -> Option<&'static str> {
    let number = |name: &str| body.get(name).and_then(Value::as_f64);
    let bias = body.get("logit_bias").and_then(Value::as_object);
    if bias.is_some_and(|bias| !bias.is_empty()) {
        return Some("logit_bias");
    }
    NEUTRAL.into_iter().find_map(|(name, neutral)| {
        let distorts = number(name).is_some_and(|number| match name {
            "temperature" => number <= 0.0,
            "top_k" => number > 0.0,
            "top_p" => number < 1.0,
            _ => number != f64::from(neutral),
        });
        distorts.then_some(name)
    })
}

/// Puts the session's sampling in the place of the request's.
fn pin(body: &mut Map<String, Value>, session: &Session) -> Result<(), ProxyError> {
    let options = &session.options;
    if options.purpose == Purpose::Train {
        for (name, neutral) in NEUTRAL {
            body.insert(name.to_owned(), json!(neutral));
        }
        // A seed would make every episode of a group the same.
        body.remove("seed");
    }
    body.extend(options.sampling.clone());
    if options.purpose == Purpose::Train {
        let is_free = |choice: &Value| choice.as_str().is_some_and(|choice| choice != "required");
        let is_text = |format: &Value| format["type"] == "text";
        let given = |name: &str| body.get(name).filter(|value| !value.is_null());
        let forced = [
            ("logit_bias", distorts(body) == Some("logit_bias")),
            (
                "tool_choice",
                given("tool_choice").is_some_and(|choice| !is_free(choice)),
            ),
            (
                "response_format",
                given("response_format").is_some_and(|format| !is_text(format)),
            ),
        ];
        for (name, is_forced) in forced {
            if is_forced {
                let message = format!(
                    "`{name}` makes tokens that the model did not choose freely, \
                     and this session is for training"
                );
                return Err(ProxyError::invalid(name, message));
            }
        }
    }
    Ok(())
}

/// Tells more of an answer to whoever waits for it.
pub(super) async fn tell(told: &Told, delta: Delta) -> Result<(), Ended> {
    match told {
        Some(told) if delta != Delta::default() => told.send(delta).await.map_err(|_| Ended::Gone),
        _ => Ok(()),
    }
}

fn prepare_forward(
    upstream: &Upstream,
    session: &Session,
    body: Map<String, Value>,
) -> Result<Prepared, ProxyError> {
    let Some(Value::Array(messages)) = body.get("messages").cloned() else {
        return Err(ProxyError::invalid("messages", "`messages` must be a list"));
    };
    if messages.is_empty() {
        return Err(ProxyError::invalid("messages", "there is no message"));
    }
    let tools = match body.get("tools").cloned() {
        Some(Value::Array(tools)) => tools,
        _ => Vec::new(),
    };
    let setting = json!([tools, body.get("chat_template_kwargs")]);
    let why_context = match session.options.purpose {
        Purpose::Eval => Some("the session is for evaluation".to_owned()),
        _ => distorts(&body).map(|name| format!("`{name}` draws from another distribution")),
    };
    let sampling = sampling_of(&body);
    Ok(Prepared {
        work: Work::Forward(Box::new(upstream.call(body, why_context.is_none()))),
        messages,
        tools,
        setting,
        sampling,
        why_context,
    })
}

/// Returns the fields of a request that say how to sample.
pub(super) fn sampling_of(body: &Map<String, Value>) -> Map<String, Value> {
    const NAMES: [&str; 15] = [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "stop",
        "seed",
        "tool_choice",
        "response_format",
    ];
    NAMES
        .into_iter()
        .filter_map(|name| {
            let value = body.get(name).filter(|value| !value.is_null())?;
            Some((name.to_owned(), value.clone()))
        })
        .collect()
}

/// When a call came, and how long it has taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    since: Instant,
    /// In seconds since 1970.
    pub(super) started: f64,
}

impl Clock {
    pub(super) fn start() -> Self {
        let since_1970 = std::time::SystemTime::now()
            .duration_since(std::time::SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            since: Instant::now(),
            started: since_1970.as_secs_f64(),
        }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }
}
