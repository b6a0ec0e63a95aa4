//! Actors: where tasks that need a shell or a repository run.

use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use super::image_build::{self, ImageBuildConfig};
use super::kubernetes::{self, KubernetesConfig};
use super::openenv_actors::{self, OpenEnvActorConfig};
use super::substrate::{self, SubstrateConfig};
use super::validate::Issues;
use super::{RunConfig, units};

/// The longest command that a run file may allow.
const MAX_TIMEOUT: Duration = Duration::from_hours(2);
/// The fewest CPUs that let anything be run.
const MIN_CPUS: f64 = 0.01;
/// More CPUs than any machine has.
const MAX_CPUS: f64 = 4096.0;
/// More rollouts than any machine has memory for the actors of.
const MAX_ACTORS: usize = 4096;

/// Where the tasks of Harbor and SWE-bench run: in actors, small Linuxes with a shell and without a network
/// (docs/heavy-tier.md). Other tasks have none and need none of this.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ActorConfig {
    /// What keeps their programs in; `auto` unless given.
    pub backend: ActorBackendName,
    /// What actors start from: `host` for the programs of this machine, or a folder with a root filesystem. It
    /// stands in for the image of every task. Unless given, each task starts from its own image, which backends
    /// of this machine have only by `image_build`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root: Option<String>,
    /// An image of a registry that stands in for that of every task, for backends of clusters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// How images of tasks are built that are not there; nothing is built unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_build: Option<ImageBuildConfig>,
    /// A folder with `ID/testbed`, the repository at its base, and `ID/deps`, what its tests need, for each
    /// instance of SWE-bench; in the image unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repositories: Option<PathBuf>,
    /// Rollouts that have an actor at a time; 8 unless given. Others wait for one, at their first call of a tool or,
    /// where an agent plays them, before it begins.
    /// A verifier of its own is one more for as long as it takes.
    pub max_actors: usize,
    /// Memory of an actor, where its task does not say; 2GiB unless given.
    #[serde(with = "units::byte_size")]
    #[schemars(with = "units::SizeText")]
    pub memory: ByteSize,
    /// What an actor may write to files, where its task does not say; 2GiB unless given.
    #[serde(with = "units::byte_size")]
    #[schemars(with = "units::SizeText")]
    pub disk: ByteSize,
    /// What the artifacts of a Harbor task may hold together, which are handed to a verifier of its own; 256MiB
    /// unless given. Of each rollout that is judged as much is in memory, a few times over. Where it is more than
    /// 256MiB, a folder that a task brings to its actor may hold as much, too.
    #[serde(with = "units::byte_size")]
    #[schemars(with = "units::SizeText")]
    pub artifacts: ByteSize,
    /// CPUs that an actor may use, where its task does not say; 1 unless given, and parts of one will do. What it
    /// is kept to it by depends on the backend (docs/heavy-tier.md); templates of Substrate have a key of their own.
    pub cpus: f64,
    /// Processes and threads of an actor at a time; 512 unless given.
    pub processes: u32,
    /// The longest that a command of the policy may take; 1m unless given. What it started ends with it, and
    /// the policy is told.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub command_timeout: Duration,
    /// The longest that the tests of an instance of SWE-bench may take; 30m unless given.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub test_timeout: Duration,
    /// What a patch of SWE-bench earns besides the 1 for resolving its issue.
    pub bonus: SwebenchBonusConfig,
    /// The cluster of the backends `kruise` and `agent-sandbox`.
    pub kubernetes: KubernetesConfig,
    /// The cluster of the backend `substrate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub substrate: Option<SubstrateConfig>,
    /// The servers of the backend `openenv`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub openenv: Option<OpenEnvActorConfig>,
}

impl Default for ActorConfig {
    fn default() -> Self {
        Self {
            backend: ActorBackendName::Auto,
            root: None,
            image: None,
            image_build: None,
            repositories: None,
            max_actors: 8,
            memory: ByteSize::gib(2),
            disk: ByteSize::gib(2),
            artifacts: ByteSize::mib(256),
            cpus: 1.0,
            processes: 512,
            command_timeout: Duration::from_mins(1),
            test_timeout: Duration::from_mins(30),
            bonus: SwebenchBonusConfig::default(),
            kubernetes: KubernetesConfig::default(),
            substrate: None,
            openenv: None,
        }
    }
}

/// A way to run actors.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum ActorBackendName {
    /// The strongest that is there, and none that is weaker than gVisor.
    #[default]
    Auto,
    /// gVisor on this machine; needs root.
    Runsc,
    /// Namespaces of this machine's kernel: weaker, for programs that one would run anyway.
    Bwrap,
    /// Sandboxes of `OpenKruise` Agents on Kubernetes; needs a program built with `--features k8s`.
    Kruise,
    /// Sandboxes of SIG agent-sandbox on Kubernetes; needs a program built with `--features k8s`.
    AgentSandbox,
    /// Actors of an Agent Substrate; needs a program built with `--features k8s`.
    Substrate,
    /// Machines of servers that speak OpenEnv's protocol.
    Openenv,
}

impl ActorBackendName {
    /// Returns the name as it is written.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Runsc => "runsc",
            Self::Bwrap => "bwrap",
            Self::Kruise => "kruise",
            Self::AgentSandbox => "agent-sandbox",
            Self::Substrate => "substrate",
            Self::Openenv => "openenv",
        }
    }
}

/// Rewards of SWE-bench on top of the 1 for a patch that resolves its issue, each off unless given.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SwebenchBonusConfig {
    /// For fewer changed lines than the reference; 0 unless given, 0.1 is usual.
    pub smaller_patch: f64,
    /// For tests that take less time than with the reference, which are then run once for each instance; 0
    /// unless given, 0.05 is usual.
    pub faster_tests: f64,
}

