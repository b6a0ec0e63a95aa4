//! The run folder: what a run leaves behind.

use std::fs::{Permissions, TryLockError};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fs_err as fs;
use serde::Serialize;

use super::RunError;
use super::learned::compare_alike;
use super::sinks::{Row, Sinks};
use crate::config::{LogConfig, RunConfig};

const CONFIG: &str = "run.toml";
const METRICS: &str = "metrics.jsonl";
const SUMMARY: &str = "summary.json";

/// How often a folder that is taken is asked for again, and after which time: who looks whether it is
/// taken holds it for microseconds.
const MAX_LOOKS: u32 = 20;
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// The folder of one run.
///
/// ```text
/// run.toml          the configuration as resolved
/// metrics.jsonl     one line a step
/// rollouts/         step-N.jsonl: episodes with token ids, log-probabilities and loss mask
/// checkpoints/      step-N/: weights or adapter, optimizer state
/// final/            the PEFT adapter, or the full weights
/// summary.json      before and after
/// state.json        whether it goes on, and how it ended
/// load.jsonl        what it took of its machine
/// report.html       all of it to look at
/// tensorboard/      the metrics once more, where `log.tensorboard` asks for them
/// ```
#[derive(Debug)]
pub struct RunFolder {
    root: PathBuf,
    metrics: fs::File,
    sinks: Sinks,
    /// Held as long as the run goes on.
    lock: Arc<FolderLock>,
    settings_since: Option<u64>,
}

/// What keeps other processes from writing the folder: they would write over each other's steps. The
/// system lets go of it however the process ends.
#[derive(Debug)]
pub struct FolderLock {
    _folder: fs::File,
}

impl FolderLock {
    /// Makes the folder if it is not there, and takes it.
    ///
    /// # Errors
    ///
    /// Fails where another process has it.
    pub fn take(root: &Path) -> Result<Self, RunError> {
        fs::create_dir_all(root)?;
        let folder = fs::File::open(root)?;
        let mut looks = 0;
        loop {
            match folder.file().try_lock() {
                // Who only asks whether the folder is taken has it for a moment.
                Err(TryLockError::WouldBlock) if looks < MAX_LOOKS => {
                    looks += 1;
                    std::thread::sleep(LOOK_AGAIN);
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(RunError::FolderLocked {
                        path: root.to_owned(),
                    });
                }
                Err(TryLockError::Error(error)) => {
                    // As on some file systems over a network.
                    tracing::warn!(%error, "the run folder cannot be kept from other processes");
                    return Ok(Self { _folder: folder });
                }
                Ok(()) => return Ok(Self { _folder: folder }),
            }
        }
    }

    /// Returns whether a process has the folder that `folder` was opened for; none where that cannot be
    /// told. The opened file must be nobody else's.
    pub(crate) fn is_taken(folder: &std::fs::File) -> Option<bool> {
        match folder.try_lock_shared() {
            Ok(()) => Some(false),
            Err(TryLockError::WouldBlock) => Some(true),
            Err(TryLockError::Error(_)) => None,
        }
    }
}

impl RunFolder {
    /// Fills a folder; one that already holds a run is refused, so that no run is lost.
    ///
    /// # Errors
    ///
    /// Fails where the folder is not empty or cannot be written.
    pub fn create(
        root: &Path,
        lock: FolderLock,
        run_toml: &str,
        log: &LogConfig,
    ) -> Result<Self, RunError> {
        if fs::read_dir(root)?.next().is_some() {
            return Err(RunError::FolderInUse {
                path: root.to_owned(),
            });
        }
        write_atomically(&root.join(CONFIG), run_toml.as_bytes())?;
        Self::open(root, lock, Sinks::open(root, log, &[]))
    }

    /// Returns whether `root` holds a run that came to its end.
    #[must_use]
    pub fn is_finished(root: &Path) -> bool {
        root.join(SUMMARY).exists()
    }

