//! Actors in a Kubernetes cluster, made by the controllers of `OpenKruise` Agents or of SIG agent-sandbox.
//!
//! An actor is a pod of one container from an image, with the `RuntimeClass` of the options (gVisor unless said
//! otherwise), without a service account, without a network and, unless it is to be root, as Pod Security's
//! `restricted` asks. Commands run by `pods/exec` through the shell of the image, trees travel through its
//! `tar`: any image that has both will do. There are no snapshots; groups are created one by one, from a pool
//! of warm sandboxes.
//!
//! **Nothing outlives a run.** All its objects are owned by a `Lease` and labelled with the run; they are
//! deleted when the backend is dropped. What a crashed run left is deleted when the next backend is opened,
//! once its lease is not renewed any more. Behind that, sandboxes have a time at which their controller ends
//! them, and pods a deadline.
//!
//! **Whose failure.** A container that was killed for its memory, or that wrote more than it may, is the
//! guest's doing. A pod that was evicted, preempted, deleted or whose node was lost is
//! [`ActorError::Lost`], as is a connection that ended before the program.
//!
//! Faults of the API server that pass (429, 500, 503, a restart) are waited out, each for the time of the
//! options. Programs are the exception: a request that may have started one is not repeated.

mod access;
mod actor;
mod agent_sandbox;
mod builder;
mod cluster;
mod exec;
mod fate;
mod images;
mod kruise;
mod mark;
mod options;
mod pulls;
mod retry;
mod run;
mod sandboxes;
mod script;
mod template;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kube::core::ApiResource;
use serde_json::Value;

pub use self::access::AccessReview;
use self::actor::KubernetesActor;
use self::builder::ClusterBuilder;
use self::cluster::{Cluster, Link};
pub use self::images::BuildOptions;
use self::images::Images;
pub use self::options::{ApiServer, Controller, KubernetesOptions, Owner, Toleration};
use self::run::{INSTANCE, Run};
use self::sandboxes::{Pool, Sandboxes, Wish};
use super::image::{ImageBuilder, Recipe};
use super::janitor::Janitor;
use super::script::is_name;
use super::{Actor, ActorBackend, ActorError, ActorSpec, Capabilities, Isolation, RootFs};

/// The `RuntimeClass` that stands for gVisor.
const GVISOR: &str = "gvisor";
/// How long the sandboxes of a run may take to be gone when it ends.
const GONE: Duration = Duration::from_secs(60);
/// The most requests that one step makes one after another, for its bound.
const REQUESTS: u32 = 8;

/// Runs actors in a cluster.
#[derive(Debug)]
pub struct KubernetesBackend {
    machine: Arc<Machine>,
}

/// While there are others, the pool is in use.
type Use = Arc<()>;

/// A pool that was made.
#[derive(Debug)]
struct Made {
    name: String,
    used: Use,
    /// The number of the last sandbox that was asked of it.
    last: u64,
}

/// A pod, and no other that takes its name later.
#[derive(Debug, Clone)]
struct Pod {
    name: String,
    uid: String,
}

/// What the actors of a backend share.
#[derive(Debug)]
struct Machine {
    /// Taken when it ends.
    janitor: Option<Janitor>,
    renewal: tokio::task::JoinHandle<()>,
    cluster: Arc<Cluster>,
    run: Run,
    sandboxes: Sandboxes,
    images: Option<Images>,
    options: KubernetesOptions,
    /// Pools by the digests of their templates.
    pools: Mutex<BTreeMap<String, Made>>,
    /// Pools so far.
    pools_made: AtomicU64,
    /// Sandboxes so far.
    count: AtomicU64,
    /// Whether the run ends.
    ends: Arc<AtomicBool>,
}

