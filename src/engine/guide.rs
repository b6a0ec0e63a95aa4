//! Which tokens may come next under a grammar: guided decoding.
//!
//! A [`GuideFactory`] knows a tokenizer's tokens as bytes and compiles grammars, written in
//! llguidance's dialect of Lark; [`crate::chat::AnswerGrammar`] writes them. A [`Guide`] follows one
//! turn. Tokens that the grammar does not admit have no probability, so the distribution that a token
//! is drawn from is not the model's: such turns are for serving, not for training.
//!
//! Schemas come from outside. llguidance counts the work of automata, so that a guide which runs out of it
//! ends its own turn and no other ([`Finished::guide_failure`](super::Finished::guide_failure)). It does
//! not count how deeply it recurses, nor what it copies: the first is why grammars are compiled on a
//! thread with a large stack, and [`crate::chat::AnswerGrammar`] refuses schemas that are large.

use std::fmt;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};

use super::{EngineError, SamplingParams, Tokenizer};

/// Longest grammar, in bytes. The worst patterns of that length take 4 seconds.
const MAX_GRAMMAR_BYTES: usize = 1 << 18;
/// Stack of a thread that compiles, in bytes. A step of recursion takes 6 KiB, and there is one for each of
/// the 20,000 values that the schemas of a grammar have at most. What is not touched takes no memory.
const STACK_BYTES: usize = 256 << 20;
/// Longest reason why a grammar is refused, in characters.
const MAX_REASON: usize = 500;

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
    /// [`EngineError::Unguidable`] if there is no stop token, if one is beyond the vocabulary, or if llguidance
    /// cannot take the tokens.
    pub fn new(
        tokenizer: &Tokenizer,
        vocab_size: usize,
        stop_token_ids: &[u32],
    ) -> Result<Self, EngineError> {
        let refused = |reason: &str| EngineError::Unguidable {
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

    /// Refuses parameters that would keep a turn from ending where its grammar does: by `min_new_tokens`, or
    /// without the model's stop tokens.
    ///
    /// # Errors
    ///
    /// [`EngineError::InvalidSampling`] names the parameter.
    pub fn check(&self, params: &SamplingParams) -> Result<(), EngineError> {
        check(params, &self.stop_token_ids)
    }

    /// Compiles a grammar. It may take seconds.
    ///
    /// # Errors
    ///
    /// [`EngineError::InvalidGrammar`] says what is wrong with it, or that it is too large.
    pub fn compile(&self, grammar: String) -> Result<Guide, EngineError> {
        if grammar.len() > MAX_GRAMMAR_BYTES {
            return Err(EngineError::InvalidGrammar {
                reason: format!(
                    "it makes a grammar of {} bytes, and {MAX_GRAMMAR_BYTES} are the most",
                    grammar.len()
                ),
            });
        }
        let refused = |reason: String| EngineError::InvalidGrammar { reason };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new()
                .name("compile grammar".to_owned())
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, || self.compile_here(grammar));
            let thread = thread.map_err(|error| refused(format!("no thread for it: {error}")))?;
            let made = thread.join();
            made.unwrap_or_else(|_| Err(refused(PANICKED.to_owned())))
        })
    }

    fn compile_here(&self, grammar: String) -> Result<Guide, EngineError> {
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
            Err(message) => Err(EngineError::InvalidGrammar {
                reason: reason(&message),
            }),
        }
    }
}

/// What is said where llguidance panics, which names none of its insides.
const PANICKED: &str = "it is too large, or has a keyword with a value that cannot be read";

/// What begins the part of a message that is not for whoever wrote the schema: remedies within llguidance, and
/// names of definitions, which are ours.
const NOT_FOR_CLIENTS: [&str; 5] = [
    " Enable 'coerce_one_of'",
    "; consider making your grammar",
    "; try avoiding",
    "; either increase",
    ": #/$defs/",
];

/// Returns what of llguidance's message is about the schema: without our grammar, which it quotes, the
/// places in it, and remedies that are not for whoever wrote the schema.
fn reason(message: &str) -> String {
    if message.starts_with("panic:") {
        return PANICKED.to_owned();
    }
    let (_, inner) = message
        .split_once("failed to compile JSON schema: ")
        .unwrap_or(("", message));
    let mut lines = inner.lines();
    let first = lines.next().unwrap_or_default();
    // Of a pattern that cannot be read, the last line says why.
    let line = match lines.find_map(|line| line.trim().strip_prefix("error: ")) {
        Some(why) if first.ends_with(':') => &format!("{first} {why}"),
        _ => first,
    };
    let end = NOT_FOR_CLIENTS
        .iter()
        .filter_map(|mark| line.find(mark))
        .min();
    let line = &line[..end.unwrap_or(line.len())];
    let mut reason: String = line.chars().take(MAX_REASON).collect();
    if reason.len() < line.len() {
        reason.push('…');
    }
    if reason.contains("oneOf constraints are not supported") {
        reason.push_str(" Use `anyOf`");
    }
    reason
}

fn check(params: &SamplingParams, stop_token_ids: &[u32]) -> Result<(), EngineError> {
    let refused = |field| EngineError::InvalidSampling {
        field,
        reason: "it may keep an answer that is guided from ending where it must".to_owned(),
    };
    if params.min_new_tokens > 0 {
        return Err(refused("min_new_tokens"));
    }
    let ends = |token| params.stop_token_ids.contains(token);
    if !stop_token_ids.iter().all(ends) {
        return Err(refused("stop_token_ids"));
    }
    Ok(())
}

/// Follows one turn: which tokens the grammar admits behind those that were chosen.
///
/// Clones follow turns of their own, and share what they have found out about the grammar: that takes the
/// memory of one, and the choices of a request wait for each other while it grows.
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

    /// As [`GuideFactory::check`].
    pub(super) fn check(&self, params: &SamplingParams) -> Result<(), EngineError> {
        check(params, &self.stop_token_ids)
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
        self.matcher.get_error().map(|message| reason(&message))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::place_and_excerpt(
        "at 2(7): failed to compile JSON schema: Invalid type: strng\n   1 | start: json\n   2 | json: %json",
        "Invalid type: strng"
    )]
    #[case::definition(
        "at 2(7): failed to compile JSON schema: Unsatisfiable schema: x\n  while processing #/$defs/3\n   1 | start",
        "Unsatisfiable schema: x"
    )]
    #[case::panic(
        "panic: byte index 100 is not a char boundary\n<backtrace>\n0: llguidance::x",
        PANICKED
    )]
    #[case::pattern(
        "at 2(7): failed to compile JSON schema: regex parse error:\n    (\n    ^\nerror: unclosed group\n   1 | start",
        "regex parse error: unclosed group"
    )]
    #[case::remedy(
        "Current row has 3000 items; max is 2000; consider making your grammar left-recursive if it's right-recursive",
        "Current row has 3000 items; max is 2000"
    )]
    #[case::limits(
        "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable limits.x",
        "lexer precomputation failed"
    )]
    #[case::state("too complex\n<non-verbose/>", "too complex")]
    fn reasons_are_about_the_schema(#[case] message: &str, #[case] expected: &str) {
        assert_eq!(reason(message), expected);
    }

    #[test]
    fn reasons_are_short() {
        assert_eq!(reason(&"é".repeat(9000)).chars().count(), MAX_REASON + 1);
    }
}
