//! The APIs that agents speak. Each reads a request into the shape of chat completions, which is what
//! is recorded and passed on, and tells the answer in its own shape, whole or as a stream of events.

mod chat;
mod messages;
mod responses;

#[cfg(test)]
mod tests;

use axum::body::Bytes;
use serde_json::{Map, Value};

pub(super) use self::chat::ChatDialect;
pub(super) use self::messages::MessagesDialect;
pub(super) use self::responses::ResponsesDialect;

use super::ProxyError;
use super::record::{CallTokens, Ending};
use crate::openai::{Delta, Usage};

/// An API that agents speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Api {
    /// OpenAI's chat completions.
    Chat,
    /// Anthropic's messages.
    Messages,
    /// OpenAI's Responses.
    Responses,
}

impl Api {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Messages => "messages",
            Self::Responses => "responses",
        }
    }

    /// Reads a request.
    pub(super) fn read(self, body: Map<String, Value>) -> Result<Asked, ProxyError> {
        match self {
            Self::Chat => ChatDialect::read(body),
            Self::Messages => MessagesDialect::read(body),
            Self::Responses => ResponsesDialect::read(body),
        }
    }

    /// Returns an error as the only event of a stream.
    pub(super) fn error_event(self, error: &ProxyError) -> Event {
        Event {
            name: match self {
                Self::Chat => None,
                Self::Messages | Self::Responses => Some("error"),
            },
            data: self.error(error).to_string(),
        }
    }

    /// Returns the body of an error.
    pub(super) fn error(self, error: &ProxyError) -> Value {
        match self {
            Self::Chat | Self::Responses => chat::error_body(error),
            Self::Messages => messages::error_body(error),
        }
    }
}

/// A request in the shape of chat completions, and who tells its answer.
pub(super) struct Asked {
    pub(super) body: Map<String, Value>,
    pub(super) is_streamed: bool,
    pub(super) dialect: Box<dyn Dialect>,
}

/// What the model said.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    /// In the shape of chat completions.
    pub(super) message: Value,
    pub(super) ending: Ending,
    pub(super) usage: Usage,
    pub(super) tokens: Option<CallTokens>,
    /// In the shape of chat completions; null where they were not asked for.
    pub(super) logprobs: Value,
}

impl Answer {
    pub(super) fn text(&self, key: &str) -> &str {
        self.message[key].as_str().unwrap_or_default()
    }

    /// Returns the name, the id and the arguments of each tool call, the arguments as text.
    pub(super) fn calls(&self) -> impl Iterator<Item = (&str, &str, &str)> {
        let calls = self.message["tool_calls"].as_array();
        calls.into_iter().flatten().map(|call| {
            let text = |value: &'static str| call["function"][value].as_str().unwrap_or_default();
            let id = call["id"].as_str().unwrap_or_default();
            (text("name"), id, text("arguments"))
        })
    }
}

/// Tells one answer in the shape of an API.
pub(super) trait Dialect: Send {
    /// Returns the answer as one body.
    fn whole(&mut self, answer: &Answer) -> Value;

    /// Returns the events that start a stream.
    fn begin(&mut self) -> Vec<Event>;

    /// Returns the events that tell more of the answer.
    fn more(&mut self, delta: &Delta) -> Vec<Event>;

    /// Returns the events that end a stream, all of whose text was told.
    fn end(&mut self, answer: &Answer) -> Vec<Event>;

    /// Returns the events that end a stream in an error.
    fn fail(&mut self, error: &ProxyError) -> Vec<Event>;
}

/// A server-sent event.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Event {
    pub(super) name: Option<&'static str>,
    pub(super) data: String,
}

impl Event {
    fn data(data: &Value) -> Self {
        Self {
            name: None,
            data: data.to_string(),
        }
    }

    /// Returns an event that bears the type of its data as its name.
    fn named(name: &'static str, data: &Value) -> Self {
        Self {
            name: Some(name),
            data: data.to_string(),
        }
    }

    pub(super) fn to_bytes(&self) -> Bytes {
        let name = self.name.map(|name| format!("event: {name}\n"));
        Bytes::from(format!(
            "{}data: {}\n\n",
            name.unwrap_or_default(),
            self.data
        ))
    }
}

/// Takes a field; `null` is as good as nothing.
fn take(body: &mut Map<String, Value>, name: &str) -> Option<Value> {
    body.remove(name).filter(|value| !value.is_null())
}

/// Moves fields that are the same here and in chat completions but for their names.
fn rename(body: &mut Map<String, Value>, chat: &mut Map<String, Value>, names: &[(&str, &str)]) {
    for (from, to) in names {
        if let Some(value) = take(body, from) {
            chat.insert((*to).to_owned(), value);
        }
    }
}

/// Moves the tools that `to_tool` makes of those here.
fn move_tools(
    body: &mut Map<String, Value>,
    chat: &mut Map<String, Value>,
    to_tool: fn(&Value) -> Option<Value>,
) -> Result<(), ProxyError> {
    if let Some(tools) = take(body, "tools") {
        let Value::Array(tools) = tools else {
            return Err(ProxyError::invalid("tools", "`tools` must be a list"));
        };
        let tools: Vec<Value> = tools.iter().filter_map(to_tool).collect();
        chat.insert("tools".to_owned(), Value::from(tools));
    }
    Ok(())
}

/// Takes a flag.
fn take_flag(body: &mut Map<String, Value>, name: &'static str) -> Result<bool, ProxyError> {
    match take(body, name) {
        None => Ok(false),
        Some(Value::Bool(flag)) => Ok(flag),
        Some(_) => Err(ProxyError::invalid(
            name,
            format!("`{name}` must be true or false"),
        )),
    }
}

/// Returns the text of a content: a string, or a list of blocks of which `texts` names the types that
/// hold text.
fn text_of(content: &Value, texts: &[&str], what: &str) -> Result<String, String> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => {
            let mut all = String::new();
            for block in blocks {
                let kind = block.get("type").and_then(Value::as_str);
                match (kind, block.get("text").and_then(Value::as_str)) {
                    (Some(kind), Some(text)) if texts.contains(&kind) => all += text,
                    _ => return Err(format!("{what} may only hold text here")),
                }
            }
            Ok(all)
        }
        _ => Err(format!("{what} must be a string or a list of blocks")),
    }
}
