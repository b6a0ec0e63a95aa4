//! Blocks that are parts of one tensor, for devices that attend through lists of blocks.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};

use super::ModelError;
use super::blocks::{BlockRow, BlockStorage};
use crate::engine::model::cuda::{PoolLayout, copy_blocks};
use crate::engine::model::ops::{HeadShape, KEYS_PER_BLOCK};

/// A tensor of so many blocks, and which of them are free.
#[derive(Debug)]
pub(crate) struct Pool {
    layout: PoolLayout,
    dtype: DType,
    device: Device,
    /// Keys and values `[layers, 2, blocks, 32, kv_heads, head_dim]`.
    tensor: Option<Tensor>,
    free: Arc<Mutex<FreeBlocks>>,
    /// Copies that are to be made, each from one block to another.
    copies: Vec<[u32; 2]>,
}

/// Numbers of blocks that nobody holds.
#[derive(Debug, Default)]
struct FreeBlocks {
    /// Those that were held before.
    returned: Vec<u32>,
    /// All from here on were never held.
    next: u32,
}

/// A block: its number among those of the pool.
#[derive(Debug)]
pub(crate) struct PoolBlock {
    number: u32,
    free: Arc<Mutex<FreeBlocks>>,
}

impl Drop for PoolBlock {
    fn drop(&mut self) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.returned.push(self.number);
    }
}

impl Pool {
    pub(super) fn new(
        layers: usize,
        shape: HeadShape,
        dtype: DType,
        blocks: usize,
        device: &Device,
    ) -> Self {
        Self {
            layout: PoolLayout {
                layers,
                blocks,
                shape,
            },
            dtype,
            device: device.clone(),
            tensor: None,
            free: Arc::default(),
            copies: Vec::new(),
        }
    }

    /// Takes the memory for all blocks, if that was not done before.
    pub(super) fn allocate(&mut self) -> Result<(), ModelError> {
        if self.tensor.is_none() {
            let PoolLayout {
                layers,
                blocks,
                shape,
            } = self.layout;
            let shape = (
                layers,
                2,
                blocks,
                KEYS_PER_BLOCK,
                shape.kv_heads,
                shape.head_dim,
            );
            // Zeros: what nobody wrote is read with probability zero, but must be a number.
            self.tensor = Some(Tensor::zeros(shape, self.dtype, &self.device)?);
        }
        Ok(())
    }

    /// Makes the copies that rows asked for.
    pub(super) fn copy_now(&mut self) -> Result<(), ModelError> {
        let copies = std::mem::take(&mut self.copies);
        match &self.tensor {
            Some(tensor) if !copies.is_empty() => Ok(copy_blocks(tensor, self.layout, &copies)?),
            _ => Ok(()),
        }
    }
}

impl BlockStorage for Pool {
    type Block = PoolBlock;

    fn fresh(&mut self) -> PoolBlock {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let number = free.returned.pop().unwrap_or_else(|| {
            free.next += 1;
            free.next - 1
        });
        PoolBlock {
            number,
            free: Arc::clone(&self.free),
        }
    }

    fn copy(&mut self, block: &PoolBlock) -> PoolBlock {
        let copy = self.fresh();
        self.copies.push([block.number, copy.number]);
        copy
    }

    fn in_use(&self) -> usize {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.next as usize - free.returned.len()
    }

    /// Gives all back while nothing is held, such as to the trainer between rollouts.
    fn shrink(&mut self) {
        if self.in_use() == 0 {
            self.tensor = None;
        }
    }
}

/// The rows of one batch during a forward pass; segment `i` of the batch continues row `i`.
pub(crate) struct PagedRows<'a> {
    pool: &'a Pool,
    pub(super) rows: Vec<BlockRow<PoolBlock>>,
}

impl<'a> PagedRows<'a> {
    pub(super) fn new(pool: &'a Pool, rows: Vec<BlockRow<PoolBlock>>) -> Self {
        Self { pool, rows }
    }

    /// Returns each row's length before this batch.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = usize> {
        self.rows.iter().map(|row| row.len)
    }

    /// Returns the numbers of each row's blocks.
    pub(crate) fn tables(&self) -> impl Iterator<Item = Vec<u32>> {
        let numbers = |row: &BlockRow<PoolBlock>| row.blocks.iter().map(|b| b.number).collect();
        self.rows.iter().map(numbers)
    }

    /// Returns the blocks of all rows and how they lie.
    pub(crate) fn pool(&self) -> (&Tensor, PoolLayout) {
        let tensor = self.pool.tensor.as_ref();
        let tensor = tensor.expect("allocated before rows were taken");
        (tensor, self.pool.layout)
    }
}
