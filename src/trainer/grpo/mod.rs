//! One GRPO step: rewards to advantages, episodes to gradients, gradients to weights.

mod before;
mod parts;

use std::collections::HashMap;
use std::sync::Arc;

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use self::before::BeforeStep;
use self::parts::{Parts, divide};
use super::TrainerError;
use super::advantage::{
    AdvantageConfig, Advantages, GroupMember, decoupled_advantages, group_advantages,
};
use super::batch::{MicroBatch, TrainSequence, pack};
use super::budget::MicroBatches;
use super::credit::{Discount, TokenCredit, discounted_returns, generalized_advantages, whiten};
use super::gradient::{
    PassConfig, accumulate_actor_critic_gradient, score_dropping, score_micro_batch,
};
use super::loss::{LossConfig, LossMetrics, Surrogate};
use super::memory::{MemoryChange, MemoryGuard, MemoryLog, Watch};
use super::optim::{AdamW, LrSchedule, UpdateStatistics};
use super::shaping::OverlongPenalty;
use super::value::ValueHead;
use crate::collective::Collective;
use crate::engine::model::{Adapters, Decoder, Gradients};
use crate::rollout::RolloutGroup;
use crate::trajectory::Trajectory;

/// How groups of episodes update the policy.
#[derive(Debug, Clone, PartialEq)]
pub struct GrpoConfig {
    /// How rewards become advantages.
    pub advantage: AdvantageConfig,
    /// Weights of the parts of the reward by name, if each is to be normalised by itself (GDPO)
    /// instead of their sum.
    pub decoupled: Option<Vec<(String, f64)>>,
    /// How tokens are credited one by one, rather than by a comparison with their group.
    pub token_level: Option<TokenLevel>,
    /// What long answers lose.
    pub overlong: Option<OverlongPenalty>,
    /// What the reward loses for each nat by which an answer's tokens diverge from the reference, by
    /// the k1 estimate; 0 for nothing. It stands beside the loss's own term.
    pub reward_kl_coef: f64,
    /// The loss of a token and the mean over a step.
    pub loss: LossConfig,
    /// How a micro-batch goes through the model; its temperature is the sampler's, its seed the run's.
    pub pass: PassConfig,
    /// Tokens of one forward and backward pass.
    pub micro_batch_tokens: usize,
    /// Passes over the episodes of a step; 1 is on-policy.
    pub iterations: usize,
    /// Whether the ratio compares with what the trainer computes before the step, rather than with
    /// what was sampled. Corrections of the sampler need it.
    pub recompute_old: bool,
    /// The largest mean of `sampled - logp` in a first pass that is taken for the arithmetic's; above
    /// it the step is refused.
    pub max_kl_sample_train: f64,
    /// The largest ratio of a token's probability to that before the step; above it a pass, and the step
    /// with it, is refused.
    pub max_ratio: f64,
    /// Whether episodes that a limit cut off leave the loss.
    pub mask_truncated: bool,
    /// Parts that a step is learned from in, each by itself: the most processes that can share it. The
    /// numbers do not depend on how many do.
    pub parts: usize,
}

/// How tokens are credited one by one. What the reward loses by diverging from the reference it then
/// loses token by token, and advantages are whitened over the tokens of the step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TokenLevel {
    /// By generalised advantage estimates over a value head's values: PPO.
    Gae(Discount),
    /// By discounted returns: REINFORCE++ (Hu et al. 2025, arXiv:2501.03262).
    Returns {
        /// Factor of what the next token earns.
        gamma: f64,
    },
}

