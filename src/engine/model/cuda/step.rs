//! What the kernels of one step are told about its batch: one small copy to the device.

use candle_core::{Device, Tensor};

use super::PoolLayout;
use super::attention::{SPAN, WARPS};
use crate::engine::kv_cache::PagedRows;
use crate::engine::model::PackedBatch;
use crate::engine::model::ops::KEYS_PER_BLOCK;

/// Query rows of a warp where there are many of them.
const MANY_ROWS: usize = 4;

/// Where tokens stand, where their keys and values go, and what is attended together.
#[derive(Debug)]
pub(in crate::engine::model) struct PagedStep {
    /// `u32` numbers: positions, slots, tiles, segments, lists of blocks.
    pub(super) meta: Tensor,
    pub(super) layout: PoolLayout,
    /// Tokens of the batch.
    pub(super) tokens: usize,
    pub(super) slots_at: usize,
    pub(super) tiles_at: usize,
    pub(super) segments_at: usize,
    pub(super) segments: usize,
    /// Tiles of queries.
    pub(super) tiles: usize,
    /// Query rows that a warp of a tile has.
    pub(super) rows: usize,
    /// Spans of the longest sequence's keys.
    pub(super) spans: usize,
}

impl PagedStep {
    /// Describes a batch whose segments continue `rows`, in which there is room for their tokens.
    pub(in crate::engine::model) fn new(
        batch: &PackedBatch,
        rows: &PagedRows<'_>,
        device: &Device,
    ) -> candle_core::Result<Self> {
        let (_, layout) = rows.pool();
        let group = layout.shape.heads / layout.shape.kv_heads;
        let segments = || batch.segments().iter().zip(rows.lengths());
        let query_rows = |tokens: usize| tokens * group;
        let most = segments().map(|(s, _)| query_rows(s.len())).max();
        // One row for each warp, or some that share what the warp reads. A kernel is compiled for each
        // number of them.
        let rows_of_warp = most.unwrap_or(0).div_ceil(WARPS).next_power_of_two();
        let rows_of_warp = rows_of_warp.min(MANY_ROWS);
        let tile = WARPS * rows_of_warp;

        let mut meta = batch.positions().to_vec();
        let slots_at = meta.len();
        let tables: Vec<Vec<u32>> = rows.tables().collect();
        for ((segment, length), table) in segments().zip(&tables) {
            for position in length..length + segment.len() {
                let block = table[position / KEYS_PER_BLOCK] as usize;
                meta.push(index(block * KEYS_PER_BLOCK + position % KEYS_PER_BLOCK)?);
            }
        }
        let tiles_at = meta.len();
        // The longest first: they decide when the launch ends.
        let mut tiles = Vec::new();
        for (number, (segment, length)) in segments().enumerate() {
            for first in (0..query_rows(segment.len())).step_by(tile) {
                let last = (first + tile).min(query_rows(segment.len()));
                tiles.push((length + last.div_ceil(group), number, first));
            }
        }
        tiles.sort_by_key(|&(keys, ..)| std::cmp::Reverse(keys));
        for &(_, number, first) in &tiles {
            meta.extend([index(number)?, index(first)?]);
        }
        let segments_at = meta.len();
        let mut table_at = segments_at + 4 * tables.len();
        for ((segment, length), table) in segments().zip(&tables) {
            meta.extend([
                index(segment.start)?,
                index(segment.len())?,
                index(length)?,
                index(table_at)?,
            ]);
            table_at += table.len();
        }
        meta.extend(tables.iter().flatten());
        Ok(Self {
            meta: Tensor::new(meta, device)?,
            layout,
            tokens: batch.len(),
            slots_at,
            tiles_at,
            segments_at,
            segments: tables.len(),
            tiles: tiles.len(),
            rows: rows_of_warp,
            spans: tiles.first().map_or(0, |&(keys, ..)| keys.div_ceil(SPAN)),
        })
    }
}

fn index(value: usize) -> candle_core::Result<u32> {
    match u32::try_from(value) {
        Ok(value) => Ok(value),
        Err(_) => candle_core::bail!("{value} does not fit in 32 bits"),
    }
}
