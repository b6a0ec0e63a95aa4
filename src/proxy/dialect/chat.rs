//! OpenAI's chat completions, as they are.

use serde_json::{Map, Value, json};

use super::{Answer, Asked, Dialect, Event, take_flag};
use crate::http::{unix_seconds, uuid4};
use crate::openai::{Delta, Envelope, delta_json};
use crate::proxy::ProxyError;

/// Tells an answer as a chat completion.
pub(in crate::proxy) struct ChatDialect {
    envelope: Envelope,
    tells_usage: bool,
    returns_token_ids: bool,
}

impl ChatDialect {
    pub(in crate::proxy) fn read(mut body: Map<String, Value>) -> Result<Asked, ProxyError> {
        let is_streamed = take_flag(&mut body, "stream")?;
        let options = body.remove("stream_options").unwrap_or_default();
        let returns_token_ids = take_flag(&mut body, "return_token_ids")?;
        let model = body.get("model").and_then(Value::as_str);
        let dialect = Self {
            envelope: Envelope {
                id: format!("chatcmpl-{}", uuid4()),
                object: if is_streamed {
                    "chat.completion.chunk"
                } else {
                    "chat.completion"
                },
                created: unix_seconds(),
                model: model.unwrap_or_default().to_owned(),
            },
            tells_usage: options["include_usage"] == true,
            returns_token_ids,
        };
        Ok(Asked {
            body,
            is_streamed,
            dialect: Box::new(dialect),
        })
    }

    fn chunk(&self, choice: &Value) -> Event {
        let mut chunk = self.envelope.wrap(std::slice::from_ref(choice));
        if self.tells_usage {
            chunk["usage"] = Value::Null;
        }
        Event::data(&chunk)
    }

    /// Adds what only clients that ask for it are told.
    fn tell_ids(&self, body: &mut Value, answer: &Answer) {
        if let Some(tokens) = &answer.tokens
            && self.returns_token_ids
        {
            body["prompt_token_ids"] = json!(tokens.prompt());
            body["choices"][0]["token_ids"] = json!(tokens.completion());
        }
    }
}

fn choice(delta: &Value) -> Value {
    json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": null})
}

impl Dialect for ChatDialect {
    fn whole(&mut self, answer: &Answer) -> Value {
        let mut body = self.envelope.wrap(&[json!({
            "index": 0,
            "message": answer.message,
            "logprobs": answer.logprobs,
            "finish_reason": answer.ending.finish_reason(),
        })]);
        body["usage"] = answer.usage.to_json();
        self.tell_ids(&mut body, answer);
        body
    }

    fn begin(&mut self) -> Vec<Event> {
        vec![self.chunk(&choice(&json!({"role": "assistant", "content": ""})))]
    }

    fn more(&mut self, delta: &Delta) -> Vec<Event> {
        let delta = delta_json(delta.clone());
        match delta.is_empty() {
            true => Vec::new(),
            false => vec![self.chunk(&choice(&Value::Object(delta)))],
        }
    }

    fn end(&mut self, answer: &Answer) -> Vec<Event> {
        let mut events = Vec::new();
        if let Some(calls) = answer.message["tool_calls"].as_array() {
            let mut calls = calls.clone();
            for (at, call) in calls.iter_mut().enumerate() {
                call["index"] = Value::from(at);
            }
            events.push(self.chunk(&choice(&json!({"tool_calls": calls}))));
        }
        let mut last = self.envelope.wrap(&[json!({
            "index": 0,
            "delta": {},
            "logprobs": answer.logprobs,
            "finish_reason": answer.ending.finish_reason(),
        })]);
        self.tell_ids(&mut last, answer);
        if self.tells_usage {
            last["usage"] = Value::Null;
        }
        events.push(Event::data(&last));
        if self.tells_usage {
            let mut usage = self.envelope.wrap(&[]);
            usage["usage"] = answer.usage.to_json();
            events.push(Event::data(&usage));
        }
        events.push(Event {
            name: None,
            data: "[DONE]".to_owned(),
        });
        events
    }

    fn fail(&mut self, error: &ProxyError) -> Vec<Event> {
        vec![Event::data(&error_body(error))]
    }
}

/// Returns the body of an error: `{"error": {"message", "type", "param", "code"}}`.
pub(super) fn error_body(error: &ProxyError) -> Value {
    let (kind, code) = match error {
        ProxyError::Request(error) => return error.body(),
        ProxyError::UnknownSession | ProxyError::NotAdmin => {
            ("authentication_error", "invalid_api_key")
        }
        ProxyError::Complete { .. } => ("invalid_request_error", "session_complete"),
        ProxyError::Outdated { .. } => ("invalid_request_error", "session_reset"),
        ProxyError::Exists { .. } => ("invalid_request_error", "session_exists"),
        ProxyError::Full { .. } => ("server_error", "full"),
        ProxyError::Refused { .. } => ("invalid_request_error", "upstream_refused"),
        ProxyError::Upstream { .. } | ProxyError::Unavailable { .. } => {
            ("server_error", "upstream_failed")
        }
        ProxyError::Stalled { .. } => ("server_error", "upstream_stalled"),
        ProxyError::Recording { .. } => ("server_error", "recording_failed"),
    };
    json!({"error": {"message": error.to_string(), "type": kind, "param": null, "code": code}})
}
