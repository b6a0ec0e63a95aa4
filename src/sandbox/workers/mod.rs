//! Worker processes: the same sandbox, one process per core.
//!
//! Threads of one process share its page tables: when guests write many new pages, restoring one
//! instance holds up all others. Processes do not. And whatever ends a worker, from a signal to a
//! bug in the sandbox itself, ends what runs in it and its sessions, and nothing else. A worker that
//! gives no answer long after a call's deadline is killed.
//!
//! [`Workers`] starts the processes, spreads callers over them, and replaces one that dies. A
//! fresh program that was under way in it runs again elsewhere: it has no effects but its
//! outcome, and nobody has seen that. A session cannot be had again and answers
//! [`SessionLost`](SandboxError::SessionLost).
//!
//! A caller has a connection to a worker for itself while it waits, and the worker a thread for
//! each connection.

mod pass;
mod process;
mod serve;
mod session;
mod wire;

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use process::{Process, Unreached};
pub use serve::serve_parent;
pub(super) use session::WorkerSession;
#[cfg(not(any(fuzzing, test)))]
use wire::Frame;
#[cfg(any(fuzzing, test))]
pub(super) use wire::Frame;
use wire::{Answer, Call};

use super::compiled::Progress;
use super::saved::MAX_IN_TRANSIT;
use super::{
    Cancel, Dialogue, DialogueOutcome, ExecOutcome, ExecRequest, Limits, RuntimeOptions, Sandbox,
    SandboxError, Session, Snapshot, WasmRuntime,
};

/// How much longer than its deadline a call may take before its worker is killed.
const GRACE: Duration = Duration::from_secs(5);
/// The time in which a session is opened, forked, saved or closed.
const SESSION_CALL: Duration = Duration::from_secs(60);
/// The time in which a worker takes note of a cancellation.
const CANCEL_CALL: Duration = Duration::from_secs(10);

/// How to start [`Workers`].
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The number of processes; default one for each core.
    pub count: usize,
    /// The program that is a worker, and its arguments; default this program with
    /// `sandbox-worker`, which calls [`serve_parent`].
    pub command: Vec<OsString>,
    /// The runtime of each worker.
    pub runtime: RuntimeOptions,
}

impl Default for WorkerOptions {
    fn default() -> Self {
        let program = std::env::current_exe().map_or_else(|_| "wardian".into(), Into::into);
        Self {
            count: std::thread::available_parallelism().map_or(1, usize::from),
            command: vec![program, "sandbox-worker".into()],
            runtime: RuntimeOptions::default(),
        }
    }
}

/// A sandbox whose guests run in processes of their own.
///
/// Cheap to clone; may be used by many threads at once. Dropping the last clone and the last
/// session ends the processes.
#[derive(Debug, Clone)]
pub struct Workers {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    processes: Vec<Process>,
    /// Of each worker.
    max_instances: u32,
    /// For sessions and calls.
    next_number: AtomicU64,
}

