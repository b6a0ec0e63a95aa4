//! One sequence: its tokens, how many of them the cache holds, and how a turn ends.

use std::fmt;

use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::guide::Guide;
use super::kv_cache::RowId;
use super::model::AdapterLease;
use super::model::cuda::Target;
use super::model::ops::KEYS_PER_BLOCK;
use super::prefix_cache::PrefixHash;
use super::sampling::{History, Row, Sampled, unit_interval};
use super::text_stream::{StopText, TextStream};
use super::{EngineError, SamplingParams, SequenceSeed, TokenLogprob, Tokenizer};

/// Most tokens that reasoning which has used its budget may still get where it must not end within a
/// character: one has four bytes at most.
const MAX_LATE_TOKENS: usize = 3;
/// How far from its end a prompt is looked through for a mark of reasoning.
const THINKING_TAIL: usize = 4;

/// Names one sequence of an engine; numbers are never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub(super) u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model chose a stop token, which is the turn's last.
    Stop,
    /// The turn's text holds a stop string; see [`Finished::stop_text`].
    StopText,
    /// The turn reached `max_new_tokens`, or the sequence the context's end.
    Length,
}

/// One finished turn: what was sampled, and how likely it was.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// The sequence.
    pub id: SequenceId,
    /// The turn's tokens, a stop token included. Empty if there was no room for one.
    pub tokens: Vec<u32>,
    /// Log-probability of each token over the whole vocabulary at the sampling temperature; 0 where
    /// it was not sampled.
    pub logprobs: Vec<f32>,
    /// Log-probability of each token in the distribution that it was drawn from; 0 where it was not
    /// sampled.
    pub kept_logprobs: Vec<f32>,
    /// The likeliest tokens in the place of each, if
    /// [`SamplingParams::top_logprobs`] asks for them.
    pub top_logprobs: Vec<Vec<TokenLogprob>>,
    /// Whether each token was sampled: those that close reasoning which was too long
    /// ([`ThinkingBudget`](super::ThinkingBudget)) were not, and nothing is to be learned from them.
    pub is_sampled: Vec<bool>,
    /// Why the turn ended.
    pub finish_reason: FinishReason,
    /// Which stop string ended it and where its text is cut.
    pub stop_text: Option<StopText>,
    /// How many tokens of the sequence's prompt were found in the prefix cache.
    pub prefix_hit_tokens: usize,
    /// Why the turn's [`Guide`] could lead no further: the turn is cut off there.
    pub guide_failure: Option<String>,
}

impl Finished {
    /// Returns the turn's text: without the stop token, and up to a stop string.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer's decoder does.
    pub fn text(&self, tokenizer: &Tokenizer) -> Result<String, EngineError> {
        let end = match self.finish_reason {
            FinishReason::Stop => self.tokens.len().saturating_sub(1),
            FinishReason::StopText | FinishReason::Length => self.tokens.len(),
        };
        let mut text = tokenizer.decode(&self.tokens[..end])?;
        if let Some(stop) = &self.stop_text {
            text.truncate(text.floor_char_boundary(stop.at));
        }
        Ok(text)
    }
}

/// A turn that is under way.
#[derive(Debug, Clone, Copy)]
pub struct TurnSoFar<'a> {
    /// Its tokens.
    pub tokens: &'a [u32],
    /// As [`Finished::logprobs`].
    pub logprobs: &'a [f32],
    /// As [`Finished::kept_logprobs`].
    pub kept_logprobs: &'a [f32],
    /// As [`Finished::top_logprobs`].
    pub top_logprobs: &'a [Vec<TokenLogprob>],
}

/// What a sequence is waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// The next step.
    Running,
    /// The prompt that another sequence of its group is computing.
    Follower,
    /// Its owner, to extend or release it: a turn has finished.
    Paused,
}

