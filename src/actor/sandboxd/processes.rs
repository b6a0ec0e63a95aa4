//! The processes of a machine, as its first one sees them: what is run, what it leaves, and the end of all.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write as _;
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getegid, geteuid, getpid, kill_process,
    set_child_subreaper, wait,
};

use crate::actor::{ActorOutput, Captured, Ending, User};
use crate::process::{self, Stream};

/// How long processes may take to end once they are killed.
const GRACE: Duration = Duration::from_secs(3);
/// Time between looks at what is left.
const POLL: Duration = Duration::from_millis(2);

/// What is to be run.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) argv: Vec<String>,
    pub(super) env: BTreeMap<String, String>,
    pub(super) cwd: PathBuf,
    pub(super) user: User,
    pub(super) stdin: Vec<u8>,
    pub(super) timeout: Duration,
    pub(super) max_output: usize,
}

/// All processes below this one. Nothing else in this process may start any, as this waits for each.
#[derive(Debug)]
pub(super) struct Processes {
    /// Who wants to know how a child ended. Held while one is started, so that none is buried unknown.
    awaited: Mutex<HashMap<Pid, Sender<WaitStatus>>>,
}

impl Processes {
    /// Makes this process the parent of all orphans below it, as process 1 is without being told.
    ///
    /// # Errors
    ///
    /// Fails where the system refuses it, as gVisor does, or does not say what runs.
    pub(super) fn adopt() -> std::io::Result<Self> {
        if getpid() != Pid::INIT {
            set_child_subreaper(Some(getpid())).map_err(|error| {
                let message = format!(
                    "this system gives orphans to process 1 alone ({error}); be that: start it as the \
                     first program of its container, without a shell around it"
                );
                std::io::Error::other(message)
            })?;
        }
        fs_err::metadata("/proc/self/stat")?;
        keep_descriptors()?;
        Ok(Self {
            awaited: Mutex::default(),
        })
    }

    /// Returns whether a program can be run as `user`.
    pub(super) fn can_be(user: User) -> bool {
        let own = (geteuid(), getegid());
        own.0.is_root() || (own.0.as_raw(), own.1.as_raw()) == (user.uid, user.gid)
    }

    /// Waits for every child that has ended; to be called when one has.
    pub(super) fn bury(&self) {
        let mut awaited = self.lock();
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if let Some(asks) = awaited.remove(&pid) {
                // Who asked may have given up.
                let _ = asks.send(status);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Pid, Sender<WaitStatus>>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a program to its end. If its time is over, everything below this process is killed; returned is
    /// also whether that can go on.
    pub(super) fn run(&self, program: &Program) -> (ActorOutput, bool) {
        let started = Instant::now();
        let cannot = |code: i32, message: String| {
            let output = ActorOutput {
                stderr: Captured {
                    head: message.into_bytes(),
                    ..Captured::default()
                },
                ..ActorOutput::of(Ending::Exited { code })
            };
            (output, true)
        };
        let Some((name, arguments)) = program.argv.split_first() else {
            return cannot(126, "wardian: no program\n".to_owned());
        };
        if !program.cwd.is_dir() {
            let cwd = program.cwd.display();
            return cannot(126, format!("wardian: cannot enter {cwd}\n"));
        }
        let mut command = Command::new(name);
        command
            .args(arguments)
            .env_clear()
            .envs(&program.env)
            .current_dir(&program.cwd)
            .process_group(0)
            .stdin(match program.stdin.is_empty() {
                true => Stdio::null(),
                false => Stdio::piped(),
            })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if geteuid().is_root() {
            command.uid(program.user.uid).gid(program.user.gid);
        }
        let (asks, ended) = mpsc::channel();
        let mut child = {
            let mut awaited = self.lock();
            let child = match command.spawn() {
                Ok(child) => child,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    return cannot(127, format!("wardian: not found: {name}\n"));
                }
                Err(error) => {
                    return cannot(126, format!("wardian: cannot be run: {name}: {error}\n"));
                }
            };
            let number = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            awaited.insert(number.expect("the kernel gives positive numbers"), asks);
            child
        };
        let stdout = Stream::read(child.stdout.take(), program.max_output);
        let stderr = Stream::read(child.stderr.take(), program.max_output);
        if let Some(mut pipe) = child.stdin.take() {
            let bytes = program.stdin.clone();
            // Who does not read it to its end has its reasons.
            std::thread::spawn(move || pipe.write_all(&bytes));
        }
        let until = process::deadline(program.timeout);
        let status = ended.recv_timeout(until.saturating_duration_since(Instant::now()));
        let (ending, is_well) = match status {
            Ok(status) => (ending(status), true),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                let limit = program.timeout;
                (Ending::TimedOut { limit }, self.kill_all())
            }
        };
        let until = Instant::now() + process::DRAIN;
        let output = ActorOutput {
            ending,
            stdout: stdout.finish(until),
            stderr: stderr.finish(until),
            elapsed: started.elapsed(),
        };
        (output, is_well)
    }

