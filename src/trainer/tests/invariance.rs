//! What is in a micro-batch beside a sequence, and where, changes nothing.

use super::*;
use crate::engine::model::Gradients;

/// A loss of each kind, with all that it may be combined with.
fn losses() -> Vec<(&'static str, LossConfig)> {
    let clipped = |dual_clip| Surrogate::Clipped {
        low: 0.7,
        high: 1.4,
        dual_clip,
    };
    let with = |surrogate, aggregation| LossConfig {
        surrogate,
        aggregation,
        ..LossConfig::default()
    };
    let correction = |level, out_of_bounds| {
        Some(SamplerCorrection {
            level,
            out_of_bounds,
            max: 1.5,
            min: None,
        })
    };
    vec![
        ("grpo", with(clipped(Some(3.0)), Aggregation::Grpo)),
        ("dapo", with(clipped(None), Aggregation::Dapo)),
        (
            "dr_grpo",
            LossConfig {
                max_completion_length: 12,
                ..with(clipped(None), Aggregation::DrGrpo)
            },
        ),
        (
            "gspo",
            LossConfig {
                ratio_level: RatioLevel::Sequence,
                kl_coef: 0.1,
                ..with(clipped(None), Aggregation::Grpo)
            },
        ),
        (
            "cispo",
            with(
                Surrogate::Cispo {
                    low: 0.0,
                    high: 1.3,
                },
                Aggregation::Dapo,
            ),
        ),
        (
            "sapo",
            with(
                Surrogate::Sapo {
                    tau_positive: 1.0,
                    tau_negative: 1.05,
                },
                Aggregation::Grpo,
            ),
        ),
        (
            "dppo",
            with(
                Surrogate::Dppo {
                    low: 0.1,
                    high: 0.1,
                    kl: 1e-3,
                },
                Aggregation::Dapo,
            ),
        ),
        (
            "divergence and entropy",
            LossConfig {
                kl_coef: 0.2,
                entropy_coef: 0.05,
                ..with(clipped(None), Aggregation::Dapo)
            },
        ),
        (
            "token correction",
            LossConfig {
                correction: correction(CorrectionLevel::Token, OutOfBounds::Truncate),
                ..with(clipped(None), Aggregation::Dapo)
            },
        ),
        (
            "sequence correction",
            LossConfig {
                correction: correction(CorrectionLevel::Geometric, OutOfBounds::Mask),
                off_policy_threshold: Some(0.2),
                ..with(clipped(None), Aggregation::Grpo)
            },
        ),
    ]
}

/// Some of them begin alike.
fn tree() -> Vec<TrainSequence> {
    let mut sequences = sequences(7);
    for (i, sequence) in sequences.iter_mut().enumerate() {
        if i % 3 < 2 {
            sequence.tokens[0] = 5;
            sequence.tokens[1] = 6;
        }
    }
    // One that is masked whole counts in the denominators all the same.
    sequences[3].loss_mask.fill(false);
    sequences
}

fn accumulate(
    decoder: &Decoder,
    sequences: &[TrainSequence],
    loss: &LossConfig,
    budget: usize,
    recompute: bool,
) -> (Gradients, LossMetrics) {
    let mut sequences = sequences.to_vec();
    if loss.kl_coef == 0.0 {
        sequences
            .iter_mut()
            .for_each(|sequence| sequence.reference = None);
    }
    let totals = loss.totals(sequences.iter().map(TrainSequence::trainable_tokens));
    let mut gradients = decoder.zero_gradients();
    let mut metrics = LossMetrics::default();
    let pass = PassConfig {
        temperature: 0.9,
        recompute,
        dropout_seed: Some(11),
    };
    for mut micro in pack(&sequences, budget, loss, totals).unwrap() {
        // As the policy before the step, which is not the sampler.
        micro.old.iter_mut().for_each(|old| *old += 0.05);
        let found = accumulate_policy_gradient(decoder, &micro, loss, pass, &mut gradients);
        metrics.merge(&found.unwrap());
    }
    (gradients, metrics)
}

