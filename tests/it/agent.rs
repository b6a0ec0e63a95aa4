//! `wardian train` with an agent that is a program of its own.

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use wardian::trajectory::read_step;

const AGENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/agents/minimal.py");

/// Trains the carried model for two steps with an agent; returns what it told.
fn train(run: &Path, agent: &[&str], sets: &[&str]) -> (bool, String) {
    let command = format!("rollout.agent.command={agent:?}");
    let all = [
        &command,
        "rollout.agent.isolation=none",
        "rollout.agent.concurrency=4",
        "rollout.agent.env={PYTHONDONTWRITEBYTECODE = \"1\"}",
        "rollout.groups_per_step=3",
        "rollout.group_size=4",
        "trainer.steps=2",
        "eval.limit=4",
        "eval.samples=1",
    ];
    let output = Command::new(env!("CARGO_BIN_EXE_wardian"))
        .args(["train", "--out"])
        .arg(run)
        .args(all.iter().chain(sets).flat_map(|set| ["--set", *set]))
        .env_remove("WARDIAN_LOG")
        .output()
        .expect("the binary starts");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.success(), told)
}

/// The agent asks over a socket in whatever order its processes come; what it samples, and so what is
/// learned, depends on the seed alone.
#[test]
fn an_agents_run_learns_and_repeats() {
    let folder = tempfile::tempdir().expect("a folder is made");
    let runs = ["a", "b"].map(|name| folder.path().join(name));
    for run in &runs {
        let sets = ["reward.loads=0.5", "reward.test_fraction=0.5"];
        let (is_done, told) = train(run, &["python3", AGENT], &sets);
        assert!(is_done, "{told}");
    }
    let [first, second] = runs.each_ref().map(|run| {
        let model = fs_err::read(run.join("final/model.safetensors"));
        model.expect("the model is written")
    });
    assert!(first == second, "the same run led elsewhere");
    let carried =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/starter/model/model.safetensors");
    assert!(
        first != fs_err::read(carried).expect("the model is carried"),
        "nothing was learned"
    );

    let step = runs[0].join("rollouts/step-1.jsonl");
    let rows: Vec<_> = read_step(&step)
        .expect("the step is there")
        .map(|row| row.expect("a row"))
        .collect();
    assert_eq!(rows.len(), 12);
    assert!(
        rows.iter()
            .all(|row| row.trace.sampled_len() > 0 && row.passed.is_some())
    );
    assert!(
        rows.iter().any(|row| row.reward != rows[0].reward),
        "rewards differ"
    );
    assert!(
        rows.iter().any(|row| row.turns[0].tool_calls == 1),
        "a tool is called"
    );
    let metrics = fs_err::read_to_string(runs[0].join("metrics.jsonl")).expect("they are there");
    for line in metrics.lines() {
        let row: Value = serde_json::from_str(line).expect("a row");
        assert_eq!(row["episodes/unscorable"], 0, "{row}");
        let difference = row["sampling/sampling_logp_difference/max"].as_f64();
        assert!(
            difference.is_some_and(|difference| difference < 1e-3),
            "{row}"
        );
    }
}

/// An agent that never asks the model has failed by itself: nothing is learned from that, and it is said.
#[test]
fn an_agent_that_fails_is_no_fault_of_the_policy() {
    let folder = tempfile::tempdir().expect("a folder is made");
    let script = "echo no module named agent >&2; exit 1";
    let (is_done, told) = train(&folder.path().join("run"), &["sh", "-c", script], &[]);
    assert!(!is_done);
    assert!(told.contains("did not call the model"), "{told}");
    assert!(told.contains("no module named agent"), "{told}");

    let (is_done, told) = train(&folder.path().join("other"), &["no-such-agent"], &[]);
    assert!(!is_done);
    assert!(told.contains("no program `no-such-agent`"), "{told}");
    let (is_done, told) = train(&folder.path().join("none"), &[], &[]);
    assert!(!is_done);
    assert!(told.contains("rollout.agent.command"), "{told}");
}
