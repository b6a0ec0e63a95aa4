//! Untrusted guests under wasmtime.
//!
//! A [`WasmRuntime`] is one compiled CPython; [`exec`](WasmRuntime::exec) runs a program in a
//! fresh copy of it, [`session`](WasmRuntime::session) keeps a copy alive over many steps. What a
//! guest may use is in [`Limits`]; how it ended is a value, [`Exit`], inside [`ExecOutcome`]. A
//! [`SandboxError`] is a fault of ours, or of what the caller gave.
//!
//! **What a guest has**: its own linear memory, three standard streams, a virtual clock, seeded
//! randomness. Its files are a tree in that memory, private to the instance and gone with it. No
//! sockets, no environment, no threads, no processes: the functions for them do not exist. Nothing
//! it does reaches another instance.
//!
//! **How a fresh interpreter is cheap**: the interpreter is started once, at preparation, with
//! its standard library loaded, and its memory is kept as an image. An instance maps that image
//! copy-on-write and pays only for the pages it writes; afterwards these are restored, and the
//! instance is used again.
//!
//! **Determinism**: with the same seed a program sees the same clock, random bytes and hashes,
//! and uses the same fuel, in every process and on every machine. Only the wall-clock deadline
//! depends on load.
//!
//! Output and exit code are the program's to choose. A verdict about a program must come from
//! [`grader`](crate::grader), which asks it from a second instance.

mod bridge;
mod budget;
mod byte_size;
mod cache;
mod cancel;
mod compiled;
mod counted;
mod error;
#[cfg(any(fuzzing, test))]
pub mod fuzzing;
mod guest;
mod host;
mod instance;
mod limits;
mod memory;
mod meter;
mod microseconds;
mod outcome;
mod pool;
mod runtime;
mod saved;
mod science;
pub(crate) mod seconds;
mod session;
mod snapshot;
mod wasi;
mod wheel;
mod workers;

pub use bridge::{Dialogue, DialogueOutcome, Message, Round, Served};
pub use cache::CacheFolder;
pub use cancel::Cancel;
pub use compiled::{CachedGuest, Progress};
pub use counted::{Activity, CountedSandbox};
pub use error::SandboxError;
pub use guest::{Guest, RuntimeName};
pub use limits::Limits;
pub use outcome::{ExecOutcome, ExecRequest, Exit, Usage};
pub use pool::Statistics;
pub use runtime::{Meter, Restore, RuntimeOptions, WasmRuntime};
pub use saved::Snapshot;
pub use session::Session;
pub use workers::{WorkerOptions, Workers, serve_parent};

pub(crate) use instance::MAX_MESSAGE;

/// A place to run untrusted programs, shared by threads as `Arc<dyn Sandbox>`.
pub trait Sandbox: std::fmt::Debug + Send + Sync {
    /// Runs a program in a fresh interpreter.
    ///
    /// # Errors
    ///
    /// Returns an error only if the sandbox is at fault; however the program ends is in the
    /// outcome.
    fn exec(&self, request: &ExecRequest, limits: &Limits) -> Result<ExecOutcome, SandboxError> {
        self.exec_cancellable(request, limits, &Cancel::new())
    }

    /// As [`Self::exec`], until `cancel` ends it.
    ///
    /// # Errors
    ///
    /// As for [`Self::exec`].
    fn exec_cancellable(
        &self,
        request: &ExecRequest,
        limits: &Limits,
        cancel: &Cancel,
    ) -> Result<ExecOutcome, SandboxError>;

    /// Opens a live interpreter.
    ///
    /// # Errors
    ///
    /// Returns an error if the limits are not usable or every instance is taken.
    fn session(&self, limits: &Limits) -> Result<Session, SandboxError>;

    /// Lets one fresh guest ask another one.
    ///
    /// # Errors
    ///
    /// Returns an error if a message is too large, no instance is free, or the sandbox is at
    /// fault; however the guests end is in the outcome.
    fn converse(&self, dialogue: &Dialogue) -> Result<DialogueOutcome, SandboxError>;

    /// Returns what it has to do; none where that is not counted.
    fn activity(&self) -> Option<Activity> {
        None
    }
}
