//! Counts for Prometheus, in its text format.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::engine::EngineStatus;
use crate::http::{Histogram, ResponseCounts, series};

/// Upper bounds of the buckets of durations, in seconds.
const BUCKETS: [f64; 12] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0,
];

/// What the server has done.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    pub(super) responses: ResponseCounts,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    request_seconds: Histogram<{ BUCKETS.len() }>,
    first_token_seconds: Histogram<{ BUCKETS.len() }>,
}

impl Default for Inner {
    fn default() -> Self {
        Self {
            request_seconds: Histogram::new(BUCKETS),
            first_token_seconds: Histogram::new(BUCKETS),
        }
    }
}

impl Metrics {
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
            series(&mut text, name, "counter", help, value as f64);
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
            series(&mut text, name, "counter", help, duration.as_secs_f64());
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
            series(&mut text, name, "gauge", help, value as f64);
        }
        self.responses.write(&mut text);
        let inner = self.lock();
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
            histogram.write(&mut text, name, help);
        }
        text
    }
}
