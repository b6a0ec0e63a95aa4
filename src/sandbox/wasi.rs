//! The WASI preview 1 that guests see: standard streams, a clock, randomness, an exit. No files,
//! no sockets, no environment.
//!
//! Every function of preview 1 is defined, so a guest built against a full libc links; those that
//! would reach the outside answer with an errno. A guest import outside this list fails at load.
//!
//! The layouts and numbers are those of the `wasi_snapshot_preview1` witx files.

use wasmtime::{Caller, Extern, FuncType, Linker, Result, Val, ValType};

use super::host::Host;

/// The module that guests import from.
pub(super) const MODULE: &str = "wasi_snapshot_preview1";

/// POSIX's `IOV_MAX`: more buffers in one call are refused.
const MAX_BUFFERS: u32 = 1024;
/// More events in one `poll_oneoff` are refused.
const MAX_SUBSCRIPTIONS: u32 = 64;
/// The `realtime` clock id; 1–3 are monotonic and CPU clocks.
const CLOCK_REALTIME: u32 = 0;
const CLOCK_LAST: u32 = 3;
/// Resolution reported by `clock_res_get`, in nanoseconds.
const CLOCK_RESOLUTION_NS: u64 = 1_000;
/// Every right that preview 1 defines: what a stream may do is decided call by call.
const ALL_RIGHTS: u64 = (1 << 29) - 1;

/// The `errno` values in use.
#[derive(Debug, Clone, Copy)]
enum Errno {
    BadFile = 8,
    Fault = 21,
    Invalid = 28,
    NotSupported = 58,
    IllegalSeek = 70,
    NotCapable = 76,
}

/// The error by which `proc_exit` unwinds the guest.
#[derive(Debug, thiserror::Error)]
#[error("the guest exited with code {code}")]
pub(super) struct ProcExit {
    pub(super) code: u32,
}

/// Functions that are denied: name, parameter types (`i` is i32, `I` is i64), errno.
const DENIED: [(&str, &str, Errno); 31] = [
    ("fd_advise", "iIIi", Errno::BadFile),
    ("fd_allocate", "iII", Errno::BadFile),
    ("fd_datasync", "i", Errno::BadFile),
    ("fd_fdstat_set_flags", "ii", Errno::NotCapable),
    ("fd_fdstat_set_rights", "iII", Errno::NotCapable),
    ("fd_filestat_set_size", "iI", Errno::BadFile),
    ("fd_filestat_set_times", "iIIi", Errno::BadFile),
    ("fd_pread", "iiiIi", Errno::IllegalSeek),
    ("fd_prestat_dir_name", "iii", Errno::BadFile),
    ("fd_prestat_get", "ii", Errno::BadFile),
    ("fd_pwrite", "iiiIi", Errno::IllegalSeek),
    ("fd_readdir", "iiiIi", Errno::BadFile),
    ("fd_renumber", "ii", Errno::BadFile),
    ("fd_seek", "iIii", Errno::IllegalSeek),
    ("fd_sync", "i", Errno::BadFile),
    ("fd_tell", "ii", Errno::IllegalSeek),
    ("path_create_directory", "iii", Errno::NotCapable),
    ("path_filestat_get", "iiiii", Errno::NotCapable),
    ("path_filestat_set_times", "iiiiIIi", Errno::NotCapable),
    ("path_link", "iiiiiii", Errno::NotCapable),
    ("path_open", "iiiiiIIii", Errno::NotCapable),
    ("path_readlink", "iiiiii", Errno::NotCapable),
    ("path_remove_directory", "iii", Errno::NotCapable),
    ("path_rename", "iiiiii", Errno::NotCapable),
    ("path_symlink", "iiiii", Errno::NotCapable),
    ("path_unlink_file", "iii", Errno::NotCapable),
    ("proc_raise", "i", Errno::NotSupported),
    ("sock_accept", "iii", Errno::BadFile),
    ("sock_recv", "iiiiii", Errno::BadFile),
    ("sock_send", "iiiii", Errno::BadFile),
    ("sock_shutdown", "ii", Errno::BadFile),
];

