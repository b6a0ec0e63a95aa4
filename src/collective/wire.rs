//! Frames between two ranks.
//!
//! A frame is a kind, the number and name of what the sender does, and a payload; lengths are checked
//! before anything is read, and memory grows only with what has come.

use std::io::{self, Read, Write};

/// Most bytes of one message: the episodes of a rank's share of a step are the largest.
pub(super) const MAX_MESSAGE: u64 = 1 << 30;
/// Most bytes of the name of an activity, and of a reason to end.
const MAX_TEXT: u64 = 4096;
/// Bytes read at a time.
const READ_BYTES: u64 = 1 << 20;

const DATA: u8 = 1;
const ALIVE: u8 = 2;
const STOP: u8 = 3;
const ABORT: u8 = 4;
const BYE: u8 = 5;

/// What one rank tells another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame {
    /// A rank's part of what all do.
    Data {
        sequence: u64,
        activity: String,
        payload: Vec<u8>,
    },
    /// The sender lives.
    Alive,
    /// The sender was asked to stop.
    Stop,
    /// The sender, or the rank it names, cannot go on.
    Abort { rank: usize, reason: String },
    /// The sender is done.
    Bye,
}

/// Why a frame did not come.
#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it sent a message of {found} bytes, more than {limit}")]
    TooLong { found: u64, limit: u64 },
    #[error("it sent what is no frame")]
    Unknown,
}

/// Writes one frame and flushes it.
pub(super) fn write_frame(stream: &mut impl Write, frame: &Frame) -> io::Result<()> {
    let (kind, number, text, payload): (u8, u64, &str, &[u8]) = match frame {
        Frame::Data {
            sequence,
            activity,
            payload,
        } => (DATA, *sequence, activity, payload),
        Frame::Alive => (ALIVE, 0, "", &[]),
        Frame::Stop => (STOP, 0, "", &[]),
        Frame::Abort { rank, reason } => (ABORT, *rank as u64, cut(reason), &[]),
        Frame::Bye => (BYE, 0, "", &[]),
    };
    let mut head = Vec::with_capacity(25 + text.len());
    head.push(kind);
    for length in [number, text.len() as u64, payload.len() as u64] {
        head.extend(length.to_le_bytes());
    }
    head.extend(text.as_bytes());
    stream.write_all(&head)?;
    stream.write_all(payload)?;
    stream.flush()
}

/// Reads one frame.
pub(super) fn read_frame(stream: &mut impl Read) -> Result<Frame, FrameError> {
    let mut head = [0; 25];
    stream.read_exact(&mut head)?;
    let (numbers, _) = head[1..].as_chunks::<8>();
    let [number, text, payload] = [0, 1, 2].map(|index| u64::from_le_bytes(numbers[index]));
    let text = String::from_utf8(read_bytes(stream, text, MAX_TEXT)?);
    let text = text.map_err(|_| FrameError::Unknown)?;
    let payload = read_bytes(stream, payload, MAX_MESSAGE)?;
    let is_bare = payload.is_empty();
    Ok(match head[0] {
        DATA => Frame::Data {
            sequence: number,
            activity: text,
            payload,
        },
        ALIVE if is_bare => Frame::Alive,
        STOP if is_bare => Frame::Stop,
        ABORT if is_bare => Frame::Abort {
            rank: usize::try_from(number).map_err(|_| FrameError::Unknown)?,
            reason: text,
        },
        BYE if is_bare => Frame::Bye,
        _ => return Err(FrameError::Unknown),
    })
}

/// Reads `length` bytes, of which there may be `limit`.
pub(super) fn read_bytes(
    stream: &mut impl Read,
    length: u64,
    limit: u64,
) -> Result<Vec<u8>, FrameError> {
    if length > limit {
        let found = length;
        return Err(FrameError::TooLong { found, limit });
    }
    let mut bytes = Vec::new();
    let mut left = length;
    while left > 0 {
        let now = left.min(READ_BYTES);
        let start = bytes.len();
        // Far below any `usize`: `READ_BYTES` at the most.
        bytes.resize(start + usize::try_from(now).unwrap_or(0), 0);
        stream.read_exact(&mut bytes[start..])?;
        left -= now;
    }
    Ok(bytes)
}

/// Returns the beginning of a text, as much as a frame takes.
fn cut(text: &str) -> &str {
    let limit = usize::try_from(MAX_TEXT).unwrap_or(usize::MAX);
    &text[..text.floor_char_boundary(limit)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_as_they_were_written() {
        let frames = [
            Frame::Data {
                sequence: 7,
                activity: "gather".to_owned(),
                payload: vec![9; 3_000_000],
            },
            Frame::Alive,
            Frame::Stop,
            Frame::Abort {
                rank: 3,
                reason: "ü".repeat(100),
            },
            Frame::Bye,
        ];
        let mut bytes = Vec::new();
        for frame in &frames {
            write_frame(&mut bytes, frame).unwrap();
        }
        let mut rest = bytes.as_slice();
        for frame in frames {
            assert_eq!(read_frame(&mut rest).unwrap(), frame);
        }
        assert!(rest.is_empty());
        // A long reason is cut between letters.
        let reason = "ü".repeat(5000);
        bytes.clear();
        write_frame(&mut bytes, &Frame::Abort { rank: 0, reason }).unwrap();
        let frame = read_frame(&mut bytes.as_slice()).unwrap();
        assert!(matches!(frame, Frame::Abort { reason, .. } if reason.len() == 4096));
    }

    #[test]
    fn what_claims_too_much_is_refused_before_it_is_read() {
        let head = |kind: u8, text: u64, payload: u64| {
            let mut bytes = vec![kind];
            for number in [0, text, payload] {
                bytes.extend(number.to_le_bytes());
            }
            bytes
        };
        for (bytes, expected) in [
            (head(DATA, 4097, 0), "4097 bytes, more than 4096"),
            (head(DATA, 0, u64::MAX), "more than 1073741824"),
            (head(9, 0, 0), "no frame"),
        ] {
            let error = read_frame(&mut bytes.as_slice()).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
        // One that claims what it does not send takes no memory for it.
        let error = read_frame(&mut head(DATA, 0, 1 << 29).as_slice()).unwrap_err();
        assert!(matches!(error, FrameError::Io(_)), "{error}");
    }
}
