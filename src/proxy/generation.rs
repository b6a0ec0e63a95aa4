//! Our engine as the one who answers: prompts that go on from the ids of earlier calls, and turns.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::ProxyError;
use super::backend::{Ended, Outcome, Prepared, Told, Work, tell};
use super::dialect::Answer;
use super::history::Continued;
use super::record::{Call, CallTokens, Ending};
use super::session::{Purpose, Session};
use crate::chat::{Message, Role};
use crate::engine::{
    EngineHandle, FinishReason, Finished, GenerateEvent, GenerateRequest, Generation,
    SamplingParams, Tokenizer,
};
use crate::http::uuid4;
use crate::openai::{
    ApiError, ChatRequest, Conversation, Fields, ServedModel, TurnReader, TurnSoFar, Usage,
    all_tokens, call_json, check_length, logprobs_json,
};

/// Reads a request in the shape of chat completions for our engine.
pub(super) fn prepare(
    engine: &EngineHandle,
    model: &ServedModel,
    session: &Session,
    body: Map<String, Value>,
    is_streamed: bool,
) -> Result<Prepared, ProxyError> {
    let seed = body.get("seed").cloned();
    let mut request = ChatRequest::take(Fields::from(body))?;
    let conversation = request.conversation()?;
    if let Some(name) = conversation.forced_by() {
        let message = "what agents learn from must be the model's own: answers are not guided here";
        return Err(ProxyError::invalid(name, message));
    }
    let tools = match conversation.tools.is_empty() {
        true => Vec::new(),
        false => request.tools.clone(),
    };
    let options = &conversation.options;
    let setting = json!([tools, options.enable_thinking, options.extra]);
    let (prompt, tail) = match go_on(model, session, &setting, &request.messages, &conversation) {
        Some(prompt) => prompt,
        None => render(engine, model, &request, &conversation)?,
    };
    let common = &mut request.common;
    // Agents ask for more than there is room for, some without a choice.
    let room = engine.limits().max_context.saturating_sub(prompt.len());
    common.max_tokens = common.max_tokens.map(|tokens| tokens.min(room.max(1)));
    common.stream = is_streamed;
    common.seed = session.call_seed(&prompt).or(common.seed);
    let generate = common.request(engine, model, 1, prompt)?;
    let trainable = generate.params.check_trainable();
    let why_context = match session.options.purpose {
        Purpose::Eval => Some("the session is for evaluation".to_owned()),
        _ => trainable.err().map(|error| error.to_string()),
    };
    Ok(Prepared {
        sampling: sampling_json(&generate.params, seed),
        work: Work::Generate(Box::new(EngineCall {
            reader: TurnReader::after(&tail, model.tool_call_format, conversation.tools),
            tells_logprobs: common.top_logprobs.is_some(),
            is_trainable: why_context.is_none(),
            generate,
        })),
        messages: request.messages,
        tools,
        setting,
        why_context,
    })
}

/// Returns the ids of a whole conversation, and the text that they are of.
pub(super) fn render(
    engine: &EngineHandle,
    model: &ServedModel,
    request: &ChatRequest,
    conversation: &Conversation,
) -> Result<(Vec<u32>, String), ProxyError> {
    let Conversation {
        messages,
        tools,
        options,
        ..
    } = conversation;
    let chat = (model.template.render(messages, tools, options)).map_err(ApiError::from)?;
    check_length(engine, model, &chat.text, request.common.keys)?;
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
    let (earlier, continued): (Arc<Call>, Continued) = session.find(setting, sent)?;
    let new = conversation.messages.get(continued.messages..)?;
    let is_answer = |message: &Message| message.role == Role::Assistant;
    if new.is_empty() || new.iter().any(is_answer) {
        return None;
    }
    let tokens = earlier.tokens.as_ref()?;
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

/// A request to our engine, and how its turn is read.
pub(super) struct EngineCall {
    generate: GenerateRequest,
    reader: TurnReader,
    tells_logprobs: bool,
    is_trainable: bool,
}

impl EngineCall {
    /// Asks, and tells the text as it comes.
    pub(super) async fn answer(
        &self,
        engine: &EngineHandle,
        model: &ServedModel,
        told: &Told,
    ) -> Result<Outcome, Ended> {
        let generation = engine
            .submit(self.generate.clone())
            .map_err(ApiError::from)?;
        self.run(generation, model, told).await
    }

    async fn run(
        &self,
        mut generation: Generation,
        model: &ServedModel,
        told: &Told,
    ) -> Result<Outcome, Ended> {
        let mut so_far = TurnSoFar::new(&model.tokenizer, &self.generate.params);
        loop {
            match generation.next().await {
                Some(GenerateEvent::Tokens { tokens, .. }) => {
                    let delta = so_far.push(&self.reader, &tokens).map_err(ApiError::from)?;
                    tell(told, delta).await?;
                }
                Some(GenerateEvent::Finished { finished, .. }) => {
                    let turn = finished.text(&model.tokenizer).map_err(ApiError::from)?;
                    let rest = so_far.rest(&self.reader.read(&turn));
                    tell(told, rest).await?;
                    return Ok(self.outcome(&turn, *finished, &model.tokenizer)?);
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
        tokenizer: &Tokenizer,
    ) -> Result<Outcome, ProxyError> {
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
            prompt: self.generate.prompt.len(),
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
        let tokens = CallTokens::new(self.generate.prompt.clone(), tokens, sampled, is_target)?;
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
