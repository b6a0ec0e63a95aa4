//! Tokens in, tokens and log-probabilities out.
//!
//! - [`LoadedModel`] is a checkpoint: configuration, weights, [`Tokenizer`], chat template.
//! - [`model::Decoder`] computes; the trainer shares it, so an optimizer step reaches the sampler
//!   at once.
//! - [`Engine`] generates with many sequences at a time (continuous batching): each
//!   [`Engine::step`] is one forward pass over the next token of every running sequence and chunks
//!   of waiting prompts.
//!
//! - [`EngineHandle`] is an engine on a thread of its own, for servers.
//!
//! **A sequence's tokens depend on its prompt, its parameters and its seed alone**, not on the
//! sequences around it, on their order, or on memory pressure. On the CPU the decoder's rows do not
//! influence each other's rounding, each sequence draws from its own stream, and a sequence that lost its
//! cache recomputes it.
//!
//! **Memory is bounded** by [`EngineConfig::max_cache_tokens`]. When it is full, paused sequences
//! and then the youngest running ones lose their keys and values, which are computed again when
//! it is their turn.
//!
//! **What was computed once is used again** ([`PrefixCaching`]): a sequence that begins
//! like an earlier one takes over its keys and values, in whole blocks of 32 tokens, as long as
//! the weights are the same and memory was not needed for something else. It changes no bit.

mod error;
mod gguf;
mod guide;
mod handle;
mod kv_cache;
mod limits;
mod loader;
pub mod measure;
mod memory;
pub mod model;
mod prefix_cache;
mod sampling;
mod scheduler;
mod sequence;
mod text_stream;
mod tokenizer;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

pub use error::EngineError;
#[cfg(any(fuzzing, test))]
pub use gguf::fuzz_gguf;
pub use guide::{Guide, GuideFactory};
pub use handle::{
    BusyError, EngineHandle, EngineStatus, GenerateEvent, GenerateRequest, GeneratedToken,
    Generation, Places,
};
pub use kv_cache::{KvCache, RowId};
pub use limits::RequestLimits;
pub use loader::LoadedModel;
pub use memory::{PeakMemory, available_memory, is_out_of_memory};
pub use sampling::{SamplingParams, SequenceSeed, ThinkingBudget, TokenLogprob};
pub use sequence::{FinishReason, Finished, SequenceId, TurnSoFar};
pub use text_stream::{StopText, TextStream};
pub use tokenizer::{Detokenizer, Tokenizer};

use model::ops::KEYS_PER_BLOCK;
use model::{AdapterId, AdapterLease, Decoder, PackedBatch};
use sampling::Sampled;
use scheduler::Scheduled;
use sequence::{Ending, Sequence, State};

/// Limits of an [`Engine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineConfig {
    /// Most sequences that advance at a time; more wait. Default: 256.
    pub max_running: usize,
    /// Most tokens whose keys and values are held, shared ones counted once. One token takes
    /// `2 · layers · kv_heads · head_dim` numbers. Default: 65,536.
    pub max_cache_tokens: usize,
    /// Most bytes of keys and values; replaces `max_cache_tokens` where it is given. Default: none.
    pub max_cache_bytes: Option<u64>,
    /// Longest sequence, prompt included; 0 is the model's own limit. Default: 0.
    pub max_context: usize,
    /// Most tokens of one prompt in one step, so that prompts do not stall the rest. Default: 512.
    pub prefill_chunk: usize,
    /// Most tokens of one step. Default: 2048.
    pub max_batch_tokens: usize,
    /// Which keys and values outlive their sequences, for others that begin alike. Default: all.
    pub prefix_caching: PrefixCaching,
}

