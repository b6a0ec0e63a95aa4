//! The start of a group: an actor is prepared once, and all episodes of the group start from it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::Workplace;
use super::instance::start_instance;
use super::patch::Base;
use super::users;
use crate::actor::{
    Actor, ActorCommand, ActorError, ActorSnapshot, ActorSpec, FileTree, TreeLimits, User,
};
use crate::causes::with_causes;
use crate::grader::{GradeUsage, Verdict};
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
            return self.own_actor(&[]);
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = kept.clone() {
            return kept.restore();
        }
        let actor = self.own_actor(&[])?;
        *kept = Some(actor.snapshot()?);
        Ok(actor)
    }

    /// Starts one that nobody else starts from, in which these folders can be written, too.
    ///
    /// # Errors
    ///
    /// As for [`Self::actor`].
    pub(super) fn own_actor(&self, writable: &[&str]) -> Result<Box<dyn Actor>, ActorError> {
        let mut spec = self.place.spec(&self.task)?;
        spec.writable.extend(writable.iter().map(PathBuf::from));
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
                    health.map_err(|sick| sick.of(task))?;
                }
                let begun = begin_part(&self.place, &*actor, task, 0)?;
                begun.map_err(|sick| sick.of(task))?;
                Ok(actor)
            }
        }
    }
}

/// Why a sandbox is not ready, as its health check has it. Whose doing that is depends on who was there before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sick(pub(super) String);

impl Sick {
    /// Returns the fault of one where no policy has been.
    fn of(self, task: &HarborTask) -> ActorError {
        ActorError::Backend {
            activity: format!("checking the health of the sandbox for `{}`", task.name),
            message: self.0,
        }
    }

    /// Returns the verdict of a trial that nobody can go on with.
    pub(super) fn verdict(self) -> Verdict {
        let message = format!("the health check of the next step failed: {}", self.0);
        Verdict::infra_error(1, &message, GradeUsage::default())
    }
}

/// Brings what a part of a task begins with, and waits until its health check says that it is ready.
///
/// # Errors
///
/// Fails where the actor does, and where the run ends.
pub(super) fn begin_part(
    place: &Workplace,
    actor: &dyn Actor,
    task: &HarborTask,
    part: usize,
) -> Result<Result<(), Sick>, ActorError> {
    let Some(HarborPart { workdir, step, .. }) = task.parts.get(part) else {
        return Ok(Ok(()));
    };
    if let Some(folder) = workdir {
        let tree = FileTree::read_from(folder, TreeLimits::default())?;
        actor.put(&actor.spec().workdir.clone(), &tree)?;
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
    run(actor, script, timeout)?.map_err(|message| ActorError::Backend {
        activity: format!("{what} for `{task}`"),
        message,
    })
}

/// Runs a script; returns why it did not succeed, where it did not.
fn run(
    actor: &dyn Actor,
    script: &str,
    timeout: Duration,
) -> Result<Result<(), String>, ActorError> {
    let mut command = ActorCommand::shell(script);
    command.cwd = Some(Path::new("/").to_owned());
    command.timeout = timeout;
    let output = actor.exec(&command)?;
    Ok(match output.is_success() {
        true => Ok(()),
        false => Err(format!(
            "{:?}: {}",
            output.ending,
            output.stderr.text().trim()
        )),
    })
}

/// Waits until a sandbox says that it is ready.
fn wait_healthy(
    place: &Workplace,
    actor: &dyn Actor,
    check: &Healthcheck,
) -> Result<Result<(), Sick>, ActorError> {
    let seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or(STEP_TIMEOUT);
    let started = Instant::now();
    let mut failures = 0;
    loop {
        let tried = run(actor, &check.command, seconds(check.timeout_sec))?;
        let Err(why) = tried else { return Ok(Ok(())) };
        let is_starting = started.elapsed() < seconds(check.start_period_sec);
        failures += i64::from(!is_starting);
        if failures >= check.retries.max(1) {
            return Ok(Err(Sick(why)));
        }
        let pause = match is_starting {
            true => check.start_interval_sec,
            false => check.interval_sec,
        };
        place.pause(seconds(pause).min(STEP_TIMEOUT))?;
    }
}
