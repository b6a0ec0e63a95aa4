use candle_core::DType;
use candle_core::quantized::gguf_file::Value as GgufValue;
use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use proptest::prelude::*;
use rstest::rstest;
use serde_json::Value as Json;

use super::super::model::random_weights;
use super::*;

fn toy_config(model_type: ModelType) -> ModelConfig {
    ModelConfig {
        model_type,
        vocab_size: 4,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 1,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        max_position_embeddings: 64,
        rms_norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: RopeScaling::Default,
        attention_bias: false,
        mlp_bias: false,
        tie_word_embeddings: true,
        bos_token_id: Some(0),
        eos_token_id: vec![1],
    }
}

/// Numbers of which no two tensors have the same, biases and norms included.
fn toy_weights(config: &ModelConfig) -> HashMap<String, Tensor> {
    let mut weights = random_weights(config, 5, DType::F32, &Device::Cpu).unwrap();
    for (name, tensor) in &mut weights {
        if tensor.rank() == 1 {
            let values: Vec<f32> = (0..tensor.elem_count())
                .map(|i| ((i * 7 + name.len() * 31) % 101) as f32 / 101.0)
                .collect();
            *tensor = Tensor::new(values, &Device::Cpu).unwrap();
        }
    }
    weights
}

type Metadata = Vec<(String, GgufValue)>;

fn metadata(architecture: &str) -> Metadata {
    let text = |text: &str| GgufValue::String(text.to_owned());
    let texts = |items: &[&str]| GgufValue::Array(items.iter().map(|item| text(item)).collect());
    let own = |key: &str| format!("{architecture}.{key}");
    let count = |key: &str, value| (own(key), GgufValue::U32(value));
    let common = |key: &str, value| (key.to_owned(), value);
    vec![
        common("general.architecture", text(architecture)),
        count("block_count", 1),
        count("context_length", 64),
        count("embedding_length", 32),
        count("feed_forward_length", 64),
        count("attention.head_count", 4),
        count("attention.head_count_kv", 2),
        (
            own("attention.layer_norm_rms_epsilon"),
            GgufValue::F32(1e-5),
        ),
        (own("rope.freq_base"), GgufValue::F32(1e4)),
        common("tokenizer.ggml.model", text("gpt2")),
        common("tokenizer.ggml.pre", text("smollm")),
        common("tokenizer.ggml.tokens", texts(&["<s>", "</s>", "a", "aa"])),
        common("tokenizer.ggml.merges", texts(&["a a"])),
        common(
            "tokenizer.ggml.token_type",
            GgufValue::Array([3, 3, 1, 1].map(GgufValue::I32).to_vec()),
        ),
        common("tokenizer.ggml.bos_token_id", GgufValue::U32(0)),
        common("tokenizer.ggml.eos_token_id", GgufValue::U32(1)),
    ]
}

fn with(mut metadata: Metadata, key: &str, value: GgufValue) -> Metadata {
    metadata.retain(|(name, _)| name != key);
    metadata.push((key.to_owned(), value));
    metadata
}

