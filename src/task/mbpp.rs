//! The MBPP schemas: from a row to a [`Task`].
//!
//! | file | prompt | before the tests | after the submission | tests |
//! |---|---|---|---|---|
//! | sanitized (JSON, parquet; also this project's own sets) | `prompt` | `test_imports` | – | `test_list` |
//! | full (JSON Lines, parquet) | `text` | – | `test_setup_code` | `test_list` |
//! | MBPP+ (the Hugging Face layout) | `prompt` | `test_imports` | – | `test_list`, then `test` as one |
//!
//! All have `task_id` and `code`. `challenge_test_list` of the full file is used only where it is
//! asked for: published numbers are on `test_list`.
//!
//! **Entry points** are the names that `code` binds at top level, that the tests use and that no
//! import binds; a row may name them itself in `entry_points`. Imports that only `code` makes but
//! the tests use are added to the grader's setup, so that the grader never takes a module from a
//! submission. So are the imports of MBPP+'s `test`, so that a module which the runtime lacks is
//! not held against a submission.
//!
//! **`test_setup_code`** runs after the submission. Where it builds values with the submission's
//! own classes (`root = Node(1)`, tasks 367 and 927), it is made part of each test, else of the
//! grader's setup.

use std::collections::BTreeSet;

use super::fields::Fields;
use super::python::{Binding, bindings, used_names};
use super::{Task, TaskError, TaskOptions};

/// Reads one row of any of the schemas.
///
/// # Errors
///
/// Fails when a field is missing, empty or of another type, or when the tests use no name that the
/// reference solution binds; the error names the row and the key.
pub(super) fn parse(fields: Fields<'_>, options: &TaskOptions) -> Result<Task, TaskError> {
    let id = fields.id("task_id")?;
    let prompt = fields.text(
        &["prompt", "text"],
        "use the sanitized (`prompt`) or the full (`text`) MBPP schema",
    )?;
    let code = fields.optional_text("code")?;
    let mut tests = fields.list("test_list")?.ok_or_else(|| {
        fields.missing(
            "test_list",
            "add it: a list of `assert` statements, one test each",
        )
    })?;
    if tests.is_empty() {
        return Err(fields.empty("test_list"));
    }
    let visible_tests = options.visible_tests.min(tests.len());
    if options.challenge_tests {
        tests.extend(fields.list("challenge_test_list")?.unwrap_or_default());
    }
    let mut setup = Setup::default();
    for statement in fields.list("test_imports")?.unwrap_or_default() {
        setup.add(&statement);
    }
    if let Some(program) = fields.optional_text("test")? {
        setup.add_imports(&program, |_| true);
        tests.push(program);
    }
    let bound = code.as_deref().map(bindings).unwrap_or_default();
    let setup_code = fields.optional_text("test_setup_code")?.unwrap_or_default();
    let uses_submission = used_names(&setup_code)
        .into_iter()
        .any(|name| bound.iter().any(|binding| binding.name == name));
    if uses_submission {
        let setup_code = setup_code.replace("\r\n", "\n");
        for test in &mut tests {
            *test = format!("{}\n{test}", setup_code.trim_end());
        }
    }
    let entry_points = entry_points(fields, &id, code.as_deref(), &tests, &mut setup)?;
    if !uses_submission {
        setup.add(&setup_code);
    }
    Ok(Task {
        id,
        prompt,
        entry_points,
        setup: setup.statements,
        tests,
        reference: code,
        visible_tests,
        ..Task::default()
    })
}

/// The statements that the grader runs before the tests, each once.
#[derive(Debug, Default)]
pub(super) struct Setup {
    pub(super) statements: Vec<String>,
}

impl Setup {
    pub(super) fn add(&mut self, statement: &str) {
        let statement = statement.trim_end();
        if !statement.is_empty() && self.statements.iter().all(|known| known != statement) {
            self.statements.push(statement.to_owned());
        }
    }

    /// Adds the imports of a program that bind a name which `is_wanted`.
    fn add_imports(&mut self, program: &str, is_wanted: impl Fn(&str) -> bool) {
        for binding in bindings(program) {
            if let Some(statement) = &binding.import
                && is_wanted(&binding.name)
            {
                self.add(statement);
            }
        }
    }
}

