//! The machine that the server runs in as an environment: an action is a command.
//!
//! An action is `{"command": …}`, or OpenEnv's for tools with the tools `bash` and `exec`, which are there over
//! MCP, too. A reset takes the machine: it ends all that an earlier episode left running.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::gym::{Episode, Gym, Observation, StepError, ToolText};
use super::python::{Progress, fields};
use super::tasks::{ACTION, LIST_ACTION, listed, mcp_tools, refused, tool_result};
use super::validate::{self, Field, Invalid, Kind};
use crate::actor::sandboxd::{Hold, Machine};
use crate::actor::{ActorCommand, ActorError, ActorOutput, Ending};
use crate::causes::with_causes;
use crate::chat::ToolSpec;
use crate::sandbox::Cancel;

/// The tool that runs a line of a shell.
const BASH: &str = "bash";
/// The tool that runs a program.
const EXEC: &str = "exec";

/// The longest that a command may take, in seconds.
const MAX_TIMEOUT: f64 = 24.0 * 3600.0;
/// The exit code of a command whose time was over, as of `timeout`.
const TIMED_OUT: i32 = 124;
/// That of one that was ended otherwise, as of a process that was killed.
const KILLED: i32 = 137;

/// Runs a line by `bash` where there is one.
const RUN: &str =
    r#"if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; fi; exec /bin/sh -c "$1""#;

const COMMAND_ACTION: &[Field] = &[
    Field::optional("metadata", Kind::Object),
    Field::required("command", Kind::Text { max: None }),
    Field::nullable("cwd", Kind::Text { max: None }),
    Field::nullable("stdin", Kind::Text { max: None }),
    Field::nullable("timeout_s", Kind::Positive),
    Field::nullable("max_output", Kind::Natural),
];

static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let metadata = json!({"type": "object", "additionalProperties": true});
    let text = json!({"type": "string"});
    let code = json!({"type": "integer"});
    let mut properties = settings();
    for (name, schema) in [
        ("metadata", metadata.clone()),
        (
            "command",
            described("string", "A line of a shell, in place of a call."),
        ),
        (
            "type",
            json!({"const": "call_tool", "default": "call_tool"}),
        ),
        ("tool_name", text.clone()),
        ("arguments", json!({"type": "object"})),
    ] {
        properties.insert(name.to_owned(), schema);
    }
    let observation = json!({
        "type": "object",
        "title": "ShellObservation",
        "properties": {
            "metadata": metadata,
            "stdout": text,
            "stderr": text,
            "exit_code": code,
            "tool_name": text,
            "result": {},
            "error": {"type": ["object", "null"]},
            "reward": {"type": "null"},
            "done": {"type": "boolean"},
        },
    });
    json!({
        "action": {
            "type": "object",
            "title": "ShellAction",
            "additionalProperties": false,
            "properties": properties,
            "anyOf": [{"required": ["tool_name"]}, {"required": ["command"]}],
        },
        "observation": observation,
        "state": {
            "type": "object",
            "title": "ShellState",
            "properties": {
                "episode_id": {"type": ["string", "null"]},
                "step_count": {"type": "integer", "minimum": 0},
                "last_exit_code": code,
            },
        },
        "reset_observation": observation,
    })
});

fn described(kind: &str, description: &str) -> Value {
    json!({"type": kind, "description": description})
}

/// Returns the schemas of what every command can be told.
fn settings() -> Map<String, Value> {
    Map::from_iter([
        (
            "cwd".to_owned(),
            described("string", "The folder that it starts in."),
        ),
        ("stdin".to_owned(), described("string", "What it can read.")),
        (
            "timeout_s".to_owned(),
            described(
                "number",
                "How long it may take, in seconds; 60 unless given.",
            ),
        ),
        (
            "max_output".to_owned(),
            described(
                "integer",
                "Bytes of each stream that are kept; 65536 unless given.",
            ),
        ),
    ])
}

fn tools() -> Vec<ToolSpec> {
    let tool = |name: &str, description: &str, more: Value, required: &str| {
        let mut properties = settings();
        properties.extend(more.as_object().cloned().unwrap_or_default());
        let parameters = json!({
            "type": "object",
            "properties": properties,
            "required": [required],
            "additionalProperties": false,
        });
        ToolSpec::new(name, description, parameters)
    };
    vec![
        tool(
            BASH,
            "Runs a command in a shell and returns what it prints. Files stay from one command to the next; each \
             starts anew in the working folder.",
            json!({"command": described("string", "The command.")}),
            "command",
        ),
        tool(
            EXEC,
            "Runs a program without a shell and returns what it prints.",
            json!({
                "argv": {
                    "type": "array", "items": {"type": "string"}, "minItems": 1,
                    "description": "The program and its arguments.",
                },
                "env": {
                    "type": "object", "additionalProperties": {"type": "string"},
                    "description": "Variables.",
                },
            }),
            "argv",
        ),
    ]
}

