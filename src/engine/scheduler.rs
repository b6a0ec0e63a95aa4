//! Which tokens the next forward pass computes.
//!
//! Sequences that decode come first, one token each, so that a long prompt never stops them; what
//! is left of the batch goes to prompts, in chunks. Within both, the oldest come first: the oldest
//! sequence always advances, so every sequence ends.

use std::collections::BTreeMap;

use super::EngineConfig;
use super::sequence::{Sequence, SequenceId, State};

/// A part of a sequence's pending tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scheduled {
    pub(super) id: SequenceId,
    /// How many of the pending tokens are computed, at least one.
    pub(super) take: usize,
}

/// Plans one step, regardless of the cache's room.
pub(super) fn plan(
    sequences: &BTreeMap<SequenceId, Sequence>,
    config: &EngineConfig,
) -> Vec<Scheduled> {
    let mut decoding = Vec::new();
    let mut prompts = Vec::new();
    let mut running = 0;
    for (&id, sequence) in sequences {
        if sequence.state != State::Running {
            continue;
        }
        running += 1 + sequence.followers.len();
        // A group larger than the limit still runs when it is the only one.
        if running > config.max_running && !(decoding.is_empty() && prompts.is_empty()) {
            break;
        }
        match sequence.pending().len() {
            0 => {}
            1 if sequence.cached > 0 => decoding.push(Scheduled { id, take: 1 }),
            pending => prompts.push(Scheduled {
                id,
                take: pending.min(config.prefill_chunk),
            }),
        }
    }
    let mut left = config.max_batch_tokens;
    let mut planned = Vec::with_capacity(decoding.len() + prompts.len());
    for mut scheduled in decoding.into_iter().chain(prompts) {
        scheduled.take = scheduled.take.min(left);
        if scheduled.take == 0 {
            break;
        }
        left -= scheduled.take;
        planned.push(scheduled);
    }
    planned
}

#[cfg(test)]
mod tests {
    use super::super::{SamplingParams, SequenceSeed};
    use super::*;

    /// Builds sequences from (tokens, cached) pairs, ids in order.
    fn sequences(lengths: &[(usize, usize)]) -> BTreeMap<SequenceId, Sequence> {
        (0..)
            .map(SequenceId)
            .zip(lengths)
            .map(|(id, &(tokens, cached))| {
                let params = SamplingParams::default();
                let mut sequence = Sequence::new(vec![0; tokens], params, SequenceSeed::default());
                sequence.cached = cached;
                (id, sequence)
            })
            .collect()
    }

    fn planned(lengths: &[(usize, usize)], config: &EngineConfig) -> Vec<(u64, usize)> {
        let plan = plan(&sequences(lengths), config);
        plan.into_iter()
            .map(|scheduled| (scheduled.id.0, scheduled.take))
            .collect()
    }

    #[test]
    fn decoding_comes_before_prompts_and_chunks_fill_the_batch() {
        let config = EngineConfig {
            max_batch_tokens: 20,
            prefill_chunk: 12,
            ..EngineConfig::default()
        };
        let lengths = [(30, 4), (9, 8), (30, 0), (30, 0), (5, 4)];
        assert_eq!(
            planned(&lengths, &config),
            [(1, 1), (4, 1), (0, 12), (2, 6)]
        );
    }

    #[test]
    fn a_prompt_of_one_token_is_a_prompt() {
        assert_eq!(planned(&[(1, 0)], &EngineConfig::default()), [(0, 1)]);
    }

    #[test]
    fn only_the_oldest_run_when_there_are_too_many() {
        let config = EngineConfig {
            max_running: 2,
            ..EngineConfig::default()
        };
        assert_eq!(
            planned(&[(3, 2), (3, 2), (3, 2)], &config),
            [(0, 1), (1, 1)]
        );
    }

    #[test]
    fn a_group_beyond_the_limit_runs_alone() {
        let config = EngineConfig {
            max_running: 2,
            ..EngineConfig::default()
        };
        let mut sequences = sequences(&[(3, 0), (3, 0)]);
        let leader = sequences.get_mut(&SequenceId(0)).unwrap();
        leader.followers = (2..10).map(SequenceId).collect();
        assert_eq!(
            plan(&sequences, &config),
            [Scheduled {
                id: SequenceId(0),
                take: 3
            }]
        );
    }
}
