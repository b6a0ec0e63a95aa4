//! What a request asks of the sampler.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::engine::{EngineError, Tokenizer};

/// Most strings that may end one turn.
const MAX_STOP_STRINGS: usize = 64;
/// Longest string that may end a turn, in bytes.
const MAX_STOP_STRING_BYTES: usize = 1024;
/// Most likeliest tokens that are reported with each token.
const MAX_TOP_LOGPROBS: usize = 1024;

/// How tokens are chosen, and when a turn ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy. Default: 1.
    pub temperature: f32,
    /// Keeps the smallest set of tokens with this mass; 1 keeps all. Default: 1.
    pub top_p: f32,
    /// Keeps this many tokens; 0 keeps all. Default: 0.
    pub top_k: usize,
    /// Keeps tokens with at least this fraction of the best one's probability. Default: 0.
    pub min_p: f32,
    /// Divides positive logits of tokens of the prompt and the turn, and multiplies negative ones;
    /// 1 changes nothing. Default: 1.
    pub repetition_penalty: f32,
    /// Taken off the logits of tokens of the turn. Default: 0.
    pub presence_penalty: f32,
    /// Taken off the logits of tokens of the turn, once for each occurrence. Default: 0.
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens. Default: none.
    pub logit_bias: BTreeMap<u32, f32>,
    /// How many of the likeliest tokens are reported with each token. Default: 0.
    pub top_logprobs: usize,
    /// Most tokens of one turn, the stop token included. Default: 512.
    pub max_new_tokens: usize,
    /// Tokens of a turn before it may end by itself: until then stop tokens have no probability,
    /// and stop strings end nothing. Default: 0.
    pub min_new_tokens: usize,
    /// Tokens that end a turn; they are part of it. Default: none.
    pub stop_token_ids: Vec<u32>,
    /// Texts that end a turn, wherever they stand among its tokens; an engine needs a tokenizer to
    /// find them. The tokens stay whole, and [`Finished::stop_text`](crate::engine::Finished) says
    /// where the text is cut. Default: none.
    pub stop: Vec<String>,
    /// How long the model may think. Default: without limit.
    pub thinking: Option<ThinkingBudget>,
}

/// Ends a turn's reasoning at a number of tokens, by tokens that are not sampled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ThinkingBudget {
    /// Most sampled tokens of reasoning in one turn.
    pub max_tokens: usize,
    /// The token that opens reasoning: `<think>`.
    pub start_token_id: u32,
    /// The token that closes it: `</think>`.
    pub end_token_id: u32,
    /// What is put behind reasoning that is too long: the closing token among newlines.
    pub close_token_ids: Vec<u32>,
}

impl ThinkingBudget {
    /// Returns a budget for a model that reasons between `<think>` and `</think>`, as Qwen3 and most
    /// others do.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer has no such tokens.
    pub fn new(tokenizer: &Tokenizer, max_tokens: usize) -> Result<Self, EngineError> {
        let id = |token: &str| {
            let unknown = || EngineError::InvalidSampling {
                field: "thinking",
                reason: format!("the tokenizer has no token `{token}`"),
            };
            tokenizer.token_to_id(token).ok_or_else(unknown)
        };
        Ok(Self {
            max_tokens,
            start_token_id: id("<think>")?,
            end_token_id: id("</think>")?,
            close_token_ids: tokenizer.encode("\n</think>\n\n")?,
        })
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            top_logprobs: 0,
            max_new_tokens: 512,
            min_new_tokens: 0,
            stop_token_ids: Vec::new(),
            stop: Vec::new(),
            thinking: None,
        }
    }
}

