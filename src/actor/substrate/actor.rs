//! One actor of a cluster, and what is kept of one.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::api::{ActorState, ApiErrorKind, NewActor};
use super::patience::{POLL, patiently};
use super::{Cluster, DAY, end_actor, failed, fresh, gone};
use crate::actor::sandboxd::SandboxdActor;
use crate::actor::{
    Actor, ActorCommand, ActorError, ActorOutput, ActorSnapshot, ActorSpec, Ending, FileTree,
    TreeLimits, User,
};
use crate::process;

/// How long a server must not answer to count as gone.
const GONE: Duration = Duration::from_secs(5);

/// What is said of an actor that held too much memory.
const OUT_OF_MEMORY: &[&str] = &[
    "oomkill",
    "oom-kill",
    "oom kill",
    "out of memory",
    "memory limit",
];

/// An actor of a cluster.
#[derive(Debug)]
pub(super) struct SubstrateActor {
    inner: SandboxdActor,
    /// Whether a command of the guest's had root's rights: such may have ended the server.
    had_root: AtomicBool,
    /// Dropped after the above: then it is deleted.
    machine: Machine,
}

/// What the control plane has of an actor; it is deleted when this is dropped.
#[derive(Debug)]
struct Machine {
    cluster: Arc<Cluster>,
    name: String,
    template: String,
    /// What it started from, which must outlive it.
    tag: Option<Arc<Tag>>,
    is_deleted: bool,
}

impl SubstrateActor {
    /// Makes and starts an actor from its template, or from a tag.
    pub(super) fn start(
        cluster: &Arc<Cluster>,
        spec: &ActorSpec,
        template: &str,
        tag: Option<Arc<Tag>>,
    ) -> Result<Self, ActorError> {
        let is_new = tag.is_none();
        let until = process::deadline(cluster.options.ready_timeout);
        let name = cluster.name(spec.limits.lifetime);
        let new = NewActor {
            name: name.clone(),
            template: template.to_owned(),
            source_tag: tag.as_ref().map(|tag| tag.name.clone()),
        };
        // From here on it may be there, whatever the answer is.
        let machine = Machine {
            cluster: Arc::clone(cluster),
            name: name.clone(),
            template: template.to_owned(),
            tag,
            is_deleted: false,
        };
        patiently(until, || fresh(cluster.api.create_actor(&new)))
            .map_err(|error| failed("making an actor", &error))?;
        cluster.deny_egress(&name, until)?;
        machine.resume(until)?;
        let inner = cluster
            .connect(&name, spec, until)
            .map_err(|error| machine.explain(error))?;
        // What it runs in is deleted.
        inner.forget();
        if is_new {
            give_folders(&inner).map_err(|error| machine.explain(error))?;
        }
        Ok(Self {
            inner,
            had_root: AtomicBool::new(false),
            machine,
        })
    }

    /// Says why it does not do what it is asked for, and whose doing that is.
    fn explain(&self, error: ActorError) -> ActorError {
        let error = self.machine.explain(error);
        let is_the_guests = matches!(error, ActorError::Backend { .. })
            && self.had_root.load(Ordering::Relaxed)
            && self.machine.is_running()
            && self.inner.is_gone(GONE);
        match is_the_guests {
            true => ActorError::Ended {
                id: self.machine.name.clone(),
                reason: "a program with root's rights has ended the server inside".to_owned(),
            },
            false => error,
        }
    }
}

/// Gives the folders of its spec, and what the image has in them, to who commands are.
fn give_folders(actor: &SandboxdActor) -> Result<(), ActorError> {
    let ActorSpec {
        user,
        writable,
        workdir,
        ..
    } = actor.spec();
    if user.uid == 0 {
        return Ok(());
    }
    let owner = format!("{}:{}", user.uid, user.gid);
    let mut argv = ["chown", "-R", "-h", &owner, "--"]
        .map(str::to_owned)
        .to_vec();
    let folders = writable.iter().chain([workdir]);
    argv.extend(folders.map(|folder| folder.to_string_lossy().into_owned()));
    let command = ActorCommand {
        user: Some(User::default()),
        cwd: Some("/".into()),
        ..ActorCommand::new(argv)
    };
    let output = actor.exec(&command)?;
    match output.is_success() {
        true => Ok(()),
        false => Err(ActorError::Backend {
            activity: "giving an actor its folders".to_owned(),
            message: format!("{:?}: {}", output.ending, output.stderr.text().trim()),
        }),
    }
}

