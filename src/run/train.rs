//! GRPO from the first measurement to the last.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use fs_err as fs;
use serde::{Deserialize, Serialize};
use tracing::Span;

use super::ahead::{Ahead, Sampler, load_episodes, save_episodes};
use super::algorithm::{critic, grpo_config, optimizer_config, schedule};
use super::draw::{DrawState, Place, StepEpisodes, TaskDraws};
use super::evaluate::{by_environment, evaluate};
use super::folder::{FolderLock, RunFolder};
use super::load::LoadLog;
use super::memory::{MeasuredChoice, memory_guard};
use super::metrics::{
    EpisodeMetrics, EvaluationRow, MemoryMetrics, MetricsRow, environment_metrics,
};
use super::mix::Mix;
use super::policy::Policy;
use super::ranks::{check_alike, gather};
use super::state::StateFile;
use super::summary::{Change, Summary};
use super::watch::{Anomaly, Observed, WatchState};
use super::workbench::{Workbench, evaluation_tasks};
use super::{Observer, RunError, RunEvent};
use crate::collective::Collective;
use crate::config::{Response, RunConfig};
use crate::engine::{Engine, EngineConfig, PrefixCaching};
use crate::eval::EvalReport;
use crate::rollout::{CollectorStats, PausedRecord, RolloutGroup, derive_seed};
use crate::trainer::{
    AdamW, GrpoTrainer, MicroBatches, StepMetrics, TrainState, checkpoint_path, checkpoint_steps,
    load_checkpoint, prune_checkpoints, remove_partial_checkpoints, save_checkpoint,
    shuffle_rewards,
};
use crate::trajectory::StepWriter;

/// Where a run is written, and whether it goes on.
#[derive(Debug)]
pub struct TrainOptions<'a> {
    /// The run folder.
    pub out: &'a Path,
    /// Go on from the folder's last checkpoint, rather than start in an empty folder.
    pub resume: bool,
    /// Once true, the run saves what is done and ends with [`RunError::Stopped`].
    pub stop: &'a AtomicBool,
    /// The processes that train together. All are given the same configuration and the same weights; the
    /// root alone writes the folder, and what is resumed all must be able to read.
    pub ranks: &'a dyn Collective,
    /// Whether what is learned is kept: checkpoints, and the model at the end. Without, steps are run for what they take.
    pub keeps: bool,
}

/// What a checkpoint keeps of a run besides weights and moments.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Progress {
    /// What is known of the tasks that the run began with; nothing of runs that began before it was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tasks: Option<TaskDigests>,
    before: EvalReport,
    /// The last step that was measured on the way.
    #[serde(default)]
    evaluated: usize,
    #[serde(default)]
    watch: WatchState,
    tokens: u64,
    #[serde(flatten)]
    draws: DrawState,
    /// Groups that wait to go on, in a file of their own.
    #[serde(skip)]
    paused: Vec<PausedRecord>,
    /// How micro-batches go through the model, where that was found by measuring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    micro_batches: Option<MeasuredChoice>,
    wall_s: f64,
}

/// What tells a run's tasks from others, by what is asked and tested.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct TaskDigests {
    training: String,
    held_out: String,
}

impl TaskDigests {
    /// Holds them to be what a run began with.
    fn check(&self, began_with: &Self, path: &Path) -> Result<(), RunError> {
        let pairs = [
            ("learn from", &self.training, &began_with.training),
            ("measure on", &self.held_out, &began_with.held_out),
        ];
        match pairs.into_iter().find(|(_, now, then)| now != then) {
            None => Ok(()),
            Some((purpose, ..)) => Err(RunError::TasksChanged {
                path: path.to_owned(),
                purpose,
            }),
        }
    }
}

