//! OpenAI's Responses, without the state that it keeps for clients elsewhere.

use serde_json::{Map, Value, json};

use super::{Answer, Asked, Dialect, Event, move_tools, rename, take, take_flag, text_of};
use crate::http::{unix_seconds, uuid4};
use crate::openai::Delta;
use crate::proxy::ProxyError;
use crate::proxy::record::Ending;

/// The types of blocks that hold text.
const TEXTS: [&str; 4] = ["input_text", "output_text", "text", "summary_text"];

/// Tells an answer as a response.
pub(in crate::proxy) struct ResponsesDialect {
    /// The response as it stands; what it is asked for is told back.
    response: Value,
    /// The item that is being streamed.
    open: Option<Open>,
    output: Vec<Value>,
    events: u64,
}

#[derive(Debug)]
struct Open {
    kind: Kind,
    id: String,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
}

impl Kind {
    /// Returns the type of the part that holds the text.
    fn part(self) -> &'static str {
        match self {
            Self::Reasoning => "reasoning_text",
            Self::Message => "output_text",
        }
    }

    fn part_json(self, text: &str) -> Value {
        match self {
            Self::Reasoning => json!({"type": self.part(), "text": text}),
            Self::Message => json!({"type": self.part(), "text": text, "annotations": []}),
        }
    }

    fn item(self, id: &str, parts: &[Value], status: &str) -> Value {
        match self {
            Self::Reasoning => json!({
                "id": id, "type": "reasoning", "summary": [], "content": parts, "status": status,
            }),
            Self::Message => json!({
                "id": id, "type": "message", "role": "assistant", "content": parts,
                "status": status,
            }),
        }
    }
}

fn new_id(prefix: &str) -> String {
    format!("{prefix}_{}", uuid4().replace('-', ""))
}

impl ResponsesDialect {
    pub(in crate::proxy) fn read(mut body: Map<String, Value>) -> Result<Asked, ProxyError> {
        let is_streamed = take_flag(&mut body, "stream")?;
        let told_back = |name: &str, default: Value| {
            let given = body.get(name).filter(|value| !value.is_null());
            given.cloned().unwrap_or(default)
        };
        let response = json!({
            "id": new_id("resp"),
            "object": "response",
            "created_at": unix_seconds(),
            "status": "in_progress",
            "error": null,
            "incomplete_details": null,
            "instructions": told_back("instructions", Value::Null),
            "max_output_tokens": told_back("max_output_tokens", Value::Null),
            "metadata": told_back("metadata", json!({})),
            "model": told_back("model", Value::from("")),
            "output": [],
            "parallel_tool_calls": told_back("parallel_tool_calls", Value::Bool(true)),
            "previous_response_id": null,
            "reasoning": {"effort": null, "summary": null},
            "store": false,
            "temperature": told_back("temperature", Value::Null),
            "text": {"format": {"type": "text"}},
            "tool_choice": told_back("tool_choice", Value::from("auto")),
            "tools": told_back("tools", json!([])),
            "top_p": told_back("top_p", Value::Null),
            "truncation": "disabled",
            "usage": null,
        });
        let dialect = Self {
            response,
            open: None,
            output: Vec::new(),
            events: 0,
        };
        Ok(Asked {
            body: to_chat(body)?,
            is_streamed,
            dialect: Box::new(dialect),
        })
    }

    /// Returns an event: its data with its type and its number.
    fn event(&mut self, name: &'static str, mut data: Value) -> Event {
        data["type"] = Value::from(name);
        data["sequence_number"] = Value::from(self.events);
        self.events += 1;
        Event::named(name, &data)
    }

