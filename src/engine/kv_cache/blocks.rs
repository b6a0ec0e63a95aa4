//! Rows as lists of shared blocks, whatever a block is made of.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::{ModelError, RowId};
use crate::engine::model::ops::KEYS_PER_BLOCK;
use crate::engine::prefix_cache::{PrefixBlocks, PrefixHash};

/// One of so many kept blocks goes together with one that has to.
const SPARE_SHARE: usize = 32;

/// Where the numbers of blocks are.
pub(super) trait BlockStorage {
    /// Keys and values of 32 tokens for all layers and heads. Its memory is free again when it is
    /// dropped.
    type Block;

    /// Returns a block that nothing was written to.
    fn fresh(&mut self) -> Self::Block;

    /// Returns a block with the numbers of another one.
    fn copy(&mut self, block: &Self::Block) -> Self::Block;

    /// Returns the number of blocks that take memory.
    fn in_use(&self) -> usize;

    /// Gives memory back that no block needs.
    fn shrink(&mut self) {}
}

/// A sequence.
#[derive(Debug)]
pub(super) struct BlockRow<B> {
    pub(super) blocks: Vec<Arc<B>>,
    pub(super) len: usize,
}

impl<B> Default for BlockRow<B> {
    fn default() -> Self {
        Self {
            blocks: Vec::new(),
            len: 0,
        }
    }
}

impl<B> Clone for BlockRow<B> {
    fn clone(&self) -> Self {
        Self {
            blocks: self.blocks.clone(),
            len: self.len,
        }
    }
}

impl<B> BlockRow<B> {
    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.blocks.truncate(self.len.div_ceil(KEYS_PER_BLOCK));
    }

    /// Returns the blocks that adding `added` tokens allocates, a copied block among them.
    fn new_blocks(&self, added: usize) -> usize {
        if added == 0 {
            return 0;
        }
        let fresh = (self.len + added).div_ceil(KEYS_PER_BLOCK) - self.blocks.len();
        let is_partial = !self.len.is_multiple_of(KEYS_PER_BLOCK);
        let is_shared = self
            .blocks
            .last()
            .is_some_and(|block| Arc::strong_count(block) > 1);
        fresh + usize::from(is_partial && is_shared)
    }

    /// Makes room for `added` tokens; what is written to is shared with nobody then.
    fn reserve(&mut self, added: usize, storage: &mut impl BlockStorage<Block = B>) {
        if added == 0 {
            return;
        }
        if !self.len.is_multiple_of(KEYS_PER_BLOCK) {
            let last = self.blocks.last_mut().expect("a partial block exists");
            if Arc::strong_count(last) > 1 {
                *last = Arc::new(storage.copy(last));
            }
        }
        let blocks = (self.len + added).div_ceil(KEYS_PER_BLOCK);
        self.blocks
            .resize_with(blocks, || Arc::new(storage.fresh()));
    }
}

/// Rows in blocks, and full blocks that the next rows may begin with.
#[derive(Debug)]
pub(super) struct Blocks<S: BlockStorage> {
    rows: BTreeMap<RowId, BlockRow<S::Block>>,
    known: PrefixBlocks<S::Block>,
    pub(super) storage: S,
    /// How many kept blocks no row holds, until a row lets go of blocks or takes some over: counting
    /// looks at each of them.
    idle: OnceLock<usize>,
}

impl<S: BlockStorage> Blocks<S> {
    pub(super) fn new(storage: S) -> Self {
        Self {
            rows: BTreeMap::new(),
            known: PrefixBlocks::default(),
            storage,
            idle: OnceLock::new(),
        }
    }

    fn row(&self, id: RowId) -> Result<&BlockRow<S::Block>, ModelError> {
        self.rows
            .get(&id)
            .ok_or(ModelError::UnknownRow { row: id.0 })
    }

    /// Adds an empty row.
    pub(super) fn add(&mut self, id: RowId) {
        self.rows.insert(id, BlockRow::default());
    }

    /// Adds a row that shares the blocks of `of`.
    pub(super) fn fork(&mut self, of: RowId, id: RowId) -> Result<(), ModelError> {
        let row = self.row(of)?.clone();
        self.rows.insert(id, row);
        Ok(())
    }

    pub(super) fn free(&mut self, id: RowId) -> Result<(), ModelError> {
        self.idle.take();
        let row = self.rows.remove(&id);
        row.map(drop).ok_or(ModelError::UnknownRow { row: id.0 })
    }

