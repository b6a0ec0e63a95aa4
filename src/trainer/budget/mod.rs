//! Where the memory of a run goes, by calculation: nothing is loaded.
//!
//! Counted are the tensors that the passes of `engine::model` keep, with the sizes that their code gives
//! them. What is left over, the program itself and what its allocator holds back, is a constant and a
//! share that were measured; see docs/training.md.

use candle_core::DType;
use serde::{Deserialize, Serialize};

use super::logprob::head_chunk_rows;
use super::value;
use crate::engine::model::{
    LINEAR_MODULES, LoraConfig, MAX_SCORES, ModelConfig, Trainable, WeightFormat, tensor_shapes,
};

/// The program, its threads, a tokenizer.
const PROGRAM: u64 = 48 << 20;

/// What a CUDA context and its libraries take.
const CUDA_CONTEXT: u64 = 512 << 20;

/// Numbers of a training step that an attention score takes on a GPU, where a layer's graph is held: in
/// the model's own type the product, its scaling and probabilities, and in `f32` the masked softmax'
/// five steps and three gradients at a time.
const GRAPH_NUMBERS_PER_SCORE: u64 = 3;
const GRAPH_SINGLES_PER_SCORE: u64 = 5 + 3;

/// Copies of a chunk of logits in `f32` that the plain tensor operations hold.
const COMPOSED_LOGITS: u64 = 5;

/// Tokens of a micro-batch with which weights are read often enough for each time they are turned.
pub(super) const WORTHWHILE_TOKENS: usize = 256;

/// Where the model runs, which says what its passes keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// Kernels of our own.
    Cpu,
    /// Plain tensor operations on a GPU; layers are always run again.
    Gpu,
}

/// What to plan for.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanRequest {
    /// Where the model runs.
    pub place: Place,
    /// What hidden states, keys and values are held in, and weights that have no format of their own.
    pub dtype: DType,
    /// How the CPU keeps the matrices that are not trained.
    pub format: WeightFormat,
    /// What is trained.
    pub trainable: Trainable,
    /// Whether a value head is trained beside it.
    pub critic: bool,
    /// Whether layers are run again in the backward pass; always so on a GPU.
    pub recompute: bool,
    /// Tokens of one forward and backward pass.
    pub micro_batch_tokens: usize,
    /// Tokens of the longest sequence to learn from.
    pub longest: usize,
    /// Tokens whose keys and values are held while episodes are sampled.
    pub cache_tokens: usize,
    /// Parts that a step is learned from in.
    pub parts: usize,
    /// Passes over the episodes of a step.
    pub iterations: usize,
    /// Whether episodes are sampled while a step trains.
    pub overlaps: bool,
}

/// Bytes by purpose.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Weights of the model, as they are held.
    pub weights: u64,
    /// The adapter, with modules that are trained in full beside it; on a CPU the panels beside its
    /// matrices, or beside all matrices in full training.
    pub adapter: u64,
    /// AdamW's moments, `f32`.
    pub optimizer: u64,
    /// The value head and its moments, and the hidden states that it reads at a time.
    pub critic: u64,
    /// Sums of the gradients, and what a step of several passes goes back to if one is refused: while
    /// training only.
    pub gradients: u64,
    /// What a micro-batch's forward pass keeps: while training only.
    pub activations: u64,
    /// What the pass through one layer needs besides, and the attention's scores: while training only.
    pub workspace: u64,
    /// Logits of one chunk of rows and their gradients: while training only.
    pub logits: u64,
    /// Keys and values: while sampling only.
    pub cache: u64,
    /// The program, and the GPU's own libraries.
    pub program: u64,
    /// Whether it samples while it trains.
    #[serde(skip)]
    pub overlaps: bool,
}

impl MemoryPlan {
    /// Returns what is held all the time.
    #[must_use]
    pub fn resident(&self) -> u64 {
        self.weights + self.adapter + self.optimizer + self.critic + self.program
    }

    /// Returns the most that is held while the policy is trained, with what is sampled meanwhile.
    #[must_use]
    pub fn training(&self) -> u64 {
        let meanwhile = if self.overlaps { self.cache } else { 0 };
        let training = self.gradients + self.activations + self.workspace + self.logits;
        self.resident() + training + meanwhile
    }

    /// Returns the most that is held while episodes are sampled.
    #[must_use]
    pub fn sampling(&self) -> u64 {
        self.resident() + self.cache
    }

    /// Returns the most that is held at all.
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.training().max(self.sampling())
    }
}

