//! Products in bf16: weights and rows in pairs of bf16, sums in `f32`.
//!
//! A pair is what the instruction `VDPBF16PS` takes at a time. It adds to an `f32` the product of the
//! pair's second elements, then that of the first ones, each with one rounding to nearest even, taking
//! denormals for zero and turning those that result into zero (Intel's manual, volume 2). Where the machine
//! lacks it, the same sums are made of fused multiplications, to the same bits. Each output is one
//! accumulator that takes the pairs in their order, so a row's result does not depend on its neighbours
//! here either.

use std::ops::Range;

use rayon::prelude::*;

use super::super::{Buffer, Real, rows_per_task, vectorized};
use super::PANEL;

/// Pairs that rows and panels are filled up to a multiple of, with zeros: a cache line of them.
const BLOCK: usize = 16;

/// Returns how many pairs of a row or a panel hold so many numbers.
pub(super) fn pairs_of(numbers: usize) -> usize {
    numbers.div_ceil(2).next_multiple_of(BLOCK)
}

/// Rounds to the nearest bf16, ties to even. Denormals become zero, as products take them for it; what
/// would become infinite is cut off instead.
#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the upper half is asked for"
)]
pub(super) fn round(value: f32) -> u16 {
    let bits = value.to_bits();
    let size = bits & 0x7fff_ffff;
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let overflows = size < 0x7f80_0000 && rounded & 0x7fff == 0x7f80;
    let rounded = if overflows { rounded - 1 } else { rounded };
    let rounded = if size < 0x0080_0000 {
        bits >> 16 & 0x8000
    } else {
        rounded
    };
    let not_a_number = bits >> 16 | 0x40;
    (if size > 0x7f80_0000 {
        not_a_number
    } else {
        rounded
    }) as u16
}

#[inline(always)]
pub(super) fn pair(first: u16, second: u16) -> u32 {
    u32::from(first) | u32::from(second) << 16
}

/// Returns the first or the second number of a pair.
#[inline(always)]
pub(super) fn number(pair: u32, second: bool) -> f32 {
    f32::from_bits(if second {
        pair & 0xffff_0000
    } else {
        pair << 16
    })
}

/// Rows of tokens in pairs, one row after the other.
pub(super) struct RowPairs {
    values: Buffer<u32>,
    /// From one row to the next: an odd number of cache lines, so that the rows of a tile lie in
    /// different sets of the cache.
    stride: usize,
    pairs: usize,
}

impl RowPairs {
    /// Rounds columns of `x` `[m, width]`.
    pub(super) fn new<T: Real>(x: &[T], m: usize, columns: Range<usize>, width: usize) -> Self {
        let pairs = pairs_of(columns.len());
        let stride = ((pairs / BLOCK) | 1) * BLOCK;
        let mut values = Buffer::new(m * stride);
        let rows = rows_per_task(width);
        values
            .par_chunks_mut(rows * stride)
            .zip(x.par_chunks(rows * width.max(1)))
            .for_each(|(values, x)| {
                vectorized(
                    #[inline(always)]
                    || {
                        let rows = values.chunks_exact_mut(stride);
                        for (values, x) in rows.zip(x.chunks_exact(width.max(1))) {
                            round_row(&x[columns.clone()], &mut values[..pairs]);
                        }
                    },
                );
            });
        Self {
            values,
            stride,
            pairs,
        }
    }

    /// Returns some pairs of some rows.
    pub(super) fn tile(&self, rows: Range<usize>, pairs: Range<usize>) -> RowTile<'_> {
        debug_assert!(pairs.end <= self.pairs, "pairs of a row");
        RowTile {
            values: &self.values[rows.start * self.stride + pairs.start..],
            stride: self.stride,
            rows: rows.len(),
            pairs: pairs.len(),
        }
    }

    /// Returns some rows.
    pub(super) fn rows(&self, rows: Range<usize>) -> RowTile<'_> {
        self.tile(rows, 0..self.pairs)
    }
}

#[inline(always)]
fn round_row<T: Real>(x: &[T], pairs: &mut [u32]) {
    let (whole, rest) = x.as_chunks::<2>();
    let (head, tail) = pairs.split_at_mut(whole.len());
    for (value, &[first, second]) in head.iter_mut().zip(whole) {
        *value = pair(round(first.to_single()), round(second.to_single()));
    }
    tail.fill(0);
    if let ([last], Some(value)) = (rest, tail.first_mut()) {
        *value = pair(round(last.to_single()), 0);
    }
}