/// Returns the largest difference of two gradients, by the largest number of the first.
fn difference(a: &Gradients, b: &Gradients) -> f64 {
    let (mut worst, mut largest) = (0.0_f64, 0.0_f64);
    for index in 0..a.len() {
        let read = |gradients: &Gradients| {
            let tensor = gradients
                .tensor(index)
                .unwrap()
                .to_dtype(DType::F64)
                .unwrap();
            tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap()
        };
        for (a, b) in read(a).into_iter().zip(read(b)) {
            worst = worst.max((a - b).abs());
            largest = largest.max(a.abs());
        }
    }
    worst / largest
}

#[rstest]
fn neither_order_nor_padding_nor_micro_batches_change_loss_or_gradient(
    #[values(Trainable::Full, lora(), lora_and_head(), lora_with_dropout())] trainable: Trainable,
    #[values((DType::F64, 1e-11), (DType::F32, 1e-6))] (dtype, bound): (DType, f64),
) {
    let decoder = decoder(ModelType::Qwen3, dtype, &trainable);
    let sequences = tree();
    let mut reversed = sequences.clone();
    reversed.reverse();
    let mut rotated = sequences.clone();
    rotated.rotate_left(3);
    // What lies behind the last token of the loss, as padding would.
    let mut padded = sequences.clone();
    for sequence in &mut padded {
        sequence.tokens.extend([7, 7, 7]);
        sequence.loss_mask.extend([false; 3]);
        sequence.logprobs.extend([f64::NAN; 3]);
        sequence
            .reference
            .iter_mut()
            .for_each(|reference| reference.extend([f64::NAN; 3]));
    }
    for (name, loss) in losses() {
        let of = |sequences: &[TrainSequence], budget: usize, recompute: bool| {
            accumulate(&decoder, sequences, &loss, budget, recompute)
        };
        let (expected, metrics) = of(&sequences, usize::MAX, false);
        assert!(metrics.tokens > 10 && metrics.loss.is_finite());
        for (what, sequences, budget, recompute) in [
            ("one sequence a micro-batch", &sequences, 1, false),
            ("small micro-batches", &sequences, 13, false),
            ("layers run again", &sequences, 25, true),
            ("the other way round", &reversed, 25, false),
            ("in another order", &rotated, usize::MAX, false),
            ("padded", &padded, 25, false),
        ] {
            let (gradients, found) = of(sequences, budget, recompute);
            let found_loss = (found.loss - metrics.loss).abs() / metrics.loss.abs().max(1e-3);
            assert!(found_loss < bound, "{name}, {what}: loss by {found_loss:e}");
            let gradient = difference(&expected, &gradients);
            assert!(gradient < bound, "{name}, {what}: gradient by {gradient:e}");
            assert_eq!(found.tokens, metrics.tokens, "{name}, {what}");
        }
        // Padding is cut off before anything is computed.
        let (same, found) = of(&padded, usize::MAX, false);
        assert_eq!(difference(&expected, &same), 0.0, "{name}");
        assert_eq!(found, metrics, "{name}");
    }
}

/// Scores have the same bits whatever stands beside a sequence, which is why sampler and trainer agree
/// and why the processes of a run may divide its sequences.
#[rstest]
fn a_sequence_scores_to_the_same_bits_in_any_company(
    #[values(Trainable::Full, lora(), lora_and_head())] trainable: Trainable,
) {
    let decoder = decoder(ModelType::Qwen3, DType::F32, &trainable);
    let loss = LossConfig::default();
    let sequences = sequences(9);
    let scores = |sequences: &[TrainSequence], budget: usize| {
        let mut scores = vec![Vec::new(); sequences.len()];
        for micro in pack(sequences, budget, &loss, loss.totals([])).unwrap() {
            let found = score_micro_batch(&decoder, &micro, Adapters::On, 0.7).unwrap();
            for (targets, &index) in micro.ranges().zip(&micro.sequences) {
                scores[index] = found.logprobs[targets].to_vec();
            }
        }
        scores
    };
    let alone = scores(&sequences, 1);
    assert!(alone.iter().all(|scores| !scores.is_empty()));
    assert_eq!(scores(&sequences, usize::MAX), alone);
    assert_eq!(scores(&sequences, 17), alone);
    let mut reversed = sequences;
    reversed.reverse();
    let mut found = scores(&reversed, 30);
    found.reverse();
    assert_eq!(found, alone);
}
