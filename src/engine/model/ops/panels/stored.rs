//! How a panel's numbers are kept.
//!
//! Whatever the form, a product computes with the number that [`Source::wide`] gives: a row's result is
//! that of a matrix of those numbers in full precision, bit for bit, and the backward pass, which reads
//! them as rows, sees the same matrix.

use rayon::prelude::*;

use super::super::Real;
use super::pairs::{number, pair, pairs_of, round};
use super::{ALIGNMENT, PANEL, ask_for_huge_pages};

/// How weights that no training changes are kept on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightFormat {
    /// In the numbers of the model.
    #[default]
    Wide,
    /// The upper half of an `f32`: nothing is lost of a checkpoint in bf16.
    Bf16,
    /// In bf16, and multiplied so: rows of tokens are rounded to bf16 where they meet the weights, in
    /// both directions. Sums stay in `f32`.
    Bf16Products,
    /// Integers of 8 bits with a scale for each 32 inputs of an output, as in GGUF's `Q8_0`.
    Int8,
}

impl WeightFormat {
    /// Returns the name: as in `model.dtype`, or what `model.compute_dtype` makes of it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Wide => "f32",
            Self::Bf16 => "bf16",
            Self::Bf16Products => "bf16 products",
            Self::Int8 => "int8",
        }
    }
}

impl WeightFormat {
    /// Returns how products read the matrices of an adapter beside weights in this format: rounded if all
    /// that they meet is.
    #[must_use]
    pub(crate) fn of_adapters(self) -> Self {
        match self {
            Self::Bf16Products => Self::Bf16Products,
            Self::Wide | Self::Bf16 | Self::Int8 => Self::Wide,
        }
    }
}

/// Inputs that share a scale.
pub(super) const BLOCK: usize = 32;

impl WeightFormat {
    /// Returns the bytes of a matrix `[outputs, inputs]` in panels, whose outputs are padded to whole
    /// ones, in a model whose numbers have `number_bytes`.
    #[must_use]
    pub fn packed_bytes(self, outputs: usize, inputs: usize, number_bytes: usize) -> u64 {
        let rows = outputs.next_multiple_of(PANEL) as u64;
        let row = match self {
            Self::Wide => number_bytes * inputs,
            Self::Bf16 => size_of::<u16>() * inputs,
            Self::Bf16Products => size_of::<u32>() * pairs_of(inputs),
            Self::Int8 => inputs + size_of::<f32>() * inputs.div_ceil(BLOCK),
        };
        rows * row as u64
    }
}

/// Numbers that start at a cache line, so that no vector lies across two.
pub(super) struct Aligned<T> {
    values: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy + Send + Sync> Aligned<T> {
    pub(super) fn new(len: usize, zero: T) -> Self {
        let mut values = vec![zero; len + ALIGNMENT / size_of::<T>()];
        ask_for_huge_pages(&mut values);
        let start = values.as_ptr().align_offset(ALIGNMENT);
        let start = start.min(values.len() - len);
        Self { values, start, len }
    }

    pub(super) fn get(&self) -> &[T] {
        &self.values[self.start..][..self.len]
    }

    fn get_mut(&mut self) -> &mut [T] {
        &mut self.values[self.start..][..self.len]
    }
}

/// All panels of a matrix.
pub(super) enum Stored<T> {
    Wide(Aligned<T>),
    Bf16(Aligned<u16>),
    Pairs(Aligned<u32>),
    Int8(Aligned<i8>, Aligned<f32>),
}

impl<T: Real> Stored<T> {
    pub(super) fn pack(weight: &[T], inputs: usize, format: WeightFormat) -> Self {
        let panels = (weight.len() / inputs.max(1)).div_ceil(PANEL);
        let len = panels * inputs * PANEL;
        match format {
            WeightFormat::Wide => {
                let mut values = Aligned::new(len, T::ZERO);
                fill(values.get_mut(), weight, inputs, |value| value);
                Self::Wide(values)
            }
            WeightFormat::Bf16 => {
                let mut values = Aligned::new(len, 0);
                fill(values.get_mut(), weight, inputs, |value| {
                    to_bf16(value.to_single())
                });
                Self::Bf16(values)
            }
            WeightFormat::Bf16Products => {
                let mut values = Aligned::new(panels * pairs_of(inputs) * PANEL, 0);
                fill_pairs(values.get_mut(), weight, inputs);
                Self::Pairs(values)
            }
            WeightFormat::Int8 => {
                let blocks = inputs.div_ceil(BLOCK);
                let mut values = Aligned::new(len, 0);
                let mut scales = Aligned::new(panels * blocks * PANEL, 0.0);
                if inputs > 0 {
                    values
                        .get_mut()
                        .par_chunks_exact_mut(inputs * PANEL)
                        .zip(scales.get_mut().par_chunks_exact_mut(blocks * PANEL))
                        .zip(weight.par_chunks(inputs * PANEL))
                        .for_each(|((values, scales), rows)| {
                            for (column, row) in rows.chunks_exact(inputs).enumerate() {
                                quantize(column, row, values, scales);
                            }
                        });
                }
                Self::Int8(values, scales)
            }
        }
    }

    pub(super) fn panel(&self, index: usize, inputs: usize) -> Panel<'_, T> {
        let len = inputs * PANEL;
        match self {
            Self::Wide(values) => Panel::Wide(Wide(&values.get()[index * len..][..len])),
            Self::Bf16(values) => Panel::Bf16(Bf16(&values.get()[index * len..][..len])),
            Self::Pairs(values) => {
                let len = pairs_of(inputs) * PANEL;
                Panel::Pairs(Pairs(&values.get()[index * len..][..len]))
            }
            Self::Int8(values, scales) => {
                let blocks = inputs.div_ceil(BLOCK) * PANEL;
                Panel::Int8(Int8 {
                    values: &values.get()[index * len..][..len],
                    scales: &scales.get()[index * blocks..][..blocks],
                })
            }
        }
    }
}

