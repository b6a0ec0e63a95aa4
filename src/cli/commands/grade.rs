//! `wardian grade`: submissions against a task set.

use std::collections::BTreeMap;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Instant;

use anyhow::Context as _;
use clap::Args;
use indexmap::IndexMap;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::grading::{GradingArgs, reward_terms};
use crate::cli::ExitStatus;
use crate::cli::args::Format;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::cli::progress::Progress;
use crate::grader::{Grader as _, RewardTerms, TestStatus, Verdict, VerdictStatus};
use crate::lines::Lines;
use crate::task::{Task, TaskSet};

/// Longest accepted line of a submissions file.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// Arguments of `wardian grade`.
#[derive(Debug, Args)]
pub(in crate::cli) struct GradeArgs {
    #[command(flatten)]
    grading: GradingArgs,
    /// Submissions: JSONL with `task_id` and `code` (also called `solution` or `answer`), or with
    /// `completion` where the prompt is a program to be completed
    #[arg(long, value_name = "FILE")]
    submissions: PathBuf,
    /// Key of a run file's `[reward]`, such as `test_fraction=0.5`; may be repeated
    #[arg(long = "reward", value_name = "KEY=VALUE")]
    reward: Vec<String>,
    /// How to print: text is a line a submission, JSON one object a line
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Deserialize)]
struct Row {
    task_id: serde_json::Value,
    #[serde(alias = "solution", alias = "answer")]
    code: Option<String>,
    /// What follows the prompt, as in `HumanEval`'s own files.
    completion: Option<String>,
}

/// A submission and the task it is for.
#[derive(Debug)]
struct Submission<'a> {
    task_id: serde_json::Value,
    code: String,
    task: &'a Task,
}

#[derive(Debug, Serialize)]
struct Graded<'a> {
    task_id: &'a serde_json::Value,
    #[serde(flatten)]
    verdict: Verdict,
}

/// How many submissions ended how.
#[derive(Debug, Default)]
struct Tally {
    passed: usize,
    failed: usize,
    invalid: usize,
    faults: usize,
}

pub(in crate::cli) fn run(args: &GradeArgs, printer: &Printer) -> Outcome {
    let terms = reward_terms(&args.reward)?;
    let options = args.grading.task_options(0)?;
    let tasks = TaskSet::open_with(&args.grading.tasks, &options).map_err(Failure::usage)?;
    let submissions = read_submissions(&args.submissions, &tasks).map_err(Failure::usage)?;
    let (graders, fuel_limit) = args.grading.graders(printer)?;
    let keeps_parts = !args.reward.is_empty();
    let grade = |submission: &Submission<'_>| {
        let request = submission.task.grade_request(&submission.code);
        let verdict = graders.grade(&request);
        scored(verdict, submission, &terms, fuel_limit, keeps_parts)
    };
    let started = Instant::now();
    let mut progress = Progress::new(printer, "grading", submissions.len());
    let mut tally = Tally::default();
    let mut print = |task_id: &serde_json::Value, verdict: Verdict| {
        tally.count(verdict.status);
        let graded = Graded { task_id, verdict };
        printer.make_way();
        if args.format == Format::Json {
            printer.json(&graded)
        } else {
            printer.data(&describe(&graded))
        }
        .map_err(Failure::internal)?;
        progress.update(tally.total(), "");
        Ok(())
    };
    in_order(&submissions, grade, |index, verdict| {
        print(&submissions[index].task_id, verdict)
    })?;
    progress.finish();
    printer.note(&tally.summary(started.elapsed().as_secs_f64()));
    Ok(match (tally.faults, tally.passed == submissions.len()) {
        (0, true) => ExitStatus::Success,
        (0, false) => ExitStatus::Failure,
        _ => ExitStatus::Internal,
    })
}

/// Maps on the thread pool and hands the results over in the items' order, as soon as that allows.
fn in_order<T: Sync, R: Send>(
    items: &[T],
    map: impl Fn(&T) -> R + Sync,
    mut take: impl FnMut(usize, R) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let sent = items
                .par_iter()
                .with_max_len(1)
                .enumerate()
                .try_for_each_with(sender, |sender, (index, item)| {
                    sender.send((index, map(item)))
                });
            // The receiver is gone only where printing has failed; then nobody waits.
            drop(sent);
        });
        let mut waiting = BTreeMap::new();
        let mut next = 0;
        for (index, result) in receiver {
            waiting.insert(index, result);
            while let Some(result) = waiting.remove(&next) {
                take(next, result)?;
                next += 1;
            }
        }
        Ok(())
    })
}

