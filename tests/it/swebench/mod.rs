//! SWE-bench: rows, their division, and grading as the official harness grades.

mod actors;
mod grading;

use std::collections::BTreeMap;
use std::path::PathBuf;

use indexmap::IndexMap;
use rstest::rstest;
use serde_json::Value;
use wardian::grader::swebench::{
    EvalLog, EvalType, Expected, InfraTier, LogParser, Markers, TestsReport, classify, split_patch,
};
use wardian::task::swebench::{SwebenchInstance, divide};

const GOLDEN: &str = include_str!("../../golden/swebench_reports.json");

/// Where we are stricter than the harness, with the reason.
const STRICTER: [(&str, &str); 2] = [
    (
        "word_is_no_status",
        "a test with an unknown word for a status is broken, where the harness counts it nowhere",
    ),
    (
        "cut_id_word_is_no_status",
        "likewise for one that was found by the start of its name",
    ),
];

fn strings(value: &Value) -> Vec<String> {
    let items = value.as_array().expect("it is a list").iter();
    items
        .map(|item| item.as_str().expect("its items are texts").to_owned())
        .collect()
}

#[test]
fn logs_are_read_and_judged_as_by_the_official_harness() {
    let golden: Value = serde_json::from_str(GOLDEN).expect("the file is JSON");
    let cases = golden["cases"].as_array().expect("cases are listed");
    assert!(cases.len() >= 60, "{}", cases.len());
    let mut stricter = Vec::new();
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let parser: LogParser = case["parser"].as_str().unwrap().parse().unwrap();
        let eval_type: EvalType = serde_json::from_value(case["eval_type"].clone()).unwrap();
        let expected = Expected {
            fail_to_pass: strings(&case["FAIL_TO_PASS"]),
            pass_to_pass: strings(&case["PASS_TO_PASS"]),
        };
        let log = case["log"].as_str().unwrap();
        let read = EvalLog::read(log, &Markers::official(), parser, None);
        assert_eq!(read.is_ok(), case["found"] == true, "{name}: {read:?}");
        let Ok(read) = read else {
            let sign = classify(log);
            let reason = sign.map(|sign| sign.reason);
            assert_eq!(reason, case["infra_failure_reason"].as_str(), "{name}");
            let is_environment = sign.is_some_and(|sign| sign.tier == InfraTier::Environment);
            assert_eq!(is_environment, case["infra_failure"] == true, "{name}");
            assert_eq!(case["resolved"], false, "{name}");
            continue;
        };
        let states = serde_json::to_value(&read.tests).unwrap();
        assert_eq!(states, case["statuses"], "{name}");
        let report = TestsReport::judge(&read.tests, &expected, eval_type);
        let side = |success: &[String], failure: &[String]| serde_json::json!({"success": success, "failure": failure});
        let ours = serde_json::json!({
            "FAIL_TO_PASS": side(&report.fail_to_pass, &report.still_failing),
            "PASS_TO_PASS": side(&report.pass_to_pass, &report.broken),
        });
        let status = serde_json::to_value(report.resolution()).unwrap();
        if ours == case["tests"] && status == case["status"] {
            continue;
        }
        assert_eq!(case["resolved"], true, "{name}: stricter is never softer");
        assert_ne!(status, "RESOLVED_FULL", "{name}: {ours} {}", case["tests"]);
        stricter.push(name);
    }
    let named: Vec<&str> = STRICTER.iter().map(|(name, _)| *name).collect();
    assert_eq!(stricter, named);
}

/// Returns a file of the shared rows, or says why the test does nothing.
#[expect(
    clippy::print_stderr,
    reason = "a test that does nothing has to say so"
)]
fn shared(path: &str) -> Option<PathBuf> {
    let Some(root) = std::env::var_os("WARDIAN_SHARED") else {
        eprintln!("skipped: WARDIAN_SHARED does not name the folder of reference data");
        return None;
    };
    Some(
        PathBuf::from(root)
            .join("data/swebench_verified")
            .join(path),
    )
}

