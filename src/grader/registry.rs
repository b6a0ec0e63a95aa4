//! Graders by name.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::verdict::{DEFAULT_GRADER, GradeRequest, GradeUsage, Verdict};
use super::{
    ExactMatchGrader, GradeLimits, Grader, NumericGrader, ProgramGrader, ProgramKind, StdioGrader,
    UnitTestGrader,
};
use crate::sandbox::Sandbox;

/// The graders that tasks can name, itself a grader: it hands each request to the one that the
/// request names.
///
/// # Examples
///
/// A grader of one's own is a type with one method:
///
/// ```
/// use wardian::grader::{
///     GradeRequest, GradeUsage, Grader, GraderRegistry, TestResult, TestStatus, Verdict,
/// };
///
/// /// Passes answers that are no longer than they must be.
/// #[derive(Debug)]
/// struct Brevity;
///
/// impl Grader for Brevity {
///     fn grade(&self, request: &GradeRequest) -> Verdict {
///         let status = match request.code.chars().count() {
///             0..=20 => TestStatus::Passed,
///             _ => TestStatus::Failed,
///         };
///         let result = TestResult::new("brevity", status, "");
///         Verdict::judged(vec![result], GradeUsage::default())
///     }
/// }
///
/// let mut graders = GraderRegistry::new();
/// graders.register("brevity", Brevity);
/// let request = GradeRequest {
///     grader: "brevity".to_owned(),
///     code: "Short.".to_owned(),
///     ..GradeRequest::default()
/// };
/// assert_eq!(graders.grade(&request).reward, Some(1.0));
/// ```
#[derive(Debug, Clone, Default)]
pub struct GraderRegistry {
    graders: BTreeMap<String, Arc<dyn Grader>>,
}

/// The names of the graders of this crate, which a task file can name.
pub const GRADERS: [&str; 11] = [
    "calls",
    "check",
    "doctest",
    "exact_match",
    "numeric",
    "pytest",
    "python",
    "script",
    "stdio",
    "unit_tests",
    "unittest",
];

impl GraderRegistry {
    /// Makes a registry without graders.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a registry with all graders of this crate, which run their guests in `sandbox` under
    /// `limits`.
    #[must_use]
    pub fn standard(sandbox: &Arc<dyn Sandbox>, limits: &GradeLimits) -> Self {
        let mut graders = Self::new();
        graders.register(
            DEFAULT_GRADER,
            UnitTestGrader::new(Arc::clone(sandbox), limits.clone()),
        );
        for kind in ProgramKind::ALL {
            let grader = ProgramGrader::new(kind, Arc::clone(sandbox), limits.clone());
            graders.register(kind.name(), grader);
        }
        graders.register(
            StdioGrader::NAME,
            StdioGrader::new(Arc::clone(sandbox), limits),
        );
        graders.register(ExactMatchGrader::NAME, ExactMatchGrader);
        graders.register(NumericGrader::NAME, NumericGrader);
        graders
    }

    /// Adds a grader, in place of one that has the name.
    pub fn register(&mut self, name: impl Into<String>, grader: impl Grader + 'static) {
        self.graders.insert(name.into(), Arc::new(grader));
    }

    /// Returns the grader with this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Arc<dyn Grader>> {
        self.graders.get(name)
    }

    /// Returns all names, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.graders.keys().map(String::as_str)
    }
}

impl Grader for GraderRegistry {
    fn grade(&self, request: &GradeRequest) -> Verdict {
        let count = request.tests.len().max(request.cases.len()).max(1);
        let usage = GradeUsage::default();
        let Some(grader) = self.get(&request.grader) else {
            let names: Vec<&str> = self.names().collect();
            let message = format!(
                "there is no grader `{}`; there are {}",
                request.grader,
                names.join(", ")
            );
            tracing::error!(message, "grading failed");
            return Verdict::infra_error(count, &message, usage);
        };
        if request.code.trim().is_empty() {
            return Verdict::invalid(count, "the submission is empty", usage);
        }
        grader.grade(request)
    }
}

#[cfg(test)]
mod tests {
    use super::super::verdict::VerdictStatus;
    use super::*;

    #[test]
    fn an_unknown_grader_is_our_fault_and_an_empty_submission_the_policys() {
        let mut graders = GraderRegistry::new();
        graders.register("exact_match", ExactMatchGrader);
        let mut request = GradeRequest {
            grader: "exact".to_owned(),
            code: "x".to_owned(),
            ..GradeRequest::default()
        };
        let verdict = graders.grade(&request);
        assert_eq!(
            (verdict.status, verdict.reward),
            (VerdictStatus::InfraError, None)
        );
        assert_eq!(
            verdict.tests[0].message,
            "there is no grader `exact`; there are exact_match"
        );
        request.grader = "exact_match".to_owned();
        request.code = " \n".to_owned();
        let verdict = graders.grade(&request);
        assert_eq!(
            (verdict.status, verdict.reward),
            (VerdictStatus::Invalid, Some(0.0))
        );
    }
}
