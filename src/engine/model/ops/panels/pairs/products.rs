//! Products of rows in pairs: forward, backward and over tokens.

use std::ops::Range;

use rayon::prelude::*;

use super::super::backward::{Orientation, Term, TermRows};
use super::super::stored::Panel;
use super::super::{
    Buffer, Groups, LANES, PANEL, Panels, Real, TOKENS_AT_A_TIME, Target, Write, share_panels,
};
use super::{Dots, PairTile, RowPairs, RowTile, TILE_ROWS, ask_for_block, pairs_of, turn_panel};

/// Pairs of outputs whose weights are turned at a time: half of a core's second-level cache.
const PAIRS_AT_A_TIME: usize = 4096;

/// Panels of columns that a task of sums over tokens makes at a time: what rows of tokens have side by side
/// is then more than a cache line.
const PANELS_AT_A_TIME: usize = 4;

/// One of the products of [`linears_of_pairs`]: `y` is `[m, outputs]`.
pub(crate) struct PairProduct<'a, T: Real> {
    pub(crate) weight: &'a Panels<T>,
    pub(crate) write: Write,
    pub(crate) y: &'a mut [T],
    /// Low-rank rows and their matrix, whose product comes on top, as with [`add_to_rows`].
    pub(crate) update: Option<(&'a RowPairs, &'a Panels<T>)>,
}

/// Computes several products `y = alpha * x W^T` or `y += alpha * x W^T` of the same rows.
///
/// # Panics
///
/// Panics if the shapes do not fit, or if a matrix is not in pairs.
pub(crate) fn linears_of_pairs<T: Real>(alpha: T, x: &RowPairs, products: Vec<PairProduct<'_, T>>) {
    multiply_rows(Dots::best(), alpha, x, products);
}

pub(in super::super) fn multiply_rows<T: Real>(
    dots: Dots,
    alpha: T,
    x: &RowPairs,
    products: Vec<PairProduct<'_, T>>,
) {
    let targets: Vec<_> = products
        .into_iter()
        .map(|product| {
            let PairProduct {
                weight,
                write,
                y,
                update,
            } = product;
            assert_eq!(pairs_of(weight.inputs), x.pairs, "inner dimensions");
            if let Some((low, b)) = update {
                assert_eq!(low.rows, x.rows, "rows of the update");
                assert_eq!(pairs_of(b.inputs), low.pairs, "rank of the update");
                assert_eq!(b.outputs, weight.outputs, "outputs of the update");
            }
            (
                weight,
                write,
                Target::new(y, x.rows, weight.outputs),
                update,
            )
        })
        .collect();
    let groups = Groups::new(x.rows, TILE_ROWS);
    let panels: Vec<usize> = targets.iter().map(|(weight, ..)| weight.panels()).collect();
    share_panels(
        groups,
        x.pairs,
        TILE_ROWS,
        &panels,
        |product, index, groups_of_task| {
            let (weight, write, target, update) = &targets[product];
            let panel = pairs_of_panel(weight, index);
            let update = update.map(|(low, b)| (low, pairs_of_panel(b, index)));
            for group in groups_of_task {
                let rows = groups.rows(group);
                let x = x.whole(rows.clone());
                let then = update.map(|(low, panel)| PairTile {
                    x: low.whole(rows.clone()),
                    panel,
                });
                // A task has its panel's columns of its groups' rows to itself.
                let place = Place::new(target, rows, index);
                place.multiply(dots, alpha, *write, &[PairTile { x, panel }], then);
            }
        },
    );
}

