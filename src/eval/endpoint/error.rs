//! What can stop the evaluation of an endpoint.

use std::path::PathBuf;

use crate::http::tls::TlsError;
use crate::proxy::ProxyError;

/// An evaluation that could not begin or could not go on. Episodes that are done are kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// The endpoint cannot be asked as it is asked.
    #[error("the endpoint `{url}` does not take the requests: {remedy}")]
    Refused {
        /// The endpoint.
        url: String,
        /// What helps.
        remedy: &'static str,
        /// What it said.
        #[source]
        source: ProxyError,
    },
    /// The endpoint's models cannot be listed.
    #[error(
        "the endpoint `{url}` cannot be asked for its models: {reason}; check that it runs, and the address, \
         which ends in `/v1`"
    )]
    Unlisted {
        /// The endpoint.
        url: String,
        /// Why not.
        reason: String,
    },
    /// Nothing comes from the endpoint any more.
    #[error(
        "{failures} episodes in a row failed at the endpoint `{url}`: {reason}; once it is back, the same \
         command goes on if it keeps its results (`--out`)"
    )]
    Down {
        /// The endpoint.
        url: String,
        /// Episodes that failed one after the other.
        failures: usize,
        /// What was wrong with the last.
        reason: String,
    },
    /// No model is named, and the endpoint has none or several.
    #[error("the endpoint `{url}` has {found}; name one")]
    Models {
        /// The endpoint.
        url: String,
        /// What it has.
        found: String,
    },
    /// The file holds results of something else.
    #[error(
        "`{}` holds results with another `{key}` ({found}, now {expected}); choose another file, or ask as \
         before",
        path.display()
    )]
    OtherResults {
        /// The file.
        path: PathBuf,
        /// What differs.
        key: String,
        /// What the file says.
        found: String,
        /// What is asked for.
        expected: String,
    },
    /// Another evaluation writes into the file.
    #[error("`{}` is in use by another evaluation; wait for its end, or choose another file", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The file holds what is no result.
    #[error("`{}`, line {line}: {problem}; choose another file", path.display())]
    NoResults {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// It was asked to stop.
    #[error("Stopped with {done} of {total} episodes done; the same command goes on")]
    Stopped {
        /// Episodes that are done.
        done: usize,
        /// Episodes in all.
        total: usize,
    },
    /// The files for TLS cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The file ends in a part of a line that could not be cut off.
    #[error(
        "the results end in an episode that was not written to its end; the same command drops it"
    )]
    Torn,
    /// The results cannot be read or written.
    #[error("the results cannot be kept")]
    Io(#[from] std::io::Error),
}

impl EndpointError {
    /// Returns whether the reader can mend it by asking otherwise.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::Refused { .. }
                | Self::Unlisted { .. }
                | Self::Models { .. }
                | Self::OtherResults { .. }
                | Self::InUse { .. }
                | Self::NoResults { .. }
                | Self::Tls(_)
        )
    }
}
