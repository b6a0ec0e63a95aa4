use serde_json::Value;

use super::*;
use crate::engine::model::ops::{RowStatistics, log_softmax_gradient, row_statistics};
use crate::engine::model::tests_support::{GoldenCase, golden};

/// The batch that most golden cases share.
struct Batch {
    logp: Vec<Vec<f64>>,
    old: Vec<Vec<f64>>,
    sampled: Vec<Vec<f64>>,
    reference: Option<Vec<Vec<f64>>>,
    mask: Vec<Vec<f64>>,
    advantages: Vec<f64>,
}

impl Batch {
    fn of(case: &GoldenCase) -> Self {
        let old = case.rows("inputs", "logp_old");
        Self {
            logp: case.rows("inputs", "logp_new"),
            sampled: old.clone(),
            old,
            reference: None,
            mask: case.rows("inputs", "mask"),
            advantages: case.floats("inputs", "advantages"),
        }
    }

    fn counts(&self) -> Vec<usize> {
        self.mask
            .iter()
            .map(|row| row.iter().filter(|&&m| m > 0.0).count())
            .collect()
    }

    /// Returns the terms of a row's tokens in the loss, each with its place.
    fn terms(&self, config: &LossConfig, row: usize) -> Vec<(usize, TokenTerm)> {
        let places: Vec<usize> = (0..self.mask[row].len())
            .filter(|&t| self.mask[row][t] > 0.0)
            .collect();
        let pick =
            |rows: &[Vec<f64>]| -> Vec<f64> { places.iter().map(|&t| rows[row][t]).collect() };
        let (logprobs, old, sampled) = (pick(&self.logp), pick(&self.old), pick(&self.sampled));
        let reference = self.reference.as_ref().map(|rows| pick(rows));
        let terms = config.terms(SequenceTokens {
            logprobs: &logprobs,
            old: &old,
            sampled: &sampled,
            reference: reference.as_deref().unwrap_or_default(),
            advantages: &vec![self.advantages[row]; logprobs.len()],
        });
        places.into_iter().zip(terms).collect()
    }

    /// Returns the loss, its gradient and the metrics over some of the rows.
    fn evaluate(
        &self,
        config: &LossConfig,
        totals: StepTotals,
        rows: &[usize],
    ) -> (Vec<Vec<f64>>, LossMetrics) {
        let mut metrics = LossMetrics::default();
        let counts = self.counts();
        let mut gradient = vec![vec![0.0; 5]; self.logp.len()];
        for &row in rows {
            let weight = config.token_weight(totals, counts[row]);
            for (t, term) in self.terms(config, row) {
                gradient[row][t] = term.gradient * weight;
                metrics.add(&term, weight, 0.0, self.sampled[row][t] - self.logp[row][t]);
            }
        }
        (gradient, metrics)
    }

    fn whole(&self, config: &LossConfig) -> (Vec<Vec<f64>>, LossMetrics) {
        let totals = config.totals(self.counts());
        self.evaluate(config, totals, &[0, 1, 2, 3])
    }
}

fn clipped(epsilon_low: f64, epsilon_high: f64) -> Surrogate {
    Surrogate::Clipped {
        low: 1.0 - epsilon_low,
        high: 1.0 + epsilon_high,
        dual_clip: None,
    }
}

/// Returns the term of a single token.
fn token(
    config: &LossConfig,
    logprob: f64,
    old: f64,
    reference: Option<f64>,
    advantage: f64,
) -> TokenTerm {
    config.terms(SequenceTokens {
        logprobs: &[logprob],
        old: &[old],
        sampled: &[old],
        reference: reference.as_slice(),
        advantages: &[advantage],
    })[0]
}

#[track_caller]
fn assert_rows(found: &[Vec<f64>], expected: &[Vec<f64>]) {
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        // Exactly zero on clipped and masked tokens.
        assert_eq!(*found == 0.0, *expected == 0.0, "{found} {expected}");
    }
}

