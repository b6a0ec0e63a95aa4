//! One guest instance: a store with its memory, fuel, deadline and captured output.

use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use wasmtime::{Memory, Store, Trap, TypedFunc, WasmParams, WasmResults};

use super::error::SandboxError;
use super::host::{Host, Input};
use super::limits::Limits;
use super::outcome::{ExecOutcome, ExecRequest, Exit, Usage};
use super::runtime::{EPOCH_TICK, WasmRuntime};
use super::wasi::ProcExit;

/// The most bytes of one program or message, as the guest's codec has it.
pub(crate) const MAX_MESSAGE: usize = 16 << 20;

/// `step`'s seed argument for "leave the random state alone".
const KEEP_RANDOM_STATE: i64 = -1;
/// `step`'s result for an uncaught `MemoryError`.
const MEMORY_ERROR: i32 = 256;

/// A live guest, with the interface of `wasm-runtimes/README.md`.
///
/// It runs programs ([`step`](Self::step)) or answers messages ([`serve`](Self::serve)) until a
/// trap, an exit or a limit ends it. Its memory is the guest program's to change, so what it
/// answers is data, whatever it claims.
///
/// Guest code runs on a stack of its own, taken from the runtime's pool: deep recursion in a guest
/// meets the guest's limit, on whatever thread it is called from.
#[derive(Debug)]
pub(crate) struct Instance {
    store: Store<Host>,
    exports: Exports,
    limits: Limits,
    started: Instant,
    ended: Option<Exit>,
}

struct Exports {
    memory: Memory,
    buf: TypedFunc<i32, i32>,
    step: TypedFunc<(i32, i64), i32>,
    serve: TypedFunc<i32, i32>,
    reply_ptr: TypedFunc<(), i32>,
}

impl std::fmt::Debug for Exports {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Exports").finish_non_exhaustive()
    }
}

/// What came of a message to a guest.
#[derive(Debug)]
pub(crate) enum Served {
    /// The guest's reply.
    Reply(Vec<u8>),
    /// The guest has ended, now or before.
    Ended(Exit),
}

impl Instance {
    /// Makes a fresh instance, with its fuel and deadline running from now on.
    pub(super) fn new(runtime: &WasmRuntime, limits: &Limits) -> Result<Self, SandboxError> {
        limits.validate()?;
        let minimum = runtime.guest_memory();
        if limits.memory.0 < minimum {
            return Err(SandboxError::MemoryLimitTooSmall {
                limit: limits.memory.0,
                minimum,
            });
        }
        let mut store = Store::new(runtime.engine(), Host::new(limits));
        store.limiter(|host| &mut host.memory);
        refuel(&mut store, limits)?;
        let instance = runtime.instantiate(&mut store)?;

        macro_rules! function {
            ($name:literal) => {
                instance
                    .get_typed_func(&mut store, $name)
                    .map_err(|_| SandboxError::MissingExport { name: $name })?
            };
        }
        let exports = Exports {
            memory: instance
                .get_memory(&mut store, "memory")
                .ok_or(SandboxError::MissingExport { name: "memory" })?,
            buf: function!("buf"),
            step: function!("step"),
            serve: function!("serve"),
            reply_ptr: function!("reply_ptr"),
        };
        Ok(Self {
            store,
            exports,
            limits: limits.clone(),
            started: Instant::now(),
            ended: None,
        })
    }

    /// Runs one program with full fuel and a new deadline.
    ///
    /// # Errors
    ///
    /// Returns an error if the instance has ended before or if the sandbox is at fault; whatever
    /// the program does is in the outcome.
    pub(super) fn step(&mut self, request: &ExecRequest) -> Result<ExecOutcome, SandboxError> {
        if let Some(exit) = &self.ended {
            return Err(SandboxError::SessionEnded { exit: exit.clone() });
        }
        let code = request.code.as_bytes();
        if code.len() > MAX_MESSAGE {
            return Err(SandboxError::RequestTooLarge {
                size: code.len(),
                limit: MAX_MESSAGE,
            });
        }
        self.refuel()?;
        let host = self.store.data_mut();
        host.stdin = Input::new(request.stdin.clone().into_bytes());
        let seed = request.seed.map_or(KEEP_RANDOM_STATE, |seed| {
            host.seed(seed);
            (seed & i64::MAX as u64).cast_signed()
        });

        let exit = match self.run_step(code, seed) {
            Ok(exit) => exit,
            Err(error) => self.end(error)?,
        };
        let usage = self.usage();
        tracing::debug!(%exit, fuel = usage.fuel, wall = ?usage.wall, "program ended");
        let host = self.store.data_mut();
        let (stdout, stdout_truncated) = host.stdout.take();
        let (stderr, stderr_truncated) = host.stderr.take();
        Ok(ExecOutcome {
            exit,
            stdout,
            stderr,
            stdout_truncated,
            stderr_truncated,
            usage,
        })
    }

