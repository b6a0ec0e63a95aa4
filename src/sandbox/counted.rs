//! How much a sandbox has to do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{
    Cancel, Dialogue, DialogueOutcome, ExecOutcome, ExecRequest, Limits, Sandbox, SandboxError,
    Session,
};

/// What a sandbox has to do, and has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Activity {
    /// Programs and gradings that run, or wait for an instance.
    pub under_way: u64,
    /// Those that have come to an end, whatever end.
    pub ended: u64,
}

/// A sandbox that counts what it is asked for. Sessions are not counted.
#[derive(Debug)]
pub struct CountedSandbox {
    inner: Arc<dyn Sandbox>,
    under_way: AtomicU64,
    ended: AtomicU64,
}

/// One call, until it ends, by a panic as well.
struct Counted<'a>(&'a CountedSandbox);

impl CountedSandbox {
    /// Counts what `inner` is asked for from now on.
    #[must_use]
    pub fn new(inner: Arc<dyn Sandbox>) -> Self {
        Self {
            inner,
            under_way: AtomicU64::new(0),
            ended: AtomicU64::new(0),
        }
    }

    fn begin(&self) -> Counted<'_> {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        Counted(self)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
        self.0.ended.fetch_add(1, Ordering::Relaxed);
    }
}

impl Sandbox for CountedSandbox {
    fn exec_cancellable(
        &self,
        request: &ExecRequest,
        limits: &Limits,
        cancel: &Cancel,
    ) -> Result<ExecOutcome, SandboxError> {
        let _counted = self.begin();
        self.inner.exec_cancellable(request, limits, cancel)
    }

    fn session(&self, limits: &Limits) -> Result<Session, SandboxError> {
        self.inner.session(limits)
    }

    fn converse(&self, dialogue: &Dialogue) -> Result<DialogueOutcome, SandboxError> {
        let _counted = self.begin();
        self.inner.converse(dialogue)
    }

    fn activity(&self) -> Option<Activity> {
        Some(Activity {
            under_way: self.under_way.load(Ordering::Relaxed),
            ended: self.ended.load(Ordering::Relaxed),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Fails once it is let go.
    #[derive(Debug)]
    struct Waiting {
        go: std::sync::Mutex<mpsc::Receiver<()>>,
    }

    impl Sandbox for Waiting {
        fn exec_cancellable(
            &self,
            _: &ExecRequest,
            _: &Limits,
            _: &Cancel,
        ) -> Result<ExecOutcome, SandboxError> {
            self.go.lock().unwrap().recv().unwrap();
            Err(SandboxError::PoolExhausted { limit: 1 })
        }

        fn session(&self, _: &Limits) -> Result<Session, SandboxError> {
            Err(SandboxError::PoolExhausted { limit: 1 })
        }

        fn converse(&self, _: &Dialogue) -> Result<DialogueOutcome, SandboxError> {
            Err(SandboxError::PoolExhausted { limit: 1 })
        }
    }

    #[test]
    fn what_runs_and_what_has_ended_is_counted() {
        let (go, is_gone) = mpsc::channel();
        let go_on = std::sync::Mutex::new(is_gone);
        let sandbox = CountedSandbox::new(Arc::new(Waiting { go: go_on }));
        let of = |under_way, ended| Some(Activity { under_way, ended });
        assert_eq!(sandbox.activity(), of(0, 0));
        std::thread::scope(|scope| {
            let ask = || {
                sandbox
                    .exec(&ExecRequest::new(""), &Limits::default())
                    .is_err()
            };
            let asked = [scope.spawn(ask), scope.spawn(ask)];
            while sandbox.activity() != of(2, 0) {
                std::thread::yield_now();
            }
            go.send(()).unwrap();
            go.send(()).unwrap();
            for asked in asked {
                assert!(asked.join().unwrap());
            }
        });
        assert_eq!(sandbox.activity(), of(0, 2));
    }
}
