//! A run in the cluster: the object that owns all others, what tells them from those of other runs, and what
//! crashed runs left.
//!
//! The owner is a `Lease` that is renewed while the run lives. Whatever is labelled as ours without a lease
//! that is still renewed was left by a run that crashed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use kube::core::ApiResource;
use serde_json::{Value, json};

use super::cluster::{Link, resource};
use super::options::KubernetesOptions;
use crate::actor::ActorError;

/// The label of the run's id.
pub(super) const RUN: &str = "wardian-run";
/// The label of one life of a run: a run that is started again is another instance.
pub(super) const INSTANCE: &str = "wardian-instance";
/// The label of a claim and what it is bound to.
pub(super) const CLAIM: &str = "wardian-claim";
/// The label of what a sandbox is for, from its image's name.
pub(super) const TASK: &str = "wardian-task";
/// The label that all our objects have, and its value.
const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "wardian");
/// How long a lease holds without being renewed.
const HOLDS: u64 = 90;
/// Time between renewals.
const RENEWAL: Duration = Duration::from_secs(20);
/// How long the pods of a crashed run are waited for.
const LINGERS: Duration = Duration::from_secs(10);
/// What clocks of two machines may differ.
const SKEW: SignedDuration = SignedDuration::from_secs(60);

/// One life of a run.
#[derive(Debug, Clone)]
pub(super) struct Run {
    run_id: String,
    pub(super) instance: String,
    owner: Value,
}

impl Run {
    /// Takes the lease of a new instance.
    pub(super) async fn begin(
        link: &Link,
        options: &KubernetesOptions,
    ) -> Result<Self, ActorError> {
        let instance = format!("{:08x}", rand::random::<u32>());
        let mut run = Self {
            run_id: options.run_id.clone(),
            instance,
            owner: Value::Null,
        };
        let name = run.lease();
        let mut metadata = json!({ "name": name, "labels": run.labels() });
        if let Some(owner) = &options.owner {
            metadata["ownerReferences"] = json!([{
                "apiVersion": owner.api_version, "kind": owner.kind, "name": owner.name, "uid": owner.uid,
            }]);
        }
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": run.instance,
                "leaseDurationSeconds": HOLDS,
                "renewTime": micros(Timestamp::now()),
            },
        });
        let made = link.apply(&leases(), &lease).await?;
        run.owner = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "name": name,
            "uid": made["metadata"]["uid"],
        });
        Ok(run)
    }

    /// Renews the lease for as long as it is awaited.
    pub(super) async fn keep(self, link: Link) {
        loop {
            tokio::time::sleep(RENEWAL).await;
            let change = json!({ "spec": { "renewTime": micros(Timestamp::now()) } });
            if let Err(error) = link.merge(&leases(), &self.lease(), &change).await {
                tracing::warn!(%error, "the lease of the run could not be renewed");
            }
        }
    }

    fn lease(&self) -> String {
        self.name("run")
    }

    /// Returns a name that no other run gives to an object.
    pub(super) fn name(&self, what: &str) -> String {
        format!("wardian-{}-{what}", self.instance)
    }

    /// Returns the labels of every object.
    pub(super) fn labels(&self) -> BTreeMap<String, String> {
        [
            MANAGED_BY,
            (RUN, self.run_id.as_str()),
            (INSTANCE, self.instance.as_str()),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
    }

    /// Returns the `ownerReferences` of every object.
    pub(super) fn owners(&self) -> Value {
        json!([self.owner])
    }

    /// Returns the metadata of an object.
    pub(super) fn metadata(&self, name: &str, more: &[(&str, &str)]) -> Value {
        let mut labels = self.labels();
        for (name, value) in more {
            labels.insert((*name).to_owned(), (*value).to_owned());
        }
        json!({ "name": name, "labels": labels, "ownerReferences": self.owners() })
    }

    /// Forbids the pods of the run all traffic, and checks that it is so.
    ///
    /// # Errors
    ///
    /// Fails where the policy cannot be made, and where the server has another one than was asked for.
    pub(super) async fn isolate(&self, link: &Link) -> Result<(), ActorError> {
        let name = self.name("deny-all");
        let spec = json!({
            "podSelector": { "matchLabels": { INSTANCE: self.instance } },
            "policyTypes": ["Ingress", "Egress"],
        });
        let policy = json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": self.metadata(&name, &[]),
            "spec": spec,
        });
        link.apply(&network_policies(), &policy).await?;
        self.check_isolated(link).await
    }

    /// Checks that the policy that forbids all traffic is there.
    pub(super) async fn check_isolated(&self, link: &Link) -> Result<(), ActorError> {
        let name = self.name("deny-all");
        let found = link.get(&network_policies(), &name).await?;
        let is_so = found.as_ref().is_some_and(|policy| {
            let spec = &policy["spec"];
            let has = |what: &str| {
                let types = spec["policyTypes"].as_array();
                types.is_some_and(|types| types.iter().any(|kind| kind == what))
            };
            let rules = |name: &str| spec[name].as_array().map_or(0, Vec::len);
            let selected = json!({ "matchLabels": { INSTANCE: self.instance } });
            spec["podSelector"] == selected
                && has("Ingress")
                && has("Egress")
                && rules("ingress") + rules("egress") == 0
        });
        match is_so {
            true => Ok(()),
            false => Err(ActorError::Backend {
                activity: "keeping sandboxes from the network".to_owned(),
                message: format!("the NetworkPolicy `{name}` is not there as it was made"),
            }),
        }
    }

    /// Deletes what the run has in the cluster, and waits for `patience` until its pods are gone.
    ///
    /// # Errors
    ///
    /// Fails as [`delete_instance`] does.
    pub(super) async fn end(
        &self,
        link: &Link,
        kinds: &[ApiResource],
        patience: Duration,
    ) -> Result<(), ActorError> {
        delete_instance(link, kinds, &self.instance, patience).await
    }
}

