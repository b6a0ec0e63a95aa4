//! `pods/exec` by the protocol `v5.channel.k8s.io`: the first byte of a message is its channel.

use std::io::{Read, Write as _};
use std::process::Stdio;
use std::sync::Arc;

use axum::extract::ws::{Message, WebSocket};
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::json;
use tokio::sync::mpsc;

use super::server::Cluster;

/// What is to be run.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) pod: String,
    pub(super) argv: Vec<String>,
    pub(super) has_input: bool,
}

/// Sends what a stream of a program holds, as messages of a channel.
fn forward(
    channel: u8,
    mut stream: impl Read + Send + 'static,
    sender: mpsc::Sender<Vec<u8>>,
) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(read @ 1..) = stream.read(&mut buffer) {
            if sender
                .blocking_send([&[channel], &buffer[..read]].concat())
                .is_err()
            {
                return;
            }
        }
    })
}

/// Runs a program in a pod's sandbox and carries its input and output.
pub(super) async fn serve(cluster: Arc<Cluster>, socket: WebSocket, program: Program) {
    let Some(mut command) = cluster.kubelet.program(&program.pod, &program.argv) else {
        return;
    };
    if program.has_input {
        command.stdin(Stdio::piped());
    }
    let mut child = command.spawn().unwrap();
    let (mut sink, mut stream) = socket.split();
    let (sender, mut output) = mpsc::channel(16);
    let readers = [
        forward(1, child.stdout.take().unwrap(), sender.clone()),
        forward(2, child.stderr.take().unwrap(), sender.clone()),
    ];
    let (input, pieces) = std::sync::mpsc::channel::<Vec<u8>>();
    if let Some(mut stdin) = child.stdin.take() {
        std::thread::spawn(move || {
            pieces
                .into_iter()
                .try_for_each(|piece| stdin.write_all(&piece))
        });
    }
    let pod = program.pod;
    std::thread::spawn(move || {
        let code = child.wait().unwrap().code();
        for reader in readers {
            reader.join().unwrap();
        }
        let status = match code {
            Some(0) => json!({ "metadata": {}, "status": "Success" }),
            code => {
                let is_there = cluster.kubelet.sandboxes().contains(&pod);
                cluster.kubelet.look(&cluster, &pod);
                let runs = cluster
                    .store()
                    .get(&super::store::POD, &pod)
                    .is_some_and(|pod| {
                        pod["status"]["phase"] == "Running"
                            && pod["metadata"]["deletionTimestamp"].is_null()
                    });
                let Some(code) = code.filter(|_| runs && is_there) else {
                    // With the container its connections end.
                    return;
                };
                json!({
                    "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
                    "message": format!("command terminated with non-zero exit code: exit status {code}"),
                    "details": { "causes": [{ "reason": "ExitCode", "message": code.to_string() }] },
                })
            }
        };
        let _ = sender.blocking_send([&[3][..], status.to_string().as_bytes()].concat());
    });
    let mut input = Some(input);
    let listen = async {
        while let Some(Ok(message)) = stream.next().await {
            let Message::Binary(bytes) = message else {
                continue;
            };
            match &bytes[..] {
                [0, piece @ ..] => {
                    if let Some(input) = &input {
                        let _ = input.send(piece.to_vec());
                    }
                }
                [255, 0] => input = None,
                _ => {}
            }
        }
        std::future::pending::<()>().await;
    };
    let speak = async {
        while let Some(message) = output.recv().await {
            if sink.send(Message::Binary(message.into())).await.is_err() {
                return;
            }
        }
        let _ = sink.close().await;
    };
    tokio::select! {
        () = listen => {}
        () = speak => {}
    }
}
