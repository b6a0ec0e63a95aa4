//! Why a report could not be made.

use std::path::PathBuf;

use crate::run::RunError;
use crate::trajectory::StoreError;

/// A run folder that cannot be reported on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// The folder holds no run.
    #[error("`{path}` holds no run: it has no `run.toml`; give the folder that `--out` named")]
    NoRun {
        /// The folder.
        path: PathBuf,
    },
    /// A file of the folder cannot be read.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A line of `metrics.jsonl` is none of ours.
    #[error("line {line} of `{path}` is no JSON object")]
    Metrics {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// `summary.json` is none of ours.
    #[error("`{path}` is no summary of a run")]
    Summary {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// The stored episodes cannot be read.
    #[error(transparent)]
    Episodes(#[from] StoreError),
    /// The page cannot be filled in.
    #[error("the page cannot be filled in")]
    Template(#[source] minijinja::Error),
    /// The page cannot be written.
    #[error(transparent)]
    Write(RunError),
}
