//! The graders beside the unit-test grader: what each takes for right, and whose fault what is.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::sync::Arc;

use rstest::rstest;
use serde_json::json;
use wardian::grader::{
    GRADERS, GradeLimits, GradeRequest, Grader as _, GraderRegistry, TestCase, TestStatus, Verdict,
    VerdictStatus,
};
use wardian::sandbox::{Limits, Sandbox};

use crate::sandbox::python;

fn graders() -> GraderRegistry {
    graders_with(&GradeLimits::default())
}

fn graders_with(limits: &GradeLimits) -> GraderRegistry {
    let sandbox: Arc<dyn Sandbox> = Arc::new(python().clone());
    GraderRegistry::standard(&sandbox, limits)
}

/// Grades `code`, whose entry point is `f`, by a test program.
fn judge(grader: &str, test: &str, code: &str) -> Verdict {
    graders().grade(&GradeRequest {
        grader: grader.to_owned(),
        code: code.to_owned(),
        tests: vec![test.to_owned()],
        entry_points: vec!["f".to_owned()],
        ..GradeRequest::default()
    })
}

fn outcomes(verdict: &Verdict) -> Vec<(&str, bool)> {
    (verdict.tests.iter())
        .map(|test| (test.name.as_str(), test.status == TestStatus::Passed))
        .collect()
}

#[track_caller]
fn assert_infra(verdict: &Verdict, expected: &str) {
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::InfraError, None),
        "{verdict:?}"
    );
    assert!(verdict.tests[0].message.contains(expected), "{verdict:?}");
}

// ---- check

const CHECK: &str = "\
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

/// As in a list of tests: what a failed assert compared.
#[rstest]
#[case("check", "def check(candidate):\n    assert candidate(2) == 4")]
#[case("pytest", "def test_a():\n    assert f(2) == 4")]
#[case("script", "for n in [2]:\n    assert f(n) == 4")]
fn a_failed_assert_says_what_it_compared(#[case] grader: &str, #[case] test: &str) {
    let verdict = judge(grader, test, "def f(x): return [x]");
    let test = &verdict.tests[0];
    assert_eq!(
        (test.expected.as_deref(), test.got.as_deref()),
        (Some("4"), Some("[2]")),
        "{verdict:?}"
    );
}

#[test]
fn an_exception_says_which_line_of_the_submission_it_came_from() {
    let code = "def f(x):\n    return g(x)\ndef g(x):\n    raise ValueError('no')";
    let verdict = judge("pytest", "def test_a():\n    f(1)", code);
    assert_eq!(verdict.tests[0].line, Some(4), "{verdict:?}");
}

/// A class of the submission is no class of tests, whatever it is called.
#[test]
fn only_the_tests_own_classes_hold_tests() {
    let request = GradeRequest {
        grader: "pytest".to_owned(),
        code: "class TestMe:\n    def test_nothing(self): pass".to_owned(),
        tests: vec!["def test_a():\n    assert TestMe().test_nothing() == 1".to_owned()],
        entry_points: vec!["TestMe".to_owned()],
        ..GradeRequest::default()
    };
    let verdict = graders().grade(&request);
    assert_eq!(outcomes(&verdict), [("test_a", false)]);
}