#[track_caller]
fn assert_golden(name: &str, config: &LossConfig, mutants: &[&str]) {
    let case = golden(name);
    let (gradient, metrics) = Batch::of(&case).whole(config);
    assert!(
        (metrics.loss - case.float("expected", "loss")).abs() < 1e-6,
        "{}",
        metrics.loss
    );
    assert_rows(&gradient, &case.rows("expected", "grad_wrt_logp_new"));
    for (found, key) in [
        (metrics.clip_ratio_low(), "clip_ratio_low_mean"),
        (metrics.clip_ratio_high(), "clip_ratio_high_mean"),
        (metrics.clip_ratio(), "clip_ratio_region_mean"),
    ] {
        assert!((found - case.float("expected", key)).abs() < 1e-9, "{key}");
    }
    for mutant in mutants {
        assert!(
            (metrics.loss - case.float("mutants", mutant)).abs() > 1e-3,
            "{mutant}"
        );
    }
}

#[test]
fn sequence_mean_matches_trl() {
    let config = LossConfig {
        aggregation: Aggregation::Grpo,
        ..LossConfig::default()
    };
    assert_golden("loss_grpo", &config, &["mask_ignored", "token_mean"]);
}

#[test]
fn token_mean_with_a_higher_upper_clip_matches_trl() {
    let config = LossConfig {
        surrogate: clipped(0.2, 0.28),
        ..LossConfig::default()
    };
    assert_golden(
        "loss_dapo",
        &config,
        &["mask_ignored", "seq_mean", "symmetric_clip_0_2"],
    );
}

#[test]
fn constant_length_matches_trl() {
    let config = LossConfig {
        aggregation: Aggregation::DrGrpo,
        max_completion_length: 8,
        ..LossConfig::default()
    };
    assert_golden(
        "loss_dr_grpo",
        &config,
        &["mask_ignored", "seq_mean", "token_mean"],
    );
}

#[test]
fn on_policy_the_gradient_is_the_plain_policy_gradient() {
    let case = golden("loss_on_policy_first_step");
    let logp = case.rows("inputs", "logp_new");
    let batch = Batch {
        old: logp.clone(),
        sampled: logp.clone(),
        logp,
        reference: None,
        mask: case.rows("inputs", "mask"),
        advantages: case.floats("inputs", "advantages"),
    };
    let (gradient, metrics) = batch.whole(&LossConfig::default());
    assert!((metrics.loss - case.float("expected", "loss_dapo")).abs() < 1e-6);
    assert_rows(&gradient, &case.rows("expected", "grad_dapo"));
    assert_eq!(metrics.ratio_range(), (1.0, 1.0));
    let config = LossConfig {
        aggregation: Aggregation::Grpo,
        ..LossConfig::default()
    };
    let (_, metrics) = batch.whole(&config);
    assert!((metrics.loss - case.float("expected", "loss_grpo")).abs() < 1e-6);
}

#[test]
fn dual_clip_bounds_the_loss_of_bad_tokens() {
    let case = golden("loss_dual_clip_c3");
    let config = LossConfig {
        surrogate: Surrogate::Clipped {
            low: 0.8,
            high: 1.2,
            dual_clip: Some(3.0),
        },
        ..LossConfig::default()
    };
    let (logp, old) = (
        case.floats("inputs", "logp_new"),
        case.floats("inputs", "logp_old"),
    );
    let advantages = case.floats("inputs", "advantages");
    let (losses, slopes) = (
        case.floats("expected", "per_token"),
        case.floats("expected", "grad_sum"),
    );
    for t in 0..4 {
        let term = token(&config, logp[t], old[t], None, advantages[t]);
        assert!((term.loss - losses[t]).abs() < 1e-9);
        assert!((term.gradient - slopes[t]).abs() < 1e-9);
    }
}

