//! What was captured, for those who train on it: trajectories for our own trainer, and the documents
//! of OpenEnv's and verl's.

use std::collections::BTreeSet;

use indexmap::IndexMap;
use serde::Serialize;
use serde_json::{Map, Value};

use super::graph::{CallGraph, GraphStats, Role, Row};
use super::record::{Call, CallTokens, Ending};
use super::session::{Purpose, Session, Snapshot};
use crate::chat::Message;
use crate::openai::read_message;
use crate::trajectory::{Finish, Status, Trajectory, Turn, Usage};

/// What rows are told apart by, and what they earned.
#[derive(Debug, Clone, PartialEq)]
pub struct RowLabels {
    /// The task's id.
    pub task_id: String,
    /// The group that the episode is compared in.
    pub group: u64,
    /// Which sample of its group it is.
    pub sample: u32,
    /// The optimizer step that learns from it.
    pub policy_step: u64,
    /// The score; none where the episode could not be scored.
    pub reward: Option<f64>,
}

/// Returns a trajectory for each row that may be learned from: the work of one episode, all of which
/// earned its reward.
///
/// Rows that part behind some calls share them. What was sampled there is a target of the first of them
/// alone, and context of the others: it was drawn once, and would weigh as much more as there are rows.
#[must_use]
pub fn trajectories(graph: &CallGraph, labels: &RowLabels) -> Vec<Trajectory> {
    let mut learned = BTreeSet::new();
    let rows = graph.rows().into_iter().filter(Row::is_trainable);
    let rows = rows.filter_map(|mut row| {
        for place in &row.calls {
            let tokens = graph.call(*place).and_then(|call| call.tokens.as_ref());
            if let Some(tokens) = tokens
                && !learned.insert(*place)
            {
                let start = tokens.prompt().len();
                row.trace
                    .make_context(start..start + tokens.completion().len());
            }
        }
        (row.trace.sampled_len() > 0).then_some(row)
    });
    rows.filter_map(|row| trajectory(graph, row, labels))
        .collect()
}

fn trajectory(graph: &CallGraph, row: Row, labels: &RowLabels) -> Option<Trajectory> {
    let calls: Vec<&Call> = row.calls.iter().filter_map(|at| graph.call(*at)).collect();
    let last = calls.last()?;
    let whole = last.messages.iter().chain([&last.answer]);
    let messages: Vec<Message> = whole.map(|message| to_message(message)).collect();
    let mut turns = Vec::with_capacity(calls.len());
    for call in &calls {
        let tokens = call.tokens.as_ref()?;
        let start = tokens.prompt().len();
        let calls = call.answer["tool_calls"].as_array().map_or(0, Vec::len);
        turns.push(Turn {
            // Tokens that are a prefix are of messages that are one, too.
            message: call.messages.len().min(messages.len() - 1),
            tokens: start..start + tokens.completion().len(),
            finish: match call.ending {
                Ending::Length => Finish::Length,
                _ => Finish::Stop,
            },
            tool_calls: u32::try_from(calls).unwrap_or(u32::MAX),
            tool_failures: 0,
            runs: Vec::new(),
        });
    }
    let generate_seconds = calls.iter().map(|call| call.latency.as_secs_f64()).sum();
    Some(Trajectory {
        task_id: labels.task_id.clone(),
        group: labels.group,
        sample: labels.sample,
        policy_step: labels.policy_step,
        segments: Vec::new(),
        messages,
        turns,
        trace: row.trace,
        reward: labels.reward,
        rewards: IndexMap::new(),
        passed: None,
        status: match (labels.reward, &last.ending) {
            (None, _) => Status::Failed {
                reason: "the episode was not scored".to_owned(),
            },
            (_, Ending::Length) => Status::Truncated,
            _ => Status::Finished,
        },
        usage: Usage {
            generate_seconds,
            ..Usage::default()
        },
    })
}

/// Returns a message as the trainer's files keep it; one that holds more than text as its JSON.
fn to_message(message: &Value) -> Message {
    read_message(0, message).unwrap_or_else(|_| {
        let is_answer = message["role"] == "assistant";
        let content = message["content"].to_string();
        match is_answer {
            true => Message::assistant(content),
            false => Message::user(content),
        }
    })
}

/// What a session is good for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grade {
    /// `tokens` where each call has its ids, `text` where one has none.
    pub(super) capture_level: &'static str,
    /// `train` or `eval`.
    pub(super) rollout_type: &'static str,
}