fn verified() -> Option<Vec<SwebenchInstance>> {
    let path = shared("hf/data/test-00000-of-00001.parquet")?;
    Some(SwebenchInstance::read_file(&path).expect("the rows are read"))
}

#[test]
fn all_of_verified_is_read() {
    let Some(instances) = verified() else { return };
    assert_eq!(instances.len(), 500);
    for instance in &instances {
        let id = &instance.instance_id;
        let tests = instance.test_paths();
        let split = split_patch(&instance.reference(), &tests).unwrap();
        assert_eq!(split.dropped, [""; 0], "{id}");
        assert_eq!(split.kept, instance.reference(), "{id}");
        assert_eq!(split.size, instance.reference_size(), "{id}");
        assert!(split.size > 0, "{id}");
        // What an agent does to the tests themselves never reaches them.
        let split = split_patch(&instance.test_patch, &tests).unwrap();
        assert_eq!((split.kept.as_str(), split.size), ("", 0), "{id}");
        let plan = instance.eval_plan("7f");
        assert!(plan.test.contains("test"), "{id}: {}", plan.test);
        assert!(
            instance
                .prompt()
                .contains(instance.problem_statement.trim())
        );
    }
    let cut = instances.iter().flat_map(|instance| {
        let Expected {
            fail_to_pass,
            pass_to_pass,
        } = &instance.expected;
        fail_to_pass.iter().chain(pass_to_pass)
    });
    let is_cut = |name: &&String| name.matches('[').count() > name.matches(']').count();
    assert_eq!(cut.filter(is_cut).count(), 676);
}

#[test]
fn json_lines_give_the_same_rows() {
    let (Some(all), Some(path)) = (verified(), shared("swebench_verified.small40.jsonl")) else {
        return;
    };
    let lines = SwebenchInstance::read_file(&path).unwrap();
    assert_eq!(lines.len(), 40);
    for instance in &lines {
        assert!(all.contains(instance), "{}", instance.instance_id);
    }
}

#[test]
fn a_fifth_of_each_repository_is_measured_on() {
    let Some(instances) = verified() else { return };
    let count = |instances: &[SwebenchInstance]| {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for instance in instances {
            *counts.entry(instance.repo.clone()).or_default() += 1;
        }
        counts
    };
    let all = count(&instances);
    let split = divide(instances.clone(), 100, 7);
    assert_eq!((split.train.len(), split.validation.len()), (400, 100));
    for (repo, held) in count(&split.validation) {
        let share = all[&repo] as f64 / 5.0;
        assert!(
            (held as f64 - share).abs() < 1.0,
            "{repo}: {held} of {share}"
        );
    }
    let mut turned = instances.clone();
    turned.reverse();
    let ids = |instances: &[SwebenchInstance]| {
        let mut ids: Vec<_> = instances
            .iter()
            .map(|one| one.instance_id.clone())
            .collect();
        ids.sort();
        ids
    };
    let again = divide(turned, 100, 7);
    assert_eq!(ids(&split.validation), ids(&again.validation));
    let other = divide(instances, 100, 8);
    assert_ne!(ids(&split.validation), ids(&other.validation));
}

fn row(changes: &[(&str, Value)]) -> String {
    let patch = "--- a/src/a.py\n+++ b/src/a.py\n@@ -1 +1 @@\n-a\n+b\n";
    let mut row: IndexMap<&str, Value> = IndexMap::from([
        ("repo", "pallets/flask".into()),
        ("instance_id", "pallets__flask-1".into()),
        ("base_commit", "abc".into()),
        ("version", "2.3".into()),
        ("problem_statement", "It breaks.".into()),
        ("patch", patch.into()),
        ("test_patch", patch.replace("src/a", "tests/test_a").into()),
        ("FAIL_TO_PASS", "[\"tests/test_a.py::t\"]".into()),
        ("PASS_TO_PASS", serde_json::json!(["tests/test_a.py::u"])),
    ]);
    row.extend(changes.iter().cloned());
    row.retain(|_, value| *value != Value::Null);
    serde_json::to_string(&row).expect("it is JSON")
}

