//! `wardian serve --env`: environments over OpenEnv's protocol.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;

use super::runtime::load_runtime;
use crate::cli::args::{LimitArgs, Runtime, parse_duration};
use crate::cli::failure::Failure;
use crate::cli::printer::Printer;
use crate::env::ToolEnvironmentConfig;
use crate::grader::{GradeLimits, GraderRegistry, RewardTerms};
use crate::openenv::{Environment, Mode, OpenEnvError, Server, ServerConfig};
use crate::sandbox::{Limits, Sandbox};
use crate::task::{TaskOptions, TaskSet};

/// The environments that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum EnvironmentName {
    /// CPython whose state persists across the steps of an episode
    Python,
    /// OpenEnv's `coding_env`, emulated: echo of the last expression, its reward, its imports
    #[value(name = "coding_env")]
    CodingEnv,
    /// The tasks of `--tasks`, with tools and a grader
    Tasks,
}

/// Which routes there are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
enum ModeName {
    /// All
    #[default]
    Simulation,
    /// All but `/reset`, `/step` and `/state`
    Production,
}

/// Arguments of `wardian serve --env`.
#[derive(Debug, Args)]
pub(super) struct EnvArgs {
    /// Serve an environment over OpenEnv's protocol instead of a model
    #[arg(long, value_enum, value_name = "NAME", conflicts_with_all = ["model", "overrides"])]
    pub(super) env: Option<EnvironmentName>,
    /// With `--env tasks`: a JSON, JSONL or parquet file, or a dataset folder
    #[arg(long, value_name = "FILE", requires = "env")]
    tasks: Option<PathBuf>,
    /// With `--env tasks`: tests of each task that the policy is shown
    #[arg(long, value_name = "N", default_value_t = 1)]
    visible_tests: usize,
    /// With `--env tasks`: tool calls of an episode
    #[arg(long, value_name = "N", default_value_t = 6)]
    max_turns: usize,
    /// With `--env`: whether there are routes that control an environment without a session
    #[arg(
        long,
        value_enum,
        value_name = "MODE",
        ignore_case = true,
        env = "OPENENV_MODE",
        default_value_t
    )]
    mode: ModeName,
    /// With `--env`: sessions at a time
    #[arg(long, value_name = "N", default_value_t = 4096)]
    max_sessions: usize,
    /// With `--env`: steps that may run long at a time
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_running_steps: usize,
    /// With `--env`: time after which an idle session's interpreter is put to rest
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    park_after: Duration,
    /// With `--env`: time that a session without a socket is kept
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    session_timeout: Duration,
    /// With `--env python`: Python runtime to use
    #[arg(long, value_enum, default_value_t)]
    runtime: Runtime,
    /// With `--env`: wheel whose package programs can import, pure Python; may be repeated
    #[arg(long = "wheel", value_name = "FILE")]
    wheels: Vec<PathBuf>,
    #[command(flatten)]
    limits: LimitArgs,
}

impl EnvArgs {
    /// Prepares the server of `name`; `config` has what servers of models have, too.
    pub(super) fn server(
        &self,
        name: EnvironmentName,
        config: ServerConfig,
        printer: &Printer,
    ) -> Result<Server, Failure> {
        let defaults = Limits {
            deadline: Duration::from_secs(30),
            ..Limits::default()
        };
        let limits = self.limits.over(&defaults).map_err(Failure::usage)?;
        let usage = |message: &str| Failure::usage(anyhow::anyhow!(message.to_owned()));
        if name != EnvironmentName::Python && self.runtime != Runtime::Python {
            return Err(usage("`--runtime` is for `--env python`"));
        }
        if (name == EnvironmentName::Tasks) != self.tasks.is_some() {
            return Err(usage("`--env tasks` and `--tasks` go together"));
        }
        let tasks = match &self.tasks {
            Some(path) => Some(self.open_tasks(path)?),
            None => None,
        };
        let runtime = load_runtime(self.runtime, &self.wheels, printer)?;
        let environment = match (name, tasks) {
            (EnvironmentName::CodingEnv, _) => Environment::CodingEnv { runtime, limits },
            (EnvironmentName::Tasks, Some((name, tasks))) => {
                let sandbox: Arc<dyn Sandbox> = Arc::new(runtime);
                let grade_limits = GradeLimits::for_candidate(&limits);
                let graders = GraderRegistry::standard(&sandbox, &grade_limits);
                let config = ToolEnvironmentConfig {
                    system_prompt: None,
                    offers_tools: true,
                    max_turns: self.max_turns,
                    max_output_chars: 4096,
                    grade_fuel: limits.fuel,
                    limits,
                    reward: RewardTerms::default(),
                };
                Environment::Tasks {
                    name,
                    tasks,
                    sandbox,
                    grader: Arc::new(graders),
                    config: Arc::new(config),
                }
            }
            _ => Environment::Python { runtime, limits },
        };
        let config = ServerConfig {
            mode: match self.mode {
                ModeName::Simulation => Mode::Simulation,
                ModeName::Production => Mode::Production,
            },
            max_sessions: self.max_sessions,
            max_running: self.max_running_steps,
            park_after: self.park_after,
            session_timeout: self.session_timeout,
            ..config
        };
        Server::new(environment, config).map_err(|error| match error {
            OpenEnvError::NoTasks { .. } => Failure::usage(error),
            error => Failure::internal(error),
        })
    }

    /// Opens the tasks; their file's name is the environment's.
    fn open_tasks(&self, path: &std::path::Path) -> Result<(String, TaskSet), Failure> {
        let options = TaskOptions {
            visible_tests: self.visible_tests,
            ..TaskOptions::default()
        };
        let tasks = TaskSet::open_with(path, &options).map_err(Failure::usage)?;
        if let Some(task) = (tasks.tasks().iter()).find(|task| task.repository.is_some()) {
            return Err(Failure::usage(anyhow::anyhow!(
                "task `{}` of `{}` needs a sandbox with a shell, which is not served; `wardian train` and `wardian \
                 eval` take it",
                task.id,
                path.display()
            )));
        }
        let stem = path.file_stem().map(|stem| stem.to_string_lossy());
        let name: String = stem
            .unwrap_or_default()
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect();
        Ok((name, tasks))
    }
}
