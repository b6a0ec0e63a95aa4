//! `wardian train` with an agent that is a program of its own.

use std::path::Path;

use serde_json::Value;
use wardian::trajectory::{Status, read_step};

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
    let output = crate::binary::command()
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

/// Asks for two tokens, which end no answer.
const HASTY: &str = r#"
import json, os, urllib.request
body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "Write f."}]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
"#;

/// What is cut off can be left out of the loss (`trainer.mask_truncated`), so it has to be known.
#[test]
fn a_row_whose_last_answer_was_cut_off_says_so() {
    let folder = tempfile::tempdir().expect("a folder is made");
    let run = folder.path().join("run");
    let (is_done, told) = train(&run, &["python3", "-c", HASTY], &["trainer.steps=1"]);
    assert!(is_done, "{told}");
    let step = read_step(&run.join("rollouts/step-1.jsonl")).expect("the step is there");
    let rows: Vec<_> = step.map(|row| row.expect("a row")).collect();
    assert_eq!(rows.len(), 12);
    for row in rows {
        assert_eq!((row.trace.sampled_len(), row.passed), (2, Some(false)));
        assert_eq!(row.status, Status::Truncated);
    }
}
