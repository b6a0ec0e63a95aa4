use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use rstest::rstest;

use super::gradient::{score_dropping, sequence_terms};
use super::*;
use crate::engine::model::tests_support::{
    biased_llama, formula, formula_weights, golden, golden_folder, random_tokens, scaled_llama, toy,
};
use crate::engine::model::{
    Adapters, Decoder, LoraAdapter, LoraConfig, ModelConfig, ModelType, PackedBatch, Trainable,
    WeightFormat, load_weights, random_weights,
};
use crate::engine::{Engine, EngineConfig, SamplingParams, SequenceSeed};

mod invariance;
mod memory;
mod ranks;
mod value;

fn lora() -> Trainable {
    Trainable::Lora(LoraConfig {
        rank: 3,
        alpha: 6.0,
        ..LoraConfig::default()
    })
}

/// Adds no files to a checkpoint.
fn nothing(_: &std::path::Path) -> Result<(), TrainerError> {
    Ok(())
}

fn rslora() -> Trainable {
    Trainable::Lora(LoraConfig {
        rank: 3,
        alpha: 6.0,
        use_rslora: true,
        ..LoraConfig::default()
    })
}

/// As [`lora`], with modules that are trained in full.
fn lora_with(modules: &[&str], ensure_weight_tying: bool) -> Trainable {
    Trainable::Lora(LoraConfig {
        rank: 2,
        alpha: 3.0,
        target_modules: ["q_proj", "v_proj"].map(str::to_owned).to_vec(),
        modules_to_save: modules.iter().map(|&name| name.to_owned()).collect(),
        ensure_weight_tying,
        ..LoraConfig::default()
    })
}

/// As [`lora`], with head and embedding trained in full, as one where they are one.
fn lora_and_head() -> Trainable {
    lora_with(&["lm_head", "embed_tokens"], true)
}

/// As [`lora`], with dropout.
fn lora_with_dropout() -> Trainable {
    Trainable::Lora(LoraConfig {
        rank: 3,
        alpha: 6.0,
        dropout: 0.2,
        ..LoraConfig::default()
    })
}

/// A toy whose numbers are large enough for every part to matter.
fn decoder(kind: ModelType, dtype: DType, trainable: &Trainable) -> Decoder {
    decoder_of(toy(kind), dtype, trainable)
}

fn decoder_of(config: ModelConfig, dtype: DType, trainable: &Trainable) -> Decoder {
    decoder_in(config, dtype, trainable, WeightFormat::Wide)
}

fn decoder_in(
    config: ModelConfig,
    dtype: DType,
    trainable: &Trainable,
    format: WeightFormat,
) -> Decoder {
    let mut weights = random_weights(&config, 1, dtype, &Device::Cpu).unwrap();
    for (name, weight) in &mut weights {
        if !name.ends_with("norm.weight") {
            *weight = (&*weight * 12.0).unwrap();
        }
    }
    let decoder =
        Decoder::with_format(config, weights, &Device::Cpu, trainable, 2, format).unwrap();
    for (index, (name, var)) in decoder.variables().iter().enumerate() {
        if name.contains("lora_B") || name.contains("norm") || name.ends_with(".bias") {
            let values: Vec<f64> = (0..var.elem_count())
                .map(|i| 0.6 + 0.3 * ((i * 7 + index) as f64).sin())
                .collect();
            let values = Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap();
            var.set(&values.to_dtype(var.dtype()).unwrap()).unwrap();
        }
    }
    decoder.mark_updated();
    decoder
}

/// Sequences whose sampled log-probabilities are a little off, so that some ratios are clipped.
fn sequences(count: usize) -> Vec<TrainSequence> {
    (0..count)
        .map(|i| {
            let tokens = random_tokens(5 + i, 19, i as u64);
            let len = tokens.len();
            TrainSequence {
                tokens,
                loss_mask: (0..len).map(|t| t >= 2 && t != 4).collect(),
                logprobs: (0..len)
                    .map(|t| -2.5 + 0.3 * ((t + i) as f64).sin())
                    .collect(),
                reference: Some((0..len).map(|t| -2.0 - 0.1 * t as f64).collect()),
                advantage: if i % 2 == 0 { 1.0 } else { -0.7 },
                credit: None,
            }
        })
        .collect()
}

fn loss_config() -> LossConfig {
    LossConfig {
        kl_coef: 0.1,
        entropy_coef: 0.05,
        surrogate: Surrogate::Clipped {
            low: 0.1,
            high: 4.0,
            dual_clip: None,
        },
        ..LossConfig::default()
    }
}

