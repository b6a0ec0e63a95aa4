//! The sandbox: limits over tiny guests, and CPython itself.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests may panic"
)]

mod bridge;
mod corpus;
mod files;
mod limits;
mod python;
mod restore;
mod science;
mod sessions;
mod wheels;
mod workers;

use std::sync::OnceLock;

use wardian::sandbox::{RuntimeOptions, WasmRuntime};

/// The Python runtime of this test process, from the disk cache once one process has filled it.
pub(crate) fn python() -> &'static WasmRuntime {
    static RUNTIME: OnceLock<WasmRuntime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        WasmRuntime::load(&RuntimeOptions::default(), |progress| {
            println!("{progress}");
        })
        .unwrap()
    })
}
