//! Sessions on disk: one JSONL file each, a line an event.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;

use super::ProxyError;

/// The file of one session. Lines are appended whole, and reach the file before an agent has the end of its
/// answer.
#[derive(Debug)]
pub(super) struct Recorder {
    file: Mutex<Recording>,
}

/// The file, which is opened for its first line.
#[derive(Debug)]
pub(super) struct Recording {
    path: PathBuf,
    file: Option<fs_err::File>,
}

impl Recorder {
    /// Takes the file of a session, which it is not opened yet for; a session that takes up an earlier one's
    /// id goes on in its file.
    pub(super) fn new(folder: &Path, session: &str) -> Self {
        let path = folder.join(format!("{session}.jsonl"));
        Self {
            file: Mutex::new(Recording { path, file: None }),
        }
    }

    /// Waits until nobody else writes.
    pub(super) fn lock(&self) -> MutexGuard<'_, Recording> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self, line: &impl Serialize) -> Result<(), ProxyError> {
        self.lock().write(line)
    }
}

impl Recording {
    pub(super) fn write(&mut self, line: &impl Serialize) -> Result<(), ProxyError> {
        self.append(line).map_err(|error| {
            tracing::error!(%error, "a session could not be recorded");
            ProxyError::Recording {
                message: error.to_string(),
            }
        })
    }

    fn append(&mut self, line: &impl Serialize) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(line)?;
        line.push(b'\n');
        let file = match &mut self.file {
            Some(file) => file,
            none => {
                if let Some(folder) = self.path.parent() {
                    fs_err::create_dir_all(folder)?;
                }
                let file = fs_err::OpenOptions::new()
                    .create(true)
                    .append(true)
                    .open(&self.path)?;
                none.insert(file)
            }
        };
        file.write_all(&line)
    }
}
