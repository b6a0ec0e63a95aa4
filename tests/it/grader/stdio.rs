//! `stdio`: what a program prints.

use rstest::rstest;
use wardian::grader::{
    GradeLimits, GradeRequest, Grader as _, TestCase, TestStatus, VerdictStatus,
};
use wardian::sandbox::Limits;

use super::common::{graders, graders_with, outcomes};

pub(super) fn stdio(code: &str, cases: &[(&str, &str)]) -> GradeRequest {
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

/// What a program prints, or says when it fails, reaches nobody's terminal as it is.
#[test]
fn what_a_verdict_quotes_is_safe_to_show() {
    let verdict = graders().grade(&stdio(r"print('\x1b[31m\u202e')", &[("", "3")]));
    let test = &verdict.tests[0];
    assert_eq!(test.got.as_deref(), Some(r"\x1b[31m\u202e"));
    assert!(
        test.message.ends_with(r"got `\x1b[31m\u202e`"),
        "{verdict:?}"
    );
    let verdict = graders().grade(&stdio(r"raise ValueError('\x1b[31m\u202e')", &[("", "3")]));
    assert_eq!(verdict.tests[0].message, r"ValueError: \x1b[31m\u202e");
    let answer = GradeRequest {
        grader: "exact_match".to_owned(),
        ..stdio("\u{1b}[31m\u{202e}", &[("", "3")])
    };
    let verdict = graders().grade(&answer);
    assert_eq!(verdict.tests[0].got.as_deref(), Some(r"\x1b[31m\u202e"));
}
