//! Products of backward passes: with the transposes of packed matrices, and over tokens.
//!
//! Weights stay in the panels of the forward products. A task turns what it needs of them, some columns
//! of the matrix, into a panel of its own and multiplies many rows with that, so that no second copy of
//! the weights exists. As in the forward direction, every result is one sum in a fixed order, whatever
//! rows stand beside it and however many threads work.

use std::ops::Range;

use rayon::prelude::*;

use super::kernel::{Level, Tile};
use super::pairs::{self, RowPairs};
use super::stored::{Panel, Source, Wide};
use super::{Buffer, Groups, PANEL, Panels, Real, TOKENS_AT_A_TIME, Target, Write};

/// Outputs of a matrix that are turned at a time: half of a core's second-level cache.
const OUTPUTS_AT_A_TIME: usize = 4096;

/// Rows of tokens as the kernels read them, for weights that do not take pairs.
pub(crate) struct PackedRows<T: Real> {
    values: Buffer<T>,
    groups: Groups,
    width: usize,
}

impl<T: Real> PackedRows<T> {
    /// Packs columns of `x` `[m, width]`.
    ///
    /// # Panics
    ///
    /// Panics if `x` has another size or fewer columns.
    pub(crate) fn new(x: &[T], m: usize, columns: Range<usize>, width: usize) -> Self {
        assert_eq!(x.len(), m * width, "size of the rows");
        assert!(columns.end <= width, "columns of the rows");
        let groups = Groups::new(m, Level::best().rows());
        let mut values = Buffer::new(m * columns.len());
        let mut parts = Vec::with_capacity(groups.count);
        let mut rest = &mut values[..];
        for group in 0..groups.count {
            let rows = groups.rows(group);
            let (part, after) = rest.split_at_mut(rows.len() * columns.len());
            parts.push((part, rows));
            rest = after;
        }
        parts
            .into_par_iter()
            .with_min_len(2)
            .for_each(|(part, rows)| {
                let count = rows.len();
                for (at, row) in rows.enumerate() {
                    let x = &x[row * width..][columns.clone()];
                    for (values, &x) in part.chunks_exact_mut(count).zip(x) {
                        values[at] = x;
                    }
                }
            });
        Self {
            values,
            groups,
            width: columns.len(),
        }
    }

    /// Returns some columns of a group's rows, times a panel.
    fn tile<'a>(&'a self, group: usize, columns: Range<usize>, panel: Panel<'a, T>) -> Tile<'a, T> {
        let rows = self.groups.rows(group);
        let values = &self.values[rows.start * self.width..rows.end * self.width];
        Tile {
            x: &values[columns.start * rows.len()..columns.end * rows.len()],
            rows: rows.len(),
            panel,
        }
    }
}

/// Rows of a term, as its matrix takes them.
pub(crate) enum TermRows<'a, T: Real> {
    Packed(&'a PackedRows<T>),
    Pairs(&'a RowPairs),
}

impl<T: Real> Clone for TermRows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Real> Copy for TermRows<'_, T> {}

impl<'a, T: Real> From<&'a PackedRows<T>> for TermRows<'a, T> {
    fn from(rows: &'a PackedRows<T>) -> Self {
        Self::Packed(rows)
    }
}

impl<'a, T: Real> From<&'a RowPairs> for TermRows<'a, T> {
    fn from(rows: &'a RowPairs) -> Self {
        Self::Pairs(rows)
    }
}

/// `alpha * dy W`, or the part of it that some outputs have.
pub(crate) struct Term<'a, T: Real> {
    pub(crate) alpha: T,
    /// As many columns as `outputs`.
    pub(crate) dy: TermRows<'a, T>,
    pub(crate) weight: &'a Panels<T>,
    /// Outputs of the matrix; the first is the first of a panel.
    pub(crate) outputs: Range<usize>,
}

impl<'a, T: Real> Term<'a, T> {
    /// Returns the product with the whole matrix.
    pub(crate) fn new(alpha: T, dy: impl Into<TermRows<'a, T>>, weight: &'a Panels<T>) -> Self {
        Self {
            alpha,
            dy: dy.into(),
            weight,
            outputs: 0..weight.outputs,
        }
    }
}

