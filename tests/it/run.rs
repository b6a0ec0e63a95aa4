//! A whole run on the carried model and tasks, at a size that a test can wait for.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use candle_core::{DType, Device};
use rstest::rstest;
use serde_json::Value;
use wardian::engine::LoadedModel;
use wardian::task::TaskSet;
use wardian::trajectory::{Trajectory, Turn, read_step, step_path};

const SMALL: [&str; 12] = [
    "--set",
    "trainer.steps=2",
    "--set",
    "rollout.groups_per_step=4",
    "--set",
    "rollout.group_size=4",
    "--set",
    "eval.limit=4",
    "--set",
    "eval.samples=2",
    "--set",
    "trainer.save_every=1",
];

pub(crate) fn wardian(arguments: &[&str]) -> String {
    let output = crate::binary::command()
        .args(arguments)
        .output()
        .expect("the binary starts");
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{messages}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn json(path: &Path) -> Value {
    let text = fs_err::read_to_string(path).expect("the file is there");
    serde_json::from_str(&text).expect("the file is JSON")
}

pub(crate) fn episodes(run: &Path, step: u64) -> Vec<Trajectory> {
    read_step(&step_path(run, step))
        .expect("the step is there")
        .collect::<Result<_, _>>()
        .expect("every row reads")
}

pub(crate) fn train(out: &Path, extra: &[&str]) {
    let mut arguments = vec![
        "train",
        "--out",
        out.to_str().expect("UTF-8"),
        "--seed",
        "3",
    ];
    arguments.extend(SMALL);
    arguments.extend(extra);
    wardian(&arguments);
}

#[test]
fn a_full_run_leaves_a_complete_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    train(&run, &[]);

    let report = fs_err::read_to_string(run.join("report.html")).unwrap();
    assert!(report.contains("<h2>Held-out tasks</h2>"), "{report}");
    let summary = json(&run.join("summary.json"));
    assert_eq!(summary["steps"], 2);
    assert_eq!(summary["before"]["tasks"], 4);
    assert!(
        summary["after"]["ci95"]
            .as_array()
            .is_some_and(|interval| interval.len() == 2)
    );
    let metrics = fs_err::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let rows: Vec<Value> = metrics
        .lines()
        .map(|line| serde_json::from_str(line).expect("a JSON line"))
        .collect();
    assert_eq!(rows.len(), 2);
    for name in [
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "entropy",
        "num_tokens",
        "completions/mean_length",
        "tools/call_frequency",
        "clip_ratio/region_mean",
        "step_time",
    ] {
        assert!(rows[0][name].is_number(), "{name}");
    }
    // Sampler and trainer share weights and kernels, so the first step is exactly on-policy.
    let difference = rows[0]["sampling/sampling_logp_difference/max"]
        .as_f64()
        .expect("a number");
    assert!(difference < 1e-5, "{difference}");
    for file in [
        "run.toml",
        "final/model.safetensors",
        "final/config.json",
        "final/tokenizer.json",
        "checkpoints/step-2/model.safetensors",
    ] {
        assert!(run.join(file).is_file(), "{file}");
    }
}

#[test]
fn the_loss_mask_is_1_exactly_on_sampled_ids() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    train(&run, &["--set", "trainer.steps=1"]);
    let episodes = episodes(&run, 1);
    assert_eq!(episodes.len(), 16);
    let (mut multi_turn, mut runs) = (0, 0);
    for episode in &episodes {
        let trace = &episode.trace;
        let sampled: Vec<_> = trace.sampled_spans().collect();
        let turns: Vec<_> = episode
            .turns
            .iter()
            .map(|turn| turn.tokens.clone())
            .collect();
        assert_eq!(sampled, turns);
        assert!(trace.prompt_len() > 0);
        multi_turn += usize::from(turns.len() > 1);
        assert!(episode.reward.is_some());
        for run in episode.turns.iter().flat_map(|turn| &turn.runs) {
            runs += 1;
            assert!(run.fuel.is_some_and(|fuel| fuel > 0), "{run:?}");
        }
    }
    assert!(multi_turn > 0, "the starter acts over several turns");
    assert!(runs > 0, "what it ran is stored");
}

