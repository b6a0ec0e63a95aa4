//! JSON as Python prints it, for the template filter `tojson`.
//!
//! Templates put tool schemas and arguments into the prompt with it. Hugging Face's filter is
//! `json.dumps(x, ensure_ascii=False)`: `", "` and `": "` between items, keys in the order of
//! insertion, floats as `repr` prints them, and no HTML escapes. minijinja's own filter escapes
//! `<`, `>`, `&` and `'`, which would give the model another prompt.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Deepest accepted nesting; `serde_json` reads at most 128.
const MAX_DEPTH: usize = 256;

/// Longest text that a template may make at a time; its schemas and arguments have kilobytes.
const MAX_FILTER_BYTES: usize = 16 << 20;

/// Returns `value` as Python's `json.dumps(value, ensure_ascii=False)` prints it.
///
/// ```
/// let value = serde_json::json!({"b": 1e-7, "a": ["é", true, null]});
/// assert_eq!(
///     wardian::chat::to_python_json(&value),
///     r#"{"b": 1e-07, "a": ["é", true, null]}"#
/// );
/// ```
pub fn to_python_json(value: &serde_json::Value) -> String {
    dumps(value, Style::default())
}

/// Returns `value` as Python's `json.dumps(value)` prints it: in ASCII.
///
/// ```
/// let value = serde_json::json!({"a": ["é", true, null]});
/// assert_eq!(
///     wardian::chat::to_ascii_python_json(&value),
///     r#"{"a": ["\u00e9", true, null]}"#
/// );
/// ```
pub fn to_ascii_python_json(value: &serde_json::Value) -> String {
    let style = Style {
        ensure_ascii: true,
        ..Style::default()
    };
    dumps(value, style)
}

fn dumps(value: &serde_json::Value, style: Style) -> String {
    // A `serde_json::Value` holds no callable, byte string or invalid value and JSON numbers are
    // finite; a tree that is too deep cannot come out of serde_json's parser.
    Writer::new(style, usize::MAX)
        .finish(&Value::from(Serde(value)))
        .unwrap_or_else(|_| value.to_string())
}

/// The filter `tojson`, with the arguments that Hugging Face's version takes.
#[expect(
    clippy::needless_pass_by_value,
    reason = "minijinja hands arguments to filters by value"
)]
pub(super) fn tojson_filter(value: &Value, arguments: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = arguments.get("indent")?;
    let separators: Option<Vec<String>> = arguments.get("separators")?;
    let style = Style {
        ensure_ascii: arguments
            .get::<Option<bool>>("ensure_ascii")?
            .unwrap_or(false),
        sort_keys: arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        item_separator: match &separators {
            Some(pair) => pair.first().cloned().unwrap_or_default(),
            // Python drops the blank after the comma when it breaks lines.
            None if indent.is_some() => ",".to_owned(),
            None => ", ".to_owned(),
        },
        key_separator: match &separators {
            Some(pair) => pair.get(1).cloned().unwrap_or_default(),
            None => ": ".to_owned(),
        },
    };
    arguments.assert_all_used()?;
    Writer::new(style, MAX_FILTER_BYTES)
        .finish(value)
        .map(Value::from)
}

struct Style {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
}

impl Default for Style {
    fn default() -> Self {
        Self {
            ensure_ascii: false,
            sort_keys: false,
            indent: None,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
        }
    }
}

struct Writer {
    out: String,
    style: Style,
    depth: usize,
    /// Longest text.
    limit: usize,
}

impl Writer {
    fn new(style: Style, limit: usize) -> Self {
        Self {
            out: String::new(),
            style,
            depth: 0,
            limit,
        }
    }

    fn finish(mut self, value: &Value) -> Result<String, Error> {
        self.write(value)?;
        Ok(self.out)
    }

