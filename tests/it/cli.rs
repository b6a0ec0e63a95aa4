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
    for command in [
        "train",
        "sft",
        "eval",
        "plan",
        "calibrate",
        "bench",
        "chat",
        "serve",
        "exec",
        "grade",
        "task",
        "runs",
        "compare",
        "init",
        "schema",
        "doctor",
        "runtime",
        "completions",
        "man",
    ] {
        assert!(text(&output.stdout).contains(command));
    }
}

#[test]
fn plan_needs_a_configuration_and_no_weights() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("config.json");
    let config = serde_json::json!({
        "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128,
        "num_key_value_heads": 8, "vocab_size": 151_936, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 40_960, "tie_word_embeddings": true,
    });
    fs_err::write(&file, config.to_string()).expect("it is written");
    let plan = |model: &Path, more: &[&str]| {
        let model = model.to_str().expect("a path in UTF-8");
        let output = wardian(&[&["plan", "--model", model][..], more].concat());
        (
            output.status.code(),
            text(&output.stdout),
            text(&output.stderr),
        )
    };
    // A folder is as good as its file.
    for model in [folder.path(), &file] {
        let (code, table, errors) = plan(model, &["--on", "gpu"]);
        assert_eq!(code, Some(0), "{errors}");
        assert!(
            table.contains("weights                        3.205 GiB"),
            "{table}"
        );
    }
    let (code, json, _) = plan(&file, &["--memory", "24GiB", "--format", "json"]);
    let value: Value = serde_json::from_str(&json).expect("one JSON value");
    assert_eq!(code, Some(0));
    assert!(
        value["peak_bytes"]
            .as_u64()
            .is_some_and(|bytes| bytes <= 24 << 30),
        "{value}"
    );
    let weights = |dtype: &str, place: &str| {
        let set = format!("model.dtype={dtype}");
        let (code, json, errors) = plan(&file, &["--on", place, "--set", &set, "--format", "json"]);
        assert_eq!(code, Some(0), "{errors}");
        let value: Value = serde_json::from_str(&json).expect("one JSON value");
        value["weights"].as_f64().expect("a number")
    };
    let single = weights("f32", "cpu");
    for (dtype, place, bytes) in [
        ("bf16", "cpu", 2.0),
        ("int8", "cpu", 1.125),
        ("bf16", "gpu", 2.0),
        ("f32", "gpu", 4.0),
    ] {
        let found = 4.0 * weights(dtype, place) / single;
        assert!((found - bytes).abs() < 1e-2, "{dtype} {place}: {found}");
    }
    let (code, _, errors) = plan(&file, &["--memory", "1GiB"]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("the least that this run needs"), "{errors}");
    let (code, _, errors) = plan(&folder.path().join("weights"), &[]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("no `config.json`"), "{errors}");
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
        &["rollout.group_size", "from 2 to 1000000"],
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

/// Writes rows as JSON Lines and returns the path.
fn write_rows(folder: &Path, name: &str, rows: &[Value]) -> String {
    let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let path = folder.join(name);
    fs_err::write(&path, text).expect("written");
    path.to_str().expect("UTF-8").to_owned()
}

#[test]
fn grade_keeps_the_order_and_the_parts_of_the_rewards() {
    let folder = tempfile::tempdir().expect("a folder");
    let tasks = write_rows(
        folder.path(),
        "tasks.jsonl",
        &[
            serde_json::json!({"task_id": "list", "prompt": "Double.", "code": "def f(x): return 2 * x",
                "test_imports": [], "test_list": ["assert f(1) == 2", "assert f(0) == 0"]}),
            serde_json::json!({"task_id": "print", "grader": "stdio", "prompt": "Print 3.",
                "cases": [{"output": "3"}]}),
            serde_json::json!({"task_id": "own", "grader": "mine.py", "prompt": "Be brief.",
                "reward": {"named": {"brief": 2.0}}}),
        ],
    );
    fs_err::write(
        folder.path().join("mine.py"),
        "def grade(candidate, task):\n    return {'reward': 0.25, 'brief': 0.5}\n",
    )
    .expect("written");
    let rows: Vec<Value> = (0..60)
        .flat_map(|n| {
            let list = format!("def f(x): return {n} * x");
            [
                ("list", list),
                ("print", format!("print({n})")),
                ("own", "x = 1".to_owned()),
            ]
        })
        .map(|(id, code)| serde_json::json!({"task_id": id, "code": code}))
        .collect();
    let submissions = write_rows(folder.path(), "code.jsonl", &rows);
    let arguments = ["grade", "--tasks", &tasks, "--submissions", &submissions];
    let output = wardian(
        &[
            &arguments[..],
            &["--format", "json", "--reward", "test_fraction=0.5"],
        ]
        .concat(),
    );
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let lines: Vec<Value> = text(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("a JSON line"))
        .collect();
    let ids: Vec<_> = lines.iter().map(|line| line["task_id"].clone()).collect();
    let expected: Vec<_> = rows.iter().map(|row| row["task_id"].clone()).collect();
    assert_eq!(ids, expected);
    for (n, chunk) in lines.chunks(3).enumerate() {
        let right = if n == 2 { 1.5 } else { 0.25 };
        assert_eq!(chunk[0]["reward"], right, "{n}");
        assert_eq!(chunk[0]["rewards"]["passed"], f64::from(u8::from(n == 2)));
        assert_eq!(chunk[1]["reward"], if n == 3 { 1.5 } else { 0.0 }, "{n}");
        // The task's own terms go before the command's.
        assert_eq!(
            (&chunk[2]["reward"], &chunk[2]["rewards"]["brief"]),
            (&1.25.into(), &0.5.into())
        );
    }
    assert!(text(&output.stderr).contains("2 of 180 passed, 178 failed, 0 invalid ("));
    // Without terms, rewards are what they were: 1 or 0.
    let output = wardian(&arguments);
    let printed = text(&output.stdout);
    assert!(
        printed.starts_with("\"list\": failed — test_1: AssertionError\n"),
        "{printed}"
    );
    assert!(
        printed.contains("\"own\": failed, reward 1.25"),
        "{printed}"
    );
    assert_usage_error(
        &[&arguments[..], &["--reward", "pased=1"]].concat(),
        &["pased", "test_fraction"],
    );
    assert_usage_error(
        &[&arguments[..], &["--grader", "gone.py"]].concat(),
        &["gone.py"],
    );
}