/// Writes or adds the sum of the terms to `dx` `[m, inputs]`.
///
/// # Panics
///
/// Panics if the shapes do not fit.
pub(crate) fn linears_backward<T: Real>(terms: &[Term<'_, T>], write: Write, dx: &mut [T]) {
    let inputs = terms.first().map_or(0, |term| term.weight.inputs);
    for term in terms {
        assert_eq!(term.weight.inputs, inputs, "inputs of the terms");
        assert_eq!(term.outputs.start % PANEL, 0, "outputs of whole panels");
        assert!(term.outputs.end <= term.weight.outputs, "outputs of a term");
    }
    let mut write = write;
    // Terms in pairs are one sum if their factor is one.
    for terms in terms.chunk_by(|a, b| match (&a.dy, &b.dy) {
        (TermRows::Pairs(_), TermRows::Pairs(_)) => a.alpha == b.alpha,
        (TermRows::Packed(_), TermRows::Packed(_)) => true,
        _ => false,
    }) {
        match terms[0].dy {
            TermRows::Packed(first) => packed_backward(terms, first.groups, write, dx),
            TermRows::Pairs(_) => pairs::linears_backward(terms, write, dx),
        }
        write = Write::Add;
    }
}

fn packed_backward<T: Real>(terms: &[Term<'_, T>], groups: Groups, write: Write, dx: &mut [T]) {
    fn rows_of<'a, T: Real>(term: &Term<'a, T>) -> &'a PackedRows<T> {
        match term.dy {
            TermRows::Packed(rows) => rows,
            TermRows::Pairs(_) => unreachable!("terms of one kind"),
        }
    }
    for term in terms {
        let dy = rows_of(term);
        assert_eq!(dy.groups, groups, "rows of the terms");
        assert_eq!(dy.width, term.outputs.len(), "outputs of a term");
    }
    if groups.rows == 0 {
        return;
    }
    let inputs = terms[0].weight.inputs;
    let target = Target::new(dx, groups.rows, inputs);
    let blocks = inputs.div_ceil(PANEL);
    let chunks = groups.chunks_to_turn_for(blocks);
    let level = Level::best();
    (0..chunks * blocks)
        .into_par_iter()
        .for_each_init(Vec::new, |turned, task| {
            let (chunk, block) = (task / blocks, task % blocks);
            let column = block * PANEL;
            let width = PANEL.min(inputs - column);
            let mut write = write;
            for term in terms {
                let dy = rows_of(term);
                for from in (0..dy.width).step_by(OUTPUTS_AT_A_TIME) {
                    let part = from..dy.width.min(from + OUTPUTS_AT_A_TIME);
                    let outputs = term.outputs.start + part.start..term.outputs.start + part.end;
                    let panel = term.weight.turn(outputs, column..column + width, turned);
                    let share = chunk * groups.count / chunks..(chunk + 1) * groups.count / chunks;
                    for group in share {
                        let rows = groups.rows(group);
                        level.multiply(
                            dy.tile(group, part.clone(), Panel::Wide(panel)),
                            #[inline(always)]
                            |row, sums| {
                                #[expect(unsafe_code, reason = "tasks write to the same rows")]
                                // SAFETY: a task has its columns of its groups' rows to itself.
                                let dx = unsafe { target.part(rows.start + row, column, width) };
                                write.join(term.alpha, sums, dx);
                            },
                        );
                    }
                    write = Write::Add;
                }
            }
        });
}

