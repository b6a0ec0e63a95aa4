//! What is refused, where `$ref` leads, and what stands as text.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use rstest::rstest;
use serde_json::json;

use super::*;

fn add(schema: &Value) -> Result<Value, SchemaError> {
    Schemas::default().add(&Document::new(schema), schema)
}

fn by_name(count: usize, schema: impl Fn(usize) -> (String, Value)) -> Value {
    Value::Object((0..count).map(schema).collect())
}

/// A chain of `$ref`, `links` long.
fn chain(links: usize) -> Value {
    let next = |at: usize| json!({"$ref": format!("#/$defs/a{}", at + 1)});
    let mut definitions = by_name(links, |at| (format!("a{at}"), next(at)));
    definitions[format!("a{links}")] = json!({"type": "integer"});
    json!({"$ref": "#/$defs/a0", "$defs": definitions})
}

/// Definitions each of which has the next in a property.
fn nested_definitions(count: usize) -> Value {
    let next = |at: usize| json!({"type": "object", "properties": {"x": {"$ref": format!("#/$defs/a{}", at + 1)}}});
    let mut definitions = by_name(count, |at| (format!("a{at}"), next(at)));
    definitions[format!("a{count}")] = json!({"type": "integer"});
    json!({"$ref": "#/$defs/a0", "$defs": definitions})
}

fn properties(count: usize) -> Value {
    let names = by_name(count, |at| (format!("a{at}"), json!({})));
    json!({"type": "object", "properties": names, "additionalProperties": false})
}

fn patterns(count: usize) -> Value {
    let names = by_name(count, |at| (format!("^a{at}$"), json!({})));
    json!({"type": "object", "patternProperties": names})
}

fn repeated(schema: &Value, count: usize) -> Value {
    Value::from(vec![schema.clone(); count])
}

/// A long constant beside many options.
fn multiplied(options: usize, items: usize) -> Value {
    json!({
        "anyOf": repeated(&json!({"type": "array"}), options), "type": "array",
        "items": {"const": vec![1; items]},
    })
}

/// Each definition has two options, and each is the next.
fn laughs(count: usize) -> Value {
    let next = |at: usize| {
        let next = json!({"$ref": format!("#/$defs/a{}", at + 1)});
        json!({"allOf": [{"anyOf": [next, {"type": "object"}]}, next]})
    };
    let mut definitions = by_name(count, |at| (format!("a{at}"), next(at)));
    definitions[format!("a{count}")] = properties(10);
    json!({"$ref": "#/$defs/a0", "$defs": definitions})
}

/// Types that are listed again and again, level by level.
fn types(levels: usize) -> Value {
    (0..levels).fold(
        json!({"type": "integer"}),
        |inner, _| json!({"type": repeated(&json!("object"), 7), "properties": {"x": inner}}),
    )
}

#[rstest]
#[case::chain(
    chain(800),
    "`$ref` may lead to 500 places, and it leads to 501 or more"
)]
#[case::definitions(
    nested_definitions(5000),
    "`$ref` may lead to 500 places, and it leads to 501 or more"
)]
#[case::properties(
    properties(8000),
    "an object may have 500 properties, and one has 8000"
)]
#[case::required(
    json!({"type": "object", "required": (0..600).map(|at| at.to_string()).collect::<Vec<_>>()}),
    "an object may have 500 properties, and one has 600"
)]
#[case::merged_properties(
    json!({"allOf": [properties(400), {"type": "object", "properties": by_name(400, |at| (format!("b{at}"), json!({})))}]}),
    "an object may have 500 properties, and one has 800"
)]
#[case::patterns(
    patterns(100),
    "an object may have 32 `patternProperties`, and one has 100"
)]
#[case::values(json!({"const": vec![1; 30_000]}), "the schemas of a request may have 20000 JSON values, and these have 30002 or more")]
#[case::options_times_items(multiplied(200, 15_000), "come to 20000 parts")]
#[case::small_options_times_items(multiplied(40, 5000), "come to 20000 parts")]
#[case::laughs(laughs(30), "come to 20000 parts")]
#[case::regular_expressions(
    json!({"anyOf": (0..2000).map(|at| json!({"type": "string", "pattern": format!("a{at}")})).collect::<Vec<_>>()}),
    "come to 20000 parts"
)]
#[case::counted(
    {
        let mut schema = properties(300);
        schema["minProperties"] = json!(1);
        schema
    },
    "come to 20000 parts"
)]
#[case::one_of_words_again_and_again(
    json!({"oneOf": (0..80).map(|at| json!({
        "type": "object", "required": ["k"],
        "properties": {"k": {"enum": (0..80).map(|word| format!("{at} {word}")).collect::<Vec<_>>()}},
    })).collect::<Vec<_>>(), "allOf": repeated(&json!({}), 5000)}),
    "come to 20000 parts"
)]
#[case::one_of_again_and_again(
    json!({"oneOf": (0..2000).map(Value::from).map(|at| json!({"const": at})).collect::<Vec<_>>(),
        "allOf": repeated(&json!({}), 5000), "anyOf": [{}], "enum": [1], "type": "integer", "minimum": 0,
        "maximum": 5, "multipleOf": 1, "title": "x", "format": "y", "minLength": 1}),
    "come to 20000 parts"
)]
#[case::without_end(
    json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a", "minimum": 1}}}),
    "come to 20000 parts"
)]
#[case::merged_without_end(
    json!({
        "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {
            "a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}},
            "b": {"type": "object", "properties": {"x": {"$ref": "#/$defs/b"}}},
        },
    }),
    "may be 100 levels deep"
)]
#[case::nowhere(json!({"$ref": "#/$defs/x"}), "`$ref` leads to `#/$defs/x`, which is not within the schema")]
#[case::elsewhere(json!({"$ref": "https://example.org/x"}), "which is not within the schema")]
#[case::bad_escape(json!({"$ref": "#/%é"}), "which is not within the schema")]
fn what_is_too_much_is_refused_at_once(#[case] schema: Value, #[case] expected: &str) {
    let began = Instant::now();
    let error = add(&schema).unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );
}

