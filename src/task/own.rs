//! This project's own schema: a row that names its grader.
//!
//! `docs/graders.md` has its fields. Other data sets' names are read as well: `text` and `question` for
//! `prompt`, `test_list` and `test_imports` for `tests` and `setup`. So any row can be given another grader.
//! A user's grader gets the whole row as `task`.

use std::io::Read as _;
use std::path::{Component, Path};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::fields::Fields;
use super::mbpp::{Setup, entry_points};
use super::{GraderChoice, Task, TaskError, TaskOptions};
use crate::grader::{GRADERS, RewardTerms, TestCase, is_number};

/// The largest grader file that is read.
const MAX_GRADER_BYTES: u64 = 1 << 20;

/// Graders that need not be told what a submission defines.
const WITHOUT_ENTRY_POINTS: [&str; 4] = ["stdio", "numeric", "exact_match", "python"];

/// Reads one row that is graded by `grader`.
///
/// # Errors
///
/// Fails when a field is missing, empty or of another type, or when the grader's file cannot be
/// read.
pub(super) fn parse(
    fields: Fields<'_>,
    grader: &GraderChoice,
    options: &TaskOptions,
) -> Result<Task, TaskError> {
    let mut task = Task {
        id: fields.id_or_row("task_id")?,
        prompt: fields.text(
            &["prompt", "text", "question", "question_content"],
            "add it: what the policy is asked to do",
        )?,
        reference: match fields.optional_text("code")? {
            Some(code) => Some(code),
            None => fields.optional_text("reference")?,
        },
        cases: cases(fields)?,
        options: read(fields, "options", "an object")?.unwrap_or_default(),
        reward: read::<RewardTerms>(fields, "reward", "an object of reward terms")?,
        test_weights: read(fields, "test_weights", "a list of numbers")?.unwrap_or_default(),
        ..Task::default()
    };
    (task.grader, task.tests) = match grader {
        GraderChoice::Source(source) => ("python".to_owned(), vec![source.clone()]),
        GraderChoice::Name(name) if is_python_file(name) => {
            ("python".to_owned(), vec![grader_file(fields, name)?])
        }
        GraderChoice::Name(name) if GRADERS.contains(&name.as_str()) => {
            (name.clone(), tests(fields)?)
        }
        GraderChoice::Name(name) => return Err(fields.unknown_grader(name)),
    };
    if task.grader == "python" {
        let row = Value::Object(fields.all().clone());
        task.options.entry("task").or_insert(row);
    }
    if task.tests.is_empty() && task.cases.is_empty() {
        return Err(fields.missing(
            "tests",
            "add `tests` or `test` for programs that test, `cases` for inputs and outputs, or \
             `answer`",
        ));
    }
    if matches!(task.grader.as_str(), "numeric" | "exact_match") && task.cases.is_empty() {
        return Err(fields.missing("answer", "add it: this grader compares answers"));
    }
    if task.grader == "numeric" && !task.cases.iter().all(|case| is_number(&case.output)) {
        return Err(fields.unsupported("answer", "give a finite number"));
    }
    let mut setup = Setup::default();
    for key in ["test_imports", "setup"] {
        for statement in fields.list(key)?.unwrap_or_default() {
            setup.add(&statement);
        }
    }
    task.entry_points = if fields.has("entry_points") || !needs_entry_points(&task) {
        fields.list("entry_points")?.unwrap_or_default()
    } else {
        let code = task.reference.as_deref();
        entry_points(fields, &task.id, code, &task.tests, &mut setup)?
    };
    task.setup = setup.statements;
    let count = task.tests.len().max(task.cases.len());
    let shown = read::<usize>(fields, "visible_tests", "a whole number")?;
    task.visible_tests = match shown {
        Some(shown) => shown.min(count),
        None if task.has_listed_tests() => options.visible_tests.min(count),
        // A file of tests is shown whole or not at all.
        None => 0,
    };
    Ok(task)
}

