//! A session in a worker.

use super::process::Unreached;
use super::wire::{Answer, Call, Frame};
use super::{GRACE, SESSION_CALL, Workers, done, outcome, received_snapshot, split, unexpected};
use crate::sandbox::{Cancel, ExecOutcome, ExecRequest, Exit, Limits, SandboxError, Snapshot};

/// The handle to a session in a worker; dropped, it closes the session.
#[derive(Debug)]
pub(in crate::sandbox) struct WorkerSession {
    workers: Workers,
    worker: usize,
    generation: u64,
    id: u64,
    limits: Limits,
    ended: Option<Exit>,
}

impl WorkerSession {
    pub(super) fn new(
        workers: Workers,
        worker: usize,
        generation: u64,
        id: u64,
        limits: Limits,
    ) -> Self {
        Self {
            workers,
            worker,
            generation,
            id,
            limits,
            ended: None,
        }
    }

    pub(in crate::sandbox) fn step(
        &mut self,
        request: &ExecRequest,
        cancel: &Cancel,
    ) -> Result<ExecOutcome, SandboxError> {
        let number = self.workers.new_number();
        let _telling = cancel.on_cancel(self.workers.canceller(number));
        let (request, blobs) = split(request);
        let head = Call::Step {
            number,
            session: self.id,
            request,
        };
        let answer = self.ask_with(&Frame { head, blobs }, self.limits.deadline + GRACE)?;
        let (outcome, is_last) = outcome(answer)?;
        if is_last {
            self.ended = Some(outcome.exit.clone());
        }
        Ok(outcome)
    }

    pub(in crate::sandbox) fn fork(&mut self, count: usize) -> Result<Vec<Self>, SandboxError> {
        let limit = self.workers.max_instances();
        if count > limit as usize {
            return Err(SandboxError::PoolExhausted { limit });
        }
        let children: Vec<_> = (0..count).map(|_| self.workers.new_number()).collect();
        let call = Call::Fork {
            session: self.id,
            children: children.clone(),
        };
        done(self.ask(call, SESSION_CALL)?)?;
        Ok(children
            .into_iter()
            .map(|id| {
                let workers = self.workers.clone();
                Self::new(
                    workers,
                    self.worker,
                    self.generation,
                    id,
                    self.limits.clone(),
                )
            })
            .collect())
    }

    pub(in crate::sandbox) fn snapshot(&mut self) -> Result<Snapshot, SandboxError> {
        let answer = self.ask(Call::Snapshot { session: self.id }, SESSION_CALL)?;
        match answer.head {
            Answer::Snapshot => {
                let bytes = answer.blobs.into_iter().next().unwrap_or_default();
                received_snapshot(&bytes)
            }
            answer => Err(unexpected(answer)),
        }
    }

    pub(in crate::sandbox) fn ended(&self) -> Option<&Exit> {
        self.ended.as_ref()
    }

    fn ask(
        &self,
        head: Call,
        patience: std::time::Duration,
    ) -> Result<Frame<Answer>, SandboxError> {
        let blobs = Vec::new();
        self.ask_with(&Frame { head, blobs }, patience)
    }

    fn ask_with(
        &self,
        call: &Frame<Call>,
        patience: std::time::Duration,
    ) -> Result<Frame<Answer>, SandboxError> {
        let process = self.workers.process(self.worker);
        process
            .ask(Some(self.generation), call, patience)
            .map(|(_, answer)| answer)
            .map_err(|unreached| match unreached {
                Unreached::Died(_) => SandboxError::SessionLost,
                Unreached::Fault(error) => error,
            })
    }
}

impl Drop for WorkerSession {
    fn drop(&mut self) {
        // A session that is lost with its worker needs no closing.
        let _ = self.ask(Call::Close { session: self.id }, SESSION_CALL);
    }
}
