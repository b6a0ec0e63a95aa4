//! What a token's probability ratio and advantage come to: the policy's part of the loss.

use serde::{Deserialize, Serialize};

/// Whether a ratio compares one token or its whole sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RatioLevel {
    /// `exp(logp - old)` of the token.
    #[default]
    Token,
    /// The geometric mean of the ratios of the sequence's tokens in the loss (GSPO, Zheng et al. 2025,
    /// arXiv:2507.18071, equation 7). Tool output enters neither sum nor length.
    Sequence,
}

/// The policy's part of a token's loss, given its ratio `r` and its advantage `A`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Surrogate {
    /// `-min(r A, clip(r, low, high) A)` (Schulman et al. 2017, PPO, equation 7; Yu et al. 2025, DAPO,
    /// equation 8).
    Clipped {
        /// The lowest ratio that counts: `1 - epsilon`.
        low: f64,
        /// The highest: `1 + epsilon_high`.
        high: f64,
        /// Bounds the loss of tokens with negative advantage at this multiple of it (dual clip, Ye et
        /// al. 2020, arXiv:1912.09729, equation 5).
        dual_clip: Option<f64>,
    },
    /// `-stop_gradient(clip(r, low, high)) A log p`: clipped tokens keep their gradient (`MiniMax`-M1,
    /// arXiv:2506.13585, equation 4). The bounds are of the ratio itself: verl's `clip_ratio` of 0.2 and
    /// 0.28 are 0.8 and 1.28, TRL's `epsilon_high` of 5 is 5.
    Cispo {
        /// The lowest weight of a token.
        low: f64,
        /// The highest.
        high: f64,
    },
    /// `-4 sigmoid(tau (r - 1)) A / tau`: a soft gate instead of a clip (SAPO, arXiv:2511.20347).
    Sapo {
        /// Steepness for positive advantages; TRL's default is 1.
        tau_positive: f64,
        /// Steepness for the others; TRL's default is 1.05.
        tau_negative: f64,
    },
    /// `-r A`, but nothing where the token's probability has moved further than allowed in the
    /// direction that its advantage pushes it (DPPO with total variation, arXiv:2602.04879), and
    /// `kl (log r)²` everywhere (prime-rl's default).
    Dppo {
        /// How far a probability may have fallen.
        low: f64,
        /// How far it may have risen.
        high: f64,
        /// Weight of the squared log ratio.
        kl: f64,
    },
}

impl Default for Surrogate {
    fn default() -> Self {
        Self::Clipped {
            low: 0.8,
            high: 1.2,
            dual_clip: None,
        }
    }
}

/// A surrogate's value and its derivative.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct SurrogateTerm {
    pub(super) loss: f64,
    /// With respect to the log-probability, or at [`RatioLevel::Sequence`] to the log ratio.
    pub(super) gradient: f64,
    pub(super) is_clipped_low: bool,
    pub(super) is_clipped_high: bool,
}

impl Surrogate {
    /// Returns whether the gradient flows through the ratio, rather than through the token's own
    /// log-probability.
    pub(super) fn flows_through_ratio(&self) -> bool {
        !matches!(self, Self::Cispo { .. })
    }

    /// Returns the term of a token, with its log-probabilities now and when the policy was `old`.
    pub(super) fn term(&self, ratio: f64, logprob: f64, old: f64, advantage: f64) -> SurrogateTerm {
        match *self {
            Self::Clipped {
                low,
                high,
                dual_clip,
            } => clipped(ratio, advantage, low, high, dual_clip),
            Self::Cispo { low, high } => {
                let weight = ratio.clamp(low, high);
                SurrogateTerm {
                    loss: -weight * advantage * logprob,
                    gradient: -weight * advantage,
                    is_clipped_low: ratio < low,
                    is_clipped_high: ratio > high,
                }
            }
            Self::Sapo {
                tau_positive,
                tau_negative,
            } => {
                let tau = if advantage > 0.0 {
                    tau_positive
                } else {
                    tau_negative
                };
                let gate = 1.0 / (1.0 + (-tau * (ratio - 1.0)).exp());
                SurrogateTerm {
                    loss: -4.0 * gate / tau * advantage,
                    gradient: -4.0 * gate * (1.0 - gate) * ratio * advantage,
                    ..SurrogateTerm::default()
                }
            }
            Self::Dppo { low, high, kl } => {
                let moved = logprob.exp() - old.exp();
                let is_clipped_low = advantage < 0.0 && moved < -low;
                let is_clipped_high = advantage > 0.0 && moved > high;
                let policy = if is_clipped_low || is_clipped_high {
                    0.0
                } else {
                    -ratio * advantage
                };
                let log_ratio = logprob - old;
                SurrogateTerm {
                    loss: policy + kl * log_ratio * log_ratio,
                    gradient: policy + 2.0 * kl * log_ratio,
                    is_clipped_low,
                    is_clipped_high,
                }
            }
        }
    }
}

fn clipped(
    ratio: f64,
    advantage: f64,
    low: f64,
    high: f64,
    dual_clip: Option<f64>,
) -> SurrogateTerm {
    let is_clipped_low = ratio < low && advantage < 0.0;
    let is_clipped_high = ratio > high && advantage > 0.0;
    let (mut loss, mut gradient) = if is_clipped_low || is_clipped_high {
        (-ratio.clamp(low, high) * advantage, 0.0)
    } else {
        (-ratio * advantage, -ratio * advantage)
    };
    if let Some(bound) = dual_clip
        && advantage < 0.0
        && loss > -bound * advantage
    {
        (loss, gradient) = (-bound * advantage, 0.0);
    }
    SurrogateTerm {
        loss,
        gradient,
        is_clipped_low,
        is_clipped_high,
    }
}
