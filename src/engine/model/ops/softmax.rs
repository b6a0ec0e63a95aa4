//! Log-probabilities of rows of logits.

use rayon::prelude::*;

use super::{Real, lane_max, lane_sum, lane_sums, vectorized};

/// What one row of logits says about one chosen token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowStatistics<T> {
    /// Log-probability of the chosen token.
    pub logprob: T,
    /// Entropy of the row, in nats.
    pub entropy: T,
    /// Log of the sum of exponentials of the tempered logits.
    pub log_sum_exp: T,
}

/// Returns `ln(sum(exp(logits / temperature)))`.
///
/// `log p(i) = logits[i] * (1 / temperature) - log_sum_exp(logits, 1 / temperature)`: the sampler
/// and the trainer both take it from here, so that their log-probabilities are the same bits.
pub fn log_sum_exp<T: Real>(logits: &[T], inverse_temperature: T) -> T {
    vectorized(
        #[inline(always)]
        || {
            let max = lane_max(logits.len(), |i| logits[i] * inverse_temperature);
            let sum = lane_sum(logits.len(), |i| {
                (logits[i] * inverse_temperature - max).exp()
            });
            max + sum.ln()
        },
    )
}

#[inline(always)]
fn statistics_of<T: Real>(row: &[T], target: usize, inverse_temperature: T) -> RowStatistics<T> {
    let max = lane_max(row.len(), |i| row[i] * inverse_temperature);
    // The same sum in the same order as in `log_sum_exp`.
    let [sum, mean] = lane_sums(row.len(), |i| {
        let shifted = row[i] * inverse_temperature - max;
        let power = shifted.exp();
        [power, power * shifted]
    });
    let log_sum_exp = max + sum.ln();
    RowStatistics {
        logprob: row[target] * inverse_temperature - log_sum_exp,
        // -sum(p * ln p) with ln p = shifted - ln sum.
        entropy: sum.ln() - mean / sum,
        log_sum_exp,
    }
}

/// Returns the statistics of each row of `logits` `[n, vocab]` for its token in `targets` `[n]`.
pub(crate) fn row_statistics<T: Real>(
    logits: &[T],
    targets: &[u32],
    inverse_temperature: T,
) -> Vec<RowStatistics<T>> {
    let vocab = logits.len() / targets.len().max(1);
    targets
        .par_iter()
        .zip(logits.par_chunks_exact(vocab.max(1)))
        .map(|(&target, row)| {
            vectorized(
                #[inline(always)]
                || statistics_of(row, target as usize, inverse_temperature),
            )
        })
        .collect()
}

/// Replaces each row of `logits` by the gradient of `coefficient * log p(target) + entropy * H(p)`.
///
/// `d log p(a) / d z = (onehot(a) - p) / temperature` and `d H / d z = -p (log p + H) / temperature`;
/// the factor of the temperature is part of both.
pub(crate) fn log_softmax_gradient<T: Real>(
    logits: &mut [T],
    targets: &[u32],
    statistics: &[RowStatistics<T>],
    coefficients: &[T],
    entropy: T,
    inverse_temperature: T,
) {
    let vocab = logits.len() / targets.len().max(1);
    logits
        .par_chunks_exact_mut(vocab.max(1))
        .zip(targets.par_iter())
        .zip(statistics.par_iter().zip(coefficients.par_iter()))
        .for_each(|((row, &target), (statistics, &coefficient))| {
            vectorized(
                #[inline(always)]
                || {
                    let loss = RowLoss {
                        target: target as usize,
                        statistics: *statistics,
                        coefficient,
                        entropy,
                        inverse_temperature,
                    };
                    for z in row.iter_mut() {
                        *z = loss.gradient(*z);
                    }
                    row[loss.target] += loss.at_target();
                },
            );
        });
}

/// How the loss depends on one row of logits, as for [`log_softmax_gradient`].
pub(crate) struct RowLoss<T> {
    pub(crate) target: usize,
    pub(crate) statistics: RowStatistics<T>,
    pub(crate) coefficient: T,
    pub(crate) entropy: T,
    pub(crate) inverse_temperature: T,
}

impl<T: Real> RowLoss<T> {
    /// Writes the gradient of the row.
    #[inline(always)]
    pub(crate) fn write_gradient(&self, logits: &[T], gradient: &mut [T]) {
        for (gradient, &logit) in gradient.iter_mut().zip(logits) {
            *gradient = self.gradient(logit);
        }
        gradient[self.target] += self.at_target();
    }

