//! One worker process, started anew when it dies.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::WorkerOptions;
use super::pass::new_connection;
use super::wire::{Answer, Call, Frame, Hello};
use crate::sandbox::SandboxError;
use crate::sandbox::guest::Source;

/// The time in which a worker loads its runtime, which may have to be prepared.
const START: Duration = Duration::from_secs(300);

/// A worker, as a place that always has a process behind it.
#[derive(Debug)]
pub(super) struct Process {
    options: WorkerOptions,
    calls: AtomicUsize,
    running: Mutex<Running>,
}

#[derive(Debug)]
struct Running {
    child: Child,
    control: UnixStream,
    /// Counts the processes in this place.
    generation: u64,
    /// Connections that no caller uses.
    idle: Vec<UnixStream>,
}

/// Why a worker gave no answer.
#[derive(Debug)]
pub(super) enum Unreached {
    /// It died, or was killed as it did not answer in time.
    Died(String),
    /// It could not be asked.
    Fault(SandboxError),
}

impl Process {
    pub(super) fn start(options: &WorkerOptions) -> Result<Self, SandboxError> {
        let running = Running::start(options, 0)?;
        Ok(Self {
            options: options.clone(),
            calls: AtomicUsize::new(0),
            running: Mutex::new(running),
        })
    }

    pub(super) fn id(&self) -> u32 {
        self.running().child.id()
    }

    pub(super) fn calls_under_way(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    /// Asks the worker, of the generation that is `wanted` if one is, and returns its generation
    /// with the answer.
    pub(super) fn ask(
        &self,
        wanted: Option<u64>,
        call: &Frame<Call>,
        patience: Duration,
    ) -> Result<(u64, Frame<Answer>), Unreached> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let answer = self.ask_uncounted(wanted, call, patience);
        self.calls.fetch_sub(1, Ordering::Relaxed);
        answer
    }

    fn ask_uncounted(
        &self,
        wanted: Option<u64>,
        call: &Frame<Call>,
        patience: Duration,
    ) -> Result<(u64, Frame<Answer>), Unreached> {
        let (generation, connection) = self.connection(wanted)?;
        let ask = || {
            connection.set_write_timeout(Some(patience))?;
            connection.set_read_timeout(Some(patience))?;
            call.write(&mut &connection)?;
            Frame::read(&mut &connection)
        };
        match ask() {
            Ok(answer) => {
                let mut running = self.running();
                if running.generation == generation {
                    running.idle.push(connection);
                }
                Ok((generation, answer))
            }
            // Nothing was sent, so the worker is as it was.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                Err(Unreached::Fault(SandboxError::Worker {
                    message: error.to_string(),
                }))
            }
            Err(error) => {
                let reason = match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                        format!("no answer within {patience:?}")
                    }
                    _ => error.to_string(),
                };
                self.replace(generation, &reason)?;
                Err(Unreached::Died(reason))
            }
        }
    }

    /// Takes a connection to the worker. One that is found dead is replaced first.
    fn connection(&self, wanted: Option<u64>) -> Result<(u64, UnixStream), Unreached> {
        let mut running = self.running();
        if let Ok(Some(status)) = running.child.try_wait() {
            let generation = running.generation;
            drop(running);
            self.replace(generation, &status.to_string())?;
            running = self.running();
        }
        if wanted.is_some_and(|wanted| wanted != running.generation) {
            return Err(Unreached::Fault(SandboxError::SessionLost));
        }
        let connection = match running.idle.pop() {
            Some(connection) => connection,
            None => new_connection(&running.control)
                .map_err(|error| Unreached::Died(error.to_string()))?,
        };
        Ok((running.generation, connection))
    }

    /// Ends the worker of `generation` and starts its successor, unless that has been done.
    fn replace(&self, generation: u64, reason: &str) -> Result<(), Unreached> {
        let mut running = self.running();
        if running.generation != generation {
            return Ok(());
        }
        let id = running.child.id();
        tracing::error!(id, reason, "a sandbox worker died; starting another one");
        *running = Running::start(&self.options, generation + 1).map_err(Unreached::Fault)?;
        Ok(())
    }

    /// What is locked is replaced as a whole, so it is sound after any panic.
    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Running {
    fn start(options: &WorkerOptions, generation: u64) -> Result<Self, SandboxError> {
        let started = |source| SandboxError::WorkerStart {
            command: options.command.clone(),
            source,
        };
        let (control, theirs) = UnixStream::pair().map_err(started)?;
        let (program, arguments) = options
            .command
            .split_first()
            .ok_or_else(|| started(io::Error::other("the command is empty")))?;
        let child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .map_err(started)?;
        let running = Self {
            child,
            control,
            generation,
            idle: Vec::new(),
        };
        match running.greet(options).map_err(started)?.head {
            Answer::Done => Ok(running),
            answer => Err(super::unexpected(answer)),
        }
    }

    /// Has the worker load its runtime.
    fn greet(&self, options: &WorkerOptions) -> io::Result<Frame<Answer>> {
        let runtime = &options.runtime;
        let mut blobs = Vec::new();
        if let Source::Module(guest) = runtime.guest.source() {
            blobs.push(guest.stdin().to_vec());
            if !guest.is_embedded() {
                blobs.push(guest.module().to_vec());
            }
        }
        let hello = Frame {
            head: Hello {
                is_science: matches!(runtime.guest.source(), Source::Science(_)),
                cache: runtime.cache.path(),
                max_instances: runtime.max_instances,
                restore: runtime.restore,
                audit_every: runtime.audit_every,
                meter: runtime.meter,
            },
            blobs,
        };
        self.control.set_write_timeout(Some(START))?;
        self.control.set_read_timeout(Some(START))?;
        hello.write(&mut &self.control)?;
        Frame::read(&mut &self.control)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may be gone already; then there is only its exit status to collect.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
