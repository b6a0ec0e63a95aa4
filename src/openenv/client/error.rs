//! What can fail between here and an environment elsewhere.

use std::io;
use std::time::Duration;

use tokio_tungstenite::tungstenite;
use tokio_tungstenite::tungstenite::error::ProtocolError;

use crate::http::tls::TlsError;

/// An environment elsewhere that cannot be used, or a session of it that failed. Never what a policy did.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The address cannot be used.
    #[error("`env.url` is `{url}`, {reason}")]
    Url {
        /// What was given.
        url: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A header cannot be sent.
    #[error("`env.headers` has `{name}`, {reason}")]
    Header {
        /// Its name.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Certificates cannot be used.
    #[error("the files of `env.tls` cannot be used")]
    Tls {
        /// What is wrong with them.
        #[from]
        source: TlsError,
    },
    /// The threads for connections cannot be started.
    #[error("the threads for the environment's connections could not be started")]
    Threads {
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// What the server says of itself could not be had.
    #[error("the environment at `{url}` did not answer `{asked}`")]
    Described {
        /// Its address.
        url: String,
        /// What was asked for.
        asked: &'static str,
        /// Why not.
        #[source]
        source: Fault,
    },
    /// The server's actions are none that a policy here can take.
    #[error("the environment at `{url}` cannot be acted on: {reason}")]
    Unsuitable {
        /// Its address.
        url: String,
        /// Why not, and what helps.
        reason: String,
    },
    /// A session failed.
    #[error("the environment at `{url}`, session {slot}, did not answer `{asked}`")]
    Session {
        /// Its address.
        url: String,
        /// The rollout's slot, from 0.
        slot: usize,
        /// The frame that was to be answered.
        asked: &'static str,
        /// Why it was not.
        #[source]
        source: Fault,
    },
    /// An episode has nothing to begin with.
    #[error(
        "the environment at `{url}` opens with nothing to say; give `task.path` with a `prompt` in each \
         row"
    )]
    NoOpening {
        /// Its address.
        url: String,
    },
}

impl ClientError {
    /// Returns whether what was asked for is wrong, rather than that a server is away, or failed: that may be over when it
    /// is tried again.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Url { .. }
            | Self::Header { .. }
            | Self::Tls { .. }
            | Self::Unsuitable { .. }
            | Self::NoOpening { .. } => true,
            Self::Described { source, .. } => source.is_lasting(),
            Self::Threads { .. } | Self::Session { .. } => false,
        }
    }
}

/// What went wrong on the way, or at the server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// There is no connection.
    #[error("it cannot be reached")]
    Unreachable {
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// There is no trust: one side has refused the other's certificate, or speaks no TLS.
    #[error("no secure connection is to be had (`env.tls`)")]
    Untrusted {
        /// Why not.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// There is no connection in time.
    #[error("it could not be reached within {limit:?} (`env.connect_timeout`)")]
    ConnectTimeout {
        /// The longest that it may take.
        limit: Duration,
    },
    /// There is no connection after several tries.
    #[error("it was tried for {waited:?} (`env.retry_timeout`)")]
    GaveUp {
        /// How long.
        waited: Duration,
        /// What came of the last try.
        #[source]
        source: Box<Self>,
    },
    /// The server, or a router in front of it, answered with another status.
    #[error("it answered with status {status}, not {expected}: {reason}")]
    Status {
        /// What it answered.
        status: u16,
        /// What was expected.
        expected: u16,
        /// The beginning of what it said.
        reason: String,
        /// The pause that it asked for.
        retry_after: Option<Duration>,
        /// Whether a router says that nothing was delivered.
        is_stale: bool,
    },
    /// All sessions of the server are taken.
    #[error(
        "it has no room for another session: {message}; raise its `max_concurrent_envs` (`--max-sessions` of \
         `wardian serve`), or let fewer episodes run at a time (`rollout.groups_per_step`; `--concurrency` \
         with `--endpoint`)"
    )]
    NoRoom {
        /// What it said.
        message: String,
    },
    /// There was no answer in time.
    #[error("there was no answer within {limit:?}; raise `{key}` if it may take longer")]
    Late {
        /// The longest that it may take.
        limit: Duration,
        /// The key that says so.
        key: &'static str,
    },
    /// The server's clock ended the step, which says nothing about the policy.
    #[error("its deadline ended the step, and the session's state was lost; raise its `--timeout`")]
    Deadline,
    /// The peer says nothing, not even to pings.
    #[error("it has said nothing for {waited:?}, not even to pings")]
    Silent {
        /// How long.
        waited: Duration,
    },
    /// The server ended the session.
    #[error("it closed the connection{}", describe_close(*code, reason))]
    Closed {
        /// The code, where it gave one.
        code: Option<u16>,
        /// What it said.
        reason: String,
    },
    /// The connection broke.
    #[error("the connection broke: {reason}")]
    Broken {
        /// How.
        reason: String,
    },
    /// A message is larger than is read.
    #[error("its answer is larger than {limit} bytes; raise `env.max_message_size` if it may be")]
    TooLarge {
        /// The limit.
        limit: usize,
    },
    /// An answer is no JSON.
    #[error("its answer is no JSON: {reason}")]
    NotJson {
        /// Why not.
        reason: String,
    },
    /// An answer is another than was asked for.
    #[error("expected {expected}, found {found}")]
    Unexpected {
        /// What was expected.
        expected: &'static str,
        /// What was found.
        found: String,
    },
    /// A reward is none that can be learned from.
    #[error("it gave a `reward` of {found}, which is no number from -3.4e38 to 3.4e38")]
    Reward {
        /// What the server gave.
        found: String,
    },
    /// Rewards are too large together.
    #[error(
        "with a `reward` of {last:?} its rewards add up to {sum:?}, which is no number from -3.4e38 to 3.4e38 \
         (`env.reward = \"sum\"`)"
    )]
    RewardSum {
        /// The last of them.
        last: f64,
        /// What they add up to.
        sum: f64,
    },
    /// The server answered with an error.
    #[error("it says {code}: {message}")]
    Said {
        /// The code.
        code: String,
        /// The message.
        message: String,
    },
    /// A tool could not be reached by the server.
    #[error("its tool `{tool}` failed by no fault of its arguments: {message}")]
    Tool {
        /// The tool.
        tool: String,
        /// What the server said.
        message: String,
    },
    /// The client was shut down.
    #[error("the client has ended")]
    Ended,
}

