//! GGUF files: llama.cpp's format, configuration, tokenizer and weights in one.
//!
//! Tensors are renamed to their Hugging Face names and dequantised to `f32`. llama.cpp stores the
//! rows of `q` and `k` interleaved, for its own rotary embedding; they are put back into halves, so
//! that the weights are those of the original checkpoint.

use std::collections::HashMap;
use std::io::BufReader;
use std::panic::AssertUnwindSafe;
use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value as GgufValue};
use candle_core::{Device, Tensor};
use fs_err::File;
use serde_json::json;

use super::EngineError;
use super::loader::LoadedModel;
use super::model::{ModelConfig, ModelType, Weights};
use super::tokenizer::{BpeDescription, PreTokenizer, Tokenizer};

/// Token types of `tokenizer.ggml.token_type`.
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// Most layers that are accepted; the largest models published have fewer than 200.
const MAX_LAYERS: usize = 1024;

/// Reads a `.gguf` file.
pub(super) fn load(path: &Path, device: &Device) -> Result<LoadedModel, EngineError> {
    let io_error = |source| EngineError::Io {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(io_error)?;
    let mut reader = BufReader::new(file);
    let header = Header {
        path,
        content: read_header(path, &mut reader)?,
    };
    let config = header.config()?;
    let tokenizer = header.tokenizer()?;
    let mut weights = HashMap::new();
    // Sorted, so that a damaged file gives the same error each time.
    let mut names: Vec<&String> = header.content.tensor_infos.keys().collect();
    names.sort_unstable();
    for name in names {
        let (hub_name, tensor) = header.tensor(&mut reader, name, &config, device)?;
        weights.insert(hub_name, tensor);
    }
    let weights: Weights = weights;
    let chat_template = match header.content.metadata.get("tokenizer.chat_template") {
        Some(GgufValue::String(template)) => Some(template.clone()),
        _ => None,
    };
    let mut stop_token_ids = config.eos_token_id.clone();
    stop_token_ids.extend(tokenizer.token_to_id("<|im_end|>"));
    stop_token_ids.sort_unstable();
    stop_token_ids.dedup();
    Ok(LoadedModel {
        config,
        weights,
        tokenizer,
        chat_template,
        stop_token_ids,
    })
}

/// Reads metadata and the table of tensors. Counts and lengths are checked against the file's size
/// by candle before anything is allocated; what it does not check are arithmetic faults
/// (`general.alignment = 0` divides by zero), which must not end the process either.
fn read_header(path: &Path, reader: &mut BufReader<File>) -> Result<Content, EngineError> {
    let read = std::panic::catch_unwind(AssertUnwindSafe(|| Content::read(reader)));
    match read {
        Ok(Ok(content)) => Ok(content),
        Ok(Err(source)) => Err(EngineError::Gguf {
            path: path.to_owned(),
            source: Box::new(source),
        }),
        Err(_) => Err(EngineError::GgufMalformed {
            path: path.to_owned(),
            key: "header".to_owned(),
            problem: "its numbers contradict each other",
        }),
    }
}

struct Header<'a> {
    path: &'a Path,
    content: Content,
}