fn gradients(
    decoder: &Decoder,
    sequences: &[TrainSequence],
    budget: usize,
    pass: PassConfig,
) -> (crate::engine::model::Gradients, LossMetrics) {
    let config = loss_config();
    let totals = config.totals(sequences.iter().map(TrainSequence::trainable_tokens));
    let mut gradients = decoder.zero_gradients();
    let mut metrics = LossMetrics::default();
    for micro in pack(sequences, budget, &config, totals).unwrap() {
        let found =
            accumulate_policy_gradient(decoder, &micro, &config, pass, &mut gradients).unwrap();
        metrics.merge(&found);
    }
    (gradients, metrics)
}

/// Holds every number of two gradients to be alike within `bound`.
#[track_caller]
fn assert_alike(
    expected: &crate::engine::model::Gradients,
    found: &crate::engine::model::Gradients,
    bound: f64,
) {
    for index in 0..expected.len() {
        let difference = (expected.tensor(index).unwrap() - found.tensor(index).unwrap()).unwrap();
        let worst = difference.abs().unwrap().max_all().unwrap();
        assert!(
            worst.to_scalar::<f64>().unwrap() < bound,
            "{}",
            expected.name(index)
        );
    }
}

/// Returns the loss without any backward pass.
fn loss(decoder: &Decoder, sequences: &[TrainSequence], pass: PassConfig) -> f64 {
    let config = loss_config();
    let totals = config.totals(sequences.iter().map(TrainSequence::trainable_tokens));
    let mut loss = 0.0;
    for micro in pack(sequences, usize::MAX, &config, totals).unwrap() {
        let scores = score_dropping(decoder, &micro, pass).unwrap();
        for (i, term) in sequence_terms(&micro, &config, &scores.logprobs)
            .into_iter()
            .enumerate()
        {
            loss += term.loss * micro.weights[i] - micro.entropy_weight * scores.entropies[i];
        }
    }
    loss
}

#[rstest]
fn every_trainable_tensor_has_the_gradient_of_finite_differences(
    #[values(
        toy(ModelType::Qwen3),
        toy(ModelType::Qwen2),
        toy(ModelType::Llama),
        scaled_llama()
    )]
    config: ModelConfig,
    #[values(
        Trainable::Full,
        lora(),
        lora_and_head(),
        lora_with(&["lm_head"], false),
        lora_with(&["embed_tokens"], false),
        lora_with_dropout()
    )]
    trainable: Trainable,
) {
    let decoder = decoder_of(config, DType::F64, &trainable);
    let sequences = sequences(3);
    let pass = PassConfig {
        temperature: 0.8,
        dropout_seed: Some(3),
        ..PassConfig::default()
    };
    let (gradients, metrics) = gradients(&decoder, &sequences, usize::MAX, pass);
    assert!((metrics.loss - loss(&decoder, &sequences, pass)).abs() < 1e-12);
    for (index, (name, var)) in decoder.variables().iter().enumerate() {
        let gradient = gradients.tensor(index).unwrap().flatten_all().unwrap();
        let gradient = gradient.to_vec1::<f64>().unwrap();
        let original = var.as_detached_tensor().copy().unwrap();
        // A random direction covers every element at once; single elements tell a permutation.
        let len = var.elem_count();
        let mut directions = vec![
            (0..len)
                .map(|i| ((i * 5 + 1) as f64).cos())
                .collect::<Vec<_>>(),
        ];
        for i in [0, len / 3, len - 1] {
            let mut single = vec![0.0; len];
            single[i] = 1.0;
            directions.push(single);
        }
        assert!(
            gradient.iter().any(|&g| g.abs() > 1e-9),
            "{name} has no gradient"
        );
        for direction in directions {
            let expected: f64 = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
            let direction = Tensor::from_vec(direction, var.shape(), &Device::Cpu).unwrap();
            let at = |by: f64| {
                var.set(&(&original + (&direction * by).unwrap()).unwrap())
                    .unwrap();
                decoder.mark_updated();
                loss(&decoder, &sequences, pass)
            };
            // Where attention is sharp, a loss bends within the longer step.
            let slopes = [1e-5, 1e-6].map(|step| (at(step) - at(-step)) / (2.0 * step));
            let bound = 1e-8 + 1e-5 * expected.abs();
            assert!(
                slopes.iter().any(|slope| (slope - expected).abs() < bound),
                "{name}: {slopes:?} {expected}"
            );
        }
        var.set(&original).unwrap();
        decoder.mark_updated();
    }
}

#[rstest]
fn micro_batches_and_recomputation_do_not_change_the_gradient(
    #[values(Trainable::Full, lora(), lora_and_head(), lora_with_dropout())] trainable: Trainable,
) {
    let decoder = decoder(ModelType::Qwen3, DType::F64, &trainable);
    let sequences = sequences(8);
    let pass = PassConfig {
        dropout_seed: Some(7),
        ..PassConfig::default()
    };
    let (whole, metrics) = gradients(&decoder, &sequences, usize::MAX, pass);
    for budget in [1, 12, 25] {
        let pass = PassConfig {
            recompute: budget == 12,
            ..pass
        };
        let (split, found) = gradients(&decoder, &sequences, budget, pass);
        assert!((found.loss - metrics.loss).abs() < 1e-12);
        assert_eq!(found.tokens, metrics.tokens);
        assert_alike(&whole, &split, 1e-12);
    }
}

