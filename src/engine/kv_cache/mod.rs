//! Keys and values of the sequences that are being generated.
//!
//! A [`KvCache`] holds rows; a row is one sequence, a list of blocks of 32 tokens, shared by reference
//! count: [`KvCache::fork`] copies no token, and the first write to a shared block copies that block
//! alone. So the completions of one prompt share its blocks.
//!
//! Full blocks stay behind as long as there is room ([`PrefixBlocks`](super::prefix_cache)), under a
//! name that says which tokens they and all before them hold: a row that begins with the same tokens
//! takes them over.
//!
//! On the CPU each block has memory of its own (`heap`); on other devices all are parts of one tensor
//! (`pool`). Who holds what is the same code for both (`blocks`).
//!
//! A row's numbers belong to the weights that made them. Whoever updates the weights frees the rows or
//! accepts that their history is off-policy; the cache does not know.

mod blocks;
mod heap;
mod pool;

use candle_core::{DType, Device};

use self::blocks::Blocks;
use self::heap::Heap;
pub(crate) use self::heap::{CacheReal, CachedRows};
pub(crate) use self::pool::PagedRows;
use self::pool::Pool;
use super::model::ModelError;
use super::model::ops::{HeadShape, KEYS_PER_BLOCK};
use super::prefix_cache::PrefixHash;

/// Names one sequence of a [`KvCache`]. Numbers are never used again, so a stale one is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowId(usize);

/// Keys and values of many sequences.
#[derive(Debug)]
pub struct KvCache {
    place: Place,
    next_row: usize,
    max_tokens: usize,
    layers: usize,
    shape: HeadShape,
    dtype: DType,
}

/// Where the blocks are.
#[derive(Debug)]
enum Place {
    F32(Blocks<Heap<f32>>),
    F64(Blocks<Heap<f64>>),
    Paged(Blocks<Pool>),
}

/// Does the same with the blocks, wherever they are.
macro_rules! in_any_place {
    ($place:expr, $blocks:ident => $body:expr) => {
        match $place {
            Place::F32($blocks) => $body,
            Place::F64($blocks) => $body,
            Place::Paged($blocks) => $body,
        }
    };
}

impl KvCache {
    /// Makes an empty cache in the memory of the CPU's kernels.
    pub(crate) fn on_heap(
        layers: usize,
        shape: HeadShape,
        dtype: DType,
        max_tokens: usize,
    ) -> Self {
        let place = match dtype {
            DType::F64 => Place::F64(Blocks::new(Heap::new(layers, shape))),
            _ => Place::F32(Blocks::new(Heap::new(layers, shape))),
        };
        Self::new(place, layers, shape, dtype, max_tokens)
    }

    /// Makes an empty cache in one tensor, which is allocated when the first token comes.
    pub(crate) fn paged(
        layers: usize,
        shape: HeadShape,
        dtype: DType,
        max_tokens: usize,
        device: &Device,
    ) -> Self {
        let blocks = max_tokens / KEYS_PER_BLOCK;
        let pool = Pool::new(layers, shape, dtype, blocks, device);
        let place = Place::Paged(Blocks::new(pool));
        Self::new(place, layers, shape, dtype, max_tokens)
    }

    fn new(place: Place, layers: usize, shape: HeadShape, dtype: DType, max_tokens: usize) -> Self {
        Self {
            place,
            next_row: 0,
            max_tokens,
            layers,
            shape,
            dtype,
        }
    }

    fn next_row(&mut self) -> RowId {
        let id = RowId(self.next_row);
        self.next_row += 1;
        id
    }

    /// Adds an empty row.
    pub fn add_row(&mut self) -> RowId {
        let id = self.next_row();
        in_any_place!(&mut self.place, blocks => blocks.add(id));
        id
    }

    /// Adds a row that continues `row`. No token is copied until one of the two is written to.
    ///
    /// # Errors
    ///
    /// Fails if `row` was freed.
    pub fn fork(&mut self, row: RowId) -> Result<RowId, ModelError> {
        let id = self.next_row();
        in_any_place!(&mut self.place, blocks => blocks.fork(row, id))?;
        Ok(id)
    }

    /// Forgets a row. Blocks that no other row shares are released at once.
    ///
    /// # Errors
    ///
    /// Fails if `row` was freed before.
    pub fn free(&mut self, row: RowId) -> Result<(), ModelError> {
        in_any_place!(&mut self.place, blocks => blocks.free(row))
    }

