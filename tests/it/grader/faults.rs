//! Whose fault is what.

use rstest::rstest;
use serde_json::json;
use wardian::grader::{GRADERS, GradeLimits, GradeRequest, Grader as _, TestCase, VerdictStatus};
use wardian::sandbox::Limits;

use super::calls::calls;
use super::check::CHECK;
use super::common::{assert_infra, graders, graders_with, judge};
use super::stdio::stdio;

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

/// What an entry point is, a test finds out without asking: that is its say, if it is no function.
#[rstest]
#[case::number("f = 3")]
#[case::text("f = 'text'")]
#[case::object("class A: pass\nf = A()")]
#[case::class("class f:\n    def __init__(self, x): raise ValueError")]
fn a_submission_cannot_make_the_top_level_fail_for_the_task(
    #[case] code: &str,
    #[values("pytest", "unittest", "check", "script", "python")] grader: &str,
    #[values(
        "doubled = f(1) * 2",
        "assert not isinstance(f, (type, int, str)) and callable(f)"
    )]
    top: &str,
) {
    let test = match grader {
        "python" => "def grade(candidate, task): return f(1)",
        "check" => "def check(f): assert f(1) == 2",
        "script" => "assert f(1) == 2",
        _ => {
            "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 2)"
        }
    };
    let test = format!("{top}\n{test}");
    let verdict = judge(grader, &test, code);
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(0.0)),
        "{verdict:?}"
    );
    // With a function it runs.
    let verdict = judge(grader, &test, "def f(x): return 2 * x");
    assert!(verdict.reward > Some(0.0), "{verdict:?}");
}

/// A module is missing only if the tests import it where they say so: what they unpickle can name any.
#[rstest]
#[case("unit_tests", "")]
#[case("pytest", "def test_a():\n    ")]
#[case("script", "")]
#[case("check", "def check(f): ")]
#[case("doctest", ">>> ")]
fn a_submission_cannot_have_a_module_looked_for(
    #[case] grader: &str,
    #[case] head: &str,
    #[values("pandas", "pandas.core", "gone")] module: &str,
) {
    let code = format!("def f(x): return b'c{module}\\nx\\n.'");
    // The import of a module that is not there does not make it the task's fault elsewhere.
    let guarded = "try: import pandas\nexcept ImportError: pass\n";
    let setup = if grader == "doctest" { "" } else { guarded };
    let test = format!("{setup}{head}import pickle; pickle.loads(f(1))");
    let verdict = judge(grader, &test, &code);
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(0.0)),
        "{verdict:?}"
    );
    assert!(
        verdict.tests[0]
            .message
            .contains("ModuleNotFoundError: No module named"),
        "{verdict:?}"
    );
}

/// However a test imports by a name that stands there.
#[rstest]
#[case("import pandas.core as p, math")]
#[case("from pandas.core import frame")]
#[case("__import__('pandas')")]
#[case("import importlib; importlib.import_module('pandas')")]
#[case("import pytest; pytest.importorskip('pandas')")]
fn a_module_that_a_test_imports_is_missing(#[case] statement: &str) {
    let test = format!("def test_a():\n    f(1)\n    {statement}");
    let verdict = judge("pytest", &test, "def f(x): return x");
    assert_infra(&verdict, "the tests import `pandas`");
}

/// A submission that is too long to be graded is the policy's, as is one that is in JSON.
#[rstest]
#[case("unit_tests", "x".repeat(17 << 20))]
#[case("check", "x".repeat(17 << 20))]
#[case("stdio", "x".repeat(17 << 20))]
#[case("python", "x".repeat(17 << 20))]
#[case("python", format!("#{}", "\x01".repeat(3 << 20)))]
fn a_submission_that_is_too_long_is_invalid(#[case] grader: &str, #[case] code: String) {
    let test = "def check(f): f(1)\ndef grade(candidate, task): return 1";
    let request = GradeRequest {
        grader: grader.to_owned(),
        code,
        tests: vec![test.to_owned()],
        entry_points: vec!["f".to_owned()],
        cases: vec![TestCase::default()],
        ..GradeRequest::default()
    };
    let verdict = graders().grade(&request);
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Invalid, Some(0.0)),
        "{:?}",
        verdict.tests[0]
    );
    assert!(
        verdict.tests[0].message.starts_with("the submission takes"),
        "{:?}",
        verdict.tests[0]
    );
}
