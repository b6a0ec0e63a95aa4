//! Checks of messages, with the reports that pydantic gives.
//!
//! OpenEnv's clients read `type`, `loc` and `msg`, so they are pydantic 2's, down to the address of
//! its documentation where OpenEnv sends one.

use serde_json::{Map, Value, json};

/// Pydantic's documentation of its errors.
const DOCS: &str = "https://errors.pydantic.dev/2.14/v";

/// Most things that are found wrong with one input: who sends more need not be told of each.
const MAX_FAULTS: usize = 32;
/// The longest input that a report repeats.
const MAX_ECHO: usize = 4096;

/// Beyond it, a number with a fraction is not sure to be whole: 2^53.
const MAX_WHOLE: f64 = 9_007_199_254_740_992.0;

/// One thing wrong with an input.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Invalid {
    kind: &'static str,
    location: Vec<Value>,
    message: String,
    input: Value,
    context: Option<Value>,
}

impl Invalid {
    fn new(kind: &'static str, name: &str, message: impl Into<String>, input: &Value) -> Self {
        Self {
            kind,
            location: vec![json!(name)],
            message: message.into(),
            input: echo(input),
            context: None,
        }
    }

    /// A body that is no JSON, at `position`.
    pub(super) fn json(position: usize, reason: &str) -> Self {
        Self {
            kind: "json_invalid",
            location: vec![json!("body"), json!(position)],
            message: "JSON decode error".to_owned(),
            input: json!({}),
            context: Some(json!({"error": reason})),
        }
    }

    /// A body that is missing.
    pub(super) fn no_body() -> Self {
        Self {
            kind: "missing",
            location: vec![json!("body")],
            message: "Field required".to_owned(),
            input: Value::Null,
            context: None,
        }
    }

    /// A body that is no object.
    pub(super) fn no_object(input: &Value) -> Self {
        Self {
            kind: "model_attributes_type",
            location: vec![json!("body")],
            message: "Input should be a valid dictionary or object to extract fields from"
                .to_owned(),
            input: echo(input),
            context: None,
        }
    }

    fn with_context(mut self, context: Value) -> Self {
        self.context = Some(context);
        self
    }

    /// Says where in a body it is, as `FastAPI` does.
    pub(super) fn in_body(mut self) -> Self {
        self.location.insert(0, json!("body"));
        self
    }

    /// Returns the report; pydantic's own has the address of its documentation, `FastAPI`'s has not.
    pub(super) fn report(&self, with_docs: bool) -> Value {
        let mut report = json!({
            "type": self.kind,
            "loc": self.location,
            "msg": self.message,
            "input": self.input,
        });
        if let Some(context) = &self.context {
            report["ctx"] = context.clone();
        }
        if with_docs {
            report["url"] = json!(format!("{DOCS}/{}", self.kind));
        }
        report
    }

    /// Says it as the text of a `ValidationError`.
    fn text(&self) -> String {
        let location: Vec<_> = self
            .location
            .iter()
            .map(|part| {
                part.as_str()
                    .map_or_else(|| part.to_string(), str::to_owned)
            })
            .collect();
        format!(
            "{}\n  {} [type={}, input_value={}, input_type={}]\n    For further information visit \
             {DOCS}/{}",
            location.join("."),
            self.message,
            self.kind,
            shortened(&python_repr(&self.input)),
            python_type(&self.input),
            self.kind,
        )
    }
}

/// Returns the reports of pydantic.
pub(super) fn reports(faults: &[Invalid], with_docs: bool) -> Value {
    faults.iter().map(|fault| fault.report(with_docs)).collect()
}

/// Says what is wrong as pydantic's `ValidationError` of the class `model` does.
pub(super) fn text(faults: &[Invalid], model: &str) -> String {
    let count = faults.len();
    let plural = if count == 1 { "" } else { "s" };
    let mut text = format!("{count} validation error{plural} for {model}");
    for fault in faults {
        text.push('\n');
        text.push_str(&fault.text());
    }
    text
}

/// What a field must hold.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    /// A text of at most so many characters.
    Text { max: Option<usize> },
    /// An object.
    Object,
    /// A whole number from 0.
    Natural,
    /// A number above 0.
    Positive,
    /// A whole number.
    Integer,
    /// This text.
    Exactly(&'static str),
    /// A text, a whole number or null.
    Id,
}

/// One field of an input.
#[derive(Debug, Clone, Copy)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) is_required: bool,
    pub(super) may_be_null: bool,
}

impl Field {
    pub(super) const fn required(name: &'static str, kind: Kind) -> Self {
        Self {
            name,
            kind,
            is_required: true,
            may_be_null: false,
        }
    }

    pub(super) const fn optional(name: &'static str, kind: Kind) -> Self {
        Self {
            name,
            kind,
            is_required: false,
            may_be_null: false,
        }
    }

    pub(super) const fn nullable(name: &'static str, kind: Kind) -> Self {
        Self {
            name,
            kind,
            is_required: false,
            may_be_null: true,
        }
    }
}

