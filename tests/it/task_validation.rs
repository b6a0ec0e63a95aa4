//! What is found wrong with task sets, and the reference solutions of the published ones.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use wardian::grader::{GradeLimits, GraderRegistry};
use wardian::sandbox::Sandbox;
use wardian::task::{FindingKind, Split, TaskOptions, TaskReport, TaskRow, TaskSet, validate};

use crate::sandbox::python;

fn graders() -> GraderRegistry {
    let sandbox: Arc<dyn Sandbox> = Arc::new(python().clone());
    GraderRegistry::standard(&sandbox, &GradeLimits::default())
}

fn check(path: &Path, split: Option<Split>, seeds: u32) -> Vec<TaskReport> {
    let options = TaskOptions {
        split,
        visible_tests: 1,
        ..TaskOptions::default()
    };
    let rows = TaskSet::rows(path, &options).unwrap();
    validate(rows, &graders(), seeds, &|| {})
}

/// Validates some rows of a test split, with one seed.
fn check_of_test_split(path: &Path, keep: impl Fn(&TaskRow) -> bool) -> Vec<TaskReport> {
    let options = TaskOptions {
        split: Some(Split::Test),
        ..TaskOptions::default()
    };
    let mut rows = TaskSet::rows(path, &options).unwrap();
    rows.retain(keep);
    validate(rows, &graders(), 1, &|| {})
}

/// Returns what is found about one row.
fn found(row: &Value) -> Vec<(FindingKind, bool, String)> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tasks.jsonl");
    fs_err::write(&path, row.to_string()).unwrap();
    let reports = check(&path, None, 5);
    let findings = reports.into_iter().flat_map(|report| report.findings);
    findings
        .map(|finding| (finding.kind, finding.is_defect, finding.message))
        .collect()
}

fn mbpp(code: &str, tests: &[&str]) -> Value {
    json!({"task_id": 1, "prompt": "Double.", "code": code, "test_imports": [], "test_list": tests})
}

#[track_caller]
fn assert_one(row: &Value, kind: FindingKind, is_defect: bool, part: &str) {
    let findings = found(row);
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(
        (findings[0].0, findings[0].1),
        (kind, is_defect),
        "{findings:?}"
    );
    assert!(findings[0].2.contains(part), "{findings:?}");
}

#[test]
fn a_sound_task_has_no_findings() {
    let row = mbpp(
        "def f(x): return 2 * x",
        &["assert f(1) == 2", "assert f(2) == 4"],
    );
    assert_eq!(found(&row), []);
}

#[test]
fn what_is_wrong_is_found() {
    let good = "def f(x): return 2 * x";
    assert_one(
        &mbpp(
            "def f(x): return x",
            &["assert f(0) == 0", "assert f(2) == 4"],
        ),
        FindingKind::ReferenceFails,
        true,
        "1 of 2 tests fail; test_2: AssertionError",
    );
    assert_one(
        &mbpp("def f(x): pass", &["assert f(1) is None"]),
        FindingKind::EmptyPasses,
        true,
        "`return None` passes",
    );
    assert_one(
        &mbpp(good, &["assert f(1)", "assert not f(0)"]),
        FindingKind::WeakTest,
        false,
        "1 of 2 tests pass for `return None`",
    );
    assert_one(
        &mbpp(good, &["assert f(1) == 2", "assert f(1) == 2 "]),
        FindingKind::RepeatedTest,
        false,
        "`assert f(1) == 2` is there twice",
    );
    let random = "import random\ndef f(x): return 2 * x if random.random() < 0.5 else 0";
    let findings = found(&mbpp(random, &["assert f(1) == 2", "assert f(3) == 6"]));
    assert!(
        findings
            .iter()
            .any(|finding| finding.0 == FindingKind::Nondeterministic),
        "{findings:?}"
    );
    let mut row = mbpp(good, &["assert f(1) == 2", "assert f(2) == 4"]);
    row["prompt"] = json!("Double, so that f( 2 ) is doubled: f(2) = 4.");
    assert_one(&row, FindingKind::Leak, true, "1 of 1 hidden tests");
    row["prompt"] = json!("Double, so that f(1) == 2."); // shown on purpose
    assert_eq!(found(&row), []);
    row["prompt"] = json!("Double.\n\n>>> f(1)\n3\n");
    assert_one(
        &row,
        FindingKind::WrongExample,
        true,
        "`>>> f(1)` give `3`; the reference gives `2`",
    );
    row["test_imports"] = json!(["import pandas"]);
    let findings = found(&row);
    assert_eq!(findings[0].0, FindingKind::NotGradable);
    assert!(findings[0].2.contains("`pandas`"), "{findings:?}");
    assert_one(
        &json!({"task_id": 1}),
        FindingKind::Unreadable,
        true,
        "row 1 has no `prompt`",
    );
}

