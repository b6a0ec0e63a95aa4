//! What is read, what is refused, and that nothing breaks the parser.

use std::slice;

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn only_error(text: &str) -> ToolCallError {
    let turn = parse_turn(text);
    assert_eq!(turn.tool_calls.len(), 1, "{turn:?}");
    turn.tool_calls[0].clone().unwrap_err()
}

#[test]
fn text_without_calls_is_content() {
    let turn = parse_turn("  4 is the answer\n");
    assert_eq!(turn.content, "  4 is the answer\n");
    assert_eq!(turn.reasoning, None);
    assert!(turn.tool_calls.is_empty());
}

#[test]
fn parallel_calls_keep_their_order() {
    let turn = parse_turn(
        "a\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\nb\n\
         <tool_call>{\"name\": \"g\", \"arguments\": {\"x\": 1}}</tool_call>",
    );
    assert_eq!(turn.content, "a\nb");
    let calls: Vec<ToolCall> = turn.tool_calls.into_iter().map(Result::unwrap).collect();
    assert_eq!(
        calls,
        [
            ToolCall::new("f", json!({})),
            ToolCall::new("g", json!({"x": 1}))
        ]
    );
}

#[test]
fn closing_marks_inside_strings_do_not_end_a_call() {
    let turn = parse_turn(
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"</tool_call></think>\"}}</tool_call>",
    );
    assert_eq!(
        turn.tool_calls,
        [Ok(ToolCall::new("f", json!({"x": "</tool_call></think>"})))]
    );
    assert_eq!(turn.reasoning, None);
}

#[test]
fn calls_inside_reasoning_are_not_made() {
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let turn = parse_turn(&format!("<think>\nmaybe {call}\n</think>\n\nno"));
    assert_eq!(turn.content, "no");
    assert!(turn.tool_calls.is_empty(), "{turn:?}");
    let open = parse_turn(&format!("<think>\nmaybe {call}"));
    assert!(open.tool_calls.is_empty(), "{open:?}");
    assert_eq!(open.content, "");
}

#[test]
fn reasoning_opened_by_the_prompt_needs_no_opening_mark() {
    let turn = parse_turn("hm\n</think>\n\n4");
    assert_eq!(turn.reasoning.as_deref(), Some("hm"));
    assert_eq!(turn.content, "4");
}

#[test]
fn string_arguments_are_read() {
    let turn = parse_turn(r#"<tool_call>{"name": "f", "arguments": "{\"x\": 1}"}</tool_call>"#);
    assert_eq!(turn.tool_calls, [Ok(ToolCall::new("f", json!({"x": 1})))]);
}

#[test]
fn unreadable_calls_say_what_is_wrong() {
    assert_eq!(
        only_error("<tool_call>\n{\"name\": \"f\""),
        ToolCallError::Truncated {
            end: "</tool_call>"
        }
    );
    assert_eq!(
        only_error("<tool_call>"),
        ToolCallError::Truncated {
            end: "</tool_call>"
        }
    );
    assert_eq!(
        only_error("<tool_call>{\"name\": \"f\", \"arguments\": {}}"),
        ToolCallError::Truncated {
            end: "</tool_call>"
        }
    );
    assert!(matches!(
        only_error("<tool_call>{'name': 'f'}</tool_call>"),
        ToolCallError::InvalidJson { .. }
    ));
    assert_eq!(
        only_error("<tool_call>{\"name\": \"f\", \"arguments\": {}} {}</tool_call>"),
        ToolCallError::TrailingText
    );
    assert_eq!(
        only_error("<tool_call>[]</tool_call>").to_string(),
        "tool call must be a JSON object with `name` and `arguments`, found an array"
    );
    assert_eq!(
        only_error("<tool_call>{\"arguments\": {}}</tool_call>"),
        ToolCallError::MissingName
    );
    assert!(matches!(
        only_error("<tool_call>{\"name\": \"f\"}</tool_call>"),
        ToolCallError::MissingArguments { .. }
    ));
    assert!(matches!(
        only_error("<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>"),
        ToolCallError::ArgumentsNotAnObject { .. }
    ));
}

#[test]
fn a_broken_call_does_not_hide_the_next_one() {
    let turn = parse_turn(
        "<tool_call>{oops}</tool_call><tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
    );
    assert!(matches!(
        turn.tool_calls[0],
        Err(ToolCallError::InvalidJson { .. })
    ));
    assert_eq!(turn.tool_calls[1], Ok(ToolCall::new("f", json!({}))));
}

#[test]
fn deep_nesting_is_an_error_and_not_a_stack_overflow() {
    let text = format!("<tool_call>{}</tool_call>", "[".repeat(100_000));
    assert!(matches!(
        only_error(&text),
        ToolCallError::InvalidJson { .. }
    ));
}

#[test]
fn the_number_of_calls_is_bounded() {
    let turn = parse_turn(&"<tool_call>{}</tool_call>".repeat(1000));
    assert_eq!(turn.tool_calls.len(), MAX_TOOL_CALLS + 1);
}

fn specs() -> Vec<ToolSpec> {
    vec![ToolSpec::new(
        "f",
        "",
        json!({"type": "object", "properties": {
            "code": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "boolean"},
            "items": {"type": "array"}, "maybe": {"type": ["string", "null"]},
            "scale": {"type": ["number", "null"]}
        }}),
    )]
}

