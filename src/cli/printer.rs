//! The one place that writes to the terminal.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

/// Writes data to standard output and everything else to standard error.
#[derive(Debug, Clone)]
pub(super) struct Printer {
    quiet: bool,
    live: bool,
    /// Whether data goes to the terminal, too.
    shares_terminal: bool,
    /// When the line was redrawn that is redrawn in place.
    redrawn: Arc<Mutex<Option<Instant>>>,
}

/// For how long a line says more than that something still goes on.
const FRESH: Duration = Duration::from_secs(2);

#[expect(
    clippy::unused_self,
    reason = "all printing goes through one value, whether or not a line heeds `--quiet`"
)]
impl Printer {
    pub(super) fn new(quiet: bool) -> Self {
        Self {
            quiet,
            live: !quiet && io::stderr().is_terminal(),
            shares_terminal: io::stdout().is_terminal(),
            redrawn: Arc::default(),
        }
    }

    /// Whether a line may be redrawn in place.
    pub(super) fn is_live(&self) -> bool {
        self.live
    }

    /// Writes a line of data to standard output.
    pub(super) fn data(&self, text: &str) -> io::Result<()> {
        let mut out = anstream::stdout().lock();
        writeln!(out, "{text}")
    }

    /// Writes bytes of data to standard output as they are.
    pub(super) fn raw(&self, bytes: &[u8]) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()
    }

    /// Writes bytes to standard error as they are.
    pub(super) fn raw_error(&self, bytes: &[u8]) -> io::Result<()> {
        io::stderr().lock().write_all(bytes)
    }

    /// Writes one JSON value as a line of data.
    pub(super) fn json(&self, value: &impl Serialize) -> io::Result<()> {
        self.data(&serde_json::to_string(value)?)
    }

    /// Writes a line for people, unless `--quiet`.
    pub(super) fn note(&self, text: &str) {
        if !self.quiet {
            self.draw("");
            let _ = writeln!(anstream::stderr(), "{text}");
        }
    }

    /// Redraws the current line of a terminal.
    pub(super) fn redraw(&self, text: &str) {
        let mut redrawn = self.redrawn.lock().unwrap_or_else(PoisonError::into_inner);
        *redrawn = (!text.is_empty()).then(Instant::now);
        drop(redrawn);
        self.draw(text);
    }

    /// Redraws the current line of a terminal where nobody else has just done so.
    pub(super) fn redraw_idle(&self, text: &str) {
        let redrawn = *self.redrawn.lock().unwrap_or_else(PoisonError::into_inner);
        if redrawn.is_none_or(|redrawn| redrawn.elapsed() >= FRESH) {
            self.draw(text);
        }
    }

    fn draw(&self, text: &str) {
        if self.live {
            let mut err = anstream::stderr().lock();
            let _ = write!(err, "\r\x1b[2K{text}");
            let _ = err.flush();
        }
    }

    /// Clears the line that is redrawn, where data comes next on the same terminal.
    pub(super) fn make_way(&self) {
        if self.shares_terminal {
            self.redraw("");
        }
    }

    /// Writes a line for people that `--quiet` does not hide: what to do next.
    pub(super) fn notice(&self, text: &str) {
        let _ = writeln!(anstream::stderr(), "{text}");
    }

    pub(super) fn warning(&self, text: &str) {
        let _ = writeln!(anstream::stderr(), "\x1b[33mwarning\x1b[0m: {text}");
    }

    pub(super) fn error(&self, text: &str) {
        let _ = writeln!(anstream::stderr(), "\x1b[1;31merror\x1b[0m: {text}");
    }

    pub(super) fn cause(&self, text: &str) {
        let _ = writeln!(anstream::stderr(), "  caused by: {text}");
    }
}