#[test]
fn random_tests_are_found_too() {
    let row = json!({
        "task_id": "a", "prompt": "p", "grader": "pytest", "code": "def f(x): return 2 * x",
        "test": "import random\ndef test_a():\n    assert f(random.randint(0, 3)) > 1\n",
    });
    let findings = found(&row);
    assert!(
        findings
            .iter()
            .any(|finding| finding.0 == FindingKind::Nondeterministic),
        "{findings:?}"
    );
}

#[test]
fn programs_and_answers_are_checked_as_well() {
    let mut row = json!({
        "task_id": "a", "prompt": "Print twice the number.", "grader": "stdio",
        "code": "print(2 * int(input()))", "cases": [{"input": "1", "output": "2"}, {"input": "4", "output": "8"}],
    });
    assert_eq!(found(&row), []);
    row["cases"][1]["output"] = json!("9");
    assert_one(
        &row,
        FindingKind::ReferenceFails,
        true,
        "expected `9`, got `8`",
    );
    let row = json!({"question": "2 + 2?", "answer": "It is 4.\n#### 4"});
    assert_eq!(found(&row), []);
}

/// Rows as APPS and `LiveCodeBench` have them, with JSON as text.
#[test]
fn contest_problems_are_graded() {
    let program = json!({
        "problem_id": 1, "question": "Add the numbers.", "starter_code": "",
        "solutions": "[\"a, b = map(int, input().split())\\nprint(a + b)\"]",
        "input_output": "{\"inputs\": [\"1 2\\n\", \"3 4\\n\"], \"outputs\": [\"3\\n\", \"7\\n\"]}",
    });
    assert_eq!(found(&program), []);
    let method = json!({
        "problem_id": 2, "question": "Add the numbers.",
        "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
        "solutions": "[\"class Solution:\\n    def add(self, a, b):\\n        return a + b\"]",
        "input_output": "{\"fn_name\": \"add\", \"inputs\": [[1, 2], [100000000000000000000, 1]], \
                         \"outputs\": [[3], [100000000000000000001]]}",
    });
    assert_eq!(found(&method), []);
    let function = json!({
        "problem_id": 3, "question": "Add the numbers.", "starter_code": "",
        "solutions": "[\"def add(a, b):\\n    return a - b\"]",
        "input_output": "{\"fn_name\": \"add\", \"inputs\": [[1, 2]], \"outputs\": [3]}",
    });
    assert_one(
        &function,
        FindingKind::ReferenceFails,
        true,
        "expected 3, got -1",
    );
    let live = json!({
        "question_id": "a", "question_content": "Add up.", "starter_code": "",
        "public_test_cases": "[{\"input\": \"1 2\", \"output\": \"3\", \"testtype\": \"stdin\"}]",
        "private_test_cases": "[{\"input\": \"4 5\", \"output\": \"9\", \"testtype\": \"stdin\"}]",
        "metadata": "{}",
    });
    assert_one(&live, FindingKind::NoReference, false, "no reference");
}

// ---- published sets

