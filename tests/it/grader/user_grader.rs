//! `python`: a user's grader.

use rstest::rstest;
use serde_json::json;
use wardian::grader::{GradeLimits, GradeRequest, Grader as _, Verdict, VerdictStatus};
use wardian::sandbox::Limits;

use super::common::{assert_infra, graders, graders_with};

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

/// The text of a submission is asked for, too: a grader that stumbles over it gives 0.
#[rstest]
#[case::syntax("ast.parse(candidate.source)", "f = ", "SyntaxError")]
#[case::number("float(candidate.source)", "much", "ValueError")]
#[case::index("candidate.source.split('#')[1]", "nothing", "IndexError")]
#[case::depth("ast.parse(candidate.source)", "((((", "SyntaxError")]
fn a_text_cannot_make_the_grader_fail(
    #[case] reads: &str,
    #[case] text: &str,
    #[case] message: &str,
) {
    let grader = format!("import ast\ndef grade(candidate, task):\n    {reads}\n    return 1");
    let verdict = by_user(&grader, text, &json!({"submission": "text"}));
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(0.0)),
        "{verdict:?}"
    );
    assert!(verdict.tests[0].message.starts_with(message), "{verdict:?}");
    // What fails before is the grader's own fault.
    let grader = format!("def grade(candidate, task):\n    1 / 0\n    {reads}\n    return 1");
    let verdict = by_user(&grader, text, &json!({"submission": "text"}));
    assert_infra(&verdict, "ZeroDivisionError");
}

/// Rewards that are finite may have a sum that is not.
#[test]
fn a_sum_that_is_no_number_is_refused() {
    let grader = "def grade(candidate, task): return {'a': 1e308, 'b': 1e308}";
    let verdict = by_user(grader, "x = 1", &json!({}));
    assert_infra(
        &verdict,
        "`the sum of the rewards` is inf, not a finite number",
    );
    // A submission cannot get out by it.
    let grader = "def grade(candidate, task): return {'a': candidate.f(), 'b': candidate.f()}";
    let verdict = by_user(grader, "def f(): return 1e308", &json!({}));
    assert_eq!(verdict.reward, Some(0.0), "{verdict:?}");
    assert!(verdict.tests[0].message.contains("is inf"), "{verdict:?}");
}

#[test]
fn what_a_grader_quotes_is_safe_to_show() {
    let grader = "def grade(candidate, task): return {'reward': 1, candidate.f(): 0.5, 'message': candidate.f() * 100}";
    let verdict = by_user(grader, r"def f(): return '\x1b[31m\u202e'", &json!({}));
    assert_eq!(verdict.rewards.keys().next().unwrap(), r"\x1b[31m\u202e");
    let message = &verdict.tests[0].message;
    assert!(
        message.starts_with(r"\x1b[31m\u202e\x1b") && message.len() <= 2000,
        "{message}"
    );
}
