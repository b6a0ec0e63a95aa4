//! Products in bf16: weights and rows in pairs of bf16, sums in `f32`.
//!
//! A pair is what the instruction `VDPBF16PS` takes at a time. It adds to an `f32` the product of the
//! pair's second elements, then that of the first ones, each with one rounding to nearest even, taking
//! denormals for zero and turning those that result into zero (Intel's manual, volume 2). Where the machine
//! lacks it, the same sums are made of fused multiplications, to the same bits. Each output is one
//! accumulator that takes the pairs in their order, so a row's result does not depend on its neighbours
//! here either.

mod products;

use std::ops::Range;

use rayon::prelude::*;

use super::super::{Buffer, Real, rows_per_task, vectorized};
use super::PANEL;
pub(crate) use products::{
    PairProduct, add_outer_products_of_pairs, add_to_rows, linears_of_pairs,
};
pub(super) use products::{linears_backward, multiply_rows};

/// Pairs that rows and panels are filled up to a multiple of, with zeros: half a cache line of them, which
/// a rank of 16 fills.
const BLOCK: usize = 8;

/// Pairs of a cache line.
const LINE: usize = 16;

/// Rows of a tile: what leaves registers for the panel and the row's value.
const TILE_ROWS: usize = 12;

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

/// Rows of numbers in pairs, one row after the other.
pub(crate) struct RowPairs {
    values: Buffer<u32>,
    /// From one row to the next: an odd number of cache lines, so that the rows of a tile lie in
    /// different sets of the cache.
    stride: usize,
    pairs: usize,
    rows: usize,
}

impl RowPairs {
    /// Rounds columns of `x` `[m, width]`.
    pub(crate) fn new<T: Real>(x: &[T], m: usize, columns: Range<usize>, width: usize) -> Self {
        assert_eq!(x.len(), m * width, "size of the rows");
        assert!(columns.end <= width, "columns of the rows");
        let mut rows = Self::unwritten(m, columns.len());
        rows.write(width, |dots, row, pairs| {
            dots.round_row(&x[row * width..][columns.clone()], pairs);
        });
        rows
    }

    /// Rounds rows of `width` numbers that `fill` writes, given their index.
    pub(crate) fn with<T: Real>(
        m: usize,
        width: usize,
        fill: impl Fn(usize, &mut [T]) + Sync,
    ) -> Self {
        let mut rows = Self::unwritten(m, width);
        rows.write_with(
            width,
            || vec![T::ZERO; width],
            #[inline(always)]
            |dots, x, row, pairs| {
                vectorized(
                    #[inline(always)]
                    || fill(row, x),
                );
                dots.round_row(x, pairs);
            },
        );
        rows
    }

    /// As [`RowPairs::with`], for two that are written together.
    pub(crate) fn two_with<T: Real>(
        m: usize,
        width: usize,
        fill: impl Fn(usize, &mut [T], &mut [T]) + Sync,
    ) -> [Self; 2] {
        let [mut first, mut second] = [(); 2].map(|()| Self::unwritten(m, width));
        let (stride, pairs) = (first.stride, first.pairs);
        let task = rows_per_task(2 * width);
        (first.values.par_chunks_mut(task * stride))
            .zip(second.values.par_chunks_mut(task * stride))
            .enumerate()
            .for_each_init(
                || [(); 2].map(|()| vec![T::ZERO; width]),
                |[x, y], (index, (first, second))| {
                    let rows =
                        (first.chunks_exact_mut(stride)).zip(second.chunks_exact_mut(stride));
                    for (at, (first, second)) in rows.enumerate() {
                        vectorized(
                            #[inline(always)]
                            || fill(index * task + at, x, y),
                        );
                        Dots::best().round_row(x, &mut first[..pairs]);
                        Dots::best().round_row(y, &mut second[..pairs]);
                    }
                },
            );
        [first, second]
    }

    fn unwritten(m: usize, width: usize) -> Self {
        let pairs = pairs_of(width);
        let stride = (pairs.div_ceil(LINE) | 1) * LINE;
        Self {
            values: Buffer::new(m * stride),
            stride,
            pairs,
            rows: m,
        }
    }

    /// Has each row written, given its index and its pairs.
    fn write(&mut self, width: usize, write: impl Fn(Dots, usize, &mut [u32]) + Sync) {
        self.write_with(width, || (), |dots, (), row, pairs| write(dots, row, pairs));
    }

