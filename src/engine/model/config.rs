//! The model's shape, read from a Hugging Face `config.json`.

use std::path::Path;

use candle_core::DType;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::files::read_json;
use super::rope_scaling::RopeScaling;
use super::weights::tensor_shapes;
use super::{ModelError, files};

/// Above any published model; a larger value is a damaged file, not a model.
const MAX_DIMENSION: usize = 1 << 24;

/// Most layers that are accepted; the largest published models have fewer than 200.
const MAX_LAYERS: usize = 1024;

/// Most weights that are accepted, 2^40; the largest published models have some 2^40 with experts,
/// which are not implemented.
const MAX_PARAMETERS: usize = 1 << 40;

/// The decoder architectures that we implement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelType {
    /// Qwen3 dense: per-head RMS norm on queries and keys.
    Qwen3,
    /// Qwen2 and Qwen2.5 dense: biases on queries, keys and values.
    Qwen2,
    /// Llama and its kin, SmolLM2 among them.
    Llama,
}

/// The shape of a decoder. Field names equal those of Hugging Face's `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Which architecture.
    pub model_type: ModelType,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated feed-forward layer.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary wavelengths.
    pub rope_theta: f64,
    /// How the rotary wavelengths are stretched for long texts.
    pub rope_scaling: RopeScaling,
    /// Whether Llama's or Qwen3's attention layers have biases; Qwen2's are part of it.
    pub attention_bias: bool,
    /// Whether Llama's feed-forward layers have biases.
    pub mlp_bias: bool,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Token that starts a text, if the model has one.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a generation.
    pub eos_token_id: Vec<u32>,
}

/// `config.json` as it stands in the file: everything that may be absent is optional.
#[derive(Deserialize)]
struct RawConfig {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    #[serde(default = "default_max_position_embeddings")]
    max_position_embeddings: usize,
    #[serde(default = "default_rms_norm_eps")]
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<Value>,
    rope_interleaved: Option<bool>,
    #[serde(default = "default_hidden_act")]
    hidden_act: String,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    use_sliding_window: bool,
    layer_types: Option<Vec<String>>,
    quantization_config: Option<Value>,
    bos_token_id: Option<u32>,
    eos_token_id: Option<OneOrMany>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

// The defaults of transformers' `LlamaConfig` and `Qwen3Config`.
fn default_max_position_embeddings() -> usize {
    2048
}
fn default_rms_norm_eps() -> f64 {
    1e-6
}
fn default_hidden_act() -> String {
    "silu".to_owned()
}

impl ModelConfig {
    /// Reads `config.json`.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read or parsed, if its numbers contradict each other, or if it
    /// asks for a feature that is not implemented: the message names the field.
    pub fn from_file(path: &Path) -> Result<Self, ModelError> {
        let raw: RawConfig = read_json(path, files::MAX_CONFIG_BYTES)?;
        raw.resolve().map_err(|error| error.in_file(path))
    }

    /// Parses the text of a `config.json`.
    ///
    /// # Errors
    ///
    /// As for [`ModelConfig::from_file`].
    pub fn from_json(text: &str) -> Result<Self, ModelError> {
        let raw: RawConfig = serde_json::from_str(text).map_err(|source| ModelError::Json {
            path: "config.json".into(),
            source,
        })?;
        raw.resolve()
    }

    /// Returns a `config.json` that transformers loads, for weights in `dtype`.
    pub fn to_json(&self, dtype: DType) -> String {
        let class = match self.model_type {
            ModelType::Qwen3 => "Qwen3ForCausalLM",
            ModelType::Qwen2 => "Qwen2ForCausalLM",
            ModelType::Llama => "LlamaForCausalLM",
        };
        let rope_scaling = match &self.rope_scaling {
            RopeScaling::Default => Value::Null,
            scaling => json!(scaling),
        };
        let value = json!({
            "architectures": [class],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope_scaling,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "torch_dtype": match dtype {
                DType::BF16 => "bfloat16",
                DType::F16 => "float16",
                _ => "float32",
            },
        });
        format!("{value:#}")
    }

