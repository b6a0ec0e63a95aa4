//! The pod of a sandbox.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::options::KubernetesOptions;
use crate::actor::{ActorSpec, User};

/// The container that commands run in.
pub(super) const CONTAINER: &str = "main";
/// How long a pod may wait in a pool besides living: nothing is left for ever, whatever else fails.
const WAITING: u64 = 24 * 3600;
/// Where the folders that become writable are while they are filled.
const FILLED: &str = "/run/wardian-volumes";
/// The first process: it does nothing but to wait for the processes that lose their parents.
const PAUSE: &str = "while :; do sleep 60 & wait; done";
/// Copies what the image has in folders (the first of each pair) to volumes (the second). Files that the
/// user may not read are left out: they could not be read later either.
const FILL: &str = "while [ $# -gt 1 ]; do if [ -d \"$1\" ]; then cp -RPp \"$1/.\" \"$2/\" || :; fi; shift 2; done";
/// What root may do with files and processes that are others'.
const ROOTS_CAPABILITIES: [&str; 7] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
];

/// Returns the `PodTemplateSpec` of a spec from `image`.
pub(super) fn pod(
    spec: &ActorSpec,
    image: &str,
    options: &KubernetesOptions,
    labels: &BTreeMap<String, String>,
) -> Value {
    let User { uid, gid } = options.user;
    let is_root = uid == 0;
    let folders = match is_root {
        true => Vec::new(),
        false => writable(spec),
    };
    let security = security(is_root);
    let resources = resources(spec);
    let mut main = json!({
        "name": CONTAINER,
        "image": image,
        "command": ["/bin/sh", "-c", PAUSE],
        "workingDir": "/",
        "env": environment(spec, options.user),
        "resources": resources,
        "securityContext": security,
    });
    let mut pod = json!({
        "activeDeadlineSeconds": spec.limits.lifetime.as_secs().saturating_add(WAITING),
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "restartPolicy": "Never",
        // There is nothing to say goodbye to; zero would delete the pod before its processes have ended.
        "terminationGracePeriodSeconds": 1,
        "securityContext": {
            "runAsNonRoot": !is_root,
            "runAsUser": uid,
            "runAsGroup": gid,
            "fsGroup": gid,
            "seccompProfile": { "type": "RuntimeDefault" },
        },
    });
    if !folders.is_empty() {
        let mut arguments = ["/bin/sh", "-c", FILL, "sh"].map(str::to_owned).to_vec();
        let (mut volumes, mut filled, mut mounts) = (Vec::new(), Vec::new(), Vec::new());
        for (number, folder) in folders.iter().enumerate() {
            let name = format!("folder-{number}");
            let there = format!("{FILLED}/{number}");
            let folder = folder.to_string_lossy().into_owned();
            volumes.push(
                json!({ "name": name, "emptyDir": { "sizeLimit": spec.limits.disk.to_string() } }),
            );
            filled.push(json!({ "name": name, "mountPath": there }));
            mounts.push(json!({ "name": name, "mountPath": folder }));
            arguments.extend([folder, there]);
        }
        pod["volumes"] = volumes.into();
        main["volumeMounts"] = mounts.into();
        pod["initContainers"] = json!([{
            "name": "fill",
            "image": image,
            "command": arguments.iter().map(|word| escape(word)).collect::<Vec<_>>(),
            "workingDir": "/",
            "volumeMounts": filled,
            "resources": resources,
            "securityContext": security,
        }]);
    }
    pod["containers"] = json!([main]);
    if let Some(class) = &options.runtime_class {
        pod["runtimeClassName"] = class.as_str().into();
    }
    if !options.node_selector.is_empty() {
        pod["nodeSelector"] = json!(options.node_selector);
    }
    let secrets = options.image_pull_secrets.iter();
    let secrets: Vec<Value> = secrets.map(|name| json!({ "name": name })).collect();
    if !secrets.is_empty() {
        pod["imagePullSecrets"] = secrets.into();
    }
    let tolerations: Vec<Value> = options.tolerations.iter().map(toleration).collect();
    if !tolerations.is_empty() {
        pod["tolerations"] = tolerations.into();
    }
    json!({ "metadata": { "labels": labels }, "spec": pod })
}

