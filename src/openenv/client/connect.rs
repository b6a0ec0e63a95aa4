//! Connections to a server: the one place where they are made, over TCP or TLS.

use std::error::Error as _;
use std::io;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::uri::{Authority, PathAndQuery};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::error::ProtocolError;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{self, Error as SocketError};
use tokio_tungstenite::{WebSocketStream, client_async_with_config};

use super::frames::{read_json, shortened};
use super::{ClientError, Fault, RemoteConfig};
use crate::address::shown;
use crate::causes::with_causes;
use crate::http::asked_pause;
use crate::http::tls::ClientTls;

/// What a router says where an actor has moved between being found and being reached.
const STALE: &str = "x-ate-assignment-stale";

/// The first pause between two tries, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// The largest error page that is read.
const MAX_REFUSAL: usize = 16 << 10;

/// Bytes in both directions.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A WebSocket to a server.
pub(super) type Socket = WebSocketStream<Box<dyn Stream>>;

/// Where a server is, and how it is spoken to.
#[derive(Debug)]
pub(super) struct Endpoint {
    /// As it was given, for messages.
    url: String,
    /// Where connections are secured.
    tls: Option<ClientTls>,
    authority: Authority,
    host: String,
    port: u16,
    /// What precedes `/ws`, without a slash at its end.
    base: String,
    headers: Vec<(HeaderName, String)>,
    connect_timeout: Duration,
    request_timeout: Duration,
    max_message_bytes: usize,
}

