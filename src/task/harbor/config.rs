//! `task.toml`: what a Harbor task asks for.
//!
//! The fields, their defaults and which values are taken follow Harbor 0.26 (schema 1.0 to 1.4), so
//! that a task means the same here as there. Unknown keys are left alone, as Harbor does; numbers
//! may be written as text. What is refused names the key.

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::lax;

/// The newest schema that is known.
pub const SCHEMA_VERSION: &str = "1.4";

/// The largest `task.toml` that is read; those of the public data sets stay under 16 KiB.
pub(super) const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// A `task.toml`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TaskConfig {
    /// The schema, `1.0` to `1.4`; older files call it `version`.
    pub schema_version: String,
    /// What the registry knows the task by.
    pub task: Option<PackageInfo>,
    /// Whatever its authors say about the task; not read.
    #[serde(with = "lax::any")]
    pub metadata: Map<String, Value>,
    /// How the task is judged.
    pub verifier: VerifierConfig,
    /// How the agent is run.
    pub agent: AgentConfig,
    /// The sandbox.
    pub environment: EnvironmentConfig,
    /// How the reference solution is run.
    pub solution: SolutionConfig,
    /// Where the task came from.
    pub source: Option<String>,
    /// How the rewards of the steps become the task's; `mean` unless given.
    pub multi_step_reward_strategy: Option<StepRewards>,
    /// The steps of a task that has several.
    pub steps: Option<Vec<StepConfig>>,
    /// What is kept of the sandbox.
    pub artifacts: Vec<Artifact>,
    /// The older name of `schema_version`.
    #[serde(skip_serializing)]
    pub(super) version: Option<String>,
}

impl Default for TaskConfig {
    fn default() -> Self {
        Self {
            schema_version: SCHEMA_VERSION.to_owned(),
            task: None,
            metadata: Map::new(),
            verifier: VerifierConfig::default(),
            agent: AgentConfig::default(),
            environment: EnvironmentConfig::default(),
            solution: SolutionConfig::default(),
            source: None,
            multi_step_reward_strategy: None,
            steps: None,
            artifacts: Vec::new(),
            version: None,
        }
    }
}

/// `[task]`: the registry's entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackageInfo {
    /// `owner/name`.
    pub name: String,
    /// Any text, as a rule a semantic version.
    #[serde(default)]
    pub version: Option<String>,
    /// For people.
    #[serde(default)]
    pub description: String,
    /// Who wrote it.
    #[serde(default)]
    pub authors: Vec<Author>,
    /// For searching.
    #[serde(default)]
    pub keywords: Vec<String>,
}

/// An author of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Author {
    /// The name.
    pub name: String,
    /// The address.
    #[serde(default)]
    pub email: Option<String>,
}

/// What a sandbox may reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkMode {
    /// Nothing.
    NoNetwork,
    /// Everything.
    #[default]
    Public,
    /// The hosts in `allowed_hosts`.
    Allowlist,
}

/// A user in the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum User {
    /// By number.
    Id(i64),
    /// By name.
    Name(String),
}

/// `[agent]`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentConfig {
    /// What the agent may reach, where that differs from the environment.
    pub network_mode: Option<NetworkMode>,
    /// Hosts, where `network_mode` is `allowlist`.
    pub allowed_hosts: Option<Vec<String>>,
    /// Seconds that the agent has.
    #[serde(deserialize_with = "lax::optional_float")]
    pub timeout_sec: Option<f64>,
    /// Who the agent runs as; the image's user unless given.
    pub user: Option<User>,
}

/// Where the verifier runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VerifierMode {
    /// In the agent's sandbox.
    Shared,
    /// In a sandbox of its own, which sees only the artifacts.
    Separate,
}

/// `[verifier]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct VerifierConfig {
    /// What the verifier may reach, where that differs from its environment.
    pub network_mode: Option<NetworkMode>,
    /// Hosts, where `network_mode` is `allowlist`.
    pub allowed_hosts: Option<Vec<String>>,
    /// Seconds that the verifier has; 600 unless given.
    #[serde(deserialize_with = "lax::float")]
    pub timeout_sec: f64,
    /// Environment variables of the verifier.
    pub env: IndexMap<String, String>,
    /// Who the verifier runs as.
    pub user: Option<User>,
    /// Where it runs; `separate` where `environment` is given, else `shared`.
    pub environment_mode: Option<VerifierMode>,
    /// The sandbox of a separate verifier; a copy of the task's unless given.
    pub environment: Option<EnvironmentConfig>,
    /// Commands run after the agent and before the artifacts are taken.
    pub collect: Vec<CollectConfig>,
}

