//! Pods that cannot start for what is wrong with their image or their settings.

use std::time::Duration;

use serde_json::Value;

use super::cluster::Link;
use super::run::{self, INSTANCE};
use crate::actor::ActorError;

/// Why a container waits that will hardly ever start.
const HOPELESS: [&str; 4] = [
    "ImagePullBackOff",
    "ErrImagePull",
    "InvalidImageName",
    "CreateContainerConfigError",
];
/// Time between looks.
const PAUSE: Duration = Duration::from_secs(5);
/// Looks in a row that must find all pods of the image waiting so: a registry may be away for a moment.
const LOOKS: u32 = 6;

/// Looks for pods of an instance from `image` that cannot start, and returns once there is one, with why.
pub(super) async fn hopeless(link: Link, instance: String, image: String) -> ActorError {
    let labels = format!("{INSTANCE}={instance}");
    let mut looks = 0;
    loop {
        tokio::time::sleep(PAUSE).await;
        let pods = match link.list(&run::pods(), &labels).await {
            Ok(pods) => pods,
            Err(error) => {
                tracing::debug!(%error, "pods could not be looked at");
                continue;
            }
        };
        let found = stuck(&pods, &image);
        looks = found.as_ref().map_or(0, |_| looks + 1);
        if let Some(why) = found.filter(|_| looks >= LOOKS) {
            return ActorError::Backend {
                activity: "claiming a sandbox".to_owned(),
                message: format!(
                    "its pod cannot start from the image `{image}`: {why}; push the image, name who may pull it in \
                     `actor.kubernetes.image_pull_secrets`, or give `actor.image`, which stands in for it"
                ),
            };
        }
    }
}

/// Returns why pods from `image` cannot start; where one of them runs, or still may, the image is not to blame.
fn stuck(pods: &[Value], image: &str) -> Option<String> {
    let of_image = pods.iter().filter(|pod| is_of(pod, image));
    let whys: Option<Vec<String>> = of_image.map(waits).collect();
    whys?.into_iter().next()
}

fn is_of(pod: &Value, image: &str) -> bool {
    let containers = pod["spec"]["containers"].as_array();
    containers.is_some_and(|all| all.iter().any(|container| container["image"] == image))
}

/// Returns why a pod cannot start.
fn waits(pod: &Value) -> Option<String> {
    let of = |pointer: &str| {
        let found = pod.pointer(pointer).and_then(Value::as_array);
        found.map_or(&[][..], Vec::as_slice)
    };
    let containers = of("/status/initContainerStatuses").iter();
    let mut containers = containers.chain(of("/status/containerStatuses"));
    containers.find_map(|container| {
        let waiting = container.pointer("/state/waiting")?;
        let reason = waiting["reason"].as_str()?;
        let message = waiting["message"].as_str().unwrap_or("no message");
        (HOPELESS.contains(&reason)).then(|| format!("{reason}: {message}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pod_that_cannot_start_says_why() {
        let pod = |part: &str, reason: &str| {
            let waiting = json!({ "reason": reason, "message": "m" });
            let status = json!([{ "name": "main", "state": { "waiting": waiting } }]);
            json!({ "spec": { "containers": [{ "image": "a:1" }] }, "status": { part: status } })
        };
        let running = json!({ "spec": { "containers": [{ "image": "a:1" }] }, "status": { "phase": "Running" } });
        for part in ["containerStatuses", "initContainerStatuses"] {
            for reason in HOPELESS {
                let pod = pod(part, reason);
                let why = Some(format!("{reason}: m"));
                assert_eq!(stuck(&[json!({}), pod.clone()], "a:1"), why);
                assert_eq!(stuck(std::slice::from_ref(&pod), "b:1"), None);
                // A node's trouble, not the image's.
                assert_eq!(stuck(&[pod.clone(), running.clone()], "a:1"), None);
                let pulls = json!({ "spec": running["spec"], "status": { "phase": "Pending" } });
                assert_eq!(stuck(&[pod, pulls], "a:1"), None);
            }
            // These pass by themselves.
            for reason in ["ContainerCreating", "PodInitializing"] {
                assert_eq!(stuck(&[pod(part, reason)], "a:1"), None);
            }
        }
    }
}
