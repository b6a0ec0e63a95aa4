//! What an answer must look like, from `response_format`, `tool_choice` and strict tools.

use serde_json::{Map, Value, json};

use super::wire::{ChatRequest, kind};
use super::{ApiError, App};
use crate::chat::{AnswerGrammar, AnswerReasoning, AnswerShape, ToolSpec};
use crate::engine::{EngineError, Guide, GuideFactory};

/// What `response_format` asks for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ResponseFormat {
    Text,
    Json { schema: Value, is_strict: bool },
}

impl ResponseFormat {
    pub(super) fn read(format: Option<&Map<String, Value>>) -> Result<Self, ApiError> {
        let refuse = |message: String| ApiError::invalid("response_format", message);
        let Some(format) = format else {
            return Ok(Self::Text);
        };
        match format.get("type").and_then(Value::as_str) {
            Some("text") => Ok(Self::Text),
            Some("json_object") => Ok(Self::Json {
                schema: json!({"type": "object"}),
                is_strict: false,
            }),
            Some("json_schema") => {
                let named = format.get("json_schema").and_then(Value::as_object);
                let schema = named.and_then(|named| named.get("schema"));
                let Some(schema @ Value::Object(_)) = schema else {
                    return Err(refuse(
                        "`json_schema` must be an object with a `schema`, which is one, too"
                            .to_owned(),
                    ));
                };
                let is_strict = named.and_then(|named| named.get("strict")?.as_bool());
                Ok(Self::Json {
                    schema: schema.clone(),
                    is_strict: is_strict.unwrap_or(false),
                })
            }
            _ => Err(refuse(
                "its `type` must be `text`, `json_object` or `json_schema`".to_owned(),
            )),
        }
    }
}

/// What `tool_choice` asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    Auto,
    None,
    /// A call of some tool.
    Required,
    /// A call of this tool.
    Named(String),
}

impl ToolChoice {
    pub(super) fn read(choice: Option<&Value>) -> Result<Self, ApiError> {
        let refuse = |message: String| ApiError::invalid("tool_choice", message);
        match choice {
            None | Some(Value::Null) => Ok(Self::Auto),
            Some(Value::String(choice)) => match choice.as_str() {
                "auto" => Ok(Self::Auto),
                "none" => Ok(Self::None),
                "required" => Ok(Self::Required),
                other => Err(refuse(format!(
                    "`{}` is none of `auto`, `none`, `required` and `{{\"type\": \"function\", \
                     \"function\": {{\"name\": …}}}}`",
                    other.chars().take(100).collect::<String>()
                ))),
            },
            Some(Value::Object(choice)) => {
                let name = choice.get("function").and_then(|f| f.get("name")?.as_str());
                name.map(|name| Self::Named(name.to_owned()))
                    .ok_or_else(|| refuse("its `function` has no `name`".to_owned()))
            }
            Some(other) => Err(refuse(format!(
                "`tool_choice` must be a string or an object, not {}",
                kind(other)
            ))),
        }
    }
}

/// Returns what the answers of a request must keep to; `None` if they are free.
pub(super) fn guide(
    app: &App,
    request: &ChatRequest,
    format: &ResponseFormat,
    choice: &ToolChoice,
    tools: &[ToolSpec],
    reasoning: AnswerReasoning,
) -> Result<Option<Guide>, ApiError> {
    let token_id = |mark: &str| app.model.tokenizer.token_to_id(mark);
    let grammar = AnswerGrammar {
        format: app.model.tool_call_format,
        token_id: &token_id,
    };
    let is_strict = |tool: &ToolSpec| tool.extra.get("strict") == Some(&Value::Bool(true));
    let (param, shape) = match (choice, format) {
        (ToolChoice::Required | ToolChoice::Named(_), _) => {
            let param = "tool_choice";
            let tools = match choice {
                ToolChoice::Named(name) => {
                    let at = tools.iter().position(|tool| tool.name == *name);
                    &tools[at.map_or(0..0, |at| at..at + 1)]
                }
                _ => tools,
            };
            if tools.is_empty() {
                let message = "a call is asked for of a tool that is not among `tools`";
                return Err(ApiError::invalid(param, message));
            }
            let allows_many = *choice == ToolChoice::Required && request.allows_parallel_calls;
            (param, AnswerShape::Calls { tools, allows_many })
        }
        (_, ResponseFormat::Json { schema, is_strict }) => (
            "response_format",
            AnswerShape::Json {
                schema,
                is_strict: *is_strict,
                tools,
            },
        ),
        (ToolChoice::Auto, ResponseFormat::Text)
            if tools.iter().any(is_strict) && grammar.tells_calls_from_text() =>
        {
            ("tools", AnswerShape::TextAndCalls { tools })
        }
        (ToolChoice::Auto | ToolChoice::None, ResponseFormat::Text) => return Ok(None),
    };
    let common = &request.common;
    for (name, is_used) in [
        ("ignore_eos", common.ignore_eos),
        (
            "min_tokens",
            common.min_tokens.is_some_and(|least| least > 0),
        ),
    ] {
        if is_used {
            let message =
                format!("`{name}` cannot be used beside `{param}`, which says where to end");
            return Err(ApiError::invalid(name, message));
        }
    }
    let guide = app.guides()?.compile(grammar.write(&shape, reasoning));
    guide.map(Some).map_err(|error| match error {
        EngineError::InvalidGrammar { .. } => ApiError::invalid(param, error.to_string()),
        error => ApiError::internal(&error),
    })
}

impl App {
    /// Returns what compiles grammars, made when it is first needed.
    fn guides(&self) -> Result<&GuideFactory, ApiError> {
        let made = self.guides.get_or_init(|| {
            let vocab_size = self.engine.limits().vocab_size;
            GuideFactory::new(
                &self.model.tokenizer,
                vocab_size,
                &self.model.stop_token_ids,
            )
        });
        made.as_ref().map_err(|error| ApiError::internal(error))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::chat::{ToolCallFormat, parse_calls};
    use crate::engine::Tokenizer;

    const MARKS: [&str; 5] = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|end|>",
    ];

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
        let shape = AnswerShape::TextAndCalls { tools: &tools };
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
        follow("I call.\n<tool_call>\n{\"name\": \"done\", \"arguments\": {}}\n</tool_call>")
            .unwrap();
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

    #[rstest]
    #[case::not_a_schema(json!(5))]
    #[case::bad_pattern(json!({"type": "string", "pattern": "("}))]
    #[case::elsewhere(json!({"$ref": "https://example.org/schema.json"}))]
    #[case::nothing_fits(json!({"allOf": [{"type": "string"}, {"type": "integer"}]}))]
    #[case::too_long(json!({"const": "x".repeat(1 << 20)}))]
    fn a_schema_that_cannot_be_is_refused(#[case] schema: Value) {
        let tokenizer = tokenizer(true);
        let shape = AnswerShape::Json {
            schema: &schema,
            is_strict: false,
            tools: &[],
        };
        let grammar = grammar(
            ToolCallFormat::Hermes,
            &tokenizer,
            &shape,
            AnswerReasoning::Optional,
        );
        let error = factory(&tokenizer).compile(grammar).unwrap_err();
        assert!(
            matches!(error, EngineError::InvalidGrammar { .. }),
            "{error}"
        );
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
}
