//! `doctest`: examples, and what they show.

use rstest::rstest;
use wardian::grader::{GradeRequest, Grader as _, VerdictStatus};

use super::common::{DOUBLE, graders, judge, outcomes};

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

/// What is shown is what the submission prints, what the tests print, and the value, in that order.
#[test]
fn examples_show_what_the_submission_prints() {
    let example = "\
>>> print('before', f(2))
a
b
before 4
>>> f(3)
a
b
6
>>> class_ = C()
made
>>> class_.x
read
1
>>> for x in it(): print(x)
first
1
second
2
>>> f(0)
Traceback (most recent call last):
ZeroDivisionError: division by zero
>>> twice(lambda n: print('callback', n))
one
callback 1
two
callback 2
three
";
    let code = "import sys\ndef f(x):\n    print('a')\n    sys.stdout.write('b\\n')\n    1 / x\n    return 2 * x\n\
                class C:\n    def __init__(self): print('made')\n    @property\n    \
                def x(self):\n        print('read')\n        return 1\n\
                def it():\n    print('first')\n    yield 1\n    print('second')\n    yield 2\n\
                def twice(g):\n    print('one')\n    g(1)\n    print('two')\n    g(2)\n    print('three')";
    let grade = |code: &str| {
        graders().grade(&GradeRequest {
            grader: "doctest".to_owned(),
            code: code.to_owned(),
            tests: vec![example.to_owned()],
            entry_points: ["f", "C", "it", "twice"].map(str::to_owned).to_vec(),
            ..GradeRequest::default()
        })
    };
    let verdict = grade(code);
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
    let verdict = grade(&code.replace("print('a')", "print('A')"));
    let failed: Vec<_> = outcomes(&verdict)
        .into_iter()
        .filter(|test| !test.1)
        .collect();
    assert_eq!(
        failed,
        [("line_1", false), ("line_5", false)],
        "{verdict:?}"
    );
    assert_eq!(verdict.tests[1].got.as_deref(), Some(r"A\nb\n6"));
    // Printed when it was loaded, it belongs to no example.
    let verdict = grade(&format!("print('loaded')\n{code}"));
    assert_eq!(verdict.reward, Some(1.0), "{verdict:?}");
}

/// It is text, whatever it says or is made of.
#[rstest]
#[case::colours(r"print('\x1b[2J\u202e4')", r"\x1b[2J\u202e4\nNone")]
#[case::no_text(r"sys.stdout.buffer.write(b'\xff')", r"�None")]
#[case::much("print('x' * 10**6)", "xxx")]
#[case::own_stream("sys.stdout = None", "None")]
fn what_is_printed_is_text(#[case] prints: &str, #[case] got: &str) {
    let code = format!("import sys\ndef f():\n    {prints}\n    return repr");
    let verdict = judge("doctest", ">>> print(f() and None)\n4\n", &code);
    let test = &verdict.tests[0];
    assert_eq!(verdict.reward, Some(0.0), "{verdict:?}");
    let shown = test.got.as_deref().unwrap_or_default();
    assert!(shown.starts_with(got), "{verdict:?}");
    assert!(shown.chars().count() <= 200);
}

/// Nor does it say that an example is over, or pass one that raises.
#[test]
fn printing_passes_no_example() {
    for code in [
        "def f(x):\n    print('4')\n    raise ValueError",
        "def f(x):\n    print('4')\n    return x",
        "import os\ndef f(x):\n    print('4', flush=True)\n    os._exit(0)",
    ] {
        let verdict = judge("doctest", ">>> f(2)\n4\n", code);
        assert_eq!(verdict.reward, Some(0.0), "{verdict:?}");
    }
}
