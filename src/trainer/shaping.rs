//! What is taken off a reward before it is compared with its group's.

use serde::{Deserialize, Serialize};

/// A penalty for long answers: 0 for up to `limit - margin` tokens, then falling to -1 at `limit`
/// (DAPO's soft overlong punishment, Yu et al. 2025, arXiv:2503.14476, equation 13).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverlongPenalty {
    /// Sampled tokens at which the penalty is whole.
    pub limit: usize,
    /// Tokens over which it grows.
    pub margin: usize,
    /// What it is multiplied by.
    pub weight: f64,
}

impl OverlongPenalty {
    /// Returns what an answer of `tokens` sampled tokens loses, as a number that is not positive.
    pub fn of(&self, tokens: usize) -> f64 {
        self.weight * self.unweighted(tokens)
    }

    /// Returns the same before its weight: from 0 to -1.
    pub fn unweighted(&self, tokens: usize) -> f64 {
        let start = self.limit.saturating_sub(self.margin);
        let share = if tokens <= start {
            0.0
        } else if tokens >= self.limit {
            1.0
        } else {
            (tokens - start) as f64 / (self.limit - start) as f64
        };
        -share
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::tests_support::golden;

    #[test]
    fn long_answers_are_punished_as_dapo_does() {
        let case = golden("overlong_penalty_dapo");
        let penalty = OverlongPenalty {
            limit: 20_480,
            margin: 4096,
            weight: 1.0,
        };
        let lengths = case.value("inputs", "lengths").as_array().unwrap();
        let expected = case.floats("expected", "penalty");
        for (length, expected) in lengths.iter().zip(expected) {
            let length = usize::try_from(length.as_u64().unwrap()).unwrap();
            assert_eq!(penalty.of(length), expected);
        }
        // Beyond the limit it does not grow.
        let unclamped = case.floats("expected", "verl_unclamped_penalty");
        assert!(penalty.of(20_481) != unclamped[5]);
    }
}
