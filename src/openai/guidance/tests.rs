//! Grammars of answers, followed token by token.

use rstest::rstest;

use super::*;
use crate::chat::{SchemaError, THINK, THINK_END, ToolCallFormat, parse_calls};
use crate::engine::Tokenizer;

const MARKS: [&str; 5] = [THINK, THINK_END, "<tool_call>", "</tool_call>", "<|end|>"];

fn tokenizer(has_marks: bool) -> Tokenizer {
    let marks = if has_marks { &MARKS[..] } else { &MARKS[4..] };
    Tokenizer::byte_level(marks).unwrap()
}

fn factory(tokenizer: &Tokenizer) -> GuideFactory {
    let end = tokenizer.token_to_id("<|end|>").unwrap();
    GuideFactory::new(tokenizer, tokenizer.vocab_size() + 3, &[end]).unwrap()
}

/// Returns whether the grammar admits `text` and then the end; what it admits of it otherwise.
fn follow(tokenizer: &Tokenizer, grammar: String, text: &str) -> Result<(), String> {
    let factory = factory(tokenizer);
    let mut guide = factory
        .compile(grammar)
        .map_err(|error| error.to_string())?;
    let end = tokenizer.token_to_id("<|end|>").unwrap();
    let ids = tokenizer.encode(text).unwrap();
    for (at, &token) in ids.iter().chain([&end]).enumerate() {
        if !guide.admits(token) {
            return Err(tokenizer.decode(&ids[..at]).unwrap());
        }
        if token != end {
            guide.push(token);
        }
    }
    assert_eq!(guide.failure(), None);
    Ok(())
}

fn tools() -> Vec<ToolSpec> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "lines": {"$ref": "#/$defs/range"},
            "mode": {"type": "string", "enum": ["r", "w"]},
        },
        "required": ["path"],
        "additionalProperties": false,
        "$defs": {"range": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    });
    vec![
        ToolSpec::new("open", "", parameters),
        ToolSpec {
            parameters: None,
            ..ToolSpec::new("done", "", Value::Null)
        },
    ]
}

fn grammar(
    format: ToolCallFormat,
    tokenizer: &Tokenizer,
    shape: &AnswerShape<'_>,
    reasoning: AnswerReasoning,
) -> String {
    let token_id = |mark: &str| tokenizer.token_to_id(mark);
    AnswerGrammar {
        format,
        token_id: &token_id,
    }
    .write(shape, reasoning)
    .unwrap()
}

#[rstest]
#[case::hermes(
    ToolCallFormat::Hermes,
    "<tool_call>\n{\"name\": \"open\", \"arguments\": {\"path\": \"</tool_call>\\n\", \"lines\": [1, 20]}}\n</tool_call>"
)]
#[case::two(
    ToolCallFormat::Hermes,
    "<tool_call>\n{\"name\": \"done\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"open\", \"arguments\": {\"path\": \"\"}}\n</tool_call>"
)]
#[case::llama(
    ToolCallFormat::Llama3,
    "{\"name\": \"open\", \"parameters\": {\"path\": \"a\", \"mode\": \"w\"}}"
)]
#[case::xml(
    ToolCallFormat::QwenXml,
    "<tool_call>\n<function=open>\n<parameter=path>\na <b>\n\n\"c\"\n</parameter>\n<parameter=lines>\n[1, 2]\n</parameter>\n<parameter=mode>\nr\n</parameter>\n</function>\n</tool_call>"
)]
#[case::xml_without(
    ToolCallFormat::QwenXml,
    "<tool_call>\n<function=done>\n</function>\n</tool_call>"
)]
fn what_is_admitted_can_be_read(
    #[case] format: ToolCallFormat,
    #[case] text: &str,
    #[values(true, false)] has_marks: bool,
) {
    let tokenizer = tokenizer(has_marks);
    let tools = tools();
    let shape = AnswerShape::Calls {
        tools: &tools,
        allows_many: true,
    };
    let grammar = grammar(format, &tokenizer, &shape, AnswerReasoning::Optional);
    // Inside a string the mark is spelled in ordinary characters.
    let literal = text.find("\"</tool_call>").map(|at| at..at + 13);
    let text_ids = tokenizer.encode_chat(text, literal.as_slice()).unwrap();
    let mut guide = factory(&tokenizer).compile(grammar).unwrap();
    for token in text_ids {
        assert!(
            guide.admits(token),
            "{token} {:?}",
            tokenizer.decode(&[token])
        );
        guide.push(token);
    }
    let parsed = parse_calls(text, format, &tools);
    assert_eq!(parsed.content.trim(), "");
    for call in parsed.tool_calls {
        assert!(
            tools
                .iter()
                .any(|tool| tool.name == call.as_ref().unwrap().name)
        );
    }
}

