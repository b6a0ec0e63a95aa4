//! The capture proxy: agents of third parties are given an address and a key, and what the model
//! samples for them is kept as tokens to train on.
//!
//! - **Data plane.** OpenAI's chat completions and Responses, Anthropic's messages (`dialect`), answered
//!   by our engine or an upstream ([`Backend`]). The key, or the first part of the path, names the
//!   session.
//! - **Token in, token out.** An agent sends its history back as text. Where that history is what an
//!   earlier call left, the prompt goes on from that call's ids (`history`), and only what is new is
//!   tokenised; elsewhere it is rendered anew. Either way the ids that were fed and sampled are kept
//!   ([`CallTokens`]), and nothing is ever tokenised again.
//! - **Rows.** Calls are linked by the longest exact prefix of their tokens ([`CallGraph`]); one row for
//!   each path from a root to a leaf. Calls without exact ids are context, never targets.
//! - **Control plane.** OpenEnv's capture contract and the routes of verl's recipe (`control`).
//!
//! Everything from clients and the upstream is bounded, and what fails, fails for one call. What an
//! agent may do to others is in `docs/threat-model.md`.

mod backend;
mod call;
mod capture;
mod control;
mod dialect;
mod error;
mod generation;
mod graph;
mod history;
mod metrics;
mod record;
mod recorder;
mod rollout;
mod session;
mod upstream;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, MatchedPath, Path, RawPathParams, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};

use crate::http::{
    self, ApiKey, Bodies, BodyError, Rate, RateLimit, is_cross_site, is_misled, name_request,
    unix_seconds,
};
use crate::openai::ApiError;

pub use self::backend::Backend;
pub use self::capture::{Capture, Captured, TrainingSession};
pub use self::error::ProxyError;
pub use self::graph::{CallGraph, GraphStats, Role, Row};
pub use self::record::{Call, CallTokens, Ending};
pub use self::rollout::{RowLabels, trajectories};
pub use self::session::Purpose;
#[cfg(any(fuzzing, test))]
pub use self::upstream::fuzz_sse;
pub use self::upstream::{Completion, SseError, SseEvent, SseParser, Upstream, UpstreamConfig};

use self::dialect::Api;
use self::metrics::Metrics;
use self::session::{Budget, Session, SessionOptions, Sessions};

/// How long an agent may read nothing of an answer that waits for it.
const READ_WITHIN: Duration = Duration::from_secs(60);

/// Settings of the proxy.
#[derive(Debug, Clone)]
pub struct ProxyConfig {
    /// What the control routes ask for as `Authorization: Bearer`; `None` lets everybody use them.
    /// Default: none.
    pub admin_key: Option<ApiKey>,
    /// How often a client may ask, by the admin's key or its session, or else by its address, as also where
    /// keys open sessions; `None` is no limit. Default: none.
    pub rate_limit: Option<Rate>,
    /// Whether a key that names no session opens one. Default: false.
    pub opens_sessions: bool,
    /// What sessions are for that do not say so. Default: auto.
    pub purpose: Purpose,
    /// Calls of a session; the next is answered with a stop. 0 is no limit. Default: 0.
    pub max_model_calls: u64,
    /// Largest body that is read. Default: 8 MiB.
    pub max_body_bytes: usize,
    /// Sessions that are kept. Default: 4096.
    pub max_sessions: usize,
    /// Most bytes that one session's calls take. Default: 256 MiB.
    pub max_session_bytes: u64,
    /// Most bytes that all of them take. Default: 4 GiB.
    pub max_total_bytes: u64,
    /// How long a session that nobody uses is kept where another needs its place. Default: 24 h.
    pub session_timeout: Duration,
    /// Folder for a file of each session. Default: none.
    pub out: Option<PathBuf>,
}

impl Default for ProxyConfig {
    fn default() -> Self {
        Self {
            admin_key: None,
            rate_limit: None,
            opens_sessions: false,
            purpose: Purpose::Auto,
            max_model_calls: 0,
            max_body_bytes: 8 << 20,
            max_sessions: 4096,
            max_session_bytes: 256 << 20,
            max_total_bytes: 4 << 30,
            session_timeout: Duration::from_hours(24),
            out: None,
        }
    }
}