impl Grade {
    pub(super) fn of(session: &Session, graph: &CallGraph) -> Self {
        let has_all_ids = graph.calls().all(|call| call.tokens.is_some());
        let is_train = has_all_ids && session.options.purpose != Purpose::Eval;
        Self {
            capture_level: if has_all_ids { "tokens" } else { "text" },
            rollout_type: if is_train { "train" } else { "eval" },
        }
    }
}

/// Returns what of a session is wrong or worth knowing, a line each.
fn findings(Snapshot { gate, graph }: &Snapshot) -> Vec<String> {
    let mut findings = Vec::new();
    let stats = graph.stats();
    if stats.n_turns == 0 {
        findings.push("[FATAL] no_turns: no call was answered".to_owned());
    }
    if stats.n_turns > 1 && stats.n_roots == stats.n_turns {
        findings.push(format!(
            "[WARN] per_turn_capture_only: each of the {} calls is a root: the agent or the chat \
             template writes its history anew with each call",
            stats.n_turns
        ));
    }
    let mut reasons: IndexMap<&str, usize> = IndexMap::new();
    for why in graph.calls().filter_map(|call| call.why_context.as_deref()) {
        *reasons.entry(why).or_default() += 1;
    }
    for (why, count) in reasons {
        findings.push(format!(
            "[WARN] context_only: {count} calls are no targets: {why}"
        ));
    }
    if gate.faults > 0 {
        let faults = gate.faults;
        findings.push(format!(
            "[WARN] faults: {faults} calls failed by no fault of the agent's"
        ));
    }
    if gate.budget_stops > 0 {
        let stops = gate.budget_stops;
        findings.push(format!(
            "[INFO] budget_stop: {stops} calls were answered with a stop"
        ));
    }
    findings
}

#[derive(Debug, Serialize)]
struct RowJson<'a> {
    role: Role,
    root_id: Option<&'a str>,
    node_ids: Vec<&'a str>,
    n_turns: usize,
    prompt_len: usize,
    n_trainable: usize,
    turn_lengths: Vec<usize>,
    input_ids: &'a [u32],
    loss_mask: &'a [u8],
    logprobs: &'a [f32],
    trainable: bool,
    validation: &'static [&'static str],
}

fn row_json<'a>(graph: &'a CallGraph, row: &'a Row, is_train: bool) -> RowJson<'a> {
    let ids: Vec<&str> = row
        .calls
        .iter()
        .filter_map(|at| Some(graph.call(*at)?.id.as_str()))
        .collect();
    let targets = row.trace.sampled_len();
    RowJson {
        role: row.role,
        root_id: ids.first().copied(),
        node_ids: ids,
        n_turns: row.calls.len(),
        prompt_len: row.trace.prompt_len(),
        n_trainable: targets,
        turn_lengths: row.trace.sampled_spans().map(|span| span.len()).collect(),
        input_ids: row.trace.ids(),
        loss_mask: row.trace.loss_mask(),
        logprobs: row.trace.logprobs(),
        trainable: is_train && row.is_trainable(),
        validation: match targets {
            0 => &["[FATAL] nothing_trainable: no token of it may be learned from"],
            _ => &[],
        },
    }
}

#[derive(Debug, Serialize)]
struct TurnJson<'a> {
    node_id: &'a str,
    index: usize,
    root_id: Option<&'a str>,
    parent_id: Option<&'a str>,
    n_sampled: usize,
    n_prompt: usize,
    n_tools: usize,
    finish_reason: &'static str,
    harness_session_id: Option<&'a str>,
    sampling_params: &'a Map<String, Value>,
    requested_sampling_params: &'a Map<String, Value>,
    sampled_logprobs: Option<&'a [f32]>,
    latency_s: f64,
    discarded: bool,
    why_context: Option<&'a str>,
    #[serde(flatten)]
    messages: Option<TurnMessages<'a>>,
}

#[derive(Debug, Serialize)]
struct TurnMessages<'a> {
    request_messages: Vec<&'a Value>,
    request_tools: &'a [Value],
    response_message: &'a Value,
}

