//! The `wardian` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    wardian::cli::main()
}
