//! The rest of WASI preview 1, for the science runtime's guest: files, in a tree of the host's that
//! is the instance's own; no arguments, no environment, no sockets.
//!
//! Clock, randomness, sleeping and exit are those of every guest (`sandbox/wasi.rs`), so this is as
//! deterministic. The layouts and numbers are those of the `wasi_snapshot_preview1` witx files.

use wasmtime::{Caller, Linker, Result};

use super::files::{Access, Files, Kind, Opening, ROOT, Status};
use crate::sandbox::host::Host;
use crate::sandbox::wasi::{
    self, Errno, MAX_BUFFERS, MODULE, buffer_at, checked_count, put, respond, slice, slice_mut,
};

/// Of `fdflags`.
const APPEND: u16 = 1;
/// Of `oflags`.
const CREATE: u32 = 1;
const FOLDER: u32 = 2;
const EXCLUSIVE: u32 = 4;
const TRUNCATE: u32 = 8;
/// Of `rights`.
const MAY_READ: u64 = 1 << 1;
const MAY_WRITE: u64 = 1 << 6;
const ALL_RIGHTS: u64 = (1 << 29) - 1;
/// Of `fstflags`.
const SET_MODIFIED: u32 = 4;
const SET_MODIFIED_NOW: u32 = 8;
/// Of `filetype`.
const UNKNOWN_TYPE: u8 = 0;
const FOLDER_TYPE: u8 = 3;
const FILE_TYPE: u8 = 4;
/// Standard input, output and error.
const STREAMS: u32 = 3;
/// What the clock can be asked for: its step.
const RESOLUTION_NS: u64 = 1_000;
/// Bytes of a `dirent` before the name.
const ENTRY: usize = 24;

/// Defines all functions of preview 1 in `linker`.
pub(in crate::sandbox) fn add_to_linker(linker: &mut Linker<Host>) -> Result<()> {
    wasi::add_process(linker)?;
    wasi::add_time(linker)?;
    add_nothing(linker)?;
    add_descriptors(linker)?;
    add_positions(linker)?;
    add_reading(linker)?;
    add_writing(linker)?;
    add_folders(linker)?;
    add_paths(linker)?;
    add_path_changes(linker)?;
    Ok(())
}

/// Arguments, environment and sockets, of which there are none, and what has no effect.
fn add_nothing(linker: &mut Linker<Host>) -> Result<()> {
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
        linker.func_wrap(MODULE, name, |_: u32, _: u32| 0_u32)?;
    }
    linker.func_wrap(
        MODULE,
        "clock_res_get",
        |mut caller: Caller<'_, Host>, _id: u32, result: u32| {
            respond(&mut caller, |memory, _| {
                put(memory, result, &RESOLUTION_NS.to_le_bytes())
            })
        },
    )?;
    linker.func_wrap(MODULE, "sched_yield", || 0_u32)?;
    linker.func_wrap(MODULE, "fd_advise", |_: u32, _: u64, _: u64, _: u32| 0_u32)?;
    for name in ["fd_datasync", "fd_sync"] {
        linker.func_wrap(MODULE, name, |_: u32| 0_u32)?;
    }
    let absent = Errno::NotSupported as u32;
    linker.func_wrap(MODULE, "sock_accept", move |_: u32, _: u32, _: u32| absent)?;
    linker.func_wrap(
        MODULE,
        "sock_recv",
        move |_: u32, _: u32, _: u32, _: u32, _: u32, _: u32| absent,
    )?;
    linker.func_wrap(
        MODULE,
        "sock_send",
        move |_: u32, _: u32, _: u32, _: u32, _: u32| absent,
    )?;
    linker.func_wrap(MODULE, "sock_shutdown", move |_: u32, _: u32| absent)?;
    Ok(())
}

