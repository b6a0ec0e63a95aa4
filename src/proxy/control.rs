//! The routes of those who train: sessions are opened, reset, completed, read and deleted.
//!
//! `POST /sessions`, `/sessions/{id}/rollout` and `/sessions/{id}/trace_entries` are OpenEnv's capture
//! contract (0.10); `POST /sessions/{id}`, `/complete` and `/reset` those of verl's recipe, which has no
//! `/trajectories`: rows for our own trainer.

use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use indexmap::IndexMap;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::backend::distorts;
use super::call::{blocking, failure, read_body};
use super::dialect::Api;
use super::graph::GraphStats;
use super::rollout::{
    CompletionRecord, Grade, RowLabels, TraceEntry, completion_records, document, trace_entries,
    trajectories,
};
use super::session::{Purpose, Session, SessionOptions, Snapshot};
use super::{App, ProxyError};
use crate::openai::ApiError;

/// Sampling parameters that a session may pin.
const PINNABLE: [&str; 10] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "seed",
    "stop",
];

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/sessions", post(create).get(list))
        .route(
            "/sessions/{id}",
            post(create_named).get(status).delete(remove),
        )
        .route("/sessions/{id}/complete", post(complete))
        .route("/sessions/{id}/reset", post(reset))
        .route("/sessions/{id}/rollout", get(rollout))
        .route("/sessions/{id}/trace_entries", get(entries))
        .route("/sessions/{id}/trajectories", get(rows))
}

type Body = Result<Bytes, BytesRejection>;

/// Returns the fields of a body that may be missing.
fn fields(app: &App, body: Body) -> Result<Map<String, Value>, ProxyError> {
    match body {
        Ok(body) if body.is_empty() => Ok(Map::new()),
        body => read_body(app, body),
    }
}

fn respond(answer: Result<Value, ProxyError>) -> Response {
    match answer {
        Ok(body) => Json(body).into_response(),
        Err(error) => failure(Api::Chat, &error),
    }
}

/// Returns OpenEnv's 404, which is verl's, too.
fn unknown() -> Response {
    let body = json!({"error": "unknown session", "detail": "Session not found"});
    (StatusCode::NOT_FOUND, Json(body)).into_response()
}

fn options(app: &App, body: &mut Map<String, Value>) -> Result<SessionOptions, ProxyError> {
    let mut take = |name: &str| body.remove(name).filter(|value| !value.is_null());
    for name in ["llm_url", "api_key", "auth_header"] {
        if take(name).is_some_and(|value| value != "") {
            let message = "the proxy has one upstream, which it was started with";
            return Err(ProxyError::invalid("llm_url", message));
        }
    }
    let purpose = match take("purpose").as_ref().map(Value::as_str) {
        None => app.config.purpose,
        Some(Some("auto")) => Purpose::Auto,
        Some(Some("train")) => Purpose::Train,
        Some(Some("eval")) => Purpose::Eval,
        Some(_) => {
            let message = "`purpose` must be `auto`, `train` or `eval`";
            return Err(ProxyError::invalid("purpose", message));
        }
    };
    let object = |name: &'static str, value: Option<Value>| match value {
        None => Ok(Map::new()),
        Some(Value::Object(fields)) => Ok(fields),
        Some(_) => Err(ProxyError::invalid(
            name,
            format!("`{name}` must be an object"),
        )),
    };
    let pinned = match purpose {
        Purpose::Eval => "eval_sampling",
        _ => "sampling",
    };
    let sampling = object("sampling", take(pinned))?;
    let metadata = object("metadata", take("metadata"))?;
    if let Some(name) = sampling
        .keys()
        .find(|name| !PINNABLE.contains(&name.as_str()))
    {
        let name: String = name.chars().take(40).collect();
        let message = format!("`sampling` cannot pin `{name}`, only {PINNABLE:?}");
        return Err(ProxyError::invalid("sampling", message));
    }
    if purpose == Purpose::Train
        && let Some(name) = distorts(&sampling)
    {
        let message = format!("`{name}` draws from another distribution than the model's own");
        return Err(ProxyError::invalid("sampling", message));
    }
    let max_model_calls = match take("max_model_calls") {
        None => app.config.max_model_calls,
        Some(limit) => limit.as_u64().ok_or_else(|| {
            let message = "`max_model_calls` must be an integer that is not negative";
            ProxyError::invalid("max_model_calls", message)
        })?,
    };
    Ok(SessionOptions {
        purpose,
        sampling,
        max_model_calls,
        metadata,
        ..SessionOptions::default()
    })
}

