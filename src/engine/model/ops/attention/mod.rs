//! Causal grouped-query attention over packed sequences and trees of them.
//!
//! The forward kernel serves training, prefill and decoding alike: it takes the keys in blocks of
//! [`KEYS_PER_BLOCK`], transposed, so that a query's scores come out a vector at a time. Each query's
//! sums run in the order of the head's dimensions and of the keys, so that its result depends on
//! nothing but the query and the keys before it.

mod backward;

use std::ops::Range;

use rayon::prelude::*;

use super::{Buffer, LANES, Real, lane_max, lane_sum, vectorized};
pub(crate) use backward::attend_backward;

/// Keys in one block: two AVX-512 registers of `f32` scores for each query.
pub(crate) const KEYS_PER_BLOCK: usize = 2 * LANES;

/// Queries that one task of the forward kernel takes.
const QUERIES_PER_TASK: usize = 64;

/// Query rows that share each load of a key: as many as leave registers for the keys themselves.
const ROWS: usize = 4;

/// Number and width of the heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeadShape {
    /// Query heads.
    pub(crate) heads: usize,
    /// Key and value heads; divides `heads`.
    pub(crate) kv_heads: usize,
    /// Width of one head.
    pub(crate) head_dim: usize,
}

impl HeadShape {
    /// Width of a token's queries.
    pub(crate) fn query_width(self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of a token's keys.
    pub(crate) fn key_width(self) -> usize {
        self.kv_heads * self.head_dim
    }

    fn group(self) -> usize {
        self.heads / self.kv_heads
    }

    /// Factor of the scores.
    pub(crate) fn scale(self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }
}

/// Returns the elements of one block of one head: transposed keys, then values.
pub(crate) fn key_block_len(head_dim: usize) -> usize {
    2 * head_dim * KEYS_PER_BLOCK
}

/// Puts one head's key and value into slot `slot` of a block.
#[inline(always)]
pub(crate) fn write_key_value<T: Real>(block: &mut [T], slot: usize, key: &[T], value: &[T]) {
    let head_dim = key.len();
    let (keys, values) = block.split_at_mut(head_dim * KEYS_PER_BLOCK);
    for (d, &key) in key.iter().enumerate() {
        keys[d * KEYS_PER_BLOCK + slot] = key;
    }
    values[slot * head_dim..(slot + 1) * head_dim].copy_from_slice(value);
}

/// Where a segment's keys and values are.
pub(crate) trait KeyValues<T>: Sync {
    /// Returns the number of keys that stand before the segment's first query.
    fn history(&self, segment: usize) -> usize;

    /// Brings the first `keys` keys of a head into `scratch`, if they are not in blocks already.
    fn gather(&self, segment: usize, kv_head: usize, keys: usize, scratch: &mut Vec<T>);

    /// Returns block `index` of a head.
    fn block<'a>(
        &'a self,
        segment: usize,
        kv_head: usize,
        index: usize,
        scratch: &'a [T],
    ) -> &'a [T];
}

/// Keys and values `[n, kv_heads * head_dim]` of a packed batch.
pub(crate) struct PackedKeyValues<'a, T> {
    pub(crate) keys: &'a [T],
    pub(crate) values: &'a [T],
    pub(crate) segments: &'a [Range<usize>],
    /// For each segment, the ranges before its own that it sees.
    pub(crate) histories: &'a [Vec<Range<usize>>],
    pub(crate) shape: HeadShape,
}

impl<T: Real> PackedKeyValues<'_, T> {
    /// Returns the tokens that a segment's last token sees, oldest first.
    fn visible(&self, segment: usize) -> impl Iterator<Item = usize> {
        let own = self.segments[segment].clone();
        self.histories[segment]
            .iter()
            .cloned()
            .chain(std::iter::once(own))
            .flatten()
    }
}

