//! Grades answers that are text: a number, or words that must be the same.
//!
//! **What counts as the answer.** What stands behind the last `####` on its line, as in GSM8K, or
//! else inside the last `\boxed{…}`. Where there is neither, a numeric answer is the last number
//! of the text, any other the whole text.
//!
//! **Numbers** may have a sign, a currency sign, commas between thousands, a fraction and an
//! exponent; what follows them is not read. Whole numbers, however they are written, are equal if they
//! are the same; others within `tolerance · max(1, |expected|)`, as are all where a task says a
//! tolerance. **Words** are equal when they are the same after white space is made one space
//! and taken off the ends; `ignore_case` does what it says.

use serde::Deserialize;

use super::Grader;
use super::compare::is_close;
use super::unit_test::GraderError;
use super::verdict::{GradeRequest, GradeUsage, TestResult, TestStatus, Verdict};

/// Characters of an answer that a verdict quotes.
const MAX_QUOTED: usize = 100;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ExactOptions {
    ignore_case: bool,
}

/// How far a number may be off where the task does not say.
const TOLERANCE: f64 = 1e-9;
/// The longest whole number that is compared digit by digit: no double is larger.
const MAX_DIGITS: i64 = 310;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct NumericOptions {
    tolerance: Option<f64>,
}

/// Grades an answer by whether it is the same text as an expected one.
///
/// Reads `cases`: the answer has to be the output of any of them. Option: `ignore_case`.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExactMatchGrader;

impl ExactMatchGrader {
    /// The grader's name.
    pub const NAME: &'static str = "exact_match";
}

impl Grader for ExactMatchGrader {
    fn grade(&self, request: &GradeRequest) -> Verdict {
        let options: ExactOptions = match request.read_options() {
            Ok(options) => options,
            Err(source) => return bad_options(Self::NAME, source),
        };
        let normal = |text: &str| {
            let words: Vec<&str> = text.split_whitespace().collect();
            let text = words.join(" ");
            if options.ignore_case {
                text.to_lowercase()
            } else {
                text
            }
        };
        let answer = marked(&request.code).unwrap_or(&request.code);
        let got = normal(answer);
        judge(request, answer, |expected| Some(normal(expected) == got))
    }
}

/// Grades an answer by whether it is the expected number.
///
/// Reads `cases`: the answer has to be the output of any of them. Option: `tolerance` (1e-9, and
/// whole numbers have to be the same).
#[derive(Debug, Clone, Copy, Default)]
pub struct NumericGrader;

impl NumericGrader {
    /// The grader's name.
    pub const NAME: &'static str = "numeric";
}

impl Grader for NumericGrader {
    fn grade(&self, request: &GradeRequest) -> Verdict {
        let options: NumericOptions = match request.read_options() {
            Ok(options) => options,
            Err(source) => return bad_options(Self::NAME, source),
        };
        let found = match marked(&request.code) {
            Some(answer) => numbers(answer).next(),
            None => numbers(&request.code).last(),
        };
        let Some(got) = found else {
            return Verdict::invalid(1, "the answer has no number", GradeUsage::default());
        };
        judge(request, got.text, |expected| {
            let expected = expected_number(expected)?;
            Some(expected.equals(&got, options.tolerance))
        })
    }
}

fn bad_options(grader: &'static str, source: serde_json::Error) -> Verdict {
    GraderError::Options { grader, source }.verdict(1, GradeUsage::default())
}

/// Judges by the expected answers; `matches` returns `None` for one that is none.
fn judge(request: &GradeRequest, answer: &str, matches: impl Fn(&str) -> Option<bool>) -> Verdict {
    let usage = GradeUsage::default();
    let Some(first) = request.cases.first() else {
        return Verdict::infra_error(1, &GraderError::NoTests.to_string(), usage);
    };
    let mut passed = false;
    for case in &request.cases {
        match matches(&case.output) {
            Some(equal) => passed |= equal,
            None => {
                let message = format!("the expected answer `{}` is no number", case.output);
                return Verdict::infra_error(1, &message, usage);
            }
        }
    }
    let result = if passed {
        TestResult::new("answer", TestStatus::Passed, "")
    } else {
        let quoted = |text: &str| text.trim().chars().take(MAX_QUOTED).collect::<String>();
        let (expected, got) = (quoted(&first.output), quoted(answer));
        TestResult {
            expected: Some(expected.clone()),
            got: Some(got.clone()),
            ..TestResult::new(
                "answer",
                TestStatus::Failed,
                format!("expected `{expected}`, got `{got}`"),
            )
        }
    };
    Verdict::judged(vec![result], usage)
}

