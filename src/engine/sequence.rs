//! One sequence: its tokens, how many of them the cache holds, and how a turn ends.

use std::fmt;

use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::kv_cache::RowId;
use super::model::AdapterLease;
use super::{SamplingParams, SequenceSeed, TokenLogprob};

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
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// The model chose a stop token, which is the turn's last.
    Stop,
    /// The turn reached `max_new_tokens`, or the sequence the context's end.
    Length,
}

/// One finished turn: what was sampled, and how likely it was.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// The sequence.
    pub id: SequenceId,
    /// The sampled tokens, a stop token included. Empty if there was no room for one.
    pub tokens: Vec<u32>,
    /// Log-probability of each token over the whole vocabulary at the sampling temperature.
    pub logprobs: Vec<f32>,
    /// Log-probability of each token among those that `top_k`, `top_p` and `min_p` kept.
    pub kept_logprobs: Vec<f32>,
    /// Why the turn ended.
    pub finish_reason: FinishReason,
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
    /// An adapter from beside the weights. Its keys and values are of no use to another one.
    pub(super) adapter: Option<AdapterLease>,
    pub(super) random: ChaCha8Rng,
    /// Where this turn's sampled tokens begin.
    turn_start: usize,
    logprobs: Vec<f32>,
    kept_logprobs: Vec<f32>,
}

impl Sequence {
    pub(super) fn new(prompt: Vec<u32>, params: SamplingParams, seed: SequenceSeed) -> Self {
        Self {
            turn_start: prompt.len(),
            tokens: prompt,
            cached: 0,
            row: None,
            state: State::Running,
            followers: Vec::new(),
            params,
            adapter: None,
            random: seed.generator(),
            logprobs: Vec::new(),
            kept_logprobs: Vec::new(),
        }
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
            turn_start: self.tokens.len(),
            logprobs: Vec::new(),
            kept_logprobs: Vec::new(),
        }
    }

    /// Returns whether tokens of the current turn have been sampled.
    pub(super) fn is_within_turn(&self) -> bool {
        self.tokens.len() > self.turn_start
    }

    /// Returns the tokens that the cache does not hold yet.
    pub(super) fn pending(&self) -> &[u32] {
        &self.tokens[self.cached..]
    }

    /// Appends a sampled token; returns why the turn ends with it, if it does.
    pub(super) fn push(
        &mut self,
        chosen: TokenLogprob,
        max_context: usize,
    ) -> Option<FinishReason> {
        self.tokens.push(chosen.token);
        self.logprobs.push(chosen.logprob);
        self.kept_logprobs.push(chosen.kept_logprob);
        if self.params.stop_token_ids.contains(&chosen.token) {
            return Some(FinishReason::Stop);
        }
        let is_full =
            self.logprobs.len() >= self.params.max_new_tokens || self.tokens.len() >= max_context;
        is_full.then_some(FinishReason::Length)
    }

    /// Appends tokens that were not sampled, and begins the next turn behind them.
    pub(super) fn extend(&mut self, suffix: &[u32]) {
        self.tokens.extend_from_slice(suffix);
        self.turn_start = self.tokens.len();
        self.state = State::Running;
    }

    /// Ends the turn and hands over what it sampled.
    pub(super) fn finish(&mut self, id: SequenceId, finish_reason: FinishReason) -> Finished {
        self.state = State::Paused;
        Finished {
            id,
            tokens: self.tokens[self.turn_start..].to_vec(),
            logprobs: std::mem::take(&mut self.logprobs),
            kept_logprobs: std::mem::take(&mut self.kept_logprobs),
            finish_reason,
        }
    }
}
