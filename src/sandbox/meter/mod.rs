//! The meter: a pass over the guest's module that makes every cycle of its code pay.
//!
//! The pass adds two globals, which the guest's code cannot name: [`METER`] counts down, and
//! [`MARK`] is where the host wants to be asked. It inserts two kinds of code:
//!
//! * a **charge** takes a constant off the meter and traps when it falls below zero;
//! * an **asking** charge calls the host's `meter.refill` when the meter falls below the mark, which
//!   is never below zero; the host then looks at the deadline and moves the mark, or ends the call.
//!
//! A trap costs a compare and a branch. A call costs more even where it is never made: all registers
//! are the callee's, so everything alive across it is kept in memory. So the host is asked only where
//! that is cheap, and whether the budget is used up never depends on it.
//!
//! **Every cycle is cut.** A program that runs without end repeats a loop or calls without end. Each
//! `loop` starts with a charge. Each cycle of the call graph has a function that starts with one; the
//! graph has an edge from a function to each one that it calls, and, for each `call_indirect`, to
//! every function of that type whose address is taken, so nothing depends on what memory holds.
//! Bulk memory instructions pay for their length, and what the host does is paid for at the call.
//! [`verify()`](verify::verify) proves all of that anew for the finished module, from its code.
//!
//! **One exception**: a loop that calls `meter.refill` itself is a bytecode interpreter's and vouches
//! for its own cycles. There each such call becomes an asking charge, and nothing else is charged:
//! a charge for each bytecode costs three times what all other charges do. The interpreter's patch
//! places the calls so that every cycle of bytecode, however it was made, comes by one.
//!
//! **One unit is about one operator**: a charge is the number of operators to expect of an iteration
//! or a function, with the uncharged functions that it calls.

mod outline;
mod rewrite;
mod shape;
mod verify;

use std::fmt;

use super::error::SandboxError;

/// The exported global that counts down; the call is over when it is below zero.
pub(super) const METER: &str = "__meter";
/// The exported global below which asking charges call [`REFILL`]. The guest only reads it.
pub(super) const MARK: &str = "__meter_mark";
/// The host function that asking charges call, and with which a guest marks its own.
pub(super) const REFILL: (&str, &str) = ("meter", "refill");

/// The most that one loop iteration or function entry pays.
const HEAVIEST: u32 = 1 << 20;
/// What a call of the host pays.
const HOST_CALL: u32 = 500;
/// What `memory.grow` pays.
const GROWTH: u32 = 4096;
/// Bulk memory instructions pay one unit for 2 to this power bytes.
const BULK_SHIFT: u32 = 1;
/// What a guest's own call of [`REFILL`] pays: about the operators from one to the next.
const MARKED: u32 = 100;
/// A loop or function of so many units asks: the call weighs little in it.
const LARGE: u32 = 256;

/// Inserts the meter into a module that has been checked for hidden state.
///
/// # Errors
///
/// Returns [`SandboxError::Unmetered`] if the module is malformed, uses the meter's names or an
/// instruction that the meter does not know how to bound.
pub(super) fn meter(wasm: &[u8]) -> Result<Vec<u8>, SandboxError> {
    let shape = shape::Shape::read(wasm)?;
    let metered = rewrite::rewrite(wasm, &shape)?;
    verify::verify(&metered)?;
    Ok(metered)
}

fn unmetered(reason: impl Into<String>) -> SandboxError {
    SandboxError::Unmetered {
        reason: reason.into(),
    }
}

fn malformed(error: impl fmt::Display) -> SandboxError {
    unmetered(format!("malformed: {error}"))
}

#[cfg(test)]
mod tests;
