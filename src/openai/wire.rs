//! Requests as clients send them. Fields that are not known here are ignored, as other servers do; a
//! field of another type than it must have is refused by its name.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::ApiError;

/// The fields of a request, each of which is taken once. `null` is as good as nothing.
#[derive(Debug)]
pub(crate) struct Fields(Map<String, Value>);

impl From<Map<String, Value>> for Fields {
    fn from(fields: Map<String, Value>) -> Self {
        Self(fields)
    }
}

impl Fields {
    /// Reads a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        parse_object(body).map(Self)
    }

    fn take<T>(
        &mut self,
        name: &'static str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(&value)
                .map(Some)
                .ok_or_else(|| mistyped(name, expected, &value)),
        }
    }

    fn required<T>(name: &'static str, value: Option<T>) -> Result<T, ApiError> {
        value.ok_or_else(|| ApiError::invalid(name, format!("`{name}` is missing")))
    }

    /// Takes a number that single precision can hold: one that it would make 0 or infinite is
    /// refused.
    fn number(&mut self, name: &'static str) -> Result<Option<f32>, ApiError> {
        match self.take(name, "a number", Value::as_f64)? {
            None => Ok(None),
            Some(number) => single(number).map(Some).ok_or_else(|| {
                ApiError::invalid(name, format!("`{name}` is {number:?}, beyond any range"))
            }),
        }
    }

    fn integer(&mut self, name: &'static str) -> Result<Option<i64>, ApiError> {
        self.take(name, "an integer of 64 bits", as_integer)
    }

    fn count(&mut self, name: &'static str) -> Result<Option<usize>, ApiError> {
        let read = |value: &Value| usize::try_from(as_integer(value)?).ok();
        self.take(name, "an integer that is not negative", read)
    }

    fn flag(&mut self, name: &'static str) -> Result<Option<bool>, ApiError> {
        self.take(name, "true or false", Value::as_bool)
    }

    fn text(&mut self, name: &'static str) -> Result<Option<String>, ApiError> {
        self.take(name, "a string", as_text)
    }

    fn texts(&mut self, name: &'static str) -> Result<Option<Vec<String>>, ApiError> {
        self.take(name, "a string or a list of strings", |value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            value => as_list(value, as_text),
        })
    }

    fn tokens(&mut self, name: &'static str) -> Result<Option<Vec<u32>>, ApiError> {
        let read = |value: &Value| as_list(value, as_token);
        self.take(name, "a list of token ids", read)
    }

    fn list(&mut self, name: &'static str) -> Result<Option<Vec<Value>>, ApiError> {
        self.take(name, "a list", |value| value.as_array().cloned())
    }

    fn object(&mut self, name: &'static str) -> Result<Option<Map<String, Value>>, ApiError> {
        self.take(name, "an object", |value| value.as_object().cloned())
    }

    fn any(&mut self, name: &'static str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }
}

/// Reads a body, which must be an object.
pub(crate) fn parse_object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let refuse = |message| ApiError::Invalid {
        message,
        param: None,
        code: None,
    };
    match serde_json::from_slice(body) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(other) => Err(refuse(format!(
            "the body must be a JSON object, not {}",
            kind(&other)
        ))),
        Err(error) => Err(refuse(format!("the body is not JSON: {error}"))),
    }
}

/// Returns what a value is, for those who read errors.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(number) if number.is_f64() => "a number with a fraction",
        Value::Number(number) if number.as_i64().is_some_and(|number| number < 0) => {
            "a negative number"
        }
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn mistyped(name: &'static str, expected: &str, value: &Value) -> ApiError {
    let kind = match value {
        Value::Array(_) if expected.contains("list") => "a list of something else",
        value => kind(value),
    };
    ApiError::invalid(name, format!("`{name}` must be {expected}, not {kind}"))
}

#[expect(clippy::cast_possible_truncation, reason = "checked right after")]
fn single(number: f64) -> Option<f32> {
    let single = number as f32;
    (single.is_finite() && (single == 0.0) == (number == 0.0)).then_some(single)
}

