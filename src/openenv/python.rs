//! The environment `python`: a real CPython whose state persists across steps.

use std::fmt::Write as _;
use std::sync::LazyLock;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::gym::{Episode, Gym, Observation, StepError};
use super::interpreter::{Interpreter, Source};
use super::validate::{self, Field, Invalid, Kind};
use crate::http::uuid4;
use crate::sandbox::{Cancel, ExecOutcome, ExecRequest, Exit};

/// The exit code of a step that a limit ended: as of a process that was killed.
const KILLED: u32 = 137;
/// That of a step that ran past its deadline: as of `timeout`.
const TIMED_OUT: u32 = 124;

/// The fields of an action that runs code.
pub(super) const CODE_ACTION: &[Field] = &[
    Field::optional("metadata", Kind::Object),
    Field::required("code", Kind::Text { max: None }),
];

static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let metadata = json!({"type": "object", "additionalProperties": true});
    let observation = json!({
        "type": "object",
        "title": "PythonObservation",
        "properties": {
            "metadata": metadata,
            "stdout": {"type": "string"},
            "stderr": {"type": "string"},
            "exit_code": {"type": "integer"},
            "reward": {"type": "null"},
            "done": {"type": "boolean"},
        },
    });
    json!({
        "action": {
            "type": "object",
            "title": "PythonAction",
            "additionalProperties": false,
            "properties": {
                "metadata": metadata,
                "code": {"type": "string", "description": "A program, run as `__main__`."},
            },
            "required": ["code"],
        },
        "observation": observation,
        "state": {
            "type": "object",
            "title": "PythonState",
            "properties": {
                "episode_id": {"type": ["string", "null"]},
                "step_count": {"type": "integer", "minimum": 0},
                "last_exit_code": {"type": "integer"},
            },
        },
        "reset_observation": observation,
    })
});

/// Makes environments `python`.
#[derive(Debug)]
pub(super) struct PythonGym {
    pub(super) source: Source,
}

impl Gym for PythonGym {
    fn name(&self) -> &'static str {
        "python"
    }

    fn metadata(&self) -> (&str, &str) {
        (
            "python",
            "CPython in WebAssembly; names, objects and files persist across the steps of an episode",
        )
    }

    fn schema(&self) -> &Value {
        &SCHEMA
    }

    fn check(&self, action: &Map<String, Value>) -> Vec<Invalid> {
        validate::check(action, CODE_ACTION, false)
    }

    fn open(&self) -> Box<dyn Episode> {
        Box::new(PythonEpisode {
            interpreter: Interpreter::new(self.source.clone()),
            progress: Progress::default(),
            seed: None,
        })
    }
}

/// How far an episode is.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress {
    /// `None` before the first reset.
    pub(super) episode_id: Option<String>,
    pub(super) step_count: u64,
    pub(super) last_exit_code: u32,
}

impl Progress {
    /// Begins an episode, with the id that `arguments` name or a new one.
    pub(super) fn begin(arguments: &Map<String, Value>) -> Self {
        let id = arguments.get("episode_id").and_then(Value::as_str);
        Self {
            episode_id: Some(id.map_or_else(uuid4, str::to_owned)),
            ..Self::default()
        }
    }

    pub(super) fn state(&self) -> Value {
        json!({
            "episode_id": self.episode_id,
            "step_count": self.step_count,
            "last_exit_code": self.last_exit_code,
        })
    }
}

/// Returns the fields of an observation of code.
pub(super) fn fields(stdout: String, stderr: String, exit_code: u32) -> Map<String, Value> {
    let mut fields = Map::new();
    fields.insert("stdout".to_owned(), Value::String(stdout));
    fields.insert("stderr".to_owned(), Value::String(stderr));
    fields.insert("exit_code".to_owned(), json!(exit_code));
    fields
}

/// Returns what a program wrote to standard error, and a word on its end where a limit met it.
pub(super) fn stderr_of(outcome: &ExecOutcome) -> String {
    let mut text = outcome.stderr_text();
    if !matches!(outcome.exit, Exit::Exited { .. }) {
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        let _ = writeln!(text, "the program {}", outcome.exit);
    }
    text
}

/// Returns the natural number `name` of a reset, if it is given.
pub(super) fn natural(
    arguments: &Map<String, Value>,
    name: &'static str,
) -> Result<Option<u64>, StepError> {
    match arguments.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => validate::natural(value)
            .map(Some)
            .ok_or_else(|| StepError::Refused {
                message: format!("`{name}` must be a whole number from 0, is {value}"),
            }),
    }
}

struct PythonEpisode {
    interpreter: Interpreter,
    progress: Progress,
    /// For the first step.
    seed: Option<u64>,
}

impl Episode for PythonEpisode {
    fn reset(
        &mut self,
        arguments: &Map<String, Value>,
        _cancel: &Cancel,
    ) -> Result<Observation, StepError> {
        self.seed = natural(arguments, "seed")?;
        self.interpreter.reset();
        self.progress = Progress::begin(arguments);
        Ok(Observation {
            fields: fields(String::new(), String::new(), 0),
            ..Observation::default()
        })
    }

    fn step(
        &mut self,
        action: &Map<String, Value>,
        limit: Option<Duration>,
        cancel: &Cancel,
    ) -> Result<Observation, StepError> {
        if self.progress.episode_id.is_none() {
            return Err(StepError::NoEpisode);
        }
        let code = action.get("code").and_then(Value::as_str).unwrap_or("");
        let request = ExecRequest {
            seed: self.seed,
            ..ExecRequest::new(code)
        };
        let outcome = self.interpreter.step(&request, limit, cancel)?;
        self.seed = None;
        let exit_code = match &outcome.exit {
            Exit::Exited { code } => *code,
            Exit::DeadlineExceeded { .. } => TIMED_OUT,
            _ => KILLED,
        };
        self.progress.step_count += 1;
        self.progress.last_exit_code = exit_code;
        let mut metadata = Map::new();
        if !matches!(outcome.exit, Exit::Exited { .. }) {
            metadata.insert("exit".to_owned(), json!(outcome.exit));
        }
        if self.interpreter.is_lost() {
            metadata.insert("state_lost".to_owned(), json!(true));
        }
        for (name, is_cut) in [
            ("stdout_truncated", outcome.stdout_truncated),
            ("stderr_truncated", outcome.stderr_truncated),
        ] {
            if is_cut {
                metadata.insert(name.to_owned(), json!(true));
            }
        }
        Ok(Observation {
            metadata,
            fields: fields(outcome.stdout_text(), stderr_of(&outcome), exit_code),
            reward: None,
            done: false,
            fuel: outcome.usage.fuel,
        })
    }

    fn state(&self) -> Value {
        self.progress.state()
    }

    fn fork(&mut self, count: usize) -> Result<Vec<Box<dyn Episode>>, StepError> {
        let copies = self.interpreter.fork(count)?.into_iter();
        Ok(copies
            .map(|interpreter| {
                Box::new(Self {
                    interpreter,
                    progress: self.progress.clone(),
                    seed: self.seed,
                }) as Box<dyn Episode>
            })
            .collect())
    }

    fn park(&mut self) -> Result<bool, StepError> {
        self.interpreter.park()
    }
}
