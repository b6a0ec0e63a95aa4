//! What the model wrote, read back: reasoning, content and tool calls.
//!
//! Reasoning ends at `</think>`. How calls are written depends on the model ([`ToolCallFormat`]):
//!
//! - Hermes's format, of Qwen2.5 and Qwen3: a JSON object between `<tool_call>` and `</tool_call>`;
//! - that of Qwen3-Coder and Qwen3.5: `<function=name>` with `<parameter=key>` elements in there;
//! - that of Llama 3: the whole turn, or what follows `<|python_tag|>`, is a JSON object.
//!
//! A call that cannot be read is a value ([`ToolCallError`]) whose text can go back to the model as a
//! tool result; it never turns into a call with empty arguments. The input is untrusted and any
//! text is accepted.

mod llama;
mod tagged;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{THINK, THINK_END, ToolCall, ToolSpec};

pub(super) use tagged::{
    FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END, TOOL_CALL, TOOL_CALL_END, is_element_name,
};

/// Most calls that are read from one turn; text after them stays unread.
pub(super) const MAX_TOOL_CALLS: usize = 64;

/// How a model writes tool calls.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ToolCallFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
    #[default]
    Hermes,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.
    QwenXml,
    /// `{"name": …, "parameters": {…}}` as the whole turn or behind `<|python_tag|>`.
    Llama3,
}

impl ToolCallFormat {
    /// All formats by their names.
    const NAMES: [(&str, Self); 3] = [
        ("hermes", Self::Hermes),
        ("qwen_xml", Self::QwenXml),
        ("llama3", Self::Llama3),
    ];

    /// Returns the format that a chat template teaches the model; Hermes's where it teaches none.
    #[must_use]
    pub fn detect(template: &str) -> Self {
        if template.contains("<function=") {
            Self::QwenXml
        } else if template.contains(TOOL_CALL) {
            Self::Hermes
        } else if template.contains(llama::PYTHON_TAG) || template.contains("\"parameters\": ") {
            Self::Llama3
        } else {
            Self::Hermes
        }
    }

    /// Returns what begins a call among other text.
    pub(super) fn opening_mark(self) -> &'static str {
        match self {
            Self::Hermes | Self::QwenXml => TOOL_CALL,
            Self::Llama3 => llama::PYTHON_TAG,
        }
    }

    /// Returns the byte at which the first call of `text` may begin, or its text up to there ends:
    /// what comes before is content, whatever follows.
    #[must_use]
    pub fn content_end(self, text: &str) -> usize {
        if self == Self::Llama3 && text.trim_start().starts_with('{') {
            return 0;
        }
        mark_start(text, self.opening_mark())
    }
}

/// Returns where `mark`, or a part of it that ends the text, begins.
fn mark_start(text: &str, mark: &str) -> usize {
    text.char_indices()
        .map(|(start, _)| start)
        .find(|&start| text[start..].starts_with(mark) || mark.starts_with(&text[start..]))
        .unwrap_or(text.len())
}

impl fmt::Display for ToolCallFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, format)| format == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

impl FromStr for ToolCallFormat {
    type Err = UnknownToolCallFormat;

    fn from_str(name: &str) -> Result<Self, UnknownToolCallFormat> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found
            .map(|(_, format)| *format)
            .ok_or_else(|| UnknownToolCallFormat {
                name: name.to_owned(),
            })
    }
}

/// A name that no [`ToolCallFormat`] has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown format of tool calls `{name}`; known are `hermes`, `qwen_xml` and `llama3`")]
pub struct UnknownToolCallFormat {
    name: String,
}

/// One assistant turn, taken apart.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ParsedTurn {
    /// The text before `</think>`, without its marks and surrounding newlines.
    pub reasoning: Option<String>,
    /// The text outside reasoning and calls.
    pub content: String,
    /// The calls in the order of the text, each read or refused.
    pub tool_calls: Vec<Result<ToolCall, ToolCallError>>,
}

/// A tool call that could not be read. Its text is meant for the model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ToolCallError {
    /// The text ended inside the call.
    #[error("tool call is cut off: it must end in `{end}`")]
    Truncated {
        /// What a whole call ends in.
        end: &'static str,
    },
    /// The call is not JSON.
    #[error("tool call is not valid JSON: {message}")]
    InvalidJson {
        /// What the parser said, with line and column.
        message: String,
    },
    /// Something follows the JSON object before `</tool_call>`.
    #[error("tool call holds more than one JSON object")]
    TrailingText,
    /// The call's elements are not those of its format.
    #[error(
        "tool call must be `<function=NAME>`, then `<parameter=NAME>VALUE</parameter>` for each \
         argument, then `</function>`: {problem}"
    )]
    InvalidXml {
        /// What is wrong with them.
        problem: String,
    },
    /// The call is JSON, but not an object.
    #[error("tool call must be a JSON object with `name` and `{key}`, found {found}")]
    NotAnObject {
        /// What the arguments are called.
        key: &'static str,
        /// The JSON type that was found.
        found: &'static str,
    },
    /// The object has no usable name.
    #[error("tool call has no `name` string")]
    MissingName,
    /// The object has no arguments.
    #[error("tool call `{name}` has no `{key}` object")]
    MissingArguments {
        /// What the arguments are called.
        key: &'static str,
        /// The tool that was named.
        name: String,
    },
    /// The arguments are not an object.
    #[error("`{key}` of tool call `{name}` must be a JSON object, found {found}")]
    ArgumentsNotAnObject {
        /// What the arguments are called.
        key: &'static str,
        /// The tool that was named.
        name: String,
        /// The JSON type that was found.
        found: &'static str,
    },
    /// The turn holds more calls than are read.
    #[error("too many tool calls in one turn, at most {limit} are read")]
    TooMany {
        /// The most calls that are read.
        limit: usize,
    },
}

