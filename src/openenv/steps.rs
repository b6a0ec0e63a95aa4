//! Threads that run steps, short ones first.
//!
//! A step runs to its end once it has begun, so what bounds the wait of others is who may run, and
//! at what priority. There are two kinds of threads, each as many as cores: *light* ones at the
//! process's own priority, and *heavy* ones at the lowest. A step of a session whose last steps
//! burnt much fuel is heavy; a new session's is light. A light step that takes longer than
//! [`PATIENCE`] is demoted where it is: its thread gets the lowest priority and ends with it, and
//! another takes its place. So a short step finds a light thread, and the kernel takes a core from
//! a heavy one for it at once, however much the others compute.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Runs a step; a light one has its own thread's priority.
type Job = Box<dyn FnOnce() + Send>;

/// How long a light step keeps its priority.
const PATIENCE: Duration = Duration::from_millis(10);

/// How often steps that run are looked at.
const LOOK: Duration = Duration::from_millis(5);

/// The priority of heavy steps: the lowest there is.
const LOWEST: libc::c_int = 19;

/// How a step is expected to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Weight {
    /// Over in less than a millisecond or so.
    Light,
    /// Longer.
    Heavy,
}

/// The threads. Dropped, they end after the steps that were asked for.
pub(super) struct Steps {
    inner: Arc<Inner>,
}

impl fmt::Debug for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Steps").finish_non_exhaustive()
    }
}

struct Inner {
    state: Mutex<State>,
    /// There is a light step.
    light: Condvar,
    /// There is a heavy one.
    heavy: Condvar,
    threads: usize,
    max_running: usize,
}

#[derive(Default)]
struct State {
    light: VecDeque<Job>,
    heavy: VecDeque<Job>,
    /// Light steps that run, by number.
    running: BTreeMap<u64, Running>,
    next: u64,
    light_threads: usize,
    demoted: usize,
    is_closed: bool,
}

struct Running {
    thread: libc::id_t,
    since: Instant,
    is_demoted: bool,
}

/// What the threads are doing.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Load {
    /// Steps that wait for a thread.
    pub(super) waiting: usize,
    /// Steps that took longer than expected and still run.
    pub(super) demoted: usize,
}

impl Steps {
    /// Starts `threads` threads of each kind; at most `max_running` demoted steps run beside them.
    pub(super) fn start(threads: usize, max_running: usize) -> std::io::Result<Self> {
        let threads = threads.max(1);
        let inner = Arc::new(Inner {
            state: Mutex::default(),
            light: Condvar::new(),
            heavy: Condvar::new(),
            threads,
            max_running: max_running.max(1),
        });
        for _ in 0..threads {
            inner.state().light_threads += 1;
            Inner::spawn_light(&inner)?;
            let heavy = Arc::clone(&inner);
            std::thread::Builder::new()
                .name("wardian-heavy".to_owned())
                .spawn(move || {
                    demote(thread_id());
                    heavy.run_heavy();
                })?;
        }
        let watched = Arc::downgrade(&inner);
        std::thread::Builder::new()
            .name("wardian-watch".to_owned())
            .spawn(move || watch(&watched))?;
        Ok(Self { inner })
    }

    /// Runs `job` as soon as a thread is free.
    pub(super) fn submit(&self, weight: Weight, job: impl FnOnce() + Send + 'static) {
        let mut state = self.inner.state();
        match weight {
            Weight::Light => {
                state.light.push_back(Box::new(job));
                drop(state);
                self.inner.light.notify_one();
            }
            Weight::Heavy => {
                state.heavy.push_back(Box::new(job));
                drop(state);
                self.inner.heavy.notify_one();
            }
        }
    }

    pub(super) fn load(&self) -> Load {
        let state = self.inner.state();
        Load {
            waiting: state.light.len() + state.heavy.len(),
            demoted: state.demoted,
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.inner.state().is_closed = true;
        self.inner.light.notify_all();
        self.inner.heavy.notify_all();
    }
}

impl Inner {
    /// The state is sound after any panic: jobs run without the lock.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a light thread, which has been counted.
    fn spawn_light(inner: &Arc<Self>) -> std::io::Result<()> {
        let light = Arc::clone(inner);
        std::thread::Builder::new()
            .name("wardian-light".to_owned())
            .spawn(move || light.run_light())
            .map(drop)
            .inspect_err(|_| inner.state().light_threads -= 1)
    }

