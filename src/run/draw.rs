//! Which tasks a step learns from, and their episodes.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;

use super::RunError;
use super::algorithm::part_weights;
use super::curriculum::PassRates;
use super::mix::Mix;
use super::policy::Policy;
use super::ranks::gather;
use super::scored::check_scored;
use super::workbench::Workbench;
use crate::collective::Collective;
use crate::config::{RewardAggregation, RunConfig};
use crate::engine::Engine;
use crate::rollout::{CollectionSeed, Collector, CollectorConfig, CollectorStats, RolloutGroup};

/// The episodes of one step.
pub(super) struct StepEpisodes {
    /// What the policy learns from.
    pub(super) groups: Vec<RolloutGroup>,
    /// What it does not: groups whose rewards are all alike, and those that a step had no room for.
    pub(super) set_aside: Vec<RolloutGroup>,
    pub(super) stats: CollectorStats,
}

/// Draws the tasks of a run's environments, in the order of their epochs or by how often they are passed.
pub(super) struct TaskDraws<'a> {
    pub(super) config: &'a RunConfig,
    pub(super) policy: &'a Policy,
    pub(super) workbench: &'a Workbench,
    pub(super) mix: Mix,
    pub(super) collector: CollectorConfig,
    pub(super) stop: &'a AtomicBool,
    /// The processes that share the episodes.
    pub(super) ranks: &'a dyn Collective,
    /// Batches of tasks that were drawn so far.
    pub(super) drawn: u64,
    /// Tasks of each named environment that were drawn so far.
    pub(super) tasks_drawn: BTreeMap<String, u64>,
    /// How often tasks are passed, where they are drawn by that.
    pub(super) pass_rates: Option<PassRates>,
}

impl TaskDraws<'_> {
    /// Collects a step's episodes. With dynamic sampling, groups that teach nothing are replaced by
    /// those of further tasks, as far as the step may draw.
    pub(super) fn step(
        &mut self,
        engine: &mut Engine,
        step: u64,
    ) -> Result<StepEpisodes, RunError> {
        let config = self.config;
        let wanted = config.rollout.groups_per_step;
        let draws = if config.trainer.dynamic_sampling {
            config.trainer.max_draws
        } else {
            1
        };
        let mut episodes = StepEpisodes {
            groups: Vec::with_capacity(wanted),
            set_aside: Vec::new(),
            stats: CollectorStats::default(),
        };
        // Each environment has room for its share, and what it lacks is drawn from it again.
        let shares = self.mix.shares(step, wanted);
        let mut room = shares.clone();
        for draw in 0..draws {
            let count = |(share, room): (&usize, &usize)| if *room > 0 { *share } else { 0 };
            let counts: Vec<usize> = shares.iter().zip(&room).map(count).collect();
            let (groups, stats) = self.draw(engine, step, draw, &counts)?;
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
        let groups = episodes.groups.iter_mut().chain(&mut episodes.set_aside);
        for (number, group) in (0..).zip(groups) {
            for trajectory in &mut group.trajectories {
                trajectory.group = number;
            }
        }
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

    /// Collects one draw's episodes: each process its share of the groups, which all are then told of.
    fn draw(
        &mut self,
        engine: &mut Engine,
        step: u64,
        draw: u64,
        counts: &[usize],
    ) -> Result<(Vec<RolloutGroup>, CollectorStats), RunError> {
        let config = self.config;
        let (drawn, rates) = (&mut self.tasks_drawn, self.pass_rates.as_ref());
        let batch = self.mix.draw(counts, self.drawn, drawn, rates);
        self.drawn += 1;
        let seed = CollectionSeed {
            run: config.seed,
            purpose: "train",
            step,
            draw,
        };
        let requests = self.ranks.share(batch.len()).map(|place| {
            let (task, earlier) = (batch[place], &batch[..place]);
            let visit = earlier
                .iter()
                .filter(|earlier| earlier.id == task.id)
                .count();
            self.workbench
                .group(task, config.rollout.group_size, seed, visit as u64)
        });
        let policy = self.policy;
        let mut collector =
            Collector::new(engine, &policy.tokenizer, &policy.template, &self.collector)
                .until(self.stop);
        let own = collector
            .collect(requests.collect(), seed, &mut |_| {})
            .map(|(groups, stats)| (groups, stats.sampled_tokens, stats.seconds));
        let shares = gather(
            self.ranks,
            "gathering episodes",
            own.map_err(RunError::from),
        )?;
        let mut groups = Vec::with_capacity(batch.len());
        let mut stats = CollectorStats::default();
        for (share, sampled_tokens, seconds) in shares {
            groups.extend(share);
            stats.sampled_tokens += sampled_tokens;
            // They sample at the same time.
            stats.seconds = stats.seconds.max(seconds);
        }
        if let Some(rates) = &mut self.pass_rates {
            rates.learn(&groups);
        }
        Ok((groups, stats))
    }
}