/// One sequence.
///
/// `tokens[..cached]` have their keys and values in the cache row; the rest is computed by the next
/// steps. So prompt, chunk of a prompt, sampled token, tool result and recovery after an eviction
/// are one case.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) tokens: Vec<u32>,
    pub(super) cached: usize,
    pub(super) row: Option<RowId>,
    pub(super) state: State,
    /// Sequences with the same prompt that start from this one's row.
    pub(super) followers: Vec<SequenceId>,
    pub(super) params: SamplingParams,
    /// An adapter from beside the weights. Its keys and values are of no use to another one:
    /// [`Self::use_adapter`].
    pub(super) adapter: Option<AdapterLease>,
    pub(super) random: ChaCha8Rng,
    /// What the current turn must look like.
    pub(super) guide: Option<Guide>,
    /// Tokens that the sequence was added with.
    prompt_len: usize,
    /// Names of the first full blocks, as far as they were needed.
    pub(super) chain: Vec<PrefixHash>,
    /// How many of the row's blocks are kept for other sequences.
    pub(super) kept_blocks: usize,
    /// Tokens of the prompt that were found in the cache when the sequence began.
    pub(super) prefix_hit_tokens: Option<usize>,
    turn: Turn,
}

/// The turn that a sequence is in.
#[derive(Debug, Default)]
struct Turn {
    /// Where it begins among the sequence's tokens.
    start: usize,
    logprobs: Vec<f32>,
    kept_logprobs: Vec<f32>,
    top_logprobs: Vec<Vec<TokenLogprob>>,
    is_sampled: Vec<bool>,
    /// Looks for stop strings, where there are any.
    text: Option<TextStream>,
    /// Tokens of the reasoning that is open; `None` where none is.
    thinking: Option<usize>,
}

impl Sequence {
    pub(super) fn new(prompt: Vec<u32>, params: SamplingParams, seed: SequenceSeed) -> Self {
        let mut sequence = Self {
            prompt_len: prompt.len(),
            tokens: prompt,
            cached: 0,
            row: None,
            state: State::Running,
            followers: Vec::new(),
            params,
            adapter: None,
            random: seed.generator(),
            guide: None,
            chain: Vec::new(),
            kept_blocks: 0,
            prefix_hit_tokens: None,
            turn: Turn::default(),
        };
        sequence.begin_turn();
        sequence
    }

    /// Returns a paused sequence with the same tokens, which draws from its own stream.
    pub(super) fn fork(&self, row: Option<RowId>, seed: SequenceSeed) -> Self {
        Self {
            tokens: self.tokens.clone(),
            cached: if row.is_some() { self.cached } else { 0 },
            row,
            state: State::Paused,
            followers: Vec::new(),
            params: self.params.clone(),
            adapter: self.adapter.clone(),
            random: seed.generator(),
            guide: None,
            prompt_len: self.prompt_len,
            chain: self.chain.clone(),
            kept_blocks: if row.is_some() { self.kept_blocks } else { 0 },
            prefix_hit_tokens: self.prefix_hit_tokens,
            turn: Turn {
                start: self.tokens.len(),
                ..Turn::default()
            },
        }
    }

    /// Returns whether tokens of the current turn have been sampled.
    pub(super) fn is_within_turn(&self) -> bool {
        self.tokens.len() > self.turn.start
    }

    /// Returns whether the current turn has a token that the model chose.
    pub(super) fn has_sampled(&self) -> bool {
        self.turn.is_sampled.contains(&true)
    }

    /// Returns the tokens that the cache does not hold yet.
    pub(super) fn pending(&self) -> &[u32] {
        &self.tokens[self.cached..]
    }

    /// Returns how many tokens the sequence was added with.
    pub(super) fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Returns the names of the first `blocks` full blocks.
    pub(super) fn chain(&mut self, blocks: usize) -> &[PrefixHash] {
        while self.chain.len() < blocks {
            let before = self.chain.last().copied();
            let before = before.unwrap_or_else(|| PrefixHash::root(self.prefix_namespace()));
            let start = self.chain.len() * KEYS_PER_BLOCK;
            let block = &self.tokens[start..start + KEYS_PER_BLOCK];
            self.chain.push(before.next(block));
        }
        &self.chain[..blocks]
    }

