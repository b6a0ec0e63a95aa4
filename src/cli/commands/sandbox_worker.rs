//! `wardian sandbox-worker`: what the library starts for each worker process.

use crate::cli::ExitStatus;
use crate::cli::failure::{Failure, Outcome};
use crate::sandbox::serve_parent;

pub(in crate::cli) fn run() -> Outcome {
    serve_parent().map_err(Failure::internal)?;
    Ok(ExitStatus::Success)
}
