//! Runs over several environments.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::Value;
use wardian::trajectory::{Trajectory, read_step, step_path};

/// Two environments with graders of their own, of weights 3 and 1, in steps of 5 groups.
const SETTINGS: &str = "
    seed = 3
    model.path = 'starter'
    [environments.code]
    path = 'starter'
    weight = 3
    visible_tests = 1
    [environments.maths]
    path = 'MATHS'
    tools = false
    max_turns = 1
    max_new_tokens = 8
    system_prompt = 'Count.'
    reward.passed = 2.0
    [rollout]
    group_size = 2
    groups_per_step = 5
    max_turns = 3
    max_new_tokens = 64
    max_total_tokens = 224
    [sandbox]
    memory = '128MiB'
    fuel = 2000000000
    deadline = '2m'
    grade_fuel = 2000000000
    [trainer]
    mode = 'lora'
    lora_rank = 4
    steps = 4
    save_every = 1
    [eval]
    samples = 1
    limit = 2
";

/// Writes ten questions and the run file.
fn prepare(folder: &Path) -> String {
    let rows: Vec<String> = (1..=10)
        .map(|number| {
            let answer = format!("It is {number}.\n#### {number}");
            serde_json::json!({"question": format!("Say {number}."), "answer": answer}).to_string()
        })
        .collect();
    let maths = folder.join("maths.jsonl");
    fs_err::write(&maths, rows.join("\n")).expect("written");
    let file = folder.join("run.toml");
    let text = SETTINGS.replace("MATHS", text(&maths));
    fs_err::write(&file, text).expect("written");
    text_of(&file)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn text_of(path: &Path) -> String {
    text(path).to_owned()
}

fn start(arguments: &[&str]) -> Child {
    crate::binary::command()
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts")
}

/// Returns what a command prints, data and messages.
fn wardian(arguments: &[&str]) -> (String, String) {
    let output = start(arguments).wait_with_output().expect("it ends");
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{messages}");
    let data = String::from_utf8_lossy(&output.stdout).into_owned();
    (data, messages)
}

fn episodes(run: &Path, step: u64) -> Vec<Trajectory> {
    let episodes = read_step(&step_path(run, step)).expect("the step is there");
    episodes.collect::<Result<_, _>>().expect("every row reads")
}

fn rows(run: &Path) -> Vec<Value> {
    let text = fs_err::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let row = |line: &str| serde_json::from_str(line).expect("a JSON line");
    text.lines().map(row).collect()
}

/// Returns what a run made: weights, episodes, rows without times, and the summary.
fn outcome(run: &Path) -> (Vec<u8>, Vec<Value>, Vec<Value>, Value) {
    let weights = fs_err::read(run.join("final/adapter_model.safetensors")).expect("weights");
    let episodes = (1..=4).flat_map(|step| episodes(run, step));
    let episodes = episodes.map(|episode| {
        let mut episode = serde_json::to_value(episode).expect("JSON");
        let keys = episode.as_object_mut().expect("an object");
        keys.remove("usage");
        episode
    });
    let rows = rows(run).into_iter().map(|mut row| {
        let keys = row.as_object_mut().expect("an object");
        keys.retain(|key, _| {
            !key.ends_with("_time") && !key.ends_with("_seconds") && key != "tokens_per_second"
        });
        row
    });
    let summary = fs_err::read_to_string(run.join("summary.json")).expect("a summary");
    let mut summary: Value = serde_json::from_str(&summary).expect("JSON");
    summary["wall_s"] = Value::Null;
    (weights, episodes.collect(), rows.collect(), summary)
}

#[test]
fn environments_share_a_run_by_weight_and_are_measured_each() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = prepare(folder.path());
    let run = folder.path().join("run");
    let (_, messages) = wardian(&["train", "--config", &file, "--out", text(&run)]);
    assert!(messages.contains("  maths: 0.0 %"), "{messages}");
    let mut groups: BTreeMap<String, usize> = BTreeMap::new();
    for step in 1..=4 {
        for episode in episodes(&run, step) {
            let (name, _) = episode.task_id.split_once('/').expect("an environment's");
            *groups.entry(name.to_owned()).or_default() += 1;
            if name == "maths" {
                assert_eq!(episode.messages[0].content, "Count.");
                assert_eq!(episode.turns.len(), 1);
                assert!(episode.trace.sampled_len() <= 8);
            }
        }
    }
    // 20 groups of 2 episodes, three quarters and a quarter.
    assert_eq!(
        groups,
        [("code".to_owned(), 30), ("maths".to_owned(), 10)].into()
    );
    let rows = rows(&run);
    assert_eq!(rows.len(), 4);
    let mut told = 0.0;
    for row in &rows {
        told += row["groups/maths"].as_f64().unwrap_or(0.0);
        assert!(row["reward/code"].is_number(), "{row}");
        assert!(row["pass_rate/code"].is_number(), "{row}");
    }
    assert_eq!(told, 5.0);
    let (.., summary) = outcome(&run);
    let environments = &summary["environments"];
    for when in ["before", "after"] {
        assert_eq!(summary[when]["tasks"], 4);
        assert_eq!(environments["code"][when]["tasks"], 2);
        assert_eq!(environments["maths"][when]["tasks"], 2);
        let share = |measured: &Value| measured[when]["pass_at_1"].as_f64().expect("a share");
        let mean = (share(&environments["code"]) + share(&environments["maths"])) / 2.0;
        assert_eq!(share(&summary), mean);
    }
    let page = fs_err::read_to_string(run.join("report.html")).expect("a report");
    assert!(page.contains("<h3>maths</h3>") && page.contains("Pass rate by environment"));
    // What the run leaves is measured by its own run file, on the same tasks.
    let resolved = run.join("run.toml");
    let last = run.join("final");
    let (data, messages) = wardian(&[
        "eval",
        "--config",
        text(&resolved),
        "--model",
        text(&last),
        "--format",
        "json",
    ]);
    let report: Value = serde_json::from_str(&data).expect("JSON");
    assert_eq!(
        report["pass_at_1"], summary["after"]["pass_at_1"],
        "{messages}"
    );
    assert_eq!(
        report["scores"][0]["task_id"].as_str().map(|id| &id[..5]),
        Some("code/")
    );
}

