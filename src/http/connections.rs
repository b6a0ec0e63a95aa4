//! Accepting and serving connections until asked to stop.

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::Request;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::{TowerToHyperService, TowerToHyperServiceFuture};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio_rustls::server::TlsStream;

use super::Peer;
use super::tls::{HANDSHAKE_WITHIN, ServerTls};
use super::write_within::WriteWithin;

/// How long a connection may take to send the head of a request, and be idle before it.
const HEAD_WITHIN: Duration = Duration::from_secs(60);

/// How long a client may read nothing of what it is told.
const READ_WITHIN: Duration = Duration::from_secs(60);

/// How much is read of a client whose handshake was refused.
const REFUSED_READ: u64 = 64 << 10;

/// How long nobody is let in after a connection could not be accepted, as where there are no more file
/// descriptors.
const REST: Duration = Duration::from_millis(100);

/// Where connections come from.
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    tls: Option<Arc<ServerTls>>,
}

impl Listener {
    /// Makes connections TLS where `tls` is given.
    #[must_use]
    pub fn new(tcp: TcpListener, tls: Option<ServerTls>) -> Self {
        Self {
            tcp,
            tls: tls.map(Arc::new),
        }
    }

    /// Returns the address that is listened at, as a URL without a path.
    ///
    /// # Errors
    ///
    /// Fails where the system does not know it.
    pub fn url(&self) -> io::Result<String> {
        let scheme = match self.tls {
            Some(_) => "https",
            None => "http",
        };
        Ok(format!("{scheme}://{}", self.tcp.local_addr()?))
    }
}

impl From<TcpListener> for Listener {
    fn from(tcp: TcpListener) -> Self {
        Self::new(tcp, None)
    }
}

/// Serves until `shutdown` is ready, then lets requests under way finish for up to `grace`. A connection
/// that becomes a socket is the router's to look after.
pub async fn serve(
    listener: impl Into<Listener>,
    router: Router,
    shutdown: impl Future<Output = ()> + Send + 'static,
    grace: Duration,
) {
    let patience = Patience {
        handshake: HANDSHAKE_WITHIN,
        head: HEAD_WITHIN,
        read: READ_WITHIN,
    };
    serve_with(listener.into(), router, shutdown, grace, patience).await;
}

/// How long a client may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// Over a handshake.
    pub(super) handshake: Duration,
    /// Over the head of a request.
    pub(super) head: Duration,
    /// Before it reads more of what it is told.
    pub(super) read: Duration,
}

pub(super) async fn serve_with(
    listener: Listener,
    router: Router,
    shutdown: impl Future<Output = ()>,
    grace: Duration,
    patience: Patience,
) {
    raise_descriptor_limit();
    let stopping = watch::Sender::new(false);
    // Each connection has a share; when all are gone, nothing can be received any more.
    let (alive, mut all_gone) = mpsc::channel::<()>(1);
    let mut shutdown = pin!(shutdown);
    loop {
        tokio::select! {
            accepted = listener.tcp.accept() => match accepted {
                Ok((stream, peer)) => {
                    let peer = Peer(peer.ip());
                    let service = Service::new(router.clone(), peer);
                    let mut stopping = stopping.subscribe();
                    let (share, tls) = (alive.clone(), listener.tls.clone());
                    tokio::spawn(async move {
                        // A reply that waits for the acknowledgement of the one before would take 40 ms
                        // longer. Without it the connection is slower, no more.
                        let _ = stream.set_nodelay(true);
                        match tls {
                            None => converse(stream, service, stopping, patience).await,
                            // Boxed, so that a plain connection takes no more memory for it.
                            Some(tls) => Box::pin(async move {
                                let within = patience.handshake;
                                if let Some(stream) = secure(stream, &tls, &mut stopping, within).await {
                                    converse(stream, service, stopping, patience).await;
                                }
                            })
                            .await,
                        }
                        drop(share);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(REST).await;
                }
            },
            () = &mut shutdown => break,
        }
    }
    drop(listener);
    drop(alive);
    stopping.send_replace(true);
    if tokio::time::timeout(grace, all_gone.recv()).await.is_err() {
        tracing::warn!(
            ?grace,
            "requests were cut off at the end of the time to finish"
        );
    }
}

/// Returns the connection once the client has shaken hands, if it does so in time and before the server
/// stops.
async fn secure(
    mut stream: TcpStream,
    tls: &ServerTls,
    stopping: &mut watch::Receiver<bool>,
    within: Duration,
) -> Option<TlsStream<TcpStream>> {
    let handshake = async move {
        let mut first = [0];
        stream.peek(&mut first).await?;
        // The first letter of a method of HTTP; TLS begins with the byte 22.
        let (error, mut stream) = match first[0].is_ascii_uppercase() {
            true => {
                stream.write_all(plain_answer().as_bytes()).await?;
                (io::Error::other("it speaks no TLS"), stream)
            }
            false => match tls.accept(stream).await {
                Ok(stream) => return Ok(stream),
                Err(refused) => refused,
            },
        };
        stream.shutdown().await?;
        // What is closed with something unread takes along what the client was told.
        tokio::io::copy(&mut stream.take(REFUSED_READ), &mut tokio::io::sink()).await?;
        Err(error)
    };
    let done = tokio::select! {
        done = tokio::time::timeout(within, handshake) => done,
        _ = stopping.wait_for(|stops| *stops) => return None,
    };
    match done {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a handshake failed");
            None
        }
        Err(_) => {
            tracing::debug!("a handshake took too long");
            None
        }
    }
}

/// Returns what a client that speaks no TLS is told.
fn plain_answer() -> String {
    const WHY: &str = "this port speaks TLS only: ask for `https://` or `wss://`\n";
    format!(
        "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{WHY}",
        WHY.len()
    )
}

/// A router whose requests say where they came from.
struct Service {
    router: TowerToHyperService<Router>,
    peer: Peer,
}

impl Service {
    fn new(router: Router, peer: Peer) -> Self {
        Self {
            router: TowerToHyperService::new(router),
            peer,
        }
    }
}

impl hyper::service::Service<Request<Incoming>> for Service {
    type Response = Response;
    type Error = Infallible;
    type Future = TowerToHyperServiceFuture<Router, Request<Incoming>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.peer);
        self.router.call(request)
    }
}

