//! Keys and values of the sequences that are being generated.
//!
//! A [`KvCache`] holds rows; a row is one sequence. On the CPU a row is a list of blocks of 32 tokens,
//! shared by reference count: [`KvCache::fork`] copies no token, and the first write to a shared
//! block copies that block alone. So the completions of one prompt share its blocks.
//!
//! Full blocks stay behind as long as there is room ([`PrefixBlocks`]), under a name that says which
//! tokens they and all before them hold: a row that begins with the same tokens takes them over.
//!
//! A row's numbers belong to the weights that made them. Whoever updates the weights frees the rows or
//! accepts that their history is off-policy; the cache does not know.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::model::ModelError;
use super::model::ops::{
    HeadShape, KEYS_PER_BLOCK, KeyValues, Real, key_block_len, write_key_value,
};
use super::prefix_cache::{PrefixBlocks, PrefixHash};

/// One of so many kept blocks goes together with one that has to.
const SPARE_SHARE: usize = 32;

/// Names one sequence of a [`KvCache`]. Numbers are never used again, so a stale one is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowId(usize);

/// Keys and values of many sequences.
#[derive(Debug)]
pub struct KvCache {
    rows: Rows,
    next_row: usize,
    max_tokens: usize,
    layers: usize,
    shape: HeadShape,
    dtype: DType,
    blocks_in_use: Arc<AtomicUsize>,
    prefixes: Prefixes,
    /// How many kept blocks no row holds, until a row lets go of blocks or takes some over: counting
    /// looks at each of them.
    idle: OnceLock<usize>,
}

/// Full blocks that the next rows may begin with.
#[derive(Debug)]
enum Prefixes {
    F32(PrefixBlocks<Block<f32>>),
    F64(PrefixBlocks<Block<f64>>),
    /// Rows of tensors have no blocks.
    None,
}

#[derive(Debug)]
enum Rows {
    F32(BTreeMap<RowId, BlockRow<f32>>),
    F64(BTreeMap<RowId, BlockRow<f64>>),
    Tensors(BTreeMap<RowId, TensorRow>),
}

/// A sequence on the CPU.
#[derive(Debug, Clone)]
pub(crate) struct BlockRow<T> {
    blocks: Vec<Arc<Block<T>>>,
    len: usize,
}

/// Keys and values of 32 tokens for all layers and heads, and a share in the count of live blocks.
#[derive(Debug)]
struct Block<T> {
    values: Vec<T>,
    in_use: Arc<AtomicUsize>,
}

/// A sequence on another device: for each layer, keys and values `[kv_heads, len, head_dim]`.
#[derive(Debug, Clone, Default)]
pub(crate) struct TensorRow {
    pub(crate) layers: Vec<(Tensor, Tensor)>,
    pub(crate) len: usize,
}

impl<T: Real> Block<T> {
    fn new(len: usize, in_use: &Arc<AtomicUsize>) -> Self {
        in_use.fetch_add(1, Ordering::Relaxed);
        Self {
            values: vec![T::ZERO; len],
            in_use: Arc::clone(in_use),
        }
    }
}

impl<T: Clone> Clone for Block<T> {
    fn clone(&self) -> Self {
        self.in_use.fetch_add(1, Ordering::Relaxed);
        Self {
            values: self.values.clone(),
            in_use: Arc::clone(&self.in_use),
        }
    }
}

impl<T> Drop for Block<T> {
    fn drop(&mut self) {
        self.in_use.fetch_sub(1, Ordering::Relaxed);
    }
}

impl KvCache {
    /// Makes an empty cache. `fused` says whether rows live in blocks on the CPU.
    pub(crate) fn new(
        layers: usize,
        shape: HeadShape,
        dtype: DType,
        fused: bool,
        max_tokens: usize,
    ) -> Self {
        let rows = match (fused, dtype) {
            (true, DType::F64) => Rows::F64(BTreeMap::new()),
            (true, _) => Rows::F32(BTreeMap::new()),
            (false, _) => Rows::Tensors(BTreeMap::new()),
        };
        let prefixes = match &rows {
            Rows::F32(_) => Prefixes::F32(PrefixBlocks::default()),
            Rows::F64(_) => Prefixes::F64(PrefixBlocks::default()),
            Rows::Tensors(_) => Prefixes::None,
        };
        let blocks_in_use = Arc::new(AtomicUsize::new(0));
        Self {
            prefixes,
            idle: OnceLock::new(),
            rows,
            next_row: 0,
            max_tokens,
            layers,
            shape,
            dtype,
            blocks_in_use,
        }
    }