#[test]
fn a_killed_mixture_goes_on_to_the_same_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = prepare(folder.path());
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let arguments = |out: &Path| -> Vec<String> {
        let fixed = [
            "train",
            "--config",
            &file,
            "--set",
            "trainer.dynamic_sampling=true",
            "--set",
            "trainer.max_draws=2",
            "--set",
            "environments.code.curriculum=pass_rate",
            "--set",
            "environments.code.weight=1.5",
            "--set",
            "trainer.save_every=2",
            "--out",
        ];
        let fixed = fixed.into_iter().map(str::to_owned);
        fixed.chain([text_of(out)]).collect()
    };
    let run = |out: &Path| arguments(out);
    let borrowed: Vec<String> = run(&whole);
    let borrowed: Vec<&str> = borrowed.iter().map(String::as_str).collect();
    wardian(&borrowed);
    let owned = run(&killed);
    let borrowed: Vec<&str> = owned.iter().map(String::as_str).collect();
    let mut child = start(&borrowed);
    while fs_err::read_to_string(killed.join("metrics.jsonl"))
        .unwrap_or_default()
        .lines()
        .count()
        < 3
    {
        let ended = child.try_wait().expect("it can be waited for");
        assert!(ended.is_none(), "it ended before it was killed: {ended:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().expect("it can be killed");
    child.wait().expect("it ends");
    assert!(!killed.join("summary.json").exists());
    wardian(&["train", "--resume", text(&killed)]);
    assert!(outcome(&whole) == outcome(&killed), "the runs differ");
}

#[test]
fn environments_stand_in_place_of_the_starters_tasks() {
    let folder = tempfile::tempdir().expect("a folder");
    prepare(folder.path());
    let maths = format!(
        "environments.maths.path={}",
        text(&folder.path().join("maths.jsonl"))
    );
    let run = folder.path().join("run");
    let mut arguments = vec!["train", "--out", text(&run), "--set", &maths];
    for set in [
        "environments.maths.max_new_tokens=4",
        "trainer.steps=1",
        "rollout.groups_per_step=2",
        "rollout.group_size=2",
    ] {
        arguments.extend(["--set", set]);
    }
    wardian(&arguments);
    let ids = episodes(&run, 1);
    assert!(
        ids.iter()
            .all(|episode| episode.task_id.starts_with("maths/"))
    );
}
