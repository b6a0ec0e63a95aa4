//! The dashboard's API over real sockets: what it tells, and what it does not.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use wardian::dashboard::{Dashboard, DashboardConfig, Runs};
use wardian::http::{ApiKey, serve};

struct Server {
    address: SocketAddr,
    _runtime: tokio::runtime::Runtime,
}

struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        serde_json::from_str(&self.body).expect("it is JSON")
    }
}

impl Server {
    fn start(config: DashboardConfig) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .worker_threads(1)
            .build()
            .expect("a runtime");
        let listener = runtime
            .block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))
            .expect("a port");
        let address = listener.local_addr().expect("an address");
        let router = Dashboard::new(config).router();
        runtime.spawn(serve(
            listener,
            router,
            std::future::pending(),
            Duration::ZERO,
        ));
        Self {
            address,
            _runtime: runtime,
        }
    }

    fn ask(&self, method: &str, path: &str, headers: &str) -> Answer {
        let mut stream = TcpStream::connect(self.address).expect("it listens");
        let host = if headers.contains("Host:") {
            ""
        } else {
            "Host: localhost\r\n"
        };
        let request =
            format!("{method} {path} HTTP/1.1\r\n{host}Connection: close\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        let (head, body) = answer.split_once("\r\n\r\n").expect("there is a head");
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok());
        Answer {
            status: status.expect("a status"),
            head: head.to_ascii_lowercase(),
            body: body.to_owned(),
        }
    }

    fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, "")
    }
}

fn row(group: u64, sample: u32, reward: f64, text: &str) -> Value {
    json!({
        "task_id": format!("t{group}"), "group": group, "sample": sample, "policy_step": 1,
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}],
        "turns": [{"message": 1, "tokens": {"start": 1, "end": 2}, "finish": "stop",
                   "tool_calls": 0, "tool_failures": 0}],
        "trace": {"prompt_len": 1, "ids": [1, 2], "logprobs": [0.0, -0.5], "loss_mask": [0, 1]},
        "reward": reward, "passed": reward > 0.5, "status": {"kind": "finished"},
        "usage": {"generate_seconds": 0.0, "tool_seconds": 0.0, "grade_seconds": 0.0, "fuel": 3},
    })
}

fn make_run(root: &Path, rows: &[Value], tail: &str) {
    fs_err::create_dir_all(root.join("rollouts")).expect("a folder");
    let run_toml = "model.path = 'm'\ntrainer.steps = 4\nlog.http = 'http://me:secret@x/rows'\n";
    fs_err::write(root.join("run.toml"), run_toml).expect("a file");
    let metrics = "{\"step\":1,\"reward\":0.25}\n{\"step\":2,\"reward\":0.75}\n{\"step\":3,\"rew";
    fs_err::write(root.join("metrics.jsonl"), metrics).expect("a file");
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    fs_err::write(root.join("rollouts/step-1.jsonl"), lines + tail).expect("a file");
}

fn server(root: &Path) -> Server {
    Server::start(DashboardConfig::new(Runs::Below(root.to_owned())))
}

#[test]
fn runs_are_told_with_what_older_ones_lack() {
    let root = tempfile::tempdir().expect("a folder");
    make_run(&root.path().join("a"), &[], "");
    fs_err::create_dir(root.path().join("no-run")).expect("a folder");
    let told = server(root.path()).get("/api/runs").json();
    assert_eq!(told["runs"].as_array().map(Vec::len), Some(1), "{told}");
    let run = &told["runs"][0];
    assert_eq!(
        (&run["name"], &run["state"]),
        (&json!("a"), &json!("stopped"))
    );
    assert_eq!((&run["steps"], &run["reward"]), (&json!(2), &json!(0.75)));
    assert_eq!(
        (&run["planned"], &run["started_at"]),
        (&json!(4), &Value::Null)
    );
}

#[test]
fn passwords_of_addresses_are_not_told() {
    let root = tempfile::tempdir().expect("a folder");
    make_run(&root.path().join("a"), &[], "");
    let told = server(root.path()).get("/api/runs/a").json();
    let text = told["run_toml"].as_str().expect("it is text");
    assert!(
        text.contains("…@x/rows") && !text.contains("secret"),
        "{text}"
    );
}

