//! Cheats that win where the tests share the submission's interpreter, and win nothing here.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::sync::Arc;

use serde::Deserialize;
use wardian::grader::{GradeLimits, GradeRequest, Grader as _, UnitTestGrader, VerdictStatus};
use wardian::sandbox::{ExecRequest, Limits};

use crate::sandbox::python;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Attack {
    id: String,
    entry: String,
    setup: String,
    tests: Vec<String>,
    /// The cheat.
    code: String,
    honest: String,
}

fn attacks() -> Vec<Attack> {
    include_str!("../data/shared_interpreter.jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// A grader as many have it: submission and tests one after the other, judged by the exit status.
fn shares_and_passes(attack: &Attack, code: &str) -> bool {
    let program = format!("{code}\n{}\n{}", attack.setup, attack.tests.join("\n"));
    let outcome = python()
        .exec(&ExecRequest::new(program), &Limits::default())
        .unwrap();
    outcome.exit.is_success()
}

#[test]
fn what_fools_a_shared_interpreter_fools_no_grader() {
    let attacks = attacks();
    assert!(attacks.len() >= 60);
    let grader = UnitTestGrader::new(Arc::new(python().clone()), GradeLimits::default());
    for attack in &attacks {
        let id = &attack.id;
        let grade = |code: &str| {
            grader.grade(&GradeRequest {
                code: code.to_owned(),
                setup: vec![attack.setup.clone()],
                tests: attack.tests.clone(),
                entry_points: vec![attack.entry.clone()],
                ..GradeRequest::default()
            })
        };
        // Else the attack would have failed for a fault of its own.
        assert!(shares_and_passes(attack, &attack.code), "{id} is no attack");
        let verdict = grade(&attack.code);
        assert_eq!(verdict.reward, Some(0.0), "{id}: {verdict:?}");
        assert_eq!(verdict.status, VerdictStatus::Failed, "{id}: {verdict:?}");
        assert!(shares_and_passes(attack, &attack.honest), "{id}");
        let verdict = grade(&attack.honest);
        assert_eq!(verdict.reward, Some(1.0), "{id}: {verdict:?}");
    }
}
