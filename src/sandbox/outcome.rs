//! What is run, and how it ended.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};

/// One program to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExecRequest {
    /// Python source, run as `__main__`.
    pub code: String,
    /// What the program reads from standard input.
    pub stdin: String,
    /// `sys.argv` after the program's name, which is `main.py`.
    pub argv: Vec<String>,
    /// Seed of `random` and of the host's random bytes.
    ///
    /// A fresh interpreter without one uses 0, so that a program always does the same; a session
    /// without one carries its random state on.
    pub seed: Option<u64>,
    /// Where the wall clock stands when the program starts, in seconds since 1970, up to the year
    /// 2554.
    ///
    /// A fresh interpreter without one starts with the year 2026; in a session without one the
    /// clock runs on.
    pub start_time: Option<u64>,
}

impl ExecRequest {
    /// Makes a request for a program, and nothing else.
    #[must_use]
    pub fn new(code: impl Into<String>) -> Self {
        Self {
            code: code.into(),
            ..Self::default()
        }
    }
}

/// How a program ended and what it left.
///
/// All of it is the program's to choose, exit code and output included. It is a reply to show,
/// not a verdict; verdicts come from [`grader`](crate::grader).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExecOutcome {
    /// How it ended.
    pub exit: Exit,
    /// Standard output, up to the limit. Serialised as text, invalid UTF-8 replaced.
    #[serde(serialize_with = "lossy")]
    pub stdout: Vec<u8>,
    /// Standard error, up to the limit. Serialised as text, invalid UTF-8 replaced.
    #[serde(serialize_with = "lossy")]
    pub stderr: Vec<u8>,
    /// Whether standard output went past its limit.
    pub stdout_truncated: bool,
    /// Whether standard error went past its limit.
    pub stderr_truncated: bool,
    /// What it cost.
    pub usage: Usage,
}

impl ExecOutcome {
    /// The outcome of a program that did not begin.
    pub(super) fn never_run(exit: Exit) -> Self {
        Self {
            exit,
            stdout: Vec::new(),
            stderr: Vec::new(),
            stdout_truncated: false,
            stderr_truncated: false,
            usage: Usage::default(),
        }
    }

    /// Returns standard output as text, invalid UTF-8 replaced.
    #[must_use]
    pub fn stdout_text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Returns standard error as text, invalid UTF-8 replaced.
    #[must_use]
    pub fn stderr_text(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }
}

/// The end of a guest program, as a value.
///
/// # Examples
///
/// ```
/// use wardian::sandbox::Exit;
///
/// let json = serde_json::to_string(&Exit::Exited { code: 0 }).unwrap();
/// assert_eq!(json, r#"{"kind":"exited","code":0}"#);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Exit {
    /// It ran to its end, raised, or exited by itself.
    Exited {
        /// 0 for success, 1 for an uncaught exception, or what it passed to `sys.exit`.
        code: u32,
    },
    /// It used up its fuel.
    OutOfFuel {
        /// The fuel it had.
        limit: u64,
    },
    /// It ran longer than it may.
    DeadlineExceeded {
        /// The time it had.
        #[serde(rename = "limit_seconds", with = "super::seconds")]
        limit: Duration,
        /// The time it took.
        #[serde(rename = "elapsed_seconds", with = "super::seconds")]
        elapsed: Duration,
    },
    /// It was ended from outside, by a [`Cancel`](super::Cancel).
    Cancelled,
    /// It failed for want of memory.
    OutOfMemory {
        /// The memory it could have, in bytes.
        limit: u64,
        /// The largest size it asked for beyond that, unless one allocation exceeded the address
        /// space.
        requested: Option<u64>,
    },
    /// The interpreter itself crashed, inside its sandbox.
    Trapped {
        /// wasmtime's name for the trap.
        reason: String,
    },
}

impl Exit {
    /// Returns whether the program ended by itself with code 0.
    #[must_use]
    pub fn is_success(&self) -> bool {
        matches!(self, Self::Exited { code: 0 })
    }

    /// Returns whether a limit ended it.
    #[must_use]
    pub fn is_limit(&self) -> bool {
        matches!(
            self,
            Self::OutOfFuel { .. } | Self::DeadlineExceeded { .. } | Self::OutOfMemory { .. }
        )
    }
}

/// Says what the program did, as the rest of a sentence about it.
impl fmt::Display for Exit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited { code } => write!(formatter, "exited with code {code}"),
            Self::Cancelled => formatter.write_str("was cancelled"),
            Self::OutOfFuel { limit } => {
                write!(formatter, "ran out of fuel: used {limit} of {limit}")
            }
            Self::DeadlineExceeded { limit, elapsed } => {
                write!(
                    formatter,
                    "ran past its deadline: {elapsed:.1?} > {limit:.1?}"
                )
            }
            Self::OutOfMemory {
                limit,
                requested: Some(requested),
            } => {
                write!(formatter, "ran out of memory: {requested} > {limit} bytes")
            }
            Self::OutOfMemory {
                limit,
                requested: None,
            } => {
                write!(formatter, "ran out of memory: its limit is {limit} bytes")
            }
            Self::Trapped { reason } => write!(formatter, "trapped: {reason}"),
        }
    }
}

/// What a guest used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Units of work, about one Wasm operator each; the same for the same program.
    pub fuel: u64,
    /// Linear memory at the end, which never shrinks, in bytes.
    pub memory_bytes: u64,
    /// Wall-clock time.
    #[serde(rename = "wall_us", with = "super::microseconds")]
    pub wall: Duration,
}

fn lossy<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&String::from_utf8_lossy(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_has_its_kind() {
        let ends = [
            (Exit::Exited { code: 3 }, "exited"),
            (Exit::OutOfFuel { limit: 1 }, "out_of_fuel"),
            (Exit::Cancelled, "cancelled"),
            (
                Exit::DeadlineExceeded {
                    limit: Duration::ZERO,
                    elapsed: Duration::ZERO,
                },
                "deadline_exceeded",
            ),
            (
                Exit::OutOfMemory {
                    limit: 1,
                    requested: None,
                },
                "out_of_memory",
            ),
            (
                Exit::Trapped {
                    reason: String::new(),
                },
                "trapped",
            ),
        ];
        for (exit, kind) in ends {
            let json = serde_json::to_value(&exit).unwrap();
            assert_eq!(json["kind"], kind);
            assert_eq!(serde_json::from_value::<Exit>(json).unwrap(), exit);
        }
    }

    #[test]
    fn output_is_serialised_as_text() {
        let outcome = ExecOutcome {
            exit: Exit::Exited { code: 0 },
            stdout: vec![b'a', 0xff],
            stderr: Vec::new(),
            stdout_truncated: false,
            stderr_truncated: false,
            usage: Usage {
                wall: Duration::from_millis(250),
                ..Usage::default()
            },
        };
        let json = serde_json::to_value(&outcome).unwrap();
        assert_eq!(json["stdout"], "a\u{fffd}");
        assert_eq!(json["usage"]["wall_us"], 250_000);
    }
}
