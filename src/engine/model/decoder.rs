//! The decoder and its passes.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{DType, Device, Tensor, Var};
use fs_err as fs;

use super::adapters::{AdapterId, AdapterLease, AdapterRegistry, RowAdapters};
use super::composed::{self, ComposedTape};
use super::cuda::RotaryTable;
use super::dropout::RowDropout;
use super::files::io_error;
use super::fused::{self, FusedRope, FusedTape};
use super::gradients::Gradients;
use super::linear::{Linear, Lora, Parameter, ParameterBuilder};
use super::lora::{EMBEDDING_WEIGHT, HEAD_WEIGHT, LoraAdapter, LoraConfig, SavedModules};
use super::ops::{HeadShape, Values, WeightFormat};
use super::safetensors_file::write_safetensors;
use super::weights::Weights;
use super::{ModelConfig, ModelError, PackedBatch, paged};
use crate::engine::kv_cache::{KvCache, RowId};

/// Which weights a training run may change.
#[derive(Debug, Clone, PartialEq)]
pub enum Trainable {
    /// None: inference only.
    Frozen,
    /// All of them.
    Full,
    /// A fresh adapter beside frozen weights.
    Lora(LoraConfig),
}

/// Whether a pass adds the adapters' updates. Without them an adapted model is its own reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adapters {
    /// The policy.
    On,
    /// The base model.
    Off,
}

/// One decoder layer.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(super) input_norm: Parameter,
    // attention
    pub(super) q_proj: Linear,
    pub(super) k_proj: Linear,
    pub(super) v_proj: Linear,
    pub(super) q_norm: Option<Parameter>,
    pub(super) k_norm: Option<Parameter>,
    pub(super) o_proj: Linear,
    pub(super) post_norm: Parameter,
    // feed-forward
    pub(super) gate_proj: Linear,
    pub(super) up_proj: Linear,
    pub(super) down_proj: Linear,
}

impl Layer {
    fn linears(&self) -> [&Linear; 7] {
        [
            &self.q_proj,
            &self.k_proj,
            &self.v_proj,
            &self.o_proj,
            &self.gate_proj,
            &self.up_proj,
            &self.down_proj,
        ]
    }

    fn parameters(&self) -> Vec<&Parameter> {
        let mut parameters = vec![&self.input_norm, &self.post_norm];
        parameters.extend(&self.q_norm);
        parameters.extend(&self.k_norm);
        parameters.extend(self.linears().into_iter().flat_map(Linear::parameters));
        parameters
    }

    /// Returns what queries, keys and values are made with.
    pub(super) fn parameters_before_attention(&self) -> Vec<&Parameter> {
        let mut parameters = vec![&self.input_norm];
        parameters.extend(&self.q_norm);
        parameters.extend(&self.k_norm);
        let linears = [&self.q_proj, &self.k_proj, &self.v_proj];
        parameters.extend(linears.into_iter().flat_map(Linear::parameters));
        parameters
    }

    /// Returns what the attention's output goes through.
    pub(super) fn parameters_after_attention(&self) -> Vec<&Parameter> {
        let linears = [
            &self.o_proj,
            &self.gate_proj,
            &self.up_proj,
            &self.down_proj,
        ];
        let linears = linears.into_iter().flat_map(Linear::parameters);
        std::iter::once(&self.post_norm).chain(linears).collect()
    }
}

/// A decoder-only language model.
#[derive(Debug)]
pub struct Decoder {
    config: ModelConfig,
    device: Device,
    dtype: DType,
    /// Of the matrices that no training changes, on the CPU.
    format: WeightFormat,
    lora: Option<LoraConfig>,
    embedding: Parameter,
    layers: Vec<Layer>,
    norm: Parameter,
    /// Absent if the head is the embedding.
    head: Option<Parameter>,
    /// Copies that are trained in full beside an adapter, in place of which the frozen ones stand where
    /// adapters are off.
    trained_embedding: Option<Parameter>,
    trained_head: Option<Parameter>,
    saved: SavedModules,
    variables: Vec<(String, Var)>,
    /// Present if the passes run on our own kernels on the CPU.
    rope: Option<FusedRope>,
    /// For the pass that generates elsewhere.
    rotary: RotaryTable,
    /// Shared with the variables' panels, which are made anew when it grows.
    version: Arc<AtomicU64>,
    /// Adapters beside the weights.
    served: AdapterRegistry,
}

/// What a forward pass keeps for its backward pass. Valid until the weights change.
pub struct Tape {
    batch: PackedBatch,
    version: u64,
    kind: TapeKind,
}

enum TapeKind {
    F32(FusedTape<f32>),
    F64(FusedTape<f64>),
    Composed(ComposedTape),
}

impl std::fmt::Debug for Tape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tokens = self.batch.len();
        f.debug_struct("Tape")
            .field("tokens", &tokens)
            .finish_non_exhaustive()
    }
}