impl<T: Real> KeyValues<T> for PackedKeyValues<'_, T> {
    fn history(&self, segment: usize) -> usize {
        self.histories[segment].iter().map(Range::len).sum()
    }

    fn gather(&self, segment: usize, kv_head: usize, keys: usize, scratch: &mut Vec<T>) {
        let HeadShape { head_dim, .. } = self.shape;
        let width = self.shape.key_width();
        let block_len = key_block_len(head_dim);
        let blocks = keys.div_ceil(KEYS_PER_BLOCK);
        if scratch.len() < blocks * block_len {
            scratch.resize(blocks * block_len, T::ZERO);
        }
        for (key, token) in self.visible(segment).take(keys).enumerate() {
            let at = token * width + kv_head * head_dim;
            let block = key / KEYS_PER_BLOCK * block_len;
            write_key_value(
                &mut scratch[block..block + block_len],
                key % KEYS_PER_BLOCK,
                &self.keys[at..at + head_dim],
                &self.values[at..at + head_dim],
            );
        }
    }

    fn block<'a>(
        &'a self,
        _segment: usize,
        _kv_head: usize,
        index: usize,
        scratch: &'a [T],
    ) -> &'a [T] {
        let block_len = key_block_len(self.shape.head_dim);
        &scratch[index * block_len..(index + 1) * block_len]
    }
}

/// The last tokens of some segments of `source`, each a segment of its own.
pub(crate) struct LastTokens<'a, S> {
    pub(crate) source: &'a S,
    pub(crate) all: &'a [Range<usize>],
    /// Indices into `all`; none of an empty segment.
    pub(crate) segments: &'a [usize],
}

impl<T, S: KeyValues<T>> KeyValues<T> for LastTokens<'_, S> {
    fn history(&self, segment: usize) -> usize {
        let segment = self.segments[segment];
        self.source.history(segment) + self.all[segment].len() - 1
    }

    fn gather(&self, segment: usize, kv_head: usize, keys: usize, scratch: &mut Vec<T>) {
        self.source
            .gather(self.segments[segment], kv_head, keys, scratch);
    }

    fn block<'a>(
        &'a self,
        segment: usize,
        kv_head: usize,
        index: usize,
        scratch: &'a [T],
    ) -> &'a [T] {
        self.source
            .block(self.segments[segment], kv_head, index, scratch)
    }
}

/// What [`attend`] returns.
pub(crate) struct Attention<T: Real> {
    /// Weighted values, `[n, heads * head_dim]`.
    pub(crate) output: Buffer<T>,
    /// Log-sum-exp of each query's scaled scores, `[n, heads]`.
    pub(crate) log_sum_exp: Vec<T>,
}

/// Scratch of one thread.
struct Scratch<T> {
    blocks: Vec<T>,
    queries: Vec<T>,
    scores: Vec<T>,
    rows: Vec<T>,
}

/// Attends from `queries` `[n, heads * head_dim]` to `source`, causally within each segment.
pub(crate) fn attend<T: Real>(
    queries: &[T],
    segments: &[Range<usize>],
    shape: HeadShape,
    source: &impl KeyValues<T>,
) -> Attention<T> {
    let tokens = segments.last().map_or(0, |segment| segment.end);
    let mut output = Buffer::new(tokens * shape.query_width());
    let mut log_sum_exp = vec![T::ZERO; tokens * shape.heads];
    let mut tasks = Vec::new();
    let (mut rest, mut rest_lse) = (&mut output[..], log_sum_exp.as_mut_slice());
    for (index, segment) in segments.iter().enumerate() {
        let mut start = segment.start;
        while start < segment.end {
            let end = segment.end.min(start + QUERIES_PER_TASK);
            let (rows, after) = rest.split_at_mut((end - start) * shape.query_width());
            let (lse, after_lse) = rest_lse.split_at_mut((end - start) * shape.heads);
            (rest, rest_lse) = (after, after_lse);
            tasks.push((index, start - segment.start, start..end, rows, lse));
            start = end;
        }
    }
    tasks.into_par_iter().for_each_init(
        || Scratch {
            blocks: Vec::new(),
            queries: vec![T::ZERO; ROWS * shape.head_dim],
            scores: Vec::new(),
            rows: vec![T::ZERO; ROWS * shape.head_dim],
        },
        |scratch, (segment, offset, range, rows, lse)| {
            let first_key = source.history(segment) + offset;
            let queries = &queries[range.start * shape.query_width()..];
            vectorized(
                #[inline(always)]
                || {
                    attend_task(
                        queries,
                        range.len(),
                        segment,
                        first_key,
                        shape,
                        source,
                        scratch,
                        rows,
                        lse,
                    );
                },
            );
        },
    );
    Attention {
        output,
        log_sum_exp,
    }
}

