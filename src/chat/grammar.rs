//! What an answer must look like, as a grammar: JSON of a schema, or tool calls.
//!
//! Grammars are written in the dialect of Lark that llguidance reads. Marks that are one token of the
//! model, `<tool_call>` and `<think>`, stand in them as tokens, so the same characters inside a string
//! end nothing.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::schema::{Document, SchemaError, Schemas, Written, is_keyword};
use super::tool_parser::{
    FUNCTION, FUNCTION_END, MAX_TOOL_CALLS, PARAMETER, PARAMETER_END, TOOL_CALL, TOOL_CALL_END,
    is_element_name,
};
use super::{THINK, THINK_END, ToolCallFormat, ToolSpec};

/// Blanks between the parts of JSON. A small model that may write blanks for ever does.
const BLANKS: &str = "[ \\n]{1,16}";
/// Any text without marks.
const TEXT: &str = "/(.|\\n)+/";

/// What an answer consists of.
#[derive(Debug, Clone)]
pub enum AnswerShape<'a> {
    /// JSON of a schema.
    Json {
        /// The schema.
        schema: &'a Value,
        /// Whether parts of the schema that cannot be enforced are an error; else they are left out.
        is_strict: bool,
        /// Tools of which the answer may be a call instead.
        tools: &'a [ToolSpec],
        /// Whether it may be more than one call.
        allows_many: bool,
    },
    /// Calls of these tools, one at least, and nothing else.
    Calls {
        /// The tools.
        tools: &'a [ToolSpec],
        /// Whether there may be more than one call.
        allows_many: bool,
    },
    /// Text, and behind it calls of these tools, if any.
    TextAndCalls {
        /// The tools.
        tools: &'a [ToolSpec],
        /// Whether there may be more than one call.
        allows_many: bool,
    },
}

/// Whether the model reasons before it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerReasoning {
    /// It may, between `<think>` and `</think>`, if it has such tokens.
    Optional,
    /// The prompt has opened it.
    Open,
    /// It must not.
    Off,
}

/// Writes grammars for the answers of one model.
#[expect(missing_debug_implementations, reason = "a function has none")]
pub struct AnswerGrammar<'a> {
    /// How it writes tool calls.
    pub format: ToolCallFormat,
    /// Returns the id of a mark that is one token of the model.
    pub token_id: &'a dyn Fn(&str) -> Option<u32>,
}

impl AnswerGrammar<'_> {
    /// Returns whether calls can be told from text while an answer is written, which
    /// [`AnswerShape::TextAndCalls`] needs: where each begins with a mark that is one token. Llama's may
    /// begin with none.
    pub fn tells_calls_from_text(&self) -> bool {
        match self.format {
            ToolCallFormat::Hermes | ToolCallFormat::QwenXml => {
                (self.token_id)(self.format.opening_mark()).is_some()
            }
            ToolCallFormat::Llama3 => false,
        }
    }

    /// Returns the grammar of an answer.
    ///
    /// # Errors
    ///
    /// Fails if a schema refers to something that is not there, is more than a limit, or has what cannot
    /// be written in calls of this format.
    pub fn write(
        &self,
        shape: &AnswerShape<'_>,
        reasoning: AnswerReasoning,
    ) -> Result<String, SchemaError> {
        let mut rules = Rules::default();
        let answer = match shape {
            AnswerShape::Json {
                schema,
                is_strict,
                tools,
                allows_many,
            } => {
                let standalone = rules.schemas.add(&Document::new(schema), schema)?;
                rules.add("json", &json_rule(standalone, *is_strict));
                if tools.is_empty() {
                    "json".to_owned()
                } else {
                    format!("json | {}", self.calls(tools, *allows_many, &mut rules)?)
                }
            }
            AnswerShape::Calls { tools, allows_many } => {
                self.calls(tools, *allows_many, &mut rules)?
            }
            AnswerShape::TextAndCalls { tools, allows_many } => {
                format!(
                    "({TEXT})? ({})?",
                    self.calls(tools, *allows_many, &mut rules)?
                )
            }
        };
        rules.add("answer", &answer);
        let start = match (
            reasoning,
            (self.token_id)(THINK),
            (self.token_id)(THINK_END),
        ) {
            (AnswerReasoning::Open, _, Some(end)) => {
                format!("({TEXT})? <[{end}]> /\\n{{1,2}}/? answer")
            }
            (AnswerReasoning::Optional, Some(begin), Some(end)) => {
                format!("(<[{begin}]> ({TEXT})? <[{end}]> /\\n{{1,2}}/?)? answer")
            }
            _ => "answer".to_owned(),
        };
        Ok(format!("start: {start}\n{}", rules.text))
    }

    /// Returns what calls of any of the tools look like.
    fn calls(
        &self,
        tools: &[ToolSpec],
        allows_many: bool,
        rules: &mut Rules,
    ) -> Result<String, SchemaError> {
        let mut names = Vec::with_capacity(tools.len());
        for (at, tool) in tools.iter().enumerate() {
            let rule = match self.format {
                ToolCallFormat::Hermes => json_call(tool, "arguments", rules)?,
                ToolCallFormat::Llama3 => json_call(tool, "parameters", rules)?,
                ToolCallFormat::QwenXml => xml_call(at, tool, rules)?,
            };
            names.push(format!("call_{at}"));
            rules.add(&names[at], &rule);
        }
        let any = names.join(" | ");
        let call = match self.format {
            ToolCallFormat::Llama3 => any,
            ToolCallFormat::Hermes | ToolCallFormat::QwenXml => format!(
                r#"{} "\n" ({any}) "\n" {}"#,
                self.mark(TOOL_CALL),
                self.mark(TOOL_CALL_END),
            ),
        };
        rules.add("call", &call);
        let is_alone = self.format == ToolCallFormat::Llama3 || !allows_many;
        Ok(if is_alone {
            "call".to_owned()
        } else {
            format!(r#"call ("\n" call){{0,{}}}"#, MAX_TOOL_CALLS - 1)
        })
    }

    fn mark(&self, mark: &str) -> String {
        (self.token_id)(mark).map_or_else(|| literal(mark), |id| format!("<[{id}]>"))
    }
}

