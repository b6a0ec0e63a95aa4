//! Which tasks a step learns from, and their episodes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};

use super::RunError;
use super::agents::AgentPlay;
use super::algorithm::part_weights;
use super::curriculum::PassRates;
use super::mix::Mix;
use super::policy::Policy;
use super::ranks::gather;
use super::scored::check_scored;
use super::workbench::Workbench;
use crate::chat::ToolCallFormat;
use crate::collective::Collective;
use crate::config::{RewardAggregation, RunConfig};
use crate::engine::Engine;
use crate::rollout::{
    CollectionSeed, Collector, CollectorConfig, CollectorStats, Origin, PauseRule, PausedGroup,
    PausedRecord, RolloutGroup,
};
use crate::task::Task;

/// The episodes of one step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StepEpisodes {
    /// What the policy learns from.
    pub(super) groups: Vec<RolloutGroup>,
    /// What it does not: groups whose rewards are all alike, and those that a step had no room for.
    pub(super) set_aside: Vec<RolloutGroup>,
    pub(super) stats: CollectorStats,
}

impl StepEpisodes {
    /// Numbers the groups.
    fn number(&mut self) {
        let groups = self.groups.iter_mut().chain(&mut self.set_aside);
        for (number, group) in (0..).zip(groups) {
            for trajectory in &mut group.trajectories {
                trajectory.group = number;
            }
        }
    }
}

/// How far a run has drawn tasks.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct DrawState {
    /// Batches of tasks that were drawn so far.
    #[serde(rename = "batches_drawn")]
    pub(super) drawn: u64,
    /// Tasks of each environment that were drawn, for a run that has several.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) tasks_drawn: BTreeMap<String, u64>,
    /// How often tasks are passed, where they are drawn by that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) pass_rates: Option<PassRates>,
}

impl DrawState {
    /// Draws so many tasks of each environment.
    fn draw<'m>(&mut self, mix: &'m Mix, counts: &[usize]) -> Vec<&'m Task> {
        let (drawn, rates) = (&mut self.tasks_drawn, self.pass_rates.as_ref());
        let batch = mix.draw(counts, self.drawn, drawn, rates);
        self.drawn += 1;
        batch
    }

    /// Counts how often tasks were passed, where that is of use.
    fn learn(&mut self, groups: &[RolloutGroup]) {
        if let Some(rates) = &mut self.pass_rates {
            rates.learn(groups);
        }
    }
}

/// Which step's episodes are collected.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// The step that learns from them.
    pub(super) step: u64,
    /// The step before which the policy is that samples them.
    pub(super) policy_step: u64,
}

impl Place {
    /// The episodes of a step, sampled in it.
    pub(super) fn of(step: usize) -> Self {
        let step = step as u64;
        Self {
            step,
            policy_step: step,
        }
    }

    /// The episodes of a step, sampled while the step before it trains.
    pub(super) fn ahead_of(step: usize) -> Self {
        Self {
            policy_step: (step as u64).saturating_sub(1),
            ..Self::of(step)
        }
    }
}

/// What one process made of a draw: its groups, and what they cost. The others are not told of it yet.
pub(super) type Share = Result<(Vec<RolloutGroup>, u64, f64), RunError>;

/// Draws the tasks of a run's environments, in the order of their epochs or by how often they are passed.
pub(super) struct TaskDraws<'a> {
    pub(super) config: &'a RunConfig,
    pub(super) policy: &'a Policy,
    pub(super) workbench: &'a Workbench,
    pub(super) mix: Mix,
    pub(super) collector: CollectorConfig,
    pub(super) stop: &'a AtomicBool,
    pub(super) state: DrawState,
    /// Groups of which some episodes wait for the next step.
    pub(super) paused: Vec<PausedGroup>,
}

