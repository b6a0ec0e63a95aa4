//! Commands that help: recipes, the schema, runs that are there, completions and manual pages.

use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};

fn wardian_in(folder: &Path, arguments: &[&str]) -> Output {
    crate::binary::command()
        .args(arguments)
        .current_dir(folder)
        .env("NO_COLOR", "1")
        .output()
        .expect("the binary starts")
}

#[track_caller]
fn printed(folder: &Path, arguments: &[&str]) -> String {
    let output = wardian_in(folder, arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    String::from_utf8(output.stdout).expect("it prints UTF-8")
}

#[track_caller]
fn refused(folder: &Path, arguments: &[&str], expected: &str) {
    let output = wardian_in(folder, arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(
        errors.contains(expected),
        "`{expected}` is not in: {errors}"
    );
}

#[test]
fn init_lists_recipes_writes_one_and_overwrites_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let list = printed(folder.path(), &["init"]);
    let names: Vec<&str> = (list.lines())
        .map(|line| line.split(' ').next().expect("a name"))
        .collect();
    for wanted in [
        "mbpp-lora",
        "humaneval",
        "swe-bench",
        "own-tasks",
        "external-agent",
    ] {
        assert!(names.contains(&wanted), "{list}");
    }
    for name in &names {
        let file = format!("{name}.toml");
        printed(folder.path(), &["init", name, "--out", &file]);
        let text = fs_err::read_to_string(folder.path().join(&file)).expect("it is written");
        let config = wardian::config::RunConfig::from_toml::<&str>(&text, &[]);
        config.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    // With the program that it starts, so that it runs where it is.
    let read = |name| fs_err::read_to_string(folder.path().join(name)).expect("it is written");
    assert!(read("external-agent.toml").contains(r#""agent.py""#));
    assert!(read("agent.py").contains("WARDIAN_TASK"));
    let again = ["init", "external-agent", "--out", "again.toml"];
    refused(folder.path(), &again, "`agent.py` is there already");
    assert!(!folder.path().join("again.toml").exists());
    printed(folder.path(), &["init", "humaneval"]);
    let path = folder.path().join("run.toml");
    fs_err::write(&path, "mine").expect("written");
    refused(
        folder.path(),
        &["init", "humaneval"],
        "`run.toml` is there already",
    );
    assert_eq!(fs_err::read_to_string(&path).expect("it is there"), "mine");
}

#[test]
fn the_schema_goes_to_a_file_or_the_terminal() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = printed(folder.path(), &["schema"]);
    let schema: Value = serde_json::from_str(&text).expect("one JSON value");
    assert_eq!(schema["additionalProperties"], false);
    assert_eq!(schema["properties"]["seed"]["minimum"], 0);
    printed(folder.path(), &["schema", "--out", "schema.json"]);
    let file = fs_err::read_to_string(folder.path().join("schema.json")).expect("it is written");
    assert_eq!(file, text);
}

/// Writes the folder of a run.
fn write_run(folder: &Path, settings: &str, rewards: &[f64], summary: Option<Value>) {
    fs_err::create_dir_all(folder).expect("made");
    fs_err::write(folder.join("run.toml"), settings).expect("written");
    let measured = json!({ "step": 0, "eval/pass_at_1": 0.25, "eval/ci95": [0.125, 0.375] });
    let row = |(step, reward): (u64, &f64)| {
        json!({
            "step": step, "reward": reward, "step_time": 2.0, "generate_time": 1.5,
            "update_time": 0.25, "tokens_per_second": 100.0, "completions/mean_length": 40.0,
        })
    };
    let rows = std::iter::once(measured).chain((1..).zip(rewards).map(row));
    let metrics: String = rows.map(|row| row.to_string() + "\n").collect();
    fs_err::write(folder.join("metrics.jsonl"), metrics).expect("written");
    if let Some(summary) = summary {
        fs_err::write(folder.join("summary.json"), summary.to_string()).expect("written");
    }
}

fn two_runs() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let runs = folder.path().join("runs");
    let measured = |pass_at_1: f64| {
        json!({
            "pass_at_1": pass_at_1, "ci95": [pass_at_1 - 0.0625, pass_at_1 + 0.0625],
            "tasks": 8, "samples": 2, "unscorable": 0,
        })
    };
    let summary = json!({
        "before": measured(0.25), "after": measured(0.75), "difference": null,
        "steps": 3, "wall_s": 90.0, "tokens": 1000, "seed": 0,
    });
    let first = "seed = 0\n[trainer]\nsteps = 3\nlearning_rate = 1e-4\n";
    write_run(&runs.join("first"), first, &[0.1, 0.5, 0.4], Some(summary));
    let second = "seed = 0\n[trainer]\nsteps = 9\nlearning_rate = 1e-5\n";
    write_run(&runs.join("second"), second, &[0.1, 0.2], None);
    fs_err::create_dir(runs.join("no-run")).expect("made");
    folder
}

#[test]
fn runs_are_listed_with_what_they_came_to() {
    let folder = two_runs();
    let list = printed(folder.path(), &["runs"]);
    let lines: Vec<Vec<&str>> = list
        .lines()
        .map(|l| l.split_whitespace().collect())
        .collect();
    assert_eq!(lines.len(), 3, "{list}");
    assert_eq!(
        lines[0],
        [
            "NAME", "STATE", "STEPS", "REWARD", "PASS@1", "STARTED", "TIME"
        ]
    );
    let row = |name: &str| {
        let found = lines.iter().find(|line| line[0] == name);
        found.unwrap_or_else(|| panic!("{list}")).clone()
    };
    assert_eq!(
        row("first")[..5],
        ["first", "finished", "3/3", "0.500", "0.750"]
    );
    assert_eq!(row("first")[6..].join(" "), "1 min 30 s");
    assert_eq!(
        row("second")[..5],
        ["second", "stopped", "2/9", "0.200", "0.250"]
    );
    let all: Value = serde_json::from_str(&printed(folder.path(), &["runs", "--format", "json"]))
        .expect("one JSON value");
    let all = all.as_array().expect("a list");
    let first = all
        .iter()
        .find(|run| run["name"] == "first")
        .expect("it is listed");
    assert_eq!(first["state"], "finished");
    assert_eq!(first["ci95"], json!([0.6875, 0.8125]));
    assert_eq!(first["seconds"], 90.0);
    refused(folder.path(), &["runs", "nowhere"], "nowhere");
}

#[test]
fn two_runs_are_compared_by_settings_pass_rates_metrics_and_time() {
    let folder = two_runs();
    let arguments = ["compare", "runs/first", "runs/second"];
    let text = printed(folder.path(), &arguments);
    for part in [
        "trainer.learning_rate",
        "75.0 % (68.8 to 81.2), step 3",
        "25.0 % (12.5 to 37.5), step 0",
        "0.4000 (0.1000 to 0.5000)",
        "generate_time",
    ] {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
    assert!(
        !text.contains("  seed"),
        "what is alike is left out: {text}"
    );
    let json = printed(
        folder.path(),
        &[&arguments[..], &["--format", "json"]].concat(),
    );
    let compared: Value = serde_json::from_str(&json).expect("one JSON value");
    let settings = compared["settings"].as_array().expect("a list");
    let changed: Vec<&Value> = settings.iter().map(|setting| &setting["key"]).collect();
    assert_eq!(changed, ["trainer.learning_rate", "trainer.steps"]);
    assert_eq!(compared["pass_rates"][2]["values"][0]["pass_at_1"], 0.75);
    assert_eq!(compared["curves"][0]["values"][1]["highest"], 0.2);
    refused(
        folder.path(),
        &["compare", "runs/first", "runs/no-run"],
        "no-run",
    );
}

#[test]
fn every_command_is_completed_and_has_a_page() {
    let folder = tempfile::tempdir().expect("a folder");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = printed(folder.path(), &["completions", shell]);
        for word in ["train", "doctor", "price-per-hour"] {
            assert!(script.contains(word), "no `{word}` in {shell}");
        }
        // Not all of them know the values of what has no option's name.
        let has_values = ["bash", "zsh"].contains(&shell);
        assert!(!has_values || script.contains("mbpp-lora"), "{shell}");
    }
    printed(folder.path(), &["man", "pages"]);
    let help = printed(folder.path(), &["--help"]);
    let commands = help.split("Commands:").nth(1).expect("commands are listed");
    let commands = commands.split("Options:").next().expect("options follow");
    let names = commands
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    let mut count = 0;
    for name in names.filter(|name| *name != "help") {
        let page = folder.path().join(format!("pages/wardian-{name}.1"));
        let page = fs_err::read_to_string(&page).unwrap_or_else(|error| panic!("{error}"));
        assert!(page.contains(".SH SYNOPSIS"), "{name}");
        count += 1;
    }
    assert!(count > 20, "{help}");
    assert!(folder.path().join("pages/wardian.1").is_file());
    assert!(
        !folder
            .path()
            .join("pages/wardian-sandbox-worker.1")
            .exists()
    );
}

#[test]
fn a_run_is_calibrated_by_steps_of_its_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let sets = [
        "rollout.groups_per_step=4",
        "rollout.group_size=4",
        "trainer.steps=10",
        "eval.limit=6",
    ];
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let arguments = [
        "calibrate",
        "--time",
        "6s",
        "--price-per-hour",
        "3",
        "--format",
        "json",
    ];
    let arguments: Vec<&str> = arguments.into_iter().chain(sets).collect();
    let text = printed(folder.path(), &arguments);
    let found: Value = serde_json::from_str(&text).expect("one JSON value");
    let number = |path: &str| {
        let value = found.pointer(path).and_then(Value::as_f64);
        value.unwrap_or_else(|| panic!("{path}: {text}"))
    };
    assert_eq!(found["measured"][0]["groups"], 1);
    for path in [
        "/step/generate_seconds",
        "/step/update_seconds",
        "/step/tokens_per_second",
    ] {
        assert!(number(path) > 0.0, "{path}: {text}");
    }
    assert!(
        number("/step/seconds")
            >= number("/step/generate_seconds") + number("/step/update_seconds")
    );
    assert_eq!(number("/steps_seconds"), 10.0 * number("/step/seconds"));
    assert_eq!(
        number("/seconds"),
        number("/steps_seconds") + number("/evaluations_seconds")
    );
    assert!((number("/cost") - number("/seconds") / 1200.0).abs() < 1e-9);
    assert!(number("/memory/measured_bytes") > 1e6 && number("/memory/planned_bytes") > 1e6);
    let concluded = found["extrapolated"].as_array().expect("a list");
    assert!(concluded.len() >= 2, "{text}");
    // It leaves nothing.
    assert_eq!(
        fs_err::read_dir(folder.path())
            .expect("it is there")
            .count(),
        0
    );
    refused(
        folder.path(),
        &["calibrate", "--price-per-hour=-1"],
        "price",
    );
}
