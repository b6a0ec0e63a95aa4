//! Frames of `/ws`, as a client writes and reads them.

use serde_json::{Map, Value, json};

use super::Fault;
use crate::http::check_values;

/// Characters of what a server said that are passed on.
const MAX_WORDS: usize = 500;

/// The largest reward, either way: `f32`'s largest number, in which losses are. Its square and sums of many
/// are numbers, too.
pub(super) const MAX_REWARD: f64 = f32::MAX as f64;

/// What came of a reset or a step.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Reply {
    /// The observation, without its metadata.
    pub(super) observation: Map<String, Value>,
    /// What the server says about it.
    pub(super) metadata: Map<String, Value>,
    /// The reward, where there is one.
    pub(super) reward: Option<f64>,
    /// Whether the episode is over.
    pub(super) done: bool,
}

/// Returns the frame of a reset.
pub(super) fn reset(arguments: &Map<String, Value>) -> String {
    json!({"type": "reset", "data": arguments}).to_string()
}

/// Returns the frame of a step.
pub(super) fn step(action: &Value) -> String {
    json!({"type": "step", "data": action}).to_string()
}

/// Returns the frame that ends a session.
pub(super) fn close() -> String {
    json!({"type": "close"}).to_string()
}

/// Reads JSON whose values do not take far more memory than its text.
pub(super) fn read_json(text: &[u8]) -> Result<Value, Fault> {
    check_values(text).map_err(|error| Fault::NotJson {
        reason: error.to_string(),
    })?;
    serde_json::from_slice(text).map_err(|error| Fault::NotJson {
        reason: error.to_string(),
    })
}

/// Reads the answer to a reset or a step.
pub(super) fn read(text: &str) -> Result<Reply, Fault> {
    let frame = read_json(text.as_bytes()).map_err(|fault| match infinite_reward(text) {
        Some(found) => Fault::Reward {
            found: found.to_owned(),
        },
        None => fault,
    })?;
    let kind = frame.get("type").and_then(Value::as_str);
    let data = frame.get("data");
    match (kind, data) {
        (Some("observation"), Some(Value::Object(data))) => observation(data),
        (Some("error"), data) => Err(refusal(data.unwrap_or(&Value::Null))),
        _ => Err(Fault::Unexpected {
            expected: "a frame of type `observation`",
            found: shortened(text),
        }),
    }
}

/// All fields may be missing, as for OpenEnv's own client.
fn observation(data: &Map<String, Value>) -> Result<Reply, Fault> {
    let unexpected = |expected, found: &Value| Fault::Unexpected {
        expected,
        found: shortened(&found.to_string()),
    };
    let mut observation = match data.get("observation") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(observation)) => observation.clone(),
        Some(other) => return Err(unexpected("an `observation` that is an object", other)),
    };
    let reward = match data.get("reward") {
        None | Some(Value::Null) => None,
        Some(Value::Bool(reward)) => Some(f64::from(u8::from(*reward))),
        Some(reward) => match reward.as_f64() {
            Some(number) if number.abs() <= MAX_REWARD => Some(number),
            Some(_) => {
                let found = reward.to_string();
                return Err(Fault::Reward { found });
            }
            None => return Err(unexpected("a `reward` that is a number", reward)),
        },
    };
    let done = match data.get("done") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(done)) => *done,
        Some(other) => return Err(unexpected("a `done` that is true or false", other)),
    };
    let within = observation.shift_remove("metadata");
    let metadata = data.get("metadata").cloned().or(within);
    Ok(Reply {
        observation,
        metadata: match metadata {
            Some(Value::Object(metadata)) => metadata,
            _ => Map::new(),
        },
        reward,
        done,
    })
}

/// Returns the reward of a text that is no JSON for its sake: Python writes `NaN` and `Infinity`, and other
/// numbers are larger than any.
fn infinite_reward(text: &str) -> Option<&str> {
    text.split("\"reward\"").skip(1).find_map(|behind| {
        let behind = behind.trim_start().strip_prefix(':')?.trim_start();
        let end = behind.find([',', '}', ']'])?;
        let found = behind[..end].trim_end();
        // Rust reads the same words, in any case.
        let is_infinite = found.parse().is_ok_and(|number: f64| !number.is_finite());
        is_infinite.then_some(found)
    })
}

