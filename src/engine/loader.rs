//! From a name to a model: a local folder, a `.gguf` file or a hub repository.

use std::path::Path;

use candle_core::{DType, Device};
use serde_json::Value;

use super::EngineError;
use super::gguf;
use super::model::{ModelConfig, ModelError, Weights, load_weights, random_weights};
use super::tokenizer::{Tokenizer, read_bounded, read_json};
use crate::hub::{Hub, HubRepo};

/// Largest accepted chat template file.
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;

/// Everything that a checkpoint holds.
#[derive(Debug)]
pub struct LoadedModel {
    /// The model's shape.
    pub config: ModelConfig,
    /// The weights by their Hugging Face names.
    pub weights: Weights,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Source of the chat template, if there is one.
    pub chat_template: Option<String>,
    /// Tokens that end a turn, in ascending order.
    pub stop_token_ids: Vec<u32>,
}

impl LoadedModel {
    /// Loads `source`: the path of a Hugging Face folder or of a `.gguf` file, or a hub repository
    /// (`owner/name`, `owner/name@revision`). What exists as a path is a path.
    ///
    /// Floating-point weights are converted to `dtype`, except that GGUF weights are `f32`.
    ///
    /// # Errors
    ///
    /// Fails if something is missing, damaged or not supported: the message names the file or the
    /// field.
    pub fn open(source: &str, dtype: DType, device: &Device) -> Result<Self, EngineError> {
        let path = Path::new(source);
        if path.is_dir() {
            return Self::from_folder(path, dtype, device);
        }
        if path.is_file() {
            return gguf::load(path, device);
        }
        let Ok(repository) = source.parse::<HubRepo>() else {
            return Err(EngineError::NoModel {
                source_name: source.to_owned(),
            });
        };
        if source.ends_with(".gguf") {
            return Err(EngineError::NoModel {
                source_name: source.to_owned(),
            });
        }
        Self::from_folder(&Hub::from_env().model_folder(&repository)?, dtype, device)
    }

    /// Loads a Hugging Face folder: `config.json`, `tokenizer.json` and safetensors weights.
    ///
    /// # Errors
    ///
    /// As [`LoadedModel::open`].
    pub fn from_folder(folder: &Path, dtype: DType, device: &Device) -> Result<Self, EngineError> {
        Self::with_weights(folder, |config| load_weights(folder, config, dtype, device))
    }

    /// Loads a Hugging Face folder with fresh random weights in place of its own, which it need
    /// not have.
    ///
    /// # Errors
    ///
    /// As [`LoadedModel::open`].
    pub fn untrained(
        folder: &Path,
        seed: u64,
        dtype: DType,
        device: &Device,
    ) -> Result<Self, EngineError> {
        Self::with_weights(folder, |config| random_weights(config, seed, dtype, device))
    }

    fn with_weights(
        folder: &Path,
        weights: impl FnOnce(&ModelConfig) -> Result<Weights, ModelError>,
    ) -> Result<Self, EngineError> {
        let config = ModelConfig::from_file(&folder.join("config.json"))?;
        let tokenizer = Tokenizer::from_folder(folder)?;
        check_vocabulary(folder, &tokenizer, &config)?;
        let generation = read_json(&folder.join("generation_config.json"))?;
        let mut stop_token_ids = config.eos_token_id.clone();
        // Instruct models stop at what generation_config.json says; their config.json may name the
        // base model's token only.
        match generation
            .as_ref()
            .and_then(|generation| generation.get("eos_token_id"))
        {
            Some(Value::Array(ids)) => stop_token_ids.extend(ids.iter().filter_map(token_id)),
            Some(id) => stop_token_ids.extend(token_id(id)),
            None => {}
        }
        let end_of_turn = [tokenizer.eos_token(), Some("<|im_end|>")];
        let known = |token: &str| tokenizer.token_to_id(token);
        stop_token_ids.extend(end_of_turn.into_iter().flatten().filter_map(known));
        stop_token_ids.sort_unstable();
        stop_token_ids.dedup();
        let weights = weights(&config)?;
        let chat_template = chat_template(folder)?;
        Ok(Self {
            config,
            weights,
            tokenizer,
            chat_template,
            stop_token_ids,
        })
    }
}

/// Fails if the tokenizer has an id that the model has no embedding for.
pub(super) fn check_vocabulary(
    path: &Path,
    tokenizer: &Tokenizer,
    config: &ModelConfig,
) -> Result<(), EngineError> {
    match tokenizer.largest_id() {
        Some(id) if id as usize >= config.vocab_size => Err(EngineError::VocabularyMismatch {
            path: path.to_owned(),
            tokenizer: id,
            model: config.vocab_size,
        }),
        _ => Ok(()),
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Returns the folder's template: `chat_template.jinja`, else the one in `tokenizer_config.json`,
/// which may be a list of named templates.
fn chat_template(folder: &Path) -> Result<Option<String>, EngineError> {
    let path = folder.join("chat_template.jinja");
    if path.exists() {
        let bytes = read_bounded(&path, MAX_TEMPLATE_BYTES)?;
        return match String::from_utf8(bytes) {
            Ok(text) => Ok(Some(text)),
            Err(error) => {
                let source = std::io::Error::new(std::io::ErrorKind::InvalidData, error);
                Err(EngineError::Io { path, source })
            }
        };
    }
    let config = read_json(&folder.join("tokenizer_config.json"))?;
    let template = config
        .as_ref()
        .and_then(|config| config.get("chat_template"));
    Ok(match template {
        Some(Value::String(template)) => Some(template.clone()),
        Some(Value::Array(named)) => named
            .iter()
            .find(|entry| entry.get("name").is_some_and(|name| name == "default"))
            .and_then(|entry| Some(entry.get("template")?.as_str()?.to_owned())),
        _ => None,
    })
}
