//! Integration tests: one binary.

mod chat;
mod engine;
mod grader;
mod layering;
mod sandbox;
mod task;
mod trajectory;