/// What descriptors are.
fn add_descriptors(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(
        MODULE,
        "fd_close",
        |mut caller: Caller<'_, Host>, fd: u32| {
            respond(&mut caller, |_, host| files(host)?.close(fd))
        },
    )?;
    linker.func_wrap(
        MODULE,
        "fd_fdstat_get",
        |mut caller: Caller<'_, Host>, fd: u32, result: u32| {
            respond(&mut caller, |memory, host| {
                let (kind, flags) = if fd < STREAMS {
                    (UNKNOWN_TYPE, 0)
                } else {
                    let (status, access) = files(host)?.describe(fd)?;
                    (
                        file_type(status.kind),
                        if access.append { APPEND } else { 0 },
                    )
                };
                let mut stat = [0_u8; 24];
                stat[0] = kind;
                stat[2..4].copy_from_slice(&flags.to_le_bytes());
                stat[8..16].copy_from_slice(&ALL_RIGHTS.to_le_bytes());
                stat[16..].copy_from_slice(&ALL_RIGHTS.to_le_bytes());
                put(memory, result, &stat)
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "fd_fdstat_set_flags",
        |mut caller: Caller<'_, Host>, fd: u32, flags: u32| {
            respond(&mut caller, |_, host| {
                files(host)?.set_append(fd, flags & u32::from(APPEND) != 0)
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "fd_filestat_get",
        |mut caller: Caller<'_, Host>, fd: u32, result: u32| {
            respond(&mut caller, |memory, host| {
                let stat = if fd < STREAMS {
                    [0; 64]
                } else {
                    file_stat(files(host)?.describe(fd)?.0)
                };
                put(memory, result, &stat)
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "fd_filestat_set_times",
        |mut caller: Caller<'_, Host>, fd: u32, _accessed: u64, modified: u64, flags: u32| {
            respond(&mut caller, |_, host| {
                match new_time(host, modified, flags) {
                    Some(time) => files(host)?.set_modified(fd, time),
                    None => Ok(()),
                }
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "fd_prestat_get",
        |mut caller: Caller<'_, Host>, fd: u32, result: u32| {
            respond(&mut caller, |memory, _| {
                // A folder whose name has one byte.
                is_root(fd)?;
                put(memory, result, &[0, 0, 0, 0, 1, 0, 0, 0])
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "fd_prestat_dir_name",
        |mut caller: Caller<'_, Host>, fd: u32, pointer: u32, length: u32| {
            respond(&mut caller, |memory, _| {
                is_root(fd)?;
                let name = b"/";
                if (length as usize) < name.len() {
                    return Err(Errno::NameTooLong);
                }
                put(memory, pointer, name)
            })
        },
    )?;
    Ok(())
}

fn add_positions(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(
        MODULE,
        "fd_seek",
        |mut caller: Caller<'_, Host>, fd: u32, offset: i64, from: u32, result: u32| {
            respond(&mut caller, |memory, host| {
                if fd < STREAMS {
                    return Err(Errno::SeekOnPipe);
                }
                let files = files(host)?;
                let start = match from {
                    0 => 0,
                    1 => files.position(fd)?,
                    2 => files.describe(fd)?.0.size,
                    _ => return Err(Errno::Invalid),
                };
                let position = start.checked_add_signed(offset).ok_or(Errno::Invalid)?;
                files.seek(fd, position)?;
                put(memory, result, &position.to_le_bytes())
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "fd_tell",
        |mut caller: Caller<'_, Host>, fd: u32, result: u32| {
            respond(&mut caller, |memory, host| {
                if fd < STREAMS {
                    return Err(Errno::SeekOnPipe);
                }
                let position = files(host)?.position(fd)?;
                put(memory, result, &position.to_le_bytes())
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "fd_filestat_set_size",
        |mut caller: Caller<'_, Host>, fd: u32, size: u64| {
            respond(&mut caller, |_, host| {
                let now = now(host);
                files(host)?.set_size(fd, size, now)
            })
        },
    )?;
    Ok(())
}

fn add_reading(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(
        MODULE,
        "fd_read",
        |mut caller: Caller<'_, Host>, fd: u32, buffers: u32, count: u32, result: u32| {
            respond(&mut caller, |memory, host| {
                let read = read(memory, host, fd, (buffers, count), None)?;
                put(memory, result, &read.to_le_bytes())
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "fd_pread",
        |mut caller: Caller<'_, Host>, fd: u32, buffers: u32, count: u32, at: u64, result: u32| {
            respond(&mut caller, |memory, host| {
                if fd < STREAMS {
                    return Err(Errno::SeekOnPipe);
                }
                let read = read(memory, host, fd, (buffers, count), Some(at))?;
                put(memory, result, &read.to_le_bytes())
            })
        },
    )?;
    Ok(())
}

/// Reads into a guest's buffers, and returns the number of bytes.
fn read(
    memory: &mut [u8],
    host: &mut Host,
    fd: u32,
    (buffers, count): (u32, u32),
    at: Option<u64>,
) -> Result<u32, Errno> {
    let mut total = 0_u32;
    for index in 0..checked_count(count, MAX_BUFFERS)? {
        let (pointer, length) = buffer_at(memory, buffers, index)?;
        let buffer = slice_mut(memory, pointer, length)?;
        let got = match fd {
            0 => host.stdin.read(buffer),
            fd => {
                let at = at.map(|at| at.saturating_add(total.into()));
                files(host)?.read(fd, at, buffer)?
            }
        };
        let got = u32::try_from(got).map_err(|_| Errno::Invalid)?;
        total = total.checked_add(got).ok_or(Errno::Invalid)?;
        if got < length {
            break;
        }
    }
    Ok(total)
}

fn add_writing(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(
        MODULE,
        "fd_write",
        |mut caller: Caller<'_, Host>, fd: u32, buffers: u32, count: u32, result: u32| {
            respond(&mut caller, |memory, host| {
                let written = write(memory, host, fd, (buffers, count), None)?;
                put(memory, result, &written.to_le_bytes())
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "fd_pwrite",
        |mut caller: Caller<'_, Host>, fd: u32, buffers: u32, count: u32, at: u64, result: u32| {
            respond(&mut caller, |memory, host| {
                if fd < STREAMS {
                    return Err(Errno::SeekOnPipe);
                }
                let written = write(memory, host, fd, (buffers, count), Some(at))?;
                put(memory, result, &written.to_le_bytes())
            })
        },
    )?;
    Ok(())
}

/// Writes a guest's buffers, and returns the number of bytes.
fn write(
    memory: &[u8],
    host: &mut Host,
    fd: u32,
    (buffers, count): (u32, u32),
    at: Option<u64>,
) -> Result<u32, Errno> {
    let now = now(host);
    let mut total = 0_u32;
    for index in 0..checked_count(count, MAX_BUFFERS)? {
        let (pointer, length) = buffer_at(memory, buffers, index)?;
        let bytes = slice(memory, pointer, length)?;
        match fd {
            0 => return Err(Errno::BadFile),
            1 => host.stdout.write(bytes),
            2 => host.stderr.write(bytes),
            fd => {
                let at = at.map(|at| at.saturating_add(total.into()));
                files(host)?.write(fd, at, bytes, now)?;
            }
        }
        total = total.checked_add(length).ok_or(Errno::Invalid)?;
    }
    Ok(total)
}

fn add_folders(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(
        MODULE,
        "fd_readdir",
        |mut caller: Caller<'_, Host>,
         fd: u32,
         pointer: u32,
         length: u32,
         cookie: u64,
         result: u32| {
            respond(&mut caller, |memory, host| {
                let buffer = slice_mut(memory, pointer, length)?;
                let used = read_folder(files(host)?, fd, cookie, buffer)?;
                let used = u32::try_from(used).map_err(|_| Errno::Invalid)?;
                put(memory, result, &used.to_le_bytes())
            })
        },
    )?;
    Ok(())
}

/// Writes a folder's entries, the last one cut where the buffer ends: then there are more.
fn read_folder(files: &Files, fd: u32, cookie: u64, buffer: &mut [u8]) -> Result<usize, Errno> {
    let mut used = 0;
    for ((name, status), count) in files.entries_after(fd, cookie)?.zip(1..) {
        let next: u64 = cookie.saturating_add(count);
        let mut entry = [0; ENTRY];
        entry[..8].copy_from_slice(&next.to_le_bytes());
        entry[8..16].copy_from_slice(&status.number.to_le_bytes());
        let length = u32::try_from(name.len()).map_err(|_| Errno::Invalid)?;
        entry[16..20].copy_from_slice(&length.to_le_bytes());
        entry[20] = file_type(status.kind);
        for part in [&entry[..], name.as_bytes()] {
            let rest = &mut buffer[used..];
            let count = part.len().min(rest.len());
            rest[..count].copy_from_slice(&part[..count]);
            used += count;
        }
        if used == buffer.len() {
            break;
        }
    }
    Ok(used)
}

fn add_paths(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(
        MODULE,
        "path_open",
        |mut caller: Caller<'_, Host>,
         fd: u32,
         _follow: u32,
         path: u32,
         path_length: u32,
         flags: u32,
         rights: u64,
         _inherited: u64,
         fd_flags: u32,
         result: u32| {
            respond(&mut caller, |memory, host| {
                let now = now(host);
                let path = text(memory, path, path_length)?;
                let opening = Opening {
                    create: flags & CREATE != 0,
                    exclusive: flags & EXCLUSIVE != 0,
                    truncate: flags & TRUNCATE != 0,
                    folder: flags & FOLDER != 0,
                };
                let access = Access {
                    read: rights & MAY_READ != 0,
                    write: rights & MAY_WRITE != 0,
                    append: fd_flags & u32::from(APPEND) != 0,
                };
                let files = files(host)?;
                let opened = files.open(fd, path, opening, access, now)?;
                put(memory, result, &opened.to_le_bytes())
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "path_filestat_get",
        |mut caller: Caller<'_, Host>,
         fd: u32,
         _follow: u32,
         path: u32,
         path_length: u32,
         result: u32| {
            respond(&mut caller, |memory, host| {
                let path = text(memory, path, path_length)?;
                let stat = file_stat(files(host)?.status(fd, path)?);
                put(memory, result, &stat)
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "path_readlink",
        |mut caller: Caller<'_, Host>,
         fd: u32,
         path: u32,
         path_length: u32,
         _buffer: u32,
         _buffer_length: u32,
         _result: u32| {
            respond(&mut caller, |memory, host| {
                // What is there is no link.
                files(host)?.status(fd, text(memory, path, path_length)?)?;
                Err(Errno::Invalid)
            })
        },
    )?;
    Ok(())
}

fn add_path_changes(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(
        MODULE,
        "path_create_directory",
        |mut caller: Caller<'_, Host>, fd: u32, path: u32, length: u32| {
            respond(&mut caller, |memory, host| {
                let now = now(host);
                files(host)?.create_folder(fd, text(memory, path, length)?, now)
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "path_remove_directory",
        |mut caller: Caller<'_, Host>, fd: u32, path: u32, length: u32| {
            respond(&mut caller, |memory, host| {
                files(host)?.remove_folder(fd, text(memory, path, length)?)
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "path_unlink_file",
        |mut caller: Caller<'_, Host>, fd: u32, path: u32, length: u32| {
            respond(&mut caller, |memory, host| {
                files(host)?.remove_file(fd, text(memory, path, length)?)
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "path_rename",
        |mut caller: Caller<'_, Host>,
         from: u32,
         old: u32,
         old_length: u32,
         to: u32,
         new: u32,
         new_length: u32| {
            respond(&mut caller, |memory, host| {
                let old = (from, text(memory, old, old_length)?);
                let new = (to, text(memory, new, new_length)?);
                files(host)?.rename(old, new)
            })
        },
    )?;
    linker.func_wrap(
        MODULE,
        "path_filestat_set_times",
        |mut caller: Caller<'_, Host>,
         fd: u32,
         _follow: u32,
         path: u32,
         length: u32,
         _accessed: u64,
         modified: u64,
         flags: u32| {
            respond(&mut caller, |memory, host| {
                let path = text(memory, path, length)?;
                match new_time(host, modified, flags) {
                    Some(time) => files(host)?.set_path_modified(fd, path, time),
                    None => Ok(()),
                }
            })
        },
    )?;
    let absent = Errno::NotSupported as u32;
    linker.func_wrap(
        MODULE,
        "path_link",
        move |_: u32, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32| absent,
    )?;
    linker.func_wrap(
        MODULE,
        "path_symlink",
        move |_: u32, _: u32, _: u32, _: u32, _: u32| absent,
    )?;
    Ok(())
}

/// The instance's files.
fn files(host: &mut Host) -> Result<&mut Files, Errno> {
    host.carried.files.as_deref_mut().ok_or(Errno::BadFile)
}

/// The wall clock, which looking at it here does not move.
fn now(host: &Host) -> u64 {
    host.carried.clock.now(true)
}

/// The time of the last change that `fstflags` ask for.
fn new_time(host: &Host, modified: u64, flags: u32) -> Option<u64> {
    if flags & SET_MODIFIED_NOW != 0 {
        Some(now(host))
    } else {
        (flags & SET_MODIFIED != 0).then_some(modified)
    }
}

fn is_root(fd: u32) -> Result<(), Errno> {
    if fd == ROOT {
        Ok(())
    } else {
        Err(Errno::BadFile)
    }
}

/// A path of the guest's.
fn text(memory: &[u8], pointer: u32, length: u32) -> Result<&str, Errno> {
    let bytes = slice(memory, pointer, length)?;
    str::from_utf8(bytes).map_err(|_| Errno::Invalid)
}

fn file_type(kind: Kind) -> u8 {
    match kind {
        Kind::Folder => FOLDER_TYPE,
        Kind::File => FILE_TYPE,
    }
}

fn file_stat(status: Status) -> [u8; 64] {
    let mut stat = [0; 64];
    stat[0..8].copy_from_slice(&1_u64.to_le_bytes()); // device
    stat[8..16].copy_from_slice(&status.number.to_le_bytes());
    stat[16] = file_type(status.kind);
    stat[24..32].copy_from_slice(&1_u64.to_le_bytes()); // links
    stat[32..40].copy_from_slice(&status.size.to_le_bytes());
    for at in [40, 48, 56] {
        stat[at..at + 8].copy_from_slice(&status.modified_ns.to_le_bytes());
    }
    stat
}

#[cfg(test)]
mod tests;
