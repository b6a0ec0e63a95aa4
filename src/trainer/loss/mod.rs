//! The clipped surrogate and its aggregations, token by token.
//!
//! With `r = exp(logp - old)` and advantage `A`, a token's loss is
//! `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` (Schulman et al. 2017, equation 7; Yu et al. 2025,
//! DAPO, equation 8), plus `kl_coef` times the k3 estimate of the divergence from the reference (Shao et
//! al. 2024, equation 4). A token's loss depends on no other token, so its gradient is known as soon
//! as its log-probability is: the head's backward pass needs no second visit.
//!
//! Tokens are weighed by the denominator of the whole optimizer step, [`StepTotals`], so that neither
//! the number of micro-batches nor their order changes the gradient.

use serde::{Deserialize, Serialize};

/// How token losses become one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// Mean over the sequences of each sequence's mean (GRPO). Favours short right answers.
    Grpo,
    /// Mean over all tokens of the step (DAPO).
    #[default]
    Dapo,
    /// Sum over sequences times a constant length (Dr. GRPO): unbiased in the length.
    DrGrpo,
}

/// Whether sequences without a single token in the loss count in a mean over sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MaskedSequences {
    /// They count, as in TRL: masking a sequence lowers the step's learning rate a little.
    #[default]
    Counted,
    /// They do not, as in verl.
    LeftOut,
}

/// Settings of the policy loss. Defaults are those of TRL 1.16.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossConfig {
    /// How token losses become one number; token mean by default.
    pub aggregation: Aggregation,
    /// The ratio is clipped from below at `1 - clip_low`; 0.2 by default.
    pub clip_low: f64,
    /// The ratio is clipped from above at `1 + clip_high`; 0.2 by default.
    pub clip_high: f64,
    /// Bounds the loss of tokens with negative advantage at this multiple of it (dual clip, Ye et al.
    /// 2020, equation 5); none by default.
    pub dual_clip: Option<f64>,
    /// Weight of the divergence from the reference; 0 by default.
    pub kl_coef: f64,
    /// Multiply the divergence by the ratio, so that its gradient is that of the reverse KL (`DeepSeek`
    /// 2025, V3.2); false by default.
    pub kl_bias_correction: bool,
    /// Length that [`Aggregation::DrGrpo`] divides by: the most tokens of one answer.
    pub max_completion_length: usize,
    /// Whether wholly masked sequences count; they do by default.
    pub masked_sequences: MaskedSequences,
}

impl Default for LossConfig {
    fn default() -> Self {
        Self {
            aggregation: Aggregation::Dapo,
            clip_low: 0.2,
            clip_high: 0.2,
            dual_clip: None,
            kl_coef: 0.0,
            kl_bias_correction: false,
            max_completion_length: 1024,
            masked_sequences: MaskedSequences::Counted,
        }
    }
}

/// What one token adds to the loss, before its weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenTerm {
    /// Its loss.
    pub loss: f64,
    /// The derivative with respect to its log-probability. Exactly 0 where the clip is active.
    pub gradient: f64,
    /// `exp(logp - old)`.
    pub ratio: f64,
    /// Whether the lower clip is active.
    pub is_clipped_low: bool,
    /// Whether the upper clip is active.
    pub is_clipped_high: bool,
    /// The k3 estimate of the divergence from the reference; 0 without one.
    pub kl: f64,
}

