//! One actor in gVisor, and what is kept of one.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fs_err as fs;
use rustix::process::Signal;
use serde_json::Value;

use super::bundle;
use super::{Container, Machine};
use crate::actor::guest::{self, HELPER};
use crate::actor::removal::remove_tree;
use crate::actor::transfer::{self, Shell};
use crate::actor::{
    Actor, ActorCommand, ActorError, ActorOutput, ActorSnapshot, ActorSpec, Ending, FileTree,
    TreeLimits, User,
};
use crate::process;

/// How long a killed sandbox may take to be gone.
const GONE: Duration = Duration::from_secs(10);
/// How long a sandbox whose first process has ended may take to end.
const ENDING: Duration = Duration::from_secs(1);
/// How long the first process may take to kill all others.
const SETTLING: Duration = Duration::from_secs(3);
/// The most of a log that is returned.
const MAX_LOG: u64 = 64 << 10;

/// An actor in gVisor.
#[derive(Debug)]
pub(super) struct RunscActor {
    machine: Arc<Machine>,
    id: String,
    spec: ActorSpec,
    config: Value,
    /// The sandbox that it is at present; held while a command runs.
    container: Mutex<Container>,
    commands: AtomicU64,
    /// Whether it has run a command of its guest's, or is a copy of one that has.
    is_touched: AtomicBool,
}

impl RunscActor {
    pub(super) fn new(
        machine: Arc<Machine>,
        spec: ActorSpec,
        config: Value,
        container: Container,
        is_touched: bool,
    ) -> Self {
        Self {
            machine,
            id: container.id.clone(),
            spec,
            config,
            container: Mutex::new(container),
            commands: AtomicU64::new(0),
            is_touched: AtomicBool::new(is_touched),
        }
    }

