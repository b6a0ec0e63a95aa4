//! Where sandboxes are made, and how.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::images::BuildOptions;
use crate::actor::{ActorError, User};

/// Whose controllers make the sandboxes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Controller {
    /// `OpenKruise` Agents: `SandboxSet`, `SandboxClaim` and `Sandbox` of one group.
    Kruise {
        /// The group and its version.
        group_version: String,
    },
    /// SIG agent-sandbox: `Sandbox` of one group, `SandboxTemplate`, `SandboxWarmPool` and `SandboxClaim` of
    /// another.
    AgentSandbox {
        /// The group and version of `Sandbox`.
        core: String,
        /// The group and version of the others; a version that begins with `v1alpha` has the older form of
        /// a claim.
        extensions: String,
    },
}

impl Controller {
    /// Returns `OpenKruise` Agents with its group, `agents.kruise.io/v1alpha1`.
    #[must_use]
    pub fn kruise() -> Self {
        Self::Kruise {
            group_version: "agents.kruise.io/v1alpha1".to_owned(),
        }
    }

    /// Returns SIG agent-sandbox with its groups in version `v1beta1`.
    #[must_use]
    pub fn agent_sandbox() -> Self {
        Self::AgentSandbox {
            core: "agents.x-k8s.io/v1beta1".to_owned(),
            extensions: "extensions.agents.x-k8s.io/v1beta1".to_owned(),
        }
    }

    /// Returns the name that run files and messages use.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kruise { .. } => "kruise",
            Self::AgentSandbox { .. } => "agent-sandbox",
        }
    }
}

/// Where the API server is and who we are to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ApiServer {
    /// As `kubectl` finds it: `KUBECONFIG`, `~/.kube/config`, or the service account of the pod.
    #[default]
    Infer,
    /// A kubeconfig file and one of its contexts, the current one unless given.
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// The context.
        context: Option<String>,
    },
    /// An address without credentials, such as that of `kubectl proxy`.
    Url(String),
}

/// A taint that sandboxes tolerate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Toleration {
    /// The taint's key.
    pub key: String,
    /// Its value; any unless given.
    pub value: Option<String>,
    /// Its effect, such as `NoSchedule`; all unless given.
    pub effect: Option<String>,
}

/// An object of the namespace that ends with what started the run, such as the pod that it runs in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Its version, such as `v1`.
    pub api_version: String,
    /// Its kind, such as `Pod`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Its unique id.
    pub uid: String,
}

/// Where sandboxes are made, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesOptions {
    /// Whose controllers make the sandboxes.
    pub controller: Controller,
    /// Where the API server is.
    pub api_server: ApiServer,
    /// The namespace; that of the kubeconfig's context or of the pod unless given.
    pub namespace: Option<String>,
    /// The run's name in labels: letters, digits, `-`, `_` and `.`, at most 63.
    pub run_id: String,
    /// Sandboxes that are kept ready for each spec: the size of a group.
    pub warm: u32,
    /// Specs whose sandboxes are kept ready at a time; of others the longest unused is given up once none of
    /// its sandboxes is in use.
    pub pools: usize,
    /// The `RuntimeClass` of the pods. gVisor's is called `gvisor` by custom; `None` is the cluster's own
    /// runtime, and then guests call the kernel of the node.
    pub runtime_class: Option<String>,
    /// Who all processes of a sandbox are. Unless it is root, pods are such as Pod Security's `restricted`
    /// admits. Root, with a few capabilities over files and processes, needs a namespace of `baseline`.
    pub user: User,
    /// Names of the secrets by which images are pulled.
    pub image_pull_secrets: Vec<String>,
    /// Labels of the nodes that sandboxes may run on.
    pub node_selector: BTreeMap<String, String>,
    /// Taints that sandboxes tolerate.
    pub tolerations: Vec<Toleration>,
    /// What the objects of the run end with, besides with the run itself.
    pub owner: Option<Owner>,
    /// Who builds images that are not there; nobody unless given, and then fewer rights are needed.
    pub builds: Option<BuildOptions>,
    /// How long one request may take, with all its repetitions.
    pub request_timeout: Duration,
    /// How long a sandbox may take from its claim until it runs: nodes that are added and images that are
    /// pulled count.
    pub ready_timeout: Duration,
}

