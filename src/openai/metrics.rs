//! Counts for Prometheus, in its text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::engine::EngineStatus;

/// Upper bounds of the buckets of durations, in seconds.
const BUCKETS: [f64; 12] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0,
];

/// What the server has done. Endpoints are a fixed set, so the number of series is bounded.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    requests: BTreeMap<(String, u16), u64>,
    request_seconds: Histogram,
    first_token_seconds: Histogram,
}

#[derive(Debug, Default)]
struct Histogram {
    counts: [u64; BUCKETS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    fn observe(&mut self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        self.count += 1;
        self.sum += seconds;
        for (count, bound) in self.counts.iter_mut().zip(BUCKETS) {
            *count += u64::from(seconds <= bound);
        }
    }

    fn write(&self, text: &mut String, name: &str) {
        for (count, bound) in self.counts.iter().zip(BUCKETS) {
            let _ = writeln!(text, "{name}_bucket{{le=\"{bound}\"}} {count}");
        }
        let _ = writeln!(text, "{name}_bucket{{le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(text, "{name}_sum {}\n{name}_count {}", self.sum, self.count);
    }
}

impl Metrics {
    /// Counts a response, whose body may still be under way.
    pub(super) fn count_response(&self, endpoint: &str, status: u16) {
        let mut inner = self.lock();
        *inner
            .requests
            .entry((endpoint.to_owned(), status))
            .or_default() += 1;
    }

    /// Records how long a completion took from its arrival to its last token.
    pub(super) fn observe_request(&self, duration: Duration) {
        self.lock().request_seconds.observe(duration);
    }

    /// Records how long a streamed completion took to its first token.
    pub(super) fn observe_first_token(&self, duration: Duration) {
        self.lock().first_token_seconds.observe(duration);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns everything as text.
    pub(super) fn render(&self, engine: &EngineStatus) -> String {
        let stats = engine.stats;
        let mut text = String::new();
        let mut series = |name: &str, kind: &str, help: &str, value: f64| {
            let _ = writeln!(
                text,
                "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}"
            );
        };
        for (name, help, value) in [
            ("engine_steps_total", "Forward passes", stats.steps),
            (
                "engine_prefill_tokens_total",
                "Tokens of prompts that were computed",
                stats.prefill_tokens,
            ),
            (
                "engine_prefix_hit_tokens_total",
                "Tokens of prompts that were found in the prefix cache",
                stats.prefix_hit_tokens,
            ),
            (
                "engine_generated_tokens_total",
                "Tokens that were sampled",
                stats.generated_tokens,
            ),
            (
                "engine_evictions_total",
                "Sequences that lost their keys and values to others",
                stats.evictions,
            ),
        ] {
            series(name, "counter", help, value as f64);
        }
        for (name, help, duration) in [
            (
                "engine_forward_seconds_total",
                "Time in the model",
                stats.forward,
            ),
            (
                "engine_sampling_seconds_total",
                "Time choosing tokens",
                stats.sampling,
            ),
        ] {
            series(name, "counter", help, duration.as_secs_f64());
        }
        for (name, help, value) in [
            (
                "engine_running_sequences",
                "Completions under way, waiting ones included",
                engine.running,
            ),
            (
                "engine_cached_tokens",
                "Tokens that sequences hold memory for",
                engine.cached_tokens,
            ),
        ] {
            series(name, "gauge", help, value as f64);
        }
        let inner = self.lock();
        text.push_str("# HELP http_requests_total Responses by endpoint and status\n");
        text.push_str("# TYPE http_requests_total counter\n");
        for ((endpoint, status), count) in &inner.requests {
            let _ = writeln!(
                text,
                "http_requests_total{{endpoint=\"{endpoint}\",status=\"{status}\"}} {count}"
            );
        }
        for (name, help, histogram) in [
            (
                "completion_seconds",
                "From a completion's arrival to its last token",
                &inner.request_seconds,
            ),
            (
                "completion_first_token_seconds",
                "From a streamed completion's arrival to its first token",
                &inner.first_token_seconds,
            ),
        ] {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} histogram");
            histogram.write(&mut text, name);
        }
        text
    }
}
