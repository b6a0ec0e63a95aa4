//! `wardian runtime`: the cached Python runtime.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, Subcommand};

use crate::cli::ExitStatus;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::cli::progress::human_duration;
use crate::config::SandboxConfig;
use crate::sandbox::{
    self, CacheFolder, Guest, RuntimeOptions, Sandbox, SandboxError, WasmRuntime, WorkerOptions,
    Workers,
};

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
        RuntimeCommand::Build { wheels } => {
            let started = Instant::now();
            load_runtime(wheels, printer)?;
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
pub(super) fn load_runtime(wheels: &[PathBuf], printer: &Printer) -> Result<WasmRuntime, Failure> {
    let options = RuntimeOptions {
        guest: Guest::python_with_wheels(wheels).map_err(Failure::usage)?,
        ..RuntimeOptions::default()
    };
    WasmRuntime::load(&options, |progress| {
        printer.note(&progress.to_string());
    })
    .map_err(|error| failure(error, wheels))
}

/// Prepares the sandbox of a run, in this process or in workers.
pub(super) fn load_sandbox(
    config: &SandboxConfig,
    printer: &Printer,
) -> Result<Arc<dyn Sandbox>, Failure> {
    let runtime = RuntimeOptions {
        guest: Guest::python_with_wheels(&config.wheels).map_err(Failure::usage)?,
        restore: config.restore,
        audit_every: NonZeroU32::new(config.audit_every),
        meter: config.meter,
        ..RuntimeOptions::default()
    };
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
    sandbox.map_err(|error| failure(error, &config.wheels))
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
