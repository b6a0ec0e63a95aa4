//! An upstream's answer, whole or in chunks, checked.

use serde_json::{Map, Value, json};

use super::super::ProxyError;
use super::super::backend::Outcome;
use super::super::dialect::Answer;
use super::super::record::{CallTokens, Ending};
use super::sse::SseEvent;
use crate::http::count_values;
use crate::openai::{Delta, Usage};

/// Most tool calls of an answer.
const MAX_CALLS: usize = 256;

/// Most JSON values of an error that is made sense of.
const MAX_ERROR_VALUES: usize = 1 << 12;

fn broken(what: impl Into<String>) -> ProxyError {
    ProxyError::upstream(what)
}

/// Refuses JSON that would take far more memory than its text.
pub(super) fn check_values(text: &[u8], limit: usize) -> Result<(), ProxyError> {
    match count_values(text) > limit {
        true => Err(too_many_values(limit)),
        false => Ok(()),
    }
}

fn too_many_values(limit: usize) -> ProxyError {
    broken(format!("its answer has more than {limit} JSON values"))
}

/// Reads a chat completion.
pub(super) fn read(whole: &Value, is_trainable: bool) -> Result<Outcome, ProxyError> {
    let choice = match whole["choices"].as_array().map(Vec::as_slice) {
        Some([choice]) => choice,
        Some(choices) => return Err(broken(format!("it gave {} choices, not 1", choices.len()))),
        None => return Err(broken("its answer has no list of `choices`")),
    };
    let message = read_message(&choice["message"])?;
    let has_calls = message.get("tool_calls").is_some();
    let ending = match choice["finish_reason"].as_str() {
        Some("length") => Ending::Length,
        Some(_) if has_calls => Ending::ToolCalls,
        Some(_) => match choice["stop_reason"].as_str() {
            Some(stop) => Ending::StopText(stop.to_owned()),
            None => Ending::Stop,
        },
        None => return Err(broken("its answer has no `finish_reason`")),
    };
    let prompt = match ids(&whole["prompt_token_ids"], "prompt_token_ids")? {
        Some(prompt) => Some(prompt),
        None => ids(&choice["prompt_token_ids"], "prompt_token_ids")?,
    };
    let completion = ids(&choice["token_ids"], "token_ids")?;
    let logprobs = logprobs(&choice["logprobs"])?;
    let usage = &whole["usage"];
    let counted = (
        count(&usage["prompt_tokens"])?,
        count(&usage["completion_tokens"])?,
    );
    for (what, ids, counted) in [
        ("the prompt", &prompt, counted.0),
        ("the answer", &completion, counted.1),
    ] {
        if let (Some(ids), Some(counted)) = (ids, counted)
            && ids.len() != counted
        {
            let told = ids.len();
            return Err(broken(format!(
                "it told {told} ids of {what} and counted {counted}"
            )));
        }
    }
    let told = (
        prompt.as_ref().map_or(0, Vec::len),
        completion.as_ref().map_or(0, Vec::len),
    );
    let (tokens, why_context) = match (prompt, completion, logprobs) {
        (Some(prompt), Some(completion), Some(logprobs)) => {
            let tokens = CallTokens::new(prompt, completion, logprobs, |_| is_trainable)?;
            (Some(tokens), None)
        }
        (Some(prompt), Some(completion), None) => {
            let why = "the upstream told no log-probabilities";
            (Some(CallTokens::context(prompt, completion)), Some(why))
        }
        _ => (None, Some("the upstream told no token ids")),
    };
    let prompt = counted.0.unwrap_or(told.0);
    let cached = count(&usage["prompt_tokens_details"]["cached_tokens"])?;
    Ok(Outcome {
        answer: Answer {
            message,
            ending,
            usage: Usage {
                prompt,
                completion: counted.1.unwrap_or(told.1),
                cached: cached.unwrap_or(0).min(prompt),
            },
            tokens,
            logprobs: choice["logprobs"].clone(),
        },
        unsaid: String::new(),
        why_context: why_context.map(str::to_owned),
    })
}

/// Returns a count of tokens, if it is told.
fn count(told: &Value) -> Result<Option<usize>, ProxyError> {
    match told.as_u64().map(u32::try_from) {
        None => Ok(None),
        Some(Ok(count)) => Ok(usize::try_from(count).ok()),
        Some(Err(_)) => Err(broken(format!("it counted {told} tokens"))),
    }
}