#[test]
fn the_estimators_are_the_published_ones() {
    let case = golden("kl_estimators");
    let (logp, reference) = (case.rows("inputs", "logp"), case.rows("inputs", "logp_ref"));
    let mask = case.rows("inputs", "mask");
    for (estimator, name) in [
        (KlEstimator::K1, "k1"),
        (KlEstimator::K2, "k2"),
        (KlEstimator::K3, "k3"),
    ] {
        let values = case.rows("expected", name);
        let slopes = case.rows("expected", &format!("grad_{name}"));
        let mutant = case.rows("mutants", "k3_swapped_sign");
        let config = LossConfig {
            kl_coef: 1.0,
            kl_estimator: estimator,
            kl_bias_correction: false,
            ..LossConfig::default()
        };
        let (mut sum, mut tokens, mut differs) = (0.0, 0.0, 0.0_f64);
        for row in 0..4 {
            for t in 0..5 {
                if mask[row][t] == 0.0 {
                    continue;
                }
                let (logp, reference) = (logp[row][t], reference[row][t]);
                let term = token(&config, logp, logp, Some(reference), 0.0);
                assert!((term.kl - values[row][t]).abs() < 1e-9);
                assert!((term.gradient - slopes[row][t]).abs() < 1e-9);
                differs = differs.max((term.kl - mutant[row][t]).abs());
                sum += term.kl;
                tokens += 1.0;
            }
        }
        let mean = case.float("expected", &format!("{name}_mean"));
        assert!((sum / tokens - mean).abs() < 1e-9);
        assert!(differs > 1e-2);
    }
}

/// Returns a batch without advantages whose loss is its divergence.
fn divergence(case: &GoldenCase, logp: &str) -> Batch {
    Batch {
        logp: case.rows("inputs", logp),
        old: case.rows("inputs", "logp_old"),
        sampled: case.rows("inputs", "logp_old"),
        reference: Some(case.rows("inputs", "logp_ref")),
        mask: case.rows("inputs", "mask"),
        advantages: vec![0.0; 4],
    }
}

#[test]
fn corrected_by_the_ratio_the_divergence_has_the_gradient_of_the_reverse_kl() {
    let case = golden("kl_k3_bias_corrected");
    let batch = divergence(&case, "logp");
    let config = LossConfig {
        kl_coef: 1.0,
        ..LossConfig::default()
    };
    let (gradient, metrics) = batch.whole(&config);
    assert!((metrics.loss - case.float("expected", "value")).abs() < 1e-6);
    assert_rows(&gradient, &case.rows("expected", "grad_wrt_logp"));
    let plain = LossConfig {
        kl_bias_correction: false,
        ..config
    };
    let uncorrected = case.float("mutants", "uncorrected_value");
    assert!((batch.whole(&plain).1.loss - uncorrected).abs() < 1e-6);
    assert!((metrics.loss - uncorrected).abs() > 1e-3);
}

#[test]
fn the_divergence_pulls_on_groups_without_advantages_too() {
    let case = golden("kl_gradient_survives_zero_variance");
    let logp = case.rows("inputs", "logp_new");
    let batch = Batch {
        old: logp.clone(),
        sampled: logp.clone(),
        logp,
        reference: Some(case.rows("inputs", "logp_ref")),
        mask: case.rows("inputs", "mask"),
        advantages: vec![0.0; 4],
    };
    let config = LossConfig {
        aggregation: Aggregation::Grpo,
        kl_coef: case.float("inputs", "beta"),
        kl_bias_correction: false,
        ..LossConfig::default()
    };
    assert_rows(
        &batch.whole(&config).0,
        &case.rows("expected", "grad_grpo_mode"),
    );
}

#[test]
fn gspo_compares_sequences() {
    for (name, low, high) in [
        ("loss_gspo_wide_clip", 0.2, 0.28),
        ("loss_gspo_paper_clip", 3e-4, 4e-4),
    ] {
        let case = golden(name);
        let batch = Batch::of(&case);
        let config = LossConfig {
            surrogate: clipped(low, high),
            ratio_level: RatioLevel::Sequence,
            aggregation: Aggregation::Grpo,
            ..LossConfig::default()
        };
        assert!(config.needs_sequences());
        let ratios = case.floats("expected", "seq_ratio");
        for (row, ratio) in ratios.iter().enumerate() {
            let found = batch.terms(&config, row)[0].1.ratio;
            assert!((found - ratio).abs() < 1e-9);
        }
        let first = batch.terms(&config, 0)[0].1.ratio;
        for mutant in ["seq_ratio_without_tool_mask", "seq_ratio_product"] {
            assert!((first - case.floats("mutants", mutant)[0]).abs() > 1e-3);
        }
        let (gradient, metrics) = batch.whole(&config);
        assert!((metrics.loss - case.float("expected", "loss")).abs() < 1e-6);
        assert_rows(&gradient, &case.rows("expected", "grad_wrt_logp_new"));
    }
}

