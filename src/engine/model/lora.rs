//! Low-rank adapters (Hu et al. 2021) and their file format, that of PEFT.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fs_err as fs;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::ModelError;
use super::files::{MAX_CONFIG_BYTES, io_error, read_json};
use super::safetensors_file::{TensorFile, write_safetensors};

/// The linear layers of a decoder layer, in the order of their use.
pub const LINEAR_MODULES: [&str; 7] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
];

/// PEFT's name for all of them.
const ALL_LINEAR: &str = "all-linear";

/// The modules that can be trained in full beside an adapter, by their paths.
const SAVED_MODULES: [&str; 2] = [HEAD, EMBEDDING];
const HEAD: &str = "lm_head";
const EMBEDDING: &str = "model.embed_tokens";

/// What the tensors of these modules are called.
pub(super) const HEAD_WEIGHT: &str = "lm_head.weight";
pub(super) const EMBEDDING_WEIGHT: &str = "model.embed_tokens.weight";

const ADAPTER_CONFIG: &str = "adapter_config.json";
const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
const PREFIX: &str = "base_model.model.";

/// How the names of the first factors end.
const LORA_A: &str = ".lora_A.weight";

/// Which layers get an adapter, and how large.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoraConfig {
    /// Rank of the update; 16 by default.
    pub rank: usize,
    /// The update is scaled by `alpha / rank`; 32 by default.
    pub alpha: f64,
    /// Whether it is scaled by `alpha / sqrt(rank)` instead (Kalajdzievski 2023); false by default.
    pub use_rslora: bool,
    /// Names of the linear layers, alone or with a path before them; all seven by default.
    pub target_modules: Vec<String>,
    /// The probability with which each input of an update is dropped while it is trained; 0 by default.
    pub dropout: f64,
    /// Modules that are trained in full beside the low-rank updates, and saved with them: `lm_head`,
    /// `embed_tokens`; none by default.
    pub modules_to_save: Vec<String>,
    /// Whether the head stays the embedding where it is the embedding and either is among them; false by
    /// default, as in PEFT: they part ways.
    pub ensure_weight_tying: bool,
}

/// What an adapter trains in full, of a model whose head may be its embedding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SavedModules {
    /// A copy of the embedding.
    pub(crate) embedding: bool,
    /// A copy of the head, of its own or that of the embedding.
    pub(crate) head: bool,
    /// Whether the two copies are one.
    pub(crate) is_tied: bool,
}

impl SavedModules {
    /// Returns how many matrices are trained.
    pub(crate) fn count(self) -> usize {
        usize::from(self.embedding) + usize::from(self.head && !self.is_tied)
    }
}

impl fmt::Display for SavedModules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.embedding, self.head, self.is_tied) {
            (false, false, _) => "none",
            (true, false, _) => "`embed_tokens`",
            (false, true, _) => "`lm_head`",
            (true, true, false) => "`lm_head` and `embed_tokens`",
            (true, true, true) => "`lm_head` and `embed_tokens` as one",
        })
    }
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            rank: 16,
            alpha: 32.0,
            use_rslora: false,
            target_modules: named_targets(&[ALL_LINEAR]),
            dropout: 0.0,
            modules_to_save: Vec::new(),
            ensure_weight_tying: false,
        }
    }
}

/// Returns whether a module of this name, alone or with a path before it, can be trained in full beside
/// an adapter.
fn is_saved_module(name: &str) -> bool {
    SAVED_MODULES.iter().any(|path| is_end(path, name))
}

/// Returns the linear layers that these names stand for: themselves, or all where PEFT's `all-linear` is
/// among them.
pub fn named_targets<S: AsRef<str>>(names: &[S]) -> Vec<String> {
    let mut all = names.iter().map(AsRef::as_ref);
    if all.any(|name| name.eq_ignore_ascii_case(ALL_LINEAR)) {
        return LINEAR_MODULES.map(str::to_owned).to_vec();
    }
    names.iter().map(|name| name.as_ref().to_owned()).collect()
}

impl LoraConfig {
    /// Returns the factor of the low-rank product.
    pub fn scale(&self) -> f64 {
        self.scale_of(self.alpha, self.rank)
    }

