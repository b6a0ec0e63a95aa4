//! The start of a group: an actor is prepared once, and all episodes of the group start from it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::Workplace;
use super::health::{Sick, wait_healthy};
use super::instance::start_instance;
use super::patch::Base;
use super::precedence::Precedence;
use super::users;
use crate::actor::{Actor, ActorCommand, ActorError, ActorSnapshot, ActorSpec, User};
use crate::causes::with_causes;
use crate::task::RepositoryTask;
use crate::task::harbor::{HarborPart, HarborTask};

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
    /// Who the policy is in each part; the actor's own user where the task does not say. Found by who prepares
    /// first.
    users: OnceLock<Vec<Option<User>>>,
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
            users: OnceLock::new(),
        }
    }

    pub(super) fn place(&self) -> &Arc<Workplace> {
        &self.place
    }

    pub(super) fn task(&self) -> &RepositoryTask {
        &self.task
    }

    /// Has built what the task's actors start from; waits no longer once `is_over`.
    ///
    /// # Errors
    ///
    /// Fails where that cannot be built, and once it is over.
    pub(super) fn provide(&self, is_over: &dyn Fn() -> bool) -> Result<(), ActorError> {
        self.place.provide(&self.task, is_over)
    }

    /// Returns what a patch is told from, once an actor was prepared.
    pub(super) fn base(&self) -> Option<&Base> {
        self.base.get()
    }

    /// Returns who the policy is in a part, once an actor was prepared.
    pub(super) fn user(&self, part: usize) -> Option<User> {
        *self.users.get()?.get(part)?
    }

    /// Starts an actor that is prepared.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be started or prepared: no policy was there yet.
    pub(super) fn actor(&self) -> Result<Box<dyn Actor>, ActorError> {
        let is_shared = self.members > 1 && self.place.backend().capabilities().snapshot;
        if !is_shared {
            return self.prepared(&self.place.spec(&self.task)?);
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = kept.clone() {
            return kept.restore();
        }
        let actor = self.prepared(&self.place.spec(&self.task)?)?;
        *kept = Some(actor.snapshot()?);
        Ok(actor)
    }

    /// Starts one for a control, in which this folder can be written, too.
    ///
    /// # Errors
    ///
    /// As for [`Self::actor`].
    pub(super) fn actor_with(&self, folder: &str) -> Result<Box<dyn Actor>, ActorError> {
        let mut spec = self.place.spec(&self.task)?;
        spec.writable.push(PathBuf::from(folder));
        spec.is_rare = true;
        self.prepared(&spec)
    }

    fn prepared(&self, spec: &ActorSpec) -> Result<Box<dyn Actor>, ActorError> {
        let backend = self.place.backend();
        match &*self.task {
            RepositoryTask::Swebench(instance) => {
                let actor = start_instance(backend, spec, instance)?;
                let base = Base::note(&*actor, instance.workdir())?;
                // It is the same for all who prepare.
                let _ = self.base.set(base);
                Ok(actor)
            }
            RepositoryTask::Harbor(task) => {
                let actor = backend.create(spec)?;
                must(
                    &*actor,
                    &task.name,
                    "making folders",
                    HARBOR_FOLDERS,
                    STEP_TIMEOUT,
                )?;
                let find = |part: &HarborPart| {
                    users::find(backend, &*actor, part.agent_user(&task.config))
                };
                let users: Result<Vec<_>, ActorError> = task.parts.iter().map(find).collect();
                // No policy was there that could have taken them away.
                let users = users.map_err(|error| ActorError::InvalidSpec {
                    reason: format!("`{}`: {}", task.name, with_causes(&error)),
                })?;
                if let Some(Some(user)) = users.first() {
                    give_workdir(&*actor, task, *user)?;
                }
                let _ = self.users.set(users);
                if let Some(check) = &task.config.environment.healthcheck {
                    let health = wait_healthy(&self.place, &*actor, check)?;
                    health.map_err(|sick| sick.fault(task))?;
                }
                let begun = begin_part(&self.place, &*actor, task, 0)?;
                begun.map_err(|sick| sick.fault(task))?;
                Ok(actor)
            }
        }
    }
}

/// Brings what a part of a task begins with, and waits until its health check says that it is ready.
///
/// # Errors
///
/// Fails where the actor does by our fault, where the task's folder cannot be read, and where the run ends.
pub(super) fn begin_part(
    place: &Workplace,
    actor: &dyn Actor,
    task: &HarborTask,
    part: usize,
) -> Result<Result<(), Sick>, ActorError> {
    let Some(HarborPart { workdir, step, .. }) = task.parts.get(part) else {
        return Ok(Ok(()));
    };
    let _first = Precedence::of(actor);
    if let Some(folder) = workdir {
        let tree = place.read_tree(folder)?;
        match actor.put(&actor.spec().workdir.clone(), &tree) {
            // What is in the actor is in the way.
            Err(error) if error.is_guests_doing() => return Ok(Err(Sick::of_error(&error))),
            put => put?,
        }
    }
    match step.as_ref().and_then(|step| step.healthcheck.as_ref()) {
        Some(check) => wait_healthy(place, actor, check),
        None => Ok(Ok(())),
    }
}

/// Gives the policy's user the working folder where nothing is in it: it was made for the actor, then, and not by the
/// task.
fn give_workdir(actor: &dyn Actor, task: &HarborTask, user: User) -> Result<(), ActorError> {
    let script = format!("[ -n \"$(ls -A .)\" ] || chown {}:{} .", user.uid, user.gid);
    let mut command = ActorCommand::shell(script);
    command.timeout = STEP_TIMEOUT;
    let output = actor.exec(&command)?;
    match output.is_success() {
        true => Ok(()),
        false => Err(ActorError::Backend {
            activity: format!("giving `{}` its working folder", task.name),
            message: format!("{:?}: {}", output.ending, output.stderr.text().trim()),
        }),
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
