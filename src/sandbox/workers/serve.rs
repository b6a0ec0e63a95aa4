//! The worker's side: one runtime, and a thread for each connection.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use super::pass::receive_connection;
use super::wire::{Answer, Call, Frame, Hello};
use crate::sandbox::{
    Dialogue, Guest, Message, RuntimeOptions, Sandbox as _, SandboxError, Session, Snapshot,
    WasmRuntime,
};

/// The largest snapshot that is resumed, packed or unpacked.
const MAX_SNAPSHOT: u64 = 5 << 30;

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
            Call::Exec { request, limits } => {
                Answer::outcome(self.runtime.exec(&request, &limits)?, true)
            }
            Call::Converse { callee, caller } => {
                let outcome = self.runtime.converse(&Dialogue {
                    callee: Message {
                        limits: callee,
                        bytes: blob(),
                    },
                    proceed_on: blob(),
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
            Call::Step { session, request } => {
                let session = self.session(session)?;
                let mut session = locked(&session);
                let outcome = session.step(&request)?;
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
                let snapshot = Snapshot::from_bytes(&blob(), MAX_SNAPSHOT)
                    .map_err(|error| in_transit(&error))?;
                self.keep(session, self.runtime.resume(&snapshot, &limits)?);
                done(Answer::Done)
            }
            Call::Close { session } => {
                locked(&self.sessions).remove(&session);
                done(Answer::Done)
            }
        })
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

fn in_transit(error: &io::Error) -> SandboxError {
    SandboxError::Worker {
        message: format!("a snapshot was damaged on its way: {error}"),
    }
}

/// Locks, also after a panic elsewhere: a session is whole between two steps.
fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
