//! What a stored episode's reward was worth beside those of its group.

use indexmap::IndexMap;

use super::algorithm::advantage_config;
use crate::config::{
    AdvantageEstimator, RewardAggregation, RunConfig, ScaleRewards, TrainerConfig,
};
use crate::trainer::{GroupMember, OverlongPenalty, group_advantages};

/// What is known of a stored episode without reading its tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sample {
    /// Its group.
    pub(crate) group: u64,
    /// Which sample of the group it is; several rows may be of one.
    pub(crate) sample: u32,
    /// Its reward; none if it could not be scored.
    pub(crate) reward: Option<f64>,
    /// Tokens that were sampled.
    pub(crate) sampled_tokens: usize,
    /// Whether a limit cut it off.
    pub(crate) is_truncated: bool,
}

/// Returns the advantage that each row of a stored step had by the run's settings, none for one without a
/// score; or why that cannot be told from the file.
pub(crate) fn advantages(
    config: &RunConfig,
    rows: &[Sample],
) -> Result<Vec<Option<f64>>, &'static str> {
    let trainer = &config.trainer;
    let is_over_step = trainer.scale_rewards == ScaleRewards::Batch
        || trainer.advantage == AdvantageEstimator::ReinforcePlusPlusBaseline;
    match trainer.advantage {
        AdvantageEstimator::Gae | AdvantageEstimator::ReinforcePlusPlus => {
            return Err("each token has an advantage of its own, which is not stored");
        }
        _ if trainer.shuffle_rewards => {
            return Err("rewards were shuffled before they were compared");
        }
        _ if trainer.kl_in_reward && trainer.beta != 0.0 => {
            return Err("the divergence, which is not stored, was taken off the rewards");
        }
        _ if trainer.reward_aggregation == RewardAggregation::Gdpo => {
            return Err("each part of the reward was compared by itself");
        }
        // The file has groups, too, that were set aside.
        _ if is_over_step && trainer.dynamic_sampling => {
            return Err("rewards were compared over a step, which had not all groups of the file");
        }
        _ => {}
    }
    let overlong = trainer.overlong_limit.map(|limit| OverlongPenalty {
        limit,
        margin: trainer.overlong_margin,
        weight: trainer.overlong_weight,
    });
    let mut rows_of: IndexMap<(u64, u32), Vec<usize>> = IndexMap::new();
    for (row, sample) in rows.iter().enumerate() {
        let of = rows_of.entry((sample.group, sample.sample)).or_default();
        of.push(row);
    }
    let members: Vec<GroupMember<u64>> = (rows_of.iter())
        .map(|((group, _), of)| {
            let tokens = |counts: &dyn Fn(&Sample) -> bool| -> usize {
                let counted = of.iter().map(|row| &rows[*row]).filter(|row| counts(row));
                counted.map(|row| row.sampled_tokens).sum()
            };
            let sampled_tokens = tokens(&|_| true);
            let penalty = overlong.map_or(0.0, |overlong| overlong.of(sampled_tokens));
            GroupMember {
                group: *group,
                reward: rows[of[0]].reward.map(|reward| reward + penalty),
                sampled_tokens,
                loss_tokens: tokens(&|row| !(trainer.mask_truncated && row.is_truncated)),
            }
        })
        .collect();
    let found = group_advantages(&members, advantage_config(trainer))
        .map_err(|_| "a reward is no finite number")?;
    let mut values = vec![None; rows.len()];
    for (of, advantage) in rows_of.values().zip(found.values) {
        for row in of {
            values[*row] = advantage;
        }
    }
    Ok(values)
}

/// Returns whether [`advantages`] finds the same by the settings of two runs, or of a run before and after it
/// was resumed.
pub(super) fn compare_alike(one: &TrainerConfig, other: &TrainerConfig) -> bool {
    let as_one = TrainerConfig {
        advantage: one.advantage,
        scale_rewards: one.scale_rewards,
        advantage_epsilon: one.advantage_epsilon,
        shuffle_rewards: one.shuffle_rewards,
        kl_in_reward: one.kl_in_reward,
        beta: one.beta,
        reward_aggregation: one.reward_aggregation,
        dynamic_sampling: one.dynamic_sampling,
        overlong_limit: one.overlong_limit,
        overlong_margin: one.overlong_margin,
        overlong_weight: one.overlong_weight,
        mask_truncated: one.mask_truncated,
        ..other.clone()
    };
    as_one == *other
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(group: u64, sample: u32, reward: Option<f64>) -> Sample {
        Sample {
            group,
            sample,
            reward,
            sampled_tokens: 4,
            is_truncated: false,
        }
    }

    #[test]
    fn rewards_are_compared_within_their_group() {
        let mut config = RunConfig::default();
        config.trainer.scale_rewards = ScaleRewards::None;
        let rows = [
            sample(0, 0, Some(1.0)),
            sample(0, 1, Some(0.0)),
            sample(1, 0, Some(1.0)),
            sample(1, 1, None),
        ];
        let found = advantages(&config, &rows).unwrap();
        assert_eq!(found, [Some(0.5), Some(-0.5), Some(0.0), None]);
    }

    #[test]
    fn rows_of_one_episode_count_once() {
        let mut config = RunConfig::default();
        config.trainer.scale_rewards = ScaleRewards::None;
        let rows = [
            sample(0, 0, Some(1.0)),
            sample(0, 0, Some(1.0)),
            sample(0, 1, Some(0.0)),
        ];
        let found = advantages(&config, &rows).unwrap();
        assert_eq!(found, [Some(0.5), Some(0.5), Some(-0.5)]);
    }

    #[test]
    fn long_answers_are_punished_before() {
        let mut config = RunConfig::default();
        config.trainer.scale_rewards = ScaleRewards::None;
        config.trainer.overlong_limit = Some(4);
        config.trainer.overlong_margin = 2;
        config.trainer.overlong_weight = 1.0;
        let long = sample(0, 0, Some(1.0));
        let short = Sample {
            sampled_tokens: 2,
            ..sample(0, 1, Some(1.0))
        };
        let found = advantages(&config, &[long, short]).unwrap();
        assert_eq!(found, [Some(-0.5), Some(0.5)]);
    }

    #[test]
    fn what_the_file_does_not_tell_is_not_made_up() {
        let rows = [sample(0, 0, Some(1.0))];
        let refused = |change: &dyn Fn(&mut RunConfig)| {
            let mut config = RunConfig::default();
            change(&mut config);
            advantages(&config, &rows).is_err()
        };
        assert!(!refused(&|_| {}));
        assert!(refused(
            &|config| config.trainer.advantage = AdvantageEstimator::Gae
        ));
        assert!(refused(&|config| config.trainer.shuffle_rewards = true));
        assert!(refused(&|config| {
            config.trainer.kl_in_reward = true;
            config.trainer.beta = 0.1;
        }));
        assert!(refused(&|config| {
            config.trainer.scale_rewards = ScaleRewards::Batch;
            config.trainer.dynamic_sampling = true;
        }));
    }
    #[test]
    fn settings_that_compare_nothing_do_not_count() {
        let one = TrainerConfig::default();
        let more_steps = TrainerConfig {
            steps: one.steps + 1,
            learning_rate: 2.0 * one.learning_rate,
            ..one.clone()
        };
        assert!(compare_alike(&one, &more_steps));
        let unscaled = TrainerConfig {
            scale_rewards: ScaleRewards::None,
            ..one.clone()
        };
        assert!(!compare_alike(&one, &unscaled));
    }
}
