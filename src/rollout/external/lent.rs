//! Tools that agents are lent: those of an episode's environment, over HTTP beside the model.
//!
//! An agent runs on this machine and works in a sandbox elsewhere. `POST /wardian/tools/NAME` with the arguments as
//! a JSON object, and the episode's key as a bearer token, is answered with `{"output": TEXT}`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::Router;
use axum::extract::{DefaultBodyLimit, FromRequest as _, Path, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use serde_json::{Map, Value, json};
use tokio::sync::{Semaphore, TryAcquireError};

use super::super::Episode;
use crate::chat::ToolCall;

/// Where tools are, behind the address of the model's server.
pub(super) const PATH: &str = "/wardian/tools";

/// The largest arguments of a call.
const MAX_ARGUMENTS: usize = 4 << 20;

/// Calls of an episode at a time: one is under way, the others wait for it. They come one after another from an agent
/// that reads what it is told.
const MAX_CALLS: usize = 8;

/// An episode that an agent plays.
#[derive(Debug)]
pub(super) struct Lending {
    /// Taken when it has ended.
    pub(super) episode: Mutex<Option<Episode>>,
    /// Room for calls, from before their arguments are read.
    room: Arc<Semaphore>,
    /// Which call is under way.
    turn: Arc<Semaphore>,
}

pub(super) type Lent = Arc<Lending>;

impl Lending {
    pub(super) fn new(episode: Episode) -> Lent {
        Arc::new(Self {
            episode: Mutex::new(Some(episode)),
            room: Arc::new(Semaphore::new(MAX_CALLS)),
            turn: Arc::new(Semaphore::new(1)),
        })
    }
}

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

    /// Takes them back: calls that wait are refused, and one that is under way still comes to its end.
    pub(super) fn take_back(&self, key: &str) {
        let mut episodes = self.episodes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lent) = episodes.remove(key) {
            lent.room.close();
            lent.turn.close();
        }
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

fn over() -> Response {
    refused(StatusCode::GONE, "the episode is over")
}

/// Answers a call. Nothing of its body is read before it is known whose it is and that there is room for it.
async fn use_tool(
    State(tools): State<LentTools>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let Some(lent) = tools.of(request.headers()) else {
        let message = "there is no episode with this key; show it as a bearer token";
        return refused(StatusCode::UNAUTHORIZED, message);
    };
    let _room = match Arc::clone(&lent.room).try_acquire_owned() {
        Ok(room) => room,
        Err(TryAcquireError::Closed) => return over(),
        Err(TryAcquireError::NoPermits) => {
            let message = format!("{MAX_CALLS} calls of this episode wait already; await one");
            return refused(StatusCode::TOO_MANY_REQUESTS, &message);
        }
    };
    let Json(arguments) = match Json::<Map<String, Value>>::from_request(request, &()).await {
        Ok(arguments) => arguments,
        Err(rejection) => return refused(rejection.status(), &rejection.body_text()),
    };
    let Ok(turn) = Arc::clone(&lent.turn).acquire_owned().await else {
        return over();
    };
    let call = ToolCall::new(name, Value::Object(arguments));
    // On a thread that may wait for a command. It keeps its turn also where nobody waits for the answer any more.
    let used = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        let mut episode = (lent.episode.lock()).unwrap_or_else(PoisonError::into_inner);
        episode.as_mut().map(|episode| episode.use_tool(&call))
    });
    match used.await {
        Ok(Some(Some(output))) => Json(json!({"output": output})).into_response(),
        Ok(Some(None)) => refused(
            StatusCode::SERVICE_UNAVAILABLE,
            "the sandbox failed, by no fault of yours: this episode is not counted",
        ),
        Ok(None) | Err(_) => over(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use axum::body::Body;
    use tower::ServiceExt as _;

    use super::*;
    use crate::chat::{Message, ParsedTurn, ToolSpec};
    use crate::env::{EnvError, Environment, EpisodeStats, StepResult};

    /// Tells of each call, and answers when it is let go.
    struct Slow {
        began: mpsc::Sender<()>,
        go: mpsc::Receiver<()>,
    }

    impl Environment for Slow {
        fn reset(&mut self) -> Result<Vec<Message>, EnvError> {
            Ok(vec![Message::user("Go.")])
        }

        fn tools(&self) -> &[ToolSpec] {
            &[]
        }

        fn step(&mut self, _: &ParsedTurn) -> Result<StepResult, EnvError> {
            unreachable!("an agent plays it")
        }

        fn close(&mut self, _: Option<&ParsedTurn>) -> StepResult {
            unreachable!("it is not asked for an end")
        }

        fn use_tool(&mut self, call: &ToolCall) -> Result<String, EnvError> {
            self.began.send(()).unwrap();
            self.go.recv().unwrap();
            Ok(call.name.clone())
        }

        fn stats(&self) -> EpisodeStats {
            EpisodeStats::default()
        }
    }

    async fn ask(router: &Router, key: &str, body: Body) -> StatusCode {
        let request = Request::post(format!("{PATH}/bash"))
            .header("authorization", format!("Bearer {key}"))
            .header("content-type", "application/json")
            .body(body)
            .unwrap();
        router.clone().oneshot(request).await.unwrap().status()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_call_is_under_way_few_wait_and_all_others_are_refused() {
        let (began, is_begun) = mpsc::channel();
        let (go, is_gone) = mpsc::channel();
        let slow = Slow { began, go: is_gone };
        let lent = Lending::new(Episode::start(Box::new(slow), "t", 0, 0, 0));
        let tools = LentTools::default();
        tools.lend("key", &lent);
        let router = tools.router();
        let call = |router: Router| async move { ask(&router, "key", Body::from("{}")).await };
        let first = tokio::spawn(call(router.clone()));
        is_begun.recv().unwrap();
        // One is under way, so there is room for so many others.
        let waiting: Vec<_> = (1..MAX_CALLS)
            .map(|_| tokio::spawn(call(router.clone())))
            .collect();
        while lent.room.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        for _ in 0..500 {
            let refused = call(router.clone()).await;
            assert_eq!(refused, StatusCode::TOO_MANY_REQUESTS);
        }
        // Neither is answered while the first is under way, but when the episode ends.
        assert!(waiting.iter().all(|call| !call.is_finished()));
        tools.take_back("key");
        for call in waiting {
            assert_eq!(call.await.unwrap(), StatusCode::GONE);
        }
        assert_eq!(call(router.clone()).await, StatusCode::UNAUTHORIZED);
        assert!(!first.is_finished());
        go.send(()).unwrap();
        assert_eq!(first.await.unwrap(), StatusCode::OK);
        assert!(is_begun.try_recv().is_err(), "another call was made");
    }

    /// Who has no key is told so without an end of what they send.
    #[tokio::test]
    async fn no_body_is_read_of_who_has_no_key() {
        let router = LentTools::default().router();
        let endless = futures_util::stream::pending::<Result<Vec<u8>, std::io::Error>>();
        let status = ask(&router, "other", Body::from_stream(endless)).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED);
    }
}
