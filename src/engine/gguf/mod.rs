//! GGUF files: llama.cpp's format, configuration, tokenizer and weights in one.
//!
//! Tensors are renamed to their Hugging Face names and dequantised to `f32`. For llama models llama.cpp
//! stores the rows of `q` and `k` interleaved, for its own rotary embedding; they are put back into
//! halves, so that the weights are those of the original checkpoint.

mod header;

use std::collections::{BTreeMap, HashMap};
use std::io::{BufReader, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::{Device, Tensor};
use fs_err::File;
use serde_json::json;

use super::EngineError;
use super::loader::{LoadedModel, check_vocabulary};
use super::model::ops::Values;
use super::model::{ModelConfig, ModelType, RopeScaling, is_redundant, tensor_shapes};
use super::tokenizer::{BpeDescription, PreTokenizer, Tokenizer};
#[cfg(any(fuzzing, test))]
pub use header::fuzz_gguf;
use header::{Header, HeaderError, TensorInfo, Value};

/// Token types of `tokenizer.ggml.token_type`.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

const EMBEDDING: &str = "token_embd.weight";

/// Divisors of the rotary frequencies: how llama.cpp stores Llama 3's scaling.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Reads a `.gguf` file.
pub(super) fn load(path: &Path, device: &Device) -> Result<LoadedModel, EngineError> {
    let mut file = GgufFile::open(path)?;
    let config = file.config()?;
    let tokenizer = file.tokenizer()?;
    check_vocabulary(path, &tokenizer, &config)?;
    let places = file.places(&config)?;
    let mut weights = HashMap::with_capacity(places.len());
    for (name, place) in places {
        let tensor = file.weight(&name, &place)?;
        let tensor = tensor
            .to_device(device)
            .map_err(|e| file.damaged(&name, e))?;
        weights.insert(place.hub_name, tensor);
    }
    let chat_template = match file.header.metadata.get("tokenizer.chat_template") {
        Some(Value::Text(template)) => Some(template.clone()),
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

/// Where a tensor goes.
struct Place {
    hub_name: String,
    /// The heads whose rows llama.cpp has interleaved.
    interleaved_heads: Option<usize>,
}

struct GgufFile<'a> {
    path: &'a Path,
    file: File,
    header: Header,
}

impl<'a> GgufFile<'a> {
    fn open(path: &'a Path) -> Result<Self, EngineError> {
        let io_error = |source| EngineError::Io {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(io_error)?;
        let bytes = file.metadata().map_err(io_error)?.len();
        let header = Header::read(BufReader::new(&file), bytes);
        let header = header.map_err(|error| match error {
            HeaderError::Io(source) => io_error(source),
            HeaderError::Malformed { key, problem } => EngineError::GgufMalformed {
                path: path.to_owned(),
                key,
                problem,
            },
            HeaderError::Unsupported {
                key,
                found,
                supported,
            } => EngineError::GgufUnsupported {
                path: path.to_owned(),
                key,
                found,
                supported,
            },
        })?;
        Ok(Self { path, file, header })
    }

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

    fn damaged(&self, name: &str, source: candle_core::Error) -> EngineError {
        EngineError::GgufTensor {
            path: self.path.to_owned(),
            name: name.to_owned(),
            source: Box::new(source),
        }
    }

    // === Metadata ===

    fn value(&self, key: &str) -> Result<&Value, EngineError> {
        let value = self.header.metadata.get(key);
        value.ok_or_else(|| self.malformed(key, "missing"))
    }

    fn optional_number(&self, key: &str) -> Result<Option<usize>, EngineError> {
        match self.header.metadata.get(key) {
            None => Ok(None),
            Some(Value::Integer(number)) => match usize::try_from(*number) {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(self.malformed(key, "not a count")),
            },
            Some(_) => Err(self.malformed(key, "not a count")),
        }
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
        match self.header.metadata.get(key) {
            None => Ok(None),
            // The shortest decimal form: 1e-5 is stored as 9.999999747378752e-06.
            Some(Value::Float32(number)) => Ok(number.to_string().parse().ok()),
            Some(Value::Float64(number)) => Ok(Some(*number)),
            Some(_) => Err(self.malformed(key, "not a number")),
        }
    }

    fn text(&self, key: &str) -> Result<&str, EngineError> {
        match self.value(key)? {
            Value::Text(text) => Ok(text),
            _ => Err(self.malformed(key, "not a text")),
        }
    }

    fn texts(&self, key: &str) -> Result<&[String], EngineError> {
        match self.value(key)? {
            Value::Texts(texts) => Ok(texts),
            _ => Err(self.malformed(key, "not a list of texts")),
        }
    }

    fn has(&self, tensor: &str) -> bool {
        self.header.tensors.contains_key(tensor)
    }

    // === Configuration ===

    fn config(&mut self) -> Result<ModelConfig, EngineError> {
        let architecture = self.text("general.architecture")?.to_owned();
        let model_type = match architecture.as_str() {
            "llama" => ModelType::Llama,
            "qwen2" => ModelType::Qwen2,
            "qwen3" => ModelType::Qwen3,
            other => {
                let supported = "`llama`, `qwen2`, `qwen3`";
                return Err(self.unsupported("general.architecture", other, supported));
            }
        };
        let key = |name: &str| format!("{architecture}.{name}");
        for (name, supported) in [("attention.sliding_window", "0"), ("expert_count", "0")] {
            match self.optional_number(&key(name))? {
                None | Some(0) => {}
                Some(found) => {
                    return Err(self.unsupported(&key(name), &found.to_string(), supported));
                }
            }
        }
        let hidden_size = self.number(&key("embedding_length"))?;
        let heads = self.number(&key("attention.head_count"))?;
        if heads == 0 {
            return Err(self.malformed(&key("attention.head_count"), "0"));
        }
        let head_dim = match self.optional_number(&key("attention.key_length"))? {
            Some(head_dim) => head_dim,
            None => hidden_size / heads,
        };
        for name in ["rope.dimension_count", "attention.value_length"] {
            match self.optional_number(&key(name))? {
                Some(found) if found != head_dim => {
                    let supported = "the width of a key";
                    return Err(self.unsupported(&key(name), &found.to_string(), supported));
                }
                _ => {}
            }
        }
        let rope_theta = (self.optional_float(&key("rope.freq_base"))?).unwrap_or(10_000.0);
        let embedding = self.header.tensors.get(EMBEDDING);
        let embedding = embedding.ok_or_else(|| self.malformed(EMBEDDING, "missing"))?;
        let mut eos_token_id = Vec::new();
        let vocab_size = embedding.dims[0];
        eos_token_id.extend(self.optional_token("tokenizer.ggml.eos_token_id")?);
        eos_token_id.extend(self.optional_token("tokenizer.ggml.eot_token_id")?);
        let config = ModelConfig {
            model_type,
            vocab_size,
            hidden_size,
            intermediate_size: self.number(&key("feed_forward_length"))?,
            num_hidden_layers: self.number(&key("block_count"))?,
            num_attention_heads: heads,
            num_key_value_heads: self
                .optional_number(&key("attention.head_count_kv"))?
                .unwrap_or(heads),
            head_dim,
            max_position_embeddings: self.number(&key("context_length"))?,
            rms_norm_eps: self
                .optional_float(&key("attention.layer_norm_rms_epsilon"))?
                .unwrap_or(1e-6),
            rope_theta,
            rope_scaling: self.rope_scaling(&architecture, head_dim, rope_theta)?,
            // The file says so through its tensors alone.
            attention_bias: model_type != ModelType::Qwen2 && self.has("blk.0.attn_q.bias"),
            mlp_bias: model_type == ModelType::Llama && self.has("blk.0.ffn_gate.bias"),
            tie_word_embeddings: !self.has("output.weight"),
            bos_token_id: self.optional_token("tokenizer.ggml.bos_token_id")?,
            eos_token_id,
        };
        let checked = config.validate();
        checked.map_err(|error| error.in_file(self.path))?;
        Ok(config)
    }

    fn rope_scaling(
        &mut self,
        architecture: &str,
        head_dim: usize,
        theta: f64,
    ) -> Result<RopeScaling, EngineError> {
        let key = format!("{architecture}.rope.scaling.type");
        let scaling = match self.header.metadata.get(&key) {
            None => RopeScaling::Default,
            Some(_) => match self.text(&key)? {
                "none" => RopeScaling::Default,
                "linear" => {
                    let factor = format!("{architecture}.rope.scaling.factor");
                    let value = self.optional_float(&factor)?;
                    let factor = value.ok_or_else(|| self.malformed(&factor, "missing"))?;
                    RopeScaling::Linear { factor }
                }
                other => return Err(self.unsupported(&key, other, "`none`, `linear`")),
            },
        };
        if !self.has(ROPE_FACTORS) {
            return Ok(scaling);
        }
        if self.header.tensors[ROPE_FACTORS].dims != [head_dim / 2] {
            return Err(self.malformed(ROPE_FACTORS, "not of half a head's width"));
        }
        let damaged = |this: &Self, error| this.damaged(ROPE_FACTORS, error);
        let found = self.dequantize(ROPE_FACTORS)?;
        let found = found.to_vec1::<f32>().map_err(|e| damaged(self, e))?;
        // The file keeps the factors and not what they were made from. All of Llama 3's checkpoints
        // differ in the largest one only.
        let factor = f64::from(found.iter().copied().fold(1.0, f32::max));
        let llama3 = RopeScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let plain = RopeScaling::Default.frequencies(head_dim, theta);
        let scaled = llama3.frequencies(head_dim, theta);
        let is_llama3 = (plain.iter().zip(&scaled).zip(&found))
            .all(|((plain, scaled), found)| (plain / scaled / found - 1.0).abs() < 1e-4);
        if !is_llama3 || scaling != RopeScaling::Default {
            let found = format!("factors up to {factor}");
            return Err(self.unsupported(ROPE_FACTORS, &found, "those of Llama 3"));
        }
        Ok(llama3)
    }

    // === Tokenizer ===

    fn tokenizer(&self) -> Result<Tokenizer, EngineError> {
        let model = self.text("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(self.unsupported("tokenizer.ggml.model", model, "`gpt2`"));
        }
        const PRE: &str = "tokenizer.ggml.pre";
        let pre_tokenizer = match self.header.metadata.get(PRE) {
            None => PreTokenizer::Gpt2,
            Some(_) => match self.text(PRE)? {
                "gpt-2" => PreTokenizer::Gpt2,
                "smollm" => PreTokenizer::SmolLm,
                "qwen2" => PreTokenizer::Qwen2,
                "llama-bpe" => PreTokenizer::Llama3,
                other => {
                    let supported = "`qwen2`, `llama-bpe`, `smollm`, `gpt-2`";
                    return Err(self.unsupported(PRE, other, supported));
                }
            },
        };
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        const TYPES: &str = "tokenizer.ggml.token_type";
        let types = match self.header.metadata.get(TYPES) {
            Some(Value::Integers(types)) => types.as_slice(),
            Some(_) => return Err(self.malformed(TYPES, "not a list of numbers")),
            None => &[],
        };
        let ids_of = |wanted: i64| -> Vec<u32> {
            let typed = (0..).zip(types).take(tokens.len());
            typed
                .filter(|(_, found)| **found == wanted)
                .map(|(id, _)| id)
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
            merges: self.texts("tokenizer.ggml.merges")?.to_vec(),
            special_ids: ids_of(CONTROL),
            added_ids: ids_of(USER_DEFINED),
            tokens: tokens.to_vec(),
            pre_tokenizer,
        };
        Tokenizer::from_bpe(&description, Some(&names.into()), self.path)
    }

    // === Tensors ===

    /// Returns where every tensor goes. All of them have the shapes that `config` says.
    fn places(&self, config: &ModelConfig) -> Result<BTreeMap<String, Place>, EngineError> {
        let mut expected: BTreeMap<String, Vec<usize>> =
            tensor_shapes(config).into_iter().collect();
        let mut places = BTreeMap::new();
        for (name, info) in &self.header.tensors {
            if name == ROPE_FACTORS {
                continue;
            }
            let place = place(name, config);
            let shape = (place.as_ref()).and_then(|place| expected.remove(&place.hub_name));
            let (Some(place), Some(shape)) = (place, shape) else {
                let problem = "a tensor that a model of this architecture has no place for";
                return Err(self.malformed(name, problem));
            };
            if shape != info.dims {
                return Err(EngineError::GgufShape {
                    path: self.path.to_owned(),
                    name: name.clone(),
                    expected: shape,
                    found: info.dims.clone(),
                });
            }
            places.insert(name.clone(), place);
        }
        match expected.into_keys().find(|name| !is_redundant(name)) {
            Some(name) => Err(self.malformed(&name, "missing")),
            None => Ok(places),
        }
    }

    fn weight(&mut self, name: &str, place: &Place) -> Result<Tensor, EngineError> {
        let tensor = self.dequantize(name)?;
        match place.interleaved_heads {
            Some(heads) => {
                halves_from_pairs(&tensor, heads).map_err(|error| self.damaged(name, error))
            }
            None => Ok(tensor),
        }
    }

    /// Reads one tensor as `f32`.
    fn dequantize(&mut self, name: &str) -> Result<Tensor, EngineError> {
        let info = self.header.tensors[name].clone();
        // Within the file, as the header was checked.
        let mut bytes = vec![0; info.bytes];
        (self.file.seek(SeekFrom::Start(info.start)))
            .and_then(|_| self.file.read_exact(&mut bytes))
            .map_err(|source| EngineError::Io {
                path: self.path.to_owned(),
                source,
            })?;
        let tensor = dequantize(&info, &bytes).map_err(|error| self.damaged(name, error))?;
        let is_finite = {
            let values = Values::<f32>::of(&tensor).map_err(|error| self.damaged(name, error))?;
            values.iter().all(|value| value.is_finite())
        };
        match is_finite {
            true => Ok(tensor),
            false => Err(self.malformed(name, "not finite; the file is damaged")),
        }
    }
}

fn dequantize(info: &TensorInfo, bytes: &[u8]) -> candle_core::Result<Tensor> {
    qtensor_from_ggml(info.dtype, bytes, info.dims.clone(), &Device::Cpu)?.dequantize(&Device::Cpu)
}

/// Returns where a tensor goes; `None` if nowhere.
fn place(name: &str, config: &ModelConfig) -> Option<Place> {
    let plain = |hub_name: String| {
        Some(Place {
            hub_name,
            interleaved_heads: None,
        })
    };
    match name {
        EMBEDDING => return plain("model.embed_tokens.weight".to_owned()),
        "output_norm.weight" => return plain("model.norm.weight".to_owned()),
        "output.weight" => return plain("lm_head.weight".to_owned()),
        _ => {}
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let (part, kind) = part.rsplit_once('.')?;
    let (heads, part) = match part {
        "attn_norm" => (None, "input_layernorm"),
        "attn_q" => (Some(config.num_attention_heads), "self_attn.q_proj"),
        "attn_k" => (Some(config.num_key_value_heads), "self_attn.k_proj"),
        "attn_v" => (None, "self_attn.v_proj"),
        "attn_q_norm" => (None, "self_attn.q_norm"),
        "attn_k_norm" => (None, "self_attn.k_norm"),
        "attn_output" => (None, "self_attn.o_proj"),
        "ffn_norm" => (None, "post_attention_layernorm"),
        "ffn_gate" => (None, "mlp.gate_proj"),
        "ffn_up" => (None, "mlp.up_proj"),
        "ffn_down" => (None, "mlp.down_proj"),
        _ => return None,
    };
    Some(Place {
        hub_name: format!("model.layers.{layer}.{part}.{kind}"),
        interleaved_heads: heads.filter(|_| config.model_type == ModelType::Llama),
    })
}

/// Undoes llama.cpp's `permute`: within each head, row `2 j + i` goes to row `i * head_dim / 2 + j`.
/// `weight` is a matrix or a bias.
fn halves_from_pairs(weight: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
    let rows = weight.dim(0)?;
    weight
        .reshape((heads, rows / heads / 2, 2, weight.elem_count() / rows))?
        .transpose(1, 2)?
        .contiguous()?
        .reshape(weight.shape())
}

#[cfg(test)]
mod tests;
