//! Plans of models that people run, and of one whose memory was measured.

use super::*;

const GIB: u64 = 1 << 30;

/// Returns a model of this shape, as its `config.json` has it.
fn model(
    kind: &str,
    [hidden, inner, layers, heads, kv_heads, head_dim, vocab]: [usize; 7],
    is_tied: bool,
) -> ModelConfig {
    let json = serde_json::json!({
        "model_type": kind, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": head_dim,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 32768, "tie_word_embeddings": is_tied,
    });
    ModelConfig::from_json(&json.to_string()).unwrap()
}

fn qwen3_1_7b() -> ModelConfig {
    model("qwen3", [2048, 6144, 28, 16, 8, 128, 151_936], true)
}

fn qwen3_8b() -> ModelConfig {
    model("qwen3", [4096, 12_288, 36, 32, 8, 128, 151_936], false)
}

fn qwen2_5_7b() -> ModelConfig {
    model("qwen2", [3584, 18_944, 28, 28, 4, 128, 152_064], false)
}

fn smollm2_135m() -> ModelConfig {
    model("llama", [576, 1536, 30, 9, 3, 64, 49_152], true)
}

fn lora_on_gpu() -> PlanRequest {
    PlanRequest {
        place: Place::Gpu,
        dtype: DType::BF16,
        format: WeightFormat::Wide,
        trainable: Trainable::Lora(LoraConfig::default()),
        critic: false,
        recompute: true,
        micro_batch_tokens: 4096,
        longest: 4096,
        cache_tokens: 65_536,
        parts: 1,
        iterations: 1,
        overlaps: false,
    }
}

#[test]
fn models_fit_the_cards_that_they_are_said_to_fit() {
    for (name, model, parameters, card) in [
        ("Qwen3-1.7B", qwen3_1_7b(), 1_720_574_976, 16),
        ("Qwen3-8B", qwen3_8b(), 8_190_735_360, 48),
        ("Qwen2.5-7B", qwen2_5_7b(), 7_615_616_512, 48),
    ] {
        let plan = plan(&model, &lora_on_gpu());
        assert_eq!(plan.weights, 2 * parameters, "{name}");
        assert!(plan.peak() <= card * GIB, "{name}: {plan:?}");
        // The weights are not all that a plan counts.
        assert!(plan.peak() > plan.weights + 2 * GIB, "{name}: {plan:?}");
    }
}

/// `scripts/compare/trainer.py` measured 1.26 GB at the most for its LoRA step, loading included.
#[test]
fn the_plan_of_the_reference_step_is_what_was_measured() {
    const MEASURED: f64 = 1.26e9;
    let request = PlanRequest {
        place: Place::Cpu,
        dtype: DType::F32,
        recompute: false,
        micro_batch_tokens: 512,
        longest: 256,
        cache_tokens: 0,
        ..lora_on_gpu()
    };
    let trained = trained_numbers(&smollm2_135m(), &request.trainable);
    assert_eq!(trained, 4_884_480);
    let plan = plan(&smollm2_135m(), &request);
    let error = plan.peak() as f64 / MEASURED - 1.0;
    assert!(error.abs() < 0.1, "{error}: {plan:?}");
}

#[test]
fn what_a_budget_allows_fits_it_and_one_step_more_does_not() {
    let model = smollm2_135m();
    let request = PlanRequest {
        place: Place::Cpu,
        dtype: DType::F32,
        recompute: false,
        micro_batch_tokens: 16_384,
        longest: 300,
        ..lora_on_gpu()
    };
    let peak = |tokens| {
        let request = PlanRequest {
            micro_batch_tokens: tokens,
            ..request.clone()
        };
        plan(&model, &request).training()
    };
    let request = PlanRequest {
        cache_tokens: 0,
        ..request.clone()
    };
    for budget in [GIB * 5 / 4, 2 * GIB, 4 * GIB] {
        let tokens = largest_micro_batch(&model, &request, budget).unwrap();
        assert!(
            peak(tokens) <= budget && peak(tokens + 64) > budget,
            "{tokens}"
        );
    }
    assert_eq!(
        largest_micro_batch(&model, &request, 100 * GIB),
        Some(16_384)
    );
    assert_eq!(largest_micro_batch(&model, &request, GIB / 4), None);
}