fn needs_entry_points(task: &Task) -> bool {
    let is_call = task.grader == "calls" && task.options.contains_key("call");
    !is_call && !WITHOUT_ENTRY_POINTS.contains(&task.grader.as_str())
}

fn tests(fields: Fields<'_>) -> Result<Vec<String>, TaskError> {
    for key in ["tests", "test_list"] {
        if let Some(tests) = fields.list(key)? {
            return Ok(tests);
        }
    }
    Ok(fields.optional_text("test")?.into_iter().collect())
}

fn cases(fields: Fields<'_>) -> Result<Vec<TestCase>, TaskError> {
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let expected = "a list of objects with `input` and `output`";
    match fields.value("cases") {
        Some(Value::Array(items)) => {
            let read = |item: &Value| {
                let output = item.get("output")?;
                Some(TestCase {
                    input: item.get("input").map(text).unwrap_or_default(),
                    output: text(output),
                })
            };
            let wrong = |item| fields.wrong("cases", expected, item);
            return items
                .iter()
                .map(|item| read(item).ok_or_else(|| wrong(item)))
                .collect();
        }
        Some(other) => return Err(fields.wrong("cases", expected, other)),
        None => {}
    }
    let answer = |value: &Value| TestCase {
        input: String::new(),
        output: text(value),
    };
    Ok(match fields.value("answer") {
        Some(Value::Array(items)) => items.iter().map(answer).collect(),
        Some(value) => vec![answer(value)],
        None => Vec::new(),
    })
}

/// Reads an optional field of any type.
fn read<T: DeserializeOwned>(
    fields: Fields<'_>,
    key: &'static str,
    expected: &'static str,
) -> Result<Option<T>, TaskError> {
    let Some(value) = fields.value(key) else {
        return Ok(None);
    };
    T::deserialize(value)
        .map(Some)
        .map_err(|source| TaskError::Field {
            path: fields.path.to_owned(),
            row: fields.row,
            key,
            expected,
            source,
        })
}

/// Reads a user's grader, a file in the task file's folder or below it.
fn grader_file(fields: Fields<'_>, name: &str) -> Result<String, TaskError> {
    let is_inside = Path::new(name)
        .components()
        .all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if !is_inside {
        return Err(fields.unsupported(
            "grader",
            "put the grader's file into the task file's folder or below it",
        ));
    }
    let folder = fields.path.parent().unwrap_or_else(|| Path::new(""));
    read_grader(&folder.join(name))
}

/// Whether a grader is named by its file.
pub(super) fn is_python_file(name: &str) -> bool {
    Path::new(name)
        .extension()
        .is_some_and(|extension| extension == "py")
}

