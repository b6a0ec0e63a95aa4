//! The small model and tasks that the binary carries, for a first run without a download.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::RunError;
use super::folder::write_atomically;

/// The name that stands for the carried model and tasks in a configuration.
pub const STARTER: &str = "starter";

/// The run file of the starter.
pub const STARTER_RUN: &str = include_str!("../../examples/starter/run.toml");

macro_rules! starter_files {
    ($($name:literal),+ $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../examples/starter/", $name)) as &[u8])),+]
    };
}

/// Path in the starter's folder and content of every carried file.
const FILES: &[(&str, &[u8])] = starter_files![
    "model/config.json",
    "model/generation_config.json",
    "model/model.safetensors",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
    "tasks/train.jsonl",
    "tasks/heldout.jsonl",
];

/// The starter as a folder on disk.
#[derive(Debug, Clone)]
pub struct Starter {
    root: PathBuf,
}

impl Starter {
    /// Writes the carried files below `cache`, once for each version of them.
    ///
    /// # Errors
    ///
    /// Fails where the folder cannot be written.
    pub fn unpack(cache: &Path) -> Result<Self, RunError> {
        let mut hasher = blake3::Hasher::new();
        for (name, content) in FILES {
            hasher.update(name.as_bytes());
            hasher.update(&(content.len() as u64).to_le_bytes());
            hasher.update(content);
        }
        let root = cache.join(format!("starter-{}", &hasher.finalize().to_hex()[..16]));
        for (name, content) in FILES {
            let path = root.join(name);
            // A file of the right size is whole: files appear by renaming.
            if fs::metadata(&path).is_ok_and(|found| found.len() == content.len() as u64) {
                continue;
            }
            // The cache folder holds compiled code too, which nobody else may write to.
            let mut folder = std::fs::DirBuilder::new();
            folder.recursive(true).mode(0o700);
            folder.create(path.parent().unwrap_or(&root))?;
            write_atomically(&path, content)?;
        }
        Ok(Self { root })
    }

    /// Returns the folder of the model.
    #[must_use]
    pub fn model(&self) -> PathBuf {
        self.root.join("model")
    }

    /// Returns the training tasks.
    #[must_use]
    pub fn train_tasks(&self) -> PathBuf {
        self.root.join("tasks/train.jsonl")
    }

    /// Returns the held-out tasks, which neither demonstrations nor training ever show.
    #[must_use]
    pub fn heldout_tasks(&self) -> PathBuf {
        self.root.join("tasks/heldout.jsonl")
    }
}
