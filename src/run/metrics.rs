//! What a run logs: the lines of `metrics.jsonl`.

use std::collections::BTreeMap;

use serde::Serialize;

use super::mix::environment_of;
use super::watch::Kind;
use crate::rollout::RolloutGroup;
use crate::trainer::StepMetrics;
use crate::trajectory::{RunEnding, Status, Trajectory, Turn};

/// One line of `metrics.jsonl`.
#[derive(Debug, Serialize)]
pub(super) struct MetricsRow {
    pub(super) step: usize,
    #[serde(flatten)]
    pub(super) metrics: StepMetrics,
    #[serde(flatten)]
    pub(super) episodes: EpisodeMetrics,
    /// What is told of each environment.
    #[serde(flatten)]
    pub(super) environments: BTreeMap<String, f64>,
    #[serde(flatten)]
    pub(super) memory: Option<MemoryMetrics>,
    /// What looks wrong in it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) anomalies: Vec<Kind>,
    /// Groups that dynamic sampling replaced.
    #[serde(rename = "episodes/groups_set_aside")]
    pub(super) set_aside: usize,
    /// Mean steps from an episode's policy to the one that learns from it, where steps overlap.
    #[serde(rename = "episodes/staleness", skip_serializing_if = "Option::is_none")]
    pub(super) staleness: Option<f64>,
    /// Groups that wait to go on, where episodes are paused.
    #[serde(
        rename = "episodes/groups_paused",
        skip_serializing_if = "Option::is_none"
    )]
    pub(super) paused: Option<usize>,
    pub(super) num_tokens: u64,
    pub(super) step_time: f64,
    pub(super) generate_time: f64,
    pub(super) update_time: f64,
    pub(super) tokens_per_second: f64,
}

/// How a step kept to its memory.
#[derive(Debug, Serialize)]
pub(super) struct MemoryMetrics {
    /// The most that the process held in a pass, in bytes; none where it is not measured.
    #[serde(rename = "memory/peak_bytes", skip_serializing_if = "Option::is_none")]
    pub(super) peak: Option<u64>,
    #[serde(rename = "memory/micro_batch_tokens")]
    pub(super) micro_batch_tokens: usize,
    /// 1 where layers are run again.
    #[serde(rename = "memory/recompute")]
    pub(super) recompute: u8,
}

/// The line of an evaluation within a run.
#[derive(Debug, Serialize)]
pub(super) struct EvaluationRow {
    pub(super) step: usize,
    #[serde(rename = "eval/pass_at_1")]
    pub(super) pass_at_1: f64,
    #[serde(rename = "eval/ci95")]
    pub(super) ci95: [f64; 2],
    /// The same of each environment.
    #[serde(flatten)]
    pub(super) environments: BTreeMap<String, f64>,
}

/// Returns what is told of each environment that a step has groups of: how many, their mean reward, and
/// the share of their episodes that passed.
pub(super) fn environment_metrics<'a>(
    names: impl Iterator<Item = &'a String>,
    groups: &[RolloutGroup],
) -> BTreeMap<String, f64> {
    let mut metrics = BTreeMap::new();
    for name in names {
        let own: Vec<&RolloutGroup> = (groups.iter())
            .filter(|group| environment_of(&group.task_id) == Some(name))
            .collect();
        if own.is_empty() {
            continue;
        }
        metrics.insert(format!("groups/{name}"), own.len() as f64);
        if let Some(reward) = mean_of_groups(&own, &|episode| episode.reward) {
            metrics.insert(format!("reward/{name}"), reward);
        }
        if let Some(rate) = mean_of_groups(&own, &passed) {
            metrics.insert(format!("pass_rate/{name}"), rate);
        }
    }
    metrics
}

