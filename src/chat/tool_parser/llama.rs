//! Calls of Llama 3.x: JSON objects with `name` and `parameters`.

use serde_json::Value;

use super::{MAX_TOOL_CALLS, ParsedTurn, ToolCallError, check_call};
use crate::chat::ToolCall;

pub(super) const PYTHON_TAG: &str = "<|python_tag|>";

/// Tokens that end a turn, in case the text holds them.
const ENDS: [&str; 2] = ["<|eom_id|>", "<|eot_id|>"];

/// Reads one assistant turn behind its reasoning.
///
/// Without `<|python_tag|>` a turn is calls or it is content: it is calls if it begins with an
/// object that has a `name` and `parameters`, or that was to have them and is damaged.
pub(super) fn parse(text: &str) -> ParsedTurn {
    let mut turn = ParsedTurn::default();
    if let Some((content, calls)) = text.split_once(PYTHON_TAG) {
        content.trim().clone_into(&mut turn.content);
        turn.tool_calls = parse_calls(calls);
    } else if is_call(text) {
        turn.tool_calls = parse_calls(text);
    } else {
        text.clone_into(&mut turn.content);
    }
    turn
}

fn is_call(text: &str) -> bool {
    if !text.trim_start().starts_with('{') {
        return false;
    }
    let first = serde_json::Deserializer::from_str(text)
        .into_iter::<Value>()
        .next();
    match first {
        Some(Ok(value)) => {
            let has = |key| value.get(key).is_some();
            has("name") && (has("parameters") || has("arguments"))
        }
        _ => {
            let names = |key| text.contains(key);
            names("\"name\"") && (names("\"parameters\"") || names("\"arguments\""))
        }
    }
}

/// Reads objects one after the other, with nothing but `;` or `,` between them.
fn parse_calls(text: &str) -> Vec<Result<ToolCall, ToolCallError>> {
    let mut calls = Vec::new();
    let mut rest = without_end(text);
    while !rest.is_empty() || calls.is_empty() {
        if calls.len() == MAX_TOOL_CALLS {
            calls.push(Err(ToolCallError::TooMany {
                limit: MAX_TOOL_CALLS,
            }));
            break;
        }
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        match values.next() {
            Some(Ok(value)) => {
                calls.push(check_call(value, "parameters"));
                rest = rest[values.byte_offset()..]
                    .trim_start()
                    .trim_start_matches([';', ','])
                    .trim_start();
                if !rest.is_empty() && !rest.starts_with('{') {
                    calls.push(Err(ToolCallError::TrailingText));
                    break;
                }
            }
            Some(Err(error)) if !error.is_eof() => {
                let message = error.to_string();
                calls.push(Err(ToolCallError::InvalidJson { message }));
                break;
            }
            Some(Err(_)) | None => {
                calls.push(Err(ToolCallError::Truncated { end: "}" }));
                break;
            }
        }
    }
    calls
}

fn without_end(text: &str) -> &str {
    let mut text = text.trim();
    for end in ENDS {
        text = text.strip_suffix(end).unwrap_or(text).trim_end();
    }
    text
}
