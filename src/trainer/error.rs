//! What can go wrong in training.

use std::io;
use std::path::PathBuf;

use super::memory::Overshoot;
use crate::collective::CollectiveError;
use crate::engine::model::ModelError;

/// A fault in training data, in a checkpoint or in the arithmetic.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainerError {
    // === Data ===
    /// A grader gave something that is not a number.
    #[error("reward of sample {sample} is {reward}, expected a finite number")]
    RewardNotFinite {
        /// Index of the sample.
        sample: usize,
        /// The reward.
        reward: f64,
    },
    /// Two lists that go together have different lengths.
    #[error("{what}: {found} != {expected}")]
    Length {
        /// Which lists.
        what: &'static str,
        /// Length found.
        found: usize,
        /// Length expected.
        expected: usize,
    },
    /// A sequence's first token cannot be trained on: nothing predicts it.
    #[error("sequence {sequence} has its first token in the loss, but no token stands before it")]
    FirstTokenInLoss {
        /// Index of the sequence.
        sequence: usize,
    },
    /// A setting is out of bounds.
    #[error("invalid `{field}`: {reason}")]
    InvalidConfig {
        /// The setting.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },

    // === Arithmetic ===
    /// The gradient has overflowed; the weights are unchanged.
    #[error("gradient norm is {norm}: weights are left as they were; lower the learning rate")]
    GradientNotFinite {
        /// The norm.
        norm: f64,
    },

    /// The trainer does not find the sampled tokens as likely as the sampler said.
    #[error(
        "the trainer's log-probabilities lie {found:.4} nats a token from those that were sampled \
         with, more than {limit}: the weights changed in between, or the sampler cuts or shifts \
         its distribution (`top_p`, `top_k`, penalties, another temperature); raise \
         `trainer.max_kl_sample_train` if it is meant to"
    )]
    SamplerDrift {
        /// Mean difference, in nats.
        found: f64,
        /// The largest that is accepted.
        limit: f64,
    },

    /// A token became much likelier within the step; the weights are as before it.
    #[error(
        "a token became {found:.3e} times as likely, more than {limit}: weights are left as they were \
         before the step; lower `trainer.num_iterations` or `trainer.learning_rate`, or raise \
         `watch.max_ratio`"
    )]
    RatioTooLarge {
        /// The largest ratio.
        found: f64,
        /// The largest that is accepted.
        limit: f64,
    },

    // === Memory ===
    /// A pass took more memory than it may, and can be made smaller; weights are as before the step. A
    /// trainer with a guard does the step again, so it is not seen from outside.
    #[error("{overshoot}")]
    Memory {
        /// What it took.
        overshoot: Overshoot,
    },
    /// A device has no room for one sequence.
    #[error(
        "the device has no room for a pass over {tokens} tokens, and nothing is left to make smaller; \
         lower `rollout.max_total_tokens`, `rollout.max_cache_tokens` or `trainer.lora_rank`"
    )]
    OutOfMemory {
        /// Tokens of the pass.
        tokens: usize,
        /// What the device said.
        source: Box<Self>,
    },

    // === Checkpoints ===
    /// A file of a checkpoint could not be read or written.
    #[error("failed to access `{path}`")]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A checkpoint's state does not parse.
    #[error("failed to parse `{path}`")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// A checkpoint was written by another kind of run.
    #[error("checkpoint `{path}` does not fit this run: {reason}")]
    CheckpointMismatch {
        /// The checkpoint's folder.
        path: PathBuf,
        /// What differs.
        reason: String,
    },

    // === Other processes ===
    /// The processes that train together cannot go on.
    #[error(transparent)]
    Collective(#[from] CollectiveError),

    // === The model ===
    /// The model refused.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tensor library refused an operation.
    #[error("tensor operation failed")]
    Tensor(#[from] candle_core::Error),
}
