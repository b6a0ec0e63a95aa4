//! The client against a server that misbehaves as it is told to.

use std::io::{Read as _, Write as _};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use axum::extract::ws::{self, WebSocketUpgrade};
use axum::routing::get;
use axum::{Json, Router};
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::Message as Frame;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};
use tokio_tungstenite::tungstenite::protocol::CloseFrame;

use super::*;
use crate::causes::with_causes;
use crate::chat::{Message, ParsedTurn, ToolCall};
use crate::env::{EpisodeStatus, StepResult};
use crate::http::Listener;
use crate::http::tls::ServerTls;
use crate::http::tls::tests_support::{Authority, Folder};

/// What the server does with a connection.
enum Door {
    Open,
    /// Answers with this head.
    Refuse(&'static str),
    /// Goes away before it answers.
    Shut,
}

/// What the server does with a frame.
enum Act {
    Say(String),
    Binary,
    Close(u16, &'static str),
    /// Ends the connection without a word.
    Break,
    /// Answers so much later.
    Late(Duration, String),
    /// Answers, pings, and reads on once that is answered.
    SayAndPing(String),
    /// Answers, and ends the connection behind it.
    SayAndBreak(String),
}

/// A server on a port of its own.
struct Fake {
    _runtime: Runtime,
    url: String,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    connections: AtomicUsize,
    pongs: AtomicUsize,
    /// The frames of each connection.
    frames: Mutex<Vec<(usize, Value)>>,
    /// The header of each WebSocket.
    actors: Mutex<Vec<String>>,
}

type Doors = dyn Fn(usize) -> Door + Send + Sync;
type Acts = dyn Fn(usize, &Value) -> Act + Send + Sync;

impl Fake {
    fn start(
        schema: Value,
        doors: impl Fn(usize) -> Door + Send + Sync + 'static,
        acts: impl Fn(usize, &Value) -> Act + Send + Sync + 'static,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::<Seen>::default();
        let (doors, acts): (Arc<Doors>, Arc<Acts>) = (Arc::new(doors), Arc::new(acts));
        let shared = Arc::clone(&seen);
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (seen, schema) = (Arc::clone(&shared), schema.clone());
                let (doors, acts) = (Arc::clone(&doors), Arc::clone(&acts));
                tokio::spawn(async move { serve(stream, &schema, &seen, &*doors, &*acts).await });
            }
        });
        Self {
            _runtime: runtime,
            url,
            seen,
        }
    }

    /// An environment that takes a `message`, and does with steps what `act` says.
    fn of_text(act: impl Fn(usize, &Value) -> Act + Send + Sync + 'static) -> Self {
        Self::start(text_schema(), |_| Door::Open, act)
    }

    fn config(&self) -> RemoteConfig {
        RemoteConfig {
            step_timeout: Duration::from_millis(300),
            reset_timeout: Duration::from_secs(5),
            retry_timeout: Duration::from_secs(5),
            ..RemoteConfig::new(&self.url)
        }
    }

    fn remote(&self) -> Remote {
        Remote::connect(self.config()).unwrap()
    }

    fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::SeqCst)
    }

    fn frames(&self) -> Vec<(usize, Value)> {
        self.seen.frames.lock().unwrap().clone()
    }
}

