//! Episodes in an environment elsewhere.

use std::sync::Arc;
use std::time::Instant;

use indexmap::IndexMap;
use serde_json::{Map, Value};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use super::actions::Actions;
use super::connect::patiently;
use super::frames::{self, MAX_REWARD, Reply};
use super::observe::{self, NOTHING, ToolOutcome};
use super::session::Session;
use super::slots::Lease;
use super::{ClientError, Fault, Link, RewardRule, Shared};
use crate::chat::{Message, ParsedTurn, Role, ToolCall, ToolSpec};
use crate::env::{EnvError, Environment, EpisodeStats, EpisodeStatus, StepResult, head_and_tail};

/// The name of the reward among its parts.
const REWARD_PART: &str = "environment";

/// What an episode begins with.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Opening {
    /// What is said before the environment says something; may be nothing.
    pub messages: Vec<Message>,
    /// What the reset is given, its seed included.
    pub arguments: Map<String, Value>,
}

/// Settings of episodes.
#[derive(Debug, Clone, PartialEq)]
pub struct EpisodeSettings {
    /// Opening system message, where the opening has none of its own.
    pub system_prompt: Option<String>,
    /// Assistant turns before the episode ends with what it was rewarded so far.
    pub max_turns: usize,
    /// Characters of an observation shown to the model; the middle is cut.
    pub max_output_chars: usize,
}

/// What a reset gives back, later: the slot, and what came of it.
type Begun = (Lease, Result<Reply, Fault>);

/// One episode in an environment elsewhere: a session of its server while it lasts.
pub struct RemoteEnvironment {
    shared: Arc<Shared>,
    opening: Arc<Opening>,
    settings: Arc<EpisodeSettings>,
    /// A reset that is under way.
    pending: Option<oneshot::Receiver<Begun>>,
    /// What came of it, where that was looked at before it was waited for.
    begun: Option<Begun>,
    /// From the reset to the end of the episode.
    lease: Option<Lease>,
    turns: usize,
    reward: Option<f64>,
    stats: EpisodeStats,
}

impl std::fmt::Debug for RemoteEnvironment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteEnvironment")
            .field("url", &self.shared.link.endpoint.url())
            .field("slot", &self.lease.as_ref().map(|lease| lease.slot))
            .field("turns", &self.turns)
            .finish_non_exhaustive()
    }
}

/// How a step goes on.
enum Step {
    /// With what the policy is told.
    Told(Message),
    /// Not at all: the episode is over.
    Over,
}

impl RemoteEnvironment {
    pub(super) fn new(
        shared: Arc<Shared>,
        opening: Arc<Opening>,
        settings: Arc<EpisodeSettings>,
    ) -> Self {
        Self {
            shared,
            opening,
            settings,
            pending: None,
            begun: None,
            lease: None,
            turns: 0,
            reward: None,
            stats: EpisodeStats::default(),
        }
    }

    /// Sends an action and returns the reply.
    fn act(&mut self, action: &Value) -> Result<Reply, EnvError> {
        let config = &self.shared.link.config;
        let (limit, key) = (config.step_timeout, "env.step_timeout");
        let Some(lease) = &mut self.lease else {
            return Err(self.shared.failed(0, "step", Fault::Ended));
        };
        let started = Instant::now();
        let result = match &lease.session {
            Some(session) => {
                let asked = session.ask(frames::step(action), limit, key);
                self.shared.runtime().block_on(asked)
            }
            None => Err(Fault::closed_without_words()),
        };
        self.stats.tool_seconds += started.elapsed().as_secs_f64();
        let slot = lease.slot;
        result.map_err(|fault| self.shared.failed(slot, "step", fault))
    }

    /// Sends an action, or returns what the policy is told of one that the server does not take: it knows
    /// more of an action's schema than is checked here, and that is the policy's to keep.
    fn act_or_refusal(&mut self, action: &Value) -> Result<Result<Reply, String>, EnvError> {
        match self.act(action) {
            Err(EnvError::Remote { source }) if is_invalid_action(&*source) => {
                // Not where the server is: that is nobody's to learn.
                let fault = std::error::Error::source(&*source);
                let reason = fault.map_or_else(String::new, crate::causes::with_causes);
                Ok(Err(self.shown(&format!("error: {reason}"))))
            }
            reply => reply.map(Ok),
        }
    }

    /// Takes the reward of a reply.
    fn reward(&mut self, reward: Option<f64>) -> Result<(), EnvError> {
        let Some(last) = reward else { return Ok(()) };
        let reward = match self.shared.link.config.reward {
            RewardRule::Last => last,
            RewardRule::Sum => self.reward.unwrap_or(0.0) + last,
        };
        if reward.abs() > MAX_REWARD {
            let fault = Fault::RewardSum { last, sum: reward };
            return Err(self.shared.failed(self.slot(), "step", fault));
        }
        self.reward = Some(reward);
        Ok(())
    }

