//! The file that the episodes of an evaluation are kept in, one a line, so that one that was interrupted
//! goes on.

use std::collections::HashSet;
use std::fs::TryLockError;
use std::io::{BufReader, Write as _};
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::EndpointError;
use crate::lines::Lines;
use crate::trajectory::{Status, Trajectory};

/// The longest line that is written and read: an episode with its conversation.
const MAX_LINE: u64 = 256 << 20;

/// What an endpoint was asked for, and what it counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointUsage {
    /// Requests that were answered.
    pub requests: u64,
    /// Requests that were made again.
    pub retries: u64,
    /// Requests whose answers did not say how many tokens they and their prompts have.
    #[serde(default)]
    pub uncounted: u64,
    /// Tokens of the prompts, as the endpoint counts them.
    pub prompt_tokens: u64,
    /// Tokens of the answers, as the endpoint counts them.
    pub completion_tokens: u64,
}

impl EndpointUsage {
    /// Adds an answer, with the tokens of its prompt and its own, if they were counted.
    pub(super) fn count(&mut self, tokens: Option<(usize, usize)>) {
        let (prompt, answer) = tokens.unwrap_or_default();
        self.add(Self {
            requests: 1,
            retries: 0,
            uncounted: u64::from(tokens.is_none()),
            prompt_tokens: prompt as u64,
            completion_tokens: answer as u64,
        });
    }

    /// Adds what another episode cost.
    pub fn add(&mut self, other: Self) {
        // A file may say anything.
        for (sum, more) in [
            (&mut self.requests, other.requests),
            (&mut self.retries, other.retries),
            (&mut self.uncounted, other.uncounted),
            (&mut self.prompt_tokens, other.prompt_tokens),
            (&mut self.completion_tokens, other.completion_tokens),
        ] {
            *sum = sum.saturating_add(more);
        }
    }
}

/// One episode with an endpoint's model. Its trajectory has no token ids.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EpisodeRecord {
    /// What happened.
    pub trajectory: Trajectory,
    /// What it cost.
    pub usage: EndpointUsage,
}

/// The episodes so far, and the file that they are in, if in one.
///
/// The first line says what was asked for; each further one is an [`EpisodeRecord`]. The file is locked, so
/// that no other evaluation writes into it.
#[derive(Debug)]
pub struct ResultsFile {
    file: Option<fs::File>,
    records: Vec<EpisodeRecord>,
    done: HashSet<(String, u32)>,
    usage: EndpointUsage,
    /// The longest line that is written and read.
    max_line: u64,
    /// Whether the file ends in a part of a line, behind which nothing may be written.
    is_torn: bool,
}

impl ResultsFile {
    /// Keeps episodes in memory only.
    #[must_use]
    pub fn in_memory() -> Self {
        Self {
            file: None,
            records: Vec::new(),
            done: HashSet::new(),
            usage: EndpointUsage::default(),
            max_line: MAX_LINE,
            is_torn: false,
        }
    }

