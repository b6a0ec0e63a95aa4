//! What a patch earns.

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::infra::InfraSign;
use super::log::{EvalLog, LogFault};
use super::report::{EvalType, Expected, Resolution, TestsReport};
use crate::grader::{GradeUsage, TestResult, TestStatus, Verdict};

/// Rewards on top of the 1 of a patch that resolves its task; each off unless given.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SwebenchBonus {
    /// For a patch with fewer changed lines than the reference; 0.1 is usual.
    pub smaller_patch: f64,
    /// For tests that take less time than with the reference; 0.05 is usual.
    pub faster_tests: f64,
}

/// What the bonuses rest on.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SwebenchFacts {
    /// Lines that the patch adds or removes.
    pub patch_size: usize,
    /// Lines that the reference adds or removes.
    pub reference_size: usize,
    /// Seconds that the tests took.
    pub test_seconds: f64,
    /// Seconds that they take with the reference, where that was measured.
    pub reference_seconds: Option<f64>,
}

/// What became of the policy's patch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PatchOutcome {
    /// It is in the tree.
    Applied,
    /// Nothing is left of it that could be applied.
    Empty,
    /// It could not be read or applied; why.
    Refused(String),
}

/// What became of the tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EvalOutcome {
    /// They were run to their end, and this is what was printed.
    Run {
        /// The log, or why it is no evidence.
        log: Result<EvalLog, LogFault>,
        /// A sign in it that the environment broke.
        sign: Option<InfraSign>,
    },
    /// They took too long.
    TimedOut {
        /// The limit, in seconds.
        limit: u64,
    },
    /// The patch, or the environment, ended them or a step before them; how.
    Broken(String),
    /// The sandbox failed; why.
    NotRun(String),
}

impl EvalOutcome {
    /// Returns what happened, where a patch brings it about as well as a broken environment. Whose doing it
    /// was is found out with the reference, see [`PatchGrade::doubt`](super::PatchGrade::doubt).
    #[must_use]
    pub fn doubt(&self) -> Option<String> {
        match self {
            // A program that fails and prints that nothing did wants to deceive.
            Self::NotRun(_)
            | Self::Run {
                log: Ok(_) | Err(LogFault::Contradiction { .. }),
                ..
            } => None,
            Self::TimedOut { limit } => Some(format!("the tests took more than {limit} s")),
            Self::Broken(why) => Some(why.clone()),
            Self::Run {
                log: Err(fault),
                sign,
            } => sign.map(|sign| format!("{fault}, and it looks like {}", sign.reason)),
        }
    }
}

/// Judges a patch: 1 where it resolves its task, else 0, and bonuses where they are on.
///
/// A patch that cannot be applied is the policy's fault. Tests that were not run, and those of which it is
/// [in doubt](EvalOutcome::doubt) who broke them, are nobody's: there is no reward.
#[must_use]
pub fn swebench_verdict(
    patch: &PatchOutcome,
    outcome: &EvalOutcome,
    expected: &Expected,
    eval_type: EvalType,
    bonus: SwebenchBonus,
    facts: SwebenchFacts,
) -> Verdict {
    let usage = GradeUsage::default();
    let count = expected.fail_to_pass.len() + expected.pass_to_pass.len();
    match patch {
        PatchOutcome::Applied => {}
        PatchOutcome::Empty => {
            return Verdict::invalid(count, "there is no patch, or one of tests alone", usage);
        }
        PatchOutcome::Refused(why) => return Verdict::invalid(count, why, usage),
    }
    if let Some(doubt) = outcome.doubt() {
        return Verdict::infra_error(count, &doubt, usage);
    }
    let log = match outcome {
        EvalOutcome::NotRun(why) | EvalOutcome::Broken(why) => {
            return Verdict::infra_error(count, why, usage);
        }
        EvalOutcome::TimedOut { .. } => return Verdict::infra_error(count, "", usage),
        EvalOutcome::Run { log: Ok(log), .. } => log,
        EvalOutcome::Run {
            log: Err(fault), ..
        } => return failed(expected, &fault.to_string()),
    };
    let report = TestsReport::judge(&log.tests, expected, eval_type);
    let result = |name: &String, is_good: bool, message| {
        let status = if is_good {
            TestStatus::Passed
        } else {
            TestStatus::Failed
        };
        TestResult::new(name, status, if is_good { "" } else { message })
    };
    let mended = (report.fail_to_pass.iter()).map(|name| result(name, true, ""));
    let failing = (report.still_failing.iter()).map(|name| result(name, false, "it still fails"));
    let kept = (report.pass_to_pass.iter()).map(|name| result(name, true, ""));
    let broken = (report.broken.iter()).map(|name| result(name, false, "it passed before"));
    let mut verdict = Verdict::judged(
        mended.chain(failing).chain(kept).chain(broken).collect(),
        usage,
    );
    let is_resolved = report.resolution() == Resolution::Full;
    let is_smaller = facts.patch_size < facts.reference_size;
    let is_faster = (facts.reference_seconds).is_some_and(|least| facts.test_seconds < least);
    let parts = [
        ("resolved", is_resolved, 1.0),
        (
            "smaller_patch",
            is_resolved && is_smaller,
            bonus.smaller_patch,
        ),
        ("faster_tests", is_resolved && is_faster, bonus.faster_tests),
    ];
    let earned =
        |(_, is_earned, weight): &(&str, bool, f64)| if *is_earned { *weight } else { 0.0 };
    verdict.reward = Some(parts.iter().map(earned).sum());
    verdict.rewards = (parts.iter())
        .filter(|(_, _, weight)| *weight != 0.0)
        .map(|(name, is_earned, _)| ((*name).to_owned(), f64::from(u8::from(*is_earned))))
        .collect::<IndexMap<_, _>>();
    verdict
}

