//! The bridge: how one guest asks another one, and is asked by it meanwhile.
//!
//! The bytes pass through unread. A guest without a peer gets "the other side is dead".
//!
//! **Re-entry.** While a guest waits in `bridge.call`, its peer may call `bridge.call` itself: then
//! the waiting guest is entered again, through its export `answer`, and so on in turn, up to
//! [`MAX_NESTING`] deep. No thread and no scheduler takes part: each side runs in a host function
//! of the other one. What makes that possible is a [`Link`], a pointer to the waiting side's
//! `Caller`, which the peer has exactly as long as that host function runs it. Each entry is a
//! wasmtime fiber, with a stack and a stack limit of its own, so recursion meets the limit of the
//! entry it is in, however many are below it.
//!
//! **Time.** A guest's clock runs while the guest does. While it waits for the other one, or is at rest
//! between two calls, the time is the other one's: no guest can use up its peer's. What the host does
//! for a message is charged, as fuel, to whoever sends it. The virtual clocks of the two, which a
//! program reads, agree on how much time has passed in a round: a test's `sleep` is one for the
//! submission.
//!
//! **Ends.** A guest that traps, exits or meets a limit while frames of it wait below has ended for
//! all of them: the error is kept as its host state's `doom`, and each host function that would
//! return into such a frame returns the error instead. `docs/decisions/0009-callbacks.md` says what
//! this is for and what a hostile guest can make of it.

use std::ptr::NonNull;

use serde::{Deserialize, Serialize};
use wasmtime::{AsContextMut, Caller, Extern, Linker, Memory, Result, TypedFunc};

use super::budget::{self, Gauge};
use super::error::SandboxError;
use super::host::Host;
use super::instance::{GuestState, MAX_MESSAGE, on_own_stack};
use super::limits::Limits;
use super::outcome::{Exit, Usage};
use super::pool::Lease;
use super::runtime::WasmRuntime;

/// The module that guests import from.
pub(super) const MODULE: &str = "bridge";

/// Reply length when the other side exited, trapped, or is not there.
const DEAD: i32 = -1;
/// Reply length when the other side used up its fuel, time or memory.
const EXHAUSTED: i32 = -2;
/// Reply length when too many calls wait for each other.
const TOO_DEEP: i32 = -3;

/// The most calls that wait for each other. A call that waits keeps its native stack, of which a
/// hostile guest can fill 4 MiB.
const MAX_NESTING: u32 = 32;
/// The most bytes that a guest may note about a round.
const MAX_NOTE: usize = 64 << 10;

/// What it costs in fuel to enter the other guest, and to send it a byte: the host's work, some
/// microseconds and some copies.
const CALL_FUEL: u64 = 10_000;
const BYTE_FUEL: u64 = 1;

/// What came of a message to a guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Served {
    /// The guest's reply. It is the guest program's to choose, whatever it claims.
    Reply(Vec<u8>),
    /// The guest has ended, now or before.
    Ended(Exit),
}

/// A message to a guest of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// What the guest may use, for this message and all that follow from it.
    pub limits: Limits,
    /// At most 16 MiB, in the codec of `wasm-runtimes/cpython/CODEC.md`.
    pub bytes: Vec<u8>,
}

/// Two fresh guests, of which one may ask the other: the callee is prepared by a message, then
/// the caller gets its message and, while answering it, opens rounds. In each it talks to a copy
/// of the callee as it was prepared, which has fuel and a deadline of its own; what happens in one
/// round, the copy's end included, is not seen in the next.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Dialogue {
    /// Prepares the callee.
    pub callee: Message,
    /// The callee's reply upon which the caller is asked; after any other one it is not.
    pub proceed_on: Vec<u8>,
    /// What a copy of the callee may use in one round.
    pub round: Limits,
    /// The most rounds.
    pub max_rounds: u32,
    /// What the caller is asked. Its fuel is for one round, and anew for the next.
    pub caller: Message,
}

/// What came of a [`Dialogue`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DialogueOutcome {
    /// The callee's answer to its message.
    pub callee: Served,
    /// What the callee used for it.
    pub callee_usage: Usage,
    /// The rounds that the caller opened, in order.
    pub rounds: Vec<Round>,
    /// The caller's answer and what it used, in all rounds, if it was asked.
    pub caller: Option<(Served, Usage)>,
}