#[test]
fn metrics_go_on_where_they_were_and_a_torn_row_waits() {
    let root = tempfile::tempdir().expect("a folder");
    make_run(&root.path().join("a"), &[], "");
    let server = server(root.path());
    let first = server.get("/api/runs/a/metrics").json();
    assert_eq!(first["rows"].as_array().map(Vec::len), Some(2), "{first}");
    let mut file = fs_err::OpenOptions::new()
        .append(true)
        .open(root.path().join("a/metrics.jsonl"))
        .expect("it is there");
    file.write_all(b"ard\":1.0}\n").expect("it is written");
    let path = format!(
        "/api/runs/a/metrics?file={}&offset={}",
        first["file"].as_str().expect("a text"),
        first["offset"]
    );
    let second = server.get(&path).json();
    assert_eq!(second["rows"], json!([{"step": 3, "reward": 1.0}]));
}

#[test]
fn episodes_come_in_pages_and_a_cut_off_end_is_told() {
    let root = tempfile::tempdir().expect("a folder");
    let rows: Vec<Value> = (0..500)
        .map(|at| row(u64::from(at / 2), at % 2, f64::from(at % 2), "text"))
        .collect();
    make_run(&root.path().join("a"), &rows, "{\"task_id\": \"cut o");
    make_run(&root.path().join("b"), &rows, "");
    let server = server(root.path());
    let page = "/steps/1/episodes?from=490&limit=20";
    let told = server.get(&format!("/api/runs/a{page}")).json();
    assert_eq!(
        (&told["total"], &told["is_incomplete"]),
        (&json!(500), &json!(true))
    );
    assert_eq!(told["episodes"].as_array().map(Vec::len), Some(10));
    assert_eq!(told["episodes"][0]["row"], 490);
    assert!(told["no_advantages"].is_string(), "{told}");

    let found = server.get("/api/runs/b/steps/1/episodes?min_reward=0.5&task=t24&limit=5");
    let found = found.json();
    // t24 and t240 to t249.
    assert_eq!(
        (&found["matching"], &found["broken"]),
        (&json!(11), &json!(0))
    );
    let episode = server.get("/api/runs/b/steps/1/episodes/499").json();
    assert_eq!(episode["episode"]["task_id"], "t249");
    assert_eq!(episode["tokens"]["mask"], json!([0, 1]));
    assert_eq!(episode["group_rows"].as_array().map(Vec::len), Some(2));
    assert!(
        episode["advantage"]
            .as_f64()
            .is_some_and(|value| value > 0.0),
        "{episode}"
    );
    let raw = server.get("/api/runs/b/steps/1/episodes/499/raw");
    assert_eq!(raw.json(), rows[499]);
    assert!(raw.head.contains("attachment"), "{}", raw.head);
    assert_eq!(server.get("/api/runs/b/steps/1/episodes/500").status, 404);
}

#[test]
fn a_step_that_is_done_again_is_read_anew() {
    let root = tempfile::tempdir().expect("a folder");
    let run = root.path().join("a");
    make_run(&run, &[row(0, 0, 1.0, "old")], "");
    let server = server(root.path());
    let path = "/api/runs/a/steps/1/episodes";
    assert_eq!(server.get(path).json()["total"], 1);
    let rows = [row(0, 0, 1.0, "new"), row(0, 1, 1.0, "new")];
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    fs_err::write(run.join("rollouts/new"), lines).expect("it is written");
    fs_err::rename(run.join("rollouts/new"), run.join("rollouts/step-1.jsonl")).expect("renamed");
    assert_eq!(server.get(path).json()["total"], 2);
}