async fn serve(mut stream: TcpStream, schema: &Value, seen: &Seen, doors: &Doors, acts: &Acts) {
    let mut head = [0; 16];
    let read = stream.peek(&mut head).await.unwrap_or(0);
    let listed = json!({"jsonrpc": "2.0", "id": 1, "result": {"tools": [{
        "name": "add", "description": "Adds.", "inputSchema": {"required": ["a"]},
    }]}});
    let body = if head[..read].starts_with(b"GET /schema") {
        Some(schema)
    } else if head[..read].starts_with(b"POST /mcp") {
        Some(&listed)
    } else {
        None
    };
    if let Some(body) = body {
        let body = body.to_string();
        let answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(answer.as_bytes()).await.unwrap();
        // Until the client has read it.
        let _ = stream.read_to_end(&mut Vec::new()).await;
        return;
    }
    let number = seen.connections.fetch_add(1, Ordering::SeqCst);
    match doors(number) {
        Door::Open => {}
        Door::Shut => return,
        Door::Refuse(answer) => {
            let mut buffer = [0; 4096];
            let _ = stream.read(&mut buffer).await;
            stream.write_all(answer.as_bytes()).await.unwrap();
            return;
        }
    }
    #[expect(clippy::result_large_err, reason = "tungstenite's own signature")]
    let note = |request: &Request, response: Response| {
        let actor = request.headers().get("ate-target-actor");
        let actor = actor.map_or("", |actor| actor.to_str().unwrap());
        seen.actors.lock().unwrap().push(actor.to_owned());
        Ok(response)
    };
    let mut socket = tokio_tungstenite::accept_hdr_async(stream, note)
        .await
        .unwrap();
    while let Some(Ok(message)) = socket.next().await {
        let Frame::Text(text) = message else { continue };
        let frame: Value = serde_json::from_str(&text).unwrap();
        seen.frames.lock().unwrap().push((number, frame.clone()));
        if frame["type"] == "close" {
            let _ = socket.close(None).await;
            continue;
        }
        match acts(number, &frame) {
            Act::Say(text) => socket.send(Frame::text(text)).await.unwrap(),
            Act::Binary => socket.send(Frame::binary(vec![1])).await.unwrap(),
            Act::Close(code, reason) => {
                let frame = CloseFrame {
                    code: code.into(),
                    reason: reason.into(),
                };
                let _ = socket.close(Some(frame)).await;
            }
            Act::Break => return,
            Act::SayAndBreak(text) => {
                socket.send(Frame::text(text)).await.unwrap();
                return;
            }
            Act::Late(pause, text) => {
                tokio::time::sleep(pause).await;
                // The client may be gone.
                let _ = socket.send(Frame::text(text)).await;
            }
            Act::SayAndPing(text) => {
                socket.send(Frame::text(text)).await.unwrap();
                socket.send(Frame::Ping("x".into())).await.unwrap();
                while let Some(Ok(message)) = socket.next().await {
                    if let Frame::Pong(_) = message {
                        seen.pongs.fetch_add(1, Ordering::SeqCst);
                        break;
                    }
                }
            }
        }
    }
}

fn text_schema() -> Value {
    json!({"action": {"properties": {"message": {"type": "string"}}, "required": ["message"]}})
}

fn observed(text: &str, reward: Option<f64>, done: bool) -> String {
    json!({"type": "observation", "data": {
        "observation": {"metadata": {}, "said": text}, "reward": reward, "done": done,
    }})
    .to_string()
}

fn error(code: &str) -> String {
    json!({"type": "error", "data": {"message": "as it is told", "code": code}}).to_string()
}

fn is_reset(frame: &Value) -> bool {
    frame["type"] == "reset"
}

/// Resets as an environment should.
fn ready() -> Act {
    Act::Say(observed("Begin.", None, false))
}

fn settings() -> EpisodeSettings {
    EpisodeSettings {
        system_prompt: None,
        max_turns: 3,
        max_output_chars: 100,
    }
}

fn episode(remote: &Remote) -> Box<dyn Environment> {
    remote.episode(Arc::default(), Arc::new(settings()))
}

fn turn(text: &str) -> ParsedTurn {
    ParsedTurn {
        content: text.to_owned(),
        ..ParsedTurn::default()
    }
}