    /// Opens the file at `path`, or makes it; `asked` is what is asked for. Episodes that it holds count
    /// as done, but those that could not be scored. A last line that was not written to its end is
    /// dropped.
    ///
    /// # Errors
    ///
    /// Fails where the file is something else, holds results of something else, is in use, or cannot be
    /// read or written.
    pub fn open(path: &Path, asked: &Map<String, Value>) -> Result<Self, EndpointError> {
        let mut results = Self::in_memory();
        if let Some(folder) = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty())
        {
            fs::create_dir_all(folder)?;
        }
        let mut file = fs::OpenOptions::new()
            .create(true)
            .read(true)
            .append(true)
            .open(path)?;
        lock(path, &file)?;
        let torn = results.read(path, &file, asked)?;
        let whole = file.metadata()?.len() - torn;
        file.set_len(whole)?;
        if whole == 0 {
            let header = to_line(asked)?;
            append_line(&mut file, &header, write_all).map_err(|cause| cause.error)?;
        }
        results.file = Some(file);
        Ok(results)
    }

    /// Reads a file's episodes and returns how many bytes of its last line are not a whole one.
    fn read(
        &mut self,
        path: &Path,
        file: &fs::File,
        asked: &Map<String, Value>,
    ) -> Result<u64, EndpointError> {
        let broken = |line: u64, problem: String| EndpointError::NoResults {
            path: path.to_owned(),
            line,
            problem,
        };
        let header = serde_json::to_vec(asked).map_err(std::io::Error::from)?;
        let mut has_header = false;
        for (number, line) in Lines::new(BufReader::new(file), self.max_line) {
            let line = line.map_err(|error| broken(number, error.to_string()))?;
            // A line that a crash cut off; what else has no end is not ours to cut.
            if !line.ends_with(b"\n") && (has_header || header.starts_with(&line)) {
                return Ok(line.len() as u64);
            }
            if has_header {
                let record: EpisodeRecord = serde_json::from_slice(&line)
                    .map_err(|error| broken(number, format!("not an episode: {error}")))?;
                self.keep(record);
            } else {
                let found: Map<String, Value> = serde_json::from_slice(&line)
                    .map_err(|error| broken(number, format!("not what was asked for: {error}")))?;
                check_alike(path, &found, asked)?;
                has_header = true;
            }
        }
        Ok(0)
    }

    fn keep(&mut self, record: EpisodeRecord) {
        self.usage.add(record.usage);
        let episode = &record.trajectory;
        if episode.passed.is_some() {
            self.done.insert((episode.task_id.clone(), episode.sample));
        }
        self.records.push(record);
    }

    /// Returns whether a sample of a task has been scored.
    #[must_use]
    pub fn has(&self, task_id: &str, sample: u32) -> bool {
        self.done.contains(&(task_id.to_owned(), sample))
    }

    /// Returns whether an answer of the endpoint is kept.
    pub(super) fn has_answered(&self) -> bool {
        self.usage.requests > 0
    }

    /// Returns what all episodes cost, those that were tried again and those that nobody asks for any more
    /// among them.
    #[must_use]
    pub fn usage(&self) -> EndpointUsage {
        self.usage
    }

    /// Adds an episode. One that is longer than what can be read back is kept as one that could not be
    /// scored, without its conversation.
    ///
    /// # Errors
    ///
    /// Fails where the file cannot be written, such as on a full disk; what was written of the episode is
    /// cut off again.
    pub fn append(&mut self, mut record: EpisodeRecord) -> Result<(), EndpointError> {
        if let Some(file) = &mut self.file {
            if self.is_torn {
                return Err(EndpointError::Torn);
            }
            let mut line = to_line(&record)?;
            if line.len() as u64 > self.max_line {
                record = without_conversation(record, self.max_line);
                line = to_line(&record)?;
            }
            if let Err(cause) = append_line(file, &line, write_all) {
                self.is_torn = cause.is_torn;
                return Err(cause.error.into());
            }
        }
        self.keep(record);
        Ok(())
    }

    /// Returns the episodes that `is_asked` for by their tasks and samples: those that were scored, and the
    /// last try of each that could not be.
    #[must_use]
    pub fn into_records(self, is_asked: impl Fn(&str, u32) -> bool) -> Vec<EpisodeRecord> {
        let key = |record: &EpisodeRecord| {
            let episode = &record.trajectory;
            (episode.task_id.clone(), episode.sample)
        };
        let mut seen = HashSet::new();
        let mut records: Vec<_> = (self.records.into_iter().rev())
            .filter(|record| is_asked(&record.trajectory.task_id, record.trajectory.sample))
            .filter(|record| {
                let is_stale =
                    record.trajectory.passed.is_none() && self.done.contains(&key(record));
                !is_stale && seen.insert(key(record))
            })
            .collect();
        records.reverse();
        records
    }
}

/// Keeps other evaluations out of the file, until it is closed.
fn lock(path: &Path, file: &fs::File) -> Result<(), EndpointError> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(EndpointError::InUse {
            path: path.to_owned(),
        }),
        Err(TryLockError::Error(error)) => {
            // Some file systems of networks know no locks.
            tracing::warn!(%error, "the results cannot be locked");
            Ok(())
        }
    }
}

/// Returns what is kept of an episode that is too long to be kept.
fn without_conversation(mut record: EpisodeRecord, limit: u64) -> EpisodeRecord {
    let episode = &mut record.trajectory;
    episode.messages.clear();
    episode.turns.clear();
    episode.rewards.clear();
    (episode.reward, episode.passed) = (None, None);
    episode.status = Status::Failed {
        reason: format!("its conversation takes more than {limit} bytes"),
    };
    record
}

fn to_line(row: &impl Serialize) -> std::io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(row)?;
    line.push(b'\n');
    Ok(line)
}

fn write_all(file: &mut fs::File, line: &[u8]) -> std::io::Result<()> {
    file.write_all(line)
}

/// Why a line was not written.
#[derive(Debug)]
struct AppendError {
    error: std::io::Error,
    /// Whether a part of it is there.
    is_torn: bool,
}

