//! Slots: places of rollouts, each with a number and, between two episodes, its session.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::session::Session;

/// The slots that no episode has.
#[derive(Debug, Default)]
pub(super) struct Slots {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    free: BTreeMap<usize, Option<Session>>,
    /// How many there are.
    count: usize,
}

/// A slot that an episode has, until this is dropped.
#[derive(Debug)]
pub(super) struct Lease {
    slots: Arc<Slots>,
    pub(super) slot: usize,
    pub(super) session: Option<Session>,
}

impl Slots {
    /// Takes the first free slot, or a new one: as many as there are episodes at a time.
    pub(super) fn lease(self: &Arc<Self>) -> Lease {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let (slot, session) = inner.free.pop_first().unwrap_or_else(|| {
            inner.count += 1;
            (inner.count - 1, None)
        });
        Lease {
            slots: Arc::clone(self),
            slot,
            session,
        }
    }

    /// Takes all sessions that no episode has.
    pub(super) fn take_sessions(&self) -> Vec<Session> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.free.values_mut().filter_map(Option::take).collect()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let session = self.session.take().filter(Session::is_open);
        let mut inner = (self.slots.inner.lock()).unwrap_or_else(PoisonError::into_inner);
        inner.free.insert(self.slot, session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_slot_is_taken_and_comes_back() {
        let slots = Arc::<Slots>::default();
        let [first, second] = [slots.lease(), slots.lease()];
        assert_eq!((first.slot, second.slot), (0, 1));
        drop(first);
        let again = slots.lease();
        assert_eq!((again.slot, slots.lease().slot), (0, 2));
        drop((second, again));
        assert_eq!(slots.lease().slot, 0);
    }
}
