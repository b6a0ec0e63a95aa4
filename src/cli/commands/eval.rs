//! `wardian eval`: pass@k of a model on tasks.

use std::sync::atomic::AtomicBool;

use clap::Args;

use super::runtime::load_sandboxes;
use super::setup::{self, Loaded};
use crate::cli::ExitStatus;
use crate::cli::args::{ConfigArgs, Format};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::cli::progress::{Progress, counted};
use crate::collective::Solo;
use crate::run::{RunEvent, by_environment, evaluate, evaluation_tasks, new_engine};

/// Arguments of `wardian eval`.
#[derive(Debug, Args)]
pub(in crate::cli) struct EvalArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Samples of each task
    #[arg(long, value_name = "N")]
    samples: Option<usize>,
    /// The k of each pass@k to report
    #[arg(long, value_name = "K", value_delimiter = ',')]
    k: Vec<u32>,
    /// How to print the result
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(in crate::cli) fn run(args: &EvalArgs, printer: &Printer) -> Outcome {
    let mut config_args = args.config.clone();
    if let Some(samples) = args.samples {
        // Greedy samples are all alike; a run file's own temperature stands.
        if samples > 1 && config_args.config.is_none() {
            config_args
                .overrides
                .insert(0, "eval.temperature=1.0".to_owned());
        }
        config_args
            .overrides
            .push(format!("eval.samples={samples}"));
    }
    if !args.k.is_empty() {
        config_args.overrides.push(format!("eval.k={:?}", args.k));
    }
    // Tasks that are named are measured on, whole; training tasks are not needed.
    let resolved = setup::resolve_for_eval(&config_args)?;
    let sandboxes = load_sandboxes(&resolved.config.sandbox, printer)?;
    let Loaded {
        config,
        policy,
        workbench,
        scratch: _scratch,
    } = setup::load(resolved, sandboxes, false)?;
    let tasks = evaluation_tasks(&config).map_err(Failure::from)?;
    let mut engine = new_engine(&config, &policy).map_err(Failure::from)?;
    let mut progress = Progress::new(printer, "measuring", tasks.len() * config.eval.samples);
    let mut observe = |event: RunEvent<'_>| {
        if let RunEvent::Evaluating { done, .. } = event {
            progress.update(done, "");
        }
    };
    let report = evaluate(
        &config,
        &policy,
        &workbench,
        &mut engine,
        &tasks,
        // A signal ends it as it ends most programs: nothing is lost.
        &AtomicBool::new(false),
        &Solo,
        &mut observe,
    )
    .map_err(Failure::from)?;
    progress.finish();
    if args.format == Format::Json {
        printer.json(&report).map_err(Failure::internal)?;
        return Ok(ExitStatus::Success);
    }
    for (k, share) in &report.pass_at {
        printer
            .data(&format!("pass@{k}  {:.1} %", share * 100.0))
            .map_err(Failure::internal)?;
    }
    printer.note(&format!(
        "pass@1 has the 95 % interval {:.1} to {:.1}, over {} with {} each",
        report.ci95[0] * 100.0,
        report.ci95[1] * 100.0,
        counted(report.tasks, "task"),
        counted(config.eval.samples, "sample"),
    ));
    for (name, report) in by_environment(&config, &report) {
        printer.note(&format!(
            "{name}: pass@1 {:.1} %, {:.1} to {:.1}, over {}",
            report.pass_at_1 * 100.0,
            report.ci95[0] * 100.0,
            report.ci95[1] * 100.0,
            counted(report.tasks, "task"),
        ));
    }
    Ok(ExitStatus::Success)
}
