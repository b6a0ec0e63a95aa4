//! `check`: each statement that tests is a test.

use rstest::rstest;
use wardian::grader::{GradeLimits, GraderRegistry};

use super::common::{graders_with, judge, judge_with, outcomes};

/// Graders under which a loop without end ends soon.
fn short_of_fuel() -> GraderRegistry {
    let mut limits = GradeLimits::default();
    limits.candidate.fuel = 200_000_000;
    graders_with(&limits)
}

pub(super) const CHECK: &str = "\
METADATA = {}
def helper(x):
    return x
def check(candidate):
    'Checks.'
    assert candidate(1) == 2
    expected = helper(4)
    assert candidate(2) == expected, 'doubles'
    for n in range(3, 6):
        assert candidate(n) == 2 * n
";

#[test]
fn each_assertion_of_a_check_is_a_test() {
    let right = judge("check", CHECK, "def f(x): return 2 * x");
    assert_eq!(
        outcomes(&right),
        [("test_1", true), ("test_2", true), ("test_3", true)]
    );
    assert_eq!(right.reward, Some(1.0));
    let wrong = judge("check", CHECK, "def f(x): return 2 * x if x < 5 else 0");
    assert_eq!(
        outcomes(&wrong),
        [("test_1", true), ("test_2", true), ("test_3", false)]
    );
    assert_eq!(wrong.reward, Some(0.0));
    assert_eq!(
        wrong.tests[2].message,
        "AssertionError (line 10 of the tests)"
    );
}

#[test]
fn a_check_that_breaks_off_fails_what_it_did_not_reach() {
    let check = "def check(candidate):\n    assert candidate(1) == 1\n    x = candidate(2).y\n    assert x\n";
    let verdict = judge("check", check, "def f(x): return x");
    assert_eq!(outcomes(&verdict), [("test_1", true), ("test_2", false)]);
    assert!(
        verdict.tests[1]
            .message
            .starts_with("not reached: AttributeError")
    );
}

/// Behind the last statement that is a test there may be more that asks.
#[rstest]
#[case::raises(
    "def f(x):\n    if x == 2: raise ValueError\n    return 2 * x",
    "ValueError"
)]
#[case::exits(
    "import os\ndef f(x): return os._exit(0) if x == 2 else 2 * x",
    "the submission exited"
)]
#[case::runs_out(
    "def f(x):\n    while x == 2: pass\n    return 2 * x",
    "ran out of fuel"
)]
fn what_fails_behind_the_last_test_fails(#[case] code: &str, #[case] message: &str) {
    for last in [
        "x = candidate(2)",
        "return candidate(2) == 4",
        "x: int = candidate(2)",
    ] {
        let check = format!("def check(candidate):\n    assert candidate(1) == 2\n    {last}\n");
        let verdict = judge_with(&short_of_fuel(), "check", &check, code);
        assert_eq!(
            outcomes(&verdict),
            [("test_1", true), ("check", false)],
            "{verdict:?}"
        );
        assert!(verdict.tests[1].message.contains(message), "{verdict:?}");
        let honest = judge("check", &check, "def f(x): return 2 * x");
        assert_eq!(outcomes(&honest), [("test_1", true)], "{honest:?}");
    }
}

#[test]
fn what_a_helper_asserts_counts() {
    let check = "def check(candidate):\n    def go():\n        for n in range(5):\n            \
                 assert candidate(n) == 2 * n\n    assert True\n    ok = go()\n";
    let wrong = judge("check", check, "def f(x): return 0");
    assert_eq!(
        outcomes(&wrong),
        [("test_1", true), ("check", false)],
        "{wrong:?}"
    );
    assert_eq!(
        judge("check", check, "def f(x): return 2 * x").reward,
        Some(1.0)
    );
}
