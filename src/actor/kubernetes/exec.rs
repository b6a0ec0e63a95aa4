//! Programs in a pod's container, by `pods/exec` over a WebSocket.
//!
//! The first byte of a message is its channel: 0 is the input, 1 and 2 are the outputs, 3 is the `Status`
//! that ends it. Input and output are carried side by side, so that neither waits for the other.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use kube::api::{AttachParams, Request};
use kube::client::Connection;
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::cluster::Link;
use super::mark::{Filter, Mark};
use super::retry::{causes, patiently_once};
use super::template::CONTAINER;
use crate::actor::{ActorError, Captured};
use crate::process::Kept;

/// Bytes of input in one message.
const PIECE: usize = 32 << 10;
/// Time between messages that say nothing, so that nobody on the way takes the connection for dead.
const IDLE: Duration = Duration::from_secs(20);
/// How long a program's output and its status may take once it has said that it has ended.
const DRAIN: Duration = Duration::from_millis(300);
/// How long killing a sandbox's processes may take.
const KILL: Duration = Duration::from_secs(10);
/// How long a program may take to end once it was killed.
const GRACE: Duration = Duration::from_secs(5);
/// Kills everybody but the first process and itself; whoever forks meanwhile is met in a later round.
const KILL_ALL: &str = "for round in 1 2 3 4 5; do kill -9 -1; done 2>/dev/null; exit 0";

/// The channels of a connection.
const INPUT: u8 = 0;
const OUTPUT: u8 = 1;
const ERROR: u8 = 2;
const STATUS: u8 = 3;
/// Terminal sizes, which nobody listens to without a terminal.
const RESIZE: u8 = 4;
/// Ends the channel that follows.
const CLOSE: u8 = 255;

/// How a program ended, or the connection to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// The program ended by itself.
    Exited(i32),
    /// It could not be started or followed, as the server says.
    Refused(String),
    /// The connection ended first.
    Cut(String),
}

/// What is kept of a program's output while it runs.
#[derive(Debug, Clone)]
pub(super) struct Streams(Arc<Mutex<(Kept, Kept)>>);

impl Streams {
    pub(super) fn new(max: usize) -> Self {
        Self(Arc::new(Mutex::new((Kept::new(max), Kept::new(max)))))
    }

    fn add(&self, channel: u8, bytes: &[u8]) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match channel {
            OUTPUT => kept.0.add(bytes),
            ERROR => kept.1.add(bytes),
            _ => {}
        }
    }

    /// Returns both outputs; what comes then is thrown away.
    pub(super) fn take(&self) -> (Captured, Captured) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (kept.0.take(), kept.1.take())
    }
}

/// What became of a program.
#[derive(Debug)]
pub(super) struct Ran {
    pub(super) end: End,
    /// Whether its time was over first.
    pub(super) timed_out: bool,
    /// Whether it may still be running.
    pub(super) is_loose: bool,
    /// Whether it could not be told to end, by no fault of what runs in the pod.
    pub(super) is_unheard: bool,
}

/// What is run in a pod.
#[derive(Debug)]
pub(super) struct Program {
    /// The program and its arguments.
    pub(super) argv: Vec<String>,
    /// What it can read.
    pub(super) stdin: Vec<u8>,
    /// The line by which it says that it has ended, where it does.
    pub(super) mark: Option<Mark>,
}

/// Runs a program to its end; when its time is over, every process of the container is killed.
///
/// # Errors
///
/// Fails where it has not been started.
pub(super) async fn run(
    link: &Link,
    pod: &str,
    program: Program,
    time: Duration,
    streams: &Streams,
) -> Result<Ran, ActorError> {
    let connection = match open(link, pod, &program.argv, !program.stdin.is_empty()).await? {
        Ok(connection) => connection,
        Err(end) => {
            return Ok(Ran {
                end,
                timed_out: false,
                is_loose: true,
                is_unheard: false,
            });
        }
    };
    let mut carried = Box::pin(carry(connection, program, streams));
    if let Ok(end) = timeout(time, &mut carried).await {
        return Ok(Ran {
            is_loose: matches!(end, End::Cut(_)),
            is_unheard: false,
            end,
            timed_out: false,
        });
    }
    // Output goes on being read: who cannot write it may not end.
    let ended = async { timeout(KILL + GRACE, &mut carried).await };
    let (killed, end) = tokio::join!(timeout(KILL, kill_all(link, pod)), ended);
    let has_ended = matches!(end, Ok(End::Exited(_)));
    Ok(Ran {
        end: end.unwrap_or_else(|_| End::Cut("it did not end when it was killed".to_owned())),
        timed_out: true,
        is_loose: !(has_ended && matches!(killed, Ok(Ok(true)))),
        is_unheard: matches!(killed, Ok(Err(_))),
    })
}

/// Returns whether the processes of a pod were killed.
///
/// # Errors
///
/// Fails where that could not be asked for.
async fn kill_all(link: &Link, pod: &str) -> Result<bool, ActorError> {
    let program = Program {
        argv: ["/bin/sh", "-c", KILL_ALL].map(str::to_owned).to_vec(),
        stdin: Vec::new(),
        mark: None,
    };
    let end = match open(link, pod, &program.argv, false).await? {
        Ok(connection) => carry(connection, program, &Streams::new(1 << 10)).await,
        Err(end) => end,
    };
    Ok(end == End::Exited(0))
}