/// What a step did to the value head; the names in a log are verl's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct ValueMetrics {
    /// The value loss of the first pass.
    #[serde(rename = "critic/vf_loss")]
    pub loss: f64,
    /// Share of values whose bound held.
    #[serde(rename = "critic/vf_clipfrac")]
    pub clipped: f64,
    /// Share of the returns' variance that the values before the step explain: 1 for perfect values, 0
    /// for any constant, below 0 for worse.
    #[serde(rename = "critic/vf_explained_var")]
    pub explained_variance: f64,
    /// Mean value before the step.
    #[serde(rename = "critic/values/mean")]
    pub mean: f64,
    /// Mean return.
    #[serde(rename = "critic/returns/mean")]
    pub returns: f64,
    /// Norm of the value head's gradient before clipping.
    #[serde(rename = "critic/grad_norm")]
    pub grad_norm: f64,
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
    /// Share of tokens that a correction left out.
    #[serde(rename = "sampling/left_out")]
    pub left_out: f64,
    /// Mean of `logp(sampler) - logp(trainer)`, the k1 estimate of the divergence between them: 0
    /// where both compute alike.
    pub kl_sample_train: f64,
    /// Mean of `|logp(trainer) - logp(sampler)|`.
    #[serde(rename = "sampling/sampling_logp_difference/mean")]
    pub logprob_difference_mean: f64,
    /// Largest such difference.
    #[serde(rename = "sampling/sampling_logp_difference/max")]
    pub logprob_difference_max: f64,
    /// Mean weight of the tokens for the mismatch with the sampler; 1 without a correction.
    #[serde(rename = "sampling/importance_sampling_ratio/mean")]
    pub correction_mean: f64,
    /// Mean ratio of the policy to the one before the step; 1 where a pass is the first.
    #[serde(rename = "ratio/mean")]
    pub ratio_mean: f64,
    /// Largest ratio of a token's probability to that before the step, over all passes.
    #[serde(rename = "ratio/max")]
    pub ratio_max: f64,
    /// What it did to the value head, where there is one.
    #[serde(flatten)]
    pub value: Option<ValueMetrics>,
}

/// The owner of the optimizer: updates a policy from groups of episodes.
#[derive(Debug)]
pub struct GrpoTrainer {
    config: GrpoConfig,
    schedule: LrSchedule,
    optimizer: AdamW,
    critic: Option<ValueHead>,
    guard: Option<Arc<MemoryGuard>>,
    memory: MemoryLog,
    step: usize,
}

impl GrpoTrainer {
    /// Returns a trainer before its first step.
    pub fn new(config: GrpoConfig, schedule: LrSchedule, optimizer: AdamW) -> Self {
        Self {
            config,
            schedule,
            optimizer,
            critic: None,
            guard: None,
            memory: MemoryLog::default(),
            step: 0,
        }
    }

    /// Learns values, too, with `critic`; [`TokenLevel::Gae`] needs it.
    #[must_use]
    pub fn with_critic(self, critic: Option<ValueHead>) -> Self {
        Self { critic, ..self }
    }

    /// Keeps its passes within the memory that `guard` lets them have, by smaller micro-batches.
    #[must_use]
    pub fn with_memory_guard(self, guard: Option<MemoryGuard>) -> Self {
        Self {
            guard: guard.map(Arc::new),
            ..self
        }
    }

    /// Returns how micro-batches go through the model, as chosen or as measuring made them.
    pub fn micro_batches(&self) -> MicroBatches {
        MicroBatches {
            micro_batch_tokens: self.config.micro_batch_tokens,
            recompute: self.config.pass.recompute,
        }
    }

    /// Lets micro-batches go through the model so from the next step on.
    pub fn set_micro_batches(&mut self, chosen: MicroBatches) {
        self.config.micro_batch_tokens = chosen.micro_batch_tokens;
        self.config.pass.recompute = chosen.recompute;
    }

    /// Returns what was done about the memory of passes since the last call.
    pub fn take_memory_changes(&mut self) -> Vec<MemoryChange> {
        self.memory.take()
    }

    /// Returns the most memory that was held in a pass of the last step, in bytes, where it is measured.
    pub fn peak_memory(&self) -> Option<u64> {
        self.memory.peak
    }

    /// Returns the value head, for a checkpoint.
    pub fn critic(&self) -> Option<&ValueHead> {
        self.critic.as_ref()
    }

    /// Goes on after `step` steps of a run whose optimizer this one is.
    #[must_use]
    pub fn resume_after(self, step: usize) -> Self {
        Self { step, ..self }
    }

    /// Returns its settings.
    pub fn config(&self) -> &GrpoConfig {
        &self.config
    }

    /// Returns how its step size moves.
    pub fn schedule(&self) -> &LrSchedule {
        &self.schedule
    }