/// Lays rows side by side, panel for panel.
fn fill<T: Real, U: Send>(
    values: &mut [U],
    weight: &[T],
    inputs: usize,
    narrow: impl Fn(T) -> U + Sync,
) {
    if inputs == 0 {
        return;
    }
    values
        .par_chunks_exact_mut(inputs * PANEL)
        .zip(weight.par_chunks(inputs * PANEL))
        .for_each(|(panel, rows)| {
            for (column, row) in rows.chunks_exact(inputs).enumerate() {
                for (outputs, &value) in panel.chunks_exact_mut(PANEL).zip(row) {
                    outputs[column] = narrow(value);
                }
            }
        });
}

/// Lays rows of pairs side by side, panel for panel.
fn fill_pairs<T: Real>(values: &mut [u32], weight: &[T], inputs: usize) {
    if inputs == 0 {
        return;
    }
    values
        .par_chunks_exact_mut(pairs_of(inputs) * PANEL)
        .zip(weight.par_chunks(inputs * PANEL))
        .for_each(|(panel, rows)| {
            for (column, row) in rows.chunks_exact(inputs).enumerate() {
                for (outputs, numbers) in panel.chunks_exact_mut(PANEL).zip(row.chunks(2)) {
                    let [first, second] =
                        [0, 1].map(|at| numbers.get(at).map_or(0, |x| round(x.to_single())));
                    outputs[column] = pair(first, second);
                }
            }
        });
}

/// Rounds to the nearest, ties to even; what would become infinite is cut off instead.
fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    match f32::from_bits(rounded << 16).is_finite() {
        true => rounded as u16,
        false => (bits >> 16) as u16,
    }
}

/// Puts one output's weights into its column.
#[expect(clippy::cast_possible_truncation, reason = "between -127 and 127")]
fn quantize<T: Real>(column: usize, row: &[T], values: &mut [i8], scales: &mut [f32]) {
    let blocks = values
        .chunks_mut(BLOCK * PANEL)
        .zip(scales.chunks_exact_mut(PANEL));
    for (row, (values, scales)) in row.chunks(BLOCK).zip(blocks) {
        let largest = row
            .iter()
            .map(|value| value.to_single().abs())
            .fold(0.0, f32::max);
        let scale = largest / 127.0;
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        scales[column] = scale;
        for (values, value) in values.chunks_exact_mut(PANEL).zip(row) {
            let value = (value.to_single() * inverse).round_ties_even();
            values[column] = value.clamp(-127.0, 127.0) as i8;
        }
    }
}

/// One panel, for whoever looks at its form once.
#[derive(Clone, Copy)]
pub(super) enum Panel<'a, T> {
    Wide(Wide<'a, T>),
    Bf16(Bf16<'a>),
    Pairs(Pairs<'a>),
    Int8(Int8<'a>),
}

/// A panel in one form.
pub(super) trait Source<T: Real>: Copy {
    /// Returns `N` outputs' weights of one input, those from `first` on, as a product computes with
    /// them.
    fn wide<const N: usize>(&self, input: usize, first: usize) -> [T; N];
}

#[derive(Clone, Copy)]
pub(super) struct Wide<'a, T>(pub(super) &'a [T]);

impl<T: Real> Source<T> for Wide<'_, T> {
    #[inline(always)]
    fn wide<const N: usize>(&self, input: usize, first: usize) -> [T; N] {
        let outputs = &self.0[input * PANEL + first..][..N];
        outputs.try_into().expect("N of them")
    }
}

#[derive(Clone, Copy)]
pub(super) struct Bf16<'a>(&'a [u16]);

impl<T: Real> Source<T> for Bf16<'_> {
    #[inline(always)]
    fn wide<const N: usize>(&self, input: usize, first: usize) -> [T; N] {
        let outputs = &self.0[input * PANEL + first..][..N];
        let mut wide = [T::ZERO; N];
        for (wide, &value) in wide.iter_mut().zip(outputs) {
            *wide = T::from_single(f32::from_bits(u32::from(value) << 16));
        }
        wide
    }
}

/// Two inputs of each output side by side: `[pairs, PANEL]`.
#[derive(Clone, Copy)]
pub(super) struct Pairs<'a>(pub(super) &'a [u32]);

impl<T: Real> Source<T> for Pairs<'_> {
    #[inline(always)]
    fn wide<const N: usize>(&self, input: usize, first: usize) -> [T; N] {
        let outputs = &self.0[input / 2 * PANEL + first..][..N];
        let mut wide = [T::ZERO; N];
        for (wide, &pair) in wide.iter_mut().zip(outputs) {
            *wide = T::from_single(number(pair, input % 2 == 1));
        }
        wide
    }
}

#[derive(Clone, Copy)]
pub(super) struct Int8<'a> {
    values: &'a [i8],
    scales: &'a [f32],
}

impl<T: Real> Source<T> for Int8<'_> {
    #[inline(always)]
    fn wide<const N: usize>(&self, input: usize, first: usize) -> [T; N] {
        let outputs = &self.values[input * PANEL + first..][..N];
        let scales = &self.scales[input / BLOCK * PANEL + first..][..N];
        let mut wide = [T::ZERO; N];
        for ((wide, &value), &scale) in wide.iter_mut().zip(outputs).zip(scales) {
            *wide = T::from_single(f32::from(value) * scale);
        }
        wide
    }
}
