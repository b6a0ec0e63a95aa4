//! `wardian calibrate`: about a minute of the run itself, and what the whole of it would take from that.
//!
//! The steps that are measured are real ones, of the run's model, tasks and settings, into a folder that is
//! thrown away; only fewer groups are sampled where a whole step would take too long. `wardian plan` calculates
//! memory without loading anything.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use clap::Args;
use serde::Serialize;

use super::setup::{self, Loaded};
use crate::cli::ExitStatus;
use crate::cli::args::{ConfigArgs, Format, parse_duration};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::cli::progress::{counted, human_duration};
use crate::collective::Solo;
use crate::config::{LogConfig, Response, RunConfig};
use crate::engine::PeakMemory;
use crate::engine::measure::{Prefilled, Workload};
use crate::run::{
    Policy, RunError, RunRecord, TrainOptions, Workbench, evaluation_tasks, keep_to_budget,
    plan_request, train,
};
use crate::trainer::{Place, PlanRequest, plan};

/// Tokens of a prompt, and decoding steps, by which the speed of one group is guessed.
const GUESS: (usize, usize) = (64, 8);
/// The shortest answers that steps are measured with.
const LEAST_ANSWER: usize = 16;
/// The most steps that are measured with one number of groups.
const MOST_STEPS: u64 = 3;

/// Arguments of `wardian calibrate`.
#[derive(Debug, Args)]
pub(in crate::cli) struct CalibrateArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// How long to measure; loading comes on top, and a step that has begun is ended
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "60s")]
    time: Duration,
    /// Price of the machine for an hour, in any currency
    #[arg(long, value_name = "AMOUNT", value_parser = parse_price)]
    price_per_hour: Option<f64>,
    /// How to print what is expected
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

fn parse_price(text: &str) -> Result<f64, String> {
    let price: f64 = text
        .parse()
        .map_err(|_| "expected a number such as `1.20`".to_owned())?;
    match price.is_finite() && price >= 0.0 {
        true => Ok(price),
        false => Err("a price is 0 or more".to_owned()),
    }
}

/// What steps with some groups took, a mean.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Measured {
    groups: usize,
    steps: u64,
    /// Sampling, tools and grading.
    generate_seconds: f64,
    /// The gradient and the optimizer.
    update_seconds: f64,
    /// All of a step.
    step_seconds: f64,
    /// Sampled tokens.
    tokens: f64,
    /// Of an answer, in tokens.
    mean_length: f64,
    /// Share of answers that a limit cut off.
    clipped_ratio: f64,
}

/// A step of the run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Step {
    generate_seconds: f64,
    update_seconds: f64,
    /// All of it.
    seconds: f64,
    tokens: f64,
    tokens_per_second: f64,
}

/// What is printed as JSON.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    model: String,
    device: &'static str,
    dtype: &'static str,
    measured: Vec<Measured>,
    step: Step,
    steps: u64,
    steps_seconds: f64,
    /// Measurements of held-out tasks.
    evaluations: u64,
    evaluation_episodes: u64,
    evaluations_seconds: f64,
    seconds: f64,
    memory: Memory,
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
    /// What was not measured, and how it was concluded.
    extrapolated: Vec<String>,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Memory {
    /// The most that was held while measuring; none where the system does not tell, and on a GPU.
    measured_bytes: Option<u64>,
    /// The most that the run would hold by calculation.
    planned_bytes: Option<u64>,
}

