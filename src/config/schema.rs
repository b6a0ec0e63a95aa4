//! The JSON Schema of the run file, for editors.

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value};

use super::RunConfig;

impl RunConfig {
    /// Returns the JSON Schema (draft 2020-12) of a run file: its keys with their documentation, types,
    /// names of values and defaults. What is not a matter of single values, such as which go together, is
    /// [`RunConfig::validate`]'s to tell.
    #[must_use]
    pub fn schema() -> Value {
        let generator = SchemaSettings::draft2020_12().into_generator();
        let mut schema = Value::from(generator.into_root_schema_for::<Self>());
        mend(&mut schema);
        if let Some(root) = schema.as_object_mut() {
            root.insert("title".to_owned(), "Wardian run file".into());
        }
        schema
    }
}

/// Takes out what is nothing in TOML, and what of the documentation is for readers of the code.
fn mend(schema: &mut Value) {
    match schema {
        Value::Array(parts) => parts.iter_mut().for_each(mend),
        Value::Object(keys) => {
            without_null(keys);
            if let Some(Value::String(text)) = keys.get_mut("description") {
                *text = plain(text);
            }
            keys.values_mut().for_each(mend);
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// A key is left out; TOML has no null to give it.
fn without_null(keys: &mut Map<String, Value>) {
    if let Some(Value::Array(types)) = keys.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = types.as_slice() {
            let only = only.clone();
            keys.insert("type".to_owned(), only);
        }
    }
    let is_null = |part: &Value| part.get("type").is_some_and(|name| name == "null");
    if let Some(Value::Array(parts)) = keys.get_mut("anyOf") {
        parts.retain(|part| !is_null(part));
        if let [Value::Object(only)] = parts.as_slice() {
            let only = only.clone();
            keys.remove("anyOf");
            // What is said at the key goes before what is said of its type.
            for (key, value) in only {
                keys.entry(key).or_insert(value);
            }
        }
    }
    if keys.get("default").is_some_and(Value::is_null) {
        keys.remove("default");
    }
}

/// Returns documentation without links into the code.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("](") {
        let Some(end) = rest[start..].find(')') else {
            break;
        };
        let link = &rest[start + 2..start + end];
        let before = &rest[..start];
        match before.rfind('[') {
            Some(bracket) if !link.starts_with("http") => {
                plain.push_str(&before[..bracket]);
                plain.push_str(&before[bracket + 1..]);
            }
            _ => plain.push_str(&rest[..=start + end]),
        }
        rest = &rest[start + end + 1..];
    }
    plain.push_str(rest);
    plain
        .replace("[`", "`")
        .replace("`]", "`")
        .replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::super::layers::every_key;
    use super::*;

    /// Follows a reference.
    fn followed<'s>(root: &'s Value, schema: &'s Value) -> &'s Value {
        match schema.get("$ref").and_then(Value::as_str) {
            Some(path) => root
                .pointer(path.trim_start_matches('#'))
                .expect("it leads somewhere"),
            None => schema,
        }
    }

    fn has_type(name: &str, value: &Value) -> bool {
        match name {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            other => panic!("no type of TOML: `{other}`"),
        }
    }

    /// Returns what of `value` the schema refuses: the keywords that we use, and no others.
    fn refused(root: &Value, schema: &Value, value: &Value, at: &str) -> Vec<String> {
        let mut found = Vec::new();
        if schema.get("$ref").is_some() {
            found.extend(refused(root, followed(root, schema), value, at));
        }
        if let Some(name) = schema.get("type") {
            let names = name
                .as_array()
                .cloned()
                .unwrap_or_else(|| vec![name.clone()]);
            let mut names = names.iter().map(|name| name.as_str().expect("a name"));
            if !names.any(|name| has_type(name, value)) {
                found.push(format!("{at}: {value} is no {name}"));
            }
        }
        if let Some(expected) = schema.get("const")
            && expected != value
        {
            found.push(format!("{at}: {value} is not {expected}"));
        }
        if let Some(values) = schema.get("enum").and_then(Value::as_array)
            && !values.contains(value)
        {
            found.push(format!("{at}: {value} is none of {values:?}"));
        }
        if let Some(least) = schema.get("minimum").and_then(Value::as_f64)
            && value.as_f64().is_some_and(|number| number < least)
        {
            found.push(format!("{at}: {value} is below {least}"));
        }
        for choice in ["anyOf", "oneOf"] {
            if let Some(parts) = schema.get(choice).and_then(Value::as_array) {
                let all = parts.iter().map(|part| refused(root, part, value, at));
                let all: Vec<Vec<String>> = all.collect();
                if all.iter().all(|part| !part.is_empty()) {
                    found.push(format!("{at}: {all:?}"));
                }
            }
        }
        for (key, inner) in value.as_object().into_iter().flatten() {
            let at = format!("{at}.{key}");
            match (
                schema.pointer(&format!("/properties/{key}")),
                schema.get("additionalProperties"),
            ) {
                (Some(of_key), _) => found.extend(refused(root, of_key, inner, &at)),
                (None, Some(Value::Bool(false))) => found.push(format!("{at} is unknown")),
                (None, Some(of_any)) => found.extend(refused(root, of_any, inner, &at)),
                (None, None) => {}
            }
        }
        for inner in value.as_array().into_iter().flatten() {
            if let Some(of_items) = schema.get("items") {
                found.extend(refused(root, of_items, inner, at));
            }
        }
        found
    }

    fn check(text: &str) -> Vec<String> {
        let table: toml::Table = text.parse().unwrap();
        let schema = RunConfig::schema();
        refused(&schema, &schema, &serde_json::to_value(table).unwrap(), "")
    }

    #[test]
    fn every_key_is_known_and_documented() {
        let schema = RunConfig::schema();
        let every = serde_json::to_value(every_key()).unwrap();
        assert_eq!(refused(&schema, &schema, &every, ""), [""; 0]);
        // An object that took any key would take every key.
        fn walk(root: &Value, schema: &Value, value: &Value, at: &str) {
            let schema = followed(root, schema);
            for (key, inner) in value.as_object().into_iter().flatten() {
                let at = format!("{at}.{key}");
                let is_named = [
                    "node_selector",
                    "headers",
                    "templates",
                    "worker_labels",
                    "env",
                ];
                let property = schema.pointer(&format!("/properties/{key}"));
                let any = schema
                    .get("additionalProperties")
                    .filter(|any| any.is_object());
                match (property, any) {
                    (Some(property), _) => {
                        assert!(
                            property["description"].is_string(),
                            "{at} is not documented"
                        );
                        walk(root, property, inner, &at);
                    }
                    (None, Some(any)) => {
                        let open = at.split('.').rev().nth(1).unwrap_or_default();
                        assert!(open == "environments" || is_named.contains(&open), "{at}");
                        walk(root, any, inner, &at);
                    }
                    (None, None) => panic!("{at} is not in the schema"),
                }
            }
        }
        walk(&schema, &schema, &every, "");
        let text = schema.to_string();
        assert!(
            !text.contains("null") && !text.contains("crate::"),
            "{text}"
        );
    }

    #[test]
    fn every_run_file_of_ours_is_accepted() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/runs");
        let mut count = 0;
        for entry in fs_err::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            assert_eq!(
                check(&fs_err::read_to_string(&path).unwrap()),
                [""; 0],
                "{path:?}"
            );
            count += 1;
        }
        assert!(count >= 6, "{count}");
        for preset in super::super::Preset::ALL {
            assert_eq!(check(preset.text()), [""; 0], "{preset:?}");
        }
        // As a run leaves it, with all defaults.
        assert_eq!(check(&RunConfig::default().to_toml().unwrap()), [""; 0]);
    }

    #[rstest]
    #[case("trainer.stepz = 3", ".trainer.stepz is unknown")]
    #[case("[nothing]\nx = 1", ".nothing is unknown")]
    #[case("trainer.steps = 'ten'", ".trainer.steps: \"ten\" is no")]
    #[case("trainer.steps = -1", "is below 0")]
    #[case("trainer.loss = 'ppo'", ".trainer.loss")]
    #[case("sandbox.deadline = 3", ".sandbox.deadline: 3 is no \"string\"")]
    #[case("sandbox.memory = true", ".sandbox.memory")]
    #[case("environments.a = { wait = 1 }", ".environments.a.wait is unknown")]
    #[case("preset = 'grpo'", ".preset")]
    fn what_is_wrong_is_refused(#[case] text: &str, #[case] expected: &str) {
        let found = check(text).join("\n");
        assert!(found.contains(expected), "{found}");
    }

    #[test]
    fn documentation_loses_its_links_and_no_more() {
        assert_eq!(
            plain("as [`A`](crate::A) or [`B`] do,\nsee"),
            "as `A` or `B` do, see"
        );
        assert_eq!(
            plain("an `[env]` (x), [page](https://example.org)"),
            "an `[env]` (x), [page](https://example.org)"
        );
    }

    #[test]
    fn a_key_that_may_be_left_out_has_its_type_alone() {
        let mut schema = json!({
            "anyOf": [{ "$ref": "#/$defs/X" }, { "type": "null" }], "description": "d", "default": null,
        });
        mend(&mut schema);
        assert_eq!(schema, json!({ "description": "d", "$ref": "#/$defs/X" }));
    }
}
