//! A run from its configuration to its summary, and the folder it leaves.
//!
//! [`Workbench`] puts together what a configuration names: the policy, the tasks, the sandbox and
//! the grader. On it, [`train`] runs GRPO, [`sft`] imitates demonstrations or a run's own
//! episodes ([`accept_rollouts`]) and [`evaluate`] measures. Progress goes to the caller as [`RunEvent`]s; nothing here prints.

mod actors;
mod agents;
mod ahead;
mod algorithm;
mod backend;
mod curriculum;
mod demos;
mod draw;
mod error;
mod evaluate;
mod folder;
mod history;
mod learned;
mod load;
mod memory;
mod metrics;
mod mix;
mod policy;
mod ranks;
mod rejection;
mod remote;
mod scored;
mod sft;
mod sinks;
mod starter;
mod state;
mod summary;
mod train;
mod watch;
mod workbench;

pub use self::backend::{ClusterReview, OpenedBackend, open_backend, open_openenv, review_cluster};
pub use self::demos::read_demonstrations;
pub use self::error::RunError;
pub use self::evaluate::{by_environment, evaluate};
pub(crate) use self::folder::write_atomically;
pub use self::folder::{FolderLock, RunFolder};
pub use self::history::{Curve, PassRate, RunRecord};
pub(crate) use self::learned::{Sample, advantages};
pub(crate) use self::load::LOAD;
pub use self::memory::{keep_to_budget, plan_request};
pub use self::policy::{Policy, trainable};
pub use self::rejection::{Accepted, Pick, RejectionSampling, accept_rollouts};
pub use self::sft::{SftOptions, SftOutcome, demonstration_traces, sft};
pub use self::starter::{STARTER, STARTER_RUN, Starter};
pub use self::state::{Phase, RunState};
pub(crate) use self::state::{STATE, phase};
pub use self::summary::{Change, Difference, Measured, Summary};
pub use self::train::{TrainOptions, new_engine, train};
pub use self::workbench::{Programs, Workbench, evaluation_tasks, learning_tasks};

use std::time::Duration;

use crate::eval::EvalReport;
use crate::trainer::StepMetrics;

/// What a run tells while it goes.
#[derive(Debug)]
#[non_exhaustive]
pub enum RunEvent<'a> {
    /// Measuring, with episodes done and in all.
    Evaluating {
        /// Episodes done.
        done: usize,
        /// Episodes in all.
        total: usize,
    },
    /// Measured.
    Evaluated {
        /// The policy's step.
        step: usize,
        /// The result.
        report: &'a EvalReport,
        /// The part of each environment in it, by name; none for a run without.
        environments: &'a [(String, EvalReport)],
    },
    /// One optimizer step done.
    Step {
        /// Steps done.
        step: usize,
        /// What it did.
        metrics: &'a StepMetrics,
        /// Tokens sampled per second while sampling.
        tokens_per_second: f64,
        /// Time of the whole step.
        elapsed: Duration,
    },
    /// A step that looks wrong and did not before.
    Anomaly {
        /// The step.
        step: usize,
        /// What was found, likely causes and what helps.
        message: &'a str,
    },
    /// A pass that took more memory than it may.
    Memory {
        /// The step.
        step: usize,
        /// What it took, and what was done about it.
        message: &'a str,
    },
    /// One step of supervised fine-tuning done.
    SftStep {
        /// Steps done.
        step: usize,
        /// Mean negative log-likelihood, in nats.
        loss: f64,
    },
}

/// Receives a run's events.
pub type Observer<'a> = dyn FnMut(RunEvent<'_>) + 'a;