/// What all requests share.
#[derive(Debug)]
struct App {
    backend: Backend,
    config: ProxyConfig,
    sessions: Sessions,
    metrics: Metrics,
    bodies: Bodies,
    rate_limit: Option<RateLimit>,
    /// How long an agent may read nothing of an answer that waits for it.
    read_within: Duration,
    started: u64,
}

impl App {
    fn new(backend: Backend, config: ProxyConfig) -> Arc<Self> {
        let budget = Budget::new(config.max_session_bytes, config.max_total_bytes);
        let sessions = Sessions::new(
            config.max_sessions,
            config.session_timeout,
            budget,
            config.out.clone(),
        );
        Arc::new(Self {
            bodies: Bodies::new(config.max_body_bytes),
            rate_limit: config.rate_limit.map(RateLimit::new),
            backend,
            config,
            sessions,
            metrics: Metrics::default(),
            read_within: READ_WITHIN,
            started: unix_seconds(),
        })
    }

    /// Returns the session of a request, and the attempt that it says it is of. The first part of the
    /// path names it, or a header, or the key that the API's clients send.
    async fn session(
        self: &Arc<Self>,
        path: Option<&str>,
        headers: &HeaderMap,
    ) -> Result<(Arc<Session>, Option<u32>), ProxyError> {
        let key = session_key(path, headers).ok_or(ProxyError::UnknownSession)?;
        let (id, attempt) = match key.split_once('~') {
            None => (key, None),
            Some((id, attempt)) => {
                let attempt = attempt.parse().map_err(|_| ProxyError::UnknownSession)?;
                (id, Some(attempt))
            }
        };
        let session = match self.sessions.get(id) {
            Some(session) => session,
            None if self.config.opens_sessions => {
                let (app, id) = (Arc::clone(self), id.to_owned());
                call::blocking(move || app.open(&id)).await?
            }
            None => return Err(ProxyError::UnknownSession),
        };
        Ok((session, attempt))
    }

    /// Returns the session that a request names, in its path or by its key, if there is one.
    fn named(&self, path: &RawPathParams, headers: &HeaderMap) -> Option<Arc<Session>> {
        let path = path.iter().find(|(name, _)| *name == "session");
        let key = session_key(path.map(|(_, session)| session), headers)?;
        self.sessions.get(key.split('~').next().unwrap_or_default())
    }

    /// Opens a session for a key that an agent came with.
    fn open(&self, id: &str) -> Result<Arc<Session>, ProxyError> {
        let options = SessionOptions {
            purpose: self.config.purpose,
            max_model_calls: self.config.max_model_calls,
            ..SessionOptions::default()
        };
        match self.sessions.create(Some(id.to_owned()), options) {
            // Another call of the agent was faster.
            Err(ProxyError::Exists { .. }) => {
                self.sessions.get(id).ok_or(ProxyError::UnknownSession)
            }
            created => created,
        }
    }
}

/// Returns what names the session of a request.
fn session_key<'a>(path: Option<&'a str>, headers: &'a HeaderMap) -> Option<&'a str> {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = || header(header::AUTHORIZATION.as_str())?.strip_prefix("Bearer ");
    path.or_else(|| header("x-wardian-session"))
        .or_else(|| header("x-api-key"))
        .or_else(bearer)
        .map(str::trim)
}

/// Returns the proxy as a service.
pub fn router(backend: Backend, config: ProxyConfig) -> Router {
    router_of(App::new(backend, config))
}

fn router_of(app: Arc<App>) -> Router {
    let read = middleware::from_fn_with_state(Arc::clone(&app), read_control_body);
    let authorize = middleware::from_fn_with_state(Arc::clone(&app), authorize);
    let guarded = control::routes().route_layer(read).route_layer(authorize);
    let agents = data_plane(&app);
    service(app, agents.merge(guarded))
}

