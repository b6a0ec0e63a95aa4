//! `wardian exec`: one program in a fresh sandbox.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;

use super::runtime::load_runtime;
use crate::cli::ExitStatus;
use crate::cli::args::{Format, LimitArgs, Runtime};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::sandbox::{ExecRequest, Exit};

/// Largest program or input read: what fits in a sandbox many times over.
const MAX_SOURCE_BYTES: u64 = 64 << 20;

/// Arguments of `wardian exec`.
#[derive(Debug, Args)]
pub(in crate::cli) struct ExecArgs {
    /// Program, or `-` for standard input
    file: PathBuf,
    /// Arguments of the program, after `--`
    #[arg(last = true)]
    args: Vec<String>,
    /// File that the program reads as its standard input
    #[arg(long, value_name = "FILE")]
    stdin: Option<PathBuf>,
    /// Seed of the program's randomness
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Seconds since 1970 that the program's clock starts at; the year 2026 unless given
    #[arg(long, value_name = "SECONDS")]
    start_time: Option<u64>,
    /// Python runtime to use
    #[arg(long, value_enum, default_value_t)]
    runtime: Runtime,
    /// Wheel whose package the program can import, pure Python; may be repeated
    #[arg(long = "wheel", value_name = "FILE")]
    wheels: Vec<PathBuf>,
    /// Print one JSON value instead of passing the program's output and exit code through
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    #[command(flatten)]
    limits: LimitArgs,
}

pub(in crate::cli) fn run(args: &ExecArgs, printer: &Printer) -> Outcome {
    let limits = args.limits.to_limits().map_err(Failure::usage)?;
    let request = ExecRequest {
        code: read_source(&args.file).map_err(Failure::usage)?,
        stdin: args
            .stdin
            .as_deref()
            .map_or(Ok(String::new()), read_source)
            .map_err(Failure::usage)?,
        argv: args.args.clone(),
        seed: Some(args.seed),
        start_time: args.start_time,
    };
    let runtime = load_runtime(args.runtime, &args.wheels, printer)?;
    let outcome = runtime.exec(&request, &limits).map_err(Failure::internal)?;
    if args.format == Format::Json {
        printer.json(&outcome).map_err(Failure::internal)?;
    } else {
        printer.raw(&outcome.stdout).map_err(Failure::internal)?;
        printer
            .raw_error(&outcome.stderr)
            .map_err(Failure::internal)?;
        for (name, truncated) in [
            ("output", outcome.stdout_truncated),
            ("error", outcome.stderr_truncated),
        ] {
            if truncated {
                printer.warning(&format!("standard {name} was cut at its limit"));
            }
        }
    }
    match outcome.exit {
        Exit::Exited { code } if args.format == Format::Text => Ok(ExitStatus::Guest(code)),
        exit if exit.is_success() => Ok(ExitStatus::Success),
        exit => {
            if args.format == Format::Text {
                printer.error(&exit.to_string());
            }
            Ok(ExitStatus::Failure)
        }
    }
}

/// Reads a program or its input as UTF-8, bounded.
fn read_source(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let read = if path == Path::new("-") {
        io::stdin()
            .lock()
            .take(MAX_SOURCE_BYTES + 1)
            .read_to_string(&mut text)
    } else {
        fs_err::File::open(path)?
            .take(MAX_SOURCE_BYTES + 1)
            .read_to_string(&mut text)
    };
    let size = read.with_context(|| format!("reading `{}` as UTF-8 text", path.display()))?;
    anyhow::ensure!(
        size as u64 <= MAX_SOURCE_BYTES,
        "`{}` is larger than {MAX_SOURCE_BYTES} bytes",
        path.display()
    );
    Ok(text)
}
