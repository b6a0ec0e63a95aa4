//! The policy of a run: a model and the words it speaks.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device};
use fs_err as fs;

use super::RunError;
use crate::chat::{ChatTemplate, ToolCallFormat};
use crate::config::{self, RunConfig};
use crate::engine::model::{
    Decoder, LoraAdapter, LoraConfig, ModelError, Trainable, WeightFormat, named_targets,
};
use crate::engine::{LoadedModel, Tokenizer};
use crate::openai::ServedModel;
use crate::trainer::Place;

/// A model, its tokenizer and its chat template.
#[derive(Debug)]
pub struct Policy {
    /// The model, whose weights the engine and the trainer share.
    pub decoder: Arc<Decoder>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template.
    pub template: ChatTemplate,
    /// Tokens that end a turn.
    pub stop_token_ids: Vec<u32>,
    /// Where the model came from.
    pub source: String,
    template_source: String,
}

impl Policy {
    /// Loads the model that `config` names, with the weights that `config` trains.
    ///
    /// # Errors
    ///
    /// Fails where the model or the adapter is missing, damaged or not supported.
    pub fn load(config: &RunConfig, trainable: &Trainable) -> Result<Self, RunError> {
        Self::load_on(config, trainable, 0)
    }

    /// Does what [`Policy::load`] does, on GPU number `gpu` where that is on a GPU.
    ///
    /// # Errors
    ///
    /// As for [`Policy::load`].
    pub fn load_on(
        config: &RunConfig,
        trainable: &Trainable,
        gpu: usize,
    ) -> Result<Self, RunError> {
        let device = device(config.model.device, gpu)?;
        let place = if device.is_cpu() {
            Place::Cpu
        } else {
            Place::Gpu
        };
        let held = held_in(&config.model, place);
        let source = match &config.model.revision {
            Some(revision) => format!("{}@{revision}", config.model.path),
            None => config.model.path.clone(),
        };
        let loaded = LoadedModel::open(&source, held.read_as, &device)?;
        let adapter = config
            .model
            .adapter
            .as_ref()
            .map(|path| LoraAdapter::load(path.as_ref(), DType::F32, &device))
            .transpose()?;
        let trainable = match (&adapter, trainable) {
            // An adapter to measure, or to go on from, brings its own shape.
            (Some(adapter), Trainable::Frozen) => Trainable::Lora(LoraConfig {
                dropout: 0.0,
                ..adapter.config.clone()
            }),
            // What is dropped is no part of the shape.
            (Some(adapter), Trainable::Lora(own)) => Trainable::Lora(LoraConfig {
                dropout: own.dropout,
                ..adapter.config.clone()
            }),
            (_, trainable) => trainable.clone(),
        };
        let decoder = Decoder::with_format(
            loaded.config,
            loaded.weights,
            &device,
            &trainable,
            config.seed,
            held.format,
        )?;
        if let Some(adapter) = &adapter {
            decoder.load_adapter(adapter)?;
        }
        Self::new(
            decoder,
            loaded.tokenizer,
            loaded.chat_template,
            loaded.stop_token_ids,
            source,
        )
    }

    /// Makes a model with fresh weights from a folder that has its configuration and tokenizer.
    ///
    /// # Errors
    ///
    /// Fails where a file is missing or damaged.
    pub fn from_scratch(folder: &Path, seed: u64) -> Result<Self, RunError> {
        let device = Device::Cpu;
        let loaded = LoadedModel::untrained(folder, seed, DType::F32, &device)?;
        let decoder = Decoder::new(
            loaded.config,
            loaded.weights,
            &device,
            &Trainable::Full,
            seed,
        )?;
        let source = folder.display().to_string();
        Self::new(
            decoder,
            loaded.tokenizer,
            loaded.chat_template,
            loaded.stop_token_ids,
            source,
        )
    }

    fn new(
        decoder: Decoder,
        tokenizer: Tokenizer,
        template: Option<String>,
        stop_token_ids: Vec<u32>,
        source: String,
    ) -> Result<Self, RunError> {
        let template_source = template.ok_or_else(|| RunError::NoChatTemplate {
            path: source.clone(),
        })?;
        let template = ChatTemplate::new(&template_source)?
            .with_special_tokens(tokenizer.special_tokens().clone())
            .with_control_tokens(tokenizer.control_tokens(), tokenizer.markup_tokens());
        let decoder = Arc::new(decoder);
        Ok(Self {
            decoder,
            tokenizer,
            template,
            stop_token_ids,
            source,
            template_source,
        })
    }

    /// Returns whether the chat template describes tools to the model.
    #[must_use]
    pub fn knows_tools(&self) -> bool {
        self.template_source.contains("tools")
    }

    /// Returns what is told of it where it is served under `name`.
    #[must_use]
    pub fn served(&self, name: &str, tool_call_format: Option<ToolCallFormat>) -> ServedModel {
        ServedModel {
            name: name.to_owned(),
            tokenizer: self.tokenizer.clone(),
            template: self.template.clone(),
            stop_token_ids: self.stop_token_ids.clone(),
            tool_call_format: tool_call_format
                .unwrap_or_else(|| ToolCallFormat::detect(self.template.source())),
        }
    }

    /// Writes the tokenizer and the chat template into a folder that has the weights.
    pub(super) fn save_words(&self, folder: &Path) -> Result<(), RunError> {
        Ok(self.tokenizer.save(folder, Some(&self.template_source))?)
    }

