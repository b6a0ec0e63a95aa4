use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;

mod formats;

use super::tests_support::{formula_weights, golden_folder, random_tokens, scaled_llama, toy};
use super::*;
use crate::engine::{KvCache, RowId};

pub(super) fn decoder(kind: ModelType, dtype: DType, trainable: &Trainable) -> Decoder {
    build(toy(kind), dtype, trainable, true)
}

/// The same numbers on plain tensor operations.
fn composed(kind: ModelType, dtype: DType, trainable: &Trainable) -> Decoder {
    build(toy(kind), dtype, trainable, false)
}

pub(super) fn build(
    config: ModelConfig,
    dtype: DType,
    trainable: &Trainable,
    is_fused: bool,
) -> Decoder {
    let mut weights = random_weights(&config, 1, dtype, &Device::Cpu).unwrap();
    for (name, weight) in &mut weights {
        if name.ends_with(".bias") {
            let values: Vec<f64> = (0..weight.elem_count())
                .map(|i| 0.1 * ((i * 7 + name.len()) as f64).sin())
                .collect();
            let values = Tensor::new(values, &Device::Cpu).unwrap();
            *weight = values.to_dtype(dtype).unwrap();
        }
    }
    let build = if is_fused {
        Decoder::new
    } else {
        Decoder::new_composed
    };
    let decoder = build(config, weights, &Device::Cpu, trainable, 2).unwrap();
    spread(&decoder);
    decoder
}

fn is_beside_an_adapter(decoder: &Decoder, name: &str) -> bool {
    decoder.lora().is_some() && !name.contains("lora_")
}

/// Gives adapters, what is trained beside them and norms numbers that are neither zero nor one.
fn spread(decoder: &Decoder) {
    for (index, (name, var)) in decoder.variables().iter().enumerate() {
        if name.contains("lora_B") || name.contains("norm") || is_beside_an_adapter(decoder, name) {
            let len = var.elem_count();
            let values: Vec<f64> = (0..len)
                .map(|i| 0.6 + 0.3 * ((i * 7 + index) as f64).sin())
                .collect();
            let values = Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap();
            var.set(&values.to_dtype(var.dtype()).unwrap()).unwrap();
        }
    }
    decoder.mark_updated();
}

pub(super) fn lora() -> Trainable {
    Trainable::Lora(LoraConfig {
        rank: 3,
        alpha: 6.0,
        ..LoraConfig::default()
    })
}

/// As [`lora`], with head and embedding trained in full, as one where they are one if asked.
fn lora_and_head(ensure_weight_tying: bool) -> Trainable {
    Trainable::Lora(LoraConfig {
        rank: 3,
        alpha: 6.0,
        modules_to_save: ["lm_head", "embed_tokens"].map(str::to_owned).to_vec(),
        ensure_weight_tying,
        ..LoraConfig::default()
    })
}

fn lora_with_dropout() -> Trainable {
    Trainable::Lora(LoraConfig {
        rank: 3,
        alpha: 6.0,
        dropout: 0.3,
        ..LoraConfig::default()
    })
}

pub(super) fn rows(tensor: &Tensor) -> Vec<Vec<f64>> {
    tensor.to_dtype(DType::F64).unwrap().to_vec2().unwrap()
}

pub(super) fn logits(decoder: &Decoder, batch: &PackedBatch) -> Vec<Vec<f64>> {
    let hidden = decoder.hidden(batch, Adapters::On).unwrap();
    rows(&decoder.logits(&hidden).unwrap())
}

#[track_caller]
pub(super) fn assert_close(found: &[Vec<f64>], expected: &[Vec<f64>], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() < tolerance, "{found} {expected}");
    }
}

const KINDS: [ModelType; 3] = [ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama];

#[rstest]
fn later_tokens_do_not_change_earlier_logits(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
) {
    let decoder = decoder(kind, DType::F32, &lora());
    let tokens = random_tokens(70, 19, 3);
    let all = logits(&decoder, &PackedBatch::from_sequences([&tokens]));
    for changed in [1, 33, 69] {
        let mut other = tokens.clone();
        for token in &mut other[changed..] {
            *token = (*token + 1) % 19;
        }
        let found = logits(&decoder, &PackedBatch::from_sequences([&other]));
        assert_eq!(found[..changed], all[..changed]);
        assert_ne!(found[changed], all[changed]);
    }
}

