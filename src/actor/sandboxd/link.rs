//! Requests to a server, over TCP or TLS, each on a connection of its own.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, to_bytes};
use axum::http::uri::{Authority, PathAndQuery, Uri};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::wire::SERVER;
use crate::causes::with_causes;
use crate::http::asked_pause;
use crate::http::tls::{ClientTls, TlsError, TlsFiles};

/// What a router says where an actor has moved between being found and being reached.
const STALE: HeaderName = HeaderName::from_static("x-ate-assignment-stale");
/// The first pause between two tries, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// The largest answer of something that lies in between, and the most of it that is told.
const MAX_FOREIGN: usize = 16 << 10;
const MAX_TOLD: usize = 500;

/// Bytes in both directions.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Where a server is.
#[derive(Debug)]
pub(super) struct Endpoint {
    tls: Option<ClientTls>,
    authority: Authority,
    host: String,
    port: u16,
    /// What precedes the paths, without a slash at its end.
    base: String,
    /// Of every request.
    headers: HeaderMap,
    connect_timeout: Duration,
}

/// What is asked.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    pub(super) method: Method,
    /// The path, and what follows a question mark.
    pub(super) target: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    /// The largest answer.
    pub(super) most: usize,
    /// How long one try may take.
    pub(super) limit: Duration,
}

/// What a server answers.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) status: StatusCode,
    pub(super) body: Bytes,
}

/// Why there is no answer of the server's.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    /// No connection.
    #[error("it could not be reached")]
    Unreached(#[source] io::Error),
    /// No connection that is safe.
    #[error("it could not be reached")]
    Insecure(#[from] TlsError),
    /// The connection broke, when the request may have been delivered.
    #[error("the connection broke: {0}")]
    Broken(String),
    /// There was no answer in time.
    #[error("no answer within {limit:?}")]
    Late { limit: Duration },
    /// The answer is too large.
    #[error("the answer has more than {limit} bytes, or broke off")]
    TooLarge { limit: usize },
    /// The request cannot be sent.
    #[error("the request cannot be sent: {0}")]
    Unsendable(String),
    /// Something in between has answered.
    #[error("status {status} by what lies in between: {text}")]
    Foreign {
        status: u16,
        text: String,
        /// Whether it says that the request was not delivered, and may be where it goes next.
        is_stale: bool,
        pause: Option<Duration>,
    },
}

impl Fault {
    /// Whether another try may do. Turns are taken once, so that what was delivered is not done again.
    fn may_pass(&self) -> bool {
        match self {
            Self::Unreached(_) | Self::Broken(_) | Self::Late { .. } => true,
            // A handshake may break; a certificate stays what it is.
            Self::Insecure(error) => match error {
                TlsError::Handshake { source, .. } => source.kind() != io::ErrorKind::InvalidData,
                error => matches!(error, TlsError::Late { .. }),
            },
            Self::TooLarge { .. } | Self::Unsendable(_) => false,
            Self::Foreign {
                status, is_stale, ..
            } => *is_stale || matches!(status, 502..=504),
        }
    }
}

impl Endpoint {
    /// Reads an address such as `http://HOST:PORT` or `https://HOST/BASE`; returned otherwise is what is wrong
    /// with it.
    pub(super) fn new(
        url: &str,
        tls: &TlsFiles,
        headers: HeaderMap,
        connect_timeout: Duration,
    ) -> Result<Self, String> {
        let wrong = |reason: &str| format!("the address `{url}` {reason}");
        let uri: Uri = url.parse().map_err(|_| wrong("is no URL"))?;
        let is_secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong("does not begin with `http://` or `https://`")),
        };
        let authority = uri.authority().ok_or_else(|| wrong("has no host"))?;
        if authority.as_str().contains('@') || uri.query().is_some() {
            return Err(wrong("has a user or a query in it"));
        }
        if !is_secure && !tls.is_empty() {
            return Err(wrong("is without TLS, and there are certificates for it"));
        }
        let tls = is_secure.then(|| ClientTls::new(tls.clone())).transpose();
        Ok(Self {
            tls: tls.map_err(|error| with_causes(&error))?,
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority
                .port_u16()
                .unwrap_or(if is_secure { 443 } else { 80 }),
            authority: authority.clone(),
            base: uri.path().trim_end_matches('/').to_owned(),
            headers,
            connect_timeout,
        })
    }

    async fn dial(&self) -> Result<Box<dyn Stream>, Fault> {
        let connecting = TcpStream::connect((self.host.as_str(), self.port));
        let late = |_| Fault::Unreached(io::ErrorKind::TimedOut.into());
        let stream = timeout(self.connect_timeout, connecting)
            .await
            .map_err(late)?
            .map_err(Fault::Unreached)?;
        // What is sent is waited for.
        stream.set_nodelay(true).map_err(Fault::Unreached)?;
        Ok(match &self.tls {
            None => Box::new(stream),
            Some(tls) => Box::new(tls.connect(&self.host, stream).await?),
        })
    }

    /// Asks once.
    pub(super) async fn ask(&self, asked: &Asked) -> Result<Answered, Fault> {
        let stream = self.dial().await?;
        let late = |_| Fault::Late { limit: asked.limit };
        timeout(asked.limit, self.exchange(stream, asked))
            .await
            .map_err(late)?
    }

    async fn exchange(&self, stream: Box<dyn Stream>, asked: &Asked) -> Result<Answered, Fault> {
        let broken = |error: hyper::Error| Fault::Broken(with_causes(&error));
        let unsendable = |error: &dyn std::error::Error| Fault::Unsendable(with_causes(error));
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        let connection = tokio::spawn(connection);
        let target: PathAndQuery = format!("{}{}", self.base, asked.target)
            .parse()
            .map_err(|error| unsendable(&error))?;
        let mut request = Request::builder()
            .method(asked.method.clone())
            .uri(Uri::from(target))
            .header(header::HOST, self.authority.as_str())
            .body(Body::from(asked.body.clone()))
            .map_err(|error| unsendable(&error))?;
        request.headers_mut().extend(self.headers.clone());
        request.headers_mut().extend(asked.headers.clone());
        let response = sender.send_request(request).await;
        let (head, body) = response.map_err(broken)?.into_parts();
        let is_servers = head.headers.contains_key(SERVER);
        let most = if is_servers { asked.most } else { MAX_FOREIGN };
        let body = to_bytes(Body::new(body), most).await;
        // It ends with the request: the connection is for one.
        connection.abort();
        if !is_servers {
            let body = body.unwrap_or_default();
            let text = String::from_utf8_lossy(&body);
            let is_marked = (head.headers.get(STALE))
                .is_some_and(|mark| mark.as_bytes().eq_ignore_ascii_case(b"true"));
            return Err(Fault::Foreign {
                status: head.status.as_u16(),
                text: text.trim().chars().take(MAX_TOLD).collect(),
                is_stale: head.status == StatusCode::MISDIRECTED_REQUEST && is_marked,
                pause: asked_pause(&head.headers),
            });
        }
        Ok(Answered {
            status: head.status,
            body: body.map_err(|_| Fault::TooLarge { limit: most })?,
        })
    }

    /// Asks until there is an answer of the server's, or `until`: only for what is not done twice.
    pub(super) async fn ask_patiently(
        self: Arc<Self>,
        asked: Asked,
        until: Instant,
    ) -> Result<Answered, Fault> {
        let mut pause = PAUSES.0;
        loop {
            let fault = match self.ask(&asked).await {
                Err(fault) if fault.may_pass() => fault,
                result => return result,
            };
            let wait = match &fault {
                Fault::Foreign {
                    pause: Some(asked), ..
                } => pause.max(*asked),
                _ => pause,
            };
            if Instant::now() + wait >= until {
                return Err(fault);
            }
            tracing::debug!(fault = with_causes(&fault), "asking again");
            sleep(wait).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }
}

