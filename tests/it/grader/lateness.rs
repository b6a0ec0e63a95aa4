//! Lateness: what a submission that meets the deadline, or makes the tests meet it, can get out of.

use std::time::Duration;

use rstest::rstest;
use wardian::grader::{GradeLimits, Grader as _, TestStatus, Verdict, VerdictStatus};
use wardian::sandbox::Limits;

use super::common::{graders_with, judge_with};
use super::stdio::stdio;
use super::{grader_with, request};

/// What a submission never uses up in the time that it has.
const ENDLESS: u64 = 1 << 50;

/// As little time as lets a submission be loaded on a busy machine, and fuel without end.
fn hurried() -> GradeLimits {
    GradeLimits {
        candidate: Limits {
            fuel: ENDLESS,
            deadline: Duration::from_millis(100),
            ..GradeLimits::default().candidate
        },
        ..GradeLimits::default()
    }
}

#[track_caller]
fn assert_late(verdict: &Verdict) {
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::InfraError, None),
        "{verdict:?}"
    );
    assert!(verdict.tests[0].message.contains("deadline"), "{verdict:?}");
}

#[track_caller]
fn assert_failed_in_spite_of_lateness(verdict: &Verdict) {
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(0.0)),
        "{verdict:?}"
    );
    let late = verdict.tests.last().expect("there are tests");
    assert_eq!(late.status, TestStatus::NotRun, "{verdict:?}");
    assert!(late.message.contains("deadline"), "{verdict:?}");
}

/// Loops for ever if told to.
const LOOPS: &str = "def f(x, g=None):\n    while x == 1: pass\n    return g() if g else x";

/// Time that ran out before the fuel did says nothing about the submission, in whatever test.
#[rstest]
#[case::submission("f(1)")]
#[case::submission_in_a_callback("f(2, lambda: f(1))")]
fn a_deadline_is_our_fault(#[case] test: &str) {
    let verdict = grader_with(hurried()).grade(&request(LOOPS, &["assert f(0) == 0", test]));
    assert_late(&verdict);
}

/// Nor do the tests that were not begun for three that were late.
#[test]
fn three_deadlines_are_our_fault_too() {
    let tests = [
        "assert f(0) == 0",
        "f(1)",
        "f(1)",
        "f(1)",
        "assert f(0) == 0",
    ];
    assert_late(&grader_with(hurried()).grade(&request(LOOPS, &tests)));
}

/// A test that failed by itself has decided: whoever is late afterwards, or before, is late for nothing.
#[rstest]
#[case::after(&["assert f(0) == 1", "f(1)"])]
#[case::before(&["f(1)", "assert f(0) == 1", "f(1)"])]
fn lateness_takes_no_failure_back(#[case] tests: &[&str]) {
    let verdict = grader_with(hurried()).grade(&request(LOOPS, tests));
    assert_failed_in_spite_of_lateness(&verdict);
    let failed = verdict
        .tests
        .iter()
        .filter(|test| test.status == TestStatus::Failed);
    assert_eq!(failed.count(), 1, "{verdict:?}");
}

/// Nor does it take back what went wrong in the very test before it was late.
#[test]
fn what_failed_before_the_deadline_has_failed() {
    let test = "try: f(object())\nexcept BaseException: pass\nf(1)";
    let verdict = grader_with(hurried()).grade(&request(LOOPS, &[test]));
    assert_eq!(verdict.reward, Some(0.0), "{verdict:?}");
    assert!(
        verdict.tests[0].message.starts_with("cannot send"),
        "{verdict:?}"
    );
    let limit = verdict.tests[0].limit.as_deref();
    assert!(
        limit.is_some_and(|limit| limit.contains("deadline")),
        "{verdict:?}"
    );
}

/// The same for the tests' instance, which is late in the second test.
#[test]
fn a_late_grader_takes_no_failure_back() {
    let limits = GradeLimits {
        grader: Limits {
            fuel: ENDLESS,
            // For each of two tests.
            deadline: Duration::from_millis(100),
            ..GradeLimits::default().grader
        },
        ..GradeLimits::default()
    };
    let code = "def f(x):\n    while x: yield 0";
    let endless = "for x in f(1): pass";
    let verdict = grader_with(limits.clone()).grade(&request(code, &["assert f(0) == 1", endless]));
    assert_failed_in_spite_of_lateness(&verdict);
    let verdict = grader_with(limits).grade(&request(code, &["assert list(f(0)) == []", endless]));
    assert_late(&verdict);
}

