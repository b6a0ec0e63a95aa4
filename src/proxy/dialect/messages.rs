//! Anthropic's messages.

use axum::http::StatusCode;
use serde_json::{Map, Value, json};

use super::{Answer, Asked, Dialect, Event, move_tools, rename, take, take_flag, text_of};
use crate::http::uuid4;
use crate::openai::{Delta, Usage};
use crate::proxy::ProxyError;
use crate::proxy::record::Ending;

/// Tells an answer as a message of Anthropic's API.
pub(in crate::proxy) struct MessagesDialect {
    id: String,
    model: String,
    /// The block that is being streamed, and its place.
    open: Option<Block>,
    blocks: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
}

impl MessagesDialect {
    pub(in crate::proxy) fn read(mut body: Map<String, Value>) -> Result<Asked, ProxyError> {
        let is_streamed = take_flag(&mut body, "stream")?;
        let model = body.get("model").cloned().unwrap_or_default();
        let dialect = Self {
            id: format!("msg_{}", uuid4().replace('-', "")),
            model: model.as_str().unwrap_or_default().to_owned(),
            open: None,
            blocks: 0,
        };
        Ok(Asked {
            body: to_chat(body)?,
            is_streamed,
            dialect: Box::new(dialect),
        })
    }

    fn message(&self, content: &[Value]) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": null,
            "stop_sequence": null,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        })
    }

    /// Tells a text in the block it belongs to, which is opened if it is not.
    fn tell(&mut self, block: Block, text: &str, events: &mut Vec<Event>) {
        if text.is_empty() {
            return;
        }
        if self.open != Some(block) {
            self.close(events);
            let empty = match block {
                Block::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
                Block::Text => json!({"type": "text", "text": ""}),
            };
            events.push(block_start(self.blocks, &empty));
            self.open = Some(block);
        }
        let delta = match block {
            Block::Thinking => json!({"type": "thinking_delta", "thinking": text}),
            Block::Text => json!({"type": "text_delta", "text": text}),
        };
        events.push(block_delta(self.blocks, &delta));
    }

    fn close(&mut self, events: &mut Vec<Event>) {
        if self.open.take().is_some() {
            events.push(block_stop(self.blocks));
            self.blocks += 1;
        }
    }
}

fn block_start(index: usize, block: &Value) -> Event {
    let name = "content_block_start";
    Event::named(
        name,
        &json!({"type": name, "index": index, "content_block": block}),
    )
}

fn block_delta(index: usize, delta: &Value) -> Event {
    let name = "content_block_delta";
    Event::named(name, &json!({"type": name, "index": index, "delta": delta}))
}

fn block_stop(index: usize) -> Event {
    let name = "content_block_stop";
    Event::named(name, &json!({"type": name, "index": index}))
}

fn stop(answer: &Answer) -> (&'static str, Value) {
    match &answer.ending {
        Ending::Stop => ("end_turn", Value::Null),
        Ending::ToolCalls => ("tool_use", Value::Null),
        Ending::StopText(stop) => ("stop_sequence", Value::from(stop.as_str())),
        Ending::Length => ("max_tokens", Value::Null),
    }
}

fn usage_json(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    })
}

/// Returns a call's arguments as the object that this API wants.
fn input(arguments: &str) -> Value {
    match serde_json::from_str(arguments) {
        Ok(input @ Value::Object(_)) => input,
        _ => json!({"arguments": arguments}),
    }
}

impl Dialect for MessagesDialect {
    fn whole(&mut self, answer: &Answer) -> Value {
        let mut content = Vec::new();
        let reasoning = answer.text("reasoning_content");
        if !reasoning.is_empty() {
            let block = json!({"type": "thinking", "thinking": reasoning, "signature": ""});
            content.push(block);
        }
        let text = answer.text("content");
        if !text.is_empty() {
            content.push(json!({"type": "text", "text": text}));
        }
        for (name, id, arguments) in answer.calls() {
            let block =
                json!({"type": "tool_use", "id": id, "name": name, "input": input(arguments)});
            content.push(block);
        }
        let mut message = self.message(&content);
        let (reason, sequence) = stop(answer);
        message["stop_reason"] = Value::from(reason);
        message["stop_sequence"] = sequence;
        message["usage"] = usage_json(answer.usage);
        message
    }

    fn begin(&mut self) -> Vec<Event> {
        let name = "message_start";
        let start = json!({"type": name, "message": self.message(&[])});
        vec![Event::named(name, &start)]
    }

    fn more(&mut self, delta: &Delta) -> Vec<Event> {
        let mut events = Vec::new();
        self.tell(Block::Thinking, &delta.reasoning, &mut events);
        self.tell(Block::Text, &delta.content, &mut events);
        events
    }

    fn end(&mut self, answer: &Answer) -> Vec<Event> {
        let mut events = Vec::new();
        self.close(&mut events);
        for (name, id, arguments) in answer.calls() {
            let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
            events.push(block_start(self.blocks, &block));
            let partial = input(arguments).to_string();
            let delta = json!({"type": "input_json_delta", "partial_json": partial});
            events.push(block_delta(self.blocks, &delta));
            events.push(block_stop(self.blocks));
            self.blocks += 1;
        }
        let (reason, sequence) = stop(answer);
        let name = "message_delta";
        let delta = json!({
            "type": name,
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": usage_json(answer.usage),
        });
        events.push(Event::named(name, &delta));
        events.push(Event::named(
            "message_stop",
            &json!({"type": "message_stop"}),
        ));
        events
    }