#[test]
fn the_same_seed_samples_the_same_tokens() {
    let folder = tempfile::tempdir().expect("a folder");
    let (first, second) = (folder.path().join("a"), folder.path().join("b"));
    for run in [&first, &second] {
        train(run, &["--set", "trainer.steps=2"]);
    }
    let ids = |run: &Path| -> Vec<Vec<u32>> {
        episodes(run, 2)
            .iter()
            .map(|episode| episode.trace.ids().to_vec())
            .collect()
    };
    assert_eq!(ids(&first), ids(&second));
    let turns = |run: &Path| -> Vec<Vec<Turn>> {
        let episodes = episodes(run, 2).into_iter();
        episodes.map(|episode| episode.turns).collect()
    };
    assert_eq!(turns(&first), turns(&second), "with what was run, and fuel");
    let weights = |run: &Path| fs_err::read(run.join("final/model.safetensors")).expect("weights");
    assert_eq!(
        weights(&first),
        weights(&second),
        "a run is reproducible to the byte"
    );
}

/// Starts a run, and sends it a signal, `-KILL` or `-TERM`, once it has logged two of its steps.
pub(crate) fn interrupt(out: &Path, extra: &[&str], signal: &str) -> Output {
    let mut command = crate::binary::command();
    command
        .args(["train", "--seed", "3", "--out"])
        .arg(out)
        .args(SMALL)
        .args(extra);
    interrupt_at(command, out, 2, signal)
}

/// Starts or resumes a run, and sends it a signal once it has logged so many of its steps.
pub(crate) fn interrupt_at(mut command: Command, out: &Path, rows: usize, signal: &str) -> Output {
    let mut child = command
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let logged = || {
        let text = fs_err::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
        text.lines().count()
    };
    while logged() < rows {
        let ended = child.try_wait().expect("it can be waited for");
        assert!(
            ended.is_none(),
            "it ended before it was interrupted: {ended:?}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    let sent = Command::new("kill")
        .args([signal, &child.id().to_string()])
        .status();
    assert!(sent.expect("`kill` is there").success());
    child.wait_with_output().expect("it ends")
}

#[rstest]
#[case::all_weights(&["--set", "trainer.steps=6", "--set", "trainer.save_every=2"], "model.safetensors")]
#[case::an_adapter(
    &[
        "--set", "trainer.steps=6", "--set", "trainer.save_every=2",
        "--set", "trainer.mode=lora", "--set", "trainer.lora_rank=4",
        "--set", "trainer.dynamic_sampling=true", "--set", "trainer.lr_schedule=cosine",
        "--set", "task.curriculum=pass_rate", "--set", "trainer.use_rslora=true",
        "--set", "trainer.modules_to_save=['lm_head', 'embed_tokens']", "--set", "trainer.beta=0.01",
        "--set", "trainer.lora_dropout=0.1",
    ],
    "adapter_model.safetensors"
)]
#[case::a_value_head(
    &[
        "--set", "trainer.steps=6", "--set", "trainer.save_every=2",
        "--set", "trainer.advantage=gae", "--set", "trainer.value_trunk_coef=0.1",
        "--set", "trainer.num_iterations=2",
    ],
    "model.safetensors"
)]
#[case::one_step_off(
    &[
        "--set", "trainer.steps=6", "--set", "trainer.save_every=2",
        "--set", "trainer.async_level=1", "--set", "trainer.dynamic_sampling=true",
        "--set", "task.curriculum=pass_rate", "--set", "trainer.sampler_correction=token_truncate",
    ],
    "model.safetensors"
)]
fn a_killed_run_goes_on_to_the_same_bytes(#[case] settings: &[&str], #[case] weights: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    train(&whole, settings);
    let output = interrupt(&killed, settings, "-KILL");
    assert!(!output.status.success());
    assert!(!killed.join("summary.json").exists());
    wardian(&["train", "--resume", killed.to_str().expect("UTF-8")]);
    assert_same_run(&whole, &killed, weights);
}