    /// Tells a text in the item it belongs to, which is opened if it is not.
    fn tell(&mut self, kind: Kind, text: &str, events: &mut Vec<Event>) {
        if text.is_empty() {
            return;
        }
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            self.close(events);
            let id = new_id(match kind {
                Kind::Reasoning => "rs",
                Kind::Message => "msg",
            });
            let index = self.output.len();
            let item = kind.item(&id, &[], "in_progress");
            let added = json!({"output_index": index, "item": item});
            events.push(self.event("response.output_item.added", added));
            let added = json!({
                "output_index": index, "item_id": id, "content_index": 0,
                "part": kind.part_json(""),
            });
            events.push(self.event("response.content_part.added", added));
            self.open = Some(Open {
                kind,
                id,
                text: String::new(),
            });
        }
        if let Some(open) = &mut self.open {
            open.text += text;
            let mut delta = json!({
                "output_index": self.output.len(), "item_id": open.id, "content_index": 0,
                "delta": text,
            });
            let name = match kind {
                Kind::Reasoning => "response.reasoning_text.delta",
                Kind::Message => {
                    delta["logprobs"] = json!([]);
                    "response.output_text.delta"
                }
            };
            events.push(self.event(name, delta));
        }
    }

    fn close(&mut self, events: &mut Vec<Event>) {
        let Some(Open { kind, id, text }) = self.open.take() else {
            return;
        };
        let index = self.output.len();
        let part = kind.part_json(&text);
        let mut done = json!({
            "output_index": index, "item_id": id, "content_index": 0, "text": text,
        });
        let name = match kind {
            Kind::Reasoning => "response.reasoning_text.done",
            Kind::Message => {
                done["logprobs"] = json!([]);
                "response.output_text.done"
            }
        };
        events.push(self.event(name, done));
        let done = json!({
            "output_index": index, "item_id": id, "content_index": 0, "part": part,
        });
        events.push(self.event("response.content_part.done", done));
        let item = kind.item(&id, &[part], "completed");
        let done = json!({"output_index": index, "item": item});
        events.push(self.event("response.output_item.done", done));
        self.output.push(item);
    }

    /// Returns the response as it stands at its end.
    fn finished(&mut self, answer: &Answer) -> Value {
        let mut response = self.response.clone();
        response["output"] = Value::from(std::mem::take(&mut self.output));
        response["status"] = Value::from(match answer.ending {
            Ending::Length => "incomplete",
            _ => "completed",
        });
        if answer.ending == Ending::Length {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        let usage = answer.usage;
        response["usage"] = json!({
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        });
        response
    }
}

fn call_item(id: &str, name: &str, call: &str, arguments: &str, status: &str) -> Value {
    json!({
        "id": id, "type": "function_call", "call_id": call, "name": name, "arguments": arguments,
        "status": status,
    })
}

impl Dialect for ResponsesDialect {
    fn whole(&mut self, answer: &Answer) -> Value {
        for (kind, key) in [
            (Kind::Reasoning, "reasoning_content"),
            (Kind::Message, "content"),
        ] {
            let text = answer.text(key);
            if !text.is_empty() {
                let id = new_id(if kind == Kind::Message { "msg" } else { "rs" });
                let item = kind.item(&id, &[kind.part_json(text)], "completed");
                self.output.push(item);
            }
        }
        for (name, call, arguments) in answer.calls() {
            let item = call_item(&new_id("fc"), name, call, arguments, "completed");
            self.output.push(item);
        }
        self.finished(answer)
    }

    fn begin(&mut self) -> Vec<Event> {
        let response = json!({"response": self.response});
        vec![
            self.event("response.created", response.clone()),
            self.event("response.in_progress", response),
        ]
    }

    fn more(&mut self, delta: &Delta) -> Vec<Event> {
        let mut events = Vec::new();
        self.tell(Kind::Reasoning, &delta.reasoning, &mut events);
        self.tell(Kind::Message, &delta.content, &mut events);
        events
    }

    fn end(&mut self, answer: &Answer) -> Vec<Event> {
        let mut events = Vec::new();
        self.close(&mut events);
        for (name, call, arguments) in answer.calls() {
            let (id, index) = (new_id("fc"), self.output.len());
            let item = call_item(&id, name, call, "", "in_progress");
            let added = json!({"output_index": index, "item": item});
            events.push(self.event("response.output_item.added", added));
            let delta = json!({"output_index": index, "item_id": id, "delta": arguments});
            events.push(self.event("response.function_call_arguments.delta", delta));
            let done = json!({
                "output_index": index, "item_id": id, "name": name, "arguments": arguments,
            });
            events.push(self.event("response.function_call_arguments.done", done));
            let item = call_item(&id, name, call, arguments, "completed");
            let done = json!({"output_index": index, "item": item});
            events.push(self.event("response.output_item.done", done));
            self.output.push(item);
        }
        let response = self.finished(answer);
        let name = match answer.ending {
            Ending::Length => "response.incomplete",
            _ => "response.completed",
        };
        events.push(self.event(name, json!({"response": response})));
        events
    }

    fn fail(&mut self, error: &ProxyError) -> Vec<Event> {
        let mut response = self.response.clone();
        response["status"] = Value::from("failed");
        response["error"] = json!({"code": "server_error", "message": error.to_string()});
        vec![self.event("response.failed", json!({"response": response}))]
    }
}

