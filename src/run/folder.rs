//! The run folder: what a run leaves behind.

use std::fs::Permissions;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::Serialize;

use super::RunError;

/// The folder of one run.
///
/// ```text
/// run.toml          the configuration as resolved
/// metrics.jsonl     one line a step
/// rollouts/         step-N.jsonl: episodes with token ids, log-probabilities and loss mask
/// checkpoints/      step-N/: weights or adapter, optimizer state
/// final/            the PEFT adapter, or the full weights
/// summary.json      before and after
/// ```
#[derive(Debug)]
pub struct RunFolder {
    root: PathBuf,
    metrics: fs::File,
}

impl RunFolder {
    /// Creates the folder; one that already holds a run is refused, so that no run is lost.
    ///
    /// # Errors
    ///
    /// Fails where the folder is not empty or cannot be written.
    pub fn create(root: &Path, run_toml: &str) -> Result<Self, RunError> {
        if root.is_dir() && fs::read_dir(root)?.next().is_some() {
            return Err(RunError::FolderInUse {
                path: root.to_owned(),
            });
        }
        fs::create_dir_all(root)?;
        write_atomically(&root.join("run.toml"), run_toml.as_bytes())?;
        let metrics = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(root.join("metrics.jsonl"))?;
        Ok(Self {
            root: root.to_owned(),
            metrics,
        })
    }

    /// Returns the folder of what training made.
    #[must_use]
    pub fn model(&self) -> PathBuf {
        self.root.join("final")
    }

    /// Appends one line to `metrics.jsonl`.
    ///
    /// # Errors
    ///
    /// Fails where the file cannot be written, such as on a full disk.
    pub fn log(&mut self, row: &impl Serialize) -> Result<(), RunError> {
        let mut line = serde_json::to_vec(row).map_err(std::io::Error::from)?;
        line.push(b'\n');
        // One write a line: a crash leaves whole lines.
        self.metrics.write_all(&line)?;
        Ok(())
    }

    /// Writes `summary.json`.
    ///
    /// # Errors
    ///
    /// Fails where the file cannot be written.
    pub fn write_summary(&self, summary: &impl Serialize) -> Result<(), RunError> {
        let mut text = serde_json::to_vec_pretty(summary).map_err(std::io::Error::from)?;
        text.push(b'\n');
        write_atomically(&self.root.join("summary.json"), &text)
    }
}

/// Writes a file whole or not at all.
pub(super) fn write_atomically(path: &Path, content: &[u8]) -> Result<(), RunError> {
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
    fn a_folder_that_holds_a_run_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("run");
        let mut folder = RunFolder::create(&root, "seed = 0\n").unwrap();
        folder.log(&serde_json::json!({"step": 1})).unwrap();
        folder.log(&serde_json::json!({"step": 2})).unwrap();
        let lines = fs::read_to_string(root.join("metrics.jsonl")).unwrap();
        assert_eq!(lines, "{\"step\":1}\n{\"step\":2}\n");
        let error = RunFolder::create(&root, "").unwrap_err();
        assert!(matches!(error, RunError::FolderInUse { .. }), "{error}");
    }
}
