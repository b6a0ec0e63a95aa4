//! Integration tests: one binary.

mod actor;
mod agent;
mod binary;
mod chat;
mod cli;
mod commands;
mod config;
mod dashboard;
mod deploy;
mod doctor;
mod engine;
mod golden;
mod grader;
mod harbor;
mod heavy;
mod hostile_network;
#[cfg(feature = "k8s")]
mod kubernetes;
mod layering;
mod metrics_page;
mod mixture;
mod overlap;
mod parallel;
mod proxy;
mod remote;
mod repository;
mod reward_attacks;
mod run;
mod run_file_page;
mod sandbox;
mod serve;
#[cfg(feature = "otel")]
mod spans;
#[cfg(feature = "k8s")]
mod substrate;
mod swebench;
mod task;
mod task_validation;
mod trajectory;