/// Checks an input against its fields, in their order; others are refused unless `allows_others`.
pub(super) fn check(
    input: &Map<String, Value>,
    fields: &[Field],
    allows_others: bool,
) -> Vec<Invalid> {
    let mut faults = Vec::new();
    for field in fields {
        match input.get(field.name) {
            None if field.is_required => faults.push(Invalid::new(
                "missing",
                field.name,
                "Field required",
                &whole(input),
            )),
            None => {}
            Some(Value::Null) if field.may_be_null => {}
            Some(value) => faults.extend(check_value(field.name, field.kind, value)),
        }
    }
    if !allows_others {
        let is_known = |name: &str| fields.iter().any(|field| field.name == name);
        let unknown = input.iter().filter(|(name, _)| !is_known(name));
        for (name, value) in unknown.take(MAX_FAULTS.saturating_sub(faults.len())) {
            faults.push(Invalid::new(
                "extra_forbidden",
                name,
                "Extra inputs are not permitted",
                value,
            ));
        }
    }
    faults
}

/// Returns what a report shows of an input: all of it, unless it is large.
fn echo(input: &Value) -> Value {
    let mut left = MAX_ECHO;
    if is_within(input, &mut left) {
        input.clone()
    } else {
        json!(format!("more than {MAX_ECHO} characters"))
    }
}

fn whole(input: &Map<String, Value>) -> Value {
    let mut left = MAX_ECHO;
    let mut fields = input.iter();
    if fields.all(|(name, value)| is_within_text(name, &mut left) && is_within(value, &mut left)) {
        Value::Object(input.clone())
    } else {
        json!(format!("more than {MAX_ECHO} characters"))
    }
}

/// Takes the length of `value` off what is left; returns whether there was enough.
fn is_within(value: &Value, left: &mut usize) -> bool {
    match value {
        Value::String(text) => is_within_text(text, left),
        Value::Array(items) => {
            is_within_text("", left) && items.iter().all(|item| is_within(item, left))
        }
        Value::Object(fields) => {
            is_within_text("", left)
                && fields
                    .iter()
                    .all(|(name, value)| is_within_text(name, left) && is_within(value, left))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => is_within_text("", left),
    }
}

fn is_within_text(text: &str, left: &mut usize) -> bool {
    match left.checked_sub(text.len() + 2) {
        Some(rest) => {
            *left = rest;
            true
        }
        None => false,
    }
}

fn check_value(name: &str, kind: Kind, value: &Value) -> Option<Invalid> {
    let invalid = |kind, message: &str| Some(Invalid::new(kind, name, message, value));
    match (kind, value) {
        (Kind::Text { max: Some(max) }, Value::String(text)) if text.chars().count() > max => {
            invalid(
                "string_too_long",
                &format!("String should have at most {max} characters"),
            )
            .map(|fault| fault.with_context(json!({"max_length": max})))
        }
        (Kind::Text { .. }, Value::String(_)) | (Kind::Object, Value::Object(_)) => None,
        (Kind::Text { .. }, _) => invalid("string_type", "Input should be a valid string"),
        (Kind::Object, _) => invalid("dict_type", "Input should be a valid dictionary"),
        (Kind::Natural | Kind::Integer, Value::Number(number)) => match number.as_i64() {
            Some(whole) if whole < 0 && matches!(kind, Kind::Natural) => invalid(
                "greater_than_equal",
                "Input should be greater than or equal to 0",
            )
            .map(|fault| fault.with_context(json!({"ge": 0}))),
            // pydantic takes 1.0 for 1.
            None if number.as_f64().is_some_and(|number| number.fract() == 0.0) => {
                let is_negative = number.as_f64().is_some_and(|number| number < 0.0);
                (is_negative && matches!(kind, Kind::Natural))
                    .then(|| {
                        invalid(
                            "greater_than_equal",
                            "Input should be greater than or equal to 0",
                        )
                    })
                    .flatten()
                    .map(|fault| fault.with_context(json!({"ge": 0})))
            }
            None if number.is_f64() => invalid(
                "int_from_float",
                "Input should be a valid integer, got a number with a fractional part",
            ),
            Some(_) | None => None,
        },
        (Kind::Natural | Kind::Integer, _) => {
            invalid("int_type", "Input should be a valid integer")
        }
        (Kind::Positive, Value::Number(number)) => {
            if number.as_f64().is_some_and(|number| number > 0.0) {
                return None;
            }
            invalid("greater_than", "Input should be greater than 0")
                .map(|fault| fault.with_context(json!({"gt": 0.0})))
        }
        (Kind::Positive, _) => invalid("float_type", "Input should be a valid number"),
        (Kind::Exactly(text), value) if value == text => None,
        (Kind::Exactly(text), _) => {
            let message = format!("Input should be '{text}'");
            invalid("literal_error", &message)
                .map(|fault| fault.with_context(json!({"expected": format!("'{text}'")})))
        }
        (Kind::Id, Value::String(_) | Value::Null) => None,
        (Kind::Id, Value::Number(number)) if !number.is_f64() => None,
        (Kind::Id, _) => invalid("string_type", "Input should be a valid string"),
    }
}

/// Returns a whole number from 0, which may be written with a fraction of nothing, as pydantic takes it.
pub(super) fn natural(value: &Value) -> Option<u64> {
    let whole = |number: &f64| number.fract() == 0.0 && (0.0..=MAX_WHOLE).contains(number);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "whole, and in the range"
    )]
    value
        .as_u64()
        .or_else(|| value.as_f64().filter(whole).map(|number| number as u64))
}

