//! Frames of `/ws`.

use crate::http::check_values;
use serde_json::{Map, Value, json};

use super::gym::Observation;

/// Returns the frame of an observation: `metadata` is repeated at the top only where there is any.
pub(super) fn observation(observation: &Observation) -> String {
    let mut data = body(observation);
    if !observation.metadata.is_empty() {
        data.insert(
            "metadata".to_owned(),
            Value::Object(observation.metadata.clone()),
        );
    }
    frame("observation", &Value::Object(data))
}

/// Returns the body of a response over HTTP: `metadata` is always there.
pub(super) fn response(observation: &Observation) -> Value {
    let mut data = body(observation);
    let metadata = if observation.metadata.is_empty() {
        Value::Null
    } else {
        Value::Object(observation.metadata.clone())
    };
    data.insert("metadata".to_owned(), metadata);
    Value::Object(data)
}

fn body(observation: &Observation) -> Map<String, Value> {
    let mut fields = Map::new();
    fields.insert(
        "metadata".to_owned(),
        Value::Object(observation.metadata.clone()),
    );
    fields.extend(observation.fields.clone());
    let mut data = Map::new();
    data.insert("observation".to_owned(), Value::Object(fields));
    data.insert("reward".to_owned(), json!(observation.reward));
    data.insert("done".to_owned(), json!(observation.done));
    data
}

/// Returns a frame.
pub(super) fn frame(kind: &str, data: &Value) -> String {
    json!({"type": kind, "data": data}).to_string()
}

/// Returns the frame of an error.
pub(super) fn error(message: &str, code: &str) -> String {
    frame("error", &json!({"message": message, "code": code}))
}

/// What a client is told when there is no room for its session.
pub(super) fn capacity_message(active: usize, max: usize) -> String {
    format!("Server at capacity: {active}/{max} sessions active. Cannot accept new connections.")
}

/// Where and why Python's `json` refuses a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct JsonFault {
    /// As Python says it.
    pub(super) message: &'static str,
    /// From 1.
    pub(super) line: usize,
    /// From 1.
    pub(super) column: usize,
    /// Characters before it.
    pub(super) position: usize,
}

impl JsonFault {
    /// Says it as Python's `JSONDecodeError` does.
    pub(super) fn describe(&self) -> String {
        let Self {
            message,
            line,
            column,
            position,
        } = self;
        format!("{message}: line {line} column {column} (char {position})")
    }
}

/// Reads JSON, and says as Python does where it is none.
///
/// The place and the reason are those of Python for the usual mistakes; for rarer ones, as a bad
/// escape, they are near.
pub(super) fn read_json(text: &str) -> Result<Value, JsonFault> {
    if check_values(text.as_bytes()).is_err() {
        return Err(JsonFault {
            message: "Too many values",
            line: 1,
            column: 1,
            position: 0,
        });
    }
    serde_json::from_str(text).map_err(|error| fault(text, &error))
}

fn fault(text: &str, error: &serde_json::Error) -> JsonFault {
    // Where serde_json stopped: a character or so beyond what Python points at.
    let before: usize = text
        .split_inclusive('\n')
        .take(error.line().saturating_sub(1))
        .map(str::len)
        .sum();
    let mut at = (before + error.column().saturating_sub(1)).min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    let reason = error.to_string();
    let is = |start: &str| reason.starts_with(start);
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    let word_start = || {
        text[..at]
            .char_indices()
            .rev()
            .take_while(|&(_, character)| is_word(character))
            .last()
            .map_or(at, |(index, _)| index)
    };
    let (message, at) = if is("key must be a string") {
        ("Expecting property name enclosed in double quotes", at)
    } else if is("trailing characters") {
        ("Extra data", at)
    } else if is("expected `:`") {
        ("Expecting ':' delimiter", at)
    } else if is("expected `,`") {
        ("Expecting ',' delimiter", at)
    } else if is("EOF while parsing a string") {
        let quote = text.rfind('"').unwrap_or(at);
        ("Unterminated string starting at", quote)
    } else if is("EOF while parsing an object") {
        let last = text.trim_end().chars().next_back();
        match last {
            Some('{' | ',') => (
                "Expecting property name enclosed in double quotes",
                text.len(),
            ),
            Some(':') => ("Expecting value", text.len()),
            _ => ("Expecting ',' delimiter", text.len()),
        }
    } else if is("EOF while parsing a list") && !text.trim_end().ends_with(['[', ',']) {
        ("Expecting ',' delimiter", text.len())
    } else if is("EOF") {
        ("Expecting value", text.len())
    } else {
        ("Expecting value", word_start())
    };
    let line_start = text[..at].rfind('\n').map_or(0, |index| index + 1);
    JsonFault {
        message,
        line: text[..at].matches('\n').count() + 1,
        column: text[line_start..at].chars().count() + 1,
        position: text[..at].chars().count(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_refused_as_python_does() {
        for (text, expected) in [
            ("not json", "Expecting value: line 1 column 1 (char 0)"),
            ("", "Expecting value: line 1 column 1 (char 0)"),
            (
                "{bad",
                "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
            ),
            ("{} x", "Extra data: line 1 column 4 (char 3)"),
            ("[1 2]", "Expecting ',' delimiter: line 1 column 4 (char 3)"),
            (
                "{\"a\" 1}",
                "Expecting ':' delimiter: line 1 column 6 (char 5)",
            ),
            ("{\"ä\":", "Expecting value: line 1 column 6 (char 5)"),
            (
                "{\"a\":\n\"b",
                "Unterminated string starting at: line 2 column 1 (char 6)",
            ),
        ] {
            let fault = read_json(text).expect_err(text);
            assert_eq!(fault.describe(), expected, "{text:?}");
        }
    }
}