pub(in crate::cli) fn run(args: &CalibrateArgs, printer: &Printer) -> Outcome {
    let resolved = setup::resolve(&args.config)?;
    setup::require_tasks(&resolved.config)?;
    let model = resolved.name.clone();
    let programs = setup::programs(&resolved.config, printer)?;
    let Loaded {
        config,
        policy,
        workbench,
        scratch: _scratch,
    } = setup::load(resolved, programs, true)?;
    let held_out = evaluation_tasks(&config).map_err(Failure::from)?.len();
    let started = Instant::now();
    let is_metered = PeakMemory::restart().is_some();
    let stop = setup::stop_on_signals().map_err(Failure::internal)?;
    let bench = Bench {
        config: &config,
        policy: &policy,
        workbench: &workbench,
        printer,
        stop: &stop,
    };
    let (measured, answer) = match bench.measure(args.time) {
        Err(_) if stop.load(Ordering::Relaxed) => {
            printer.note("Stopped: nothing is known yet, and nothing is left behind");
            return Ok(ExitStatus::Failure);
        }
        measured => measured?,
    };
    let is_cpu = policy.decoder.device().is_cpu();
    let memory = Memory {
        measured_bytes: (is_cpu && is_metered).then(PeakMemory::read).flatten(),
        planned_bytes: planned(&config, &policy),
    };
    let report = report(
        &config,
        measured,
        answer,
        held_out,
        memory,
        args.price_per_hour,
    );
    let report = Report {
        model,
        device: if is_cpu { "cpu" } else { "cuda" },
        dtype: policy.decoder.dtype().as_str(),
        ..report
    };
    if args.format == Format::Json {
        printer.json(&report).map_err(Failure::internal)?;
    } else {
        printer.note(&format!(
            "Measured in {}\n",
            human_duration(started.elapsed())
        ));
        printer
            .data(&table(&report, args.price_per_hour))
            .map_err(Failure::internal)?;
    }
    Ok(ExitStatus::Success)
}

/// Returns the most that the run would hold by calculation.
fn planned(config: &RunConfig, policy: &Policy) -> Option<u64> {
    let place = match policy.decoder.device().is_cpu() {
        true => Place::Cpu,
        false => Place::Gpu,
    };
    let model = policy.decoder.config();
    let request = plan_request(config, model, place);
    let chosen = keep_to_budget(config, model, &request).ok()?;
    let request = PlanRequest {
        micro_batch_tokens: chosen.micro_batch_tokens,
        recompute: chosen.recompute,
        ..request
    };
    Some(plan(model, &request).peak())
}

/// A run to measure steps of.
struct Bench<'a> {
    config: &'a RunConfig,
    policy: &'a Policy,
    workbench: &'a Workbench,
    printer: &'a Printer,
    /// Set where the measurement is to end.
    stop: &'a AtomicBool,
}

impl Bench<'_> {
    /// Measures a step of one group, and then as many groups and steps as there is time for. Also returns the
    /// tokens at which answers were cut off.
    fn measure(&self, time: Duration) -> Result<((Measured, Measured), usize), Failure> {
        let started = Instant::now();
        let answer = self.answer(time)?;
        self.printer.redraw("measuring a step of one group");
        let one = self.steps(1, 1, answer)?;
        let left = time.saturating_sub(started.elapsed()).as_secs_f64();
        let (groups, steps) = next(one.step_seconds, left, self.config.rollout.groups_per_step);
        if steps == 0 {
            self.printer.redraw("");
            return Ok(((one, one), answer));
        }
        self.printer
            .redraw(&format!("measuring steps of {}", counted(groups, "group")));
        let more = self.steps(groups, steps, answer)?;
        self.printer.redraw("");
        Ok(((one, more), answer))
    }

    /// Returns the tokens of an answer that leave time for a group: those of the run unless even its first group
    /// might take half of the time.
    fn answer(&self, time: Duration) -> Result<usize, Failure> {
        let rollout = &self.config.rollout;
        let workload = Workload {
            sequences: rollout.group_size,
            prompt_tokens: GUESS.0.min(rollout.max_total_tokens / 2).max(1),
            steps: GUESS.1,
        };
        let taken = Prefilled::new(&self.policy.decoder, workload)
            .and_then(Prefilled::decode)
            .map_err(RunError::from)?;
        let a_token = taken.as_secs_f64() / GUESS.1 as f64;
        Ok(answer_within(
            a_token,
            time.as_secs_f64() / 2.0,
            rollout.max_turns,
            rollout.max_new_tokens,
        ))
    }

    /// Runs steps into a folder that is thrown away.
    fn steps(&self, groups: usize, steps: u64, answer: usize) -> Result<Measured, Failure> {
        let folder = tempfile::tempdir().map_err(Failure::internal)?;
        let out = folder.path().join("run");
        let options = TrainOptions {
            out: &out,
            resume: false,
            stop: self.stop,
            ranks: &Solo,
            keeps: false,
        };
        let config = shortened(self.config, groups, steps, answer);
        train(&config, self.policy, self.workbench, &options, &mut |_| ())
            .map_err(Failure::from)?;
        debug_assert!(!out.join("final").exists(), "nobody needs the model");
        read(&out, groups)
    }
}

