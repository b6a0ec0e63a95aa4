//! Whether tasks are fit to learn from: checks of a task set against its own grader.
//!
//! A task is sound when its reference solution passes under every seed, a submission that only
//! returns `None` does not, the examples in its prompt are true of the reference, and the prompt
//! does not give hidden tests away. What is wrong is a [`Finding`]: a defect, or a note where it
//! may be meant.

mod leak;

use std::time::{Duration, Instant};

use rayon::prelude::*;
use serde::{Serialize, Serializer};

use self::leak::{has_text, shown_assertions};
use super::{Task, TaskError, TaskRow};
use crate::grader::{
    DEFAULT_GRADER, GradeRequest, Grader, SubmissionKind, TestStatus, Verdict, VerdictStatus,
};

/// Characters of a quoted test or example.
const MAX_QUOTED: usize = 120;

/// What can be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FindingKind {
    /// The row is no task.
    Unreadable,
    /// We could not grade: the tests are broken, or need what the runtime does not have.
    NotGradable,
    /// The reference solution does not pass.
    ReferenceFails,
    /// The reference passes under some seeds only.
    Nondeterministic,
    /// A submission passes that does nothing.
    EmptyPasses,
    /// An example in the prompt is not true of the reference.
    WrongExample,
    /// The prompt holds hidden tests.
    Leak,
    /// A test is there twice.
    RepeatedTest,
    /// Some tests pass for a submission that does nothing.
    WeakTest,
    /// There is no reference solution to check with.
    NoReference,
}

impl FindingKind {
    /// Returns the kind as it is written in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unreadable => "unreadable",
            Self::NotGradable => "not_gradable",
            Self::ReferenceFails => "reference_fails",
            Self::Nondeterministic => "nondeterministic",
            Self::EmptyPasses => "empty_passes",
            Self::WrongExample => "wrong_example",
            Self::Leak => "leak",
            Self::RepeatedTest => "repeated_test",
            Self::WeakTest => "weak_test",
            Self::NoReference => "no_reference",
        }
    }
}

/// Something that is wrong with a task, or may be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What it is.
    pub kind: FindingKind,
    /// Whether the task should be mended or left out; else it may be meant.
    pub is_defect: bool,
    /// What was found.
    pub message: String,
}

impl Finding {
    fn defect(kind: FindingKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            is_defect: true,
            message: message.into(),
        }
    }

    fn note(kind: FindingKind, message: impl Into<String>) -> Self {
        Self {
            is_defect: false,
            ..Self::defect(kind, message)
        }
    }
}

/// What was found about one row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TaskReport {
    /// The row in its file, counted from 1.
    pub row: u64,
    /// The task's id; empty where the row is no task.
    pub task_id: String,
    /// How many tests there are: those that ran for the reference.
    pub tests: usize,
    /// How many of them the policy is shown.
    pub visible_tests: usize,
    /// The fuel of the reference while it was graded.
    pub fuel: u64,
    /// How long the reference took to grade.
    #[serde(rename = "seconds", serialize_with = "as_seconds")]
    pub time: Duration,
    /// What is wrong, defects first.
    pub findings: Vec<Finding>,
}

impl TaskReport {
    /// Returns whether nothing is wrong, notes aside.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        !self.findings.iter().any(|finding| finding.is_defect)
    }
}

fn as_seconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

/// Checks the rows that [`TaskSet::rows`](super::TaskSet::rows) returned, on the thread pool, under `seeds` seeds;
/// `progress` is told after each row.
pub fn validate(
    rows: Vec<TaskRow>,
    grader: &dyn Grader,
    seeds: u32,
    progress: &(dyn Fn() + Sync),
) -> Vec<TaskReport> {
    rows.into_par_iter()
        .with_max_len(1)
        .map(|TaskRow { row, task }| {
            let report = match task {
                Ok(task) => validate_task(row, &task, grader, seeds),
                Err(error) => unreadable(row, &error),
            };
            progress();
            report
        })
        .collect()
}

