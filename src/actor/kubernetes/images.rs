//! Images that are not there yet: a `Job` has `BuildKit` build and push them.
//!
//! An image is built once, however many ask for it at the same time, and never when its registry has it. The
//! context travels in a `ConfigMap`, as one archive: its files would be links there, which `BuildKit` does not
//! follow.

use std::time::Duration;

use kube::api::{LogParams, Request};
use kube::core::ApiResource;
use serde_json::{Value, json};

use super::access::Right;
use super::cluster::{Link, Look, resource};
use super::fate::condition;
use super::retry::patiently;
use super::run::{RUN, Run, pods};
use crate::actor::image::{ImageReference, Recipe, Registry, RegistryOptions, Turns};
use crate::actor::{ActorError, User};

/// The most that the archive of a context may hold, so that it fits into a `ConfigMap` of 1 MiB.
pub(super) const MAX_CONTEXT: usize = 700 << 10;
/// The label of a build and its pod.
const BUILD: &str = "wardian-build";
/// Lines and bytes of a failed build's log that are told.
const LOG_LINES: i64 = 40;
const LOG_BYTES: i64 = 16 << 10;
/// Unpacks the context and has it built: the daemon, the image, the file that says how, then options of the
/// output.
const SCRIPT: &str = "tar -C \"$5\" -xf \"$6\"/context.tar && exec buildctl --addr \"$1\" build \
     --frontend dockerfile.v0 --local context=\"$5\" --local dockerfile=\"$5\" --opt filename=\"$3\" \
     --output \"type=image,name=$2,push=true$4\"";

/// How images are built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildOptions {
    /// Where images without a name of their own are pushed, such as `registry.example.org/tasks`.
    pub repository: String,
    /// Where `BuildKit` listens.
    pub buildkit: String,
    /// An image with `buildctl`, a shell and `tar`.
    pub client_image: String,
    /// The secret, of the type `kubernetes.io/dockerconfigjson`, by which images are pushed.
    pub push_secret: Option<String>,
    /// How the registry is asked what it has.
    pub registry: RegistryOptions,
    /// How long a build may take.
    pub timeout: Duration,
    /// How often a build that fails is tried again.
    pub retries: u32,
}

impl BuildOptions {
    /// Returns options with `tcp://buildkit:1234`, half an hour and two retries.
    pub fn new(repository: impl Into<String>, client_image: impl Into<String>) -> Self {
        Self {
            repository: repository.into(),
            buildkit: "tcp://buildkit:1234".to_owned(),
            client_image: client_image.into(),
            push_secret: None,
            registry: RegistryOptions::default(),
            timeout: Duration::from_secs(1800),
            retries: 2,
        }
    }
}

/// Builds images, each once at a time.
#[derive(Debug)]
pub(super) struct Images {
    options: BuildOptions,
    registry: Registry,
    turns: Turns,
}

impl Images {
    pub(super) fn new(options: BuildOptions) -> Self {
        Self {
            registry: Registry::new(options.registry.clone()),
            options,
            turns: Turns::default(),
        }
    }

    /// Returns the repository of images that have no name of their own.
    pub(super) fn repository(&self) -> &str {
        &self.options.repository
    }

    /// Returns the kinds in the order in which they are deleted.
    pub(super) fn kinds() -> Vec<ApiResource> {
        vec![jobs(), config_maps()]
    }

    pub(super) fn rights() -> Vec<Right> {
        vec![
            Right::new(
                jobs(),
                &["create", "delete", "get", "list", "patch", "watch"],
            ),
            Right::new(config_maps(), &["create", "delete", "get", "list", "patch"]),
            Right {
                kind: pods(),
                subresource: Some("log"),
                verbs: &["get"],
            },
        ]
    }

    /// Calls `build` unless the image is there; of many who ask for the same image at the same time one
    /// does, and all have its result.
    pub(super) fn ensure(
        &self,
        image: &str,
        build: impl FnOnce(&BuildOptions) -> Result<(), ActorError>,
    ) -> Result<(), ActorError> {
        let reference: ImageReference = image.parse()?;
        self.turns.once(image, || {
            if self.registry.has(&reference)? {
                return Ok(());
            }
            build(&self.options)?;
            match self.registry.has(&reference)? {
                true => Ok(()),
                false => Err(ActorError::Backend {
                    activity: format!("building the image `{image}`"),
                    message: "it was built, and the registry does not have it".to_owned(),
                }),
            }
        })
    }

    /// Whether an image is to be in the registry to which images are pushed.
    pub(super) fn is_own(&self, image: &str) -> bool {
        let registry = |text: &str| {
            let reference = text.parse::<ImageReference>().ok()?;
            Some(reference.registry().to_owned())
        };
        registry(image).is_some_and(|host| Some(host) == registry(&self.options.repository))
    }
}

/// Has an image built and pushed; what was made for that is deleted, however it ends.
pub(super) async fn build(
    link: &Link,
    run: &Run,
    options: &BuildOptions,
    image: &str,
    recipe: &Recipe,
) -> Result<(), ActorError> {
    let name = run.name(&format!("build-{:08x}", rand::random::<u32>()));
    let archive = recipe.context.to_tar(User::default());
    if archive.len() > MAX_CONTEXT {
        return Err(ActorError::InvalidSpec {
            reason: format!(
                "the context of `{image}` has {} bytes, of at most {MAX_CONTEXT}; have its build fetch what \
                 is large",
                archive.len()
            ),
        });
    }
    let built = run_job(link, run, options, image, recipe, &name, archive).await;
    let cleared = async {
        link.delete(&jobs(), &name).await?;
        link.delete(&config_maps(), &name).await
    };
    // What is left ends with the run.
    if let Err(error) = cleared.await {
        tracing::warn!(%error, "a build is left in the cluster for now");
    }
    built
}

