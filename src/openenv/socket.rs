//! `/ws` and the WebSocket of `/mcp`: one session a socket, one reply a request, in order.
//!
//! While a step runs the socket is read on, so that a client that goes away is noticed: the step
//! ends, and the slot is free at once. Frames that arrive meanwhile wait, within bounds. A peer that
//! says nothing, not even to pings, for [`DEAD_AFTER`] is gone.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::ws::{CloseFrame, Message, WebSocket, close_code};
use futures_util::SinkExt as _;
use serde_json::{Map, Value, json};
use tokio::time::{Interval, MissedTickBehavior, interval_at};

use super::App;
use super::gym::{Observation, StepError};
use super::rpc;
use super::sessions::Session;
use super::validate::{self, Field, Invalid, Kind};
use super::wire::{self, capacity_message};
use crate::chat::to_ascii_python_json;

const PING_EVERY: Duration = Duration::from_secs(20);
const DEAD_AFTER: Duration = Duration::from_secs(60);
/// How long a peer may take to read what is sent to it.
const SEND_WITHIN: Duration = Duration::from_secs(60);
/// Frames that wait behind a step. With more, or more than one message's bytes, the socket is closed: if it
/// were not read, nobody would notice that the client went away.
const MAX_WAITING: usize = 256;

const STEP: &[Field] = &[
    Field::required("data", Kind::Object),
    Field::optional("type", Kind::Exactly("step")),
];
const RESET: &[Field] = &[
    Field::optional("data", Kind::Object),
    Field::optional("type", Kind::Exactly("reset")),
];
const MCP: &[Field] = &[
    Field::required("data", Kind::Object),
    Field::optional("type", Kind::Exactly("mcp")),
];
const ONLY_TYPE: &[Field] = &[Field::optional("type", Kind::Text { max: None })];

/// Which protocol a socket speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// Frames of `/ws`.
    Frames,
    /// JSON-RPC.
    Rpc,
}

/// A socket and what arrived on it.
struct Line {
    socket: WebSocket,
    waiting: VecDeque<Message>,
    waiting_bytes: usize,
    max_waiting_bytes: usize,
    heard: Instant,
    pings: Interval,
}

/// The peer is gone, or broke the protocol.
struct Gone;

/// Why the server ends a conversation.
enum End {
    /// The client asked for it, or sent what cannot be answered.
    Asked,
    /// The server stops.
    Stopping,
}

/// What follows a reply.
enum After {
    GoOn,
    Close,
}

impl Line {
    fn new(socket: WebSocket, max_waiting_bytes: usize) -> Self {
        let mut pings = interval_at(tokio::time::Instant::now() + PING_EVERY, PING_EVERY);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            socket,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            max_waiting_bytes,
            heard: Instant::now(),
            pings,
        }
    }

    async fn send(&mut self, message: Message) -> Result<(), Gone> {
        match tokio::time::timeout(SEND_WITHIN, self.socket.send(message)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(Gone),
        }
    }

    async fn flush(&mut self) -> Result<(), Gone> {
        match tokio::time::timeout(SEND_WITHIN, self.socket.flush()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(Gone),
        }
    }

    async fn send_text(&mut self, text: String) -> Result<(), Gone> {
        self.send(Message::Text(text.into())).await
    }

    async fn close(&mut self, code: u16, reason: &'static str) {
        let frame = CloseFrame {
            code,
            reason: reason.into(),
        };
        // It may be gone already.
        let _ = self.send(Message::Close(Some(frame))).await;
    }

    /// Waits for something to happen on the socket, and puts a frame for us into `waiting`.
    async fn listen(&mut self) -> Result<(), Gone> {
        tokio::select! {
            // What was sent while nobody read is heard before the silence is judged.
            biased;
            received = self.socket.recv() => {
                self.heard = Instant::now();
                match received {
                    Some(Ok(Message::Pong(_))) => Ok(()),
                    // Who asks and does not read the answers is heard no further.
                    Some(Ok(Message::Ping(_))) => self.flush().await,
                    Some(Ok(Message::Close(_))) | None => Err(Gone),
                    Some(Ok(message)) => {
                        self.waiting_bytes += size(&message);
                        self.waiting.push_back(message);
                        Ok(())
                    }
                    Some(Err(error)) => {
                        tracing::debug!(%error, "a socket broke");
                        let is_large = error.to_string().contains("too long");
                        if is_large {
                            self.close(close_code::SIZE, "message too big").await;
                        }
                        Err(Gone)
                    }
                }
            }
            _ = self.pings.tick() => {
                if self.heard.elapsed() > DEAD_AFTER {
                    return Err(Gone);
                }
                self.send(Message::Ping(Bytes::new())).await
            }
        }
    }

    async fn next(&mut self) -> Result<Message, Gone> {
        loop {
            if let Some(message) = self.waiting.pop_front() {
                self.waiting_bytes -= size(&message);
                return Ok(message);
            }
            self.listen().await?;
        }
    }

    /// Waits for `work`, or until the peer is gone.
    async fn while_listening<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Gone> {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                heard = self.listen() => heard?,
            }
            if self.waiting.len() > MAX_WAITING || self.waiting_bytes > self.max_waiting_bytes {
                self.close(close_code::POLICY, "too much waits for an answer")
                    .await;
                return Err(Gone);
            }
        }
    }
}