    fn write_with<S>(
        &mut self,
        width: usize,
        scratch: impl Fn() -> S + Sync + Send,
        write: impl Fn(Dots, &mut S, usize, &mut [u32]) + Sync,
    ) {
        let (stride, pairs) = (self.stride, self.pairs);
        let task = rows_per_task(width);
        let dots = Dots::best();
        self.values
            .par_chunks_mut(task * stride)
            .enumerate()
            .for_each_init(scratch, |scratch, (index, values)| {
                for (at, values) in values.chunks_exact_mut(stride).enumerate() {
                    write(dots, scratch, index * task + at, &mut values[..pairs]);
                }
            });
    }

    /// Returns the number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Returns a copy of some rows.
    pub(crate) fn part(&self, rows: Range<usize>) -> Self {
        let mut values = Buffer::new(rows.len() * self.stride);
        values.copy_from_slice(&self.values[rows.start * self.stride..rows.end * self.stride]);
        Self {
            values,
            stride: self.stride,
            pairs: self.pairs,
            rows: rows.len(),
        }
    }

    /// Returns the pairs of a row.
    fn row(&self, row: usize) -> &[u32] {
        &self.values[row * self.stride..][..self.pairs]
    }

    /// Returns some pairs of some rows.
    fn tile(&self, rows: Range<usize>, pairs: Range<usize>) -> RowTile<'_> {
        debug_assert!(
            pairs.end <= self.pairs && rows.end <= self.rows,
            "pairs of rows"
        );
        RowTile {
            values: &self.values[rows.start * self.stride + pairs.start..],
            stride: self.stride,
            rows: rows.len(),
            pairs: pairs.len(),
        }
    }

    /// Returns whole rows.
    fn whole(&self, rows: Range<usize>) -> RowTile<'_> {
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
struct RowTile<'a> {
    values: &'a [u32],
    stride: usize,
    rows: usize,
    pairs: usize,
}

/// A few rows and the panel `[pairs, PANEL]` to multiply them with.
#[derive(Clone, Copy)]
struct PairTile<'a> {
    x: RowTile<'a>,
    panel: &'a [u32],
}

