//! `wardian eval`: pass@k of a model on tasks.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use serde::Serialize;

use super::eval_endpoint::{self, EndpointArgs, EndpointReport};
use super::setup::{self, Loaded};
use crate::cli::ExitStatus;
use crate::cli::args::{ConfigArgs, Format};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::cli::progress::{Progress, counted};
use crate::collective::Solo;
use crate::config::RunConfig;
use crate::eval::{Difference, EvalReport};
use crate::run::{RunEvent, by_environment, evaluate, evaluation_tasks, new_engine};

/// Arguments of `wardian eval`.
#[derive(Debug, Args)]
pub(in crate::cli) struct EvalArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Samples of each task; above 1 they are drawn at temperature 1, unless a run file or `--set eval.temperature`
    /// says otherwise
    #[arg(long, value_name = "N")]
    samples: Option<usize>,
    /// The k of each pass@k to report
    #[arg(long, value_name = "K", value_delimiter = ',')]
    k: Vec<u32>,
    /// Compare with an earlier result, as `--format json` printed it
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// How to print the result
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    #[command(flatten)]
    of_endpoint: EndpointArgs,
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
    let against = args.against.as_deref().map(read_report).transpose()?;
    let (config, report, endpoint) = match args.of_endpoint.endpoint() {
        Some(url) => {
            let resolved = setup::resolve_for_endpoint(&config_args)?;
            let model = config_args.model.as_deref();
            match eval_endpoint::measure(&args.of_endpoint, url, model, resolved, printer)? {
                Some((config, report, endpoint)) => (config, report, Some(endpoint)),
                None => return Ok(ExitStatus::Stopped),
            }
        }
        None => match measure(&config_args, printer)? {
            Some((config, report)) => (config, report, None),
            None => return Ok(ExitStatus::Stopped),
        },
    };
    let difference = match &against {
        None => None,
        Some((path, before)) => {
            let difference = report.difference(before, config.seed);
            Some(difference.ok_or_else(|| {
                let message = format!("`{}` has none of these tasks", path.display());
                Failure::usage(anyhow::anyhow!(message))
            })?)
        }
    };
    if args.format == Format::Json {
        let whole = Whole {
            report: &report,
            endpoint: endpoint.as_ref(),
            difference: difference.as_ref(),
        };
        printer.json(&whole).map_err(Failure::internal)?;
        return Ok(ExitStatus::Success);
    }
    for (k, share) in &report.pass_at {
        printer
            .data(&format!("pass@{k}  {:.1} %", share * 100.0))
            .map_err(Failure::internal)?;
    }
    printer.note(&format!(
        "pass@1 has the 95 % interval {:.1} to {:.1}, over {} with {} each at temperature {}",
        report.ci95[0] * 100.0,
        report.ci95[1] * 100.0,
        counted(report.tasks, "task"),
        counted(config.eval.samples, "sample"),
        config.eval.temperature,
    ));
    for (k, interval) in report.pass_at_ci95.iter().filter(|(k, _)| **k > 1) {
        printer.note(&format!(
            "pass@{k} has the 95 % interval {:.1} to {:.1}, over {}",
            interval[0] * 100.0,
            interval[1] * 100.0,
            counted(
                report.pass_at_tasks.get(k).copied().unwrap_or_default(),
                "task"
            ),
        ));
    }
    for (name, report) in by_environment(&config, &report) {
        printer.note(&format!(
            "{name}: pass@1 {:.1} %, {:.1} to {:.1}, over {}",
            report.pass_at_1 * 100.0,
            report.ci95[0] * 100.0,
            report.ci95[1] * 100.0,
            counted(report.tasks, "task"),
        ));
    }
    if report.unscorable > 0 {
        printer.note(&format!(
            "{} could not be scored, by no fault of the model, and count in nothing",
            counted(
                usize::try_from(report.unscorable).unwrap_or(usize::MAX),
                "sample"
            )
        ));
    }
    if let Some(Difference {
        pass_at_1,
        ci95,
        p_value,
        tasks,
    }) = difference
    {
        printer.note(&format!(
            "pass@1 is {:+.1} points from before (95 % interval {:+.1} to {:+.1}, p = {p_value:.4}), over {} that \
             both have",
            pass_at_1 * 100.0,
            ci95[0] * 100.0,
            ci95[1] * 100.0,
            counted(tasks, "task"),
        ));
    }
    if let Some(endpoint) = endpoint {
        printer.note(&endpoint.describe());
    }
    Ok(ExitStatus::Success)
}

/// All that is known, as JSON.
#[derive(Serialize)]
struct Whole<'a> {
    #[serde(flatten)]
    report: &'a EvalReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    endpoint: Option<&'a EndpointReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    difference: Option<&'a Difference>,
}

/// Reads an earlier result.
fn read_report(path: &Path) -> Result<(PathBuf, EvalReport), Failure> {
    let text = fs_err::read_to_string(path).map_err(Failure::usage)?;
    let report = serde_json::from_str(&text).map_err(|error| {
        let path = path.display();
        let message = format!("`{path}` is not what `eval --format json` prints: {error}");
        Failure::usage(anyhow::anyhow!(message))
    })?;
    Ok((path.to_owned(), report))
}

/// Measures a model that is loaded here; returns nothing where it was stopped.
fn measure(
    args: &ConfigArgs,
    printer: &Printer,
) -> Result<Option<(RunConfig, EvalReport)>, Failure> {
    // Tasks that are named are measured on, whole; training tasks are not needed.
    let resolved = setup::resolve_for_eval(args)?;
    let programs = setup::programs(&resolved.config, printer)?;
    let Loaded {
        config,
        policy,
        workbench,
        scratch: _scratch,
    } = setup::load(resolved, programs, false)?;
    let tasks = evaluation_tasks(&config).map_err(Failure::from)?;
    let mut engine = new_engine(&config, &policy).map_err(Failure::from)?;
    let stop = match (tasks.tasks().iter()).any(|task| task.repository.is_some()) {
        // Actors are ended in good order.
        true => setup::stop_on_signals().map_err(Failure::internal)?,
        // A signal ends it as it ends most programs: nothing is lost.
        false => Arc::new(AtomicBool::new(false)),
    };
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
        &stop,
        &Solo,
        &mut observe,
    );
    progress.finish();
    match report {
        Err(error) if error.is_stop() => Ok(None),
        report => Ok(Some((config, report.map_err(Failure::from)?))),
    }
}
