//! Group-relative advantages (Shao et al. 2024, `DeepSeekMath`, section 4.1).
//!
//! `A_i = (r_i - mean) / (std + eps)` over the samples of one task, in `f64`, with the sample
//! standard deviation (one degree of freedom less), as TRL computes it.

use serde::{Deserialize, Serialize};

use super::TrainerError;

/// How rewards become advantages.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdvantageConfig {
    /// Divide by the group's standard deviation; true by default. False is Dr. GRPO.
    pub scale_by_std: bool,
    /// Added to the standard deviation; 1e-4 by default, as in TRL.
    pub eps: f64,
}

impl Default for AdvantageConfig {
    fn default() -> Self {
        Self {
            scale_by_std: true,
            eps: 1e-4,
        }
    }
}

/// One sample of a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupMember<K> {
    /// The task that it is a sample of.
    pub group: K,
    /// Its reward; `None` if it could not be scored for reasons that are not the policy's.
    pub reward: Option<f64>,
    /// Tokens in its loss. A sample without any tells nothing and leaves the statistics.
    pub trainable_tokens: usize,
}

/// Advantages of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Advantages {
    /// One for each sample; `None` for those left out of the statistics.
    pub values: Vec<Option<f64>>,
    /// One entry for each group, in order of first appearance.
    pub groups: Vec<GroupStatistics>,
}

impl Advantages {
    /// Returns the share of groups whose rewards are all alike, which teach nothing.
    pub fn frac_reward_zero_std(&self) -> f64 {
        let scored: Vec<_> = self.groups.iter().filter(|group| group.count > 0).collect();
        let flat = scored.iter().filter(|group| group.is_flat).count();
        if scored.is_empty() {
            0.0
        } else {
            flat as f64 / scored.len() as f64
        }
    }
}

/// Rewards of one group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupStatistics {
    /// Samples in the statistics.
    pub count: usize,
    /// Mean reward; 0 without samples.
    pub mean: f64,
    /// Sample standard deviation; 0 for fewer than two samples.
    pub std: f64,
    /// Whether all rewards are equal, one alone included.
    pub is_flat: bool,
}

/// Returns each sample's advantage over its group.
///
/// Groups are told apart by their key, wherever their samples stand. A group of one, and a group
/// whose rewards are all equal, has advantage exactly 0.
///
/// # Errors
///
/// Fails if a reward is not finite.
pub fn group_advantages<K: Ord>(
    members: &[GroupMember<K>],
    config: AdvantageConfig,
) -> Result<Advantages, TrainerError> {
    let mut index_of = std::collections::BTreeMap::new();
    let mut rewards: Vec<Vec<f64>> = Vec::new();
    let mut group_of = Vec::with_capacity(members.len());
    for (sample, member) in members.iter().enumerate() {
        let group = *index_of.entry(&member.group).or_insert_with(|| {
            rewards.push(Vec::new());
            rewards.len() - 1
        });
        group_of.push(group);
        if let Some(reward) = usable(member) {
            if !reward.is_finite() {
                return Err(TrainerError::RewardNotFinite { sample, reward });
            }
            rewards[group].push(reward);
        }
    }
    let groups: Vec<_> = rewards.iter().map(|rewards| statistics(rewards)).collect();
    let values = members
        .iter()
        .zip(&group_of)
        .map(|(member, &group)| {
            let reward = usable(member)?;
            let group = &groups[group];
            if group.is_flat {
                return Some(0.0);
            }
            let scale = if config.scale_by_std {
                group.std + config.eps
            } else {
                1.0
            };
            Some((reward - group.mean) / scale)
        })
        .collect();
    Ok(Advantages { values, groups })
}

fn usable<K>(member: &GroupMember<K>) -> Option<f64> {
    member.reward.filter(|_| member.trainable_tokens > 0)
}