#[test]
fn nothing_outside_the_folder_is_read() {
    let root = tempfile::tempdir().expect("a folder");
    let runs = root.path().join("runs");
    make_run(&runs.join("a"), &[row(0, 0, 1.0, "mine")], "");
    make_run(
        &root.path().join("outside"),
        &[row(0, 0, 1.0, "secret")],
        "",
    );
    symlink(root.path().join("outside"), runs.join("link")).expect("a link");
    let stolen = root.path().join("outside/rollouts/step-1.jsonl");
    symlink(&stolen, runs.join("a/rollouts/step-2.jsonl")).expect("a link");
    assert!(
        fs_err::read_to_string(runs.join("link/run.toml")).is_ok(),
        "it leads there"
    );
    let server = server(&runs);
    let told = server.get("/api/runs").json();
    assert_eq!(told["runs"].as_array().map(Vec::len), Some(1), "{told}");
    for name in [
        "..",
        "%2e%2e",
        "..%2foutside",
        "%2e%2e%2foutside",
        "link",
        "a%2f..%2f..%2foutside",
    ] {
        for rest in [
            "",
            "/metrics",
            "/steps",
            "/steps/1/episodes",
            "/steps/1/episodes/0/raw",
        ] {
            let path = format!("/api/runs/{name}{rest}");
            let answer = server.get(&path);
            assert_eq!(answer.status, 404, "{path}: {}", answer.body);
            assert!(!answer.body.contains("secret"), "{path}");
        }
    }
    assert_eq!(server.get("/api/runs/a/steps/2/episodes").status, 404);
    assert_eq!(server.get("/api/runs/a/steps/1/episodes").status, 200);
    assert_eq!(server.get("/assets/..%2f..%2fmod.rs").status, 404);
}

#[test]
fn who_has_no_key_reads_nothing() {
    let root = tempfile::tempdir().expect("a folder");
    make_run(&root.path().join("a"), &[row(0, 0, 1.0, "mine")], "");
    let server = Server::start(DashboardConfig {
        api_key: Some(ApiKey::new("k")),
        ..DashboardConfig::new(Runs::Below(root.path().to_owned()))
    });
    for path in [
        "/api/runs",
        "/api/runs/a",
        "/api/runs/a/metrics",
        "/api/runs/a/steps/1/episodes/0/raw",
    ] {
        assert_eq!(server.get(path).status, 401, "{path}");
        assert_eq!(
            server
                .ask("GET", path, "Authorization: Bearer x\r\n")
                .status,
            401,
            "{path}"
        );
        assert_eq!(
            server
                .ask("GET", path, "Authorization: Bearer k\r\n")
                .status,
            200,
            "{path}"
        );
    }
    assert_eq!(server.get("/").status, 200, "the page asks for the key");
}

#[test]
fn other_sites_and_names_led_here_are_refused() {
    let root = tempfile::tempdir().expect("a folder");
    let server = server(root.path());
    for headers in [
        "Host: rebound.example\r\n",
        "Origin: http://evil.example\r\n",
    ] {
        for path in ["/", "/api/runs"] {
            assert_eq!(
                server.ask("GET", path, headers).status,
                403,
                "{headers} {path}"
            );
        }
    }
    assert_eq!(server.get("/api/runs").status, 200);
}

#[test]
fn pages_may_load_nothing_else_and_only_reading_is_possible() {
    let root = tempfile::tempdir().expect("a folder");
    let server = server(root.path());
    for path in [
        "/",
        "/assets/app.js",
        "/assets/app.css",
        "/api/runs",
        "/nothing",
    ] {
        let head = server.get(path).head;
        for part in [
            "script-src 'self'",
            "default-src 'none'",
            "nosniff",
            "x-frame-options: deny",
        ] {
            assert!(head.contains(part), "{path} has no {part}: {head}");
        }
    }
    let page = server.get("/").body;
    assert!(!page.contains("http://") && !page.contains("https://") && !page.contains("style="));
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        assert_eq!(
            server
                .ask(method, "/api/runs", "Content-Length: 0\r\n")
                .status,
            405
        );
    }
}

#[test]
fn a_download_is_the_row_byte_for_byte() {
    let root = tempfile::tempdir().expect("a folder");
    let run = root.path().join("a");
    // Longer than what is held of it at a time, and written as this program would not.
    let text = "x".repeat(600_000);
    let odd = row(0, 0, 1.0, &text).to_string().replacen(':', " :  ", 40);
    make_run(&run, &[row(0, 1, 1.0, "first")], &format!("{odd}\n"));
    let server = server(root.path());
    let raw = server.get("/api/runs/a/steps/1/episodes/1/raw");
    assert_eq!(raw.status, 200);
    assert!(raw.body == format!("{odd}\n"), "{} bytes", raw.body.len());
    assert!(
        raw.head
            .contains(&format!("content-length: {}", odd.len() + 1))
    );
}

