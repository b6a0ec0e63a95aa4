//! A server that says what a test has it say, byte by byte.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

/// What a scripted server sends for one request, a pause in milliseconds before each part.
pub(crate) type Script = Vec<(u64, String)>;

/// Serves each connection by the script that `answer` has for the request's body; returns the address,
/// up to and with `/v1`.
pub(crate) fn serve(answer: impl Fn(&Value) -> Script + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, answer) = (stream.unwrap(), Arc::clone(&answer));
            std::thread::spawn(move || respond(stream, &*answer));
        }
    });
    url
}

fn respond(stream: TcpStream, answer: &(impl Fn(&Value) -> Script + ?Sized)) {
    let mut writer = stream.try_clone().unwrap();
    let mut reader = BufReader::new(stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let line = line.trim().to_ascii_lowercase();
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if line.is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let body = serde_json::from_slice(&body).unwrap_or_default();
    for (pause, part) in answer(&body) {
        std::thread::sleep(Duration::from_millis(pause));
        if writer.write_all(part.as_bytes()).is_err() {
            return;
        }
        let _ = writer.flush();
    }
}

/// A whole response, after which the connection ends.
pub(crate) fn whole(status: &str, body: &str) -> Script {
    whole_with(status, "", body)
}

/// A whole response with further headers, each with its line's end.
pub(crate) fn whole_with(status: &str, headers: &str, body: &str) -> Script {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{headers}\
         Connection: close\r\n\r\n{body}"
    );
    vec![(0, head)]
}