    /// Opens the folder of a run to go on after `step` steps, of which those up to `evaluated` were
    /// measured where that was due. What `metrics.jsonl` has of later ones is dropped, as it is done
    /// again, and so is the summary of a run that gets further steps.
    ///
    /// # Errors
    ///
    /// Fails where the folder cannot be read or written.
    pub fn reopen(
        root: &Path,
        lock: FolderLock,
        step: usize,
        evaluated: usize,
        run_toml: &str,
        log: &LogConfig,
    ) -> Result<Self, RunError> {
        let path = root.join(METRICS);
        let kept = match fs::read_to_string(&path) {
            Ok(text) => rows_until(&text, step, evaluated),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error.into()),
        };
        write_atomically(&path, kept.as_bytes())?;
        let is_compared_alike = is_compared_alike(root, run_toml);
        write_atomically(&root.join(CONFIG), run_toml.as_bytes())?;
        match fs::remove_file(root.join(SUMMARY)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let rows: Vec<Row> = kept
            .lines()
            .filter_map(|row| serde_json::from_str(row).ok())
            .collect();
        let mut folder = Self::open(root, lock, Sinks::open(root, log, &rows))?;
        folder.settings_since = (!is_compared_alike).then_some(step as u64 + 1);
        Ok(folder)
    }

    fn open(root: &Path, lock: FolderLock, sinks: Sinks) -> Result<Self, RunError> {
        let metrics = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(root.join(METRICS))?;
        Ok(Self {
            root: root.to_owned(),
            metrics,
            sinks,
            lock: Arc::new(lock),
            settings_since: None,
        })
    }

    /// Returns the first step that is compared by other settings than those before, if the run goes on so.
    pub(super) fn settings_since(&self) -> Option<u64> {
        self.settings_since
    }

    /// Returns what keeps other processes from the folder.
    pub(super) fn lock(&self) -> Arc<FolderLock> {
        Arc::clone(&self.lock)
    }

    /// Returns the folder of what training made.
    #[must_use]
    pub fn model(&self) -> PathBuf {
        self.root.join("final")
    }

    /// Appends one line to `metrics.jsonl` and gives it to the sinks.
    ///
    /// # Errors
    ///
    /// Fails where the file cannot be written, such as on a full disk.
    pub fn log(&mut self, row: &impl Serialize) -> Result<(), RunError> {
        let mut line = serde_json::to_vec(row).map_err(std::io::Error::from)?;
        line.push(b'\n');
        // One write a line: a crash leaves whole lines.
        self.metrics.write_all(&line)?;
        let row: Row = serde_json::from_slice(&line).map_err(std::io::Error::from)?;
        self.sinks.log(&row);
        Ok(())
    }

    /// Flushes `metrics.jsonl` to disk.
    ///
    /// # Errors
    ///
    /// Fails where the disk does.
    pub fn sync(&self) -> Result<(), RunError> {
        Ok(self.metrics.sync_data()?)
    }

    /// Writes `summary.json`.
    ///
    /// # Errors
    ///
    /// Fails where the file cannot be written.
    pub fn write_summary(&self, summary: &impl Serialize) -> Result<(), RunError> {
        let mut text = serde_json::to_vec_pretty(summary).map_err(std::io::Error::from)?;
        text.push(b'\n');
        write_atomically(&self.root.join(SUMMARY), &text)
    }
}

/// Returns whether rewards are compared by `run_toml` as by the settings that the folder has so far.
fn is_compared_alike(root: &Path, run_toml: &str) -> bool {
    let before = fs::read_to_string(root.join(CONFIG)).ok();
    let read = |text: &str| toml::from_str::<RunConfig>(text).ok();
    let before = before.as_deref().and_then(read);
    let both = before.zip(read(run_toml));
    both.is_some_and(|(before, now)| compare_alike(&before.trainer, &now.trainer))
}

/// Returns the rows of steps up to `step`, and of measurements up to `evaluated`. A row that a crash
/// cut off is dropped.
fn rows_until(text: &str, step: usize, evaluated: usize) -> String {
    let is_kept = |line: &&str| {
        let Ok(row) = serde_json::from_str::<serde_json::Value>(line) else {
            return false;
        };
        let is_evaluation = row.get("eval/pass_at_1").is_some();
        let last = if is_evaluation { evaluated } else { step };
        let found = row.get("step").and_then(serde_json::Value::as_u64);
        found.is_some_and(|found| found <= last as u64)
    };
    (text
        .split_inclusive('\n')
        .filter(|line| line.ends_with('\n')))
    .filter(is_kept)
    .collect()
}

