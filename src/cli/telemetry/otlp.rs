//! Spans to a collector, over OTLP/HTTP with protobuf, as OpenTelemetry's variables say.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::registry::LookupSpan;

/// What a collector may answer at most, in bytes.
const MOST_ANSWER: u64 = 64 << 10;
/// How long a request may take unless `OTEL_EXPORTER_OTLP_TIMEOUT` says otherwise: OpenTelemetry's default.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long a command waits at its end for spans to be sent.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// The spans of this process. What is not sent yet is sent when it is dropped.
#[derive(Debug)]
pub(super) struct Spans(SdkTracerProvider);

impl Drop for Spans {
    fn drop(&mut self) {
        if let Err(error) = self.0.shutdown_with_timeout(LAST_WAIT) {
            tracing::warn!(%error, "not all spans were sent");
        }
    }
}

/// A layer that takes spans.
pub(super) type Layer<S> = Box<dyn tracing_subscriber::Layer<S> + Send + Sync>;

/// Returns a layer that sends spans, and what sends the last of them; none where the environment asks for none.
///
/// # Errors
///
/// Fails where the variables ask for what is not there, or are not what they should be.
pub(super) fn open<S>() -> Result<Option<(Layer<S>, Spans)>, String>
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
{
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let signal = |name: &str| {
        variable(&format!("OTEL_EXPORTER_OTLP_TRACES_{name}"))
            .or_else(|| variable(&format!("OTEL_EXPORTER_OTLP_{name}")))
    };
    let is_off =
        variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    // Without an address OpenTelemetry means a collector on this machine, which is there only if somebody says so.
    let is_asked = match variable("OTEL_TRACES_EXPORTER").as_deref() {
        None => signal("ENDPOINT").is_some(),
        Some("otlp") => true,
        Some("none") => false,
        Some(other) => {
            return Err(format!(
                "OTEL_TRACES_EXPORTER is `{other}`: give `otlp` or `none`"
            ));
        }
    };
    if is_off || !is_asked {
        return Ok(None);
    }
    if let Some(protocol) = signal("PROTOCOL").filter(|protocol| protocol != "http/protobuf") {
        return Err(format!(
            "OTEL_EXPORTER_OTLP_PROTOCOL is `{protocol}`: only `http/protobuf` is spoken here"
        ));
    }
    let timeout = match signal("TIMEOUT") {
        None => TIMEOUT,
        Some(text) => match text.parse() {
            Ok(milliseconds) => Duration::from_millis(milliseconds),
            Err(_) => {
                return Err(format!(
                    "OTEL_EXPORTER_OTLP_TIMEOUT is `{text}`: give milliseconds"
                ));
            }
        },
    };
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(Client::new(timeout))
        .build()
        .map_err(|error| error.to_string())?;
    let mut resource = Resource::builder()
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
    let is_named = variable("OTEL_SERVICE_NAME").is_some()
        || variable("OTEL_RESOURCE_ATTRIBUTES").is_some_and(|all| all.contains("service.name="));
    if !is_named {
        resource = resource.with_service_name("wardian");
    }
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(resource.build())
        .build();
    let spans = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("wardian"))
        .with_location(false)
        .with_target(false)
        .with_threads(false)
        // A span of an episode is entered by whoever does something of it: how long says nothing.
        .with_tracked_inactivity(false);
    // Of ours alone: the client that sends them has spans and lines, too.
    let ours = Targets::new().with_target("wardian", LevelFilter::INFO);
    let layer = tracing_subscriber::Layer::with_filter(spans, ours);
    Ok(Some((Box::new(layer), Spans(provider))))
}

/// The client that is here anyway, which blocks: OpenTelemetry sends from a thread of its own.
#[derive(Debug)]
struct Client {
    agent: ureq::Agent,
    /// Whether it was said that spans are not taken.
    has_told: AtomicBool,
}

impl Client {
    fn new(timeout: Duration) -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            .max_redirects(0)
            .build();
        Self {
            agent: config.into(),
            has_told: AtomicBool::new(false),
        }
    }

    /// Says once that spans are lost: OpenTelemetry itself says nothing of it.
    fn tell(&self, reason: &dyn std::fmt::Display) {
        if !self.has_told.swap(true, Ordering::Relaxed) {
            tracing::warn!(%reason, "the collector does not take spans");
        }
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let request = Request::from_parts(head, &body[..]);
        let answer = self.agent.run(request);
        let answer = answer.inspect_err(|error| self.tell(error))?;
        if answer.status().as_u16() >= 400 {
            self.tell(&answer.status());
        }
        let (head, mut body) = answer.into_parts();
        let answer = body.with_config().limit(MOST_ANSWER).read_to_vec()?;
        Ok(Response::from_parts(head, Bytes::from(answer)))
    }
}

impl HttpClient for Client {
    fn send_bytes<'life, 'future>(
        &'life self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'future>>
    where
        'life: 'future,
        Self: 'future,
    {
        Box::pin(async move { self.send(request) })
    }
}
