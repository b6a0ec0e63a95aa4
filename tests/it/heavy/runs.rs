//! `wardian train` and `wardian eval` on tasks of Harbor and SWE-bench, in gVisor on this machine.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use wardian::chat::Role;
use wardian::trajectory::{Trajectory, read_step, step_path};

use super::{FIXED, HARBOR, folders_in, instances, processes_naming, write};

/// A command whose actors are in a folder of the test's.
pub(super) fn wardian(folder: &Path, arguments: &[&str]) -> Command {
    // Of this build, which may have clusters.
    let mut command = Command::new(env!("CARGO_BIN_EXE_wardian"));
    command
        .args(arguments)
        .env_remove("WARDIAN_LOG")
        .env("NO_COLOR", "1")
        .env("TMPDIR", folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

pub(crate) fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(super) fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Nothing of any actor is left: neither a folder, nor a process.
pub(super) fn assert_clean(folder: &Path) {
    for base in folders_in(folder) {
        let name = base
            .file_name()
            .expect("it has one")
            .to_string_lossy()
            .into_owned();
        if name.starts_with("wardian-actors-") {
            assert_eq!(folders_in(&base), [] as [PathBuf; 0]);
            assert_eq!(processes_naming(&base), [] as [String; 0]);
        }
    }
}

pub(crate) fn episodes(run: &Path, step: u64) -> Vec<Trajectory> {
    let rows = read_step(&step_path(run, step)).expect("the step is there");
    rows.collect::<Result<_, _>>().expect("every row reads")
}

fn metrics(run: &Path) -> Vec<Value> {
    let text = fs_err::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let rows = text.lines().map(serde_json::from_str);
    rows.collect::<Result<_, _>>().expect("JSON")
}

/// The settings of a run of the carried model with 8 rollouts at a time.
pub(super) fn settings(task: &str, more: &str) -> String {
    format!(
        "seed = 3
        model.path = 'starter'
        task.path = '{task}'
        [rollout]
        group_size = 4
        groups_per_step = 2
        max_turns = 2
        max_new_tokens = 40
        max_total_tokens = 240
        system_prompt = 'Use bash, then submit.'
        [actor]
        root = 'host'
        max_actors = 8
        memory = '256MiB'
        disk = '256MiB'
        command_timeout = '10s'
        [trainer]
        mode = 'full'
        learning_rate = 3e-4
        steps = 2
        save_every = 1
        [eval]
        every = 1
        temperature = 1.0
        {more}
        "
    )
}

/// The carried model knows other tools and solves nothing; the loop goes its way, to the same bytes after an
/// interruption, and leaves nothing behind.
#[test]
fn a_run_on_harbor_tasks_goes_through_and_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let file = path("run.toml");
    fs_err::write(&file, settings(HARBOR, "")).expect("written");
    let run = path("run");
    let train = |arguments: &[&str]| {
        let output = wardian(folder.path(), arguments)
            .output()
            .expect("it starts");
        assert!(output.status.success(), "{}", told(&output));
        assert_clean(folder.path());
    };
    train(&["train", "--config", text(&file), "--out", text(&run)]);
    let rows = episodes(&run, 1);
    assert_eq!(rows.len(), 8);
    for row in &rows {
        assert!(
            row.reward.is_some() && row.usage.start_seconds > 0.0,
            "{row:?}"
        );
        assert_eq!(row.messages[0].content, "Use bash, then submit.");
    }
    let is_answered = |row: &Trajectory| {
        row.messages
            .iter()
            .any(|message| message.role == Role::Tool)
    };
    let both = rows.into_iter().chain(episodes(&run, 2));
    assert!(
        both.into_iter().any(|row| is_answered(&row)),
        "no tool has answered"
    );
    let logged = metrics(&run);
    let steps: Vec<&Value> = logged
        .iter()
        .filter(|row| !row["reward"].is_null())
        .collect();
    assert_eq!(steps.len(), 2);
    for row in steps {
        assert_eq!(row["episodes/unscorable"], 0, "{row}");
        assert_eq!(row["actor/started"], 8, "{row}");
        assert!(row["actor/start_seconds"].as_f64() > Some(0.0), "{row}");
        assert!(row["sandbox/grade_seconds"].as_f64() > Some(0.0), "{row}");
    }
    // Measured on the way, too: the share of held-out tasks that are solved.
    assert!(
        logged.iter().any(|row| row["eval/pass_at_1"].is_number()),
        "{logged:?}"
    );
    // Further steps from the last checkpoint.
    train(&["train", "--resume", text(&run), "--set", "trainer.steps=3"]);
    assert_eq!(episodes(&run, 3).len(), 8);
    let eval = ["eval", "--config", text(&file), "--format", "json"];
    let output = wardian(folder.path(), &eval).output().expect("it starts");
    assert!(output.status.success(), "{}", told(&output));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(
        (&report["unscorable"], &report["tasks"]),
        (&json!(0), &json!(1))
    );
    assert_clean(folder.path());
}

/// An agent that asks the model once and then does what its variables say for its task.
pub(super) const AGENT: &str = r#"
import json, os, urllib.request

def post(url, body):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)