/// Returns a short name of what is in a template.
pub(super) fn digest(template: &Value) -> String {
    let hash = Sha256::digest(template.to_string().as_bytes());
    hash.iter()
        .take(5)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Returns the folders that must be writable, each once; `/tmp` is so in every image.
fn writable(spec: &ActorSpec) -> Vec<PathBuf> {
    let mut folders = spec.writable.clone();
    folders.push(spec.workdir.clone());
    folders.sort();
    folders.dedup();
    folders
}

fn security(is_root: bool) -> Value {
    let mut capabilities = json!({ "drop": ["ALL"] });
    if is_root {
        capabilities["add"] = json!(ROOTS_CAPABILITIES);
    }
    json!({
        "allowPrivilegeEscalation": false,
        "capabilities": capabilities,
        "privileged": false,
        "readOnlyRootFilesystem": false,
    })
}

/// Requests are equal to limits where they are not given.
fn resources(spec: &ActorSpec) -> Value {
    json!({ "limits": {
        "cpu": format!("{}m", spec.limits.cpu_millis),
        "memory": spec.limits.memory.to_string(),
        "ephemeral-storage": spec.limits.disk.to_string(),
    } })
}

/// Returns the variables of all processes. `PATH` is the image's own, which knows where its programs are.
fn environment(spec: &ActorSpec, user: User) -> Value {
    let mut variables = spec.variables(user, &BTreeMap::new());
    if !spec.env.contains_key("PATH") {
        variables.remove("PATH");
    }
    let listed = variables
        .into_iter()
        .map(|(name, value)| json!({ "name": name, "value": escape(&value) }));
    listed.collect()
}

/// Returns the text as the value of a variable or an argument, in which `$(NAME)` stands for a variable and `$$`
/// for `$`.
fn escape(value: &str) -> String {
    value.replace('$', "$$")
}

fn toleration(toleration: &super::options::Toleration) -> Value {
    let mut value = json!({ "key": toleration.key });
    match &toleration.value {
        Some(text) => {
            value["operator"] = "Equal".into();
            value["value"] = text.as_str().into();
        }
        None => value["operator"] = "Exists".into(),
    }
    if let Some(effect) = &toleration.effect {
        value["effect"] = effect.as_str().into();
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actor::RootFs;
    use crate::actor::kubernetes::options::{Controller, Toleration};

    fn template(options: &KubernetesOptions) -> Value {
        let spec = ActorSpec {
            env: [("A".to_owned(), "$(B)$$".to_owned())].into(),
            writable: vec!["/testbed".into()],
            ..ActorSpec::new(RootFs::Image("registry.example.org/a:1".to_owned()))
        };
        let labels = [("wardian-run".to_owned(), "r".to_owned())].into();
        pod(&spec, "registry.example.org/a:1", options, &labels)
    }

    /// What Pod Security's `restricted` asks of a pod, and what we ask besides.
    #[test]
    fn a_pod_is_restricted() {
        let options = KubernetesOptions::new(Controller::kruise(), "r");
        let template = template(&options);
        let pod = &template["spec"];
        assert_eq!(template["metadata"]["labels"]["wardian-run"], "r");
        assert_eq!(pod["runtimeClassName"], "gvisor");
        assert_eq!(pod["automountServiceAccountToken"], false);
        assert_eq!(pod["enableServiceLinks"], false);
        assert_eq!(pod["activeDeadlineSeconds"], 3600 + 24 * 3600);
        assert_eq!(pod["restartPolicy"], "Never");
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
        assert_eq!(pod["securityContext"]["runAsUser"], 65532);
        assert_eq!(
            pod["securityContext"]["seccompProfile"]["type"],
            "RuntimeDefault"
        );
        for forbidden in ["hostNetwork", "hostPID", "hostIPC", "serviceAccountName"] {
            assert_eq!(pod.get(forbidden), None);
        }
        for containers in ["containers", "initContainers"] {
            let container = &pod[containers][0];
            let security = &container["securityContext"];
            assert_eq!(security["allowPrivilegeEscalation"], false);
            assert_eq!(security["privileged"], false);
            assert_eq!(security["capabilities"], json!({ "drop": ["ALL"] }));
            let limits = &container["resources"]["limits"];
            assert_eq!(limits["memory"], (2u64 << 30).to_string());
            assert_eq!(limits["ephemeral-storage"], (2u64 << 30).to_string());
            assert_eq!(limits["cpu"], "1000m");
        }
        for volume in pod["volumes"].as_array().unwrap() {
            assert!(volume["emptyDir"]["sizeLimit"].is_string(), "{volume}");
        }
        let mounts = &pod["containers"][0]["volumeMounts"];
        assert_eq!(mounts[0]["mountPath"], "/testbed");
        assert_eq!(mounts[1]["mountPath"], "/workspace");
        let env = &pod["containers"][0]["env"];
        assert!(
            env.as_array()
                .unwrap()
                .contains(&json!({ "name": "A", "value": "$$(B)$$$$" }))
        );
        assert!(!env.to_string().contains("PATH"), "it is the image's");
    }

    #[test]
    fn options_are_in_the_pod() {
        let options = KubernetesOptions {
            user: User::default(),
            runtime_class: None,
            node_selector: [("pool".to_owned(), "sandboxes".to_owned())].into(),
            image_pull_secrets: vec!["pull".to_owned()],
            tolerations: vec![Toleration {
                key: "sandbox".to_owned(),
                value: None,
                effect: Some("NoSchedule".to_owned()),
            }],
            ..KubernetesOptions::new(Controller::kruise(), "r")
        };
        let template = template(&options);
        let pod = &template["spec"];
        assert_eq!(pod["nodeSelector"]["pool"], "sandboxes");
        assert_eq!(pod["imagePullSecrets"][0]["name"], "pull");
        let toleration = json!({ "key": "sandbox", "operator": "Exists", "effect": "NoSchedule" });
        assert_eq!(pod["tolerations"][0], toleration);
        assert_eq!(pod.get("runtimeClassName"), None);
        assert_eq!(pod["securityContext"]["runAsNonRoot"], false);
        let capabilities = &pod["containers"][0]["securityContext"]["capabilities"];
        assert_eq!(capabilities["drop"], json!(["ALL"]));
        assert_eq!(capabilities["add"], json!(ROOTS_CAPABILITIES));
        assert_eq!(pod.get("volumes"), None, "root writes everywhere");
        assert_ne!(digest(&template), digest(&json!({})));
    }

    #[test]
    fn folders_are_filled_from_the_image() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
        for name in ["image", "volume", "other"] {
            fs_err::create_dir(path(name)).unwrap();
        }
        fs_err::write(path("image/.hidden"), "kept").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", path("image/link")).unwrap();
        let output = std::process::Command::new("/bin/sh")
            .args(["-c", FILL, "sh"])
            .args([
                path("image"),
                path("volume"),
                path("missing"),
                path("other"),
            ])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(fs_err::read(path("volume/.hidden")).unwrap(), b"kept");
        assert!(
            fs_err::symlink_metadata(path("volume/link"))
                .unwrap()
                .is_symlink()
        );
    }
}
