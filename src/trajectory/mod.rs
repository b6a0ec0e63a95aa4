//! What happened: transcripts, token traces and their storage.
//!
//! A [`Trajectory`] is one episode: the conversation, the [`Turn`]s of the policy in it, the exact
//! token ids that were sampled or fed ([`TokenTrace`]), and how it was scored. [`StepWriter`] and
//! [`read_step`] keep the trajectories of a training step in `rollouts/step-N.jsonl`.
//!
//! The trace, not the conversation, is what is trained on: rendering the messages again may give
//! other ids than those that were sampled. [`AtifTrajectory`] is one as tools of others read it. A trajectory that could not be scored has no reward, so
//! that a fault of ours is never mistaken for a wrong answer.

mod atif;
mod error;
mod store;
mod token_trace;
mod tool_run;

use std::ops::Range;

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use crate::chat::Message;

pub use atif::{ATIF_VERSION, AtifOrigin, AtifTrajectory};
pub use error::{StoreError, TraceError};
pub use store::{StepReader, StepWriter, read_step, step_path, steps};
pub use token_trace::TokenTrace;
pub use tool_run::{KeptText, RunEnding, ToolRun};

/// One episode of one task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trajectory {
    /// The task's id in its set.
    pub task_id: String,
    /// The group the episode belongs to: episodes of the same group are samples of the same task
    /// under the same policy, and are compared with each other.
    pub group: u64,
    /// Which sample of its group it is, from 0.
    pub sample: u32,
    /// The optimizer step, from 1, before which the policy sampled it: the one that learns from it, or
    /// the one before that where the next step's episodes are sampled while a step trains. Of a
    /// measurement, how many steps the policy had made.
    pub policy_step: u64,
    /// Where later policies went on with an episode that was paused, in order; none where one policy
    /// sampled all of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub segments: Vec<Segment>,
    /// The conversation, the task's messages first.
    pub messages: Vec<Message>,
    /// The policy's turns, in order.
    pub turns: Vec<Turn>,
    /// The token ids of the whole episode.
    pub trace: TokenTrace,
    /// The score; none when the episode could not be scored, by a fault that is not the policy's.
    pub reward: Option<f64>,
    /// The parts of the score by name, each before weighting, for metrics.
    #[serde(default, skip_serializing_if = "IndexMap::is_empty")]
    pub rewards: IndexMap<String, f64>,
    /// Whether all tests passed; none when the episode could not be scored.
    pub passed: Option<bool>,
    /// How the episode ended.
    pub status: Status,
    /// What the episode cost.
    pub usage: Usage,
}

impl Trajectory {
    /// Returns whether the episode has a score and something that was sampled, and so may be
    /// learned from.
    #[must_use]
    pub fn is_trainable(&self) -> bool {
        self.reward.is_some() && self.trace.sampled_len() > 0
    }

    /// Returns whether the policy ran into a limit before it had finished its answer.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        matches!(self.status, Status::Truncated | Status::TurnLimit)
    }
}

/// A part of an episode that a later policy sampled than the part before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Where it begins in [`Trajectory::trace`].
    pub start: usize,
    /// The optimizer step before which its policy is, as [`Trajectory::policy_step`].
    pub policy_step: u64,
}

/// One answer of the policy within an episode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// The position of the answer in [`Trajectory::messages`].
    pub message: usize,
    /// The positions of its sampled ids in [`Trajectory::trace`].
    pub tokens: Range<usize>,
    /// Why sampling stopped.
    pub finish: Finish,
    /// How many tool calls it made, malformed ones included.
    pub tool_calls: u32,
    /// How many of them failed: could not be read, named no tool, or ended in an error.
    pub tool_failures: u32,
    /// What was run, in order; none of episodes that were stored before it was kept, and of tools that run nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<ToolRun>,
}

/// Why the sampling of a turn stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The policy sampled a stop token, which is part of the turn.
    Stop,
    /// The turn or the context was full.
    Length,
}

/// How an episode ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Status {
    /// The policy gave its answer.
    Finished,
    /// The last turn was cut off by a token limit.
    Truncated,
    /// The policy still called tools in its last allowed turn.
    TurnLimit,
    /// We failed: the sandbox, the engine or the grader broke. There is no reward.
    Failed {
        /// What broke.
        reason: String,
    },
}

impl Status {
    /// Returns the name that it has in a file of rollouts.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Truncated => "truncated",
            Self::TurnLimit => "turn_limit",
            Self::Failed { .. } => "failed",
        }
    }
}

/// What an episode cost; times are wall-clock and only for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Seconds spent waiting for sampled tokens.
    pub generate_seconds: f64,
    /// Seconds until the episode's actor was there, where it had one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub start_seconds: f64,
    /// Seconds spent in tools.
    pub tool_seconds: f64,
    /// Seconds spent scoring.
    pub grade_seconds: f64,
    /// Fuel burnt by the policy's code, in tools and while it was scored.
    pub fuel: u64,
    /// Commands in an actor that took too long.
    #[serde(default, skip_serializing_if = "is_none")]
    pub commands_timed_out: u32,
    /// Actors that the policy brought down.
    #[serde(default, skip_serializing_if = "is_none")]
    pub actors_lost: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "how serde calls it")]
fn is_zero(seconds: &f64) -> bool {
    *seconds == 0.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "how serde calls it")]
fn is_none(count: &u32) -> bool {
    *count == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_episode_without_a_score_or_a_sample_is_not_trainable() {
        let mut trace = TokenTrace::new();
        trace.push_prompt(&[1, 2]).unwrap();
        let mut episode = Trajectory {
            task_id: "1".to_owned(),
            group: 0,
            sample: 0,
            policy_step: 0,
            segments: vec![],
            messages: vec![],
            turns: vec![],
            trace,
            reward: Some(0.0),
            rewards: IndexMap::new(),
            passed: Some(false),
            status: Status::Finished,
            usage: Usage::default(),
        };
        assert!(!episode.is_trainable());
        episode.trace.push_sampled(&[3], &[-0.5]).unwrap();
        assert!(episode.is_trainable());
        episode.reward = None;
        assert!(!episode.is_trainable());
        episode.status = Status::TurnLimit;
        assert!(episode.is_truncated());
    }

    #[test]
    fn statuses_read_as_words() {
        let json = |status: &Status| serde_json::to_string(status).unwrap();
        assert_eq!(json(&Status::TurnLimit), r#"{"kind":"turn_limit"}"#);
        assert_eq!(
            json(&Status::Failed {
                reason: "pool closed".to_owned()
            }),
            r#"{"kind":"failed","reason":"pool closed"}"#
        );
    }
}
