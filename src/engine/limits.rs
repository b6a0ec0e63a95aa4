//! What an engine can be asked for, known before it is asked.

use super::{EngineError, SamplingParams};

/// The bounds of every request to one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestLimits {
    /// Longest sequence, prompt included.
    pub max_context: usize,
    /// Tokens of the model's vocabulary.
    pub vocab_size: usize,
    /// Whether stop strings can be looked for.
    pub has_tokenizer: bool,
}

impl RequestLimits {
    /// Checks a request.
    ///
    /// # Errors
    ///
    /// Fails if the prompt is empty, too long or outside the vocabulary, or if a parameter is out of
    /// range.
    pub fn check(self, prompt: &[u32], params: &SamplingParams) -> Result<(), EngineError> {
        self.check_params(params)?;
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if prompt.len() >= self.max_context {
            return Err(EngineError::PromptTooLong {
                tokens: prompt.len(),
                limit: self.max_context,
            });
        }
        self.check_tokens(prompt)
    }

    fn check_params(self, params: &SamplingParams) -> Result<(), EngineError> {
        params.validate()?;
        if !params.stop.is_empty() && !self.has_tokenizer {
            return Err(EngineError::NoTokenizer);
        }
        if let Some(thinking) = &params.thinking {
            self.check_tokens(&thinking.close_token_ids)?;
        }
        let invalid = |field, reason| Err(EngineError::InvalidSampling { field, reason });
        let is_unknown = |token: &&u32| **token as usize >= self.vocab_size;
        for (field, token) in [
            ("logit_bias", params.logit_bias.keys().find(is_unknown)),
            (
                "stop_token_ids",
                params.stop_token_ids.iter().find(is_unknown),
            ),
        ] {
            if let Some(token) = token {
                let reason = format!(
                    "token {token} is outside the vocabulary of {}",
                    self.vocab_size
                );
                return invalid(field, reason);
            }
        }
        // Stop tokens have no probability at first; something else must have.
        if params.min_new_tokens > 0 && params.stop_token_ids.len() >= self.vocab_size {
            let reason = format!(
                "{} leave nothing of the vocabulary of {} to reach the least tokens of the turn",
                params.stop_token_ids.len(),
                self.vocab_size
            );
            return invalid("stop_token_ids", reason);
        }
        Ok(())
    }

    /// Checks that tokens are in the vocabulary.
    pub(super) fn check_tokens(self, tokens: &[u32]) -> Result<(), EngineError> {
        let is_unknown = |token: &&u32| **token as usize >= self.vocab_size;
        match tokens.iter().find(is_unknown) {
            Some(&token) => Err(EngineError::TokenOutOfRange {
                token,
                vocab_size: self.vocab_size,
            }),
            None => Ok(()),
        }
    }
}