async fn create(State(app): State<Arc<App>>, body: Body) -> Response {
    let create = move || {
        let mut fields = fields(&app, body)?;
        let id = match fields.remove("session_id") {
            None | Some(Value::Null) => None,
            Some(Value::String(id)) => Some(id),
            Some(_) => {
                let message = "`session_id` must be a string";
                return Err(ProxyError::invalid("session_id", message));
            }
        };
        let options = options(&app, &mut fields)?;
        let session = app.sessions.create(id, options)?;
        Ok(created(&app, &session))
    };
    respond(blocking(create).await)
}

fn created(app: &App, session: &Session) -> Value {
    let grade = Grade::of(session, &session.snapshot().graph);
    json!({
        "session_id": session.id,
        "status": "created",
        "capture_level": grade.capture_level,
        "rollout_type": grade.rollout_type,
        "max_model_calls": session.options.max_model_calls,
        "llm_url": null,
        "model": app.backend.model(),
        "base_path": format!("/{}/v1", session.id),
    })
}

async fn create_named(State(app): State<Arc<App>>, Path(id): Path<String>, body: Body) -> Response {
    let create = move || {
        let options = options(&app, &mut fields(&app, body)?)?;
        let session = app.sessions.create(Some(id), options)?;
        Ok(created(&app, &session))
    };
    respond(blocking(create).await)
}

/// How a session is doing, as both contracts tell it.
#[derive(Debug, Serialize)]
struct Progress<'a> {
    session_id: &'a str,
    attempt: u32,
    created_at: u64,
    completed: bool,
    purpose: &'static str,
    idle_s: f64,
    upstream_errors: u64,
    faults: u64,
    budget_stop_count: u64,
    #[serde(flatten)]
    stats: GraphStats,
    #[serde(skip_serializing_if = "Option::is_none")]
    turns: Option<Vec<CompletionRecord<'a>>>,
}

fn progress<'a>(session: &'a Session, snapshot: &'a Snapshot, has_turns: bool) -> Progress<'a> {
    let Snapshot { gate, graph } = snapshot;
    Progress {
        session_id: &session.id,
        attempt: gate.attempt,
        created_at: session.created,
        completed: gate.is_complete,
        purpose: session.options.purpose.name(),
        idle_s: session.idle().as_secs_f64(),
        upstream_errors: gate.upstream_errors,
        faults: gate.faults,
        budget_stop_count: gate.budget_stops,
        stats: graph.stats(),
        turns: has_turns.then(|| completion_records(graph)),
    }
}

async fn list(State(app): State<Arc<App>>) -> Response {
    let list = move || {
        let all: Vec<Value> = (app.sessions.all().iter())
            .map(|session| json!(progress(session, &session.snapshot(), false)))
            .collect();
        Ok(json!({"count": all.len(), "sessions": all}))
    };
    respond(blocking(list).await)
}

/// The fields of a query that switch something.
type Switches = Query<IndexMap<String, String>>;

fn is_on(switches: &Switches, name: &str, default: bool) -> bool {
    match switches.get(name).map(String::as_str) {
        None => default,
        Some(value) => matches!(
            value.to_ascii_lowercase().as_str(),
            "true" | "1" | "yes" | "on"
        ),
    }
}

/// Answers from what a session holds now, beside the tasks and its calls: a long session takes a while to
/// lay out.
async fn read(
    app: &App,
    id: &str,
    answer: impl FnOnce(&Session, &Snapshot) -> Response + Send + 'static,
) -> Response {
    let Some(session) = app.sessions.get(id) else {
        return unknown();
    };
    match blocking(move || Ok(answer(&session, &session.snapshot()))).await {
        Ok(response) => response,
        Err(error) => failure(Api::Chat, &error),
    }
}

/// Returns a body that was laid out as JSON, or a list of lines.
fn laid_out(kind: &'static str, body: serde_json::Result<Vec<u8>>) -> Response {
    match body {
        Ok(body) => ([(header::CONTENT_TYPE, kind)], body).into_response(),
        Err(error) => failure(Api::Chat, &ApiError::internal(&error).into()),
    }
}

