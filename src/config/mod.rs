//! The run file: defaults < file < `--set`, a preset right below the one that names it; validated with
//! key paths.
//!
//! A run is described by one TOML file, `run.toml`, and read with [`RunConfig::load`]. Every key has
//! a default except `model.path` and `task.path`, or `env.episodes` in its place; a [`Preset`] replaces defaults, and
//! `--set section.key=value` replaces single keys. In place of `task.path` a run may name several
//! [environments](EnvironmentConfig).
//! Unknown keys are refused with the nearest known one, and [`RunConfig::validate`] reports all
//! values that make no sense together, each with its key, its value and what to do.
//! [`RunConfig::to_toml`] writes the resolved file, which reads back as the same run.
//!
//! The names are those of TRL, verl and vLLM where they agree; `trainer.clip_low` and `clip_high`
//! are TRL's `epsilon` and `epsilon_high`, `rollout.group_size` its `num_generations`.

mod actor;
mod environment;
mod error;
mod image_build;
mod kubernetes;
mod layers;
mod openenv_actors;
mod preset;
mod remote;
mod schema;
mod secrets;
mod substrate;
mod units;
mod validate;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use crate::chat::ToolCallFormat;
use crate::grader::RewardTerms;
use crate::sandbox::{Meter, Restore, RuntimeName};
use crate::task::Split;

pub use actor::{ActorBackendName, ActorConfig, SwebenchBonusConfig};
pub use environment::EnvironmentConfig;
pub use error::{ConfigError, Issue};
pub use image_build::ImageBuildConfig;
pub use kubernetes::{KubernetesConfig, TolerationConfig};
pub use layers::sets_name_environments;
pub use openenv_actors::{DeclaredIsolation, OpenEnvActorConfig};
pub use preset::Preset;
pub use remote::{ActionStyle, RemoteConfig, RemoteKind, RewardRule, TlsConfig};
pub(crate) use secrets::hide_secrets;
pub use substrate::{SubstrateConfig, TemplateConfig};

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
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Settings of a paper or another trainer to start from; none unless given. Named in a file, they
    /// lie under all its other keys; named by `--set`, over the file and under every other `--set`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<Preset>,
    /// Seeds task order, sampling, adapter initialization and bootstrap; 0 unless given.
    pub seed: u64,
    /// The policy.
    pub model: ModelConfig,
    /// What it is asked to solve.
    pub task: TaskConfig,
    /// Environments of another server, in which the policy acts instead of in those here; none unless given.
    /// One of several environments has it as a table of its own, `environments.NAME.env`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<RemoteConfig>,
    /// Several environments in place of `task.path`, each with tasks, a weight and settings of its own.
    /// The groups of the run's steps are divided among them by their weights. The ids of an environment's
    /// tasks begin with its name and a slash, `reward/NAME`, `pass_rate/NAME` and `groups/NAME` in
    /// `metrics.jsonl` are about it, and it is measured by itself, too.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub environments: BTreeMap<String, EnvironmentConfig>,
    /// How episodes are sampled.
    pub rollout: RolloutConfig,
    /// What a submission earns; its keys are those of [`RewardTerms`].
    pub reward: RewardTerms,
    /// What the policy's code may use.
    pub sandbox: SandboxConfig,
    /// Where tasks that need a shell or a repository run.
    pub actor: ActorConfig,
    /// How the policy is updated.
    pub trainer: TrainerConfig,
    /// How the policy is measured.
    pub eval: EvalConfig,
    /// Where metrics go besides the run folder's `metrics.jsonl`.
    pub log: LogConfig,
    /// What is done about steps that look wrong.
    pub watch: WatchConfig,
}

/// What is done about steps that look wrong: what counts as such, and for each kind `warn`, `skip` or
/// `stop`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WatchConfig {
    /// About a gradient that is not a number; `stop` unless given. It never reaches the weights.
    pub not_finite: Response,
    /// About log-probabilities further than `trainer.max_kl_sample_train` from the sampler's; `stop`
    /// unless given.
    pub drift: Response,
    /// About a token whose probability grew by more than `max_ratio` within a step; `warn` unless given.
    pub ratio: Response,
    /// About `flat_steps` steps in a row without a group that teaches anything; `warn` unless given.
    pub flat: Response,
    /// About more than `max_truncated` of the episodes cut off by a limit; `warn` unless given.
    pub truncated: Response,
    /// About more than `max_unscorable` of the episodes without a score; `warn` unless given.
    pub unscorable: Response,
    /// About a moving mean of the reward more than `max_reward_drop` below its highest; `warn` unless
    /// given. It cannot be skipped: a policy that learns nothing more would never rise again.
    pub collapse: Response,
    /// The largest ratio; 100 unless given.
    pub max_ratio: f64,
    /// Steps in a row; 5 unless given.
    pub flat_steps: u64,
    /// The largest share; 0.5 unless given.
    pub max_truncated: f64,
    /// The largest share; 0.25 unless given.
    pub max_unscorable: f64,
    /// The largest fall; 0.5 unless given.
    pub max_reward_drop: f64,
}

