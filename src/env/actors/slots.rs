//! How many episodes have an actor at a time.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time between looks at whether who waits still wants room.
const LOOK: Duration = Duration::from_millis(50);

/// Room for a number of actors.
#[derive(Debug)]
pub(super) struct Slots {
    state: Mutex<State>,
    changed: Condvar,
    most: usize,
}

#[derive(Debug, Default)]
struct State {
    taken: usize,
    /// Those who wait for room.
    waiting: usize,
    is_closed: bool,
}

/// Room for one actor, until it is dropped.
#[derive(Debug)]
pub(super) struct Slot(Arc<Slots>);

impl Slots {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            most: most.max(1),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for room; there is none any more once it is closed, or `is_over`.
    pub(super) fn take(self: &Arc<Self>, is_over: &dyn Fn() -> bool) -> Option<Slot> {
        let mut state = self.lock();
        state.waiting += 1;
        while !state.is_closed && !is_over() && state.taken >= self.most {
            state = self
                .changed
                .wait_timeout(state, LOOK)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state.waiting -= 1;
        if state.is_closed || is_over() {
            return None;
        }
        state.taken += 1;
        Some(Slot(Arc::clone(self)))
    }

    /// Returns how many have room, and how many wait for some.
    pub(super) fn load(&self) -> (usize, usize) {
        let state = self.lock();
        (state.taken, state.waiting)
    }

    /// Waits for so long, or until it is closed; returns whether it is open.
    pub(super) fn pause(&self, time: Duration) -> bool {
        !self.wait_while(time, |state| !state.is_closed).is_closed
    }

    /// Waits for as long as something is so, but no longer than `limit`.
    fn wait_while(
        &self,
        limit: Duration,
        is_so: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'_, State> {
        let waited = self.changed.wait_timeout_while(self.lock(), limit, is_so);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Gives no more room, and lets those go who wait for some.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Waits until all room is free again; returns whether it is.
    pub(super) fn wait_free(&self, limit: Duration) -> bool {
        self.wait_while(limit, |state| state.taken > 0).taken == 0
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.lock().taken -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn no_more_have_room_than_there_is() {
        let slots = Slots::new(3);
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..12 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let _slot = slots.take(&|| false).expect("it is open");
                        let held = now.fetch_add(1, Ordering::SeqCst) + 1;
                        most.fetch_max(held, Ordering::SeqCst);
                        std::thread::yield_now();
                        now.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert!((1..=3).contains(&most.load(Ordering::SeqCst)));
        assert!(slots.wait_free(Duration::ZERO));
    }

    #[test]
    fn who_waits_is_let_go_when_it_closes() {
        let slots = Slots::new(1);
        let held = slots.take(&|| false).expect("it is open");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| slots.take(&|| false).is_none());
            while slots.load() != (1, 1) {
                std::thread::yield_now();
            }
            slots.close();
            assert!(waiting.join().expect("it does not panic"));
        });
        assert!(!slots.wait_free(Duration::ZERO));
        drop(held);
        assert_eq!(slots.load(), (0, 0));
        assert!(slots.wait_free(Duration::ZERO) && slots.take(&|| false).is_none());
    }

    #[test]
    fn a_pause_ends_when_it_closes() {
        let slots = Slots::new(1);
        assert!(slots.pause(Duration::from_millis(1)));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| slots.pause(Duration::from_hours(1)));
            slots.close();
            assert!(!waiting.join().expect("it does not panic"));
        });
        assert!(!slots.pause(Duration::from_hours(1)));
    }
}