    /// Adds an empty row.
    pub fn add_row(&mut self) -> RowId {
        let id = RowId(self.next_row);
        self.next_row += 1;
        match &mut self.rows {
            Rows::F32(rows) => drop(rows.insert(
                id,
                BlockRow {
                    blocks: Vec::new(),
                    len: 0,
                },
            )),
            Rows::F64(rows) => drop(rows.insert(
                id,
                BlockRow {
                    blocks: Vec::new(),
                    len: 0,
                },
            )),
            Rows::Tensors(rows) => drop(rows.insert(id, TensorRow::default())),
        }
        id
    }

    /// Adds a row that continues `row`. No token is copied until one of the two is written to.
    ///
    /// # Errors
    ///
    /// Fails if `row` was freed.
    pub fn fork(&mut self, row: RowId) -> Result<RowId, ModelError> {
        let id = RowId(self.next_row);
        let unknown = ModelError::UnknownRow { row: row.0 };
        match &mut self.rows {
            Rows::F32(rows) => drop(rows.insert(id, rows.get(&row).cloned().ok_or(unknown)?)),
            Rows::F64(rows) => drop(rows.insert(id, rows.get(&row).cloned().ok_or(unknown)?)),
            Rows::Tensors(rows) => drop(rows.insert(id, rows.get(&row).cloned().ok_or(unknown)?)),
        }
        self.next_row += 1;
        Ok(id)
    }

    /// Forgets a row. Blocks that no other row shares are released at once.
    ///
    /// # Errors
    ///
    /// Fails if `row` was freed before.
    pub fn free(&mut self, row: RowId) -> Result<(), ModelError> {
        self.idle.take();
        let known = match &mut self.rows {
            Rows::F32(rows) => rows.remove(&row).is_some(),
            Rows::F64(rows) => rows.remove(&row).is_some(),
            Rows::Tensors(rows) => rows.remove(&row).is_some(),
        };
        if known {
            Ok(())
        } else {
            Err(ModelError::UnknownRow { row: row.0 })
        }
    }

    /// Adds a row that begins with the longest known prefix of the blocks that `chain` names;
    /// returns how many tokens that is, too.
    pub(super) fn add_row_with_prefix(&mut self, chain: &[PrefixHash]) -> (RowId, usize) {
        self.idle.take();
        let id = self.add_row();
        let len = match (&mut self.rows, &mut self.prefixes) {
            (Rows::F32(rows), Prefixes::F32(known)) => begin_with(rows, id, known.longest(chain)),
            (Rows::F64(rows), Prefixes::F64(known)) => begin_with(rows, id, known.longest(chain)),
            _ => 0,
        };
        (id, len)
    }

    /// Keeps the full blocks of a row at the places `range`, whose names are in `chain`, for rows
    /// to come.
    pub(super) fn keep_prefix(
        &mut self,
        row: RowId,
        range: std::ops::Range<usize>,
        chain: &[PrefixHash],
    ) {
        match (&self.rows, &mut self.prefixes) {
            (Rows::F32(rows), Prefixes::F32(known)) => keep_blocks(rows, known, row, range, chain),
            (Rows::F64(rows), Prefixes::F64(known)) => keep_blocks(rows, known, row, range, chain),
            _ => {}
        }
    }

    /// Returns whether rows can share prefixes: those in blocks can.
    pub(super) fn shares_prefixes(&self) -> bool {
        !matches!(self.prefixes, Prefixes::None)
    }

    /// Frees the blocks that no row holds.
    pub(super) fn clear_prefixes(&mut self) {
        self.idle.take();
        match &mut self.prefixes {
            Prefixes::F32(known) => known.clear(),
            Prefixes::F64(known) => known.clear(),
            Prefixes::None => {}
        }
    }

    /// Returns how many blocks are kept that no row holds: they give way when room is needed.
    fn idle_blocks(&self) -> usize {
        *self.idle.get_or_init(|| match &self.prefixes {
            Prefixes::F32(known) => known.idle(),
            Prefixes::F64(known) => known.idle(),
            Prefixes::None => 0,
        })
    }

    /// Returns the bytes that one token takes.
    pub(super) fn bytes_per_token(&self) -> usize {
        let number = match &self.rows {
            Rows::F32(_) => size_of::<f32>(),
            Rows::F64(_) => size_of::<f64>(),
            Rows::Tensors(_) => self.dtype.size_in_bytes(),
        };
        2 * self.layers * self.shape.key_width() * number
    }

