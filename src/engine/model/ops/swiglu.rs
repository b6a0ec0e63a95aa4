//! The gate of the feed-forward layer (Shazeer 2020, `SwiGLU`).

use rayon::prelude::*;

use super::{Real, TASK_ELEMENTS, vectorized};

/// Writes `y = silu(gate) * up`.
#[inline(always)]
pub(crate) fn swiglu<T: Real>(gate: &[T], up: &[T], y: &mut [T]) {
    for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
        *y = gate * sigmoid(gate) * up;
    }
}

/// Replaces `gate` by `silu(gate) * up`, on all threads, in the same bits as [`swiglu`].
pub(crate) fn swiglu_in_place<T: Real>(gate: &mut [T], up: &[T]) {
    gate.par_chunks_mut(TASK_ELEMENTS)
        .zip(up.par_chunks(TASK_ELEMENTS))
        .for_each(|(gate, up)| {
            vectorized(
                #[inline(always)]
                || {
                    for (gate, &up) in gate.iter_mut().zip(up) {
                        *gate = *gate * sigmoid(*gate) * up;
                    }
                },
            );
        });
}

/// Replaces `gate` and `up` by their gradients, given the gradient `dy` of the output.
///
/// `d up = dy * silu(gate)` and `d gate = dy * up * s * (1 + gate * (1 - s))` with `s` the sigmoid.
pub(crate) fn swiglu_backward<T: Real>(gate: &mut [T], up: &mut [T], dy: &[T]) {
    gate.par_chunks_mut(TASK_ELEMENTS)
        .zip(up.par_chunks_mut(TASK_ELEMENTS))
        .zip(dy.par_chunks(TASK_ELEMENTS))
        .for_each(|((gate, up), dy)| {
            vectorized(
                #[inline(always)]
                || {
                    for ((gate, up), &dy) in gate.iter_mut().zip(up).zip(dy) {
                        [*gate, *up] = gradients(*gate, *up, dy);
                    }
                },
            );
        });
}

/// Writes what [`swiglu_backward`] makes of `gate` and `up` to `dgate` and `dup`, on one thread.
#[inline(always)]
pub(crate) fn swiglu_backward_to<T: Real>(
    [gate, up]: [&[T]; 2],
    dy: &[T],
    [dgate, dup]: [&mut [T]; 2],
) {
    let sources = gate.iter().zip(up).zip(dy);
    for ((dgate, dup), ((&gate, &up), &dy)) in dgate.iter_mut().zip(dup).zip(sources) {
        [*dgate, *dup] = gradients(gate, up, dy);
    }
}

#[inline(always)]
fn gradients<T: Real>(gate: T, up: T, dy: T) -> [T; 2] {
    let s = sigmoid(gate);
    let silu = gate * s;
    [dy * up * (s + silu * (T::ONE - s)), dy * silu]
}

#[inline(always)]
fn sigmoid<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_give_the_same_bits() {
        let gate: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0) * 0.05).collect();
        let up: Vec<f32> = (0..1000).map(|i| (i as f32).cos()).collect();
        let mut y = vec![0.0; 1000];
        swiglu(&gate, &up, &mut y);
        let mut in_place = gate;
        swiglu_in_place(&mut in_place, &up);
        assert_eq!(in_place, y);
    }

    #[test]
    fn the_gradient_matches_finite_differences() {
        let gate: Vec<f64> = (0..9).map(|i| i as f64 - 4.2).collect();
        let up: Vec<f64> = (0..9).map(|i| (i as f64).cos()).collect();
        let dy: Vec<f64> = (0..9).map(|i| 0.3 + (i as f64).sin()).collect();
        let loss = |gate: &[f64], up: &[f64]| {
            let mut y = vec![0.0; gate.len()];
            swiglu(gate, up, &mut y);
            y.iter().zip(&dy).map(|(y, dy)| y * dy).sum::<f64>()
        };
        let (mut dgate, mut dup) = (gate.clone(), up.clone());
        swiglu_backward(&mut dgate, &mut dup, &dy);
        let step = 1e-6;
        for i in 0..gate.len() {
            for (which, gradient) in [dgate[i], dup[i]].into_iter().enumerate() {
                let shifted = |by: f64| {
                    let (mut gate, mut up) = (gate.clone(), up.clone());
                    if which == 0 {
                        gate[i] += by;
                    } else {
                        up[i] += by;
                    }
                    loss(&gate, &up)
                };
                let slope = (shifted(step) - shifted(-step)) / (2.0 * step);
                assert!(
                    (slope - gradient).abs() < 1e-7,
                    "{i} {which}: {slope} {gradient}"
                );
            }
        }
    }
}