#[test]
fn a_fresh_adapter_has_no_divergence_from_its_reference() {
    let config = toy(ModelType::Llama);
    let weights = random_weights(&config, 3, DType::F32, &Device::Cpu).unwrap();
    let decoder = Decoder::new(config, weights, &Device::Cpu, &lora(), 4).unwrap();
    let loss = LossConfig {
        kl_coef: 0.04,
        ..LossConfig::default()
    };
    let sequences = sequences(4);
    let totals = loss.totals(sequences.iter().map(TrainSequence::trainable_tokens));
    let [mut micro] = pack(&sequences, 1000, &loss, totals)
        .unwrap()
        .try_into()
        .unwrap();
    let score = |adapters| {
        score_micro_batch(&decoder, &micro, adapters, 1.0)
            .unwrap()
            .logprobs
    };
    let (policy, reference) = (score(Adapters::On), score(Adapters::Off));
    assert_eq!(policy, reference);
    (micro.sampled, micro.old) = (policy.clone(), policy);
    micro.reference = reference;
    let pass = PassConfig {
        recompute: true,
        ..PassConfig::default()
    };
    let mut gradients = decoder.zero_gradients();
    let metrics =
        accumulate_policy_gradient(&decoder, &micro, &loss, pass, &mut gradients).unwrap();
    assert_eq!((metrics.kl(), metrics.ratio_range()), (0.0, (1.0, 1.0)));
}

/// What products are made in changes nothing in that sampler and trainer compute the same bits: over
/// several turns, with an adapter that is no fresh one, in micro-batches that share prompts.
#[rstest]
fn what_was_sampled_is_what_is_trained_on(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
    #[values(WeightFormat::Wide, WeightFormat::Bf16Products)] format: WeightFormat,
) {
    let decoder = decoder_in(toy(kind), DType::F32, &lora(), format);
    let decoder = std::sync::Arc::new(decoder);
    let mut engine = Engine::new(std::sync::Arc::clone(&decoder), EngineConfig::default()).unwrap();
    let prompt = random_tokens(9, 19, 1);
    let mut sequences = Vec::new();
    let mut ids = Vec::new();
    for index in 0..5 {
        let params = SamplingParams {
            temperature: 0.8,
            max_new_tokens: 6 + index,
            ..SamplingParams::default()
        };
        let seed = SequenceSeed {
            sample: index as u64,
            ..SequenceSeed::default()
        };
        ids.push(engine.add(prompt.clone(), params, seed).unwrap());
        sequences.push(TrainSequence {
            tokens: prompt.clone(),
            loss_mask: vec![false; prompt.len()],
            logprobs: vec![0.0; prompt.len()],
            reference: None,
            advantage: if index % 2 == 0 { 1.0 } else { -1.0 },
            credit: None,
        });
    }
    for turn in 0..3 {
        let mut left = ids.len();
        while left > 0 {
            for finished in engine.step().unwrap() {
                let at = ids.iter().position(|&id| id == finished.id).unwrap();
                let sequence = &mut sequences[at];
                let sampled = finished.logprobs.iter().map(|&x| f64::from(x));
                sequence.logprobs.extend(sampled);
                sequence.loss_mask.extend(vec![true; finished.tokens.len()]);
                sequence.tokens.extend(finished.tokens);
                left -= 1;
            }
        }
        for (at, (&id, sequence)) in ids.iter().zip(&mut sequences).enumerate() {
            let result = random_tokens(1 + at, 19, turn);
            engine.set_max_new_tokens(id, 4).unwrap();
            engine.extend(id, &result).unwrap();
            sequence.logprobs.extend(vec![0.0; result.len()]);
            sequence.loss_mask.extend(vec![false; result.len()]);
            sequence.tokens.extend(result);
        }
    }
    let config = LossConfig::default();
    let totals = config.totals(sequences.iter().map(TrainSequence::trainable_tokens));
    for (budget, recompute) in [(1000, false), (64, true)] {
        let mut gradients = decoder.zero_gradients();
        for micro in pack(&sequences, budget, &config, totals).unwrap() {
            let pass = PassConfig {
                recompute,
                temperature: 0.8,
                ..PassConfig::default()
            };
            let metrics =
                accumulate_policy_gradient(&decoder, &micro, &config, pass, &mut gradients)
                    .unwrap();
            // The sampler takes its logarithm in `f64`, so they may differ by the last bits of an `f32`.
            let (least, most) = metrics.ratio_range();
            assert!(1.0 - least < 2e-6 && most - 1.0 < 2e-6, "{least} {most}");
        }
    }
}