/// What a command is asked for with.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Asked {
    command: Option<String>,
    argv: Option<Vec<String>>,
    env: BTreeMap<String, String>,
    cwd: Option<PathBuf>,
    stdin: Option<String>,
    timeout_s: Option<f64>,
    max_output: Option<usize>,
}

impl Asked {
    /// Reads the arguments of a tool; says what is wrong with them.
    fn read(tool: &str, arguments: &Map<String, Value>) -> Result<ActorCommand, String> {
        let asked: Self = serde_json::from_value(Value::Object(arguments.clone()))
            .map_err(|error| format!("the arguments of `{tool}`: {error}"))?;
        let argv = match (tool, asked.command, asked.argv) {
            (BASH, Some(line), None) if asked.env.is_empty() => ["/bin/sh", "-c", RUN, "sh", &line]
                .map(str::to_owned)
                .to_vec(),
            (EXEC, None, Some(argv)) => argv,
            (BASH, ..) => return Err(format!("`{tool}` needs `command` and takes no program")),
            _ => return Err(format!("`{tool}` needs `argv` and takes no command")),
        };
        let mut command = ActorCommand {
            env: asked.env,
            cwd: asked.cwd,
            stdin: asked.stdin.unwrap_or_default().into_bytes(),
            ..ActorCommand::new(argv)
        };
        if let Some(seconds) = asked.timeout_s {
            if !(seconds > 0.0 && seconds <= MAX_TIMEOUT) {
                return Err(format!(
                    "`timeout_s` is {seconds}, not above 0 and at most a day"
                ));
            }
            command.timeout = Duration::from_secs_f64(seconds);
        }
        if let Some(bytes) = asked.max_output {
            command.max_output = bytes;
        }
        Ok(command)
    }
}

/// Makes environments of one machine.
#[derive(Debug)]
pub(super) struct ShellGym {
    machine: Machine,
}

impl ShellGym {
    pub(super) fn new(machine: Machine) -> Self {
        Self { machine }
    }
}

impl Gym for ShellGym {
    fn name(&self) -> &'static str {
        "shell"
    }

    fn metadata(&self) -> (&str, &str) {
        (
            "shell",
            "Commands of a Linux machine; files stay from one command to the next",
        )
    }

    fn schema(&self) -> &Value {
        &SCHEMA
    }

    fn check(&self, action: &Map<String, Value>) -> Vec<Invalid> {
        let kind = action.get("type").and_then(Value::as_str);
        let fields = match kind {
            Some("list_tools") => LIST_ACTION,
            None if action.contains_key("command") => COMMAND_ACTION,
            _ => ACTION,
        };
        validate::check(action, fields, false)
    }

    fn open(&self) -> Box<dyn Episode> {
        Box::new(ShellEpisode {
            machine: self.machine.clone(),
            hold: None,
            progress: Progress::default(),
        })
    }

    fn tools(&self) -> Option<Vec<Value>> {
        Some(mcp_tools(tools()))
    }
}

struct ShellEpisode {
    machine: Machine,
    /// From the first reset on.
    hold: Option<Hold>,
    progress: Progress,
}

impl From<ActorError> for StepError {
    fn from(error: ActorError) -> Self {
        match error {
            ActorError::Lost { reason, .. } => Self::Taken { reason },
            ActorError::InvalidSpec { .. } | ActorError::Unsupported { .. } => Self::Refused {
                message: error.to_string(),
            },
            error => Self::Environment {
                message: with_causes(&error),
            },
        }
    }
}

impl ShellEpisode {
    fn run(
        &mut self,
        mut command: ActorCommand,
        limit: Option<Duration>,
        cancel: &Cancel,
    ) -> Result<ActorOutput, StepError> {
        let hold = self.hold.as_mut().ok_or(StepError::NoEpisode)?;
        command.timeout = command.timeout.min(limit.unwrap_or(Duration::MAX));
        command.max_output = command.max_output.min(self.machine.max_output());
        let output = hold.run(&command, &|| cancel.is_cancelled())?;
        if cancel.is_cancelled() {
            return Err(StepError::Cancelled);
        }
        self.progress.step_count += 1;
        self.progress.last_exit_code = u32::try_from(exit_code(&output)).unwrap_or_default();
        Ok(output)
    }
}

fn exit_code(output: &ActorOutput) -> i32 {
    match output.ending {
        Ending::Exited { code } => code,
        Ending::TimedOut { .. } => TIMED_OUT,
        _ => KILLED,
    }
}

