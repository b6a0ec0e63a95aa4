//! Runs that sample the next step's episodes while a step trains, and runs whose episodes go on from step
//! to step.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_core::{DType, Device};
use indexmap::IndexMap;
use rstest::rstest;
use wardian::chat::{Message, ParsedTurn, RenderOptions, ToolCallFormat, ToolSpec};
use wardian::config::RunConfig;
use wardian::engine::model::{Adapters, Decoder, Trainable};
use wardian::engine::{LoadedModel, SamplingParams};
use wardian::env::{
    EnvError, Environment, EpisodeStats, EpisodeStatus, StepResult, run_python_tool,
};
use wardian::rollout::{
    CollectionSeed, Collector, CollectorConfig, GroupRequest, PauseRule, PausedGroup, PausedRecord,
    RolloutError,
};
use wardian::run::{Policy, Starter, new_engine};
use wardian::trainer::{LossConfig, TrainSequence, pack, score_micro_batch};
use wardian::trajectory::{Status, TokenTrace, Trajectory};

use crate::run::{assert_same_run, episodes, interrupt, interrupt_at, train, wardian};

fn sets<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    settings.iter().flat_map(|set| ["--set", set]).collect()
}

fn traces(run: &Path, step: u64) -> Vec<TokenTrace> {
    let episodes = episodes(run, step).into_iter();
    episodes.map(|episode| episode.trace).collect()
}

/// Runs to the end what is killed once in each of its first five steps, and holds it to be the same run.
fn survives_a_kill_at_every_step(whole: &Path, killed: &Path, settings: &[&str]) {
    assert!(!interrupt(killed, settings, "-KILL").status.success());
    for rows in 3..=5 {
        let mut command = crate::binary::command();
        command.args(["train", "--resume"]).arg(killed);
        let output = interrupt_at(command, killed, rows, "-KILL");
        assert!(!output.status.success());
    }
    wardian(&["train", "--resume", killed.to_str().expect("UTF-8")]);
    assert_same_run(whole, killed, "model.safetensors");
}

#[test]
fn episodes_sampled_while_a_step_trains_are_one_step_old() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let settings = sets(&["trainer.steps=6", "trainer.async_level=1"]);
    let whole = path("whole");
    train(&whole, &settings);
    for step in 1..=6 {
        let expected = if step == 1 { 1 } else { step - 1 };
        let of = episodes(&whole, step).into_iter();
        let found: BTreeSet<u64> = of.map(|episode| episode.policy_step).collect();
        assert_eq!(found, [expected].into(), "step {step}");
    }

    // The second step's episodes are those of weights that the first did not move.
    let still = path("still");
    let mut unmoved = settings.clone();
    unmoved.extend(sets(&[
        "trainer.async_level=0",
        "trainer.learning_rate=1e-30",
    ]));
    train(&still, &unmoved);
    for step in 1..=3 {
        let is_alike = traces(&whole, step) == traces(&still, step);
        assert_eq!(is_alike, step < 3, "step {step}");
    }

    let killed = path("killed");
    survives_a_kill_at_every_step(&whole, &killed, &settings);
    // What is sampled ahead is saved, and behind the last step nothing is.
    let is_ahead = |step| {
        let checkpoint = format!("checkpoints/step-{step}/episodes.json");
        killed.join(checkpoint).exists()
    };
    assert_eq!([is_ahead(5), is_ahead(6)], [true, false]);
}

/// Returns the log-probabilities of an episode's sampled tokens under a model.
fn logprobs_under(decoder: &Decoder, episode: &Trajectory) -> Vec<f64> {
    let trace = &episode.trace;
    let sequence = TrainSequence {
        tokens: trace.ids().to_vec(),
        loss_mask: trace.loss_mask().iter().map(|&mask| mask == 1).collect(),
        logprobs: trace.logprobs().iter().copied().map(f64::from).collect(),
        ..TrainSequence::default()
    };
    let loss = LossConfig::default();
    let totals = loss.totals([trace.sampled_len()]);
    let micro = pack(&[sequence], 4096, &loss, totals).expect("it fits");
    let scores = score_micro_batch(decoder, &micro[0], Adapters::On, 1.0).expect("it is scored");
    scores.logprobs
}

