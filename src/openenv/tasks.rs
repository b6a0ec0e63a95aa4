//! A task set as an environment: its tools, and a grader that no code of a client can reach.
//!
//! The actions are OpenEnv's for tools: `{"type": "list_tools"}` and `{"type": "call_tool",
//! "tool_name", "arguments"}`. `reset` takes `task_id`, or `index` (and `split`), or draws a task by
//! `seed`; its observation has the instruction. A submission ends the episode with the reward.

use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::gym::{Episode, Gym, Observation, StepError, Tasks, ToolText};
use super::python::{Progress, natural};
use super::validate::{self, Field, Invalid, Kind};
use crate::chat::{ParsedTurn, ToolCall, ToolSpec};
use crate::env::{EnvError, Environment as _, ToolEnvironment, ToolEnvironmentConfig};
use crate::grader::{Grader, SubmissionKind};
use crate::sandbox::{
    Cancel, Dialogue, DialogueOutcome, ExecOutcome, ExecRequest, Limits, Sandbox, SandboxError,
    Session,
};
use crate::task::{Task, TaskSet};

/// The one split of a task set.
const SPLIT: &str = "train";

pub(super) const ACTION: &[Field] = &[
    Field::optional("metadata", Kind::Object),
    Field::optional("type", Kind::Text { max: None }),
    Field::required("tool_name", Kind::Text { max: None }),
    Field::optional("arguments", Kind::Object),
];
pub(super) const LIST_ACTION: &[Field] = &[
    Field::optional("metadata", Kind::Object),
    Field::required("type", Kind::Exactly("list_tools")),
];

static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let metadata = json!({"type": "object", "additionalProperties": true});
    let text = json!({"type": "string"});
    let reward = json!({"type": ["number", "null"]});
    json!({
        "action": {
            "type": "object",
            "title": "CallToolAction",
            "additionalProperties": false,
            "properties": {
                "metadata": metadata,
                "type": {"const": "call_tool", "default": "call_tool"},
                "tool_name": text,
                "arguments": {"type": "object"},
            },
            "required": ["tool_name"],
        },
        "observation": {
            "type": "object",
            "title": "CallToolObservation",
            "properties": {
                "metadata": metadata,
                "tool_name": text,
                "result": {},
                "error": {"type": ["object", "null"]},
                "reward": reward,
                "done": {"type": "boolean"},
            },
        },
        "state": {
            "type": "object",
            "title": "TaskState",
            "properties": {
                "episode_id": {"type": ["string", "null"]},
                "step_count": {"type": "integer", "minimum": 0},
                "task_id": {"type": ["string", "null"]},
            },
        },
        "reset_observation": {
            "type": "object",
            "title": "TaskObservation",
            "properties": {"metadata": metadata, "instruction": text, "task_id": text},
        },
    })
});

/// Makes environments of a task set.
#[derive(Clone)]
pub(super) struct TaskGym {
    parts: Arc<Parts>,
}

struct Parts {
    name: String,
    description: String,
    tasks: Vec<Arc<Task>>,
    sandbox: Arc<dyn Sandbox>,
    grader: Arc<dyn Grader>,
    config: Arc<ToolEnvironmentConfig>,
}

impl std::fmt::Debug for TaskGym {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskGym")
            .field("name", &self.parts.name)
            .field("tasks", &self.parts.tasks.len())
            .finish_non_exhaustive()
    }
}

impl TaskGym {
    /// Makes the gym of a task set that has tasks.
    pub(super) fn new(
        name: String,
        tasks: &TaskSet,
        sandbox: Arc<dyn Sandbox>,
        grader: Arc<dyn Grader>,
        config: Arc<ToolEnvironmentConfig>,
    ) -> Self {
        let tasks: Vec<_> = tasks.tasks().iter().cloned().map(Arc::new).collect();
        let parts = Parts {
            description: format!("{} tasks with tools and a grader", tasks.len()),
            name,
            tasks,
            sandbox,
            grader,
            config,
        };
        Self {
            parts: Arc::new(parts),
        }
    }

    /// Returns the tools of all tasks, each once: what is submitted differs.
    fn specs(&self) -> Vec<ToolSpec> {
        let mut specs: Vec<ToolSpec> = Vec::new();
        for kind in [SubmissionKind::Code, SubmissionKind::Text] {
            let mut tasks = self.parts.tasks.iter();
            if !tasks.any(|task| task.submission_kind() == kind) {
                continue;
            }
            for spec in ToolEnvironment::tool_specs(kind) {
                if specs.iter().all(|known| known.name != spec.name) {
                    specs.push(spec);
                }
            }
        }
        specs
    }
}

