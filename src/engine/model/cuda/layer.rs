//! What a layer does between its products.

use std::sync::{PoisonError, RwLock};

use candle_core::{CpuStorage, DType, Device, Shape, Tensor, WithDType as _};

use super::{
    Input, Kernel, Launch, Make, Operand, PagedStep, Scalar, Source, Stored, Variant, WARP, make,
    values, warp_sum, with_stored,
};
use crate::engine::model::ModelConfig;
use crate::engine::model::ops::Real;

const SOURCE: Source = Source {
    name: "layer",
    text: include_str!("layer.cu"),
    functions: &["add_norm", "rotate", "swiglu"],
};

fn variant(dtype: DType) -> Variant {
    Variant {
        dtype,
        defines: Vec::new(),
    }
}

/// Warps that have one row of a norm, or one head each.
const WARPS: usize = 4;

/// Threads of an elementwise launch.
const THREADS: usize = 256;

/// Returns `x + delta` and its RMS norm, both `[n, width]`; without `delta`, `x` and its norm.
pub(in crate::engine::model) fn add_norm(
    x: &Tensor,
    delta: Option<&Tensor>,
    weight: &Tensor,
    eps: f64,
) -> candle_core::Result<(Tensor, Tensor)> {
    let (rows, width) = x.dims2()?;
    let kernel = AddNorm {
        dtype: x.dtype(),
        rows,
        width,
        has_delta: delta.is_some(),
        eps,
    };
    let x = x.contiguous()?;
    let delta = delta.unwrap_or(&x).contiguous()?;
    let both = make(&kernel, &[&x, &delta, weight])?;
    Ok((both.get(0)?, both.get(1)?))
}

pub(super) struct AddNorm {
    pub(super) dtype: DType,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) has_delta: bool,
    pub(super) eps: f64,
}

impl Kernel for AddNorm {
    fn name(&self) -> &'static str {
        "add-norm"
    }

    fn launches(&self) -> candle_core::Result<Vec<Launch>> {
        Ok(vec![Launch {
            source: SOURCE,
            variant: variant(self.dtype),
            function: "add_norm",
            grid: [self.rows, 1, 1],
            threads: WARPS * WARP,
            shared_bytes: 0,
            operands: vec![
                Operand::Target,
                Operand::Input(0),
                Operand::Input(1),
                Operand::Input(2),
            ],
            scalars: vec![
                Scalar::u32(self.width)?,
                Scalar::U32(self.has_delta.into()),
                Scalar::F64(self.eps),
            ],
        }])
    }
}