    /// Returns what the keys and values depend on besides the tokens and the weights: the adapter.
    fn prefix_namespace(&self) -> u64 {
        let number = |lease: &AdapterLease| lease.id().number() + 1;
        self.adapter.as_ref().map_or(0, number)
    }

    /// Sets the adapter. What was found for another one in the prefix cache is of no use.
    pub(super) fn use_adapter(&mut self, adapter: Option<AdapterLease>) {
        self.adapter = adapter;
        self.chain.clear();
        self.kept_blocks = 0;
        self.prefix_hit_tokens = None;
    }

    /// Holds the current turn to a grammar; it follows what the turn has already.
    pub(super) fn use_guide(&mut self, mut guide: Guide) {
        let turn = &self.tokens[self.turn.start..];
        turn.iter().for_each(|&token| guide.push(token));
        self.guide = Some(guide);
    }

    /// Returns what the next token is sampled with: `logits`, `[vocab]`, and all that is known here.
    pub(super) fn row_to_sample<'a>(&'a mut self, logits: &'a [f32]) -> Row<'a> {
        let (prompt, output) = self.tokens.split_at(self.turn.start);
        Row {
            logits,
            params: &self.params,
            history: History { prompt, output },
            guide: self.guide.as_mut(),
            random: &mut self.random,
        }
    }

    /// Returns how the next token is chosen from row `row` of the logits, if the temperature is all that
    /// it takes and no guide leads it; draws the number for it.
    pub(super) fn target(&mut self, row: usize) -> Option<Target> {
        let params = &self.params;
        let is_plain = params.is_plain() && self.guide.is_none();
        is_plain.then(|| Target {
            row,
            temperature: params.temperature,
            uniform: if params.is_greedy() {
                0.0
            } else {
                unit_interval(&mut self.random)
            },
        })
    }

