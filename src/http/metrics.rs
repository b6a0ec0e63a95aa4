//! Counts for Prometheus, in its text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{MatchedPath, Request};
use axum::middleware::Next;
use axum::response::Response;

/// A histogram of durations with the upper bounds `bounds`, in seconds.
#[derive(Debug)]
pub(crate) struct Histogram<const N: usize> {
    bounds: [f64; N],
    counts: [u64; N],
    count: u64,
    sum: f64,
}

impl<const N: usize> Histogram<N> {
    pub(crate) const fn new(bounds: [f64; N]) -> Self {
        Self {
            bounds,
            counts: [0; N],
            count: 0,
            sum: 0.0,
        }
    }

    pub(crate) fn observe(&mut self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        self.count += 1;
        self.sum += seconds;
        for (count, bound) in self.counts.iter_mut().zip(self.bounds) {
            *count += u64::from(seconds <= bound);
        }
    }

    pub(crate) fn write(&self, text: &mut String, name: &str, help: &str) {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} histogram");
        for (count, bound) in self.counts.iter().zip(self.bounds) {
            let _ = writeln!(text, "{name}_bucket{{le=\"{bound}\"}} {count}");
        }
        let _ = writeln!(text, "{name}_bucket{{le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(text, "{name}_sum {}\n{name}_count {}", self.sum, self.count);
    }
}

/// Responses by endpoint and status. Endpoints are a fixed set, so the number of series is bounded.
#[derive(Debug, Default)]
pub(crate) struct ResponseCounts {
    counts: Mutex<BTreeMap<(String, u16), u64>>,
}

impl ResponseCounts {
    /// Counts a response, whose body may still be under way.
    pub(crate) fn count(&self, endpoint: &str, status: u16) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry((endpoint.to_owned(), status)).or_default() += 1;
    }

    /// Lets a request be answered, and counts the response by its route.
    pub(crate) async fn counted(
        &self,
        path: Option<MatchedPath>,
        request: Request,
        next: Next,
    ) -> Response {
        let response = next.run(request).await;
        let endpoint = path.as_ref().map_or("other", |path| path.as_str());
        self.count(endpoint, response.status().as_u16());
        response
    }

    pub(crate) fn write(&self, text: &mut String) {
        text.push_str("# HELP http_requests_total Responses by endpoint and status\n");
        text.push_str("# TYPE http_requests_total counter\n");
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        for ((endpoint, status), count) in counts.iter() {
            let _ = writeln!(
                text,
                "http_requests_total{{endpoint=\"{endpoint}\",status=\"{status}\"}} {count}"
            );
        }
    }
}

/// Writes a series of one value; `kind` is `counter` or `gauge`.
pub(crate) fn series(text: &mut String, name: &str, kind: &str, help: &str, value: f64) {
    let _ = writeln!(
        text,
        "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}"
    );
}
