//! `POST /v1/completions`

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Extension, State};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Map, Value, json};

use super::chat::{all_tokens, finish_reason, tell_stop};
use super::stream::{Chunks, Envelope, Streamed, TextSoFar, Usage, collect};
use super::turn::token_text;
use super::wire::{CompletionRequest, Prompt};
use super::{ApiError, App, unix_seconds};
use crate::engine::{
    EngineError, Finished, GenerateRequest, GeneratedToken, Generation, Tokenizer,
};
use crate::http::BodyShare;

pub(super) async fn complete(
    State(app): State<Arc<App>>,
    share: Option<Extension<BodyShare>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let share = share.map(|Extension(share)| share);
    let (mut prompts, request) = app
        .prepare(body, share, |app, fields| {
            let request = CompletionRequest::take(fields)?;
            Ok((prepare(app, &request)?, request))
        })
        .await?;
    let envelope = Envelope {
        id: app.id("cmpl"),
        object: "text_completion",
        created: unix_seconds(),
        model: app.model.name.clone(),
    };
    let teller = Teller {
        app: Arc::clone(&app),
        tells_logprobs: request.common.top_logprobs.is_some(),
        returns_token_ids: request.common.return_token_ids,
    };
    if request.common.stream {
        let generate = prompts.pop().filter(|_| prompts.is_empty());
        let generate = generate.ok_or_else(|| {
            ApiError::invalid("prompt", "only one prompt at a time can be streamed")
        })?;
        let include_usage = request.common.include_usage;
        return stream(app, generate, envelope, teller, include_usage);
    }
    let asked: usize = prompts.iter().map(|prompt| prompt.seeds.len()).sum();
    // All are under way before the first is waited for.
    let mut generations: Vec<(Vec<u32>, usize, Generation)> = Vec::new();
    for generate in prompts {
        let (prompt, count) = (generate.prompt.clone(), generate.seeds.len());
        generations.push((prompt, count, app.engine.submit(generate)?));
    }
    let mut total = Usage::default();
    let mut choices = Vec::with_capacity(asked);
    for (prompt, count, generation) in generations {
        let mut usage = Usage {
            prompt: prompt.len(),
            ..Usage::default()
        };
        for finished in collect(&app, generation, count).await? {
            usage.add(&finished);
            let mut choice = teller.whole(choices.len(), &finished)?;
            if teller.returns_token_ids {
                choice["prompt_token_ids"] = json!(prompt);
            }
            choices.push(choice);
        }
        total.prompt += usage.prompt;
        total.completion += usage.completion;
        total.cached += usage.cached;
    }
    let mut answer = envelope.wrap(&choices);
    answer["usage"] = total.to_json();
    Ok(Json(answer).into_response())
}

fn stream(
    app: Arc<App>,
    generate: GenerateRequest,
    envelope: Envelope,
    teller: Teller,
    tells_usage: bool,
) -> Result<Response, ApiError> {
    let count = generate.seeds.len();
    let usage = Usage {
        prompt: generate.prompt.len(),
        ..Usage::default()
    };
    let prompt_token_ids = teller.returns_token_ids.then(|| generate.prompt.clone());
    let choice = || ChoiceSoFar {
        text: TextSoFar::new(&app.model.tokenizer, &generate.params),
        sent: 0,
        offset: 0,
        prompt_token_ids: prompt_token_ids.clone(),
    };
    let choices = (0..count).map(|_| choice()).collect();
    let generation = app.engine.submit(generate)?;
    let streamed = Streamed {
        app,
        generation,
        envelope,
        chunks: CompletionChunks { teller, choices },
        count,
        usage,
        tells_usage,
        prompt_token_ids: None,
    };
    Ok(streamed.into_response())
}

fn prepare(app: &App, request: &CompletionRequest) -> Result<Vec<GenerateRequest>, ApiError> {
    app.check_model(&request.common.model)?;
    let best_of = request.best_of.is_some_and(|best_of| best_of > 1);
    for (param, is_asked) in [
        ("echo", request.echo),
        ("suffix", request.suffix.is_some()),
        ("best_of", best_of),
    ] {
        if is_asked {
            let message = format!("`{param}` is not supported");
            return Err(ApiError::invalid(param, message));
        }
    }
    let encode = |text: &String| {
        app.check_length(text, request.common.keys)?;
        Ok::<_, ApiError>(app.model.tokenizer.encode(text)?)
    };
    let prompts: Vec<Vec<u32>> = match &request.prompt {
        Prompt::Text(text) => vec![encode(text)?],
        Prompt::Tokens(tokens) => vec![tokens.clone()],
        Prompt::Texts(texts) => texts.iter().map(encode).collect::<Result<_, _>>()?,
        Prompt::ManyTokens(prompts) => prompts.clone(),
    };
    if prompts.is_empty() {
        return Err(ApiError::invalid("prompt", "there is no prompt"));
    }
    let asked = prompts.len().saturating_mul(request.common.n);
    let limit = app.max_choices();
    if prompts.len() > 1 && asked > limit {
        let message = format!("{asked} completions > {limit}, the most of one request");
        return Err(ApiError::invalid("prompt", message));
    }
    prompts
        .into_iter()
        .map(|prompt| {
            let common = &request.common;
            common.request(&app.engine, &app.model, limit, prompt)
        })
        .collect()
}

