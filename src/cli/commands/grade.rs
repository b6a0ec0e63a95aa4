//! `wardian grade`: submissions against a task set.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::runtime::load_runtime;
use crate::cli::ExitStatus;
use crate::cli::args::{Format, LimitArgs};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::env::grade_request;
use crate::grader::{
    GradeLimits, GradeRequest, Grader as _, TestStatus, UnitTestGrader, Verdict, VerdictStatus,
};
use crate::task::TaskSet;

/// Longest accepted line of a submissions file.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// Submissions graded between two writes, so that results appear as they come.
const CHUNK: usize = 256;

/// Arguments of `wardian grade`.
#[derive(Debug, Args)]
pub(in crate::cli) struct GradeArgs {
    /// Tasks: a JSON, JSONL or parquet file, or a dataset folder
    #[arg(long, value_name = "FILE")]
    tasks: PathBuf,
    /// Submissions: JSONL with `task_id` and `code`
    #[arg(long, value_name = "FILE")]
    submissions: PathBuf,
    /// Wheel whose package submissions can import, pure Python; may be repeated
    #[arg(long = "wheel", value_name = "FILE")]
    wheels: Vec<PathBuf>,
    /// How to print: text is a line a submission, JSON one object a line
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    #[command(flatten)]
    limits: LimitArgs,
}

#[derive(Debug, Deserialize)]
struct Submission {
    task_id: serde_json::Value,
    code: String,
}

#[derive(Debug, Serialize)]
struct Graded<'a> {
    task_id: &'a serde_json::Value,
    #[serde(flatten)]
    verdict: Verdict,
}

pub(in crate::cli) fn run(args: &GradeArgs, printer: &Printer) -> Outcome {
    let limits = args.limits.to_limits().map_err(Failure::usage)?;
    let tasks = TaskSet::open(&args.tasks, None, 0).map_err(Failure::usage)?;
    let submissions = read_submissions(&args.submissions, &tasks).map_err(Failure::usage)?;
    let grader = UnitTestGrader::new(
        Arc::new(load_runtime(&args.wheels, printer)?),
        GradeLimits::for_candidate(&limits),
    );
    let (mut passed, mut faults) = (0, 0);
    for chunk in submissions.chunks(CHUNK) {
        let verdicts: Vec<Verdict> = chunk
            .par_iter()
            .map(|(_, request)| grader.grade(request))
            .collect();
        for ((task_id, _), verdict) in chunk.iter().zip(verdicts) {
            match verdict.status {
                VerdictStatus::Passed => passed += 1,
                VerdictStatus::InfraError => faults += 1,
                VerdictStatus::Failed | VerdictStatus::Invalid => {}
            }
            let graded = Graded { task_id, verdict };
            if args.format == Format::Json {
                printer.json(&graded)
            } else {
                printer.data(&describe(&graded))
            }
            .map_err(Failure::internal)?;
        }
    }
    printer.note(&format!("{passed} of {} passed", submissions.len()));
    Ok(match (faults, passed == submissions.len()) {
        (0, true) => ExitStatus::Success,
        (0, false) => ExitStatus::Failure,
        _ => ExitStatus::Internal,
    })
}

fn describe(graded: &Graded<'_>) -> String {
    let verdict = &graded.verdict;
    let status = match verdict.status {
        VerdictStatus::Passed => "passed",
        VerdictStatus::Failed => "failed",
        VerdictStatus::Invalid => "invalid",
        VerdictStatus::InfraError => "infra_error",
    };
    let first_failure = verdict
        .tests
        .iter()
        .find(|test| test.status != TestStatus::Passed);
    let line = match first_failure {
        Some(test) => format!(
            "{}: {status} — {}: {}",
            graded.task_id, test.name, test.message
        ),
        None => format!("{}: {status}", graded.task_id),
    };
    // Messages may quote the submission, which must not forge lines or drive the terminal.
    line.replace(char::is_control, " ")
}

/// Reads the submissions and pairs each with what its task asks of the grader.
fn read_submissions(
    path: &Path,
    tasks: &TaskSet,
) -> anyhow::Result<Vec<(serde_json::Value, GradeRequest)>> {
    let mut reader = BufReader::new(fs_err::File::open(path)?);
    let mut submissions = Vec::new();
    let mut line = String::new();
    for row in 1_usize.. {
        line.clear();
        let place = || format!("`{}` line {row}", path.display());
        let size = reader
            .by_ref()
            .take(MAX_LINE_BYTES + 1)
            .read_line(&mut line)
            .with_context(place)?;
        if size == 0 {
            break;
        }
        anyhow::ensure!(
            size as u64 <= MAX_LINE_BYTES,
            "{}: longer than {MAX_LINE_BYTES} bytes",
            place()
        );
        if line.trim().is_empty() {
            continue;
        }
        let submission: Submission = serde_json::from_str(&line).with_context(|| {
            format!("{}: expected an object with `task_id` and `code`", place())
        })?;
        let id = match &submission.task_id {
            serde_json::Value::String(id) => id.clone(),
            id => id.to_string(),
        };
        let task = tasks.get(&id).with_context(|| {
            format!(
                "{}: no task `{id}` in the task set; check `task_id`",
                place()
            )
        })?;
        let request = grade_request(task, &submission.code);
        submissions.push((submission.task_id, request));
    }
    anyhow::ensure!(
        !submissions.is_empty(),
        "`{}` holds no submission",
        path.display()
    );
    Ok(submissions)
}