#[rstest]
fn a_packed_sequence_has_the_bits_of_the_sequence_alone(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
) {
    let decoder = decoder(kind, DType::F32, &lora());
    let sequences: Vec<_> = [1, 5, 64, 17, 100, 2]
        .iter()
        .map(|&len| random_tokens(len, 19, len as u64))
        .collect();
    let packed = logits(&decoder, &PackedBatch::from_sequences(&sequences));
    let mut start = 0;
    for sequence in &sequences {
        let alone = logits(&decoder, &PackedBatch::from_sequences([sequence]));
        assert_eq!(packed[start..start + sequence.len()], alone);
        start += sequence.len();
    }
}

/// Ranges of a batch, from the root to a leaf.
type Path = Vec<std::ops::Range<usize>>;

/// A prompt, two answers to it, and two continuations of the first answer.
fn tree() -> (PackedBatch, Vec<Vec<u32>>, Vec<Path>) {
    let part = |len: usize, seed| random_tokens(len, 19, seed);
    let (prompt, a, b, c, d) = (part(40, 1), part(9, 2), part(70, 3), part(1, 4), part(5, 5));
    let mut batch = PackedBatch::from_sequences([part(3, 9), prompt.clone()]);
    batch.push_child(1, &a);
    batch.push_child(1, &b);
    batch.push_child(2, &c);
    batch.push_child(2, &d);
    let segments = batch.segments().to_vec();
    let of = |indices: &[usize]| {
        indices
            .iter()
            .map(|&i| segments[i].clone())
            .collect::<Vec<_>>()
    };
    let paths = vec![of(&[0]), of(&[1, 3]), of(&[1, 2, 4]), of(&[1, 2, 5])];
    let sequences = vec![
        part(3, 9),
        [&prompt[..], &b].concat(),
        [&prompt[..], &a, &c].concat(),
        [&prompt[..], &a, &d].concat(),
    ];
    (batch, sequences, paths)
}

#[rstest]
fn a_path_through_a_tree_has_the_bits_of_the_sequence_alone(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
) {
    let decoder = decoder(kind, DType::F32, &lora());
    let (batch, sequences, paths) = tree();
    let packed = logits(&decoder, &batch);
    for (sequence, path) in sequences.iter().zip(paths) {
        let alone = logits(&decoder, &PackedBatch::from_sequences([sequence]));
        let found: Vec<_> = path
            .into_iter()
            .flat_map(|range| packed[range].to_vec())
            .collect();
        assert_eq!(found, alone);
    }
}

#[rstest]
fn a_tree_has_the_summed_gradient_of_its_paths(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
    #[values(Trainable::Full, lora())] trainable: Trainable,
    #[values(false, true)] is_fused: bool,
) {
    let build = if is_fused { decoder } else { composed };
    let decoder = build(kind, DType::F64, &trainable);
    let (batch, sequences, paths) = tree();
    // The gradient of a path's hidden state at its place; a shared place gets the sum.
    let slope = |path: usize, place: usize, d: usize| ((path * 31 + place * 7 + d) as f64).sin();
    let gradients = |batch: &PackedBatch, dhidden: Vec<f64>| {
        let (_, tape) = decoder.forward(batch, false).unwrap();
        let dhidden = Tensor::from_vec(dhidden, (batch.len(), 12), &Device::Cpu).unwrap();
        let mut gradients = decoder.zero_gradients();
        decoder.backward(tape, &dhidden, &mut gradients).unwrap();
        gradients
    };
    let mut dtree = vec![0.0; batch.len() * 12];
    let mut alone = Vec::new();
    for (index, (sequence, path)) in sequences.iter().zip(paths).enumerate() {
        let mut dpath = Vec::new();
        for (place, token) in path.into_iter().flatten().enumerate() {
            for d in 0..12 {
                dpath.push(slope(index, place, d));
                dtree[token * 12 + d] += slope(index, place, d);
            }
        }
        alone.push(gradients(&PackedBatch::from_sequences([sequence]), dpath));
    }
    let found = gradients(&batch, dtree);
    for index in 0..found.len() {
        let found = found.tensor(index).unwrap().to_dtype(DType::F64).unwrap();
        let mut expected = found.zeros_like().unwrap();
        for part in &alone {
            let part = part.tensor(index).unwrap().to_dtype(DType::F64).unwrap();
            expected = (expected + part).unwrap();
        }
        let worst = (found - expected)
            .unwrap()
            .abs()
            .unwrap()
            .flatten_all()
            .unwrap();
        assert!(worst.max(0).unwrap().to_scalar::<f64>().unwrap() < 1e-9);
    }
}