/// Writes a file whole or not at all.
pub(crate) fn write_atomically(path: &Path, content: &[u8]) -> Result<(), RunError> {
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    let mut file = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o666)) // less the umask
        .tempfile_in(folder)
        .map_err(|source| RunError::Write {
            path: path.to_owned(),
            source,
        })?;
    file.write_all(content)
        .and_then(|()| file.as_file().sync_all())
        .map_err(|source| RunError::Write {
            path: path.to_owned(),
            source,
        })?;
    file.persist(path).map_err(|error| RunError::Write {
        path: path.to_owned(),
        source: error.error,
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_holds_a_run_is_refused_and_one_that_a_process_writes_cannot_be_taken() {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("run");
        let mut folder = RunFolder::create(
            &root,
            FolderLock::take(&root).unwrap(),
            "seed = 0\n",
            &LogConfig::default(),
        )
        .unwrap();
        folder.log(&serde_json::json!({"step": 1})).unwrap();
        folder.log(&serde_json::json!({"step": 2})).unwrap();
        let lines = fs::read_to_string(root.join("metrics.jsonl")).unwrap();
        let error = FolderLock::take(&root).unwrap_err();
        assert!(matches!(error, RunError::FolderLocked { .. }), "{error}");
        drop(folder);
        assert_eq!(lines, "{\"step\":1}\n{\"step\":2}\n");
        let error = RunFolder::create(
            &root,
            FolderLock::take(&root).unwrap(),
            "",
            &LogConfig::default(),
        )
        .unwrap_err();
        assert!(matches!(error, RunError::FolderInUse { .. }), "{error}");
    }

    #[test]
    fn a_reopened_folder_forgets_what_is_done_again() {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("run");
        let log = LogConfig {
            tensorboard: true,
            ..LogConfig::default()
        };
        let events = || {
            fs::metadata(root.join("tensorboard/events.out.tfevents.wardian"))
                .unwrap()
                .len()
        };
        let mut folder =
            RunFolder::create(&root, FolderLock::take(&root).unwrap(), "seed = 0\n", &log).unwrap();
        for step in 1..4 {
            folder.log(&serde_json::json!({"step": step})).unwrap();
            let measured = serde_json::json!({"step": step, "eval/pass_at_1": 0.5});
            folder.log(&measured).unwrap();
        }
        let uninterrupted = events();
        folder.metrics.write_all(b"{\"step\": 2, \"cut").unwrap();
        drop(folder);
        let mut folder = RunFolder::reopen(
            &root,
            FolderLock::take(&root).unwrap(),
            2,
            1,
            "seed = 1\n",
            &log,
        )
        .unwrap();
        assert_eq!(folder.settings_since(), None, "the seed compares nothing");
        let kept = fs::read_to_string(root.join("metrics.jsonl")).unwrap();
        let measured = r#"{"step":1,"eval/pass_at_1":0.5}"#;
        assert_eq!(
            kept,
            format!("{{\"step\":1}}\n{measured}\n{{\"step\":2}}\n")
        );
        for row in [
            serde_json::json!({"step": 2, "eval/pass_at_1": 0.5}),
            serde_json::json!({"step": 3}),
            serde_json::json!({"step": 3, "eval/pass_at_1": 0.5}),
        ] {
            folder.log(&row).unwrap();
        }
        folder.sync().unwrap();
        assert_eq!(events(), uninterrupted, "each row is there once");
        assert_eq!(
            fs::read_to_string(root.join("run.toml")).unwrap(),
            "seed = 1\n"
        );
        folder.write_summary(&serde_json::json!({})).unwrap();
        assert!(RunFolder::is_finished(&root));
        drop(folder);
        let folder = RunFolder::reopen(
            &root,
            FolderLock::take(&root).unwrap(),
            2,
            1,
            "trainer.scale_rewards = \"none\"\n",
            &LogConfig::default(),
        )
        .unwrap();
        assert_eq!(folder.settings_since(), Some(3));
        assert!(!RunFolder::is_finished(&root), "it gets further steps");
    }
}
