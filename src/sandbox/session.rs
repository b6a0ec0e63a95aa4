//! A live interpreter over many steps.

use super::error::SandboxError;
use super::instance::Instance;
use super::outcome::{ExecOutcome, ExecRequest, Exit};

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
    instance: Instance,
    is_seeded: bool,
}

impl Session {
    pub(super) fn new(instance: Instance) -> Self {
        Self {
            instance,
            is_seeded: false,
        }
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
        if self.is_seeded || request.seed.is_some() {
            self.is_seeded = true;
            return self.instance.step(request);
        }
        self.is_seeded = true;
        self.instance.step(&ExecRequest {
            seed: Some(0),
            ..request.clone()
        })
    }

    /// Returns how the session ended, if it has; then no further step can run.
    #[must_use]
    pub fn ended(&self) -> Option<&Exit> {
        self.instance.ended()
    }
}