/// Returns text as it can be in a query (RFC 3986, section 2.3).
pub(super) fn escaped(text: &str) -> String {
    use std::fmt::Write as _;
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                escaped.push(char::from(byte));
            }
            byte => {
                let _ = write!(escaped, "%{byte:02X}");
            }
        }
    }
    escaped
}

/// Returns a header's value.
pub(super) fn value(text: &str) -> Result<HeaderValue, Fault> {
    HeaderValue::from_str(text).map_err(|error| Fault::Unsendable(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_can_be_in_queries() {
        assert_eq!(escaped("/a b/\u{e9}&=%"), "%2Fa%20b%2F%C3%A9%26%3D%25");
    }

    #[test]
    fn what_was_refused_is_not_asked_again() {
        let foreign = |status, is_stale| Fault::Foreign {
            status,
            text: String::new(),
            is_stale,
            pause: None,
        };
        for (fault, passes) in [
            (foreign(421, true), true),
            (foreign(421, false), false),
            (foreign(503, false), true),
            (foreign(504, false), true),
            (foreign(403, false), false),
            (foreign(404, false), false),
            (Fault::TooLarge { limit: 1 }, false),
            (Fault::Broken(String::new()), true),
        ] {
            assert_eq!(fault.may_pass(), passes, "{fault:?}");
        }
    }

    #[test]
    fn addresses_are_read() {
        let read = |url: &str| {
            let files = TlsFiles::default();
            Endpoint::new(url, &files, HeaderMap::new(), Duration::from_secs(1))
        };
        let endpoint = read("http://[::1]:8080/base/").unwrap();
        assert_eq!((endpoint.host.as_str(), endpoint.port), ("::1", 8080));
        assert_eq!(endpoint.base, "/base");
        for wrong in ["ftp://a", "a", "http://u@a", "http://a?b"] {
            assert!(read(wrong).unwrap_err().contains(wrong), "{wrong}");
        }
    }
}
