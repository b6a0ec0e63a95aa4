//! Where each episode of a stored step begins, and what a list shows of it.
//!
//! A file of hundreds of megabytes is read once, a row at a time; then pages of the list come from memory
//! and an episode is read by its place. A file that was replaced is another one, and read anew. No row is
//! held whole but short ones, and one file is read at a time: a trainer's process measures its own memory.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek as _, SeekFrom};
use std::sync::{Arc, Mutex, PoisonError};

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::folder::Version;
use crate::config::RunConfig;
use crate::run::{Sample, advantages};

/// The longest row that is read, as of the store.
pub(super) const MAX_ROW: u64 = 64 << 20;
/// The longest row that is held to be parsed. Parsing what is still read is slower.
const MAX_HELD: u64 = 1 << 20;
/// Most rows of a file that are looked at.
const MAX_ROWS: usize = 20_000;
/// Most rows of all files that are remembered.
const MAX_REMEMBERED: usize = 2 * MAX_ROWS;
/// The most characters of a text in the list.
const MAX_TEXT: usize = 200;

/// What is read of a row. What an older run lacks is none.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Head {
    task_id: String,
    group: u64,
    sample: u32,
    policy_step: u64,
    reward: Option<f64>,
    passed: Option<bool>,
    status: Ending,
    turns: Turns,
    trace: TraceHead,
}

/// How an episode ended.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Ending {
    pub(super) kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// How many turns an episode has, and their calls.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Turns {
    turns: u64,
    tool_calls: u64,
    tool_failures: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TurnHead {
    tool_calls: u32,
    tool_failures: u32,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TraceHead {
    loss_mask: Mask,
}

/// How many tokens an episode has, and how many of them were sampled.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Mask {
    tokens: usize,
    sampled: usize,
}

impl<'de> Deserialize<'de> for Turns {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        count_in(deserializer, |turns: &mut Self, turn: TurnHead| {
            turns.turns += 1;
            turns.tool_calls += u64::from(turn.tool_calls);
            turns.tool_failures += u64::from(turn.tool_failures);
        })
    }
}

impl<'de> Deserialize<'de> for Mask {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        count_in(deserializer, |mask: &mut Self, mark: u8| {
            mask.tokens += 1;
            mask.sampled += usize::from(mark == 1);
        })
    }
}

/// Counts the entries of a list without keeping any: it may be as long as a row.
fn count_in<'de, D, T, E>(deserializer: D, count: fn(&mut T, E)) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default,
    E: Deserialize<'de>,
{
    struct Counting<T, E>(fn(&mut T, E));

    impl<'de, T: Default, E: Deserialize<'de>> Visitor<'de> for Counting<T, E> {
        type Value = T;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a list")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<T, A::Error> {
            let mut counted = T::default();
            while let Some(entry) = list.next_element()? {
                (self.0)(&mut counted, entry);
            }
            Ok(counted)
        }
    }

    deserializer.deserialize_seq(Counting(count))
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
    pub(super) task_id: String,
    pub(super) group: u64,
    sample: u32,
    policy_step: u64,
    pub(super) reward: Option<f64>,
    passed: Option<bool>,
    pub(super) status: Ending,
    #[serde(flatten)]
    turns: Turns,
    #[serde(flatten)]
    mask: Mask,
    pub(super) advantage: Option<f64>,
}

impl Entry {
    fn new(row: usize, offset: u64, length: u64, head: &Head) -> Self {
        let cut = |text: &str| text.chars().take(MAX_TEXT).collect::<String>();
        Self {
            row,
            offset,
            length,
            task_id: cut(&head.task_id),
            group: head.group,
            sample: head.sample,
            policy_step: head.policy_step,
            reward: head.reward,
            passed: head.passed,
            status: Ending {
                kind: cut(&head.status.kind),
                reason: head.status.reason.as_deref().map(cut),
            },
            turns: head.turns,
            mask: head.trace.loss_mask,
            advantage: None,
        }
    }

    /// Returns where in its file the row is: what is before it, and how long it is, in bytes.
    pub(super) fn place(&self) -> (u64, u64) {
        (self.offset, self.length)
    }

