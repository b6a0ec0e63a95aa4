//! `script`: a program that raises if the submission is wrong.

use rstest::rstest;

use super::common::{DOUBLE, assert_infra, judge};

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

/// What stands behind `if __name__ == "__main__":` is run.
#[test]
fn a_script_is_the_main_program() {
    let script = "import sys\nassert sys.modules['__main__'].f is f\n\
                  if __name__ == '__main__':\n    assert f(2) == 4";
    assert_eq!(judge("script", script, DOUBLE).reward, Some(1.0));
    let verdict = judge("script", script, "def f(x): return x");
    assert_eq!(verdict.reward, Some(0.0), "{verdict:?}");
}

#[test]
fn a_script_may_end_itself_and_the_submission_may_not() {
    let script = "import unittest\nclass T(unittest.TestCase):\n    \
                  def test_a(self): self.assertEqual(f(2), 4)\n\
                  if __name__ == '__main__':\n    unittest.main(argv=['tests'])";
    let verdict = judge("script", script, DOUBLE);
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
    for code in [
        "def f(x): return x",
        "def f(x): raise SystemExit(0)",
        "import sys\ndef f(x): sys.exit()",
    ] {
        for script in [script, "assert f(2) == 4"] {
            let verdict = judge("script", script, code);
            assert_eq!(verdict.reward, Some(0.0), "{code}: {verdict:?}");
        }
    }
}

/// A script that tests nothing would pass whatever is submitted.
#[rstest]
#[case("", "never ask")]
#[case("def test_f(): assert f(2) == 4", "never ask")]
#[case("if __name__ == '__test__':\n    assert f(2) == 4", "never ask")]
#[case("1 / 0\nassert f(2) == 4", "ZeroDivisionError")]
fn a_script_that_never_asks_is_a_broken_task(#[case] script: &str, #[case] expected: &str) {
    assert_infra(
        &judge("script", &format!("x = 1\n{script}"), DOUBLE),
        expected,
    );
}

/// `unittest` takes a skipped test for none that failed.
#[rstest]
#[case("import unittest\ndef f(x): raise unittest.SkipTest('x')")]
#[case("import unittest\nclass Own(unittest.SkipTest): pass\ndef f(x): raise Own('x')")]
#[case(
    "from unittest.case import SkipTest as Wish\nWish.__name__ = 'ValueError'\ndef f(x): raise Wish"
)]
fn a_submission_cannot_skip_a_test(#[case] code: &str) {
    let test = "import unittest\nclass T(unittest.TestCase):\n    \
                def test_a(self): self.assertEqual(f(2), 4)\n";
    for run in [
        "unittest.main(argv=['tests'])",
        "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).\
         wasSuccessful() or 1 / 0",
    ] {
        let script = format!("{test}{run}\n");
        let verdict = judge("script", &script, code);
        assert_eq!(verdict.reward, Some(0.0), "{verdict:?}");
        let verdict = judge("script", &script, DOUBLE);
        assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
    }
}