    /// Returns the optimizer, for a checkpoint.
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// Updates `decoder` in place from the groups of one step, together with the processes that have the
    /// same weights and are given the same groups: [`GrpoTrainer::gradient`] and [`GrpoTrainer::apply`].
    ///
    /// # Errors
    ///
    /// As for both; weights and moments are then as before the step.
    pub fn step(
        &mut self,
        decoder: &Decoder,
        groups: &[RolloutGroup],
        ranks: &dyn Collective,
    ) -> Result<StepMetrics, TrainerError> {
        let pending = self.gradient(decoder, groups, ranks)?;
        self.apply(decoder, pending, groups, ranks)
    }

    /// Computes the gradient of the first pass over the groups of one step. Weights are only read, so that
    /// others may sample with them meanwhile.
    ///
    /// Episodes without a reward leave the statistics and the loss. Episodes with advantage 0 have
    /// gradient 0 and are not run, but count in the loss's denominator.
    ///
    /// # Errors
    ///
    /// Fails where the model refuses a sequence, where probabilities are further than is accepted from
    /// those sampled with or before the step, and where another process is lost.
    pub fn gradient(
        &mut self,
        decoder: &Decoder,
        groups: &[RolloutGroup],
        ranks: &dyn Collective,
    ) -> Result<PendingStep, TrainerError> {
        if self.config.iterations == 0 {
            return Err(TrainerError::InvalidConfig {
                field: "num_iterations",
                reason: "0 passes teach nothing".to_owned(),
            });
        }
        let guard = self.guard.clone();
        let mut memory = std::mem::take(&mut self.memory);
        let mut chosen = self.micro_batches();
        let is_gpu = !decoder.is_fused();
        let pending = memory.keep_within(guard.as_deref(), &mut chosen, is_gpu, |chosen, watch| {
            self.set_micro_batches(chosen);
            self.try_gradient(decoder, groups, self.parts(ranks, watch))
        });
        self.memory = memory;
        pending
    }

    /// Does what [`GrpoTrainer::gradient`] does, with micro-batches as they are set.
    fn try_gradient(
        &mut self,
        decoder: &Decoder,
        groups: &[RolloutGroup],
        parts: Parts<'_>,
    ) -> Result<PendingStep, TrainerError> {
        let episodes: Vec<(usize, &Trajectory)> = groups
            .iter()
            .enumerate()
            .flat_map(|(group, rollout)| rollout.trajectories.iter().map(move |t| (group, t)))
            .collect();
        let mut sequences = sequences(&episodes);
        let group_of: Vec<usize> = episodes.iter().map(|(group, _)| *group).collect();
        if self.needs_reference() {
            self.score_references(decoder, &mut sequences, &group_of, parts)?;
        }
        let advantages = self.advantages(&episodes, &sequences)?;
        // Not before: what an answer diverges by counts in its reward, in the loss or not.
        for (sequence, (_, trajectory)) in sequences.iter_mut().zip(&episodes) {
            if self.is_masked(trajectory) {
                sequence.loss_mask.fill(false);
            }
        }
        let values = self.credit(decoder, &episodes, &mut sequences, &group_of, parts)?;
        let sequences = (sequences.into_iter().zip(group_of))
            .zip(&advantages.values)
            .filter_map(|((sequence, group), advantage)| {
                let advantage = (*advantage)?;
                let sequence = TrainSequence {
                    advantage,
                    ..sequence
                };
                Some((sequence, group))
            })
            .collect();
        let batches = self.batches(decoder, sequences, parts)?;
        match self.pass(decoder, &batches, parts, true) {
            Ok(first) => Ok(PendingStep {
                advantages,
                values,
                batches,
                first,
            }),
            Err(error) => {
                if let Some(critic) = &mut self.critic {
                    critic.clear();
                }
                Err(error)
            }
        }
    }

    /// Updates `decoder` in place with a step's gradient, and with those of the further passes that the
    /// step makes over its groups.
    ///
    /// # Errors
    ///
    /// Fails where a gradient is not finite, where a further pass is refused or another process is lost;
    /// weights and moments are then as before the step.
    pub fn apply(
        &mut self,
        decoder: &Decoder,
        mut pending: PendingStep,
        groups: &[RolloutGroup],
        ranks: &dyn Collective,
    ) -> Result<StepMetrics, TrainerError> {
        let guard = self.guard.clone();
        let is_gpu = !decoder.is_fused();
        loop {
            let mut chosen = self.micro_batches();
            let watch = Watch::new(guard.as_deref(), chosen.recompute || is_gpu);
            let overshoot = match self.try_apply(decoder, pending, self.parts(ranks, &watch)) {
                Err(TrainerError::Memory { overshoot }) => overshoot,
                applied => {
                    self.memory.settle(&watch);
                    return applied;
                }
            };
            // All of the step is done again, the first pass, too.
            self.memory.shrink(&watch, &mut chosen, overshoot)?;
            self.set_micro_batches(chosen);
            pending = self.gradient(decoder, groups, ranks)?;
        }
    }