#[test]
fn an_episode_that_goes_on_in_later_steps_is_of_each_policy_exactly_what_it_sampled() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    let settings = sets(&[
        "trainer.steps=5",
        "trainer.keep_checkpoints=5",
        "rollout.max_step_tokens=7",
        "rollout.max_off_policy_steps=2",
    ]);
    train(&run, &settings);
    let starter = Starter::unpack(folder.path()).expect("the starter");
    // The policies before each step.
    let policies: Vec<Decoder> = (0..5)
        .map(|step| {
            let path = match step {
                0 => starter.model(),
                step => run.join(format!("checkpoints/step-{step}")),
            };
            let path = path.to_str().expect("UTF-8");
            let loaded = LoadedModel::open(path, DType::F32, &Device::Cpu).expect("it loads");
            let (config, weights) = (loaded.config, loaded.weights);
            Decoder::new(config, weights, &Device::Cpu, &Trainable::Frozen, 0).expect("a model")
        })
        .collect();
    let mut continued = 0;
    for step in 1..=5 {
        let episodes = episodes(&run, step);
        assert!(!episodes.is_empty(), "step {step} learns from something");
        for episode in &episodes {
            let sampled: Vec<(usize, f64)> = (episode.trace.loss_mask().iter().enumerate())
                .filter(|(_, mask)| **mask == 1)
                .map(|(place, _)| (place, f64::from(episode.trace.logprobs()[place])))
                .collect();
            let mut starts: Vec<(usize, u64)> = vec![(0, episode.policy_step)];
            let segments = episode.segments.iter();
            starts.extend(segments.map(|segment| (segment.start, segment.policy_step)));
            assert!(starts.is_sorted_by(|a, b| a < b && a.1 < b.1), "{starts:?}");
            assert!(starts.last().is_some_and(|last| last.1 <= step));
            assert!(step - episode.policy_step <= 2, "it is waited for");
            for (number, &(start, policy)) in starts.iter().enumerate() {
                let end = starts.get(number + 1).map_or(usize::MAX, |next| next.0);
                let place = usize::try_from(policy - 1).expect("a small number");
                let found = logprobs_under(&policies[place], episode);
                let own = |(place, _): &(usize, f64)| (start..end).contains(place);
                let mut count = 0;
                for ((_, sampled), found) in sampled.iter().zip(found).filter(|(at, _)| own(at)) {
                    assert!((sampled - found).abs() < 1e-5, "{sampled} {found}");
                    count += 1;
                }
                assert!(count > 0, "a segment has tokens");
            }
            continued += episode.segments.len();
        }
    }
    assert!(continued > 0, "some went on");
}

/// Answers every turn with a number, and ends with the last of some.
struct Answers {
    left: u32,
    /// What each answer takes.
    time: Duration,
    tools: Vec<ToolSpec>,
}

impl Answers {
    fn boxed(left: u32) -> Box<dyn Environment> {
        Self::slow(left, Duration::ZERO)
    }

    fn slow(left: u32, time: Duration) -> Box<dyn Environment> {
        let tools = vec![run_python_tool()];
        Box::new(Self { left, time, tools })
    }

    fn result(&self) -> StepResult {
        let done = self.left == 0;
        StepResult {
            observation: (0..self.left.min(1))
                .map(|_| Message::tool(self.left.to_string()))
                .collect(),
            reward: done.then_some(1.0),
            rewards: IndexMap::new(),
            done,
            status: done.then_some(EpisodeStatus::Passed),
            fault: None,
        }
    }
}

impl Environment for Answers {
    fn reset(&mut self) -> Result<Vec<Message>, EnvError> {
        let task = "Write a function f(x) that takes x, adds 2.";
        Ok(vec![Message::user(task)])
    }

    fn tools(&self) -> &[ToolSpec] {
        &self.tools
    }

    fn step(&mut self, _turn: &ParsedTurn) -> Result<StepResult, EnvError> {
        std::thread::sleep(self.time);
        self.left -= 1;
        Ok(self.result())
    }

    fn close(&mut self, _cut_off: Option<&ParsedTurn>) -> StepResult {
        self.left = 0;
        self.result()
    }

    fn stats(&self) -> EpisodeStats {
        EpisodeStats::default()
    }
}

/// The model that the binary carries, and how it is sampled in short episodes with a tool.
fn starter(deadline: Option<Duration>) -> (RunConfig, Policy, CollectorConfig) {
    let folder = tempfile::tempdir().expect("a folder");
    let starter = Starter::unpack(folder.path()).expect("the starter");
    let mut config = RunConfig::default();
    config.model.path = starter.model().to_str().expect("UTF-8").to_owned();
    config.rollout.max_total_tokens = 224;
    let policy = Policy::load(&config, &Trainable::Frozen).expect("the policy");
    let collector = CollectorConfig {
        sampling: SamplingParams {
            max_new_tokens: 64,
            stop_token_ids: policy.stop_token_ids.clone(),
            ..SamplingParams::default()
        },
        max_context: 224,
        render: RenderOptions {
            add_generation_prompt: true,
            ..RenderOptions::default()
        },
        use_tools: true,
        tool_call_format: None,
        deadline,
    };
    (config, policy, collector)
}