/// A run between two steps.
struct Run<'a> {
    config: &'a RunConfig,
    policy: &'a Policy,
    out: &'a Path,
    ranks: &'a dyn Collective,
    /// The root's.
    folder: Option<RunFolder>,
    trainer: GrpoTrainer,
    /// How micro-batches go through the model by calculation.
    planned: MicroBatches,
    progress: Progress,
    /// The episodes of the next step, if they are sampled already.
    ahead: Option<Ahead>,
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

    /// Returns whether a measurement on the way is due that is not done yet. The last step's is that of
    /// the summary.
    fn owes_evaluation(&self, steps: usize) -> bool {
        let is_on_the_way = 0 < self.step && self.step < steps;
        is_on_the_way
            && is_due(self.step, self.config.eval.every)
            && self.progress.evaluated < self.step
    }

    fn save(&mut self) -> Result<(), RunError> {
        if self.saved == Some(self.step) {
            return Ok(());
        }
        self.progress.wall_s = self.wall_s();
        let Some(folder) = &self.folder else {
            self.saved = Some(self.step);
            return Ok(());
        };
        // What a checkpoint says is done must be in the log, whatever happens to the machine.
        folder.sync()?;
        let state = TrainState {
            step: self.step,
            seed: self.config.seed,
            extra: serde_json::to_value(&self.progress).map_err(std::io::Error::from)?,
        };
        save_checkpoint(
            self.out,
            &self.policy.decoder,
            self.trainer.optimizer(),
            self.trainer.critic(),
            &state,
            Some(&self.policy.source),
            |checkpoint| {
                self.policy.save_words(checkpoint)?;
                save_episodes(checkpoint, self.ahead.as_ref(), &self.progress.paused)
            },
        )?;
        prune_checkpoints(self.out, self.config.trainer.keep_checkpoints)?;
        self.saved = Some(self.step);
        Ok(())
    }

    /// Saves a run that ends, unless before its first step, when there is nothing to save, and waits
    /// until the root has.
    fn save_and_wait(&mut self) -> Result<(), RunError> {
        if self.step > 0 {
            self.save()?;
        }
        Ok(self.ranks.barrier("saving")?)
    }

    /// Goes back to before a step that is not to be learned from: when the run goes on, it is sampled
    /// again. Groups that waited are dropped, too, or they would bring about the same again.
    fn drop_step(&mut self, before: Progress) {
        self.progress = before;
        if !std::mem::take(&mut self.progress.paused).is_empty() {
            self.saved = None;
        }
        if let Some(ahead) = self.ahead.take() {
            self.progress.draws = ahead.before;
            self.saved = None;
        }
    }

    /// Tells what was done about the memory of a step's passes, remembers it, and returns what is logged
    /// of it.
    fn account_for_memory(
        &mut self,
        step: usize,
        observer: &mut Observer<'_>,
    ) -> Option<MemoryMetrics> {
        for change in self.trainer.take_memory_changes() {
            let message = change.to_string();
            observer(RunEvent::Memory {
                step,
                message: &message,
            });
        }
        let now = self.trainer.micro_batches();
        self.progress.micro_batches = MeasuredChoice::new(self.config, self.planned, now);
        let is_logged = self.config.trainer.memory_budget.is_some() || now != self.planned;
        is_logged.then(|| MemoryMetrics {
            peak: self.trainer.peak_memory(),
            micro_batch_tokens: now.micro_batch_tokens,
            recompute: now.recompute.into(),
        })
    }

    fn log(&mut self, row: &impl Serialize) -> Result<(), RunError> {
        self.folder
            .as_mut()
            .map_or(Ok(()), |folder| folder.log(row))
    }
}

