//! Counts for Prometheus, in its text format.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::dialect::Answer;
use super::session::Sessions;
use crate::http::{Histogram, ResponseCounts, series};

/// Upper bounds of the buckets of durations, in seconds.
const BUCKETS: [f64; 8] = [0.05, 0.25, 1.0, 5.0, 15.0, 60.0, 180.0, 600.0];

/// What the proxy has done.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    pub(super) responses: ResponseCounts,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    call_seconds: Histogram<{ BUCKETS.len() }>,
    calls_without_ids: u64,
    sampled_tokens: u64,
    target_tokens: u64,
}

impl Default for Inner {
    fn default() -> Self {
        Self {
            call_seconds: Histogram::new(BUCKETS),
            calls_without_ids: 0,
            sampled_tokens: 0,
            target_tokens: 0,
        }
    }
}

impl Metrics {
    /// Records a call that was captured.
    pub(super) fn observe_call(&self, answer: &Answer, duration: Duration) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.call_seconds.observe(duration);
        inner.sampled_tokens += answer.usage.completion as u64;
        match &answer.tokens {
            Some(tokens) => inner.target_tokens += tokens.targets() as u64,
            None => inner.calls_without_ids += 1,
        }
    }

    /// Returns everything as text.
    pub(super) fn render(&self, sessions: &Sessions) -> String {
        let mut text = String::new();
        self.responses.write(&mut text);
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, help, value) in [
            (
                "proxy_sampled_tokens_total",
                "Tokens of captured answers",
                inner.sampled_tokens,
            ),
            (
                "proxy_target_tokens_total",
                "Those that may be learned from",
                inner.target_tokens,
            ),
            (
                "proxy_calls_without_ids_total",
                "Captured calls whose exact ids are not known",
                inner.calls_without_ids,
            ),
        ] {
            series(&mut text, name, "counter", help, value as f64);
        }
        for (name, help, value) in [
            (
                "proxy_sessions",
                "Sessions that are kept",
                sessions.len() as u64,
            ),
            (
                "proxy_captured_bytes",
                "Memory that captured calls take, about",
                sessions.budget.used(),
            ),
        ] {
            series(&mut text, name, "gauge", help, value as f64);
        }
        let help = "From a captured call's arrival to its whole answer";
        inner
            .call_seconds
            .write(&mut text, "proxy_call_seconds", help);
        text
    }
}
