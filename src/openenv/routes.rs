//! The HTTP routes.

#![expect(
    clippy::result_large_err,
    reason = "an error is a response, made once a request"
)]

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::gym::{StepError, Tasks};
use super::rpc::{self, ForkError};
use super::sessions::{AtCapacity, Session};
use super::socket::{self, Dialect, OpenSocket};
use super::validate::{self, Field, Invalid, Kind};
use super::wire::{self, capacity_message};
use super::{App, Mode};
use crate::http::metrics_page;

type Shared = State<Arc<App>>;
type Body = Result<Bytes, BytesRejection>;

const RESET: &[Field] = &[
    Field::nullable("seed", Kind::Natural),
    Field::nullable("episode_id", Kind::Text { max: Some(255) }),
];
const STEP: &[Field] = &[
    Field::required("action", Kind::Object),
    Field::nullable("timeout_s", Kind::Positive),
    Field::nullable("request_id", Kind::Text { max: Some(255) }),
];
const OF_SPLIT: &[Field] = &[Field::required("split", Kind::Text { max: None })];
const OF_TASK: &[Field] = &[
    Field::required("split", Kind::Text { max: None }),
    Field::required("index", Kind::Integer),
];
const OF_RANGE: &[Field] = &[
    Field::required("split", Kind::Text { max: None }),
    Field::nullable("start", Kind::Integer),
    Field::nullable("stop", Kind::Integer),
];

/// An answer in `FastAPI`'s shape.
pub(super) fn detail(status: StatusCode, detail: impl Into<Value>) -> Response {
    (status, Json(json!({"detail": detail.into()}))).into_response()
}

fn unprocessable(faults: &[Invalid], with_docs: bool) -> Response {
    detail(
        StatusCode::UNPROCESSABLE_ENTITY,
        validate::reports(faults, with_docs),
    )
}

/// Reads a body; one that is missing is `None`.
fn read(
    body: Body,
    fields: &[Field],
    others: bool,
) -> Result<Option<Map<String, Value>>, Response> {
    let body = body.map_err(|rejection| detail(rejection.status(), rejection.body_text()))?;
    if body.is_empty() {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&body);
    let value = wire::read_json(&text)
        .map_err(|fault| unprocessable(&[Invalid::json(fault.position, fault.message)], false))?;
    let body = match value {
        Value::Null => return Ok(None),
        Value::Object(body) => body,
        other => return Err(unprocessable(&[Invalid::no_object(&other)], false)),
    };
    let faults: Vec<_> = validate::check(&body, fields, others)
        .into_iter()
        .map(Invalid::in_body)
        .collect();
    if faults.is_empty() {
        Ok(Some(body))
    } else {
        Err(unprocessable(&faults, false))
    }
}

fn at_capacity(app: &App, AtCapacity { active, max }: AtCapacity) -> Response {
    app.metrics.count_refusal();
    let message = capacity_message(active, max);
    detail(StatusCode::SERVICE_UNAVAILABLE, message)
}

fn failed(app: &App, error: &StepError) -> Response {
    app.note(error);
    let status = match error {
        StepError::Refused { .. } => StatusCode::BAD_REQUEST,
        StepError::NoEpisode | StepError::StateLost { .. } | StepError::Taken { .. } => {
            StatusCode::CONFLICT
        }
        StepError::Unsupported { .. } => StatusCode::NOT_IMPLEMENTED,
        StepError::Full { .. } | StepError::Crowded { .. } => StatusCode::SERVICE_UNAVAILABLE,
        StepError::Cancelled | StepError::Sandbox(_) | StepError::Environment { .. } => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    };
    detail(status, error.describe())
}

pub(super) async fn health() -> Json<Value> {
    Json(json!({"status": "healthy"}))
}