#[test]
fn examples_may_expect_the_submissions_own_exceptions() {
    let code = "class MyError(Exception): pass\ndef f(x): raise MyError('no')";
    for named in ["MyError: no", "solution.MyError: no"] {
        let example = format!(">>> f(1)\nTraceback (most recent call last):\n{named}\n");
        assert_eq!(
            judge("doctest", &example, code).reward,
            Some(1.0),
            "{named}"
        );
    }
    let example = ">>> f(1)\nTraceback (most recent call last):\nValueError: no\n";
    assert_eq!(judge("doctest", example, code).reward, Some(0.0));
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

// ---- pytest

const PYTEST: &str = "\
import math
import pytest
from solution import f

@pytest.fixture
def base():
    yield 10

@pytest.mark.parametrize('n, expected', [(1, 2), (2, 4), pytest.param(3, 6, id='three')])
def test_values(n, expected):
    assert f(n) == expected

@pytest.mark.parametrize('a', [1, 2])
@pytest.mark.parametrize('b', ['x', [0]])
def test_product(a, b):
    assert f(a) == 2 * a

def test_fixture(base, tmp_path):
    (tmp_path / 'a').write_text('b')
    assert f(base) == pytest.approx(20.0000001)

def test_raises():
    with pytest.raises(TypeError, match='number'):
        f('a')
    with pytest.raises(AssertionError):
        with pytest.raises(ValueError):
            f(1)

@pytest.mark.skip(reason='later')
def test_skipped():
    assert False

class TestMore:
    def setup_method(self):
        self.n = 4

    def test_method(self):
        assert f(self.n) == 8

def helper_test():
    assert False
";
const DOUBLE: &str =
    "def f(x):\n    if isinstance(x, str): raise TypeError('not a number')\n    return 2 * x";

#[test]
fn test_functions_are_run_as_pytest_runs_them() {
    let verdict = judge("pytest", PYTEST, DOUBLE);
    let names: Vec<&str> = verdict
        .tests
        .iter()
        .map(|test| test.name.as_str())
        .collect();
    assert_eq!(
        names,
        [
            "test_values[1-2]",
            "test_values[2-4]",
            "test_values[three]",
            "test_product[x-1]",
            "test_product[x-2]",
            "test_product[b1-1]",
            "test_product[b1-2]",
            "test_fixture",
            "test_raises",
            "TestMore.test_method",
        ]
    );
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
    let wrong = judge("pytest", PYTEST, "def f(x): return 2 * x if x != 3 else 7");
    let failed: Vec<_> = outcomes(&wrong)
        .into_iter()
        .filter(|test| !test.1)
        .collect();
    assert_eq!(
        failed,
        [("test_values[three]", false), ("test_raises", false)]
    );
}

#[test]
fn a_test_that_is_skipped_while_it_runs_has_not_passed() {
    let test = "import pytest\ndef test_a():\n    if f(1) is None: pytest.skip('nothing')\n    assert f(1) == 1";
    let verdict = judge("pytest", test, "def f(x): return None");
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(0.0))
    );
    assert_eq!(
        verdict.tests[0].message,
        "Skipped: nothing (line 3 of the tests)"
    );
}

// ---- unittest

const UNITTEST: &str = "\
import unittest
import solution

