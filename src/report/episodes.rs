//! Episodes token by token.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::ReportError;
use crate::engine::Tokenizer;
use crate::trajectory::{Status, StepReader, TokenTrace, Trajectory, read_step, step_path, steps};

/// Steps of which episodes are shown: the first, one in the middle and the last.
const STEPS: usize = 3;
/// Tokens of an episode that are shown; what is left out is said.
const MAX_TOKENS: usize = 3000;
/// Episodes of a step that are read to find the first group that has both good and bad ones.
const MAX_READ: usize = 512;

/// An episode as the page shows it.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Example {
    step: u64,
    task: String,
    reward: Option<f64>,
    parts: Vec<(String, f64)>,
    ending: String,
    sampled: usize,
    left_out: usize,
    tokens: Vec<Token>,
}

#[derive(Debug, PartialEq, Serialize)]
struct Token {
    text: String,
    id: u32,
    /// `p` of the prompt, `s` sampled and in the loss, `o` observed: template text, tool results.
    kind: &'static str,
    logprob: f32,
    /// How unlikely a sampled token was, from 0 (certain) to 9 (below 1 in 400).
    shade: u8,
}

/// Returns the best and the worst episode of one group of each of [`STEPS`] steps.
pub(super) fn read_examples(run: &Path, model: Option<&str>) -> Result<Vec<Example>, ReportError> {
    let tokenizer = tokenizer(run, model);
    let stored = steps(run)?;
    let mut chosen: Vec<u64> = (0..STEPS)
        .filter_map(|place| {
            let last = stored.len().checked_sub(1)?;
            Some(stored[last * place / (STEPS - 1)])
        })
        .collect();
    chosen.dedup();
    let mut examples = Vec::new();
    for step in chosen {
        let group = telling_group(read_step(&step_path(run, step))?)?;
        let shown = best_and_worst(&group);
        examples.extend(shown.map(|episode| example(step, episode, tokenizer.as_ref())));
    }
    Ok(examples)
}

/// Returns the tokenizer of the run: of what it made, or of what it started from. Without one, ids
/// are shown.
fn tokenizer(run: &Path, model: Option<&str>) -> Option<Tokenizer> {
    let places = [Some(run.join("final")), model.map(PathBuf::from)];
    let mut found = places.into_iter().flatten();
    found.find_map(|folder| Tokenizer::from_folder(&folder).ok())
}

/// Returns the first group whose rewards differ, or else the first.
fn telling_group(reader: StepReader) -> Result<Vec<Trajectory>, ReportError> {
    let mut first: Option<Vec<Trajectory>> = None;
    let mut group: Vec<Trajectory> = Vec::new();
    for episode in reader.take(MAX_READ) {
        let episode = episode?;
        if group
            .first()
            .is_some_and(|known| known.group != episode.group)
        {
            let done = std::mem::take(&mut group);
            if rewards_differ(&done) {
                return Ok(done);
            }
            first.get_or_insert(done);
        }
        group.push(episode);
    }
    Ok(match first {
        Some(first) if !rewards_differ(&group) => first,
        _ => group,
    })
}

fn rewards_differ(group: &[Trajectory]) -> bool {
    let mut rewards = group.iter().filter_map(|episode| episode.reward);
    let first = rewards.next();
    rewards.any(|reward| Some(reward) != first)
}

fn best_and_worst(group: &[Trajectory]) -> impl Iterator<Item = &Trajectory> {
    let scored = || group.iter().filter(|episode| episode.reward.is_some());
    let by_reward = |a: &&Trajectory, b: &&Trajectory| {
        let reward = |episode: &Trajectory| episode.reward.unwrap_or(f64::NAN);
        reward(a).total_cmp(&reward(b))
    };
    let best = scored().max_by(by_reward).or_else(|| group.first());
    let worst = scored().min_by(by_reward);
    let worst = worst.filter(|worst| best.is_some_and(|best| best.reward != worst.reward));
    best.into_iter().chain(worst)
}

fn example(step: u64, episode: &Trajectory, tokenizer: Option<&Tokenizer>) -> Example {
    Example {
        step,
        task: episode.task_id.clone(),
        reward: episode.reward,
        parts: (episode.rewards.iter())
            .map(|(name, value)| (name.clone(), *value))
            .collect(),
        ending: match &episode.status {
            Status::Finished => "finished".to_owned(),
            Status::Truncated => "cut off by a token limit".to_owned(),
            Status::TurnLimit => "out of turns".to_owned(),
            Status::Failed { reason } => format!("could not be scored: {reason}"),
        },
        sampled: episode.trace.sampled_len(),
        left_out: episode.trace.len().saturating_sub(MAX_TOKENS),
        tokens: tokens(&episode.trace, tokenizer),
    }
}