#[rstest]
#[case::between_steps(&["--set", "eval.every=2"])]
#[case::while_it_samples_and_trains(&["--set", "trainer.async_level=1"])]
fn a_run_that_is_asked_to_stop_saves_and_goes_on_to_the_same_bytes(#[case] extra: &[&str]) {
    let folder = tempfile::tempdir().expect("a folder");
    let (whole, stopped) = (folder.path().join("whole"), folder.path().join("stopped"));
    // Without a checkpoint on the way, what is saved is saved because of the signal.
    // The signal comes while the second step is measured, or in the third, and is not hidden by `-q`.
    let mut settings = vec!["--set", "trainer.steps=6", "--set", "trainer.save_every=0"];
    settings.extend(extra);
    settings.push("-q");
    train(&whole, &settings);
    let output = interrupt(&stopped, &settings, "-TERM");
    let messages = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{messages}");
    assert!(messages.contains("--resume"), "{messages}");
    let saved = fs_err::read_dir(stopped.join("checkpoints"))
        .expect("a checkpoint")
        .count();
    assert_eq!(saved, 1);
    // Another seed would be another run.
    refused(&stopped, &["--set", "seed=4"], "has seed 3, not 4");
    // As a crash in the middle of saving leaves it.
    let partial = stopped.join("checkpoints/.partial-x");
    fs_err::create_dir(&partial).expect("a folder");
    wardian(&["train", "--resume", stopped.to_str().expect("UTF-8")]);
    assert!(!partial.exists());
    assert_same_run(&whole, &stopped, "model.safetensors");

    // It is done now.
    refused(&stopped, &[], "is done");
}

#[test]
fn a_run_that_is_done_takes_further_steps() {
    let folder = tempfile::tempdir().expect("a folder");
    let (whole, extended) = (folder.path().join("whole"), folder.path().join("extended"));
    let measured = ["--set", "eval.every=2", "--set", "trainer.save_every=0"];
    train(
        &whole,
        &[&measured[..], &["--set", "trainer.steps=6"]].concat(),
    );
    train(
        &extended,
        &[&measured[..], &["--set", "trainer.steps=4"]].concat(),
    );
    assert_eq!(json(&extended.join("summary.json"))["steps"], 4);
    let run = extended.to_str().expect("UTF-8");
    wardian(&["train", "--resume", run, "--set", "trainer.steps=6"]);
    assert_eq!(json(&extended.join("summary.json"))["steps"], 6);
    assert_same_run(&whole, &extended, "model.safetensors");
    // With other tasks it would be another run.
    for (set, expected) in [
        ("task.limit=3", "the tasks to learn from are others"),
        ("eval.limit=1", "the tasks to measure on are others"),
    ] {
        refused(
            &extended,
            &["--set", "trainer.steps=8", "--set", set],
            expected,
        );
    }
}

#[test]
fn a_run_stops_at_what_looks_wrong_and_goes_on_with_a_remedy() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    // No episode ends within two tokens.
    let settings = ["rollout.max_new_tokens=2", "watch.truncated=stop"];
    let sets = settings.iter().flat_map(|set| ["--set", set]);
    let output = crate::binary::command()
        .args(["train", "--seed", "3", "--out"])
        .arg(&run)
        .args(SMALL)
        .args(sets)
        .output()
        .expect("the binary starts");
    let messages = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{messages}");
    assert!(
        messages.contains("step 1: 100 % of the episodes were cut off"),
        "{messages}"
    );
    assert!(
        messages.contains("raise `rollout.max_new_tokens`"),
        "{messages}"
    );
    let path = run.to_str().expect("UTF-8");
    wardian(&["train", "--resume", path, "--set", "watch.truncated=skip"]);
    let text = fs_err::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    for line in text.lines() {
        let row: Value = serde_json::from_str(line).expect("a JSON line");
        assert_eq!(row["anomalies"], serde_json::json!(["truncated"]), "{row}");
        assert_eq!(row["grad_norm"], 0.0, "nothing is learned from it");
    }
    assert_eq!(text.lines().count(), 2);
}