#[rstest]
fn cached_decoding_has_the_bits_of_the_full_pass(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
    #[values(lora(), lora_and_head(false))] trainable: Trainable,
) {
    let decoder = decoder(kind, DType::F32, &trainable);
    let sequences: Vec<_> = (0..5)
        .map(|i| random_tokens(50 + i, 19, i as u64))
        .collect();
    let mut cache = decoder.new_cache(10_000);
    let ids: Vec<RowId> = sequences.iter().map(|_| cache.add_row()).collect();
    let mut found: Vec<Vec<Vec<f64>>> = vec![Vec::new(); sequences.len()];
    // Ragged prompts, then single tokens; rows finish at different times.
    let mut chunks: Vec<usize> = (0..5).map(|i| 3 + 11 * i).collect();
    loop {
        let mut batch = PackedBatch::new();
        let (mut members, mut active) = (Vec::new(), Vec::new());
        for (index, sequence) in sequences.iter().enumerate() {
            let done = found[index].len();
            let end = sequence.len().min(done + chunks[index]);
            if end > done {
                batch.push(&sequence[done..end], done);
                members.push(index);
                active.push(ids[index]);
            }
        }
        if members.is_empty() {
            break;
        }
        let hidden = decoder.hidden_cached(&batch, &mut cache, &active).unwrap();
        let logits = rows(&decoder.logits(&hidden).unwrap());
        for (&index, segment) in members.iter().zip(batch.segments()) {
            found[index].extend_from_slice(&logits[segment.clone()]);
        }
        chunks.fill(1);
    }
    for (sequence, found) in sequences.iter().zip(&found) {
        let full = logits(&decoder, &PackedBatch::from_sequences([sequence]));
        assert_eq!(found, &full);
    }
}

/// What is left out of a prompt's last layer changes no bit of what is not, nor of what follows.
#[rstest]
fn last_tokens_have_the_bits_of_the_whole_pass(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
    #[values(true, false)] is_fused: bool,
) {
    let decoder = build(toy(kind), DType::F32, &Trainable::Frozen, is_fused);
    let adapter = build(toy(kind), DType::F32, &lora(), is_fused)
        .adapter(None)
        .unwrap();
    let id = decoder.add_adapter("one", &adapter).unwrap();
    let mut caches = [(); 2].map(|()| decoder.new_cache(1000));
    let ids = (caches.each_mut()).map(|cache| [(); 4].map(|()| cache.add_row()));
    let [whole, part] = &mut caches;
    let mut lengths = [0; 4];
    for (step, lens) in [[5, 70, 3, 0], [1, 1, 40, 2], [1, 1, 1, 1]]
        .into_iter()
        .enumerate()
    {
        let mut batch = PackedBatch::new();
        for (row, len) in lens.into_iter().enumerate() {
            let tokens = random_tokens(len, 19, (step * 4 + row) as u64);
            batch.push_adapted(&tokens, lengths[row], Some(id).filter(|_| row % 2 == 1));
        }
        let hidden = rows(&decoder.hidden_cached(&batch, whole, &ids[0]).unwrap());
        let pass = |part: &mut KvCache, wanted: &[usize]| {
            let found = decoder.last_hidden_cached(&batch, part, &ids[1], wanted);
            let found = rows(&found.unwrap());
            let last = |&segment: &usize| &hidden[batch.segments()[segment].end - 1];
            assert!(found.iter().eq(wanted.iter().map(last)), "{wanted:?}");
        };
        pass(part, &[2, 0]);
        for wanted in [&[][..], &[1]] {
            for (&id, &len) in ids[1].iter().zip(&lengths) {
                part.truncate(id, len).unwrap();
            }
            pass(part, wanted);
        }
        for (length, len) in lengths.iter_mut().zip(lens) {
            *length += len;
        }
    }
    let mut batch = PackedBatch::new();
    batch.push(&[], 0);
    for missing in [0, 1] {
        let error = decoder
            .last_hidden_cached(&batch, part, &ids[1][..1], &[missing])
            .unwrap_err();
        assert!(
            error.to_string().contains("last token is asked for"),
            "{error}"
        );
    }
}

