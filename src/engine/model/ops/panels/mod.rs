//! Weight matrices in panels, and the products with them.
//!
//! A panel holds [`PANEL`] outputs (rows of the weight matrix), one input after the other, so that a
//! product reads it front to back, a vector of outputs at a time. Every output is one accumulator that
//! takes the inputs in their order. How many rows of tokens a kernel works on at a time, and which
//! thread does it, changes nothing in that sum: **a row's result is the same bits whatever rows stand
//! beside it**, and small products run on the same code as large ones.

mod backward;
mod kernel;
mod pairs;
mod stored;

use std::any::Any;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::{Buffer, LANES, Real, Values, Write, into_tensor};
pub(crate) use backward::{
    Orientation, PackedRows, Term, TermRows, add_outer_products, linears_backward,
};
use kernel::Tile;
pub(super) use kernel::{Level, VECTORS, Vectorized, multiply_vectors};
pub(crate) use pairs::{
    PairProduct, RowPairs, add_outer_products_of_pairs, add_to_rows, linears_of_pairs,
};
pub use stored::WeightFormat;
use stored::{Panel, Source, Stored};

/// Outputs in one panel: two AVX-512 registers of `f32`.
pub(crate) const PANEL: usize = 32;

/// Bytes at which panels start anew: a cache line, so that no vector lies across two.
const ALIGNMENT: usize = 64;

/// Bytes of a huge page; what is smaller asks for none.
#[cfg(target_os = "linux")]
const HUGE_PAGE: usize = 2 << 20;

/// Elements of `x` that one task works on: half a core's second-level cache, the rest of which the
/// panel takes.
const TASK_INPUTS: usize = 96 * 1024;

/// Multiplications that are worth a task of their own.
const TASK_PRODUCTS: usize = 64 * 1024;

/// Tokens whose columns lie side by side at a time: a quarter of a core's second-level cache.
const TOKENS_AT_A_TIME: usize = 2048;

/// Fewest groups of rows that are worth turning a panel for.
const MIN_GROUPS: usize = 8;

/// Tasks for each thread where a task turns its panel, so that none waits long for the last.
const TASKS_PER_THREAD: usize = 4;

/// The instructions that this machine's products run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuKernels {
    /// Of products in `f32`: `AVX-512`, `AVX2` or `plain`.
    pub single: &'static str,
    /// Whether the processor has an instruction for products in bf16, which others make up for to the same
    /// bits.
    pub has_bf16: bool,
}

impl CpuKernels {
    /// Returns those that are the fastest here.
    #[must_use]
    pub fn best() -> Self {
        Self {
            single: Level::best().name(),
            has_bf16: pairs::has_instruction(),
        }
    }
}

/// A weight matrix `[outputs, inputs]`, packed.
pub(crate) struct Panels<T> {
    values: Stored<T>,
    outputs: usize,
    inputs: usize,
}

impl<T> std::fmt::Debug for Panels<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Panels")
            .field("outputs", &self.outputs)
            .field("inputs", &self.inputs)
            .finish_non_exhaustive()
    }
}

impl<T: Real> Panels<T> {
    /// Packs `weight`, whose rows lie one after the other.
    ///
    /// # Panics
    ///
    /// Panics if `weight` has another size.
    pub(crate) fn pack(weight: &[T], outputs: usize, inputs: usize, format: WeightFormat) -> Self {
        assert_eq!(weight.len(), outputs * inputs, "size of the weight");
        Self {
            values: Stored::pack(weight, inputs, format),
            outputs,
            inputs,
        }
    }

    /// Returns the rows one after the other, as the products see them.
    pub(crate) fn unpack(&self) -> Vec<T> {
        let mut weight = vec![T::ZERO; self.outputs * self.inputs];
        if self.inputs > 0 {
            weight
                .par_chunks_mut(self.inputs * PANEL)
                .enumerate()
                .for_each(|(index, rows)| {
                    for (column, row) in rows.chunks_exact_mut(self.inputs).enumerate() {
                        self.copy_row(index, column, row);
                    }
                });
        }
        weight
    }

    /// Copies rows of the matrix, one after the other.
    pub(crate) fn copy_rows(&self, indices: &[u32], target: &mut [T]) {
        let rows = target.par_chunks_exact_mut(self.inputs.max(1));
        rows.zip(indices)
            .with_min_len(16)
            .for_each(|(row, &index)| {
                self.copy_row(index as usize / PANEL, index as usize % PANEL, row);
            });
    }

