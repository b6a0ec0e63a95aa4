//! What the episodes of a run share: where actors come from, what they start from and how many there may be.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use super::Controls;
use super::images::{Images, Source};
use super::slots::{Slot, Slots};
use crate::actor::image::{Built, ImageBuilder};
use crate::actor::{
    ActorBackend, ActorError, ActorLimits, ActorSpec, FileTree, RootFs, TreeLimits,
};
use crate::causes::with_causes;
use crate::task::RepositoryTask;
use crate::task::harbor::{EnvironmentConfig, HarborPart, HarborTask};
use crate::task::swebench::SwebenchInstance;

/// How long an actor may live: longer than any episode, whose turns wait for the model.
const LIFETIME: Duration = Duration::from_hours(48);

/// How long actors may take to end when a run does.
const ENDING: Duration = Duration::from_secs(30);

/// Time between looks at whether who waits for a build still wants it.
const LOOK: Duration = Duration::from_millis(50);

/// Where the bases of repositories are seen in an actor.
const BASE: &str = "/base";
/// Where what their tests need is seen.
const DEPENDENCIES: &str = "/deps";

/// Settings of a [`Workplace`].
#[derive(Debug, Clone)]
pub struct WorkplaceConfig {
    /// What stands in for the images of tasks; each task's own image unless given.
    pub root: Option<RootFs>,
    /// What has images built that are not there; nothing unless given.
    pub builder: Option<Arc<dyn ImageBuilder>>,
    /// A folder with `ID/testbed` and `ID/deps` of each instance of SWE-bench; both in the image unless given.
    pub repositories: Option<PathBuf>,
    /// What an actor may use where its task does not say.
    pub limits: ActorLimits,
    /// What the artifacts of a Harbor task may hold together, in bytes.
    pub artifacts: u64,
    /// Episodes that have an actor at a time.
    pub max_actors: usize,
}

/// Where the episodes of a run have their actors.
#[derive(Debug)]
pub struct Workplace {
    backend: Arc<dyn ActorBackend>,
    config: WorkplaceConfig,
    images: Images,
    slots: Arc<Slots>,
    controls: Controls,
}

impl Workplace {
    /// Returns one whose actors are run by `backend`.
    #[must_use]
    pub fn new(backend: Arc<dyn ActorBackend>, config: WorkplaceConfig) -> Self {
        Self {
            backend,
            slots: Slots::new(config.max_actors),
            images: Images::new(config.root.clone(), config.builder.clone()),
            config,
            controls: Controls::default(),
        }
    }

    pub(super) fn backend(&self) -> &dyn ActorBackend {
        &*self.backend
    }

    pub(super) fn artifacts(&self) -> u64 {
        self.config.artifacts
    }

    pub(super) fn controls(&self) -> &Controls {
        &self.controls
    }

    /// Returns how many episodes have room for an actor, and how many wait for some.
    #[must_use]
    pub fn load(&self) -> (usize, usize) {
        self.slots.load()
    }

    /// Reads a folder of a task's, which is brought to an actor.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be read, and where it is larger than a tree may be: no policy had a part in it.
    pub(super) fn read_tree(&self, folder: &Path) -> Result<FileTree, ActorError> {
        let least = TreeLimits::default();
        let limits = TreeLimits {
            bytes: self.config.artifacts.max(least.bytes),
            ..least
        };
        FileTree::read_from(folder, limits).map_err(|error| {
            let remedy = match &error {
                ActorError::TreeTooLarge { unit: "bytes", .. } => "; raise `actor.artifacts`",
                _ => "",
            };
            invalid(format!(
                "`{}` of the task cannot be brought to it: {}{remedy}",
                folder.display(),
                with_causes(&error)
            ))
        })
    }

    /// Waits for room for an actor; none once the run ends, or `is_over`.
    pub(super) fn room(&self, is_over: &dyn Fn() -> bool) -> Option<Slot> {
        self.slots.take(is_over)
    }

    /// Waits for so long; fails once the run ends.
    pub(super) fn pause(&self, time: Duration) -> Result<(), ActorError> {
        match self.slots.pause(time) {
            true => Ok(()),
            false => Err(run_ends()),
        }
    }

