//! The API server: a client on threads of its own, whose answers are waited for with a bound.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use futures_util::StreamExt as _;
use kube::api::{
    DeleteParams, DynamicObject, ListParams, Patch, PatchParams, WatchEvent, WatchParams,
};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Client, Config};
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::options::{ApiServer, KubernetesOptions};
use super::retry::{Backoff, causes, failed, is_missing, is_passing, patiently};
use crate::actor::ActorError;

/// Who applies, for the server's book of fields.
const MANAGER: &str = "wardian";
/// Objects of one page of a list.
const PAGE: u32 = 200;
/// How long a watch may last before it is begun anew: one that was cut in silence says nothing for ever.
const WATCH: u32 = 30;
/// What is left of a bound for the answer to get from the threads.
const SLACK: Duration = Duration::from_secs(5);

/// What an object that is waited for says.
#[derive(Debug)]
pub(super) enum Look<T> {
    /// It is ready.
    Ready(T),
    /// Not yet, with what is known.
    Wait(String),
    /// It never will be.
    Failed(String),
}

/// A client of an API server in one namespace.
#[derive(Debug)]
pub(super) struct Cluster {
    link: Link,
    /// Taken when it ends.
    runtime: Option<Runtime>,
    closing: watch::Sender<bool>,
}

/// What asynchronous work needs of a cluster.
#[derive(Clone)]
pub(super) struct Link {
    pub(super) client: Client,
    pub(super) namespace: String,
    /// How long one request may take, with its repetitions.
    pub(super) limit: Duration,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The client holds credentials.
        f.debug_struct("Link")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

impl Cluster {
    /// Makes a client; nothing is asked yet.
    ///
    /// # Errors
    ///
    /// Fails where there is no configuration or it makes no sense, and where there are no threads.
    pub(super) fn connect(options: &KubernetesOptions) -> Result<Self, ActorError> {
        let backend = options.controller.name();
        let unusable = |reason: String| ActorError::Unusable { backend, reason };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("actor-kubernetes")
            .enable_all()
            .build()
            .map_err(|source| ActorError::Files {
                activity: "starting the threads of a client",
                source,
            })?;
        let server = options.api_server.clone();
        let config = wait(&runtime, "reading the kubeconfig", SLACK, async move {
            configure(server).await
        })?;
        let mut config = config.map_err(|reason| {
            unusable(format!(
                "has no API server: {reason}; set `KUBECONFIG`, or run in a pod with a service account"
            ))
        })?;
        // We repeat ourselves, with a bound of our own.
        config.default_retry = false;
        let namespace = options
            .namespace
            .clone()
            .unwrap_or_else(|| config.default_namespace.clone());
        let client = {
            let _inside = runtime.enter();
            Client::try_from(config).map_err(|error| {
                unusable(format!(
                    "cannot be a client of the API server: {}",
                    causes(&error)
                ))
            })?
        };
        Ok(Self {
            link: Link {
                client,
                namespace,
                limit: options.request_timeout,
            },
            runtime: Some(runtime),
            closing: watch::Sender::new(false),
        })
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    /// Does work on the client's threads and waits for it, from wherever it is called.
    ///
    /// # Errors
    ///
    /// Fails as the work does, and where it takes longer than `limit`.
    pub(super) fn wait<T: Send + 'static>(
        &self,
        activity: &str,
        limit: Duration,
        work: impl Future<Output = Result<T, ActorError>> + Send + 'static,
    ) -> Result<T, ActorError> {
        wait(self.runtime(), activity, limit, work)?
    }

    /// As [`Self::wait`], and ends it once [`Self::close`] is called.
    ///
    /// # Errors
    ///
    /// As for [`Self::wait`], and where it was ended.
    pub(super) fn wait_while_open<T: Send + 'static>(
        &self,
        activity: &str,
        limit: Duration,
        work: impl Future<Output = Result<T, ActorError>> + Send + 'static,
    ) -> Result<T, ActorError> {
        let mut closing = self.closing.subscribe();
        let what = activity.to_owned();
        self.wait(activity, limit, async move {
            tokio::select! {
                done = work => done,
                _ = closing.wait_for(|is_closing| *is_closing) => Err(ActorError::Backend {
                    activity: what,
                    message: "the run ends".to_owned(),
                }),
            }
        })
    }