/// The verdict on a patch that none of the tests can be believed to pass with.
pub(super) fn failed(expected: &Expected, message: &str) -> Verdict {
    let names = expected.fail_to_pass.iter().chain(&expected.pass_to_pass);
    let tests = names.map(|name| TestResult::new(name, TestStatus::Failed, message));
    Verdict::judged(tests.collect(), GradeUsage::default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grader::VerdictStatus;
    use crate::grader::swebench::{LogParser, Markers, classify};

    fn run(output: &str, exit_code: i32) -> EvalOutcome {
        let markers = Markers::with_nonce("7f");
        let log = format!("{}\n{output}\n{}\n", markers.start, markers.end);
        EvalOutcome::Run {
            log: EvalLog::read(&log, &markers, LogParser::Pytest, Some(exit_code)),
            sign: classify(&log),
        }
    }

    fn expected() -> Expected {
        Expected {
            fail_to_pass: vec!["a".to_owned()],
            pass_to_pass: vec!["b".to_owned()],
        }
    }

    fn verdict(patch: &PatchOutcome, outcome: &EvalOutcome, bonus: SwebenchBonus) -> Verdict {
        let facts = SwebenchFacts {
            patch_size: 2,
            reference_size: 3,
            test_seconds: 1.0,
            reference_seconds: Some(0.5),
        };
        swebench_verdict(
            patch,
            outcome,
            &expected(),
            EvalType::PassAndFail,
            bonus,
            facts,
        )
    }

    fn of(outcome: &EvalOutcome) -> (Option<f64>, VerdictStatus) {
        let verdict = verdict(&PatchOutcome::Applied, outcome, SwebenchBonus::default());
        (verdict.reward, verdict.status)
    }

    #[test]
    fn the_tests_decide() {
        assert_eq!(
            of(&run("PASSED a\nPASSED b", 0)),
            (Some(1.0), VerdictStatus::Passed)
        );
        assert_eq!(
            of(&run("PASSED a\nFAILED b", 1)),
            (Some(0.0), VerdictStatus::Failed)
        );
    }

    #[test]
    fn the_policys_faults_earn_nothing_and_ours_are_left_out() {
        let failed = (Some(0.0), VerdictStatus::Failed);
        let left_out = (None, VerdictStatus::InfraError);
        assert_eq!(of(&run("PASSED a\nPASSED b", 1)), failed);
        assert_eq!(of(&run("SyntaxError: invalid syntax", 1)), failed);
        assert_eq!(of(&run("Killed", 137)), left_out);
        assert_eq!(of(&run("no tests ran", 5)), left_out);
        // What a program prints beside its tests says nothing.
        assert_eq!(of(&run("Killed\nFAILED a\nPASSED b", 1)), failed);
        assert_eq!(of(&EvalOutcome::TimedOut { limit: 1800 }), left_out);
        assert_eq!(of(&EvalOutcome::NotRun("no sandbox".to_owned())), left_out);
        assert_eq!(of(&EvalOutcome::Broken("killed".to_owned())), left_out);
        for patch in [PatchOutcome::Empty, PatchOutcome::Refused("no".to_owned())] {
            let verdict = verdict(
                &patch,
                &run("PASSED a\nPASSED b", 0),
                SwebenchBonus::default(),
            );
            assert_eq!(
                (verdict.reward, verdict.status),
                (Some(0.0), VerdictStatus::Invalid)
            );
        }
    }

    #[test]
    fn who_broke_the_tests_is_in_doubt_only_where_both_can() {
        for (outcome, is_in_doubt) in [
            (run("Killed", 137), true),
            (run("ModuleNotFoundError: No module named 'a'", 1), true),
            (run("no tests ran", 5), true),
            (EvalOutcome::TimedOut { limit: 1 }, true),
            (EvalOutcome::Broken("killed".to_owned()), true),
            (EvalOutcome::NotRun("no sandbox".to_owned()), false),
            (run("SyntaxError: invalid syntax", 1), false),
            (run("PASSED a\nPASSED b", 1), false),
            (run("Killed\nPASSED a\nFAILED b", 1), false),
        ] {
            assert_eq!(outcome.doubt().is_some(), is_in_doubt, "{outcome:?}");
        }
    }

    #[test]
    fn bonuses_are_off_unless_given_and_only_for_what_resolves() {
        let bonus = SwebenchBonus {
            smaller_patch: 0.1,
            faster_tests: 0.05,
        };
        let good = verdict(&PatchOutcome::Applied, &run("PASSED a\nPASSED b", 0), bonus);
        assert_eq!(good.reward, Some(1.1));
        let parts: Vec<f64> = good.rewards.values().copied().collect();
        assert_eq!(parts, [1.0, 1.0, 0.0]);
        let bad = verdict(&PatchOutcome::Applied, &run("FAILED a\nPASSED b", 1), bonus);
        assert_eq!(bad.reward, Some(0.0));
    }
}