fn turn_json<'a>(
    graph: &'a CallGraph,
    place: usize,
    call: &'a Call,
    discarded: &BTreeSet<usize>,
    include_messages: bool,
) -> TurnJson<'a> {
    let id = |place: usize| graph.call(place).map(|call| call.id.as_str());
    let tokens = call.tokens.as_ref();
    TurnJson {
        node_id: &call.id,
        index: place,
        root_id: id(graph.root(place)),
        parent_id: graph.parent(place).and_then(id),
        n_sampled: tokens.map_or(0, |tokens| tokens.completion().len()),
        n_prompt: tokens.map_or(0, |tokens| tokens.prompt().len()),
        n_tools: call.tools.len(),
        finish_reason: call.ending.finish_reason(),
        harness_session_id: call.client_session.as_deref(),
        sampling_params: &call.sampling,
        requested_sampling_params: &call.requested,
        sampled_logprobs: tokens.map(CallTokens::logprobs),
        latency_s: call.latency.as_secs_f64(),
        discarded: discarded.contains(&place),
        why_context: call.why_context.as_deref(),
        messages: include_messages.then(|| TurnMessages {
            request_messages: call.messages(),
            request_tools: &call.tools,
            response_message: &call.answer,
        }),
    }
}

#[derive(Debug, Serialize)]
struct Stats {
    #[serde(flatten)]
    graph: GraphStats,
    n_sequences: usize,
    n_trainable_sequences: usize,
    n_trainable_tokens: usize,
}

#[derive(Debug, Serialize)]
struct Document<'a> {
    session_id: &'a str,
    attempt: u32,
    metadata: &'a Map<String, Value>,
    budget_stop_count: u64,
    turns: Vec<TurnJson<'a>>,
    stats: Stats,
    sequences: Vec<RowJson<'a>>,
    validation: Vec<String>,
    trainable: bool,
    capture_level: &'static str,
    rollout_type: &'static str,
}

/// Returns OpenEnv's document of a rollout, as JSON.
pub(super) fn document(
    session: &Session,
    snapshot: &Snapshot,
    include_discarded: bool,
    include_messages: bool,
) -> serde_json::Result<Vec<u8>> {
    let graph = &snapshot.graph;
    let grade = Grade::of(session, graph);
    let mut rows = graph.rows();
    rows.retain(|row| include_discarded || row.role != Role::Discarded);
    let is_train = grade.rollout_type == "train";
    let is_trainable = |row: &&Row| is_train && row.is_trainable();
    let trainable: Vec<&Row> = rows.iter().filter(is_trainable).collect();
    let discarded = graph.discarded();
    let turn = |(place, call)| turn_json(graph, place, call, &discarded, include_messages);
    serde_json::to_vec(&Document {
        session_id: &session.id,
        attempt: snapshot.gate.attempt,
        metadata: &session.options.metadata,
        budget_stop_count: snapshot.gate.budget_stops,
        turns: graph.calls().enumerate().map(turn).collect(),
        stats: Stats {
            graph: graph.stats(),
            n_sequences: rows.len(),
            n_trainable_sequences: trainable.len(),
            n_trainable_tokens: trainable.iter().map(|row| row.trace.sampled_len()).sum(),
        },
        sequences: (rows.iter())
            .map(|row| row_json(graph, row, is_train))
            .collect(),
        validation: findings(snapshot),
        trainable: !trainable.is_empty(),
        capture_level: grade.capture_level,
        rollout_type: grade.rollout_type,
    })
}

/// OpenEnv's `TraceEntry`.
#[derive(Debug, Serialize)]
pub(super) struct TraceEntry<'a> {
    request: EntryRequest<'a>,
    response: EntryResponse<'a>,
    prompt_token_ids: &'a [u32],
    completion_token_ids: &'a [u32],
    per_token_logps: &'a [f32],
    loss_mask: Vec<u8>,
    metadata: EntryMetadata<'a>,
}

#[derive(Debug, Serialize)]
struct EntryRequest<'a> {
    messages: Vec<&'a Value>,
    tools: &'a [Value],
}

#[derive(Debug, Serialize)]
struct EntryResponse<'a> {
    choices: [EntryChoice<'a>; 1],
}

#[derive(Debug, Serialize)]
struct EntryChoice<'a> {
    message: &'a Value,
    finish_reason: &'static str,
}

#[derive(Debug, Serialize)]
struct EntryMetadata<'a> {
    node_id: &'a str,
    index: usize,
    model: &'a str,
    n_tools: usize,
    harness_session_id: Option<&'a str>,
    sampling_params: &'a Map<String, Value>,
    requested_sampling_params: &'a Map<String, Value>,
}