/// Returns a service with these routes and what all have.
fn service(app: Arc<App>, routes: Router<Arc<App>>) -> Router {
    routes
        .route_layer(middleware::from_fn_with_state(Arc::clone(&app), limit_rate))
        .route("/health", get(health))
        .route("/metrics", get(metrics_page))
        .fallback(|uri: Uri| async move {
            let path = uri.path().chars().take(200).collect();
            ApiError::NotFound { path }
        })
        .method_not_allowed_fallback(async || ApiError::MethodNotAllowed)
        .layer(middleware::from_fn_with_state(Arc::clone(&app), count))
        .layer(middleware::from_fn(name_request))
        .layer(DefaultBodyLimit::max(app.config.max_body_bytes))
        .with_state(app)
}

/// Returns the routes of agents, each with and without a session in front and a `v1` that some clients
/// leave out.
fn data_plane(app: &Arc<App>) -> Router<Arc<App>> {
    let mut routes = Router::new().route(
        "/v1/chat/completions/{session}",
        post(|state, path, headers, body| of_session(Api::Chat, state, path, headers, body)),
    );
    for prefix in ["/v1", ""] {
        for (path, api) in [
            ("/chat/completions", Api::Chat),
            ("/messages", Api::Messages),
            ("/responses", Api::Responses),
        ] {
            let of_key = move |state, headers, body| of_key(api, state, headers, body);
            let of_session =
                move |state, path, headers, body| of_session(api, state, path, headers, body);
            routes = routes
                .route(&format!("{prefix}{path}"), post(of_key))
                .route(&format!("/{{session}}{prefix}{path}"), post(of_session));
        }
        for (path, api) in [
            ("/messages/count_tokens", Api::Messages),
            ("/responses/input_tokens", Api::Responses),
        ] {
            let count = move |state, headers, body| count_tokens(api, None, state, headers, body);
            let count_of = move |state, Path(session): Path<String>, headers, body| {
                count_tokens(api, Some(session), state, headers, body)
            };
            routes = routes
                .route(&format!("{prefix}{path}"), post(count))
                .route(&format!("/{{session}}{prefix}{path}"), post(count_of));
        }
    }
    routes
        .route("/v1/models", get(models))
        .route("/v1/models/{*model}", get(model_card))
        .route("/{session}/v1/models", get(models))
        .route(
            "/{session}/v1/models/{*model}",
            get(|state, Path((_, model)): Path<(String, String)>| model_card(state, Path(model))),
        )
        .route_layer(middleware::from_fn_with_state(Arc::clone(app), read_call))
}

async fn of_key(
    api: Api,
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    call::answer(app, api, None, headers, body).await
}

async fn of_session(
    api: Api,
    State(app): State<Arc<App>>,
    Path(session): Path<String>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    call::answer(app, api, Some(session), headers, body).await
}

/// Counts the tokens of a request. It is no call of the model, and not recorded.
async fn count_tokens(
    api: Api,
    session: Option<String>,
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let count = async {
        app.session(session.as_deref(), &headers).await?;
        let asked = api.read(call::read_body(&app, body)?)?.body;
        let counting = Arc::clone(&app);
        tokio::task::spawn_blocking(move || counting.backend.count_tokens(asked))
            .await
            .map_err(|error| ProxyError::from(ApiError::internal(&error)))?
    };
    match count.await {
        Ok(tokens) if api == Api::Responses => {
            Json(json!({"object": "response.input_tokens", "input_tokens": tokens})).into_response()
        }
        Ok(tokens) => Json(json!({"input_tokens": tokens})).into_response(),
        Err(error) => call::failure(api, &error),
    }
}

/// Lets the admin in, and everybody where there is no key, but for pages that a browser was led to.
async fn authorize(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let refuse = |error: ProxyError| call::failure(Api::Chat, &error);
    match &app.config.admin_key {
        Some(key) if !key.admits(request.headers()) => return refuse(ProxyError::NotAdmin),
        None if is_misled(&request) => return refuse(ApiError::CrossSite.into()),
        _ => {}
    }
    next.run(request).await
}

