//! Packing token traces into micro-batches.
//!
//! A micro-batch holds whole sequences up to a budget of tokens. Tokens behind the last one of the loss
//! influence nothing and are left out, as is the last one itself: it is predicted, but predicts
//! nothing.
//!
//! Sequences of one micro-batch that begin alike share what they have in common: the samples of a task
//! their prompt, and forks of an episode all turns before the fork. The common part goes through the
//! model once, and the gradients of all that continue it meet there. The loss and its gradient are
//! those of the sequences apart.

use std::ops::Range;

use super::TrainerError;
use super::credit::TokenCredit;
use super::logprob::Targets;
use super::loss::{LossConfig, SequenceTokens, StepTotals};
use crate::engine::model::PackedBatch;

/// One sequence to learn from: a prompt, an answer, tool output between its turns.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TrainSequence {
    /// The ids, exactly as sampled and fed.
    pub tokens: Vec<u32>,
    /// Whether each token is in the loss: true for sampled ids and for nothing else.
    pub loss_mask: Vec<bool>,
    /// Log-probability of each token when it was sampled. Read only where the mask is true; empty if
    /// the sequence is to be learned by imitation.
    pub logprobs: Vec<f64>,
    /// Log-probability of each token under the reference, if the loss has a divergence term.
    pub reference: Option<Vec<f64>>,
    /// The advantage of all its tokens.
    pub advantage: f64,
    /// What its tokens are credited with one by one, in place of that.
    pub credit: Option<TokenCredit>,
}

impl TrainSequence {
    /// Returns the number of tokens in the loss.
    pub fn trainable_tokens(&self) -> usize {
        self.loss_mask.iter().filter(|&&in_loss| in_loss).count()
    }

    /// Returns the k1 estimate of the divergence of the policy that sampled from the reference, summed
    /// over the tokens in the loss; 0 without a reference.
    pub fn divergence(&self) -> f64 {
        let Some(reference) = &self.reference else {
            return 0.0;
        };
        (self.logprobs.iter().zip(reference).zip(&self.loss_mask))
            .filter(|(_, in_loss)| **in_loss)
            .map(|((logprob, reference), _)| logprob - reference)
            .sum()
    }

    fn check(&self, sequence: usize) -> Result<(), TrainerError> {
        let expected = self.tokens.len();
        let lengths = [
            ("loss mask against tokens", Some(self.loss_mask.len())),
            (
                "log-probabilities against tokens",
                (!self.logprobs.is_empty()).then_some(self.logprobs.len()),
            ),
            (
                "reference against tokens",
                self.reference.as_ref().map(Vec::len),
            ),
            (
                "advantages against tokens",
                (self.credit.as_ref()).map(|credit| credit.advantages.len()),
            ),
        ];
        for (what, found) in lengths {
            if let Some(found) = found.filter(|&found| found != expected) {
                return Err(TrainerError::Length {
                    what,
                    found,
                    expected,
                });
            }
        }
        if self.loss_mask.first() == Some(&true) {
            return Err(TrainerError::FirstTokenInLoss { sequence });
        }
        Ok(())
    }
}

/// Sequences that go through the model together, and what the loss needs for each target.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MicroBatch {
    /// The model's input.
    pub batch: PackedBatch,
    /// Tokens to score.
    pub targets: Targets,
    /// Log-probability of each target when it was sampled; empty for imitation.
    pub sampled: Vec<f64>,
    /// Log-probability of each target under the policy before the step: what the trainer computes for
    /// it, or as it was sampled; empty for imitation, and where a pass is to compare with itself.
    pub old: Vec<f64>,
    /// Log-probability of each target as the trainer computes it without dropout; empty without dropout.
    pub undropped: Vec<f64>,
    /// Log-probability of each target under the reference; empty without one.
    pub reference: Vec<f64>,
    /// Advantage of each target.
    pub advantages: Vec<f64>,
    /// What the value head said of each target before the step; empty without one.
    pub values: Vec<f64>,
    /// What it is to say; empty without one.
    pub returns: Vec<f64>,
    /// Weight of each target in the step's loss.
    pub weights: Vec<f64>,
    /// Weight of each target's entropy in the step's loss.
    pub entropy_weight: f64,
    /// Indices of the sequences, in the order of their targets.
    pub sequences: Vec<usize>,
    /// Where the targets of each sequence end.
    pub ends: Vec<usize>,
}

