//! Actors in namespaces of this machine's kernel, by bubblewrap: weaker than gVisor, and only for who asks.
//!
//! An actor is a few folders of the host that are its writable ones; each command is a set of namespaces of
//! its own over them, and all its processes end with it. The rest of its root filesystem is read-only. A
//! snapshot is a copy of the folders.
//!
//! Where root runs it, each actor is a user of the host of its own, without rights over anything but its
//! folders. Its processes, its open files and the size of a file are limits of the kernel. Memory and what it
//! wrote are counted from outside, a few times a second, and a command that has more than it may is killed.

mod arguments;
mod usage;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fs_err as fs;
use rustix::process::{Pid, Signal, kill_process_group};

pub(crate) use self::arguments::{Arguments, Network, PROGRAM};
use super::cpu::{CpuShare, CpuTime};
use super::guest::{self, GUEST_FOLDER};
use super::janitor::Janitor;
use super::run_folder::RunFolder;
use super::transfer::{self, Shell};
use super::{
    Actor, ActorBackend, ActorCommand, ActorError, ActorOutput, ActorSnapshot, ActorSpec,
    Capabilities, Ending, FileTree, Isolation, RootFs, TreeLimits, User,
};
use crate::actor::removal::remove_tree;
use crate::process;

/// The backend's name.
const NAME: &str = "bwrap";
/// The first of the users of the host who act for actors of root; nobody is expected to have their numbers.
const FIRST_USER: u32 = 0x7000_0000;
/// The longest that making or copying an actor's folders may take.
const COPY: Duration = Duration::from_secs(120);
/// Time between two looks at what a command uses.
const TICK: Duration = Duration::from_millis(25);

/// Runs actors in namespaces.
#[derive(Debug)]
pub struct BwrapBackend {
    machine: Arc<Machine>,
}

/// What the actors of a backend share; fields are dropped in their order.
#[derive(Debug)]
struct Machine {
    bwrap: PathBuf,
    prlimit: PathBuf,
    setpriv: PathBuf,
    janitor: Janitor,
    cpu: CpuTime,
    guest: PathBuf,
    run: RunFolder,
    /// Folders so far.
    count: AtomicU64,
    /// Whether the run ends, and every command with it.
    is_over: AtomicBool,
}

impl BwrapBackend {
    /// Looks for `bwrap`, and deletes what crashed runs left in `folder`: a folder of this user below the one
    /// for temporary files unless given. Others must be able to pass through it.
    ///
    /// # Errors
    ///
    /// Fails where it is not installed, and where no folder can be made.
    pub fn open(folder: Option<&Path>) -> Result<Self, ActorError> {
        if !cfg!(target_arch = "x86_64") {
            return Err(ActorError::Unusable {
                backend: NAME,
                reason: "runs on x86-64 alone so far".to_owned(),
            });
        }
        let find = |program, remedy| {
            process::find_program(Path::new(program))
                .ok_or(ActorError::NotInstalled { program, remedy })
        };
        let bwrap = find(PROGRAM, "apt-get install bubblewrap")?;
        let prlimit = find("prlimit", "apt-get install util-linux")?;
        let setpriv = find("setpriv", "apt-get install util-linux")?;
        let base = folder.map_or_else(RunFolder::default_base, Path::to_owned);
        let run = RunFolder::open(&base)?;
        let files = |source| ActorError::Files {
            activity: "preparing the folder of a run",
            source,
        };
        let guest = guest::write(run.path()).map_err(files)?;
        Ok(Self {
            machine: Arc::new(Machine {
                bwrap,
                prlimit,
                setpriv,
                janitor: Janitor::start().map_err(files)?,
                cpu: CpuTime::open(run.path()),
                guest,
                run,
                count: AtomicU64::new(0),
                is_over: AtomicBool::new(false),
            }),
        })
    }
}

