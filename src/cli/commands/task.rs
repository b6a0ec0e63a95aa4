//! `wardian task`: task sets.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};

use super::grading::GradingArgs;
use super::task_grade;
use crate::cli::ExitStatus;
use crate::cli::args::Format;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::cli::progress::{Progress, counted};
use crate::task::harbor::{DatasetReference, Registry, download};
use crate::task::{FindingKind, TaskReport, TaskSet, validate};

/// Characters of a finding in a table.
const MAX_MESSAGE: usize = 160;

/// Arguments of `wardian task`.
#[derive(Debug, Args)]
pub(in crate::cli) struct TaskArgs {
    #[command(subcommand)]
    command: TaskCommand,
}

#[derive(Debug, Subcommand)]
enum TaskCommand {
    /// Check a task set: references, tests, seeds, examples and leaks
    Validate(ValidateArgs),
    /// Bring the tasks of a registry's data set here
    Download(DownloadArgs),
    /// Grade patches of SWE-bench's instances, each in a sandbox of its own
    Grade(task_grade::GradeArgs),
}

#[derive(Debug, Args)]
struct DownloadArgs {
    /// The data set: `harbor:NAME` or `harbor:NAME@VERSION`
    dataset: String,
    /// The registry: a JSON file that lists data sets
    #[arg(long, value_name = "FILE", env = "WARDIAN_HARBOR_REGISTRY")]
    registry: PathBuf,
    /// The folder that the tasks are put into; the data set's name unless given
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// How to print: text is a folder a line, JSON one object a task
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Args)]
struct ValidateArgs {
    #[command(flatten)]
    grading: GradingArgs,
    /// Random seeds under which each reference is graded
    #[arg(long, value_name = "N", default_value_t = 5)]
    seeds: u32,
    /// Tests of each task that the policy is shown
    #[arg(long, value_name = "N", default_value_t = 1)]
    visible_tests: usize,
    /// Show notes as well as defects
    #[arg(long)]
    notes: bool,
    /// How to print: text is a table of what is wrong, JSON one object a task
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(in crate::cli) fn run(args: &TaskArgs, printer: &Printer) -> Outcome {
    match &args.command {
        TaskCommand::Validate(args) => run_validate(args, printer),
        TaskCommand::Download(args) => run_download(args, printer),
        TaskCommand::Grade(args) => task_grade::run(args, printer),
    }
}

fn run_download(args: &DownloadArgs, printer: &Printer) -> Outcome {
    let reference: DatasetReference = args.dataset.parse().map_err(Failure::usage)?;
    let registry = Registry::read(&args.registry).map_err(Failure::usage)?;
    let output = (args.output.clone()).unwrap_or_else(|| PathBuf::from(&reference.name));
    let tasks = download(&registry, &reference, &output).map_err(Failure::usage)?;
    for task in &tasks {
        let folder = task.folder.display().to_string();
        let printed = if args.format == Format::Json {
            printer.json(&serde_json::json!({
                "name": task.name,
                "folder": folder,
                "commit": task.commit,
            }))
        } else {
            printer.data(&folder)
        };
        printed.map_err(Failure::internal)?;
    }
    printer.note(&format!("{} of {reference}", counted(tasks.len(), "task")));
    Ok(ExitStatus::Success)
}

fn run_validate(args: &ValidateArgs, printer: &Printer) -> Outcome {
    let options = args.grading.task_options(args.visible_tests)?;
    let rows = TaskSet::rows(&args.grading.tasks, &options).map_err(Failure::usage)?;
    let (graders, _) = args.grading.graders(printer)?;
    let started = Instant::now();
    let mut progress = Progress::new(printer, "validating", rows.len());
    let done = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    let reports = std::thread::scope(|scope| {
        let worker = scope.spawn(move || {
            let tell = || {
                let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                // Nobody listens only where the display has failed.
                let _ = sender.send(done);
            };
            validate(rows, &graders, args.seeds.max(1), &tell)
        });
        for done in receiver {
            progress.update(done, "");
        }
        worker.join()
    });
    progress.finish();
    let reports = reports.map_err(|_| Failure::internal(anyhow::anyhow!("validation panicked")))?;
    if args.format == Format::Json {
        for report in &reports {
            printer.json(report).map_err(Failure::internal)?;
        }
    } else {
        for line in table(&reports, args.notes) {
            printer.data(&line).map_err(Failure::internal)?;
        }
    }
    for line in summary(&reports, started.elapsed()) {
        printer.note(&line);
    }
    Ok(if reports.iter().all(TaskReport::is_sound) {
        ExitStatus::Success
    } else {
        ExitStatus::Failure
    })
}

/// Returns a line for each finding, under a head.
fn table(reports: &[TaskReport], notes: bool) -> Vec<String> {
    let mut rows: Vec<[String; 6]> = Vec::new();
    for report in reports {
        let shown = report
            .findings
            .iter()
            .filter(|found| found.is_defect || notes);
        for finding in shown {
            let sort = if finding.is_defect { "defect" } else { "note" };
            rows.push([
                report.row.to_string(),
                report.task_id.clone(),
                report.tests.to_string(),
                format!("{:.1}", report.time.as_secs_f64() * 1e3),
                format!("{sort} {}", finding.kind.as_str()),
                shorten(&finding.message),
            ]);
        }
    }
    if rows.is_empty() {
        return Vec::new();
    }
    rows.insert(
        0,
        ["row", "task", "tests", "ms", "what", "why"].map(str::to_owned),
    );
    let width = |column: usize| {
        let lengths = rows.iter().map(|row| row[column].chars().count());
        lengths.max().unwrap_or_default()
    };
    let widths = [0, 1, 2, 3, 4].map(width);
    rows.iter()
        .map(|[row, task, tests, time, what, why]| {
            let [w_row, w_task, w_tests, w_time, w_what] = widths;
            format!(
                "{row:>w_row$}  {task:w_task$}  {tests:>w_tests$}  {time:>w_time$}  \
                 {what:w_what$}  {why}"
            )
        })
        .collect()
}

/// Messages may quote what a task set holds, which must not drive the terminal.
fn shorten(message: &str) -> String {
    let message = message.replace(char::is_control, " ");
    if message.chars().count() <= MAX_MESSAGE {
        return message;
    }
    let short: String = message.chars().take(MAX_MESSAGE).collect();
    format!("{short}…")
}

fn summary(reports: &[TaskReport], elapsed: Duration) -> Vec<String> {
    let sound = reports.iter().filter(|report| report.is_sound()).count();
    let mut tests: Vec<usize> = reports.iter().map(|report| report.tests).collect();
    tests.sort_unstable();
    let at = |part: usize| {
        tests
            .get((tests.len().saturating_sub(1)) * part / 2)
            .copied()
    };
    let mut lines = vec![format!(
        "{sound} of {} {} sound, checked in {:.1} s; tests a task: {} to {}, median {}",
        counted(reports.len(), "task"),
        if reports.len() == 1 { "is" } else { "are" },
        elapsed.as_secs_f64(),
        at(0).unwrap_or_default(),
        at(2).unwrap_or_default(),
        at(1).unwrap_or_default(),
    )];
    let is_unchecked = |report: &&TaskReport| {
        (report.findings.iter()).any(|found| found.kind == FindingKind::NoReference)
    };
    match reports.iter().filter(is_unchecked).count() {
        0 => {}
        1 => lines.push(
            "1 of them has no reference solution: nothing shows that it can be solved".to_owned(),
        ),
        count => lines.push(format!(
            "{count} of them have no reference solution: nothing shows that they can be solved"
        )),
    }
    let slowest = reports.iter().max_by_key(|report| report.fuel);
    if let Some(slowest) = slowest.filter(|slowest| slowest.fuel > 0) {
        lines.push(format!(
            "The reference of task {} takes the most fuel, {} ({:.2} s)",
            slowest.task_id,
            slowest.fuel,
            slowest.time.as_secs_f64()
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Finding;

    #[test]
    fn a_table_has_a_line_for_each_finding() {
        let finding = |kind, is_defect| Finding {
            kind,
            is_defect,
            message: "why\n".to_owned(),
        };
        let report = TaskReport {
            row: 3,
            task_id: "a/1".to_owned(),
            tests: 2,
            visible_tests: 1,
            fuel: 5,
            time: Duration::from_millis(1),
            findings: vec![
                finding(FindingKind::Leak, true),
                finding(FindingKind::WeakTest, false),
            ],
        };
        let reports = [report];
        let lines = table(&reports, false);
        assert_eq!(
            lines,
            [
                "row  task  tests   ms  what         why",
                "  3  a/1       2  1.0  defect leak  why ",
            ]
        );
        assert_eq!(table(&reports, true).len(), 3);
        assert!(summary(&reports, Duration::ZERO)[0].starts_with("0 of 1 task is sound"));
        assert!(table(&[], true).is_empty());
    }
}
