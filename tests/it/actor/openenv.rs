//! Machines as environments of OpenEnv's protocol: `wardian sandboxd` as a process of this machine.

use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::{self, Message, WebSocket};
use wardian::actor::ActorCommand;
use wardian::actor::sandboxd::SandboxdActor;
use wardian::actor::{Actor as _, ActorSpec};

use super::sandboxd::{Machine, TOKEN, ask, authorized, sandboxd};
use super::{processes_naming, spec};

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// A session.
struct Session(WebSocket<TcpStream>);

impl Session {
    fn open(address: SocketAddr, path: &str) -> Result<Self, tungstenite::Error> {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut request = format!("ws://{address}{path}").into_client_request()?;
        let token = format!("Bearer {TOKEN}").parse().unwrap();
        request.headers_mut().insert("authorization", token);
        let opened = tungstenite::client(request, stream);
        opened
            .map(|(socket, _)| Self(socket))
            .map_err(|error| match error {
                tungstenite::HandshakeError::Failure(error) => error,
                tungstenite::HandshakeError::Interrupted(_) => panic!("the server says nothing"),
            })
    }

    fn to(machine: &Machine) -> Self {
        Self::open(machine.address, "/ws").unwrap()
    }

    fn send(&mut self, kind: &str, data: &Value) {
        let frame = json!({"type": kind, "data": data}).to_string();
        self.0.send(Message::text(frame)).unwrap();
    }

    fn hear(&mut self) -> Value {
        loop {
            if let Message::Text(text) = self.0.read().unwrap() {
                return serde_json::from_str(&text).unwrap();
            }
        }
    }

    fn ask(&mut self, kind: &str, data: &Value) -> Value {
        self.send(kind, data);
        self.hear()
    }

    fn reset(&mut self) {
        let answer = self.ask("reset", &json!({}));
        assert_eq!(answer["type"], "observation", "{answer}");
    }

    /// Runs a command; returns its observation.
    fn run(&mut self, command: &str) -> Value {
        let answer = self.ask("step", &json!({"command": command}));
        assert_eq!(answer["type"], "observation", "{answer}");
        answer["data"]["observation"].clone()
    }

    fn stdout(&mut self, command: &str) -> String {
        self.run(command)["stdout"].as_str().unwrap().to_owned()
    }
}

fn serve(workdir: &Path) -> (super::Scene<super::sandboxd::Machines>, Machine) {
    let scene = sandboxd();
    let workdir = workdir.to_string_lossy().into_owned();
    let machine = (scene.backend()).start_plain_with(&["--workdir", &workdir, "--fresh-workdir"]);
    (scene, machine)
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "waiting until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_command_is_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let (scene, machine) = serve(folder.path());
    let mut session = Session::to(&machine);
    let early = session.ask("step", &json!({"command": "true"}));
    assert!(
        early["data"]["message"]
            .to_string()
            .contains("send `reset`"),
        "{early}"
    );
    session.reset();
    let observed = session.run("echo out; echo err >&2; pwd > here; exit 3");
    assert_eq!(
        observed,
        json!({"metadata": {}, "stdout": "out\n", "stderr": "err\n", "exit_code": 3})
    );
    let workdir = folder.path().canonicalize().unwrap();
    assert_eq!(session.stdout("cat here").trim(), workdir.to_string_lossy());
    let limited = json!({"command": "echo begun; sleep 1000", "timeout_s": 0.5});
    let late = session.ask("step", &limited);
    let observed = &late["data"]["observation"];
    assert_eq!(
        (&observed["stdout"], &observed["exit_code"]),
        (&json!("begun\n"), &json!(124))
    );
    assert_eq!(
        late["data"]["metadata"]["exit"]["kind"], "deadline_exceeded",
        "{late}"
    );
    let state = session.ask("state", &json!({}));
    // `data` is not of this frame, as OpenEnv has it.
    assert_eq!(state["data"]["code"], "VALIDATION_ERROR");
    session
        .0
        .send(Message::text(json!({"type": "state"}).to_string()))
        .unwrap();
    let state = session.hear();
    assert_eq!(state["data"]["step_count"], 3, "{state}");
    assert_eq!(state["data"]["last_exit_code"], 124);
    let large = json!({"command": "head -c 1000000 /dev/zero", "max_output": 1000});
    let cut = session.ask("step", &large);
    assert_eq!(cut["data"]["metadata"]["stdout_truncated"], true);
    drop(session);
    drop(machine);
    scene.close();
}

#[test]
fn tools_run_commands_and_programs() {
    let folder = tempfile::tempdir().unwrap();
    let (scene, machine) = serve(folder.path());
    let mut session = Session::to(&machine);
    session.reset();
    let listed = session.ask("step", &json!({"type": "list_tools"}));
    let tools = listed["data"]["observation"]["tools"].as_array().unwrap();
    let names: Vec<_> = tools.iter().map(|tool| &tool["name"]).collect();
    assert_eq!(names, ["bash", "exec"]);
    let call = |tool: &str, arguments: Value| json!({"tool_name": tool, "arguments": arguments});
    let argv = json!({"argv": ["printf", "%s|", "a b", "$HOME"], "env": {"A": "b"}});
    let answer = session.ask("step", &call("exec", argv));
    let result = &answer["data"]["observation"]["result"];
    assert_eq!(result["data"]["stdout"], "a b|$HOME|", "{answer}");
    let rpc = json!({
        "jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": {"name": "bash", "arguments": {"command": "cat; exit 2", "stdin": "in"}},
    });
    let answer = session.ask("mcp", &rpc);
    let result = &answer["data"]["result"];
    assert_eq!(
        result["content"][0]["text"], "in\n(exit code 2)",
        "{answer}"
    );
    assert_eq!(result["structured_content"]["exit_code"], 2);
    for (tool, arguments, kind) in [
        ("nothing", json!({}), "tool_not_found"),
        ("bash", json!({}), "invalid_args"),
        ("bash", json!({"command": 1}), "invalid_args"),
        (
            "bash",
            json!({"command": "true", "user": 0}),
            "invalid_args",
        ),
        (
            "exec",
            json!({"argv": ["true"], "timeout_s": -1}),
            "invalid_args",
        ),
    ] {
        let answer = session.ask("step", &call(tool, arguments));
        let error = &answer["data"]["observation"]["error"]["error_type"];
        assert_eq!(error, kind, "{answer}");
    }
    drop(session);
    drop(machine);
    scene.close();
}

