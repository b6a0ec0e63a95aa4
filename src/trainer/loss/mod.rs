//! The policy's loss, sequence by sequence.
//!
//! A token's loss is a [`Surrogate`] of its probability ratio and advantage, weighed for the mismatch
//! with the sampler ([`SamplerCorrection`]), plus `kl_coef` times an estimate of the divergence from
//! the reference ([`KlEstimator`]), less `entropy_coef` times its entropy. Most losses look at one
//! token at a time, so the gradient of a token is known as soon as its log-probability is; those that
//! compare whole sequences need all of a sequence's first ([`LossConfig::needs_sequences`]).
//!
//! Tokens are weighed by the denominator of the whole optimizer step, [`StepTotals`], so that neither
//! the number of micro-batches nor their order changes the gradient.

mod correction;
mod divergence;
mod metrics;
mod surrogate;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub use correction::{CorrectionLevel, OutOfBounds, SamplerCorrection};
pub use divergence::KlEstimator;
pub use metrics::LossMetrics;
pub use surrogate::{RatioLevel, Surrogate};

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

/// Settings of the policy loss. Defaults are those of TRL 1.16, less its correction of the sampler,
/// which ours does not need.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossConfig {
    /// The policy's part; PPO's clipped ratio by default.
    pub surrogate: Surrogate,
    /// Whether ratios compare tokens or sequences; tokens by default.
    pub ratio_level: RatioLevel,
    /// How token losses become one number; token mean by default.
    pub aggregation: Aggregation,
    /// Weights for the mismatch with the sampler; none by default.
    pub correction: Option<SamplerCorrection>,
    /// Sequences with negative advantage whose mean `sampled - logp` is above this are left out; none
    /// by default.
    pub off_policy_threshold: Option<f64>,
    /// Weight of the divergence from the reference; 0 by default.
    pub kl_coef: f64,
    /// Which estimate of it; k3 by default.
    pub kl_estimator: KlEstimator,
    /// Multiply the divergence by the ratio, so that its gradient is that of the reverse KL
    /// (DeepSeek-V3.2, arXiv:2512.02556); true by default, as in TRL 1.16.
    pub kl_bias_correction: bool,
    /// Weight of the entropy, of which the mean over the step's tokens is added to what is maximised;
    /// 0 by default.
    pub entropy_coef: f64,
    /// Length that [`Aggregation::DrGrpo`] divides by: the most tokens of one answer.
    pub max_completion_length: usize,
    /// Whether wholly masked sequences count; they do by default.
    pub masked_sequences: MaskedSequences,
}

impl Default for LossConfig {
    fn default() -> Self {
        Self {
            surrogate: Surrogate::default(),
            ratio_level: RatioLevel::Token,
            aggregation: Aggregation::Dapo,
            correction: None,
            off_policy_threshold: None,
            kl_coef: 0.0,
            kl_estimator: KlEstimator::K3,
            kl_bias_correction: true,
            entropy_coef: 0.0,
            max_completion_length: 1024,
            masked_sequences: MaskedSequences::Counted,
        }
    }
}

/// What the loss reads of the tokens of one sequence that are in it, each list in their order.
#[derive(Debug, Clone, Copy, Default)]
pub struct SequenceTokens<'a> {
    /// Log-probabilities now.
    pub logprobs: &'a [f64],
    /// Log-probabilities before the step, which ratios compare with.
    pub old: &'a [f64],
    /// Log-probabilities that the sampler had.
    pub sampled: &'a [f64],
    /// Log-probabilities under the reference; empty without one.
    pub reference: &'a [f64],
    /// Their advantages: the sequence's, or each token's own.
    pub advantages: &'a [f64],
}

/// What one token adds to the loss, before its weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenTerm {
    /// Its loss, its entropy not counted.
    pub loss: f64,
    /// The derivative with respect to its log-probability. Exactly 0 where a clip is active.
    pub gradient: f64,
    /// The ratio of the policy to the old one, of the token or of its sequence.
    pub ratio: f64,
    /// Whether the lower clip is active.
    pub is_clipped_low: bool,
    /// Whether the upper clip is active.
    pub is_clipped_high: bool,
    /// Its weight for the mismatch with the sampler; 0 if it is left out.
    pub correction: f64,
    /// The estimate of the divergence from the reference; 0 without one.
    pub kl: f64,
}