#[rstest]
#[case::unknown_tool(
    ToolCallFormat::Hermes,
    "<tool_call>\n{\"name\": \"x\"",
    "<tool_call>\n{\"name\": \""
)]
#[case::missing_argument(
    ToolCallFormat::Hermes,
    "<tool_call>\n{\"name\": \"open\", \"arguments\": {}",
    "<tool_call>\n{\"name\": \"open\", \"arguments\": {"
)]
#[case::wrong_type(
    ToolCallFormat::QwenXml,
    "<tool_call>\n<function=open>\n<parameter=path>\nx\n</parameter>\n<parameter=lines>\nx",
    "<tool_call>\n<function=open>\n<parameter=path>\nx\n</parameter>\n<parameter=lines>\n"
)]
#[case::not_in_the_enum(
    ToolCallFormat::QwenXml,
    "<tool_call>\n<function=open>\n<parameter=path>\nx\n</parameter>\n<parameter=mode>\nx",
    "<tool_call>\n<function=open>\n<parameter=path>\nx\n</parameter>\n<parameter=mode>\n"
)]
#[case::text_first(ToolCallFormat::Hermes, "I call", "")]
#[case::ends_early(ToolCallFormat::Llama3, "{\"name\": \"done\"", "{\"name\": \"done\"")]
fn what_cannot_be_read_is_not_admitted(
    #[case] format: ToolCallFormat,
    #[case] text: &str,
    #[case] admitted: &str,
) {
    let tokenizer = tokenizer(true);
    let tools = tools();
    let shape = AnswerShape::Calls {
        tools: &tools,
        allows_many: false,
    };
    let grammar = grammar(format, &tokenizer, &shape, AnswerReasoning::Optional);
    assert_eq!(follow(&tokenizer, grammar, text), Err(admitted.to_owned()));
}

#[test]
fn text_may_precede_calls_and_calls_keep_to_their_schemas() {
    let tokenizer = tokenizer(true);
    let tools = tools();
    let shape = AnswerShape::TextAndCalls {
        tools: &tools,
        allows_many: true,
    };
    let follow = |text: &str| {
        follow(
            &tokenizer,
            grammar(
                ToolCallFormat::Hermes,
                &tokenizer,
                &shape,
                AnswerReasoning::Optional,
            ),
            text,
        )
    };
    follow("just text {").unwrap();
    follow("I call.\n<tool_call>\n{\"name\": \"done\", \"arguments\": {}}\n</tool_call>").unwrap();
    follow("<think>\nhm <tool>\n</think>\n\n<tool_call>\n{\"name\": \"done\", \"arguments\": {}}\n</tool_call>").unwrap();
    follow("a <tool_call>\n{\"name\": 5").unwrap_err();
    follow("a <tool_call>\n{\"name\": \"done\", \"arguments\": {}}\n</tool_call> more")
        .unwrap_err();
}

#[test]
fn reasoning_comes_before_json() {
    let tokenizer = tokenizer(true);
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let shape = AnswerShape::Json {
        schema: &schema,
        is_strict: true,
        tools: &[],
        allows_many: true,
    };
    for (reasoning, text) in [
        (
            AnswerReasoning::Optional,
            "<think>\nhm {\n</think>\n\n{\"a\": 1}",
        ),
        (AnswerReasoning::Optional, "{\n  \"a\": 1\n}"),
        (AnswerReasoning::Open, "hm\n</think>\n\n{\"a\":1}"),
        (AnswerReasoning::Open, "</think>{\"a\":1}"),
    ] {
        let grammar = grammar(ToolCallFormat::Hermes, &tokenizer, &shape, reasoning);
        follow(&tokenizer, grammar, text).unwrap();
    }
    let open = grammar(
        ToolCallFormat::Hermes,
        &tokenizer,
        &shape,
        AnswerReasoning::Open,
    );
    follow(&tokenizer, open, "<think>").unwrap_err();
    // Blanks without end are not admitted.
    let grammar = grammar(
        ToolCallFormat::Hermes,
        &tokenizer,
        &shape,
        AnswerReasoning::Optional,
    );
    let admitted = follow(&tokenizer, grammar, &format!("{{{}", " ".repeat(40))).unwrap_err();
    assert_eq!(admitted.len(), 17);
}

