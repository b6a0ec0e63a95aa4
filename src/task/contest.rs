//! The schemas of programming contests: APPS and `LiveCodeBench`.
//!
//! | | APPS | `LiveCodeBench` |
//! |---|---|---|
//! | problem | `question`, `starter_code` | `question_content`, `starter_code` |
//! | id | `problem_id` | `question_id` |
//! | tests | `input_output`: `inputs`, `outputs`, and for calls `fn_name` | `public_test_cases`, `private_test_cases`, `metadata.func_name` |
//! | reference | the first of `solutions` | – |
//!
//! The fields with tests hold JSON as text, as in the published files. Programs read standard input
//! (grader `stdio`), or a function or method is called (grader `calls`).

use serde_json::Value;

use super::fields::Fields;
use super::json_text::parts;
use super::{Task, TaskError, TaskOptions};
use crate::grader::TestCase;

/// What is wrong with text that should hold JSON.
const NOT_JSON: &str = "make it JSON as text, as in the published file";

/// Reads one row of APPS.
///
/// # Errors
///
/// Fails when a field is missing, empty, of another type or not the JSON it should be.
pub(super) fn parse_apps(fields: Fields<'_>, options: &TaskOptions) -> Result<Task, TaskError> {
    let key = "input_output";
    let text = fields.text(&[key], "use the APPS schema")?;
    let members = parts(&text).ok_or_else(|| fields.unsupported(key, NOT_JSON))?;
    let member = |name: &str| {
        let found = members.iter().find(|(known, _)| known == name);
        found.map(|(_, text)| *text)
    };
    let list = |name: &str| member(name).and_then(parts);
    let (Some(inputs), Some(outputs)) = (list("inputs"), list("outputs")) else {
        return Err(fields.unsupported(key, "give it lists `inputs` and `outputs`"));
    };
    if inputs.is_empty() || inputs.len() != outputs.len() {
        return Err(fields.unsupported(key, "give as many `outputs` as `inputs`, at least one"));
    }
    let function: Option<String> =
        member("fn_name").and_then(|name| serde_json::from_str(name).ok());
    let starter = fields.optional_text("starter_code")?.unwrap_or_default();
    let is_call = function.is_some();
    let as_text = |part: &str| {
        if is_call {
            part.to_owned()
        } else {
            printed(part)
        }
    };
    let cases: Vec<TestCase> = inputs
        .iter()
        .zip(&outputs)
        .map(|((_, input), (_, output))| TestCase {
            input: as_text(input),
            output: as_text(output),
        })
        .collect();
    let reference = match fields.optional_text("solutions")? {
        Some(text) => serde_json::from_str::<Vec<String>>(&text)
            .map_err(|_| fields.unsupported("solutions", NOT_JSON))?
            .into_iter()
            .next(),
        None => None,
    };
    let mut task = Task {
        id: fields.id_or_row("problem_id")?,
        prompt: with_starter(fields.text(&["question"], "use the APPS schema")?, &starter),
        visible_tests: options.visible_tests.min(cases.len()),
        cases,
        reference,
        ..Task::default()
    };
    set_interface(&mut task, function, &starter);
    if is_call {
        task.options.insert("unwrap".to_owned(), true.into());
    }
    Ok(task)
}

/// Reads one row of `LiveCodeBench`.
///
/// # Errors
///
/// As for APPS; also where the private tests are in the published file's compressed form.
pub(super) fn parse_live(fields: Fields<'_>, options: &TaskOptions) -> Result<Task, TaskError> {
    let mut cases = test_cases(fields, "public_test_cases")?;
    let public = cases.len();
    cases.extend(test_cases(fields, "private_test_cases")?);
    if cases.is_empty() {
        return Err(fields.empty("public_test_cases"));
    }
    let metadata = fields.optional_text("metadata")?.unwrap_or_default();
    let metadata: Value = serde_json::from_str(&metadata).unwrap_or_default();
    let function = metadata["func_name"].as_str().map(str::to_owned);
    let starter = fields.optional_text("starter_code")?.unwrap_or_default();
    if function.is_some() {
        for case in &mut cases {
            // Each line is an argument.
            let arguments: Vec<&str> = (case.input.lines())
                .map(str::trim)
                .filter(|line| !line.is_empty())
                .collect();
            case.input = format!("[{}]", arguments.join(", "));
        }
    }
    let question = fields.text(&["question_content"], "use the `LiveCodeBench` schema")?;
    let mut task = Task {
        id: fields.id_or_row("question_id")?,
        prompt: with_starter(question, &starter),
        visible_tests: options.visible_tests.min(public),
        cases,
        ..Task::default()
    };
    set_interface(&mut task, function, &starter);
    Ok(task)
}

