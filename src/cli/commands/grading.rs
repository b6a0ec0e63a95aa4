//! What `grade` and `task validate` share: a task set and its graders.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;

use super::runtime::load_runtime;
use crate::cli::args::{LimitArgs, Runtime};
use crate::cli::failure::Failure;
use crate::cli::printer::Printer;
use crate::grader::{GradeLimits, GraderRegistry, RewardTerms};
use crate::sandbox::Sandbox;
use crate::task::{GraderChoice, Split, TaskOptions};

/// A task set, and what grades it.
#[derive(Debug, Args)]
pub(super) struct GradingArgs {
    /// Tasks: a JSON, JSONL or parquet file, or a dataset folder
    #[arg(long, value_name = "FILE")]
    pub(super) tasks: PathBuf,
    /// Split: of a folder its files, of a file MBPP's ranges of ids
    #[arg(long, value_parser = parse_split)]
    split: Option<Split>,
    /// Use MBPP's challenge tests, too
    #[arg(long)]
    challenge_tests: bool,
    /// Grader of every task: a name, or a Python file with `def grade(candidate, task)` [default:
    /// what each task says]
    #[arg(long, value_name = "NAME_OR_FILE")]
    grader: Option<String>,
    /// Wheel whose package submissions and tests can import, pure Python; may be repeated
    #[arg(long = "wheel", value_name = "FILE")]
    wheels: Vec<PathBuf>,
    #[command(flatten)]
    limits: LimitArgs,
}

impl GradingArgs {
    /// Returns how the tasks are read.
    pub(super) fn task_options(&self, visible_tests: usize) -> Result<TaskOptions, Failure> {
        let grader = self.grader.as_deref().map(GraderChoice::read).transpose();
        Ok(TaskOptions {
            split: self.split,
            visible_tests,
            challenge_tests: self.challenge_tests,
            grader: grader.map_err(Failure::usage)?,
            remote: false,
        })
    }

    /// Loads the runtime and returns the graders, and the fuel of a submission.
    pub(super) fn graders(&self, printer: &Printer) -> Result<(GraderRegistry, u64), Failure> {
        let defaults = GradeLimits::default().candidate;
        let limits = self.limits.over(&defaults).map_err(Failure::usage)?;
        let sandbox: Arc<dyn Sandbox> =
            Arc::new(load_runtime(Runtime::Python, &self.wheels, printer)?);
        let graders = GraderRegistry::standard(&sandbox, &GradeLimits::for_candidate(&limits));
        Ok((graders, limits.fuel))
    }
}

fn parse_split(text: &str) -> Result<Split, String> {
    let names = Split::ALL.map(Split::as_str);
    let found = Split::ALL.into_iter().find(|split| split.as_str() == text);
    found.ok_or_else(|| format!("there are {}", names.join(", ")))
}

/// Reads reward terms from `KEY=VALUE`s, the keys of a run file's `[reward]`.
pub(super) fn reward_terms(settings: &[String]) -> Result<RewardTerms, Failure> {
    let text: String = settings
        .iter()
        .map(|setting| format!("{setting}\n"))
        .collect();
    toml::from_str(&text).map_err(Failure::usage)
}
