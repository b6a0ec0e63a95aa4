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
use crate::openai::{ApiError, ChatRequest, Delta, Fields, ServedModel};

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
                name_model(&mut body, model);
                generation::prepare(engine, model, session, body, is_streamed)
            }
            // An upstream without a name of ours is asked for what the client asks for, if anything.
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
        match self {
            Self::Engine { engine, model } => {
                name_model(&mut body, model);
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

/// Names the model in a request that names none.
fn name_model(body: &mut Map<String, Value>, model: &ServedModel) {
    body.entry("model")
        .or_insert_with(|| Value::from(model.name.as_str()));
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
        let biased = distorts(body).filter(|name| *name == "logit_bias");
        if let Some(name) = biased.or_else(|| forces(body)) {
            return Err(not_free(name, Some(name)));
        }
    }
    if let Some(limit) = options.max_new_tokens {
        keep_below(body, limit);
    }
    if let Some(thinks) = options.enable_thinking {
        let arguments = body.entry("chat_template_kwargs");
        if let Some(arguments) = arguments.or_insert_with(|| json!({})).as_object_mut() {
            arguments.entry("enable_thinking").or_insert(thinks.into());
        }
    }
    Ok(())
}

fn not_free(name: &str, param: Option<&'static str>) -> ProxyError {
    let message = format!(
        "`{name}` makes tokens that the model did not choose freely, and this session is for training"
    );
    ProxyError::Request(ApiError::Invalid {
        message,
        param,
        code: None,
    })
}

/// Returns the field that leaves the model no free choice of tokens, if one does.
fn forces(body: &Map<String, Value>) -> Option<&'static str> {
    let given = |name: &str| body.get(name).filter(|value| !value.is_null());
    let is_free = |choice: &Value| choice.as_str().is_some_and(|choice| choice != "required");
    if given("tool_choice").is_some_and(|choice| !is_free(choice)) {
        return Some("tool_choice");
    }
    given("response_format")
        .is_some_and(|format| format["type"] != "text")
        .then_some("response_format")
}

/// Lets an answer have no more than `limit` tokens.
fn keep_below(body: &mut Map<String, Value>, limit: usize) {
    let mut is_given = false;
    for name in ["max_tokens", "max_completion_tokens"] {
        if let Some(asked) = body.get_mut(name).filter(|asked| !asked.is_null()) {
            is_given = true;
            if asked.as_f64().is_some_and(|asked| asked > limit as f64) {
                *asked = limit.into();
            }
        }
    }
    if !is_given {
        body.insert("max_tokens".to_owned(), limit.into());
    }
}

/// Fields of a request to another server that leave what it samples to the model. Of any other, such as
/// those by which vLLM guides what is generated, nobody here knows.
const FREE: [&str; 46] = [
    "add_generation_prompt",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "frequency_penalty",
    "include_reasoning",
    "include_stop_str_in_output",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "min_p",
    "min_tokens",
    "model",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "repetition_penalty",
    "request_id",
    "response_format",
    "return_token_ids",
    "safety_identifier",
    "seed",
    "service_tier",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "tools",
    "top_k",
    "top_logprobs",
    "top_p",
    "user",
    "verbosity",
];

/// Returns a field whose effect on what is sampled is not known, if there is one.
fn unknown(body: &Map<String, Value>) -> Option<&str> {
    let mut given = body.iter().filter(|(_, value)| !value.is_null());
    given.find_map(|(name, _)| (!FREE.contains(&name.as_str())).then_some(name.as_str()))
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
    mut body: Map<String, Value>,
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
    let forced = forces(&body);
    let constrained = forced.or_else(|| unknown(&body));
    let why_context = match (session.options.purpose, constrained) {
        (Purpose::Eval, _) => Some("the session is for evaluation".to_owned()),
        (Purpose::Train, Some(name)) => return Err(not_free(name, forced)),
        (_, Some(name)) => Some(format!("`{name}` may not leave the model a free choice")),
        _ => distorts(&body).map(|name| format!("`{name}` draws from another distribution")),
    };
    if why_context.is_none() && upstream.asks_for_ids() {
        // Left out, the server may put in what it has for the model, which is no longer the model's own.
        for (name, neutral) in NEUTRAL {
            body.entry(name).or_insert(neutral.into());
        }
    }
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
