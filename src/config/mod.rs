//! The run file: defaults < file < `--set`, validated with key paths.
//!
//! A run is described by one TOML file, `run.toml`, and read with [`RunConfig::load`]. Every key has
//! a default except `model.path` and `task.path`; `--set section.key=value` replaces single keys.
//! Unknown keys are refused with the nearest known one, and [`RunConfig::validate`] reports all
//! values that make no sense together, each with its key, its value and what to do.
//! [`RunConfig::to_toml`] writes the resolved file, which reads back as the same run.
//!
//! The names are those of TRL, verl and vLLM where they agree; `trainer.clip_low` and `clip_high`
//! are TRL's `epsilon` and `epsilon_high`, `rollout.group_size` its `num_generations`.

mod error;
mod layers;
mod units;
mod validate;

use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use crate::chat::ToolCallFormat;
use crate::grader::RewardTerms;
use crate::sandbox::{Meter, Restore, RuntimeName};
use crate::task::Split;

pub use error::{ConfigError, Issue};

/// Everything that a run is made of.
///
/// # Examples
///
/// ```
/// use wardian::config::RunConfig;
///
/// let config = RunConfig::from_toml(
///     "model.path = 'Qwen/Qwen3-0.6B'\ntask.path = 'google-research-datasets/mbpp/sanitized'",
///     &["rollout.group_size=4", "sandbox.deadline=500ms"],
/// )?;
/// assert_eq!(config.rollout.group_size, 4);
/// assert_eq!(config.sandbox.deadline.as_millis(), 500);
/// # Ok::<(), wardian::config::ConfigError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Seeds task order, sampling, adapter initialization and bootstrap; 0 unless given.
    pub seed: u64,
    /// The policy.
    pub model: ModelConfig,
    /// What it is asked to solve.
    pub task: TaskConfig,
    /// How episodes are sampled.
    pub rollout: RolloutConfig,
    /// What a submission earns; its keys are those of [`RewardTerms`].
    pub reward: RewardTerms,
    /// What the policy's code may use.
    pub sandbox: SandboxConfig,
    /// How the policy is updated.
    pub trainer: TrainerConfig,
    /// How the policy is measured.
    pub eval: EvalConfig,
}

/// The policy: its checkpoint and how it is held.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// The checkpoint: a folder with `config.json`, weights and tokenizer, or a hub repository
    /// `owner/name`; has to be given.
    pub path: String,
    /// The branch, tag or commit of a hub repository; its `main` unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// A LoRA adapter in PEFT's layout to start from; a fresh one unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// What weights are held in; `auto` unless given.
    pub dtype: Dtype,
    /// Where the model runs; `auto` unless given.
    pub device: Device,
}

/// What weights are held in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// `bf16` on a GPU, `f32` on a CPU.
    #[default]
    Auto,
    /// 32-bit floats.
    F32,
    /// bfloat16; losses and log-probabilities stay in `f32`.
    Bf16,
}

/// Where a model runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The first GPU if the program was built for one and there is one, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The first GPU.
    Cuda,
}

/// What the policy is asked to solve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TaskConfig {
    /// The tasks to learn from: a file, a folder or a hub data set (see
    /// [`TaskSource`](crate::task::TaskSource)); has to be given.
    pub path: String,
    /// The split to learn from; `train` unless given. A file beside a `task.eval_path` is read whole,
    /// and of a file without MBPP's ids a fifth is held out to measure on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
    /// The tasks to measure on; another split of `task.path` unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_path: Option<String>,
    /// The split to measure on; a file of its own is read whole unless given, else it is `test`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_split: Option<Split>,
    /// How many of a task's tests the policy is shown; 1 unless given, the others stay hidden.
    pub visible_tests: usize,
    /// Whether MBPP's challenge tests are used, too, hidden; false unless given.
    pub challenge_tests: bool,
    /// What grades every task: a grader's name, or a Python file with `def grade(candidate, task)`;
    /// what each task says unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grader: Option<String>,
    /// Learn from the first so many tasks only; all unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
}

impl Default for TaskConfig {
    fn default() -> Self {
        Self {
            path: String::new(),
            split: None,
            eval_path: None,
            eval_split: None,
            visible_tests: 1,
            challenge_tests: false,
            grader: None,
            limit: None,
        }
    }
}