fn unreadable(row: u64, error: &TaskError) -> TaskReport {
    TaskReport {
        row,
        task_id: String::new(),
        tests: 0,
        visible_tests: 0,
        fuel: 0,
        time: Duration::ZERO,
        findings: vec![Finding::defect(
            FindingKind::Unreadable,
            crate::causes::with_causes(error),
        )],
    }
}

fn validate_task(row: u64, task: &Task, grader: &dyn Grader, seeds: u32) -> TaskReport {
    let mut findings = Vec::new();
    let mut report = TaskReport {
        row,
        task_id: task.id.clone(),
        tests: task.tests.len().max(task.cases.len()),
        visible_tests: task.visible_tests,
        fuel: 0,
        time: Duration::ZERO,
        findings: Vec::new(),
    };
    if task.repository.is_some() {
        report.findings.push(Finding::note(
            FindingKind::NotGradable,
            "it is judged in a sandbox with a shell, which is not started here: `wardian task grade` grades \
             references of SWE-bench",
        ));
        return report;
    }
    if let Some(reference) = &task.reference {
        let started = Instant::now();
        let verdict = grader.grade(&task.grade_request(reference));
        report.time = started.elapsed();
        report.fuel = verdict.usage.candidate.fuel;
        report.tests = verdict.tests.len();
        findings.extend(judge_reference(&verdict));
        if verdict.status != VerdictStatus::InfraError {
            findings.extend(check_seeds(task, reference, grader, &verdict, seeds));
            findings.extend(check_examples(task, reference, grader));
        }
    } else {
        findings.push(Finding::note(
            FindingKind::NoReference,
            "there is no reference solution",
        ));
    }
    findings.extend(check_empty(task, grader));
    findings.extend(check_leak(task));
    findings.extend(check_repeats(task));
    findings.sort_by_key(|finding| !finding.is_defect);
    report.findings = findings;
    report
}

fn judge_reference(verdict: &Verdict) -> Option<Finding> {
    let reason = first_failure(verdict);
    match verdict.status {
        VerdictStatus::Passed => None,
        VerdictStatus::InfraError => Some(Finding::defect(
            FindingKind::NotGradable,
            message_of(verdict),
        )),
        VerdictStatus::Failed | VerdictStatus::Invalid => {
            Some(Finding::defect(FindingKind::ReferenceFails, reason))
        }
    }
}

fn first_failure(verdict: &Verdict) -> String {
    let failed = (verdict.tests.iter()).filter(|test| test.status != TestStatus::Passed);
    let count = failed.clone().count();
    let tests = verdict.tests.len();
    match failed.clone().next() {
        Some(test) => format!(
            "{count} of {tests} tests fail; {}: {}",
            test.name, test.message
        ),
        None => "the grader does not pass it".to_owned(),
    }
}

fn message_of(verdict: &Verdict) -> String {
    (verdict.tests.first()).map_or_else(String::new, |test| test.message.clone())
}

/// Grades the reference again under other seeds.
fn check_seeds(
    task: &Task,
    reference: &str,
    grader: &dyn Grader,
    first: &Verdict,
    seeds: u32,
) -> Option<Finding> {
    let statuses = |verdict: &Verdict| -> Vec<TestStatus> {
        verdict.tests.iter().map(|test| test.status).collect()
    };
    let expected = statuses(first);
    let other = (1..seeds).find(|seed| {
        let verdict = grader.grade(&seeded(task, reference, *seed));
        statuses(&verdict) != expected
    })?;
    Some(Finding::defect(
        FindingKind::Nondeterministic,
        format!("the reference fares differently under random seeds 0 and {other}"),
    ))
}

/// Seeds the random numbers of both instances: the submission's at its end, when it is loaded.
fn seeded(task: &Task, code: &str, seed: u32) -> GradeRequest {
    let statement = format!("import random as _random; _random.seed({seed})");
    let mut request = task.grade_request(code);
    if task.submission_kind() == SubmissionKind::Code {
        request.code = match task.grader.as_str() {
            // A program is over when its end is reached.
            "stdio" if !code.contains("__future__") => format!("{statement}\n{code}"),
            "stdio" => code.to_owned(),
            _ => format!("{code}\n\n{statement}\n"),
        };
    }
    request.setup.push(statement);
    request
}