    fn scale_of(&self, alpha: f64, rank: usize) -> f64 {
        let rank = rank as f64;
        alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }

    /// Checks that the rank is positive and that every target is a layer we know.
    ///
    /// # Errors
    ///
    /// Fails with the name of the field at fault.
    pub fn validate(&self) -> Result<(), ModelError> {
        let invalid = |field, reason: String| Err(ModelError::InvalidConfig { field, reason });
        if self.rank == 0 || self.rank > 4096 {
            return invalid("rank", format!("{} is not in 1..=4096", self.rank));
        }
        if !(self.alpha > 0.0 && self.alpha.is_finite()) {
            return invalid("alpha", format!("{} is not positive", self.alpha));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            let reason = format!("{} is not from 0 to below 1", self.dropout);
            return invalid("lora_dropout", reason);
        }
        if self.target_modules.is_empty() {
            return invalid(
                "target_modules",
                "empty: nothing would be trained".to_owned(),
            );
        }
        for name in &self.target_modules {
            let module = name.rsplit('.').next().unwrap_or_default();
            if !LINEAR_MODULES.contains(&module) {
                let known = LINEAR_MODULES.join("`, `");
                return invalid("target_modules", format!("`{name}` is none of `{known}`"));
            }
        }
        let mut saved = self.modules_to_save.iter();
        if let Some(name) = saved.find(|name| !is_saved_module(name)) {
            return Err(ModelError::Unsupported {
                field: "modules_to_save",
                found: format!("`{name}`"),
                supported: "`lm_head` and `embed_tokens`; to change other modules, train all weights",
            });
        }
        Ok(())
    }

    /// Returns what is trained in full of a model whose head is its embedding, or is not.
    pub(crate) fn saved_modules(&self, is_tied: bool) -> SavedModules {
        let saves = |path| self.modules_to_save.iter().any(|name| is_end(path, name));
        let (embedding, head) = (saves(EMBEDDING), saves(HEAD));
        let is_tied = is_tied && self.ensure_weight_tying && (embedding || head);
        SavedModules {
            embedding: embedding || is_tied,
            head: head || is_tied,
            is_tied,
        }
    }

    /// Returns whether the linear layer at `path` (`model.layers.0.self_attn.q_proj`) is adapted: a
    /// target names the whole path or, as PEFT has it, ends it.
    pub(crate) fn adapts(&self, path: &str) -> bool {
        self.target_modules
            .iter()
            .any(|target| is_end(path, target))
    }
}

/// An adapter read from a folder that PEFT or we wrote.
#[derive(Debug, Clone)]
pub struct LoraAdapter {
    /// Rank, scale and targets. Where the file gives the targets by a pattern, they are those that
    /// have tensors.
    pub config: LoraConfig,
    /// Alphas of layers that have another one than the rest, by the end of their path.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Ranks of layers that have another one than the rest, by a pattern of PEFT's. Their tensors say
    /// them as well.
    pub rank_pattern: BTreeMap<String, usize>,
    /// `base_model_name_or_path`, if the file says.
    pub base_model: Option<String>,
    /// Tensors by our names: `model.layers.0.self_attn.q_proj.lora_A.weight`, and those of modules that
    /// are saved in full, `lm_head.weight`.
    pub tensors: HashMap<String, Tensor>,
}

/// `adapter_config.json`, as far as it changes the arithmetic.
#[derive(Deserialize)]
struct RawAdapterConfig {
    peft_type: String,
    r: usize,
    lora_alpha: f64,
    target_modules: OneOrMany,
    base_model_name_or_path: Option<String>,
    bias: Option<String>,
    #[serde(default)]
    use_rslora: bool,
    lora_dropout: Option<f64>,
    modules_to_save: Option<Vec<String>>,
    #[serde(default)]
    ensure_weight_tying: bool,
    rank_pattern: Option<BTreeMap<String, usize>>,
    alpha_pattern: Option<BTreeMap<String, f64>>,
    #[serde(flatten)]
    rest: HashMap<String, Value>,
}

/// Fields of variants that are not implemented: each must be absent, null, false or empty.
const VARIANTS: [&str; 15] = [
    "alora_invocation_tokens",
    "arrow_config",
    "exclude_modules",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
];