/// Is ready unless every slot is taken or the server stops.
pub(super) async fn ready(State(app): Shared) -> Response {
    let (active, max) = (app.sessions.active(), app.config.max_sessions);
    if app.is_stopping() || active >= max {
        let text = if app.is_stopping() {
            "the server stops".to_owned()
        } else {
            capacity_message(active, max)
        };
        return detail(StatusCode::SERVICE_UNAVAILABLE, text);
    }
    Json(json!({"status": "ready"})).into_response()
}

pub(super) async fn metrics(State(app): Shared) -> Response {
    let mut text = app.metrics.render(
        app.sessions.active(),
        app.config.max_sessions,
        app.steps.load(),
    );
    if let Some(limit) = &app.rate_limit {
        limit.write(&mut text);
    }
    metrics_page(text)
}

pub(super) async fn metadata(State(app): Shared) -> Json<Value> {
    let (name, description) = app.gym.metadata();
    Json(json!({
        "name": name, "description": description, "readme_content": null, "version": "1.0.0",
        "author": null, "documentation_url": null,
    }))
}

pub(super) async fn schema(State(app): Shared) -> Json<Value> {
    Json(app.gym.schema().clone())
}

pub(super) async fn state(State(app): Shared) -> Json<Value> {
    Json(app.gym.open().state())
}

/// Resets an environment of its own: HTTP has no sessions.
pub(super) async fn reset(State(app): Shared, body: Body) -> Response {
    let arguments = match read(body, RESET, true) {
        Ok(arguments) => arguments.unwrap_or_default(),
        Err(response) => return response,
    };
    let session = Session::new(app.gym.open());
    let _slot = match app.sessions.lend(&session) {
        Ok(slot) => slot,
        Err(capacity) => return at_capacity(&app, capacity),
    };
    match app.reset(&session, arguments).await {
        Ok(mut observation) => {
            // There is nothing that its id would name.
            observation.metadata.remove("session_id");
            Json(wire::response(&observation)).into_response()
        }
        Err(error) => failed(&app, &error),
    }
}

/// Takes a step in an environment of its own.
pub(super) async fn step(State(app): Shared, body: Body) -> Response {
    let mut body = match read(body, STEP, true) {
        Ok(Some(body)) => body,
        Ok(None) => return unprocessable(&[Invalid::no_body()], false),
        Err(response) => return response,
    };
    let action = match body.remove("action") {
        Some(Value::Object(action)) => action,
        _ => Map::new(),
    };
    let faults = app.gym.check(&action);
    if !faults.is_empty() {
        return unprocessable(&faults, true);
    }
    let limit = body
        .get("timeout_s")
        .and_then(Value::as_f64)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    // The step may wait for long.
    drop(body);
    let session = Session::new(app.gym.open());
    let _slot = match app.sessions.lend(&session) {
        Ok(slot) => slot,
        Err(capacity) => return at_capacity(&app, capacity),
    };
    // What comes before the step is this request's, too.
    if app.gym.needs_reset()
        && let Err(error) = app.reset(&session, Map::new()).await
    {
        return failed(&app, &error);
    }
    match app.step(&session, action, limit).await {
        Ok(observation) => Json(wire::response(&observation)).into_response(),
        Err(error) => failed(&app, &error),
    }
}

pub(super) async fn mcp(State(app): Shared, body: Body) -> Response {
    let body = match body {
        Ok(body) => body,
        Err(rejection) => return detail(rejection.status(), rejection.body_text()),
    };
    let answer = match wire::read_json(&String::from_utf8_lossy(&body)) {
        Ok(body) => rpc::answer(&app, &body, None).await,
        Err(_) => rpc::parse_error("Parse error".to_owned()),
    };
    Json(answer).into_response()
}

#[derive(Debug, Deserialize)]
pub(super) struct Attach {
    session_id: Option<String>,
}

type Upgrade = Result<WebSocketUpgrade, WebSocketUpgradeRejection>;