/// Returns the API whose errors a request's client understands.
fn spoken(request: &Request) -> Api {
    match request.uri().path().contains("/messages") {
        true => Api::Messages,
        false => Api::Chat,
    }
}

/// Refuses who asks too often, and pages of other sites.
async fn limit_rate(
    State(app): State<Arc<App>>,
    path: RawPathParams,
    request: Request,
    next: Next,
) -> Response {
    let api = spoken(&request);
    let refuse = |error: ApiError| call::failure(api, &ProxyError::from(error));
    if let Some(limit) = &app.rate_limit {
        let admin = app.config.admin_key.as_ref();
        let admin = admin.and_then(|key| key.shown(request.headers()));
        let key = admin.or_else(|| {
            // Where keys open sessions, whoever makes up another one is no other client.
            let session = match app.config.opens_sessions {
                true => None,
                false => app.named(&path, request.headers()),
            };
            session.map(|session| blake3::hash(session.id.as_bytes()))
        });
        if let Err(wait) = limit.admit(key, &request) {
            return refuse(ApiError::TooOften { wait });
        }
    }
    if app.config.admin_key.is_none() && is_cross_site(request.headers()) {
        return refuse(ApiError::CrossSite);
    }
    next.run(request).await
}

/// Reads the body of a call, within the room and the time that bodies have, where its key is one.
async fn read_call(
    State(app): State<Arc<App>>,
    path: RawPathParams,
    request: Request,
    next: Next,
) -> Response {
    if request.method() != Method::POST {
        return next.run(request).await;
    }
    let api = spoken(&request);
    let session = app.named(&path, request.headers());
    if session.is_none() && !app.config.opens_sessions {
        return call::failure(api, &ProxyError::UnknownSession);
    }
    let refuse = |error: BodyError| {
        let error = ProxyError::from(ApiError::from(error));
        if let Some(session) = session {
            session.count_failure(None, &error);
        }
        call::failure(api, &error)
    };
    app.bodies.read(request, next, refuse).await
}

/// Reads the body of a request that controls.
async fn read_control_body(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let refuse = |error| call::failure(Api::Chat, &ProxyError::from(ApiError::from(error)));
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

fn card(app: &App, model: &str) -> Value {
    json!({
        "id": model,
        "object": "model",
        "type": "model",
        "display_name": model,
        "created": app.started,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "wardian",
        "max_model_len": app.backend.max_context(),
    })
}

/// Returns the models; fields of both OpenAI's and Anthropic's lists.
async fn models(State(app): State<Arc<App>>) -> Response {
    let list = match &app.backend {
        Backend::Upstream(upstream) if upstream.model().is_none() => upstream.models().await,
        backend => Ok(json!({
            "object": "list", "data": [card(&app, backend.model())], "has_more": false,
        })),
    };
    match list {
        Ok(list) => Json(list).into_response(),
        Err(error) => call::failure(Api::Chat, &error),
    }
}

/// Returns a model. Agents ask for the one they were told to use, whose name is none of ours: it is
/// answered by the one there is.
async fn model_card(State(app): State<Arc<App>>, Path(model): Path<String>) -> Json<Value> {
    let model: String = model.chars().take(200).collect();
    Json(card(&app, &model))
}

async fn health(State(app): State<Arc<App>>) -> (StatusCode, Json<Value>) {
    let (status, word) = match app.backend.is_stopped() {
        true => (StatusCode::SERVICE_UNAVAILABLE, "the engine has stopped"),
        false => (StatusCode::OK, "ok"),
    };
    let body = json!({
        "status": word,
        "model": app.backend.model(),
        "sessions": app.sessions.len(),
        "require_registered": !app.config.opens_sessions,
    });
    (status, Json(body))
}

async fn metrics_page(State(app): State<Arc<App>>) -> Response {
    let mut text = app.metrics.render(&app.sessions);
    if let Some(limit) = &app.rate_limit {
        limit.write(&mut text);
    }
    http::metrics_page(text)
}
