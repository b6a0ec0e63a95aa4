//! `wardian schema`: the JSON Schema of the run file, for editors.

use std::path::PathBuf;

use clap::Args;

use crate::cli::ExitStatus;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::config::RunConfig;
use crate::run::write_atomically;

/// Arguments of `wardian schema`.
#[derive(Debug, Args)]
pub(in crate::cli) struct SchemaArgs {
    /// File to write it into, over what is there [default: standard output]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(in crate::cli) fn run(args: &SchemaArgs, printer: &Printer) -> Outcome {
    let text = serde_json::to_string_pretty(&RunConfig::schema()).map_err(Failure::internal)?;
    match &args.out {
        Some(path) => {
            write_atomically(path, format!("{text}\n").as_bytes()).map_err(Failure::usage)?;
        }
        None => printer.data(&text).map_err(Failure::internal)?,
    }
    Ok(ExitStatus::Success)
}