    /// Does what [`GrpoTrainer::apply`] does, with micro-batches as they are set.
    fn try_apply(
        &mut self,
        decoder: &Decoder,
        pending: PendingStep,
        parts: Parts<'_>,
    ) -> Result<StepMetrics, TrainerError> {
        // A single pass that is refused has changed nothing.
        let before = (self.config.iterations > 1)
            .then(|| BeforeStep::remember(decoder, &self.optimizer, self.critic.as_ref()))
            .transpose()?;
        match self.passes(decoder, pending, parts) {
            Ok(metrics) => {
                self.step += 1;
                Ok(metrics)
            }
            Err(error) => {
                if let Some(before) = before {
                    (self.optimizer, self.critic) = before.restore(decoder)?;
                }
                if let Some(critic) = &mut self.critic {
                    critic.clear();
                }
                Err(error)
            }
        }
    }

    fn parts<'a>(&self, ranks: &'a dyn Collective, watch: &'a Watch<'a>) -> Parts<'a> {
        Parts {
            ranks,
            count: self.config.parts,
            watch,
        }
    }

    /// Makes all passes of a step, the first of which has its gradient.
    fn passes(
        &mut self,
        decoder: &Decoder,
        pending: PendingStep,
        parts: Parts<'_>,
    ) -> Result<StepMetrics, TrainerError> {
        let PendingStep {
            advantages,
            mut values,
            batches,
            first,
        } = pending;
        let learning_rate = self.schedule.rate(self.step);
        let metrics = first.metrics;
        let (update, value) = self.update(decoder, first, learning_rate)?;
        if let (Some(values), Some(value)) = (&mut values, value) {
            (values.loss, values.clipped) = (value.loss, value.clipped);
            values.grad_norm = value.grad_norm;
        }
        let mut ratio_max = metrics.ratio_range().1;
        for _ in 1..self.config.iterations {
            let pass = self.pass(decoder, &batches, parts, false)?;
            ratio_max = ratio_max.max(pass.metrics.ratio_range().1);
            self.update(decoder, pass, learning_rate)?;
        }
        Ok(StepMetrics {
            ratio_max,
            value: values,
            ..step_metrics(&advantages, &metrics, update, learning_rate)
        })
    }

    /// Counts a step from whose groups nothing is learned.
    ///
    /// # Errors
    ///
    /// Fails if a reward is not finite.
    pub fn skip(&mut self, groups: &[RolloutGroup]) -> Result<StepMetrics, TrainerError> {
        let episodes: Vec<(usize, &Trajectory)> = (groups.iter().enumerate())
            .flat_map(|(group, rollout)| rollout.trajectories.iter().map(move |t| (group, t)))
            .collect();
        let advantages = self.advantages(&episodes, &sequences(&episodes))?;
        if let Some(critic) = &mut self.critic {
            critic.clear();
        }
        self.memory.peak = None;
        let learning_rate = self.schedule.rate(self.step);
        self.step += 1;
        let update = UpdateStatistics {
            grad_norm: 0.0,
            clip_factor: 1.0,
        };
        let loss = LossMetrics::default();
        Ok(step_metrics(&advantages, &loss, update, learning_rate))
    }

    fn needs_reference(&self) -> bool {
        self.config.loss.kl_coef > 0.0 || self.config.reward_kl_coef > 0.0
    }

    /// Returns whether an episode stays out of the loss, though it is in its group's statistics.
    fn is_masked(&self, trajectory: &Trajectory) -> bool {
        self.config.mask_truncated && trajectory.is_truncated()
    }

    /// Scores the sequences under the reference, which is the same model with its adapter off. It
    /// does not change from pass to pass.
    fn score_references(
        &self,
        decoder: &Decoder,
        sequences: &mut [TrainSequence],
        group_of: &[usize],
        parts: Parts<'_>,
    ) -> Result<(), TrainerError> {
        let config = &self.config;
        let temperature = config.pass.temperature;
        let logprobs = parts.score(
            "scoring the reference",
            (sequences, group_of),
            (config.micro_batch_tokens, &config.loss),
            |micro| Ok(score_micro_batch(decoder, micro, Adapters::Off, temperature)?.logprobs),
        )?;
        for (sequence, logprobs) in sequences.iter_mut().zip(logprobs) {
            if !logprobs.is_empty() {
                sequence.reference = Some(spread(&logprobs, &sequence.loss_mask));
            }
        }
        Ok(())
    }

    /// Credits the tokens of each sequence one by one, if they are not to be compared with their group,
    /// and returns what is to be reported of their values.
    fn credit(
        &self,
        decoder: &Decoder,
        episodes: &[(usize, &Trajectory)],
        sequences: &mut [TrainSequence],
        group_of: &[usize],
        parts: Parts<'_>,
    ) -> Result<Option<ValueMetrics>, TrainerError> {
        let Some(level) = self.config.token_level else {
            return Ok(None);
        };
        if let TokenLevel::Gae(_) = level {
            self.score_values(decoder, sequences, group_of, parts)?;
        }
        // An episode is as long as its rows together.
        let mut lengths: HashMap<(usize, u32), usize> = HashMap::new();
        for (group, row) in episodes {
            *lengths.entry((*group, row.sample)).or_default() += row.trace.sampled_len();
        }
        for ((group, trajectory), sequence) in episodes.iter().zip(sequences.iter_mut()) {
            let mask = &sequence.loss_mask;
            let (Some(reward), Some(last)) =
                (trajectory.reward, mask.iter().rposition(|&in_loss| in_loss))
            else {
                sequence.credit = None;
                continue;
            };
            let mut rewards = vec![0.0; mask.len()];
            if let Some(reference) = &sequence.reference {
                let pairs = sequence.logprobs.iter().zip(reference);
                for ((token, (logprob, reference)), _) in
                    pairs.enumerate().zip(mask).filter(|(_, in_loss)| **in_loss)
                {
                    rewards[token] = -self.config.reward_kl_coef * (logprob - reference);
                }
            }
            let overlong = (self.config.overlong).map_or(0.0, |penalty| {
                penalty.of(lengths[&(*group, trajectory.sample)])
            });
            rewards[last] += reward + overlong;
            sequence.credit = Some(match level {
                TokenLevel::Gae(discount) => {
                    let values = sequence.credit.take().unwrap_or_default().values;
                    generalized_advantages(&rewards, &values, mask, discount)
                }
                TokenLevel::Returns { gamma } => TokenCredit {
                    advantages: discounted_returns(&rewards, mask, gamma),
                    ..TokenCredit::default()
                },
            });
        }
        let credited = || {
            let credited = |sequence: &TrainSequence| sequence.credit.is_some();
            sequences.iter().filter(move |sequence| credited(sequence))
        };
        let metrics = matches!(level, TokenLevel::Gae(_)).then(|| value_metrics(credited()));
        let mut advantages: Vec<(&mut [f64], &[bool])> = Vec::new();
        for sequence in sequences.iter_mut() {
            if let Some(credit) = &mut sequence.credit {
                advantages.push((&mut credit.advantages, &sequence.loss_mask));
            }
        }
        whiten(&mut advantages, self.config.advantage.eps);
        Ok(metrics)
    }

    /// Asks the value head for the values of the sequences' tokens.
    fn score_values(
        &self,
        decoder: &Decoder,
        sequences: &mut [TrainSequence],
        group_of: &[usize],
        parts: Parts<'_>,
    ) -> Result<(), TrainerError> {
        let config = &self.config;
        let Some(critic) = &self.critic else {
            return Err(TrainerError::InvalidConfig {
                field: "advantage",
                reason: "values need a value head".to_owned(),
            });
        };
        let values = parts.score(
            "scoring values",
            (sequences, group_of),
            (config.micro_batch_tokens, &config.loss),
            |micro| critic.values(&decoder.hidden(&micro.batch, Adapters::On)?, micro),
        )?;
        for (sequence, values) in sequences.iter_mut().zip(values) {
            if !values.is_empty() {
                sequence.credit = Some(TokenCredit {
                    values: spread(&values, &sequence.loss_mask),
                    ..TokenCredit::default()
                });
            }
        }
        Ok(())
    }

    /// Compares each episode's reward, after what is taken off it, with its group's, and returns the
    /// advantage of each of its rows.
    fn advantages(
        &self,
        episodes: &[(usize, &Trajectory)],
        sequences: &[TrainSequence],
    ) -> Result<Advantages, TrainerError> {
        let config = &self.config;
        // An episode may be several rows, as where an agent's history does not only grow; each has its
        // reward, which counts once.
        let mut rows_of: IndexMap<(usize, u32), Vec<usize>> = IndexMap::new();
        for (row, (group, trajectory)) in episodes.iter().enumerate() {
            let rows = rows_of.entry((*group, trajectory.sample)).or_default();
            rows.push(row);
        }
        let sampled_tokens = |rows: &Vec<usize>| -> usize {
            let sampled = rows.iter().map(|row| episodes[*row].1.trace.sampled_len());
            sampled.sum()
        };
        // What is taken off the reward: a weight, and a value for each episode.
        let mut penalties: Vec<(f64, Vec<f64>)> = Vec::new();
        if let Some(overlong) = config.overlong {
            let values = rows_of
                .values()
                .map(|rows| overlong.unweighted(sampled_tokens(rows)));
            penalties.push((overlong.weight, values.collect()));
        }
        if config.reward_kl_coef != 0.0 {
            let divergence = |rows: &Vec<usize>| -> f64 {
                let divergences = rows.iter().map(|row| sequences[*row].divergence());
                -divergences.sum::<f64>()
            };
            penalties.push((
                config.reward_kl_coef,
                rows_of.values().map(divergence).collect(),
            ));
        }
        let taken_off = |index: usize| -> f64 {
            let penalties = penalties.iter();
            penalties
                .map(|(weight, values)| weight * values[index])
                .sum()
        };
        let members: Vec<GroupMember<usize>> = (rows_of.iter().enumerate())
            .map(|(index, ((group, _), rows))| {
                let in_loss = rows.iter().filter(|row| !self.is_masked(episodes[**row].1));
                GroupMember {
                    group: *group,
                    reward: (episodes[rows[0]].1.reward).map(|reward| reward + taken_off(index)),
                    sampled_tokens: sampled_tokens(rows),
                    loss_tokens: in_loss
                        .map(|row| episodes[*row].1.trace.sampled_len())
                        .sum(),
                }
            })
            .collect();
        let mut advantages = match &config.decoupled {
            None => group_advantages(&members, config.advantage)?,
            Some(weights) => {
                let value = |rows: &Vec<usize>, name: &str| {
                    let rewards = &episodes[rows[0]].1.rewards;
                    rewards.get(name).copied().unwrap_or(0.0)
                };
                let part = |(name, weight): &(String, f64)| {
                    let values = rows_of.values().map(|rows| value(rows, name));
                    (*weight, values.collect())
                };
                // Each penalty is a part of its own: in one sum, the larger would drown the other.
                let parts: Vec<(f64, Vec<f64>)> =
                    weights.iter().map(part).chain(penalties).collect();
                decoupled_advantages(&members, &parts, config.advantage)?
            }
        };
        let mut values = vec![None; episodes.len()];
        for (rows, advantage) in rows_of.values().zip(&advantages.values) {
            for row in rows {
                values[*row] = *advantage;
            }
        }
        advantages.values = values;
        Ok(advantages)
    }

    /// Packs this process's share of the sequences that learn, given with their groups, and scores them
    /// if the ratio is to compare with what the trainer computes.
    fn batches(
        &self,
        decoder: &Decoder,
        mut sequences: Vec<(TrainSequence, usize)>,
        parts: Parts<'_>,
    ) -> Result<Batches, TrainerError> {
        let config = &self.config;
        let tokens = sequences
            .iter()
            .map(|(sequence, _)| sequence.trainable_tokens());
        let totals = config.loss.totals(tokens);
        // Without a term of its own besides the policy's, an advantage of 0 is a gradient of 0.
        let has_other_terms = config.loss.kl_coef > 0.0
            || config.loss.entropy_coef != 0.0
            || matches!(config.loss.surrogate, Surrogate::Dppo { kl, .. } if kl > 0.0);
        sequences.retain(|(sequence, _)| {
            sequence.credit.is_some() || sequence.advantage != 0.0 || has_other_terms
        });
        let (mut sequences, groups): (Vec<_>, Vec<_>) = sequences.into_iter().unzip();
        if config.loss.kl_coef == 0.0 {
            for sequence in &mut sequences {
                sequence.reference = None;
            }
        }
        let stretches = divide(&sequences, &groups, parts.count);
        let pass = config.pass.of_step(self.step);
        let drops = pass.drops(decoder);
        let own_batches = || {
            let mut own = Vec::new();
            for part in parts.own() {
                let sequences = &sequences[stretches[part].clone()];
                let budget = config.micro_batch_tokens;
                let mut micro_batches = pack(sequences, budget, &config.loss, totals)?;
                for micro in &mut micro_batches {
                    if config.recompute_old || drops {
                        let (on, temperature) = (Adapters::On, pass.temperature);
                        let score = || score_micro_batch(decoder, micro, on, temperature);
                        micro.old = parts.watch.pass(micro, score)?.logprobs;
                    }
                    if drops {
                        // Ratios are those of one mask; whether the sampler computes alike is seen without.
                        micro.undropped = std::mem::take(&mut micro.old);
                    }
                    if drops && config.iterations > 1 {
                        let score = || score_dropping(decoder, micro, pass);
                        micro.old = parts.watch.pass(micro, score)?.logprobs;
                    }
                }
                own.push(micro_batches);
            }
            Ok(own)
        };
        Ok(Batches {
            own: parts.watch.agree(parts.ranks, own_batches())?,
            targets: sequences.iter().map(TrainSequence::trainable_tokens).sum(),
        })
    }

    /// The gradient of one pass over the micro-batches; it changes nothing but the value head's gradient.
    fn pass(
        &mut self,
        decoder: &Decoder,
        batches: &Batches,
        parts: Parts<'_>,
        is_first: bool,
    ) -> Result<Pass, TrainerError> {
        let config = &self.config;
        let value_weight = 1.0 / batches.targets.max(1) as f64;
        let pass = config.pass.of_step(self.step);
        let (gradients, metrics) = parts.gradient(
            decoder,
            &batches.own,
            self.critic.as_mut(),
            |micro, gradients, critic| {
                let critic = critic.map(|critic| (critic, value_weight));
                let loss = &config.loss;
                accumulate_actor_critic_gradient(decoder, micro, loss, pass, gradients, critic)
            },
        )?;
        // Later passes are off-policy on purpose.
        let (found, limit) = (metrics.kl_sample_train().abs(), config.max_kl_sample_train);
        if is_first && found > limit {
            return Err(TrainerError::SamplerDrift { found, limit });
        }
        let (found, limit) = (metrics.ratio_range().1, config.max_ratio);
        if found > limit {
            return Err(TrainerError::RatioTooLarge { found, limit });
        }
        let of_head = self.critic.as_ref().map_or(0.0, ValueHead::grad_norm);
        if !of_head.is_finite() {
            return Err(TrainerError::GradientNotFinite { norm: of_head });
        }
        Ok(Pass { gradients, metrics })
    }

    /// One update with a pass's gradient; refused, it changes nothing.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "its gradient is freed before the next is made"
    )]
    fn update(
        &mut self,
        decoder: &Decoder,
        pass: Pass,
        learning_rate: f64,
    ) -> Result<(UpdateStatistics, Option<ValueMetrics>), TrainerError> {
        let update = self
            .optimizer
            .step(decoder, &pass.gradients, learning_rate)?;
        // The head's step size moves with the policy's.
        let scale = learning_rate / self.schedule.learning_rate;
        let value = match &mut self.critic {
            Some(critic) => {
                let (grad_norm, sums) = critic.step(scale)?;
                Some(ValueMetrics {
                    loss: sums.loss,
                    clipped: sums.clipped as f64 / sums.tokens.max(1) as f64,
                    grad_norm,
                    ..ValueMetrics::default()
                })
            }
            None => None,
        };
        Ok((update, value))
    }
}