/// Returns how many groups and steps to measure next, after one group took so long.
fn next(one: f64, left: f64, groups_per_step: usize) -> (usize, u64) {
    let groups = (left / one.max(1e-6))
        .floor()
        .clamp(0.0, groups_per_step as f64);
    if groups < 1.0 {
        return (1, 0);
    }
    let steps = (left / (one * groups).max(1e-6)).floor();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "both are bounded just now"
    )]
    let (groups, steps) = (groups as usize, steps.clamp(1.0, MOST_STEPS as f64) as u64);
    (groups, steps)
}

/// Returns the tokens of a turn that leave an episode within `limit` seconds, at so many seconds a token.
fn answer_within(a_token: f64, limit: f64, turns: usize, max_new_tokens: usize) -> usize {
    let most = limit / (a_token * turns.max(1) as f64).max(1e-12);
    if most >= max_new_tokens as f64 {
        return max_new_tokens;
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is below a number of tokens"
    )]
    let most = most.max(0.0) as usize;
    most.max(LEAST_ANSWER).min(max_new_tokens)
}

/// Returns the run with fewer groups and steps, and nothing that a measurement has no use for.
fn shortened(config: &RunConfig, groups: usize, steps: u64, answer: usize) -> RunConfig {
    let mut config = config.clone();
    config.rollout.groups_per_step = groups;
    config.rollout.max_new_tokens = answer;
    for environment in config.environments.values_mut() {
        environment.max_new_tokens = environment.max_new_tokens.map(|own| own.min(answer));
    }
    config.rollout.max_step_tokens = None;
    let trainer = &mut config.trainer;
    trainer.steps = steps;
    trainer.warmup_steps = 0;
    trainer.save_every = 0;
    trainer.async_level = 0;
    trainer.max_processes = 1;
    trainer.dynamic_sampling = false;
    config.eval.every = 0;
    config.eval.limit = Some(1);
    config.eval.samples = 1;
    config.eval.k = vec![1];
    // Nobody waits for these steps.
    config.log = LogConfig::default();
    let watch = &mut config.watch;
    for response in [
        &mut watch.not_finite,
        &mut watch.drift,
        &mut watch.ratio,
        &mut watch.flat,
        &mut watch.truncated,
        &mut watch.unscorable,
        &mut watch.collapse,
    ] {
        *response = Response::Warn;
    }
    config
}

/// Reads what steps took.
fn read(out: &Path, groups: usize) -> Result<Measured, Failure> {
    let record = RunRecord::read(out).map_err(Failure::from)?;
    let mean = |name: &str| record.curves.get(name).map_or(0.0, |curve| curve.mean);
    let last = |name: &str| record.curves.get(name).map_or(0.0, |curve| curve.last);
    Ok(Measured {
        groups,
        steps: record.steps,
        generate_seconds: mean("generate_time"),
        update_seconds: mean("update_time"),
        step_seconds: mean("step_time"),
        tokens: last("num_tokens") / (record.steps.max(1)) as f64,
        mean_length: mean("completions/mean_length"),
        clipped_ratio: mean("completions/clipped_ratio"),
    })
}

/// Returns the value of `groups` groups on the line through two measurements, which does not fall; the larger one
/// itself where it has as many.
fn on_line(small: (usize, f64), large: (usize, f64), groups: usize) -> f64 {
    if large.0 == groups {
        return large.1;
    }
    if large.0 <= small.0 {
        return large.1 * groups as f64 / large.0 as f64;
    }
    let slope = (large.1 - small.1) / (large.0 - small.0) as f64;
    large.1 + slope.max(0.0) * (groups as f64 - large.0 as f64)
}

