//! `bridge.call` and `bridge.take`: how one guest calls another one.
//!
//! The bytes pass through unread. A guest without a peer gets "the other side is dead".

use serde::{Deserialize, Serialize};
use wasmtime::{Caller, Extern, Linker, Result};

use super::error::SandboxError;
use super::host::Host;
use super::instance::MAX_MESSAGE;
use super::limits::Limits;
use super::outcome::{Exit, Usage};
use super::runtime::WasmRuntime;

/// The module that guests import from.
pub(super) const MODULE: &str = "bridge";

/// Reply length when the other side exited, trapped, or is not there.
const DEAD: i32 = -1;
/// Reply length when the other side used up its fuel, time or memory.
const EXHAUSTED: i32 = -2;

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
/// the caller gets its message and talks to the callee while answering it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Dialogue {
    /// Prepares the callee.
    pub callee: Message,
    /// The callee's reply upon which the caller is asked; after any other one it is not.
    pub proceed_on: Vec<u8>,
    /// What the caller is asked.
    pub caller: Message,
}

/// What came of a [`Dialogue`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DialogueOutcome {
    /// The callee's answer to its message.
    pub callee: Served,
    /// What the callee used in all.
    pub callee_usage: Usage,
    /// How the callee ended, if it did.
    pub callee_ended: Option<Exit>,
    /// The caller's answer and what it used, if it was asked.
    pub caller: Option<(Served, Usage)>,
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
    let mut callee = runtime.instance(&dialogue.callee.limits)?;
    let served = callee.serve(&dialogue.callee.bytes)?;
    let proceeds = matches!(&served, Served::Reply(reply) if *reply == dialogue.proceed_on);
    let mut answer = None;
    if proceeds {
        let mut caller = runtime.instance(&dialogue.caller.limits)?;
        let (asked, peer) = caller.serve_with_peer(&dialogue.caller.bytes, callee);
        answer = Some((asked?, caller.usage()));
        callee = peer;
    }
    Ok(DialogueOutcome {
        callee: served,
        callee_usage: callee.usage(),
        callee_ended: callee.ended().cloned(),
        caller: answer,
    })
}

/// Defines the bridge in `linker`.
pub(super) fn add_to_linker(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(MODULE, "call", call)?;
    linker.func_wrap(MODULE, "take", take)?;
    Ok(())
}

/// Hands a request to the peer, keeps its reply for [`take`], and returns the reply's length.
fn call(mut caller: Caller<'_, Host>, pointer: u32, length: u32) -> Result<i32> {
    let Some(Extern::Memory(memory)) = caller.get_export("memory") else {
        return Ok(DEAD);
    };
    let start = pointer as usize;
    let (memory, host) = memory.data_and_store_mut(&mut caller);
    let Some(request) = memory.get(start..start + length as usize) else {
        return Ok(DEAD);
    };
    if request.len() > MAX_MESSAGE {
        return Ok(DEAD);
    }
    let Some(peer) = host.peer.as_mut() else {
        return Ok(DEAD);
    };
    // A fault of ours inside the peer's call is ours in this call, too: it unwinds as an error.
    match peer.serve(request).map_err(wasmtime::Error::new)? {
        Served::Reply(reply) => {
            host.reply = reply;
            Ok(i32::try_from(host.reply.len()).expect("a reply has at most `MAX_MESSAGE` bytes"))
        }
        Served::Ended(exit) if exit.is_limit() => Ok(EXHAUSTED),
        Served::Ended(_) => Ok(DEAD),
    }
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