/// Checks what a run says of actors.
pub(super) fn validate(run: &RunConfig, issues: &mut Issues) {
    let actor = &run.actor;
    let key = |key: &str| format!("actor.{key}");
    issues.require(
        (1..=MAX_ACTORS).contains(&actor.max_actors),
        key("max_actors"),
        actor.max_actors,
        "make it from 1 to 4096",
    );
    issues.require(
        actor.root.as_deref() != Some(""),
        key("root"),
        "",
        "give `host` or a folder, or leave it out",
    );
    issues.require(
        actor.image.is_none() || actor.root.is_none(),
        key("image"),
        actor.image.as_deref().unwrap_or_default(),
        "leave it out, or `root`: each stands in for the images of tasks",
    );
    if let Some(builds) = &actor.image_build {
        image_build::validate(actor, builds, issues);
    }
    kubernetes::validate(&actor.kubernetes, issues);
    match &actor.substrate {
        Some(config) => substrate::validate(config, issues),
        None => issues.require(
            actor.backend != ActorBackendName::Substrate,
            key("substrate"),
            "",
            "say where the Substrate is: `actor.substrate` is left out",
        ),
    }
    match &actor.openenv {
        Some(config) => openenv_actors::validate(config, issues),
        None => issues.require(
            actor.backend != ActorBackendName::Openenv,
            key("openenv"),
            "",
            "say where the servers are: `actor.openenv` is left out",
        ),
    }
    for (name, size) in [("memory", actor.memory), ("disk", actor.disk)] {
        issues.require(
            (ByteSize::mib(64)..=ByteSize::tib(1)).contains(&size),
            key(name),
            size,
            "make it from 64MiB, which a shell and its tools need, to 1TiB",
        );
    }
    issues.require(
        (ByteSize::mib(1)..=ByteSize::gib(16)).contains(&actor.artifacts),
        key("artifacts"),
        actor.artifacts,
        "make it from 1MiB to 16GiB",
    );
    issues.require(
        (MIN_CPUS..=MAX_CPUS).contains(&actor.cpus),
        key("cpus"),
        actor.cpus,
        "make it from 0.01 to 4096",
    );
    issues.require(
        (16..=1 << 20).contains(&actor.processes),
        key("processes"),
        actor.processes,
        "make it from 16 to 1048576",
    );
    for (name, time) in [
        ("command_timeout", actor.command_timeout),
        ("test_timeout", actor.test_timeout),
    ] {
        require_time(issues, key(name), time);
    }
    for (name, bonus) in [
        ("bonus.smaller_patch", actor.bonus.smaller_patch),
        ("bonus.faster_tests", actor.bonus.faster_tests),
    ] {
        issues.require(
            bonus >= 0.0 && bonus.is_finite(),
            key(name),
            bonus,
            "make it at least 0",
        );
    }
}

/// Checks a time that something of an actor may take.
pub(super) fn require_time(issues: &mut Issues, key: String, time: Duration) {
    issues.require(
        (Duration::from_secs(1)..=MAX_TIMEOUT).contains(&time),
        key,
        format!("{time:?}"),
        "make it from 1s to 2h",
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigError;

    fn load(text: &str) -> Result<RunConfig, ConfigError> {
        let text = format!("model.path = 'm'\ntask.path = 't'\n{text}");
        RunConfig::from_toml::<&str>(&text, &[])
    }

    #[test]
    fn actors_read_back() {
        let config = load(
            "[actor]\nbackend = 'bwrap'\nroot = 'host'\nrepositories = '/r'\nmax_actors = 3\n\
             memory = '1GiB'\ncpus = 0.5\ncommand_timeout = '10s'\nbonus = { smaller_patch = 0.1 }",
        )
        .unwrap();
        assert_eq!(config.actor.backend, ActorBackendName::Bwrap);
        assert_eq!(config.actor.bonus.smaller_patch, 0.1);
        let again = RunConfig::from_toml::<&str>(&config.to_toml().unwrap(), &[]).unwrap();
        assert_eq!(config, again);
        assert_eq!(load("").unwrap().actor, ActorConfig::default());
    }

    #[test]
    fn what_makes_no_sense_is_named_with_its_key() {
        for (text, key) in [
            ("actor.max_actors = 0", "actor.max_actors"),
            ("actor.root = ''", "actor.root"),
            ("actor = { root = 'host', image = 'i' }", "actor.image"),
            ("actor.memory = '1MiB'", "actor.memory"),
            ("actor.disk = '1MiB'", "actor.disk"),
            ("actor.processes = 1", "actor.processes"),
            ("actor.artifacts = '1KiB'", "actor.artifacts"),
            ("actor.cpus = 0.0", "actor.cpus"),
            ("actor.cpus = nan", "actor.cpus"),
            ("actor.command_timeout = '0s'", "actor.command_timeout"),
            ("actor.test_timeout = '3h'", "actor.test_timeout"),
            ("actor.bonus.faster_tests = -1", "actor.bonus.faster_tests"),
        ] {
            match load(text) {
                Err(ConfigError::Invalid { issues }) => {
                    let keys: Vec<&str> = issues.iter().map(|issue| issue.key.as_str()).collect();
                    assert_eq!(keys, [key], "{text}");
                }
                other => panic!("{text}: {other:?}"),
            }
        }
        let error = load("actor.backend = 'docker'").unwrap_err().to_string();
        assert!(error.contains("actor.backend"), "{error}");
    }
}