fn group_of(environments: Vec<Box<dyn Environment>>) -> GroupRequest {
    GroupRequest {
        task_id: "1".to_owned(),
        visit: 0,
        first_sample: 0,
        max_new_tokens: None,
        environments,
    }
}

fn seed(step: u64) -> CollectionSeed<'static> {
    CollectionSeed {
        run: 7,
        purpose: "train",
        step,
        draw: 0,
    }
}

#[test]
fn an_episode_waits_within_a_turn_and_behind_a_tools_answer() {
    let (config, policy, collector) = starter(None);
    // Without a bound all are waited for. A group without episodes is whole at once, so that the other
    // need not be.
    let collect = |carried: Vec<PausedGroup>, step, tokens| {
        let mut engine = new_engine(&config, &policy).expect("an engine");
        let (template, tokenizer) = (&policy.template, &policy.tokenizer);
        let fresh = match carried.is_empty() {
            true => vec![(group_of(vec![Answers::boxed(3)]), seed(step))],
            false => Vec::new(),
        };
        let empty = (group_of(Vec::new()), seed(step));
        let rule = PauseRule {
            max_step_tokens: tokens,
            oldest: 0,
        };
        let fresh = fresh.into_iter().chain([empty]).collect();
        let collected = Collector::new(&mut engine, tokenizer, template, &collector)
            .collect_paused(carried, fresh, seed(step), rule);
        let (whole, paused, _) = collected.expect("it collects");
        let mut whole = whole.into_iter().flat_map(|group| group.trajectories);
        (whole.next(), paused)
    };
    let (whole, paused) = collect(Vec::new(), 1, usize::MAX);
    let whole = whole.expect("nothing keeps it");
    assert!(paused.is_empty());
    assert_eq!((whole.turns.len(), &whole.segments[..]), (3, &[][..]));
    let first = whole.turns[0].tokens.clone();
    let decoder = &policy.decoder;
    for (tokens, is_within) in [(first.len() - 1, true), (first.len(), false)] {
        let (none, paused) = collect(Vec::new(), 1, tokens);
        assert!(none.is_none());
        // What a checkpoint keeps of it.
        let record = serde_json::to_string(&paused[0].record()).expect("JSON");
        let record: PausedRecord = serde_json::from_str(&record).expect("it reads");
        assert_eq!(record, paused[0].record());
        let environments = vec![Answers::boxed(3)];
        let format = ToolCallFormat::detect(policy.template.source());
        let saved = vec![(record, environments)];
        let never = AtomicBool::new(false);
        let restored = PausedGroup::restore(saved, &policy.tokenizer, format, &never);
        let restored = restored.expect("nobody stops it");
        let (kept, _) = collect(paused, 2, usize::MAX);
        let (restored, _) = collect(restored, 2, usize::MAX);
        let (kept, restored) = (kept.expect("done"), restored.expect("done"));
        assert_eq!(kept.messages, restored.messages);
        assert_eq!(
            (&kept.trace, &kept.segments),
            (&restored.trace, &restored.segments)
        );
        // It goes on from what it had, by a stream of its own.
        let start = first.start + tokens;
        assert_eq!(kept.trace.ids()[..start], whole.trace.ids()[..start]);
        assert_ne!(kept.trace.ids(), whole.trace.ids());
        let [segment] = kept.segments[..] else {
            panic!("one policy went on: {:?}", kept.segments);
        };
        assert_eq!(segment.policy_step, 2);
        assert_eq!(segment.start == start, is_within);
        assert_eq!(segment.start == kept.turns[1].tokens.start, !is_within);
        let sampled = kept.trace.loss_mask().iter().zip(kept.trace.logprobs());
        let sampled = sampled.filter(|(mask, _)| **mask == 1);
        for ((_, sampled), found) in sampled.zip(logprobs_under(decoder, &kept)) {
            assert!(
                (f64::from(*sampled) - found).abs() < 1e-5,
                "{sampled} {found}"
            );
        }
    }
}