/// Trains `policy` with GRPO and writes the run folder.
///
/// A run that was stopped, or killed, goes on from its last checkpoint to the same end: on a CPU, to
/// the same bytes, whatever the number of processes then and now.
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
    let run = options.out.file_name().unwrap_or_default();
    let run = run.to_string_lossy();
    let rank = i64::try_from(options.ranks.rank()).unwrap_or(i64::MAX);
    let _span = tracing::error_span!("run", %run, rank, seed = config.seed).entered();
    tracing::info!(
        model = config.model.path,
        steps = config.trainer.steps,
        "the run begins or goes on"
    );
    let mut state = None;
    let result = train_together(config, policy, workbench, options, &mut state, observer);
    match &result {
        Ok(summary) => tracing::info!(steps = summary.steps, "the run is done"),
        Err(error) => tracing::info!(%error, "the run ends here"),
    }
    if let Some(state) = state {
        state.end(&result);
    }
    if let Err(error) = &result
        && !error.is_stop()
    {
        // The others would wait for it.
        options.ranks.abort(&error.to_string());
    }
    result
}

fn train_together(
    config: &RunConfig,
    policy: &Policy,
    workbench: &Workbench,
    options: &TrainOptions<'_>,
    state: &mut Option<StateFile>,
    observer: &mut Observer<'_>,
) -> Result<Summary, RunError> {
    let (ranks, limit) = (options.ranks, config.trainer.max_processes);
    let found = ranks.world_size();
    if found > limit {
        return Err(RunError::TooManyProcesses { found, limit });
    }
    let mix = Mix::open(config)?;
    let held_out = evaluation_tasks(config)?;
    mix.check_held_out(&held_out)?;
    workbench.admit(config, mix.tasks().chain(held_out.tasks()))?;
    let mut engine = new_engine(config, policy)?;
    let tasks = TaskDigests {
        training: mix.digest(),
        held_out: held_out.digest(),
    };
    let mut run = begin(config, policy, options, tasks)?;
    *state = (run.folder.as_ref()).map(|folder| StateFile::begin(options.out, folder));
    // Ends with this.
    let _load = (run.folder.as_ref()).and_then(|_| LoadLog::start(options.out, workbench.clone()));
    check_alike(ranks, &policy.decoder)?;
    let measure = |engine: &mut Engine, step: usize, observer: &mut Observer<'_>| {
        let _span = part_of_run("evaluate", step, options.out).entered();
        let stop = options.stop;
        let report = evaluate(
            config, policy, workbench, engine, &held_out, stop, ranks, observer,
        )?;
        tracing::info!(
            step,
            pass_at_1 = report.pass_at_1,
            "held-out tasks are measured"
        );
        observer(RunEvent::Evaluated {
            step,
            report: &report,
            environments: &by_environment(config, &report),
        });
        Ok::<EvalReport, RunError>(report)
    };
    if run.saved.is_none() {
        run.progress.before = match measure(&mut engine, 0, observer) {
            Err(error) => return Err(give_up(&mut run, error)?),
            Ok(report) => report,
        };
    }
    let collector = workbench.collector(config.rollout.temperature);
    collector.sampling.check_trainable()?;
    let mut draws = TaskDraws {
        config,
        policy,
        workbench,
        collector,
        stop: options.stop,
        state: DrawState {
            drawn: run.progress.draws.drawn,
            tasks_drawn: run.progress.draws.tasks_drawn.clone(),
            pass_rates: (mix.needs_pass_rates())
                .then(|| run.progress.draws.pass_rates.clone().unwrap_or_default()),
        },
        mix,
        paused: Vec::new(),
    };
    let waiting = run.progress.paused.len();
    if waiting > 0 && found > 1 {
        return Err(RunError::PausedTogether {
            path: options.out.to_owned(),
            groups: waiting,
        });
    }
    if let Err(error) = draws.restore(&run.progress.paused) {
        return Err(give_up(&mut run, error)?);
    }
    let sampler = (config.trainer.async_level > 0)
        .then(Sampler::new)
        .transpose()?;
    let steps = usize::try_from(config.trainer.steps).unwrap_or(usize::MAX);
    loop {
        if run.owes_evaluation(steps) {
            let report = match measure(&mut engine, run.step, observer) {
                Err(error) => return Err(give_up(&mut run, error)?),
                Ok(report) => report,
            };
            run.log(&EvaluationRow {
                step: run.step,
                pass_at_1: report.pass_at_1,
                ci95: report.ci95,
                environments: by_environment(config, &report)
                    .into_iter()
                    .map(|(name, report)| (format!("eval/pass_at_1/{name}"), report.pass_at_1))
                    .collect(),
            })?;
            run.progress.evaluated = run.step;
        }
        let is_last = run.step >= steps;
        if is_last || (run.step > 0 && is_due(run.step, config.trainer.save_every)) {
            check_alike(ranks, &policy.decoder)?;
            if options.keeps {
                run.save()?;
            }
        }
        if is_last {
            break;
        }
        let is_asked = options.stop.load(Ordering::Relaxed);
        match ranks.any("asking whether to stop", is_asked) {
            Ok(false) => {}
            Ok(true) => return Err(stop(&mut run)?),
            Err(error) => return Err(give_up(&mut run, error.into())?),
        }
        let step = run.step + 1;
        let _span = part_of_run("step", step, options.out).entered();
        let step_started = Instant::now();
        // What is sampled already stays in the run until it is learned from: it cannot be sampled again.
        let mut episodes = match &run.ahead {
            Some(ahead) => ahead.episodes.clone(),
            None => match draws.step(&mut engine, Place::of(step), ranks) {
                Err(error) => return Err(give_up(&mut run, error)?),
                Ok(episodes) => episodes,
            },
        };
        let progress = run.progress.clone();
        let stats = episodes.stats;
        run.progress.tokens += stats.sampled_tokens;
        if run.ahead.is_none() {
            run.progress.draws = draws.state.clone();
            run.progress.paused = draws.records();
        }
        if ranks.is_root() {
            let groups = episodes.groups.iter().chain(&episodes.set_aside);
            store(options.out, step, groups)?;
        }
        if config.trainer.shuffle_rewards {
            let seed = derive_seed(config.seed, "shuffle", step as u64, "");
            shuffle_rewards(&mut episodes.groups, seed);
        }
        let episode_metrics = EpisodeMetrics::new(&episodes.groups);
        let is_flat = !(episodes.groups.iter()).any(|group| draws.is_informative(group));
        let observed = observed(&episodes.groups, is_flat, &episode_metrics);
        let watch = &config.watch;
        let mut found = run.progress.watch.before_update(watch, observed);
        if let Some(anomaly) = stopping(&found) {
            run.drop_step(progress);
            return Err(end(&mut run, step, anomaly)?);
        }
        let update = if found.iter().any(|found| found.response == Response::Skip) {
            Update::none(run.trainer.skip(&episodes.groups)?)
        } else {
            let next = (sampler.as_ref()).filter(|_| step < steps);
            match update(&mut run, &mut draws, &mut engine, next, &episodes.groups) {
                Ok(update) => update,
                Err(error) => {
                    if error.is_refusal() {
                        run.drop_step(progress);
                    } else {
                        run.progress = progress;
                    }
                    if error.is_stop() {
                        return Err(stop(&mut run)?);
                    }
                    if run.step > 0 {
                        run.save()?;
                    }
                    return Err(error);
                }
            }
        };
        let metrics = update.metrics;
        found.extend(update.refused);
        // Of tasks drawn behind this step's nothing is known of before it is done.
        run.ahead = update.ahead.map(|episodes| {
            run.progress.paused = draws.records();
            let before = std::mem::replace(&mut run.progress.draws, draws.state.clone());
            Ahead { episodes, before }
        });
        run.step = step;
        let memory = run.account_for_memory(step, observer);
        let max_drift = config.trainer.max_kl_sample_train;
        found.extend(run.progress.watch.after_update(watch, max_drift, &metrics));
        let elapsed = step_started.elapsed();
        tracing::info!(
            reward = metrics.reward,
            tokens_per_second = tokens_per_second(stats),
            seconds = elapsed.as_secs_f64(),
            "a step is done"
        );
        let row = MetricsRow {
            step,
            metrics,
            episodes: episode_metrics,
            environments: environment_metrics(config.environments.keys(), &episodes.groups),
            memory,
            anomalies: found.iter().map(|found| found.kind).collect(),
            set_aside: episodes.set_aside.len(),
            staleness: (sampler.is_some() || config.rollout.max_step_tokens.is_some())
                .then(|| staleness(&episodes.groups, step)),
            paused: config.rollout.max_step_tokens.map(|_| draws.paused.len()),
            num_tokens: run.progress.tokens,
            step_time: elapsed.as_secs_f64(),
            generate_time: stats.seconds,
            update_time: update.seconds,
            tokens_per_second: tokens_per_second(stats),
        };
        run.log(&row)?;
        observer(RunEvent::Step {
            step,
            metrics: &row.metrics,
            tokens_per_second: row.tokens_per_second,
            elapsed,
        });
        for anomaly in found.iter().filter(|found| found.is_new) {
            observer(RunEvent::Anomaly {
                step,
                message: &anomaly.message,
            });
        }
        if let Some(anomaly) = stopping(&found) {
            return Err(end(&mut run, step, anomaly)?);
        }
    }
    if let Some(folder) = run.folder.as_ref().filter(|_| options.keeps) {
        let model = folder.model();
        // What a run left that was killed behind this point.
        if model.exists() {
            fs::remove_dir_all(&model)?;
        }
        policy.save(&model)?;
    }
    let after = match measure(&mut engine, run.step, observer) {
        Err(error) => return Err(give_up(&mut run, error)?),
        Ok(report) => report,
    };
    let before = &run.progress.before;
    let (eval, seed) = (&config.eval, config.seed);
    let environments = by_environment(config, before)
        .into_iter()
        .zip(by_environment(config, &after))
        .map(|((name, before), (_, after))| (name, Change::new(&before, &after, eval, seed)));
    let summary = Summary {
        change: Change::new(before, &after, eval, seed),
        environments: environments.collect(),
        steps: run.step,
        wall_s: run.wall_s(),
        tokens: run.progress.tokens,
        seed: config.seed,
    };
    if let Some(folder) = &run.folder {
        folder.write_summary(&summary)?;
    }
    // Nobody leaves before everything is written.
    ranks.barrier("finishing")?;
    Ok(summary)
}

