//! Harbor tasks: configurations as Harbor reads them, folders, and data sets from a registry.

use std::path::{Path, PathBuf};

use rstest::rstest;
use serde_json::{Map, Value};
use wardian::task::harbor::{
    HarborError, HarborTask, Registry, TaskConfig, VerifierMode, download,
};

use crate::repository::git;

const GOLDEN: &str = include_str!("../golden/harbor_task_config.json");

fn golden() -> Vec<Value> {
    let golden: Value = serde_json::from_str(GOLDEN).expect("the file is JSON");
    golden["cases"]
        .as_array()
        .expect("cases are listed")
        .clone()
}

/// Drops what is null, which TOML cannot write.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(map) => (map.iter())
            .filter(|(_, value)| !value.is_null())
            .map(|(key, value)| (key.clone(), without_nulls(value)))
            .collect::<Map<_, _>>()
            .into(),
        Value::Array(items) => items.iter().map(without_nulls).collect(),
        other => other.clone(),
    }
}

/// Drops what is as it would be had it not been given.
fn without_defaults(value: &Value, defaults: &Value) -> Value {
    let (Value::Object(map), Value::Object(defaults)) = (value, defaults) else {
        return value.clone();
    };
    (map.iter())
        .filter(|(key, value)| defaults.get(*key) != Some(value))
        .map(|(key, value)| {
            let default = defaults.get(key).unwrap_or(&Value::Null);
            (key.clone(), without_defaults(value, default))
        })
        .collect::<Map<_, _>>()
        .into()
}

fn parsed(text: &str) -> (Value, Vec<String>) {
    let (config, warnings) =
        TaskConfig::parse(text).unwrap_or_else(|error| panic!("{}\n{text}", message(&error)));
    let config = serde_json::to_value(config).expect("configurations are JSON");
    (config, warnings)
}

fn message(error: &HarborError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

fn assert_same(found: &Value, expected: &Value, place: &str) {
    match (found, expected) {
        (Value::Object(found), Value::Object(expected)) => {
            let mut keys: Vec<_> = found.keys().chain(expected.keys()).collect();
            keys.sort();
            keys.dedup();
            for key in keys {
                let side = |map: &Map<String, Value>| map.get(key).cloned();
                let (found, expected) = (side(found), side(expected));
                assert!(found.is_some(), "{place}.{key}: we have no such field");
                assert!(
                    expected.is_some(),
                    "{place}.{key}: Harbor has no such field"
                );
                let null = Value::Null;
                assert_same(
                    found.as_ref().unwrap_or(&null),
                    expected.as_ref().unwrap_or(&null),
                    &format!("{place}.{key}"),
                );
            }
        }
        _ => assert_eq!(found, expected, "{place}"),
    }
}

/// Of the 26 files the golden holds what Harbor read, not the text: each is written out twice, once
/// with every field and once with those alone that differ from their defaults, so that types and
/// defaults are both compared.
#[test]
fn every_golden_configuration_reads_as_in_harbor() {
    let cases = golden();
    let defaults = (cases.iter().find(|case| case["case"] == "empty")).expect("one case is empty")
        ["config"]
        .clone();
    let (mut read, mut refused) = (0, 0);
    for case in &cases {
        let name = case["path"]
            .as_str()
            .or_else(|| case["case"].as_str())
            .unwrap();
        let warnings: Vec<&str> = (case["warnings"].as_array().unwrap().iter())
            .filter_map(Value::as_str)
            .collect();
        let Some(text) = case["toml"].as_str() else {
            let config = &case["config"];
            let full = without_nulls(config);
            let short = without_defaults(&full, &without_nulls(&defaults));
            for table in [full, short] {
                let text = toml::to_string(&table).expect("it is TOML without nulls");
                assert_same(&parsed(&text).0, config, name);
            }
            read += 1;
            continue;
        };
        if case["ok"] == true {
            let (config, found) = parsed(text);
            assert_same(&config, &case["config"], name);
            assert_eq!(found, warnings, "{name}");
            read += 1;
        } else {
            // "ValidationError: 1 validation error for TaskConfig\nKEY\n  Value error, …"
            let key = case["error"].as_str().unwrap().lines().nth(1).unwrap();
            let error = TaskConfig::parse(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("`{key}` ")), "{name}: {error}");
            refused += 1;
        }
    }
    assert_eq!((read, refused), (31, 4));
}