fn say(episode: &mut Box<dyn Environment>, text: &str) -> Result<StepResult, String> {
    let result = episode.step(&turn(text));
    result.map_err(|error| with_causes(&error))
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "there is no sign of {what}"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn an_episode_is_a_session_which_the_next_one_takes_over() {
    let server = Fake::of_text(|_, frame| match is_reset(frame) {
        true => ready(),
        false => {
            let text = frame["data"]["message"].as_str().unwrap();
            Act::Say(observed(&text.to_uppercase(), Some(0.5), text == "end"))
        }
    });
    let config = RemoteConfig {
        headers: [(
            "ate-target-actor".to_owned(),
            "space/coder-{slot}".to_owned(),
        )]
        .into(),
        reward: RewardRule::Sum,
        ..server.config()
    };
    let remote = Remote::connect(config).unwrap();
    assert!(!remote.needs_tools());
    let arguments = json!({"seed": 3, "level": "hard"});
    let opening = Opening {
        messages: vec![Message::user("Play.")],
        arguments: arguments.as_object().unwrap().clone(),
    };
    let settings = EpisodeSettings {
        system_prompt: Some("Be loud.".to_owned()),
        ..settings()
    };
    let (opening, settings) = (Arc::new(opening), Arc::new(settings));
    let mut group: Vec<_> = (0..2)
        .map(|_| remote.episode(Arc::clone(&opening), Arc::clone(&settings)))
        .collect();
    for episode in &mut group {
        episode.prepare();
    }
    for episode in &mut group {
        let messages = episode.reset().unwrap();
        let expected = [
            Message::system("Be loud."),
            Message::user("Play.\n\nBegin."),
        ];
        assert_eq!(messages, expected);
        assert!(episode.waits() && episode.tools().is_empty());
    }
    for episode in &mut group {
        let result = say(episode, "hello").unwrap();
        assert_eq!(result.observation, [Message::user("HELLO")]);
        assert_eq!((result.done, result.reward), (false, None));
        let result = say(episode, "end").unwrap();
        assert_eq!((result.done, result.reward), (true, Some(1.0)));
        assert_eq!(result.status, Some(EpisodeStatus::Passed));
        assert_eq!(result.rewards["environment"], 1.0);
    }
    assert_eq!(server.connections(), 2);
    let mut actors = server.seen.actors.lock().unwrap().clone();
    actors.sort_unstable();
    assert_eq!(actors, ["space/coder-0", "space/coder-1"]);
    // The slots are free: further episodes are on the same sockets.
    let mut next = remote.episode(opening, settings);
    next.reset().unwrap();
    say(&mut next, "again").unwrap();
    assert_eq!(server.connections(), 2);
    let frames = server.frames();
    assert!(frames.contains(&(0, json!({"type": "reset", "data": arguments}))));
    assert!(frames.contains(&(1, json!({"type": "step", "data": {"message": "hello"}}))));
    assert_eq!(next.close(None).reward, Some(0.5));
    drop((group, next, remote));
    // The server is told of the end.
    let is_close = |(_, frame): &(usize, Value)| frame["type"] == "close";
    until("two farewells", || {
        server
            .frames()
            .iter()
            .filter(|frame| is_close(frame))
            .count()
            == 2
    });
}

#[test]
fn episodes_that_are_prepared_wait_for_their_resets_together() {
    let pause = Duration::from_millis(200);
    let server = Fake::of_text(move |_, _| Act::Late(pause, observed("Begin.", None, false)));
    let remote = server.remote();
    let mut group: Vec<_> = (0..8).map(|_| episode(&remote)).collect();
    let begun = Instant::now();
    group.iter_mut().for_each(|episode| episode.prepare());
    for episode in &mut group {
        episode.reset().unwrap();
    }
    assert!(begun.elapsed() < 4 * pause, "{:?}", begun.elapsed());
    assert_eq!(server.connections(), 8);
    // Whoever prepares and leaves gives the slot back.
    drop(group);
    let mut left = episode(&remote);
    left.prepare();
    drop(left);
    let mut next = episode(&remote);
    next.reset().unwrap();
    assert!(server.connections() <= 9);
}

#[test]
fn rewards_are_the_last_and_limits_end_with_what_there_is() {
    let server = Fake::of_text(|_, frame| match is_reset(frame) {
        true => ready(),
        false => match frame["data"]["message"].as_str().unwrap() {
            "nothing" => Act::Say(observed("", None, false)),
            "lost" => {
                let mut frame: Value =
                    serde_json::from_str(&observed("", Some(0.25), false)).unwrap();
                frame["data"]["metadata"] = json!({"state_lost": true});
                Act::Say(frame.to_string())
            }
            "late" => {
                let mut frame: Value = serde_json::from_str(&observed("", None, false)).unwrap();
                frame["data"]["metadata"] = json!({
                    "state_lost": true,
                    "exit": crate::sandbox::Exit::DeadlineExceeded {
                        limit: Duration::from_secs(1),
                        elapsed: Duration::from_secs(1),
                    },
                });
                Act::Say(frame.to_string())
            }
            reward => Act::Say(observed("x", Some(reward.parse().unwrap()), false)),
        },
    });
    let remote = server.remote();
    let play = |texts: &[&str]| {
        let mut episode = episode(&remote);
        episode.reset().unwrap();
        let mut last = None;
        for text in texts {
            last = Some(say(&mut episode, text).unwrap());
        }
        last.unwrap()
    };
    let result = play(&["1", "0.5", "nothing"]);
    assert_eq!((result.done, result.reward), (true, Some(0.5)));
    assert_eq!(result.status, Some(EpisodeStatus::NoSubmission));
    assert_eq!(
        play(&["nothing"]).observation,
        [Message::user("(no output)")]
    );
    // An interpreter that is gone ends the episode; it is no fault.
    let result = play(&["lost"]);
    assert_eq!((result.done, result.reward), (true, Some(0.25)));
    assert_eq!(result.status, Some(EpisodeStatus::Failed));
    // The clock of a busy server is none of the policy's doing.
    let mut late = episode(&remote);
    late.reset().unwrap();
    let reason = say(&mut late, "late").unwrap_err();
    assert!(reason.contains("its deadline ended the step"), "{reason}");
    // Sums that are no numbers any more are the server's fault, and nothing to learn from.
    let config = RemoteConfig {
        reward: RewardRule::Sum,
        ..server.config()
    };
    let mut adding = episode(&Remote::connect(config).unwrap());
    adding.reset().unwrap();
    say(&mut adding, "3e38").unwrap();
    let reason = say(&mut adding, "2e38").unwrap_err();
    assert!(reason.contains(&server.url), "{reason}");
    assert!(reason.contains("rewards add up to 5"), "{reason}");
    // A turn that is cut off is no action.
    let mut cut = episode(&remote);
    cut.reset().unwrap();
    let result = cut.close(Some(&turn("1")));
    assert_eq!((result.done, result.reward), (true, Some(0.0)));
    // Calls are told back where there are no tools.
    let mut calling = episode(&remote);
    calling.reset().unwrap();
    let before = server.frames().len();
    let call = ParsedTurn {
        tool_calls: vec![Ok(ToolCall::new("add", json!({})))],
        ..ParsedTurn::default()
    };
    let told = calling.step(&call).unwrap().observation;
    assert_eq!(told[0].content, "error: there are no tools; answer in text");
    assert_eq!(server.frames().len(), before);
    assert_eq!(calling.stats().tool_failures, 1);
}

#[test]
fn tools_are_called_and_what_is_no_call_never_reaches_the_server() {
    let schema = json!({"action": {"properties": {"tool_name": {}, "arguments": {}}}});
    let server = Fake::start(
        schema,
        |_| Door::Open,
        |_, frame| match is_reset(frame) {
            true => ready(),
            false if frame["data"]["arguments"]["a"] == 9 => Act::Say(error("VALIDATION_ERROR")),
            false => Act::Say(
                json!({"type": "observation", "data": {"observation": {
                    "tool_name": "add", "error": null,
                    "result": {"content": [{"type": "text", "text": "5"}], "data": 5},
                }, "reward": null, "done": frame["data"]["arguments"]["a"] == 7}})
                .to_string(),
            ),
        },
    );
    let remote = server.remote();
    assert!(remote.needs_tools());
    let mut playing = episode(&remote);
    assert_eq!(playing.tools()[0].name, "add");
    playing.reset().unwrap();
    let calls = |calls: Vec<(&str, Value)>| ParsedTurn {
        tool_calls: (calls.into_iter())
            .map(|(name, arguments)| Ok(ToolCall::new(name, arguments)))
            .collect(),
        ..ParsedTurn::default()
    };
    let damaged = crate::chat::parse_turn_as(
        "<tool_call>{</tool_call>",
        crate::chat::ToolCallFormat::Hermes,
        playing.tools(),
    );
    let told = playing.step(&damaged).unwrap().observation;
    assert!(
        told[0]
            .content
            .starts_with("error: tool call is not valid JSON")
    );
    assert_eq!(server.frames().len(), 1);
    let turn = calls(vec![
        ("add", json!({"a": 2})),
        ("sub", json!({})),
        ("add", json!({})),
        ("add", json!({"a": 9})),
    ]);
    let result = playing.step(&turn).unwrap();
    let said: Vec<&str> = result
        .observation
        .iter()
        .map(|message| message.content.as_str())
        .collect();
    assert_eq!(said[..2], ["5", "error: there is no tool `sub`; use `add`"]);
    assert_eq!(said[2], "error: `add` needs the argument `a`");
    // Without where the server is.
    assert_eq!(said[3], "error: it says VALIDATION_ERROR: as it is told");
    assert_eq!(server.frames().len(), 3);
    let stats = playing.stats();
    assert_eq!((stats.tool_calls, stats.tool_failures), (5, 4));
    // What follows the end of the episode is not sent.
    let result = playing.step(&calls(vec![
        ("add", json!({"a": 7})),
        ("add", json!({"a": 1})),
    ]));
    assert!(result.unwrap().done);
    assert_eq!(server.frames().len(), 4);
    // A turn without a call ends an episode.
    let mut silent = episode(&remote);
    silent.reset().unwrap();
    let result = silent.step(&self::turn("I am done.")).unwrap();
    assert_eq!((result.done, result.reward), (true, Some(0.0)));
}

#[test]
fn a_text_that_the_server_does_not_take_is_told_back() {
    let server = Fake::of_text(|_, frame| match is_reset(frame) {
        true => ready(),
        false if frame["data"]["message"] == "" => Act::Say(error("VALIDATION_ERROR")),
        false => Act::Say(observed("fine", Some(1.0), true)),
    });
    let remote = server.remote();
    let mut playing = episode(&remote);
    playing.reset().unwrap();
    let told = playing.step(&turn(" ")).unwrap();
    let expected = "error: it says VALIDATION_ERROR: as it is told";
    assert_eq!(told.observation, [Message::user(expected)]);
    let result = playing.step(&turn("well")).unwrap();
    assert_eq!((result.done, result.reward), (true, Some(1.0)));
}

/// Each way to fail a step: the error says which, another session goes on, and the slot has a new session.
#[test]
fn a_fault_fails_one_episode_and_says_what_was_expected() {
    for (fault, expected) in [
        ("close", "it closed the connection with code 1011: tired"),
        ("break", "it closed the connection without a word"),
        (
            "late",
            "there was no answer within 300ms; raise `env.step_timeout`",
        ),
        ("binary", "expected a text frame, found a binary one"),
        ("large", "larger than 65536 bytes"),
        ("text", "no JSON"),
        ("state", "expected a frame of type `observation`"),
        ("EXECUTION_ERROR", "it says EXECUTION_ERROR: as it is told"),
        ("SESSION_ERROR", "it says SESSION_ERROR"),
    ] {
        let server = Fake::of_text(move |_, frame| {
            if is_reset(frame) {
                return ready();
            }
            match frame["data"]["message"].as_str().unwrap() {
                "fine" => Act::Say(observed("fine", Some(1.0), false)),
                "close" => Act::Close(1011, "tired"),
                "break" => Act::Break,
                "late" => Act::Late(
                    Duration::from_millis(600),
                    observed("late", Some(0.0), true),
                ),
                "binary" => Act::Binary,
                "large" => Act::Say(observed(&"x".repeat(70_000), Some(0.0), false)),
                "text" => Act::Say("NaN".to_owned()),
                "state" => Act::Say(json!({"type": "state", "data": {}}).to_string()),
                code => Act::Say(error(code)),
            }
        });
        let config = RemoteConfig {
            max_message_bytes: 65_536,
            ..server.config()
        };
        let remote = Remote::connect(config).unwrap();
        let mut other = episode(&remote);
        other.reset().unwrap();
        let mut failing = episode(&remote);
        failing.reset().unwrap();
        say(&mut failing, "fine").unwrap();
        let reason = say(&mut failing, fault).unwrap_err();
        assert!(reason.contains(expected), "{fault}: {reason}");
        let place = format!("`{}`, session 1, did not answer `step`", server.url);
        assert!(reason.contains(&place), "{reason}");
        // Nothing is sent behind it.
        say(&mut failing, "fine").unwrap_err();
        say(&mut other, "fine").unwrap();
        let mut next = episode(&remote);
        next.reset().unwrap();
        let result = say(&mut next, "fine").unwrap();
        assert_eq!(result.observation, [Message::user("fine")], "{fault}");
        // An error of the environment leaves its session, and all else ends it.
        let sessions = if fault == "EXECUTION_ERROR" { 2 } else { 3 };
        assert_eq!(server.connections(), sessions, "{fault}");
    }
}

#[test]
fn what_never_reached_the_environment_is_tried_again() {
    const STALE: &str = "HTTP/1.1 421 Misdirected Request\r\nx-ate-assignment-stale: true\r\ncontent-length: 0\r\n\r\n";
    const FULL: &str = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 10\r\n\r\nno workers";
    let server = Fake::start(
        text_schema(),
        |number| match number {
            0 => Door::Refuse(STALE),
            1 => Door::Refuse(FULL),
            2 => Door::Shut,
            _ => Door::Open,
        },
        |number, frame| match number {
            3 => Act::Say(error("CAPACITY_REACHED")),
            _ if is_reset(frame) => ready(),
            _ => Act::Say(observed("x", None, true)),
        },
    );
    let remote = server.remote();
    let mut waiting = episode(&remote);
    waiting.reset().unwrap();
    assert!(say(&mut waiting, "x").unwrap().done);
    assert_eq!(server.connections(), 5);
}

#[test]
fn what_may_have_reached_it_is_not_tried_again() {
    for (answer, expected) in [
        (
            "HTTP/1.1 421 Misdirected Request\r\ncontent-length: 4\r\n\r\nmine",
            "status 421, not 101: mine",
        ),
        (
            "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
            "status 404",
        ),
    ] {
        let server = Fake::start(text_schema(), move |_| Door::Refuse(answer), |_, _| ready());
        let remote = server.remote();
        let reason = with_causes(&episode(&remote).reset().unwrap_err());
        assert!(reason.contains(expected), "{reason}");
        assert!(
            reason.contains("session 0, did not answer `reset`"),
            "{reason}"
        );
        assert_eq!(server.connections(), 1);
    }
    // A reset on a new session that breaks, or that the environment refuses.
    for act in ["break", "EXECUTION_ERROR"] {
        let server = Fake::of_text(move |_, _| match act {
            "break" => Act::Break,
            code => Act::Say(error(code)),
        });
        episode(&server.remote()).reset().unwrap_err();
        assert_eq!(server.connections(), 1, "{act}");
    }
}

/// What broke off is not too large, and what is too large is not broken off.
#[test]
fn bodies_that_are_too_large_and_broken_off_are_told_apart() {
    for (length, limit, expected) in [
        (100, 1000, "the connection broke"),
        (30, 10, "its answer is larger than 10 bytes"),
    ] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]).unwrap();
            let body = " ".repeat(30);
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}");
            stream.write_all(answer.as_bytes()).unwrap();
        });
        let config = RemoteConfig {
            max_message_bytes: limit,
            ..RemoteConfig::new(url)
        };
        let reason = with_causes(&Remote::connect(config).unwrap_err());
        assert!(reason.contains(expected), "{reason}");
        server.join().unwrap();
    }
}