/// Returns the span of a step or a measurement, a trace of its own that is linked to the run: one trace of a whole run
/// would be more than its readers can show, and would be seen only when it has ended.
fn part_of_run(kind: &'static str, step: usize, out: &Path) -> Span {
    let run = out.file_name().unwrap_or_default().to_string_lossy();
    let step = i64::try_from(step).unwrap_or(i64::MAX);
    let span = match kind {
        "step" => tracing::info_span!(parent: None, "step", %run, step),
        _ => tracing::info_span!(parent: None, "evaluate", %run, step),
    };
    span.follows_from(Span::current());
    span
}

/// Opens the run folder and returns the run before its first or its next step.
fn begin<'a>(
    config: &'a RunConfig,
    policy: &'a Policy,
    options: &TrainOptions<'a>,
    tasks: TaskDigests,
) -> Result<Run<'a>, RunError> {
    let out = options.out;
    let lock = (options.ranks.is_root())
        .then(|| FolderLock::take(out))
        .transpose()?;
    let mut optimizer = AdamW::new(&policy.decoder, optimizer_config(config))?;
    let mut critic = critic(config, policy);
    let checkpoint = if options.resume {
        latest(out, options.ranks)?
    } else {
        None
    };
    let restored = match &checkpoint {
        Some(path) => {
            let state = load_checkpoint(path, &policy.decoder, &mut optimizer, critic.as_mut())
                .map_err(|source| RunError::Checkpoint {
                    path: path.clone(),
                    source: Box::new(source),
                })?;
            if state.seed != config.seed {
                return Err(RunError::SeedChanged {
                    path: out.to_owned(),
                    found: config.seed,
                    expected: state.seed,
                });
            }
            let progress =
                Progress::deserialize(&state.extra).map_err(|source| RunError::Progress {
                    path: path.clone(),
                    source,
                })?;
            if let Some(began_with) = &progress.tasks {
                tasks.check(began_with, out)?;
            }
            let (ahead, paused) = load_episodes(path)?;
            let progress = Progress { paused, ..progress };
            Some((state.step, progress, ahead))
        }
        // A run that was stopped before its first checkpoint starts again.
        None => None,
    };
    let step = restored.as_ref().map(|(step, ..)| *step);
    let fresh = || {
        let tasks = Some(tasks);
        (
            Progress {
                tasks,
                ..Progress::default()
            },
            None,
        )
    };
    let (progress, ahead) = restored.map_or_else(fresh, |(_, progress, ahead)| (progress, ahead));
    let run_toml = config.to_toml()?;
    let folder = match lock {
        None => None,
        Some(lock) if options.resume => {
            let is_done = step.is_some_and(|step| step as u64 >= config.trainer.steps);
            if is_done && RunFolder::is_finished(out) {
                return Err(RunError::Finished {
                    path: out.to_owned(),
                });
            }
            let (step, evaluated) = (step.unwrap_or(0), progress.evaluated);
            let log = &config.log;
            let folder = RunFolder::reopen(out, lock, step, evaluated, &run_toml, log)?;
            Some(folder)
        }
        Some(lock) => Some(RunFolder::create(out, lock, &run_toml, &config.log)?),
    };
    let mut trainer = GrpoTrainer::new(grpo_config(config, policy)?, schedule(config), optimizer)
        .with_critic(critic)
        .with_memory_guard(memory_guard(config, policy))
        .resume_after(step.unwrap_or(0));
    let planned = trainer.micro_batches();
    let found = progress.micro_batches.as_ref();
    if let Some(found) = found.and_then(|found| found.of(config, planned)) {
        trainer.set_micro_batches(found);
    }
    Ok(Run {
        config,
        policy,
        out,
        ranks: options.ranks,
        folder,
        trainer,
        planned,
        wall_before: progress.wall_s,
        progress,
        ahead,
        step: step.unwrap_or(0),
        saved: step,
        started: Instant::now(),
    })
}