    fn copy_row(&self, panel: usize, column: usize, row: &mut [T]) {
        fn copy<T: Real>(panel: impl Source<T>, column: usize, row: &mut [T]) {
            for (input, value) in row.iter_mut().enumerate() {
                [*value] = panel.wide(input, column);
            }
        }
        match self.panel(panel) {
            Panel::Wide(panel) => copy(panel, column, row),
            Panel::Bf16(panel) => copy(panel, column, row),
            Panel::Pairs(panel) => copy(panel, column, row),
            Panel::Int8(panel) => copy(panel, column, row),
        }
    }

    /// Returns whether products with this matrix read rows in pairs of bf16.
    pub(crate) fn takes_pairs(&self) -> bool {
        matches!(self.values, Stored::Pairs(_))
    }

    fn panels(&self) -> usize {
        self.outputs.div_ceil(PANEL)
    }

    fn panel(&self, index: usize) -> Panel<'_, T> {
        self.values.panel(index, self.inputs)
    }
}

/// Asks for large pages under `values` before they are written: streaming through small ones, a core
/// looks up half a million addresses for each gigabyte of weights.
fn ask_for_huge_pages<T>(values: &mut [T]) {
    #[cfg(target_os = "linux")]
    {
        let page = rustix::param::page_size();
        let start = values.as_mut_ptr().cast::<std::ffi::c_void>();
        let before = start.addr() % page;
        let len = (before + size_of_val(values)).next_multiple_of(page);
        if len < HUGE_PAGE {
            return;
        }
        #[expect(unsafe_code, reason = "advice on memory")]
        // SAFETY: the pages are those that the values lie in; the advice changes nothing that they or
        // their neighbours hold.
        let advised = unsafe {
            let start = start.wrapping_byte_sub(before);
            rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxHugepage)
        };
        if let Err(error) = advised {
            tracing::debug!(%error, "no huge pages for weights");
        }
    }
}

/// Packed weights in the numbers of the model.
#[derive(Debug, Clone)]
pub(crate) enum Packed {
    F32(Arc<Panels<f32>>),
    F64(Arc<Panels<f64>>),
}

impl Packed {
    /// Packs a contiguous matrix on the CPU.
    ///
    /// # Errors
    ///
    /// Fails if the tensor is something else.
    pub(crate) fn new(tensor: &Tensor, format: WeightFormat) -> candle_core::Result<Self> {
        let (outputs, inputs) = tensor.dims2()?;
        Ok(match tensor.dtype() {
            DType::F64 => {
                let values = Values::of(tensor)?;
                Self::F64(Arc::new(Panels::pack(&values, outputs, inputs, format)))
            }
            _ => {
                let values = Values::of(tensor)?;
                Self::F32(Arc::new(Panels::pack(&values, outputs, inputs, format)))
            }
        })
    }

    /// Returns the panels.
    ///
    /// # Errors
    ///
    /// Fails if they are of another type than `T`.
    pub(crate) fn panels<T: Real>(&self) -> candle_core::Result<Arc<Panels<T>>> {
        let any: Arc<dyn Any + Send + Sync> = match self {
            Self::F32(panels) => Arc::<Panels<f32>>::clone(panels),
            Self::F64(panels) => Arc::<Panels<f64>>::clone(panels),
        };
        any.downcast()
            .map_err(|_| candle_core::Error::msg("expected weights of the model's type"))
    }

    /// Returns a copy of the matrix as a tensor.
    ///
    /// # Errors
    ///
    /// Fails if the tensor library does.
    pub(crate) fn to_tensor(&self) -> candle_core::Result<Tensor> {
        match self {
            Self::F32(panels) => into_tensor(panels.unpack(), (panels.outputs, panels.inputs)),
            Self::F64(panels) => into_tensor(panels.unpack(), (panels.outputs, panels.inputs)),
        }
    }
}

/// One of the products of [`linears`]: `y` is `[m, outputs]`.
pub(crate) struct Product<'a, T> {
    pub(crate) weight: &'a Panels<T>,
    pub(crate) write: Write,
    pub(crate) y: &'a mut [T],
}