    /// Adds a row that begins with the longest known prefix of the blocks that `chain` names;
    /// returns how many tokens that is, too.
    pub(super) fn add_row_with_prefix(&mut self, chain: &[PrefixHash]) -> (RowId, usize) {
        let id = self.next_row();
        let len = in_any_place!(&mut self.place, blocks => blocks.add_with_prefix(id, chain));
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
        in_any_place!(&mut self.place, blocks => blocks.keep(row, range, chain));
    }

    /// Frees the blocks that no row holds.
    pub(super) fn clear_prefixes(&mut self) {
        in_any_place!(&mut self.place, blocks => blocks.clear_prefixes());
    }

    /// Returns the bytes that one token takes.
    pub(super) fn bytes_per_token(&self) -> usize {
        let number = match &self.place {
            Place::F32(_) => size_of::<f32>(),
            Place::F64(_) => size_of::<f64>(),
            Place::Paged(_) => self.dtype.size_in_bytes(),
        };
        2 * self.layers * self.shape.key_width() * number
    }

    /// Forgets all rows and prefixes, as after an update of the weights.
    pub fn clear(&mut self) {
        in_any_place!(&mut self.place, blocks => blocks.clear());
    }

    /// Shortens a row to its first `len` tokens; does nothing if it is shorter.
    ///
    /// # Errors
    ///
    /// Fails if `row` was freed.
    pub fn truncate(&mut self, row: RowId, len: usize) -> Result<(), ModelError> {
        in_any_place!(&mut self.place, blocks => blocks.truncate(row, len))
    }

    /// Returns the number of tokens in a row.
    ///
    /// # Errors
    ///
    /// Fails if `row` was freed.
    pub fn len(&self, row: RowId) -> Result<usize, ModelError> {
        in_any_place!(&self.place, blocks => blocks.len(row))
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        in_any_place!(&self.place, blocks => blocks.rows())
    }

    /// Returns the number of blocks that take memory, kept ones included.
    pub(super) fn blocks(&self) -> usize {
        use self::blocks::BlockStorage as _;
        in_any_place!(&self.place, blocks => blocks.storage.in_use())
    }

    /// Returns the number of tokens that rows hold memory for: shared blocks count once, and
    /// blocks that are kept for rows to come do not count.
    pub fn tokens_in_use(&self) -> usize {
        let idle = in_any_place!(&self.place, blocks => blocks.idle());
        (self.blocks() - idle) * KEYS_PER_BLOCK
    }

    /// Returns the number of tokens that the cache may hold.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Returns whether a forward pass may add so many tokens to each row.
    pub fn fits(&self, ids: &[RowId], added: &[usize]) -> bool {
        in_any_place!(&self.place, blocks => blocks.fits(ids, added, self.max_tokens))
    }

    /// Runs `forward` on the rows of a batch, which grow by `added` tokens if it succeeds.
    pub(crate) fn with_blocks<T: CacheReal, R>(
        &mut self,
        ids: &[RowId],
        added: &[usize],
        forward: impl FnOnce(&mut CachedRows<T>) -> Result<R, ModelError>,
    ) -> Result<R, ModelError> {
        let (max_tokens, shape) = (self.max_tokens, self.shape);
        let blocks = T::blocks(self).ok_or(ModelError::Mismatch {
            what: "bits of the cache's numbers against the model's",
            found: 0,
            expected: T::DTYPE.size_in_bytes() * 8,
        })?;
        let rows = blocks.take(ids, added, max_tokens)?;
        let layer = 0;
        let mut cached = CachedRows { rows, shape, layer };
        let result = forward(&mut cached);
        blocks.restore(ids, cached.rows, added, result.is_ok());
        result
    }

    /// As [`KvCache::with_blocks`], for rows in one tensor.
    pub(crate) fn with_pages<R>(
        &mut self,
        ids: &[RowId],
        added: &[usize],
        forward: impl FnOnce(&PagedRows<'_>) -> Result<R, ModelError>,
    ) -> Result<R, ModelError> {
        let Place::Paged(blocks) = &mut self.place else {
            return Err(ModelError::Mismatch {
                what: "rows of tensors in the cache",
                found: 0,
                expected: ids.len(),
            });
        };
        blocks.storage.allocate()?;
        let rows = blocks.take(ids, added, self.max_tokens)?;
        // Before anything is written: another row may write to what is copied.
        let copied = blocks.storage.copy_now();
        let paged = PagedRows::new(&blocks.storage, rows);
        let result = copied.and_then(|()| forward(&paged));
        let rows = paged.rows;
        blocks.restore(ids, rows, added, result.is_ok());
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::ops::KeyValues as _;

    fn cache(max_tokens: usize) -> KvCache {
        let shape = HeadShape {
            heads: 2,
            kv_heads: 1,
            head_dim: 2,
        };
        KvCache::on_heap(1, shape, DType::F32, max_tokens)
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