/// Concludes from what was measured.
fn report(
    config: &RunConfig,
    (small, large): (Measured, Measured),
    answer: usize,
    held_out: usize,
    memory: Memory,
    price_per_hour: Option<f64>,
) -> Report {
    let (groups, group_size) = (config.rollout.groups_per_step, config.rollout.group_size);
    let mut extrapolated = Vec::new();
    if large.groups != groups {
        extrapolated.push(format!(
            "a step of {} from steps of {}, along a line",
            counted(groups, "group"),
            match small.groups == large.groups {
                true => large.groups.to_string(),
                false => format!("{} and {}", small.groups, large.groups),
            }
        ));
    }
    let (limit, mut longer) = (config.rollout.max_new_tokens, 1.0);
    if answer < limit && large.mean_length > 0.0 {
        longer = 1.0 + large.clipped_ratio * (limit - answer) as f64 / large.mean_length;
        extrapolated.push(format!(
            "answers were cut off at {answer} tokens to keep to the time; those that were are taken to go on to \
             {limit}, the most that they may"
        ));
    }
    let of = |value: fn(&Measured) -> f64| {
        longer
            * on_line(
                (small.groups, value(&small)),
                (large.groups, value(&large)),
                groups,
            )
    };
    let (generate, update) = (of(|m| m.generate_seconds), of(|m| m.update_seconds));
    let (seconds, tokens) = (
        of(|m| m.step_seconds).max(generate + update),
        of(|m| m.tokens),
    );
    let step = Step {
        generate_seconds: generate,
        update_seconds: update,
        seconds,
        tokens,
        tokens_per_second: tokens / generate.max(1e-9),
    };
    let steps = config.trainer.steps;
    let steps_seconds = seconds * steps as f64;
    extrapolated.push(format!(
        "all {} take as long as those of the policy as it is now: answers that grow longer or shorter, and tasks \
         that are harder, change that",
        counted(usize::try_from(steps).unwrap_or(usize::MAX), "step")
    ));
    let on_the_way = match config.eval.every {
        0 => 0,
        every => steps.saturating_sub(1) / every,
    };
    let evaluations = 2 + on_the_way;
    let samples = held_out.saturating_mul(config.eval.samples) as u64;
    let evaluation_episodes = evaluations.saturating_mul(samples);
    let an_episode = generate / (groups * group_size).max(1) as f64;
    let evaluations_seconds = an_episode * evaluation_episodes as f64;
    extrapolated.push(format!(
        "an episode of the {evaluations} measurements takes as long as one of a step, {an_episode:.3} s"
    ));
    for (is_so, what) in [
        (
            config.trainer.async_level > 0,
            "steps that overlap are shorter than this: measured one after the other",
        ),
        (
            config.rollout.max_step_tokens.is_some(),
            "episodes were not paused between steps",
        ),
        (
            config.trainer.dynamic_sampling,
            "draws of further tasks by dynamic sampling come on top",
        ),
        (
            config.trainer.max_processes > 1,
            "it is one process; several share a step's groups",
        ),
    ] {
        extrapolated.extend(is_so.then(|| what.to_owned()));
    }
    extrapolated.push("checkpoints, and what loading takes, are left out".to_owned());
    let all = steps_seconds + evaluations_seconds;
    Report {
        version: env!("CARGO_PKG_VERSION"),
        model: String::new(),
        device: "",
        dtype: "",
        measured: match small == large {
            true => vec![large],
            false => vec![small, large],
        },
        step,
        steps,
        steps_seconds,
        evaluations,
        evaluation_episodes,
        evaluations_seconds,
        seconds: all,
        memory,
        cost: price_per_hour.map(|price| price * all / 3600.0),
        extrapolated,
    }
}

