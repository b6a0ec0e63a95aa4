//! `pytest`: what is found, what is set up around it, and whose fault is what.

use rstest::rstest;
use wardian::grader::{GradeRequest, Grader as _, VerdictStatus};

use super::common::{DOUBLE, assert_infra, graders, judge, outcomes};

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

/// What `f` was called with, in order: each test appends, and the last one looks.
const SET_UP: &str = "\
import pytest
from solution import f

pytestmark = pytest.mark.usefixtures('marked')
log = []

def setup_module(module): log.append(f('setup ' + module.__name__))
def teardown_module(): log.append(f('teardown'))
def setup_function(function): log.append(f(function.__name__))
def teardown_function(): log.append(f('end'))

@pytest.fixture(autouse=True)
def always():
    log.append(f('always'))
    yield
    log.append(f('never mind'))

@pytest.fixture
def marked(shared): log.append(f('marked'))

@pytest.fixture(scope='module')
def shared():
    log.append(f('shared'))
    yield 1
    log.append(f('unshared'))

def test_function(): assert log == ['setup tests', 'test_function', 'always', 'shared', 'marked']

class TestMethods:
    @classmethod
    def setup_class(cls): log[:] = [f('class')]
    @classmethod
    def teardown_class(cls): log.append(f('class ends'))
    def setup_method(self, method): log.append(f(method.__name__))
    def teardown_method(self): log.append(f('method ends'))

    @pytest.fixture(autouse=True)
    def own(self, always): self.x = log.append(f('own')) or 1

    def test_one(self): assert log == ['class', 'always', 'test_one', 'own', 'marked'] and self.x == 1
    def test_two(self):
        assert log[5:] == ['method ends', 'never mind', 'always', 'test_two', 'own', 'marked']

def test_after(shared):
    assert log[-4:] == ['class ends', 'test_after', 'always', 'marked'] and shared == 1
";

#[test]
fn what_is_set_up_around_tests_is_set_up() {
    let verdict = judge("pytest", SET_UP, "def f(x): return x");
    assert_eq!(
        outcomes(&verdict),
        [
            ("test_function", true),
            ("TestMethods.test_one", true),
            ("TestMethods.test_two", true),
            ("test_after", true)
        ],
        "{verdict:?}"
    );
}

/// Whatever of a submission's breaks around a test has broken the test.
#[rstest]
#[case("setup_module", &[("test_function", false), ("TestMethods.test_one", false)])]
#[case("setup_function", &[("test_function", false), ("TestMethods.test_one", true)])]
#[case("teardown_function", &[("test_function", false), ("TestMethods.test_one", true)])]
#[case("setup_class", &[("test_function", true), ("TestMethods.test_one", false)])]
#[case("setup_method", &[("test_function", true), ("TestMethods.test_one", false)])]
#[case("teardown_method", &[("test_function", true), ("TestMethods.test_one", false)])]
#[case("automatic", &[("test_function", false), ("TestMethods.test_one", false)])]
#[case("used", &[("test_function", true), ("TestMethods.test_one", false)])]
#[case(
    "teardown_class",
    &[("test_function", true), ("TestMethods.test_one", true), ("TestMethods, teardown", false)]
)]
#[case(
    "teardown_module",
    &[("test_function", true), ("TestMethods.test_one", true), ("teardown", false)]
)]
fn what_fails_around_a_test_fails_it(#[case] place: &str, #[case] expected: &[(&str, bool)]) {
    let test = "\
import pytest
from solution import f
def setup_module(): f('setup_module')
def teardown_module(): f('teardown_module')
def setup_function(): f('setup_function')
def teardown_function(): f('teardown_function')
@pytest.fixture(autouse=True)
def automatic(): f('automatic')
@pytest.fixture
def used(): f('used')
def test_function(): pass
@pytest.mark.usefixtures('used')
class TestMethods:
    @classmethod
    def setup_class(cls): f('setup_class')
    @classmethod
    def teardown_class(cls): f('teardown_class')
    def setup_method(self): f('setup_method')
    def teardown_method(self): f('teardown_method')
    def test_one(self): pass
";
    let code = format!("def f(x):\n    if x == '{place}': raise ValueError(x)");
    let verdict = judge("pytest", test, &code);
    assert_eq!(outcomes(&verdict), expected, "{verdict:?}");
    assert_eq!(verdict.reward, Some(0.0));
    let failed = verdict.tests.iter().find(|test| !test.message.is_empty());
    let message = &failed.expect("something failed").message;
    assert!(
        message.starts_with(&format!("ValueError: {place}")),
        "{message}"
    );
}

/// A submission that is asked while tests are collected cannot make their failure the task's.
#[rstest]
#[case::raises("def f(): raise ValueError('no')", "ValueError: no")]
#[case::no_list("def f(): return 3", "TypeError: 'int' object is not iterable")]
#[case::no_values("def f(): return []", "ValueError: `parametrize` has no values")]
#[case::too_many(
    "def f(): return [(1, 2, 3)]",
    "ValueError: `parametrize` has 3 values for 2"
)]
#[case::exits("import os\ndef f(): os._exit(0)", "the submission exited with code 0")]
fn what_fails_while_tests_are_collected_is_the_submissions(
    #[case] code: &str,
    #[case] message: &str,
) {
    let test = "import pytest\nfrom solution import f\n\
                class Cases:\n    def __iter__(self): return iter(f())\n\
                @pytest.mark.parametrize('a, b', Cases())\n\
                def test_a(a, b): assert a == b\n";
    let verdict = judge("pytest", test, code);
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(0.0)),
        "{verdict:?}"
    );
    assert!(verdict.tests[0].message.starts_with(message), "{verdict:?}");
    let verdict = judge("pytest", test, "def f(): return [(1, 1), (2, 2)]");
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
}

