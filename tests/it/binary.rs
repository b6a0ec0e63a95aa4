//! The binary that whole runs are tests of.

use std::ffi::OsString;
use std::process::Command;

/// Returns a command of this build's binary, or of the one that `WARDIAN_TEST_BINARY` names: an optimised one trains
/// more than ten times as fast.
pub(crate) fn command() -> Command {
    let built = || OsString::from(env!("CARGO_BIN_EXE_wardian"));
    Command::new(std::env::var_os("WARDIAN_TEST_BINARY").unwrap_or_else(built))
}