/// The same for tests that share one instance.
#[rstest]
#[case::pytest(
    "pytest",
    "def test_a(): assert f(0) == EXPECTED\ndef test_b(): f(1)\ndef test_c(): assert f(0) == 0"
)]
#[case::check(
    "check",
    "def check(f):\n    assert f(0) == EXPECTED\n    f(1)\n    assert f(0) == 0"
)]
#[case::bare_check(
    "check",
    "def check(f):\n    assert f(0) == EXPECTED\n    x = f(1)\n    assert x"
)]
#[case::unittest(
    "unittest",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(0), EXPECTED)\n    \
     def test_b(self): f(1)"
)]
#[case::doctest("doctest", ">>> f(0)\nEXPECTED\n>>> f(1)\n1\n")]
fn lateness_takes_no_failure_of_a_program_back(#[case] grader: &str, #[case] test: &str) {
    let graders = graders_with(&hurried());
    let wrong = judge_with(&graders, grader, &test.replace("EXPECTED", "1"), LOOPS);
    assert_failed_in_spite_of_lateness(&wrong);
    let right = judge_with(&graders, grader, &test.replace("EXPECTED", "0"), LOOPS);
    assert_late(&right);
}

/// What it raises cannot look as if it were only late.
#[test]
fn no_exception_looks_like_lateness() {
    let code = "E = type('the submission ran out of time or memory', (Exception,), {})\n\
                def f(x):\n    while x: pass\n    raise E";
    let tests = ["f(0)", "f(1)"];
    let verdict = grader_with(hurried()).grade(&request(code, &tests));
    assert_failed_in_spite_of_lateness(&verdict);
    let graders = graders_with(&hurried());
    let verdict = judge_with(&graders, "doctest", ">>> f(0)\n>>> f(1)\n", code);
    assert_failed_in_spite_of_lateness(&verdict);
    assert!(
        verdict.tests[0]
            .message
            .starts_with("'the submission ran out"),
        "{verdict:?}"
    );
}

#[test]
fn a_wrong_output_is_not_taken_back_for_a_late_one() {
    let graders = graders_with(&hurried());
    let code = "n = int(input())\nprint(n)\nwhile n == 1: pass";
    let grade = |first: &str| graders.grade(&stdio(code, &[("0", first), ("1", "1"), ("0", "0")]));
    assert_failed_in_spite_of_lateness(&grade("1"));
    assert_late(&grade("0"));
}

/// A callback's time is the tests' own, whatever they do in it: the submission's clock stands still.
#[rstest]
#[case::list("unit_tests", "assert f(busy) == 'done'")]
#[case::program("pytest", "def test_a(): assert f(busy) == 'done'")]
#[case::at_rest(
    "unit_tests",
    "busy()\nassert f(int) == 'done'\nbusy()\nassert f(int) == 'done'"
)]
fn the_tests_work_on_their_own_time(#[case] grader: &str, #[case] test: &str) {
    let code = "def f(g):\n    g()\n    return 'done'";
    let limits = hurried();
    let graders = graders_with(&limits);
    let test = format!("def busy():\n    for _ in range(15_000_000): pass\n{test}");
    let verdict = judge_with(&graders, grader, &test, code);
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
    // The submission would have been late.
    assert!(
        verdict.usage.grader.wall > limits.candidate.deadline,
        "{verdict:?}"
    );
    assert!(
        verdict.usage.candidate.wall < limits.candidate.deadline * 2,
        "{verdict:?}"
    );
}

/// Messages are work of ours that no loop of the guest's counts: they cost the sender fuel.
#[test]
fn a_flood_of_messages_is_paid_for() {
    let fuel = 2_000_000_000;
    let limits = GradeLimits {
        candidate: Limits {
            fuel,
            ..GradeLimits::default().candidate
        },
        ..GradeLimits::default()
    };
    let code = "import sys\ndef f(g):\n    G = sys._getframe(1).f_globals\n    \
                message = b'\\xff' * (16 << 20) if g else b''\n    \
                while True: G['_wardian_guest'].bridge_call(message)";
    let usage = [0, 1].map(|kind| {
        let test = format!("f({kind})");
        let verdict = grader_with(limits.clone()).grade(&request(code, &[&test]));
        assert_eq!(verdict.reward, Some(0.0), "{verdict:?}");
        assert!(
            verdict.tests[0].message.contains("out of fuel"),
            "{verdict:?}"
        );
        assert!(verdict.usage.candidate.fuel >= fuel, "{verdict:?}");
        verdict.usage
    });
    // Both got through to the tests' instance, the large ones with all they have.
    let [small, large] = usage.map(|usage| usage.grader);
    assert!(
        large.memory_bytes > small.memory_bytes + (16 << 20),
        "{usage:?}"
    );
    assert!(small.fuel > 2 * large.fuel, "{usage:?}");
}
