//! The samples of one task.

use crate::trajectory::Trajectory;

/// G trajectories of one task, the unit of group-relative advantages.
#[derive(Debug, Clone)]
pub struct RolloutGroup {
    /// The task's id.
    pub task_id: String,
    /// The trajectories, in sample order.
    pub trajectories: Vec<Trajectory>,
}

impl RolloutGroup {
    /// Returns the rewards in sample order; `None` is an episode that could not be scored.
    #[must_use]
    pub fn rewards(&self) -> Vec<Option<f64>> {
        self.trajectories
            .iter()
            .map(|trajectory| trajectory.reward)
            .collect()
    }

    /// Returns whether the rewards of the episodes that can be learned from differ, so that a
    /// comparison teaches something (DAPO, arXiv:2503.14476, equation 11).
    #[must_use]
    pub fn is_informative(&self) -> bool {
        let mut rewards = (self.trajectories.iter())
            .filter(|trajectory| trajectory.is_trainable())
            .filter_map(|trajectory| trajectory.reward);
        rewards
            .next()
            .is_some_and(|first| rewards.any(|reward| reward != first))
    }
}
