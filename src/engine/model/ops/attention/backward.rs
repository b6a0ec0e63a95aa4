//! The backward pass of attention.
//!
//! Probabilities are recomputed from the saved log-sum-exp, a tile of queries at a time (Dao et al. 2022,
//! algorithm 4): memory is one tile by the sequence's length, never its square. All products run on two
//! small kernels over panels, and leave out keys that no query of theirs sees.

use std::collections::BTreeMap;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::super::panels::{Level, PANEL, VECTORS, multiply_vectors};
use super::super::{Buffer, LANES, Real, lane_sum, vectorized};
use super::{HeadShape, KeyValues as _, PackedKeyValues};

/// Queries whose probabilities are held at a time.
pub(super) const QUERIES_PER_TILE: usize = 32;

/// Gradients of [`attend`](super::attend)'s inputs, in the inputs' layout.
pub(crate) struct AttentionGradients<T: Real> {
    pub(crate) queries: Buffer<T>,
    pub(crate) keys: Buffer<T>,
    pub(crate) values: Buffer<T>,
}

/// Returns the gradients of [`attend`](super::attend) over a packed batch, given its log-sum-exp and the
/// gradient of its output.
pub(crate) fn attend_backward<T: Real>(
    queries: &[T],
    source: &PackedKeyValues<'_, T>,
    log_sum_exp: &[T],
    doutput: &[T],
) -> AttentionGradients<T> {
    let (shape, segments) = (source.shape, source.segments);
    let tokens = segments.last().map_or(0, |segment| segment.end);
    let tasks: Vec<(usize, usize)> = (0..segments.len())
        .flat_map(|segment| (0..shape.kv_heads).map(move |kv_head| (segment, kv_head)))
        .collect();
    let given = Given {
        queries,
        source,
        log_sum_exp,
        doutput,
    };
    let parts: Vec<HeadGradients<T>> = tasks
        .into_par_iter()
        .map_init(Scratch::default, |scratch, (segment, kv_head)| {
            given.head_backward(segment, kv_head, scratch)
        })
        .collect();
    let mut gradients = AttentionGradients {
        queries: Buffer::new(tokens * shape.query_width()),
        keys: Buffer::new(tokens * shape.key_width()),
        values: Buffer::new(tokens * shape.key_width()),
    };
    let readers = readers(source);
    let mut tasks = Vec::with_capacity(segments.len());
    let (mut queries, mut keys, mut values) = (
        &mut gradients.queries[..],
        &mut gradients.keys[..],
        &mut gradients.values[..],
    );
    for (index, segment) in segments.iter().enumerate() {
        let (dq, dk, dv);
        (dq, queries) = queries.split_at_mut(segment.len() * shape.query_width());
        (dk, keys) = keys.split_at_mut(segment.len() * shape.key_width());
        (dv, values) = values.split_at_mut(segment.len() * shape.key_width());
        tasks.push((index, dq, dk, dv));
    }
    tasks.into_par_iter().for_each(|(segment, dq, dk, dv)| {
        dq.fill(T::ZERO);
        dk.fill(T::ZERO);
        dv.fill(T::ZERO);
        for kv_head in 0..shape.kv_heads {
            let part = &parts[segment * shape.kv_heads + kv_head];
            let width = shape.group() * shape.head_dim;
            add_columns(
                dq,
                shape.query_width(),
                kv_head * width,
                &part.queries,
                width,
            );
            // In the order of the segments, so that the sum is the same on any number of threads.
            for &(reader, offset) in &readers[segment] {
                let part = &parts[reader * shape.kv_heads + kv_head];
                let (width, start) = (shape.head_dim, offset * shape.head_dim);
                let (keys, values) = (&part.keys[start..], &part.values[start..]);
                add_columns(dk, shape.key_width(), kv_head * width, keys, width);
                add_columns(dv, shape.key_width(), kv_head * width, values, width);
            }
        }
    });
    gradients
}

/// For each segment, the segments that see its keys, and at which place among theirs.
fn readers<T>(source: &PackedKeyValues<'_, T>) -> Vec<Vec<(usize, usize)>> {
    let starts: BTreeMap<usize, usize> = (source.segments.iter().enumerate())
        .filter(|(_, segment)| !segment.is_empty())
        .map(|(index, segment)| (segment.start, index))
        .collect();
    let mut readers = vec![Vec::new(); source.segments.len()];
    for (reader, (segment, history)) in source.segments.iter().zip(source.histories).enumerate() {
        let mut offset = 0;
        for range in history
            .iter()
            .chain([segment])
            .filter(|range| !range.is_empty())
        {
            readers[starts[&range.start]].push((reader, offset));
            offset += range.len();
        }
    }
    readers
}

