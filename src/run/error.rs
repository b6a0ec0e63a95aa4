//! What can stop a run.

use std::path::{Path, PathBuf};

use crate::actor::ActorError;
use crate::chat::ChatError;
use crate::collective::CollectiveError;
use crate::config::ConfigError;
use crate::engine::EngineError;
use crate::engine::model::ModelError;
use crate::hub::HubError;
use crate::openenv::client::ClientError;
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
    /// The tasks need actors, and there are none for them.
    #[error(transparent)]
    Actor(#[from] ActorError),
    /// A task has steps, and a program cannot be told of them.
    #[error(
        "task `{task}` has several steps, and a program (`rollout.agent`) is given one instruction; leave the task \
         out, or the agent"
    )]
    StepsForAgent {
        /// The task's id.
        task: String,
    },
    /// The tasks are worked on with tools, and the model knows none.
    #[error(
        "these tasks are worked on with the tools `bash`, `edit` and `submit`, and the model's chat template \
         knows no tools; take a model whose template does"
    )]
    NoToolsForActors,
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
        "`trainer.memory_budget` is {budget}, the least that this run needs is {needed}; make its longest \
         sequence shorter than {longest} tokens (`rollout.max_total_tokens`, or the demonstrations), lower \
         `rollout.max_cache_tokens`, or raise the budget"
    )]
    MemoryBudget {
        /// What it is given.
        budget: bytesize::ByteSize,
        /// What it needs by calculation.
        needed: bytesize::ByteSize,
        /// Tokens of its longest sequence.
        longest: usize,
    },
    /// One task cannot be learned from and measured on.
    #[error(
        "`{path}` has only one task, which leaves none to measure on; give more, or set `eval_path` \
         beside its `path`"
    )]
    OneTask {
        /// The file.
        path: String,
    },
    /// Tasks to measure on are also learned from.
    #[error(
        "`{id}` is learned from{} and measured on, one of {count} such; set `{section}.eval_path`, or \
         `{section}.split` and `{section}.eval_split`, so that they differ",
        learned_as.as_ref().map_or_else(String::new, |name| format!(", as `{name}`,"))
    )]
    NotHeldOut {
        /// The first of them.
        id: String,
        /// What it is called where it is learned from, if that is another name.
        learned_as: Option<String>,
        /// The section of the run file that says what is measured on.
        section: String,
        /// How many.
        count: usize,
    },
    /// The tasks of an environment cannot be used.
    #[error("the tasks of `environments.{name}` can not be used")]
    Environment {
        /// The environment.
        name: String,
        /// Why.
        source: Box<Self>,
    },
    /// Programs are to run, and no sandbox is given for them.
    #[error("the run has environments whose programs run here, and no sandbox is given for them")]
    NoPrograms,
    /// An environment elsewhere is acted on by tools, and the policy is told of none.
    #[error(
        "the environment at `{url}` is acted on by tools, of which the policy is not told: use a model whose \
         chat template knows tools, or an environment whose actions are text (`env.actions = \"text\"`)"
    )]
    NoTools {
        /// Where the environment is.
        url: String,
    },
    /// An environment elsewhere cannot be used.
    #[error(transparent)]
    Remote(Box<ClientError>),
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
        line: u64,
        /// What is wrong.
        reason: String,
    },
    /// A run has no episodes to imitate.
    #[error(
        "`{path}` holds no episodes; give a folder that `wardian train` made, with its `rollouts/`"
    )]
    NoRollouts {
        /// The folder.
        path: PathBuf,
    },
    /// No episode is worth imitating.
    #[error("there is nothing to imitate: {summary}; lower `--min-reward`, or give further runs")]
    NothingAccepted {
        /// What became of the episodes.
        summary: String,
    },
    /// Episodes are of another vocabulary than the policy's.
    #[error(
        "the episodes of `{path}` are of another vocabulary: their token {id} is {}, that of `{model}` is \
         {}; give the model that sampled them, or one of its family, with `--model`",
        spelled(expected.as_deref()), spelled(found.as_deref())
    )]
    OtherVocabulary {
        /// The run folder.
        path: PathBuf,
        /// The first token that differs.
        id: u32,
        /// What it is to the policy.
        found: Option<String>,
        /// What it is in the episodes.
        expected: Option<String>,
        /// The policy's model.
        model: String,
    },
    /// Nothing says which tokens a run's ids are.
    #[error(
        "`{path}` was stopped before it saved a tokenizer, and its model `{model}` is no folder here: \
         imitate its episodes with that very model, `--model {model}`"
    )]
    UnknownVocabulary {
        /// The run folder.
        path: PathBuf,
        /// The run's model.
        model: String,
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
    /// A task is gone of which episodes wait to go on.
    #[error(
        "episodes of task `{id}` wait to go on, and it is not among the run's tasks any more; resume with the \
         tasks that the run had"
    )]
    PausedTask {
        /// The task.
        id: String,
    },
    /// Episodes wait to go on, which several processes do not.
    #[error(
        "{groups} groups of episodes in `{path}` wait to go on, which one process has to do: resume it by \
         itself for a step with `--set rollout.max_step_tokens` as it was"
    )]
    PausedTogether {
        /// The folder.
        path: PathBuf,
        /// How many groups.
        groups: usize,
    },
    /// The run is done.
    #[error(
        "the run in `{path}` is done; give it further steps with `--set trainer.steps=N`, or start \
         another from what it made with `--model {path}/final`"
    )]
    Finished {
        /// The folder.
        path: PathBuf,
    },
    /// A run's random numbers are named by its seed, so it cannot go on with another.
    #[error(
        "the run in `{path}` has seed {expected}, not {found}, and cannot go on with another; leave \
         `seed` out, or start a new run"
    )]
    SeedChanged {
        /// The run folder.
        path: PathBuf,
        /// The seed asked for.
        found: u64,
        /// The run's own.
        expected: u64,
    },
    /// Another process writes the run folder.
    #[error(
        "`{path}` is being written by another process; wait until it is done, or choose another folder"
    )]
    FolderLocked {
        /// The run folder.
        path: PathBuf,
    },
    /// A checkpoint is damaged, or of a run that trains something else.
    #[error(
        "the run cannot go on from `{path}`; leave its model and what is trained of it as they were, or \
         move the checkpoint away if it is damaged: the run goes on from the one before"
    )]
    Checkpoint {
        /// The checkpoint's folder.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<TrainerError>,
    },
    /// The tasks are others than those that the run began with.
    #[error(
        "the tasks to {purpose} are others than those that the run in `{path}` began with; give those, or \
         start a run with `model.path` at its `final` folder"
    )]
    TasksChanged {
        /// The run folder.
        path: PathBuf,
        /// What they are for.
        purpose: &'static str,
    },
    /// An example is longer than the model can read.
    #[error(
        "{name} has {length} tokens, more than the {limit} that the model can read; leave it out or shorten it"
    )]
    ExampleTooLong {
        /// Which example.
        name: String,
        /// Its tokens.
        length: usize,
        /// Tokens that the model has positions for.
        limit: usize,
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

    /// More processes were launched than can share the run.
    #[error(
        "`WORLD_SIZE` is {found}, more than `trainer.max_processes` = {limit}; raise that, which changes \
         the numbers of the run by rounding, or launch fewer"
    )]
    TooManyProcesses {
        /// How many were launched.
        found: usize,
        /// How many can share the run.
        limit: usize,
    },

    // === The work ===
    /// The processes cannot go on together.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The processes have other weights, though they did the same.
    #[error(
        "rank {rank} has other weights than rank 0: the model's files differ, or the machines compute \
         differently; use machines of one kind"
    )]
    WeightsDiffer {
        /// The first that has.
        rank: usize,
    },
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

    /// A step looks wrong, and the configuration says to stop at that.
    #[error("step {step}: {message}; `wardian train --resume {path}` goes on, given a remedy")]
    Anomaly {
        /// The step.
        step: usize,
        /// What was found, likely causes and what helps.
        message: String,
        /// The run folder.
        path: PathBuf,
    },

    /// The run was asked to stop.
    #[error("{}", stopped(*step, path))]
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

