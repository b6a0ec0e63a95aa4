//! One file a command.

pub(super) mod bench;
pub(super) mod chat;
pub(super) mod completions;
pub(super) mod doctor;
pub(super) mod eval;
mod eval_endpoint;
pub(super) mod exec;
pub(super) mod export;
pub(super) mod grade;
mod grading;
pub(super) mod init;
pub(super) mod plan;
pub(super) mod proxy;
pub(super) mod report;
pub(super) mod runtime;
pub(super) mod sandbox_worker;
pub(super) mod sandboxd;
pub(super) mod schema;
pub(super) mod serve;
mod serve_env;
mod serving;
mod setup;
pub(super) mod sft;
pub(super) mod task;
mod task_grade;
pub(super) mod train;
pub(super) mod trajectories;
