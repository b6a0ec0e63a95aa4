//! Integration tests: one binary.

mod chat;
mod grader;
mod layering;
mod sandbox;
mod task;