/// Ways to start an adapter that leave the base as it is; others subtract the start from it.
const STARTS: [&str; 3] = ["eva", "gaussian", "orthogonal"];

fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(true) | Value::Number(_) | Value::String(_) => false,
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl LoraAdapter {
    /// Returns the base model that the adapter in `folder` names, or `None` where `folder` is not
    /// an adapter's or its file does not say.
    ///
    /// # Errors
    ///
    /// Fails if `adapter_config.json` is there and damaged.
    pub fn base_model_of(folder: &Path) -> Result<Option<String>, ModelError> {
        let path = folder.join(ADAPTER_CONFIG);
        if !path.is_file() {
            return Ok(None);
        }
        let raw: RawAdapterConfig = read_json(&path, MAX_CONFIG_BYTES)?;
        Ok(raw.base_model_name_or_path)
    }

    /// Reads `adapter_config.json` and `adapter_model.safetensors` from a folder.
    ///
    /// # Errors
    ///
    /// Fails if a file is missing or damaged, or if the adapter uses a variant that is not
    /// implemented: the message names the field.
    pub fn load(folder: &Path, dtype: DType, device: &Device) -> Result<Self, ModelError> {
        let path = folder.join(ADAPTER_CONFIG);
        let raw: RawAdapterConfig = read_json(&path, MAX_CONFIG_BYTES)?;
        let weights = folder.join(ADAPTER_WEIGHTS);
        let mut file = TensorFile::open(&weights)?;
        let names: Vec<String> = file.shapes().map(|(name, _)| name.to_owned()).collect();
        let paths: Vec<&str> = (names.iter())
            .filter_map(|name| name.strip_prefix(PREFIX)?.strip_suffix(LORA_A))
            .collect();
        let mut adapter = (raw.resolve(&paths)).map_err(|error| error.in_file(&path))?;
        for name in &names {
            let Some(own_name) = name.strip_prefix(PREFIX) else {
                let name = name.clone();
                return Err(ModelError::UnexpectedTensor { name }.in_file(&weights));
            };
            let tensor = file.read(name, dtype, device)?;
            adapter.tensors.insert(own_name.to_owned(), tensor);
        }
        let checked = adapter.check_ranks();
        checked.map_err(|error| error.in_file(&weights))?;
        Ok(adapter)
    }

    /// Returns the factor of the update of the linear layer at `path`, whose rank is `rank`.
    pub(super) fn scale(&self, path: &str, rank: usize) -> f64 {
        let own = self.alpha_pattern.iter().find(|(end, _)| is_end(path, end));
        let alpha = own.map_or(self.config.alpha, |(_, alpha)| *alpha);
        self.config.scale_of(alpha, rank)
    }

    /// Fails if layers have ranks or alphas of their own, which training does not know.
    pub(super) fn check_uniform(&self) -> Result<(), ModelError> {
        let field = match (self.rank_pattern.is_empty(), self.alpha_pattern.is_empty()) {
            (false, _) => "rank_pattern",
            (_, false) => "alpha_pattern",
            _ => return Ok(()),
        };
        Err(ModelError::Unsupported {
            field,
            found: "ranks or alphas of single layers".to_owned(),
            supported: "the same for all layers of an adapter that is trained",
        })
    }

    /// Fails if a tensor has another rank than the configuration says.
    fn check_ranks(&self) -> Result<(), ModelError> {
        if !self.rank_pattern.is_empty() {
            return Ok(());
        }
        let updates = (self.tensors.iter()).filter(|(name, _)| name.contains(".lora_"));
        for (name, tensor) in updates {
            let rank = match (name.ends_with(LORA_A), tensor.dims()) {
                (true, [rank, _]) | (false, [_, rank]) => *rank,
                _ => 0,
            };
            if rank != self.config.rank {
                return Err(ModelError::InvalidConfig {
                    field: "r",
                    reason: format!("{}, tensor `{name}` has rank {rank}", self.config.rank),
                });
            }
        }
        Ok(())
    }

    /// Writes the adapter as PEFT does, so that `PeftModel.from_pretrained` loads the folder.
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be written.
    pub fn save(&self, folder: &Path) -> Result<(), ModelError> {
        fs::create_dir_all(folder).map_err(|source| io_error(folder, source))?;
        let saved = &self.config.modules_to_save;
        let config = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "auto_mapping": null,
            "base_model_name_or_path": self.base_model,
            "revision": null,
            "inference_mode": true,
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "lora_dropout": self.config.dropout,
            "target_modules": self.config.target_modules,
            "bias": "none",
            "fan_in_fan_out": false,
            "init_lora_weights": true,
            "use_rslora": self.config.use_rslora,
            "use_dora": false,
            "modules_to_save": (!saved.is_empty()).then_some(saved),
            "ensure_weight_tying": self.config.ensure_weight_tying,
            "layers_to_transform": null,
            "layers_pattern": null,
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
        });
        let path = folder.join(ADAPTER_CONFIG);
        fs::write(&path, format!("{config:#}")).map_err(|source| io_error(&path, source))?;
        let mut tensors: Vec<(String, Tensor)> = (self.tensors.iter())
            .map(|(name, tensor)| (format!("{PREFIX}{name}"), tensor.clone()))
            .collect();
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        write_safetensors(&folder.join(ADAPTER_WEIGHTS), &tensors)
    }
}

