//! Which of the tests that count passed.

use serde::{Deserialize, Serialize};

use super::parser::{StatusMap, TestState};

/// The tests that count.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// Those that fail before the patch and have to pass with it.
    pub fail_to_pass: Vec<String>,
    /// Those that pass before it and still have to.
    pub pass_to_pass: Vec<String>,
}

/// What a test has to do to count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvalType {
    /// Pass.
    #[default]
    PassAndFail,
    /// Not fail, for runners that name failures alone.
    FailOnly,
}

impl EvalType {
    /// Returns how the tests of a repository, `owner/name`, are judged.
    #[must_use]
    pub fn of_repository(repository: &str) -> Self {
        match repository {
            "chartjs/Chart.js"
            | "processing/p5.js"
            | "markedjs/marked"
            | "bpmn-io/bpmn-js"
            | "openlayers/openlayers"
            | "eslint/eslint" => Self::FailOnly,
            _ => Self::PassAndFail,
        }
    }
}

/// How far a patch mends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Resolution {
    /// Every test that counts passes.
    #[serde(rename = "RESOLVED_FULL")]
    Full,
    /// Nothing broke, and a part of what failed passes.
    #[serde(rename = "RESOLVED_PARTIAL")]
    Partial,
    /// Neither.
    #[serde(rename = "RESOLVED_NO")]
    No,
}

/// The tests that count, by how they went.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TestsReport {
    /// Mended.
    pub fail_to_pass: Vec<String>,
    /// Not mended.
    pub still_failing: Vec<String>,
    /// Kept.
    pub pass_to_pass: Vec<String>,
    /// Broken.
    pub broken: Vec<String>,
}

impl TestsReport {
    /// Judges the tests that count.
    ///
    /// A test that is not in the log, or was left out, is not mended; one that passed before may be
    /// left out, but has to be in the log.
    #[must_use]
    pub fn judge(tests: &StatusMap, expected: &Expected, eval_type: EvalType) -> Self {
        let has_passed = |name: &str, is_kept: bool| match eval_type {
            EvalType::FailOnly => tests.get(name) != Some(&TestState::Failed),
            EvalType::PassAndFail => find(tests, name)
                .is_some_and(|state| state.has_passed() || is_kept && *state == TestState::Skipped),
        };
        let divide = |names: &[String], is_kept| {
            (names.iter().cloned()).partition(|name: &String| has_passed(name, is_kept))
        };
        let (fail_to_pass, still_failing) = divide(&expected.fail_to_pass, false);
        let (pass_to_pass, broken) = divide(&expected.pass_to_pass, true);
        Self {
            fail_to_pass,
            still_failing,
            pass_to_pass,
            broken,
        }
    }

    /// Returns how far the patch mends.
    #[must_use]
    pub fn resolution(&self) -> Resolution {
        match (self.still_failing.is_empty(), self.broken.is_empty()) {
            (true, true) => Resolution::Full,
            (false, true) if !self.fail_to_pass.is_empty() => Resolution::Partial,
            _ => Resolution::No,
        }
    }
}

/// Finds the status of a test.
///
/// Ids that were cut inside a parameter, of which Verified has 676, are matched by their start,
/// where every test that has it went the same way.
fn find<'a>(tests: &'a StatusMap, name: &str) -> Option<&'a TestState> {
    if let Some(state) = tests.get(name) {
        return Some(state);
    }
    let count = |bracket| name.matches(bracket).count();
    if count('[') <= count(']') {
        return None;
    }
    let mut matching = tests.iter().filter(|(test, _)| test.starts_with(name));
    let (_, first) = matching.next()?;
    matching
        .all(|(_, state)| state.has_passed() == first.has_passed())
        .then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grader::swebench::LogParser;

    fn judge(log: &str, mended: &str, kept: &str, eval_type: EvalType) -> Resolution {
        let names = |text: &str| text.split_whitespace().map(str::to_owned).collect();
        let expected = Expected {
            fail_to_pass: names(mended),
            pass_to_pass: names(kept),
        };
        let tests = LogParser::Pytest.parse(log);
        TestsReport::judge(&tests, &expected, eval_type).resolution()
    }

    #[test]
    fn every_test_that_counts_has_to_pass() {
        let log = "PASSED a\nXFAIL b\nSKIPPED c\nFAILED d\n";
        let judge = |mended, kept| judge(log, mended, kept, EvalType::PassAndFail);
        assert_eq!(judge("a b", "a c"), Resolution::Full);
        assert_eq!(judge("a c", "b"), Resolution::Partial);
        assert_eq!(judge("c", "b"), Resolution::No);
        assert_eq!(judge("a", "d"), Resolution::No);
        assert_eq!(judge("a", "gone"), Resolution::No);
        assert_eq!(judge("a gone", ""), Resolution::Partial);
    }

    #[test]
    fn a_status_that_is_no_word_is_a_failure() {
        assert_eq!(
            judge("PASSED? a\n", "a", "", EvalType::PassAndFail),
            Resolution::No
        );
    }

    #[test]
    fn a_cut_id_stands_for_those_that_agree() {
        let judge = |log| judge(log, "t[a", "", EvalType::PassAndFail);
        assert_eq!(
            judge("PASSED t[ab]\nXFAIL t[ac]\nFAILED t[b]\n"),
            Resolution::Full
        );
        assert_eq!(judge("PASSED t[ab]\nFAILED t[ac]\n"), Resolution::No);
        assert_eq!(judge("PASSED u[ab]\n"), Resolution::No);
    }

    #[test]
    fn a_runner_that_names_failures_alone_is_judged_by_them() {
        let judge = |log| judge(log, "a", "b", EvalType::FailOnly);
        assert_eq!(judge(""), Resolution::Full);
        assert_eq!(judge("ERROR a"), Resolution::Full);
        assert_eq!(judge("FAILED b"), Resolution::No);
    }
}
