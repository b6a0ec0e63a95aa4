//! Sandboxes of `OpenKruise` Agents: a `SandboxSet` keeps them ready, a `SandboxClaim` takes one.
//!
//! A claim that was not served is `Completed` all the same, with nothing claimed. Deleting a claim does not
//! delete what it took, so that the `Sandbox` is deleted, too, and has a time at which it ends anyway.

use std::time::Duration;

use kube::core::ApiResource;
use serde_json::{Value, json};

use super::access::Right;
use super::cluster::{Link, Look, resource};
use super::fate::condition;
use super::run::{CLAIM, INSTANCE, RUN, Run, TASK};
use super::sandboxes::{Pool, Wish};
use crate::actor::ActorError;

/// The label by which the controller says whose a sandbox is.
const CLAIMED_BY: &str = "agents.kruise.io/claim-name";

/// The kinds of `OpenKruise` Agents.
#[derive(Debug, Clone)]
pub(super) struct Kruise {
    set: ApiResource,
    claim: ApiResource,
    sandbox: ApiResource,
}

impl Kruise {
    pub(super) fn new(group_version: &str) -> Self {
        Self {
            set: resource(group_version, "SandboxSet", "sandboxsets"),
            claim: resource(group_version, "SandboxClaim", "sandboxclaims"),
            sandbox: resource(group_version, "Sandbox", "sandboxes"),
        }
    }

    /// Returns the kinds in the order in which they are deleted.
    pub(super) fn kinds(&self) -> Vec<ApiResource> {
        vec![self.claim.clone(), self.set.clone(), self.sandbox.clone()]
    }

    pub(super) fn rights(&self) -> Vec<Right> {
        let all = &["create", "delete", "get", "list", "patch", "watch"];
        vec![
            Right::new(self.set.clone(), all),
            Right::new(self.claim.clone(), all),
            Right::new(
                self.sandbox.clone(),
                &["delete", "get", "list", "patch", "watch"],
            ),
        ]
    }

    pub(super) fn pool(&self) -> &ApiResource {
        &self.set
    }

    pub(super) async fn prepare(
        &self,
        link: &Link,
        run: &Run,
        pool: &Pool,
    ) -> Result<(), ActorError> {
        let set = json!({
            "apiVersion": self.set.api_version,
            "kind": self.set.kind,
            "metadata": run.metadata(&pool.name, &[(TASK, &pool.task)]),
            "spec": { "replicas": pool.warm, "template": pool.template },
        });
        link.apply(&self.set, &set).await.map(drop)
    }

    /// Returns the name of the pod that serves a claim.
    pub(super) async fn claim(
        &self,
        link: &Link,
        run: &Run,
        wish: &Wish,
    ) -> Result<String, ActorError> {
        let name = &wish.name;
        let mut labels = run.labels();
        labels.insert(CLAIM.to_owned(), name.clone());
        labels.insert(TASK.to_owned(), wish.task.clone());
        let claim = json!({
            "apiVersion": self.claim.api_version,
            "kind": self.claim.kind,
            "metadata": run.metadata(name, &[(CLAIM, name), (TASK, &wish.task)]),
            "spec": {
                "templateName": wish.pool,
                "replicas": 1,
                "createOnNoStock": true,
                "claimTimeout": seconds(wish.limit),
                "waitReadyTimeout": seconds(wish.limit),
                // It says who has the sandbox, for as long as that may live.
                "ttlAfterCompleted": seconds(wish.lifetime.saturating_add(wish.limit)),
                "shutdownTime": wish.shutdown_time(),
                "skipInitRuntime": true,
                "labels": labels,
            },
        });
        link.apply(&self.claim, &claim).await?;
        let activity = "claiming a sandbox";
        // The controller's own limit comes first, and says more.
        let limit = wish.limit + Duration::from_secs(10);
        let labels = format!("{CLAIM}={name}");
        link.until(&self.claim, &labels, activity, limit, look_at_claim)
            .await?;
        let labels = format!("{CLAIMED_BY}={name}");
        let sandbox = link
            .until(&self.sandbox, &labels, activity, limit, look_at_sandbox)
            .await?;
        // Its set does not own it any more.
        let owned = json!({
            "apiVersion": self.sandbox.api_version,
            "kind": self.sandbox.kind,
            "metadata": { "name": sandbox, "ownerReferences": run.owners(), "labels": {
                RUN: run.labels()[RUN], INSTANCE: run.instance,
            } },
        });
        link.apply(&self.sandbox, &owned).await?;
        Ok(sandbox)
    }