/// How episodes are sampled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RolloutConfig {
    /// Samples of one task that are compared with each other, G in GRPO; 8 unless given.
    pub group_size: usize,
    /// Tasks of one step, each with a group; 8 unless given.
    pub groups_per_step: usize,
    /// Turns of one episode, tool calls included; 6 unless given, 1 for no tools.
    pub max_turns: usize,
    /// Tokens sampled in one turn; 512 unless given.
    pub max_new_tokens: usize,
    /// Tokens of a whole episode, prompt and tool results included; 4096 unless given.
    pub max_total_tokens: usize,
    /// Tokens whose keys and values are held at one time, which bounds memory; 65536 unless given.
    pub max_cache_tokens: usize,
    /// Divides the logits before sampling and in every log-probability; 1.0 unless given.
    pub temperature: f64,
    /// Whether the chat template lets the policy reason first; false unless given.
    pub enable_thinking: bool,
    /// Tokens of reasoning in one turn, after which it is closed by tokens that are not learned from;
    /// without limit unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_thinking_tokens: Option<usize>,
    /// How the policy writes tool calls: `hermes`, `qwen_xml` or `llama3`; as its chat template says
    /// unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_format: Option<ToolCallFormat>,
    /// Replaces the built-in system prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_prompt: Option<String>,
    /// How much of a tool's output the policy is fed, head and tail kept; 4KiB unless given.
    #[serde(with = "units::byte_size")]
    pub tool_output: ByteSize,
}

impl Default for RolloutConfig {
    fn default() -> Self {
        Self {
            group_size: 8,
            groups_per_step: 8,
            max_turns: 6,
            max_new_tokens: 512,
            max_total_tokens: 4096,
            max_cache_tokens: 65_536,
            temperature: 1.0,
            enable_thinking: false,
            max_thinking_tokens: None,
            tool_call_format: None,
            system_prompt: None,
            tool_output: ByteSize::kib(4),
        }
    }
}

/// What the policy's code may use, in each call of a tool and each grading.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxConfig {
    /// Linear memory of an instance, interpreter included; 256MiB unless given.
    #[serde(with = "units::byte_size")]
    pub memory: ByteSize,
    /// Fuel, in units of work of about one WebAssembly operator; 10 billion unless given, mostly
    /// one to three seconds of Python. It ends a program at the same point on every machine, so
    /// keep the deadlines well above it.
    pub fuel: u64,
    /// Wall-clock time of one call; 30s unless given. An episode that meets it is left out of
    /// learning: it says something about the machine.
    #[serde(with = "units::duration")]
    pub deadline: Duration,
    /// Fuel of a submission while it is graded; 50 billion unless given, which every reference
    /// solution of MBPP keeps to. A submission that never ends uses all of it, in five to fifteen
    /// seconds: give less where tasks are small.
    pub grade_fuel: u64,
    /// Wall-clock time for all tests of one submission; 2m unless given.
    #[serde(with = "units::duration")]
    pub grade_deadline: Duration,
    /// Standard output and error kept of one tool call, each; 64KiB unless given.
    #[serde(with = "units::byte_size")]
    pub output: ByteSize,
    /// Python runtime of the policy's tool calls: `python` unless given, or `science`, which has
    /// numpy, pandas and scipy, and which `wardian runtime build` must have added. Scoring is done
    /// in `python` in either case.
    pub runtime: RuntimeName,
    /// Wheels, pure Python ones, whose packages programs and submissions can import; none unless
    /// given.
    pub wheels: Vec<PathBuf>,
    /// Processes that guests run in; 0, which is the default, for this process. As many as there
    /// are cores suit programs that use much memory, and confine a crash of the sandbox.
    pub workers: usize,
    /// How an interpreter is made fresh; `in-place` unless given. `reinstantiate` is slower and
    /// leans on fewer proofs.
    pub restore: Restore,
    /// Compares all memory of an interpreter with the original after every so many restores; 0,
    /// which is the default, for never.
    pub audit_every: u32,
    /// How fuel is counted; `loops` unless given. `instructions` is exact and much slower.
    pub meter: Meter,
}

impl Default for SandboxConfig {
    fn default() -> Self {
        Self {
            memory: ByteSize::mib(256),
            fuel: 10_000_000_000,
            deadline: Duration::from_secs(30),
            grade_fuel: 50_000_000_000,
            grade_deadline: Duration::from_secs(120),
            output: ByteSize::kib(64),
            runtime: RuntimeName::default(),
            wheels: Vec::new(),
            workers: 0,
            restore: Restore::default(),
            audit_every: 0,
            meter: Meter::default(),
        }
    }
}