    /// Forgets all rows and prefixes, as after an update of the weights.
    pub fn clear(&mut self) {
        self.clear_prefixes();
        match &mut self.rows {
            Rows::F32(rows) => rows.clear(),
            Rows::F64(rows) => rows.clear(),
            Rows::Tensors(rows) => rows.clear(),
        }
    }

    /// Shortens a row to its first `len` tokens; does nothing if it is shorter.
    ///
    /// # Errors
    ///
    /// Fails if `row` was freed, or if the tensor library does on another device than the CPU.
    pub fn truncate(&mut self, row: RowId, len: usize) -> Result<(), ModelError> {
        self.idle.take();
        let unknown = ModelError::UnknownRow { row: row.0 };
        match &mut self.rows {
            Rows::F32(rows) => rows.get_mut(&row).ok_or(unknown)?.truncate(len),
            Rows::F64(rows) => rows.get_mut(&row).ok_or(unknown)?.truncate(len),
            Rows::Tensors(rows) => {
                let row = rows.get_mut(&row).ok_or(unknown)?;
                if len < row.len {
                    for (keys, values) in &mut row.layers {
                        *keys = keys.narrow(1, 0, len)?.contiguous()?;
                        *values = values.narrow(1, 0, len)?.contiguous()?;
                    }
                    row.len = len;
                }
            }
        }
        Ok(())
    }

    /// Returns the number of tokens in a row.
    ///
    /// # Errors
    ///
    /// Fails if `row` was freed.
    pub fn len(&self, row: RowId) -> Result<usize, ModelError> {
        let len = match &self.rows {
            Rows::F32(rows) => rows.get(&row).map(|row| row.len),
            Rows::F64(rows) => rows.get(&row).map(|row| row.len),
            Rows::Tensors(rows) => rows.get(&row).map(|row| row.len),
        };
        len.ok_or(ModelError::UnknownRow { row: row.0 })
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        match &self.rows {
            Rows::F32(rows) => rows.len(),
            Rows::F64(rows) => rows.len(),
            Rows::Tensors(rows) => rows.len(),
        }
    }

    /// Returns the number of tokens that rows hold memory for: shared blocks count once, and
    /// blocks that are kept for rows to come do not count.
    pub fn tokens_in_use(&self) -> usize {
        match &self.rows {
            Rows::F32(_) | Rows::F64(_) => {
                (self.blocks_in_use.load(Ordering::Relaxed) - self.idle_blocks()) * KEYS_PER_BLOCK
            }
            Rows::Tensors(rows) => rows.values().map(|row| row.len).sum(),
        }
    }

    /// Returns the number of blocks that take memory, kept ones included.
    #[cfg(test)]
    pub(super) fn blocks(&self) -> usize {
        self.blocks_in_use.load(Ordering::Relaxed)
    }

