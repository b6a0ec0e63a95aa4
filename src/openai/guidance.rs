//! What an answer must look like, from `response_format`, `tool_choice` and strict tools.

use serde_json::{Map, Value, json};

use super::wire::{ChatRequest, kind};
use super::{ApiError, App};
use crate::chat::{AnswerGrammar, AnswerReasoning, AnswerShape, ToolSpec};
use crate::engine::{EngineError, Guide, GuideFactory};

/// What `response_format` asks for.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ResponseFormat {
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
pub(super) enum ToolChoice {
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