    /// Sends one message and returns the reply, within what is left of fuel and deadline.
    ///
    /// # Errors
    ///
    /// Returns an error if the message is too large or the sandbox is at fault.
    pub(crate) fn serve(&mut self, request: &[u8]) -> Result<Served, SandboxError> {
        if let Some(exit) = &self.ended {
            return Ok(Served::Ended(exit.clone()));
        }
        if request.len() > MAX_MESSAGE {
            return Err(SandboxError::RequestTooLarge {
                size: request.len(),
                limit: MAX_MESSAGE,
            });
        }
        match self.exchange(request) {
            Ok(reply) => Ok(Served::Reply(reply)),
            Err(error) => Ok(Served::Ended(self.end(error)?)),
        }
    }

    /// Makes `peer` the instance that this one reaches through `bridge.call`.
    pub(crate) fn connect(&mut self, peer: Self) {
        self.store.data_mut().peer = Some(Box::new(peer));
    }

    /// Takes the peer back.
    pub(crate) fn disconnect(&mut self) -> Option<Self> {
        self.store.data_mut().peer.take().map(|peer| *peer)
    }

    /// Returns how the instance ended, if it has.
    pub(crate) fn ended(&self) -> Option<&Exit> {
        self.ended.as_ref()
    }

    /// Returns what was used since the instance was made or the last step began.
    pub(crate) fn usage(&self) -> Usage {
        // Fuel is on in every engine we make; without it the whole budget counts as used.
        let left = self.store.get_fuel().unwrap_or(0);
        Usage {
            fuel: self.limits.fuel.saturating_sub(left),
            memory_bytes: self.exports.memory.data_size(&self.store) as u64,
            wall: self.started.elapsed(),
        }
    }

    fn run_step(&mut self, code: &[u8], seed: i64) -> wasmtime::Result<Exit> {
        let length = self.send(code)?;
        let step = self.exports.step.clone();
        let status = self.call(&step, (length, seed))?;
        let memory = &self.store.data().memory;
        let (limit, requested) = (memory.limit(), memory.denied());
        Ok(match u8::try_from(status) {
            Ok(0) => Exit::Exited { code: 0 },
            // A failure after a denied allocation is taken for its consequence.
            Ok(code) if requested.is_none() => Exit::Exited { code: code.into() },
            Ok(_) => Exit::OutOfMemory { limit, requested },
            Err(_) if status == MEMORY_ERROR => Exit::OutOfMemory { limit, requested },
            Err(_) => return Err(wasmtime::Error::new(GuestFault::Status)),
        })
    }

    fn exchange(&mut self, request: &[u8]) -> wasmtime::Result<Vec<u8>> {
        let length = self.send(request)?;
        let serve = self.exports.serve.clone();
        let reply = self.call(&serve, length)?;
        let length =
            usize::try_from(reply).map_err(|_| wasmtime::Error::new(GuestFault::NoReply))?;
        let reply_ptr = self.exports.reply_ptr.clone();
        let pointer = self.call(&reply_ptr, ())?.cast_unsigned() as usize;
        self.exports
            .memory
            .data(&self.store)
            .get(pointer..pointer + length)
            .filter(|reply| reply.len() <= MAX_MESSAGE)
            .map(<[u8]>::to_vec)
            .ok_or_else(|| wasmtime::Error::new(GuestFault::NoReply))
    }

    /// Puts `bytes` into the guest's buffer and returns their number.
    fn send(&mut self, bytes: &[u8]) -> wasmtime::Result<i32> {
        let length = i32::try_from(bytes.len()).expect("checked against `MAX_MESSAGE`");
        let buf = self.exports.buf.clone();
        let pointer = self.call(&buf, length)?.cast_unsigned() as usize;
        if pointer == 0 {
            return Err(wasmtime::Error::new(GuestFault::NoBuffer));
        }
        self.exports
            .memory
            .write(&mut self.store, pointer, bytes)
            .map_err(|_| wasmtime::Error::new(GuestFault::NoBuffer))?;
        Ok(length)
    }