#[test]
fn openenv_is_behind_the_same_token() {
    let folder = tempfile::tempdir().unwrap();
    let (scene, machine) = serve(folder.path());
    let wrong = "Authorization: Bearer a-token-of-the-testz\r\n";
    let upgrade = "Upgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Version: 13\r\n\
        Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n";
    let step = r#"{"action": {"command": "touch touched"}}"#;
    for line in [
        "POST /reset",
        "POST /step",
        "GET /state",
        "GET /schema",
        "GET /metadata",
        "POST /mcp",
        "GET /ws",
        "GET /mcp",
    ] {
        for headers in [String::new(), wrong.to_owned(), format!("{wrong}{upgrade}")] {
            let answer = ask(machine.address, line, &headers, step);
            assert!(answer.starts_with("HTTP/1.1 401"), "{line}: {answer}");
        }
    }
    assert!(!folder.path().join("touched").exists());
    let health = ask(machine.address, "GET /health", "", "");
    assert!(health.contains(r#"{"status":"healthy"}"#), "{health}");
    // With the token it is the same request that is done, in an environment of its own.
    let headers = authorized("Content-Type: application/json\r\n");
    let answer = ask(machine.address, "POST /step", &headers, step);
    assert!(answer.contains(r#""exit_code":0"#), "{answer}");
    assert!(folder.path().join("touched").exists());
    let schema = ask(machine.address, "GET /schema", &headers, "");
    assert!(schema.contains("ShellAction"), "{schema}");
    drop(machine);
    scene.close();
}

#[test]
fn a_reset_ends_what_runs_and_puts_the_folder_back() {
    let outer = tempfile::tempdir().unwrap();
    let (kept, folder) = (outer.path().join("kept"), outer.path().join("work"));
    for folder in [&kept, &folder.join("sub")] {
        fs_err::create_dir_all(folder).unwrap();
        fs_err::write(folder.join("a"), "first").unwrap();
    }
    let (scene, machine) = serve(&folder);
    let mut session = Session::to(&machine);
    session.reset();
    let name = format!("1001.{}", std::process::id());
    let spoil = format!(
        "echo changed > sub/a; mkdir new; ln -s {} new/away; ln -s {} away; \
         setsid sleep {name} >/dev/null 2>&1 </dev/null & ls",
        kept.display(),
        kept.display()
    );
    assert!(session.stdout(&spoil).contains("new"));
    assert!(!processes_naming(&format!("sleep {name}")).is_empty());
    session.reset();
    assert_eq!(processes_naming(&format!("sleep {name}")), [""; 0]);
    assert_eq!(
        session.stdout("find . | sort; cat sub/a"),
        ".\n./sub\n./sub/a\nfirst"
    );
    // The links were deleted, and not what they lead to.
    assert_eq!(fs_err::read(kept.join("a")).unwrap(), b"first");
    drop(session);
    drop(machine);
    scene.close();
}

#[test]
fn who_goes_away_leaves_the_machine_to_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let (scene, machine) = serve(folder.path());
    let mut session = Session::to(&machine);
    session.reset();
    // It is one machine.
    let full = Session::to(&machine).hear();
    assert_eq!(full["data"]["code"], "CAPACITY_REACHED", "{full}");
    let name = format!("1002.{}", std::process::id());
    session.send("step", &json!({"command": format!("sleep {name}")}));
    let runs = || !processes_naming(&format!("sleep {name}")).is_empty();
    wait_until("the command runs", runs);
    drop(session);
    wait_until("the command is ended", || !runs());
    let mut next = Session::to(&machine);
    next.reset();
    assert_eq!(next.stdout("echo next"), "next\n");
    drop(next);
    drop(machine);
    scene.close();
}

#[test]
fn a_machine_has_one_holder_whatever_it_speaks() {
    let folder = tempfile::tempdir().unwrap();
    let (scene, machine) = serve(folder.path());
    let mut session = Session::to(&machine);
    session.reset();
    assert_eq!(session.stdout("echo mine"), "mine\n");
    let spec = ActorSpec {
        workdir: folder.path().join("work"),
        ..spec()
    };
    let actor = SandboxdActor::connect(&machine.options(), &spec).unwrap();
    let lost = session.ask("step", &json!({"command": "echo theirs > here"}));
    assert!(
        lost["data"]["message"].to_string().contains("was lost"),
        "{lost}"
    );
    assert!(!folder.path().join("here").exists());
    let output = actor.exec(&ActorCommand::shell("echo theirs")).unwrap();
    assert_eq!(output.stdout.text(), "theirs\n");
    // The other way round it is the actor that has lost it: a fault of ours.
    session.reset();
    let error = actor.exec(&ActorCommand::new(["true"])).unwrap_err();
    assert!(!error.is_guests_doing(), "{error}");
    assert_eq!(session.stdout("echo mine"), "mine\n");
    drop((session, actor));
    drop(machine);
    scene.close();
}
