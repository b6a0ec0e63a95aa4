//! A session: a task that keeps its socket, and a handle that asks it.
//!
//! The socket is read all the time, so that pings are answered while the policy generates or trains, and
//! an end of the server is known before the next step.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, timeout};
use tokio_tungstenite::tungstenite::Message;

use super::Fault;
use super::connect::Socket;
use super::frames::{self, Reply, shortened};

/// As OpenEnv's own client and server do.
const PING_EVERY: Duration = Duration::from_secs(20);
/// A peer that has said nothing for so long, not even to pings, is gone.
const DEAD_AFTER: Duration = Duration::from_secs(60);
/// How long a farewell may take.
pub(super) const FAREWELL: Duration = Duration::from_secs(1);

/// A frame that is to be answered.
struct Question {
    frame: String,
    limit: Duration,
    /// The key of the limit.
    key: &'static str,
    answer: oneshot::Sender<Result<Reply, Fault>>,
}

/// A session that is open, or was.
#[derive(Debug)]
pub(super) struct Session {
    questions: mpsc::Sender<Question>,
    /// Why it ended, until somebody asks.
    end: Arc<Mutex<Option<Fault>>>,
    task: JoinHandle<()>,
}

impl Session {
    /// Keeps a socket from now on.
    pub(super) fn start(socket: Socket, max_message_bytes: usize) -> Self {
        let (questions, asked) = mpsc::channel(1);
        let end = Arc::default();
        let line = Line::new(socket, max_message_bytes);
        let task = tokio::spawn(keep(line, asked, Arc::clone(&end)));
        Self {
            questions,
            end,
            task,
        }
    }

    /// Ends it. What is returned ends once its server has been told.
    pub(super) fn end(self) -> JoinHandle<()> {
        self.task
    }

    /// Returns whether it can be asked, as far as is known.
    pub(super) fn is_open(&self) -> bool {
        !self.questions.is_closed()
    }

    /// Sends a frame and waits for its answer, which has to come within `limit`.
    pub(super) async fn ask(
        &self,
        frame: String,
        limit: Duration,
        key: &'static str,
    ) -> Result<Reply, Fault> {
        let (answer, answered) = oneshot::channel();
        let question = Question {
            frame,
            limit,
            key,
            answer,
        };
        if self.questions.send(question).await.is_err() {
            return Err(self.why_ended());
        }
        answered.await.unwrap_or_else(|_| Err(self.why_ended()))
    }

    fn why_ended(&self) -> Fault {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        end.take().unwrap_or_else(Fault::closed_without_words)
    }
}

/// Keeps a session's socket until it ends, or nobody asks any more.
async fn keep(
    mut line: Line,
    mut questions: mpsc::Receiver<Question>,
    end: Arc<Mutex<Option<Fault>>>,
) {
    let fault = loop {
        tokio::select! {
            question = questions.recv() => {
                let Some(Question { frame, limit, key, answer }) = question else {
                    line.say_farewell().await;
                    return;
                };
                let answered = timeout(limit, line.exchange(frame)).await;
                let result = answered.unwrap_or(Err(Fault::Late { limit, key }));
                // Behind a deadline the answer to this frame would be taken for that to the next.
                let goes_on = match &result {
                    Ok(_) => true,
                    Err(fault) => fault.leaves_session(),
                };
                if !goes_on {
                    // Before the answer, so that who has it finds the session closed.
                    questions.close();
                }
                let _ = answer.send(result);
                if !goes_on {
                    return;
                }
            }
            heard = line.next() => break match heard {
                // Without a question an answer is none; an error is the reason for the end that follows.
                Ok(text) => match frames::read(&text) {
                    Err(fault) => fault,
                    Ok(_) => Fault::Unexpected {
                        expected: "no frame without a question",
                        found: shortened(&text),
                    },
                },
                Err(fault) => fault,
            }
        }
    };
    *end.lock().unwrap_or_else(PoisonError::into_inner) = Some(fault);
}

/// A socket, and when its peer was heard.
struct Line {
    socket: Socket,
    max_message_bytes: usize,
    heard: Instant,
    pings: Interval,
}

impl Line {
    fn new(socket: Socket, max_message_bytes: usize) -> Self {
        let mut pings = interval_at(Instant::now() + PING_EVERY, PING_EVERY);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            socket,
            max_message_bytes,
            heard: Instant::now(),
            pings,
        }
    }

    /// Sends a frame and returns the answer to it.
    async fn exchange(&mut self, frame: String) -> Result<Reply, Fault> {
        self.send(Message::Text(frame.into())).await?;
        frames::read(&self.next().await?)
    }

    async fn send(&mut self, message: Message) -> Result<(), Fault> {
        let sent = self.socket.send(message).await;
        sent.map_err(|error| Fault::of_socket(error, self.max_message_bytes))
    }

    /// Returns the next text. Pings are answered meanwhile, and sent. Cancel-safe: a message is taken
    /// whole or not at all.
    async fn next(&mut self) -> Result<String, Fault> {
        loop {
            tokio::select! {
                // What came is heard before silence is told.
                biased;
                message = self.socket.next() => {
                    self.heard = Instant::now();
                    match message {
                        Some(Ok(Message::Text(text))) => return Ok(text.as_str().to_owned()),
                        // Reading on sends the answer.
                        Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                        Some(Ok(Message::Binary(bytes))) => return Err(Fault::Unexpected {
                            expected: "a text frame",
                            found: format!("a binary one of {} bytes", bytes.len()),
                        }),
                        Some(Ok(Message::Close(frame))) => return Err(Fault::Closed {
                            code: frame.as_ref().map(|frame| frame.code.into()),
                            reason: frame.map_or_else(String::new, |frame| shortened(&frame.reason)),
                        }),
                        Some(Err(error)) => {
                            return Err(Fault::of_socket(error, self.max_message_bytes));
                        }
                        None => return Err(Fault::closed_without_words()),
                    }
                }
                _ = self.pings.tick() => {
                    let waited = self.heard.elapsed();
                    if waited > DEAD_AFTER {
                        return Err(Fault::Silent { waited });
                    }
                    self.send(Message::Ping(Default::default())).await?;
                }
            }
        }
    }

    /// Tells the server that the session is over.
    async fn say_farewell(&mut self) {
        let farewell = async {
            self.send(Message::Text(frames::close().into())).await?;
            let closed = self.socket.close(None).await;
            closed.map_err(|error| Fault::of_socket(error, self.max_message_bytes))
        };
        // A server that does not listen learns it from the end of the connection.
        let _ = timeout(FAREWELL, farewell).await;
    }
}