    /// Returns the number of the episode's slot.
    fn slot(&self) -> usize {
        self.lease.as_ref().map_or(0, |lease| lease.slot)
    }

    /// Calls a tool, or tells the policy why that is no call.
    fn call(&mut self, call: &ToolCall) -> Result<Step, EnvError> {
        self.stats.tool_calls += 1;
        let action = match self.shared.actions.of_call(call) {
            Ok(action) => action,
            Err(refusal) => {
                self.stats.tool_failures += 1;
                return Ok(Step::Told(Message::tool_result(
                    call,
                    format!("error: {refusal}"),
                )));
            }
        };
        let _span = tracing::info_span!("tool", tool = %call.name).entered();
        let reply = match self.act_or_refusal(&action)? {
            Ok(reply) => reply,
            Err(refusal) => {
                self.stats.tool_failures += 1;
                return Ok(Step::Told(Message::tool_result(call, refusal)));
            }
        };
        let ToolOutcome { text, is_failure } = match &self.shared.actions {
            Actions::Tools(_) => {
                let slot = self.slot();
                let field = self.shared.link.config.observation.as_deref();
                observe::tool_outcome(&reply.observation, field)
                    .map_err(|fault| self.shared.failed(slot, "step", fault))?
            }
            Actions::Step(_) | Actions::Text { .. } => ToolOutcome {
                text: self.text_of(&reply.observation),
                is_failure: false,
            },
        };
        self.stats.tool_failures += u32::from(is_failure);
        Ok(match self.take(&reply)? {
            true => Step::Over,
            false => Step::Told(Message::tool_result(call, self.shown(&text))),
        })
    }

    /// Takes what a reply says of the episode; returns whether it is over.
    fn take(&mut self, reply: &Reply) -> Result<bool, EnvError> {
        self.reward(reply.reward)?;
        // An interpreter that met a limit has no state to go on with, and says so.
        let is_lost = reply.metadata.get("state_lost") == Some(&Value::Bool(true));
        let exit = reply.metadata.get("exit").and_then(|exit| exit.get("kind"));
        // Fuel ends programs that do not end; a clock ends those of a server that is busy.
        if is_lost && exit.and_then(Value::as_str) == Some("deadline_exceeded") {
            return Err(self.shared.failed(self.slot(), "step", Fault::Deadline));
        }
        Ok(reply.done || is_lost)
    }

    fn text_of(&self, observation: &Map<String, Value>) -> String {
        let field = self.shared.link.config.observation.as_deref();
        observe::text(observation, field)
    }

    /// Returns a text as the policy is shown it.
    fn shown(&self, text: &str) -> String {
        match text {
            "" => NOTHING.to_owned(),
            text => head_and_tail(text, self.settings.max_output_chars),
        }
    }

    /// Returns the opening messages: the system's, the task's, and what the reset said behind the last of
    /// the user's, as TRL has it.
    fn open(&self, reply: &Reply) -> Vec<Message> {
        let mut messages = Vec::with_capacity(self.opening.messages.len() + 2);
        let opening = &self.opening.messages;
        let has_system = opening
            .first()
            .is_some_and(|first| first.role == Role::System);
        let prompt = self.settings.system_prompt.as_ref();
        messages.extend(
            prompt
                .filter(|_| !has_system)
                .map(|prompt| Message::system(prompt.clone())),
        );
        messages.extend(opening.iter().cloned());
        let said = self.text_of(&reply.observation);
        if !said.is_empty() {
            let said = self.shown(&said);
            match messages.last_mut() {
                Some(last) if last.role == Role::User => {
                    last.content = format!("{}\n\n{said}", last.content);
                }
                _ => messages.push(Message::user(said)),
            }
        }
        messages
    }

    /// Ends the episode, and frees its slot.
    fn end(&mut self, is_finished: bool) -> StepResult {
        self.lease = None;
        // What was never rewarded has earned nothing.
        let reward = self.reward.unwrap_or(0.0);
        let status = match reward >= self.shared.link.config.pass_reward {
            true => EpisodeStatus::Passed,
            false if is_finished => EpisodeStatus::Failed,
            false => EpisodeStatus::NoSubmission,
        };
        StepResult {
            observation: Vec::new(),
            reward: Some(reward),
            rewards: IndexMap::from([(REWARD_PART.to_owned(), reward)]),
            done: true,
            status: Some(status),
            fault: None,
        }
    }