/// A few rows in pairs.
#[derive(Clone, Copy)]
pub(super) struct RowTile<'a> {
    values: &'a [u32],
    stride: usize,
    rows: usize,
    pairs: usize,
}

/// How sums of pairs are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dots {
    /// With the instruction for it.
    #[cfg(target_arch = "x86_64")]
    Instruction,
    /// With others, to the same bits.
    Emulated,
}

impl Dots {
    /// Returns the fastest that this machine has.
    pub(super) fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16") {
            return Self::Instruction;
        }
        Self::Emulated
    }

    /// Multiplies rows and a panel `[pairs, PANEL]`, and hands each row's sums to `write`.
    #[inline(always)]
    pub(super) fn multiply<T: Real>(
        self,
        x: RowTile<'_>,
        panel: &[u32],
        mut write: impl FnMut(usize, &[T; PANEL]),
    ) {
        let write = &mut write;
        vectorized(
            #[inline(always)]
            || match x.rows {
                1 => self.rows_times_panel::<T, 1>(x, panel, write),
                2 => self.rows_times_panel::<T, 2>(x, panel, write),
                3 => self.rows_times_panel::<T, 3>(x, panel, write),
                4 => self.rows_times_panel::<T, 4>(x, panel, write),
                5 => self.rows_times_panel::<T, 5>(x, panel, write),
                6 => self.rows_times_panel::<T, 6>(x, panel, write),
                7 => self.rows_times_panel::<T, 7>(x, panel, write),
                8 => self.rows_times_panel::<T, 8>(x, panel, write),
                9 => self.rows_times_panel::<T, 9>(x, panel, write),
                10 => self.rows_times_panel::<T, 10>(x, panel, write),
                11 => self.rows_times_panel::<T, 11>(x, panel, write),
                12 => self.rows_times_panel::<T, 12>(x, panel, write),
                rows => unreachable!("no level has tiles of {rows} rows"),
            },
        );
    }

    #[inline(always)]
    fn rows_times_panel<T: Real, const ROWS: usize>(
        self,
        x: RowTile<'_>,
        panel: &[u32],
        write: &mut impl FnMut(usize, &[T; PANEL]),
    ) {
        let x: [&[u32]; ROWS] = std::array::from_fn(|row| &x.values[row * x.stride..][..x.pairs]);
        let mut sums = [[0.0; PANEL]; ROWS];
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Instruction => {
                #[expect(unsafe_code, reason = "instructions that not every machine has")]
                // SAFETY: `best` has found that this one has them.
                unsafe {
                    instruction::add_products(x, panel, &mut sums);
                }
            }
            Self::Emulated => emulate_products(x, panel, &mut sums),
        }
        for (row, sums) in sums.iter().enumerate() {
            let mut found = [T::ZERO; PANEL];
            for (found, &sum) in found.iter_mut().zip(sums) {
                *found = T::from_single(sum);
            }
            write(row, &found);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod instruction {
    use std::arch::x86_64::{
        __m512, __m512bh, _mm512_dpbf16_ps, _mm512_set1_epi32, _mm512_setzero_ps,
    };

    use super::{BLOCK, PANEL};

    /// Numbers of a vector.
    const LANES: usize = 16;

    #[inline(always)]
    fn vectors(pairs: &[u32; PANEL]) -> [__m512bh; 2] {
        #[expect(unsafe_code, reason = "vectors from numbers")]
        // SAFETY: both are 128 bytes, and any bits are such vectors.
        unsafe {
            std::mem::transmute::<[u32; PANEL], [__m512bh; 2]>(*pairs)
        }
    }

    /// Computes the sums of all rows for the panel's outputs.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn add_products<const ROWS: usize>(
        x: [&[u32]; ROWS],
        panel: &[u32],
        sums: &mut [[f32; PANEL]; ROWS],
    ) {
        const { assert!(PANEL == 2 * LANES, "two vectors of outputs") };
        let mut accumulators = [[_mm512_setzero_ps(); 2]; ROWS];
        let (blocks, _) = panel.as_chunks::<{ BLOCK * PANEL }>();
        let x = x.map(|row| row.as_chunks::<BLOCK>().0);
        for (index, block) in blocks.iter().enumerate() {
            let x: [&[u32; BLOCK]; ROWS] = std::array::from_fn(|row| &x[row][index]);
            for (at, weights) in block.as_chunks::<PANEL>().0.iter().enumerate() {
                let [low, high] = vectors(weights);
                for row in 0..ROWS {
                    let x = _mm512_set1_epi32(x[row][at].cast_signed());
                    #[expect(unsafe_code, reason = "vectors from numbers")]
                    // SAFETY: both are 64 bytes, and any bits are such a vector.
                    let x: __m512bh = unsafe { std::mem::transmute(x) };
                    let [sum_low, sum_high] = accumulators[row];
                    accumulators[row] = [
                        _mm512_dpbf16_ps(sum_low, low, x),
                        _mm512_dpbf16_ps(sum_high, high, x),
                    ];
                }
            }
        }
        for (sums, accumulators) in sums.iter_mut().zip(accumulators) {
            #[expect(unsafe_code, reason = "numbers from vectors")]
            // SAFETY: both are 128 bytes, and any bits are such numbers.
            let both = unsafe { std::mem::transmute::<[__m512; 2], [f32; PANEL]>(accumulators) };
            *sums = both;
        }
    }
}

