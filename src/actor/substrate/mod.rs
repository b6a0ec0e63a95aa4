//! Actors of an Agent Substrate in a cluster: gVisor somewhere else, many more than there are machines for.
//!
//! The control plane makes, resumes, suspends and deletes actors ([`SubstrateApi`], over gRPC or by
//! `kubectl ate`); it runs no programs in them. That is what `wardian sandboxd` inside does, which is reached
//! through the cluster's router by a header that names the actor. A snapshot is a suspended actor with a
//! *tag*, and each actor that is created from a tag goes on from there with all its processes: a group starts
//! from what one of them prepared.
//!
//! **Whose doing.** A control plane or a router that fails, has no room or takes too long is a fault of ours,
//! and so is an actor that crashed, unless what is said of it is that it held too much memory: then a program
//! of the guest's has ended its own actor. So it has where the actor runs, the router answers and the server
//! inside is gone, if a command had root's rights: others cannot end it.
//!
//! **What is left behind.** Actors and tags are deleted when they are dropped, in the background, which the
//! backend waits for when it is dropped. Names tell the next run what a crashed one left.

mod actor;
mod api;
mod grpc;
mod kubectl;
pub mod messages;
mod names;
mod options;
mod patience;
mod templates;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use api::{
    ActorState, ActorView, ApiError, ApiErrorKind, NewActor, NewTemplate, SubstrateApi, TagView,
    TemplateView,
};
pub use grpc::GrpcApi;
pub use kubectl::KubectlAte;
pub use options::{ControlPlane, SubstrateOptions, TemplateOptions};

use self::actor::SubstrateActor;
use self::names::Names;
use self::patience::{POLL, patiently};
use self::templates::Templates;
use super::background::Background;
use super::janitor::Janitor;
use super::sandboxd::{SandboxdActor, SandboxdOptions};
use super::{Actor, ActorBackend, ActorError, ActorSpec, Capabilities, Isolation, RootFs, User};
use crate::causes::with_causes;
use crate::process;

const NAME: &str = "substrate";
/// The header that names the actor to the router.
const TARGET: &str = "ate-target-actor";
/// The port at which the router reaches an actor.
const PORT: u16 = 80;
/// The variable with the token of the server inside.
const TOKEN: &str = "WARDIAN_SANDBOXD_TOKEN";
/// Where the image with this program is shown.
const VOLUME: &str = "/opt/wardian";
/// How much longer than anything of a run its objects are kept from those who collect what is left.
const SLACK: Duration = Duration::from_secs(3600);
/// How long a tag or a template may be needed.
const DAY: Duration = Duration::from_secs(24 * 3600);

/// Starts actors in a cluster.
#[derive(Debug)]
pub struct SubstrateBackend {
    cluster: Arc<Cluster>,
}

/// What all actors of a run share.
#[derive(Debug)]
struct Cluster {
    api: Arc<dyn SubstrateApi>,
    options: SubstrateOptions,
    names: Names,
    count: AtomicU64,
    templates: Mutex<Templates>,
    /// Whether it was said that the server has no policies.
    has_warned: AtomicBool,
    janitor: Janitor,
    background: Arc<Background>,
}

impl SubstrateBackend {
    /// Reaches the control plane, and deletes what crashed runs left.
    ///
    /// # Errors
    ///
    /// Fails where the options make no sense, and where the control plane cannot be reached or lets nobody
    /// list the atespace.
    pub fn open(options: SubstrateOptions) -> Result<Self, ActorError> {
        let background = Arc::new(Background::start()?);
        let api: Arc<dyn SubstrateApi> = match &options.control {
            ControlPlane::Grpc {
                url,
                tls,
                token_file,
            } => Arc::new(
                GrpcApi::new(
                    url,
                    tls,
                    token_file.clone(),
                    &options.atespace,
                    options.call_timeout,
                    Arc::clone(&background),
                )
                .map_err(|reason| ActorError::InvalidSpec { reason })?,
            ),
            ControlPlane::Kubectl { program, arguments } => Arc::new(KubectlAte::new(
                process::find_program(program).ok_or(ActorError::NotInstalled {
                    program: "kubectl",
                    remedy: "install kubectl and the plugin `ate`, or name the program",
                })?,
                arguments.clone(),
                &options.atespace,
                options.call_timeout,
            )),
        };
        Self::with_api(api, options, background)
    }

    fn with_api(
        api: Arc<dyn SubstrateApi>,
        options: SubstrateOptions,
        background: Arc<Background>,
    ) -> Result<Self, ActorError> {
        let names = Names::new(options.owner.as_deref())?;
        let janitor = Janitor::start().map_err(|source| ActorError::Files {
            activity: "starting a thread",
            source,
        })?;
        let cluster = Cluster {
            api,
            options,
            names,
            count: AtomicU64::new(0),
            templates: Mutex::default(),
            has_warned: AtomicBool::new(false),
            janitor,
            background,
        };
        cluster.collect()?;
        Ok(Self {
            cluster: Arc::new(cluster),
        })
    }
}

