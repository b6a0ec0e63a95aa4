//! One GRPO step: rewards to advantages, episodes to gradients, gradients to weights.

use serde::{Deserialize, Serialize};

use super::TrainerError;
use super::advantage::{AdvantageConfig, Advantages, GroupMember, group_advantages};
use super::batch::{MicroBatch, TrainSequence, pack};
use super::gradient::{PassConfig, accumulate_policy_gradient, score_micro_batch};
use super::loss::{LossConfig, LossMetrics};
use super::optim::{AdamW, LrSchedule, UpdateStatistics};
use crate::engine::model::{Adapters, Decoder};
use crate::rollout::RolloutGroup;
use crate::trajectory::Trajectory;

/// How groups of episodes update the policy.
#[derive(Debug, Clone, PartialEq)]
pub struct GrpoConfig {
    /// How rewards become advantages.
    pub advantage: AdvantageConfig,
    /// The loss of a token and the mean over a step.
    pub loss: LossConfig,
    /// How a micro-batch goes through the model; its temperature is the sampler's.
    pub pass: PassConfig,
    /// Tokens of one forward and backward pass.
    pub micro_batch_tokens: usize,
    /// Passes over the episodes of a step; 1 is on-policy.
    pub iterations: usize,
    /// Whether episodes that a limit cut off leave the loss.
    pub mask_truncated: bool,
}

/// What one step did; the names in a log are TRL's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The loss of the first pass.
    pub loss: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Step size.
    pub learning_rate: f64,
    /// Mean over the groups of their mean reward.
    pub reward: f64,
    /// Mean over the groups of their standard deviation.
    pub reward_std: f64,
    /// Share of groups whose rewards are all alike: they teach nothing.
    pub frac_reward_zero_std: f64,
    /// Mean entropy of the sampled tokens' distributions, in nats, over the tokens that learn.
    pub entropy: f64,
    /// Mean k3 divergence from the reference, where there is one.
    pub kl: f64,
    /// Share of tokens whose ratio was clipped from below.
    #[serde(rename = "clip_ratio/low_mean")]
    pub clip_low: f64,
    /// Share of tokens whose ratio was clipped from above.
    #[serde(rename = "clip_ratio/high_mean")]
    pub clip_high: f64,
    /// Share of tokens whose ratio was clipped.
    #[serde(rename = "clip_ratio/region_mean")]
    pub clip_region: f64,
    /// Mean of `|logp(trainer) - logp(sampler)|`: 0 where both compute alike.
    #[serde(rename = "sampling/sampling_logp_difference/mean")]
    pub logprob_difference_mean: f64,
    /// Largest such difference.
    #[serde(rename = "sampling/sampling_logp_difference/max")]
    pub logprob_difference_max: f64,
    /// Mean probability ratio of trainer to sampler.
    #[serde(rename = "sampling/importance_sampling_ratio/mean")]
    pub ratio_mean: f64,
}

/// The owner of the optimizer: updates a policy from groups of episodes.
#[derive(Debug)]
pub struct GrpoTrainer {
    config: GrpoConfig,
    schedule: LrSchedule,
    optimizer: AdamW,
    step: usize,
}

impl GrpoTrainer {
    /// Returns a trainer before its first step.
    pub fn new(config: GrpoConfig, schedule: LrSchedule, optimizer: AdamW) -> Self {
        Self {
            config,
            schedule,
            optimizer,
            step: 0,
        }
    }

    /// Returns the optimizer, for a checkpoint.
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// Updates `decoder` in place from the groups of one step.
    ///
    /// Episodes without a reward leave the statistics and the loss. Episodes with advantage 0 have
    /// gradient 0 and are not run, but count in the loss's denominator.
    ///
    /// # Errors
    ///
    /// Fails where the model refuses a sequence or the gradient is not finite; that pass then leaves
    /// the weights as they were.
    pub fn step(
        &mut self,
        decoder: &Decoder,
        groups: &[RolloutGroup],
    ) -> Result<StepMetrics, TrainerError> {
        let episodes: Vec<(usize, &Trajectory)> = groups
            .iter()
            .enumerate()
            .flat_map(|(group, rollout)| rollout.trajectories.iter().map(move |t| (group, t)))
            .collect();
        let members: Vec<GroupMember<usize>> = episodes
            .iter()
            .map(|(group, trajectory)| GroupMember {
                group: *group,
                reward: trajectory.reward,
                trainable_tokens: trajectory.trace.sampled_len(),
            })
            .collect();
        let advantages = group_advantages(&members, self.config.advantage)?;
        let sequences = self.sequences(&episodes, &advantages);
        let micro_batches = self.micro_batches(decoder, sequences)?;
        let learning_rate = self.schedule.rate(self.step);
        let mut first = None;
        for _ in 0..self.config.iterations {
            let (metrics, update) = self.pass(decoder, &micro_batches, learning_rate)?;
            first.get_or_insert((metrics, update));
        }
        self.step += 1;
        let (loss, update) = first.ok_or_else(|| TrainerError::InvalidConfig {
            field: "num_iterations",
            reason: "0 passes teach nothing".to_owned(),
        })?;
        Ok(step_metrics(&advantages, &loss, update, learning_rate))
    }