/// Defines all of preview 1 in `linker`.
pub(super) fn add_to_linker(linker: &mut Linker<Host>) -> Result<()> {
    add_streams(linker)?;
    add_environment(linker)?;
    add_time(linker)?;
    for (name, parameters, errno) in DENIED {
        let parameters = parameters.chars().map(|letter| match letter {
            'I' => ValType::I64,
            _ => ValType::I32,
        });
        let signature = FuncType::new(linker.engine(), parameters, [ValType::I32]);
        linker.func_new(MODULE, name, signature, move |_, _, results| {
            results[0] = Val::I32(errno as i32);
            Ok(())
        })?;
    }
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
    linker.func_wrap(
        MODULE,
        "fd_fdstat_get",
        |mut caller: Caller<'_, Host>, fd: u32, result: u32| {
            respond(&mut caller, |memory, _| {
                stream_only(fd)?;
                // Type 0, "unknown": a terminal would make libc switch to line buffering.
                let mut stat = [0_u8; 24];
                stat[8..16].copy_from_slice(&ALL_RIGHTS.to_le_bytes());
                stat[16..24].copy_from_slice(&ALL_RIGHTS.to_le_bytes());
                put(memory, result, &stat)
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "fd_filestat_get",
        |mut caller: Caller<'_, Host>, fd: u32, result: u32| {
            respond(&mut caller, |memory, _| {
                stream_only(fd)?;
                put(memory, result, &[0; 64])
            })
        },
    )?;
    // Closing a stream is accepted and without effect: the next step of a session needs it.
    linker.func_wrap(
        MODULE,
        "fd_close",
        |mut caller: Caller<'_, Host>, fd: u32| respond(&mut caller, |_, _| stream_only(fd)),
    )?;
    Ok(())
}

fn add_environment(linker: &mut Linker<Host>) -> Result<()> {
    for name in ["args_sizes_get", "environ_sizes_get"] {
        linker.func_wrap(
            MODULE,
            name,
            |mut caller: Caller<'_, Host>, count: u32, size: u32| {
                respond(&mut caller, |memory, _| {
                    put(memory, count, &[0; 4])?;
                    put(memory, size, &[0; 4])
                })
            },
        )?;
    }
    for name in ["args_get", "environ_get"] {
        linker.func_wrap(MODULE, name, |_pointers: u32, _bytes: u32| 0_u32)?;
    }
    linker.func_wrap(MODULE, "sched_yield", || 0_u32)?;
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

fn add_time(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(
        MODULE,
        "clock_res_get",
        |mut caller: Caller<'_, Host>, id: u32, result: u32| {
            respond(&mut caller, |memory, _| {
                known_clock(id)?;
                put(memory, result, &CLOCK_RESOLUTION_NS.to_le_bytes())
            })
        },
    )?;
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
fn respond(
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

fn stream_only(fd: u32) -> Result<(), Errno> {
    if fd <= 2 { Ok(()) } else { Err(Errno::BadFile) }
}

fn known_clock(id: u32) -> Result<(), Errno> {
    if id <= CLOCK_LAST {
        Ok(())
    } else {
        Err(Errno::Invalid)
    }
}

fn checked_count(count: u32, limit: u32) -> Result<u32, Errno> {
    if count <= limit {
        Ok(count)
    } else {
        Err(Errno::Invalid)
    }
}

fn offset(base: u32, index: u32, size: u32) -> Result<u32, Errno> {
    index
        .checked_mul(size)
        .and_then(|bytes| base.checked_add(bytes))
        .ok_or(Errno::Fault)
}

/// Reads the `index`th `iovec`: pointer and length.
fn buffer_at(memory: &[u8], buffers: u32, index: u32) -> Result<(u32, u32), Errno> {
    let entry = slice(memory, offset(buffers, index, 8)?, 8)?;
    Ok((u32_at(entry, 0), u32_at(entry, 4)))
}

/// Reads a little-endian number from bytes that are known to hold it.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("a slice of 4 bytes"))
}

/// Reads a little-endian number from bytes that are known to hold it.
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("a slice of 8 bytes"))
}

fn slice(memory: &[u8], pointer: u32, length: u32) -> Result<&[u8], Errno> {
    let start = pointer as usize;
    memory
        .get(start..start + length as usize)
        .ok_or(Errno::Fault)
}

fn slice_mut(memory: &mut [u8], pointer: u32, length: u32) -> Result<&mut [u8], Errno> {
    let start = pointer as usize;
    memory
        .get_mut(start..start + length as usize)
        .ok_or(Errno::Fault)
}

fn put(memory: &mut [u8], pointer: u32, bytes: &[u8]) -> Result<(), Errno> {
    let start = pointer as usize;
    memory
        .get_mut(start..start + bytes.len())
        .ok_or(Errno::Fault)?
        .copy_from_slice(bytes);
    Ok(())
}
