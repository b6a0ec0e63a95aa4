//! That episodes have scores: those of a step, and those of a measurement.

use super::RunError;
use crate::rollout::RolloutGroup;
use crate::trajectory::Status;

/// Refuses episodes of which none could be scored: going on would learn nothing, in silence.
pub(super) fn check_scored<'a>(
    groups: impl IntoIterator<Item = &'a RolloutGroup>,
) -> Result<(), RunError> {
    let mut reason = None;
    for group in groups {
        let mut episodes = group.trajectories.iter();
        if episodes.any(|episode| episode.reward.is_some()) {
            return Ok(());
        }
        reason = why_unscored(std::slice::from_ref(group)).or(reason);
    }
    Err(RunError::NothingScored {
        reason: reason.unwrap_or_default(),
    })
}

/// Returns why the last episode failed that did.
pub(super) fn why_unscored(groups: &[RolloutGroup]) -> Option<String> {
    let mut episodes = groups
        .iter()
        .rev()
        .flat_map(|group| group.trajectories.iter().rev());
    episodes.find_map(|episode| match &episode.status {
        Status::Failed { reason } => Some(reason.clone()),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trajectory::{TokenTrace, Trajectory, Usage};

    fn group(reward: Option<f64>) -> RolloutGroup {
        let failed = Status::Failed {
            reason: "the sandbox failed".to_owned(),
        };
        RolloutGroup {
            task_id: "1".to_owned(),
            trajectories: vec![Trajectory {
                task_id: "1".to_owned(),
                group: 0,
                sample: 0,
                policy_step: 0,
                segments: Vec::new(),
                messages: Vec::new(),
                turns: Vec::new(),
                trace: TokenTrace::new(),
                reward,
                rewards: indexmap::IndexMap::new(),
                passed: None,
                status: reward.map_or(failed, |_| Status::Finished),
                usage: Usage::default(),
            }],
        }
    }

    #[test]
    fn one_score_is_enough_and_none_says_why() {
        check_scored(&[group(None), group(Some(0.0))]).unwrap();
        let error = check_scored(&[group(None), group(None)]).unwrap_err();
        assert!(error.to_string().contains("the sandbox failed"), "{error}");
        check_scored(&[]).unwrap_err();
    }
}
