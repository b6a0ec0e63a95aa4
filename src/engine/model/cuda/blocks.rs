//! Writing to the blocks of a pool.

use candle_core::{CpuStorage, Tensor};

use super::{
    Change, Input, Kernel, Launch, Operand, PagedStep, PoolLayout, Scalar, Source, Stored, Variant,
    change, values, with_stored,
};

const SOURCE: Source = Source {
    name: "blocks",
    text: include_str!("blocks.cu"),
    functions: &["write_tokens", "copy_blocks"],
};

/// Threads that write one token's keys, or copy one block.
const THREADS: usize = 128;

fn variant(pool: &Tensor) -> Variant {
    Variant {
        dtype: pool.dtype(),
        defines: Vec::new(),
    }
}

/// Puts the keys and values `[n, kv_heads, head_dim]` of one layer into their slots.
pub(in crate::engine::model) fn write_tokens(
    pool: &Tensor,
    layer: usize,
    step: &PagedStep,
    keys: &Tensor,
    values: &Tensor,
) -> candle_core::Result<()> {
    let kernel = WriteTokens::new(pool, step, layer);
    let (keys, values) = (keys.contiguous()?, values.contiguous()?);
    change(&kernel, pool, &[&keys, &values, &step.meta])
}

pub(super) struct WriteTokens<'a> {
    variant: Variant,
    step: &'a PagedStep,
    planes: [usize; 2],
}

impl<'a> WriteTokens<'a> {
    pub(super) fn new(pool: &Tensor, step: &'a PagedStep, layer: usize) -> Self {
        Self {
            variant: variant(pool),
            step,
            planes: step.layout.planes(layer),
        }
    }
}

impl Kernel for WriteTokens<'_> {
    fn name(&self) -> &'static str {
        "write-tokens"
    }

    fn launches(&self) -> candle_core::Result<Vec<Launch>> {
        let [keys_at, values_at] = self.planes;
        Ok(vec![Launch {
            source: SOURCE,
            variant: self.variant.clone(),
            function: "write_tokens",
            grid: [self.step.tokens, 1, 1],
            threads: THREADS,
            shared_bytes: 0,
            operands: vec![
                Operand::Target,
                Operand::Input(0),
                Operand::Input(1),
                Operand::Input(2),
            ],
            scalars: vec![
                Scalar::u64(keys_at),
                Scalar::u64(values_at),
                Scalar::u32(self.step.slots_at)?,
                Scalar::u32(self.step.layout.shape.key_width())?,
            ],
        }])
    }
}

impl Change for WriteTokens<'_> {
    fn twin(&self, target: &mut CpuStorage, inputs: &[Input<'_>]) -> candle_core::Result<()> {
        with_stored!(self.variant.dtype, T => self.write::<T>(target, inputs))
    }
}

impl WriteTokens<'_> {
    fn write<T: Stored>(
        &self,
        target: &mut CpuStorage,
        inputs: &[Input<'_>],
    ) -> candle_core::Result<()> {
        let pool = T::slice_mut(target)?;
        let meta = values::<u32>(&inputs[2])?;
        let width = self.step.layout.shape.key_width();
        for (input, plane) in inputs.iter().zip(self.planes) {
            let rows = values::<T>(input)?.chunks_exact(width);
            for (row, &slot) in rows.zip(&meta[self.step.slots_at..]) {
                pool[plane + slot as usize * width..][..width].copy_from_slice(row);
            }
        }
        Ok(())
    }
}

/// Copies blocks in all layers, each of `pairs` from its first number to its second.
pub(crate) fn copy_blocks(
    pool: &Tensor,
    layout: PoolLayout,
    pairs: &[[u32; 2]],
) -> candle_core::Result<()> {
    let kernel = CopyBlocks::new(pool, layout, pairs.len());
    let pairs = Tensor::new(pairs.as_flattened(), pool.device())?;
    change(&kernel, pool, &[&pairs])
}

pub(super) struct CopyBlocks {
    variant: Variant,
    layout: PoolLayout,
    pairs: usize,
}

impl CopyBlocks {
    pub(super) fn new(pool: &Tensor, layout: PoolLayout, pairs: usize) -> Self {
        Self {
            variant: variant(pool),
            layout,
            pairs,
        }
    }
}

impl Kernel for CopyBlocks {
    fn name(&self) -> &'static str {
        "copy-blocks"
    }

    fn launches(&self) -> candle_core::Result<Vec<Launch>> {
        Ok(vec![Launch {
            source: SOURCE,
            variant: self.variant.clone(),
            function: "copy_blocks",
            grid: [self.pairs, 2 * self.layout.layers, 1],
            threads: THREADS,
            shared_bytes: 0,
            operands: vec![Operand::Target, Operand::Input(0)],
            scalars: vec![
                Scalar::u64(self.layout.blocks),
                Scalar::u32(self.layout.shape.key_width())?,
            ],
        }])
    }
}

impl Change for CopyBlocks {
    fn twin(&self, target: &mut CpuStorage, inputs: &[Input<'_>]) -> candle_core::Result<()> {
        with_stored!(self.variant.dtype, T => self.copy::<T>(target, inputs))
    }
}

impl CopyBlocks {
    fn copy<T: Stored>(
        &self,
        target: &mut CpuStorage,
        inputs: &[Input<'_>],
    ) -> candle_core::Result<()> {
        let pool = T::slice_mut(target)?;
        let length = self.layout.block_len();
        for pair in values::<u32>(&inputs[0])?.chunks_exact(2) {
            for plane in 0..2 * self.layout.layers {
                let [from, to] =
                    [pair[0], pair[1]].map(|block| plane * self.layout.blocks + block as usize);
                pool.copy_within(from * length..(from + 1) * length, to * length);
            }
        }
        Ok(())
    }
}