/// What came of a step's episodes.
struct Update {
    metrics: StepMetrics,
    /// Why nothing was learned from them, if that is so.
    refused: Option<Anomaly>,
    /// The next step's, if they were sampled meanwhile.
    ahead: Option<StepEpisodes>,
    /// What computing and applying the gradient took.
    seconds: f64,
}

impl Update {
    fn none(metrics: StepMetrics) -> Self {
        Self {
            metrics,
            refused: None,
            ahead: None,
            seconds: 0.0,
        }
    }
}

/// Learns from a step's episodes. With a sampler those of the next step are sampled meanwhile, before the
/// weights move.
fn update(
    run: &mut Run<'_>,
    draws: &mut TaskDraws<'_>,
    engine: &mut Engine,
    sampler: Option<&Sampler>,
    groups: &[RolloutGroup],
) -> Result<Update, RunError> {
    let _span = tracing::info_span!("update").entered();
    let (trainer, watch, ranks) = (&mut run.trainer, &mut run.progress.watch, run.ranks);
    let (decoder, config) = (&*run.policy.decoder, &run.config.watch);
    let (step, path) = (run.step + 1, run.out);
    let mut refuse = |error| match watch.of_refusal(config, &error) {
        Some(anomaly) if anomaly.response == Response::Stop => Err(RunError::Anomaly {
            step,
            message: anomaly.message,
            path: path.to_owned(),
        }),
        Some(anomaly) => Ok(anomaly),
        None => Err(RunError::from(error)),
    };
    let mut seconds = 0.0;
    let mut gradient = || {
        let started = Instant::now();
        let pending = trainer.gradient(decoder, groups, ranks);
        seconds = started.elapsed().as_secs_f64();
        pending
    };
    let next = Place::ahead_of(run.step + 2);
    let (pending, sampled) = match sampler {
        Some(sampler) => {
            let (pending, sampled) = sampler.overlap(draws, engine, next, ranks, gradient);
            (pending, Some(sampled))
        }
        None => (gradient(), None),
    };
    let pending = match pending {
        Ok(pending) => Ok(pending),
        Err(error) => Err(refuse(error)?),
    };
    let ahead = sampled
        .map(|sampled| sampled.complete(draws, engine, next, ranks))
        .transpose()?;
    let started = Instant::now();
    let applied = match pending {
        Ok(pending) => match trainer.apply(decoder, pending, groups, ranks) {
            Ok(metrics) => Ok(metrics),
            Err(error) => Err(refuse(error)?),
        },
        Err(anomaly) => Err(anomaly),
    };
    let (metrics, refused) = match applied {
        Ok(metrics) => (metrics, None),
        Err(anomaly) => (trainer.skip(groups)?, Some(anomaly)),
    };
    Ok(Update {
        metrics,
        refused,
        ahead,
        seconds: seconds + started.elapsed().as_secs_f64(),
    })
}