#[test]
fn forked_rows_continue_the_same_prompt_apart() {
    let decoder = decoder(ModelType::Qwen3, DType::F32, &lora());
    let prompt = random_tokens(37, 19, 1);
    let mut cache = decoder.new_cache(1000);
    let first = cache.add_row();
    let batch = PackedBatch::from_sequences([&prompt]);
    decoder.hidden_cached(&batch, &mut cache, &[first]).unwrap();
    let second = cache.fork(first).unwrap();
    let mut step = PackedBatch::new();
    step.push(&[4, 5], 37);
    step.push(&[6], 37);
    let hidden = decoder
        .hidden_cached(&step, &mut cache, &[first, second])
        .unwrap();
    let found = rows(&decoder.logits(&hidden).unwrap());
    let full = |tail: &[u32]| {
        logits(
            &decoder,
            &PackedBatch::from_sequences([[&prompt[..], tail].concat()]),
        )
    };
    assert_eq!(found[..2], full(&[4, 5])[37..]);
    assert_eq!(found[2..], full(&[6])[37..]);
}

#[test]
fn a_refused_cached_pass_leaves_the_cache_as_it_was() {
    let decoder = decoder(ModelType::Qwen3, DType::F32, &Trainable::Frozen);
    let mut cache = decoder.new_cache(64);
    let row = cache.add_row();
    let mut batch = PackedBatch::new();
    batch.push(&[1, 2, 3], 0);
    decoder.hidden_cached(&batch, &mut cache, &[row]).unwrap();
    let mut tree = PackedBatch::new();
    tree.push(&[4], 3);
    tree.push_child(0, &[5]);
    let other = cache.add_row();
    let error = decoder
        .hidden_cached(&tree, &mut cache, &[row, other])
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "ancestors of a segment in a cached pass: 1 != 0"
    );
    let error = decoder
        .hidden_cached(&batch, &mut cache, &[row])
        .unwrap_err();
    let message = "first position of a segment against its cache row: 0 != 3";
    assert_eq!(error.to_string(), message);
    assert_eq!((cache.len(row).unwrap(), cache.tokens_in_use()), (3, 32));
}

#[rstest]
fn both_back_ends_agree(
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
        lora_and_head(false),
        lora_and_head(true),
        lora_with_dropout()
    )]
    trainable: Trainable,
) {
    let fused = build(config.clone(), DType::F64, &trainable, true);
    let composed = build(config, DType::F64, &trainable, false);
    let sequences: Vec<_> = [3, 1, 9]
        .iter()
        .map(|&len| random_tokens(len, 19, 5))
        .collect();
    let batch = PackedBatch::from_sequences(&sequences);
    assert_close(&logits(&fused, &batch), &logits(&composed, &batch), 1e-11);

    let dhidden: Vec<f64> = (0..13 * 12).map(|i| (i as f64 * 0.37).sin()).collect();
    let dhidden = Tensor::from_vec(dhidden, (13, 12), &Device::Cpu).unwrap();
    let gradients = |decoder: &Decoder| {
        let (hidden, tape) = decoder.forward_dropping(&batch, false, Some(9)).unwrap();
        let mut gradients = decoder.zero_gradients();
        decoder.backward(tape, &dhidden, &mut gradients).unwrap();
        (gradients, rows(&hidden))
    };
    let ((found, hidden), (expected, expected_hidden)) = (gradients(&fused), gradients(&composed));
    assert_close(&hidden, &expected_hidden, 1e-11);
    let undropped = rows(&fused.hidden(&batch, Adapters::On).unwrap());
    let is_dropped = fused.lora().is_some_and(|lora| lora.dropout > 0.0);
    assert_eq!(hidden != undropped, is_dropped);
    assert_eq!(found.len(), expected.len());
    for index in 0..found.len() {
        if found.name(index) == "lm_head.weight" {
            continue;
        }
        let read = |gradients: &Gradients| {
            let tensor = gradients.tensor(index).unwrap();
            tensor
                .flatten_all()
                .unwrap()
                .to_dtype(DType::F64)
                .unwrap()
                .to_vec1::<f64>()
                .unwrap()
        };
        let (found_values, expected_values) = (read(&found), read(&expected));
        assert!(
            found_values.iter().any(|&value| value != 0.0),
            "{}",
            found.name(index)
        );
        assert_close(&[found_values], &[expected_values], 1e-10);
    }
}

