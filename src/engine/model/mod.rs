//! The decoder: Qwen3, Qwen2 and Llama, full fine-tuning and adapters, one copy of the weights.
//!
//! [`Decoder`] serves the sampler and the trainer alike. Both call the same kernels on the same
//! storage, so an optimizer step is visible to the next sampled token, and a token has the same
//! log-probability, bit for bit, when it is sampled and when it is scored: rows never influence each
//! other's rounding (see [`ops`]).
//!
//! * Inference: [`Decoder::hidden_cached`] then [`Decoder::logits`] of the tokens that matter.
//! * Training: [`Decoder::forward`] gives hidden states and a [`Tape`]; the loss gives their gradient;
//!   [`Decoder::backward`] adds the variables' gradients to [`Gradients`].
//! * Scoring without gradients, with or without adapters: [`Decoder::hidden`].
//!
//! On the CPU the passes run on kernels of our own (`fused`). Elsewhere those of training run on plain
//! tensor operations (`composed`), differentiated by candle a layer at a time, and the one that generates
//! on kernels in CUDA C (`paged`, `cuda`). Sequences are packed end to end, so there
//! is no padding to mask and none to pay for.

mod adapters;
mod composed;
mod config;
pub(crate) mod cuda;
mod decoder;
mod dropout;
mod error;
mod files;
mod fused;
mod gradients;
mod linear;
mod lora;
pub mod ops;
mod packed;
mod paged;
mod rope_scaling;
mod safetensors_file;
mod weights;

#[cfg(test)]
pub(crate) mod tests_support;

#[cfg(test)]
mod tests;

pub use adapters::{AdapterId, AdapterLease};
pub(crate) use composed::MAX_SCORES;
#[cfg(any(fuzzing, test))]
pub use config::fuzz_config;
pub use config::{ModelConfig, ModelType};
pub use decoder::{Adapters, Decoder, Tape, Trainable};
pub use error::ModelError;
pub(crate) use gradients::GradientReal;
pub use gradients::{FlatGradient, Gradients};
pub(crate) use linear::{Parameter, is_redundant};
pub use lora::{LINEAR_MODULES, LoraAdapter, LoraConfig, named_targets};
pub use ops::WeightFormat;
pub use packed::PackedBatch;
pub use rope_scaling::RopeScaling;
#[cfg(any(fuzzing, test))]
pub use safetensors_file::fuzz_safetensors;
pub(crate) use safetensors_file::{read_safetensors, write_safetensors};
pub(crate) use weights::tensor_shapes;
pub use weights::{Weights, load_weights, random_weights};