    /// Ends all actors, whatever runs in them, and waits until their episodes have noticed. No other is started.
    pub fn close(&self) {
        self.slots.close();
        self.controls.close();
        self.images.shut_down();
        self.backend.shut_down();
        if !self.slots.wait_free(ENDING) {
            tracing::warn!("actors have not ended in time; the next run deletes what they leave");
        }
    }

    /// Checks that a task can be run here.
    ///
    /// # Errors
    ///
    /// Fails with what it asks for and there is not, and what helps.
    pub fn check(&self, task: &RepositoryTask) -> Result<(), ActorError> {
        let name = match task {
            RepositoryTask::Harbor(task) => &task.name,
            RepositoryTask::Swebench(instance) => &instance.instance_id,
        };
        let fits = |spec: &ActorSpec| match spec.check() {
            Err(ActorError::InvalidSpec { reason }) => Err(invalid(format!("`{name}`: {reason}"))),
            checked => checked,
        };
        // What it says besides its image does not depend on that.
        let any = || Built::from(RootFs::Host);
        let task = match task {
            RepositoryTask::Swebench(instance) => {
                fits(&self.instance_spec(instance, any())?)?;
                return (self.images).check(&instance.instance_id, &of_instance(instance));
            }
            RepositoryTask::Harbor(task) => task,
        };
        self.images.check(&task.name, &Source::of_agent(task))?;
        fits(&self.harbor_spec(task, &task.config.environment, any())?)?;
        let names_user = |part: &HarborPart| {
            part.agent_user(&task.config).is_some() || part.verifier_user(&task.config).is_some()
        };
        if task.parts.iter().any(names_user) && !self.backend.capabilities().users {
            tracing::warn!(
                task = task.name,
                backend = self.backend.name(),
                "a task says whose its programs are, and with this backend they are all of one user"
            );
        }
        for part in &task.parts {
            // What it cannot be given is told before anything is started.
            (part.verify_job(&task.config, &|_| None))
                .map_err(|error| invalid(format!("`{}`: {}", task.name, with_causes(&error))))?;
            if let Some(environment) = task.config.verifier_environment(part.step.as_ref()) {
                let source = Source::of_verifier(task, part);
                self.images.check(&task.name, &source)?;
                fits(&self.harbor_spec(task, environment, any())?)?;
            }
        }
        let bundled = task.parts.iter().any(|part| part.tests.is_empty());
        if bundled && self.images.stand_in().is_some() {
            return Err(invalid(format!(
                "the verifier of `{}` is in an image of its own, for which `actor.root` cannot stand in",
                task.name
            )));
        }
        Ok(())
    }

