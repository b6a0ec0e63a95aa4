//! What a worker process is asked and answers, and how that crosses a socket.
//!
//! A frame is, little-endian: length of the head (u32), number of blobs (u32), length of each blob
//! (u64); then the head, in JSON, and the blobs. Text and numbers go into the head; what must
//! arrive byte by byte, or is large, into blobs.

use std::io::{self, Read, Write};
use std::num::NonZeroU32;
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::causes::with_causes;
use crate::sandbox::saved::MAX_IN_TRANSIT;
use crate::sandbox::{
    CacheFolder, DialogueOutcome, ExecOutcome, ExecRequest, Exit, Limits, Meter, Restore,
    SandboxError, Usage,
};
#[cfg(test)]
use crate::sandbox::{Round, Served};

/// A head holds a program, or what is said about one.
const MAX_HEAD: u64 = 128 << 20;
/// A blob holds output, or a session's memory.
const MAX_BLOB: u64 = MAX_IN_TRANSIT;
/// `Dialogue` has three, an outcome two.
const MAX_BLOBS: u32 = 4;

/// A message with its blobs.
#[derive(Debug)]
pub(in crate::sandbox) struct Frame<T> {
    pub(super) head: T,
    pub(super) blobs: Vec<Vec<u8>>,
}

impl<T: Serialize> Frame<T> {
    pub(super) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let head = serde_json::to_vec(&self.head)?;
        // Before anything is sent: the other side would take it for nonsense and hang up.
        let length = u32::try_from(head.len())
            .ok()
            .filter(|&length| u64::from(length) <= MAX_HEAD)
            .ok_or_else(|| too_large("a message's head"))?;
        if self.blobs.iter().any(|blob| blob.len() as u64 > MAX_BLOB) {
            return Err(too_large("a blob"));
        }
        let count = u32::try_from(self.blobs.len()).map_err(io::Error::other)?;
        let mut bytes = Vec::with_capacity(head.len() + 64);
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&count.to_le_bytes());
        for blob in &self.blobs {
            bytes.extend_from_slice(&(blob.len() as u64).to_le_bytes());
        }
        bytes.extend_from_slice(&head);
        for blob in &self.blobs {
            bytes.extend_from_slice(blob);
        }
        to.write_all(&bytes)
    }
}

impl<T: DeserializeOwned> Frame<T> {
    /// Reads a frame. Memory is taken as bytes arrive, not as lengths claim.
    pub(super) fn read(from: &mut impl Read) -> io::Result<Self> {
        let length = u64::from(u32::from_le_bytes(array(from)?));
        let count = u32::from_le_bytes(array(from)?);
        if length > MAX_HEAD || count > MAX_BLOBS {
            return Err(invalid("a frame is too large"));
        }
        let lengths = (0..count)
            .map(|_| array(from).map(u64::from_le_bytes))
            .collect::<io::Result<Vec<_>>>()?;
        if lengths.iter().any(|&length| length > MAX_BLOB) {
            return Err(invalid("a blob is too large"));
        }
        Ok(Self {
            head: serde_json::from_slice(&exactly(from, length)?)?,
            blobs: lengths
                .into_iter()
                .map(|length| exactly(from, length))
                .collect::<io::Result<_>>()?,
        })
    }
}

fn array<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn exactly(from: &mut impl Read, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == length {
        Ok(bytes)
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

fn too_large(what: &str) -> io::Error {
    let message = format!("{what} is larger than a worker reads");
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

fn invalid(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

/// The first message to a worker: which runtime to load. Blobs: the guest's input, and its module
/// unless it is the embedded one.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    /// Whether it is the science runtime, which is in the cache.
    #[serde(default)]
    pub(super) is_science: bool,
    pub(super) cache: Option<PathBuf>,
    pub(super) max_instances: u32,
    pub(super) restore: Restore,
    pub(super) audit_every: Option<NonZeroU32>,
    pub(super) meter: Meter,
}

impl Hello {
    pub(super) fn cache_folder(&self) -> CacheFolder {
        match &self.cache {
            Some(path) => CacheFolder::At(path.clone()),
            None => CacheFolder::Disabled,
        }
    }
}

/// A question to a worker. Sessions have numbers that the asking process chooses.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Call {
    /// Blobs: the program and its standard input, which the request lacks.
    Exec {
        number: u64,
        request: ExecRequest,
        limits: Limits,
    },
    /// Blobs: the callee's message, what to proceed on, the caller's message.
    Converse {
        callee: Limits,
        round: Limits,
        max_rounds: u32,
        caller: Limits,
    },
    Open {
        session: u64,
        limits: Limits,
    },
    /// Blobs: as for `Exec`.
    Step {
        number: u64,
        session: u64,
        request: ExecRequest,
    },
    Fork {
        session: u64,
        children: Vec<u64>,
    },
    Snapshot {
        session: u64,
    },
    /// Blob: the snapshot.
    Resume {
        session: u64,
        limits: Limits,
    },
    Close {
        session: u64,
    },
    /// Ends the program of this number, which may be over or not begun.
    Cancel {
        number: u64,
    },
}

/// A worker's answer.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Done,
    /// Blobs: standard output and standard error.
    Outcome {
        exit: Exit,
        /// Whether the session ended with it.
        is_last: bool,
        stdout_truncated: bool,
        stderr_truncated: bool,
        usage: Usage,
    },
    Dialogue(Box<DialogueOutcome>),
    /// Blob: the snapshot.
    Snapshot,
    Fault(Fault),
}

impl Answer {
    pub(super) fn outcome(outcome: ExecOutcome, is_last: bool) -> Frame<Self> {
        Frame {
            head: Self::Outcome {
                exit: outcome.exit,
                is_last,
                stdout_truncated: outcome.stdout_truncated,
                stderr_truncated: outcome.stderr_truncated,
                usage: outcome.usage,
            },
            blobs: vec![outcome.stdout, outcome.stderr],
        }
    }
}

/// A [`SandboxError`] of a worker: those that a caller may act on, and the text of all others.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Fault {
    MemoryLimitTooSmall { limit: u64, minimum: u64 },
    PoolExhausted { limit: u32 },
    RequestTooLarge { size: usize, limit: usize },
    SessionEnded { exit: Exit },
    OtherGuest { found: String, expected: String },
    Other { message: String },
}