class TestF(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.factor = 2

    def test_one(self):
        self.assertEqual(solution.f(1), self.factor)

    def test_raises(self):
        with self.assertRaises(TypeError):
            solution.f('a')

    def test_subtests(self):
        for n in range(3):
            with self.subTest(n=n):
                self.assertEqual(f(n), 2 * n)

    @unittest.skip('later')
    def test_skipped(self):
        self.fail()

if __name__ == '__main__':
    unittest.main()
";

#[test]
fn test_cases_are_run_as_unittest_runs_them() {
    for grader in ["unittest", "pytest"] {
        let verdict = judge(grader, UNITTEST, DOUBLE);
        assert_eq!(
            outcomes(&verdict),
            [
                ("TestF.test_one", true),
                ("TestF.test_raises", true),
                ("TestF.test_subtests", true)
            ]
        );
    }
    let wrong = judge("unittest", UNITTEST, "def f(x): return 2 if x == 1 else 3");
    assert_eq!(
        outcomes(&wrong),
        [
            ("TestF.test_one", true),
            ("TestF.test_raises", false),
            ("TestF.test_subtests", false)
        ]
    );
    assert_eq!(
        wrong.tests[1].message,
        "AssertionError: TypeError not raised (line 13 of the tests)"
    );
}

#[test]
fn tests_whose_class_is_not_set_up_fail() {
    let test = "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls):\n        cls.x = f(1).y\n    def test_a(self): pass\n    def test_b(self): pass\n";
    let verdict = judge("unittest", test, "def f(x): return x");
    assert_eq!(
        outcomes(&verdict),
        [("T.test_a", false), ("T.test_b", false)]
    );
}

// ---- doctest

const DOCTEST: &str = "\
Doubles a number.

>>> f(2)
4
>>> x = f(3)
>>> [x, f(0.5)]
[6, 1.0]
>>> f('a')
Traceback (most recent call last):
    ...
TypeError: not a number
>>> print('never')  # doctest: +SKIP
>>> list(range(f(10)))  # doctest: +ELLIPSIS
[0, 1, ..., 19]
";

#[test]
fn each_example_is_a_test() {
    let verdict = judge("doctest", DOCTEST, DOUBLE);
    assert_eq!(
        outcomes(&verdict),
        [
            ("line_3", true),
            ("line_5", true),
            ("line_6", true),
            ("line_8", true),
            ("line_13", true)
        ]
    );
    let wrong = judge(
        "doctest",
        DOCTEST,
        "def f(x): return x + 2 if x == 2 else x",
    );
    assert_eq!(wrong.status, VerdictStatus::Failed);
    let third = &wrong.tests[2];
    assert_eq!(
        (third.expected.as_deref(), third.got.as_deref()),
        (Some("[6, 1.0]"), Some("[3, 0.5]"))
    );
}

// ---- script

#[test]
fn a_script_is_one_test() {
    let script = "import math\nfor n in range(3):\n    assert f(n) == math.pow(n, 2)\n";
    assert_eq!(
        judge("script", script, "def f(n): return n * n").reward,
        Some(1.0)
    );
    let wrong = judge("script", script, "def f(n): return n");
    assert_eq!(wrong.reward, Some(0.0));
    assert_eq!(
        wrong.tests[0].message,
        "AssertionError (line 3 of the tests)"
    );
}

// ---- calls

fn calls(code: &str, cases: &[(&str, &str)], options: serde_json::Value) -> Verdict {
    let serde_json::Value::Object(options) = options else {
        panic!("options are an object")
    };
    graders().grade(&GradeRequest {
        grader: "calls".to_owned(),
        code: code.to_owned(),
        entry_points: vec!["f".to_owned()],
        cases: cases
            .iter()
            .map(|(input, output)| TestCase {
                input: (*input).to_owned(),
                output: (*output).to_owned(),
            })
            .collect(),
        options,
        ..GradeRequest::default()
    })
}

#[rstest]
#[case::tuple_for_list("def f(): return (1, (2,))", "[1, [2]]", true)]
#[case::integer_keys("def f(): return {1: 'a'}", r#"{"1": "a"}"#, true)]
#[case::close_float("def f(): return 0.1 + 0.2", "0.3", true)]
#[case::integer_for_float("def f(): return 2", "2.0", true)]
#[case::float_for_integer("def f(): return 2.0000001", "2", false)]
#[case::far_float("def f(): return 0.301", "0.3", false)]
#[case::bool_for_integer("def f(): return True", "1", false)]
#[case::text_for_number("def f(): return '2'", "2", false)]
#[case::none("def f(): return None", "null", true)]
#[case::big("def f(): return 10 ** 30", "1000000000000000000000000000000", true)]
#[case::longer("def f(): return [1, 2]", "[1]", false)]
#[case::set("def f(): return {1}", "[1]", false)]
#[case::always_equal(
    "class A:\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef f(): return A()",
    "1",
    false
)]
#[case::raises("def f(): raise ValueError", "1", false)]
fn results_are_compared(#[case] code: &str, #[case] expected: &str, #[case] holds: bool) {
    let verdict = calls(code, &[("[]", expected)], json!({}));
    assert_eq!(
        verdict.reward,
        Some(f64::from(u8::from(holds))),
        "{verdict:?}"
    );
}

#[test]
fn a_method_of_a_fresh_object_may_be_called() {
    let code = "class Solution:\n    def __init__(self): self.calls = 0\n    def add(self, a, b):\n        self.calls += 1\n        return a + b if self.calls == 1 else 0\n";
    let request = GradeRequest {
        grader: "calls".to_owned(),
        code: code.to_owned(),
        entry_points: vec!["Solution".to_owned()],
        cases: [("[1, 2]", "3"), ("[3, 4]", "[7]")]
            .map(|(input, output)| TestCase {
                input: input.to_owned(),
                output: output.to_owned(),
            })
            .into(),
        options: json!({"call": "Solution().add"})
            .as_object()
            .unwrap()
            .clone(),
        ..GradeRequest::default()
    };
    let verdict = graders().grade(&request);
    assert_eq!(outcomes(&verdict), [("test_1", true), ("test_2", false)]);
    assert_eq!(
        (
            verdict.tests[1].expected.as_deref(),
            verdict.tests[1].got.as_deref()
        ),
        (Some("[7]"), Some("7"))
    );
    // As APPS writes some results.
    let mut request = request;
    request.options.insert("unwrap".to_owned(), true.into());
    assert_eq!(graders().grade(&request).reward, Some(1.0));
}