    /// Has all images of a task built that are not there; waits no longer once `is_over`.
    ///
    /// # Errors
    ///
    /// Fails where one cannot be built, which is nobody's doing in the task.
    pub(super) fn provide(
        self: &Arc<Self>,
        task: &Arc<RepositoryTask>,
        is_over: &dyn Fn() -> bool,
    ) -> Result<(), ActorError> {
        if self.config.builder.is_none() {
            return Ok(());
        }
        let (sender, receiver) = mpsc::channel();
        let (place, task) = (Arc::clone(self), Arc::clone(task));
        // Who is left alone with it ends when the run does, see `close`.
        std::thread::spawn(move || {
            let provided = place.provide_now(&task);
            // Whoever waits for it sees the place let go of.
            drop(place);
            sender.send(provided)
        });
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(provided) => return provided,
                Err(RecvTimeoutError::Timeout) if !is_over() => {}
                Err(_) => return Err(run_ends()),
            }
        }
    }

    fn provide_now(&self, task: &RepositoryTask) -> Result<(), ActorError> {
        self.spec(task)?;
        if let RepositoryTask::Harbor(task) = task {
            for part in &task.parts {
                self.verifier_spec(task, part)?;
            }
        }
        Ok(())
    }

    /// Returns what the actors of a task start from, which is built where it is not there.
    pub(super) fn spec(&self, task: &RepositoryTask) -> Result<ActorSpec, ActorError> {
        match task {
            RepositoryTask::Swebench(instance) => {
                let built = (self.images).get(&instance.instance_id, &of_instance(instance))?;
                self.instance_spec(instance, built)
            }
            RepositoryTask::Harbor(task) => {
                let built = self.images.get(&task.name, &Source::of_agent(task))?;
                self.harbor_spec(task, &task.config.environment, built)
            }
        }
    }

    /// Returns what the verifier of a part starts from if it has an actor of its own, and the agent does otherwise.
    pub(super) fn verifier_spec(
        &self,
        task: &HarborTask,
        part: &HarborPart,
    ) -> Result<ActorSpec, ActorError> {
        let own = task.config.verifier_environment(part.step.as_ref());
        let (environment, source) = match own {
            Some(own) => (own, Source::of_verifier(task, part)),
            None => (&task.config.environment, Source::of_agent(task)),
        };
        let built = self.images.get(&task.name, &source)?;
        self.harbor_spec(task, environment, built)
    }

    fn instance_spec(
        &self,
        instance: &SwebenchInstance,
        built: Built,
    ) -> Result<ActorSpec, ActorError> {
        let mut spec = ActorSpec::new(built.root);
        spec.env = built.env;
        spec.limits = ActorLimits {
            lifetime: LIFETIME,
            ..self.config.limits
        };
        spec.workdir = PathBuf::from(instance.workdir());
        match &self.config.repositories {
            Some(folder) => {
                let place = folder.join(&instance.instance_id);
                let testbed = place.join("testbed");
                if !testbed.is_dir() {
                    return Err(invalid(format!(
                        "`{}` is not there: `actor.repositories` must have the repository of each instance",
                        testbed.display()
                    )));
                }
                spec.mounts.push((testbed, BASE.into()));
                let dependencies = place.join("deps");
                if dependencies.is_dir() {
                    spec.mounts.push((dependencies, DEPENDENCIES.into()));
                }
            }
            None if self.images.stand_in() == Some(&RootFs::Host) => {
                return Err(invalid(format!(
                    "the repository of `{}` is not among this machine's programs; give `actor.repositories`",
                    instance.instance_id
                )));
            }
            None => {}
        }
        Ok(spec)
    }

    /// Returns what an actor of a Harbor task starts from: the agent's, or a verifier's of its own.
    fn harbor_spec(
        &self,
        task: &HarborTask,
        environment: &EnvironmentConfig,
        built: Built,
    ) -> Result<ActorSpec, ActorError> {
        if environment.gpus.unwrap_or(0) > 0 || environment.tpu.is_some() {
            return Err(invalid(format!(
                "`{}` asks for a GPU or TPU, which no actor has",
                task.name
            )));
        }
        let mut spec = ActorSpec::new(built.root);
        spec.env = built.env;
        if let Some(workdir) = built.workdir {
            spec.workdir = workdir;
        }
        let mebibytes = |asked: Option<i64>, default: u64| {
            asked
                .and_then(|asked| u64::try_from(asked).ok())
                .map_or(default, |asked| asked.saturating_mul(1 << 20))
        };
        let limits = self.config.limits;
        spec.limits = ActorLimits {
            memory: mebibytes(environment.memory_mb, limits.memory),
            disk: mebibytes(environment.storage_mb, limits.disk),
            cpu_millis: environment.cpus.map_or(limits.cpu_millis, millis),
            lifetime: LIFETIME,
            ..limits
        };
        if let Some(workdir) = &environment.workdir {
            spec.workdir = PathBuf::from(workdir);
        }
        spec.writable = ["/logs", "/tests"].map(PathBuf::from).to_vec();
        for (name, value) in &environment.env {
            if value.starts_with("${") {
                return Err(invalid(format!(
                    "`{}` asks for a variable of this machine (`environment.env.{name}`), which no task is given",
                    task.name
                )));
            }
            spec.env.insert(name.clone(), value.clone());
        }
        Ok(spec)
    }
}

/// Returns what an instance starts from.
fn of_instance(instance: &SwebenchInstance) -> Source {
    Source {
        image: Some(instance.image()),
        context: None,
    }
}

/// Returns so many CPUs in thousandths of one, at least the few that let anything be run.
#[must_use]
pub fn millis(cpus: f64) -> u32 {
    let time = Duration::try_from_secs_f64(cpus).unwrap_or(Duration::MAX);
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX).max(10)
}

/// The fault of who goes on while the run ends; it is not the policy's.
pub(super) fn run_ends() -> ActorError {
    ActorError::Lost {
        id: "-".to_owned(),
        reason: "the run ends".to_owned(),
    }
}

fn invalid(reason: String) -> ActorError {
    ActorError::InvalidSpec { reason }
}
