//! Actors in a cluster: what the backends `kruise` and `agent-sandbox` are told.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::actor::require_time;
use super::units;
use super::validate::Issues;
use crate::address::shown;

/// How actors are made on Kubernetes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesConfig {
    /// The namespace; that of the kubeconfig's context or of the pod unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// A kubeconfig file; as `kubectl` finds it, or the service account of the pod, unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<PathBuf>,
    /// One of its contexts; the current one unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<String>,
    /// The API server's address, such as that of `kubectl proxy`, in place of a kubeconfig.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_server: Option<String>,
    /// The group and version of `OpenKruise`'s objects; `agents.kruise.io/v1alpha1` unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kruise_group: Option<String>,
    /// The group and version of SIG agent-sandbox's `Sandbox`; `agents.x-k8s.io/v1beta1` unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_sandbox_group: Option<String>,
    /// The group and version of its claims, templates and pools; `extensions.agents.x-k8s.io/v1beta1` unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_sandbox_extensions: Option<String>,
    /// Actors that are kept ready for each image and size; as many as a group has members unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warm: Option<u32>,
    /// Images and sizes whose actors are kept ready at a time; 8 unless given. Of others the longest unused is given
    /// up.
    pub pools: usize,
    /// The `RuntimeClass` of the pods; `gvisor` unless given. Empty for the cluster's own runtime, whose
    /// isolation is weaker.
    pub runtime_class: String,
    /// Who all processes of an actor are, as a number; 65532 unless given. Root (0) needs a namespace that
    /// admits Pod Security's `baseline`.
    pub user: u32,
    /// Names of the secrets by which images are pulled.
    pub image_pull_secrets: Vec<String>,
    /// Labels of the nodes that actors may run on.
    pub node_selector: BTreeMap<String, String>,
    /// Taints that actors tolerate.
    pub tolerations: Vec<TolerationConfig>,
    /// How long one request to the API server may take, repetitions included; 1m unless given.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub request_timeout: Duration,
    /// How long an actor may take from its claim until it runs: nodes that are added and images that are pulled
    /// count; 10m unless given.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub ready_timeout: Duration,
}

impl Default for KubernetesConfig {
    fn default() -> Self {
        Self {
            namespace: None,
            kubeconfig: None,
            context: None,
            api_server: None,
            kruise_group: None,
            agent_sandbox_group: None,
            agent_sandbox_extensions: None,
            warm: None,
            pools: 8,
            runtime_class: "gvisor".to_owned(),
            user: 65532,
            image_pull_secrets: Vec::new(),
            node_selector: BTreeMap::new(),
            tolerations: Vec::new(),
            request_timeout: Duration::from_mins(1),
            ready_timeout: Duration::from_mins(10),
        }
    }
}

/// A taint that actors tolerate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TolerationConfig {
    /// The taint's key.
    pub key: String,
    /// Its value; any unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Its effect, such as `NoSchedule`; all unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effect: Option<String>,
}

/// Checks what a run says of its actors on Kubernetes.
pub(super) fn validate(kubernetes: &KubernetesConfig, issues: &mut Issues) {
    let key = |key: &str| format!("actor.kubernetes.{key}");
    issues.require(
        kubernetes.context.is_none() || kubernetes.kubeconfig.is_some(),
        key("context"),
        kubernetes.context.as_deref().unwrap_or_default(),
        "give `kubeconfig`, whose context it is, or leave it out",
    );
    issues.require(
        kubernetes.api_server.is_none() || kubernetes.kubeconfig.is_none(),
        key("api_server"),
        kubernetes
            .api_server
            .as_deref()
            .map(shown)
            .unwrap_or_default(),
        "leave it out, or `kubeconfig`: each says where the API server is",
    );
    issues.require(
        kubernetes.pools > 0,
        key("pools"),
        kubernetes.pools,
        "give at least 1",
    );
    for (name, time) in [
        ("request_timeout", kubernetes.request_timeout),
        ("ready_timeout", kubernetes.ready_timeout),
    ] {
        require_time(issues, key(name), time);
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{ConfigError, RunConfig};

    fn load(text: &str) -> Result<RunConfig, ConfigError> {
        let text = format!("model.path = 'm'\ntask.path = 't'\n{text}");
        RunConfig::from_toml::<&str>(&text, &[])
    }

    #[test]
    fn a_cluster_reads_back() {
        let config = load(
            "[actor]\nbackend = 'agent-sandbox'\nimage = 'python:3.12'\n[actor.kubernetes]\n\
             namespace = 'n'\nruntime_class = ''\nnode_selector = { pool = 'gvisor' }\n\
             tolerations = [{ key = 'sandbox', effect = 'NoSchedule' }]",
        )
        .unwrap();
        assert_eq!(config.actor.kubernetes.tolerations[0].key, "sandbox");
        let again = RunConfig::from_toml::<&str>(&config.to_toml().unwrap(), &[]).unwrap();
        assert_eq!(config, again);
    }

    #[test]
    fn what_makes_no_sense_is_named_with_its_key() {
        for (text, key) in [
            (
                "api_server = 'http://a:b@example.org'\nkubeconfig = 'k'",
                "actor.kubernetes.api_server",
            ),
            ("context = 'c'", "actor.kubernetes.context"),
            ("ready_timeout = '0s'", "actor.kubernetes.ready_timeout"),
            ("pools = 0", "actor.kubernetes.pools"),
        ] {
            let error = load(&format!("[actor.kubernetes]\n{text}")).unwrap_err();
            let ConfigError::Invalid { issues } = &error else {
                panic!("{text}: {error:?}");
            };
            assert_eq!(issues[0].key, key, "{text}");
            assert!(!error.to_string().contains("a:b"), "{error}");
        }
    }
}