impl Machine {
    /// Starts it, once there is a worker for it.
    fn resume(&self, until: Instant) -> Result<(), ActorError> {
        patiently(until, || self.cluster.api.resume_actor(&self.name)).map_err(|error| {
            let failed = failed("starting an actor", &error);
            match error.kind {
                ApiErrorKind::Precondition => self.explain(failed),
                _ => failed,
            }
        })
    }

    /// Says why an actor does not answer, where the control plane knows.
    fn explain(&self, error: ActorError) -> ActorError {
        if error.is_guests_doing() {
            return error;
        }
        let ActorError::Backend { activity, .. } = &error else {
            return error;
        };
        let message = match self.cluster.api.actor(&self.name) {
            Ok(actor) if actor.state == ActorState::Crashed => {
                let why = actor.crash.unwrap_or_else(|| "nobody says why".to_owned());
                if is_out_of_memory(&why) {
                    return ActorError::Ended {
                        id: self.name.clone(),
                        reason: why,
                    };
                }
                format!("the actor crashed: {why}")
            }
            Err(gone) if gone.kind == ApiErrorKind::NotFound => "the actor is gone".to_owned(),
            _ => return error,
        };
        ActorError::Backend {
            activity: activity.clone(),
            message,
        }
    }

    fn is_running(&self) -> bool {
        let actor = self.cluster.api.actor(&self.name);
        actor.is_ok_and(|actor| actor.state == ActorState::Running)
    }

    /// Keeps it under a tag, and starts it again.
    fn keep(&self) -> Result<Tag, ActorError> {
        const KEEPING: &str = "keeping an actor";
        let api = &self.cluster.api;
        let until = process::deadline(self.cluster.options.ready_timeout);
        let kept = (|| {
            patiently(until, || api.suspend_actor(&self.name))
                .map_err(|error| self.explain(failed(KEEPING, &error)))?;
            self.suspended(until)?;
            let tag = Tag {
                cluster: Arc::clone(&self.cluster),
                name: self.cluster.name(DAY),
            };
            patiently(until, || {
                let made = api.create_tag(&tag.name, &self.name);
                if made
                    .as_ref()
                    .is_err_and(|error| error.kind == ApiErrorKind::Unavailable)
                {
                    // What an attempt that failed has left is in the way of the next.
                    gone(api.delete_tag(&tag.name))?;
                }
                made
            })
            .map_err(|error| match error.kind {
                ApiErrorKind::Unimplemented => ActorError::Unsupported {
                    backend: super::NAME,
                    ability: "keep actors: this control plane has no tags",
                },
                _ => failed(KEEPING, &error),
            })?;
            tag.usable(until)?;
            Ok(tag)
        })();
        // It goes on, kept or not.
        let resumed = self.resume(process::deadline(self.cluster.options.ready_timeout));
        let tag = kept?;
        resumed?;
        Ok(tag)
    }

    fn suspended(&self, until: Instant) -> Result<(), ActorError> {
        loop {
            let actor = patiently(until, || self.cluster.api.actor(&self.name));
            let actor = actor.map_err(|error| failed("keeping an actor", &error))?;
            match actor.state {
                ActorState::Suspended => return Ok(()),
                ActorState::Suspending | ActorState::Running if Instant::now() < until => {}
                state => {
                    let error = ActorError::Backend {
                        activity: "keeping an actor".to_owned(),
                        message: format!("it is {state:?}, not suspended"),
                    };
                    return Err(self.explain(error));
                }
            }
            std::thread::sleep(POLL);
        }
    }

    fn delete(mut self) -> Result<(), ActorError> {
        self.is_deleted = true;
        let deleted = end_actor(&*self.cluster.api, &self.name);
        deleted.map_err(|error| failed("deleting an actor", &error))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if !self.is_deleted {
            let name = self.name.clone();
            self.cluster.push("an actor", name, end_actor);
        }
        // Jobs are done in their order, so if this was the last of the tag, it is deleted after the actor.
        drop(self.tag.take());
    }
}

