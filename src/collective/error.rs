//! What can go wrong between processes.

use std::io;

/// A process that could not join the others, or could not go on with them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    // === Joining ===
    /// The environment does not say which process this is.
    #[error("`{variable}` {reason}")]
    Launch {
        /// The variable.
        variable: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The root cannot listen.
    #[error("rank 0 cannot listen at `{address}`; is `MASTER_PORT` taken?")]
    Listen {
        /// Where.
        address: String,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// The root does not answer.
    #[error("rank 0 did not answer at `{address}` within {seconds} s")]
    Unreachable {
        /// Where it should.
        address: String,
        /// How long it was asked.
        seconds: u64,
        /// The last answer.
        #[source]
        source: io::Error,
    },
    /// Not all ranks came.
    #[error("{missing} did not join within {seconds} s{}", refused_too(refused.as_deref()))]
    Missing {
        /// The ranks.
        missing: String,
        /// How long they were waited for.
        seconds: u64,
        /// Why the last connection was turned away, if one was.
        refused: Option<String>,
    },
    /// The other side does not know the secret.
    #[error("the other process has another `WARDIAN_CLUSTER_TOKEN`; give all the same")]
    Token,
    /// The processes do not fit together.
    #[error("the processes do not fit together: {reason}")]
    Mismatch {
        /// What differs.
        reason: String,
    },

    /// The root turned this process away.
    #[error("rank 0 turned this process away: {reason}")]
    Refused {
        /// Why.
        reason: String,
    },

    // === Working ===
    /// A rank ended or broke off.
    #[error("rank {rank} is lost while {activity}: {reason}")]
    Lost {
        /// The rank.
        rank: usize,
        /// What this rank waited for.
        activity: &'static str,
        /// How that shows.
        reason: String,
    },
    /// A rank lives and does not come.
    #[error("rank {rank} did not come to {activity} within {seconds} s, though it lives")]
    Late {
        /// The rank.
        rank: usize,
        /// What it was waited for to do.
        activity: &'static str,
        /// How long.
        seconds: u64,
    },
    /// A rank said that it cannot go on.
    #[error("rank {rank} ended the run: {reason}")]
    Aborted {
        /// The rank.
        rank: usize,
        /// Why.
        reason: String,
    },
    /// The ranks do different things.
    #[error("rank {rank} is at {found}, this one at {expected}: they lost step")]
    OutOfStep {
        /// The rank.
        rank: usize,
        /// What it does.
        found: String,
        /// What this one does.
        expected: String,
    },
    /// A message is larger than any should be.
    #[error("a message of rank {rank} has {found} bytes, more than {limit}")]
    TooLong {
        /// The rank.
        rank: usize,
        /// Its size.
        found: u64,
        /// The largest that is accepted.
        limit: u64,
    },
    /// A message does not read.
    #[error("rank {rank} sent {what} that do not read")]
    Malformed {
        /// The rank.
        rank: usize,
        /// What it should be.
        what: &'static str,
    },
    /// Parts of a sum are missing or do not fit.
    #[error("a sum over {total} parts has {found}")]
    Parts {
        /// Parts of it.
        total: usize,
        /// What is there.
        found: String,
    },

    // === Devices ===
    /// NCCL failed.
    #[error("NCCL failed while {activity}: {reason}")]
    Nccl {
        /// What it was to do.
        activity: &'static str,
        /// What it said.
        reason: String,
    },
}

impl CollectiveError {
    /// Returns whether the reader can mend it by launching the processes otherwise.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::Launch { .. }
                | Self::Listen { .. }
                | Self::Token
                | Self::Mismatch { .. }
                | Self::Refused { .. }
        )
    }
}

fn refused_too(refused: Option<&str>) -> String {
    refused.map_or_else(String::new, |reason| {
        format!("; a connection was turned away: {reason}")
    })
}