/// Writes and compiles the grammar of JSON of a schema.
fn compile(schema: &Value, is_strict: bool) -> Result<Guide, String> {
    let tokenizer = tokenizer(true);
    let shape = AnswerShape::Json {
        schema,
        is_strict,
        tools: &[],
        allows_many: true,
    };
    let token_id = |mark: &str| tokenizer.token_to_id(mark);
    let grammar = AnswerGrammar {
        format: ToolCallFormat::Hermes,
        token_id: &token_id,
    };
    let grammar = grammar.write(&shape, AnswerReasoning::Optional);
    let grammar = grammar.map_err(|error| error.to_string())?;
    let made = factory(&tokenizer).compile(grammar);
    made.map_err(|error| error.to_string())
}

#[rstest]
#[case::not_a_schema(json!(5), "schema must be an object or boolean")]
#[case::bad_pattern(json!({"type": "string", "pattern": "("}), "unclosed group")]
#[case::elsewhere(json!({"$ref": "https://example.org/schema.json"}), "https://example.org/schema.json")]
#[case::nothing_fits(json!({"allOf": [{"type": "string"}, {"type": "integer"}]}), "incompatible types")]
#[case::too_long(json!({"const": "x".repeat(1 << 20)}), "262144 are the most")]
#[case::bad_type(json!({"type": "strng", "description": "d".repeat(200_000)}), "Invalid type: strng")]
#[case::one_of(json!({"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object"}]}), "Use `anyOf`")]
#[case::panics(json!({"type": "string", "minLength": "é".repeat(200)}), "a keyword with a value that cannot be read")]
#[case::circular(
    json!({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a", "type": "object"}}}}}),
    "a `$ref` that leads back to itself must stand alone"
)]
fn a_schema_that_cannot_be_is_refused_in_words_about_it(
    #[case] schema: Value,
    #[case] expected: &str,
) {
    let error = compile(&schema, true).unwrap_err();
    assert!(error.contains(expected), "{error}");
    assert!(error.len() < 700, "{} bytes: {error}", error.len());
    for inner in [
        "json:",
        "start",
        "%json",
        "coerce",
        "panic",
        "backtrace",
        "llguidance",
        "$defs/0",
    ] {
        assert!(!error.contains(inner), "{error}");
    }
}

/// Each of these recursed once for every one of its parts, on a stack that held a few hundred.
#[rstest]
#[case::chain({
    let next = |at: usize| json!({"$ref": format!("#/$defs/{}", at + 1)});
    let mut definitions: Map<String, Value> = (0..400).map(|at| (at.to_string(), next(at))).collect();
    definitions.insert("400".to_owned(), json!({"type": "integer"}));
    json!({"$ref": "#/$defs/0", "$defs": definitions})
})]
#[case::objects({
    let next = |at: usize| json!({"type": "object", "properties": {"x": {"$ref": format!("#/$defs/{}", at + 1)}}});
    let mut definitions: Map<String, Value> = (0..400).map(|at| (at.to_string(), next(at))).collect();
    definitions.insert("400".to_owned(), json!({"type": "integer"}));
    json!({"$ref": "#/$defs/0", "$defs": definitions})
})]
#[case::properties({
    let properties: Map<String, Value> = (0..500).map(|at| (at.to_string(), json!({}))).collect();
    json!({"type": "object", "properties": properties, "additionalProperties": false})
})]
fn what_is_let_in_has_stack_enough(#[case] schema: Value) {
    compile(&schema, true).unwrap();
}

#[test]
fn a_schema_may_spell_no_rule_of_the_grammar() {
    let tokenizer = tokenizer(true);
    let name = "x\" | /.*/ \nstart: \"y";
    let schema = json!({"const": name});
    let shape = AnswerShape::Json {
        schema: &schema,
        is_strict: true,
        tools: &[],
        allows_many: true,
    };
    let grammar = grammar(
        ToolCallFormat::Hermes,
        &tokenizer,
        &shape,
        AnswerReasoning::Optional,
    );
    follow(&tokenizer, grammar.clone(), &Value::from(name).to_string()).unwrap();
    assert_eq!(follow(&tokenizer, grammar, "y"), Err(String::new()));
}

fn tool(name: &str, parameters: Value) -> ToolSpec {
    ToolSpec::new(name, "", parameters)
}

fn strict(mut tool: ToolSpec) -> ToolSpec {
    tool.extra.insert("strict".to_owned(), json!(true));
    tool
}

