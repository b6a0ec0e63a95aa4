//! The machine itself, for another protocol that the server's process speaks: one holder at a time.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::files;
use super::processes::{Processes, Program};
use super::server::{BROKEN, Denied, Place, Shared, absolute};
use crate::actor::{
    ActorCommand, ActorError, ActorOutput, ActorSpec, FileTree, RootFs, User, transfer,
};
use crate::http::uuid4;

/// How long a claim waits for the end of what another holder left.
const CLAIM: Duration = Duration::from_secs(10);
/// Time between looks at whether somebody still waits.
const POLL: Duration = Duration::from_millis(20);

/// What is done on the thread that runs commands.
type Job = Box<dyn FnOnce() + Send>;

/// How commands are run for the other protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineConfig {
    /// Where commands start; made where it is missing.
    pub workdir: PathBuf,
    /// Whether each claim finds the working folder as it was when the server started. Other folders stay as they
    /// are.
    pub is_fresh: bool,
    /// Who commands are.
    pub user: User,
    /// Variables of commands. `PATH`, `HOME` and `LANG` have values unless they are here.
    pub env: BTreeMap<String, String>,
}

/// The machine that a server runs in. Copies are of the same one.
#[derive(Debug, Clone)]
pub struct Machine {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    spec: ActorSpec,
    /// What the working folder was at first, where each claim is to find that.
    workdir: Option<FileTree>,
    /// To a thread of its own: children have the priority of the thread that starts them, which others may lower.
    jobs: Sender<Job>,
}

