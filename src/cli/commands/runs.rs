//! `wardian runs` and `wardian compare`: what runs came to, and what two of them differ in.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use crate::cli::ExitStatus;
use crate::cli::args::Format;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::cli::progress::human_duration;
use crate::run::{Curve, PassRate, Phase, RunRecord};

/// Arguments of `wardian runs`.
#[derive(Debug, Args)]
pub(in crate::cli) struct RunsArgs {
    /// Folder of run folders
    #[arg(value_name = "FOLDER", default_value = "runs")]
    folder: PathBuf,
    /// How to print the runs
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Arguments of `wardian compare`.
#[derive(Debug, Args)]
pub(in crate::cli) struct CompareArgs {
    /// Run folder, of a run that is done, stopped or still going
    #[arg(value_name = "RUN_A")]
    left: PathBuf,
    /// Run folder to compare it with
    #[arg(value_name = "RUN_B")]
    right: PathBuf,
    /// How to print what differs
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Lists the runs of a folder.
pub(in crate::cli) fn list(args: &RunsArgs, printer: &Printer) -> Outcome {
    let runs = RunRecord::read_all(&args.folder).map_err(Failure::usage)?;
    if args.format == Format::Json {
        let runs: Vec<Listed<'_>> = runs.iter().map(Listed::new).collect();
        printer.json(&runs).map_err(Failure::internal)?;
        return Ok(ExitStatus::Success);
    }
    if runs.is_empty() {
        printer.note(&format!("`{}` holds no runs", args.folder.display()));
        return Ok(ExitStatus::Success);
    }
    let head = [
        "NAME", "STATE", "STEPS", "REWARD", "PASS@1", "STARTED", "TIME",
    ];
    let mut rows = vec![head.map(str::to_owned)];
    rows.extend(runs.iter().map(|run| {
        let run = Listed::new(run);
        let number =
            |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |v| format!("{v:.3}"));
        let planned = run.planned_steps.map(|planned| format!("/{planned}"));
        [
            run.name.to_owned(),
            state_name(run.state).to_owned(),
            format!("{}{}", run.steps, planned.unwrap_or_default()),
            number(run.best_reward),
            number(run.best_pass_at_1),
            run.started.unwrap_or_else(|| "-".to_owned()),
            time(run.seconds),
        ]
    }));
    for line in aligned(&rows) {
        printer.data(&line).map_err(Failure::internal)?;
    }
    Ok(ExitStatus::Success)
}

/// A run of the list.
#[derive(Debug, Serialize)]
struct Listed<'r> {
    name: &'r str,
    folder: &'r Path,
    state: Phase,
    steps: u64,
    planned_steps: Option<u64>,
    best_reward: Option<f64>,
    best_pass_at_1: Option<f64>,
    /// Of the best measurement.
    ci95: Option<[f64; 2]>,
    started: Option<String>,
    seconds: f64,
}

impl<'r> Listed<'r> {
    fn new(run: &'r RunRecord) -> Self {
        let started = run.started.and_then(|seconds| i64::try_from(seconds).ok());
        let started = started.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
        Self {
            name: &run.name,
            folder: &run.folder,
            state: run.state,
            steps: run.steps,
            planned_steps: run.planned_steps,
            best_reward: run.curves.get("reward").map(|curve| curve.highest),
            best_pass_at_1: run.best.map(|best| best.pass_at_1),
            ci95: run.best.map(|best| best.ci95),
            started: started.map(|time| time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()),
            seconds: run.seconds,
        }
    }
}

fn state_name(state: Phase) -> &'static str {
    match state {
        Phase::Finished => "finished",
        Phase::Running => "running",
        Phase::Stopped => "stopped",
        Phase::Failed => "failed",
    }
}

fn time(seconds: f64) -> String {
    Duration::try_from_secs_f64(seconds).map_or_else(|_| "-".to_owned(), human_duration)
}

