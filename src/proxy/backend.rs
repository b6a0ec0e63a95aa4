//! Who answers: our own engine, which goes on from the ids of earlier calls, or an upstream.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::ProxyError;
use super::dialect::Answer;
use super::history::Continued;
use super::record::{Call, CallTokens, Ending};
use super::session::{Purpose, Session};
use super::upstream::{Upstream, UpstreamCall};
use crate::chat::{Message, Role};
use crate::engine::{
    EngineHandle, FinishReason, Finished, GenerateEvent, GenerateRequest, Generation,
    SamplingParams,
};
use crate::http::uuid4;
use crate::openai::{
    ApiError, ChatRequest, Conversation, Delta, Fields, ServedModel, TurnReader, TurnSoFar, Usage,
    all_tokens, call_json, logprobs_json,
};

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
    work: Work,
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

enum Work {
    Generate {
        generate: Box<GenerateRequest>,
        reader: TurnReader,
        tells_logprobs: bool,
    },
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
                prepare_generation(engine, model, session, body, is_streamed)
            }
            Self::Upstream(upstream) => prepare_forward(upstream, session, body),
        }
    }

    /// Answers a request; text goes to `told` while it comes, all of it before this returns.
    pub(super) async fn answer(&self, work: &mut Prepared, told: &Told) -> Result<Outcome, Ended> {
        match (self, &mut work.work) {
            (
                Self::Engine { engine, model },
                Work::Generate {
                    generate,
                    reader,
                    tells_logprobs,
                },
            ) => {
                let is_trainable = work.why_context.is_none();
                let generation = engine
                    .submit((**generate).clone())
                    .map_err(ApiError::from)?;
                let turn = Turn {
                    model,
                    reader,
                    tells_logprobs: *tells_logprobs,
                    is_trainable,
                };
                turn.run(generation, generate, told).await
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
            Self::Engine { model, .. } => {
                let request = ChatRequest::take(Fields::from(body))?;
                let conversation = request.conversation()?;
                Ok(render(model, &conversation)?.0.len())
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

fn prepare_generation(
    engine: &EngineHandle,
    model: &ServedModel,
    session: &Session,
    body: Map<String, Value>,
    is_streamed: bool,
) -> Result<Prepared, ProxyError> {
    let seed = body.get("seed").cloned();
    let mut request = ChatRequest::take(Fields::from(body))?;
    let conversation = request.conversation()?;
    let tools = match conversation.tools.is_empty() {
        true => Vec::new(),
        false => request.tools.clone(),
    };
    let options = &conversation.options;
    let setting = json!([tools, options.enable_thinking, options.extra]);
    let (prompt, tail) = match go_on(model, session, &setting, &request.messages, &conversation) {
        Some(prompt) => prompt,
        None => render(model, &conversation)?,
    };
    let common = &mut request.common;
    // Agents ask for more than there is room for, some without a choice.
    let room = engine.limits().max_context.saturating_sub(prompt.len());
    common.max_tokens = common.max_tokens.map(|tokens| tokens.min(room.max(1)));
    common.stream = is_streamed;
    let generate = common.request(engine, model, 1, prompt)?;
    let trainable = generate.params.check_trainable();
    let why_context = match session.options.purpose {
        Purpose::Eval => Some("the session is for evaluation".to_owned()),
        _ => trainable.err().map(|error| error.to_string()),
    };
    Ok(Prepared {
        sampling: sampling_json(&generate.params, seed),
        work: Work::Generate {
            reader: TurnReader::after(&tail, model.tool_call_format, conversation.tools),
            tells_logprobs: common.top_logprobs.is_some(),
            generate: Box::new(generate),
        },
        messages: request.messages,
        tools,
        setting,
        why_context,
    })
}

/// Returns the ids of a whole conversation, and the text that they are of.
fn render(
    model: &ServedModel,
    conversation: &Conversation,
) -> Result<(Vec<u32>, String), ProxyError> {
    let Conversation {
        messages,
        tools,
        options,
    } = conversation;
    let chat = (model.template.render(messages, tools, options)).map_err(ApiError::from)?;
    let ids = (model.tokenizer.encode_chat(&chat.text, &chat.literal)).map_err(ApiError::from)?;
    Ok((ids, chat.text))
}

/// Returns the ids of an earlier call and of what was said since, and the text of the latter; none
/// where the conversation goes on from no call, or where the template writes what was said before anew.
fn go_on(
    model: &ServedModel,
    session: &Session,
    setting: &Value,
    sent: &[Value],
    conversation: &Conversation,
) -> Option<(Vec<u32>, String)> {
    let (earlier, continued): (Call, Continued) = session.find(setting, sent)?;
    let new = conversation.messages.get(continued.messages..)?;
    let is_answer = |message: &Message| message.role == Role::Assistant;
    if new.is_empty() || new.iter().any(is_answer) {
        return None;
    }
    let tokens = earlier.tokens?;
    let end_of_turn = model.tokenizer.eos_token()?;
    let end = model.tokenizer.token_to_id(end_of_turn)?;
    let suffix = (model.template)
        .tool_suffix(new, &conversation.tools, end_of_turn, &conversation.options)
        .ok()?;
    let mut ids = [tokens.prompt(), tokens.completion()].concat();
    match tokens.completion().last() {
        Some(&last) if last == end && continued.added.is_empty() => {}
        // Another token that ends turns: the template goes on from its own.
        Some(last) if model.stop_token_ids.contains(last) => return None,
        // The answer was cut off; it is closed for it, after what its agent added.
        _ => {
            ids.extend(model.tokenizer.encode_ordinary(&continued.added).ok()?);
            ids.push(end);
        }
    }
    ids.extend((model.tokenizer.encode_chat(&suffix.text, &suffix.literal)).ok()?);
    Some((ids, suffix.text))
}

fn sampling_json(params: &SamplingParams, seed: Option<Value>) -> Map<String, Value> {
    let mut sampling = Map::new();
    let mut tell = |name: &str, value: Value| sampling.insert(name.to_owned(), value);
    tell("temperature", json!(params.temperature));
    tell("top_p", json!(params.top_p));
    tell("top_k", json!(params.top_k));
    tell("min_p", json!(params.min_p));
    tell("repetition_penalty", json!(params.repetition_penalty));
    tell("presence_penalty", json!(params.presence_penalty));
    tell("frequency_penalty", json!(params.frequency_penalty));
    tell("max_tokens", json!(params.max_new_tokens));
    tell("min_tokens", json!(params.min_new_tokens));
    tell("stop", json!(params.stop));
    if !params.logit_bias.is_empty() {
        tell("logit_bias", json!(params.logit_bias));
    }
    if let Some(seed) = seed {
        tell("seed", seed);
    }
    sampling
}

/// One turn of our engine.
struct Turn<'a> {
    model: &'a ServedModel,
    reader: &'a TurnReader,
    tells_logprobs: bool,
    is_trainable: bool,
}

impl Turn<'_> {
    async fn run(
        &self,
        mut generation: Generation,
        generate: &GenerateRequest,
        told: &Told,
    ) -> Result<Outcome, Ended> {
        let mut so_far = TurnSoFar::new(&self.model.tokenizer, &generate.params);
        loop {
            match generation.next().await {
                Some(GenerateEvent::Tokens { tokens, .. }) => {
                    let delta = so_far.push(self.reader, &tokens).map_err(ApiError::from)?;
                    tell(told, delta).await?;
                }
                Some(GenerateEvent::Finished { finished, .. }) => {
                    let turn = finished
                        .text(&self.model.tokenizer)
                        .map_err(ApiError::from)?;
                    let rest = so_far.rest(&self.reader.read(&turn));
                    tell(told, rest).await?;
                    return Ok(self.outcome(&turn, *finished, generate)?);
                }
                Some(GenerateEvent::Failed(error)) => return Err(ApiError::from(error).into()),
                None => {
                    let message = "the engine stopped while it served this request".to_owned();
                    return Err(ApiError::Internal { message }.into());
                }
            }
        }
    }

    fn outcome(
        &self,
        text: &str,
        finished: Finished,
        generate: &GenerateRequest,
    ) -> Result<Outcome, ProxyError> {
        let tokenizer = &self.model.tokenizer;
        let turn = self.reader.read(text);
        let has_calls = !turn.tool_calls.is_empty();
        let content = match turn.content.is_empty() && has_calls {
            true => Value::Null,
            false => Value::from(turn.content),
        };
        let mut message = json!({"role": "assistant", "content": content});
        if let Some(reasoning) = turn.reasoning.filter(|reasoning| !reasoning.is_empty()) {
            message["reasoning_content"] = Value::from(reasoning);
        }
        if has_calls {
            let call = |call| call_json(call, &format!("call_{}", uuid4().replace('-', "")));
            message["tool_calls"] = turn.tool_calls.iter().map(call).collect();
        }
        let mut unsaid = String::new();
        let ending = match (finished.finish_reason, &finished.stop_text) {
            (FinishReason::Length, _) => Ending::Length,
            (_, Some(stop)) => {
                let whole = tokenizer.decode(&finished.tokens).map_err(ApiError::from)?;
                let at = whole.floor_char_boundary(stop.at);
                unsaid = whole[at..].to_owned();
                match has_calls {
                    true => Ending::ToolCalls,
                    false => Ending::StopText(stop.text.clone()),
                }
            }
            _ if has_calls => Ending::ToolCalls,
            _ => Ending::Stop,
        };
        let logprobs = match self.tells_logprobs {
            true => logprobs_json(tokenizer, &all_tokens(&finished)),
            false => Value::Null,
        };
        let mut usage = Usage {
            prompt: generate.prompt.len(),
            ..Usage::default()
        };
        usage.add(&finished);
        let Finished {
            tokens,
            logprobs: sampled,
            is_sampled,
            ..
        } = finished;
        let is_target = |at: usize| self.is_trainable && is_sampled.get(at) == Some(&true);
        let tokens = CallTokens::new(generate.prompt.clone(), tokens, sampled, is_target)?;
        Ok(Outcome {
            answer: Answer {
                message,
                ending,
                usage,
                tokens: Some(tokens),
                logprobs,
            },
            unsaid,
            why_context: None,
        })
    }
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