impl KubernetesBackend {
    /// Connects to the cluster, checks that it has the controller's kinds and that all that is needed is
    /// allowed, deletes what crashed runs left, and forbids the run's sandboxes all traffic.
    ///
    /// # Errors
    ///
    /// Fails where any of that is not so; the message names all rights that are missing.
    pub fn open(options: KubernetesOptions) -> Result<Self, ActorError> {
        options.check()?;
        let cluster = Arc::new(Cluster::connect(&options)?);
        let sandboxes = Sandboxes::new(&options.controller);
        let run = {
            let kinds = kinds(&sandboxes, &options);
            let link = cluster.link().clone();
            let options = options.clone();
            let rights = rights(&sandboxes, &options);
            let most = link.limit * REQUESTS;
            cluster.wait("opening the cluster", most, async move {
                access::check(&link, options.controller.name(), &rights).await?;
                run::delete_leftovers(&link, &kinds).await?;
                Run::begin(&link, &options).await
            })?
        };
        let renewal = cluster.spawn(run.clone().keep(cluster.link().clone()));
        let janitor = Janitor::start().map_err(|source| ActorError::Files {
            activity: "starting the thread of a janitor",
            source,
        })?;
        // From here on it ends the run when it is dropped.
        let machine = Machine {
            janitor: Some(janitor),
            renewal,
            cluster,
            run,
            sandboxes,
            images: options.builds.clone().map(Images::new),
            options,
            pools: Mutex::default(),
            pools_made: AtomicU64::new(0),
            count: AtomicU64::new(0),
            ends: Arc::default(),
        };
        let run = machine.run.clone();
        machine.step("keeping sandboxes from the network", |link| async move {
            run.isolate(&link).await
        })?;
        Ok(Self {
            machine: Arc::new(machine),
        })
    }

    /// Builds an image unless its registry has it. Of many who ask for the same one at the same time, one
    /// has it built, and all have the result.
    ///
    /// # Errors
    ///
    /// Fails where the options have no builds, where the build fails, with the end of its log, and where the
    /// registry cannot be asked.
    pub fn ensure_image(&self, image: &str, recipe: &Recipe) -> Result<(), ActorError> {
        self.machine.ensure_image(image, recipe)
    }

    /// Returns what has images built for its actors; none where the options have no builds.
    #[must_use]
    pub fn builder(&self) -> Option<Arc<dyn ImageBuilder>> {
        let machine = Arc::clone(&self.machine);
        machine.images.is_some().then(|| {
            let builder = ClusterBuilder::new(machine);
            Arc::new(builder) as Arc<dyn ImageBuilder>
        })
    }
}

/// Asks a cluster what it has and allows of what a backend with these options needs; nothing is made.
///
/// # Errors
///
/// Fails where there is no cluster, where it does not answer, and where that takes longer than `limit`.
pub fn review_access(
    options: &KubernetesOptions,
    limit: Duration,
) -> Result<AccessReview, ActorError> {
    options.check()?;
    let cluster = Cluster::connect(options)?;
    let rights = rights(&Sandboxes::new(&options.controller), options);
    let link = cluster.link().clone();
    cluster.wait("asking what is allowed", limit, async move {
        access::review(&link, &rights).await
    })
}

/// Returns the rights that a backend needs.
fn rights(sandboxes: &Sandboxes, options: &KubernetesOptions) -> Vec<access::Right> {
    let mut rights = access::common();
    rights.extend(sandboxes.rights());
    if options.builds.is_some() {
        rights.extend(Images::rights());
    }
    rights
}

/// Returns the kinds of a run in the order in which they are deleted.
fn kinds(sandboxes: &Sandboxes, options: &KubernetesOptions) -> Vec<ApiResource> {
    let mut kinds = sandboxes.kinds();
    if options.builds.is_some() {
        kinds.extend(Images::kinds());
    }
    kinds
}

impl ActorBackend for KubernetesBackend {
    fn name(&self) -> &'static str {
        self.machine.name()
    }

    fn capabilities(&self) -> Capabilities {
        let options = &self.machine.options;
        Capabilities {
            isolation: match options.runtime_class.as_deref() {
                Some(GVISOR) => Isolation::UserKernel,
                _ => Isolation::Namespaces,
            },
            shell: true,
            network: false,
            root_folder: false,
            image: true,
            writable_root: options.user.uid == 0,
            background: true,
            users: false,
            snapshot: false,
            snapshot_memory: false,
            fork: false,
        }
    }

    fn shut_down(&self) {
        self.machine.cluster.close();
    }

    fn create(&self, spec: &ActorSpec) -> Result<Box<dyn Actor>, ActorError> {
        spec.check()?;
        let machine = &self.machine;
        let unsupported = |ability| {
            Err(ActorError::Unsupported {
                backend: machine.name(),
                ability,
            })
        };
        let RootFs::Image(image) = &spec.root else {
            return unsupported("start from files of this machine; name an image of a registry");
        };
        if !spec.mounts.is_empty() {
            return unsupported("show folders of this machine; put what is in them");
        }
        if let Some(name) = spec.env.keys().find(|name| !is_name(name)) {
            return Err(ActorError::InvalidSpec {
                reason: format!(
                    "a shell cannot keep the variable `{name}`; take letters, digits and `_`"
                ),
            });
        }
        let spec = ActorSpec {
            // Pods have one user, whatever was asked for.
            user: machine.options.user,
            ..spec.clone()
        };
        let (pool, used) = machine.pool(&spec, image)?;
        let number = machine.count.fetch_add(1, Ordering::Relaxed);
        let wish = Wish {
            name: machine.run.name(&number.to_string()),
            pool,
            task: run::task_label(image),
            lifetime: spec.limits.lifetime,
            limit: machine.options.ready_timeout,
        };
        let claim = wish.name.clone();
        let pod = machine
            .claim(wish, image)
            .inspect_err(|_| machine.release(claim.clone()))?;
        // Dropped on a failure, it deletes the sandbox.
        let actor = KubernetesActor::new(Arc::clone(machine), claim, pod, spec, used);
        actor.make_folders()?;
        Ok(Box::new(actor))
    }
}

