//! The sessions of a server: who holds a slot, and what is theirs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::gym::{Episode, StepError};
use super::steps::Weight;
use crate::http::uuid4;

/// Fuel beyond which a session's next step is expected to be heavy: mostly half a millisecond.
const HEAVY_FUEL: u64 = 3_000_000;

/// Requests of one session that wait for their turn.
const MAX_WAITING: usize = 64;

/// One client's environment.
pub(super) struct Session {
    pub(super) id: String,
    episode: Mutex<Box<dyn Episode>>,
    /// One permit, for the request whose turn it is.
    turns: Arc<Semaphore>,
    /// One permit for each request that may wait for its turn.
    waiting: Semaphore,
    /// A running mean of what its steps burn.
    fuel: AtomicU64,
    last_used: Mutex<Instant>,
}

impl Session {
    pub(super) fn new(episode: Box<dyn Episode>) -> Arc<Self> {
        Arc::new(Self {
            id: uuid4(),
            episode: Mutex::new(episode),
            turns: Arc::new(Semaphore::new(1)),
            waiting: Semaphore::new(MAX_WAITING),
            fuel: AtomicU64::new(0),
            last_used: Mutex::new(Instant::now()),
        })
    }

    /// Waits until no other request has a turn, first come, first served.
    ///
    /// # Errors
    ///
    /// Fails where too many wait already, each with what it asks.
    pub(super) async fn turn(&self) -> Result<OwnedSemaphorePermit, StepError> {
        let limit = MAX_WAITING;
        let _place = (self.waiting.try_acquire()).map_err(|_| StepError::Crowded { limit })?;
        let turn = Arc::clone(&self.turns).acquire_owned().await;
        Ok(turn.expect("the semaphore is never closed"))
    }

    /// Waits until nobody else uses the environment: for whoever has the turn, not for long.
    pub(super) fn episode(&self) -> MutexGuard<'_, Box<dyn Episode>> {
        self.touch();
        self.episode.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the environment unless a request uses it.
    pub(super) fn idle_episode(&self) -> Option<MutexGuard<'_, Box<dyn Episode>>> {
        match self.episode.try_lock() {
            Ok(episode) => Some(episode),
            // A step that panicked left it; the next reset mends it.
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
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

    /// Returns whether there are slots for `count` more.
    pub(super) fn check_room(&self, count: usize) -> Result<(), AtCapacity> {
        let active = self.active();
        if active + count > self.max {
            return Err(AtCapacity {
                active,
                max: self.max,
            });
        }
        Ok(())
    }

    /// Admits the session of a new socket, which ends with it.
    pub(super) fn open(&self, session: &Arc<Session>) -> Result<(), AtCapacity> {
        self.admit(std::slice::from_ref(session), true, false)
    }

    /// Admits the session of one request, which ends with what is returned.
    pub(super) fn lend(&self, session: &Arc<Session>) -> Result<Lent<'_>, AtCapacity> {
        self.open(session)?;
        Ok(Lent {
            sessions: self,
            id: session.id.clone(),
        })
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

    /// Parks the session that is idle longest and has an interpreter; returns whether there was one. One that
    /// cannot be parked is no matter of whoever needs an interpreter: the next one is tried.
    pub(super) fn park_one(&self) -> bool {
        for session in self.idle_for(Duration::ZERO) {
            let Some(mut episode) = session.idle_episode() else {
                continue;
            };
            match episode.park() {
                Ok(true) => return true,
                Ok(false) => {}
                Err(error) => {
                    tracing::error!(error = %error.describe(), "a session was not put to rest");
                }
            }
        }
        false
    }
}

/// The slot of a session that is one request's.
pub(super) struct Lent<'a> {
    sessions: &'a Sessions,
    id: String,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.sessions.detach(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use serde_json::{Map, Value};

    use super::*;
    use crate::openenv::gym::Observation;
    use crate::sandbox::Cancel;

    #[derive(Default)]
    struct Bare {
        cannot_park: bool,
    }

    impl Episode for Bare {
        fn reset(&mut self, _: &Map<String, Value>, _: &Cancel) -> Result<Observation, StepError> {
            Ok(Observation::default())
        }

        fn step(
            &mut self,
            _: &Map<String, Value>,
            _: Option<Duration>,
            _: &Cancel,
        ) -> Result<Observation, StepError> {
            Ok(Observation::default())
        }

        fn state(&self) -> Value {
            Value::Null
        }

        fn fork(&mut self, _: usize) -> Result<Vec<Box<dyn Episode>>, StepError> {
            Ok(Vec::new())
        }

        fn park(&mut self) -> Result<bool, StepError> {
            let message = "of the test".to_owned();
            match self.cannot_park {
                true => Err(StepError::Environment { message }),
                false => Ok(true),
            }
        }
    }

    #[test]
    fn a_session_that_cannot_be_parked_is_no_matter_of_others() {
        let sessions = Sessions::new(2);
        let broken = Session::new(Box::new(Bare { cannot_park: true }));
        sessions.create(std::slice::from_ref(&broken)).unwrap();
        assert!(!sessions.park_one());
        let whole = Session::new(Box::new(Bare::default()));
        sessions.create(std::slice::from_ref(&whole)).unwrap();
        // The broken one is tried first.
        assert_eq!(sessions.idle_for(Duration::ZERO)[0].id, broken.id);
        assert!(sessions.park_one());
    }

    #[tokio::test]
    async fn requests_of_one_session_wait_and_not_without_end() {
        let session = Session::new(Box::new(Bare::default()));
        let turn = session.turn().await.unwrap();
        let mut waiting = Vec::new();
        for _ in 0..MAX_WAITING {
            let mut next = Box::pin(session.turn());
            let mut context = Context::from_waker(Waker::noop());
            assert!(next.as_mut().poll(&mut context).is_pending());
            waiting.push(next);
        }
        let crowded = session.turn().await.unwrap_err();
        assert!(matches!(crowded, StepError::Crowded { .. }), "{crowded}");
        drop(turn);
        drop(waiting.remove(0).await.unwrap());
        waiting.clear();
        drop(session.turn().await.unwrap());
    }

    #[test]
    fn a_session_whose_step_panicked_is_still_looked_after() {
        let sessions = Sessions::new(1);
        let session = Session::new(Box::new(Bare::default()));
        sessions.create(std::slice::from_ref(&session)).unwrap();
        let stepping = Arc::clone(&session);
        let step = std::thread::spawn(move || {
            let _episode = stepping.episode();
            panic!("of the test");
        });
        step.join().unwrap_err();
        assert!(sessions.park_one());
        assert_eq!(sessions.reap(Duration::ZERO), 1);
    }
}