impl Endpoint {
    pub(super) fn new(config: &RemoteConfig) -> Result<Self, ClientError> {
        let wrong = |reason| ClientError::Url {
            url: shown(&config.url),
            reason,
        };
        let uri: Uri = (config.url.parse()).map_err(|_| wrong("which is no URL"))?;
        let is_secure = match uri.scheme_str() {
            Some("http" | "ws") => false,
            Some("https" | "wss") => true,
            _ => {
                return Err(wrong(
                    "which does not begin with `http://`, `https://`, `ws://` or `wss://`",
                ));
            }
        };
        let authority = uri.authority().ok_or_else(|| wrong("without a host"))?;
        if authority.as_str().contains('@') {
            return Err(wrong("with a user in it; send a token with `env.headers`"));
        }
        if uri.query().is_some() {
            return Err(wrong("with a query, which is not sent; leave it out"));
        }
        if !is_secure && !config.tls.is_empty() {
            return Err(wrong(
                "and `env.tls` is for addresses that begin with `https://` or `wss://`",
            ));
        }
        let tls = is_secure.then(|| ClientTls::new(config.tls.clone()));
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        let path = uri.path().trim_end_matches('/');
        let endpoint = Self {
            url: shown(&config.url),
            tls: tls.transpose()?,
            host,
            port: authority
                .port_u16()
                .unwrap_or(if is_secure { 443 } else { 80 }),
            authority: authority.clone(),
            base: path.strip_suffix("/ws").unwrap_or(path).to_owned(),
            headers: templates(config)?,
            connect_timeout: config.connect_timeout,
            request_timeout: config.reset_timeout,
            max_message_bytes: config.max_message_bytes,
        };
        // What one slot can send, all can.
        endpoint.headers_of(0)?;
        Ok(endpoint)
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn max_message_bytes(&self) -> usize {
        self.max_message_bytes
    }

    /// Returns the headers of a slot.
    fn headers_of(&self, slot: usize) -> Result<HeaderMap, ClientError> {
        let mut headers = HeaderMap::new();
        for (name, template) in &self.headers {
            let value = template.replace("{slot}", &slot.to_string());
            let value = HeaderValue::from_str(&value).map_err(|_| ClientError::Header {
                name: name.to_string(),
                reason: "a value that no header can have".to_owned(),
            })?;
            headers.insert(name, value);
        }
        Ok(headers)
    }

    /// Connects, within the time for it; over TLS where the address asks for it.
    async fn dial(&self) -> Result<Box<dyn Stream>, Fault> {
        let connecting = async {
            let stream = TcpStream::connect((self.host.as_str(), self.port)).await;
            let stream = stream.map_err(Fault::of_io)?;
            // Frames are small, and each is waited for.
            stream.set_nodelay(true).map_err(Fault::of_io)?;
            let stream: Box<dyn Stream> = match &self.tls {
                None => Box::new(stream),
                Some(tls) => {
                    let secured = tls.connect(&self.host, stream).await;
                    Box::new(secured.map_err(Fault::of_tls)?)
                }
            };
            Ok(stream)
        };
        let late = |_| Fault::ConnectTimeout {
            limit: self.connect_timeout,
        };
        timeout(self.connect_timeout, connecting)
            .await
            .map_err(late)?
    }

    /// Opens a WebSocket for a slot, in one try.
    pub(super) async fn open(&self, slot: usize) -> Result<Socket, Fault> {
        let stream = self.dial().await?;
        let uri = format!("ws://{}{}/ws", self.authority, self.base);
        let mut request = uri
            .into_client_request()
            .map_err(|error| self.broken(error))?;
        let headers = self.headers_of(slot).map_err(|_| Fault::Ended)?;
        request.headers_mut().extend(headers);
        let limits = WebSocketConfig::default()
            .read_buffer_size(16 << 10)
            .max_message_size(Some(self.max_message_bytes))
            .max_frame_size(Some(self.max_message_bytes))
            // Who only asks whether we are there, and reads nothing, is answered no further.
            .max_write_buffer_size(self.max_message_bytes.saturating_add(1 << 20));
        let handshake = client_async_with_config(request, stream, Some(limits));
        match timeout(self.connect_timeout, handshake).await {
            Ok(Ok((socket, _))) => Ok(socket),
            Ok(Err(SocketError::Http(response))) => {
                let body = response.body().as_deref().unwrap_or_default();
                Err(refused(
                    response.status().as_u16(),
                    101,
                    response.headers(),
                    body,
                ))
            }
            // It went away before it answered with a byte.
            Ok(Err(SocketError::Protocol(ProtocolError::HandshakeIncomplete))) => {
                Err(Fault::Unreachable {
                    source: io::ErrorKind::UnexpectedEof.into(),
                })
            }
            Ok(Err(SocketError::Io(error))) => Err(Fault::of_io(error)),
            Ok(Err(error)) => Err(self.broken(error)),
            Err(_) => Err(Fault::ConnectTimeout {
                limit: self.connect_timeout,
            }),
        }
    }

    fn broken(&self, error: tungstenite::Error) -> Fault {
        Fault::of_socket(error, self.max_message_bytes)
    }

    /// Asks over HTTP, in one try, and returns what is answered: with `body` by `POST`, else by `GET`.
    pub(super) async fn ask(&self, path: &str, body: Option<&Value>) -> Result<Value, Fault> {
        let stream = self.dial().await?;
        let limit = self.request_timeout;
        let late = |_| Fault::Late {
            limit,
            key: "env.reset_timeout",
        };
        timeout(limit, self.exchange(stream, path, body))
            .await
            .map_err(late)?
    }

    async fn exchange(
        &self,
        stream: Box<dyn Stream>,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, Fault> {
        let broken = |error: hyper::Error| {
            let kind = error.source().and_then(|cause| cause.downcast_ref());
            let kind = kind.map_or(io::ErrorKind::Other, io::Error::kind);
            Fault::of_io(io::Error::new(kind, error))
        };
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        // It ends with the request: the connection is for one.
        let connection = tokio::spawn(connection);
        let target = format!("{}{path}", self.base);
        let target: PathAndQuery = target.parse().map_err(|_| Fault::Ended)?;
        let mut request = Request::builder()
            .method(match body {
                Some(_) => Method::POST,
                None => Method::GET,
            })
            .uri(Uri::from(target))
            .header(header::HOST, self.authority.as_str())
            .header(header::ACCEPT, "application/json")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body.map_or_else(String::new, Value::to_string)))
            .map_err(|_| Fault::Ended)?;
        let headers = self.headers_of(0).map_err(|_| Fault::Ended)?;
        request.headers_mut().extend(headers);
        let response = sender.send_request(request).await.map_err(broken)?;
        let (head, body) = response.into_parts();
        let status = head.status.as_u16();
        let limit = match status {
            200 => self.max_message_bytes,
            _ => MAX_REFUSAL,
        };
        let body = to_bytes(Body::new(body), limit).await;
        connection.abort();
        if status != 200 {
            let body = body.unwrap_or_else(|_| Bytes::new());
            return Err(refused(status, 200, &head.headers, &body));
        }
        read_json(&body.map_err(|error| unread(&error, limit))?)
    }
}