    /// Adds a row that begins with the longest known prefix of `chain`; returns its length.
    pub(super) fn add_with_prefix(&mut self, id: RowId, chain: &[PrefixHash]) -> usize {
        self.idle.take();
        let blocks = self.known.longest(chain);
        let len = blocks.len() * KEYS_PER_BLOCK;
        self.rows.insert(id, BlockRow { blocks, len });
        len
    }

    /// Keeps the full blocks of a row at the places `range`, whose names are in `chain`.
    pub(super) fn keep(&mut self, id: RowId, range: Range<usize>, chain: &[PrefixHash]) {
        let Some(row) = self.rows.get(&id) else {
            return;
        };
        let end = range.end.min(chain.len());
        for depth in range {
            let is_full = (depth + 1) * KEYS_PER_BLOCK <= row.len;
            if let (true, Some(block), Some(&hash)) =
                (is_full, row.blocks.get(depth), chain.get(depth))
            {
                self.known.keep(hash, depth, block);
            }
        }
        self.known.touch(&chain[..end]);
    }

    /// Frees the blocks that no row holds.
    pub(super) fn clear_prefixes(&mut self) {
        self.idle.take();
        self.known.clear();
        self.storage.shrink();
    }

    /// Returns how many blocks are kept that no row holds: they give way when room is needed.
    pub(super) fn idle(&self) -> usize {
        *self.idle.get_or_init(|| self.known.idle())
    }

    pub(super) fn clear(&mut self) {
        self.rows.clear();
        self.clear_prefixes();
    }

    pub(super) fn truncate(&mut self, id: RowId, len: usize) -> Result<(), ModelError> {
        self.idle.take();
        let row = self.rows.get_mut(&id);
        row.ok_or(ModelError::UnknownRow { row: id.0 })?
            .truncate(len);
        Ok(())
    }

    pub(super) fn len(&self, id: RowId) -> Result<usize, ModelError> {
        Ok(self.row(id)?.len)
    }

    pub(super) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Returns whether so many tokens more may be added to each of `ids`.
    pub(super) fn fits(&self, ids: &[RowId], added: &[usize], max_tokens: usize) -> bool {
        let new_blocks: usize = (ids.iter().zip(added))
            .filter_map(|(id, &added)| Some(self.rows.get(id)?.new_blocks(added)))
            .sum();
        let needed = (self.storage.in_use() + new_blocks) * KEYS_PER_BLOCK;
        needed <= max_tokens || needed - self.idle() * KEYS_PER_BLOCK <= max_tokens
    }

    /// Takes rows out for a forward pass, in batch order, with room for `added` tokens each; give them
    /// back with [`Blocks::restore`].
    pub(super) fn take(
        &mut self,
        ids: &[RowId],
        added: &[usize],
        max_tokens: usize,
    ) -> Result<Vec<BlockRow<S::Block>>, ModelError> {
        check_distinct(ids)?;
        let mut new_blocks = 0;
        for (&id, &added) in ids.iter().zip(added) {
            new_blocks += self.row(id)?.new_blocks(added);
        }
        let max_blocks = max_tokens / KEYS_PER_BLOCK;
        let mut needed = self.storage.in_use() + new_blocks;
        if needed > max_blocks {
            // Some more than needed: choosing looks at all of them.
            let spare = self.idle() / SPARE_SHARE;
            self.idle.take();
            needed -= self.known.evict((needed - max_blocks).max(spare));
        }
        if new_blocks > 0 && needed > max_blocks {
            return Err(ModelError::CacheFull {
                needed: needed * KEYS_PER_BLOCK,
                limit: max_tokens,
            });
        }
        Ok(ids
            .iter()
            .zip(added)
            .map(|(id, &added)| {
                let mut row = self.rows.remove(id).expect("looked up above");
                row.reserve(added, &mut self.storage);
                row
            })
            .collect())
    }

    /// Puts rows back: longer by `added` tokens if the pass has written them, as before if not.
    pub(super) fn restore(
        &mut self,
        ids: &[RowId],
        rows: Vec<BlockRow<S::Block>>,
        added: &[usize],
        is_written: bool,
    ) {
        for ((&id, mut row), added) in ids.iter().zip(rows).zip(added) {
            if is_written {
                row.len += added;
            }
            row.truncate(row.len);
            self.rows.insert(id, row);
        }
    }
}

fn check_distinct(ids: &[RowId]) -> Result<(), ModelError> {
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(ModelError::RepeatedRow { row: pair[0].0 }),
        None => Ok(()),
    }
}
