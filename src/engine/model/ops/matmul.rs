//! Matrix products, through the `gemm` crate.

use gemm::Parallelism;

use super::Real;

/// A read-only view of a matrix: any strides, no copies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    values: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// Views `values` as `rows` rows of `columns`, one after the other.
    pub(crate) fn new(values: &'a [T], rows: usize, columns: usize) -> Self {
        Self::strided(values, rows, columns, columns)
    }

    /// Views `values` as rows of `columns` that start `row_stride` apart.
    pub(crate) fn strided(values: &'a [T], rows: usize, columns: usize, row_stride: usize) -> Self {
        let needed = if rows == 0 || columns == 0 {
            0
        } else {
            (rows - 1) * row_stride + columns
        };
        assert!(
            needed <= values.len(),
            "matrix of {needed} elements in {}",
            values.len()
        );
        Self {
            values,
            rows,
            columns,
            row_stride,
            column_stride: 1,
        }
    }

    /// Swaps rows and columns.
    pub(crate) fn t(self) -> Self {
        Self {
            values: self.values,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }
}

/// How a product joins what the target already holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Write {
    /// The old values are not read.
    Replace,
    /// The product is added to them.
    Add,
}

/// Computes `c = alpha * a * b` or `c += alpha * a * b`.
///
/// `a` is `[m, k]`, `b` is `[k, n]`; row `i` of `c` starts at `i * row_stride`. Runs on rayon's
/// threads if `parallel`.
///
/// # Panics
///
/// Panics if the shapes do not fit.
pub(crate) fn matmul<T: Real>(
    alpha: T,
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    write: Write,
    c: &mut [T],
    row_stride: usize,
    parallel: bool,
) {
    let (m, k, n) = (a.rows, a.columns, b.columns);
    assert_eq!(k, b.rows, "inner dimensions");
    if m == 0 || n == 0 {
        return;
    }
    assert!(
        n <= row_stride && (m - 1) * row_stride + n <= c.len(),
        "target of {}",
        c.len()
    );
    let parallelism = if parallel {
        Parallelism::Rayon(0)
    } else {
        Parallelism::None
    };
    let stride = |s: usize| isize::try_from(s).expect("slices are shorter than isize::MAX");
    #[expect(unsafe_code, reason = "the product's entry point takes pointers")]
    // SAFETY: the constructors of `Matrix` and the assertion above keep every element that the
    // strides reach inside its slice; `c` is borrowed mutably, so it aliases neither operand.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            1,
            stride(row_stride),
            write == Write::Add,
            a.values.as_ptr(),
            stride(a.column_stride),
            stride(a.row_stride),
            b.values.as_ptr(),
            stride(b.column_stride),
            stride(b.row_stride),
            T::ONE,
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// Computes `y = alpha * x W^T` or `y += alpha * x W^T`, with `x` `[m, k]`, `weight` `[n, k]` and `y`
/// `[m, n]`.
///
/// A row of `y` has the same bits whatever `m` is. The library switches to kernels with another
/// order of summation for very small products, so those are padded with zero rows to a size where
/// it does not.
pub(crate) fn linear<T: Real>(
    alpha: T,
    x: &[T],
    m: usize,
    weight: Matrix<'_, T>,
    write: Write,
    y: &mut [T],
) {
    let (n, k) = (weight.rows, weight.columns);
    // gemm 0.19 `gemm_basic_generic`: vector products for a single row, and horizontal kernels for
    // m * n <= 256 if the weight's rows are contiguous.
    let rows = if weight.column_stride == 1 {
        (256 / n.max(1) + 1).max(2)
    } else {
        2
    };
    let w = weight.t();
    if m >= rows {
        matmul(alpha, Matrix::new(x, m, k), w, write, y, n, true);
        return;
    }
    let mut padded = vec![T::ZERO; rows * k];
    padded[..m * k].copy_from_slice(&x[..m * k]);
    let mut result = vec![T::ZERO; rows * n];
    if write == Write::Add {
        result[..m * n].copy_from_slice(&y[..m * n]);
    }
    matmul(
        alpha,
        Matrix::new(&padded, rows, k),
        w,
        write,
        &mut result,
        n,
        true,
    );
    y[..m * n].copy_from_slice(&result[..m * n]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 24) as f32 - 0.5
            })
            .collect()
    }

    #[test]
    fn a_product_matches_the_definition_for_every_transposition() {
        let (m, k, n) = (3, 5, 4);
        let a: Vec<f64> = (0..m * k).map(|i| i as f64 * 0.3 - 2.0).collect();
        let b: Vec<f64> = (0..k * n).map(|i| 1.0 - i as f64 * 0.2).collect();
        let mut a_t = vec![0.0; m * k];
        let mut b_t = vec![0.0; k * n];
        for i in 0..m {
            for l in 0..k {
                a_t[l * m + i] = a[i * k + l];
            }
        }
        for l in 0..k {
            for j in 0..n {
                b_t[j * k + l] = b[l * n + j];
            }
        }
        for (a, b) in [
            (Matrix::new(&a, m, k), Matrix::new(&b, k, n)),
            (Matrix::new(&a_t, k, m).t(), Matrix::new(&b, k, n)),
            (Matrix::new(&a, m, k), Matrix::new(&b_t, n, k).t()),
        ] {
            let mut c = vec![1.0; m * n];
            matmul(2.0, a, b, Write::Add, &mut c, n, false);
            for i in 0..m {
                for j in 0..n {
                    let expected = 1.0
                        + 2.0
                            * (0..k)
                                .map(|l| {
                                    (i as f64 * k as f64 + l as f64).mul_add(0.3, -2.0)
                                        * (1.0 - (l * n + j) as f64 * 0.2)
                                })
                                .sum::<f64>();
                    assert!((c[i * n + j] - expected).abs() < 1e-12);
                }
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_the_rows_beside_it() {
        for (k, n) in [
            (8, 4),
            (16, 48),
            (192, 64),
            (192, 512),
            (576, 192),
            (1536, 576),
        ] {
            let m = 300;
            let x = fill(m * k, 1);
            let w = fill(n * k, 2);
            let mut transposed = vec![0.0; n * k];
            for i in 0..n {
                for j in 0..k {
                    transposed[j * n + i] = w[i * k + j];
                }
            }
            let mut all = vec![0.0; m * n];
            linear(1.0, &x, m, Matrix::new(&w, n, k), Write::Replace, &mut all);
            for weight in [Matrix::new(&w, n, k), Matrix::new(&transposed, k, n).t()] {
                for rows in [1, 2, 3, 5, 8, 17, 64, 65, 129] {
                    let first = 7;
                    let mut some = vec![0.0; rows * n];
                    let x = &x[first * k..(first + rows) * k];
                    linear(1.0, x, rows, weight, Write::Replace, &mut some);
                    assert_eq!(
                        some,
                        all[first * n..(first + rows) * n],
                        "k {k} n {n} rows {rows}"
                    );
                }
            }
        }
    }
}