impl Default for WatchConfig {
    fn default() -> Self {
        Self {
            not_finite: Response::Stop,
            drift: Response::Stop,
            ratio: Response::Warn,
            flat: Response::Warn,
            truncated: Response::Warn,
            unscorable: Response::Warn,
            collapse: Response::Warn,
            max_ratio: 100.0,
            flat_steps: 5,
            max_truncated: 0.5,
            max_unscorable: 0.25,
            max_reward_drop: 0.5,
        }
    }
}

/// What is done about a step that looks wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Response {
    /// Say so and go on.
    Warn,
    /// Say so and learn nothing from the step.
    Skip,
    /// Save the run as it was before the step, and end it.
    Stop,
}

/// Where metrics go besides `metrics.jsonl`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// Write an event file for `TensorBoard` into the run folder's `tensorboard/`; not unless given.
    pub tensorboard: bool,
    /// A URL that rows are posted to, as `{"run": NAME, "rows": [...]}`; the environment variable
    /// `WARDIAN_LOG_TOKEN` holds a bearer token if it wants one; none unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<String>,
}

/// The policy: its checkpoint and how it is held.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
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
    /// What a CPU multiplies with frozen weights in; `f32` unless given.
    pub compute_dtype: ComputeDtype,
    /// Where the model runs; `auto` unless given.
    pub device: Device,
}

/// What weights are held in.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// `bf16` on a GPU, `f32` on a CPU unless `compute_dtype` says otherwise.
    #[default]
    Auto,
    /// 32-bit floats.
    F32,
    /// bfloat16; losses and log-probabilities stay in `f32`. On a CPU all computation does, and nothing
    /// is lost of a checkpoint in bfloat16.
    Bf16,
    /// 8-bit integers with a scale for each 32 inputs, on a CPU: for frozen weights, to serve them or to
    /// train an adapter. All computation is in `f32`.
    Int8,
}

impl Dtype {
    /// Returns the name, as in a run file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }
}

/// What a CPU multiplies with frozen weights in. A GPU computes in what weights are held in.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum ComputeDtype {
    /// 32-bit floats.
    #[default]
    F32,
    /// bfloat16: weights are held in it, and what they are multiplied with is rounded to it; sums, and
    /// everything else, stay in `f32`. For frozen weights, to serve them or to train an adapter. Faster
    /// where the processor has AVX512-BF16, slower where it has not, to the same bits.
    Bf16,
}

/// Where a model runs.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
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
    /// Which tasks a step draws; `epochs` unless given.
    pub curriculum: Curriculum,
}

/// Which tasks a step draws.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Curriculum {
    /// All in turn, each epoch in another order.
    #[default]
    Epochs,
    /// The more often the nearer to a half of its recent episodes pass; new tasks as if half did. None
    /// falls below a tenth of the largest weight.
    PassRate,
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
            curriculum: Curriculum::Epochs,
        }
    }
}

/// How episodes are sampled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
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
    /// Tokens that an episode may sample in one step, after which it waits and goes on in the next with the
    /// weights of then (partial rollouts); a step learns from the groups that are whole. Without bound
    /// unless given: a step waits for its longest episode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_step_tokens: Option<usize>,
    /// With `max_step_tokens`, steps after which a group is waited for; 4 unless given.
    pub max_off_policy_steps: u64,
    /// Wall-clock time of an episode in one step, its waits for others included; without bound unless
    /// given. An episode that meets it is left out of learning: it says something about the machine.
    /// Measurements have none.
    #[serde(
        with = "units::optional_duration",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<units::DurationText>")]
    pub deadline: Option<Duration>,
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
    #[schemars(with = "units::SizeText")]
    pub tool_output: ByteSize,
    /// A program that acts in the place of the turns and tools here; none unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentConfig>,
}

