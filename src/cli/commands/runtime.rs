//! `wardian runtime`: the cached Python runtime.

use std::time::Instant;

use clap::{Args, Subcommand};

use crate::cli::ExitStatus;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::cli::progress::human_duration;
use crate::sandbox::{CacheFolder, RuntimeOptions, WasmRuntime};

/// Arguments of `wardian runtime`.
#[derive(Debug, Args)]
pub(in crate::cli) struct RuntimeArgs {
    #[command(subcommand)]
    command: RuntimeCommand,
}

#[derive(Debug, Subcommand)]
enum RuntimeCommand {
    /// Prepare the runtime now, as an image build would
    Build,
    /// Print the folder of the cached runtime
    Path,
}

pub(in crate::cli) fn run(args: &RuntimeArgs, printer: &Printer) -> Outcome {
    let path = || match CacheFolder::User.path() {
        Some(path) => path.display().to_string(),
        None => "none: set `WARDIAN_CACHE` or `HOME`".to_owned(),
    };
    match args.command {
        RuntimeCommand::Build => {
            let started = Instant::now();
            load_runtime(printer)?;
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

/// Loads the Python runtime, telling what it does where that takes long.
pub(super) fn load_runtime(printer: &Printer) -> Result<WasmRuntime, Failure> {
    WasmRuntime::load(&RuntimeOptions::default(), |progress| {
        printer.note(&progress.to_string());
    })
    .map_err(Failure::internal)
}
