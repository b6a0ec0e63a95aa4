//! Trajectories in the Agent Trajectory Interchange Format, version 1.8, which Harbor's tools read.
//!
//! The conversation becomes steps: what a tool answered is the observation of the turn that called it. A
//! turn that was sampled here has its ids, those of its prompt and its log-probabilities. What the format has
//! no field for, the score above all, is in `extra`.

use std::ops::Range;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::Trajectory;
use crate::chat::{Message, Role, ToolCall};

/// The version that is written.
pub const ATIF_VERSION: &str = "ATIF-v1.8";

/// Where a trajectory comes from.
#[derive(Debug, Clone, Default)]
pub struct AtifOrigin {
    /// The run that it belongs to, which others share.
    pub session: Option<String>,
    /// The policy's name.
    pub model: Option<String>,
}

/// A trajectory as the format has it; it serialises to one document.
#[derive(Debug, Serialize)]
pub struct AtifTrajectory<'a> {
    schema_version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<&'a str>,
    trajectory_id: String,
    agent: Agent<'a>,
    steps: Vec<Step<'a>>,
    final_metrics: FinalMetrics,
    extra: Value,
}

#[derive(Debug, Serialize)]
struct Agent<'a> {
    name: &'static str,
    version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    model_name: Option<&'a str>,
}

#[derive(Debug, Serialize)]
struct Step<'a> {
    step_id: usize,
    source: &'static str,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    observation: Option<Observation<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<Metrics<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    is_copied_context: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    llm_call_count: Option<u32>,
}

#[derive(Debug, Serialize)]
struct Call<'a> {
    tool_call_id: String,
    function_name: &'a str,
    arguments: Map<String, Value>,
}

#[derive(Debug, Serialize)]
struct Observation<'a> {
    results: Vec<ObservationResult<'a>>,
}

#[derive(Debug, Serialize)]
struct ObservationResult<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    source_call_id: Option<String>,
    content: &'a str,
}

#[derive(Debug, Serialize)]
struct Metrics<'a> {
    prompt_tokens: usize,
    completion_tokens: usize,
    prompt_token_ids: &'a [u32],
    completion_token_ids: &'a [u32],
    logprobs: &'a [f32],
    /// Only where some of the ids were not sampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    extra: Option<Value>,
}

#[derive(Debug, Serialize)]
struct FinalMetrics {
    total_prompt_tokens: usize,
    total_completion_tokens: usize,
    total_steps: usize,
}

impl<'a> AtifTrajectory<'a> {
    /// Returns `trajectory` in the format; `id` is its own among those of its run. (The group and the number
    /// of a sample are not: an agent's episode may be several trajectories.)
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use wardian::trajectory::{AtifOrigin, AtifTrajectory, read_step};
    ///
    /// let origin = AtifOrigin::default();
    /// for (row, trajectory) in (1..).zip(read_step("run/rollouts/step-1.jsonl".as_ref())?) {
    ///     let trajectory = trajectory?;
    ///     let document = AtifTrajectory::new(format!("step-1-row-{row}"), &trajectory, &origin);
    ///     println!("{}", serde_json::to_string(&document)?);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn new(id: String, trajectory: &'a Trajectory, origin: &'a AtifOrigin) -> Self {
        let steps = steps(trajectory);
        let sampled = || steps.iter().filter_map(|step| step.metrics.as_ref());
        let final_metrics = FinalMetrics {
            total_prompt_tokens: sampled().map(|metrics| metrics.prompt_tokens).sum(),
            total_completion_tokens: sampled().map(|metrics| metrics.completion_tokens).sum(),
            total_steps: steps.len(),
        };
        Self {
            schema_version: ATIF_VERSION,
            session_id: origin.session.as_deref(),
            trajectory_id: id,
            agent: Agent {
                name: "wardian",
                version: env!("CARGO_PKG_VERSION"),
                model_name: origin.model.as_deref(),
            },
            steps,
            final_metrics,
            extra: json!({
                "task_id": trajectory.task_id,
                "group": trajectory.group,
                "sample": trajectory.sample,
                "policy_step": trajectory.policy_step,
                "reward": trajectory.reward,
                "rewards": trajectory.rewards,
                "passed": trajectory.passed,
                "status": trajectory.status,
            }),
        }
    }
}

