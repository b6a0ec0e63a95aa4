//! When an output is the expected one.
//!
//! **White space.** With [`Whitespace::Lines`], blank lines at the beginning and the end do not
//! count, nor does white space around a line, and any white space within one is a separator; the
//! lines must be as many. With [`Whitespace::Tokens`] line breaks are separators, too. With
//! [`Whitespace::Exact`] every byte counts, but for one line break at the end.
//!
//! **Numbers.** Where the expected token has a decimal point or an exponent, a number within
//! `tolerance · max(1, |expected|)` of it is equal. Where it is a whole number, so is the same
//! number written with a point (`5.0` for `5`), and nothing else: `0101` is not `101`. `inf`,
//! `nan` and words are equal to themselves alone, in the same case. With [`Whitespace::Exact`]
//! numbers are text.

use serde::{Deserialize, Serialize};

/// How white space counts; see the page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Whitespace {
    #[default]
    Lines,
    Tokens,
    Exact,
}

/// Where an output first differs from the expected one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Difference<'a> {
    /// The line, from 1; blank lines at the beginning are not counted.
    pub(super) line: usize,
    pub(super) expected: &'a str,
    pub(super) got: &'a str,
}

/// Compares an output with the expected one.
pub(super) fn difference<'a>(
    expected: &'a str,
    got: &'a str,
    whitespace: Whitespace,
    tolerance: f64,
) -> Option<Difference<'a>> {
    match whitespace {
        Whitespace::Lines => by_line(&lines(expected), &lines(got), |expected, got| {
            let mut ours = got.split_whitespace();
            let mut theirs = expected.split_whitespace();
            loop {
                match (theirs.next(), ours.next()) {
                    (None, None) => return true,
                    (Some(expected), Some(got)) if tokens_equal(expected, got, tolerance) => {}
                    _ => return false,
                }
            }
        }),
        Whitespace::Tokens => {
            let expected: Vec<&str> = expected.split_whitespace().collect();
            let got: Vec<&str> = got.split_whitespace().collect();
            by_line(&expected, &got, |expected, got| {
                tokens_equal(expected, got, tolerance)
            })
        }
        Whitespace::Exact => {
            let without_end = |text: &'a str| text.strip_suffix('\n').unwrap_or(text);
            let expected: Vec<&str> = without_end(expected).split('\n').collect();
            let got: Vec<&str> = without_end(got).split('\n').collect();
            by_line(&expected, &got, |expected, got| expected == got)
        }
    }
}

fn by_line<'a>(
    expected: &[&'a str],
    got: &[&'a str],
    equal: impl Fn(&str, &str) -> bool,
) -> Option<Difference<'a>> {
    let count = expected.len().max(got.len());
    (0..count).find_map(|index| {
        let (theirs, ours) = (expected.get(index), got.get(index));
        match (theirs, ours) {
            (Some(theirs), Some(ours)) if equal(theirs, ours) => None,
            _ => Some(Difference {
                line: index + 1,
                expected: theirs.copied().unwrap_or_default(),
                got: ours.copied().unwrap_or_default(),
            }),
        }
    })
}

/// Returns the lines without white space around them, blank ones at both ends left out.
fn lines(text: &str) -> Vec<&str> {
    text.trim().lines().map(str::trim).collect()
}

/// How a token is written.
#[derive(Debug, PartialEq, Eq)]
enum Written {
    Whole,
    Decimal,
    Word,
}

fn written(token: &str) -> Written {
    let digits = token.strip_prefix(['+', '-']).unwrap_or(token);
    let (mantissa, exponent) = match digits.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent)),
        None => (digits, None),
    };
    let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let exponent_holds = exponent.is_none_or(|exponent| {
        let exponent = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        !exponent.is_empty() && are_digits(exponent)
    });
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    if whole.len() + fraction.len() == 0
        || !are_digits(whole)
        || !are_digits(fraction)
        || !exponent_holds
    {
        Written::Word
    } else if exponent.is_none() && !mantissa.contains('.') {
        Written::Whole
    } else {
        Written::Decimal
    }
}

