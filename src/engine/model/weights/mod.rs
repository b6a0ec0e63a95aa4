//! A checkpoint's weights: what they are called, reading them, random initialisation.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use rand::RngExt as _;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use super::files::{MAX_INDEX_BYTES, read_json};
use super::linear::is_redundant;
use super::safetensors_file::TensorFile;
use super::{ModelConfig, ModelError};

/// Standard deviation of fresh weights: transformers' `initializer_range`.
const INITIALIZER_RANGE: f64 = 0.02;

/// Named tensors of one checkpoint, by their Hugging Face names.
pub type Weights = HashMap<String, Tensor>;

/// `model.safetensors.index.json`.
#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// Reads the weights of a model folder, one file or many, converted to `dtype`.
///
/// All headers are compared with `config` before the first weight is read.
///
/// # Errors
///
/// Fails if there is no weight file, if one is missing or damaged, if an index does not agree with its
/// shards, if a tensor is missing, left over or of another shape than `config` says, or if a weight
/// is not finite: the message names file and tensor.
pub fn load_weights(
    folder: &Path,
    config: &ModelConfig,
    dtype: DType,
    device: &Device,
) -> Result<Weights, ModelError> {
    let mut files = open_files(folder)?;
    let mut expected: BTreeMap<String, Vec<usize>> = tensor_shapes(config).into_iter().collect();
    let mut wanted: Vec<(usize, String)> = Vec::new();
    for (index, file) in files.iter().enumerate() {
        for (name, found) in file.shapes() {
            let Some(expected) = expected.remove(name) else {
                if is_redundant(name) {
                    continue;
                }
                let name = name.to_owned();
                return Err(ModelError::UnexpectedTensor { name }.in_file(file.path()));
            };
            if found != expected {
                return Err(ModelError::TensorShape {
                    name: name.to_owned(),
                    expected,
                    found: found.to_vec(),
                }
                .in_file(file.path()));
            }
            file.check_type(name)?;
            wanted.push((index, name.to_owned()));
        }
    }
    if let Some((name, _)) = expected.pop_first() {
        return Err(ModelError::MissingTensor { name }.in_file(folder));
    }
    let mut weights = HashMap::with_capacity(wanted.len());
    for (index, name) in wanted {
        let tensor = files[index].read(&name, dtype, device)?;
        weights.insert(name, tensor);
    }
    Ok(weights)
}

/// Opens a folder's weight files; where there is an index, it places every tensor where it is.
fn open_files(folder: &Path) -> Result<Vec<TensorFile>, ModelError> {
    let index = folder.join("model.safetensors.index.json");
    if !index.exists() {
        let single = folder.join("model.safetensors");
        if !single.exists() {
            return Err(ModelError::NoWeights {
                path: folder.to_owned(),
            });
        }
        return Ok(vec![TensorFile::open(&single)?]);
    }
    let parsed: ShardIndex = read_json(&index, MAX_INDEX_BYTES)?;
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, shard) in parsed.weight_map {
        shards.entry(shard).or_default().push(name);
    }
    let mut files = Vec::with_capacity(shards.len());
    for (shard, names) in shards {
        // A name with separators could reach outside the folder.
        if Path::new(&shard)
            .file_name()
            .is_none_or(|name| name != shard.as_str())
        {
            return Err(ModelError::ShardName { path: index, shard });
        }
        let path = folder.join(&shard);
        if !path.exists() {
            return Err(ModelError::MissingShard { path: index, shard });
        }
        let file = TensorFile::open(&path)?;
        let disagree = |name: &str, problem| ModelError::ShardMismatch {
            path: index.clone(),
            shard: shard.clone(),
            name: name.to_owned(),
            problem,
        };
        if let Some(name) = names.iter().find(|name| !file.contains(name)) {
            return Err(disagree(name, "is not in the shard"));
        }
        // Sorted, as they came out of a sorted map.
        let is_placed = |name: &str| {
            names
                .binary_search_by(|known| known.as_str().cmp(name))
                .is_ok()
        };
        if let Some((name, _)) = file.shapes().find(|(name, _)| !is_placed(name)) {
            return Err(disagree(
                name,
                "is in the shard, where the index does not place it",
            ));
        }
        files.push(file);
    }
    Ok(files)
}

/// Returns fresh weights for `config`: normal with deviation 0.02, norms one, biases zero.
///
/// Each tensor has its own stream of the generator, so that its numbers depend on the seed and on
/// its own place only.
///
/// # Errors
///
/// Fails if the configuration is invalid, or if the weights are larger than memory.
pub fn random_weights(
    config: &ModelConfig,
    seed: u64,
    dtype: DType,
    device: &Device,
) -> Result<Weights, ModelError> {
    config.validate()?;
    check_memory(config)?;
    let mut weights = HashMap::new();
    for (stream, (name, shape)) in tensor_shapes(config).into_iter().enumerate() {
        let len: usize = shape.iter().product();
        let values = if name.ends_with("norm.weight") {
            vec![1.0; len]
        } else if name.ends_with(".bias") {
            vec![0.0; len]
        } else {
            normal(seed, stream as u64, len, INITIALIZER_RANGE)
        };
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu)?;
        weights.insert(name, tensor.to_dtype(dtype)?.to_device(device)?);
    }
    Ok(weights)
}

/// Asks for the memory of all weights in `f32` and gives it back, so that a configuration from elsewhere
/// is an error and no abort.
fn check_memory(config: &ModelConfig) -> Result<(), ModelError> {
    let parameters = config.parameter_count().unwrap_or(usize::MAX);
    let mut memory: Vec<f32> = Vec::new();
    memory
        .try_reserve_exact(parameters)
        .map_err(|_| ModelError::TooLarge { parameters })
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
        let path = |name: &str| format!("model.layers.{layer}.{name}");
        let norm = |name: &str, width| (path(name) + ".weight", vec![width]);
        let linear = |block: &str, module: &str, outputs, inputs| {
            let path = path(block) + "." + module;
            let bias = (config.has_bias(module)).then(|| (format!("{path}.bias"), vec![outputs]));
            [(format!("{path}.weight"), vec![outputs, inputs])]
                .into_iter()
                .chain(bias)
        };
        shapes.push(norm("input_layernorm", hidden));
        shapes.extend(linear("self_attn", "q_proj", queries, hidden));
        shapes.extend(linear("self_attn", "k_proj", keys, hidden));
        shapes.extend(linear("self_attn", "v_proj", keys, hidden));
        if config.has_qk_norm() {
            shapes.push(norm("self_attn.q_norm", config.head_dim));
            shapes.push(norm("self_attn.k_norm", config.head_dim));
        }
        shapes.extend(linear("self_attn", "o_proj", hidden, queries));
        shapes.push(norm("post_attention_layernorm", hidden));
        shapes.extend(linear("mlp", "gate_proj", inner, hidden));
        shapes.extend(linear("mlp", "up_proj", inner, hidden));
        shapes.extend(linear("mlp", "down_proj", hidden, inner));
    }
    shapes.push(("model.norm.weight".to_owned(), vec![hidden]));
    if !config.tie_word_embeddings {
        shapes.push(("lm_head.weight".to_owned(), vec![config.vocab_size, hidden]));
    }
    shapes
}

#[cfg(test)]
mod tests;