/// Adds `low B^T` to rows of `y` `[m, outputs]`: each sum goes on from what is there.
///
/// # Panics
///
/// Panics if the shapes do not fit, or if the matrix is not in pairs.
pub(crate) fn add_to_rows<T: Real>(low: &RowPairs, b: &Panels<T>, y: &mut [T]) {
    assert_eq!(pairs_of(b.inputs), low.pairs, "inner dimensions");
    let dots = Dots::best();
    let target = Target::new(y, low.rows, b.outputs);
    let groups = Groups::new(low.rows, TILE_ROWS);
    share_panels(
        groups,
        low.pairs,
        TILE_ROWS,
        &[b.panels()],
        |_, index, groups_of_task| {
            let panel = pairs_of_panel(b, index);
            for group in groups_of_task {
                let rows = groups.rows(group);
                let x = low.whole(rows.clone());
                // A task has its panel's columns of its groups' rows to itself.
                let place = Place::new(&target, rows, index);
                place.multiply(dots, T::ONE, Write::Add, &[], Some(PairTile { x, panel }));
            }
        },
    );
}

/// Some rows of a panel's columns, which a task has to itself.
struct Place<'a, T> {
    target: &'a Target<T>,
    rows: Range<usize>,
    column: usize,
    width: usize,
}

impl<'a, T: Real> Place<'a, T> {
    fn new(target: &'a Target<T>, rows: Range<usize>, panel: usize) -> Self {
        let column = panel * PANEL;
        Self {
            target,
            rows,
            column,
            width: PANEL.min(target.columns - column),
        }
    }

    /// Writes or adds `alpha` times the sum of all tiles' products, and on top of that those of `then`.
    #[inline(always)]
    fn multiply(
        &self,
        dots: Dots,
        alpha: T,
        write: Write,
        tiles: &[PairTile<'_>],
        then: Option<PairTile<'_>>,
    ) {
        let part = |row| {
            #[expect(unsafe_code, reason = "tasks write to the same rows")]
            // SAFETY: a task has these elements to itself, and each call's is gone before the next.
            unsafe {
                self.target
                    .part(self.rows.start + row, self.column, self.width)
            }
        };
        let alpha = alpha.to_single();
        // What is there is all that `then` goes on from where there is nothing to add to it.
        let is_joined = !tiles.is_empty();
        dots.multiply(
            [self.rows.len(), self.width],
            tiles,
            // Compiled for the machine's vectors only as a part of the kernel.
            #[inline(always)]
            |row, sums| match write {
                Write::Replace => scale(alpha, sums),
                Write::Add => join(alpha, is_joined, part(row), sums),
            },
            then,
            #[inline(always)]
            |row, sums| store(sums, part(row)),
        );
    }
}

#[inline(always)]
fn scale(alpha: f32, sums: &mut [f32; PANEL]) {
    for sums in sums.as_chunks_mut::<LANES>().0 {
        sums.iter_mut().for_each(|sum| *sum *= alpha);
    }
}

#[inline(always)]
fn join<T: Real>(alpha: f32, is_joined: bool, y: &[T], sums: &mut [f32; PANEL]) {
    // Whole vectors first, each read before it is written: what may be the same memory, or of any length,
    // is not made into them.
    let (vectors, rest) = y.as_chunks::<LANES>();
    let (vector_sums, _) = sums.as_chunks_mut::<LANES>();
    for (sums, y) in vector_sums.iter_mut().zip(vectors) {
        let (mut joint, y) = (*sums, *y);
        for (sum, y) in joint.iter_mut().zip(y) {
            *sum = joined(alpha, is_joined, y.to_single(), *sum);
        }
        *sums = joint;
    }
    let whole = vectors.len() * LANES;
    for (sum, y) in sums[whole..].iter_mut().zip(rest) {
        *sum = joined(alpha, is_joined, y.to_single(), *sum);
    }
}

#[inline(always)]
fn joined(alpha: f32, is_joined: bool, y: f32, sum: f32) -> f32 {
    if is_joined { alpha.mul_add(sum, y) } else { y }
}

#[inline(always)]
fn store<T: Real>(sums: &[f32; PANEL], y: &mut [T]) {
    let (vectors, rest) = y.as_chunks_mut::<LANES>();
    let (vector_sums, _) = sums.as_chunks::<LANES>();
    let whole = vectors.len() * LANES;
    for (y, &sums) in vectors.iter_mut().zip(vector_sums) {
        let mut wide = [T::ZERO; LANES];
        for (wide, sum) in wide.iter_mut().zip(sums) {
            *wide = T::from_single(sum);
        }
        *y = wide;
    }
    for (y, &sum) in rest.iter_mut().zip(&sums[whole..]) {
        *y = T::from_single(sum);
    }
}

fn pairs_of_panel<T: Real>(weight: &Panels<T>, index: usize) -> &[u32] {
    match weight.panel(index) {
        Panel::Pairs(panel) => panel.0,
        _ => panic!("rows in pairs meet a matrix that is not"),
    }
}

/// Some outputs of a term whose weights are turned together.
struct Part<'a, T: Real> {
    dy: &'a RowPairs,
    weight: &'a Panels<T>,
    /// Of the term's columns.
    columns: Range<usize>,
    /// Of the matrix.
    outputs: Range<usize>,
}