/// Returns the mean number of steps between the policy that sampled an episode and the one that learns
/// from it.
fn staleness(groups: &[RolloutGroup], step: usize) -> f64 {
    let episodes = || groups.iter().flat_map(|group| &group.trajectories);
    let steps = episodes().map(|episode| (step as u64).saturating_sub(episode.policy_step));
    steps.sum::<u64>() as f64 / episodes().count().max(1) as f64
}

/// Returns the checkpoint that the root finds to be the last.
fn latest(out: &Path, ranks: &dyn Collective) -> Result<Option<PathBuf>, RunError> {
    let own = if ranks.is_root() {
        remove_partial_checkpoints(out)?;
        checkpoint_steps(out)?.pop()
    } else {
        None
    };
    let steps = gather(ranks, "choosing a checkpoint", Ok(own))?;
    let step = steps.into_iter().next().flatten();
    Ok(step.map(|step| checkpoint_path(out, step)))
}

/// Ends a run that cannot go on: asked to stop, or left by another process, it is saved as it was before
/// the step.
fn give_up(run: &mut Run<'_>, error: RunError) -> Result<RunError, RunError> {
    if error.is_stop() {
        return stop(run);
    }
    if error.is_of_other_process() && run.step > 0 {
        run.save()?;
    }
    Ok(error)
}