/// An agent that is a program of its own. Each episode starts it with the address and the key of a proxy
/// in front of the policy, and with a task; what it leaves as its answer is graded, and what the policy
/// sampled for it is learned from (docs/proxy.md). The turns, the tools and the system prompt are its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AgentConfig {
    /// The program and its arguments; has to be given.
    pub command: Vec<String>,
    /// Variables of its environment besides those of its task, `PATH` and `LANG`; none unless given.
    pub env: BTreeMap<String, String>,
    /// What keeps it from the rest of the machine; `bubblewrap` unless given.
    pub isolation: AgentIsolation,
    /// Paths that a sandbox shows it, to read, besides the system's programs; none unless given.
    pub mounts: Vec<PathBuf>,
    /// Programs at a time; 8 unless given. Those whose tasks need an actor wait for one of `actor.max_actors`, in no
    /// time of theirs.
    pub concurrency: usize,
    /// The longest that one may take, after which what it has left is graded; 10m unless given.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub timeout: Duration,
    /// Calls of the policy in an episode, after which it is told to stop; 64 unless given, 0 for no limit.
    pub max_model_calls: u64,
}

impl Default for AgentConfig {
    fn default() -> Self {
        Self {
            command: Vec::new(),
            env: BTreeMap::new(),
            isolation: AgentIsolation::Bubblewrap,
            mounts: Vec::new(),
            concurrency: 8,
            timeout: Duration::from_mins(10),
            max_model_calls: 64,
        }
    }
}

/// What keeps an agent from the rest of the machine.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum AgentIsolation {
    /// Namespaces, by the program `bwrap`: it sees the system's programs and a folder of its own, and has the
    /// machine's network.
    #[default]
    Bubblewrap,
    /// Nothing: it may do what the user may.
    None,
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
            max_step_tokens: None,
            max_off_policy_steps: 4,
            deadline: None,
            temperature: 1.0,
            enable_thinking: false,
            max_thinking_tokens: None,
            tool_call_format: None,
            system_prompt: None,
            tool_output: ByteSize::kib(4),
            agent: None,
        }
    }
}