    /// Returns the turn so far.
    pub(super) fn turn(&self) -> TurnSoFar<'_> {
        TurnSoFar {
            tokens: &self.tokens[self.turn.start..],
            logprobs: &self.turn.logprobs,
            kept_logprobs: &self.turn.kept_logprobs,
            top_logprobs: &self.turn.top_logprobs,
        }
    }

    /// Appends a sampled token; returns why the turn ends with it, if it does.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer does where stop strings are looked for.
    pub(super) fn push(
        &mut self,
        sampled: Sampled,
        max_context: usize,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Option<Ending>, EngineError> {
        let chosen = sampled.chosen;
        self.tokens.push(chosen.token);
        self.turn.logprobs.push(chosen.logprob);
        self.turn.kept_logprobs.push(chosen.kept_logprob);
        self.turn.is_sampled.push(true);
        if self.params.top_logprobs > 0 {
            self.turn.top_logprobs.push(sampled.top);
        }
        if self.params.stop_token_ids.contains(&chosen.token) {
            return Ok(Some(Ending::of(FinishReason::Stop)));
        }
        if let Some(guide) = &mut self.guide {
            guide.push(chosen.token);
        }
        if let Some(stop) = self.find_stop(&[chosen.token], tokenizer)? {
            return Ok(Some(stop));
        }
        if self.room(max_context) == 0 {
            return Ok(Some(Ending::of(FinishReason::Length)));
        }
        self.think(chosen.token);
        let close = self.close_thinking();
        if close.is_empty() {
            return Ok(None);
        }
        if close.len() >= self.room(max_context) {
            return Ok(Some(Ending::of(FinishReason::Length)));
        }
        self.push_unsampled(&close);
        if let Some(guide) = &mut self.guide {
            close.iter().for_each(|&token| guide.push(token));
        }
        self.find_stop(&close, tokenizer)
    }

    /// Returns how many tokens the turn may still get.
    fn room(&self, max_context: usize) -> usize {
        let in_turn = self
            .params
            .max_new_tokens
            .saturating_sub(self.turn.logprobs.len());
        in_turn.min(max_context.saturating_sub(self.tokens.len()))
    }

    fn push_unsampled(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        let len = self.tokens.len() - self.turn.start;
        self.turn.logprobs.resize(len, 0.0);
        self.turn.kept_logprobs.resize(len, 0.0);
        self.turn.is_sampled.resize(len, false);
        if self.params.top_logprobs > 0 {
            self.turn.top_logprobs.resize(len, Vec::new());
        }
    }

    fn find_stop(
        &mut self,
        tokens: &[u32],
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Option<Ending>, EngineError> {
        if self.params.stop.is_empty() {
            return Ok(None);
        }
        let tokenizer = tokenizer.ok_or(EngineError::NoTokenizer)?;
        let may_stop = self.turn.logprobs.len() >= self.params.min_new_tokens;
        let stop = &self.params.stop;
        let text = self
            .turn
            .text
            .get_or_insert_with(|| TextStream::new(tokenizer, stop));
        for &token in tokens {
            if !may_stop {
                text.push_unstoppable(token)?;
            } else if let (_, Some(stop)) = text.push(token)? {
                return Ok(Some(Ending {
                    reason: FinishReason::StopText,
                    stop_text: Some(stop),
                }));
            }
        }
        Ok(None)
    }

    /// Counts a token of the turn as reasoning or as a mark around it.
    fn think(&mut self, token: u32) {
        if let Some(budget) = &self.params.thinking {
            self.turn.thinking = if token == budget.start_token_id {
                Some(0)
            } else if token == budget.end_token_id {
                None
            } else {
                self.turn.thinking.map(|tokens| tokens + 1)
            };
        }
    }

    /// Returns the tokens that end reasoning which has used its budget, if it has. A guide admits them not
    /// within a character.
    fn close_thinking(&mut self) -> Vec<u32> {
        let (Some(budget), Some(tokens)) = (&self.params.thinking, self.turn.thinking) else {
            return Vec::new();
        };
        if tokens < budget.max_tokens {
            return Vec::new();
        }
        if let (Some(guide), Some(&first)) = (&mut self.guide, budget.close_token_ids.first())
            && tokens < budget.max_tokens.saturating_add(MAX_LATE_TOKENS)
            && !guide.admits(first)
        {
            return Vec::new();
        }
        self.turn.thinking = None;
        budget.close_token_ids.clone()
    }

    /// Appends tokens that were not sampled, and begins the next turn behind them.
    pub(super) fn extend(&mut self, suffix: &[u32]) {
        self.tokens.extend_from_slice(suffix);
        self.state = State::Running;
        self.begin_turn();
    }

    fn begin_turn(&mut self) {
        self.turn = Turn {
            start: self.tokens.len(),
            ..Turn::default()
        };
        if let Some(budget) = &self.params.thinking {
            // Templates that make the model think end in `<think>\n`.
            let tail = self.tokens.iter().rev().take(THINKING_TAIL);
            let mark = tail
                .copied()
                .find(|token| [budget.start_token_id, budget.end_token_id].contains(token));
            self.turn.thinking = (mark == Some(budget.start_token_id)).then_some(0);
            let close = self.close_thinking();
            self.push_unsampled(&close);
        }
    }

    /// Ends the turn and hands over what it sampled.
    pub(super) fn finish(&mut self, id: SequenceId, ending: Ending) -> Finished {
        self.state = State::Paused;
        let turn = std::mem::take(&mut self.turn);
        let guide = self.guide.take();
        let tokens = self.tokens[turn.start..].to_vec();
        self.turn.start = self.tokens.len();
        Finished {
            id,
            tokens,
            logprobs: turn.logprobs,
            kept_logprobs: turn.kept_logprobs,
            top_logprobs: turn.top_logprobs,
            is_sampled: turn.is_sampled,
            finish_reason: ending.reason,
            stop_text: ending.stop_text,
            prefix_hit_tokens: self.prefix_hit_tokens.unwrap_or(0),
            guide_failure: guide.and_then(|guide| guide.failure()),
        }
    }
}

/// How a turn ended.
#[derive(Debug)]
pub(super) struct Ending {
    reason: FinishReason,
    stop_text: Option<StopText>,
}

impl Ending {
    pub(super) fn of(reason: FinishReason) -> Self {
        Self {
            reason,
            stop_text: None,
        }
    }
}
