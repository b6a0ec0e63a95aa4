//! What is done where the policy that is trained is not the one that sampled: weights for the
//! mismatch, and sequences that are too far off to learn from.
//!
//! Both read log-probabilities as plain numbers: no gradient flows through a weight.

use serde::{Deserialize, Serialize};

/// What a correction's ratio is taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionLevel {
    /// Each token's own ratio.
    Token,
    /// The product over the sequence's tokens in the loss.
    #[default]
    Sequence,
    /// Their geometric mean.
    Geometric,
}

/// What becomes of a ratio out of bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutOfBounds {
    /// The bound takes its place (truncated importance sampling, TIS).
    Truncate,
    /// The token, or sequence, is left out (`IcePop`, masked importance sampling).
    #[default]
    Mask,
}

/// Importance weights `exp(old - sampled)` for sampling with other numbers than those that the
/// trainer computes: another engine, older weights. The defaults are TRL 1.16's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplerCorrection {
    /// What the ratio is taken over; the sequence unless given.
    pub level: CorrectionLevel,
    /// What becomes of a ratio out of bounds; it is masked unless given.
    pub out_of_bounds: OutOfBounds,
    /// Largest ratio; 3 unless given.
    pub max: f64,
    /// Smallest ratio; none unless given.
    pub min: Option<f64>,
}

impl Default for SamplerCorrection {
    fn default() -> Self {
        Self {
            level: CorrectionLevel::default(),
            out_of_bounds: OutOfBounds::default(),
            max: 3.0,
            min: None,
        }
    }
}

impl SamplerCorrection {
    /// Returns the weight of each token of a sequence, from the log-probabilities that the trainer
    /// computes for the sampling policy and those that were sampled with.
    pub fn weights(&self, old: &[f64], sampled: &[f64]) -> Vec<f64> {
        let differences = old.iter().zip(sampled).map(|(old, sampled)| old - sampled);
        let whole = |ratio: f64| vec![self.bound(ratio); old.len()];
        match self.level {
            CorrectionLevel::Token => differences.map(|d| self.bound(d.exp())).collect(),
            CorrectionLevel::Sequence => whole(differences.sum::<f64>().exp()),
            CorrectionLevel::Geometric => {
                whole((differences.sum::<f64>() / old.len().max(1) as f64).exp())
            }
        }
    }

    fn bound(&self, ratio: f64) -> f64 {
        let min = self.min.unwrap_or(0.0);
        match self.out_of_bounds {
            OutOfBounds::Truncate => ratio.clamp(min, self.max),
            OutOfBounds::Mask if ratio > self.max || ratio < min => 0.0,
            OutOfBounds::Mask => ratio,
        }
    }
}

/// Returns whether a sequence with a negative advantage is too far from the policy that sampled it
/// to learn from: its mean `sampled - logp` is above `threshold` (DeepSeek-V3.2, arXiv:2512.02556,
/// equation 9).
pub(super) fn is_off_policy(
    threshold: f64,
    sampled: &[f64],
    logprobs: &[f64],
    advantage: f64,
) -> bool {
    let sum: f64 = sampled
        .iter()
        .zip(logprobs)
        .map(|(sampled, logprob)| sampled - logprob)
        .sum();
    advantage < 0.0 && sum / logprobs.len().max(1) as f64 > threshold
}