impl Make for AddNorm {
    fn shape(&self) -> Shape {
        Shape::from((2, self.rows, self.width))
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn twin(&self, inputs: &[Input<'_>]) -> candle_core::Result<CpuStorage> {
        with_stored!(self.dtype, T => {
            let [x, delta, weight] = [0, 1, 2].map(|input| values::<T>(&inputs[input]));
            Ok(T::to_cpu_storage_owned(self.add_norm(x?, delta?, weight?)))
        })
    }
}

impl AddNorm {
    fn add_norm<T: Stored>(&self, x: &[T], delta: &[T], weight: &[T]) -> Vec<T> {
        let mut both = x.to_vec();
        if self.has_delta {
            for (sum, &delta) in both.iter_mut().zip(delta) {
                *sum = T::narrow(sum.widen() + delta.widen());
            }
        }
        let scales: Vec<T::Wide> = both
            .chunks_exact(self.width)
            .map(|row| {
                // By thread, then over the warps.
                let mut sums = [[T::Wide::ZERO; WARP]; WARPS];
                for (i, value) in row.iter().enumerate() {
                    let thread = i % (WARPS * WARP);
                    let sum = &mut sums[thread / WARP][thread % WARP];
                    *sum = value.widen().mul_add(value.widen(), *sum);
                }
                let sum = sums
                    .map(warp_sum)
                    .into_iter()
                    .fold(T::Wide::ZERO, |a, b| a + b);
                inverse_rms(sum, self.width, self.eps)
            })
            .collect();
        for row in 0..self.rows {
            for i in 0..self.width {
                let value = both[row * self.width + i].widen() * scales[row];
                both.push(T::narrow(value * weight[i].widen()));
            }
        }
        both
    }
}

fn inverse_rms<W: Real>(sum: W, width: usize, eps: f64) -> W {
    W::ONE / (sum / W::from_f64(width as f64) + W::from_f64(eps)).sqrt()
}

/// Cosines and sines of the first positions on a device, grown as longer sequences come.
#[derive(Debug)]
pub(in crate::engine::model) struct RotaryTable {
    frequencies: Vec<f32>,
    /// Factor of the rotated vectors.
    scale: f64,
    dtype: DType,
    device: Device,
    /// `[positions, head_dim]`: half cosines, half sines.
    rows: RwLock<Option<Tensor>>,
}

impl RotaryTable {
    /// Makes the table of a model whose numbers are of type `dtype`.
    pub(in crate::engine::model) fn new(
        config: &ModelConfig,
        dtype: DType,
        device: &Device,
    ) -> Self {
        let scaling = &config.rope_scaling;
        Self {
            frequencies: scaling.frequencies(config.head_dim, config.rope_theta),
            scale: scaling.attention_factor(),
            dtype: if dtype == DType::F64 {
                dtype
            } else {
                DType::F32
            },
            device: device.clone(),
            rows: RwLock::default(),
        }
    }

    /// Returns a table that covers `positions` at least.
    pub(in crate::engine::model) fn rows(&self, positions: usize) -> candle_core::Result<Tensor> {
        let covers = |rows: &Option<Tensor>| {
            let rows = rows.as_ref()?;
            (rows.dims()[0] >= positions).then(|| rows.clone())
        };
        if let Some(rows) = covers(&self.rows.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(rows);
        }
        let positions = positions.next_power_of_two();
        let mut values = Vec::with_capacity(positions * 2 * self.frequencies.len());
        for position in 0..positions {
            #[expect(clippy::cast_precision_loss, reason = "as transformers rounds")]
            let angles =
                (self.frequencies.iter()).map(|frequency| f64::from(position as f32 * frequency));
            values.extend(angles.clone().map(|angle| self.scale * angle.cos()));
            values.extend(angles.map(|angle| self.scale * angle.sin()));
        }
        let shape = (positions, 2 * self.frequencies.len());
        let rows = Tensor::from_vec(values, shape, &Device::Cpu)?
            .to_dtype(self.dtype)?
            .to_device(&self.device)?;
        *self.rows.write().unwrap_or_else(PoisonError::into_inner) = Some(rows.clone());
        Ok(rows)
    }
}

/// Returns `x` `[n, heads, head_dim]` with each head normalised by `norm` and rotated by its position.
pub(in crate::engine::model) fn rotate(
    x: &Tensor,
    norm: Option<&Tensor>,
    eps: f64,
    table: &Tensor,
    step: &PagedStep,
) -> candle_core::Result<Tensor> {
    let (tokens, heads, head_dim) = x.dims3()?;
    let kernel = Rotate {
        dtype: x.dtype(),
        tokens,
        heads,
        head_dim,
        has_norm: norm.is_some(),
        eps,
    };
    let x = x.contiguous()?;
    make(&kernel, &[&x, norm.unwrap_or(&x), table, &step.meta])
}

pub(super) struct Rotate {
    pub(super) dtype: DType,
    pub(super) tokens: usize,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
    pub(super) has_norm: bool,
    pub(super) eps: f64,
}

impl Kernel for Rotate {
    fn name(&self) -> &'static str {
        "rotate"
    }

    fn launches(&self) -> candle_core::Result<Vec<Launch>> {
        let wide_bytes = if self.dtype == DType::F64 { 8 } else { 4 };
        Ok(vec![Launch {
            source: SOURCE,
            variant: variant(self.dtype),
            function: "rotate",
            grid: [(self.tokens * self.heads).div_ceil(WARPS), 1, 1],
            threads: WARPS * WARP,
            shared_bytes: WARPS * self.head_dim * wide_bytes,
            operands: vec![
                Operand::Target,
                Operand::Input(0),
                Operand::Input(1),
                Operand::Input(2),
                Operand::Input(3),
            ],
            // Positions come first in a step's numbers.
            scalars: vec![
                Scalar::u32(self.tokens)?,
                Scalar::u32(self.heads)?,
                Scalar::u32(self.head_dim)?,
                Scalar::U32(self.has_norm.into()),
                Scalar::F64(self.eps),
            ],
        }])
    }
}

impl Make for Rotate {
    fn shape(&self) -> Shape {
        Shape::from((self.tokens, self.heads, self.head_dim))
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn twin(&self, inputs: &[Input<'_>]) -> candle_core::Result<CpuStorage> {
        with_stored!(self.dtype, T => {
            let (x, weight) = (values::<T>(&inputs[0])?, values::<T>(&inputs[1])?);
            let (table, meta) = (values(&inputs[2])?, values::<u32>(&inputs[3])?);
            Ok(T::to_cpu_storage_owned(self.rotate(x, weight, table, meta)))
        })
    }
}

impl Rotate {
    fn rotate<T: Stored>(
        &self,
        x: &[T],
        weight: &[T],
        table: &[T::Wide],
        positions: &[u32],
    ) -> Vec<T> {
        let half = self.head_dim / 2;
        let mut y = Vec::with_capacity(x.len());
        for (head, x) in x.chunks_exact(self.head_dim).enumerate() {
            let mut values: Vec<T::Wide> = x.iter().map(|x| x.widen()).collect();
            if self.has_norm {
                let mut sums = [T::Wide::ZERO; WARP];
                for (d, &value) in values.iter().enumerate() {
                    sums[d % WARP] = value.mul_add(value, sums[d % WARP]);
                }
                let scale = inverse_rms(warp_sum(sums), self.head_dim, self.eps);
                for (value, weight) in values.iter_mut().zip(weight) {
                    *value = T::narrow(*value * scale * weight.widen()).widen();
                }
            }
            let position = positions[head / self.heads] as usize;
            let angles = &table[position * self.head_dim..][..self.head_dim];
            let (cosines, sines) = angles.split_at(half);
            let (low, high) = values.split_at(half);
            let turned = |a: &[T::Wide], b: &[T::Wide], sign: T::Wide| -> Vec<T> {
                (0..half)
                    .map(|d| T::narrow(a[d] * cosines[d] + sign * (b[d] * sines[d])))
                    .collect()
            };
            y.extend(turned(low, high, -T::Wide::ONE));
            y.extend(turned(high, low, T::Wide::ONE));
        }
        y
    }
}

/// Returns `silu(gate) * up`.
pub(in crate::engine::model) fn swiglu(gate: &Tensor, up: &Tensor) -> candle_core::Result<Tensor> {
    let kernel = Swiglu {
        dtype: gate.dtype(),
        shape: gate.shape().clone(),
    };
    make(&kernel, &[&gate.contiguous()?, &up.contiguous()?])
}

pub(super) struct Swiglu {
    pub(super) dtype: DType,
    pub(super) shape: Shape,
}

impl Kernel for Swiglu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn launches(&self) -> candle_core::Result<Vec<Launch>> {
        let count = self.shape.elem_count();
        Ok(vec![Launch {
            source: SOURCE,
            variant: variant(self.dtype),
            function: "swiglu",
            grid: [count.div_ceil(THREADS), 1, 1],
            threads: THREADS,
            shared_bytes: 0,
            operands: vec![Operand::Target, Operand::Input(0), Operand::Input(1)],
            scalars: vec![Scalar::u64(count)],
        }])
    }
}

impl Make for Swiglu {
    fn shape(&self) -> Shape {
        self.shape.clone()
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn twin(&self, inputs: &[Input<'_>]) -> candle_core::Result<CpuStorage> {
        with_stored!(self.dtype, T => {
            let (gate, up) = (values::<T>(&inputs[0])?, values::<T>(&inputs[1])?);
            let made = gate.iter().zip(up).map(|(&gate, &up)| gated(gate, up)).collect();
            Ok(T::to_cpu_storage_owned(made))
        })
    }
}

fn gated<T: Stored>(gate: T, up: T) -> T {
    let x = gate.widen();
    let one = T::Wide::ONE;
    let activated = T::narrow(x / (one + (-x).exp()));
    T::narrow(activated.widen() * up.widen())
}