/// Turns a request into one of chat completions.
fn to_chat(mut body: Map<String, Value>) -> Result<Map<String, Value>, ProxyError> {
    for name in ["previous_response_id", "conversation", "prompt"] {
        if take(&mut body, name).is_some() {
            return Err(ProxyError::invalid(
                "input",
                format!("`{name}` is not supported: nothing is kept here, send the whole `input`"),
            ));
        }
    }
    let mut messages = Vec::new();
    if let Some(instructions) = take(&mut body, "instructions") {
        messages.push(json!({"role": "system", "content": instructions}));
    }
    match take(&mut body, "input") {
        Some(text @ Value::String(_)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => {
            for (index, item) in items.iter().enumerate() {
                push_item(item, &mut messages).map_err(|reason| {
                    let message = format!("item {index} is malformed: {reason}");
                    ProxyError::invalid("input", message)
                })?;
            }
        }
        _ => {
            let message = "`input` must be a string or a list of items";
            return Err(ProxyError::invalid("input", message));
        }
    }
    let mut chat = Map::new();
    chat.insert("messages".to_owned(), Value::from(messages));
    // Those that OpenAI runs itself cannot be had here.
    move_tools(&mut body, &mut chat, to_tool)?;
    if let Some(choice) = take(&mut body, "tool_choice") {
        let choice = match choice["name"].as_str() {
            Some(name) => json!({"type": "function", "function": {"name": name}}),
            None => choice,
        };
        chat.insert("tool_choice".to_owned(), choice);
    }
    let text = take(&mut body, "text").unwrap_or_default();
    if let Some(format) = text.get("format").filter(|format| !format.is_null()) {
        let format = match format["type"] == "json_schema" {
            true => json!({"type": "json_schema", "json_schema": format}),
            false => format.clone(),
        };
        chat.insert("response_format".to_owned(), format);
    }
    let names = [
        ("model", "model"),
        ("max_output_tokens", "max_tokens"),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        // Not of this API, and what an episode is repeated by.
        ("seed", "seed"),
    ];
    rename(&mut body, &mut chat, &names);
    Ok(chat)
}

fn to_tool(tool: &Value) -> Option<Value> {
    if tool["type"] != "function" {
        return None;
    }
    let mut function = tool.as_object()?.clone();
    function.remove("type");
    Some(json!({"type": "function", "function": function}))
}

/// Adds what an item says. The reasoning, the text and the calls of one answer are items of their own
/// here, and one message there.
fn push_item(item: &Value, messages: &mut Vec<Value>) -> Result<(), String> {
    let kind = item["type"].as_str();
    match kind {
        None | Some("message") => {
            let role = item["role"].as_str().ok_or("it has no `role`")?;
            let text = text_of(&item["content"], &TEXTS, "`content`")?;
            if role == "assistant" {
                let said = answer(messages, |said| {
                    said["content"].is_null() && said["tool_calls"].is_null()
                });
                said["content"] = Value::from(text);
            } else {
                messages.push(json!({"role": role, "content": text}));
            }
        }
        Some("reasoning") => {
            let said = answer(messages, |_| false);
            let mut text = text_of(&item["content"], &["reasoning_text", "text"], "`content`")?;
            if text.is_empty() {
                text = text_of(&item["summary"], &TEXTS, "`summary`")?;
            }
            if !text.is_empty() {
                said["reasoning_content"] = Value::from(text);
            }
        }
        Some("function_call") => {
            let call = json!({
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            });
            let said = answer(messages, |_| true);
            match said["tool_calls"].as_array_mut() {
                Some(calls) => calls.push(call),
                None => said["tool_calls"] = json!([call]),
            }
        }
        Some("function_call_output") => {
            let content = text_of(&item["output"], &TEXTS, "`output`")?;
            messages.push(json!({
                "role": "tool", "tool_call_id": item["call_id"], "content": content,
            }));
        }
        Some(kind) => {
            let kind: String = kind.chars().take(40).collect();
            return Err(format!("items of type `{kind}` are not supported"));
        }
    }
    Ok(())
}

/// Returns the answer at the end, if `fits` says that the item belongs to it, or a new one.
fn answer(messages: &mut Vec<Value>, fits: impl Fn(&Value) -> bool) -> &mut Value {
    let is_open = messages
        .last()
        .is_some_and(|last| last["role"] == "assistant" && fits(last));
    if !is_open {
        messages.push(json!({"role": "assistant", "content": null}));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}
