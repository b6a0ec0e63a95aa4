//! Where a run's metrics go besides `metrics.jsonl`, which stays the source of truth.
//!
//! A [`Sink`] is given every row of the run, those that an earlier process wrote first, so that what
//! it holds after a resumed run is what an uninterrupted one would have left. A sink that fails is
//! told of in the log and never ends a run.

mod http;
mod tensorboard;

use std::path::Path;

use serde_json::{Map, Value};

use super::RunError;
use crate::config::LogConfig;

use self::http::HttpSink;
use self::tensorboard::TensorBoard;

/// One row of `metrics.jsonl`.
pub(super) type Row = Map<String, Value>;

/// Takes rows as they are logged.
pub(super) trait Sink: Send {
    /// Takes a row.
    fn log(&mut self, row: &Row);
}

/// The sinks that a run file asks for.
#[derive(Default)]
pub(super) struct Sinks(Vec<Box<dyn Sink>>);

impl std::fmt::Debug for Sinks {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Sinks").field(&self.0.len()).finish()
    }
}

impl Sinks {
    /// Opens the sinks of the run in `root`, which has logged `rows` already.
    ///
    /// # Errors
    ///
    /// Fails where an event file cannot be written.
    pub(super) fn open(root: &Path, config: &LogConfig, rows: &[Row]) -> Result<Self, RunError> {
        let mut sinks: Vec<Box<dyn Sink>> = Vec::new();
        if config.tensorboard {
            sinks.push(Box::new(TensorBoard::create(root)?));
        }
        for sink in &mut sinks {
            for row in rows {
                sink.log(row);
            }
        }
        // A server keeps what it was sent, so it is sent only what is new.
        if let Some(url) = &config.http {
            let name = root.file_name().unwrap_or_default().to_string_lossy();
            sinks.push(Box::new(HttpSink::new(url, &name)));
        }
        Ok(Self(sinks))
    }

    /// Gives a row to each.
    pub(super) fn log(&mut self, row: &Row) {
        for sink in &mut self.0 {
            sink.log(row);
        }
    }
}

/// Returns the metrics of a row that are single numbers, and its step.
fn scalars(row: &Row) -> Option<(u64, impl Iterator<Item = (&str, f64)>)> {
    let step = row.get("step")?.as_u64()?;
    let numbers = row.iter().filter(|(name, _)| *name != "step");
    Some((
        step,
        numbers.filter_map(|(name, value)| Some((name.as_str(), value.as_f64()?))),
    ))
}
