//! What honest submissions and tests do with each other, over the bridge as in one interpreter.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::io::Write as _;
use std::process::{Command, Stdio};

use serde::Deserialize;
use wardian::grader::{GradeRequest, Grader as _, TestStatus, VerdictStatus};

use super::grader;

/// A case of `tests/data/bridge/honest.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    code: String,
    #[serde(default)]
    setup: String,
    #[serde(default = "f")]
    entries: Vec<String>,
    tests: Vec<String>,
    /// Switches of the request.
    #[serde(default)]
    options: Vec<String>,
    /// Whether plain CPython can do the same.
    #[serde(default = "yes")]
    native: bool,
}

fn f() -> Vec<String> {
    vec!["f".to_owned()]
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
struct Cases {
    case: Vec<Case>,
}

fn cases() -> Vec<Case> {
    let root = env!("CARGO_MANIFEST_DIR");
    let text = fs_err::read_to_string(format!("{root}/tests/data/bridge/honest.toml")).unwrap();
    toml::from_str::<Cases>(&text).unwrap().case
}

impl Case {
    fn request(&self) -> GradeRequest {
        let options = self.options.iter();
        GradeRequest {
            code: self.code.clone(),
            setup: vec![self.setup.clone()],
            tests: self.tests.clone(),
            entry_points: self.entries.clone(),
            options: options.map(|name| (name.clone(), true.into())).collect(),
            ..GradeRequest::default()
        }
    }

    /// Each test with the submission in one interpreter, the names that are not entry points apart.
    fn native_program(&self) -> String {
        let text = |value| serde_json::to_string(value).unwrap();
        format!(
            "code, setup, entries, tests = {}, {}, {}, {}\n\
             for test in tests:\n    \
                 solution, names = {{'__name__': 'solution'}}, {{'__name__': 'tests'}}\n    \
                 exec(code, solution)\n    \
                 exec(setup, names)\n    \
                 names.update({{name: solution[name] for name in entries}})\n    \
                 exec(test, names)\n",
            text(&serde_json::json!(self.code)),
            text(&serde_json::json!(self.setup)),
            text(&serde_json::json!(self.entries)),
            text(&serde_json::json!(self.tests)),
        )
    }
}

#[test]
fn honest_programs_pass() {
    let cases = cases();
    assert!(cases.len() > 20);
    let mut failed = Vec::new();
    for case in &cases {
        let verdict = grader().grade(&case.request());
        if verdict.status != VerdictStatus::Passed {
            let tests = verdict.tests.into_iter();
            let why: Vec<_> = tests
                .filter(|test| test.status != TestStatus::Passed)
                .collect();
            failed.push((&case.name, why));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// The corpus says what plain CPython does, not what we wish it did.
#[test]
fn honest_programs_pass_in_plain_cpython() {
    let version = "import sys; sys.exit(sys.version_info < (3, 11))";
    let is_there = Command::new("python3").args(["-c", version]).status();
    if !is_there.is_ok_and(|status| status.success()) {
        println!("skipped: there is no python3 of version 3.11 or later");
        return;
    }
    for case in cases().iter().filter(|case| case.native) {
        let mut python = Command::new("python3")
            .args(["-I", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let program = case.native_program();
        let mut stdin = python.stdin.take().unwrap();
        stdin.write_all(program.as_bytes()).unwrap();
        drop(stdin);
        let output = python.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {errors}", case.name);
    }
}

/// The corpus can fail: each of its tests notices a submission that returns nothing.
#[test]
fn the_corpus_tells_right_from_wrong() {
    for case in cases() {
        let code: String = case
            .entries
            .iter()
            .map(|name| format!("def {name}(*args, **kwargs): return None\n"))
            .collect();
        let name = case.name.clone();
        let verdict = grader().grade(&GradeRequest {
            code,
            ..case.request()
        });
        assert_eq!(verdict.status, VerdictStatus::Failed, "{name}");
    }
}