impl Workers {
    /// Starts the worker processes, after preparing the guest if that is still to be done.
    ///
    /// # Errors
    ///
    /// Returns an error if the guest cannot be prepared or a process cannot be started.
    pub fn start(
        options: &WorkerOptions,
        progress: impl FnMut(Progress),
    ) -> Result<Self, SandboxError> {
        // Once, where progress can be shown, rather than in every worker.
        drop(WasmRuntime::load(&options.runtime, progress)?);
        let processes = (0..options.count.max(1))
            .map(|_| Process::start(options))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            inner: Arc::new(Inner {
                processes,
                max_instances: options.runtime.max_instances,
                next_number: AtomicU64::new(0),
            }),
        })
    }

    /// Runs a program in a fresh interpreter.
    ///
    /// # Errors
    ///
    /// As for [`WasmRuntime::exec`]; also if two workers died while they ran the program.
    pub fn exec(
        &self,
        request: &ExecRequest,
        limits: &Limits,
    ) -> Result<ExecOutcome, SandboxError> {
        self.exec_cancellable(request, limits, &Cancel::new())
    }

    /// As [`Self::exec`], until `cancel` ends it.
    ///
    /// # Errors
    ///
    /// As for [`Self::exec`].
    pub fn exec_cancellable(
        &self,
        request: &ExecRequest,
        limits: &Limits,
        cancel: &Cancel,
    ) -> Result<ExecOutcome, SandboxError> {
        limits.validate()?;
        let number = self.new_number();
        let _telling = cancel.on_cancel(self.canceller(number));
        let (request, blobs) = split(request);
        let call = Frame {
            head: Call::Exec {
                number,
                request,
                limits: limits.clone(),
            },
            blobs,
        };
        // Waiting for an instance may take as long as the program.
        let answer = self.ask_any(&call, limits.deadline * 2 + GRACE)?;
        outcome(answer).map(|(outcome, _)| outcome)
    }

    /// Opens a live interpreter.
    ///
    /// # Errors
    ///
    /// As for [`WasmRuntime::session`].
    pub fn session(&self, limits: &Limits) -> Result<Session, SandboxError> {
        limits.validate()?;
        self.open(limits, |session| Frame {
            head: Call::Open {
                session,
                limits: limits.clone(),
            },
            blobs: Vec::new(),
        })
    }

    /// Opens a live interpreter that goes on where a saved one was.
    ///
    /// # Errors
    ///
    /// As for [`WasmRuntime::resume`].
    pub fn resume(&self, snapshot: &Snapshot, limits: &Limits) -> Result<Session, SandboxError> {
        limits.validate()?;
        let bytes = snapshot.to_bytes().map_err(|source| SandboxError::Worker {
            message: format!("packing a snapshot failed: {source}"),
        })?;
        self.open(limits, |session| Frame {
            head: Call::Resume {
                session,
                limits: limits.clone(),
            },
            blobs: vec![bytes.clone()],
        })
    }

    /// Returns the process ids of the workers, as of now.
    #[must_use]
    pub fn process_ids(&self) -> Vec<u32> {
        self.inner.processes.iter().map(Process::id).collect()
    }

    fn open(
        &self,
        limits: &Limits,
        call: impl Fn(u64) -> Frame<Call>,
    ) -> Result<Session, SandboxError> {
        let id = self.new_number();
        // An open session that nobody has heard of yet can as well be opened elsewhere.
        let (index, generation, answer) = self.ask_any_of(&call(id), SESSION_CALL)?;
        done(answer)?;
        Ok(Session::in_worker(WorkerSession::new(
            self.clone(),
            index,
            generation,
            id,
            limits.clone(),
        )))
    }

    /// Returns a number for a session or a call, which no other one has.
    fn new_number(&self) -> u64 {
        self.inner.next_number.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns what cancels a call in whatever worker it is.
    fn canceller(&self, number: u64) -> impl Fn() + Send + Sync + 'static {
        let workers = self.clone();
        move || {
            let call = Frame {
                head: Call::Cancel { number },
                blobs: Vec::new(),
            };
            for process in &workers.inner.processes {
                // A worker that cannot be asked runs nothing.
                let _ = process.ask(None, &call, CANCEL_CALL);
            }
        }
    }

    /// Returns the most instances of one worker.
    fn max_instances(&self) -> u32 {
        self.inner.max_instances
    }

    fn process(&self, index: usize) -> &Process {
        &self.inner.processes[index]
    }

    /// Asks the least busy worker; if it dies, another one.
    fn ask_any(
        &self,
        call: &Frame<Call>,
        patience: Duration,
    ) -> Result<Frame<Answer>, SandboxError> {
        self.ask_any_of(call, patience).map(|(_, _, answer)| answer)
    }

    /// As [`Self::ask_any`]; also returns which worker it was, and its generation.
    fn ask_any_of(
        &self,
        call: &Frame<Call>,
        patience: Duration,
    ) -> Result<(usize, u64, Frame<Answer>), SandboxError> {
        let mut died = None;
        // A call that ends two workers is given up: it is likely why they ended.
        for _ in 0..2 {
            let (index, process) = self
                .inner
                .processes
                .iter()
                .enumerate()
                .min_by_key(|(_, process)| process.calls_under_way())
                .expect("there is at least one worker");
            match process.ask(None, call, patience) {
                Ok((generation, answer)) => return Ok((index, generation, answer)),
                Err(Unreached::Fault(error)) => return Err(error),
                Err(Unreached::Died(reason)) => died = Some(reason),
            }
        }
        Err(SandboxError::WorkerDied {
            reason: died.unwrap_or_default(),
        })
    }
}