#[expect(
    clippy::print_stderr,
    reason = "a test that does nothing has to say so"
)]
fn shared(path: &str) -> Option<PathBuf> {
    let Some(root) = std::env::var_os("WARDIAN_SHARED") else {
        eprintln!("skipped: WARDIAN_SHARED does not name the folder of reference data");
        return None;
    };
    Some(PathBuf::from(root).join("data").join(path))
}

fn defects(reports: &[TaskReport]) -> Vec<(&str, FindingKind)> {
    let of = |report: &'_ TaskReport| -> Vec<FindingKind> {
        let defects = report.findings.iter().filter(|finding| finding.is_defect);
        defects.map(|finding| finding.kind).collect()
    };
    reports
        .iter()
        .flat_map(|report| {
            of(report)
                .into_iter()
                .map(|kind| (report.task_id.as_str(), kind))
        })
        .collect()
}

#[test]
fn sanitized_mbpp_is_sound() {
    let Some(path) = shared("mbpp/sanitized-mbpp.open.json") else {
        return;
    };
    let reports = check(&path, None, 5);
    assert_eq!(reports.len(), 299);
    assert_eq!(defects(&reports), []);
    let quadratic = shared("mbpp/sanitized-mbpp.open.json").unwrap();
    let quadratic = check(&quadratic, Some(Split::Test), 1);
    assert_eq!(quadratic.len(), 129);
}

/// HumanEval/34 tests nothing but its example; the examples of 47 and 116 are false, as native
/// `CPython` agrees.
#[test]
fn the_defects_of_humaneval_are_found() {
    let Some(path) = shared("humaneval/HumanEval.jsonl") else {
        return;
    };
    let reports = check(&path, None, 2);
    assert_eq!(reports.len(), 164);
    assert_eq!(
        defects(&reports),
        [
            ("HumanEval/34", FindingKind::Leak),
            ("HumanEval/47", FindingKind::WrongExample),
            ("HumanEval/116", FindingKind::WrongExample),
        ]
    );
}

/// The released test of 32 calls its helper with the wrong arguments.
#[test]
fn the_defect_of_humaneval_plus_is_found() {
    let Some(path) = shared("humaneval_plus/hf") else {
        return;
    };
    let reports = check_of_test_split(&path, |row| (31..36).contains(&row.row));
    assert_eq!(reports.len(), 5);
    assert_eq!(
        defects(&reports),
        [("HumanEval/32", FindingKind::ReferenceFails)]
    );
    let report = reports
        .iter()
        .find(|report| report.task_id == "HumanEval/32");
    let message = &report.unwrap().findings[0].message;
    assert!(
        message.contains("TypeError: Value after * must be an iterable, not float"),
        "{message}"
    );
}

/// 590 compares the last digit of `cmath`, 596 the size of an object with that on a 64-bit machine.
#[test]
fn mbpp_plus_references_pass() {
    /// Rows that take more memory or more than half a minute of work.
    const LARGE: [&str; 4] = ["255", "271", "599", "603"];
    let Some(path) = shared("mbpp_plus/hf") else {
        return;
    };
    let reports = check_of_test_split(&path, |row| {
        row.task
            .as_ref()
            .is_ok_and(|task| !LARGE.contains(&task.id.as_str()))
    });
    assert_eq!(reports.len(), 263);
    let expected = ["590", "596"].map(|id| (id, FindingKind::ReferenceFails));
    assert_eq!(defects(&reports), expected);
}

#[test]
fn full_mbpp_references_pass() {
    let Some(path) = shared("mbpp/mbpp.open.jsonl") else {
        return;
    };
    let reports = check(&path, None, 1);
    assert_eq!(reports.len(), 846);
    assert_eq!(defects(&reports), []);
}

#[test]
fn gsm8k_references_pass() {
    let Some(path) = shared("gsm8k/test.jsonl") else {
        return;
    };
    let reports = check(&path, None, 2);
    assert_eq!((reports.len(), defects(&reports)), (1319, vec![]));
}
