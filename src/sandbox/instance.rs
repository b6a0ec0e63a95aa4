//! One guest instance: a store with its memory, fuel, deadline and captured output.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use serde_json::json;
use wasmtime::{
    GcHeapOutOfMemory, Global, Memory, Store, ThrownException, Trap, TypedFunc, UpdateDeadline,
    Val, WasmParams, WasmResults,
};

use super::bridge::{Door, GuestFault, Link, Peer, Served, Stage};
use super::budget::{Gauge, Stop};
use super::cancel::Cancel;
use super::error::SandboxError;
use super::host::{Carried, Clock, Host, Input};
use super::limits::Limits;
use super::memory::{Changed, Slot, WASM_PAGE};
use super::meter::METER;
use super::outcome::{ExecOutcome, ExecRequest, Exit, Usage};
use super::runtime::{Interface, Meter, Prepared};
use super::snapshot::STACK_POINTER;
use super::wasi::ProcExit;

/// The most bytes of one program or message, as the guest's codec has it.
pub(crate) const MAX_MESSAGE: usize = 16 << 20;

/// The most bytes of a program's standard input.
const MAX_INPUT: usize = 256 << 20;
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
/// Guest code runs on a stack of its own: deep recursion in a guest meets the guest's limit, on
/// whatever thread it is called from.
///
/// Between two guests the instance is [restored](Self::restore), not made anew.
#[derive(Debug)]
pub(super) struct Instance {
    // The store goes before the slot that its memory lies in.
    store: Store<Host>,
    exports: Exports,
    slot: Slot,
    /// What the last call left.
    fuel_left: u64,
    limits: Limits,
    started: Instant,
    ended: Option<Exit>,
}

struct Exports {
    memory: Memory,
    stack_pointer: Global,
    /// Where the stack pointer is when the guest is at rest.
    stack_at_rest: i32,
    /// `None` if wasmtime counts.
    gauge: Option<Gauge>,
    calls: Calls,
}

/// The functions that `wasm-runtimes/README.md` names.
struct OwnCalls {
    /// Missed only by a program with arguments.
    args: Option<TypedFunc<i32, ()>>,
    step: TypedFunc<(i32, i64), i32>,
    /// For messages of the host.
    serve: Door,
    /// For messages of the guest on the other side of the bridge; missed only by it.
    answer: Option<Door>,
}

/// How the guest is asked for something.
#[derive(Clone)]
enum Calls {
    Own(Arc<OwnCalls>),
    /// One function, which gets a line of JSON and a program, and the one that makes room for them.
    Science {
        allocate: TypedFunc<i32, i32>,
        turn: TypedFunc<(i32, i32), i32>,
    },
}

impl std::fmt::Debug for Exports {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Exports").finish_non_exhaustive()
    }
}

/// What a guest at rest is, beyond the image that all start from.
#[derive(Debug, Clone)]
pub(super) struct GuestState {
    pub(super) memory_bytes: usize,
    /// Changed pages, in order.
    pub(super) pages: Vec<usize>,
    /// Their content, one after the other.
    pub(super) content: Vec<u8>,
    pub(super) carried: Carried,
}

impl Instance {
    /// Makes a fresh instance, without fuel.
    pub(super) fn new(prepared: &Prepared) -> Result<Self, SandboxError> {
        let slot = prepared.slot()?;
        let limits = Limits::default();
        let (store, exports) = instantiate(prepared, &slot, &limits)?;
        Ok(Self {
            store,
            exports,
            slot,
            fuel_left: 0,
            limits,
            started: Instant::now(),
            ended: None,
        })
    }

    /// Begins the use of a fresh or restored instance: fuel and deadline run from now on.
    pub(super) fn begin(
        &mut self,
        prepared: &Prepared,
        limits: &Limits,
    ) -> Result<(), SandboxError> {
        *self.store.data_mut() = prepared.host(limits);
        self.limits = limits.clone();
        self.slot.begin();
        self.refuel()
    }