#[test]
fn a_server_that_stays_full_or_away_is_given_up_in_time() {
    let full = Fake::of_text(|_, _| Act::Say(error("CAPACITY_REACHED")));
    let config = RemoteConfig {
        retry_timeout: Duration::from_millis(400),
        ..full.config()
    };
    let remote = Remote::connect(config).unwrap();
    let begun = Instant::now();
    let reason = with_causes(&episode(&remote).reset().unwrap_err());
    assert!(begun.elapsed() < Duration::from_secs(3));
    assert!(reason.contains("`env.retry_timeout`"), "{reason}");
    assert!(
        reason.contains("no room for another session: as it is told"),
        "{reason}"
    );
    assert!(full.connections() > 1);

    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let config = RemoteConfig {
        retry_timeout: Duration::from_millis(200),
        ..RemoteConfig::new(format!("http://{address}"))
    };
    let reason = with_causes(&Remote::connect(config).unwrap_err());
    assert!(reason.contains("did not answer `/schema`"), "{reason}");
    assert!(reason.contains("it cannot be reached"), "{reason}");
}

#[test]
fn a_session_that_ends_between_episodes_is_replaced_and_within_one_is_lost() {
    let server = Fake::of_text(|number, frame| match (is_reset(frame), number) {
        // Ends behind the reset: the episode's state is lost.
        (true, 1) => Act::SayAndBreak(observed("Begin.", None, false)),
        (true, _) => ready(),
        // Ends behind an episode: nothing is.
        (false, 0) => Act::SayAndBreak(observed("bye", Some(1.0), true)),
        (false, _) => Act::Say(observed("x", None, true)),
    });
    let remote = server.remote();
    let mut first = episode(&remote);
    first.reset().unwrap();
    assert!(say(&mut first, "x").unwrap().done);
    // Whether the end of the session is known by now or not.
    let mut second = episode(&remote);
    second.reset().unwrap();
    assert_eq!(server.connections(), 2);
    std::thread::sleep(Duration::from_millis(50));
    let reason = say(&mut second, "x").unwrap_err();
    assert!(
        reason.contains("it closed the connection") || reason.contains("broke"),
        "{reason}"
    );
    let mut third = episode(&remote);
    third.reset().unwrap();
    assert!(say(&mut third, "x").unwrap().done);
    assert_eq!(server.connections(), 3);
}