/// Attends from `count` queries of one segment, the first of which sees `first_key + 1` keys.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "a row indexes several arrays")]
fn attend_task<T: Real>(
    queries: &[T],
    count: usize,
    segment: usize,
    first_key: usize,
    shape: HeadShape,
    source: &impl KeyValues<T>,
    scratch: &mut Scratch<T>,
    output: &mut [T],
    log_sum_exp: &mut [T],
) {
    let HeadShape {
        heads,
        kv_heads,
        head_dim,
    } = shape;
    let (group, width) = (shape.group(), shape.query_width());
    let scale = T::from_f64(shape.scale());
    for kv_head in 0..kv_heads {
        source.gather(segment, kv_head, first_key + count, &mut scratch.blocks);
        let total = count * group;
        let mut done = 0;
        while done < total {
            let rows = ROWS.min(total - done);
            // Row `i` is head `i % group` of query `i / group`.
            let place = |row: usize| {
                let (query, head) = ((done + row) / group, kv_head * group + (done + row) % group);
                (query, head)
            };
            let mut seen = [0; ROWS];
            for row in 0..rows {
                let (query, head) = place(row);
                let at = query * width + head * head_dim;
                seen[row] = first_key + query + 1;
                for d in 0..head_dim {
                    scratch.queries[row * head_dim + d] = queries[at + d] * scale;
                }
            }
            let blocks = &scratch.blocks;
            let block = |index| source.block(segment, kv_head, index, blocks);
            let (q, s, o) = (&scratch.queries, &mut scratch.scores, &mut scratch.rows);
            let mut lse = [T::ZERO; ROWS];
            match rows {
                1 => attend_rows::<T, 1>(head_dim, q, &seen, block, s, o, &mut lse),
                2 => attend_rows::<T, 2>(head_dim, q, &seen, block, s, o, &mut lse),
                3 => attend_rows::<T, 3>(head_dim, q, &seen, block, s, o, &mut lse),
                _ => attend_rows::<T, ROWS>(head_dim, q, &seen, block, s, o, &mut lse),
            }
            for row in 0..rows {
                let (query, head) = place(row);
                let at = query * width + head * head_dim;
                output[at..at + head_dim]
                    .copy_from_slice(&scratch.rows[row * head_dim..(row + 1) * head_dim]);
                log_sum_exp[query * heads + head] = lse[row];
            }
            done += rows;
        }
    }
}

