//! `unittest`: what is found, what is set up around it, and whose fault is what.

use rstest::rstest;
use wardian::grader::VerdictStatus;

use super::common::{DOUBLE, assert_infra, judge, outcomes};

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

/// What a submission breaks while a class or the file is set up or torn down.
#[rstest]
#[case("setUpModule", &[("T.test_a", false), ("T.test_b", false)])]
#[case("setUpClass", &[("T.test_a", false), ("T.test_b", false)])]
#[case("setUp", &[("T.test_a", false), ("T.test_b", false)])]
#[case("tearDown", &[("T.test_a", false), ("T.test_b", false)])]
#[case("cleanup", &[("T.test_a", false), ("T.test_b", true)])]
#[case(
    "tearDownClass",
    &[("T.test_a", true), ("T.test_b", true), ("tearDownClass (tests.T)", false)]
)]
#[case(
    "tearDownModule",
    &[("T.test_a", true), ("T.test_b", true), ("tearDownModule (tests)", false)]
)]
fn what_fails_around_a_test_case_fails_it(
    #[case] place: &str,
    #[case] expected: &[(&str, bool)],
    #[values("raise ValueError(x)", "os._exit(0)")] end: &str,
) {
    let test = "\
import unittest
from solution import f
def setUpModule(): f('setUpModule')
def tearDownModule(): f('tearDownModule')
class T(unittest.TestCase):
    @classmethod
    def setUpClass(cls): f('setUpClass')
    @classmethod
    def tearDownClass(cls): f('tearDownClass')
    def setUp(self): f('setUp')
    def tearDown(self): f('tearDown')
    def test_a(self): self.addCleanup(f, 'cleanup')
    def test_b(self): pass
";
    let code = format!("import os\ndef f(x):\n    if x == '{place}': {end}");
    let verdict = judge("unittest", test, &code);
    assert_eq!(verdict.reward, Some(0.0), "{verdict:?}");
    if end.starts_with("raise") {
        assert_eq!(outcomes(&verdict), expected, "{verdict:?}");
    }
    // pytest's graders run the same, and the file's set-up as their own.
    let verdict = judge("pytest", test, &code);
    assert_eq!(verdict.reward, Some(0.0), "{verdict:?}");
    let verdict = judge("pytest", test, "def f(x): pass");
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
}

/// A test that swallows whatever is raised while a class is set up or torn down fails all the same.
#[rstest]
#[case("setUpClass")]
#[case("tearDownClass")]
fn ending_the_instance_around_a_test_case_passes_nothing(#[case] place: &str) {
    let test = format!(
        "import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n    @classmethod\n    \
         def {place}(cls):\n        try: f(1)\n        except BaseException: pass\n    \
         def test_a(self): pass"
    );
    let verdict = judge("unittest", &test, "import os\ndef f(x): os._exit(0)");
    assert_eq!(verdict.reward, Some(0.0), "{verdict:?}");
    assert!(
        verdict
            .tests
            .iter()
            .any(|test| test.message.contains("exited with code 0")),
        "{verdict:?}"
    );
    let verdict = judge("unittest", &test, "def f(x): pass");
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
}

const LOAD_TESTS: &str = "\
import unittest
from solution import f
class T(unittest.TestCase):
    def test_a(self): self.fail()
class More(unittest.TestCase):
    def __init__(self, x):
        super().__init__('check')
        self.x = x
    def check(self): self.assertEqual(f(self.x), 2 * self.x)
def load_tests(loader, tests, pattern):
    assert tests.countTestCases() == 1
    return unittest.TestSuite([More(x) for x in range(f(1))])
";

#[test]
fn load_tests_says_what_to_run() {
    let verdict = judge("unittest", LOAD_TESTS, DOUBLE);
    assert_eq!(
        outcomes(&verdict),
        [("More.check", true), ("More.check", true)],
        "{verdict:?}"
    );
}

#[rstest]
#[case::raises("def f(x): raise ValueError('no')", "ValueError: no")]
#[case::no_number("def f(x): return 'two'", "TypeError: 'str' object")]
#[case::nothing("def f(x): return 0", "AssertionError: there is nothing to test")]
fn what_fails_in_load_tests_is_the_submissions(#[case] code: &str, #[case] message: &str) {
    let verdict = judge("unittest", LOAD_TESTS, code);
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(0.0)),
        "{verdict:?}"
    );
    assert!(verdict.tests[0].message.starts_with(message), "{verdict:?}");
}

#[test]
fn an_asynchronous_test_case_is_run_to_its_end() {
    let test = "import unittest\nfrom solution import f\nclass T(unittest.IsolatedAsyncioTestCase):\n    \
                async def test_a(self): self.assertEqual(f(1), 2)";
    assert_eq!(judge("unittest", test, DOUBLE).reward, Some(1.0));
    let verdict = judge("unittest", test, "def f(x): return 3");
    assert_eq!(verdict.reward, Some(0.0), "{verdict:?}");
}

/// What unittest only calls, so that nothing is tested, and what fails without any submission.
#[rstest]
#[case::asynchronous(
    "async def test_a(self): self.assertEqual(f(1), 2)",
    "would test nothing"
)]
#[case::yields(
    "def test_a(self):\n        yield\n        self.fail()",
    "would test nothing"
)]
#[case::set_up(
    "@classmethod\n    def setUpClass(cls): 1 / 0\n    def test_a(self): f(1)",
    "ZeroDivisionError"
)]
fn a_test_case_that_tests_nothing_is_the_tasks_fault(#[case] body: &str, #[case] expected: &str) {
    let test =
        format!("import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n    {body}");
    for grader in ["unittest", "pytest"] {
        assert_infra(&judge(grader, &test, DOUBLE), expected);
    }
}

/// unittest lets pass what is no `Exception`, so that no later test runs: they have failed, and so
/// has what was set up or torn down.
#[rstest]
#[case("setUpClass", 2)]
#[case("tearDownClass", 2)]
fn what_is_no_exception_fails_whatever_it_ends(#[case] place: &str, #[case] failed: usize) {
    let test = format!(
        "import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n    @classmethod\n    \
         def {place}(cls): f(1)\n    def test_a(self): pass\n\
         class U(unittest.TestCase):\n    def test_b(self): pass"
    );
    for code in [
        "def f(x): raise SystemExit(0)",
        "import os\ndef f(x): os._exit(0)",
    ] {
        let verdict = judge("unittest", &test, code);
        assert_eq!(verdict.reward, Some(0.0), "{verdict:?}");
        let count = verdict.tests.iter().filter(|test| !test.message.is_empty());
        assert!(count.count() >= failed, "{verdict:?}");
        assert!(
            !verdict.tests[0].message.contains("gave no verdict"),
            "{verdict:?}"
        );
    }
}
