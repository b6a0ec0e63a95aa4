//! Which episodes of a run are imitated, and that exactly their tokens are.

use fs_err as fs;

use super::*;
use crate::run::Starter;
use crate::trajectory::{Status, StepWriter, Usage};

/// A run folder with a tokenizer, and a policy that speaks its words.
struct Bench {
    folder: tempfile::TempDir,
    policy: Policy,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = Starter::unpack(folder.path()).unwrap().model();
        let policy = Policy::from_scratch(&model, 0).unwrap();
        let bench = Self { folder, policy };
        let made = bench.run().join("final");
        fs::create_dir_all(&made).unwrap();
        fs::copy(model.join("tokenizer.json"), made.join("tokenizer.json")).unwrap();
        bench
    }

    fn run(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    fn accept(&self, rules: &RejectionSampling) -> Result<Accepted, RunError> {
        accept_rollouts(&[self.run()], rules, &self.policy)
    }
}

/// An episode that sampled `first` and `length - 1` tokens more over two turns, a tool between them.
fn episode(task_id: &str, first: u32, length: usize, reward: Option<f64>) -> Trajectory {
    let mut trace = TokenTrace::new();
    trace.push_prompt(&[1, 2]).unwrap();
    trace.push_sampled(&[first], &[-0.5]).unwrap();
    trace.push_observation(&[7, 8]);
    let rest = vec![9; length - 1];
    trace.push_sampled(&rest, &vec![-0.25; length - 1]).unwrap();
    Trajectory {
        task_id: task_id.to_owned(),
        group: 0,
        sample: 0,
        policy_step: 1,
        segments: Vec::new(),
        messages: Vec::new(),
        turns: Vec::new(),
        trace,
        reward,
        rewards: IndexMap::new(),
        passed: reward.map(|reward| reward >= 1.0),
        status: match reward {
            Some(_) => Status::Finished,
            None => Status::Failed {
                reason: "the sandbox failed".to_owned(),
            },
        },
        usage: Usage::default(),
    }
}

/// Stores episodes of one row each.
fn store(run: &Path, step: u64, episodes: &[Trajectory]) {
    let numbered = (0..).zip(episodes).map(|(sample, episode)| Trajectory {
        sample,
        ..episode.clone()
    });
    store_rows(run, step, &numbered.collect::<Vec<_>>());
}

fn store_rows(run: &Path, step: u64, rows: &[Trajectory]) {
    let mut writer = StepWriter::create(run, step).unwrap();
    for row in rows {
        writer.append(row).unwrap();
    }
    writer.finish().unwrap();
}

fn lengths(accepted: &Accepted) -> Vec<usize> {
    accepted
        .traces
        .iter()
        .map(TokenTrace::sampled_len)
        .collect()
}

#[test]
fn what_passed_is_kept_with_its_ids_and_its_mask() {
    let bench = Bench::new();
    let passed = episode("a", 3, 4, Some(1.0));
    let cut_off = Trajectory {
        status: Status::Truncated,
        ..episode("a", 4, 4, Some(1.0))
    };
    let first = [
        passed.clone(),
        cut_off,
        episode("a", 5, 4, Some(0.5)),
        // We failed to score it.
        episode("b", 3, 4, None),
    ];
    store(&bench.run(), 1, &first);
    // The same tokens in a later step, of the task and of another.
    store(
        &bench.run(),
        2,
        &[passed.clone(), episode("c", 3, 4, Some(1.0))],
    );
    let accepted = bench.accept(&RejectionSampling::default()).unwrap();
    assert_eq!(accepted.traces[0], passed.trace);
    assert_eq!(accepted.traces[0].loss_mask(), [0, 0, 1, 0, 0, 1, 1, 1]);
    assert_eq!(accepted.traces.len(), 2);
    assert_eq!(
        accepted.to_string(),
        "kept 2 of 6 episodes, of 2 of 3 tasks; 1 did not do well enough; 1 could not be scored; \
         1 were cut off; 1 repeated another, token by token"
    );
}

#[test]
fn a_least_reward_stands_in_place_of_passing() {
    let bench = Bench::new();
    let rewards = [Some(-1.0), Some(0.25), Some(0.5), Some(1.0), None];
    let episodes: Vec<Trajectory> = (3..)
        .zip(rewards)
        .map(|(first, reward)| episode("a", first, 2, reward))
        .collect();
    store(&bench.run(), 1, &episodes);
    for (least, kept) in [(-1.0, 4), (0.25, 3), (0.5, 2), (0.75, 1)] {
        let rules = RejectionSampling {
            min_reward: Some(least),
            ..RejectionSampling::default()
        };
        let accepted = bench.accept(&rules).unwrap();
        assert_eq!(accepted.traces.len(), kept, "{least}");
        assert_eq!((accepted.rejected, accepted.unscorable), (4 - kept, 1));
    }
    let rules = RejectionSampling {
        min_reward: Some(2.0),
        ..RejectionSampling::default()
    };
    let error = bench.accept(&rules).unwrap_err();
    assert!(error.is_usage());
    let message = error.to_string();
    assert!(
        message.contains("kept 0 of 5 episodes, of 0 of 1 tasks; 4 did not do well enough"),
        "{message}"
    );
}