impl Decoder {
    /// Builds a decoder from named tensors (`model.layers.0.self_attn.q_proj.weight`).
    ///
    /// On the CPU half-precision weights are widened to `f32`; `f64` weights stay. `seed` initialises
    /// the adapter of [`Trainable::Lora`].
    ///
    /// # Errors
    ///
    /// Fails if a tensor is missing, left over or of another shape than `config` says, or if the
    /// weights to train are in half precision.
    pub fn new(
        config: ModelConfig,
        weights: impl Into<Weights>,
        device: &Device,
        trainable: &Trainable,
        seed: u64,
    ) -> Result<Self, ModelError> {
        let format = WeightFormat::Wide;
        Self::with_format(config, weights, device, trainable, seed, format)
    }

    /// As [`Decoder::new`], with the CPU's frozen matrices kept in `format`. Whoever reads them, sampler
    /// and trainer alike, computes with the same numbers: those that the format has left of the weights.
    ///
    /// # Errors
    ///
    /// As [`Decoder::new`], and where there are no such matrices: on a GPU, with all weights to train, or
    /// in double precision.
    pub fn with_format(
        config: ModelConfig,
        weights: impl Into<Weights>,
        device: &Device,
        trainable: &Trainable,
        seed: u64,
        format: WeightFormat,
    ) -> Result<Self, ModelError> {
        let is_fused = device.is_cpu();
        let weights = weights.into();
        Self::build(config, weights, device, trainable, seed, is_fused, format)
    }

    /// Builds a decoder on plain tensor operations, whatever the device: the twin of the CPU kernels
    /// in tests.
    #[cfg(test)]
    pub(crate) fn new_composed(
        config: ModelConfig,
        weights: Weights,
        device: &Device,
        trainable: &Trainable,
        seed: u64,
    ) -> Result<Self, ModelError> {
        let format = WeightFormat::Wide;
        Self::build(config, weights, device, trainable, seed, false, format)
    }

    fn build(
        config: ModelConfig,
        weights: Weights,
        device: &Device,
        trainable: &Trainable,
        seed: u64,
        is_fused: bool,
        format: WeightFormat,
    ) -> Result<Self, ModelError> {
        config.validate()?;
        if let Trainable::Lora(lora) = trainable {
            lora.validate()?;
            if lora.dropout > 0.0 && format == WeightFormat::Bf16Products {
                return Err(ModelError::Unsupported {
                    field: "lora_dropout",
                    found: format!("{} with products in bf16", lora.dropout),
                    supported: "0 there, where what is multiplied is kept rounded; else below 1",
                });
            }
        }
        let stored = weights
            .get(EMBEDDING_WEIGHT)
            .map_or(DType::F32, Tensor::dtype);
        let dtype = match stored {
            DType::F64 => DType::F64,
            DType::BF16 | DType::F16 if !is_fused => stored,
            _ => DType::F32,
        };
        if matches!(trainable, Trainable::Full) && matches!(dtype, DType::BF16 | DType::F16) {
            return Err(ModelError::Unsupported {
                field: "dtype",
                found: dtype.as_str().to_owned(),
                supported: "`float32` for full fine-tuning, where updates vanish in half precision",
            });
        }
        let obstacle = match (is_fused, trainable, dtype) {
            _ if format == WeightFormat::Wide => None,
            (false, ..) => Some("a GPU"),
            (_, Trainable::Full, _) => Some("training of all weights"),
            (.., DType::F64) => Some("weights in `float64`"),
            _ => None,
        };
        if let Some(obstacle) = obstacle {
            let (field, name, supported) = match format {
                WeightFormat::Bf16Products => (
                    "compute_dtype",
                    "bf16",
                    "products in bf16 with frozen weights on the CPU: to serve, or under an adapter",
                ),
                _ => (
                    "dtype",
                    format.name(),
                    "weights that take less room than `float32` on the CPU, frozen: to serve, or under \
                     an adapter",
                ),
            };
            return Err(ModelError::Unsupported {
                field,
                found: format!("`{name}` with {obstacle}"),
                supported,
            });
        }
        let lora = match trainable {
            Trainable::Lora(lora) => Some(lora.clone()),
            _ => None,
        };
        let mut builder =
            ParameterBuilder::new(weights, trainable, dtype, device, seed, is_fused, format);
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = builder.take_matrix(EMBEDDING_WEIGHT.to_owned(), vocab, hidden)?;
        let layers = (0..config.num_hidden_layers)
            .map(|index| take_layer(&mut builder, &config, index))
            .collect::<Result<Vec<_>, _>>()?;
        let norm = builder.take("model.norm.weight".to_owned(), hidden)?;
        let head = if config.tie_word_embeddings {
            None
        } else {
            Some(builder.take_matrix(HEAD_WEIGHT.to_owned(), vocab, hidden)?)
        };
        let (mut trained_embedding, mut trained_head) = (None, None);
        let saved = lora.as_ref().map_or_else(SavedModules::default, |lora| {
            lora.saved_modules(head.is_none())
        });
        if saved.embedding {
            trained_embedding = Some(builder.trained_copy(&embedding, EMBEDDING_WEIGHT)?);
        }
        if saved.is_tied {
            trained_head.clone_from(&trained_embedding);
        } else if saved.head {
            let frozen = head.as_ref().unwrap_or(&embedding);
            trained_head = Some(builder.trained_copy(frozen, HEAD_WEIGHT)?);
        }
        let version = builder.version();
        let variables = builder.finish()?;
        let rope = is_fused.then(|| FusedRope::new(dtype, &config));
        let rotary = RotaryTable::new(&config, dtype, device);
        Ok(Self {
            config,
            device: device.clone(),
            dtype,
            format,
            lora,
            embedding,
            layers,
            norm,
            head,
            trained_embedding,
            trained_head,
            saved,
            variables,
            rope,
            rotary,
            version,
            served: AdapterRegistry::default(),
        })
    }

