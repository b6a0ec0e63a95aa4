//! A scanner for just enough Python: which names a program binds at top level, and which a test
//! uses.
//!
//! This is a lexer and a reader of statement heads, not a parser. It looks at lines without
//! indentation, with strings and comments skipped and brackets and backslashes joined. Bindings
//! inside a top-level `if`, `try`, `for` or `with`, and names inside the braces of an f-string, are
//! not seen; on MBPP it finds what CPython's `ast` module finds.

use std::ops::Range;

/// A name that a program binds at top level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Binding {
    /// The bound name.
    pub(super) name: String,
    /// The whole import statement, when an import binds the name.
    pub(super) import: Option<String>,
}

/// Returns the names that `source` binds at top level, in order, repeats included.
pub(super) fn bindings(source: &str) -> Vec<Binding> {
    let tokens = tokenize(source);
    let mut found = Vec::new();
    for statement in statements(&tokens) {
        bind_statement(source, statement, &mut found);
    }
    found
}

/// Returns the names that `source` reads or writes, in order, repeats included: identifiers that
/// are neither keywords, attributes, nor the name of a keyword argument.
pub(super) fn used_names(source: &str) -> Vec<&str> {
    let tokens = tokenize(source);
    let mut names = Vec::new();
    for (index, token) in tokens.iter().enumerate() {
        if token.kind != Kind::Name || is_keyword(token.text) {
            continue;
        }
        let attribute = index
            .checked_sub(1)
            .is_some_and(|before| tokens[before].text == ".");
        let keyword_argument =
            token.depth > 0 && tokens.get(index + 1).is_some_and(|after| after.text == "=");
        if !attribute && !keyword_argument {
            names.push(token.text);
        }
    }
    names
}

fn bind_statement(source: &str, statement: &[Token<'_>], found: &mut Vec<Binding>) {
    let plain = |token: &Token<'_>| Binding {
        name: token.text.to_owned(),
        import: None,
    };
    let text: Vec<&str> = statement.iter().map(|token| token.text).collect();
    match text.as_slice() {
        ["def" | "class", _, ..] => found.push(plain(&statement[1])),
        ["async", "def", _, ..] => found.push(plain(&statement[2])),
        ["import", items @ ..] => {
            bind_import(source, statement, items, found);
        }
        ["from", rest @ ..] => {
            // The module name may hold dots and keywords only as parts, so the first `import` ends it.
            if let Some(at) = rest.iter().position(|word| *word == "import") {
                bind_import(source, statement, &rest[at + 1..], found);
            }
        }
        [first, ..] if !is_keyword(first) => bind_assignment(statement, found),
        _ => {}
    }
}

/// Reads `a.b as c, d` or `(a as b, c)`.
fn bind_import(source: &str, statement: &[Token<'_>], items: &[&str], found: &mut Vec<Binding>) {
    let (Some(first), Some(last)) = (statement.first(), statement.last()) else {
        return;
    };
    let text = &source[first.span.start..last.span.end];
    for item in items.split(|word| *word == ",") {
        let words: Vec<&str> = item
            .iter()
            .copied()
            .filter(|word| *word != "(" && *word != ")")
            .collect();
        let name = match words.as_slice() {
            [.., "as", alias] => alias,
            [first, ..] => first,
            [] => continue,
        };
        found.push(Binding {
            name: (*name).to_owned(),
            import: Some(text.to_owned()),
        });
    }
}

/// Reads the targets of `a = b, c = value` and `a: type = value`.
fn bind_assignment(statement: &[Token<'_>], found: &mut Vec<Binding>) {
    let is_assign = |token: &Token<'_>| token.depth == 0 && token.text == "=";
    let mut parts: Vec<&[Token<'_>]> = statement.split(is_assign).collect();
    parts.pop(); // the value
    for part in parts {
        let part = match part {
            [name, colon, ..] if name.kind == Kind::Name && colon.text == ":" => &part[..1],
            _ => part,
        };
        let target = |token: &Token<'_>| match token.kind {
            Kind::Name => !is_keyword(token.text),
            Kind::Operator => matches!(token.text, "," | "(" | ")" | "*"),
            Kind::Literal | Kind::Newline => false,
        };
        if !part.iter().all(target) {
            return; // an attribute, an item, or `f = lambda x=1: x`
        }
        found.extend(
            part.iter()
                .filter(|token| token.kind == Kind::Name)
                .map(|token| Binding {
                    name: token.text.to_owned(),
                    import: None,
                }),
        );
    }
}

/// Splits tokens into the statements that are not indented.
fn statements<'t, 's>(tokens: &'t [Token<'s>]) -> impl Iterator<Item = &'t [Token<'s>]> {
    tokens
        .split(|token| token.kind == Kind::Newline)
        .filter(|line| !line.is_empty())
        .flat_map(|line| {
            let compound = COMPOUND.contains(&line[0].text);
            // After `if x: a = 1;` the rest of the line belongs to the block.
            let keep = if line[0].indented {
                0
            } else if compound {
                1
            } else {
                usize::MAX
            };
            line.split(|token| token.depth == 0 && token.text == ";")
                .filter(|statement| !statement.is_empty())
                .take(keep)
        })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Name,
    /// A string or a number.
    Literal,
    Operator,
    /// The end of a logical line.
    Newline,
}