#[test]
fn a_completion_is_put_behind_its_prompt() {
    let folder = tempfile::tempdir().expect("a folder");
    let prompt = "def f(x):\n    \"\"\"Doubles.\"\"\"\n";
    let humaneval = serde_json::json!({"task_id": "HumanEval/0", "prompt": prompt, "entry_point": "f",
        "canonical_solution": "    return 2 * x\n", "test": "def check(candidate):\n    assert candidate(2) == 4\n"});
    let tasks = write_rows(folder.path(), "tasks.jsonl", &[humaneval]);
    let submissions = [
        serde_json::json!({"task_id": "HumanEval/0", "completion": "    return x + x\n"}),
        serde_json::json!({"task_id": "HumanEval/0", "completion": "    return x\n"}),
        serde_json::json!({"task_id": "HumanEval/0", "solution": "f = lambda x: 2 * x"}),
    ];
    let code = write_rows(folder.path(), "code.jsonl", &submissions);
    let output = wardian(&["grade", "--tasks", &tasks, "--submissions", &code]);
    let printed = text(&output.stdout);
    let statuses: Vec<_> = (printed.lines())
        .filter_map(|line| line.split_whitespace().nth(1))
        .collect();
    assert_eq!(statuses, ["passed", "failed", "passed"], "{printed}");
    let nothing = serde_json::json!({"task_id": "HumanEval/0"});
    let code = write_rows(folder.path(), "code.jsonl", &[nothing]);
    assert_usage_error(
        &["grade", "--tasks", &tasks, "--submissions", &code],
        &["code.jsonl", "line 1", "`code`"],
    );
}

#[test]
fn a_grader_can_be_put_in_place_of_what_tasks_say() {
    let folder = tempfile::tempdir().expect("a folder");
    let row = serde_json::json!({"task_id": 1, "prompt": "p", "code": "def f(): return 1",
        "test_imports": [], "test_list": ["assert f() == 1"]});
    let tasks = write_rows(folder.path(), "tasks.jsonl", &[row]);
    let row = serde_json::json!({"task_id": 1, "code": "def f(): return 2"});
    let code = write_rows(folder.path(), "code.jsonl", &[row]);
    let grader = folder.path().join("mine.py");
    let source = "def grade(candidate, task):\n    return candidate.f() / len(task['test_list'])\n";
    fs_err::write(&grader, source).expect("written");
    let grader = grader.to_str().expect("UTF-8");
    let output = wardian(&[
        "grade",
        "--tasks",
        &tasks,
        "--submissions",
        &code,
        "--grader",
        grader,
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "1: passed, reward 2\n");
    // A mistyped name is not found out by grading.
    let output = wardian(&[
        "grade",
        "--tasks",
        &tasks,
        "--submissions",
        &code,
        "--grader",
        "gone",
    ]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("there is no grader `gone`; there are `calls`, "));
}

#[test]
fn task_validate_prints_what_is_wrong_with_which_row() {
    let folder = tempfile::tempdir().expect("a folder");
    let row = |id: u32, code: &str, test: &str| serde_json::json!({"task_id": id, "prompt": "p", "code": code, "test_imports": [], "test_list": [test]});
    let good = row(1, "def f(): return 1", "assert f() == 1");
    let bad = row(2, "def f(): return 2", "assert f() == 1");
    let weak = row(3, "def f(): return None", "assert f() is None");
    let broken = serde_json::json!({"task_id": 4, "prompt": "p"});
    let tasks = write_rows(
        folder.path(),
        "tasks.jsonl",
        &[good.clone(), bad, weak, broken],
    );
    let output = wardian(&["task", "validate", "--tasks", &tasks]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let printed = text(&output.stdout);
    let found: Vec<(&str, &str)> = printed
        .lines()
        .skip(1)
        .map(|line| {
            let mut words = line.split_whitespace();
            let row = words.next().unwrap_or_default();
            let kind = words.skip_while(|word| *word != "defect").nth(1);
            (row, kind.unwrap_or_default())
        })
        .collect();
    assert_eq!(
        found,
        [
            ("2", "reference_fails"),
            ("3", "empty_passes"),
            ("4", "unreadable")
        ]
    );
    let told = text(&output.stderr);
    assert!(told.contains("1 of 4 tasks are sound"), "{told}");
    let output = wardian(&["task", "validate", "--tasks", &tasks, "--format", "json"]);
    let second: Value = text(&output.stdout)
        .lines()
        .nth(1)
        .and_then(|line| serde_json::from_str(line).ok())
        .expect("a JSON line");
    assert_eq!(second["task_id"], "2");
    assert_eq!(second["findings"][0]["kind"], "reference_fails");
    let sound = write_rows(folder.path(), "sound.jsonl", &[good]);
    let output = wardian(&["-q", "task", "validate", "--tasks", &sound]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        (text(&output.stdout), text(&output.stderr)),
        (String::new(), String::new())
    );
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
