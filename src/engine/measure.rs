//! Workloads that engines are compared by: whole prompts, and decoding behind prompts.
//!
//! The engine of another program that is given the same workload gets the tokens of [`prompt`]. All is
//! greedy, and nothing ends a turn early.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::model::Decoder;
use super::model::ops::KEYS_PER_BLOCK;
use super::{Engine, EngineConfig, EngineError, SamplingParams, SequenceId, SequenceSeed};

/// Returns the tokens of sequence `index`. No two sequences begin alike.
#[must_use]
pub fn prompt(index: usize, length: usize, vocab_size: usize) -> Vec<u32> {
    (0..length)
        .map(|t| (index * 7919 + t * 104_729) % vocab_size)
        .filter_map(|token| u32::try_from(token).ok())
        .collect()
}

/// Prompts of one length, and how many tokens each is continued by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// How many prompts.
    pub sequences: usize,
    /// Tokens of each.
    pub prompt_tokens: usize,
    /// Decoding steps.
    pub steps: usize,
}

/// Returns the time of whole prompts up to the first token of each.
///
/// # Errors
///
/// Fails if the workload is too long for the model, or if the model does.
pub fn prefill(decoder: &Arc<Decoder>, workload: Workload) -> Result<Duration, EngineError> {
    let (mut engine, _) = engine(decoder, workload, 1)?;
    let start = Instant::now();
    while engine.running() > 0 {
        engine.step()?;
    }
    Ok(start.elapsed())
}

/// An engine whose prompts are computed.
#[derive(Debug)]
pub struct Prefilled {
    engine: Engine,
    workload: Workload,
}

impl Prefilled {
    /// Computes the prompts, and one step more, to warm up.
    ///
    /// # Errors
    ///
    /// As [`prefill`].
    pub fn new(decoder: &Arc<Decoder>, workload: Workload) -> Result<Self, EngineError> {
        // The first to be done decode while the others are not.
        let batch = (EngineConfig::default().max_batch_tokens).max(2 * workload.sequences);
        let prefill_steps = (workload.sequences * workload.prompt_tokens).div_ceil(batch) + 2;
        let (mut engine, ids) = engine(decoder, workload, workload.steps + 2 * prefill_steps)?;
        for id in ids {
            while engine.turn(id)?.tokens.len() < 2 {
                engine.step()?;
            }
        }
        Ok(Self { engine, workload })
    }

    /// Returns the time of the workload's decoding steps.
    ///
    /// # Errors
    ///
    /// Fails if the model does.
    pub fn decode(mut self) -> Result<Duration, EngineError> {
        let before = self.engine.stats().generated_tokens;
        let start = Instant::now();
        for _ in 0..self.workload.steps {
            self.engine.step()?;
        }
        let elapsed = start.elapsed();
        let generated = self.engine.stats().generated_tokens - before;
        let expected = (self.workload.sequences * self.workload.steps) as u64;
        if generated != expected {
            let message = format!("{generated} tokens were generated in place of {expected}");
            return Err(EngineError::Step { message });
        }
        Ok(elapsed)
    }
}

/// Returns an engine with the workload's prompts.
fn engine(
    decoder: &Arc<Decoder>,
    workload: Workload,
    max_new_tokens: usize,
) -> Result<(Engine, Vec<SequenceId>), EngineError> {
    let tokens = (workload.prompt_tokens + max_new_tokens).next_multiple_of(KEYS_PER_BLOCK);
    let default = EngineConfig::default();
    let config = EngineConfig {
        max_running: workload.sequences,
        // A block more for each, or the last would wait for the first.
        max_cache_tokens: workload.sequences * (tokens + KEYS_PER_BLOCK),
        // Room for prompts beside those that decode, or the first would end before the last begin.
        max_batch_tokens: default.max_batch_tokens.max(2 * workload.sequences),
        ..default
    };
    let mut engine = Engine::new(Arc::clone(decoder), config)?;
    let params = SamplingParams {
        temperature: 0.0,
        max_new_tokens,
        ..SamplingParams::default()
    };
    let vocab_size = decoder.config().vocab_size;
    let ids = (0..workload.sequences).map(|index| {
        let prompt = prompt(index, workload.prompt_tokens, vocab_size);
        engine.add(prompt, params.clone(), SequenceSeed::default())
    });
    let ids = ids.collect::<Result<_, _>>()?;
    Ok((engine, ids))
}

#[cfg(test)]
mod tests {
    use super::super::tests::toy_decoder;
    use super::*;

    #[test]
    fn every_prompt_is_computed_and_every_step_decodes_all() {
        let decoder = toy_decoder();
        let workload = Workload {
            sequences: 9,
            prompt_tokens: 300,
            steps: 5,
        };
        assert!(prefill(&decoder, workload).unwrap() > Duration::ZERO);
        let mut prefilled = Prefilled::new(&decoder, workload).unwrap();
        let before = prefilled.engine.stats();
        for _ in 0..workload.steps {
            assert_eq!(prefilled.engine.step().unwrap(), []);
        }
        let after = prefilled.engine.stats();
        assert_eq!(after.generated_tokens - before.generated_tokens, 9 * 5);
        assert_eq!(after.prefill_tokens, 9 * 300);
        assert_eq!(after.evictions, 0);
    }

    #[test]
    fn more_sequences_than_fit_a_batch_of_the_default_decode_all_their_steps() {
        let decoder = toy_decoder();
        let workload = Workload {
            sequences: 2100,
            prompt_tokens: 4,
            steps: 3,
        };
        let prefilled = Prefilled::new(&decoder, workload).unwrap();
        assert!(prefilled.decode().unwrap() > Duration::ZERO);
    }

    #[test]
    fn prompts_are_the_same_numbers_everywhere_and_none_begins_like_another() {
        assert_eq!(prompt(1, 3, 49_152), [7919, 14_344, 20_769]);
        let mut first: Vec<u32> = (0..256).map(|index| prompt(index, 1, 49_152)[0]).collect();
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), 256);
    }
}