#[rstest]
#[case::both_versions(
    "version = \"1.0\"\nschema_version = \"1.3\"",
    "schema_version",
    "\"1.3\""
)]
#[case::old_version("version = \"1.1\"", "schema_version", "\"1.1\"")]
#[case::whole_cpus("[environment]\ncpus = 2.0", "environment.cpus", "2")]
#[case::part_of_a_cpu("[environment]\ncpus = 0.5", "environment.cpus", "0.5")]
#[case::text_number("[environment]\nmemory_mb = \"512\"", "environment.memory_mb", "512")]
#[case::closed(
    "[environment]\nallow_internet = false",
    "environment.network_mode",
    "\"no-network\""
)]
#[case::mode_wins(
    "[environment]\nallow_internet = false\nnetwork_mode = \"public\"",
    "environment.network_mode",
    "\"public\""
)]
#[case::shouted_os("[environment]\nos = \"Linux\"", "environment.os", "\"linux\"")]
#[case::short_http(
    "[[environment.mcp_servers]]\nname = \"a\"\ntransport = \"http\"\nurl = \"http://a\"",
    "environment.mcp_servers.0.transport",
    "\"streamable-http\""
)]
#[case::date("[metadata]\nday = 2026-01-02", "metadata.day", "\"2026-01-02\"")]
#[case::whole_threshold("[[steps]]\nname = \"a\"\nmin_reward = 1", "steps.0.min_reward", "1.0")]
#[case::thresholds(
    "[[steps]]\nname = \"a\"\nmin_reward = {x = 1}",
    "steps.0.min_reward.x",
    "1.0"
)]
fn a_value_is_read(#[case] text: &str, #[case] place: &str, #[case] expected: &str) {
    let (config, _) = parsed(text);
    let pointer = format!("/{}", place.replace('.', "/"));
    assert_eq!(config.pointer(&pointer).unwrap().to_string(), expected);
}

#[rstest]
#[case::unit("[agent]\ntimeout_sec = \"5 min\"", "`5 min` is not a number")]
#[case::mode_of_hosts("[agent]\nallowed_hosts = []", "`agent.allowed_hosts` goes only with")]
#[case::shared_with_own(
    "[verifier]\nenvironment_mode = \"shared\"\n[verifier.environment]",
    "`verifier.environment_mode` is `shared`"
)]
#[case::conflict(
    "[environment]\nmemory = \"1G\"\nmemory_mb = 1",
    "`environment.memory` says 1024 MiB and `memory_mb` something else"
)]
#[case::climbing("artifacts = [\"/a/../b\"]", "`artifacts[0]` holds `..`")]
#[case::no_url(
    "[[environment.mcp_servers]]\nname = \"a\"",
    "`environment.mcp_servers[0].url` is missing"
)]
#[case::case_alone(
    "[[steps]]\nname = \"a\"\n[[steps]]\nname = \"A\"",
    "`steps` have two of the name `A`"
)]
#[case::syntax("[agent", "TOML parse error at line 1")]
fn a_value_is_refused(#[case] text: &str, #[case] expected: &str) {
    let error = message(&TaskConfig::parse(text).unwrap_err());
    assert!(error.contains(expected), "{error}");
}

fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    fs_err::create_dir_all(path.parent().expect("files are in a folder")).expect("folder is made");
    fs_err::write(&path, text).expect("file is written");
    path
}