/// A step whose first gradient is computed and not applied yet.
#[derive(Debug)]
pub struct PendingStep {
    advantages: Advantages,
    values: Option<ValueMetrics>,
    batches: Batches,
    first: Pass,
}

/// What the passes of a step go over.
#[derive(Debug)]
struct Batches {
    /// The micro-batches of each of this process's parts.
    own: Vec<Vec<MicroBatch>>,
    /// Targets of all parts.
    targets: usize,
}

/// What one pass found.
#[derive(Debug)]
struct Pass {
    gradients: Gradients,
    metrics: LossMetrics,
}

/// Returns the sequences of the episodes, without advantages; those without a reward keep their place
/// with an empty mask, as they leave the step and are not worth a pass.
fn sequences(episodes: &[(usize, &Trajectory)]) -> Vec<TrainSequence> {
    let sequence = |(_, trajectory): &(usize, &Trajectory)| {
        let trace = &trajectory.trace;
        TrainSequence {
            tokens: trace.ids().to_vec(),
            loss_mask: (trace.loss_mask().iter())
                .map(|&mask| mask == 1 && trajectory.reward.is_some())
                .collect(),
            logprobs: trace.logprobs().iter().copied().map(f64::from).collect(),
            reference: None,
            advantage: 0.0,
            credit: None,
        }
    };
    episodes.iter().map(sequence).collect()
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
        left_out: loss.left_out(),
        kl_sample_train: loss.kl_sample_train(),
        logprob_difference_mean: difference_mean,
        logprob_difference_max: difference_max,
        correction_mean: loss.correction(),
        ratio_mean: loss.ratio(),
        ratio_max: loss.ratio_range().1,
        value: None,
    }
}