/// Returns OpenEnv's `TraceEntry` of each call of the agent that may be learned from, once each; an
/// error where there is none, which an empty list would hide.
pub(super) fn trace_entries<'a>(
    session: &Session,
    snapshot: &'a Snapshot,
) -> Result<Vec<TraceEntry<'a>>, String> {
    let graph = &snapshot.graph;
    if Grade::of(session, graph).rollout_type != "train" {
        return Err(format!(
            "nothing is to be learned from this session: {}",
            findings(snapshot).join("; ")
        ));
    }
    let rows = graph.rows();
    let agents = rows.iter().filter(|row| row.role == Role::Agent);
    let kept: BTreeSet<usize> = agents.flat_map(|row| row.calls.iter().copied()).collect();
    let entries: Vec<TraceEntry<'_>> = kept
        .into_iter()
        .filter_map(|place| Some((place, graph.call(place)?)))
        .filter_map(|(place, call)| entry(place, call))
        .collect();
    match entries.is_empty() {
        true => Err(format!(
            "no call may be learned from: {}",
            findings(snapshot).join("; ")
        )),
        false => Ok(entries),
    }
}

fn entry(place: usize, call: &Call) -> Option<TraceEntry<'_>> {
    let tokens = call.tokens.as_ref().filter(|tokens| tokens.targets() > 0)?;
    let mut loss_mask = vec![0; tokens.prompt().len()];
    loss_mask.extend(tokens.loss_mask());
    Some(TraceEntry {
        request: EntryRequest {
            messages: call.messages(),
            tools: &call.tools,
        },
        response: EntryResponse {
            choices: [EntryChoice {
                message: &call.answer,
                finish_reason: call.ending.finish_reason(),
            }],
        },
        prompt_token_ids: tokens.prompt(),
        completion_token_ids: tokens.completion(),
        per_token_logps: tokens.logprobs(),
        loss_mask,
        metadata: EntryMetadata {
            node_id: &call.id,
            index: place,
            model: &call.model,
            n_tools: call.tools.len(),
            harness_session_id: call.client_session.as_deref(),
            sampling_params: &call.sampling,
            requested_sampling_params: &call.requested,
        },
    })
}

/// A turn as verl's recipe keeps it, with what it leaves out: the prompt's ids, and the call that it goes
/// on from.
#[derive(Debug, Serialize)]
pub(super) struct CompletionRecord<'a> {
    call_id: &'a str,
    parent_call_id: Option<&'a str>,
    /// Those that are new since that call.
    request_messages: Vec<&'a Value>,
    prompt_token_ids: &'a [u32],
    completion_text: &'a str,
    completion_token_ids: &'a [u32],
    completion_logprobs: &'a [f32],
    completion_loss_mask: &'a [u8],
    finish_reason: &'static str,
    tool_calls: Option<&'a Value>,
    timing: Timing,
    node_id: (),
    gpu_id: (),
    worker_id: (),
    rank_info: (),
}

#[derive(Debug, Serialize)]
struct Timing {
    request_received_at: f64,
    response_sent_at: f64,
}

/// Returns the turns as verl's recipe keeps them.
pub(super) fn completion_records(graph: &CallGraph) -> Vec<CompletionRecord<'_>> {
    let calls = graph.calls().enumerate();
    calls
        .map(|(place, call)| completion_record(graph, place, call))
        .collect()
}

