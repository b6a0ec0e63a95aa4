//! Rejection sampling: a run's own episodes, those that did well, to imitate.
//!
//! What is learned from is what was sampled: the stored ids with their loss mask, never the text again.
//! It is the step of RAFT (arXiv:2304.06767), of rejection-sampling fine-tuning (arXiv:2308.01825) and,
//! done round after round, of expert iteration.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use indexmap::IndexMap;
use rand::SeedableRng as _;
use rand::seq::SliceRandom as _;
use rand_chacha::ChaCha8Rng;

use super::sft::check_length;
use super::{Policy, RunError};
use crate::config::RunConfig;
use crate::engine::Tokenizer;
use crate::rollout::derive_seed;
use crate::trainer::latest_checkpoint;
use crate::trajectory::{TokenTrace, Trajectory, read_step, step_path, steps};

/// Which episodes are imitated.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RejectionSampling {
    /// Those with at least this reward; `None` for those that passed.
    pub min_reward: Option<f64>,
    /// At most so many of each task; `None` for all.
    pub max_per_task: Option<usize>,
    /// Which of a task's, where there are more.
    pub pick: Pick,
    /// Seeds a random pick.
    pub seed: u64,
}

/// Which of a task's episodes are kept where there are too many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pick {
    /// Those with the fewest sampled tokens.
    #[default]
    Shortest,
    /// Any, by the seed and the task.
    Random,
}

/// What an episode sampled: one row, or several of an agent's.
type Rows = Vec<TokenTrace>;

/// Episodes to imitate, and what became of the others.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Accepted {
    /// Exactly the ids that were fed and sampled, with the mask of those that were sampled.
    pub traces: Vec<TokenTrace>,
    /// Episodes that those are of.
    pub kept: usize,
    /// Episodes that were looked at.
    pub episodes: usize,
    /// Tasks that those are of.
    pub tasks: usize,
    /// Tasks that some of the traces are of.
    pub tasks_kept: usize,
    /// Episodes without a score, by a fault of ours.
    pub unscorable: usize,
    /// Episodes that did not do well enough.
    pub rejected: usize,
    /// Episodes that did, but were cut off by a limit: to imitate them is to never end.
    pub cut_off: usize,
    /// Episodes with the ids of another.
    pub duplicates: usize,
    /// Episodes beyond the bound of a task.
    pub surplus: usize,
}

/// Reads the episodes of run folders and keeps those to imitate, for a policy whose tokens they are.
///
/// # Errors
///
/// Fails where a folder has no episodes or they cannot be read, where they are of another vocabulary than
/// the policy's, and where none is left.
pub fn accept_rollouts(
    runs: &[PathBuf],
    rules: &RejectionSampling,
    policy: &Policy,
) -> Result<Accepted, RunError> {
    let mut accepted = Accepted::default();
    let mut by_task: BTreeMap<String, Vec<Rows>> = BTreeMap::new();
    for run in runs {
        check_vocabulary(run, policy)?;
        let steps = steps(run)?;
        if steps.is_empty() {
            return Err(RunError::NoRollouts { path: run.clone() });
        }
        for step in steps {
            // An agent's episode may be several rows: they are kept or left together.
            let mut episodes: IndexMap<(u64, u32), Vec<Trajectory>> = IndexMap::new();
            for row in read_step(&step_path(run, step))? {
                let row = row?;
                let rows = episodes.entry((row.group, row.sample)).or_default();
                rows.push(row);
            }
            for rows in episodes.into_values() {
                accepted.look_at(rows, rules, &mut by_task);
            }
        }
    }
    accepted.tasks = by_task.len();
    for (task_id, mut episodes) in by_task {
        let limit = rules.max_per_task.unwrap_or(usize::MAX);
        match rules.pick {
            _ if episodes.len() <= limit => {}
            Pick::Shortest => {
                episodes
                    .sort_by_key(|rows| rows.iter().map(TokenTrace::sampled_len).sum::<usize>());
            }
            Pick::Random => {
                let seed = derive_seed(rules.seed, "rejection", 0, &task_id);
                episodes.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
            }
        }
        accepted.surplus += episodes.len().saturating_sub(limit);
        episodes.truncate(limit);
        accepted.tasks_kept += usize::from(!episodes.is_empty());
        accepted.kept += episodes.len();
        for trace in episodes.iter().flatten() {
            check_length(policy, trace, || format!("an episode of task `{task_id}`"))?;
        }
        accepted.traces.extend(episodes.into_iter().flatten());
    }
    if accepted.traces.is_empty() {
        return Err(RunError::NothingAccepted {
            summary: accepted.to_string(),
        });
    }
    Ok(accepted)
}