/// On other devices the base may be in half precision, the adapter and all sums in `f32`.
#[rstest]
fn a_half_precision_base_trains_its_adapter(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
    #[values((DType::F16, 0.04), (DType::BF16, 0.3))] (dtype, tolerance): (DType, f32),
    #[values(lora(), lora_and_head(true))] trainable: Trainable,
) {
    let half = composed(kind, dtype, &trainable);
    let whole = decoder(kind, DType::F32, &trainable);
    assert_eq!(half.dtype(), dtype);
    let batch = PackedBatch::from_sequences([random_tokens(9, 19, 1), random_tokens(4, 19, 2)]);
    let hidden = half.hidden(&batch, Adapters::On).unwrap();
    assert_eq!(half.logits(&hidden).unwrap().dtype(), DType::F32);
    assert_close(&logits(&half, &batch), &logits(&whole, &batch), 0.02);
    let gradients = |decoder: &Decoder| {
        let (_, tape) = decoder.forward(&batch, false).unwrap();
        let dhidden: Vec<f64> = (0..13 * 12).map(|i| (i as f64 * 0.37).sin()).collect();
        let dhidden = Tensor::from_vec(dhidden, (13, 12), &Device::Cpu).unwrap();
        let dhidden = dhidden.to_dtype(decoder.dtype()).unwrap();
        let mut gradients = decoder.zero_gradients();
        decoder.backward(tape, &dhidden, &mut gradients).unwrap();
        gradients
    };
    let (found, expected) = (gradients(&half), gradients(&whole));
    let (mut difference, mut total) = (0.0_f32, 0.0_f32);
    for index in 0..expected.len() {
        let (found, expected) = (
            found.tensor(index).unwrap(),
            expected.tensor(index).unwrap(),
        );
        assert_eq!(found.dtype(), DType::F32);
        let sum = |t: &Tensor| {
            t.sqr()
                .unwrap()
                .sum_all()
                .unwrap()
                .to_scalar::<f32>()
                .unwrap()
        };
        difference += sum(&(found - &expected).unwrap());
        total += sum(&expected);
    }
    // Rounding to 11 and 8 bits, blown up by a toy whose adapters outweigh its base: the error
    // falls with the bits that are kept, as a wrong term's would not.
    let error = (difference / total).sqrt();
    assert!(error < tolerance, "{error}");
}

#[rstest]
fn both_back_ends_decode_alike(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
) {
    let run = |decoder: &Decoder| {
        let mut cache = decoder.new_cache(1000);
        let (a, b) = (cache.add_row(), cache.add_row());
        let mut first = PackedBatch::new();
        first.push(&[1, 2, 3, 4], 0);
        first.push(&[5, 6], 0);
        decoder.hidden_cached(&first, &mut cache, &[a, b]).unwrap();
        cache.truncate(b, 1).unwrap();
        let c = cache.fork(a).unwrap();
        let mut second = PackedBatch::new();
        second.push(&[7], 1);
        second.push(&[8, 9], 4);
        rows(&decoder.hidden_cached(&second, &mut cache, &[b, c]).unwrap())
    };
    let found = run(&decoder(kind, DType::F64, &lora()));
    assert_close(&found, &run(&composed(kind, DType::F64, &lora())), 1e-11);
}

#[rstest]
fn recomputation_gives_the_same_gradient_bits(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
    #[values(Trainable::Full, lora(), lora_and_head(true), lora_with_dropout())]
    trainable: Trainable,
) {
    let decoder = decoder(kind, DType::F32, &trainable);
    let batch = PackedBatch::from_sequences([random_tokens(30, 19, 1), random_tokens(7, 19, 2)]);
    let dhidden = Tensor::ones((37, 12), DType::F32, &Device::Cpu).unwrap();
    let gradients = |recompute: bool| {
        let (_, tape) = decoder
            .forward_dropping(&batch, recompute, Some(4))
            .unwrap();
        let mut gradients = decoder.zero_gradients();
        decoder.backward(tape, &dhidden, &mut gradients).unwrap();
        gradients
    };
    let (plain, recomputed) = (gradients(false), gradients(true));
    for index in 0..plain.len() {
        assert_eq!(plain.values_f32(index), recomputed.values_f32(index));
    }
}

#[test]
fn a_fresh_adapter_changes_nothing_and_is_its_own_reference() {
    let config = toy(ModelType::Qwen3);
    let weights = random_weights(&config, 1, DType::F32, &Device::Cpu).unwrap();
    let decoder = Decoder::new(config, weights, &Device::Cpu, &lora(), 2).unwrap();
    let batch = PackedBatch::from_sequences([random_tokens(12, 19, 4)]);
    let hidden = |adapters| rows(&decoder.hidden(&batch, adapters).unwrap());
    assert_eq!(hidden(Adapters::On), hidden(Adapters::Off));
    spread(&decoder);
    assert_ne!(hidden(Adapters::On), hidden(Adapters::Off));
}