/// Returns where the bytes of a run go.
#[must_use]
pub fn plan(model: &ModelConfig, request: &PlanRequest) -> MemoryPlan {
    let is_cpu = request.place == Place::Cpu;
    let sizes = Sizes::new(
        model,
        is_cpu && request.format == WeightFormat::Bf16Products,
    );
    let tokens = request.micro_batch_tokens.max(request.longest) as u64;
    let is_full = request.trainable == Trainable::Full;
    let number = request.dtype.size_in_bytes();
    let (mut weights, mut panels) = (0, 0);
    for (_, shape) in tensor_shapes(model) {
        match *shape.as_slice() {
            [outputs, inputs] if is_cpu && !is_full => {
                weights += request.format.packed_bytes(outputs, inputs, number);
            }
            [outputs, inputs] if is_cpu => {
                weights += (number * outputs * inputs) as u64;
                panels += WeightFormat::Wide.packed_bytes(outputs, inputs, number);
            }
            _ => weights += (number * shape.iter().product::<usize>()) as u64,
        }
    }
    let number = number as u64;
    let trained = trained_numbers(model, &request.trainable);
    let adapter = match &request.trainable {
        Trainable::Frozen => 0,
        Trainable::Full => panels,
        Trainable::Lora(config) => {
            let packed = |format: WeightFormat, [outputs, inputs]: [usize; 2]| {
                format.packed_bytes(outputs, inputs, size_of::<f32>())
            };
            let format = request.format.of_adapters();
            let shapes = adapter_shapes(model, config).flatten();
            let mut panels: u64 = shapes.map(|shape| packed(format, shape)).sum();
            // No product reads the embedding.
            if config.saved_modules(model.tie_word_embeddings).head {
                let shape = [model.vocab_size, model.hidden_size];
                panels += packed(WeightFormat::Wide, shape);
            }
            4 * trained + if is_cpu { panels } else { 0 }
        }
    };
    let layers = model.num_hidden_layers as u64;
    let recompute = request.recompute || !is_cpu;
    let (kept_layers, again) = if recompute { (0, 1) } else { (layers, 0) };
    let low = match &request.trainable {
        Trainable::Lora(config) => {
            let modules = adapter_shapes(model, config).count() as u64;
            (config.rank as u64 * modules).div_ceil(layers.max(1))
        }
        _ => 0,
    };
    let per_layer = sizes.kept + low;
    // One layer's gradients: of the feed-forward layer's two halves and their product, packed for the
    // products, or those of attention; the residual stream's; the hidden states and theirs.
    let gradients_of_layer = 4 * sizes.inner + 6 * sizes.hidden;
    let scores = if is_cpu {
        0
    } else {
        // Some heads at a time, those of one key at the least.
        let longest = request.longest.max(1) as u64;
        let heads = model.num_attention_heads as u64;
        let share = heads / model.num_key_value_heads as u64;
        let all = longest * longest * heads;
        let bytes = number * GRAPH_NUMBERS_PER_SCORE + 4 * GRAPH_SINGLES_PER_SCORE;
        bytes * all.min((MAX_SCORES as u64).max(longest * longest * share))
    };
    // What an adapter reads of a layer's inputs, on the way there and back.
    let dropped = match &request.trainable {
        Trainable::Lora(config) if config.dropout > 0.0 => 2 * sizes.inner.max(sizes.queries),
        _ => 0,
    };
    // On a GPU a number stands beside its gradient, or beside its wider copy.
    let graph = if is_cpu { number } else { number + 4 };
    let vocab = model.vocab_size as u64;
    let chunk = head_chunk_rows(model.vocab_size) as u64;
    let copies = if is_cpu { 1 } else { COMPOSED_LOGITS };
    // Products of bf16 read the logits' gradient from an array of its own.
    let is_bf16 = is_cpu && request.format == WeightFormat::Bf16Products;
    let gradient_pairs = if is_bf16 { 2 } else { 0 };
    MemoryPlan {
        weights,
        adapter,
        optimizer: 8 * trained,
        critic: if request.critic {
            value_head(sizes.hidden, number)
        } else {
            0
        },
        gradients: 4
            * trained
            * (gradient_sums(request) + if request.iterations > 1 { 3 } else { 0 }),
        activations: tokens * number * (layers * sizes.hidden * u64::from(recompute))
            + tokens * number * per_layer * kept_layers,
        workspace: tokens * graph * (per_layer * again + gradients_of_layer + dropped) + scores,
        logits: (copies * 4 + gradient_pairs) * chunk.min(tokens) * vocab,
        cache: request.cache_tokens as u64 * number * layers * 2 * sizes.keys,
        program: PROGRAM + if is_cpu { 0 } else { CUDA_CONTEXT },
        overlaps: request.overlaps,
    }
}

/// Returns the largest number of tokens for a forward and backward pass with which a run stays below
/// `budget` bytes, in steps of 64, or `None` if nothing does.
///
/// The longest episode goes through the model in one piece, so the number is never below its length.
#[must_use]
pub fn largest_micro_batch(
    model: &ModelConfig,
    request: &PlanRequest,
    budget: u64,
) -> Option<usize> {
    const STEP: usize = 64;
    let fits = |steps: usize| {
        let micro_batch_tokens = (steps * STEP).max(request.longest);
        let request = PlanRequest {
            micro_batch_tokens,
            ..request.clone()
        };
        (plan(model, &request).peak() <= budget).then_some(micro_batch_tokens)
    };
    let (mut low, mut high) = (0, request.micro_batch_tokens.div_ceil(STEP) + 1);
    let mut found = fits(low)?;
    while high - low > 1 {
        let middle = usize::midpoint(low, high);
        match fits(middle) {
            Some(tokens) => (low, found) = (middle, tokens),
            None => high = middle,
        }
    }
    Some(found.min(request.micro_batch_tokens.max(request.longest)))
}