impl Header<'_> {
    fn malformed(&self, key: &str, problem: &'static str) -> EngineError {
        EngineError::GgufMalformed {
            path: self.path.to_owned(),
            key: key.to_owned(),
            problem,
        }
    }

    fn unsupported(&self, key: &str, found: &str, supported: &'static str) -> EngineError {
        EngineError::GgufUnsupported {
            path: self.path.to_owned(),
            key: key.to_owned(),
            found: found.to_owned(),
            supported,
        }
    }

    fn value(&self, key: &str) -> Result<&GgufValue, EngineError> {
        self.content
            .metadata
            .get(key)
            .ok_or_else(|| self.malformed(key, "missing"))
    }

    fn optional_number(&self, key: &str) -> Result<Option<usize>, EngineError> {
        let Some(value) = self.content.metadata.get(key) else {
            return Ok(None);
        };
        let number = match value {
            GgufValue::I32(number) => u64::try_from(*number).ok(),
            GgufValue::I64(number) => u64::try_from(*number).ok(),
            value => value.to_u64().ok(),
        };
        let number = number.and_then(|number| usize::try_from(number).ok());
        number
            .map(Some)
            .ok_or_else(|| self.malformed(key, "not a count"))
    }

    fn number(&self, key: &str) -> Result<usize, EngineError> {
        self.optional_number(key)?
            .ok_or_else(|| self.malformed(key, "missing"))
    }

    fn optional_token(&self, key: &str) -> Result<Option<u32>, EngineError> {
        let number = self.optional_number(key)?;
        let token = number.map(u32::try_from).transpose();
        token.map_err(|_| self.malformed(key, "not a token id"))
    }

    fn optional_float(&self, key: &str) -> Result<Option<f64>, EngineError> {
        match self.content.metadata.get(key) {
            None => Ok(None),
            // The shortest decimal form: 1e-5 is stored as 9.999999747378752e-06.
            Some(GgufValue::F32(number)) => Ok(number.to_string().parse().ok()),
            Some(GgufValue::F64(number)) => Ok(Some(*number)),
            Some(_) => Err(self.malformed(key, "not a number")),
        }
    }

    fn text(&self, key: &str) -> Result<&str, EngineError> {
        match self.value(key)? {
            GgufValue::String(text) => Ok(text),
            _ => Err(self.malformed(key, "not a text")),
        }
    }

    fn texts(&self, key: &str) -> Result<Vec<String>, EngineError> {
        let not_texts = || self.malformed(key, "not a list of texts");
        let GgufValue::Array(items) = self.value(key)? else {
            return Err(not_texts());
        };
        let as_text = |item: &GgufValue| match item {
            GgufValue::String(text) => Ok(text.clone()),
            _ => Err(not_texts()),
        };
        items.iter().map(as_text).collect()
    }

    fn config(&self) -> Result<ModelConfig, EngineError> {
        let architecture = self.text("general.architecture")?;
        if architecture != "llama" {
            return Err(self.unsupported("general.architecture", architecture, "`llama`"));
        }
        if let Some(GgufValue::String(scaling)) =
            self.content.metadata.get("llama.rope.scaling.type")
            && scaling != "none"
        {
            return Err(self.unsupported("llama.rope.scaling.type", scaling, "`none`"));
        }
        let hidden_size = self.number("llama.embedding_length")?;
        let heads = self.number("llama.attention.head_count")?;
        let layers = self.number("llama.block_count")?;
        if heads == 0 || layers == 0 || layers > MAX_LAYERS {
            let key = if heads == 0 {
                "llama.attention.head_count"
            } else {
                "llama.block_count"
            };
            return Err(self.malformed(key, "out of range"));
        }
        let head_dim = match self.optional_number("llama.attention.key_length")? {
            Some(head_dim) => head_dim,
            None => hidden_size / heads,
        };
        if let Some(rotated) = self.optional_number("llama.rope.dimension_count")?
            && rotated != head_dim
        {
            let found = rotated.to_string();
            return Err(self.unsupported("llama.rope.dimension_count", &found, "the whole head"));
        }
        const EMBEDDING: &str = "token_embd.weight";
        let embedding = self.content.tensor_infos.get(EMBEDDING);
        let embedding = embedding.ok_or_else(|| self.malformed(EMBEDDING, "missing"))?;
        let vocab_size = embedding.shape.dims().first().copied().unwrap_or(0);
        let mut eos_token_id = Vec::new();
        eos_token_id.extend(self.optional_token("tokenizer.ggml.eos_token_id")?);
        eos_token_id.extend(self.optional_token("tokenizer.ggml.eot_token_id")?);
        let config = ModelConfig {
            model_type: ModelType::Llama,
            vocab_size,
            hidden_size,
            intermediate_size: self.number("llama.feed_forward_length")?,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: self
                .optional_number("llama.attention.head_count_kv")?
                .unwrap_or(heads),
            head_dim,
            max_position_embeddings: self.number("llama.context_length")?,
            rms_norm_eps: self
                .optional_float("llama.attention.layer_norm_rms_epsilon")?
                .unwrap_or(1e-6),
            rope_theta: self
                .optional_float("llama.rope.freq_base")?
                .unwrap_or(10_000.0),
            tie_word_embeddings: !self.content.tensor_infos.contains_key("output.weight"),
            bos_token_id: self.optional_token("tokenizer.ggml.bos_token_id")?,
            eos_token_id,
        };
        config.validate()?;
        Ok(config)
    }

    fn tokenizer(&self) -> Result<Tokenizer, EngineError> {
        let model = self.text("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(self.unsupported("tokenizer.ggml.model", model, "`gpt2`"));
        }
        const PRE: &str = "tokenizer.ggml.pre";
        let pre_tokenizer = match self.content.metadata.get(PRE) {
            None => PreTokenizer::Gpt2,
            Some(_) => match self.text(PRE)? {
                "gpt-2" => PreTokenizer::Gpt2,
                "smollm" => PreTokenizer::SmolLm,
                other => return Err(self.unsupported(PRE, other, "`smollm`, `gpt-2`")),
            },
        };
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        const TYPES: &str = "tokenizer.ggml.token_type";
        let types = match self.content.metadata.get(TYPES) {
            Some(GgufValue::Array(types)) => types.as_slice(),
            Some(_) => return Err(self.malformed(TYPES, "not a list of numbers")),
            None => &[],
        };
        let ids_of = |wanted: u64| -> Vec<u32> {
            let is_wanted = |value: &GgufValue| match value {
                GgufValue::I32(found) => u64::try_from(*found) == Ok(wanted),
                value => value.to_u64().is_ok_and(|found| found == wanted),
            };
            let typed = (0..).zip(types).zip(&tokens);
            typed
                .filter(|((_, kind), _)| is_wanted(kind))
                .map(|((id, _), _)| id)
                .collect()
        };
        let mut names = serde_json::Map::new();
        for (key, name) in [
            ("tokenizer.ggml.bos_token_id", "bos_token"),
            ("tokenizer.ggml.eos_token_id", "eos_token"),
            ("tokenizer.ggml.unknown_token_id", "unk_token"),
            ("tokenizer.ggml.padding_token_id", "pad_token"),
        ] {
            if let Some(id) = self.optional_token(key)? {
                let token = tokens.get(id as usize);
                let token = token.ok_or_else(|| self.malformed(key, "beyond the vocabulary"))?;
                names.insert(name.to_owned(), json!(token));
            }
        }
        let description = BpeDescription {
            merges: self.texts("tokenizer.ggml.merges")?,
            special_ids: ids_of(CONTROL),
            added_ids: ids_of(USER_DEFINED),
            tokens,
            pre_tokenizer,
        };
        Tokenizer::from_bpe(&description, Some(&names.into()), self.path)
    }

    /// Reads one tensor; returns it with its Hugging Face name.
    fn tensor(
        &self,
        reader: &mut BufReader<File>,
        name: &str,
        config: &ModelConfig,
        device: &Device,
    ) -> Result<(String, Tensor), EngineError> {
        let damaged = |source: candle_core::Error| EngineError::GgufTensor {
            path: self.path.to_owned(),
            name: name.to_owned(),
            source: Box::new(source),
        };
        let (hub_name, heads) = hub_name(name, config)
            .ok_or_else(|| self.malformed(name, "a tensor that a llama model has no place for"))?;
        let info = &self.content.tensor_infos[name];
        // Checked here because the product of hostile dimensions overflows further down.
        let mut elements: usize = 1;
        for &dim in info.shape.dims() {
            elements = elements
                .checked_mul(dim)
                .filter(|&elements| elements <= isize::MAX as usize / 8)
                .ok_or_else(|| self.malformed(name, "too large"))?;
        }
        let mut tensor = self
            .content
            .tensor(reader, name, &Device::Cpu)
            .and_then(|tensor| tensor.dequantize(&Device::Cpu))
            .map_err(damaged)?;
        if let Some(heads) = heads {
            let [rows, _] = tensor.dims() else {
                return Err(self.malformed(name, "not a matrix"));
            };
            if *rows != heads * config.head_dim {
                return Err(self.malformed(name, "not as many rows as heads and their width say"));
            }
            tensor = halves_from_pairs(&tensor, heads).map_err(damaged)?;
        }
        Ok((hub_name, tensor.to_device(device).map_err(damaged)?))
    }
}

