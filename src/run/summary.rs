//! What a run came to.

use serde::{Deserialize, Serialize};

use crate::eval::EvalReport;

/// `summary.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The held-out tasks before training.
    pub before: Measured,
    /// The held-out tasks after training.
    pub after: Measured,
    /// Difference of the two on the same tasks, with its interval.
    pub difference: Option<Difference>,
    /// Optimizer steps.
    pub steps: usize,
    /// Wall-clock seconds, measuring included.
    pub wall_s: f64,
    /// Tokens sampled for training.
    pub tokens: u64,
    /// Seed of the run.
    pub seed: u64,
}

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Share of samples that pass.
    pub pass_at_1: f64,
    /// Its 95 % bootstrap interval over tasks.
    pub ci95: [f64; 2],
    /// Tasks measured.
    pub tasks: usize,
    /// Samples of each task.
    pub samples: usize,
    /// Samples that we failed to score.
    pub unscorable: u64,
}

/// A difference of two measurements.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// After less before.
    pub pass_at_1: f64,
    /// Its 95 % bootstrap interval over tasks.
    pub ci95: [f64; 2],
}

impl Measured {
    /// Returns the part of a report that a summary keeps.
    #[must_use]
    pub fn new(report: &EvalReport, samples: usize) -> Self {
        Self {
            pass_at_1: report.pass_at_1,
            ci95: report.ci95,
            tasks: report.tasks,
            samples,
            unscorable: report.unscorable,
        }
    }
}