/// Writes a line with one call, so that a crash leaves whole lines before it; one that fails leaves nothing.
fn append_line(
    file: &mut fs::File,
    line: &[u8],
    write: impl FnOnce(&mut fs::File, &[u8]) -> std::io::Result<()>,
) -> Result<(), AppendError> {
    let whole = |error| AppendError {
        error,
        is_torn: false,
    };
    let length = file.metadata().map_err(whole)?.len();
    write(file, line).map_err(|error| AppendError {
        error,
        is_torn: file.set_len(length).is_err(),
    })
}

fn check_alike(
    path: &Path,
    found: &Map<String, Value>,
    asked: &Map<String, Value>,
) -> Result<(), EndpointError> {
    let keys = found.keys().chain(asked.keys());
    let mut other = keys.filter(|key| found.get(*key) != asked.get(*key));
    let Some(key) = other.next() else {
        return Ok(());
    };
    let told = |value: Option<&Value>| value.map_or_else(|| "none".to_owned(), Value::to_string);
    Err(EndpointError::OtherResults {
        path: PathBuf::from(path),
        key: key.clone(),
        found: told(found.get(key)),
        expected: told(asked.get(key)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::Message;
    use crate::trajectory::{TokenTrace, Usage};

    fn record(sample: u32) -> EpisodeRecord {
        EpisodeRecord {
            trajectory: Trajectory {
                task_id: "t".to_owned(),
                group: 0,
                sample,
                policy_step: 0,
                segments: Vec::new(),
                messages: vec![Message::user("x".repeat(1000))],
                turns: Vec::new(),
                trace: TokenTrace::new(),
                reward: Some(1.0),
                rewards: indexmap::IndexMap::new(),
                passed: Some(true),
                status: Status::Finished,
                usage: Usage::default(),
            },
            usage: EndpointUsage {
                requests: 1,
                ..EndpointUsage::default()
            },
        }
    }

    #[test]
    fn a_line_that_could_not_be_written_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        let asked = Map::new();
        let mut results = ResultsFile::open(&path, &asked).unwrap();
        results.append(record(0)).unwrap();
        let before = fs::read(&path).unwrap();
        let line = to_line(&record(1)).unwrap();
        // The disk is full after a part of it.
        let half = |file: &mut fs::File, line: &[u8]| {
            file.write_all(&line[..line.len() / 2])?;
            Err(std::io::ErrorKind::StorageFull.into())
        };
        let cause = append_line(results.file.as_mut().unwrap(), &line, half).unwrap_err();
        assert_eq!(cause.error.kind(), std::io::ErrorKind::StorageFull);
        assert!(!cause.is_torn);
        assert_eq!(fs::read(&path).unwrap(), before);
        results.append(record(1)).unwrap();
        // Where nothing can be cut off, nothing is written behind it.
        results.is_torn = true;
        assert!(matches!(
            results.append(record(2)),
            Err(EndpointError::Torn)
        ));
        drop(results);
        let results = ResultsFile::open(&path, &asked).unwrap();
        assert!(results.has("t", 0) && results.has("t", 1) && !results.has("t", 2));
    }

    #[test]
    fn an_episode_that_is_too_long_to_be_read_back_is_no_score() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        let asked = Map::new();
        let mut results = ResultsFile::open(&path, &asked).unwrap();
        results.max_line = to_line(&record(0)).unwrap().len() as u64;
        results.append(record(0)).unwrap();
        results.max_line -= 1;
        results.append(record(1)).unwrap();
        assert!(results.has("t", 0) && !results.has("t", 1));
        drop(results);
        let results = ResultsFile::open(&path, &asked).unwrap();
        assert_eq!(results.usage().requests, 2);
        let records = results.into_records(|_, _| true);
        assert_eq!(records[0].trajectory, record(0).trajectory);
        let long = &records[1].trajectory;
        assert_eq!((long.passed, long.messages.len()), (None, 0));
        let Status::Failed { reason } = &long.status else {
            panic!("{long:?}");
        };
        assert!(reason.contains("takes more than"), "{reason}");
    }

    #[test]
    fn two_evaluations_do_not_share_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        let asked = Map::new();
        let mut first = ResultsFile::open(&path, &asked).unwrap();
        first.append(record(0)).unwrap();
        let error = ResultsFile::open(&path, &asked).unwrap_err();
        assert!(
            error.is_usage() && matches!(error, EndpointError::InUse { .. }),
            "{error}"
        );
        first.append(record(1)).unwrap();
        drop(first);
        let second = ResultsFile::open(&path, &asked).unwrap();
        assert!(second.has("t", 0) && second.has("t", 1));
    }
}
