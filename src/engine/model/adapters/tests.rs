use candle_core::{DType, Device};
use rstest::rstest;

use super::super::tests::{assert_close, build, decoder, logits, lora, rows};
use super::super::tests_support::{formula_weights, golden_folder, random_tokens, toy};
use crate::engine::RowId;
use crate::engine::model::{
    Adapters, Decoder, LoraAdapter, ModelError, ModelType, PackedBatch, Trainable,
};

fn toy_adapters() -> [LoraAdapter; 2] {
    ["toy_adapter", "toy_adapter_rslora"].map(|folder| {
        LoraAdapter::load(&golden_folder().join(folder), DType::F64, &Device::Cpu).unwrap()
    })
}

/// Adapters that PEFT wrote, beside one base and in one batch: a list of names, then a pattern, a scale
/// by the root of the rank, and layers with ranks and alphas of their own.
#[rstest]
fn adapters_beside_the_base_give_the_logits_of_peft(#[values(true, false)] is_fused: bool) {
    let path = golden_folder().join("toy_models.json");
    let golden: serde_json::Value =
        serde_json::from_str(&fs_err::read_to_string(path).unwrap()).unwrap();
    let sequences: Vec<Vec<u32>> = serde_json::from_value(golden["tokens"].clone()).unwrap();
    let read = |value: &serde_json::Value| -> Vec<Vec<Vec<f64>>> {
        serde_json::from_value(value.clone()).unwrap()
    };
    let last = |logits: &[Vec<f64>]| logits[logits.len() - 3..].to_vec();
    let plain = read(&golden["models"]["qwen3"]["logits"]);
    let first = read(&golden["models"]["qwen3_lora"]["logits"]);
    let second = read(&golden["last_logits"]["rslora"]);

    let config = toy(ModelType::Qwen3);
    let weights = formula_weights(&config, DType::F64);
    let build = if is_fused {
        Decoder::new
    } else {
        Decoder::new_composed
    };
    let decoder = build(config, weights, &Device::Cpu, &Trainable::Frozen, 0).unwrap();
    let ids = ["first", "second"].map(|name| {
        let [first, second] = toy_adapters();
        let adapter = if name == "first" { first } else { second };
        decoder.add_adapter(name, &adapter).unwrap()
    });
    let mut batch = PackedBatch::new();
    let mut expected = Vec::new();
    // Two neighbours share an adapter; base rows stand between others.
    let plan = [Some(0), None, Some(1), Some(1), None, Some(0)];
    for (index, adapter) in plan.into_iter().enumerate() {
        let sequence = index % 2;
        batch.push_adapted(&sequences[sequence], 0, adapter.map(|adapter| ids[adapter]));
        expected.push(match adapter {
            None => last(&plain[sequence]),
            Some(0) => last(&first[sequence]),
            Some(_) => second[sequence].clone(),
        });
    }
    let found = logits(&decoder, &batch);
    for (segment, expected) in batch.segments().iter().zip(&expected) {
        // The files hold f32.
        assert_close(&last(&found[segment.clone()]), expected, 1e-5);
    }
    // Rows without an adapter have the bits that they have where nobody has one.
    let alike = plan
        .iter()
        .enumerate()
        .map(|(index, _)| &sequences[index % 2]);
    let base = logits(&decoder, &PackedBatch::from_sequences(alike));
    for segment in [1, 4].map(|index| batch.segments()[index].clone()) {
        assert_eq!(found[segment.clone()], base[segment]);
    }
    let off = decoder.hidden(&batch, Adapters::Off).unwrap();
    assert_eq!(rows(&decoder.logits(&off).unwrap()), base);

    // With a cache, a token at a time: what the whole pass gives.
    let mut cache = decoder.new_cache(1000);
    let cached: Vec<RowId> = plan.iter().map(|_| cache.add_row()).collect();
    let mut steps = vec![Vec::new(); plan.len()];
    let pairs = sequences[0].iter().zip(&sequences[1]);
    for (position, (&even, &odd)) in pairs.enumerate() {
        let mut step = PackedBatch::new();
        for (index, adapter) in plan.into_iter().enumerate() {
            let token = if index % 2 == 0 { even } else { odd };
            step.push_adapted(&[token], position, adapter.map(|adapter| ids[adapter]));
        }
        let hidden = decoder.hidden_cached(&step, &mut cache, &cached).unwrap();
        for (found, row) in steps
            .iter_mut()
            .zip(rows(&decoder.logits(&hidden).unwrap()))
        {
            found.push(row);
        }
    }
    for (segment, steps) in batch.segments().iter().zip(&steps) {
        let whole = &found[segment.start..segment.start + steps.len()];
        assert_close(
            steps,
            whole,
            if is_fused { f64::MIN_POSITIVE } else { 1e-12 },
        );
    }
}

