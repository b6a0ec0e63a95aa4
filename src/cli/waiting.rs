//! What is said while something of unknown length goes on.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::printer::Printer;
use super::progress::human_duration;

/// What is done sooner needs no words.
const SILENCE: Duration = Duration::from_secs(2);
/// Time between drawings.
const REDRAW: Duration = Duration::from_secs(1);

/// Says on a terminal what is waited for and for how long already, until it is dropped. Elsewhere nothing is said:
/// nobody waits there.
#[derive(Debug)]
pub(super) struct Waiting {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Inner {
    is_over: Mutex<bool>,
    ended: Condvar,
}

impl Waiting {
    /// Begins to wait for `what`.
    pub(super) fn new(printer: &Printer, what: &'static str) -> Self {
        let inner = Arc::new(Inner {
            is_over: Mutex::new(false),
            ended: Condvar::new(),
        });
        let thread = printer.is_live().then(|| {
            let (printer, inner) = (printer.clone(), Arc::clone(&inner));
            std::thread::spawn(move || {
                inner.show(&|elapsed| {
                    printer.redraw_idle(&format!("{what} · {}", human_duration(elapsed)));
                });
                printer.redraw_idle("");
            })
        });
        Self { inner, thread }
    }
}

impl Inner {
    /// Calls `draw` now and then until it is over.
    fn show(&self, draw: &dyn Fn(Duration)) {
        let started = Instant::now();
        let mut patience = SILENCE;
        loop {
            let is_over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
            let waited = (self.ended).wait_timeout_while(is_over, patience, |is_over| !*is_over);
            if *waited.unwrap_or_else(PoisonError::into_inner).0 {
                return;
            }
            draw(started.elapsed());
            patience = REDRAW;
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        *(self.inner.is_over.lock()).unwrap_or_else(PoisonError::into_inner) = true;
        self.inner.ended.notify_all();
        if let Some(thread) = self.thread.take() {
            // It panicked only if it has said so.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_soon_is_not_spoken_of() {
        let inner = Inner {
            is_over: Mutex::new(true),
            ended: Condvar::new(),
        };
        inner.show(&|_| unreachable!("it is over"));
    }

    #[test]
    fn what_takes_long_is_said_until_it_ends() {
        let inner = Arc::new(Inner {
            is_over: Mutex::new(false),
            ended: Condvar::new(),
        });
        let ender = Arc::clone(&inner);
        inner.show(&|elapsed| {
            assert!(elapsed >= SILENCE);
            *ender
                .is_over
                .try_lock()
                .expect("nobody holds it while it is drawn") = true;
        });
    }
}