/// Returns whether this machine has the instruction for sums of pairs.
pub(super) fn has_instruction() -> bool {
    Dots::best() != Dots::Emulated
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

    /// Rounds a row of numbers, and fills it up with zeros.
    fn round_row<T: Real>(self, x: &[T], pairs: &mut [u32]) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Instruction => {
                #[expect(unsafe_code, reason = "instructions that not every machine has")]
                // SAFETY: `best` has found that this one has them.
                unsafe {
                    instruction::round_row(x, pairs);
                }
            }
            Self::Emulated => vectorized(
                #[inline(always)]
                || round_row(x, pairs),
            ),
        }
    }

    /// Sums the products of tiles, one after the other, has `join` change each row's sums, goes on with the
    /// products of `then`, and hands the sums to `write`. Tiles have the same `rows`; `width` is how many
    /// outputs of the panels there are.
    #[inline(always)]
    fn multiply(
        self,
        [rows, width]: [usize; 2],
        tiles: &[PairTile<'_>],
        mut join: impl FnMut(usize, &mut [f32; PANEL]),
        then: Option<PairTile<'_>>,
        mut write: impl FnMut(usize, &[f32; PANEL]),
    ) {
        let (join, write) = (&mut join, &mut write);
        vectorized(
            #[inline(always)]
            || match rows {
                1 => self.rows_times_panels::<1>(width, tiles, join, then, write),
                2 => self.rows_times_panels::<2>(width, tiles, join, then, write),
                3 => self.rows_times_panels::<3>(width, tiles, join, then, write),
                4 => self.rows_times_panels::<4>(width, tiles, join, then, write),
                5 => self.rows_times_panels::<5>(width, tiles, join, then, write),
                6 => self.rows_times_panels::<6>(width, tiles, join, then, write),
                7 => self.rows_times_panels::<7>(width, tiles, join, then, write),
                8 => self.rows_times_panels::<8>(width, tiles, join, then, write),
                9 => self.rows_times_panels::<9>(width, tiles, join, then, write),
                10 => self.rows_times_panels::<10>(width, tiles, join, then, write),
                11 => self.rows_times_panels::<11>(width, tiles, join, then, write),
                12 => self.rows_times_panels::<12>(width, tiles, join, then, write),
                rows => unreachable!("no tile has {rows} rows"),
            },
        );
    }

    #[inline(always)]
    fn rows_times_panels<const ROWS: usize>(
        self,
        width: usize,
        tiles: &[PairTile<'_>],
        join: &mut impl FnMut(usize, &mut [f32; PANEL]),
        then: Option<PairTile<'_>>,
        write: &mut impl FnMut(usize, &[f32; PANEL]),
    ) {
        let mut sums = [[0.0; PANEL]; ROWS];
        for &tile in tiles {
            self.add_products(tile, width, &mut sums);
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            join(row, sums);
        }
        if let Some(tile) = then {
            self.add_products(tile, width, &mut sums);
        }
        for (row, sums) in sums.iter().enumerate() {
            write(row, sums);
        }
    }

    #[inline(always)]
    fn add_products<const ROWS: usize>(
        self,
        tile: PairTile<'_>,
        width: usize,
        sums: &mut [[f32; PANEL]; ROWS],
    ) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Instruction => {
                // A panel's second vector is empty where there are few outputs.
                let add = if width <= PANEL / 2 {
                    instruction::add_products::<ROWS, 1>
                } else {
                    instruction::add_products::<ROWS, 2>
                };
                #[expect(unsafe_code, reason = "instructions that not every machine has")]
                // SAFETY: `best` has found that this one has them.
                unsafe {
                    add(tile, sums);
                }
            }
            Self::Emulated => emulate_products(tile, sums),
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod instruction {
    use std::arch::x86_64::{
        __m512, __m512bh, __m512i, _mm512_and_si512, _mm512_castps_si512, _mm512_cmpge_epu32_mask,
        _mm512_cvtne2ps_pbh, _mm512_dpbf16_ps, _mm512_set1_epi32, _mm512_setzero_ps,
    };

    use super::{PANEL, PairTile, Real, RowTile};

    /// Numbers of a vector.
    const LANES: usize = 16;

    /// Views a vector as one of bf16.
    #[inline(always)]
    fn bf16(vector: __m512i) -> __m512bh {
        #[expect(unsafe_code, reason = "a vector from another")]
        // SAFETY: both are 64 bytes, and any bits are such a vector.
        unsafe {
            std::mem::transmute::<__m512i, __m512bh>(vector)
        }
    }

    #[inline(always)]
    fn vectors(pairs: &[u32; PANEL]) -> [__m512bh; 2] {
        #[expect(unsafe_code, reason = "vectors from numbers")]
        // SAFETY: both are 128 bytes, and any bits are such vectors.
        unsafe {
            std::mem::transmute::<[u32; PANEL], [__m512bh; 2]>(*pairs)
        }
    }

    /// Rounds a row of numbers as [`round_row`](super::round_row) does.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn round_row<T: Real>(x: &[T], pairs: &mut [u32]) {
        // From here on numbers are rounded to infinity, which the instruction does not cut off.
        const LARGE: i32 = 0x7f7f_8000;
        let (size, large) = (_mm512_set1_epi32(i32::MAX), _mm512_set1_epi32(LARGE));
        let is_large = |x: __m512| {
            let size = _mm512_and_si512(_mm512_castps_si512(x), size);
            _mm512_cmpge_epu32_mask(size, large) != 0
        };
        let (whole, _) = x.as_chunks::<{ 2 * LANES }>();
        let (vectors, _) = pairs.as_chunks_mut::<LANES>();
        for (pairs, x) in vectors.iter_mut().zip(whole) {
            let mut singles = [0.0; 2 * LANES];
            for (single, &x) in singles.iter_mut().zip(x) {
                *single = x.to_single();
            }
            #[expect(unsafe_code, reason = "vectors from numbers")]
            // SAFETY: both are 128 bytes, and any bits are such vectors.
            let [first, second] =
                unsafe { std::mem::transmute::<[f32; 2 * LANES], [__m512; 2]>(singles) };
            if is_large(first) || is_large(second) {
                super::round_row(x, pairs);
                continue;
            }
            let rounded = _mm512_cvtne2ps_pbh(second, first);
            #[expect(unsafe_code, reason = "numbers from a vector")]
            // SAFETY: both are 64 bytes, and any bits are such numbers.
            let rounded = unsafe { std::mem::transmute::<__m512bh, [u32; LANES]>(rounded) };
            *pairs = rounded;
        }
        let done = whole.len();
        super::round_row(&x[done * 2 * LANES..], &mut pairs[done * LANES..]);
    }

    /// Adds the products with the first `VECTORS` vectors of the panel's outputs to the sums of all rows.
    ///
    /// # Panics
    ///
    /// Panics if the rows or the panel are shorter than they say.
    #[expect(clippy::needless_range_loop, reason = "a row indexes several arrays")]
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn add_products<const ROWS: usize, const VECTORS: usize>(
        tile: PairTile<'_>,
        sums: &mut [[f32; PANEL]; ROWS],
    ) {
        const { assert!(PANEL == 2 * LANES && VECTORS <= 2, "two vectors of outputs") };
        let PairTile { x, panel } = tile;
        let RowTile {
            values,
            stride,
            pairs,
            ..
        } = x;
        assert!(
            values.len() >= (ROWS - 1) * stride + pairs,
            "pairs of the rows"
        );
        let panel = &panel.as_chunks::<PANEL>().0[..pairs];
        let mut accumulators = [[_mm512_setzero_ps(); VECTORS]; ROWS];
        for (accumulators, sums) in accumulators.iter_mut().zip(&*sums) {
            let (vectors, _) = sums.as_chunks::<LANES>();
            for (accumulator, &sums) in accumulators.iter_mut().zip(vectors) {
                #[expect(unsafe_code, reason = "a vector from numbers")]
                // SAFETY: both are 64 bytes, and any bits are such a vector.
                let vector = unsafe { std::mem::transmute::<[f32; LANES], __m512>(sums) };
                *accumulator = vector;
            }
        }
        for (pair, weights) in panel.iter().enumerate() {
            let weights = vectors(weights);
            for row in 0..ROWS {
                // Addressed from a few of the rows: with a slice for each, what is checked for each pair
                // needs more registers than there are and takes half as long again.
                let at = row / 3 * (3 * stride) + row % 3 * stride + pair;
                #[expect(unsafe_code, reason = "numbers without a check for each")]
                // SAFETY: checked above, there are `ROWS` rows of `pairs` pairs, `stride` apart.
                let x = unsafe { *values.get_unchecked(at) };
                let x = bf16(_mm512_set1_epi32(x.cast_signed()));
                for vector in 0..VECTORS {
                    let sum = accumulators[row][vector];
                    accumulators[row][vector] = _mm512_dpbf16_ps(sum, weights[vector], x);
                }
            }
        }
        for (sums, accumulators) in sums.iter_mut().zip(&accumulators) {
            let (vectors, _) = sums.as_chunks_mut::<LANES>();
            for (sums, &accumulator) in vectors.iter_mut().zip(accumulators) {
                #[expect(unsafe_code, reason = "numbers from a vector")]
                // SAFETY: both are 64 bytes, and any bits are such numbers.
                let found = unsafe { std::mem::transmute::<__m512, [f32; LANES]>(accumulator) };
                *sums = found;
            }
        }
    }
}

/// Adds the products with the panel's outputs to the sums of all rows.
fn emulate_products(tile: PairTile<'_>, sums: &mut [[f32; PANEL]]) {
    vectorized(
        #[inline(always)]
        || emulate(tile, sums),
    );
}

#[inline(always)]
fn emulate(tile: PairTile<'_>, sums: &mut [[f32; PANEL]]) {
    let PairTile { x, panel } = tile;
    let (panel, _) = panel.as_chunks::<PANEL>();
    for (row, sums) in sums.iter_mut().enumerate() {
        let x = &x.values[row * x.stride..][..x.pairs];
        for sum in sums.iter_mut() {
            let is_denormal = sum.abs() < f32::MIN_POSITIVE;
            *sum = if is_denormal {
                0.0_f32.copysign(*sum)
            } else {
                *sum
            };
        }
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

/// Has the cache fetch what [`turn_panel`] reads of a panel.
fn ask_for_block(panel: &[u32], columns: Range<usize>) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let block = &panel[columns.start / 2 * PANEL..columns.end.div_ceil(2) * PANEL];
        for line in block.chunks(LINE) {
            #[expect(unsafe_code, reason = "a hint to the cache")]
            // SAFETY: every x86-64 machine has the instruction, and it reads nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast());
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (panel, columns);
}

/// Writes some columns of a panel's outputs, two outputs' to a row of [`PANEL`] pairs.
///
/// `columns` begins with an even one. Of `panel` `[pairs of inputs, PANEL]` it makes `[pairs of outputs,
/// PANEL]`.
fn turn_panel(panel: &[u32], columns: Range<usize>, turned: &mut [u32]) {
    let (panel, _) = panel.as_chunks::<PANEL>();
    let inputs = &panel[columns.start / 2..columns.end.div_ceil(2)];
    // Not compiled for wider vectors, which would be gathered from all over the panel.
    for (at, outputs) in inputs.iter().enumerate() {
        let rows = turned.as_chunks_mut::<PANEL>().0.iter_mut();
        for (turned, &[first, second]) in rows.zip(outputs.as_chunks::<2>().0) {
            // Two outputs of two inputs, of which the inner numbers change places.
            let both = u64::from(first) | u64::from(second) << 32;
            let inner = (both ^ both >> 16) & 0xffff_0000;
            let square = both ^ inner ^ inner << 16;
            let (turned, _) = turned.as_chunks_mut::<2>();
            // As if the index could be larger: what it is compared with is then known.
            turned[at % (PANEL / 2)] = [(square & 0xffff_ffff) as u32, (square >> 32) as u32];
        }
    }
}

#[cfg(test)]
mod tests;