impl Machine {
    fn name(&self) -> &'static str {
        self.options.controller.name()
    }

    fn link(&self) -> &Link {
        self.cluster.link()
    }

    /// Returns what builds images, where the options say so.
    fn images(&self) -> Result<&Images, ActorError> {
        self.images.as_ref().ok_or_else(|| ActorError::Unsupported {
            backend: self.name(),
            ability: "build images; say in its options who does",
        })
    }

    /// Has an image built unless its registry has it.
    fn ensure_image(&self, image: &str, recipe: &Recipe) -> Result<(), ActorError> {
        self.images()?.ensure(image, |options| {
            let (link, run) = (self.link().clone(), self.run.clone());
            let (options, recipe, name) = (options.clone(), recipe.clone(), image.to_owned());
            let most = options.timeout + link.limit * REQUESTS + Duration::from_secs(60);
            let cluster = &self.cluster;
            // What is left of a build that is given up ends with the run.
            cluster.wait_while_open("building an image", most, async move {
                images::build(&link, &run, &options, &name, &recipe).await
            })
        })
    }

    fn wait<T: Send + 'static>(
        &self,
        activity: &str,
        limit: Duration,
        work: impl Future<Output = Result<T, ActorError>> + Send + 'static,
    ) -> Result<T, ActorError> {
        self.cluster.wait(activity, limit, work)
    }

    /// Makes some requests.
    fn step<T: Send + 'static, F>(
        &self,
        activity: &str,
        work: impl FnOnce(Link) -> F,
    ) -> Result<T, ActorError>
    where
        F: Future<Output = Result<T, ActorError>> + Send + 'static,
    {
        let link = self.link().clone();
        let most = link.limit * REQUESTS;
        self.wait(activity, most, work(link))
    }

    /// Returns the name of the pool of a spec, which is made where there is none.
    fn pool(&self, spec: &ActorSpec, image: &str) -> Result<(String, Use), ActorError> {
        let template = template::pod(spec, image, &self.options, &self.run.labels());
        let mut digest = template::digest(&template);
        let mut warm = self.options.warm;
        if spec.is_rare {
            // Not the pool of others from the same template.
            digest.push_str("-r");
            warm = 0;
        }
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        let last = self.count.load(Ordering::Relaxed);
        if let Some(made) = pools.get_mut(&digest) {
            made.last = last;
            return Ok((made.name.clone(), Arc::clone(&made.used)));
        }
        while pools.len() >= self.options.pools.max(1) {
            let idle = pools
                .iter()
                .filter(|(_, made)| Arc::strong_count(&made.used) == 1);
            let Some(oldest) = idle.min_by_key(|(_, made)| made.last) else {
                break;
            };
            let oldest = oldest.0.clone();
            if let Some(made) = pools.remove(&oldest) {
                self.discard(made.name);
            }
        }
        // A new name each time: one that was discarded may not have been deleted yet.
        let number = self.pools_made.fetch_add(1, Ordering::Relaxed);
        let name = self.run.name(&format!("{digest}-{number}"));
        let pool = Pool {
            name: name.clone(),
            task: run::task_label(image),
            warm,
            template,
        };
        let (run, sandboxes) = (self.run.clone(), self.sandboxes.clone());
        self.step("making a pool of sandboxes", |link| async move {
            run.check_isolated(&link).await?;
            sandboxes.prepare(&link, &run, &pool).await
        })?;
        let used = Use::default();
        let made = Made {
            name: name.clone(),
            used: Arc::clone(&used),
            last,
        };
        pools.insert(digest, made);
        Ok((name, used))
    }

    /// Returns a pod that runs, is kept from the network and is run as was asked.
    fn claim(&self, wish: Wish, image: &str) -> Result<Pod, ActorError> {
        let (run, sandboxes) = (self.run.clone(), self.sandboxes.clone());
        let class = self.options.runtime_class.clone();
        let link = self.link().clone();
        // A claim and its sandbox, each in the time that one has.
        let most = 2 * wish.limit + REQUESTS * link.limit + Duration::from_secs(20);
        let cluster = &self.cluster;
        let hopeless = pulls::hopeless(link.clone(), run.instance.clone(), image.to_owned());
        cluster.wait_while_open("claiming a sandbox", most, async move {
            let pod = tokio::select! {
                pod = sandboxes.claim(&link, &run, &wish) => pod?,
                error = hopeless => return Err(error),
            };
            let found = link.get(&run::pods(), &pod).await?;
            let found = found.unwrap_or_default();
            let label = found["metadata"]["labels"][INSTANCE].as_str();
            let has_class = found["spec"]["runtimeClassName"].as_str() == class.as_deref();
            let uid = found["metadata"]["uid"].as_str().unwrap_or_default();
            match label == Some(run.instance.as_str()) && has_class {
                true => Ok(Pod {
                    uid: uid.to_owned(),
                    name: pod,
                }),
                false => Err(ActorError::Backend {
                    activity: "claiming a sandbox".to_owned(),
                    message: format!(
                        "the pod `{pod}` is not there with the label and the RuntimeClass that keep it apart"
                    ),
                }),
            }
        })
    }

    /// Deletes a sandbox.
    fn release_now(&self, claim: String) -> Result<(), ActorError> {
        let sandboxes = self.sandboxes.clone();
        self.step("deleting a sandbox", |link| async move {
            sandboxes.release(&link, &claim).await
        })
    }

    /// Deletes a sandbox in the background.
    fn release(&self, claim: String) {
        let sandboxes = self.sandboxes.clone();
        self.later("deleting a sandbox", |link| async move {
            sandboxes.release(&link, &claim).await
        });
    }

    /// Deletes a pool in the background.
    fn discard(&self, pool: String) {
        let sandboxes = self.sandboxes.clone();
        self.later("deleting a pool of sandboxes", |link| async move {
            sandboxes.discard(&link, &pool).await
        });
    }

    /// Makes some requests in the background.
    fn later<F>(&self, activity: &'static str, work: impl FnOnce(Link) -> F + Send + 'static)
    where
        F: Future<Output = Result<(), ActorError>> + Send + 'static,
    {
        let (cluster, ends) = (Arc::clone(&self.cluster), Arc::clone(&self.ends));
        let Some(janitor) = &self.janitor else { return };
        janitor.push(move || {
            // With the run everything of it is deleted, this too: what has piled up while the server was away would
            // only be waited for, one after another.
            if ends.load(Ordering::Relaxed) {
                return;
            }
            let link = cluster.link().clone();
            let most = link.limit * REQUESTS;
            if let Err(error) = cluster.wait(activity, most, work(link)) {
                // It ends with the run, or at its own time.
                tracing::warn!(%error, "an object is left in the cluster for now");
            }
        });
    }

    /// Returns what the cluster says of a pod, for people.
    fn describe(&self, pod: &str) -> String {
        let name = pod.to_owned();
        let found = self.step("reading a pod", |link| async move {
            link.get(&run::pods(), &name).await
        });
        match found {
            Ok(Some(found)) => {
                let status = &found["status"];
                let text = |name: &str| match &status[name] {
                    Value::Null => String::new(),
                    value => format!("{name}: {value}\n"),
                };
                let parts = [
                    "phase",
                    "reason",
                    "message",
                    "conditions",
                    "containerStatuses",
                ];
                parts.map(text).concat()
            }
            Ok(None) => format!("there is no pod `{pod}`\n"),
            Err(error) => format!("{error}\n"),
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Waits for what is being deleted in the background.
        self.ends.store(true, Ordering::Relaxed);
        drop(self.janitor.take());
        let (run, kinds) = (self.run.clone(), kinds(&self.sandboxes, &self.options));
        let link = self.link().clone();
        let most = link.limit * REQUESTS + GONE;
        let ended = self.wait("ending the run in the cluster", most, async move {
            run.end(&link, &kinds, GONE).await
        });
        self.renewal.abort();
        if let Err(error) = ended {
            tracing::warn!(%error, "objects of the run are left in the cluster until their lease is over");
        }
    }
}