#[test]
fn sharing_a_prompt_does_not_change_the_gradient() {
    let decoder = decoder(ModelType::Qwen3, DType::F64, &Trainable::Full);
    let prompt = random_tokens(20, 19, 3);
    let sequences: Vec<_> = sequences(6)
        .into_iter()
        .enumerate()
        .map(|(i, sequence)| {
            let pad = |value: f64| vec![value; 20];
            TrainSequence {
                tokens: [&prompt[..], &sequence.tokens].concat(),
                loss_mask: [&[false; 20][..], &sequence.loss_mask].concat(),
                logprobs: [pad(0.0), sequence.logprobs].concat(),
                reference: Some([pad(0.0), sequence.reference.unwrap()].concat()),
                advantage: i as f64 - 2.5,
                credit: None,
            }
        })
        .collect();
    let (apart, metrics) = gradients(&decoder, &sequences, 1, PassConfig::default());
    let (shared, found) = gradients(&decoder, &sequences, usize::MAX, PassConfig::default());
    assert!((found.loss - metrics.loss).abs() < 1e-12);
    let config = loss_config();
    let [micro] = pack(&sequences, 1000, &config, config.totals([1]))
        .unwrap()
        .try_into()
        .unwrap();
    let separate: usize = sequences
        .iter()
        .map(|sequence| sequence.tokens.len() - 1)
        .sum();
    assert!(
        micro.batch.len() <= separate - 5 * 20,
        "the prompt is there once"
    );
    assert_alike(&apart, &shared, 1e-12);
}

#[rstest]
fn the_composed_head_agrees_with_the_fused_one(
    #[values(ModelType::Qwen3, ModelType::Llama)] kind: ModelType,
) {
    let config = toy(kind);
    let weights = random_weights(&config, 1, DType::F64, &Device::Cpu).unwrap();
    let fused = Decoder::new(
        config.clone(),
        weights.clone(),
        &Device::Cpu,
        &Trainable::Full,
        0,
    )
    .unwrap();
    let composed =
        Decoder::new_composed(config, weights, &Device::Cpu, &Trainable::Full, 0).unwrap();
    let sequences = sequences(5);
    let pass = PassConfig {
        temperature: 1.3,
        recompute: false,
        ..PassConfig::default()
    };
    let (found, found_metrics) = gradients(&composed, &sequences, 20, pass);
    let (expected, metrics) = gradients(&fused, &sequences, 20, pass);
    assert!((found_metrics.loss - metrics.loss).abs() < 1e-12);
    assert!((found_metrics.entropy() - metrics.entropy()).abs() < 1e-12);
    assert_alike(&expected, &found, 1e-11);
    // The same step of the optimizer, too.
    let config = AdamWConfig {
        weight_decay: 0.1,
        ..AdamWConfig::default()
    };
    for (decoder, gradients) in [(&fused, &expected), (&composed, &found)] {
        let mut optimizer = AdamW::new(decoder, config).unwrap();
        let first = optimizer.step(decoder, gradients, 1e-2).unwrap();
        assert!(first.grad_norm > 0.0 && first.clip_factor <= 1.0);
        optimizer.step(decoder, gradients, 1e-2).unwrap();
    }
    for ((name, fused), (_, composed)) in fused.variables().iter().zip(composed.variables()) {
        let difference = (fused.as_tensor() - composed.as_tensor()).unwrap();
        let worst = difference
            .abs()
            .unwrap()
            .flatten_all()
            .unwrap()
            .max(0)
            .unwrap();
        assert!(worst.to_scalar::<f64>().unwrap() < 1e-8, "{name}");
    }
}

#[test]
fn the_golden_next_token_shift_holds() {
    // A model whose hidden states are given is a head alone.
    let case = golden("next_token_shift");
    let hidden = case.rows("inputs", "hidden").concat();
    let head = case.rows("inputs", "lm_head").concat();
    let config = ModelConfig {
        vocab_size: 5,
        hidden_size: 3,
        tie_word_embeddings: false,
        ..toy(ModelType::Llama)
    };
    let mut weights = random_weights(&config, 1, DType::F64, &Device::Cpu).unwrap();
    let head = Tensor::from_vec(head, (5, 3), &Device::Cpu).unwrap();
    weights.insert("lm_head.weight".to_owned(), head);
    let decoder = Decoder::new(config, weights, &Device::Cpu, &Trainable::Frozen, 0).unwrap();
    let hidden = Tensor::from_vec(hidden, (4, 3), &Device::Cpu).unwrap();
    let ids = [3, 0, 2, 4];
    let sequence = TrainSequence {
        tokens: ids.to_vec(),
        loss_mask: vec![false, false, true, true],
        ..TrainSequence::default()
    };
    let config = LossConfig::default();
    let totals = config.totals([2]);
    let [micro] = pack(&[sequence], 10, &config, totals)
        .unwrap()
        .try_into()
        .unwrap();
    let hidden = hidden.narrow(0, 0, micro.batch.len()).unwrap();
    let found = score(&decoder, &hidden, &micro.targets, Adapters::On, 1.0)
        .unwrap()
        .logprobs;
    let expected = case.floats("expected", "completion_logps");
    let mutant = case.floats("mutants", "unshifted");
    for i in 0..2 {
        assert!((found[i] - expected[i]).abs() < 1e-9);
        assert!((found[i] - mutant[i]).abs() > 1e-3);
    }
}

