//! The router of the cluster: it finds actors by a header, wakes them, lets requests wait for a while where no worker is
//! free, and says so when an actor has moved.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use wardian::actor::substrate::messages::ObjectRef;

use super::control::{ATESPACE, Control};
use crate::actor::sandboxd::read_request;

/// How long a request waits for a worker.
const PARKED: Duration = Duration::from_millis(300);

pub(super) struct Router {
    pub(super) address: SocketAddr,
    /// What requests are answered with before they are delivered, and how many were delivered.
    script: Arc<Mutex<(Vec<&'static str>, usize)>>,
}

impl Router {
    pub(super) fn start(control: Arc<Control>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let router = Self {
            address: listener.local_addr().unwrap(),
            script: Arc::default(),
        };
        let script = Arc::clone(&router.script);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let (control, script) = (Arc::clone(&control), Arc::clone(&script));
                std::thread::spawn(move || {
                    let request = read_request(&mut stream);
                    let next = {
                        let mut script = script.lock().unwrap();
                        match script.0.is_empty() {
                            true => {
                                script.1 += 1;
                                None
                            }
                            false => Some(script.0.remove(0)),
                        }
                    };
                    let answer = match next {
                        Some(answer) => answer.as_bytes().to_vec(),
                        None => route(&control, &request),
                    };
                    stream.write_all(&answer).unwrap_or_default();
                });
            }
        });
        router
    }

    /// Answers the next requests so.
    pub(super) fn says(&self, answers: &[&'static str]) {
        *self.script.lock().unwrap() = (answers.to_vec(), 0);
    }

    pub(super) fn delivered(&self) -> usize {
        self.script.lock().unwrap().1
    }
}

fn plain(status: &str, text: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    )
    .into_bytes()
}

fn route(control: &Control, request: &[u8]) -> Vec<u8> {
    let head = String::from_utf8_lossy(request);
    let head = head.split("\r\n\r\n").next().unwrap_or_default();
    let target = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("ate-target-actor")
            .then(|| value.trim().to_owned())
    });
    let target = target.and_then(|target| {
        target
            .split_once('/')
            .map(|(a, b)| (a.to_owned(), b.to_owned()))
    });
    let Some((_, name)) =
        target.filter(|(atespace, name)| atespace == ATESPACE && control.has_actor(name))
    else {
        return plain("404 Not Found", "no such actor");
    };
    // Each request wakes its actor.
    let reference = ObjectRef {
        atespace: ATESPACE.to_owned(),
        name: name.clone(),
    };
    let until = Instant::now() + PARKED;
    let address = loop {
        let resumed = control.resume_actor(Some(reference.clone()));
        match (resumed, control.address(&name)) {
            (Ok(_), Some(address)) => break address,
            (Err(status), _) if Instant::now() >= until => {
                return plain(
                    "503 Service Unavailable",
                    &format!("unavailable: {}", status.message()),
                );
            }
            _ => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let Ok(mut stream) = TcpStream::connect(address) else {
        return plain("503 Service Unavailable", "the actor is gone");
    };
    stream.write_all(request).unwrap_or_default();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap_or_default();
    answer
}
