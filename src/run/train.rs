//! GRPO from the first measurement to the last.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use fs_err as fs;
use serde::{Deserialize, Serialize};

use super::algorithm::{grpo_config, optimizer_config, schedule};
use super::draw::TaskDraws;
use super::evaluate::evaluate;
use super::folder::RunFolder;
use super::policy::Policy;
use super::summary::{Difference, Measured, Summary};
use super::workbench::{Workbench, check_held_out, evaluation_tasks, training_tasks};
use super::{Observer, RunError, RunEvent};
use crate::config::RunConfig;
use crate::engine::{Engine, EngineConfig, PrefixCaching};
use crate::eval::EvalReport;
use crate::rollout::{CollectorStats, RolloutGroup, derive_seed};
use crate::trainer::{
    AdamW, GrpoTrainer, StepMetrics, TrainState, latest_checkpoint, load_checkpoint,
    prune_checkpoints, save_checkpoint, shuffle_rewards,
};
use crate::trajectory::{Status, StepWriter, Trajectory};

/// One line of `metrics.jsonl`.
#[derive(Debug, Serialize)]
struct MetricsRow {
    step: usize,
    #[serde(flatten)]
    metrics: StepMetrics,
    #[serde(flatten)]
    episodes: EpisodeMetrics,
    /// Groups that dynamic sampling replaced.
    #[serde(rename = "episodes/groups_set_aside")]
    set_aside: usize,
    num_tokens: u64,
    step_time: f64,
    generate_time: f64,
    update_time: f64,
    tokens_per_second: f64,
}

/// The line of an evaluation within a run.
#[derive(Debug, Serialize)]
struct EvaluationRow {
    step: usize,
    #[serde(rename = "eval/pass_at_1")]
    pass_at_1: f64,
    #[serde(rename = "eval/ci95")]
    ci95: [f64; 2],
}

/// What the episodes of a step were like; names as in TRL.
#[derive(Debug, Default, Serialize)]
struct EpisodeMetrics {
    #[serde(rename = "completions/mean_length")]
    mean_length: f64,
    #[serde(rename = "completions/min_length")]
    min_length: usize,
    #[serde(rename = "completions/max_length")]
    max_length: usize,
    #[serde(rename = "completions/clipped_ratio")]
    clipped_ratio: f64,
    #[serde(rename = "tools/call_frequency")]
    call_frequency: f64,
    #[serde(rename = "tools/failure_frequency")]
    failure_frequency: f64,
    /// Mean of each part of the reward.
    #[serde(flatten)]
    rewards: BTreeMap<String, f64>,
    #[serde(rename = "episodes/turns")]
    turns: f64,
    #[serde(rename = "episodes/unscorable")]
    unscorable: usize,
    #[serde(rename = "sandbox/tool_seconds")]
    tool_seconds: f64,
    #[serde(rename = "sandbox/grade_seconds")]
    grade_seconds: f64,
}

impl EpisodeMetrics {
    fn new(groups: &[RolloutGroup]) -> Self {
        let episodes: Vec<&Trajectory> = groups
            .iter()
            .flat_map(|group| &group.trajectories)
            .collect();
        if episodes.is_empty() {
            return Self::default();
        }
        let count = episodes.len() as f64;
        let sum = |value: &dyn Fn(&Trajectory) -> f64| -> f64 {
            episodes.iter().map(|episode| value(episode)).sum()
        };
        let lengths: Vec<usize> = episodes
            .iter()
            .map(|episode| episode.trace.sampled_len())
            .collect();
        let turns = |value: &dyn Fn(&crate::trajectory::Turn) -> u32| -> f64 {
            episodes
                .iter()
                .flat_map(|episode| &episode.turns)
                .map(|t| f64::from(value(t)))
                .sum()
        };
        let scored = episodes
            .iter()
            .filter(|episode| episode.reward.is_some())
            .count();
        let mut rewards = BTreeMap::new();
        for (name, part) in episodes.iter().flat_map(|episode| &episode.rewards) {
            *rewards.entry(format!("rewards/{name}/mean")).or_insert(0.0) += part / scored as f64;
        }
        let calls = turns(&|turn| turn.tool_calls);
        Self {
            mean_length: lengths.iter().sum::<usize>() as f64 / count,
            min_length: lengths.iter().copied().min().unwrap_or(0),
            max_length: lengths.iter().copied().max().unwrap_or(0),
            clipped_ratio: sum(&|episode| f64::from(u8::from(episode.is_truncated()))) / count,
            call_frequency: calls / count,
            failure_frequency: turns(&|turn| turn.tool_failures) / calls.max(1.0),
            rewards,
            turns: sum(&|episode| episode.turns.len() as f64) / count,
            unscorable: episodes
                .iter()
                .filter(|episode| episode.reward.is_none())
                .count(),
            tool_seconds: sum(&|episode| episode.usage.tool_seconds),
            grade_seconds: sum(&|episode| episode.usage.grade_seconds),
        }
    }
}

