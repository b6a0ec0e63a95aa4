//! What an answer must look like, from `response_format`, `tool_choice` and strict tools.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::wire::{ChatRequest, Keys, kind};
use super::{ApiError, App};
use crate::chat::{AnswerGrammar, AnswerReasoning, AnswerShape, ToolSpec};
use crate::engine::{EngineError, Guide, GuideFactory, SamplingParams};

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

/// What the answers of a request must keep to.
#[derive(Debug)]
pub(super) struct Guidance {
    /// The field that says it.
    pub(super) param: &'static str,
    grammar: String,
}

impl Guidance {
    /// Reads what a request says of its answers; `None` if they are free.
    pub(super) fn read(
        app: &App,
        request: &ChatRequest,
        format: &ResponseFormat,
        choice: &ToolChoice,
        tools: &[ToolSpec],
        reasoning: AnswerReasoning,
    ) -> Result<Option<Self>, ApiError> {
        let token_id = |mark: &str| app.model.tokenizer.token_to_id(mark);
        let grammar = AnswerGrammar {
            format: app.model.tool_call_format,
            token_id: &token_id,
        };
        let allows_many = request.allows_parallel_calls;
        let tells_calls = grammar.tells_calls_from_text();
        let shape = shape(format, choice, tools, allows_many, tells_calls)?;
        let Some((param, shape)) = shape else {
            return Ok(None);
        };
        let grammar = grammar.write(&shape, reasoning).map_err(|error| {
            ApiError::invalid(
                param,
                format!("cannot guide an answer by this schema: {error}"),
            )
        })?;
        Ok(Some(Self { param, grammar }))
    }

    /// Makes the guide of the answers. A client that goes away while its request waits takes no turn; what
    /// is being compiled is compiled to its end, but holds nothing that the server's end would wait for.
    pub(super) async fn compile(self, app: &App) -> Result<Guide, ApiError> {
        let Self { param, grammar } = self;
        let factory = Arc::clone(app.guides()?);
        let turn = Arc::clone(&app.compilers).acquire_owned().await;
        let turn = turn.map_err(|error| ApiError::internal(&error))?;
        let compile = move || {
            let guide = factory.compile(grammar);
            drop(turn);
            guide
        };
        let guide = tokio::task::spawn_blocking(compile).await;
        let guide = guide.map_err(|error| ApiError::internal(&error))?;
        guide.map_err(|error| match error {
            EngineError::InvalidGrammar { .. } => ApiError::invalid(param, error.to_string()),
            error => ApiError::internal(&error),
        })
    }
}

/// Returns the shape that answers must have, and the field that says so; `None` if they are free.
fn shape<'a>(
    format: &'a ResponseFormat,
    choice: &ToolChoice,
    tools: &'a [ToolSpec],
    allows_many: bool,
    tells_calls_from_text: bool,
) -> Result<Option<(&'static str, AnswerShape<'a>)>, ApiError> {
    let is_strict = |tool: &ToolSpec| tool.extra.get("strict") == Some(&Value::Bool(true));
    Ok(Some(match (choice, format) {
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
            let allows_many = *choice == ToolChoice::Required && allows_many;
            (param, AnswerShape::Calls { tools, allows_many })
        }
        (_, ResponseFormat::Json { schema, is_strict }) => (
            "response_format",
            AnswerShape::Json {
                schema,
                is_strict: *is_strict,
                tools,
                allows_many,
            },
        ),
        (ToolChoice::Auto, ResponseFormat::Text)
            if tools.iter().any(is_strict) && tells_calls_from_text =>
        {
            ("tools", AnswerShape::TextAndCalls { tools, allows_many })
        }
        (ToolChoice::Auto | ToolChoice::None, ResponseFormat::Text) => return Ok(None),
    }))
}

impl App {
    /// Returns what compiles grammars, made when it is first needed: that takes its time.
    fn guides(&self) -> Result<&Arc<GuideFactory>, ApiError> {
        let made = self.guides.get_or_init(|| {
            let vocab_size = self.engine.limits().vocab_size;
            let made = GuideFactory::new(
                &self.model.tokenizer,
                vocab_size,
                &self.model.stop_token_ids,
            );
            made.map(Arc::new)
        });
        made.as_ref().map_err(|error| ApiError::internal(error))
    }

    /// Refuses parameters that would keep an answer from ending where its guide does.
    pub(super) fn check_guided(&self, params: &SamplingParams, keys: Keys) -> Result<(), ApiError> {
        self.guides()?.check(params).map_err(|error| match error {
            EngineError::InvalidSampling {
                field: "stop_token_ids",
                reason,
            } => ApiError::invalid("ignore_eos", format!("invalid `ignore_eos`: {reason}")),
            error => keys.refuse(error),
        })
    }
}

/// Writes and compiles the grammar of any schema, for fuzzing, and follows it for some tokens: the first byte
/// says which shape and format, the rest is the schema.
///
/// # Panics
///
/// Panics if a grammar that was compiled cannot be followed by a token that it admits.
#[cfg(any(fuzzing, test))]
pub fn fuzz_schema(bytes: &[u8]) {
    use crate::chat::ToolCallFormat;
    use crate::engine::Tokenizer;

    let Some((&kind, schema)) = bytes.split_first() else {
        return;
    };
    let Ok(schema) = serde_json::from_slice::<Value>(schema) else {
        return;
    };
    let tokenizer = Tokenizer::byte_level(&["<|end|>"]).expect("a vocabulary of bytes");
    let end = 256;
    let factory = GuideFactory::new(&tokenizer, 257, &[end]).expect("a stop token");
    let is_strict = kind & 1 == 1;
    let mut tool = ToolSpec::new("f", "", schema.clone());
    tool.extra.insert("strict".to_owned(), is_strict.into());
    let tools = [tool];
    let shape = match kind & 2 {
        0 => AnswerShape::Json {
            schema: &schema,
            is_strict,
            tools: &[],
            allows_many: false,
        },
        _ => AnswerShape::Calls {
            tools: &tools,
            allows_many: false,
        },
    };
    let formats = [
        ToolCallFormat::Hermes,
        ToolCallFormat::QwenXml,
        ToolCallFormat::Llama3,
    ];
    let grammar = AnswerGrammar {
        format: formats[usize::from(kind >> 2) % formats.len()],
        token_id: &|_| None,
    };
    let Ok(grammar) = grammar.write(&shape, AnswerReasoning::Off) else {
        return;
    };
    let Ok(mut guide) = factory.compile(grammar) else {
        return;
    };
    for _ in 0..16 {
        let Some(token) = (0..end).find(|&token| guide.admits(token)) else {
            return;
        };
        let ran_out = guide.failure().is_some();
        guide.push(token);
        assert!(
            ran_out || guide.failure().is_none(),
            "{:?}",
            guide.failure()
        );
    }
}

#[cfg(test)]
mod tests;
