//! Weight files: reading, writing, random initialisation.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fs_err as fs;
use rand::RngExt as _;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use super::{ModelConfig, ModelError};

/// Standard deviation of fresh weights: transformers' `initializer_range`.
const INITIALIZER_RANGE: f64 = 0.02;

/// Named tensors of one checkpoint, by their Hugging Face names.
pub type Weights = HashMap<String, Tensor>;

pub(super) fn io_error(path: &Path, source: io::Error) -> ModelError {
    ModelError::Io {
        path: path.to_owned(),
        source,
    }
}

/// `model.safetensors.index.json`.
#[derive(Deserialize)]
struct ShardIndex {
    weight_map: HashMap<String, String>,
}

/// Reads the weights of a model folder, one file or many.
///
/// Floating-point tensors are converted to `dtype`.
///
/// # Errors
///
/// Fails if there is no weight file, or if one is missing or damaged: the message names it.
pub fn load_weights(folder: &Path, dtype: DType, device: &Device) -> Result<Weights, ModelError> {
    let index = folder.join("model.safetensors.index.json");
    if index.exists() {
        let text = fs::read_to_string(&index).map_err(|source| io_error(&index, source))?;
        let parsed: ShardIndex =
            serde_json::from_str(&text).map_err(|source| ModelError::Json {
                path: index.clone(),
                source,
            })?;
        let shards: BTreeSet<String> = parsed.weight_map.into_values().collect();
        let mut weights = HashMap::new();
        for shard in shards {
            // A name with separators could reach outside the folder.
            if Path::new(&shard)
                .file_name()
                .is_none_or(|name| name != shard.as_str())
            {
                return Err(ModelError::ShardName { path: index, shard });
            }
            weights.extend(read_safetensors(&folder.join(shard), dtype, device)?);
        }
        return Ok(weights);
    }
    let single = folder.join("model.safetensors");
    if !single.exists() {
        return Err(ModelError::NoWeights {
            path: folder.to_owned(),
        });
    }
    Ok(read_safetensors(&single, dtype, device)?
        .into_iter()
        .collect())
}

/// Reads one safetensors file.
pub(crate) fn read_safetensors(
    path: &Path,
    dtype: DType,
    device: &Device,
) -> Result<Vec<(String, Tensor)>, ModelError> {
    let bytes = fs::read(path).map_err(|source| io_error(path, source))?;
    let damaged = |source| ModelError::Safetensors {
        path: path.to_owned(),
        source,
    };
    let mut tensors: Vec<(String, Tensor)> = candle_core::safetensors::load_buffer(&bytes, device)
        .map_err(damaged)?
        .into_iter()
        .map(|(name, tensor)| {
            let tensor = if tensor.dtype().is_float() {
                tensor.to_dtype(dtype)?
            } else {
                tensor
            };
            Ok((name, tensor))
        })
        .collect::<candle_core::Result<_>>()
        .map_err(damaged)?;
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(tensors)
}

/// Writes one safetensors file with the metadata that transformers and PEFT ask for.
pub(crate) fn write_safetensors(
    path: &Path,
    tensors: &[(String, Tensor)],
) -> Result<(), ModelError> {
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let tensors = tensors
        .iter()
        .map(|(name, tensor)| Ok((name.as_str(), tensor.contiguous()?)))
        .collect::<candle_core::Result<Vec<_>>>()?;
    // The crate writes a private temporary file and renames it; a model is no secret, so it gets
    // the permissions of any other new file.
    let permissions = fs::File::create(path)
        .and_then(|file| file.metadata())
        .map_err(|source| io_error(path, source))?
        .permissions();
    safetensors::serialize_to_file(tensors, Some(metadata), path).map_err(|source| {
        ModelError::WriteSafetensors {
            path: path.to_owned(),
            source,
        }
    })?;
    fs::set_permissions(path, permissions).map_err(|source| io_error(path, source))
}

/// Returns fresh weights for `config`: normal with deviation 0.02, norms one.
///
/// Each tensor has its own stream of the generator, so that its numbers depend on the seed and on
/// its own place only.
///
/// # Errors
///
/// Fails if the configuration is invalid.
pub fn random_weights(
    config: &ModelConfig,
    seed: u64,
    dtype: DType,
    device: &Device,
) -> Result<Weights, ModelError> {
    config.validate()?;
    let mut weights = HashMap::new();
    for (stream, (name, shape)) in tensor_shapes(config).into_iter().enumerate() {
        let len: usize = shape.iter().product();
        let values = if name.ends_with("norm.weight") {
            vec![1.0; len]
        } else {
            normal(seed, stream as u64, len, INITIALIZER_RANGE)
        };
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu)?;
        weights.insert(name, tensor.to_dtype(dtype)?.to_device(device)?);
    }
    Ok(weights)
}

/// Returns `len` normal numbers (Box and Muller 1958).
fn normal(seed: u64, stream: u64, len: usize, deviation: f64) -> Vec<f64> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(stream);
    (0..len)
        .map(|_| {
            let radius = (-2.0 * (1.0 - random.random::<f64>()).ln()).sqrt();
            let angle = std::f64::consts::TAU * random.random::<f64>();
            deviation * radius * angle.cos()
        })
        .collect()
}

/// Returns a fresh `lora_A`: uniform in ±1/sqrt(`fan_in`), as PEFT's `kaiming_uniform_(a=sqrt(5))`.
pub(super) fn lora_a(
    rank: usize,
    fan_in: usize,
    seed: u64,
    stream: u64,
    dtype: DType,
    device: &Device,
) -> Result<Tensor, ModelError> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(stream);
    let bound = 1.0 / (fan_in as f64).sqrt();
    let values: Vec<f64> = (0..rank * fan_in)
        .map(|_| (random.random::<f64>() * 2.0 - 1.0) * bound)
        .collect();
    let tensor = Tensor::from_vec(values, (rank, fan_in), &Device::Cpu)?;
    Ok(tensor.to_dtype(dtype)?.to_device(device)?)
}

/// Returns the name and shape of every tensor of a checkpoint, in the order of their use.
pub(crate) fn tensor_shapes(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let hidden = config.hidden_size;
    let queries = config.num_attention_heads * config.head_dim;
    let keys = config.num_key_value_heads * config.head_dim;
    let inner = config.intermediate_size;
    let mut shapes = vec![(
        "model.embed_tokens.weight".to_owned(),
        vec![config.vocab_size, hidden],
    )];
    for layer in 0..config.num_hidden_layers {
        let mut push = |name: &str, shape: Vec<usize>| {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
        };
        push("input_layernorm", vec![hidden]);
        push("self_attn.q_proj", vec![queries, hidden]);
        push("self_attn.k_proj", vec![keys, hidden]);
        push("self_attn.v_proj", vec![keys, hidden]);
        if config.has_qk_norm() {
            push("self_attn.q_norm", vec![config.head_dim]);
            push("self_attn.k_norm", vec![config.head_dim]);
        }
        push("self_attn.o_proj", vec![hidden, queries]);
        push("post_attention_layernorm", vec![hidden]);
        push("mlp.gate_proj", vec![inner, hidden]);
        push("mlp.up_proj", vec![inner, hidden]);
        push("mlp.down_proj", vec![hidden, inner]);
    }
    shapes.push(("model.norm.weight".to_owned(), vec![hidden]));
    if !config.tie_word_embeddings {
        shapes.push(("lm_head.weight".to_owned(), vec![config.vocab_size, hidden]));
    }
    shapes
}
