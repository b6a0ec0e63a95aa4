//! Weights that take less room.

use super::*;

fn narrow(kind: ModelType, trainable: &Trainable, format: WeightFormat) -> Decoder {
    let config = toy(kind);
    let weights = random_weights(&config, 1, DType::F32, &Device::Cpu).unwrap();
    let decoder =
        Decoder::with_format(config, weights, &Device::Cpu, trainable, 2, format).unwrap();
    spread(&decoder);
    decoder
}

/// Sampler, trainer and backward pass all see the numbers that the format has left of the weights:
/// everything is as with those numbers in full precision, bit for bit.
#[rstest]
fn a_narrow_model_is_the_wide_model_of_its_own_weights(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
    #[values(WeightFormat::Bf16, WeightFormat::Int8)] format: WeightFormat,
) {
    let narrow = narrow(kind, &lora(), format);
    let weights: Weights = narrow.weights().into_iter().collect();
    let wide = Decoder::new(toy(kind), weights, &Device::Cpu, &lora(), 2).unwrap();
    spread(&wide);
    let original = Decoder::new(
        toy(kind),
        random_weights(&toy(kind), 1, DType::F32, &Device::Cpu).unwrap(),
        &Device::Cpu,
        &lora(),
        2,
    )
    .unwrap();
    spread(&original);

    let sequences = [random_tokens(30, 19, 1), random_tokens(7, 19, 2)];
    let batch = PackedBatch::from_sequences(&sequences);
    let found = logits(&narrow, &batch);
    assert_eq!(found, logits(&wide, &batch));
    assert_ne!(found, logits(&original, &batch));
    // As it is sampled from: alone, a token at a time.
    let mut cache = narrow.new_cache(1000);
    let row = [cache.add_row()];
    for (position, token) in sequences[0].iter().enumerate() {
        let mut step = PackedBatch::new();
        step.push(&[*token], position);
        let hidden = narrow.hidden_cached(&step, &mut cache, &row).unwrap();
        assert_eq!(rows(&narrow.logits(&hidden).unwrap())[0], found[position]);
    }

    let gradients = |decoder: &Decoder| {
        let (_, tape) = decoder.forward(&batch, false).unwrap();
        let mut gradients = decoder.zero_gradients();
        let dhidden = Tensor::ones((37, 12), DType::F32, &Device::Cpu).unwrap();
        decoder.backward(tape, &dhidden, &mut gradients).unwrap();
        (0..gradients.len())
            .map(|index| gradients.values_f32(index).unwrap().to_vec())
            .collect::<Vec<_>>()
    };
    let found = gradients(&narrow);
    assert!(found.iter().flatten().any(|&gradient| gradient != 0.0));
    assert_eq!(found, gradients(&wide));
}

#[test]
fn a_checkpoint_in_bf16_loses_nothing_in_bf16() {
    let config = toy(ModelType::Llama);
    let weights = random_weights(&config, 1, DType::BF16, &Device::Cpu).unwrap();
    let build = |format| {
        let weights = weights.clone();
        Decoder::with_format(
            toy(ModelType::Llama),
            weights,
            &Device::Cpu,
            &Trainable::Frozen,
            2,
            format,
        )
        .unwrap()
    };
    let batch = PackedBatch::from_sequences([random_tokens(30, 19, 1)]);
    let wide = logits(&build(WeightFormat::Wide), &batch);
    assert_eq!(logits(&build(WeightFormat::Bf16), &batch), wide);
}

#[test]
fn what_has_no_frozen_matrices_is_refused() {
    for (dtype, trainable, part) in [
        (DType::F32, Trainable::Full, "training of all weights"),
        (DType::F64, Trainable::Frozen, "float64"),
    ] {
        let config = toy(ModelType::Qwen3);
        let weights = random_weights(&config, 1, dtype, &Device::Cpu).unwrap();
        let format = WeightFormat::Int8;
        let error = Decoder::with_format(config, weights, &Device::Cpu, &trainable, 2, format)
            .expect_err("there is nothing to keep narrow");
        let message = error.to_string();
        assert!(
            message.contains(part) && message.contains("`int8`"),
            "{message}"
        );
    }
}
