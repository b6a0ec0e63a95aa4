//! Measuring a policy on tasks.

use std::sync::atomic::AtomicBool;

use super::scored::check_scored;
use super::{Observer, Policy, RunError, RunEvent, Workbench};
use crate::config::RunConfig;
use crate::engine::Engine;
use crate::eval::{EvalReport, TaskScore};
use crate::rollout::{CollectionSeed, Collector};
use crate::task::TaskSet;

/// Episodes in the engine at one time while measuring.
const EPISODES_AT_ONCE: usize = 256;

/// Measures `policy` on `tasks` with `config.eval.samples` samples each, unless `stop` becomes true.
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
    observer: &mut Observer<'_>,
) -> Result<EvalReport, RunError> {
    let samples = config.eval.samples;
    let total = tasks.len() * samples;
    let collector_config = workbench.collector(config.eval.temperature);
    let seed = CollectionSeed {
        run: config.seed,
        purpose: "eval",
        step: 0,
        draw: 0,
    };
    let mut all_groups = Vec::with_capacity(tasks.len());
    let mut done = 0;
    for chunk in tasks.tasks().chunks((EPISODES_AT_ONCE / samples).max(1)) {
        let requests = chunk
            .iter()
            .map(|task| workbench.group(task, samples, seed))
            .collect();
        let mut collector = Collector::new(
            engine,
            &policy.tokenizer,
            &policy.template,
            &collector_config,
        )
        .until(stop);
        let (groups, _) = collector.collect(requests, seed, &mut |finished| {
            observer(RunEvent::Evaluating {
                done: done + finished,
                total,
            });
        })?;
        done += chunk.len() * samples;
        all_groups.extend(groups);
    }
    check_scored(&all_groups)?;
    let episodes = all_groups.iter().flat_map(|group| &group.trajectories);
    let scores = TaskScore::count(episodes);
    Ok(EvalReport::new(scores, &config.eval.k, config.seed))
}