/// Returns the text of each token. A token that ends within a character has none, and the one that
/// completes it has all of it; without a tokenizer, or for an id that it does not know, it is the id.
pub(crate) fn token_texts<'a>(
    ids: &'a [u32],
    tokenizer: Option<&Tokenizer>,
) -> impl Iterator<Item = String> + use<'a> {
    let mut detokenizer = tokenizer.map(Tokenizer::detokenizer);
    ids.iter().map(move |id| {
        let text = detokenizer
            .as_mut()
            .map(|detokenizer| detokenizer.push(*id));
        match text {
            Some(Ok(text)) => text,
            _ => format!("[{id}]"),
        }
    })
}

fn tokens(trace: &TokenTrace, tokenizer: Option<&Tokenizer>) -> Vec<Token> {
    let shown = token_texts(trace.ids(), tokenizer)
        .zip(trace.ids())
        .zip(trace.logprobs())
        .zip(trace.loss_mask());
    shown
        .take(MAX_TOKENS)
        .enumerate()
        .map(|(position, (((text, id), logprob), mask))| Token {
            text,
            id: *id,
            kind: match (position < trace.prompt_len(), mask) {
                (true, _) => "p",
                (_, 0) => "o",
                _ => "s",
            },
            logprob: *logprob,
            shade: shade(*logprob),
        })
        .collect()
}

fn shade(logprob: f32) -> u8 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "0 to 9"
    )]
    let shade = (-1.5 * logprob).ceil().clamp(0.0, 9.0) as u8;
    shade
}

#[cfg(test)]
mod tests {
    use indexmap::IndexMap;

    use super::*;
    use crate::trajectory::{StepWriter, Usage};

    fn episode(group: u64, sample: u32, reward: Option<f64>) -> Trajectory {
        let mut trace = TokenTrace::new();
        trace.push_prompt(&[72, 105]).unwrap();
        trace.push_sampled(&[0xc3, 0xa9], &[-0.01, -8.0]).unwrap();
        trace.push_observation(&[33]);
        Trajectory {
            task_id: format!("task {group}"),
            group,
            sample,
            policy_step: 0,
            segments: Vec::new(),
            messages: vec![],
            turns: vec![],
            trace,
            reward,
            rewards: IndexMap::new(),
            passed: reward.map(|reward| reward == 1.0),
            status: Status::Finished,
            usage: Usage::default(),
        }
    }

    fn store(run: &Path, step: u64, episodes: &[Trajectory]) {
        let mut writer = StepWriter::create(run, step).unwrap();
        for episode in episodes {
            writer.append(episode).unwrap();
        }
        writer.finish().unwrap();
    }

    #[test]
    fn the_group_that_tells_most_is_shown() {
        let run = tempfile::tempdir().unwrap();
        let alike = [episode(0, 0, Some(1.0)), episode(0, 1, Some(1.0))];
        let mixed = [
            episode(1, 0, Some(0.0)),
            episode(1, 1, Some(1.0)),
            episode(1, 2, None),
        ];
        store(run.path(), 1, &[alike.clone(), alike.clone()].concat());
        store(run.path(), 2, &[&alike[..], &mixed[..]].concat());
        let shown: Vec<(u64, String, Option<f64>)> = read_examples(run.path(), None)
            .unwrap()
            .into_iter()
            .map(|example| (example.step, example.task, example.reward))
            .collect();
        let of = |step, task: &str, reward| (step, task.to_owned(), Some(reward));
        assert_eq!(
            shown,
            [
                of(1, "task 0", 1.0),
                of(2, "task 1", 1.0),
                of(2, "task 1", 0.0)
            ]
        );
    }

    #[test]
    fn tokens_have_text_mask_and_shade() {
        let tokenizer = Tokenizer::byte_level(&[]).unwrap();
        let found = tokens(&episode(0, 0, None).trace, Some(&tokenizer));
        let shown: Vec<(&str, &str, u8)> = found
            .iter()
            .map(|token| (token.text.as_str(), token.kind, token.shade))
            .collect();
        assert_eq!(
            shown,
            [
                ("H", "p", 0),
                ("i", "p", 0),
                ("", "s", 1),
                ("é", "s", 9),
                ("!", "o", 0)
            ]
        );
        let without = tokens(&episode(0, 0, None).trace, None);
        assert_eq!(without[0].text, "[72]");
    }

    #[test]
    fn a_run_without_episodes_has_none() {
        let run = tempfile::tempdir().unwrap();
        assert_eq!(read_examples(run.path(), None).unwrap(), []);
    }
}