#[test]
fn a_task_has_at_most_so_many_the_shortest_or_any() {
    let bench = Bench::new();
    let of = |task: &str, lengths: &[usize]| -> Vec<Trajectory> {
        (3..)
            .zip(lengths)
            .map(|(first, &length)| episode(task, first, length, Some(1.0)))
            .collect()
    };
    let episodes = [of("a", &[5, 2, 4, 3, 6]), of("b", &[8])].concat();
    store(&bench.run(), 1, &episodes);
    let rules = |pick, seed| RejectionSampling {
        max_per_task: Some(2),
        pick,
        seed,
        ..RejectionSampling::default()
    };
    let accepted = bench.accept(&rules(Pick::Shortest, 0)).unwrap();
    assert_eq!(lengths(&accepted), [2, 3, 8]);
    assert_eq!((accepted.surplus, accepted.tasks_kept), (3, 2));
    let random = |seed| bench.accept(&rules(Pick::Random, seed)).unwrap();
    assert_eq!(random(1), random(1));
    let picks: std::collections::BTreeSet<Vec<usize>> =
        (0..20).map(|seed| lengths(&random(seed))).collect();
    assert!(picks.len() > 5, "{picks:?}");
    assert!(picks.iter().all(|pick| pick.len() == 3));
}

#[test]
fn rows_of_an_agents_episode_are_kept_or_left_together() {
    let bench = Bench::new();
    let row = |sample: u32, first: u32, length: usize| Trajectory {
        sample,
        ..episode("a", first, length, Some(1.0))
    };
    let cut_off = Trajectory {
        status: Status::Truncated,
        ..row(2, 9, 2)
    };
    let rows = [
        // Short in one of its rows, and longer than the next episode in all.
        row(0, 3, 2),
        row(0, 4, 9),
        row(1, 5, 5),
        row(2, 6, 3),
        cut_off,
        // As the first.
        row(3, 3, 2),
        row(3, 4, 9),
    ];
    store_rows(&bench.run(), 1, &rows);
    let accepted = bench.accept(&RejectionSampling::default()).unwrap();
    assert_eq!(lengths(&accepted), [2, 9, 5]);
    assert_eq!(
        accepted.to_string(),
        "kept 2 of 4 episodes, of 1 of 1 tasks; 1 were cut off; 1 repeated another, token by token"
    );
    let shortest = RejectionSampling {
        max_per_task: Some(1),
        ..RejectionSampling::default()
    };
    assert_eq!(lengths(&bench.accept(&shortest).unwrap()), [5]);
}

#[test]
fn episodes_of_another_vocabulary_are_refused_by_the_first_token_that_differs() {
    let bench = Bench::new();
    store(&bench.run(), 1, &[episode("a", 3, 2, Some(1.0))]);
    let path = bench.run().join("final/tokenizer.json");
    let mut words: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    // Two tokens change places.
    let vocabulary = words["model"]["vocab"].as_object_mut().unwrap();
    let mut ids: Vec<(String, u64)> = (vocabulary.iter())
        .map(|(token, id)| (token.clone(), id.as_u64().unwrap()))
        .collect();
    ids.sort_by_key(|(_, id)| *id);
    let ((one, first), (other, second)) = (ids[40].clone(), ids[41].clone());
    vocabulary.insert(one.clone(), second.into());
    vocabulary.insert(other.clone(), first.into());
    fs::write(&path, words.to_string()).unwrap();
    let error = bench.accept(&RejectionSampling::default()).unwrap_err();
    assert!(error.is_usage());
    let message = error.to_string();
    let expected = format!("their token {first} is `{other}`");
    assert!(
        message.contains(&expected) && message.contains(&format!("is `{one}`; give the model")),
        "{message}"
    );
    // Further tokens of the policy's are no difference.
    let theirs = Tokenizer::byte_level(&[]).unwrap();
    let ours = Tokenizer::byte_level(&["<|further|>"]).unwrap();
    assert_eq!(ours.differing_token(&theirs), None);
    assert!(theirs.differing_token(&ours).is_some());
}

#[test]
fn a_run_that_saved_nothing_is_known_by_its_model() {
    let bench = Bench::new();
    let run = bench.run();
    store(&run, 1, &[episode("a", 3, 2, Some(1.0))]);
    fs::remove_dir_all(run.join("final")).unwrap();
    let accept = || bench.accept(&RejectionSampling::default());
    let error = accept().unwrap_err();
    assert!(matches!(error, RunError::NoRun { .. }), "{error}");
    let name = |model: &str| {
        let text = format!("model.path = '{model}'\ntask.path = 't'\n");
        fs::write(run.join("run.toml"), text).unwrap();
    };
    name("owner/model");
    let error = accept().unwrap_err();
    assert!(
        error.to_string().contains("`--model owner/model`"),
        "{error}"
    );
    name(&bench.policy.source);
    assert_eq!(accept().unwrap().traces.len(), 1);
    // A folder without episodes is none to learn from.
    fs::remove_dir_all(run.join("rollouts")).unwrap();
    let error = accept().unwrap_err();
    assert!(matches!(error, RunError::NoRollouts { .. }), "{error}");
}
