//! The file that the episodes of an evaluation are kept in, one a line, so that one that was interrupted
//! goes on.

use std::collections::HashSet;
use std::io::{BufReader, Write as _};
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::EndpointError;
use crate::lines::Lines;
use crate::trajectory::Trajectory;

/// The longest line that is read: an episode with its conversation.
const MAX_LINE: u64 = 256 << 20;

/// What an endpoint was asked for, and what it counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointUsage {
    /// Requests that were answered.
    pub requests: u64,
    /// Requests that were made again.
    pub retries: u64,
    /// Tokens of the prompts, as the endpoint counts them.
    pub prompt_tokens: u64,
    /// Tokens of the answers, as the endpoint counts them.
    pub completion_tokens: u64,
}

impl EndpointUsage {
    /// Adds what another episode cost.
    pub fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.retries += other.retries;
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
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
/// The first line says what was asked for; each further one is an [`EpisodeRecord`].
#[derive(Debug)]
pub struct ResultsFile {
    file: Option<fs::File>,
    records: Vec<EpisodeRecord>,
    done: HashSet<(String, u32)>,
}

impl ResultsFile {
    /// Keeps episodes in memory only.
    #[must_use]
    pub fn in_memory() -> Self {
        Self {
            file: None,
            records: Vec::new(),
            done: HashSet::new(),
        }
    }

    /// Opens the file at `path`, or makes it; `asked` is what is asked for. Episodes that it holds count
    /// as done, but those that could not be scored. A last line that was not written to its end is
    /// dropped.
    ///
    /// # Errors
    ///
    /// Fails where the file is something else, holds results of something else, or cannot be read or
    /// written.
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
        let torn = results.read(path, &file, asked)?;
        let whole = file.metadata()?.len() - torn;
        file.set_len(whole)?;
        if whole == 0 {
            write_line(&mut file, asked)?;
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
        for (number, line) in Lines::new(BufReader::new(file), MAX_LINE) {
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

    /// Adds an episode.
    ///
    /// # Errors
    ///
    /// Fails where the file cannot be written, such as on a full disk.
    pub fn append(&mut self, record: EpisodeRecord) -> Result<(), EndpointError> {
        if let Some(file) = &mut self.file {
            write_line(file, &record)?;
        }
        self.keep(record);
        Ok(())
    }

    /// Returns the episodes: those that were scored, and the last try of each that could not be.
    #[must_use]
    pub fn into_records(self) -> Vec<EpisodeRecord> {
        let key = |record: &EpisodeRecord| {
            let episode = &record.trajectory;
            (episode.task_id.clone(), episode.sample)
        };
        let mut seen = HashSet::new();
        let mut records: Vec<_> = (self.records.into_iter().rev())
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

/// Writes one line with one call, so that a crash leaves whole lines before it.
fn write_line(file: &mut fs::File, row: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(row)?;
    line.push(b'\n');
    file.write_all(&line)
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
