//! What became of a pod: whether it runs, and whose doing it was that it does not.

use std::time::Duration;

use serde_json::Value;

use super::template::CONTAINER;
use crate::actor::{ActorLimits, Ending};

/// What is known about a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fate {
    /// It runs, or will.
    Runs,
    /// What ran in it brought it down.
    Guests(Ending),
    /// The cluster took it away.
    Ours(String),
}

/// Returns the fate of a pod, which is none where it has been deleted. `lived` is how long ago it was
/// claimed.
pub(super) fn fate(pod: Option<&Value>, limits: &ActorLimits, lived: Duration) -> Fate {
    let Some(pod) = pod else {
        return Fate::Ours("its pod was deleted".to_owned());
    };
    let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str);
    let message = text("/status/message").unwrap_or("no message");
    match text("/status/reason") {
        Some("Evicted") if is_own_storage(message) => {
            return Fate::Guests(Ending::Killed {
                reason: format!("it wrote more than it may: {message}"),
            });
        }
        Some("DeadlineExceeded") if lived >= limits.lifetime => {
            return Fate::Guests(Ending::TimedOut {
                limit: limits.lifetime,
            });
        }
        Some(reason) => return Fate::Ours(format!("its pod ended with `{reason}`: {message}")),
        None => {}
    }
    if let Some(condition) = condition(pod, "DisruptionTarget") {
        let reason = condition["reason"].as_str().unwrap_or("no reason");
        return Fate::Ours(format!("its pod was disrupted: {reason}"));
    }
    let is_deleted = text("/metadata/deletionTimestamp").is_some();
    if let Some(ended) = terminated(pod) {
        if is_deleted && ended["reason"] != "OOMKilled" {
            return Fate::Ours("its pod is being deleted".to_owned());
        }
        let code = ended["exitCode"].as_i64().unwrap_or(-1);
        return match ended["reason"].as_str() {
            Some("OOMKilled") => Fate::Guests(Ending::OutOfMemory {
                limit: limits.memory,
                // The kernel does not say; it kills at the limit.
                used: limits.memory,
            }),
            // The second is what containerd says of containers whose state it has lost.
            Some("ContainerStatusUnknown" | "Unknown") => {
                Fate::Ours("its node was lost".to_owned())
            }
            reason => {
                let reason = reason.unwrap_or("no reason");
                let message = ended["message"].as_str().map(|told| format!(": {told}"));
                Fate::Guests(Ending::Killed {
                    reason: format!(
                        "its first process ended with {code} ({reason}{})",
                        message.unwrap_or_default()
                    ),
                })
            }
        };
    }
    if is_deleted {
        return Fate::Ours("its pod is being deleted".to_owned());
    }
    match text("/status/phase") {
        Some("Failed" | "Succeeded" | "Unknown") => Fate::Ours(format!("its pod ended: {message}")),
        _ => Fate::Runs,
    }
}

/// Whether an eviction was for what the pod itself wrote, and not for the node's needs.
fn is_own_storage(message: &str) -> bool {
    [
        "ephemeral local storage",
        "local ephemeral storage",
        "emptyDir volume",
    ]
    .iter()
    .any(|what| message.contains(what))
        && message.contains("exceed")
}

/// Returns the condition of a type, where it holds.
pub(super) fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a Value> {
    let conditions = object.pointer("/status/conditions")?.as_array()?;
    conditions
        .iter()
        .find(|condition| condition["type"] == kind && condition["status"] == "True")
}

/// Returns how the container ended.
fn terminated(pod: &Value) -> Option<&Value> {
    let containers = pod.pointer("/status/containerStatuses")?.as_array()?;
    let main = containers
        .iter()
        .find(|container| container["name"] == CONTAINER)?;
    main.pointer("/state/terminated")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(pod: &Value) -> Fate {
        fate(Some(pod), &ActorLimits::default(), Duration::from_secs(60))
    }

    fn container(reason: &str, code: i64) -> Value {
        let state = json!({ "terminated": { "reason": reason, "exitCode": code } });
        json!({ "status": { "phase": "Failed", "containerStatuses": [{ "name": "main", "state": state }] } })
    }

    fn deleted(mut pod: Value) -> Value {
        pod["metadata"] = json!({ "deletionTimestamp": "2026-11-30T00:00:00Z" });
        pod
    }

    fn with_status(status: &Value) -> Value {
        json!({ "status": status })
    }

    #[test]
    fn what_guests_do_is_theirs() {
        let limits = ActorLimits::default();
        assert_eq!(
            of(&container("OOMKilled", 137)),
            Fate::Guests(Ending::OutOfMemory {
                limit: limits.memory,
                used: limits.memory
            })
        );
        assert!(matches!(
            of(&deleted(container("OOMKilled", 137))),
            Fate::Guests(Ending::OutOfMemory { .. })
        ));
        assert!(matches!(
            of(&container("Error", 1)),
            Fate::Guests(Ending::Killed { .. })
        ));
        for message in [
            "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi.",
            "Container main exceeded its local ephemeral storage limit \"1Gi\".",
            "Usage of EmptyDir volume exceeds: emptyDir volume \"folder-0\" exceeds the limit \"1Gi\".",
        ] {
            let pod =
                with_status(&json!({ "phase": "Failed", "reason": "Evicted", "message": message }));
            let is_guests = matches!(of(&pod), Fate::Guests(Ending::Killed { .. }));

            assert!(is_guests, "{message}");
        }
        let over = with_status(&json!({ "phase": "Failed", "reason": "DeadlineExceeded" }));
        assert_eq!(
            fate(Some(&over), &limits, limits.lifetime),
            Fate::Guests(Ending::TimedOut {
                limit: limits.lifetime
            })
        );
    }

    #[test]
    fn what_the_cluster_does_is_ours() {
        let pods = [
            with_status(
                &json!({ "reason": "Evicted", "message": "The node was low on resource: memory." }),
            ),
            with_status(&json!({ "reason": "NodeLost" })),
            with_status(
                &json!({ "reason": "Terminated", "message": "Pod was terminated in response to imminent node shutdown." }),
            ),
            with_status(&json!({ "phase": "Failed", "reason": "DeadlineExceeded" })),
            with_status(
                &json!({ "conditions": [{ "type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler" }] }),
            ),
            container("ContainerStatusUnknown", 137),
            container("Unknown", 255),
            deleted(container("Error", 137)),
            json!({ "metadata": { "deletionTimestamp": "2026-11-30T00:00:00Z" }, "status": { "phase": "Running" } }),
            with_status(&json!({ "phase": "Unknown" })),
        ];
        for pod in pods {
            assert!(matches!(of(&pod), Fate::Ours(_)), "{pod}");
        }
        let gone = fate(None, &ActorLimits::default(), Duration::ZERO);
        assert_eq!(gone, Fate::Ours("its pod was deleted".to_owned()));
        let runs = with_status(
            &json!({ "phase": "Running", "conditions": [{ "type": "DisruptionTarget", "status": "False" }] }),
        );
        assert_eq!(of(&runs), Fate::Runs);
    }
}
