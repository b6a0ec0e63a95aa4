//! Rows sent to a server.

use std::convert::Infallible;
use std::sync::mpsc::{
    Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, TrySendError, channel,
    sync_channel,
};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use ureq::http::header;

use super::{Row, Sink};
use crate::address::shown;
use crate::http::{asked_pause, may_pass};

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
/// The longest pause that a server is granted: during the run, and at its end.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
const LONGEST_LAST_PAUSE: Duration = Duration::from_secs(5);
/// The environment variable with a bearer token for the server.
const TOKEN: &str = "WARDIAN_LOG_TOKEN";

/// Posts `{"run": NAME, "rows": [...]}`, rows as in `metrics.jsonl`, from a thread of its own. What is
/// not sent when the run ends is sent then, up to the first request that fails all its tries.
#[derive(Debug)]
pub(super) struct HttpSink {
    rows: Option<SyncSender<Value>>,
    /// Nothing is sent through it: it is dropped to say that the run has ended.
    open: Option<Sender<Infallible>>,
    sender: Option<JoinHandle<()>>,
    dropped: u64,
}

impl HttpSink {
    pub(super) fn new(url: &str, run: &str) -> Self {
        let (rows, received) = sync_channel(QUEUE);
        let (open, is_open) = channel();
        let poster = Poster::new(url, run, std::env::var(TOKEN).ok(), is_open);
        let sender = std::thread::Builder::new()
            .name("metrics-http".to_owned())
            .spawn(move || poster.send_all(&received));
        if let Err(error) = &sender {
            tracing::warn!(%error, "no metrics are sent to the server");
        }
        Self {
            rows: Some(rows),
            open: Some(open),
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
        drop(self.open.take());
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

/// Collects the rows of the next request: what comes within `linger` of the first. Returns `None` when
/// there will be no more.
fn next_batch(received: &Receiver<Value>, linger: Duration) -> Option<Vec<Value>> {
    let mut rows = vec![received.recv().ok()?];
    let until = Instant::now() + linger;
    while rows.len() < BATCH {
        match received.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(row) => rows.push(row),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    Some(rows)
}

/// Why a server has not taken rows.
#[derive(Debug, thiserror::Error)]
enum PostError {
    /// They are to be sent elsewhere.
    #[error("it answered with status {status}, to send them to `{place}`; give that as `log.http`")]
    Elsewhere { status: u16, place: String },
    /// It did not take them.
    #[error("it answered with status {status}")]
    Status { status: u16 },
    /// It was not reached.
    #[error(transparent)]
    Unreached(#[from] ureq::Error),
}

/// What sends the rows.
struct Poster {
    agent: ureq::Agent,
    url: String,
    run: String,
    token: Option<String>,
    /// Disconnected once the run has ended.
    is_open: Receiver<Infallible>,
}

impl Poster {
    fn new(url: &str, run: &str, token: Option<String>, is_open: Receiver<Infallible>) -> Self {
        // What is not encrypted is for nobody but the server, a token above all.
        let is_encrypted = url.starts_with("https://");
        let proxy = is_encrypted.then(ureq::Proxy::try_from_env).flatten();
        let config = ureq::Agent::config_builder()
            .proxy(proxy)
            .timeout_global(Some(TIMEOUT))
            // An answer's headers say when to try again.
            .http_status_as_error(false)
            // A redirect would become a request without the rows, and a token is for one server.
            .max_redirects(0)
            .build();
        Self {
            agent: ureq::Agent::new_with_config(config),
            url: url.to_owned(),
            run: run.to_owned(),
            token,
            is_open,
        }
    }

    fn has_ended(&self) -> bool {
        self.is_open.try_recv() == Err(TryRecvError::Disconnected)
    }

    /// Sends rows until there will be no more, or until the run has ended and the server fails.
    fn send_all(&self, received: &Receiver<Value>) {
        while let Some(rows) = next_batch(received, LINGER) {
            let count = rows.len();
            let body = json!({"run": self.run, "rows": rows}).to_string();
            let Err(error) = self.post(&body) else {
                continue;
            };
            if self.has_ended() {
                // The run's end waits for this.
                let rows = count + received.iter().count();
                tracing::warn!(%error, rows, "the run has ended and these rows are not sent");
                return;
            }
            tracing::warn!(%error, rows = count, "the server did not take these rows");
        }
    }

    fn post(&self, body: &str) -> Result<(), PostError> {
        let mut tried = 0;
        loop {
            let mut request = (self.agent.post(&self.url)).content_type("application/json");
            if let Some(token) = &self.token {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            tried += 1;
            let (error, pause) = match request.send(body) {
                Ok(answer) => {
                    let status = answer.status();
                    if status.is_success() {
                        return Ok(());
                    }
                    let error = match answer.headers().get(header::LOCATION) {
                        Some(place) if status.is_redirection() => PostError::Elsewhere {
                            status: status.as_u16(),
                            place: shown(&String::from_utf8_lossy(place.as_bytes())),
                        },
                        _ => PostError::Status {
                            status: status.as_u16(),
                        },
                    };
                    if !may_pass(status) {
                        return Err(error);
                    }
                    (error, asked_pause(answer.headers()))
                }
                Err(error) => (error.into(), None),
            };
            if tried == TRIES {
                return Err(error);
            }
            // Who asks for no pause, or a short one, gets the usual one all the same.
            self.pause(pause.unwrap_or_default().max(PAUSE * tried));
        }
    }

    /// Waits before another try: not for long once the run has ended.
    fn pause(&self, pause: Duration) {
        let started = Instant::now();
        let pause = pause.min(LONGEST_PAUSE);
        if self.is_open.recv_timeout(pause) == Err(RecvTimeoutError::Disconnected) {
            let rest = pause.saturating_sub(started.elapsed());
            std::thread::sleep(rest.min(LONGEST_LAST_PAUSE));
        }
    }
}

#[cfg(test)]
mod tests;