impl ActorBackend for BwrapBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            isolation: Isolation::Namespaces,
            shell: true,
            network: false,
            root_folder: true,
            image: false,
            writable_root: false,
            background: false,
            users: false,
            snapshot: true,
            snapshot_memory: false,
            fork: true,
        }
    }

    fn shut_down(&self) {
        self.machine.is_over.store(true, Ordering::Relaxed);
    }

    fn create(&self, spec: &ActorSpec) -> Result<Box<dyn Actor>, ActorError> {
        spec.check()?;
        if matches!(spec.root, RootFs::Image(_)) {
            return Err(ActorError::image_on_this_machine(NAME));
        }
        let folder = self.machine.folder()?;
        // Dropped on a failure, it deletes the folder.
        let actor = BwrapActor::new(Arc::clone(&self.machine), spec.clone(), folder);
        let files = |source| ActorError::Files {
            activity: "making the folders of an actor",
            source,
        };
        for (here, there) in actor.writable() {
            fs::create_dir(&here).map_err(files)?;
            if let RootFs::Folder(root) = &spec.root {
                let inside = root.join(there.strip_prefix("/").unwrap_or(&there));
                if inside.is_dir() {
                    // A link of the image's would lead to the host's files.
                    let leads = fs::canonicalize(&inside).map_err(files)?;
                    if !leads.starts_with(fs::canonicalize(root).map_err(files)?) {
                        return Err(ActorError::InvalidSpec {
                            reason: format!(
                                "`{}` of the root filesystem leads out of it",
                                there.display()
                            ),
                        });
                    }
                    copy(&inside, &here)?;
                }
            }
        }
        actor.take_folders()?;
        let output = actor.exec(&ActorCommand::new(["true"]))?;
        match output.is_success() {
            true => Ok(Box::new(actor)),
            false => Err(ActorError::Unusable {
                backend: NAME,
                reason: format!(
                    "cannot start a program here: {}",
                    output.stderr.text().trim()
                ),
            }),
        }
    }
}

impl Machine {
    /// Returns a new folder of the run.
    fn folder(&self) -> Result<PathBuf, ActorError> {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        self.run.make(&format!("a{number}"))
    }

    /// Returns the user of the host who acts for a new actor, if this one may choose: root's processes are
    /// not counted by the kernel, and no two actors' are to be counted together.
    fn user() -> Option<u32> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed) % 4096;
        let run = u64::from(std::process::id()) % 4096;
        let user = u64::from(FIRST_USER) + run * 4096 + number;
        let is_root = rustix::process::geteuid().is_root();
        u32::try_from(user).ok().filter(|_| is_root)
    }

    /// Deletes a folder in the background, and what an actor had of the CPUs.
    fn delete(&self, folder: PathBuf, cpu: Option<CpuShare>) {
        self.janitor.push(move || {
            drop(cpu);
            if let Err(error) = remove_tree(&folder) {
                tracing::warn!(%error, "the folder of an actor is left over");
            }
        });
    }
}

/// Gives a folder and what is in it to a user; links are not followed.
fn give(folder: &Path, user: u32) -> Result<(), ActorError> {
    let mut paths = vec![folder.to_owned()];
    let mut give = || -> std::io::Result<()> {
        while let Some(path) = paths.pop() {
            std::os::unix::fs::lchown(&path, Some(user), Some(user))?;
            if fs::symlink_metadata(&path)?.is_dir() {
                for entry in fs::read_dir(&path)? {
                    paths.push(entry?.path());
                }
            }
        }
        Ok(())
    };
    give().map_err(|source| ActorError::Files {
        activity: "giving an actor its folders",
        source,
    })
}

/// Copies what is in a folder as it is, links and rights included.
fn copy(from: &Path, to: &Path) -> Result<(), ActorError> {
    let mut command = std::process::Command::new("cp");
    command
        .args(["-a", "--reflink=auto", "--"])
        .arg(from.join("."))
        .arg(to);
    let activity = "copying the folders of an actor".to_owned();
    let finished =
        process::run(&mut command, &[], COPY, 4096, |_| false, |_| ()).map_err(|source| {
            ActorError::Run {
                program: "cp".to_owned(),
                source,
            }
        })?;
    if finished.timed_out {
        return Err(ActorError::Hung {
            activity,
            limit: COPY,
        });
    }
    match finished.is_success() {
        true => Ok(()),
        false => Err(ActorError::Backend {
            activity,
            message: finished.stderr.text().trim().to_owned(),
        }),
    }
}

