//! The golden numbers of `tests/golden/rl.json`, and tiny models.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde_json::Value;

use super::weights::tensor_shapes;
use super::{ModelConfig, ModelType, RopeScaling, Weights};

/// One case of the golden file.
pub(crate) struct GoldenCase(Value);

/// Returns the case `name`.
pub(crate) fn golden(name: &str) -> GoldenCase {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/rl.json");
    let text = fs_err::read_to_string(path).expect("the golden file is part of the repository");
    let file: Value = serde_json::from_str(&text).expect("the golden file is JSON");
    let cases = file["cases"].as_array().expect("`cases` is a list");
    let case = cases.iter().find(|case| case["name"] == name);
    GoldenCase(
        case.unwrap_or_else(|| panic!("no golden case `{name}`"))
            .clone(),
    )
}

impl GoldenCase {
    pub(crate) fn value(&self, section: &str, key: &str) -> &Value {
        let value = &self.0[section][key];
        assert!(!value.is_null(), "no `{section}.{key}`");
        value
    }

    pub(crate) fn float(&self, section: &str, key: &str) -> f64 {
        self.value(section, key).as_f64().expect("a number")
    }

    pub(crate) fn floats(&self, section: &str, key: &str) -> Vec<f64> {
        floats(self.value(section, key))
    }

    /// Returns a matrix's rows laid end to end.
    pub(crate) fn rows(&self, section: &str, key: &str) -> Vec<Vec<f64>> {
        self.value(section, key)
            .as_array()
            .expect("a list")
            .iter()
            .map(floats)
            .collect()
    }
}

fn floats(value: &Value) -> Vec<f64> {
    let items = value.as_array().expect("a list");
    items
        .iter()
        .map(|item| item.as_f64().expect("a number"))
        .collect()
}

/// Returns a two-layer model of a few thousand weights.
pub(crate) fn toy(model_type: ModelType) -> ModelConfig {
    ModelConfig {
        model_type,
        vocab_size: 19,
        hidden_size: 12,
        intermediate_size: 20,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 6,
        max_position_embeddings: 256,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        attention_bias: false,
        mlp_bias: false,
        tie_word_embeddings: model_type != ModelType::Llama,
        bos_token_id: None,
        eos_token_id: vec![0],
    }
}

/// Returns the Llama toy with all the biases that an architecture may have.
pub(crate) fn biased_llama() -> ModelConfig {
    ModelConfig {
        attention_bias: true,
        mlp_bias: true,
        ..toy(ModelType::Llama)
    }
}

/// Returns the Llama toy with biases and a rotation that is stretched and changes lengths.
pub(crate) fn scaled_llama() -> ModelConfig {
    ModelConfig {
        rope_scaling: RopeScaling::Yarn {
            factor: 4.0,
            original_max_position_embeddings: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: Some(0.8),
        },
        ..biased_llama()
    }
}

/// Returns `len` tokens below `vocab`, from a generator of its own.
pub(crate) fn random_tokens(len: usize, vocab: u32, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963);
        u32::try_from(state >> 33).expect("31 bits") % vocab
    };
    (0..len).map(|_| next()).collect()
}

/// Returns the folder of golden files.
pub(crate) fn golden_folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// Returns the numbers that `tests/golden/make_toy_models.py` gives to tensors of these names.
pub(crate) fn formula(mut shapes: Vec<(String, Vec<usize>)>, dtype: DType) -> Weights {
    shapes.sort();
    let tensor = |(place, (name, shape)): (usize, (String, Vec<usize>))| {
        let len: usize = shape.iter().product();
        let values: Vec<f64> = (0..len)
            .map(|i| {
                let value = ((i * 7919 + place * 104_729) % 1009) as f64 / 1009.0 - 0.5;
                if name.ends_with("norm.weight") {
                    1.0 + 0.4 * value
                } else {
                    value
                }
            })
            .collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).expect("the lengths agree");
        (name, tensor.to_dtype(dtype).expect("both are floats"))
    };
    shapes.into_iter().enumerate().map(tensor).collect()
}

/// Returns a toy with the weights of `tests/golden/make_toy_models.py`.
pub(crate) fn formula_weights(config: &ModelConfig, dtype: DType) -> Weights {
    formula(tensor_shapes(config), dtype)
}
