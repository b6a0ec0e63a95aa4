//! The model's shape, read from a Hugging Face `config.json`.

use std::path::Path;

use fs_err as fs;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::ModelError;

/// Above any published model; a larger value is a damaged file, not a model.
const MAX_DIMENSION: usize = 1 << 24;

/// The decoder architectures that we implement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelType {
    /// Qwen3 dense: per-head RMS norm on queries and keys.
    Qwen3,
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
        let text = fs::read_to_string(path).map_err(|source| ModelError::Io {
            path: path.to_owned(),
            source,
        })?;
        let raw: RawConfig = serde_json::from_str(&text).map_err(|source| ModelError::Json {
            path: path.to_owned(),
            source,
        })?;
        raw.resolve()
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

    /// Returns a `config.json` that transformers loads.
    pub fn to_json(&self) -> String {
        let class = match self.model_type {
            ModelType::Qwen3 => "Qwen3ForCausalLM",
            ModelType::Llama => "LlamaForCausalLM",
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
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "hidden_act": "silu",
            "attention_bias": false,
            "torch_dtype": "float32",
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
            if value == 0 || value > MAX_DIMENSION {
                return invalid(field, format!("{value} is not in 1..={MAX_DIMENSION}"));
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
        Ok(())
    }

    /// Returns whether queries and keys are normalised per head.
    pub fn has_qk_norm(&self) -> bool {
        self.model_type == ModelType::Qwen3
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
            "llama" => ModelType::Llama,
            _ => return unsupported("model_type", self.model_type, "`qwen3`, `llama`"),
        };
        if self.hidden_act != "silu" {
            return unsupported("hidden_act", self.hidden_act, "`silu`");
        }
        if self.attention_bias {
            return unsupported("attention_bias", "true".to_owned(), "false");
        }
        if self.mlp_bias {
            return unsupported("mlp_bias", "true".to_owned(), "false");
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
        for (field, rope) in [
            ("rope_scaling", &self.rope_scaling),
            ("rope_parameters", &self.rope_parameters),
        ] {
            let kind = rope
                .as_ref()
                .and_then(|r| r.get("rope_type").or_else(|| r.get("type")));
            let is_plain = match rope {
                None | Some(Value::Null) => true,
                Some(_) => {
                    kind.is_some_and(|kind| kind == "default")
                        || (kind.is_none() && field == "rope_parameters")
                }
            };
            if !is_plain {
                let found = rope.as_ref().map(Value::to_string).unwrap_or_default();
                return unsupported(field, found, "null or `default`");
            }
        }
        let nested_theta = (self.rope_parameters.as_ref())
            .and_then(|parameters| parameters.get("rope_theta"))
            .and_then(Value::as_f64);
        let head_dim = match (self.head_dim, model_type) {
            (Some(head_dim), _) => head_dim,
            (None, ModelType::Qwen3) => 128,
            (None, ModelType::Llama) => {
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
            rope_theta: self.rope_theta.or(nested_theta).unwrap_or(10_000.0),
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

#[cfg(test)]
mod tests {
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
        assert_eq!(ModelConfig::from_json(&config.to_json()).unwrap(), config);
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
        "\"attention_bias\": false",
        "\"attention_bias\": true",
        "attention_bias"
    )]
    #[case(
        "\"use_sliding_window\": false",
        "\"use_sliding_window\": true",
        "use_sliding_window"
    )]
    #[case(
        "\"rope_scaling\": null",
        "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4.0}",
        "rope_scaling"
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
}