fn statistics(rewards: &[f64]) -> GroupStatistics {
    let count = rewards.len();
    if count == 0 {
        return GroupStatistics {
            count,
            mean: 0.0,
            std: 0.0,
            is_flat: true,
        };
    }
    let mean = rewards.iter().sum::<f64>() / count as f64;
    // Compared as numbers: the mean of equal rewards may differ from them by rounding, which a
    // small eps would blow up to an advantage near one.
    let is_flat = rewards.iter().all(|reward| reward == &rewards[0]);
    let std = if is_flat {
        0.0
    } else {
        let squares: f64 = rewards.iter().map(|reward| (reward - mean).powi(2)).sum();
        (squares / (count - 1) as f64).sqrt()
    };
    GroupStatistics {
        count,
        mean,
        std,
        is_flat,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::tests_support::golden;

    fn members(rewards: &[Option<f64>]) -> Vec<GroupMember<u8>> {
        let member = |&reward| GroupMember {
            group: 0,
            reward,
            trainable_tokens: 1,
        };
        rewards.iter().map(member).collect()
    }

    fn values(members: &[GroupMember<u8>], config: AdvantageConfig) -> Vec<f64> {
        let advantages = group_advantages(members, config).unwrap();
        advantages
            .values
            .iter()
            .map(|value| value.unwrap_or(0.0))
            .collect()
    }

    #[track_caller]
    fn assert_close(found: &[f64], expected: &[f64], tolerance: f64) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < tolerance, "{found} {expected}");
        }
    }

    #[test]
    fn groups_are_normalised_as_trl_does() {
        let case = golden("adv_grpo_group_norm");
        let rewards: Vec<_> = case
            .floats("inputs", "rewards")
            .into_iter()
            .map(Some)
            .collect();
        let members = members(&rewards);
        let found = values(&members, AdvantageConfig::default());
        assert_close(
            &found,
            &case.floats("expected", "trl_torchforge_eps1e4_ddof1"),
            1e-6,
        );
        let config = AdvantageConfig {
            eps: 1e-6,
            ..AdvantageConfig::default()
        };
        let expected = case.floats("expected", "verl_skyrl_slime_eps1e6_ddof1");
        assert_close(&values(&members, config), &expected, 1e-6);
        let std = group_advantages(&members, config).unwrap().groups[0].std;
        assert!((std - case.float("expected", "std_ddof1")).abs() < 1e-9);
        assert!((std - case.float("expected", "std_ddof0")).abs() > 1e-3);
    }

    #[test]
    fn equal_rewards_have_advantage_exactly_zero() {
        let case = golden("adv_grpo_zero_variance_group");
        let members = members(&[Some(0.7); 7]);
        let config = AdvantageConfig {
            eps: 1e-9,
            ..AdvantageConfig::default()
        };
        let advantages = group_advantages(&members, config).unwrap();
        assert_eq!(advantages.values, [Some(0.0); 7]);
        let expected = case.float("expected", "frac_reward_zero_std");
        assert_eq!(advantages.frac_reward_zero_std(), expected);
    }

    #[test]
    fn a_group_of_one_has_no_advantage() {
        let case = golden("adv_group_of_one");
        let members = members(&[Some(case.floats("inputs", "rewards")[0])]);
        let found = values(&members, AdvantageConfig::default());
        assert_eq!(found, [case.float("expected", "trl")]);
    }

    #[test]
    fn what_could_not_be_scored_leaves_the_statistics() {
        let case = golden("adv_unscorable_none_reward");
        let members = members(&[Some(1.0), None, Some(0.0), None]);
        let advantages = group_advantages(&members, AdvantageConfig::default()).unwrap();
        assert_eq!(advantages.values[1], None);
        let found = values(&members, AdvantageConfig::default());
        assert_close(&found, &case.floats("expected", "advantages"), 1e-6);
        let mutant = case.floats("mutants", "scored_as_zero");
        assert!((found[0] - mutant[0]).abs() > 0.1);
    }

    #[test]
    fn a_sibling_without_tokens_does_not_move_the_baseline() {
        let case = golden("adv_ignore_zero_action_sibling");
        let members: Vec<_> = [(100.0, 0), (1.0, 2), (3.0, 4)]
            .into_iter()
            .map(|(reward, trainable_tokens)| GroupMember {
                group: 0,
                reward: Some(reward),
                trainable_tokens,
            })
            .collect();
        let config = AdvantageConfig {
            scale_by_std: false,
            ..AdvantageConfig::default()
        };
        let found = values(&members, config);
        assert_close(&found, &case.floats("expected", "advantages"), 1e-9);
    }

    #[test]
    fn groups_are_told_apart_by_their_key() {
        let case = golden("adv_group_by_id_not_by_position");
        // The file's rewards give its mutant the same numbers; these do not.
        let rewards = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0];
        let ids = case.value("inputs", "prompt_ids").as_array().unwrap();
        let members: Vec<_> = rewards
            .iter()
            .zip(ids)
            .map(|(&reward, id)| GroupMember {
                group: id.as_str().unwrap(),
                reward: Some(reward),
                trainable_tokens: 1,
            })
            .collect();
        let config = AdvantageConfig {
            scale_by_std: false,
            ..AdvantageConfig::default()
        };
        let found: Vec<_> = group_advantages(&members, config)
            .unwrap()
            .values
            .into_iter()
            .flatten()
            .collect();
        assert_close(
            &found,
            &[0.5, -0.25, 0.5, -0.25, -0.5, 0.75, -0.5, -0.25],
            1e-12,
        );

        let rewards = case.floats("inputs", "rewards");
        let members: Vec<_> = members
            .into_iter()
            .zip(rewards)
            .map(|(member, reward)| GroupMember {
                reward: Some(reward),
                ..member
            })
            .collect();
        let found: Vec<_> = group_advantages(&members, config)
            .unwrap()
            .values
            .into_iter()
            .flatten()
            .collect();
        assert_close(&found, &case.floats("expected", "advantages"), 1e-6);
    }

    #[test]
    fn a_reward_that_is_no_number_is_refused() {
        let error = group_advantages(
            &members(&[Some(0.0), Some(f64::NAN)]),
            AdvantageConfig::default(),
        )
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "reward of sample 1 is NaN, expected a finite number"
        );
    }
}
