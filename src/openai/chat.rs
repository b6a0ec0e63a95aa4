//! `POST /v1/chat/completions`

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Extension, State};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Map, Value, json};

use super::conversation::Conversation;
use super::guidance::Guidance;
use super::stream::{Chunks, Envelope, Streamed, Usage, collect};
use super::turn::{Delta, ReadTurn, TurnReader, TurnSoFar, call_json, logprobs_json};
use super::wire::ChatRequest;
use super::{ApiError, App, unix_seconds};
use crate::chat::AnswerReasoning;
use crate::engine::{
    EngineError, FinishReason, Finished, GenerateRequest, GeneratedToken, SamplingParams,
    TokenLogprob,
};
use crate::http::BodyShare;

/// A request that was read.
struct Prepared {
    generate: GenerateRequest,
    guidance: Option<Guidance>,
    reader: TurnReader,
    tells_logprobs: bool,
    returns_token_ids: bool,
    tells_usage: bool,
}

pub(super) async fn complete(
    State(app): State<Arc<App>>,
    share: Option<Extension<BodyShare>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let share = share.map(|Extension(share)| share);
    let prepared = app
        .prepare(body, share, |app, fields| {
            prepare(app, &ChatRequest::take(fields)?)
        })
        .await?;
    let Prepared {
        mut generate,
        guidance,
        reader,
        tells_logprobs,
        returns_token_ids,
        tells_usage,
    } = prepared;
    let count = generate.seeds.len();
    let usage = Usage {
        prompt: generate.prompt.len(),
        ..Usage::default()
    };
    let prompt_token_ids = returns_token_ids.then(|| generate.prompt.clone());
    let mut envelope = Envelope {
        id: app.id("chatcmpl"),
        object: "chat.completion",
        created: unix_seconds(),
        model: app.model.name.clone(),
    };
    let teller = Teller {
        app: Arc::clone(&app),
        reader,
        guided_by: guidance.as_ref().map(|guidance| guidance.param),
        tells_logprobs,
        returns_token_ids,
    };
    // Whoever finds no place is told so before anything is compiled.
    let places = app.engine.reserve(count)?;
    if let Some(guidance) = guidance {
        generate.guide = Some(guidance.compile(&app).await?);
    }
    let (is_streamed, params) = (generate.stream, generate.params.clone());
    let generation = app.engine.submit_to(places, generate)?;
    if is_streamed {
        envelope.object = "chat.completion.chunk";
        let choices = (0..count).map(|_| teller.choice(&params)).collect();
        let streamed = Streamed {
            app,
            generation,
            envelope,
            chunks: ChatChunks { teller, choices },
            count,
            usage,
            tells_usage,
            prompt_token_ids,
        };
        return Ok(streamed.into_response());
    }
    let mut usage = usage;
    let mut choices = Vec::with_capacity(count);
    for (index, finished) in collect(&app, generation, count).await?.iter().enumerate() {
        usage.add(finished);
        choices.push(teller.whole(index, finished)?);
    }
    let mut answer = envelope.wrap(&choices);
    answer["usage"] = usage.to_json();
    if let Some(ids) = prompt_token_ids {
        answer["prompt_token_ids"] = json!(ids);
    }
    Ok(Json(answer).into_response())
}

fn prepare(app: &App, request: &ChatRequest) -> Result<Prepared, ApiError> {
    app.check_model(&request.common.model)?;
    let Conversation {
        messages,
        tools,
        options,
        format,
        choice,
    } = request.conversation()?;
    let model = &app.model;
    let chat = model.template.render(&messages, &tools, &options)?;
    let common = &request.common;
    app.check_length(&chat.text, common.keys)?;
    let prompt = model.tokenizer.encode_chat(&chat.text, &chat.literal)?;
    let generate = common.request(&app.engine, model, app.max_choices(), prompt)?;
    let reader = TurnReader::after(&chat.text, model.tool_call_format, tools);
    let reasoning = match (reader.is_thinking, options.enable_thinking) {
        (true, _) => AnswerReasoning::Open,
        (false, Some(false)) => AnswerReasoning::Off,
        (false, _) => AnswerReasoning::Optional,
    };
    let guidance = Guidance::read(app, request, &format, &choice, &reader.tools, reasoning)?;
    if guidance.is_some() {
        app.check_guided(&generate.params, common.keys)?;
    }
    Ok(Prepared {
        generate,
        guidance,
        reader,
        tells_logprobs: common.top_logprobs.is_some(),
        returns_token_ids: common.return_token_ids,
        tells_usage: common.include_usage,
    })
}

/// Tells completions in the shape of the API.
struct Teller {
    app: Arc<App>,
    reader: TurnReader,
    /// The field that says what answers must look like, if one does.
    guided_by: Option<&'static str>,
    tells_logprobs: bool,
    returns_token_ids: bool,
}

