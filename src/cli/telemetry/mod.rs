//! Where log lines and spans go: lines to standard error, and spans to a collector of OpenTelemetry, where this program is
//! built with the feature `otel` and the environment names one.

#[cfg(feature = "otel")]
mod otlp;

use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::args::GlobalArgs;
use super::log;

/// What ends with the command: spans that are not sent yet are sent when it is dropped.
#[derive(Debug)]
pub(super) struct Telemetry {
    #[cfg(feature = "otel")]
    _spans: Option<otlp::Spans>,
}

/// Sends log lines to standard error at the level asked for, which `WARDIAN_LOG` overrides, and spans to where the
/// environment says.
pub(super) fn init(args: &GlobalArgs) -> Telemetry {
    let lines = log::lines(args.verbose, args.log_format);
    let registry = tracing_subscriber::registry().with(lines);
    #[cfg(feature = "otel")]
    {
        let (layer, spans, fault) = match otlp::open() {
            Ok(Some((layer, spans))) => (Some(layer), Some(spans), None),
            Ok(None) => (None, None, None),
            Err(fault) => (None, None, Some(fault)),
        };
        registry.with(layer).init();
        if let Some(fault) = fault {
            // Before this there was nobody to tell.
            tracing::warn!(error = %fault, "no spans are sent");
        }
        Telemetry { _spans: spans }
    }
    #[cfg(not(feature = "otel"))]
    {
        registry.init();
        if std::env::var_os("OTEL_EXPORTER_OTLP_ENDPOINT").is_some() {
            tracing::info!("no spans are sent: this program is built without the feature `otel`");
        }
        Telemetry {}
    }
}