/// Returns a tensor's Hugging Face name and, for `q` and `k`, the number of heads.
fn hub_name(name: &str, config: &ModelConfig) -> Option<(String, Option<usize>)> {
    let plain = match name {
        "token_embd.weight" => Some("model.embed_tokens.weight"),
        "output_norm.weight" => Some("model.norm.weight"),
        "output.weight" => Some("lm_head.weight"),
        _ => None,
    };
    if let Some(plain) = plain {
        return Some((plain.to_owned(), None));
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let (part, heads) = match part.strip_suffix(".weight")? {
        "attn_norm" => ("input_layernorm", None),
        "attn_q" => ("self_attn.q_proj", Some(config.num_attention_heads)),
        "attn_k" => ("self_attn.k_proj", Some(config.num_key_value_heads)),
        "attn_v" => ("self_attn.v_proj", None),
        "attn_output" => ("self_attn.o_proj", None),
        "ffn_norm" => ("post_attention_layernorm", None),
        "ffn_gate" => ("mlp.gate_proj", None),
        "ffn_up" => ("mlp.up_proj", None),
        "ffn_down" => ("mlp.down_proj", None),
        _ => return None,
    };
    Some((format!("model.layers.{layer}.{part}.weight"), heads))
}

/// Undoes llama.cpp's `permute`: within each head, row `2 j + i` goes to row `i * head_dim / 2 + j`.
fn halves_from_pairs(weight: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
    let (rows, columns) = weight.dims2()?;
    weight
        .reshape((heads, rows / heads / 2, 2, columns))?
        .transpose(1, 2)?
        .contiguous()?
        .reshape((rows, columns))
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
    use rstest::rstest;

    use super::super::model::random_weights;
    use super::*;

    fn toy_config() -> ModelConfig {
        ModelConfig {
            model_type: ModelType::Llama,
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
            tie_word_embeddings: true,
            bos_token_id: Some(0),
            eos_token_id: vec![1],
        }
    }

    fn metadata() -> Vec<(&'static str, GgufValue)> {
        let text = |text: &str| GgufValue::String(text.to_owned());
        let texts =
            |items: &[&str]| GgufValue::Array(items.iter().map(|item| text(item)).collect());
        vec![
            ("general.architecture", text("llama")),
            ("llama.block_count", GgufValue::U32(1)),
            ("llama.context_length", GgufValue::U32(64)),
            ("llama.embedding_length", GgufValue::U32(32)),
            ("llama.feed_forward_length", GgufValue::U32(64)),
            ("llama.attention.head_count", GgufValue::U32(4)),
            ("llama.attention.head_count_kv", GgufValue::U32(2)),
            (
                "llama.attention.layer_norm_rms_epsilon",
                GgufValue::F32(1e-5),
            ),
            ("llama.rope.freq_base", GgufValue::F32(1e4)),
            ("tokenizer.ggml.model", text("gpt2")),
            ("tokenizer.ggml.pre", text("smollm")),
            ("tokenizer.ggml.tokens", texts(&["<s>", "</s>", "a", "aa"])),
            ("tokenizer.ggml.merges", texts(&["a a"])),
            (
                "tokenizer.ggml.token_type",
                GgufValue::Array([3, 3, 1, 1].map(GgufValue::I32).to_vec()),
            ),
            ("tokenizer.ggml.bos_token_id", GgufValue::U32(0)),
            ("tokenizer.ggml.eos_token_id", GgufValue::U32(1)),
        ]
    }

    /// The inverse of [`hub_name`] for tests.
    fn gguf_name(hub: &str) -> String {
        [
            ("model.embed_tokens", "token_embd"),
            ("model.norm", "output_norm"),
            ("model.layers", "blk"),
            ("input_layernorm", "attn_norm"),
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
        let (rows, columns) = weight.dims2().unwrap();
        weight
            .reshape((heads, 2, rows / heads / 2, columns))
            .unwrap()
            .transpose(1, 2)
            .unwrap()
            .contiguous()
            .unwrap()
            .reshape((rows, columns))
            .unwrap()
    }

    fn write_file(
        dtype: GgmlDType,
        metadata: &[(&'static str, GgufValue)],
    ) -> tempfile::NamedTempFile {
        let weights =
            random_weights(&toy_config(), 5, candle_core::DType::F32, &Device::Cpu).unwrap();
        let tensors: Vec<(String, QTensor)> = weights
            .iter()
            .map(|(name, tensor)| {
                let tensor = match name {
                    name if name.contains("q_proj") => permute(tensor, 4),
                    name if name.contains("k_proj") => permute(tensor, 2),
                    _ => tensor.clone(),
                };
                let dtype = if tensor.rank() == 1 {
                    GgmlDType::F32
                } else {
                    dtype
                };
                (gguf_name(name), QTensor::quantize(&tensor, dtype).unwrap())
            })
            .collect();
        let tensors: Vec<(&str, &QTensor)> = tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor))
            .collect();
        let metadata: Vec<(&str, &GgufValue)> =
            metadata.iter().map(|(key, value)| (*key, value)).collect();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        gguf_file::write(file.as_file_mut(), &metadata, &tensors).unwrap();
        file
    }

    #[rstest]
    #[case(GgmlDType::F32, 0.0)]
    #[case(GgmlDType::F16, 1e-4)]
    #[case(GgmlDType::Q8_0, 1e-3)]
    #[case(GgmlDType::Q4_0, 2e-2)]
    #[case(GgmlDType::Q4_1, 2e-2)]
    fn weights_come_back_in_the_hub_layout(#[case] dtype: GgmlDType, #[case] tolerance: f32) {
        let file = write_file(dtype, &metadata());
        let model = load(file.path(), &Device::Cpu).unwrap();
        assert_eq!(model.config, toy_config());
        let expected =
            random_weights(&toy_config(), 5, candle_core::DType::F32, &Device::Cpu).unwrap();
        assert_eq!(model.weights.len(), expected.len());
        for (name, tensor) in &expected {
            let difference = (&model.weights[name] - tensor).unwrap().abs().unwrap();
            let difference = difference.flatten_all().unwrap().max(0).unwrap();
            assert!(
                difference.to_scalar::<f32>().unwrap() <= tolerance,
                "{name}"
            );
        }
        assert_eq!(model.tokenizer.encode("aaa</s>").unwrap(), [3, 2, 1]);
        assert_eq!(model.stop_token_ids, [1]);
    }

    #[test]
    fn every_truncation_is_an_error_that_names_the_file() {
        let whole = fs_err::read(write_file(GgmlDType::F32, &metadata()).path()).unwrap();
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
    #[case("llama.block_count", GgufValue::U32(u32::MAX), "llama.block_count")]
    #[case("llama.embedding_length", GgufValue::String("x".to_owned()), "llama.embedding_length")]
    #[case("tokenizer.ggml.pre", GgufValue::String("qwen35".to_owned()), "qwen35")]
    #[case("tokenizer.ggml.tokens", GgufValue::U32(1), "tokenizer.ggml.tokens")]
    #[case(
        "tokenizer.ggml.eos_token_id",
        GgufValue::U32(99),
        "tokenizer.ggml.eos_token_id"
    )]
    #[case("general.alignment", GgufValue::U32(0), "header")]
    fn bad_metadata_is_named(
        #[case] key: &'static str,
        #[case] value: GgufValue,
        #[case] expected: &str,
    ) {
        let mut metadata = metadata();
        metadata.retain(|(name, _)| *name != key);
        metadata.push((key, value));
        let file = write_file(GgmlDType::F32, &metadata);
        let error = load(file.path(), &Device::Cpu).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }

    #[test]
    fn a_missing_key_is_named() {
        let mut metadata = metadata();
        metadata.retain(|(name, _)| *name != "llama.feed_forward_length");
        let file = write_file(GgmlDType::F32, &metadata);
        let error = load(file.path(), &Device::Cpu).unwrap_err();
        assert!(
            error.to_string().contains("`llama.feed_forward_length`"),
            "{error}"
        );
    }
}