/// Returns how many numbers a model's weights have.
#[must_use]
pub fn parameter_count(model: &ModelConfig) -> usize {
    let numbers = |(_, shape): (String, Vec<usize>)| shape.iter().product::<usize>();
    tensor_shapes(model).into_iter().map(numbers).sum()
}

/// Returns how many numbers are trained.
#[must_use]
pub fn trained_numbers(model: &ModelConfig, trainable: &Trainable) -> u64 {
    match trainable {
        Trainable::Frozen => 0,
        Trainable::Full => parameter_count(model) as u64,
        Trainable::Lora(config) => {
            let saved = config.saved_modules(model.tie_word_embeddings).count();
            let saved = (saved * model.vocab_size * model.hidden_size) as u64;
            let updates = adapter_shapes(model, config).flatten();
            let updates = updates.map(|[outputs, inputs]| (outputs * inputs) as u64);
            updates.sum::<u64>() + saved
        }
    }
}

/// How micro-batches go through the model within a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MicroBatches {
    /// Tokens of one forward and backward pass.
    pub micro_batch_tokens: usize,
    /// Whether layers are run again in the backward pass.
    pub recompute: bool,
}

/// Returns how a run stays below `budget` bytes, or `None` if it cannot.
///
/// Layers are run again only if a pass over the longest episode, or over 256 tokens, would
/// not fit otherwise: that takes a third more arithmetic, small micro-batches next to nothing. The
/// choice depends on nothing but the arguments, so that a run that goes on makes it again.
#[must_use]
pub fn choose(model: &ModelConfig, request: &PlanRequest, budget: u64) -> Option<MicroBatches> {
    [false, true].into_iter().find_map(|recompute| {
        let request = PlanRequest {
            recompute,
            ..request.clone()
        };
        let tokens = largest_micro_batch(model, &request, budget)?;
        let wanted = WORTHWHILE_TOKENS.min(request.micro_batch_tokens);
        (recompute || tokens >= wanted).then_some(MicroBatches {
            micro_batch_tokens: tokens,
            recompute,
        })
    })
}

/// Returns the shapes of an adapter's pairs of matrices: `[rank, inputs]` and `[outputs, rank]`.
fn adapter_shapes(
    model: &ModelConfig,
    config: &LoraConfig,
) -> impl Iterator<Item = [[usize; 2]; 2]> {
    tensor_shapes(model)
        .into_iter()
        .filter_map(|(name, shape)| {
            let path = name.strip_suffix(".weight")?;
            let is_linear = LINEAR_MODULES.iter().any(|module| path.ends_with(module));
            match *shape.as_slice() {
                [outputs, inputs] if is_linear && config.adapts(path) => {
                    Some([[config.rank, inputs], [outputs, config.rank]])
                }
                _ => None,
            }
        })
}

/// Returns how many gradients are held at a time: one, or with several parts those that wait for their
/// other half in a tree, the one that is made, and its copy.
fn gradient_sums(request: &PlanRequest) -> u64 {
    match request.parts {
        0 | 1 => 1,
        parts => 2 + u64::from(parts.next_power_of_two().trailing_zeros()),
    }
}

/// Returns the bytes of a value head over hidden states of this width.
fn value_head(hidden: u64, number: u64) -> u64 {
    // Weights, their gradient and two moments in `f64`. Rows: as they come, in `f64` as a tensor and
    // as numbers; what goes on into the model in `f64` and as it is added, with where each goes.
    let rows = value::ROWS_AT_A_TIME as u64 * hidden;
    4 * 8 * (hidden + 1) + rows * (number + 8 + 8 + 8 + number + 4)
}

/// Widths of a model.
struct Sizes {
    hidden: u64,
    inner: u64,
    queries: u64,
    keys: u64,
    /// Numbers that a layer's backward pass reads, a token.
    kept: u64,
}

impl Sizes {
    /// Returns the widths; what products read is kept in half the room if it is rounded for them.
    fn new(model: &ModelConfig, is_rounded: bool) -> Self {
        let hidden = model.hidden_size as u64;
        let inner = model.intermediate_size as u64;
        let heads = model.num_attention_heads as u64;
        let queries = heads * model.head_dim as u64;
        let keys = (model.num_key_value_heads * model.head_dim) as u64;
        let unnormed = if model.has_qk_norm() {
            queries + keys
        } else {
            0
        };
        // Input and middle; queries, keys, values and the log-sum-exp; gate and up.
        let whole = 2 * hidden + queries + 2 * keys + unnormed + heads + 2 * inner;
        // Both normed; what attention made of the values; the product of gate and up.
        let read = 2 * hidden + queries + inner;
        Self {
            hidden,
            inner,
            queries,
            keys,
            kept: whole + read / if is_rounded { 2 } else { 1 },
        }
    }
}

#[cfg(test)]
mod tests;