impl Accepted {
    /// Counts an episode, and adds what it sampled to its task's if it did well.
    fn look_at(
        &mut self,
        mut rows: Vec<Trajectory>,
        rules: &RejectionSampling,
        by_task: &mut BTreeMap<String, Vec<Rows>>,
    ) {
        self.episodes += 1;
        let Some(first) = rows.first() else {
            return;
        };
        let (reward, passed) = (first.reward, first.passed);
        let episodes = by_task.entry(first.task_id.clone()).or_default();
        let is_cut_off = rows.iter().any(Trajectory::is_truncated);
        rows.retain(Trajectory::is_trainable);
        let Some(reward) = reward else {
            self.unscorable += 1;
            return;
        };
        let does_well = match rules.min_reward {
            Some(least) => reward >= least,
            None => passed == Some(true),
        };
        let rows: Rows = rows.into_iter().map(|row| row.trace).collect();
        let ids = |rows: &Rows| {
            rows.iter()
                .map(|row| row.ids().to_vec())
                .collect::<Vec<_>>()
        };
        if !does_well || rows.is_empty() {
            self.rejected += 1;
        } else if is_cut_off {
            self.cut_off += 1;
        } else if (episodes.iter()).any(|known| ids(known) == ids(&rows)) {
            self.duplicates += 1;
        } else {
            episodes.push(rows);
        }
    }
}

impl std::fmt::Display for Accepted {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "kept {} of {} episodes, of {} of {} tasks",
            self.kept, self.episodes, self.tasks_kept, self.tasks
        )?;
        let others = [
            (self.rejected, "did not do well enough"),
            (self.unscorable, "could not be scored"),
            (self.cut_off, "were cut off"),
            (self.duplicates, "repeated another, token by token"),
            (self.surplus, "were beyond their task's bound"),
        ];
        for (count, what) in others.into_iter().filter(|(count, _)| *count > 0) {
            write!(formatter, "; {count} {what}")?;
        }
        Ok(())
    }
}

/// Holds each token of those that sampled a run's episodes to be the policy's of the same id.
fn check_vocabulary(run: &Path, policy: &Policy) -> Result<(), RunError> {
    let theirs = match words_of(run)? {
        Words::Tokenizer(tokenizer) => tokenizer,
        // The very model that is trained.
        Words::Model(source) if source == policy.source => return Ok(()),
        Words::Model(source) => {
            return Err(RunError::UnknownVocabulary {
                path: run.to_owned(),
                model: source,
            });
        }
    };
    match policy.tokenizer.differing_token(&theirs) {
        None => Ok(()),
        Some(id) => Err(RunError::OtherVocabulary {
            path: run.to_owned(),
            id,
            found: policy.tokenizer.token(id),
            expected: theirs.token(id),
            model: policy.source.clone(),
        }),
    }
}

/// What says which tokens a run's ids are.
enum Words {
    Tokenizer(Tokenizer),
    /// Only the model's name is known.
    Model(String),
}

/// Finds the tokenizer of a run: what it made and its checkpoints have it, else its model's folder.
fn words_of(run: &Path) -> Result<Words, RunError> {
    let has_words = |folder: &PathBuf| folder.join("tokenizer.json").is_file();
    let made = Some(run.join("final")).filter(has_words);
    let own = match made {
        Some(folder) => Some(folder),
        None => latest_checkpoint(run)?.filter(has_words),
    };
    if let Some(folder) = own {
        return Ok(Words::Tokenizer(Tokenizer::from_folder(&folder)?));
    }
    let file = run.join("run.toml");
    if !file.is_file() {
        return Err(RunError::NoRun {
            path: run.to_owned(),
        });
    }
    let config = RunConfig::load::<&str>(Some(&file), &[])?;
    let folder = PathBuf::from(&config.model.path);
    if has_words(&folder) {
        return Ok(Words::Tokenizer(Tokenizer::from_folder(&folder)?));
    }
    Ok(Words::Model(match config.model.revision {
        Some(revision) => format!("{}@{revision}", config.model.path),
        None => config.model.path,
    }))
}

#[cfg(test)]
mod tests;