impl MicroBatch {
    /// Returns whether its tokens are those of its longest sequence: no budget divides it.
    pub(super) fn is_one_path(&self) -> bool {
        let positions = self.batch.positions();
        let deepest = positions
            .iter()
            .max()
            .map_or(0, |&position| position as usize + 1);
        deepest == self.batch.tokens().len()
    }

    /// Returns the targets of each sequence.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| start..end)
    }

    /// Returns what the loss reads of some targets of one sequence, given their log-probabilities.
    pub fn tokens<'a>(&'a self, targets: Range<usize>, logprobs: &'a [f64]) -> SequenceTokens<'a> {
        SequenceTokens {
            logprobs,
            old: self.old.get(targets.clone()).unwrap_or(logprobs),
            sampled: &self.sampled[targets.clone()],
            reference: self.reference.get(targets.clone()).unwrap_or_default(),
            advantages: &self.advantages[targets],
        }
    }

    /// Adds sequences that agree on their first `depth` tokens, which stand in the batch already:
    /// `path` holds where, and `parent` is the last segment of it.
    fn push_tree(
        &mut self,
        members: &[Member<'_>],
        depth: usize,
        parent: Option<usize>,
        path: &mut Vec<usize>,
    ) {
        let mut rest: &[Member<'_>] = members;
        while let Some(first) = rest.first() {
            if first.inputs == depth {
                // Sorting puts a sequence before those that it is the beginning of.
                self.push_targets(first, path);
                rest = &rest[1..];
                continue;
            }
            let branches = |member: &Member<'_>| member.input()[depth] != first.input()[depth];
            let end = rest.iter().position(branches).unwrap_or(rest.len());
            let (siblings, after) = rest.split_at(end);
            // The siblings are sorted, so all agree as far as the first and the last do.
            let shared = common_prefix(first.input(), siblings[siblings.len() - 1].input());
            let tokens = &first.input()[depth..shared];
            let segment = self.batch.segments().len();
            let range = match parent {
                Some(parent) => self.batch.push_child(parent, tokens),
                None => self.batch.push(tokens, 0),
            };
            path.extend(range);
            self.push_tree(siblings, shared, Some(segment), path);
            path.truncate(depth);
            rest = after;
        }
    }

    fn push_targets(&mut self, member: &Member<'_>, path: &[usize]) {
        let sequence = member.sequence;
        self.sequences.push(member.index);
        for token in 1..=member.inputs {
            if !sequence.loss_mask[token] {
                continue;
            }
            // Token t is scored by the hidden state of token t - 1.
            self.targets.positions.push(path[token - 1]);
            self.targets.tokens.push(sequence.tokens[token]);
            self.sampled.extend(sequence.logprobs.get(token));
            self.reference.extend(
                sequence
                    .reference
                    .as_ref()
                    .map(|reference| reference[token]),
            );
            let credit = sequence.credit.as_ref();
            self.advantages
                .push(credit.map_or(sequence.advantage, |credit| credit.advantages[token]));
            self.values
                .extend(credit.and_then(|credit| credit.values.get(token)));
            self.returns
                .extend(credit.and_then(|credit| credit.returns.get(token)));
            self.weights.push(member.weight);
        }
        self.ends.push(self.targets.len());
    }
}

/// A sequence on its way into a micro-batch.
#[derive(Clone, Copy)]
struct Member<'a> {
    index: usize,
    sequence: &'a TrainSequence,
    /// Tokens that go through the model.
    inputs: usize,
    weight: f64,
}

