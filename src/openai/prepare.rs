//! From what a client asks to what the engine is asked.

use super::wire::{Common, Keys};
use super::{ApiError, App, ServedModel};
use crate::engine::{
    EngineError, EngineHandle, GenerateRequest, SamplingParams, SequenceSeed, ThinkingBudget,
};

/// Most tokens that end a turn besides the model's.
const MAX_STOP_TOKENS: usize = 64;
/// Most likeliest tokens with each token, as in OpenAI's API.
const MAX_TOP_LOGPROBS: usize = 20;

impl Common {
    /// Returns what to generate behind `prompt`, in at most `max_choices` ways.
    pub(crate) fn request(
        &self,
        engine: &EngineHandle,
        model: &ServedModel,
        max_choices: usize,
        prompt: Vec<u32>,
    ) -> Result<GenerateRequest, ApiError> {
        let params = self.params(engine, model, prompt.len())?;
        let checked = engine.limits().check(&prompt, &params);
        checked.map_err(|error| self.keys.refuse(error))?;
        Ok(GenerateRequest {
            prompt,
            params,
            seeds: self.seeds(max_choices)?,
            guide: None,
            stream: self.stream,
        })
    }

    fn params(
        &self,
        engine: &EngineHandle,
        model: &ServedModel,
        prompt: usize,
    ) -> Result<SamplingParams, ApiError> {
        let limit = engine.limits().max_context;
        if prompt >= limit {
            return Err(self.keys.refuse(EngineError::PromptTooLong {
                tokens: prompt,
                limit,
            }));
        }
        let room = limit - prompt;
        let max_new_tokens = self.max_tokens.unwrap_or(room);
        if max_new_tokens > room {
            return Err(ApiError::Invalid {
                message: format!(
                    "{prompt} tokens of the prompt and {max_new_tokens} to generate are more than \
                     the {limit} of the context"
                ),
                param: Some(self.keys.max_tokens),
                code: Some("context_length_exceeded"),
            });
        }
        let top_logprobs = self.top_logprobs.unwrap_or_default();
        if top_logprobs > MAX_TOP_LOGPROBS {
            return Err(ApiError::invalid(
                self.keys.top_logprobs,
                format!("{top_logprobs} > {MAX_TOP_LOGPROBS} likeliest tokens"),
            ));
        }
        let mut stop_token_ids = self.stop_token_ids.clone();
        if stop_token_ids.len() > MAX_STOP_TOKENS {
            return Err(ApiError::invalid(
                "stop_token_ids",
                format!("{} > {MAX_STOP_TOKENS} tokens", stop_token_ids.len()),
            ));
        }
        if !self.ignore_eos {
            stop_token_ids.extend(&model.stop_token_ids);
        }
        let thinking = self
            .thinking_token_budget
            .map(|tokens| ThinkingBudget::new(&model.tokenizer, tokens))
            .transpose()
            .map_err(|error| self.keys.refuse(error))?;
        let default = SamplingParams::default();
        Ok(SamplingParams {
            temperature: self.temperature.unwrap_or(default.temperature),
            top_p: self.top_p.unwrap_or(default.top_p),
            top_k: self.top_k()?,
            min_p: self.min_p.unwrap_or(default.min_p),
            repetition_penalty: self
                .repetition_penalty
                .unwrap_or(default.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or_default(),
            frequency_penalty: self.frequency_penalty.unwrap_or_default(),
            logit_bias: self.logit_bias.clone(),
            top_logprobs,
            max_new_tokens,
            min_new_tokens: self.min_tokens.unwrap_or_default(),
            stop_token_ids,
            stop: self.stop.clone(),
            thinking,
        })
    }

    fn top_k(&self) -> Result<usize, ApiError> {
        match self.top_k {
            None | Some(-1) => Ok(0),
            Some(top_k) => usize::try_from(top_k).map_err(|_| {
                let message = format!("{top_k} is neither a number of tokens nor -1, for all");
                ApiError::invalid("top_k", message)
            }),
        }
    }

    /// Returns a stream of random numbers for each choice. Without a `seed` no two requests have the
    /// same.
    fn seeds(&self, limit: usize) -> Result<Vec<SequenceSeed>, ApiError> {
        let n = self.n;
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
}

impl App {
    /// As [`check_length`], for this server.
    pub(super) fn check_length(&self, prompt: &str, keys: Keys) -> Result<(), ApiError> {
        check_length(&self.engine, &self.model, prompt, keys)
    }
}

/// Refuses a prompt that is too long for the context whatever its tokens are: tokenizing it would take
/// a hundred times its memory.
pub(crate) fn check_length(
    engine: &EngineHandle,
    model: &ServedModel,
    prompt: &str,
    keys: Keys,
) -> Result<(), ApiError> {
    let context = engine.limits().max_context;
    // A normalizer may have made the text longer.
    let most = context
        .saturating_mul(model.tokenizer.longest_token())
        .saturating_mul(4);
    if prompt.len() <= most {
        return Ok(());
    }
    Err(ApiError::Invalid {
        message: format!(
            "the prompt has {} bytes, more than the {context} tokens of the context hold",
            prompt.len()
        ),
        param: Some(keys.prompt),
        code: Some("context_length_exceeded"),
    })
}

impl Keys {
    /// Returns the engine's refusal of a request in the words of the client.
    pub(super) fn refuse(self, error: EngineError) -> ApiError {
        match error {
            EngineError::InvalidSampling { field, reason } => {
                let field = match field {
                    "max_new_tokens" => self.max_tokens,
                    "min_new_tokens" => "min_tokens",
                    "top_logprobs" => self.top_logprobs,
                    "thinking" => "thinking_token_budget",
                    field => field,
                };
                ApiError::invalid(field, format!("invalid `{field}`: {reason}"))
            }
            EngineError::PromptTooLong { tokens, limit } => ApiError::Invalid {
                message: format!(
                    "the prompt has {tokens} tokens, which leaves no room to generate within the \
                     {limit} of the context"
                ),
                param: Some(self.prompt),
                code: Some("context_length_exceeded"),
            },
            EngineError::EmptyPrompt | EngineError::TokenOutOfRange { .. } => {
                ApiError::invalid(self.prompt, error.to_string())
            }
            error => ApiError::internal(&error),
        }
    }
}