/// Grades a submission that does nothing.
fn check_empty(task: &Task, grader: &dyn Grader) -> Option<Finding> {
    let what = match task.submission_kind() {
        SubmissionKind::Code if task.entry_points.is_empty() => "a program that does nothing",
        SubmissionKind::Code => "`return None`",
        SubmissionKind::Text => "an answer that says nothing",
    };
    let verdict = grader.grade(&task.grade_request(&empty_submission(task)));
    let passed = (verdict.tests.iter())
        .filter(|test| test.status == TestStatus::Passed)
        .count();
    let of = verdict.tests.len();
    match verdict.status {
        VerdictStatus::Passed => Some(Finding::defect(
            FindingKind::EmptyPasses,
            format!("{what} passes"),
        )),
        _ if passed > 0 => Some(Finding::note(
            FindingKind::WeakTest,
            format!("{passed} of {of} tests pass for {what}"),
        )),
        _ => None,
    }
}

/// Returns a submission that defines what it must and does nothing.
fn empty_submission(task: &Task) -> String {
    if task.submission_kind() == SubmissionKind::Text {
        return "I do not know.".to_owned();
    }
    let reference = task.reference.as_deref().unwrap_or_default();
    let is = |keyword: &str, name: &str| {
        reference.lines().any(|line| {
            line.strip_prefix(keyword)
                .and_then(|rest| rest.trim_start().strip_prefix(name))
                .is_some_and(|rest| rest.starts_with(['(', ':', ' ']))
        })
    };
    let definition = |name: &String| {
        if is("class ", name) || (reference.is_empty() && name == "Solution") {
            format!(
                "class {name}:\n    def __init__(self, *args, **kwargs):\n        pass\n    def \
                 __getattr__(self, name):\n        return lambda *args, **kwargs: None\n"
            )
        } else if reference.is_empty() || is("def ", name) || is("async def ", name) {
            format!("def {name}(*args, **kwargs):\n    return None\n")
        } else {
            format!("{name} = None\n")
        }
    };
    let definitions: String = task.entry_points.iter().map(definition).collect();
    format!("pass\n{definitions}")
}

/// Runs the `>>>` examples of the prompt against the reference.
fn check_examples(task: &Task, reference: &str, grader: &dyn Grader) -> Option<Finding> {
    if !task.prompt.contains(">>> ") || task.entry_points.is_empty() {
        return None;
    }
    // The end of a docstring is not part of an example's output.
    let text = task.prompt.replace("\"\"\"", "\n").replace("'''", "\n");
    let text = text.replace("```", "\n");
    let verdict = grader.grade(&GradeRequest {
        grader: "doctest".to_owned(),
        code: reference.to_owned(),
        setup: task.setup.clone(),
        tests: vec![text.clone()],
        entry_points: task.entry_points.clone(),
        ..GradeRequest::default()
    });
    if verdict.status != VerdictStatus::Failed {
        return None;
    }
    verdict.tests.iter().find_map(|test| {
        let (expected, got) = (test.expected.as_ref()?, test.got.as_ref()?);
        let line: usize = test.name.strip_prefix("line_")?.parse().ok()?;
        let example = text.lines().nth(line.checked_sub(1)?)?.trim();
        // The prompt is read as it stands, so an escape in a docstring is not what it means.
        if test.status == TestStatus::Passed || example.contains('\\') || expected.contains('\\') {
            return None;
        }
        // `>>> f(1) == 2` with nothing below it is meant to hold.
        if expected.is_empty() && got == "True" || is_same_value(expected, got) {
            return None;
        }
        let message = match expected.as_str() {
            "" => format!("the prompt has `{example}`; the reference gives `{got}`"),
            _ => {
                format!("the prompt has `{example}` give `{expected}`; the reference gives `{got}`")
            }
        };
        Some(Finding::defect(FindingKind::WrongExample, message))
    })
}