/// Resumes a run and expects it to be refused.
fn refused(run: &Path, extra: &[&str], expected: &str) {
    let output = crate::binary::command()
        .args(["train", "--resume"])
        .arg(run)
        .args(extra)
        .output()
        .expect("the binary starts");
    let messages = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{messages}");
    assert!(messages.contains(expected), "{messages}");
}

/// Compares weights, episodes and what was measured.
pub(crate) fn assert_same_run(whole: &Path, resumed: &Path, weights: &str) {
    let read = |run: &Path| fs_err::read(run.join("final").join(weights)).expect("weights");
    assert!(read(whole) == read(resumed), "the weights differ");
    for step in 1..=6 {
        let traces = |run: &Path| -> Vec<_> {
            let traces = episodes(run, step).into_iter();
            traces
                .map(|episode| (episode.trace, episode.reward, episode.group))
                .collect()
        };
        assert_eq!(traces(whole), traces(resumed), "step {step}");
    }
    let rows = |run: &Path| -> Vec<[Value; 5]> {
        let text = fs_err::read_to_string(run.join("metrics.jsonl")).expect("metrics");
        text.lines()
            .map(|line| serde_json::from_str::<Value>(line).expect("a JSON line"))
            .map(|row| {
                [
                    "step",
                    "loss",
                    "num_tokens",
                    "eval/pass_at_1",
                    "critic/vf_loss",
                ]
                .map(|key| row[key].clone())
            })
            .collect()
    };
    assert_eq!(rows(whole), rows(resumed));
    let summary = |run: &Path| {
        let summary = json(&run.join("summary.json"));
        [
            summary["before"].clone(),
            summary["after"].clone(),
            summary["tokens"].clone(),
        ]
    };
    assert_eq!(summary(whole), summary(resumed));
}

#[test]
fn lora_leaves_an_adapter_that_evaluates() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    train(
        &run,
        &[
            "--set",
            "trainer.mode=lora",
            "--set",
            "trainer.lora_rank=4",
            "--set",
            "trainer.use_rslora=true",
            "--set",
            "trainer.lora_targets=all-linear",
            "--set",
            "trainer.steps=2",
        ],
    );
    let adapter = json(&run.join("final/adapter_config.json"));
    assert_eq!(
        (&adapter["r"], &adapter["peft_type"]),
        (&4.into(), &"LORA".into())
    );
    assert_eq!(adapter["use_rslora"], true);
    // By their own names: in a list, PEFT knows no `all-linear`.
    assert_eq!(
        adapter["target_modules"].as_array().expect("a list").len(),
        7
    );
    assert!(run.join("final/adapter_model.safetensors").is_file());
    let adapter = run.join("final");
    let report = wardian(&[
        "eval",
        "--model",
        adapter.to_str().expect("UTF-8"),
        "--set",
        "eval.limit=2",
        "--samples",
        "2",
        "--k",
        "1,2",
        "--format",
        "json",
    ]);
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["tasks"], 2);
    assert!(report["pass_at"]["2"].is_number(), "{report}");

    // Merged, it is a model of its own, in the type asked for.
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let merged = path("merged");
    let adapter = adapter.to_str().expect("UTF-8");
    wardian(&["export", "--model", adapter, "--out", &merged]);
    let names: BTreeSet<String> = fs_err::read_dir(&merged)
        .expect("the folder is there")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .into_string()
                .expect("UTF-8")
        })
        .collect();
    let expected = [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(names, expected.map(str::to_owned).into());
    let config = json(&folder.path().join("merged/config.json"));
    assert_eq!(config["torch_dtype"], "bfloat16");
    let size = |folder: &str| {
        fs_err::metadata(format!("{folder}/model.safetensors"))
            .expect("a file")
            .len()
    };
    let whole = path("whole");
    wardian(&[
        "export", "--model", adapter, "--out", &whole, "--dtype", "f32",
    ]);
    assert!(
        2 * size(&merged) <= size(&whole) + 65_536,
        "bf16 takes half"
    );
    let exported = LoadedModel::open(&whole, DType::F32, &Device::Cpu).expect("it loads");
    let base = json(&run.join("final/adapter_config.json"));
    let base = base["base_model_name_or_path"].as_str().expect("a path");
    let base = LoadedModel::open(base, DType::F32, &Device::Cpu).expect("it loads");
    let name = "model.layers.0.self_attn.q_proj.weight";
    let difference = (&exported.weights[name] - &base.weights[name]).expect("shapes agree");
    let difference = difference.abs().and_then(|difference| difference.max_all());
    let difference: f32 = difference
        .and_then(|most| most.to_scalar())
        .expect("a number");
    assert!(difference > 0.0, "the adapter is in it");
    // What is there is not overwritten.
    let again = crate::binary::command()
        .args(["export", "--out", &merged])
        .output()
        .expect("the binary starts");
    assert_eq!(again.status.code(), Some(2));
}