/// The inverse of [`place`] for tests.
fn gguf_name(hub: &str) -> String {
    [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ]
    .iter()
    .fold(hub.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// llama.cpp's `permute`, in the words of its conversion script: reshape to
/// `(heads, 2, head_dim / 2, columns)` and swap the middle axes.
fn permute(weight: &Tensor, heads: usize) -> Tensor {
    let rows = weight.dim(0).unwrap();
    let columns = weight.elem_count() / rows;
    weight
        .reshape((heads, 2, rows / heads / 2, columns))
        .unwrap()
        .transpose(1, 2)
        .unwrap()
        .contiguous()
        .unwrap()
        .reshape(weight.shape())
        .unwrap()
}

fn write_tensors(
    tensors: &HashMap<String, Tensor>,
    dtype: GgmlDType,
    metadata: &Metadata,
) -> tempfile::NamedTempFile {
    let quantized: Vec<(&str, QTensor)> = tensors
        .iter()
        .map(|(name, tensor)| {
            let dtype = if tensor.rank() == 1 {
                GgmlDType::F32
            } else {
                dtype
            };
            (name.as_str(), QTensor::quantize(tensor, dtype).unwrap())
        })
        .collect();
    let tensors: Vec<(&str, &QTensor)> = (quantized.iter())
        .map(|(name, tensor)| (*name, tensor))
        .collect();
    let metadata: Vec<(&str, &GgufValue)> = (metadata.iter())
        .map(|(key, value)| (key.as_str(), value))
        .collect();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    gguf_file::write(file.as_file_mut(), &metadata, &tensors).unwrap();
    file
}

/// The toy's weights as llama.cpp names and lays them out.
fn file_tensors(config: &ModelConfig) -> HashMap<String, Tensor> {
    let is_llama = config.model_type == ModelType::Llama;
    toy_weights(config)
        .into_iter()
        .map(|(name, tensor)| {
            let tensor = match name.as_str() {
                name if is_llama && name.contains("q_proj") => permute(&tensor, 4),
                name if is_llama && name.contains("k_proj") => permute(&tensor, 2),
                _ => tensor,
            };
            (gguf_name(&name), tensor)
        })
        .collect()
}

fn write_file(dtype: GgmlDType, metadata: &Metadata) -> tempfile::NamedTempFile {
    write_tensors(
        &file_tensors(&toy_config(ModelType::Llama)),
        dtype,
        metadata,
    )
}

#[track_caller]
fn assert_weights(model: &LoadedModel, expected: &HashMap<String, Tensor>, tolerance: f32) {
    assert_eq!(model.weights.len(), expected.len());
    for (name, tensor) in expected {
        let difference = (&model.weights[name] - tensor).unwrap().abs().unwrap();
        let difference = difference.flatten_all().unwrap().max(0).unwrap();
        assert!(
            difference.to_scalar::<f32>().unwrap() <= tolerance,
            "{name}"
        );
    }
}

#[rstest]
#[case(GgmlDType::F32, 0.0)]
#[case(GgmlDType::F16, 1e-4)]
#[case(GgmlDType::BF16, 1e-3)]
#[case(GgmlDType::Q8_0, 1e-3)]
#[case(GgmlDType::Q4_0, 2e-2)]
#[case(GgmlDType::Q4_1, 2e-2)]
fn weights_come_back_in_the_hub_layout(#[case] dtype: GgmlDType, #[case] tolerance: f32) {
    let file = write_file(dtype, &metadata("llama"));
    let model = load(file.path(), &Device::Cpu).unwrap();
    let config = toy_config(ModelType::Llama);
    assert_eq!(model.config, config);
    assert_weights(&model, &toy_weights(&config), tolerance);
    assert_eq!(model.tokenizer.encode("aaa</s>").unwrap(), [3, 2, 1]);
    assert_eq!(model.stop_token_ids, [1]);
}

/// Only llama models have their rows interleaved; biases and the norms of heads have names of
/// their own.
#[rstest]
#[case("qwen2", toy_config(ModelType::Qwen2))]
#[case("qwen3", toy_config(ModelType::Qwen3))]
#[case("llama", ModelConfig { attention_bias: true, mlp_bias: true, tie_word_embeddings: false,
                              ..toy_config(ModelType::Llama) })]
fn every_architecture_is_read(#[case] architecture: &str, #[case] config: ModelConfig) {
    let tensors = file_tensors(&config);
    let file = write_tensors(&tensors, GgmlDType::F32, &metadata(architecture));
    let model = load(file.path(), &Device::Cpu).unwrap();
    assert_eq!(model.config, config);
    assert_weights(&model, &toy_weights(&config), 0.0);
}

#[test]
fn llama_3s_frequencies_are_recognised_by_their_factors() {
    let config = toy_config(ModelType::Llama);
    let theta = with(
        metadata("llama"),
        "llama.rope.freq_base",
        GgufValue::F32(5e5),
    );
    let llama3 = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    let plain = RopeScaling::Default.frequencies(8, 5e5);
    let scaled = llama3.frequencies(8, 5e5);
    let mut factors: Vec<f32> = plain.iter().zip(scaled).map(|(p, s)| p / s).collect();
    assert_eq!(factors[0], 1.0);
    assert_eq!(factors[3], 32.0);
    let load = |factors: &[f32]| {
        let mut tensors = file_tensors(&config);
        let factors = Tensor::new(factors, &Device::Cpu).unwrap();
        tensors.insert("rope_freqs.weight".to_owned(), factors);
        load(
            write_tensors(&tensors, GgmlDType::F32, &theta).path(),
            &Device::Cpu,
        )
    };
    assert_eq!(load(&factors).unwrap().config.rope_scaling, llama3);
    factors[1] *= 2.0;
    let message = load(&factors).unwrap_err().to_string();
    assert!(message.contains("`rope_freqs.weight`"), "{message}");
    load(&factors[..2]).unwrap_err();
}

