//! What the model wrote, read back: reasoning, content and tool calls.
//!
//! The format is Hermes's, which Qwen2.5 and Qwen3 use: reasoning ends at `</think>`, and each
//! call is a JSON object between `<tool_call>` and `</tool_call>`. A call that cannot be read is a
//! value ([`ToolCallError`]) whose text can go back to the model as a tool result; it never turns
//! into a call with empty arguments. The input is untrusted and any text is accepted.

use serde_json::Value;

use super::ToolCall;

const TOOL_CALL: &str = "<tool_call>";
const TOOL_CALL_END: &str = "</tool_call>";
const THINK: &str = "<think>";
const THINK_END: &str = "</think>";

/// Most calls that are read from one turn; text after them stays unread.
const MAX_TOOL_CALLS: usize = 64;

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
    #[error("tool call is cut off: it must end in `</tool_call>`")]
    Truncated,
    /// The call is not JSON.
    #[error("tool call is not valid JSON: {message}")]
    InvalidJson {
        /// What the parser said, with line and column.
        message: String,
    },
    /// Something follows the JSON object before `</tool_call>`.
    #[error("tool call holds more than one JSON object")]
    TrailingText,
    /// The call is JSON, but not an object.
    #[error("tool call must be a JSON object with `name` and `arguments`, found {found}")]
    NotAnObject {
        /// The JSON type that was found.
        found: &'static str,
    },
    /// The object has no usable name.
    #[error("tool call has no `name` string")]
    MissingName,
    /// The object has no arguments.
    #[error("tool call `{name}` has no `arguments` object")]
    MissingArguments {
        /// The tool that was named.
        name: String,
    },
    /// The arguments are not an object.
    #[error("`arguments` of tool call `{name}` must be a JSON object, found {found}")]
    ArgumentsNotAnObject {
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
    let (reasoning, mut rest) = split_reasoning(text);
    let mut turn = ParsedTurn {
        reasoning,
        ..ParsedTurn::default()
    };
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
        let (call, after) = parse_call(&rest[start + TOOL_CALL.len()..]);
        turn.tool_calls.push(call);
        rest = after;
    }
    push_content(&mut turn.content, rest);
    turn
}

