//! Where each episode of a stored step begins, and what a list shows of it.
//!
//! A file of hundreds of megabytes is read once, a row at a time; then pages of the list come from memory
//! and an episode is read by its place. A file that was replaced is another one, and read anew.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::config::RunConfig;
use crate::run::{Sample, advantages};

/// The longest row that is read, as of the store.
pub(super) const MAX_ROW: u64 = 64 << 20;
/// Most rows of a file that are listed.
const MAX_ROWS: usize = 50_000;
/// Most rows of all files that are remembered.
const MAX_REMEMBERED: usize = 4 * MAX_ROWS;
/// The most characters of a text in the list.
const MAX_TEXT: usize = 200;

/// What a list shows of an episode. What an older run lacks is none.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Head {
    pub(super) task_id: String,
    pub(super) group: u64,
    pub(super) sample: u32,
    pub(super) policy_step: u64,
    pub(super) reward: Option<f64>,
    pub(super) passed: Option<bool>,
    pub(super) status: Ending,
    turns: Vec<TurnHead>,
    #[serde(skip_serializing)]
    trace: TraceHead,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Ending {
    pub(super) kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize, Serialize)]
#[serde(default)]
struct TurnHead {
    tool_calls: u32,
    tool_failures: u32,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct TraceHead {
    loss_mask: Vec<u8>,
}

/// A row of the list.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Entry {
    /// Which row of the file it is, from 0.
    pub(super) row: usize,
    #[serde(skip)]
    offset: u64,
    #[serde(skip)]
    length: u64,
    #[serde(flatten)]
    pub(super) head: Head,
    tokens: usize,
    sampled: usize,
    pub(super) advantage: Option<f64>,
}

/// The rows of a file.
#[derive(Debug)]
pub(super) struct Index {
    pub(super) entries: Vec<Entry>,
    /// Rows that are no episodes.
    pub(super) broken: usize,
    /// Whether the file has more than was read: its end was cut off, or it has too many rows.
    pub(super) is_incomplete: bool,
    /// Why no advantages are shown.
    pub(super) no_advantages: Option<&'static str>,
}

impl Index {
    fn read(file: &mut File, config: Option<&RunConfig>) -> io::Result<Self> {
        let mut reader = BufReader::with_capacity(1 << 20, file);
        let (mut entries, mut broken, mut offset) = (Vec::new(), 0, 0);
        let is_incomplete = loop {
            let mut line = Vec::new();
            let mut bounded = reader.by_ref().take(MAX_ROW + 1);
            let length = bounded.read_until(b'\n', &mut line)? as u64;
            if length == 0 {
                break false;
            }
            let is_whole = line.ends_with(b"\n");
            if length > MAX_ROW || entries.len() == MAX_ROWS {
                break true;
            }
            match serde_json::from_slice::<Head>(&line) {
                Ok(head) => entries.push(entry(entries.len() + broken, offset, length, head)),
                // The end of a file that was cut off.
                Err(_) if !is_whole => break true,
                Err(_) if line.trim_ascii().is_empty() => {}
                Err(_) => broken += 1,
            }
            offset += length;
        };
        let mut index = Self {
            entries,
            broken,
            is_incomplete,
            no_advantages: None,
        };
        index.compare(config);
        Ok(index)
    }

    /// Gives each row its advantage, if that can be told.
    fn compare(&mut self, config: Option<&RunConfig>) {
        let rows: Vec<Sample> = (self.entries.iter())
            .map(|entry| Sample {
                group: entry.head.group,
                sample: entry.head.sample,
                reward: entry.head.reward,
                sampled_tokens: entry.sampled,
                is_truncated: ["truncated", "turn_limit"].contains(&&*entry.head.status.kind),
            })
            .collect();
        let found = match config {
            _ if self.is_incomplete || self.broken > 0 => Err("the file is not whole"),
            None => Err("this version does not know all settings of the run"),
            Some(config) => advantages(config, &rows),
        };
        match found {
            Err(reason) => self.no_advantages = Some(reason),
            Ok(values) => {
                for (entry, value) in self.entries.iter_mut().zip(values) {
                    entry.advantage = value;
                }
            }
        }
    }

    /// Returns the entry of a row of the file.
    pub(super) fn entry(&self, row: usize) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.row == row)
    }
}

impl Entry {
    /// Reads the row itself.
    pub(super) fn read(&self, file: &mut File) -> io::Result<Vec<u8>> {
        file.seek(SeekFrom::Start(self.offset))?;
        let mut line = Vec::new();
        file.take(self.length).read_to_end(&mut line)?;
        Ok(line)
    }
}

fn entry(row: usize, offset: u64, length: u64, mut head: Head) -> Entry {
    let cut = |text: &mut String| *text = text.chars().take(MAX_TEXT).collect();
    cut(&mut head.task_id);
    cut(&mut head.status.kind);
    head.status.reason.iter_mut().for_each(cut);
    let mask = std::mem::take(&mut head.trace.loss_mask);
    Entry {
        row,
        offset,
        length,
        tokens: mask.len(),
        sampled: mask.iter().filter(|mask| **mask == 1).count(),
        head,
        advantage: None,
    }
}

/// Which bytes an index is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    device: u64,
    file: u64,
    length: u64,
    modified: (i64, i64),
}

/// The indexes that were asked for last.
#[derive(Debug, Default)]
pub(super) struct Indexes {
    known: Mutex<VecDeque<(Version, Arc<Index>)>>,
}

impl Indexes {
    /// Returns the index of a file, which is read if it is not known.
    pub(super) fn of(
        &self,
        file: &mut File,
        config: impl FnOnce() -> Option<RunConfig>,
    ) -> io::Result<Arc<Index>> {
        let about = file.metadata()?;
        let version = Version {
            device: about.dev(),
            file: about.ino(),
            length: about.len(),
            modified: (about.mtime(), about.mtime_nsec()),
        };
        let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, index)) = lock().iter().find(|(known, _)| *known == version) {
            return Ok(Arc::clone(index));
        }
        let index = Arc::new(Index::read(file, config().as_ref())?);
        let mut known = lock();
        known.push_back((version, Arc::clone(&index)));
        let rows = |known: &VecDeque<(Version, Arc<Index>)>| -> usize {
            known.iter().map(|(_, index)| index.entries.len()).sum()
        };
        while known.len() > 1 && (rows(&known) > MAX_REMEMBERED || known.len() > 64) {
            known.pop_front();
        }
        Ok(index)
    }
}
