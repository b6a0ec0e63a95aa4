//! The memory of guests: one frozen [`Image`], and [`Slot`]s that start as copies of it.
//!
//! A slot is 4 GiB of address space with the image mapped privately at its start: a page that a
//! guest writes becomes the slot's own, all others stay shared. A slot outlives its guest. Before
//! the next one uses it, [`Slot::restore`] finds the pages that are its own by asking the kernel
//! ([`Pagemap`]), and gives them the image's content again: those that are written often by
//! copying, so that the next guest meets no page fault there, the rest by giving them back.
//!
//! All `unsafe` code of the sandbox that touches guest memory is in this folder.

mod faults;
mod image;
mod pagemap;
mod slot;

#[cfg(test)]
mod tests;

pub(super) use image::{Image, write_sparse};
pub(super) use pagemap::Pagemap;
pub(super) use slot::{Changed, Creator, EXCEPTIONS, Slot};

/// Bytes of a page of the machine.
pub(super) const PAGE: usize = 4096;
/// Bytes of a page of Wasm, by which memories grow.
pub(super) const WASM_PAGE: usize = 65536;