fn xml(text: &str) -> ParsedTurn {
    parse_turn_as(text, ToolCallFormat::QwenXml, &specs())
}

fn llama(text: &str) -> ParsedTurn {
    parse_turn_as(text, ToolCallFormat::Llama3, &[])
}

/// The text that Qwen3.5's template writes for a call.
#[test]
fn elements_are_read_with_the_types_of_the_schema() {
    let turn = xml(
        "<think>\nhm\n</think>\n\nI run it.\n\n<tool_call>\n<function=f>\n<parameter=code>\n\
         print(1)\n\nx = '5'\n</parameter>\n<parameter=count>\n5\n</parameter>\n\
         <parameter=deep>\nTrue\n</parameter>\n<parameter=items>\n[1, \"a\"]\n</parameter>\n\
         <parameter=maybe>\nnull\n</parameter>\n<parameter=scale>\nNone\n</parameter>\n\
         <parameter=other>\n7\n</parameter>\n</function>\n</tool_call>",
    );
    assert_eq!(turn.reasoning.as_deref(), Some("hm"));
    assert_eq!(turn.content, "I run it.");
    let expected = json!({
        "code": "print(1)\n\nx = '5'", "count": 5, "deep": true, "items": [1, "a"],
        "maybe": null, "scale": null, "other": "7",
    });
    assert_eq!(turn.tool_calls, [Ok(ToolCall::new("f", expected))]);
}

#[test]
fn closing_elements_inside_a_value_do_not_end_it() {
    let code = "s = '</parameter>'\nt = '</function></tool_call>'\n<tool_call>";
    let turn = xml(&format!(
        "<tool_call>\n<function=f>\n<parameter=code>\n{code}\n</parameter>\n</function>\n</tool_call>"
    ));
    assert_eq!(
        turn.tool_calls,
        [Ok(ToolCall::new("f", json!({"code": code})))]
    );
}