    /// Gives a guest at rest other limits: fuel and deadline run from now on.
    pub(super) fn go_on(&mut self, limits: &Limits) -> Result<(), SandboxError> {
        let host = self.store.data_mut();
        let carried = host.carried.clone();
        *host = Host::new(limits);
        host.carried = carried;
        self.limits = limits.clone();
        self.refuel()
    }

    /// Makes the instance a fresh one again, whatever its guest did.
    ///
    /// All state of a guest is its linear memory and its stack pointer (`snapshot::check`), and
    /// what the host keeps for it.
    pub(super) fn restore(&mut self, prepared: &Prepared) -> Result<(), SandboxError> {
        let memory = |source| SandboxError::Memory {
            activity: "restoring a guest's memory",
            source,
        };
        let size = self.exports.memory.data_size(&self.store);
        // SAFETY: the slot lies under `self.store`, which is not running while it is borrowed here.
        #[expect(unsafe_code, reason = "restores the memory of a guest at rest")]
        unsafe { self.slot.restore(size) }.map_err(memory)?;
        if prepared.is_audited() {
            // SAFETY: as above.
            #[expect(unsafe_code, reason = "reads the memory of a guest at rest")]
            let is_restored = unsafe { self.slot.is_restored() };
            if !is_restored.map_err(memory)? {
                return Err(SandboxError::Leak);
            }
        }
        self.ended = None;
        // A memory can't shrink.
        if size > prepared.image_size() || prepared.reinstantiates() {
            (self.store, self.exports) = instantiate(prepared, &self.slot, &self.limits)?;
            return Ok(());
        }
        *self.store.data_mut() = prepared.host(&self.limits);
        self.stack_to_rest()
    }

    /// Prepares the guest at rest for being copied: much that copies would have alike, they share.
    pub(super) fn share(&mut self) -> Result<(), SandboxError> {
        let size = self.exports.memory.data_size(&self.store);
        // SAFETY: the slot lies under `self.store`, which cannot run while it is borrowed here.
        #[expect(unsafe_code, reason = "maps the memory of a guest at rest anew")]
        unsafe { self.slot.share_grown(size) }.map_err(|source| SandboxError::Memory {
            activity: "sharing a guest's memory",
            source,
        })
    }