/// Returns whether the path of a module is `end` or ends in it, as PEFT matches names.
fn is_end(path: &str, end: &str) -> bool {
    path.strip_suffix(end)
        .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

impl RawAdapterConfig {
    /// Returns an adapter without tensors; `paths` are those of the layers that have some.
    fn resolve(self, paths: &[&str]) -> Result<LoraAdapter, ModelError> {
        let unsupported = |field, found: String, supported| {
            Err(ModelError::Unsupported {
                field,
                found,
                supported,
            })
        };
        if self.peft_type != "LORA" {
            return unsupported("peft_type", self.peft_type, "`LORA`");
        }
        if let Some(bias) = self.bias.filter(|bias| bias != "none") {
            return unsupported("bias", bias, "`none`");
        }
        for field in VARIANTS {
            if let Some(value) = self.rest.get(field).filter(|value| !is_unset(value)) {
                return unsupported(field, value.to_string(), "null");
            }
        }
        match self.rest.get("init_lora_weights") {
            Some(Value::String(start)) if !STARTS.contains(&start.as_str()) => {
                return unsupported("init_lora_weights", start.clone(), "true, `gaussian`");
            }
            _ => {}
        }
        let target_modules = match self.target_modules {
            OneOrMany::One(name) if name.eq_ignore_ascii_case(ALL_LINEAR) => named_targets(&[name]),
            // A regular expression. Which layers it meant, their tensors say.
            OneOrMany::One(_) => paths.iter().map(|&path| path.to_owned()).collect(),
            OneOrMany::Many(names) => names,
        };
        let alpha_pattern = self.alpha_pattern.unwrap_or_default();
        for (pattern, alpha) in &alpha_pattern {
            // PEFT reads them as regular expressions; names are all that is used.
            let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.');
            if !pattern.chars().all(is_name) {
                return unsupported("alpha_pattern", pattern.clone(), "names of modules");
            }
            if !(*alpha > 0.0 && alpha.is_finite()) {
                return Err(ModelError::InvalidConfig {
                    field: "alpha_pattern",
                    reason: format!("{alpha} is not positive"),
                });
            }
        }
        let config = LoraConfig {
            rank: self.r,
            alpha: self.lora_alpha,
            use_rslora: self.use_rslora,
            target_modules,
            dropout: self.lora_dropout.unwrap_or_default(),
            modules_to_save: self.modules_to_save.unwrap_or_default(),
            ensure_weight_tying: self.ensure_weight_tying,
        };
        config.validate()?;
        Ok(LoraAdapter {
            config,
            alpha_pattern,
            rank_pattern: self.rank_pattern.unwrap_or_default(),
            base_model: self.base_model_name_or_path,
            tensors: HashMap::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_linear_layers_have_one_name() {
        let all = named_targets(&LINEAR_MODULES);
        assert_eq!(named_targets(&["All-Linear"]), all);
        assert_eq!(named_targets(&["q_proj", "all-linear"]), all);
        assert_eq!(named_targets(&["q_proj"]), ["q_proj"]);
    }

    #[test]
    fn the_scale_falls_with_the_rank_or_its_root() {
        let scale = |use_rslora| {
            let config = LoraConfig {
                rank: 64,
                alpha: 16.0,
                use_rslora,
                ..LoraConfig::default()
            };
            config.scale()
        };
        assert_eq!((scale(false), scale(true)), (0.25, 2.0));
    }

    #[test]
    fn an_unknown_target_is_named() {
        let config = LoraConfig {
            target_modules: vec!["c_attn".to_owned()],
            ..LoraConfig::default()
        };
        let message = config.validate().unwrap_err().to_string();
        assert!(
            message.starts_with("invalid `target_modules`: `c_attn` is none of"),
            "{message}"
        );
    }

    /// Every fault of an adapter's folder is one error, which names the file.
    #[test]
    fn damaged_adapters_are_named() {
        let adapter = |tensors: &[(&str, [usize; 2])]| {
            let folder = tempfile::tempdir().unwrap();
            let config = json!({
                "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
            });
            fs::write(folder.path().join(ADAPTER_CONFIG), config.to_string()).unwrap();
            let tensors: Vec<(String, Tensor)> = (tensors.iter())
                .map(|(name, shape)| {
                    let tensor = Tensor::ones(shape.as_slice(), DType::F32, &Device::Cpu).unwrap();
                    ((*name).to_owned(), tensor)
                })
                .collect();
            write_safetensors(&folder.path().join(ADAPTER_WEIGHTS), &tensors).unwrap();
            folder
        };
        let load = |folder: &tempfile::TempDir| {
            LoraAdapter::load(folder.path(), DType::F32, &Device::Cpu).map_err(|e| e.to_string())
        };
        const A: &str = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
        let good = adapter(&[(A, [2, 5])]);
        assert_eq!(load(&good).unwrap().tensors.len(), 1);
        let message = load(&adapter(&[(A, [3, 5])])).unwrap_err();
        assert!(
            message.contains("has rank 3") && message.contains(ADAPTER_WEIGHTS),
            "{message}"
        );
        let message = load(&adapter(&[("q_proj.lora_A", [2, 5])])).unwrap_err();
        assert!(
            message.starts_with("unexpected tensor `q_proj.lora_A`"),
            "{message}"
        );
        for (file, content, expected) in [
            (ADAPTER_CONFIG, "{", ADAPTER_CONFIG),
            (ADAPTER_CONFIG, "{}", ADAPTER_CONFIG),
            (
                ADAPTER_CONFIG,
                r#"{"peft_type": "IA3", "r": 2, "lora_alpha": 4, "target_modules": []}"#,
                "unsupported `peft_type`",
            ),
            (
                ADAPTER_CONFIG,
                r#"{"peft_type": "LORA", "r": 0, "lora_alpha": 4, "target_modules": ["q_proj"]}"#,
                "invalid `rank`",
            ),
            (ADAPTER_WEIGHTS, "", ADAPTER_WEIGHTS),
        ] {
            let folder = adapter(&[(A, [2, 5])]);
            fs::write(folder.path().join(file), content).unwrap();
            let message = load(&folder).unwrap_err();
            assert!(
                message.contains(expected) && message.contains(file),
                "{message}"
            );
        }
    }

    #[test]
    fn variants_that_change_the_arithmetic_are_refused() {
        for (field, value) in [
            ("use_dora", json!(true)),
            ("bias", json!("all")),
            ("modules_to_save", json!(["norm"])),
            ("lora_bias", json!(true)),
            ("init_lora_weights", json!("pissa")),
            ("trainable_token_indices", json!([1])),
            ("alpha_pattern", json!({".*q_proj": 4})),
        ] {
            let mut config = json!({
                "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"],
            });
            config[field] = value;
            let raw: RawAdapterConfig = serde_json::from_value(config).unwrap();
            let message = raw.resolve(&[]).unwrap_err().to_string();
            assert!(
                message.starts_with(&format!("unsupported `{field}`")),
                "{message}"
            );
        }
    }
}
