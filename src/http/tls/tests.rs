//! Servers and clients on real sockets, with certificates that are good, bad, and change.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Instant;

use axum::Router;
use axum::extract::ws::WebSocketUpgrade;
use axum::routing::get;
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::tungstenite;

use super::tests_support::{Authority, Folder, Issued};
use super::*;
use crate::causes::with_causes;
use crate::http::Listener;
use crate::http::connections::{Patience, serve_with};

/// Waits that no machine is too slow for.
const PATIENCE: Duration = Duration::from_secs(60);

struct Server {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    served: tokio::task::JoinHandle<()>,
}

impl Server {
    async fn start(files: TlsFiles) -> Self {
        Self::start_with(Some(files), PATIENCE, PATIENCE).await
    }

    async fn start_with(files: Option<TlsFiles>, handshake: Duration, head: Duration) -> Self {
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let listener = Listener::new(tcp, files.map(|files| ServerTls::new(files).unwrap()));
        let echo = async |upgrade: WebSocketUpgrade| {
            upgrade.on_upgrade(async |mut socket| {
                while let Some(Ok(message)) = socket.recv().await {
                    socket.send(message).await.unwrap();
                }
            })
        };
        let router = Router::new()
            .route("/", get(async || "hello"))
            .route("/large", get(async || "x".repeat(3 << 20)))
            .route("/ws", get(echo));
        let stop = watch::Sender::new(false);
        let mut stopped = stop.subscribe();
        let served = tokio::spawn(async move {
            let shutdown = async {
                let _ = stopped.wait_for(|stops| *stops).await;
            };
            let patience = Patience {
                handshake,
                head,
                read: PATIENCE,
            };
            serve_with(listener, router, shutdown, PATIENCE, patience).await;
        });
        Self {
            address,
            stop,
            served,
        }
    }

