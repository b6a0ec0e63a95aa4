//! From rewards to advantages.
//!
//! Each sample is compared with the others of its task, in `f64`: with their mean (Shao et al. 2024,
//! `DeepSeekMath`, section 4.1, and most others), or with the mean of the others alone.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::TrainerError;

/// What a sample's reward is compared with, and what the difference is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Estimator {
    /// `r - mean`, scaled as [`AdvantageConfig::scale`] says: GRPO, and with [`RewardScale::None`]
    /// Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, equation 3).
    #[default]
    Group,
    /// `r - mean of the others`, unscaled (RLOO, Ahmadian et al. 2024, arXiv:2402.14740).
    Rloo,
    /// `r - mean of the others`, by the standard deviation of the others (`NeMo`-RL's default).
    LeaveOneOut,
    /// `(r - mean) / mean`, for rewards that are not negative; 0 where nothing was earned (`MaxRL`,
    /// arXiv:2602.02710).
    MaxRl,
    /// `r - mean`, whitened over the tokens of the step (REINFORCE++ with baseline, Hu et al. 2025,
    /// arXiv:2501.03262).
    ReinforcePlusPlusBaseline,
}

/// What [`Estimator::Group`] divides by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardScale {
    /// The standard deviation of the group.
    #[default]
    Group,
    /// The standard deviation of all rewards of the step (Lite PPO, arXiv:2508.08221).
    Batch,
    /// Nothing.
    None,
}

/// How rewards become advantages. The defaults are TRL's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdvantageConfig {
    /// What rewards are compared with.
    pub estimator: Estimator,
    /// What [`Estimator::Group`] divides by.
    pub scale: RewardScale,
    /// Added to every standard deviation that is divided by; 1e-4 by default, as in TRL; verl has 1e-6.
    pub eps: f64,
    /// Whether standard deviations are of the sample, with one degree of freedom less; true by
    /// default, as nearly everywhere.
    pub is_sample_std: bool,
}

