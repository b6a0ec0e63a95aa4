//! One episode with a model behind an endpoint.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::results::{EndpointUsage, EpisodeRecord};
use super::{Asker, EndpointConfig, is_overflow};
use crate::chat::{Message, ParsedTurn, Role, ToolCall, ToolCallError, ToolSpec, json_type};
use crate::env::Environment;
use crate::proxy::{Completion, Ending, ProxyError};
use crate::rollout::Episode;
use crate::trajectory::Status;

/// Time between looks at whether an environment elsewhere has begun.
const RESET_POLL: Duration = Duration::from_millis(5);
/// The longest name of a function that every server takes, in characters.
const MAX_NAME: usize = 64;

/// How the turns of one episode are sampled.
#[derive(Debug, Clone, Copy)]
pub(super) struct TurnSampling {
    pub(super) max_new_tokens: usize,
    pub(super) seed: u64,
}

/// How an episode ended.
pub(super) enum Ended {
    /// It has a score, or the environment or the grader failed.
    Done(EpisodeRecord),
    /// The endpoint failed it.
    Failed(EpisodeRecord, ProxyError),
    /// It was asked to stop, and says what it had cost; nothing where it had not begun.
    Stopped(Option<EpisodeRecord>),
}

/// Waits for what an environment elsewhere begins with; returns whether it is to be played then.
pub(super) fn wait_for(asker: &Asker<'_>, environment: &mut dyn Environment) -> bool {
    environment.prepare();
    while !environment.is_prepared() {
        if asker.is_stopped() {
            return false;
        }
        std::thread::sleep(RESET_POLL);
    }
    true
}

/// Plays an episode to its end.
pub(super) fn play(asker: &Asker<'_>, mut episode: Episode, sampling: TurnSampling) -> Ended {
    let config = asker.config;
    let mut usage = EndpointUsage::default();
    if episode.has_failed() {
        let trajectory = episode.into_trajectory();
        return Ended::Done(EpisodeRecord { trajectory, usage });
    }
    let mut conversation: Vec<Value> = episode.messages().iter().map(spoken).collect();
    let tools: Vec<ToolSpec> = match config.use_tools {
        true => episode.environment().tools().to_vec(),
        false => Vec::new(),
    };
    // What is left of the episode's tokens, where the endpoint counts them.
    let mut left = config.max_total_tokens;
    loop {
        let sampling = TurnSampling {
            max_new_tokens: sampling.max_new_tokens.min(left),
            ..sampling
        };
        let body = request(config, &conversation, &tools, sampling);
        let started = Instant::now();
        let completion = match asker.ask(&body, &mut usage.retries) {
            Ok(Some(completion)) => completion,
            Ok(None) => {
                let mut trajectory = episode.into_trajectory();
                let reason = "the evaluation was stopped".to_owned();
                trajectory.status = Status::Failed { reason };
                return Ended::Stopped(Some(EpisodeRecord { trajectory, usage }));
            }
            Err(error) if is_overflow(&error) => {
                episode.close();
                break;
            }
            Err(error) => {
                episode.fail(&error);
                let trajectory = episode.into_trajectory();
                return Ended::Failed(EpisodeRecord { trajectory, usage }, error);
            }
        };
        usage.count(completion.tokens);
        let (prompt, answer) = completion.tokens.unwrap_or_default();
        // A prompt that leaves no room, which is counted by who read it, is not sampled from here either.
        if prompt >= config.max_total_tokens {
            episode.close();
            break;
        }
        let turn = parse(&completion);
        let is_cut_off =
            completion.ending == Ending::Length || prompt + answer > config.max_total_tokens;
        let seconds = started.elapsed().as_secs_f64();
        let Some(answers) = episode.take_untraced_turn(&turn, is_cut_off, seconds) else {
            break;
        };
        left = config.max_total_tokens.saturating_sub(prompt + answer);
        if left == 0 {
            episode.close();
            break;
        }
        let calls = push_turn(
            &mut conversation,
            completion.message,
            &tools,
            usage.requests,
        );
        push_answers(&mut conversation, &answers, &calls);
    }
    Ended::Done(EpisodeRecord {
        trajectory: episode.into_trajectory(),
        usage,
    })
}

fn request(
    config: &EndpointConfig,
    conversation: &[Value],
    tools: &[ToolSpec],
    sampling: TurnSampling,
) -> Map<String, Value> {
    let mut body = Map::new();
    let mut set = |name: &str, value: Value| body.insert(name.to_owned(), value);
    set("messages", Value::from(conversation));
    set("temperature", json!(config.temperature));
    set("max_tokens", json!(sampling.max_new_tokens));
    if config.temperature > 0.0 {
        // What every server takes as a seed: 31 bits.
        set("seed", json!(sampling.seed >> 33));
    }
    if !tools.is_empty() {
        set("tools", json!(tools));
    }
    for (name, value) in &config.extra {
        match value {
            Value::Null => body.remove(name),
            value => body.insert(name.clone(), value.clone()),
        };
    }
    body
}

