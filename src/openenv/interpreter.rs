//! A session's interpreter: absent, live, at rest in memory, or lost.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::gym::StepError;
use crate::sandbox::{
    Cancel, ExecOutcome, ExecRequest, Exit, Limits, SandboxError, Session, Snapshot, WasmRuntime,
};

/// Where interpreters come from.
#[derive(Debug, Clone)]
pub(super) struct Source {
    pub(super) runtime: WasmRuntime,
    pub(super) limits: Arc<Limits>,
    /// What a fresh one starts from, if not from the runtime's own image.
    pub(super) template: Option<Arc<Snapshot>>,
}

impl Source {
    fn open(&self) -> Result<Session, StepError> {
        Ok(match &self.template {
            Some(template) => self.runtime.resume(template, &self.limits)?,
            None => self.runtime.session(&self.limits)?,
        })
    }

    /// Makes interpreters start where `prelude` has run.
    pub(super) fn with_prelude(mut self, prelude: &str) -> Result<Self, SandboxError> {
        let mut session = self.runtime.session(&self.limits)?;
        let outcome = session.step(&ExecRequest::new(prelude))?;
        assert!(
            outcome.exit.is_success(),
            "the prelude is a part of this program, and {}: {}",
            outcome.exit,
            outcome.stderr_text()
        );
        self.template = Some(Arc::new(session.snapshot()?));
        Ok(self)
    }
}

/// The interpreter of one session.
#[derive(Debug)]
pub(super) struct Interpreter {
    source: Source,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// No step has needed it yet.
    Fresh,
    Live(Session),
    /// Idle for long: its changed pages. Copies of it share them.
    Parked(Arc<Snapshot>),
    Lost {
        exit: String,
    },
}

impl Interpreter {
    pub(super) fn new(source: Source) -> Self {
        Self {
            source,
            place: Place::Fresh,
        }
    }

    /// Makes it a fresh one.
    pub(super) fn reset(&mut self) {
        self.place = Place::Fresh;
    }

    /// Runs a program, for at most `limit` where that is less than it may have.
    ///
    /// A limit, a crash or an exit past `SystemExit` ends the interpreter; the next step says that
    /// its state was lost.
    pub(super) fn step(
        &mut self,
        request: &ExecRequest,
        limit: Option<Duration>,
        cancel: &Cancel,
    ) -> Result<ExecOutcome, StepError> {
        let limit = limit.filter(|limit| *limit < self.source.limits.deadline);
        let session = self.live()?;
        let outcome = match limit {
            None => session.step_cancellable(request, cancel),
            Some(limit) => {
                let deadline = Deadline::start(limit, cancel);
                let outcome = session.step_cancellable(request, &deadline.cancel);
                outcome.map(|outcome| deadline.apply(outcome))
            }
        };
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) => {
                let is_usage = error.is_usage();
                let error = StepError::from(error);
                // Nobody knows what it is now; its instance is another's to have.
                if error.is_fault() && !is_usage {
                    let exit = "met a fault of the sandbox".to_owned();
                    self.place = Place::Lost { exit };
                }
                return Err(error);
            }
        };
        if outcome.exit == Exit::Cancelled {
            self.place = Place::Lost {
                exit: outcome.exit.to_string(),
            };
            return Err(StepError::Cancelled);
        }
        if let Place::Live(session) = &self.place
            && session.ended().is_some()
        {
            let exit = outcome.exit.to_string();
            self.place = Place::Lost { exit };
        }
        Ok(outcome)
    }

    /// Returns whether the last step ended it.
    pub(super) fn is_lost(&self) -> bool {
        matches!(self.place, Place::Lost { .. })
    }

    fn live(&mut self) -> Result<&mut Session, StepError> {
        let source = &self.source;
        match &self.place {
            Place::Live(_) => {}
            Place::Fresh => self.place = Place::Live(source.open()?),
            Place::Parked(snapshot) => {
                let session = source.runtime.resume(snapshot, &source.limits)?;
                self.place = Place::Live(session);
            }
            Place::Lost { exit } => return Err(StepError::StateLost { exit: exit.clone() }),
        }
        match &mut self.place {
            Place::Live(session) => Ok(session),
            _ => unreachable!("made live above"),
        }
    }

    /// Makes copies of it.
    pub(super) fn fork(&mut self, count: usize) -> Result<Vec<Self>, StepError> {
        let copy = |place| Self {
            source: self.source.clone(),
            place,
        };
        Ok(match &mut self.place {
            Place::Fresh => (0..count).map(|_| copy(Place::Fresh)).collect(),
            Place::Parked(snapshot) => (0..count)
                .map(|_| copy(Place::Parked(Arc::clone(snapshot))))
                .collect(),
            Place::Live(session) => match session.fork(count) {
                Ok(children) => {
                    let children = children.into_iter();
                    children.map(|child| copy(Place::Live(child))).collect()
                }
                // At rest they need none.
                Err(SandboxError::PoolExhausted { .. }) => {
                    let snapshot = Arc::new(session.snapshot()?);
                    (0..count)
                        .map(|_| copy(Place::Parked(Arc::clone(&snapshot))))
                        .collect()
                }
                Err(error) => return Err(error.into()),
            },
            Place::Lost { exit } => return Err(StepError::StateLost { exit: exit.clone() }),
        })
    }

    /// Gives a live interpreter back and keeps what it changed; returns whether it was live.
    pub(super) fn park(&mut self) -> Result<bool, StepError> {
        let Place::Live(session) = &mut self.place else {
            return Ok(false);
        };
        let snapshot = match session.snapshot() {
            Ok(snapshot) => snapshot,
            // It keeps what cannot be saved.
            Err(SandboxError::FilesNotSaved) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        self.place = Place::Parked(Arc::new(snapshot));
        Ok(true)
    }
}

/// A deadline shorter than the interpreter's own, which is fixed when it starts.
struct Deadline {
    cancel: Cancel,
    limit: Duration,
    started: Instant,
    _watch: mpsc::Sender<()>,
    outer: Cancel,
}

impl Deadline {
    fn start(limit: Duration, outer: &Cancel) -> Self {
        let cancel = Cancel::new();
        let (watch, over) = mpsc::channel::<()>();
        let (inner, from_outside) = (cancel.clone(), outer.clone());
        let started = Instant::now();
        let look = Duration::from_millis(5);
        std::thread::spawn(move || {
            loop {
                let left = limit.saturating_sub(started.elapsed());
                if left.is_zero() || from_outside.is_cancelled() {
                    return inner.cancel();
                }
                // The step's end drops the other side.
                let ended = over.recv_timeout(left.min(look));
                if ended == Err(mpsc::RecvTimeoutError::Disconnected) {
                    return;
                }
            }
        });
        Self {
            cancel,
            limit,
            started,
            _watch: watch,
            outer: outer.clone(),
        }
    }

    fn apply(&self, mut outcome: ExecOutcome) -> ExecOutcome {
        if outcome.exit == Exit::Cancelled && !self.outer.is_cancelled() {
            outcome.exit = Exit::DeadlineExceeded {
                limit: self.limit,
                elapsed: self.started.elapsed(),
            };
        }
        outcome
    }
}
