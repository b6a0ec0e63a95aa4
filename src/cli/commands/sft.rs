//! `wardian sft`: imitating demonstrations.

use std::path::PathBuf;

use clap::Args;

use super::runtime::load_sandboxes;
use super::setup::{self, Loaded};
use crate::cli::ExitStatus;
use crate::cli::args::{ConfigArgs, require_empty_folder};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::cli::progress::{Progress, counted};
use crate::run::{Policy, RunEvent, SftOptions, read_demonstrations, sft};

/// Arguments of `wardian sft`.
#[derive(Debug, Args)]
pub(in crate::cli) struct SftArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Demonstrations: JSONL of `{"messages": […]}`
    #[arg(long, value_name = "FILE")]
    demos: PathBuf,
    /// Folder of the tuned model or adapter
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Begin with random weights; the model's folder needs no weights then
    #[arg(long)]
    from_scratch: bool,
    /// Optimizer steps
    #[arg(long, default_value_t = 100)]
    steps: usize,
    /// Demonstrations of one step
    #[arg(long, default_value_t = 32)]
    batch_size: usize,
    /// Highest step size; it falls along half a cosine
    #[arg(long, default_value_t = 1e-4)]
    learning_rate: f64,
    /// Steps over which the step size rises
    #[arg(long, default_value_t = 10)]
    warmup_steps: usize,
    /// Decoupled weight decay
    #[arg(long, default_value_t = 0.0)]
    weight_decay: f64,
    /// Measure the pass rate every so many steps; 0 never does
    #[arg(long, default_value_t = 0, value_name = "STEPS")]
    measure_every: usize,
    /// Stop at the first measurement with at least this pass rate
    #[arg(long, value_name = "SHARE", requires = "measure_every")]
    stop_at: Option<f64>,
}

pub(in crate::cli) fn run(args: &SftArgs, printer: &Printer) -> Outcome {
    require_empty_folder(&args.out)?;
    let stop = setup::stop_on_signals().map_err(Failure::internal)?;
    let options = SftOptions {
        steps: args.steps,
        batch_size: args.batch_size,
        learning_rate: args.learning_rate,
        warmup_steps: args.warmup_steps,
        weight_decay: args.weight_decay,
        stop_at: args.stop_at,
        measure_every: args.measure_every,
        stop: &stop,
    };
    options.check().map_err(Failure::from)?;
    let demonstrations = read_demonstrations(&args.demos).map_err(Failure::from)?;
    let resolved = setup::resolve(&args.config)?;
    let sandboxes = load_sandboxes(&resolved.config.sandbox, printer)?;
    let Loaded {
        config,
        policy,
        workbench,
        scratch: _scratch,
    } = if args.from_scratch {
        let config = resolved.config;
        let policy =
            Policy::from_scratch(config.model.path.as_ref(), config.seed).map_err(Failure::from)?;
        let workbench = setup::workbench(&config, &policy, sandboxes)?;
        Loaded {
            config,
            policy,
            workbench,
            scratch: resolved.scratch,
        }
    } else {
        setup::load(resolved, sandboxes, true)?
    };
    let mut progress = Progress::new(printer, "step", args.steps);
    let mut observe = |event: RunEvent<'_>| match event {
        RunEvent::SftStep { step, loss } => progress.update(step, &format!("· loss {loss:.3}")),
        RunEvent::Evaluated { step, report, .. } => {
            progress.finish();
            printer.note(&format!(
                "Pass rate after step {step}: {:.1} % on {}",
                report.pass_at_1 * 100.0,
                counted(report.tasks, "task")
            ));
        }
        _ => {}
    };
    let outcome = sft(
        &config,
        &options,
        &demonstrations,
        &policy,
        &workbench,
        &args.out,
        &mut observe,
    )
    .map_err(Failure::from)?;
    progress.finish();
    let out = args.out.display();
    if outcome.is_stopped {
        printer.notice(&format!(
            "Stopped after step {} of {}: {out} holds the model as it was then",
            outcome.steps, args.steps
        ));
        return Ok(ExitStatus::Stopped);
    }
    printer.note(&format!(
        "Tuned in {} on {}: {out}",
        counted(outcome.steps, "step"),
        counted(demonstrations.len(), "demonstration"),
    ));
    Ok(ExitStatus::Success)
}