impl Default for VerifierConfig {
    fn default() -> Self {
        Self {
            network_mode: None,
            allowed_hosts: None,
            timeout_sec: 600.0,
            env: IndexMap::new(),
            user: None,
            environment_mode: None,
            environment: None,
            collect: Vec::new(),
        }
    }
}

/// `[[verifier.collect]]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CollectConfig {
    /// The shell command.
    pub command: String,
    /// The service it runs in; `main` is the agent's sandbox.
    #[serde(default = "main_service")]
    pub service: String,
    /// Seconds that it has; 60 unless given.
    #[serde(default = "a_minute", deserialize_with = "lax::float")]
    pub timeout_sec: f64,
    /// Who it runs as.
    #[serde(default)]
    pub user: Option<User>,
}

fn main_service() -> String {
    "main".to_owned()
}

fn a_minute() -> f64 {
    60.0
}

/// `[solution]`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SolutionConfig {
    /// Environment variables of the reference solution.
    pub env: IndexMap<String, String>,
}

/// The operating system of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskOs {
    /// Linux.
    #[default]
    Linux,
    /// Windows, which no tier runs.
    Windows,
}

/// `[environment]`: the sandbox of a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EnvironmentConfig {
    /// What it may reach; given once the file is read, `public` where it says nothing.
    pub network_mode: Option<NetworkMode>,
    /// Hosts, where `network_mode` is `allowlist`.
    pub allowed_hosts: Option<Vec<String>>,
    /// Seconds that building the image may take; 600 unless given.
    #[serde(deserialize_with = "lax::float")]
    pub build_timeout_sec: f64,
    /// An image that exists; without one `environment/Dockerfile` is built.
    pub docker_image: Option<String>,
    /// The operating system.
    #[serde(deserialize_with = "lax::os")]
    pub os: TaskOs,
    /// Processors.
    #[serde(
        serialize_with = "lax::whole_or_float",
        deserialize_with = "lax::optional_float"
    )]
    pub cpus: Option<f64>,
    /// MiB of memory.
    #[serde(deserialize_with = "lax::optional_whole")]
    pub memory_mb: Option<i64>,
    /// MiB of disk.
    #[serde(deserialize_with = "lax::optional_whole")]
    pub storage_mb: Option<i64>,
    /// Graphics processors.
    #[serde(deserialize_with = "lax::optional_whole")]
    pub gpus: Option<i64>,
    /// The kinds of graphics processor that will do.
    pub gpu_types: Option<Vec<String>>,
    /// A slice of tensor processors.
    pub tpu: Option<TpuSpec>,
    /// Tool servers for the agent.
    pub mcp_servers: Vec<McpServer>,
    /// Environment variables, in which `${NAME}` is taken from the host.
    pub env: IndexMap<String, String>,
    /// The folder of the agent's skills in the sandbox.
    pub skills_dir: Option<String>,
    /// What has to succeed before the agent starts.
    pub healthcheck: Option<Healthcheck>,
    /// The folder that commands run in.
    pub workdir: Option<String>,
    /// Before schema 1.2: whether the network is open.
    #[serde(skip_serializing)]
    pub(super) allow_internet: Option<bool>,
    /// Before `memory_mb`: `2G`.
    #[serde(skip_serializing)]
    pub(super) memory: Option<toml::Value>,
    /// Before `storage_mb`: `10G`.
    #[serde(skip_serializing)]
    pub(super) storage: Option<toml::Value>,
}

impl Default for EnvironmentConfig {
    fn default() -> Self {
        Self {
            network_mode: None,
            allowed_hosts: None,
            build_timeout_sec: 600.0,
            docker_image: None,
            os: TaskOs::Linux,
            cpus: None,
            memory_mb: None,
            storage_mb: None,
            gpus: None,
            gpu_types: None,
            tpu: None,
            mcp_servers: Vec::new(),
            env: IndexMap::new(),
            skills_dir: None,
            healthcheck: None,
            workdir: None,
            allow_internet: None,
            memory: None,
            storage: None,
        }
    }
}

/// A slice of tensor processors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TpuSpec {
    /// The kind.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its shape, as `2x4`.
    pub topology: String,
}

/// A tool server that the agent may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct McpServer {
    /// The name.
    pub name: String,
    /// `stdio`, `sse` or `streamable-http`.
    #[serde(default = "sse")]
    pub transport: String,
    /// Where it is, for HTTP.
    #[serde(default)]
    pub url: Option<String>,
    /// What starts it, for `stdio`.
    #[serde(default)]
    pub command: Option<String>,
    /// The arguments of `command`.
    #[serde(default)]
    pub args: Vec<String>,
    /// HTTP headers.
    #[serde(default, skip_serializing_if = "IndexMap::is_empty")]
    pub headers: IndexMap<String, String>,
}

