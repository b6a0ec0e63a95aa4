//! The environment `coding_env`: OpenEnv's own, emulated.
//!
//! A session's interpreter echoes the value of the last statement, keeps a log of what is printed
//! and allows the imports that the original allows (`coding.py`). What shapes the reward is the
//! text of a step alone: it is parsed in another instance, where no code of a client ever runs
//! (`shaping.py`).

use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::gym::{Episode, Gym, Observation, StepError};
use super::interpreter::{Interpreter, Source};
use super::python::{CODE_ACTION, Progress, fields, stderr_of};
use super::validate::{self, Invalid};
use crate::sandbox::{Cancel, ExecRequest, Exit, SandboxError};

const PRELUDE: &str = include_str!("coding.py");
const SHAPING: &str = include_str!("shaping.py");

/// The schemas that the original serves.
static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    serde_json::from_str(include_str!("schema/coding_env.json")).expect("the file is JSON")
});

/// The longest code, in characters, that counts as concise.
const CONCISE: usize = 100;

/// Makes environments `coding_env`.
#[derive(Debug)]
pub(super) struct CodingGym {
    source: Source,
    shaping: Arc<Shaping>,
}

impl CodingGym {
    pub(super) fn new(source: Source) -> Result<Self, SandboxError> {
        let shaping = Shaping {
            source: source.clone().with_prelude(SHAPING)?,
            idle: Mutex::default(),
        };
        Ok(Self {
            source: source.with_prelude(PRELUDE)?,
            shaping: Arc::new(shaping),
        })
    }
}

impl Gym for CodingGym {
    fn name(&self) -> &'static str {
        "coding_env"
    }

    fn metadata(&self) -> (&str, &str) {
        ("PythonCodeActEnv", "PythonCodeActEnv environment")
    }

    fn schema(&self) -> &Value {
        &SCHEMA
    }

    /// The original's observation of a reset has no metadata.
    fn names_sessions(&self) -> bool {
        false
    }

    /// The original steps without one.
    fn needs_reset(&self) -> bool {
        false
    }

    fn check(&self, action: &Map<String, Value>) -> Vec<Invalid> {
        validate::check(action, CODE_ACTION, false)
    }

    fn open(&self) -> Box<dyn Episode> {
        Box::new(CodingEpisode {
            interpreter: Interpreter::new(self.source.clone()),
            shaping: Arc::clone(&self.shaping),
            progress: Progress::default(),
        })
    }
}

/// Instances that parse code and never run it.
#[derive(Debug)]
struct Shaping {
    source: Source,
    /// As many as steps ran at the same time.
    idle: Mutex<Vec<Interpreter>>,
}

/// What a text is worth.
#[derive(Debug, Deserialize)]
struct Shape {
    parses: bool,
    violation: Option<String>,
}

