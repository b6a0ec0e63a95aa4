//! The OpenAI API in front of the engine.
//!
//! `GET /v1/models`, `POST /v1/chat/completions` and `POST /v1/completions`, with vLLM's extensions
//! where OpenAI has no field (`top_k`, `return_token_ids`, `chat_template_kwargs`, …); `GET /health`;
//! `GET /metrics` for Prometheus.
//!
//! Requests are read and prompts made here; one thread owns the engine and batches whatever is
//! under way ([`EngineHandle`]). The engine's law holds: **the same request with the same `seed` gets the
//! same tokens at any load**.
//!
//! Everything from a client is bounded: the body ([`ServerConfig::max_body_bytes`]), the completions
//! at a time (those beyond get 429 and `Retry-After`), each parameter, and the length of the context
//! (a request that cannot fit is refused with the numbers). A client that goes away frees what it
//! held. Answers keep to `response_format`, a forced `tool_choice` and strict tools by guided decoding
//! (`guidance`).

mod chat;
mod completions;
mod conversation;
mod error;
mod guidance;
mod metrics;
mod prepare;
mod stream;
mod turn;
mod wire;

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use axum::Json;
use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::{StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::chat::{ChatTemplate, ToolCallFormat};
use crate::engine::{EngineError, EngineHandle, GuideFactory, Tokenizer};
use crate::http::{
    self, ApiKey, Bodies, BodyShare, Rate, RateLimit, give_back, is_cross_site, name_request,
    unix_seconds,
};

pub use error::ApiError;
#[cfg(any(fuzzing, test))]
pub use guidance::fuzz_schema;

pub(crate) use chat::{all_tokens, delta_json};
pub(crate) use conversation::{Conversation, read_message};
pub(crate) use prepare::check_length;
pub(crate) use stream::{Envelope, Events, Usage};
pub(crate) use turn::{Delta, TurnReader, TurnSoFar, call_json, logprobs_json};
pub(crate) use wire::{ChatRequest, Fields, parse_object};

use metrics::Metrics;

/// Most grammars that are compiled at a time; requests that wait for it hold their places.
const MAX_COMPILERS: usize = 2;

/// The model behind the API.
#[derive(Debug, Clone)]
pub struct ServedModel {
    /// What clients call it.
    pub name: String,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its chat template.
    pub template: ChatTemplate,
    /// Tokens that end a turn.
    pub stop_token_ids: Vec<u32>,
    /// How it writes tool calls.
    pub tool_call_format: ToolCallFormat,
}

/// Settings of the server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// What clients must send as `Authorization: Bearer`; `None` lets everybody in. Default: none.
    pub api_key: Option<ApiKey>,
    /// How often a client may ask, by its key or else by its address; `None` is no limit. Default: none.
    pub rate_limit: Option<Rate>,
    /// Largest body that is read. Default: 8 MiB.
    pub max_body_bytes: usize,
    /// Most completions of one request (`n` times the prompts). Default: 128.
    pub max_choices: usize,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            api_key: None,
            rate_limit: None,
            max_body_bytes: 8 << 20,
            max_choices: 128,
        }
    }
}

/// What all requests share.
#[derive(Debug)]
struct App {
    engine: EngineHandle,
    model: ServedModel,
    config: ServerConfig,
    metrics: Metrics,
    started: u64,
    requests: AtomicU64,
    guides: OnceLock<Result<Arc<GuideFactory>, EngineError>>,
    /// A turn for each thread that may compile grammars at a time.
    compilers: Arc<Semaphore>,
    bodies: Bodies,
    rate_limit: Option<RateLimit>,
}