#[rstest]
#[case::in_turn("trainer.async_level=0")]
#[case::one_step_off("trainer.async_level=1")]
fn paused_episodes_go_on_behind_a_kill_at_every_step(#[case] level: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = sets(&[
        "trainer.steps=6",
        "rollout.max_step_tokens=12",
        "task.curriculum=pass_rate",
        level,
    ]);
    let path = |name: &str| folder.path().join(name);
    train(&path("whole"), &settings);
    let carried = (1..=6).flat_map(|step| episodes(&path("whole"), step));
    let carried = carried.filter(|episode| !episode.segments.is_empty());
    assert!(carried.count() > 0, "some go on");
    survives_a_kill_at_every_step(&path("whole"), &path("killed"), &settings);
}

/// Waits for a server that does not answer.
struct Unanswered;

impl Environment for Unanswered {
    fn is_prepared(&mut self) -> bool {
        false
    }

    fn reset(&mut self) -> Result<Vec<Message>, EnvError> {
        unreachable!("it would wait for ever")
    }

    fn tools(&self) -> &[ToolSpec] {
        &[]
    }

    fn step(&mut self, _turn: &ParsedTurn) -> Result<StepResult, EnvError> {
        unreachable!("it was not reset")
    }

    fn close(&mut self, _cut_off: Option<&ParsedTurn>) -> StepResult {
        unreachable!("it was not reset")
    }

    fn stats(&self) -> EpisodeStats {
        EpisodeStats::default()
    }
}

#[test]
fn a_run_that_is_to_stop_does_not_wait_for_a_server_that_does_not_answer() {
    let (config, policy, collector) = starter(None);
    let mut engine = new_engine(&config, &policy).expect("an engine");
    let stop = AtomicBool::new(false);
    let request = group_of(vec![Box::new(Unanswered)]);
    let collected = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            stop.store(true, Ordering::Relaxed);
        });
        Collector::new(&mut engine, &policy.tokenizer, &policy.template, &collector)
            .until(&stop)
            .collect(vec![request], seed(1), &mut |_| {})
    });
    assert!(
        matches!(collected, Err(RolloutError::Stopped)),
        "{collected:?}"
    );
}

#[test]
fn a_run_that_moved_too_far_drops_what_was_sampled_before() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    let output = crate::binary::command()
        .args(["train", "--seed", "3", "--out"])
        .arg(&run)
        .args(sets(&[
            "trainer.steps=4",
            "trainer.async_level=1",
            "trainer.max_kl_sample_train=1e-7",
            "rollout.max_step_tokens=12",
            "rollout.groups_per_step=4",
            "eval.limit=1",
        ]))
        .output()
        .expect("the binary starts");
    // The second step learns from what the first one's policy sampled.
    let messages = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{messages}");
    for expected in [
        "step 2: the update was left out",
        "lower `rollout.max_off_policy_steps`",
        "--resume",
    ] {
        assert!(messages.contains(expected), "{expected}: {messages}");
    }
    let checkpoint = run.join("checkpoints/step-1");
    assert!(checkpoint.join("state.json").exists());
    assert!(!checkpoint.join("episodes.json").exists(), "none waits");
}

#[test]
fn an_episode_that_takes_too_long_is_no_failure_of_the_policys() {
    let (config, policy, collector) = starter(Some(Duration::from_secs(6)));
    let mut engine = new_engine(&config, &policy).expect("an engine");
    // Not done by the time that its first answer is back.
    let late = Answers::slow(2, Duration::from_secs(7));
    let request = group_of(vec![Answers::boxed(1), late, Answers::boxed(1)]);
    let (groups, _) = Collector::new(&mut engine, &policy.tokenizer, &policy.template, &collector)
        .collect(vec![request], seed(1), &mut |_| {})
        .expect("it collects");
    assert_eq!(groups[0].rewards(), [Some(1.0), None, Some(1.0)]);
    let Status::Failed { reason } = &groups[0].trajectories[1].status else {
        panic!("it was scored: {:?}", groups[0].trajectories[1].status)
    };
    assert!(
        reason.contains("took longer than `rollout.deadline`"),
        "{reason}"
    );
}

#[test]
fn a_run_whose_episodes_all_take_too_long_ends_behind_its_measurement() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    let output = crate::binary::command()
        .args(["train", "--seed", "3", "--set", "rollout.deadline=1ms"])
        .arg("--out")
        .arg(&run)
        .args(sets(&[
            "trainer.steps=1",
            "rollout.groups_per_step=1",
            "eval.limit=1",
        ]))
        .output()
        .expect("the binary starts");
    // Nothing is scored with 0: without any score a step has nothing to learn from.
    let messages = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{messages}");
    assert!(
        messages.contains("took longer than `rollout.deadline`"),
        "{messages}"
    );
    // A measurement is no step: it has no deadline.
    let measured = "Pass rate on held-out tasks before training";
    assert!(messages.contains(measured), "{messages}");
}
