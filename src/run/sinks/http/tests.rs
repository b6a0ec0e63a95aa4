//! Against a server that says what it is told to.

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// A server that gives its answers in turn, the last one to all further requests.
struct Server {
    url: String,
    is_done: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Value>>,
}

impl Server {
    fn start(answers: &'static [&'static str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("http://{}/metrics", listener.local_addr().unwrap());
        let is_done = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&is_done);
        let thread = std::thread::spawn(move || {
            let mut bodies = Vec::new();
            loop {
                // Looked at first: what was sent before it was set is waiting to be accepted.
                let is_last = until.load(Ordering::SeqCst);
                match listener.accept() {
                    Ok((stream, _)) => {
                        let answer = answers.get(bodies.len()).or_else(|| answers.last());
                        bodies.push(answer_one(stream, answer.unwrap()));
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock && !is_last => {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return bodies,
                    Err(error) => panic!("{error}"),
                }
            }
        });
        Self {
            url,
            is_done,
            thread,
        }
    }

    /// Returns the bodies of all requests that were made.
    fn requests(self) -> Vec<Value> {
        self.is_done.store(true, Ordering::SeqCst);
        self.thread.join().unwrap()
    }
}

fn answer_one(stream: TcpStream, status: &str) -> Value {
    stream.set_nonblocking(false).unwrap();
    let mut reader = BufReader::new(stream);
    let mut length = 0;
    for line in reader.by_ref().lines() {
        let line = line.unwrap().to_ascii_lowercase();
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.parse().unwrap();
        }
        if line.is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    reader.get_mut().write_all(answer.as_bytes()).unwrap();
    serde_json::from_slice(&body).unwrap()
}

/// Logs rows for these steps and ends the run.
fn log_all(server: &Server, steps: std::ops::RangeInclusive<usize>) {
    let mut sink = HttpSink::new(&server.url, "first");
    for step in steps {
        sink.log(json!({"step": step, "reward": 0.5}).as_object().unwrap());
    }
}

fn rows(body: &Value) -> usize {
    body["rows"].as_array().unwrap().len()
}

#[test]
fn rows_arrive_though_a_try_fails() {
    for first in [
        "503 Service Unavailable",
        "408 Request Timeout",
        "429 Too Many Requests",
        "429 Too Many Requests\r\nretry-after: 0",
        "429 Too Many Requests\r\nretry-after: Wed, 21 Oct 2026 07:28:00 GMT",
    ] {
        let server = Server::start(vec![first, "200 OK"].leak());
        log_all(&server, 1..=2);
        let sent = json!({"run": "first", "rows": [
            {"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.5}
        ]});
        assert_eq!(server.requests(), [sent.clone(), sent], "{first}");
    }
}

#[test]
fn a_refusal_is_not_tried_again() {
    let server = Server::start(&["401 Unauthorized", "200 OK"]);
    log_all(&server, 1..=1);
    assert_eq!(server.requests().len(), 1);
}

/// Followed, it would be a request without the rows, whose answer says that all is well.
#[test]
fn rows_do_not_follow_a_redirect_and_its_place_is_told() {
    for status in ["302 Found", "308 Permanent Redirect"] {
        let answer = format!("{status}\r\nlocation: /other");
        let server = Server::start(vec![&*answer.leak(), "200 OK"].leak());
        let (_open, is_open) = channel();
        let poster = Poster::new(&server.url, "first", None, is_open);
        let error = poster.post(r#"{"rows": []}"#).unwrap_err().to_string();
        let expected = format!("status {}, to send them to `/other`", &status[..3]);
        assert!(error.contains(&expected), "{error}");
        assert_eq!(server.requests().len(), 1, "{status}");
    }
    let server = Server::start(&["304 Not Modified", "200 OK"]);
    log_all(&server, 1..=1);
    assert_eq!(server.requests().len(), 1, "it has not taken them");
}

#[test]
fn who_asks_for_no_pause_is_given_the_usual_one() {
    let server = Server::start(&["429 Too Many Requests\r\nretry-after: 0"]);
    let started = Instant::now();
    log_all(&server, 1..=1);
    assert!(started.elapsed() >= PAUSE + 2 * PAUSE, "{started:?}");
    assert_eq!(server.requests().len(), TRIES as usize);
}

#[test]
fn a_server_says_how_long_to_wait() {
    let server = Server::start(&["429 Too Many Requests\r\nretry-after: 1", "200 OK"]);
    let started = Instant::now();
    log_all(&server, 1..=1);
    assert!(
        started.elapsed() >= Duration::from_secs(1),
        "{started:?}: the usual pause is shorter"
    );
    assert_eq!(server.requests().len(), 2);
    let server = Server::start(&["503 Service Unavailable\r\nretry-after: 86400", "200 OK"]);
    let started = Instant::now();
    log_all(&server, 1..=1);
    assert!(
        started.elapsed() < LONGEST_PAUSE,
        "the end of a run does not wait for long"
    );
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn the_end_of_a_run_waits_for_one_failure_only() {
    let server = Server::start(&["500 Internal Server Error"]);
    log_all(&server, 1..=3 * BATCH);
    let requests = server.requests();
    assert_eq!(requests.len(), TRIES as usize, "one batch, all its tries");
    assert!(requests.iter().all(|body| rows(body) == BATCH));
    // One that fails once at the end gets the rest all the same.
    let server = Server::start(&["500 Internal Server Error", "200 OK"]);
    log_all(&server, 1..=BATCH + 1);
    let sizes: Vec<usize> = server.requests().iter().map(rows).collect();
    assert_eq!(sizes, [BATCH, BATCH, 1]);
}

#[test]
fn the_first_row_of_a_request_does_not_wait_for_a_steady_trickle() {
    let (sender, received) = sync_channel(QUEUE);
    let trickle = std::thread::spawn(move || {
        let mut sent = 0;
        while sent < 100 && sender.send(json!({"step": sent})).is_ok() {
            sent += 1;
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let first = next_batch(&received, Duration::from_millis(200)).unwrap();
    assert!(!first.is_empty() && first.len() < 50, "{}", first.len());
    drop(received);
    trickle.join().unwrap();
}