impl ActorBackend for SubstrateBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            isolation: Isolation::UserKernel,
            shell: true,
            network: false,
            root_folder: false,
            image: true,
            writable_root: true,
            background: true,
            users: true,
            snapshot: true,
            snapshot_memory: true,
            fork: true,
        }
    }

    fn shut_down(&self) {
        self.cluster.background.close();
    }

    fn create(&self, spec: &ActorSpec) -> Result<Box<dyn Actor>, ActorError> {
        spec.check()?;
        let RootFs::Image(image) = &spec.root else {
            return Err(ActorError::Unsupported {
                backend: NAME,
                ability: "start from files of this machine; name an image",
            });
        };
        if !spec.mounts.is_empty() {
            return Err(ActorError::Unsupported {
                backend: NAME,
                ability: "show folders of this machine; put them into the image, or use `put`",
            });
        }
        let template = self.cluster.template(image, spec.limits.memory)?;
        let mut spec = spec.clone();
        if spec.user == User::default() {
            spec.user = self.cluster.options.user;
        }
        let actor = SubstrateActor::start(&self.cluster, &spec, &template, None)?;
        Ok(Box::new(actor))
    }
}

impl Cluster {
    /// Deletes what crashed runs left: actors first, as tags must outlive those that started from them.
    fn collect(&self) -> Result<(), ActorError> {
        let left = |name: &String| self.names.is_left_over(name);
        let say = |name: &str, deleted: Result<(), ApiError>| match deleted {
            Ok(()) => tracing::info!(name, "deleted what a crashed run left"),
            Err(error) => tracing::warn!(name, %error, "what a crashed run left stays"),
        };
        let actors = self.api.actors().map_err(|error| ActorError::Unusable {
            backend: NAME,
            reason: format!(
                "cannot list the actors of the atespace `{}`: {error}; see to the address, the certificate \
                 or token, and that the atespace is there",
                self.options.atespace
            ),
        })?;
        for name in actors.into_iter().map(|actor| actor.name).filter(left) {
            say(&name, end_actor(&*self.api, &name));
        }
        // A server may know no tags, or let this one see none.
        let tags = self.api.tags().unwrap_or_default();
        for name in tags.into_iter().map(|tag| tag.name).filter(left) {
            say(&name, gone(self.api.delete_tag(&name)));
        }
        let templates = self.api.templates().unwrap_or_default();
        let templates = templates.into_iter().map(|template| template.name);
        for name in templates.filter(left) {
            say(&name, gone(self.api.delete_template(&name)));
        }
        Ok(())
    }

    /// Returns a new name for something that is needed for at most `time`.
    fn name(&self, time: Duration) -> String {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        self.names.name(number, time.saturating_add(SLACK))
    }

    /// Returns the template of an image, which is made where there is none.
    fn template(&self, image: &str, memory: u64) -> Result<String, ActorError> {
        if let Some(name) = self.options.templates.get(image) {
            return Ok(name.clone());
        }
        let invalid = |reason: String| Err(ActorError::InvalidSpec { reason });
        let Some(options) = &self.options.new_templates else {
            return invalid(format!(
                "there is no template for the image `{image}`; name one, or say how they are made"
            ));
        };
        for pinned in [Some(image), options.sandboxd_image.as_deref()] {
            if let Some(image) = pinned.filter(|image| !is_pinned(image)) {
                return invalid(format!(
                    "the image `{image}` must be named by its digest: `NAME@sha256:…`"
                ));
            }
        }
        // Held, so that those who ask at once wait for one.
        let mut made = self
            .templates
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let key = (image.to_owned(), memory);
        if let Some(name) = made.get(&key) {
            return Ok(name);
        }
        let template = NewTemplate {
            name: self.name(DAY),
            image: image.to_owned(),
            command: [
                options.program.as_str(),
                "sandboxd",
                "--listen",
                "0.0.0.0:80",
                "--token-env",
                TOKEN,
            ]
            .map(str::to_owned)
            .to_vec(),
            env: [(TOKEN.to_owned(), self.options.token.text().to_owned())].into(),
            port: PORT,
            volume: options
                .sandboxd_image
                .clone()
                .map(|image| (image, VOLUME.to_owned())),
            storage_location: options.storage_location.clone(),
            sandbox_config: options.sandbox_config.clone(),
            worker_labels: options.worker_labels.clone(),
            cpu: options.cpu.clone(),
            memory,
        };
        let until = process::deadline(options.ready_timeout);
        let name = template.name.clone();
        patiently(until, || fresh(self.api.create_template(&template)))
            .map_err(|error| failed("making a template", &error))?;
        // It is there from now on, whatever becomes of it.
        let ready = self.template_ready(&name, until);
        match ready {
            Ok(()) => {
                made.insert(key, name.clone());
                Ok(name)
            }
            Err(error) => {
                self.push("a template", name, |api, name| {
                    gone(api.delete_template(name))
                });
                Err(error)
            }
        }
    }