/// Returns a message of ours in the shape of chat completions.
fn spoken(message: &Message) -> Value {
    json!({"role": message.role, "content": message.content})
}

/// Reads what the model said.
fn parse(completion: &Completion) -> ParsedTurn {
    let message = &completion.message;
    let text = |name: &str| message[name].as_str().map(str::to_owned);
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    ParsedTurn {
        reasoning: text("reasoning_content"),
        content: text("content").unwrap_or_default(),
        tool_calls: calls.map(read_call).collect(),
    }
}

fn read_call(call: &Value) -> Result<ToolCall, ToolCallError> {
    let function = &call["function"];
    let name = function["name"].as_str().unwrap_or_default().to_owned();
    let arguments = read_arguments(&name, function["arguments"].as_str().unwrap_or_default())?;
    let id = call["id"].as_str().filter(|id| !id.is_empty());
    Ok(ToolCall {
        id: id.map(str::to_owned),
        ..ToolCall::new(name, arguments)
    })
}

fn read_arguments(name: &str, text: &str) -> Result<Value, ToolCallError> {
    // Of a tool without arguments, some servers say nothing.
    if text.trim().is_empty() {
        return Ok(json!({}));
    }
    let arguments: Value = serde_json::from_str(text).map_err(|error| {
        let message = error.to_string();
        ToolCallError::InvalidJson { message }
    })?;
    match arguments {
        Value::Object(_) => Ok(arguments),
        other => Err(ToolCallError::ArgumentsNotAnObject {
            key: "arguments",
            name: name.to_owned(),
            found: json_type(&other),
        }),
    }
}

/// Adds the model's turn as it said it, and returns the ids of its calls. Its reasoning is left out, as
/// servers want it; calls get the ids that they lack, and what servers or templates may fail on is replaced:
/// arguments that are no object and names that cannot be, of which the model is told what was wrong with them,
/// and `null` for nothing said.
fn push_turn(
    conversation: &mut Vec<Value>,
    mut message: Value,
    tools: &[ToolSpec],
    turn: u64,
) -> Vec<String> {
    let mut ids = Vec::new();
    if let Some(fields) = message.as_object_mut() {
        fields.remove("reasoning_content");
        let calls = fields.get("tool_calls").and_then(Value::as_array);
        if calls.is_none_or(Vec::is_empty) && fields.get("content").is_none_or(Value::is_null) {
            fields.insert("content".to_owned(), Value::from(""));
        }
    }
    // By its index a turn without calls would get a field of nothing, which servers refuse.
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for (index, call) in calls.into_iter().flatten().enumerate() {
        let id = match call["id"].as_str() {
            Some(id) if !id.is_empty() => id.to_owned(),
            _ => format!("call_{turn}_{index}"),
        };
        call["id"] = Value::from(id.as_str());
        ids.push(id);
        let function = &mut call["function"];
        let arguments = function["arguments"].as_str().unwrap_or_default();
        if !serde_json::from_str(arguments).is_ok_and(|value: Value| value.is_object()) {
            function["arguments"] = Value::from("{}");
        }
        let name = function["name"].as_str().unwrap_or_default();
        if !tools.iter().any(|tool| tool.name == name) {
            function["name"] = Value::from(possible_name(name));
        }
    }
    conversation.push(message);
    ids
}

/// Returns a name that every server takes for one of a function's, as much like `name` as it can be.
fn possible_name(name: &str) -> String {
    let possible = |c: char| match c {
        'a'..='z' | 'A'..='Z' | '0'..='9' | '_' | '-' => c,
        _ => '_',
    };
    match name {
        "" => "unnamed".to_owned(),
        name => name.chars().take(MAX_NAME).map(possible).collect(),
    }
}

/// Adds the environment's answers; those of tools answer the calls one by one.
fn push_answers(conversation: &mut Vec<Value>, answers: &[Message], calls: &[String]) {
    let mut calls = calls.iter();
    for answer in answers {
        let mut said = spoken(answer);
        if answer.role == Role::Tool {
            match calls.next() {
                Some(id) => said["tool_call_id"] = Value::from(id.as_str()),
                // Nobody asked: only a person may say it then.
                None => said["role"] = json!(Role::User),
            }
        }
        conversation.push(said);
    }
}

/// Returns how long to wait before try number `tried`, from 1: doubling from half a second, with jitter, so
/// that those who failed together do not come back together.
pub(super) fn backoff(tried: u32) -> Duration {
    let longest = 0.5 * f64::from(1_u32 << (tried - 1).min(7));
    Duration::from_secs_f64(longest * (0.5 + 0.5 * rand::random::<f64>()))
}
