//! Rewards, computed in another instance than the policy's code.
//!
//! A [`Grader`] turns a [`GradeRequest`] into a [`Verdict`] and never fails: a fault of ours is a
//! verdict without a reward, [`VerdictStatus::InfraError`], which learning leaves out. Everything
//! a submission can bring about has a reward, and it is 0 unless every test passed.

mod codec;
mod unit_test;
mod verdict;

#[cfg(any(fuzzing, test))]
pub use codec::fuzz_value;
pub use unit_test::{GradeLimits, UnitTestGrader};
pub use verdict::{GradeRequest, GradeUsage, TestResult, TestStatus, Verdict, VerdictStatus};

/// Judges submissions.
pub trait Grader: std::fmt::Debug + Send + Sync {
    /// Judges one submission.
    fn grade(&self, request: &GradeRequest) -> Verdict;
}