/// Returns what is known of a command besides what it printed.
fn metadata(output: &ActorOutput) -> Map<String, Value> {
    let mut metadata = Map::new();
    if let Ending::TimedOut { limit } = output.ending {
        let exit = json!({
            "kind": "deadline_exceeded",
            "limit_seconds": limit.as_secs_f64(),
            "elapsed_seconds": output.elapsed.as_secs_f64(),
        });
        metadata.insert("exit".to_owned(), exit);
    }
    for (name, stream) in [("stdout", &output.stdout), ("stderr", &output.stderr)] {
        if stream.is_truncated() {
            metadata.insert(format!("{name}_truncated"), json!(true));
        }
    }
    metadata
}

/// Returns what a tool says: the streams and how it ended, as text and as an object.
fn told(output: &ActorOutput) -> ToolText {
    let (stdout, stderr) = (output.stdout.text(), output.stderr.text());
    let mut text = stdout.clone();
    for more in [
        stderr.clone(),
        match &output.ending {
            Ending::Exited { code: 0 } => String::new(),
            Ending::Exited { code } => format!("(exit code {code})"),
            Ending::TimedOut { limit } => format!(
                "(it took more than {} s and was ended, with all that was started)",
                limit.as_secs_f64()
            ),
            _ => "(it was ended)".to_owned(),
        },
    ] {
        if !text.is_empty() && !more.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(&more);
    }
    let mut data = fields(stdout, stderr, 0);
    data.insert("exit_code".to_owned(), json!(exit_code(output)));
    data.extend(metadata(output));
    ToolText {
        text,
        data: Some(Value::Object(data)),
        done: false,
        reward: None,
    }
}

/// Returns what is wrong with a call: `error_type` and `message`.
fn command_of(
    tool: &str,
    arguments: &Map<String, Value>,
) -> Result<ActorCommand, (&'static str, String)> {
    match tool {
        BASH | EXEC => Asked::read(tool, arguments).map_err(|message| ("invalid_args", message)),
        tool => Err(("tool_not_found", format!("Unknown tool: '{tool}'"))),
    }
}

impl Episode for ShellEpisode {
    fn reset(
        &mut self,
        arguments: &Map<String, Value>,
        _cancel: &Cancel,
    ) -> Result<Observation, StepError> {
        // What was held before is taken over, or given back.
        let hold = self.machine.claim();
        self.hold = None;
        self.hold = Some(hold?);
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
        if action.get("type").and_then(Value::as_str) == Some("list_tools") {
            return Ok(listed(tools()));
        }
        if action.contains_key("command") {
            let mut arguments = action.clone();
            arguments.shift_remove("metadata");
            let command = Asked::read(BASH, &arguments);
            let command = command.map_err(|message| StepError::Refused { message })?;
            let output = self.run(command, limit, cancel)?;
            let mut fields = fields(output.stdout.text(), output.stderr.text(), 0);
            fields.insert("exit_code".to_owned(), json!(exit_code(&output)));
            return Ok(Observation {
                metadata: metadata(&output),
                fields,
                ..Observation::default()
            });
        }
        let tool = action.get("tool_name").and_then(Value::as_str);
        let tool = tool.unwrap_or_default();
        let empty = Map::new();
        let arguments = action.get("arguments").and_then(Value::as_object);
        let command = match command_of(tool, arguments.unwrap_or(&empty)) {
            Ok(command) => command,
            Err((kind, message)) => return Ok(refused(tool, kind, &message)),
        };
        let output = self.run(command, limit, cancel)?;
        let mut fields = Map::new();
        fields.insert("tool_name".to_owned(), json!(tool));
        fields.insert("result".to_owned(), tool_result(&told(&output)));
        fields.insert("error".to_owned(), Value::Null);
        Ok(Observation {
            metadata: metadata(&output),
            fields,
            ..Observation::default()
        })
    }

    fn state(&self) -> Value {
        self.progress.state()
    }

    fn call(
        &mut self,
        tool: &str,
        arguments: &Map<String, Value>,
        cancel: &Cancel,
    ) -> Result<ToolText, StepError> {
        let command =
            command_of(tool, arguments).map_err(|(_, message)| StepError::Refused { message })?;
        Ok(told(&self.run(command, None, cancel)?))
    }

    fn fork(&mut self, _count: usize) -> Result<Vec<Box<dyn Episode>>, StepError> {
        Err(StepError::Unsupported { what: "fork" })
    }

    /// There is no interpreter to give back.
    fn park(&mut self) -> Result<bool, StepError> {
        Ok(false)
    }
}
