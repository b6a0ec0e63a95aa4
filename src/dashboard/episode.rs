//! One episode with its tokens.

use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use super::folder::{Folder, Version};
use super::index::{Entry, Index};
use super::runs::Run;
use crate::engine::Tokenizer;
use crate::report::token_texts;
use crate::trajectory::Trajectory;

/// Most tokens of an answer.
pub(super) const MAX_TOKENS: usize = 4000;

/// What a page shows of an episode.
#[derive(Debug, Serialize)]
pub(super) struct Shown<'a> {
    row: usize,
    step: u64,
    advantage: Option<f64>,
    no_advantage: Option<&'static str>,
    /// The other episodes of its group, and itself.
    group_rows: Vec<&'a Entry>,
    episode: Told,
    tokens: Tokens,
}

/// The episode without its tokens.
#[derive(Debug, Serialize)]
struct Told {
    task_id: String,
    group: u64,
    sample: u32,
    policy_step: u64,
    messages: Vec<crate::chat::Message>,
    turns: Vec<crate::trajectory::Turn>,
    reward: Option<f64>,
    rewards: indexmap::IndexMap<String, f64>,
    passed: Option<bool>,
    status: crate::trajectory::Status,
    usage: crate::trajectory::Usage,
}

/// Tokens from one on, each list an entry a token.
#[derive(Debug, Serialize)]
struct Tokens {
    from: usize,
    total: usize,
    prompt: usize,
    /// Whether there is a tokenizer to tell the text; else it is the ids.
    has_text: bool,
    texts: Vec<String>,
    ids: Vec<u32>,
    logprobs: Vec<f32>,
    mask: Vec<u8>,
}

/// Returns what a page shows of an episode, with at most [`MAX_TOKENS`] tokens from `from` on.
pub(super) fn shown<'a>(
    index: &'a Index,
    entry: &Entry,
    step: u64,
    episode: Trajectory,
    tokenizer: Option<&Tokenizer>,
    from: usize,
) -> Shown<'a> {
    let trace = &episode.trace;
    let from = from.min(trace.len());
    let until = from.saturating_add(MAX_TOKENS).min(trace.len());
    let tokens = Tokens {
        from,
        total: trace.len(),
        prompt: trace.prompt_len(),
        has_text: tokenizer.is_some(),
        // From the first on: what a token's text is depends on those before it.
        texts: token_texts(&trace.ids()[..until], tokenizer)
            .skip(from)
            .collect(),
        ids: trace.ids()[from..until].to_vec(),
        logprobs: trace.logprobs()[from..until].to_vec(),
        mask: trace.loss_mask()[from..until].to_vec(),
    };
    Shown {
        row: entry.row,
        step,
        advantage: entry.advantage,
        no_advantage: index.no_advantages,
        group_rows: (index.entries.iter())
            .filter(|other| other.group == entry.group)
            .collect(),
        tokens,
        episode: Told {
            task_id: episode.task_id,
            group: episode.group,
            sample: episode.sample,
            policy_step: episode.policy_step,
            messages: episode.messages,
            turns: episode.turns,
            reward: episode.reward,
            rewards: episode.rewards,
            passed: episode.passed,
            status: episode.status,
            usage: episode.usage,
        },
    }
}

/// The largest `tokenizer.json` that is read.
const MAX_TOKENIZER: u64 = 64 << 20;

/// The tokenizer that was asked for last: reading one takes a second, and a hundred megabytes.
#[derive(Debug, Default)]
pub(super) struct Tokenizers {
    known: Mutex<Option<(Version, Option<Tokenizer>)>>,
}

impl Tokenizers {
    /// Returns the tokenizer that a run folder holds: of what it made, or of its last checkpoint. One is read
    /// at a time, and one is kept.
    pub(super) fn of(&self, run: &Run) -> Option<Tokenizer> {
        places(run).into_iter().find_map(|folder| {
            let version = folder.version("tokenizer.json")?;
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((of, tokenizer)) = &*known
                && *of == version
            {
                return tokenizer.clone();
            }
            // The other goes before this one comes.
            *known = None;
            let tokenizer = read_tokenizer(&folder);
            *known = Some((version, tokenizer.clone()));
            tokenizer
        })
    }
}

/// Returns the folders of a run that may hold a tokenizer.
fn places(run: &Run) -> Vec<Folder> {
    let last = run.folder.folder("checkpoints").ok().and_then(|all| {
        let step = |name: &str| name.strip_prefix("step-")?.parse::<u64>().ok();
        let (_, last) = all.largest(1, step).ok()?.0.pop()?;
        all.folder(&last).ok()
    });
    let made = run.folder.folder("final").ok();
    made.into_iter().chain(last).collect()
}

fn read_tokenizer(folder: &Folder) -> Option<Tokenizer> {
    let bytes = folder.read("tokenizer.json", MAX_TOKENIZER).ok()?;
    let config = folder.read("tokenizer_config.json", 4 << 20).ok();
    let config = config.and_then(|text| serde_json::from_slice(&text).ok());
    Tokenizer::from_json(&bytes, config.as_ref()).ok()
}
