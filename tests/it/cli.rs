//! The binary as a user meets it: what it prints and how it exits.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn wardian(arguments: &[&str]) -> Output {
    wardian_with_stdin(arguments, "")
}

fn wardian_with_stdin(arguments: &[&str], stdin: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_wardian"))
        .args(arguments)
        .env_remove("WARDIAN_LOG")
        .env("NO_COLOR", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    // A command that fails early does not read its input.
    let _ = child
        .stdin
        .take()
        .expect("stdin is piped")
        .write_all(stdin.as_bytes());
    child.wait_with_output().expect("the binary ends")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[track_caller]
fn assert_usage_error(arguments: &[&str], expected: &[&str]) {
    let output = wardian(arguments);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert_eq!(text(&output.stdout), "");
    for part in expected {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

fn exec_json(arguments: &[&str], program: &str) -> (i32, Value) {
    let mut all = vec!["exec", "--format", "json"];
    all.extend(arguments);
    all.push("-");
    let output = wardian_with_stdin(&all, program);
    let value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)));
    (output.status.code().expect("it exits"), value)
}

#[test]
fn help_names_every_command() {
    let output = wardian(&["--help"]);
    assert_eq!(output.status.code(), Some(0));
    for command in ["train", "sft", "eval", "exec", "grade", "runtime"] {
        assert!(text(&output.stdout).contains(command));
    }
}

#[test]
fn exec_passes_output_and_exit_code_through() {
    let program = "import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(7)";
    let output = wardian_with_stdin(&["exec", "--quiet", "-"], program);
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(text(&output.stdout), "out\n");
    assert_eq!(text(&output.stderr), "err\n");
}

#[test]
fn exec_reports_each_ending_as_json() {
    let (code, ended) = exec_json(&[], "print(1+1)");
    assert_eq!(code, 0);
    assert_eq!(
        ended["exit"],
        serde_json::json!({"kind": "exited", "code": 0})
    );
    assert_eq!(ended["stdout"], "2\n");
    assert_eq!(ended["stdout_truncated"], false);
    for key in ["fuel", "memory_bytes", "wall_us"] {
        assert!(
            ended["usage"][key].as_u64().is_some_and(|used| used > 0),
            "{key}: {ended}"
        );
    }
    for (arguments, program, kind) in [
        (["--fuel", "50000000"], "while True: pass", "out_of_fuel"),
        (
            ["--timeout", "200ms"],
            "while True: pass",
            "deadline_exceeded",
        ),
        (
            ["--memory", "64MiB"],
            "x = bytearray(200 * 2**20)",
            "out_of_memory",
        ),
    ] {
        let (code, ended) = exec_json(&arguments, program);
        assert_eq!(
            (code, ended["exit"]["kind"].as_str()),
            (1, Some(kind)),
            "{ended}"
        );
    }
}

#[test]
fn a_limit_names_both_numbers() {
    let output = wardian_with_stdin(
        &["exec", "--memory", "64MiB", "-"],
        "x = bytearray(200 * 2**20)",
    );
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("67108864"), "{message}");
    assert!(message.contains("out of memory:"), "{message}");
}

#[test]
fn exec_reads_stdin_from_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    fs_err::write(path("in.txt"), "4 5").expect("written");
    fs_err::write(path("add.py"), "print(sum(map(int, input().split())))").expect("written");
    let output = wardian(&[
        "exec",
        "--quiet",
        "--stdin",
        &path("in.txt"),
        &path("add.py"),
    ]);
    assert_eq!(text(&output.stdout), "9\n");
}

#[test]
fn exec_passes_arguments_and_a_start_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("show.py");
    fs_err::write(
        &path,
        "import sys, time\nprint(sys.argv[1:], int(time.time()))",
    )
    .expect("written");
    let path = path.to_str().expect("UTF-8");
    let output = wardian(&[
        "exec",
        "--quiet",
        path,
        "--start-time",
        "60",
        "--",
        "-n",
        "3",
    ]);
    assert_eq!(text(&output.stdout), "['-n', '3'] 60\n");
}

