use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::actor::ActorSpec;
use crate::env::actors::{Controls, InstanceGrader};
use crate::grader::VerdictStatus;
use crate::task::swebench::SwebenchInstance;

fn row() -> serde_json::Value {
    let change = |path: &str| {
        format!("diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-a\n+b\n")
    };
    json!({
        "repo": "a/b", "instance_id": "a__b-1", "base_commit": "base", "version": "1",
        "problem_statement": "It breaks.",
        "patch": change("src/a"), "test_patch": change("tests/test_a"),
        "log_parser": "parse_log_pytest", "FAIL_TO_PASS": ["two"], "PASS_TO_PASS": ["zero"],
        "workdir": "/testbed", "test_command": "run-tests",
    })
}

fn instance() -> SwebenchInstance {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    fs_err::write(&path, row().to_string()).unwrap();
    SwebenchInstance::read_file(&path).unwrap().remove(0)
}

/// A machine that is busy with something else makes tests late, too.
#[test]
fn tests_that_are_late_are_run_again_and_compared_with_the_reference_of_that_time() {
    let instance = instance();
    let spec = ActorSpec::new(RootFs::Host);
    // How many runs are late from the second grading on; what was known before is that the reference passes.
    for (late_runs, expected, runs) in [
        (0, (Some(1.0), VerdictStatus::Passed), 1),
        (1, (Some(1.0), VerdictStatus::Passed), 2),
        // The patch twice, and then the reference is in time.
        (2, (Some(0.0), VerdictStatus::Failed), 3),
        (3, (None, VerdictStatus::InfraError), 3),
    ] {
        let run = Arc::new(AtomicUsize::new(0));
        let late_until = Arc::new(AtomicUsize::new(0));
        let (counted, until) = (Arc::clone(&run), Arc::clone(&late_until));
        let backend = Scripted::new(move |_, line, _| {
            if !line.contains("run-tests") {
                return Ok(String::new());
            }
            match counted.fetch_add(1, Ordering::SeqCst) < until.load(Ordering::SeqCst) {
                true => Err(late()),
                false => Ok("PASSED two\nPASSED zero\n".to_owned()),
            }
        });
        let controls = Controls::default();
        let grader = InstanceGrader {
            backend: &*backend,
            spec: &spec,
            instance: &instance,
            bonus: SwebenchBonus {
                // The reference is run at once, in a quiet moment.
                faster_tests: 1e-9,
                ..SwebenchBonus::default()
            },
            timeout: Duration::from_secs(1),
            controls: &controls,
        };
        grader.grade(&instance.reference()).unwrap();
        run.store(0, Ordering::SeqCst);
        late_until.store(late_runs, Ordering::SeqCst);
        let verdict = grader.grade(&instance.reference()).unwrap().verdict;
        let reward = verdict.reward.map(f64::round);
        assert_eq!(
            (reward, verdict.status),
            expected,
            "{late_runs}: {verdict:?}"
        );
        assert_eq!(run.load(Ordering::SeqCst), runs, "{late_runs}");
        assert_eq!(backend.live(), 0);
    }
}

/// What a policy changed is looked at in its own actor, where it may have made that slow.
#[test]
fn a_patch_that_is_late_is_the_policys_doing_where_another_is_in_time() {
    let folder = tempfile::tempdir().unwrap();
    fs_err::create_dir_all(folder.path().join("a__b-1/testbed")).unwrap();
    let task = task(folder.path(), &[("a.jsonl", &row().to_string())]);
    // How often it is late in the policy's actor, and whether it is in the control's.
    for (times, control_is_late, expected) in [
        (1, true, Some(EpisodeStatus::Invalid)),
        (2, false, Some(EpisodeStatus::Invalid)),
        (2, true, Some(EpisodeStatus::InfraError)),
    ] {
        let tries = AtomicUsize::new(0);
        let backend = Scripted::new(move |inside, line, _| {
            if !line.contains("write-tree") {
                return Ok(String::new());
            }
            let is_late = match inside.number {
                _ if line.ends_with(" HEAD") => false,
                0 => tries.fetch_add(1, Ordering::SeqCst) < times,
                _ => control_is_late,
            };
            match is_late {
                true => Err(late()),
                false => Ok("0123456789".repeat(4)),
            }
        });
        let place = place_with(&backend, Some(RootFs::Host), None, Some(folder.path()));
        let mut environment = environment(&place, &task);
        let work = ParsedTurn {
            tool_calls: vec![Ok(ToolCall::new("bash", json!({ "command": "work" })))],
            ..ParsedTurn::default()
        };
        assert!(!environment.step(&work).unwrap().done);
        let result = submit(&mut environment);
        assert_eq!(result.status, expected, "{times}: {result:?}");
        // What is told in time is that nothing was changed, for the tests' own actor; else there is the control's.
        assert_eq!((backend.started(), backend.live()), (2, 0));
    }
}