/// Returns an integer, which some clients write as `16.0`.
#[expect(clippy::cast_possible_truncation, reason = "within what is exact")]
fn as_integer(value: &Value) -> Option<i64> {
    let exact = |number: &f64| number.fract() == 0.0 && number.abs() < 9e15;
    value
        .as_i64()
        .or_else(|| value.as_f64().filter(exact).map(|number| number as i64))
}

fn as_text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn as_token(value: &Value) -> Option<u32> {
    u32::try_from(as_integer(value)?).ok()
}

fn as_list<T>(value: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    value.as_array()?.iter().map(read).collect()
}

/// The names by which a client knows what both kinds of completion have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keys {
    pub(crate) prompt: &'static str,
    pub(crate) max_tokens: &'static str,
    pub(crate) top_logprobs: &'static str,
}

/// What both kinds of completion may ask for.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) model: String,
    pub(crate) keys: Keys,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    /// vLLM's; -1 and 0 are no limit.
    pub(crate) top_k: Option<i64>,
    /// vLLM's.
    pub(crate) min_p: Option<f32>,
    /// vLLM's.
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) logit_bias: BTreeMap<u32, f32>,
    pub(crate) max_tokens: Option<usize>,
    /// vLLM's.
    pub(crate) min_tokens: Option<usize>,
    pub(crate) stop: Vec<String>,
    /// vLLM's.
    pub(crate) stop_token_ids: Vec<u32>,
    /// vLLM's.
    pub(crate) ignore_eos: bool,
    pub(crate) seed: Option<i64>,
    pub(crate) n: usize,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    /// vLLM's: whether token ids come with the text.
    pub(crate) return_token_ids: bool,
    /// Likeliest tokens told with each token; `None` tells no log-probabilities at all.
    pub(crate) top_logprobs: Option<usize>,
    /// vLLM's: most tokens of reasoning.
    pub(crate) thinking_token_budget: Option<usize>,
}

impl Common {
    /// Takes what both kinds have; each kind fills in what it names differently.
    fn take(fields: &mut Fields, keys: Keys) -> Result<Self, ApiError> {
        let stream_options = fields.object("stream_options")?;
        let include_usage = match stream_options.and_then(|mut all| all.remove("include_usage")) {
            None | Some(Value::Null) => false,
            Some(Value::Bool(include)) => include,
            Some(other) => {
                let kind = kind(&other);
                let message = format!("`include_usage` must be true or false, not {kind}");
                return Err(ApiError::invalid("stream_options", message));
            }
        };
        Ok(Self {
            model: Fields::required("model", fields.text("model")?)?,
            keys,
            temperature: fields.number("temperature")?,
            top_p: fields.number("top_p")?,
            top_k: fields.integer("top_k")?,
            min_p: fields.number("min_p")?,
            repetition_penalty: fields.number("repetition_penalty")?,
            presence_penalty: fields.number("presence_penalty")?,
            frequency_penalty: fields.number("frequency_penalty")?,
            logit_bias: logit_bias(fields)?,
            max_tokens: fields.count("max_tokens")?,
            min_tokens: fields.count("min_tokens")?,
            stop: fields.texts("stop")?.unwrap_or_default(),
            stop_token_ids: fields.tokens("stop_token_ids")?.unwrap_or_default(),
            ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
            seed: fields.integer("seed")?,
            n: fields.count("n")?.unwrap_or(1),
            stream: fields.flag("stream")?.unwrap_or(false),
            include_usage,
            return_token_ids: fields.flag("return_token_ids")?.unwrap_or(false),
            top_logprobs: None,
            thinking_token_budget: None,
        })
    }
}

/// Takes biases by token id; JSON has strings for keys.
fn logit_bias(fields: &mut Fields) -> Result<BTreeMap<u32, f32>, ApiError> {
    let name = "logit_bias";
    let refuse = |what: String| ApiError::invalid(name, what);
    let mut biases = BTreeMap::new();
    for (token, bias) in fields.object(name)?.unwrap_or_default() {
        let token = token
            .parse()
            .map_err(|_| refuse("a key of `logit_bias` is not a token id".to_owned()))?;
        let number = bias.as_f64().and_then(single).ok_or_else(|| {
            let kind = kind(&bias);
            refuse(format!(
                "the bias of token {token} must be a number in -100..=100, not {kind}"
            ))
        })?;
        biases.insert(token, number);
    }
    Ok(biases)
}

