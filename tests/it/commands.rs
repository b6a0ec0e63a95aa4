//! Commands that help: recipes, the schema, runs that are there, completions and manual pages.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn wardian_in(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_wardian"))
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

#[test]
fn every_command_is_completed_and_has_a_page() {
    let folder = tempfile::tempdir().expect("a folder");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = printed(folder.path(), &["completions", shell]);
        for word in ["train", "doctor", "config"] {
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
