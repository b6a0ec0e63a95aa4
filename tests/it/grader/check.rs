//! `check`: each statement that tests is a test.

use super::common::{judge, outcomes};

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