    /// Makes the folders that its spec names.
    pub(super) fn make_folders(&self) -> Result<(), ActorError> {
        let User { uid, gid } = self.spec.user;
        let mut argv = [HELPER, "make"].map(str::to_owned).to_vec();
        argv.extend([uid.to_string(), gid.to_string()]);
        let folders = self.spec.writable.iter().chain([&self.spec.workdir]);
        argv.extend(folders.map(|folder| folder.to_string_lossy().into_owned()));
        let output = self.run(
            &self.lock(),
            &argv,
            &ActorCommand::new([""; 0]),
            User::default(),
        )?;
        match output.is_success() {
            true => Ok(()),
            false => Err(ActorError::Backend {
                activity: "making the folders of an actor".to_owned(),
                message: format!("{:?}: {}", output.ending, output.stderr.text().trim()),
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Container> {
        self.container
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `argv`, with everything else as `command` says.
    fn run(
        &self,
        container: &Container,
        argv: &[String],
        command: &ActorCommand,
        user: User,
    ) -> Result<ActorOutput, ActorError> {
        if let Some(ending) = container.life.ended() {
            return Ok(ActorOutput::of(ending));
        }
        let started = Instant::now();
        let number = self.commands.fetch_add(1, Ordering::Relaxed);
        let description = container.folder.join(format!("exec-{number}.json"));
        let pid_file = container.folder.join(format!("exec-{number}.pid"));
        let described = ActorCommand {
            argv: argv.to_vec(),
            env: command.env.clone(),
            ..ActorCommand::new([""; 0])
        };
        let process = bundle::process(&self.spec, &described, user, Path::new("/"));
        fs::write(&description, process.to_string()).map_err(|source| ActorError::Files {
            activity: "describing a program",
            source,
        })?;
        let runsc = &self.machine.runsc;
        let mut client = runsc.command(&[
            "exec",
            &format!("--process={}", description.display()),
            &format!("--internal-pid-file={}", pid_file.display()),
            &container.id,
        ]);
        // Who ends is the first process, which kills all others; then the client has nothing to wait for.
        let kill = |_| {
            if let Err(error) = runsc.call("killing processes", &["kill", &container.id, "USR1"]) {
                tracing::debug!(%error, "an actor's processes could not be killed");
            }
        };
        let finished = process::run(
            &mut client,
            &command.stdin,
            command.timeout,
            command.max_output,
            |_| false,
            kill,
        )
        .map_err(|source| runsc.failed(source))?;
        let has_started = pid_file.exists();
        for path in [description, pid_file] {
            let _ = fs::remove_file(path);
        }
        let code = finished.status.and_then(|status| status.code());
        if finished.timed_out && (code.is_none() || !self.has_settled(&container.id)) {
            // Its processes are still there, or those of the next command would be taken for them.
            container.life.end(Ending::Killed {
                reason: "its processes did not end when they were killed".to_owned(),
            });
        }
        let ending = match (container.life.ended(), code) {
            _ if finished.timed_out => Ending::TimedOut {
                limit: command.timeout,
            },
            (Some(ending), _) => ending,
            (None, Some(code)) if has_started => Ending::Exited { code },
            // It may be ending by what another of its processes did.
            (None, _) if container.life.wait_gone(ENDING) => Ending::Killed {
                reason: "its sandbox has ended".to_owned(),
            },
            // Guests can see to that: by files that they hold open, or by the rights of `/`.
            (None, _) if self.is_touched.load(Ordering::Relaxed) => {
                let why = finished.stderr.text().trim().to_owned();
                tracing::warn!(actor = self.id, why, "an actor starts no program any more");
                let ending = Ending::Killed {
                    reason: format!("no program could be started in it any more: {why}"),
                };
                container.life.end(ending.clone());
                ending
            }
            (None, _) => {
                return Err(ActorError::Backend {
                    activity: "starting a program".to_owned(),
                    message: finished.stderr.text().trim().to_owned(),
                });
            }
        };
        Ok(ActorOutput {
            ending,
            stdout: finished.stdout,
            stderr: finished.stderr,
            elapsed: started.elapsed(),
        })
    }
}

impl RunscActor {
    /// Waits until the first process has killed all others that it was told to kill, and returns whether it
    /// has.
    fn has_settled(&self, container: &str) -> bool {
        let runsc = &self.machine.runsc;
        let until = Instant::now() + SETTLING;
        while Instant::now() < until {
            let mut client = runsc.command(&["exec", container, HELPER, "settled"]);
            let asked = process::run(&mut client, &[], SETTLING, 4096, |_| false, |_| ());
            let code = asked.ok().and_then(|finished| finished.status?.code());
            // It may have been killed, too, and then it has to ask again.
            if code == Some(128 + Signal::TERM.as_raw()) {
                return true;
            }
        }
        false
    }
}

impl Shell for RunscActor {
    fn exec_as(&self, command: &ActorCommand, user: User) -> Result<ActorOutput, ActorError> {
        transfer::check(command)?;
        let argv = guest::exec(&self.spec, command);
        self.run(&self.lock(), &argv, command, user)
    }
}

impl Actor for RunscActor {
    fn id(&self) -> &str {
        &self.id
    }

    fn spec(&self) -> &ActorSpec {
        &self.spec
    }

    fn exec(&self, command: &ActorCommand) -> Result<ActorOutput, ActorError> {
        let output = self.exec_as(command, command.user.unwrap_or(self.spec.user));
        self.is_touched.store(true, Ordering::Relaxed);
        output
    }

    fn put(&self, folder: &Path, tree: &FileTree) -> Result<(), ActorError> {
        transfer::put(self, folder, tree)
    }

    fn get(&self, path: &Path, limits: TreeLimits) -> Result<FileTree, ActorError> {
        transfer::get(self, path, limits)
    }

    fn come_first(&self, is_first: bool) {
        if let Some(cpu) = &self.lock().cpu {
            cpu.come_first(is_first);
        }
    }

    fn snapshot(&self) -> Result<Arc<dyn ActorSnapshot>, ActorError> {
        let mut container = self.lock();
        if let Some(ending) = container.life.ended() {
            return Err(transfer::ended(&self.id, &ending));
        }
        let snapshot = RunscSnapshot {
            machine: Arc::clone(&self.machine),
            image: self.machine.folder("s")?,
            spec: self.spec.clone(),
            config: self.config.clone(),
            is_touched: self.is_touched.load(Ordering::Relaxed),
        };
        let image = format!("--image-path={}", snapshot.image.display());
        // The checkpoint ends the sandbox (the option that lets it go on hangs), so this actor goes on from
        // it as all others do.
        let arguments = ["checkpoint", &image, &container.id];
        self.machine.runsc.call("keeping an actor", &arguments)?;
        let next = snapshot.start()?;
        let last = std::mem::replace(&mut *container, next);
        self.machine.delete(last.id, last.folder, last.cpu);
        Ok(Arc::new(snapshot))
    }

    fn logs(&self) -> String {
        let path = self.lock().folder.join("runsc.log");
        let end = read_end(&path).unwrap_or_default();
        String::from_utf8_lossy(&end).into_owned()
    }

    fn destroy(self: Box<Self>) -> Result<(), ActorError> {
        let life = {
            let container = self.lock();
            container.life.end(destroyed());
            Arc::clone(&container.life)
        };
        match life.wait_gone(GONE) {
            true => Ok(()),
            false => Err(ActorError::Hung {
                activity: "ending an actor".to_owned(),
                limit: GONE,
            }),
        }
    }
}

impl Drop for RunscActor {
    fn drop(&mut self) {
        let mut container = self.lock();
        container.life.end(destroyed());
        let cpu = container.cpu.take();
        self.machine
            .delete(container.id.clone(), container.folder.clone(), cpu);
    }
}

fn destroyed() -> Ending {
    Ending::Killed {
        reason: "it was destroyed".to_owned(),
    }
}

/// A checkpoint: the memory, processes and files of an actor.
#[derive(Debug)]
struct RunscSnapshot {
    machine: Arc<Machine>,
    image: PathBuf,
    spec: ActorSpec,
    config: Value,
    is_touched: bool,
}

impl RunscSnapshot {
    fn start(&self) -> Result<Container, ActorError> {
        self.machine.restore(&self.config, &self.spec, &self.image)
    }
}

impl ActorSnapshot for RunscSnapshot {
    fn restore(&self) -> Result<Box<dyn Actor>, ActorError> {
        let container = self.start()?;
        Ok(Box::new(RunscActor::new(
            Arc::clone(&self.machine),
            self.spec.clone(),
            self.config.clone(),
            container,
            self.is_touched,
        )))
    }
}

impl Drop for RunscSnapshot {
    fn drop(&mut self) {
        let image = self.image.clone();
        self.machine.janitor.push(move || {
            if let Err(error) = remove_tree(&image) {
                tracing::warn!(%error, "a snapshot is left over");
            }
        });
    }
}

/// Returns the last [`MAX_LOG`] bytes of a file, which may be of any length.
fn read_end(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut file = fs::File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(MAX_LOG)))?;
    let mut end = Vec::new();
    file.take(MAX_LOG).read_to_end(&mut end)?;
    Ok(end)
}