fn table(report: &Report, price_per_hour: Option<f64>) -> String {
    let Report { step, memory, .. } = report;
    let time = |seconds: f64| {
        let short = Duration::try_from_secs_f64(seconds).map(human_duration);
        match short {
            Ok(_) if seconds < 10.0 => format!("{seconds:.2} s"),
            Ok(short) => short,
            Err(_) => "longer than anybody waits".to_owned(),
        }
    };
    let bytes = |bytes: Option<u64>| {
        bytes.map_or_else(|| "unknown".to_owned(), |bytes| ByteSize(bytes).to_string())
    };
    let mut rows = vec![
        (
            "model",
            format!("{} on {} in {}", report.model, report.device, report.dtype),
        ),
        (
            "sampling",
            format!("{:.0} tokens a second", step.tokens_per_second),
        ),
        (
            "a step",
            format!(
                "{}: {} of sampling and grading, {} of learning, {:.0} tokens",
                time(step.seconds),
                time(step.generate_seconds),
                time(step.update_seconds),
                step.tokens
            ),
        ),
        (
            "memory",
            format!(
                "{} held while measuring, {} for the run by calculation",
                bytes(memory.measured_bytes),
                bytes(memory.planned_bytes)
            ),
        ),
        (
            "steps",
            format!("{} in {}", report.steps, time(report.steps_seconds)),
        ),
        (
            "measurements",
            format!(
                "{} with {} episodes in {}",
                report.evaluations,
                report.evaluation_episodes,
                time(report.evaluations_seconds)
            ),
        ),
        ("the whole run", time(report.seconds)),
    ];
    if let Some((cost, price)) = report.cost.zip(price_per_hour) {
        rows.push(("cost", format!("{cost:.2} at {price:.2} an hour")));
    }
    let rows = rows
        .iter()
        .map(|(name, value)| format!("{name:<15} {value}"));
    let mut lines: Vec<String> = rows.collect();
    lines.push("\nNot measured but concluded:".to_owned());
    lines.extend(report.extrapolated.iter().map(|what| format!("- {what}")));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(groups: usize, generate: f64, update: f64) -> Measured {
        Measured {
            groups,
            steps: 1,
            generate_seconds: generate,
            update_seconds: update,
            step_seconds: generate + update,
            tokens: 100.0 * groups as f64,
            mean_length: 50.0,
            clipped_ratio: 0.5,
        }
    }

    const NO_MEMORY: Memory = Memory {
        measured_bytes: None,
        planned_bytes: None,
    };

    fn config() -> RunConfig {
        let mut config = RunConfig::default();
        config.rollout.groups_per_step = 8;
        config.rollout.group_size = 4;
        config.rollout.max_new_tokens = 100;
        config.trainer.steps = 10;
        config.eval.every = 5;
        config
    }

    #[test]
    fn what_lies_beyond_is_on_the_line_through_what_was_measured() {
        assert_eq!(on_line((1, 2.0), (4, 5.0), 8), 9.0);
        assert_eq!(on_line((1, 2.0), (4, 5.0), 4), 5.0);
        // One measurement is in proportion, and more never takes less.
        assert_eq!(on_line((1, 2.0), (1, 2.0), 8), 16.0);
        assert_eq!(on_line((1, 3.0), (2, 2.0), 8), 2.0);
    }

    #[test]
    fn a_whole_run_is_its_steps_and_its_measurements() {
        let config = config();
        let found = (measured(1, 2.0, 1.0), measured(4, 5.0, 4.0));
        let report = report(&config, found, 100, 40, NO_MEMORY, Some(3.0));
        assert_eq!(report.step.generate_seconds, 9.0);
        assert_eq!(report.step.update_seconds, 8.0);
        assert_eq!(report.steps_seconds, 170.0);
        // Before, after step 5, and after: each with 40 tasks, at 9 s for 32 episodes.
        assert_eq!((report.evaluations, report.evaluation_episodes), (3, 120));
        assert_eq!(report.evaluations_seconds, 9.0 / 32.0 * 120.0);
        assert_eq!(report.cost, Some(3.0 * report.seconds / 3600.0));
        assert!(
            report.extrapolated[0].contains("8 groups from steps of 1 and 4"),
            "{report:?}"
        );
        // As many groups as the run has are not concluded from others.
        let found = (measured(1, 2.0, 1.0), measured(8, 6.0, 5.0));
        let whole = super::report(&config, found, 100, 40, NO_MEMORY, None);
        assert_eq!(whole.step.seconds, 11.0);
        assert!(!whole.extrapolated[0].contains("groups"), "{whole:?}");
        assert!(
            table(&whole, None).contains("10 in 1 min 50 s"),
            "{}",
            table(&whole, None)
        );
    }

    #[test]
    fn answers_that_were_cut_off_are_taken_to_go_on() {
        let found = (measured(8, 6.0, 5.0), measured(8, 6.0, 5.0));
        let report = report(&config(), found, 50, 1, NO_MEMORY, None);
        // Half of them go on for 50 tokens more: 75 in place of 50 in the mean.
        assert_eq!(report.step.generate_seconds, 9.0);
        assert!(
            report.extrapolated[0].contains("cut off at 50 tokens"),
            "{report:?}"
        );
    }

    #[test]
    fn time_is_kept_by_fewer_groups_steps_and_tokens() {
        assert_eq!(next(1.0, 50.0, 8), (8, 3));
        assert_eq!(next(10.0, 50.0, 8), (5, 1));
        assert_eq!(next(100.0, 50.0, 8), (1, 0));
        assert_eq!(next(0.0, 50.0, 8), (8, 3));
        assert_eq!(answer_within(0.01, 30.0, 1, 512), 512);
        assert_eq!(answer_within(0.1, 30.0, 2, 512), 150);
        assert_eq!(answer_within(100.0, 30.0, 1, 512), LEAST_ANSWER);
    }
}
