//! Supervised fine-tuning on token traces.

use rand::SeedableRng as _;
use rand::seq::SliceRandom as _;
use rand_chacha::ChaCha8Rng;

use super::TrainerError;
use super::batch::{TrainSequence, pack};
use super::budget::MicroBatches;
use super::gradient::{PassConfig, accumulate_nll_gradient};
use super::loss::{Aggregation, LossConfig, LossMetrics};
use super::memory::{MemoryChange, MemoryGuard, MemoryLog};
use super::optim::{AdamW, LrSchedule};
use crate::engine::model::Decoder;
use crate::trajectory::TokenTrace;

/// Settings of [`SftTrainer`].
#[derive(Debug, Clone, PartialEq)]
pub struct SftConfig {
    /// Traces of one step.
    pub batch_size: usize,
    /// Tokens of one forward and backward pass.
    pub micro_batch_tokens: usize,
    /// Whether layers are run again in the backward pass rather than kept.
    pub recompute: bool,
    /// Seed of the order of the traces, and of an adapter's dropout.
    pub seed: u64,
}

/// What one step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SftMetrics {
    /// Mean negative log-likelihood of the learned tokens, in nats.
    pub loss: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Tokens learned.
    pub tokens: usize,
}

/// Imitates traces: maximises the likelihood of exactly the ids that a policy would sample.
#[derive(Debug)]
pub struct SftTrainer {
    config: SftConfig,
    schedule: LrSchedule,
    optimizer: AdamW,
    sequences: Vec<TrainSequence>,
    order: Vec<usize>,
    random: ChaCha8Rng,
    guard: Option<MemoryGuard>,
    memory: MemoryLog,
    step: usize,
}

impl SftTrainer {
    /// Returns a trainer before its first step.
    ///
    /// # Errors
    ///
    /// Fails without traces or with an empty batch.
    pub fn new(
        traces: &[TokenTrace],
        config: SftConfig,
        schedule: LrSchedule,
        optimizer: AdamW,
    ) -> Result<Self, TrainerError> {
        if traces.is_empty() || config.batch_size == 0 {
            return Err(TrainerError::InvalidConfig {
                field: "batch_size",
                reason: "there is nothing in a batch".to_owned(),
            });
        }
        let sequences = traces
            .iter()
            .map(|trace| TrainSequence {
                tokens: trace.ids().to_vec(),
                loss_mask: trace.loss_mask().iter().map(|mask| *mask == 1).collect(),
                logprobs: Vec::new(),
                reference: None,
                advantage: 0.0,
                credit: None,
            })
            .collect();
        let random = ChaCha8Rng::seed_from_u64(config.seed);
        Ok(Self {
            config,
            schedule,
            optimizer,
            sequences,
            order: Vec::new(),
            random,
            guard: None,
            memory: MemoryLog::default(),
            step: 0,
        })
    }

    /// Keeps its passes within the memory that `guard` lets them have, by smaller micro-batches.
    #[must_use]
    pub fn with_memory_guard(self, guard: Option<MemoryGuard>) -> Self {
        Self { guard, ..self }
    }

    /// Returns what was done about the memory of passes since the last call.
    pub fn take_memory_changes(&mut self) -> Vec<MemoryChange> {
        self.memory.take()
    }

    /// Learns the next batch; every trace is met once before any is met again.
    ///
    /// # Errors
    ///
    /// Fails where the model refuses a trace or the gradient is not finite.
    pub fn step(&mut self, decoder: &Decoder) -> Result<SftMetrics, TrainerError> {
        let mut batch = Vec::with_capacity(self.config.batch_size);
        while batch.len() < self.config.batch_size {
            if self.order.is_empty() {
                self.order = (0..self.sequences.len()).collect();
                self.order.shuffle(&mut self.random);
            }
            batch.extend(self.order.pop().map(|index| self.sequences[index].clone()));
        }
        let loss = LossConfig {
            aggregation: Aggregation::Dapo,
            ..LossConfig::default()
        };
        let totals = loss.totals(batch.iter().map(TrainSequence::trainable_tokens));
        let mut chosen = MicroBatches {
            micro_batch_tokens: self.config.micro_batch_tokens,
            recompute: self.config.recompute,
        };
        let step = self.step;
        let dropout_seed = Some(self.config.seed);
        let (guard, is_gpu) = (self.guard.as_ref(), !decoder.is_fused());
        let made = (self.memory).keep_within(guard, &mut chosen, is_gpu, |chosen, watch| {
            let pass = PassConfig {
                temperature: 1.0,
                recompute: chosen.recompute,
                dropout_seed,
            };
            let pass = pass.of_step(step);
            let mut gradients = decoder.zero_gradients();
            let mut metrics = LossMetrics::default();
            for micro in pack(&batch, chosen.micro_batch_tokens, &loss, totals)? {
                let add = || accumulate_nll_gradient(decoder, &micro, pass, &mut gradients);
                metrics.merge(&watch.pass(&micro, add)?);
            }
            Ok((gradients, metrics))
        });
        self.config.micro_batch_tokens = chosen.micro_batch_tokens;
        self.config.recompute = chosen.recompute;
        let (gradients, metrics) = made?;
        let rate = self.schedule.rate(self.step);
        let update = self.optimizer.step(decoder, &gradients, rate)?;
        self.step += 1;
        Ok(SftMetrics {
            loss: metrics.loss,
            grad_norm: update.grad_norm,
            tokens: metrics.tokens,
        })
    }
}