fn sse() -> String {
    "sse".to_owned()
}

/// A command that says whether the sandbox is ready.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Healthcheck {
    /// The shell command; 0 is ready.
    pub command: String,
    /// Seconds between tries.
    #[serde(default = "five", deserialize_with = "lax::float")]
    pub interval_sec: f64,
    /// Seconds that one try may take.
    #[serde(default = "thirty", deserialize_with = "lax::float")]
    pub timeout_sec: f64,
    /// Seconds at the start in which failures do not count.
    #[serde(default, deserialize_with = "lax::float")]
    pub start_period_sec: f64,
    /// Seconds between tries in that time.
    #[serde(default = "five", deserialize_with = "lax::float")]
    pub start_interval_sec: f64,
    /// Failures in a row after which the sandbox is given up.
    #[serde(default = "three", deserialize_with = "lax::whole")]
    pub retries: i64,
}

fn five() -> f64 {
    5.0
}

fn thirty() -> f64 {
    30.0
}

fn three() -> i64 {
    3
}

/// `[[steps]]`: a step of a task that has several.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepConfig {
    /// The folder under `steps/`.
    pub name: String,
    /// How the agent is run in this step.
    #[serde(default)]
    pub agent: AgentConfig,
    /// How the step is judged.
    #[serde(default)]
    pub verifier: VerifierConfig,
    /// The reward below which the later steps are left out.
    #[serde(default)]
    pub min_reward: Option<MinReward>,
    /// What has to succeed before the step starts.
    #[serde(default)]
    pub healthcheck: Option<Healthcheck>,
    /// What is kept after this step, besides the task's.
    #[serde(default)]
    pub artifacts: Vec<Artifact>,
}

/// What a step has to earn for the next one to be run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum MinReward {
    /// Of the reward called `reward`.
    Reward(#[serde(deserialize_with = "lax::float")] f64),
    /// Of each reward named.
    ByName(IndexMap<String, f64>),
}

/// How the rewards of the steps become the task's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StepRewards {
    /// The mean of the steps that were judged.
    Mean,
    /// The last step's.
    Final,
}

/// Something that is kept of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Artifact {
    /// A path.
    Path(String),
    /// A path with more to say about it.
    Full(ArtifactConfig),
}

impl Artifact {
    /// Returns the path in the sandbox.
    #[must_use]
    pub fn source(&self) -> &str {
        match self {
            Self::Path(source) => source,
            Self::Full(full) => &full.source,
        }
    }

    /// Returns the service that it is taken from, where one is named.
    #[must_use]
    pub fn service(&self) -> Option<&str> {
        match self {
            Self::Path(_) => None,
            Self::Full(full) => full.service.as_deref(),
        }
    }
}

/// An artifact with more to say about it than its path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtifactConfig {
    /// The path in the sandbox.
    pub source: String,
    /// The path among the artifacts; the source's own unless given.
    #[serde(default)]
    pub destination: Option<String>,
    /// Patterns of what is left out.
    #[serde(default)]
    pub exclude: Vec<String>,
    /// The service that it is taken from.
    #[serde(default)]
    pub service: Option<String>,
}

impl TaskConfig {
    /// Returns where the verifier of a step runs, or of the task where `step` is none.
    #[must_use]
    pub fn verifier_mode(&self, step: Option<&StepConfig>) -> VerifierMode {
        let of = |verifier: &VerifierConfig| {
            let implied = verifier
                .environment
                .as_ref()
                .map(|_| VerifierMode::Separate);
            verifier.environment_mode.or(implied)
        };
        step.and_then(|step| of(&step.verifier))
            .or_else(|| of(&self.verifier))
            .unwrap_or(VerifierMode::Shared)
    }

    /// Returns the sandbox of a separate verifier; none where it shares the agent's.
    #[must_use]
    pub fn verifier_environment<'a>(
        &'a self,
        step: Option<&'a StepConfig>,
    ) -> Option<&'a EnvironmentConfig> {
        (self.verifier_mode(step) == VerifierMode::Separate).then(|| {
            step.and_then(|step| step.verifier.environment.as_ref())
                .or(self.verifier.environment.as_ref())
                .unwrap_or(&self.environment)
        })
    }
}

impl EnvironmentConfig {
    /// Returns what the sandbox may reach.
    #[must_use]
    pub fn network(&self) -> NetworkMode {
        self.network_mode.unwrap_or_default()
    }
}
