//! The worker's side: one runtime, and a thread for each connection.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use super::pass::receive_connection;
use super::received_snapshot;
use super::wire::{Answer, Call, Frame, Hello};
use crate::sandbox::{
    Cancel, Dialogue, ExecRequest, Guest, Message, RuntimeOptions, Sandbox as _, SandboxError,
    Session, WasmRuntime,
};

/// Cancellations that are remembered for programs which have not begun.
const MAX_CANCELLED: usize = 1024;

/// Serves the process that started this one, over the socket that is its standard input, until
/// that process closes it.
///
/// # Errors
///
/// Returns an error if standard input is not such a socket, or no thread can be started.
pub fn serve_parent() -> io::Result<()> {
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let hello = Frame::<Hello>::read(&mut &control)?;
    let runtime = match load(hello) {
        Ok(runtime) => {
            reply(&control, Answer::Done)?;
            runtime
        }
        Err(error) => return reply(&control, Answer::Fault(error.into())),
    };
    let worker = Arc::new(Worker {
        runtime,
        sessions: Mutex::default(),
        programs: Mutex::default(),
    });
    // The end of the control connection ends the process, whatever its guests are doing.
    while let Some(connection) = receive_connection(&control)? {
        let worker = Arc::clone(&worker);
        std::thread::Builder::new()
            .name("wardian-worker".to_owned())
            .spawn(move || worker.serve(connection))?;
    }
    Ok(())
}

fn reply(connection: &UnixStream, head: Answer) -> io::Result<()> {
    let blobs = Vec::new();
    Frame { head, blobs }.write(&mut &*connection)
}

fn load(hello: Frame<Hello>) -> Result<WasmRuntime, SandboxError> {
    let cache = hello.head.cache_folder();
    let mut blobs = hello.blobs.into_iter();
    let stdin = blobs.next().unwrap_or_default();
    let guest = match blobs.next() {
        _ if hello.head.is_science => Guest::science(&cache)?,
        Some(module) => Guest::new(module, stdin),
        None => Guest::embedded(stdin),
    };
    let options = RuntimeOptions {
        guest,
        cache,
        max_instances: hello.head.max_instances,
        restore: hello.head.restore,
        audit_every: hello.head.audit_every,
        meter: hello.head.meter,
    };
    WasmRuntime::load(
        &options,
        |progress| tracing::info!(%progress, "worker is loading"),
    )
}

struct Worker {
    runtime: WasmRuntime,
    sessions: Mutex<HashMap<u64, Arc<Mutex<Session>>>>,
    programs: Mutex<Programs>,
}

/// The programs that run, and how they are cancelled.
#[derive(Default)]
struct Programs {
    running: HashMap<u64, Cancel>,
    /// Cancelled while they did not run: they may be on their way, or over.
    cancelled: VecDeque<u64>,
}

impl Programs {
    fn cancel(&mut self, number: u64) {
        if let Some(cancel) = self.running.get(&number) {
            cancel.cancel();
            return;
        }
        if self.cancelled.len() == MAX_CANCELLED {
            self.cancelled.pop_front();
        }
        self.cancelled.push_back(number);
    }
}

/// A program in [`Programs`], until this is dropped.
struct Running<'a> {
    worker: &'a Worker,
    number: u64,
    cancel: Cancel,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        locked(&self.worker.programs).running.remove(&self.number);
    }
}

impl Worker {
    /// Answers one caller's questions, one after the other.
    fn serve(&self, connection: OwnedFd) {
        let connection = UnixStream::from(connection);
        // A caller that went away ends its thread, not the worker.
        while let Ok(call) = Frame::read(&mut &connection) {
            let answer = self.answer(call).unwrap_or_else(|error| Frame {
                head: Answer::Fault(error.into()),
                blobs: Vec::new(),
            });
            if answer.write(&mut &connection).is_err() {
                return;
            }
        }
    }

