//! What a run came to.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::config::EvalConfig;
use crate::eval::EvalReport;

/// `summary.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// All held-out tasks.
    #[serde(flatten)]
    pub change: Change,
    /// Those of each environment, by name; none for a run without.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environments: BTreeMap<String, Change>,
    /// Optimizer steps.
    pub steps: usize,
    /// Wall-clock seconds, measuring included.
    pub wall_s: f64,
    /// Tokens sampled for training.
    pub tokens: u64,
    /// Seed of the run.
    pub seed: u64,
}

/// What training did to held-out tasks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// Before training.
    pub before: Measured,
    /// After training.
    pub after: Measured,
    /// Difference of the two on the same tasks, with its interval.
    pub difference: Option<Difference>,
}

impl Change {
    /// Compares two measurements as `eval` of a run says them; `seed` is that of the interval.
    #[must_use]
    pub fn new(before: &EvalReport, after: &EvalReport, eval: &EvalConfig, seed: u64) -> Self {
        Self {
            before: Measured::new(before, eval),
            after: Measured::new(after, eval),
            difference: after.difference(before, seed).map(|difference| Difference {
                pass_at_1: difference.pass_at_1,
                ci95: difference.ci95,
            }),
        }
    }
}

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Share of samples that pass.
    pub pass_at_1: f64,
    /// Its 95 % interval over tasks, as [`EvalReport::ci95`].
    pub ci95: [f64; 2],
    /// Tasks measured.
    pub tasks: usize,
    /// Samples of each task.
    pub samples: usize,
    /// Temperature at which they were drawn; none in summaries that were written before it was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
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
    pub fn new(report: &EvalReport, eval: &EvalConfig) -> Self {
        Self {
            pass_at_1: report.pass_at_1,
            ci95: report.ci95,
            tasks: report.tasks,
            samples: eval.samples,
            temperature: Some(eval.temperature),
            unscorable: report.unscorable,
        }
    }
}
