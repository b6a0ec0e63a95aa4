//! The heavy tier: untrusted programs that need a shell, a repository, compilers and test suites.
//!
//! An [`ActorBackend`] creates [`Actor`]s from an [`ActorSpec`]. An actor is a small machine of its own:
//! a root filesystem whose changes are private to it, processes, no network. It runs [`ActorCommand`]s,
//! takes and gives [`FileTree`]s, and can be kept as an [`ActorSnapshot`] from which a whole group starts.
//!
//! **Two kinds of failure.** However a program ends, runs over or dies is an [`Ending`] inside
//! [`ActorOutput`], and so is an actor that its own processes brought down. An [`ActorError`] is a fault of
//! ours or of what the caller gave, and nothing to learn from.
//!
//! **Everything is bounded.** Each call blocks for at most the time of its command and some seconds; output
//! and trees are cut or refused at a size that the caller names. Calls may come from any thread.
//!
//! **Nothing on the host follows a name from inside.** A [`FileTree`] is data in memory, checked entry by
//! entry; it is written to the host only by [`FileTree::write_to`], into a new folder and without links.
//!
//! [`escalation`] decides which tier a task needs. The cheap tier is the WebAssembly sandbox.

pub(crate) mod background;
pub mod bwrap;
mod capability;
mod command;
mod cpu;
mod error;
pub mod escalation;
mod guest;
pub mod image;
mod janitor;
#[cfg(feature = "k8s")]
pub mod kubernetes;
mod pool;
mod removal;
mod run_folder;
pub mod runsc;
pub mod sandboxd;
pub(crate) mod script;
mod spec;
#[cfg(feature = "k8s")]
pub mod substrate;
pub(crate) mod transfer;
mod tree;

use std::path::Path;
use std::sync::Arc;

pub use crate::process::Captured;
pub use capability::{Capabilities, Isolation};
pub use command::{ActorCommand, ActorOutput, Ending, User};
pub use error::ActorError;
pub use pool::WarmPool;
pub(crate) use removal::Scratch;
pub use spec::{ActorLimits, ActorSpec, RootFs};
#[cfg(any(fuzzing, test))]
pub use tree::fuzz_archive;
pub use tree::{Entry, FileTree, TreeLimits};

/// A way to run actors, shared by threads as `Arc<dyn ActorBackend>`.
pub trait ActorBackend: std::fmt::Debug + Send + Sync {
    /// Returns the name that run files and messages use.
    fn name(&self) -> &'static str;

    /// Returns what its actors can do and how well they are kept apart.
    fn capabilities(&self) -> Capabilities;

    /// Starts an actor.
    ///
    /// # Errors
    ///
    /// Fails where the spec asks for what the backend cannot give, and where the actor cannot be started.
    fn create(&self, spec: &ActorSpec) -> Result<Box<dyn Actor>, ActorError>;

    /// Ends every actor at once, also those that a command runs in, as far as the backend can: a run that is to
    /// end does not wait for what its guests do. Commands then end as [`Ending::Killed`].
    fn shut_down(&self) {}
}

/// One running machine. Dropping it destroys it; [`Self::destroy`] says what went wrong with that.
pub trait Actor: std::fmt::Debug + Send + Sync {
    /// Returns the name that logs use.
    fn id(&self) -> &str;

    /// Returns what it was started from.
    fn spec(&self) -> &ActorSpec;

    /// Runs a command to its end, or until its time is over. Commands of one actor run one after another,
    /// whoever asks. When one runs over its time, every process of the actor is killed.
    ///
    /// # Errors
    ///
    /// Fails only where the backend is at fault; however the program ends is in the output.
    fn exec(&self, command: &ActorCommand) -> Result<ActorOutput, ActorError>;

    /// Writes a tree below `folder`, which is made where it is missing. Files belong to the actor's user;
    /// what is there already is replaced.
    ///
    /// # Errors
    ///
    /// Fails where the actor does not take it: it has ended, is full, or something is in the way.
    fn put(&self, folder: &Path, tree: &FileTree) -> Result<(), ActorError>;

    /// Reads the folder, or the one file, at `path`. A file is a tree of one entry, by its own name.
    ///
    /// # Errors
    ///
    /// Fails where nothing is there, where it is larger than `limits`, and where the actor has ended.
    fn get(&self, path: &Path, limits: TreeLimits) -> Result<FileTree, ActorError>;

    /// Keeps the actor as it is now; it goes on afterwards.
    ///
    /// # Errors
    ///
    /// Fails where the backend cannot, see [`Capabilities::snapshot`].
    fn snapshot(&self) -> Result<Arc<dyn ActorSnapshot>, ActorError>;

    /// Lets what runs in it come before what runs in others where the CPUs are short, or no longer: what is judged is
    /// not to be late by what others do. Not all backends can; its share is no larger by that.
    fn come_first(&self, _is_first: bool) {}

    /// Starts another actor like this one as it is now.
    ///
    /// # Errors
    ///
    /// As for [`Self::snapshot`].
    fn fork(&self) -> Result<Box<dyn Actor>, ActorError> {
        self.snapshot()?.restore()
    }

    /// Returns the end of what the backend logged about it, for people.
    fn logs(&self) -> String;

    /// Ends it and everything that runs in it. What is slow about it goes on in the background and is
    /// awaited when the backend is dropped.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be ended.
    fn destroy(self: Box<Self>) -> Result<(), ActorError>;
}

/// An actor that was kept: any number of actors start from it, also side by side. Dropped, it is deleted.
pub trait ActorSnapshot: std::fmt::Debug + Send + Sync {
    /// Starts an actor from it.
    ///
    /// # Errors
    ///
    /// Fails where the actor cannot be started.
    fn restore(&self) -> Result<Box<dyn Actor>, ActorError>;
}