fn size(message: &Message) -> usize {
    match message {
        Message::Text(text) => text.len(),
        Message::Binary(bytes) | Message::Ping(bytes) | Message::Pong(bytes) => bytes.len(),
        Message::Close(_) => 0,
    }
}

/// Serves one socket, to its end.
pub(super) async fn serve(
    app: Arc<App>,
    socket: WebSocket,
    dialect: Dialect,
    attach_to: Option<String>,
    _open: OpenSocket,
) {
    let mut line = Line::new(socket, app.config.max_message_bytes);
    let session = match attach_to {
        Some(id) => app.sessions.attach(&id).map_err(|message| match dialect {
            Dialect::Frames => wire::error(&message, "SESSION_ERROR"),
            Dialect::Rpc => to_ascii_python_json(&rpc::not_attached(message)),
        }),
        None => {
            let session = Session::new(app.gym.open());
            match app.sessions.open(&session) {
                Ok(()) => Ok(session),
                Err(capacity) => {
                    app.metrics.count_refusal();
                    let (active, max) = (capacity.active, capacity.max);
                    Err(match dialect {
                        Dialect::Frames => wire::frame(
                            "error",
                            &json!({
                                "message": capacity_message(active, max),
                                "code": "CAPACITY_REACHED",
                                "active_sessions": active,
                                "max_sessions": max,
                            }),
                        ),
                        Dialect::Rpc => {
                            to_ascii_python_json(&rpc::at_capacity(&Value::Null, capacity))
                        }
                    })
                }
            }
        }
    };
    let session = match session {
        Ok(session) => session,
        Err(text) => {
            if line.send_text(text).await.is_ok() {
                line.close(close_code::NORMAL, "").await;
            }
            return;
        }
    };
    app.metrics.count_opened();
    let slot = Slot {
        app: &app,
        id: &session.id,
    };
    tracing::debug!(session = %session.id, "a socket opened");
    let ended = converse(&app, &mut line, dialect, &session).await;
    drop(slot);
    tracing::debug!(session = %session.id, "a socket closed");
    drop(session);
    match ended {
        Ok(End::Asked) => line.close(close_code::NORMAL, "").await,
        Ok(End::Stopping) => line.close(close_code::AWAY, "the server stops").await,
        Err(Gone) => {}
    }
}

/// A socket, counted from its request to its end.
pub(super) struct OpenSocket(Arc<App>);

impl OpenSocket {
    pub(super) fn new(app: &Arc<App>) -> Self {
        app.sockets.send_modify(|open| *open += 1);
        Self(Arc::clone(app))
    }
}

