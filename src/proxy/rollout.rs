//! What was captured, for those who train on it: trajectories for our own trainer, and the documents
//! of OpenEnv's and verl's.

use std::collections::BTreeSet;

use indexmap::IndexMap;
use serde_json::{Value, json};

use super::graph::{CallGraph, Role, Row};
use super::record::{Call, CallTokens, Ending};
use super::session::{Purpose, Session, State};
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
#[must_use]
pub fn trajectories(graph: &CallGraph, labels: &RowLabels) -> Vec<Trajectory> {
    let rows = graph.rows();
    let trainable = rows.into_iter().filter(Row::is_trainable);
    trainable
        .filter_map(|row| trajectory(graph, row, labels))
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
    pub(super) fn of(session: &Session, state: &State) -> Self {
        let has_all_ids = state.graph.calls().all(|call| call.tokens.is_some());
        let is_train = has_all_ids && session.options.purpose != Purpose::Eval;
        Self {
            capture_level: if has_all_ids { "tokens" } else { "text" },
            rollout_type: if is_train { "train" } else { "eval" },
        }
    }
}

/// Returns what of a session is wrong or worth knowing, a line each.
fn findings(state: &State) -> Vec<String> {
    let mut findings = Vec::new();
    let stats = state.graph.stats();
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
    for why in state
        .graph
        .calls()
        .filter_map(|call| call.why_context.as_deref())
    {
        *reasons.entry(why).or_default() += 1;
    }
    for (why, count) in reasons {
        findings.push(format!(
            "[WARN] context_only: {count} calls are no targets: {why}"
        ));
    }
    if state.budget_stops > 0 {
        let stops = state.budget_stops;
        findings.push(format!(
            "[INFO] budget_stop: {stops} calls were answered with a stop"
        ));
    }
    findings
}

fn row_json(graph: &CallGraph, row: &Row) -> Value {
    let ids: Vec<&str> = row
        .calls
        .iter()
        .filter_map(|at| Some(graph.call(*at)?.id.as_str()))
        .collect();
    let lengths: Vec<usize> = row.trace.sampled_spans().map(|span| span.len()).collect();
    let targets = row.trace.sampled_len();
    let validation: &[&str] = match targets {
        0 => &["[FATAL] nothing_trainable: no token of it may be learned from"],
        _ => &[],
    };
    json!({
        "role": row.role,
        "root_id": ids.first(),
        "node_ids": ids,
        "n_turns": row.calls.len(),
        "prompt_len": row.trace.prompt_len(),
        "n_trainable": targets,
        "turn_lengths": lengths,
        "input_ids": row.trace.ids(),
        "loss_mask": row.trace.loss_mask(),
        "logprobs": row.trace.logprobs(),
        "trainable": row.is_trainable(),
        "validation": validation,
    })
}

/// Returns OpenEnv's document of a rollout.
pub(super) fn document(
    session: &Session,
    state: &State,
    include_discarded: bool,
    include_messages: bool,
) -> Value {
    let graph = &state.graph;
    let grade = Grade::of(session, state);
    let mut rows = graph.rows();
    rows.retain(|row| include_discarded || row.role != Role::Discarded);
    let is_train = grade.rollout_type == "train";
    let is_trainable = |row: &&Row| is_train && row.is_trainable();
    let trainable: Vec<&Row> = rows.iter().filter(is_trainable).collect();
    let discarded = graph.discarded();
    let turn = |(place, call): (usize, &Call)| {
        let mut turn = json!({
            "node_id": call.id,
            "index": place,
            "root_id": graph.call(graph.root(place)).map(|root| &root.id),
            "parent_id": graph.parent(place).and_then(|at| graph.call(at)).map(|call| &call.id),
            "n_sampled": call.tokens.as_ref().map_or(0, |tokens| tokens.completion().len()),
            "n_prompt": call.tokens.as_ref().map_or(0, |tokens| tokens.prompt().len()),
            "n_tools": call.tools.len(),
            "finish_reason": call.ending.finish_reason(),
            "harness_session_id": call.client_session,
            "sampling_params": call.sampling,
            "requested_sampling_params": call.requested,
            "sampled_logprobs": call.tokens.as_ref().map(CallTokens::logprobs),
            "latency_s": call.latency.as_secs_f64(),
            "discarded": discarded.contains(&place),
            "why_context": call.why_context,
        });
        if include_messages {
            turn["request_messages"] = json!(call.messages());
            turn["request_tools"] = json!(&*call.tools);
            turn["response_message"] = json!(*call.answer);
        }
        turn
    };
    let turns: Vec<Value> = graph.calls().enumerate().map(turn).collect();
    let mut stats = json!(graph.stats());
    stats["n_sequences"] = json!(rows.len());
    stats["n_trainable_sequences"] = json!(trainable.len());
    let targets: usize = trainable.iter().map(|row| row.trace.sampled_len()).sum();
    stats["n_trainable_tokens"] = json!(targets);
    let mut sequences: Vec<Value> = rows.iter().map(|row| row_json(graph, row)).collect();
    if !is_train {
        for row in &mut sequences {
            row["trainable"] = Value::Bool(false);
        }
    }
    json!({
        "session_id": session.id,
        "attempt": state.attempt,
        "metadata": session.options.metadata,
        "budget_stop_count": state.budget_stops,
        "turns": turns,
        "stats": stats,
        "sequences": sequences,
        "validation": findings(state),
        "trainable": !trainable.is_empty(),
        "capture_level": grade.capture_level,
        "rollout_type": grade.rollout_type,
    })
}

