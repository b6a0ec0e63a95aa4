//! The controllers of both families, as far as sandboxes go that are kept ready, claimed and ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::server::Cluster;
use super::store::{
    KRUISE_CLAIM, KRUISE_SANDBOX, KRUISE_SET, Kind, POD, SIG_CLAIM, SIG_POOL, SIG_SANDBOX,
    SIG_TEMPLATE,
};

/// What is done with claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Claims {
    /// They are served.
    Served,
    /// They are not seen.
    Ignored,
    /// They are completed with nothing claimed.
    Emptied,
}

#[derive(Debug)]
pub(super) struct Controller {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    cluster: Arc<Cluster>,
    is_over: AtomicBool,
    claims: AtomicU8,
}

impl Controller {
    pub(super) fn start(cluster: Arc<Cluster>) -> Self {
        let shared = Arc::new(Shared {
            cluster,
            is_over: AtomicBool::new(false),
            claims: AtomicU8::new(Claims::Served as u8),
        });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            while !theirs.is_over.load(Ordering::Relaxed) {
                theirs.kruise();
                theirs.sig();
                super::images::run_jobs(&theirs.cluster);
                theirs.cluster.kubelet.reconcile(&theirs.cluster);
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        Self {
            shared,
            thread: Some(thread),
        }
    }

    pub(super) fn set_claims(&self, claims: Claims) {
        self.shared.claims.store(claims as u8, Ordering::Relaxed);
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap()
}

fn owner(kind: &Kind, object: &Value) -> Value {
    json!([{
        "apiVersion": kind.group_version, "kind": kind.kind, "name": name(object),
        "uid": object["metadata"]["uid"], "controller": true,
    }])
}

fn is_owned_by(object: &Value, owner: &Value) -> bool {
    let owners = object["metadata"]["ownerReferences"].as_array();
    owners.is_some_and(|owners| {
        owners
            .iter()
            .any(|found| found["uid"] == owner["metadata"]["uid"])
    })
}

fn is_ready(sandbox: &Value) -> bool {
    sandbox["status"]["conditions"][0]["status"] == "True"
}

fn is_past(time: &Value) -> bool {
    let time = time
        .as_str()
        .and_then(|time| time.parse::<Timestamp>().ok());
    time.is_some_and(|time| time <= Timestamp::now())
}

impl Shared {
    fn has(&self, claims: Claims) -> bool {
        self.claims.load(Ordering::Relaxed) == claims as u8
    }

    /// Makes a sandbox and its pod, which Pod Security may refuse.
    fn sandbox(
        &self,
        kind: &Kind,
        owners: &Value,
        labels: &Value,
        template: &Value,
        pod_name: &str,
    ) {
        let mut store = self.cluster.store();
        let mut metadata = json!({
            "generateName": "sandbox-", "labels": labels, "ownerReferences": owners, "annotations": {},
        });
        metadata["labels"] = merged(labels, &template["metadata"]["labels"]);
        let sandbox = store
            .create(
                kind,
                json!({ "metadata": metadata, "spec": { "template": template } }),
            )
            .unwrap();
        let pod = format!("{}{pod_name}", name(&sandbox));
        if !pod_name.is_empty() {
            store.update(kind, name(&sandbox), |object| {
                object["metadata"]["annotations"]["agents.x-k8s.io/pod-name"] = pod.as_str().into();
            });
        }
        let problems = violations(&template["spec"]);
        let status = match problems.is_empty() {
            true => {
                let metadata = json!({
                    "name": pod, "labels": template["metadata"]["labels"],
                    "ownerReferences": owner(kind, &sandbox),
                });
                store
                    .create(
                        &POD,
                        json!({ "metadata": metadata, "spec": template["spec"] }),
                    )
                    .unwrap();
                json!({ "phase": "Pending", "conditions": [{ "type": "Ready", "status": "False" }] })
            }
            false => json!({ "phase": "Pending", "message": format!(
                "pods \"{pod}\" is forbidden: violates PodSecurity \"restricted:latest\": {}", problems.join(", ")
            ) }),
        };
        store.update(kind, name(&sandbox), |object| object["status"] = status);
    }

    /// Brings the status of sandboxes to that of their pods, and ends those whose time is over.
    fn follow_pods(&self, kind: &Kind, pod_name: &str) {
        let mut store = self.cluster.store();
        for sandbox in store.list(kind) {
            if is_past(&sandbox["spec"]["shutdownTime"]) {
                let _ = store.delete(kind, name(&sandbox));
                continue;
            }
            let pod = store.get(&POD, &format!("{}{pod_name}", name(&sandbox)));
            let phase = pod
                .and_then(|pod| pod["status"]["phase"].as_str())
                .unwrap_or("Pending")
                .to_owned();
            let ready = if phase == "Running" { "True" } else { "False" };
            store.update(kind, name(&sandbox), |object| {
                object["status"]["phase"] = phase.into();
                object["status"]["conditions"] = json!([{ "type": "Ready", "status": ready }]);
            });
        }
    }

    fn kruise(&self) {
        const POOL: &str = "agents.kruise.io/sandbox-pool";
        const CLAIMED_BY: &str = "agents.kruise.io/claim-name";
        let (sets, claims) = {
            let store = self.cluster.store();
            (store.list(&KRUISE_SET), store.list(&KRUISE_CLAIM))
        };
        let free = |set: &Value| -> Vec<Value> {
            let all = self.cluster.store().list(&KRUISE_SANDBOX);
            let of_set = |sandbox: &Value| sandbox["metadata"]["labels"][POOL] == name(set);
            let is_free = |sandbox: &Value| sandbox["metadata"]["labels"][CLAIMED_BY].is_null();
            all.into_iter()
                .filter(|sandbox| of_set(sandbox) && is_free(sandbox))
                .collect()
        };
        for set in &sets {
            let there = free(set).len() as u64;
            for _ in there..set["spec"]["replicas"].as_u64().unwrap() {
                let labels = json!({ POOL: name(set) });
                let owners = owner(&KRUISE_SET, set);
                self.sandbox(
                    &KRUISE_SANDBOX,
                    &owners,
                    &labels,
                    &set["spec"]["template"],
                    "",
                );
            }
        }
        self.follow_pods(&KRUISE_SANDBOX, "");
        for claim in claims {
            if claim["status"]["phase"] == "Completed" || self.has(Claims::Ignored) {
                continue;
            }
            let complete =
                |claimed: u32, message: &str| {
                    self.cluster.store().update(&KRUISE_CLAIM, name(&claim), |object| {
                    object["status"] = json!({
                        "phase": "Completed", "claimedReplicas": claimed, "message": message,
                    });
                });
                };
            if self.has(Claims::Emptied) {
                complete(0, "claim timed out: no sandbox was available");
                continue;
            }
            let set = sets
                .iter()
                .find(|set| claim["spec"]["templateName"] == name(set));
            let Some(set) = set else { continue };
            let free = free(set);
            if free.is_empty()
                && set["spec"]["replicas"] == 0
                && claim["spec"]["createOnNoStock"] == true
            {
                self.sandbox(
                    &KRUISE_SANDBOX,
                    &json!([]),
                    &json!({ POOL: name(set) }),
                    &set["spec"]["template"],
                    "",
                );
            }
            let Some(sandbox) = free.iter().find(|sandbox| is_ready(sandbox)) else {
                continue;
            };
            self.cluster
                .store()
                .update(&KRUISE_SANDBOX, name(sandbox), |object| {
                    object["metadata"]["labels"] =
                        merged(&object["metadata"]["labels"], &claim["spec"]["labels"]);
                    object["metadata"]["labels"][CLAIMED_BY] = name(&claim).into();
                    object["metadata"]["ownerReferences"] = json!([]);
                    object["spec"]["shutdownTime"] = claim["spec"]["shutdownTime"].clone();
                });
            complete(1, "all sandboxes claimed");
        }
    }

    fn sig(&self) {
        /// Pods have names of their own, by an annotation.
        const POD_NAME: &str = "-pod";
        let (pools, claims, templates) = {
            let store = self.cluster.store();
            (
                store.list(&SIG_POOL),
                store.list(&SIG_CLAIM),
                store.list(&SIG_TEMPLATE),
            )
        };
        for pool in &pools {
            let wanted = &pool["spec"]["sandboxTemplateRef"]["name"];
            let Some(template) = templates.iter().find(|template| name(template) == wanted) else {
                continue;
            };
            // Any other policy than none at all would allow what ours forbids.
            assert_eq!(template["spec"]["networkPolicyManagement"], "Unmanaged");
            let all = self.cluster.store().list(&SIG_SANDBOX);
            let there = all
                .iter()
                .filter(|sandbox| is_owned_by(sandbox, pool))
                .count() as u64;
            for _ in there..pool["spec"]["replicas"].as_u64().unwrap() {
                let owners = owner(&SIG_POOL, pool);
                self.sandbox(
                    &SIG_SANDBOX,
                    &owners,
                    &json!({}),
                    &template["spec"]["podTemplate"],
                    POD_NAME,
                );
            }
        }
        self.follow_pods(&SIG_SANDBOX, POD_NAME);
        for claim in claims {
            if is_past(&claim["spec"]["lifecycle"]["shutdownTime"]) {
                let _ = self.cluster.store().delete(&SIG_CLAIM, name(&claim));
                continue;
            }
            if !claim["status"]["sandbox"]["name"].is_null() || self.has(Claims::Ignored) {
                continue;
            }
            let condition = |status: &str, reason: &str, message: &str| json!([{ "type": "Ready", "status": status, "reason": reason, "message": message }]);
            if self.has(Claims::Emptied) {
                self.cluster
                    .store()
                    .update(&SIG_CLAIM, name(&claim), |object| {
                        object["status"]["conditions"] =
                            condition("True", "Ready", "nothing is there");
                    });
                continue;
            }
            let pool = pools
                .iter()
                .find(|pool| claim["spec"]["warmPoolRef"]["name"] == name(pool));
            let all = self.cluster.store().list(&SIG_SANDBOX);
            let found = pool.and_then(|pool| {
                all.iter()
                    .find(|sandbox| is_owned_by(sandbox, pool) && is_ready(sandbox))
            });
            let status = match found {
                Some(sandbox) => {
                    self.cluster
                        .store()
                        .update(&SIG_SANDBOX, name(sandbox), |object| {
                            object["metadata"]["ownerReferences"] = owner(&SIG_CLAIM, &claim);
                        });
                    json!({ "sandbox": { "name": name(sandbox) }, "conditions": condition("True", "Ready", "") })
                }
                None => {
                    json!({ "conditions": condition("False", "SandboxNotReady", "no sandbox is ready") })
                }
            };
            self.cluster
                .store()
                .update(&SIG_CLAIM, name(&claim), |object| object["status"] = status);
        }
    }
}

fn merged(labels: &Value, more: &Value) -> Value {
    let mut labels = labels.clone();
    for (name, value) in more.as_object().into_iter().flatten() {
        labels[name.as_str()] = value.clone();
    }
    labels
}

/// Returns what of a pod Pod Security's `restricted` refuses.
pub(super) fn violations(pod: &Value) -> Vec<String> {
    let mut problems = Vec::new();
    let lists = ["initContainers", "containers"].map(|part| pod[part].as_array().cloned());
    let containers: Vec<Value> = lists.into_iter().flatten().flatten().collect();
    let name = |container: &Value| container["name"].as_str().unwrap().to_owned();
    let of = |container: &Value, field: &str| container["securityContext"][field].clone();
    for container in &containers {
        if of(container, "allowPrivilegeEscalation") != false {
            problems.push(format!(
                "allowPrivilegeEscalation != false (container \"{}\" must set \
                 securityContext.allowPrivilegeEscalation=false)",
                name(container)
            ));
        }
    }
    for container in &containers {
        let capabilities = of(container, "capabilities");
        if capabilities["drop"] != json!(["ALL"]) || !capabilities["add"].is_null() {
            problems.push(format!(
                "unrestricted capabilities (container \"{}\" must set \
                 securityContext.capabilities.drop=[\"ALL\"])",
                name(container)
            ));
        }
    }
    let first = containers.first().map(name).unwrap_or_default();
    let security = &pod["securityContext"];
    if security["runAsNonRoot"] != true || security["runAsUser"] == 0 {
        problems.push(format!(
            "runAsNonRoot != true (pod or container \"{first}\" must set securityContext.runAsNonRoot=true)"
        ));
    }
    if security["seccompProfile"]["type"] != "RuntimeDefault" {
        problems.push(format!(
            "seccompProfile (pod or container \"{first}\" must set securityContext.seccompProfile.type to \
             \"RuntimeDefault\" or \"Localhost\")"
        ));
    }
    problems
}
