//! Tasks drawn by how often they are passed.
//!
//! A group teaches the more the more its rewards differ, and they differ most where every other episode
//! passes. So a task's weight is the variance of a pass, `4 p (1 - p)`, at the rate `p` at which its
//! recent episodes passed; nobody knows the rate of a new task, which is taken for a half. No weight
//! falls below [`FLOOR`]: what is too hard today may not be tomorrow, and what was learned may be lost.

use std::collections::BTreeMap;

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::rollout::RolloutGroup;
use crate::task::{Task, TaskSet};

/// The least weight of a task; the largest is 1.
const FLOOR: f64 = 0.1;

/// What a task's episodes count for once it has been met again: about its last three meetings count.
const DECAY: f64 = 0.7;

/// A task's episodes, recent ones counted for more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct Tally {
    scored: f64,
    passed: f64,
}

/// How often each task that was met is passed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct PassRates {
    tallies: BTreeMap<String, Tally>,
}

impl PassRates {
    /// Counts what came of some tasks; episodes without a score say nothing.
    pub(super) fn learn(&mut self, groups: &[RolloutGroup]) {
        for group in groups {
            let passed = group.episodes().filter_map(|episode| episode.passed);
            let (mut scored, mut count) = (0.0, 0.0);
            for passed in passed {
                scored += 1.0;
                count += f64::from(u8::from(passed));
            }
            if scored > 0.0 {
                let tally = self.tallies.entry(group.task_id.clone()).or_default();
                tally.scored = tally.scored * DECAY + scored;
                tally.passed = tally.passed * DECAY + count;
            }
        }
    }

    /// Returns the rate at which a task is expected to be passed.
    pub(super) fn of(&self, task_id: &str) -> f64 {
        let tally = self.tallies.get(task_id).copied().unwrap_or_default();
        // As if one episode had passed and one failed before.
        (tally.passed + 1.0) / (tally.scored + 2.0)
    }

    fn weight(&self, task_id: &str) -> f64 {
        let rate = self.of(task_id);
        (4.0 * rate * (1.0 - rate)).max(FLOOR)
    }

    /// Draws `count` tasks by their weights: each once before any twice.
    pub(super) fn draw<'a>(&self, tasks: &'a TaskSet, count: usize, seed: u64) -> Vec<&'a Task> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut drawn = Vec::with_capacity(count);
        while drawn.len() < count {
            // The first of so many clocks to ring, each at its weight's rate (Efraimidis and Spirakis
            // 2006, doi:10.1016/j.ipl.2005.11.003).
            let mut ringing: Vec<(f64, &Task)> = tasks
                .tasks()
                .iter()
                .map(|task| {
                    let uniform = 1.0 - random.random::<f64>();
                    (-uniform.ln() / self.weight(&task.id), task)
                })
                .collect();
            ringing.sort_by(|(a, _), (b, _)| a.total_cmp(b));
            let left = count - drawn.len();
            drawn.extend(ringing.into_iter().take(left).map(|(_, task)| task));
        }
        drawn
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trajectory::{Status, TokenTrace, Trajectory, Usage};

    fn group(task_id: &str, passed: &[Option<bool>]) -> RolloutGroup {
        let episode = |(sample, passed): (u32, &Option<bool>)| Trajectory {
            task_id: task_id.to_owned(),
            group: 0,
            sample,
            policy_step: 1,
            segments: Vec::new(),
            messages: Vec::new(),
            turns: Vec::new(),
            trace: TokenTrace::new(),
            reward: passed.map(|passed| f64::from(u8::from(passed))),
            rewards: indexmap::IndexMap::new(),
            passed: *passed,
            status: Status::Finished,
            usage: Usage::default(),
        };
        RolloutGroup {
            task_id: task_id.to_owned(),
            trajectories: (0..).zip(passed).map(episode).collect(),
        }
    }

    /// Ten tasks, `0` to `9`.
    fn tasks() -> TaskSet {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tasks.jsonl");
        let rows: String = (0..10)
            .map(|id| {
                let row = serde_json::json!({
                    "task_id": id, "text": "add", "code": "def f(): return 1",
                    "test_list": ["assert f() == 1"],
                });
                format!("{row}\n")
            })
            .collect();
        fs_err::write(&path, rows).unwrap();
        TaskSet::open(&path, None, 1).unwrap()
    }

    fn ids<'a>(drawn: &[&'a Task]) -> Vec<&'a str> {
        drawn.iter().map(|task| task.id.as_str()).collect()
    }

    #[test]
    fn tasks_that_every_other_episode_passes_come_most_often() {
        let mut rates = PassRates::default();
        let tasks = tasks();
        for _ in 0..4 {
            for id in 0..9 {
                // 0 to 3 are never passed, 4 is by half, 5 to 8 always are; 9 is new.
                let passed = [id > 4, id >= 4, id > 4, id >= 4].map(Some);
                rates.learn(&[group(&id.to_string(), &passed)]);
            }
        }
        assert!(rates.of("0") < 0.1 && rates.of("8") > 0.9);
        assert_eq!([rates.of("4"), rates.of("9")], [0.5; 2]);
        let mut counts = BTreeMap::new();
        for seed in 0..2000 {
            for id in ids(&rates.draw(&tasks, 1, seed)) {
                *counts.entry(id).or_insert(0) += 1;
            }
        }
        // 10.1 episodes of each are remembered: eight rates are 1 / 12.1 from an end, with weights of
        // 0.303, two of 1. That makes 452 draws of 2000, and 137; four deviations are 75, and 45.
        for (id, expected, bound) in [
            ("4", 452, 75),
            ("9", 452, 75),
            ("0", 137, 45),
            ("8", 137, 45),
        ] {
            let found: i32 = counts[id];
            assert!((found - expected).abs() < bound, "{counts:?}");
        }
        // However sure it is that nobody passes, a task is not forgotten.
        for _ in 0..50 {
            rates.learn(&[group("0", &[Some(false); 64])]);
        }
        assert_eq!(rates.weight("0"), FLOOR);
    }

    #[test]
    fn a_draw_is_named_by_its_seed_and_meets_each_task_before_any_twice() {
        let (rates, tasks) = (PassRates::default(), tasks());
        let drawn = ids(&rates.draw(&tasks, 13, 7));
        assert_eq!(drawn, ids(&rates.draw(&tasks, 13, 7)));
        assert_ne!(drawn, ids(&rates.draw(&tasks, 13, 8)));
        let first: std::collections::BTreeSet<_> = drawn[..10].iter().collect();
        assert_eq!(first.len(), 10);
    }

    #[test]
    fn rates_follow_the_policy_and_are_saved_to_the_bit() {
        let mut rates = PassRates::default();
        for _ in 0..5 {
            rates.learn(&[group("1", &[Some(false); 4])]);
        }
        let before = rates.of("1");
        // What we failed to score is no failure of the policy's.
        rates.learn(&[group("1", &[None, None])]);
        assert_eq!(rates.of("1"), before);
        for _ in 0..5 {
            rates.learn(&[group("1", &[Some(true), Some(true), Some(true), None])]);
        }
        assert!(rates.of("1") > 0.7, "{}", rates.of("1"));
        let text = serde_json::to_string(&rates).unwrap();
        assert_eq!(serde_json::from_str::<PassRates>(&text).unwrap(), rates);
    }
}