#[rstest]
fn merged_weights_compute_what_the_adapter_does(
    #[values(ModelType::Qwen3, ModelType::Qwen2, ModelType::Llama)] kind: ModelType,
    #[values(lora(), lora_and_head(false), lora_and_head(true))] trainable: Trainable,
) {
    let adapted = decoder(kind, DType::F64, &trainable);
    let merged: Weights = adapted.merged_weights().unwrap().into_iter().collect();
    let config = ModelConfig {
        tie_word_embeddings: !merged.contains_key("lm_head.weight"),
        ..toy(kind)
    };
    let merged = Decoder::new(config, merged, &Device::Cpu, &Trainable::Frozen, 0).unwrap();
    let batch = PackedBatch::from_sequences([random_tokens(12, 19, 4)]);
    assert_close(&logits(&merged, &batch), &logits(&adapted, &batch), 1e-12);
}

/// What is trained in full beside an adapter starts as what it stands beside, in whatever format that is
/// held, and adapters begin as they do without it.
#[rstest]
fn modules_beside_a_fresh_adapter_change_nothing_at_first(
    #[values(ModelType::Qwen3, ModelType::Llama)] kind: ModelType,
    #[values(WeightFormat::Wide, WeightFormat::Bf16, WeightFormat::Int8)] format: WeightFormat,
    #[values(false, true)] ensure_weight_tying: bool,
) {
    let build = |trainable: &Trainable| {
        let weights = random_weights(&toy(kind), 1, DType::F32, &Device::Cpu).unwrap();
        Decoder::with_format(toy(kind), weights, &Device::Cpu, trainable, 2, format).unwrap()
    };
    let (plain, saved) = (build(&lora()), build(&lora_and_head(ensure_weight_tying)));
    let batch = PackedBatch::from_sequences([random_tokens(12, 19, 4)]);
    assert_eq!(logits(&saved, &batch), logits(&plain, &batch));
    let read = |var: &Var| var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let pairs = plain.variables().iter().zip(saved.variables());
    for ((name, plain), (found, saved)) in pairs {
        assert_eq!((found, read(saved)), (name, read(plain)));
    }
    let beside = if ensure_weight_tying && kind == ModelType::Qwen3 {
        &["model.embed_tokens.weight"][..]
    } else {
        &["model.embed_tokens.weight", "lm_head.weight"]
    };
    let names: Vec<&String> = saved.variables().iter().map(|(name, _)| name).collect();
    assert_eq!(names[plain.variables().len()..], *beside);
}

#[test]
fn modules_beside_an_adapter_are_checked() {
    let kind = ModelType::Qwen3;
    let found = |trainable: &Trainable| {
        let decoder = decoder(kind, DType::F32, trainable);
        decoder.adapter(None).unwrap()
    };
    let (apart, tied) = (found(&lora_and_head(false)), found(&lora_and_head(true)));
    let decoder = decoder(kind, DType::F32, &lora_and_head(true));
    decoder.load_adapter(&tied).unwrap();
    let error = decoder.load_adapter(&apart).unwrap_err().to_string();
    let expected = "invalid `modules_to_save`: `lm_head` and `embed_tokens` in the adapter, `lm_head` \
                    and `embed_tokens` as one here";
    assert_eq!(error, expected);
    // Two that are said to be one.
    let mut torn = tied.clone();
    let head = (&torn.tensors["lm_head.weight"] + 1.0).unwrap();
    torn.tensors.insert("lm_head.weight".to_owned(), head);
    let error = decoder.load_adapter(&torn).unwrap_err().to_string();
    assert!(
        error.starts_with("invalid `ensure_weight_tying`"),
        "{error}"
    );
    // Rows of one batch have one head.
    let base = build(toy(kind), DType::F32, &Trainable::Frozen, true);
    let error = base.add_adapter("one", &tied).unwrap_err().to_string();
    assert!(
        error.starts_with("unsupported `modules_to_save`: `lm_head`, `embed_tokens`"),
        "{error}"
    );
    let norm = Trainable::Lora(LoraConfig {
        modules_to_save: vec!["norm".to_owned()],
        ..LoraConfig::default()
    });
    let weights = random_weights(&toy(kind), 1, DType::F32, &Device::Cpu).unwrap();
    let error = Decoder::new(toy(kind), weights, &Device::Cpu, &norm, 0).unwrap_err();
    let error = error.to_string();
    assert!(
        error.starts_with("unsupported `modules_to_save`: `norm`"),
        "{error}"
    );
}