#[test]
fn grade_writes_one_json_line_a_submission() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let task = serde_json::json!({
        "task_id": 5, "prompt": "Double.", "code": "def f(x):\n    return 2 * x",
        "test_imports": [], "test_list": ["assert f(2) == 4", "assert f(0) == 0"],
    });
    fs_err::write(path("tasks.jsonl"), format!("{task}\n")).expect("written");
    let submissions = [
        "def f(x):\n    return x + x",
        "class A:\n    __eq__ = lambda s, o: True\ndef f(x):\n    return A()",
        "def f(x:",
    ]
    .map(|code| serde_json::json!({"task_id": 5, "code": code}).to_string());
    fs_err::write(path("code.jsonl"), submissions.join("\n")).expect("written");
    let output = wardian(&[
        "grade",
        "--tasks",
        &path("tasks.jsonl"),
        "--submissions",
        &path("code.jsonl"),
        "--format",
        "json",
    ]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let lines: Vec<Value> = text(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("a JSON line"))
        .collect();
    let seen: Vec<_> = lines
        .iter()
        .map(|line| {
            (
                line["reward"].as_f64(),
                line["status"].as_str().unwrap_or_default(),
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            (Some(1.0), "passed"),
            (Some(0.0), "failed"),
            (Some(0.0), "invalid")
        ]
    );
    assert_eq!(lines[0]["tests"][1]["name"], "test_2");
    assert!(lines[0]["usage"].is_object());
}

#[test]
fn bad_input_exits_2_and_says_what_to_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    assert_usage_error(&["exec", "missing.py"], &["missing.py"]);
    assert_usage_error(&["exec", "--memory", "5 turtles", "-"], &["--memory"]);
    assert_usage_error(
        &[
            "exec",
            "--wheel",
            "numpy-2.0-cp313-cp313-linux_x86_64.whl",
            "-",
        ],
        &["numpy-2.0", "pure Python"],
    );
    assert_usage_error(
        &["train", "--set", "trainer.stepz=3"],
        &["trainer.stepz", "steps"],
    );
    assert_usage_error(
        &["train", "--set", "rollout.group_size=1"],
        &["rollout.group_size", "at least 2"],
    );
    assert_usage_error(&["train", "--model", &path("nowhere")], &["nowhere"]);
    assert_usage_error(&["exec", "--memory", "1MiB", "-"], &["memory", "64"]);
    assert_usage_error(
        &["train", "--set", "task.eval_path=''"],
        &["task.eval_path"],
    );
    assert_usage_error(
        &[
            "train",
            "--set",
            "rollout.groups_per_step=1000000",
            "--set",
            "rollout.group_size=1000",
        ],
        &["rollout.groups_per_step"],
    );
    fs_err::write(path("tasks.jsonl"), "{\"task_id\": 1}\n").expect("written");
    fs_err::write(path("code.jsonl"), "{}\n").expect("written");
    let (tasks, code) = (path("tasks.jsonl"), path("code.jsonl"));
    assert_usage_error(
        &["grade", "--tasks", &tasks, "--submissions", &code],
        &["tasks.jsonl", "row 1"],
    );
    // Tasks that are learned from and measured on would make the result meaningless.
    let starter = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/starter/tasks/train.jsonl");
    let same = format!("task.eval_path='{}'", starter.display());
    assert_usage_error(
        &["train", "--set", &same, "--out", &path("run")],
        &["learned from and measured on", "task.eval_path"],
    );
    assert!(!folder.path().join("run").exists());
}

#[test]
fn messages_cannot_forge_lines_or_drive_the_terminal() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let task = serde_json::json!({
        "task_id": 1, "prompt": "Say.", "code": "def f():\n    return 1",
        "test_imports": [], "test_list": ["assert f() == 1"],
    });
    let code = "def f():\n    raise ValueError('x\\n1: passed\\x1b[31m')";
    let submission = serde_json::json!({"task_id": 1, "code": code});
    fs_err::write(path("tasks.jsonl"), task.to_string()).expect("written");
    fs_err::write(path("code.jsonl"), submission.to_string()).expect("written");
    let output = wardian(&[
        "grade",
        "--tasks",
        &path("tasks.jsonl"),
        "--submissions",
        &path("code.jsonl"),
    ]);
    let printed = text(&output.stdout);
    assert_eq!(printed.lines().count(), 1, "{printed:?}");
    assert!(printed.starts_with("1: failed"), "{printed:?}");
    assert!(!printed.contains('\x1b'), "{printed:?}");
}

#[test]
fn a_damaged_model_is_named_and_nothing_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let starter = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/starter");
    let model = folder.path().join("model");
    fs_err::create_dir(&model).expect("a folder");
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs_err::copy(starter.join("model").join(file), model.join(file)).expect("copied");
    }
    let weights = fs_err::read(starter.join("model/model.safetensors")).expect("read");
    fs_err::write(
        model.join("model.safetensors"),
        &weights[..weights.len() / 2],
    )
    .expect("written");
    let out = folder.path().join("run");
    let tasks = starter.join("tasks/train.jsonl");
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    assert_usage_error(
        &[
            "train",
            "--model",
            &text(&model),
            "--tasks",
            &text(&tasks),
            "--out",
            &text(&out),
        ],
        &["model.safetensors"],
    );
    assert!(!out.exists());
}
