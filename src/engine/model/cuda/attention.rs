//! Attention through lists of blocks.

use candle_core::{CpuStorage, DType, Shape, Tensor, WithDType as _};
use rayon::prelude::*;

use super::{
    Input, Kernel, Launch, Make, Operand, PagedStep, Scalar, Source, Stored, Variant, WARP, make,
    values, warp_sum, with_stored,
};
use crate::engine::model::ops::{HeadShape, KEYS_PER_BLOCK, Real};

const SOURCE: Source = Source {
    name: "attention",
    text: include_str!("attention.cu"),
    functions: &["attend", "merge_spans"],
};

/// Warps of a tile.
pub(super) const WARPS: usize = 4;

/// Keys that share a softmax before it is merged with those before it.
pub(super) const SPAN: usize = 256;

/// Thread blocks that fill a device: with fewer, long sequences get one for each span of their keys.
const MANY_BLOCKS: usize = 512;

/// Most memory for what such thread blocks leave, in bytes.
const MAX_SCRATCH: usize = 256 << 20;

/// Attends from `q` `[n, heads, head_dim]` to the blocks of one layer, in which the batch's own keys and
/// values are; returns `[n, heads * head_dim]`.
pub(in crate::engine::model) fn attend(
    q: &Tensor,
    pool: &Tensor,
    layer: usize,
    step: &PagedStep,
) -> candle_core::Result<Tensor> {
    let kernel = Attend::new(step, q.dtype(), layer);
    make(&kernel, &[&q.contiguous()?, pool, &step.meta])
}

pub(super) struct Attend<'a> {
    step: &'a PagedStep,
    dtype: DType,
    planes: [usize; 2],
    /// Whether each span of keys has a thread block of its own.
    pub(super) is_spread: bool,
}

impl<'a> Attend<'a> {
    pub(super) fn new(step: &'a PagedStep, dtype: DType, layer: usize) -> Self {
        let mut kernel = Self {
            step,
            dtype,
            planes: step.layout.planes(layer),
            is_spread: true,
        };
        let blocks = step.tiles * step.layout.shape.kv_heads;
        kernel.is_spread =
            step.spans > 1 && blocks < MANY_BLOCKS && kernel.scratch_bytes() <= MAX_SCRATCH;
        kernel
    }

    fn variant(&self) -> Variant {
        let HeadShape {
            heads,
            kv_heads,
            head_dim,
        } = self.step.layout.shape;
        Variant {
            dtype: self.dtype,
            defines: vec![
                ("HEAD_DIM", head_dim),
                ("GROUP", heads / kv_heads),
                ("ROWS", self.step.rows),
            ],
        }
    }

    fn wide_bytes(&self) -> usize {
        if self.dtype == DType::F64 { 8 } else { 4 }
    }
}

impl Kernel for Attend<'_> {
    fn name(&self) -> &'static str {
        "attend"
    }

    fn launches(&self) -> candle_core::Result<Vec<Launch>> {
        let (step, shape) = (self.step, self.step.layout.shape);
        let [keys_at, values_at] = self.planes;
        let real_bytes = self.dtype.size_in_bytes();
        let padding = if self.dtype == DType::BF16 { 2 } else { 1 };
        // As the source divides it.
        let shared_bytes =
            WARPS * step.rows * (shape.head_dim + KEYS_PER_BLOCK) * self.wide_bytes()
                + KEYS_PER_BLOCK * (2 * shape.head_dim + padding) * real_bytes;
        let attend = Launch {
            source: SOURCE,
            variant: self.variant(),
            function: "attend",
            grid: [
                step.tiles,
                shape.kv_heads,
                if self.is_spread { step.spans } else { 1 },
            ],
            threads: WARPS * WARP,
            shared_bytes,
            operands: vec![
                Operand::Target,
                Operand::Scratch,
                Operand::Input(0),
                Operand::Input(1),
                Operand::Input(2),
            ],
            scalars: vec![
                Scalar::u64(keys_at),
                Scalar::u64(values_at),
                Scalar::u32(step.tiles_at)?,
                Scalar::u32(step.segments_at)?,
                Scalar::u32(step.tokens)?,
                Scalar::F64(shape.scale()),
            ],
        };
        if !self.is_spread {
            return Ok(vec![attend]);
        }
        let merge = Launch {
            function: "merge_spans",
            grid: [(step.tokens * shape.heads).div_ceil(WARPS), 1, 1],
            shared_bytes: 0,
            operands: vec![Operand::Target, Operand::Scratch, Operand::Input(2)],
            scalars: vec![Scalar::u32(step.tokens)?, Scalar::u32(shape.heads)?],
            ..attend.clone()
        };
        Ok(vec![attend, merge])
    }

    fn scratch_bytes(&self) -> usize {
        let HeadShape {
            heads, head_dim, ..
        } = self.step.layout.shape;
        if self.is_spread {
            self.step.spans * self.step.tokens * heads * (head_dim + 2) * self.wide_bytes()
        } else {
            0
        }
    }
}

