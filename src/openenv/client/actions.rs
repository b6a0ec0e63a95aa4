//! What a policy can do in an environment elsewhere, by what its server says of its actions.

use serde_json::{Map, Value, json};

use super::{ActionStyle, Fault, RemoteConfig};
use crate::chat::{ToolCall, ToolSpec};

/// The tool whose arguments are an action of the environment's own schema.
const STEP_TOOL: &str = "step";

/// Tools that are read.
const MAX_TOOLS: usize = 128;

/// How turns become actions.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Actions {
    /// The environment's tools, each called by OpenEnv's action for that.
    Tools(Vec<ToolSpec>),
    /// One tool, whose arguments are the action.
    Step(Box<ToolSpec>),
    /// The turn's text, as this field of the action.
    Text { field: String },
}

/// Why a call is no action; meant for the policy.
pub(super) type Refusal = String;

impl Actions {
    /// Reads the schema of actions. `None` where the environment has tools, which have to be asked for.
    pub(super) fn of_schema(schema: &Value, config: &RemoteConfig) -> Result<Option<Self>, String> {
        let action = schema.get("action");
        let properties = action
            .and_then(|action| action.get("properties"))
            .and_then(Value::as_object);
        let (Some(action), Some(properties)) = (action, properties) else {
            return Err("its `/schema` describes no action with fields".to_owned());
        };
        if ["tool_name", "arguments"]
            .iter()
            .all(|field| properties.contains_key(*field))
        {
            return match (config.actions, &config.action_field) {
                (ActionStyle::Text, _) => {
                    Err("it is acted on by tools alone; leave `env.actions` out".to_owned())
                }
                (ActionStyle::Auto | ActionStyle::Tools, Some(_)) => {
                    Err("it is acted on by tools alone; leave `env.action_field` out".to_owned())
                }
                (ActionStyle::Auto | ActionStyle::Tools, None) => Ok(None),
            };
        }
        let text = || {
            let field = text_field(action, properties, config.action_field.as_deref())?;
            Ok(Self::Text { field })
        };
        let actions = match config.actions {
            ActionStyle::Text => text()?,
            ActionStyle::Tools => step_tool(action, properties),
            ActionStyle::Auto => match text() {
                Ok(actions) => actions,
                Err(reason) if config.action_field.is_some() => return Err(reason),
                Err(_) => step_tool(action, properties),
            },
        };
        Ok(Some(actions))
    }

    /// Reads the answer to `tools/list`.
    pub(super) fn of_tools(answer: &Value) -> Result<Self, Fault> {
        let tools = answer.pointer("/result/tools").and_then(Value::as_array);
        let unexpected = |found: &Value| Fault::Unexpected {
            expected: "a `result` with from 1 to 128 `tools`, each with a `name`",
            found: super::frames::shortened(&found.to_string()),
        };
        let tools = tools
            .filter(|tools| (1..=MAX_TOOLS).contains(&tools.len()))
            .ok_or_else(|| unexpected(answer))?;
        let tools = tools.iter().map(|tool| {
            let text = |key: &str| tool.get(key).and_then(Value::as_str);
            let name = text("name").filter(|name| !name.is_empty());
            let parameters = tool.get("inputSchema").or_else(|| tool.get("input_schema"));
            let parameters = parameters.filter(|schema| schema.is_object()).cloned();
            Ok(ToolSpec::new(
                name.ok_or_else(|| unexpected(tool))?,
                text("description").unwrap_or_default(),
                parameters.unwrap_or_else(|| json!({"type": "object", "properties": {}})),
            ))
        });
        tools.collect::<Result<_, _>>().map(Self::Tools)
    }

    /// Returns the tools as the policy is told of them.
    pub(super) fn tools(&self) -> &[ToolSpec] {
        match self {
            Self::Tools(tools) => tools,
            Self::Step(tool) => std::slice::from_ref(&**tool),
            Self::Text { .. } => &[],
        }
    }

    /// Returns the action of a call, or what is wrong with it.
    pub(super) fn of_call(&self, call: &ToolCall) -> Result<Value, Refusal> {
        let Some(tool) = self.tools().iter().find(|tool| tool.name == call.name) else {
            let names = self.tools().iter().map(|tool| format!("`{}`", tool.name));
            let names: Vec<_> = names.collect();
            return Err(match names.is_empty() {
                true => "there are no tools; answer in text".to_owned(),
                false => format!(
                    "there is no tool `{}`; use {}",
                    call.name,
                    names.join(" or ")
                ),
            });
        };
        let parsed;
        let arguments = match &call.arguments {
            Value::Object(arguments) => arguments,
            Value::String(text) => {
                parsed = serde_json::from_str::<Map<String, Value>>(text)
                    .map_err(|_| format!("the arguments of `{}` must be an object", call.name))?;
                &parsed
            }
            _ => {
                return Err(format!(
                    "the arguments of `{}` must be an object",
                    call.name
                ));
            }
        };
        let schema = tool.parameters.as_ref().unwrap_or(&Value::Null);
        check(&call.name, schema, arguments)?;
        Ok(match self {
            Self::Tools(_) => json!({
                "type": "call_tool", "tool_name": call.name, "arguments": arguments,
            }),
            Self::Step(_) | Self::Text { .. } => Value::Object(arguments.clone()),
        })
    }