impl Gym for TaskGym {
    fn name(&self) -> &str {
        &self.parts.name
    }

    fn metadata(&self) -> (&str, &str) {
        (&self.parts.name, &self.parts.description)
    }

    fn schema(&self) -> &Value {
        &SCHEMA
    }

    fn check(&self, action: &Map<String, Value>) -> Vec<Invalid> {
        let fields = match action.get("type").and_then(Value::as_str) {
            Some("list_tools") => LIST_ACTION,
            _ => ACTION,
        };
        validate::check(action, fields, false)
    }

    fn open(&self) -> Box<dyn Episode> {
        Box::new(TaskEpisode {
            gym: self.clone(),
            begun: None,
            progress: Progress::default(),
            cancel: Arc::default(),
        })
    }

    fn tools(&self) -> Option<Vec<Value>> {
        Some(mcp_tools(self.specs()))
    }

    fn tasks(&self) -> Option<&dyn Tasks> {
        Some(self)
    }
}

/// Returns the observation of `list_tools`.
pub(super) fn listed(specs: Vec<ToolSpec>) -> Observation {
    let specs = specs.into_iter();
    let tools = specs.map(|tool| {
        json!({
            "name": tool.name, "description": tool.description,
            "input_schema": tool.parameters,
        })
    });
    let fields = Map::from_iter([("tools".to_owned(), tools.collect())]);
    Observation {
        fields,
        ..Observation::default()
    }
}

/// Returns the observation of a call that is none: `kind` is OpenEnv's `error_type`.
pub(super) fn refused(tool: &str, kind: &str, message: &str) -> Observation {
    let mut fields = Map::new();
    fields.insert("tool_name".to_owned(), json!(tool));
    fields.insert("result".to_owned(), Value::Null);
    let error = json!({"error_type": kind, "message": message});
    fields.insert("error".to_owned(), error);
    Observation {
        fields,
        ..Observation::default()
    }
}

/// Returns tools as MCP describes them.
pub(super) fn mcp_tools(specs: Vec<ToolSpec>) -> Vec<Value> {
    let specs = specs.into_iter();
    let tools = specs.map(|tool| {
        json!({
            "name": tool.name, "title": null, "description": tool.description,
            "inputSchema": tool.parameters, "outputSchema": null, "icons": null,
            "annotations": null, "meta": null, "execution": null,
        })
    });
    tools.collect()
}

impl Tasks for TaskGym {
    fn splits(&self) -> Vec<&str> {
        vec![SPLIT]
    }

    fn count(&self, split: &str) -> Option<usize> {
        (split == SPLIT).then_some(self.parts.tasks.len())
    }

    fn task(&self, split: &str, index: usize) -> Option<Value> {
        if split != SPLIT {
            return None;
        }
        let task = self.parts.tasks.get(index)?;
        Some(json!({"id": task.id, "index": index, "instruction": task.instruction()}))
    }
}

/// A sandbox whose programs end when the step does that runs them.
#[derive(Debug)]
struct Cancellable {
    sandbox: Arc<dyn Sandbox>,
    cancel: Arc<Mutex<Cancel>>,
}

impl Sandbox for Cancellable {
    fn exec_cancellable(
        &self,
        request: &ExecRequest,
        limits: &Limits,
        _cancel: &Cancel,
    ) -> Result<ExecOutcome, SandboxError> {
        let cancel = self
            .cancel
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        self.sandbox.exec_cancellable(request, limits, &cancel)
    }

    fn session(&self, limits: &Limits) -> Result<Session, SandboxError> {
        self.sandbox.session(limits)
    }

    fn converse(&self, dialogue: &Dialogue) -> Result<DialogueOutcome, SandboxError> {
        self.sandbox.converse(dialogue)
    }
}

struct TaskEpisode {
    gym: TaskGym,
    begun: Option<Begun>,
    progress: Progress,
    /// Of the step that runs.
    cancel: Arc<Mutex<Cancel>>,
}

#[derive(Clone)]
struct Begun {
    task: Arc<Task>,
    environment: ToolEnvironment,
    is_over: bool,
}

impl From<EnvError> for StepError {
    fn from(error: EnvError) -> Self {
        match error {
            EnvError::Sandbox { source, .. } => source.into(),
            error => Self::Environment {
                message: error.to_string(),
            },
        }
    }
}

