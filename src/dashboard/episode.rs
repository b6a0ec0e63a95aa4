//! One episode with its tokens.

use serde::Serialize;

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
            .filter(|other| other.head.group == entry.head.group)
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

/// Returns the tokenizer that a run folder holds: of what it made, or of its last checkpoint.
pub(super) fn tokenizer(run: &Run) -> Option<Tokenizer> {
    let places = || {
        let last = run.folder.folder("checkpoints").ok().and_then(|all| {
            let (names, _) = all.names().ok()?;
            let step = |name: &String| name.strip_prefix("step-")?.parse::<u64>().ok();
            let last = names
                .into_iter()
                .filter(|name| step(name).is_some())
                .max_by_key(step)?;
            all.folder(&last).ok()
        });
        run.folder.folder("final").ok().into_iter().chain(last)
    };
    places().find_map(|folder| {
        let bytes = folder.read("tokenizer.json", MAX_TOKENIZER).ok()?;
        let config = folder.read("tokenizer_config.json", 4 << 20).ok();
        let config = config.and_then(|text| serde_json::from_slice(&text).ok());
        Tokenizer::from_json(&bytes, config.as_ref()).ok()
    })
}