#[test]
fn pings_are_answered_while_nobody_asks() {
    let server = Fake::of_text(|_, frame| match is_reset(frame) {
        true => Act::SayAndPing(observed("Begin.", None, false)),
        false => Act::Say(observed("x", None, true)),
    });
    let remote = server.remote();
    let mut waiting = episode(&remote);
    waiting.reset().unwrap();
    until("a pong", || server.seen.pongs.load(Ordering::SeqCst) == 1);
    assert!(say(&mut waiting, "x").unwrap().done);
    assert_eq!(server.connections(), 1);
}

#[test]
fn an_environment_that_says_nothing_needs_a_prompt() {
    let server = Fake::of_text(|_, _| Act::Say(observed("", None, false)));
    let remote = server.remote();
    let reason = with_causes(&episode(&remote).reset().unwrap_err());
    assert!(
        reason.contains("opens with nothing to say; give `task.path`"),
        "{reason}"
    );
    let opening = Opening {
        messages: vec![Message::user("Go.")],
        arguments: Map::new(),
    };
    let mut given = remote.episode(Arc::new(opening), Arc::new(settings()));
    assert_eq!(given.reset().unwrap(), [Message::user("Go.")]);
}

/// A server over TLS that asks for a certificate: who shows one is served, others are refused at once.
#[test]
fn connections_are_secured_and_show_a_certificate() {
    let (root, clients, folder) = (Authority::new(), Authority::new(), Folder::new());
    let files = TlsFiles {
        certificate: Some(folder.bundle("server.pem", &root.issue("127.0.0.1"))),
        key: None,
        ca: Some(folder.write("clients.pem", &clients.pem())),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let tcp = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let url = format!("https://{}", tcp.local_addr().unwrap());
    let answer = async |upgrade: WebSocketUpgrade| {
        upgrade.on_upgrade(async |mut socket| {
            while let Some(Ok(message)) = socket.recv().await {
                if let ws::Message::Text(_) = message {
                    let text = observed("Secure.", Some(1.0), true);
                    let _ = socket.send(ws::Message::Text(text.into())).await;
                }
            }
        })
    };
    let router = Router::new()
        .route("/schema", get(async || Json(text_schema())))
        .route("/ws", get(answer));
    let listener = Listener::new(tcp, Some(ServerTls::new(files).unwrap()));
    let never = std::future::pending();
    runtime.spawn(crate::http::serve(listener, router, never, Duration::ZERO));

    let shown = folder.bundle("trainer.pem", &clients.issue("trainer"));
    let config = |certificate| RemoteConfig {
        tls: TlsFiles {
            certificate,
            ..folder.trusting(&root)
        },
        ..RemoteConfig::new(&url)
    };
    let remote = Remote::connect(config(Some(shown))).unwrap();
    let mut secured = episode(&remote);
    assert_eq!(secured.reset().unwrap(), [Message::user("Secure.")]);
    assert_eq!(say(&mut secured, "x").unwrap().reward, Some(1.0));

    let begun = Instant::now();
    for (config, expected) in [
        (config(None), "CertificateRequired"),
        (RemoteConfig::new(&url), "UnknownIssuer"),
    ] {
        let reason = with_causes(&Remote::connect(config).unwrap_err());
        assert!(
            reason.contains(expected) && reason.contains("`env.tls`"),
            "{reason}"
        );
    }
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "it was not tried again"
    );
    for (url, ca, expected) in [
        (&*url, folder.write("empty.pem", ""), "holds no certificate"),
        (
            "http://x",
            folder.path("clients.pem"),
            "`env.tls` is for addresses",
        ),
    ] {
        let config = RemoteConfig {
            tls: TlsFiles {
                ca: Some(ca),
                ..TlsFiles::default()
            },
            ..RemoteConfig::new(url)
        };
        let reason = with_causes(&Remote::connect(config).unwrap_err());
        assert!(reason.contains(expected), "{reason}");
    }
}

#[test]
fn addresses_and_headers_are_checked_before_anything_is_sent() {
    let refused = |config: RemoteConfig| Remote::connect(config).unwrap_err().to_string();
    for (url, expected) in [
        ("127.0.0.1:8000", "does not begin with"),
        ("ftp://x", "does not begin with"),
        ("http://me:secret@x", "with a user in it"),
        ("me:secret@x:8000", "does not begin with"),
        ("http://x/?a=b", "with a query"),
    ] {
        let reason = refused(RemoteConfig::new(url));
        assert!(reason.contains(expected), "{url}: {reason}");
        assert!(!reason.contains("secret"), "{reason}");
    }
    for (name, value, expected) in [
        ("a b", "x", "no name of a header"),
        ("a", "{slot", "nothing closes"),
        (
            "a",
            "{WARDIAN_NO_SUCH_VARIABLE}",
            "is no environment variable; set it",
        ),
        ("a", "x\ny", "a value that no header can have"),
    ] {
        let headers = [(name.to_owned(), value.to_owned())].into();
        let reason = refused(RemoteConfig {
            headers,
            ..RemoteConfig::new("http://127.0.0.1:1")
        });
        assert!(reason.contains(expected), "{reason}");
    }
}
