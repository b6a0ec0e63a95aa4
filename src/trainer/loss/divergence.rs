//! Estimates of the divergence from the reference, from one sample.

use serde::{Deserialize, Serialize};

/// Which estimate of `KL(policy | reference)` is taken from a sampled token (Schulman 2020,
/// "Approximating KL Divergence"), with `d = logp - ref`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KlEstimator {
    /// `d`. As a loss its expected gradient is 0; it belongs into the reward.
    K1,
    /// `d² / 2`, whose gradient is that of the divergence.
    K2,
    /// `exp(-d) + d - 1`, which is never negative (Shao et al. 2024, equation 4).
    #[default]
    K3,
}

impl KlEstimator {
    /// Returns the estimate and its derivative with respect to `logprob`.
    pub fn estimate(self, logprob: f64, reference: f64) -> (f64, f64) {
        let difference = logprob - reference;
        match self {
            Self::K1 => (difference, 1.0),
            Self::K2 => (0.5 * difference * difference, difference),
            Self::K3 => {
                let inverse = (-difference).exp();
                (inverse + difference - 1.0, 1.0 - inverse)
            }
        }
    }
}