#[test]
fn unreadable_elements_say_what_is_wrong() {
    let error = |text: &str| {
        let turn = xml(text);
        assert_eq!(turn.tool_calls.len(), 1, "{turn:?}");
        turn.tool_calls[0].clone().unwrap_err().to_string()
    };
    for cut_off in [
        "<tool_call>",
        "<tool_call>\n<func",
        "<tool_call>\n<function=f",
        "<tool_call>\n<function=f>",
        "<tool_call>\n<function=f>\n<parameter=code>\nx",
        "<tool_call>\n<function=f>\n<parameter=code>\nx\n</parameter>",
        "<tool_call>\n<function=f>\n<parameter=code>\nx\n</parameter>\n</function>",
        "<tool_call>\n<function=f></function>",
    ] {
        assert!(
            error(cut_off).contains("cut off"),
            "{cut_off}: {}",
            error(cut_off)
        );
    }
    for (text, part) in [
        ("<tool_call>f(1)</tool_call>", "expected `<function=…>`"),
        (
            "<tool_call><function=></function></tool_call>",
            "not one word",
        ),
        (
            "<tool_call><function=f>x</function></tool_call>",
            "expected `<parameter=…>`",
        ),
        (
            "<tool_call><function=f><parameter=a>1</parameter>x</function></tool_call>",
            "must precede",
        ),
        (
            "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter>\
             </function></tool_call>",
            "`a` is given twice",
        ),
        (
            "<tool_call><function=f></function> x</tool_call>",
            "more than one",
        ),
    ] {
        assert!(error(text).contains(part), "{text}: {}", error(text));
    }
}

#[test]
fn either_content_of_the_tags_is_understood() {
    let call = Ok(ToolCall::new("f", json!({"code": "1"})));
    let elements = "<tool_call><function=f><parameter=code>1</parameter></function></tool_call>";
    let object = "<tool_call>{\"name\": \"f\", \"arguments\": {\"code\": \"1\"}}</tool_call>";
    for text in [elements, object] {
        assert_eq!(parse_turn(text).tool_calls, slice::from_ref(&call));
        assert_eq!(xml(text).tool_calls, slice::from_ref(&call));
    }
}

#[test]
fn objects_of_llama_are_read_with_and_without_a_tag() {
    let one = r#"{"name": "f", "parameters": {"x": 1}}"#;
    let two = r#"{"type": "function", "name": "g", "parameters": {}}"#;
    let f = Ok(ToolCall::new("f", json!({"x": 1})));
    let g = Ok(ToolCall::new("g", json!({})));
    assert_eq!(llama(one).tool_calls, slice::from_ref(&f));
    assert_eq!(
        llama(&format!("  {one}; {two}<|eom_id|>")).tool_calls,
        [f.clone(), g]
    );
    let turn = llama(&format!("I look.<|python_tag|>{one}<|eot_id|>"));
    assert_eq!(
        (turn.content.as_str(), turn.tool_calls),
        ("I look.", vec![f])
    );
    let turn = llama("{\"a\": 1} is an object");
    assert_eq!(
        (turn.content.as_str(), turn.tool_calls),
        ("{\"a\": 1} is an object", vec![])
    );
}