    /// Returns the sequences of the loss; masked ones keep their place with an empty mask.
    fn sequences(
        &self,
        episodes: &[(usize, &Trajectory)],
        advantages: &Advantages,
    ) -> Vec<TrainSequence> {
        episodes
            .iter()
            .zip(&advantages.values)
            .filter_map(|((_, trajectory), advantage)| {
                let advantage = (*advantage)?;
                let is_masked = self.config.mask_truncated && trajectory.is_truncated();
                let trace = &trajectory.trace;
                Some(TrainSequence {
                    tokens: trace.ids().to_vec(),
                    loss_mask: trace
                        .loss_mask()
                        .iter()
                        .map(|m| *m == 1 && !is_masked)
                        .collect(),
                    logprobs: trace.logprobs().iter().copied().map(f64::from).collect(),
                    reference: None,
                    advantage,
                })
            })
            .collect()
    }

    /// Packs the sequences that learn. Their reference does not change from pass to pass, so it is
    /// scored here.
    fn micro_batches(
        &self,
        decoder: &Decoder,
        mut sequences: Vec<TrainSequence>,
    ) -> Result<Vec<MicroBatch>, TrainerError> {
        let config = &self.config;
        let totals = config
            .loss
            .totals(sequences.iter().map(TrainSequence::trainable_tokens));
        let has_divergence = config.loss.kl_coef > 0.0;
        // Without a divergence term, an advantage of 0 is a gradient of 0.
        sequences.retain(|sequence| sequence.advantage != 0.0 || has_divergence);
        let mut micro_batches = pack(&sequences, config.micro_batch_tokens, &config.loss, totals)?;
        if has_divergence {
            for micro in &mut micro_batches {
                // The reference is the same model with its adapter off.
                let temperature = config.pass.temperature;
                micro.reference =
                    score_micro_batch(decoder, micro, Adapters::Off, temperature)?.logprobs;
            }
        }
        Ok(micro_batches)
    }

    /// One pass over the micro-batches and one update.
    fn pass(
        &mut self,
        decoder: &Decoder,
        micro_batches: &[MicroBatch],
        learning_rate: f64,
    ) -> Result<(LossMetrics, UpdateStatistics), TrainerError> {
        let config = &self.config;
        let mut gradients = decoder.zero_gradients();
        let mut metrics = LossMetrics::default();
        for micro in micro_batches {
            metrics.merge(&accumulate_policy_gradient(
                decoder,
                micro,
                &config.loss,
                config.pass,
                &mut gradients,
            )?);
        }
        let update = self.optimizer.step(decoder, &gradients, learning_rate)?;
        Ok((metrics, update))
    }
}

fn step_metrics(
    advantages: &Advantages,
    loss: &LossMetrics,
    update: UpdateStatistics,
    learning_rate: f64,
) -> StepMetrics {
    let scored: Vec<_> = advantages
        .groups
        .iter()
        .filter(|group| group.count > 0)
        .collect();
    let mean = |value: &dyn Fn(usize) -> f64| match scored.len() {
        0 => 0.0,
        count => (0..count).map(value).sum::<f64>() / count as f64,
    };
    let (difference_mean, difference_max) = loss.logprob_difference();
    StepMetrics {
        loss: loss.loss,
        grad_norm: update.grad_norm,
        learning_rate,
        reward: mean(&|index| scored[index].mean),
        reward_std: mean(&|index| scored[index].std),
        frac_reward_zero_std: advantages.frac_reward_zero_std(),
        entropy: loss.entropy(),
        kl: loss.kl(),
        clip_low: loss.clip_ratio_low(),
        clip_high: loss.clip_ratio_high(),
        clip_region: loss.clip_ratio(),
        logprob_difference_mean: difference_mean,
        logprob_difference_max: difference_max,
        ratio_mean: loss.ratio(),
    }
}

/// Shuffles the rewards within each group, seeded: a control under which a policy must not learn.
///
/// The rewards keep their distribution and lose their meaning, so whatever improves under them is
/// not learned from them.
pub fn shuffle_rewards(groups: &mut [RolloutGroup], seed: u64) {
    use rand::SeedableRng as _;
    use rand::seq::SliceRandom as _;
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    for group in groups {
        let mut rewards: Vec<f64> = group.rewards().into_iter().flatten().collect();
        rewards.shuffle(&mut random);
        // An episode that could not be scored stays without a reward.
        let scored = group
            .trajectories
            .iter_mut()
            .filter(|episode| episode.reward.is_some());
        for (trajectory, reward) in scored.zip(rewards) {
            trajectory.reward = Some(reward);
        }
    }
}