// ---- stdio

fn stdio(code: &str, cases: &[(&str, &str)]) -> GradeRequest {
    GradeRequest {
        grader: "stdio".to_owned(),
        code: code.to_owned(),
        cases: cases
            .iter()
            .map(|(input, output)| TestCase {
                input: (*input).to_owned(),
                output: (*output).to_owned(),
            })
            .collect(),
        ..GradeRequest::default()
    }
}

#[test]
fn programs_are_judged_by_what_they_print() {
    let cases = [("1 2\n", "3\n"), ("3 4\n", "7\n")];
    let right = graders().grade(&stdio("print(sum(map(int, input().split())))", &cases));
    assert_eq!((right.reward, right.usage.runs), (Some(1.0), 2));
    let wrong = graders().grade(&stdio("print(3)", &cases));
    assert_eq!(outcomes(&wrong), [("test_1", true), ("test_2", false)]);
    assert_eq!(
        wrong.tests[1].message,
        "line 1 of the output: expected `7`, got `3`"
    );
    // Each run is a fresh interpreter.
    let leaves =
        "import os\nprint(3 if not os.path.exists('/tmp/x') else 9)\nopen('/tmp/x', 'w').close()";
    let verdict = graders().grade(&stdio(leaves, &[("", "3"), ("", "3")]));
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
}

#[rstest]
#[case::raises("print(3)\n1 / 0", "ZeroDivisionError: division by zero")]
#[case::exits("print(3)\nraise SystemExit(2)", "the program exited with code 2")]
#[case::floods("print('3' * 100000)", "the program printed more than 65537 bytes")]
#[case::no_text(
    "import sys\nsys.stdout.buffer.write(b'\\xff')",
    "the output is not UTF-8"
)]
#[case::nothing("pass", "line 1 of the output: expected `3`, got ``")]
fn programs_fail(#[case] code: &str, #[case] message: &str) {
    let verdict = graders().grade(&stdio(code, &[("", "3")]));
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(0.0))
    );
    assert_eq!(verdict.tests[0].message, message);
}

#[test]
fn after_a_limit_no_further_case_is_run() {
    let limits = GradeLimits {
        candidate: Limits {
            fuel: 200_000_000,
            ..GradeLimits::default().candidate
        },
        ..GradeLimits::default()
    };
    let code = "while input() != 'stop': pass\nwhile True: pass";
    let verdict = graders_with(&limits).grade(&stdio(code, &[("stop", ""), ("stop", "")]));
    assert_eq!(verdict.status, VerdictStatus::Failed);
    assert!(
        verdict.tests[0]
            .limit
            .as_ref()
            .unwrap()
            .contains("out of fuel")
    );
    assert_eq!(verdict.tests[1].status, TestStatus::NotRun);
    assert_eq!(verdict.usage.runs, 1);
}

#[test]
fn a_program_that_does_not_compile_is_invalid_and_one_that_says_so_has_failed() {
    let verdict = graders().grade(&stdio("print(", &[("", "")]));
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Invalid, Some(0.0))
    );
    assert!(
        verdict.tests[0].message.starts_with("SyntaxError"),
        "{verdict:?}"
    );
    let verdict = graders().grade(&stdio("exec('print(')", &[("", "")]));
    assert_eq!(verdict.status, VerdictStatus::Failed);
}

// ---- a user's grader

fn by_user(grader: &str, code: &str, options: &serde_json::Value) -> Verdict {
    graders().grade(&GradeRequest {
        grader: "python".to_owned(),
        code: code.to_owned(),
        tests: vec![grader.to_owned()],
        options: options.as_object().unwrap().clone(),
        ..GradeRequest::default()
    })
}

