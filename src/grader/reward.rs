//! From a verdict to a reward: which parts count, and how much.

use std::collections::BTreeMap;

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::verdict::{TestStatus, Verdict, VerdictStatus};

/// What a submission earns: a weighted sum of named parts.
///
/// By default the reward is all or nothing: 1 where every test passes and 0 elsewhere, or the
/// score of a grader that gives one. The other parts help a policy that hardly ever passes to find
/// a direction; they also reward what is not yet right.
///
/// The sum is what most algorithms train on. The parts are kept beside it, each before weighting,
/// for metrics and for those that normalise each part by itself (GDPO, arXiv:2601.05242), which
/// find its weight in [`RewardTerms::weight`].
///
/// # Examples
///
/// ```
/// use wardian::grader::RewardTerms;
///
/// let terms: RewardTerms = toml::from_str("test_fraction = 0.5\nfuel_penalty = 0.1")?;
/// assert_eq!((terms.passed, terms.weight("test_fraction")), (1.0, 0.5));
/// # Ok::<(), toml::de::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RewardTerms {
    /// Weight of the grader's own reward: 1 for passing every test, or its score; 1 unless given.
    pub passed: f64,
    /// Weight of the share of tests that pass, by the tests' weights; 0 unless given.
    pub test_fraction: f64,
    /// Weight of a submission that loads and defines what the tests use; 0 unless given.
    pub loads: f64,
    /// Weight of an episode that keeps to the form: its calls can be read and it ends with a
    /// submission; 0 unless given.
    pub format: f64,
    /// Share of `passed` that a submission loses which passes with all of the fuel it may use, one
    /// that uses less losing less in proportion; 0 unless given. What fails loses nothing, so a
    /// fast wrong answer never beats a slow right one.
    pub fuel_penalty: f64,
    /// The fuel that this is a share of, for each time that the submission is started, beyond
    /// which nothing of `passed` is left; 0, the default, for the submission's limit.
    pub fuel_budget: u64,
    /// Weight of the length penalty: 0 for a submission of up to `length_limit - length_margin`
    /// characters, then falling to -1 at `length_limit` (DAPO, arXiv:2503.14476, equation 13); 0
    /// unless given.
    pub length: f64,
    /// Characters at which the length penalty is whole; 4000 unless given.
    pub length_limit: usize,
    /// Characters over which it grows; 1000 unless given.
    pub length_margin: usize,
    /// Weights of the named rewards that a grader returns; 0 for those that are not named here,
    /// which are still kept for metrics.
    pub named: BTreeMap<String, f64>,
}

impl Default for RewardTerms {
    fn default() -> Self {
        Self {
            passed: 1.0,
            test_fraction: 0.0,
            loads: 0.0,
            format: 0.0,
            fuel_penalty: 0.0,
            fuel_budget: 0,
            length: 0.0,
            length_limit: 4000,
            length_margin: 1000,
            named: BTreeMap::new(),
        }
    }
}

/// What the verdict does not say about a submission.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SubmissionFacts<'a> {
    /// Its length, in characters.
    pub length: usize,
    /// The fuel it may use each time it is started.
    pub fuel_limit: u64,
    /// The weight of each test; of one each where there are fewer than tests.
    pub test_weights: &'a [f64],
    /// Whether the episode kept to the form; `None` where there was no episode.
    pub format: Option<bool>,
}

/// A reward and its parts.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// The weighted sum.
    pub reward: f64,
    /// The parts by name, each before weighting.
    pub parts: IndexMap<String, f64>,
}

impl RewardTerms {
    /// Returns what a verdict earns, or `None` where we failed to grade: that is no reward, not a
    /// reward of 0.
    #[must_use]
    pub fn score(&self, verdict: &Verdict, facts: &SubmissionFacts<'_>) -> Option<Score> {
        let own = verdict.reward?;
        let loads = matches!(
            verdict.status,
            VerdictStatus::Passed | VerdictStatus::Failed
        );
        let mut parts = IndexMap::from([
            ("passed".to_owned(), own),
            (
                "test_fraction".to_owned(),
                test_fraction(verdict, facts.test_weights),
            ),
            ("loads".to_owned(), f64::from(u8::from(loads))),
        ]);
        if let Some(format) = facts.format {
            parts.insert("format".to_owned(), f64::from(u8::from(format)));
        }
        if self.fuel_penalty != 0.0 {
            let budget = match self.fuel_budget {
                0 => facts.fuel_limit,
                budget => budget,
            };
            let budget = budget as f64 * f64::from(verdict.usage.runs.max(1));
            let fuel = verdict.usage.candidate.fuel as f64;
            let shaped = fuel_shaped(own, fuel, budget, self.fuel_penalty);
            parts.insert("fuel".to_owned(), shaped - own);
        }
        if self.length != 0.0 {
            let penalty = overlong_penalty(facts.length, self.length_limit, self.length_margin);
            parts.insert("length".to_owned(), penalty);
        }
        for (name, value) in &verdict.rewards {
            parts.entry(name.clone()).or_insert(*value);
        }
        Some(self.sum(parts))
    }