    /// Returns the action of a turn's text, where text is one.
    pub(super) fn of_text(&self, text: &str) -> Option<Value> {
        let Self::Text { field } = self else {
            return None;
        };
        // A policy writes programs in blocks, and speaks around them.
        let block = (field == "code").then(|| crate::env::last_code_block(text));
        let text = block.flatten().unwrap_or_else(|| text.trim().to_owned());
        Some(json!({ field.as_str(): text }))
    }
}

/// Returns the field that takes a turn's text: the one named, or the only string that has to be given, or
/// the only string.
fn text_field(
    action: &Value,
    properties: &Map<String, Value>,
    named: Option<&str>,
) -> Result<String, String> {
    let is_text = |field: &str| {
        let kind = properties.get(field).and_then(|schema| schema.get("type"));
        kind.and_then(Value::as_str) == Some("string")
    };
    let required = action.get("required").and_then(Value::as_array);
    let required: Vec<&str> = required
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    if let Some(field) = named {
        if !is_text(field) {
            return Err(format!(
                "its actions have no string `{field}` (`env.action_field`); they have {}",
                listed(properties.keys())
            ));
        }
        let others = required
            .iter()
            .filter(|name| **name != field && **name != "metadata");
        let others: Vec<String> = others.map(|name| (*name).to_owned()).collect();
        return match others.is_empty() {
            true => Ok(field.to_owned()),
            // The server would refuse every step, and the policy could do nothing about it.
            false => Err(format!(
                "its actions need {} besides `{field}` (`env.action_field`), which a text cannot give; set \
                 `env.actions = \"tools\"`",
                listed(others.iter())
            )),
        };
    }
    let texts: Vec<&String> = properties.keys().filter(|name| is_text(name)).collect();
    match (&required[..], &texts[..]) {
        ([field], _) if is_text(field) => Ok((*field).to_owned()),
        ([], [field]) => Ok((*field).clone()),
        _ => Err(format!(
            "its actions are no one text, they have {}; name the field that takes the policy's text in \
             `env.action_field`, or set `env.actions = \"tools\"`",
            listed(properties.keys())
        )),
    }
}

fn listed<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<_> = names.map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

/// Makes a tool of the actions' schema, without what is the environment's business.
fn step_tool(action: &Value, properties: &Map<String, Value>) -> Actions {
    let mut parameters = action.as_object().cloned().unwrap_or_default();
    let mut properties = properties.clone();
    properties.shift_remove("metadata");
    parameters.insert("properties".to_owned(), Value::Object(properties));
    let description = parameters.shift_remove("description");
    let description = description.as_ref().and_then(Value::as_str);
    let description = description.unwrap_or("Acts in the environment.").to_owned();
    parameters.shift_remove("title");
    Actions::Step(Box::new(ToolSpec::new(
        STEP_TOOL,
        description,
        Value::Object(parameters),
    )))
}

/// Checks arguments against the outer level of a JSON schema: what is required, what is known, and the
/// types. What lies deeper the server checks.
fn check(tool: &str, schema: &Value, arguments: &Map<String, Value>) -> Result<(), Refusal> {
    let required = schema.get("required").and_then(Value::as_array);
    let required = required.into_iter().flatten().filter_map(Value::as_str);
    for name in required {
        if !arguments.contains_key(name) {
            return Err(format!("`{tool}` needs the argument `{name}`"));
        }
    }
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
        return Ok(());
    };
    let is_closed = schema.get("additionalProperties") == Some(&Value::Bool(false));
    for (name, value) in arguments {
        match properties.get(name) {
            None if is_closed => {
                return Err(format!(
                    "`{tool}` takes no argument `{name}`; it takes {}",
                    listed(properties.keys())
                ));
            }
            None => {}
            Some(schema) => {
                if let Some(expected) = schema.get("type").filter(|kind| !allows(kind, value)) {
                    let found = crate::chat::json_type(value);
                    return Err(format!(
                        "the argument `{name}` of `{tool}` must be of type {expected}, found {found}"
                    ));
                }
            }
        }
    }
    Ok(())
}

