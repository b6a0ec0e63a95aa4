//! Episodes that go on in a later step (partial rollouts, Kimi k1.5, arXiv:2501.12599, section 2.6.2).
//!
//! An episode that has sampled its tokens of a step is paused, within a turn or behind a tool's answer,
//! and is continued by the policy of the next. What it sampled stays as it was sampled; keys and values
//! are computed again. A group is whole when all its episodes are done.
//!
//! Where is decided by counts of tokens, so it is the same in every run. Saved, an episode is its
//! trajectory: its environment is brought back by answering its turns again (`restored`), which must give
//! the same.

use serde::{Deserialize, Serialize};

use super::agent::Episode;
use super::{CollectionSeed, RolloutGroup, derive_seed};
use crate::engine::{Finished, SequenceSeed};
use crate::trajectory::Trajectory;

/// What a turn has so far.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct OpenTurn {
    pub(super) tokens: Vec<u32>,
    pub(super) logprobs: Vec<f32>,
    /// Seconds of sampling.
    pub(super) seconds: f64,
}

impl OpenTurn {
    /// Puts what the turn had before in front of what was sampled now.
    pub(super) fn continue_with(self, finished: &mut Finished) {
        let earlier = std::iter::repeat_n(true, self.tokens.len());
        finished.is_sampled.splice(0..0, earlier);
        finished.tokens.splice(0..0, self.tokens);
        finished.logprobs.splice(0..0, self.logprobs);
    }
}

/// An episode that waits for the next step.
#[derive(Debug)]
pub(super) struct PausedEpisode {
    pub(super) episode: Episode,
    pub(super) turn: OpenTurn,
}

/// Where a group began, which names its random streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The step that it was drawn for.
    pub step: u64,
    /// Which draw of the step it was.
    pub draw: u64,
    /// How often the task had been met before in that draw.
    pub visit: u64,
}

impl Origin {
    /// Returns the streams of the group's episodes as they begin.
    pub(super) fn task_seed(self, run: u64, purpose: &str, task_id: &str) -> u64 {
        let Self { step, draw, visit } = self;
        CollectionSeed {
            run,
            purpose,
            step,
            draw,
        }
        .of_task(purpose, task_id)
        .wrapping_add(visit)
    }

    /// Returns the stream of an episode that goes on in a later step, for the `round`th time there.
    pub(super) fn later_seed(
        self,
        seed: CollectionSeed<'_>,
        round: u64,
        task_id: &str,
        sample: u32,
    ) -> SequenceSeed {
        let begun = self.task_seed(seed.run, seed.purpose, task_id);
        let later = derive_seed(begun, "continued", seed.step, task_id);
        SequenceSeed::new(seed.run, later.wrapping_add(round << 32), u64::from(sample))
    }
}

/// A group of which some episodes wait for the next step.
#[derive(Debug)]
pub struct PausedGroup {
    pub(super) task_id: String,
    pub(super) origin: Origin,
    /// Tokens of a turn at the most.
    pub(super) max_new_tokens: usize,
    pub(super) done: Vec<Trajectory>,
    pub(super) paused: Vec<PausedEpisode>,
}

/// A [`PausedGroup`] as it is saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PausedRecord {
    /// The task's id.
    pub task_id: String,
    /// Where the group began.
    pub origin: Origin,
    pub(super) max_new_tokens: usize,
    pub(super) done: Vec<Trajectory>,
    pub(super) paused: Vec<(Trajectory, OpenTurn)>,
}

impl PausedRecord {
    /// Returns how many episodes the group has.
    #[must_use]
    pub fn size(&self) -> usize {
        self.done.len() + self.paused.len()
    }
}

impl PausedGroup {
    /// Returns the task's id.
    #[must_use]
    pub fn task_id(&self) -> &str {
        &self.task_id
    }

    /// Returns where it began.
    #[must_use]
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Returns what is to be saved of it.
    #[must_use]
    pub fn record(&self) -> PausedRecord {
        let paused = self.paused.iter();
        PausedRecord {
            task_id: self.task_id.clone(),
            origin: self.origin,
            max_new_tokens: self.max_new_tokens,
            done: self.done.clone(),
            paused: paused
                .map(|paused| (paused.episode.trajectory().clone(), paused.turn.clone()))
                .collect(),
        }
    }

    /// Returns whether the group is whole and not lost, as it is where all its episodes failed by our
    /// fault.
    pub(super) fn is_done(&self) -> bool {
        let is_scored = |episode: &Trajectory| episode.reward.is_some();
        self.paused.is_empty() && (self.done.is_empty() || self.done.iter().any(is_scored))
    }

    /// Returns the group if it is whole.
    ///
    /// # Errors
    ///
    /// Returns it as it is if some of its episodes are not done.
    pub(super) fn finish(mut self) -> Result<RolloutGroup, Self> {
        if !self.paused.is_empty() {
            return Err(self);
        }
        self.done.sort_by_key(|trajectory| trajectory.sample);
        Ok(RolloutGroup {
            task_id: self.task_id,
            trajectories: self.done,
        })
    }
}
