//! Whether a prompt gives hidden tests away.
//!
//! A hidden test is in the prompt when its condition stands there, or the call that it makes with
//! the value that it expects behind it, as in `f(2) == 4`, `f(2) # => 4` or `>>> f(2)` with `4` on
//! the next line. White space within a line and the kind of quotes do not count.

/// Characters that may stand between a call and its value.
const CONNECTORS: [char; 11] = ['=', '-', '>', '➞', '→', '⇒', ':', '#', '\n', '`', '"'];

/// How many of a program's hidden checks a prompt shows, of how many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Shown {
    pub(super) shown: usize,
    pub(super) of: usize,
}

/// Counts the assertions of `tests` that stand in `prompt`; `candidate` is a name that tests use
/// for `entry_point`.
pub(super) fn shown_assertions(prompt: &str, tests: &[String], entry_point: &str) -> Shown {
    let prompt = normal(prompt);
    let mut count = Shown::default();
    for condition in tests.iter().flat_map(|test| assertions(test)) {
        count.of += 1;
        let condition = condition.replace("candidate(", &format!("{entry_point}("));
        count.shown += usize::from(stands_in(&normal(&condition), &prompt));
    }
    count
}

/// Whether a text of some length stands in the prompt; short ones prove nothing.
pub(super) fn has_text(prompt: &str, text: &str) -> bool {
    let text = normal(text);
    text.len() >= 3 && normal(prompt).contains(&text)
}

/// Returns the conditions of the `assert` statements of a program that stand on one line.
fn assertions(program: &str) -> impl Iterator<Item = &str> {
    program.lines().filter_map(|line| {
        let condition = line.trim().strip_prefix("assert")?;
        condition.starts_with([' ', '(']).then(|| {
            // The message of the assertion.
            split_at_top(condition, ",").map_or(condition, |(condition, _)| condition)
        })
    })
}

/// Whether a condition stands in a text, both normal.
fn stands_in(condition: &str, text: &str) -> bool {
    if condition.is_empty() || matches!(condition, "True" | "1") {
        return false;
    }
    let is_whole = |(at, _): (usize, &str)| {
        let before = text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        !before && !goes_on(&text[at + condition.len()..])
    };
    if text.match_indices(condition).any(is_whole) {
        return true;
    }
    let Some((call, value)) = split_at_top(condition, "==") else {
        return false;
    };
    if !call.contains('(') || value.is_empty() {
        return false;
    }
    text.match_indices(call).any(|(at, _)| {
        let after = &text[at + call.len()..];
        let mut after = after.trim_start_matches(CONNECTORS);
        for word in ["returns", "return", "should"] {
            after = after.trim_start_matches(word);
        }
        let after = after.trim_start_matches(CONNECTORS);
        let value = value.trim_matches('"');
        after
            .strip_prefix(value)
            .is_some_and(|rest| !value.is_empty() && !goes_on(rest))
    })
}

/// Whether what follows belongs to the value before it: a point that ends a sentence does not.
fn goes_on(rest: &str) -> bool {
    match rest.strip_prefix('.') {
        Some(rest) => rest.starts_with(|c: char| c.is_ascii_digit()),
        None => rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'),
    }
}

/// Takes out white space but line breaks, and makes quotes alike.
fn normal(text: &str) -> String {
    let mut normal = String::with_capacity(text.len());
    for letter in text.trim().chars() {
        match letter {
            '\n' if normal.ends_with('\n') => {}
            '\'' => normal.push('"'),
            '\n' => normal.push('\n'),
            letter if letter.is_whitespace() => {}
            letter => normal.push(letter),
        }
    }
    normal
}

/// Splits at the first `separator` that is in no string and no brackets.
fn split_at_top<'a>(text: &'a str, separator: &str) -> Option<(&'a str, &'a str)> {
    let mut depth = 0_usize;
    let mut quote = None;
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match (quote, letter) {
            (Some(_), '\\') => {
                letters.next();
            }
            (Some(open), _) if open == letter => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(letter),
            (None, '(' | '[' | '{') => depth += 1,
            (None, ')' | ']' | '}') => depth = depth.saturating_sub(1),
            (None, _) if depth == 0 && text[at..].starts_with(separator) => {
                return Some((&text[..at], &text[at + separator.len()..]));
            }
            (None, _) => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("Write f. f( 2 ) == 4", "assert f(2) == 4", true)]
    #[case("for example f(2) ➞ 4.5", "assert f(2) == 4.5", true)]
    #[case(">>> f('a', [1])\n{'b': 2}", "assert f(\"a\",[1]) == {\"b\": 2}", true)]
    #[case(
        ">>> f(2)\n4\n>>> f(3)",
        "    assert candidate(2) == 4, \"twice\"",
        true
    )]
    #[case("f(2) returns 4", "assert f(2) == 4", true)]
    #[case("f(2) => \"four\"", "assert f(2) == 'four'", true)]
    #[case("f(2) is f(2) = 4. Always.", "assert f(2) == 4", true)]
    #[case("f(2) == 42", "assert f(2) == 4", false)]
    #[case("f(2) == 4.5", "assert f(2) == 4", false)]
    #[case("f(2) is odd, 4 is even", "assert f(2) == 4", false)]
    #[case("f(12) == 4", "assert g(f(2)) == 4", false)]
    #[case("True or not", "assert True", false)]
    #[case("Doubles a number.", "assert f(2) == 4", false)]
    fn a_check_in_the_prompt_is_found(
        #[case] prompt: &str,
        #[case] test: &str,
        #[case] holds: bool,
    ) {
        let shown = shown_assertions(prompt, &[test.to_owned()], "f");
        assert_eq!((shown.of, shown.shown), (1, usize::from(holds)));
    }

    #[test]
    fn only_assertions_count() {
        let test = "x = 1\nassertion(f(1), 2)\nfor x in y:\n    assert f(x)\n".to_owned();
        assert_eq!(shown_assertions("", &[test], "f").of, 1);
    }
}
