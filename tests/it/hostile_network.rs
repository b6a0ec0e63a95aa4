//! `wardian serve --env` as a process, and connections that do as they like: whatever they do, others are
//! answered, and nothing of them stays.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rcgen::{CertifiedKey, generate_simple_self_signed};
use ureq::tls::{Certificate, RootCerts, TlsConfig};

/// Waits that no machine is too slow for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Connections that are held open at a time.
const HELD: usize = 300;

/// The head of a handshake whose rest does not come, and what is like one and is none.
const HALF_HELLO: &[u8] = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
const NO_HELLO: &[u8] = b"\x16\x03\x01\x00\x05\xff\xff\xff\xff\xff";

const UPGRADE: &[u8] =
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
    Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";

/// A server on a free port; it is killed with the test.
struct Server {
    process: Child,
    stderr: BufReader<ChildStderr>,
    url: String,
    agent: ureq::Agent,
}

impl Server {
    fn start(options: &[&str], roots: RootCerts) -> Self {
        let mut process = crate::binary::command()
            .args(["serve", "--env", "python", "--listen", "127.0.0.1:0"])
            .args(options)
            .env_remove("WARDIAN_LOG")
            .env_remove("OPENENV_MODE")
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut stderr = BufReader::new(process.stderr.take().expect("it is piped"));
        let url = loop {
            let mut line = String::new();
            let read = stderr.read_line(&mut line).expect("it says where it is");
            assert!(read > 0, "it ended");
            if let Some((_, url)) = line.trim().split_once(" at http") {
                break format!("http{url}");
            }
        };
        let config = ureq::Agent::config_builder()
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .timeout_global(Some(PATIENCE))
            .max_idle_connections(0)
            .build();
        Self {
            process,
            stderr,
            url,
            agent: ureq::Agent::new_with_config(config),
        }
    }

    fn connect(&self) -> TcpStream {
        let (_, address) = self.url.split_once("://").expect("it is a URL");
        let stream = TcpStream::connect(address).expect("it listens");
        stream
            .set_read_timeout(Some(PATIENCE))
            .expect("a timeout is set");
        stream
    }

    /// Has a program run, as who does no harm.
    fn step(&self) {
        let body = r#"{"action": {"code": "print(6 * 7)"}}"#;
        let request = self.agent.post(format!("{}/step", self.url));
        let mut answer = request.send(body).expect("it answers");
        let text = answer
            .body_mut()
            .read_to_string()
            .expect("it answers whole");
        assert!(text.contains(r#""stdout":"42\n""#), "{text}");
    }

    fn descriptors(&self) -> usize {
        let folder = format!("/proc/{}/fd", self.process.id());
        fs_err::read_dir(folder).expect("it runs").count()
    }

    /// Waits until no more connections are open than `before`.
    fn settle(&self, before: usize) {
        let started = Instant::now();
        // Its own runtime may have opened a few.
        while self.descriptors() > before + 8 {
            let now = self.descriptors();
            assert!(
                started.elapsed() < PATIENCE,
                "{now} files are open, {before} were"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the resident memory in KiB.
    fn memory(&self) -> u64 {
        let path = format!("/proc/{}/status", self.process.id());
        let status = fs_err::read_to_string(path).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        number.expect("it has memory")
    }

    fn end(mut self) {
        let pid = self.process.id().to_string();
        let killed = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(killed.expect("`kill` is there").success());
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).expect("it ends");
        let code = self.process.wait().expect("it ends").code();
        assert_eq!(code, Some(0), "{rest}");
        assert!(!rest.contains("panicked"), "{rest}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended already unless a test failed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Connects, says each of these in turn, and stays, while somebody else is served.
fn hold(server: &Server, said: &[&[u8]]) {
    let before = server.descriptors();
    let held: Vec<TcpStream> = (0..HELD)
        .zip(said.iter().cycle())
        .map(|(_, said)| {
            let mut stream = server.connect();
            stream.write_all(said).expect("it is let in");
            stream
        })
        .collect();
    server.step();
    drop(held);
    server.settle(before);
    server.step();
}

/// Connects very often, and goes away at once.
fn come_and_go(server: &Server, times: usize, said: &[u8]) {
    let before = server.descriptors();
    for _ in 0..times {
        let mut stream = server.connect();
        // It may be closed by then.
        let _ = stream.write_all(said);
    }
    server.settle(before);
    server.step();
}

/// Says something, and returns what is answered until the server closes.
fn told(server: &Server, said: &[u8]) -> Vec<u8> {
    let mut stream = server.connect();
    stream.write_all(said).expect("it is let in");
    let mut answer = Vec::new();
    // A reset is an end, too; a timeout is none.
    if let Err(error) = stream.read_to_end(&mut answer) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
    answer
}

#[test]
fn connections_of_all_kinds_leave_nothing_behind() {
    let server = Server::start(&[], RootCerts::WebPki);
    server.step();
    let memory = server.memory();
    come_and_go(&server, 10_000, b"");
    come_and_go(&server, 500, UPGRADE);
    let half_frame = [UPGRADE, &[0x81, 0xfe, 0x0f, 0xff, 1, 2, 3, 4, b'{']].concat();
    let body = b"POST /step HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\n\r\n{\"action\"";
    hold(
        &server,
        &[
            b"",
            b"POST /step HTTP/1.1\r\nHost:",
            body,
            UPGRADE,
            &half_frame,
            HALF_HELLO,
        ],
    );
    for said in [
        HALF_HELLO,
        NO_HELLO,
        &[0xff; 5000],
        &[0; 100],
        b"\r\n\r\nhello\r\n\r\n",
    ] {
        let answer = told(&server, said);
        assert!(
            answer.is_empty() || answer.starts_with(b"HTTP/1.1 400 "),
            "{said:?}"
        );
    }
    // Clients that go away in the midst of a step.
    let before = server.descriptors();
    for _ in 0..20 {
        let body = r#"{"action": {"code": "while True: pass"}}"#;
        let length = body.len();
        let head = format!("POST /step HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n");
        let mut stream = server.connect();
        stream
            .write_all((head + body).as_bytes())
            .expect("it is let in");
        std::thread::sleep(Duration::from_millis(20));
    }
    server.settle(before);
    server.step();
    let grown = server.memory().saturating_sub(memory);
    assert!(grown < 200 << 10, "{grown} KiB more than before");
    server.end();
}

#[test]
fn a_port_for_tls_takes_the_same() {
    let names = vec!["127.0.0.1".to_owned()];
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(names).expect("there is a certificate");
    let folder = tempfile::tempdir().expect("there is a folder");
    let path = folder.path().join("bundle.pem");
    fs_err::write(&path, signing_key.serialize_pem() + &cert.pem()).expect("it is written");
    let root = Certificate::from_der(cert.der()).to_owned();
    let roots = RootCerts::Specific(Arc::new(vec![root]));
    let path = path.to_str().expect("the path is text");
    let server = Server::start(&["--tls-cert", path], roots);
    server.step();
    come_and_go(&server, 2000, b"");
    come_and_go(&server, 500, HALF_HELLO);
    hold(&server, &[b"", HALF_HELLO, b"\x16"]);
    let plain = told(&server, UPGRADE);
    let plain = String::from_utf8_lossy(&plain);
    assert!(
        plain.starts_with("HTTP/1.1 400 ") && plain.contains("TLS only"),
        "{plain}"
    );
    for said in [NO_HELLO, &[0xff; 5000], &[0x16; 60_000]] {
        // An alert at most, of seven bytes.
        assert!(told(&server, said).len() <= 7);
    }
    server.step();
    server.end();
}
