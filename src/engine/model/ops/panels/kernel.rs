//! The inner loop: a few rows of tokens times one panel.

use pulp::{Simd, WithSimd};

use super::super::Real;
use super::PANEL;

/// Vectors of outputs that a kernel has accumulators for, for each row.
const VECTORS: usize = 2;

/// A number type with vectors of the machine's width.
pub trait Vectorized: Sized {
    /// A vector.
    type Vector<S: Simd>: Copy;

    /// Returns a vector of equal numbers.
    fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S>;
    /// Returns `a * b + c`, with one rounding where the machine can.
    fn multiply_add<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        c: Self::Vector<S>,
    ) -> Self::Vector<S>;
    /// Views numbers as vectors; the length must be a multiple of a vector's.
    fn vectors<S: Simd>(values: &[Self]) -> &[Self::Vector<S>];
    /// Views numbers as vectors; the length must be a multiple of a vector's.
    fn vectors_mut<S: Simd>(values: &mut [Self]) -> &mut [Self::Vector<S>];
}

impl Vectorized for f32 {
    type Vector<S: Simd> = S::f32s;

    #[inline(always)]
    fn splat<S: Simd>(simd: S, value: Self) -> S::f32s {
        simd.splat_f32s(value)
    }

    #[inline(always)]
    fn multiply_add<S: Simd>(simd: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s {
        simd.mul_add_e_f32s(a, b, c)
    }

    #[inline(always)]
    fn vectors<S: Simd>(values: &[Self]) -> &[S::f32s] {
        S::as_simd_f32s(values).0
    }

    #[inline(always)]
    fn vectors_mut<S: Simd>(values: &mut [Self]) -> &mut [S::f32s] {
        S::as_mut_simd_f32s(values).0
    }
}

impl Vectorized for f64 {
    type Vector<S: Simd> = S::f64s;

    #[inline(always)]
    fn splat<S: Simd>(simd: S, value: Self) -> S::f64s {
        simd.splat_f64s(value)
    }

    #[inline(always)]
    fn multiply_add<S: Simd>(simd: S, a: S::f64s, b: S::f64s, c: S::f64s) -> S::f64s {
        simd.mul_add_e_f64s(a, b, c)
    }

    #[inline(always)]
    fn vectors<S: Simd>(values: &[Self]) -> &[S::f64s] {
        S::as_simd_f64s(values).0
    }

    #[inline(always)]
    fn vectors_mut<S: Simd>(values: &mut [Self]) -> &mut [S::f64s] {
        S::as_mut_simd_f64s(values).0
    }
}

/// The instructions that a product runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    /// AVX-512.
    #[cfg(target_arch = "x86_64")]
    V4,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    V3,
    /// Whatever every machine of this kind has.
    Plain,
}

impl Level {
    /// Returns the levels that this machine has, best first.
    pub(super) fn available() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let vectors = [
            pulp::x86::V4::try_new().map(|_| Self::V4),
            pulp::x86::V3::try_new().map(|_| Self::V3),
        ];
        #[cfg(not(target_arch = "x86_64"))]
        let vectors = [None];
        vectors.into_iter().flatten().chain([Self::Plain])
    }

    pub(super) fn best() -> Self {
        Self::available()
            .next()
            .expect("the last one is always there")
    }

    /// Returns the most rows of a tile: what leaves registers for the panel and the row's value.
    pub(super) fn rows(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::V4 => 12,
            #[cfg(target_arch = "x86_64")]
            Self::V3 => 6,
            Self::Plain => 6,
        }
    }

    /// Multiplies a tile and hands each row's sums to `write`.
    #[inline(always)]
    pub(super) fn multiply<T: Real>(
        self,
        tile: Tile<'_, T>,
        write: impl FnMut(usize, &[T; PANEL]),
    ) {
        let multiply = Multiply { tile, write };
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::V4 => {
                let simd = pulp::x86::V4::try_new().expect("the level was found available");
                Simd::vectorize(simd, multiply);
            }
            #[cfg(target_arch = "x86_64")]
            Self::V3 => {
                let simd = pulp::x86::V3::try_new().expect("the level was found available");
                Simd::vectorize(simd, multiply);
            }
            #[cfg(target_arch = "x86_64")]
            Self::Plain => multiply.with_simd(pulp::Scalar),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Plain => pulp::Arch::new().dispatch(multiply),
        }
    }
}

/// Rows of tokens and a panel to multiply them with.
pub(super) struct Tile<'a, T> {
    /// The first input of all rows, then the second.
    pub(super) x: &'a [T],
    pub(super) rows: usize,
    pub(super) panel: &'a [T],
}

struct Multiply<'a, T, W> {
    tile: Tile<'a, T>,
    write: W,
}

impl<T: Real, W: FnMut(usize, &[T; PANEL])> WithSimd for Multiply<'_, T, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let Tile { x, rows, panel } = self.tile;
        match rows {
            1 => rows_times_panel::<S, T, 1>(simd, x, panel, &mut self.write),
            2 => rows_times_panel::<S, T, 2>(simd, x, panel, &mut self.write),
            3 => rows_times_panel::<S, T, 3>(simd, x, panel, &mut self.write),
            4 => rows_times_panel::<S, T, 4>(simd, x, panel, &mut self.write),
            5 => rows_times_panel::<S, T, 5>(simd, x, panel, &mut self.write),
            6 => rows_times_panel::<S, T, 6>(simd, x, panel, &mut self.write),
            7 => rows_times_panel::<S, T, 7>(simd, x, panel, &mut self.write),
            8 => rows_times_panel::<S, T, 8>(simd, x, panel, &mut self.write),
            9 => rows_times_panel::<S, T, 9>(simd, x, panel, &mut self.write),
            10 => rows_times_panel::<S, T, 10>(simd, x, panel, &mut self.write),
            11 => rows_times_panel::<S, T, 11>(simd, x, panel, &mut self.write),
            12 => rows_times_panel::<S, T, 12>(simd, x, panel, &mut self.write),
            _ => unreachable!("no level has tiles of {rows} rows"),
        }
    }
}

#[inline(always)]
fn rows_times_panel<S: Simd, T: Real, const ROWS: usize>(
    simd: S,
    x: &[T],
    panel: &[T],
    write: &mut impl FnMut(usize, &[T; PANEL]),
) {
    let (x, _) = x.as_chunks::<ROWS>();
    let panel = T::vectors::<S>(panel);
    let zero = T::splat(simd, T::ZERO);
    let mut sums = [[T::ZERO; PANEL]; ROWS];
    let vectors = T::vectors::<S>(&sums[0]).len();
    for first in (0..vectors).step_by(VECTORS) {
        let mut accumulators = [[zero; VECTORS]; ROWS];
        for (x, outputs) in x.iter().zip(panel.chunks_exact(vectors)) {
            let weights = [outputs[first], outputs[first + 1]];
            for row in 0..ROWS {
                let x = T::splat(simd, x[row]);
                for vector in 0..VECTORS {
                    let sum = accumulators[row][vector];
                    accumulators[row][vector] = T::multiply_add(simd, x, weights[vector], sum);
                }
            }
        }
        for row in 0..ROWS {
            let sums = T::vectors_mut::<S>(&mut sums[row]);
            sums[first..first + VECTORS].copy_from_slice(&accumulators[row]);
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        write(row, sums);
    }
}
