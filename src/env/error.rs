//! Faults of the environment itself.

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
}
