//! Wardian: a WebAssembly-sandboxed gym with an embedded trainer.
//!
//! A run flows in one direction: [`task`] → [`rollout`] → [`sandbox`] and [`engine`] → [`grader`]
//! → [`trainer`] → run folder.

pub mod actor;
mod address;
mod causes;
pub mod chat;
pub mod cli;
pub mod collective;
pub mod config;
pub mod dashboard;
pub mod engine;
pub mod env;
pub mod eval;
pub mod grader;
pub mod http;
pub mod hub;
mod lines;
pub mod openai;
pub mod openenv;
mod process;
pub mod proxy;
pub mod report;
pub mod rollout;
pub mod run;
pub mod sandbox;
pub mod task;
pub mod trainer;
pub mod trajectory;