#[test]
fn held_out_tasks_are_in_no_other_set() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/starter/tasks");
    let asked = |name: &str| -> Vec<String> {
        TaskSet::open(&folder.join(name), None, 0)
            .expect("the tasks are read")
            .tasks()
            .iter()
            .map(|task| task.prompt.clone())
            .collect()
    };
    let training = asked("train.jsonl");
    let held_out = asked("heldout.jsonl");
    assert!(training.len() >= 400 && held_out.len() >= 128);
    // The prompt says every operation and constant, so another prompt is another function's.
    assert!(held_out.iter().all(|prompt| !training.contains(prompt)));
}

#[test]
fn a_file_of_own_tasks_is_divided_and_its_run_file_evaluates() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let rows: Vec<String> = (1..=10)
        .map(|number| {
            serde_json::json!({
                "task_id": format!("own-{number}"),
                "prompt": format!("Write a function f(x) that takes x, adds {number}."),
                "code": format!("def f(x):\n    return x + {number}"),
                "test_imports": [],
                "test_list": [format!("assert f(1) == {}", number + 1)],
            })
            .to_string()
        })
        .collect();
    fs_err::write(path("tasks.jsonl"), rows.join("\n")).expect("written");
    let (tasks, run) = (path("tasks.jsonl"), folder.path().join("run"));
    train(&run, &["--tasks", &tasks, "--set", "trainer.steps=1"]);
    let summary = json(&run.join("summary.json"));
    assert_eq!(
        summary["before"]["tasks"], 2,
        "a fifth is held out: {summary}"
    );
    let report = wardian(&[
        "eval",
        "--config",
        run.join("run.toml").to_str().expect("UTF-8"),
        "--model",
        run.join("final").to_str().expect("UTF-8"),
        "--format",
        "json",
    ]);
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["tasks"], 2);
    assert_eq!(report["pass_at_1"], summary["after"]["pass_at_1"]);
}

#[test]
fn sft_learns_its_demonstrations() {
    let folder = tempfile::tempdir().expect("a folder");
    let demos = folder.path().join("demos.jsonl");
    let row = serde_json::json!({"messages": [
        {"role": "user", "content": "Say it."}, {"role": "assistant", "content": "f(x) == 2"},
    ]});
    fs_err::write(&demos, format!("{row}\n").repeat(4)).expect("written");
    let out = folder.path().join("model");
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let output = crate::binary::command()
        .args([
            "sft",
            "--demos",
            &text(&demos),
            "--out",
            &text(&out),
            "--steps",
            "20",
        ])
        .args(["--learning-rate", "3e-3", "--batch-size", "4"])
        .output()
        .expect("the binary starts");
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{messages}");
    let losses: Vec<f64> = messages
        .lines()
        .filter_map(|line| line.split("loss ").nth(1)?.split(' ').next()?.parse().ok())
        .collect();
    let (first, last) = (
        losses.first().expect("a line"),
        losses.last().expect("a line"),
    );
    assert!(*last < first / 4.0, "{losses:?}");
    for file in [
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        assert!(out.join(file).is_file(), "{file}");
    }
}