/// Which full blocks of keys and values are kept for sequences to come. They give way when memory
/// is needed, but take what the limits allow until then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefixCaching {
    /// None.
    Off,
    /// Those of the tokens that sequences are added with, such as instructions that many share. It
    /// suits rollouts, whose own conversations are extended and never sent again.
    Prompts,
    /// Those of answers, too: conversations are sent again and go on.
    #[default]
    All,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_running: 256,
            max_cache_tokens: 65_536,
            max_cache_bytes: None,
            max_context: 0,
            prefill_chunk: 512,
            max_batch_tokens: 2048,
            prefix_caching: PrefixCaching::All,
        }
    }
}

/// What an engine has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineStats {
    /// Forward passes.
    pub steps: u64,
    /// Tokens of prompts and suffixes that were computed, again after an eviction included.
    pub prefill_tokens: u64,
    /// Tokens that were found in the prefix cache instead of being computed.
    pub prefix_hit_tokens: u64,
    /// Tokens that were sampled.
    pub generated_tokens: u64,
    /// Sequences that lost their keys and values to others.
    pub evictions: u64,
    /// Time in the model.
    pub forward: Duration,
    /// Time choosing tokens.
    pub sampling: Duration,
}

impl EngineStats {
    /// Returns the sampled tokens per second of model and sampling time.
    pub fn tokens_per_second(&self) -> f64 {
        let seconds = (self.forward + self.sampling).as_secs_f64();
        if seconds > 0.0 {
            self.generated_tokens as f64 / seconds
        } else {
            0.0
        }
    }
}

/// Generates with many sequences at a time.
///
/// A sequence is added, runs until its turn finishes, and is then paused: its owner extends it with
/// a tool result, forks it, or releases it.
#[derive(Debug)]
pub struct Engine {
    decoder: Arc<Decoder>,
    cache: KvCache,
    config: EngineConfig,
    /// Longest sequence that fits the model, the configuration and the cache.
    max_context: usize,
    /// Version of the weights that the cache belongs to.
    version: u64,
    sequences: BTreeMap<SequenceId, Sequence>,
    next_id: u64,
    stats: EngineStats,
    tokenizer: Option<Tokenizer>,
}

impl Engine {
    /// Makes an engine without sequences.
    ///
    /// # Errors
    ///
    /// [`EngineError::InvalidLimit`] if a limit is too small to run anything.
    pub fn new(decoder: Arc<Decoder>, mut config: EngineConfig) -> Result<Self, EngineError> {
        if let Some(bytes) = config.max_cache_bytes {
            let block = decoder.new_cache(0).bytes_per_token() * KEYS_PER_BLOCK;
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            if bytes < block {
                return Err(EngineError::InvalidLimit {
                    field: "max_cache_bytes",
                    value: bytes,
                    minimum: block,
                });
            }
            config.max_cache_tokens = bytes / block * KEYS_PER_BLOCK;
        }
        for (field, value, minimum) in [
            ("max_running", config.max_running, 1),
            ("max_cache_tokens", config.max_cache_tokens, KEYS_PER_BLOCK),
            ("prefill_chunk", config.prefill_chunk, 1),
            ("max_batch_tokens", config.max_batch_tokens, 1),
        ] {
            if value < minimum {
                return Err(EngineError::InvalidLimit {
                    field,
                    value,
                    minimum,
                });
            }
        }
        let model_limit = decoder.config().max_position_embeddings;
        let asked = if config.max_context == 0 {
            model_limit
        } else {
            config.max_context
        };
        let whole_blocks = config.max_cache_tokens / KEYS_PER_BLOCK * KEYS_PER_BLOCK;
        Ok(Self {
            cache: decoder.new_cache(whole_blocks),
            max_context: asked.min(model_limit).min(whole_blocks),
            version: decoder.version(),
            decoder,
            config,
            sequences: BTreeMap::new(),
            next_id: 0,
            stats: EngineStats::default(),
            tokenizer: None,
        })
    }

    /// Returns the model.
    pub fn decoder(&self) -> &Arc<Decoder> {
        &self.decoder
    }

    /// Returns the limits, with `max_cache_tokens` as it follows from `max_cache_bytes`.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Lets the engine look for stop strings.
    pub fn set_tokenizer(&mut self, tokenizer: Tokenizer) {
        self.tokenizer = Some(tokenizer);
    }