    fn run_light(&self) {
        let thread = thread_id();
        let mut state = self.state();
        loop {
            let Some(job) = state.light.pop_front() else {
                if state.is_closed {
                    state.light_threads -= 1;
                    return;
                }
                state = self
                    .light
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let number = state.next;
            state.next += 1;
            let running = Running {
                thread,
                since: Instant::now(),
                is_demoted: false,
            };
            state.running.insert(number, running);
            drop(state);
            run(job);
            state = self.state();
            let is_demoted = state
                .running
                .remove(&number)
                .is_some_and(|running| running.is_demoted);
            if is_demoted {
                // An unprivileged thread cannot raise its priority again.
                state.demoted -= 1;
                return;
            }
        }
    }

    fn run_heavy(&self) {
        let mut state = self.state();
        loop {
            if let Some(job) = state.heavy.pop_front() {
                drop(state);
                run(job);
                state = self.state();
            } else if state.is_closed {
                return;
            } else {
                state = self
                    .heavy
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Demotes light steps that take long, and makes up for their threads. Returns whether there
    /// is anything left to watch.
    fn look(inner: &Arc<Self>) -> bool {
        let mut state = inner.state();
        let now = Instant::now();
        let State {
            running,
            demoted,
            light_threads,
            ..
        } = &mut *state;
        for running in running.values_mut().filter(|running| !running.is_demoted) {
            if now.duration_since(running.since) >= PATIENCE {
                // The thread is alive: it takes the lock before it goes on.
                demote(running.thread);
                running.is_demoted = true;
                *demoted += 1;
                *light_threads -= 1;
            }
        }
        let missing = inner.threads.saturating_sub(*light_threads);
        let allowed = inner.max_running.saturating_sub(*demoted);
        // One is always left, or enough steps without end would hold up all others: more of them run than
        // were meant to, each as slow as the machine makes it.
        let count = missing.min(allowed.max(usize::from(*light_threads == 0)));
        *light_threads += count;
        let goes_on = !state.is_closed || state.light_threads > 0;
        drop(state);
        for _ in 0..count {
            if let Err(error) = Self::spawn_light(inner) {
                tracing::error!(%error, "a thread for steps could not be started");
            }
        }
        goes_on
    }
}

/// Looks after the light threads until all are gone.
fn watch(inner: &Weak<Inner>) {
    while let Some(inner) = inner.upgrade() {
        if !Inner::look(&inner) {
            return;
        }
        drop(inner);
        std::thread::sleep(LOOK);
    }
}

/// Runs a job, whose panic is its own: whoever waits for its result finds that there is none.
fn run(job: Job) {
    if std::panic::catch_unwind(AssertUnwindSafe(job)).is_err() {
        tracing::error!("a step panicked");
    }
}

fn thread_id() -> libc::id_t {
    // SAFETY: `gettid` has no preconditions and cannot fail.
    #[expect(unsafe_code, reason = "asks the kernel for the thread's number")]
    let thread = unsafe { libc::gettid() };
    thread.unsigned_abs()
}

/// Gives a thread of this process the lowest priority.
fn demote(thread: libc::id_t) {
    // SAFETY: `setpriority` takes numbers only; on Linux a thread's number names the thread alone.
    #[expect(unsafe_code, reason = "sets the priority of a thread of ours")]
    let status = unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, LOWEST) };
    if status != 0 {
        let error = std::io::Error::last_os_error();
        tracing::warn!(%error, "a long step keeps its priority");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_short_step_does_not_wait_behind_long_ones() {
        // More of them than are meant to run at a time.
        let steps = Steps::start(1, 2).unwrap();
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        for _ in 0..4 {
            let held = Arc::clone(&held);
            // Each looks short, and is not.
            steps.submit(Weight::Light, move || {
                let _ = held.lock().unwrap().recv();
            });
        }
        let (done, is_done) = mpsc::channel();
        steps.submit(Weight::Light, move || done.send(()).unwrap());
        is_done.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!(steps.load().demoted, 4, "the long ones still run");
        drop(release);
    }

    #[test]
    fn a_panic_takes_no_thread_along() {
        let steps = Steps::start(1, 1).unwrap();
        steps.submit(Weight::Light, || panic!("of the test"));
        steps.submit(Weight::Heavy, || panic!("of the test"));
        let (done, is_done) = mpsc::channel();
        for weight in [Weight::Light, Weight::Heavy] {
            let done = done.clone();
            steps.submit(weight, move || done.send(weight).unwrap());
        }
        let mut ran: Vec<_> = is_done.iter().take(2).collect();
        ran.sort();
        assert_eq!(ran, [Weight::Light, Weight::Heavy]);
    }

    #[test]
    fn a_demoted_thread_has_the_lowest_priority() {
        let steps = Steps::start(1, 2).unwrap();
        let (done, is_done) = mpsc::channel();
        steps.submit(Weight::Light, move || {
            std::thread::sleep(PATIENCE + 20 * LOOK);
            // SAFETY: as for `setpriority`.
            #[expect(unsafe_code, reason = "reads this thread's priority")]
            let priority = unsafe { libc::getpriority(libc::PRIO_PROCESS, thread_id()) };
            done.send(priority).unwrap();
        });
        assert_eq!(is_done.recv().unwrap(), LOWEST);
    }
}
