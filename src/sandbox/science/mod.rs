//! The optional science runtime: a CPython with numpy, pandas and scipy inside, from `PyPI`.
//!
//! Its guest was not built for this sandbox. It wants files and all of WASI's preview 1, which it
//! gets from [`files`] and [`wasi`], in the host's memory and as deterministic as everything else;
//! it takes work through an export for sessions and answers through an import ([`door`]); its
//! module throws exceptions, so every guest gets a store of its own. Everything else is as for the
//! embedded guest: it is started once, frozen ([`freeze`]), and each program gets a copy of that
//! memory.

mod door;
mod files;
mod freeze;
mod wasi;
mod wheel;

use wasmtime::{Linker, Result};

pub(super) use files::Files;
pub(super) use freeze::{SHAPE, fresh_files, shape, sources, start};
pub(super) use wheel::{FILE_NAME, Parts, RELEASE};

use super::host::Host;

/// Defines what the guest imports in `linker`.
pub(super) fn add_to_linker(linker: &mut Linker<Host>) -> Result<()> {
    wasi::add_to_linker(linker)?;
    door::add_to_linker(linker)
}
