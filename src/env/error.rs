//! Faults of the environment itself.

use crate::sandbox::Exit;

/// A fault of ours while an episode ran; the episode leaves the statistics.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnvError {
    /// The sandbox could not run a program.
    #[error("the sandbox failed while running task `{task}`")]
    Sandbox {
        /// The task's id.
        task: String,
        /// What failed.
        #[source]
        source: crate::sandbox::SandboxError,
    },
    /// A program met the wall-clock deadline before its fuel was used: that depends on the
    /// machine's load, so it says nothing about the program.
    #[error(
        "a program of task `{task}` {exit}, before its fuel was used: the machine is too busy, or \
         `sandbox.deadline` too short for `sandbox.fuel`"
    )]
    Deadline {
        /// The task's id.
        task: String,
        /// How the program ended.
        exit: Exit,
    },
    /// An actor failed.
    #[error("the actor of task `{task}` failed")]
    Actor {
        /// The task's id.
        task: String,
        /// What failed.
        #[source]
        source: crate::actor::ActorError,
    },
    /// An environment elsewhere failed, or the way there.
    #[error(transparent)]
    Remote {
        /// What failed, and where.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
