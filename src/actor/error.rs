//! Faults of the heavy tier itself, never of the guest's programs.

use std::path::PathBuf;
use std::time::Duration;

/// Why an actor could not be started, asked or kept: a fault of ours, or of what the caller gave.
///
/// How a program *ends* is never an error; see [`Ending`](super::Ending).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ActorError {
    // === Before anything runs ===
    /// The backend's program is not installed.
    #[error("there is no `{program}` in `PATH`; install it: `{remedy}`")]
    NotInstalled {
        /// The program.
        program: &'static str,
        /// The command that installs it.
        remedy: &'static str,
    },
    /// The backend cannot work as this user.
    #[error("the backend `{backend}` {reason}")]
    Unusable {
        /// The backend.
        backend: &'static str,
        /// Why, and what helps.
        reason: String,
    },
    /// The spec or the command makes no sense.
    #[error("the actor cannot be as asked: {reason}")]
    InvalidSpec {
        /// What is wrong.
        reason: String,
    },
    /// The backend lacks an ability.
    #[error("the backend `{backend}` cannot {ability}")]
    Unsupported {
        /// The backend.
        backend: &'static str,
        /// What it was asked for.
        ability: &'static str,
    },
    /// No backend that is there gives what a task needs.
    #[error("no sandbox for this task: {reason}; {remedy}")]
    NoTier {
        /// What it needs, and what is missing.
        reason: String,
        /// What can be done about it.
        remedy: String,
    },

    // === While it runs ===
    /// A program of the backend could not be run.
    #[error("running `{program}`")]
    Run {
        /// The program.
        program: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A call of the backend took too long and was ended.
    #[error("{activity} took longer than {} s", limit.as_secs())]
    Hung {
        /// What was being done.
        activity: String,
        /// What it had.
        limit: Duration,
    },
    /// A call of the backend failed.
    #[error("{activity} failed: {message}")]
    Backend {
        /// What was being done.
        activity: String,
        /// What the backend said.
        message: String,
    },
    /// The actor has ended, by what ran in it or by its limits.
    #[error("actor `{id}` has ended: {reason}")]
    Ended {
        /// The actor.
        id: String,
        /// Why.
        reason: String,
    },
    /// The actor was taken away by what runs it: a node that was lost, an eviction, somebody who deleted it.
    #[error("actor `{id}` was taken away: {reason}")]
    Lost {
        /// The actor.
        id: String,
        /// What is known about why.
        reason: String,
    },
    /// A file of ours could not be read or written.
    #[error("{activity}")]
    Files {
        /// What was being done.
        activity: &'static str,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },

    // === Trees ===
    /// Nothing is at the path, or the actor does not let it be read.
    #[error("`{}` cannot be read in the actor: {message}", path.display())]
    Unreadable {
        /// The path inside.
        path: PathBuf,
        /// What was said there.
        message: String,
    },
    /// The tree cannot be written in the actor.
    #[error("`{}` cannot be written in the actor: {message}", path.display())]
    Unwritable {
        /// The path inside.
        path: PathBuf,
        /// What was said there.
        message: String,
    },
    /// Moving a tree took too long, twice: by what is in the actor, or by what else this machine does.
    #[error("moving a tree at `{}` took longer than {} s, twice", path.display(), limit.as_secs())]
    TreeLate {
        /// The path inside.
        path: PathBuf,
        /// What it had each time.
        limit: Duration,
    },
    /// A tree is larger than it may be.
    #[error("the tree has more than {limit} {unit}")]
    TreeTooLarge {
        /// The most that it may have.
        limit: u64,
        /// Of what.
        unit: &'static str,
    },
    /// What a task keeps of an actor is larger together than it may be.
    #[error(
        "the artifacts of the task hold more than {limit} {unit} together; `actor.artifacts` is how many bytes they \
         may hold"
    )]
    TooManyArtifacts {
        /// The most that they may have.
        limit: u64,
        /// Of what.
        unit: &'static str,
    },
    /// A tree holds what it must not.
    #[error("the tree cannot be used: {reason}")]
    HostileTree {
        /// What it holds.
        reason: String,
    },
}

impl ActorError {
    /// What a backend of this machine says of [`RootFs::Image`](super::RootFs::Image).
    pub(super) fn image_on_this_machine(backend: &'static str) -> Self {
        Self::Unsupported {
            backend,
            ability: "start from an image; give a folder with its root filesystem",
        }
    }

    /// Whether what runs in the actor brought it about: it ended the actor, or left what cannot be taken.
    /// All others are ours.
    #[must_use]
    pub fn is_guests_doing(&self) -> bool {
        matches!(
            self,
            Self::Ended { .. }
                | Self::Unreadable { .. }
                | Self::Unwritable { .. }
                | Self::TreeLate { .. }
                | Self::TreeTooLarge { .. }
                | Self::TooManyArtifacts { .. }
                | Self::HostileTree { .. }
        )
    }

    /// Whether a busy machine may have brought it about as well as what runs in the actor.
    #[must_use]
    pub fn is_late(&self) -> bool {
        matches!(self, Self::TreeLate { .. })
    }
}
