//! What the servers share: serving until asked to stop, bearer tokens, names of requests, counts.

mod metrics;

use std::fmt;
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use axum::serve::ListenerExt as _;
use tokio::net::TcpListener;

pub(crate) use metrics::{Histogram, ResponseCounts, series};

/// The header that names a request, in the request and in its response.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The most characters of a client's own name for a request.
const MAX_REQUEST_ID: usize = 128;

/// What clients must send as `Authorization: Bearer`.
#[derive(Clone)]
pub struct ApiKey {
    hash: blake3::Hash,
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey")
    }
}

impl ApiKey {
    /// Makes the key that clients must send.
    #[must_use]
    pub fn new(key: &str) -> Self {
        Self {
            hash: blake3::hash(key.as_bytes()),
        }
    }

    /// Returns whether a request has the key. Hashes are compared, in constant time, whatever the
    /// lengths are.
    pub(crate) fn admits(&self, headers: &HeaderMap) -> bool {
        headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "))
            .is_some_and(|sent| blake3::hash(sent) == self.hash)
    }
}

/// Returns the time in whole seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Returns a random UUID of version 4 (RFC 9562, section 5.4).
pub(crate) fn uuid4() -> String {
    let value: u128 = rand::random();
    let value = value & !(0xf << 76) & !(0b11 << 62) | (4 << 76) | (0b10 << 62);
    let hex = format!("{value:032x}");
    let groups = [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ];
    groups.join("-")
}

/// Gives each response the name of its request: the client's own, where it sent one, or a new one.
pub(crate) async fn name_request(request: Request, next: Next) -> Response {
    let id = request
        .headers()
        .get(REQUEST_ID)
        .filter(|id| id.len() <= MAX_REQUEST_ID)
        .cloned()
        .or_else(|| HeaderValue::from_str(&uuid4()).ok());
    let mut response = next.run(request).await;
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Returns counts as Prometheus asks for them.
pub(crate) fn metrics_page(text: String) -> Response {
    let kind = [(
        header::CONTENT_TYPE,
        "text/plain; version=0.0.4; charset=utf-8",
    )];
    (kind, text).into_response()
}

/// Serves until `shutdown` is ready, then lets requests under way finish for up to `grace`.
///
/// # Errors
///
/// Fails if the listener does.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    shutdown: impl Future<Output = ()> + Send + 'static,
    grace: Duration,
) -> std::io::Result<()> {
    // A reply that waits for the acknowledgement of the one before would take 40 ms longer.
    let listener = listener.tap_io(|stream| {
        // Without it the connection is slower, no more.
        let _ = stream.set_nodelay(true);
    });
    let (sender, receiver) = tokio::sync::oneshot::channel::<()>();
    let server = axum::serve(listener, router).with_graceful_shutdown(async {
        // A dropped sender means the same.
        let _ = receiver.await;
    });
    let overdue = async {
        shutdown.await;
        let _ = sender.send(());
        tokio::time::sleep(grace).await;
    };
    tokio::select! {
        served = server => served,
        () = overdue => {
            tracing::warn!(?grace, "requests were cut off at the end of the time to finish");
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_says_that_it_is_random() {
        let uuid = uuid4();
        assert_eq!(uuid.len(), 36);
        assert_eq!(uuid.as_bytes()[14], b'4', "{uuid}");
        assert!(b"89ab".contains(&uuid.as_bytes()[19]), "{uuid}");
        assert_ne!(uuid, uuid4());
    }

    #[test]
    fn only_the_key_is_let_in() {
        let key = ApiKey::new("secret");
        let sent = |value: &str| {
            let value = HeaderValue::from_str(value).unwrap();
            HeaderMap::from_iter([(header::AUTHORIZATION, value)])
        };
        assert!(key.admits(&sent("Bearer secret")));
        assert!(!key.admits(&sent("Bearer secrets")));
        assert!(!key.admits(&sent("secret")));
        assert!(!key.admits(&HeaderMap::new()));
    }
}