/// Returns a number for each token: those of the tokens in `mask`, and 0 for others.
fn spread(numbers: &[f64], mask: &[bool]) -> Vec<f64> {
    let mut numbers = numbers.iter();
    let number = |&in_loss: &bool| match in_loss {
        true => numbers.next().copied().unwrap_or(0.0),
        false => 0.0,
    };
    mask.iter().map(number).collect()
}

/// Compares the values of the sequences' tokens with their returns.
fn value_metrics<'a>(sequences: impl Iterator<Item = &'a TrainSequence>) -> ValueMetrics {
    let mut pairs: Vec<(f64, f64)> = Vec::new();
    for sequence in sequences {
        let Some(credit) = &sequence.credit else {
            continue;
        };
        let both = credit
            .values
            .iter()
            .copied()
            .zip(credit.returns.iter().copied());
        let in_loss = both
            .zip(&sequence.loss_mask)
            .filter(|(_, in_loss)| **in_loss);
        pairs.extend(in_loss.map(|(pair, _)| pair));
    }
    let count = pairs.len().max(1) as f64;
    let mean = |of: &dyn Fn(&(f64, f64)) -> f64| pairs.iter().map(of).sum::<f64>() / count;
    let variance = |of: &dyn Fn(&(f64, f64)) -> f64| {
        let mean = mean(of);
        pairs
            .iter()
            .map(|pair| (of(pair) - mean).powi(2))
            .sum::<f64>()
            / count
    };
    let (of_returns, left) = (variance(&|pair| pair.1), variance(&|pair| pair.1 - pair.0));
    ValueMetrics {
        explained_variance: if of_returns > 0.0 {
            1.0 - left / of_returns
        } else {
            0.0
        },
        mean: mean(&|pair| pair.0),
        returns: mean(&|pair| pair.1),
        ..ValueMetrics::default()
    }
}

/// Shuffles the rewards within each group, seeded: a control under which a policy must not learn.
///
/// Each reward goes with its parts, which GDPO reads instead of it, and to all rows of an episode. They
/// keep their distribution and lose their meaning, so whatever improves under them is not learned from
/// them.
pub fn shuffle_rewards(groups: &mut [RolloutGroup], seed: u64) {
    use rand::SeedableRng as _;
    use rand::seq::SliceRandom as _;
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    for group in groups {
        // An episode that could not be scored stays without a reward.
        let mut scored: IndexMap<u32, Vec<&mut Trajectory>> = IndexMap::new();
        for row in &mut group.trajectories {
            if row.reward.is_some() {
                scored.entry(row.sample).or_default().push(row);
            }
        }
        let mut rewards: Vec<_> = (scored.values())
            .map(|rows| (rows[0].reward, rows[0].rewards.clone()))
            .collect();
        rewards.shuffle(&mut random);
        for (rows, (reward, parts)) in scored.into_values().zip(rewards) {
            for row in rows {
                (row.reward, row.rewards) = (reward, parts.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests;
