//! Texts that may quote a submission, made safe to show.

use std::fmt::Write as _;

/// Escapes, as Python does, what is not meant to be seen: control characters, among them those that
/// a terminal obeys, and what turns the direction of writing or has no width.
///
/// What is escaped already stays as it is.
pub(super) fn safe(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        if is_shown(letter) {
            shown.push(letter);
            continue;
        }
        let written = match (letter, u32::from(letter)) {
            ('\n', _) => write!(shown, "\\n"),
            ('\r', _) => write!(shown, "\\r"),
            ('\t', _) => write!(shown, "\\t"),
            (_, code @ ..=0xff) => write!(shown, "\\x{code:02x}"),
            (_, code @ ..=0xffff) => write!(shown, "\\u{code:04x}"),
            (_, code) => write!(shown, "\\U{code:08x}"),
        };
        written.expect("a string takes any text");
    }
    shown
}

fn is_shown(letter: char) -> bool {
    if letter.is_ascii() {
        return !letter.is_ascii_control();
    }
    // The standard library's list, without quotes and accents that belong to a letter before.
    let mut word = *b"a\0\0\0\0";
    let length = letter.encode_utf8(&mut word[1..]).len();
    let word = std::str::from_utf8(&word[..=length]).expect("two letters");
    word.escape_debug().count() == 2
}

/// Cuts a text to `limit` characters.
pub(super) fn shorten(text: &str, limit: usize) -> String {
    match text.char_indices().nth(limit) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::colours("\x1b[31mred", r"\x1b[31mred")]
    #[case::one_letter_controls("\u{9b}31m\u{85}", r"\x9b31m\x85")]
    #[case::direction("a\u{202e}b\u{2066}c\u{200f}", r"a\u202eb\u2066c\u200f")]
    #[case::no_width("\u{200b}\u{feff}\u{e0001}", r"\u200b\ufeff\U000e0001")]
    #[case::lines("a\nb\r\tc\u{2028}", r"a\nb\r\tc\u2028")]
    #[case::words(
        "naïve e\u{301} 日本 “x” \"y\" 'z' \\n",
        "naïve e\u{301} 日本 “x” \"y\" 'z' \\n"
    )]
    fn what_is_not_meant_to_be_seen_is_escaped(#[case] text: &str, #[case] shown: &str) {
        assert_eq!(safe(text), shown);
        assert_eq!(safe(shown), shown);
    }

    #[test]
    fn texts_are_cut_by_characters() {
        assert_eq!(shorten("äöü", 3), "äöü");
        assert_eq!(shorten("äöüß", 3), "äöü…");
    }
}