#[test]
fn cispo_keeps_the_gradient_of_clipped_tokens() {
    for name in ["loss_cispo_trl_eps_max5", "loss_cispo_verl_slime_1pm"] {
        let case = golden(name);
        let config = LossConfig {
            surrogate: Surrogate::Cispo {
                low: case.float("inputs", "ratio_clip_low"),
                high: case.float("inputs", "ratio_clip_high"),
            },
            ..LossConfig::default()
        };
        let (gradient, metrics) = Batch::of(&case).whole(&config);
        assert!((metrics.loss - case.float("expected", "loss")).abs() < 1e-6);
        assert_rows(&gradient, &case.rows("expected", "grad_wrt_logp_new"));
    }
}

#[test]
fn sapo_gates_softly() {
    let case = golden("loss_sapo");
    let config = LossConfig {
        surrogate: Surrogate::Sapo {
            tau_positive: case.float("inputs", "tau_pos"),
            tau_negative: case.float("inputs", "tau_neg"),
        },
        aggregation: Aggregation::Grpo,
        ..LossConfig::default()
    };
    let (gradient, metrics) = Batch::of(&case).whole(&config);
    assert!((metrics.loss - case.float("expected", "loss")).abs() < 1e-6);
    assert_rows(&gradient, &case.rows("expected", "grad_wrt_logp_new"));
}

#[test]
fn dppo_bounds_how_far_a_probability_moves() {
    let case = golden("loss_dppo_tv_prime_rl_default");
    let sampled = case.rows("inputs", "logp_inference");
    let batch = Batch {
        logp: case.rows("inputs", "logp_trainer"),
        old: sampled.clone(),
        sampled,
        reference: None,
        mask: case.rows("inputs", "mask"),
        advantages: case.floats("inputs", "advantages"),
    };
    let config = LossConfig {
        surrogate: Surrogate::Dppo {
            low: case.float("inputs", "dppo_mask_low"),
            high: case.float("inputs", "dppo_mask_high"),
            kl: case.float("inputs", "kl_tau"),
        },
        ..LossConfig::default()
    };
    let (gradient, metrics) = batch.whole(&config);
    assert!((metrics.loss - case.float("expected", "loss")).abs() < 1e-6);
    assert_rows(&gradient, &case.rows("expected", "grad_wrt_logp_trainer"));
    let masked = case.value("expected", "masked");
    for row in 0..4 {
        for (t, term) in batch.terms(&config, row) {
            let is_masked = term.is_clipped_low || term.is_clipped_high;
            assert_eq!(masked[row][t].as_bool(), Some(is_masked));
        }
    }
}