#[test]
fn sft_imitates_the_episodes_of_a_run_that_passed() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    train(&run, &["--set", "trainer.steps=1"]);
    let passed = episodes(&run, 1)
        .iter()
        .filter(|episode| episode.passed == Some(true) && !episode.is_truncated())
        .map(|episode| (episode.task_id.clone(), episode.trace.ids().to_vec()))
        .collect::<BTreeSet<_>>();
    assert!(!passed.is_empty(), "the starter passes some");
    let out = folder.path().join("tuned");
    let sft = |extra: &[&str]| {
        crate::binary::command()
            .args([
                "sft",
                "--steps",
                "6",
                "--batch-size",
                "8",
                "--warmup-steps",
                "0",
            ])
            .args(["--learning-rate", "3e-3", "--rollouts"])
            .arg(&run)
            .args(extra)
            .output()
            .expect("the binary starts")
    };
    let output = sft(&["--out", out.to_str().expect("UTF-8")]);
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{messages}");
    let kept = format!("Rejection sampling kept {} of 16 episodes", passed.len());
    assert!(messages.contains(&kept), "{kept}: {messages}");
    let losses: Vec<f64> = messages
        .lines()
        .filter_map(|line| line.split("loss ").nth(1)?.split(' ').next()?.parse().ok())
        .collect();
    let (first, last) = (losses.first().expect("one"), losses.last().expect("one"));
    assert!(last < first, "{losses:?}");
    assert!(out.join("model.safetensors").is_file());
    // No episode earns that much, and one of both sources is enough.
    for (extra, expected) in [
        (
            ["--min-reward", "7"],
            "there is nothing to imitate: kept 0 of 16",
        ),
        (["--min-reward", "nan"], "`--min-reward` is NaN"),
        (["--demos", "x"], "cannot be used with"),
    ] {
        let other = folder.path().join("other");
        let output = sft(&[&["--out", other.to_str().expect("UTF-8")], &extra[..]].concat());
        let messages = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{messages}");
        assert!(messages.contains(expected), "{messages}");
    }
}

#[test]
fn sft_that_is_asked_to_stop_while_it_measures_keeps_what_it_learned() {
    let folder = tempfile::tempdir().expect("a folder");
    let demos = folder.path().join("demos.jsonl");
    let row = serde_json::json!({"messages": [
        {"role": "user", "content": "Say it."}, {"role": "assistant", "content": "f(x) == 2"},
    ]});
    fs_err::write(&demos, format!("{row}\n")).expect("written");
    let out = folder.path().join("model");
    let mut child = crate::binary::command()
        .args(["sft", "--steps", "2", "--measure-every", "1", "--demos"])
        .arg(&demos)
        .arg("--out")
        .arg(&out)
        // More than can be measured before the signal comes.
        .args(["--set", "eval.samples=500", "--set", "eval.temperature=1.0"])
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut lines = BufReader::new(child.stderr.take().expect("it is piped")).lines();
    let mut messages = Vec::new();
    for line in &mut lines {
        messages.push(line.expect("UTF-8"));
        if messages.iter().any(|line| line.contains("loss ")) {
            break;
        }
    }
    let sent = Command::new("kill")
        .args(["-TERM", &child.id().to_string()])
        .status();
    assert!(sent.expect("`kill` is there").success());
    messages.extend(lines.map(|line| line.expect("UTF-8")));
    let status = child.wait().expect("it ends");
    assert_eq!(status.code(), Some(75), "{messages:?}");
    let last = messages.last().expect("a line");
    assert!(last.contains("after step 1 of 2"), "{messages:?}");
    let measured = messages.iter().any(|line| line.contains("Pass rate"));
    assert!(!measured, "the measurement was broken off: {messages:?}");
    assert!(out.join("model.safetensors").is_file());
}