/// Samples one token after the prompt and rewards a fixed one.
#[rstest]
fn a_bandit_learns_its_token_in_fifty_steps(
    #[values(Trainable::Full, lora(), lora_and_head())] trainable: Trainable,
) {
    use rand::{RngExt as _, SeedableRng as _};
    const ARM: u32 = 7;
    const PULLS: usize = 64;
    let config = ModelConfig {
        hidden_size: 32,
        ..toy(ModelType::Qwen3)
    };
    let mut weights = random_weights(&config, 5, DType::F32, &Device::Cpu).unwrap();
    // The head is the embedding, and the last norm fixes the length of what it reads: under a frozen
    // embedding of deviation 0.02 no adapter could make any token likely.
    let embedding = weights.get_mut("model.embed_tokens.weight").unwrap();
    *embedding = (&*embedding * 10.0).unwrap();
    let decoder = Decoder::new(config, weights, &Device::Cpu, &trainable, 5).unwrap();
    let mut optimizer = AdamW::new(&decoder, AdamWConfig::default()).unwrap();
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(1);
    let prompt = [1, 2, 3];
    let probability = |decoder: &Decoder| {
        let batch = PackedBatch::from_sequences([prompt]);
        let hidden = decoder.hidden(&batch, Adapters::On).unwrap();
        let targets = Targets {
            positions: vec![2],
            tokens: vec![ARM],
        };
        let scores = score(decoder, &hidden, &targets, Adapters::On, 1.0);
        scores.unwrap().logprobs[0].exp()
    };
    assert!(probability(&decoder) < 0.2);
    let loss = LossConfig::default();
    let mut gradients = decoder.zero_gradients();
    let mut first_step_ratios = Vec::new();
    for step in 0..50 {
        let mut cache = decoder.new_cache(10_000);
        let row = cache.add_row();
        let batch = PackedBatch::from_sequences([prompt]);
        let hidden = decoder.hidden_cached(&batch, &mut cache, &[row]).unwrap();
        let logits = decoder.logits(&hidden.narrow(0, 2, 1).unwrap()).unwrap();
        let logits = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let total = crate::engine::model::ops::log_sum_exp(&logits, 1.0);
        let pulls: Vec<(u32, f64)> = (0..PULLS)
            .map(|_| {
                let mut left = random.random::<f32>();
                let token = logits
                    .iter()
                    .position(|logit| {
                        left -= (logit - total).exp();
                        left < 0.0
                    })
                    .unwrap_or(logits.len() - 1);
                (
                    u32::try_from(token).unwrap(),
                    f64::from(logits[token] * 1.0 - total),
                )
            })
            .collect();
        let members: Vec<_> = pulls
            .iter()
            .map(|&(token, _)| GroupMember {
                group: 0,
                reward: Some(f64::from(u8::from(token == ARM))),
                sampled_tokens: 1,
                loss_tokens: 1,
            })
            .collect();
        let advantages = group_advantages(&members, AdvantageConfig::default()).unwrap();
        let sequences: Vec<_> = pulls
            .iter()
            .zip(&advantages.values)
            .map(|(&(token, logprob), advantage)| TrainSequence {
                tokens: vec![1, 2, 3, token],
                loss_mask: vec![false, false, false, true],
                logprobs: vec![0.0, 0.0, 0.0, logprob],
                reference: None,
                advantage: advantage.unwrap(),
                credit: None,
            })
            .collect();
        let totals = loss.totals(vec![1; PULLS]);
        gradients.clear();
        for micro in pack(&sequences, 40, &loss, totals).unwrap() {
            let pass = PassConfig::default();
            let metrics =
                accumulate_policy_gradient(&decoder, &micro, &loss, pass, &mut gradients).unwrap();
            first_step_ratios.push(metrics.ratio_range());
        }
        let rate = if step < 5 { 0.01 } else { 0.02 };
        optimizer.step(&decoder, &gradients, rate).unwrap();
    }
    assert!(probability(&decoder) > 0.95, "{}", probability(&decoder));
    // Sampler and trainer agree to the last bit, on every step.
    assert!(
        first_step_ratios.iter().all(|&range| range == (1.0, 1.0)),
        "{first_step_ratios:?}"
    );
}

