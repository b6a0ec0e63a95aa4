//! Rows sent to a server.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Row, Sink};

/// Rows that wait while the server is slow; more are dropped.
const QUEUE: usize = 4096;
/// Rows of one request.
const BATCH: usize = 256;
/// How long the first row of a request waits for others.
const LINGER: Duration = Duration::from_secs(1);
/// The time a request may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The tries of a request, and the pause before the second.
const TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(500);
/// The environment variable with a bearer token for the server.
const TOKEN: &str = "WARDIAN_LOG_TOKEN";

/// Posts `{"run": NAME, "rows": [...]}`, rows as in `metrics.jsonl`, from a thread of its own. What is
/// not sent when the run ends is sent then, for as long as requests may take.
#[derive(Debug)]
pub(super) struct HttpSink {
    rows: Option<SyncSender<Value>>,
    sender: Option<JoinHandle<()>>,
    dropped: u64,
}

impl HttpSink {
    pub(super) fn new(url: &str, run: &str) -> Self {
        let (rows, received) = sync_channel(QUEUE);
        let (url, run) = (url.to_owned(), run.to_owned());
        let token = std::env::var(TOKEN).ok();
        let sender = std::thread::Builder::new()
            .name("metrics-http".to_owned())
            .spawn(move || send_all(&received, &url, &run, token.as_deref()));
        if let Err(error) = &sender {
            tracing::warn!(%error, "no metrics are sent to the server");
        }
        Self {
            rows: Some(rows),
            sender: sender.ok(),
            dropped: 0,
        }
    }
}

impl Sink for HttpSink {
    fn log(&mut self, row: &Row) {
        let Some(rows) = &self.rows else { return };
        if let Err(TrySendError::Full(_)) = rows.try_send(Value::Object(row.clone())) {
            self.dropped += 1;
        }
    }
}

impl Drop for HttpSink {
    fn drop(&mut self) {
        drop(self.rows.take());
        if let Some(sender) = self.sender.take() {
            let _ = sender.join();
        }
        if self.dropped > 0 {
            tracing::warn!(
                rows = self.dropped,
                "the server was too slow for these rows"
            );
        }
    }
}

/// Sends rows until there will be no more.
fn send_all(received: &Receiver<Value>, url: &str, run: &str, token: Option<&str>) {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(TIMEOUT))
        .build();
    let agent = ureq::Agent::new_with_config(config);
    while let Ok(first) = received.recv() {
        let mut rows = vec![first];
        while rows.len() < BATCH {
            match received.recv_timeout(LINGER) {
                Ok(row) => rows.push(row),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        let count = rows.len();
        let body = json!({"run": run, "rows": rows}).to_string();
        if let Err(error) = post(&agent, url, token, &body) {
            tracing::warn!(%error, rows = count, "the server did not take these rows");
        }
    }
}

fn post(
    agent: &ureq::Agent,
    url: &str,
    token: Option<&str>,
    body: &str,
) -> Result<(), ureq::Error> {
    let mut tried = 0;
    loop {
        let mut request = agent.post(url).content_type("application/json");
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        tried += 1;
        match request.send(body) {
            Ok(_) => return Ok(()),
            // What the server understood and refused, it refuses again.
            Err(error @ ureq::Error::StatusCode(400..=499)) => return Err(error),
            Err(error) if tried == TRIES => return Err(error),
            Err(_) => std::thread::sleep(PAUSE * tried),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    use std::net::TcpListener;

    use super::*;

    /// Answers requests with `answers` in turn and returns their bodies.
    fn serve(listener: TcpListener, answers: Vec<&'static str>) -> JoinHandle<Vec<Value>> {
        std::thread::spawn(move || {
            let answer = |status: &&str| {
                let (stream, _) = listener.accept().unwrap();
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
                let answer =
                    format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                reader.get_mut().write_all(answer.as_bytes()).unwrap();
                serde_json::from_slice(&body).unwrap()
            };
            answers.iter().map(answer).collect()
        })
    }

    #[test]
    fn rows_arrive_though_a_try_fails() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/metrics", listener.local_addr().unwrap());
        let server = serve(listener, vec!["503 Service Unavailable", "200 OK"]);
        let mut sink = HttpSink::new(&url, "first");
        for step in 1..=2 {
            sink.log(json!({"step": step, "reward": 0.5}).as_object().unwrap());
        }
        drop(sink);
        let sent = json!({"run": "first", "rows": [
            {"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.5}
        ]});
        assert_eq!(server.join().unwrap(), [sent.clone(), sent]);
    }

    #[test]
    fn a_server_that_refuses_ends_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let server = serve(listener, vec!["401 Unauthorized"]);
        let mut sink = HttpSink::new(&url, "first");
        sink.log(json!({"step": 1}).as_object().unwrap());
        drop(sink);
        assert_eq!(
            server.join().unwrap().len(),
            1,
            "a refusal is not tried again"
        );
    }
}
