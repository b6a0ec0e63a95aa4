//! `wardian report`: a run folder as one HTML page.

use std::path::PathBuf;

use clap::Args;

use crate::cli::ExitStatus;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::report::{ReportError, write_report};

/// Arguments of `wardian report`.
#[derive(Debug, Args)]
pub(in crate::cli) struct ReportArgs {
    /// Run folder, of a run that is done, stopped or still going
    #[arg(value_name = "RUN")]
    run: PathBuf,
}

pub(in crate::cli) fn run(args: &ReportArgs, printer: &Printer) -> Outcome {
    let path = write_report(&args.run).map_err(|error| match error {
        ReportError::NoRun { .. } => Failure::usage(error),
        error => Failure::internal(error),
    })?;
    printer
        .data(&path.display().to_string())
        .map_err(Failure::internal)?;
    Ok(ExitStatus::Success)
}