    fn take_turn(&mut self, turn: &ParsedTurn) -> Result<StepResult, EnvError> {
        self.turns += 1;
        let mut observation = Vec::with_capacity(turn.tool_calls.len().max(1));
        for call in &turn.tool_calls {
            match call {
                Ok(call) => match self.call(call)? {
                    Step::Told(message) => observation.push(message),
                    Step::Over => return Ok(self.end(true)),
                },
                Err(error) => {
                    self.stats.tool_calls += 1;
                    self.stats.tool_failures += 1;
                    observation.push(Message::tool(format!("error: {error}")));
                }
            }
        }
        if turn.tool_calls.is_empty() {
            let Some(action) = self.shared.actions.of_text(&turn.content) else {
                // Without a call there is nothing to do: the policy is done.
                return Ok(self.end(true));
            };
            match self.act_or_refusal(&action)? {
                Ok(reply) => {
                    if self.take(&reply)? {
                        return Ok(self.end(true));
                    }
                    let text = self.text_of(&reply.observation);
                    observation.push(Message::user(self.shown(&text)));
                }
                Err(refusal) => observation.push(Message::user(refusal)),
            }
        }
        if self.turns >= self.settings.max_turns {
            return Ok(self.end(false));
        }
        Ok(StepResult::goes_on(observation))
    }
}

impl Environment for RemoteEnvironment {
    fn prepare(&mut self) {
        // The slot of an earlier episode of this environment is free before the next is taken.
        self.lease = None;
        let lease = self.shared.slots.lease();
        let link = Arc::clone(&self.shared.link);
        let frame = frames::reset(&self.opening.arguments);
        let (sender, receiver) = oneshot::channel();
        self.shared.runtime().spawn(async move {
            // Whoever waits no longer drops the slot, which is free then.
            let _ = sender.send(begin(&link, lease, frame).await);
        });
        (self.pending, self.begun) = (Some(receiver), None);
    }

    fn is_prepared(&mut self) -> bool {
        let Some(pending) = self.pending.as_mut().filter(|_| self.begun.is_none()) else {
            return true;
        };
        match pending.try_recv() {
            Ok(begun) => self.begun = Some(begun),
            Err(TryRecvError::Empty) => return false,
            // The reset says what that means.
            Err(TryRecvError::Closed) => {}
        }
        true
    }

    fn reset(&mut self) -> Result<Vec<Message>, EnvError> {
        if self.pending.is_none() {
            self.prepare();
        }
        self.turns = 0;
        self.reward = None;
        self.stats = EpisodeStats::default();
        let ended = || self.shared.failed(0, "reset", Fault::Ended);
        let pending = self.pending.take().ok_or_else(ended)?;
        let (lease, result) = match self.begun.take() {
            Some(begun) => begun,
            None => pending.blocking_recv().map_err(|_| ended())?,
        };
        let slot = lease.slot;
        let reply = result.map_err(|fault| self.shared.failed(slot, "reset", fault))?;
        let messages = self.open(&reply);
        if !messages.iter().any(|message| message.role == Role::User) {
            return Err(remote(ClientError::NoOpening {
                url: self.shared.link.endpoint.url().to_owned(),
            }));
        }
        self.lease = Some(lease);
        Ok(messages)
    }

    fn waits(&self) -> bool {
        true
    }

    fn tools(&self) -> &[ToolSpec] {
        self.shared.actions.tools()
    }

    fn step(&mut self, turn: &ParsedTurn) -> Result<StepResult, EnvError> {
        let result = self.take_turn(turn);
        if result.is_err() {
            self.lease = None;
        }
        result
    }

    fn close(&mut self, _cut_off: Option<&ParsedTurn>) -> StepResult {
        self.end(false)
    }

    fn stats(&self) -> EpisodeStats {
        self.stats
    }
}

/// Resets the session of a slot, or opens one.
async fn begin(link: &Link, mut lease: Lease, frame: String) -> Begun {
    let (limit, key) = (link.config.reset_timeout, "env.reset_timeout");
    if let Some(session) = lease.session.take().filter(Session::is_open) {
        match session.ask(frame.clone(), limit, key).await {
            // It ended while nobody asked it, and this is how one learns of that. A reset begins from
            // nothing, so that nothing is lost by another one.
            Err(fault) if fault.is_of_connection() => {}
            result => {
                lease.session = Some(session);
                return (lease, result);
            }
        }
    }
    let slot = lease.slot;
    let opened = patiently(link.config.retry_timeout, slot, || async {
        let socket = link.endpoint.open(slot).await?;
        let session = Session::start(socket, link.endpoint.max_message_bytes());
        let reply = session.ask(frame.clone(), limit, key).await?;
        Ok((session, reply))
    });
    match opened.await {
        Ok((session, reply)) => {
            lease.session = Some(session);
            (lease, Ok(reply))
        }
        Err(fault) => (lease, Err(fault)),
    }
}

/// Wraps a failure of the client as one of an environment.
pub(super) fn remote(error: ClientError) -> EnvError {
    EnvError::Remote {
        source: Box::new(error),
    }
}

/// Returns whether a server refused an action for what it is.
fn is_invalid_action(error: &(dyn std::error::Error + 'static)) -> bool {
    let Some(ClientError::Session { source, .. }) = error.downcast_ref() else {
        return false;
    };
    matches!(source, Fault::Said { code, .. } if code == "VALIDATION_ERROR")
}