#[test]
fn schemas_of_one_grammar_count_together() {
    let schema = json!({"const": vec![1; 9000]});
    let mut schemas = Schemas::default();
    let mut add = || schemas.add(&Document::new(&schema), &schema);
    add().unwrap();
    add().unwrap();
    assert!(matches!(
        add().unwrap_err(),
        SchemaError::TooManyValues { .. }
    ));
}

#[rstest]
#[case::properties(properties(500))]
#[case::patterns(patterns(32))]
#[case::words(json!({"type": "string", "enum": (0..15_000).map(|at| at.to_string()).collect::<Vec<_>>()}))]
#[case::chain(chain(400))]
#[case::types(types(30))]
#[case::union(json!({"oneOf": (0..300).map(|at| json!({
    "type": "object", "properties": {"kind": {"const": at}, "value": {"type": "number"}},
    "required": ["kind", "value"], "additionalProperties": false,
})).collect::<Vec<_>>()}))]
#[case::tree(json!({
    "type": "object", "required": ["children"], "additionalProperties": false,
    "properties": {"children": {"type": "array", "items": {"allOf": [{"$ref": "#"}]}}},
}))]
#[case::inherited(json!({
    "allOf": [{"$ref": "#/$defs/base"}, {"type": "object", "properties": {"b": {"type": "integer"}}}],
    "$defs": {"base": {"type": "object", "properties": {"a": {"$ref": "#/$defs/base"}}}},
}))]
fn what_people_write_is_not_refused(#[case] schema: Value) {
    add(&schema).unwrap();
}

#[rstest]
#[case::definition("#/$defs/a")]
#[case::slash("#/$defs/b~1c")]
#[case::blank("#/$defs/d%20e")]
#[case::anchor("#f")]
#[case::item("#/anyOf/1")]
#[case::property("#/properties/$ref/items")]
fn references_lead_into_the_document(#[case] reference: &str) {
    let target = json!({"const": reference});
    let schema = json!({
        "anyOf": [{"$ref": reference}, target],
        "properties": {"$ref": {"items": target}},
        "$defs": {"a": target, "b/c": target, "d e": target, "g": {"$anchor": "f", "const": reference}},
    });
    let copy = add(&schema).unwrap();
    assert_eq!(copy["anyOf"][0], json!({"$ref": "#/$defs/0"}));
    assert_eq!(copy["$defs"], json!({"0": target}));
}

#[test]
fn only_references_are_rewritten() {
    let spelled = json!({"$ref": "#/x", "properties": {"$ref": "#/y"}});
    let schema = json!({
        "const": spelled, "enum": [spelled], "properties": {"$ref": {"type": "string"}, "const": {"$ref": "#"}},
    });
    let copy = add(&schema).unwrap();
    let mut expected = schema;
    expected["properties"]["const"]["$ref"] = json!("#/$defs/0");
    let definition = expected.clone();
    expected["$defs"] = json!({"0": definition});
    assert_eq!(copy, expected);
}