impl Make for Attend<'_> {
    fn shape(&self) -> Shape {
        Shape::from((self.step.tokens, self.step.layout.shape.query_width()))
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn twin(&self, inputs: &[Input<'_>]) -> candle_core::Result<CpuStorage> {
        with_stored!(self.dtype, T => {
            let (q, pool) = (values::<T>(&inputs[0])?, values::<T>(&inputs[1])?);
            let made = self.attend::<T>(q, pool, values(&inputs[2])?);
            Ok(T::to_cpu_storage_owned(made))
        })
    }
}

/// A softmax over some keys: largest score, sum of exponentials, weighted values.
#[derive(Clone)]
struct Softmax<W> {
    max: W,
    sum: W,
    values: Vec<W>,
}

impl<W: Real> Softmax<W> {
    fn new(head_dim: usize) -> Self {
        Self {
            max: W::from_f64(f64::NEG_INFINITY),
            sum: W::ZERO,
            values: vec![W::ZERO; head_dim],
        }
    }

    /// Adds the keys of `next` behind its own.
    fn merge(&mut self, next: &Self) {
        if self.sum == W::ZERO {
            self.clone_from(next);
            return;
        }
        let max = if next.max > self.max {
            next.max
        } else {
            self.max
        };
        let (old, new) = (exp(self.max - max), exp(next.max - max));
        self.max = max;
        self.sum = self.sum.mul_add(old, next.sum * new);
        for (value, &next) in self.values.iter_mut().zip(&next.values) {
            *value = value.mul_add(old, next * new);
        }
    }
}

/// As the kernels have it: zero, not the smallest number, for minus infinity.
fn exp<W: Real>(x: W) -> W {
    if x == W::from_f64(f64::NEG_INFINITY) {
        W::ZERO
    } else {
        x.exp()
    }
}

impl Attend<'_> {
    fn attend<T: Stored>(&self, q: &[T], pool: &[T], meta: &[u32]) -> Vec<T> {
        let step = self.step;
        let shape = step.layout.shape;
        let HeadShape {
            heads,
            kv_heads,
            head_dim,
        } = shape;
        let scale = T::Wide::from_f64(shape.scale());
        let segments = &meta[step.segments_at..][..4 * step.segments];
        let mut segment_of = vec![0; step.tokens];
        for (number, segment) in segments.chunks_exact(4).enumerate() {
            let first = segment[0] as usize;
            segment_of[first..first + segment[1] as usize].fill(number);
        }
        let mut output = vec![T::narrow(T::Wide::ZERO); q.len()];
        let rows = output.par_chunks_exact_mut(head_dim).enumerate();
        rows.for_each(|(row, output)| {
            let (token, head) = (row / heads, row % heads);
            let segment = &segments[4 * segment_of[token]..][..4];
            let seen = segment[2] as usize + (token - segment[0] as usize) + 1;
            let blocks = &meta[segment[3] as usize..][..seen.div_ceil(KEYS_PER_BLOCK)];
            let kv_head = head / (heads / kv_heads);
            let query: Vec<T::Wide> = q[row * head_dim..][..head_dim]
                .iter()
                .map(|x| x.widen() * scale)
                .collect();
            let [keys, values] = self.planes.map(|plane| {
                move |key: usize| {
                    let slot = blocks[key / KEYS_PER_BLOCK] as usize * KEYS_PER_BLOCK
                        + key % KEYS_PER_BLOCK;
                    &pool[plane + (slot * kv_heads + kv_head) * head_dim..][..head_dim]
                }
            });
            let all = attend_row(&query, seen, keys, values);
            let inverse = T::Wide::ONE / all.sum;
            for (output, value) in output.iter_mut().zip(all.values) {
                *output = T::narrow(value * inverse);
            }
        });
        output
    }
}

/// Attends from one scaled query to the first `seen` keys.
fn attend_row<'a, T: Stored>(
    query: &[T::Wide],
    seen: usize,
    key: impl Fn(usize) -> &'a [T],
    value: impl Fn(usize) -> &'a [T],
) -> Softmax<T::Wide> {
    let mut all = Softmax::new(query.len());
    for span in (0..seen).step_by(SPAN) {
        let mut part = Softmax::new(query.len());
        for first in (span..seen.min(span + SPAN)).step_by(KEYS_PER_BLOCK) {
            let visible = (seen - first).min(KEYS_PER_BLOCK);
            let mut weights = [T::Wide::ZERO; WARP];
            let mut max = part.max;
            for (offset, weight) in weights[..visible].iter_mut().enumerate() {
                for (&q, k) in query.iter().zip(key(first + offset)) {
                    *weight = q.mul_add(k.widen(), *weight);
                }
                max = if *weight > max { *weight } else { max };
            }
            let share = exp(part.max - max);
            for weight in &mut weights[..visible] {
                *weight = exp(*weight - max);
            }
            part.max = max;
            part.sum = part.sum.mul_add(share, warp_sum(weights));
            for sum in &mut part.values {
                *sum *= share;
            }
            for (offset, &weight) in weights[..visible].iter().enumerate() {
                for (sum, v) in part.values.iter_mut().zip(value(first + offset)) {
                    *sum = weight.mul_add(v.widen(), *sum);
                }
            }
        }
        all.merge(&part);
    }
    all
}
