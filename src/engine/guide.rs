//! Which tokens may come next under a grammar: guided decoding.
//!
//! A [`GuideFactory`] knows a tokenizer's tokens as bytes and compiles grammars, written in
//! llguidance's dialect of Lark; [`crate::chat::AnswerGrammar`] writes them. A [`Guide`] follows one
//! turn. Tokens that the grammar does not admit have no probability, so the distribution that a token
//! is drawn from is not the model's: such turns are for serving, not for training.
//!
//! Schemas come from outside. Compiling and each token's mask have a budget of work, which
//! llguidance counts; a guide that runs out of it ends its own turn and no other
//! ([`Finished::guide_failure`](super::Finished::guide_failure)).

use std::fmt;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};

use super::{EngineError, Tokenizer};

/// Longest grammar, in bytes; compiling has a budget of its own.
const MAX_GRAMMAR_BYTES: usize = 1 << 20;

/// Compiles grammars for the tokens of one model.
pub struct GuideFactory {
    parsers: ParserFactory,
    stop_token_ids: Arc<[u32]>,
}

impl fmt::Debug for GuideFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuideFactory").finish_non_exhaustive()
    }
}

impl GuideFactory {
    /// Reads the tokens of a model with `vocab_size` of them, of which `stop_token_ids` end a turn. It
    /// takes a tenth of a second for a large vocabulary.
    ///
    /// # Errors
    ///
    /// Fails if there is no stop token, or if one is beyond the vocabulary.
    pub fn new(
        tokenizer: &Tokenizer,
        vocab_size: usize,
        stop_token_ids: &[u32],
    ) -> Result<Self, EngineError> {
        let refused = |reason: &str| EngineError::InvalidGrammar {
            reason: reason.to_owned(),
        };
        let &first = stop_token_ids
            .first()
            .ok_or_else(|| refused("the model has no token that could end the answer"))?;
        let vocab_size = u32::try_from(vocab_size)
            .map_err(|_| refused("a vocabulary has fewer than 2^32 tokens"))?;
        if stop_token_ids.iter().any(|&id| id >= vocab_size) {
            return Err(refused(
                "a token that ends the answer is beyond the vocabulary",
            ));
        }
        // Added tokens are told from text that spells them by a byte that no text has.
        let mut words: Vec<Vec<u8>> = (0..vocab_size)
            .map(|id| tokenizer.token_bytes(id).to_vec())
            .collect();
        for id in tokenizer.added_ids() {
            if let Some(word) = words.get_mut(id as usize) {
                word.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
            }
        }
        let info = TokRxInfo {
            vocab_size,
            tok_eos: first,
            tok_bos: None,
            tok_pad: None,
            tok_unk: None,
            tok_end_of_turn: None,
        };
        let trie = TokTrie::from(&info, &words).with_eos_tokens(stop_token_ids);
        let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut parsers =
            ParserFactory::new_simple(&tokens).map_err(|error| refused(&error.to_string()))?;
        parsers.quiet();
        parsers.limits_mut().verbose_errors = false;
        Ok(Self {
            parsers,
            stop_token_ids: stop_token_ids.into(),
        })
    }

    /// Compiles a grammar.
    ///
    /// # Errors
    ///
    /// [`EngineError::InvalidGrammar`] says what is wrong with it, or that it is too large.
    pub fn compile(&self, grammar: String) -> Result<Guide, EngineError> {
        if grammar.len() > MAX_GRAMMAR_BYTES {
            return Err(EngineError::InvalidGrammar {
                reason: format!("{} > {MAX_GRAMMAR_BYTES} bytes", grammar.len()),
            });
        }
        let mut matcher = Matcher::new(
            self.parsers
                .create_parser(TopLevelGrammar::from_lark(grammar)),
        );
        // What cannot begin is told here rather than at the first token.
        let begun = match matcher.get_error() {
            Some(error) => Err(error),
            None => matcher
                .compute_mask_or_eos()
                .map_err(|error| error.to_string()),
        };
        match begun {
            Ok(_) => Ok(Guide {
                matcher,
                stop_token_ids: Arc::clone(&self.stop_token_ids),
            }),
            Err(reason) => Err(EngineError::InvalidGrammar { reason }),
        }
    }
}

/// Follows one turn: which tokens the grammar admits behind those that were chosen.
#[derive(Clone)]
pub struct Guide {
    matcher: Matcher,
    stop_token_ids: Arc<[u32]>,
}

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide")
            .field("stop_reason", &self.matcher.stop_reason())
            .finish_non_exhaustive()
    }
}

impl Guide {
    /// Takes the probability of what is not admitted: sets its logits, `[vocab]`, to minus infinity.
    /// Where the grammar is at its end, or the guide has failed, only the tokens that end a turn are left.
    pub(super) fn mask(&mut self, logits: &mut [f32]) {
        let admitted = self.matcher.compute_mask_or_eos();
        for (token, logit) in (0..).zip(logits) {
            let is_admitted = match &admitted {
                Ok(admitted) => (token as usize) < admitted.len() && admitted.is_allowed(token),
                Err(_) => self.stop_token_ids.contains(&token),
            };
            if !is_admitted {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    /// Returns the tokens that end the turn when the grammar is at its end.
    pub(super) fn stop_token_ids(&self) -> &[u32] {
        &self.stop_token_ids
    }

    /// Returns whether the grammar admits a token next.
    pub fn admits(&mut self, token: u32) -> bool {
        let mut logits = vec![0.0; token as usize + 1];
        self.mask(&mut logits);
        logits[token as usize] == 0.0
    }

    /// Goes on behind a chosen token.
    pub fn push(&mut self, token: u32) {
        // The error stays in the matcher, for `failure`.
        drop(self.matcher.consume_token(token));
    }

    /// Returns why the guide can lead no further, if it cannot.
    pub fn failure(&self) -> Option<String> {
        self.matcher.get_error()
    }
}
