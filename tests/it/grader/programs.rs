//! What the graders of test programs have in common.

use rstest::rstest;
use serde_json::json;
use wardian::grader::{GradeRequest, Grader as _, TestResult, VerdictStatus};

use super::common::{graders, judge};

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

#[test]
fn the_stand_in_for_numpy_says_what_it_lacks() {
    let test = "def check(candidate):\n    import numpy\n    numpy.array(candidate(1))";
    let verdict = judge("check", test, "def f(x): return x");
    assert!(
        verdict.tests[0].message.contains("science runtime"),
        "{verdict:?}"
    );
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

/// What a submission changes in what it is given, a test need not see: by a call, or by way of an
/// attribute or an item that the test sets.
#[rstest]
#[case::call("x = [2, 1]\nf(x)\nassert x == [2, 1]")]
#[case::method("x = [2, 1]\nBox().take(x)\nassert x == [2, 1]")]
#[case::constructor("x = [2, 1]\n_ = Box(x)\nassert x == [2, 1]")]
#[case::attribute("x = [2, 1]\nc = Box()\nc.x = x\nassert x == [2, 1]")]
#[case::item("x = [2, 1]\nc = Box()\nc[0] = x\nassert x == [2, 1]")]
#[case::operator("x = [2, 1]\nBox() + x\nassert x == [2, 1]")]
#[case::inside("x = {'a': [2, 1]}\nf(x['a'])\nf(x=x['a'])\nassert x == {'a': [2, 1]}")]
fn arguments_can_be_read_only(
    #[case] body: &str,
    #[values(
        "unit_tests",
        "pytest",
        "script",
        "check",
        "unittest",
        "python",
        "doctest"
    )]
    grader: &str,
) {
    let code = "class Box:\n    def __init__(self, x=()): f(x)\n    def take(self, x): f(x)\n    \
                __setattr__ = __setitem__ = lambda self, key, x: f(x)\n    \
                __add__ = lambda self, x: f(x)\n\
                def f(x):\n    if x: x.sort()";
    let indented = |spaces: usize| body.replace('\n', &format!("\n{}", " ".repeat(spaces)));
    let test = match grader {
        "pytest" => format!("def test_a():\n    {}", indented(4)),
        "check" => format!("def check(_):\n    {}\n    assert Box", indented(4)),
        "unittest" => format!(
            "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        {}",
            indented(8)
        ),
        "python" => format!(
            "def grade(candidate, task):\n    f, Box = candidate.f, candidate.Box\n    {}\n    return 1",
            indented(4)
        ),
        "doctest" => format!(">>> {}", body.replace('\n', "\n>>> ")),
        _ => body.to_owned(),
    };
    let grade = |is_read_only: bool| {
        let options = json!({"read_only_arguments": is_read_only});
        graders().grade(&GradeRequest {
            grader: grader.to_owned(),
            code: code.to_owned(),
            tests: vec![test.clone()],
            entry_points: vec!["f".to_owned(), "Box".to_owned()],
            options: options.as_object().expect("an object").clone(),
            ..GradeRequest::default()
        })
    };
    let verdict = grade(false);
    let is_assertion = |test: &TestResult| test.message.starts_with("AssertionError");
    assert!(verdict.tests.iter().any(is_assertion), "{verdict:?}");
    let verdict = grade(true);
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
}