#[test]
fn a_budget_prefers_passes_that_keep_what_they_made() {
    let model = smollm2_135m();
    let request = PlanRequest {
        place: Place::Cpu,
        dtype: DType::F32,
        recompute: true,
        micro_batch_tokens: 16_384,
        longest: 1000,
        cache_tokens: 0,
        ..lora_on_gpu()
    };
    let roomy = choose(&model, &request, 4 * GIB).unwrap();
    assert!(
        !roomy.recompute && roomy.micro_batch_tokens >= 1000,
        "{roomy:?}"
    );
    let tight = choose(&model, &request, GIB * 5 / 4).unwrap();
    assert!(
        tight.recompute && tight.micro_batch_tokens >= 1000,
        "{tight:?}"
    );
    assert_eq!(choose(&model, &request, GIB / 2), None);
}

#[test]
fn full_training_holds_four_numbers_more_for_each_weight() {
    let model = qwen3_1_7b();
    let full = PlanRequest {
        trainable: Trainable::Full,
        ..lora_on_gpu()
    };
    let trained = trained_numbers(&model, &Trainable::Full);
    assert_eq!(trained, 1_720_574_976);
    let plan = plan(&model, &full);
    assert_eq!(plan.optimizer + plan.gradients, 12 * trained);
    assert_eq!(plan.adapter, 0);
    // What waits for its other half, and the way back to where a step began.
    let of = |parts, iterations| {
        let full = PlanRequest {
            parts,
            iterations,
            ..full.clone()
        };
        super::plan(&model, &full).gradients / (4 * trained)
    };
    assert_eq!([of(1, 1), of(2, 1), of(8, 1), of(1, 2)], [1, 3, 5, 4]);
}

#[test]
fn weights_take_the_room_of_their_format() {
    let model = qwen3_1_7b();
    let on_cpu = |format| {
        let request = PlanRequest {
            place: Place::Cpu,
            dtype: DType::F32,
            format,
            ..lora_on_gpu()
        };
        plan(&model, &request)
    };
    let wide = on_cpu(WeightFormat::Wide);
    for (format, share) in [
        (WeightFormat::Bf16, 2.0 / 4.0),
        (WeightFormat::Int8, 1.125 / 4.0),
    ] {
        let narrow = on_cpu(format);
        let found = narrow.weights as f64 / wide.weights as f64;
        assert!((found - share).abs() < 1e-3, "{format:?}: {found}");
        // All else is computed in `f32`.
        let (weights, expected) = (narrow.weights, wide.weights);
        assert_eq!(narrow.peak() - weights, wide.peak() - expected);
    }
    // What is trained is kept whole, with panels beside it.
    let full = PlanRequest {
        place: Place::Cpu,
        dtype: DType::F32,
        trainable: Trainable::Full,
        ..lora_on_gpu()
    };
    assert_eq!(plan(&model, &full).weights, 4 * 1_720_574_976);
    assert_eq!(plan(&model, &full).adapter, wide.weights - norms(&model));
}

#[test]
fn modules_beside_an_adapter_count_as_what_is_trained() {
    for (model, modules, ensure_weight_tying, matrices, panels) in [
        (qwen3_8b(), &["lm_head"][..], false, 1, 1),
        (qwen3_8b(), &["lm_head", "embed_tokens"], true, 2, 1),
        (qwen3_1_7b(), &["embed_tokens"], false, 1, 0),
        (qwen3_1_7b(), &["lm_head", "embed_tokens"], false, 2, 1),
        (qwen3_1_7b(), &["lm_head"], true, 1, 1),
    ] {
        let with = Trainable::Lora(LoraConfig {
            modules_to_save: modules.iter().map(|&name| name.to_owned()).collect(),
            ensure_weight_tying,
            ..LoraConfig::default()
        });
        let numbers = (model.vocab_size * model.hidden_size) as u64;
        let without = Trainable::Lora(LoraConfig::default());
        let trained = trained_numbers(&model, &with) - trained_numbers(&model, &without);
        assert_eq!(trained, matrices * numbers);
        for (place, panels) in [(Place::Gpu, 0), (Place::Cpu, panels)] {
            let of = |trainable: &Trainable| {
                let request = PlanRequest {
                    place,
                    dtype: DType::F32,
                    trainable: trainable.clone(),
                    ..lora_on_gpu()
                };
                plan(&model, &request)
            };
            let (found, before) = (of(&with), of(&without));
            assert_eq!(found.optimizer - before.optimizer, 8 * trained);
            assert_eq!(found.gradients - before.gradients, 4 * trained);
            let adapter = found.adapter - before.adapter;
            // Panels round the rows up.
            let (least, most) = (
                4 * (trained + panels * numbers),
                4 * (trained + panels * numbers) * 101 / 100,
            );
            assert!(
                (least..=most).contains(&adapter),
                "{modules:?}: {adapter} {least}"
            );
            // The base stays, for the reference.
            assert_eq!(found.weights, before.weights);
        }
    }
}

