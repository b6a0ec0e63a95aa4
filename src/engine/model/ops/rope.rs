//! Rotary position embedding (Su et al. 2021), in Hugging Face's half-split layout.

use std::sync::{Arc, RwLock};

use rayon::prelude::*;

use super::{Real, rows_per_task, vectorized};

/// Cosines and sines of the first positions, grown as longer sequences come.
#[derive(Debug)]
pub(crate) struct RopeTable<T> {
    frequencies: Vec<f32>,
    /// Factor of the rotated vectors.
    scale: f64,
    rows: RwLock<Arc<RopeRows<T>>>,
}

/// Row `p` holds `head_dim / 2` cosines, then as many sines.
#[derive(Debug)]
pub(crate) struct RopeRows<T> {
    values: Vec<T>,
    positions: usize,
}

impl<T: Real> RopeTable<T> {
    /// Makes a table from angular frequencies, in radians per token. Rotated vectors are `scale`
    /// times as long.
    pub(crate) fn new(frequencies: Vec<f32>, scale: f64) -> Self {
        let rows = Arc::new(RopeRows {
            values: Vec::new(),
            positions: 0,
        });
        Self {
            frequencies,
            scale,
            rows: RwLock::new(rows),
        }
    }

    /// Returns a table that covers `positions` at least.
    pub(crate) fn rows(&self, positions: usize) -> Arc<RopeRows<T>> {
        {
            let rows = self
                .rows
                .read()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            if rows.positions >= positions {
                return Arc::clone(&rows);
            }
        }
        let positions = positions.next_power_of_two();
        let half = self.frequencies.len();
        let mut values = Vec::with_capacity(positions * half * 2);
        for position in 0..positions {
            #[expect(clippy::cast_precision_loss, reason = "as transformers does")]
            let angles =
                (self.frequencies.iter()).map(|frequency| f64::from(position as f32 * frequency));
            values.extend(
                angles
                    .clone()
                    .map(|angle| T::from_f64(self.scale * angle.cos())),
            );
            values.extend(angles.map(|angle| T::from_f64(self.scale * angle.sin())));
        }
        let grown = Arc::new(RopeRows { values, positions });
        let mut rows = self
            .rows
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if rows.positions < positions {
            *rows = Arc::clone(&grown);
        }
        grown
    }
}

/// Which way to turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The embedding itself.
    Forward,
    /// Its backward pass: the transpose, which without a scale is the inverse.
    Backward,
}

/// Rotates every head of `x` in place. `x` is `[n, heads * head_dim]`, `positions` is `[n]`.
pub(crate) fn rope<T: Real>(
    x: &mut [T],
    positions: &[u32],
    heads: usize,
    table: &RopeRows<T>,
    head_dim: usize,
    turn: Turn,
) {
    let width = heads * head_dim;
    let half = head_dim / 2;
    let rows = rows_per_task(width);
    x.par_chunks_mut(rows * width)
        .zip(positions.par_chunks(rows))
        .for_each(|(x, positions)| {
            vectorized(
                #[inline(always)]
                || {
                    for (x, &position) in x.chunks_exact_mut(width).zip(positions) {
                        let start = position as usize * head_dim;
                        let (cos, sin) = table.values[start..start + head_dim].split_at(half);
                        for head in x.chunks_exact_mut(head_dim) {
                            let (low, high) = head.split_at_mut(half);
                            for i in 0..half {
                                let (a, b) = (low[i], high[i]);
                                let sin = if turn == Turn::Forward {
                                    sin[i]
                                } else {
                                    -sin[i]
                                };
                                low[i] = a * cos[i] - b * sin;
                                high[i] = b * cos[i] + a * sin;
                            }
                        }
                    }
                },
            );
        });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::RopeScaling;

    #[test]
    fn the_golden_rotation_is_half_split() {
        let golden = crate::engine::model::tests_support::golden("rope_half_split");
        let q = golden.floats("inputs", "q");
        let expected = golden.floats("expected", "q_rot");
        let interleaved = golden.floats("mutants", "interleaved");
        let frequencies = RopeScaling::Default.frequencies(4, 1e6);
        let table = RopeTable::<f64>::new(frequencies, 1.0);
        let mut rotated = q.clone();
        rope(&mut rotated, &[5], 1, &table.rows(6), 4, Turn::Forward);
        for i in 0..4 {
            assert!((rotated[i] - expected[i]).abs() < 1e-6, "{rotated:?}");
            assert!((rotated[i] - interleaved[i]).abs() > 1e-4);
        }
        rope(&mut rotated, &[5], 1, &table.rows(6), 4, Turn::Backward);
        for i in 0..4 {
            assert!(
                (rotated[i] - q[i]).abs() < 1e-12,
                "turning back restores the input"
            );
        }
    }
}