#[test]
fn damaged_objects_of_llama_say_what_is_wrong() {
    for (text, part) in [
        (r#"{"name": "f", "parameters": {"x": 1}"#, "cut off"),
        (
            r#"{"name": "f", "parameters": [1]}"#,
            "`parameters` of tool call `f`",
        ),
        (
            r#"{"name": "f", 'parameters': {}, "arguments": {}}"#,
            "not valid JSON",
        ),
        ("<|python_tag|>print(1)", "not valid JSON"),
        ("<|python_tag|>", "cut off"),
        ("<|python_tag|>{\"name\": \"f\"}", "no `parameters`"),
    ] {
        let turn = llama(text);
        assert_eq!(turn.tool_calls.len(), 1, "{turn:?}");
        let error = turn.tool_calls[0].clone().unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
    let trailing = llama(r#"{"name": "f", "parameters": {}} and so on"#);
    assert_eq!(trailing.tool_calls[1], Err(ToolCallError::TrailingText));
}

#[test]
fn formats_are_told_by_their_templates() {
    let Some(shared) = std::env::var_os("WARDIAN_SHARED") else {
        println!("skipped: WARDIAN_SHARED is not set");
        return;
    };
    let folder = std::path::Path::new(&shared).join("models/chat_templates");
    for (name, format) in [
        ("qwen3", ToolCallFormat::Hermes),
        ("qwen2_5", ToolCallFormat::Hermes),
        ("qwen3_5_think", ToolCallFormat::QwenXml),
        ("qwen3_6", ToolCallFormat::QwenXml),
        ("llama3_1", ToolCallFormat::Llama3),
    ] {
        let template = fs_err::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        assert_eq!(ToolCallFormat::detect(&template), format, "{name}");
    }
}

#[test]
fn formats_have_names() {
    for (name, format) in ToolCallFormat::NAMES {
        assert_eq!(name.parse(), Ok(format));
        assert_eq!(format.to_string(), name);
        assert_eq!(serde_json::to_value(format).unwrap(), name);
    }
    let error = "xml".parse::<ToolCallFormat>().unwrap_err().to_string();
    assert!(error.contains("`qwen_xml`"), "{error}");
}

#[test]
fn content_ends_where_a_call_may_begin() {
    let hermes = |text: &str| ToolCallFormat::Hermes.content_end(text);
    assert_eq!(hermes("abc"), 3);
    assert_eq!(hermes("abc <tool"), 4);
    assert_eq!(hermes("a <b> <tool_call>{} x"), 6);
    assert_eq!(hermes("é<"), 2);
    let llama = |text: &str| ToolCallFormat::Llama3.content_end(text);
    assert_eq!([llama(" {\"a"), llama("a {"), llama("a<|py")], [0, 3, 1]);
}

fn json_object() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        any::<i64>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
        Just(Value::from("</tool_call>")),
        Just(Value::from("<tool_call>{")),
    ];
    let value = leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("\\PC{0,6}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    });
    prop::collection::btree_map("[a-z]{1,6}", value, 0..4)
        .prop_map(|map| Value::Object(map.into_iter().collect()))
}

proptest! {
    #[test]
    fn any_text_of_the_other_formats_is_accepted(
        text in "(\\PC|<tool_call>|</tool_call>|<function=f>|</function>|<parameter=a>|</parameter>|<\\|python_tag\\|>|\\{\"name\": \"f\", \"parameters\": \\{\\}\\}|;|\n){0,40}",
    ) {
        for format in [ToolCallFormat::QwenXml, ToolCallFormat::Llama3] {
            parse_turn_as(&text, format, &specs());
            prop_assert!(text.is_char_boundary(format.content_end(&text)));
        }
    }

    /// Code comes through as it was written, and a cut-off call is an error.
    #[test]
    fn written_elements_are_read_back(
        code in "(\\PC|\n|</parameter>|<tool_call>){0,20}",
        cut in any::<prop::sample::Index>(),
    ) {
        let text = format!(
            "<tool_call>\n<function=f>\n<parameter=code>\n{code}\n</parameter>\n</function>\n</tool_call>"
        );
        let call = ToolCall::new("f", json!({"code": code}));
        prop_assert_eq!(xml(&text).tool_calls, [Ok(call)]);
        let mut end = cut.index(text.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        for read in xml(&text[..end]).tool_calls {
            prop_assert!(read.is_err(), "{read:?}");
        }
    }

    #[test]
    fn any_text_is_accepted(text in "(\\PC|<tool_call>|</tool_call>|<think>|</think>|\\{|\"|\n){0,60}") {
        parse_turn(&text);
    }

    #[test]
    fn written_calls_are_read_back(arguments in json_object()) {
        let text = format!(
            "<tool_call>\n{{\"name\": \"f\", \"arguments\": {arguments}}}\n</tool_call>"
        );
        prop_assert_eq!(parse_turn(&text).tool_calls, [Ok(ToolCall::new("f", arguments))]);
    }

    /// Whatever is cut off, the result is the call that was meant or an error, never a call
    /// with other arguments.
    #[test]
    fn truncated_calls_never_lose_arguments(arguments in json_object(), cut in any::<prop::sample::Index>()) {
        let text = format!(
            "<tool_call>\n{{\"name\": \"f\", \"arguments\": {arguments}}}\n</tool_call>"
        );
        let mut end = cut.index(text.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        for call in parse_turn(&text[..end]).tool_calls {
            prop_assert_eq!(call, Err(ToolCallError::Truncated { end: "</tool_call>" }));
        }
    }
}