#[derive(Debug, Clone)]
struct Token<'s> {
    kind: Kind,
    text: &'s str,
    span: Range<usize>,
    /// How many brackets are open where the token stands.
    depth: usize,
    /// Whether the token's logical line begins with white space.
    indented: bool,
}

fn tokenize(source: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let mut at = 0;
    let mut depth = 0_usize;
    let mut line_start = true;
    let mut indented = false;
    while let Some(first) = source[at..].chars().next() {
        let rest = &source[at..];
        if line_start && !matches!(first, '\n' | '\r') {
            indented = matches!(first, ' ' | '\t' | '\x0c');
            line_start = false;
        }
        let (kind, length) = match first {
            '\n' => {
                if depth > 0 {
                    at += 1;
                    continue;
                }
                line_start = true;
                (Kind::Newline, 1)
            }
            '\\' => {
                // A backslash joins lines; anywhere else outside a string it is an error anyway.
                at += ["\\\r\n", "\\\n"]
                    .iter()
                    .find(|join| rest.starts_with(**join))
                    .map_or(1, |join| join.len());
                continue;
            }
            '#' => {
                at += rest.find('\n').unwrap_or(rest.len());
                continue;
            }
            _ if first.is_whitespace() => {
                at += first.len_utf8();
                continue;
            }
            '"' | '\'' => (Kind::Literal, string_length(rest)),
            _ if first.is_alphabetic() || first == '_' => {
                let length = word_length(rest);
                let quote = rest[length..].starts_with(['"', '\'']);
                if quote && is_string_prefix(&rest[..length]) {
                    (Kind::Literal, length + string_length(&rest[length..]))
                } else {
                    (Kind::Name, length)
                }
            }
            _ if first.is_ascii_digit() => (Kind::Literal, number_length(rest)),
            _ => (Kind::Operator, operator_length(rest, first)),
        };
        let text = &rest[..length];
        if matches!(text, ")" | "]" | "}") {
            depth = depth.saturating_sub(1);
        }
        tokens.push(Token {
            kind,
            text,
            span: at..at + length,
            depth,
            indented,
        });
        if matches!(text, "(" | "[" | "{") {
            depth += 1;
        }
        at += length;
    }
    tokens
}

fn word_length(text: &str) -> usize {
    text.find(|c: char| !(c.is_alphanumeric() || c == '_'))
        .unwrap_or(text.len())
}

fn number_length(text: &str) -> usize {
    text.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == '.'))
        .unwrap_or(text.len())
}

/// Tells `=` apart from `==`, `<=`, `+=` and `:=`.
fn operator_length(text: &str, first: char) -> usize {
    let pair = "=!<>:+-*/%&|^@".contains(first) && text[first.len_utf8()..].starts_with('=');
    first.len_utf8() + usize::from(pair)
}

fn is_string_prefix(word: &str) -> bool {
    word.len() <= 2 && word.chars().all(|c| "rRbBuUfF".contains(c))
}

/// Returns the length of the string that `text` opens with, to the end of the line or text when
/// its closing quote is missing.
fn string_length(text: &str) -> usize {
    let quote = &text[..1];
    let triple = text.get(..3).filter(|three| *three == quote.repeat(3));
    let close = triple.unwrap_or(quote);
    let mut at = close.len();
    while let Some(next) = text[at..].chars().next() {
        if text[at..].starts_with(close) {
            return at + close.len();
        }
        if next == '\n' && triple.is_none() {
            return at;
        }
        at += next.len_utf8();
        if next == '\\' {
            at += text[at..].chars().next().map_or(0, char::len_utf8);
        }
    }
    text.len()
}