/// What the policy's code may use, in each call of a tool and each grading.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxConfig {
    /// Linear memory of an instance, interpreter included; 256MiB unless given.
    #[serde(with = "units::byte_size")]
    #[schemars(with = "units::SizeText")]
    pub memory: ByteSize,
    /// Fuel, in units of work of about one WebAssembly operator; 10 billion unless given, mostly
    /// one to three seconds of Python. It ends a program at the same point on every machine, so
    /// keep the deadlines well above it.
    pub fuel: u64,
    /// Wall-clock time of one call; 30s unless given. An episode that meets it is left out of
    /// learning: it says something about the machine.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub deadline: Duration,
    /// Fuel of a submission while it is graded; 50 billion unless given, which every reference
    /// solution of MBPP keeps to. A submission that never ends uses all of it, in five to fifteen
    /// seconds: give less where tasks are small.
    pub grade_fuel: u64,
    /// Wall-clock time for all tests of one submission; 2m unless given.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub grade_deadline: Duration,
    /// Standard output and error kept of one tool call, each; 64KiB unless given.
    #[serde(with = "units::byte_size")]
    #[schemars(with = "units::SizeText")]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
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
    /// How the step size goes on after warm-up; `constant` unless given.
    pub lr_schedule: LrSchedule,
    /// Which loss is taken; `dapo` unless given.
    pub loss: LossType,
    /// What a reward is compared with; `group` unless given.
    pub advantage: AdvantageEstimator,
    /// What advantages are divided by with `advantage = "group"`; `group` unless given.
    pub scale_rewards: ScaleRewards,
    /// Added to the standard deviation that advantages are divided by; 1e-4 unless given, as in TRL;
    /// verl has 1e-6.
    pub advantage_epsilon: f64,
    /// With `advantage = "gae"` or `"reinforce_plus_plus"`, the factor of what the next sampled token
    /// earns; 1 unless given.
    pub gamma: f64,
    /// With `advantage = "gae"`, how far estimates look past the next value, from 0, which trusts values
    /// alone, to 1, which trusts rewards alone; 0.95 unless given. verl has 1.
    pub gae_lambda: f64,
    /// The value head's step size, which moves with `learning_rate`'s schedule; 1e-4 unless given.
    pub value_learning_rate: f64,
    /// How far a value may move in a step before its loss stops falling; 0.2 unless given.
    pub value_clip: f64,
    /// What the value loss is multiplied by on its way into the policy's weights; 0 unless given, which
    /// trains the value head alone.
    pub value_trunk_coef: f64,
    /// Whether parts of the reward are summed before they are compared, or each compared by itself;
    /// `sum` unless given.
    pub reward_aggregation: RewardAggregation,
    /// How far a probability ratio may fall below 1 before it is clipped; 0.2 unless given. GSPO's
    /// ratios are of whole sequences, and its paper has 3e-4.
    pub clip_low: f64,
    /// How far it may rise above 1; 0.28 unless given (DAPO, arXiv:2503.14476, section 3.1); 4e-4 in
    /// GSPO's paper.
    pub clip_high: f64,
    /// With a clipped loss, the multiple of a negative advantage that a token's loss is bounded by
    /// (dual clip, arXiv:1912.09729); no bound unless given. verl has 3.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dual_clip: Option<f64>,
    /// With `loss = "cispo"`, the smallest weight of a token, which is its ratio; 0 unless given. For
    /// verl's `clip_ratio_low` of 0.2 give 0.8.
    pub cispo_min: f64,
    /// With `loss = "cispo"`, the largest weight; 5 unless given, as TRL's `epsilon_high`. For verl's
    /// `clip_ratio_high` of 0.28 give 1.28.
    pub cispo_max: f64,
    /// With `loss = "sapo"`, the steepness of the gate for positive advantages; 1 unless given.
    pub sapo_tau_positive: f64,
    /// With `loss = "sapo"`, the steepness for other advantages; 1.05 unless given.
    pub sapo_tau_negative: f64,
    /// With `loss = "dppo"`, how far a token's probability may move, down with a negative advantage
    /// and up with a positive one, before it is left out; 0.2 unless given.
    pub dppo_threshold: f64,
    /// With `loss = "dppo"`, the weight of the squared log ratio; 1e-3 unless given.
    pub dppo_kl: f64,
    /// Weight of the KL divergence from the base model, which is the policy with its adapter off; 0
    /// unless given, which needs no reference pass.
    pub beta: f64,
    /// Which estimate of the divergence is taken; `k3` unless given.
    pub kl_estimator: KlEstimator,
    /// Multiply the divergence by the ratio, so that its gradient is that of the reverse KL
    /// (arXiv:2512.02556); true unless given, as in TRL 1.16.
    pub kl_bias_correction: bool,
    /// Take `beta` times the divergence of an answer, by the k1 estimate, off its reward instead of
    /// adding it to the loss; false unless given.
    pub kl_in_reward: bool,
    /// Weight of the mean entropy of the sampled tokens, which is added to what is maximised; 0 unless
    /// given.
    pub entropy_coef: f64,
    /// Weights for tokens that were sampled with other log-probabilities than the trainer computes;
    /// `off` unless given: here both are computed alike.
    pub sampler_correction: SamplerCorrection,
    /// The largest such weight; 3 unless given.
    pub sampler_correction_max: f64,
    /// The smallest such weight; none unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampler_correction_min: Option<f64>,
    /// Leave out answers with a negative advantage whose mean difference between the sampler's
    /// log-probabilities and the trainer's is above this (arXiv:2512.02556, equation 9); none unless
    /// given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub off_policy_threshold: Option<f64>,
    /// Stop where the mean difference between the sampler's log-probabilities and the trainer's is
    /// above this in a step's first pass: it should be 0, and a run that goes on would learn from
    /// noise; 0.05 unless given.
    pub max_kl_sample_train: f64,
    /// Draw further tasks in place of those whose rewards are all alike, until a step has its groups
    /// (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2); false unless given.
    pub dynamic_sampling: bool,
    /// Draws of `rollout.groups_per_step` tasks that one step may make for that; 4 unless given. After
    /// them it makes do with what it has.
    pub max_draws: u64,
    /// Sampled tokens at which an answer has lost all of `overlong_weight` (DAPO, arXiv:2503.14476,
    /// equation 13); no penalty unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlong_limit: Option<usize>,
    /// Tokens below that limit over which the penalty grows; 512 unless given.
    pub overlong_margin: usize,
    /// What an answer loses at the limit; 1 unless given.
    pub overlong_weight: f64,
    /// Passes over the episodes of a step; 1 unless given, which is on-policy.
    pub num_iterations: usize,
    /// Steps that an episode's policy may lie behind the one that learns from it. At 0, which is the
    /// default, a step samples its episodes and then learns from them. At 1 the next step's episodes are
    /// sampled while a step computes its gradient, with the weights that it has; ratios then compare with
    /// that policy, or with `sampler_correction` with the one before the update, and the correction's
    /// weights stand for the step between them.
    pub async_level: u64,
    /// The most processes that can share the run; 1 unless given. A step's groups are divided into so
    /// many parts, which are learned from each by itself, so that on CPUs the numbers are the same, to the
    /// bit, for any number of processes up to it.
    pub max_processes: usize,
    /// Whether episodes that were cut off by a limit are left out of the loss; false unless given.
    pub mask_truncated: bool,
    /// Tokens of one forward and backward pass, which bounds memory and changes nothing else;
    /// 16384 unless given.
    pub micro_batch_tokens: usize,
    /// Memory that the run is to stay below: says the tokens of a forward and backward pass,
    /// `micro_batch_tokens` at the most, and whether layers are run again in it, first by the calculation
    /// that `wardian plan` prints, then, where a pass is measured to take more, by halving; no budget
    /// unless given.
    #[serde(
        with = "units::optional_byte_size",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<units::SizeText>")]
    pub memory_budget: Option<ByteSize>,
    /// The rank of the LoRA matrices; 16 unless given.
    pub lora_rank: usize,
    /// LoRA's scale: the update is multiplied by `lora_alpha / lora_rank`; 32 unless given.
    pub lora_alpha: f64,
    /// Multiply it by `lora_alpha / sqrt(lora_rank)` instead (rsLoRA, arXiv:2312.03732), so that its size
    /// does not fall with the rank; false unless given.
    pub use_rslora: bool,
    /// The projections that get LoRA matrices, by their names in checkpoints, or `all-linear`; all linear
    /// ones of a block unless given.
    #[serde(deserialize_with = "units::one_or_many")]
    #[schemars(with = "units::OneOrMany")]
    pub lora_targets: Vec<String>,
    /// The share of the inputs of LoRA's updates that is dropped while they are trained, and only then; 0
    /// unless given.
    pub lora_dropout: f64,
    /// Modules that are trained in full beside the LoRA matrices and saved with them, `lm_head` or
    /// `embed_tokens` or both; none unless given. The base's stay as the reference.
    #[serde(deserialize_with = "units::one_or_many")]
    #[schemars(with = "units::OneOrMany")]
    pub modules_to_save: Vec<String>,
    /// Train head and embedding as one in `modules_to_save` where the model has one matrix for both; false
    /// unless given, as in PEFT: they part ways.
    pub ensure_weight_tying: bool,
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
            lr_schedule: LrSchedule::Constant,
            loss: LossType::Dapo,
            advantage: AdvantageEstimator::Group,
            scale_rewards: ScaleRewards::Group,
            advantage_epsilon: 1e-4,
            gamma: 1.0,
            gae_lambda: 0.95,
            value_learning_rate: 1e-4,
            value_clip: 0.2,
            value_trunk_coef: 0.0,
            reward_aggregation: RewardAggregation::Sum,
            clip_low: 0.2,
            clip_high: 0.28,
            dual_clip: None,
            cispo_min: 0.0,
            cispo_max: 5.0,
            sapo_tau_positive: 1.0,
            sapo_tau_negative: 1.05,
            dppo_threshold: 0.2,
            dppo_kl: 1e-3,
            beta: 0.0,
            kl_estimator: KlEstimator::K3,
            kl_bias_correction: true,
            kl_in_reward: false,
            entropy_coef: 0.0,
            sampler_correction: SamplerCorrection::Off,
            sampler_correction_max: 3.0,
            sampler_correction_min: None,
            off_policy_threshold: None,
            max_kl_sample_train: 0.05,
            dynamic_sampling: false,
            max_draws: 4,
            overlong_limit: None,
            overlong_margin: 512,
            overlong_weight: 1.0,
            num_iterations: 1,
            async_level: 0,
            max_processes: 1,
            mask_truncated: false,
            micro_batch_tokens: 16_384,
            memory_budget: None,
            lora_rank: 16,
            lora_alpha: 32.0,
            use_rslora: false,
            lora_targets: LORA_TARGETS.map(str::to_owned).to_vec(),
            lora_dropout: 0.0,
            modules_to_save: Vec::new(),
            ensure_weight_tying: false,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TrainMode {
    /// Low-rank matrices beside the frozen projections (Hu et al. 2021, arXiv:2106.09685).
    Lora,
    /// All weights.
    Full,
}

