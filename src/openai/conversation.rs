//! Messages and tools as clients send them.

use serde_json::{Map, Value};

use super::ApiError;
use super::guidance::{ResponseFormat, ToolChoice};
use super::wire::{ChatRequest, kind};
use crate::chat::{Message, RenderOptions, Role, ToolCall, ToolSpec};

/// What a chat request says, and how it is to be rendered.
#[derive(Debug)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Message>,
    pub(crate) tools: Vec<ToolSpec>,
    pub(crate) options: RenderOptions,
    pub(crate) format: ResponseFormat,
    pub(crate) choice: ToolChoice,
}

impl Conversation {
    /// Returns the field that says what the answer must look like, if one does.
    pub(crate) fn forced_by(&self) -> Option<&'static str> {
        if self.format != ResponseFormat::Text {
            return Some("response_format");
        }
        let is_forced = matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_));
        is_forced.then_some("tool_choice")
    }
}

impl ChatRequest {
    /// Reads what the request says; what cannot be done is refused.
    pub(crate) fn conversation(&self) -> Result<Conversation, ApiError> {
        let format = ResponseFormat::read(self.response_format.as_ref())?;
        let choice = ToolChoice::read(self.tool_choice.as_ref())?;
        let mut tools: Vec<ToolSpec> = Vec::new();
        for tool in self.tools.iter().filter(|_| choice != ToolChoice::None) {
            tools.push(read_tool(tools.len(), tool)?);
        }
        let messages = (self.messages.iter().enumerate())
            .map(|(index, message)| read_message(index, message))
            .collect::<Result<Vec<Message>, _>>()?;
        if messages.is_empty() {
            return Err(ApiError::invalid("messages", "there is no message"));
        }
        let mut extra = self.chat_template_kwargs.clone();
        let enable_thinking = match extra.remove("enable_thinking") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(enabled)) => Some(enabled),
            Some(_) => {
                let message = "`enable_thinking` must be true or false";
                return Err(ApiError::invalid("chat_template_kwargs", message));
            }
        };
        Ok(Conversation {
            messages,
            tools,
            options: RenderOptions {
                add_generation_prompt: true,
                enable_thinking,
                extra,
            },
            format,
            choice,
        })
    }
}

/// Reads a message with OpenAI's varieties: content in parts, arguments as text, `developer`.
pub(crate) fn read_message(index: usize, message: &Value) -> Result<Message, ApiError> {
    read_fields(message).map_err(|reason| {
        ApiError::invalid(
            "messages",
            format!("message {index} is malformed: {reason}"),
        )
    })
}

/// Reads a tool, `{"type": "function", "function": {…}}` or the inner object alone.
fn read_tool(index: usize, tool: &Value) -> Result<ToolSpec, ApiError> {
    read_function(tool).map_err(|reason| {
        ApiError::invalid("tools", format!("tool {index} is malformed: {reason}"))
    })
}

fn read_fields(message: &Value) -> Result<Message, String> {
    let fields = object("it", message)?;
    let role = match fields.get("role").and_then(Value::as_str) {
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("tool") => Role::Tool,
        _ => {
            return Err(
                "its `role` must be `system`, `developer`, `user`, `assistant` or `tool`"
                    .to_owned(),
            );
        }
    };
    let content = match fields.get("content") {
        Some(Value::Array(parts)) => join(parts)?,
        _ => text(fields, "content")?.unwrap_or_default(),
    };
    let reasoning_content = match text(fields, "reasoning_content")? {
        Some(reasoning) => Some(reasoning),
        None => text(fields, "reasoning")?,
    };
    let tool_calls = match fields.get("tool_calls") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(calls)) => calls.iter().map(read_call).collect::<Result<_, _>>()?,
        Some(other) => return Err(mistyped("tool_calls", "a list", other)),
    };
    Ok(Message {
        role,
        content,
        reasoning_content,
        tool_calls,
        tool_call_id: text(fields, "tool_call_id")?,
        name: text(fields, "name")?,
    })
}

fn join(parts: &[Value]) -> Result<String, String> {
    let mut all = String::new();
    for part in parts {
        match (part.get("type").and_then(Value::as_str), part.get("text")) {
            (Some("text"), Some(Value::String(part))) => all += part,
            _ => return Err("only content of text is supported".to_owned()),
        }
    }
    Ok(all)
}

fn read_call(call: &Value) -> Result<ToolCall, String> {
    let fields = object("a call", call)?;
    let function = match fields.get("function") {
        Some(function) => object("`function` of a call", function)?,
        None => fields,
    };
    // Templates print arguments as an object.
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => Value::Object(Map::new()),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(arguments @ Value::Object(_)) => arguments,
            _ => Value::from(text.as_str()),
        },
        Some(arguments @ Value::Object(_)) => arguments.clone(),
        Some(other) => return Err(mistyped("arguments", "a string or an object", other)),
    };
    Ok(ToolCall {
        id: text(fields, "id")?,
        name: text(function, "name")?.ok_or("a call has no `name`")?,
        arguments,
    })
}

fn read_function(tool: &Value) -> Result<ToolSpec, String> {
    let mut fields = object("it", tool)?;
    match fields.get("type") {
        None => {}
        Some(Value::String(kind)) if kind == "function" => {}
        Some(_) => return Err("only tools of the type `function` are supported".to_owned()),
    }
    if let Some(function) = fields.get("function") {
        fields = object("its `function`", function)?;
    }
    let parameters = match fields.get("parameters") {
        None | Some(Value::Null) => None,
        Some(parameters @ Value::Object(_)) => Some(parameters.clone()),
        Some(other) => return Err(mistyped("parameters", "a JSON schema, an object", other)),
    };
    let known = ["type", "name", "description", "parameters"];
    let extra = fields.iter();
    Ok(ToolSpec {
        name: text(fields, "name")?
            .filter(|name| !name.is_empty())
            .ok_or("it has no `name`")?,
        description: text(fields, "description")?,
        parameters,
        extra: extra
            .filter(|(key, _)| !known.contains(&key.as_str()))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect(),
    })
}

fn object<'a>(what: &str, value: &'a Value) -> Result<&'a Map<String, Value>, String> {
    value
        .as_object()
        .ok_or_else(|| format!("{what} must be an object, not {}", kind(value)))
}

fn text(fields: &Map<String, Value>, name: &str) -> Result<Option<String>, String> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(mistyped(name, "a string", other)),
    }
}

fn mistyped(name: &str, expected: &str, value: &Value) -> String {
    format!("`{name}` must be {expected}, not {}", kind(value))
}
