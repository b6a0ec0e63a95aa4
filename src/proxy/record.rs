//! What is kept of a call: who asked what, which ids were sampled, and how.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::ProxyError;
use crate::http::count_values;

/// Log-softmax in f32 may come out this much above 0 for a token that is nearly certain.
const LOGPROB_ROUNDING: f32 = 1e-4;

/// What a JSON value takes besides its text.
const VALUE_BYTES: usize = 100;

/// The exact ids of a call, as they were fed and sampled.
///
/// `completion`, `logprobs` and `loss_mask` have one length; the mask is 1 on the ids that the model
/// drew from its own distribution, 0 on those that were forced or drawn from another one, which are
/// context for what follows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CallTokens {
    prompt: Vec<u32>,
    completion: Vec<u32>,
    logprobs: Vec<f32>,
    loss_mask: Vec<u8>,
}

impl CallTokens {
    /// Takes the ids of a call; `logprobs` are natural logarithms, and `is_target` says which ids may
    /// be learned from.
    ///
    /// # Errors
    ///
    /// Fails when the lengths differ or a target's value is no log-probability.
    pub fn new(
        prompt: Vec<u32>,
        completion: Vec<u32>,
        mut logprobs: Vec<f32>,
        is_target: impl Fn(usize) -> bool,
    ) -> Result<Self, ProxyError> {
        if completion.len() != logprobs.len() {
            return Err(ProxyError::upstream(format!(
                "{} ids were sampled but {} log-probabilities told",
                completion.len(),
                logprobs.len()
            )));
        }
        let loss_mask: Vec<u8> = (0..completion.len())
            .map(|at| u8::from(is_target(at)))
            .collect();
        for (logprob, mask) in logprobs.iter_mut().zip(&loss_mask) {
            if *mask == 0 {
                *logprob = 0.0;
            } else if logprob.is_finite() && *logprob <= LOGPROB_ROUNDING {
                *logprob = logprob.min(0.0);
            } else {
                let message = format!("{logprob} was told as a log-probability");
                return Err(ProxyError::upstream(message));
            }
        }
        Ok(Self {
            prompt,
            completion,
            logprobs,
            loss_mask,
        })
    }

    /// Takes ids whose log-probabilities are not known: context, nothing to learn from.
    #[must_use]
    pub fn context(prompt: Vec<u32>, completion: Vec<u32>) -> Self {
        let length = completion.len();
        Self {
            prompt,
            completion,
            logprobs: vec![0.0; length],
            loss_mask: vec![0; length],
        }
    }

    /// Returns the ids that were fed.
    #[must_use]
    pub fn prompt(&self) -> &[u32] {
        &self.prompt
    }

    /// Returns the ids that came out, a stop token included.
    #[must_use]
    pub fn completion(&self) -> &[u32] {
        &self.completion
    }

    /// Returns the log-probability of each id of the completion; 0 where the mask is 0.
    #[must_use]
    pub fn logprobs(&self) -> &[f32] {
        &self.logprobs
    }

    /// Returns 1 for each id of the completion that may be learned from.
    #[must_use]
    pub fn loss_mask(&self) -> &[u8] {
        &self.loss_mask
    }

    /// Returns how many ids there are, fed and sampled.
    #[must_use]
    pub fn len(&self) -> usize {
        self.prompt.len() + self.completion.len()
    }

    /// Returns whether there are no ids.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns how many ids may be learned from.
    #[must_use]
    pub fn targets(&self) -> usize {
        self.loss_mask.iter().filter(|mask| **mask == 1).count()
    }
}

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The model ended its turn.
    Stop,
    /// The model ended its turn with calls of tools.
    ToolCalls,
    /// A stop string of the request came up, which is not part of the answer's text.
    StopText(String),
    /// The answer or the context was full.
    Length,
}

impl Ending {
    /// Returns OpenAI's `finish_reason`.
    #[must_use]
    pub fn finish_reason(&self) -> &'static str {
        match self {
            Self::Stop | Self::StopText(_) => "stop",
            Self::ToolCalls => "tool_calls",
            Self::Length => "length",
        }
    }
}

/// One call of a session.
#[derive(Debug, Clone)]
pub struct Call {
    /// Its name within all sessions.
    pub id: String,
    /// The attempt of its session that it belongs to.
    pub attempt: u32,
    /// The API that the client spoke.
    pub dialect: &'static str,
    /// The model that the client asked for.
    pub model: String,
    /// The conversation as it was asked, in the shape of chat completions.
    pub messages: Vec<Arc<Value>>,
    /// The tools as they were asked, in the shape of chat completions.
    pub tools: Arc<[Value]>,
    /// The answer that the client got, in the shape of chat completions.
    pub answer: Arc<Value>,
    /// The text of the ids that the answer does not have: a stop string, and what came with it.
    pub unsaid: String,
    /// Why the answer ended.
    pub ending: Ending,
    /// How it was sampled.
    pub sampling: Map<String, Value>,
    /// How the client asked for it to be sampled.
    pub requested: Map<String, Value>,
    /// When it was asked, in seconds since 1970.
    pub started: f64,
    /// From the request to the whole answer.
    pub latency: Duration,
    /// The name that the client has for its own conversation, where it sends one.
    pub client_session: Option<String>,
    /// The exact ids; none where the upstream does not tell them.
    pub tokens: Option<CallTokens>,
    /// Why nothing is to be learned from it, where that is so.
    pub why_context: Option<String>,
}

