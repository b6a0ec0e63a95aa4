//! The WASI preview 1 that guests see: standard streams, a clock, randomness, an exit.
//!
//! These six functions are all there is. Files are the guest's own, in its memory; a guest that
//! imports anything else, such as `path_open`, fails at load. The science runtime's guest has no
//! file system of its own, and gets more: see [`science`](super::science).
//!
//! The layouts and numbers are those of the `wasi_snapshot_preview1` witx files.

use wasmtime::{Caller, Extern, Linker, Result};

use super::host::Host;

/// The module that guests import from.
pub(super) const MODULE: &str = "wasi_snapshot_preview1";

/// POSIX's `IOV_MAX`: more buffers in one call are refused.
pub(super) const MAX_BUFFERS: u32 = 1024;
/// More events in one `poll_oneoff` are refused.
const MAX_SUBSCRIPTIONS: u32 = 64;
/// The `realtime` clock id; 1–3 are monotonic and CPU clocks.
const CLOCK_REALTIME: u32 = 0;
const CLOCK_LAST: u32 = 3;

/// The `errno` values in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Errno {
    BadFile = 8,
    Exists = 20,
    Fault = 21,
    TooLarge = 22,
    Invalid = 28,
    InputOutput = 29,
    IsAFolder = 31,
    TooManyOpen = 33,
    NameTooLong = 37,
    NotFound = 44,
    NoSpace = 51,
    NotAFolder = 54,
    NotEmpty = 55,
    NotSupported = 58,
    ReadOnly = 69,
    SeekOnPipe = 70,
}

/// The error by which `proc_exit` unwinds the guest.
#[derive(Debug, thiserror::Error)]
#[error("the guest exited with code {code}")]
pub(super) struct ProcExit {
    pub(super) code: u32,
}

/// Defines what guests may import of preview 1 in `linker`.
pub(super) fn add_to_linker(linker: &mut Linker<Host>) -> Result<()> {
    add_streams(linker)?;
    add_process(linker)?;
    add_time(linker)?;
    Ok(())
}

fn add_streams(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(
        MODULE,
        "fd_write",
        |mut caller: Caller<'_, Host>, fd: u32, buffers: u32, count: u32, written: u32| {
            respond(&mut caller, |memory, host| {
                let stream = match fd {
                    1 => &mut host.stdout,
                    2 => &mut host.stderr,
                    _ => return Err(Errno::BadFile),
                };
                let mut total = 0_u32;
                for index in 0..checked_count(count, MAX_BUFFERS)? {
                    let (pointer, length) = buffer_at(memory, buffers, index)?;
                    stream.write(slice(memory, pointer, length)?);
                    total = total.checked_add(length).ok_or(Errno::Invalid)?;
                }
                put(memory, written, &total.to_le_bytes())
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "fd_read",
        |mut caller: Caller<'_, Host>, fd: u32, buffers: u32, count: u32, read: u32| {
            respond(&mut caller, |memory, host| {
                if fd != 0 {
                    return Err(Errno::BadFile);
                }
                let mut total = 0_u32;
                for index in 0..checked_count(count, MAX_BUFFERS)? {
                    let (pointer, length) = buffer_at(memory, buffers, index)?;
                    let got = host.stdin.read(slice_mut(memory, pointer, length)?);
                    let got = u32::try_from(got).map_err(|_| Errno::Invalid)?;
                    total = total.checked_add(got).ok_or(Errno::Invalid)?;
                    if got < length {
                        break;
                    }
                }
                put(memory, read, &total.to_le_bytes())
            })
        },
    )?;
    Ok(())
}

pub(super) fn add_process(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(MODULE, "proc_exit", |code: u32| -> Result<()> {
        Err(wasmtime::Error::new(ProcExit { code }))
    })?;
    linker.func_wrap(
        MODULE,
        "random_get",
        |mut caller: Caller<'_, Host>, pointer: u32, length: u32| {
            respond(&mut caller, |memory, host| {
                host.fill_random(slice_mut(memory, pointer, length)?);
                Ok(())
            })
        },
    )?;
    Ok(())
}