impl<'a, T: Real> Part<'a, T> {
    fn rows(&self, rows: Range<usize>) -> RowTile<'a> {
        let first = self.columns.start / 2;
        let pairs = first..first + pairs_of(self.columns.len());
        self.dy.tile(rows, pairs)
    }
}

/// Writes or adds the sum of terms of one factor, each of rows and a matrix in pairs, to `dx`. As in the
/// forward direction, a result is one sum, over the terms in their order.
pub(in super::super) fn linears_backward<T: Real>(
    terms: &[Term<'_, T>],
    write: Write,
    dx: &mut [T],
) {
    let Some(first) = terms.first() else { return };
    let (alpha, inputs) = (first.alpha, first.weight.inputs);
    let mut parts = Vec::new();
    for term in terms {
        let TermRows::Pairs(dy) = term.dy else {
            panic!("rows of a matrix in pairs are in pairs")
        };
        let width = term.outputs.len();
        assert_eq!(dy.pairs, pairs_of(width), "outputs of a term");
        for start in (0..width).step_by(2 * PAIRS_AT_A_TIME) {
            let columns = start..width.min(start + 2 * PAIRS_AT_A_TIME);
            parts.push(Part {
                dy,
                weight: term.weight,
                outputs: term.outputs.start + columns.start..term.outputs.start + columns.end,
                columns,
            });
        }
    }
    let rows = parts.first().map_or(0, |part| part.dy.rows);
    if rows == 0 {
        return;
    }
    let groups = Groups::new(rows, TILE_ROWS);
    let target = Target::new(dx, rows, inputs);
    let blocks = inputs.div_ceil(PANEL);
    let chunks = groups.chunks_to_turn_for(blocks);
    let dots = Dots::best();
    let (mut rest, mut write) = (parts.as_slice(), write);
    while !rest.is_empty() {
        let (parts, after) = rest.split_at(together(rest));
        let lens: Vec<usize> = (parts.iter())
            .map(|part| pairs_of(part.outputs.len()) * PANEL)
            .collect();
        (0..chunks * blocks).into_par_iter().for_each_init(
            || Buffer::<u32>::new(lens.iter().sum()),
            |turned, task| {
                let (chunk, block) = (task / blocks, task % blocks);
                let column = block * PANEL;
                let width = PANEL.min(inputs - column);
                let mut free = &mut turned[..];
                let mut panels: Vec<&[u32]> = Vec::with_capacity(parts.len());
                for (part, &len) in parts.iter().zip(&lens) {
                    let panel;
                    (panel, free) = free.split_at_mut(len);
                    let columns = column..column + width;
                    turn(part.weight, part.outputs.clone(), columns, panel);
                    panels.push(panel);
                }
                let mut tiles = Vec::with_capacity(parts.len());
                for group in chunk * groups.count / chunks..(chunk + 1) * groups.count / chunks {
                    let rows = groups.rows(group);
                    tiles.clear();
                    tiles.extend(parts.iter().zip(&panels).map(|(part, panel)| PairTile {
                        x: part.rows(rows.clone()),
                        panel,
                    }));
                    // A task has its columns of its groups' rows to itself.
                    let place = Place::new(&target, rows, block);
                    place.multiply(dots, alpha, write, &tiles, None);
                }
            },
        );
        (rest, write) = (after, Write::Add);
    }
}

/// Returns how many of the first parts are turned together, at least one.
fn together<T: Real>(parts: &[Part<'_, T>]) -> usize {
    let mut pairs = 0;
    let fitting = parts.iter().take_while(|part| {
        pairs += pairs_of(part.outputs.len());
        pairs <= PAIRS_AT_A_TIME
    });
    fitting.count().max(1)
}

/// Writes some columns of some outputs' weights, two outputs' to a row of [`PANEL`] pairs. The first
/// output is the first of a panel.
fn turn<T: Real>(
    weight: &Panels<T>,
    outputs: Range<usize>,
    columns: Range<usize>,
    turned: &mut [u32],
) {
    let first = outputs.start / PANEL;
    let last = (outputs.end - 1) / PANEL;
    for (index, rows) in turned.chunks_mut(PANEL * PANEL / 2).enumerate() {
        let panel = first + index;
        // Each is a piece of memory by itself, which takes longer to come than to be turned.
        ask_for_block(pairs_of_panel(weight, last.min(panel + 1)), columns.clone());
        turn_panel(pairs_of_panel(weight, panel), columns.clone(), rows);
    }
}

/// Does what [`add_outer_products`](super::super::add_outer_products) does with rows `x` in pairs: two
/// tokens' numbers are a pair.
///
/// # Panics
///
/// Panics if the shapes do not fit.
pub(crate) fn add_outer_products_of_pairs<T: Real>(
    alpha: T,
    low: &[T],
    x: &RowPairs,
    width: usize,
    orientation: Orientation,
    sums: &mut [T],
) {
    let m = x.rows;
    if m == 0 {
        return;
    }
    let rank = low.len() / m;
    assert_eq!(low.len(), m * rank, "size of the low-rank rows");
    assert_eq!(pairs_of(width), x.pairs, "width of the rows");
    let (rows, columns) = match orientation {
        Orientation::Upright => (rank, width),
        Orientation::Turned => (width, rank),
    };
    let target = Target::new(sums, rows, columns);
    let groups = Groups::new(rank, TILE_ROWS);
    let dots = Dots::best();
    for first in (0..m).step_by(TOKENS_AT_A_TIME) {
        let tokens = first..m.min(first + TOKENS_AT_A_TIME);
        let count = tokens.len();
        // A row of the product is a column of `low`: its tokens one after the other.
        let mut turned = vec![T::ZERO; rank * count];
        for (token, low) in low[tokens.start * rank..tokens.end * rank]
            .chunks_exact(rank)
            .enumerate()
        {
            for (values, &low) in turned.chunks_exact_mut(count).zip(low) {
                values[token] = low;
            }
        }
        let low = RowPairs::new(&turned, rank, 0..count, count);
        let len = pairs_of(count) * PANEL;
        (0..width.div_ceil(PANEL * PANELS_AT_A_TIME))
            .into_par_iter()
            .for_each_init(
                || Buffer::<u32>::new(PANELS_AT_A_TIME * len),
                |panels, task| {
                    let first = task * PANELS_AT_A_TIME;
                    let some = PANELS_AT_A_TIME.min(width.div_ceil(PANEL) - first);
                    pair_tokens(x, tokens.clone(), first * PANEL / 2, len, panels);
                    for (index, panel) in panels.chunks_exact(len).take(some).enumerate() {
                        let column = (first + index) * PANEL;
                        let width = PANEL.min(width - column);
                        for group in 0..groups.count {
                            let rows = groups.rows(group);
                            let tile = PairTile {
                                x: low.whole(rows.clone()),
                                panel,
                            };
                            add_sums(
                                dots,
                                alpha,
                                tile,
                                &target,
                                orientation,
                                rows.start,
                                column,
                                width,
                            );
                        }
                    }
                },
            );
    }
}

/// Adds a tile's sums to the gradient of a low-rank matrix, whose columns from `column` on, `width` of them,
/// the caller has to itself.
#[expect(clippy::too_many_arguments, reason = "where they go")]
fn add_sums<T: Real>(
    dots: Dots,
    alpha: T,
    tile: PairTile<'_>,
    target: &Target<T>,
    orientation: Orientation,
    first: usize,
    column: usize,
    width: usize,
) {
    if orientation == Orientation::Upright {
        let place = Place {
            target,
            rows: first..first + tile.x.rows,
            column,
            width,
        };
        return place.multiply(dots, alpha, Write::Add, &[tile], None);
    }
    dots.multiply(
        [tile.x.rows, width],
        &[tile],
        |_, _| (),
        None,
        |row, sums| {
            for (at, &sum) in sums[..width].iter().enumerate() {
                #[expect(unsafe_code, reason = "tasks write to the same rows")]
                // SAFETY: the caller has these rows of the turned matrix to itself.
                let place = unsafe { target.part(column + at, first + row, 1) };
                place[0] = alpha.mul_add(T::from_single(sum), place[0]);
            }
        },
    );
}

/// Writes columns of tokens in pairs of tokens, to panels `[pairs, PANEL]` of `len` numbers, one after the
/// other. `first` is the first pair of columns.
fn pair_tokens(x: &RowPairs, tokens: Range<usize>, first: usize, len: usize, panels: &mut [u32]) {
    /// Pairs of columns that a panel takes.
    const COLUMNS: usize = PANEL / 2;
    const NOTHING: [u32; PANELS_AT_A_TIME * COLUMNS] = [0; PANELS_AT_A_TIME * COLUMNS];
    let columns = first..x.pairs.min(first + NOTHING.len());
    super::vectorized(
        #[inline(always)]
        || {
            for (pair, token) in tokens.clone().step_by(2).enumerate() {
                let first = &x.row(token)[columns.clone()];
                let second = if token + 1 < tokens.end {
                    &x.row(token + 1)[columns.clone()]
                } else {
                    &NOTHING[..first.len()]
                };
                let mut start = 0;
                for panel in panels.chunks_exact_mut(len) {
                    if start >= first.len() {
                        break;
                    }
                    let values = &mut panel[pair * PANEL..][..PANEL];
                    let mut both = [[0; 2]; COLUMNS];
                    // Whole vectors apart: a loop of any length is not made into them.
                    match (
                        first[start..].first_chunk::<COLUMNS>(),
                        second[start..].first_chunk::<COLUMNS>(),
                    ) {
                        (Some(first), Some(second)) => {
                            for ((both, &first), &second) in both.iter_mut().zip(first).zip(second)
                            {
                                *both = paired(first, second);
                            }
                        }
                        _ => {
                            for (at, both) in both[..first.len() - start].iter_mut().enumerate() {
                                *both = paired(first[start + at], second[start + at]);
                            }
                        }
                    }
                    values.copy_from_slice(both.as_flattened());
                    start += COLUMNS;
                }
            }
            // What a row of pairs is filled up with.
            for panel in panels.chunks_exact_mut(len) {
                panel[tokens.len().div_ceil(2) * PANEL..].fill(0);
            }
        },
    );
}

/// Returns the first columns of two tokens, then the second ones.
#[inline(always)]
fn paired(first: u32, second: u32) -> [u32; 2] {
    [
        first & 0xffff | second << 16,
        first >> 16 | second & 0xffff_0000,
    ]
}