pub(super) fn python_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "NoneType",
        Value::Bool(_) => "bool",
        Value::Number(number) if number.is_f64() => "float",
        Value::Number(_) => "int",
        Value::String(_) => "str",
        Value::Array(_) => "list",
        Value::Object(_) => "dict",
    }
}

/// Returns what Python's `repr` shows of a value.
pub(super) fn python_repr(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => {
            let quote = if text.contains('\'') && !text.contains('"') {
                '"'
            } else {
                '\''
            };
            let mut repr = String::from(quote);
            for character in text.chars() {
                match character {
                    '\\' => repr.push_str("\\\\"),
                    '\n' => repr.push_str("\\n"),
                    '\r' => repr.push_str("\\r"),
                    '\t' => repr.push_str("\\t"),
                    other if other == quote => repr.extend(['\\', other]),
                    other => repr.push(other),
                }
            }
            repr.push(quote);
            repr
        }
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(python_repr).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Object(items) => {
            let items: Vec<_> = items
                .iter()
                .map(|(name, value)| {
                    let name = python_repr(&Value::String(name.clone()));
                    format!("{name}: {}", python_repr(value))
                })
                .collect();
            format!("{{{}}}", items.join(", "))
        }
    }
}

/// Returns a text as pydantic shows long ones: the first 25 and the last 24 characters.
fn shortened(text: &str) -> String {
    let count = text.chars().count();
    if count <= 50 {
        return text.to_owned();
    }
    let head: String = text.chars().take(25).collect();
    let tail: String = text.chars().skip(count - 24).collect();
    format!("{head}...{tail}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_shown_as_python_shows_it() {
        let value = json!({"id": 1, "a": [true, null, 1.5, "it's"], "b": "x\n'\""});
        assert_eq!(
            python_repr(&value),
            "{'id': 1, 'a': [True, None, 1.5, \"it's\"], 'b': 'x\\n\\'\"'}"
        );
    }

    /// pydantic 2.13: `int` takes 1.0 for 1, and no 1.5.
    #[test]
    fn a_number_may_be_written_with_a_fraction_of_nothing() {
        let fields = [Field::optional("seed", Kind::Natural)];
        for (value, kind) in [
            (json!(1.0), None),
            (json!(1e3), None),
            (json!(1.5), Some("int_from_float")),
            (json!(-1.0), Some("greater_than_equal")),
            (json!(-1), Some("greater_than_equal")),
        ] {
            let input = Map::from_iter([("seed".to_owned(), value.clone())]);
            let faults = check(&input, &fields, false);
            assert_eq!(faults.first().map(|fault| fault.kind), kind, "{value}");
        }
        assert_eq!(natural(&json!(1.0)), Some(1));
        assert_eq!(natural(&json!(7)), Some(7));
        for none in [json!(1.5), json!(-1.0), json!(1e300), json!("1")] {
            assert_eq!(natural(&none), None, "{none}");
        }
    }

    #[test]
    fn reports_are_short_whatever_the_input_is() {
        let many: Map<String, Value> = (0..50_000).map(|n| (n.to_string(), json!(n))).collect();
        let fields = [Field::required("code", Kind::Text { max: None })];
        let faults = check(&many, &fields, false);
        assert_eq!(faults.len(), MAX_FAULTS);
        let text = reports(&faults, true).to_string();
        assert!(text.len() < 16_384, "{}", text.len());
        let mistyped = Map::from_iter([("code".to_owned(), Value::Object(many))]);
        let text = reports(&check(&mistyped, &fields, false), true).to_string();
        assert!(text.contains("more than 4096 characters"), "{text}");
    }

    #[test]
    fn faults_are_in_the_order_of_the_fields_then_of_the_input() {
        let fields = [
            Field::optional("metadata", Kind::Object),
            Field::required("code", Kind::Text { max: Some(3) }),
        ];
        let kinds = |input: Value| {
            let Value::Object(input) = input else {
                panic!("not an object")
            };
            let faults = check(&input, &fields, false);
            faults.iter().map(|fault| fault.kind).collect::<Vec<_>>()
        };
        assert_eq!(kinds(json!({"code": "abc"})), Vec::<&str>::new());
        assert_eq!(kinds(json!({"code": "abcd"})), ["string_too_long"]);
        assert_eq!(
            kinds(json!({"z": 1, "metadata": null})),
            ["dict_type", "missing", "extra_forbidden"]
        );
    }
}