/// Returns the mean of the groups' means, as the trainer's `reward` is.
fn mean_of_groups(
    groups: &[&RolloutGroup],
    value: &dyn Fn(&Trajectory) -> Option<f64>,
) -> Option<f64> {
    let mean = |values: &[f64]| {
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let means: Vec<f64> = (groups.iter())
        .filter_map(|group| mean(&group.episodes().filter_map(value).collect::<Vec<f64>>()))
        .collect();
    mean(&means)
}

/// Returns 1 for an episode that passed and 0 for one that did not.
fn passed(episode: &Trajectory) -> Option<f64> {
    episode.passed.map(|passed| f64::from(u8::from(passed)))
}

/// What the episodes of a step were like; names as in TRL.
#[derive(Debug, Default, Serialize)]
pub(super) struct EpisodeMetrics {
    #[serde(rename = "completions/mean_length")]
    pub(super) mean_length: f64,
    #[serde(rename = "completions/min_length")]
    pub(super) min_length: usize,
    #[serde(rename = "completions/max_length")]
    pub(super) max_length: usize,
    #[serde(rename = "completions/clipped_ratio")]
    pub(super) clipped_ratio: f64,
    #[serde(rename = "tools/call_frequency")]
    pub(super) call_frequency: f64,
    #[serde(rename = "tools/failure_frequency")]
    pub(super) failure_frequency: f64,
    /// Mean of each part of the reward.
    #[serde(flatten)]
    pub(super) rewards: BTreeMap<String, f64>,
    /// Mean over the groups of the share of their episodes that passed; none without a scored one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pass_rate: Option<f64>,
    #[serde(rename = "episodes/count")]
    pub(super) count: usize,
    #[serde(flatten)]
    pub(super) endings: Endings,
    #[serde(rename = "episodes/turns")]
    pub(super) turns: f64,
    #[serde(rename = "episodes/unscorable")]
    pub(super) unscorable: usize,
    #[serde(rename = "sandbox/tool_seconds")]
    pub(super) tool_seconds: f64,
    #[serde(rename = "sandbox/grade_seconds")]
    pub(super) grade_seconds: f64,
    /// Burnt by all episodes.
    #[serde(rename = "sandbox/fuel")]
    pub(super) fuel: u64,
    /// Of steps whose episodes ran something.
    #[serde(flatten)]
    runs: Option<RunMetrics>,
    /// Of steps with tasks in actors.
    #[serde(flatten)]
    pub(super) actors: Option<ActorMetrics>,
}

/// How the programs and commands of a step's episodes ended.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct RunMetrics {
    #[serde(rename = "sandbox/runs")]
    count: usize,
    /// By itself, with 0.
    #[serde(rename = "sandbox/endings/success")]
    success: usize,
    /// By itself, with another code: an exception, mostly.
    #[serde(rename = "sandbox/endings/error")]
    error: usize,
    #[serde(rename = "sandbox/endings/out_of_fuel")]
    out_of_fuel: usize,
    #[serde(rename = "sandbox/endings/timed_out")]
    timed_out: usize,
    #[serde(rename = "sandbox/endings/out_of_memory")]
    out_of_memory: usize,
    #[serde(rename = "sandbox/endings/killed")]
    killed: usize,
    #[serde(rename = "sandbox/endings/trapped")]
    trapped: usize,
}

impl RunMetrics {
    fn new(rows: &[&Trajectory]) -> Option<Self> {
        let mut metrics = Self::default();
        let turns = rows.iter().flat_map(|row| &row.turns);
        for run in turns.flat_map(|turn| &turn.runs) {
            metrics.count += 1;
            *match run.ending {
                RunEnding::Exited { code: 0 } => &mut metrics.success,
                RunEnding::Exited { .. } => &mut metrics.error,
                RunEnding::OutOfFuel => &mut metrics.out_of_fuel,
                RunEnding::TimedOut => &mut metrics.timed_out,
                RunEnding::OutOfMemory => &mut metrics.out_of_memory,
                RunEnding::Killed { .. } => &mut metrics.killed,
                RunEnding::Trapped { .. } => &mut metrics.trapped,
            } += 1;
        }
        (metrics.count > 0).then_some(metrics)
    }
}