/// What came of one copy of the callee.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// What the copy used.
    pub usage: Usage,
    /// How it ended, if it did.
    pub ended: Option<Exit>,
    /// What the caller said about the round when it opened the next one.
    pub note: Vec<u8>,
}

/// Holds a dialogue.
///
/// # Errors
///
/// Returns an error if a message is too large, no instance is free, or the sandbox is at fault.
pub(super) fn converse(
    runtime: &WasmRuntime,
    dialogue: &Dialogue,
) -> Result<DialogueOutcome, SandboxError> {
    // A round may have less memory than loading took, but not less than an interpreter.
    let (limit, minimum) = (dialogue.round.memory.0, runtime.guest_memory());
    if limit < minimum {
        return Err(SandboxError::MemoryLimitTooSmall { limit, minimum });
    }
    dialogue.round.validate()?;
    let mut callee = runtime.instance(&dialogue.callee.limits)?;
    let served = callee.serve(&dialogue.callee.bytes)?;
    let callee_usage = callee.usage();
    let mut outcome = DialogueOutcome {
        callee: served,
        callee_usage,
        rounds: Vec::new(),
        caller: None,
    };
    if matches!(&outcome.callee, Served::Reply(reply) if *reply == dialogue.proceed_on) {
        let mut caller = runtime.instance(&dialogue.caller.limits)?;
        caller.seed(secret_seed(&dialogue.caller.bytes));
        let stage = Stage {
            instance: Some(Box::new(callee)),
            prepared: None,
            limits: dialogue.round.clone(),
            rounds_left: dialogue.max_rounds,
            rounds: Vec::new(),
            caller_fuel: dialogue.caller.limits.fuel,
            caller_used: 0,
        };
        let (answer, stage) = caller.serve_on(&dialogue.caller.bytes, stage);
        let mut usage = caller.usage();
        usage.fuel = usage.fuel.saturating_add(stage.caller_used);
        outcome.rounds = stage.rounds;
        outcome.caller = Some((answer?, usage));
        // The callee's instance goes back last, so that it is the next callee's: each of the two keeps
        // the pages that its kind of guest writes.
        drop(caller);
        drop(stage.instance);
    }
    Ok(outcome)
}

/// Returns where the caller's randomness starts: the same for the same message, and not what the
/// callee, which never sees it, can draw as well.
fn secret_seed(message: &[u8]) -> u64 {
    let hash = blake3::hash(message);
    u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
}

/// The guest that another one reaches through the bridge.
#[derive(Debug, Default)]
pub(super) enum Peer {
    /// There is none, or a call to it is under way.
    #[default]
    None,
    /// It is at rest, and owned.
    Resting(Box<Lease>),
    /// It waits in a `bridge.call` of its own, which runs the guest that has this.
    Suspended(Link),
}

/// The way back into a guest that waits in `bridge.call`.
///
/// Whoever makes one keeps the `Caller` borrowed, unused, for as long as the link is in a peer's
/// host state, and takes it out of there before using it again.
pub(super) struct Link {
    caller: NonNull<Caller<'static, Host>>,
    /// How many calls wait, this one included.
    depth: u32,
}

// SAFETY: a link is used and taken back within one host function, which does not leave its thread;
// it is only stored in a store's data, which has to be `Send`.
#[expect(unsafe_code, reason = "a pointer that stays on its thread")]
unsafe impl Send for Link {}
// SAFETY: as above; nothing can be done with a shared link.
#[expect(unsafe_code, reason = "a pointer that stays on its thread")]
unsafe impl Sync for Link {}

impl std::fmt::Debug for Link {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Link")
            .field("depth", &self.depth)
            .finish_non_exhaustive()
    }
}

impl Link {
    fn to(caller: &mut Caller<'_, Host>, depth: u32) -> Self {
        Self {
            caller: NonNull::from(caller).cast(),
            depth,
        }
    }