/// Where a run is written, and whether it goes on.
#[derive(Debug)]
pub struct TrainOptions<'a> {
    /// The run folder.
    pub out: &'a Path,
    /// Go on from the folder's last checkpoint, rather than start in an empty folder.
    pub resume: bool,
    /// Once true, the run saves what is done and ends with [`RunError::Stopped`].
    pub stop: &'a AtomicBool,
}

/// What a checkpoint keeps of a run besides weights and moments.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Progress {
    before: EvalReport,
    tokens: u64,
    batches_drawn: u64,
    wall_s: f64,
}

/// A run between two steps.
struct Run<'a> {
    config: &'a RunConfig,
    policy: &'a Policy,
    out: &'a Path,
    trainer: GrpoTrainer,
    progress: Progress,
    /// Steps done.
    step: usize,
    /// Steps saved.
    saved: Option<usize>,
    /// What earlier processes took, in seconds.
    wall_before: f64,
    started: Instant,
}

impl Run<'_> {
    fn wall_s(&self) -> f64 {
        self.wall_before + self.started.elapsed().as_secs_f64()
    }

    fn save(&mut self) -> Result<(), RunError> {
        if self.saved == Some(self.step) {
            return Ok(());
        }
        self.progress.wall_s = self.wall_s();
        let state = TrainState {
            step: self.step,
            seed: self.config.seed,
            extra: serde_json::to_value(&self.progress).map_err(std::io::Error::from)?,
        };
        let checkpoint = save_checkpoint(
            self.out,
            &self.policy.decoder,
            self.trainer.optimizer(),
            &state,
            Some(&self.policy.source),
        )?;
        self.policy.save_words(&checkpoint)?;
        prune_checkpoints(self.out, self.config.trainer.keep_checkpoints)?;
        self.saved = Some(self.step);
        Ok(())
    }
}

/// Trains `policy` with GRPO and writes the run folder.
///
/// A run that was stopped, or killed, goes on from its last checkpoint to the same end: on a CPU, to
/// the same bytes.
///
/// # Errors
///
/// Fails where the tasks, the folder or the model cannot be used, or where a step cannot be done;
/// what was written until then stays. Ends with [`RunError::Stopped`] if it was asked to.
pub fn train(
    config: &RunConfig,
    policy: &Policy,
    workbench: &Workbench,
    options: &TrainOptions<'_>,
    observer: &mut Observer<'_>,
) -> Result<Summary, RunError> {
    let tasks = training_tasks(config)?;
    let held_out = evaluation_tasks(config)?;
    check_held_out(&tasks, &held_out)?;
    let mut engine = new_engine(config, policy)?;
    let (mut folder, mut run) = begin(config, policy, options)?;
    let measure = |engine: &mut Engine, step: usize, observer: &mut Observer<'_>| {
        let stop = options.stop;
        let report = evaluate(config, policy, workbench, engine, &held_out, stop, observer)?;
        observer(RunEvent::Evaluated {
            step,
            report: &report,
        });
        Ok::<EvalReport, RunError>(report)
    };
    if run.saved.is_none() {
        run.progress.before = match measure(&mut engine, 0, observer) {
            Err(error) if error.is_stop() => return Err(stop(&mut run)?),
            report => report?,
        };
    }
    let collector = workbench.collector(config.rollout.temperature);
    collector.sampling.check_trainable()?;
    let mut draws = TaskDraws {
        config,
        policy,
        workbench,
        tasks: &tasks,
        collector,
        stop: options.stop,
        drawn: run.progress.batches_drawn,
    };
    let steps = usize::try_from(config.trainer.steps).unwrap_or(usize::MAX);
    while run.step < steps {
        let step = run.step + 1;
        let step_started = Instant::now();
        let mut episodes = match draws.step(&mut engine, step as u64) {
            Err(error) if error.is_stop() => return Err(stop(&mut run)?),
            episodes => episodes?,
        };
        let stats = episodes.stats;
        run.progress.tokens += stats.sampled_tokens;
        run.progress.batches_drawn = draws.drawn;
        store(
            options.out,
            step,
            episodes.groups.iter().chain(&episodes.set_aside),
        )?;
        if config.trainer.shuffle_rewards {
            let seed = derive_seed(config.seed, "shuffle", step as u64, "");
            shuffle_rewards(&mut episodes.groups, seed);
        }
        let update_started = Instant::now();
        let metrics = run.trainer.step(&policy.decoder, &episodes.groups)?;
        run.step = step;
        let elapsed = step_started.elapsed();
        let row = MetricsRow {
            step,
            metrics,
            episodes: EpisodeMetrics::new(&episodes.groups),
            set_aside: episodes.set_aside.len(),
            num_tokens: run.progress.tokens,
            step_time: elapsed.as_secs_f64(),
            generate_time: stats.seconds,
            update_time: update_started.elapsed().as_secs_f64(),
            tokens_per_second: tokens_per_second(stats),
        };
        folder.log(&row)?;
        observer(RunEvent::Step {
            step,
            metrics: &row.metrics,
            tokens_per_second: row.tokens_per_second,
            elapsed,
        });
        if is_due(step, config.eval.every) && step < steps {
            let report = match measure(&mut engine, step, observer) {
                Err(error) if error.is_stop() => return Err(stop(&mut run)?),
                report => report?,
            };
            folder.log(&EvaluationRow {
                step,
                pass_at_1: report.pass_at_1,
                ci95: report.ci95,
            })?;
        }
        if is_due(step, config.trainer.save_every) || step == steps {
            run.save()?;
        }
        if options.stop.load(Ordering::Relaxed) && step < steps {
            return Err(stop(&mut run)?);
        }
    }
    // What a run left that was killed behind this point.
    if folder.model().exists() {
        fs::remove_dir_all(folder.model())?;
    }
    policy.save(&folder.model())?;
    let after = match measure(&mut engine, steps, observer) {
        Err(error) if error.is_stop() => return Err(stop(&mut run)?),
        report => report?,
    };
    let before = &run.progress.before;
    let difference = after
        .difference(before, config.seed)
        .map(|difference| Difference {
            pass_at_1: difference.pass_at_1,
            ci95: difference.ci95,
        });
    let summary = Summary {
        before: Measured::new(before, config.eval.samples),
        after: Measured::new(&after, config.eval.samples),
        difference,
        steps,
        wall_s: run.wall_s(),
        tokens: run.progress.tokens,
        seed: config.seed,
    };
    folder.write_summary(&summary)?;
    Ok(summary)
}