/// Each type of blocks gives the numbers that the Python package `gguf` gives: see
/// `tests/golden/make_gguf_blocks.py`.
#[test]
fn blocks_are_dequantized_as_by_the_gguf_package() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/gguf_blocks.json");
    let golden: Json = serde_json::from_str(&fs_err::read_to_string(path).unwrap()).unwrap();
    let types = [
        ("F32", GgmlDType::F32),
        ("F16", GgmlDType::F16),
        ("BF16", GgmlDType::BF16),
        ("Q4_0", GgmlDType::Q4_0),
        ("Q4_1", GgmlDType::Q4_1),
        ("Q5_0", GgmlDType::Q5_0),
        ("Q5_1", GgmlDType::Q5_1),
        ("Q8_0", GgmlDType::Q8_0),
        ("Q2_K", GgmlDType::Q2K),
        ("Q3_K", GgmlDType::Q3K),
        ("Q4_K", GgmlDType::Q4K),
        ("Q5_K", GgmlDType::Q5K),
        ("Q6_K", GgmlDType::Q6K),
    ];
    assert_eq!(golden["types"].as_object().unwrap().len(), types.len());
    for (name, dtype) in types {
        let case = &golden["types"][name];
        let hex = case["bytes"].as_str().unwrap();
        let bytes: Vec<u8> = (0..hex.len() / 2)
            .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap())
            .collect();
        let expected: Vec<f32> = serde_json::from_value(case["values"].clone()).unwrap();
        assert!(expected.iter().any(|value| value.abs() > 0.01), "{name}");
        let info = TensorInfo {
            dtype,
            dims: vec![expected.len() / 256, 256],
            start: 0,
            bytes: bytes.len(),
        };
        let found = dequantize(&info, &bytes).unwrap().flatten_all().unwrap();
        let found: Vec<f32> = found.to_vec1().unwrap();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            let tolerance = 1e-6 * expected.abs().max(1e-3);
            assert!(
                (found - expected).abs() <= tolerance,
                "{name}: {found} {expected}"
            );
        }
    }
}

#[test]
fn every_truncation_is_an_error_that_names_the_file() {
    let whole = fs_err::read(write_file(GgmlDType::F32, &metadata("llama")).path()).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    for length in (0..whole.len()).step_by(whole.len() / 150) {
        fs_err::write(file.path(), &whole[..length]).unwrap();
        let error = load(file.path(), &Device::Cpu).unwrap_err();
        let name = file.path().to_string_lossy().into_owned();
        assert!(error.to_string().contains(&name), "{error}");
    }
}

#[rstest]
#[case("general.architecture", GgufValue::String("mamba".to_owned()), "mamba")]
#[case(
    "llama.attention.head_count",
    GgufValue::U32(0),
    "llama.attention.head_count"
)]
#[case("llama.block_count", GgufValue::U32(u32::MAX), "num_hidden_layers")]
#[case("llama.block_count", GgufValue::U64(1 << 40), "num_hidden_layers")]
#[case("llama.block_count", GgufValue::I32(-1), "llama.block_count")]
#[case("llama.block_count", GgufValue::U32(2), "model.layers.1")]
#[case("llama.embedding_length", GgufValue::String("x".to_owned()), "llama.embedding_length")]
#[case("llama.embedding_length", GgufValue::U32(64), "expected [")]
#[case(
    "llama.attention.sliding_window",
    GgufValue::U32(4096),
    "sliding_window"
)]
#[case("llama.expert_count", GgufValue::U32(8), "llama.expert_count")]
#[case("llama.rope.scaling.type", GgufValue::String("yarn".to_owned()), "yarn")]
#[case("llama.rope.scaling.type", GgufValue::String("linear".to_owned()), "rope.scaling.factor")]
#[case("llama.attention.value_length", GgufValue::U32(16), "value_length")]
#[case("llama.rope.freq_base", GgufValue::F32(f32::NAN), "rope_theta")]
#[case("tokenizer.ggml.pre", GgufValue::String("qwen35".to_owned()), "qwen35")]
#[case("tokenizer.ggml.tokens", GgufValue::U32(1), "tokenizer.ggml.tokens")]
#[case(
    "tokenizer.ggml.eos_token_id",
    GgufValue::U32(99),
    "tokenizer.ggml.eos_token_id"
)]
#[case("general.alignment", GgufValue::U32(0), "general.alignment")]
#[case("general.alignment", GgufValue::U32(48), "general.alignment")]
fn bad_metadata_is_named(#[case] key: &str, #[case] value: GgufValue, #[case] expected: &str) {
    let metadata = with(metadata("llama"), key, value);
    let file = write_file(GgmlDType::F32, &metadata);
    let message = load(file.path(), &Device::Cpu).unwrap_err().to_string();
    assert!(message.contains(expected), "{message}");
    let name = file.path().to_string_lossy().into_owned();
    assert!(message.contains(&name), "{message}");
}