/// Reads one assistant turn; any text is accepted.
///
/// ```
/// use wardian::chat::parse_turn;
///
/// let turn = parse_turn(
///     "<think>\nadd\n</think>\n\nI compute.\n<tool_call>\n\
///      {\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>",
/// );
/// assert_eq!(turn.reasoning.as_deref(), Some("add"));
/// assert_eq!(turn.content, "I compute.");
/// assert_eq!(turn.tool_calls[0].as_ref().map(|call| call.name.as_str()), Ok("add"));
/// ```
pub fn parse_turn(text: &str) -> ParsedTurn {
    parse_turn_as(text, ToolCallFormat::Hermes, &[])
}

/// Reads one assistant turn with calls in a given format; any text is accepted.
///
/// Arguments that are written without their types get those that `tools` says.
pub fn parse_turn_as(text: &str, format: ToolCallFormat, tools: &[ToolSpec]) -> ParsedTurn {
    let (reasoning, rest) = split_reasoning(text, format.opening_mark());
    ParsedTurn {
        reasoning,
        ..parse_calls(rest, format, tools)
    }
}

/// Reads content and calls as [`parse_turn_as`] does, from text without reasoning: a `</think>` in
/// it is content.
pub fn parse_calls(text: &str, format: ToolCallFormat, tools: &[ToolSpec]) -> ParsedTurn {
    match format {
        ToolCallFormat::Hermes | ToolCallFormat::QwenXml => tagged::parse(text, format, tools),
        ToolCallFormat::Llama3 => llama::parse(text),
    }
}

/// Splits at the last `</think>`, as Qwen's templates do. Reasoning that was opened and not
/// closed runs to the end: a call inside it was not made. `call` is how a call begins.
fn split_reasoning<'a>(text: &'a str, call: &str) -> (Option<String>, &'a str) {
    let reasoning = |text: &str| {
        let text = text.rsplit_once(THINK).map_or(text, |(_, inner)| inner);
        Some(text.trim_matches('\n').to_owned())
    };
    // A `</think>` inside a call's arguments closes nothing.
    let head = match text.find(call) {
        Some(call) if !text[..call].contains(THINK) || text[..call].contains(THINK_END) => {
            &text[..call]
        }
        _ => text,
    };
    if let Some(end) = head.rfind(THINK_END) {
        let content = &text[end + THINK_END.len()..];
        return (reasoning(&head[..end]), content.trim_start_matches('\n'));
    }
    if text.trim_start().starts_with(THINK) {
        return (reasoning(text), "");
    }
    (None, text)
}

/// Adds a piece of content on a line of its own.
fn push_content(content: &mut String, piece: &str) {
    let piece = piece.trim();
    if !piece.is_empty() {
        if !content.is_empty() {
            content.push('\n');
        }
        content.push_str(piece);
    }
}

/// Checks a call that was read as JSON, whose arguments are called `key`.
fn check_call(value: Value, key: &'static str) -> Result<ToolCall, ToolCallError> {
    let Value::Object(mut fields) = value else {
        return Err(ToolCallError::NotAnObject {
            key,
            found: json_type(&value),
        });
    };
    let name = match fields.remove("name") {
        Some(Value::String(name)) if !name.trim().is_empty() => name,
        _ => return Err(ToolCallError::MissingName),
    };
    // Models mix the two names up; either can only mean the arguments.
    let arguments = ["arguments", "parameters"]
        .into_iter()
        .find_map(|key| fields.remove(key));
    match arguments {
        Some(arguments @ Value::Object(_)) => Ok(ToolCall::new(name, arguments)),
        // The form of the chat completions API: the object as a string.
        Some(Value::String(text)) => match serde_json::from_str(&text) {
            Ok(arguments @ Value::Object(_)) => Ok(ToolCall::new(name, arguments)),
            _ => Err(ToolCallError::ArgumentsNotAnObject {
                key,
                name,
                found: "a string",
            }),
        },
        Some(other) => Err(ToolCallError::ArgumentsNotAnObject {
            key,
            name,
            found: json_type(&other),
        }),
        None => Err(ToolCallError::MissingArguments { key, name }),
    }
}

/// Names the JSON type of a value, for messages.
pub(crate) fn json_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests;