/// Pads the cells of a table to their columns' widths. A row of one cell is a heading, and widens none.
fn aligned<const N: usize>(rows: &[[String; N]]) -> Vec<String> {
    let is_row = |row: &&[String; N]| row.iter().skip(1).any(|cell| !cell.is_empty());
    let width = |at: usize| {
        let cells = rows
            .iter()
            .filter(is_row)
            .map(|row| row[at].chars().count());
        cells.max().unwrap_or(0)
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths);
        let cells = cells.map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// Metrics that are compared by their last values and their ranges.
const CURVES: [&str; 6] = [
    "reward",
    "frac_reward_zero_std",
    "entropy",
    "kl",
    "completions/mean_length",
    "completions/clipped_ratio",
];

/// Metrics that are compared by their means: where the time of a step goes.
const SPLIT: [&str; 6] = [
    "step_time",
    "generate_time",
    "update_time",
    "sandbox/tool_seconds",
    "sandbox/grade_seconds",
    "tokens_per_second",
];

/// What is printed as JSON.
#[derive(Debug, Serialize)]
struct Comparison<'r> {
    runs: [Listed<'r>; 2],
    settings: Vec<Changed>,
    pass_rates: Vec<Rates>,
    curves: Vec<Curves>,
    step_time: Vec<Means>,
}

#[derive(Debug, Serialize)]
struct Changed {
    key: String,
    values: [Option<String>; 2],
}

#[derive(Debug, Serialize)]
struct Rates {
    when: &'static str,
    values: [Option<PassRate>; 2],
}

#[derive(Debug, Serialize)]
struct Curves {
    metric: &'static str,
    values: [Option<Ends>; 2],
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Ends {
    last: f64,
    lowest: f64,
    highest: f64,
}

#[derive(Debug, Serialize)]
struct Means {
    metric: &'static str,
    values: [Option<f64>; 2],
}

/// Compares two runs.
pub(in crate::cli) fn compare(args: &CompareArgs, printer: &Printer) -> Outcome {
    let read = |folder: &Path| RunRecord::read(folder).map_err(Failure::usage);
    let runs = [read(&args.left)?, read(&args.right)?];
    let comparison = Comparison::new(&runs);
    if args.format == Format::Json {
        printer.json(&comparison).map_err(Failure::internal)?;
        return Ok(ExitStatus::Success);
    }
    for line in comparison.lines() {
        printer.data(&line).map_err(Failure::internal)?;
    }
    Ok(ExitStatus::Success)
}

impl<'r> Comparison<'r> {
    fn new(runs: &'r [RunRecord; 2]) -> Self {
        let [left, right] = runs;
        let changed = left.changed_settings(right).into_iter();
        let changed = changed.map(|(key, left, right)| Changed {
            key,
            values: [left, right],
        });
        let of_both = |rate: fn(&RunRecord) -> Option<PassRate>| [rate(left), rate(right)];
        let curve = |run: &RunRecord, name: &str| run.curves.get(name).copied();
        let ends = |curve: Curve| Ends {
            last: curve.last,
            lowest: curve.lowest,
            highest: curve.highest,
        };
        let curves = CURVES.map(|metric| Curves {
            metric,
            values: [left, right].map(|run| curve(run, metric).map(ends)),
        });
        let means = SPLIT.map(|metric| Means {
            metric,
            values: [left, right].map(|run| curve(run, metric).map(|curve| curve.mean)),
        });
        let is_there = |values: &[Option<f64>; 2]| values.iter().any(Option::is_some);
        Self {
            runs: [Listed::new(left), Listed::new(right)],
            settings: changed.collect(),
            pass_rates: vec![
                Rates {
                    when: "before",
                    values: of_both(|run| run.before),
                },
                Rates {
                    when: "best",
                    values: of_both(|run| run.best),
                },
                Rates {
                    when: "last",
                    values: of_both(|run| run.after),
                },
            ],
            curves: (curves.into_iter())
                .filter(|curve| curve.values.iter().any(Option::is_some))
                .collect(),
            step_time: means
                .into_iter()
                .filter(|mean| is_there(&mean.values))
                .collect(),
        }
    }

    fn lines(&self) -> Vec<String> {
        let [left, right] = &self.runs;
        let absent = || "-".to_owned();
        let row = |name: String, values: [String; 2]| {
            let [left, right] = values;
            [format!("  {name}"), left, right]
        };
        let mut rows = vec![[String::new(), left.name.to_owned(), right.name.to_owned()]];
        let both = [left, right];
        rows.push(row(
            "state".to_owned(),
            both.map(|run| state_name(run.state).to_owned()),
        ));
        rows.push(row(
            "steps".to_owned(),
            both.map(|run| run.steps.to_string()),
        ));
        rows.push(row("time".to_owned(), both.map(|run| time(run.seconds))));
        let section = |rows: &mut Vec<[String; 3]>, name: &str| {
            rows.push([String::new(), String::new(), String::new()]);
            rows.push([name.to_owned(), String::new(), String::new()]);
        };
        section(&mut rows, "Settings that differ");
        for Changed { key, values } in &self.settings {
            let values = values
                .each_ref()
                .map(|value| value.clone().unwrap_or_else(absent));
            rows.push(row(key.clone(), values));
        }
        section(
            &mut rows,
            "Pass rate on held-out tasks, with its 95 % interval",
        );
        for Rates { when, values } in &self.pass_rates {
            let values = values.map(|rate| rate.map_or_else(absent, |rate| shown_rate(&rate)));
            rows.push(row((*when).to_owned(), values));
        }
        section(&mut rows, "Metrics of steps: last (lowest to highest)");
        for Curves { metric, values } in &self.curves {
            let ends = |ends: Ends| {
                let Ends {
                    last,
                    lowest,
                    highest,
                } = ends;
                format!("{last:.4} ({lowest:.4} to {highest:.4})")
            };
            rows.push(row(
                (*metric).to_owned(),
                values.map(|value| value.map_or_else(absent, ends)),
            ));
        }
        section(&mut rows, "A step, mean: seconds, and tokens a second");
        for Means { metric, values } in &self.step_time {
            let shown = |value: f64| format!("{value:.3}");
            rows.push(row(
                (*metric).to_owned(),
                values.map(|value| value.map_or_else(absent, shown)),
            ));
        }
        aligned(&rows)
    }
}

fn shown_rate(rate: &PassRate) -> String {
    let [low, high] = rate.ci95.map(|bound| bound * 100.0);
    let share = rate.pass_at_1 * 100.0;
    format!("{share:.1} % ({low:.1} to {high:.1}), step {}", rate.step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_stand_in_columns() {
        let rows = [["a", "bb"], ["a heading", ""], ["ccc", "d"]];
        let rows = rows.map(|row| row.map(str::to_owned));
        assert_eq!(aligned(&rows), ["a    bb", "a heading", "ccc  d"]);
    }
}
