//! Environments: what a policy acts on, turn by turn.
//!
//! An [`Environment`] is one episode of one task. `reset` gives the opening messages, `step` takes
//! the assistant's turn and answers with the messages that come back, and at the end with the
//! reward. The policy's mistakes (a malformed tool call, code that raises, an endless loop) are
//! observations and rewards; only a fault of ours is an [`EnvError`], and such an episode carries
//! no reward at all.
//!
//! [`ToolEnvironment`] is the environment of program tasks: `run_python` runs a draft in a fresh
//! sandbox, `submit_solution` ends the episode with a grade from another instance. Environments of other
//! servers are in `openenv::client`. [`actors`] has those of tasks that need a shell, in the heavy tier.

pub mod actors;
mod error;
mod text;
mod tools;

#[cfg(test)]
mod tests;

use indexmap::IndexMap;

use crate::chat::{Message, ParsedTurn, ToolCall, ToolSpec};
use crate::trajectory::ToolRun;

pub use self::error::EnvError;
pub use self::text::describe_outcome;
pub(crate) use self::text::{head_and_tail, last_code_block};
pub use self::tools::{
    RUN_PYTHON, ToolEnvironment, ToolEnvironmentConfig, is_submission, run_python_tool,
};

/// How an episode ended, for reports; the reward alone trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EpisodeStatus {
    /// A submission passed every test.
    Passed,
    /// A submission failed a test.
    Failed,
    /// A submission could not be loaded.
    Invalid,
    /// The turns, or the tokens, ended without a submission.
    NoSubmission,
    /// The grader or the sandbox failed, not the policy; the episode has no reward.
    InfraError,
}

/// What one step gives back.
#[derive(Debug, Clone)]
pub struct StepResult {
    /// Messages to append to the conversation: tool results, or a hint from the environment.
    pub observation: Vec<Message>,
    /// Set on the last step; `None` there means that the episode could not be scored.
    pub reward: Option<f64>,
    /// The parts of the reward by name, each before weighting.
    pub rewards: IndexMap<String, f64>,
    /// Whether the episode is over.
    pub done: bool,
    /// How it ended; `None` while it goes on.
    pub status: Option<EpisodeStatus>,
    /// What failed, where it was not the policy.
    pub fault: Option<String>,
}

impl StepResult {
    /// Returns what a step gives back behind which the episode goes on.
    #[must_use]
    pub fn goes_on(observation: Vec<Message>) -> Self {
        Self {
            observation,
            reward: None,
            rewards: IndexMap::new(),
            done: false,
            status: None,
            fault: None,
        }
    }
}

/// What one episode used, for the metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EpisodeStats {
    /// Tool calls made, malformed ones included.
    pub tool_calls: u32,
    /// Calls that could not be parsed, named no tool, lacked an argument, or ran code that failed.
    pub tool_failures: u32,
    /// Seconds until an actor was there, for environments that have one.
    pub start_seconds: f64,
    /// Seconds in tools.
    pub tool_seconds: f64,
    /// Seconds in the grader.
    pub grade_seconds: f64,
    /// Fuel that the policy's code burnt, in tools and while it was graded.
    pub fuel: u64,
    /// Commands that took too long, in an actor.
    pub commands_timed_out: u32,
    /// Actors that the policy brought down.
    pub actors_lost: u32,
}

/// One episode of one task.
pub trait Environment: Send {
    /// Begins what [`Environment::reset`] waits for, where that is done elsewhere. It is called for all
    /// episodes that begin together before the first of them is reset, so that they wait together.
    fn prepare(&mut self) {}

    /// Returns whether [`Environment::reset`] would not wait any more for what [`Environment::prepare`] began.
    /// Who has other things to look after asks before.
    fn is_prepared(&mut self) -> bool {
        true
    }

    /// Begins the episode and returns the opening messages.
    ///
    /// # Errors
    ///
    /// Fails only where the environment failed: there was no policy yet.
    fn reset(&mut self) -> Result<Vec<Message>, EnvError>;

    /// Returns whether its steps wait for work that is done elsewhere, rather than do it here.
    fn waits(&self) -> bool {
        false
    }

    /// Returns the tools to describe to the model.
    fn tools(&self) -> &[ToolSpec];

    /// Takes the assistant's turn.
    ///
    /// # Errors
    ///
    /// Fails only where the environment failed, never for what the policy did.
    fn step(&mut self, turn: &ParsedTurn) -> Result<StepResult, EnvError>;

    /// Ends an episode whose tokens ran out: grades what there is. `cut_off` is the turn that they
    /// ran out in, if they did in one.
    fn close(&mut self, cut_off: Option<&ParsedTurn>) -> StepResult;

    /// Ends an episode with an answer that was made elsewhere, as by an agent with tools of its own. An
    /// environment that has no answers ends as [`Environment::close`] has it.
    fn submit(&mut self, answer: &str) -> StepResult {
        let _ = answer;
        self.close(None)
    }

    /// Whether an agent that is a program of its own can use its tools by [`Environment::use_tool`].
    fn lends_tools(&self) -> bool {
        false
    }

    /// Gets what its tools work with before an agent that is a program of its own begins, so that none of the
    /// agent's time passes while it waits for that. It waits no longer once `is_over`.
    ///
    /// # Errors
    ///
    /// Fails only where the environment failed: no agent was there yet.
    fn open_tools(&mut self, is_over: &dyn Fn() -> bool) -> Result<(), EnvError> {
        let _ = is_over;
        Ok(())
    }

    /// Uses a tool for an agent that is a program of its own and has turns of its own; returns what it is told.
    /// The episode is not over before it is [closed](Environment::close).
    ///
    /// # Errors
    ///
    /// Fails only where the environment failed, never for what the policy did.
    fn use_tool(&mut self, call: &ToolCall) -> Result<String, EnvError> {
        Ok(format!("error: there is no tool `{}` here", call.name))
    }

    /// Returns what the last step ran, whatever became of the step, for who looks at the episode.
    fn take_runs(&mut self) -> Vec<ToolRun> {
        Vec::new()
    }

    /// Returns what was used so far.
    fn stats(&self) -> EpisodeStats;
}
