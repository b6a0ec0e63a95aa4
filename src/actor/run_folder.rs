//! Where a backend keeps its files for as long as it lives, and what happens to those of runs that crashed.
//!
//! Each run has a folder of its own with a file that it holds locked. A folder whose file is not locked is
//! left over: nobody reuses it, whatever numbers its processes had. It is emptied by the next run.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fs_err as fs;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::ActorError;
use super::removal::remove_tree;

const LOCK: &str = "lock";
/// How long a killed process may take to be gone.
const GONE: Duration = Duration::from_secs(10);

/// A run's own folder; deleted, with every process that names it, when it is dropped.
#[derive(Debug)]
pub(super) struct RunFolder {
    path: PathBuf,
    /// Holds the lock.
    _lock: std::fs::File,
}

impl RunFolder {
    /// Returns where runs of this user have their folders unless said otherwise.
    pub(super) fn default_base() -> PathBuf {
        let user = rustix::process::geteuid().as_raw();
        std::env::temp_dir().join(format!("wardian-actors-{user}"))
    }

    /// Deletes what crashed runs left in `base`, and makes a folder for this one.
    ///
    /// # Errors
    ///
    /// Fails where `base` cannot be made or is another user's.
    pub(super) fn open(base: &Path) -> Result<Self, ActorError> {
        let files = |activity| move |source| ActorError::Files { activity, source };
        let making = files("making the folder of a run");
        if !base.exists() {
            fs::create_dir_all(base).map_err(making)?;
            // Who runs as another user for this one must get through, and see nothing on the way.
            fs::set_permissions(base, std::fs::Permissions::from_mode(0o711)).map_err(making)?;
        }
        let status = fs::symlink_metadata(base).map_err(making)?;
        if !status.is_dir() || status.uid() != rustix::process::geteuid().as_raw() {
            return Err(ActorError::InvalidSpec {
                reason: format!("`{}` is not a folder of this user", base.display()),
            });
        }
        // One at a time, so that nobody takes a folder that is about to be locked for a left-over one.
        let all = lock(&base.join(LOCK), FlockOperation::LockExclusive).map_err(making)?;
        for entry in fs::read_dir(base).map_err(making)? {
            let path = entry.map_err(making)?.path();
            if !path.is_dir() {
                continue;
            }
            if let Ok(held) = lock(&path.join(LOCK), FlockOperation::NonBlockingLockExclusive) {
                tracing::info!(folder = %path.display(), "deleting what a crashed run left");
                clear(&path);
                drop(held);
            }
        }
        let path = tempfile::Builder::new()
            .prefix(&format!("{}-", std::process::id()))
            .tempdir_in(base)
            .map_err(making)?
            .keep();
        fs::set_permissions(&path, std::fs::Permissions::from_mode(0o711)).map_err(making)?;
        let held =
            lock(&path.join(LOCK), FlockOperation::NonBlockingLockExclusive).map_err(making)?;
        drop(all);
        Ok(Self { path, _lock: held })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a folder in it that is this user's alone.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be made.
    pub(super) fn make(&self, name: &str) -> Result<PathBuf, ActorError> {
        let folder = self.path.join(name);
        let made = std::fs::DirBuilder::new().mode(0o700).create(&folder);
        made.map_err(|source| ActorError::Files {
            activity: "making the folder of an actor",
            source,
        })?;
        Ok(folder)
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        clear(&self.path);
    }
}

fn lock(path: &Path, operation: FlockOperation) -> std::io::Result<std::fs::File> {
    let file = std::fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)?;
    flock(&file, operation)?;
    Ok(file)
}

/// Kills every process that was started for the folder, and deletes it.
fn clear(folder: &Path) {
    kill_named(folder);
    if let Err(error) = remove_tree(folder) {
        tracing::warn!(%error, "the folder of a run is left over");
    }
}

/// Kills every process that has `folder`, or something in it, among its arguments, and waits until they are
/// gone. Returns how many there were.
pub(super) fn kill_named(folder: &Path) -> usize {
    let killed: Vec<_> = HostProcess::all()
        .filter(|process| process.is_named(folder) && process.kill())
        .collect();
    let until = Instant::now() + GONE;
    for process in &killed {
        process.wait_gone(until);
    }
    killed.len()
}