#[test]
fn an_update_is_visible_to_the_sampler_at_once() {
    let decoder = decoder(ModelType::Qwen3, DType::F32, &lora());
    let batch = PackedBatch::from_sequences([[1, 2, 3]]);
    let sample = || {
        let mut cache = decoder.new_cache(100);
        let row = cache.add_row();
        rows(&decoder.hidden_cached(&batch, &mut cache, &[row]).unwrap())
    };
    let before = sample();
    let (_, tape) = decoder.forward(&batch, false).unwrap();
    let (name, var): &(String, Var) = &decoder.variables()[0];
    assert_eq!(name, "model.layers.0.self_attn.q_proj.lora_A.weight");
    var.set(&(var.as_detached_tensor() * 2.0).unwrap()).unwrap();
    decoder.mark_updated();
    assert_ne!(sample(), before);

    let dhidden = Tensor::ones((3, 12), DType::F32, &Device::Cpu).unwrap();
    let error = decoder
        .backward(tape, &dhidden, &mut decoder.zero_gradients())
        .unwrap_err();
    let message = "the tape was recorded at weights version 1, the weights are at 2";
    assert_eq!(error.to_string(), message);
}

#[test]
fn a_saved_model_loads_again() {
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let decoder = decoder(kind, DType::F32, &Trainable::Full);
        decoder.save(folder.path()).unwrap();
        let config = ModelConfig::from_file(&folder.path().join("config.json")).unwrap();
        assert_eq!(&config, decoder.config());
        let weights = load_weights(folder.path(), &config, DType::F32, &Device::Cpu).unwrap();
        let loaded = Decoder::new(config, weights, &Device::Cpu, &Trainable::Frozen, 0).unwrap();
        let batch = PackedBatch::from_sequences([random_tokens(12, 19, 4)]);
        assert_eq!(logits(&loaded, &batch), logits(&decoder, &batch));
    }
}