impl From<SandboxError> for Fault {
    fn from(error: SandboxError) -> Self {
        match error {
            SandboxError::MemoryLimitTooSmall { limit, minimum } => {
                Self::MemoryLimitTooSmall { limit, minimum }
            }
            SandboxError::PoolExhausted { limit } => Self::PoolExhausted { limit },
            SandboxError::RequestTooLarge { size, limit } => Self::RequestTooLarge { size, limit },
            SandboxError::SessionEnded { exit } => Self::SessionEnded { exit },
            SandboxError::OtherGuest { found, expected } => Self::OtherGuest { found, expected },
            error => Self::Other {
                message: with_causes(&error),
            },
        }
    }
}

impl From<Fault> for SandboxError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::MemoryLimitTooSmall { limit, minimum } => {
                Self::MemoryLimitTooSmall { limit, minimum }
            }
            Fault::PoolExhausted { limit } => Self::PoolExhausted { limit },
            Fault::RequestTooLarge { size, limit } => Self::RequestTooLarge { size, limit },
            Fault::SessionEnded { exit } => Self::SessionEnded { exit },
            Fault::OtherGuest { found, expected } => Self::OtherGuest { found, expected },
            Fault::Other { message } => Self::Worker { message },
        }
    }
}

#[cfg(any(fuzzing, test))]
impl Frame<()> {
    /// Reads bytes as each kind of message, and as the head of one. Returns whether they are one.
    ///
    /// # Panics
    ///
    /// Panics if a message is written or read as another one.
    pub(in crate::sandbox) fn read_any(bytes: &[u8]) -> bool {
        let length = u32::try_from(bytes.len()).expect("a short message");
        let as_head = [&length.to_le_bytes(), &[0; 4], bytes].concat();
        [bytes, &as_head].into_iter().fold(false, |is_read, bytes| {
            is_read
                | Frame::<Hello>::is_sound(bytes)
                | Frame::<Call>::is_sound(bytes)
                | Frame::<Answer>::is_sound(bytes)
        })
    }
}

#[cfg(any(fuzzing, test))]
impl<T: Serialize + DeserializeOwned + std::fmt::Debug> Frame<T> {
    fn is_sound(bytes: &[u8]) -> bool {
        let Ok(frame) = Self::read(&mut &bytes[..]) else {
            return false;
        };
        let mut written = Vec::new();
        frame.write(&mut written).expect("it fits");
        let again = Self::read(&mut &written[..]).expect("we wrote it");
        assert_eq!(format!("{frame:?}"), format!("{again:?}"));
        true
    }
}

#[cfg(test)]
impl Frame<()> {
    /// A message of each shape, or its head alone.
    pub(in crate::sandbox) fn examples() -> Vec<(&'static str, Vec<u8>)> {
        use std::time::Duration;

        fn head(head: &impl Serialize) -> Vec<u8> {
            serde_json::to_vec(head).expect("it has a form in JSON")
        }
        let limits = Limits::default();
        let usage = Usage {
            fuel: 7,
            memory_bytes: 1 << 20,
            wall: Duration::from_micros(250),
        };
        let exit = Exit::DeadlineExceeded {
            limit: Duration::from_secs(1),
            elapsed: Duration::from_millis(1250),
        };
        let mut exec = Vec::new();
        let framed = Frame {
            head: Call::Exec {
                number: 1,
                request: ExecRequest {
                    argv: vec!["a".to_owned()],
                    seed: Some(3),
                    start_time: Some(4),
                    ..ExecRequest::new("print(1)")
                },
                limits: limits.clone(),
            },
            blobs: vec![vec![1, 2], Vec::new()],
        };
        framed.write(&mut exec).expect("a vector takes all");
        vec![
            ("exec", exec),
            (
                "hello",
                head(&Hello {
                    is_science: false,
                    cache: Some("/tmp".into()),
                    max_instances: 4,
                    restore: Restore::InPlace,
                    audit_every: NonZeroU32::new(1),
                    meter: Meter::Loops,
                }),
            ),
            (
                "converse",
                head(&Call::Converse {
                    callee: limits.clone(),
                    round: limits.clone(),
                    max_rounds: 3,
                    caller: limits,
                }),
            ),
            (
                "fork",
                head(&Call::Fork {
                    session: 1,
                    children: vec![2, 3],
                }),
            ),
            (
                "outcome",
                head(&Answer::Outcome {
                    exit: exit.clone(),
                    is_last: true,
                    stdout_truncated: false,
                    stderr_truncated: true,
                    usage,
                }),
            ),
            (
                "dialogue",
                head(&Answer::Dialogue(Box::new(DialogueOutcome {
                    callee: Served::Reply(vec![b'N']),
                    callee_usage: usage,
                    rounds: vec![Round {
                        usage,
                        ended: Some(Exit::Exited { code: 3 }),
                        note: vec![1, 2],
                    }],
                    caller: Some((Served::Ended(exit), usage)),
                }))),
            ),
            (
                "fault",
                head(&Answer::Fault(Fault::PoolExhausted { limit: 1 })),
            ),
        ]
    }
}