/// Adds the rows of `source`, `width` wide, to the columns of `target` that start at `first`.
fn add_columns<T: Real>(
    target: &mut [T],
    target_width: usize,
    first: usize,
    source: &[T],
    width: usize,
) {
    for (target, source) in target
        .chunks_exact_mut(target_width)
        .zip(source.chunks_exact(width))
    {
        for (target, &source) in target[first..first + width].iter_mut().zip(source) {
            *target += source;
        }
    }
}

/// Gradients of one key head in one segment of `t` queries that see up to `s` keys:
/// `[t, group * head_dim]`, then `[s, head_dim]` twice.
struct HeadGradients<T: Real> {
    queries: Buffer<T>,
    keys: Buffer<T>,
    values: Buffer<T>,
}

/// Scratch of one thread.
struct Scratch<T> {
    /// A head's keys and values in blocks of [`PANEL`], transposed: `[blocks, head_dim, PANEL]`.
    keys: Vec<T>,
    values: Vec<T>,
    /// Rows in panels of [`PANEL`] of the head's dimensions, `[panels, rows, PANEL]`: of all keys, and of
    /// a tile's queries and their outputs' gradients.
    key_panels: Vec<T>,
    query_panels: Vec<T>,
    output_panels: Vec<T>,
    /// The tile's rows one after the other.
    queries: Vec<T>,
    outputs: Vec<T>,
    /// Of a tile's queries, and their scores' gradients.
    probabilities: Vec<T>,
    gradients: Vec<T>,
}

impl<T> Default for Scratch<T> {
    fn default() -> Self {
        Self {
            keys: Vec::new(),
            values: Vec::new(),
            key_panels: Vec::new(),
            query_panels: Vec::new(),
            output_panels: Vec::new(),
            queries: Vec::new(),
            outputs: Vec::new(),
            probabilities: Vec::new(),
            gradients: Vec::new(),
        }
    }
}

fn zero<T: Real>(values: &mut Vec<T>, len: usize) {
    values.clear();
    values.resize(len, T::ZERO);
}

/// Has room for so many numbers, which are whatever they are.
fn reserve<T: Real>(values: &mut Vec<T>, len: usize) {
    if values.len() < len {
        values.resize(len, T::ZERO);
    }
}

/// Puts a row of a head into panels `[panels, rows, PANEL]`.
fn put_row<T: Real>(panels: &mut [T], rows: usize, row: usize, head: &[T]) {
    for (panel, part) in head.chunks(PANEL).enumerate() {
        panels[(panel * rows + row) * PANEL..][..part.len()].copy_from_slice(part);
    }
}

/// Puts a key or value of a head into its block.
fn put_transposed<T: Real>(blocks: &mut [T], key: usize, head: &[T]) {
    let block = &mut blocks[key / PANEL * head.len() * PANEL..];
    for (values, &value) in block.chunks_exact_mut(PANEL).zip(head) {
        values[key % PANEL] = value;
    }
}

/// What the backward pass is given.
struct Given<'a, T> {
    queries: &'a [T],
    source: &'a PackedKeyValues<'a, T>,
    log_sum_exp: &'a [T],
    doutput: &'a [T],
}

impl<T: Real> Given<'_, T> {
    fn head_backward(
        &self,
        segment: usize,
        kv_head: usize,
        scratch: &mut Scratch<T>,
    ) -> HeadGradients<T> {
        let source = self.source;
        let HeadShape { head_dim, .. } = source.shape;
        let key_width = source.shape.key_width();
        let length = source.segments[segment].len();
        let keys = source.history(segment) + length;
        let padded = keys.next_multiple_of(PANEL);
        let panels = head_dim.div_ceil(PANEL);
        zero(&mut scratch.keys, padded * head_dim);
        zero(&mut scratch.values, padded * head_dim);
        zero(&mut scratch.key_panels, panels * padded * PANEL);
        for (key, token) in source.visible(segment).enumerate() {
            let at = token * key_width + kv_head * head_dim;
            let (row, value) = (
                &source.keys[at..][..head_dim],
                &source.values[at..][..head_dim],
            );
            put_transposed(&mut scratch.keys, key, row);
            put_transposed(&mut scratch.values, key, value);
            put_row(&mut scratch.key_panels, padded, key, row);
        }
        let mut gradients = HeadGradients {
            queries: Buffer::new(length * source.shape.group() * head_dim),
            keys: Buffer::new(keys * head_dim),
            values: Buffer::new(keys * head_dim),
        };
        gradients.keys.fill(T::ZERO);
        gradients.values.fill(T::ZERO);
        let level = Level::best();
        for first in (0..length).step_by(QUERIES_PER_TILE) {
            let tile = Tile {
                given: self,
                segment,
                kv_head,
                first,
                last: length.min(first + QUERIES_PER_TILE),
            };
            match level.rows() {
                // As many accumulators as registers hold beside a panel's vectors and a number.
                12 => tile.backward::<12, 8>(level, scratch, &mut gradients),
                _ => tile.backward::<6, 4>(level, scratch, &mut gradients),
            }
        }
        gradients
    }
}