/// Saves a run that is asked to stop, and returns the error that says so. Before its first step there
/// is nothing to save.
fn stop(run: &mut Run<'_>) -> Result<RunError, RunError> {
    run.save_and_wait()?;
    Ok(RunError::Stopped {
        step: run.step,
        path: run.out.to_owned(),
    })
}

fn stopping(found: &[Anomaly]) -> Option<&Anomaly> {
    found.iter().find(|found| found.response == Response::Stop)
}

/// Saves a run that ends at a step which looks wrong, and returns the error that says so.
fn end(run: &mut Run<'_>, step: usize, anomaly: &Anomaly) -> Result<RunError, RunError> {
    run.save_and_wait()?;
    Ok(RunError::Anomaly {
        step,
        message: anomaly.message.clone(),
        path: run.out.to_owned(),
    })
}

/// Returns what is known of a step before its update.
fn observed(groups: &[RolloutGroup], is_flat: bool, metrics: &EpisodeMetrics) -> Observed {
    let episodes = || groups.iter().flat_map(RolloutGroup::episodes);
    let rewards: Vec<f64> = episodes().filter_map(|episode| episode.reward).collect();
    let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
    Observed {
        truncated: metrics.clipped_ratio,
        unscorable: metrics.unscorable as f64 / episodes().count().max(1) as f64,
        is_flat,
        reward: (!rewards.is_empty()).then_some(mean),
    }
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