/// Returns the call that a text is, if one call of `tools` may be written so.
fn call(format: ToolCallFormat, tools: &[ToolSpec], text: &str) -> Result<Value, String> {
    let tokenizer = tokenizer(true);
    let shape = AnswerShape::Calls {
        tools,
        allows_many: false,
    };
    let grammar = grammar(format, &tokenizer, &shape, AnswerReasoning::Off);
    follow(&tokenizer, grammar, text)?;
    let mut parsed = parse_calls(text, format, tools);
    assert_eq!((parsed.content.as_str(), parsed.tool_calls.len()), ("", 1));
    Ok(parsed.tool_calls.pop().unwrap().unwrap().arguments)
}

/// A call of `f` in any format.
fn spelled(format: ToolCallFormat, name: &str, key: &str, value: &str) -> String {
    match format {
        ToolCallFormat::QwenXml => format!(
            "<tool_call>\n<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        ),
        ToolCallFormat::Hermes => format!(
            "<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{\"{key}\": {value}}}}}\n</tool_call>"
        ),
        _ => format!("{{\"name\": \"{name}\", \"parameters\": {{\"{key}\": {value}}}}}"),
    }
}

const FORMATS: [ToolCallFormat; 3] = [
    ToolCallFormat::Hermes,
    ToolCallFormat::QwenXml,
    ToolCallFormat::Llama3,
];

#[test]
fn tools_have_definitions_of_their_own() {
    let with = |definition: Value| {
        json!({
            "type": "object", "properties": {"v": {"$ref": "#/$defs/Item"}}, "required": ["v"],
            "additionalProperties": false, "$defs": {"Item": definition},
        })
    };
    let tools = [
        tool("f", with(json!({"type": "integer"}))),
        tool("g", with(json!({"type": "boolean"}))),
    ];
    for format in FORMATS {
        let call =
            |name: &str, value: &str| call(format, &tools, &spelled(format, name, "v", value));
        assert_eq!(call("f", "5").unwrap(), json!({"v": 5}));
        assert_eq!(call("g", "true").unwrap(), json!({"v": true}));
        call("f", "true").unwrap_err();
        call("g", "5").unwrap_err();
    }
}

#[rstest]
#[case::whole(json!({"anyOf": [{"$ref": "#"}, {"enum": [7]}]}), r#"{"v": {"v": 7}}"#, json!({"v": {"v": 7}}))]
#[case::property(json!({"type": "array", "items": {"$ref": "#/properties/w"}}), "[8]", json!([8]))]
fn references_lead_into_the_parameters(
    #[case] property: Value,
    #[case] text: &str,
    #[case] value: Value,
) {
    let parameters = json!({
        "type": "object", "properties": {"v": property, "w": {"enum": [8]}}, "required": ["v"],
        "additionalProperties": false,
    });
    let tools = [tool("f", parameters)];
    for format in FORMATS {
        let found = call(format, &tools, &spelled(format, "f", "v", text)).unwrap();
        assert_eq!(found, json!({"v": value}));
        call(
            format,
            &tools,
            &spelled(format, "f", "v", "{\"name\": \"f\"}"),
        )
        .unwrap_err();
    }
}

/// Elements of XML have no types, so a schema says what is text and what is JSON: to the grammar and to
/// the reader.
#[rstest]
#[case::optional_text(json!({"anyOf": [{"type": "string"}, {"type": "null"}]}), &[("null", json!(null)), ("\"null\"", json!("null"))], &["x"])]
#[case::optional_number(json!({"anyOf": [{"type": "integer", "minimum": 5, "maximum": 6}, {"type": "null"}]}), &[("6", json!(6)), ("null", json!(null))], &["7", "\"6\""])]
#[case::reference(json!({"$ref": "#/$defs/C"}), &[("red", json!("red"))], &["\"red\"", "blue"])]
#[case::list(json!({"$ref": "#/$defs/L"}), &[("[1, 1]", json!([1, 1]))], &["[1]"])]
#[case::enumeration(json!({"enum": ["p", "5"]}), &[("p", json!("p")), ("5", json!("5"))], &["\"p\"", "q"])]
#[case::mixed(json!({"enum": ["p", 5]}), &[("\"p\"", json!("p")), ("5", json!(5))], &["p"])]
#[case::types(json!({"type": ["string", "null"], "enum": ["z", null]}), &[("\"z\"", json!("z")), ("null", json!(null))], &["z"])]
#[case::constant(json!({"type": "string", "const": "K"}), &[("K", json!("K"))], &["L"])]
#[case::pattern(json!({"type": "string", "pattern": "^[0-9]{2}$"}), &[("\"42\"", json!("42"))], &["42", "\"4\""])]
#[case::length(json!({"type": "string", "maxLength": 2}), &[("\"ab\"", json!("ab"))], &["\"abc\""])]
#[case::format(json!({"type": "string", "format": "date"}), &[("\"2026-11-30\"", json!("2026-11-30"))], &["\"x\""])]
#[case::integer(json!({"type": "integer"}), &[("5", json!(5))], &["x"])]
#[case::text(json!({"type": "string"}), &[("5", json!("5")), ("\"a\"", json!("\"a\"")), ("null", json!("null")), ("a\n\nb", json!("a\n\nb"))], &[])]
#[case::anything(json!({}), &[("5", json!("5")), ("[", json!("["))], &[])]
#[case::delete(json!({"enum": ["a\u{7f}b"]}), &[("a\u{7f}b", json!("a\u{7f}b"))], &["ab"])]
fn values_in_xml_are_read_as_they_are_written(
    #[case] property: Value,
    #[case] admitted: &[(&str, Value)],
    #[case] refused: &[&str],
) {
    let parameters = json!({
        "type": "object", "properties": {"v": property}, "required": ["v"], "additionalProperties": false,
        "$defs": {
            "C": {"enum": ["red"]},
            "L": {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2},
        },
    });
    let tools = [tool("f", parameters)];
    let call = |text: &str| {
        let text = spelled(ToolCallFormat::QwenXml, "f", "v", text);
        call(ToolCallFormat::QwenXml, &tools, &text)
    };
    for (text, value) in admitted {
        assert_eq!(call(text).unwrap(), json!({"v": value}), "{text}");
    }
    for text in refused {
        call(text).unwrap_err();
    }
}

#[test]
fn arguments_in_xml_are_those_of_what_the_parameters_refer_to() {
    let parameters = json!({
        "$ref": "#/$defs/A",
        "$defs": {
            "A": {
                "type": "object", "properties": {"v": {"$ref": "#/$defs/N"}, "u": {}}, "required": ["v", "w"],
            },
            "N": {"type": "integer"},
        },
    });
    let tools = [tool("f", parameters)];
    let text = |value: &str| {
        let arguments = format!("{value}\n</parameter>\n<parameter=w>\nx y");
        spelled(ToolCallFormat::QwenXml, "f", "v", &arguments)
    };
    let found = call(ToolCallFormat::QwenXml, &tools, &text("5")).unwrap();
    assert_eq!(found, json!({"v": 5, "w": "x y"}));
    call(ToolCallFormat::QwenXml, &tools, &text("x")).unwrap_err();
}

fn write(format: ToolCallFormat, tools: &[ToolSpec]) -> Result<String, SchemaError> {
    let tokenizer = tokenizer(true);
    let token_id = |mark: &str| tokenizer.token_to_id(mark);
    let shape = AnswerShape::Calls {
        tools,
        allows_many: true,
    };
    let grammar = AnswerGrammar {
        format,
        token_id: &token_id,
    };
    grammar.write(&shape, AnswerReasoning::Off)
}

/// What cannot be enforced is an error of a strict tool, and of no other.
#[rstest]
#[case::not(json!({"type": "string", "not": {"const": "x"}}))]
#[case::unique(json!({"type": "array", "uniqueItems": true}))]
#[case::format(json!({"type": "string", "format": "phone"}))]
#[case::no_string(json!({"type": "string", "enum": [1, 2]}))]
fn a_strict_tool_is_strict(#[case] property: Value) {
    let parameters = json!({
        "type": "object", "properties": {"v": property}, "required": ["v"], "additionalProperties": false,
    });
    let plain = tool("f", parameters);
    let factory = factory(&tokenizer(true));
    let compiles = |format: ToolCallFormat, tools: &[ToolSpec]| {
        let grammar = write(format, tools).unwrap();
        factory
            .compile(grammar)
            .map(drop)
            .map_err(|error| error.to_string())
    };
    let is_possible = property_is_possible(&plain);
    for format in FORMATS {
        assert_eq!(
            compiles(format, std::slice::from_ref(&plain)).is_ok(),
            is_possible
        );
        compiles(format, &[strict(plain.clone())]).unwrap_err();
        let other = strict(tool("g", json!({"type": "object", "properties": {}})));
        assert_eq!(
            compiles(format, &[plain.clone(), other]).is_ok(),
            is_possible
        );
    }
}

fn property_is_possible(tool: &ToolSpec) -> bool {
    tool.parameters.as_ref().unwrap()["properties"]["v"]
        .get("enum")
        .is_none()
}

#[test]
fn a_strict_tool_says_of_its_arguments_as_a_whole_what_xml_can_keep_to() {
    let parameters = json!({"type": "object", "properties": {"v": {}}, "minProperties": 1});
    let plain = tool("f", parameters);
    write(ToolCallFormat::QwenXml, std::slice::from_ref(&plain)).unwrap();
    let error = write(ToolCallFormat::QwenXml, &[strict(plain)]).unwrap_err();
    assert_eq!(
        error,
        SchemaError::NotEnforced {
            keyword: "minProperties".to_owned()
        }
    );
}

#[test]
fn names_that_no_element_can_have_are_refused() {
    let named = tool("f", json!({"type": "object", "properties": {"a>b": {}}}));
    write(ToolCallFormat::Hermes, std::slice::from_ref(&named)).unwrap();
    for tools in [[named], [tool("a b", json!({}))]] {
        let error = write(ToolCallFormat::QwenXml, &tools).unwrap_err();
        assert!(
            matches!(error, SchemaError::UnwritableName { .. }),
            "{error}"
        );
    }
}

#[test]
fn many_tools_have_a_grammar() {
    let parameters = |at: usize| {
        json!({
            "type": "object", "properties": {"v": {"enum": [at]}, "w": {"type": "string"}},
            "required": ["v"],
        })
    };
    let tools: Vec<ToolSpec> = (0..128)
        .map(|at| tool(&format!("f{at}"), parameters(at)))
        .collect();
    for format in FORMATS {
        let found = call(format, &tools, &spelled(format, "f77", "v", "77")).unwrap();
        assert_eq!(found, json!({"v": 77}));
        call(format, &tools, &spelled(format, "f77", "v", "78")).unwrap_err();
    }
}

/// As many calls are admitted as are read.
#[rstest]
fn calls_are_as_many_as_are_read(
    #[values(ToolCallFormat::Hermes, ToolCallFormat::QwenXml)] format: ToolCallFormat,
) {
    let tokenizer = tokenizer(true);
    let tools = [tool(
        "f",
        json!({"type": "object", "properties": {"v": {"enum": [1]}}}),
    )];
    let one = spelled(format, "f", "v", "1");
    let shapes = |allows_many| {
        let tools = &tools[..];
        let is_strict = true;
        [
            AnswerShape::Calls { tools, allows_many },
            AnswerShape::TextAndCalls { tools, allows_many },
            AnswerShape::Json {
                schema: &Value::Null,
                is_strict,
                tools,
                allows_many,
            },
        ]
    };
    let schema = json!({"const": 1});
    for (allows_many, most) in [(true, 64), (false, 1)] {
        for mut shape in shapes(allows_many) {
            if let AnswerShape::Json { schema: of, .. } = &mut shape {
                *of = &schema;
            }
            let grammar = grammar(format, &tokenizer, &shape, AnswerReasoning::Off);
            let text = |calls: usize| vec![one.as_str(); calls].join("\n");
            follow(&tokenizer, grammar.clone(), &text(most)).unwrap();
            let parsed = parse_calls(&text(most), format, &tools);
            assert!(parsed.tool_calls.iter().all(Result::is_ok));
            follow(&tokenizer, grammar, &text(most + 1)).unwrap_err();
        }
    }
}

/// A call of Llama's may begin without a mark, so no grammar could tell it from text.
#[test]
fn only_marked_calls_are_told_from_text() {
    for (format, expected) in [
        (ToolCallFormat::Hermes, true),
        (ToolCallFormat::QwenXml, true),
        (ToolCallFormat::Llama3, false),
    ] {
        let grammar = AnswerGrammar {
            format,
            token_id: &|_| Some(5),
        };
        assert_eq!(grammar.tells_calls_from_text(), expected);
    }
}

#[test]
fn the_seeds_of_the_fuzz_target_are_followed() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/seeds/json_schema");
    let mut seeds = 0;
    for seed in fs_err::read_dir(folder).unwrap() {
        let bytes = fs_err::read(seed.unwrap().path()).unwrap();
        serde_json::from_slice::<Value>(&bytes[1..]).unwrap();
        for kind in 0..12 {
            fuzz_schema(&[&[kind], &bytes[1..]].concat());
        }
        seeds += 1;
    }
    assert!(seeds >= 3);
}
