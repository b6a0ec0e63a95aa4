//! Reading a model's small files, which may come from anywhere: bounded, and named in every error.

use std::io::{self, Read as _};
use std::path::Path;

use fs_err as fs;
use serde::de::DeserializeOwned;

use super::ModelError;

/// Largest accepted `config.json` or `adapter_config.json`; those in use have a few kilobytes.
pub(super) const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Largest accepted index of shards; one with 90,000 tensors has 9 MB.
pub(super) const MAX_INDEX_BYTES: u64 = 64 << 20;

pub(super) fn io_error(path: &Path, source: io::Error) -> ModelError {
    ModelError::Io {
        path: path.to_owned(),
        source,
    }
}

/// Reads a JSON file of at most `limit` bytes.
pub(super) fn read_json<T: DeserializeOwned>(path: &Path, limit: u64) -> Result<T, ModelError> {
    let file = fs::File::open(path).map_err(|source| io_error(path, source))?;
    let mut bytes = Vec::new();
    // One byte more than is allowed tells a file at the limit from one beyond it, devices included.
    file.take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(|source| io_error(path, source))?;
    if bytes.len() as u64 > limit {
        return Err(ModelError::FileTooLarge {
            path: path.to_owned(),
            limit,
        });
    }
    serde_json::from_slice(&bytes).map_err(|source| ModelError::Json {
        path: path.to_owned(),
        source,
    })
}