fn write_task(folder: &Path, config: &str) {
    write(folder, "task.toml", config);
    write(folder, "instruction.md", "# Say hello\n");
    write(folder, "environment/Dockerfile", "FROM scratch\n");
    write(
        folder,
        "tests/test.sh",
        "echo 1 > /logs/verifier/reward.txt\n",
    );
    write(folder, "solution/solve.sh", "echo hello\n");
}

#[test]
fn a_folder_is_a_task() {
    let folder = tempfile::tempdir().unwrap();
    write_task(
        folder.path(),
        "[task]\nname = \"o/hello\"\n[agent]\ntimeout_sec = 60",
    );
    let task = HarborTask::read(folder.path()).unwrap();
    assert_eq!((task.name.as_str(), task.parts.len()), ("o/hello", 1));
    let part = &task.parts[0];
    assert_eq!(part.instruction, "# Say hello\n");
    assert_eq!(part.tests, [folder.path().join("tests")]);
    assert_eq!(part.solution, Some(folder.path().join("solution")));
    assert_eq!(part.verifier_mode, VerifierMode::Shared);
    assert_eq!(
        (part.agent_timeout_sec, part.verifier_timeout_sec),
        (Some(60.0), 600.0)
    );
}

#[test]
fn steps_have_folders_and_share_the_tests() {
    let folder = tempfile::tempdir().unwrap();
    let config = "[agent]\ntimeout_sec = 9\n[verifier]\nenvironment_mode = \"separate\"\n\
                  [[steps]]\nname = \"one\"\nagent.timeout_sec = 5\n\
                  verifier.environment_mode = \"shared\"\n[[steps]]\nname = \"two\"\n";
    write_task(folder.path(), config);
    write(folder.path(), "steps/one/instruction.md", "First");
    write(folder.path(), "steps/two/instruction.md", "Second");
    write(folder.path(), "steps/two/tests/test.sh", "");
    write(folder.path(), "steps/two/workdir/a.txt", "");
    let task = HarborTask::read(folder.path()).unwrap();
    let [one, two] = task.parts.as_slice() else {
        panic!("there are two parts: {:?}", task.parts);
    };
    assert_eq!(
        (one.instruction.as_str(), two.instruction.as_str()),
        ("First", "Second")
    );
    assert_eq!(
        (one.agent_timeout_sec, two.agent_timeout_sec),
        (Some(5.0), Some(9.0))
    );
    assert_eq!(
        (one.verifier_mode, two.verifier_mode),
        (VerifierMode::Shared, VerifierMode::Separate)
    );
    assert_eq!((one.tests.len(), two.tests.len()), (1, 2));
    assert_eq!(two.workdir, Some(folder.path().join("steps/two/workdir")));
    assert_eq!(one.workdir, None);
}

#[test]
fn tests_in_the_image_of_a_verifier_are_not_brought() {
    let folder = tempfile::tempdir().unwrap();
    write_task(
        folder.path(),
        "[verifier.environment]\ndocker_image = \"judge@sha256:1\"",
    );
    fs_err::remove_dir_all(folder.path().join("tests")).unwrap();
    let task = HarborTask::read(folder.path()).unwrap();
    assert_eq!(task.parts[0].verifier_mode, VerifierMode::Separate);
    assert!(task.parts[0].tests.is_empty());
}