    fn answer(&self, call: Frame<Call>) -> Result<Frame<Answer>, SandboxError> {
        let mut blobs = call.blobs.into_iter();
        let mut blob = || blobs.next().unwrap_or_default();
        let done = |head| Frame {
            head,
            blobs: Vec::new(),
        };
        Ok(match call.head {
            Call::Exec {
                number,
                request,
                limits,
            } => {
                let request = join(request, [blob(), blob()])?;
                let running = self.begin(number);
                let outcome = self
                    .runtime
                    .exec_cancellable(&request, &limits, &running.cancel);
                Answer::outcome(outcome?, true)
            }
            Call::Converse {
                callee,
                round,
                max_rounds,
                caller,
            } => {
                let outcome = self.runtime.converse(&Dialogue {
                    callee: Message {
                        limits: callee,
                        bytes: blob(),
                    },
                    proceed_on: blob(),
                    round,
                    max_rounds,
                    caller: Message {
                        limits: caller,
                        bytes: blob(),
                    },
                })?;
                done(Answer::Dialogue(Box::new(outcome)))
            }
            Call::Open { session, limits } => {
                self.keep(session, self.runtime.session(&limits)?);
                done(Answer::Done)
            }
            Call::Step {
                number,
                session,
                request,
            } => {
                let request = join(request, [blob(), blob()])?;
                let session = self.session(session)?;
                let mut session = locked(&session);
                let running = self.begin(number);
                let outcome = session.step_cancellable(&request, &running.cancel)?;
                Answer::outcome(outcome, session.ended().is_some())
            }
            Call::Fork { session, children } => {
                let session = self.session(session)?;
                let forked = locked(&session).fork(children.len())?;
                for (id, child) in children.into_iter().zip(forked) {
                    self.keep(id, child);
                }
                done(Answer::Done)
            }
            Call::Snapshot { session } => {
                let session = self.session(session)?;
                let snapshot = locked(&session).snapshot()?;
                Frame {
                    head: Answer::Snapshot,
                    blobs: vec![snapshot.to_bytes().map_err(|error| in_transit(&error))?],
                }
            }
            Call::Resume { session, limits } => {
                let snapshot = received_snapshot(&blob())?;
                self.keep(session, self.runtime.resume(&snapshot, &limits)?);
                done(Answer::Done)
            }
            Call::Close { session } => {
                locked(&self.sessions).remove(&session);
                done(Answer::Done)
            }
            Call::Cancel { number } => {
                locked(&self.programs).cancel(number);
                done(Answer::Done)
            }
        })
    }

    fn begin(&self, number: u64) -> Running<'_> {
        let cancel = Cancel::new();
        let mut programs = locked(&self.programs);
        if programs.cancelled.contains(&number) {
            cancel.cancel();
        }
        programs.running.insert(number, cancel.clone());
        Running {
            worker: self,
            number,
            cancel,
        }
    }

    fn keep(&self, id: u64, session: Session) {
        locked(&self.sessions).insert(id, Arc::new(Mutex::new(session)));
    }

    fn session(&self, id: u64) -> Result<Arc<Mutex<Session>>, SandboxError> {
        locked(&self.sessions)
            .get(&id)
            .cloned()
            .ok_or(SandboxError::SessionLost)
    }
}

/// Puts a request together.
fn join(head: ExecRequest, [code, stdin]: [Vec<u8>; 2]) -> Result<ExecRequest, SandboxError> {
    let text = |bytes| {
        String::from_utf8(bytes).map_err(|error| SandboxError::Worker {
            message: format!("a program was damaged on its way: {error}"),
        })
    };
    Ok(ExecRequest {
        code: text(code)?,
        stdin: text(stdin)?,
        ..head
    })
}

fn in_transit(error: &io::Error) -> SandboxError {
    SandboxError::Worker {
        message: format!("a snapshot was damaged on its way: {error}"),
    }
}

/// Locks, also after a panic elsewhere: a session is whole between two steps.
fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