async fn run_job(
    link: &Link,
    run: &Run,
    options: &BuildOptions,
    image: &str,
    recipe: &Recipe,
    name: &str,
    archive: Vec<u8>,
) -> Result<(), ActorError> {
    let labels = [("type", "image-build"), (BUILD, name)];
    let context = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": run.metadata(name, &labels),
        "binaryData": { "context.tar": k8s_openapi::ByteString(archive) },
    });
    link.apply(&config_maps(), &context).await?;
    link.apply(&jobs(), &job(run, options, image, recipe, name))
        .await?;
    let activity = "building an image";
    // The cluster's own limit comes first.
    let limit = options.timeout + Duration::from_secs(30);
    let selected = format!("{BUILD}={name}");
    let done = link
        .until(&jobs(), &selected, activity, limit, look_at_job)
        .await;
    let Err(error) = done else {
        return Ok(());
    };
    let log = log(link, &selected).await;
    Err(match error {
        ActorError::Backend { activity, message } => ActorError::Backend {
            activity,
            message: format!("{message}\n{log}"),
        },
        other => other,
    })
}

/// Returns a job whose pods are not those of the run's sandboxes, which have no network.
fn job(run: &Run, options: &BuildOptions, image: &str, recipe: &Recipe, name: &str) -> Value {
    let labels = [("type", "image-build"), (BUILD, name)];
    let file = recipe.dockerfile.to_string_lossy();
    let insecure = match options.registry.plain_http {
        true => ",registry.insecure=true",
        false => "",
    };
    let command = [
        "/bin/sh",
        "-c",
        SCRIPT,
        "sh",
        &options.buildkit,
        image,
        &file,
        insecure,
        "/context",
        "/given",
    ];
    let mut volumes = vec![
        json!({ "name": "context", "emptyDir": { "sizeLimit": "64Mi" } }),
        json!({ "name": "given", "configMap": { "name": name } }),
    ];
    let mut mounts = vec![
        json!({ "name": "context", "mountPath": "/context" }),
        json!({ "name": "given", "mountPath": "/given", "readOnly": true }),
    ];
    let mut variables = vec![json!({ "name": "HOME", "value": "/tmp" })];
    if let Some(secret) = &options.push_secret {
        let items = json!([{ "key": ".dockerconfigjson", "path": "config.json" }]);
        volumes.push(json!({ "name": "push", "secret": { "secretName": secret, "items": items } }));
        mounts.push(json!({ "name": "push", "mountPath": "/push", "readOnly": true }));
        variables.push(json!({ "name": "DOCKER_CONFIG", "value": "/push" }));
    }
    json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": run.metadata(name, &labels),
        "spec": {
            "backoffLimit": options.retries,
            "activeDeadlineSeconds": options.timeout.as_secs().max(1),
            "ttlSecondsAfterFinished": 300,
            "template": {
                "metadata": { "labels": {
                    RUN: run.labels()[RUN], "type": "image-build", BUILD: name,
                } },
                "spec": {
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": false,
                    "enableServiceLinks": false,
                    "securityContext": {
                        "runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532,
                        "seccompProfile": { "type": "RuntimeDefault" },
                    },
                    "containers": [{
                        "name": "build",
                        "image": options.client_image,
                        "command": command,
                        "env": variables,
                        "resources": { "limits": { "cpu": "500m", "memory": "256Mi" } },
                        "securityContext": {
                            "allowPrivilegeEscalation": false,
                            "capabilities": { "drop": ["ALL"] },
                        },
                        "volumeMounts": mounts,
                    }],
                    "volumes": volumes,
                },
            },
        },
    })
}

fn look_at_job(job: &Value) -> Look<()> {
    if job["status"]["succeeded"].as_i64().unwrap_or(0) > 0 {
        return Look::Ready(());
    }
    match condition(job, "Failed") {
        Some(failed) => {
            let text = |name: &str| failed[name].as_str().unwrap_or("-").to_owned();
            Look::Failed(format!(
                "the build failed: {}: {}",
                text("reason"),
                text("message")
            ))
        }
        None => Look::Wait("the build has not ended".to_owned()),
    }
}

/// Returns the end of the log of the last pod, or why there is none.
async fn log(link: &Link, selected: &str) -> String {
    let found = match link.list(&pods(), selected).await {
        Ok(found) => found,
        Err(error) => return error.to_string(),
    };
    let started = |pod: &Value| pod["metadata"]["creationTimestamp"].to_string();
    let Some(last) = found.into_iter().max_by_key(started) else {
        return "there is no pod, and so no log".to_owned();
    };
    let name = last["metadata"]["name"].as_str().unwrap_or_default();
    let requests = Request::new(format!("/api/v1/namespaces/{}/pods", link.namespace));
    let params = LogParams {
        tail_lines: Some(LOG_LINES),
        limit_bytes: Some(LOG_BYTES),
        ..LogParams::default()
    };
    let read = patiently("reading a build's log", link.limit, || async {
        let request = requests
            .logs(name, &params)
            .map_err(kube::Error::BuildRequest)?;
        link.client.request_text(request).await
    });
    read.await.unwrap_or_else(|error| error.to_string())
}

fn jobs() -> ApiResource {
    resource("batch/v1", "Job", "jobs")
}

fn config_maps() -> ApiResource {
    resource("v1", "ConfigMap", "configmaps")
}
