//! Where a verifier or a test suite runs: commands and files in a sandbox of their own.
//!
//! Graders that need a shell are written against [`GradingSandbox`], so that they say what is run in
//! which order and nothing about how; the tiers that have a shell implement it.

use std::time::Duration;

use indexmap::IndexMap;

/// Who a command runs as, in numbers of the sandbox's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradingUser {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// A command for a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GradingCommand {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// The folder that it starts in; the sandbox's own where none.
    pub workdir: Option<String>,
    /// Variables besides the sandbox's.
    pub env: IndexMap<String, String>,
    /// Who it runs as; the sandbox's own user where none.
    pub user: Option<GradingUser>,
    /// How long it may take.
    pub timeout: Duration,
}

impl GradingCommand {
    /// Returns a command without variables of its own.
    #[must_use]
    pub fn new(argv: Vec<String>, timeout: Duration) -> Self {
        Self {
            argv,
            workdir: None,
            env: IndexMap::new(),
            user: None,
            timeout,
        }
    }

    /// Returns a script for `/bin/sh`, which every image has, with an argument for it.
    #[must_use]
    pub fn sh(script: &str, argument: &str, timeout: Duration) -> Self {
        let argv = ["/bin/sh", "-c", script, "sh", argument].map(str::to_owned);
        Self::new(argv.to_vec(), timeout)
    }

    /// Returns a script for `bash`.
    #[must_use]
    pub fn bash(script: &str, timeout: Duration) -> Self {
        let argv = ["bash", "-c", script].map(str::to_owned);
        Self::new(argv.to_vec(), timeout)
    }

    /// Says which folder it starts in.
    #[must_use]
    pub fn within(mut self, folder: &str) -> Self {
        self.workdir = Some(folder.to_owned());
        self
    }
}

/// A file for a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GradingFile {
    /// What is in it.
    pub content: Vec<u8>,
    /// Whether it can be run.
    pub executable: bool,
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GradingEnd {
    /// By itself, with this code.
    Exited(i32),
    /// It took too long.
    TimedOut,
    /// With its sandbox; why.
    Killed(String),
}

/// What a command left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GradingOutput {
    /// How it ended.
    pub end: GradingEnd,
    /// What it printed; where it was cut, the start and the end.
    pub stdout: String,
    /// What it complained about.
    pub stderr: String,
    /// How long it took.
    pub elapsed: Duration,
}

/// A sandbox that failed.
#[derive(Debug, thiserror::Error)]
#[error("the sandbox could not {what}")]
pub struct GradingFault {
    /// What it was asked to do.
    pub what: &'static str,
    /// What it said.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
    /// Whether what ran in it brought that about; all else is ours.
    pub is_guests_doing: bool,
    /// Whether it took too long, as it also may on a machine that is busy with something else.
    pub timed_out: bool,
}

/// A sandbox with a shell, for one grading.
pub trait GradingSandbox {
    /// Runs a command to its end.
    ///
    /// # Errors
    ///
    /// Fails where the sandbox does; however the command ends is no error.
    fn exec(&self, command: &GradingCommand) -> Result<GradingOutput, GradingFault>;

    /// Writes a file, with the folders that it needs.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be written.
    fn put(&self, path: &str, content: &[u8]) -> Result<(), GradingFault>;

    /// Writes files below a folder, by their paths in it, all at once.
    ///
    /// # Errors
    ///
    /// Fails where one cannot be written.
    fn put_all(
        &self,
        folder: &str,
        files: &IndexMap<String, GradingFile>,
    ) -> Result<(), GradingFault>;

    /// Reads a file; nothing where there is none.
    ///
    /// # Errors
    ///
    /// Fails where it is larger than `limit` bytes or cannot be read.
    fn get(&self, path: &str, limit: u64) -> Result<Option<Vec<u8>>, GradingFault>;
}