impl TaskEpisode {
    /// Returns the tools of the task that was begun, or of all that may be.
    fn specs(&self) -> Vec<ToolSpec> {
        match &self.begun {
            Some(begun) => ToolEnvironment::tool_specs(begun.task.submission_kind()),
            None => self.gym.specs(),
        }
    }

    /// Returns the task that a reset asks for.
    fn choose(&self, arguments: &Map<String, Value>, seed: u64) -> Result<Arc<Task>, StepError> {
        let tasks = &self.gym.parts.tasks;
        let refused = |message| Err(StepError::Refused { message });
        if let Some(split) = arguments.get("split")
            && split != SPLIT
        {
            return refused(format!("there is no split {split}; there is `{SPLIT}`"));
        }
        if let Some(id) = arguments.get("task_id").filter(|id| !id.is_null()) {
            // Sets of tasks count them; here ids are text.
            let text = id.as_str().map_or_else(|| id.to_string(), str::to_owned);
            return match tasks.iter().find(|task| task.id == text) {
                Some(task) => Ok(Arc::clone(task)),
                None => refused(format!("there is no task {id}")),
            };
        }
        let count = tasks.len() as u64;
        let index = match natural(arguments, "index")? {
            Some(index) => index,
            // An odd factor spreads neighbouring seeds (Knuth, The Art of Computer Programming, 6.4).
            None => (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % count.max(1),
        };
        match usize::try_from(index)
            .ok()
            .and_then(|index| tasks.get(index))
        {
            Some(task) => Ok(Arc::clone(task)),
            None => refused(format!("task index {index} is not below {count}")),
        }
    }

    /// Calls a tool that there is, with arguments that it takes.
    fn use_tool(
        &mut self,
        tool: &str,
        arguments: &Map<String, Value>,
        cancel: &Cancel,
    ) -> Result<ToolText, StepError> {
        let begun = self.begun.as_mut().ok_or(StepError::NoEpisode)?;
        if begun.is_over {
            return Err(StepError::Refused {
                message: "the episode is over: send `reset` to begin another".to_owned(),
            });
        }
        *self.cancel.lock().unwrap_or_else(PoisonError::into_inner) = cancel.clone();
        let call = ToolCall::new(tool, Value::Object(arguments.clone()));
        let turn = ParsedTurn {
            reasoning: None,
            content: String::new(),
            tool_calls: vec![Ok(call)],
        };
        // A step that fails is not one of the policy's turns, and may be sent again.
        let mut environment = begun.environment.clone();
        let result = environment.step(&turn)?;
        if cancel.is_cancelled() {
            return Err(StepError::Cancelled);
        }
        if let Some(fault) = result.fault {
            return Err(StepError::Environment { message: fault });
        }
        begun.environment = environment;
        self.progress.step_count += 1;
        begun.is_over = result.done;
        let mut text = String::new();
        for message in &result.observation {
            text.push_str(&message.content);
        }
        if let Some(status) = result.status {
            let status = json!(status);
            text.push_str(status.as_str().unwrap_or_default());
        }
        Ok(ToolText {
            text,
            data: None,
            done: result.done,
            reward: result.reward,
        })
    }

    /// Returns what is wrong with a call: `error_type` and `message`.
    fn refusal(&self, tool: &str, arguments: &Map<String, Value>) -> Option<(&str, String)> {
        let specs = self.specs();
        let Some(spec) = specs.iter().find(|spec| spec.name == tool) else {
            return Some(("tool_not_found", format!("Unknown tool: '{tool}'")));
        };
        let required = spec.parameters.as_ref()?.get("required")?.as_array()?;
        let is_text = |name: &str| arguments.get(name).is_some_and(Value::is_string);
        let missing = required
            .iter()
            .filter_map(Value::as_str)
            .find(|name| !is_text(name))?;
        Some((
            "invalid_args",
            format!("`{tool}` needs the argument `{missing}`, a string"),
        ))
    }
}

/// Returns a tool's result as MCP clients of OpenEnv read it.
pub(super) fn tool_result(result: &ToolText) -> Value {
    let reward = result.reward;
    let meta = result
        .done
        .then(|| json!({"wardian": {"done": true, "reward": reward}}));
    // A tool that returns an object returns that; any other value is wrapped.
    let (structured, data) = match &result.data {
        Some(data) => (data.clone(), data.clone()),
        None => (json!({"result": result.text}), json!(result.text)),
    };
    json!({
        "content": [{"type": "text", "text": result.text, "annotations": null, "meta": null}],
        "structured_content": structured,
        "meta": meta,
        "data": data,
        "is_error": false,
    })
}

impl Episode for TaskEpisode {
    fn reset(
        &mut self,
        arguments: &Map<String, Value>,
        _cancel: &Cancel,
    ) -> Result<Observation, StepError> {
        // Without one each episode is another, or all of them would be of one task.
        let seed = natural(arguments, "seed")?.unwrap_or_else(rand::random);
        let task = self.choose(arguments, seed)?;
        let parts = &self.gym.parts;
        // Of its own, so that a copy's steps do not end with another's.
        self.cancel = Arc::default();
        let sandbox = Cancellable {
            sandbox: Arc::clone(&parts.sandbox),
            cancel: Arc::clone(&self.cancel),
        };
        let mut environment = ToolEnvironment::new(
            Arc::clone(&task),
            Arc::new(sandbox),
            Arc::clone(&parts.grader),
            Arc::clone(&parts.config),
            seed,
        );
        let messages = environment.reset()?;
        let instruction: Vec<_> = messages
            .iter()
            .map(|message| message.content.as_str())
            .collect();
        let mut fields = Map::new();
        fields.insert("instruction".to_owned(), json!(instruction.join("\n\n")));
        fields.insert("task_id".to_owned(), json!(task.id));
        self.progress = Progress::begin(arguments);
        self.begun = Some(Begun {
            task,
            environment,
            is_over: false,
        });
        Ok(Observation {
            fields,
            ..Observation::default()
        })
    }