#[rstest]
#[case::no_instruction(
    "",
    "instruction.md",
    "has no `instruction.md`; write down what the agent is asked"
)]
#[case::no_script("", "tests/test.sh", "has no `tests/test.sh`; add the script")]
#[case::no_environment("", "environment", "has no `environment/`; add it")]
#[case::windows("[environment]\nos = \"windows\"", "", "it asks for Windows")]
#[case::two_containers(
    "[[artifacts]]\nsource = \"/a\"\nservice = \"db\"",
    "",
    "it asks for several containers"
)]
#[case::newer(
    "schema_version = \"2.0\"",
    "",
    "its schema `2.0` is none of 1.0 to 1.4"
)]
#[case::no_time(
    "[agent]\ntimeout_sec = -1",
    "",
    "a timeout of -1 s ends it before it starts"
)]
#[case::endless("[verifier]\ntimeout_sec = inf", "", "a timeout of inf s")]
#[case::no_memory(
    "[environment]\nmemory_mb = 0",
    "",
    "`environment.memory_mb` is not above 0"
)]
#[case::bad_key(
    "[task]\nname = \"a\"",
    "",
    "task.toml`: `task.name` is `a`; make it `owner/name`"
)]
fn a_folder_is_refused(#[case] config: &str, #[case] removed: &str, #[case] expected: &str) {
    let folder = tempfile::tempdir().unwrap();
    write_task(folder.path(), config);
    let removed = folder.path().join(removed);
    if removed.is_file() {
        fs_err::remove_file(removed).unwrap();
    } else if removed != folder.path().join("") {
        fs_err::remove_dir_all(removed).unwrap();
    }
    let error = message(&HarborTask::read(folder.path()).unwrap_err());
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_link_out_of_the_folder_is_refused_and_one_inside_is_not() {
    let folder = tempfile::tempdir().unwrap();
    write_task(folder.path(), "");
    let link = |target: &str, name: &str| {
        let link = folder.path().join(name);
        fs_err::os::unix::fs::symlink(target, link).expect("links can be made");
    };
    link("test.sh", "tests/same.sh");
    HarborTask::read(folder.path()).unwrap();
    link("/etc/passwd", "tests/secret");
    let error = HarborTask::read(folder.path()).unwrap_err();
    assert!(matches!(error, HarborError::Outside { .. }), "{error}");
}

/// A pipe is opened when somebody writes to it, which may be never.
#[test]
fn what_is_no_file_is_refused_and_not_opened() {
    let folder = tempfile::tempdir().unwrap();
    write_task(folder.path(), "");
    let pipe = folder.path().join("tests/pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("coreutils are installed").success());
    let error = HarborTask::read(folder.path()).unwrap_err();
    assert!(matches!(error, HarborError::Special { .. }), "{error}");
    assert!(error.to_string().contains("tests/pipe"), "{error}");
}

#[test]
fn a_data_set_is_a_folder_of_tasks_with_names_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    write_task(&folder.path().join("b"), "");
    write_task(&folder.path().join("a"), "");
    write_task(&folder.path().join("c"), "[agent]\ntimeout_sec = 0");
    write(folder.path(), "README.md", "no task");
    let tasks = HarborTask::read_all(folder.path()).unwrap();
    let names: Vec<Option<&str>> = (tasks.iter())
        .map(|task| task.as_ref().ok().map(|task| task.name.as_str()))
        .collect();
    assert_eq!(names, [Some("a"), Some("b"), None]);
    write(&folder.path().join("a"), "task.toml", "task.name = \"o/n\"");
    write(&folder.path().join("b"), "task.toml", "task.name = \"o/n\"");
    let error = HarborTask::read_all(folder.path()).unwrap_err();
    assert!(
        error.to_string().contains("has the name `o/n`, as has"),
        "{error}"
    );
    let error = HarborTask::read_all(&folder.path().join("a/tests")).unwrap_err();
    assert!(matches!(error, HarborError::NoTasks { .. }), "{error}");
}

/// Makes a repository with one task in two versions and returns the commit of the older one.
fn repository(folder: &Path) -> String {
    fs_err::create_dir_all(folder).expect("folder is made");
    git(folder, &["init", "--quiet"]);
    write_task(&folder.join("tasks/hello"), "");
    write_task(&folder.join("tasks/other"), "");
    git(folder, &["add", "."]);
    git(folder, &["commit", "--quiet", "--message=one"]);
    let commit = git(folder, &["rev-parse", "HEAD"]);
    write(folder, "tasks/hello/instruction.md", "Say goodbye\n");
    git(folder, &["commit", "--quiet", "--all", "--message=two"]);
    commit
}

fn registry(folder: &Path, tasks: &str) -> Registry {
    let text =
        format!(r#"[{{"name": "set", "version": "1.0", "description": "", "tasks": [{tasks}]}}]"#);
    let path = write(folder, "registry.json", &text);
    Registry::read(&path).expect("the registry is read")
}

#[test]
fn a_data_set_is_brought_at_its_commits() {
    let folder = tempfile::tempdir().unwrap();
    let commit = repository(&folder.path().join("repo"));
    write_task(&folder.path().join("here"), "");
    let tasks = format!(
        r#"{{"name": "hello", "git_url": "./repo", "git_commit_id": "{commit}", "path": "tasks/hello"}},
           {{"name": "o/newest", "git_url": "./repo", "path": "tasks/hello"}},
           {{"name": "local", "path": "here"}}"#
    );
    let registry = registry(folder.path(), &tasks);
    let output = folder.path().join("out");
    write(&output, "hello/stale.txt", "of an earlier version");
    let reference = "harbor:set@1.0".parse().unwrap();
    let brought = download(&registry, &reference, &output).unwrap();
    assert_eq!(brought.len(), 3);
    assert_eq!(brought[0].commit, Some(commit.clone()));
    assert!(
        brought[1]
            .commit
            .as_ref()
            .is_some_and(|newest| *newest != commit)
    );
    assert_eq!(brought[2].commit, None);
    let instruction = |name: &str| {
        let task = HarborTask::read(&output.join(name)).expect("the task is there");
        task.parts[0].instruction.clone()
    };
    assert_eq!(instruction("hello"), "# Say hello\n");
    assert_eq!(instruction("newest"), "Say goodbye\n");
    assert_eq!(instruction("local"), "# Say hello\n");
    assert!(!output.join("hello/stale.txt").exists());
    let mut left: Vec<String> = fs_err::read_dir(&output)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["hello", "local", "newest"]);
}

#[rstest]
#[case::climbing(
    r#""git_url": "./repo", "path": "tasks/../../x""#,
    "its `path` leads out of the repository"
)]
#[case::git_folder(
    r#""git_url": "./repo", "path": ".git/hooks""#,
    "its `path` leads out of the repository"
)]
#[case::program(
    r#""git_url": "ext::sh -c touch% /tmp/x", "path": "a""#,
    "its `git_url` is none of"
)]
#[case::option(
    r#""git_url": "--upload-pack=touch", "path": "a""#,
    "its `git_url` is none of"
)]
#[case::option_as_commit(
    r#""git_url": "./repo", "git_commit_id": "--all", "path": "a""#,
    "its `git_commit_id` is no commit"
)]
#[case::missing_commit(r#""git_url": "./repo", "git_commit_id": "0123456789012345678901234567890123456789", "path": "a""#, "`git fetch` for")]
#[case::missing_folder(r#""git_url": "./repo", "path": "tasks/none""#, "`git checkout` for")]
#[case::no_task(r#""git_url": "./repo", "path": "tasks""#, "task.toml")]
fn a_bad_entry_is_refused_and_nothing_is_left(#[case] entry: &str, #[case] expected: &str) {
    let folder = tempfile::tempdir().unwrap();
    repository(&folder.path().join("repo"));
    let tasks = format!(
        r#"{{"name": "ok", "git_url": "./repo", "path": "tasks/hello"}}, {{"name": "a", {entry}}}"#
    );
    let registry = registry(folder.path(), &tasks);
    let output = folder.path().join("out");
    let error = download(&registry, &"harbor:set".parse().unwrap(), &output).unwrap_err();
    let error = message(&error);
    assert!(error.contains(expected), "{error}");
    assert_eq!(fs_err::read_dir(&output).unwrap().count(), 0);
}