#[test]
fn the_sampler_is_corrected_for_by_token_or_sequence() {
    let case = golden("tis_weights");
    let old = case.rows("inputs", "logp_trainer_old");
    let batch = Batch {
        logp: old.clone(),
        old,
        sampled: case.rows("inputs", "logp_sampler"),
        reference: None,
        mask: case.rows("inputs", "mask"),
        advantages: vec![1.0; 4],
    };
    let max = case.float("inputs", "clip_max");
    let correct = |level, out_of_bounds, min| LossConfig {
        correction: Some(SamplerCorrection {
            level,
            out_of_bounds,
            max,
            min,
        }),
        ..LossConfig::default()
    };
    let icepop = Some(case.float("inputs", "clip_min_icepop"));
    for (level, out_of_bounds, min, key) in [
        (
            CorrectionLevel::Token,
            OutOfBounds::Truncate,
            None,
            "token_truncate",
        ),
        (
            CorrectionLevel::Token,
            OutOfBounds::Mask,
            icepop,
            "token_mask_icepop",
        ),
    ] {
        let expected = case.rows("expected", key);
        let config = correct(level, out_of_bounds, min);
        for (row, expected) in expected.iter().enumerate() {
            for (t, term) in batch.terms(&config, row) {
                assert!((term.correction - expected[t]).abs() < 1e-9, "{key}");
            }
        }
    }
    let mutant = case.floats("mutants", "sequence_ratio_without_tool_mask");
    for (level, out_of_bounds, key) in [
        (
            CorrectionLevel::Sequence,
            OutOfBounds::Truncate,
            "sequence_truncate",
        ),
        (
            CorrectionLevel::Sequence,
            OutOfBounds::Mask,
            "sequence_mask",
        ),
        (
            CorrectionLevel::Geometric,
            OutOfBounds::Truncate,
            "geometric_ratio",
        ),
    ] {
        let expected = case.floats("expected", key);
        let config = correct(level, out_of_bounds, None);
        for (row, expected) in expected.iter().enumerate() {
            for (_, term) in batch.terms(&config, row) {
                assert!((term.correction - expected).abs() < 1e-9, "{key}");
            }
        }
        assert!((batch.terms(&config, 0)[0].1.correction - mutant[0]).abs() > 1e-3);
    }
    let (_, metrics) = batch.whole(&LossConfig::default());
    let (mean, max) = metrics.logprob_difference();
    assert!((mean - case.float("expected", "sampling_logp_difference_mean")).abs() < 1e-9);
    assert!((max - case.float("expected", "sampling_logp_difference_max")).abs() < 1e-9);
}

#[test]
fn a_truncated_weight_multiplies_the_surrogate() {
    let case = golden("loss_dapo_with_token_tis");
    let mut batch = Batch::of(&case);
    batch.sampled = case.rows("inputs", "logp_sampler");
    let config = LossConfig {
        surrogate: clipped(0.2, 0.28),
        correction: Some(SamplerCorrection {
            level: CorrectionLevel::Token,
            out_of_bounds: OutOfBounds::Truncate,
            max: case.float("inputs", "tis_cap"),
            min: None,
        }),
        ..LossConfig::default()
    };
    let (gradient, metrics) = batch.whole(&config);
    assert!((metrics.loss - case.float("expected", "loss")).abs() < 1e-6);
    assert_rows(&gradient, &case.rows("expected", "grad_wrt_logp_new"));
}

#[test]
fn bad_sequences_of_another_policy_are_left_out() {
    let case = golden("off_policy_sequence_mask");
    let sampled = case.rows("inputs", "logp_sampler");
    let mut batch = Batch {
        logp: case.rows("inputs", "logp_new"),
        old: sampled.clone(),
        sampled,
        reference: None,
        mask: case.rows("inputs", "mask"),
        advantages: case.floats("inputs", "advantages"),
    };
    let threshold = case.float("inputs", "delta");
    let config = LossConfig {
        off_policy_threshold: Some(threshold),
        ..LossConfig::default()
    };
    let divergences = case.floats("expected", "seq_kl");
    let keep = case.value("expected", "keep");
    for row in 0..4 {
        let (_, metrics) = batch.evaluate(&config, config.totals([1]), &[row]);
        assert!((metrics.kl_sample_train() - divergences[row]).abs() < 1e-9);
        assert_eq!(keep[row].as_bool(), Some(metrics.left_out() == 0.0));
    }
    // Only a negative advantage and a divergence above the threshold leave a sequence out.
    batch.sampled[1].fill(1.0);
    assert!(batch.advantages[1] < 0.0);
    assert_eq!(
        batch
            .evaluate(&config, config.totals([1]), &[1])
            .1
            .left_out(),
        1.0
    );
    batch.advantages[1] = 0.5;
    assert_eq!(
        batch
            .evaluate(&config, config.totals([1]), &[1])
            .1
            .left_out(),
        0.0
    );
}