    /// Asks the waiting guest, which meanwhile reaches `asker`.
    fn ask(&mut self, asker: &mut Caller<'_, Host>, request: &[u8]) -> Asked {
        if self.depth >= MAX_NESTING {
            return Asked::Not(TOO_DEEP);
        }
        let back = Self::to(asker, self.depth + 1);
        // SAFETY: the link was made by a `bridge.call` that is on the stack below and does not use
        // its `Caller` until it has taken the link back; the link itself is borrowed mutably here,
        // so nothing else makes a reference from it.
        #[expect(unsafe_code, reason = "entering a guest that waits below")]
        let waiting: &mut Caller<'static, Host> = unsafe { self.caller.as_mut() };
        if waiting.data().doom.is_some() {
            return Asked::Not(DEAD);
        }
        let Some(door) = Door::for_answers(waiting) else {
            return Asked::Not(DEAD);
        };
        let asked_at = asker.data().carried.clock.round_ns();
        let host = waiting.data_mut();
        host.peer = Peer::Suspended(back);
        host.carried.clock.catch_up(asked_at);
        host.budget.resume();
        let answered = door.exchange(&mut *waiting, request);
        let host = waiting.data_mut();
        host.budget.pause();
        let answered_at = host.carried.clock.round_ns();
        // `asker` is used again from here on.
        host.peer = Peer::None;
        asker.data_mut().carried.clock.catch_up(answered_at);
        match answered {
            Ok(reply) => Asked::Replied(reply),
            Err(error) => {
                waiting.data_mut().doom = Some(error);
                Asked::Not(DEAD)
            }
        }
    }
}

/// What came of asking the other side.
enum Asked {
    Replied(Vec<u8>),
    /// The negative length that says why it gave no reply.
    Not(i32),
}

/// What the peers of a dialogue's caller are made from.
#[derive(Debug)]
pub(super) struct Stage {
    /// The callee's instance while it is nobody's peer: as it was prepared, then after a round.
    instance: Option<Box<Lease>>,
    /// The callee as it was prepared, from the first round on.
    prepared: Option<GuestState>,
    limits: Limits,
    rounds_left: u32,
    rounds: Vec<Round>,
    caller_fuel: u64,
    /// What the caller used in earlier rounds.
    caller_used: u64,
}

impl Stage {
    /// Ends the round of `peer`, if it is one.
    pub(super) fn close(&mut self, peer: Peer, note: Vec<u8>) {
        if let Peer::Resting(lease) = peer {
            self.rounds.push(Round {
                usage: lease.usage(),
                ended: lease.ended().cloned(),
                note,
            });
            self.instance = Some(lease);
        }
    }

    /// Makes the peer of a new round.
    fn open(&mut self) -> Result<Box<Lease>, SandboxError> {
        let mut lease = self.instance.take().expect("no round is open");
        let mut limits = self.limits.clone();
        let prepared_size = match &self.prepared {
            Some(state) => state.memory_bytes as u64,
            None => lease.usage().memory_bytes,
        };
        // What loading took is there from the start.
        limits.memory.0 = limits.memory.0.max(prepared_size);
        match &self.prepared {
            Some(state) => lease.go_back(state, &limits)?,
            None => {
                self.prepared = Some(lease.mark_here()?);
                lease.go_on(&limits)?;
            }
        }
        lease.pause();
        lease.clock().begin_round();
        Ok(lease)
    }
}

/// The exports that a message goes through.
#[derive(Clone)]
pub(super) struct Door {
    pub(super) memory: Memory,
    pub(super) buf: TypedFunc<i32, i32>,
    /// `serve` or `answer`.
    pub(super) function: TypedFunc<i32, i32>,
    pub(super) reply_ptr: TypedFunc<(), i32>,
    /// `None` if wasmtime counts.
    pub(super) gauge: Option<Gauge>,
}

impl Door {
    /// Finds the exports by which a guest that waits in the bridge is asked.
    fn for_answers(caller: &mut Caller<'_, Host>) -> Option<Self> {
        let gauge = budget::gauge_of(caller);
        let memory = caller.get_export("memory")?.into_memory()?;
        let mut function = |name| caller.get_export(name).and_then(Extern::into_func);
        let (buf, answer, reply_ptr) = (
            function("buf")?,
            function("answer")?,
            function("reply_ptr")?,
        );
        Some(Self {
            memory,
            buf: buf.typed(&mut *caller).ok()?,
            function: answer.typed(&mut *caller).ok()?,
            reply_ptr: reply_ptr.typed(&mut *caller).ok()?,
            gauge,
        })
    }