pub(super) async fn frames(app: Shared, attach: Query<Attach>, upgrade: Upgrade) -> Response {
    match upgrade {
        Ok(upgrade) => open(app, attach, upgrade, Dialect::Frames),
        Err(_) => detail(StatusCode::NOT_FOUND, "Not Found"),
    }
}

pub(super) async fn mcp_socket(app: Shared, attach: Query<Attach>, upgrade: Upgrade) -> Response {
    match upgrade {
        Ok(upgrade) => open(app, attach, upgrade, Dialect::Rpc),
        Err(_) => detail(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed"),
    }
}

fn open(
    State(app): Shared,
    Query(attach): Query<Attach>,
    upgrade: WebSocketUpgrade,
    dialect: Dialect,
) -> Response {
    let limit = app.config.max_message_bytes;
    upgrade
        .max_message_size(limit)
        .max_frame_size(limit)
        .on_upgrade({
            let open = OpenSocket::new(&app);
            move |socket| socket::serve(app, socket, dialect, attach.session_id, open)
        })
}

#[derive(Debug, Deserialize)]
pub(super) struct ForkQuery {
    count: Option<u64>,
}

/// Copies a session.
pub(super) async fn fork(
    State(app): Shared,
    Path(id): Path<String>,
    Query(query): Query<ForkQuery>,
) -> Response {
    let Some(session) = app.sessions.get(&id) else {
        return detail(StatusCode::NOT_FOUND, "there is no such session");
    };
    match rpc::fork(&app, &session, Some(query.count.unwrap_or(1))).await {
        Ok(ids) => Json(json!({"session_ids": ids})).into_response(),
        Err(ForkError::Count(message)) => detail(StatusCode::BAD_REQUEST, message),
        Err(ForkError::Capacity(AtCapacity { active, max })) => detail(
            StatusCode::SERVICE_UNAVAILABLE,
            capacity_message(active, max),
        ),
        Err(ForkError::Step(error)) => failed(&app, &error),
    }
}

pub(super) async fn list_environments(State(app): Shared) -> Json<Value> {
    Json(json!([app.gym.name()]))
}

/// Finds the tasks of the environment that a route names.
fn tasks<'a>(app: &'a App, name: &str, method: &str) -> Result<&'a dyn Tasks, Response> {
    if !name.eq_ignore_ascii_case(app.gym.name()) {
        let name: String = name.chars().take(200).collect();
        let message = format!("unknown environment '{name}'");
        return Err(detail(StatusCode::NOT_FOUND, message));
    }
    app.gym.tasks().ok_or_else(|| {
        let message = format!("{method} is not supported for this environment");
        detail(StatusCode::NOT_IMPLEMENTED, message)
    })
}

/// Reads a body that there must be.
fn required(body: Body, fields: &[Field]) -> Result<Map<String, Value>, Response> {
    read(body, fields, false)?.ok_or_else(|| unprocessable(&[Invalid::no_body()], false))
}

fn split(body: &Map<String, Value>) -> &str {
    body.get("split").and_then(Value::as_str).unwrap_or("")
}

fn count(tasks: &dyn Tasks, split: &str) -> Result<usize, Response> {
    tasks.count(split).ok_or_else(|| {
        let split: String = split.chars().take(200).collect();
        detail(StatusCode::BAD_REQUEST, format!("Unknown split: {split}"))
    })
}

fn answered(answer: Result<Value, Response>) -> Response {
    match answer {
        Ok(value) => Json(value).into_response(),
        Err(response) => response,
    }
}

pub(super) async fn splits(State(app): Shared, Path(name): Path<String>) -> Response {
    answered(tasks(&app, &name, "list_splits").map(|tasks| {
        let splits = tasks.splits().into_iter();
        splits
            .map(|split| json!({"name": split, "type": split}))
            .collect()
    }))
}