impl<T: Real> Panels<T> {
    /// Returns some columns of the matrix, a panel's at most: `[outputs, PANEL]`.
    fn turn<'a>(
        &self,
        outputs: Range<usize>,
        columns: Range<usize>,
        turned: &'a mut Vec<T>,
    ) -> Wide<'a, T> {
        let len = outputs.len() * PANEL;
        if turned.len() < len {
            turned.resize(len, T::ZERO);
        }
        let first = outputs.start / PANEL;
        for (index, rows) in turned[..len].chunks_mut(PANEL * PANEL).enumerate() {
            match self.panel(first + index) {
                Panel::Wide(panel) => turn_panel(panel, columns.clone(), rows),
                Panel::Bf16(panel) => turn_panel(panel, columns.clone(), rows),
                Panel::Int8(panel) => turn_panel(panel, columns.clone(), rows),
                Panel::Pairs(_) => unreachable!("its rows are in pairs, too"),
            }
        }
        Wide(&turned[..len])
    }
}

/// Writes some columns of a panel's outputs, each output's to a row of [`PANEL`].
fn turn_panel<T: Real>(panel: impl Source<T>, columns: Range<usize>, rows: &mut [T]) {
    for (at, input) in columns.enumerate() {
        let outputs: [T; PANEL] = panel.wide(input, 0);
        for (row, output) in rows.chunks_exact_mut(PANEL).zip(outputs) {
            row[at] = output;
        }
    }
}

/// How a gradient of a low-rank matrix lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Orientation {
    /// `[rank, width]`.
    Upright,
    /// `[width, rank]`.
    Turned,
}

/// Adds `alpha * low^T x` to `sums`, with `low` `[m, rank]` and `x` `[m, width]`: the gradient of a
/// low-rank matrix, a sum over tokens.
///
/// # Panics
///
/// Panics if the shapes do not fit.
pub(crate) fn add_outer_products<T: Real>(
    alpha: T,
    low: &[T],
    x: &[T],
    m: usize,
    orientation: Orientation,
    sums: &mut [T],
) {
    if m == 0 {
        return;
    }
    let (rank, width) = (low.len() / m, x.len() / m);
    assert_eq!(low.len(), m * rank, "size of the low-rank rows");
    assert_eq!(x.len(), m * width, "size of the rows");
    let (rows, columns) = match orientation {
        Orientation::Upright => (rank, width),
        Orientation::Turned => (width, rank),
    };
    let level = Level::best();
    let target = Target::new(sums, rows, columns);
    // A row of the product is a column of `low`: its tokens one after the other, a group side by side.
    let groups = Groups::new(rank, level.rows());
    for first in (0..m).step_by(TOKENS_AT_A_TIME) {
        let tokens = first..m.min(first + TOKENS_AT_A_TIME);
        let packed: Vec<Vec<T>> = (0..groups.count)
            .map(|group| {
                let rows = low[tokens.start * rank..tokens.end * rank].chunks_exact(rank);
                rows.flat_map(|row| &row[groups.rows(group)])
                    .copied()
                    .collect()
            })
            .collect();
        (0..width.div_ceil(PANEL)).into_par_iter().for_each_init(
            || vec![T::ZERO; tokens.len() * PANEL],
            |panel, block| {
                let column = block * PANEL;
                let count = PANEL.min(width - column);
                for (values, token) in panel.chunks_exact_mut(PANEL).zip(tokens.clone()) {
                    values[..count].copy_from_slice(&x[token * width + column..][..count]);
                }
                for (group, x) in packed.iter().enumerate() {
                    let rows = groups.rows(group);
                    let tile = Tile {
                        x,
                        rows: rows.len(),
                        panel: Panel::Wide(Wide(panel)),
                    };
                    level.multiply(
                        tile,
                        #[inline(always)]
                        |row, products| {
                            let row = rows.start + row;
                            #[expect(unsafe_code, reason = "tasks write to the same rows")]
                            match orientation {
                                Orientation::Upright => {
                                    // SAFETY: a task has its columns of all rows to itself.
                                    let sums = unsafe { target.part(row, column, count) };
                                    Write::Add.join(alpha, products, sums);
                                }
                                Orientation::Turned => {
                                    for (at, product) in products[..count].iter().enumerate() {
                                        // SAFETY: a task has its rows to itself.
                                        let sum = unsafe { target.part(column + at, row, 1) };
                                        Write::Add.join(alpha, std::slice::from_ref(product), sum);
                                    }
                                }
                            }
                        },
                    );
                }
            },
        );
    }
}
