//! `wardian export`: a model as a Hugging Face folder, with its adapter merged.

use std::path::PathBuf;

use candle_core::DType;
use clap::{Args, ValueEnum};

use super::setup;
use crate::cli::ExitStatus;
use crate::cli::args::{ModelArgs, require_empty_folder};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;

/// Arguments of `wardian export`.
#[derive(Debug, Args)]
pub(in crate::cli) struct ExportArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Folder of the exported model
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Number type of the weights
    #[arg(long, value_enum, default_value_t)]
    dtype: ExportDtype,
}

/// A type that weights are stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum ExportDtype {
    /// What most models are published in
    #[default]
    Bf16,
    /// 16 bits with a narrow range
    F16,
    /// As trained on a CPU
    F32,
}

impl ExportDtype {
    fn get(self) -> DType {
        match self {
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
            Self::F32 => DType::F32,
        }
    }
}

pub(in crate::cli) fn run(args: &ExportArgs, printer: &Printer) -> Outcome {
    require_empty_folder(&args.out)?;
    let loaded = setup::load_model(&args.model)?;
    loaded
        .policy
        .export(&args.out, args.dtype.get())
        .map_err(Failure::from)?;
    printer.note("Wrote a Hugging Face folder, any adapter merged:");
    printer
        .data(&args.out.display().to_string())
        .map_err(Failure::internal)?;
    Ok(ExitStatus::Success)
}
