//! Tools that agents are lent: those of an episode's environment, over HTTP beside the model.
//!
//! An agent runs on this machine and works in a sandbox elsewhere. `POST /wardian/tools/NAME` with the arguments as
//! a JSON object, and the episode's key as a bearer token, is answered with `{"output": TEXT}`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::Router;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use serde_json::{Map, Value, json};

use super::super::Episode;
use crate::chat::ToolCall;

/// Where tools are, behind the address of the model's server.
pub(super) const PATH: &str = "/wardian/tools";

/// The largest arguments of a call.
const MAX_ARGUMENTS: usize = 4 << 20;

/// An episode that an agent plays; taken when it has ended.
pub(super) type Lent = Arc<Mutex<Option<Episode>>>;

/// The episodes whose agents run, by their keys.
#[derive(Debug, Clone, Default)]
pub(super) struct LentTools {
    episodes: Arc<Mutex<HashMap<String, Lent>>>,
}

impl LentTools {
    /// Lends the tools of an episode to who has `key`.
    pub(super) fn lend(&self, key: &str, episode: &Lent) {
        let mut episodes = self.episodes.lock().unwrap_or_else(PoisonError::into_inner);
        episodes.insert(key.to_owned(), Arc::clone(episode));
    }

    /// Takes them back; a call that is under way still comes to its end.
    pub(super) fn take_back(&self, key: &str) {
        let mut episodes = self.episodes.lock().unwrap_or_else(PoisonError::into_inner);
        episodes.remove(key);
    }

    fn of(&self, headers: &HeaderMap) -> Option<Lent> {
        let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
        let key = value.strip_prefix("Bearer ")?;
        let episodes = self.episodes.lock().unwrap_or_else(PoisonError::into_inner);
        episodes.get(key).cloned()
    }

    /// Returns what serves them.
    pub(super) fn router(&self) -> Router {
        Router::new()
            .route(&format!("{PATH}/{{name}}"), post(use_tool))
            .layer(DefaultBodyLimit::max(MAX_ARGUMENTS))
            .with_state(self.clone())
    }
}

fn refused(status: StatusCode, message: &str) -> Response {
    (status, Json(json!({"error": {"message": message}}))).into_response()
}

async fn use_tool(
    State(tools): State<LentTools>,
    Path(name): Path<String>,
    headers: HeaderMap,
    arguments: Result<Json<Map<String, Value>>, axum::extract::rejection::JsonRejection>,
) -> Response {
    let Some(episode) = tools.of(&headers) else {
        let message = "there is no episode with this key; show it as a bearer token";
        return refused(StatusCode::UNAUTHORIZED, message);
    };
    let Json(arguments) = match arguments {
        Ok(arguments) => arguments,
        Err(rejection) => return refused(rejection.status(), &rejection.body_text()),
    };
    let call = ToolCall::new(name, Value::Object(arguments));
    // One call of an episode after another, each on a thread that may wait for a command.
    let used = tokio::task::spawn_blocking(move || {
        let mut episode = episode.lock().unwrap_or_else(PoisonError::into_inner);
        episode.as_mut().map(|episode| episode.use_tool(&call))
    });
    match used.await {
        Ok(Some(Some(output))) => Json(json!({"output": output})).into_response(),
        Ok(Some(None)) => refused(
            StatusCode::SERVICE_UNAVAILABLE,
            "the sandbox failed, by no fault of yours: this episode is not counted",
        ),
        Ok(None) | Err(_) => refused(StatusCode::GONE, "the episode is over"),
    }
}
