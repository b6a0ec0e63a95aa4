//! Rows for an environment elsewhere: what to say, and what its reset is given.
//!
//! | field | |
//! |---|---|
//! | `prompt` | optional: a text, or messages with `role` and `content` |
//! | `task_id` | optional: the row's number unless given |
//!
//! All fields but `prompt` are arguments of the reset, as TRL has it; `task_id`, too. There are no tests here:
//! the environment rewards.

use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::{Task, TaskError};

/// What stands in the place of a grader's name.
const GRADER: &str = "remote";

/// What an environment elsewhere is given for a task.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResetRow<'a> {
    /// Messages to begin with, in the shape of chat completions; may be none.
    pub messages: &'a [Value],
    /// Arguments of the reset.
    pub arguments: &'a Map<String, Value>,
}

impl Task {
    /// Returns what an environment elsewhere is given, if that is what the task is for.
    #[must_use]
    pub fn reset_row(&self) -> Option<ResetRow<'_>> {
        if self.grader != GRADER {
            return None;
        }
        Some(ResetRow {
            messages: self.options.get("messages")?.as_array()?,
            arguments: self.options.get("arguments")?.as_object()?,
        })
    }

    /// Makes a task for an environment elsewhere.
    pub(super) fn for_remote(
        id: String,
        messages: &[Value],
        arguments: &Map<String, Value>,
    ) -> Self {
        let text = |message: &Value| Some(message.get("content")?.as_str()?.to_owned());
        let prompt: Vec<String> = messages.iter().filter_map(text).collect();
        let options = json!({"messages": messages, "arguments": arguments});
        Self {
            id,
            prompt: prompt.join("\n\n"),
            grader: GRADER.to_owned(),
            options: match options {
                Value::Object(options) => options,
                _ => Map::new(),
            },
            ..Self::default()
        }
    }
}

/// Reads one row.
///
/// # Errors
///
/// Fails when the prompt is neither a text nor messages.
pub(super) fn parse(fields: Fields<'_>) -> Result<Task, TaskError> {
    let messages = match fields.value("prompt") {
        None => Vec::new(),
        Some(Value::String(text)) if text.trim().is_empty() => return Err(fields.empty("prompt")),
        Some(Value::String(text)) => vec![json!({"role": "user", "content": text})],
        Some(Value::Array(messages)) if messages.iter().all(is_message) => messages.clone(),
        Some(other) => {
            let expected = "a string, or a list of messages with `role` and `content`";
            return Err(fields.wrong("prompt", expected, other));
        }
    };
    let id = fields.id_or_row("task_id")?;
    let mut arguments = fields.all().clone();
    arguments.shift_remove("prompt");
    Ok(Task::for_remote(id, &messages, &arguments))
}

/// Whether it is a message of a chat, without calls of tools: there are none before the first turn.
fn is_message(message: &Value) -> bool {
    let text = |key: &str| message.get(key).and_then(Value::as_str);
    let is_text_if_any = |key: &str| {
        let value = message.get(key).unwrap_or(&Value::Null);
        value.is_null() || value.is_string()
    };
    text("content").is_some()
        && matches!(text("role"), Some("system" | "user" | "assistant"))
        && ["name", "reasoning_content", "tool_call_id"]
            .into_iter()
            .all(is_text_if_any)
        && message
            .get("tool_calls")
            .is_none_or(|calls| calls.is_null() || calls == &json!([]))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read(row: &Value) -> Result<Task, TaskError> {
        let row = row.as_object().unwrap();
        parse(Fields::new(Path::new("a.jsonl"), 3, row))
    }

    #[test]
    fn all_but_the_prompt_is_given_to_the_reset() {
        let task = read(&json!({"prompt": "Go.", "task_id": 7, "level": null})).unwrap();
        assert_eq!((task.id.as_str(), task.prompt.as_str()), ("7", "Go."));
        let row = task.reset_row().unwrap();
        assert_eq!(row.messages, [json!({"role": "user", "content": "Go."})]);
        assert_eq!(
            Value::Object(row.arguments.clone()),
            json!({"task_id": 7, "level": null})
        );

        let messages =
            json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]);
        let task = read(&json!({"prompt": messages})).unwrap();
        assert_eq!(
            (task.id.as_str(), task.prompt.as_str()),
            ("3", "Be brief.\n\nGo.")
        );
        assert_eq!(Value::from(task.reset_row().unwrap().messages), messages);

        assert_eq!(
            read(&json!({"seed": 1}))
                .unwrap()
                .reset_row()
                .unwrap()
                .messages,
            [] as [Value; 0]
        );
        assert_eq!(Task::default().reset_row(), None);
    }

    #[test]
    fn a_prompt_is_a_text_or_messages() {
        for prompt in [
            json!(3),
            json!([{"role": "tool", "content": ""}]),
            json!([{"role": "user"}]),
            json!([{"role": "user", "content": "x", "name": 5}]),
            json!([{"role": "assistant", "content": "x", "tool_calls": [{"name": "f"}]}]),
            json!(" "),
        ] {
            let error = read(&json!({ "prompt": prompt })).unwrap_err().to_string();
            assert!(error.contains("`a.jsonl` row 3"), "{error}");
        }
    }
}