async fn status(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    switches: Switches,
) -> Response {
    read(&app, &id, move |session, snapshot| {
        let has_turns = is_on(&switches, "turns", true);
        Json(progress(session, snapshot, has_turns)).into_response()
    })
    .await
}

async fn remove(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response {
    let remove = move || {
        let removed = app.sessions.remove(&id);
        if let Some(session) = &removed {
            // Calls that still come back find it complete.
            session.delete();
        }
        Ok(json!({"session_id": id, "deleted": removed.is_some(), "status": "deleted"}))
    };
    respond(blocking(remove).await)
}

async fn complete(State(app): State<Arc<App>>, Path(id): Path<String>, body: Body) -> Response {
    let Some(session) = app.sessions.get(&id) else {
        return unknown();
    };
    let complete = move || {
        let told = Value::Object(fields(&app, body)?);
        session.complete(&told)?;
        Ok(json!({"session_id": id, "status": "completed"}))
    };
    respond(blocking(complete).await)
}

async fn reset(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response {
    let Some(session) = app.sessions.get(&id) else {
        return unknown();
    };
    let reset = move || {
        let attempt = session.reset()?;
        Ok(json!({
            "session_id": id,
            "status": "reset",
            "attempt": attempt,
            "base_path": format!("/{id}~{attempt}/v1"),
        }))
    };
    respond(blocking(reset).await)
}

async fn rollout(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    switches: Switches,
) -> Response {
    read(&app, &id, move |session, snapshot| {
        let include_discarded = is_on(&switches, "include_discarded", false);
        let include_messages = is_on(&switches, "include_messages", false);
        let document = document(session, snapshot, include_discarded, include_messages);
        laid_out("application/json", document)
    })
    .await
}

/// The calls of a session that may be learned from.
#[derive(Debug, Serialize)]
struct Entries<'a> {
    session_id: &'a str,
    entries: Vec<TraceEntry<'a>>,
}

async fn entries(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response {
    read(&app, &id, |session, snapshot| {
        let session_id = &session.id;
        match trace_entries(session, snapshot) {
            Ok(entries) => Json(Entries {
                session_id,
                entries,
            })
            .into_response(),
            Err(error) => {
                let body = json!({"session_id": session_id, "error": error});
                (StatusCode::CONFLICT, Json(body)).into_response()
            }
        }
    })
    .await
}

/// Returns the rows as lines of a rollout file, with the labels that the query gives.
async fn rows(State(app): State<Arc<App>>, Path(id): Path<String>, labels: Switches) -> Response {
    let labels = match read_labels(&id, &labels) {
        Ok(labels) => labels,
        Err(error) => return failure(Api::Chat, &error),
    };
    read(&app, &id, move |session, snapshot| {
        let rows = match session.options.purpose {
            Purpose::Eval => Vec::new(),
            _ => trajectories(&snapshot.graph, &labels),
        };
        let mut lines = Vec::new();
        let written = rows.iter().try_for_each(|row| {
            serde_json::to_writer(&mut lines, row)?;
            lines.push(b'\n');
            Ok(())
        });
        laid_out("application/jsonl", written.map(|()| lines))
    })
    .await
}

fn read_labels(id: &str, given: &Switches) -> Result<RowLabels, ProxyError> {
    fn number<T: std::str::FromStr>(
        given: &Switches,
        name: &'static str,
    ) -> Result<Option<T>, ProxyError> {
        let parse = |text: &String| {
            text.parse()
                .map_err(|_| ProxyError::invalid(name, format!("`{name}` is no such number")))
        };
        given.get(name).map(parse).transpose()
    }
    let reward: Option<f64> = number(given, "reward")?;
    if reward.is_some_and(|reward| !reward.is_finite()) {
        return Err(ProxyError::invalid("reward", "`reward` must be finite"));
    }
    Ok(RowLabels {
        task_id: given.get("task_id").map_or(id, String::as_str).to_owned(),
        group: number(given, "group")?.unwrap_or(0),
        sample: number(given, "sample")?.unwrap_or(0),
        policy_step: number(given, "policy_step")?.unwrap_or(0),
        reward,
    })
}
