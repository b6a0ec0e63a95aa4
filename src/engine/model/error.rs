//! What can go wrong with a model, its files and its batches.

use std::io;
use std::path::{Path, PathBuf};

use super::AdapterId;

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
    /// A file is larger than any that we expect there.
    #[error("file too large: `{path}` has more than {limit} bytes")]
    FileTooLarge {
        /// The file.
        path: PathBuf,
        /// The largest accepted size.
        limit: u64,
    },
    /// A fault of what a file says.
    #[error("{error} (in `{path}`)")]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with its content.
        error: Box<Self>,
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
        source: safetensors::SafeTensorError,
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
    /// An index names a shard that is not there.
    #[error("`{path}` names shard `{shard}`, which is missing; is the download complete?")]
    MissingShard {
        /// The index file.
        path: PathBuf,
        /// The shard.
        shard: String,
    },
    /// An index and a shard of it do not hold the same tensors.
    #[error("`{path}` does not agree with `{shard}`: tensor `{name}` {problem}")]
    ShardMismatch {
        /// The index file.
        path: PathBuf,
        /// The shard.
        shard: String,
        /// The first tensor at fault.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
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
    /// A tensor is of a type that is not read.
    #[error("tensor `{name}` is of type {found}; supported: F16, BF16, F32, F64")]
    TensorType {
        /// Its name.
        name: String,
        /// Its type.
        found: String,
    },
    /// A weight is infinite or not a number.
    #[error(
        "tensor `{name}` is not finite at element {index}; the file is damaged or training diverged"
    )]
    NotFinite {
        /// Its name.
        name: String,
        /// The first such element.
        index: usize,
    },
    /// A configuration asks for more weights than memory holds.
    #[error("{parameters} weights do not fit into memory")]
    TooLarge {
        /// How many it asks for.
        parameters: usize,
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

    /// No such adapter; it may have been removed.
    #[error("unknown adapter {id}")]
    UnknownAdapter {
        /// Its number.
        id: AdapterId,
    },
    /// Another adapter has this name.
    #[error("there is an adapter `{name}` already; remove it first or choose another name")]
    AdapterNameTaken {
        /// The name.
        name: String,
    },
    /// An adapter is in use and cannot be removed.
    #[error("adapter `{name}` is in use; release its sequences first")]
    AdapterInUse {
        /// Its name.
        name: String,
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
    /// Returns this error with the name of the file that it is about.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        Self::InFile {
            path: path.to_owned(),
            error: Box::new(self),
        }
    }

    /// Returns whether the files or the settings are at fault, which the reader can mend.
    #[must_use]
    pub fn is_input(&self) -> bool {
        if let Self::InFile { error, .. } = self {
            return error.is_input();
        }
        !matches!(
            self,
            Self::Mismatch { .. }
                | Self::UnknownRow { .. }
                | Self::RepeatedRow { .. }
                | Self::UnknownAdapter { .. }
                | Self::AdapterInUse { .. }
                | Self::StaleTape { .. }
                | Self::Tensor(_)
        )
    }
}
