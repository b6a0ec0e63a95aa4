//! What lateness says, and what it does not.
//!
//! A deadline that passed before the fuel was used depends on the machine, not on the submission: such
//! a test is excused, and where nothing else is known, so is the submission. But lateness takes nothing
//! back. What failed by itself has decided, before or after: else a submission that has failed a test
//! would do well to be late in the next.

use super::unit_test::{GraderError, says_ended};
use super::verdict::{TestResult, TestStatus};
use crate::sandbox::{Exit, Round, Served};

/// Returns how a guest ended that met its deadline, which says nothing about the submission.
pub(super) fn late(served: &Served) -> Option<&Exit> {
    match served {
        Served::Ended(exit @ Exit::DeadlineExceeded { .. }) => Some(exit),
        _ => None,
    }
}

pub(super) fn is_late(round: &Round) -> bool {
    matches!(round.ended, Some(Exit::DeadlineExceeded { .. }))
}

/// Takes back the failures of tests in which the submission was late, and of those that for this
/// reason were not begun.
pub(super) fn excuse_late(results: &mut [TestResult], rounds: &[Round]) {
    let mut any_late = false;
    for (index, result) in results.iter_mut().enumerate() {
        let is_excused = match rounds.get(index) {
            Some(round) => is_late(round) && says_ended(&result.message),
            None => any_late,
        };
        if is_excused && result.status == TestStatus::Failed {
            any_late = true;
            result.status = TestStatus::NotRun;
        }
    }
}

/// Returns the results if they decide something: where nothing failed but what was late, nothing is
/// known of the submission.
pub(super) fn decided(results: Vec<TestResult>) -> Result<Vec<TestResult>, GraderError> {
    let has = |status| results.iter().find(|result| result.status == status);
    match (has(TestStatus::Failed), has(TestStatus::NotRun)) {
        (None, Some(result)) => Err(GraderError::Deadline {
            what: result.message.clone(),
        }),
        _ => Ok(results),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::super::codec::Value;
    use super::super::unit_test::loaded_reply;
    use super::super::verdict::{GradeRequest, Verdict, VerdictStatus};
    use super::super::{GradeLimits, Grader as _, UnitTestGrader};
    use super::*;
    use crate::sandbox::{
        Cancel, Dialogue, DialogueOutcome, ExecOutcome, ExecRequest, Limits, Sandbox, SandboxError,
        Session, Usage,
    };

    fn result(status: &str, message: &str) -> Value {
        let mut members = vec![Value::text(status), Value::text(message)];
        members.resize(5, Value::None);
        Value::List(members)
    }

    /// Gives one outcome to whoever wants a dialogue.
    #[derive(Debug)]
    struct Scripted(DialogueOutcome);

    impl Sandbox for Scripted {
        fn exec_cancellable(
            &self,
            _: &ExecRequest,
            _: &Limits,
            _: &Cancel,
        ) -> Result<ExecOutcome, SandboxError> {
            Err(SandboxError::ScienceDoesNotGrade)
        }

        fn session(&self, _: &Limits) -> Result<Session, SandboxError> {
            Err(SandboxError::ScienceDoesNotGrade)
        }

        fn converse(&self, _: &Dialogue) -> Result<DialogueOutcome, SandboxError> {
            Ok(self.0.clone())
        }
    }

    fn late_exit() -> Exit {
        Exit::DeadlineExceeded {
            limit: Duration::from_secs(1),
            elapsed: Duration::from_secs(2),
        }
    }

    /// Grades two tests, of which the second fails, in the rounds of which `late` were late.
    fn grade_with_late_rounds(late: &[usize], caller: Served) -> Verdict {
        let results = [result("passed", ""), result("failed", "AssertionError")];
        let round = |index: usize| Round {
            usage: Usage::default(),
            ended: late.contains(&index).then(late_exit),
            note: results.get(index).map(Value::encode).unwrap_or_default(),
        };
        let outcome = DialogueOutcome {
            callee: Served::Reply(loaded_reply()),
            callee_usage: Usage::default(),
            // The third one is for explaining the test that failed.
            rounds: (0..3).map(round).collect(),
            caller: Some((caller, Usage::default())),
        };
        let grader = UnitTestGrader::new(Arc::new(Scripted(outcome)), GradeLimits::default());
        grader.grade(&GradeRequest {
            tests: vec!["pass".to_owned(); 2],
            ..GradeRequest::default()
        })
    }

    #[test]
    fn a_late_explanation_is_none_and_nothing_else() {
        let reply = Value::List(vec![
            result("passed", ""),
            result("failed", "AssertionError"),
        ])
        .encode();
        for (late, caller) in [
            (&[2][..], Served::Reply(reply)),
            (&[], Served::Ended(late_exit())),
        ] {
            let verdict = grade_with_late_rounds(late, caller);
            assert_eq!(
                (verdict.status, verdict.reward),
                (VerdictStatus::Failed, Some(0.0)),
                "{verdict:?}"
            );
            let statuses: Vec<_> = verdict.tests.iter().map(|test| test.status).collect();
            assert_eq!(statuses, [TestStatus::Passed, TestStatus::Failed]);
        }
    }

    /// A test that failed with a word of its own has done so before the submission was late.
    #[test]
    fn only_what_lateness_did_is_excused() {
        for (text, status) in [
            ("malformed reply", VerdictStatus::Failed),
            (
                "the submission's instance has ended",
                VerdictStatus::InfraError,
            ),
            (
                "the submission ran out of time or memory",
                VerdictStatus::InfraError,
            ),
        ] {
            let reply = Value::List(vec![result("passed", ""), result("failed", text)]).encode();
            let verdict = grade_with_late_rounds(&[1], Served::Reply(reply));
            assert_eq!(verdict.status, status, "{verdict:?}");
        }
    }
}