    async fn tcp(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Asks for the greeting over a connection of its own; what went wrong is said with its causes.
    async fn greeting(&self, client: &ClientTls) -> Result<String, String> {
        let stream = client.connect("localhost", self.tcp().await).await;
        let mut stream = stream.map_err(|error| with_causes(&error))?;
        let answer = ask(&mut stream, "/").await;
        answer.map_err(|error| with_causes(&error))
    }

    /// Asks until the answer is as it should be.
    async fn until(&self, client: &ClientTls, is_greeted: bool) {
        let started = Instant::now();
        while self.greeting(client).await.is_ok() != is_greeted {
            assert!(
                started.elapsed() < PATIENCE,
                "waiting for other certificates"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

async fn ask(stream: &mut TlsStream<TcpStream>, path: &str) -> io::Result<String> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    stream.flush().await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

fn server_files(folder: &Folder, issued: &Issued) -> TlsFiles {
    TlsFiles {
        certificate: Some(folder.bundle("server.pem", issued)),
        ..TlsFiles::default()
    }
}

fn client(files: TlsFiles) -> ClientTls {
    ClientTls::new(files).unwrap()
}

#[tokio::test]
async fn a_server_is_who_its_root_says() {
    let (root, other, folder) = (Authority::new(), Authority::new(), Folder::new());
    let issued = root.issue("localhost");
    let files = TlsFiles {
        certificate: Some(folder.write("certificate.pem", &issued.certificate)),
        key: Some(folder.write("key.pem", &issued.key)),
        ca: None,
    };
    let server = Server::start(files).await;
    let trusting = client(folder.trusting(&root));
    let answer = server.greeting(&trusting).await.unwrap();
    assert!(answer.ends_with("hello"), "{answer}");

    let mut stream = trusting
        .connect("localhost", server.tcp().await)
        .await
        .unwrap();
    let answer = ask(&mut stream, "/large").await.unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    assert_eq!(body.len(), 3 << 20);
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(HTTP));

    let refused = trusting.connect("127.0.0.1", server.tcp().await).await;
    let refused = with_causes(&refused.unwrap_err());
    assert!(refused.contains("not valid for name"), "{refused}");
    let refused = server.greeting(&client(folder.trusting(&other))).await;
    assert!(
        refused.as_ref().unwrap_err().contains("UnknownIssuer"),
        "{refused:?}"
    );
    // The roots of the web have not signed it either.
    let refused = server.greeting(&client(TlsFiles::default())).await;
    assert!(
        refused.as_ref().unwrap_err().contains("UnknownIssuer"),
        "{refused:?}"
    );
    let refused = trusting.connect("not a name", server.tcp().await).await;
    assert!(matches!(refused, Err(TlsError::Host { .. })), "{refused:?}");
}

#[tokio::test]
async fn an_address_may_be_who_a_server_is() {
    let (root, folder) = (Authority::new(), Folder::new());
    let server = Server::start(server_files(&folder, &root.issue("::1"))).await;
    let client = client(folder.trusting(&root));
    for host in ["::1", "[::1]"] {
        let mut stream = client.connect(host, server.tcp().await).await.unwrap();
        assert!(ask(&mut stream, "/").await.unwrap().ends_with("hello"));
    }
}

#[tokio::test]
async fn a_client_without_the_right_certificate_is_refused() {
    let (root, clients, folder) = (Authority::new(), Authority::new(), Folder::new());
    let files = TlsFiles {
        ca: Some(folder.write("clients.pem", &clients.pem())),
        ..server_files(&folder, &root.issue("localhost"))
    };
    let server = Server::start(files).await;
    let with = |certificate| TlsFiles {
        certificate,
        ..folder.trusting(&root)
    };
    let good = folder.bundle("good.pem", &clients.issue("agent"));
    let answer = server.greeting(&client(with(Some(good)))).await.unwrap();
    assert!(answer.ends_with("hello"), "{answer}");

    let refused = server.greeting(&client(with(None))).await.unwrap_err();
    assert!(refused.contains("CertificateRequired"), "{refused}");
    let bad = folder.bundle("bad.pem", &root.issue("agent"));
    let refused = server.greeting(&client(with(Some(bad)))).await.unwrap_err();
    assert!(refused.contains("UnknownCA"), "{refused}");
}

#[tokio::test]
async fn a_socket_goes_over_tls() {
    let (root, folder) = (Authority::new(), Folder::new());
    let server = Server::start(server_files(&folder, &root.issue("localhost"))).await;
    let client = client(folder.trusting(&root));
    let stream = client
        .connect("localhost", server.tcp().await)
        .await
        .unwrap();
    let (mut socket, _) = tokio_tungstenite::client_async("wss://localhost/ws", stream)
        .await
        .unwrap();
    let text = "x".repeat(100_000);
    for _ in 0..3 {
        let message = tungstenite::Message::text(text.clone());
        socket.send(message).await.unwrap();
        let answer = socket.next().await.unwrap().unwrap();
        assert!(answer.into_text().unwrap() == text.as_str());
    }
}

/// Turns the link `..data`, as the kubelet does with a volume.
fn turn(folder: &Folder, to: &str) {
    let new = folder.path("..data_tmp");
    std::os::unix::fs::symlink(folder.path(to), &new).unwrap();
    fs_err::rename(new, folder.path("..data")).unwrap();
}

fn volume(folder: &Folder, name: &str, issued: &Issued, root: &Authority) {
    fs_err::create_dir(folder.path(name)).unwrap();
    folder.bundle(&format!("{name}/bundle.pem"), issued);
    folder.write(&format!("{name}/roots.pem"), &root.pem());
}

#[tokio::test]
async fn a_server_shows_the_certificate_of_today() {
    let (old, new, folder) = (Authority::new(), Authority::new(), Folder::new());
    volume(&folder, "1", &old.issue("localhost"), &old);
    volume(&folder, "2", &new.issue("localhost"), &new);
    turn(&folder, "1");
    let server = Server::start(TlsFiles {
        certificate: Some(folder.path("..data/bundle.pem")),
        key: None,
        ca: Some(folder.path("..data/roots.pem")),
    })
    .await;
    let (folder_of_old, folder_of_new) = (Folder::new(), Folder::new());
    let client_of = |root: &Authority, folder: &Folder| {
        client(TlsFiles {
            certificate: Some(folder.bundle("client.pem", &root.issue("agent"))),
            ..folder.trusting(root)
        })
    };
    let of_old = client_of(&old, &folder_of_old);
    let of_new = client_of(&new, &folder_of_new);
    server.greeting(&of_old).await.unwrap();
    let mut open = of_old
        .connect("localhost", server.tcp().await)
        .await
        .unwrap();

    turn(&folder, "2");
    server.until(&of_new, true).await;
    let refused = server.greeting(&of_old).await.unwrap_err();
    assert!(refused.contains("UnknownIssuer"), "{refused}");
    // What was open goes on.
    assert!(ask(&mut open, "/").await.unwrap().ends_with("hello"));
}

#[tokio::test]
async fn files_that_cannot_be_used_change_nothing() {
    let (root, folder) = (Authority::new(), Folder::new());
    let (first, second) = (root.issue("localhost"), root.issue("localhost"));
    let [certificate, key] = [
        ("certificate.pem", &first.certificate),
        ("key.pem", &first.key),
    ]
    .map(|(name, contents)| folder.write(name, contents));
    let files = TlsFiles {
        certificate: Some(certificate),
        key: Some(key.clone()),
        ca: None,
    };
    let made = Reloading::new(files, |credentials| {
        check_client(credentials)?;
        let identity = credentials.identity.as_ref();
        Ok(identity.map(|identity| identity.chain.clone()))
    })
    .unwrap();
    let original = made.current();
    let later = || std::thread::sleep(Duration::from_millis(1050));
    for (name, contents) in [
        ("certificate.pem", ""),
        (
            "certificate.pem",
            "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n",
        ),
        // The key is still to come.
        ("certificate.pem", &second.certificate),
    ] {
        folder.write(name, contents);
        later();
        assert_eq!(made.current(), original, "{contents}");
    }
    fs_err::remove_file(&key).unwrap();
    later();
    assert_eq!(made.current(), original);
    folder.write("key.pem", &second.key);
    assert_eq!(made.current(), original, "they are looked at once a second");
    later();
    assert_ne!(made.current(), original);
}

#[tokio::test]
async fn a_client_trusts_the_roots_of_today() {
    let (old, new, folder) = (Authority::new(), Authority::new(), Folder::new());
    let server = Server::start(server_files(&folder, &new.issue("localhost"))).await;
    let client = client(folder.trusting(&old));
    server.greeting(&client).await.unwrap_err();
    folder.trusting(&new);
    server.until(&client, true).await;
    folder.write("trusted.pem", "");
    server.until(&client, true).await;
    folder.trusting(&old);
    server.until(&client, false).await;
}

#[test]
fn files_are_refused_with_reasons() {
    let (root, folder) = (Authority::new(), Folder::new());
    let issued = root.issue("localhost");
    let certificate = folder.write("certificate.pem", &issued.certificate);
    let key = folder.write("key.pem", &issued.key);
    let other = folder.write("other.pem", &root.issue("localhost").key);
    let large = folder.write("large.pem", &" ".repeat((1 << 20) + 1));
    let odd = folder.write(
        "odd.pem",
        "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n",
    );
    let why = |certificate: Option<&Path>, key: Option<&Path>, ca: Option<&Path>| {
        let files = TlsFiles {
            certificate: certificate.map(Path::to_owned),
            key: key.map(Path::to_owned),
            ca: ca.map(Path::to_owned),
        };
        with_causes(&ServerTls::new(files).unwrap_err())
    };
    for (refused, part) in [
        (why(None, None, None), "needs a certificate"),
        (why(None, Some(&key), None), "key without a certificate"),
        (why(Some(&certificate), None, None), "holds no private key"),
        (why(Some(&key), None, None), "holds no certificate"),
        (why(Some(&certificate), Some(&other), None), "KeyMismatch"),
        (why(Some(&large), None, None), "larger than 1048576 bytes"),
        (why(Some(&folder.path("")), None, None), "is no file"),
        (why(Some(&folder.path("none.pem")), None, None), "none.pem"),
        (
            why(Some(&certificate), Some(&key), Some(&odd)),
            "no root in",
        ),
    ] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
}

#[tokio::test]
async fn who_never_shakes_hands_is_shut_out_and_holds_up_nobody() {
    let (root, folder) = (Authority::new(), Folder::new());
    let files = server_files(&folder, &root.issue("localhost"));
    let server = Server::start_with(Some(files), Duration::from_secs(2), PATIENCE).await;
    let client = client(folder.trusting(&root));
    let mut silent = Vec::new();
    // The head of a record that says more than comes.
    for sent in [&b""[..], b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"].repeat(50) {
        let mut stream = server.tcp().await;
        stream.write_all(sent).await.unwrap();
        silent.push(stream);
    }
    let started = Instant::now();
    server.greeting(&client).await.unwrap();
    let first = &mut silent[0];
    let early = tokio::time::timeout(Duration::from_millis(10), first.read_u8()).await;
    assert!(early.is_err() || started.elapsed() > Duration::from_secs(1));
    for mut stream in silent {
        let mut rest = Vec::new();
        let ended = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut rest)).await;
        // With something unread the system resets it.
        let _ = ended.expect("the server closes it");
        assert!(rest.is_empty());
    }
    server.greeting(&client).await.unwrap();
}

#[tokio::test]
async fn who_says_nothing_over_tls_is_shut_out() {
    let (root, folder) = (Authority::new(), Folder::new());
    let files = server_files(&folder, &root.issue("localhost"));
    let server = Server::start_with(Some(files), PATIENCE, Duration::from_millis(100)).await;
    let client = client(folder.trusting(&root));
    for sent in ["", "GET / HTTP/1.1\r\nHost: x\r\n"] {
        let mut stream = client
            .connect("localhost", server.tcp().await)
            .await
            .unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
        let mut answer = Vec::new();
        let ended = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
        let _ = ended.expect("the server closes it");
        assert!(answer.is_empty());
    }
}

#[tokio::test]
async fn other_protocols_are_told_or_shut_out() {
    let (root, folder) = (Authority::new(), Folder::new());
    let server = Server::start(server_files(&folder, &root.issue("localhost"))).await;
    let client = client(folder.trusting(&root));

    let mut plain = server.tcp().await;
    let body = "x".repeat(5000);
    let request = format!("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{body}");
    plain.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    plain.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(
        answer.ends_with("ask for `https://` or `wss://`\n"),
        "{answer}"
    );

    for garbage in [
        vec![0; 4096],
        vec![0x16; 70_000],
        vec![0xff; 3],
        b"\x80\x2e\x01".to_vec(),
    ] {
        let mut stream = server.tcp().await;
        // It may be closed before all is sent.
        let _ = stream.write_all(&garbage).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let ended = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
        let _ = ended.expect("the server closes it");
        // An alert at most.
        assert!(answer.len() <= 7, "{answer:?}");
    }
    server.greeting(&client).await.unwrap();

    let server = Server::start_with(None, PATIENCE, PATIENCE).await;
    let refused = server.greeting(&client).await.unwrap_err();
    assert!(refused.contains("InvalidContentType"), "{refused}");
}

#[tokio::test]
async fn a_stop_waits_for_no_handshake() {
    let (root, folder) = (Authority::new(), Folder::new());
    let server = Server::start(server_files(&folder, &root.issue("localhost"))).await;
    let _half = server.tcp().await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    server.stop.send_replace(true);
    tokio::time::timeout(PATIENCE / 2, server.served)
        .await
        .expect("it stops at once")
        .unwrap();
}