/// A process of this machine, told from a later one of the same number by when it started.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostProcess {
    pub(super) pid: Pid,
    /// In ticks since the machine started.
    started: u64,
}

impl HostProcess {
    /// Returns all but this one.
    fn all() -> impl Iterator<Item = Self> {
        let own = rustix::process::getpid();
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter_map(Pid::from_raw)
            .filter(move |pid| *pid != own)
            .filter_map(|pid| {
                let (_, started) = state(pid)?;
                Some(Self { pid, started })
            })
    }

    /// Returns the process of a number, if there is one.
    pub(super) fn of(number: &str) -> Option<Self> {
        let pid = number.parse().ok().and_then(Pid::from_raw)?;
        let (_, started) = state(pid)?;
        Some(Self { pid, started })
    }

    /// Returns the arguments it was started with.
    fn arguments(&self) -> Vec<OsString> {
        let path = format!("/proc/{}/cmdline", self.pid.as_raw_nonzero());
        let line = fs::read(path).unwrap_or_default();
        line.split(|byte| *byte == 0)
            .map(|argument| OsString::from_vec(argument.to_vec()))
            .collect()
    }

    /// Whether an argument is the folder or a path in it, by itself or after `--name=`.
    fn is_named(&self, folder: &Path) -> bool {
        self.arguments().iter().any(|argument| {
            let bytes = argument.as_bytes();
            let value = match bytes.iter().position(|byte| *byte == b'=') {
                Some(at) if bytes.starts_with(b"-") => &bytes[at + 1..],
                _ => bytes,
            };
            Path::new(OsStr::from_bytes(value)).starts_with(folder)
        })
    }

    /// Whether it runs: it is neither gone nor a zombie.
    pub(super) fn is_alive(&self) -> bool {
        state(self.pid).is_some_and(|(state, started)| started == self.started && state != b'Z')
    }

    /// Kills it; returns whether it was there.
    pub(super) fn kill(&self) -> bool {
        // The number may have become another's since; what the descriptor holds does not change.
        pidfd_open(self.pid, PidfdFlags::empty())
            .is_ok_and(|held| self.is_alive() && pidfd_send_signal(&held, Signal::KILL).is_ok())
    }

    /// Waits until it has ended, at most until `until`; returns whether it has.
    pub(super) fn wait_gone(&self, until: Instant) -> bool {
        while self.is_alive() {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }
}

/// Returns the state of a process, as a letter, and when it started.
fn state(pid: Pid) -> Option<(u8, u64)> {
    let stat = fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The second field is a name in brackets, which may hold anything.
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let mut fields = std::str::from_utf8(stat.get(end + 2..)?).ok()?.split(' ');
    let state = *fields.next()?.as_bytes().first()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[test]
    fn what_a_crashed_run_left_is_deleted_and_a_live_run_is_not() {
        let base = tempfile::tempdir().unwrap();
        let live = RunFolder::open(base.path()).unwrap();
        let crashed = base.path().join("1-crashed");
        fs::create_dir(&crashed).unwrap();
        let start = |folder: &Path| {
            let argument = format!("--root={}", folder.join("state").display());
            std::process::Command::new("sh")
                // It waits by itself: a program that it started would outlive it.
                .args(["-c", "read line", &argument])
                .stdin(std::process::Stdio::piped())
                .spawn()
                .unwrap()
        };
        let mut orphan = start(&crashed);
        let mut child = start(live.path());
        let other = RunFolder::open(base.path()).unwrap();
        assert!(!crashed.exists());
        let killed = Some(Signal::KILL.as_raw());
        assert_eq!(orphan.wait().unwrap().signal(), killed);
        assert!(live.path().exists() && child.try_wait().unwrap().is_none());
        let path = live.path().to_owned();
        drop(live);
        assert!(!path.exists());
        assert_eq!(child.wait().unwrap().signal(), killed);
        assert!(other.path().exists());
    }
}
