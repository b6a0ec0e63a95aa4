//! `wardian train`: GRPO on sandboxed Python tasks.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use clap::Args;

use super::live::{Live, Place};
use super::setup::{self, Loaded};
use crate::cli::ExitStatus;
use crate::cli::args::{ConfigArgs, Format};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::cli::progress::{Progress, counted, human_duration};
use crate::cli::waiting::Waiting;
use crate::collective::{Collective, Launch, Solo, TcpCollective, Timeouts};
use crate::config::{RunConfig, TrainMode};
use crate::report::write_report;
use crate::run::{Change, Measured, RunError, RunEvent, Summary, TrainOptions, train};
use crate::trainer::latest_checkpoint;

/// Arguments of `wardian train`.
#[derive(Debug, Args)]
pub(in crate::cli) struct TrainArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Run folder [default: runs/<time>-<name>]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on with a run that was stopped or killed, from its last checkpoint, as its run.toml says;
    /// `--set` changes keys of it
    #[arg(
        long,
        value_name = "DIR",
        conflicts_with_all = ["out", "config", "model", "tasks", "seed"]
    )]
    resume: Option<PathBuf>,
    /// Shuffle rewards within each group: a control, under which nothing may be learned
    #[arg(long)]
    shuffle_rewards: bool,
    /// Serve a dashboard of the run at this address while it goes, such as `127.0.0.1:8080`
    #[arg(long, value_name = "ADDRESS")]
    dashboard: Option<SocketAddr>,
    /// Environment variable that holds the key which the dashboard asks for [default: no key is asked]
    #[arg(long, value_name = "NAME", requires = "dashboard")]
    dashboard_key_env: Option<String>,
    /// How to print the summary
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(in crate::cli) fn run(args: &TrainArgs, printer: &Printer) -> Outcome {
    let mut config_args = args.config.clone();
    if args.shuffle_rewards {
        config_args
            .overrides
            .push("trainer.shuffle_rewards=true".to_owned());
    }
    if let Some(run) = &args.resume {
        let file = run.join("run.toml");
        if !file.is_file() {
            return Err(Failure::from(RunError::NoRun { path: run.clone() }));
        }
        config_args.config = Some(file);
    }
    let resolved = setup::resolve(&config_args)?;
    setup::require_tasks(&resolved.config)?;
    let out = match args.resume.as_ref().or(args.out.as_ref()) {
        Some(out) => out.clone(),
        None => setup::default_run_folder(&resolved),
    };
    let name = (args.resume.as_ref())
        .map_or_else(|| resolved.name.clone(), |run| run.display().to_string());
    let signalled = setup::stop_on_signals().map_err(Failure::internal)?;
    let launch = Launch::from_env().map_err(RunError::from)?;
    let is_first = launch.as_ref().is_none_or(|launch| launch.rank == 0);
    let place = (args.dashboard.filter(|_| is_first))
        .map(|listen| Place::take(listen, args.dashboard_key_env.as_deref()))
        .transpose()?;
    let joined = launch
        .as_ref()
        .map(|launch| join(launch, &resolved.config, &signalled, printer))
        .transpose()?;
    // The others are told by the root.
    let printer = &match &launch {
        Some(launch) if launch.rank > 0 => Printer::new(true),
        _ => printer.clone(),
    };
    let stop = (joined.as_ref()).map_or(signalled, TcpCollective::stop);
    let gpu = launch.as_ref().map_or(0, |launch| launch.local_rank);
    let loaded = setup::programs(&resolved.config, printer).and_then(|programs| {
        let _waiting = Waiting::new(printer, "loading the model");
        setup::load_on(resolved, programs, true, gpu)
    });
    let Loaded {
        config,
        policy,
        workbench,
        scratch: _scratch,
    } = loaded.inspect_err(|failure| {
        if let Some(joined) = &joined {
            joined.abort(&failure.reason());
        }
    })?;
    let ranks: Box<dyn Collective> = match joined {
        Some(joined) => with_devices(joined, policy.decoder.device())?,
        None => Box::new(Solo),
    };
    printer.note(&format!(
        "Training {name} ({:.2} M parameters), {}",
        policy.decoder.parameter_count() as f64 / 1e6,
        match config.trainer.mode {
            TrainMode::Full => "all of them",
            TrainMode::Lora => "with LoRA",
        },
    ));
    let steps = usize::try_from(config.trainer.steps).unwrap_or(usize::MAX);
    let mut training = Progress::new(printer, "step", steps);
    let mut measuring: Option<Progress<'_>> = None;
    let started = Instant::now();
    let is_root = ranks.is_root();
    let live = place
        .map(|place| Live::start(place, &out, policy.tokenizer.clone()))
        .transpose()?;
    if let Some(live) = &live {
        printer.note(&format!("Serving the dashboard at {}", live.url));
    }
    // The first step says nothing before it is done.
    let working = || Some(Waiting::new(printer, "working on the next step"));
    let mut waiting = working();
    let mut observe = |event: RunEvent<'_>| match event {
        _ if !is_root => {}
        RunEvent::Evaluating { done, total } => {
            waiting = None;
            measuring
                .get_or_insert_with(|| Progress::new(printer, "measuring", total))
                .update(done, "");
        }
        RunEvent::Evaluated {
            step,
            report,
            environments,
        } => {
            if let Some(progress) = measuring.take() {
                progress.finish();
            }
            printer.note(&format!(
                "Pass rate on held-out tasks {}: {}",
                if step == 0 {
                    "before training".to_owned()
                } else {
                    format!("after step {step}")
                },
                percent(report.pass_at_1, report.ci95),
            ));
            for (name, report) in environments {
                printer.note(&format!(
                    "  {name}: {}",
                    percent(report.pass_at_1, report.ci95)
                ));
            }
            training.restart_after(step);
            waiting = working();
        }
        RunEvent::Step {
            step,
            metrics,
            tokens_per_second,
            elapsed,
        } => {
            waiting = None;
            training.update(
                step,
                &format!(
                    "· reward {:.3} · {tokens_per_second:.0} tokens/s · {:.1} s/step",
                    metrics.reward,
                    elapsed.as_secs_f64(),
                ),
            );
        }
        RunEvent::Anomaly { step, message } | RunEvent::Memory { step, message } => {
            printer.make_way();
            printer.warning(&format!("step {step}: {message}"));
        }
        _ => {}
    };
    let options = TrainOptions {
        out: &out,
        resume: args.resume.is_some(),
        stop: &stop,
        ranks: &*ranks,
        keeps: true,
    };
    let trained = train(&config, &policy, &workbench, &options, &mut observe);
    drop(waiting);
    let summary = match trained {
        Err(error @ RunError::Stopped { .. }) => {
            training.finish();
            if is_root {
                printer.notice(&capitalized(&error.to_string()));
            }
            return Ok(ExitStatus::Stopped);
        }
        Err(error) => return Err(failure(error, &out, is_root)),
        Ok(summary) => summary,
    };
    training.finish();
    if !is_root {
        return Ok(ExitStatus::Success);
    }
    if let Err(error) = write_report(&out) {
        // The run is done and saved; its page can be made again.
        printer.warning(&format!("no report was written: {error}"));
    }
    if args.format == Format::Json {
        printer.json(&summary).map_err(Failure::internal)?;
    } else {
        let took = human_duration(started.elapsed());
        printer.note(&describe(&summary, &took, &out.display().to_string()));
    }
    Ok(ExitStatus::Success)
}