impl LossConfig {
    /// Returns whether a token's term depends on the rest of its sequence.
    pub fn needs_sequences(&self) -> bool {
        let is_over_sequences =
            |correction: SamplerCorrection| correction.level != CorrectionLevel::Token;
        self.ratio_level == RatioLevel::Sequence
            || self.off_policy_threshold.is_some()
            || self.correction.is_some_and(is_over_sequences)
    }

    /// Returns the terms of a sequence's tokens.
    ///
    /// # Panics
    ///
    /// Panics if `old`, `advantages` or, where they are read, `sampled` and `reference` are shorter than `logprobs`.
    pub fn terms(&self, tokens: SequenceTokens<'_>) -> Vec<TokenTerm> {
        let count = tokens.logprobs.len();
        let sequence_ratio = mean_difference(tokens.logprobs, tokens.old).exp();
        let mut corrections = match self.correction {
            Some(correction) => correction.weights(tokens.old, tokens.sampled),
            None => vec![1.0; count],
        };
        if let Some(threshold) = self.off_policy_threshold
            && correction::is_off_policy(
                threshold,
                tokens.sampled,
                tokens.logprobs,
                mean(tokens.advantages.iter().copied()),
            )
        {
            corrections.fill(0.0);
        }
        let mut terms: Vec<TokenTerm> = (0..count)
            .map(|t| {
                let (logprob, old) = (tokens.logprobs[t], tokens.old[t]);
                let ratio = match self.ratio_level {
                    RatioLevel::Token => (logprob - old).exp(),
                    RatioLevel::Sequence => sequence_ratio,
                };
                let part = self
                    .surrogate
                    .term(ratio, logprob, old, tokens.advantages[t]);
                TokenTerm {
                    loss: corrections[t] * part.loss,
                    gradient: corrections[t] * part.gradient,
                    ratio,
                    is_clipped_low: part.is_clipped_low,
                    is_clipped_high: part.is_clipped_high,
                    correction: corrections[t],
                    kl: 0.0,
                }
            })
            .collect();
        // A token moves its sequence's ratio by its share, and with it the terms of all tokens.
        let is_shared = self.ratio_level == RatioLevel::Sequence;
        if is_shared && self.surrogate.flows_through_ratio() {
            let mean = mean(terms.iter().map(|term| term.gradient));
            for term in &mut terms {
                term.gradient = mean;
            }
        }
        if !tokens.reference.is_empty() {
            self.add_divergence(&mut terms, tokens, is_shared);
        }
        terms
    }

    fn add_divergence(&self, terms: &mut [TokenTerm], tokens: SequenceTokens<'_>, is_shared: bool) {
        let estimates: Vec<(f64, f64)> = (tokens.logprobs.iter().zip(tokens.reference))
            .map(|(&logprob, &reference)| self.kl_estimator.estimate(logprob, reference))
            .collect();
        let mean = mean(estimates.iter().map(|(value, _)| *value));
        for (term, (value, slope)) in terms.iter_mut().zip(estimates) {
            term.kl = value;
            if self.kl_bias_correction {
                let moved = if is_shared { mean } else { value };
                term.loss += self.kl_coef * term.ratio * value;
                term.gradient += self.kl_coef * term.ratio * (moved + slope);
            } else {
                term.loss += self.kl_coef * value;
                term.gradient += self.kl_coef * slope;
            }
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

    /// Returns the weight of each token's entropy in the loss.
    pub fn entropy_weight(&self, totals: StepTotals) -> f64 {
        self.entropy_coef / totals.tokens.max(1) as f64
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

/// Returns the mean of `a - b`; 0 without any.
fn mean_difference(a: &[f64], b: &[f64]) -> f64 {
    mean(a.iter().zip(b).map(|(a, b)| a - b))
}

/// Returns the mean; 0 without any.
fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1);
    values.sum::<f64>() / count as f64
}

/// Sizes of one optimizer step, over all its micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepTotals {
    /// Sequences.
    pub sequences: usize,
    /// Tokens in the loss.
    pub tokens: usize,
}
