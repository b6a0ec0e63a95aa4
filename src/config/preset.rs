//! Named starting points, laid right below what names them.

use serde::{Deserialize, Serialize};

/// The settings of a paper or of another trainer, which the keys beside its name go before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub enum Preset {
    /// The defaults of TRL 1.16's `GRPOConfig`.
    #[serde(rename = "trl-1.16")]
    Trl,
    /// The defaults of verl 0.9 with GRPO.
    #[serde(rename = "verl-0.9")]
    Verl,
    /// DAPO (arXiv:2503.14476).
    #[serde(rename = "dapo")]
    Dapo,
    /// Dr. GRPO (arXiv:2503.20783).
    #[serde(rename = "dr-grpo")]
    DrGrpo,
    /// Qwen3-1.7B on MBPP, LoRA, with a Python tool.
    #[serde(rename = "seed-mbpp")]
    SeedMbpp,
}

impl Preset {
    /// Every preset.
    pub const ALL: [Self; 5] = [
        Self::Trl,
        Self::Verl,
        Self::Dapo,
        Self::DrGrpo,
        Self::SeedMbpp,
    ];

    /// Returns whether it names a model and tasks of its own.
    #[must_use]
    pub fn names_sources(self) -> bool {
        match self {
            Self::SeedMbpp => true,
            Self::Trl | Self::Verl | Self::Dapo | Self::DrGrpo => false,
        }
    }

    /// Returns the keys that it sets, as a run file.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Trl => include_str!("presets/trl-1.16.toml"),
            Self::Verl => include_str!("presets/verl-0.9.toml"),
            Self::Dapo => include_str!("presets/dapo.toml"),
            Self::DrGrpo => include_str!("presets/dr-grpo.toml"),
            Self::SeedMbpp => include_str!("presets/seed-mbpp.toml"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preset_that_names_sources_names_both() {
        for preset in Preset::ALL {
            let keys: toml::Table = preset.text().parse().unwrap();
            for section in ["model", "task"] {
                let path = keys.get(section).and_then(|section| section.get("path"));
                assert_eq!(path.is_some(), preset.names_sources(), "{preset:?}");
            }
        }
    }
}