const STYLE: &str = "\
import ast
def grade(candidate, task):
    right = sum(candidate.f(n) == n * task['factor'] for n in range(4)) / 4
    lines = len(candidate.source.splitlines())
    return {'reward': right, 'brevity': 1 / lines, 'message': f'{lines} lines'}
";

#[test]
fn a_users_grader_gives_a_score_and_named_rewards() {
    let options = json!({"task": {"factor": 3}});
    let verdict = by_user(STYLE, "def f(n):\n    return 3 * n if n else 1\n", &options);
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(0.75))
    );
    assert_eq!(verdict.rewards["brevity"], 0.5);
    assert_eq!(verdict.tests[0].message, "2 lines");
    let verdict = by_user(STYLE, "f = lambda n: 3 * n", &options);
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Passed, Some(1.0))
    );
}

#[test]
fn named_rewards_without_a_reward_are_summed_and_a_number_is_enough() {
    let named = "def grade(candidate, task): return {'a': 0.5, 'b': True, 'passed': False}";
    let verdict = by_user(named, "x = 1", &json!({}));
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(1.5))
    );
    let verdict = by_user("def grade(candidate, task): return 1", "x = 1", &json!({}));
    assert_eq!(verdict.status, VerdictStatus::Passed);
}

#[test]
fn a_text_is_not_run() {
    let grader = "def grade(candidate, task): return len(candidate.source.split()) / 4";
    let text = json!({"submission": "text"});
    let verdict = by_user(grader, "this is no Python", &text);
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
    let verdict = by_user(grader, "this is no Python", &json!({}));
    assert_eq!(verdict.status, VerdictStatus::Invalid);
}

/// What a grader stumbles over after the submission was asked is the submission's doing: else it
/// could take itself out of the statistics.
#[rstest]
#[case::type_error("candidate.f() > 2", "def f(): return None")]
#[case::not_finite("candidate.f()", "def f(): return float('nan')")]
#[case::no_number("candidate.f()", "def f(): return 'much'")]
#[case::raises("candidate.f()", "def f(): raise ValueError('no')")]
#[case::exits("candidate.f()", "import os\ndef f(): os._exit(0)")]
#[case::endless(
    "sum(candidate.f())",
    "import itertools\ndef f(): return itertools.repeat(0)"
)]
#[case::missing("candidate.f()", "def g(): pass")]
fn a_submission_cannot_make_the_grader_fail(#[case] grade: &str, #[case] code: &str) {
    let grader = format!("def grade(candidate, task): return {grade}");
    let limits = GradeLimits {
        candidate: Limits {
            fuel: 500_000_000,
            ..GradeLimits::default().candidate
        },
        ..GradeLimits::default()
    };
    let verdict = graders_with(&limits).grade(&GradeRequest {
        grader: "python".to_owned(),
        code: code.to_owned(),
        tests: vec![grader],
        ..GradeRequest::default()
    });
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(0.0)),
        "{verdict:?}"
    );
}

// ---- whose fault

#[rstest]
#[case::check_syntax("check", "def check(candidate", "SyntaxError")]
#[case::no_check("check", "def test(candidate): pass", "no function `check`")]
#[case::empty_check("check", "def check(candidate): pass", "tests nothing")]
#[case::no_example("doctest", "no example", "no `>>>` example")]
#[case::no_test("pytest", "def helper(): pass", "nothing to test")]
#[case::no_fixture("pytest", "def test_a(gone): pass", "no fixture `gone`")]
#[case::bad_parameters(
    "pytest",
    "import pytest\n@pytest.mark.parametrize('a, b', [(1,)])\ndef test_a(a, b): pass",
    "1 values for 2 names"
)]
#[case::top_level("pytest", "1 / 0", "ZeroDivisionError")]
#[case::no_case("unittest", "x = 1", "nothing to test")]
#[case::no_grade("python", "x = 1", "no function `grade")]
#[case::bad_grade(
    "python",
    "def grade(candidate, task): return task['gone']",
    "KeyError"
)]
#[case::bad_number("python", "def grade(candidate, task): return 'much'", "not a number")]
#[case::module(
    "check",
    "import pandas as pd\ndef check(candidate): assert candidate(1)",
    "the tests import `pandas`, which the Python runtime does not have"
)]
#[case::inner_module(
    "check",
    "def check(candidate):\n    import pandas\n    assert candidate(1)",
    "NO_RESULT"
)]
#[case::module_in_a_test(
    "pytest",
    "def test_a():\n    import pandas\n    assert f(1)",
    "the tests import `pandas`"
)]
#[case::module_in_a_script(
    "script",
    "def g():\n    import pandas\ng()",
    "the tests import `pandas`"
)]
#[case::module_in_a_list("unit_tests", "import pandas", "the tests import `pandas`")]
fn what_a_task_gets_wrong_is_no_submissions_fault(
    #[case] grader: &str,
    #[case] test: &str,
    #[case] expected: &str,
) {
    let verdict = judge(grader, test, "def f(x): return x");
    match expected {
        // A plain statement of `check` breaks the check off; a listed test stands alone.
        "NO_RESULT" | "AssertionError" => {
            assert_eq!(verdict.status, VerdictStatus::Failed, "{verdict:?}");
        }
        expected => assert_infra(&verdict, expected),
    }
}