/// Splits at the last `</think>`, as Qwen's templates do. Reasoning that was opened and not
/// closed runs to the end: a call inside it was not made.
fn split_reasoning(text: &str) -> (Option<String>, &str) {
    let reasoning = |text: &str| {
        let text = text.rsplit_once(THINK).map_or(text, |(_, inner)| inner);
        Some(text.trim_matches('\n').to_owned())
    };
    // A `</think>` inside a call's arguments closes nothing.
    let head = match text.find(TOOL_CALL) {
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

fn push_content(content: &mut String, piece: &str) {
    let piece = piece.trim();
    if !piece.is_empty() {
        if !content.is_empty() {
            content.push('\n');
        }
        content.push_str(piece);
    }
}

/// Reads the call at the start of `text`, which follows `<tool_call>`; returns the rest too.
///
/// The JSON value is read first and the closing mark looked for after it, since a string inside
/// the arguments may spell `</tool_call>`.
fn parse_call(text: &str) -> (Result<ToolCall, ToolCallError>, &str) {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    match values.next() {
        Some(Ok(value)) => {
            let after = &text[values.byte_offset()..];
            match after.trim_start().strip_prefix(TOOL_CALL_END) {
                Some(rest) => (check_call(value), rest),
                None if after.trim().is_empty() => (Err(ToolCallError::Truncated), ""),
                None => {
                    let (closed, rest) = skip_call(after);
                    let error = if closed {
                        ToolCallError::TrailingText
                    } else {
                        ToolCallError::Truncated
                    };
                    (Err(error), rest)
                }
            }
        }
        Some(Err(error)) if error.is_eof() => (Err(ToolCallError::Truncated), ""),
        Some(Err(error)) => {
            let (_, rest) = skip_call(text);
            let message = error.to_string();
            (Err(ToolCallError::InvalidJson { message }), rest)
        }
        None => (Err(ToolCallError::Truncated), ""),
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

fn check_call(value: Value) -> Result<ToolCall, ToolCallError> {
    let Value::Object(mut fields) = value else {
        return Err(ToolCallError::NotAnObject {
            found: json_type(&value),
        });
    };
    let name = match fields.remove("name") {
        Some(Value::String(name)) if !name.trim().is_empty() => name,
        _ => return Err(ToolCallError::MissingName),
    };
    match fields.remove("arguments") {
        Some(arguments @ Value::Object(_)) => Ok(ToolCall::new(name, arguments)),
        // The form of the chat completions API: the object as a string.
        Some(Value::String(text)) => match serde_json::from_str(&text) {
            Ok(arguments @ Value::Object(_)) => Ok(ToolCall::new(name, arguments)),
            _ => Err(ToolCallError::ArgumentsNotAnObject {
                name,
                found: "a string",
            }),
        },
        Some(other) => Err(ToolCallError::ArgumentsNotAnObject {
            name,
            found: json_type(&other),
        }),
        None => Err(ToolCallError::MissingArguments { name }),
    }
}

fn json_type(value: &Value) -> &'static str {
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
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn only_error(text: &str) -> ToolCallError {
        let turn = parse_turn(text);
        assert_eq!(turn.tool_calls.len(), 1, "{turn:?}");
        turn.tool_calls[0].clone().unwrap_err()
    }

    #[test]
    fn text_without_calls_is_content() {
        let turn = parse_turn("  4 is the answer\n");
        assert_eq!(turn.content, "  4 is the answer\n");
        assert_eq!(turn.reasoning, None);
        assert!(turn.tool_calls.is_empty());
    }

    #[test]
    fn parallel_calls_keep_their_order() {
        let turn = parse_turn(
            "a\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\nb\n\
             <tool_call>{\"name\": \"g\", \"arguments\": {\"x\": 1}}</tool_call>",
        );
        assert_eq!(turn.content, "a\nb");
        let calls: Vec<ToolCall> = turn.tool_calls.into_iter().map(Result::unwrap).collect();
        assert_eq!(
            calls,
            [
                ToolCall::new("f", json!({})),
                ToolCall::new("g", json!({"x": 1}))
            ]
        );
    }

    #[test]
    fn closing_marks_inside_strings_do_not_end_a_call() {
        let turn = parse_turn(
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"</tool_call></think>\"}}</tool_call>",
        );
        assert_eq!(
            turn.tool_calls,
            [Ok(ToolCall::new("f", json!({"x": "</tool_call></think>"})))]
        );
        assert_eq!(turn.reasoning, None);
    }

    #[test]
    fn calls_inside_reasoning_are_not_made() {
        let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
        let turn = parse_turn(&format!("<think>\nmaybe {call}\n</think>\n\nno"));
        assert_eq!(turn.content, "no");
        assert!(turn.tool_calls.is_empty(), "{turn:?}");
        let open = parse_turn(&format!("<think>\nmaybe {call}"));
        assert!(open.tool_calls.is_empty(), "{open:?}");
        assert_eq!(open.content, "");
    }

    #[test]
    fn reasoning_opened_by_the_prompt_needs_no_opening_mark() {
        let turn = parse_turn("hm\n</think>\n\n4");
        assert_eq!(turn.reasoning.as_deref(), Some("hm"));
        assert_eq!(turn.content, "4");
    }

    #[test]
    fn string_arguments_are_read() {
        let turn = parse_turn(r#"<tool_call>{"name": "f", "arguments": "{\"x\": 1}"}</tool_call>"#);
        assert_eq!(turn.tool_calls, [Ok(ToolCall::new("f", json!({"x": 1})))]);
    }

    #[test]
    fn unreadable_calls_say_what_is_wrong() {
        assert_eq!(
            only_error("<tool_call>\n{\"name\": \"f\""),
            ToolCallError::Truncated
        );
        assert_eq!(only_error("<tool_call>"), ToolCallError::Truncated);
        assert_eq!(
            only_error("<tool_call>{\"name\": \"f\", \"arguments\": {}}"),
            ToolCallError::Truncated
        );
        assert!(matches!(
            only_error("<tool_call>{'name': 'f'}</tool_call>"),
            ToolCallError::InvalidJson { .. }
        ));
        assert_eq!(
            only_error("<tool_call>{\"name\": \"f\", \"arguments\": {}} {}</tool_call>"),
            ToolCallError::TrailingText
        );
        assert_eq!(
            only_error("<tool_call>[]</tool_call>").to_string(),
            "tool call must be a JSON object with `name` and `arguments`, found an array"
        );
        assert_eq!(
            only_error("<tool_call>{\"arguments\": {}}</tool_call>"),
            ToolCallError::MissingName
        );
        assert!(matches!(
            only_error("<tool_call>{\"name\": \"f\"}</tool_call>"),
            ToolCallError::MissingArguments { .. }
        ));
        assert!(matches!(
            only_error("<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>"),
            ToolCallError::ArgumentsNotAnObject { .. }
        ));
    }

    #[test]
    fn a_broken_call_does_not_hide_the_next_one() {
        let turn = parse_turn(
            "<tool_call>{oops}</tool_call><tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
        );
        assert!(matches!(
            turn.tool_calls[0],
            Err(ToolCallError::InvalidJson { .. })
        ));
        assert_eq!(turn.tool_calls[1], Ok(ToolCall::new("f", json!({}))));
    }

    #[test]
    fn deep_nesting_is_an_error_and_not_a_stack_overflow() {
        let text = format!("<tool_call>{}</tool_call>", "[".repeat(100_000));
        assert!(matches!(
            only_error(&text),
            ToolCallError::InvalidJson { .. }
        ));
    }

    #[test]
    fn the_number_of_calls_is_bounded() {
        let turn = parse_turn(&"<tool_call>{}</tool_call>".repeat(1000));
        assert_eq!(turn.tool_calls.len(), MAX_TOOL_CALLS + 1);
    }

    fn json_object() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            any::<i64>().prop_map(Value::from),
            any::<bool>().prop_map(Value::from),
            "\\PC{0,12}".prop_map(Value::from),
            Just(Value::from("</tool_call>")),
            Just(Value::from("<tool_call>{")),
        ];
        let value = leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("\\PC{0,6}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        });
        prop::collection::btree_map("[a-z]{1,6}", value, 0..4)
            .prop_map(|map| Value::Object(map.into_iter().collect()))
    }

    proptest! {
        #[test]
        fn any_text_is_accepted(text in "(\\PC|<tool_call>|</tool_call>|<think>|</think>|\\{|\"|\n){0,60}") {
            parse_turn(&text);
        }

        #[test]
        fn written_calls_are_read_back(arguments in json_object()) {
            let text = format!(
                "<tool_call>\n{{\"name\": \"f\", \"arguments\": {arguments}}}\n</tool_call>"
            );
            prop_assert_eq!(parse_turn(&text).tool_calls, [Ok(ToolCall::new("f", arguments))]);
        }

        /// Whatever is cut off, the result is the call that was meant or an error, never a call
        /// with other arguments.
        #[test]
        fn truncated_calls_never_lose_arguments(arguments in json_object(), cut in any::<prop::sample::Index>()) {
            let text = format!(
                "<tool_call>\n{{\"name\": \"f\", \"arguments\": {arguments}}}\n</tool_call>"
            );
            let mut end = cut.index(text.len());
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            for call in parse_turn(&text[..end]).tool_calls {
                prop_assert_eq!(call, Err(ToolCallError::Truncated));
            }
        }
    }
}
