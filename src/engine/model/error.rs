//! What can go wrong with a model, its files and its batches.

use std::io;
use std::path::PathBuf;

/// A fault in a model's files, in its configuration or in a batch given to it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    // === Files ===
    /// A file could not be read or written.
    #[error("failed to access `{path}`")]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A JSON file does not parse or lacks a required field.
    #[error("failed to parse `{path}`")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// A tensor file does not parse.
    #[error("failed to read tensors from `{path}`; is the download complete?")]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: candle_core::Error,
    },
    /// A tensor file could not be written.
    #[error("failed to write tensors to `{path}`")]
    WriteSafetensors {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: safetensors::SafeTensorError,
    },
    /// A folder holds no weights that we can read.
    #[error(
        "no weights in `{path}`: expected `model.safetensors` or `model.safetensors.index.json`"
    )]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
    /// An index names a shard outside its own folder.
    #[error("`{path}` names shard `{shard}`, which is not a plain file name")]
    ShardName {
        /// The index file.
        path: PathBuf,
        /// The name found.
        shard: String,
    },

    // === Configuration ===
    /// A configuration asks for something that is not implemented.
    #[error("unsupported `{field}`: {found}; supported: {supported}")]
    Unsupported {
        /// The field of `config.json` or `adapter_config.json`.
        field: &'static str,
        /// Its value.
        found: String,
        /// What would be accepted.
        supported: &'static str,
    },
    /// A configuration contradicts itself or is out of bounds.
    #[error("invalid `{field}`: {reason}")]
    InvalidConfig {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },

    // === Weights ===
    /// A checkpoint lacks a tensor.
    #[error("missing tensor `{name}`")]
    MissingTensor {
        /// Its Hugging Face name.
        name: String,
    },
    /// A checkpoint holds a tensor that the architecture has no place for.
    #[error("unexpected tensor `{name}`: the configuration does not match the weights")]
    UnexpectedTensor {
        /// Its Hugging Face name.
        name: String,
    },
    /// A tensor has another shape than the configuration says.
    #[error("tensor `{name}` has shape {found:?}, expected {expected:?}")]
    TensorShape {
        /// Its Hugging Face name.
        name: String,
        /// From the configuration.
        expected: Vec<usize>,
        /// From the file.
        found: Vec<usize>,
    },

    // === Batches ===
    /// A token is not in the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The token.
        token: u32,
        /// The size of the embedding.
        vocab_size: usize,
    },
    /// A sequence is longer than the model's positions.
    #[error("sequence length limit exceeded: {length} > {limit}")]
    SequenceTooLong {
        /// Tokens in the sequence.
        length: usize,
        /// `max_position_embeddings`.
        limit: usize,
    },
    /// An argument does not fit the batch or the model.
    #[error("{what}: {found} != {expected}")]
    Mismatch {
        /// Which pair of numbers.
        what: &'static str,
        /// As given.
        found: usize,
        /// As needed.
        expected: usize,
    },
    /// A cache row was freed or never made.
    #[error("unknown cache row {row}")]
    UnknownRow {
        /// The row's number.
        row: usize,
    },
    /// A batch names one cache row twice.
    #[error("cache row {row} appears twice in one batch")]
    RepeatedRow {
        /// The row's number.
        row: usize,
    },
    /// The key-value cache is full.
    #[error("key-value cache limit exceeded: {needed} > {limit} tokens")]
    CacheFull {
        /// Tokens that the batch would bring it to, in whole blocks.
        needed: usize,
        /// Tokens that it may hold.
        limit: usize,
    },

    /// A backward pass came after the weights had changed.
    #[error("the tape was recorded at weights version {tape}, the weights are at {weights}")]
    StaleTape {
        /// The version at the forward pass.
        tape: u64,
        /// The version now.
        weights: u64,
    },

    // === Tensors ===
    /// The tensor library refused an operation.
    #[error("tensor operation failed")]
    Tensor(#[from] candle_core::Error),
}

impl ModelError {
    /// Returns whether the files or the settings are at fault, which the reader can mend.
    #[must_use]
    pub fn is_input(&self) -> bool {
        !matches!(
            self,
            Self::Mismatch { .. }
                | Self::UnknownRow { .. }
                | Self::RepeatedRow { .. }
                | Self::StaleTape { .. }
                | Self::Tensor(_)
        )
    }
}
