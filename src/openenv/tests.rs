//! The server on a real socket, against the recorded transcripts of OpenEnv's own, and its faults.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::LazyLock;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::{self, Message};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use super::*;
use crate::sandbox::RuntimeOptions;

static RUNTIME: LazyLock<WasmRuntime> = LazyLock::new(|| {
    WasmRuntime::load(&RuntimeOptions::default(), |_| {}).expect("the guest loads")
});

/// Waits that no machine is too slow for.
const PATIENCE: Duration = Duration::from_secs(60);

struct TestServer {
    address: SocketAddr,
    app: Arc<App>,
    stop: Option<oneshot::Sender<()>>,
    served: tokio::task::JoinHandle<()>,
}

impl TestServer {
    async fn start(environment: Environment, config: ServerConfig) -> Self {
        Self::start_with_grace(environment, config, PATIENCE).await
    }

    async fn start_with_grace(
        environment: Environment,
        config: ServerConfig,
        grace: Duration,
    ) -> Self {
        let server = Server::new(environment, config).unwrap();
        let app = Arc::clone(&server.app);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let shutdown = async {
            let _ = stopped.await;
        };
        let served = tokio::spawn(server.serve(listener, shutdown, grace));
        Self {
            address,
            app,
            stop: Some(stop),
            served,
        }
    }

    async fn coding() -> Self {
        Self::start(
            Environment::CodingEnv {
                runtime: RUNTIME.clone(),
                limits: Limits::default(),
            },
            ServerConfig::default(),
        )
        .await
    }

    async fn python(config: ServerConfig) -> Self {
        Self::python_with(Limits::default(), config).await
    }

    async fn python_with(limits: Limits, config: ServerConfig) -> Self {
        let runtime = RUNTIME.clone();
        Self::start(Environment::Python { runtime, limits }, config).await
    }

    async fn connect(&self) -> Socket {
        self.connect_to("/ws").await
    }

    async fn connect_to(&self, path: &str) -> Socket {
        let url = format!("ws://{}{path}", self.address);
        let (socket, _) = connect_async(url).await.unwrap();
        Socket(socket)
    }