/// An actor in namespaces.
#[derive(Debug)]
struct BwrapActor {
    machine: Arc<Machine>,
    id: String,
    spec: ActorSpec,
    folder: PathBuf,
    /// The user of the host that its processes are; this one unless given.
    user: Option<u32>,
    until: Instant,
    /// What it may use of the CPUs; taken when it is deleted.
    cpu: Option<CpuShare>,
    /// Held while a command runs.
    turn: Mutex<()>,
}

impl BwrapActor {
    fn new(machine: Arc<Machine>, spec: ActorSpec, folder: PathBuf) -> Self {
        let name = |path: &Path| {
            path.file_name()
                .map(|name| name.to_string_lossy().into_owned())
        };
        let own_name = name(&folder).unwrap_or_default();
        Self {
            cpu: Some(machine.cpu.share(&own_name, &spec.limits)),
            id: [machine.run.path(), &folder]
                .map(|path| name(path).unwrap_or_default())
                .join("-"),
            until: process::deadline(spec.limits.lifetime),
            user: Machine::user(),
            machine,
            spec,
            folder,
            turn: Mutex::new(()),
        }
    }

    /// Returns its writable folders: what they are on the host, and where they are inside.
    fn writable(&self) -> Vec<(PathBuf, PathBuf)> {
        let mut inside = vec![PathBuf::from("/tmp"), PathBuf::from("/root")];
        inside.push(self.spec.workdir.clone());
        inside.extend(self.spec.writable.iter().cloned());
        // What is in another one is part of it, and a folder that holds others comes before them.
        inside.sort();
        inside.dedup();
        let mut folders = Vec::new();
        for (number, there) in inside.into_iter().enumerate() {
            folders.push((self.folder.join(number.to_string()), there));
        }
        folders
    }

    /// Makes its folders its user's.
    fn take_folders(&self) -> Result<(), ActorError> {
        match self.user {
            Some(user) => give(&self.folder, user),
            None => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arguments(
        &self,
        command: &ActorCommand,
        user: User,
    ) -> Result<Vec<std::ffi::OsString>, ActorError> {
        let limits = &self.spec.limits;
        let mut arguments = Arguments::new(Network::None);
        match &self.spec.root {
            RootFs::Host => arguments.show_system(),
            RootFs::Folder(root) => {
                let listed = arguments.show_root(root);
                listed.map_err(|source| ActorError::Files {
                    activity: "listing the root filesystem",
                    source,
                })?;
            }
            RootFs::Image(_) => return Err(ActorError::image_on_this_machine(NAME)),
        }
        for (here, there) in &self.spec.mounts {
            arguments.require(here, there);
        }
        for (here, there) in self.writable() {
            arguments.bind(&here, &there);
        }
        arguments.show(&self.machine.guest, Path::new(GUEST_FOLDER));
        arguments.add(["--remount-ro", "/", "--hostname", "actor"]);
        arguments.add([
            "--uid",
            &user.uid.to_string(),
            "--gid",
            &user.gid.to_string(),
        ]);
        // Inside alone: outside, such as `LD_PRELOAD` would hold for programs of the host's, run as root.
        arguments.add(["--clearenv"]);
        for (name, value) in self.spec.variables(user, &command.env) {
            arguments.add(["--setenv", &name, &value]);
        }
        let argv = guest::exec(&self.spec, command);
        let mut all: Vec<std::ffi::OsString> = vec![
            format!("--fsize={0}:{0}", limits.disk).into(),
            format!("--nofile={0}:{0}", limits.open_files).into(),
            "--core=0:0".into(),
            // The namespaces have processes of their own.
            format!("--nproc={0}:{0}", limits.processes + usage::OWN).into(),
        ];
        if let Some(user) = self.user {
            all.push(self.machine.setpriv.clone().into());
            all.extend([
                format!("--reuid={user}").into(),
                format!("--regid={user}").into(),
                "--clear-groups".into(),
            ]);
        }
        all.push(self.machine.bwrap.clone().into());
        all.extend(arguments.running(argv));
        Ok(all)
    }
}

impl Shell for BwrapActor {
    fn exec_as(&self, command: &ActorCommand, user: User) -> Result<ActorOutput, ActorError> {
        transfer::check(command)?;
        let _turn = self.lock();
        let started = Instant::now();
        let lifetime = self.spec.limits.lifetime;
        let left = self.until.saturating_duration_since(started);
        if left.is_zero() {
            return Ok(ActorOutput::of(Ending::TimedOut { limit: lifetime }));
        }
        let prlimit = &self.machine.prlimit;
        let mut client = match &self.cpu {
            Some(cpu) => cpu.command(prlimit),
            None => std::process::Command::new(prlimit),
        };
        client
            .args(self.arguments(command, user)?)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default());
        let mut over = None;
        let mut next = started;
        let watch = |pid: Pid| {
            if self.machine.is_over.load(Ordering::Relaxed) {
                over.get_or_insert_with(|| Ending::Killed {
                    reason: "the run ends".to_owned(),
                });
            }
            if over.is_none() && Instant::now() >= next {
                over = usage::over(pid, &self.folder, &self.spec.limits);
                // Counting takes longer the more there is to count.
                let took = next.elapsed().min(Duration::from_secs(1));
                next = Instant::now() + TICK.max(2 * took);
            }
            over.is_some()
        };
        let kill = |pid| {
            // Everything inside dies with its parent.
            let _ = kill_process_group(pid, Signal::KILL);
        };
        let finished = process::run(
            &mut client,
            &command.stdin,
            command.timeout.min(left),
            command.max_output,
            watch,
            kill,
        )
        .map_err(|source| ActorError::Run {
            program: PROGRAM.to_owned(),
            source,
        })?;
        self.cpu.as_ref().map_or(Ok(()), CpuShare::check)?;
        let code = finished.status.and_then(|status| status.code());
        let ending = match (over, code) {
            (Some(ending), _) => ending,
            (None, _) if finished.timed_out => Ending::TimedOut {
                limit: command.timeout.min(lifetime),
            },
            (None, Some(code)) => Ending::Exited { code },
            (None, None) => Ending::Killed {
                reason: "its namespaces were ended".to_owned(),
            },
        };
        Ok(ActorOutput {
            ending,
            stdout: finished.stdout,
            stderr: finished.stderr,
            elapsed: started.elapsed(),
        })
    }
}

impl Actor for BwrapActor {
    fn id(&self) -> &str {
        &self.id
    }