#[test]
fn advantages_by_settings_of_later_are_not_made_up() {
    let root = tempfile::tempdir().expect("a folder");
    let run = root.path().join("a");
    make_run(&run, &[row(0, 0, 1.0, "a"), row(0, 1, 0.0, "b")], "");
    let rollouts = run.join("rollouts");
    fs_err::copy(rollouts.join("step-1.jsonl"), rollouts.join("step-2.jsonl")).expect("copied");
    let state = json!({"state": "stopped", "started_at": 9, "settings_since": 2});
    fs_err::write(run.join("state.json"), state.to_string()).expect("it is written");
    let server = server(root.path());
    let of = |step| {
        server
            .get(&format!("/api/runs/a/steps/{step}/episodes"))
            .json()
    };
    let reason = of(1)["no_advantages"].as_str().map(str::to_owned);
    assert!(reason.is_some_and(|reason| reason.contains("other settings")));
    assert!(of(2)["no_advantages"].is_null());
    assert!(of(2)["episodes"][0]["advantage"].as_f64() > Some(0.0));
}

#[test]
fn what_a_turn_ran_is_told() {
    let root = tempfile::tempdir().expect("a folder");
    let mut episode = row(0, 0, 1.0, "a");
    let run = json!({"call": 0, "ending": {"kind": "out_of_fuel"}, "fuel": 7,
                     "stdout": {"head": "<b>", "left_out": 3, "tail": "end"}});
    episode["turns"][0]["runs"] = json!([run]);
    make_run(&root.path().join("a"), &[episode], "");
    let told = server(root.path())
        .get("/api/runs/a/steps/1/episodes/0")
        .json();
    assert_eq!(told["episode"]["turns"][0]["runs"], json!([run]));
}

#[test]
fn the_load_of_the_machine_goes_on_where_it_was() {
    let root = tempfile::tempdir().expect("a folder");
    let run = root.path().join("a");
    make_run(&run, &[], "");
    let server = server(root.path());
    assert_eq!(server.get("/api/runs/a/load").json()["rows"], json!([]));
    fs_err::write(run.join("load.jsonl"), "{\"time\":1,\"host/cpu\":0.5}\n").expect("written");
    let told = server.get("/api/runs/a/load").json();
    assert_eq!(told["rows"], json!([{"time": 1, "host/cpu": 0.5}]));
}

#[test]
fn prometheus_is_told_of_runs_that_go_on_if_it_has_the_key() {
    let root = tempfile::tempdir().expect("a folder");
    make_run(&root.path().join("a\"b"), &[], "");
    make_run(&root.path().join("over"), &[], "");
    let gpus = json!({"time": 1, "host/cpu": 0.5, "gpus": [{"index": 0, "used": 0.25}]});
    fs_err::write(root.path().join("a\"b/load.jsonl"), format!("{gpus}\n")).expect("written");
    let _going_on = wardian::run::FolderLock::take(&root.path().join("a\"b")).expect("it is free");
    let server = Server::start(DashboardConfig {
        api_key: Some(ApiKey::new("k")),
        ..DashboardConfig::new(Runs::Below(root.path().to_owned()))
    });
    let open = server.get("/metrics").body;
    assert!(open.contains("http_requests_total"), "{open}");
    assert!(!open.contains("run_"), "{open}");
    let told = server
        .ask("GET", "/metrics", "Authorization: Bearer k\r\n")
        .body;
    for line in [
        r#"run_step{run="a\"b"} 2"#,
        r#"run_metric{run="a\"b",name="reward"} 0.75"#,
        r#"run_load{run="a\"b",name="host/cpu"} 0.5"#,
        r#"run_load{run="a\"b",name="gpu/0/used"} 0.25"#,
    ] {
        assert!(
            told.lines().any(|found| found == line),
            "no {line} in {told}"
        );
    }
    assert!(!told.contains("over"), "{told}");
}
