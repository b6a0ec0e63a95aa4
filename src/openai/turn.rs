//! A turn's text as the API tells it: reasoning, content, tool calls; and its log-probabilities.

use serde_json::{Value, json};

use super::stream::TextSoFar;
use crate::chat::{THINK, THINK_END, ToolCall, ToolCallFormat, ToolSpec, parse_calls};
use crate::engine::{EngineError, GeneratedToken, SamplingParams, Tokenizer};

/// How to read the turns of one request.
#[derive(Debug, Clone)]
pub(crate) struct TurnReader {
    pub(crate) format: ToolCallFormat,
    /// The tools of the request; calls are looked for only if there are any.
    pub(crate) tools: Vec<ToolSpec>,
    /// Whether the prompt has opened the reasoning.
    pub(crate) is_thinking: bool,
}

/// A whole turn.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct ReadTurn {
    pub(crate) reasoning: Option<String>,
    pub(crate) content: String,
    pub(crate) tool_calls: Vec<ToolCall>,
}

impl TurnReader {
    /// Returns the reader of a turn that follows the text `prompt`.
    pub(crate) fn after(prompt: &str, format: ToolCallFormat, tools: Vec<ToolSpec>) -> Self {
        Self {
            format,
            tools,
            is_thinking: prompt.trim_end().ends_with(THINK),
        }
    }

    /// Reads a whole turn. Where a call cannot be read, or is of a tool that the request does not
    /// have, the turn is content as it stands: here is nobody who could tell the model, and a client
    /// could do nothing with the call.
    pub(crate) fn read(&self, text: &str) -> ReadTurn {
        let (reasoning, content) = self.split(text);
        let reasoning = reasoning.map(str::to_owned);
        let content = content.unwrap_or_default();
        let whole = |reasoning| ReadTurn {
            reasoning,
            content: content.to_owned(),
            tool_calls: Vec::new(),
        };
        if self.tools.is_empty() {
            return whole(reasoning);
        }
        let parsed = parse_calls(content, self.format, &self.tools);
        let calls: Result<Vec<ToolCall>, _> = parsed.tool_calls.into_iter().collect();
        let is_known = |call: &ToolCall| self.tools.iter().any(|tool| tool.name == call.name);
        match calls {
            Ok(tool_calls) if !tool_calls.is_empty() && tool_calls.iter().all(is_known) => {
                ReadTurn {
                    reasoning,
                    content: parsed.content,
                    tool_calls,
                }
            }
            _ => whole(reasoning),
        }
    }

    /// Returns what is settled of a turn that is under way: more text only makes both longer.
    pub(crate) fn settled<'a>(&self, text: &'a str) -> (&'a str, &'a str) {
        let start = text.trim_start();
        if !start.starts_with(THINK) && THINK.starts_with(start) {
            return ("", "");
        }
        let (reasoning, content) = self.split(text);
        let reasoning = match (reasoning, content) {
            (Some(open), None) => {
                let end = open
                    .char_indices()
                    .map(|(at, _)| at)
                    .find(|&at| THINK_END.starts_with(&open[at..]));
                open[..end.unwrap_or(open.len())].trim_end_matches('\n')
            }
            (reasoning, _) => reasoning.unwrap_or_default(),
        };
        let content = match content {
            Some(content) if !self.tools.is_empty() => {
                content[..self.format.content_end(content)].trim_end()
            }
            content => content.unwrap_or_default(),
        };
        (reasoning, content)
    }

    /// Splits reasoning from content; there is none while the reasoning is open.
    fn split<'a>(&self, text: &'a str) -> (Option<&'a str>, Option<&'a str>) {
        let inner = match text.trim_start().strip_prefix(THINK) {
            Some(inner) => inner,
            None if self.is_thinking => text,
            None => return (None, Some(text)),
        };
        let inner = inner.trim_start_matches('\n');
        match inner.split_once(THINK_END) {
            Some((reasoning, content)) => (
                Some(reasoning.trim_end_matches('\n')),
                Some(content.trim_start_matches('\n')),
            ),
            None => (Some(inner), None),
        }
    }
}

/// A turn under way, as far as it was sent.
#[derive(Debug)]
pub(crate) struct TurnSoFar {
    text: TextSoFar,
    reasoning: String,
    content: String,
}

/// What is new of a turn.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Delta {
    pub(crate) reasoning: String,
    pub(crate) content: String,
}

impl TurnSoFar {
    pub(crate) fn new(tokenizer: &Tokenizer, params: &SamplingParams) -> Self {
        Self {
            text: TextSoFar::new(tokenizer, params),
            reasoning: String::new(),
            content: String::new(),
        }
    }

    /// Takes the next tokens; returns what they settle.
    pub(crate) fn push(
        &mut self,
        reader: &TurnReader,
        tokens: &[GeneratedToken],
    ) -> Result<Delta, EngineError> {
        self.text.push(tokens)?;
        let (reasoning, content) = reader.settled(&self.text.text);
        let new = |sent: &mut String, now: &str| {
            let new = now.strip_prefix(sent.as_str()).unwrap_or_default();
            sent.push_str(new);
            new.to_owned()
        };
        Ok(Delta {
            reasoning: new(&mut self.reasoning, reasoning),
            content: new(&mut self.content, content),
        })
    }