    /// Writes what was trained: the PEFT adapter, or the whole model. The folder appears whole or
    /// not at all; it must not hold anything yet.
    ///
    /// # Errors
    ///
    /// Fails where the folder cannot be written.
    pub fn save(&self, folder: &Path) -> Result<(), RunError> {
        self.write(folder, |partial| {
            match self.decoder.adapter(Some(&self.source)) {
                Some(adapter) => adapter.save(partial),
                None => self.decoder.save(partial),
            }
        })
    }

    /// Writes the whole model with weights in `dtype`, an adapter merged, for transformers, vLLM and
    /// whatever else loads a Hugging Face folder. The folder appears whole or not at all; it must not
    /// hold anything yet.
    ///
    /// # Errors
    ///
    /// Fails where the folder cannot be written.
    pub fn export(&self, folder: &Path, dtype: DType) -> Result<(), RunError> {
        self.write(folder, |partial| self.decoder.save_as(partial, dtype))
    }

    /// Makes a folder of what `write_weights` writes, the tokenizer and the chat template.
    fn write(
        &self,
        folder: &Path,
        write_weights: impl FnOnce(&Path) -> Result<(), ModelError>,
    ) -> Result<(), RunError> {
        let parent = folder.parent().filter(|parent| *parent != Path::new(""));
        let parent = parent.unwrap_or_else(|| Path::new("."));
        fs::create_dir_all(parent)?;
        let partial = tempfile::Builder::new()
            .prefix(".partial-")
            .permissions(Permissions::from_mode(0o777)) // less the umask
            .tempdir_in(parent)?;
        write_weights(partial.path())?;
        self.save_words(partial.path())?;
        // A folder that is there is replaced only if it is empty.
        fs::rename(partial.path(), folder)?;
        drop(partial.keep());
        Ok(())
    }
}

/// Returns which weights a run trains.
#[must_use]
pub fn trainable(config: &RunConfig) -> Trainable {
    match config.trainer.mode {
        config::TrainMode::Full => Trainable::Full,
        config::TrainMode::Lora => Trainable::Lora(LoraConfig {
            rank: config.trainer.lora_rank,
            alpha: config.trainer.lora_alpha,
            use_rslora: config.trainer.use_rslora,
            target_modules: named_targets(&config.trainer.lora_targets),
            dropout: config.trainer.lora_dropout,
            modules_to_save: config.trainer.modules_to_save.clone(),
            ensure_weight_tying: config.trainer.ensure_weight_tying,
        }),
    }
}

fn device(device: config::Device, gpu: usize) -> Result<Device, RunError> {
    match device {
        config::Device::Cpu => Ok(Device::Cpu),
        config::Device::Auto if cfg!(feature = "cuda") => Ok(cuda(gpu).unwrap_or_else(|error| {
            tracing::warn!(%error, "there is no GPU that can be used; the model runs on the CPU");
            Device::Cpu
        })),
        config::Device::Auto => Ok(Device::Cpu),
        config::Device::Cuda => cuda(gpu).map_err(|error| RunError::Device {
            device: "cuda",
            remedy: format!("build with `--features cuda` on a machine with a GPU ({error})"),
        }),
    }
}

/// Opens GPU number `gpu` with a stream of its own: the default one is another in each thread, and a
/// server's engine has a thread of its own.
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "events that order streams are switched off")]
fn cuda(gpu: usize) -> candle_core::Result<Device> {
    let device = Device::new_cuda_with_stream(gpu)?;
    if let Device::Cuda(cuda) = &device {
        // SAFETY: all that runs on this device, our kernels and candle's, runs on its one stream, in the
        // order in which it was launched, so that no event need order it. Each would cost calls of the driver.
        unsafe { cuda.disable_event_tracking() };
    }
    Ok(device)
}

#[cfg(not(feature = "cuda"))]
fn cuda(gpu: usize) -> candle_core::Result<Device> {
    Device::new_cuda_with_stream(gpu)
}

/// How a run holds a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Held {
    /// What weights are read as.
    read_as: DType,
    /// What hidden states, and keys and values, are held and computed in. Adapters are in `f32`.
    pub(super) computed_in: DType,
    /// How the CPU keeps the matrices that no training changes.
    pub(super) format: WeightFormat,
}

/// Returns how a run holds its model in a place.
pub(super) fn held_in(model: &config::ModelConfig, place: Place) -> Held {
    use config::Dtype;
    let is_bf16 = model.compute_dtype == config::ComputeDtype::Bf16;
    let (read_as, format) = match (model.dtype, place) {
        (_, Place::Cpu) if is_bf16 => (DType::BF16, WeightFormat::Bf16Products),
        (Dtype::Auto | Dtype::Bf16, Place::Gpu) => (DType::BF16, WeightFormat::Wide),
        (Dtype::F32, _) | (Dtype::Auto, Place::Cpu) => (DType::F32, WeightFormat::Wide),
        (Dtype::Bf16, Place::Cpu) => (DType::BF16, WeightFormat::Bf16),
        (Dtype::Int8, _) => (DType::F32, WeightFormat::Int8),
    };
    Held {
        read_as,
        computed_in: match place {
            Place::Cpu => DType::F32,
            Place::Gpu => read_as,
        },
        format,
    }
}
