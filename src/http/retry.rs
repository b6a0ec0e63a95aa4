//! When a request that failed is worth another try.

use std::time::Duration;

use axum::http::{HeaderMap, StatusCode, header};

/// Returns whether a server that answered so may take the same request later. What it understood and
/// refused, it refuses again, and what is elsewhere does not come back.
pub(crate) fn may_pass(status: StatusCode) -> bool {
    !(status.is_client_error() || status.is_redirection())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_refused_or_is_elsewhere_is_not_asked_again() {
        let passes = |status: u16| may_pass(StatusCode::from_u16(status).unwrap());
        for status in [408, 425, 429, 500, 502, 503, 504, 529] {
            assert!(passes(status), "{status}");
        }
        for status in [301, 302, 307, 308, 400, 401, 404, 413, 422] {
            assert!(!passes(status), "{status}");
        }
    }
}