    /// Sends one message and returns the reply, which is charged to the guest that gives it.
    pub(super) fn exchange(
        &self,
        mut store: impl AsContextMut<Data = Host>,
        request: &[u8],
    ) -> Result<Vec<u8>> {
        let length = self.send(&mut store, request)?;
        let length = on_own_stack(self.function.call_async(&mut store, length))?;
        let length =
            usize::try_from(length).map_err(|_| wasmtime::Error::new(GuestFault::NoReply))?;
        let pointer = on_own_stack(self.reply_ptr.call_async(&mut store, ()))?;
        let start = pointer.cast_unsigned() as usize;
        let reply = (self.memory.data(&store))
            .get(start..start + length)
            .filter(|reply| reply.len() <= MAX_MESSAGE)
            .map(<[u8]>::to_vec)
            .ok_or_else(|| wasmtime::Error::new(GuestFault::NoReply))?;
        budget::charge(&mut store, self.gauge, BYTE_FUEL * reply.len() as u64)?;
        Ok(reply)
    }

    /// Puts `bytes` into the guest's buffer and returns their number.
    pub(super) fn send(
        &self,
        mut store: impl AsContextMut<Data = Host>,
        bytes: &[u8],
    ) -> Result<i32> {
        let no_buffer = || wasmtime::Error::new(GuestFault::NoBuffer);
        let length = i32::try_from(bytes.len()).expect("checked against `MAX_MESSAGE`");
        let pointer = on_own_stack(self.buf.call_async(&mut store, length))?;
        if pointer == 0 {
            return Err(no_buffer());
        }
        self.memory
            .write(&mut store, pointer.cast_unsigned() as usize, bytes)
            .map_err(|_| no_buffer())?;
        Ok(length)
    }
}

/// A breach of the guest interface, which only a guest whose memory was tampered with commits.
#[derive(Debug, thiserror::Error)]
pub(super) enum GuestFault {
    #[error("the interpreter gave no buffer")]
    NoBuffer,
    #[error("the interpreter gave no reply")]
    NoReply,
    #[error("the interpreter gave no exit status")]
    Status,
}

/// Defines the bridge in `linker`.
pub(super) fn add_to_linker(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(MODULE, "call", call)?;
    linker.func_wrap(MODULE, "take", take)?;
    linker.func_wrap(MODULE, "open", open)?;
    linker.func_wrap(MODULE, "printed", printed)?;
    Ok(())
}

/// Hands a request to the peer, keeps its reply for [`take`], and returns the reply's length.
fn call(mut caller: Caller<'_, Host>, pointer: u32, length: u32) -> Result<i32> {
    let gauge = budget::gauge_of(&mut caller);
    budget::charge(
        &mut caller,
        gauge,
        CALL_FUEL + BYTE_FUEL * u64::from(length),
    )?;
    let Some(request) = message(&mut caller, pointer, length, MAX_MESSAGE) else {
        return Ok(DEAD);
    };
    caller.data_mut().budget.pause();
    let asked = match std::mem::take(&mut caller.data_mut().peer) {
        Peer::None => Ok(Asked::Not(DEAD)),
        Peer::Resting(mut peer) => {
            peer.clock()
                .catch_up(caller.data().carried.clock.round_ns());
            let answered = peer.answer(&request, Link::to(&mut caller, 1));
            let answered_at = peer.clock().round_ns();
            let host = caller.data_mut();
            host.carried.clock.catch_up(answered_at);
            host.peer = Peer::Resting(peer);
            answered.map(|served| match served {
                Served::Reply(reply) => Asked::Replied(reply),
                Served::Ended(exit) if exit.is_limit() => Asked::Not(EXHAUSTED),
                Served::Ended(_) => Asked::Not(DEAD),
            })
        }
        Peer::Suspended(mut link) => {
            let asked = link.ask(&mut caller, &request);
            caller.data_mut().peer = Peer::Suspended(link);
            Ok(asked)
        }
    };
    caller.data_mut().budget.resume();
    // This guest ended while it was asked back.
    if let Some(doom) = caller.data_mut().doom.take() {
        return Err(doom);
    }
    // A fault of ours inside the peer's call is ours in this call, too: it unwinds as an error.
    match asked.map_err(wasmtime::Error::new)? {
        Asked::Replied(reply) => Ok(keep(&mut caller, reply)),
        Asked::Not(why) => Ok(why),
    }
}