/// How a step size goes on after warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LrSchedule {
    /// It stays.
    Constant,
    /// It falls along a line to 0 at the run's end.
    Linear,
    /// It falls along half a cosine to 0 at the run's end.
    Cosine,
}

/// Which loss is taken: how ratios are bounded, and which mean of the token losses is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LossType {
    /// Clipped ratios; mean over each episode's tokens, then over episodes (Shao et al. 2024,
    /// arXiv:2402.03300).
    Grpo,
    /// Clipped ratios; mean over all tokens of the step (Yu et al. 2025, arXiv:2503.14476).
    Dapo,
    /// What TRL calls so takes the mean over the tokens of a micro-batch. Here micro-batches change
    /// nothing, so it is `dapo`.
    Bnpo,
    /// Clipped ratios; sum over tokens by a constant length (Liu et al. 2025, arXiv:2503.20783).
    DrGrpo,
    /// Clipped ratios of whole sequences; mean over episodes (Zheng et al. 2025, arXiv:2507.18071).
    Gspo,
    /// Bounded ratios as weights of the log-probabilities, so that no token loses its gradient; mean
    /// over all tokens (`MiniMax`-M1, arXiv:2506.13585).
    Cispo,
    /// Ratios through a soft gate; mean over each episode's tokens, then over episodes
    /// (arXiv:2511.20347).
    Sapo,
    /// Ratios bounded by how far the probability moves; mean over all tokens (arXiv:2602.04879).
    Dppo,
}

