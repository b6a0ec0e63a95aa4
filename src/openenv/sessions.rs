//! The sessions of a server: who holds a slot, and what is theirs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::gym::{Episode, StepError};
use super::steps::Weight;
use crate::http::uuid4;

/// Fuel beyond which a session's next step is expected to be heavy: mostly half a millisecond.
const HEAVY_FUEL: u64 = 3_000_000;

/// One client's environment.
pub(super) struct Session {
    pub(super) id: String,
    episode: Mutex<Box<dyn Episode>>,
    /// A running mean of what its steps burn.
    fuel: AtomicU64,
    last_used: Mutex<Instant>,
}

impl Session {
    pub(super) fn new(episode: Box<dyn Episode>) -> Arc<Self> {
        Arc::new(Self {
            id: uuid4(),
            episode: Mutex::new(episode),
            fuel: AtomicU64::new(0),
            last_used: Mutex::new(Instant::now()),
        })
    }

    /// Waits until no other request uses the environment.
    pub(super) fn episode(&self) -> MutexGuard<'_, Box<dyn Episode>> {
        self.touch();
        self.episode.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the environment unless a request uses it.
    pub(super) fn idle_episode(&self) -> Option<MutexGuard<'_, Box<dyn Episode>>> {
        self.episode.try_lock().ok()
    }

    pub(super) fn touch(&self) {
        *self
            .last_used
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    pub(super) fn idle_since(&self) -> Instant {
        *self
            .last_used
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what a step burnt.
    pub(super) fn burnt(&self, fuel: u64) {
        let mean = self.fuel.load(Ordering::Relaxed);
        self.fuel.store(mean / 2 + fuel / 2, Ordering::Relaxed);
    }

    pub(super) fn weight(&self) -> Weight {
        if self.fuel.load(Ordering::Relaxed) > HEAVY_FUEL {
            Weight::Heavy
        } else {
            Weight::Light
        }
    }
}

/// All slots are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AtCapacity {
    pub(super) active: usize,
    pub(super) max: usize,
}

/// What became of a session that is to be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closed {
    Now,
    /// When its socket goes.
    Later,
}

struct Entry {
    session: Arc<Session>,
    is_attached: bool,
    /// It outlives its socket.
    is_resumable: bool,
    is_closing: bool,
}

/// The sessions that hold a slot.
pub(super) struct Sessions {
    max: usize,
    all: Mutex<HashMap<String, Entry>>,
}

impl Sessions {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            all: Mutex::default(),
        }
    }

    fn all(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn active(&self) -> usize {
        self.all().len()
    }

    /// Gives each session a slot, or none if there are too few.
    fn admit(
        &self,
        sessions: &[Arc<Session>],
        is_attached: bool,
        is_resumable: bool,
    ) -> Result<(), AtCapacity> {
        let mut all = self.all();
        if all.len() + sessions.len() > self.max {
            return Err(AtCapacity {
                active: all.len(),
                max: self.max,
            });
        }
        for session in sessions {
            let entry = Entry {
                session: Arc::clone(session),
                is_attached,
                is_resumable,
                is_closing: false,
            };
            all.insert(session.id.clone(), entry);
        }
        Ok(())
    }

    /// Admits the session of a new socket, which ends with it.
    pub(super) fn open(&self, session: &Arc<Session>) -> Result<(), AtCapacity> {
        self.admit(std::slice::from_ref(session), true, false)
    }

    /// Admits sessions that sockets may attach to, and leave.
    pub(super) fn create(&self, sessions: &[Arc<Session>]) -> Result<(), AtCapacity> {
        self.admit(sessions, false, true)
    }

    pub(super) fn get(&self, id: &str) -> Option<Arc<Session>> {
        let all = self.all();
        let entry = all.get(id).filter(|entry| !entry.is_closing)?;
        Some(Arc::clone(&entry.session))
    }

    /// Attaches a socket.
    pub(super) fn attach(&self, id: &str) -> Result<Arc<Session>, String> {
        let shown: String = id.chars().take(200).collect();
        let mut all = self.all();
        match all.get_mut(id) {
            None => Err(format!("Unknown session_id: {shown}")),
            Some(entry) if entry.is_attached => {
                Err(format!("Session {shown} already has an attached WebSocket"))
            }
            Some(entry) => {
                entry.is_attached = true;
                entry.session.touch();
                Ok(Arc::clone(&entry.session))
            }
        }
    }

    /// Returns whether the session outlives its socket.
    pub(super) fn outlives_socket(&self, id: &str) -> bool {
        let all = self.all();
        all.get(id)
            .is_some_and(|entry| entry.is_resumable && !entry.is_closing)
    }

    /// Detaches the socket; the slot is free at once, unless the session outlives it.
    pub(super) fn detach(&self, id: &str) {
        let mut all = self.all();
        let Some(entry) = all.get_mut(id) else {
            return;
        };
        let dropped = if entry.is_resumable && !entry.is_closing {
            entry.is_attached = false;
            entry.session.touch();
            None
        } else {
            all.remove(id)
        };
        drop(all);
        drop(dropped); // its interpreter is made fresh, which need not hold up others
    }

    pub(super) fn close(&self, id: &str) -> Option<Closed> {
        let mut all = self.all();
        let entry = all.get_mut(id)?;
        if entry.is_attached {
            entry.is_closing = true;
            return Some(Closed::Later);
        }
        let dropped = all.remove(id);
        drop(all);
        drop(dropped);
        Some(Closed::Now)
    }

    /// Ends sessions that no socket was attached to for `timeout`.
    pub(super) fn reap(&self, timeout: Duration) -> usize {
        let mut all = self.all();
        let is_old = |entry: &Entry| {
            !entry.is_attached
                && entry.session.idle_since().elapsed() > timeout
                && entry.session.idle_episode().is_some()
        };
        let old: Vec<_> = all
            .iter()
            .filter(|(_, entry)| is_old(entry))
            .map(|(id, _)| id.clone())
            .collect();
        let dropped: Vec<_> = old.iter().filter_map(|id| all.remove(id)).collect();
        drop(all);
        dropped.len()
    }

    /// Returns the sessions that were idle for `time`, the longest idle first.
    pub(super) fn idle_for(&self, time: Duration) -> Vec<Arc<Session>> {
        let all = self.all();
        let mut idle: Vec<_> = all
            .values()
            .map(|entry| (entry.session.idle_since(), &entry.session))
            .filter(|(since, _)| since.elapsed() >= time)
            .collect();
        idle.sort_by_key(|(since, _)| *since);
        idle.into_iter()
            .map(|(_, session)| Arc::clone(session))
            .collect()
    }

    /// Parks the session that is idle longest and has an interpreter.
    pub(super) fn park_one(&self) -> Result<bool, StepError> {
        for session in self.idle_for(Duration::ZERO) {
            if let Some(mut episode) = session.idle_episode()
                && episode.park()?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