/// Every loss's gradient against central differences, for sequences of which each token counts.
#[test]
fn every_gradient_is_that_of_finite_differences() {
    let surrogates = [
        clipped(0.2, 0.28),
        Surrogate::Sapo {
            tau_positive: 1.0,
            tau_negative: 1.05,
        },
        Surrogate::Dppo {
            low: 0.2,
            high: 0.2,
            kl: 0.01,
        },
    ];
    let logprobs = [-0.5, -1.1, -2.0, -0.3];
    let (old, sampled) = ([-0.6, -1.0, -2.2, -0.35], [-0.55, -1.2, -2.1, -0.3]);
    let reference = [-0.7, -0.9, -1.9, -0.4];
    for surrogate in surrogates {
        for ratio_level in [RatioLevel::Token, RatioLevel::Sequence] {
            for kl_estimator in [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3] {
                for kl_bias_correction in [false, true] {
                    for advantage in [0.8, -0.8] {
                        let config = LossConfig {
                            surrogate,
                            ratio_level,
                            kl_coef: 0.3,
                            kl_estimator,
                            kl_bias_correction,
                            correction: Some(SamplerCorrection {
                                level: CorrectionLevel::Token,
                                ..SamplerCorrection::default()
                            }),
                            ..LossConfig::default()
                        };
                        let terms = |logprobs: &[f64]| {
                            config.terms(SequenceTokens {
                                logprobs,
                                old: &old,
                                sampled: &sampled,
                                reference: &reference,
                                advantages: &vec![advantage; logprobs.len()],
                            })
                        };
                        let total = |logprobs: &[f64]| -> f64 {
                            terms(logprobs).iter().map(|term| term.loss).sum()
                        };
                        let found = terms(&logprobs);
                        // Which tokens DPPO masks depends on the tokens' own probabilities, and its
                        // squared log ratio is the token's: it does not go with sequence ratios.
                        let is_dppo = matches!(surrogate, Surrogate::Dppo { .. });
                        if is_dppo && ratio_level == RatioLevel::Sequence {
                            continue;
                        }
                        for t in 0..logprobs.len() {
                            let at = |by: f64| {
                                let mut moved = logprobs;
                                moved[t] += by;
                                total(&moved)
                            };
                            let slope = (at(1e-6) - at(-1e-6)) / 2e-6;
                            assert!(
                                (slope - found[t].gradient).abs() < 1e-8,
                                "{config:?} {t}: {slope} {}",
                                found[t].gradient
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn the_divergence_is_added_behind_the_clip() {
    let case = golden("loss_grpo_with_kl_beta");
    let mut batch = Batch::of(&case);
    batch.reference = Some(case.rows("inputs", "logp_ref"));
    let config = LossConfig {
        aggregation: Aggregation::Grpo,
        kl_coef: case.float("inputs", "beta"),
        kl_bias_correction: false,
        ..LossConfig::default()
    };
    let (gradient, metrics) = batch.whole(&config);
    assert!((metrics.loss - case.float("expected", "loss")).abs() < 1e-6);
    assert_rows(&gradient, &case.rows("expected", "grad_wrt_logp_new"));
    let config = LossConfig {
        kl_bias_correction: true,
        ..config
    };
    let (gradient, metrics) = batch.whole(&config);
    assert!((metrics.loss - case.float("expected", "loss_bias_corrected")).abs() < 1e-6);
    assert_rows(&gradient, &case.rows("expected", "grad_bias_corrected"));
}

#[test]
fn micro_batches_sum_to_the_whole_step() {
    let case = golden("grad_accumulation_token_mean");
    let batch = Batch::of(&case);
    let config = LossConfig {
        surrogate: clipped(0.2, 0.28),
        ..LossConfig::default()
    };
    let totals = config.totals(batch.counts());
    let (_, first) = batch.evaluate(&config, totals, &[0, 1]);
    let (_, second) = batch.evaluate(&config, totals, &[2, 3]);
    let expected = case.floats("expected", "per_microbatch_contribution");
    assert!((first.loss - expected[0]).abs() < 1e-6);
    assert!((second.loss - expected[1]).abs() < 1e-6);
    let mut merged = first;
    merged.merge(&second);
    let whole = case.float("expected", "loss_full_batch");
    assert!((merged.loss - whole).abs() < 1e-6);
    for mutant in ["mean_of_microbatch_means", "divided_again_by_G"] {
        assert!(
            (merged.loss - case.float("mutants", mutant)).abs() > 1e-3,
            "{mutant}"
        );
    }
}

#[test]
fn no_denominator_sees_padding() {
    let case = golden("padding_invariance");
    let losses = case.rows("inputs", "per_token_loss");
    let mask = case.rows("inputs", "mask");
    let counts: Vec<usize> = mask
        .iter()
        .map(|row| row.iter().filter(|&&m| m > 0.0).count())
        .collect();
    for (aggregation, key) in [
        (Aggregation::Dapo, "dapo"),
        (Aggregation::Grpo, "grpo"),
        (Aggregation::DrGrpo, "dr_grpo_constant"),
    ] {
        let config = LossConfig {
            aggregation,
            max_completion_length: 8,
            ..LossConfig::default()
        };
        let totals = config.totals(counts.iter().copied());
        let mut loss = 0.0;
        for row in 0..4 {
            let weight = config.token_weight(totals, counts[row]);
            loss += losses[row]
                .iter()
                .zip(&mask[row])
                .map(|(l, m)| l * m * weight)
                .sum::<f64>();
        }
        assert!(
            (loss - case.float("expected", key)).abs() < 1e-6,
            "{key} {loss}"
        );
        for mutant in [
            "dr_grpo_divided_by_batch_T_5",
            "seq_mean_with_padding_counted",
        ] {
            assert!((loss - case.float("mutants", mutant)).abs() > 1e-3);
        }
    }
}

#[test]
fn tool_tokens_count_as_if_they_were_absent() {
    let case = golden("tool_tokens_equal_removal");
    let logp = case.floats("inputs", "logp_new");
    let old = case.floats("inputs", "logp_old");
    let mask = case.floats("inputs", "mask");
    let advantage = case.float("inputs", "advantage");
    let config = LossConfig::default();
    let sum: f64 = (0..logp.len())
        .filter(|&t| mask[t] > 0.0)
        .map(|t| token(&config, logp[t], old[t], None, advantage).loss)
        .sum();
    assert!((sum - case.float("expected", "sum_loss")).abs() < 1e-6);
}

#[test]
fn truncated_sequences_count_or_not_as_configured() {
    let case = golden("mask_truncated_completions");
    let mut batch = Batch::of(&case);
    batch.mask[2].fill(0.0);
    let grpo = LossConfig {
        aggregation: Aggregation::Grpo,
        ..LossConfig::default()
    };
    let left_out = LossConfig {
        masked_sequences: MaskedSequences::LeftOut,
        ..grpo
    };
    for (config, key) in [
        (grpo, "loss_grpo_B_kept_in_denominator"),
        (left_out, "loss_grpo_excluded_from_denominator"),
        (LossConfig::default(), "loss_dapo"),
    ] {
        let (_, metrics) = batch.whole(&config);
        assert!(
            (metrics.loss - case.float("expected", key)).abs() < 1e-6,
            "{key}"
        );
    }
}

/// TRL's own loss on fixed rollouts, down to the gradient of the logits
/// (`tests/golden/make_trl_losses.py`).
#[test]
fn losses_and_gradients_are_those_of_trl() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/trl_losses.json");
    let text = fs_err::read_to_string(path).expect("the golden file is part of the repository");
    let file: Value = serde_json::from_str(&text).expect("the golden file is JSON");
    let rollouts = &file["rollouts"];
    let batch = |logp: Vec<Vec<f64>>| Batch {
        logp,
        old: matrix(&rollouts["old"]),
        sampled: matrix(&rollouts["sampled"]),
        reference: Some(matrix(&rollouts["reference"])),
        mask: matrix(&rollouts["mask"]),
        advantages: numbers(&rollouts["advantages"]),
    };
    let logits: Vec<Vec<Vec<f64>>> = list(&rollouts["logits"]).iter().map(matrix).collect();
    let inverse = 1.0 / file["temperature"].as_f64().expect("a number");
    let cases = file["cases"].as_object().expect("an object");
    for (name, case) in cases {
        let settings = &case["settings"];
        let number = |key: &str| settings[key].as_f64();
        let low = number("epsilon").unwrap_or(0.2);
        let high = number("epsilon_high").unwrap_or(low);
        let kind = settings["loss_type"].as_str().expect("a name");
        let config = LossConfig {
            surrogate: match kind {
                "cispo" => Surrogate::Cispo { low: 0.0, high },
                "sapo" => Surrogate::Sapo {
                    tau_positive: 1.0,
                    tau_negative: 1.05,
                },
                _ => Surrogate::Clipped {
                    low: 1.0 - low,
                    high: 1.0 + high,
                    dual_clip: number("delta"),
                },
            },
            ratio_level: match settings["importance_sampling_level"].as_str() {
                Some("sequence") => RatioLevel::Sequence,
                _ => RatioLevel::Token,
            },
            aggregation: match kind {
                "grpo" | "sapo" => Aggregation::Grpo,
                "dr_grpo" => Aggregation::DrGrpo,
                _ => Aggregation::Dapo,
            },
            off_policy_threshold: number("off_policy_mask_threshold"),
            kl_coef: number("beta").unwrap_or(0.0),
            kl_bias_correction: settings["use_bias_correction_kl"] != false,
            entropy_coef: number("entropy_coef").unwrap_or(0.0),
            max_completion_length: 8,
            ..LossConfig::default()
        };
        // TRL keeps SAPO's temperatures in f32.
        let tolerance = if kind == "sapo" { 1e-6 } else { 1e-9 };
        let mut loss = 0.0;
        let mut statistics = Vec::new();
        for (row, logits) in logits.iter().enumerate() {
            let ids: Vec<u32> = list(&rollouts["ids"][row])
                .iter()
                .map(|id| u32::try_from(id.as_u64().expect("an id")).expect("an id"))
                .collect();
            statistics.push((row_statistics(&logits.concat(), &ids, inverse), ids));
        }
        let logp = |(row, _): &(Vec<RowStatistics<f64>>, Vec<u32>)| -> Vec<f64> {
            row.iter().map(|token| token.logprob).collect()
        };
        let mut batch = batch(statistics.iter().map(logp).collect());
        if config.kl_coef == 0.0 {
            batch.reference = None;
        }
        let totals = config.totals(batch.counts());
        let entropy = config.entropy_weight(totals);
        for (row, (tokens, ids)) in statistics.iter().enumerate() {
            let weight = config.token_weight(totals, batch.counts()[row]);
            let expected = matrix(&case["gradient"][row]);
            let terms = batch.terms(&config, row);
            for (t, term) in &terms {
                loss += term.loss * weight - entropy * tokens[*t].entropy;
                let mut gradient = logits[row][*t].clone();
                log_softmax_gradient(
                    &mut gradient,
                    &ids[*t..=*t],
                    &tokens[*t..=*t],
                    &[term.gradient * weight],
                    -entropy,
                    inverse,
                );
                for (found, expected) in gradient.iter().zip(&expected[*t]) {
                    assert!(
                        (found - expected).abs() < 1e-9,
                        "{name}: {found} {expected}"
                    );
                }
            }
        }
        let expected = case["loss"].as_f64().expect("a number");
        assert!(
            (loss - expected).abs() < tolerance,
            "{name}: {loss} {expected}"
        );
    }
    assert!(cases.len() >= 14);
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().expect("a list")
}

fn numbers(value: &Value) -> Vec<f64> {
    let number = |item: &Value| item.as_f64().expect("a number");
    list(value).iter().map(number).collect()
}

fn matrix(value: &Value) -> Vec<Vec<f64>> {
    list(value).iter().map(numbers).collect()
}