pub(super) fn add_time(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(
        MODULE,
        "clock_time_get",
        |mut caller: Caller<'_, Host>, id: u32, _precision: u64, result: u32| {
            respond(&mut caller, |memory, host| {
                known_clock(id)?;
                let now = host.carried.clock.read(id == CLOCK_REALTIME);
                put(memory, result, &now.to_le_bytes())
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "poll_oneoff",
        |mut caller: Caller<'_, Host>, subscriptions: u32, events: u32, count: u32, fired: u32| {
            respond(&mut caller, |memory, host| {
                let count = checked_count(count, MAX_SUBSCRIPTIONS)?;
                let mut first: Option<(u64, u64)> = None; // (nanoseconds to wait, userdata)
                for index in 0..count {
                    let entry = slice(memory, offset(subscriptions, index, 48)?, 48)?;
                    if entry[8] != 0 {
                        continue; // not a clock: streams have nothing to wait for
                    }
                    let timeout = u64_at(entry, 24);
                    let wait = if entry[40] & 1 == 1 {
                        let is_realtime = u32_at(entry, 16) == CLOCK_REALTIME;
                        timeout.saturating_sub(host.carried.clock.now(is_realtime))
                    } else {
                        timeout
                    };
                    let candidate = (wait, u64_at(entry, 0));
                    first = Some(first.map_or(candidate, |best| best.min(candidate)));
                }
                let (wait, userdata) = first.ok_or(Errno::NotSupported)?;
                host.carried.clock.advance(wait);
                let mut event = [0_u8; 32];
                event[..8].copy_from_slice(&userdata.to_le_bytes());
                put(memory, events, &event)?;
                put(memory, fired, &1_u32.to_le_bytes())
            })
        },
    )?;
    Ok(())
}

/// Runs `body` over the guest's memory and turns its result into an errno.
pub(super) fn respond(
    caller: &mut Caller<'_, Host>,
    body: impl FnOnce(&mut [u8], &mut Host) -> Result<(), Errno>,
) -> u32 {
    let Some(Extern::Memory(memory)) = caller.get_export("memory") else {
        return Errno::Fault as u32;
    };
    let (memory, host) = memory.data_and_store_mut(caller);
    match body(memory, host) {
        Ok(()) => 0,
        Err(errno) => errno as u32,
    }
}

fn known_clock(id: u32) -> Result<(), Errno> {
    if id <= CLOCK_LAST {
        Ok(())
    } else {
        Err(Errno::Invalid)
    }
}

pub(super) fn checked_count(count: u32, limit: u32) -> Result<u32, Errno> {
    if count <= limit {
        Ok(count)
    } else {
        Err(Errno::Invalid)
    }
}

pub(super) fn offset(base: u32, index: u32, size: u32) -> Result<u32, Errno> {
    index
        .checked_mul(size)
        .and_then(|bytes| base.checked_add(bytes))
        .ok_or(Errno::Fault)
}

/// Reads the `index`th `iovec`: pointer and length.
pub(super) fn buffer_at(memory: &[u8], buffers: u32, index: u32) -> Result<(u32, u32), Errno> {
    let entry = slice(memory, offset(buffers, index, 8)?, 8)?;
    Ok((u32_at(entry, 0), u32_at(entry, 4)))
}

/// Reads a little-endian number from bytes that are known to hold it.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("a slice of 4 bytes"))
}

/// Reads a little-endian number from bytes that are known to hold it.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("a slice of 8 bytes"))
}

pub(super) fn slice(memory: &[u8], pointer: u32, length: u32) -> Result<&[u8], Errno> {
    let start = pointer as usize;
    memory
        .get(start..start + length as usize)
        .ok_or(Errno::Fault)
}

pub(super) fn slice_mut(memory: &mut [u8], pointer: u32, length: u32) -> Result<&mut [u8], Errno> {
    let start = pointer as usize;
    memory
        .get_mut(start..start + length as usize)
        .ok_or(Errno::Fault)
}

pub(super) fn put(memory: &mut [u8], pointer: u32, bytes: &[u8]) -> Result<(), Errno> {
    let start = pointer as usize;
    memory
        .get_mut(start..start + bytes.len())
        .ok_or(Errno::Fault)?
        .copy_from_slice(bytes);
    Ok(())
}