    // === What it is ===

    /// Returns the shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the device that holds the weights.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the type of the weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the adapter's configuration, if there is one.
    pub fn lora(&self) -> Option<&LoraConfig> {
        self.lora.as_ref()
    }

    /// Returns the number of weights, adapters not counted.
    pub fn parameter_count(&self) -> usize {
        // It fits, as the configuration was validated.
        self.config.parameter_count().unwrap_or(usize::MAX)
    }

    /// Returns a number that grows with every update of the weights.
    ///
    /// A cache row filled at another version belongs to another policy.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Says that the variables were changed: whoever writes to them calls it before the next pass, which
    /// may otherwise read what it kept of the old ones.
    pub fn mark_updated(&self) {
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the trainable variables with their names, in a fixed order.
    pub fn variables(&self) -> &[(String, Var)] {
        &self.variables
    }

    /// Returns zero gradients for the variables.
    pub fn zero_gradients(&self) -> Gradients {
        let variables = self
            .variables
            .iter()
            .map(|(name, var)| (name.clone(), var.shape().clone()))
            .collect();
        Gradients::zeros(variables, self.dtype, &self.device, self.rope.is_some())
    }

    /// Returns an empty cache for at most `max_tokens` tokens.
    pub fn new_cache(&self, max_tokens: usize) -> KvCache {
        let (layers, shape) = (self.config.num_hidden_layers, self.head_shape());
        if self.is_fused() {
            KvCache::on_heap(layers, shape, self.dtype, max_tokens)
        } else {
            KvCache::paged(layers, shape, self.dtype, max_tokens, &self.device)
        }
    }

    // === Adapters beside the weights ===

    /// Adds an adapter that segments of a batch may ask for
    /// ([`PackedBatch::push_adapted`]). The weights stay as they are.
    ///
    /// # Errors
    ///
    /// Fails if the name is taken, if a tensor is missing, left over or of another shape than this
    /// model's layers say, if the adapter has modules that are trained in full, or if the model has an
    /// adapter of its own, which is being trained.
    pub fn add_adapter(&self, name: &str, adapter: &LoraAdapter) -> Result<AdapterId, ModelError> {
        if self.lora.is_some() {
            return Err(ModelError::Unsupported {
                field: "adapter",
                found: "a model with an adapter of its own".to_owned(),
                supported: "a decoder built with `Trainable::Frozen` or `Trainable::Full`",
            });
        }
        if !adapter.config.modules_to_save.is_empty() {
            return Err(ModelError::Unsupported {
                field: "modules_to_save",
                found: format!("`{}`", adapter.config.modules_to_save.join("`, `")),
                supported: "none beside others: a head or an embedding of its own needs a decoder built \
                            with `Trainable::Lora` of the adapter's configuration",
            });
        }
        let wide = match self.dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let mut updates = HashMap::new();
        let mut left: HashMap<&String, &Tensor> = adapter.tensors.iter().collect();
        for linear in self.layers.iter().flat_map(Layer::linears) {
            let weight = linear.weight.name();
            let path = weight.strip_suffix(".weight").unwrap_or(weight);
            let names = ["A", "B"].map(|part| format!("{path}.lora_{part}.weight"));
            let (a, b) = match names.each_ref().map(|name| left.remove(name)) {
                [None, None] => continue,
                [Some(a), Some(b)] => (a, b),
                [a, _] => {
                    let [name_a, name_b] = names;
                    let name = if a.is_some() { name_b } else { name_a };
                    return Err(ModelError::MissingTensor { name });
                }
            };
            let rank = a.dims().first().copied().unwrap_or(0);
            let shapes = [[rank, linear.inputs], [linear.outputs, rank]];
            let mut parts = Vec::with_capacity(2);
            for ((name, tensor), expected) in names.into_iter().zip([a, b]).zip(shapes) {
                if tensor.dims() != expected || rank == 0 {
                    return Err(ModelError::TensorShape {
                        name,
                        expected: expected.to_vec(),
                        found: tensor.dims().to_vec(),
                    });
                }
                let tensor = tensor.to_device(&self.device)?.to_dtype(wide)?;
                let part = Parameter::frozen(name, &tensor.contiguous()?);
                parts.push(if self.is_fused() {
                    part.packed(self.format.of_adapters())?
                } else {
                    part
                });
            }
            let (Some(b), Some(a)) = (parts.pop(), parts.pop()) else {
                unreachable!("two were pushed")
            };
            let scale = adapter.scale(path, rank);
            updates.insert(weight.to_owned(), Lora { a, b, rank, scale });
        }
        if let Some(name) = left.into_keys().min() {
            return Err(ModelError::UnexpectedTensor { name: name.clone() });
        }
        self.served.add(name, updates)
    }

    /// Removes an adapter that was added.
    ///
    /// # Errors
    ///
    /// Fails if there is no such adapter, or if something holds on to it: a sequence of an engine, a
    /// lease.
    pub fn remove_adapter(&self, id: AdapterId) -> Result<(), ModelError> {
        self.served.remove(id)
    }

    /// Returns the adapters that were added, with their names.
    pub fn adapters(&self) -> Vec<(AdapterId, String)> {
        self.served.list()
    }

    /// Returns a hold on an adapter: it cannot be removed as long as it lives.
    ///
    /// # Errors
    ///
    /// Fails if there is no such adapter.
    pub fn lease_adapter(&self, id: AdapterId) -> Result<AdapterLease, ModelError> {
        self.served.lease(id)
    }

    pub(super) fn row_adapters(
        &self,
        batch: &PackedBatch,
        own: Adapters,
    ) -> Result<RowAdapters, ModelError> {
        self.served.rows(batch, own)
    }

    pub(crate) fn head_shape(&self) -> HeadShape {
        HeadShape {
            heads: self.config.num_attention_heads,
            kv_heads: self.config.num_key_value_heads,
            head_dim: self.config.head_dim,
        }
    }

    pub(crate) fn is_fused(&self) -> bool {
        self.rope.is_some()
    }

    pub(super) fn fused_rope(&self) -> &FusedRope {
        self.rope
            .as_ref()
            .expect("the fused passes run only where it is present")
    }

    pub(super) fn rotary(&self) -> &RotaryTable {
        &self.rotary
    }

    /// Returns what tokens are embedded with, `[vocab, hidden]`.
    pub(super) fn embedding(&self, adapters: Adapters) -> &Parameter {
        match (adapters, &self.trained_embedding) {
            (Adapters::On, Some(trained)) => trained,
            _ => &self.embedding,
        }
    }

    pub(super) fn layers(&self) -> &[Layer] {
        &self.layers
    }

    pub(super) fn norm(&self) -> &Parameter {
        &self.norm
    }

    /// Returns the output head `[vocab, hidden]`: the embedding if they are tied.
    pub(crate) fn head(&self, adapters: Adapters) -> &Parameter {
        match (adapters, &self.trained_head) {
            (Adapters::On, Some(trained)) => trained,
            _ => self.head.as_ref().unwrap_or(&self.embedding),
        }
    }

    // === Passes ===

    fn check(&self, batch: &PackedBatch) -> Result<(), ModelError> {
        batch.check(self.config.vocab_size, self.config.max_position_embeddings)
    }

    /// Returns the hidden states `[n, hidden]` behind the final norm, without a backward pass.
    ///
    /// # Errors
    ///
    /// Fails if a token or a position is out of range, or if the tensor library does.
    pub fn hidden(&self, batch: &PackedBatch, adapters: Adapters) -> Result<Tensor, ModelError> {
        self.check(batch)?;
        if batch.is_empty() {
            return Ok(Tensor::zeros(
                (0, self.config.hidden_size),
                self.dtype,
                &self.device,
            )?);
        }
        match self.kind() {
            Kind::F32 => fused::hidden_tensor(self, fused::hidden::<f32>(self, batch, adapters)?),
            Kind::F64 => fused::hidden_tensor(self, fused::hidden::<f64>(self, batch, adapters)?),
            Kind::Composed => Ok(composed::forward(self, batch, adapters, None)?.0),
        }
    }

    /// Returns the hidden states `[n, hidden]` behind the final norm, and the tape of their backward
    /// pass.
    ///
    /// With `recompute` the tape holds each layer's input only, and the backward pass runs each
    /// layer again: a third more time for a small part of the memory.
    ///
    /// # Errors
    ///
    /// Fails if a token or a position is out of range, or if the tensor library does.
    pub fn forward(
        &self,
        batch: &PackedBatch,
        recompute: bool,
    ) -> Result<(Tensor, Tape), ModelError> {
        self.forward_dropping(batch, recompute, None)
    }

    /// As [`Decoder::forward`]; given a seed, with the dropout of the adapter's configuration before each
    /// low-rank update. Its masks depend on the seed and on the tokens of each sequence up to a place, and
    /// not on what else is in the batch.
    ///
    /// # Errors
    ///
    /// As [`Decoder::forward`].
    pub fn forward_dropping(
        &self,
        batch: &PackedBatch,
        recompute: bool,
        dropout_seed: Option<u64>,
    ) -> Result<(Tensor, Tape), ModelError> {
        self.check(batch)?;
        let adapted = batch.adapters().iter().flatten().count();
        if adapted > 0 {
            // Their updates are frozen, and the backward pass knows nothing of them.
            return Err(ModelError::Mismatch {
                what: "segments with an adapter in a pass for training",
                found: adapted,
                expected: 0,
            });
        }
        let probability = self.lora.as_ref().map_or(0.0, |lora| lora.dropout);
        let dropout = dropout_seed.filter(|_| probability > 0.0);
        let dropout = dropout.map(|seed| RowDropout::new(batch, probability, seed));
        let (hidden, kind) = match self.kind() {
            Kind::F32 => {
                let (hidden, tape) = fused::forward::<f32>(self, batch, recompute, dropout)?;
                (fused::hidden_tensor(self, hidden)?, TapeKind::F32(tape))
            }
            Kind::F64 => {
                let (hidden, tape) = fused::forward::<f64>(self, batch, recompute, dropout)?;
                (fused::hidden_tensor(self, hidden)?, TapeKind::F64(tape))
            }
            Kind::Composed => {
                let (hidden, tape) = composed::forward(self, batch, Adapters::On, dropout)?;
                (hidden, TapeKind::Composed(tape))
            }
        };
        Ok((
            hidden,
            Tape {
                batch: batch.clone(),
                version: self.version(),
                kind,
            },
        ))
    }

    /// Adds the gradients of all variables below the hidden states, given the gradient `dhidden`
    /// `[n, hidden]` of the loss with respect to them.
    ///
    /// The output head lies above the hidden states; whoever computes the loss adds its gradient.
    ///
    /// # Errors
    ///
    /// Fails if the weights changed since the forward pass, if `dhidden` or `gradients` belong to
    /// another batch or model, or if the tensor library does.
    pub fn backward(
        &self,
        tape: Tape,
        dhidden: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<(), ModelError> {
        let Tape {
            batch,
            version,
            kind,
        } = tape;
        if version != self.version() {
            return Err(ModelError::StaleTape {
                tape: version,
                weights: self.version(),
            });
        }
        let expected = [batch.len(), self.config.hidden_size];
        if dhidden.dims() != expected {
            return Err(ModelError::TensorShape {
                name: "dhidden".to_owned(),
                expected: expected.to_vec(),
                found: dhidden.dims().to_vec(),
            });
        }
        if !gradients.fit(self.variables.len(), self.dtype, self.is_fused()) {
            return Err(ModelError::Mismatch {
                what: "gradients against the model's variables",
                found: gradients.len(),
                expected: self.variables.len(),
            });
        }
        let dhidden = dhidden.contiguous()?;
        match kind {
            TapeKind::F32(tape) => {
                fused::backward(self, &batch, tape, &Values::of(&dhidden)?, gradients)
            }
            TapeKind::F64(tape) => {
                fused::backward(self, &batch, tape, &Values::of(&dhidden)?, gradients)
            }
            TapeKind::Composed(tape) => composed::backward(self, &batch, tape, &dhidden, gradients),
        }
    }

    /// Returns the hidden states `[n, hidden]` of new tokens, and appends their keys and values to
    /// the cache. Segment `i` of the batch continues `rows[i]`, with the adapter that the row's earlier
    /// tokens were computed with.
    ///
    /// # Errors
    ///
    /// Fails if a token or a position is out of range, if a segment does not start where its row
    /// ends, if a row is unknown or named twice, if the cache is full, or if the tensor library
    /// fails. The cache's rows are then as before.
    pub fn hidden_cached(
        &self,
        batch: &PackedBatch,
        cache: &mut KvCache,
        rows: &[RowId],
    ) -> Result<Tensor, ModelError> {
        self.hidden_cached_of(batch, cache, rows, None)
    }

    /// As [`Decoder::hidden_cached`], but returns the hidden states `[segments.len(), hidden]` of the
    /// last tokens of some segments only, which are all that sampling needs of a prompt. They are the
    /// same bits; on the CPU the last layer then leaves the other tokens out.
    ///
    /// # Errors
    ///
    /// As [`Decoder::hidden_cached`], and if a segment does not exist or is empty.
    pub fn last_hidden_cached(
        &self,
        batch: &PackedBatch,
        cache: &mut KvCache,
        rows: &[RowId],
        segments: &[usize],
    ) -> Result<Tensor, ModelError> {
        let is_missing = |&&segment: &&usize| {
            let range = batch.segments().get(segment);
            range.is_none_or(std::ops::Range::is_empty)
        };
        if let Some(&segment) = segments.iter().find(is_missing) {
            return Err(ModelError::Mismatch {
                what: "segment whose last token is asked for against segments with tokens",
                found: segment,
                expected: batch.segments().len(),
            });
        }
        self.hidden_cached_of(batch, cache, rows, Some(segments))
    }

    fn hidden_cached_of(
        &self,
        batch: &PackedBatch,
        cache: &mut KvCache,
        rows: &[RowId],
        tails: Option<&[usize]>,
    ) -> Result<Tensor, ModelError> {
        self.check(batch)?;
        if rows.len() != batch.segments().len() {
            return Err(ModelError::Mismatch {
                what: "cache rows against segments",
                found: rows.len(),
                expected: batch.segments().len(),
            });
        }
        if let Some(history) = batch.histories().iter().find(|history| !history.is_empty()) {
            // A child's history is in the batch, a row's in the cache: fork the row instead.
            let what = "ancestors of a segment in a cached pass";
            return Err(ModelError::Mismatch {
                what,
                found: history.len(),
                expected: 0,
            });
        }
        if batch.is_empty() {
            return Ok(Tensor::zeros(
                (0, self.config.hidden_size),
                self.dtype,
                &self.device,
            )?);
        }
        match self.kind() {
            Kind::F32 => {
                let hidden = fused::hidden_cached::<f32>(self, batch, cache, rows, tails)?;
                fused::hidden_tensor(self, hidden)
            }
            Kind::F64 => {
                let hidden = fused::hidden_cached::<f64>(self, batch, cache, rows, tails)?;
                fused::hidden_tensor(self, hidden)
            }
            Kind::Composed => {
                let hidden = paged::hidden_cached(self, batch, cache, rows)?;
                let Some(segments) = tails else {
                    return Ok(hidden);
                };
                // A chunk that completes no prompt. A kernel for no elements cannot be launched on a GPU.
                if segments.is_empty() {
                    return Ok(hidden.narrow(0, 0, 0)?);
                }
                let ends = segments.iter().map(|&segment| {
                    let end = batch.segments()[segment].end - 1;
                    u32::try_from(end).expect("batches are bounded")
                });
                let ends = Tensor::from_iter(ends, hidden.device())?;
                Ok(hidden.index_select(&ends, 0)?)
            }
        }
    }

    /// Returns the policy's logits `[m, vocab]` of hidden states `[m, hidden]`, in `f32` (`f64` for an
    /// `f64` model).
    ///
    /// # Errors
    ///
    /// Fails if the shape is another, or if the tensor library does.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor, ModelError> {
        let (rows, width) = hidden.dims2()?;
        if width != self.config.hidden_size {
            return Err(ModelError::Mismatch {
                what: "width of the hidden states",
                found: width,
                expected: self.config.hidden_size,
            });
        }
        let shape = (rows, self.config.vocab_size);
        let hidden = hidden.contiguous()?;
        match self.kind() {
            Kind::F32 => {
                let logits = fused::logits::<f32>(self, &Values::of(&hidden)?, rows)?;
                Ok(Tensor::from_vec(logits, shape, &self.device)?)
            }
            Kind::F64 => {
                let logits = fused::logits::<f64>(self, &Values::of(&hidden)?, rows)?;
                Ok(Tensor::from_vec(logits, shape, &self.device)?)
            }
            Kind::Composed => {
                let weight = self.head(Adapters::On).tensor();
                // A head that is trained beside a narrow base is wide.
                let hidden = hidden.to_dtype(weight.dtype())?;
                let logits = hidden.matmul(&weight.t()?)?.detach();
                let wide = if self.dtype == DType::F64 {
                    DType::F64
                } else {
                    DType::F32
                };
                Ok(logits.to_dtype(wide)?)
            }
        }
    }

    fn kind(&self) -> Kind {
        match (&self.rope, self.dtype) {
            (None, _) => Kind::Composed,
            (Some(_), DType::F64) => Kind::F64,
            (Some(_), _) => Kind::F32,
        }
    }

    // === Checkpoints ===

    /// Returns every weight by its Hugging Face name, sorted by name; adapters, and what is trained beside
    /// them, are left out.
    ///
    /// Variables share the model's storage: copy them to keep them.
    ///
    /// # Panics
    ///
    /// Panics if the tensor library cannot make a tensor of the weights that it had before.
    pub fn weights(&self) -> Vec<(String, Tensor)> {
        let mut weights: Vec<(String, Tensor)> = [&self.embedding, &self.norm]
            .into_iter()
            .chain(&self.head)
            .chain(self.layers.iter().flat_map(Layer::parameters))
            .filter(|parameter| !parameter.name().contains(".lora_"))
            .map(|parameter| {
                let tensor = parameter.to_tensor().expect("it was a tensor before");
                (parameter.name().to_owned(), tensor.detach())
            })
            .collect();
        weights.sort_by(|a, b| a.0.cmp(&b.0));
        weights
    }

    /// Returns every weight with the adapter's update added, `W + alpha / rank * B A`, and with what is
    /// trained in full in place of what is frozen. A head and an embedding that were one may be two then.
    ///
    /// # Errors
    ///
    /// Fails if the tensor library does.
    pub fn merged_weights(&self) -> Result<Vec<(String, Tensor)>, ModelError> {
        let mut updates = HashMap::new();
        for linear in self.layers.iter().flat_map(Layer::linears) {
            if let Some(lora) = &linear.lora {
                let (a, b) = (lora.a.tensor().detach(), lora.b.tensor().detach());
                updates.insert(linear.weight.name(), (b.matmul(&a)? * lora.scale)?);
            }
        }
        let mut merged: BTreeMap<String, Tensor> = self
            .weights()
            .into_iter()
            .map(|(name, weight)| match updates.get(name.as_str()) {
                Some(update) => {
                    let merged = (weight.to_dtype(update.dtype())? + update)?;
                    Ok((name, merged.to_dtype(weight.dtype())?))
                }
                None => Ok((name, weight)),
            })
            .collect::<Result<_, ModelError>>()?;
        if let Some(trained) = &self.trained_embedding {
            let trained = trained.tensor().detach().to_dtype(self.dtype)?;
            merged.insert(EMBEDDING_WEIGHT.to_owned(), trained);
        }
        let is_of_its_own = self.trained_head.is_some() || self.head.is_none();
        if is_of_its_own && !self.is_merged_head_tied() {
            let head = self.head(Adapters::On).to_tensor()?;
            let head = head.detach().to_dtype(self.dtype)?;
            merged.insert(HEAD_WEIGHT.to_owned(), head);
        }
        Ok(merged.into_iter().collect())
    }

    /// Returns whether the head is the embedding where adapters are merged.
    fn is_merged_head_tied(&self) -> bool {
        self.head.is_none() && (self.saved.is_tied || self.saved.count() == 0)
    }

    /// Writes `config.json` and `model.safetensors`, which transformers loads. An adapter is merged.
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be written.
    pub fn save(&self, folder: &Path) -> Result<(), ModelError> {
        self.save_as(folder, self.dtype())
    }

    /// As [`Decoder::save`], with weights in `dtype`: `f32`, `bf16` or `f16`.
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be written.
    pub fn save_as(&self, folder: &Path, dtype: DType) -> Result<(), ModelError> {
        fs::create_dir_all(folder).map_err(|source| io_error(folder, source))?;
        let path = folder.join("config.json");
        let config = ModelConfig {
            tie_word_embeddings: self.is_merged_head_tied(),
            ..self.config.clone()
        };
        fs::write(&path, config.to_json(dtype)).map_err(|source| io_error(&path, source))?;
        let weights: Vec<(String, Tensor)> = (self.merged_weights()?.into_iter())
            .map(|(name, weight)| Ok((name, weight.to_dtype(dtype)?)))
            .collect::<Result<_, ModelError>>()?;
        write_safetensors(&folder.join("model.safetensors"), &weights)
    }

    /// Returns the adapter, if there is one. Its tensors share the model's storage.
    pub fn adapter(&self, base_model: Option<&str>) -> Option<LoraAdapter> {
        let config = self.lora.clone()?;
        let tensors = self.variables.iter();
        let tensors = tensors.map(|(name, var)| (name.clone(), var.as_detached_tensor()));
        let mut tensors: HashMap<String, Tensor> = tensors.collect();
        if self.saved.is_tied {
            // As PEFT writes it: twice.
            let head = tensors.get(EMBEDDING_WEIGHT).cloned();
            tensors.extend(head.map(|head| (HEAD_WEIGHT.to_owned(), head)));
        }
        Some(LoraAdapter {
            config,
            alpha_pattern: BTreeMap::new(),
            rank_pattern: BTreeMap::new(),
            base_model: base_model.map(str::to_owned),
            tensors,
        })
    }

    /// Sets the variables from named tensors, as they stand in [`Decoder::variables`].
    ///
    /// # Errors
    ///
    /// Fails if a tensor is missing, left over or of another shape; the model is then unchanged.
    pub fn set_variables(&self, tensors: &HashMap<String, Tensor>) -> Result<(), ModelError> {
        let mut values = Vec::with_capacity(self.variables.len());
        for (name, var) in &self.variables {
            let Some(tensor) = tensors.get(name) else {
                return Err(ModelError::MissingTensor { name: name.clone() });
            };
            if tensor.shape() != var.shape() {
                return Err(ModelError::TensorShape {
                    name: name.clone(),
                    expected: var.dims().to_vec(),
                    found: tensor.dims().to_vec(),
                });
            }
            // Copied, since a variable cannot be set from its own storage.
            values.push(
                tensor
                    .to_device(&self.device)?
                    .to_dtype(var.dtype())?
                    .copy()?,
            );
        }
        if tensors.len() > self.variables.len() {
            let known = |name: &String| self.variables.iter().any(|(known, _)| known == name);
            if let Some(name) = tensors.keys().filter(|name| !known(name)).min() {
                return Err(ModelError::UnexpectedTensor { name: name.clone() });
            }
        }
        for ((_, var), value) in self.variables.iter().zip(values) {
            var.set(&value)?;
        }
        self.mark_updated();
        Ok(())
    }

    /// Sets the adapter's tensors. The adapter must have this model's rank, scale and targets.
    ///
    /// # Errors
    ///
    /// Fails if the model has no adapter or another one.
    pub fn load_adapter(&self, adapter: &LoraAdapter) -> Result<(), ModelError> {
        let Some(config) = &self.lora else {
            return Err(ModelError::Unsupported {
                field: "adapter",
                found: "a model without an adapter".to_owned(),
                supported: "a decoder built with `Trainable::Lora` of the adapter's configuration",
            });
        };
        adapter.check_uniform()?;
        if config.use_rslora != adapter.config.use_rslora {
            return Err(ModelError::InvalidConfig {
                field: "use_rslora",
                reason: format!(
                    "{} in the adapter, {} here",
                    adapter.config.use_rslora, config.use_rslora
                ),
            });
        }
        if config.rank != adapter.config.rank {
            let (found, expected) = (adapter.config.rank, config.rank);
            return Err(ModelError::Mismatch {
                what: "rank of the adapter",
                found,
                expected,
            });
        }
        #[expect(clippy::float_cmp, reason = "both come from a file")]
        if config.alpha != adapter.config.alpha {
            return Err(ModelError::InvalidConfig {
                field: "lora_alpha",
                reason: format!(
                    "{} in the adapter, {} here",
                    adapter.config.alpha, config.alpha
                ),
            });
        }
        let found = adapter.config.saved_modules(self.head.is_none());
        let expected = self.saved;
        if found != expected {
            return Err(ModelError::InvalidConfig {
                field: "modules_to_save",
                reason: format!("{found} in the adapter, {expected} here"),
            });
        }
        if !expected.is_tied {
            return self.set_variables(&adapter.tensors);
        }
        let mut tensors = adapter.tensors.clone();
        if let (Some(head), Some(embedding)) =
            (tensors.remove(HEAD_WEIGHT), tensors.get(EMBEDDING_WEIGHT))
            && !is_same(&head, embedding)?
        {
            return Err(ModelError::InvalidConfig {
                field: "ensure_weight_tying",
                reason: "true, though head and embedding differ in the adapter".to_owned(),
            });
        }
        self.set_variables(&tensors)
    }
}

/// Returns whether two tensors hold the same numbers.
fn is_same(a: &Tensor, b: &Tensor) -> Result<bool, ModelError> {
    Ok(a.shape() == b.shape()
        && a.ne(b)?
            .sum_all()?
            .to_dtype(DType::F64)?
            .to_scalar::<f64>()?
            == 0.0)
}

enum Kind {
    F32,
    F64,
    Composed,
}

fn take_layer(
    builder: &mut ParameterBuilder<'_>,
    config: &ModelConfig,
    index: usize,
) -> Result<Layer, ModelError> {
    let hidden = config.hidden_size;
    let queries = config.num_attention_heads * config.head_dim;
    let keys = config.num_key_value_heads * config.head_dim;
    let inner = config.intermediate_size;
    let weight = |name: &str| format!("model.layers.{index}.{name}.weight");
    let head_norm = |builder: &mut ParameterBuilder<'_>, name: &str| {
        config
            .has_qk_norm()
            .then(|| builder.take(weight(name), config.head_dim))
            .transpose()
    };
    let linear =
        |builder: &mut ParameterBuilder<'_>, block: &str, module: &str, outputs, inputs| {
            let path = format!("model.layers.{index}.{block}.{module}");
            builder.take_linear(&path, outputs, inputs, config.has_bias(module))
        };
    Ok(Layer {
        input_norm: builder.take(weight("input_layernorm"), hidden)?,
        q_proj: linear(builder, "self_attn", "q_proj", queries, hidden)?,
        k_proj: linear(builder, "self_attn", "k_proj", keys, hidden)?,
        v_proj: linear(builder, "self_attn", "v_proj", keys, hidden)?,
        q_norm: head_norm(builder, "self_attn.q_norm")?,
        k_norm: head_norm(builder, "self_attn.k_norm")?,
        o_proj: linear(builder, "self_attn", "o_proj", hidden, queries)?,
        post_norm: builder.take(weight("post_attention_layernorm"), hidden)?,
        gate_proj: linear(builder, "mlp", "gate_proj", inner, hidden)?,
        up_proj: linear(builder, "mlp", "up_proj", inner, hidden)?,
        down_proj: linear(builder, "mlp", "down_proj", hidden, inner)?,
    })
}