#[test]
fn a_registry_has_every_grader_that_tasks_can_name() {
    assert!(graders().names().eq(GRADERS));
}

#[test]
fn what_is_called_need_not_be_an_entry_point() {
    for (call, code) in [
        ("add", "def add(a, b): return a + b"),
        (
            "Sum().add",
            "class Sum:\n    def add(self, a, b): return a + b",
        ),
    ] {
        let request = GradeRequest {
            grader: "calls".to_owned(),
            code: code.to_owned(),
            cases: vec![TestCase {
                input: "[1, 2]".to_owned(),
                output: "3".to_owned(),
            }],
            options: json!({"call": call}).as_object().unwrap().clone(),
            ..GradeRequest::default()
        };
        let verdict = graders().grade(&request);
        assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
    }
}

/// What a test itself cannot import is nobody's failure; what a submission cannot is its own.
#[test]
fn a_listed_test_may_lack_a_module() {
    let test = "import pandas\nassert f(1) == 1";
    let verdict = judge("unit_tests", test, "def f(x): return x");
    assert_infra(&verdict, "the tests import `pandas`");
    for submission in [
        "def f(x):\n    import pandas",
        "def f(x): raise ModuleNotFoundError('No module named pandas', name='pandas')",
        "def f(x): return 'pandas'",
    ] {
        let test = "x = f(1)\n__import__(x)\nassert x == 'math'";
        let verdict = judge("unit_tests", test, submission);
        assert_eq!(
            verdict.status,
            VerdictStatus::Failed,
            "{submission}: {verdict:?}"
        );
    }
}

/// What MBPP+ and `HumanEval+` need of numpy is there for tests, and for nobody else.
#[rstest]
#[case::check(
    "check",
    "import numpy as np\ndef check(candidate):\n    assert np.allclose(candidate([0.1]), [0.1 + 1e-12])"
)]
#[case::list(
    "unit_tests",
    "import numpy as np\nx = f(0.5)\nassert np.allclose(x, 0.5) and not isinstance(x, np.ndarray)"
)]
fn tests_may_compare_floats_with_numpy(#[case] grader: &str, #[case] test: &str) {
    let verdict = judge(grader, test, "def f(x): return x");
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
    let wrong = "def f(x): return 0.7 if type(x) is float else [0.7]";
    assert_eq!(judge(grader, test, wrong).reward, Some(0.0));
    let verdict = judge(grader, test, "import numpy\ndef f(x): return x");
    assert_eq!(verdict.status, VerdictStatus::Invalid, "{verdict:?}");
}