#[test]
fn a_saved_adapter_loads_again() {
    let folder = tempfile::tempdir().unwrap();
    let saved = decoder(ModelType::Llama, DType::F32, &lora());
    saved
        .adapter(Some("org/base"))
        .unwrap()
        .save(folder.path())
        .unwrap();
    let adapter = LoraAdapter::load(folder.path(), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(adapter.base_model.as_deref(), Some("org/base"));
    assert_eq!(adapter.config.rank, 3);
    let config = toy(ModelType::Llama);
    let weights = random_weights(&config, 1, DType::F32, &Device::Cpu).unwrap();
    let trainable = Trainable::Lora(adapter.config.clone());
    let loaded = Decoder::new(config, weights, &Device::Cpu, &trainable, 99).unwrap();
    let batch = PackedBatch::from_sequences([random_tokens(12, 19, 4)]);
    assert_ne!(logits(&loaded, &batch), logits(&saved, &batch));
    loaded.load_adapter(&adapter).unwrap();
    assert_eq!(logits(&loaded, &batch), logits(&saved, &batch));
    let text = fs_err::read_to_string(folder.path().join("adapter_config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (config["r"].as_u64(), config["lora_alpha"].as_f64()),
        (Some(3), Some(6.0))
    );
    assert_eq!(
        (config["bias"].as_str(), config["task_type"].as_str()),
        (Some("none"), Some("CAUSAL_LM"))
    );
}

#[test]
fn weights_that_do_not_fit_are_named() {
    let config = toy(ModelType::Qwen3);
    let build = |edit: &dyn Fn(&mut Weights)| {
        let mut weights = random_weights(&config, 1, DType::F32, &Device::Cpu).unwrap();
        edit(&mut weights);
        Decoder::new(config.clone(), weights, &Device::Cpu, &Trainable::Frozen, 0)
            .unwrap_err()
            .to_string()
    };
    let name = "model.layers.1.mlp.up_proj.weight";
    let tensor = Tensor::zeros((2, 2), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(
        build(&|w| drop(w.remove(name))),
        format!("missing tensor `{name}`")
    );
    assert_eq!(
        build(&|w| drop(w.insert(name.to_owned(), tensor.clone()))),
        format!("tensor `{name}` has shape [2, 2], expected [20, 12]")
    );
    let extra = "model.layers.2.mlp.up_proj.weight";
    assert!(
        build(&|w| drop(w.insert(extra.to_owned(), tensor.clone())))
            .starts_with(&format!("unexpected tensor `{extra}`"))
    );
}

#[test]
fn damaged_and_missing_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let config = toy(ModelType::Qwen3);
    let load = || {
        load_weights(folder.path(), &config, DType::F32, &Device::Cpu)
            .unwrap_err()
            .to_string()
    };
    assert!(load().starts_with("no weights in `"));
    fs_err::write(
        folder.path().join("model.safetensors"),
        b"\x10\0\0\0\0\0\0\0{}",
    )
    .unwrap();
    assert!(load().contains("model.safetensors"), "{}", load());
    let index = r#"{"weight_map": {"a": "../evil.safetensors"}}"#;
    fs_err::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
    assert!(load().contains("`../evil.safetensors`, which is not a plain file name"));
}

#[test]
fn the_same_seed_makes_the_same_model() {
    let build = |seed| {
        let config = toy(ModelType::Qwen3);
        let weights = random_weights(&config, seed, DType::F32, &Device::Cpu).unwrap();
        let decoder = Decoder::new(config, weights, &Device::Cpu, &lora(), seed).unwrap();
        let batch = PackedBatch::from_sequences([[1, 2, 3]]);
        let a = decoder.variables()[0]
            .1
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap();
        (logits(&decoder, &batch), a)
    };
    assert_eq!(build(1), build(1));
    assert_ne!(build(1), build(2));
}

/// Compares with transformers: see `tests/golden/make_toy_models.py`.
#[rstest]
#[case("linear", RopeScaling::Linear { factor: 4.0 })]
#[case("llama3", RopeScaling::Llama3 {
    factor: 8.0,
    low_freq_factor: 1.0,
    high_freq_factor: 4.0,
    original_max_position_embeddings: 256,
})]
#[case("yarn", RopeScaling::Yarn {
    factor: 4.0,
    original_max_position_embeddings: 4096,
    beta_fast: 32.0,
    beta_slow: 1.0,
    attention_factor: None,
})]
#[case("yarn_own_factors", RopeScaling::Yarn {
    factor: 8.0,
    original_max_position_embeddings: 128,
    beta_fast: 8.0,
    beta_slow: 0.5,
    attention_factor: Some(0.9),
})]
fn stretched_rotations_are_those_of_transformers(
    #[case] name: &str,
    #[case] rope_scaling: RopeScaling,
    #[values(true, false)] is_fused: bool,
) {
    let path = golden_folder().join("toy_models.json");
    let golden: serde_json::Value =
        serde_json::from_str(&fs_err::read_to_string(path).unwrap()).unwrap();
    let sequences: Vec<Vec<u32>> = serde_json::from_value(golden["tokens"].clone()).unwrap();
    let expected: Vec<Vec<Vec<f64>>> =
        serde_json::from_value(golden["last_logits"][name].clone()).unwrap();
    let evaluate = |config: ModelConfig| -> Vec<Vec<Vec<f64>>> {
        let weights = formula_weights(&config, DType::F64);
        let build = if is_fused {
            Decoder::new
        } else {
            Decoder::new_composed
        };
        let decoder = build(config, weights, &Device::Cpu, &Trainable::Frozen, 0).unwrap();
        let last = |tokens: &Vec<u32>| {
            let logits = logits(&decoder, &PackedBatch::from_sequences([tokens]));
            logits[tokens.len() - 3..].to_vec()
        };
        sequences.iter().map(last).collect()
    };
    let plain = toy(ModelType::Llama);
    let scaled = ModelConfig {
        rope_scaling,
        ..plain.clone()
    };
    // transformers computes angles in f32.
    assert_close(&evaluate(scaled).concat(), &expected.concat(), 2e-6);
    let difference = (evaluate(plain)
        .concat()
        .concat()
        .iter()
        .zip(expected.concat().concat()))
    .map(|(plain, scaled)| (plain - scaled).abs())
    .fold(0.0, f64::max);
    assert!(difference > 1e-3, "the rotation matters: {difference}");
}

#[test]
fn the_seeds_of_the_fuzz_targets_are_read() {
    let seeds = |target: &str| {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let entries = fs_err::read_dir(folder.join("fuzz/seeds").join(target)).unwrap();
        entries
            .map(|entry| entry.unwrap().path())
            .collect::<Vec<_>>()
    };
    assert_eq!(seeds("model_config").len(), 3);
    for path in seeds("model_config") {
        ModelConfig::from_file(&path).unwrap();
    }
    for path in seeds("safetensors_header") {
        assert_eq!(
            read_safetensors(&path, DType::F32, &Device::Cpu)
                .unwrap()
                .len(),
            2
        );
    }
}
