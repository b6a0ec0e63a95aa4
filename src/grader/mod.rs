//! Rewards, computed in another instance than the policy's code.
//!
//! A [`Grader`] turns a [`GradeRequest`] into a [`Verdict`] and never fails: a fault of ours is a
//! verdict without a reward, [`VerdictStatus::InfraError`], which learning leaves out. Everything
//! a submission can bring about has a reward.
//!
//! A task names its grader, and the [`GraderRegistry`] finds it:
//!
//! | name | judges by |
//! |---|---|
//! | `unit_tests` | a list of tests: MBPP |
//! | `check` | `check(candidate)`: `HumanEval`, `HumanEval`+ |
//! | `script` | a program that raises: MBPP+ |
//! | `pytest`, `unittest`, `doctest` | a test file, or examples |
//! | `calls` | calls with expected results: APPS, `LiveCodeBench` |
//! | `stdio` | what is printed for an input: APPS, `LiveCodeBench` |
//! | `numeric`, `exact_match` | a number or a text: GSM8K |
//! | `python` | a user's `def grade(candidate, task)` |
//!
//! What a verdict earns is said by [`RewardTerms`].
//!
//! Tasks with a shell of their own are graded otherwise, in a [`GradingSandbox`]: by their verifier,
//! see [`verify`], or by the tests of their repository, see [`swebench`].

mod answer;
mod codec;
mod compare;
mod harbor;
mod lateness;
mod place;
mod program;
mod registry;
mod reward;
mod safe_text;
mod stdio;
pub mod swebench;
mod unit_test;
mod verdict;

pub use answer::{ExactMatchGrader, NumericGrader, is_number};
#[cfg(any(fuzzing, test))]
pub use codec::fuzz_value;
pub use harbor::{
    ErrorPolicy, MAX_REWARD_BYTES, RewardFault, Rewards, Verification, VerifyJob, harbor_verdict,
    verify,
};
pub use place::{
    GradingCommand, GradingEnd, GradingFault, GradingFile, GradingOutput, GradingSandbox,
    GradingUser,
};
pub use program::{ProgramGrader, ProgramKind, SubmissionKind};
pub use registry::{GRADERS, GraderRegistry};
pub use reward::{RewardTerms, Score, SubmissionFacts};
pub use stdio::StdioGrader;
pub use unit_test::{GradeLimits, UnitTestGrader};
pub use verdict::{
    DEFAULT_GRADER, GradeRequest, GradeUsage, TestCase, TestResult, TestStatus, Verdict,
    VerdictStatus,
};

/// Judges submissions.
pub trait Grader: std::fmt::Debug + Send + Sync {
    /// Judges one submission.
    fn grade(&self, request: &GradeRequest) -> Verdict;
}
