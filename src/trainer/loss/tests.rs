use super::*;
use crate::engine::model::tests_support::{GoldenCase, golden};

/// The batch that most golden cases share.
struct Batch {
    logp: Vec<Vec<f64>>,
    old: Vec<Vec<f64>>,
    reference: Option<Vec<Vec<f64>>>,
    mask: Vec<Vec<f64>>,
    advantages: Vec<f64>,
}

impl Batch {
    fn of(case: &GoldenCase) -> Self {
        Self {
            logp: case.rows("inputs", "logp_new"),
            old: case.rows("inputs", "logp_old"),
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
            for t in 0..self.logp[row].len() {
                if self.mask[row][t] == 0.0 {
                    continue;
                }
                let reference = self.reference.as_ref().map(|reference| reference[row][t]);
                let (logp, old) = (self.logp[row][t], self.old[row][t]);
                let term = config.token(logp, old, reference, self.advantages[row]);
                gradient[row][t] = term.gradient * weight;
                metrics.add(&term, weight, 0.0);
            }
        }
        (gradient, metrics)
    }

    fn whole(&self, config: &LossConfig) -> (Vec<Vec<f64>>, LossMetrics) {
        let totals = config.totals(self.counts());
        self.evaluate(config, totals, &[0, 1, 2, 3])
    }
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
        clip_high: 0.28,
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
        dual_clip: Some(3.0),
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
        let term = config.token(logp[t], old[t], None, advantages[t]);
        assert!((term.loss - losses[t]).abs() < 1e-9);
        assert!((term.gradient - slopes[t]).abs() < 1e-9);
    }
}

#[test]
fn k3_is_the_published_estimator() {
    let case = golden("kl_estimators");
    let (logp, reference) = (case.rows("inputs", "logp"), case.rows("inputs", "logp_ref"));
    let mask = case.rows("inputs", "mask");
    let (k3, slopes) = (
        case.rows("expected", "k3"),
        case.rows("expected", "grad_k3"),
    );
    let mutant = case.rows("mutants", "k3_swapped_sign");
    let config = LossConfig {
        kl_coef: 1.0,
        ..LossConfig::default()
    };
    let (mut sum, mut tokens, mut differs) = (0.0, 0.0, 0.0_f64);
    for row in 0..4 {
        for t in 0..5 {
            if mask[row][t] == 0.0 {
                continue;
            }
            let term = config.token(logp[row][t], logp[row][t], Some(reference[row][t]), 0.0);
            assert!((term.kl - k3[row][t]).abs() < 1e-9);
            assert!((term.gradient - slopes[row][t]).abs() < 1e-9);
            differs = differs.max((term.kl - mutant[row][t]).abs());
            sum += term.kl;
            tokens += 1.0;
        }
    }
    assert!((sum / tokens - case.float("expected", "k3_mean")).abs() < 1e-9);
    assert!(differs > 1e-2);
}

#[test]
fn the_divergence_is_added_behind_the_clip() {
    let case = golden("loss_grpo_with_kl_beta");
    let mut batch = Batch::of(&case);
    batch.reference = Some(case.rows("inputs", "logp_ref"));
    let config = LossConfig {
        aggregation: Aggregation::Grpo,
        kl_coef: case.float("inputs", "beta"),
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
        clip_high: 0.28,
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
        .map(|t| config.token(logp[t], old[t], None, advantage).loss)
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
