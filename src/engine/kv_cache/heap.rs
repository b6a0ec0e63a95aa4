//! Blocks of the CPU's kernels, each with memory of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::blocks::{BlockRow, BlockStorage, Blocks};
use super::{KvCache, Place};
use crate::engine::model::ops::{
    HeadShape, KEYS_PER_BLOCK, KeyValues, Real, key_block_len, write_key_value,
};

/// Makes blocks, and counts those that are alive.
#[derive(Debug)]
pub(crate) struct Heap<T> {
    block_len: usize,
    in_use: Arc<AtomicUsize>,
    kind: std::marker::PhantomData<T>,
}

/// Keys and values of 32 tokens for all layers and heads, and a share in the count of live blocks.
#[derive(Debug)]
pub(crate) struct HeapBlock<T> {
    values: Vec<T>,
    in_use: Arc<AtomicUsize>,
}

impl<T> Drop for HeapBlock<T> {
    fn drop(&mut self) {
        self.in_use.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<T: Real> Heap<T> {
    pub(super) fn new(layers: usize, shape: HeadShape) -> Self {
        Self {
            block_len: layers * shape.kv_heads * key_block_len(shape.head_dim),
            in_use: Arc::default(),
            kind: std::marker::PhantomData,
        }
    }

    fn block(&self, values: Vec<T>) -> HeapBlock<T> {
        self.in_use.fetch_add(1, Ordering::Relaxed);
        HeapBlock {
            values,
            in_use: Arc::clone(&self.in_use),
        }
    }
}

impl<T: Real> BlockStorage for Heap<T> {
    type Block = HeapBlock<T>;

    fn fresh(&mut self) -> HeapBlock<T> {
        self.block(vec![T::ZERO; self.block_len])
    }

    fn copy(&mut self, block: &HeapBlock<T>) -> HeapBlock<T> {
        self.block(block.values.clone())
    }

    fn in_use(&self) -> usize {
        self.in_use.load(Ordering::Relaxed)
    }
}

/// The number types that such blocks are made of.
pub(crate) trait CacheReal: Real {
    /// Returns the cache's blocks, if they are of this type.
    #[expect(private_interfaces, reason = "implemented in this file only")]
    fn blocks(cache: &mut KvCache) -> Option<&mut Blocks<Heap<Self>>>;
}

impl CacheReal for f32 {
    #[expect(private_interfaces, reason = "implemented in this file only")]
    fn blocks(cache: &mut KvCache) -> Option<&mut Blocks<Heap<Self>>> {
        match &mut cache.place {
            Place::F32(blocks) => Some(blocks),
            _ => None,
        }
    }
}

impl CacheReal for f64 {
    #[expect(private_interfaces, reason = "implemented in this file only")]
    fn blocks(cache: &mut KvCache) -> Option<&mut Blocks<Heap<Self>>> {
        match &mut cache.place {
            Place::F64(blocks) => Some(blocks),
            _ => None,
        }
    }
}

/// The rows of one batch during a forward pass; segment `i` of the batch continues row `i`.
pub(crate) struct CachedRows<T> {
    pub(super) rows: Vec<BlockRow<HeapBlock<T>>>,
    pub(super) shape: HeadShape,
    pub(super) layer: usize,
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