    /// Ends what waits for sandboxes and for programs in them, now and from now on.
    pub(super) fn close(&self) {
        self.closing.send_replace(true);
    }

    /// Does work on the client's threads until the handle is aborted.
    pub(super) fn spawn(
        &self,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> tokio::task::JoinHandle<()> {
        self.runtime().spawn(work)
    }

    fn runtime(&self) -> &Runtime {
        self.runtime
            .as_ref()
            .expect("it is taken when this is dropped")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // To wait for its threads is not allowed on those of another runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Does work on the threads of `runtime`.
fn wait<T: Send + 'static>(
    runtime: &Runtime,
    activity: &str,
    limit: Duration,
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, ActorError> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let task = runtime.spawn(async move {
        let done = timeout(limit, work).await;
        // Nobody listens where the caller has given up.
        let _ = sender.send(done);
    });
    match receiver.recv_timeout(limit.saturating_add(SLACK)) {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(_)) | Err(RecvTimeoutError::Timeout) => {
            task.abort();
            Err(ActorError::Hung {
                activity: activity.to_owned(),
                limit,
            })
        }
        Err(RecvTimeoutError::Disconnected) => Err(ActorError::Backend {
            activity: activity.to_owned(),
            message: "the client's thread has ended".to_owned(),
        }),
    }
}

async fn configure(server: ApiServer) -> Result<Config, String> {
    match server {
        ApiServer::Infer => Config::infer().await.map_err(|error| causes(&error)),
        ApiServer::Kubeconfig { path, context } => {
            let file = Kubeconfig::read_from(&path).map_err(|error| causes(&error))?;
            let options = KubeConfigOptions {
                context,
                ..KubeConfigOptions::default()
            };
            Config::from_custom_kubeconfig(file, &options)
                .await
                .map_err(|error| format!("`{}`: {}", path.display(), causes(&error)))
        }
        ApiServer::Url(url) => match url.parse() {
            Ok(parsed) => Ok(Config::new(parsed)),
            Err(_) => Err(format!("`{url}` is no address")),
        },
    }
}

/// Returns a kind with all that tells it from others: names of kinds are not unique over groups.
pub(super) fn resource(group_version: &str, kind: &str, plural: &str) -> ApiResource {
    let (group, version) = group_version
        .rsplit_once('/')
        .unwrap_or(("", group_version));
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

impl Link {
    /// Returns the objects of a kind.
    pub(super) fn api(&self, kind: &ApiResource) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, kind)
    }

    /// Returns the object of a name, if there is one.
    pub(super) async fn get(
        &self,
        kind: &ApiResource,
        name: &str,
    ) -> Result<Option<Value>, ActorError> {
        let activity = format!("reading {} `{name}`", kind.kind);
        let api = self.api(kind);
        let found = patiently(&activity, self.limit, || api.get_opt(name)).await?;
        Ok(found.map(|object| value(&object)))
    }

    /// Returns the objects with labels.
    pub(super) async fn list(
        &self,
        kind: &ApiResource,
        labels: &str,
    ) -> Result<Vec<Value>, ActorError> {
        let activity = format!("listing {}", kind.plural);
        let api = self.api(kind);
        let mut found = Vec::new();
        let mut params = ListParams::default().labels(labels).limit(PAGE);
        loop {
            let page = patiently(&activity, self.limit, || api.list(&params)).await?;
            found.extend(page.items.iter().map(value));
            match page.metadata.continue_ {
                Some(token) if !token.is_empty() => params = params.continue_token(&token),
                _ => return Ok(found),
            }
        }
    }

    /// Makes an object as given, or brings the one of its name to that.
    pub(super) async fn apply(
        &self,
        kind: &ApiResource,
        object: &Value,
    ) -> Result<Value, ActorError> {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let activity = format!("applying {} `{name}`", kind.kind);
        let api = self.api(kind);
        let params = PatchParams::apply(MANAGER).force();
        let patch = Patch::Apply(object);
        let done = patiently(&activity, self.limit, || api.patch(name, &params, &patch)).await?;
        Ok(value(&done))
    }