#[test]
fn notes_and_what_nobody_refers_to_are_left_out() {
    let schema = json!({
        "title": "t", "description": "d".repeat(1000), "examples": [1], "default": {"$ref": "#/nowhere"},
        "x-guidance": {"coerce_one_of": true}, "$defs": {"unused": {"$ref": "#/nowhere"}}, "type": ["null", "null"],
    });
    assert_eq!(add(&schema).unwrap(), json!({"type": ["null"]}));
}

fn written_as(schema: &Value) -> String {
    match Document::new(schema).written(schema) {
        Written::Text { choices: None } => "text".to_owned(),
        Written::Text {
            choices: Some(choices),
        } => choices.join("|"),
        Written::Json(_) => "json".to_owned(),
    }
}

#[rstest]
#[case(json!({"type": "string", "description": "a"}), "text")]
#[case(json!({}), "text")]
#[case(json!(true), "text")]
#[case(json!({"title": "anything"}), "text")]
#[case(json!({"type": "integer"}), "json")]
#[case(json!({"type": ["string", "null"]}), "json")]
#[case(json!({"anyOf": [{"type": "string"}, {"type": "null"}]}), "json")]
#[case(json!({"type": ["string"]}), "text")]
#[case(json!({"enum": ["b", "a"]}), "a|b")]
#[case(json!({"const": "a"}), "a")]
#[case(json!({"type": "string", "enum": [1, 2]}), "json")]
#[case(json!({"type": "string", "enum": [1, "a"]}), "a")]
#[case(json!({"enum": [1, "a"]}), "json")]
#[case(json!({"anyOf": [{"const": "a"}, {"enum": ["b"]}]}), "a|b")]
#[case(json!({"allOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}), "b")]
#[case(json!({"$ref": "#/$defs/a", "$defs": {"a": {"enum": ["red"]}}}), "red")]
#[case(json!({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array"}}}), "json")]
#[case(json!({"$ref": "#"}), "json")]
#[case(json!({"type": "string", "pattern": "a"}), "json")]
#[case(json!({"type": "string", "maxLength": 3}), "json")]
#[case(json!({"type": "string", "format": "date"}), "json")]
#[case(json!({"type": "string", "not": {"const": "a"}}), "json")]
#[case(json!({"properties": {}}), "json")]
fn strings_stand_as_they_are(#[case] schema: Value, #[case] expected: &str) {
    assert_eq!(written_as(&schema), expected);
}

#[test]
fn asking_how_a_value_is_written_takes_no_time() {
    let began = Instant::now();
    assert_eq!(written_as(&laughs(60)), "json");
    assert!(began.elapsed() < Duration::from_secs(5));
}

proptest! {
    /// Whatever the bytes, a schema is taken or refused, and what is taken refers to what it has.
    #[test]
    fn any_json_is_taken_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        let schema = scrambled(&bytes);
        if let Ok(copy) = add(&schema) {
            prop_assert!(add(&copy).is_ok(), "{schema} {copy}");
        }
    }
}

/// Makes a schema of bytes: each is a keyword, and what follows is its value.
fn scrambled(bytes: &[u8]) -> Value {
    fn value(bytes: &mut std::slice::Iter<'_, u8>, depth: usize) -> Value {
        let mut fields = Map::new();
        for _ in 0..bytes.next().map_or(0, |count| count % 4) {
            let Some(byte) = bytes.next() else { break };
            let inner = |bytes: &mut _| match depth {
                0 => json!({}),
                _ => value(bytes, depth - 1),
            };
            let (key, value) = match byte % 10 {
                0 => (
                    "$ref",
                    json!(
                        ["#", "#/allOf/0", "#/properties/a", "#/$defs/a", "#x"]
                            [usize::from(byte / 10) % 5]
                    ),
                ),
                1 => ("allOf", json!([inner(bytes), inner(bytes)])),
                2 => ("anyOf", json!([inner(bytes), inner(bytes)])),
                3 => ("properties", json!({"a": inner(bytes), "b": inner(bytes)})),
                4 => ("items", inner(bytes)),
                5 => ("enum", json!([byte, "a", [inner(bytes)]])),
                6 => ("type", json!(["object", "string"])),
                7 => ("$defs", json!({"a": inner(bytes)})),
                8 => ("$anchor", json!("x")),
                _ => ("additionalProperties", inner(bytes)),
            };
            fields.insert(key.to_owned(), value);
        }
        Value::Object(fields)
    }
    value(&mut bytes.iter(), 12)
}
