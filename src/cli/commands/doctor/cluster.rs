//! The cluster: whether there is one, and what we may do in it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Scope;
use super::finding::Finding;
use crate::causes::with_causes;
use crate::config::ActorBackendName;
use crate::process::find_program;
use crate::run::{ClusterReview, review_cluster};

/// How long the server may take for all questions.
const LIMIT: Duration = Duration::from_secs(10);
/// Where a pod has its account.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

pub(super) fn check(scope: &Scope) -> Vec<Finding> {
    let actor = &scope.config.actor;
    let is_needed = match actor.backend {
        ActorBackendName::Kruise | ActorBackendName::AgentSandbox => scope.has_run,
        ActorBackendName::Substrate if scope.has_run => return vec![substrate(scope)],
        _ if scope.has_run => return Vec::new(),
        _ => false,
    };
    if !cfg!(feature = "k8s") {
        let about = "this program is built without clusters (feature `k8s`)";
        let fix = "cargo install --path . --features k8s";
        return vec![Finding::missing("cluster", is_needed, about, fix)];
    }
    let file = actor.kubernetes.kubeconfig.clone().or_else(kubeconfig);
    if let Some(file) = file.filter(|_| actor.kubernetes.api_server.is_none()) {
        if let Err(error) = fs_err::File::open(&file).and_then(|file| file.metadata()) {
            let about = format!("the kubeconfig cannot be read: {error}");
            let fix = "export KUBECONFIG=FILE, such as one that `kubectl config view --raw --minify` wrote";
            return vec![Finding::missing("cluster", is_needed, about, fix)];
        }
    } else if actor.kubernetes.api_server.is_none() && !Path::new(ACCOUNT).exists() {
        let about = "there is no kubeconfig, and this is no pod with a service account";
        let fix = "export KUBECONFIG=FILE, or `kubectl proxy` and `--set actor.kubernetes.api_server=http://127.0.0.1:8001`";
        return vec![Finding::missing("cluster", is_needed, about, fix)];
    }
    match review_cluster(actor, LIMIT) {
        Ok(review) => judge(&review, is_needed),
        Err(error) => vec![Finding::missing(
            "cluster",
            is_needed,
            with_causes(&error),
            "`kubectl cluster-info` shows whether it answers; log in anew, or correct the kubeconfig",
        )],
    }
}

/// Returns the file that `kubectl` would read, if it is named or there.
fn kubeconfig() -> Option<PathBuf> {
    let named = std::env::var_os("KUBECONFIG").filter(|value| !value.is_empty());
    if let Some(named) = named {
        return std::env::split_paths(&named).next();
    }
    let home = std::env::var_os("HOME").filter(|value| !value.is_empty())?;
    let file = PathBuf::from(home).join(".kube/config");
    file.exists().then_some(file)
}

fn judge(review: &ClusterReview, is_needed: bool) -> Vec<Finding> {
    let ClusterReview {
        controller,
        namespace,
        missing,
        denied,
        allowed,
    } = review;
    let mut findings = Vec::new();
    if !missing.is_empty() {
        findings.push(Finding::missing(
            "cluster",
            is_needed,
            format!(
                "`{controller}` needs {}, which the cluster does not have",
                missing.join(", ")
            ),
            "install its controllers (docs/heavy-tier.md), or name the groups that it has by \
             `actor.kubernetes.kruise_group` or `agent_sandbox_group` and `agent_sandbox_extensions`",
        ));
    }
    if !denied.is_empty() {
        findings.push(Finding::missing(
            "cluster",
            is_needed,
            format!(
                "may not {} in the namespace `{namespace}`",
                denied.join(", ")
            ),
            grant(namespace, denied),
        ));
    }
    if findings.is_empty() {
        let about =
            format!("all {allowed} rights that `{controller}` needs are there in `{namespace}`");
        findings.push(Finding::fine("cluster", about));
    }
    findings
}

/// Returns the commands that allow what is denied; resources of a Role have the form `plural.group/below`.
fn grant(namespace: &str, denied: &[String]) -> String {
    let words = denied.iter().filter_map(|right| right.split_once(' '));
    let mut rules: Vec<(&str, Vec<&str>)> = Vec::new();
    for (verb, resource) in words {
        match rules.iter_mut().find(|(known, _)| *known == resource) {
            Some((_, verbs)) => verbs.push(verb),
            None => rules.push((resource, vec![verb])),
        }
    }
    let roles = rules.iter().enumerate().map(|(number, (resource, verbs))| {
        let (name, verbs) = (format!("wardian-{}", number + 1), verbs.join(","));
        format!(
            "kubectl -n {namespace} create role {name} --verb={verbs} --resource={resource} && \
             kubectl -n {namespace} create rolebinding {name} --role={name} --serviceaccount={namespace}:ACCOUNT"
        )
    });
    roles.collect::<Vec<_>>().join("\n")
}

/// A Substrate is asked by its own control plane; here is looked for what that takes.
fn substrate(scope: &Scope) -> Finding {
    if !cfg!(feature = "k8s") {
        let about = "this program is built without clusters (feature `k8s`)";
        return Finding::wrong("cluster", about, "cargo install --path . --features k8s");
    }
    let Some(config) = &scope.config.actor.substrate else {
        let about = "`actor.substrate` is left out";
        return Finding::wrong(
            "cluster",
            about,
            "say where the Substrate is (docs/heavy-tier.md)",
        );
    };
    if let Err(error) = fs_err::read(&config.token_file) {
        let about = format!("the token of the Substrate's actors cannot be read: {error}");
        return Finding::wrong(
            "cluster",
            about,
            "`actor.substrate.token_file` names its file",
        );
    }
    if config.control.is_none() && find_program(Path::new("kubectl")).is_none() {
        let about = "the Substrate is asked by `kubectl`, which is not in `PATH`";
        let fix = "install kubectl, or name the control plane by `actor.substrate.control`";
        return Finding::wrong("cluster", about, fix);
    }
    Finding::note(
        "cluster",
        "what the Substrate needs here is there; it is not asked",
    )
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;

    #[test]
    fn what_is_denied_is_granted_by_the_commands_that_are_named() {
        let review = ClusterReview {
            controller: "kruise",
            namespace: "sandboxes".to_owned(),
            missing: vec!["`SandboxSet` of `agents.kruise.io/v1alpha1`".to_owned()],
            denied: [
                "get pods/exec",
                "create pods/exec",
                "patch leases.coordination.k8s.io",
            ]
            .map(str::to_owned)
            .to_vec(),
            allowed: 3,
        };
        let found = judge(&review, true);
        assert_eq!(found.iter().filter(|f| f.state == State::Wrong).count(), 2);
        let fix = found[1].fix.as_deref().unwrap();
        assert!(
            fix.contains("--verb=get,create --resource=pods/exec"),
            "{fix}"
        );
        assert!(
            fix.contains("--verb=patch --resource=leases.coordination.k8s.io"),
            "{fix}"
        );
        assert!(judge(&review, false).iter().all(|f| f.state == State::Note));
        let review = ClusterReview {
            missing: Vec::new(),
            denied: Vec::new(),
            ..review
        };
        assert_eq!(judge(&review, true)[0].state, State::Fine);
    }
}
