//! Weights that take less room, and products in bf16.

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

    let found = gradients(&narrow, &batch, false);
    assert!(found.iter().flatten().any(|&gradient| gradient != 0.0));
    assert_eq!(found, gradients(&wide, &batch, false));
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

fn numbers(tensor: &Tensor) -> Vec<f64> {
    let tensor = tensor.to_dtype(DType::F64).unwrap();
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the gradient of every variable, given that of the hidden states.
fn gradients(decoder: &Decoder, batch: &PackedBatch, recompute: bool) -> Vec<Vec<f32>> {
    let (_, tape) = decoder.forward(batch, recompute).unwrap();
    let mut gradients = decoder.zero_gradients();
    let dhidden: Vec<f32> = (0..batch.len() * 12).map(|i| (i as f32).sin()).collect();
    let dhidden = Tensor::from_vec(dhidden, (batch.len(), 12), &Device::Cpu).unwrap();
    decoder.backward(tape, &dhidden, &mut gradients).unwrap();
    (0..gradients.len())
        .map(|index| gradients.values_f32(index).unwrap().to_vec())
        .collect()
}

/// A row has the bits that it has alone, in a prompt, a token at a time, and among others.
#[rstest]
fn products_in_bf16_depend_on_no_neighbour(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
) {
    let decoder = narrow(kind, &lora(), WeightFormat::Bf16Products);
    let sequences = [random_tokens(70, 19, 1), random_tokens(7, 19, 2)];
    let batch = PackedBatch::from_sequences(&sequences);
    let found = logits(&decoder, &batch);
    let (hidden, _) = decoder.forward(&batch, true).unwrap();
    assert_eq!(rows(&decoder.logits(&hidden).unwrap()), found);
    let alone = logits(&decoder, &PackedBatch::from_sequences(&sequences[1..]));
    assert_eq!(alone, found[70..]);
    let mut cache = decoder.new_cache(1000);
    let row = [cache.add_row()];
    for (position, token) in sequences[0].iter().enumerate() {
        let mut step = PackedBatch::new();
        step.push(&[*token], position);
        let hidden = decoder.hidden_cached(&step, &mut cache, &row).unwrap();
        assert_eq!(rows(&decoder.logits(&hidden).unwrap())[0], found[position]);
    }
    assert_eq!(
        gradients(&decoder, &batch, true),
        gradients(&decoder, &batch, false)
    );
}

/// An adapter beside the base goes on from what the base has written, as the one that is trained does.
#[rstest]
fn an_adapter_served_in_bf16_has_the_bits_of_the_trained_one(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
) {
    let trained = narrow(kind, &lora(), WeightFormat::Bf16Products);
    let base = narrow(kind, &Trainable::Frozen, WeightFormat::Bf16Products);
    let adapter = trained.adapter(None).unwrap();
    let id = base.add_adapter("policy", &adapter).unwrap();
    let tokens = random_tokens(40, 19, 3);
    let mut batch = PackedBatch::from_sequences([&tokens[..7]]);
    batch.push_adapted(&tokens, 0, Some(id));
    let found = logits(&base, &batch);
    let expected = logits(&trained, &PackedBatch::from_sequences([&tokens]));
    assert_eq!(found[7..], expected);
    let alone = PackedBatch::from_sequences([&tokens[..7]]);
    assert_eq!(found[..7], logits(&base, &alone));
    assert_ne!(found[..7], expected[..7]);
}

/// Products in bf16 round what meets the weights as the weights themselves are rounded: by at most 2^-9 of
/// a number. Each product rounds once in each direction, so logits and gradients move about as far from
/// those of the same weights in `f32` as these are from those of the weights that were not rounded, which
/// also tells how sensitive the model is. A few times as far is a fault.
#[rstest]
fn products_in_bf16_are_as_close_as_weights_in_bf16(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
) {
    let bf16 = narrow(kind, &lora(), WeightFormat::Bf16Products);
    let rounded = narrow(kind, &lora(), WeightFormat::Bf16);
    let original = narrow(kind, &lora(), WeightFormat::Wide);
    for decoder in [&bf16, &rounded, &original] {
        for (name, var) in decoder.variables() {
            let mut values = var.copy().unwrap();
            // Larger ones drive the model to where it is no matter of rounding any more.
            if name.contains("lora_B") {
                values = (values / 8.0).unwrap();
            }
            // The adapter's matrices are rounded as well: by the model in bf16 where it multiplies them.
            if std::ptr::eq(decoder, &rounded) {
                values = values.to_dtype(DType::BF16).unwrap();
            }
            var.set(&values.to_dtype(DType::F32).unwrap()).unwrap();
        }
        decoder.mark_updated();
    }
    let same = |a: &Decoder, b: &Decoder| {
        let values = |decoder: &Decoder| -> Vec<f64> {
            let weights = decoder.weights().into_iter();
            weights.flat_map(|(_, weight)| numbers(&weight)).collect()
        };
        values(a) == values(b)
    };
    assert!(same(&bf16, &rounded) && !same(&bf16, &original));
    let batch = PackedBatch::from_sequences([random_tokens(70, 19, 1), random_tokens(7, 19, 2)]);
    let distance = |found: &[f64], expected: &[f64]| {
        let pairs = found.iter().zip(expected);
        let difference: f64 = pairs.map(|(a, b)| (a - b).powi(2)).sum();
        let size: f64 = expected.iter().map(|a| a.powi(2)).sum();
        (difference / size).sqrt()
    };
    let outputs = |decoder: &Decoder| {
        let gradients = gradients(decoder, &batch, false).concat();
        let gradients = gradients.into_iter().map(f64::from).collect();
        [logits(decoder, &batch).concat(), gradients]
    };
    let (found, expected, before) = (outputs(&bf16), outputs(&rounded), outputs(&original));
    for (which, what) in ["logits", "gradients"].into_iter().enumerate() {
        let away = distance(&found[which], &expected[which]);
        let scale = distance(&expected[which], &before[which]);
        assert!(scale < 0.1, "{what}: {scale} is more than rounding does");
        assert!(away > 0.0 && away < 3.0 * scale, "{what}: {away} {scale}");
    }
}

#[rstest]
fn what_has_no_frozen_matrices_is_refused(
    #[values(WeightFormat::Int8, WeightFormat::Bf16Products)] format: WeightFormat,
) {
    let start = match format {
        WeightFormat::Int8 => "unsupported `dtype`: `int8` with ",
        _ => "unsupported `compute_dtype`: `bf16` with ",
    };
    if format == WeightFormat::Bf16Products {
        let config = toy(ModelType::Qwen3);
        let weights = random_weights(&config, 1, DType::F32, &Device::Cpu).unwrap();
        let dropping = lora_with_dropout();
        let error = Decoder::with_format(config, weights, &Device::Cpu, &dropping, 2, format);
        let message = error.unwrap_err().to_string();
        assert!(
            message.starts_with("unsupported `lora_dropout`: 0.3 with products in bf16"),
            "{message}"
        );
    }
    for (dtype, trainable, part) in [
        (DType::F32, Trainable::Full, "training of all weights"),
        (DType::F64, Trainable::Frozen, "float64"),
    ] {
        let config = toy(ModelType::Qwen3);
        let weights = random_weights(&config, 1, dtype, &Device::Cpu).unwrap();
        let error = Decoder::with_format(config, weights, &Device::Cpu, &trainable, 2, format)
            .expect_err("there is nothing to keep narrow");
        let message = error.to_string();
        assert!(
            message.starts_with(start) && message.contains(part),
            "{message}"
        );
    }
}