    fn spec(&self) -> &ActorSpec {
        &self.spec
    }

    fn exec(&self, command: &ActorCommand) -> Result<ActorOutput, ActorError> {
        self.exec_as(command, command.user.unwrap_or(self.spec.user))
    }

    fn put(&self, folder: &Path, tree: &FileTree) -> Result<(), ActorError> {
        transfer::put(self, folder, tree)
    }

    fn get(&self, path: &Path, limits: TreeLimits) -> Result<FileTree, ActorError> {
        transfer::get(self, path, limits)
    }

    fn come_first(&self, is_first: bool) {
        if let Some(cpu) = &self.cpu {
            cpu.come_first(is_first);
        }
    }

    fn snapshot(&self) -> Result<Arc<dyn ActorSnapshot>, ActorError> {
        let _turn = self.lock();
        let snapshot = BwrapSnapshot {
            machine: Arc::clone(&self.machine),
            folder: self.machine.folder()?,
            spec: self.spec.clone(),
        };
        copy(&self.folder, &snapshot.folder)?;
        Ok(Arc::new(snapshot))
    }

    fn logs(&self) -> String {
        String::new()
    }

    fn destroy(self: Box<Self>) -> Result<(), ActorError> {
        // No process of it runs between commands, and its folders are deleted when it is dropped.
        Ok(())
    }
}

impl Drop for BwrapActor {
    fn drop(&mut self) {
        let cpu = self.cpu.take();
        self.machine.delete(self.folder.clone(), cpu);
    }
}

/// A copy of an actor's folders.
#[derive(Debug)]
struct BwrapSnapshot {
    machine: Arc<Machine>,
    folder: PathBuf,
    spec: ActorSpec,
}

impl ActorSnapshot for BwrapSnapshot {
    fn restore(&self) -> Result<Box<dyn Actor>, ActorError> {
        let folder = self.machine.folder()?;
        let actor = BwrapActor::new(Arc::clone(&self.machine), self.spec.clone(), folder);
        copy(&self.folder, &actor.folder)?;
        actor.take_folders()?;
        Ok(Box::new(actor))
    }
}

impl Drop for BwrapSnapshot {
    fn drop(&mut self) {
        self.machine.delete(self.folder.clone(), None);
    }
}
