//! `wardian completions` and `wardian man`: what a shell and a reader of manual pages want.

use std::path::PathBuf;

use clap::{Args, Command};
use clap_complete::Shell;
use fs_err as fs;

use crate::cli::ExitStatus;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;

/// Arguments of `wardian completions`.
#[derive(Debug, Args)]
pub(in crate::cli) struct CompletionsArgs {
    /// Shell that completes
    #[arg(value_enum)]
    shell: Shell,
}

/// Arguments of `wardian man`.
#[derive(Debug, Args)]
pub(in crate::cli) struct ManArgs {
    /// Folder of the pages, `wardian.1` and one for each command; older ones are replaced
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Prints the script that a shell reads.
pub(in crate::cli) fn completions(
    args: &CompletionsArgs,
    mut program: Command,
    printer: &Printer,
) -> Outcome {
    let name = program.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, name, &mut script);
    printer.raw(&script).map_err(Failure::internal)?;
    Ok(ExitStatus::Success)
}

/// Writes the manual pages.
pub(in crate::cli) fn man(args: &ManArgs, program: Command, printer: &Printer) -> Outcome {
    let folder = &args.folder;
    fs::create_dir_all(folder).map_err(Failure::usage)?;
    clap_mangen::generate_to(program, folder).map_err(Failure::usage)?;
    printer.note(&format!("Wrote manual pages into {}", folder.display()));
    Ok(ExitStatus::Success)
}