impl LossConfig {
    /// Returns the loss of one token.
    pub fn token(
        &self,
        logprob: f64,
        old: f64,
        reference: Option<f64>,
        advantage: f64,
    ) -> TokenTerm {
        let ratio = (logprob - old).exp();
        let clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high);
        let is_clipped_low = ratio < 1.0 - self.clip_low && advantage < 0.0;
        let is_clipped_high = ratio > 1.0 + self.clip_high && advantage > 0.0;
        let (mut loss, mut gradient) = if is_clipped_low || is_clipped_high {
            (-clipped * advantage, 0.0)
        } else {
            (-ratio * advantage, -ratio * advantage)
        };
        if let Some(bound) = self.dual_clip
            && advantage < 0.0
            && loss > -bound * advantage
        {
            (loss, gradient) = (-bound * advantage, 0.0);
        }
        let mut kl = 0.0;
        if let Some(reference) = reference {
            let difference = reference - logprob;
            kl = difference.exp() - difference - 1.0;
            let (value, slope) = if self.kl_bias_correction {
                (ratio * kl, -ratio * difference)
            } else {
                (kl, 1.0 - difference.exp())
            };
            loss += self.kl_coef * value;
            gradient += self.kl_coef * slope;
        }
        TokenTerm {
            loss,
            gradient,
            ratio,
            is_clipped_low,
            is_clipped_high,
            kl,
        }
    }

    /// Returns the weight of each token of a sequence with `tokens` tokens in the loss.
    pub fn token_weight(&self, totals: StepTotals, tokens: usize) -> f64 {
        let denominator = match self.aggregation {
            Aggregation::Grpo => totals.sequences * tokens,
            Aggregation::Dapo => totals.tokens,
            Aggregation::DrGrpo => totals.sequences * self.max_completion_length,
        };
        1.0 / denominator.max(1) as f64
    }

    /// Counts the sequences and tokens of an optimizer step, given each sequence's number of tokens in
    /// the loss.
    pub fn totals(&self, tokens: impl IntoIterator<Item = usize>) -> StepTotals {
        let mut totals = StepTotals {
            sequences: 0,
            tokens: 0,
        };
        for tokens in tokens {
            totals.tokens += tokens;
            if tokens > 0 || self.masked_sequences == MaskedSequences::Counted {
                totals.sequences += 1;
            }
        }
        totals
    }
}

/// Sizes of one optimizer step, over all its micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepTotals {
    /// Sequences.
    pub sequences: usize,
    /// Tokens in the loss.
    pub tokens: usize,
}

/// Sums over the tokens of a step, merged over micro-batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossMetrics {
    /// The loss: weighed, so a plain sum.
    pub loss: f64,
    /// Tokens counted.
    pub tokens: usize,
    clipped_low: usize,
    clipped_high: usize,
    kl: f64,
    entropy: f64,
    ratio: f64,
    ratio_min: f64,
    ratio_max: f64,
    difference: f64,
    difference_max: f64,
}

impl Default for LossMetrics {
    fn default() -> Self {
        Self {
            loss: 0.0,
            tokens: 0,
            clipped_low: 0,
            clipped_high: 0,
            kl: 0.0,
            entropy: 0.0,
            ratio: 0.0,
            ratio_min: f64::INFINITY,
            ratio_max: f64::NEG_INFINITY,
            difference: 0.0,
            difference_max: 0.0,
        }
    }
}

impl LossMetrics {
    /// Counts one token.
    pub fn add(&mut self, term: &TokenTerm, weight: f64, entropy: f64) {
        self.loss += term.loss * weight;
        self.tokens += 1;
        self.clipped_low += usize::from(term.is_clipped_low);
        self.clipped_high += usize::from(term.is_clipped_high);
        self.kl += term.kl;
        self.entropy += entropy;
        self.ratio += term.ratio;
        self.ratio_min = self.ratio_min.min(term.ratio);
        self.ratio_max = self.ratio_max.max(term.ratio);
        let difference = term.ratio.ln().abs();
        self.difference += difference;
        self.difference_max = self.difference_max.max(difference);
    }

    /// Adds another micro-batch's sums.
    pub fn merge(&mut self, other: &Self) {
        self.loss += other.loss;
        self.tokens += other.tokens;
        self.clipped_low += other.clipped_low;
        self.clipped_high += other.clipped_high;
        self.kl += other.kl;
        self.entropy += other.entropy;
        self.ratio += other.ratio;
        self.ratio_min = self.ratio_min.min(other.ratio_min);
        self.ratio_max = self.ratio_max.max(other.ratio_max);
        self.difference += other.difference;
        self.difference_max = self.difference_max.max(other.difference_max);
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

    /// Returns the mean k3 divergence from the reference: `kl`.
    pub fn kl(&self) -> f64 {
        self.mean(self.kl)
    }

    /// Returns the mean entropy: `entropy`.
    pub fn entropy(&self) -> f64 {
        self.mean(self.entropy)
    }

    /// Returns the mean ratio: `sampling/importance_sampling_ratio/mean` on a step's first epoch.
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

    /// Returns mean and maximum of `|logp - old|`: `sampling/sampling_logp_difference`.
    pub fn logprob_difference(&self) -> (f64, f64) {
        (self.mean(self.difference), self.difference_max)
    }
}

#[cfg(test)]
mod tests;
