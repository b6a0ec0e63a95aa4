//! Dropout before the first matrix of each low-rank update, PEFT's `lora_dropout`.
//!
//! A mask is a function of a seed, the tokens up to a place, a module and a feature, and of nothing else:
//! what stands beside a sequence in a batch, which sequences share a beginning, and the number of threads
//! change no bit of it. So the backward pass, and a run that goes on, make it again. Sequences that begin
//! alike have the same mask as far as they do, which lets them go through the model together.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::PackedBatch;
use super::ops::Real;

/// Distance of the states of neighbouring numbers in `SplitMix64` (Steele, Lea and Flood 2014).
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Its mixing function.
fn mix(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// The masks of the rows of a pass.
#[derive(Debug, Clone)]
pub(super) struct RowDropout {
    /// Names each row's tokens so far.
    keys: Vec<u64>,
    /// Numbers below it drop a feature.
    threshold: u32,
    /// What the others are multiplied by.
    scale: f64,
}

impl RowDropout {
    /// Returns the masks that `seed` gives to the tokens of a batch of whole sequences.
    pub(super) fn new(batch: &PackedBatch, probability: f64, seed: u64) -> Self {
        let mut keys: Vec<u64> = Vec::with_capacity(batch.len());
        for (segment, history) in batch.segments().iter().zip(batch.histories()) {
            let before = history.iter().rfind(|range| !range.is_empty());
            let mut key = before.map_or_else(|| mix(seed), |range| keys[range.end - 1]);
            for &token in &batch.tokens()[segment.clone()] {
                key = mix(key.wrapping_add(GAMMA) ^ u64::from(token));
                keys.push(key);
            }
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a probability below 1, and casts of floats saturate"
        )]
        let threshold = (probability * 2.0_f64.powi(32)).round() as u32;
        Self {
            keys,
            threshold,
            scale: 1.0 / (1.0 - probability),
        }
    }

    /// Returns the masks of some of the rows.
    pub(super) fn part(&self, rows: Range<usize>) -> Self {
        Self {
            keys: self.keys[rows].to_vec(),
            ..*self
        }
    }

    /// Drops features of rows `x` `[rows, width]` on their way into a module, and scales the others up.
    pub(super) fn apply<T: Real>(&self, module: usize, width: usize, x: &mut [T]) {
        let scale = T::from_f64(self.scale);
        let module = mix((module as u64).wrapping_add(GAMMA));
        let rows = x.par_chunks_exact_mut(width).zip(&self.keys);
        rows.for_each(|(row, &key)| {
            let mut state = key ^ module;
            // A number of 64 bits decides about two features.
            for pair in row.chunks_mut(2) {
                state = state.wrapping_add(GAMMA);
                let mut bits = mix(state);
                for value in pair {
                    let is_dropped = bits & u64::from(u32::MAX) < u64::from(self.threshold);
                    *value = if is_dropped { T::ZERO } else { *value * scale };
                    bits >>= 32;
                }
            }
        });
    }

    /// Returns the factors of a module's inputs, `[rows, width]`.
    pub(super) fn factors(
        &self,
        module: usize,
        width: usize,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let mut factors = vec![1.0_f64; self.keys.len() * width];
        self.apply(module, width, &mut factors);
        let factors = Tensor::from_vec(factors, (self.keys.len(), width), &Device::Cpu)?;
        factors.to_dtype(dtype)?.to_device(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: usize = 33;

    fn mask(dropout: &RowDropout, module: usize) -> Vec<Vec<f32>> {
        let mut x = vec![1.0; dropout.keys.len() * WIDTH];
        dropout.apply(module, WIDTH, &mut x);
        x.chunks(WIDTH).map(<[f32]>::to_vec).collect()
    }

    #[test]
    fn a_mask_depends_on_the_tokens_so_far_and_on_nothing_beside_them() {
        let sequences = [vec![1, 2, 3, 4], vec![1, 2, 5], vec![2, 2]];
        let alone: Vec<_> = (sequences.iter())
            .map(|tokens| {
                let batch = PackedBatch::from_sequences([tokens]);
                mask(&RowDropout::new(&batch, 0.3, 7), 1)
            })
            .collect();
        let batch = PackedBatch::from_sequences(&sequences);
        assert_eq!(mask(&RowDropout::new(&batch, 0.3, 7), 1), alone.concat());
        assert_eq!(alone[0][..2], alone[1][..2]);
        assert_ne!(alone[0][2], alone[1][2]);
        assert_ne!(alone[0][1], alone[2][1], "the token before differs");
        // Where sequences share what they begin with.
        let mut tree = PackedBatch::from_sequences([[1, 2]]);
        tree.push_child(0, &[5]);
        tree.push_child(0, &[3]);
        tree.push_child(2, &[4]);
        let dropout = RowDropout::new(&tree, 0.3, 7);
        let found = mask(&dropout, 1);
        assert_eq!(found[2], alone[1][2]);
        assert_eq!(found[3..], alone[0][2..]);
        assert_eq!(mask(&dropout.part(1..4), 1), found[1..4]);
    }

    #[test]
    fn masks_of_other_seeds_modules_and_tokens_are_other_masks_of_the_same_kind() {
        let tokens: Vec<u32> = (0..500).collect();
        let batch = PackedBatch::from_sequences([tokens]);
        let of = |seed, module| mask(&RowDropout::new(&batch, 0.25, seed), module).concat();
        let found = of(1, 2);
        let dropped = found.iter().filter(|&&x| x == 0.0).count() as f64 / found.len() as f64;
        // Six deviations.
        let bound = 6.0 * (0.25 * 0.75 / found.len() as f64).sqrt();
        assert!((dropped - 0.25).abs() < bound, "{dropped}");
        assert!(
            found
                .iter()
                .all(|&x| x == 0.0 || (x - 4.0 / 3.0).abs() < 1e-6)
        );
        for other in [of(2, 2), of(1, 3)] {
            let both = found
                .iter()
                .zip(&other)
                .filter(|(a, b)| **a == 0.0 && **b == 0.0);
            let both = both.count() as f64 / found.len() as f64;
            assert!((both - 0.25 * 0.25).abs() < bound, "{both}");
        }
        // Neighbours, too: features of a row, and rows.
        for distance in [1, 2, WIDTH] {
            let pairs = found.iter().zip(&found[distance..]);
            let both = pairs.filter(|(a, b)| **a == 0.0 && **b == 0.0).count() as f64;
            let both = both / (found.len() - distance) as f64;
            assert!((both - 0.25 * 0.25).abs() < bound, "{both}");
        }
        assert!(of(1, 2) == found);
    }
}
