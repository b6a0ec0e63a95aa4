//! What a policy reads of an observation.

use serde_json::{Map, Value};

use super::Fault;

/// What a step that says nothing is shown as.
pub(super) const NOTHING: &str = "(no output)";

/// What a tool's observation says.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ToolOutcome {
    pub(super) text: String,
    /// Whether the call failed, by its arguments or by what it did.
    pub(super) is_failure: bool,
}

/// Returns the text of an observation: of `field`, if one is named; else what a program printed; else the
/// `instruction`; else the only text in it; else what is in it, as JSON. Empty where it says nothing.
pub(super) fn text(observation: &Map<String, Value>, field: Option<&str>) -> String {
    if let Some(field) = field {
        return observation.get(field).map_or_else(String::new, plain);
    }
    let string = |key: &str| observation.get(key).and_then(Value::as_str);
    let output = (string("stdout"), string("stderr"));
    if output.0.or(output.1).is_some() {
        return program_output(output, observation.get("exit_code"));
    }
    if let Some(instruction) = string("instruction") {
        return instruction.to_owned();
    }
    let said: Map<String, Value> = observation
        .iter()
        .filter(|(_, value)| says_something(value))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    match said.values().next() {
        None => String::new(),
        Some(Value::String(text)) if said.len() == 1 => text.clone(),
        Some(_) => Value::Object(said).to_string(),
    }
}

/// Returns what a program printed; its exit code where it says nothing of a failure.
fn program_output(
    (stdout, stderr): (Option<&str>, Option<&str>),
    exit_code: Option<&Value>,
) -> String {
    let text = format!(
        "{}{}",
        stdout.unwrap_or_default(),
        stderr.unwrap_or_default()
    );
    let text = text.trim_end().to_owned();
    match exit_code.and_then(Value::as_i64) {
        Some(code) if code != 0 && text.is_empty() => format!("exited with code {code}"),
        _ => text,
    }
}

/// Returns what a tool's observation says: in `field`, if one is named that is there, else as its result.
///
/// # Errors
///
/// Fails where the server could not reach the tool: that says nothing about the call.
pub(super) fn tool_outcome(
    observation: &Map<String, Value>,
    field: Option<&str>,
) -> Result<ToolOutcome, Fault> {
    if let Some(error) = observation.get("error").filter(|error| !error.is_null()) {
        let field = |name: &str| error.get(name).and_then(Value::as_str);
        let message = field("message").map_or_else(|| plain(error), str::to_owned);
        if field("error_type") == Some("transport_error") {
            let tool = observation.get("tool_name").map_or_else(String::new, plain);
            return Err(Fault::Tool { tool, message });
        }
        return Ok(ToolOutcome {
            text: format!("error: {message}"),
            is_failure: true,
        });
    }
    let result = observation.get("result").unwrap_or(&Value::Null);
    let content = result.get("content").and_then(Value::as_array);
    let blocks = content.into_iter().flatten();
    let texts: Vec<&str> = blocks
        .filter_map(|block| block.get("text").and_then(Value::as_str))
        .collect();
    let is_failure = result.get("is_error") == Some(&Value::Bool(true));
    // What failed says so in the result.
    let named = field.filter(|_| !is_failure);
    let named = named.and_then(|field| observation.get(field));
    let text = match (named, texts.is_empty(), result.get("data")) {
        (Some(named), ..) => plain(named),
        (None, false, _) => texts.join("\n"),
        (None, true, Some(data)) => plain(data),
        (None, true, None) => plain(result),
    };
    Ok(ToolOutcome { text, is_failure })
}

/// Returns a text as it is, nothing for null, and JSON for all else.
fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn says_something(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn observations_are_shown_as_text() {
        for (observation, expected) in [
            (json!({"stdout": "2\n", "stderr": "", "exit_code": 0}), "2"),
            (
                json!({"stdout": "a\n", "stderr": "b", "exit_code": 1}),
                "a\nb",
            ),
            (
                json!({"stdout": "", "stderr": "", "exit_code": 137}),
                "exited with code 137",
            ),
            (json!({"stdout": "", "stderr": "", "exit_code": 0}), ""),
            (json!({"instruction": "Add.", "task_id": "7"}), "Add."),
            (json!({"echo": "hi", "extra": null, "list": []}), "hi"),
            (
                json!({"prompt": "Go", "legal": [1], "none": {}}),
                r#"{"prompt":"Go","legal":[1]}"#,
            ),
            (json!({"score": 0}), r#"{"score":0}"#),
            (json!({}), ""),
        ] {
            let observation = observation.as_object().unwrap();
            assert_eq!(text(observation, None), expected);
        }
        let board = json!({"board": [[1]], "text": "x"});
        let board = board.as_object().unwrap();
        assert_eq!(text(board, Some("board")), "[[1]]");
        assert_eq!(text(board, Some("gone")), "");
    }

    #[test]
    fn tools_results_and_errors_are_told_apart_from_faults() {
        let outcome = |observation: Value| tool_outcome(observation.as_object().unwrap(), None);
        // As recorded of OpenEnv 0.10.
        let result = json!({"tool_name": "add", "error": null, "result": {
            "content": [{"type": "text", "text": "5"}], "structured_content": {"result": 5},
            "data": 5, "is_error": false,
        }});
        let text = |text: &str, is_failure| ToolOutcome {
            text: text.to_owned(),
            is_failure,
        };
        assert_eq!(outcome(result).unwrap(), text("5", false));
        let failed = |kind: &str| json!({"tool_name": "boom", "result": null, "error": {"error_type": kind, "message": "m"}});
        assert_eq!(
            outcome(failed("execution_error")).unwrap(),
            text("error: m", true)
        );
        let fault = outcome(failed("transport_error")).unwrap_err().to_string();
        assert!(fault.contains("`boom` failed by no fault"), "{fault}");
        // A field that is named is shown where it is there, and a failure is told all the same.
        let named = |observation: Value| {
            tool_outcome(observation.as_object().unwrap(), Some("board")).unwrap()
        };
        let moved = json!({"result": {"data": "moved"}, "board": [[1]]});
        assert_eq!(named(moved), text("[[1]]", false));
        assert_eq!(
            named(json!({"result": {"data": "moved"}})),
            text("moved", false)
        );
        let refused = json!({"result": {"data": "no", "is_error": true}, "board": [[1]]});
        assert_eq!(named(refused), text("no", true));
        assert_eq!(
            outcome(json!({"result": {"data": [1]}})).unwrap(),
            text("[1]", false)
        );
        assert_eq!(
            outcome(json!({"result": "done"})).unwrap(),
            text("done", false)
        );
    }
}
