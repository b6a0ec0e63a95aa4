//! Sequences laid end to end, and trees of them.

use std::ops::Range;

use super::{AdapterId, ModelError};

/// Tokens of several sequences laid end to end, without padding.
///
/// `tokens` and `positions` are `[n]`; `segments` gives each sequence's range. Segments are in
/// order, touch each other and cover all tokens.
///
/// A segment may continue another one, its parent: its tokens attend to the parent's, to those of
/// the parent's own parent, and so on. So a prompt that many answers share goes through the model
/// once. Attention crosses segments in no other way.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PackedBatch {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    segments: Vec<Range<usize>>,
    histories: Vec<Vec<Range<usize>>>,
    adapters: Vec<Option<AdapterId>>,
}

impl PackedBatch {
    /// Returns an empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Packs whole sequences, each with positions from 0.
    pub fn from_sequences<S: AsRef<[u32]>>(sequences: impl IntoIterator<Item = S>) -> Self {
        let mut batch = Self::new();
        for sequence in sequences {
            batch.push(sequence.as_ref(), 0);
        }
        batch
    }

    /// Appends one sequence whose first token stands at `first_position`, and returns its range.
    ///
    /// # Panics
    ///
    /// Panics if a position exceeds `u32::MAX`.
    pub fn push(&mut self, tokens: &[u32], first_position: usize) -> Range<usize> {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.positions.extend((0..tokens.len()).map(|offset| {
            u32::try_from(first_position + offset).expect("a position fits in 32 bits")
        }));
        let segment = start..self.tokens.len();
        self.segments.push(segment.clone());
        self.histories.push(Vec::new());
        self.adapters.push(None);
        segment
    }

    /// Appends one sequence as [`PackedBatch::push`] does, to be computed with an adapter from beside
    /// the base; see [`Decoder::add_adapter`](super::Decoder::add_adapter).
    ///
    /// # Panics
    ///
    /// Panics if a position exceeds `u32::MAX`.
    pub fn push_adapted(
        &mut self,
        tokens: &[u32],
        first_position: usize,
        adapter: Option<AdapterId>,
    ) -> Range<usize> {
        let segment = self.push(tokens, first_position);
        if let Some(last) = self.adapters.last_mut() {
            *last = adapter;
        }
        segment
    }

    /// Appends tokens that continue segment `parent`, with its adapter, and returns their range.
    ///
    /// # Panics
    ///
    /// Panics if there is no such segment.
    pub fn push_child(&mut self, parent: usize, tokens: &[u32]) -> Range<usize> {
        let mut history = self.histories[parent].clone();
        history.push(self.segments[parent].clone());
        let before: usize = history.iter().map(Range::len).sum();
        let segment = self.push_adapted(tokens, before, self.adapters[parent]);
        if let Some(last) = self.histories.last_mut() {
            *last = history;
        }
        segment
    }

    /// Returns the tokens, `[n]`.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns each token's position in its own sequence, `[n]`.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Returns each sequence's range of `tokens`.
    pub fn segments(&self) -> &[Range<usize>] {
        &self.segments
    }

    /// Returns the ranges that each segment's tokens see before their own, oldest first: empty for a
    /// sequence of its own.
    pub fn histories(&self) -> &[Vec<Range<usize>>] {
        &self.histories
    }

    /// Returns each segment's adapter from beside the base.
    pub fn adapters(&self) -> &[Option<AdapterId>] {
        &self.adapters
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the index of each segment's last token, for sampling what follows it.
    ///
    /// Empty segments are left out.
    pub fn last_tokens(&self) -> Vec<usize> {
        (self.segments.iter())
            .filter(|s| !s.is_empty())
            .map(|s| s.end - 1)
            .collect()
    }

    /// Fails if a segment does not start where its row of the cache, which has one of `lengths`, ends.
    pub(super) fn check_continues(
        &self,
        lengths: impl Iterator<Item = usize>,
    ) -> Result<(), ModelError> {
        for (segment, length) in self.segments.iter().zip(lengths) {
            let first = self.positions.get(segment.start);
            let first = first.map_or(length, |&position| position as usize);
            if !segment.is_empty() && first != length {
                return Err(ModelError::Mismatch {
                    what: "first position of a segment against its cache row",
                    found: first,
                    expected: length,
                });
            }
        }
        Ok(())
    }

    /// Returns the last tokens of some segments, each as a segment that sees nothing before it here.
    pub(super) fn tails(&self, segments: &[usize]) -> Self {
        let mut tails = Self::new();
        for &segment in segments {
            let last = self.segments[segment].end - 1;
            let position = self.positions[last] as usize;
            tails.push_adapted(&[self.tokens[last]], position, self.adapters[segment]);
        }
        tails
    }

    pub(super) fn check(&self, vocab_size: usize, limit: usize) -> Result<(), ModelError> {
        for &token in &self.tokens {
            if token as usize >= vocab_size {
                return Err(ModelError::TokenOutOfRange { token, vocab_size });
            }
        }
        match self.positions.iter().max() {
            Some(&last) if last as usize >= limit => Err(ModelError::SequenceTooLong {
                length: last as usize + 1,
                limit,
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_touch_and_cover_every_token() {
        let mut batch = PackedBatch::from_sequences([vec![5, 6, 7], vec![8]]);
        batch.push(&[9, 10], 4);
        assert_eq!(batch.tokens(), [5, 6, 7, 8, 9, 10]);
        assert_eq!(batch.positions(), [0, 1, 2, 0, 4, 5]);
        assert_eq!(batch.segments(), [0..3, 3..4, 4..6]);
        assert_eq!(batch.last_tokens(), [2, 3, 5]);
    }

    #[test]
    fn a_child_stands_behind_all_its_ancestors() {
        let mut batch = PackedBatch::from_sequences([vec![1, 2, 3]]);
        assert_eq!(batch.push_child(0, &[4]), 3..4);
        assert_eq!(batch.push_child(1, &[5, 6]), 4..6);
        assert_eq!(batch.push_child(0, &[7]), 6..7);
        assert_eq!(batch.positions(), [0, 1, 2, 3, 4, 5, 3]);
        let seen: Vec<Vec<usize>> = batch
            .histories()
            .iter()
            .map(|h| h.iter().cloned().flatten().collect())
            .collect();
        assert_eq!(
            seen,
            [vec![], vec![0, 1, 2], vec![0, 1, 2, 3], vec![0, 1, 2]]
        );
    }

    #[test]
    fn tokens_outside_the_vocabulary_and_overlong_sequences_are_refused() {
        let batch = PackedBatch::from_sequences([vec![1, 2, 3]]);
        batch.check(4, 3).unwrap();
        let error = batch.check(3, 3).unwrap_err();
        assert_eq!(error.to_string(), "token 3 is outside the vocabulary of 3");
        let error = batch.check(4, 2).unwrap_err();
        assert_eq!(error.to_string(), "sequence length limit exceeded: 3 > 2");
    }
}