/// Attends from `R` scaled query rows, of which row `r` sees the first `seen[r]` keys.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "a row indexes several arrays")]
fn attend_rows<'k, T: Real, const R: usize>(
    head_dim: usize,
    queries: &[T],
    seen: &[usize; ROWS],
    block: impl Fn(usize) -> &'k [T],
    scores: &mut Vec<T>,
    output: &mut [T],
    log_sum_exp: &mut [T; ROWS],
) {
    let longest = seen[..R].iter().copied().fold(0, usize::max);
    let blocks = longest.div_ceil(KEYS_PER_BLOCK);
    let stride = blocks * KEYS_PER_BLOCK;
    if scores.len() < R * stride {
        scores.resize(R * stride, T::ZERO);
    }
    for index in 0..blocks {
        let keys = &block(index)[..head_dim * KEYS_PER_BLOCK];
        let mut sums = [[[T::ZERO; LANES]; 2]; R];
        for (d, keys) in keys.chunks_exact(KEYS_PER_BLOCK).enumerate() {
            let (low, high) = keys.split_at(LANES);
            for row in 0..R {
                let query = queries[row * head_dim + d];
                let [sum_low, sum_high] = &mut sums[row];
                add_scaled(sum_low, query, low);
                add_scaled(sum_high, query, high);
            }
        }
        for row in 0..R {
            let at = row * stride + index * KEYS_PER_BLOCK;
            scores[at..at + LANES].copy_from_slice(&sums[row][0]);
            scores[at + LANES..at + 2 * LANES].copy_from_slice(&sums[row][1]);
        }
    }
    let mut inverse = [T::ZERO; R];
    for row in 0..R {
        let scores = &mut scores[row * stride..(row + 1) * stride];
        let (seen, unseen) = scores.split_at_mut(seen[row]);
        let max = lane_max(seen.len(), |i| seen[i]);
        for score in seen.iter_mut() {
            *score = (*score - max).exp();
        }
        let sum = lane_sum(seen.len(), |i| seen[i]);
        unseen.fill(T::ZERO);
        inverse[row] = T::ONE / sum;
        log_sum_exp[row] = max + sum.ln();
    }
    let whole = head_dim - head_dim % LANES;
    let scores: [&[T]; R] = std::array::from_fn(|row| &scores[row * stride..][..longest]);
    let pairs = head_dim - head_dim % (2 * LANES);
    for first in (0..pairs).step_by(2 * LANES) {
        let mut sums = [[[T::ZERO; LANES]; 2]; R];
        for (index, start) in (0..longest).step_by(KEYS_PER_BLOCK).enumerate() {
            let values = &block(index)[head_dim * KEYS_PER_BLOCK + first..];
            let keys = KEYS_PER_BLOCK.min(longest - start);
            let scores: [&[T]; R] = std::array::from_fn(|row| &scores[row][start..start + keys]);
            for key in 0..keys {
                let (low, high) = values[key * head_dim..][..2 * LANES].split_at(LANES);
                for row in 0..R {
                    let score = scores[row][key];
                    let [sum_low, sum_high] = &mut sums[row];
                    add_scaled(sum_low, score, low);
                    add_scaled(sum_high, score, high);
                }
            }
        }
        for row in 0..R {
            let output = &mut output[row * head_dim + first..][..2 * LANES];
            for (output, sums) in output.chunks_exact_mut(LANES).zip(&sums[row]) {
                for (output, &sum) in output.iter_mut().zip(sums) {
                    *output = sum * inverse[row];
                }
            }
        }
    }
    for first in (pairs..whole).step_by(LANES) {
        let mut sums = [[T::ZERO; LANES]; R];
        for key in 0..longest {
            let values = &block(key / KEYS_PER_BLOCK)[head_dim * KEYS_PER_BLOCK..];
            let at = key % KEYS_PER_BLOCK * head_dim + first;
            let values = &values[at..at + LANES];
            for row in 0..R {
                add_scaled(&mut sums[row], scores[row][key], values);
            }
        }
        for row in 0..R {
            let output = &mut output[row * head_dim + first..row * head_dim + first + LANES];
            for (output, &sum) in output.iter_mut().zip(&sums[row]) {
                *output = sum * inverse[row];
            }
        }
    }
    for d in whole..head_dim {
        for row in 0..R {
            let mut sum = T::ZERO;
            for key in 0..longest {
                let values = &block(key / KEYS_PER_BLOCK)[head_dim * KEYS_PER_BLOCK..];
                let value = values[key % KEYS_PER_BLOCK * head_dim + d];
                sum = scores[row][key].mul_add(value, sum);
            }
            output[row * head_dim + d] = sum * inverse[row];
        }
    }
}

#[inline(always)]
fn add_scaled<T: Real>(sums: &mut [T; LANES], scale: T, values: &[T]) {
    let values: &[T; LANES] = values.try_into().expect("a whole vector");
    for (sum, &value) in sums.iter_mut().zip(values) {
        *sum = scale.mul_add(value, *sum);
    }
}

#[cfg(test)]
mod tests;