/// The attack is shown to work where `git` is not held back: a hook, a filter and a link.
#[test]
fn a_repository_runs_nothing_and_reaches_nothing_here() {
    let folder = tempfile::tempdir().unwrap();
    let repo = folder.path().join("repo");
    repository(&repo);
    let mark = folder.path().join("ran");
    let touch = format!("#!/bin/sh\ntouch {}\n", mark.display());
    let hook = write(&repo, ".git/hooks/post-checkout", &touch);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs_err::set_permissions(&hook, mode).unwrap();
    git(&repo, &["checkout", "--quiet", "--force", "-b", "x"]);
    assert!(mark.exists(), "the hook runs where it may");
    fs_err::remove_file(&mark).unwrap();
    write(&repo, "tasks/hello/.gitattributes", "* filter=evil\n");
    git(&repo, &["add", "."]);
    let smudge = format!("filter.evil.smudge=touch {}; cat", mark.display());
    git(&repo, &["commit", "--quiet", "--message=three"]);
    fs_err::remove_file(repo.join("tasks/hello/instruction.md")).unwrap();
    git(&repo, &["-c", &smudge, "checkout", "--", "tasks/hello"]);
    assert!(mark.exists(), "the filter runs where it may");
    fs_err::remove_file(&mark).unwrap();

    let registry = registry(
        folder.path(),
        r#"{"name": "hello", "git_url": "./repo", "path": "tasks/hello"}"#,
    );
    let output = folder.path().join("out");
    let reference = "harbor:set".parse().unwrap();
    download(&registry, &reference, &output).unwrap();
    assert!(!mark.exists(), "something of the repository ran");

    fs_err::os::unix::fs::symlink("/etc/passwd", repo.join("tasks/hello/solution/secret")).unwrap();
    git(&repo, &["add", "."]);
    git(&repo, &["commit", "--quiet", "--message=four"]);
    let error = download(&registry, &reference, &output).unwrap_err();
    assert!(matches!(error, HarborError::Outside { .. }), "{error}");
}