    /// Checks that the numbers fit each other.
    ///
    /// # Errors
    ///
    /// Fails with the name of the first field at fault.
    pub fn validate(&self) -> Result<(), ModelError> {
        let invalid = |field, reason: String| Err(ModelError::InvalidConfig { field, reason });
        for (field, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            let limit = match field {
                "num_hidden_layers" => MAX_LAYERS,
                _ => MAX_DIMENSION,
            };
            if value == 0 || value > limit {
                return invalid(field, format!("{value} is not in 1..={limit}"));
            }
        }
        if !self
            .num_attention_heads
            .is_multiple_of(self.num_key_value_heads)
        {
            let reason = format!(
                "{} query heads do not divide into {} groups",
                self.num_attention_heads, self.num_key_value_heads
            );
            return invalid("num_key_value_heads", reason);
        }
        if !self.head_dim.is_multiple_of(2) {
            return invalid(
                "head_dim",
                format!("{} is odd, so it cannot rotate", self.head_dim),
            );
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps.is_finite()) {
            return invalid(
                "rms_norm_eps",
                format!("{} is not positive", self.rms_norm_eps),
            );
        }
        if !(self.rope_theta > 0.0 && self.rope_theta.is_finite()) {
            return invalid("rope_theta", format!("{} is not positive", self.rope_theta));
        }
        self.rope_scaling.validate()?;
        if self.attention_bias && self.model_type == ModelType::Qwen2 {
            let reason = "Qwen2 has biases on queries, keys and values, and no switch for them";
            return invalid("attention_bias", reason.to_owned());
        }
        if self.mlp_bias && self.model_type != ModelType::Llama {
            return invalid("mlp_bias", "only Llama has this switch".to_owned());
        }
        match self.parameter_count() {
            Some(1..=MAX_PARAMETERS) => Ok(()),
            _ => invalid(
                "hidden_size",
                format!("these sizes make a model of more than {MAX_PARAMETERS} weights"),
            ),
        }
    }

    /// Returns the number of weights; `None` if it does not fit a machine's word.
    pub(super) fn parameter_count(&self) -> Option<usize> {
        let mut total: usize = 0;
        for (_, shape) in tensor_shapes(self) {
            let elements = shape
                .into_iter()
                .try_fold(1, |product: usize, dim| product.checked_mul(dim))?;
            total = total.checked_add(elements)?;
        }
        Some(total)
    }

    /// Returns whether queries and keys are normalised per head.
    pub fn has_qk_norm(&self) -> bool {
        self.model_type == ModelType::Qwen3
    }

