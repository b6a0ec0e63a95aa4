//! `bridge.call` and `bridge.take`: how one guest calls another one.
//!
//! The bytes pass through unread. A guest without a peer gets "the other side is dead".

use wasmtime::{Caller, Extern, Linker, Result};

use super::host::Host;
use super::instance::{MAX_MESSAGE, Served};

/// The module that guests import from.
pub(super) const MODULE: &str = "bridge";

/// Reply length when the other side exited, trapped, or is not there.
const DEAD: i32 = -1;
/// Reply length when the other side used up its fuel, time or memory.
const EXHAUSTED: i32 = -2;

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
