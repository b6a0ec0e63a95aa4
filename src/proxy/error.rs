//! What a client of the proxy is told went wrong.

use std::time::Duration;

use axum::http::StatusCode;

use super::session::SESSION_BYTES;
use crate::http::may_pass;
use crate::openai::ApiError;

/// Why a call was not answered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyError {
    /// The request cannot be served as it is, or our engine failed.
    #[error(transparent)]
    Request(#[from] ApiError),
    /// The key or the path names no session.
    #[error(
        "no session has this key; open one with `POST /sessions` and send its id as the API key or as \
         the first part of the path"
    )]
    UnknownSession,
    /// The control routes ask for a key.
    #[error("this route needs the proxy's admin key, as `Authorization: Bearer KEY`")]
    NotAdmin,
    /// The session is complete.
    #[error("the session `{session}` is complete and takes no calls")]
    Complete {
        /// Its id.
        session: String,
    },
    /// The session was reset while the call was under way, or before it came.
    #[error(
        "the call is of attempt {attempt} of the session `{session}`, which is now at {current}"
    )]
    Outdated {
        /// The session's id.
        session: String,
        /// The attempt that the call is of.
        attempt: u32,
        /// The attempt that counts.
        current: u32,
    },
    /// The id is taken.
    #[error("the session `{session}` exists already")]
    Exists {
        /// The id.
        session: String,
    },
    /// There are as many sessions as are kept, or a session or all of them hold as much as they may.
    #[error("{what} {limit}; complete and delete sessions, or raise `{option}`")]
    Full {
        /// What is full.
        what: &'static str,
        /// How much fits.
        limit: u64,
        /// What raises it.
        option: &'static str,
    },
    /// The upstream refused the request, in its own words.
    #[error("the upstream refused the request with status {status}: {message}")]
    Refused {
        /// Its status.
        status: u16,
        /// What it said.
        message: String,
        /// The name that it has for the error, if it has one, such as `context_length_exceeded`.
        code: Option<String>,
        /// How long it asks to wait before the next request.
        retry_after: Option<Duration>,
    },
    /// The upstream answered with a status that is nobody's business but ours and its own.
    #[error("the upstream failed: it answered with status {status}")]
    Unavailable {
        /// Its status.
        status: u16,
        /// How long it asks to wait before the next request.
        retry_after: Option<Duration>,
    },
    /// The upstream failed, or said what cannot be read.
    #[error("the upstream failed: {message}")]
    Upstream {
        /// What happened.
        message: String,
    },
    /// The upstream has said nothing for too long.
    #[error("the upstream said nothing for {waited:?}")]
    Stalled {
        /// How long it was waited for.
        waited: Duration,
    },
    /// What was captured cannot be written down.
    #[error("the call could not be recorded: {message}")]
    Recording {
        /// What happened.
        message: String,
    },
}

impl ProxyError {
    pub(super) fn upstream(message: impl Into<String>) -> Self {
        Self::Upstream {
            message: message.into(),
        }
    }

    /// Returns the error of a field whose value cannot be.
    pub(super) fn invalid(param: &'static str, message: impl Into<String>) -> Self {
        Self::Request(ApiError::invalid(param, message))
    }

    /// Returns whether an upstream may answer the same request later. What it understood and refused,
    /// it refuses again.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Refused { status, .. } | Self::Unavailable { status, .. } => {
                StatusCode::from_u16(*status).is_ok_and(may_pass)
            }
            Self::Upstream { .. } | Self::Stalled { .. } => true,
            _ => false,
        }
    }

    /// Returns how long an upstream asks to wait before the next request, where it says so.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } | Self::Unavailable { retry_after, .. } => {
                *retry_after
            }
            _ => None,
        }
    }

    /// Returns whether it is an error of the upstream's.
    pub(super) fn is_upstreams(&self) -> bool {
        matches!(
            self,
            Self::Upstream { .. }
                | Self::Unavailable { .. }
                | Self::Refused { .. }
                | Self::Stalled { .. }
        )
    }

    /// Returns whether a call failed by no doing of the agent's: the same call may be answered at another
    /// time.
    pub(super) fn is_fault(&self) -> bool {
        // Its own calls fill a session.
        let is_own = matches!(self, Self::Full { option, .. } if *option == SESSION_BYTES);
        let status = self.status();
        !is_own && (status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS)
    }

    /// Returns the status of the response.
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Request(error) => error.status(),
            Self::UnknownSession | Self::NotAdmin => StatusCode::UNAUTHORIZED,
            Self::Complete { .. } | Self::Outdated { .. } => StatusCode::GONE,
            Self::Exists { .. } => StatusCode::CONFLICT,
            Self::Full { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::Refused { status, .. } => {
                StatusCode::from_u16(*status).unwrap_or(StatusCode::BAD_GATEWAY)
            }
            Self::Upstream { .. } | Self::Unavailable { .. } => StatusCode::BAD_GATEWAY,
            Self::Stalled { .. } => StatusCode::GATEWAY_TIMEOUT,
            Self::Recording { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}