#[test]
fn a_missing_key_is_named() {
    let mut metadata = metadata("llama");
    metadata.retain(|(name, _)| name != "llama.feed_forward_length");
    let file = write_file(GgmlDType::F32, &metadata);
    let error = load(file.path(), &Device::Cpu).unwrap_err();
    assert!(
        error.to_string().contains("`llama.feed_forward_length`"),
        "{error}"
    );
}

#[test]
fn bad_tensors_are_named() {
    let config = toy_config(ModelType::Llama);
    let load = |change: &dyn Fn(&mut HashMap<String, Tensor>)| {
        let mut tensors = file_tensors(&config);
        change(&mut tensors);
        let file = write_tensors(&tensors, GgmlDType::F32, &metadata("llama"));
        load(file.path(), &Device::Cpu).unwrap_err().to_string()
    };
    let missing = load(&|tensors| drop(tensors.remove("blk.0.ffn_up.weight")));
    assert!(
        missing.contains("`model.layers.0.mlp.up_proj.weight` is missing"),
        "{missing}"
    );
    let extra = load(&|tensors| {
        let tensor = tensors["blk.0.ffn_up.weight"].clone();
        tensors.insert("blk.0.ffn_up_exps.weight".to_owned(), tensor);
    });
    assert!(extra.contains("`blk.0.ffn_up_exps.weight`"), "{extra}");
    let damaged = load(&|tensors| {
        let tensor = Tensor::full(f32::NAN, 32, &Device::Cpu).unwrap();
        tensors.insert("output_norm.weight".to_owned(), tensor);
    });
    assert!(
        damaged.contains("`output_norm.weight` is not finite"),
        "{damaged}"
    );
    let more_tokens = with(
        metadata("llama"),
        "tokenizer.ggml.tokens",
        GgufValue::Array(
            ["<s>", "</s>", "a", "aa", "b"]
                .map(|token| GgufValue::String(token.to_owned()))
                .to_vec(),
        ),
    );
    let file = write_file(GgmlDType::F32, &more_tokens);
    let message = super::load(file.path(), &Device::Cpu)
        .unwrap_err()
        .to_string();
    assert!(
        message.starts_with("tokenizer does not fit the model"),
        "{message}"
    );
}

/// A file that promises more than it holds is refused before memory is taken for it.
#[test]
fn absurd_headers_are_refused() {
    let header = |counts: [u64; 2], rest: &[u8]| {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(counts.iter().flat_map(|count| count.to_le_bytes()));
        bytes.extend(rest);
        bytes
    };
    let key = |kind: u32, rest: &[u8]| {
        let mut bytes = 1_u64.to_le_bytes().to_vec();
        bytes.push(b'k');
        bytes.extend(kind.to_le_bytes());
        bytes.extend(rest);
        bytes
    };
    let array = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    let tensor = |dims: &[u64], kind: u32, offset: u64| {
        let mut bytes = 1_u64.to_le_bytes().to_vec();
        bytes.push(b't');
        bytes.extend(u32::try_from(dims.len()).unwrap().to_le_bytes());
        bytes.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        bytes
    };
    for (bytes, expected) in [
        (b"GGML".to_vec(), "not that of a GGUF file"),
        (b"GGUF\x01\0\0\0".to_vec(), "version"),
        (b"GGUF\0\0\0\x03".to_vec(), "little-endian"),
        (header([1 << 60, 0], &[]), "tensor count"),
        (header([0, 1 << 60], &[]), "metadata count"),
        (header([0, 1], &u64::MAX.to_le_bytes()), "metadata key"),
        (header([0, 1], &key(8, &(1_u64 << 40).to_le_bytes())), "`k`"),
        (header([0, 1], &key(9, &array(8, 1 << 50))), "`k`"),
        (header([0, 1], &key(9, &array(0, 4_000_000))), "cut off"),
        (header([0, 1], &key(9, &array(9, 0))), ""),
        (
            header([0, 1], &key(9, &[array(9, 1), vec![0; 12]].concat())),
            "array of arrays",
        ),
        (header([0, 1], &key(77, &[])), "unknown type"),
        (header([0, 1], &key(7, &[2])), "neither true nor false"),
        (
            header([0, 2], &[key(7, &[1]), key(7, &[1])].concat()),
            "there twice",
        ),
        (
            header([1, 0], &tensor(&[1 << 40, 1 << 40], 0, 0)),
            "too large",
        ),
        (header([1, 0], &tensor(&[0], 0, 0)), "empty"),
        (header([1, 0], &tensor(&[1; 5], 0, 0)), "dimensions"),
        (header([1, 0], &tensor(&[33], 2, 0)), "whole blocks"),
        (header([1, 0], &tensor(&[32], 16, 0)), "tensor type 16"),
        (header([1, 0], &tensor(&[32], 0, 1)), "not aligned"),
        (header([1, 0], &tensor(&[32], 0, 0)), "beyond the end"),
        (
            header([1, 0], &tensor(&[32], 0, u64::MAX - 31)),
            "beyond the end",
        ),
    ] {
        fuzz_gguf(&bytes);
        let file = tempfile::NamedTempFile::new().unwrap();
        fs_err::write(file.path(), &bytes).unwrap();
        let message = load(file.path(), &Device::Cpu).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}, not {expected}");
    }
}

