//! The GSM8K schema: `question`, and `answer`, whose last line is `#### N`.

use super::fields::Fields;
use super::{Task, TaskError};
use crate::grader::{TestCase, is_number};

/// Reads one row; its number is its id.
///
/// # Errors
///
/// Fails when a field is missing, empty or of another type, or when no answer is marked.
pub(super) fn parse(fields: Fields<'_>) -> Result<Task, TaskError> {
    let remedy = "use the GSM8K schema";
    let answer = fields.text(&["answer"], remedy)?;
    let Some((_, number)) = answer.rsplit_once("####") else {
        return Err(fields.unsupported("answer", "mark the number as in GSM8K: `#### 18`"));
    };
    if !is_number(number) {
        return Err(fields.unsupported("answer", "mark a finite number: `#### 18`"));
    }
    Ok(Task {
        id: fields.id_or_row("task_id")?,
        prompt: fields.text(&["question"], remedy)?,
        cases: vec![TestCase {
            input: String::new(),
            output: number.trim().to_owned(),
        }],
        grader: "numeric".to_owned(),
        reference: Some(answer),
        ..Task::default()
    })
}
