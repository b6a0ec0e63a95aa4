//! `wardian serve` and `wardian chat` as processes: sockets, signals and pipes.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::{Value, json};

const TASK: &str = "Write a function f(x) that takes x, adds 7, then takes the remainder modulo 9 and \
    returns the result. Your code must pass: assert f(9) == 7";

fn wardian(arguments: &[&str]) -> Command {
    let mut command = crate::binary::command();
    command
        .args(arguments)
        .env_remove("WARDIAN_LOG")
        .env("NO_COLOR", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A server on a free port; it is killed if the test fails.
struct Server {
    process: Child,
    stderr: BufReader<std::process::ChildStderr>,
    address: String,
}

impl Server {
    fn start(arguments: &[&str]) -> Self {
        Self::start_as("serve", arguments)
    }

    fn start_as(command: &str, arguments: &[&str]) -> Self {
        let listen = [command, "--listen", "127.0.0.1:0"];
        let mut process = wardian(&[&listen, arguments].concat())
            .spawn()
            .expect("the binary starts");
        let mut stderr = BufReader::new(process.stderr.take().expect("it is piped"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("it says where it is");
        let address = line
            .split_once("://")
            .and_then(|(_, rest)| rest.split_once("/v1"))
            .unwrap_or_else(|| panic!("no address in: {line}"));
        let address = address.0.to_owned();
        Self {
            process,
            stderr,
            address,
        }
    }

    /// Sends a request; returns the status and the body.
    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        let timeout = Some(Duration::from_secs(60));
        stream.set_read_timeout(timeout).expect("a timeout is set");
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        let (head, body) = answer.split_once("\r\n\r\n").expect("there is a head");
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok());
        (status.expect("there is a status"), body.to_owned())
    }

    fn chat(&self, fields: &Value) -> Value {
        let mut body = json!({
            "model": "starter", "seed": 1, "temperature": 0.1,
            "messages": [{"role": "user", "content": TASK}],
        });
        for (key, value) in fields.as_object().expect("fields are an object") {
            body[key] = value.clone();
        }
        let (status, answer) = self.ask("POST", "/v1/chat/completions", &body.to_string());
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}"))
    }

    fn terminate(mut self) -> (Option<i32>, String) {
        let pid = self.process.id().to_string();
        let killed = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(killed.expect("`kill` is there").success());
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).expect("it ends");
        (self.process.wait().expect("it ends").code(), rest)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended already unless a test failed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_served_model_calls_tools_and_stops_when_it_is_asked_to() {
    let server = Server::start(&[]);
    let (status, models) = server.ask("GET", "/v1/models", "");
    assert_eq!(status, 200);
    assert!(models.contains("\"starter\""), "{models}");

    let code = json!({"type": "object", "properties": {"code": {"type": "string"}}});
    let tools: Vec<Value> = ["run_python", "submit_solution"]
        .iter()
        .map(|name| json!({"type": "function", "function": {"name": name, "parameters": code}}))
        .collect();
    let answer = server.chat(&json!({"tools": tools}));
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["type"], "function");
    let arguments = call["function"]["arguments"].as_str().expect("it is text");
    let arguments: Value = serde_json::from_str(arguments).expect("it is JSON");
    let code = arguments["code"].as_str().expect("it is text");
    assert!(code.contains("def f(x)"), "{code}");

    // The same again is answered from the prefix cache, with the same tokens.
    let again = server.chat(&json!({"tools": tools}));
    assert_eq!(
        again["choices"][0]["message"]["content"],
        choice["message"]["content"]
    );
    assert_eq!(
        again["choices"][0]["message"]["tool_calls"][0]["function"],
        call["function"]
    );
    let cached = &again["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert!(
        cached.as_u64().is_some_and(|cached| cached >= 32),
        "{again}"
    );

    let (code, rest) = server.terminate();
    assert_eq!(code, Some(0), "{rest}");
    assert!(rest.contains("Stopped"), "{rest}");
}

/// The proxy in front of `serve` captures what the proxy in front of the model does: an upstream tells
/// its ids.
#[test]
fn a_proxy_captures_its_own_engine_and_an_upstream_alike() {
    let serve = Server::start(&[]);
    let upstream = format!("http://{}/v1", serve.address);
    let own: &[&str] = &["--open-sessions"];
    let other = [
        "--open-sessions",
        "--upstream",
        &upstream,
        "--upstream-stream",
    ];
    let mut rows = Vec::new();
    for arguments in [own, &other] {
        let proxy = Server::start_as("proxy", arguments);
        let body = json!({
            "model": "starter", "seed": 1, "messages": [{"role": "user", "content": TASK}],
            "max_tokens": 40, "stream": true,
        });
        let path = "/s/v1/chat/completions";
        let (status, text) = proxy.ask("POST", path, &body.to_string());
        assert_eq!(status, 200, "{text}");
        assert!(text.contains("[DONE]"), "{text}");
        let (_, rollout) = proxy.ask("GET", "/sessions/s/rollout", "");
        let rollout: Value = serde_json::from_str(&rollout).expect("it is JSON");
        assert_eq!(rollout["trainable"], true, "{rollout}");
        let row = &rollout["sequences"][0];
        rows.push([row["input_ids"].clone(), row["loss_mask"].clone()]);
        let (code, rest) = proxy.terminate();
        assert_eq!(code, Some(0), "{rest}");
    }
    assert_eq!(rows[0], rows[1]);
}

#[test]
fn a_server_is_measured_beside_the_engine() {
    let bench = |more: &[&str]| {
        let size = [
            "--prompt-tokens",
            "20",
            "--new-tokens",
            "5",
            "--rounds",
            "1",
        ];
        let command = ["bench", "engine", "--device", "cpu"];
        let output = wardian(&[&command[..], &size[..], more].concat()).output();
        output.expect("the binary starts")
    };
    let server = Server::start(&[]);
    let endpoint = format!("http://{}/v1", server.address);
    let batches = ["--batch", "1,3", "--endpoint", &endpoint];
    let output = bench(&[&batches[..], &["--format", "json"]].concat());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
    assert_eq!(
        (&report["device"], &report["dtype"]),
        (&json!("cpu"), &json!("f32"))
    );
    for (result, batch) in report["results"]
        .as_array()
        .expect("a list")
        .iter()
        .zip([1, 3])
    {
        assert_eq!(result["batch"], batch);
        for part in ["prefill", "decode"] {
            let [ours, peer, ratio] = ["ours", "peer", "ratio"]
                .map(|whose| result[whose][part].as_f64().expect("a number"));
            assert!(ours > 0.0 && peer > 0.0, "{result}");
            assert!((ratio - ours / peer).abs() <= 1e-9 * ratio, "{result}");
        }
    }
    assert_eq!(report["results"].as_array().map(Vec::len), Some(2));
    let output = bench(&["--batch", "2"]);
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(
        table.contains("starter on cpu in f32") && !table.contains("peer"),
        "{table}"
    );

    let (code, rest) = server.terminate();
    assert_eq!(code, Some(0), "{rest}");
    for (arguments, part) in [
        (["--endpoint", &endpoint], "for its models"),
        (["--batch", "0"], "`--batch` is 0, not in 1..=4096"),
        (["--new-tokens", "1"], "`--new-tokens` is 1, less than 2"),
    ] {
        let output = wardian(&[&["bench", "engine"], &arguments[..]].concat()).output();
        let output = output.expect("the binary starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains(part), "{errors}");
    }
}

#[test]
fn what_cannot_be_served_is_a_usage_error() {
    for (arguments, part) in [
        (
            &["serve", "--api-key-env", "WARDIAN_NO_SUCH_KEY"][..],
            "`WARDIAN_NO_SUCH_KEY`",
        ),
        (
            &["serve", "--model", "/nonexistent/model"],
            "/nonexistent/model",
        ),
        (&["serve", "--memory-share", "0"], "`--memory-share`"),
        (
            &["serve", "--cache-memory", "1KiB", "--listen", "127.0.0.1:0"],
            "max_cache_bytes",
        ),
        (&["serve", "--tool-call-format", "xml"], "`qwen_xml`"),
        (&["proxy", "--upstream", "127.0.0.1:8000"], "`http://`"),
        (&["proxy", "--upstream-model", "m"], "--upstream <URL>"),
        (
            &[
                "train",
                "--set",
                "model.dtype=int8",
                "--set",
                "trainer.mode=full",
            ],
            "`int8` with training of all weights",
        ),
        (
            &[
                "train",
                "--set",
                "model.compute_dtype=bf16",
                "--set",
                "trainer.mode=full",
            ],
            "unsupported `compute_dtype`: `bf16` with training of all weights",
        ),
        (
            &[
                "chat",
                "--set",
                "model.compute_dtype=bf16",
                "--set",
                "model.dtype=int8",
            ],
            "with `model.compute_dtype = \"bf16\"` weights are held in nothing else",
        ),
        (
            &["chat", "--temperature", "5000", "--no-tools"],
            "temperature",
        ),
        (
            &["chat", "--thinking-budget", "5", "--no-tools"],
            "`<think>`",
        ),
    ] {
        let output = wardian(arguments).output().expect("the binary starts");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

fn chat(arguments: &[&str], input: &str) -> Output {
    let mut child = wardian(&[&["chat"], arguments].concat())
        .spawn()
        .expect("the binary starts");
    let mut stdin = child.stdin.take().expect("it is piped");
    // It may end before it has read everything.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{message}");
    output
}

#[test]
fn a_conversation_is_piped_reset_and_ended() {
    let options = [
        "--no-tools",
        "--max-tokens",
        "12",
        "--seed",
        "3",
        "--temperature",
        "1",
    ];
    let text = |input: &str| String::from_utf8(chat(&options, input).stdout).expect("UTF-8");
    let once = text("hi\n");
    assert!(!once.trim().is_empty());
    // After a reset the same message has the same answer; without one it has another history.
    assert_eq!(text("hi\n/reset\nhi\n"), once.repeat(2));
    assert_ne!(text("hi\nhi\n"), once.repeat(2));
    assert_eq!(text("hi\n/exit\nhi\n"), once);

    // Weights that take less room are other weights, so that something else is likeliest at times.
    for set in ["model.dtype=int8", "model.compute_dtype=bf16"] {
        let narrow = [&options[..], &["--set", set]].concat();
        let output = chat(&narrow, "hi\n/reset\nhi\n");
        let answers = String::from_utf8(output.stdout).expect("UTF-8");
        let (first, second) = answers.split_at(answers.len() / 2);
        assert!(!first.trim().is_empty());
        assert_eq!(first, second);
    }

    let output = chat(&options, "/help\n");
    assert!(output.stdout.is_empty());
    assert!(String::from_utf8_lossy(&output.stderr).contains("/reset"));
    let long = "x ".repeat(400);
    let output = chat(&options, &format!("{long}\nhi\n"));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).lines().count(),
        once.lines().count()
    );
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        message.contains("prompt too long") && message.contains("256"),
        "{message}"
    );
}

#[test]
fn a_chat_runs_the_models_python_in_the_sandbox() {
    let options = ["--temperature", "0", "--max-tool-calls", "1"];
    let output = chat(&options, &format!("{TASK}\n"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let notes = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("<tool_call>"), "{text}");
    // Its own tool is run. What it learned to submit with is not offered here, and ends its answer all
    // the same: nobody would ever accept a call of it.
    let ran = text.contains("\"run_python\"");
    let calls = text.matches("<tool_call>").count();
    if ran {
        assert!(notes.contains("often enough"), "{text}\n{notes}");
    } else {
        assert!(notes.contains("Submitted"), "{text}\n{notes}");
    }
    assert_eq!(calls, 1, "{text}\n{notes}");
}

/// A `wardian chat` that is spoken to in turns.
struct Talk {
    process: Child,
    stdin: Option<std::process::ChildStdin>,
    stdout: std::process::ChildStdout,
}

impl Talk {
    fn start(arguments: &[&str]) -> Self {
        let mut process = wardian(&[&["chat"], arguments].concat())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("the binary starts");
        Self {
            stdin: process.stdin.take(),
            stdout: process.stdout.take().expect("it is piped"),
            process,
        }
    }

    /// Says something and returns the pieces in which the answer's first line came.
    fn say(&mut self, text: &str) -> Vec<String> {
        let stdin = self.stdin.as_mut().expect("it is open");
        writeln!(stdin, "{text}").expect("it reads");
        let mut pieces: Vec<String> = Vec::new();
        while !pieces.last().is_some_and(|piece| piece.contains('\n')) {
            let mut piece = [0; 4096];
            let len = self.stdout.read(&mut piece).expect("it answers");
            assert!(len > 0, "it ended after {pieces:?}");
            pieces.push(String::from_utf8_lossy(&piece[..len]).into_owned());
        }
        pieces
    }

    fn end(mut self) {
        drop(self.stdin.take());
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).expect("it ends");
        let status = self.process.wait().expect("it ends");
        assert_eq!((status.code(), rest.as_str()), (Some(0), ""));
    }
}

impl Drop for Talk {
    fn drop(&mut self) {
        // It has ended already unless a test failed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_real_model_holds_a_conversation() {
    let Ok(model) = std::env::var("WARDIAN_SMOLLM2_GGUF") else {
        println!("skipped: WARDIAN_SMOLLM2_GGUF is not set");
        return;
    };
    let options = [
        "--model",
        &model,
        "--temperature",
        "0",
        "--max-tokens",
        "12",
    ];
    let mut talk = Talk::start(&options);
    let france = talk.say("What is the capital of France?");
    assert!(france.concat().contains("Paris"), "{france:?}");
    assert!(
        france.len() > 1,
        "it came at once and not as it was made: {france:?}"
    );
    // What is asked for is in the message before.
    let italy = talk.say("And of Italy?");
    assert!(italy.concat().contains("Rome"), "{italy:?}");
    // The same words at the beginning of a conversation mean something else.
    talk.stdin
        .as_mut()
        .and_then(|stdin| writeln!(stdin, "/reset").ok())
        .expect("it reads");
    let alone = talk.say("And of Italy?");
    assert_ne!(alone.concat(), italy.concat());
    talk.end();

    let pirate = "You are a pirate called Blackbeard.";
    let mut talk = Talk::start(&[&options[..], &["--system", pirate]].concat());
    let name = talk.say("Who are you?");
    assert!(name.concat().contains("Blackbeard"), "{name:?}");
    talk.end();
}

/// The same model does alike here and behind an endpoint: same tasks, tools, sandbox and graders.
#[test]
fn a_model_behind_an_endpoint_is_measured_as_one_here() {
    let sets = [
        "eval.limit=12",
        "eval.samples=1",
        "eval.temperature=0",
        "task.visible_tests=1",
        "rollout.max_turns=3",
        "rollout.max_new_tokens=64",
        "rollout.max_total_tokens=224",
    ];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let folder = tempfile::tempdir().expect("a folder is made");
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let eval = |arguments: &[&str]| {
        let arguments = [&["eval", "--format", "json"], &sets[..], arguments].concat();
        let output = wardian(&arguments).output().expect("the binary starts");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{told}");
        output.stdout
    };
    let here = path("here.json");
    fs_err::write(&here, eval(&[])).expect("it is written");
    let server = Server::start(&[]);
    let url = format!("http://{}/v1", server.address);
    let out = path("there.jsonl");
    let endpoint = ["--endpoint", &url, "--out", &out, "--prompt-price", "2"];
    let endpoint = [&endpoint[..], &["--against", &here]].concat();
    let there: Value = serde_json::from_slice(&eval(&endpoint)).expect("it is JSON");
    let here: Value =
        serde_json::from_slice(&fs_err::read(&here).expect("it is there")).expect("it is JSON");
    assert_eq!(there["scores"], here["scores"]);
    assert!(
        here["pass_at_1"]
            .as_f64()
            .is_some_and(|share| 0.0 < share && share < 1.0),
        "{here}"
    );
    assert_eq!(
        (
            &there["difference"]["pass_at_1"],
            &there["difference"]["p_value"]
        ),
        (&json!(0.0), &json!(1.0))
    );
    let did = &there["endpoint"];
    assert_eq!(did["model"], "starter");
    let (requests, prompt_tokens) = (did["requests"].as_u64(), did["prompt_tokens"].as_f64());
    assert!(requests.is_some_and(|requests| requests >= 12), "{did}");
    let cost = prompt_tokens.map(|tokens| tokens * 2e-6);
    assert_eq!(did["cost"].as_f64(), cost);

    // All is kept: nobody is asked a second time, not even who is gone.
    let (code, rest) = server.terminate();
    assert_eq!(code, Some(0), "{rest}");
    let again = [&endpoint[..], &["--model", "starter"]].concat();
    let again: Value = serde_json::from_slice(&eval(&again)).expect("it is JSON");
    assert_eq!(again["scores"], here["scores"]);
    // Fewer of the tasks are reported alone; what all of them cost has been paid.
    let fewer = [
        &endpoint[..],
        &["--model", "starter", "--set", "eval.limit=5"],
    ]
    .concat();
    let fewer: Value = serde_json::from_slice(&eval(&fewer)).expect("it is JSON");
    assert_eq!((&fewer["tasks"], &fewer["samples"]), (&json!(5), &json!(5)));
    assert_eq!(fewer["endpoint"]["requests"], did["requests"]);
    // The questions were others.
    let other = wardian(
        &[
            &["eval", "--set", "eval.temperature=1"],
            &endpoint[..],
            &["--model", "starter"],
        ]
        .concat(),
    )
    .output()
    .expect("the binary starts");
    assert_eq!(other.status.code(), Some(2));
    let told = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(told.contains("another `"), "{told}");
}

/// Two proxies, of which one is the other's upstream, so that no model is loaded: servers and clients are
/// told about certificates by their options.
#[test]
fn tls_is_spoken_where_certificates_are_given() {
    let folder = tempfile::tempdir().expect("there is a folder");
    let write = |name: &str, text: String| {
        let path = folder.path().join(name);
        fs_err::write(&path, text).expect("it is written");
        path.to_str().expect("the path is text").to_owned()
    };
    let mut params = CertificateParams::new(Vec::new()).expect("they are names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("there is a key");
    let root = CertifiedIssuer::self_signed(params, key).expect("it is signed");
    let ca = write("ca.pem", root.pem());
    let key = KeyPair::generate().expect("there is a key");
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("it is a name");
    let certificate = params.signed_by(&key, &root).expect("it is signed");
    let bundle = write("bundle.pem", key.serialize_pem() + &certificate.pem());
    let key = write("key.pem", key.serialize_pem());
    let certificate = write("certificate.pem", certificate.pem());

    let dead = ["--upstream", "http://127.0.0.1:9/v1"];
    let model = ["--upstream-model", "the-model"];
    let tls = [
        "--tls-cert",
        &certificate,
        "--tls-key",
        &key,
        "--tls-client-ca",
        &ca,
    ];
    let behind = Server::start_as("proxy", &[&dead[..], &model, &tls].concat());
    let url = format!("https://{}/v1", behind.address);
    let shows = ["--upstream-tls-ca", &ca, "--upstream-tls-cert", &bundle];
    for (options, status, part) in [
        (&shows[..], 200, "the-model"),
        (&shows[..2], 502, "CertificateRequired"),
        (&[], 502, "UnknownIssuer"),
    ] {
        let front = Server::start_as("proxy", &[&["--upstream", &url], options].concat());
        let (answered, body) = front.ask("GET", "/v1/models", "");
        assert_eq!(answered, status, "{body}");
        assert!(body.contains(part), "{body}");
        front.terminate();
    }
    let (status, body) = behind.ask("GET", "/health", "");
    assert!(
        status == 400 && body.contains("TLS only"),
        "{status}: {body}"
    );
    let (code, rest) = behind.terminate();
    assert_eq!(code, Some(0), "{rest}");

    for (options, part) in [
        (["--tls-key", &key], "--tls-cert"),
        (["--tls-cert", &ca], "holds no private key"),
        (["--tls-cert", "none.pem"], "none.pem"),
        (["--rate-limit", "10"], "expected a rate such as `10/s`"),
        (["--upstream-tls-ca", &ca], "`https://`"),
        (["--upstream-tls-cert", &bundle], "`https://`"),
    ] {
        let output = wardian(&[&["proxy"], &dead[..], &options].concat()).output();
        let output = output.expect("the binary starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains(part), "{errors}");
    }
    let plain = ["eval", "--endpoint", dead[1], "--tls-ca", &ca];
    let output = wardian(&plain).output().expect("the binary starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(
        errors.contains("`--tls-ca`") && errors.contains("`https://`"),
        "{errors}"
    );
}
