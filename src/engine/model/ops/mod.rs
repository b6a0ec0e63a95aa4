//! The loops of the decoder on the CPU, each with its backward pass.
//!
//! Every function works on plain row-major slices and on `f32` or `f64` alike; the latter exists
//! for finite-difference tests. Loops over rows run on rayon's threads in chunks whose size does not
//! depend on the number of threads, so results are the same bits on one core and on sixty-four.
//!
//! A second property is kept on purpose: **what a row's result is does not depend on which rows
//! stand beside it.** Sums run in an order fixed by the row's own length. So a token scored in a
//! training batch has the same bits as when it was sampled alone.

mod attention;
mod buffer;
mod matmul;
mod panels;
mod rms_norm;
mod rope;
mod softmax;
mod swiglu;

use std::ops::{Deref, Range};

use candle_core::{CpuStorage, Device, Storage, StorageRef, Tensor, WithDType};
use rayon::prelude::*;

pub(crate) use attention::{
    Attention, HeadShape, KEYS_PER_BLOCK, KeyValues, LastTokens, PackedKeyValues, attend,
    attend_backward, key_block_len, write_key_value,
};
use buffer::Reusable;
pub(crate) use buffer::{Buffer, free_unused};
pub(crate) use matmul::{Matrix, Write, matmul};
use panels::Vectorized;
pub use panels::{CpuKernels, WeightFormat};
pub(crate) use panels::{
    Orientation, Packed, PackedRows, PairProduct, Panels, Product, RowPairs, Term, TermRows,
    add_outer_products, add_outer_products_of_pairs, add_to_rows, linear, linears,
    linears_backward, linears_of_pairs,
};
pub(crate) use rms_norm::{rms_norm, rms_norm_backward, rms_norm_row};
pub(crate) use rope::{RopeRows, RopeTable, Turn, rope};
pub(crate) use softmax::{RowLoss, log_softmax_gradient, row_statistics};
pub use softmax::{RowStatistics, log_sum_exp};
pub(crate) use swiglu::{swiglu, swiglu_backward, swiglu_backward_to, swiglu_in_place};

/// Elements that one rayon task handles in the elementwise loops: large enough to hide the cost of
/// a task, small enough to share a 256-token batch between two cores.
const TASK_ELEMENTS: usize = 16 * 1024;

/// Partial sums kept side by side, so that a reduction vectorises: one AVX-512 register of `f32`.
pub(crate) const LANES: usize = 16;

/// A floating-point type that the loops are written for.
pub trait Real:
    WithDType + Vectorized + Reusable + std::ops::Neg<Output = Self> + std::iter::Sum
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// The smallest finite value.
    const LOWEST: Self;

    /// Returns e to the power of `self`, in code that vectorises.
    #[must_use]
    fn exp(self) -> Self;
    /// Returns the natural logarithm.
    #[must_use]
    fn ln(self) -> Self;
    /// Returns the square root.
    #[must_use]
    fn sqrt(self) -> Self;
    /// Returns `self * a + b` with one rounding.
    #[must_use]
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// Returns the numbers of a CPU storage of this type.
    ///
    /// # Errors
    ///
    /// Fails if the storage holds another type.
    fn slice_mut(storage: &mut CpuStorage) -> candle_core::Result<&mut [Self]>;
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LOWEST: Self = Self::MIN;

    /// Cephes' `expf` (degree 5 after range reduction), relative error under 2e-7. Saturates at
    /// 2^-126 and 2^127 rather than at 0 and infinity. NaN stays NaN.
    #[inline(always)]
    #[expect(clippy::excessive_precision, reason = "the published coefficients")]
    fn exp(self) -> Self {
        // 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the mantissa.
        const ROUND: f32 = 12_582_912.0;
        // Comparisons rather than `clamp`, so that NaN passes through.
        let x = if self < -87.336_54 { -87.336_54 } else { self };
        let x = if x > 88.376_26 { 88.376_26 } else { x };
        let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
        let n = shifted - ROUND;
        let r = n.mul_add(-0.693_359_375, x);
        let r = n.mul_add(2.121_944_4e-4, r);
        let p = 1.987_569_150_0e-4_f32;
        let p = p.mul_add(r, 1.398_199_950_7e-3);
        let p = p.mul_add(r, 8.333_451_907_3e-3);
        let p = p.mul_add(r, 4.166_579_589_4e-2);
        let p = p.mul_add(r, 1.666_666_545_9e-1);
        let p = p.mul_add(r, 5.000_000_120_1e-1);
        let y = p.mul_add(r * r, r + 1.0);
        let power = Self::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
        y * power
    }

    #[inline(always)]
    fn ln(self) -> Self {
        Self::ln(self)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        Self::sqrt(self)
    }

    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        Self::mul_add(self, a, b)
    }

    fn slice_mut(storage: &mut CpuStorage) -> candle_core::Result<&mut [Self]> {
        match storage {
            CpuStorage::F32(values) => Ok(values),
            _ => candle_core::bail!("expected a storage of f32"),
        }
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LOWEST: Self = Self::MIN;

    #[inline(always)]
    fn exp(self) -> Self {
        Self::exp(self)
    }

    #[inline(always)]
    fn ln(self) -> Self {
        Self::ln(self)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        Self::sqrt(self)
    }

    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        Self::mul_add(self, a, b)
    }

    fn slice_mut(storage: &mut CpuStorage) -> candle_core::Result<&mut [Self]> {
        match storage {
            CpuStorage::F64(values) => Ok(values),
            _ => candle_core::bail!("expected a storage of f64"),
        }
    }
}