/// Some queries of a segment, all heads of one key head.
struct Tile<'a, T> {
    given: &'a Given<'a, T>,
    segment: usize,
    kv_head: usize,
    /// Queries of the segment.
    first: usize,
    last: usize,
}

impl<T: Real> Tile<'_, T> {
    /// Returns the token and the head of a row: row `i` is head `i % group` of query `i / group`.
    fn place(&self, row: usize) -> (usize, usize) {
        let source = self.given.source;
        let group = source.shape.group();
        let token = source.segments[self.segment].start + self.first + row / group;
        (token, self.kv_head * group + row % group)
    }

    fn head<'x>(&self, x: &'x [T], row: usize) -> &'x [T] {
        let shape = self.given.source.shape;
        let (token, head) = self.place(row);
        &x[token * shape.query_width() + head * shape.head_dim..][..shape.head_dim]
    }

    /// Returns how many keys a row sees.
    fn seen(&self, row: usize) -> usize {
        let source = self.given.source;
        source.history(self.segment) + self.first + row / source.shape.group() + 1
    }

    /// Adds the gradients of keys and values, and writes those of the queries. A kernel over rows takes
    /// `R` of them, one over columns `C`.
    fn backward<const R: usize, const C: usize>(
        &self,
        level: Level,
        scratch: &mut Scratch<T>,
        gradients: &mut HeadGradients<T>,
    ) {
        let Given {
            queries,
            source,
            doutput,
            ..
        } = *self.given;
        let HeadShape { head_dim, .. } = source.shape;
        let group = source.shape.group();
        let rows = (self.last - self.first) * group;
        let panels = head_dim.div_ceil(PANEL);
        let keys = self.seen(rows - 1).next_multiple_of(PANEL);
        // An odd number of cache lines, so that rows lie in different sets of the cache.
        let stride = keys + LANES;
        // A kernel reads whole tiles of rows; what it makes of those that are not there goes nowhere.
        let tiled = rows.next_multiple_of(R);
        for (scratch, len) in [
            (&mut scratch.probabilities, tiled * stride),
            (&mut scratch.gradients, tiled * stride),
            (&mut scratch.queries, tiled * head_dim),
            (&mut scratch.outputs, tiled * head_dim),
            (&mut scratch.query_panels, panels * rows * PANEL),
            (&mut scratch.output_panels, panels * rows * PANEL),
        ] {
            reserve(scratch, len);
        }
        for row in 0..rows {
            for (x, tile, panels) in [
                (queries, &mut scratch.queries, &mut scratch.query_panels),
                (doutput, &mut scratch.outputs, &mut scratch.output_panels),
            ] {
                let head = self.head(x, row);
                tile[row * head_dim..][..head_dim].copy_from_slice(head);
                put_row(panels, rows, row, head);
            }
        }
        let Scratch {
            probabilities,
            gradients: dscores,
            ..
        } = scratch;
        for start in (0..rows).step_by(R) {
            let count = R.min(rows - start);
            let seen = self.seen(start + count - 1);
            for (x, blocks, target) in [
                (&scratch.queries, &scratch.keys, &mut *probabilities),
                (&scratch.outputs, &scratch.values, &mut *dscores),
            ] {
                let blocks = blocks.chunks_exact(head_dim * PANEL);
                for (index, panel) in blocks.take(seen.div_ceil(PANEL)).enumerate() {
                    level.run(RowsTimesPanel::<T, _, R>::new(
                        &x[start * head_dim..],
                        head_dim,
                        panel,
                        #[inline(always)]
                        |row, sums: &[T; PANEL]| {
                            if row < count {
                                let at = (start + row) * stride + index * PANEL;
                                target[at..at + PANEL].copy_from_slice(sums);
                            }
                        },
                    ));
                }
            }
            self.score_gradients(start..start + count, stride, C, probabilities, dscores);
            let padded = scratch.key_panels.len() / (panels * PANEL);
            for panel in 0..panels {
                let (column, width) = (panel * PANEL, PANEL.min(head_dim - panel * PANEL));
                level.run(RowsTimesPanel::<T, _, R>::new(
                    &dscores[start * stride..],
                    stride,
                    &scratch.key_panels[panel * padded * PANEL..][..seen * PANEL],
                    #[inline(always)]
                    |row, sums: &[T; PANEL]| {
                        if row < count {
                            let at = (self.first * group + start + row) * head_dim + column;
                            let target = &mut gradients.queries[at..at + width];
                            target.copy_from_slice(&sums[..width]);
                        }
                    },
                ));
            }
        }
        let all = self.seen(rows - 1);
        let before = self.seen(0);
        for first in (0..all).step_by(C) {
            // The first query that sees the first of these keys.
            let from = (first + 1).saturating_sub(before) * group;
            for panel in 0..panels {
                let (column, width) = (panel * PANEL, PANEL.min(head_dim - panel * PANEL));
                for (x, panels, target) in [
                    (
                        &*probabilities,
                        &scratch.output_panels,
                        &mut gradients.values,
                    ),
                    (&*dscores, &scratch.query_panels, &mut gradients.keys),
                ] {
                    level.run(ColumnsTimesPanel::<T, _, C>::new(
                        &x[from * stride + first..],
                        stride,
                        &panels[(panel * rows + from) * PANEL..][..(rows - from) * PANEL],
                        #[inline(always)]
                        |key, sums: &[T; PANEL]| {
                            if first + key < all {
                                let at = (first + key) * head_dim + column;
                                let target = &mut target[at..at + width];
                                match <&mut [T; PANEL]>::try_from(&mut *target) {
                                    Ok(target) => add_panel(target, sums),
                                    Err(_) => add(target, &sums[..width]),
                                }
                            }
                        },
                    ));
                }
            }
        }
    }

    /// Turns scores into probabilities, and the gradients of probabilities into those of scores. Both are
    /// zero for keys that a row does not see and that are read: those that another of the rows sees, and
    /// those of `columns` together.
    fn score_gradients(
        &self,
        rows: std::ops::Range<usize>,
        stride: usize,
        columns: usize,
        scores: &mut [T],
        gradients: &mut [T],
    ) {
        let shape = self.given.source.shape;
        let scale = T::from_f64(shape.scale());
        vectorized(
            #[inline(always)]
            || {
                let all_seen = self.seen(rows.end - 1);
                for row in rows {
                    let (token, head) = self.place(row);
                    let log_sum_exp = self.given.log_sum_exp[token * shape.heads + head];
                    let seen = self.seen(row);
                    let read = all_seen.max(seen.next_multiple_of(columns));
                    let (p, unseen) = scores[row * stride..][..read].split_at_mut(seen);
                    let (d, no_gradients) = gradients[row * stride..][..read].split_at_mut(seen);
                    for p in p.iter_mut() {
                        *p = (*p * scale - log_sum_exp).exp();
                    }
                    let mean = lane_sum(seen, |key| p[key] * d[key]);
                    for (d, &p) in d.iter_mut().zip(&*p) {
                        *d = p * (*d - mean) * scale;
                    }
                    unseen.fill(T::ZERO);
                    no_gradients.fill(T::ZERO);
                }
            },
        );
    }
}