/// `POST /v1/chat/completions`
#[derive(Debug)]
pub(crate) struct ChatRequest {
    pub(crate) messages: Vec<Value>,
    pub(crate) tools: Vec<Value>,
    pub(crate) tool_choice: Option<Value>,
    /// Whether there may be more than one call in an answer that is to be a call.
    pub(crate) allows_parallel_calls: bool,
    pub(crate) response_format: Option<Map<String, Value>>,
    /// vLLM's: variables of the chat template, such as `enable_thinking`.
    pub(crate) chat_template_kwargs: Map<String, Value>,
    pub(crate) common: Common,
}

impl ChatRequest {
    pub(crate) fn take(mut fields: Fields) -> Result<Self, ApiError> {
        let fields = &mut fields;
        let mut common = Common::take(
            fields,
            Keys {
                prompt: "messages",
                max_tokens: "max_tokens",
                top_logprobs: "top_logprobs",
            },
        )?;
        // The older name counts where the newer one is not given.
        let max_completion_tokens = fields.count("max_completion_tokens")?;
        if max_completion_tokens.is_some() || common.max_tokens.is_none() {
            common.keys.max_tokens = "max_completion_tokens";
            common.max_tokens = max_completion_tokens;
        }
        let top_logprobs = fields.count("top_logprobs")?.unwrap_or(0);
        if fields.flag("logprobs")?.unwrap_or(false) {
            common.top_logprobs = Some(top_logprobs);
        } else if top_logprobs > 0 {
            let message = "`top_logprobs` needs `logprobs` to be true";
            return Err(ApiError::invalid("top_logprobs", message));
        }
        common.thinking_token_budget = fields.count("thinking_token_budget")?;
        Ok(Self {
            messages: Fields::required("messages", fields.list("messages")?)?,
            tools: fields.list("tools")?.unwrap_or_default(),
            tool_choice: fields.any("tool_choice"),
            allows_parallel_calls: fields.flag("parallel_tool_calls")?.unwrap_or(true),
            response_format: fields.object("response_format")?,
            chat_template_kwargs: fields.object("chat_template_kwargs")?.unwrap_or_default(),
            common,
        })
    }
}

/// `POST /v1/completions`
#[derive(Debug)]
pub(crate) struct CompletionRequest {
    pub(crate) prompt: Prompt,
    pub(crate) echo: bool,
    pub(crate) suffix: Option<String>,
    pub(crate) best_of: Option<usize>,
    pub(crate) common: Common,
}

impl CompletionRequest {
    pub(crate) fn take(mut fields: Fields) -> Result<Self, ApiError> {
        let fields = &mut fields;
        let mut common = Common::take(
            fields,
            Keys {
                prompt: "prompt",
                max_tokens: "max_tokens",
                top_logprobs: "logprobs",
            },
        )?;
        common.top_logprobs = fields.count("logprobs")?;
        let expected = "a string, a list of token ids, or a list of either";
        let prompt = fields.take("prompt", expected, Prompt::read)?;
        Ok(Self {
            prompt: Fields::required("prompt", prompt)?,
            echo: fields.flag("echo")?.unwrap_or(false),
            suffix: fields.text("suffix")?,
            best_of: fields.count("best_of")?,
            common,
        })
    }
}

/// Text or token ids, one or several.
#[derive(Debug)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    ManyTokens(Vec<Vec<u32>>),
}

impl Prompt {
    fn read(value: &Value) -> Option<Self> {
        let tokens = |value: &Value| as_list(value, as_token);
        as_text(value)
            .map(Self::Text)
            .or_else(|| tokens(value).map(Self::Tokens))
            .or_else(|| as_list(value, as_text).map(Self::Texts))
            .or_else(|| as_list(value, tokens).map(Self::ManyTokens))
    }
}