/// Starts a program. It is started once at most: a request that may have arrived is not repeated, and is
/// told as a connection that was cut.
async fn open(
    link: &Link,
    pod: &str,
    argv: &[String],
    has_input: bool,
) -> Result<Result<Connection, End>, ActorError> {
    let activity = "starting a program";
    let requests = Request::new(format!("/api/v1/namespaces/{}/pods", link.namespace));
    let params = AttachParams {
        container: Some(CONTAINER.to_owned()),
        stdin: has_input,
        stdout: true,
        stderr: true,
        tty: false,
        ..AttachParams::default()
    };
    let opened = patiently_once(activity, link.limit, || async {
        let request = requests
            .exec(pod, argv.iter().cloned(), &params)
            .map_err(kube::Error::BuildRequest)?;
        match timeout(link.limit, link.client.connect(request)).await {
            Ok(Err(error)) if may_have_arrived(&error) => Ok(Err(causes(&error))),
            Ok(Err(error)) => Err(error),
            Ok(Ok(connection)) => Ok(Ok(connection)),
            Err(_) => Ok(Err("there was no answer".to_owned())),
        }
    })
    .await?;
    let connection = match opened {
        Ok(connection) => connection,
        Err(why) => return Ok(Err(End::Cut(why))),
    };
    match connection.supports_stream_close() || !has_input {
        true => Ok(Ok(connection)),
        false => Err(ActorError::Backend {
            activity: activity.to_owned(),
            message:
                "the server cannot end a program's input: it does not speak `v5.channel.k8s.io`; \
                      take Kubernetes 1.30 or later"
                    .to_owned(),
        }),
    }
}

/// Whether a request may have had its effect although there is no answer of the server's own.
fn may_have_arrived(error: &kube::Error) -> bool {
    if let kube::Error::Api(status) = error {
        return matches!(status.code, 408 | 502 | 504);
    }
    let is_transport = matches!(error, kube::Error::HyperError(_) | kube::Error::Service(_));
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = next {
        let io = cause.downcast_ref::<std::io::Error>();
        if io.is_some_and(|io| io.kind() == std::io::ErrorKind::ConnectionRefused) {
            return false;
        }
        next = cause.source();
    }
    is_transport
}

/// Carries input and output until the program has ended or the connection has.
async fn carry(connection: Connection, program: Program, streams: &Streams) -> End {
    let (mut sink, mut stream) = connection.into_stream().split();
    let stdin = program.stdin;
    let write = async move {
        for piece in stdin.chunks(PIECE) {
            let message = [&[INPUT], piece].concat();
            // Who does not read it to its end has its reasons.
            if sink.send(message.into()).await.is_err() {
                break;
            }
        }
        if !stdin.is_empty() {
            let _ = sink.send(vec![CLOSE, INPUT].into()).await;
        }
        drop(stdin);
        loop {
            sleep(IDLE).await;
            let _ = sink.send(vec![RESIZE].into()).await;
        }
    };
    let mut filter = program.mark.as_ref().map(Filter::new);
    let read = async {
        // What the program has said of its end, and until when more is waited for.
        let mut said: Option<(i32, Instant)> = None;
        loop {
            let next = match said {
                Some((code, until)) => match timeout_at(until, stream.next()).await {
                    Ok(next) => next,
                    Err(_) => return End::Exited(code),
                },
                None => stream.next().await,
            };
            let message = match next {
                Some(Ok(message)) if message.is_binary() => message.into_data(),
                Some(Ok(_)) => continue,
                ended => {
                    return match (said, ended) {
                        (Some((code, _)), _) => End::Exited(code),
                        (None, Some(Err(error))) => End::Cut(causes(&error)),
                        (None, _) => End::Cut("the connection ended before the program".to_owned()),
                    };
                }
            };
            match (message.split_first(), &mut filter) {
                (Some((&STATUS, status)), _) => return parse(status),
                (Some((&ERROR, bytes)), Some(filter)) => {
                    if let Some(code) = filter.add(bytes, |kept| streams.add(ERROR, kept)) {
                        said = Some((code, Instant::now() + DRAIN));
                    }
                }
                (Some((&channel, bytes)), _) => streams.add(channel, bytes),
                (None, _) => {}
            }
        }
    };
    let end = tokio::select! {
        end = read => end,
        () = write => End::Cut("the connection has no end".to_owned()),
    };
    if let Some(filter) = &mut filter {
        filter.finish(|kept| streams.add(ERROR, kept));
    }
    end
}

/// Reads the status that ends a program.
fn parse(status: &[u8]) -> End {
    let Ok(status) = serde_json::from_slice::<Value>(status) else {
        return End::Cut("the status of the program is no JSON".to_owned());
    };
    if status["status"] == "Success" {
        return End::Exited(0);
    }
    let causes = status.pointer("/details/causes").and_then(Value::as_array);
    let code = causes.and_then(|causes| {
        let cause = causes.iter().find(|cause| cause["reason"] == "ExitCode")?;
        cause["message"].as_str()?.parse().ok()
    });
    match code {
        Some(code) => End::Exited(code),
        None => End::Refused(
            status["message"]
                .as_str()
                .unwrap_or("no message")
                .to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_says_how_a_program_ended() {
        let failure = br#"{"metadata":{},"status":"Failure","message":"command terminated with non-zero exit code",
            "reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"7"}]}}"#;
        assert_eq!(parse(failure), End::Exited(7));
        assert_eq!(
            parse(br#"{"metadata":{},"status":"Success"}"#),
            End::Exited(0)
        );
        let refused =
            br#"{"status":"Failure","message":"no such file","reason":"InternalError","code":500}"#;
        assert_eq!(parse(refused), End::Refused("no such file".to_owned()));
        assert!(matches!(parse(b"{"), End::Cut(_)));
        assert!(matches!(parse(b"7"), End::Refused(_)));
    }
}