/// Computes the sums of all rows for the panel's outputs.
#[inline(always)]
fn emulate_products<const ROWS: usize>(
    x: [&[u32]; ROWS],
    panel: &[u32],
    sums: &mut [[f32; PANEL]; ROWS],
) {
    let (panel, _) = panel.as_chunks::<PANEL>();
    for (x, sums) in x.into_iter().zip(sums) {
        for (&x, weights) in x.iter().zip(panel) {
            for second in [true, false] {
                add_products(number(x, second), weights, second, sums);
            }
        }
    }
}

/// Adds the products of `x` with the first or second numbers of a panel's pairs.
#[inline(always)]
fn add_products(x: f32, weights: &[u32; PANEL], second: bool, sums: &mut [f32; PANEL]) {
    let mut results = [0.0; PANEL];
    let mut is_tiny = false;
    for ((result, &weight), &sum) in results.iter_mut().zip(weights).zip(&*sums) {
        *result = x.mul_add(number(weight, second), sum);
        is_tiny |= result.abs() <= f32::MIN_POSITIVE && *result != 0.0;
    }
    if is_tiny {
        for ((result, &weight), &sum) in results.iter_mut().zip(weights).zip(&*sums) {
            *result = flush(*result, x, number(weight, second), sum);
        }
    }
    *sums = results;
}

/// Turns the result of `x * weight + sum` into zero if it is denormal, rounded as if there were no
/// denormals.
fn flush(result: f32, x: f32, weight: f32, sum: f32) -> f32 {
    /// 2^64.
    const SCALE: f32 = (1_u64 << 32) as f32 * (1_u64 << 32) as f32;
    let is_denormal = if result.abs() == f32::MIN_POSITIVE {
        // It may be a smaller one that was rounded up to it, in steps coarser than a normal number has.
        // Where the result is so small, the smaller factor is at most 1.
        let (small, large) = if x.abs() < weight.abs() {
            (x, weight)
        } else {
            (weight, x)
        };
        let scaled = (small * SCALE).mul_add(large, sum * SCALE);
        scaled.abs() < f32::MIN_POSITIVE * SCALE
    } else {
        result.abs() < f32::MIN_POSITIVE
    };
    if is_denormal {
        0.0_f32.copysign(result)
    } else {
        result
    }
}

/// Writes some columns of a panel's outputs, two outputs' to a row of [`PANEL`] pairs.
///
/// `columns` begins with an even one. Of `panel` `[pairs of inputs, PANEL]` it makes `[pairs of outputs,
/// PANEL]`.
pub(super) fn turn_panel(panel: &[u32], columns: Range<usize>, turned: &mut [u32]) {
    let (panel, _) = panel.as_chunks::<PANEL>();
    let inputs = &panel[columns.start / 2..columns.end.div_ceil(2)];
    for (at, outputs) in inputs.iter().enumerate() {
        let outputs = outputs.as_chunks::<2>().0;
        for (turned, &[first, second]) in turned.chunks_exact_mut(PANEL).zip(outputs) {
            turned[2 * at] = first & 0xffff | second << 16;
            turned[2 * at + 1] = first >> 16 | second & 0xffff_0000;
        }
    }
}

#[cfg(test)]
mod tests;
