//! Sessions on disk: one JSONL file each, a line an event.

use std::io::Write as _;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use super::ProxyError;

/// The file of one session. Lines are appended whole, and reach the file before an agent has its
/// answer.
#[derive(Debug)]
pub(super) struct Recorder {
    file: Mutex<fs_err::File>,
}

impl Recorder {
    /// Opens the file of a session; a session that takes up an earlier one's id goes on in its file.
    pub(super) fn open(folder: &Path, session: &str) -> Result<Self, ProxyError> {
        let open = || {
            fs_err::create_dir_all(folder)?;
            fs_err::OpenOptions::new()
                .create(true)
                .append(true)
                .open(folder.join(format!("{session}.jsonl")))
        };
        match open() {
            Ok(file) => Ok(Self {
                file: Mutex::new(file),
            }),
            Err(error) => Err(failed(&error)),
        }
    }

    pub(super) fn write(&self, line: &Value) -> Result<(), ProxyError> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.write_all(format!("{line}\n").as_bytes())
            .map_err(|error| failed(&error))
    }
}

fn failed(error: &std::io::Error) -> ProxyError {
    tracing::error!(%error, "a session could not be recorded");
    ProxyError::Recording {
        message: error.to_string(),
    }
}
