//! The files in which a verifier leaves its rewards.

use indexmap::IndexMap;
use serde_json::Value;

/// The largest reward file that is read.
pub const MAX_REWARD_BYTES: u64 = 64 << 10;

/// The most rewards of one verifier.
const MAX_REWARDS: usize = 256;

/// The reward that is meant where only one is used.
const MAIN: &str = "reward";

/// Why a verifier's rewards cannot be used: its fault or the task's, never the policy's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RewardFault {
    /// There is no file.
    #[error("the verifier left neither `reward.json` nor `reward.txt`")]
    Missing,
    /// The file says nothing.
    #[error("the verifier left an empty `{file}`")]
    Empty {
        /// The file's name.
        file: &'static str,
    },
    /// The file is over a limit.
    #[error("`{file}` is too large: {found} bytes > {limit}")]
    TooLarge {
        /// The file's name.
        file: &'static str,
        /// Its length.
        found: u64,
        /// The most that is read.
        limit: u64,
    },
    /// The file is of another form.
    #[error("`{file}` is no {expected}")]
    Form {
        /// The file's name.
        file: &'static str,
        /// What it has to be.
        expected: &'static str,
    },
    /// A reward is no finite number.
    #[error("`{file}` has a `{name}` that is no finite number")]
    NotFinite {
        /// The file's name.
        file: &'static str,
        /// The reward.
        name: String,
    },
    /// There are several rewards, and none is called `reward`.
    #[error("the verifier gave {names} and nothing called `reward`, so that none is the reward")]
    Ambiguous {
        /// Their names.
        names: String,
    },
}

impl RewardFault {
    /// Returns what Harbor calls it.
    #[must_use]
    pub fn harbor_name(&self) -> &'static str {
        match self {
            Self::Missing => "RewardFileNotFoundError",
            Self::Empty { .. } => "RewardFileEmptyError",
            _ => "VerifierOutputParseError",
        }
    }
}

/// The rewards of one verifier, by name; all finite.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rewards {
    values: IndexMap<String, f64>,
}

impl Rewards {
    /// Reads what a verifier left: `reward.json`, or `reward.txt` where there is no such file.
    ///
    /// The text is one number; the JSON is an object of numbers, of which `reward` is the one that
    /// is meant where only one is used. Booleans are no numbers, unlike in Harbor.
    ///
    /// # Errors
    ///
    /// Fails where there is no file, or not one of this form.
    pub fn read(json: Option<&[u8]>, text: Option<&[u8]>) -> Result<Self, RewardFault> {
        match (json, text) {
            (Some(json), _) => Self::from_json(checked("reward.json", json)?),
            (None, Some(text)) => Self::from_text(checked("reward.txt", text)?),
            (None, None) => Err(RewardFault::Missing),
        }
    }

    fn from_text(text: &str) -> Result<Self, RewardFault> {
        let number: f64 = text.trim().parse().map_err(|_| RewardFault::Form {
            file: "reward.txt",
            expected: "number",
        })?;
        let values = IndexMap::from([(MAIN.to_owned(), number)]);
        Self::finite("reward.txt", values)
    }

    fn from_json(text: &str) -> Result<Self, RewardFault> {
        let wrong = || RewardFault::Form {
            file: "reward.json",
            expected: "object of numbers",
        };
        // What is beyond the range of a number is no JSON to the parser either.
        let Ok(Value::Object(members)) = serde_json::from_str(text) else {
            return Err(wrong());
        };
        if members.is_empty() || members.len() > MAX_REWARDS {
            return Err(wrong());
        }
        let values = members
            .into_iter()
            .map(|(name, value)| Some((name, value.as_f64()?)))
            .collect::<Option<_>>()
            .ok_or_else(wrong)?;
        Self::finite("reward.json", values)
    }

    fn finite(file: &'static str, values: IndexMap<String, f64>) -> Result<Self, RewardFault> {
        match values.iter().find(|(_, value)| !value.is_finite()) {
            Some((name, _)) => Err(RewardFault::NotFinite {
                file,
                name: name.clone(),
            }),
            None => Ok(Self { values }),
        }
    }

    /// Returns the reward of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<f64> {
        self.values.get(name).copied()
    }

    /// Returns the reward that is meant where only one is used: `reward`, or the only one.
    ///
    /// # Errors
    ///
    /// Fails where there are several and none is called `reward`.
    pub fn main(&self) -> Result<f64, RewardFault> {
        let only = || (self.values.len() == 1).then(|| self.values.values().copied().next());
        self.get(MAIN)
            .or_else(|| only().flatten())
            .ok_or_else(|| RewardFault::Ambiguous {
                names: (self.values.keys())
                    .map(|name| format!("`{name}`"))
                    .collect::<Vec<_>>()
                    .join(", "),
            })
    }

    /// Returns the rewards besides `reward`.
    #[must_use]
    pub fn others(&self) -> IndexMap<String, f64> {
        let others = self.values.iter().filter(|(name, _)| *name != MAIN);
        others.map(|(name, value)| (name.clone(), *value)).collect()
    }

    /// Returns whether every reward named in `thresholds` is there and not below it: whether the
    /// steps after this one are run.
    #[must_use]
    pub fn reach(&self, thresholds: &[(&str, f64)]) -> bool {
        (thresholds.iter())
            .all(|(name, least)| self.get(name).is_some_and(|reward| reward >= *least))
    }

    /// Returns the mean of each reward over the steps that were judged; one that a step lacks
    /// counts as 0 there.
    #[must_use]
    pub fn mean(steps: &[Self]) -> Self {
        let mut values: IndexMap<String, f64> = IndexMap::new();
        for (name, value) in steps.iter().flat_map(|step| &step.values) {
            *values.entry(name.clone()).or_default() += value;
        }
        #[expect(clippy::cast_precision_loss, reason = "steps are few")]
        for value in values.values_mut() {
            *value /= steps.len() as f64;
        }
        Self { values }
    }
}