/// Returns what is marked as the answer.
fn marked(text: &str) -> Option<&str> {
    if let Some((_, rest)) = text.rsplit_once("####") {
        return Some(
            rest.trim_start_matches([' ', '\t'])
                .lines()
                .next()
                .unwrap_or_default(),
        );
    }
    let (_, rest) = text.rsplit_once("\\boxed{")?;
    let mut depth = 0_usize;
    let end = rest.char_indices().find(|(_, letter)| {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => return true,
            '}' => depth -= 1,
            _ => {}
        }
        false
    });
    end.map(|(end, _)| &rest[..end])
}

/// A number in a text.
struct Number<'a> {
    /// As it is written, without its sign.
    text: &'a str,
    value: f64,
}

impl Number<'_> {
    fn equals(&self, other: &Self, tolerance: Option<f64>) -> bool {
        if let (None, Some(one), Some(two)) = (tolerance, self.digits(), other.digits()) {
            let has_sign = |number: &Self| number.value < 0.0;
            return one == two && has_sign(self) == has_sign(other);
        }
        is_close(self.value, other.value, tolerance.unwrap_or(TOLERANCE))
    }

    /// Returns the digits of a whole number, whether it is written `1200`, `1,200.0` or `1.2e3`.
    fn digits(&self) -> Option<String> {
        let text = self.text.replace(',', "").to_ascii_lowercase();
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let digits = [whole, fraction].concat();
        let significant = digits.trim_matches('0');
        if significant.is_empty() {
            return Some(String::new());
        }
        // How many zeros follow the last digit that is none.
        let behind = digits.len() - digits.trim_end_matches('0').len();
        let exponent: i64 = exponent.parse().ok()?;
        let zeros = exponent
            .checked_add(i64::try_from(behind).ok()?)?
            .checked_sub(i64::try_from(fraction.len()).ok()?)?;
        let zeros = usize::try_from(zeros)
            .ok()
            .filter(|_| zeros <= MAX_DIGITS)?;
        Some(significant.to_owned() + &"0".repeat(zeros))
    }
}

/// Returns whether [`NumericGrader`] can compare with an expected answer.
#[must_use]
pub fn is_number(expected: &str) -> bool {
    expected_number(expected).is_some()
}

/// Returns the number that an expected answer is; none beyond what a double holds, which every number would
/// be close to.
fn expected_number(expected: &str) -> Option<Number<'_>> {
    let number = numbers(marked(expected).unwrap_or(expected)).next();
    number.filter(|number| number.value.is_finite())
}

/// Returns the numbers in a text.
fn numbers(text: &str) -> impl Iterator<Item = Number<'_>> {
    let bytes = text.as_bytes();
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < bytes.len() {
            let starts = bytes[at].is_ascii_digit()
                || (bytes[at] == b'.' && bytes.get(at + 1).is_some_and(u8::is_ascii_digit));
            if !starts {
                at += 1;
                continue;
            }
            let start = at;
            at = number_end(bytes, at);
            let digits: String = text[start..at].chars().filter(|c| *c != ',').collect();
            let Ok(value) = digits.parse::<f64>() else {
                continue;
            };
            let value = if is_negative(&text[..start]) {
                -value
            } else {
                value
            };
            return Some(Number {
                text: &text[start..at],
                value,
            });
        }
        None
    })
}

/// Returns where the number that starts at `at` ends.
fn number_end(bytes: &[u8], mut at: usize) -> usize {
    let digits = |mut at: usize| {
        while bytes.get(at).is_some_and(u8::is_ascii_digit) {
            at += 1;
        }
        at
    };
    at = digits(at);
    // A comma belongs to the number when exactly three digits follow.
    while bytes.get(at) == Some(&b',') && digits(at + 1) == at + 4 {
        at += 4;
    }
    if bytes.get(at) == Some(&b'.') && bytes.get(at + 1).is_some_and(u8::is_ascii_digit) {
        at = digits(at + 1);
    }
    if matches!(bytes.get(at), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(at + 1), Some(b'+' | b'-')));
        let end = digits(at + 1 + sign);
        if end > at + 1 + sign {
            at = end;
        }
    }
    at
}

/// Whether a minus stands before a number, and not between two things.
fn is_negative(before: &str) -> bool {
    let before = before.trim_end_matches(['$', '€', '£', '¥']);
    before
        .strip_suffix(['-', '−'])
        .is_some_and(|rest| !rest.ends_with(|c: char| c.is_alphanumeric() || c == ')'))
}

#[cfg(test)]
mod tests {
    use super::super::verdict::{TestCase, VerdictStatus};
    use super::*;
    use rstest::rstest;

