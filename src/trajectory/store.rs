//! Rollout files: one trajectory a line, one file a training step.
//!
//! A step's file appears under its name only when it is complete: it is written beside it as
//! `step-N.jsonl.partial`, flushed to the disk and renamed. A `.partial` file is what a killed run
//! leaves; the next run of the step replaces it.

use std::io::{BufReader, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use super::{StoreError, Trajectory};
use crate::lines::{LineError, Lines};

/// The longest line that is read. A trajectory of 100,000 tokens takes about 3 MB.
const MAX_ROW_BYTES: u64 = 64 << 20;

/// Returns the file of a training step in a run folder: `rollouts/step-N.jsonl`.
#[must_use]
pub fn step_path(run: &Path, step: u64) -> PathBuf {
    run.join("rollouts").join(format!("step-{step}.jsonl"))
}

/// Returns the steps whose rollouts a run folder holds, in order.
///
/// # Errors
///
/// Fails when the folder is there but can not be read.
pub fn steps(run: &Path) -> Result<Vec<u64>, StoreError> {
    let folder = run.join("rollouts");
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let step = |entry: std::io::Result<fs_err::DirEntry>| {
        let name = entry?.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix("step-")?.strip_suffix(".jsonl"));
        Ok(number.and_then(|number| number.parse().ok()))
    };
    let found: std::io::Result<Vec<Option<u64>>> =
        fs_err::read_dir(&folder).and_then(|entries| entries.map(step).collect());
    let mut steps: Vec<u64> = found
        .map_err(|source| StoreError::Io {
            activity: "listing",
            path: folder,
            source,
        })?
        .into_iter()
        .flatten()
        .collect();
    steps.sort_unstable();
    Ok(steps)
}

/// Writes the rollouts of one step, a trajectory at a time.
#[derive(Debug)]
pub struct StepWriter {
    file: BufWriter<fs_err::File>,
    partial: PathBuf,
    path: PathBuf,
}

impl StepWriter {
    /// Starts the file of a step in a run folder.
    ///
    /// # Errors
    ///
    /// Fails when the file can not be made.
    pub fn create(run: &Path, step: u64) -> Result<Self, StoreError> {
        let path = step_path(run, step);
        let partial = path.with_extension("jsonl.partial");
        let create = || {
            fs_err::create_dir_all(run.join("rollouts"))?;
            fs_err::File::create(&partial)
        };
        let file = create().map_err(|source| StoreError::Io {
            activity: "creating",
            path: partial.clone(),
            source,
        })?;
        Ok(Self {
            file: BufWriter::new(file),
            partial,
            path,
        })
    }

    /// Adds a trajectory.
    ///
    /// # Errors
    ///
    /// Fails when the file can not be written; it is then unfinished.
    pub fn append(&mut self, trajectory: &Trajectory) -> Result<(), StoreError> {
        let mut line = serde_json::to_vec(trajectory).map_err(|source| StoreError::Encode {
            path: self.partial.clone(),
            task_id: trajectory.task_id.clone(),
            sample: trajectory.sample,
            source,
        })?;
        line.push(b'\n');
        self.file
            .write_all(&line)
            .map_err(|source| self.io("writing", source))
    }

    /// Completes the file: it gets its name once its bytes are on the disk. Returns its path.
    ///
    /// # Errors
    ///
    /// Fails when the file can not be written or renamed.
    pub fn finish(mut self) -> Result<PathBuf, StoreError> {
        let finish = |writer: &mut Self| {
            writer.file.flush()?;
            writer.file.get_ref().sync_all()?;
            fs_err::rename(&writer.partial, &writer.path)?;
            // The name is in the folder, so the folder has to reach the disk too.
            writer
                .path
                .parent()
                .map_or(Ok(()), |folder| fs_err::File::open(folder)?.sync_all())
        };
        finish(&mut self).map_err(|source| self.io("finishing", source))?;
        Ok(self.path)
    }

    fn io(&self, activity: &'static str, source: std::io::Error) -> StoreError {
        StoreError::Io {
            activity,
            path: self.partial.clone(),
            source,
        }
    }
}

/// Opens a rollout file; the trajectories come one at a time.
///
/// # Errors
///
/// Fails when the file can not be opened.
pub fn read_step(path: &Path) -> Result<StepReader, StoreError> {
    let file = fs_err::File::open(path).map_err(|source| StoreError::Io {
        activity: "opening",
        path: path.to_owned(),
        source,
    })?;
    Ok(StepReader {
        rows: Lines::new(BufReader::new(file), MAX_ROW_BYTES),
        path: path.to_owned(),
        has_failed: false,
    })
}

/// The trajectories of a rollout file, in order; ends after the first error.
#[derive(Debug)]
pub struct StepReader {
    rows: Lines<BufReader<fs_err::File>>,
    path: PathBuf,
    has_failed: bool,
}

impl StepReader {
    fn read(&self, row: u64, line: Result<Vec<u8>, LineError>) -> Result<Trajectory, StoreError> {
        let path = || self.path.clone();
        let line = line.map_err(|error| match error {
            LineError::Io(source) => StoreError::Io {
                activity: "reading",
                path: path(),
                source,
            },
            LineError::TooLong { limit } => StoreError::RowTooLong {
                path: path(),
                row,
                found: limit + 1,
                limit,
            },
        })?;
        serde_json::from_slice(&line).map_err(|source| StoreError::Row {
            path: path(),
            row,
            source,
        })
    }
}

impl Iterator for StepReader {
    type Item = Result<Trajectory, StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_failed {
            return None;
        }
        let (row, line) = self.rows.next()?;
        let next = self.read(row, line);
        self.has_failed = next.is_err();
        Some(next)
    }
}
