//! Calls between `<tool_call>` and `</tool_call>`: JSON, or Qwen's elements.

use serde_json::{Map, Value};

use super::{MAX_TOOL_CALLS, ParsedTurn, ToolCallError, ToolCallFormat, check_call, push_content};
use crate::chat::schema::{Document, Kinds, Written};
use crate::chat::{ToolCall, ToolSpec};

pub(in crate::chat) const TOOL_CALL: &str = "<tool_call>";
pub(in crate::chat) const TOOL_CALL_END: &str = "</tool_call>";
pub(in crate::chat) const FUNCTION: &str = "<function=";
pub(in crate::chat) const FUNCTION_END: &str = "</function>";
pub(in crate::chat) const PARAMETER: &str = "<parameter=";
pub(in crate::chat) const PARAMETER_END: &str = "</parameter>";

const TRUNCATED: ToolCallError = ToolCallError::Truncated { end: TOOL_CALL_END };

/// A call that was read or refused, and the text behind it.
type Read<'a> = (Result<ToolCall, ToolCallError>, &'a str);

/// Reads one assistant turn behind its reasoning.
pub(super) fn parse(text: &str, format: ToolCallFormat, tools: &[ToolSpec]) -> ParsedTurn {
    let mut turn = ParsedTurn::default();
    let mut rest = text;
    if !rest.contains(TOOL_CALL) {
        rest.clone_into(&mut turn.content);
        return turn;
    }
    while let Some(start) = rest.find(TOOL_CALL) {
        push_content(&mut turn.content, &rest[..start]);
        if turn.tool_calls.len() == MAX_TOOL_CALLS {
            turn.tool_calls.push(Err(ToolCallError::TooMany {
                limit: MAX_TOOL_CALLS,
            }));
            return turn;
        }
        let call = &rest[start + TOOL_CALL.len()..];
        // What was meant is plain from the first characters, whatever the template teaches.
        let begins = |mark| call.trim_start().starts_with(mark);
        let is_xml = begins(FUNCTION) || (format == ToolCallFormat::QwenXml && !begins("{"));
        let (call, after) = if is_xml {
            parse_xml(call, tools)
        } else {
            parse_json(call)
        };
        turn.tool_calls.push(call);
        rest = after;
    }
    push_content(&mut turn.content, rest);
    turn
}

/// Reads the call at the start of `text`, which follows `<tool_call>`.
///
/// The JSON value is read first and the closing mark looked for after it, since a string inside
/// the arguments may spell `</tool_call>`.
fn parse_json(text: &str) -> Read<'_> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    match values.next() {
        Some(Ok(value)) => {
            let after = &text[values.byte_offset()..];
            close(after, || check_call(value, "arguments"))
        }
        Some(Err(error)) if error.is_eof() => (Err(TRUNCATED), ""),
        Some(Err(error)) => {
            let (_, rest) = skip_call(text);
            let message = error.to_string();
            (Err(ToolCallError::InvalidJson { message }), rest)
        }
        None => (Err(TRUNCATED), ""),
    }
}

/// Returns the call that `after` closes, or what stands in the way.
fn close(after: &str, call: impl FnOnce() -> Result<ToolCall, ToolCallError>) -> Read<'_> {
    match after.trim_start().strip_prefix(TOOL_CALL_END) {
        Some(rest) => (call(), rest),
        None if after.trim().is_empty() => (Err(TRUNCATED), ""),
        None => {
            let (closed, rest) = skip_call(after);
            let error = if closed {
                ToolCallError::TrailingText
            } else {
                TRUNCATED
            };
            (Err(error), rest)
        }
    }
}

/// Skips an unreadable call: to after its closing mark, else to the next opening one.
fn skip_call(text: &str) -> (bool, &str) {
    let end = text.find(TOOL_CALL_END);
    let next = text.find(TOOL_CALL).unwrap_or(text.len());
    match end {
        Some(end) if end < next => (true, &text[end + TOOL_CALL_END.len()..]),
        _ => (false, &text[next..]),
    }
}

/// Reads the elements at the start of `text`, which follows `<tool_call>`.
fn parse_xml<'a>(text: &'a str, tools: &[ToolSpec]) -> Read<'a> {
    match parse_function(text, tools) {
        Ok((call, after)) => close(after, || Ok(call)),
        Err(error) => {
            let rest = match error {
                ToolCallError::Truncated { .. } => "",
                _ => skip_call(text).1,
            };
            (Err(error), rest)
        }
    }
}

