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
        for id in (0..vocab_size).filter(|&id| tokenizer.is_added(id)) {
            words[id as usize].insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
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

    /// Goes on behind a chosen token.
    pub(super) fn push(&mut self, token: u32) {
        // The error stays in the matcher, for `failure`.
        drop(self.matcher.consume_token(token));
    }

    /// Returns why the guide can lead no further, if it cannot.
    pub(super) fn failure(&self) -> Option<String> {
        self.matcher.get_error()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::chat::{
        AnswerGrammar, AnswerReasoning, AnswerShape, ToolCallFormat, ToolSpec, parse_calls,
    };

    const MARKS: [&str; 5] = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|end|>",
    ];

    fn tokenizer(has_marks: bool) -> Tokenizer {
        let marks = if has_marks { &MARKS[..] } else { &MARKS[4..] };
        Tokenizer::byte_level(marks).unwrap()
    }

    fn factory(tokenizer: &Tokenizer) -> GuideFactory {
        let end = tokenizer.token_to_id("<|end|>").unwrap();
        GuideFactory::new(tokenizer, tokenizer.vocab_size() + 3, &[end]).unwrap()
    }

    /// Returns whether the grammar admits `text` and then the end; what it admits of it otherwise.
    fn follow(tokenizer: &Tokenizer, grammar: String, text: &str) -> Result<(), String> {
        let factory = factory(tokenizer);
        let mut guide = factory
            .compile(grammar)
            .map_err(|error| error.to_string())?;
        let end = tokenizer.token_to_id("<|end|>").unwrap();
        let ids = tokenizer.encode(text).unwrap();
        for (at, &token) in ids.iter().chain([&end]).enumerate() {
            let mut logits = vec![0.0; tokenizer.vocab_size() + 3];
            guide.mask(&mut logits);
            assert!(logits.contains(&0.0), "nothing is admitted");
            if logits[token as usize] != 0.0 {
                return Err(tokenizer.decode(&ids[..at]).unwrap());
            }
            if token != end {
                guide.push(token);
            }
        }
        assert_eq!(guide.failure(), None);
        Ok(())
    }

    fn tools() -> Vec<ToolSpec> {
        let parameters = json!({
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "lines": {"$ref": "#/$defs/range"},
                "mode": {"type": "string", "enum": ["r", "w"]},
            },
            "required": ["path"],
            "additionalProperties": false,
            "$defs": {"range": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
        });
        vec![
            ToolSpec::new("open", "", parameters),
            ToolSpec {
                parameters: None,
                ..ToolSpec::new("done", "", Value::Null)
            },
        ]
    }

    fn grammar(
        format: ToolCallFormat,
        tokenizer: &Tokenizer,
        shape: &AnswerShape<'_>,
        reasoning: AnswerReasoning,
    ) -> String {
        let token_id = |mark: &str| tokenizer.token_to_id(mark);
        AnswerGrammar {
            format,
            token_id: &token_id,
        }
        .write(shape, reasoning)
    }

    #[rstest]
    #[case::hermes(
        ToolCallFormat::Hermes,
        "<tool_call>\n{\"name\": \"open\", \"arguments\": {\"path\": \"</tool_call>\\n\", \"lines\": [1, 20]}}\n</tool_call>"
    )]
    #[case::two(
        ToolCallFormat::Hermes,
        "<tool_call>\n{\"name\": \"done\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"open\", \"arguments\": {\"path\": \"\"}}\n</tool_call>"
    )]
    #[case::llama(
        ToolCallFormat::Llama3,
        "{\"name\": \"open\", \"parameters\": {\"path\": \"a\", \"mode\": \"w\"}}"
    )]
    #[case::xml(
        ToolCallFormat::QwenXml,
        "<tool_call>\n<function=open>\n<parameter=path>\na <b>\n\n\"c\"\n</parameter>\n<parameter=lines>\n[1, 2]\n</parameter>\n<parameter=mode>\nr\n</parameter>\n</function>\n</tool_call>"
    )]
    #[case::xml_without(
        ToolCallFormat::QwenXml,
        "<tool_call>\n<function=done>\n</function>\n</tool_call>"
    )]
    fn what_is_admitted_can_be_read(
        #[case] format: ToolCallFormat,
        #[case] text: &str,
        #[values(true, false)] has_marks: bool,
    ) {
        let tokenizer = tokenizer(has_marks);
        let tools = tools();
        let shape = AnswerShape::Calls {
            tools: &tools,
            allows_many: true,
        };
        let grammar = grammar(format, &tokenizer, &shape, AnswerReasoning::Optional);
        // Inside a string the mark is spelled in ordinary characters.
        let literal = text.find("\"</tool_call>").map(|at| at..at + 13);
        let text_ids = tokenizer.encode_chat(text, literal.as_slice()).unwrap();
        let mut guide = factory(&tokenizer).compile(grammar).unwrap();
        for token in text_ids {
            let mut logits = vec![0.0; tokenizer.vocab_size()];
            guide.mask(&mut logits);
            assert_eq!(
                logits[token as usize],
                0.0,
                "{token} {:?}",
                tokenizer.decode(&[token])
            );
            guide.push(token);
        }
        let parsed = parse_calls(text, format, &tools);
        assert_eq!(parsed.content.trim(), "");
        for call in parsed.tool_calls {
            assert!(
                tools
                    .iter()
                    .any(|tool| tool.name == call.as_ref().unwrap().name)
            );
        }
    }

    #[rstest]
    #[case::unknown_tool(
        ToolCallFormat::Hermes,
        "<tool_call>\n{\"name\": \"x\"",
        "<tool_call>\n{\"name\": \""
    )]
    #[case::missing_argument(
        ToolCallFormat::Hermes,
        "<tool_call>\n{\"name\": \"open\", \"arguments\": {}",
        "<tool_call>\n{\"name\": \"open\", \"arguments\": {"
    )]
    #[case::wrong_type(
        ToolCallFormat::QwenXml,
        "<tool_call>\n<function=open>\n<parameter=path>\nx\n</parameter>\n<parameter=lines>\nx",
        "<tool_call>\n<function=open>\n<parameter=path>\nx\n</parameter>\n<parameter=lines>\n"
    )]
    #[case::not_in_the_enum(
        ToolCallFormat::QwenXml,
        "<tool_call>\n<function=open>\n<parameter=path>\nx\n</parameter>\n<parameter=mode>\nx",
        "<tool_call>\n<function=open>\n<parameter=path>\nx\n</parameter>\n<parameter=mode>\n"
    )]
    #[case::text_first(ToolCallFormat::Hermes, "I call", "")]
    #[case::ends_early(ToolCallFormat::Llama3, "{\"name\": \"done\"", "{\"name\": \"done\"")]
    fn what_cannot_be_read_is_not_admitted(
        #[case] format: ToolCallFormat,
        #[case] text: &str,
        #[case] admitted: &str,
    ) {
        let tokenizer = tokenizer(true);
        let tools = tools();
        let shape = AnswerShape::Calls {
            tools: &tools,
            allows_many: false,
        };
        let grammar = grammar(format, &tokenizer, &shape, AnswerReasoning::Optional);
        assert_eq!(follow(&tokenizer, grammar, text), Err(admitted.to_owned()));
    }

    #[test]
    fn text_may_precede_calls_and_calls_keep_to_their_schemas() {
        let tokenizer = tokenizer(true);
        let tools = tools();
        let shape = AnswerShape::TextAndCalls { tools: &tools };
        let follow = |text: &str| {
            follow(
                &tokenizer,
                grammar(
                    ToolCallFormat::Hermes,
                    &tokenizer,
                    &shape,
                    AnswerReasoning::Optional,
                ),
                text,
            )
        };
        follow("just text {").unwrap();
        follow("I call.\n<tool_call>\n{\"name\": \"done\", \"arguments\": {}}\n</tool_call>")
            .unwrap();
        follow("<think>\nhm <tool>\n</think>\n\n<tool_call>\n{\"name\": \"done\", \"arguments\": {}}\n</tool_call>").unwrap();
        follow("a <tool_call>\n{\"name\": 5").unwrap_err();
        follow("a <tool_call>\n{\"name\": \"done\", \"arguments\": {}}\n</tool_call> more")
            .unwrap_err();
    }

    #[test]
    fn reasoning_comes_before_json() {
        let tokenizer = tokenizer(true);
        let schema =
            json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
        let shape = AnswerShape::Json {
            schema: &schema,
            is_strict: true,
            tools: &[],
        };
        for (reasoning, text) in [
            (
                AnswerReasoning::Optional,
                "<think>\nhm {\n</think>\n\n{\"a\": 1}",
            ),
            (AnswerReasoning::Optional, "{\n  \"a\": 1\n}"),
            (AnswerReasoning::Open, "hm\n</think>\n\n{\"a\":1}"),
            (AnswerReasoning::Open, "</think>{\"a\":1}"),
        ] {
            let grammar = grammar(ToolCallFormat::Hermes, &tokenizer, &shape, reasoning);
            follow(&tokenizer, grammar, text).unwrap();
        }
        let open = grammar(
            ToolCallFormat::Hermes,
            &tokenizer,
            &shape,
            AnswerReasoning::Open,
        );
        follow(&tokenizer, open, "<think>").unwrap_err();
        // Blanks without end are not admitted.
        let grammar = grammar(
            ToolCallFormat::Hermes,
            &tokenizer,
            &shape,
            AnswerReasoning::Optional,
        );
        let admitted = follow(&tokenizer, grammar, &format!("{{{}", " ".repeat(40))).unwrap_err();
        assert_eq!(admitted.len(), 17);
    }

    #[rstest]
    #[case::not_a_schema(json!(5))]
    #[case::bad_pattern(json!({"type": "string", "pattern": "("}))]
    #[case::elsewhere(json!({"$ref": "https://example.org/schema.json"}))]
    #[case::nothing_fits(json!({"allOf": [{"type": "string"}, {"type": "integer"}]}))]
    #[case::too_long(json!({"const": "x".repeat(MAX_GRAMMAR_BYTES)}))]
    fn a_schema_that_cannot_be_is_refused(#[case] schema: Value) {
        let tokenizer = tokenizer(true);
        let shape = AnswerShape::Json {
            schema: &schema,
            is_strict: false,
            tools: &[],
        };
        let grammar = grammar(
            ToolCallFormat::Hermes,
            &tokenizer,
            &shape,
            AnswerReasoning::Optional,
        );
        let error = factory(&tokenizer).compile(grammar).unwrap_err();
        assert!(
            matches!(error, EngineError::InvalidGrammar { .. }),
            "{error}"
        );
    }

    #[test]
    fn a_schema_may_spell_no_rule_of_the_grammar() {
        let tokenizer = tokenizer(true);
        let name = "x\" | /.*/ \nstart: \"y";
        let schema = json!({"const": name});
        let shape = AnswerShape::Json {
            schema: &schema,
            is_strict: true,
            tools: &[],
        };
        let grammar = grammar(
            ToolCallFormat::Hermes,
            &tokenizer,
            &shape,
            AnswerReasoning::Optional,
        );
        follow(&tokenizer, grammar.clone(), &Value::from(name).to_string()).unwrap();
        assert_eq!(follow(&tokenizer, grammar, "y"), Err(String::new()));
    }
}