/// A file with the vocabulary of Qwen3 gives the ids of its `tokenizer.json`, as transformers has
/// them.
#[test]
fn qwens_tokenizer_is_rebuilt_from_its_parts() {
    let Some(shared) = std::env::var_os("WARDIAN_SHARED").map(std::path::PathBuf::from) else {
        return;
    };
    let packed = shared.join("models/qwen3/tokenizer.json.gz");
    let output = (std::process::Command::new("gzip")
        .arg("-dc")
        .arg(packed)
        .output())
    .unwrap();
    let published: Json = serde_json::from_slice(&output.stdout).unwrap();
    let mut tokens: Vec<(String, u64, i32)> = (published["model"]["vocab"].as_object().unwrap())
        .iter()
        .map(|(token, id)| (token.clone(), id.as_u64().unwrap(), 1))
        .collect();
    for added in published["added_tokens"].as_array().unwrap() {
        let kind = if added["special"] == true {
            CONTROL
        } else {
            USER_DEFINED
        };
        let token = added["content"].as_str().unwrap().to_owned();
        tokens.push((
            token,
            added["id"].as_u64().unwrap(),
            i32::try_from(kind).unwrap(),
        ));
    }
    tokens.sort_by_key(|(_, id, _)| *id);
    let merges = published["model"]["merges"].as_array().unwrap().iter();
    let merges = merges.map(|pair| {
        let part = |index: usize| pair[index].as_str().unwrap();
        GgufValue::String(format!("{} {}", part(0), part(1)))
    });
    let list = |values: Vec<GgufValue>| GgufValue::Array(values);
    let spellings = tokens
        .iter()
        .map(|(token, ..)| GgufValue::String(token.clone()));
    let kinds = tokens.iter().map(|(.., kind)| GgufValue::I32(*kind));
    let text = |text: &str| GgufValue::String(text.to_owned());
    let metadata = vec![
        ("tokenizer.ggml.model".to_owned(), text("gpt2")),
        ("tokenizer.ggml.pre".to_owned(), text("qwen2")),
        (
            "tokenizer.ggml.tokens".to_owned(),
            list(spellings.collect()),
        ),
        (
            "tokenizer.ggml.token_type".to_owned(),
            list(kinds.collect()),
        ),
        ("tokenizer.ggml.merges".to_owned(), list(merges.collect())),
    ];
    let file = write_tensors(&HashMap::new(), GgmlDType::F32, &metadata);
    let tokenizer = GgufFile::open(file.path()).unwrap().tokenizer().unwrap();
    let golden = fs_err::read_to_string(shared.join("golden/tokenize.json")).unwrap();
    let golden: Json = serde_json::from_str(&golden).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 85);
    for case in cases {
        let expected: Vec<u32> = serde_json::from_value(case["qwen3"].clone()).unwrap();
        let text = case["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text).unwrap(), expected, "{text:?}");
        assert_eq!(tokenizer.decode(&expected).unwrap(), case["qwen3_decoded"]);
    }
}

#[test]
fn the_seed_of_the_fuzz_target_is_read() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/seeds/gguf_header/small");
    let bytes = fs_err::read(path).unwrap();
    let header = Header::read(&*bytes, bytes.len() as u64).unwrap();
    assert_eq!((header.metadata.len(), header.tensors.len()), (8, 2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn damaged_headers_are_survived(
        changes in prop::collection::vec((0_usize..2048, any::<u8>()), 1..8),
    ) {
        static WHOLE: std::sync::LazyLock<Vec<u8>> = std::sync::LazyLock::new(|| {
            fs_err::read(write_file(GgmlDType::F32, &metadata("llama")).path()).unwrap()
        });
        let mut bytes = WHOLE.clone();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        fuzz_gguf(&bytes);
    }
}
