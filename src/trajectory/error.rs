//! Why a trace was refused, or a rollout file could not be written or read.

use std::path::PathBuf;

/// A token trace that breaks its invariants.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// There is not one log-probability and one mask entry for each id.
    #[error("trace has {ids} ids, {logprobs} log-probabilities and {mask} mask entries")]
    Lengths {
        /// How many ids there are.
        ids: usize,
        /// How many log-probabilities there are.
        logprobs: usize,
        /// How many mask entries there are.
        mask: usize,
    },
    /// A sampled token's log-probability is not one.
    #[error(
        "token {position} has log-probability {value}, which is not a finite number of at most 0"
    )]
    NotALogprob {
        /// The token's position in the trace.
        position: usize,
        /// The value.
        value: f32,
    },
    /// A token that was not sampled has a log-probability.
    #[error("token {position} was not sampled but has log-probability {value} instead of 0")]
    LogprobWithoutSample {
        /// The token's position in the trace.
        position: usize,
        /// The value.
        value: f32,
    },
    /// The mask has something else than 0 and 1.
    #[error("token {position} has mask {value} instead of 0 or 1")]
    Mask {
        /// The token's position in the trace.
        position: usize,
        /// The value.
        value: u8,
    },
    /// A prompt was added, or counted, past the first other token.
    #[error(
        "the prompt ends at {prompt_len} but reaches token {position}, which is not part of it"
    )]
    Prompt {
        /// The prompt's length.
        prompt_len: usize,
        /// The first offending position.
        position: usize,
    },
}

/// A failure to keep or read trajectories.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The file system refused.
    #[error("{activity} rollout file `{path}`")]
    Io {
        /// What was being done, as in "writing".
        activity: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        source: std::io::Error,
    },
    /// A trajectory could not be written as JSON.
    #[error("writing task `{task_id}` sample {sample} to rollout file `{path}`")]
    Encode {
        /// The file.
        path: PathBuf,
        /// The trajectory's task.
        task_id: String,
        /// The trajectory's sample.
        sample: u32,
        /// What could not be written.
        #[source]
        source: serde_json::Error,
    },
    /// A row is cut short or is no trajectory.
    #[error("`{path}` row {row} is not a trajectory; delete the file if the run was cut off in it")]
    Row {
        /// The file.
        path: PathBuf,
        /// The row, counted from 1.
        row: u64,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// A row is longer than any trajectory.
    #[error("`{path}` row {row} is too long: {found} bytes > {limit}; is it a rollout file?")]
    RowTooLong {
        /// The file.
        path: PathBuf,
        /// The row, counted from 1.
        row: u64,
        /// How many bytes had been read.
        found: u64,
        /// How many are read at most.
        limit: u64,
    },
}