fn checked<'a>(file: &'static str, bytes: &'a [u8]) -> Result<&'a str, RewardFault> {
    if bytes.is_empty() {
        return Err(RewardFault::Empty { file });
    }
    if bytes.len() as u64 > MAX_REWARD_BYTES {
        return Err(RewardFault::TooLarge {
            file,
            found: bytes.len() as u64,
            limit: MAX_REWARD_BYTES,
        });
    }
    std::str::from_utf8(bytes).map_err(|_| RewardFault::Form {
        file,
        expected: "UTF-8 text",
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn read(json: Option<&str>, text: Option<&str>) -> Result<Rewards, RewardFault> {
        Rewards::read(json.map(str::as_bytes), text.map(str::as_bytes))
    }

    #[test]
    fn json_counts_for_more_than_text_even_where_it_is_wrong() {
        let main = |json, text| read(json, text).and_then(|rewards| rewards.main());
        assert_eq!(main(Some(r#"{"reward": 0.25}"#), Some("1")), Ok(0.25));
        assert_eq!(main(None, Some(" 1e-1\n")), Ok(0.1));
        let empty = RewardFault::Empty {
            file: "reward.json",
        };
        assert_eq!(main(Some(""), Some("1")), Err(empty));
    }

    #[rstest]
    #[case::nothing(None, None, "RewardFileNotFoundError")]
    #[case::empty_text(None, Some(""), "RewardFileEmptyError")]
    #[case::blank_text(None, Some(" \n"), "VerifierOutputParseError")]
    #[case::word(None, Some("passed"), "VerifierOutputParseError")]
    #[case::two_numbers(None, Some("1 0"), "VerifierOutputParseError")]
    #[case::nan_text(None, Some("nan"), "VerifierOutputParseError")]
    #[case::huge_text(None, Some("1e309"), "VerifierOutputParseError")]
    #[case::endless_text(None, Some("-inf"), "VerifierOutputParseError")]
    #[case::nan(Some(r#"{"reward": NaN}"#), None, "VerifierOutputParseError")]
    #[case::huge(Some(r#"{"reward": 1e309}"#), None, "VerifierOutputParseError")]
    #[case::text_in_json(Some(r#"{"reward": "1"}"#), None, "VerifierOutputParseError")]
    #[case::boolean(Some(r#"{"reward": true}"#), None, "VerifierOutputParseError")]
    #[case::null(Some(r#"{"reward": null}"#), None, "VerifierOutputParseError")]
    #[case::nested(Some(r#"{"reward": {"a": 1}}"#), None, "VerifierOutputParseError")]
    #[case::bare(Some("1"), None, "VerifierOutputParseError")]
    #[case::no_rewards(Some("{}"), None, "VerifierOutputParseError")]
    #[case::cut(Some(r#"{"reward": 1"#), None, "VerifierOutputParseError")]
    fn anything_but_finite_numbers_is_the_verifiers_fault(
        #[case] json: Option<&str>,
        #[case] text: Option<&str>,
        #[case] name: &str,
    ) {
        assert_eq!(read(json, text).unwrap_err().harbor_name(), name);
    }

    #[test]
    fn several_rewards_need_one_that_is_meant() {
        let rewards = read(Some(r#"{"a": 1, "b": 0}"#), None).unwrap();
        let fault = rewards.main().unwrap_err().to_string();
        assert!(fault.contains("`a`, `b`"), "{fault}");
        assert_eq!(read(Some(r#"{"a": 0.5}"#), None).unwrap().main(), Ok(0.5));
    }

    #[test]
    fn steps_are_averaged_by_name_and_stopped_below_a_threshold() {
        let step = |json| read(Some(json), None).unwrap();
        let steps = [step(r#"{"reward": 1, "a": 1}"#), step(r#"{"reward": 0}"#)];
        let mean = Rewards::mean(&steps);
        assert_eq!((mean.get("reward"), mean.get("a")), (Some(0.5), Some(0.5)));
        assert!(steps[0].reach(&[("reward", 1.0), ("a", 0.5)]));
        assert!(!steps[1].reach(&[("reward", 0.5)]));
        assert!(
            !steps[1].reach(&[("a", 0.0)]),
            "a reward that is not there is below any"
        );
    }
}
