//! How the groups of a run are divided among its environments.

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::rollout::RolloutGroup;

/// Writes tasks whose answers are these numbers, and returns the file.
fn file(folder: &std::path::Path, name: &str, answers: std::ops::Range<u64>) -> String {
    let path = folder.join(name);
    let rows: String = answers
        .map(|answer| {
            let row = serde_json::json!({
                "question": format!("What is {answer}?"), "answer": format!("#### {answer}"),
            });
            format!("{row}\n")
        })
        .collect();
    fs_err::write(&path, rows).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Returns a run with the environments `a`, of weight 3 with 7 tasks, and `b`, of weight 1 with 5.
fn two(folder: &std::path::Path, sets: &[&str]) -> RunConfig {
    let (a, b) = (
        file(folder, "a.jsonl", 0..7),
        file(folder, "b.jsonl", 10..15),
    );
    let held_out = file(folder, "held-out.jsonl", 100..102);
    let text = format!(
        "model.path = 'm'\nseed = 5\n\
         [environments.a]\npath = '{a}'\neval_path = '{held_out}'\nweight = 3\n\
         [environments.b]\npath = '{b}'\neval_path = '{held_out}'\n"
    );
    RunConfig::from_toml(&text, sets).unwrap()
}

fn ids(tasks: &[&Task]) -> Vec<String> {
    tasks.iter().map(|task| task.id.clone()).collect()
}

#[test]
fn whatever_the_weights_each_has_its_part_to_within_one_group() {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    for members in 2..8 {
        for _ in 0..40 {
            let whole: Vec<u32> = (0..members)
                // Some are hundreds of times as heavy as others, and some are alike.
                .map(|_| 7_u32.pow(random.random_range(0..4)))
                .collect();
            let weights: Vec<f64> = whole.iter().map(|&weight| weight.into()).collect();
            let total: f64 = weights.iter().sum();
            let mut division = Division::new(&weights);
            let mut counts = vec![0_u64; members];
            for place in 0..600 {
                let share = division.share(place, 1);
                assert_eq!(share.iter().sum::<usize>(), 1);
                for (count, more) in counts.iter_mut().zip(share) {
                    *count += more as u64;
                }
                for (count, weight) in counts.iter().zip(&weights) {
                    let part = weight / total * (place + 1) as f64;
                    let off = (*count as f64 - part).abs();
                    let bound = 1.0 - 1.0 / (2.0 * members as f64 - 2.0);
                    assert!(off <= bound + 1e-6, "{weights:?} after {place}: {counts:?}");
                }
            }
            // At the end of a period nothing is off.
            let whole: Vec<usize> = whole.iter().map(|&weight| weight as usize).collect();
            let period = whole.iter().sum();
            assert_eq!(Division::new(&weights).share(0, period), whole);
        }
    }
}

#[test]
fn a_step_has_its_groups_whatever_was_asked_before() {
    let weights = [3.0, 1.0, 1.5, f64::MAX / 1e300];
    let steps: Vec<Vec<usize>> = {
        let mut division = Division::new(&weights);
        (0..50).map(|step| division.share(step * 7, 7)).collect()
    };
    assert!(steps.iter().all(|shares| shares.iter().sum::<usize>() == 7));
    let mut other = Division::new(&weights);
    for step in [30, 2, 2, 49, 0] {
        assert_eq!(other.share(step as u64 * 7, 7), steps[step]);
    }
    // Huge weights add up to no number, and are divided by all the same.
    assert_eq!(Division::new(&[f64::MAX; 3]).share(0, 3), [1, 1, 1]);
}

#[test]
fn a_run_without_environments_draws_as_it_did() {
    let folder = tempfile::tempdir().unwrap();
    let tasks = file(folder.path(), "a.jsonl", 0..7);
    let text = format!("model.path = 'm'\ntask.path = '{tasks}'\nseed = 9\n");
    let config = RunConfig::from_toml(&text, &["task.eval_path=x"]).unwrap();
    let mut mix = Mix::open(&config).unwrap();
    let set = training_tasks(&config).unwrap();
    let mut drawn = BTreeMap::new();
    let mut rates = PassRates::default();
    for place in 0..9 {
        assert_eq!(mix.shares(place + 1, 4), [4]);
        let batch = mix.draw(&[4], place, &mut drawn, None);
        assert_eq!(batch, set.stretch(9, place * 4, 4));
        assert!(batch.iter().all(|task| !task.id.contains('/')));
    }
    assert!(
        drawn.is_empty(),
        "what is drawn is known by the number of draws"
    );
    assert!(!mix.needs_pass_rates());
    let config = RunConfig::from_toml(&text, &["task.curriculum=pass_rate"]).unwrap();
    let mix = Mix::open(&config).unwrap();
    assert!(mix.needs_pass_rates());
    rates.learn(&[RolloutGroup {
        task_id: "1".to_owned(),
        trajectories: Vec::new(),
    }]);
    let batch = mix.draw(&[4], 3, &mut drawn, Some(&rates));
    let tasks = training_tasks(&config).unwrap();
    let seed = derive_seed(9, "curriculum", 3, "");
    assert_eq!(batch, rates.draw(&tasks, 4, seed));
}

#[test]
fn each_environment_goes_through_its_own_epochs() {
    let folder = tempfile::tempdir().unwrap();
    let config = two(folder.path(), &[]);
    let mut mix = Mix::open(&config).unwrap();
    let mut drawn = BTreeMap::new();
    let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut steps = Vec::new();
    // 140 groups in steps of 5: `a` has 105, which are 15 epochs of 7, `b` has 35, 7 epochs of 5.
    for step in 1..=28 {
        let shares = mix.shares(step, 5);
        let saved = drawn.clone();
        let batch = ids(&mix.draw(&shares, step, &mut drawn, None));
        assert_eq!(batch.len(), 5);
        for id in &batch {
            let name = environment_of(id).unwrap().to_owned();
            all.entry(name).or_default().push(id.clone());
        }
        steps.push((step, shares, saved, batch));
    }
    for (name, epoch, epochs) in [("a", 7, 15), ("b", 5, 7)] {
        let own = &all[name];
        assert_eq!(own.len(), epoch * epochs);
        for epoch in own.chunks(epoch) {
            let distinct: std::collections::BTreeSet<_> = epoch.iter().collect();
            assert_eq!(distinct.len(), epoch.len());
        }
    }
    // A run that goes on, with what its checkpoint says was drawn, draws the same.
    let mut resumed = Mix::open(&config).unwrap();
    for (step, shares, mut saved, batch) in steps.into_iter().skip(11) {
        assert_eq!(resumed.shares(step, 5), shares);
        assert_eq!(ids(&resumed.draw(&shares, step, &mut saved, None)), batch);
    }
    // Orders are the environment's own: those of one seed would be one order twice.
    let first = |name: &str| -> Vec<String> {
        let local = |id: &String| id.split_once('/').unwrap().1.to_owned();
        all[name][..5].iter().map(local).collect()
    };
    assert_ne!(first("a"), first("b"));
}

#[test]
fn one_environment_may_draw_by_pass_rates() {
    let folder = tempfile::tempdir().unwrap();
    let config = two(folder.path(), &["environments.b.curriculum=pass_rate"]);
    let mix = Mix::open(&config).unwrap();
    assert!(mix.needs_pass_rates());
    let rates = PassRates::default();
    let (mut with, mut without) = (BTreeMap::new(), BTreeMap::new());
    let by_rate = ids(&mix.draw(&[7, 5], 2, &mut with, Some(&rates)));
    let in_turn = ids(&mix.draw(&[7, 5], 2, &mut without, None));
    assert_eq!(by_rate[..7], in_turn[..7]);
    let tasks = TaskSet::open(config.environments["b"].path.as_ref(), None, 1).unwrap();
    let seed = derive_seed(5, "curriculum", 2, "b");
    let tasks = tasks.of_environment("b");
    assert_eq!(by_rate[7..], ids(&rates.draw(&tasks, 5, seed)));
}

#[test]
fn what_one_environment_learns_no_other_measures() {
    let folder = tempfile::tempdir().unwrap();
    let config = two(folder.path(), &[]);
    let held_out = |config: &RunConfig| super::super::evaluation_tasks(config).unwrap();
    let tasks = held_out(&config);
    assert_eq!(tasks.len(), 4, "both measure the same file, each by itself");
    Mix::open(&config).unwrap().check_held_out(&tasks).unwrap();
    // `b` measures what `a` learns, under other ids.
    let shared = file(folder.path(), "shared.jsonl", 5..9);
    let set = format!("environments.b.eval_path={shared}");
    let config = two(folder.path(), &[&set]);
    let error = Mix::open(&config)
        .unwrap()
        .check_held_out(&held_out(&config))
        .unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("is learned from, as `a/")
            && message.contains("one of 2 such; set `environments.b.eval_path`"),
        "{message}"
    );
    assert!(message.starts_with("`b/") && error.is_usage(), "{message}");
}