    fn fail(&mut self, error: &ProxyError) -> Vec<Event> {
        vec![Event::named("error", &error_body(error))]
    }
}

/// Returns the body of an error: `{"type": "error", "error": {"type", "message"}}`.
pub(super) fn error_body(error: &ProxyError) -> Value {
    let kind = match error.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.to_string()}})
}

/// Turns a request into one of chat completions.
fn to_chat(mut body: Map<String, Value>) -> Result<Map<String, Value>, ProxyError> {
    let mut messages = Vec::new();
    if let Some(system) = take(&mut body, "system") {
        let text = text_of(&system, &["text"], "`system`")
            .map_err(|reason| ProxyError::invalid("system", reason))?;
        messages.push(json!({"role": "system", "content": text}));
    }
    let Some(Value::Array(asked)) = take(&mut body, "messages") else {
        return Err(ProxyError::invalid("messages", "`messages` must be a list"));
    };
    for (index, message) in asked.iter().enumerate() {
        push_message(message, &mut messages).map_err(|reason| {
            let message = format!("message {index} is malformed: {reason}");
            ProxyError::invalid("messages", message)
        })?;
    }
    let mut chat = Map::new();
    chat.insert("messages".to_owned(), Value::from(messages));
    // Those that Anthropic runs itself have a type and no schema.
    move_tools(&mut body, &mut chat, to_tool)?;
    if let Some(choice) = take(&mut body, "tool_choice") {
        let choice = match choice["type"].as_str() {
            Some("auto") => Value::from("auto"),
            Some("none") => Value::from("none"),
            Some("any") => Value::from("required"),
            _ => json!({"type": "function", "function": {"name": choice["name"]}}),
        };
        chat.insert("tool_choice".to_owned(), choice);
    }
    if let Some(thinking) = take(&mut body, "thinking") {
        let enabled = thinking["type"] != "disabled";
        let variables = json!({"enable_thinking": enabled});
        chat.insert("chat_template_kwargs".to_owned(), variables);
    }
    let names = [
        ("model", "model"),
        ("max_tokens", "max_tokens"),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        // Not of this API, and what an episode is repeated by.
        ("seed", "seed"),
        ("top_k", "top_k"),
        ("stop_sequences", "stop"),
    ];
    rename(&mut body, &mut chat, &names);
    Ok(chat)
}

fn to_tool(tool: &Value) -> Option<Value> {
    let parameters = tool.get("input_schema")?;
    let mut function = json!({"name": tool["name"]});
    if let Some(description) = tool.get("description") {
        function["description"] = description.clone();
    }
    function["parameters"] = parameters.clone();
    Some(json!({"type": "function", "function": function}))
}

/// Adds what a message says: a user's may hold the results of several tools, each a message of its own.
fn push_message(message: &Value, messages: &mut Vec<Value>) -> Result<(), String> {
    let role = message["role"].as_str().unwrap_or_default();
    let blocks = match (&message["content"], role) {
        (content @ Value::String(_), "user" | "assistant" | "system") => {
            messages.push(json!({"role": role, "content": content}));
            return Ok(());
        }
        (Value::Array(blocks), "user" | "assistant" | "system") => blocks,
        (_, "user" | "assistant" | "system") => {
            return Err("its `content` must be a string or a list of blocks".to_owned());
        }
        _ => return Err("its `role` must be `user` or `assistant`".to_owned()),
    };
    let (mut texts, mut reasoning, mut calls) = (Vec::new(), String::new(), Vec::new());
    let flush = |texts: &mut Vec<Value>, messages: &mut Vec<Value>| {
        if let Some(content) = content_of(std::mem::take(texts)) {
            messages.push(json!({"role": role, "content": content}));
        }
    };
    for block in blocks {
        match (block["type"].as_str().unwrap_or_default(), role) {
            ("text", _) => {
                let text = block["text"].as_str().ok_or("a block has no `text`")?;
                texts.push(json!({"type": "text", "text": text}));
            }
            ("thinking", "assistant") => {
                reasoning += block["thinking"].as_str().unwrap_or_default();
            }
            ("redacted_thinking", "assistant") => {}
            ("tool_use", "assistant") => calls.push(json!({
                "id": block["id"],
                "type": "function",
                "function": {"name": block["name"], "arguments": block["input"].to_string()},
            })),
            ("tool_result", "user") => {
                flush(&mut texts, messages);
                let content = text_of(&block["content"], &["text"], "a tool's result")?;
                messages.push(json!({
                    "role": "tool", "tool_call_id": block["tool_use_id"], "content": content,
                }));
            }
            (kind, _) => {
                let kind: String = kind.chars().take(40).collect();
                return Err(format!("a block of type `{kind}` is not supported there"));
            }
        }
    }
    if role != "assistant" {
        flush(&mut texts, messages);
        return Ok(());
    }
    let mut said = json!({"role": role, "content": content_of(texts)});
    if !reasoning.is_empty() {
        said["reasoning_content"] = Value::from(reasoning);
    }
    if !calls.is_empty() {
        said["tool_calls"] = Value::from(calls);
    }
    messages.push(said);
    Ok(())
}

/// Returns blocks of text as a content, one of them as the text alone.
fn content_of(mut texts: Vec<Value>) -> Option<Value> {
    match texts.len() {
        0 => None,
        1 => Some(texts.remove(0)["text"].take()),
        _ => Some(Value::from(texts)),
    }
}
