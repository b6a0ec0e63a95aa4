//! Named starting points, laid under the run file.

use serde::{Deserialize, Serialize};

/// The settings of a paper or of another trainer, which the run file's own keys go before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
