//! What an answer must look like, as a grammar: JSON of a schema, or tool calls.
//!
//! Grammars are written in the dialect of Lark that llguidance reads. Marks that are one token of the
//! model, `<tool_call>` and `<think>`, stand in them as tokens, so the same characters inside a string
//! end nothing.

use serde_json::{Map, Value, json};

use super::tool_parser::{
    FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END, THINK, THINK_END, TOOL_CALL, TOOL_CALL_END,
};
use super::{ToolCallFormat, ToolSpec};

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
    /// [`AnswerShape::TextAndCalls`] needs: where the mark of a call is one token.
    pub fn tells_calls_from_text(&self) -> bool {
        (self.token_id)(self.format.opening_mark()).is_some()
    }

    /// Returns the grammar of an answer.
    pub fn write(&self, shape: &AnswerShape<'_>, reasoning: AnswerReasoning) -> String {
        let mut rules = Rules::default();
        let answer = match shape {
            AnswerShape::Json {
                schema,
                is_strict,
                tools,
            } => {
                rules.add("json", &json_rule(schema, *is_strict));
                if tools.is_empty() {
                    "json".to_owned()
                } else {
                    let call = self.call(tools, &mut rules);
                    rules.add("call", &call);
                    format!("json | {}", self.calls(true))
                }
            }
            AnswerShape::Calls { tools, allows_many } => {
                let call = self.call(tools, &mut rules);
                rules.add("call", &call);
                self.calls(*allows_many).to_owned()
            }
            AnswerShape::TextAndCalls { tools } => {
                let call = self.call(tools, &mut rules);
                rules.add("call", &call);
                format!("({TEXT})? ({})?", self.calls(true))
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
        format!("start: {start}\n{}", rules.text)
    }

    fn calls(&self, allows_many: bool) -> &'static str {
        match self.format {
            ToolCallFormat::Hermes | ToolCallFormat::QwenXml if allows_many => {
                r#"call ("\n" call)*"#
            }
            // A turn of Llama's is one call.
            ToolCallFormat::Hermes | ToolCallFormat::QwenXml | ToolCallFormat::Llama3 => "call",
        }
    }

    /// Returns what one call of any of the tools looks like.
    fn call(&self, tools: &[ToolSpec], rules: &mut Rules) -> String {
        match self.format {
            ToolCallFormat::Hermes => format!(
                r#"{} "\n" {} "\n" {}"#,
                self.mark(TOOL_CALL),
                json_rule(&call_schema(tools, "arguments"), false),
                self.mark(TOOL_CALL_END),
            ),
            ToolCallFormat::Llama3 => json_rule(&call_schema(tools, "parameters"), false),
            ToolCallFormat::QwenXml => {
                let calls: Vec<String> = (tools.iter().enumerate())
                    .map(|(at, tool)| {
                        let arguments = xml_arguments(at, tool, rules);
                        let begin = literal(&format!("\n{FUNCTION}{}>\n", tool.name));
                        format!("{begin} {arguments}")
                    })
                    .collect();
                format!(
                    "{} ({}) {} {}",
                    self.mark(TOOL_CALL),
                    calls.join(" | "),
                    literal(&format!("{FUNCTION_END}\n")),
                    self.mark(TOOL_CALL_END),
                )
            }
        }
    }

    fn mark(&self, mark: &str) -> String {
        (self.token_id)(mark).map_or_else(|| literal(mark), |id| format!("<[{id}]>"))
    }
}

#[derive(Default)]
struct Rules {
    text: String,
}

impl Rules {
    fn add(&mut self, name: &str, rule: &str) {
        self.text.push_str(name);
        self.text.push_str(": ");
        self.text.push_str(rule);
        self.text.push('\n');
    }
}

