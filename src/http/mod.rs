//! What servers and clients share: serving until asked to stop, TLS, bearer tokens, limits of rates, names
//! of requests, counts, when to try again.

mod bodies;
mod connections;
mod metrics;
mod rate;
mod retry;
#[cfg(test)]
pub(crate) mod tests_support;
pub mod tls;
mod values;
mod write_within;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::SystemTime;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

pub(crate) use bodies::{Bodies, BodyError, BodyShare, check_values, give_back};
pub use connections::{Listener, serve};
pub(crate) use metrics::{Histogram, ResponseCounts, series};
pub use rate::Rate;
pub(crate) use rate::{Peer, RateLimit, retry_after};
pub(crate) use retry::{asked_pause, may_pass};
pub(crate) use values::count_values;

/// The header that names a request, in the request and in its response.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The most characters of a client's own name for a request.
const MAX_REQUEST_ID: usize = 128;

/// What precedes a token; schemes have no case (RFC 9110, section 11.1).
const SCHEME: &[u8] = b"bearer ";

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

    /// Returns whether a request has the key.
    pub(crate) fn admits(&self, headers: &HeaderMap) -> bool {
        self.shown(headers).is_some()
    }

    /// Returns the key's hash if a request has it. Hashes are compared, in constant time, whatever the
    /// lengths are.
    pub(crate) fn shown(&self, headers: &HeaderMap) -> Option<blake3::Hash> {
        headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.as_bytes().split_at_checked(SCHEME.len()))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(SCHEME))
            .map(|(_, sent)| blake3::hash(sent))
            .filter(|sent| *sent == self.hash)
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

/// Returns whether a request comes from a page of another site, which a browser says by `Origin`: it would
/// reach a server on this machine that asks for no key. A name that is no address and not `localhost` may
/// be made to lead here by whoever owns it, so it is another site.
pub(crate) fn is_cross_site(headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else {
        return false;
    };
    let own = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok());
    let is_own = |origin: &str| {
        let authority = origin.split_once("://").map(|(_, authority)| authority);
        authority.is_some() && authority == own && authority.is_some_and(is_local_name)
    };
    !origin.to_str().is_ok_and(is_own)
}

/// Returns whether a request from this machine asks for a name that is no address and not `localhost`: a
/// page whose name was made to lead here asks so, and of a question without effect a browser does not say
/// whose page asks.
pub(crate) fn is_misled(request: &Request) -> bool {
    let peer = request.extensions().get::<Peer>();
    let is_local = peer.is_some_and(|Peer(address)| address.to_canonical().is_loopback());
    let host = request.headers().get(header::HOST);
    is_local && host.is_some_and(|host| !host.to_str().is_ok_and(is_local_name))
}

/// Returns whether `authority`, a host with or without a port, is an address or `localhost`.
fn is_local_name(authority: &str) -> bool {
    if authority.parse::<SocketAddr>().is_ok() || authority.parse::<IpAddr>().is_ok() {
        return true;
    }
    let host = authority
        .rsplit_once(':')
        .map_or(authority, |(host, _)| host);
    host == "localhost" || host.parse::<Ipv4Addr>().is_ok() || host.ends_with(']')
}

/// Returns counts as Prometheus asks for them.
pub(crate) fn metrics_page(text: String) -> Response {
    let kind = [(
        header::CONTENT_TYPE,
        "text/plain; version=0.0.4; charset=utf-8",
    )];
    (kind, text).into_response()
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
        assert!(key.admits(&sent("bearer secret")));
        assert!(!key.admits(&sent("Basic  secret")));
        assert!(!key.admits(&sent("Bearer secrets")));
        assert!(!key.admits(&sent("secret")));
        assert!(!key.admits(&HeaderMap::new()));
    }

    #[test]
    fn pages_of_other_sites_are_told_from_programs_and_own_pages() {
        let sent = |origin: &str, host: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_str(host).unwrap());
            if !origin.is_empty() {
                headers.insert(header::ORIGIN, HeaderValue::from_str(origin).unwrap());
            }
            is_cross_site(&headers)
        };
        assert!(!sent("", "evil.example"));
        assert!(!sent("http://127.0.0.1:8000", "127.0.0.1:8000"));
        assert!(!sent("http://localhost:8000", "localhost:8000"));
        assert!(!sent("http://[::1]:8000", "[::1]:8000"));
        assert!(!sent("http://localhost", "localhost"));
        assert!(sent("http://evil.example", "127.0.0.1:8000"));
        assert!(sent("http://localhost:3000", "localhost:8000"));
        // A name of theirs that leads here.
        assert!(sent("http://evil.example:8000", "evil.example:8000"));
        assert!(sent("null", "127.0.0.1:8000"));
    }
}