#[inline(always)]
fn add<T: Real>(target: &mut [T], sums: &[T]) {
    for (target, &sum) in target.iter_mut().zip(sums) {
        *target += sum;
    }
}

/// Adds whole vectors, read before they are written: what may be the same memory is not made into them.
#[inline(always)]
fn add_panel<T: Real>(target: &mut [T; PANEL], sums: &[T; PANEL]) {
    let (mut joint, sums) = (*target, *sums);
    for (target, sum) in joint.iter_mut().zip(sums) {
        *target += sum;
    }
    *target = joint;
}

/// `R` rows, `stride` apart, times a panel `[inputs, PANEL]`: each row's sums are handed to `write`.
struct RowsTimesPanel<'a, T, W, const R: usize> {
    x: &'a [T],
    stride: usize,
    panel: &'a [T],
    write: W,
}

impl<T: Real, W: FnMut(usize, &[T; PANEL]), const R: usize> WithSimd
    for RowsTimesPanel<'_, T, W, R>
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        multiply_vectors!(self, simd, T, S);
    }
}

impl<'a, T: Real, W: FnMut(usize, &[T; PANEL]), const R: usize> RowsTimesPanel<'a, T, W, R> {
    /// # Panics
    ///
    /// Panics if there are not as many rows, or if they are shorter than the panel.
    fn new(x: &'a [T], stride: usize, panel: &'a [T], write: W) -> Self {
        let inputs = panel.len() / PANEL;
        assert!(x.len() >= (R - 1) * stride + inputs, "rows of a tile");
        Self {
            x,
            stride,
            panel,
            write,
        }
    }