#[test]
fn an_unknown_data_set_is_named_with_those_there_are() {
    let folder = tempfile::tempdir().unwrap();
    let registry = registry(folder.path(), "");
    let find = |text: &str| {
        let reference = text.parse().expect("it is a reference");
        registry.find(&reference).unwrap_err().to_string()
    };
    assert!(find("harbor:sets").ends_with("has no data set `sets`; it has `set`"));
    assert!(find("harbor:set@2").ends_with("has no version `2` of `set`; it has `1.0`"));
}

#[test]
fn a_part_gives_its_verifier_tests_and_variables() {
    let folder = tempfile::tempdir().unwrap();
    let config = "environment.workdir = \"/app\"\n[verifier]\ntimeout_sec = 5\n\
                  env = {A = \"${HOST}\", B = \"${GONE:-b}\", C = \"x ${HOST}\"}\n\
                  [[steps]]\nname = \"one\"\nverifier.env = {C = \"c\"}\n";
    write_task(folder.path(), config);
    write(folder.path(), "tests/lib/shared.py", "shared");
    write(folder.path(), "steps/one/instruction.md", "First");
    write(folder.path(), "steps/one/tests/test.sh", "of the step");
    let task = HarborTask::read(folder.path()).unwrap();
    let lookup = |name: &str| (name == "HOST").then(|| "host".to_owned());
    let job = task.parts[0].verify_job(&task.config, &lookup).unwrap();
    let tests: Vec<(&str, &[u8])> = (job.tests.iter())
        .map(|(path, file)| (path.as_str(), file.content.as_slice()))
        .collect();
    assert_eq!(
        tests,
        [
            ("lib/shared.py", &b"shared"[..]),
            ("test.sh", b"of the step")
        ]
    );
    let env: Vec<(&str, &str)> = (job.env.iter())
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    assert_eq!(env, [("A", "host"), ("B", "b"), ("C", "c")]);
    assert_eq!(job.workdir.as_deref(), Some("/app"));
    assert_eq!(job.timeout.as_secs(), 600);
    let error = task.parts[0]
        .verify_job(&task.config, &|_| None)
        .unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("`verifier.env.A` asks for the variable `HOST`"),
        "{error}"
    );
}