impl Machine {
    pub(super) fn new(shared: Arc<Shared>, config: MachineConfig) -> Result<Self, ActorError> {
        let spec = ActorSpec {
            env: config.env,
            workdir: config.workdir,
            user: config.user,
            ..ActorSpec::new(RootFs::Host)
        };
        // `/` is where a container starts unless its image says otherwise.
        if absolute(&spec.workdir).is_err() {
            return Err(ActorError::InvalidSpec {
                reason: format!(
                    "the working folder `{}` must be an absolute path without `..`",
                    spec.workdir.display()
                ),
            });
        }
        if config.is_fresh && spec.workdir.parent().is_none() {
            return Err(ActorError::InvalidSpec {
                reason: "the working folder `/` cannot be put back; name another".to_owned(),
            });
        }
        check(spec.user)?;
        files::write(&spec.workdir, &FileTree::new(), spec.user)?;
        let workdir = match config.is_fresh {
            true => Some(FileTree::read_from(&spec.workdir, shared.limits.tree)?),
            false => None,
        };
        let (jobs, asked) = mpsc::channel::<Job>();
        std::thread::Builder::new()
            .name("commands".to_owned())
            .spawn(move || asked.into_iter().for_each(|job| job()))
            .map_err(|source| ActorError::Files {
                activity: "starting a thread for commands",
                source,
            })?;
        let inner = Inner {
            shared,
            spec,
            workdir,
            jobs,
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Returns the most that is kept of a stream of a command, in bytes.
    #[must_use]
    pub fn max_output(&self) -> usize {
        self.inner.shared.limits.max_output
    }

    /// Takes the machine. What runs in it is ended, and the working folder put back where it is to be.
    ///
    /// # Errors
    ///
    /// Fails where another holder's turn goes on for too long, where processes are left that do not end, and where
    /// the working folder cannot be put back.
    pub fn claim(&self) -> Result<Hold, ActorError> {
        let claim = uuid4();
        let until = Instant::now() + CLAIM;
        while let Err(denied) = self.inner.shared.claim(&claim) {
            if Instant::now() >= until {
                return Err(refused(denied));
            }
            std::thread::sleep(POLL);
        }
        let mut hold = Hold {
            machine: self.clone(),
            place: Place { claim, turn: 0 },
        };
        hold.turn(&|| false, |inner| {
            if !inner.shared.processes.kill_all() {
                return (Ok(()), false);
            }
            let Inner { spec, .. } = inner;
            let put_back = match &inner.workdir {
                Some(tree) => files::put_back(&spec.workdir, tree, spec.user),
                None => Ok(()),
            };
            (put_back, true)
        })??;
        Ok(hold)
    }
}

fn refused(denied: Denied) -> ActorError {
    let id = "sandboxd".to_owned();
    match denied {
        Denied::Lost | Denied::Taken => ActorError::Lost {
            id,
            reason: "somebody else has taken the machine".to_owned(),
        },
        Denied::Busy => ActorError::Backend {
            activity: "taking the machine".to_owned(),
            message: "what another holder runs goes on".to_owned(),
        },
        Denied::Broken => ActorError::Ended {
            id,
            reason: BROKEN.to_owned(),
        },
    }
}

fn check(user: User) -> Result<(), ActorError> {
    match Processes::can_be(user) {
        true => Ok(()),
        false => Err(ActorError::Unsupported {
            backend: super::NAME,
            ability: "run commands as another user than its server; start that as root",
        }),
    }
}

/// Who has the machine. Dropped, all that runs in it is ended in the background, and the next may have it.
#[derive(Debug)]
pub struct Hold {
    machine: Machine,
    place: Place,
}

impl Hold {
    /// Runs a command to its end, until its time is over, or until `is_cancelled`; then every process of the
    /// machine is killed.
    ///
    /// # Errors
    ///
    /// Fails where the command makes no sense, where somebody else has taken the machine, and where processes are
    /// left that do not end.
    pub fn run(
        &mut self,
        command: &ActorCommand,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<ActorOutput, ActorError> {
        transfer::check(command)?;
        let Inner { spec, .. } = &*self.machine.inner;
        let user = command.user.unwrap_or(spec.user);
        check(user)?;
        let program = Program {
            argv: command.argv.clone(),
            env: spec.variables(user, &command.env),
            cwd: command.cwd.clone().unwrap_or_else(|| spec.workdir.clone()),
            user,
            stdin: command.stdin.clone(),
            timeout: command.timeout,
            max_output: command.max_output.min(self.machine.max_output()),
        };
        self.turn(is_cancelled, move |inner| {
            inner.shared.processes.run(&program)
        })
    }

    /// Does a job in the next turn, which says whether the machine is well. It is cut off where nobody waits.
    fn turn<T: Send + 'static>(
        &mut self,
        is_cancelled: &dyn Fn() -> bool,
        job: impl FnOnce(&Inner) -> (T, bool) + Send + 'static,
    ) -> Result<T, ActorError> {
        let (sender, done) = mpsc::sync_channel(1);
        self.begin(move |mut turn| {
            let (result, is_well) = job(&turn.inner);
            turn.is_well = is_well;
            // Before the answer: who has it may take the next turn.
            drop(turn);
            let _ = sender.send(result);
        })?;
        let mut is_cut_off = false;
        loop {
            match done.recv_timeout(POLL) {
                Ok(result) => return Ok(result),
                Err(RecvTimeoutError::Timeout) => {
                    if !is_cut_off && is_cancelled() {
                        is_cut_off = true;
                        self.machine.inner.shared.processes.kill_all();
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Err(no_thread()),
            }
        }
    }

    fn begin(&mut self, job: impl FnOnce(Turn) + Send + 'static) -> Result<(), ActorError> {
        let machine = &self.machine;
        let place = Place {
            claim: self.place.claim.clone(),
            turn: self.place.turn + 1,
        };
        (machine.inner.shared.take(&place)).map_err(refused)?;
        self.place = place;
        // A job that nobody takes is dropped, and its turn is over.
        let turn = Turn {
            inner: Arc::clone(&machine.inner),
            is_well: true,
        };
        let job = Box::new(move || job(turn));
        machine.inner.jobs.send(job).map_err(|_| no_thread())
    }
}

fn no_thread() -> ActorError {
    ActorError::Backend {
        activity: "running a command".to_owned(),
        message: "it panicked".to_owned(),
    }
}

/// A turn that was taken, until this is dropped.
struct Turn {
    inner: Arc<Inner>,
    is_well: bool,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.inner.shared.end(self.is_well);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let claim = self.place.claim.clone();
        // Where it is not theirs any more, or nothing can be done, there is nothing to give back.
        let _ = self.begin(move |mut turn| {
            turn.is_well = turn.inner.shared.processes.kill_all();
            turn.inner.shared.give_back(&claim);
        });
    }
}