    /// Returns whether the linear layer `module` (`q_proj`) has a bias.
    pub fn has_bias(&self, module: &str) -> bool {
        match module {
            "q_proj" | "k_proj" | "v_proj" => {
                self.attention_bias || self.model_type == ModelType::Qwen2
            }
            "o_proj" => self.attention_bias,
            _ => self.mlp_bias,
        }
    }
}

impl RawConfig {
    fn resolve(self) -> Result<ModelConfig, ModelError> {
        let unsupported = |field, found: String, supported| {
            Err(ModelError::Unsupported {
                field,
                found,
                supported,
            })
        };
        let model_type = match self.model_type.as_str() {
            "qwen3" => ModelType::Qwen3,
            "qwen2" => ModelType::Qwen2,
            "llama" => ModelType::Llama,
            _ => return unsupported("model_type", self.model_type, "`qwen3`, `qwen2`, `llama`"),
        };
        if self.hidden_act != "silu" {
            return unsupported("hidden_act", self.hidden_act, "`silu`");
        }
        if self.use_sliding_window {
            return unsupported("use_sliding_window", "true".to_owned(), "false");
        }
        if let Some(kind) = self
            .layer_types
            .iter()
            .flatten()
            .find(|kind| *kind != "full_attention")
        {
            return unsupported("layer_types", kind.clone(), "`full_attention`");
        }
        if self.rope_interleaved == Some(true) {
            return unsupported("rope_interleaved", "true".to_owned(), "false");
        }
        if let Some(quantization) = self.quantization_config {
            return unsupported("quantization_config", quantization.to_string(), "null");
        }
        if let Some(factor) = self.partial_rotary_factor
            && factor.to_bits() != 1.0_f64.to_bits()
        {
            return unsupported("partial_rotary_factor", factor.to_string(), "1.0");
        }
        let scaling = match (&self.rope_scaling, &self.rope_parameters) {
            (Some(Value::Object(fields)), _) => Some(("rope_scaling", fields)),
            (_, Some(Value::Object(fields))) => Some(("rope_parameters", fields)),
            (None | Some(Value::Null), None | Some(Value::Null)) => None,
            (scaling, parameters) => {
                let found = format!("{:?}", scaling.as_ref().or(parameters.as_ref()));
                return unsupported("rope_scaling", found, "null or an object");
            }
        };
        let rope_scaling = match scaling {
            Some((field, fields)) => {
                RopeScaling::from_json(field, fields, self.max_position_embeddings)?
            }
            None => RopeScaling::Default,
        };
        let nested_theta = scaling
            .and_then(|(_, fields)| fields.get("rope_theta"))
            .and_then(Value::as_f64);
        let head_dim = match (self.head_dim, model_type) {
            (Some(head_dim), _) => head_dim,
            (None, ModelType::Qwen3) => 128,
            (None, ModelType::Llama | ModelType::Qwen2) => {
                if self.num_attention_heads == 0
                    || !self.hidden_size.is_multiple_of(self.num_attention_heads)
                {
                    let reason = format!(
                        "absent, and {} does not divide into {} heads",
                        self.hidden_size, self.num_attention_heads
                    );
                    return Err(ModelError::InvalidConfig {
                        field: "head_dim",
                        reason,
                    });
                }
                self.hidden_size / self.num_attention_heads
            }
        };
        let config = ModelConfig {
            model_type,
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim,
            max_position_embeddings: self.max_position_embeddings,
            rms_norm_eps: self.rms_norm_eps,
            rope_theta: nested_theta.or(self.rope_theta).unwrap_or(10_000.0),
            rope_scaling,
            attention_bias: self.attention_bias,
            mlp_bias: self.mlp_bias,
            tie_word_embeddings: self.tie_word_embeddings,
            bos_token_id: self.bos_token_id,
            eos_token_id: match self.eos_token_id {
                None => Vec::new(),
                Some(OneOrMany::One(id)) => vec![id],
                Some(OneOrMany::Many(ids)) => ids,
            },
        };
        config.validate()?;
        Ok(config)
    }
}

/// Reads any text as a `config.json`, for fuzzing; what is accepted is written and read the same.
///
/// # Panics
///
/// Panics if it is not.
#[cfg(any(fuzzing, test))]
pub fn fuzz_config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Ok(config) = ModelConfig::from_json(text) {
        config.validate().expect("what is accepted is valid");
        let written = ModelConfig::from_json(&config.to_json(DType::F32));
        assert_eq!(written.expect("what is written is accepted"), config);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const QWEN3: &str = r#"{
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
        "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "use_cache": true, "use_sliding_window": false, "vocab_size": 151936 }"#;

    #[test]
    fn the_published_qwen3_config_is_read() {
        let config = ModelConfig::from_json(QWEN3).unwrap();
        assert_eq!(config.model_type, ModelType::Qwen3);
        assert_eq!(config.head_dim, 128);
        assert_eq!(config.rope_theta, 1e6);
        assert_eq!(config.eos_token_id, [151_645]);
        assert!(config.tie_word_embeddings);
        assert!(config.has_qk_norm());
    }

    #[test]
    fn a_written_config_reads_back() {
        let config = ModelConfig::from_json(QWEN3).unwrap();
        assert_eq!(
            ModelConfig::from_json(&config.to_json(DType::F32)).unwrap(),
            config
        );
        let config = ModelConfig {
            model_type: ModelType::Llama,
            rope_scaling: RopeScaling::Yarn {
                factor: 4.0,
                original_max_position_embeddings: 32_768,
                beta_fast: 32.0,
                beta_slow: 1.0,
                attention_factor: None,
            },
            attention_bias: true,
            mlp_bias: true,
            ..config
        };
        assert_eq!(
            ModelConfig::from_json(&config.to_json(DType::F32)).unwrap(),
            config
        );
    }

    #[test]
    fn the_published_qwen2_5_config_is_read() {
        let config = ModelConfig::from_json(
            r#"{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
                "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
                "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
                "max_position_embeddings": 32768, "max_window_layers": 21,
                "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
                "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
                "sliding_window": 32768, "tie_word_embeddings": true,
                "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false,
                "vocab_size": 151936}"#,
        )
        .unwrap();
        assert_eq!((config.head_dim, config.has_qk_norm()), (64, false));
        let biases = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"];
        assert_eq!(
            biases.map(|module| config.has_bias(module)),
            [true, true, true, false, false]
        );
        // The published number: 494,032,768.
        assert_eq!(config.parameter_count(), Some(494_032_768));
    }

    #[test]
    fn llama_defaults_follow_transformers() {
        let config = ModelConfig::from_json(
            r#"{"model_type": "llama", "vocab_size": 10, "hidden_size": 12,
                "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 3}"#,
        )
        .unwrap();
        assert_eq!((config.head_dim, config.num_key_value_heads), (4, 3));
        assert_eq!((config.rope_theta, config.rms_norm_eps), (1e4, 1e-6));
        assert!(!config.tie_word_embeddings);
    }

    #[test]
    fn theta_is_found_where_transformers_5_puts_it() {
        let text = QWEN3.replace(
            "\"rope_scaling\": null, \"rope_theta\": 1000000",
            "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 5000000}",
        );
        assert_eq!(ModelConfig::from_json(&text).unwrap().rope_theta, 5e6);
    }