impl TaskDraws<'_> {
    /// Collects a step's episodes, together with the processes that share them.
    pub(super) fn step(
        &mut self,
        engine: &mut Engine,
        place: Place,
        ranks: &dyn Collective,
    ) -> Result<StepEpisodes, RunError> {
        if self.config.rollout.max_step_tokens.is_some() || !self.paused.is_empty() {
            return self.step_in_parts(engine, place);
        }
        let first = self.sample_first(engine, place, self.share(ranks));
        self.complete(engine, place, ranks, first)
    }

    /// Returns the groups of a step's first draw that are this process's.
    pub(super) fn share(&self, ranks: &dyn Collective) -> Range<usize> {
        ranks.share(self.config.rollout.groups_per_step)
    }

    /// Collects a process's own groups of a step's first draw.
    pub(super) fn sample_first(
        &mut self,
        engine: &mut Engine,
        place: Place,
        own: Range<usize>,
    ) -> Share {
        let wanted = self.config.rollout.groups_per_step;
        let shares = self.mix.shares(place.step, wanted);
        self.sample(engine, place, 0, &shares, own)
    }

    /// Returns what is to be saved of the groups that wait.
    pub(super) fn records(&self) -> Vec<PausedRecord> {
        self.paused.iter().map(PausedGroup::record).collect()
    }

    /// Takes the groups that waited when the run was saved, with environments that are brought to where
    /// they were.
    pub(super) fn restore(&mut self, records: &[PausedRecord]) -> Result<(), RunError> {
        let template = self.policy.template.source();
        let format = self.collector.tool_call_format;
        let format = format.unwrap_or_else(|| ToolCallFormat::detect(template));
        let mut saved = Vec::with_capacity(records.len());
        for record in records {
            let Origin { step, draw, visit } = record.origin;
            let task = self.mix.task(&record.task_id);
            let task = task.ok_or_else(|| RunError::PausedTask {
                id: record.task_id.clone(),
            })?;
            // A group stays as large as it began, whatever the run file says by now.
            let size = record.size().max(self.config.rollout.group_size);
            let seed = self.seed(step, draw);
            let environments = self.workbench.group(task, size, seed, visit).environments;
            saved.push((record.clone(), environments));
        }
        let tokenizer = &self.policy.tokenizer;
        let restored = PausedGroup::restore(saved, tokenizer, format, self.stop)?;
        self.paused.extend(restored);
        Ok(())
    }

    /// Completes a step's episodes, of which this process has its share of the first draw. With dynamic
    /// sampling, groups that teach nothing are replaced by those of further tasks, as far as the step may
    /// draw.
    pub(super) fn complete(
        &mut self,
        engine: &mut Engine,
        place: Place,
        ranks: &dyn Collective,
        first: Share,
    ) -> Result<StepEpisodes, RunError> {
        let config = self.config;
        let wanted = config.rollout.groups_per_step;
        let draws = if config.trainer.dynamic_sampling {
            config.trainer.max_draws
        } else {
            1
        };
        let mut first = Some(first);
        let mut episodes = StepEpisodes {
            groups: Vec::with_capacity(wanted),
            set_aside: Vec::new(),
            stats: CollectorStats::default(),
        };
        // Each environment has room for its share, and what it lacks is drawn from it again.
        let shares = self.mix.shares(place.step, wanted);
        let mut room = shares.clone();
        for draw in 0..draws {
            let count = |(share, room): (&usize, &usize)| if *room > 0 { *share } else { 0 };
            let counts: Vec<usize> = shares.iter().zip(&room).map(count).collect();
            let own = match first.take() {
                Some(first) => first,
                None => {
                    let own = ranks.share(counts.iter().sum());
                    self.sample(engine, place, draw, &counts, own)
                }
            };
            let (groups, stats) = self.gather(ranks, own)?;
            episodes.stats.sampled_tokens += stats.sampled_tokens;
            episodes.stats.seconds += stats.seconds;
            let keeps_all = !config.trainer.dynamic_sampling;
            let members = (counts.iter().enumerate())
                .flat_map(|(member, count)| std::iter::repeat_n(member, *count));
            for (group, member) in groups.into_iter().zip(members) {
                if room[member] > 0 && (keeps_all || self.is_informative(&group)) {
                    room[member] -= 1;
                    episodes.groups.push(group);
                } else {
                    episodes.set_aside.push(group);
                }
            }
            if room.iter().all(|room| *room == 0) {
                break;
            }
        }
        // A draw that failed whole is made up for by the next; a step is not.
        check_scored(episodes.groups.iter().chain(&episodes.set_aside))?;
        // Without any, the last draw's stand for the step: it learns nothing from them, and says so.
        if episodes.groups.is_empty() {
            let last = episodes.set_aside.len().saturating_sub(wanted);
            episodes.groups = episodes.set_aside.split_off(last);
        }
        episodes.number();
        Ok(episodes)
    }

    /// Returns whether a group teaches something, as its rewards are compared: summed, or by parts.
    pub(super) fn is_informative(&self, group: &RolloutGroup) -> bool {
        match self.config.trainer.reward_aggregation {
            RewardAggregation::Sum => group.is_informative(),
            RewardAggregation::Gdpo => {
                let parts = part_weights(&self.config.reward);
                group.is_informative_in(parts.iter().map(|(name, _)| name.as_str()))
            }
        }
    }

    /// Collects a process's own groups of one draw, which has so many of each environment.
    fn sample(
        &mut self,
        engine: &mut Engine,
        place: Place,
        draw: u64,
        counts: &[usize],
        own: Range<usize>,
    ) -> Share {
        let config = self.config;
        let seed = self.seed(place.step, draw);
        let batch = self.state.draw(&self.mix, counts);
        let requests = own.map(|place| {
            let (task, earlier) = (batch[place], &batch[..place]);
            let visit = earlier
                .iter()
                .filter(|earlier| earlier.id == task.id)
                .count();
            self.workbench
                .group(task, config.rollout.group_size, seed, visit as u64)
        });
        let requests = requests.collect();
        let (groups, stats) = match &config.rollout.agent {
            None => self
                .collector(engine, place)
                .collect(requests, seed, &mut |_| {})?,
            Some(agent) => {
                let play = AgentPlay {
                    config,
                    agent,
                    policy: self.policy,
                    temperature: config.rollout.temperature,
                    stop: self.stop,
                };
                play.collect(requests, seed, &mut |_| {})?
            }
        };
        Ok((groups, stats.sampled_tokens, stats.seconds))
    }

    /// Goes on with the groups that waited, and with further ones in place of those that are whole by now.
    /// The run's last step waits for all.
    fn step_in_parts(
        &mut self,
        engine: &mut Engine,
        place: Place,
    ) -> Result<StepEpisodes, RunError> {
        let config = self.config;
        let rollout = &config.rollout;
        let is_last = place.step >= config.trainer.steps;
        let bound = rollout.max_step_tokens.filter(|_| !is_last);
        let rule = PauseRule {
            max_step_tokens: bound.unwrap_or(usize::MAX),
            oldest: match bound {
                Some(_) => (place.step + 1).saturating_sub(rollout.max_off_policy_steps),
                None => u64::MAX,
            },
        };
        let wanted = rollout.groups_per_step.saturating_sub(self.paused.len());
        let mut requests = Vec::with_capacity(wanted);
        // Each is a draw of its own: how many there are depends on what is whole.
        for draw in 0..wanted as u64 {
            let seed = self.seed(place.step, draw);
            let counts = self.mix.shares(self.state.drawn + 1, 1);
            for task in self.state.draw(&self.mix, &counts) {
                let request = self.workbench.group(task, rollout.group_size, seed, 0);
                requests.push((request, seed));
            }
        }
        let carried = std::mem::take(&mut self.paused);
        let seed = self.seed(place.step, 0);
        let mut collector = self.collector(engine, place);
        let (groups, paused, stats) = collector.collect_paused(carried, requests, seed, rule)?;
        self.paused = paused;
        self.state.learn(&groups);
        check_scored(&groups)?;
        let mut episodes = StepEpisodes {
            groups,
            set_aside: Vec::new(),
            stats,
        };
        episodes.number();
        Ok(episodes)
    }

    fn collector<'e>(&'e self, engine: &'e mut Engine, place: Place) -> Collector<'e> {
        let policy = self.policy;
        Collector::new(engine, &policy.tokenizer, &policy.template, &self.collector)
            .until(self.stop)
            .of_policy(place.policy_step)
    }

    fn seed(&self, step: u64, draw: u64) -> CollectionSeed<'static> {
        CollectionSeed {
            run: self.config.seed,
            purpose: "train",
            step,
            draw,
        }
    }

    /// Tells the processes of each other's groups of a draw.
    fn gather(
        &mut self,
        ranks: &dyn Collective,
        own: Share,
    ) -> Result<(Vec<RolloutGroup>, CollectorStats), RunError> {
        let shares = gather(ranks, "gathering episodes", own)?;
        let mut groups = Vec::with_capacity(self.config.rollout.groups_per_step);
        let mut stats = CollectorStats::default();
        for (share, sampled_tokens, seconds) in shares {
            groups.extend(share);
            stats.sampled_tokens += sampled_tokens;
            // They sample at the same time.
            stats.seconds = stats.seconds.max(seconds);
        }
        self.state.learn(&groups);
        Ok((groups, stats))
    }
}
