//! Ending a program from outside.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Ends a program that runs in another thread.
///
/// Clones stand for the same cancellation. The program ends as
/// [`Exit::Cancelled`](super::Exit::Cancelled), as a rule within some milliseconds, after a plain
/// pass over much memory within half a second; and so does every later one that is given the same
/// cancellation.
///
/// # Examples
///
/// ```
/// use wardian::sandbox::Cancel;
///
/// let cancel = Cancel::new();
/// let elsewhere = cancel.clone();
/// std::thread::spawn(move || elsewhere.cancel()).join().unwrap();
/// assert!(cancel.is_cancelled());
/// ```
#[derive(Debug, Clone, Default)]
pub struct Cancel {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    is_cancelled: AtomicBool,
    /// Who else has to be told, by number.
    told: Mutex<Told>,
}

#[derive(Default)]
struct Told {
    next: u64,
    whom: Vec<(u64, Arc<dyn Fn() + Send + Sync>)>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Inner")
            .field("is_cancelled", &self.is_cancelled)
            .finish_non_exhaustive()
    }
}

impl Cancel {
    /// Makes a cancellation for programs that are about to run.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the programs that were given this cancellation.
    pub fn cancel(&self) {
        self.inner.is_cancelled.store(true, Ordering::Relaxed);
        // Telling may take a while, and must not hold up those who come and go.
        let whom = self.told().whom.clone();
        for (_, tell) in whom {
            tell();
        }
    }

    /// Returns whether [`Self::cancel`] was called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.inner.is_cancelled.load(Ordering::Relaxed)
    }

    /// Has `tell` called on cancellation, at once if that has been, until the result is dropped.
    pub(super) fn on_cancel(&self, tell: impl Fn() + Send + Sync + 'static) -> Telling<'_> {
        let mut told = self.told();
        if self.is_cancelled() {
            tell();
        }
        let number = told.next;
        told.next += 1;
        told.whom.push((number, Arc::new(tell)));
        Telling {
            cancel: self,
            number,
        }
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.inner
            .told
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody who is told of a cancellation, until this is dropped.
pub(super) struct Telling<'a> {
    cancel: &'a Cancel,
    number: u64,
}

impl Drop for Telling<'_> {
    fn drop(&mut self) {
        let mut told = self.cancel.told();
        told.whom.retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn those_who_listen_are_told() {
        let cancel = Cancel::new();
        let calls = Arc::new(AtomicU32::new(0));
        let listen = || {
            let calls = Arc::clone(&calls);
            cancel.on_cancel(move || {
                calls.fetch_add(1, Ordering::Relaxed);
            })
        };
        let first = listen();
        drop(listen());
        cancel.clone().cancel();
        drop(first);
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        let _late = listen();
        assert_eq!(calls.load(Ordering::Relaxed), 2, "told at once");
    }
}