    /// Returns what an episode without a submission earns.
    #[must_use]
    pub fn without_submission(&self, format: bool) -> Score {
        let parts = [
            ("passed", 0.0),
            ("test_fraction", 0.0),
            ("loads", 0.0),
            ("format", f64::from(u8::from(format))),
        ];
        self.sum(parts.map(|(name, part)| (name.to_owned(), part)).into())
    }

    /// Returns the weight of a part.
    #[must_use]
    pub fn weight(&self, part: &str) -> f64 {
        match part {
            // What the fuel costs is taken off the grader's own reward.
            "passed" | "fuel" => self.passed,
            "test_fraction" => self.test_fraction,
            "loads" => self.loads,
            "format" => self.format,
            "length" => self.length,
            name => self.named.get(name).copied().unwrap_or(0.0),
        }
    }

    /// Returns the weights by the key of each, to check them.
    pub fn weights(&self) -> impl Iterator<Item = (String, f64)> {
        let own = [
            ("passed", self.passed),
            ("test_fraction", self.test_fraction),
            ("loads", self.loads),
            ("format", self.format),
            ("fuel_penalty", self.fuel_penalty),
            ("length", self.length),
        ];
        let named = self.named.iter();
        (own.into_iter()
            .map(|(name, weight)| (name.to_owned(), weight)))
        .chain(named.map(|(name, weight)| (format!("named.{name}"), *weight)))
    }

    fn sum(&self, parts: IndexMap<String, f64>) -> Score {
        let terms = parts.iter().map(|(name, part)| {
            // A weight of 0 leaves a part out, whatever it is.
            match self.weight(name) {
                0.0 => 0.0,
                weight => weight * part,
            }
        });
        Score {
            reward: terms.sum(),
            parts,
        }
    }
}

/// Returns the share of tests that pass, by their weights.
fn test_fraction(verdict: &Verdict, weights: &[f64]) -> f64 {
    let (mut passed, mut total) = (0.0, 0.0);
    for (index, test) in verdict.tests.iter().enumerate() {
        let weight = weights.get(index).copied().unwrap_or(1.0);
        total += weight;
        if test.status == TestStatus::Passed {
            passed += weight;
        }
    }
    if total > 0.0 { passed / total } else { 0.0 }
}

/// Returns what is left of `reward` after `fuel` of `budget` was used: `reward · (1 − λ ·
/// fuel / budget)`, and nothing beyond the budget.
fn fuel_shaped(reward: f64, fuel: f64, budget: f64, lambda: f64) -> f64 {
    if fuel > budget {
        return 0.0;
    }
    let share = if budget > 0.0 { fuel / budget } else { 0.0 };
    reward * (1.0 - lambda * share)
}

