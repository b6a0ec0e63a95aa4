//! Conversations, in the shape of the chat completions API.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions by the operator.
    System,
    /// The task or the person.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

/// One message of a conversation.
///
/// ```
/// use wardian::chat::{Message, Role};
///
/// let message = Message::user("What is 2+2?");
/// assert_eq!(message.role, Role::User);
/// assert_eq!(
///     serde_json::to_string(&message)?,
///     r#"{"role":"user","content":"What is 2+2?"}"#
/// );
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// The text; a missing or null `content` reads as empty.
    #[serde(default, deserialize_with = "null_as_default")]
    pub content: String,
    /// The model's reasoning, apart from the content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Calls made by an assistant turn.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "null_as_default"
    )]
    pub tool_calls: Vec<ToolCall>,
    /// The call that a tool message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The tool's or the speaker's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// Returns a message with only a role and a text.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// Returns a system message.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new(Role::System, content)
    }

    /// Returns a user message.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new(Role::User, content)
    }

    /// Returns an assistant message.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new(Role::Assistant, content)
    }

    /// Returns a tool result.
    pub fn tool(content: impl Into<String>) -> Self {
        Self::new(Role::Tool, content)
    }

    /// Returns the result of `call`, with the call's id and name.
    pub fn tool_result(call: &ToolCall, content: impl Into<String>) -> Self {
        Self {
            tool_call_id: call.id.clone(),
            name: Some(call.name.clone()),
            ..Self::tool(content)
        }
    }
}

/// A call of a tool, as the model wrote it.
///
/// Reads both `{"type": "function", "function": {"name", "arguments"}}` and the bare inner
/// object; writes the wrapped form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "ToolCallWire", into = "ToolCallWire")]
pub struct ToolCall {
    /// The call's id, where one was given.
    pub id: Option<String>,
    /// The tool's name.
    pub name: String,
    /// The arguments: an object, or a string that holds one.
    pub arguments: Value,
}

impl ToolCall {
    /// Returns a call without an id.
    pub fn new(name: impl Into<String>, arguments: Value) -> Self {
        Self {
            id: None,
            name: name.into(),
            arguments,
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum ToolCallWire {
    Wrapped {
        #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
        kind: Option<String>,
        function: FunctionWire,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<String>,
    },
    Bare {
        name: String,
        arguments: Value,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<String>,
    },
}

#[derive(Serialize, Deserialize)]
struct FunctionWire {
    name: String,
    arguments: Value,
}

impl From<ToolCallWire> for ToolCall {
    fn from(wire: ToolCallWire) -> Self {
        match wire {
            ToolCallWire::Wrapped { function, id, .. } => Self {
                id,
                name: function.name,
                arguments: function.arguments,
            },
            ToolCallWire::Bare {
                name,
                arguments,
                id,
            } => Self {
                id,
                name,
                arguments,
            },
        }
    }
}

impl From<ToolCall> for ToolCallWire {
    fn from(call: ToolCall) -> Self {
        Self::Wrapped {
            kind: Some("function".to_owned()),
            function: FunctionWire {
                name: call.name,
                arguments: call.arguments,
            },
            id: call.id,
        }
    }
}

/// A tool that the model may call, in the function format of the chat completions API.
///
/// Reads `{"type": "function", "function": {…}}` and the bare inner object; writes the wrapped
/// form. Keys keep their order, since templates print them in it, and `extra` keeps the ones
/// that have no field here (`strict`, `return`).
///
/// ```
/// use wardian::chat::ToolSpec;
///
/// let tool = ToolSpec::new(
///     "bash",
///     "Run a command",
///     serde_json::json!({"type": "object", "properties": {"command": {"type": "string"}}}),
/// );
/// assert!(serde_json::to_string(&tool)?.starts_with(r#"{"type":"function","function":{"name":"bash""#));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "ToolSpecWire", into = "ToolSpecWire")]
pub struct ToolSpec {
    /// The tool's name.
    pub name: String,
    /// What it does, for the model.
    pub description: Option<String>,
    /// JSON schema of the arguments.
    pub parameters: Option<Value>,
    /// Further keys of the function object.
    pub extra: Map<String, Value>,
}

impl ToolSpec {
    /// Returns a tool with a name, a description and a JSON schema of its arguments.
    pub fn new(name: impl Into<String>, description: impl Into<String>, parameters: Value) -> Self {
        Self {
            name: name.into(),
            description: Some(description.into()),
            parameters: Some(parameters),
            extra: Map::new(),
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum ToolSpecWire {
    Wrapped {
        #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
        kind: Option<String>,
        function: ToolFunctionWire,
    },
    Bare(ToolFunctionWire),
}

#[derive(Serialize, Deserialize)]
struct ToolFunctionWire {
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parameters: Option<Value>,
    #[serde(flatten)]
    extra: Map<String, Value>,
}

impl From<ToolSpecWire> for ToolSpec {
    fn from(wire: ToolSpecWire) -> Self {
        let (ToolSpecWire::Wrapped { function, .. } | ToolSpecWire::Bare(function)) = wire;
        Self {
            name: function.name,
            description: function.description,
            parameters: function.parameters,
            extra: function.extra,
        }
    }
}

impl From<ToolSpec> for ToolSpecWire {
    fn from(spec: ToolSpec) -> Self {
        Self::Wrapped {
            kind: Some("function".to_owned()),
            function: ToolFunctionWire {
                name: spec.name,
                description: spec.description,
                parameters: spec.parameters,
                extra: spec.extra,
            },
        }
    }
}

fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn wrapped_and_bare_forms_read_the_same() {
        let wrapped: ToolCall = serde_json::from_value(
            json!({"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}),
        )
        .unwrap();
        let bare: ToolCall =
            serde_json::from_value(json!({"name": "f", "arguments": {"a": 1}})).unwrap();
        assert_eq!(wrapped, bare);
        let wrapped: ToolSpec = serde_json::from_value(
            json!({"type": "function", "function": {"name": "f", "strict": true}}),
        )
        .unwrap();
        assert_eq!(wrapped.extra.get("strict"), Some(&json!(true)));
        let again: ToolSpec =
            serde_json::from_str(&serde_json::to_string(&wrapped).unwrap()).unwrap();
        assert_eq!(wrapped, again);
    }

    #[test]
    fn null_content_reads_as_empty() {
        let message: Message = serde_json::from_value(
            json!({"role": "assistant", "content": null, "tool_calls": null}),
        )
        .unwrap();
        assert_eq!(message, Message::assistant(""));
    }
}