/// How the episodes of a step ended, in episodes.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Endings {
    #[serde(rename = "endings/finished")]
    finished: usize,
    #[serde(rename = "endings/truncated")]
    truncated: usize,
    #[serde(rename = "endings/turn_limit")]
    turn_limit: usize,
    #[serde(rename = "endings/failed")]
    failed: usize,
}

impl Endings {
    fn new(episodes: &[&Trajectory]) -> Self {
        let mut endings = Self::default();
        for episode in episodes {
            *match episode.status {
                Status::Finished => &mut endings.finished,
                Status::Truncated => &mut endings.truncated,
                Status::TurnLimit => &mut endings.turn_limit,
                Status::Failed { .. } => &mut endings.failed,
            } += 1;
        }
        endings
    }
}

/// What a step's actors cost, and how they ended.
#[derive(Debug, Serialize)]
pub(super) struct ActorMetrics {
    /// Until the actors of all episodes were there.
    #[serde(rename = "actor/start_seconds")]
    start_seconds: f64,
    /// Episodes that had one.
    #[serde(rename = "actor/started")]
    started: usize,
    /// Commands that took too long.
    #[serde(rename = "actor/commands_timed_out")]
    commands_timed_out: u32,
    /// Actors that the policy brought down.
    #[serde(rename = "actor/lost")]
    lost: u32,
}

impl ActorMetrics {
    fn new(episodes: &[&Trajectory]) -> Option<Self> {
        let usage = || episodes.iter().map(|episode| &episode.usage);
        let metrics = Self {
            start_seconds: usage().map(|usage| usage.start_seconds).sum(),
            started: usage().filter(|usage| usage.start_seconds > 0.0).count(),
            commands_timed_out: usage().map(|usage| usage.commands_timed_out).sum(),
            lost: usage().map(|usage| usage.actors_lost).sum(),
        };
        (metrics.started > 0).then_some(metrics)
    }
}

impl EpisodeMetrics {
    pub(super) fn new(groups: &[RolloutGroup]) -> Self {
        let rows: Vec<&Trajectory> = groups
            .iter()
            .flat_map(|group| &group.trajectories)
            .collect();
        let episodes: Vec<&Trajectory> = groups.iter().flat_map(RolloutGroup::episodes).collect();
        if episodes.is_empty() {
            return Self::default();
        }
        let count = rows.len() as f64;
        let sum = |episodes: &[&Trajectory], value: &dyn Fn(&Trajectory) -> f64| -> f64 {
            episodes.iter().map(|episode| value(episode)).sum()
        };
        let lengths: Vec<usize> = rows.iter().map(|row| row.trace.sampled_len()).collect();
        let turns = |value: &dyn Fn(&Turn) -> u32| -> f64 {
            rows.iter()
                .flat_map(|row| &row.turns)
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
            clipped_ratio: sum(&rows, &|row| f64::from(u8::from(row.is_truncated()))) / count,
            call_frequency: calls / episodes.len() as f64,
            failure_frequency: turns(&|turn| turn.tool_failures) / calls.max(1.0),
            rewards,
            pass_rate: mean_of_groups(&groups.iter().collect::<Vec<_>>(), &passed),
            count: episodes.len(),
            endings: Endings::new(&episodes),
            turns: sum(&rows, &|row| row.turns.len() as f64) / episodes.len() as f64,
            unscorable: episodes
                .iter()
                .filter(|episode| episode.reward.is_none())
                .count(),
            tool_seconds: sum(&episodes, &|episode| episode.usage.tool_seconds),
            grade_seconds: sum(&episodes, &|episode| episode.usage.grade_seconds),
            fuel: (episodes.iter())
                .map(|episode| episode.usage.fuel)
                .fold(0, u64::saturating_add),
            runs: RunMetrics::new(&rows),
            actors: ActorMetrics::new(&episodes),
        }
    }
}