task = json.load(open(os.environ["WARDIAN_TASK"]))
post(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
     {"model": os.environ["WARDIAN_MODEL"], "max_tokens": 8, "messages": [{"role": "user", "content": "Go."}]})
for command in json.loads(os.environ["COMMANDS"])[task["task_id"]]:
    print(post(os.environ["WARDIAN_TOOLS"] + "/bash", {"command": command})["output"])
"#;

/// A scripted policy solves tasks of both kinds, 8 at a time.
#[test]
fn a_scripted_agent_solves_harbor_and_swebench_in_one_run() {
    let folder = tempfile::tempdir().expect("a folder");
    solve_by_script(folder.path(), 2, |repositories| {
        format!("root = 'host'\nrepositories = '{}'", text(repositories))
    });
    let measured = metrics(&folder.path().join("run"));
    let rates = measured
        .iter()
        .filter(|row| row["eval/pass_at_1"].is_number());
    assert!(rates.count() > 0, "{measured:?}");
    assert_clean(folder.path());
}

/// Trains for some steps on tasks of both kinds with an agent that knows the answers, 8 episodes at a time, and
/// checks that each is solved. `actor` says, of the repositories of SWE-bench's instances, what actors start from.
pub(crate) fn solve_by_script(folder: &Path, steps: u64, actor: impl FnOnce(&Path) -> String) {
    let path = |name: &str| folder.join(name);
    let (rows, repositories) = instances(folder, 2);
    // Tasks without steps: a program is given one instruction.
    let tasks = path("tasks");
    fs_err::create_dir(&tasks).expect("made");
    for name in ["greeting", "primes"] {
        let copied = Command::new("cp")
            .args(["-r", &format!("{HARBOR}/{name}"), text(&tasks)])
            .status();
        assert!(copied.expect("cp").success());
        // What is right is right on a slow machine, too.
        let file = tasks.join(name).join("task.toml");
        let task = fs_err::read_to_string(&file).expect("it reads");
        write(
            &file,
            &task.replace("timeout_sec = 60", "timeout_sec = 900"),
        );
    }
    let fix = format!("echo '{FIXED}' > src/twice.sh");
    let primes = "printf '%s\\n' 2 3 5 7 11 13 17 19 23 29 31 37 41 43 47 > primes.txt";
    let commands = json!({
        "shell/greeting": ["echo hello > hello.txt"],
        "shell/primes": [primes],
        "issues/a__b-0": ["cat src/twice.sh", fix],
        "issues/a__b-1": [fix],
    });
    let agent = path("agent.py");
    fs_err::write(&agent, AGENT).expect("written");
    let more = format!(
        "[environments.shell]
        path = '{}'
        [environments.issues]
        path = '{}'
        [rollout.agent]
        command = ['python3', '{}']
        concurrency = 8
        env = {{ COMMANDS = '''{commands}''', PYTHONDONTWRITEBYTECODE = '1' }}
        ",
        text(&tasks),
        text(&rows),
        text(&agent),
    );
    let config = settings("", &more)
        .replace("root = 'host'", &actor(&repositories))
        .replace("task.path = ''", "")
        .replace("'10s'", "'2m'");
    let file = path("run.toml");
    fs_err::write(&file, config).expect("written");
    let run = path("run");
    let steps_key = format!("trainer.steps={steps}");
    let (config, out) = (text(&file), text(&run));
    let arguments = [
        "train", "--config", config, "--out", out, "--set", &steps_key,
    ];
    let output = wardian(folder, &arguments).output().expect("it starts");
    assert!(output.status.success(), "{}", told(&output));
    let all: Vec<Trajectory> = (1..=steps).flat_map(|step| episodes(&run, step)).collect();
    for row in &all {
        let is_whole = row.trace.sampled_len() > 0 && row.usage.start_seconds > 0.0;
        assert!(is_whole, "{:?}: {:?}", row.status, row.messages);
    }
    for kind in ["shell/", "issues/"] {
        let of_kind = all.iter().filter(|row| row.task_id.starts_with(kind));
        assert_eq!(of_kind.clone().count() as u64, 4 * steps, "{kind}");
        for row in of_kind {
            let how = (&row.status, &row.usage, &row.messages);
            assert_eq!(row.reward, Some(1.0), "{}: {how:#?}", row.task_id);
        }
    }
}