    fn template_ready(&self, name: &str, until: Instant) -> Result<(), ActorError> {
        const ACTIVITY: &str = "waiting for the first snapshot of a template";
        loop {
            let template = patiently(until, || self.api.template(name));
            let template = template.map_err(|error| failed(ACTIVITY, &error))?;
            if let Some(message) = template.error {
                return Err(ActorError::Backend {
                    activity: ACTIVITY.to_owned(),
                    message,
                });
            }
            if template.is_ready {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(ActorError::Hung {
                    activity: ACTIVITY.to_owned(),
                    limit: (self.options.new_templates.as_ref())
                        .map_or(Duration::ZERO, |options| options.ready_timeout),
                });
            }
            std::thread::sleep(POLL);
        }
    }

    /// Has an actor reach nothing.
    ///
    /// # Errors
    ///
    /// Fails where the server has no policies, unless the options leave that to the cluster's network.
    fn deny_egress(&self, name: &str, until: Instant) -> Result<(), ActorError> {
        match patiently(until, || fresh(self.api.deny_egress(name))) {
            Err(error) if error.kind == ApiErrorKind::Unimplemented => {
                if !self.options.allow_missing_egress_policies {
                    return Err(ActorError::Unusable {
                        backend: NAME,
                        reason: format!(
                            "has a control plane without egress policies ({error}), so that nothing of ours \
                             keeps actors from networks; where the cluster's network does, say so by \
                             `actor.substrate.allow_missing_egress_policies`"
                        ),
                    });
                }
                if !self.has_warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "this control plane has no egress policies: what actors reach is up to the \
                         cluster's network"
                    );
                }
                Ok(())
            }
            done => done.map_err(|error| failed("denying a network", &error)),
        }
    }

    /// Claims the server in a running actor.
    fn connect(
        &self,
        name: &str,
        spec: &ActorSpec,
        until: Instant,
    ) -> Result<SandboxdActor, ActorError> {
        let target = format!("{}/{name}", self.options.atespace);
        let options = SandboxdOptions {
            headers: vec![(TARGET.to_owned(), target)],
            tls: self.options.router_tls.clone(),
            patience: self.options.patience,
            ready_timeout: until.saturating_duration_since(Instant::now()),
            ..SandboxdOptions::new(self.options.router.clone(), self.options.token.clone())
        };
        let background = Arc::clone(&self.background);
        SandboxdActor::connect_on(NAME, name.to_owned(), background, &options, spec)
    }

    /// Does something in the background that is awaited in the end.
    fn push(
        &self,
        what: &'static str,
        name: String,
        job: impl FnOnce(&dyn SubstrateApi, &str) -> Result<(), ApiError> + Send + 'static,
    ) {
        let api = Arc::clone(&self.api);
        self.janitor.push(move || {
            if let Err(error) = job(&*api, &name) {
                tracing::warn!(name, %error, "{what} is left over");
            }
        });
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let made = std::mem::take(
            self.templates
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner),
        );
        for name in made.into_names() {
            self.push("a template", name, |api, name| {
                gone(api.delete_template(name))
            });
        }
    }
}

/// Deletes an actor, whatever its state is; where the server knows no such thing, it is suspended before.
fn end_actor(api: &dyn SubstrateApi, name: &str) -> Result<(), ApiError> {
    let until = Instant::now() + Duration::from_secs(30);
    let mut deleted = patiently(until, || gone(api.delete_actor(name)));
    let not_yet = |error: &ApiError| {
        let passes = [ApiErrorKind::Precondition, ApiErrorKind::Unavailable];
        passes.contains(&error.kind) && Instant::now() + POLL < until
    };
    while deleted.as_ref().is_err_and(not_yet) {
        // One that is being suspended, or started, refuses for now.
        match gone(api.suspend_actor(name)) {
            Err(error) if !not_yet(&error) => return Err(error),
            _ => std::thread::sleep(POLL),
        }
        deleted = gone(api.delete_actor(name));
    }
    deleted
}

/// What is gone need not be deleted.
fn gone(deleted: Result<(), ApiError>) -> Result<(), ApiError> {
    match deleted {
        Err(error) if error.kind == ApiErrorKind::NotFound => Ok(()),
        deleted => deleted,
    }
}

/// What is there by a name that nobody else has, we have made: the answer was lost.
fn fresh(made: Result<(), ApiError>) -> Result<(), ApiError> {
    match made {
        Err(error) if error.kind == ApiErrorKind::Exists => Ok(()),
        made => made,
    }
}

fn failed(activity: &str, error: &ApiError) -> ActorError {
    ActorError::Backend {
        activity: activity.to_owned(),
        message: with_causes(error),
    }
}

/// Whether an image is named by its digest.
fn is_pinned(image: &str) -> bool {
    image.split_once("@sha256:").is_some_and(|(name, digest)| {
        !name.is_empty()
            && digest.len() == 64
            && digest
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_pinned_by_digests() {
        let digest = "0123456789abcdef".repeat(4);
        assert!(is_pinned(&format!(
            "registry.example.org/a:1@sha256:{digest}"
        )));
        for wrong in [
            "a:latest",
            "a@sha256:12",
            &format!("@sha256:{digest}"),
            &format!("a@sha256:{}", digest.to_uppercase()),
        ] {
            assert!(!is_pinned(wrong), "{wrong}");
        }
    }
}