    /// Sends a request; returns the status, the head and the body.
    async fn ask(&self, method: &str, path: &str, body: &str, head: &str) -> (u16, String, Value) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\n{head}\r\n{body}"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let body = serde_json::from_str(body).unwrap_or_else(|_| json!(body));
        (status, head.to_owned(), body)
    }

    async fn rpc(&self, method: &str, params: Value) -> Value {
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        let (status, _, answer) = self.ask("POST", "/mcp", &body.to_string(), "").await;
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// Returns a socket whose step runs for long, the only one that does, and its session's id.
    async fn busy(&self) -> (Socket, String) {
        let mut busy = self.connect().await;
        let id = busy.reset().await["data"]["observation"]["metadata"]["session_id"]
            .as_str()
            .unwrap()
            .to_owned();
        let code = "while True: pass";
        busy.send(json!({"type": "step", "data": {"code": code}}).to_string())
            .await;
        self.until("the step runs", |app| app.steps.load().demoted == 1)
            .await;
        (busy, id)
    }

    /// Waits until `holds`.
    async fn until(&self, what: &str, holds: impl Fn(&App) -> bool) {
        let started = Instant::now();
        while !holds(&self.app) {
            assert!(started.elapsed() < PATIENCE, "waiting until {what}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

struct Socket(WebSocketStream<MaybeTlsStream<TcpStream>>);

impl Socket {
    async fn send(&mut self, text: impl Into<String>) {
        self.send_message(Message::Text(text.into().into())).await;
    }

    async fn send_message(&mut self, message: Message) {
        use futures_util::SinkExt as _;
        self.0.send(message).await.unwrap();
    }

    /// Returns the next text, or the code of the close.
    async fn receive(&mut self) -> Result<String, Option<u16>> {
        use futures_util::StreamExt as _;
        loop {
            let message = tokio::time::timeout(PATIENCE, self.0.next())
                .await
                .expect("an answer in time");
            return match message {
                Some(Ok(Message::Text(text))) => Ok(text.to_string()),
                Some(Ok(Message::Close(frame))) => Err(frame.map(|frame| frame.code.into())),
                Some(Ok(_)) => continue,
                Some(Err(_)) | None => Err(None),
            };
        }
    }

    async fn call(&mut self, message: Value) -> Value {
        self.send(message.to_string()).await;
        let text = self.receive().await.expect("an answer");
        serde_json::from_str(&text).unwrap()
    }

    async fn reset(&mut self) -> Value {
        self.call(json!({"type": "reset"})).await
    }

    async fn step(&mut self, code: &str) -> Value {
        self.call(json!({"type": "step", "data": {"code": code}}))
            .await
    }

    async fn stdout(&mut self, code: &str) -> String {
        let answer = self.step(code).await;
        let stdout = answer["data"]["observation"]["stdout"].as_str();
        stdout.unwrap_or_else(|| panic!("{answer}")).to_owned()
    }
}

/// Returns a recorded transcript.
fn golden(name: &str) -> Value {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/openenv");
    let text = fs_err::read_to_string(folder.join(name)).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Replaces what differs between runs: ids, the text of tracebacks.
fn masked(value: &Value) -> Value {
    match value {
        Value::Object(fields) => Value::Object(
            fields
                .iter()
                .map(|(name, value)| {
                    let value = match (name.as_str(), value.as_str()) {
                        ("stderr", Some(text)) => json!(!text.is_empty()),
                        ("episode_id" | "session_id", Some(_)) => json!("id"),
                        _ => masked(value),
                    };
                    (name.clone(), value)
                })
                .collect(),
        ),
        Value::Array(items) => items.iter().map(masked).collect(),
        other => other.clone(),
    }
}

/// The order of fields is a part of a frame.
fn masked_text(text: &str) -> String {
    masked(&serde_json::from_str(text).unwrap()).to_string()
}

async fn replay_frames(server: &TestServer, name: &str) {
    let transcript = golden(name);
    let mut socket = server.connect().await;
    let mut exchanges = 0;
    for frame in transcript["frames"].as_array().unwrap() {
        let text = frame["text"].as_str();
        match frame["dir"].as_str().unwrap() {
            "connect" => {}
            "reconnect" => socket = server.connect().await,
            "client->server" => match (text, frame["binary_utf8"].as_str()) {
                // The server may have closed already, which the next frame is about.
                (Some(text), _) => {
                    use futures_util::SinkExt as _;
                    let _ = socket.0.send(Message::Text(text.to_owned().into())).await;
                }
                (None, binary) => {
                    let bytes = binary.unwrap().as_bytes().to_vec();
                    socket.send_message(Message::Binary(bytes.into())).await;
                }
            },
            "server->client" => {
                let received = socket.receive().await.expect("a frame");
                assert_eq!(masked_text(&received), masked_text(text.unwrap()), "{name}");
                exchanges += 1;
            }
            "server-close" | "closed" => {
                assert_eq!(socket.receive().await, Err(Some(1000)), "{name}");
            }
            other => panic!("{other}"),
        }
    }
    assert!(exchanges > 0, "{name} has frames");
}

#[tokio::test]
async fn frames_are_those_of_the_original() {
    let server = TestServer::coding().await;
    for name in [
        "ws_errors.json",
        "ws_generic_client_session.json",
        "ws_reset_kwargs.json",
        "ws_binary_frame.json",
    ] {
        replay_frames(&server, name).await;
    }
}

#[tokio::test]
async fn routes_answer_as_the_original_does() {
    let server = TestServer::coding().await;
    let transcript = golden("http_routes.json");
    for exchange in transcript["exchanges"].as_array().unwrap() {
        let request = &exchange["request"];
        let body = match &request["body"] {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let (method, path) = (&request["method"], &request["path"]);
        let (status, _, answer) = server
            .ask(method.as_str().unwrap(), path.as_str().unwrap(), &body, "")
            .await;
        let expected = &exchange["response"];
        assert_eq!(json!(status), expected["status"], "{request}: {answer}");
        assert_eq!(masked(&answer), masked(&expected["body"]), "{request}");
    }
}

#[tokio::test]
async fn openapi_names_the_paths_of_the_original() {
    let server = TestServer::coding().await;
    let (_, _, document) = server.ask("GET", "/openapi.json", "", "").await;
    let methods = |value: &Value| -> Value { value.as_object().unwrap().keys().cloned().collect() };
    let expected = golden("openapi_paths.json")["paths"].clone();
    for (path, expected) in expected.as_object().unwrap() {
        assert_eq!(methods(&document["paths"][path]), *expected, "{path}");
    }
    assert_eq!(methods(&document["paths"]), methods(&expected));
}

#[tokio::test]
async fn coding_env_behaves_like_the_original_where_it_can() {
    let server = TestServer::coding().await;
    let mut socket = server.connect().await;
    socket.reset().await;
    let mut same = 0;
    // What CPython can do and smolagents cannot, or shows with another name or address.
    let differs = |code: &str| {
        [
            "global_v",
            "async def",
            "match ",
            "lambda x",
            "type(datetime",
        ]
        .iter()
        .any(|start| code.contains(start))
            || code.starts_with("while True")
    };
    for case in golden("coding_env_semantics.json")["cases"]
        .as_array()
        .unwrap()
    {
        let code = case["code"].as_str().unwrap();
        if differs(code) {
            continue;
        }
        let answer = socket.step(code).await;
        let observation = &answer["data"]["observation"];
        assert_eq!(
            observation["exit_code"], case["exit_code"],
            "{code}: {answer}"
        );
        assert_eq!(answer["data"]["reward"], case["reward"], "{code}");
        let stdout = observation["stdout"].as_str().unwrap();
        match case["stdout"].as_str().unwrap().split_once("...[") {
            None => assert_eq!(stdout, case["stdout"], "{code}"),
            Some((head, tail)) => {
                let count: usize = tail.split_once(' ').unwrap().0.parse().unwrap();
                assert!(stdout.starts_with(head), "{code}");
                assert_eq!(stdout.len(), count, "{code}");
            }
        }
        same += 1;
    }
    assert!(same >= 40, "{same} cases");
}

#[tokio::test]
async fn a_full_server_says_so_and_goes_on() {
    let config = ServerConfig {
        max_sessions: 1,
        ..ServerConfig::default()
    };
    let server = TestServer::python(config).await;
    let mut first = server.connect().await;
    first.reset().await;
    let expected = golden("ws_capacity.json");
    let mut second = server.connect().await;
    assert_eq!(
        second.receive().await.unwrap(),
        expected["frames"][1]["text"].as_str().unwrap()
    );
    assert_eq!(second.receive().await, Err(Some(1000)));
    let mut third = server.connect_to("/mcp").await;
    assert_eq!(
        third.receive().await.unwrap(),
        expected["mcp_ws_frames"][0]["text"].as_str().unwrap()
    );
    let (_, _, answer) = server
        .ask(
            "POST",
            "/mcp",
            r#"{"jsonrpc":"2.0","id":9,"method":"openenv/session/create","params":{}}"#,
            "",
        )
        .await;
    assert_eq!(
        answer,
        expected["mcp_http_session_create"]["response"]["body"]
    );
    assert_eq!(server.ask("GET", "/ready", "", "").await.0, 503);
    // What has a session for one request alone, has none to spare either.
    let act = json!({"action": {"code": "print(1)"}}).to_string();
    for (path, body) in [("/reset", "{}"), ("/step", act.as_str())] {
        let (status, _, answer) = server.ask("POST", path, body, "").await;
        assert_eq!(status, 503, "{path}: {answer}");
        let message = answer["detail"].as_str().unwrap();
        assert!(message.contains("1/1"), "{path}: {message}");
    }
    // The one inside is unharmed, and its slot is free once it goes.
    assert_eq!(first.stdout("print(1)").await, "1\n");
    drop(first);
    server
        .until("the slot is free", |app| app.sessions.active() == 0)
        .await;
    assert_eq!(server.ask("POST", "/step", &act, "").await.0, 200);
    assert_eq!(server.app.sessions.active(), 0);
    server.connect().await.reset().await;
}

#[tokio::test]
async fn a_session_outlives_its_socket_where_it_was_made_to() {
    let server = TestServer::python(ServerConfig::default()).await;
    let created = server.rpc("openenv/session/create", json!({})).await;
    let id = created["result"]["session_id"].as_str().unwrap().to_owned();
    let path = format!("/ws?session_id={id}");
    let mut socket = server.connect_to(&path).await;
    socket.reset().await;
    socket.stdout("z = 7").await;
    let mut other = server.connect_to(&path).await;
    let text = other.receive().await.unwrap();
    assert!(text.contains("already has an attached WebSocket"), "{text}");
    assert_eq!(other.receive().await, Err(Some(1000)));
    socket.send(r#"{"type":"close"}"#).await;
    assert_eq!(socket.receive().await, Err(Some(1000)));
    let mut again = server.connect_to(&path).await;
    assert_eq!(again.stdout("print(z)").await, "7\n");
    let closing = server
        .rpc("openenv/session/close", json!({"session_id": id}))
        .await;
    assert_eq!(
        closing["result"],
        json!({"session_id": id, "closed": false, "closing": true})
    );
    drop(again);
    server
        .until("it is gone", |app| app.sessions.active() == 0)
        .await;
    let mut late = server.connect_to(&path).await;
    let text = late.receive().await.unwrap();
    assert!(text.contains("Unknown session_id"), "{text}");
}

#[tokio::test]
async fn forks_go_on_by_themselves() {
    let server = TestServer::python(ServerConfig::default()).await;
    let mut socket = server.connect().await;
    socket.reset().await;
    socket.stdout("x = [1]").await;
    let fork = json!({"jsonrpc": "2.0", "id": 1, "method": "wardian/fork", "params": {"count": 2}});
    let answer = socket.call(json!({"type": "mcp", "data": fork})).await;
    let ids = answer["data"]["result"]["session_ids"].clone();
    assert_eq!(ids.as_array().map(Vec::len), Some(2), "{answer}");
    let own = json!({"jsonrpc": "2.0", "id": 2, "method": "openenv/session/create"});
    let own = socket.call(json!({"type": "mcp", "data": own})).await;
    let own = own["data"]["result"]["session_id"]
        .as_str()
        .unwrap()
        .to_owned();
    let (status, _, more) = server
        .ask("POST", &format!("/sessions/{own}/fork?count=1"), "", "")
        .await;
    assert_eq!(status, 200, "{more}");
    socket.stdout("x.append('parent')").await;
    for (number, id) in [&ids[0], &ids[1], &more["session_ids"][0]]
        .iter()
        .enumerate()
    {
        let path = format!("/ws?session_id={}", id.as_str().unwrap());
        let mut fork = server.connect_to(&path).await;
        let code = format!("x.append({number}); print(x)");
        assert_eq!(fork.stdout(&code).await, format!("[1, {number}]\n"));
    }
    for count in ["0", "257"] {
        let path = format!("/sessions/{own}/fork?count={count}");
        assert_eq!(server.ask("POST", &path, "", "").await.0, 400, "{count}");
    }
}

#[tokio::test]
async fn lost_state_is_said_and_never_made_up() {
    let limits = Limits {
        fuel: 2_000_000_000,
        ..Limits::default()
    };
    let server = TestServer::python_with(limits, ServerConfig::default()).await;
    let mut socket = server.connect().await;
    let early = socket.step("print(1)").await;
    assert_eq!(early["data"]["code"], "EXECUTION_ERROR", "{early}");
    let message = early["data"]["message"].as_str().unwrap();
    assert!(message.contains("no episode"), "{message}");
    socket.reset().await;
    let over = socket.step("x = 1\nwhile True: pass").await;
    let observation = &over["data"]["observation"];
    assert_eq!(observation["exit_code"], 137, "{over}");
    assert_eq!(observation["metadata"]["exit"]["kind"], "out_of_fuel");
    assert_eq!(observation["metadata"]["state_lost"], true);
    let lost = socket.step("print(x)").await;
    assert_eq!(lost["data"]["code"], "EXECUTION_ERROR", "{lost}");
    let message = lost["data"]["message"].as_str().unwrap();
    assert!(message.contains("state was lost"), "{message}");
    assert!(message.contains("out of fuel"), "{message}");
    socket.reset().await;
    assert_eq!(socket.stdout("print(2)").await, "2\n");
}

#[tokio::test]
async fn a_step_ends_at_its_own_deadline() {
    let limits = Limits {
        fuel: 1 << 50,
        deadline: Duration::from_secs(3600),
        ..Limits::default()
    };
    let server = TestServer::python_with(limits, ServerConfig::default()).await;
    let body = r#"{"action": {"code": "while True: pass"}, "timeout_s": 0.2}"#;
    let (status, _, answer) = server.ask("POST", "/step", body, "").await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["observation"]["exit_code"], 124, "{answer}");
    assert_eq!(answer["metadata"]["exit"]["kind"], "deadline_exceeded");
}

#[tokio::test]
async fn who_goes_away_takes_the_step_along() {
    let limits = Limits {
        fuel: 1 << 50,
        deadline: Duration::from_secs(3600),
        ..Limits::default()
    };
    let config = ServerConfig {
        max_sessions: 1,
        ..ServerConfig::default()
    };
    let server = TestServer::python_with(limits, config).await;
    let mut socket = server.connect().await;
    socket.reset().await;
    socket
        .send(r#"{"type":"step","data":{"code":"while True: pass"}}"#)
        .await;
    // The step runs for an hour unless it is ended.
    server
        .until("the step has been demoted", |app| {
            app.steps.load().demoted == 1
        })
        .await;
    drop(socket);
    server
        .until("the slot is free", |app| app.sessions.active() == 0)
        .await;
    server
        .until("the step has ended", |app| app.steps.load().demoted == 0)
        .await;
    let mut next = server.connect().await;
    next.reset().await;
    assert_eq!(next.stdout("print('free')").await, "free\n");
}

#[tokio::test]
async fn idle_sessions_rest_and_go_on() {
    let config = ServerConfig {
        park_after: Duration::ZERO,
        ..ServerConfig::default()
    };
    let server = TestServer::python(config).await;
    let mut socket = server.connect().await;
    socket.reset().await;
    socket
        .stdout("import random; random.seed(3); x = [1, 2]")
        .await;
    server
        .until("it is put to rest", |app| {
            app.metrics
                .render(0, 0, Default::default())
                .contains("openenv_parked_total 1\n")
        })
        .await;
    assert_eq!(socket.stdout("print(x)").await, "[1, 2]\n");
}

#[tokio::test]
async fn more_sessions_than_interpreters_take_turns() {
    let options = RuntimeOptions {
        max_instances: 2,
        ..RuntimeOptions::default()
    };
    let runtime = WasmRuntime::load(&options, |_| {}).unwrap();
    let limits = Limits::default();
    let server = TestServer::start(
        Environment::Python { runtime, limits },
        ServerConfig::default(),
    )
    .await;
    let mut sockets = Vec::new();
    for number in 0..5 {
        let mut socket = server.connect().await;
        socket.reset().await;
        socket.stdout(&format!("x = {number}")).await;
        sockets.push(socket);
    }
    for (number, socket) in sockets.iter_mut().enumerate() {
        assert_eq!(socket.stdout("print(x)").await, format!("{number}\n"));
    }
}

#[tokio::test]
async fn bad_frames_harm_nobody_else() {
    let config = ServerConfig {
        max_message_bytes: 4096,
        ..ServerConfig::default()
    };
    let server = TestServer::python(config).await;
    let mut witness = server.connect().await;
    witness.reset().await;
    witness.stdout("x = 'unharmed'").await;

    let mut large = server.connect().await;
    large.send("x".repeat(5000)).await;
    assert_eq!(large.receive().await, Err(Some(1009)));

    let mut deep = server.connect().await;
    let text = "[".repeat(4000);
    deep.send(text).await;
    let answer = deep.receive().await.unwrap();
    assert!(answer.contains("INVALID_JSON"), "{answer}");

    // A socket that claims a frame and never sends it, and one that is not masked as it must be.
    for bytes in [
        &[0x81, 0xfe, 0x0f, 0xff, 1, 2, 3, 4][..],
        &[0x81, 0x02, b'{', b'}'][..],
    ] {
        let mut raw = TcpStream::connect(server.address).await.unwrap();
        let handshake = "GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
            Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
        raw.write_all(handshake.as_bytes()).await.unwrap();
        let mut head = [0; 12];
        raw.read_exact(&mut head).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 101");
        raw.write_all(bytes).await.unwrap();
        drop(raw);
    }
    for _ in 0..200 {
        drop(TcpStream::connect(server.address).await.unwrap());
        drop(server.connect().await);
    }
    drop((large, deep));
    server
        .until("their slots are free", |app| app.sessions.active() == 1)
        .await;
    assert_eq!(witness.stdout("print(x)").await, "unharmed\n");
}

#[tokio::test]
async fn frames_that_arrive_early_are_answered_in_order() {
    let server = TestServer::python(ServerConfig::default()).await;
    let mut socket = server.connect().await;
    socket.reset().await;
    for number in 0..40 {
        let code = format!("print({number})");
        socket
            .send(json!({"type": "step", "data": {"code": code}}).to_string())
            .await;
    }
    for number in 0..40 {
        let text = socket.receive().await.unwrap();
        assert!(text.contains(&format!("\"{number}\\n\"")), "{text}");
    }
}

#[tokio::test]
async fn a_token_is_asked_for_and_requests_have_names() {
    let config = ServerConfig {
        api_key: Some(ApiKey::new("secret")),
        ..ServerConfig::default()
    };
    let server = TestServer::python(config).await;
    assert_eq!(server.ask("GET", "/health", "", "").await.0, 200);
    assert_eq!(server.ask("GET", "/schema", "", "").await.0, 401);
    let url = format!("ws://{}/ws", server.address);
    let refused = connect_async(url).await.map(drop);
    let Err(tungstenite::Error::Http(response)) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(response.status(), 401);
    let key = "Authorization: Bearer secret\r\nX-Request-Id: mine\r\n";
    let (status, head, _) = server.ask("GET", "/schema", "", key).await;
    assert_eq!(status, 200);
    assert!(head.contains("x-request-id: mine"), "{head}");
    let (_, _, metrics) = server.ask("GET", "/metrics", "", "").await;
    let metrics = metrics.as_str().unwrap();
    let line = "http_requests_total{endpoint=\"/schema\",status=\"401\"} 1";
    assert!(metrics.contains(line), "{metrics}");
}

#[tokio::test]
async fn production_has_no_routes_of_control() {
    let config = ServerConfig {
        mode: Mode::Production,
        ..ServerConfig::default()
    };
    let server = TestServer::python(config).await;
    let transcript = golden("production_mode.json");
    for exchange in transcript["http"].as_array().unwrap() {
        let (request, expected) = (&exchange["request"], &exchange["response"]);
        let (method, path) = (&request["method"], &request["path"]);
        let (method, path) = (method.as_str().unwrap(), path.as_str().unwrap());
        let (status, _, answer) = server
            .ask(method, path, &request["body"].to_string(), "")
            .await;
        assert_eq!(json!(status), expected["status"], "{request}: {answer}");
        if status == 404 {
            assert_eq!(answer, expected["body"], "{request}");
        }
    }
    let (_, _, document) = server.ask("GET", "/openapi.json", "", "").await;
    for path in ["/reset", "/step", "/state"] {
        assert_eq!(document["paths"][path], Value::Null, "{path}");
    }
    assert_ne!(document["paths"]["/mcp"], Value::Null);
    // Sessions are as they were.
    let mut socket = server.connect().await;
    socket.reset().await;
    assert_eq!(socket.stdout("print(6 * 7)").await, "42\n");
    let state = socket.call(json!({"type": "state"})).await;
    assert_eq!(state["data"]["step_count"], 1, "{state}");
}

#[tokio::test]
async fn who_asks_too_often_is_told_when_to_come_back() {
    let config = ServerConfig {
        api_key: Some(ApiKey::new("secret")),
        rate_limit: Some("3/h".parse().unwrap()),
        ..ServerConfig::default()
    };
    let server = TestServer::python(config).await;
    let url = format!("ws://{}/ws", server.address);
    let connect = async |key: &str| {
        let mut request = url.as_str().into_client_request().unwrap();
        let value = format!("Bearer {key}").parse().unwrap();
        request.headers_mut().insert("authorization", value);
        let socket = connect_async(request).await;
        socket.map(|(socket, _)| Socket(socket))
    };
    // Keys that are made up are of one client, the address.
    for number in 0..5 {
        let key = format!("Authorization: Bearer {number}\r\n");
        let (status, head, _) = server.ask("GET", "/schema", "", &key).await;
        assert_eq!(status, if number < 3 { 401 } else { 429 }, "{head}");
        assert_eq!(head.contains("retry-after: 1"), number >= 3, "{head}");
    }
    // The good one is another.
    let mut sockets = Vec::new();
    for _ in 0..3 {
        sockets.push(connect("secret").await.unwrap());
    }
    for key in ["secret", "other"] {
        let Err(tungstenite::Error::Http(refused)) = connect(key).await.map(drop) else {
            panic!("a socket was opened")
        };
        assert_eq!(refused.status(), 429);
        let wait = refused.headers()["retry-after"].to_str().unwrap();
        let wait: u64 = wait.parse().unwrap();
        assert!((1000..=1200).contains(&wait), "{wait}");
    }
    // What is said on a socket does not count.
    let socket = &mut sockets[0];
    socket.reset().await;
    for _ in 0..5 {
        assert_eq!(socket.stdout("print(1)").await, "1\n");
    }
    for _ in 0..5 {
        assert_eq!(server.ask("GET", "/health", "", "").await.0, 200);
    }
    let (_, _, metrics) = server.ask("GET", "/metrics", "", "").await;
    let metrics = metrics.as_str().unwrap();
    assert!(metrics.contains("http_rate_limited_total 4\n"), "{metrics}");
}

#[tokio::test]
async fn a_stop_lets_the_step_under_way_finish() {
    let mut server = TestServer::python(ServerConfig::default()).await;
    let mut idle = server.connect().await;
    idle.reset().await;
    let mut busy = server.connect().await;
    busy.reset().await;
    let code = "n = 0\nwhile n < 3_000_000: n += 1\nprint(n)";
    busy.send(json!({"type": "step", "data": {"code": code}}).to_string())
        .await;
    server
        .until("the step runs", |app| app.steps.load().demoted == 1)
        .await;
    server.stop.take().unwrap().send(()).unwrap();
    assert_eq!(idle.receive().await, Err(Some(1001)));
    // What runs the server ends with it, and all that is left of the step.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(server.app.steps.load().demoted, 1, "the step still runs");
    assert!(!server.served.is_finished(), "the server waits for it");
    let text = busy.receive().await.expect("the step's observation");
    assert!(text.contains("3000000"), "{text}");
    assert_eq!(busy.receive().await, Err(Some(1001)));
    drop((idle, busy));
    server.served.await.unwrap();
}

#[tokio::test]
async fn a_stop_waits_no_longer_than_it_may() {
    let mut server = TestServer::start_with_grace(
        Environment::Python {
            runtime: RUNTIME.clone(),
            limits: Limits::default(),
        },
        ServerConfig::default(),
        Duration::from_millis(50),
    )
    .await;
    let (_busy, _) = server.busy().await;
    server.stop.take().unwrap().send(()).unwrap();
    tokio::time::timeout(PATIENCE, server.served)
        .await
        .expect("the server ends")
        .unwrap();
}

#[tokio::test]
async fn requests_that_wait_for_one_session_take_no_thread() {
    let server = TestServer::python(ServerConfig {
        threads: 1,
        max_running: 2,
        ..ServerConfig::default()
    })
    .await;
    let (_busy, id) = server.busy().await;
    let path = format!("/sessions/{id}/fork");
    let mut waiting = Vec::new();
    for _ in 0..8 {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        let request = format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        waiting.push(stream);
    }
    let session = server.app.sessions.get(&id).unwrap();
    // Each request has its share of the session, as the entry, this test and the step have theirs.
    server
        .until("the forks wait", |_| Arc::strong_count(&session) >= 8 + 3)
        .await;
    let mut other = server.connect().await;
    other.reset().await;
    assert_eq!(other.stdout("print(1)").await, "1\n");
    let load = server.app.steps.load();
    assert_eq!((load.waiting, load.demoted), (0, 1));
}

#[tokio::test]
async fn copies_without_room_are_refused_before_they_are_made() {
    let server = TestServer::python(ServerConfig {
        max_sessions: 2,
        ..ServerConfig::default()
    })
    .await;
    let (_busy, id) = server.busy().await;
    let path = format!("/sessions/{id}/fork?count=2");
    let (status, _, answer) = server.ask("POST", &path, "", "").await;
    assert_eq!(status, 503, "{answer}");
    assert_eq!(server.app.steps.load().demoted, 1, "the step still runs");
}

mod with_tasks {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::grader::{DEFAULT_GRADER, GradeLimits, GraderRegistry, RewardTerms};
    use crate::sandbox::{Dialogue, DialogueOutcome, ExecOutcome, ExecRequest};
    use crate::task::TaskOptions;

    async fn server() -> TestServer {
        server_on(Arc::new(RUNTIME.clone())).await
    }

    async fn server_on(sandbox: Arc<dyn Sandbox>) -> TestServer {
        let tasks = [("one", 1), ("two", 2)].map(|(id, number)| {
            let tests = [format!("assert f() == {number}")];
            let prompt = format!("Write f that returns {number}.");
            json!({
                "grader": DEFAULT_GRADER, "task_id": id, "prompt": prompt, "tests": tests,
                "entry_points": ["f"],
            })
            .to_string()
        });
        serve_tasks(sandbox, &tasks).await
    }

    async fn serve_tasks(sandbox: Arc<dyn Sandbox>, tasks: &[String]) -> TestServer {
        let file = tempfile::Builder::new()
            .suffix(".jsonl")
            .tempfile()
            .unwrap();
        fs_err::write(file.path(), tasks.join("\n")).unwrap();
        let tasks = TaskSet::open_with(file.path(), &TaskOptions::default()).unwrap();
        let graders = GraderRegistry::standard(&sandbox, &GradeLimits::default());
        let environment = Environment::Tasks {
            name: "numbers".to_owned(),
            tasks,
            sandbox,
            grader: Arc::new(graders),
            config: Arc::new(ToolEnvironmentConfig {
                system_prompt: None,
                offers_tools: true,
                max_turns: 4,
                max_output_chars: 1000,
                limits: Limits::default(),
                reward: RewardTerms::default(),
                grade_fuel: Limits::default().fuel,
            }),
        };
        TestServer::start(environment, ServerConfig::default()).await
    }

    #[tokio::test]
    async fn each_task_has_its_own_tool_to_submit_with() {
        let code = json!({
            "grader": DEFAULT_GRADER, "task_id": "one", "prompt": "Write f that returns 1.",
            "tests": ["assert f() == 1"], "entry_points": ["f"],
        });
        let answer = json!({
            "grader": "numeric", "task_id": "three", "prompt": "What is 1 + 2?", "answer": 3,
        });
        let tasks = [code.to_string(), answer.to_string()];
        let server = serve_tasks(Arc::new(RUNTIME.clone()), &tasks).await;
        let mut socket = server.connect().await;
        let names = |tools: &Value| -> Vec<String> {
            let names = tools.as_array().unwrap().iter().map(|tool| &tool["name"]);
            names
                .map(|name| name.as_str().unwrap().to_owned())
                .collect()
        };
        let all = ["run_python", "submit_solution", "submit_answer"];
        let listed = server.rpc("tools/list", json!({})).await;
        assert_eq!(names(&listed["result"]["tools"]), all);
        let list = json!({"type": "step", "data": {"type": "list_tools"}});
        for (task, tool, argument) in [
            ("three", "submit_answer", json!({"answer": "3"})),
            (
                "one",
                "submit_solution",
                json!({"code": "def f(): return 1"}),
            ),
        ] {
            let reset = json!({"type": "reset", "data": {"task_id": task}});
            let begun = socket.call(reset).await;
            let id = &begun["data"]["observation"]["metadata"]["session_id"];
            let tools = socket.call(list.clone()).await;
            let own = ["run_python", tool];
            assert_eq!(names(&tools["data"]["observation"]["tools"]), own);
            let listed = server.rpc("tools/list", json!({"session_id": id})).await;
            assert_eq!(names(&listed["result"]["tools"]), own, "{listed}");
            let end = socket.call(call(tool, argument)).await;
            assert_eq!(end["data"]["reward"], 1.0, "{end}");
        }
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments are made for the call"
    )]
    fn call(tool: &str, arguments: Value) -> Value {
        json!({"type": "step", "data": {
            "type": "call_tool", "tool_name": tool, "arguments": arguments,
        }})
    }

    #[tokio::test]
    async fn a_submission_ends_the_episode_with_its_reward() {
        let server = server().await;
        let mut socket = server.connect().await;
        for (code, reward) in [("def f(): return 2", 1.0), ("def f(): return 3", 0.0)] {
            let reset = json!({"type": "reset", "data": {"task_id": "two"}});
            let begun = socket.call(reset).await;
            let instruction = begun["data"]["observation"]["instruction"]
                .as_str()
                .unwrap();
            assert!(instruction.contains("returns 2"), "{instruction}");
            let tools = json!({"type": "step", "data": {"type": "list_tools"}});
            let tools = socket.call(tools).await;
            let names = &tools["data"]["observation"]["tools"];
            assert_eq!(names[1]["name"], "submit_solution", "{tools}");
            let draft = call("run_python", json!({"code": "print(6 * 7)"}));
            let draft = socket.call(draft).await;
            assert_eq!(
                draft["data"]["observation"]["result"]["data"], "42",
                "{draft}"
            );
            assert_eq!(draft["data"]["done"], false);
            let unknown = socket.call(call("nope", json!({}))).await;
            let error = &unknown["data"]["observation"]["error"];
            assert_eq!(error["error_type"], "tool_not_found", "{unknown}");
            let bad = socket.call(call("run_python", json!({"code": 1}))).await;
            let error = &bad["data"]["observation"]["error"];
            assert_eq!(error["error_type"], "invalid_args", "{bad}");
            let end = socket
                .call(call("submit_solution", json!({"code": code})))
                .await;
            assert_eq!(end["data"]["reward"], reward, "{end}");
            assert_eq!(end["data"]["done"], true);
            let late = socket.call(call("run_python", json!({"code": ""}))).await;
            assert_eq!(late["data"]["code"], "EXECUTION_ERROR", "{late}");
        }
    }

    /// Has no interpreter to give as long as it is told so.
    #[derive(Debug)]
    struct Exhausted(AtomicBool);

    impl Sandbox for Exhausted {
        fn exec_cancellable(
            &self,
            request: &ExecRequest,
            limits: &Limits,
            cancel: &Cancel,
        ) -> Result<ExecOutcome, SandboxError> {
            if self.0.load(Ordering::SeqCst) {
                return Err(SandboxError::PoolExhausted { limit: 1 });
            }
            RUNTIME.exec_cancellable(request, limits, cancel)
        }

        fn session(&self, limits: &Limits) -> Result<crate::sandbox::Session, SandboxError> {
            RUNTIME.session(limits)
        }

        fn converse(&self, dialogue: &Dialogue) -> Result<DialogueOutcome, SandboxError> {
            RUNTIME.converse(dialogue)
        }
    }

    #[tokio::test]
    async fn episodes_are_of_any_task_unless_one_is_asked_for() {
        let server = server().await;
        let mut socket = server.connect().await;
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..64 {
            let begun = socket.reset().await;
            seen.insert(begun["data"]["observation"]["task_id"].to_string());
        }
        assert_eq!(seen.len(), 2, "one of two tasks in 64 episodes: {seen:?}");
        let of_seed = async |socket: &mut Socket| {
            let reset = json!({"type": "reset", "data": {"seed": 7}});
            socket.call(reset).await["data"]["observation"]["task_id"].clone()
        };
        assert_eq!(of_seed(&mut socket).await, of_seed(&mut socket).await);
        let unknown = json!({"type": "reset", "data": {"task_id": 3}});
        let refused = socket.call(unknown).await;
        let message = refused["data"]["message"].as_str().unwrap();
        assert!(message.contains("there is no task 3"), "{refused}");
    }

    #[tokio::test]
    async fn a_step_that_fails_is_no_turn_of_the_policy() {
        let sandbox = Arc::new(Exhausted(AtomicBool::new(true)));
        let server = server_on(Arc::clone(&sandbox) as Arc<dyn Sandbox>).await;
        let mut socket = server.connect().await;
        socket.reset().await;
        // More than the four turns of an episode.
        for _ in 0..6 {
            let failed = socket
                .call(call("run_python", json!({"code": "print(1)"})))
                .await;
            assert_eq!(failed["data"]["code"], "EXECUTION_ERROR", "{failed}");
        }
        sandbox.0.store(false, Ordering::SeqCst);
        for _ in 0..3 {
            let draft = socket
                .call(call("run_python", json!({"code": "print(1)"})))
                .await;
            assert_eq!(
                draft["data"]["observation"]["result"]["data"], "1",
                "{draft}"
            );
            assert_eq!(draft["data"]["done"], false, "{draft}");
        }
    }

    #[tokio::test]
    async fn the_task_routes_show_the_tasks() {
        let server = server().await;
        let ask = async |route: &str, body: Value| {
            let path = format!("/NUMBERS/{route}");
            server.ask("POST", &path, &body.to_string(), "").await
        };
        let (_, _, splits) = server.ask("GET", "/numbers/splits", "", "").await;
        assert_eq!(splits, json!([{"name": "train", "type": "train"}]));
        let of = json!({"split": "train"});
        assert_eq!(ask("num_tasks", of.clone()).await.2["num_tasks"], 2);
        let (_, _, all) = ask("tasks", of).await;
        assert_eq!(all["tasks"][1]["id"], "two", "{all}");
        assert!(!all.to_string().contains("assert f() == 1 "), "{all}");
        let (_, _, last) = ask("task_range", json!({"split": "train", "start": -1})).await;
        assert_eq!(last["tasks"], json!([all["tasks"][1]]));
        let (status, _, answer) = ask("task", json!({"split": "train", "index": 2})).await;
        assert_eq!(
            (status, &answer["detail"]),
            (400, &json!("Invalid task index"))
        );
    }

    #[tokio::test]
    async fn tools_are_called_over_mcp_in_a_session() {
        let server = server().await;
        let listed = server.rpc("tools/list", json!({})).await;
        assert_eq!(
            listed["result"]["tools"][0]["name"], "run_python",
            "{listed}"
        );
        let created = server.rpc("openenv/session/create", json!({})).await;
        let id = created["result"]["session_id"].as_str().unwrap();
        let call = json!({
            "session_id": id, "name": "run_python", "arguments": {"code": "print(1)"},
        });
        let early = server.rpc("tools/call", call.clone()).await;
        assert_eq!(early["error"]["code"], -32603, "{early}");
        let mut socket = server.connect_to(&format!("/ws?session_id={id}")).await;
        socket.reset().await;
        let called = server.rpc("tools/call", call).await;
        assert_eq!(called["result"]["data"], "1", "{called}");
    }
}