    /// Returns the number of tokens that the cache may hold.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Takes rows out for a forward pass, in batch order, with room for `added` tokens each.
    fn take_blocks<T: CacheReal>(
        &mut self,
        ids: &[RowId],
        added: &[usize],
    ) -> Result<Vec<BlockRow<T>>, ModelError> {
        let block_len = self.layers * self.shape.kv_heads * key_block_len(self.shape.head_dim);
        let in_use = Arc::clone(&self.blocks_in_use);
        let max_tokens = self.max_tokens;
        let idle = self.idle_blocks();
        let rows = T::rows(&mut self.rows).ok_or(ModelError::Mismatch {
            what: "bits of the cache's numbers against the model's",
            found: 0,
            expected: T::DTYPE.size_in_bytes() * 8,
        })?;
        check_distinct(ids)?;
        let mut new_blocks = 0;
        for (id, &added) in ids.iter().zip(added) {
            let row = rows.get(id).ok_or(ModelError::UnknownRow { row: id.0 })?;
            new_blocks += row.new_blocks(added);
        }
        let max_blocks = max_tokens / KEYS_PER_BLOCK;
        let mut needed = in_use.load(Ordering::Relaxed) + new_blocks;
        if needed > max_blocks {
            // Some more than needed: choosing looks at all of them.
            let spare = idle / SPARE_SHARE;
            self.idle.take();
            if let Some(known) = T::prefixes(&mut self.prefixes) {
                needed -= known.evict((needed - max_blocks).max(spare));
            }
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
                let mut row = rows.remove(id).expect("looked up above");
                row.reserve(added, block_len, &in_use);
                row
            })
            .collect())
    }

    /// Returns the tokens that a forward pass may add before the cache is full, one row each.
    pub fn fits(&self, ids: &[RowId], added: &[usize]) -> bool {
        match &self.rows {
            Rows::F32(rows) => self.fits_in(rows, ids, added),
            Rows::F64(rows) => self.fits_in(rows, ids, added),
            Rows::Tensors(_) => {
                self.tokens_in_use() + added.iter().sum::<usize>() <= self.max_tokens
            }
        }
    }

    fn fits_in<T>(
        &self,
        rows: &BTreeMap<RowId, BlockRow<T>>,
        ids: &[RowId],
        added: &[usize],
    ) -> bool {
        let new_blocks: usize = (ids.iter().zip(added))
            .filter_map(|(id, &added)| Some(rows.get(id)?.new_blocks(added)))
            .sum();
        let needed = (self.blocks_in_use.load(Ordering::Relaxed) + new_blocks) * KEYS_PER_BLOCK;
        needed <= self.max_tokens || needed - self.idle_blocks() * KEYS_PER_BLOCK <= self.max_tokens
    }

    /// Runs `forward` on the rows of a batch, which grow by `added` tokens if it succeeds.
    pub(crate) fn with_blocks<T: CacheReal, R>(
        &mut self,
        ids: &[RowId],
        added: &[usize],
        forward: impl FnOnce(&mut CachedRows<T>) -> Result<R, ModelError>,
    ) -> Result<R, ModelError> {
        let rows = self.take_blocks::<T>(ids, added)?;
        let mut cached = CachedRows {
            rows,
            shape: self.shape,
            layer: 0,
        };
        let result = forward(&mut cached);
        let target = T::rows(&mut self.rows).expect("checked when the rows were taken");
        for ((id, mut row), added) in ids.iter().zip(cached.rows).zip(added) {
            if result.is_ok() {
                row.len += added;
            }
            row.truncate(row.len);
            target.insert(*id, row);
        }
        result
    }

    /// Takes rows of tensors out for a forward pass; give them back with
    /// [`KvCache::restore_tensors`].
    pub(crate) fn take_tensors(
        &mut self,
        ids: &[RowId],
        added: usize,
    ) -> Result<Vec<TensorRow>, ModelError> {
        check_distinct(ids)?;
        let needed = self.tokens_in_use() + added;
        if needed > self.max_tokens {
            return Err(ModelError::CacheFull {
                needed,
                limit: self.max_tokens,
            });
        }
        let Rows::Tensors(rows) = &mut self.rows else {
            return Err(ModelError::Mismatch {
                what: "rows of tensors in the cache",
                found: 0,
                expected: ids.len(),
            });
        };
        if let Some(id) = ids.iter().find(|id| !rows.contains_key(id)) {
            return Err(ModelError::UnknownRow { row: id.0 });
        }
        Ok(ids
            .iter()
            .map(|id| rows.get(id).cloned().expect("looked up above"))
            .collect())
    }

    /// Puts rows back after a forward pass.
    pub(crate) fn restore_tensors(&mut self, ids: &[RowId], taken: Vec<TensorRow>) {
        if let Rows::Tensors(rows) = &mut self.rows {
            rows.extend(ids.iter().copied().zip(taken));
        }
    }
}

/// Puts shared blocks into an empty row; returns how many tokens they hold.
fn begin_with<T>(
    rows: &mut BTreeMap<RowId, BlockRow<T>>,
    row: RowId,
    blocks: Vec<Arc<Block<T>>>,
) -> usize {
    let len = blocks.len() * KEYS_PER_BLOCK;
    rows.insert(row, BlockRow { blocks, len });
    len
}

fn keep_blocks<T>(
    rows: &BTreeMap<RowId, BlockRow<T>>,
    known: &mut PrefixBlocks<Block<T>>,
    row: RowId,
    range: std::ops::Range<usize>,
    chain: &[PrefixHash],
) {
    let Some(row) = rows.get(&row) else { return };
    let end = range.end.min(chain.len());
    for depth in range {
        let is_full = (depth + 1) * KEYS_PER_BLOCK <= row.len;
        if let (true, Some(block), Some(&hash)) = (is_full, row.blocks.get(depth), chain.get(depth))
        {
            known.keep(hash, depth, block);
        }
    }
    known.touch(&chain[..end]);
}