    /// Kills everything below this process, and returns whether it has ended. All are stopped first: what is
    /// stopped starts nothing new, so that none gets away by being quick.
    pub(super) fn kill_all(&self) -> bool {
        let until = Instant::now() + GRACE;
        let mut stopped = BTreeSet::new();
        loop {
            let alive = descendants();
            if alive.is_empty() {
                self.bury();
                return true;
            }
            let is_over = Instant::now() >= until;
            let signal = match is_over || alive.is_subset(&stopped) {
                true => Signal::KILL,
                false => Signal::STOP,
            };
            for pid in alive.iter().copied().filter_map(Pid::from_raw) {
                // It may have ended.
                let _ = kill_process(pid, signal);
            }
            self.bury();
            if is_over {
                return false;
            }
            stopped = alive;
            std::thread::sleep(POLL);
        }
    }
}

/// Has programs not get what this process was given open, beside the three streams.
fn keep_descriptors() -> std::io::Result<()> {
    for entry in fs_err::read_dir("/proc/self/fd")? {
        let number = entry?
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        if let Some(number) = number.filter(|number| *number > 2) {
            #[expect(
                unsafe_code,
                reason = "descriptors that are known by their numbers alone"
            )]
            // SAFETY: it is open, as it was listed, and nothing but a flag is set, which all others have.
            let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
            let _ = fcntl_setfd(descriptor, FdFlags::CLOEXEC);
        }
    }
    Ok(())
}

fn ending(status: WaitStatus) -> Ending {
    let code = match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        // It was asked for neither stops nor traces.
        (None, None) => 128,
    };
    Ending::Exited { code }
}

/// Returns the processes below this one that have not ended.
fn descendants() -> BTreeSet<i32> {
    let mut children: BTreeMap<i32, Vec<(i32, bool)>> = BTreeMap::new();
    let listed = fs_err::read_dir("/proc");
    for entry in listed.into_iter().flatten().flatten() {
        let pid = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        let stat = pid.and_then(|_| fs_err::read_to_string(entry.path().join("stat")).ok());
        let Some((pid, stat)) = pid.zip(stat) else {
            continue;
        };
        // The name of a program may hold anything, a parenthesis too.
        let Some((_, fields)) = stat.rsplit_once(')') else {
            continue;
        };
        let mut fields = fields.split_ascii_whitespace();
        let has_ended = matches!(fields.next(), Some("Z" | "X"));
        if let Some(parent) = fields.next().and_then(|parent| parent.parse().ok()) {
            children.entry(parent).or_default().push((pid, has_ended));
        }
    }
    let mut found = BTreeSet::new();
    let mut parents = vec![getpid().as_raw_nonzero().get()];
    while let Some(parent) = parents.pop() {
        for (pid, has_ended) in children.remove(&parent).unwrap_or_default() {
            parents.push(pid);
            if !has_ended {
                found.insert(pid);
            }
        }
    }
    found
}