impl Fault {
    /// Returns whether it stays so until somebody changes what was asked for: there is no trust, the request is refused, or
    /// the server is none of the protocol's.
    fn is_lasting(&self) -> bool {
        match self {
            Self::Untrusted { .. }
            | Self::TooLarge { .. }
            | Self::NotJson { .. }
            | Self::Unexpected { .. } => true,
            Self::Status { status, .. } => {
                (400..500).contains(status)
                    && ![408, 421, 429].contains(status)
                    && !self.may_be_tried_again()
            }
            Self::GaveUp { source, .. } => source.is_lasting(),
            _ => false,
        }
    }

    /// Returns whether the same may be asked for again on another connection: nothing of it has reached
    /// the environment, or nothing has come of it.
    pub(super) fn may_be_tried_again(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::ConnectTimeout { .. } | Self::NoRoom { .. } => true,
            // A router that has no actor for it yet (503, 504), or no longer (421 with its mark). Without
            // the mark 421 is the environment's own.
            Self::Status {
                status, is_stale, ..
            } => *is_stale || [429, 503, 504].contains(status),
            _ => false,
        }
    }

    /// Returns the pause that the server asked for.
    pub(super) fn asked_pause(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Returns whether the connection is gone, rather than that something was said on it.
    pub(super) fn is_of_connection(&self) -> bool {
        matches!(
            self,
            Self::Closed { .. } | Self::Broken { .. } | Self::Silent { .. }
        )
    }

    /// Returns whether the session goes on behind it: its server refused one frame.
    pub(super) fn leaves_session(&self) -> bool {
        let ends = ["SESSION_ERROR", "CAPACITY_REACHED", "FACTORY_ERROR"];
        matches!(self, Self::Said { code, .. } if !ends.contains(&code.as_str()))
    }

    /// Returns what a connection failed with before anything was answered.
    pub(super) fn of_io(error: io::Error) -> Self {
        // So tokio-rustls passes on what one side has against the other's certificate, which it will have
        // against it again.
        if error.kind() == io::ErrorKind::InvalidData {
            return Self::Untrusted {
                source: Box::new(error),
            };
        }
        Self::Unreachable { source: error }
    }

    /// Returns what a handshake of TLS failed with.
    pub(super) fn of_tls(error: TlsError) -> Self {
        match error {
            TlsError::Handshake { source, .. } if source.kind() != io::ErrorKind::InvalidData => {
                Self::Unreachable { source }
            }
            TlsError::Late { limit, .. } => Self::ConnectTimeout { limit },
            error => Self::Untrusted {
                source: Box::new(error),
            },
        }
    }

    /// Returns what a WebSocket failed with.
    pub(super) fn of_socket(error: tungstenite::Error, limit: usize) -> Self {
        match error {
            tungstenite::Error::Capacity(_) => Self::TooLarge { limit },
            tungstenite::Error::ConnectionClosed
            | tungstenite::Error::AlreadyClosed
            | tungstenite::Error::Protocol(ProtocolError::ResetWithoutClosingHandshake) => {
                Self::closed_without_words()
            }
            error => Self::Broken {
                reason: error.to_string(),
            },
        }
    }

    /// Returns that the connection ended, without a frame that says why.
    pub(super) fn closed_without_words() -> Self {
        Self::Closed {
            code: None,
            reason: String::new(),
        }
    }
}

fn describe_close(code: Option<u16>, reason: &str) -> String {
    match (code, reason) {
        (None, _) => " without a word".to_owned(),
        (Some(code), "") => format!(" with code {code}"),
        (Some(code), reason) => format!(" with code {code}: {reason}"),
    }
}
