//! The `HumanEval` schema, which `HumanEval`+ shares: `prompt`, `canonical_solution`, `test`,
//! `entry_point`.
//!
//! `test` defines `check(candidate)` and may use what the prompt defines, as tasks 32, 38 and 50
//! do. So the prompt, whose functions are complete but for their bodies, is the grader's setup;
//! a submission's own versions of the helpers are not asked.

use super::fields::Fields;
use super::{Task, TaskError};

/// Reads one row.
///
/// # Errors
///
/// Fails when a field is missing, empty or of another type.
pub(super) fn parse(fields: Fields<'_>) -> Result<Task, TaskError> {
    if fields.has("plus_input") {
        return Err(fields.unsupported(
            "plus_input",
            "the inputs of EvalPlus's own layout have no expected outputs; use the layout of \
             `evalplus/humanevalplus`, also called `OriginFmt`",
        ));
    }
    let remedy = "use the `HumanEval` schema";
    let program = fields.text(&["prompt"], remedy)?;
    let solution = fields.text(&["canonical_solution"], remedy)?;
    Ok(Task {
        id: fields.id("task_id")?,
        prompt: format!(
            "Complete this Python function. Answer with the whole program, imports and helpers \
             included.\n\n```python\n{}\n```",
            program.trim_end()
        ),
        entry_points: vec![fields.text(&["entry_point"], remedy)?],
        tests: vec![fields.text(&["test"], remedy)?],
        reference: Some(format!("{program}{solution}")),
        setup: vec![program],
        grader: "check".to_owned(),
        ..Task::default()
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use serde_json::json;

    #[test]
    fn the_prompt_is_setup_and_the_reference_is_whole() {
        let row = json!({
            "task_id": "HumanEval/0", "prompt": "import math\n\ndef f(x):\n    \"\"\"Doubles.\"\"\"\n",
            "canonical_solution": "    return 2 * x\n", "entry_point": "f",
            "test": "def check(candidate):\n    assert candidate(1) == 2\n",
        });
        let fields = row.as_object().unwrap();
        let task = parse(Fields::new(Path::new("a"), 1, fields)).unwrap();
        assert_eq!(task.setup, [row["prompt"].as_str().unwrap()]);
        assert!(
            task.reference
                .unwrap()
                .ends_with("\"\"\"\n    return 2 * x\n")
        );
        assert_eq!((task.grader.as_str(), task.visible_tests), ("check", 0));
        let mut fields = fields.clone();
        fields.insert("plus_input".to_owned(), json!([[1]]));
        let error = parse(Fields::new(Path::new("a"), 1, &fields))
            .unwrap_err()
            .to_string();
        assert!(error.contains("OriginFmt"), "{error}");
    }
}