/// Returns the arguments of a call in XML: in the schema's order, each once, those that are not required
/// perhaps not.
fn xml_arguments(tool_at: usize, tool: &ToolSpec, rules: &mut Rules) -> String {
    let schema = tool.parameters.as_ref();
    let properties = schema
        .and_then(|schema| schema.get("properties")?.as_object())
        .cloned()
        .unwrap_or_default();
    let required = schema.and_then(|schema| schema.get("required")?.as_array());
    let is_required = |name: &str| {
        required.is_some_and(|names| names.iter().any(|known| known.as_str() == Some(name)))
    };
    let end = literal(&format!("\n{PARAMETER_END}\n"));
    let mut arguments = Vec::new();
    for (at, (name, property)) in properties.iter().enumerate() {
        let begin = literal(&format!("{PARAMETER}{name}>\n"));
        let argument = format!("argument_{tool_at}_{at}");
        // Text stands there as it is, and all else as JSON.
        let value = match (property.get("type"), property.get("enum")) {
            (Some(Value::String(kind)), Some(Value::Array(values))) if kind == "string" => {
                let values = values.iter().filter_map(Value::as_str).map(literal);
                format!("({}) {end}", values.collect::<Vec<_>>().join(" | "))
            }
            (Some(Value::String(kind)), _) if kind == "string" => {
                let text = format!("text_{tool_at}_{at}");
                rules.add(&format!("{text}[suffix={end}]"), "/(.|\\n)*/");
                text
            }
            _ => format!("{} {end}", json_rule(&rooted(property, schema), false)),
        };
        rules.add(&argument, &format!("{begin} {value}"));
        let mark = if is_required(name) { "" } else { "?" };
        arguments.push(format!("{argument}{mark}"));
    }
    arguments.join(" ")
}

/// Returns the schema of one property with the definitions of the whole beside it, which it may refer to.
fn rooted(property: &Value, schema: Option<&Value>) -> Value {
    let mut rooted = property.clone();
    if let (Some(fields), Some(schema)) = (rooted.as_object_mut(), schema) {
        for key in ["$defs", "definitions"] {
            if let Some(definitions) = schema.get(key) {
                fields.entry(key).or_insert_with(|| definitions.clone());
            }
        }
    }
    rooted
}

/// Returns the schema of a call of one of the tools, whose arguments stand under `key`.
fn call_schema(tools: &[ToolSpec], key: &str) -> Value {
    let mut definitions = Map::new();
    let calls: Vec<Value> = tools
        .iter()
        .map(|tool| {
            let mut parameters = tool
                .parameters
                .clone()
                .unwrap_or_else(|| json!({"type": "object"}));
            // `#/$defs/…` is looked for at the root of the whole, so tools share the names there.
            if let Some(fields) = parameters.as_object_mut() {
                for name in ["$defs", "definitions"] {
                    if let Some(Value::Object(own)) = fields.remove(name) {
                        let all = definitions.entry(name).or_insert_with(|| json!({}));
                        if let Some(all) = all.as_object_mut() {
                            all.extend(own);
                        }
                    }
                }
                fields.entry("type").or_insert_with(|| json!("object"));
            }
            json!({
                "type": "object",
                "properties": {"name": {"const": tool.name}, key: parameters},
                "required": ["name", key],
                "additionalProperties": false,
            })
        })
        .collect();
    let mut schema = definitions;
    match <[Value; 1]>::try_from(calls) {
        Ok([Value::Object(call)]) => schema.extend(call),
        Ok(_) => unreachable!("calls are objects"),
        Err(calls) => {
            schema.insert("anyOf".to_owned(), Value::from(calls));
        }
    }
    Value::Object(schema)
}

/// Returns the rule of JSON of a schema.
fn json_rule(schema: &Value, is_strict: bool) -> String {
    let mut schema = match schema {
        Value::Object(fields) => fields.clone(),
        // `true` admits anything, and what is no schema is told by who compiles it.
        Value::Bool(true) => Map::new(),
        other => return format!("%json {other}"),
    };
    schema.insert(
        "x-guidance".to_owned(),
        json!({"whitespace_pattern": BLANKS, "lenient": !is_strict}),
    );
    format!("%json {}", Value::Object(schema))
}

fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