/// Returns what of a message an answer is made of.
fn read_message(message: &Value) -> Result<Value, ProxyError> {
    let fields = message
        .as_object()
        .ok_or_else(|| broken("its answer has no `message`"))?;
    let text = |name: &str| match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str())),
        Some(_) => Err(broken(format!("the `{name}` of its answer is no string"))),
    };
    let mut read = json!({"role": "assistant", "content": text("content")?});
    let reasoning = match text("reasoning_content")? {
        Some(reasoning) => Some(reasoning),
        None => text("reasoning")?,
    };
    if let Some(reasoning) = reasoning.filter(|reasoning| !reasoning.is_empty()) {
        read["reasoning_content"] = Value::from(reasoning);
    }
    let calls = match fields.get("tool_calls") {
        None | Some(Value::Null) => return Ok(read),
        Some(Value::Array(calls)) => calls,
        Some(_) => return Err(broken("the `tool_calls` of its answer are no list")),
    };
    if calls.is_empty() {
        return Ok(read);
    }
    let call = |call: &Value| {
        let function = &call["function"];
        let (name, arguments) = (function["name"].as_str()?, function["arguments"].as_str()?);
        Some(json!({
            "id": call["id"].as_str().unwrap_or_default(),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }))
    };
    let calls: Option<Vec<Value>> = calls.iter().map(call).collect();
    let calls =
        calls.ok_or_else(|| broken("a tool call of its answer has no name or arguments"))?;
    read["tool_calls"] = Value::from(calls);
    Ok(read)
}

fn ids(value: &Value, name: &str) -> Result<Option<Vec<u32>>, ProxyError> {
    match value {
        Value::Null => Ok(None),
        Value::Array(ids) => ids
            .iter()
            .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
            .collect::<Option<Vec<u32>>>()
            .map(Some)
            .ok_or_else(|| broken(format!("`{name}` of its answer holds what is no token id"))),
        _ => Err(broken(format!("`{name}` of its answer is no list"))),
    }
}

fn logprobs(value: &Value) -> Result<Option<Vec<f32>>, ProxyError> {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "log-probabilities are kept in single precision; what is out of range is refused later"
    )]
    let read = |entry: &Value| entry["logprob"].as_f64().map(|logprob| logprob as f32);
    match &value["content"] {
        Value::Array(entries) => entries
            .iter()
            .map(read)
            .collect::<Option<Vec<f32>>>()
            .map(Some)
            .ok_or_else(|| broken("a log-probability of its answer is no number")),
        _ => Ok(None),
    }
}

#[derive(Debug, Default)]
struct CallSoFar {
    id: String,
    name: String,
    arguments: String,
}

/// A chat completion that comes in chunks.
#[derive(Debug, Default)]
pub(super) struct Assembled {
    content: Option<String>,
    reasoning: Option<String>,
    calls: Vec<CallSoFar>,
    finish_reason: Value,
    stop_reason: Value,
    prompt_token_ids: Value,
    token_ids: Option<Vec<Value>>,
    logprobs: Option<Vec<Value>>,
    usage: Value,
    has_begun: bool,
    /// Values that may still be kept of ids and log-probabilities.
    values_left: usize,
    max_values: usize,
}

impl Assembled {
    /// Takes a completion of at most so many JSON values.
    pub(super) fn new(max_values: usize) -> Self {
        Self {
            values_left: max_values,
            max_values,
            ..Self::default()
        }
    }

    /// Takes an event; adds the new text to `delta`. Returns whether it was the last one.
    pub(super) fn push(&mut self, event: &SseEvent, delta: &mut Delta) -> Result<bool, ProxyError> {
        let data = event.data.trim();
        if data == "[DONE]" {
            return Ok(true);
        }
        check_values(data.as_bytes(), self.max_values)?;
        let chunk: Value = serde_json::from_str(data)
            .map_err(|error| broken(format!("an event of its stream is no JSON: {error}")))?;
        let Value::Object(mut chunk) = chunk else {
            return Err(broken("an event of its stream is no object"));
        };
        if chunk.get("error").is_some_and(|error| !error.is_null()) || event.name == "error" {
            let message: String = message_of(data.as_bytes()).chars().take(200).collect();
            return Err(broken(format!("its stream ended in an error: {message}")));
        }
        keep(&mut self.usage, &mut chunk, "usage");
        keep(&mut self.prompt_token_ids, &mut chunk, "prompt_token_ids");
        let Some(Value::Array(choices)) = chunk.remove("choices") else {
            return Err(broken("an event of its stream has no list of `choices`"));
        };
        for choice in choices {
            let Value::Object(choice) = choice else {
                return Err(broken("a choice of its stream is no object"));
            };
            self.push_choice(choice, delta)?;
        }
        Ok(false)
    }