    #[rstest]
    #[case(
        "\"model_type\": \"qwen3\"",
        "\"model_type\": \"qwen3_moe\"",
        "model_type"
    )]
    #[case("\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"", "hidden_act")]
    #[case(
        "\"use_sliding_window\": false",
        "\"use_sliding_window\": true",
        "use_sliding_window"
    )]
    #[case(
        "\"rope_scaling\": null",
        "\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 4.0}",
        "rope_scaling"
    )]
    #[case("\"rope_scaling\": null", "\"rope_scaling\": 4", "rope_scaling")]
    #[case(
        "\"head_dim\": 128",
        "\"partial_rotary_factor\": 0.5",
        "partial_rotary_factor"
    )]
    #[case(
        "\"head_dim\": 128",
        "\"layer_types\": [\"sliding_attention\"]",
        "layer_types"
    )]
    #[case(
        "\"head_dim\": 128",
        "\"quantization_config\": {}",
        "quantization_config"
    )]
    fn what_is_not_implemented_is_refused_by_name(
        #[case] from: &str,
        #[case] to: &str,
        #[case] field: &str,
    ) {
        assert!(QWEN3.contains(from));
        let error = ModelConfig::from_json(&QWEN3.replace(from, to)).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with(&format!("unsupported `{field}`")),
            "{error}"
        );
    }

    #[rstest]
    #[case(
        "\"num_key_value_heads\": 8",
        "\"num_key_value_heads\": 5",
        "num_key_value_heads"
    )]
    #[case("\"head_dim\": 128", "\"head_dim\": 127", "head_dim")]
    #[case("\"vocab_size\": 151936", "\"vocab_size\": 0", "vocab_size")]
    #[case("\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 0", "rms_norm_eps")]
    #[case(
        "\"num_attention_heads\": 16",
        "\"num_attention_heads\": 0",
        "num_attention_heads"
    )]
    #[case(
        "\"num_hidden_layers\": 28",
        "\"num_hidden_layers\": 1099511627776",
        "num_hidden_layers"
    )]
    #[case(
        "\"hidden_size\": 1024",
        "\"hidden_size\": 18446744073709551615",
        "hidden_size"
    )]
    #[case("\"hidden_size\": 1024", "\"hidden_size\": 16777216", "hidden_size")]
    #[case("\"rope_theta\": 1000000", "\"rope_theta\": 0", "rope_theta")]
    #[case(
        "\"rope_scaling\": null",
        "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": -1}",
        "rope_scaling"
    )]
    #[case("\"head_dim\": 128", "\"mlp_bias\": true", "mlp_bias")]
    fn contradictions_name_the_field(#[case] from: &str, #[case] to: &str, #[case] field: &str) {
        assert!(QWEN3.contains(from));
        let error = ModelConfig::from_json(&QWEN3.replace(from, to)).unwrap_err();
        assert!(
            error.to_string().starts_with(&format!("invalid `{field}`")),
            "{error}"
        );
    }

    #[test]
    fn a_missing_field_is_named() {
        let error = ModelConfig::from_json(r#"{"model_type": "qwen3"}"#).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("vocab_size"), "{source}");
    }

    #[test]
    fn a_files_faults_name_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        let read = |text: &str| {
            fs_err::write(&path, text).unwrap();
            ModelConfig::from_file(&path).unwrap_err().to_string()
        };
        for text in [
            QWEN3.replace("qwen3", "mamba"),
            QWEN3.replace("\"vocab_size\": 151936", "\"vocab_size\": 0"),
            QWEN3[..100].to_owned(),
            "[".repeat(100_000),
            " ".repeat(2 << 20),
        ] {
            let message = read(&text);
            assert!(message.contains("config.json`"), "{message}");
        }
    }

    proptest! {
        #[test]
        fn any_field_is_survived(
            field in prop::sample::select(vec![
                "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling",
                "rope_parameters", "eos_token_id", "model_type", "attention_bias",
            ]),
            value in prop::sample::select(vec![
                "0", "1", "-1", "8", "16", "1e300", "4294967296", "18446744073709551615", "null", "[]", "[1, 2]",
                "{}", "true", "\"llama\"", "\"qwen2\"", r#"{"rope_type": "linear", "factor": 2}"#,
                r#"{"rope_type": "yarn", "factor": 1e6, "rope_theta": 1}"#,
            ]),
        ) {
            let mut config: Value = serde_json::from_str(QWEN3).unwrap();
            config[field] = serde_json::from_str(value).unwrap();
            fuzz_config(config.to_string().as_bytes());
        }
    }
}
