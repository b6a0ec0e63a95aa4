//! What can stop a run.

use std::path::PathBuf;

use crate::chat::ChatError;
use crate::config::ConfigError;
use crate::engine::EngineError;
use crate::engine::model::ModelError;
use crate::hub::HubError;
use crate::rollout::RolloutError;
use crate::task::TaskError;
use crate::trainer::TrainerError;
use crate::trajectory::StoreError;

/// A run that could not be set up or could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    // === What was asked for ===
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tasks cannot be read.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// The hub cannot be read.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// No tasks are named.
    #[error("`{key}` is empty; give a task file, a folder or a hub data set")]
    NoTasks {
        /// The key.
        key: &'static str,
    },
    /// A run does not fit the memory that it is given.
    #[error(
        "`trainer.memory_budget` is {budget}, the least that this run needs is {needed}; lower \
         `rollout.max_total_tokens` or `rollout.max_cache_tokens`, or raise it"
    )]
    MemoryBudget {
        /// What it is given.
        budget: bytesize::ByteSize,
        /// What it needs by calculation.
        needed: bytesize::ByteSize,
    },
    /// One task cannot be learned from and measured on.
    #[error(
        "`{path}` has only one task, which leaves none to measure on; give more, or set \
         `task.eval_path`"
    )]
    OneTask {
        /// The file.
        path: String,
    },
    /// Tasks to measure on are also learned from.
    #[error(
        "{count} tasks, `{id}` among them, are learned from and measured on; set \
         `task.eval_path`, or `task.split` and `task.eval_split`, so that they differ"
    )]
    NotHeldOut {
        /// The first of them.
        id: String,
        /// How many.
        count: usize,
    },
    /// The model has no chat template, so it cannot hold a conversation.
    #[error(
        "`{path}` has no chat template; use an instruct model, or add `chat_template` to its `tokenizer_config.json`"
    )]
    NoChatTemplate {
        /// The model.
        path: String,
    },
    /// The chat template cannot be read.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// The demonstrations cannot be read.
    #[error("`{path}` line {line}: {reason}; expected an object with `messages`")]
    Demonstration {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// The run folder is in use.
    #[error("`{path}` is not empty; choose another folder with `--out`")]
    FolderInUse {
        /// The folder.
        path: PathBuf,
    },
    /// There is nothing to resume.
    #[error("`{path}` holds no run; give the folder that `wardian train` made")]
    NoRun {
        /// The folder.
        path: PathBuf,
    },
    /// The run is done.
    #[error(
        "the run in `{path}` is done; to go on from what it made, start another with \
         `--model {path}/final`"
    )]
    Finished {
        /// The folder.
        path: PathBuf,
    },
    /// What a checkpoint says of the run's place cannot be read.
    #[error("checkpoint `{path}` does not say where the run stands: {source}")]
    Progress {
        /// The checkpoint's folder.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The device was not built in or is not there.
    #[error("`model.device = \"{device}\"` is not available; {remedy}")]
    Device {
        /// What was asked for.
        device: &'static str,
        /// What to do.
        remedy: String,
    },

    // === The work ===
    /// The model cannot be used.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The model refused.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Episodes could not be collected.
    #[error(transparent)]
    Rollout(#[from] RolloutError),
    /// The policy could not be updated.
    #[error(transparent)]
    Trainer(#[from] TrainerError),
    /// Every episode of a step or a measurement failed, and not by the policy.
    #[error("no episode could be scored; the last one failed with: {reason}")]
    NothingScored {
        /// Why the last episode failed.
        reason: String,
    },

    /// The run was asked to stop.
    #[error("stopped after step {step}; `wardian train --resume {path}` goes on from there")]
    Stopped {
        /// Steps done and saved.
        step: usize,
        /// The run folder.
        path: PathBuf,
    },

    // === The run folder ===
    /// Episodes cannot be stored.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A file of the run folder cannot be written.
    #[error("failed to write `{path}`; is the disk full?")]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A file or folder of the run cannot be used.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The resolved configuration cannot be written.
    #[error("the configuration cannot be written as TOML")]
    Toml(#[from] toml::ser::Error),
}

impl RunError {
    /// Returns whether nothing failed: the work was asked to stop.
    #[must_use]
    pub fn is_stop(&self) -> bool {
        matches!(
            self,
            Self::Stopped { .. } | Self::Rollout(RolloutError::Stopped)
        )
    }

    /// Returns whether the reader can mend it by asking for something else: a key, a path, a file.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Config(_)
            | Self::Task(_)
            | Self::Hub(_)
            | Self::NoTasks { .. }
            | Self::MemoryBudget { .. }
            | Self::OneTask { .. }
            | Self::NotHeldOut { .. }
            | Self::Chat(_)
            | Self::NoChatTemplate { .. }
            | Self::Demonstration { .. }
            | Self::FolderInUse { .. }
            | Self::NoRun { .. }
            | Self::Finished { .. }
            | Self::Progress { .. }
            | Self::Device { .. }
            | Self::Write { .. }
            | Self::Io(_)
            | Self::Store(_) => true,
            Self::Engine(error) => error.is_input(),
            Self::Model(error) => error.is_input(),
            Self::Rollout(error) => !matches!(error, RolloutError::Engine(_)),
            Self::Trainer(error) => matches!(
                error,
                TrainerError::InvalidConfig { .. } | TrainerError::Io { .. }
            ),
            Self::NothingScored { .. } | Self::Stopped { .. } | Self::Toml(_) => false,
        }
    }
}
