//! JSON-RPC: tools, sessions, forks.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::App;
use super::gym::StepError;
use super::sessions::{AtCapacity, Closed, Session};
use super::tasks::tool_result;
use super::validate::{self, Field, Kind};
use super::wire::capacity_message;

const PARSE_ERROR: i32 = -32700;
const INVALID_REQUEST: i32 = -32600;
const METHOD_NOT_FOUND: i32 = -32601;
const INVALID_PARAMS: i32 = -32602;
const INTERNAL_ERROR: i32 = -32603;
const SERVER_ERROR: i32 = -32000;

/// The most copies that one request makes.
pub(super) const MAX_FORKS: usize = 256;

const REQUEST: &[Field] = &[
    Field::required("jsonrpc", Kind::Exactly("2.0")),
    Field::required("method", Kind::Text { max: None }),
    Field::optional("params", Kind::Object),
    Field::optional("id", Kind::Id),
];

#[expect(clippy::needless_pass_by_value, reason = "data is made for the answer")]
fn failed(id: &Value, code: i32, message: impl Into<String>, data: Value) -> Value {
    let error = json!({"code": code, "message": message.into(), "data": data});
    json!({"jsonrpc": "2.0", "id": id, "error": error})
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "a result is made for the answer"
)]
fn succeeded(id: &Value, result: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "result": result})
}

/// Returns the answer to what is no JSON.
pub(super) fn parse_error(message: String) -> Value {
    failed(&Value::Null, PARSE_ERROR, message, Value::Null)
}

/// Returns the answer where a socket cannot have the session that it asks for.
pub(super) fn not_attached(message: String) -> Value {
    failed(&Value::Null, INVALID_PARAMS, message, Value::Null)
}

/// Returns the answer where there is no slot.
pub(super) fn at_capacity(id: &Value, AtCapacity { active, max }: AtCapacity) -> Value {
    let data = json!({"active_sessions": active, "max_sessions": max});
    failed(id, SERVER_ERROR, capacity_message(active, max), data)
}

fn step_failed(app: &App, id: &Value, error: &StepError) -> Value {
    app.note(error);
    failed(id, INTERNAL_ERROR, error.describe(), Value::Null)
}

fn unknown_session(id: &Value, session: &str) -> Value {
    let shown: String = session.chars().take(200).collect();
    failed(
        id,
        INVALID_PARAMS,
        format!("Unknown session_id: {shown}"),
        Value::Null,
    )
}

/// Answers a request; `own` is the session of the socket that it came by.
pub(super) async fn answer(app: &Arc<App>, body: &Value, own: Option<&Arc<Session>>) -> Value {
    let Value::Object(request) = body else {
        let message = "Invalid request: the request must be an object";
        return failed(&Value::Null, INVALID_REQUEST, message, Value::Null);
    };
    let faults = validate::check(request, REQUEST, false);
    if !faults.is_empty() {
        let text = validate::text(&faults, "JsonRpcRequest");
        let message = format!("Invalid request: {text}");
        return failed(&Value::Null, INVALID_REQUEST, message, Value::Null);
    }
    let id = request.get("id").unwrap_or(&Value::Null);
    let empty = Map::new();
    let params = request
        .get("params")
        .and_then(Value::as_object)
        .unwrap_or(&empty);
    match request.get("method").and_then(Value::as_str).unwrap_or("") {
        "tools/list" => list_tools(app, id, params, own).await,
        "tools/call" => call_tool(app, id, params, own).await,
        "openenv/session/create" => create(app, id, own),
        "openenv/session/close" => close(app, id, params),
        "wardian/fork" => fork_session(app, id, params, own).await,
        method => {
            let method: String = method.chars().take(200).collect();
            let message = format!("Method not found: {method}");
            failed(id, METHOD_NOT_FOUND, message, Value::Null)
        }
    }
}

fn no_tools(id: &Value) -> Value {
    failed(
        id,
        INTERNAL_ERROR,
        "Environment does not support MCP",
        Value::Null,
    )
}

fn create(app: &Arc<App>, id: &Value, own: Option<&Arc<Session>>) -> Value {
    if let Some(own) = own {
        return succeeded(id, json!({"session_id": own.id}));
    }
    let session = Session::new(app.gym.open());
    match app.sessions.create(std::slice::from_ref(&session)) {
        Ok(()) => succeeded(id, json!({"session_id": session.id})),
        Err(capacity) => {
            app.metrics.count_refusal();
            at_capacity(id, capacity)
        }
    }
}

fn close(app: &Arc<App>, id: &Value, params: &Map<String, Value>) -> Value {
    let Some(session) = params.get("session_id").and_then(Value::as_str) else {
        let message = "Missing 'session_id' in params";
        return failed(id, INVALID_PARAMS, message, Value::Null);
    };
    match app.sessions.close(session) {
        None => unknown_session(id, session),
        Some(Closed::Now) => succeeded(id, json!({"session_id": session, "closed": true})),
        Some(Closed::Later) => succeeded(
            id,
            json!({"session_id": session, "closed": false, "closing": true}),
        ),
    }
}

