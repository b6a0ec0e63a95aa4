//! GRPO and its relatives, and supervised fine-tuning.

mod advantage;
mod batch;
mod budget;
mod checkpoint;
mod credit;
mod error;
mod gradient;
mod grpo;
mod logprob;
mod loss;
mod memory;
mod optim;
mod sft;
mod shaping;
mod tree;
mod value;

#[cfg(test)]
mod tests;

pub use advantage::{
    AdvantageConfig, Advantages, Estimator, GroupMember, GroupStatistics, RewardScale,
    decoupled_advantages, group_advantages,
};
pub use batch::{MicroBatch, TrainSequence, pack};
pub use budget::{
    MemoryPlan, MicroBatches, Place, PlanRequest, choose, largest_micro_batch, parameter_count,
    plan, trained_numbers,
};
pub use checkpoint::{
    TrainState, checkpoint_path, checkpoint_steps, latest_checkpoint, load_checkpoint,
    prune_checkpoints, remove_partial_checkpoints, save_checkpoint,
};
pub use credit::{Discount, TokenCredit, discounted_returns, generalized_advantages, whiten};
pub use error::TrainerError;
pub use gradient::{
    PassConfig, accumulate_actor_critic_gradient, accumulate_nll_gradient,
    accumulate_policy_gradient, score_micro_batch,
};
pub use grpo::{
    GrpoConfig, GrpoTrainer, PendingStep, StepMetrics, TokenLevel, ValueMetrics, shuffle_rewards,
};
pub use logprob::{HeadLoss, Scores, Targets, backward_through_head, score};
pub use loss::{
    Aggregation, CorrectionLevel, KlEstimator, LossConfig, LossMetrics, MaskedSequences,
    OutOfBounds, RatioLevel, SamplerCorrection, SequenceTokens, StepTotals, Surrogate, TokenTerm,
};
pub use memory::{MeasuredMemory, MemoryChange, MemoryGuard, MemoryMeter, Overshoot};
pub use optim::{AdamW, AdamWConfig, LrSchedule, ScheduleKind, UpdateStatistics};
pub use sft::{SftConfig, SftMetrics, SftTrainer};
pub use shaping::OverlongPenalty;
pub use tree::{edge_advantages, tree_group_advantages};
pub use value::{ValueConfig, ValueHead, ValueSums, value_loss};
