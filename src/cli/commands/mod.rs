//! One file a command.

pub(super) mod eval;
pub(super) mod exec;
pub(super) mod grade;
pub(super) mod runtime;
mod setup;
pub(super) mod sft;
pub(super) mod train;
