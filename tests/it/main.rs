//! Integration tests: one binary.

mod chat;
mod layering;
