//! Actors in gVisor on this machine, by its program `runsc`.
//!
//! An actor is one sandbox: a kernel in user space and the processes over it. Its root filesystem is read
//! from the host and never written; what its processes write is kept in the sandbox's memory, goes into its
//! snapshots and ends with it. It has a loopback device and no other network.
//!
//! A snapshot is a checkpoint: memory and processes go on in every actor that starts from it.

mod actor;
mod bundle;
mod cli;
mod watch;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fs_err as fs;
use serde_json::Value;

use self::actor::RunscActor;
use self::cli::Runsc;
use self::watch::{Life, Watcher};
use super::cpu::{CpuShare, CpuTime};
use super::janitor::Janitor;
use super::run_folder::{HostProcess, RunFolder, kill_named};
use super::{Actor, ActorBackend, ActorError, ActorSpec, Capabilities, Isolation};
use crate::actor::removal::remove_tree;
use crate::process;

/// The backend's name.
const NAME: &str = "runsc";

/// How gVisor is run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunscOptions {
    /// The program, looked up in `PATH`.
    pub program: PathBuf,
    /// What traps the guests' system calls. `ptrace` works on every Linux; newer versions have `systrap`.
    pub platform: String,
    /// Where runs keep their files; a folder of this user below the one for temporary files unless given.
    pub folder: Option<PathBuf>,
}

impl Default for RunscOptions {
    fn default() -> Self {
        Self {
            program: PathBuf::from("runsc"),
            platform: "ptrace".to_owned(),
            folder: None,
        }
    }
}

/// Runs actors in gVisor.
#[derive(Debug)]
pub struct RunscBackend {
    machine: Arc<Machine>,
}

impl RunscBackend {
    /// Looks for `runsc`, and deletes what crashed runs left.
    ///
    /// # Errors
    ///
    /// Fails where it is not installed, where this user is not root, and where no folder can be made.
    pub fn open(options: &RunscOptions) -> Result<Self, ActorError> {
        let unusable = |reason: &str| ActorError::Unusable {
            backend: NAME,
            reason: reason.to_owned(),
        };
        if !cfg!(target_arch = "x86_64") {
            return Err(unusable("runs on x86-64 alone so far"));
        }
        let Some(program) = process::find_program(&options.program) else {
            return Err(ActorError::NotInstalled {
                program: "runsc",
                remedy: "apt-get install runsc",
            });
        };
        if !rustix::process::geteuid().is_root() {
            return Err(unusable(
                "needs root, who sets up the sandboxes; run as root",
            ));
        }
        let base = options
            .folder
            .clone()
            .unwrap_or_else(RunFolder::default_base);
        let run = RunFolder::open(&base)?;
        let files = |source| ActorError::Files {
            activity: "preparing the folder of a run",
            source,
        };
        let state = run.make("state")?;
        let shared = bundle::Shared::write(run.path()).map_err(files)?;
        Ok(Self {
            machine: Arc::new(Machine {
                runsc: Runsc::new(program, state, options.platform.clone()),
                janitor: Janitor::start().map_err(files)?,
                watcher: Watcher::start().map_err(files)?,
                shared,
                cpu: CpuTime::open(run.path()),
                run,
                count: AtomicU64::new(0),
            }),
        })
    }
}

impl ActorBackend for RunscBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            isolation: Isolation::UserKernel,
            shell: true,
            network: false,
            root_folder: true,
            image: false,
            writable_root: true,
            background: true,
            users: true,
            snapshot: true,
            snapshot_memory: true,
            fork: true,
        }
    }

    fn shut_down(&self) {
        self.machine.watcher.end_all();
    }

    fn create(&self, spec: &ActorSpec) -> Result<Box<dyn Actor>, ActorError> {
        spec.check()?;
        let config = self.machine.shared.config(spec)?;
        let container = self.machine.run(&config, spec)?;
        let actor = RunscActor::new(
            Arc::clone(&self.machine),
            spec.clone(),
            config,
            container,
            false,
        );
        actor.make_folders()?;
        Ok(Box::new(actor))
    }
}

/// What the actors of a backend share. Dropped with the last of them, it waits for the janitor and then
/// deletes the run's folder: fields are dropped in their order.
#[derive(Debug)]
struct Machine {
    runsc: Runsc,
    janitor: Janitor,
    watcher: Watcher,
    shared: bundle::Shared,
    cpu: CpuTime,
    run: RunFolder,
    /// Sandboxes and snapshots so far.
    count: AtomicU64,
}