/// Puts what a submission earns into its verdict.
fn scored(
    verdict: Verdict,
    submission: &Submission<'_>,
    terms: &RewardTerms,
    fuel_limit: u64,
    keeps_parts: bool,
) -> Verdict {
    let task = submission.task;
    let own_terms = task.reward.as_ref();
    let facts = task.submission_facts(&submission.code, fuel_limit);
    let Some(score) = own_terms.unwrap_or(terms).score(&verdict, &facts) else {
        return verdict;
    };
    let rewards = if keeps_parts || own_terms.is_some() {
        score.parts
    } else {
        verdict.rewards
    };
    Verdict {
        reward: Some(score.reward),
        rewards,
        ..verdict
    }
}

impl Tally {
    fn count(&mut self, status: VerdictStatus) {
        match status {
            VerdictStatus::Passed => self.passed += 1,
            VerdictStatus::Failed => self.failed += 1,
            VerdictStatus::Invalid => self.invalid += 1,
            VerdictStatus::InfraError => self.faults += 1,
        }
    }

    fn total(&self) -> usize {
        self.passed + self.failed + self.invalid + self.faults
    }

    fn summary(&self, seconds: f64) -> String {
        let total = self.total();
        let faults = match self.faults {
            0 => String::new(),
            faults => format!(", {faults} could not be graded"),
        };
        format!(
            "{} of {total} passed, {} failed, {} invalid{faults} ({:.0} a second)",
            self.passed,
            self.failed,
            self.invalid,
            total as f64 / seconds.max(1e-9)
        )
    }
}

fn describe(graded: &Graded<'_>) -> String {
    let verdict = &graded.verdict;
    let status = verdict.status.as_str();
    let id = graded.task_id;
    let first_failure = verdict
        .tests
        .iter()
        .find(|test| test.status != TestStatus::Passed);
    let usual = f64::from(u8::from(verdict.status == VerdictStatus::Passed));
    let score = match verdict.reward {
        // A reward that the status does not say.
        Some(reward) if reward != usual => format!(", reward {}", shown(reward)),
        _ => String::new(),
    };
    let reason = first_failure.map_or_else(String::new, |test| {
        format!(" — {}: {}", test.name, test.message)
    });
    let line = format!("{id}: {status}{score}{reason}{}", parts(&verdict.rewards));
    // Messages may quote the submission, which must not forge lines or drive the terminal.
    line.replace(char::is_control, " ")
}

/// Returns a number to three decimals, without zeros behind; in JSON it has all.
fn shown(number: f64) -> String {
    let rounded = format!("{number:.3}");
    rounded
        .trim_end_matches('0')
        .trim_end_matches('.')
        .to_owned()
}

fn parts(rewards: &IndexMap<String, f64>) -> String {
    let parts: Vec<String> = rewards
        .iter()
        .map(|(name, value)| format!("{name} {}", shown(*value)))
        .collect();
    if parts.is_empty() {
        String::new()
    } else {
        format!(" ({})", parts.join(", "))
    }
}

/// Reads the submissions and finds the task of each.
fn read_submissions<'a>(path: &Path, tasks: &'a TaskSet) -> anyhow::Result<Vec<Submission<'a>>> {
    let by_id: BTreeMap<&str, &Task> = (tasks.tasks().iter())
        .map(|task| (task.id.as_str(), task))
        .collect();
    let file = BufReader::new(fs_err::File::open(path)?);
    let mut submissions = Vec::new();
    for (row, line) in Lines::new(file, MAX_LINE_BYTES) {
        let place = || format!("`{}` line {row}", path.display());
        let line = line.with_context(place)?;
        let expected = || format!("{}: expected an object with `task_id` and `code`", place());
        let submitted: Row = serde_json::from_slice(&line).with_context(expected)?;
        let task_id = submitted.task_id;
        let id = match &task_id {
            serde_json::Value::String(id) => id.clone(),
            id => id.to_string(),
        };
        let task = *by_id.get(id.as_str()).with_context(|| {
            format!(
                "{}: no task `{id}` in the task set; check `task_id`",
                place()
            )
        })?;
        let completed = |completion: String| task.completed(&completion);
        let code = submitted
            .code
            .or_else(|| submitted.completion.and_then(completed))
            .with_context(expected)?;
        submissions.push(Submission {
            task_id,
            code,
            task,
        });
    }
    anyhow::ensure!(
        !submissions.is_empty(),
        "`{}` holds no submission",
        path.display()
    );
    Ok(submissions)
}