/// Computes `y = alpha * x W^T` or `y += alpha * x W^T`, with `x` `[m, inputs]` and `y`
/// `[m, outputs]`.
///
/// A row of `y` has the same bits whatever `m` is.
///
/// # Panics
///
/// Panics if the shapes do not fit.
pub(crate) fn linear<T: Real>(
    alpha: T,
    x: &[T],
    m: usize,
    weight: &Panels<T>,
    write: Write,
    y: &mut [T],
) {
    linears(alpha, x, m, vec![Product { weight, write, y }]);
}

/// Computes several products of the same `x` at once, as [`linear`] computes one.
///
/// # Panics
///
/// Panics if the shapes do not fit.
pub(crate) fn linears<T: Real>(alpha: T, x: &[T], m: usize, products: Vec<Product<'_, T>>) {
    run(Level::best(), alpha, x, m, products);
}

fn run<T: Real>(level: Level, alpha: T, x: &[T], m: usize, products: Vec<Product<'_, T>>) {
    let inputs = products.first().map_or(0, |product| product.weight.inputs);
    assert_eq!(x.len(), m * inputs, "size of the input");
    if m == 0 {
        return;
    }
    let mut targets = Vec::with_capacity(products.len());
    let mut in_pairs = Vec::new();
    for Product { weight, write, y } in products {
        assert_eq!(weight.inputs, inputs, "inner dimensions");
        if weight.takes_pairs() {
            in_pairs.push(PairProduct {
                weight,
                write,
                y,
                update: None,
            });
        } else {
            targets.push((weight, write, Target::new(y, m, weight.outputs)));
        }
    }
    if !in_pairs.is_empty() {
        let x = RowPairs::new(x, m, 0..inputs, inputs);
        pairs::multiply_rows(level.dots(), alpha, &x, in_pairs);
    }
    if targets.is_empty() {
        return;
    }
    let groups = Groups::new(m, level.rows());
    let packed = (m > 1).then(|| groups.pack(x, inputs));
    let x = packed.as_deref().unwrap_or(x);
    let panels: Vec<usize> = targets.iter().map(|(weight, ..)| weight.panels()).collect();
    share_panels(
        groups,
        inputs,
        level.rows(),
        &panels,
        |product, panel, groups_of_task| {
            let (weight, write, target) = &targets[product];
            let column = panel * PANEL;
            let width = PANEL.min(weight.outputs - column);
            let panel = weight.panel(panel);
            for group in groups_of_task {
                let rows = groups.rows(group);
                let tile = Tile {
                    x: &x[rows.start * inputs..rows.end * inputs],
                    rows: rows.len(),
                    panel,
                };
                level.multiply(
                    tile,
                    // Compiled for the level's instructions only as a part of the kernel.
                    #[inline(always)]
                    |row, sums: &[T; PANEL]| {
                        #[expect(unsafe_code, reason = "tasks write to the same rows")]
                        // SAFETY: a task has its panel's columns of its groups' rows to itself.
                        let y = unsafe { target.part(rows.start + row, column, width) };
                        write.join(alpha, sums, y);
                    },
                );
            }
        },
    );
}

/// Calls `task` with each product, each of its panels and some groups of rows: neighbouring tasks share
/// the rows, of `inputs` elements, which stay in the cache while the panels pass by.
fn share_panels(
    groups: Groups,
    inputs: usize,
    tile_rows: usize,
    panels: &[usize],
    task: impl Fn(usize, usize, std::ops::Range<usize>) + Sync,
) {
    let all: usize = panels.iter().sum();
    let most = (TASK_INPUTS / (inputs.max(1) * tile_rows)).max(1);
    // Of nearly equal size: two threads have a half of the tasks each.
    let chunks = groups.count.div_ceil(most);
    let products_per_panel =
        groups.count.div_ceil(chunks.max(1)) * groups.rows.min(tile_rows) * inputs * PANEL;
    let panels_per_task = (TASK_PRODUCTS / products_per_panel.max(1)).max(1);
    (0..chunks * all)
        .into_par_iter()
        .with_min_len(panels_per_task)
        .for_each(|index| {
            let (chunk, mut panel) = (index / all, index % all);
            let mut product = 0;
            while panel >= panels[product] {
                panel -= panels[product];
                product += 1;
            }
            let share = chunk * groups.count / chunks..(chunk + 1) * groups.count / chunks;
            task(product, panel, share);
        });
}