/// What could only pass by not being looked at.
#[rstest]
#[case::asynchronous(
    "pytest",
    "from solution import f\nasync def test_a(): assert f(1) == 1",
    VerdictStatus::Failed
)]
#[case::inherited(
    "pytest",
    "from solution import f\nclass Base:\n    def test_a(self): assert f(1) == 1\nclass TestB(Base): pass",
    VerdictStatus::Failed
)]
#[case::inner(
    "pytest",
    "from solution import f\nclass TestA:\n    class TestB:\n        def test_a(self): assert f(1) == 1",
    VerdictStatus::Failed
)]
#[case::yielding(
    "pytest",
    "from solution import f\ndef test_a():\n    yield\n    assert f(1) == 1",
    VerdictStatus::InfraError
)]
#[case::fixed(
    "pytest",
    "from solution import f\nclass TestA:\n    @staticmethod\n    def test_a(): assert f(1) == 1",
    VerdictStatus::InfraError
)]
#[case::empty(
    "unit_tests",
    "import numpy as np\nassert np.allclose(f(1), 1.0)",
    VerdictStatus::Failed
)]
fn every_test_is_looked_at(
    #[case] grader: &str,
    #[case] test: &str,
    #[case] status: VerdictStatus,
) {
    let verdict = judge(grader, test, "def f(x): return []");
    assert_eq!(verdict.status, status, "{verdict:?}");
    if status == VerdictStatus::Failed {
        let verdict = judge(grader, test, "def f(x): return x");
        assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
    }
}

/// A submission starts from the same snapshot as the tests, but not from the same seed.
#[rstest]
#[case(
    "import random\nx = random.randint(1, 10 ** 9)",
    "import random\ndef f(): return random.randint(1, 10 ** 9)"
)]
#[case(
    "import secrets\nx = secrets.randbits(64)",
    "import secrets\ndef f(): return secrets.randbits(64)"
)]
#[case(
    "import os\nx = os.urandom(8)",
    "import os\ndef f(): return os.urandom(8)"
)]
fn what_a_test_draws_is_not_to_be_guessed(#[case] draw: &str, #[case] submission: &str) {
    for grader in ["unit_tests", "script"] {
        let test = format!("{draw}\nassert f() == x");
        let verdict = judge(grader, &test, submission);
        assert_eq!(verdict.status, VerdictStatus::Failed, "{verdict:?}");
        // Yet it is the same each time.
        let again = judge(grader, &test, submission);
        assert_eq!(again.tests, verdict.tests);
    }
}

#[test]
fn no_number_is_close_to_one_that_overflows() {
    let request = GradeRequest {
        grader: "numeric".to_owned(),
        code: "5".to_owned(),
        cases: vec![TestCase {
            input: String::new(),
            output: "1e999".to_owned(),
        }],
        ..GradeRequest::default()
    };
    let verdict = graders().grade(&request);
    assert_eq!(verdict.reward, None, "{verdict:?}");
}

#[test]
fn the_stand_in_for_numpy_says_what_it_lacks() {
    let test = "def check(candidate):\n    import numpy\n    numpy.array(candidate(1))";
    let verdict = judge("check", test, "def f(x): return x");
    assert!(
        verdict.tests[0].message.contains("science runtime"),
        "{verdict:?}"
    );
}

#[rstest]
#[case("check", "def check(candidate): assert candidate(1)")]
#[case("pytest", "from solution import f\ndef test_a(): assert f(1)")]
#[case("doctest", ">>> f(1)\n1")]
#[case("script", "assert f(1)")]
fn a_submission_without_the_entry_point_is_invalid(#[case] grader: &str, #[case] test: &str) {
    let verdict = judge(grader, test, "def g(x): return x");
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Invalid, Some(0.0))
    );
    assert!(
        verdict.tests[0].message.contains("does not define `f`"),
        "{verdict:?}"
    );
    let verdict = judge(grader, test, "def f(x:");
    assert_eq!(verdict.status, VerdictStatus::Invalid);
    assert!(
        verdict.tests[0].message.starts_with("SyntaxError"),
        "{verdict:?}"
    );
}

#[test]
fn a_name_that_tests_import_and_that_is_no_entry_point_is_asked_for() {
    let request = |code: &str| GradeRequest {
        grader: "pytest".to_owned(),
        code: code.to_owned(),
        tests: vec!["from solution import g\ndef test_a(): assert g() == 1".to_owned()],
        ..GradeRequest::default()
    };
    assert_eq!(
        graders().grade(&request("def g(): return 1")).reward,
        Some(1.0)
    );
    let verdict = graders().grade(&request("def h(): return 1"));
    assert_eq!(verdict.status, VerdictStatus::Invalid, "{verdict:?}");
}

