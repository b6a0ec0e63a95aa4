//! `wardian train` and `wardian eval` in environments of another server: our own.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use wardian::config::RunConfig;
use wardian::trajectory::{Status, Trajectory, read_step, step_path};

use crate::run::json as read_json;

const STARTER_TASKS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/starter/tasks");

fn wardian(arguments: &[&str]) -> Command {
    let mut command = crate::binary::command();
    command
        .args(arguments)
        .env_remove("WARDIAN_LOG")
        .env("NO_COLOR", "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A server on a free port; it ends with this.
struct Server {
    process: Child,
    url: String,
}

impl Server {
    fn start(arguments: &[&str]) -> Self {
        let listen = ["serve", "--listen", "127.0.0.1:0"];
        let mut process = wardian(&[&listen, arguments].concat())
            .spawn()
            .expect("the binary starts");
        let stderr = process.stderr.take().expect("it is piped");
        let mut lines = BufReader::new(stderr).lines();
        let url = lines.find_map(|line| {
            let line = line.expect("it is text");
            let (_, address) = line.split_once(" at http://")?;
            let address = address.split_whitespace().next()?;
            Some(format!("http://{address}"))
        });
        let url = url.expect("it says where it is");
        // What it says further must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Self { process, url }
    }

    fn kill(&mut self) {
        self.process.kill().expect("it can be killed");
        self.process.wait().expect("it ends");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended already where a test killed it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Returns the rows of both of the starter's task files.
fn starter_rows() -> [Vec<Value>; 2] {
    ["train.jsonl", "heldout.jsonl"].map(|name| {
        let rows = fs_err::read_to_string(Path::new(STARTER_TASKS).join(name));
        let rows = rows.expect("the tasks are carried");
        let rows = rows.lines().map(serde_json::from_str);
        rows.collect::<Result<_, _>>().expect("JSON")
    })
}

fn write_rows(path: PathBuf, rows: &[Value]) -> PathBuf {
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    fs_err::write(&path, lines.join("\n")).expect("written");
    path
}

/// The carried model and its settings, at a size that a test can wait for.
fn settings(task: &str, env: &str) -> String {
    format!(
        "seed = 3
        model.path = 'starter'
        [task]
        {task}
        {env}
        [rollout]
        group_size = 4
        groups_per_step = 4
        max_turns = 3
        max_new_tokens = 64
        max_total_tokens = 224
        [sandbox]
        memory = '128MiB'
        fuel = 2000000000
        grade_fuel = 2000000000
        [trainer]
        mode = 'full'
        learning_rate = 3e-4
        steps = 2
        [eval]
        temperature = 1.0
        limit = 4
        "
    )
}

fn train(file: &Path, out: &Path) -> Output {
    let arguments = ["train", "--config", text(file), "--out", text(out)];
    wardian(&arguments).output().expect("it starts")
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn episodes(run: &Path, step: u64) -> Vec<Trajectory> {
    let rows = read_step(&step_path(run, step)).expect("the step is there");
    rows.collect::<Result<_, _>>().expect("every row reads")
}

/// Tasks behind a server are the same as here: the same prompts, tools and answers, so the same tokens, and
/// rewards, wherever the policy calls a tool; without a call an episode elsewhere is over.
#[test]
fn tasks_of_a_server_are_learned_as_those_here() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let [learned, measured] = starter_rows();
    let ids = |rows: &[Value]| -> Vec<Value> {
        let id = |row: &Value| json!({"task_id": row["task_id"]});
        rows.iter().map(id).collect()
    };
    let learned_ids = write_rows(path("learned.jsonl"), &ids(&learned));
    let measured_ids = write_rows(path("measured.jsonl"), &ids(&measured));
    let all = write_rows(path("all.jsonl"), &[learned, measured].concat());
    let arguments = ["--env", "tasks", "--tasks", text(&all), "--max-turns", "3"];
    let server = Server::start(&arguments);

    let task = format!(
        "path = '{}'\neval_path = '{}'",
        text(&learned_ids),
        text(&measured_ids)
    );
    let env = format!(
        "[env]\nkind = 'openenv'\nurl = '{}'\nheaders = {{ 'ate-target-actor' = 'space/coder-{{slot}}' }}",
        server.url
    );
    let (elsewhere, here) = (path("elsewhere.toml"), path("here.toml"));
    fs_err::write(&elsewhere, settings(&task, &env)).expect("written");
    let task = "path = 'starter'\nvisible_tests = 1";
    fs_err::write(&here, settings(task, "")).expect("written");
    let runs = [&elsewhere, &here].map(|file| {
        let run = file.with_extension("run");
        let output = train(file, &run);
        assert!(output.status.success(), "{}", told(&output));
        run
    });

    let [elsewhere, here] = runs.each_ref().map(|run| episodes(run, 1));
    assert_eq!((elsewhere.len(), here.len()), (16, 16));
    let (mut whole, mut passed) = (0, 0);
    for (there, here) in elsewhere.iter().zip(&here) {
        assert_eq!(there.task_id, here.task_id);
        assert_eq!(there.messages[0], here.messages[0]);
        let first = there.turns[0].tokens.clone();
        assert_eq!(
            there.trace.ids()[..first.end],
            here.trace.ids()[..first.end]
        );
        let calls = |episode: &Trajectory| episode.turns.iter().all(|turn| turn.tool_calls > 0);
        if calls(there) && calls(here) {
            assert_eq!(there.trace, here.trace);
            assert_eq!((there.reward, there.passed), (here.reward, here.passed));
            whole += 1;
            passed += usize::from(there.passed == Some(true));
        }
    }
    assert!(
        whole >= 8 && passed > 0 && passed < whole,
        "{whole} {passed}"
    );
    let summary = read_json(&runs[0].join("summary.json"));
    assert_eq!(summary["before"]["tasks"], 4);
    assert_eq!(summary["before"]["unscorable"], 0);
    let metrics = fs_err::read_to_string(runs[0].join("metrics.jsonl")).expect("metrics");
    for line in metrics.lines() {
        let row: Value = serde_json::from_str(line).expect("a row");
        assert_eq!(row["episodes/unscorable"], 0, "{row}");
    }

    // What the run leaves is measured there, too, by its own run file.
    let (resolved, last) = (runs[0].join("run.toml"), runs[0].join("final"));
    let output = wardian(&[
        "eval",
        "--config",
        text(&resolved),
        "--model",
        text(&last),
        "--format",
        "json",
    ])
    .output()
    .expect("it starts");
    assert!(output.status.success(), "{}", told(&output));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["pass_at_1"], summary["after"]["pass_at_1"]);
}

/// An environment whose actions are text; a run with it beside tasks from here.
#[test]
fn text_is_an_action_and_a_server_is_one_of_several_environments() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let server = Server::start(&["--env", "python"]);
    let prompt = |number: u32| json!({"prompt": format!("Print {number} with Python.")});
    let prompts = write_rows(
        path("prompts.jsonl"),
        &(0..10).map(prompt).collect::<Vec<_>>(),
    );
    let environments = format!(
        "[environments.python]
        path = '{}'
        max_new_tokens = 16
        env = {{ url = '{}', pass_reward = 0.5 }}
        [environments.code]
        path = 'starter'
        visible_tests = 1",
        text(&prompts),
        server.url
    );
    let file = path("run.toml");
    fs_err::write(&file, settings("", &environments)).expect("written");
    let run = path("run");
    let output = train(&file, &run);
    assert!(output.status.success(), "{}", told(&output));
    for step in 1..=2 {
        let episodes = episodes(&run, step);
        let there = (episodes.iter()).filter(|episode| episode.task_id.starts_with("python/"));
        let there: Vec<_> = there.collect();
        assert_eq!((there.len(), episodes.len()), (8, 16));
        for episode in there {
            // It rewards nothing, which is no fault.
            assert_eq!((episode.reward, episode.passed), (Some(0.0), Some(false)));
            assert!(episode.messages[0].content.starts_with("Print "));
            assert!(!matches!(episode.status, Status::Failed { .. }));
        }
    }
    let answered = |episode: &Trajectory| episode.messages.len() > 2;
    assert!(episodes(&run, 1).iter().any(answered), "no step was taken");
}

/// A measurement, of a model here or elsewhere, opens no more sessions than a step does, however many samples
/// or episodes at a time are asked for, and no Python is prepared for it.
#[test]
fn a_measurement_has_no_more_sessions_than_a_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let server = Server::start(&["--env", "python", "--max-sessions", "16"]);
    let model = Server::start(&[]);
    let prompt = |number: u32| json!({"prompt": format!("Print {number} with Python.")});
    let prompts: Vec<_> = (0..10).map(prompt).collect();
    let prompts = write_rows(path("prompts.jsonl"), &prompts);
    let env = format!(
        "[env]\nurl = '{}'\nretry_timeout = '200ms'\npass_reward = 0.0",
        server.url
    );
    let file = path("run.toml");
    let settings = settings(&format!("path = '{}'", text(&prompts)), &env);
    let settings = settings.replace("max_new_tokens = 64", "max_new_tokens = 8");
    fs_err::write(&file, settings.replace("limit = 4", "samples = 24")).expect("written");
    let elsewhere = ["--endpoint", &model.url, "--concurrency", "48"];
    for arguments in [&[][..], &elsewhere] {
        let common = ["eval", "--config", text(&file), "--format", "json"];
        let mut command = wardian(&[&common, arguments].concat());
        let cache = path("cache");
        let output = command.env("WARDIAN_CACHE", &cache).output();
        let output = output.expect("it starts");
        assert!(output.status.success(), "{}", told(&output));
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(
            (&report["samples"], &report["unscorable"]),
            (&json!(48), &json!(0))
        );
        assert_eq!(
            report["pass_at_1"], 1.0,
            "samples of a task are counted together"
        );
        let note = told(&output).contains("16 episodes at a time, as in training");
        assert_eq!(note, !arguments.is_empty(), "{}", told(&output));
        let kept = fs_err::read_dir(&cache).expect("the starter is unpacked there");
        let kept: Vec<_> = kept
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        let is_runtime = |name: &std::ffi::OsString| !name.to_string_lossy().starts_with("starter");
        assert!(!kept.iter().any(is_runtime), "{kept:?}");
    }
}

/// A server that dies ends the run, which says so, and what was learned until then is kept.
#[test]
fn a_server_that_dies_ends_the_run_with_its_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let all = Path::new(STARTER_TASKS).join("train.jsonl");
    let mut server = Server::start(&["--env", "tasks", "--tasks", text(&all)]);
    let env = format!(
        "[env]\nurl = '{}'\nepisodes = 40\nretry_timeout = '300ms'",
        server.url
    );
    let file = path("run.toml");
    let text_of_file = settings("", &env).replace("steps = 2", "steps = 1000");
    fs_err::write(&file, text_of_file).expect("written");
    let run = path("run");
    let arguments = ["train", "--config", text(&file), "--out", text(&run)];
    let mut running = wardian(&arguments).spawn().expect("it starts");
    let begun = Instant::now();
    let rows = || {
        let metrics = fs_err::read_to_string(run.join("metrics.jsonl"));
        metrics.unwrap_or_default().lines().count()
    };
    while rows() < 2 {
        let ended = running.try_wait().expect("it can be waited for");
        assert!(ended.is_none(), "it ended before the server did: {ended:?}");
        assert!(
            begun.elapsed() < Duration::from_secs(300),
            "it makes no steps"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    server.kill();
    let output = running.wait_with_output().expect("it ends");
    let told = told(&output);
    assert!(!output.status.success(), "{told}");
    assert!(told.contains("no episode could be scored"), "{told}");
    let place = format!("the environment at `{}`, session ", server.url);
    assert!(told.contains(&place), "{told}");
    assert!(
        told.contains("cannot be reached") || told.contains("closed"),
        "{told}"
    );
    assert!(rows() >= 2);

    // One that is not there is said before anything is sampled.
    let output = train(&file, &path("other"));
    assert_eq!(output.status.code(), Some(3), "it may be there later");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("did not answer `/schema`"), "{told}");
}

/// Asks a process to stop and returns what it told.
fn stop(process: Child) -> Output {
    let pid = process.id().to_string();
    let sent = Command::new("kill").args(["-TERM", &pid]).status();
    assert!(sent.expect("kill starts").success());
    process.wait_with_output().expect("it ends")
}

/// A run whose episodes wait is resumed while its server accepts connections and says nothing: all its episodes
/// ask it together, and the run stops when it is asked to, as it was.
#[test]
fn a_resumed_run_stops_while_its_server_is_silent() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let mut server = Server::start(&["--env", "python"]);
    let prompt = |number: u32| json!({"prompt": format!("Print {number} with Python.")});
    let prompts: Vec<_> = (0..10).map(prompt).collect();
    let prompts = write_rows(path("prompts.jsonl"), &prompts);
    let env = format!("[env]\nurl = '{}'\nconnect_timeout = '1h'", server.url);
    let text_of_file = settings(&format!("path = '{}'", text(&prompts)), &env)
        .replace("steps = 2", "steps = 1000")
        .replace("limit = 4", "limit = 1")
        .replace("max_turns = 3", "max_turns = 3\nmax_step_tokens = 12");
    let (file, run) = (path("run.toml"), path("run"));
    fs_err::write(&file, text_of_file).expect("written");
    let arguments = ["train", "--config", text(&file), "--out", text(&run)];
    let mut running = wardian(&arguments).spawn().expect("it starts");
    let begun = Instant::now();
    let rows = || fs_err::read_to_string(run.join("metrics.jsonl"));
    while rows().unwrap_or_default().is_empty() {
        let ended = running.try_wait().expect("it can be waited for");
        assert!(ended.is_none(), "it ended before it was asked to");
        assert!(begun.elapsed() < Duration::from_secs(300), "no step");
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = stop(running);
    assert_eq!(output.status.code(), Some(75), "{}", told(&output));
    server.kill();

    let address = server.url.trim_start_matches("http://");
    let listener = TcpListener::bind(address).expect("the port is free again");
    let (asked, silence) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let schema = r#"{"action": {"properties": {"code": {"type": "string"}}}}"#;
        let mut silent = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let mut head = [0; 12];
            // The rest is read with the connection's end.
            stream.read_exact(&mut head).expect("a request");
            if head.starts_with(b"GET /schema") {
                let length = schema.len();
                let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{schema}");
                stream.write_all(answer.as_bytes()).expect("written");
                let _ = stream.read_to_end(&mut Vec::new());
                continue;
            }
            silent.push(stream);
            if asked.send(silent.len()).is_err() {
                return;
            }
        }
    });
    let arguments = ["train", "--resume", text(&run)];
    let resumed = wardian(&arguments).spawn().expect("it starts");
    // A connection is waited for as long as this test may take, so that another is of another episode.
    let patience = Duration::from_secs(120);
    for expected in [1, 2] {
        assert_eq!(silence.recv_timeout(patience), Ok(expected));
    }
    let output = stop(resumed);
    assert_eq!(output.status.code(), Some(75), "{}", told(&output));
    let checkpoints = fs_err::read_dir(run.join("checkpoints")).expect("checkpoints");
    let waits = |entry: std::io::Result<fs_err::DirEntry>| {
        entry.is_ok_and(|entry| entry.path().join("episodes.json").is_file())
    };
    assert!(checkpoints.into_iter().any(waits), "episodes wait still");
}

#[test]
fn the_example_is_a_run_file() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/runs/openenv.toml");
    let config = RunConfig::load::<&str>(Some(&path), &[]).expect("it is valid");
    assert_eq!(config.env.and_then(|env| env.episodes), Some(512));
}