    fn request(answer: &str, expected: &str) -> GradeRequest {
        GradeRequest {
            code: answer.to_owned(),
            cases: vec![TestCase {
                output: expected.to_owned(),
                ..TestCase::default()
            }],
            ..GradeRequest::default()
        }
    }

    #[rstest]
    #[case("She makes 9 * 2 = $<<9*2=18>>18 a day.\n#### 18", "18", true)]
    #[case("#### 18", "He sells 16.\n#### 18", true)]
    #[case("so the answer is $1,234.50.", "1234.5", true)]
    #[case("10-5 is 5", "5", true)]
    #[case("it is -5", "-5", true)]
    #[case("it is -$5", "-5", true)]
    #[case("it is 5", "-5", false)]
    #[case("first 18, then 19", "18", false)]
    #[case("#### 18\nChecked: 20 - 2", "18", true)]
    #[case(r"\boxed{\frac{1}{2}} no, \boxed{18}", "18", true)]
    #[case("#### 18 eggs in 3 boxes", "18", true)]
    #[case("#### 1,2", "12", false)]
    #[case("18.0", "18", true)]
    #[case("18.001", "18", false)]
    #[case("1.8e1", "18", true)]
    #[case("1e400", "18", false)]
    #[case("12345678901", "12345678902", false)]
    #[case("12,345,678,902.00", "12345678902", true)]
    #[case("1.2345678901e10", "12345678902", false)]
    #[case("1.2345678902e+10", "12345678902", true)]
    #[case("123456789012345678901", "123456789012345678902", false)]
    #[case("-7", "7", false)]
    #[case("0", "-0.0", true)]
    #[case("12345678901.1", "12345678902.1", true)]
    fn numbers_are_found(#[case] answer: &str, #[case] expected: &str, #[case] holds: bool) {
        let verdict = NumericGrader.grade(&request(answer, expected));
        assert_eq!(
            verdict.status == VerdictStatus::Passed,
            holds,
            "{verdict:?}"
        );
        assert_eq!(verdict.reward, Some(f64::from(u8::from(holds))));
    }

    #[test]
    fn an_answer_without_a_number_is_invalid_and_a_task_without_one_is_broken() {
        let verdict = NumericGrader.grade(&request("I do not know", "18"));
        assert_eq!(
            (verdict.status, verdict.reward),
            (VerdictStatus::Invalid, Some(0.0))
        );
        let verdict = NumericGrader.grade(&request("18", "eighteen"));
        assert_eq!(
            (verdict.status, verdict.reward),
            (VerdictStatus::InfraError, None)
        );
    }

    #[rstest]
    #[case("  Paris\n", "Paris", true)]
    #[case("New   York", "New York", true)]
    #[case("paris", "Paris", false)]
    #[case("The capital is \\boxed{Paris}.", "Paris", true)]
    #[case("I think Paris", "Paris", false)]
    fn words_must_be_the_same(#[case] answer: &str, #[case] expected: &str, #[case] holds: bool) {
        let verdict = ExactMatchGrader.grade(&request(answer, expected));
        assert_eq!(
            verdict.status == VerdictStatus::Passed,
            holds,
            "{verdict:?}"
        );
    }

    #[test]
    fn a_tolerance_holds_for_whole_numbers_too() {
        let mut asked = request("about 101", "100");
        assert_eq!(NumericGrader.grade(&asked).reward, Some(0.0));
        asked.options.insert("tolerance".to_owned(), 0.01.into());
        assert_eq!(NumericGrader.grade(&asked).reward, Some(1.0));
    }

    #[test]
    fn options_are_read_strictly() {
        let mut asked = request("PARIS", "Paris");
        asked.options.insert("ignore_case".to_owned(), true.into());
        assert_eq!(ExactMatchGrader.grade(&asked).reward, Some(1.0));
        asked.options.insert("ignore_cases".to_owned(), true.into());
        let verdict = ExactMatchGrader.grade(&asked);
        assert_eq!(verdict.reward, None);
        assert!(
            verdict.tests[0].message.contains("ignore_cases"),
            "{verdict:?}"
        );
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read(text in "[-0-9.,eE$€−# \\\\boxed{}a]{0,40}") {
            let _ = marked(&text);
            for number in numbers(&text) {
                proptest::prop_assert!(!number.text.is_empty() && !number.value.is_nan());
                proptest::prop_assert!(number.equals(&number, None) || !number.value.is_finite());
                if let Some(digits) = number.digits() {
                    let value = format!("0{digits}").parse().unwrap_or(f64::NAN);
                    proptest::prop_assert_eq!(number.value.abs(), value);
                }
            }
        }
    }
}
