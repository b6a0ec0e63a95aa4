//! What a turn ran, beside what the policy was told of it.

use serde::{Deserialize, Serialize};

/// The most bytes of a stream that are kept: the first half and the last.
const MAX_STREAM: usize = 16 << 10;

/// A program or a command that a turn ran. It is for who looks at the episode: what the policy saw is in the messages,
/// and nothing is learned from this. It holds nothing that another machine would measure otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolRun {
    /// Which of the message's calls ran it, from 0; none where an answer in text was tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<u32>,
    /// How it ended.
    pub ending: RunEnding,
    /// What it printed. Where a command's streams are one, all of it is here.
    #[serde(default, skip_serializing_if = "KeptText::is_empty")]
    pub stdout: KeptText,
    /// What it complained about.
    #[serde(default, skip_serializing_if = "KeptText::is_empty")]
    pub stderr: KeptText,
    /// Fuel that it burnt; none where that is not counted, as in an actor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuel: Option<u64>,
}

impl ToolRun {
    /// Returns how many bytes of text it holds.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.stdout.len() + self.stderr.len()
    }

    /// Drops what it printed; how much that was is still told.
    pub fn drop_text(&mut self) {
        for kept in [&mut self.stdout, &mut self.stderr] {
            *kept = KeptText {
                left_out: kept.left_out + kept.len() as u64,
                ..KeptText::default()
            };
        }
    }
}

/// How a program or a command ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum RunEnding {
    /// By itself.
    Exited {
        /// The exit code.
        code: i64,
    },
    /// Its fuel was used up.
    OutOfFuel,
    /// Its time was over.
    TimedOut,
    /// It wanted more memory than it may have.
    OutOfMemory,
    /// It was ended from outside.
    Killed {
        /// What is known about why.
        reason: String,
    },
    /// The interpreter crashed inside of its sandbox.
    Trapped {
        /// The trap.
        reason: String,
    },
}

/// A stream, of which the middle may be left out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptText {
    /// Its beginning, or all of it.
    pub head: String,
    /// How many bytes are left out behind that.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub left_out: u64,
    /// Its end; empty where nothing is left out.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tail: String,
}

impl KeptText {
    /// Keeps what there is room for of a stream.
    #[must_use]
    pub fn of(stream: &[u8]) -> Self {
        if stream.len() > MAX_STREAM {
            let (head, tail) = stream.split_at(MAX_STREAM / 2);
            return Self::of_ends(head, 0, tail);
        }
        Self {
            head: String::from_utf8_lossy(stream).into_owned(),
            ..Self::default()
        }
    }

    /// Keeps what there is room for of a stream's beginning and its end, between which `left_out` bytes are
    /// missing.
    #[must_use]
    pub fn of_ends(head: &[u8], left_out: u64, tail: &[u8]) -> Self {
        let half = MAX_STREAM / 2;
        let kept_head = &head[..head.len().min(half)];
        let kept_tail = &tail[tail.len().saturating_sub(half)..];
        let dropped = head.len() - kept_head.len() + tail.len() - kept_tail.len();
        Self {
            head: String::from_utf8_lossy(kept_head).into_owned(),
            left_out: left_out + dropped as u64,
            tail: String::from_utf8_lossy(kept_tail).into_owned(),
        }
    }

    fn len(&self) -> usize {
        self.head.len() + self.tail.len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0 && self.left_out == 0
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "how serde calls it")]
fn is_nothing(bytes: &u64) -> bool {
    *bytes == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_stream_keeps_its_ends_and_says_what_is_missing() {
        let short = KeptText::of("é".as_bytes());
        assert_eq!((&*short.head, short.left_out), ("é", 0));
        let long = ["a".repeat(MAX_STREAM), "b".repeat(MAX_STREAM)].concat();
        let kept = KeptText::of(long.as_bytes());
        assert_eq!(kept.head, "a".repeat(MAX_STREAM / 2));
        assert_eq!(kept.tail, "b".repeat(MAX_STREAM / 2));
        assert_eq!(kept.left_out, MAX_STREAM as u64);
        let kept = KeptText::of_ends(b"ab", 5, b"yz");
        assert_eq!((&*kept.head, kept.left_out, &*kept.tail), ("ab", 5, "yz"));
    }

    #[test]
    fn what_is_not_there_takes_no_room_and_rows_of_before_are_read() {
        let run = ToolRun {
            call: None,
            ending: RunEnding::Exited { code: 0 },
            stdout: KeptText::default(),
            stderr: KeptText::default(),
            fuel: None,
        };
        let text = serde_json::to_string(&run).unwrap();
        assert_eq!(text, r#"{"ending":{"kind":"exited","code":0}}"#);
        assert_eq!(serde_json::from_str::<ToolRun>(&text).unwrap(), run);
    }

    #[test]
    fn dropped_text_is_still_counted() {
        let mut run = ToolRun {
            call: Some(0),
            ending: RunEnding::OutOfFuel,
            stdout: KeptText::of_ends(b"a", 2, b"bc"),
            stderr: KeptText::default(),
            fuel: Some(7),
        };
        assert_eq!(run.kept(), 3);
        run.drop_text();
        assert_eq!((run.kept(), run.stdout.left_out), (0, 5));
    }
}
