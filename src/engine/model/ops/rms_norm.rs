//! Root-mean-square normalisation (Zhang and Sennrich 2019, equation 4).

use rayon::prelude::*;

use super::{Real, lane_sum, rows_per_task, vectorized};

/// Rows whose contributions to the weight's gradient are summed in one go.
const GRADIENT_ROWS: usize = 256;

/// Writes `y = x / sqrt(mean(x^2) + eps) * weight` for every row of `weight.len()` elements.
///
/// With `weight` of one head's width it serves as the per-head norm of Qwen3.
pub(crate) fn rms_norm<T: Real>(x: &[T], weight: &[T], eps: f64, y: &mut [T]) {
    let width = weight.len();
    let task = rows_per_task(width) * width;
    let eps = T::from_f64(eps);
    y.par_chunks_mut(task)
        .zip(x.par_chunks(task))
        .for_each(|(y, x)| {
            vectorized(
                #[inline(always)]
                || {
                    for (y, x) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
                        rms_norm_row(x, weight, eps, y);
                    }
                },
            );
        });
}

/// Does what [`rms_norm`] does with one row.
#[inline(always)]
pub(crate) fn rms_norm_row<T: Real>(x: &[T], weight: &[T], eps: T, y: &mut [T]) {
    let scale = inverse_rms(x, eps);
    for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
        *y = x * scale * weight;
    }
}

/// Adds the gradient with respect to `x` to `dx`, and that of the weight to `dweight`.
///
/// `dy` is the gradient of the output. With `r = 1 / sqrt(mean(x^2) + eps)`:
/// `dx = r * (dy * w) - x * r^3 / width * sum(dy * w * x)` and `dw = sum over rows of dy * x * r`.
pub(crate) fn rms_norm_backward<T: Real>(
    x: &[T],
    weight: &[T],
    eps: f64,
    dy: &[T],
    dx: &mut [T],
    dweight: Option<&mut [T]>,
) {
    let width = weight.len();
    let task = GRADIENT_ROWS * width;
    let eps = T::from_f64(eps);
    let inverse_width = T::from_f64(1.0 / width as f64);
    let with_weight = dweight.is_some();
    let partial_sums: Vec<Vec<T>> = dx
        .par_chunks_mut(task)
        .zip(x.par_chunks(task))
        .zip(dy.par_chunks(task))
        .map(|((dx, x), dy)| {
            let mut sums = vec![T::ZERO; if with_weight { width } else { 0 }];
            vectorized(
                #[inline(always)]
                || {
                    let rows = dx.chunks_exact_mut(width).zip(x.chunks_exact(width));
                    for ((dx, x), dy) in rows.zip(dy.chunks_exact(width)) {
                        let scale = inverse_rms(x, eps);
                        let dot = lane_sum(width, |i| dy[i] * weight[i] * x[i]);
                        let shrink = dot * scale * scale * scale * inverse_width;
                        for i in 0..width {
                            dx[i] += dy[i] * weight[i] * scale - x[i] * shrink;
                        }
                        if with_weight {
                            for i in 0..width {
                                sums[i] += dy[i] * x[i] * scale;
                            }
                        }
                    }
                },
            );
            sums
        })
        .collect();
    if let Some(dweight) = dweight {
        for sums in partial_sums {
            for (dweight, sum) in dweight.iter_mut().zip(sums) {
                *dweight += sum;
            }
        }
    }
}

#[inline(always)]
fn inverse_rms<T: Real>(x: &[T], eps: T) -> T {
    let mean = lane_sum(x.len(), |i| x[i] * x[i]) / T::from_f64(x.len() as f64);
    T::ONE / (mean + eps).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gradient_matches_finite_differences() {
        let (rows, width) = (3, 6);
        let x: Vec<f64> = (0..rows * width).map(|i| (i as f64 * 0.7).sin()).collect();
        let w: Vec<f64> = (0..width).map(|i| 0.5 + i as f64 * 0.2).collect();
        let dy: Vec<f64> = (0..rows * width).map(|i| (i as f64 * 1.3).cos()).collect();
        let loss = |x: &[f64], w: &[f64]| {
            let mut y = vec![0.0; x.len()];
            rms_norm(x, w, 1e-6, &mut y);
            y.iter().zip(&dy).map(|(y, dy)| y * dy).sum::<f64>()
        };
        let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; width]);
        rms_norm_backward(&x, &w, 1e-6, &dy, &mut dx, Some(&mut dw));
        let step = 1e-6;
        for i in 0..x.len() {
            let (mut up, mut down) = (x.clone(), x.clone());
            up[i] += step;
            down[i] -= step;
            let slope = (loss(&up, &w) - loss(&down, &w)) / (2.0 * step);
            assert!((slope - dx[i]).abs() < 1e-7, "x[{i}]: {slope} {}", dx[i]);
        }
        for i in 0..width {
            let (mut up, mut down) = (w.clone(), w.clone());
            up[i] += step;
            down[i] -= step;
            let slope = (loss(&x, &up) - loss(&x, &down)) / (2.0 * step);
            assert!((slope - dw[i]).abs() < 1e-7, "w[{i}]: {slope} {}", dw[i]);
        }
    }
}