    /// Reads the row itself.
    pub(super) fn read(&self, file: &mut File) -> io::Result<Vec<u8>> {
        file.seek(SeekFrom::Start(self.offset))?;
        let mut line = Vec::new();
        file.take(self.length).read_to_end(&mut line)?;
        Ok(line)
    }
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
    fn read(file: &mut File, config: Result<&RunConfig, &'static str>) -> io::Result<Self> {
        file.rewind()?;
        let mut rows = Rows {
            reader: BufReader::with_capacity(256 << 10, file),
            line: Vec::new(),
        };
        let (mut entries, mut broken, mut offset) = (Vec::new(), 0, 0);
        let is_incomplete = loop {
            let Some(row) = rows.next()? else { break false };
            let at = entries.len() + broken;
            if row.is_too_long || at == MAX_ROWS {
                break true;
            }
            match row.head {
                Ok(Some(head)) => entries.push(Entry::new(at, offset, row.length, &head)),
                Ok(None) => {}
                // The end of a file that was cut off.
                Err(_) if !row.is_whole => break true,
                Err(_) => broken += 1,
            }
            offset += row.length;
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
    fn compare(&mut self, config: Result<&RunConfig, &'static str>) {
        let rows: Vec<Sample> = (self.entries.iter())
            .map(|entry| Sample {
                group: entry.group,
                sample: entry.sample,
                reward: entry.reward,
                sampled_tokens: entry.mask.sampled,
                is_truncated: ["truncated", "turn_limit"].contains(&&*entry.status.kind),
            })
            .collect();
        let found = match config {
            _ if self.is_incomplete || self.broken > 0 => Err("the file is not whole"),
            Err(reason) => Err(reason),
            Ok(config) => advantages(config, &rows),
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
        let at = (self.entries).binary_search_by_key(&row, |entry| entry.row);
        at.ok().map(|at| &self.entries[at])
    }
}

/// A file's rows, one at a time.
struct Rows<R> {
    reader: R,
    /// The row that was read last, or its beginning.
    line: Vec<u8>,
}

/// What a row says of itself.
struct Row {
    /// Its bytes, with its end.
    length: u64,
    /// Whether it has an end.
    is_whole: bool,
    is_too_long: bool,
    /// None of an empty one.
    head: Result<Option<Head>, serde_json::Error>,
}

impl<R: BufRead> Rows<R> {
    fn next(&mut self) -> io::Result<Option<Row>> {
        let (reader, line) = (&mut self.reader, &mut self.line);
        line.clear();
        let held = reader.take(MAX_HELD).read_until(b'\n', line)? as u64;
        let is_whole = line.ends_with(b"\n");
        if held == 0 {
            return Ok(None);
        }
        if is_whole || held < MAX_HELD {
            let is_empty = line.trim_ascii().is_empty();
            let head = (!is_empty).then(|| serde_json::from_slice(line));
            return Ok(Some(Row {
                length: held,
                is_whole,
                is_too_long: false,
                head: head.transpose(),
            }));
        }
        let mut rest = Rest {
            reader,
            left: MAX_ROW - held,
            is_over: false,
        };
        let head = serde_json::from_reader(line.chain(&mut rest));
        if let Err(error) = &head
            && let Some(kind) = error.io_error_kind()
        {
            return Err(kind.into());
        }
        // What is no JSON ends before the row does.
        io::copy(&mut rest, &mut io::sink())?;
        Ok(Some(Row {
            length: MAX_ROW - rest.left,
            is_whole: rest.is_over,
            is_too_long: rest.left == 0 && !rest.is_over,
            head: head.map(Some),
        }))
    }
}

/// What is left of a row, as far as it is read.
struct Rest<R> {
    reader: R,
    left: u64,
    /// Whether its end was met.
    is_over: bool,
}

impl<R: BufRead> Read for Rest<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.is_over {
            return Ok(0);
        }
        let there = self.reader.fill_buf()?;
        let left = usize::try_from(self.left).unwrap_or(usize::MAX);
        let there = &there[..there.len().min(out.len()).min(left)];
        let end = there.iter().position(|byte| *byte == b'\n');
        let count = end.map_or(there.len(), |end| end + 1);
        out[..count].copy_from_slice(&there[..count]);
        self.reader.consume(count);
        self.left -= count as u64;
        self.is_over = end.is_some();
        Ok(count)
    }
}

/// The indexes that were asked for last.
#[derive(Debug, Default)]
pub(super) struct Indexes {
    known: Mutex<VecDeque<(Version, Arc<Index>)>>,
    /// Held while a file is read: who asks for the same waits for it rather than read it, too.
    reading: Mutex<()>,
}

impl Indexes {
    /// Returns the index of a file, which is read if it is not known. `config` has the settings that its
    /// episodes were compared by, or why they cannot be told.
    pub(super) fn of(
        &self,
        file: &mut File,
        config: impl FnOnce() -> Result<RunConfig, &'static str>,
    ) -> io::Result<Arc<Index>> {
        let version = Version::of(file)?;
        let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let known = || {
            let known = lock();
            let found = known.iter().find(|(known, _)| *known == version);
            found.map(|(_, index)| Arc::clone(index))
        };
        if let Some(index) = known() {
            return Ok(index);
        }
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = known() {
            return Ok(index);
        }
        let config = config();
        let index = Index::read(file, config.as_ref().map_err(|reason| *reason))?;
        let index = Arc::new(index);
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

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn row(task: &str, padding: usize) -> String {
        let messages = "x".repeat(padding);
        format!(
            "{{\"messages\":\"{messages}\",\"task_id\":\"{task}\",\"turns\":[{{\"tool_calls\":2}},{{}}],\
             \"trace\":{{\"loss_mask\":[0,1,1]}}}}\n"
        )
    }

    fn read(text: &str) -> Index {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        Index::read(&mut file, Err("nobody asks")).unwrap()
    }

    #[test]
    fn long_rows_are_read_without_being_held_and_found_again() {
        let long = usize::try_from(MAX_HELD).unwrap() + 10;
        let rows = [
            row("a", 0),
            row("b", long),
            "\n".to_owned(),
            row("c", 3 * long),
            row("d", 0),
        ];
        let text = rows.concat();
        let mut rows = Rows {
            reader: text.as_bytes(),
            line: Vec::new(),
        };
        while rows.next().unwrap().is_some() {}
        assert!(rows.line.capacity() as u64 <= 2 * MAX_HELD);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let index = Index::read(&mut file, Err("nobody asks")).unwrap();
        let tasks: Vec<&str> = index.entries.iter().map(|entry| &*entry.task_id).collect();
        assert_eq!(tasks, ["a", "b", "c", "d"]);
        assert!(!index.is_incomplete && index.broken == 0);
        let found = index.entry(2).unwrap().read(&mut file).unwrap();
        assert_eq!(found, row("c", 3 * long).as_bytes());
        let entry = serde_json::to_value(&index.entries[1]).unwrap();
        let counted = ["turns", "tool_calls", "tokens", "sampled"].map(|key| entry[key].as_u64());
        assert_eq!(counted, [Some(2), Some(2), Some(3), Some(2)]);
    }

    #[test]
    fn broken_rows_count_against_the_most_that_are_looked_at() {
        let long = "x".repeat(usize::try_from(MAX_HELD).unwrap() + 10) + "\n";
        let index = read(&format!("{long}{}none\n{}", row("a", 0), row("b", 0)));
        assert_eq!((index.broken, index.entries.len()), (2, 2));
        assert_eq!(index.entry(3).unwrap().task_id, "b");
        assert!(index.entry(0).is_none() && !index.is_incomplete);

        let index = read(&"none\n".repeat(MAX_ROWS + 1));
        assert_eq!((index.broken, index.is_incomplete), (MAX_ROWS, true));
        // Cut off within what is not held.
        let index = read(&(row("a", 0) + long.trim_end()));
        assert_eq!((index.entries.len(), index.is_incomplete), (1, true));
    }

    #[test]
    fn who_asks_for_the_same_file_waits_for_it() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(row("a", 0).repeat(500).as_bytes()).unwrap();
        let indexes = Indexes::default();
        let found: Vec<Arc<Index>> = std::thread::scope(|scope| {
            let ask = || {
                let mut file = file.reopen().unwrap();
                indexes.of(&mut file, || Err("nobody asks")).unwrap()
            };
            let asked: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
            asked
                .into_iter()
                .map(|asked| asked.join().unwrap())
                .collect()
        });
        assert!(found.iter().all(|index| Arc::ptr_eq(index, &found[0])));
    }
}