async fn converse(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    service: Service,
    mut stopping: watch::Receiver<bool>,
    patience: Patience,
) {
    let stream = WriteWithin::new(stream, patience.read);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(patience.head)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = pin!(connection);
    let stops = async {
        // A sender that is gone means the same.
        let _ = stopping.wait_for(|stops| *stops).await;
    };
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stops => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke");
    }
}

/// Lets the process have as many connections as it may: the usual limit is a start for the programs that
/// cannot count further.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "the limit of file descriptors stays as it is");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::routing::get;

    use super::*;

    async fn start(
        head_within: Duration,
        grace: Duration,
    ) -> (
        std::net::SocketAddr,
        watch::Sender<bool>,
        tokio::task::JoinHandle<()>,
    ) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(async || "hello")).route(
            "/slow",
            get(async || {
                tokio::time::sleep(Duration::from_millis(300)).await;
                "at last"
            }),
        );
        let router = router.route("/endless", get(async || endless()));
        let stop = watch::Sender::new(false);
        let mut stopped = stop.subscribe();
        let served = tokio::spawn(async move {
            let shutdown = async {
                let _ = stopped.wait_for(|stops| *stops).await;
            };
            let patience = Patience {
                handshake: head_within,
                head: head_within,
                read: head_within,
            };
            serve_with(listener.into(), router, shutdown, grace, patience).await;
        });
        (address, stop, served)
    }

    #[tokio::test]
    async fn connections_that_say_nothing_are_closed() {
        let (address, _stop, _served) = start(Duration::from_millis(100), Duration::ZERO).await;
        for sent in [
            "",
            "GET / HTTP/1.1\r\nHost: x\r\n",
            "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        ] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(sent.as_bytes()).await.unwrap();
            let mut answer = String::new();
            let read = stream.read_to_string(&mut answer);
            let read = tokio::time::timeout(Duration::from_secs(30), read).await;
            read.expect("the server closes the connection").unwrap();
            assert_eq!(
                answer.contains("hello"),
                sent.ends_with("\r\n\r\n"),
                "{answer}"
            );
        }
    }

    /// Answers without end that are not dropped yet; one test asks for them.
    static KEPT: AtomicUsize = AtomicUsize::new(0);

    struct Kept;

    impl Drop for Kept {
        fn drop(&mut self) {
            KEPT.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn endless() -> Response {
        KEPT.fetch_add(1, Ordering::SeqCst);
        let kept = Kept;
        let pieces = futures_util::stream::repeat_with(move || {
            let _kept = &kept;
            Ok::<_, Infallible>(vec![0_u8; 1 << 16])
        });
        Response::new(axum::body::Body::from_stream(pieces))
    }

    #[tokio::test]
    async fn who_reads_nothing_of_an_answer_holds_nothing_for_long() {
        let (address, _stop, _served) = start(Duration::from_millis(300), Duration::ZERO).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        let asked = b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n";
        stream.write_all(asked).await.unwrap();
        let mut some = [0; 1 << 16];
        stream.read_exact(&mut some).await.unwrap();
        let is_dropped = async {
            while KEPT.load(Ordering::SeqCst) > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let is_dropped = tokio::time::timeout(Duration::from_secs(30), is_dropped).await;
        is_dropped.expect("the answer is dropped while its client still holds the connection");
        drop(stream);
    }

    #[tokio::test]
    async fn a_stop_waits_for_answers_and_for_no_idle_connection() {
        let patience = Duration::from_secs(60);
        let (address, stop, served) = start(patience, patience).await;
        let _idle = TcpStream::connect(address).await.unwrap();
        let mut busy = TcpStream::connect(address).await.unwrap();
        busy.write_all(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        stop.send_replace(true);
        let mut answer = String::new();
        busy.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("at last"), "{answer}");
        tokio::time::timeout(Duration::from_secs(30), served)
            .await
            .unwrap()
            .unwrap();
    }
}