/// Returns the steps of a conversation, numbered from 1.
fn steps(trajectory: &Trajectory) -> Vec<Step<'_>> {
    let mut steps: Vec<Step<'_>> = Vec::new();
    let mut messages = trajectory.messages.iter().enumerate().peekable();
    while let Some((position, message)) = messages.next() {
        let mut step = Step {
            step_id: steps.len() + 1,
            source: source(message.role),
            message: &message.content,
            reasoning_content: None,
            tool_calls: Vec::new(),
            observation: None,
            metrics: None,
            is_copied_context: None,
            llm_call_count: None,
        };
        if message.role == Role::Assistant {
            let mut turns = trajectory.turns.iter();
            let turn = turns.find(|turn| turn.message == position);
            step.reasoning_content = message.reasoning_content.as_deref();
            step.tool_calls = calls(step.step_id, &message.tool_calls);
            // What the task shows the policy as an example was not said by it.
            step.is_copied_context = turn.is_none().then_some(true);
            step.llm_call_count = turn.map(|_| 1);
            step.metrics = turn.and_then(|turn| metrics(trajectory, turn.tokens.clone()));
            let mut answers = Vec::new();
            while let Some((_, answer)) = messages.next_if(|(_, next)| next.role == Role::Tool) {
                answers.push(answer);
            }
            step.observation = observation(&step.tool_calls, &answers);
        }
        steps.push(step);
    }
    steps
}

fn source(role: Role) -> &'static str {
    match role {
        Role::System => "system",
        Role::User | Role::Tool => "user",
        Role::Assistant => "agent",
    }
}

/// Returns the calls of a step, each with a name; who made none gets one.
fn calls(step: usize, calls: &[ToolCall]) -> Vec<Call<'_>> {
    let named = calls.iter().enumerate().map(|(at, call)| Call {
        tool_call_id: match &call.id {
            Some(id) => id.clone(),
            None => format!("call_{step}_{at}"),
        },
        function_name: &call.name,
        arguments: arguments(&call.arguments),
    });
    named.collect()
}

/// Returns arguments as the object that the format wants, whatever the policy wrote.
fn arguments(value: &Value) -> Map<String, Value> {
    let object = match value {
        Value::Object(object) => Some(object.clone()),
        Value::String(text) => serde_json::from_str(text).ok(),
        _ => None,
    };
    object.unwrap_or_else(|| {
        [("arguments".to_owned(), value.clone())]
            .into_iter()
            .collect()
    })
}

/// Returns what tools answered. An answer belongs to the call that it names, or to the one in its place where
/// each call has one; calls that could not be read have answers, too, and are not among the calls.
fn observation<'a>(calls: &[Call<'_>], answers: &[&'a Message]) -> Option<Observation<'a>> {
    let is_one_each = calls.len() == answers.len();
    let result = |(at, answer): (usize, &&'a Message)| {
        let named = answer.tool_call_id.as_deref();
        let call = match named {
            Some(id) => calls.iter().find(|call| call.tool_call_id == id),
            None if is_one_each => calls.get(at),
            None => None,
        };
        ObservationResult {
            source_call_id: call.map(|call| call.tool_call_id.clone()),
            content: &answer.content,
        }
    };
    let results: Vec<_> = answers.iter().enumerate().map(result).collect();
    (!results.is_empty()).then_some(Observation { results })
}

/// Returns the tokens of a turn, unless they are not known.
fn metrics(trajectory: &Trajectory, tokens: Range<usize>) -> Option<Metrics<'_>> {
    let trace = &trajectory.trace;
    let mask = trace.loss_mask().get(tokens.clone())?;
    if mask.is_empty() {
        return None;
    }
    Some(Metrics {
        prompt_tokens: tokens.start,
        completion_tokens: tokens.len(),
        prompt_token_ids: &trace.ids()[..tokens.start],
        completion_token_ids: &trace.ids()[tokens.clone()],
        logprobs: &trace.logprobs()[tokens],
        extra: mask.contains(&0).then(|| json!({ "loss_mask": mask })),
    })
}

#[cfg(test)]
mod tests {
    use indexmap::IndexMap;

    use super::*;
    use crate::trajectory::{Finish, Status, TokenTrace, Turn, Usage};

    fn turn(message: usize, tokens: Range<usize>) -> Turn {
        Turn {
            message,
            tokens,
            finish: Finish::Stop,
            tool_calls: 0,
            tool_failures: 0,
            runs: Vec::new(),
        }
    }