/// Tells completions in the shape of the API.
struct Teller {
    app: Arc<App>,
    tells_logprobs: bool,
    returns_token_ids: bool,
}

impl Teller {
    fn whole(&self, index: usize, finished: &Finished) -> Result<Value, EngineError> {
        let tokenizer = &self.app.model.tokenizer;
        let mut choice = json!({
            "index": index,
            "text": finished.text(tokenizer)?,
            "logprobs": null,
            "finish_reason": finish_reason(finished, false),
        });
        if self.tells_logprobs {
            choice["logprobs"] = logprobs(tokenizer, &all_tokens(finished), &mut 0);
        }
        if self.returns_token_ids {
            choice["token_ids"] = json!(finished.tokens);
        }
        tell_stop(&mut choice, finished);
        Ok(choice)
    }
}

/// Returns log-probabilities as this endpoint tells them; `offset` is where their text begins.
fn logprobs(tokenizer: &Tokenizer, tokens: &[GeneratedToken], offset: &mut usize) -> Value {
    let mut texts = Vec::new();
    let mut offsets = Vec::new();
    let mut tops = Vec::new();
    for token in tokens {
        let text = token_text(tokenizer, token.token.token);
        offsets.push(*offset);
        *offset += text.chars().count();
        let mut top: Map<String, Value> = token
            .top
            .iter()
            .map(|top| (token_text(tokenizer, top.token), json!(top.kept_logprob)))
            .collect();
        top.insert(text.clone(), json!(token.token.kept_logprob));
        texts.push(text);
        tops.push(Value::Object(top));
    }
    let kept: Vec<f32> = tokens
        .iter()
        .map(|token| token.token.kept_logprob)
        .collect();
    json!({
        "tokens": texts, "token_logprobs": kept, "top_logprobs": tops, "text_offset": offsets,
    })
}

struct ChoiceSoFar {
    text: TextSoFar,
    /// Bytes of the text that were sent.
    sent: usize,
    /// Characters of the tokens that were told.
    offset: usize,
    /// Told with the first tokens.
    prompt_token_ids: Option<Vec<u32>>,
}

struct CompletionChunks {
    teller: Teller,
    choices: Vec<ChoiceSoFar>,
}

impl Chunks for CompletionChunks {
    fn begin(&mut self, _index: usize) -> Option<Value> {
        None
    }

    fn tokens(
        &mut self,
        index: usize,
        tokens: &[GeneratedToken],
    ) -> Result<Option<Value>, ApiError> {
        let teller = &self.teller;
        let choice = &mut self.choices[index];
        choice.text.push(tokens)?;
        let text = choice.text.text[choice.sent..].to_owned();
        choice.sent += text.len();
        if text.is_empty() && !teller.tells_logprobs && !teller.returns_token_ids {
            return Ok(None);
        }
        let mut value =
            json!({"index": index, "text": text, "logprobs": null, "finish_reason": null});
        if teller.tells_logprobs {
            let tokenizer = &teller.app.model.tokenizer;
            value["logprobs"] = logprobs(tokenizer, tokens, &mut choice.offset);
        }
        if teller.returns_token_ids {
            let ids: Vec<u32> = tokens.iter().map(|token| token.token.token).collect();
            value["token_ids"] = json!(ids);
            if let Some(ids) = choice.prompt_token_ids.take() {
                value["prompt_token_ids"] = json!(ids);
            }
        }
        Ok(Some(value))
    }

    fn finished(&mut self, index: usize, finished: &Finished) -> Result<Vec<Value>, ApiError> {
        let text = finished.text(&self.teller.app.model.tokenizer)?;
        let rest = text.get(self.choices[index].sent..).unwrap_or_default();
        let mut choice = json!({
            "index": index,
            "text": rest,
            "logprobs": null,
            "finish_reason": finish_reason(finished, false),
        });
        tell_stop(&mut choice, finished);
        Ok(vec![choice])
    }
}
