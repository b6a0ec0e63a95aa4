//! What is graded, and the verdict.

use indexmap::IndexMap;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::safe_text::safe;
use crate::sandbox::Usage;

/// The grader of tasks that name none.
pub const DEFAULT_GRADER: &str = "unit_tests";

/// A submission and what it is judged by. Which of the fields a grader reads, its own page says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GradeRequest {
    /// The grader's name in the [`GraderRegistry`](super::GraderRegistry).
    #[serde(default = "default_grader")]
    pub grader: String,
    /// The submission, untrusted: Python source, or the text of an answer.
    pub code: String,
    /// Statements run before the tests, in the grader: their imports and helpers.
    #[serde(default)]
    pub setup: Vec<String>,
    /// Test programs, run in order; one that raises fails. None sees what another one did, to the
    /// names here or to the submission.
    #[serde(default)]
    pub tests: Vec<String>,
    /// Names that the tests take from the submission. Everything else in a test is the grader's
    /// own, whatever the submission defines.
    #[serde(default)]
    pub entry_points: Vec<String>,
    /// Inputs with the output that each has to give.
    #[serde(default)]
    pub cases: Vec<TestCase>,
    /// Settings of the grader's own.
    #[serde(default)]
    pub options: Map<String, Value>,
}

impl Default for GradeRequest {
    fn default() -> Self {
        Self {
            grader: default_grader(),
            code: String::new(),
            setup: Vec::new(),
            tests: Vec::new(),
            entry_points: Vec::new(),
            cases: Vec::new(),
            options: Map::new(),
        }
    }
}

impl GradeRequest {
    /// Reads the grader's own settings.
    ///
    /// # Errors
    ///
    /// Fails where one is unknown or of another type.
    pub(super) fn read_options<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        T::deserialize(Value::Object(self.options.clone()))
    }
}

fn default_grader() -> String {
    DEFAULT_GRADER.to_owned()
}

/// An input, and the output that it has to give.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TestCase {
    /// What the program reads from standard input; for calls, a JSON list of the arguments.
    #[serde(default)]
    pub input: String,
    /// What it has to print; for calls, the result as JSON; for answers, the answer.
    pub output: String,
}

/// The outcome of a grading.
///
/// However it is made, its texts are safe to show: control characters and marks that turn the
/// direction of writing, which a submission may have put there, are escaped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// 1 if every test passed, else 0, or a score of the grader's own; `None` if we failed to
    /// grade, so that nothing is learned from it.
    pub reward: Option<f64>,
    /// Further rewards by name, where there are any, each before weighting.
    #[serde(default, skip_serializing_if = "IndexMap::is_empty")]
    pub rewards: IndexMap<String, f64>,
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
    /// Every test passed.
    Passed,
    /// At least one test failed: the policy's fault.
    Failed,
    /// There is nothing to test: no submission, or one that does not load or lacks an entry point.
    /// No test ran, and the reward is 0.
    Invalid,
    /// Our fault, or the task's: no reward, which is not a reward of 0.
    InfraError,
}

impl VerdictStatus {
    /// Returns the status as it is written in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::Invalid => "invalid",
            Self::InfraError => "infra_error",
        }
    }
}

/// The result of one test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TestResult {
    /// `test_1` for the first one, or the name that the test has.
    pub name: String,
    /// How it went.
    pub status: TestStatus,
    /// Why it did not pass, else empty. May quote the submission.
    pub message: String,
    /// What the failed comparison wanted, shortened, as Python writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// What the submission gave instead, shortened, as Python writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub got: Option<String>,
    /// The line of the submission that raised, if it raised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    /// The limit that the submission or its test met, as a sentence about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
}

impl TestResult {
    /// Escapes what could deceive a reader, in every text.
    fn made_safe(self) -> Self {
        Self {
            name: safe(&self.name),
            message: safe(&self.message),
            expected: self.expected.as_deref().map(safe),
            got: self.got.as_deref().map(safe),
            limit: self.limit.as_deref().map(safe),
            ..self
        }
    }

    /// Makes a result that says no more than `message`.
    #[must_use]
    pub fn new(name: impl Into<String>, status: TestStatus, message: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            status,
            message: message.into(),
            expected: None,
            got: None,
            line: None,
            limit: None,
        }
    }
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
    /// How often the submission was started, where that was more than once, each time with all of
    /// its limits.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub runs: u32,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands over a reference"
)]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl Verdict {
    /// Judges by the tests' results: all or nothing.
    #[must_use]
    pub fn judged(tests: Vec<TestResult>, usage: GradeUsage) -> Self {
        let passed = tests.iter().all(|test| test.status == TestStatus::Passed);
        Self {
            reward: Some(if passed { 1.0 } else { 0.0 }),
            rewards: IndexMap::new(),
            status: if passed {
                VerdictStatus::Passed
            } else {
                VerdictStatus::Failed
            },
            tests: tests.into_iter().map(TestResult::made_safe).collect(),
            usage,
        }
    }

    /// Gives a score of the grader's own, and further rewards by name.
    ///
    /// A number that is not finite is no score: it is reported as a fault of ours.
    #[must_use]
    pub fn scored(
        reward: f64,
        rewards: IndexMap<String, f64>,
        passed: bool,
        message: &str,
        usage: GradeUsage,
    ) -> Self {
        if !reward.is_finite() || rewards.values().any(|value| !value.is_finite()) {
            return Self::infra_error(1, "the grader gave a reward that is not finite", usage);
        }
        let (status, test) = if passed {
            (VerdictStatus::Passed, TestStatus::Passed)
        } else {
            (VerdictStatus::Failed, TestStatus::Failed)
        };
        let rewards = rewards.into_iter();
        Self {
            reward: Some(reward),
            rewards: rewards.map(|(name, value)| (safe(&name), value)).collect(),
            status,
            tests: vec![TestResult::new("grade", test, message).made_safe()],
            usage,
        }
    }

    /// Fails every one of `count` tests for the same reason.
    pub(super) fn all_failed(count: usize, message: &str, usage: GradeUsage) -> Self {
        let status = VerdictStatus::Failed;
        Self {
            reward: Some(0.0),
            rewards: IndexMap::new(),
            status,
            tests: same(count, TestStatus::Failed, message),
            usage,
        }
    }

    /// Judges a submission that no test could be run on.
    #[must_use]
    pub fn invalid(count: usize, message: &str, usage: GradeUsage) -> Self {
        let status = VerdictStatus::Invalid;
        Self {
            reward: Some(0.0),
            rewards: IndexMap::new(),
            status,
            tests: same(count, TestStatus::NotRun, message),
            usage,
        }
    }

    /// Reports a fault of ours or of the task's, which has no reward.
    #[must_use]
    pub fn infra_error(count: usize, message: &str, usage: GradeUsage) -> Self {
        let status = VerdictStatus::InfraError;
        // A request without tests still has to say why.
        let tests = same(count.max(1), TestStatus::NotRun, message);
        Self {
            reward: None,
            rewards: IndexMap::new(),
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
    let result = |index| TestResult::new(test_name(index), status, message).made_safe();
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