fn check_distinct(ids: &[RowId]) -> Result<(), ModelError> {
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(ModelError::RepeatedRow { row: pair[0].0 }),
        None => Ok(()),
    }
}

impl<T> BlockRow<T> {
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
}

impl<T: Real> BlockRow<T> {
    fn reserve(&mut self, added: usize, block_len: usize, in_use: &Arc<AtomicUsize>) {
        if added == 0 {
            return;
        }
        if !self.len.is_multiple_of(KEYS_PER_BLOCK) {
            let last = self.blocks.last_mut().expect("a partial block exists");
            Arc::make_mut(last);
        }
        let blocks = (self.len + added).div_ceil(KEYS_PER_BLOCK);
        self.blocks
            .resize_with(blocks, || Arc::new(Block::new(block_len, in_use)));
    }
}

/// The number types that blocks are made of.
pub(crate) trait CacheReal: Real {
    #[expect(private_interfaces, reason = "implemented in this file only")]
    fn rows(rows: &mut Rows) -> Option<&mut BTreeMap<RowId, BlockRow<Self>>>;

    #[expect(private_interfaces, reason = "implemented in this file only")]
    fn prefixes(prefixes: &mut Prefixes) -> Option<&mut PrefixBlocks<Block<Self>>>;
}

impl CacheReal for f32 {
    #[expect(private_interfaces, reason = "implemented in this file only")]
    fn rows(rows: &mut Rows) -> Option<&mut BTreeMap<RowId, BlockRow<Self>>> {
        if let Rows::F32(rows) = rows {
            Some(rows)
        } else {
            None
        }
    }

    #[expect(private_interfaces, reason = "implemented in this file only")]
    fn prefixes(prefixes: &mut Prefixes) -> Option<&mut PrefixBlocks<Block<Self>>> {
        if let Prefixes::F32(known) = prefixes {
            Some(known)
        } else {
            None
        }
    }
}

impl CacheReal for f64 {
    #[expect(private_interfaces, reason = "implemented in this file only")]
    fn rows(rows: &mut Rows) -> Option<&mut BTreeMap<RowId, BlockRow<Self>>> {
        if let Rows::F64(rows) = rows {
            Some(rows)
        } else {
            None
        }
    }

    #[expect(private_interfaces, reason = "implemented in this file only")]
    fn prefixes(prefixes: &mut Prefixes) -> Option<&mut PrefixBlocks<Block<Self>>> {
        if let Prefixes::F64(known) = prefixes {
            Some(known)
        } else {
            None
        }
    }
}

/// The rows of one batch during a forward pass; segment `i` of the batch continues row `i`.
pub(crate) struct CachedRows<T> {
    rows: Vec<BlockRow<T>>,
    shape: HeadShape,
    layer: usize,
}

impl<T: Real> CachedRows<T> {
    /// Returns each row's length before this batch.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = usize> {
        self.rows.iter().map(|row| row.len)
    }

    /// Writes one layer's keys and values `[n, kv_heads * head_dim]` behind each row's tokens, and
    /// makes [`KeyValues`] read that layer.
    pub(crate) fn write(
        &mut self,
        layer: usize,
        segments: &[std::ops::Range<usize>],
        keys: &[T],
        values: &[T],
    ) {
        let HeadShape {
            kv_heads, head_dim, ..
        } = self.shape;
        let width = self.shape.key_width();
        let block_len = key_block_len(head_dim);
        self.layer = layer;
        self.rows
            .par_iter_mut()
            .zip(segments)
            .with_min_len(16)
            .for_each(|(row, segment)| {
                for (offset, token) in segment.clone().enumerate() {
                    let position = row.len + offset;
                    let block = Arc::get_mut(&mut row.blocks[position / KEYS_PER_BLOCK])
                        .expect("made unique when room was reserved");
                    for kv_head in 0..kv_heads {
                        let block_at = (layer * kv_heads + kv_head) * block_len;
                        let at = token * width + kv_head * head_dim;
                        write_key_value(
                            &mut block.values[block_at..block_at + block_len],
                            position % KEYS_PER_BLOCK,
                            &keys[at..at + head_dim],
                            &values[at..at + head_dim],
                        );
                    }
                }
            });
    }
}

impl<T: Real> KeyValues<T> for CachedRows<T> {
    fn history(&self, segment: usize) -> usize {
        self.rows[segment].len
    }

    fn gather(&self, _segment: usize, _kv_head: usize, _keys: usize, _scratch: &mut Vec<T>) {}