/// How the policy is updated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainerConfig {
    /// Optimizer steps of the run; 100 unless given.
    pub steps: u64,
    /// Which weights learn; `lora` unless given.
    pub mode: TrainMode,
    /// `AdamW`'s step size after warm-up; 5e-5 unless given, which suits LoRA. Full fine-tuning is
    /// done at about 1e-6.
    pub learning_rate: f64,
    /// Steps over which the step size rises linearly from 0; 0 unless given.
    pub warmup_steps: u64,
    /// `AdamW`'s decoupled weight decay; 0 unless given.
    pub weight_decay: f64,
    /// `AdamW`'s decay of the first moment; 0.9 unless given.
    pub adam_beta1: f64,
    /// `AdamW`'s decay of the second moment; 0.999 unless given.
    pub adam_beta2: f64,
    /// `AdamW`'s ε; 1e-8 unless given.
    pub adam_epsilon: f64,
    /// The norm that gradients are scaled down to; 1.0 unless given.
    pub max_grad_norm: f64,
    /// Which mean of the token losses is taken; `dapo` unless given.
    pub loss: LossType,
    /// How rewards are scaled into advantages; `group` unless given.
    pub scale_rewards: ScaleRewards,
    /// How far a probability ratio may fall below 1 before it is clipped; 0.2 unless given.
    pub clip_low: f64,
    /// How far it may rise above 1; 0.28 unless given (DAPO, arXiv:2503.14476, section 3.1).
    pub clip_high: f64,
    /// Weight of the KL divergence from the base model, which is the policy with its adapter off; 0
    /// unless given, which needs no reference pass.
    pub beta: f64,
    /// Passes over the episodes of a step; 1 unless given, which is on-policy.
    pub num_iterations: usize,
    /// Whether episodes that were cut off by a limit are left out of the loss; false unless given.
    pub mask_truncated: bool,
    /// Tokens of one forward and backward pass, which bounds memory and changes nothing else;
    /// 16384 unless given.
    pub micro_batch_tokens: usize,
    /// The rank of the LoRA matrices; 16 unless given.
    pub lora_rank: usize,
    /// LoRA's scale: the update is multiplied by `lora_alpha / lora_rank`; 32 unless given.
    pub lora_alpha: f64,
    /// The projections that get LoRA matrices; all linear ones of a block unless given.
    pub lora_targets: Vec<String>,
    /// Steps between checkpoints; 10 unless given, 0 for one at the end only. There is always one at
    /// the end.
    pub save_every: u64,
    /// Checkpoints kept, the newest; 2 unless given.
    pub keep_checkpoints: usize,
    /// Whether rewards are shuffled within each group: a control, under which nothing may be
    /// learned; false unless given.
    pub shuffle_rewards: bool,
}

impl Default for TrainerConfig {
    fn default() -> Self {
        Self {
            steps: 100,
            mode: TrainMode::Lora,
            learning_rate: 5e-5,
            warmup_steps: 0,
            weight_decay: 0.0,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_epsilon: 1e-8,
            max_grad_norm: 1.0,
            loss: LossType::Dapo,
            scale_rewards: ScaleRewards::Group,
            clip_low: 0.2,
            clip_high: 0.28,
            beta: 0.0,
            num_iterations: 1,
            mask_truncated: false,
            micro_batch_tokens: 16_384,
            lora_rank: 16,
            lora_alpha: 32.0,
            lora_targets: LORA_TARGETS.map(str::to_owned).to_vec(),
            save_every: 10,
            keep_checkpoints: 2,
            shuffle_rewards: false,
        }
    }
}

/// The linear projections of a Llama or Qwen block, by their names in checkpoints.
const LORA_TARGETS: [&str; 7] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
];

/// Which weights learn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrainMode {
    /// Low-rank matrices beside the frozen projections (Hu et al. 2021, arXiv:2106.09685).
    Lora,
    /// All weights.
    Full,
}

/// Which mean of the token losses is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossType {
    /// Mean over each episode's tokens, then over episodes (Shao et al. 2024, arXiv:2402.03300).
    Grpo,
    /// Mean over all tokens of the step (Yu et al. 2025, arXiv:2503.14476).
    Dapo,
    /// Sum over tokens by a constant length (Liu et al. 2025, arXiv:2503.20783).
    DrGrpo,
}

/// How rewards are scaled into advantages, after their group's mean is taken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleRewards {
    /// By the standard deviation of the group.
    Group,
    /// Not at all.
    None,
}

/// How the policy is measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalConfig {
    /// Steps between evaluations; 0, the default, for one before and one after the run.
    pub every: u64,
    /// Samples of each task; 1 unless given.
    pub samples: usize,
    /// The temperature of the samples; 0, the default, for the likeliest token each time.
    pub temperature: f64,
    /// The `k` of pass@k to report; only 1 unless given.
    pub k: Vec<u32>,
    /// Measure on the first so many tasks only; all unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self {
            every: 0,
            samples: 1,
            temperature: 0.0,
            k: vec![1],
            limit: None,
        }
    }
}
