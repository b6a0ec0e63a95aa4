//! Sums whose bits do not depend on who holds which part.

use std::ops::Range;

use rayon::prelude::*;

use super::CollectiveError;

/// Elements that one rayon task adds.
const TASK_ELEMENTS: usize = 1 << 14;

/// Numbers in host memory.
#[derive(Debug, Clone, PartialEq)]
pub enum Numbers {
    /// In single precision.
    F32(Vec<f32>),
    /// In double precision.
    F64(Vec<f64>),
}

impl Numbers {
    /// Returns how many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(numbers) => numbers.len(),
            Self::F64(numbers) => numbers.len(),
        }
    }

    /// Returns whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes of one number.
    pub(super) fn width(&self) -> usize {
        match self {
            Self::F32(_) => size_of::<f32>(),
            Self::F64(_) => size_of::<f64>(),
        }
    }

    /// Returns zeros of the same kind.
    pub(super) fn zeros_like(&self) -> Self {
        match self {
            Self::F32(numbers) => Self::F32(vec![0.0; numbers.len()]),
            Self::F64(numbers) => Self::F64(vec![0.0; numbers.len()]),
        }
    }

    /// Returns a stretch of them.
    pub(super) fn slice(&self, range: Range<usize>) -> Self {
        match self {
            Self::F32(numbers) => Self::F32(numbers[range].to_vec()),
            Self::F64(numbers) => Self::F64(numbers[range].to_vec()),
        }
    }

    /// Replaces those from `start` on by as many as `other` has, of the same kind.
    pub(super) fn put(&mut self, start: usize, other: &Self) {
        match (self, other) {
            (Self::F32(numbers), Self::F32(other)) => {
                numbers[start..start + other.len()].copy_from_slice(other);
            }
            (Self::F64(numbers), Self::F64(other)) => {
                numbers[start..start + other.len()].copy_from_slice(other);
            }
            _ => unreachable!("a sum's parts are of one kind"),
        }
    }

    pub(super) fn write_to(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::F32(numbers) => bytes.extend(numbers.iter().flat_map(|n| n.to_le_bytes())),
            Self::F64(numbers) => bytes.extend(numbers.iter().flat_map(|n| n.to_le_bytes())),
        }
    }

    /// Reads numbers of the same kind from all of `bytes`, whose length is a multiple of their width.
    pub(super) fn read_like(&self, bytes: &[u8]) -> Self {
        match self {
            Self::F32(_) => {
                let numbers = bytes.as_chunks::<4>().0.iter().copied();
                Self::F32(numbers.map(f32::from_le_bytes).collect())
            }
            Self::F64(_) => {
                let numbers = bytes.as_chunks::<8>().0.iter().copied();
                Self::F64(numbers.map(f64::from_le_bytes).collect())
            }
        }
    }

    fn fits(&self, other: &Self) -> bool {
        self.width() == other.width() && self.len() == other.len()
    }

    fn add(&mut self, other: &Self) {
        fn add<T: Copy + std::ops::AddAssign + Send + Sync>(sum: &mut [T], other: &[T]) {
            sum.par_chunks_mut(TASK_ELEMENTS)
                .zip(other.par_chunks(TASK_ELEMENTS))
                .for_each(|(sum, other)| {
                    for (sum, other) in sum.iter_mut().zip(other) {
                        *sum += *other;
                    }
                });
        }
        match (self, other) {
            (Self::F32(sum), Self::F32(other)) => add(sum, other),
            (Self::F64(sum), Self::F64(other)) => add(sum, other),
            _ => unreachable!("a sum's parts are of one kind"),
        }
    }
}

/// A sum of vectors, its parts, in the order of a binary tree that halves them again and again.
///
/// Parts come in order, and two halves are added as soon as both are there: so at most as many vectors
/// are held at a time as the tree is deep, and one.
#[derive(Debug, Clone)]
pub struct OrderedSum {
    total: usize,
    /// Neighbours, each the sum of a node of the tree.
    nodes: Vec<(Range<usize>, Numbers)>,
}

impl OrderedSum {
    /// Returns a sum of `total` parts that has none yet.
    #[must_use]
    pub fn new(total: usize) -> Self {
        Self {
            total,
            nodes: Vec::new(),
        }
    }

    /// Adds part `part`, the next one.
    ///
    /// # Errors
    ///
    /// Fails if it is not the next, or is not of the others' kind and length.
    pub fn push(&mut self, part: usize, numbers: Numbers) -> Result<(), CollectiveError> {
        self.push_node(part..part + 1, numbers)
    }

    /// Returns the sum of all parts.
    ///
    /// # Errors
    ///
    /// Fails if some are missing.
    pub fn finish(mut self) -> Result<Numbers, CollectiveError> {
        match self.nodes.pop() {
            Some((range, numbers)) if self.nodes.is_empty() && range == (0..self.total) => {
                Ok(numbers)
            }
            last => {
                self.nodes.extend(last);
                Err(self.wrong(None))
            }
        }
    }

    /// Returns the nodes held: what of the tree is whole.
    pub(super) fn nodes(&self) -> &[(Range<usize>, Numbers)] {
        &self.nodes
    }

    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// Adds the sum of a node of the tree that begins where the parts end that are there.
    pub(super) fn push_node(
        &mut self,
        range: Range<usize>,
        numbers: Numbers,
    ) -> Result<(), CollectiveError> {
        let follows = self
            .nodes
            .last()
            .is_none_or(|(last, others)| last.end == range.start && others.fits(&numbers));
        if !follows || range.is_empty() || range.end > self.total {
            return Err(self.wrong(Some(range)));
        }
        self.nodes.push((range, numbers));
        while let [.., (left, _), (right, _)] = self.nodes.as_slice()
            && are_halves(left, right, self.total)
        {
            let Some((right, numbers)) = self.nodes.pop() else {
                break;
            };
            if let Some((left, sum)) = self.nodes.last_mut() {
                sum.add(&numbers);
                left.end = right.end;
            }
        }
        Ok(())
    }

    fn wrong(&self, next: Option<Range<usize>>) -> CollectiveError {
        let ranges = self
            .nodes
            .iter()
            .map(|(range, _)| range.clone())
            .chain(next);
        CollectiveError::Parts {
            total: self.total,
            found: format!("{:?}", ranges.collect::<Vec<_>>()),
        }
    }
}

/// Returns the nodes of the tree over `total` parts that make up `share`.
pub(super) fn nodes_of(share: &Range<usize>, total: usize) -> Vec<Range<usize>> {
    fn visit(node: Range<usize>, share: &Range<usize>, found: &mut Vec<Range<usize>>) {
        if node.is_empty() || node.end <= share.start || share.end <= node.start {
            return;
        }
        if share.start <= node.start && node.end <= share.end {
            found.push(node);
            return;
        }
        let middle = usize::midpoint(node.start, node.end);
        visit(node.start..middle, share, found);
        visit(middle..node.end, share, found);
    }
    let mut found = Vec::new();
    visit(0..total, share, &mut found);
    found
}

/// Returns whether two neighbours are the halves of a node of the tree over `total` parts.
fn are_halves(left: &Range<usize>, right: &Range<usize>, total: usize) -> bool {
    let mut node = 0..total;
    loop {
        let middle = usize::midpoint(node.start, node.end);
        if node.start == left.start && node.end == right.end && left.end == middle {
            return true;
        }
        node = if right.end <= middle {
            node.start..middle
        } else if left.start >= middle && node.len() > 1 {
            middle..node.end
        } else {
            return false;
        };
    }
}