    /// Returns the length of the longest sequence, prompt included.
    pub fn max_context(&self) -> usize {
        self.max_context
    }

    /// Returns the bounds of every request.
    pub fn limits(&self) -> RequestLimits {
        RequestLimits {
            max_context: self.max_context,
            vocab_size: self.decoder.config().vocab_size,
            has_tokenizer: self.tokenizer.is_some(),
        }
    }

    /// Returns the number of sequences that the next steps advance.
    pub fn running(&self) -> usize {
        self.sequences
            .values()
            .filter(|sequence| sequence.state != State::Paused)
            .count()
    }

    /// Returns the tokens that memory is held for.
    pub fn cached_tokens(&self) -> usize {
        self.cache.tokens_in_use()
    }

    /// Returns what was done so far.
    pub fn stats(&self) -> EngineStats {
        self.stats
    }

    /// Returns all tokens of a sequence: prompt, sampled turns and suffixes, as the model saw them.
    ///
    /// # Errors
    ///
    /// [`EngineError::UnknownSequence`] if it was released.
    pub fn tokens(&self, id: SequenceId) -> Result<&[u32], EngineError> {
        let sequence = self
            .sequences
            .get(&id)
            .ok_or(EngineError::UnknownSequence { id })?;
        Ok(&sequence.tokens)
    }

