//! Measuring a policy on tasks.

use std::sync::atomic::AtomicBool;

use super::agents::AgentPlay;
use super::mix::environment_of;
use super::ranks::gather;
use super::scored::why_unscored;
use super::{Observer, Policy, RunError, RunEvent, Workbench};
use crate::collective::Collective;
use crate::config::RunConfig;
use crate::engine::Engine;
use crate::eval::{EvalReport, TaskScore};
use crate::rollout::{CollectionSeed, Collector, CollectorConfig, GroupRequest, RolloutGroup};
use crate::task::{Task, TaskSet};

/// Episodes in the engine at one time while measuring.
const EPISODES_AT_ONCE: usize = 256;

/// Measures `policy` on `tasks` with `config.eval.samples` samples each, unless `stop` becomes true. The
/// processes of `ranks` share the tasks, and all get the result.
///
/// # Errors
///
/// Fails where episodes cannot be collected, and if it is stopped.
pub fn evaluate(
    config: &RunConfig,
    policy: &Policy,
    workbench: &Workbench,
    engine: &mut Engine,
    tasks: &TaskSet,
    stop: &AtomicBool,
    ranks: &dyn Collective,
    observer: &mut Observer<'_>,
) -> Result<EvalReport, RunError> {
    workbench.admit(config, tasks.tasks().iter())?;
    let tasks = &tasks.tasks()[ranks.share(tasks.len())];
    let at_once = workbench.episodes_at_once(EPISODES_AT_ONCE, ranks.world_size());
    let own = measure_share(
        config, policy, workbench, engine, tasks, at_once, stop, observer,
    );
    let mut scores = Vec::new();
    let mut reason = None;
    for (share, failure) in gather(ranks, "gathering measurements", own)? {
        scores.extend(share);
        reason = failure.or(reason);
    }
    if !scores.iter().any(|score: &TaskScore| score.n > 0) {
        return Err(RunError::NothingScored {
            reason: reason.unwrap_or_default(),
        });
    }
    Ok(EvalReport::new(scores, &config.eval.k, config.seed))
}

/// Returns the part of each of the run's environments in a measurement; nothing for a run without.
#[must_use]
pub fn by_environment(config: &RunConfig, report: &EvalReport) -> Vec<(String, EvalReport)> {
    let of = |name: &String| {
        let own = |score: &&TaskScore| environment_of(&score.task_id) == Some(name);
        let scores = report.scores.iter().filter(own).cloned().collect();
        let report = EvalReport::new(scores, &config.eval.k, config.seed);
        (name.clone(), report)
    };
    config.environments.keys().map(of).collect()
}

/// Returns the scores of some tasks, of which at most `at_once` episodes run at a time, and why the last episode that could not be scored could not.
fn measure_share(
    config: &RunConfig,
    policy: &Policy,
    workbench: &Workbench,
    engine: &mut Engine,
    tasks: &[Task],
    at_once: usize,
    stop: &AtomicBool,
    observer: &mut Observer<'_>,
) -> Result<(Vec<TaskScore>, Option<String>), RunError> {
    let samples = config.eval.samples;
    let total = tasks.len() * samples;
    let collector_config = CollectorConfig {
        // It is a step's; a measurement has as many episodes at once as fit, and drops none of them.
        deadline: None,
        ..workbench.collector(config.eval.temperature)
    };
    let seed = CollectionSeed {
        run: config.seed,
        purpose: "eval",
        step: 0,
        draw: 0,
    };
    let mut scores: Vec<TaskScore> = Vec::with_capacity(tasks.len());
    let mut reason = None;
    let mut done = 0;
    for requests in at_a_time(workbench, tasks, samples, seed, at_once) {
        let count: usize = (requests.iter())
            .map(|request| request.environments.len())
            .sum();
        let mut progress = |finished| {
            observer(RunEvent::Evaluating {
                done: done + finished,
                total,
            });
        };
        let (groups, _) = match &config.rollout.agent {
            None => Collector::new(
                engine,
                &policy.tokenizer,
                &policy.template,
                &collector_config,
            )
            .until(stop)
            .collect(requests, seed, &mut progress)?,
            Some(agent) => {
                let play = AgentPlay {
                    config,
                    agent,
                    policy,
                    temperature: config.eval.temperature,
                    stop,
                };
                play.collect(requests, seed, &mut progress)?
            }
        };
        done += count;
        reason = why_unscored(&groups).or(reason);
        let episodes = groups.iter().flat_map(RolloutGroup::episodes);
        for score in TaskScore::count(episodes) {
            match scores.last_mut() {
                // More samples of the task that had too many for one time.
                Some(last) if last.task_id == score.task_id => last.add(&score),
                _ => scores.push(score),
            }
        }
    }
    Ok((scores, reason))
}

/// Returns the episodes of some tasks as they are played: so many at a time as may be, whole tasks where
/// they fit.
fn at_a_time<'a>(
    workbench: &'a Workbench,
    tasks: &'a [Task],
    samples: usize,
    seed: CollectionSeed<'a>,
    at_once: usize,
) -> impl Iterator<Item = Vec<GroupRequest>> + 'a {
    let group = move |task| workbench.group(task, samples, seed, 0);
    let chunks = tasks.chunks((at_once / samples).max(1));
    chunks.flat_map(move |chunk| match chunk {
        [task] => (group(task).split(at_once).into_iter())
            .map(|part| vec![part])
            .collect(),
        tasks => vec![tasks.iter().map(group).collect::<Vec<_>>()],
    })
}