    fn step(
        &mut self,
        action: &Map<String, Value>,
        _limit: Option<Duration>,
        cancel: &Cancel,
    ) -> Result<Observation, StepError> {
        let mut fields = Map::new();
        if action.get("type").and_then(Value::as_str) == Some("list_tools") {
            return Ok(listed(self.specs()));
        }
        let tool = action
            .get("tool_name")
            .and_then(Value::as_str)
            .unwrap_or_default();
        let empty = Map::new();
        let arguments = action
            .get("arguments")
            .and_then(Value::as_object)
            .unwrap_or(&empty);
        if let Some((kind, message)) = self.refusal(tool, arguments) {
            return Ok(refused(tool, kind, &message));
        }
        fields.insert("tool_name".to_owned(), json!(tool));
        let before = self.fuel();
        let result = self.use_tool(tool, arguments, cancel)?;
        fields.insert("result".to_owned(), tool_result(&result));
        fields.insert("error".to_owned(), Value::Null);
        Ok(Observation {
            fields,
            reward: result.reward,
            done: result.done,
            fuel: self.fuel() - before,
            ..Observation::default()
        })
    }

    fn state(&self) -> Value {
        json!({
            "episode_id": self.progress.episode_id,
            "step_count": self.progress.step_count,
            "task_id": self.begun.as_ref().map(|begun| &begun.task.id),
        })
    }

    fn tools(&self) -> Option<Vec<Value>> {
        Some(mcp_tools(self.specs()))
    }

    fn call(
        &mut self,
        tool: &str,
        arguments: &Map<String, Value>,
        cancel: &Cancel,
    ) -> Result<ToolText, StepError> {
        if let Some((_, message)) = self.refusal(tool, arguments) {
            return Err(StepError::Refused { message });
        }
        self.use_tool(tool, arguments, cancel)
    }

    fn fork(&mut self, count: usize) -> Result<Vec<Box<dyn Episode>>, StepError> {
        let parts = &self.gym.parts;
        let copies = (0..count).map(|_| {
            let cancel = Arc::<Mutex<Cancel>>::default();
            let begun = self.begun.clone().map(|mut begun| {
                begun.environment.set_sandbox(Arc::new(Cancellable {
                    sandbox: Arc::clone(&parts.sandbox),
                    cancel: Arc::clone(&cancel),
                }));
                begun
            });
            Box::new(Self {
                gym: self.gym.clone(),
                begun,
                progress: self.progress.clone(),
                cancel,
            }) as Box<dyn Episode>
        });
        Ok(copies.collect())
    }

    /// Programs have an interpreter only while they run.
    fn park(&mut self) -> Result<bool, StepError> {
        Ok(false)
    }
}

impl TaskEpisode {
    fn fuel(&self) -> u64 {
        self.begun
            .as_ref()
            .map_or(0, |begun| begun.environment.stats().fuel)
    }
}