fn completion_record<'a>(
    graph: &'a CallGraph,
    place: usize,
    call: &'a Call,
) -> CompletionRecord<'a> {
    let parent = graph.parent(place).and_then(|parent| graph.call(parent));
    let is_longer = |parent: &&Call| call.messages.starts_with(&parent.messages);
    let known = parent
        .filter(is_longer)
        .map_or(0, |parent| parent.messages.len());
    let tokens = call.tokens.as_ref();
    CompletionRecord {
        call_id: &call.id,
        parent_call_id: parent.map(|parent| parent.id.as_str()),
        request_messages: call.messages().split_off(known),
        prompt_token_ids: tokens.map_or(&[], CallTokens::prompt),
        completion_text: call.answer["content"].as_str().unwrap_or_default(),
        completion_token_ids: tokens.map_or(&[], CallTokens::completion),
        completion_logprobs: tokens.map_or(&[], CallTokens::logprobs),
        completion_loss_mask: tokens.map_or(&[], CallTokens::loss_mask),
        finish_reason: call.ending.finish_reason(),
        tool_calls: call.answer.get("tool_calls"),
        timing: Timing {
            request_received_at: call.started,
            response_sent_at: call.started + call.latency.as_secs_f64(),
        },
        node_id: (),
        gpu_id: (),
        worker_id: (),
        rank_info: (),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::proxy::record::test_call;

    fn call(prompt: &[u32], completion: &[u32]) -> Call {
        let logprobs = vec![-0.5; completion.len()];
        let tokens = CallTokens::new(prompt.to_vec(), completion.to_vec(), logprobs, |_| true);
        Call {
            tokens: Some(tokens.unwrap()),
            ..test_call()
        }
    }

    fn labels() -> RowLabels {
        RowLabels {
            task_id: "t".to_owned(),
            group: 0,
            sample: 0,
            policy_step: 1,
            reward: Some(1.0),
        }
    }

    /// The ids of all targets, row by row.
    fn targets(graph: &CallGraph) -> Vec<Vec<u32>> {
        let of_row = |row: Trajectory| {
            let trace = &row.trace;
            let masked = trace.ids().iter().zip(trace.loss_mask());
            let masked = masked.filter(|(_, mask)| **mask == 1);
            masked.map(|(id, _)| *id).collect()
        };
        trajectories(graph, &labels())
            .into_iter()
            .map(of_row)
            .collect()
    }

    /// An agent whose first two turns have three continuations, one of which goes on.
    #[test]
    fn what_rows_share_is_learned_in_the_first_of_them() {
        let mut graph = CallGraph::default();
        for (prompt, completion) in [
            (&[1][..], &[2, 3][..]),
            (&[1, 2, 3, 4], &[5]),
            (&[1, 2, 3, 4, 5, 6], &[7]),
            (&[1, 2, 3, 4, 5, 8], &[9, 10]),
            (&[1, 2, 3, 4, 5, 8, 9, 10, 11], &[12]),
            (&[1, 2, 3, 13], &[14]),
        ] {
            graph.push(call(prompt, completion), None);
        }
        assert_eq!(
            targets(&graph),
            [vec![2, 3, 5, 7], vec![9, 10, 12], vec![14]]
        );
        let rows = trajectories(&graph, &labels());
        let last = &rows[2].trace;
        assert_eq!(last.ids(), [1, 2, 3, 13, 14]);
        assert_eq!(last.logprobs(), [0.0, 0.0, 0.0, 0.0, -0.5]);
        assert_eq!(rows[2].turns[0].tokens, 1..3, "it is still a turn");
        // OpenEnv's rows are whole each; of its entries each is a call.
        let masks = graph
            .rows()
            .iter()
            .map(|row| row.trace.sampled_len())
            .sum::<usize>();
        assert_eq!(masks, 4 + 6 + 3);
    }

    /// What nobody learns from takes no targets away.
    #[test]
    fn a_row_that_is_not_learned_from_leaves_what_it_shares() {
        let mut graph = CallGraph::default();
        for (prompt, completion) in [
            (&[1][..], &[2][..]),
            (&[1, 2, 3], &[4]),
            (&[1, 2, 3], &[5]),
            (&[1, 2, 3, 5, 6], &[7]),
        ] {
            graph.push(call(prompt, completion), None);
        }
        assert_eq!(targets(&graph), [vec![2, 5, 7]]);
    }

    proptest! {
        /// Whatever tree a session is, each sampled token is a target exactly once over all its rows.
        #[test]
        fn each_sampled_token_is_a_target_once(
            shape in proptest::collection::vec((any::<prop::sample::Index>(), 1_usize..4), 1..16),
        ) {
            let mut graph = CallGraph::default();
            let mut ends: Vec<Vec<u32>> = vec![Vec::new()];
            let mut next = 0;
            let mut fresh = |count: usize| -> Vec<u32> {
                let ids = next..next + u32::try_from(count).unwrap();
                next = ids.end;
                ids.collect()
            };
            let mut sampled = Vec::new();
            for (parent, count) in &shape {
                let prompt = [ends[parent.index(ends.len())].clone(), fresh(1)].concat();
                let completion = fresh(*count);
                graph.push(call(&prompt, &completion), None);
                sampled.extend_from_slice(&completion);
                ends.push([prompt, completion].concat());
            }
            let mut found = targets(&graph).concat();
            found.sort_unstable();
            prop_assert_eq!(found, sampled);
        }
    }
}
