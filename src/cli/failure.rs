//! Failures of a command and how they are told.

use super::ExitStatus;
use super::printer::Printer;

/// Why a command could not do its work.
#[derive(Debug)]
pub(super) struct Failure {
    status: ExitStatus,
    error: anyhow::Error,
    /// What to do next, where the error does not say it.
    next: Option<String>,
}

pub(super) type Outcome = Result<ExitStatus, Failure>;

impl Failure {
    /// The input or the configuration is wrong, and the reader can mend it.
    pub(super) fn usage(error: impl Into<anyhow::Error>) -> Self {
        Self {
            status: ExitStatus::Usage,
            error: error.into(),
            next: None,
        }
    }

    /// Returns what is wrong, for a process that it concerns, too.
    pub(super) fn reason(&self) -> String {
        format!("{:#}", self.error)
    }

    /// Something of ours failed.
    pub(super) fn internal(error: impl Into<anyhow::Error>) -> Self {
        Self {
            status: ExitStatus::Internal,
            error: error.into(),
            next: None,
        }
    }

    /// Says what to do next.
    pub(super) fn with_next(mut self, next: String) -> Self {
        self.next = Some(next);
        self
    }
}

/// Prints the failure's chain of causes and returns its exit status.
pub(super) fn report(failure: &Failure, printer: &Printer) -> ExitStatus {
    let mut causes = failure.error.chain();
    let is_broken_pipe = failure.error.chain().any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
    });
    if is_broken_pipe {
        return ExitStatus::Success;
    }
    if let Some(first) = causes.next() {
        printer.error(&first.to_string());
    }
    for cause in causes {
        printer.cause(&cause.to_string());
    }
    if let Some(next) = &failure.next {
        printer.notice(next);
    }
    failure.status
}