impl From<ClientError> for RunError {
    fn from(error: ClientError) -> Self {
        Self::Remote(Box::new(error))
    }
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

    /// Returns whether another process is lost or gave up.
    #[must_use]
    pub(super) fn is_of_other_process(&self) -> bool {
        matches!(
            self,
            Self::Collective(_) | Self::Trainer(TrainerError::Collective(_))
        )
    }

    /// Returns whether an update was refused for what it looks like.
    #[must_use]
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self, Self::Anomaly { .. })
    }

    /// Returns whether the reader can mend it by asking for something else: a key, a path, a file.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Config(_)
            | Self::Task(_)
            | Self::Actor(_)
            | Self::NoToolsForActors
            | Self::StepsForAgent { .. }
            | Self::Hub(_)
            | Self::NoTasks { .. }
            | Self::MemoryBudget { .. }
            | Self::OneTask { .. }
            | Self::NoTools { .. }
            | Self::PausedTask { .. }
            | Self::PausedTogether { .. }
            | Self::NotHeldOut { .. }
            | Self::Chat(_)
            | Self::NoChatTemplate { .. }
            | Self::Demonstration { .. }
            | Self::NoRollouts { .. }
            | Self::NothingAccepted { .. }
            | Self::OtherVocabulary { .. }
            | Self::UnknownVocabulary { .. }
            | Self::FolderInUse { .. }
            | Self::NoRun { .. }
            | Self::Finished { .. }
            | Self::SeedChanged { .. }
            | Self::FolderLocked { .. }
            | Self::Checkpoint { .. }
            | Self::TasksChanged { .. }
            | Self::ExampleTooLong { .. }
            | Self::Progress { .. }
            | Self::Device { .. }
            | Self::TooManyProcesses { .. }
            | Self::Write { .. }
            | Self::Io(_)
            | Self::Store(_) => true,
            Self::Environment { source, .. } => source.is_usage(),
            Self::Remote(error) => error.is_usage(),
            Self::Collective(error) => error.is_usage(),
            Self::Engine(error) => error.is_input(),
            Self::Model(error) => error.is_input(),
            Self::Rollout(error) => {
                !matches!(error, RolloutError::Engine(_) | RolloutError::EngineEnded)
            }
            Self::Trainer(error) => matches!(
                error,
                TrainerError::InvalidConfig { .. } | TrainerError::Io { .. }
            ),
            Self::NothingScored { .. }
            | Self::WeightsDiffer { .. }
            | Self::Anomaly { .. }
            | Self::NoPrograms
            | Self::Stopped { .. }
            | Self::Toml(_) => false,
        }
    }
}

fn spelled(token: Option<&str>) -> String {
    token.map_or_else(|| "none".to_owned(), |token| format!("`{token}`"))
}

fn stopped(step: usize, path: &Path) -> String {
    let path = path.display();
    match step {
        0 => format!("stopped before the first step; `wardian train --resume {path}` starts again"),
        _ => {
            format!("stopped after step {step}; `wardian train --resume {path}` goes on from there")
        }
    }
}