#[test]
fn adamw_takes_the_golden_step() {
    let case = golden("adamw_one_step_with_clip");
    let found = optim::one_step_for_tests(
        &case.floats("inputs", "theta"),
        &case.floats("inputs", "grad"),
        case.float("inputs", "lr"),
        AdamWConfig {
            weight_decay: case.float("inputs", "weight_decay"),
            max_grad_norm: Some(case.float("inputs", "max_grad_norm")),
            ..AdamWConfig::default()
        },
    );
    let expected = case.floats("expected", "theta_after");
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() < 1e-9, "{found} {expected}");
    }
}

#[rstest]
fn a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    #[values(
        Trainable::Full,
        lora(),
        lora_and_head(),
        lora_with(&["lm_head", "embed_tokens"], false)
    )]
    trainable: Trainable,
) {
    let run = tempfile::tempdir().unwrap();
    let sequences = sequences(4);
    let train = |decoder: &Decoder, optimizer: &mut AdamW, steps: usize| {
        for _ in 0..steps {
            let (gradients, _) = gradients(decoder, &sequences, 20, PassConfig::default());
            optimizer.step(decoder, &gradients, 1e-2).unwrap();
        }
    };
    let snapshot = |decoder: &Decoder| -> HashMap<String, Vec<f32>> {
        let read = |var: &Tensor| var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        decoder
            .variables()
            .iter()
            .map(|(name, var)| (name.clone(), read(var)))
            .collect()
    };
    let whole = decoder(ModelType::Qwen3, DType::F32, &trainable);
    let mut optimizer = AdamW::new(&whole, AdamWConfig::default()).unwrap();
    train(&whole, &mut optimizer, 2);
    let state = TrainState {
        step: 2,
        seed: 3,
        extra: serde_json::json!({"cursor": 17}),
    };
    let path = save_checkpoint(
        run.path(),
        &whole,
        &optimizer,
        None,
        &state,
        Some("toy"),
        nothing,
    )
    .unwrap();
    train(&whole, &mut optimizer, 2);

    assert_eq!(latest_checkpoint(run.path()).unwrap(), Some(path.clone()));
    let resumed = decoder(ModelType::Qwen3, DType::F32, &trainable);
    let mut optimizer = AdamW::new(&resumed, AdamWConfig::default()).unwrap();
    assert_eq!(
        load_checkpoint(&path, &resumed, &mut optimizer, None).unwrap(),
        state
    );
    train(&resumed, &mut optimizer, 2);
    assert_eq!(snapshot(&resumed), snapshot(&whole));
}

#[test]
fn a_checkpoint_of_another_kind_is_refused_by_name() {
    let run = tempfile::tempdir().unwrap();
    let full = decoder(ModelType::Qwen3, DType::F32, &Trainable::Full);
    let optimizer = AdamW::new(&full, AdamWConfig::default()).unwrap();
    let state = TrainState {
        step: 0,
        seed: 0,
        extra: serde_json::Value::Null,
    };
    let path = save_checkpoint(run.path(), &full, &optimizer, None, &state, None, nothing).unwrap();
    let adapted = decoder(ModelType::Qwen3, DType::F32, &lora());
    let mut optimizer = AdamW::new(&adapted, AdamWConfig::default()).unwrap();
    let error = load_checkpoint(&path, &adapted, &mut optimizer, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with("it holds all weights, the run trains an adapter"),
        "{error}"
    );
    fs_err::remove_file(path.join("optimizer.safetensors")).unwrap();
    let mut optimizer = AdamW::new(&full, AdamWConfig::default()).unwrap();
    let error = load_checkpoint(&path, &full, &mut optimizer, None)
        .unwrap_err()
        .to_string();
    assert!(error.contains("optimizer.safetensors"), "{error}");
}

#[test]
fn an_overflowed_gradient_leaves_the_weights_alone() {
    let decoder = decoder(ModelType::Qwen3, DType::F32, &Trainable::Full);
    let mut optimizer = AdamW::new(&decoder, AdamWConfig::default()).unwrap();
    let mut sequences = sequences(1);
    sequences[0].advantage = f64::INFINITY;
    let (gradients, _) = gradients(&decoder, &sequences, 100, PassConfig::default());
    let before = decoder.version();
    let error = optimizer.step(&decoder, &gradients, 1e-3).unwrap_err();
    assert!(
        error.to_string().contains("weights are left as they were"),
        "{error}"
    );
    assert_eq!((decoder.version(), optimizer.steps()), (before, 0));
}