/// Reads a user's grader.
///
/// # Errors
///
/// Fails when the file cannot be read, is too large or is not UTF-8.
pub(super) fn read_grader(path: &Path) -> Result<String, TaskError> {
    let io = |source| TaskError::Io {
        path: path.to_owned(),
        source,
    };
    let mut text = String::new();
    let file = fs_err::File::open(path).map_err(io)?;
    file.take(MAX_GRADER_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(io)?;
    let (found, limit) = (text.len() as u64, MAX_GRADER_BYTES);
    if found > limit {
        return Err(TaskError::TooLarge {
            path: path.to_owned(),
            what: "bytes",
            found,
            limit,
        });
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse_row(path: &Path, row: &Value) -> Result<Task, TaskError> {
        let options = TaskOptions {
            visible_tests: 1,
            ..TaskOptions::default()
        };
        let grader = GraderChoice::Name(row["grader"].as_str().unwrap().to_owned());
        let fields = Fields::new(path, 3, row.as_object().unwrap());
        parse(fields, &grader, &options)
    }

    #[test]
    fn cases_may_be_text_or_json() {
        let row = json!({
            "grader": "calls", "prompt": "Add.", "entry_points": ["add"],
            "cases": [{"input": [1, [2]], "output": null}, {"input": "[3]", "output": "4"}],
            "options": {"float_tolerance": 0.0}, "reward": {"test_fraction": 1.0},
            "test_weights": [1, 2.5],
        });
        let task = parse_row(Path::new("a.jsonl"), &row).unwrap();
        assert_eq!(task.id, "3");
        assert_eq!(
            (&*task.cases[0].input, &*task.cases[0].output),
            ("[1,[2]]", "null")
        );
        assert_eq!(
            (&*task.cases[1].input, &*task.cases[1].output),
            ("[3]", "4")
        );
        assert_eq!(task.reward.unwrap().test_fraction, 1.0);
        assert_eq!(task.test_weights, [1.0, 2.5]);
        assert_eq!(task.visible_tests, 1);
    }

    #[test]
    fn entry_points_come_from_the_reference_and_the_tests() {
        let row = json!({
            "grader": "pytest", "prompt": "Double.", "code": "def helper(): pass\ndef f(x): return 2 * x",
            "test": "from solution import f\n\ndef test_f():\n    assert f(1) == 2\n",
        });
        let task = parse_row(Path::new("a.jsonl"), &row).unwrap();
        assert_eq!(
            (task.entry_points, task.visible_tests),
            (vec!["f".to_owned()], 0)
        );
    }

    #[test]
    fn an_answer_is_a_case_or_several() {
        let mut row = json!({"grader": "numeric", "prompt": "2 + 2?", "answer": 4});
        assert_eq!(
            parse_row(Path::new("a"), &row).unwrap().cases[0].output,
            "4"
        );
        row["answer"] = json!(["4.0", "4"]);
        assert_eq!(parse_row(Path::new("a"), &row).unwrap().cases.len(), 2);
        for (wrong, expected) in [
            (
                json!("four"),
                "has an `answer` that cannot be used; give a finite number",
            ),
            (Value::Null, "`answer`"),
        ] {
            row["answer"] = wrong;
            let error = parse_row(Path::new("a"), &row).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_users_grader_lies_beside_the_tasks_and_gets_the_row() {
        let folder = tempfile::tempdir().unwrap();
        fs_err::write(
            folder.path().join("mine.py"),
            "def grade(candidate, task): return 1",
        )
        .unwrap();
        let path = folder.path().join("tasks.jsonl");
        let mut row = json!({"grader": "mine.py", "prompt": "Say hi.", "secret": 7});
        let task = parse_row(&path, &row).unwrap();
        assert_eq!((task.grader.as_str(), task.tests.len()), ("python", 1));
        assert_eq!(task.options["task"]["secret"], 7);
        for (name, expected) in [
            ("../mine.py", "has a `grader` that cannot be used"),
            ("/etc/mine.py", "has a `grader` that cannot be used"),
            ("other.py", "reading task file"),
        ] {
            row["grader"] = json!(name);
            let error = parse_row(&path, &row).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn errors_name_the_field() {
        for (key, value, expected) in [
            (
                "cases",
                json!(5),
                "has a number in `cases`; make it a list of objects",
            ),
            ("cases", json!([{"input": "1"}]), "has an object in `cases`"),
            (
                "reward",
                json!({"pased": 1}),
                "has a `reward` that is not an object of reward terms",
            ),
            (
                "options",
                json!([1]),
                "has an `options` that is not an object",
            ),
        ] {
            let mut row = json!({"grader": "stdio", "prompt": "p", "cases": [{"output": "1"}]});
            row[key] = value;
            let error = parse_row(Path::new("a"), &row).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let row = json!({"grader": "pytset", "prompt": "p", "test": "t"});
        let error = parse_row(Path::new("a"), &row).unwrap_err().to_string();
        assert!(
            error.starts_with("`a` row 3: there is no grader `pytset`; there are `calls`, "),
            "{error}"
        );
        let row = json!({"grader": "stdio", "prompt": "p"});
        let error = parse_row(Path::new("a"), &row).unwrap_err().to_string();
        assert!(error.contains("has no `tests`"), "{error}");
    }
}