/// Runs `body` compiled for the widest vectors that this machine has.
///
/// Only what is inlined into `body` profits: the loops below it are `#[inline(always)]`.
#[inline(always)]
pub(crate) fn vectorized<R>(body: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(avx512) = pulp::x86::V4::try_new() {
            return avx512.vectorize(body);
        }
        if let Some(avx2) = pulp::x86::V3::try_new() {
            return avx2.vectorize(body);
        }
        body()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        pulp::Arch::new().dispatch(body)
    }
}

/// Returns the sum of `f(i)` for `i` in `0..len`, in an order that depends on `len` only.
#[inline(always)]
pub(crate) fn lane_sum<T: Real>(len: usize, f: impl Fn(usize) -> T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let whole = len - len % LANES;
    let mut start = 0;
    while start < whole {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += f(start + lane);
        }
        start += LANES;
    }
    for i in whole..len {
        lanes[i - whole] += f(i);
    }
    across(lanes)
}

/// Returns two sums at once, each as [`lane_sum`] makes it.
#[inline(always)]
pub(crate) fn lane_sums<T: Real>(len: usize, f: impl Fn(usize) -> [T; 2]) -> [T; 2] {
    let [mut first, mut second] = [[T::ZERO; LANES]; 2];
    let whole = len - len % LANES;
    let mut start = 0;
    while start < whole {
        for lane in 0..LANES {
            let [a, b] = f(start + lane);
            first[lane] += a;
            second[lane] += b;
        }
        start += LANES;
    }
    for i in whole..len {
        let [a, b] = f(i);
        first[i - whole] += a;
        second[i - whole] += b;
    }
    [across(first), across(second)]
}

#[inline(always)]
fn across<T: Real>(mut lanes: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            let other = lanes[lane + width];
            lanes[lane] += other;
        }
        width /= 2;
    }
    lanes[0]
}

/// Returns the largest of `f(i)` for `i` in `0..len`, or the lowest value if there are none.
#[inline(always)]
pub(crate) fn lane_max<T: Real>(len: usize, f: impl Fn(usize) -> T) -> T {
    let mut lanes = [T::LOWEST; LANES];
    let whole = len - len % LANES;
    let mut start = 0;
    while start < whole {
        for (lane, max) in lanes.iter_mut().enumerate() {
            let value = f(start + lane);
            *max = if value > *max { value } else { *max };
        }
        start += LANES;
    }
    for i in whole..len {
        let value = f(i);
        lanes[0] = if value > lanes[0] { value } else { lanes[0] };
    }
    lanes.iter().fold(
        T::LOWEST,
        |max, &value| if value > max { value } else { max },
    )
}

/// Rows of `width` elements that one rayon task takes.
fn rows_per_task(width: usize) -> usize {
    (TASK_ELEMENTS / width.max(1)).max(1)
}

/// Has each row of `width` elements written, given its index, with loops compiled for the widest vectors.
pub(crate) fn for_each_row<T: Real>(
    rows: &mut [T],
    width: usize,
    fill: impl Fn(usize, &mut [T]) + Sync,
) {
    let task = rows_per_task(width);
    rows.par_chunks_mut(task * width.max(1))
        .enumerate()
        .for_each(|(index, rows)| {
            vectorized(
                #[inline(always)]
                || {
                    for (at, row) in rows.chunks_exact_mut(width.max(1)).enumerate() {
                        fill(index * task + at, row);
                    }
                },
            );
        });
}

/// A read lock on the values of a contiguous CPU tensor.
pub(crate) struct Values<'a, T> {
    storage: StorageRef<'a>,
    range: Range<usize>,
    kind: std::marker::PhantomData<T>,
}

impl<'a, T: Real> Values<'a, T> {
    /// Locks `tensor` for reading.
    ///
    /// # Errors
    ///
    /// Fails if the tensor is not contiguous, not on the CPU or not of type `T`.
    pub(crate) fn of(tensor: &'a Tensor) -> candle_core::Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("expected a contiguous tensor, found {layout:?}")
        };
        match &*storage {
            Storage::Cpu(values) => {
                values.as_slice::<T>()?;
            }
            _ => candle_core::bail!("expected a tensor on the CPU"),
        }
        Ok(Self {
            storage,
            range: start..end,
            kind: std::marker::PhantomData,
        })
    }
}

impl<T: Real> Deref for Values<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &*self.storage {
            Storage::Cpu(values) => {
                let values = values.as_slice::<T>().expect("checked by `of`");
                &values[self.range.clone()]
            }
            _ => unreachable!("checked by `of`"),
        }
    }
}

/// Moves `values` into a tensor on the CPU.
pub(crate) fn into_tensor<T: Real>(
    values: Vec<T>,
    shape: impl Into<candle_core::Shape>,
) -> candle_core::Result<Tensor> {
    Tensor::from_vec(values, shape.into(), &Device::Cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp_of_the_exact_value() {
        let mut worst = 0.0_f64;
        let mut x = -87.0_f32;
        while x < 88.0 {
            let exact = f64::from(x).exp();
            let error = (f64::from(Real::exp(x)) - exact).abs() / exact;
            worst = worst.max(error);
            x += 0.003_7;
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
        assert_eq!(Real::exp(0.0_f32), 1.0);
        assert!(Real::exp(f32::NAN).is_nan());
        assert!(Real::exp(-1e9_f32) < 1e-37);
        assert!(Real::exp(1e9_f32).is_finite());
    }

    #[test]
    fn lane_reductions_match_the_plain_ones() {
        for len in [0, 1, 15, 16, 17, 100] {
            let value = |i: usize| ((i * 37) % 11) as f64 - 5.0;
            let sum: f64 = (0..len).map(value).sum();
            assert_eq!(lane_sum(len, value), sum);
            let max = (0..len).map(value).fold(f64::MIN, f64::max);
            assert_eq!(lane_max(len, value), max);
        }
    }
}
