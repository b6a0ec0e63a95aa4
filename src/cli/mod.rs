//! The command line: arguments, commands and everything printed for people.
//!
//! Data goes to standard output, everything else to standard error. The exit status is an
//! [`ExitStatus`]; a broken pipe is success.

mod args;
mod commands;
#[cfg(test)]
mod documented;
mod failure;
mod log;
mod printer;
mod progress;
mod telemetry;
mod waiting;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

use self::args::GlobalArgs;
use self::failure::report;
use self::printer::Printer;

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitStatus {
    /// Done.
    Success,
    /// The work ran and failed: a program exited non-zero, a limit was met, a grade was not 1.
    Failure,
    /// Bad usage, configuration or input.
    Usage,
    /// Our fault.
    Internal,
    /// Stopped by a signal with its work saved: start it again to go on.
    Stopped,
    /// The exit code of the program that `exec` ran.
    Guest(u32),
}

impl ExitStatus {
    /// The exit code of [`ExitStatus::Stopped`]: `EX_TEMPFAIL` of sysexits.
    const STOPPED: i32 = 75;
}

impl From<ExitStatus> for ExitCode {
    fn from(status: ExitStatus) -> Self {
        Self::from(match status {
            ExitStatus::Success => 0,
            ExitStatus::Failure => 1,
            ExitStatus::Usage => 2,
            ExitStatus::Internal => 3,
            ExitStatus::Stopped => 75,
            ExitStatus::Guest(code) => u8::try_from(code).unwrap_or(u8::MAX),
        })
    }
}

/// Train, evaluate and grade language-model agents on sandboxed Python.
#[derive(Debug, Parser)]
#[command(name = "wardian", version, propagate_version = true)]
struct Cli {
    #[command(flatten)]
    global: GlobalArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model with GRPO on sandboxed Python tasks
    Train(commands::train::TrainArgs),
    /// Fine-tune a model on demonstrations, as a cold start for `train`
    Sft(commands::sft::SftArgs),
    /// Measure a model's pass@k on a task set
    Eval(commands::eval::EvalArgs),
    /// Write the report of a run: curves, before and after, episodes token by token
    Report(commands::report::ReportArgs),
    /// List the runs of a folder: how they stand and what they came to
    Runs(commands::runs::RunsArgs),
    /// Compare two runs: settings, pass rates, metrics and time
    Compare(commands::runs::CompareArgs),
    /// Write a run's episodes as other tools read them, one file each
    Trajectories(commands::trajectories::TrajectoriesArgs),
    /// Write a model as a Hugging Face folder, with its adapter merged
    Export(commands::export::ExportArgs),
    /// Show where the memory of a run would go, without loading anything
    Plan(commands::plan::PlanArgs),
    /// Measure a minute of a run, and say what the whole of it would take here
    Calibrate(commands::calibrate::CalibrateArgs),
    /// Measure how fast a model runs here, beside a server if one is named
    Bench(commands::bench::BenchArgs),
    /// Talk to a model in the terminal, which may run Python in a sandbox
    Chat(commands::chat::ChatArgs),
    /// Serve a model with the OpenAI API, an environment over OpenEnv's protocol, or a dashboard of runs
    Serve(commands::serve::ServeArgs),
    /// Put agents of third parties in front of a model and capture their calls as tokens
    Proxy(commands::proxy::ProxyArgs),
    /// Run one Python program in a fresh sandbox
    Exec(commands::exec::ExecArgs),
    /// Grade submissions against a task set
    Grade(commands::grade::GradeArgs),
    /// Work with task sets
    Task(commands::task::TaskArgs),
    /// Write an annotated run file for a recipe, or list the recipes
    Init(commands::init::InitArgs),
    /// Write the JSON Schema of the run file, for editors
    Schema(commands::schema::SchemaArgs),
    /// Check this machine, or what a run needs of it, and say what mends what is wrong
    Doctor(commands::doctor::DoctorArgs),
    /// Prepare the cached Python runtime, or show where it is
    Runtime(commands::runtime::RuntimeArgs),
    /// Write the completions of a shell
    Completions(commands::completions::CompletionsArgs),
    /// Write manual pages
    Man(commands::completions::ManArgs),
    /// Serve commands and files of the machine that this runs in, for actors elsewhere
    Sandboxd(commands::sandboxd::SandboxdArgs),
    /// Run guests for the process that starts this one
    #[command(hide = true)]
    SandboxWorker,
}

/// Parses the arguments, runs the command and reports its failure.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // clap's own exit codes are 0 for help and 2 for usage, which are ours too.
            let code = error.exit_code();
            let _ = error.print();
            return ExitCode::from(u8::try_from(code).unwrap_or(2));
        }
    };
    let _telemetry = telemetry::init(&cli.global);
    let printer = Printer::new(cli.global.quiet);
    progress::show_downloads(&printer);
    let outcome = match cli.command {
        Command::Train(args) => commands::train::run(&args, &printer),
        Command::Sft(args) => commands::sft::run(&args, &printer),
        Command::Eval(args) => commands::eval::run(&args, &printer),
        Command::Report(args) => commands::report::run(&args, &printer),
        Command::Runs(args) => commands::runs::list(&args, &printer),
        Command::Compare(args) => commands::runs::compare(&args, &printer),
        Command::Trajectories(args) => commands::trajectories::run(&args, &printer),
        Command::Export(args) => commands::export::run(&args, &printer),
        Command::Plan(args) => commands::plan::run(&args, &printer),
        Command::Calibrate(args) => commands::calibrate::run(&args, &printer),
        Command::Bench(args) => commands::bench::run(&args, &printer),
        Command::Chat(args) => commands::chat::run(&args, &printer),
        Command::Serve(args) => commands::serve::run(&args, &printer),
        Command::Proxy(args) => commands::proxy::run(&args, &printer),
        Command::Exec(args) => commands::exec::run(&args, &printer),
        Command::Grade(args) => commands::grade::run(&args, &printer),
        Command::Task(args) => commands::task::run(&args, &printer),
        Command::Init(args) => commands::init::run(&args, &printer),
        Command::Schema(args) => commands::schema::run(&args, &printer),
        Command::Completions(args) => {
            commands::completions::completions(&args, Cli::command(), &printer)
        }
        Command::Man(args) => commands::completions::man(&args, Cli::command(), &printer),
        Command::Doctor(args) => commands::doctor::run(&args, &printer),
        Command::Runtime(args) => commands::runtime::run(&args, &printer),
        Command::Sandboxd(args) => commands::sandboxd::run(&args, &printer),
        Command::SandboxWorker => commands::sandbox_worker::run(),
    };
    match outcome {
        Ok(status) => status.into(),
        Err(failure) => report(&failure, &printer).into(),
    }
}
