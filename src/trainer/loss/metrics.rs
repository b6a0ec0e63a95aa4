//! What is reported of a step's loss.

use super::TokenTerm;

/// Sums over the tokens of a step, merged over micro-batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossMetrics {
    /// The loss: weighed, so a plain sum.
    pub loss: f64,
    /// Tokens counted.
    pub tokens: usize,
    clipped_low: usize,
    clipped_high: usize,
    left_out: usize,
    kl: f64,
    entropy: f64,
    ratio: f64,
    ratio_min: f64,
    ratio_max: f64,
    correction: f64,
    difference: f64,
    difference_max: f64,
    mismatch: f64,
}

impl Default for LossMetrics {
    fn default() -> Self {
        Self {
            loss: 0.0,
            tokens: 0,
            clipped_low: 0,
            clipped_high: 0,
            left_out: 0,
            kl: 0.0,
            entropy: 0.0,
            ratio: 0.0,
            ratio_min: f64::INFINITY,
            ratio_max: f64::NEG_INFINITY,
            correction: 0.0,
            difference: 0.0,
            difference_max: 0.0,
            mismatch: 0.0,
        }
    }
}

impl LossMetrics {
    /// Counts one token, with the entropy of the distribution that it was sampled from and
    /// `sampled - logp`, how much the trainer's log-probability lies below the sampler's.
    pub fn add(&mut self, term: &TokenTerm, weight: f64, entropy: f64, below: f64) {
        self.loss += term.loss * weight;
        self.tokens += 1;
        self.clipped_low += usize::from(term.is_clipped_low);
        self.clipped_high += usize::from(term.is_clipped_high);
        self.left_out += usize::from(term.correction == 0.0);
        self.kl += term.kl;
        self.entropy += entropy;
        self.ratio += term.ratio;
        self.ratio_min = self.ratio_min.min(term.ratio);
        self.ratio_max = self.ratio_max.max(term.ratio);
        self.correction += term.correction;
        self.difference += below.abs();
        self.difference_max = self.difference_max.max(below.abs());
        self.mismatch += below;
    }

    /// Adds another micro-batch's sums.
    pub fn merge(&mut self, other: &Self) {
        self.loss += other.loss;
        self.tokens += other.tokens;
        self.clipped_low += other.clipped_low;
        self.clipped_high += other.clipped_high;
        self.left_out += other.left_out;
        self.kl += other.kl;
        self.entropy += other.entropy;
        self.ratio += other.ratio;
        self.ratio_min = self.ratio_min.min(other.ratio_min);
        self.ratio_max = self.ratio_max.max(other.ratio_max);
        self.correction += other.correction;
        self.difference += other.difference;
        self.difference_max = self.difference_max.max(other.difference_max);
        self.mismatch += other.mismatch;
    }

    /// How many numbers [`LossMetrics::to_numbers`] returns.
    pub(in crate::trainer) const NUMBERS: usize = 14;

    /// Returns the sums as numbers, for another process.
    pub(in crate::trainer) fn to_numbers(self) -> [f64; Self::NUMBERS] {
        // Counts are far below 2^53.
        [
            self.loss,
            self.tokens as f64,
            self.clipped_low as f64,
            self.clipped_high as f64,
            self.left_out as f64,
            self.kl,
            self.entropy,
            self.ratio,
            self.ratio_min,
            self.ratio_max,
            self.correction,
            self.difference,
            self.difference_max,
            self.mismatch,
        ]
    }

    /// Returns the sums that [`LossMetrics::to_numbers`] wrote.
    pub(in crate::trainer) fn from_numbers(numbers: [f64; Self::NUMBERS]) -> Self {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "they were counts"
        )]
        let count = |index: usize| numbers[index] as usize;
        Self {
            loss: numbers[0],
            tokens: count(1),
            clipped_low: count(2),
            clipped_high: count(3),
            left_out: count(4),
            kl: numbers[5],
            entropy: numbers[6],
            ratio: numbers[7],
            ratio_min: numbers[8],
            ratio_max: numbers[9],
            correction: numbers[10],
            difference: numbers[11],
            difference_max: numbers[12],
            mismatch: numbers[13],
        }
    }

    fn mean(&self, sum: f64) -> f64 {
        if self.tokens == 0 {
            0.0
        } else {
            sum / self.tokens as f64
        }
    }

    /// Returns the share of tokens clipped from below: `clip_ratio/low_mean`.
    pub fn clip_ratio_low(&self) -> f64 {
        self.mean(self.clipped_low as f64)
    }

    /// Returns the share of tokens clipped from above: `clip_ratio/high_mean`.
    pub fn clip_ratio_high(&self) -> f64 {
        self.mean(self.clipped_high as f64)
    }

    /// Returns the share of tokens clipped: `clip_ratio/region_mean`.
    pub fn clip_ratio(&self) -> f64 {
        self.mean((self.clipped_low + self.clipped_high) as f64)
    }

    /// Returns the share of tokens that a correction left out.
    pub fn left_out(&self) -> f64 {
        self.mean(self.left_out as f64)
    }

    /// Returns the mean estimate of the divergence from the reference: `kl`.
    pub fn kl(&self) -> f64 {
        self.mean(self.kl)
    }

    /// Returns the mean entropy: `entropy`.
    pub fn entropy(&self) -> f64 {
        self.mean(self.entropy)
    }

    /// Returns the mean ratio of the policy to the old one.
    pub fn ratio(&self) -> f64 {
        self.mean(self.ratio)
    }

    /// Returns the smallest and the largest ratio, or ones without tokens.
    pub fn ratio_range(&self) -> (f64, f64) {
        if self.tokens == 0 {
            (1.0, 1.0)
        } else {
            (self.ratio_min, self.ratio_max)
        }
    }

    /// Returns the mean weight of the tokens: `sampling/importance_sampling_ratio/mean`.
    pub fn correction(&self) -> f64 {
        self.mean(self.correction)
    }

    /// Returns mean and maximum of `|logp - sampled|`: `sampling/sampling_logp_difference`.
    pub fn logprob_difference(&self) -> (f64, f64) {
        (self.mean(self.difference), self.difference_max)
    }

    /// Returns the mean of `sampled - logp`, the k1 estimate of the divergence of the sampler from
    /// the trainer: `kl_sample_train`.
    pub fn kl_sample_train(&self) -> f64 {
        self.mean(self.mismatch)
    }
}