#[test]
fn what_is_dropped_is_held_beside_what_is_kept() {
    let model = smollm2_135m();
    let of = |dropout: f64| {
        let request = PlanRequest {
            place: Place::Cpu,
            dtype: DType::F32,
            trainable: Trainable::Lora(LoraConfig {
                dropout,
                ..LoraConfig::default()
            }),
            ..lora_on_gpu()
        };
        plan(&model, &request)
    };
    let (without, with) = (of(0.0), of(0.1));
    // Inputs of the widest layer and their gradient, in `f32`.
    assert_eq!(with.workspace - without.workspace, 4096 * 4 * 2 * 1536);
    let added = with.training() - without.training();
    assert_eq!(added, with.workspace - without.workspace);
}

/// Returns the bytes in `f32` of all that is no matrix.
fn norms(model: &ModelConfig) -> u64 {
    let vectors = tensor_shapes(model).into_iter().map(|(_, shape)| shape);
    let vectors = vectors.filter(|shape| shape.len() == 1);
    vectors.map(|shape| 4 * shape[0] as u64).sum()
}

#[test]
fn a_model_in_single_precision_takes_twice_the_room_on_a_gpu() {
    let half = plan(&qwen3_1_7b(), &lora_on_gpu());
    let request = PlanRequest {
        dtype: DType::F32,
        ..lora_on_gpu()
    };
    let single = plan(&qwen3_1_7b(), &request);
    assert_eq!(single.weights, 2 * half.weights);
    assert_eq!(single.cache, 2 * half.cache);
    assert_eq!(single.activations, 2 * half.activations);
    assert!(single.workspace > half.workspace);
    assert_eq!(single.adapter, half.adapter, "it is `f32` in both");
}

#[test]
fn a_value_head_is_counted_and_is_small() {
    let model = qwen3_8b();
    let without = plan(&model, &lora_on_gpu());
    let request = PlanRequest {
        critic: true,
        ..lora_on_gpu()
    };
    let with = plan(&model, &request);
    let added = with.peak() - without.peak();
    assert_eq!((without.critic, with.critic), (0, added));
    // Whatever the micro-batch: no copy of its hidden states is made.
    assert!((1 << 20..16 << 20).contains(&added), "{added}");
}

#[test]
fn a_run_that_samples_while_it_trains_needs_the_room_of_both() {
    let model = qwen3_1_7b();
    let apart = plan(&model, &lora_on_gpu());
    let request = PlanRequest {
        overlaps: true,
        ..lora_on_gpu()
    };
    let together = plan(&model, &request);
    assert_eq!(together.peak(), apart.training() + apart.cache);
    assert_eq!(together.sampling(), apart.sampling());
    // A budget is kept to by smaller micro-batches.
    let budget = together.peak() - (1 << 20);
    let least = largest_micro_batch(&model, &request, budget);
    let wide = PlanRequest {
        micro_batch_tokens: 16_384,
        ..request
    };
    assert_eq!(least, None, "its longest sequence fills it");
    let found = largest_micro_batch(&model, &wide, together.peak() + (1 << 20));
    assert!(found.is_some_and(|tokens| tokens < 16_384), "{found:?}");
}
