//! Which schema a row has, by its fields.

use std::path::Path;

use serde_json::{Map, Value};

use super::fields::Fields;
use super::swebench::SwebenchInstance;
use super::{
    GraderChoice, Task, TaskError, TaskOptions, answers, contest, humaneval, mbpp, own, remote,
};

/// Reads one row of any known schema.
///
/// # Errors
///
/// Fails when the row has no known schema, or not all that its schema has.
pub(super) fn parse(
    path: &Path,
    row: u64,
    map: &Map<String, Value>,
    options: &TaskOptions,
) -> Result<Task, TaskError> {
    let fields = Fields::new(path, row, map);
    if options.remote {
        return remote::parse(fields);
    }
    let named = fields.optional_text("grader")?.map(GraderChoice::Name);
    if let Some(grader) = options.grader.as_ref().or(named.as_ref()) {
        return own::parse(fields, grader, options);
    }
    if fields.has("FAIL_TO_PASS") {
        let instance = SwebenchInstance::read(path, row, map)?;
        return Ok(Task::of_swebench(instance, map));
    }
    if fields.has("canonical_solution") {
        return humaneval::parse(fields);
    }
    if fields.has("input_output") {
        return contest::parse_apps(fields, options);
    }
    if fields.has("public_test_cases") || fields.has("private_test_cases") {
        return contest::parse_live(fields, options);
    }
    if fields.has("question") && fields.has("answer") {
        return answers::parse(fields);
    }
    mbpp::parse(fields, options)
}
