//! What bounds a sandbox from outside: its memory, its threads and its time.
//!
//! gVisor is run without control groups, which need rights and a layout of them that many machines lack.
//! What guests hold is in one anonymous file of the sandbox, files included, so its size says how much that
//! is; the rest is the sandbox's own heap. Both are looked at every few milliseconds, and a sandbox that has
//! more than it may is killed. Between two looks it can take more: the limit is met late, by what a program
//! can touch in that time. A coarser limit of the host's own stands behind it.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fs_err as fs;
use rustix::process::{Resource, Rlimit, prlimit};

use crate::actor::run_folder::HostProcess;
use crate::actor::{ActorLimits, Ending};

/// Time between two looks.
const TICK: Duration = Duration::from_millis(15);
/// The sandbox's file for its guests' memory grows in steps of this size.
const STEP: u64 = 1 << 30;

/// A sandbox that runs, or how it ended.
#[derive(Debug)]
pub(super) struct Life {
    sandbox: HostProcess,
    /// The sandbox's files that hold its guests' memory.
    memory: Vec<File>,
    limits: ActorLimits,
    until: Instant,
    ended: Mutex<Option<Ending>>,
}

impl Life {
    /// Takes hold of a sandbox that has just started.
    pub(super) fn of(sandbox: HostProcess, limits: ActorLimits) -> std::io::Result<Self> {
        let folder = format!("/proc/{}/fd", sandbox.pid.as_raw_nonzero());
        let mut memory = Vec::new();
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            // A descriptor may be closed meanwhile.
            let name = fs::read_link(&path).unwrap_or_default();
            if name.to_string_lossy().starts_with("/memfd:runsc-memory") {
                memory.push(fs::File::open(&path)?.into_file());
            }
        }
        if memory.is_empty() {
            return Err(std::io::Error::other("the sandbox has no memory to watch"));
        }
        let life = Self {
            sandbox,
            memory,
            limits,
            until: Instant::now() + limits.lifetime,
            ended: Mutex::new(None),
        };
        // The file is used with gaps, so twice what it may hold is what must do.
        let largest = (life.limit() / STEP + 1).saturating_mul(2 * STEP);
        let rlimit = Rlimit {
            current: Some(largest),
            maximum: Some(largest),
        };
        prlimit(Some(sandbox.pid), Resource::Fsize, rlimit)?;
        Ok(life)
    }

    /// Returns the most that it may hold: files are memory, too.
    fn limit(&self) -> u64 {
        self.limits.memory.saturating_add(self.limits.disk)
    }

    /// Returns how it ended, if it has.
    pub(super) fn ended(&self) -> Option<Ending> {
        self.look();
        self.lock().clone()
    }

    /// Ends it, unless it has ended.
    pub(super) fn end(&self, ending: Ending) {
        self.lock().get_or_insert(ending);
        self.sandbox.kill();
    }

    /// Waits until its process is gone.
    pub(super) fn wait_gone(&self, limit: Duration) -> bool {
        self.sandbox.wait_gone(Instant::now() + limit)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Ending>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compares what it uses with what it may.
    fn look(&self) {
        if self.lock().is_some() {
            return;
        }
        if !self.sandbox.is_alive() {
            self.end(Ending::Killed {
                reason: "its sandbox has ended".to_owned(),
            });
            return;
        }
        let status = fs::read_to_string(format!(
            "/proc/{}/status",
            self.sandbox.pid.as_raw_nonzero()
        ))
        .unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok())
                .unwrap_or(0)
        };
        let held: u64 = self
            .memory
            .iter()
            .filter_map(|file| file.metadata().ok())
            .map(|status| status.blocks() * 512)
            .sum();
        let used = held + (field("RssAnon:") << 10);
        let threads = field("Threads:");
        // The sandbox has a few threads for each of its guests' that waits for the host.
        let most = 4 * u64::from(self.limits.processes) + 256;
        if used > self.limit() {
            self.end(Ending::OutOfMemory {
                limit: self.limit(),
                used,
            });
        } else if threads > most {
            self.end(Ending::Killed {
                reason: format!("it had {threads} threads on the host, of at most {most}"),
            });
        } else if Instant::now() > self.until {
            self.end(Ending::TimedOut {
                limit: self.limits.lifetime,
            });
        }
    }
}

fn over() -> Ending {
    Ending::Killed {
        reason: "the run ends".to_owned(),
    }
}

/// Looks at all sandboxes of a backend from a thread of its own.
#[derive(Debug)]
pub(super) struct Watcher {
    lives: Arc<Mutex<Vec<Weak<Life>>>>,
    stop: Arc<AtomicBool>,
    /// Whether the run ends, and every sandbox with it.
    is_over: AtomicBool,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    pub(super) fn start() -> std::io::Result<Self> {
        let lives: Arc<Mutex<Vec<Weak<Life>>>> = Arc::default();
        let stop = Arc::new(AtomicBool::new(false));
        let (theirs, stopped) = (Arc::clone(&lives), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("actor-watch".to_owned())
            .spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    let current: Vec<_> = {
                        let mut lives = theirs.lock().unwrap_or_else(PoisonError::into_inner);
                        lives.retain(|life| life.strong_count() > 0);
                        lives.iter().filter_map(Weak::upgrade).collect()
                    };
                    for life in current {
                        life.look();
                    }
                    std::thread::park_timeout(TICK);
                }
            })?;
        Ok(Self {
            lives,
            stop,
            is_over: AtomicBool::new(false),
            thread: Some(thread),
        })
    }

    pub(super) fn watch(&self, life: &Arc<Life>) {
        let mut lives = self.lives.lock().unwrap_or_else(PoisonError::into_inner);
        lives.push(Arc::downgrade(life));
        if self.is_over.load(Ordering::Relaxed) {
            life.end(over());
        }
    }

    /// Ends all sandboxes, and those that are still to come.
    pub(super) fn end_all(&self) {
        let lives = self.lives.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_over.store(true, Ordering::Relaxed);
        for life in lives.iter().filter_map(Weak::upgrade) {
            life.end(over());
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}
