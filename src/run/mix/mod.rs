//! The environments of a run, and which of them the groups of a step belong to.
//!
//! A run without `[environments]` is one environment without a name: all its groups are `[task]`'s. The
//! groups of several are divided by weight, by their place in the run alone: the first so many groups,
//! whatever the number, have each environment's part to within one group, and a run that goes on divides
//! them as it would have.

use std::collections::BTreeMap;

use super::RunError;
use super::curriculum::PassRates;
use super::workbench::training_tasks;
use crate::config::{Curriculum, RunConfig};
use crate::rollout::derive_seed;
use crate::task::{Task, TaskSet};

/// An environment's tasks to learn from.
#[derive(Debug)]
struct Member {
    /// Its name; empty for `[task]`.
    name: String,
    tasks: TaskSet,
    curriculum: Curriculum,
}

/// The environments of a run.
#[derive(Debug)]
pub(super) struct Mix {
    seed: u64,
    members: Vec<Member>,
    /// Where the environments of other servers are, by name.
    urls: BTreeMap<String, String>,
    division: Division,
}

impl Mix {
    /// Opens the tasks to learn from.
    ///
    /// # Errors
    ///
    /// Fails where they are not named or cannot be read.
    pub(super) fn open(config: &RunConfig) -> Result<Self, RunError> {
        let mut members: Vec<Member> = of_each_environment(config, training_tasks)?
            .into_iter()
            .map(|(name, tasks)| Member {
                curriculum: (config.environments[&name].curriculum)
                    .unwrap_or(config.task.curriculum),
                name,
                tasks,
            })
            .collect();
        let mut weights: Vec<f64> = (config.environments.values())
            .map(|environment| environment.weight)
            .collect();
        if members.is_empty() {
            members.push(Member {
                name: String::new(),
                tasks: training_tasks(config)?,
                curriculum: config.task.curriculum,
            });
            weights.push(1.0);
        }
        let urls = config
            .environments
            .iter()
            .filter_map(|(name, environment)| {
                let env = environment.env.as_ref()?;
                Some((name.clone(), env.url.clone()))
            });
        Ok(Self {
            seed: config.seed,
            members,
            urls: urls.collect(),
            division: Division::new(&weights),
        })
    }

    /// Returns whether any of them draws tasks by how often they are passed.
    pub(super) fn needs_pass_rates(&self) -> bool {
        let by_rate = |member: &Member| member.curriculum == Curriculum::PassRate;
        self.members.iter().any(by_rate)
    }

    /// Returns how many of the `groups` of a step, counted from 1, each environment has.
    pub(super) fn shares(&mut self, step: u64, groups: usize) -> Vec<usize> {
        let before = step.saturating_sub(1) * groups as u64;
        self.division.share(before, groups)
    }

    /// Draws so many tasks of each environment, all of one before those of the next. `place` is the number
    /// of the draw in the run, `drawn` how many tasks of each named environment were drawn before.
    pub(super) fn draw(
        &self,
        counts: &[usize],
        place: u64,
        drawn: &mut BTreeMap<String, u64>,
        rates: Option<&PassRates>,
    ) -> Vec<&Task> {
        let mut batch = Vec::with_capacity(counts.iter().sum());
        for (member, &count) in self.members.iter().zip(counts) {
            let Member { name, tasks, .. } = member;
            let (seed, first) = if name.is_empty() {
                (self.seed, place * count as u64)
            } else {
                let seed = derive_seed(self.seed, "environment", 0, name);
                let drawn = drawn.entry(name.clone()).or_default();
                let first = *drawn;
                *drawn += count as u64;
                (seed, first)
            };
            let rates = rates.filter(|_| member.curriculum == Curriculum::PassRate);
            batch.extend(match rates {
                Some(rates) => {
                    let seed = derive_seed(self.seed, "curriculum", place, name);
                    rates.draw(tasks, count, seed)
                }
                None => tasks.stretch(seed, first, count),
            });
        }
        batch
    }

    /// Returns all tasks.
    pub(super) fn tasks(&self) -> impl Iterator<Item = &Task> {
        self.members.iter().flat_map(|member| member.tasks.tasks())
    }

    /// Returns the task of an id.
    pub(super) fn task(&self, id: &str) -> Option<&Task> {
        self.members.iter().find_map(|member| member.tasks.get(id))
    }

    /// Returns what tells these tasks from others.
    pub(super) fn digest(&self) -> String {
        let digests = self.members.iter().map(|member| member.tasks.digest());
        digests.collect::<Vec<_>>().join(" ")
    }

