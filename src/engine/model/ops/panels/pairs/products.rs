//! Products of rows in pairs: forward, backward and over tokens.

use std::ops::Range;

use rayon::prelude::*;

use super::super::backward::{Orientation, Term, TermRows};
use super::super::stored::Panel;
use super::super::{Buffer, Groups, PANEL, Panels, Real, Target, Write, share_panels};
use super::{Dots, PairTile, RowPairs, RowTile, TILE_ROWS, pairs_of, turn_panel};

/// Pairs of outputs whose weights are turned at a time: half of a core's second-level cache.
const PAIRS_AT_A_TIME: usize = 4096;

/// Tokens whose columns lie side by side at a time.
const TOKENS_AT_A_TIME: usize = 2048;

/// Panels of columns that a task of sums over tokens makes at a time: what rows of tokens have side by side
/// is then more than a cache line.
const PANELS_AT_A_TIME: usize = 4;

/// Fewest groups of rows that are worth turning a panel for.
const MIN_GROUPS: usize = 8;

/// Tasks for each thread, so that none waits long for the last.
const TASKS_PER_THREAD: usize = 4;

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
            |row, sums| match (write, <&[T; PANEL]>::try_from(&*part(row))) {
                (Write::Replace, _) => sums.iter_mut().for_each(|sum| *sum *= alpha),
                // Whole vectors apart: a loop of any length is not made into them.
                (Write::Add, Ok(y)) => join(alpha, is_joined, y, sums),
                (Write::Add, Err(_)) => join(alpha, is_joined, part(row), sums),
            },
            then,
            #[inline(always)]
            |row, sums| match <&mut [T; PANEL]>::try_from(&mut *part(row)) {
                Ok(y) => store(sums, y),
                Err(_) => store(sums, part(row)),
            },
        );
    }
}

#[inline(always)]
fn join<T: Real>(alpha: f32, is_joined: bool, y: &[T], sums: &mut [f32; PANEL]) {
    for (sum, y) in sums.iter_mut().zip(y) {
        let y = y.to_single();
        *sum = if is_joined { alpha.mul_add(*sum, y) } else { y };
    }
}

#[inline(always)]
fn store<T: Real>(sums: &[f32; PANEL], y: &mut [T]) {
    for (y, &sum) in y.iter_mut().zip(sums) {
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
    let wanted = (TASKS_PER_THREAD * rayon::current_num_threads()).div_ceil(blocks.max(1));
    let chunks = wanted.min(groups.count / MIN_GROUPS).max(1);
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
    for (index, rows) in turned.chunks_mut(PANEL * PANEL / 2).enumerate() {
        turn_panel(pairs_of_panel(weight, first + index), columns.clone(), rows);
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
    const NOTHING: [u32; PANELS_AT_A_TIME * PANEL / 2] = [0; PANELS_AT_A_TIME * PANEL / 2];
    let columns = first..x.pairs.min(first + NOTHING.len());
    let nothing = &NOTHING[..columns.len()];
    let mut tokens = tokens.map(|token| &x.row(token)[columns.clone()]);
    super::vectorized(
        #[inline(always)]
        || {
            for pair in 0..len / PANEL {
                let [first, second] = [(); 2].map(|()| tokens.next().unwrap_or(nothing));
                let blocks = (first.chunks(PANEL / 2)).zip(second.chunks(PANEL / 2));
                for (values, (first, second)) in panels.chunks_exact_mut(len).zip(blocks) {
                    let (values, _) = values[pair * PANEL..][..PANEL].as_chunks_mut::<2>();
                    // Whole vectors apart: a loop of any length is not made into them.
                    match (
                        <&[u32; PANEL / 2]>::try_from(first),
                        <&[u32; PANEL / 2]>::try_from(second),
                    ) {
                        (Ok(first), Ok(second)) => {
                            pair_columns::<{ PANEL / 2 }>(first, second, values);
                        }
                        _ => {
                            for ((values, &first), &second) in
                                values.iter_mut().zip(first).zip(second)
                            {
                                *values = paired(first, second);
                            }
                        }
                    }
                }
            }
        },
    );
}

#[inline(always)]
fn pair_columns<const N: usize>(first: &[u32; N], second: &[u32; N], values: &mut [[u32; 2]]) {
    for ((values, &first), &second) in values.iter_mut().zip(first).zip(second) {
        *values = paired(first, second);
    }
}

/// Returns the first columns of two tokens, then the second ones.
#[inline(always)]
fn paired(first: u32, second: u32) -> [u32; 2] {
    [
        first & 0xffff | second << 16,
        first >> 16 | second & 0xffff_0000,
    ]
}
