//! What can go wrong around the model: files, tokenizers, requests.

use std::io;
use std::path::PathBuf;

use super::SequenceId;
use super::model::ModelError;
use crate::hub::HubError;

/// A fault of the engine or of what it was given; how a generation ends is a
/// [`FinishReason`](super::FinishReason) and no error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
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
    #[error("file too large: `{path}` has {bytes} > {limit} bytes")]
    FileTooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The largest accepted size.
        limit: u64,
    },
    /// A JSON file does not parse.
    #[error("failed to parse `{path}`; is the download complete?")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// A name is neither a path that exists nor a repository's.
    #[error(
        "no model at `{source_name}`; expected a folder with `config.json`, a `.gguf` file or a \
         hub repository `owner/name`"
    )]
    NoModel {
        /// What was given.
        source_name: String,
    },
    /// The hub did not give the model.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// A GGUF file lacks something or contradicts itself.
    #[error("malformed GGUF file `{path}`: `{key}` is {problem}")]
    GgufMalformed {
        /// The file.
        path: PathBuf,
        /// The metadata key or the tensor.
        key: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A GGUF file holds a model or a tokenizer that is not implemented.
    #[error("unsupported `{key}` in `{path}`: {found}; supported: {supported}")]
    GgufUnsupported {
        /// The file.
        path: PathBuf,
        /// The metadata key.
        key: String,
        /// Its value.
        found: String,
        /// What would be accepted.
        supported: &'static str,
    },
    /// A tensor of a GGUF file has another shape than its metadata says.
    #[error("tensor `{name}` of `{path}` has shape {found:?}, expected {expected:?}")]
    GgufShape {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        name: String,
        /// From the metadata.
        expected: Vec<usize>,
        /// From the table of tensors.
        found: Vec<usize>,
    },
    /// A tensor of a GGUF file cannot be read.
    #[error("failed to read tensor `{name}` from `{path}`; is the download complete?")]
    GgufTensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        name: String,
        /// Why.
        #[source]
        source: Box<candle_core::Error>,
    },
    /// The model has fewer embeddings than the tokenizer has tokens.
    #[error(
        "tokenizer does not fit the model in `{path}`: it has ids up to {tokenizer}, the model's \
         embedding has {model} rows"
    )]
    VocabularyMismatch {
        /// The folder or the file.
        path: PathBuf,
        /// The largest id.
        tokenizer: u32,
        /// Rows of the embedding.
        model: usize,
    },
    /// The model refused its files, its configuration or a batch.
    #[error(transparent)]
    Model(Box<ModelError>),

    // === Tokenizer ===
    /// A tokenizer file does not describe a tokenizer.
    #[error("failed to load the tokenizer `{path}`; is the download complete?")]
    TokenizerFile {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: tokenizers::Error,
    },
    /// The tokenizer failed on a text or on ids.
    #[error("tokenizer failed to {action}")]
    Tokenizer {
        /// What it was to do.
        action: &'static str,
        /// Why.
        #[source]
        source: tokenizers::Error,
    },

    // === Sampling ===
    /// A sampling parameter is out of its range.
    #[error("invalid `{field}`: {reason}")]
    InvalidSampling {
        /// The parameter.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A grammar that answers should keep to cannot be used.
    #[error("cannot guide an answer by this schema: {reason}")]
    InvalidGrammar {
        /// What is wrong with it.
        reason: String,
    },
    /// The model's tokens are such that no answer of its can be guided.
    #[error("cannot guide answers of this model: {reason}")]
    Unguidable {
        /// What is wrong with them.
        reason: String,
    },
    /// A sampling parameter makes a distribution that a trainer cannot recompute.
    #[error(
        "`{field}` cannot be used in training: tokens would be drawn from another distribution \
         than the one whose gradient is taken"
    )]
    NotTrainable {
        /// The parameter.
        field: &'static str,
    },
    /// Stop strings were asked of an engine that cannot read text.
    #[error("`stop` needs a tokenizer; give the engine one with `Engine::set_tokenizer`")]
    NoTokenizer,
    /// The model's logits are not numbers: the weights are damaged or training diverged.
    #[error("logits of sequence {id} are not finite; the weights have diverged or are damaged")]
    NonFiniteLogits {
        /// The sequence.
        id: SequenceId,
    },

    /// A step failed while it also served this request.
    #[error("the engine failed: {message}")]
    Step {
        /// What it said.
        message: String,
    },

    // === Requests ===
    /// A prompt holds no token, so there is nothing to continue.
    #[error("prompt is empty")]
    EmptyPrompt,
    /// A prompt leaves no room for an answer.
    #[error(
        "prompt too long: {tokens} tokens leave no room to generate within {limit} (the smaller of \
         the model's context, `max_context` and `max_cache_tokens`)"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Most tokens of a sequence.
        limit: usize,
    },
    /// A token is not in the model's vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The token.
        token: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// A limit of the engine is too small to run anything.
    #[error("invalid `{field}`: {value} < {minimum}")]
    InvalidLimit {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: usize,
        /// The least that works.
        minimum: usize,
    },
    /// No such sequence; it may have been released.
    #[error("unknown sequence {id}")]
    UnknownSequence {
        /// The sequence.
        id: SequenceId,
    },
    /// A sequence is still generating.
    #[error("sequence {id} is still generating; continue it when its turn has finished")]
    StillGenerating {
        /// The sequence.
        id: SequenceId,
    },
}

impl EngineError {
    /// Returns whether the files or the settings are at fault, which the reader can mend.
    #[must_use]
    pub fn is_input(&self) -> bool {
        match self {
            Self::Model(error) => error.is_input(),
            Self::Tokenizer { .. }
            | Self::NonFiniteLogits { .. }
            | Self::Step { .. }
            | Self::UnknownSequence { .. }
            | Self::StillGenerating { .. } => false,
            _ => true,
        }
    }
}

impl From<ModelError> for EngineError {
    fn from(error: ModelError) -> Self {
        Self::Model(Box::new(error))
    }
}