impl Shaping {
    fn shape(&self, code: &str, cancel: &Cancel) -> Result<(Shape, u64), StepError> {
        let idle = self.idle().pop();
        let mut interpreter = idle.unwrap_or_else(|| Interpreter::new(self.source.clone()));
        let request = ExecRequest::new(call("_wardian_shaping", "shape", code));
        let outcome = interpreter.step(&request, None, cancel)?;
        if let Exit::DeadlineExceeded { .. } = outcome.exit {
            // Fuel ends a text that is too much for the parser; the clock is met first on a machine that is.
            return Err(StepError::Environment {
                message: format!("reading the shape of a text: the parser {}", outcome.exit),
            });
        }
        if interpreter.is_lost() {
            // Text that no parser gets through.
            let shape = Shape {
                parses: false,
                violation: None,
            };
            return Ok((shape, outcome.usage.fuel));
        }
        self.idle().push(interpreter);
        let shape =
            serde_json::from_slice(&outcome.stdout).map_err(|error| StepError::Environment {
                message: format!("reading the shape of a text: {error}"),
            })?;
        Ok((shape, outcome.usage.fuel))
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Interpreter>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a program that calls a function of a module with one text.
fn call(module: &str, function: &str, text: &str) -> String {
    // A text of JSON that escapes no more than it must is one of Python.
    let text = Value::String(text.to_owned());
    format!("__import__('sys').modules[{module:?}].{function}({text})")
}

/// Adds up what the original's transforms give.
fn reward(code: &str, shape: &Shape) -> f64 {
    let mut reward = if shape.violation.is_some() { -1.0 } else { 0.0 };
    if code.trim().chars().count() <= CONCISE {
        reward += 0.1;
    }
    if !shape.parses {
        reward -= 0.2;
    }
    reward
}

struct CodingEpisode {
    interpreter: Interpreter,
    shaping: Arc<Shaping>,
    progress: Progress,
}

impl Episode for CodingEpisode {
    fn reset(
        &mut self,
        arguments: &Map<String, Value>,
        _cancel: &Cancel,
    ) -> Result<Observation, StepError> {
        self.interpreter.reset();
        self.progress = Progress::begin(arguments);
        Ok(Observation {
            fields: fields(String::new(), String::new(), 0),
            reward: Some(0.0),
            ..Observation::default()
        })
    }

    fn step(
        &mut self,
        action: &Map<String, Value>,
        limit: Option<Duration>,
        cancel: &Cancel,
    ) -> Result<Observation, StepError> {
        let code = action.get("code").and_then(Value::as_str).unwrap_or("");
        let (shape, shaping_fuel) = self.shaping.shape(code, cancel)?;
        let request = ExecRequest::new(call("_wardian_coding", "run", code));
        let outcome = self.interpreter.step(&request, limit, cancel)?;
        // The original has these two.
        let exit_code = u32::from(!matches!(outcome.exit, Exit::Exited { code: 0 }));
        self.progress.step_count += 1;
        self.progress.last_exit_code = exit_code;
        let reward = reward(code, &shape);
        let mut metadata = Map::new();
        metadata.insert("last_code".to_owned(), json!(code));
        if let Some(violation) = shape.violation {
            metadata.insert("safety_violation".to_owned(), json!(violation));
        }
        if self.interpreter.is_lost() {
            metadata.insert("exit".to_owned(), json!(outcome.exit));
            metadata.insert("state_lost".to_owned(), json!(true));
        }
        Ok(Observation {
            metadata,
            fields: fields(outcome.stdout_text(), stderr_of(&outcome), exit_code),
            reward: Some(reward),
            done: false,
            fuel: outcome.usage.fuel + shaping_fuel,
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
                    shaping: Arc::clone(&self.shaping),
                    progress: self.progress.clone(),
                }) as Box<dyn Episode>
            })
            .collect())
    }

    fn park(&mut self) -> Result<bool, StepError> {
        self.interpreter.park()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::{Limits, RuntimeOptions, WasmRuntime};

    #[test]
    fn a_parser_that_meets_the_clock_is_a_fault_of_ours() {
        let runtime = WasmRuntime::load(&RuntimeOptions::default(), |_| {}).unwrap();
        let source = Source {
            runtime,
            limits: Arc::new(Limits::default()),
            template: None,
        };
        let mut source = source.with_prelude(SHAPING).unwrap();
        let shape = |source: &Source| {
            let shaping = Shaping {
                source: source.clone(),
                idle: Mutex::default(),
            };
            shaping.shape(&"x = 1\n".repeat(20_000), &Cancel::new())
        };
        assert!(shape(&source).unwrap().0.parses);
        source.limits = Arc::new(Limits {
            deadline: Duration::from_millis(1),
            ..Limits::default()
        });
        let error = shape(&source).unwrap_err();
        assert!(
            error.is_fault() && error.describe().contains("deadline"),
            "{error:?}"
        );
    }

    #[test]
    fn the_reward_is_the_sum_of_what_the_text_earns() {
        let shape = |parses, violation: Option<&str>| Shape {
            parses,
            violation: violation.map(str::to_owned),
        };
        let long = "x".repeat(101);
        for (code, shape, expected) in [
            ("x", shape(true, None), "0.1"),
            ("x = (", shape(false, None), "-0.1"),
            ("import os", shape(true, Some("import os")), "-0.9"),
            (&long, shape(true, None), "0.0"),
            (&long, shape(false, None), "-0.2"),
        ] {
            assert_eq!(json!(reward(code, &shape)).to_string(), expected, "{code}");
        }
    }
}