/// Returns the next call of a script that solves every task, by what was said so far.
fn next_call(messages: &[Value]) -> (&'static str, Value) {
    let said = messages
        .iter()
        .filter_map(|message| message["content"].as_str());
    let said: Vec<&str> = said.collect();
    let done = messages
        .iter()
        .filter(|message| message["role"] == "assistant")
        .count();
    let command = |command: &str| ("bash", json!({"command": command}));
    if said.iter().any(|text| text.contains("Twice two")) {
        let edit = json!({
            "action": "replace", "path": "src/twice.sh", "old": "* 0))", "new": "* 2))",
        });
        return [
            command("cat src/twice.sh"),
            ("edit", edit),
            ("submit", json!({})),
        ]
        .into_iter()
        .nth(done)
        .expect("it was done");
    }
    let next = match said.last().copied().unwrap_or_default() {
        text if text.contains("hello.txt") => "echo hello > hello.txt",
        text if text.contains("primes.txt") => {
            "printf '%s\\n' 2 3 5 7 11 13 17 19 23 29 31 37 41 43 47 > primes.txt"
        }
        text if text.contains("how many lines") => "wc -l < sorted.txt > count.txt",
        text if text.contains("notes.txt") => "sort -u notes.txt > sorted.txt",
        _ => return ("submit", json!({})),
    };
    command(next)
}

/// Answers requests of chat completions by the script, each on a thread of its own, until the process ends.
fn scripted_model() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("it has one");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || answer(stream));
        }
    });
    format!("http://{address}/v1")
}