impl Teller {
    /// Returns a choice of an answer that is sent whole.
    fn whole(&self, index: usize, finished: &Finished) -> Result<Value, ApiError> {
        let tokenizer = &self.app.model.tokenizer;
        let turn = self.read(finished)?;
        let has_calls = !turn.tool_calls.is_empty();
        let content = match turn.content.is_empty() && has_calls {
            true => Value::Null,
            false => Value::from(turn.content),
        };
        let mut message = json!({"role": "assistant", "content": content});
        if let Some(reasoning) = turn.reasoning {
            message["reasoning_content"] = Value::from(reasoning);
        }
        if has_calls {
            let call = |call| call_json(call, &self.app.id("call"));
            message["tool_calls"] = turn.tool_calls.iter().map(call).collect();
        }
        let mut choice = json!({
            "index": index,
            "message": message,
            "logprobs": null,
            "finish_reason": finish_reason(finished, has_calls),
        });
        if self.tells_logprobs {
            choice["logprobs"] = logprobs_json(tokenizer, &all_tokens(finished));
        }
        if self.returns_token_ids {
            choice["token_ids"] = json!(finished.tokens);
        }
        tell_stop(&mut choice, finished);
        Ok(choice)
    }

    /// Reads a turn; one that its guide could not lead to an end is an error.
    fn read(&self, finished: &Finished) -> Result<ReadTurn, ApiError> {
        if let Some(reason) = &finished.guide_failure {
            let reason = reason.clone();
            return Err(ApiError::Invalid {
                message: EngineError::InvalidGrammar { reason }.to_string(),
                param: self.guided_by,
                code: None,
            });
        }
        Ok(self.reader.read(&finished.text(&self.app.model.tokenizer)?))
    }

    /// Returns a choice of an answer that is sent as it comes.
    fn choice(&self, params: &SamplingParams) -> TurnSoFar {
        TurnSoFar::new(&self.app.model.tokenizer, params)
    }
}

/// Returns what is new as the API tells it.
pub(crate) fn delta_json(delta: Delta) -> Map<String, Value> {
    [
        ("reasoning_content", delta.reasoning),
        ("content", delta.content),
    ]
    .into_iter()
    .filter(|(_, text)| !text.is_empty())
    .map(|(name, text)| (name.to_owned(), Value::from(text)))
    .collect()
}

pub(super) fn finish_reason(finished: &Finished, has_calls: bool) -> &'static str {
    match finished.finish_reason {
        FinishReason::Length => "length",
        FinishReason::Stop | FinishReason::StopText if has_calls => "tool_calls",
        FinishReason::Stop | FinishReason::StopText => "stop",
    }
}

/// Adds vLLM's `stop_reason`: the string that ended the text.
pub(super) fn tell_stop(choice: &mut Value, finished: &Finished) {
    let stop = finished.stop_text.as_ref();
    choice["stop_reason"] = stop.map_or(Value::Null, |stop| Value::from(stop.text.as_str()));
}

pub(crate) fn all_tokens(finished: &Finished) -> Vec<GeneratedToken> {
    let top = |at: usize| finished.top_logprobs.get(at).cloned().unwrap_or_default();
    (0..finished.tokens.len())
        .map(|at| GeneratedToken {
            token: TokenLogprob {
                token: finished.tokens[at],
                logprob: finished.logprobs[at],
                kept_logprob: finished.kept_logprobs[at],
            },
            top: top(at),
        })
        .collect()
}

struct ChatChunks {
    teller: Teller,
    choices: Vec<TurnSoFar>,
}

impl Chunks for ChatChunks {
    fn begin(&mut self, index: usize) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        Some(json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null}))
    }

    fn tokens(
        &mut self,
        index: usize,
        tokens: &[GeneratedToken],
    ) -> Result<Option<Value>, ApiError> {
        let teller = &self.teller;
        let delta = delta_json(self.choices[index].push(&teller.reader, tokens)?);
        if delta.is_empty() && !teller.tells_logprobs && !teller.returns_token_ids {
            return Ok(None);
        }
        let mut choice = json!({
            "index": index, "delta": delta, "logprobs": null, "finish_reason": null,
        });
        if teller.tells_logprobs {
            choice["logprobs"] = logprobs_json(&teller.app.model.tokenizer, tokens);
        }
        if teller.returns_token_ids {
            let ids: Vec<u32> = tokens.iter().map(|token| token.token.token).collect();
            choice["token_ids"] = json!(ids);
        }
        Ok(Some(choice))
    }

    fn finished(&mut self, index: usize, finished: &Finished) -> Result<Vec<Value>, ApiError> {
        let teller = &self.teller;
        let turn = teller.read(finished)?;
        let mut delta = delta_json(self.choices[index].rest(&turn));
        let mut calls = Vec::new();
        for (at, call) in turn.tool_calls.iter().enumerate() {
            let mut call = call_json(call, &teller.app.id("call"));
            call["index"] = Value::from(at);
            calls.push(call);
        }
        let has_calls = !calls.is_empty();
        if has_calls {
            delta.insert("tool_calls".to_owned(), Value::from(calls));
        }
        let mut last = json!({
            "index": index,
            "delta": {},
            "logprobs": null,
            "finish_reason": finish_reason(finished, has_calls),
        });
        tell_stop(&mut last, finished);
        if delta.is_empty() {
            return Ok(vec![last]);
        }
        let more = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
        Ok(vec![more, last])
    }
}