impl Machine {
    /// Returns a new folder of the run.
    fn folder(&self, prefix: &str) -> Result<PathBuf, ActorError> {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        self.run.make(&numbered(prefix, number))
    }

    /// Starts a sandbox.
    fn run(&self, config: &Value, spec: &ActorSpec) -> Result<Container, ActorError> {
        self.start(config, spec, "starting an actor", &["run"])
    }

    /// Starts a sandbox from a checkpoint.
    fn restore(
        &self,
        config: &Value,
        spec: &ActorSpec,
        image: &Path,
    ) -> Result<Container, ActorError> {
        let image = format!("--image-path={}", image.display());
        self.start(config, spec, "restoring an actor", &["restore", &image])
    }

    fn start(
        &self,
        config: &Value,
        spec: &ActorSpec,
        activity: &'static str,
        command: &[&str],
    ) -> Result<Container, ActorError> {
        let files = |source| ActorError::Files { activity, source };
        let folder = self.folder("a")?;
        fs::write(folder.join("config.json"), config.to_string()).map_err(files)?;
        // Sandboxes of all runs share one space of names for their sockets.
        let name = |path: &Path| {
            path.file_name()
                .map(|name| name.to_string_lossy().into_owned())
        };
        let id = [self.run.path(), &folder]
            .map(|path| name(path).unwrap_or_default())
            .join("-")
            .replace('.', "_");
        let pid_file = folder.join("pid");
        let bundle = format!("--bundle={}", folder.display());
        let pid_flag = format!("--pid-file={}", pid_file.display());
        let arguments = [command, &["--detach", &bundle, &pid_flag, &id]].concat();
        let cpu = self
            .cpu
            .share(&name(&folder).unwrap_or_default(), &spec.limits);
        let started = self
            .runsc
            .start(activity, &arguments, &cpu, &folder.join("runsc.log"))
            .and_then(|()| {
                let pid = fs::read_to_string(&pid_file).map_err(files)?;
                let sandbox = HostProcess::of(pid.trim()).ok_or_else(|| ActorError::Backend {
                    activity: activity.to_owned(),
                    message: "the sandbox has ended at once".to_owned(),
                })?;
                Life::of(sandbox, spec.limits).map_err(files)
            });
        match started {
            Ok(life) => {
                let life = Arc::new(life);
                self.watcher.watch(&life);
                let cpu = Some(cpu);
                Ok(Container {
                    id,
                    folder,
                    life,
                    cpu,
                })
            }
            Err(error) => {
                self.delete(id, folder, Some(cpu));
                Err(error)
            }
        }
    }

    /// Deletes a sandbox in the background. `runsc delete` takes seconds for what is a kill and two files:
    /// there is no network and no control group to take down.
    fn delete(&self, id: String, folder: PathBuf, cpu: Option<CpuShare>) {
        let state = self.run.path().join("state");
        self.janitor.push(move || {
            kill_named(&folder);
            drop(cpu);
            for ending in ["state", "lock"] {
                let _ = fs::remove_file(state.join(format!("{id}_sandbox:{id}.{ending}")));
            }
            if let Err(error) = remove_tree(&folder) {
                tracing::warn!(%error, "the folder of an actor is left over");
            }
        });
    }
}

/// Returns a name that begins no other one: `runsc` takes an id that it does not know, such as that of a sandbox which
/// has just ended, for the beginning of another's, and would run or kill there what was meant for the first.
fn numbered(prefix: &str, number: u64) -> String {
    format!("{prefix}{number:020}")
}

/// A sandbox that was started.
#[derive(Debug)]
struct Container {
    /// Its name for `runsc`.
    id: String,
    /// Its bundle.
    folder: PathBuf,
    life: Arc<Life>,
    /// What it may use of the CPUs; taken when it is deleted.
    cpu: Option<CpuShare>,
}

#[cfg(test)]
mod tests {
    use super::numbered;

    #[test]
    fn no_name_begins_another() {
        let numbers = [0, 1, 10, 11, 100, u64::MAX];
        let names = numbers.map(|number| numbered("a", number));
        for (at, name) in names.iter().enumerate() {
            for (other, longer) in names.iter().enumerate() {
                assert!(at == other || !longer.starts_with(name), "{name} {longer}");
            }
        }
    }
}
