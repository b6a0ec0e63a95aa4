//! What is served: environments and their episodes.

use std::time::Duration;

use serde_json::{Map, Value};

use super::validate::Invalid;
use crate::causes::with_causes;
use crate::sandbox::{Cancel, SandboxError};

/// What a reset or a step gives back.
#[derive(Debug, Clone, Default)]
pub(super) struct Observation {
    /// `metadata`, first in the observation.
    pub(super) metadata: Map<String, Value>,
    /// The other fields, in their order.
    pub(super) fields: Map<String, Value>,
    /// The reward, where there is one.
    pub(super) reward: Option<f64>,
    /// Whether the episode is over.
    pub(super) done: bool,
    /// The fuel that it burnt: how heavy the session's next step is expected to be.
    pub(super) fuel: u64,
}

/// A result of a tool.
#[derive(Debug, Clone)]
pub(super) struct ToolText {
    /// What the tool says.
    pub(super) text: String,
    /// The same for programs, where there is more to say than the text.
    pub(super) data: Option<Value>,
    /// Whether the episode is over.
    pub(super) done: bool,
    /// Its reward, where there is one.
    pub(super) reward: Option<f64>,
}

/// Why a reset or a step has no observation. What the policy did is never among the reasons.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(super) enum StepError {
    /// The session has no episode yet.
    #[error(
        "this session has no episode: send `reset` first. A connection that broke was replaced by a \
         new session, without the state of the old one"
    )]
    NoEpisode,
    /// The interpreter ended in an earlier step.
    #[error("the session's state was lost: its interpreter {exit}. Send `reset` to go on")]
    StateLost {
        /// How it ended.
        exit: String,
    },
    /// Somebody else has taken what the session had.
    #[error("the session's state was lost: {reason}. Send `reset` to go on")]
    Taken {
        /// What is known about it.
        reason: String,
    },
    /// The client went away.
    #[error("the step was cancelled")]
    Cancelled,
    /// All interpreters are in use.
    #[error("no interpreter is free: all {limit} are in use")]
    Full {
        /// How many there are.
        limit: u32,
    },
    /// Too many requests of the session wait for each other.
    #[error("{limit} requests of this session wait already; send one at a time")]
    Crowded {
        /// How many may.
        limit: usize,
    },
    /// The arguments of a reset cannot be.
    #[error("{message}")]
    Refused {
        /// What is wrong.
        message: String,
    },
    /// The environment does not do this.
    #[error("{what} is not supported for this environment")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
    },
    /// The sandbox is at fault.
    #[error("the sandbox failed")]
    Sandbox(#[source] SandboxError),
    /// The environment is at fault.
    #[error("the environment failed: {message}")]
    Environment {
        /// What happened.
        message: String,
    },
}

impl StepError {
    /// Says it with its causes.
    pub(super) fn describe(&self) -> String {
        with_causes(self)
    }

    /// Returns whether the server is at fault, and should say so in its log.
    pub(super) fn is_fault(&self) -> bool {
        matches!(self, Self::Sandbox(_) | Self::Environment { .. })
    }
}

impl From<SandboxError> for StepError {
    fn from(error: SandboxError) -> Self {
        match error {
            SandboxError::PoolExhausted { limit } => Self::Full { limit },
            SandboxError::SessionEnded { exit } => Self::StateLost {
                exit: exit.to_string(),
            },
            SandboxError::RequestTooLarge { .. } => Self::Refused {
                message: error.to_string(),
            },
            error => Self::Sandbox(error),
        }
    }
}

/// A kind of environment.
pub(super) trait Gym: Send + Sync + std::fmt::Debug {
    /// Returns the name that routes have.
    fn name(&self) -> &str;

    /// Returns `name` and `description` of `/metadata`.
    fn metadata(&self) -> (&str, &str);

    /// Returns the JSON schemas of `/schema`.
    fn schema(&self) -> &Value;

    /// Returns whether the sessions' ids are in the metadata of each reset's observation.
    fn names_sessions(&self) -> bool {
        true
    }

    /// Returns whether an episode begins with a reset, so that a step before the first is refused.
    fn needs_reset(&self) -> bool {
        true
    }

    /// Checks an action.
    fn check(&self, action: &Map<String, Value>) -> Vec<Invalid>;

    /// Makes the environment of one session. It takes an interpreter when it needs one.
    fn open(&self) -> Box<dyn Episode>;

    /// Returns the tools as MCP describes them, if there are any.
    fn tools(&self) -> Option<Vec<Value>> {
        None
    }

    /// Returns the tasks, if there are any.
    fn tasks(&self) -> Option<&dyn Tasks> {
        None
    }
}

/// The tasks of a gym, as the Open Reward Standard's routes show them.
pub(super) trait Tasks: Send + Sync {
    /// Returns the splits' names.
    fn splits(&self) -> Vec<&str>;

    /// Returns how many tasks a split has, or `None` if there is no such split.
    fn count(&self, split: &str) -> Option<usize>;

    /// Returns a task without what grades it.
    fn task(&self, split: &str, index: usize) -> Option<Value>;
}

/// The environment of one session.
pub(super) trait Episode: Send {
    /// Begins an episode.
    fn reset(
        &mut self,
        arguments: &Map<String, Value>,
        cancel: &Cancel,
    ) -> Result<Observation, StepError>;

    /// Takes an action that was checked, in at most `limit`, where one is given.
    fn step(
        &mut self,
        action: &Map<String, Value>,
        limit: Option<Duration>,
        cancel: &Cancel,
    ) -> Result<Observation, StepError>;

    /// Returns `episode_id`, `step_count` and what else there is.
    fn state(&self) -> Value;

    /// Returns the tools of the episode as MCP describes them, where they are others than its gym's.
    fn tools(&self) -> Option<Vec<Value>> {
        None
    }

    /// Calls a tool.
    fn call(
        &mut self,
        _tool: &str,
        _arguments: &Map<String, Value>,
        _cancel: &Cancel,
    ) -> Result<ToolText, StepError> {
        Err(StepError::Unsupported { what: "call_tool" })
    }

    /// Makes independent copies of it as it is.
    fn fork(&mut self, count: usize) -> Result<Vec<Box<dyn Episode>>, StepError>;

    /// Gives its interpreter back and keeps its state; returns whether it had one.
    fn park(&mut self) -> Result<bool, StepError>;
}
