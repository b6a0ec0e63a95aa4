//! What is graded, and the verdict.

use serde::{Deserialize, Serialize};

use crate::sandbox::Usage;

/// A submission and the tests it has to pass.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GradeRequest {
    /// The submission: Python source, untrusted.
    pub code: String,
    /// Statements run before the tests, in the grader: their imports and helpers.
    #[serde(default)]
    pub setup: Vec<String>,
    /// Test programs, run in order in one namespace; one that raises fails.
    pub tests: Vec<String>,
    /// Names that the tests take from the submission. Everything else in a test is the grader's
    /// own, whatever the submission defines.
    pub entry_points: Vec<String>,
}

/// The outcome of a grading.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// 1 if every test passed, else 0; `None` if we failed to grade, so that nothing is learned
    /// from it.
    pub reward: Option<f64>,
    /// What the reward rests on.
    pub status: VerdictStatus,
    /// One result per test, in order.
    pub tests: Vec<TestResult>,
    /// What it cost.
    pub usage: GradeUsage,
}

/// What a [`Verdict`] rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VerdictStatus {
    /// Every test passed: reward 1.
    Passed,
    /// At least one test failed: reward 0.
    Failed,
    /// The submission does not load or lacks an entry point, so no test ran: reward 0.
    Invalid,
    /// Our fault: no reward.
    InfraError,
}

/// The result of one test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TestResult {
    /// `test_1` for the first one.
    pub name: String,
    /// How it went.
    pub status: TestStatus,
    /// Why it did not pass, else empty. May quote the submission.
    pub message: String,
}

/// How one test went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TestStatus {
    /// It ran to its end.
    Passed,
    /// It raised, or the submission gave no proper answer.
    Failed,
    /// It could not be run; the message says why.
    NotRun,
}

/// What a grading used, by instance.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct GradeUsage {
    /// The submission's instance.
    pub candidate: Usage,
    /// The tests' instance.
    pub grader: Usage,
}

impl Verdict {
    /// Judges by the tests' results.
    pub(super) fn judged(tests: Vec<TestResult>, usage: GradeUsage) -> Self {
        let passed = tests.iter().all(|test| test.status == TestStatus::Passed);
        Self {
            reward: Some(if passed { 1.0 } else { 0.0 }),
            status: if passed {
                VerdictStatus::Passed
            } else {
                VerdictStatus::Failed
            },
            tests,
            usage,
        }
    }

    /// Fails every one of `count` tests for the same reason.
    pub(super) fn all_failed(count: usize, message: &str, usage: GradeUsage) -> Self {
        let status = VerdictStatus::Failed;
        Self {
            reward: Some(0.0),
            status,
            tests: same(count, TestStatus::Failed, message),
            usage,
        }
    }

    /// Judges a submission that no test could be run on.
    pub(super) fn invalid(count: usize, message: &str, usage: GradeUsage) -> Self {
        let status = VerdictStatus::Invalid;
        Self {
            reward: Some(0.0),
            status,
            tests: same(count, TestStatus::NotRun, message),
            usage,
        }
    }

    /// Reports a fault of ours.
    pub(super) fn infra_error(count: usize, message: &str, usage: GradeUsage) -> Self {
        let status = VerdictStatus::InfraError;
        // A request without tests still has to say why.
        let tests = same(count.max(1), TestStatus::NotRun, message);
        Self {
            reward: None,
            status,
            tests,
            usage,
        }
    }
}

/// Names the test at `index`, counting from 0.
pub(super) fn test_name(index: usize) -> String {
    format!("test_{}", index + 1)
}

fn same(count: usize, status: TestStatus, message: &str) -> Vec<TestResult> {
    let result = |index| TestResult {
        name: test_name(index),
        status,
        message: message.to_owned(),
    };
    (0..count).map(result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_has_the_published_shape() {
        let verdict = Verdict::invalid(1, "SyntaxError: invalid syntax", GradeUsage::default());
        let json = serde_json::to_string(&verdict).unwrap();
        let usage = r#"{"fuel":0,"memory_bytes":0,"wall_us":0}"#;
        assert_eq!(
            json,
            format!(
                r#"{{"reward":0.0,"status":"invalid","tests":[{{"name":"test_1","status":"not_run","message":"SyntaxError: invalid syntax"}}],"usage":{{"candidate":{usage},"grader":{usage}}}}}"#
            )
        );
    }

    #[test]
    fn our_fault_has_no_reward() {
        let verdict = Verdict::infra_error(0, "no tests", GradeUsage::default());
        let json = serde_json::to_value(&verdict).unwrap();
        assert!(json["reward"].is_null());
        assert_eq!(json["tests"][0]["message"], "no tests");
    }

    #[test]
    fn one_failure_takes_the_whole_reward() {
        let mut tests = same(3, TestStatus::Passed, "");
        assert_eq!(
            Verdict::judged(tests.clone(), GradeUsage::default()).reward,
            Some(1.0)
        );
        tests[1].status = TestStatus::Failed;
        assert_eq!(
            Verdict::judged(tests, GradeUsage::default()).reward,
            Some(0.0)
        );
    }
}