impl Drop for OpenSocket {
    fn drop(&mut self) {
        self.0.sockets.send_modify(|open| *open -= 1);
    }
}

/// Frees the session's slot, whatever ends the conversation.
struct Slot<'a> {
    app: &'a App,
    id: &'a str,
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.app.sessions.detach(self.id);
    }
}

/// Answers frames until the server has reason to close, or the peer is gone.
async fn converse(
    app: &Arc<App>,
    line: &mut Line,
    dialect: Dialect,
    session: &Arc<Session>,
) -> Result<End, Gone> {
    loop {
        let message = tokio::select! {
            message = line.next() => message?,
            () = app.stopping() => return Ok(End::Stopping),
        };
        let Message::Text(text) = message else {
            // As OpenEnv's own server says it of a frame without text.
            line.send_text(wire::error("'text'", "SESSION_ERROR"))
                .await?;
            return Ok(End::Asked);
        };
        let (reply, after) = match dialect {
            Dialect::Frames => answer_frame(app, line, session, &text).await?,
            Dialect::Rpc => {
                let answer = match wire::read_json(&text) {
                    Ok(body) => {
                        let work = rpc::answer(app, &body, Some(session));
                        line.while_listening(work).await?
                    }
                    Err(fault) => rpc::parse_error(format!("Parse error: {}", fault.describe())),
                };
                (Some(to_ascii_python_json(&answer)), After::GoOn)
            }
        };
        if let Some(reply) = reply {
            line.send_text(reply).await?;
        }
        if let After::Close = after {
            return Ok(End::Asked);
        }
    }
}

type Reply = (Option<String>, After);

fn say(text: String) -> Reply {
    (Some(text), After::GoOn)
}