impl Call {
    /// Returns about how much memory it takes, texts that it shares with other calls left out.
    pub(super) fn bytes(&self) -> u64 {
        let tokens = self.tokens.as_ref().map_or(0, |tokens| {
            4 * tokens.prompt.len() + 9 * tokens.completion.len()
        });
        let why = self.why_context.as_ref().map_or(0, String::len);
        let texts = self.model.len() + self.unsaid.len() + why;
        let values = [json!(self.sampling), json!(self.requested)];
        let values = values.iter().chain([&*self.answer]);
        let values: u64 = values.map(|value| value_bytes(&value.to_string())).sum();
        (1024 + 16 * self.messages.len() + tokens + texts) as u64 + values
    }

    /// Returns the conversation as it was asked.
    pub(super) fn messages(&self) -> Vec<&Value> {
        self.messages.iter().map(|message| &**message).collect()
    }

    /// Returns it as one line of a recording.
    pub(super) fn line<'a>(&'a self, session: &'a str) -> impl Serialize + use<'a> {
        let tokens = self.tokens.as_ref();
        CallLine {
            kind: "call",
            session_id: session,
            attempt: self.attempt,
            call_id: &self.id,
            dialect: self.dialect,
            model: &self.model,
            messages: self.messages(),
            tools: &self.tools,
            answer: &self.answer,
            finish_reason: self.ending.finish_reason(),
            sampling_params: &self.sampling,
            requested_sampling_params: &self.requested,
            started: self.started,
            latency_seconds: self.latency.as_secs_f64(),
            client_session_id: self.client_session.as_deref(),
            prompt_token_ids: tokens.map(CallTokens::prompt),
            completion_token_ids: tokens.map(CallTokens::completion),
            logprobs: tokens.map(CallTokens::logprobs),
            loss_mask: tokens.map(CallTokens::loss_mask),
            why_context: self.why_context.as_deref(),
        }
    }
}

/// A call as a recording has it. Ids are written as they are: each as a JSON value of its own would take
/// many times the room.
#[derive(Debug, Serialize)]
struct CallLine<'a> {
    kind: &'static str,
    session_id: &'a str,
    attempt: u32,
    call_id: &'a str,
    dialect: &'static str,
    model: &'a str,
    messages: Vec<&'a Value>,
    tools: &'a [Value],
    answer: &'a Value,
    finish_reason: &'static str,
    sampling_params: &'a Map<String, Value>,
    requested_sampling_params: &'a Map<String, Value>,
    started: f64,
    latency_seconds: f64,
    client_session_id: Option<&'a str>,
    prompt_token_ids: Option<&'a [u32]>,
    completion_token_ids: Option<&'a [u32]>,
    logprobs: Option<&'a [f32]>,
    loss_mask: Option<&'a [u8]>,
    why_context: Option<&'a str>,
}

/// Returns about how much memory the JSON value of a text takes.
pub(super) fn value_bytes(text: &str) -> u64 {
    (text.len() + VALUE_BYTES * count_values(text.as_bytes())) as u64
}

/// Returns a call that says nothing.
#[cfg(test)]
pub(super) fn test_call() -> Call {
    Call {
        id: "call".to_owned(),
        attempt: 1,
        dialect: "chat",
        model: "m".to_owned(),
        messages: Vec::new(),
        tools: Arc::default(),
        answer: Arc::new(json!({"role": "assistant", "content": ""})),
        unsaid: String::new(),
        ending: Ending::Stop,
        sampling: Map::new(),
        requested: Map::new(),
        started: 0.0,
        latency: Duration::ZERO,
        client_session: None,
        tokens: None,
        why_context: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_a_call_holds_is_counted() {
        let bare = test_call().bytes();
        let long = || "x".repeat(5000);
        let changes: [fn(&mut Call, String); 5] = [
            |call, text| call.model = text,
            |call, text| call.unsaid = text,
            |call, text| call.why_context = Some(text),
            |call, text| drop(call.requested.insert("stop".to_owned(), json!([text]))),
            |call, text| drop(call.sampling.insert("stop".to_owned(), json!([text]))),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut call = test_call();
            change(&mut call, long());
            assert!(call.bytes() > bare + 4900, "{number}");
        }
        // Each value takes far more than its two bytes of text.
        let values = json!(vec![0; 10_000]);
        assert!(value_bytes(&values.to_string()) >= 10_000 * 64);
    }
}