impl Default for AdvantageConfig {
    fn default() -> Self {
        Self {
            estimator: Estimator::Group,
            scale: RewardScale::Group,
            eps: 1e-4,
            is_sample_std: true,
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
    /// Tokens that were sampled. A sample without any tells nothing and leaves the statistics.
    pub sampled_tokens: usize,
    /// Tokens of it in the loss, which it counts by where statistics are over tokens. A sample that is
    /// masked has none and is compared nevertheless.
    pub loss_tokens: usize,
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
    let batch = Batch::new(members)?;
    let groups = batch.statistics(&batch.rewards, config);
    let all: Vec<f64> = batch.rewards.iter().copied().flatten().collect();
    let batch_std = statistics(&all, config.is_sample_std).std;
    let value = |reward: f64, group: &GroupStatistics, others: Others| {
        if group.is_flat {
            return 0.0;
        }
        let difference = reward - group.mean;
        match config.estimator {
            Estimator::Group => match config.scale {
                RewardScale::Group => difference / (group.std + config.eps),
                RewardScale::Batch => difference / (batch_std + config.eps),
                RewardScale::None => difference,
            },
            Estimator::Rloo => reward - others.mean,
            Estimator::LeaveOneOut if others.std > 0.0 => {
                (reward - others.mean) / (others.std + config.eps)
            }
            Estimator::LeaveOneOut => reward - others.mean,
            Estimator::MaxRl if group.mean > 0.0 => difference / group.mean,
            Estimator::MaxRl => 0.0,
            // Scaled below.
            Estimator::ReinforcePlusPlusBaseline => difference,
        }
    };
    let mut values = map_rewards(&batch.rewards, |sample, reward| {
        let group = batch.group_of[sample];
        let others = match config.estimator {
            Estimator::Rloo | Estimator::LeaveOneOut => batch.others(sample, config.is_sample_std),
            _ => Others::default(),
        };
        value(reward, &groups[group], others)
    });
    if config.estimator == Estimator::ReinforcePlusPlusBaseline {
        let tokens: Vec<_> = members.iter().map(|member| member.loss_tokens).collect();
        values = whitened(&values, &tokens, config);
        batch.clear(&mut values, |group| groups[group].is_flat);
    }
    Ok(Advantages { values, groups })
}

/// Returns advantages of several rewards, each normalised in its group before they are summed, so
/// that none drowns another, and scaled over the batch at last (GDPO, arXiv:2601.05242; TRL's
/// `normalize_then_sum`). `parts` has for each reward its weight and its value for each member; a
/// member's own reward counts in the groups' statistics alone.
///
/// # Errors
///
/// Fails if a reward is not finite.
pub fn decoupled_advantages<K: Ord>(
    members: &[GroupMember<K>],
    parts: &[(f64, Vec<f64>)],
    config: AdvantageConfig,
) -> Result<Advantages, TrainerError> {
    let batch = Batch::new(members)?;
    let mut sums = map_rewards(&batch.rewards, |_, _| 0.0);
    let mut is_flat = vec![true; batch.groups];
    for (weight, rewards) in parts {
        let part: Vec<Option<f64>> = (batch.rewards.iter().zip(rewards))
            .map(|(reward, part)| reward.map(|_| *part))
            .collect();
        check_finite(&part)?;
        let groups = batch.statistics(&part, config);
        for (sample, sum) in sums.iter_mut().enumerate() {
            let group = &groups[batch.group_of[sample]];
            if let (Some(sum), Some(reward)) = (sum, part[sample])
                && !group.is_flat
                && *weight != 0.0
            {
                is_flat[batch.group_of[sample]] = false;
                *sum += weight * (reward - group.mean) / (group.std + config.eps);
            }
        }
    }
    let mut values = whitened(&sums, &vec![1; members.len()], config);
    // Their mean may differ from 0 by rounding, which is no reason to learn from these.
    batch.clear(&mut values, |group| is_flat[group]);
    Ok(Advantages {
        values,
        groups: batch.statistics(&batch.rewards, config),
    })
}

/// The samples of a step, sorted into groups.
struct Batch {
    /// Rewards of the samples that count.
    rewards: Vec<Option<f64>>,
    group_of: Vec<usize>,
    groups: usize,
}

/// Rewards of a group without one sample.
#[derive(Default)]
struct Others {
    mean: f64,
    std: f64,
}

impl Batch {
    fn new<K: Ord>(members: &[GroupMember<K>]) -> Result<Self, TrainerError> {
        let mut index_of = BTreeMap::new();
        let group_of = members
            .iter()
            .map(|member| {
                let next = index_of.len();
                *index_of.entry(&member.group).or_insert(next)
            })
            .collect();
        let rewards: Vec<Option<f64>> = members.iter().map(usable).collect();
        check_finite(&rewards)?;
        Ok(Self {
            rewards,
            group_of,
            groups: index_of.len(),
        })
    }

    fn statistics(&self, rewards: &[Option<f64>], config: AdvantageConfig) -> Vec<GroupStatistics> {
        let mut groups = vec![Vec::new(); self.groups];
        for (&group, reward) in self.group_of.iter().zip(rewards) {
            groups[group].extend(*reward);
        }
        groups
            .iter()
            .map(|rewards| statistics(rewards, config.is_sample_std))
            .collect()
    }

    /// Sets the values of samples of some groups to 0.
    fn clear(&self, values: &mut [Option<f64>], is_cleared: impl Fn(usize) -> bool) {
        for (value, &group) in values.iter_mut().zip(&self.group_of) {
            if let Some(value) = value
                && is_cleared(group)
            {
                *value = 0.0;
            }
        }
    }

    /// Returns mean and standard deviation of the samples beside `sample` in its group.
    fn others(&self, sample: usize, is_sample_std: bool) -> Others {
        let rewards: Vec<f64> = (0..self.rewards.len())
            .filter(|&other| other != sample && self.group_of[other] == self.group_of[sample])
            .filter_map(|other| self.rewards[other])
            .collect();
        let GroupStatistics { mean, std, .. } = statistics(&rewards, is_sample_std);
        Others { mean, std }
    }
}

/// Returns what `value` makes of each reward and its place.
fn map_rewards(rewards: &[Option<f64>], value: impl Fn(usize, f64) -> f64) -> Vec<Option<f64>> {
    let value = |(sample, reward): (usize, &Option<f64>)| Some(value(sample, (*reward)?));
    rewards.iter().enumerate().map(value).collect()
}

/// Takes the mean of all values off and divides by their standard deviation, each value counted
/// `times` over.
fn whitened(values: &[Option<f64>], times: &[usize], config: AdvantageConfig) -> Vec<Option<f64>> {
    let counted = || {
        let pairs = values.iter().zip(times);
        pairs.filter_map(|(value, &times)| Some(((*value)?, times as f64)))
    };
    let count: f64 = counted().map(|(_, times)| times).sum();
    let mean = counted().map(|(value, times)| value * times).sum::<f64>() / count;
    let squares: f64 = counted()
        .map(|(value, times)| (value - mean).powi(2) * times)
        .sum();
    let freedom = count - f64::from(u8::from(config.is_sample_std));
    if squares == 0.0 || freedom <= 0.0 {
        return values.iter().map(|value| value.map(|_| 0.0)).collect();
    }
    let std = (squares / freedom).sqrt();
    let scaled = |value: f64| (value - mean) / (std + config.eps);
    values.iter().map(|value| value.map(scaled)).collect()
}

fn check_finite(rewards: &[Option<f64>]) -> Result<(), TrainerError> {
    let infinite = (rewards.iter().enumerate())
        .find_map(|(sample, reward)| Some((sample, reward.filter(|r| !r.is_finite())?)));
    match infinite {
        Some((sample, reward)) => Err(TrainerError::RewardNotFinite { sample, reward }),
        None => Ok(()),
    }
}

fn usable<K>(member: &GroupMember<K>) -> Option<f64> {
    member.reward.filter(|_| member.sampled_tokens > 0)
}

fn statistics(rewards: &[f64], is_sample_std: bool) -> GroupStatistics {
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
        // In two passes: the difference of mean squares cancels.
        let squares: f64 = rewards.iter().map(|reward| (reward - mean).powi(2)).sum();
        let freedom = count - usize::from(is_sample_std);
        (squares / freedom as f64).sqrt()
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
            sampled_tokens: 1,
            loss_tokens: 1,
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
        let config = AdvantageConfig {
            is_sample_std: false,
            ..config
        };
        let expected = case.floats("expected", "rllm_art_eps1e6_ddof0");
        assert_close(&values(&members, config), &expected, 1e-6);
        let config = AdvantageConfig::default();
        let std = group_advantages(&members, config).unwrap().groups[0].std;
        assert!((std - case.float("expected", "std_ddof1")).abs() < 1e-9);
        assert!((std - case.float("expected", "std_ddof0")).abs() > 1e-3);
    }

    #[test]
    fn each_estimator_is_the_published_one() {
        for (name, estimator, scale, eps) in [
            ("adv_dr_grpo", Estimator::Group, RewardScale::None, 1e-4),
            ("adv_rloo", Estimator::Rloo, RewardScale::Group, 1e-4),
            (
                "adv_nemo_loo_norm",
                Estimator::LeaveOneOut,
                RewardScale::Group,
                1e-6,
            ),
            ("adv_maxrl", Estimator::MaxRl, RewardScale::Group, 1e-4),
        ] {
            let case = golden(name);
            let rewards = case.floats("inputs", "rewards");
            let rewards: Vec<_> = rewards.into_iter().map(Some).collect();
            let config = AdvantageConfig {
                estimator,
                scale,
                eps,
                ..AdvantageConfig::default()
            };
            let expected = case.floats("expected", "advantages");
            assert_close(&values(&members(&rewards), config), &expected, 1e-6);
        }
    }

    #[test]
    fn a_group_that_earned_nothing_teaches_nothing() {
        let config = AdvantageConfig {
            estimator: Estimator::MaxRl,
            ..AdvantageConfig::default()
        };
        assert_eq!(values(&members(&[Some(0.0); 4]), config), [0.0; 4]);
        // A mean below zero has no meaning here.
        assert_eq!(values(&members(&[Some(-1.0), Some(0.0)]), config), [0.0; 2]);
    }

    #[test]
    fn the_deviation_of_the_others_does_not_cancel() {
        let case = golden("adv_nemo_loo_norm");
        let rewards = case.floats("mutants", "f32_cancellation_case_rewards");
        let rewards: Vec<_> = rewards.into_iter().map(Some).collect();
        let config = AdvantageConfig {
            estimator: Estimator::LeaveOneOut,
            eps: 1e-6,
            ..AdvantageConfig::default()
        };
        let first = values(&members(&rewards), config)[0];
        assert!((first - case.float("mutants", "unnormalised_first_sample")).abs() < 1e-9);
        let cancelled = case.float("mutants", "f32_wrong_value_first_sample");
        assert!((first - cancelled).abs() > 1e3);
    }

    #[test]
    fn a_step_can_share_one_deviation() {
        let case = golden("adv_scale_batch");
        let rewards = case.floats("inputs", "rewards");
        let members: Vec<_> = (rewards.iter().enumerate())
            .map(|(sample, &reward)| GroupMember {
                group: u8::try_from(sample / 4).unwrap(),
                reward: Some(reward),
                sampled_tokens: 1,
                loss_tokens: 1,
            })
            .collect();
        let config = AdvantageConfig {
            scale: RewardScale::Batch,
            ..AdvantageConfig::default()
        };
        let found = values(&members, config);
        assert_close(&found, &case.floats("expected", "advantages"), 1e-6);
        let mutant = case.floats("mutants", "batch_mean_and_std");
        assert!((found[0] - mutant[0]).abs() > 0.1);
    }

    #[test]
    fn reinforce_plus_plus_whitens_over_tokens() {
        // verl's `masked_whiten` over advantages that are repeated for each token.
        let rewards = [1.0, 0.0, 0.5, 0.0];
        let member = |(sample, &reward): (usize, &f64)| GroupMember {
            group: sample / 2,
            reward: Some(reward),
            sampled_tokens: 4,
            loss_tokens: [1, 3, 2, 2][sample],
        };
        let members: Vec<_> = rewards.iter().enumerate().map(member).collect();
        let config = AdvantageConfig {
            estimator: Estimator::ReinforcePlusPlusBaseline,
            ..AdvantageConfig::default()
        };
        let found = group_advantages(&members, config).unwrap().values;
        let tokens = [0.5, -0.5, -0.5, -0.5, 0.25, 0.25, -0.25, -0.25];
        let mean = tokens.iter().sum::<f64>() / 8.0;
        let squares: f64 = tokens.iter().map(|x| (x - mean) * (x - mean)).sum();
        let std = (squares / 7.0).sqrt();
        let expected = [0.5, -0.5, 0.25, -0.25].map(|x| (x - mean) / (std + 1e-4));
        let found: Vec<_> = found.into_iter().flatten().collect();
        assert_close(&found, &expected, 1e-12);

        // A masked sample is compared, but the tokens of the loss alone are whitened.
        let mut masked = members;
        masked[1].loss_tokens = 0;
        let found = group_advantages(&masked, config).unwrap().values;
        let of_loss = [(0.5, 1.0), (0.25, 2.0), (-0.25, 2.0)];
        let mean = of_loss.iter().map(|(x, n)| x * n).sum::<f64>() / 5.0;
        let squares: f64 = of_loss.iter().map(|(x, n)| n * (x - mean).powi(2)).sum();
        let std = (squares / 4.0).sqrt();
        let expected = [0.5, -0.5, 0.25, -0.25].map(|x| (x - mean) / (std + 1e-4));
        let found: Vec<_> = found.into_iter().flatten().collect();
        assert_close(&found, &expected, 1e-12);
    }

    #[test]
    fn rewards_are_summed_or_each_normalised_first() {
        let case = golden("adv_multi_reward_sum_vs_gdpo");
        let rows = case.rows("inputs", "rewards_per_func");
        let weights = case.floats("inputs", "weights");
        let sum = |row: &Vec<f64>| Some(row.iter().zip(&weights).map(|(r, w)| r * w).sum());
        let members = members(&rows.iter().map(sum).collect::<Vec<_>>());
        let found = values(&members, AdvantageConfig::default());
        assert_close(&found, &case.floats("expected", "sum_then_normalize"), 1e-6);
        let part = |index: usize| (weights[index], rows.iter().map(|row| row[index]).collect());
        let parts: Vec<_> = (0..2).map(part).collect();
        let apart = decoupled_advantages(&members, &parts, AdvantageConfig::default()).unwrap();
        let found: Vec<_> = apart.values.into_iter().flatten().collect();
        let expected = case.floats("expected", "normalize_then_sum_gdpo");
        assert_close(&found, &expected, 1e-6);
    }

    #[test]
    fn a_group_that_is_flat_in_every_part_has_advantage_exactly_zero() {
        let rewards = [0.1, 0.7, 0.2, 0.4, 0.4, 0.4];
        let member = |(sample, &reward): (usize, &f64)| GroupMember {
            group: sample / 3,
            reward: Some(reward),
            sampled_tokens: 1,
            loss_tokens: 1,
        };
        let members: Vec<_> = rewards.iter().enumerate().map(member).collect();
        let parts = [
            (0.3, rewards.to_vec()),
            (0.9, vec![0.3, 0.1, 0.1, 0.6, 0.6, 0.6]),
            // Of no weight, so it tells nothing.
            (0.0, vec![0.0, 0.0, 0.0, 1.0, 2.0, 3.0]),
        ];
        let found = decoupled_advantages(&members, &parts, AdvantageConfig::default()).unwrap();
        assert_eq!(found.values[3..], [Some(0.0); 3]);
        assert!(found.values[..3].iter().all(|value| *value != Some(0.0)));
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
        // The known bug: a mean that is summed in f32 lies beside the rewards.
        let mean = case.float("mutants", "f32_seven_times_0_7_sequential_sum_mean");
        assert!((mean - 0.7).abs() > 1e-8 && advantages.groups[0].mean != mean);
        for mutant in ["adv_if_eps_1e_4", "adv_if_eps_1e_6", "adv_if_eps_1e_9"] {
            assert_ne!(advantages.values[0], Some(case.float("mutants", mutant)));
        }
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
            .map(|(reward, tokens)| GroupMember {
                group: 0,
                reward: Some(reward),
                sampled_tokens: tokens,
                loss_tokens: tokens,
            })
            .collect();
        let config = AdvantageConfig {
            scale: RewardScale::None,
            ..AdvantageConfig::default()
        };
        let found = values(&members, config);
        assert_close(&found, &case.floats("expected", "advantages"), 1e-9);
        let mutant = case.floats("mutants", "included");
        assert!((found[1] - mutant[1]).abs() > 1.0);
    }

    #[test]
    fn groups_are_told_apart_by_their_key() {
        let case = golden("adv_group_by_id_not_by_position");
        // The file's rewards give its mutant `sliding_window` the same numbers; these do not.
        let rewards = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0];
        let ids = case.value("inputs", "prompt_ids").as_array().unwrap();
        let members: Vec<_> = rewards
            .iter()
            .zip(ids)
            .map(|(&reward, id)| GroupMember {
                group: id.as_str().unwrap(),
                reward: Some(reward),
                sampled_tokens: 1,
                loss_tokens: 1,
            })
            .collect();
        let config = AdvantageConfig {
            scale: RewardScale::None,
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