/// Returns DAPO's soft overlong punishment, from 0 to -1 (arXiv:2503.14476, equation 13).
fn overlong_penalty(length: usize, limit: usize, margin: usize) -> f64 {
    let start = limit.saturating_sub(margin);
    if length <= start {
        0.0
    } else if length >= limit {
        -1.0
    } else {
        -((length - start) as f64) / (limit - start) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::super::verdict::{GradeUsage, TestResult};
    use super::*;
    use crate::sandbox::Usage;

    /// The inputs and the expected numbers of a case of `tests/golden/rl.json`.
    fn golden(name: &str) -> serde_json::Value {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/rl.json");
        let file: serde_json::Value =
            serde_json::from_str(&fs_err::read_to_string(path).unwrap()).unwrap();
        let cases = file["cases"].as_array().unwrap();
        cases
            .iter()
            .find(|case| case["name"] == name)
            .unwrap()
            .clone()
    }

    fn floats(value: &serde_json::Value) -> Vec<f64> {
        let items = value.as_array().unwrap();
        items.iter().map(|item| item.as_f64().unwrap()).collect()
    }

    fn verdict(passed: &[bool], fuel: u64) -> Verdict {
        let result = |passed: &bool| {
            let status = if *passed {
                TestStatus::Passed
            } else {
                TestStatus::Failed
            };
            TestResult::new("test", status, "")
        };
        let usage = GradeUsage {
            candidate: Usage {
                fuel,
                ..Usage::default()
            },
            ..GradeUsage::default()
        };
        Verdict::judged(passed.iter().map(result).collect(), usage)
    }

    #[test]
    fn fuel_is_a_share_of_what_passing_earns() {
        let case = golden("fuel_shaped_reward");
        let inputs = &case["inputs"];
        let terms = RewardTerms {
            fuel_penalty: inputs["lam"].as_f64().unwrap(),
            fuel_budget: 1_000_000_000,
            ..RewardTerms::default()
        };
        assert_eq!(inputs["fuel_budget"].as_f64(), Some(1e9));
        let runs = floats(&inputs["passed"])
            .into_iter()
            .zip(floats(&inputs["fuel_used"]));
        for ((passed, fuel), expected) in runs.zip(floats(&case["expected"]["reward"])) {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "the golden fuel is a whole number"
            )]
            let verdict = verdict(&[passed == 1.0], fuel as u64);
            let score = terms.score(&verdict, &SubmissionFacts::default()).unwrap();
            assert!((score.reward - expected).abs() < 1e-12, "{score:?}");
            // Summed by weight, the parts give the reward.
            let sum: f64 = (score.parts.iter())
                .map(|(name, part)| terms.weight(name) * part)
                .sum();
            assert_eq!(sum, score.reward);
        }
    }

    #[test]
    fn a_submission_that_is_started_often_has_its_budget_each_time() {
        let terms = RewardTerms {
            fuel_penalty: 0.5,
            ..RewardTerms::default()
        };
        let facts = SubmissionFacts {
            fuel_limit: 100,
            ..SubmissionFacts::default()
        };
        let mut verdict = verdict(&[true, true], 150);
        assert_eq!(terms.score(&verdict, &facts).unwrap().reward, 0.0);
        verdict.usage.runs = 2;
        assert_eq!(terms.score(&verdict, &facts).unwrap().reward, 1.0 - 0.375);
    }

    #[test]
    fn long_submissions_are_punished_as_dapo_does() {
        let case = golden("overlong_penalty_dapo");
        let lengths = case["inputs"]["lengths"].as_array().unwrap();
        for (length, expected) in lengths.iter().zip(floats(&case["expected"]["penalty"])) {
            let length = usize::try_from(length.as_u64().unwrap()).unwrap();
            assert_eq!(overlong_penalty(length, 20_480, 4096), expected);
        }
    }

    #[test]
    fn the_default_is_all_or_nothing() {
        let terms = RewardTerms::default();
        let facts = SubmissionFacts::default();
        for (tests, reward) in [(&[true, true], 1.0), (&[true, false], 0.0)] {
            assert_eq!(
                terms.score(&verdict(tests, 9), &facts).unwrap().reward,
                reward
            );
        }
    }

    #[test]
    fn tests_count_by_their_weights() {
        let terms = RewardTerms {
            passed: 0.0,
            test_fraction: 1.0,
            ..RewardTerms::default()
        };
        let score = |weights: &[f64]| {
            let facts = SubmissionFacts {
                test_weights: weights,
                ..SubmissionFacts::default()
            };
            terms.score(&verdict(&[true, false, false], 0), &facts)
        };
        assert_eq!(score(&[]).unwrap().reward, 1.0 / 3.0);
        assert_eq!(score(&[6.0, 1.0, 1.0]).unwrap().reward, 0.75);
        assert_eq!(score(&[0.0, 0.0, 0.0]).unwrap().reward, 0.0);
    }

    #[test]
    fn named_rewards_are_kept_and_count_by_their_weights() {
        let mut verdict = verdict(&[true], 0);
        verdict.rewards = IndexMap::from([("style".to_owned(), 0.5), ("noise".to_owned(), 9.0)]);
        let terms = RewardTerms {
            named: BTreeMap::from([("style".to_owned(), 2.0)]),
            ..RewardTerms::default()
        };
        let score = terms.score(&verdict, &SubmissionFacts::default()).unwrap();
        assert_eq!(score.reward, 2.0);
        assert_eq!((score.parts["style"], score.parts["noise"]), (0.5, 9.0));
    }

    #[test]
    fn our_faults_earn_nothing_at_all() {
        let verdict = Verdict::infra_error(1, "no sandbox", GradeUsage::default());
        let terms = RewardTerms {
            loads: 1.0,
            ..RewardTerms::default()
        };
        assert_eq!(terms.score(&verdict, &SubmissionFacts::default()), None);
    }
}