/// Returns whether a value is of a JSON schema's `type`, one or a list of them.
fn allows(kind: &Value, value: &Value) -> bool {
    match kind {
        Value::String(kind) => match kind.as_str() {
            "string" => value.is_string(),
            "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
            "number" => value.is_number(),
            "boolean" => value.is_boolean(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            "null" => value.is_null(),
            _ => true,
        },
        Value::Array(kinds) => kinds.iter().any(|kind| allows(kind, value)),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(action: &Value, config: &RemoteConfig) -> Result<Option<Actions>, String> {
        Actions::of_schema(&json!({ "action": action }), config)
    }

    fn text(field: &str) -> Actions {
        Actions::Text {
            field: field.to_owned(),
        }
    }

    #[test]
    fn schemas_say_how_an_environment_is_acted_on() {
        let string = json!({"type": "string"});
        let config = RemoteConfig::new("http://x");
        let code = json!({"properties": {"metadata": {"type": "object"}, "code": string}, "required": ["code"]});
        assert_eq!(of(&code, &config), Ok(Some(text("code"))));
        let echo = json!({"properties": {"message": string, "loud": {"type": "boolean"}}});
        assert_eq!(of(&echo, &config), Ok(Some(text("message"))));
        let tools = json!({"properties": {"tool_name": string, "arguments": {"type": "object"}}});
        assert_eq!(of(&tools, &config), Ok(None));
        // A move has no text, and so has a tool.
        let game = json!({
            "title": "Move", "description": "Moves.", "required": ["x"], "additionalProperties": false,
            "properties": {"metadata": {"type": "object"}, "x": {"type": "integer"}},
        });
        let Ok(Some(Actions::Step(tool))) = of(&game, &config) else {
            unreachable!("it has no text");
        };
        assert_eq!(
            *tool,
            ToolSpec::new(
                "step",
                "Moves.",
                json!({
                    "required": ["x"], "additionalProperties": false,
                    "properties": {"x": {"type": "integer"}},
                })
            )
        );
        // What is asked for by name.
        let two = json!({"properties": {"a": string, "b": string}});
        let both = json!({"properties": {"a": string, "b": string}, "required": ["a", "b"]});
        let named = |field: &str| RemoteConfig {
            action_field: Some(field.to_owned()),
            ..RemoteConfig::new("http://x")
        };
        assert_eq!(of(&two, &named("b")), Ok(Some(text("b"))));
        assert!(matches!(of(&two, &config), Ok(Some(Actions::Step(_)))));
        assert!(matches!(of(&both, &config), Ok(Some(Actions::Step(_)))));
        let style = |actions| RemoteConfig {
            actions,
            ..RemoteConfig::new("http://x")
        };
        assert!(matches!(
            of(&code, &style(ActionStyle::Tools)),
            Ok(Some(Actions::Step(_)))
        ));
        for (action, config, expected) in [
            (two.clone(), named("c"), "they have `a`, `b`"),
            (both, named("b"), "need `a` besides `b`"),
            (two, style(ActionStyle::Text), "env.action_field"),
            (
                tools.clone(),
                style(ActionStyle::Text),
                "leave `env.actions` out",
            ),
            (tools, named("tool_name"), "leave `env.action_field` out"),
            (
                Value::Null,
                RemoteConfig::new("http://x"),
                "describes no action",
            ),
        ] {
            let reason = of(&action, &config).unwrap_err();
            assert!(reason.contains(expected), "{reason}");
        }
    }

    #[test]
    fn calls_become_actions_or_are_told_back() {
        let listed = json!({"result": {"tools": [{
            "name": "add", "description": null,
            "inputSchema": {
                "additionalProperties": false, "required": ["a"],
                "properties": {"a": {"type": "integer"}, "b": {"type": ["string", "null"]}},
            },
        }]}});
        let tools = Actions::of_tools(&listed).unwrap();
        let call = |name: &str, arguments: Value| tools.of_call(&ToolCall::new(name, arguments));
        let action =
            json!({"type": "call_tool", "tool_name": "add", "arguments": {"a": 2, "b": null}});
        assert_eq!(call("add", json!({"a": 2, "b": null})), Ok(action.clone()));
        assert_eq!(call("add", json!("{\"a\": 2, \"b\": null}")), Ok(action));
        for (name, arguments, expected) in [
            ("sub", json!({}), "no tool `sub`; use `add`"),
            ("add", json!({}), "needs the argument `a`"),
            ("add", json!({"a": 1.5}), "type \"integer\", found a number"),
            (
                "add",
                json!({"a": 1, "b": 2}),
                "must be of type [\"string\",\"null\"]",
            ),
            ("add", json!({"a": 1, "c": 2}), "takes no argument `c`"),
            ("add", json!([1]), "must be an object"),
            ("add", json!("1"), "must be an object"),
        ] {
            let refusal = call(name, arguments).unwrap_err();
            assert!(refusal.contains(expected), "{refusal}");
        }
        assert_eq!(tools.of_text("2"), None);
        for answer in [
            json!({}),
            json!({"result": {"tools": []}}),
            json!({"result": {"tools": [{}]}}),
        ] {
            Actions::of_tools(&answer).unwrap_err();
        }
    }

    #[test]
    fn text_is_an_action_and_a_program_is_taken_out_of_its_block() {
        let said = |field: &str, said: &str| text(field).of_text(said).unwrap();
        assert_eq!(said("message", " hi\n"), json!({"message": "hi"}));
        assert_eq!(
            said("message", "```\na\n```"),
            json!({"message": "```\na\n```"})
        );
        assert_eq!(
            said("code", "So:\n```python\nprint(1)\n```\ndone"),
            json!({"code": "print(1)"})
        );
        assert_eq!(said("code", "print(1)"), json!({"code": "print(1)"}));
        let refusal = text("code").of_call(&ToolCall::new("f", json!({})));
        assert_eq!(
            refusal,
            Err("there are no tools; answer in text".to_owned())
        );
    }
}