/// Returns why a body of at most `limit` bytes was not read to its end.
fn unread(error: &axum::Error, limit: usize) -> Fault {
    let mut cause = error.source();
    while let Some(error) = cause {
        // The limit is no error of the connection's.
        if error.is::<hyper::Error>() {
            return Fault::Broken {
                reason: with_causes(error),
            };
        }
        cause = error.source();
    }
    Fault::TooLarge { limit }
}

/// Returns the fault of an answer with another status than was expected.
fn refused(status: u16, expected: u16, headers: &HeaderMap, body: &[u8]) -> Fault {
    let is_marked = headers
        .get(STALE)
        .is_some_and(|mark| mark.as_bytes().eq_ignore_ascii_case(b"true"));
    Fault::Status {
        status,
        expected,
        reason: shortened(String::from_utf8_lossy(body).trim()),
        retry_after: asked_pause(headers),
        is_stale: status == 421 && is_marked,
    }
}

/// Returns the headers with the variables of this process in them.
fn templates(config: &RemoteConfig) -> Result<Vec<(HeaderName, String)>, ClientError> {
    let mut headers = Vec::with_capacity(config.headers.len());
    for (name, template) in &config.headers {
        let fault = |reason: String| ClientError::Header {
            name: name.clone(),
            reason,
        };
        let known = HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| fault("which is no name of a header".to_owned()))?;
        let value = with_variables(template).map_err(fault)?;
        headers.push((known, value));
    }
    Ok(headers)
}

/// Replaces `{NAME}` by the environment variable `NAME`; `{slot}` stays.
fn with_variables(template: &str) -> Result<String, String> {
    let mut value = String::new();
    let mut rest = template;
    while let Some((before, behind)) = rest.split_once('{') {
        let (name, behind) =
            (behind.split_once('}')).ok_or_else(|| "a `{` that nothing closes".to_owned())?;
        value.push_str(before);
        if name == "slot" {
            value.push_str("{slot}");
        } else {
            let variable = std::env::var(name)
                .map_err(|_| format!("whose `{{{name}}}` is no environment variable; set it"))?;
            value.push_str(&variable);
        }
        rest = behind;
    }
    value.push_str(rest);
    Ok(value)
}

/// Tries until something comes of it, or `limit` is over; only what is safe to try again is.
///
/// `spread` makes those who wait together come back one after the other.
pub(super) async fn patiently<T, F: Future<Output = Result<T, Fault>>>(
    limit: Duration,
    spread: usize,
    mut attempt: impl FnMut() -> F,
) -> Result<T, Fault> {
    let started = Instant::now();
    let mut pause = PAUSES.0;
    loop {
        let fault = match attempt().await {
            Err(fault) if fault.may_be_tried_again() => fault,
            result => return result,
        };
        // Up to twice the pause.
        #[expect(clippy::cast_precision_loss, reason = "below 16")]
        let wait = pause.mul_f64(1.0 + (spread % 16) as f64 / 16.0);
        let wait = fault.asked_pause().map_or(wait, |asked| asked.max(wait));
        let waited = started.elapsed();
        if waited.saturating_add(wait) >= limit {
            return Err(Fault::GaveUp {
                waited: Duration::from_millis(
                    u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
                ),
                source: Box::new(fault),
            });
        }
        sleep(wait).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}