impl KubernetesOptions {
    /// Returns the options of a run: the inferred API server, one warm sandbox for each of eight specs,
    /// the `RuntimeClass` `gvisor`, user and group 65532, 60 s for a request and 600 s for a sandbox.
    pub fn new(controller: Controller, run_id: impl Into<String>) -> Self {
        Self {
            controller,
            api_server: ApiServer::Infer,
            namespace: None,
            run_id: run_id.into(),
            warm: 1,
            pools: 8,
            runtime_class: Some("gvisor".to_owned()),
            user: User {
                uid: 65532,
                gid: 65532,
            },
            image_pull_secrets: Vec::new(),
            node_selector: BTreeMap::new(),
            tolerations: Vec::new(),
            owner: None,
            builds: None,
            request_timeout: Duration::from_secs(60),
            ready_timeout: Duration::from_secs(600),
        }
    }

    /// Checks what the API server would refuse later, or not at all.
    pub(super) fn check(&self) -> Result<(), ActorError> {
        let unusable = |reason: String| {
            Err(ActorError::Unusable {
                backend: self.controller.name(),
                reason,
            })
        };
        if !is_label_value(&self.run_id) {
            return unusable(format!(
                "cannot label objects with the run id `{}`; take letters, digits, `-`, `_` and `.`, at most \
                 63, with a letter or digit at both ends",
                self.run_id
            ));
        }
        let group_versions = match &self.controller {
            Controller::Kruise { group_version } => vec![group_version],
            Controller::AgentSandbox { core, extensions } => vec![core, extensions],
        };
        for text in group_versions {
            let is_plain = |part: &str| {
                let mut bytes = part.bytes();
                !part.is_empty()
                    && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.')
            };
            let parts = text.split_once('/');
            if !parts.is_some_and(|(group, version)| is_plain(group) && is_plain(version)) {
                return unusable(format!(
                    "needs a group and a version such as `agents.kruise.io/v1alpha1`, not `{text}`"
                ));
            }
        }
        let day = Duration::from_secs(24 * 3600);
        if self
            .builds
            .as_ref()
            .is_some_and(|builds| builds.timeout > day)
            || self.request_timeout > day
            || self.ready_timeout > day
        {
            return unusable("takes times of a day at most".to_owned());
        }
        if self.request_timeout.is_zero() || self.ready_timeout.is_zero() {
            return unusable("needs times above zero".to_owned());
        }
        Ok(())
    }
}

/// Whether Kubernetes takes it as a label's value.
fn is_label_value(text: &str) -> bool {
    let is_end = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let mut bytes = text.bytes();
    text.len() <= 63
        && is_end(bytes.clone().next())
        && is_end(bytes.clone().next_back())
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_server_would_refuse_is_refused() {
        let good = KubernetesOptions::new(Controller::kruise(), "run-1");
        good.check().unwrap();
        KubernetesOptions::new(Controller::agent_sandbox(), "r")
            .check()
            .unwrap();
        let long = "x".repeat(64);
        for run_id in ["", "-a", "a-", "a b", "ü", &long] {
            let error = KubernetesOptions::new(Controller::kruise(), run_id)
                .check()
                .unwrap_err();
            assert!(error.to_string().contains("at most 63"), "{error}");
        }
        for group_version in ["v1", "a/", "/v1", "a b/v1", "a/v1/x"] {
            let controller = Controller::Kruise {
                group_version: group_version.to_owned(),
            };
            let error = KubernetesOptions::new(controller, "r").check().unwrap_err();
            assert!(error.to_string().contains(group_version), "{error}");
        }
        let error = KubernetesOptions {
            request_timeout: Duration::ZERO,
            ..good
        }
        .check()
        .unwrap_err();
        assert!(error.to_string().contains("above zero"), "{error}");
    }
}