/// Returns OpenEnv's `TraceEntry` of each call of the agent that may be learned from, once each; an
/// error where there is none, which an empty list would hide.
pub(super) fn trace_entries(session: &Session, state: &State) -> Result<Vec<Value>, String> {
    let graph = &state.graph;
    if Grade::of(session, state).rollout_type != "train" {
        return Err(format!(
            "nothing is to be learned from this session: {}",
            findings(state).join("; ")
        ));
    }
    let rows = graph.rows();
    let agents = rows.iter().filter(|row| row.role == Role::Agent);
    let kept: BTreeSet<usize> = agents.flat_map(|row| row.calls.iter().copied()).collect();
    let entries: Vec<Value> = kept
        .into_iter()
        .filter_map(|place| Some((place, graph.call(place)?)))
        .filter_map(|(place, call)| entry(place, call))
        .collect();
    match entries.is_empty() {
        true => Err(format!(
            "no call may be learned from: {}",
            findings(state).join("; ")
        )),
        false => Ok(entries),
    }
}

fn entry(place: usize, call: &Call) -> Option<Value> {
    let tokens = call.tokens.as_ref().filter(|tokens| tokens.targets() > 0)?;
    let mut mask = vec![0; tokens.prompt().len()];
    mask.extend(tokens.loss_mask());
    Some(json!({
        "request": {"messages": call.messages(), "tools": &*call.tools},
        "response": {"choices": [{
            "message": *call.answer, "finish_reason": call.ending.finish_reason(),
        }]},
        "prompt_token_ids": tokens.prompt(),
        "completion_token_ids": tokens.completion(),
        "per_token_logps": tokens.logprobs(),
        "loss_mask": mask,
        "metadata": {
            "node_id": call.id,
            "index": place,
            "model": call.model,
            "n_tools": call.tools.len(),
            "harness_session_id": call.client_session,
            "sampling_params": call.sampling,
            "requested_sampling_params": call.requested,
        },
    }))
}

/// Returns the turns as verl's recipe keeps them, with what it leaves out: the prompt's ids, and the
/// call that each goes on from. The messages of a turn are those that are new since that one.
pub(super) fn completion_records(graph: &CallGraph) -> Vec<Value> {
    let record = |(place, call): (usize, &Call)| {
        let parent = graph.parent(place).and_then(|parent| graph.call(parent));
        let is_longer = |parent: &&Call| call.messages.starts_with(&parent.messages);
        let known = parent
            .filter(is_longer)
            .map_or(0, |parent| parent.messages.len());
        json!({
            "call_id": call.id,
            "parent_call_id": parent.map(|parent| &parent.id),
            "request_messages": call.messages()[known..],
            "prompt_token_ids": call.tokens.as_ref().map_or(&[][..], CallTokens::prompt),
            "completion_text": call.answer["content"].as_str().unwrap_or_default(),
            "completion_token_ids": call.tokens.as_ref().map_or(&[][..], CallTokens::completion),
            "completion_logprobs": call.tokens.as_ref().map_or(&[][..], CallTokens::logprobs),
            "completion_loss_mask": call.tokens.as_ref().map_or(&[][..], CallTokens::loss_mask),
            "finish_reason": call.ending.finish_reason(),
            "tool_calls": call.answer.get("tool_calls"),
            "timing": {
                "request_received_at": call.started,
                "response_sent_at": call.started + call.latency.as_secs_f64(),
            },
            "node_id": null,
            "gpu_id": null,
            "worker_id": null,
            "rank_info": null,
        })
    };
    graph.calls().enumerate().map(record).collect()
}