fn is_out_of_memory(why: &str) -> bool {
    let why = why.to_ascii_lowercase();
    // Not within other words: a cluster may have no room.
    let mut words = why.split(|letter: char| !letter.is_ascii_alphanumeric());
    words.any(|word| word == "oom") || OUT_OF_MEMORY.iter().any(|mark| why.contains(mark))
}

impl Actor for SubstrateActor {
    fn id(&self) -> &str {
        &self.machine.name
    }

    fn spec(&self) -> &ActorSpec {
        self.inner.spec()
    }

    fn exec(&self, command: &ActorCommand) -> Result<ActorOutput, ActorError> {
        let user = command.user.unwrap_or_else(|| self.inner.spec().user);
        self.had_root.fetch_or(user.uid == 0, Ordering::Relaxed);
        let done = self.inner.exec(command);
        match done.map_err(|error| self.explain(error)) {
            Err(ActorError::Ended { reason, .. }) => Ok(ActorOutput::of(Ending::Killed { reason })),
            done => done,
        }
    }

    fn put(&self, folder: &Path, tree: &FileTree) -> Result<(), ActorError> {
        let done = self.inner.put(folder, tree);
        done.map_err(|error| self.explain(error))
    }

    fn get(&self, path: &Path, limits: TreeLimits) -> Result<FileTree, ActorError> {
        let done = self.inner.get(path, limits);
        done.map_err(|error| self.explain(error))
    }

    fn snapshot(&self) -> Result<Arc<dyn ActorSnapshot>, ActorError> {
        let tag = self.inner.at_rest(|| self.machine.keep())?;
        Ok(Arc::new(SubstrateSnapshot {
            tag: Arc::new(tag),
            template: self.machine.template.clone(),
            spec: self.inner.spec().clone(),
            had_root: self.had_root.load(Ordering::Relaxed),
        }))
    }

    fn logs(&self) -> String {
        let logs = self.machine.cluster.api.logs(&self.machine.name);
        logs.unwrap_or_default()
    }

    fn destroy(self: Box<Self>) -> Result<(), ActorError> {
        let Self { inner, machine, .. } = *self;
        drop(inner);
        machine.delete()
    }
}

/// A snapshot with a name; it is deleted when this is dropped.
#[derive(Debug)]
pub(super) struct Tag {
    cluster: Arc<Cluster>,
    name: String,
}

impl Tag {
    /// Waits until actors can start from it.
    fn usable(&self, until: Instant) -> Result<(), ActorError> {
        const ACTIVITY: &str = "waiting for a snapshot";
        loop {
            let tag = patiently(until, || self.cluster.api.tag(&self.name));
            if tag.map_err(|error| failed(ACTIVITY, &error))?.is_usable {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(ActorError::Hung {
                    activity: ACTIVITY.to_owned(),
                    limit: self.cluster.options.ready_timeout,
                });
            }
            std::thread::sleep(POLL);
        }
    }
}

impl Drop for Tag {
    fn drop(&mut self) {
        let name = self.name.clone();
        self.cluster
            .push("a tag", name, |api, name| gone(api.delete_tag(name)));
    }
}

/// What an actor was when it was kept.
#[derive(Debug)]
struct SubstrateSnapshot {
    tag: Arc<Tag>,
    template: String,
    spec: ActorSpec,
    /// What ran then may run on.
    had_root: bool,
}

impl ActorSnapshot for SubstrateSnapshot {
    fn restore(&self) -> Result<Box<dyn Actor>, ActorError> {
        let tag = Arc::clone(&self.tag);
        let cluster = &self.tag.cluster;
        let actor = SubstrateActor::start(cluster, &self.spec, &self.template, Some(tag))?;
        actor.had_root.store(self.had_root, Ordering::Relaxed);
        Ok(Box::new(actor))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_told_from_other_ends() {
        assert!(is_out_of_memory("container sandboxd: OOMKilled"));
        assert!(is_out_of_memory("sandbox exceeded its memory limit"));
        assert!(!is_out_of_memory("worker pod was evicted"));
    }
}