    fn call<P: WasmParams + Sync, R: WasmResults + Sync>(
        &mut self,
        function: &TypedFunc<P, R>,
        parameters: P,
    ) -> wasmtime::Result<R> {
        on_own_stack(function.call_async(&mut self.store, parameters))
    }

    /// Marks the instance as ended by `error` and says how.
    fn end(&mut self, error: wasmtime::Error) -> Result<Exit, SandboxError> {
        let memory = &self.store.data().memory;
        let (limit, requested) = (memory.limit(), memory.denied());
        let out_of_memory = Exit::OutOfMemory { limit, requested };
        let exit = if let Some(ProcExit { code }) = error.downcast_ref() {
            match code {
                0 => Exit::Exited { code: 0 },
                _ if requested.is_some() => out_of_memory,
                code => Exit::Exited { code: *code },
            }
        } else if let Some(trap) = error.downcast_ref::<Trap>() {
            match trap {
                Trap::OutOfFuel => Exit::OutOfFuel {
                    limit: self.limits.fuel,
                },
                Trap::Interrupt => Exit::DeadlineExceeded {
                    limit: self.limits.deadline,
                    elapsed: self.started.elapsed(),
                },
                _ if requested.is_some() => out_of_memory,
                trap => {
                    let reason = trap.to_string();
                    let reason = reason
                        .strip_prefix("wasm trap: ")
                        .unwrap_or(&reason)
                        .to_owned();
                    Exit::Trapped { reason }
                }
            }
        } else if let Some(fault) = error.downcast_ref::<GuestFault>() {
            match fault {
                _ if requested.is_some() => out_of_memory,
                fault => Exit::Trapped {
                    reason: fault.to_string(),
                },
            }
        } else {
            self.ended = Some(Exit::Trapped {
                reason: "sandbox fault".to_owned(),
            });
            // A peer's fault arrives as the error it already is.
            return Err(error
                .downcast::<SandboxError>()
                .unwrap_or_else(SandboxError::engine("calling the guest")));
        };
        self.ended = Some(exit.clone());
        Ok(exit)
    }

    fn refuel(&mut self) -> Result<(), SandboxError> {
        refuel(&mut self.store, &self.limits)?;
        self.store.data_mut().memory.reset();
        self.started = Instant::now();
        Ok(())
    }
}

/// A breach of the guest interface, which only a guest whose memory was tampered with commits.
#[derive(Debug, thiserror::Error)]
enum GuestFault {
    #[error("the interpreter gave no buffer")]
    NoBuffer,
    #[error("the interpreter gave no reply")]
    NoReply,
    #[error("the interpreter gave no exit status")]
    Status,
}

fn refuel(store: &mut Store<Host>, limits: &Limits) -> Result<(), SandboxError> {
    store
        .set_fuel(limits.fuel)
        .map_err(SandboxError::engine("setting the fuel"))?;
    store.set_epoch_deadline(ticks(limits.deadline));
    Ok(())
}

/// Converts a deadline to epoch ticks, never too early: the current tick is partly over.
fn ticks(deadline: Duration) -> u64 {
    let ticks = deadline.as_nanos().div_ceil(EPOCH_TICK.as_nanos()) + 1;
    u64::try_from(ticks)
        .unwrap_or(u64::MAX / 2)
        .min(u64::MAX / 2)
}

/// Runs a guest call to its end on a wasmtime fiber.
///
/// wasmtime's async calls are used only for their separate stack; nothing here yields (no
/// `epoch_deadline_async_yield…`, no `fuel_async_yield…`, no async host function), so the future
/// is ready at its first poll.
pub(super) fn on_own_stack<T>(
    call: impl Future<Output = wasmtime::Result<T>>,
) -> wasmtime::Result<T> {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => unreachable!("no host function or store setting yields"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_never_early() {
        assert_eq!(ticks(EPOCH_TICK), 2);
        assert_eq!(ticks(EPOCH_TICK + Duration::from_nanos(1)), 3);
        assert!(ticks(Duration::MAX) > 1 << 60);
    }
}