/// Returns the failure of a run, and says how it goes on if it was no fault of what was asked for and there is a
/// checkpoint to go on from.
fn failure(error: RunError, out: &Path, is_root: bool) -> Failure {
    // An anomaly says it by itself.
    let is_sudden = !error.is_usage() && !matches!(error, RunError::Anomaly { .. });
    let failure = Failure::from(error);
    match latest_checkpoint(out) {
        Ok(Some(_)) if is_sudden && is_root => failure.with_next(format!(
            "`wardian train --resume {}` goes on from its last checkpoint",
            out.display()
        )),
        _ => failure,
    }
}

/// Joins the other processes of a launch.
fn join(
    launch: &Launch,
    config: &RunConfig,
    signalled: &Arc<AtomicBool>,
    printer: &Printer,
) -> Result<TcpCollective, Failure> {
    let (found, limit) = (launch.world_size, config.trainer.max_processes);
    if found > limit {
        return Err(Failure::from(RunError::TooManyProcesses { found, limit }));
    }
    if launch.rank == 0 {
        printer.note(&format!("Waiting for {found} processes to join"));
    }
    let run_toml = config.to_toml().map_err(RunError::from)?;
    let timeouts = Timeouts::default();
    let joined = TcpCollective::join(launch, &run_toml, timeouts, Arc::clone(signalled));
    Ok(joined.map_err(RunError::from)?)
}

/// Lets processes with a GPU each sum on them.
#[cfg(feature = "nccl")]
fn with_devices(
    joined: TcpCollective,
    device: &candle_core::Device,
) -> Result<Box<dyn Collective>, Failure> {
    use crate::collective::NcclCollective;
    if !device.is_cuda() {
        return Ok(Box::new(joined));
    }
    let joined = NcclCollective::new(joined, device).map_err(RunError::from)?;
    Ok(Box::new(joined))
}

/// Lets processes sum in host memory: NCCL is not built in.
#[cfg(not(feature = "nccl"))]
#[expect(clippy::unnecessary_wraps, reason = "with NCCL it can fail")]
fn with_devices(
    joined: TcpCollective,
    _device: &candle_core::Device,
) -> Result<Box<dyn Collective>, Failure> {
    Ok(Box::new(joined))
}

fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().into_iter().flat_map(char::to_uppercase);
    first.chain(letters).collect()
}

fn percent(share: f64, [low, high]: [f64; 2]) -> String {
    format!(
        "{:.1} % (95 % interval {:.1} to {:.1})",
        share * 100.0,
        low * 100.0,
        high * 100.0
    )
}

/// Says how many samples we failed to score, where there are any.
fn unscorable(count: u64) -> String {
    match count {
        0 => String::new(),
        count => format!("; {count} could not be scored and are left out"),
    }
}

fn describe(summary: &Summary, took: &str, out: &str) -> String {
    let line = |measured: &Measured| percent(measured.pass_at_1, measured.ci95);
    let environments: String = (summary.environments.iter())
        .map(|(name, Change { before, after, .. })| {
            let tasks = counted(after.tasks, "task");
            format!(
                "  {name} on {tasks}\n    before  {}\n    after   {}\n",
                line(before),
                line(after)
            )
        })
        .collect();
    let Change { before, after, .. } = &summary.change;
    let at =
        (after.temperature).map_or_else(String::new, |value| format!(" at temperature {value}"));
    format!(
        "\nDone in {took}: {}, {} tokens sampled\n  \
         before  {}\n  \
         after   {}\n  \
         on {}, {} each{at}{}\n{environments}\n\
         Run folder  {out}\n\
         Report      {out}/report.html\n\
         Try next    wardian serve --dashboard {out}\n            \
         wardian eval --config {out}/run.toml --model {out}/final",
        counted(summary.steps, "step"),
        summary.tokens,
        line(before),
        line(after),
        counted(after.tasks, "held-out task"),
        counted(after.samples, "sample"),
        unscorable(before.unscorable + after.unscorable),
    )
}
