//! Where a run's metrics go besides `metrics.jsonl`, which stays the source of truth.
//!
//! A sink that fails is told of in the log and never ends a run. What a resumed run does again depends
//! on the sink: an event file is written anew, with the rows of earlier processes first, so that it
//! holds each row once, with the time of the last resume on those. A server has what it was sent, and
//! is sent the rows of steps that are done again a second time: it must take a row as the one of its
//! `step`, and of its kind, measurements apart, in place of an earlier one.

mod http;
mod tensorboard;

use std::path::Path;

use serde_json::{Map, Value};

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
    pub(super) fn open(root: &Path, config: &LogConfig, rows: &[Row]) -> Self {
        let mut sinks: Vec<Box<dyn Sink>> = Vec::new();
        if config.tensorboard {
            match TensorBoard::create(root) {
                Ok(sink) => sinks.push(Box::new(sink)),
                Err(error) => tracing::warn!(%error, "no event file is written for TensorBoard"),
            }
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
        Self(sinks)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sink_that_cannot_be_opened_ends_no_run() {
        let run = tempfile::tempdir().unwrap();
        let config = LogConfig {
            tensorboard: true,
            ..LogConfig::default()
        };
        assert_eq!(Sinks::open(run.path(), &config, &[]).0.len(), 1);
        fs_err::remove_dir_all(run.path().join("tensorboard")).unwrap();
        fs_err::write(run.path().join("tensorboard"), "no folder").unwrap();
        let mut sinks = Sinks::open(run.path(), &config, &[]);
        assert!(sinks.0.is_empty());
        sinks.log(&Row::new());
    }
}
