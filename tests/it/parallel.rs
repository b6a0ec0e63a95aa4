//! Runs that several processes share, against the same runs by one.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rstest::rstest;
use serde_json::Value;
use wardian::trajectory::{read_step, step_path};

/// Whatever looks at the whole step is on: its rewards' deviation, its draws, its divergence, its lengths.
const SETTINGS: [&str; 18] = [
    "trainer.steps=3",
    "trainer.max_processes=3",
    "trainer.save_every=0",
    "trainer.mode=lora",
    "trainer.lora_rank=4",
    "trainer.dynamic_sampling=true",
    "trainer.max_draws=2",
    "trainer.scale_rewards=batch",
    "task.curriculum=pass_rate",
    "trainer.beta=0.05",
    "trainer.kl_in_reward=true",
    "trainer.overlong_limit=60",
    "trainer.overlong_margin=50",
    "rollout.groups_per_step=3",
    "rollout.group_size=3",
    "eval.limit=2",
    "eval.samples=1",
    "sandbox.deadline=2m",
];

/// Starts one process of a launch, or a process by itself at port 0.
fn start(
    arguments: &[&str],
    settings: &[&str],
    rank: usize,
    world_size: usize,
    port: u16,
) -> Child {
    let mut command = crate::binary::command();
    command.arg("train").args(arguments);
    for setting in settings {
        command.args(["--set", setting]);
    }
    if port > 0 {
        command
            .env("WORLD_SIZE", world_size.to_string())
            .env("RANK", rank.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string());
    }
    command
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts")
}

/// Starts `world_size` processes that share a run.
fn launch(arguments: &[&str], settings: &[&str], world_size: usize) -> Vec<Child> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    drop(listener);
    (0..world_size)
        .map(|rank| start(arguments, settings, rank, world_size, port))
        .collect()
}

fn ended(children: Vec<Child>) -> Vec<Output> {
    let wait = |child: Child| child.wait_with_output().expect("it ends");
    children.into_iter().map(wait).collect()
}

