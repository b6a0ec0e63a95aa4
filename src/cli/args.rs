//! Arguments that several commands share.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytesize::ByteSize;
use clap::{Args, ValueEnum};

use super::failure::Failure;
use super::log::LogFormat;
use crate::address::shown;
use crate::http::tls::TlsFiles;
use crate::sandbox::{Limits, RuntimeName, SandboxError};

/// Options of every command.
#[derive(Debug, Args)]
pub(super) struct GlobalArgs {
    /// Print nothing but data and errors
    #[arg(short, long, global = true)]
    pub(super) quiet: bool,
    /// Log more: -v info, -vv debug, -vvv trace
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(super) verbose: u8,
    /// How log lines are written
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        value_name = "FORMAT",
        env = "WARDIAN_LOG_FORMAT"
    )]
    pub(super) log_format: LogFormat,
}

/// How a command prints its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(super) enum Format {
    /// For people
    #[default]
    Text,
    /// One JSON value
    Json,
}

/// Which Python runtime programs run in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(super) enum Runtime {
    /// The embedded CPython
    #[default]
    Python,
    /// A larger CPython with numpy, pandas and scipy, once `runtime build` has added it
    Science,
}

impl From<Runtime> for RuntimeName {
    fn from(runtime: Runtime) -> Self {
        match runtime {
            Runtime::Python => Self::Python,
            Runtime::Science => Self::Science,
        }
    }
}

/// The run file and what overrides it.
#[derive(Debug, Clone, Args)]
pub(super) struct ConfigArgs {
    /// Run file (TOML); keys it does not name have their defaults
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// Model: a Hugging Face folder, a GGUF file or a hub id [default: the carried starter model]
    #[arg(long, value_name = "PATH_OR_HUB_ID")]
    pub(super) model: Option<String>,
    /// Tasks: a JSON, JSONL or parquet file, a dataset folder or a hub id [default: the carried
    /// tasks]
    #[arg(long, value_name = "PATH_OR_HUB_ID")]
    pub(super) tasks: Option<String>,
    /// Seed of everything random
    #[arg(long)]
    pub(super) seed: Option<u64>,
    /// Override one key of the run file, such as `trainer.steps=20`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(super) overrides: Vec<String>,
}

/// A model to talk to.
#[derive(Debug, Clone, Args)]
pub(super) struct ModelArgs {
    /// Model: a Hugging Face folder, a GGUF file, a hub id or a run's adapter folder [default: the
    /// carried starter model]
    #[arg(long, value_name = "SOURCE")]
    pub(super) model: Option<String>,
    /// Override one key of the run file, such as `model.dtype="bf16"`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(super) overrides: Vec<String>,
}

/// Refuses a folder that holds something: nothing is overwritten.
pub(super) fn require_empty_folder(folder: &Path) -> Result<(), Failure> {
    if folder.exists() && !folder.is_dir() {
        let message = format!("`{}` is no folder; choose another name", folder.display());
        return Err(Failure::usage(anyhow::anyhow!(message)));
    }
    // Now rather than when there is something to lose.
    if let Some(parent) = folder.parent() {
        fs_err::create_dir_all(parent).map_err(Failure::usage)?;
    }
    let is_empty = !folder.is_dir()
        || (fs_err::read_dir(folder).map_err(Failure::usage)?)
            .next()
            .is_none();
    if is_empty {
        return Ok(());
    }
    let message = format!("`{}` is not empty; choose another folder", folder.display());
    Err(Failure::usage(anyhow::anyhow!(message)))
}

/// What lets the interpreter start and a small program run.
const MIN_MEMORY: ByteSize = ByteSize::mib(64);

/// Limits of a sandboxed program.
#[derive(Debug, Clone, Args)]
pub(super) struct LimitArgs {
    /// Memory of the whole interpreter
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    memory: ByteSize,
    /// Fuel: units of work, about one WebAssembly operator each [default: 20 billion for a program or a step, 50
    /// billion for a submission]
    #[arg(long, value_name = "N")]
    fuel: Option<u64>,
    /// Wall-clock time, such as `2s` or `500ms` [default: 60s for a program, 30s for a step of `serve --env`,
    /// 120s for a submission]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    timeout: Option<Duration>,
}

impl LimitArgs {
    /// Returns the limits asked for, over those of a program.
    pub(super) fn to_limits(&self) -> Result<Limits, SandboxError> {
        self.over(&Limits::default())
    }

    /// Returns the limits asked for, and `defaults` where none is.
    pub(super) fn over(&self, defaults: &Limits) -> Result<Limits, SandboxError> {
        let limits = Limits {
            memory: self.memory,
            fuel: self.fuel.unwrap_or(defaults.fuel),
            deadline: self.timeout.unwrap_or(defaults.deadline),
            ..defaults.clone()
        };
        limits.validate()?;
        if limits.memory < MIN_MEMORY {
            return Err(SandboxError::InvalidLimit {
                name: "memory",
                reason: format!(
                    "must be at least {MIN_MEMORY}, of which the interpreter takes half, is {}",
                    limits.memory
                ),
            });
        }
        Ok(limits)
    }
}

/// Refuses an address of another scheme.
pub(super) fn require_http(option: &str, url: &str) -> Result<(), Failure> {
    if url.starts_with("http://") || url.starts_with("https://") {
        return Ok(());
    }
    let url = shown(url);
    let message = format!("`{option}` is `{url}`, not an `http://` or `https://` address");
    Err(Failure::usage(anyhow::anyhow!(message)))
}

/// Refuses certificates for an address that is spoken to without TLS; `prefix` begins their options.
pub(super) fn require_tls_for(
    files: &TlsFiles,
    prefix: &str,
    option: &str,
    url: &str,
) -> Result<(), Failure> {
    if files.is_empty() || url.starts_with("https://") {
        return Ok(());
    }
    let given = match files.ca {
        Some(_) => "ca",
        None => "cert",
    };
    let url = shown(url);
    let message = format!(
        "`{prefix}{given}` is of no use with `{option} {url}`: give an `https://` address, or leave it out"
    );
    Err(Failure::usage(anyhow::anyhow!(message)))
}

/// Reads `2s`, `500ms` or `1m 30s`.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let duration: jiff::SignedDuration = text
        .parse()
        .map_err(|error| format!("expected a time such as `2s` or `500ms`: {error}"))?;
    Duration::try_from(duration).map_err(|_| "a time cannot be negative".to_owned())
}