    pub(super) async fn release(&self, link: &Link, claim: &str) -> Result<(), ActorError> {
        // Without the claim nothing more is taken.
        link.delete(&self.claim, claim).await?;
        for sandbox in link
            .list(&self.sandbox, &format!("{CLAIMED_BY}={claim}"))
            .await?
        {
            if let Some(name) = sandbox["metadata"]["name"].as_str() {
                link.delete(&self.sandbox, name).await?;
            }
        }
        Ok(())
    }
}

fn seconds(time: Duration) -> String {
    format!("{}s", time.as_secs().max(1))
}

fn look_at_claim(claim: &Value) -> Look<()> {
    let status = &claim["status"];
    let message = status["message"].as_str().unwrap_or("no message");
    let claimed = status["claimedReplicas"].as_i64().unwrap_or(0);
    match status["phase"].as_str() {
        Some("Completed") if claimed > 0 => Look::Ready(()),
        Some("Completed") => Look::Failed(format!(
            "the claim was completed without a sandbox: {message}"
        )),
        phase => Look::Wait(format!(
            "the claim is `{}`: {message}",
            phase.unwrap_or("not seen by the controller")
        )),
    }
}

fn look_at_sandbox(sandbox: &Value) -> Look<String> {
    let status = &sandbox["status"];
    let message = status["message"].as_str().unwrap_or("no message");
    let name = sandbox["metadata"]["name"].as_str();
    match (status["phase"].as_str(), name) {
        (Some("Running"), Some(name)) if condition(sandbox, "Ready").is_some() => {
            Look::Ready(name.to_owned())
        }
        (Some(phase @ ("Failed" | "Succeeded" | "Terminating" | "Recycling")), _) => {
            Look::Failed(format!("the sandbox is `{phase}`: {message}"))
        }
        (phase, _) => Look::Wait(format!(
            "the sandbox is `{}`: {message}",
            phase.unwrap_or("not seen by the controller")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_that_is_completed_without_a_sandbox_has_failed() {
        let claim = |status: Value| look_at_claim(&json!({ "status": status }));
        assert!(matches!(claim(json!({})), Look::Wait(_)));
        assert!(matches!(
            claim(json!({ "phase": "Claiming" })),
            Look::Wait(_)
        ));
        let done = json!({ "phase": "Completed", "claimedReplicas": 1 });
        assert!(matches!(claim(done), Look::Ready(())));
        let empty = json!({ "phase": "Completed", "claimedReplicas": 0, "message": "timed out" });
        let Look::Failed(reason) = claim(empty) else {
            panic!("nothing was claimed");
        };
        assert!(reason.contains("timed out"), "{reason}");
    }

    #[test]
    fn a_sandbox_is_ready_when_it_says_so() {
        let sandbox = |phase: &str, ready: &str| {
            look_at_sandbox(&json!({
                "metadata": { "name": "s" },
                "status": { "phase": phase, "conditions": [{ "type": "Ready", "status": ready }] },
            }))
        };
        assert!(matches!(sandbox("Running", "True"), Look::Ready(name) if name == "s"));
        assert!(matches!(sandbox("Running", "False"), Look::Wait(_)));
        assert!(matches!(sandbox("Pending", "False"), Look::Wait(_)));
        assert!(matches!(sandbox("Failed", "False"), Look::Failed(_)));
    }
}