    fn write(&mut self, value: &Value) -> Result<(), Error> {
        if self.depth > MAX_DEPTH {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("value is nested more than {MAX_DEPTH} deep"),
            ));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => {
                self.out
                    .push_str(if value.is_true() { "true" } else { "false" });
            }
            ValueKind::Number => self.write_number(value)?,
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                self.write_items('[', ']', &items, |writer, item| writer.write(item))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                if self.style.sort_keys {
                    keys.sort();
                }
                self.write_items('{', '}', &keys, |writer, key| {
                    match key.as_str() {
                        Some(text) => writer.write_string(text),
                        None => {
                            writer.out.push('"');
                            writer.write(key)?;
                            writer.out.push('"');
                        }
                    }
                    writer.out.push_str(&writer.style.key_separator);
                    writer.write(&value.get_item(key)?)
                })?;
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("{kind} is not JSON serializable"),
                ));
            }
        }
        Ok(())
    }

    fn write_items(
        &mut self,
        open: char,
        close: char,
        items: &[Value],
        mut write_item: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        self.depth += 1;
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.out.push_str(&self.style.item_separator);
            }
            self.break_line()?;
            write_item(self, item)?;
        }
        self.depth -= 1;
        if !items.is_empty() {
            self.break_line()?;
        }
        self.out.push(close);
        Ok(())
    }

    /// Breaks the line if the style has lines. Fails where the text becomes too long.
    fn break_line(&mut self) -> Result<(), Error> {
        let blanks = self
            .style
            .indent
            .map_or(Some(0), |indent| indent.checked_mul(self.depth));
        let length = blanks.and_then(|blanks| blanks.checked_add(self.out.len()));
        if length.is_none_or(|length| length > self.limit) {
            let detail = format!("JSON has more than {} bytes", self.limit);
            return Err(Error::new(ErrorKind::InvalidOperation, detail));
        }
        if self.style.indent.is_some() {
            self.out.push('\n');
            let blanks = blanks.unwrap_or_default();
            self.out.extend(std::iter::repeat_n(' ', blanks));
        }
        Ok(())
    }

    fn write_number(&mut self, value: &Value) -> Result<(), Error> {
        if value.is_integer() {
            // The engine prints integers of every width as Python does.
            let _ = write!(self.out, "{value}");
        } else {
            let number = f64::try_from(value.clone())?;
            write_float(&mut self.out, number);
        }
        Ok(())
    }

    fn write_string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                control if control < ' ' => {
                    let _ = write!(self.out, "\\u{:04x}", u32::from(control));
                }
                other if self.style.ensure_ascii && !(' '..='~').contains(&other) => {
                    let mut units = [0; 2];
                    for unit in other.encode_utf16(&mut units) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                other => self.out.push(other),
            }
        }
        self.out.push('"');
    }
}

/// Writes `number` as Python's `float.__repr__`: the shortest digits that read back to the same
/// number, in scientific form when the decimal exponent is below -4 or at least 16.
fn write_float(out: &mut String, number: f64) {
    if !number.is_finite() {
        out.push_str(match number {
            n if n.is_nan() => "NaN",
            n if n > 0.0 => "Infinity",
            _ => "-Infinity",
        });
        return;
    }
    let scientific = format!("{number:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        // `{:?}` is never scientific in this range and keeps the `.0` of whole numbers.
        let _ = write!(out, "{number:?}");
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        let _ = write!(out, "{mantissa}e{sign}{:02}", exponent.abs());
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// `python3 -c 'import json; print(json.dumps(x))'`, CPython 3.11.
    #[rstest]
    #[case(0.0, "0.0")]
    #[case(-0.0, "-0.0")]
    #[case(1.0, "1.0")]
    #[case(30.0, "30.0")]
    #[case(0.1, "0.1")]
    #[case(0.0001, "0.0001")]
    #[case(0.00012345, "0.00012345")]
    #[case(0.00001, "1e-05")]
    #[case(1e-7, "1e-07")]
    #[case(1.5e-7, "1.5e-07")]
    #[case(1e15, "1000000000000000.0")]
    #[case(1234567890123456.0, "1234567890123456.0")]
    #[case(1e16, "1e+16")]
    #[case(-1.25e22, "-1.25e+22")]
    #[case(1e100, "1e+100")]
    #[case(5e-324, "5e-324")]
    #[case(f64::MAX, "1.7976931348623157e+308")]
    fn floats_print_as_in_python(#[case] number: f64, #[case] expected: &str) {
        let mut out = String::new();
        write_float(&mut out, number);
        assert_eq!(out, expected);
    }

    #[test]
    fn strings_are_escaped_as_in_python() {
        let value = serde_json::json!("a\"\\\n\r\t\u{8}\u{c}\u{1}\u{7f}</b>&'é\u{2028}🤗");
        assert_eq!(
            to_python_json(&value),
            "\"a\\\"\\\\\\n\\r\\t\\b\\f\\u0001\u{7f}</b>&'é\u{2028}🤗\""
        );
    }

    #[test]
    fn big_integers_keep_their_digits() {
        let value: serde_json::Value = serde_json::from_str("[12345678901234567890, -5]").unwrap();
        assert_eq!(to_python_json(&value), "[12345678901234567890, -5]");
    }

    #[test]
    fn json_in_ascii_is_as_python_writes_it() {
        let value = serde_json::json!({"a": [1, "é\n😀"], "b": {"c": null}});
        assert_eq!(
            to_ascii_python_json(&value),
            "{\"a\": [1, \"\\u00e9\\n\\ud83d\\ude00\"], \"b\": {\"c\": null}}"
        );
    }
}
