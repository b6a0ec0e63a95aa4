//! Sandboxes of SIG agent-sandbox: a `SandboxWarmPool` keeps those of a `SandboxTemplate` ready, a
//! `SandboxClaim` takes one and ends it.

use kube::core::ApiResource;
use serde_json::{Value, json};

use super::access::Right;
use super::cluster::{Link, Look, resource};
use super::fate::condition;
use super::run::{CLAIM, Run, TASK};
use super::sandboxes::{Pool, Wish};
use crate::actor::ActorError;

/// Where a sandbox says the name of its pod, if that is not its own.
const POD_NAME: &str = "agents.x-k8s.io/pod-name";

/// The kinds of agent-sandbox.
#[derive(Debug, Clone)]
pub(super) struct AgentSandbox {
    template: ApiResource,
    pool: ApiResource,
    claim: ApiResource,
    sandbox: ApiResource,
}

impl AgentSandbox {
    pub(super) fn new(core: &str, extensions: &str) -> Self {
        Self {
            template: resource(extensions, "SandboxTemplate", "sandboxtemplates"),
            pool: resource(extensions, "SandboxWarmPool", "sandboxwarmpools"),
            claim: resource(extensions, "SandboxClaim", "sandboxclaims"),
            sandbox: resource(core, "Sandbox", "sandboxes"),
        }
    }

    /// Returns the kinds in the order in which they are deleted.
    pub(super) fn kinds(&self) -> Vec<ApiResource> {
        vec![
            self.claim.clone(),
            self.pool.clone(),
            self.template.clone(),
            self.sandbox.clone(),
        ]
    }

    pub(super) fn rights(&self) -> Vec<Right> {
        let all = &["create", "delete", "get", "list", "patch", "watch"];
        vec![
            Right::new(
                self.template.clone(),
                &["create", "delete", "get", "list", "patch"],
            ),
            Right::new(
                self.pool.clone(),
                &["create", "delete", "get", "list", "patch"],
            ),
            Right::new(self.claim.clone(), all),
            Right::new(self.sandbox.clone(), &["delete", "get", "list"]),
        ]
    }

    pub(super) fn pools(&self) -> Vec<&ApiResource> {
        vec![&self.pool, &self.template]
    }

    pub(super) async fn prepare(
        &self,
        link: &Link,
        run: &Run,
        pool: &Pool,
    ) -> Result<(), ActorError> {
        let metadata = run.metadata(&pool.name, &[(TASK, &pool.task)]);
        let template = json!({
            "apiVersion": self.template.api_version,
            "kind": self.template.kind,
            "metadata": metadata,
            "spec": {
                "podTemplate": pool.template,
                // Left to itself, the controller makes a policy that allows the public internet, and what
                // one policy allows no other one forbids.
                "networkPolicyManagement": "Unmanaged",
                "networkPolicy": { "ingress": [], "egress": [] },
            },
        });
        link.apply(&self.template, &template).await?;
        let warm = json!({
            "apiVersion": self.pool.api_version,
            "kind": self.pool.kind,
            "metadata": metadata,
            "spec": { "replicas": pool.warm, "sandboxTemplateRef": { "name": pool.name } },
        });
        link.apply(&self.pool, &warm).await.map(drop)
    }

    /// Returns the name of the pod that serves a claim.
    pub(super) async fn claim(
        &self,
        link: &Link,
        run: &Run,
        wish: &Wish,
    ) -> Result<String, ActorError> {
        let name = &wish.name;
        let mut spec = json!({
            "lifecycle": { "shutdownTime": wish.shutdown_time(), "shutdownPolicy": "Delete" },
        });
        match self.claim.version.starts_with("v1alpha") {
            true => {
                spec["sandboxTemplateRef"] = json!({ "name": wish.pool });
                spec["warmpool"] = wish.pool.as_str().into();
            }
            false => spec["warmPoolRef"] = json!({ "name": wish.pool }),
        }
        let claim = json!({
            "apiVersion": self.claim.api_version,
            "kind": self.claim.kind,
            "metadata": run.metadata(name, &[(CLAIM, name), (TASK, &wish.task)]),
            "spec": spec,
        });
        link.apply(&self.claim, &claim).await?;
        let labels = format!("{CLAIM}={name}");
        let activity = "claiming a sandbox";
        let sandbox = link
            .until(&self.claim, &labels, activity, wish.limit, look_at_claim)
            .await?;
        let found = link.get(&self.sandbox, &sandbox).await?;
        let Some(found) = found else {
            return Err(ActorError::Backend {
                activity: activity.to_owned(),
                message: format!("the claim names the sandbox `{sandbox}`, which is not there"),
            });
        };
        let pod = found["metadata"]["annotations"][POD_NAME].as_str();
        Ok(pod.map_or(sandbox, str::to_owned))
    }

    /// Deletes a claim, and with it the sandbox that it owns.
    pub(super) async fn release(&self, link: &Link, claim: &str) -> Result<(), ActorError> {
        link.delete(&self.claim, claim).await
    }
}

fn look_at_claim(claim: &Value) -> Look<String> {
    let name = claim["status"]["sandbox"]["name"].as_str();
    let name = name.filter(|name| !name.is_empty());
    if let Some(ended) = condition(claim, "Finished") {
        return Look::Failed(format!("the sandbox has ended: {}", told(ended)));
    }
    match (condition(claim, "Ready"), name) {
        (Some(_), Some(name)) => Look::Ready(name.to_owned()),
        (Some(_), None) => Look::Wait("the claim is ready without a sandbox".to_owned()),
        (None, _) => {
            let conditions = claim["status"]["conditions"].as_array();
            let last = conditions.and_then(|all| all.iter().find(|one| one["type"] == "Ready"));
            Look::Wait(match last {
                Some(ready) => format!("the claim is not ready: {}", told(ready)),
                None => "the claim was not seen by the controller".to_owned(),
            })
        }
    }
}

/// Returns what a condition says.
fn told(condition: &Value) -> String {
    let text = |name: &str| condition[name].as_str().unwrap_or("-").to_owned();
    format!("{}: {}", text("reason"), text("message"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_is_ready_with_a_sandbox() {
        let claim = |name: &str, kind: &str, status: &str| {
            look_at_claim(&json!({ "status": {
                "sandbox": { "name": name },
                "conditions": [{ "type": kind, "status": status, "reason": "R", "message": "m" }],
            } }))
        };
        assert!(matches!(claim("s", "Ready", "True"), Look::Ready(name) if name == "s"));
        assert!(matches!(claim("", "Ready", "True"), Look::Wait(_)));
        assert!(
            matches!(claim("s", "Ready", "False"), Look::Wait(known) if known.contains("R: m"))
        );
        assert!(matches!(claim("s", "Finished", "True"), Look::Failed(_)));
        assert!(matches!(look_at_claim(&json!({})), Look::Wait(_)));
    }
}