    #[inline(always)]
    fn multiply<S: Simd, const N: usize>(mut self, simd: S) {
        let (panel, _) = self.panel.as_chunks::<PANEL>();
        let mut sums = [[T::ZERO; PANEL]; R];
        for first in (0..PANEL).step_by(N) {
            let mut accumulators = [[T::splat(simd, T::ZERO); VECTORS]; R];
            for (input, weights) in panel.iter().enumerate() {
                let mut x = [T::ZERO; R];
                for (row, x) in x.iter_mut().enumerate() {
                    // Addressed from a few of the rows, as registers are few.
                    let at = row / 3 * (3 * self.stride) + row % 3 * self.stride + input;
                    #[expect(unsafe_code, reason = "a check for each is half of the kernel's time")]
                    // SAFETY: `new` has found `R` rows of as many inputs as the panel has.
                    let number = unsafe { *self.x.get_unchecked(at) };
                    *x = number;
                }
                accumulate::<S, T, N, R>(simd, x, weights, first, &mut accumulators);
            }
            store::<S, T, N, R>(&accumulators, first, &mut sums);
        }
        for (row, sums) in sums.iter().enumerate() {
            (self.write)(row, sums);
        }
    }
}

/// `C` columns times a panel: rows of `x` start `stride` apart, and each column's sums over them are handed
/// to `write`.
struct ColumnsTimesPanel<'a, T, W, const C: usize> {
    x: &'a [T],
    stride: usize,
    panel: &'a [T],
    write: W,
}

impl<T: Real, W: FnMut(usize, &[T; PANEL]), const C: usize> WithSimd
    for ColumnsTimesPanel<'_, T, W, C>
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        multiply_vectors!(self, simd, T, S);
    }
}

impl<'a, T: Real, W: FnMut(usize, &[T; PANEL]), const C: usize> ColumnsTimesPanel<'a, T, W, C> {
    fn new(x: &'a [T], stride: usize, panel: &'a [T], write: W) -> Self {
        Self {
            x,
            stride,
            panel,
            write,
        }
    }

    #[inline(always)]
    fn multiply<S: Simd, const N: usize>(mut self, simd: S) {
        let (panel, _) = self.panel.as_chunks::<PANEL>();
        let mut sums = [[T::ZERO; PANEL]; C];
        for first in (0..PANEL).step_by(N) {
            let mut accumulators = [[T::splat(simd, T::ZERO); VECTORS]; C];
            for (x, weights) in self.x.chunks(self.stride).zip(panel) {
                let x = *x
                    .first_chunk::<C>()
                    .expect("rows are longer than what is read of them");
                accumulate::<S, T, N, C>(simd, x, weights, first, &mut accumulators);
            }
            store::<S, T, N, C>(&accumulators, first, &mut sums);
        }
        for (row, sums) in sums.iter().enumerate() {
            (self.write)(row, sums);
        }
    }
}

/// Adds the products of each number of `x` with `N` of the panel's, those from `first` on.
#[inline(always)]
fn accumulate<S: Simd, T: Real, const N: usize, const R: usize>(
    simd: S,
    x: [T; R],
    weights: &[T; PANEL],
    first: usize,
    accumulators: &mut [[T::Vector<S>; VECTORS]; R],
) {
    let weights = T::vectors::<S>(&weights[first..first + N]);
    let weights = [weights[0], weights[1]];
    for row in 0..R {
        let x = T::splat(simd, x[row]);
        for vector in 0..VECTORS {
            let sum = accumulators[row][vector];
            accumulators[row][vector] = T::multiply_add(simd, x, weights[vector], sum);
        }
    }
}

#[inline(always)]
fn store<S: Simd, T: Real, const N: usize, const R: usize>(
    accumulators: &[[T::Vector<S>; VECTORS]; R],
    first: usize,
    sums: &mut [[T; PANEL]; R],
) {
    for (sums, accumulators) in sums.iter_mut().zip(accumulators) {
        T::vectors_mut::<S>(&mut sums[first..first + N]).copy_from_slice(accumulators);
    }
}