    /// An episode of two turns, with an example before it.
    fn episode() -> Trajectory {
        let mut trace = TokenTrace::new();
        trace.push_prompt(&[1, 2, 3]).unwrap();
        trace.push_sampled(&[4, 5], &[-0.5, -0.25]).unwrap();
        trace.push_observation(&[6]);
        trace.push_sampled(&[7], &[-1.0]).unwrap();
        trace.push_observation(&[8]);
        trace.push_sampled(&[9], &[-2.0]).unwrap();
        let called = |calls: Vec<ToolCall>| Message {
            tool_calls: calls,
            ..Message::assistant("look")
        };
        let named = ToolCall {
            id: Some("mine".to_owned()),
            ..ToolCall::new("bash", json!({"command": "ls"}))
        };
        let answer = Message {
            tool_call_id: Some("mine".to_owned()),
            ..Message::tool("file")
        };
        Trajectory {
            task_id: "t/1".to_owned(),
            group: 2,
            sample: 3,
            policy_step: 5,
            segments: vec![],
            messages: vec![
                Message::system("be brief"),
                Message::user("example?"),
                Message::assistant("yes"),
                Message::user("go"),
                Message {
                    reasoning_content: Some("hm".to_owned()),
                    ..called(vec![
                        named,
                        ToolCall::new("bash", json!("{\"command\": \"pwd\"}")),
                        ToolCall::new("bash", json!(7)),
                    ])
                },
                answer,
                Message::tool("/"),
                Message::tool("no such argument"),
                Message::tool("a call that could not be read"),
                Message::user("go on"),
                Message::assistant("done"),
            ],
            turns: vec![turn(4, 3..5), turn(10, 6..9)],
            trace,
            reward: Some(0.5),
            rewards: IndexMap::from([("tests".to_owned(), 0.5)]),
            passed: Some(false),
            status: Status::Finished,
            usage: Usage::default(),
        }
    }

    fn document(id: &str, episode: &Trajectory, origin: &AtifOrigin) -> Value {
        serde_json::to_value(AtifTrajectory::new(id.to_owned(), episode, origin)).unwrap()
    }

    #[test]
    fn a_conversation_becomes_steps() {
        let origin = AtifOrigin {
            session: Some("run".to_owned()),
            model: Some("small".to_owned()),
        };
        let episode = episode();
        let document = document("step-5-row-1", &episode, &origin);
        assert_eq!(document["trajectory_id"], "step-5-row-1");
        assert_eq!(document["schema_version"], "ATIF-v1.8");
        assert_eq!(document["session_id"], "run");
        assert_eq!(document["agent"]["model_name"], "small");
        let steps = document["steps"].as_array().unwrap();
        let of = |key: &str| {
            steps
                .iter()
                .map(|step| step[key].clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(of("step_id"), [1, 2, 3, 4, 5, 6, 7]);
        let sources = ["system", "user", "agent", "user", "agent", "user", "agent"];
        assert_eq!(of("source"), sources);
        assert_eq!(steps[2]["is_copied_context"], true);
        assert_eq!(steps[2].get("metrics"), None);
        let calls = json!([
            {"tool_call_id": "mine", "function_name": "bash", "arguments": {"command": "ls"}},
            {"tool_call_id": "call_5_1", "function_name": "bash", "arguments": {"command": "pwd"}},
            {"tool_call_id": "call_5_2", "function_name": "bash", "arguments": {"arguments": 7}},
        ]);
        assert_eq!(steps[4]["tool_calls"], calls);
        // There is one answer more than there are calls: only a name tells whose one is.
        let results = json!([
            {"source_call_id": "mine", "content": "file"},
            {"content": "/"},
            {"content": "no such argument"},
            {"content": "a call that could not be read"},
        ]);
        assert_eq!(steps[4]["observation"]["results"], results);
        assert_eq!(document["extra"]["reward"], 0.5);
        assert_eq!(document["extra"]["status"]["kind"], "finished");
    }

    #[test]
    fn a_turn_has_exactly_its_tokens() {
        let episode = episode();
        let origin = AtifOrigin::default();
        let document = document("", &episode, &origin);
        let metrics = &document["steps"][4]["metrics"];
        assert_eq!(metrics["prompt_token_ids"], json!([1, 2, 3]));
        assert_eq!(metrics["completion_token_ids"], json!([4, 5]));
        assert_eq!(metrics["logprobs"], json!([-0.5, -0.25]));
        assert_eq!(metrics.get("extra"), None);
        let metrics = &document["steps"][6]["metrics"];
        assert_eq!(metrics["completion_token_ids"], json!([7, 8, 9]));
        assert_eq!(metrics["extra"], json!({"loss_mask": [1, 0, 1]}));
        let totals = json!({
            "total_prompt_tokens": 9, "total_completion_tokens": 5, "total_steps": 7,
        });
        assert_eq!(document["final_metrics"], totals);
    }

    #[test]
    fn answers_in_the_place_of_their_calls_belong_to_them() {
        let mut episode = episode();
        episode.messages.remove(8);
        episode.turns[1].message = 9;
        let origin = AtifOrigin::default();
        let document = document("", &episode, &origin);
        let results = document["steps"][4]["observation"]["results"]
            .as_array()
            .unwrap();
        let ids: Vec<_> = results
            .iter()
            .map(|result| &result["source_call_id"])
            .collect();
        assert_eq!(ids, ["mine", "call_5_1", "call_5_2"]);
    }
}