    fn block<'a>(
        &'a self,
        segment: usize,
        kv_head: usize,
        index: usize,
        _scratch: &'a [T],
    ) -> &'a [T] {
        let block_len = key_block_len(self.shape.head_dim);
        let at = (self.layer * self.shape.kv_heads + kv_head) * block_len;
        &self.rows[segment].blocks[index].values[at..at + block_len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(max_tokens: usize) -> KvCache {
        let shape = HeadShape {
            heads: 2,
            kv_heads: 1,
            head_dim: 2,
        };
        KvCache::new(1, shape, DType::F32, true, max_tokens)
    }

    /// Adds `count` tokens whose key and value are all `value`.
    fn append(cache: &mut KvCache, row: RowId, count: usize, value: f32) -> Result<(), ModelError> {
        let numbers = vec![value; count * 2];
        cache.with_blocks::<f32, _>(&[row], &[count], |rows| {
            rows.write(0, std::slice::from_ref(&(0..count)), &numbers, &numbers);
            Ok(())
        })
    }

    /// Returns the first component of every value in a row.
    fn values(cache: &mut KvCache, row: RowId) -> Vec<f32> {
        let len = cache.len(row).unwrap();
        cache
            .with_blocks::<f32, _>(&[row], &[0], |rows| {
                Ok((0..len)
                    .map(|i| {
                        let block = rows.block(0, 0, i / KEYS_PER_BLOCK, &[]);
                        block[2 * KEYS_PER_BLOCK + i % KEYS_PER_BLOCK * 2]
                    })
                    .collect())
            })
            .unwrap()
    }

    #[test]
    fn a_fork_shares_blocks_until_one_side_writes() {
        let mut cache = cache(1000);
        let parent = cache.add_row();
        append(&mut cache, parent, KEYS_PER_BLOCK + 3, 1.0).unwrap();
        let child = cache.fork(parent).unwrap();
        assert_eq!(cache.tokens_in_use(), 2 * KEYS_PER_BLOCK);
        append(&mut cache, child, 2, 2.0).unwrap();
        assert_eq!(
            cache.tokens_in_use(),
            3 * KEYS_PER_BLOCK,
            "only the last block is copied"
        );
        append(&mut cache, parent, 1, 3.0).unwrap();
        let prompt = [1.0; KEYS_PER_BLOCK + 3];
        assert_eq!(
            values(&mut cache, child),
            [&prompt[..], &[2.0, 2.0]].concat()
        );
        assert_eq!(values(&mut cache, parent), [&prompt[..], &[3.0]].concat());
        cache.free(parent).unwrap();
        cache.free(child).unwrap();
        assert_eq!(cache.tokens_in_use(), 0);
    }

    #[test]
    fn a_full_cache_refuses_and_keeps_its_rows() {
        let mut cache = cache(KEYS_PER_BLOCK);
        let row = cache.add_row();
        append(&mut cache, row, 30, 1.0).unwrap();
        assert!(cache.fits(&[row], &[2]));
        assert!(!cache.fits(&[row], &[3]));
        let error = append(&mut cache, row, 3, 2.0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "key-value cache limit exceeded: 64 > 32 tokens"
        );
        assert_eq!(cache.len(row).unwrap(), 30);
        append(&mut cache, row, 2, 2.0).unwrap();
        assert_eq!(cache.len(row).unwrap(), 32);
    }

    #[test]
    fn truncation_releases_whole_blocks_and_keeps_the_rest() {
        let mut cache = cache(1000);
        let row = cache.add_row();
        append(&mut cache, row, 70, 1.0).unwrap();
        cache.truncate(row, 40).unwrap();
        assert_eq!(cache.tokens_in_use(), 64);
        append(&mut cache, row, 1, 5.0).unwrap();
        assert_eq!(values(&mut cache, row)[39..], [1.0, 5.0]);
    }

    #[test]
    fn freed_and_repeated_rows_are_refused() {
        let mut cache = cache(1000);
        let row = cache.add_row();
        let error = cache
            .with_blocks::<f32, ()>(&[row, row], &[1, 1], |_| Ok(()))
            .unwrap_err();
        assert_eq!(error.to_string(), "cache row 0 appears twice in one batch");
        cache.free(row).unwrap();
        let error = append(&mut cache, row, 1, 1.0).unwrap_err();
        assert_eq!(error.to_string(), "unknown cache row 0");
    }
}