fn read(rows: &[String]) -> Result<Vec<SwebenchInstance>, String> {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let path = folder.path().join("a.jsonl");
    fs_err::write(&path, rows.join("\n")).expect("the file is written");
    SwebenchInstance::read_file(&path).map_err(|error| error.to_string())
}

#[test]
fn a_row_says_how_it_is_run_or_its_repository_does() {
    let instance = &read(&[row(&[])]).unwrap()[0];
    assert_eq!(instance.log_parser, LogParser::Pytest);
    assert_eq!(
        instance.image(),
        "swebench/sweb.eval.x86_64.pallets_1776_flask-1:latest"
    );
    assert_eq!(instance.resource_name(), "pallets-flask-1");
    let plan = instance.eval_plan("7f");
    assert!(
        plan.test
            .ends_with("cd /testbed\npytest -rA tests/test_a.py\n"),
        "{}",
        plan.test
    );
    let own = row(&[
        ("workdir", "/src".into()),
        ("test_command", "python -m pytest -rA tests".into()),
        ("environment", serde_json::json!(["export A=1"])),
    ]);
    let plan = read(&[own]).unwrap()[0].eval_plan("7f");
    assert_eq!(
        plan.test,
        "exec 2>&1\nexport A=1\ncd /src\npython -m pytest -rA tests\n"
    );
    let official = row(&[
        ("image", "a/b:1".into()),
        ("log_parser", "parse_log_django".into()),
        ("eval_type", "fail_only".into()),
        (
            "eval_script",
            "cd /testbed\n: '>>>>> Start Test Output'\nrun\n: '>>>>> End Test Output'".into(),
        ),
    ]);
    let instance = &read(&[official]).unwrap()[0];
    assert_eq!(instance.log_parser, LogParser::Django);
    assert_eq!(instance.eval_type, EvalType::FailOnly);
    assert_eq!(instance.image(), "a/b:1");
    assert!(!instance.eval_plan("7f").test.contains(">>>>>"));
}

#[rstest]
#[case::no_repo(&[("repo", Value::Null)], "row 1 has no `repo`")]
#[case::unknown_repo(&[("repo", "a/b".into())], "row 1 has a `repo` that cannot be used; only repositories in Python")]
#[case::unknown_commands(&[("repo", "a/b".into()), ("log_parser", "parse_log_pytest".into())], "give `test_command` or `eval_script`")]
#[case::unknown_parser(&[("log_parser", "parse_log_jest".into())], "row 1 has a `log_parser` that cannot be used")]
#[case::no_tests(&[("FAIL_TO_PASS", "[]".into())], "row 1 has an empty `FAIL_TO_PASS`")]
#[case::no_list(&[("PASS_TO_PASS", "a".into())], "row 1 has a `PASS_TO_PASS` that is not a list of tests")]
#[case::hostile_commit(&[("base_commit", "--all".into())], "row 1 has a `base_commit` that cannot be used")]
#[case::hostile_tests(&[("test_patch", "--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n".into())], "row 1 has a `test_patch` that is not what `git diff` writes")]
fn a_bad_row_is_named_with_its_field(#[case] changes: &[(&str, Value)], #[case] expected: &str) {
    let error = read(&[row(changes)]).unwrap_err();
    assert!(error.contains(expected), "{error}");
}

#[test]
fn an_id_is_there_once() {
    let error = read(&[row(&[]), row(&[])]).unwrap_err();
    assert!(
        error.contains("row 2 repeats task id `pallets__flask-1`"),
        "{error}"
    );
}
