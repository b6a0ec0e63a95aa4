//! Rotary frequencies, and how checkpoints stretch them for texts longer than they were pretrained on.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::ModelError;

/// The rule that a checkpoint's rotary frequencies follow: `rope_scaling` of `config.json`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase", deny_unknown_fields)]
pub enum RopeScaling {
    /// As in the paper: no stretching.
    #[default]
    Default,
    /// All wavelengths are `factor` times as long (Chen et al. 2023).
    Linear {
        /// How much longer.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths are stretched, short ones are not.
    Llama3 {
        /// How much longer the long wavelengths are.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Longest text of the pretraining.
        original_max_position_embeddings: usize,
    },
    /// `YaRN` (Peng et al. 2023): as Llama 3.1, with another bound, and scores are scaled as well.
    Yarn {
        /// How much longer the long wavelengths are.
        factor: f64,
        /// Longest text of the pretraining.
        original_max_position_embeddings: usize,
        /// Wavelengths that turn more often than this in the pretraining's texts are short.
        #[serde(default = "default_beta_fast")]
        beta_fast: f64,
        /// Wavelengths that turn less often than this are long.
        #[serde(default = "default_beta_slow")]
        beta_slow: f64,
        /// Factor of queries and keys; follows from `factor` if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
    },
}

fn default_beta_fast() -> f64 {
    32.0
}
fn default_beta_slow() -> f64 {
    1.0
}

impl RopeScaling {
    /// Reads `rope_scaling` or, as transformers 5 has it, `rope_parameters`.
    ///
    /// Where the length of the pretraining's texts is not given it is `max_position_embeddings`.
    pub(super) fn from_json(
        field: &'static str,
        fields: &Map<String, Value>,
        max_position_embeddings: usize,
    ) -> Result<Self, ModelError> {
        let mut fields = fields.clone();
        // The old name. Where both stand they agree.
        let old = fields.shift_remove("type");
        let kind = fields.get("rope_type").cloned().or(old);
        let kind = kind.unwrap_or_else(|| Value::from("default"));
        // Read by the configuration, since it may also stand beside this object.
        fields.shift_remove("rope_theta");
        fields.retain(|name, value| {
            !value.is_null() && (name != "partial_rotary_factor" || value.as_f64() != Some(1.0))
        });
        const ORIGINAL: &str = "original_max_position_embeddings";
        match kind.as_str() {
            // Checked here, as the derived reader ignores what stands beside this name.
            Some("default") if fields.keys().all(|name| name == "rope_type") => {}
            Some("linear") => {}
            Some("llama3" | "yarn") => {
                let original = fields.entry(ORIGINAL);
                original.or_insert_with(|| Value::from(max_position_embeddings));
            }
            _ => {
                return Err(ModelError::Unsupported {
                    field,
                    found: Value::from(fields).to_string(),
                    supported: "`default`, `linear`, `llama3`, `yarn`",
                });
            }
        }
        fields.insert("rope_type".to_owned(), kind);
        serde_json::from_value(fields.into()).map_err(|error| ModelError::InvalidConfig {
            field,
            reason: error.to_string(),
        })
    }

