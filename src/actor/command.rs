//! What is run in an actor, and how it ended.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::Captured;

/// Who a process is, in numbers of the actor's own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct User {
    /// The user; 0 is root, of the actor alone.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// A program to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActorCommand {
    /// The program, looked up in `PATH` where its name has no slash, and its arguments.
    pub argv: Vec<String>,
    /// Variables, besides and before those of the actor.
    pub env: BTreeMap<String, String>,
    /// Where it starts; the actor's own folder unless given.
    pub cwd: Option<PathBuf>,
    /// What it can read; then its input ends.
    pub stdin: Vec<u8>,
    /// Who it is; the actor's own user unless given.
    pub user: Option<User>,
    /// How long it may take.
    pub timeout: Duration,
    /// The most of each stream that is kept, in bytes: the first half and the last.
    pub max_output: usize,
}

impl ActorCommand {
    /// How long a command may take unless said otherwise.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
    /// What is kept of a stream unless said otherwise.
    pub const DEFAULT_MAX_OUTPUT: usize = 64 << 10;

    /// Returns a command with empty input and the defaults above.
    pub fn new(argv: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            argv: argv.into_iter().map(Into::into).collect(),
            env: BTreeMap::new(),
            cwd: None,
            stdin: Vec::new(),
            user: None,
            timeout: Self::DEFAULT_TIMEOUT,
            max_output: Self::DEFAULT_MAX_OUTPUT,
        }
    }

    /// Returns a script for `/bin/sh`.
    pub fn shell(script: impl Into<String>) -> Self {
        Self::new(["/bin/sh".to_owned(), "-c".to_owned(), script.into()])
    }
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ending {
    /// It ended by itself; a signal is 128 and its number, as in a shell. 126 and 127 are programs that
    /// could not be started and were not found.
    Exited {
        /// The code.
        code: i32,
    },
    /// Its time was over, or the actor's.
    TimedOut {
        /// What it had.
        limit: Duration,
    },
    /// The actor held more than it may and its processes were ended; where they can outlive a command it
    /// takes no further one.
    OutOfMemory {
        /// The most that it may hold, in bytes.
        limit: u64,
        /// What it held when it was ended, in bytes.
        used: u64,
    },
    /// The actor's processes ended otherwise while the command ran, or before; where they can outlive a
    /// command it takes no further one.
    Killed {
        /// What is known about why.
        reason: String,
    },
}

/// What a command left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActorOutput {
    /// How it ended.
    pub ending: Ending,
    /// What it printed.
    pub stdout: Captured,
    /// What it complained about.
    pub stderr: Captured,
    /// How long it took.
    pub elapsed: Duration,
}

impl ActorOutput {
    /// Returns the exit code, if it ended by itself.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        match self.ending {
            Ending::Exited { code } => Some(code),
            _ => None,
        }
    }

    /// Whether it ended by itself with 0.
    #[must_use]
    pub fn is_success(&self) -> bool {
        self.code() == Some(0)
    }

    /// Returns an output of which nothing is known but how it ended.
    pub(crate) fn of(ending: Ending) -> Self {
        Self {
            ending,
            stdout: Captured::default(),
            stderr: Captured::default(),
            elapsed: Duration::ZERO,
        }
    }
}