/// Returns the names that the row gives, or those of the reference solution that the tests use;
/// what the reference imports for them goes to the setup.
pub(super) fn entry_points(
    fields: Fields<'_>,
    id: &str,
    code: Option<&str>,
    tests: &[String],
    setup: &mut Setup,
) -> Result<Vec<String>, TaskError> {
    let used: BTreeSet<&str> = tests.iter().flat_map(|test| used_names(test)).collect();
    if let Some(code) = code {
        setup.add_imports(code, |name| used.contains(name));
    }
    match fields.list("entry_points")? {
        Some(names) if names.is_empty() => return Err(fields.empty("entry_points")),
        Some(names) => return Ok(names),
        None => {}
    }
    let Some(code) = code else {
        return Err(fields.missing(
            "code",
            "add the reference solution, or the names it must define in `entry_points`",
        ));
    };
    let bound = bindings(code);
    let imported: Vec<Binding> = (setup.statements.iter())
        .flat_map(|text| bindings(text))
        .collect();
    let found = wanted(&bound, &used, &imported);
    if found.is_empty() {
        let names: Vec<&str> = bound.iter().map(|binding| binding.name.as_str()).collect();
        return Err(TaskError::NoEntryPoint {
            path: fields.path.to_owned(),
            row: fields.row,
            id: id.to_owned(),
            defined: if names.is_empty() {
                "none".to_owned()
            } else {
                names.join(", ")
            },
        });
    }
    Ok(found)
}

/// Returns the names in `bound` that are used by the tests and not bound by the grader's setup, in
/// order and once each.
fn wanted(bound: &[Binding], used: &BTreeSet<&str>, setup: &[Binding]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for Binding { name, .. } in bound {
        let imported = setup.iter().any(|binding| binding.name == *name);
        if used.contains(&**name) && !imported && !names.contains(name) {
            names.push(name.clone());
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use serde_json::{Value, json};

    fn row(value: Value) -> Result<Task, TaskError> {
        let Value::Object(fields) = value else {
            panic!("a row is an object")
        };
        let options = TaskOptions {
            visible_tests: 1,
            ..TaskOptions::default()
        };
        parse(Fields::new(Path::new("tasks.jsonl"), 7, &fields), &options)
    }

    fn task(value: Value) -> Task {
        row(value).unwrap()
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
    fn setup_code_with_the_submissions_classes_is_part_of_each_test_and_other_setup_code_is_not() {
        let mut value = json!({
            "task_id": 367, "text": "p", "code": "class Node: pass\ndef f(r): return r",
            "test_setup_code": "root = Node()\r\nx = 1 ", "test_list": ["assert f(root)", "f(x)"],
        });
        let with_nodes = task(value.clone());
        assert_eq!(with_nodes.entry_points, ["Node", "f"]);
        assert_eq!(
            with_nodes.tests,
            [
                "root = Node()\nx = 1\nassert f(root)",
                "root = Node()\nx = 1\nf(x)"
            ]
        );
        assert!(with_nodes.setup.is_empty());
        value["test_setup_code"] = json!("root = [1]\r\n");
        let without = task(value);
        assert_eq!(
            (without.setup, without.entry_points),
            (vec!["root = [1]".to_owned()], vec!["f".to_owned()])
        );
    }

    #[test]
    fn the_program_of_mbpp_plus_is_a_hidden_test_whose_imports_are_setup() {
        let task = task(json!({
            "task_id": 2, "prompt": "p", "code": "def f(x): return x", "test_imports": [],
            "test_list": ["assert f(1) == 1"],
            "test": "import numpy as np\nfrom math import inf\nfor x in [1]:\n    import re\n    assert f(x) == x\n",
        }));
        assert_eq!(task.setup, ["import numpy as np", "from math import inf"]);
        assert_eq!((task.tests.len(), task.visible().len()), (2, 1));
        assert_eq!(task.entry_points, ["f"]);
    }

    #[test]
    fn challenge_tests_are_used_where_they_are_asked_for() {
        let Value::Object(fields) = json!({
            "task_id": 1, "text": "p", "code": "def f(x): return x", "test_setup_code": "",
            "test_list": ["assert f(1) == 1"], "challenge_test_list": ["assert f(2) == 2"],
        }) else {
            panic!("a row is an object")
        };
        let count = |challenge_tests| {
            let options = TaskOptions {
                challenge_tests,
                visible_tests: 9,
                ..TaskOptions::default()
            };
            let task = parse(Fields::new(Path::new("a"), 1, &fields), &options).unwrap();
            (task.tests.len(), task.visible().len())
        };
        assert_eq!((count(false), count(true)), ((1, 1), (2, 1)));
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