fn invalid(faults: &[Invalid]) -> Reply {
    let errors = validate::reports(faults, true);
    say(wire::frame(
        "error",
        &json!({"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}),
    ))
}

/// What a frame asks for.
#[derive(Debug, Clone, PartialEq)]
enum Asked {
    Reset(Map<String, Value>),
    Step(Map<String, Value>),
    State,
    Mcp(Value),
    Close,
}

/// Makes sense of a frame; fails with what is said where there is none.
fn read_frame(text: &str) -> Result<Asked, Reply> {
    let message = match wire::read_json(text) {
        Ok(Value::Object(message)) => message,
        Ok(other) => {
            let kind = validate::python_type(&other);
            let message = format!("'{kind}' object has no attribute 'get'");
            return Err((Some(wire::error(&message, "SESSION_ERROR")), After::Close));
        }
        Err(fault) => {
            let message = format!("Invalid JSON: {}", fault.describe());
            return Err(say(wire::error(&message, "INVALID_JSON")));
        }
    };
    let kind = message.get("type").cloned().unwrap_or_else(|| json!(""));
    let fields = match kind.as_str() {
        Some("step") => STEP,
        Some("reset") => RESET,
        Some("mcp") => MCP,
        Some("state" | "close") => ONLY_TYPE,
        _ => {
            let shown = match &kind {
                Value::String(kind) => kind.chars().take(200).collect(),
                other => validate::python_repr(other),
            };
            let message = format!("Unknown message type: {shown}");
            return Err(say(wire::error(&message, "UNKNOWN_TYPE")));
        }
    };
    let faults = validate::check(&message, fields, false);
    if !faults.is_empty() {
        return Err(invalid(&faults));
    }
    let data = message.get("data").and_then(Value::as_object).cloned();
    let data = data.unwrap_or_default();
    Ok(match kind.as_str() {
        Some("close") => Asked::Close,
        Some("state") => Asked::State,
        Some("mcp") => Asked::Mcp(Value::Object(data)),
        Some("reset") => Asked::Reset(data),
        _ => Asked::Step(data),
    })
}

async fn answer_frame(
    app: &Arc<App>,
    line: &mut Line,
    session: &Arc<Session>,
    text: &str,
) -> Result<Reply, Gone> {
    let asked = match read_frame(text) {
        Ok(asked) => asked,
        Err(reply) => return Ok(reply),
    };
    match asked {
        Asked::Close => Ok((None, After::Close)),
        Asked::State => {
            let state = session.idle_episode().map(|episode| episode.state());
            let state = match state {
                Some(state) => Ok(state),
                None => {
                    let work = app.on_episode(session, |episode, _| Ok(episode.state()));
                    line.while_listening(work).await?
                }
            };
            Ok(say(match state {
                Ok(state) => wire::frame("state", &state),
                Err(error) => step_error(app, &error),
            }))
        }
        Asked::Mcp(body) => {
            let answer = line
                .while_listening(rpc::answer(app, &body, Some(session)))
                .await?;
            Ok(say(wire::frame("mcp", &answer)))
        }
        Asked::Reset(arguments) => {
            let observed = line.while_listening(app.reset(session, arguments)).await?;
            Ok(say(reply(app, observed)))
        }
        Asked::Step(action) => step(app, line, session, action).await,
    }
}

async fn step(
    app: &Arc<App>,
    line: &mut Line,
    session: &Arc<Session>,
    action: Map<String, Value>,
) -> Result<Reply, Gone> {
    let faults = app.gym.check(&action);
    if !faults.is_empty() {
        return Ok(invalid(&faults));
    }
    let observed = line
        .while_listening(app.step(session, action, None))
        .await?;
    Ok(say(reply(app, observed)))
}

fn reply(app: &Arc<App>, observed: Result<Observation, StepError>) -> String {
    match observed {
        Ok(observation) => wire::observation(&observation),
        Err(error) => step_error(app, &error),
    }
}

fn step_error(app: &Arc<App>, error: &StepError) -> String {
    app.note(error);
    wire::error(&error.describe(), "EXECUTION_ERROR")
}

/// Reads a frame as a client may send it, and holds what must be so of any.
///
/// # Panics
///
/// Where that does not hold.
#[cfg(any(fuzzing, test))]
pub fn fuzz_frame(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    match read_frame(&text) {
        Ok(Asked::Close | Asked::State) => {}
        Ok(asked) => {
            let (kind, data) = match &asked {
                Asked::Mcp(body) => ("mcp", body.clone()),
                Asked::Reset(arguments) => ("reset", Value::Object(arguments.clone())),
                Asked::Step(action) => ("step", Value::Object(action.clone())),
                Asked::Close | Asked::State => return,
            };
            // What was read is written, and read the same.
            assert_eq!(read_frame(&wire::frame(kind, &data)).ok(), Some(asked));
        }
        Err((reply, _)) => {
            let reply = reply.expect("what is refused is said");
            let said: Value = serde_json::from_str(&reply).expect("it is a frame");
            assert_eq!(said["type"], "error", "{reply}");
            // A small frame asks for no large one: of each key that is too many, it and a reason are said.
            let (length, limit) = (reply.len(), 4096 + 256 * text.len());
            assert!(length <= limit, "{length} bytes are said, {limit} at most");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_seeds_of_the_fuzz_target_are_read() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/seeds/openenv_frame");
        let mut asked = 0;
        for seed in fs_err::read_dir(folder).unwrap() {
            let seed = fs_err::read(seed.unwrap().path()).unwrap();
            fuzz_frame(&seed);
            asked += usize::from(read_frame(&String::from_utf8_lossy(&seed)).is_ok());
        }
        assert_eq!(asked, 4);
    }

    proptest! {
        #[test]
        fn any_frame_is_read_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 0..64),
            text in r#"(\{|\}|\[|\]|"|,|:|"type"|"data"|"step"|"reset"|"é|\\u00|1e9|-0|null| |\n){0,24}"#,
        ) {
            fuzz_frame(&bytes);
            fuzz_frame(text.as_bytes());
        }
    }
}