/// A test that is not collected leaves nothing to fail: then that is the failure.
#[test]
fn a_submission_cannot_leave_nothing_to_test() {
    let test = "from solution import f\nif f(1) == 2:\n    def test_a(): assert f(2) == 4";
    assert_eq!(judge("pytest", test, DOUBLE).reward, Some(1.0));
    let verdict = judge("pytest", test, "def f(x): return 0");
    assert_eq!(verdict.reward, Some(0.0), "{verdict:?}");
}

#[rstest]
#[case("skipif('sys.version_info < (3,)')", true)]
#[case("skipif('sys.version_info > (3,)')", false)]
#[case("skipif(False, reason='')", true)]
#[case("skipif(LATER)", false)]
#[case("skipif('LATER')", false)]
#[case("xfail(False, reason='')", true)]
#[case("xfail(condition='not LATER')", true)]
#[case("xfail('LATER')", false)]
#[case("xfail", false)]
#[case("xfail(raises=ValueError)", false)]
fn conditions_of_marks_are_looked_at(#[case] mark: &str, #[case] runs: bool) {
    let test = format!(
        "import pytest\nfrom solution import f\nLATER = True\n\
         @pytest.mark.{mark}\ndef test_a(): assert f(1) == 1\ndef test_b(): pass"
    );
    let verdict = judge("pytest", &test, "def f(x): return 0");
    let names: Vec<_> = outcomes(&verdict);
    let expected = [("test_a", false), ("test_b", true)];
    assert_eq!(names, expected[usize::from(!runs)..], "{verdict:?}");
}

/// Before the submission was asked for anything, it is the task.
#[rstest]
#[case::fixture(
    "@pytest.fixture\ndef a(gone): pass\ndef test_a(a): assert f(1)",
    "no fixture `gone`"
)]
#[case::used(
    "@pytest.mark.usefixtures('gone')\ndef test_a(): assert f(1)",
    "no fixture `gone`"
)]
#[case::indirect(
    "@pytest.mark.parametrize('a', [1], indirect=True)\ndef test_a(a): assert f(1)",
    "not supported"
)]
#[case::condition("@pytest.mark.skipif('GONE')\ndef test_a(): assert f(1)", "NameError")]
#[case::setup_module(
    "def setup_module(): 1 / 0\ndef test_a(): assert f(1)",
    "ZeroDivisionError"
)]
#[case::setup_class(
    "class TestA:\n    @classmethod\n    def setup_class(cls): 1 / 0\n    def test_a(self): assert f(1)",
    "ZeroDivisionError"
)]
fn what_cannot_be_set_up_without_a_submission_is_the_tasks_fault(
    #[case] test: &str,
    #[case] expected: &str,
) {
    let test = format!("import pytest\nfrom solution import f\n{test}");
    assert_infra(&judge("pytest", &test, "def f(x): return x"), expected);
}

/// The name of a test, which a parameter gives, is as safe to show as its message.
#[test]
fn names_of_tests_are_safe_to_show() {
    let test = "import pytest\nfrom solution import f\n\
                @pytest.mark.parametrize('x', f())\ndef test_a(x): assert x == ''";
    let code = r"def f(): return ['\x1b[2K\u202eok', 'x' * 1000]";
    let verdict = judge("pytest", test, code);
    assert_eq!(verdict.tests[0].name, r"test_a[\x1b[2K\u202eok]");
    assert_eq!(verdict.tests[1].name.chars().count(), 120);
}

/// A decorator of the submission's decides what a test is.
#[rstest]
#[case::no_function("def f(x): return 3 if callable(x) else 2 * x", false)]
#[case::nothing("def f(x): return None if callable(x) else 2 * x", false)]
#[case::itself("def f(x): return x if callable(x) else 2 * x", true)]
#[case::wrapper(
    "def f(x):\n    if not callable(x): return 2 * x\n    return lambda: x()",
    true
)]
#[case::wrapper_of_a_wrong_answer(
    "def f(x):\n    if not callable(x): return 3 * x\n    return lambda: x()",
    false
)]
fn a_test_that_the_submission_decorates_is_not_lost(#[case] code: &str, #[case] passes: bool) {
    let test = "from solution import f\n@f\ndef test_a(): assert f(1) == 2\n\
                def test_b(): assert f(0) == 0\n";
    let verdict = judge("pytest", test, code);
    let mut found = outcomes(&verdict);
    found.sort_unstable();
    assert_eq!(found, [("test_a", passes), ("test_b", true)], "{verdict:?}");
}

#[rstest]
#[case("pytest")]
#[case("unittest")]
fn a_method_that_the_submission_decorates_is_not_lost(#[case] grader: &str) {
    let test = "import unittest\nfrom solution import f\nclass TestF(unittest.TestCase):\n    \
                @f\n    def test_a(self): assert f(1) == 2\n    \
                def test_b(self): assert f(0) == 0\n";
    for value in ["3", "None"] {
        let code = format!("def f(x): return {value} if callable(x) else 0");
        let verdict = judge(grader, test, &code);
        let mut found = outcomes(&verdict);
        found.sort_unstable();
        assert_eq!(
            found,
            [("TestF.test_a", false), ("TestF.test_b", true)],
            "{verdict:?}"
        );
    }
    let honest = "def f(x): return x if callable(x) else 2 * x";
    assert_eq!(judge(grader, test, honest).reward, Some(1.0));
}