/// Rules of a grammar, and the schemas that are in them.
#[derive(Default)]
struct Rules {
    text: String,
    schemas: Schemas,
}

impl Rules {
    fn add(&mut self, name: &str, rule: &str) {
        self.text.push_str(name);
        self.text.push_str(": ");
        self.text.push_str(rule);
        self.text.push('\n');
    }
}

/// Returns a call as JSON, whose arguments stand under `key`. Each tool has a schema of its own, so that
/// some can be strict and no two share definitions.
fn json_call(tool: &ToolSpec, key: &str, rules: &mut Rules) -> Result<String, SchemaError> {
    let schema = parameters(tool);
    let mut arguments = rules.schemas.add(&Document::new(&schema), &schema)?;
    let mut definitions = None;
    if let Some(fields) = arguments.as_object_mut() {
        definitions = fields.remove("$defs");
        if !fields.contains_key("$ref") {
            fields.entry("type").or_insert_with(|| json!("object"));
        }
    }
    let mut call = json!({
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": false,
    });
    if let Some(definitions) = definitions {
        call["$defs"] = definitions;
    }
    Ok(json_rule(call, is_strict(tool)))
}

/// Returns a call in XML: its arguments in the schema's order, each once, those that are not required
/// perhaps not.
fn xml_call(tool_at: usize, tool: &ToolSpec, rules: &mut Rules) -> Result<String, SchemaError> {
    let spelled = |name: &str| {
        let unwritable = || SchemaError::UnwritableName {
            name: name.chars().take(200).collect(),
        };
        is_element_name(name).then_some(()).ok_or_else(unwritable)
    };
    spelled(&tool.name)?;
    let (schema, none, anything) = (parameters(tool), Map::new(), Value::Bool(true));
    let document = Document::new(&schema);
    let top = document.top().unwrap_or(&none);
    if is_strict(tool) {
        let unenforced = top.keys().find(|key| !is_enforced_at_the_top(key));
        if let Some(keyword) = unenforced {
            return Err(SchemaError::NotEnforced {
                keyword: keyword.chars().take(200).collect(),
            });
        }
    }
    let properties = top
        .get("properties")
        .and_then(Value::as_object)
        .unwrap_or(&none);
    let required = top.get("required").and_then(Value::as_array);
    let required: BTreeSet<&str> = required
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let undescribed = required
        .iter()
        .filter(|name| !properties.contains_key(**name));
    let all = properties
        .iter()
        .map(|(name, property)| (name.as_str(), property))
        .chain(undescribed.map(|name| (*name, &anything)));
    let end = literal(&format!("\n{PARAMETER_END}\n"));
    let mut rule = literal(&format!("{FUNCTION}{}>\n", tool.name));
    for (at, (name, property)) in all.enumerate() {
        spelled(name)?;
        let standalone = rules.schemas.add(&document, property)?;
        let value = match document.written(property) {
            Written::Text {
                choices: Some(choices),
            } => {
                let choices: Vec<String> = choices.into_iter().map(literal).collect();
                format!("({}) {end}", choices.join(" | "))
            }
            Written::Text { choices: None } => {
                let text = format!("text_{tool_at}_{at}");
                rules.add(&format!("{text}[suffix={end}]"), "/(.|\\n)*/");
                text
            }
            Written::Json(_) => format!("{} {end}", json_rule(standalone, is_strict(tool))),
        };
        let argument = format!("argument_{tool_at}_{at}");
        let begin = literal(&format!("{PARAMETER}{name}>\n"));
        rules.add(&argument, &format!("{begin} {value}"));
        let mark = if required.contains(name) { "" } else { "?" };
        rule.push(' ');
        rule.push_str(&argument);
        rule.push_str(mark);
    }
    rule.push(' ');
    rule.push_str(&literal(FUNCTION_END));
    Ok(rule)
}

/// Returns whether calls in XML keep to a keyword of the arguments as a whole: no others are written than
/// those that the schema names.
fn is_enforced_at_the_top(key: &str) -> bool {
    let is_kept = ["type", "properties", "required", "additionalProperties"].contains(&key);
    is_kept || !is_keyword(key)
}

fn parameters(tool: &ToolSpec) -> Value {
    let anything = || json!({"type": "object"});
    tool.parameters.clone().unwrap_or_else(anything)
}

fn is_strict(tool: &ToolSpec) -> bool {
    tool.extra.get("strict") == Some(&Value::Bool(true))
}

/// Returns the rule of JSON of a schema.
fn json_rule(schema: Value, is_strict: bool) -> String {
    let mut schema = match schema {
        Value::Object(fields) => fields,
        // `true` admits anything, and what is no schema is told by who compiles it.
        Value::Bool(true) => Map::new(),
        other => return format!("%json {other}"),
    };
    schema.insert(
        "x-guidance".to_owned(),
        json!({"whitespace_pattern": BLANKS, "lenient": !is_strict}),
    );
    format!("%json {}", escaped(&Value::Object(schema)))
}

fn literal(text: &str) -> String {
    escaped(&Value::from(text))
}

/// Returns JSON as Lark reads it, which has no raw delete character.
fn escaped(value: &Value) -> String {
    value.to_string().replace('\u{7f}', "\\u007f")
}
