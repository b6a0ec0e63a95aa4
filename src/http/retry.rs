//! When a request that failed is worth another try.

use std::time::Duration;

use axum::http::{HeaderMap, StatusCode, header};

/// Returns whether a server that answered so may take the same request later. What it understood and
/// refused, it refuses again.
pub(crate) fn may_pass(status: StatusCode) -> bool {
    !status.is_client_error()
        || [
            StatusCode::REQUEST_TIMEOUT,
            StatusCode::TOO_EARLY,
            StatusCode::TOO_MANY_REQUESTS,
        ]
        .contains(&status)
}

/// Returns the pause that `Retry-After` asks for. Its other form, a date, says nothing where the clocks
/// differ, and is not read.
pub(crate) fn asked_pause(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?;
    seconds.trim().parse().ok().map(Duration::from_secs)
}