#[test]
fn schedules_warm_up_and_fall() {
    let schedule = LrSchedule {
        learning_rate: 1.0,
        warmup_steps: 4,
        total_steps: 14,
        kind: ScheduleKind::Cosine,
    };
    let rates: Vec<f64> = [0, 3, 4, 9, 14, 20]
        .iter()
        .map(|&step| schedule.rate(step))
        .collect();
    for (found, expected) in rates.iter().zip([0.25, 1.0, 1.0, 0.5, 0.0, 0.0]) {
        assert!((found - expected).abs() < 1e-12, "{rates:?}");
    }
    let linear = LrSchedule {
        kind: ScheduleKind::Linear,
        ..schedule
    };
    assert!((linear.rate(9) - 0.5).abs() < 1e-12);
    let constant = LrSchedule {
        kind: ScheduleKind::Constant,
        warmup_steps: 0,
        ..schedule
    };
    assert_eq!((constant.rate(0), constant.rate(100)), (1.0, 1.0));
}

/// Compares with the numbers of transformers and PEFT (see `tests/golden/make_toy_models.py`).
#[rstest]
#[case("qwen3", toy(ModelType::Qwen3), Trainable::Full)]
#[case("qwen2", toy(ModelType::Qwen2), Trainable::Full)]
#[case("llama", toy(ModelType::Llama), Trainable::Full)]
#[case("llama_biases", biased_llama(), Trainable::Full)]
#[case("qwen3_lora", toy(ModelType::Qwen3), lora())]
#[case("qwen3_rslora", toy(ModelType::Qwen3), rslora())]
#[case("llama_saved", toy(ModelType::Llama), lora_with(&["lm_head", "embed_tokens"], false))]
#[case("qwen3_saved_head", toy(ModelType::Qwen3), lora_with(&["lm_head"], false))]
#[case("qwen3_saved_embedding", toy(ModelType::Qwen3), lora_with(&["embed_tokens"], false))]
#[case("qwen3_saved_tied", toy(ModelType::Qwen3), lora_and_head())]
fn logits_and_gradients_are_those_of_transformers(
    #[case] name: &str,
    #[case] config: ModelConfig,
    #[case] trainable: Trainable,
) {
    let text = fs_err::read_to_string(golden_folder().join("toy_models.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    let case = &golden["models"][name];
    let sequences: Vec<Vec<u32>> = serde_json::from_value(golden["tokens"].clone()).unwrap();

    let weights = formula_weights(&config, DType::F64);
    let decoder = Decoder::new(config, weights, &Device::Cpu, &trainable, 0).unwrap();
    if decoder.lora().is_some() {
        let shape = |(name, var): &(String, candle_core::Var)| (name.clone(), var.dims().to_vec());
        let shapes = decoder.variables().iter().map(shape).collect();
        decoder.set_variables(&formula(shapes, DType::F64)).unwrap();
    }

    // transformers computes the rotary angles in f32 and keeps their cosines so.
    let tolerance = 2e-6;
    let hidden = decoder
        .hidden(&PackedBatch::from_sequences(&sequences), Adapters::On)
        .unwrap();
    let found = decoder.logits(&hidden).unwrap().to_vec2::<f64>().unwrap();
    let expected: Vec<Vec<Vec<f64>>> = serde_json::from_value(case["logits"].clone()).unwrap();
    for (found, expected) in found
        .iter()
        .flatten()
        .zip(expected.iter().flatten().flatten())
    {
        assert!((found - expected).abs() < tolerance, "{found} {expected}");
    }

    let sequences: Vec<_> = sequences
        .into_iter()
        .map(|tokens| TrainSequence {
            loss_mask: (0..tokens.len()).map(|t| t > 0).collect(),
            tokens,
            ..TrainSequence::default()
        })
        .collect();
    let config = LossConfig::default();
    let totals = config.totals(sequences.iter().map(TrainSequence::trainable_tokens));
    let mut gradients = decoder.zero_gradients();
    let mut metrics = LossMetrics::default();
    for micro in pack(&sequences, 12, &config, totals).unwrap() {
        let pass = PassConfig::default();
        metrics.merge(&accumulate_nll_gradient(&decoder, &micro, pass, &mut gradients).unwrap());
    }
    assert!((metrics.loss - case["loss"].as_f64().unwrap()).abs() < tolerance);
    let expected = case["gradients"].as_object().unwrap();
    assert_eq!(gradients.len(), expected.len());
    for index in 0..gradients.len() {
        let name = gradients.name(index);
        let found = gradients.tensor(index).unwrap().flatten_all().unwrap();
        let found = found.to_vec1::<f64>().unwrap();
        let norm = found.iter().map(|g| g * g).sum::<f64>().sqrt();
        let expected = &expected[name];
        assert!(
            (norm - expected["norm"].as_f64().unwrap()).abs() < tolerance,
            "{name}"
        );
        let first: Vec<f64> = serde_json::from_value(expected["first"].clone()).unwrap();
        for (found, expected) in found.iter().zip(&first) {
            assert!(
                (found - expected).abs() < tolerance,
                "{name}: {found} {expected}"
            );
        }
    }
}

#[rstest]
#[case("toy_adapter", "qwen3_lora", ModelType::Qwen3)]
#[case("toy_adapter_llama_saved", "llama_saved", ModelType::Llama)]
#[case("toy_adapter_qwen3_saved_head", "qwen3_saved_head", ModelType::Qwen3)]
#[case(
    "toy_adapter_qwen3_saved_embedding",
    "qwen3_saved_embedding",
    ModelType::Qwen3
)]
#[case("toy_adapter_qwen3_saved_tied", "qwen3_saved_tied", ModelType::Qwen3)]
fn an_adapter_that_peft_wrote_gives_the_logits_of_peft(
    #[case] folder: &str,
    #[case] name: &str,
    #[case] kind: ModelType,
) {
    let read =
        |folder: &std::path::Path| LoraAdapter::load(folder, DType::F64, &Device::Cpu).unwrap();
    let adapter = read(&golden_folder().join(folder));
    let config = toy(kind);
    let weights = formula_weights(&config, DType::F64);
    let trainable = Trainable::Lora(adapter.config.clone());
    let decoder = Decoder::new(config, weights, &Device::Cpu, &trainable, 0).unwrap();
    decoder.load_adapter(&adapter).unwrap();

    let text = fs_err::read_to_string(golden_folder().join("toy_models.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    let sequences: Vec<Vec<u32>> = serde_json::from_value(golden["tokens"].clone()).unwrap();
    let expected = |name: &str| -> Vec<f64> {
        let logits = golden["models"][name]["logits"].clone();
        let logits: Vec<Vec<Vec<f64>>> = serde_json::from_value(logits).unwrap();
        logits.concat().concat()
    };
    let batch = PackedBatch::from_sequences(&sequences);
    let logits = |decoder: &Decoder| -> Vec<f64> {
        let hidden = decoder.hidden(&batch, Adapters::On).unwrap();
        decoder.logits(&hidden).unwrap().to_vec2().unwrap().concat()
    };
    let assert_close = |found: &[f64], expected: &[f64]| {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            // The file holds f32.
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
    };
    assert_close(&logits(&decoder), &expected(name));

    // With the adapter off, head and embedding are the base's again.
    let sequence = TrainSequence {
        loss_mask: (0..sequences[0].len()).map(|t| t > 0).collect(),
        tokens: sequences[0].clone(),
        ..TrainSequence::default()
    };
    let loss = LossConfig::default();
    let [micro] = pack(&[sequence], 100, &loss, loss.totals([1]))
        .unwrap()
        .try_into()
        .unwrap();
    let scored = |decoder: &Decoder, adapters| {
        let scores = score_micro_batch(decoder, &micro, adapters, 1.0);
        scores.unwrap().logprobs
    };
    let config = decoder.config().clone();
    let weights = formula_weights(&config, DType::F64);
    let base = Decoder::new(config, weights, &Device::Cpu, &Trainable::Frozen, 0).unwrap();
    let reference = scored(&decoder, Adapters::Off);
    assert_eq!(reference, scored(&base, Adapters::On));
    assert_ne!(reference, scored(&decoder, Adapters::On));

    // What we write, PEFT's way, is what PEFT wrote.
    let own = tempfile::tempdir().unwrap();
    decoder.adapter(None).unwrap().save(own.path()).unwrap();
    let again = read(own.path());
    assert_eq!(again.config, adapter.config);
    let names = |adapter: &LoraAdapter| {
        let mut names: Vec<String> = adapter.tensors.keys().cloned().collect();
        names.sort();
        names
    };
    assert_eq!(names(&again), names(&adapter));
    for (name, tensor) in &adapter.tensors {
        let difference = (tensor - &again.tensors[name]).unwrap().abs().unwrap();
        let most = difference.max_all().unwrap().to_scalar::<f64>().unwrap();
        assert_eq!(most, 0.0, "{name}");
    }

    // Merged, it is a model that knows nothing of adapters, though its head may be one of its own.
    let merged = tempfile::tempdir().unwrap();
    decoder.save_as(merged.path(), DType::F32).unwrap();
    let config = ModelConfig::from_file(&merged.path().join("config.json")).unwrap();
    let weights = load_weights(merged.path(), &config, DType::F64, &Device::Cpu).unwrap();
    let merged = Decoder::new(config, weights, &Device::Cpu, &Trainable::Frozen, 0).unwrap();
    assert_close(&logits(&merged), &expected(name));
}