/// Statements whose suite may stand on the same line.
const COMPOUND: [&str; 13] = [
    "def", "class", "if", "elif", "else", "for", "while", "try", "except", "finally", "with",
    "async", "@",
];

fn is_keyword(word: &str) -> bool {
    KEYWORDS.contains(&word)
}

const KEYWORDS: [&str; 35] = [
    "False", "None", "True", "and", "as", "assert", "async", "await", "break", "class", "continue",
    "def", "del", "elif", "else", "except", "finally", "for", "from", "global", "if", "import",
    "in", "is", "lambda", "nonlocal", "not", "or", "pass", "raise", "return", "try", "while",
    "with", "yield",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn names(source: &str) -> Vec<String> {
        bindings(source)
            .into_iter()
            .map(|binding| binding.name)
            .collect()
    }

    #[test]
    fn binds_definitions_and_assignments_at_top_level_only() {
        let source = "\
@decorator
def f(x=1):
    inner = 2
    def g(): pass
class C(Base): attribute = 3; other = 4
async def h(): pass
a = b = 1; c: int = 2
d, (e, *rest) = 1, (2, 3)
obj.attr = 5
items[0] = 6
k = lambda x=1: x
total += 1
if x: y = 1
f(z=1)
a == 3
assert q
";
        assert_eq!(
            names(source),
            ["f", "C", "h", "a", "b", "c", "d", "e", "rest", "k"]
        );
    }

    #[test]
    fn skips_strings_comments_and_joined_lines() {
        let source = "\
\"\"\"
a = 1
\"\"\"
# b = 2
c = 'it\\'s; d = 3' if 0 else r\"\\n\" # e = 4
f = (
g = 5
)
h = 1 + \\
i = 6
j = '''
k = 7
'''
l = 'never closed
m = 8\r
\r
\r\n";
        // The unclosed quotes end at their line, so what follows them is still seen.
        assert_eq!(names(source), ["c", "f", "h", "j", "l", "m"]);
    }

    #[test]
    fn imports_carry_their_statement() {
        let source =
            "import os.path, math as m\nfrom a.b import (c,\n  d as e,)\nfrom z import *\n";
        let found: Vec<(String, String)> = bindings(source)
            .into_iter()
            .map(|binding| (binding.name, binding.import.unwrap()))
            .collect();
        let expected = [
            ("os", "import os.path, math as m"),
            ("m", "import os.path, math as m"),
            ("c", "from a.b import (c,\n  d as e,)"),
            ("e", "from a.b import (c,\n  d as e,)"),
            ("*", "from z import *"),
        ];
        assert_eq!(
            found,
            expected.map(|(name, text)| (name.to_owned(), text.to_owned()))
        );
    }

    #[test]
    fn used_names_leave_out_attributes_keywords_and_argument_names() {
        let test =
            "assert math.isclose(f('g(1)', key=h, r=0x1f), 1e-5, rel_tol=1.5) is not None # k";
        assert_eq!(used_names(test), ["math", "f", "h"]);
        assert_eq!(used_names("assert f(x == y) == z"), ["f", "x", "y", "z"]);
        assert_eq!(used_names("assert rb'a' == b\"b\" == f(u'c')"), ["f"]);
    }

    #[test]
    fn survives_any_text() {
        for source in [
            "", "\\", "'", "\"\"\"", "f'", "é = 1", "))) = 1", "import", "from", "a =", "\u{c}x",
        ] {
            let _ = bindings(source);
            let _ = used_names(source);
        }
        assert_eq!(names("é = 1"), ["é"]);
    }

    proptest::proptest! {
        #[test]
        fn tokens_cover_no_byte_twice(source in "[a-f='\"#\\\\ \n\t(){};:.,é0-9]{0,80}") {
            let mut end = 0;
            for token in tokenize(&source) {
                proptest::prop_assert!(token.span.start >= end && token.span.end > token.span.start);
                proptest::prop_assert_eq!(&source[token.span.clone()], token.text);
                end = token.span.end;
            }
            let _ = bindings(&source);
        }
    }
}
