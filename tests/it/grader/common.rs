//! What the tests of the graders share.

use std::sync::Arc;

use wardian::grader::{
    GradeLimits, GradeRequest, Grader as _, GraderRegistry, TestStatus, Verdict, VerdictStatus,
};
use wardian::sandbox::Sandbox;

use crate::sandbox::python;

pub(super) fn graders() -> GraderRegistry {
    graders_with(&GradeLimits::default())
}

pub(super) fn graders_with(limits: &GradeLimits) -> GraderRegistry {
    let sandbox: Arc<dyn Sandbox> = Arc::new(python().clone());
    GraderRegistry::standard(&sandbox, limits)
}

/// Grades `code`, whose entry point is `f`, by a test program.
pub(super) fn judge(grader: &str, test: &str, code: &str) -> Verdict {
    judge_with(&graders(), grader, test, code)
}

/// As [`judge`], with graders of one's own.
pub(super) fn judge_with(
    graders: &GraderRegistry,
    grader: &str,
    test: &str,
    code: &str,
) -> Verdict {
    graders.grade(&GradeRequest {
        grader: grader.to_owned(),
        code: code.to_owned(),
        tests: vec![test.to_owned()],
        entry_points: vec!["f".to_owned()],
        ..GradeRequest::default()
    })
}

pub(super) fn outcomes(verdict: &Verdict) -> Vec<(&str, bool)> {
    (verdict.tests.iter())
        .map(|test| (test.name.as_str(), test.status == TestStatus::Passed))
        .collect()
}

#[track_caller]
pub(super) fn assert_infra(verdict: &Verdict, expected: &str) {
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::InfraError, None),
        "{verdict:?}"
    );
    assert!(verdict.tests[0].message.contains(expected), "{verdict:?}");
}

pub(super) const DOUBLE: &str =
    "def f(x):\n    if isinstance(x, str): raise TypeError('not a number')\n    return 2 * x";