#[test]
fn episodes_elsewhere_are_known_by_where_and_how_they_begin() {
    let check = |url: &str, episodes: u32| {
        let text = format!(
            "model.path = 'm'\n\
             environments.a.env = {{ url = 'http://x', episodes = 5 }}\n\
             environments.b.env = {{ url = '{url}', episodes = {episodes} }}"
        );
        let config = RunConfig::from_toml::<&str>(&text, &[]).unwrap();
        let held_out = super::super::evaluation_tasks(&config).unwrap();
        let checked = Mix::open(&config).unwrap().check_held_out(&held_out);
        checked.map_err(|error| error.to_string())
    };
    // As many are divided alike; of others some are learned from here and measured on there.
    assert_eq!(check("http://x", 5), Ok(()));
    let message = check("http://x", 40).unwrap_err();
    assert!(message.contains("is learned from, as `"), "{message}");
    assert_eq!(check("http://y", 40), Ok(()));
}

#[test]
fn an_environment_without_tasks_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let empty = file(folder.path(), "empty.jsonl", 0..0);
    let set = format!("environments.b.path={empty}");
    let error = Mix::open(&two(folder.path(), &[&set])).unwrap_err();
    assert!(error.is_usage());
    let message = crate::causes::with_causes(&error);
    assert!(
        message.contains("`environments.b`") && message.contains("empty.jsonl"),
        "{message}"
    );
}
