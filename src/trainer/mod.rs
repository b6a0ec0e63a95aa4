//! GRPO and its relatives, and supervised fine-tuning.

mod advantage;
mod batch;
mod checkpoint;
mod error;
mod gradient;
mod grpo;
mod logprob;
mod loss;
mod optim;
mod sft;

#[cfg(test)]
mod tests;

pub use advantage::{AdvantageConfig, Advantages, GroupMember, GroupStatistics, group_advantages};
pub use batch::{MicroBatch, TrainSequence, pack};
pub use checkpoint::{
    TrainState, checkpoint_steps, latest_checkpoint, load_checkpoint, prune_checkpoints,
    save_checkpoint,
};
pub use error::TrainerError;
pub use gradient::{
    PassConfig, accumulate_nll_gradient, accumulate_policy_gradient, score_micro_batch,
};
pub use grpo::{GrpoConfig, GrpoTrainer, StepMetrics, shuffle_rewards};
pub use logprob::{Scores, Targets, backward_through_head, score};
pub use loss::{Aggregation, LossConfig, LossMetrics, MaskedSequences, StepTotals, TokenTerm};
pub use optim::{AdamW, AdamWConfig, LrSchedule, ScheduleKind, UpdateStatistics};
pub use sft::{SftConfig, SftMetrics, SftTrainer};
