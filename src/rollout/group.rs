//! The samples of one task.

use serde::{Deserialize, Serialize};

use crate::trajectory::Trajectory;

/// G trajectories of one task, the unit of group-relative advantages.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RolloutGroup {
    /// The task's id.
    pub task_id: String,
    /// The trajectories, in sample order.
    pub trajectories: Vec<Trajectory>,
}

impl RolloutGroup {
    /// Returns the episodes, each by the first of its rows: those of an agent may be several.
    pub fn episodes(&self) -> impl Iterator<Item = &Trajectory> {
        let mut last = None;
        let is_first = move |row: &&Trajectory| last.replace(row.sample) != Some(row.sample);
        self.trajectories.iter().filter(is_first)
    }

    /// Returns the rewards in sample order; `None` is an episode that could not be scored.
    #[must_use]
    pub fn rewards(&self) -> Vec<Option<f64>> {
        self.episodes().map(|episode| episode.reward).collect()
    }

    /// Returns whether the rewards of the episodes that can be learned from differ, so that a
    /// comparison teaches something (DAPO, arXiv:2503.14476, equation 11).
    #[must_use]
    pub fn is_informative(&self) -> bool {
        self.differs_in(|trajectory| trajectory.reward.unwrap_or(0.0))
    }

    /// Returns whether the episodes that can be learned from differ in at least one of these parts of
    /// the reward: the same where each part is compared by itself. Parts may differ whose sum does not.
    #[must_use]
    pub fn is_informative_in<'a>(&self, mut parts: impl Iterator<Item = &'a str>) -> bool {
        let value = |trajectory: &Trajectory, part: &str| trajectory.rewards.get(part).copied();
        parts.any(|part| self.differs_in(|trajectory| value(trajectory, part).unwrap_or(0.0)))
    }

    fn differs_in(&self, value: impl Fn(&Trajectory) -> f64) -> bool {
        let mut values = (self.trajectories.iter())
            .filter(|trajectory| trajectory.is_trainable())
            .map(value);
        values
            .next()
            .is_some_and(|first| values.any(|value| value != first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::tests_support::golden;
    use crate::trajectory::{Status, TokenTrace, Usage};

    fn group(rewards: &[Option<f64>]) -> RolloutGroup {
        let episode = |(sample, reward): (u32, &Option<f64>)| {
            let mut trace = TokenTrace::new();
            trace.push_prompt(&[1]).unwrap();
            trace.push_sampled(&[2], &[-0.5]).unwrap();
            Trajectory {
                task_id: "1".to_owned(),
                group: 0,
                sample,
                policy_step: 0,
                segments: Vec::new(),
                messages: Vec::new(),
                turns: Vec::new(),
                trace,
                reward: *reward,
                rewards: indexmap::IndexMap::new(),
                passed: None,
                status: Status::Finished,
                usage: Usage::default(),
            }
        };
        RolloutGroup {
            task_id: "1".to_owned(),
            trajectories: (0..).zip(rewards).map(episode).collect(),
        }
    }

    #[test]
    fn groups_whose_rewards_differ_are_informative() {
        let case = golden("dynamic_sampling_filter");
        let keep = case.value("expected", "keep");
        for (index, rewards) in case.rows("inputs", "group_rewards").iter().enumerate() {
            let rewards: Vec<_> = rewards.iter().copied().map(Some).collect();
            assert_eq!(
                keep[index].as_bool(),
                Some(group(&rewards).is_informative())
            );
        }
        // Parts may differ where their sum does not, and the other way round.
        let mut parted = group(&[Some(1.0), Some(1.0)]);
        for (trajectory, [a, b]) in parted.trajectories.iter_mut().zip([[1.0, 0.0], [0.0, 1.0]]) {
            trajectory.rewards = [("a".to_owned(), a), ("b".to_owned(), b)].into();
        }
        assert!(!parted.is_informative());
        assert!(parted.is_informative_in(["b"].into_iter()));
        assert!(!parted.is_informative_in(["c"].into_iter()));
        // What could not be scored says nothing.
        assert!(!group(&[Some(1.0), None, Some(1.0)]).is_informative());
        assert!(!group(&[None]).is_informative());
    }
}
