//! Grading of SWE-bench: a patch is right where the tests that it should mend pass and those that
//! passed before still do.
//!
//! What decides follows the official harness (`swebench` 5.0.2): [`LogParser`] reads what a test
//! runner printed, [`EvalLog`] says whether a log is evidence at all, and [`TestsReport`] judges
//! it. Where a run can be led astray this is stricter, each point named here:
//!
//! - A runner's output is cut out between marks with a nonce ([`Markers`]), so that no program can
//!   print them; what it prints elsewhere is not read in its place.
//! - The exit status of the runner is taken from the script's, not from its output, where there is
//!   one.
//! - A test whose status is no known word counts as failed, where the harness counts it nowhere.
//! - What is no evidence through a fault of the environment has no reward, where the harness
//!   counts it as unresolved. Whether it was the environment, the reference tells ([`PatchGrade::doubt`]).
//! - Of the patch only what changes no tests is applied ([`split_patch`]), in a sandbox of its own.

mod apply;
mod diff;
mod infra;
mod log;
mod parser;
mod report;
mod run;
mod score;
mod script;

pub use apply::{ApplyAttempt, PATCH_PATH, apply_attempts, reverse_check};
pub use diff::{DiffError, FilePatch, PatchSplit, TestPaths, parse_diff, split_patch};
pub use infra::{InfraSign, InfraTier, classify};
pub use log::{EvalLog, LogFault, Markers};
pub use parser::{LogParser, StatusMap, TestState, UnknownParser};
pub use report::{EvalType, Expected, Resolution, TestsReport};
pub use run::{PatchGrade, PatchJob, grade_patch};
pub use score::{EvalOutcome, PatchOutcome, SwebenchBonus, SwebenchFacts, swebench_verdict};
pub use script::{EvalPlan, EvalSetup, TEST_PATCH_PATH};
