//! `wardian sft`: imitating demonstrations, or what a run did well.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::setup::{self, Loaded};
use crate::cli::ExitStatus;
use crate::cli::args::{ConfigArgs, require_empty_folder};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::cli::progress::{Progress, counted};
use crate::run::{
    Pick, Policy, RejectionSampling, RunError, RunEvent, SftOptions, accept_rollouts,
    demonstration_traces, read_demonstrations, sft,
};
use crate::trajectory::TokenTrace;

/// Arguments of `wardian sft`.
#[derive(Debug, Args)]
pub(in crate::cli) struct SftArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Demonstrations: JSONL of `{"messages": […]}`
    #[arg(long, value_name = "FILE", required_unless_present = "rollouts")]
    demos: Option<PathBuf>,
    /// Run folder whose episodes are imitated, those that passed: rejection sampling; give it again for
    /// further runs
    #[arg(long, value_name = "RUN", conflicts_with = "demos")]
    rollouts: Vec<PathBuf>,
    /// Imitate episodes with at least this reward, in place of those that passed
    #[arg(
        long,
        value_name = "REWARD",
        requires = "rollouts",
        allow_negative_numbers = true
    )]
    min_reward: Option<f64>,
    /// Imitate at most so many episodes of each task
    #[arg(long, value_name = "N", requires = "rollouts")]
    max_per_task: Option<NonZeroUsize>,
    /// Which of a task's episodes, where there are more
    #[arg(long, value_enum, default_value_t, requires = "max_per_task")]
    pick: PickArg,
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

/// Which of a task's episodes are imitated.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum PickArg {
    /// Those with the fewest sampled tokens
    #[default]
    Shortest,
    /// Any, by `--seed` and the task
    Random,
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
    if args.min_reward.is_some_and(f64::is_nan) {
        return Err(Failure::usage(anyhow::anyhow!(
            "`--min-reward` is NaN, which no reward is at least; give a number"
        )));
    }
    let demonstrations = (args.demos.as_ref())
        .map(|demos| read_demonstrations(demos))
        .transpose()
        .map_err(Failure::from)?;
    let resolved = setup::resolve(&args.config)?;
    let programs = setup::programs(&resolved.config, printer)?;
    let Loaded {
        config,
        policy,
        workbench,
        scratch: _scratch,
    } = if args.from_scratch {
        let config = resolved.config;
        let policy =
            Policy::from_scratch(config.model.path.as_ref(), config.seed).map_err(Failure::from)?;
        let workbench = setup::workbench(&config, &policy, programs)?;
        Loaded {
            config,
            policy,
            workbench,
            scratch: resolved.scratch,
        }
    } else {
        setup::load(resolved, programs, true)?
    };
    let traces = match &demonstrations {
        Some(demonstrations) => demonstration_traces(demonstrations, &policy, &workbench),
        None => accept(args, config.seed, &policy, printer),
    };
    let traces = traces.map_err(Failure::from)?;
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
        RunEvent::Memory { step, message } => {
            printer.make_way();
            printer.warning(&format!("step {step}: {message}"));
        }
        _ => {}
    };
    let outcome = sft(
        &config,
        &options,
        &traces,
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
        counted(
            traces.len(),
            if demonstrations.is_some() {
                "demonstration"
            } else {
                "episode"
            }
        ),
    ));
    Ok(ExitStatus::Success)
}

/// Returns the episodes to imitate, and tells how many they are of how many.
fn accept(
    args: &SftArgs,
    seed: u64,
    policy: &Policy,
    printer: &Printer,
) -> Result<Vec<TokenTrace>, RunError> {
    let rules = RejectionSampling {
        min_reward: args.min_reward,
        max_per_task: args.max_per_task.map(NonZeroUsize::get),
        pick: match args.pick {
            PickArg::Shortest => Pick::Shortest,
            PickArg::Random => Pick::Random,
        },
        seed,
    };
    let accepted = accept_rollouts(&args.rollouts, &rules, policy)?;
    printer.note(&format!("Rejection sampling {accepted}"));
    Ok(accepted.traces)
}
