//! The MBPP schemas: from a row to a [`Task`].
//!
//! | file | prompt | before the tests | after the submission |
//! |---|---|---|---|
//! | sanitized (JSON, parquet; also this project's own sets) | `prompt` | `test_imports` | – |
//! | full (JSON Lines, parquet) | `text` | – | `test_setup_code` |
//!
//! Both have `task_id`, `code` and `test_list`. `challenge_test_list` of the full file is not used:
//! published numbers are on `test_list`.
//!
//! **Entry points** are the names that `code` binds at top level, that the tests use and that no
//! import binds; a row may name them itself in `entry_points`. Imports that only `code` makes but
//! the tests use are added to the grader's setup, so that the grader never takes a module from a
//! submission.
//!
//! **`test_setup_code`** runs after the submission and builds its arguments with the submission's
//! own classes (`root = Node(1)`, tasks 367 and 927). Only plain values cross from the policy's
//! instance to the grader's, so such a row can not be graded and is skipped with that reason. Setup
//! code that uses none of the names `code` binds has no such need and goes to the grader's setup.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value};

use super::python::{Binding, bindings, used_names};
use super::rows::json_type;
use super::{Task, TaskError};

/// What a row turned out to be.
#[derive(Debug)]
pub(super) enum Outcome {
    /// A task.
    Task(Task),
    /// A valid row that can not be graded, and why.
    Skipped { id: String, reason: String },
}

/// Reads one row of either schema.
///
/// # Errors
///
/// Fails when a field is missing, empty or of another type, or when the tests use no name that the
/// reference solution binds; the error names the row and the key.
pub(super) fn parse(
    path: &Path,
    row: u64,
    fields: &Map<String, Value>,
    visible_tests: usize,
) -> Result<Outcome, TaskError> {
    let fields = Fields { path, row, fields };
    let id = fields.id()?;
    let (_, prompt) = fields.text(["prompt", "text"])?;
    let code = fields.optional_text("code")?;
    let tests = fields.list("test_list")?.ok_or_else(|| {
        fields.missing(
            "test_list",
            "add it: a list of `assert` statements, one test each",
        )
    })?;
    if tests.is_empty() {
        return Err(fields.empty("test_list"));
    }

    let mut setup: Vec<String> = Vec::new();
    let mut add = |statement: &str| {
        let statement = statement.trim_end();
        if !statement.is_empty() && setup.iter().all(|known| known != statement) {
            setup.push(statement.to_owned());
        }
    };
    for statement in fields.list("test_imports")?.unwrap_or_default() {
        add(&statement);
    }
    let bound = code.as_deref().map(bindings).unwrap_or_default();
    let used: BTreeSet<&str> = tests.iter().flat_map(|test| used_names(test)).collect();
    for binding in &bound {
        if let Some(statement) = binding
            .import
            .as_deref()
            .filter(|_| used.contains(&*binding.name))
        {
            add(statement);
        }
    }
    let setup_code = fields.optional_text("test_setup_code")?.unwrap_or_default();
    if let Some(name) = first_bound(&bound, &setup_code) {
        let reason = format!("`test_setup_code` builds values with the submission's own `{name}`");
        return Ok(Outcome::Skipped { id, reason });
    }
    add(&setup_code);

    let entry_points = match fields.list("entry_points")? {
        Some(names) if names.is_empty() => return Err(fields.empty("entry_points")),
        Some(names) => names,
        None if code.is_none() => {
            return Err(fields.missing(
                "code",
                "add the reference solution, or the names it must define in `entry_points`",
            ));
        }
        None => {
            let imported: Vec<Binding> = setup.iter().flat_map(|text| bindings(text)).collect();
            entry_points(&bound, &used, &imported)
        }
    };
    if entry_points.is_empty() {
        let names: Vec<&str> = bound.iter().map(|binding| binding.name.as_str()).collect();
        return Err(TaskError::NoEntryPoint {
            path: path.to_owned(),
            row,
            id,
            defined: if names.is_empty() {
                "none".to_owned()
            } else {
                names.join(", ")
            },
        });
    }
    let visible_tests = visible_tests.min(tests.len());
    Ok(Outcome::Task(Task {
        id,
        prompt,
        entry_points,
        setup,
        tests,
        reference: code,
        visible_tests,
    }))
}

