//! Estimates from `n` samples of a task, `c` of which passed.

/// Returns the unbiased estimate of pass@k: the chance that at least one of `k` samples passes,
/// 1 − C(n−c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, equation 1).
///
/// Computed as 1 − ∏ (1 − k/i) over i in n−c+1..=n, as in the paper's figure 3, so that no binomial
/// can overflow. None when there are fewer than `k` samples, or `c > n` or `k = 0`.
///
/// # Examples
///
/// ```
/// use wardian::eval::pass_at_k;
///
/// assert_eq!(pass_at_k(10, 3, 1), Some(0.30000000000000004));
/// assert_eq!(pass_at_k(4, 1, 8), None);
/// ```
#[must_use]
pub fn pass_at_k(n: u32, c: u32, k: u32) -> Option<f64> {
    if k == 0 || k > n || c > n {
        return None;
    }
    if n - c < k {
        return Some(1.0); // more samples passed than k draws can leave out
    }
    let none_passes: f64 = (n - c + 1..=n)
        .map(|i| 1.0 - f64::from(k) / f64::from(i))
        .product();
    Some(1.0 - none_passes)
}

/// Returns the estimate of pass^k: the chance that all of `k` samples pass, C(c, k) / C(n, k) (Yao
/// et al. 2024, τ-bench, arXiv:2406.12045, section 3).
///
/// None when there are fewer than `k` samples, or `c > n` or `k = 0`.
#[must_use]
pub fn pass_hat_k(n: u32, c: u32, k: u32) -> Option<f64> {
    if k == 0 || k > n || c > n {
        return None;
    }
    if c < k {
        return Some(0.0);
    }
    Some(
        (0..k)
            .map(|i| f64::from(c - i) / f64::from(n - i))
            .product(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    // From the HumanEval reference implementation (numpy):
    //   def estimator(n, c, k):
    //       if n - c < k: return 1.0
    //       return 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
    // The last column is the biased 1 - (1 - c/n)^k, which must not pass for it.
    const PASS_AT_K: [(u32, u32, u32, f64, f64); 6] = [
        (10, 3, 1, 0.30000000000000004, 0.30000000000000004),
        (10, 0, 5, 0.0, 0.0),
        (10, 10, 5, 1.0, 1.0),
        (200, 37, 10, 0.8773745673794602, 0.8707066800095884),
        (5, 1, 5, 1.0, 0.6723199999999999),
        (5, 4, 2, 1.0, 0.96),
    ];

    #[test]
    fn pass_at_k_agrees_with_the_reference_implementation() {
        for (n, c, k, expected, biased) in PASS_AT_K {
            let value = pass_at_k(n, c, k).unwrap();
            assert!(
                (value - expected).abs() < 1e-9,
                "n={n} c={c} k={k}: {value}"
            );
            assert!(expected == biased || (value - biased).abs() > 1e-3);
        }
    }

    #[test]
    fn pass_hat_k_is_the_ratio_of_binomials() {
        for (n, c, k, expected) in [(8, 6, 2, 15.0 / 28.0), (8, 8, 4, 1.0), (8, 1, 2, 0.0)] {
            let value = pass_hat_k(n, c, k).unwrap();
            assert!(
                (value - expected).abs() < 1e-12,
                "n={n} c={c} k={k}: {value}"
            );
        }
    }

    #[test]
    fn too_few_samples_give_no_estimate() {
        for estimate in [pass_at_k, pass_hat_k] {
            assert_eq!(estimate(4, 2, 5), None);
            assert_eq!(estimate(4, 5, 1), None);
            assert_eq!(estimate(4, 2, 0), None);
            assert_eq!(estimate(0, 0, 1), None);
        }
    }

    /// Counts by trying each choice of `k` of `n` samples, the first `c` of which passed.
    fn by_counting(n: u32, c: u32, k: u32) -> (f64, f64) {
        let passed = (1_u32 << c) - 1;
        let choices: Vec<u32> = (0..1_u32 << n)
            .filter(|set| set.count_ones() == k)
            .collect();
        let share = |holds: fn(u32, u32) -> bool| {
            let count = choices.iter().filter(|set| holds(**set, passed)).count();
            f64::from(u32::try_from(count).unwrap())
                / f64::from(u32::try_from(choices.len()).unwrap())
        };
        (
            share(|set, passed| set & passed != 0),
            share(|set, passed| set & !passed == 0),
        )
    }

    proptest! {
        #[test]
        fn estimates_are_what_counting_gives(n in 1_u32..=10, c in 0_u32..=10, k in 1_u32..=10) {
            let (c, k) = (c.min(n), k.min(n));
            let (any, all) = by_counting(n, c, k);
            prop_assert!((pass_at_k(n, c, k).unwrap() - any).abs() < 1e-12);
            prop_assert!((pass_hat_k(n, c, k).unwrap() - all).abs() < 1e-12);
        }

        #[test]
        fn large_counts_stay_probabilities(n in 1_u32..=100_000, part in 0_u32..=100_000, k in 1_u32..=1000) {
            let (c, k) = (part.min(n), k.min(n));
            prop_assert!((0.0..=1.0).contains(&pass_at_k(n, c, k).unwrap()));
            prop_assert!((0.0..=1.0).contains(&pass_hat_k(n, c, k).unwrap()));
        }
    }
}