    /// Returns what of the whole turn was not sent yet.
    pub(crate) fn rest(&self, turn: &ReadTurn) -> Delta {
        let reasoning = turn.reasoning.as_deref().unwrap_or_default();
        Delta {
            reasoning: rest(reasoning, &self.reasoning).to_owned(),
            content: rest(&turn.content, &self.content).to_owned(),
        }
    }
}

/// Returns what of `whole` comes after `sent`, a part of which may have been blanks.
fn rest<'a>(whole: &'a str, sent: &str) -> &'a str {
    whole
        .strip_prefix(sent)
        .or_else(|| whole.strip_prefix(sent.trim_start()))
        .unwrap_or_default()
}

/// Returns a call as the API tells it.
pub(crate) fn call_json(call: &ToolCall, id: &str) -> Value {
    json!({
        "id": id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments.to_string()},
    })
}

/// Returns a token's text; a part of a character has a replacement character.
pub(super) fn token_text(tokenizer: &Tokenizer, token: u32) -> String {
    tokenizer.decode(&[token]).unwrap_or_default()
}

/// Returns the log-probabilities of tokens as chat completions tell them.
pub(crate) fn logprobs_json(tokenizer: &Tokenizer, tokens: &[GeneratedToken]) -> Value {
    let entry = |token: u32, logprob: f32| {
        let text = token_text(tokenizer, token);
        let bytes = tokenizer.token_bytes(token);
        json!({"token": text, "logprob": logprob, "bytes": bytes})
    };
    let entries: Vec<Value> = tokens
        .iter()
        .map(|generated| {
            let token = generated.token;
            let mut value = entry(token.token, token.kept_logprob);
            let top = generated
                .top
                .iter()
                .map(|top| entry(top.token, top.kept_logprob));
            value["top_logprobs"] = top.collect();
            value
        })
        .collect();
    json!({"content": entries})
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reader(is_thinking: bool, has_tools: bool) -> TurnReader {
        let tool = ToolSpec::new("f", "", json!({"type": "object"}));
        TurnReader {
            format: ToolCallFormat::Hermes,
            tools: if has_tools { vec![tool] } else { Vec::new() },
            is_thinking,
        }
    }

    const CALL: &str = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";

    #[test]
    fn calls_are_read_only_where_there_are_tools() {
        let text = format!("<think>\nhm\n</think>\n\nI call.\n{CALL}");
        let turn = reader(false, true).read(&text);
        assert_eq!(turn.reasoning.as_deref(), Some("hm"));
        assert_eq!(turn.content, "I call.");
        assert_eq!(turn.tool_calls, [ToolCall::new("f", json!({"x": 1}))]);
        let turn = reader(false, false).read(&text);
        assert_eq!(turn.content, format!("I call.\n{CALL}"));
    }

    #[test]
    fn a_damaged_call_stays_content() {
        let turn = reader(false, true).read("a <tool_call>{oops}</tool_call>");
        assert_eq!(turn.content, "a <tool_call>{oops}</tool_call>");
        assert!(turn.tool_calls.is_empty());
    }

    #[test]
    fn a_call_of_a_tool_that_is_not_there_stays_content() {
        let text = CALL.replace("\"f\"", "\"g\"");
        for text in [text.clone(), format!("{CALL}\n{text}")] {
            let turn = reader(false, true).read(&text);
            assert_eq!((turn.content, turn.tool_calls), (text, Vec::new()));
        }
    }

    #[test]
    fn a_closing_mark_without_an_opening_one_is_content() {
        let turn = reader(false, true).read(&format!("a</think>b {CALL}"));
        assert_eq!(
            (turn.reasoning, turn.content.as_str()),
            (None, "a</think>b")
        );
        assert_eq!(turn.tool_calls.len(), 1);
    }

    #[test]
    fn reasoning_that_the_prompt_opened_needs_no_mark() {
        let turn = reader(true, false).read("hm\n</think>\n\nyes");
        assert_eq!(turn.reasoning.as_deref(), Some("hm"));
        assert_eq!(turn.content, "yes");
        let cut_off = reader(true, false).read("hm");
        assert_eq!(
            (cut_off.reasoning.as_deref(), cut_off.content.as_str()),
            (Some("hm"), "")
        );
    }

    proptest! {
        /// What is settled early is a part of what is settled later, and of the whole in the end.
        #[test]
        fn settled_text_only_grows(
            text in "(<think>|</think>|<tool_call>|</tool_call>|\\{\"name\": \"f\", \"arguments\": \\{\\}\\}|a| |\n|<|é){0,16}",
            is_thinking in any::<bool>(),
            has_tools in any::<bool>(),
        ) {
            let reader = reader(is_thinking, has_tools);
            let whole = reader.read(&text);
            let mut sent = (String::new(), String::new());
            for (end, _) in text.char_indices().skip(1).chain([(text.len(), ' ')]) {
                let (reasoning, content) = reader.settled(&text[..end]);
                prop_assert!(reasoning.starts_with(&sent.0), "{sent:?} then {reasoning:?}");
                prop_assert!(content.starts_with(&sent.1), "{sent:?} then {content:?}");
                sent = (reasoning.to_owned(), content.to_owned());
            }
            let all = format!("{}{}", sent.1, rest(&whole.content, &sent.1));
            prop_assert_eq!(all.trim(), whole.content.trim());
            let reasoning = whole.reasoning.unwrap_or_default();
            let all = format!("{}{}", sent.0, rest(&reasoning, &sent.0));
            prop_assert_eq!(all.trim(), reasoning.trim());
        }
    }
}
