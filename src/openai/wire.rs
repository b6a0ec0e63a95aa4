//! Requests as clients send them. Fields that are not known here are ignored, as other servers do.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

/// What both kinds of completion may ask for.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Common {
    pub(super) temperature: Option<f32>,
    pub(super) top_p: Option<f32>,
    /// vLLM's; -1 and 0 are no limit.
    pub(super) top_k: Option<i64>,
    /// vLLM's.
    pub(super) min_p: Option<f32>,
    /// vLLM's.
    pub(super) repetition_penalty: Option<f32>,
    pub(super) presence_penalty: Option<f32>,
    pub(super) frequency_penalty: Option<f32>,
    pub(super) logit_bias: Option<BTreeMap<String, f32>>,
    pub(super) max_tokens: Option<usize>,
    /// vLLM's.
    pub(super) min_tokens: Option<usize>,
    pub(super) stop: Option<OneOrMany<String>>,
    /// vLLM's.
    pub(super) stop_token_ids: Option<Vec<u32>>,
    /// vLLM's.
    pub(super) ignore_eos: Option<bool>,
    pub(super) seed: Option<i64>,
    pub(super) n: Option<usize>,
    pub(super) stream: Option<bool>,
    pub(super) stream_options: Option<StreamOptions>,
    /// vLLM's: whether token ids come with the text.
    pub(super) return_token_ids: Option<bool>,
}

/// A value or a list of values.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> From<OneOrMany<T>> for Vec<T> {
    fn from(values: OneOrMany<T>) -> Self {
        match values {
            OneOrMany::One(value) => vec![value],
            OneOrMany::Many(values) => values,
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamOptions {
    pub(super) include_usage: Option<bool>,
}

/// `POST /v1/chat/completions`
#[derive(Debug, Deserialize)]
pub(super) struct ChatRequest {
    pub(super) model: String,
    pub(super) messages: Vec<Value>,
    #[serde(default)]
    pub(super) tools: Option<Vec<Value>>,
    #[serde(default)]
    pub(super) tool_choice: Option<Value>,
    #[serde(default)]
    pub(super) max_completion_tokens: Option<usize>,
    #[serde(default)]
    pub(super) logprobs: Option<bool>,
    #[serde(default)]
    pub(super) top_logprobs: Option<usize>,
    #[serde(default)]
    pub(super) response_format: Option<Value>,
    /// vLLM's: variables of the chat template, such as `enable_thinking`.
    #[serde(default)]
    pub(super) chat_template_kwargs: Option<Map<String, Value>>,
    /// vLLM's: most tokens of reasoning.
    #[serde(default)]
    pub(super) thinking_token_budget: Option<usize>,
    #[serde(flatten)]
    pub(super) common: Common,
}

/// `POST /v1/completions`
#[derive(Debug, Deserialize)]
pub(super) struct CompletionRequest {
    pub(super) model: String,
    pub(super) prompt: Prompt,
    #[serde(default)]
    pub(super) logprobs: Option<usize>,
    #[serde(default)]
    pub(super) echo: Option<bool>,
    #[serde(default)]
    pub(super) suffix: Option<String>,
    #[serde(default)]
    pub(super) best_of: Option<usize>,
    #[serde(flatten)]
    pub(super) common: Common,
}

/// Text or token ids, one or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    ManyTokens(Vec<Vec<u32>>),
}
