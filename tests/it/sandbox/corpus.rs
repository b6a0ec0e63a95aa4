//! The corpus in `tests/data/programs`: ordinary programs with the output of a native CPython, and
//! hostile ones with what may become of them.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::collections::BTreeMap;
use std::fmt::Write as _;

use bytesize::ByteSize;
use serde::Deserialize;
use wardian::sandbox::{ExecOutcome, ExecRequest, Exit, Limits, WasmRuntime};

use super::python;

#[derive(Deserialize)]
struct Case {
    id: String,
    code: String,
    #[serde(default)]
    stdin: String,
    /// What another program holds in its memory before this one runs.
    plant: Option<String>,
    expect: Expectation,
}

#[derive(Deserialize)]
struct Expectation {
    exit_code: Option<u32>,
    stdout: Option<String>,
    stdout_len: Option<usize>,
    #[serde(default)]
    stdout_contains: Vec<String>,
    #[serde(default)]
    stdout_not_contains: Vec<String>,
    #[serde(default)]
    stderr_contains: Vec<String>,
    /// Hostile programs: how it may end.
    #[serde(default)]
    allow: Vec<String>,
}

fn cases(prefix: &str) -> Vec<Case> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/programs");
    let mut cases: Vec<Case> = fs_err::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.starts_with(prefix)
        })
        .map(|path| serde_json::from_slice(&fs_err::read(path).unwrap()).unwrap())
        .collect();
    cases.sort_by(|a, b| a.id.cmp(&b.id));
    cases
}

fn run(runtime: &WasmRuntime, case: &Case) -> ExecOutcome {
    let limits = Limits {
        memory: ByteSize::mib(256),
        fuel: 12_000_000_000,
        ..Limits::default()
    };
    if let Some(plant) = &case.plant {
        let code = format!("kept = [{plant:?} + str(i) for i in range(1000)]");
        runtime.exec(&ExecRequest::new(code), &limits).unwrap();
    }
    let request = ExecRequest {
        code: case.code.clone(),
        stdin: case.stdin.clone(),
        ..ExecRequest::default()
    };
    runtime.exec(&request, &limits).unwrap()
}

/// Returns the ordinary programs that do not do as natively, and what they do.
pub(super) fn ordinary_programs_that_differ(runtime: &WasmRuntime) -> BTreeMap<String, String> {
    let cases = cases("ord-");
    assert_eq!(cases.len(), 43);
    let differs = |case: &Case| {
        let expect = &case.expect;
        let outcome = run(runtime, case);
        let (stdout, stderr) = (outcome.stdout_text(), outcome.stderr_text());
        let is_same = outcome.exit
            == Exit::Exited {
                code: expect.exit_code.unwrap(),
            }
            && expect.stdout.as_ref().is_none_or(|text| stdout == *text)
            && expect
                .stdout_len
                .is_none_or(|length| outcome.stdout.len() == length)
            && expect
                .stdout_contains
                .iter()
                .all(|part| stdout.contains(part))
            && expect
                .stderr_contains
                .iter()
                .all(|part| stderr.contains(part));
        let Case { id, code, .. } = case;
        let exit = &outcome.exit;
        let did = format!("{exit}\n{code}\n--- stdout\n{stdout}\n--- stderr\n{stderr}");
        (!is_same).then(|| (id.clone(), did))
    };
    cases.iter().filter_map(differs).collect()
}

#[test]
fn ordinary_programs_do_as_natively() {
    let differing = ordinary_programs_that_differ(python());
    assert!(differing.is_empty(), "{differing:#?}");
}

/// Runs each attack and says how it ended.
///
/// # Panics
///
/// If one ends as it may not, or does something to the next program.
pub(super) fn hostile_programs(runtime: &WasmRuntime) -> String {
    let cases = cases("hos-");
    assert_eq!(cases.len(), 44);
    let mut record = String::new();
    for case in &cases {
        let outcome = run(runtime, case);
        let (stdout, stderr) = (outcome.stdout_text(), outcome.stderr_text());
        let context = format!("{}: {}\n{stdout}\n{stderr}", case.id, outcome.exit);
        let kind = match &outcome.exit {
            Exit::Exited { code: 0 } => "ok",
            Exit::Exited { .. } => "error",
            Exit::OutOfFuel { .. } => "timeout",
            Exit::OutOfMemory { .. } => "memory",
            Exit::Trapped { .. } => "trap",
            exit => panic!("{}: {exit}", case.id),
        };
        let is_cut = outcome.stdout_truncated || outcome.stderr_truncated;
        let allowed = |kind: &str| case.expect.allow.iter().any(|allowed| allowed == kind);
        assert!(
            allowed(kind) || (is_cut && allowed("output_limit")),
            "{context}\nmay end by {:?}",
            case.expect.allow
        );
        for part in &case.expect.stdout_not_contains {
            assert!(!stdout.contains(part), "{context}");
        }
        for part in &case.expect.stdout_contains {
            assert!(stdout.contains(part), "{context}\nmisses {part:?}");
        }
        let line = |text: &str| -> String {
            let line = text.lines().last().unwrap_or_default();
            line.chars().take(100).collect()
        };
        let cut = if is_cut { ", output cut" } else { "" };
        writeln!(record, "{}: {kind}{cut}", case.id).unwrap();
        if let Exit::Trapped { reason } = &outcome.exit {
            writeln!(record, "    trap: {reason}").unwrap();
        }
        for (name, text) in [("stdout", &stdout), ("stderr", &stderr)] {
            // How far the report of a `MemoryError` comes depends on the last pages.
            let is_luck = kind == "memory" && name == "stderr";
            if !text.is_empty() && !is_luck {
                writeln!(record, "    {name}: {}", line(text)).unwrap();
            }
        }
        // The next program finds nothing of it.
        let next = runtime.exec(&ExecRequest::new("print(6 * 7)"), &Limits::default());
        assert_eq!(next.unwrap().stdout_text(), "42\n", "after {}", case.id);
    }
    record
}

/// How each attack ends, in full: one that meets another barrier than before, or none as it has a
/// mistake, changes this record.
#[test]
fn hostile_programs_are_contained() {
    insta::assert_snapshot!("hostile_programs", hostile_programs(python()));
}