impl<'a> Member<'a> {
    fn input(&self) -> &'a [u32] {
        &self.sequence.tokens[..self.inputs]
    }
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Packs sequences into micro-batches of at most `token_budget` tokens, in the order given.
///
/// Give sequences that begin alike one after the other, so that they land in one micro-batch and share
/// their beginning. A sequence longer than the budget gets a micro-batch of its own; one without tokens
/// in the loss gets none, though `totals` may count it.
///
/// # Errors
///
/// Fails if a sequence's lists have different lengths, or if its first token is in the loss.
pub fn pack(
    sequences: &[TrainSequence],
    token_budget: usize,
    config: &LossConfig,
    totals: StepTotals,
) -> Result<Vec<MicroBatch>, TrainerError> {
    let mut batches: Vec<Vec<Member<'_>>> = Vec::new();
    let mut room = 0;
    for (index, sequence) in sequences.iter().enumerate() {
        sequence.check(index)?;
        let Some(inputs) = sequence.loss_mask.iter().rposition(|&in_loss| in_loss) else {
            continue;
        };
        let weight = config.token_weight(totals, sequence.trainable_tokens());
        let member = Member {
            index,
            sequence,
            inputs,
            weight,
        };
        // What it adds to its predecessor: the tree may be smaller still.
        let shared = (batches.last().and_then(|batch| batch.last()))
            .map_or(0, |last| common_prefix(last.input(), member.input()));
        match batches.last_mut() {
            Some(batch) if inputs - shared <= room => {
                room -= inputs - shared;
                batch.push(member);
            }
            _ => {
                room = token_budget.saturating_sub(inputs);
                batches.push(vec![member]);
            }
        }
    }
    let tree = |mut members: Vec<Member<'_>>| {
        members.sort_by(|a, b| a.input().cmp(b.input()).then(a.index.cmp(&b.index)));
        let mut batch = MicroBatch::default();
        batch.push_tree(&members, 0, None, &mut Vec::new());
        batch.old.clone_from(&batch.sampled);
        batch.entropy_weight = config.entropy_weight(totals);
        batch
    };
    Ok(batches.into_iter().map(tree).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(tokens: &[u32], mask: &[u8]) -> TrainSequence {
        TrainSequence {
            tokens: tokens.to_vec(),
            loss_mask: mask.iter().map(|&m| m == 1).collect(),
            logprobs: tokens.iter().map(|&token| -f64::from(token)).collect(),
            reference: None,
            advantage: 1.0,
            credit: None,
        }
    }

    fn pack_all(sequences: &[TrainSequence], budget: usize) -> Vec<MicroBatch> {
        let config = LossConfig::default();
        let totals = config.totals(sequences.iter().map(TrainSequence::trainable_tokens));
        pack(sequences, budget, &config, totals).unwrap()
    }

    #[test]
    fn a_token_is_scored_by_the_one_before_it() {
        let sequences = [
            sequence(&[10, 11, 12, 13], &[0, 0, 1, 1]),
            sequence(&[20, 21, 22], &[0, 1, 0]),
        ];
        let [batch] = pack_all(&sequences, 100).try_into().unwrap();
        assert_eq!(batch.batch.tokens(), [10, 11, 12, 20]);
        assert_eq!(batch.batch.segments(), [0..3, 3..4]);
        assert_eq!(batch.targets.positions, [1, 2, 3]);
        assert_eq!(batch.targets.tokens, [12, 13, 21]);
        assert_eq!(batch.old, [-12.0, -13.0, -21.0]);
        assert_eq!(batch.weights, [1.0 / 3.0; 3]);
    }

    #[test]
    fn the_mask_hits_sampled_ids_and_nothing_else() {
        let tool_turn = sequence(&[1, 2, 3, 4, 5, 6, 7], &[0, 1, 1, 0, 0, 1, 0]);
        let [batch] = pack_all(&[tool_turn], 100).try_into().unwrap();
        assert_eq!(batch.targets.tokens, [2, 3, 6]);
        assert_eq!(
            batch.batch.tokens(),
            [1, 2, 3, 4, 5],
            "tool tokens are still attended to"
        );
    }

    #[test]
    fn sequences_share_their_common_beginning() {
        let sequences = [
            sequence(&[1, 2, 3, 4, 5], &[0, 0, 0, 1, 1]),
            sequence(&[1, 2, 3, 4, 6, 7], &[0, 0, 0, 1, 1, 1]),
            sequence(&[1, 2, 8, 9], &[0, 0, 1, 1]),
            sequence(&[1, 2, 3, 4, 5], &[0, 0, 0, 1, 1]),
            sequence(&[7, 1, 2], &[0, 1, 1]),
        ];
        let [batch] = pack_all(&sequences, 100).try_into().unwrap();
        // Inputs: 1234 twice, 12346, 128, 71.
        assert_eq!(batch.batch.tokens(), [1, 2, 3, 4, 6, 8, 7, 1]);
        let histories: Vec<usize> = (batch.batch.histories().iter())
            .map(|history| history.iter().map(Range::len).sum())
            .collect();
        assert_eq!(batch.batch.segments(), [0..2, 2..4, 4..5, 5..6, 6..8]);
        assert_eq!(histories, [0, 2, 4, 2, 0]);
        assert_eq!(batch.sequences, [0, 3, 1, 2, 4]);
        assert_eq!(batch.targets.positions, [2, 3, 2, 3, 2, 3, 4, 1, 5, 6, 7]);
        assert_eq!(batch.targets.tokens, [4, 5, 4, 5, 4, 6, 7, 8, 9, 1, 2]);
        assert_eq!(batch.old.len(), 11);
    }

    #[test]
    fn a_shared_beginning_counts_once_against_the_budget() {
        let sequences: Vec<_> = (0..4)
            .map(|i| sequence(&[1, 2, 3, 4, i, 9], &[0, 0, 0, 0, 1, 1]))
            .collect();
        let batches = pack_all(&sequences, 6);
        let sizes: Vec<_> = batches.iter().map(|batch| batch.batch.len()).collect();
        assert_eq!(sizes, [6, 6]);
    }

    #[test]
    fn the_budget_splits_between_sequences_only() {
        let sequences = [
            sequence(&[1, 2, 3], &[0, 0, 1]),
            sequence(&[2, 2, 3, 4], &[0, 0, 0, 1]),
            sequence(&[3, 2], &[0, 0]),
            sequence(&[4, 2, 3, 4, 5, 6], &[0, 0, 0, 0, 0, 1]),
            sequence(&[5, 2], &[0, 1]),
        ];
        let batches = pack_all(&sequences, 4);
        let packed: Vec<_> = batches
            .iter()
            .map(|batch| batch.sequences.clone())
            .collect();
        assert_eq!(packed, [vec![0], vec![1], vec![3], vec![4]]);
        let weights: f64 = batches.iter().flat_map(|batch| &batch.weights).sum();
        assert!(
            (weights - 1.0).abs() < 1e-12,
            "one denominator spans all micro-batches"
        );
    }

    #[test]
    fn inconsistent_sequences_are_refused() {
        let config = LossConfig::default();
        let totals = StepTotals {
            sequences: 1,
            tokens: 1,
        };
        let first = sequence(&[1, 2], &[1, 0]);
        let error = pack(&[first], 10, &config, totals).unwrap_err();
        assert!(
            error.to_string().contains("first token in the loss"),
            "{error}"
        );
        let short = TrainSequence {
            loss_mask: vec![false],
            ..sequence(&[1, 2], &[0, 0])
        };
        let error = pack(&[short], 10, &config, totals).unwrap_err();
        assert_eq!(error.to_string(), "loss mask against tokens: 1 != 2");
    }
}
