//! GRPO from the first measurement to the last.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use super::evaluate::evaluate;
use super::folder::RunFolder;
use super::policy::Policy;
use super::summary::{Difference, Measured, Summary};
use super::workbench::{Workbench, check_held_out, evaluation_tasks, training_tasks};
use super::{Observer, RunError, RunEvent};
use crate::config::{LossType, RunConfig, ScaleRewards};
use crate::engine::{Engine, EngineConfig, PrefixCaching};
use crate::rollout::{CollectionSeed, Collector, CollectorStats, RolloutGroup, derive_seed};
use crate::trainer::{
    AdamW, AdamWConfig, AdvantageConfig, Aggregation, GrpoConfig, GrpoTrainer, LossConfig,
    LrSchedule, PassConfig, ScheduleKind, StepMetrics, TrainState, prune_checkpoints,
    save_checkpoint, shuffle_rewards,
};
use crate::trajectory::{Status, StepWriter, Trajectory};

/// Parameters above which layers are run again in the backward pass instead of kept: small models
/// fit without, and save a third of the arithmetic.
const RECOMPUTE_ABOVE: usize = 20_000_000;

/// One line of `metrics.jsonl`.
#[derive(Debug, Serialize)]
struct MetricsRow {
    step: usize,
    #[serde(flatten)]
    metrics: StepMetrics,
    #[serde(flatten)]
    episodes: EpisodeMetrics,
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

/// Trains `policy` with GRPO and writes the run folder at `out`.
///
/// # Errors
///
/// Fails where the tasks, the folder or the model cannot be used, or where a step cannot be done;
/// what was written until then stays.
pub fn train(
    config: &RunConfig,
    policy: &Policy,
    workbench: &Workbench,
    out: &Path,
    observer: &mut Observer<'_>,
) -> Result<Summary, RunError> {
    let started = Instant::now();
    let tasks = training_tasks(config)?;
    let held_out = evaluation_tasks(config)?;
    check_held_out(&tasks, &held_out)?;
    let mut folder = RunFolder::create(out, &config.to_toml()?)?;
    let mut engine = new_engine(config, policy)?;
    let mut trainer = GrpoTrainer::new(
        grpo_config(config, policy),
        schedule(config),
        AdamW::new(&policy.decoder, optimizer_config(config))?,
    );

    let before = evaluate(config, policy, workbench, &mut engine, &held_out, observer)?;
    observer(RunEvent::Evaluated {
        step: 0,
        report: &before,
    });
    let collector_config = workbench.collector(config.rollout.temperature);
    collector_config.sampling.check_trainable()?;
    let steps = usize::try_from(config.trainer.steps).unwrap_or(usize::MAX);
    let mut tokens = 0;
    for step in 1..=steps {
        let step_started = Instant::now();
        let batch = tasks.batch(config.seed, step as u64 - 1, config.rollout.groups_per_step);
        let seed = CollectionSeed {
            run: config.seed,
            purpose: "train",
            step: step as u64,
        };
        let requests = batch
            .into_iter()
            .map(|task| workbench.group(task, config.rollout.group_size, seed))
            .collect();
        let mut collector = Collector::new(
            &mut engine,
            &policy.tokenizer,
            &policy.template,
            &collector_config,
        );
        let (mut groups, stats) = collector.collect(requests, seed, &mut |_| {})?;
        tokens += stats.sampled_tokens;
        check_scored(&groups)?;
        store(out, step, &groups)?;
        if config.trainer.shuffle_rewards {
            let seed = derive_seed(config.seed, "shuffle", step as u64, "");
            shuffle_rewards(&mut groups, seed);
        }
        let update_started = Instant::now();
        let metrics = trainer.step(&policy.decoder, &groups)?;
        let elapsed = step_started.elapsed();
        let row = MetricsRow {
            step,
            metrics,
            episodes: EpisodeMetrics::new(&groups),
            num_tokens: tokens,
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
            let report = evaluate(config, policy, workbench, &mut engine, &held_out, observer)?;
            folder.log(&EvaluationRow {
                step,
                pass_at_1: report.pass_at_1,
                ci95: report.ci95,
            })?;
            observer(RunEvent::Evaluated {
                step,
                report: &report,
            });
        }
        if is_due(step, config.trainer.save_every) || step == steps {
            let state = TrainState {
                step,
                seed: config.seed,
                extra: serde_json::Value::Null,
            };
            let checkpoint = save_checkpoint(
                out,
                &policy.decoder,
                trainer.optimizer(),
                &state,
                Some(&policy.source),
            )?;
            policy.save_words(&checkpoint)?;
            prune_checkpoints(out, config.trainer.keep_checkpoints)?;
        }
    }
    policy.save(&folder.model())?;
    let after = evaluate(config, policy, workbench, &mut engine, &held_out, observer)?;
    observer(RunEvent::Evaluated {
        step: steps,
        report: &after,
    });
    let difference = after
        .difference(&before, config.seed)
        .map(|difference| Difference {
            pass_at_1: difference.pass_at_1,
            ci95: difference.ci95,
        });
    let summary = Summary {
        before: Measured::new(&before, config.eval.samples),
        after: Measured::new(&after, config.eval.samples),
        difference,
        steps,
        wall_s: started.elapsed().as_secs_f64(),
        tokens,
        seed: config.seed,
    };
    folder.write_summary(&summary)?;
    Ok(summary)
}

/// Writes the episodes of a step.
fn store(out: &Path, step: usize, groups: &[RolloutGroup]) -> Result<(), RunError> {
    let mut writer = StepWriter::create(out, step as u64)?;
    for trajectory in groups.iter().flat_map(|group| &group.trajectories) {
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

/// Returns whether layers are run again in the backward pass instead of kept.
pub(super) fn recomputes(policy: &Policy) -> bool {
    policy.decoder.parameter_count() > RECOMPUTE_ABOVE
}

fn grpo_config(config: &RunConfig, policy: &Policy) -> GrpoConfig {
    let trainer = &config.trainer;
    GrpoConfig {
        advantage: AdvantageConfig {
            scale_by_std: trainer.scale_rewards == ScaleRewards::Group,
            ..AdvantageConfig::default()
        },
        loss: LossConfig {
            aggregation: match trainer.loss {
                LossType::Grpo => Aggregation::Grpo,
                LossType::Dapo => Aggregation::Dapo,
                LossType::DrGrpo => Aggregation::DrGrpo,
            },
            clip_low: trainer.clip_low,
            clip_high: trainer.clip_high,
            kl_coef: trainer.beta,
            max_completion_length: config.rollout.max_total_tokens,
            ..LossConfig::default()
        },
        pass: PassConfig {
            temperature: config.rollout.temperature,
            recompute: recomputes(policy),
        },
        micro_batch_tokens: trainer.micro_batch_tokens,
        iterations: trainer.num_iterations,
        mask_truncated: trainer.mask_truncated,
    }
}

fn schedule(config: &RunConfig) -> LrSchedule {
    LrSchedule {
        learning_rate: config.trainer.learning_rate,
        warmup_steps: usize::try_from(config.trainer.warmup_steps).unwrap_or(usize::MAX),
        total_steps: usize::try_from(config.trainer.steps).unwrap_or(usize::MAX),
        kind: ScheduleKind::Constant,
    }
}

pub(super) fn optimizer_config(config: &RunConfig) -> AdamWConfig {
    let trainer = &config.trainer;
    AdamWConfig {
        beta1: trainer.adam_beta1,
        beta2: trainer.adam_beta2,
        eps: trainer.adam_epsilon,
        weight_decay: trainer.weight_decay,
        max_grad_norm: Some(trainer.max_grad_norm),
    }
}