    fn push_choice(
        &mut self,
        mut choice: Map<String, Value>,
        delta: &mut Delta,
    ) -> Result<(), ProxyError> {
        let index = choice.get("index").and_then(Value::as_u64);
        if index.is_some_and(|index| index != 0) {
            return Err(broken("its stream has several choices"));
        }
        self.has_begun = true;
        keep(&mut self.prompt_token_ids, &mut choice, "prompt_token_ids");
        keep(&mut self.finish_reason, &mut choice, "finish_reason");
        keep(&mut self.stop_reason, &mut choice, "stop_reason");
        let mut logprobs = choice.remove("logprobs").unwrap_or_default();
        for (all, new) in [
            (&mut self.token_ids, choice.remove("token_ids")),
            (
                &mut self.logprobs,
                logprobs.get_mut("content").map(Value::take),
            ),
        ] {
            let Some(Value::Array(new)) = new else {
                continue;
            };
            let values: usize = new.iter().map(values_of).sum();
            self.values_left = (self.values_left)
                .checked_sub(values)
                .ok_or_else(|| too_many_values(self.max_values))?;
            all.get_or_insert_default().extend(new);
        }
        let told = choice.remove("delta").unwrap_or_default();
        // Some tell reasoning under both names.
        let reasoning = match &told["reasoning_content"] {
            Value::Null => &told["reasoning"],
            reasoning => reasoning,
        };
        for (name, told, all, new) in [
            (
                "content",
                &told["content"],
                &mut self.content,
                &mut delta.content,
            ),
            (
                "reasoning",
                reasoning,
                &mut self.reasoning,
                &mut delta.reasoning,
            ),
        ] {
            match told {
                Value::Null => {}
                Value::String(text) => {
                    *all.get_or_insert_default() += text;
                    *new += text;
                }
                _ => return Err(broken(format!("`{name}` of its stream is no string"))),
            }
        }
        match &told["tool_calls"] {
            Value::Null => {}
            Value::Array(calls) => {
                for (at, call) in calls.iter().enumerate() {
                    self.push_call(at, call)?;
                }
            }
            _ => return Err(broken("`tool_calls` of its stream are no list")),
        }
        Ok(())
    }

    fn push_call(&mut self, at: usize, call: &Value) -> Result<(), ProxyError> {
        let index = call["index"].as_u64().unwrap_or(at as u64);
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        if index > self.calls.len() || index >= MAX_CALLS {
            return Err(broken("the tool calls of its stream are not in order"));
        }
        if index == self.calls.len() {
            self.calls.push(CallSoFar::default());
        }
        let whole = &mut self.calls[index];
        let function = &call["function"];
        for (to, new) in [
            (&mut whole.id, &call["id"]),
            (&mut whole.name, &function["name"]),
            (&mut whole.arguments, &function["arguments"]),
        ] {
            *to += new.as_str().unwrap_or_default();
        }
        Ok(())
    }

    /// Returns the completion as if it had come whole.
    pub(super) fn whole(self) -> Result<Value, ProxyError> {
        if !self.has_begun || self.finish_reason.is_null() {
            return Err(broken("its stream ended before the answer did"));
        }
        let mut message = Map::new();
        message.insert("content".to_owned(), json!(self.content));
        if let Some(reasoning) = self.reasoning {
            message.insert("reasoning_content".to_owned(), Value::from(reasoning));
        }
        let call = |call: CallSoFar| {
            json!({
                "id": call.id,
                "function": {"name": call.name, "arguments": call.arguments},
            })
        };
        message.insert(
            "tool_calls".to_owned(),
            self.calls.into_iter().map(call).collect(),
        );
        let logprobs = self.logprobs.map(|content| json!({"content": content}));
        Ok(json!({
            "choices": [{
                "message": message,
                "finish_reason": self.finish_reason,
                "stop_reason": self.stop_reason,
                "token_ids": self.token_ids,
                "logprobs": logprobs,
            }],
            "prompt_token_ids": self.prompt_token_ids,
            "usage": self.usage,
        }))
    }
}

/// Keeps a field that says something.
fn keep(kept: &mut Value, fields: &mut Map<String, Value>, name: &str) {
    if let Some(value) = fields.remove(name).filter(|value| !value.is_null()) {
        *kept = value;
    }
}

/// Returns how many values there are, names of fields among them.
fn values_of(value: &Value) -> usize {
    let within: usize = match value {
        Value::Array(values) => values.iter().map(values_of).sum(),
        Value::Object(fields) => fields.values().map(|value| 1 + values_of(value)).sum(),
        _ => 0,
    };
    1 + within
}

/// Returns the message of an error's body, in any of the shapes that servers give it.
fn message_of(body: &[u8]) -> String {
    message_and_code(body).0
}

/// Returns the message of an error's body, in any of the shapes that servers give it, and the name that it
/// has for the error: OpenAI's `code`, or the `type` where there is none.
pub(super) fn message_and_code(body: &[u8]) -> (String, Option<String>) {
    let value: Value = match count_values(body) <= MAX_ERROR_VALUES {
        true => serde_json::from_slice(body).unwrap_or_default(),
        false => Value::Null,
    };
    let names = [
        &value["error"]["code"],
        &value["code"],
        &value["error"]["type"],
        &value["type"],
    ];
    let code = names.into_iter().find_map(Value::as_str).map(str::to_owned);
    let told = [
        &value["error"]["message"],
        &value["message"],
        &value["detail"],
        &value["error"],
    ];
    let told = told.into_iter().find_map(Value::as_str);
    let message = told.map_or_else(|| String::from_utf8_lossy(body).into_owned(), str::to_owned);
    (message, code)
}
