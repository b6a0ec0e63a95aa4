//! The start of a group: an actor is prepared once, and all episodes of the group start from it.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::Workplace;
use super::instance::start_instance;
use super::patch::Base;
use crate::actor::{Actor, ActorCommand, ActorError, ActorSnapshot, FileTree, TreeLimits};
use crate::task::RepositoryTask;
use crate::task::harbor::{HarborPart, HarborTask, Healthcheck};

/// The folders that Harbor's agents and verifiers expect.
const HARBOR_FOLDERS: &str =
    "mkdir -p /logs/agent /logs/verifier /logs/artifacts && chmod 777 /logs /logs/*";

/// How long one step of preparing may take.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);

/// Where the episodes of one task begin.
///
/// Whoever needs an actor first prepares it. Where there are others, and the backend can, it is kept before it
/// is used, and theirs start from there.
#[derive(Debug)]
pub struct GroupStart {
    place: Arc<Workplace>,
    task: Arc<RepositoryTask>,
    /// Episodes that start here.
    members: usize,
    /// Held by who prepares.
    kept: Mutex<Option<Arc<dyn ActorSnapshot>>>,
    /// What a patch is told from; noted by who prepares first.
    base: OnceLock<Base>,
}

impl GroupStart {
    /// Returns where `members` episodes of `task` begin.
    #[must_use]
    pub fn new(place: Arc<Workplace>, task: Arc<RepositoryTask>, members: usize) -> Self {
        Self {
            place,
            task,
            members,
            kept: Mutex::new(None),
            base: OnceLock::new(),
        }
    }

    pub(super) fn place(&self) -> &Arc<Workplace> {
        &self.place
    }

    pub(super) fn task(&self) -> &RepositoryTask {
        &self.task
    }

    /// Returns what a patch is told from, once an actor was prepared.
    pub(super) fn base(&self) -> Option<&Base> {
        self.base.get()
    }

    /// Starts an actor that is prepared.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be started or prepared: no policy was there yet.
    pub(super) fn actor(&self) -> Result<Box<dyn Actor>, ActorError> {
        let is_shared = self.members > 1 && self.place.backend().capabilities().snapshot;
        if !is_shared {
            return self.prepared();
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = kept.clone() {
            return kept.restore();
        }
        let actor = self.prepared()?;
        *kept = Some(actor.snapshot()?);
        Ok(actor)
    }

    fn prepared(&self) -> Result<Box<dyn Actor>, ActorError> {
        let spec = self.place.spec(&self.task)?;
        let backend = self.place.backend();
        match &*self.task {
            RepositoryTask::Swebench(instance) => {
                let actor = start_instance(backend, &spec, instance)?;
                let base = Base::note(&*actor, instance.workdir())?;
                // It is the same for all who prepare.
                let _ = self.base.set(base);
                Ok(actor)
            }
            RepositoryTask::Harbor(task) => {
                let actor = backend.create(&spec)?;
                must(
                    &*actor,
                    &task.name,
                    "making folders",
                    HARBOR_FOLDERS,
                    STEP_TIMEOUT,
                )?;
                if let Some(check) = &task.config.environment.healthcheck {
                    wait_healthy(&*actor, &task.name, check)?;
                }
                begin_part(&*actor, task, 0)?;
                Ok(actor)
            }
        }
    }
}

/// Brings what a part of a task begins with.
pub(super) fn begin_part(
    actor: &dyn Actor,
    task: &HarborTask,
    part: usize,
) -> Result<(), ActorError> {
    let Some(HarborPart { workdir, step, .. }) = task.parts.get(part) else {
        return Ok(());
    };
    if let Some(folder) = workdir {
        let tree = FileTree::read_from(folder, TreeLimits::default())?;
        actor.put(&actor.spec().workdir.clone(), &tree)?;
    }
    match step.as_ref().and_then(|step| step.healthcheck.as_ref()) {
        Some(check) => wait_healthy(actor, &task.name, check),
        None => Ok(()),
    }
}

/// Runs a script that has to succeed.
fn must(
    actor: &dyn Actor,
    task: &str,
    what: &str,
    script: &str,
    timeout: Duration,
) -> Result<(), ActorError> {
    let mut command = ActorCommand::shell(script);
    command.cwd = Some(Path::new("/").to_owned());
    command.timeout = timeout;
    let output = actor.exec(&command)?;
    match output.is_success() {
        true => Ok(()),
        false => Err(ActorError::Backend {
            activity: format!("{what} for `{task}`"),
            message: format!("{:?}: {}", output.ending, output.stderr.text().trim()),
        }),
    }
}

/// Waits until a sandbox says that it is ready.
fn wait_healthy(actor: &dyn Actor, task: &str, check: &Healthcheck) -> Result<(), ActorError> {
    let seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or(STEP_TIMEOUT);
    let started = Instant::now();
    let mut failures = 0;
    loop {
        let tried = must(
            actor,
            task,
            "checking the health of the sandbox",
            &check.command,
            seconds(check.timeout_sec),
        );
        let Err(error) = tried else { return Ok(()) };
        let is_starting = started.elapsed() < seconds(check.start_period_sec);
        failures += i64::from(!is_starting);
        if failures >= check.retries.max(1) {
            return Err(error);
        }
        let pause = match is_starting {
            true => check.start_interval_sec,
            false => check.interval_sec,
        };
        std::thread::sleep(seconds(pause).min(STEP_TIMEOUT));
    }
}