impl Sandbox for Workers {
    fn exec_cancellable(
        &self,
        request: &ExecRequest,
        limits: &Limits,
        cancel: &Cancel,
    ) -> Result<ExecOutcome, SandboxError> {
        Self::exec_cancellable(self, request, limits, cancel)
    }

    fn converse(&self, dialogue: &Dialogue) -> Result<DialogueOutcome, SandboxError> {
        dialogue.callee.limits.validate()?;
        dialogue.round.validate()?;
        dialogue.caller.limits.validate()?;
        let call = Frame {
            head: Call::Converse {
                callee: dialogue.callee.limits.clone(),
                round: dialogue.round.clone(),
                max_rounds: dialogue.max_rounds,
                caller: dialogue.caller.limits.clone(),
            },
            blobs: vec![
                dialogue.callee.bytes.clone(),
                dialogue.proceed_on.clone(),
                dialogue.caller.bytes.clone(),
            ],
        };
        let patience = dialogue.callee.limits.deadline + dialogue.caller.limits.deadline + GRACE;
        match self.ask_any(&call, patience)?.head {
            Answer::Dialogue(outcome) => Ok(*outcome),
            answer => Err(unexpected(answer)),
        }
    }

    fn session(&self, limits: &Limits) -> Result<Session, SandboxError> {
        Self::session(self, limits)
    }
}

/// Reads a snapshot that came over a connection.
fn received_snapshot(bytes: &[u8]) -> Result<Snapshot, SandboxError> {
    Snapshot::from_bytes(bytes, MAX_IN_TRANSIT).map_err(|error| SandboxError::Worker {
        message: format!("a snapshot was damaged on its way: {error}"),
    })
}

/// Splits a request into what goes into a head and what goes into blobs.
fn split(request: &ExecRequest) -> (ExecRequest, Vec<Vec<u8>>) {
    let head = ExecRequest {
        code: String::new(),
        stdin: String::new(),
        argv: request.argv.clone(),
        seed: request.seed,
        start_time: request.start_time,
    };
    let blobs = [&request.code, &request.stdin].map(|text| text.clone().into_bytes());
    (head, blobs.into())
}

/// Reads an outcome, and whether it was a session's last.
fn outcome(answer: Frame<Answer>) -> Result<(ExecOutcome, bool), SandboxError> {
    let mut blobs = answer.blobs.into_iter();
    match answer.head {
        Answer::Outcome {
            exit,
            is_last,
            stdout_truncated,
            stderr_truncated,
            usage,
        } => {
            let outcome = ExecOutcome {
                exit,
                stdout: blobs.next().unwrap_or_default(),
                stderr: blobs.next().unwrap_or_default(),
                stdout_truncated,
                stderr_truncated,
                usage,
            };
            Ok((outcome, is_last))
        }
        answer => Err(unexpected(answer)),
    }
}

fn done(answer: Frame<Answer>) -> Result<(), SandboxError> {
    match answer.head {
        Answer::Done => Ok(()),
        answer => Err(unexpected(answer)),
    }
}

/// The error that an answer stands for.
fn unexpected(answer: Answer) -> SandboxError {
    match answer {
        Answer::Fault(fault) => fault.into(),
        answer => SandboxError::Worker {
            message: format!("an answer to another question: {answer:?}"),
        },
    }
}