/// Returns what an error frame says.
fn refusal(data: &Value) -> Fault {
    let field = |name: &str| data.get(name).and_then(Value::as_str).unwrap_or_default();
    let mut message = shortened(field("message"));
    if let Some(errors) = data.get("errors") {
        message = format!("{message}: {}", shortened(&errors.to_string()));
    }
    match field("code") {
        "CAPACITY_REACHED" => Fault::NoRoom { message },
        code => Fault::Said {
            code: if code.is_empty() {
                "an error".to_owned()
            } else {
                shortened(code)
            },
            message,
        },
    }
}

/// Returns the beginning of what a server said.
pub(super) fn shortened(text: &str) -> String {
    let mut short: String = text.chars().take(MAX_WORDS).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_as_openenvs_client_reads_them() {
        let reply = read(
            r#"{"type":"observation","data":{"observation":{"metadata":{"a":1},"stdout":"2\n"},"reward":0.1,"done":true,"metadata":{"a":2}}}"#,
        )
        .unwrap();
        assert_eq!(
            reply.observation,
            *json!({"stdout": "2\n"}).as_object().unwrap()
        );
        assert_eq!(reply.metadata, *json!({"a": 2}).as_object().unwrap());
        assert_eq!((reply.reward, reply.done), (Some(0.1), true));
        // Everything in it is optional, and a reward may be a boolean.
        assert_eq!(
            read(r#"{"type":"observation","data":{}}"#).unwrap(),
            Reply::default()
        );
        let reply = read(r#"{"type":"observation","data":{"reward":true}}"#).unwrap();
        assert_eq!(reply.reward, Some(1.0));
    }

    #[test]
    fn what_is_no_answer_says_what_it_is() {
        for (text, expected) in [
            ("{", "no JSON"),
            ("[]", "found []"),
            (r#"{"type":"state","data":{}}"#, "of type `observation`"),
            (r#"{"type":"observation"}"#, "of type `observation`"),
            (
                r#"{"type":"observation","data":{"reward":"1"}}"#,
                "a number, found \"1\"",
            ),
            (
                r#"{"type":"observation","data":{"observation":{"said":"\"reward\": NaN"},"reward": NaN,"done":true}}"#,
                "a `reward` of NaN",
            ),
            (
                r#"{"type":"observation","data":{"reward":-Infinity}}"#,
                "a `reward` of -Infinity",
            ),
            (
                r#"{"type":"observation","data":{"reward":1e999}}"#,
                "a `reward` of 1e999",
            ),
            (
                r#"{"type":"observation","data":{"reward":-1e39}}"#,
                "a `reward` of -1e+39",
            ),
            (
                r#"{"type":"observation","data":{"reward":1.0,"done":NaN}}"#,
                "no JSON",
            ),
            (
                r#"{"type":"observation","data":{"observation":3}}"#,
                "an object, found 3",
            ),
            (
                r#"{"type":"observation","data":{"done":1}}"#,
                "true or false, found 1",
            ),
            (
                r#"{"type":"error","data":{"message":"boom","code":"EXECUTION_ERROR"}}"#,
                "EXECUTION_ERROR: boom",
            ),
            (r#"{"type":"error"}"#, "an error"),
        ] {
            let fault = read(text).unwrap_err().to_string();
            assert!(fault.contains(expected), "{text}: {fault}");
        }
        let full =
            r#"{"type":"error","data":{"message":"1/1 sessions","code":"CAPACITY_REACHED"}}"#;
        assert!(read(full).unwrap_err().may_be_tried_again());
        let long = format!(r#"{{"type":"x{}"}}"#, "y".repeat(10_000));
        assert!(read(&long).unwrap_err().to_string().len() < 600);
    }
}
