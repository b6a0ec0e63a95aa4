//! Matrix products of any strides, through the `gemm` crate: gradients of whole matrices.
//! Products with weights are in [`panels`](super::panels).

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
        let needed = rows * columns;
        assert!(
            needed <= values.len(),
            "matrix of {needed} elements in {}",
            values.len()
        );
        Self {
            values,
            rows,
            columns,
            row_stride: columns,
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
