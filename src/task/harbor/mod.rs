//! Tasks in the format of Harbor: a folder each, with its own sandbox and its own verifier.
//!
//! [`TaskConfig`] is what `task.toml` says, [`HarborTask`] the whole folder, checked. [`Registry`]
//! finds the tasks of a data set by name and [`download`] brings them here. How a verifier's reward
//! is read is said in [`crate::grader`].

mod checks;
mod config;
mod download;
mod error;
mod git;
mod job;
mod lax;
mod layout;
mod registry;
mod settle;
mod steps;

pub use config::{
    AgentConfig, Artifact, ArtifactConfig, Author, CollectConfig, EnvironmentConfig, Healthcheck,
    McpServer, MinReward, NetworkMode, PackageInfo, SCHEMA_VERSION, SolutionConfig, StepConfig,
    StepRewards, TaskConfig, TaskOs, TpuSpec, User, VerifierConfig, VerifierMode,
};
pub use download::{Downloaded, download};
pub use error::HarborError;
pub use layout::{HarborPart, HarborTask};
pub use registry::{DatasetReference, DatasetSpec, Registry, RegistryTask};