/// Finds the session that `params` name, or the socket's own.
fn named(
    app: &Arc<App>,
    id: &Value,
    params: &Map<String, Value>,
    own: Option<&Arc<Session>>,
) -> Result<Option<Arc<Session>>, Value> {
    match params.get("session_id").and_then(Value::as_str) {
        Some(session) => match app.sessions.get(session) {
            Some(session) => Ok(Some(session)),
            None => Err(unknown_session(id, session)),
        },
        None => Ok(own.map(Arc::clone)),
    }
}

async fn list_tools(
    app: &Arc<App>,
    id: &Value,
    params: &Map<String, Value>,
    own: Option<&Arc<Session>>,
) -> Value {
    let Some(all) = app.gym.tools() else {
        return no_tools(id);
    };
    let session = match named(app, id, params, own) {
        Ok(Some(session)) => session,
        Ok(None) => return succeeded(id, json!({"tools": all})),
        Err(answer) => return answer,
    };
    let listed = app
        .on_episode(&session, |episode, _| Ok(episode.tools()))
        .await;
    match listed {
        Ok(tools) => succeeded(id, json!({"tools": tools.unwrap_or(all)})),
        Err(error) => step_failed(app, id, &error),
    }
}

async fn call_tool(
    app: &Arc<App>,
    id: &Value,
    params: &Map<String, Value>,
    own: Option<&Arc<Session>>,
) -> Value {
    if app.gym.tools().is_none() {
        return no_tools(id);
    }
    let (session, _slot) = match named(app, id, params, own) {
        Ok(Some(session)) => (session, None),
        Ok(None) => {
            let session = Session::new(app.gym.open());
            match app.sessions.lend(&session) {
                Ok(slot) => (session, Some(slot)),
                Err(capacity) => {
                    app.metrics.count_refusal();
                    return at_capacity(id, capacity);
                }
            }
        }
        Err(answer) => return answer,
    };
    let Some(name) = params.get("name").and_then(Value::as_str) else {
        let message = "Missing 'name' in params";
        return failed(id, INVALID_PARAMS, message, Value::Null);
    };
    let name = name.to_owned();
    let arguments = params.get("arguments").and_then(Value::as_object).cloned();
    let arguments = arguments.unwrap_or_default();
    let called = app
        .on_episode(&session, move |episode, cancel| {
            episode.call(&name, &arguments, cancel)
        })
        .await;
    match called {
        Ok(result) => succeeded(id, tool_result(&result)),
        Err(error) => step_failed(app, id, &error),
    }
}

async fn fork_session(
    app: &Arc<App>,
    id: &Value,
    params: &Map<String, Value>,
    own: Option<&Arc<Session>>,
) -> Value {
    let session = match named(app, id, params, own) {
        Ok(Some(session)) => session,
        Ok(None) => {
            let message = "Missing 'session_id' in params";
            return failed(id, INVALID_PARAMS, message, Value::Null);
        }
        Err(answer) => return answer,
    };
    let count = params.get("count").map_or(Some(1), validate::natural);
    match fork(app, &session, count).await {
        Ok(ids) => succeeded(id, json!({"session_ids": ids})),
        Err(ForkError::Count(message)) => failed(id, INVALID_PARAMS, message, Value::Null),
        Err(ForkError::Capacity(capacity)) => at_capacity(id, capacity),
        Err(ForkError::Step(error)) => step_failed(app, id, &error),
    }
}

/// Why there are no copies.
pub(super) enum ForkError {
    Count(String),
    Capacity(AtCapacity),
    Step(StepError),
}

/// Makes `count` resumable sessions that are what `session` is; returns their ids.
pub(super) async fn fork(
    app: &Arc<App>,
    session: &Arc<Session>,
    count: Option<u64>,
) -> Result<Vec<String>, ForkError> {
    let count = count
        .and_then(|count| usize::try_from(count).ok())
        .filter(|count| (1..=MAX_FORKS).contains(count))
        .ok_or_else(|| {
            ForkError::Count(format!("`count` must be a whole number in 1..={MAX_FORKS}"))
        })?;
    let refused = |capacity| {
        app.metrics.count_refusal();
        ForkError::Capacity(capacity)
    };
    // Before any copy is made; others may take the room meanwhile.
    app.sessions.check_room(count).map_err(refused)?;
    let copies = app
        .on_episode(session, move |episode, _| episode.fork(count))
        .await
        .map_err(ForkError::Step)?;
    let copies: Vec<_> = copies.into_iter().map(Session::new).collect();
    app.sessions.create(&copies).map_err(refused)?;
    Ok(copies.iter().map(|copy| copy.id.clone()).collect())
}
