//! A live interpreter over many steps.

use super::cancel::Cancel;
use super::error::SandboxError;
use super::outcome::{ExecOutcome, ExecRequest, Exit};
use super::pool::Lease;
use super::saved::Snapshot;
use super::workers::WorkerSession;

/// A live interpreter: each step sees the names and objects that earlier steps left.
///
/// Memory holds for the session, fuel, deadline and output limits for each step. An exception
/// ends a step only; a trap, `os._exit` or a limit ends the session.
///
/// # Examples
///
/// ```no_run
/// # // No run: the first load of the Python guest takes up to a minute.
/// # fn main() -> Result<(), wardian::sandbox::SandboxError> {
/// use wardian::sandbox::{ExecRequest, Limits, RuntimeOptions, WasmRuntime};
///
/// let runtime = WasmRuntime::load(&RuntimeOptions::default(), |_| {})?;
/// let mut session = runtime.session(&Limits::default())?;
/// session.step(&ExecRequest::new("x = 20"))?;
/// let outcome = session.step(&ExecRequest::new("print(x + 1)"))?;
/// assert_eq!(outcome.stdout_text(), "21\n");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Session {
    place: Place,
}

/// Where the interpreter is.
#[derive(Debug)]
enum Place {
    Here(Box<LocalSession>),
    Worker(Box<WorkerSession>),
}

impl Session {
    pub(super) fn in_process(instance: Lease) -> Self {
        Self {
            place: Place::Here(Box::new(LocalSession {
                instance,
                is_seeded: false,
            })),
        }
    }

    pub(super) fn in_worker(session: WorkerSession) -> Self {
        Self {
            place: Place::Worker(Box::new(session)),
        }
    }

    /// Opens a session from a snapshot.
    pub(super) fn resumed(mut instance: Lease, snapshot: &Snapshot) -> Result<Self, SandboxError> {
        instance.load(&snapshot.state)?;
        Ok(Self {
            place: Place::Here(Box::new(LocalSession {
                instance,
                is_seeded: snapshot.is_seeded,
            })),
        })
    }

    /// Runs one program in the session.
    ///
    /// The first step is seeded with 0 unless it names a seed; later ones carry the random state
    /// on unless they do.
    ///
    /// # Errors
    ///
    /// Returns [`SandboxError::SessionEnded`] after a step that ended the session, or another
    /// error if the sandbox is at fault. Whatever the program does is in the outcome.
    pub fn step(&mut self, request: &ExecRequest) -> Result<ExecOutcome, SandboxError> {
        self.step_cancellable(request, &Cancel::new())
    }

    /// As [`Self::step`], until `cancel` ends it, and the session with it.
    ///
    /// # Errors
    ///
    /// As for [`Self::step`].
    pub fn step_cancellable(
        &mut self,
        request: &ExecRequest,
        cancel: &Cancel,
    ) -> Result<ExecOutcome, SandboxError> {
        match &mut self.place {
            Place::Here(session) => session.step(request, cancel),
            Place::Worker(session) => session.step(request, cancel),
        }
    }

    /// Makes `count` independent copies of the session, as it is between two steps.
    ///
    /// A copy has the names, objects, open generators, files, clock and random state of the
    /// original, and the same limits. From then on they do not influence each other. Without a
    /// seed in its next [request](ExecRequest), each copy draws the same random numbers.
    ///
    /// # Errors
    ///
    /// Returns [`SandboxError::SessionEnded`] if the session has ended,
    /// [`SandboxError::PoolExhausted`] if there are not as many instances left, or another error
    /// if the sandbox is at fault.
    pub fn fork(&mut self, count: usize) -> Result<Vec<Self>, SandboxError> {
        let places: Vec<_> = match &mut self.place {
            Place::Here(session) => {
                let children = session.fork(count)?.into_iter();
                children.map(|child| Place::Here(Box::new(child))).collect()
            }
            Place::Worker(session) => {
                let children = session.fork(count)?.into_iter();
                children
                    .map(|child| Place::Worker(Box::new(child)))
                    .collect()
            }
        };
        Ok(places.into_iter().map(|place| Self { place }).collect())
    }

    /// Saves the session, as it is between two steps.
    ///
    /// # Errors
    ///
    /// Returns [`SandboxError::SessionEnded`] if the session has ended, or another error if the
    /// sandbox is at fault.
    pub fn snapshot(&mut self) -> Result<Snapshot, SandboxError> {
        match &mut self.place {
            Place::Here(session) => session.snapshot(),
            Place::Worker(session) => session.snapshot(),
        }
    }

    /// Returns how the session ended, if it has; then no further step can run.
    #[must_use]
    pub fn ended(&self) -> Option<&Exit> {
        match &self.place {
            Place::Here(session) => session.instance.ended(),
            Place::Worker(session) => session.ended(),
        }
    }
}

/// A session in this process.
#[derive(Debug)]
struct LocalSession {
    instance: Lease,
    is_seeded: bool,
}

impl LocalSession {
    fn step(
        &mut self,
        request: &ExecRequest,
        cancel: &Cancel,
    ) -> Result<ExecOutcome, SandboxError> {
        let default_seed = (!self.is_seeded).then_some(0);
        let outcome = self.instance.step(request, default_seed, cancel)?;
        self.is_seeded = true;
        Ok(outcome)
    }

    fn fork(&mut self, count: usize) -> Result<Vec<Self>, SandboxError> {
        self.check_alive()?;
        let limit = self.instance.limit();
        if count > limit as usize {
            return Err(SandboxError::PoolExhausted { limit });
        }
        self.instance.share()?;
        let changed = self.instance.changed()?;
        (0..count)
            .map(|_| {
                let mut child = self.instance.sibling()?;
                child.copy_from(&self.instance, &changed)?;
                Ok(Self {
                    instance: child,
                    is_seeded: self.is_seeded,
                })
            })
            .collect()
    }

    fn snapshot(&mut self) -> Result<Snapshot, SandboxError> {
        self.check_alive()?;
        Ok(Snapshot {
            guest: *self.instance.guest_id(),
            is_seeded: self.is_seeded,
            state: self.instance.save()?,
        })
    }

    fn check_alive(&self) -> Result<(), SandboxError> {
        match self.instance.ended() {
            Some(exit) => Err(SandboxError::SessionEnded { exit: exit.clone() }),
            None => Ok(()),
        }
    }
}