    /// Checks that the numbers make sense.
    pub(super) fn validate(&self) -> Result<(), ModelError> {
        let invalid = |reason: String| {
            Err(ModelError::InvalidConfig {
                field: "rope_scaling",
                reason,
            })
        };
        let check = |name: &str, value: f64, low: f64| {
            if (low..=1e6).contains(&value) {
                return Ok(());
            }
            invalid(format!("`{name}` {value} is not in {low}..=1e6"))
        };
        let check_original = |original: usize| {
            if (1..=1 << 32).contains(&original) {
                return Ok(());
            }
            invalid(format!(
                "`original_max_position_embeddings` {original} is not in 1..=2^32"
            ))
        };
        match *self {
            Self::Default => Ok(()),
            Self::Linear { factor } => check("factor", factor, 1.0),
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                check("factor", factor, 1.0)?;
                check("low_freq_factor", low_freq_factor, 1e-6)?;
                check("high_freq_factor", high_freq_factor, 1e-6)?;
                if low_freq_factor >= high_freq_factor {
                    return invalid(format!(
                        "`low_freq_factor` {low_freq_factor} is not below `high_freq_factor` \
                         {high_freq_factor}"
                    ));
                }
                check_original(original_max_position_embeddings)
            }
            Self::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                attention_factor,
            } => {
                check("factor", factor, 1.0)?;
                check("beta_fast", beta_fast, 1e-6)?;
                check("beta_slow", beta_slow, 1e-6)?;
                check("attention_factor", attention_factor.unwrap_or(1.0), 1e-6)?;
                check_original(original_max_position_embeddings)
            }
        }
    }

    /// Returns the `head_dim / 2` angular frequencies, in radians per token.
    ///
    /// In `f32`, as transformers has them: at large positions the angle's own rounding is what a
    /// checkpoint was trained with.
    pub(crate) fn frequencies(&self, head_dim: usize, theta: f64) -> Vec<f32> {
        let half = head_dim / 2;
        let plain = (0..half).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64));
        let scaled: Vec<f64> = match *self {
            Self::Default => plain.collect(),
            Self::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings,
            } => plain
                .map(|frequency| {
                    let turns = original_max_position_embeddings as f64 * frequency / TAU;
                    let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 - keep) * frequency / factor + keep * frequency
                })
                .collect(),
            Self::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                ..
            } => {
                let index = |turns: f64| {
                    let wavelength = original_max_position_embeddings as f64 / (turns * TAU);
                    head_dim as f64 * wavelength.ln() / (2.0 * theta.ln())
                };
                let low = index(beta_fast).floor().max(0.0);
                let high = index(beta_slow).ceil().min(head_dim as f64 - 1.0);
                let width = if low == high { 0.001 } else { high - low };
                plain
                    .enumerate()
                    .map(|(i, frequency)| {
                        let stretch = ((i as f64 - low) / width).clamp(0.0, 1.0);
                        frequency / factor * stretch + frequency * (1.0 - stretch)
                    })
                    .collect()
            }
        };
        #[expect(clippy::cast_possible_truncation, reason = "rounds on purpose")]
        scaled
            .into_iter()
            .map(|frequency| frequency as f32)
            .collect()
    }

    /// Returns the factor of rotated queries and keys.
    pub(crate) fn attention_factor(&self) -> f64 {
        match *self {
            Self::Yarn {
                factor,
                attention_factor,
                ..
            } => attention_factor.unwrap_or_else(|| 1.0 + 0.1 * factor.ln()),
            _ => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    fn read(value: &Value) -> Result<RopeScaling, ModelError> {
        let fields = value.as_object().unwrap();
        let scaling = RopeScaling::from_json("rope_scaling", fields, 4096)?;
        scaling.validate()?;
        Ok(scaling)
    }

    #[test]
    fn llama_3_2_stretches_long_waves_only() {
        // The published values of Llama-3.2-1B.
        let scaling = read(&json!({
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        }))
        .unwrap();
        let plain = RopeScaling::Default.frequencies(64, 5e5);
        let scaled = scaling.frequencies(64, 5e5);
        assert_eq!(scaled[0].to_bits(), plain[0].to_bits());
        assert!((scaled[31] * 32.0 / plain[31] - 1.0).abs() < 1e-6);
        let bent = scaled.iter().zip(&plain).filter(|(s, p)| {
            let ratio = **p / **s;
            ratio > 1.001 && ratio < 31.9
        });
        assert_eq!(bent.count(), 3, "wavelengths between 2048 and 8192");
    }

    #[test]
    fn the_old_name_and_an_absent_length_are_read() {
        let scaling = read(&json!({"type": "yarn", "factor": 4.0})).unwrap();
        let RopeScaling::Yarn {
            original_max_position_embeddings,
            beta_fast,
            ..
        } = scaling
        else {
            panic!("{scaling:?}")
        };
        assert_eq!((original_max_position_embeddings, beta_fast), (4096, 32.0));
    }

    #[rstest]
    #[case(json!({"rope_type": "dynamic", "factor": 2.0}), "unsupported `rope_scaling`")]
    #[case(json!({"rope_type": "longrope"}), "longrope")]
    #[case(json!({"rope_type": 3}), "unsupported `rope_scaling`")]
    #[case(json!({"rope_type": "linear"}), "missing field `factor`")]
    #[case(json!({"rope_type": "linear", "factor": 0.0}), "`factor` 0 is not in 1..=1e6")]
    #[case(json!({"rope_type": "default", "mrope_section": [16]}), "mrope_section")]
    #[case(json!({"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}), "mscale")]
    #[case(json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
                  "high_freq_factor": 1.0}), "is not below `high_freq_factor`")]
    fn what_is_not_implemented_is_refused(#[case] value: Value, #[case] expected: &str) {
        let message = read(&value).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}