    /// Refuses tasks that are learned from and measured on: the result would mean nothing.
    ///
    /// Within `[task]` they are known by their ids. Between environments, which may read one file each in
    /// their own way, they are known by what is asked and tested.
    ///
    /// # Errors
    ///
    /// Fails with the first of them.
    pub(super) fn check_held_out(&self, held_out: &TaskSet) -> Result<(), RunError> {
        let mut learned: BTreeMap<String, &Task> = BTreeMap::new();
        for member in &self.members {
            for task in member.tasks.tasks() {
                learned.entry(self.identity(task)).or_insert(task);
            }
        }
        let known = |task: &&Task| {
            let found = learned.get(&self.identity(task));
            found.is_some_and(|found| self.is_named() || found == task)
        };
        let mut shared = held_out.tasks().iter().filter(known);
        let Some(first) = shared.next() else {
            return Ok(());
        };
        let name = &learned[&self.identity(first)].id;
        Err(RunError::NotHeldOut {
            id: first.id.clone(),
            learned_as: (*name != first.id).then(|| name.clone()),
            section: match environment_of(&first.id).filter(|_| self.is_named()) {
                Some(name) => format!("environments.{name}"),
                None => "task".to_owned(),
            },
            count: shared.count() + 1,
        })
    }

    fn is_named(&self) -> bool {
        self.members.iter().any(|member| !member.name.is_empty())
    }

    /// Returns what a task is known by.
    fn identity(&self, task: &Task) -> String {
        if self.is_named() {
            let Task {
                prompt,
                setup,
                tests,
                cases,
                ..
            } = task;
            let prompt = prompt.trim();
            // Tasks of environments elsewhere differ in where those are and in how they are reset.
            let remote = task.reset_row().map(|_| {
                let url = environment_of(&task.id).and_then(|name| self.urls.get(name));
                (url, &task.options)
            });
            // Those with a sandbox of their own are told by what stands for their tests.
            let repository = task.repository.as_ref().map(|_| &task.options);
            serde_json::json!([prompt, setup, tests, cases, remote, repository]).to_string()
        } else {
            task.id.clone()
        }
    }
}

/// Returns the environment that a task of a run with environments belongs to, by its id.
pub(super) fn environment_of(task_id: &str) -> Option<&str> {
    task_id.split_once('/').map(|(name, _)| name)
}

/// Reads the tasks of each environment as if it were alone, and gives them ids of their own.
///
/// # Errors
///
/// Fails with the first environment whose tasks cannot be read.
pub(super) fn of_each_environment(
    config: &RunConfig,
    read: impl Fn(&RunConfig) -> Result<TaskSet, RunError>,
) -> Result<Vec<(String, TaskSet)>, RunError> {
    let tasks = config.environments.iter().map(|(name, environment)| {
        let tasks = read(&environment.alone(config)).map_err(|source| RunError::Environment {
            name: name.clone(),
            source: Box::new(source),
        })?;
        Ok((name.clone(), tasks.of_environment(name)))
    });
    tasks.collect()
}

/// Divides an endless row by weight.
///
/// Each place goes to one of those that would otherwise fall too far behind, the most urgent (Tijdeman
/// 1980, "The chairman assignment problem", doi:10.1016/0012-365X(80)90269-1): of the first `T` places
/// each has its part to within `1 - 1 / (2 n - 2)` of a place, for `n` of them.
#[derive(Debug)]
struct Division {
    /// They add up to 1.
    parts: Vec<f64>,
    /// How many of the first `places` each has.
    counts: Vec<u64>,
    places: u64,
}

impl Division {
    fn new(weights: &[f64]) -> Self {
        // Divided first: the sum of large weights may be no number.
        let largest = weights.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        let total: f64 = weights.iter().map(|weight| weight / largest).sum();
        Self {
            parts: (weights.iter())
                .map(|weight| weight / largest / total)
                .collect(),
            counts: vec![0; weights.len()],
            places: 0,
        }
    }

    /// Returns how many each has of the `count` places behind the first `before`.
    fn share(&mut self, before: u64, count: usize) -> Vec<usize> {
        if self.parts.len() == 1 {
            return vec![count];
        }
        // They are found one by one, so earlier ones are found from the beginning.
        if before < self.places {
            self.counts.fill(0);
            self.places = 0;
        }
        while self.places < before {
            self.next();
        }
        let mut shares = vec![0; self.parts.len()];
        for _ in 0..count {
            shares[self.next()] += 1;
        }
        shares
    }

    /// Gives away the next place.
    fn next(&mut self) -> usize {
        let slack = 1.0 / (2.0 * self.parts.len() as f64 - 2.0);
        let place = (self.places + 1) as f64;
        let behind = |index: usize| place * self.parts[index] - self.counts[index] as f64;
        // Rounding must not leave out one that is behind by exactly that much.
        let may_have = |index: &usize| behind(*index) >= slack - 1e-9;
        let urgency = |index: usize| (1.0 - slack - behind(index)) / self.parts[index];
        let chosen = (0..self.parts.len())
            .filter(may_have)
            .min_by(|&a, &b| urgency(a).total_cmp(&urgency(b)))
            .expect("those behind are behind by 1 together, so one is by an nth");
        self.counts[chosen] += 1;
        self.places += 1;
        chosen
    }
}

#[cfg(test)]
mod tests;