impl SamplingParams {
    /// Checks each parameter's range.
    ///
    /// # Errors
    ///
    /// [`EngineError::InvalidSampling`] names the first one at fault.
    pub fn validate(&self) -> Result<(), EngineError> {
        let check = |holds: bool, field, reason: &dyn Fn() -> String| {
            if holds {
                return Ok(());
            }
            let reason = reason();
            Err(EngineError::InvalidSampling { field, reason })
        };
        let within = |value: f32, least: f32, most: f32, field| {
            check((least..=most).contains(&value), field, &|| {
                format!("{value:?} is not in {least}..={most}")
            })
        };
        // Below this, dividing by the temperature overflows; 0 asks for greedy.
        let is_temperature = self.temperature == 0.0 || (1e-3..=1e3).contains(&self.temperature);
        check(is_temperature, "temperature", &|| {
            format!("{:?} is neither 0 nor in 0.001..=1000", self.temperature)
        })?;
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", &|| {
            format!("{:?} is not in (0, 1]", self.top_p)
        })?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", &|| {
            format!("{:?} is not in [0, 1]", self.min_p)
        })?;
        // Farther out, logits overflow.
        within(self.repetition_penalty, 0.01, 100.0, "repetition_penalty")?;
        within(self.presence_penalty, -2.0, 2.0, "presence_penalty")?;
        within(self.frequency_penalty, -2.0, 2.0, "frequency_penalty")?;
        for &bias in self.logit_bias.values() {
            within(bias, -100.0, 100.0, "logit_bias")?;
        }
        check(
            self.top_logprobs <= MAX_TOP_LOGPROBS,
            "top_logprobs",
            &|| format!("{} > {MAX_TOP_LOGPROBS}", self.top_logprobs),
        )?;
        check(self.max_new_tokens > 0, "max_new_tokens", &|| {
            "0 leaves nothing to generate".to_owned()
        })?;
        check(
            self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            &|| {
                format!(
                    "{} > {}, the most tokens of the turn",
                    self.min_new_tokens, self.max_new_tokens
                )
            },
        )?;
        check(self.stop.len() <= MAX_STOP_STRINGS, "stop", &|| {
            format!("{} > {MAX_STOP_STRINGS} strings", self.stop.len())
        })?;
        let is_usable = |stop: &String| (1..=MAX_STOP_STRING_BYTES).contains(&stop.len());
        check(self.stop.iter().all(is_usable), "stop", &|| {
            format!("a string is empty or longer than {MAX_STOP_STRING_BYTES} bytes")
        })?;
        if let Some(thinking) = &self.thinking {
            let closes = thinking.close_token_ids.contains(&thinking.end_token_id);
            check(closes, "thinking", &|| {
                "`close_token_ids` lacks the `end_token_id`".to_owned()
            })?;
        }
        Ok(())
    }

    /// Returns whether the best token is taken without a draw.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Returns whether tokens are drawn from a part of the vocabulary only, so that
    /// [`TokenLogprob::logprob`](super::TokenLogprob) is not the probability of the draw.
    pub fn is_truncated(&self) -> bool {
        !self.is_greedy() && (self.top_p < 1.0 || self.top_k > 0 || self.min_p > 0.0)
    }

    /// Returns whether logits are changed before the softmax, so that
    /// [`TokenLogprob::logprob`](super::TokenLogprob) is not the probability of the draw.
    pub fn is_adjusted(&self) -> bool {
        self.adjustment().is_some()
    }

    /// Returns whether the temperature is all that makes the distribution, and the token all that is
    /// asked for: such rows are sampled where the logits are.
    pub(in crate::engine) fn is_plain(&self) -> bool {
        !self.is_adjusted() && !self.is_truncated() && self.top_logprobs == 0
    }

    /// Returns the first parameter that changes logits.
    fn adjustment(&self) -> Option<&'static str> {
        [
            ("repetition_penalty", self.repetition_penalty != 1.0),
            ("presence_penalty", self.presence_penalty != 0.0),
            ("frequency_penalty", self.frequency_penalty != 0.0),
            ("logit_bias", !self.logit_bias.is_empty()),
            ("min_new_tokens", self.min_new_tokens > 0),
        ]
        .into_iter()
        .find_map(|(field, is_used)| is_used.then_some(field))
    }

    /// Checks that a trainer can recompute the distribution that tokens are drawn from: the
    /// model's own at a temperature above 0.
    ///
    /// # Errors
    ///
    /// [`EngineError::NotTrainable`] names the first parameter that makes another one.
    pub fn check_trainable(&self) -> Result<(), EngineError> {
        let cut = [
            ("temperature", self.is_greedy()),
            ("top_p", self.top_p < 1.0),
            ("top_k", self.top_k > 0),
            ("min_p", self.min_p > 0.0),
        ];
        let cut = cut
            .into_iter()
            .find_map(|(field, is_used)| is_used.then_some(field));
        match cut.or_else(|| self.adjustment()) {
            Some(field) => Err(EngineError::NotTrainable { field }),
            None => Ok(()),
        }
    }
}
