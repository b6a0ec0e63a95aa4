//! From what a client asks to what the engine is asked.

use std::collections::BTreeMap;

use super::wire::Common;
use super::{ApiError, App};
use crate::engine::{EngineError, GenerateRequest, SamplingParams, SequenceSeed};

/// Most tokens that end a turn besides the model's.
const MAX_STOP_TOKENS: usize = 64;
/// Most likeliest tokens with each token, as in OpenAI's API.
pub(super) const MAX_TOP_LOGPROBS: usize = 20;

impl Common {
    /// Returns what to generate behind `prompt`. `max_tokens` replaces the field of this name.
    pub(super) fn request(
        &self,
        app: &App,
        prompt: Vec<u32>,
        max_tokens: Option<usize>,
        top_logprobs: Option<usize>,
    ) -> Result<GenerateRequest, ApiError> {
        let params = self.params(app, prompt.len(), max_tokens, top_logprobs)?;
        app.engine.limits().check(&prompt, &params)?;
        Ok(GenerateRequest {
            prompt,
            params,
            seeds: self.seeds(app)?,
            stream: self.is_streamed(),
        })
    }

    fn params(
        &self,
        app: &App,
        prompt: usize,
        max_tokens: Option<usize>,
        top_logprobs: Option<usize>,
    ) -> Result<SamplingParams, ApiError> {
        let limit = app.engine.limits().max_context;
        if prompt >= limit {
            return Err(EngineError::PromptTooLong {
                tokens: prompt,
                limit,
            }
            .into());
        }
        let room = limit - prompt;
        let max_new_tokens = max_tokens.or(self.max_tokens).unwrap_or(room);
        if max_new_tokens > room {
            return Err(ApiError::Invalid {
                message: format!(
                    "{prompt} tokens of the prompt and {max_new_tokens} to generate are more than \
                     the {limit} of the context"
                ),
                param: Some("max_tokens"),
                code: Some("context_length_exceeded"),
            });
        }
        if top_logprobs.is_some_and(|count| count > MAX_TOP_LOGPROBS) {
            return Err(ApiError::invalid(
                "top_logprobs",
                format!("at most {MAX_TOP_LOGPROBS} likeliest tokens are told"),
            ));
        }
        let mut stop_token_ids = self.stop_token_ids.clone().unwrap_or_default();
        if stop_token_ids.len() > MAX_STOP_TOKENS {
            return Err(ApiError::invalid(
                "stop_token_ids",
                format!("{} > {MAX_STOP_TOKENS} tokens", stop_token_ids.len()),
            ));
        }
        if !self.ignore_eos.unwrap_or(false) {
            stop_token_ids.extend(&app.model.stop_token_ids);
        }
        let default = SamplingParams::default();
        Ok(SamplingParams {
            temperature: self.temperature.unwrap_or(default.temperature),
            top_p: self.top_p.unwrap_or(default.top_p),
            top_k: self
                .top_k
                .map_or(0, |top_k| usize::try_from(top_k).unwrap_or(0)),
            min_p: self.min_p.unwrap_or(default.min_p),
            repetition_penalty: self
                .repetition_penalty
                .unwrap_or(default.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or_default(),
            frequency_penalty: self.frequency_penalty.unwrap_or_default(),
            logit_bias: self.logit_bias()?,
            top_logprobs: top_logprobs.unwrap_or_default(),
            max_new_tokens,
            min_new_tokens: self.min_tokens.unwrap_or_default(),
            stop_token_ids,
            stop: self.stop.clone().map(Vec::from).unwrap_or_default(),
            thinking: None,
        })
    }

    /// Returns the biases by token id; JSON has strings for keys.
    fn logit_bias(&self) -> Result<BTreeMap<u32, f32>, ApiError> {
        let biases = self.logit_bias.iter().flatten();
        biases
            .map(|(token, &bias)| match token.parse() {
                Ok(token) => Ok((token, bias)),
                Err(_) => Err(ApiError::invalid(
                    "logit_bias",
                    "a key of `logit_bias` is not a token id",
                )),
            })
            .collect()
    }

    /// Returns a stream of random numbers for each choice. Without a `seed` no two requests have the
    /// same.
    fn seeds(&self, app: &App) -> Result<Vec<SequenceSeed>, ApiError> {
        let n = self.n.unwrap_or(1);
        let limit = app.config.max_choices.min(app.engine.max_requests());
        if !(1..=limit).contains(&n) {
            return Err(ApiError::invalid("n", format!("{n} is not in 1..={limit}")));
        }
        let (run, task) = match self.seed {
            Some(seed) => (seed.cast_unsigned(), 0),
            None => (rand::random(), rand::random()),
        };
        Ok((0..n as u64)
            .map(|choice| SequenceSeed::new(run, task, choice))
            .collect())
    }

    pub(super) fn is_streamed(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    pub(super) fn tells_usage(&self) -> bool {
        let options = self.stream_options.as_ref();
        options
            .and_then(|options| options.include_usage)
            .unwrap_or(false)
    }

    pub(super) fn returns_token_ids(&self) -> bool {
        self.return_token_ids.unwrap_or(false)
    }
}