/// The submission raises what a failed import would raise: that must not look like a fault of ours.
#[rstest]
#[case("check", "def check(candidate):\n    assert candidate(1)")]
#[case("pytest", "def test_a(): assert f(1)")]
#[case("script", "assert f(1)")]
#[case("python", "def grade(candidate, task): return candidate.f(1)")]
fn a_submission_cannot_pretend_that_a_module_is_missing(#[case] grader: &str, #[case] test: &str) {
    for raised in [
        "ModuleNotFoundError('numpy', name='numpy')",
        "ModuleNotFoundError(\"No module named 'numpy'\")",
    ] {
        let verdict = judge(grader, test, &format!("def f(x): raise {raised}"));
        assert_eq!(
            (verdict.status, verdict.reward),
            (VerdictStatus::Failed, Some(0.0)),
            "{verdict:?}"
        );
    }
}

/// A test that swallows whatever is raised still fails when the submission's instance has ended.
#[rstest]
#[case(
    "check",
    "def check(candidate):\n    try:\n        candidate(1)\n    except BaseException: pass\n    assert True"
)]
#[case(
    "pytest",
    "def test_a():\n    try: f(1)\n    except BaseException: pass"
)]
#[case(
    "unittest",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        try: f(1)\n        except BaseException: pass"
)]
#[case("doctest", ">>> try: f(1)\n... except BaseException: pass")]
#[case("script", "try: f(1)\nexcept BaseException: pass")]
#[case("script", "f(1)")]
#[case(
    "python",
    "def grade(candidate, task):\n    try: candidate.f(1)\n    except BaseException: pass\n    return 1"
)]
fn ending_the_instance_passes_nothing(#[case] grader: &str, #[case] test: &str) {
    let verdict = judge(grader, test, "import os\ndef f(x): os._exit(0)");
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(0.0)),
        "{verdict:?}"
    );
    assert!(
        verdict.tests[0].message.contains("exited with code 0"),
        "{verdict:?}"
    );
}

#[test]
fn options_are_read_strictly() {
    let verdict = calls("def f(): return 1", &[("[]", "1")], json!({"tolerance": 1}));
    assert_infra(&verdict, "unknown field `tolerance`");
    let verdict = calls("def f(): return 1", &[("{}", "1")], json!({}));
    assert_infra(&verdict, "not a JSON list of arguments");
    let verdict = calls("def f(): return 1", &[("[]", "one")], json!({}));
    assert_infra(&verdict, "JSONDecodeError");
    let mut request = stdio("print(1)", &[]);
    assert_infra(&graders().grade(&request), "the task has no tests");
    request = stdio("print(1)", &[("", "1")]);
    request
        .options
        .insert("whitespace".to_owned(), "some".into());
    assert_infra(&graders().grade(&request), "unknown variant `some`");
}

#[test]
fn an_unusable_sandbox_is_our_fault() {
    let limits = GradeLimits {
        candidate: Limits {
            memory: bytesize::ByteSize::kib(1),
            ..GradeLimits::default().candidate
        },
        ..GradeLimits::default()
    };
    let graders = graders_with(&limits);
    for request in [
        stdio("print(1)", &[("", "1")]),
        GradeRequest {
            grader: "check".to_owned(),
            code: "def f(x): pass".to_owned(),
            tests: vec![CHECK.to_owned()],
            entry_points: vec!["f".to_owned()],
            ..GradeRequest::default()
        },
    ] {
        assert_infra(&graders.grade(&request), "memory");
    }
}

/// As much work as MBPP's slowest reference solution does: divisor sums up to 9999, 82 million turns
/// of a loop.
#[test]
fn the_slowest_honest_work_fits_into_the_default_fuel() {
    let code = "\
def f(limit):
    found = set()
    for n in range(2, limit + 1):
        if n in found:
            continue
        a = sum([d for d in range(1, n) if n % d == 0])
        b = sum([d for d in range(1, a) if a % d == 0])
        if n == b and n != a:
            found |= {n, b}
    return sum(found)
";
    let verdict = judge("unit_tests", "assert f(9999) == 31626", code);
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
    assert!(verdict.usage.candidate.fuel > 30_000_000_000);
}