impl Write {
    /// Writes or adds `alpha` times as many sums as `y` has places.
    #[inline(always)]
    fn join<T: Real>(self, alpha: T, sums: &[T], y: &mut [T]) {
        // Whole vectors first: a loop of any length is not made into them.
        let (vectors, rest) = y.as_chunks_mut::<LANES>();
        let (vector_sums, _) = sums.as_chunks::<LANES>();
        let whole = vectors.len() * LANES;
        match self {
            Self::Replace => {
                for (y, sums) in vectors.iter_mut().zip(vector_sums) {
                    for (y, &sum) in y.iter_mut().zip(sums) {
                        *y = alpha * sum;
                    }
                }
                for (y, &sum) in rest.iter_mut().zip(&sums[whole..]) {
                    *y = alpha * sum;
                }
            }
            Self::Add => {
                for (y, sums) in vectors.iter_mut().zip(vector_sums) {
                    for (y, &sum) in y.iter_mut().zip(sums) {
                        *y = alpha.mul_add(sum, *y);
                    }
                }
                for (y, &sum) in rest.iter_mut().zip(&sums[whole..]) {
                    *y = alpha.mul_add(sum, *y);
                }
            }
        }
    }
}

/// Rows of tokens in groups of nearly equal size, none larger than a kernel takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Groups {
    rows: usize,
    count: usize,
}

impl Groups {
    fn new(rows: usize, most: usize) -> Self {
        let count = rows.div_ceil(most);
        Self { rows, count }
    }

    fn rows(self, group: usize) -> std::ops::Range<usize> {
        let (base, larger) = (self.rows / self.count, self.rows % self.count);
        let start = |group: usize| group * base + group.min(larger);
        start(group)..start(group + 1)
    }

    /// Returns into how many parts they are divided where each part of each of `blocks` blocks of columns
    /// is a task, which turns the block's panel for itself.
    fn chunks_to_turn_for(self, blocks: usize) -> usize {
        let wanted = (TASKS_PER_THREAD * rayon::current_num_threads()).div_ceil(blocks.max(1));
        wanted.min(self.count / MIN_GROUPS).max(1)
    }

    /// Returns the rows with each group's laid side by side: the first input of all its rows, then
    /// the second.
    fn pack<T: Real>(self, x: &[T], inputs: usize) -> Buffer<T> {
        let mut packed = Buffer::new(x.len());
        let mut parts = Vec::with_capacity(self.count);
        let mut rest = &mut packed[..];
        for group in 0..self.count {
            let rows = self.rows(group);
            let (part, after) = rest.split_at_mut(rows.len() * inputs);
            parts.push((part, &x[rows.start * inputs..rows.end * inputs]));
            rest = after;
        }
        let pack = |(part, x): (&mut [T], &[T])| {
            let rows = x.len() / inputs.max(1);
            for (row, x) in x.chunks_exact(inputs.max(1)).enumerate() {
                for (values, &x) in part.chunks_exact_mut(rows).zip(x) {
                    values[row] = x;
                }
            }
        };
        if self.count > 4 {
            parts.into_par_iter().with_min_len(2).for_each(pack);
        } else {
            parts.into_iter().for_each(pack);
        }
        packed
    }
}

/// A matrix that several threads write to, each to its own columns.
struct Target<T> {
    values: *mut T,
    rows: usize,
    columns: usize,
}

#[expect(unsafe_code, reason = "a pointer is shared between threads")]
// SAFETY: the values are `Send`, and `part` leaves it to its caller that no two threads have the same.
unsafe impl<T: Send> Sync for Target<T> {}

impl<T> Target<T> {
    fn new(values: &mut [T], rows: usize, columns: usize) -> Self {
        assert_eq!(values.len(), rows * columns, "size of the output");
        let values = values.as_mut_ptr();
        Self {
            values,
            rows,
            columns,
        }
    }

    /// Returns `width` columns of a row.
    ///
    /// # Safety
    ///
    /// The slice that [`Target::new`] took must still be borrowed, and nobody else may have any of
    /// these elements.
    #[expect(unsafe_code, reason = "tasks write to the same rows")]
    #[expect(clippy::mut_from_ref, reason = "the caller vouches for it")]
    #[inline(always)]
    unsafe fn part(&self, row: usize, column: usize, width: usize) -> &mut [T] {
        assert!(row < self.rows && column + width <= self.columns);
        let first = self.values.wrapping_add(row * self.columns + column);
        // SAFETY: inside the slice by the assertion, and unique by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(first, width) }
    }
}

#[cfg(test)]
mod tests;
