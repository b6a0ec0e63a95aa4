//! Log lines on standard error, for people or as JSON.

use std::fmt;
use std::io::IsTerminal as _;

use clap::ValueEnum;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{EnvFilter, Layer};

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(super) enum LogFormat {
    /// For people
    #[default]
    Text,
    /// One JSON object a line: time, level, message, what it names, and the run and rollout that it is of
    Json,
}

/// Returns what sends log lines to standard error; `WARDIAN_LOG` overrides the level.
pub(super) fn lines<S>(verbose: u8, format: LogFormat) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let default = match verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_env("WARDIAN_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    match format {
        LogFormat::Text => lines
            .with_ansi(is_coloured(std::env::var_os("NO_COLOR").as_deref()))
            .with_filter(filter)
            .boxed(),
        LogFormat::Json => lines
            .with_ansi(false)
            .fmt_fields(JsonFields)
            .event_format(JsonLines)
            .with_filter(filter)
            .boxed(),
    }
}

/// Whether there is a terminal that may show colours (no-color.org).
fn is_coloured(no_color: Option<&std::ffi::OsStr>) -> bool {
    no_color.is_none_or(std::ffi::OsStr::is_empty) && std::io::stderr().is_terminal()
}

/// Fields as a JSON object.
#[derive(Debug)]
struct JsonFields;

/// Events as JSON objects.
#[derive(Debug)]
struct JsonLines;

impl<'writer> FormatFields<'writer> for JsonFields {
    fn format_fields<R: tracing_subscriber::field::RecordFields>(
        &self,
        mut writer: Writer<'writer>,
        fields: R,
    ) -> fmt::Result {
        let mut found = Fields::default();
        fields.record(&mut found);
        writer.write_str(&Value::Object(found.0).to_string())
    }
}

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let about = event.metadata();
        let mut line = Map::new();
        line.insert("time".to_owned(), jiff::Timestamp::now().to_string().into());
        line.insert("level".to_owned(), about.level().as_str().into());
        line.insert("target".to_owned(), about.target().into());
        // What is around first: the run, then the rollout.
        for span in context
            .event_scope()
            .into_iter()
            .flat_map(|scope| scope.from_root())
        {
            let extensions = span.extensions();
            let fields = extensions.get::<FormattedFields<N>>();
            let text = fields.map_or("", |fields| fields.fields.as_str());
            // Fields that came later are an object of their own.
            let objects = serde_json::Deserializer::from_str(text).into_iter::<Map<_, _>>();
            line.extend(objects.map_while(Result::ok).flatten());
        }
        let mut found = Fields::default();
        event.record(&mut found);
        line.extend(found.0);
        writeln!(writer, "{}", Value::Object(line))
    }
}

#[derive(Debug, Default)]
struct Fields(Map<String, Value>);

impl Fields {
    fn insert(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.insert(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.insert(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.insert(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.insert(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.insert(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.insert(field, format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_says_which_run_and_which_rollout_it_is_of() {
        let written = Written::default();
        let writer = written.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::WARN)
            .with_writer(move || writer.clone())
            .fmt_fields(JsonFields)
            .event_format(JsonLines)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let run = tracing::error_span!("run", run = "a \"b\"");
            let _run = run.enter();
            let rollout = tracing::error_span!("rollout", step = 3, later = tracing::field::Empty);
            let _rollout = rollout.enter();
            rollout.record("later", true);
            tracing::warn!(error = %"it\nbroke", "an episode failed");
        });
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        let line: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["run"], "a \"b\"");
        assert_eq!((&line["step"], &line["later"]), (&3.into(), &true.into()));
        assert_eq!(line["message"], "an episode failed");
        assert_eq!(
            (&line["error"], &line["level"]),
            (&"it\nbroke".into(), &"WARN".into())
        );
        assert!(line["time"].is_string() && line["target"].is_string());
    }

    #[test]
    fn no_color_is_heeded() {
        assert!(!is_coloured(Some("1".as_ref())));
    }
}
