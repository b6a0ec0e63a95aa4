//! Measuring a policy: pass@k with confidence intervals.
//!
//! An evaluation samples each task several times. [`TaskScore`] counts the samples of a task and
//! those that passed; samples that could not be scored are in neither count, since a fault of ours
//! says nothing about the policy. [`EvalReport`] turns the counts into pass@k over tasks, with an
//! interval that says how much of it is the choice of tasks. [`endpoint`] measures models elsewhere.

pub mod endpoint;
mod pass_at_k;
mod report;

pub use pass_at_k::{pass_at_k, pass_hat_k};
pub use report::{Difference, EvalReport, TaskScore};