/// Returns the names in `bound` that are used by the tests and not bound by the grader's setup, in
/// order and once each.
fn entry_points(bound: &[Binding], used: &BTreeSet<&str>, setup: &[Binding]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for Binding { name, .. } in bound {
        let imported = setup.iter().any(|binding| binding.name == *name);
        if used.contains(&**name) && !imported && !names.contains(name) {
            names.push(name.clone());
        }
    }
    names
}

/// Returns the first name of the reference solution that `source` uses.
fn first_bound<'a>(bound: &[Binding], source: &'a str) -> Option<&'a str> {
    used_names(source)
        .into_iter()
        .find(|name| bound.iter().any(|binding| binding.name == *name))
}

/// A row with its place, for errors.
struct Fields<'a> {
    path: &'a Path,
    row: u64,
    fields: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn id(&self) -> Result<String, TaskError> {
        match self.fields.get("task_id") {
            Some(Value::String(id)) if id.is_empty() => Err(self.empty("task_id")),
            Some(Value::String(id)) => Ok(id.clone()),
            Some(Value::Number(id)) if id.is_i64() || id.is_u64() => Ok(id.to_string()),
            Some(other) => Err(self.wrong("task_id", "a whole number or a string", other)),
            None => Err(self.missing("task_id", "give each row its own number or name")),
        }
    }

    /// Returns the first of the alternative fields that is there, with its name.
    fn text(&self, keys: [&'static str; 2]) -> Result<(&'static str, String), TaskError> {
        for key in keys {
            if let Some(text) = self.optional_text(key)? {
                return if text.trim().is_empty() {
                    Err(self.empty(key))
                } else {
                    Ok((key, text))
                };
            }
        }
        Err(self.missing(
            "prompt",
            "use the sanitized (`prompt`) or the full (`text`) MBPP schema",
        ))
    }

    fn optional_text(&self, key: &'static str) -> Result<Option<String>, TaskError> {
        match self.fields.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(other) => Err(self.wrong(key, "a string", other)),
        }
    }

    fn list(&self, key: &'static str) -> Result<Option<Vec<String>>, TaskError> {
        let items = match self.fields.get(key) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Array(items)) => items,
            Some(other) => return Err(self.wrong(key, "a list of strings", other)),
        };
        let text = |item: &Value| match item {
            Value::String(text) => Ok(text.clone()),
            other => Err(TaskError::WrongType {
                path: self.path.to_owned(),
                row: self.row,
                key,
                expected: "a list of strings",
                found: json_type(other),
            }),
        };
        items.iter().map(text).collect::<Result<_, _>>().map(Some)
    }

    fn missing(&self, key: &'static str, remedy: &'static str) -> TaskError {
        let names: Vec<String> = self.fields.keys().map(|key| format!("`{key}`")).collect();
        let fields = if names.is_empty() {
            "none".to_owned()
        } else {
            names.join(", ")
        };
        TaskError::MissingField {
            path: self.path.to_owned(),
            row: self.row,
            key,
            fields,
            remedy,
        }
    }

    fn empty(&self, key: &'static str) -> TaskError {
        TaskError::EmptyField {
            path: self.path.to_owned(),
            row: self.row,
            key,
        }
    }

    fn wrong(&self, key: &'static str, expected: &'static str, found: &Value) -> TaskError {
        TaskError::WrongType {
            path: self.path.to_owned(),
            row: self.row,
            key,
            expected,
            found: json_type(found),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(value: Value) -> Result<Outcome, TaskError> {
        let Value::Object(fields) = value else {
            panic!("a row is an object")
        };
        parse(Path::new("tasks.jsonl"), 7, &fields, 1)
    }

    fn task(value: Value) -> Task {
        match row(value).unwrap() {
            Outcome::Task(task) => task,
            Outcome::Skipped { reason, .. } => panic!("skipped: {reason}"),
        }
    }

    fn message(value: Value) -> String {
        row(value).unwrap_err().to_string()
    }

    #[test]
    fn imports_that_only_the_reference_makes_go_to_the_grader() {
        let task = task(json!({
            "task_id": 596, "prompt": "Find the size.",
            "code": "import sys, re\nLIMIT = 3\ndef helper(): pass\ndef size(t):\n    return sys.getsizeof(t)",
            "test_imports": ["import math"],
            "test_list": ["assert size((1,)) == sys.getsizeof((1,))", "assert size(()) < LIMIT"],
        }));
        assert_eq!(task.id, "596");
        assert_eq!(task.setup, ["import math", "import sys, re"]);
        assert_eq!(task.entry_points, ["LIMIT", "size"]);
        assert_eq!(task.visible(), ["assert size((1,)) == sys.getsizeof((1,))"]);
    }

    #[test]
    fn an_import_made_twice_is_given_once_and_is_no_entry_point() {
        let task = task(json!({
            "task_id": 82, "prompt": "p", "code": "import math\ndef f(): return math.pi",
            "test_imports": ["import math"], "test_list": ["assert math.isclose(f(), 3.14, rel_tol=1)"],
        }));
        assert_eq!(
            (task.setup, task.entry_points),
            (vec!["import math".to_owned()], vec!["f".to_owned()])
        );
    }

    #[test]
    fn setup_code_with_the_submissions_classes_is_skipped_and_other_setup_code_is_not() {
        let mut value = json!({
            "task_id": 367, "text": "p", "code": "class Node: pass\ndef f(r): return r",
            "test_setup_code": "root = Node()", "test_list": ["assert f(root)"],
        });
        let Outcome::Skipped { id, reason } = row(value.clone()).unwrap() else {
            panic!("kept")
        };
        assert_eq!(id, "367");
        assert_eq!(
            reason,
            "`test_setup_code` builds values with the submission's own `Node`"
        );
        value["test_setup_code"] = json!("root = [1]\r\n");
        assert_eq!(task(value).setup, ["root = [1]"]);
    }

    #[test]
    fn entry_points_may_be_named_instead_of_a_reference() {
        let task = task(json!({
            "task_id": "own-1", "prompt": "p", "entry_points": ["f"], "test_list": ["assert f()"],
        }));
        assert_eq!(
            (task.reference, task.entry_points),
            (None, vec!["f".to_owned()])
        );
    }

    #[test]
    fn errors_name_file_row_and_key() {
        let good = json!({"task_id": 1, "prompt": "p", "code": "def f(): pass", "test_list": ["assert f()"]});
        let with = |key: &str, value: Value| {
            let mut row = good.clone();
            row[key] = value;
            message(row)
        };
        let without = |key: &str| {
            let mut row = good.clone();
            row.as_object_mut().unwrap().remove(key);
            message(row)
        };
        assert_eq!(
            without("test_list"),
            "`tasks.jsonl` row 7 has no `test_list`; its fields are `task_id`, `prompt`, `code`; \
             add it: a list of `assert` statements, one test each"
        );
        assert_eq!(
            with("test_list", json!("assert f()")),
            "`tasks.jsonl` row 7 has a string in `test_list`; make it a list of strings"
        );
        assert_eq!(
            with("test_list", json!(["assert f()", null])),
            "`tasks.jsonl` row 7 has null in `test_list`; make it a list of strings"
        );
        assert_eq!(
            with("test_list", json!([])),
            "`tasks.jsonl` row 7 has an empty `test_list`; fill it in or drop the row"
        );
        assert_eq!(
            with("task_id", json!(1.5)),
            "`tasks.jsonl` row 7 has a number in `task_id`; make it a whole number or a string"
        );
        assert_eq!(
            with("prompt", json!(" ")),
            "`tasks.jsonl` row 7 has an empty `prompt`; fill it in or drop the row"
        );
        assert_eq!(
            with("code", json!("def g(): pass")),
            "`tasks.jsonl` row 7 (task `1`) has no entry point: its tests use none of the names \
             that `code` defines (g); fix the row or name them in `entry_points`"
        );
        assert!(without("code").contains("has no `code`; its fields are `task_id`, `prompt`"));
        assert!(without("task_id").contains("has no `task_id`"));
        assert!(without("prompt").contains("the full (`text`) MBPP schema"));
    }
}