/// Reads one `<function=…>` element; returns the text behind it, too.
fn parse_function<'a>(
    text: &'a str,
    tools: &[ToolSpec],
) -> Result<(ToolCall, &'a str), ToolCallError> {
    let (name, mut rest) = parse_opening(text, FUNCTION)?;
    let tool = tools.iter().find(|tool| tool.name == name);
    let document = tool.and_then(|tool| tool.parameters.as_ref().map(Document::new));
    let properties = document
        .as_ref()
        .and_then(|document| document.top()?.get("properties"));
    let mut arguments = Map::new();
    loop {
        if let Some(after) = rest.trim_start().strip_prefix(FUNCTION_END) {
            return Ok((ToolCall::new(name, Value::Object(arguments)), after));
        }
        let (key, after) = parse_opening(rest, PARAMETER)?;
        let (value, after) = split_value(after)?;
        let property = properties.and_then(|properties| properties.get(key));
        let value = match document.as_ref().zip(property) {
            Some((document, property)) => typed(value, &document.written(property)),
            None => Value::from(value),
        };
        if arguments.insert(key.to_owned(), value).is_some() {
            return Err(ToolCallError::InvalidXml {
                problem: format!("parameter `{key}` is given twice"),
            });
        }
        rest = after;
    }
}

/// Reads `<function=NAME>` or `<parameter=NAME>`; returns the name and the text behind it.
fn parse_opening<'a>(text: &'a str, mark: &str) -> Result<(&'a str, &'a str), ToolCallError> {
    let text = text.trim_start();
    let Some(rest) = text.strip_prefix(mark) else {
        // The text may end within the mark.
        if mark.starts_with(text) || FUNCTION_END.starts_with(text) {
            return Err(TRUNCATED);
        }
        return Err(ToolCallError::InvalidXml {
            problem: format!("expected `{mark}…>`"),
        });
    };
    let Some((name, rest)) = rest.split_once('>') else {
        return Err(TRUNCATED);
    };
    let name = name.trim();
    if !is_element_name(name) {
        return Err(ToolCallError::InvalidXml {
            problem: format!("the name after `{mark}` is not one word"),
        });
    }
    Ok((name, rest))
}

/// Returns whether a name can stand in `<function=NAME>` or `<parameter=NAME>`.
pub(in crate::chat) fn is_element_name(name: &str) -> bool {
    let is_part = |c: char| !c.is_whitespace() && !"<>=\"'".contains(c);
    !name.is_empty() && name.chars().all(is_part)
}

/// Splits the text behind `<parameter=NAME>` at the end of its value.
///
/// Values are not escaped, and code may spell `</parameter>`. So the value ends at the first one
/// that something follows which may: another parameter, or the end of the call.
fn split_value(text: &str) -> Result<(&str, &str), ToolCallError> {
    let mut ends = text.match_indices(PARAMETER_END).peekable();
    if ends.peek().is_none() {
        return Err(TRUNCATED);
    }
    let mut is_cut_off = false;
    for (end, mark) in ends {
        let after = &text[end + mark.len()..];
        let next = after.trim_start();
        let ends_call = next
            .strip_prefix(FUNCTION_END)
            .is_some_and(|next| next.trim_start().starts_with(TOOL_CALL_END));
        if ends_call || next.starts_with(PARAMETER) {
            let value = &text[..end];
            let value = value.strip_prefix('\n').unwrap_or(value);
            return Ok((value.strip_suffix('\n').unwrap_or(value), after));
        }
        let end_of_call = next.strip_prefix(FUNCTION_END).map_or("", str::trim_start);
        is_cut_off |= FUNCTION_END.starts_with(next)
            || PARAMETER.starts_with(next)
            || (next.starts_with(FUNCTION_END) && TOOL_CALL_END.starts_with(end_of_call));
    }
    if is_cut_off {
        return Err(TRUNCATED);
    }
    Err(ToolCallError::InvalidXml {
        problem: format!(
            "`{PARAMETER_END}` must precede `{PARAMETER}…>` or `{FUNCTION_END}` with \
             `{TOOL_CALL_END}`"
        ),
    })
}

/// Reads a value as its schema says that it is written. What should be JSON and is none, or a string that
/// stands as it is, stays text.
fn typed(text: &str, written: &Written<'_>) -> Value {
    let as_text = || Value::from(text);
    let kinds = match written {
        Written::Text { .. } => return as_text(),
        Written::Json(kinds) => *kinds,
    };
    match text.trim() {
        // Python's spellings are what models of code write.
        "True" if kinds.contain(Kinds::BOOLEAN) => Value::Bool(true),
        "False" if kinds.contain(Kinds::BOOLEAN) => Value::Bool(false),
        "None" if kinds.contain(Kinds::NULL) => Value::Null,
        trimmed => match serde_json::from_str(trimmed) {
            Ok(value) if !kinds.contain(Kinds::STRING) || kinds.contain(Kinds::of(&value)) => value,
            _ => as_text(),
        },
    }
}