    /// Returns the turn that a sequence is in; it is empty between turns.
    ///
    /// # Errors
    ///
    /// [`EngineError::UnknownSequence`] if it was released.
    pub fn turn(&self, id: SequenceId) -> Result<TurnSoFar<'_>, EngineError> {
        let sequence = self.sequences.get(&id);
        Ok(sequence.ok_or(EngineError::UnknownSequence { id })?.turn())
    }

    /// Adds a sequence that continues `prompt`.
    ///
    /// # Errors
    ///
    /// Fails if the prompt is empty, too long or outside the vocabulary, or if a parameter is out
    /// of range.
    pub fn add(
        &mut self,
        prompt: Vec<u32>,
        params: SamplingParams,
        seed: SequenceSeed,
    ) -> Result<SequenceId, EngineError> {
        self.limits().check(&prompt, &params)?;
        Ok(self.insert(Sequence::new(prompt, params, seed)))
    }

    /// Adds one sequence for each seed, all of which continue `prompt`: it is computed once, and
    /// its keys and values are shared.
    ///
    /// # Errors
    ///
    /// As [`Engine::add`].
    pub fn add_group(
        &mut self,
        prompt: &[u32],
        params: &SamplingParams,
        seeds: &[SequenceSeed],
    ) -> Result<Vec<SequenceId>, EngineError> {
        self.limits().check(prompt, params)?;
        let ids: Vec<SequenceId> = seeds
            .iter()
            .map(|&seed| self.insert(Sequence::new(prompt.to_vec(), params.clone(), seed)))
            .collect();
        if let Some((leader, followers)) = ids.split_first() {
            for follower in followers {
                self.sequence_mut(*follower)?.state = State::Follower;
            }
            self.sequence_mut(*leader)?.followers = followers.to_vec();
        }
        Ok(ids)
    }

    /// Adds a paused sequence with the tokens of the paused sequence `id`, from which it shares
    /// keys and values; it draws from its own stream.
    ///
    /// # Errors
    ///
    /// Fails if `id` is unknown or still generating.
    pub fn fork(&mut self, id: SequenceId, seed: SequenceSeed) -> Result<SequenceId, EngineError> {
        let parent = self.paused(id)?;
        let row = parent.row;
        let row = row.map(|row| self.cache.fork(row)).transpose()?;
        let child = self.paused(id)?.fork(row, seed);
        Ok(self.insert(child))
    }

    /// Continues a paused sequence with `suffix` (a tool result and the header of the next turn).
    ///
    /// Its own tokens stay as they were sampled. If no room is left for a token behind the suffix,
    /// the next step finishes the turn with [`FinishReason::Length`] and without a token.
    ///
    /// # Errors
    ///
    /// Fails if `id` is unknown or still generating, or if a token is outside the vocabulary.
    pub fn extend(&mut self, id: SequenceId, suffix: &[u32]) -> Result<(), EngineError> {
        self.limits().check_tokens(suffix)?;
        self.paused(id)?.extend(suffix);
        Ok(())
    }

    /// Changes the most tokens of a paused sequence's next turns.
    ///
    /// # Errors
    ///
    /// Fails if `id` is unknown or still generating, or if the number is 0.
    pub fn set_max_new_tokens(
        &mut self,
        id: SequenceId,
        max_new_tokens: usize,
    ) -> Result<(), EngineError> {
        let sequence = self.paused(id)?;
        let params = SamplingParams {
            max_new_tokens,
            ..sequence.params.clone()
        };
        params.validate()?;
        sequence.params = params;
        Ok(())
    }

    /// Sets the adapter of a sequence that was just added or is paused, one that was added to the
    /// decoder beside its weights; `None` is the weights alone. Sequences of its group that wait for
    /// its prompt get it, too.
    ///
    /// Keys and values belong to one adapter: those of another one are forgotten and computed again.
    ///
    /// # Errors
    ///
    /// Fails if `id` is unknown or within a turn, or if there is no such adapter.
    pub fn set_adapter(
        &mut self,
        id: SequenceId,
        adapter: Option<AdapterId>,
    ) -> Result<(), EngineError> {
        let lease = adapter.map(|id| self.decoder.lease_adapter(id));
        let lease = lease.transpose()?;
        let sequence = self.sequence_mut(id)?;
        if sequence.state != State::Paused && (sequence.cached > 0 || sequence.is_within_turn()) {
            return Err(EngineError::StillGenerating { id });
        }
        if sequence.state == State::Follower {
            // It no longer continues from its leader's prompt.
            sequence.state = State::Running;
            for other in self.sequences.values_mut() {
                other.followers.retain(|follower| *follower != id);
            }
        }
        let sequence = self.sequence_mut(id)?;
        let row = sequence.row.take();
        sequence.cached = 0;
        let group: Vec<SequenceId> = [id]
            .into_iter()
            .chain(sequence.followers.iter().copied())
            .collect();
        for member in group {
            self.sequence_mut(member)?.use_adapter(lease.clone());
        }
        Ok(row.map_or(Ok(()), |row| self.cache.free(row))?)
    }

    /// Holds the turn that a sequence is about to begin to a grammar.
    ///
    /// # Errors
    ///
    /// Fails if `id` is unknown or within a turn, if the sequence's parameters would keep the turn from
    /// ending where the grammar does: by `min_new_tokens`, or without the model's stop tokens.
    pub fn set_guide(&mut self, id: SequenceId, guide: Guide) -> Result<(), EngineError> {
        let sequence = self.sequence_mut(id)?;
        if sequence.has_sampled() {
            return Err(EngineError::StillGenerating { id });
        }
        guide.check(&sequence.params)?;
        sequence.use_guide(guide);
        Ok(())
    }

    /// Forgets a sequence, running or not, and frees its part of the cache.
    ///
    /// # Errors
    ///
    /// [`EngineError::UnknownSequence`] if it was released before.
    pub fn release(&mut self, id: SequenceId) -> Result<(), EngineError> {
        let removed = self
            .sequences
            .remove(&id)
            .ok_or(EngineError::UnknownSequence { id })?;
        for sequence in self.sequences.values_mut() {
            sequence.followers.retain(|follower| *follower != id);
        }
        // The rest of a group goes on from what its leader has computed.
        if let Some((heir, followers)) = removed.followers.split_first() {
            let heir = self.sequence_mut(*heir)?;
            heir.state = State::Running;
            heir.row = removed.row;
            heir.cached = removed.cached;
            heir.kept_blocks = removed.kept_blocks;
            heir.prefix_hit_tokens = removed.prefix_hit_tokens;
            heir.followers = followers.to_vec();
        } else if let Some(row) = removed.row {
            self.cache.free(row)?;
        }
        Ok(())
    }

    /// Forgets all keys and values, as after an update of the weights. Sequences stay and compute
    /// theirs again.
    ///
    /// A step does this by itself when the decoder's version has changed.
    pub fn clear(&mut self) {
        self.cache.clear();
        for sequence in self.sequences.values_mut() {
            sequence.row = None;
            sequence.cached = 0;
            sequence.kept_blocks = 0;
        }
        self.version = self.decoder.version();
    }

    /// Frees the keys and values that are only kept for sequences to come.
    pub fn trim(&mut self) {
        self.cache.clear_prefixes();
    }

    /// Runs one forward pass and returns the turns that finished with it.
    ///
    /// Without a running sequence it does nothing.
    ///
    /// # Errors
    ///
    /// Fails if the model does or if its logits are not finite. Both are faults of ours, not endings of
    /// a sequence: release the sequences then.
    pub fn step(&mut self) -> Result<Vec<Finished>, EngineError> {
        if self.version != self.decoder.version() {
            self.clear();
        }
        let mut finished = self.finish_full();
        let planned = scheduler::plan(&self.sequences, &self.config);
        let planned = self.make_room(planned)?;
        if planned.is_empty() {
            return Ok(finished);
        }
        let (targets, logits) = self.forward(&planned)?;
        if let Some(logits) = logits {
            self.sample(&targets, &logits, &mut finished)?;
        }
        Ok(finished)
    }

    /// Computes the planned tokens. Returns which sequences have no token left to compute, each
    /// with its row of the logits `[rows, vocab]`.
    fn forward(
        &mut self,
        planned: &[Scheduled],
    ) -> Result<(BTreeMap<SequenceId, usize>, Option<Tensor>), EngineError> {
        let start = Instant::now();
        let mut batch = PackedBatch::new();
        let mut rows = Vec::with_capacity(planned.len());
        let mut complete = Vec::new();
        let mut prefill_tokens = 0;
        for (segment, scheduled) in planned.iter().enumerate() {
            let sequence = &self.sequences[&scheduled.id];
            let pending = sequence.pending();
            let adapter = sequence.adapter.as_ref().map(AdapterLease::id);
            let tokens = &pending[..scheduled.take];
            batch.push_adapted(tokens, sequence.cached, adapter);
            rows.push(sequence.row.expect("planned sequences have a row"));
            if scheduled.take == pending.len() {
                complete.push((scheduled.id, segment));
            }
            if pending.len() > 1 || sequence.cached == 0 {
                prefill_tokens += scheduled.take as u64;
            }
        }
        let last: Vec<usize> = complete.iter().map(|&(_, segment)| segment).collect();
        let hidden = (self.decoder).last_hidden_cached(&batch, &mut self.cache, &rows, &last)?;
        let logits = self.logits(&hidden)?;
        for scheduled in planned {
            self.sequence_mut(scheduled.id)?.cached += scheduled.take;
            self.keep_prefix(scheduled.id)?;
        }
        let mut targets = BTreeMap::new();
        for (row, (id, _)) in complete.into_iter().enumerate() {
            targets.insert(id, row);
            for follower in self.start_followers(id)? {
                targets.insert(follower, row);
            }
        }
        self.stats.steps += 1;
        self.stats.prefill_tokens += prefill_tokens;
        self.stats.forward += start.elapsed();
        Ok((targets, logits))
    }

    /// Returns the logits `[rows, vocab]` of hidden states, if there are any.
    fn logits(&self, hidden: &Tensor) -> Result<Option<Tensor>, EngineError> {
        if hidden.dim(0).map_err(model::ModelError::from)? == 0 {
            return Ok(None);
        }
        Ok(Some(self.decoder.logits(hidden)?))
    }

    /// Gives the followers of a sequence whose prompt is computed their own rows.
    fn start_followers(&mut self, leader: SequenceId) -> Result<Vec<SequenceId>, EngineError> {
        let sequence = self.sequence_mut(leader)?;
        let followers = std::mem::take(&mut sequence.followers);
        let (cached, row) = (sequence.cached, sequence.row.expect("it was just computed"));
        let (chain, kept_blocks) = (sequence.chain.clone(), sequence.kept_blocks);
        let prefix_hit_tokens = sequence.prefix_hit_tokens;
        for &id in &followers {
            let fork = self.cache.fork(row)?;
            let follower = self.sequence_mut(id)?;
            follower.row = Some(fork);
            follower.cached = cached;
            follower.chain.clone_from(&chain);
            follower.kept_blocks = kept_blocks;
            follower.prefix_hit_tokens = prefix_hit_tokens;
            follower.state = State::Running;
        }
        Ok(followers)
    }

    /// Chooses the next token of every target and ends the turns that are over.
    fn sample(
        &mut self,
        targets: &BTreeMap<SequenceId, usize>,
        logits: &Tensor,
        finished: &mut Vec<Finished>,
    ) -> Result<(), EngineError> {
        let start = Instant::now();
        let mut chosen = BTreeMap::new();
        let mut rest = targets.clone();
        if !self.decoder.is_fused() {
            chosen = self.sample_on_device(&mut rest, logits)?;
        }
        if !rest.is_empty() {
            chosen.extend(self.sample_on_host(&rest, logits)?);
        }
        for (id, sampled) in chosen {
            let sampled = sampled.ok_or(EngineError::NonFiniteLogits { id })?;
            let sequence = self
                .sequences
                .get_mut(&id)
                .ok_or(EngineError::UnknownSequence { id })?;
            let ending = sequence.push(sampled, self.max_context, self.tokenizer.as_ref())?;
            if let Some(ending) = ending {
                finished.push(sequence.finish(id, ending));
            }
            self.stats.generated_tokens += 1;
        }
        self.stats.sampling += start.elapsed();
        Ok(())
    }

    /// Chooses tokens with nothing but the temperature where the logits are, and takes them out of
    /// `targets`: a few bytes of each row come back.
    fn sample_on_device(
        &mut self,
        targets: &mut BTreeMap<SequenceId, usize>,
        logits: &Tensor,
    ) -> Result<BTreeMap<SequenceId, Option<Sampled>>, EngineError> {
        let mut ids = Vec::new();
        let mut plain = Vec::new();
        for (&id, sequence) in &mut self.sequences {
            if let Some(&row) = targets.get(&id)
                && let Some(target) = sequence.target(row)
            {
                ids.push(id);
                plain.push(target);
                targets.remove(&id);
            }
        }
        if ids.is_empty() {
            return Ok(BTreeMap::new());
        }
        let tokens = model::cuda::sample(logits, &plain).map_err(model::ModelError::from)?;
        let sampled = |(token, logprob)| Sampled::plain(token, logprob);
        let chosen = tokens.into_iter().map(|token| token.map(sampled));
        Ok(ids.into_iter().zip(chosen).collect())
    }

    /// Chooses tokens on the CPU, from a copy of their rows.
    fn sample_on_host(
        &mut self,
        targets: &BTreeMap<SequenceId, usize>,
        logits: &Tensor,
    ) -> Result<BTreeMap<SequenceId, Option<Sampled>>, EngineError> {
        let vocab_size = self.decoder.config().vocab_size;
        let mut needed: Vec<usize> = targets.values().copied().collect();
        needed.sort_unstable();
        needed.dedup();
        let copy = || {
            let logits = if needed.len() < logits.dim(0)? {
                let needed = needed.iter().filter_map(|&row| u32::try_from(row).ok());
                select(logits, needed.collect())?
            } else {
                logits.clone()
            };
            logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()
        };
        let logits = copy().map_err(model::ModelError::from)?;
        let mut ids = Vec::with_capacity(targets.len());
        let mut rows = Vec::with_capacity(targets.len());
        for (&id, sequence) in &mut self.sequences {
            if let Some(Ok(row)) = targets.get(&id).map(|row| needed.binary_search(row)) {
                ids.push(id);
                let logits = &logits[row * vocab_size..(row + 1) * vocab_size];
                rows.push(sequence.row_to_sample(logits));
            }
        }
        Ok(ids.into_iter().zip(sampling::sample_rows(rows)).collect())
    }

    /// Ends the turns of extended sequences that have no room for a token.
    fn finish_full(&mut self) -> Vec<Finished> {
        let max_context = self.max_context;
        self.sequences
            .iter_mut()
            .filter(|(_, sequence)| {
                sequence.state == State::Running && sequence.tokens.len() >= max_context
            })
            .map(|(&id, sequence)| sequence.finish(id, Ending::of(FinishReason::Length)))
            .collect()
    }

    /// Drops from the plan what the cache has no room for, after taking room from paused and from
    /// younger sequences.
    fn make_room(&mut self, mut planned: Vec<Scheduled>) -> Result<Vec<Scheduled>, EngineError> {
        // New sequences leave a block free for each one that runs, or they would be evicted soon.
        let mut wanted = self.cache.tokens_in_use();
        let mut starting = BTreeSet::new();
        for scheduled in &planned {
            let sequence = &self.sequences[&scheduled.id];
            wanted += sequence.pending().len() + KEYS_PER_BLOCK * (1 + sequence.followers.len());
            if sequence.row.is_none() {
                starting.insert(scheduled.id);
            }
        }
        let is_roomy = wanted <= self.cache.max_tokens();
        if is_roomy || starting.is_empty() {
            for scheduled in &mut planned {
                self.start(scheduled)?;
            }
            let row = |scheduled: &Scheduled| self.sequences[&scheduled.id].row;
            let rows: Vec<RowId> = planned.iter().filter_map(row).collect();
            let added: Vec<usize> = planned.iter().map(|scheduled| scheduled.take).collect();
            if self.cache.fits(&rows, &added) {
                return Ok(planned);
            }
        }

        let mut kept: Vec<Scheduled> = Vec::new();
        let (mut rows, mut added) = (Vec::new(), Vec::new());
        for mut scheduled in planned {
            let sequence = &self.sequences[&scheduled.id];
            let is_starting = starting.contains(&scheduled.id);
            // A running one without a row was evicted for an older one, in this very loop.
            if sequence.row.is_none() && !is_starting {
                continue;
            }
            if is_starting && !kept.is_empty() {
                let copies = kept.len() + 1 + sequence.followers.len();
                let wanted = self.cache.tokens_in_use()
                    + added.iter().sum::<usize>()
                    + sequence.pending().len()
                    + KEYS_PER_BLOCK * copies;
                if wanted > self.cache.max_tokens() {
                    self.unstart(scheduled.id)?;
                    continue;
                }
            }
            rows.push(self.start(&mut scheduled)?);
            added.push(scheduled.take);
            while !self.cache.fits(&rows, &added) {
                let Some(victim) = self.victim(scheduled.id, &kept) else {
                    rows.pop();
                    added.pop();
                    break;
                };
                self.evict(victim)?;
            }
            if rows.len() > kept.len() {
                kept.push(scheduled);
            } else if is_starting {
                self.unstart(scheduled.id)?;
            }
        }
        Ok(kept)
    }

    /// Gives a sequence without a row one, with what the cache knows of its tokens; returns the row.
    fn start(&mut self, scheduled: &mut Scheduled) -> Result<RowId, EngineError> {
        let id = scheduled.id;
        let sequence = self
            .sequences
            .get_mut(&id)
            .ok_or(EngineError::UnknownSequence { id })?;
        if let Some(row) = sequence.row {
            return Ok(row);
        }
        // The last token is always computed, for its logits.
        let blocks = match self.config.prefix_caching {
            PrefixCaching::Off => 0,
            PrefixCaching::Prompts | PrefixCaching::All => {
                (sequence.tokens.len() - 1) / KEYS_PER_BLOCK
            }
        };
        let (row, hit_tokens) = self.cache.add_row_with_prefix(sequence.chain(blocks));
        sequence.row = Some(row);
        sequence.cached = hit_tokens;
        sequence.kept_blocks = hit_tokens / KEYS_PER_BLOCK;
        sequence.prefix_hit_tokens.get_or_insert(hit_tokens);
        scheduled.take = scheduled.take.min(sequence.pending().len());
        self.stats.prefix_hit_tokens += hit_tokens as u64;
        Ok(row)
    }

    /// Takes back what [`Engine::start`] gave to a sequence that has to wait after all.
    fn unstart(&mut self, id: SequenceId) -> Result<(), EngineError> {
        let sequence = self.sequence_mut(id)?;
        let hit_tokens = std::mem::take(&mut sequence.cached);
        sequence.kept_blocks = 0;
        if let Some(row) = sequence.row.take() {
            self.cache.free(row)?;
            self.stats.prefix_hit_tokens -= hit_tokens as u64;
        }
        Ok(())
    }

    /// Keeps the full blocks of a sequence for those that begin like it.
    fn keep_prefix(&mut self, id: SequenceId) -> Result<(), EngineError> {
        let sequence = self
            .sequences
            .get_mut(&id)
            .ok_or(EngineError::UnknownSequence { id })?;
        let worth_keeping = match self.config.prefix_caching {
            PrefixCaching::Off => 0,
            PrefixCaching::Prompts => sequence.cached.min(sequence.prompt_len()),
            PrefixCaching::All => sequence.cached,
        };
        let full = worth_keeping / KEYS_PER_BLOCK;
        let new = sequence.kept_blocks..full;
        if let Some(row) = sequence.row
            && !new.is_empty()
        {
            sequence.kept_blocks = full;
            self.cache.keep_prefix(row, new, sequence.chain(full));
        }
        Ok(())
    }

    /// Returns the sequence that gives way to `id`: a paused one, else the youngest, but none that
    /// is older than `id` or computes in this step.
    fn victim(&self, id: SequenceId, kept: &[Scheduled]) -> Option<SequenceId> {
        let holders = || {
            self.sequences.iter().filter(|(other, sequence)| {
                **other != id
                    && sequence.cached > 0
                    && !kept.iter().any(|scheduled| scheduled.id == **other)
            })
        };
        let paused = holders().find(|(_, sequence)| sequence.state == State::Paused);
        let victim = paused.or_else(|| holders().next_back().filter(|(other, _)| **other > id));
        victim.map(|(other, _)| *other)
    }

    fn evict(&mut self, id: SequenceId) -> Result<(), EngineError> {
        let sequence = self.sequence_mut(id)?;
        sequence.cached = 0;
        sequence.kept_blocks = 0;
        if let Some(row) = sequence.row.take() {
            self.cache.free(row)?;
        }
        self.stats.evictions += 1;
        tracing::debug!(sequence = id.0, "evicted from the key-value cache");
        Ok(())
    }

    fn insert(&mut self, sequence: Sequence) -> SequenceId {
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.sequences.insert(id, sequence);
        id
    }

    fn sequence_mut(&mut self, id: SequenceId) -> Result<&mut Sequence, EngineError> {
        self.sequences
            .get_mut(&id)
            .ok_or(EngineError::UnknownSequence { id })
    }

    fn paused(&mut self, id: SequenceId) -> Result<&mut Sequence, EngineError> {
        let sequence = self.sequence_mut(id)?;
        if sequence.state != State::Paused {
            return Err(EngineError::StillGenerating { id });
        }
        Ok(sequence)
    }
}

/// Returns some rows of a matrix.
fn select(matrix: &Tensor, rows: Vec<u32>) -> candle_core::Result<Tensor> {
    let rows = Tensor::new(rows, matrix.device())?;
    matrix.index_select(&rows, 0)
}