fn test_cases(fields: Fields<'_>, key: &'static str) -> Result<Vec<TestCase>, TaskError> {
    #[derive(serde::Deserialize)]
    struct Case {
        input: String,
        output: String,
    }
    let Some(text) = fields.optional_text(key)? else {
        return Ok(Vec::new());
    };
    let cases: Vec<Case> = serde_json::from_str(&text).map_err(|_| {
        fields.unsupported(
            key,
            "make it a JSON list as text; the published private tests are base64 of zlib of a \
             pickle, so decode them first",
        )
    })?;
    Ok(cases
        .into_iter()
        .map(|Case { input, output }| TestCase { input, output })
        .collect())
}

/// Says how the submission is asked.
fn set_interface(task: &mut Task, function: Option<String>, starter: &str) {
    let Some(function) = function else {
        "stdio".clone_into(&mut task.grader);
        return;
    };
    "calls".clone_into(&mut task.grader);
    let (entry_point, call) = if starter.contains("class Solution") {
        ("Solution".to_owned(), format!("Solution().{function}"))
    } else {
        (function.clone(), function)
    };
    task.options.insert("call".to_owned(), call.into());
    task.entry_points = vec![entry_point];
}

fn with_starter(question: String, starter: &str) -> String {
    if starter.trim().is_empty() {
        return question;
    }
    format!(
        "{}\n\n```python\n{}\n```",
        question.trim_end(),
        starter.trim_end()
    )
}

/// Returns an input or output of a program: a text, or a list of lines.
fn printed(part: &str) -> String {
    match serde_json::from_str(part) {
        Ok(Value::String(text)) => text,
        Ok(Value::Array(lines)) => {
            let line = |value: &Value| match value {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            lines.iter().map(line).collect::<Vec<_>>().join("\n")
        }
        _ => part.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use serde_json::json;

    fn read(
        row: &Value,
        parse: fn(Fields<'_>, &TaskOptions) -> Result<Task, TaskError>,
    ) -> Result<Task, TaskError> {
        let options = TaskOptions {
            visible_tests: 1,
            ..TaskOptions::default()
        };
        parse(
            Fields::new(Path::new("a"), 1, row.as_object().unwrap()),
            &options,
        )
    }

    #[test]
    fn apps_programs_read_standard_input() {
        let row = json!({
            "problem_id": 7, "question": "Add.", "starter_code": "",
            "solutions": "[\"print(sum(map(int, input().split())))\"]",
            "input_output": r#"{"inputs": ["1 2\n", ["3 4", "5"]], "outputs": ["3\n", ["7"]]}"#,
        });
        let task = read(&row, parse_apps).unwrap();
        assert_eq!((task.id.as_str(), task.grader.as_str()), ("7", "stdio"));
        let second = TestCase {
            input: "3 4\n5".to_owned(),
            output: "7".to_owned(),
        };
        assert_eq!((task.cases.len(), &task.cases[1]), (2, &second));
        assert!(task.reference.unwrap().starts_with("print"));
    }

    #[test]
    fn apps_calls_keep_their_numbers() {
        let row = json!({
            "problem_id": 8, "question": "Add.",
            "starter_code": "class Solution:\n    def add(self, a, b):\n        ",
            "input_output": r#"{"fn_name": "add", "inputs": [[1, 100000000000000000000]], "outputs": [[100000000000000000001]]}"#,
        });
        let task = read(&row, parse_apps).unwrap();
        assert_eq!(task.grader, "calls");
        assert_eq!(task.options["call"], "Solution().add");
        assert_eq!(task.entry_points, ["Solution"]);
        assert_eq!(task.cases[0].input, "[1, 100000000000000000000]");
        assert_eq!(task.cases[0].output, "[100000000000000000001]");
        assert!(task.prompt.ends_with("def add(self, a, b):\n```"));
    }

    #[test]
    fn live_code_bench_has_public_and_private_tests() {
        let mut row = json!({
            "question_id": "abc", "question_content": "Add.", "starter_code": "class Solution:\n",
            "public_test_cases": r#"[{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]"#,
            "private_test_cases": r#"[{"input": "[]\n0\n", "output": "0", "testtype": "functional"}]"#,
            "metadata": r#"{"func_name": "add"}"#,
        });
        let task = read(&row, parse_live).unwrap();
        assert_eq!((task.cases.len(), task.visible_tests), (2, 1));
        assert_eq!(task.cases[0].input, "[[1, 2], 3]");
        assert_eq!(task.cases[1].input, "[[], 0]");
        row["metadata"] = json!("{}");
        assert_eq!(read(&row, parse_live).unwrap().grader, "stdio");
        row["private_test_cases"] = json!("eJxr");
        let error = read(&row, parse_live).unwrap_err().to_string();
        assert!(error.contains("decode them first"), "{error}");
    }

    #[test]
    fn inputs_and_outputs_must_be_pairs() {
        for text in [
            "{}",
            "[1]",
            "no",
            r#"{"inputs": [], "outputs": []}"#,
            r#"{"inputs": ["1"], "outputs": []}"#,
        ] {
            let row = json!({"question": "Add.", "input_output": text});
            let error = read(&row, parse_apps).unwrap_err().to_string();
            assert!(
                error.starts_with("`a` row 1 has an `input_output` that cannot be used"),
                "{error}"
            );
        }
    }
}
