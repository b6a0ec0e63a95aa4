//! The inner loop: a few rows of tokens times one panel.

use pulp::{Simd, WithSimd};

use super::super::Real;
use super::PANEL;
use super::pairs::Dots;
use super::stored::{Panel, Source};

/// Vectors of outputs that a kernel has accumulators for, for each row.
pub(in super::super) const VECTORS: usize = 2;

/// Calls a kernel's `multiply` for as many numbers as the vectors of a row hold, which have to be known when it
/// is compiled.
macro_rules! multiply_vectors {
    ($kernel:expr, $simd:expr, $real:ident, $level:ident) => {
        match VECTORS * size_of::<$real::Vector<$level>>() / size_of::<$real>() {
            2 => $kernel.multiply::<$level, 2>($simd),
            4 => $kernel.multiply::<$level, 4>($simd),
            8 => $kernel.multiply::<$level, 8>($simd),
            16 => $kernel.multiply::<$level, 16>($simd),
            32 => $kernel.multiply::<$level, 32>($simd),
            numbers => unreachable!("no machine has vectors of {numbers} numbers"),
        }
    };
}
pub(in super::super) use multiply_vectors;

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
    /// Returns a number in this precision.
    fn from_single(value: f32) -> Self;
    /// Returns the number, rounded to single precision.
    fn to_single(self) -> f32;
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
    fn from_single(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn to_single(self) -> f32 {
        self
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
    fn from_single(value: f32) -> Self {
        Self::from(value)
    }

    #[expect(clippy::cast_possible_truncation, reason = "what it is for")]
    #[inline(always)]
    fn to_single(self) -> f32 {
        self as f32
    }

    #[inline(always)]
    fn vectors_mut<S: Simd>(values: &mut [Self]) -> &mut [S::f64s] {
        S::as_mut_simd_f64s(values).0
    }
}

/// The instructions that a product runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Level {
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

    pub(in super::super) fn best() -> Self {
        Self::available()
            .next()
            .expect("the last one is always there")
    }

    /// Returns its name, as of the processor's instructions.
    pub(in super::super) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::V4 => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            Self::V3 => "AVX2",
            Self::Plain => "plain",
        }
    }

    /// Returns the most rows of a tile: what leaves registers for the panel and the row's value.
    pub(in super::super) fn rows(self) -> usize {
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
        let Tile { x, rows, panel } = tile;
        match panel {
            Panel::Wide(panel) => self.run(Multiply {
                x,
                rows,
                panel,
                write,
            }),
            Panel::Bf16(panel) => self.run(Multiply {
                x,
                rows,
                panel,
                write,
            }),
            Panel::Int8(panel) => self.run(Multiply {
                x,
                rows,
                panel,
                write,
            }),
            Panel::Pairs(_) => unreachable!("its rows are in pairs, too"),
        }
    }

    /// Returns how this level makes sums of pairs.
    pub(super) fn dots(self) -> Dots {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::V4 => Dots::best(),
            _ => Dots::Emulated,
        }
    }

    /// Runs a kernel on this level's instructions.
    #[inline(always)]
    pub(in super::super) fn run(self, multiply: impl WithSimd<Output = ()>) {
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
#[derive(Clone, Copy)]
pub(super) struct Tile<'a, T> {
    /// The first input of all rows, then the second.
    pub(super) x: &'a [T],
    pub(super) rows: usize,
    pub(super) panel: Panel<'a, T>,
}

struct Multiply<'a, T, P, W> {
    x: &'a [T],
    rows: usize,
    panel: P,
    write: W,
}

impl<T: Real, P: Source<T>, W: FnMut(usize, &[T; PANEL])> WithSimd for Multiply<'_, T, P, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        multiply_vectors!(self, simd, T, S);
    }
}

impl<T: Real, P: Source<T>, W: FnMut(usize, &[T; PANEL])> Multiply<'_, T, P, W> {
    #[inline(always)]
    fn multiply<S: Simd, const N: usize>(&mut self, simd: S) {
        let (x, panel, write) = (self.x, self.panel, &mut self.write);
        match self.rows {
            1 => rows_times_panel::<S, T, P, N, 1>(simd, x, panel, write),
            2 => rows_times_panel::<S, T, P, N, 2>(simd, x, panel, write),
            3 => rows_times_panel::<S, T, P, N, 3>(simd, x, panel, write),
            4 => rows_times_panel::<S, T, P, N, 4>(simd, x, panel, write),
            5 => rows_times_panel::<S, T, P, N, 5>(simd, x, panel, write),
            6 => rows_times_panel::<S, T, P, N, 6>(simd, x, panel, write),
            7 => rows_times_panel::<S, T, P, N, 7>(simd, x, panel, write),
            8 => rows_times_panel::<S, T, P, N, 8>(simd, x, panel, write),
            9 => rows_times_panel::<S, T, P, N, 9>(simd, x, panel, write),
            10 => rows_times_panel::<S, T, P, N, 10>(simd, x, panel, write),
            11 => rows_times_panel::<S, T, P, N, 11>(simd, x, panel, write),
            12 => rows_times_panel::<S, T, P, N, 12>(simd, x, panel, write),
            rows => unreachable!("no level has tiles of {rows} rows"),
        }
    }
}

/// Multiplies, `N` outputs at a time: two vectors of them.
#[inline(always)]
fn rows_times_panel<S: Simd, T: Real, P: Source<T>, const N: usize, const ROWS: usize>(
    simd: S,
    x: &[T],
    panel: P,
    write: &mut impl FnMut(usize, &[T; PANEL]),
) {
    let (x, _) = x.as_chunks::<ROWS>();
    let zero = T::splat(simd, T::ZERO);
    let mut sums = [[T::ZERO; PANEL]; ROWS];
    for first in (0..PANEL).step_by(N) {
        let mut accumulators = [[zero; VECTORS]; ROWS];
        for (input, x) in x.iter().enumerate() {
            let outputs: [T; N] = panel.wide(input, first);
            let weights = T::vectors::<S>(&outputs);
            let weights = [weights[0], weights[1]];
            for row in 0..ROWS {
                let x = T::splat(simd, x[row]);
                for vector in 0..VECTORS {
                    let sum = accumulators[row][vector];
                    accumulators[row][vector] = T::multiply_add(simd, x, weights[vector], sum);
                }
            }
        }
        for row in 0..ROWS {
            let sums = T::vectors_mut::<S>(&mut sums[row][first..first + N]);
            sums.copy_from_slice(&accumulators[row]);
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        write(row, sums);
    }
}