/// Whether two values differ in white space and the kind of quotes only.
fn is_same_value(one: &str, other: &str) -> bool {
    let normal = |text: &str| -> String {
        (text.chars().filter(|c| !c.is_whitespace()))
            .map(|c| if c == '\'' { '"' } else { c })
            .collect()
    };
    normal(one) == normal(other)
}

/// Looks for hidden tests in the prompt.
fn check_leak(task: &Task) -> Option<Finding> {
    let entry_point = task.entry_points.first().map_or("", String::as_str);
    let (shown, of) = if task.cases.is_empty() {
        let found = shown_assertions(&task.prompt, task.hidden(), entry_point);
        (found.shown, found.of)
    } else if task.submission_kind() == SubmissionKind::Code {
        let hidden = task.hidden_cases();
        let is_shown = |case: &&crate::grader::TestCase| {
            has_text(&task.prompt, &case.input) && has_text(&task.prompt, &case.output)
        };
        (hidden.iter().filter(is_shown).count(), hidden.len())
    } else {
        return None; // a number of a problem's answer may well stand in the problem
    };
    if shown == 0 {
        return None;
    }
    let message = format!("the prompt shows {shown} of {of} hidden tests");
    // Problems with examples show some of their tests on purpose; a list of tests says which.
    if task.grader == DEFAULT_GRADER || shown == of {
        Some(Finding::defect(FindingKind::Leak, message))
    } else {
        Some(Finding::note(FindingKind::Leak, message))
    }
}

fn check_repeats(task: &Task) -> Option<Finding> {
    let is_first = |index: usize| {
        let tests = &task.tests;
        let trimmed = tests[index].trim();
        tests[..index].iter().all(|test| test.trim() != trimmed)
    };
    let is_first_case = |index: usize| !task.cases[..index].contains(&task.cases[index]);
    let test = (0..task.tests.len()).find(|index| !is_first(*index));
    let case = (0..task.cases.len()).find(|index| !is_first_case(*index));
    let text = match (test, case) {
        (Some(index), _) => task.tests[index].trim().to_owned(),
        (None, Some(index)) => format!("input {}", task.cases[index].input.trim()),
        (None, None) => return None,
    };
    let quoted: String = text.chars().take(MAX_QUOTED).collect();
    Some(Finding::note(
        FindingKind::RepeatedTest,
        format!("`{quoted}` is there twice"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_submission_defines_what_it_must() {
        let task = Task {
            entry_points: ["f", "C", "LIMIT", "g"].map(str::to_owned).into(),
            reference: Some(
                "LIMIT = 3\nclass C: pass\ndef f(x): pass\nasync def g(): pass".to_owned(),
            ),
            ..Task::default()
        };
        let code = empty_submission(&task);
        for part in ["def f(", "class C:", "LIMIT = None", "def g("] {
            assert!(code.contains(part), "{code}");
        }
    }

    #[test]
    fn seeds_reach_both_sides() {
        let task = Task::default();
        let request = seeded(&task, "def f(): pass", 4);
        assert!(request.code.ends_with("_random.seed(4)\n"));
        assert!(request.setup[0].ends_with("_random.seed(4)"));
    }

    #[test]
    fn a_hidden_test_in_the_prompt_is_a_defect_of_a_list_and_a_note_of_a_file() {
        let mut task = Task {
            prompt: "Doubles: f(2) == 4".to_owned(),
            tests: vec!["assert f(1) == 2".to_owned(), "assert f(2) == 4".to_owned()],
            entry_points: vec!["f".to_owned()],
            visible_tests: 1,
            ..Task::default()
        };
        assert!(check_leak(&task).unwrap().is_defect);
        task.visible_tests = 2;
        assert_eq!(check_leak(&task), None);
        task.visible_tests = 0;
        task.grader = "check".to_owned();
        assert!(!check_leak(&task).unwrap().is_defect);
        task.tests.remove(0);
        assert!(check_leak(&task).unwrap().is_defect);
    }
}