fn tokens_equal(expected: &str, got: &str, tolerance: f64) -> bool {
    if expected == got {
        return true;
    }
    let number = |token: &str| {
        token
            .parse::<f64>()
            .ok()
            .filter(|number| number.is_finite())
    };
    match (written(expected), written(got)) {
        (Written::Decimal, Written::Decimal | Written::Whole) => {
            match (number(expected), number(got)) {
                (Some(expected), Some(got)) => is_close(expected, got, tolerance),
                _ => false,
            }
        }
        (Written::Whole, Written::Decimal) => {
            // Beyond 2^53 a float no longer says which whole number it is.
            let is_exact = |number: &f64| number.abs() < 9_007_199_254_740_992.0;
            let expected = number(expected).filter(is_exact);
            expected.is_some() && expected == number(got)
        }
        _ => false,
    }
}

/// Returns whether a number is within `tolerance` of the expected one, relative above 1. Nothing is
/// close to what is not finite.
pub(super) fn is_close(expected: f64, got: f64, tolerance: f64) -> bool {
    expected.is_finite() && (expected - got).abs() <= tolerance * expected.abs().max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn equal(expected: &str, got: &str, whitespace: Whitespace) -> bool {
        difference(expected, got, whitespace, 1e-6).is_none()
    }

    #[rstest]
    #[case::line_break_at_the_end("1 2\n3\n", "1 2\n3", true)]
    #[case::blank_lines_at_both_ends("1\n", "\n\n1\n\n", true)]
    #[case::space_around_lines("1\n2", "  1  \n\t2\r\n", true)]
    #[case::space_within_a_line("1 2", "1   2", true)]
    #[case::line_break_for_space("1 2", "1\n2", false)]
    #[case::blank_line_within("1\n2", "1\n\n2", false)]
    #[case::missing_line("1\n2", "1", false)]
    #[case::further_line("1", "1\n2", false)]
    #[case::nothing("", " \n ", true)]
    #[case::nothing_for_something("1", "", false)]
    #[case::case_of_words("Yes", "YES", false)]
    fn lines_are_compared(#[case] expected: &str, #[case] got: &str, #[case] holds: bool) {
        assert_eq!(equal(expected, got, Whitespace::Lines), holds);
    }

    #[rstest]
    #[case("0.5", "0.5000001", true)]
    #[case("0.5", "0.50001", false)]
    #[case("1000000.0", "1000000.5", true)]
    #[case("1e3", "1000", true)]
    #[case("2.0", "2", true)]
    #[case(".5", "0.5", true)]
    #[case("5", "5.0", true)]
    #[case("5", "5.", true)]
    #[case("5", "5.0000001", false)]
    #[case("101", "0101", false)]
    #[case("5", "+5", false)]
    #[case("-0", "0", false)]
    #[case("9007199254740993", "9007199254740992.0", false)]
    #[case("nan", "nan", true)]
    #[case("0.0", "nan", false)]
    #[case("1e999", "2e999", false)]
    #[case("1_0.0", "10.0", false)]
    #[case("1.2.3", "1.2.30", false)]
    #[case("e5", "0e5", false)]
    fn numbers_are_compared(#[case] expected: &str, #[case] got: &str, #[case] holds: bool) {
        assert_eq!(equal(expected, got, Whitespace::Lines), holds);
        assert_eq!(equal(expected, got, Whitespace::Exact), expected == got);
    }

    #[test]
    fn tokens_ignore_line_breaks_and_exact_ignores_nothing() {
        assert!(equal("1 2\n3", "1\n2 3", Whitespace::Tokens));
        assert!(!equal("1 2 3", "1 2", Whitespace::Tokens));
        assert!(equal("a \n", "a ", Whitespace::Exact));
        for other in ["a", "a \n\n", " a ", "a  "] {
            assert!(!equal("a \n", other, Whitespace::Exact), "{other:?}");
        }
    }

    #[test]
    fn the_first_difference_is_named() {
        let found = difference("1\n2 3\n4", "1\n2 9\n5", Whitespace::Lines, 0.0);
        let expected = Difference {
            line: 2,
            expected: "2 3",
            got: "2 9",
        };
        assert_eq!(found, Some(expected));
    }
}
