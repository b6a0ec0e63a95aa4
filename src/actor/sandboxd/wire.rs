//! What the server and its client say to each other.
//!
//! A message with bytes in it is a line of JSON, which says how many bytes there are of what, and then the
//! bytes.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::http::HeaderName;
use serde::{Deserialize, Serialize};

use crate::actor::{ActorOutput, Captured, Ending};

/// The version of all this.
pub(super) const PROTOCOL: u32 = 1;

/// Names the claim that a request is under.
pub(super) const CLAIM: HeaderName = HeaderName::from_static("x-sandboxd-claim");
/// The number of a request under its claim.
pub(super) const TURN: HeaderName = HeaderName::from_static("x-sandboxd-turn");
/// In each answer of a server, so that those of what lies before it can be told.
pub(super) const SERVER: HeaderName = HeaderName::from_static("x-sandboxd");

/// The longest line of JSON.
pub(super) const MAX_LINE: usize = 4 << 20;
/// The longest that a server waits before it says that something still runs: a proxy may end what takes
/// longer.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(10);

/// Asks for a claim.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Claim {
    pub(super) claim: String,
}

/// Grants it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Claimed {
    pub(super) protocol: u32,
    pub(super) version: String,
}

/// A command; its input follows.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Exec {
    pub(super) argv: Vec<String>,
    /// All of its variables.
    pub(super) env: BTreeMap<String, String>,
    pub(super) cwd: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) timeout_ms: u64,
    /// The most that is kept of each stream.
    pub(super) max_output: usize,
    /// The length of the input.
    pub(super) stdin: usize,
}

/// How a command ended; what was kept of its streams follows: of each the beginning, then the end.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Ended {
    pub(super) end: End,
    pub(super) stdout: Lengths,
    pub(super) stderr: Lengths,
    pub(super) elapsed_ms: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "how", rename_all = "snake_case")]
pub(super) enum End {
    Exited { code: i32 },
    TimedOut,
    Killed { reason: String },
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Lengths {
    pub(super) head: usize,
    pub(super) dropped: u64,
    pub(super) tail: usize,
}

impl Lengths {
    fn of(captured: &Captured) -> Self {
        Self {
            head: captured.head.len(),
            dropped: captured.dropped,
            tail: captured.tail.len(),
        }
    }
}

/// Why something was refused.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Refusal {
    pub(super) error: Reason,
    pub(super) message: String,
    /// The limit that was met, if one was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) limit: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reason {
    /// The token is missing or another.
    Token,
    /// The request makes no sense.
    Invalid,
    /// The server cannot do that, as it is run.
    Unsupported,
    /// Another claim holds, or none, or the number is not the next.
    Lost,
    /// The number was taken: the request was here before.
    Taken,
    /// Something still runs.
    Busy,
    /// Processes are left that cannot be ended; nothing is run any more.
    Broken,
    /// It cannot be read.
    Unreadable,
    /// It cannot be written.
    Unwritable,
    /// It has more bytes than it may.
    TooManyBytes,
    /// It has more entries than it may.
    TooManyEntries,
    /// The tree holds what it must not.
    Hostile,
}

/// Appends `bytes` to the line of `message`.
///
/// # Errors
///
/// Fails where the message is no JSON.
pub(super) fn framed(
    message: &impl Serialize,
    bytes: &[&[u8]],
) -> Result<Vec<u8>, serde_json::Error> {
    let mut frame = serde_json::to_vec(message)?;
    frame.push(b'\n');
    for part in bytes {
        frame.extend_from_slice(part);
    }
    Ok(frame)
}

/// Returns the message of a frame and the bytes after its line; none where it is no frame.
pub(super) fn unframed<'a, T: Deserialize<'a>>(frame: &'a [u8]) -> Option<(T, &'a [u8])> {
    let end = frame
        .iter()
        .take(MAX_LINE)
        .position(|byte| *byte == b'\n')?;
    let message = serde_json::from_slice(frame.get(..end)?).ok()?;
    Some((message, frame.get(end + 1..)?))
}

/// Returns the frame that says how a command ended.
///
/// # Errors
///
/// As for [`framed`].
pub(super) fn output_frame(output: &ActorOutput) -> Result<Vec<u8>, serde_json::Error> {
    let end = match &output.ending {
        Ending::Exited { code } => End::Exited { code: *code },
        Ending::TimedOut { .. } => End::TimedOut,
        Ending::Killed { reason } => End::Killed {
            reason: reason.clone(),
        },
        Ending::OutOfMemory { limit, used } => End::Killed {
            reason: format!("it held {used} bytes, of at most {limit}"),
        },
    };
    let ended = Ended {
        end,
        stdout: Lengths::of(&output.stdout),
        stderr: Lengths::of(&output.stderr),
        elapsed_ms: millis(output.elapsed),
    };
    let (stdout, stderr) = (&output.stdout, &output.stderr);
    framed(
        &ended,
        &[&stdout.head, &stdout.tail, &stderr.head, &stderr.tail],
    )
}

/// Reads the frame that says how a command ended, of which at most `max_output` of each stream was asked for;
/// none where it says otherwise.
pub(super) fn read_output(frame: &[u8], limit: Duration, max_output: usize) -> Option<ActorOutput> {
    let (ended, mut rest) = unframed::<Ended>(frame)?;
    let mut take = |lengths: Lengths| {
        if lengths.head.checked_add(lengths.tail)? > max_output {
            return None;
        }
        let (head, after) = rest.split_at_checked(lengths.head)?;
        let (tail, after) = after.split_at_checked(lengths.tail)?;
        rest = after;
        Some(Captured {
            head: head.to_vec(),
            dropped: lengths.dropped,
            tail: tail.to_vec(),
        })
    };
    let stdout = take(ended.stdout)?;
    let stderr = take(ended.stderr)?;
    let ending = match ended.end {
        End::Exited { code } => Ending::Exited { code },
        End::TimedOut => Ending::TimedOut { limit },
        End::Killed { reason } => Ending::Killed { reason },
    };
    rest.is_empty().then_some(ActorOutput {
        ending,
        stdout,
        stderr,
        elapsed: Duration::from_millis(ended.elapsed_ms),
    })
}

/// Returns a time in whole milliseconds.
pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output() -> ActorOutput {
        ActorOutput {
            ending: Ending::Exited { code: 3 },
            stdout: Captured {
                head: b"a\nb".to_vec(),
                dropped: 7,
                tail: vec![0, 255],
            },
            stderr: Captured::default(),
            elapsed: Duration::from_millis(5),
        }
    }

    #[test]
    fn an_output_comes_back_as_it_was() {
        let frame = output_frame(&output()).unwrap();
        let back = read_output(&frame, Duration::from_secs(1), 5).unwrap();
        assert_eq!(back, output());
    }

    #[test]
    fn an_output_that_lies_about_its_length_is_none() {
        let frame = output_frame(&output()).unwrap();
        let limit = Duration::from_secs(1);
        assert!(read_output(&frame, limit, 4).is_none(), "more than asked");
        assert!(read_output(&frame[..frame.len() - 1], limit, 5).is_none());
        assert!(read_output(&[&frame[..], b"x"].concat(), limit, 5).is_none());
        let lie = String::from_utf8_lossy(&frame)
            .replace("\"head\":3", &format!("\"head\":{}", usize::MAX));
        assert!(read_output(lie.as_bytes(), limit, usize::MAX).is_none());
        assert!(read_output(b"{}", limit, 5).is_none());
    }
}