/// Opens the run folder and returns the run before its first or its next step.
fn begin<'a>(
    config: &'a RunConfig,
    policy: &'a Policy,
    options: &TrainOptions<'a>,
) -> Result<(RunFolder, Run<'a>), RunError> {
    let out = options.out;
    let mut optimizer = AdamW::new(&policy.decoder, optimizer_config(config))?;
    let checkpoint = if options.resume {
        latest_checkpoint(out)?
    } else {
        None
    };
    let restored = match &checkpoint {
        Some(path) => {
            let state = load_checkpoint(path, &policy.decoder, &mut optimizer)?;
            let progress =
                Progress::deserialize(&state.extra).map_err(|source| RunError::Progress {
                    path: path.clone(),
                    source,
                })?;
            Some((state.step, progress))
        }
        // A run that was stopped before its first checkpoint starts again.
        None => None,
    };
    let step = restored.as_ref().map(|(step, _)| *step);
    let run_toml = config.to_toml()?;
    let folder = if options.resume {
        RunFolder::reopen(out, step.unwrap_or(0), &run_toml, &config.log)?
    } else {
        RunFolder::create(out, &run_toml, &config.log)?
    };
    let progress = restored.map_or_else(Progress::default, |(_, progress)| progress);
    let trainer = GrpoTrainer::new(grpo_config(config, policy)?, schedule(config), optimizer);
    let run = Run {
        config,
        policy,
        out,
        trainer: trainer.resume_after(step.unwrap_or(0)),
        wall_before: progress.wall_s,
        progress,
        step: step.unwrap_or(0),
        saved: step,
        started: Instant::now(),
    };
    Ok((folder, run))
}

/// Saves a run that is asked to stop, and returns the error that says so. Before its first step there
/// is nothing to save.
fn stop(run: &mut Run<'_>) -> Result<RunError, RunError> {
    if run.step > 0 {
        run.save()?;
    }
    Ok(RunError::Stopped {
        step: run.step,
        path: run.out.to_owned(),
    })
}

/// Writes the episodes of a step.
fn store<'a>(
    out: &Path,
    step: usize,
    groups: impl Iterator<Item = &'a RolloutGroup>,
) -> Result<(), RunError> {
    let mut writer = StepWriter::create(out, step as u64)?;
    for trajectory in groups.flat_map(|group| &group.trajectories) {
        writer.append(trajectory)?;
    }
    writer.finish()?;
    Ok(())
}

/// Refuses episodes of which none could be scored: going on would learn nothing, in silence.
pub(super) fn check_scored(groups: &[RolloutGroup]) -> Result<(), RunError> {
    let mut reason = None;
    for trajectory in groups.iter().flat_map(|group| &group.trajectories) {
        if trajectory.reward.is_some() {
            return Ok(());
        }
        if let Status::Failed { reason: found } = &trajectory.status {
            reason = Some(found.clone());
        }
    }
    Err(RunError::NothingScored {
        reason: reason.unwrap_or_default(),
    })
}

fn tokens_per_second(stats: CollectorStats) -> f64 {
    stats.sampled_tokens as f64 / stats.seconds.max(1e-9)
}

/// Returns whether something that is done every `every` steps is due; 0 is never.
fn is_due(step: usize, every: u64) -> bool {
    every > 0 && (step as u64).is_multiple_of(every)
}

/// Makes the engine of a run.
///
/// # Errors
///
/// Fails where a limit is too small to run anything.
pub fn new_engine(config: &RunConfig, policy: &Policy) -> Result<Engine, RunError> {
    let engine = EngineConfig {
        max_cache_tokens: config.rollout.max_cache_tokens,
        max_context: config.rollout.max_total_tokens,
        prefix_caching: PrefixCaching::Prompts,
        ..EngineConfig::default()
    };
    Ok(Engine::new(Arc::clone(&policy.decoder), engine)?)
}