/// Deletes what one life of a run has in the cluster: its objects, what kept its pods from the network once they are
/// gone, the lease last. Where pods are still there after `patience`, their policy stays, owned by nobody: the next
/// run deletes it.
///
/// # Errors
///
/// Fails where the server does not answer.
async fn delete_instance(
    link: &Link,
    kinds: &[ApiResource],
    instance: &str,
    patience: Duration,
) -> Result<(), ActorError> {
    let labels = format!("{INSTANCE}={instance}");
    delete_all(link, kinds, &labels).await?;
    let until = tokio::time::Instant::now() + patience;
    let mut pause = Duration::from_millis(50);
    let left = loop {
        let mut left = 0;
        for kind in kinds.iter().chain([&pods()]) {
            left += link.list(kind, &labels).await?.len();
        }
        if left == 0 || tokio::time::Instant::now() >= until {
            break left;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    };
    let policies = network_policies();
    if left == 0 {
        delete_all(link, &[policies], &labels).await?;
    } else {
        tracing::warn!(left, %instance, "objects of a run are still being deleted");
        // With their owner, the lease, the cluster deletes them in no particular order.
        let alone = json!({ "metadata": { "ownerReferences": null } });
        for policy in link.list(&policies, &labels).await? {
            if let Some(name) = policy["metadata"]["name"].as_str() {
                // Another run may be at it, too.
                if let Err(error) = link.merge(&policies, name, &alone).await {
                    tracing::warn!(%error, "a policy may go before its pods");
                }
            }
        }
    }
    delete_all(link, &[leases()], &labels).await
}

/// Deletes what runs left that do not renew their lease any more; returns how many there were.
pub(super) async fn delete_leftovers(
    link: &Link,
    kinds: &[ApiResource],
) -> Result<usize, ActorError> {
    let (label, value) = MANAGED_BY;
    let ours = format!("{label}={value},{INSTANCE}");
    let instance = |object: &Value| {
        let found = &object["metadata"]["labels"][INSTANCE];
        found.as_str().map(str::to_owned)
    };
    // The objects are listed before the leases: who has an object has taken a lease before.
    let policies = network_policies();
    let mut found = BTreeSet::new();
    for kind in kinds.iter().chain([&policies]) {
        found.extend(link.list(kind, &ours).await?.iter().filter_map(instance));
    }
    let now = Timestamp::now();
    let mut live = BTreeSet::new();
    for lease in link.list(&leases(), &ours).await? {
        let Some(instance) = instance(&lease) else {
            continue;
        };
        match is_held(&lease, now) {
            true => live.insert(instance),
            false => found.insert(instance),
        };
    }
    let dead: Vec<_> = found.difference(&live).collect();
    for instance in &dead {
        tracing::info!(%instance, "deleting what a run left in the cluster");
        delete_instance(link, kinds, instance, LINGERS).await?;
    }
    Ok(dead.len())
}

async fn delete_all(link: &Link, kinds: &[ApiResource], labels: &str) -> Result<(), ActorError> {
    for kind in kinds {
        for object in link.list(kind, labels).await? {
            if let Some(name) = object["metadata"]["name"].as_str() {
                link.delete(kind, name).await?;
            }
        }
    }
    Ok(())
}

/// Whether a lease is renewed.
fn is_held(lease: &Value, now: Timestamp) -> bool {
    let renewed = lease["spec"]["renewTime"].as_str();
    let Some(renewed) = renewed.and_then(|time| time.parse::<Timestamp>().ok()) else {
        return false;
    };
    let seconds = lease["spec"]["leaseDurationSeconds"].as_i64().unwrap_or(0);
    let age = now.duration_since(renewed);
    age <= SignedDuration::from_secs(seconds.clamp(0, 3600)) + SKEW
}

fn micros(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string()
}

/// Returns a moment as Kubernetes writes it.
pub(super) fn seconds(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

pub(super) fn pods() -> ApiResource {
    resource("v1", "Pod", "pods")
}

pub(super) fn leases() -> ApiResource {
    resource("coordination.k8s.io/v1", "Lease", "leases")
}

pub(super) fn network_policies() -> ApiResource {
    resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
}

/// Returns what an image is of, as a label's value.
pub(super) fn task_label(image: &str) -> String {
    let name = image.split('@').next().unwrap_or_default();
    let name = name.rsplit('/').next().unwrap_or_default();
    let plain: String = name
        .chars()
        .map(
            |c| match c.is_ascii_alphanumeric() || c == '.' || c == '_' {
                true => c,
                false => '-',
            },
        )
        .take(63)
        .collect();
    let plain = plain.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    match plain {
        "" => "image".to_owned(),
        plain => plain.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_holds_for_its_time_and_what_clocks_differ() {
        let now: Timestamp = "2026-11-30T12:00:00Z".parse().unwrap();
        for (renewed, held) in [
            ("2026-11-30T12:00:00.000000Z", true),
            ("2026-11-30T11:57:31.000000Z", true),
            ("2026-11-30T11:57:29.000000Z", false),
            ("2026-11-30T12:00:30.000000Z", true),
            ("never", false),
        ] {
            let lease = json!({ "spec": { "renewTime": renewed, "leaseDurationSeconds": 90 } });
            assert_eq!(is_held(&lease, now), held, "{renewed}");
        }
        assert!(!is_held(&json!({}), now));
        let time: Timestamp = "2026-11-30T12:00:00.5Z".parse().unwrap();
        assert_eq!(micros(time), "2026-11-30T12:00:00.500000Z");
        assert_eq!(seconds(time), "2026-11-30T12:00:00Z");
    }

    #[test]
    fn an_images_name_is_a_label() {
        for (image, label) in [
            (
                "registry.example.org:5000/swe/flask_1776_flask-5014:latest",
                "flask_1776_flask-5014-latest",
            ),
            ("a@sha256:0123", "a"),
            ("registry.example.org/", "image"),
            ("-_-", "image"),
        ] {
            assert_eq!(task_label(image), label);
        }
        assert!(task_label(&"x".repeat(100)).len() <= 63);
    }
}