    /// Returns what the guest at rest changed in its memory.
    pub(super) fn changed(&self) -> Result<Changed<'_>, SandboxError> {
        let size = self.exports.memory.data_size(&self.store);
        // SAFETY: the slot lies under `self.store`, which cannot run while it is borrowed here.
        #[expect(unsafe_code, reason = "reads the memory of a guest at rest")]
        unsafe { self.slot.changed(size) }.map_err(|source| SandboxError::Memory {
            activity: "finding a guest's changed memory",
            source,
        })
    }

    /// Makes this fresh instance a copy of `parent`, which changed `changed`.
    pub(super) fn copy_from(
        &mut self,
        parent: &Self,
        changed: &Changed<'_>,
    ) -> Result<(), SandboxError> {
        let size = parent.exports.memory.data_size(&parent.store);
        self.slot.use_here();
        self.grow_to(size)?;
        // SAFETY: the slot lies under `self.store`, which cannot run while it is borrowed here.
        #[expect(unsafe_code, reason = "writes the memory of a guest at rest")]
        unsafe { self.slot.copy_from(changed, size) }.map_err(|source| SandboxError::Memory {
            activity: "copying a guest's memory",
            source,
        })?;
        self.store.data_mut().carried = parent.store.data().carried.clone();
        Ok(())
    }

    /// Saves the guest's state at rest.
    pub(super) fn save(&self) -> Result<GuestState, SandboxError> {
        let mut carried = self.store.data().carried.clone();
        if carried
            .files
            .take()
            .is_some_and(|files| !files.is_pristine())
        {
            return Err(SandboxError::FilesNotSaved);
        }
        let changed = self.changed()?;
        let mut state = GuestState {
            memory_bytes: self.exports.memory.data_size(&self.store),
            pages: Vec::new(),
            content: Vec::new(),
            carried,
        };
        for (page, content) in changed.pages() {
            state.pages.push(page);
            state.content.extend_from_slice(content);
        }
        Ok(state)
    }

    /// Makes this fresh instance what was saved.
    ///
    /// The pages of `state` must lie within its memory.
    pub(super) fn load(&mut self, state: &GuestState) -> Result<(), SandboxError> {
        self.slot.use_here();
        self.grow_to(state.memory_bytes)?;
        let size = self.exports.memory.data_size(&self.store);
        // SAFETY: the slot lies under `self.store`, which cannot run while it is borrowed here.
        #[expect(unsafe_code, reason = "writes the memory of a guest at rest")]
        unsafe {
            self.slot.write(size, &state.pages, &state.content);
        }
        let carried = &mut self.store.data_mut().carried;
        // What is saved has no files of its own.
        let files = carried.files.take();
        *carried = state.carried.clone();
        carried.files = files;
        Ok(())
    }

    /// Saves the guest's state at rest for [`Self::rewind`]. Unlike [`Self::save`] it does not look
    /// which of the pages that the guest has for itself differ from the image.
    pub(super) fn mark(&mut self, prepared: &Prepared) -> Result<GuestState, SandboxError> {
        if !self.slot.rewinds() || !prepared.rewinds() {
            return self.save();
        }
        let memory_bytes = self.exports.memory.data_size(&self.store);
        // SAFETY: the slot lies under `self.store`, which cannot run while it is borrowed here.
        #[expect(unsafe_code, reason = "reads the memory of a guest at rest")]
        let (pages, content) =
            unsafe { self.slot.mark(memory_bytes) }.map_err(|source| SandboxError::Memory {
                activity: "saving a guest's memory",
                source,
            })?;
        Ok(GuestState {
            memory_bytes,
            pages,
            content,
            carried: self.store.data().carried.clone(),
        })
    }

    /// Makes the instance what it was when it was marked, and begins its use with other limits: fuel
    /// and deadline run from now on. Returns whether that could be done: not if its memory has grown
    /// since, or if every guest is to be made fresh.
    pub(super) fn rewind(
        &mut self,
        prepared: &Prepared,
        state: &GuestState,
        limits: &Limits,
    ) -> Result<bool, SandboxError> {
        let size = self.exports.memory.data_size(&self.store);
        if size != state.memory_bytes || !self.slot.rewinds() || !prepared.rewinds() {
            return Ok(false);
        }
        // SAFETY: the slot lies under `self.store`, which cannot run while it is borrowed here, and
        // the memory never shrinks, so it had this size all the while.
        #[expect(unsafe_code, reason = "writes the memory of a guest at rest")]
        unsafe { self.slot.rewind(size, &state.pages, &state.content) }.map_err(|source| {
            SandboxError::Memory {
                activity: "restoring a guest's memory",
                source,
            }
        })?;
        self.ended = None;
        *self.store.data_mut() = Host::new(limits);
        self.store.data_mut().carried = state.carried.clone();
        self.stack_to_rest()?;
        self.limits = limits.clone();
        self.refuel()?;
        Ok(true)
    }

    /// Sets the stack pointer to where it is at rest: a trap or an exit leaves it where it was.
    fn stack_to_rest(&mut self) -> Result<(), SandboxError> {
        let at_rest = Val::I32(self.exports.stack_at_rest);
        self.exports
            .stack_pointer
            .set(&mut self.store, at_rest)
            .map_err(SandboxError::engine("resetting the guest's stack"))
    }

    fn grow_to(&mut self, size: usize) -> Result<(), SandboxError> {
        let memory = self.exports.memory;
        let missing = size.saturating_sub(memory.data_size(&self.store)) / WASM_PAGE;
        if missing > 0 {
            memory.grow(&mut self.store, missing as u64).map_err(|_| {
                SandboxError::MemoryLimitTooSmall {
                    limit: self.limits.memory.0,
                    minimum: size as u64,
                }
            })?;
        }
        Ok(())
    }

    /// Runs one program with full fuel and a new deadline, seeded with `default_seed` if it names
    /// no seed.
    ///
    /// # Errors
    ///
    /// Returns an error if the instance has ended before or if the sandbox is at fault; whatever
    /// the program does is in the outcome.
    pub(super) fn step(
        &mut self,
        request: &ExecRequest,
        default_seed: Option<u64>,
        cancel: &Cancel,
    ) -> Result<ExecOutcome, SandboxError> {
        if let Some(exit) = &self.ended {
            return Err(SandboxError::SessionEnded { exit: exit.clone() });
        }
        let code = request.code.as_bytes();
        let misses_args = matches!(&self.exports.calls, Calls::Own(own) if own.args.is_none());
        if !request.argv.is_empty() && misses_args {
            return Err(SandboxError::MissingExport { name: "args" });
        }
        if request.stdin.len() > MAX_INPUT {
            return Err(SandboxError::RequestTooLarge {
                size: request.stdin.len(),
                limit: MAX_INPUT,
            });
        }
        if code.len() > MAX_MESSAGE {
            return Err(SandboxError::RequestTooLarge {
                size: code.len(),
                limit: MAX_MESSAGE,
            });
        }
        let arguments = c_strings(&request.argv)?;
        self.refuel()?;
        let host = self.store.data_mut();
        host.budget.heed(cancel);
        host.stdin = Input::new(request.stdin.clone().into_bytes());
        if let Some(seconds) = request.start_time {
            host.carried.clock.set_wall(seconds);
        }
        let seed = request
            .seed
            .or(default_seed)
            .map_or(KEEP_RANDOM_STATE, |seed| {
                host.seed(seed);
                (seed & i64::MAX as u64).cast_signed()
            });

        // What is cancelled does not begin.
        let ran = match self.store.data().budget.stop() {
            Some(stop @ Stop::Cancelled) => Err(stop.into()),
            _ => self.run_step(code, &request.argv, &arguments, seed),
        };
        let exit = match ran {
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

    /// Starts the guest's source of randomness anew.
    pub(super) fn seed(&mut self, seed: u64) {
        self.store.data_mut().seed(seed);
    }

    /// Sends one message and returns the reply, within what is left of fuel and deadline.
    ///
    /// # Errors
    ///
    /// Returns an error if the message is too large or the sandbox is at fault.
    pub(super) fn serve(&mut self, request: &[u8]) -> Result<Served, SandboxError> {
        if let Some(exit) = &self.ended {
            return Ok(Served::Ended(exit.clone()));
        }
        if request.len() > MAX_MESSAGE {
            return Err(SandboxError::RequestTooLarge {
                size: request.len(),
                limit: MAX_MESSAGE,
            });
        }
        let Calls::Own(own) = self.exports.calls.clone() else {
            return Err(SandboxError::ScienceDoesNotGrade);
        };
        match self.exchange(&own.serve, request) {
            Ok(reply) => Ok(Served::Reply(reply)),
            Err(error) => Ok(Served::Ended(self.end(error)?)),
        }
    }

    /// As [`Self::serve`], with `stage` for what the guest asks through the bridge.
    pub(super) fn serve_on(
        &mut self,
        request: &[u8],
        stage: Stage,
    ) -> (Result<Served, SandboxError>, Stage) {
        self.store.data_mut().stage = Some(Box::new(stage));
        let served = self.serve(request);
        let host = self.store.data_mut();
        let mut stage = host.stage.take().expect("only this function takes it");
        stage.close(std::mem::take(&mut host.peer), Vec::new());
        (served, *stage)
    }

    /// Answers a message of the guest on the other side of the bridge, which waits for it and can
    /// be asked in its turn through `asker`.
    ///
    /// # Errors
    ///
    /// Returns an error if the sandbox is at fault.
    pub(super) fn answer(&mut self, request: &[u8], asker: Link) -> Result<Served, SandboxError> {
        if let Some(exit) = &self.ended {
            return Ok(Served::Ended(exit.clone()));
        }
        let door = match &self.exports.calls {
            Calls::Own(own) => own.answer.clone(),
            Calls::Science { .. } => None,
        };
        let Some(door) = door else {
            return Err(SandboxError::MissingExport { name: "answer" });
        };
        let host = self.store.data_mut();
        host.peer = Peer::Suspended(asker);
        host.budget.resume();
        let answered = self.exchange(&door, request);
        let host = self.store.data_mut();
        // The link must not outlive this call.
        host.peer = Peer::None;
        host.budget.pause();
        match answered {
            Ok(reply) => Ok(Served::Reply(reply)),
            Err(error) => Ok(Served::Ended(self.end(error)?)),
        }
    }

    /// Stops the clock of a guest at rest until it is asked something.
    pub(super) fn pause(&mut self) {
        self.store.data_mut().budget.pause();
    }

    /// Returns the clock that the guest's program reads.
    pub(super) fn clock(&mut self) -> &mut Clock {
        &mut self.store.data_mut().carried.clock
    }

    /// Takes what the guest printed to standard output or, otherwise, to standard error.
    pub(super) fn take_printed(&mut self, is_stdout: bool) -> Vec<u8> {
        self.store.data_mut().take_printed(is_stdout)
    }

    /// Returns how the instance ended, if it has.
    pub(super) fn ended(&self) -> Option<&Exit> {
        self.ended.as_ref()
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns what was used since the instance was made or the last step began.
    pub(super) fn usage(&self) -> Usage {
        Usage {
            fuel: self.limits.fuel.saturating_sub(self.fuel_left),
            memory_bytes: self.exports.memory.data_size(&self.store) as u64,
            wall: self.wall(),
        }
    }

    /// Returns how long the guest itself has run, without what it waited for another one.
    fn wall(&self) -> Duration {
        let waited = self.store.data().budget.waited();
        self.started.elapsed().saturating_sub(waited)
    }

    /// Gives the guest its arguments, unless it has none and had none.
    fn send_arguments(
        &mut self,
        args: Option<&TypedFunc<i32, ()>>,
        serve: &Door,
        arguments: &[u8],
    ) -> wasmtime::Result<()> {
        let Some(args) = args else {
            return Ok(());
        };
        if arguments.is_empty() && !self.store.data().carried.has_arguments {
            return Ok(());
        }
        let length = self.send(serve, arguments)?;
        self.store.data_mut().carried.has_arguments = !arguments.is_empty();
        self.call(args, length)
    }

    fn run_step(
        &mut self,
        code: &[u8],
        argv: &[String],
        c_arguments: &[u8],
        seed: i64,
    ) -> wasmtime::Result<Exit> {
        let status = match self.exports.calls.clone() {
            Calls::Own(own) => {
                self.send_arguments(own.args.as_ref(), &own.serve, c_arguments)?;
                let length = self.send(&own.serve, code)?;
                self.call(&own.step, (length, seed))?
            }
            Calls::Science { allocate, turn } => {
                let seed = (seed != KEEP_RANDOM_STATE).then_some(seed);
                let head = json!({ "seed": seed, "arguments": argv }).to_string();
                let frame = [head.as_bytes(), b"\n", code].concat();
                let length = i32::try_from(frame.len()).expect("checked against `MAX_MESSAGE`");
                self.slot.use_here();
                let pointer = self.call(&allocate, length)?;
                // Without memory for it the guest says so.
                if pointer != 0 {
                    self.exports
                        .memory
                        .write(&mut self.store, pointer.cast_unsigned() as usize, &frame)
                        .map_err(|_| wasmtime::Error::new(GuestFault::NoBuffer))?;
                }
                self.call(&turn, (pointer, length))?
            }
        };
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

    fn exchange(&mut self, door: &Door, request: &[u8]) -> wasmtime::Result<Vec<u8>> {
        self.slot.use_here();
        let result = door.exchange(&mut self.store, request);
        self.note_fuel();
        result
    }

    /// Puts `bytes` into the guest's buffer and returns their number.
    fn send(&mut self, door: &Door, bytes: &[u8]) -> wasmtime::Result<i32> {
        self.slot.use_here();
        let result = door.send(&mut self.store, bytes);
        self.note_fuel();
        result
    }

    fn call<P: WasmParams + Sync, R: WasmResults + Sync>(
        &mut self,
        function: &TypedFunc<P, R>,
        parameters: P,
    ) -> wasmtime::Result<R> {
        let result = on_own_stack(function.call_async(&mut self.store, parameters));
        self.note_fuel();
        result
    }

    fn note_fuel(&mut self) {
        self.fuel_left = match self.exports.gauge {
            Some(gauge) => gauge.left(&mut self.store).try_into().unwrap_or(0),
            // wasmtime counts if we do not.
            None => self.store.get_fuel().unwrap_or(0),
        };
    }

    /// Marks the instance as ended by `error` and says how.
    fn end(&mut self, error: wasmtime::Error) -> Result<Exit, SandboxError> {
        let memory = &self.store.data().memory;
        let (limit, requested) = (memory.limit(), memory.denied());
        let out_of_memory = Exit::OutOfMemory { limit, requested };
        let exit = if let Some(stop) = self.stopped_by(&error) {
            match stop {
                Stop::OutOfFuel => Exit::OutOfFuel {
                    limit: self.limits.fuel,
                },
                Stop::Deadline => Exit::DeadlineExceeded {
                    limit: self.limits.deadline,
                    elapsed: self.wall(),
                },
                Stop::Cancelled => Exit::Cancelled,
            }
        } else if let Some(ProcExit { code }) = error.downcast_ref() {
            match code {
                0 => Exit::Exited { code: 0 },
                _ if requested.is_some() => out_of_memory,
                code => Exit::Exited { code: *code },
            }
        } else if let Some(trap) = error.downcast_ref::<Trap>() {
            match trap {
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
        } else if error.is::<ThrownException>() || error.is::<GcHeapOutOfMemory<()>>() {
            match requested {
                Some(_) => out_of_memory,
                None => Exit::Trapped {
                    reason: "uncaught exception of the interpreter".to_owned(),
                },
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

    /// Returns which limit of fuel or time ended a call with `error`, if one did.
    fn stopped_by(&mut self, error: &wasmtime::Error) -> Option<Stop> {
        if let Some(stop) = error.downcast_ref::<Stop>() {
            return Some(*stop);
        }
        match (error.downcast_ref::<Trap>()?, self.exports.gauge) {
            (Trap::UnreachableCodeReached, Some(gauge)) => {
                (gauge.left(&mut self.store) < 0).then_some(Stop::OutOfFuel)
            }
            (Trap::OutOfFuel, None) => Some(Stop::OutOfFuel),
            _ => None,
        }
    }

    fn refuel(&mut self) -> Result<(), SandboxError> {
        refuel(&mut self.store, self.exports.gauge, &self.limits)?;
        self.fuel_left = self.limits.fuel;
        self.store.data_mut().memory.reset();
        self.started = Instant::now();
        Ok(())
    }
}

/// Instantiates the guest over `slot`, which must hold the image.
fn instantiate(
    prepared: &Prepared,
    slot: &Slot,
    limits: &Limits,
) -> Result<(Store<Host>, Exports), SandboxError> {
    let mut store = Store::new(prepared.engine(), prepared.host(limits));
    store.limiter(|host| &mut host.memory);
    if prepared.meter() == Meter::Instructions {
        store.epoch_deadline_callback(|store| match store.data().budget.stop() {
            Some(stop) => Err(stop.into()),
            None => Ok(UpdateDeadline::Continue(1)),
        });
    }
    let instance = slot
        .hand_over(|| prepared.guest().instantiate(&mut store))
        .map_err(SandboxError::engine("instantiating the guest"))?;
    let memory = instance
        .get_memory(&mut store, "memory")
        .ok_or(SandboxError::MissingExport { name: "memory" })?;
    // A guest that grew while it was started has a larger image than its module says.
    let missing = prepared
        .image_size()
        .saturating_sub(memory.data_size(&store))
        / WASM_PAGE;
    if missing > 0 {
        memory
            .grow(&mut store, missing as u64)
            .map_err(SandboxError::engine(
                "growing the guest's memory to its image",
            ))?;
    }

    macro_rules! function {
        ($name:literal) => {
            instance
                .get_typed_func(&mut store, $name)
                .map_err(|_| SandboxError::MissingExport { name: $name })?
        };
    }
    let stack_pointer = instance.get_global(&mut store, STACK_POINTER);
    let stack_at_rest = stack_pointer.and_then(|global| global.get(&mut store).i32());
    let (Some(stack_pointer), Some(stack_at_rest)) = (stack_pointer, stack_at_rest) else {
        return Err(SandboxError::MissingExport {
            name: STACK_POINTER,
        });
    };
    let memory = instance
        .get_memory(&mut store, "memory")
        .ok_or(SandboxError::MissingExport { name: "memory" })?;
    let gauge = match prepared.meter() {
        Meter::Instructions => None,
        Meter::Loops => {
            let gauge = Gauge::find(&instance, &mut store);
            Some(gauge.ok_or(SandboxError::MissingExport { name: METER })?)
        }
    };
    let calls = match prepared.interface() {
        Interface::Own => {
            let serve = Door {
                memory,
                buf: function!("buf"),
                function: function!("serve"),
                reply_ptr: function!("reply_ptr"),
                gauge,
            };
            let answer = instance.get_typed_func(&mut store, "answer").ok();
            Calls::Own(Arc::new(OwnCalls {
                args: instance.get_typed_func(&mut store, "args").ok(),
                step: function!("step"),
                answer: answer.map(|function| Door {
                    function,
                    ..serve.clone()
                }),
                serve,
            }))
        }
        Interface::Science => Calls::Science {
            allocate: function!("host_alloc"),
            turn: function!("turn"),
        },
    };
    let exports = Exports {
        memory,
        stack_pointer,
        stack_at_rest,
        gauge,
        calls,
    };
    Ok((store, exports))
}

/// Writes arguments one after the other, each ended by a NUL.
fn c_strings(arguments: &[String]) -> Result<Vec<u8>, SandboxError> {
    if let Some(index) = arguments.iter().position(|text| text.contains('\0')) {
        return Err(SandboxError::NulInArgument { index });
    }
    let size = arguments.iter().map(|text| text.len() + 1).sum();
    if size > MAX_MESSAGE {
        return Err(SandboxError::RequestTooLarge {
            size,
            limit: MAX_MESSAGE,
        });
    }
    let mut bytes = Vec::with_capacity(size);
    for text in arguments {
        bytes.extend_from_slice(text.as_bytes());
        bytes.push(0);
    }
    Ok(bytes)
}

fn refuel(
    store: &mut Store<Host>,
    gauge: Option<Gauge>,
    limits: &Limits,
) -> Result<(), SandboxError> {
    store.data_mut().budget.start(limits.deadline);
    if let Some(gauge) = gauge {
        return gauge.start(store, limits.fuel);
    }
    store
        .set_fuel(limits.fuel)
        .map_err(SandboxError::engine("setting the fuel"))?;
    store.set_epoch_deadline(1);
    Ok(())
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
    fn arguments_are_c_strings() {
        let strings = |texts: &[&str]| {
            let owned: Vec<_> = texts.iter().map(|&text| text.to_owned()).collect();
            c_strings(&owned)
        };
        assert_eq!(strings(&["a", "", "b c"]).unwrap(), b"a\0\0b c\0");
        assert!(matches!(
            strings(&["a", "b\0"]),
            Err(SandboxError::NulInArgument { index: 1 })
        ));
    }
}