#[test]
fn a_served_adapter_has_the_bits_of_the_trained_one() {
    let trained = decoder(ModelType::Qwen2, DType::F32, &lora());
    let base = build(toy(ModelType::Qwen2), DType::F32, &Trainable::Frozen, true);
    let id = base
        .add_adapter("policy", &trained.adapter(None).unwrap())
        .unwrap();
    let tokens = random_tokens(40, 19, 3);
    let mut batch = PackedBatch::new();
    batch.push_adapted(&tokens[..20], 0, Some(id));
    // A child has its parent's adapter.
    batch.push_child(0, &tokens[20..]);
    let expected = logits(&trained, &PackedBatch::from_sequences([&tokens]));
    assert_eq!(logits(&base, &batch), expected);
}

#[test]
fn adapters_are_named_checked_and_held() {
    let decoder = build(toy(ModelType::Qwen3), DType::F32, &Trainable::Frozen, true);
    let [adapter, _] = toy_adapters();
    let id = decoder.add_adapter("one", &adapter).unwrap();
    assert_eq!(decoder.adapters(), [(id, "one".to_owned())]);
    let error = decoder.add_adapter("one", &adapter).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("there is an adapter `one` already")
    );
    let lease = decoder.lease_adapter(id).unwrap();
    assert_eq!((lease.id(), lease.name()), (id, "one"));
    let error = decoder.remove_adapter(id).unwrap_err();
    assert!(error.to_string().starts_with("adapter `one` is in use"));
    drop(lease);
    decoder.remove_adapter(id).unwrap();
    let mut batch = PackedBatch::new();
    batch.push_adapted(&[1], 0, Some(id));
    for error in [
        decoder.remove_adapter(id).unwrap_err(),
        decoder.lease_adapter(id).unwrap_err(),
        decoder.hidden(&batch, Adapters::On).unwrap_err(),
    ] {
        assert_eq!(error.to_string(), "unknown adapter 0");
    }
    let error = decoder.forward(&batch, false).unwrap_err();
    assert!(matches!(error, ModelError::Mismatch { .. }), "{error}");

    let refused = |change: &dyn Fn(&mut LoraAdapter)| {
        let mut adapter = adapter.clone();
        change(&mut adapter);
        decoder
            .add_adapter("bad", &adapter)
            .unwrap_err()
            .to_string()
    };
    let a = "model.layers.0.mlp.up_proj.lora_A.weight";
    let b = "model.layers.0.mlp.up_proj.lora_B.weight";
    assert_eq!(
        refused(&|adapter| drop(adapter.tensors.remove(b))),
        format!("missing tensor `{b}`")
    );
    assert_eq!(
        refused(&|adapter| {
            let tensor = adapter.tensors[b].clone();
            adapter.tensors.insert(a.to_owned(), tensor);
        }),
        format!("tensor `{a}` has shape [20, 3], expected [20, 12]")
    );
    let lost = refused(&|adapter| {
        let tensor = adapter.tensors[b].clone();
        let name = "model.layers.9.mlp.up_proj.lora_A.weight".to_owned();
        adapter.tensors.insert(name, tensor);
    });
    assert!(
        lost.starts_with("unexpected tensor `model.layers.9"),
        "{lost}"
    );
    let trained = build(toy(ModelType::Qwen3), DType::F32, &lora(), true);
    let error = trained.add_adapter("two", &adapter).unwrap_err();
    assert!(
        error.to_string().starts_with("unsupported `adapter`"),
        "{error}"
    );
    let [_, own_ranks] = toy_adapters();
    let error = trained.load_adapter(&own_ranks).unwrap_err();
    assert!(
        error.to_string().starts_with("unsupported `rank_pattern`"),
        "{error}"
    );
}
