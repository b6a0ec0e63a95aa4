//! Instances that wait for their next guest.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use super::cancel::Cancel;
use super::error::SandboxError;
use super::instance::{GuestState, Instance};
use super::limits::Limits;
use super::runtime::WasmRuntime;

/// Restored instances that are kept; more are dropped when they come back.
const MAX_IDLE: usize = 128;

/// How often those who wait look whether they are cancelled.
const CANCEL_LOOK: Duration = Duration::from_millis(10);

/// Counts the instances in use and keeps idle ones.
#[derive(Debug)]
pub(super) struct Pool {
    limit: u32,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Fresh instances, and the threads that restored them. The last one of a thread is the
    /// warmest in its core's caches.
    idle: Vec<(ThreadId, Instance)>,
    in_use: u32,
    restored: u64,
    failed: u64,
}

/// What happened to a runtime's instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Instances that are running a program or belong to a session or a grading.
    pub in_use: u32,
    /// Fresh instances that wait for their next guest.
    pub idle: usize,
    /// Times an instance was made fresh again.
    pub restored: u64,
    /// Instances that could not be made or made fresh, or did not pass the audit; anything but 0
    /// is a fault of the sandbox or of the machine.
    pub failed: u64,
}

impl Pool {
    pub(super) fn new(limit: u32) -> Self {
        Self {
            limit,
            state: Mutex::default(),
            returned: Condvar::new(),
        }
    }

    /// Takes an idle instance, or `None` if a new one may be made.
    ///
    /// While all are in use, waits for one for as long as `patience`, or until `cancel`.
    fn take(&self, patience: Duration, cancel: &Cancel) -> Result<Option<Instance>, SandboxError> {
        let mut state = self.state();
        let started = Instant::now();
        while state.in_use >= self.limit {
            let left = patience.saturating_sub(started.elapsed());
            if left.is_zero() || cancel.is_cancelled() {
                return Err(SandboxError::PoolExhausted { limit: self.limit });
            }
            let waited = self.returned.wait_timeout(state, left.min(CANCEL_LOOK));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.in_use += 1;
        let here = std::thread::current().id();
        let warmest = state.idle.iter().rposition(|(thread, _)| *thread == here);
        // Rather one that no thread may come back for than the warmest of another thread.
        let taken = warmest.or_else(|| (!state.idle.is_empty()).then_some(0));
        Ok(taken.map(|index| state.idle.remove(index).1))
    }

    /// Takes back a fresh instance.
    fn give_back(&self, instance: Instance) {
        let mut state = self.state();
        state.in_use -= 1;
        state.restored += 1;
        let surplus = if state.idle.len() < MAX_IDLE {
            state.idle.push((std::thread::current().id(), instance));
            None
        } else {
            Some(instance)
        };
        drop(state);
        drop(surplus); // unmaps memory, which need not hold up others
        self.returned.notify_one();
    }

    /// Takes back the right to an instance that could not be made, or not be restored.
    fn give_up(&self) {
        let mut state = self.state();
        state.in_use -= 1;
        state.failed += 1;
        drop(state);
        self.returned.notify_one();
    }

    pub(super) fn statistics(&self) -> Statistics {
        let state = self.state();
        Statistics {
            in_use: state.in_use,
            idle: state.idle.len(),
            restored: state.restored,
            failed: state.failed,
        }
    }

    /// The state is sound after any panic: each change to it is a single one.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An instance in use: the only handle to it. Dropped, it is restored for the next guest.
#[derive(Debug)]
pub(super) struct Lease {
    /// `None` only while it is dropped.
    instance: Option<Instance>,
    runtime: WasmRuntime,
}

impl Lease {
    /// Takes an instance, waiting for up to `patience`, or until `cancel`, while all are in use.
    pub(super) fn new(
        runtime: &WasmRuntime,
        limits: &Limits,
        patience: Duration,
        cancel: &Cancel,
    ) -> Result<Self, SandboxError> {
        limits.validate()?;
        let minimum = runtime.guest_memory();
        if limits.memory.0 < minimum {
            return Err(SandboxError::MemoryLimitTooSmall {
                limit: limits.memory.0,
                minimum,
            });
        }
        let idle = runtime.pool().take(patience, cancel)?;
        // From here on a failure gives the right to an instance back.
        let mut lease = Self {
            instance: idle,
            runtime: runtime.clone(),
        };
        if lease.instance.is_none() {
            lease.instance = Some(Instance::new(runtime.prepared())?);
        }
        lease.begin(runtime.prepared(), limits)?;
        Ok(lease)
    }

    /// Takes another instance with the same limits.
    pub(super) fn sibling(&self) -> Result<Self, SandboxError> {
        Self::new(&self.runtime, self.limits(), Duration::ZERO, &Cancel::new())
    }

    /// Makes the instance a fresh one, for another guest of the same owner.
    pub(super) fn renew(&mut self, limits: &Limits) -> Result<(), SandboxError> {
        let runtime = self.runtime.clone();
        self.restore(runtime.prepared())?;
        self.begin(runtime.prepared(), limits)
    }

    /// Saves the guest's state at rest for [`Self::go_back`].
    pub(super) fn mark_here(&mut self) -> Result<GuestState, SandboxError> {
        let runtime = self.runtime.clone();
        self.mark(runtime.prepared())
    }

    /// Makes the guest what it was when it was marked as `state`, under other limits.
    pub(super) fn go_back(
        &mut self,
        state: &GuestState,
        limits: &Limits,
    ) -> Result<(), SandboxError> {
        let runtime = self.runtime.clone();
        if self.rewind(runtime.prepared(), state, limits)? {
            return Ok(());
        }
        self.renew(limits)?;
        self.load(state)
    }

    /// Returns the most instances that there may be.
    pub(super) fn limit(&self) -> u32 {
        self.runtime.pool().limit
    }

    /// Returns what tells this guest from others.
    pub(super) fn guest_id(&self) -> &blake3::Hash {
        self.runtime.prepared().guest_id()
    }
}

impl Deref for Lease {
    type Target = Instance;

    fn deref(&self) -> &Instance {
        self.instance.as_ref().expect("taken by `drop` only")
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut Instance {
        self.instance.as_mut().expect("taken by `drop` only")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let pool = self.runtime.pool();
        let Some(mut instance) = self.instance.take() else {
            pool.give_up(); // it could not be made
            return;
        };
        match instance.restore(self.runtime.prepared()) {
            Ok(()) => pool.give_back(instance),
            Err(error) => {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "a guest's memory was not restored; the instance is thrown away"
                );
                drop(instance);
                pool.give_up();
            }
        }
    }
}