/// Ends the round, about which it keeps the guest's note, and opens the next one, with fuel for
/// the guest itself as well. Returns 0, or [`DEAD`] where no round can be opened: without a stage,
/// in the midst of a call, and after the last one.
fn open(mut caller: Caller<'_, Host>, pointer: u32, length: u32) -> Result<i32> {
    let Some(note) = message(&mut caller, pointer, length, MAX_NOTE) else {
        return Ok(DEAD);
    };
    let host = caller.data_mut();
    let peer = std::mem::take(&mut host.peer);
    // In the midst of a call the peer is suspended. Before the first round there is none.
    let stage = host
        .stage
        .take_if(|stage| stage.rounds_left > 0 && !matches!(peer, Peer::Suspended(_)));
    let Some(mut stage) = stage else {
        host.peer = peer;
        return Ok(DEAD);
    };
    stage.rounds_left -= 1;
    stage.close(peer, note);
    let opened = stage.open();
    let used = budget::refuel(&mut caller, stage.caller_fuel);
    stage.caller_used = (stage.caller_used).saturating_add(*used.as_ref().unwrap_or(&0));
    let host = caller.data_mut();
    host.carried.clock.begin_round();
    // Whoever opened the stage takes it back, whatever fails here.
    host.stage = Some(stage);
    used?;
    host.peer = Peer::Resting(opened.map_err(wasmtime::Error::new)?);
    Ok(0)
}

/// Keeps what the peer printed since the last time for [`take`], and returns its length.
/// `stream` is 1 for standard output, else standard error.
fn printed(mut caller: Caller<'_, Host>, stream: u32) -> i32 {
    let is_stdout = stream == 1;
    let printed = match &mut caller.data_mut().peer {
        Peer::Resting(peer) => peer.take_printed(is_stdout),
        Peer::Suspended(link) => {
            // SAFETY: as in `Link::ask`; the reference ends with this statement.
            #[expect(unsafe_code, reason = "reading the output of a guest that waits below")]
            let waiting = unsafe { link.caller.as_mut() };
            waiting.data_mut().take_printed(is_stdout)
        }
        Peer::None => return DEAD,
    };
    if printed.len() > MAX_MESSAGE {
        return DEAD;
    }
    keep(&mut caller, printed)
}

/// Copies the last reply to `pointer` and returns its length, which must be `length`.
fn take(mut caller: Caller<'_, Host>, pointer: u32, length: u32) -> i32 {
    let Some(Extern::Memory(memory)) = caller.get_export("memory") else {
        return DEAD;
    };
    let (memory, host) = memory.data_and_store_mut(&mut caller);
    let reply = std::mem::take(&mut host.reply);
    let start = pointer as usize;
    match memory.get_mut(start..start + reply.len()) {
        Some(target) if reply.len() == length as usize => {
            target.copy_from_slice(&reply);
            i32::try_from(reply.len()).expect("a reply has at most `MAX_MESSAGE` bytes")
        }
        _ => DEAD,
    }
}

/// Copies a message of at most `limit` bytes out of the guest's memory.
fn message(
    caller: &mut Caller<'_, Host>,
    pointer: u32,
    length: u32,
    limit: usize,
) -> Option<Vec<u8>> {
    let Some(Extern::Memory(memory)) = caller.get_export("memory") else {
        return None;
    };
    let start = pointer as usize;
    memory
        .data(&*caller)
        .get(start..start + length as usize)
        .filter(|bytes| bytes.len() <= limit)
        .map(<[u8]>::to_vec)
}

fn keep(caller: &mut Caller<'_, Host>, reply: Vec<u8>) -> i32 {
    let length = i32::try_from(reply.len()).expect("a reply has at most `MAX_MESSAGE` bytes");
    caller.data_mut().reply = reply;
    length
}