fn answer(mut stream: TcpStream) -> Option<()> {
    let mut request = Vec::new();
    let mut buffer = [0; 64 << 10];
    let (head, length) = loop {
        let read = stream.read(&mut buffer).ok().filter(|read| *read > 0)?;
        request.extend_from_slice(&buffer[..read]);
        let text = String::from_utf8_lossy(&request).to_lowercase();
        let Some(head) = text.find("\r\n\r\n") else {
            continue;
        };
        let length = text[..head].split("content-length:").nth(1);
        let length = length.and_then(|rest| rest.lines().next()?.trim().parse::<usize>().ok());
        break (head + 4, length.unwrap_or(0));
    };
    while request.len() < head + length {
        let read = stream.read(&mut buffer).ok().filter(|read| *read > 0)?;
        request.extend_from_slice(&buffer[..read]);
    }
    let body: Value = serde_json::from_slice(&request[head..head + length]).ok()?;
    let (name, arguments) = next_call(body["messages"].as_array()?);
    let function = json!({"name": name, "arguments": arguments.to_string()});
    let call = json!({"id": "call_1", "type": "function", "function": function});
    let message = json!({"role": "assistant", "content": null, "tool_calls": [call]});
    let usage = json!({"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2});
    let body = json!({
        "id": "a", "object": "chat.completion", "created": 0, "model": "scripted", "usage": usage,
        "choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}],
    })
    .to_string();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(body.as_bytes()).ok()
}

/// The same tasks, tools and judges for a model behind an endpoint, which here knows the answers.
#[test]
fn a_model_that_knows_the_answers_solves_all_tasks() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let (rows, repositories) = instances(folder.path(), 2);
    let url = scripted_model();
    let file = path("run.toml");
    let config = settings(HARBOR, "").replace(
        "root = 'host'",
        &format!("root = 'host'\nrepositories = '{}'", text(&repositories)),
    );
    // Room for the calls that each task takes.
    let config = config.replace("max_turns = 2", "max_turns = 4");
    fs_err::write(&file, config).expect("written");
    for (tasks, count) in [(Path::new(HARBOR), 3), (&rows, 2)] {
        let arguments = [
            "eval",
            "--config",
            text(&file),
            "--tasks",
            text(tasks),
            "--endpoint",
            &url,
            "--model",
            "scripted",
            "--format",
            "json",
        ];
        let output = wardian(folder.path(), &arguments)
            .output()
            .expect("it starts");
        assert!(output.status.success(), "{}", told(&output));
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(report["tasks"], count, "{report}");
        assert_eq!(report["unscorable"], 0, "{report}");
        assert_eq!(report["pass_at_1"], 1.0, "{report}");
        assert_clean(folder.path());
    }
}

/// A run that is stopped in the middle of a command ends it, and everything else.
#[test]
fn a_run_that_is_stopped_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let agent = path("agent.py");
    fs_err::write(&agent, AGENT).expect("written");
    let commands = json!({"greeting": ["sleep 600"], "primes": ["sleep 600"]});
    let tasks = path("tasks");
    fs_err::create_dir(&tasks).expect("made");
    for name in ["greeting", "primes"] {
        let copied = Command::new("cp")
            .args(["-r", &format!("{HARBOR}/{name}"), text(&tasks)])
            .status();
        assert!(copied.expect("cp").success());
    }
    let more = format!(
        "[rollout.agent]
        command = ['python3', '{}']
        env = {{ COMMANDS = '''{commands}''' }}
        ",
        text(&agent)
    );
    let config = settings(text(&tasks), &more).replace("'10s'", "'10m'");
    let file = path("run.toml");
    fs_err::write(&file, config).expect("written");
    let run = path("run");
    let arguments = ["train", "--config", text(&file), "--out", text(&run)];
    let mut process = wardian(folder.path(), &arguments)
        .spawn()
        .expect("it starts");
    // Until a command runs in an actor.
    let until = Instant::now() + Duration::from_secs(120);
    let is_sleeping = || {
        let bases = folders_in(folder.path());
        let lines = bases.iter().flat_map(|base| processes_naming(base));
        lines.into_iter().any(|line| line.contains(" exec "))
    };
    while !is_sleeping() {
        assert!(Instant::now() < until, "no command was run");
        assert!(
            process.try_wait().expect("it is there").is_none(),
            "it ended"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    let number = process.id().to_string();
    let killed = Command::new("kill").args(["-TERM", &number]).status();
    assert!(killed.expect("kill").success());
    let output = process.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(75), "{}", told(&output));
    assert_clean(folder.path());
}

/// What does not go together is refused before anything is sampled.
#[test]
fn what_cannot_work_is_refused_with_its_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("run.toml");
    fs_err::write(&file, settings(HARBOR, "")).expect("written");
    let run = folder.path().join("run");
    for (set, expected) in [
        ("rollout.max_step_tokens=8", "`rollout.max_step_tokens`"),
        ("rollout.deadline=1m", "`rollout.deadline`"),
        (
            "trainer.reward_aggregation=gdpo",
            "`trainer.reward_aggregation`",
        ),
        ("actor.root=/no/where", "`actor.root` is `/no/where`"),
        ("rollout.agent.command=['true']", "has several steps"),
        ("task.split=train", "leave the split out"),
    ] {
        let arguments = [
            "train",
            "--config",
            text(&file),
            "--out",
            text(&run),
            "--set",
            set,
        ];
        let output = wardian(folder.path(), &arguments)
            .output()
            .expect("it starts");
        assert_eq!(output.status.code(), Some(2), "{set}: {}", told(&output));
        let told = told(&output);
        assert!(told.contains(expected), "{set}: {told}");
        assert_clean(folder.path());
    }
    let config = settings(HARBOR, "").replace("root = 'host'", "");
    fs_err::write(&file, config).expect("written");
    let arguments = ["train", "--config", text(&file), "--out", text(&run)];
    let output = wardian(folder.path(), &arguments)
        .output()
        .expect("it starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(
        told(&output).contains("give `actor.root`"),
        "{}",
        told(&output)
    );
}