    /// Returns the derivative by a logit, but for what the target's own has more.
    #[inline(always)]
    fn gradient(&self, logit: T) -> T {
        let scale = self.at_target();
        let logprob = logit * self.inverse_temperature - self.statistics.log_sum_exp;
        if self.entropy == T::ZERO {
            return -scale * logprob.exp();
        }
        let spread = self.entropy * self.inverse_temperature;
        let factor = scale + spread * (logprob + self.statistics.entropy);
        -factor * logprob.exp()
    }

    #[inline(always)]
    fn at_target(&self) -> T {
        self.coefficient * self.inverse_temperature
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::tests_support::golden;

    #[test]
    fn the_temperature_divides_the_logits() {
        let case = golden("logprob_temperature");
        let logits = case.floats("inputs", "logits");
        let inverse = 1.0 / case.float("inputs", "temperature");
        let row = row_statistics(&logits, &[1], inverse)[0];
        assert!((row.logprob - case.float("expected", "logp")).abs() < 1e-9);
        assert!((row.entropy - case.float("expected", "entropy")).abs() < 1e-9);
        for mutant in ["untempered", "logp_divided_by_T"] {
            assert!(
                (row.logprob - case.float("mutants", mutant)).abs() > 1e-3,
                "{mutant}"
            );
        }
        assert!((row.entropy - case.float("mutants", "entropy_untempered")).abs() > 1e-3);
    }

    #[test]
    fn logits_are_not_rounded_on_their_way_to_a_logprob() {
        let case = golden("logprob_bf16_logits_drift");
        #[expect(clippy::cast_possible_truncation, reason = "they are f32 values")]
        let narrow = |key: &str, section: &str| -> Vec<f32> {
            case.floats(section, key)
                .iter()
                .map(|&logit| logit as f32)
                .collect()
        };
        let logprob = |logits: &[f32]| f64::from(row_statistics(logits, &[1], 1.0)[0].logprob);
        let found = logprob(&narrow("logits_f32", "inputs"));
        assert!((found - case.float("expected", "logp_f32")).abs() < 1e-6);
        // The known bug, and by how much it is off.
        let rounded = logprob(&narrow("logits_bf16", "expected"));
        assert!((rounded - case.float("expected", "logp_from_bf16_logits")).abs() < 1e-6);
        let difference = case.float("expected", "abs_diff");
        assert!(((found - rounded).abs() - difference).abs() < 2e-6);
    }

    #[test]
    fn the_policy_gradient_carries_one_over_the_temperature() {
        let case = golden("policy_gradient_wrt_logits");
        let mut logits = case.floats("inputs", "logits");
        let inverse = 1.0 / case.float("inputs", "temperature");
        let statistics = row_statistics(&logits, &[1], inverse);
        let coefficient = -case.float("inputs", "advantage");
        log_softmax_gradient(&mut logits, &[1], &statistics, &[coefficient], 0.0, inverse);
        let expected = case.floats("expected", "grad_loss_wrt_logits");
        let mutant = case.floats("mutants", "without_1_over_T");
        for i in 0..4 {
            assert!((logits[i] - expected[i]).abs() < 1e-9);
            assert!((logits[i] - mutant[i]).abs() > 1e-3);
        }
    }

    #[test]
    fn an_entropy_bonus_spreads_the_distribution() {
        let case = golden("entropy_bonus_gradient");
        let mut logits = case.floats("inputs", "logits");
        let inverse = 1.0 / case.float("inputs", "temperature");
        let coefficient = case.float("inputs", "coef");
        let statistics = row_statistics(&logits, &[0], inverse);
        let entropy = statistics[0].entropy;
        assert!((entropy - case.float("expected", "entropy")).abs() < 1e-9);
        assert!((-coefficient * entropy - case.float("expected", "loss_term")).abs() < 1e-9);
        log_softmax_gradient(
            &mut logits,
            &[0],
            &statistics,
            &[0.0],
            -coefficient,
            inverse,
        );
        for (found, expected) in logits
            .iter()
            .zip(case.floats("expected", "grad_loss_wrt_logits"))
        {
            assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        }
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let rows = row_statistics(&[1e4_f32, 1e4, -1e4], &[0], 1.0);
        assert!((rows[0].logprob + std::f32::consts::LN_2).abs() < 1e-3);
        assert!(rows[0].entropy.is_finite());
    }
}