/// What a reward is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageEstimator {
    /// The mean of its group (GRPO; Dr. GRPO with `scale_rewards = "none"`).
    Group,
    /// The mean of the others (RLOO, arXiv:2402.14740).
    Rloo,
    /// The mean of the others, divided by their standard deviation.
    LeaveOneOut,
    /// The mean of its group, divided by it (`MaxRL`, arXiv:2602.02710); for rewards that are not
    /// negative.
    MaxRl,
    /// The mean of its group, whitened over the step's tokens (arXiv:2501.03262).
    ReinforcePlusPlusBaseline,
    /// Nothing: each token has what the episode still earns, whitened over the step's tokens
    /// (REINFORCE++, arXiv:2501.03262). With `kl_in_reward` each token pays for its own divergence.
    ReinforcePlusPlus,
    /// What a value head expects: each token has its generalised advantage estimate
    /// (arXiv:1506.02438), whitened over the step's tokens: PPO.
    Gae,
}

impl AdvantageEstimator {
    /// Returns whether tokens are credited one by one, rather than episodes compared with their group.
    #[must_use]
    pub fn is_token_level(self) -> bool {
        matches!(self, Self::ReinforcePlusPlus | Self::Gae)
    }
}

/// How rewards are scaled into advantages, after their group's mean is taken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ScaleRewards {
    /// By the standard deviation of the group.
    Group,
    /// By the standard deviation of all rewards of the step (arXiv:2508.08221).
    Batch,
    /// Not at all.
    None,
}

/// How several parts of a reward come together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RewardAggregation {
    /// They are summed by weight and the sum is compared with the group's.
    Sum,
    /// Each is compared with the group's by itself, and then they are summed by weight (GDPO,
    /// arXiv:2601.05242).
    Gdpo,
}

/// How the divergence from the reference is estimated from a sampled token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KlEstimator {
    /// `log p - log ref`.
    K1,
    /// Half its square.
    K2,
    /// `ref / p - 1 - log(ref / p)`.
    K3,
}

/// Weights for tokens that were sampled with other log-probabilities than the trainer computes, by
/// TRL's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SamplerCorrection {
    /// No weights.
    Off,
    /// Each token's ratio, at most `sampler_correction_max`.
    TokenTruncate,
    /// Each token's ratio; tokens beyond the bounds are left out.
    TokenMask,
    /// The product over the answer, at most `sampler_correction_max`.
    SequenceTruncate,
    /// The product over the answer; answers beyond the bounds are left out.
    SequenceMask,
    /// The geometric mean over the answer; answers beyond the bounds are left out.
    GeometricMask,
}

/// How the policy is measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
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
