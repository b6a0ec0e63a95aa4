//! Actors that are started before anybody asks.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{Actor, ActorError};

/// Keeps a number of actors ready; whoever takes one has it made up for in the background.
///
/// What is made is the caller's to say: actors from a spec, or from a snapshot, so that a group finds its
/// members prepared. Each must be fresh, and is given away once.
#[derive(Debug)]
pub struct WarmPool {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    size: usize,
}

#[derive(Debug, Default)]
struct State {
    /// Those that wait, oldest first, and since when.
    ready: VecDeque<(Instant, Box<dyn Actor>)>,
    /// Why none could be made, until somebody is told.
    failed: Option<ActorError>,
    is_over: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WarmPool {
    /// Starts to make `size` actors.
    ///
    /// # Errors
    ///
    /// Fails where the system has no thread left.
    pub fn start(
        size: usize,
        make: impl Fn() -> Result<Box<dyn Actor>, ActorError> + Send + 'static,
    ) -> Result<Self, ActorError> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            size,
        });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("actor-pool".to_owned())
            .spawn(move || fill(&theirs, &make))
            .map_err(|source| ActorError::Files {
                activity: "starting the thread of a pool",
                source,
            })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Returns an actor, waiting at most `timeout` for one. Those whose time is half over are thrown away.
    ///
    /// # Errors
    ///
    /// Fails with why none could be made, and where the time is over; the pool goes on trying.
    pub fn take(&self, timeout: Duration) -> Result<Box<dyn Actor>, ActorError> {
        let until = Instant::now() + timeout;
        let mut state = self.shared.lock();
        loop {
            while let Some((since, actor)) = state.ready.pop_front() {
                self.shared.changed.notify_all();
                if since.elapsed() < actor.spec().limits.lifetime / 2 {
                    return Ok(actor);
                }
            }
            if let Some(error) = state.failed.take() {
                self.shared.changed.notify_all();
                return Err(error);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ActorError::Hung {
                    activity: "waiting for an actor of a pool".to_owned(),
                    limit: timeout,
                });
            }
            state = self
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Returns how many actors are ready.
    #[must_use]
    pub fn ready(&self) -> usize {
        self.shared.lock().ready.len()
    }
}

impl Drop for WarmPool {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Makes actors while fewer than enough are ready. After a failure it waits until somebody was told.
fn fill(shared: &Shared, make: &dyn Fn() -> Result<Box<dyn Actor>, ActorError>) {
    loop {
        {
            let mut state = shared.lock();
            while !state.is_over && (state.ready.len() >= shared.size || state.failed.is_some()) {
                state = shared
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            if state.is_over {
                return;
            }
        }
        let made = make();
        let mut state = shared.lock();
        match made {
            Ok(actor) => state.ready.push_back((Instant::now(), actor)),
            Err(error) => state.failed = Some(error),
        }
        shared.changed.notify_all();
    }
}