fn messages(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn succeed(children: Vec<Child>) {
    for output in ended(children) {
        assert!(output.status.success(), "{}", messages(&output));
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Holds two run folders to be the same but for what took how long.
fn assert_same(alone: &Path, together: &Path, steps: u64) {
    let last = format!("checkpoints/step-{steps}");
    for folder in ["final", &last] {
        let adapter = |run: &Path| run.join(folder).join("adapter_model.safetensors");
        let read = |run: &Path| fs_err::read(adapter(run)).expect("an adapter");
        assert!(read(alone) == read(together), "{folder} differs");
    }
    let read = |run: &Path, file: &str| fs_err::read(run.join(&last).join(file)).ok();
    for file in ["optimizer.safetensors", "value_head.safetensors"] {
        assert!(read(alone, file) == read(together, file), "{file} differs");
    }
    let rows = |run: &Path| -> Vec<Value> {
        let text = fs_err::read_to_string(run.join("metrics.jsonl")).expect("metrics");
        let row = |line: &str| {
            let mut row: Value = serde_json::from_str(line).expect("a JSON line");
            let keys = row.as_object_mut().expect("an object");
            keys.retain(|key, _| {
                !key.ends_with("_time") && !key.ends_with("_seconds") && key != "tokens_per_second"
            });
            row
        };
        text.lines().map(row).collect()
    };
    assert_eq!(rows(alone), rows(together));
    for step in 1..=steps {
        let episodes = |run: &Path| -> Vec<Value> {
            let steps = read_step(&step_path(run, step)).expect("the step is there");
            steps
                .map(|episode| {
                    let mut episode =
                        serde_json::to_value(episode.expect("it reads")).expect("it is JSON");
                    let usage = episode["usage"].as_object_mut().expect("an object");
                    usage.retain(|key, _| !key.ends_with("_seconds"));
                    episode
                })
                .collect()
        };
        assert_eq!(episodes(alone), episodes(together), "step {step}");
    }
    let summary = |run: &Path| -> [Value; 3] {
        let text = fs_err::read_to_string(run.join("summary.json")).expect("a summary");
        let summary: Value = serde_json::from_str(&text).expect("JSON");
        ["before", "after", "tokens"].map(|key| summary[key].clone())
    };
    assert_eq!(summary(alone), summary(together));
}

/// Waits until a run has logged `steps` lines, or one of its processes ends.
fn wait_for_rows(run: &Path, rows: usize, children: &mut [Child]) {
    let started = Instant::now();
    let logged = || {
        let text = fs_err::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
        text.lines().count()
    };
    while logged() < rows {
        for child in &mut *children {
            let ended = child.try_wait().expect("it can be waited for");
            assert!(ended.is_none(), "it ended before: {ended:?}");
        }
        assert!(started.elapsed() < Duration::from_secs(300), "too slow");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn signal(child: &Child, signal: &str) {
    let sent = Command::new("kill")
        .args([signal, &child.id().to_string()])
        .status();
    assert!(sent.expect("`kill` is there").success());
}

#[rstest]
#[case::in_turn("trainer.async_level=0")]
#[case::one_step_off("trainer.async_level=1")]
fn any_number_of_processes_makes_the_same_bytes(#[case] level: &str) {
    let settings: Vec<&str> = SETTINGS.into_iter().chain([level]).collect();
    let folder = tempfile::tempdir().expect("a folder");
    let (alone, together) = (folder.path().join("alone"), folder.path().join("together"));
    let of = |out| ["--seed", "3", "--out", text(out)].to_vec();
    succeed(vec![start(&of(&alone), &settings, 0, 1, 0)]);

    // One of three is killed: the others are told, and the root saves what is done.
    let mut children = launch(&of(&together), &settings, 3);
    wait_for_rows(&together, 1, &mut children);
    signal(&children[2], "-KILL");
    let outputs = ended(children);
    for output in &outputs[..2] {
        let messages = messages(output);
        assert_eq!(output.status.code(), Some(3), "{messages}");
        assert!(messages.contains("rank 2"), "{messages}");
    }

    // One of two that go on is asked to stop: both end, and what is done is saved.
    let resume = ["--resume", text(&together)];
    let mut children = launch(&resume, &[], 2);
    wait_for_rows(&together, 2, &mut children);
    signal(&children[1], "-TERM");
    let outputs = ended(children);
    for output in &outputs {
        assert_eq!(output.status.code(), Some(75), "{}", messages(output));
    }
    let [root, other] = [0, 1].map(|rank| messages(&outputs[rank]));
    assert!(
        root.contains("--resume") && !other.contains("--resume"),
        "{root}{other}"
    );

    // They come to the end that one process comes to.
    succeed(launch(&resume, &[], 2));
    assert_same(&alone, &together, 3);
}

#[test]
fn a_mixture_is_the_same_for_any_number_of_processes() {
    let folder = tempfile::tempdir().expect("a folder");
    let rows = (1..=6).map(|number| {
        let row = serde_json::json!({"question": "How many?", "answer": format!("#### {number}")});
        format!("{row}\n")
    });
    let maths = folder.path().join("maths.jsonl");
    fs_err::write(&maths, rows.collect::<String>()).expect("written");
    let path = format!("environments.maths.path={}", text(&maths));
    let mut settings = SETTINGS.to_vec();
    settings.extend([
        "environments.code.path=starter",
        "environments.code.weight=2",
        "environments.maths.max_turns=1",
        path.as_str(),
        "trainer.steps=2",
    ]);
    let (alone, together) = (folder.path().join("alone"), folder.path().join("together"));
    let of = |out| ["--seed", "3", "--out", text(out)].to_vec();
    succeed(vec![start(&of(&alone), &settings, 0, 1, 0)]);
    succeed(launch(&of(&together), &settings, 2));
    assert_same(&alone, &together, 2);
}

#[test]
fn processes_that_cannot_share_a_run_say_why() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    let arguments = ["--seed", "3", "--out", text(&run)];
    let failed = |children: Vec<Child>, expected: &str| {
        for output in ended(children) {
            let messages = messages(&output);
            assert_eq!(output.status.code(), Some(2), "{messages}");
            assert!(messages.contains(expected), "{messages}");
        }
    };
    // More than the run's own bound.
    failed(
        launch(&arguments, &SETTINGS, 4),
        "`WORLD_SIZE` is 4, more than `trainer.max_processes` = 3",
    );
    // Other settings.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    drop(listener);
    let steps = |rank| format!("trainer.steps={}", 4 + rank);
    let children = [0, 1].map(|rank| {
        let steps = steps(rank);
        let settings: Vec<&str> = SETTINGS.into_iter().chain([steps.as_str()]).collect();
        start(&arguments, &settings, rank, 2, port)
    });
    failed(
        children.into(),
        "rank 1 has `steps = 5`, rank 0 `steps = 4`",
    );
    assert!(!run.exists(), "nothing was begun");
}