impl App {
    /// Returns a name that no other object of this server has.
    fn id(&self, prefix: &str) -> String {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}-{:x}{number:08x}", self.started)
    }

    fn check_model(&self, model: &str) -> Result<(), ApiError> {
        if model == self.model.name {
            return Ok(());
        }
        Err(ApiError::UnknownModel {
            model: model.chars().take(200).collect(),
            known: self.model.name.clone(),
        })
    }

    /// Makes sense of a request's body by `prepare`, on a thread that may take its time: rendering and
    /// tokenizing a long conversation does.
    async fn prepare<T: Send + 'static>(
        self: &Arc<Self>,
        body: Result<Bytes, BytesRejection>,
        share: Option<BodyShare>,
        prepare: impl FnOnce(&Self, Fields) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let body = body.map_err(|rejection| match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => ApiError::TooLarge {
                limit: self.config.max_body_bytes,
            },
            _ => ApiError::Invalid {
                message: rejection.body_text(),
                param: None,
                code: None,
            },
        })?;
        let app = Arc::clone(self);
        let work = move || {
            let prepared = Fields::parse(&body).and_then(|fields| prepare(&app, fields));
            give_back(&body);
            drop(share);
            prepared
        };
        let prepared = tokio::task::spawn_blocking(work).await;
        prepared.map_err(|error| ApiError::internal(&error))?
    }

    /// Returns the most completions of one request: more than are let in at a time never fit.
    fn max_choices(&self) -> usize {
        self.config.max_choices.min(self.engine.max_requests())
    }
}

/// Returns the API as a service.
pub fn router(engine: EngineHandle, model: ServedModel, config: ServerConfig) -> Router {
    let body_limit = DefaultBodyLimit::max(config.max_body_bytes);
    let app = Arc::new(App {
        bodies: Bodies::new(config.max_body_bytes),
        rate_limit: config.rate_limit.map(RateLimit::new),
        engine,
        model,
        config,
        metrics: Metrics::default(),
        started: unix_seconds(),
        requests: AtomicU64::new(0),
        guides: OnceLock::new(),
        compilers: Arc::new(Semaphore::new(MAX_COMPILERS)),
    });
    let v1 = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*model}", get(model_card))
        .route("/v1/chat/completions", post(chat::complete))
        .route("/v1/completions", post(completions::complete))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&app), read_body))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&app), authorize));
    v1.route("/health", get(health))
        .route("/metrics", get(metrics_page))
        .fallback(|uri: Uri| async move {
            ApiError::NotFound {
                path: uri.path().chars().take(200).collect(),
            }
        })
        .method_not_allowed_fallback(async || ApiError::MethodNotAllowed)
        .layer(middleware::from_fn_with_state(Arc::clone(&app), count))
        .layer(middleware::from_fn(name_request))
        .layer(body_limit)
        .with_state(app)
}

async fn authorize(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let api_key = app.config.api_key.as_ref();
    let shown = api_key.and_then(|key| key.shown(request.headers()));
    if let Some(limit) = &app.rate_limit
        && let Err(wait) = limit.admit(shown, &request)
    {
        return ApiError::TooOften { wait }.into_response();
    }
    if api_key.is_some() && shown.is_none() {
        return ApiError::Unauthorized.into_response();
    }
    if api_key.is_none() && is_cross_site(request.headers()) {
        return ApiError::CrossSite.into_response();
    }
    next.run(request).await
}

async fn read_body(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let refuse = |error| ApiError::from(error).into_response();
    app.bodies.read(request, next, refuse).await
}

async fn count(
    State(app): State<Arc<App>>,
    path: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response {
    app.metrics.responses.counted(path, request, next).await
}

fn card(app: &App) -> Value {
    json!({
        "id": app.model.name,
        "object": "model",
        "created": app.started,
        "owned_by": "wardian",
        "max_model_len": app.engine.limits().max_context,
    })
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [card(&app)]}))
}

async fn model_card(
    State(app): State<Arc<App>>,
    axum::extract::Path(model): axum::extract::Path<String>,
) -> Result<Json<Value>, ApiError> {
    app.check_model(&model)?;
    Ok(Json(card(&app)))
}

async fn health(State(app): State<Arc<App>>) -> (StatusCode, Json<Value>) {
    if app.engine.status().is_stopped {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            Json(json!({"status": "the engine has stopped"})),
        );
    }
    (StatusCode::OK, Json(json!({"status": "ok"})))
}

async fn metrics_page(State(app): State<Arc<App>>) -> Response {
    let mut text = app.metrics.render(&app.engine.status());
    if let Some(limit) = &app.rate_limit {
        limit.write(&mut text);
    }
    http::metrics_page(text)
}