pub(super) async fn list_tasks(
    State(app): Shared,
    Path(name): Path<String>,
    body: Body,
) -> Response {
    let answer = || {
        let body = required(body, OF_SPLIT)?;
        let tasks = tasks(&app, &name, "list_tasks")?;
        let count = count(tasks, split(&body))?;
        let all: Vec<_> = (0..count)
            .filter_map(|index| tasks.task(split(&body), index))
            .collect();
        Ok(json!({"tasks": all, "env_name": app.gym.name()}))
    };
    answered(answer())
}

pub(super) async fn num_tasks(
    State(app): Shared,
    Path(name): Path<String>,
    body: Body,
) -> Response {
    let answer = || {
        let body = required(body, OF_SPLIT)?;
        let tasks = tasks(&app, &name, "num_tasks")?;
        Ok(json!({"num_tasks": count(tasks, split(&body))?}))
    };
    answered(answer())
}

pub(super) async fn one_task(State(app): Shared, Path(name): Path<String>, body: Body) -> Response {
    let answer = || {
        let body = required(body, OF_TASK)?;
        let tasks = tasks(&app, &name, "get_task")?;
        count(tasks, split(&body))?;
        let index = body.get("index").and_then(validate::natural);
        let task = index
            .and_then(|index| usize::try_from(index).ok())
            .and_then(|index| tasks.task(split(&body), index));
        match task {
            Some(task) => Ok(json!({"task": task})),
            None => Err(detail(StatusCode::BAD_REQUEST, "Invalid task index")),
        }
    };
    answered(answer())
}

pub(super) async fn task_range(
    State(app): Shared,
    Path(name): Path<String>,
    body: Body,
) -> Response {
    let answer = || {
        let body = required(body, OF_RANGE)?;
        let tasks = tasks(&app, &name, "get_task_range")?;
        let count = count(tasks, split(&body))?;
        // As Python slices: from the end where negative, cut to what there is.
        let bound = |name: &str, default: usize| match body.get(name).and_then(Value::as_i64) {
            None => default,
            Some(index) if index < 0 => {
                let back = usize::try_from(index.unsigned_abs()).unwrap_or(usize::MAX);
                count.saturating_sub(back)
            }
            Some(index) => usize::try_from(index).unwrap_or(usize::MAX).min(count),
        };
        let range: Vec<_> = (bound("start", 0)..bound("stop", count))
            .filter_map(|index| tasks.task(split(&body), index))
            .collect();
        Ok(json!({"tasks": range}))
    };
    answered(answer())
}

/// Lists the routes in the form of `OpenAPI`.
pub(super) async fn openapi(State(app): Shared) -> Json<Value> {
    let operation = |summary: &str| {
        json!({
            "summary": summary,
            "responses": {"200": {"description": "Successful Response"}},
        })
    };
    let mut paths = Map::new();
    for (path, method, summary) in [
        ("/list_environments", "get", "List environments"),
        ("/{env_name}/splits", "get", "List splits"),
        ("/{env_name}/tasks", "post", "List tasks"),
        ("/{env_name}/num_tasks", "post", "Count tasks"),
        ("/{env_name}/task", "post", "Get a task"),
        ("/{env_name}/task_range", "post", "Get some tasks"),
        (
            "/reset",
            "post",
            "Reset an environment of this request's own",
        ),
        (
            "/step",
            "post",
            "Take a step in an environment of this request's own",
        ),
        ("/state", "get", "Get the state of a fresh environment"),
        ("/metadata", "get", "Describe the environment"),
        ("/health", "get", "Say that the server is up"),
        (
            "/schema",
            "get",
            "Get the schemas of actions, observations and states",
        ),
        ("/mcp", "post", "Call a JSON-RPC method"),
    ] {
        let is_control = matches!(path, "/reset" | "/step" | "/state");
        if app.config.mode == Mode::Simulation || !is_control {
            paths.insert(path.to_owned(), json!({method: operation(summary)}));
        }
    }
    Json(json!({
        "openapi": "3.1.0",
        "info": {"title": "OpenEnv Environment HTTP API", "version": "1.0.0"},
        "paths": paths,
    }))
}