    /// Changes fields of an object.
    pub(super) async fn merge(
        &self,
        kind: &ApiResource,
        name: &str,
        change: &Value,
    ) -> Result<(), ActorError> {
        let activity = format!("changing {} `{name}`", kind.kind);
        let api = self.api(kind);
        let (params, patch) = (PatchParams::default(), Patch::Merge(change));
        patiently(&activity, self.limit, || api.patch(name, &params, &patch)).await?;
        Ok(())
    }

    /// Deletes an object and what it owns; one that is gone is no trouble.
    pub(super) async fn delete(&self, kind: &ApiResource, name: &str) -> Result<(), ActorError> {
        let activity = format!("deleting {} `{name}`", kind.kind);
        let api = self.api(kind);
        let params = DeleteParams::background();
        patiently(&activity, self.limit, || async {
            match api.delete(name, &params).await {
                Ok(_) => Ok(()),
                Err(error) if is_missing(&error) => Ok(()),
                Err(error) => Err(error),
            }
        })
        .await
    }

    /// Waits until one of the objects with labels is ready; watches that end, however they do, are begun
    /// anew from a list.
    ///
    /// # Errors
    ///
    /// Fails where `look` says so, where an object is deleted, where the server refuses, and after `limit`.
    pub(super) async fn until<T>(
        &self,
        kind: &ApiResource,
        labels: &str,
        activity: &str,
        limit: Duration,
        mut look: impl FnMut(&Value) -> Look<T>,
    ) -> Result<T, ActorError> {
        let until = Instant::now() + limit;
        let api = self.api(kind);
        let mut last = format!("there is no {}", kind.kind);
        let mut was_seen = false;
        let mut backoff = Backoff::new();
        let fault = |message: String| ActorError::Backend {
            activity: activity.to_owned(),
            message,
        };
        let list = ListParams::default().labels(labels);
        let watch = WatchParams::default().labels(labels).timeout(WATCH);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(fault(format!(
                    "not ready after {} s: {last}",
                    limit.as_secs()
                )));
            }
            let round = async {
                let objects = api.list(&list).await?;
                if was_seen && objects.items.is_empty() {
                    return Ok(Some(Err(format!("the {} was deleted", kind.kind))));
                }
                was_seen |= !objects.items.is_empty();
                for object in &objects.items {
                    match look(&value(object)) {
                        Look::Ready(ready) => return Ok(Some(Ok(ready))),
                        Look::Failed(reason) => return Ok(Some(Err(reason))),
                        Look::Wait(known) => last = known,
                    }
                }
                let version = objects.metadata.resource_version.unwrap_or_default();
                let events = api.watch(&watch, &version).await?;
                let mut events = std::pin::pin!(events);
                while let Some(event) = events.next().await {
                    match event? {
                        WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                            was_seen = true;
                            match look(&value(&object)) {
                                Look::Ready(ready) => return Ok(Some(Ok(ready))),
                                Look::Failed(reason) => return Ok(Some(Err(reason))),
                                Look::Wait(known) => last = known,
                            }
                        }
                        WatchEvent::Deleted(_) => {
                            return Ok(Some(Err(format!("the {} was deleted", kind.kind))));
                        }
                        WatchEvent::Bookmark(_) => {}
                        WatchEvent::Error(status) => return Err(kube::Error::Api(status)),
                    }
                }
                Ok::<_, kube::Error>(None)
            };
            let most = Duration::from_secs(u64::from(WATCH)) + SLACK;
            let error = match timeout(left.min(most), round).await {
                Ok(Ok(Some(Ok(ready)))) => return Ok(ready),
                Ok(Ok(Some(Err(reason)))) => return Err(fault(reason)),
                // It ended as watches do.
                Ok(Ok(None)) => None,
                Ok(Err(error)) if is_passing(&error) => {
                    tracing::debug!(%error, "a watch was cut");
                    Some(error)
                }
                Ok(Err(error)) => return Err(failed(activity, &error)),
                Err(_) => None,
            };
            if error.is_none() {
                backoff = Backoff::new();
            }
            let left = until.saturating_duration_since(Instant::now());
            sleep(backoff.pause(error.as_ref()).min(left)).await;
        }
    }
}

/// Returns an object as plain JSON.
fn value(object: &DynamicObject) -> Value {
    serde_json::to_value(object).unwrap_or_default()
}
