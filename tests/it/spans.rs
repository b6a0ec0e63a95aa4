//! Spans over OTLP/HTTP: what a collector gets of a short run. The collector is a thread of the test, and reads the
//! messages by the numbers of OpenTelemetry's protocol.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};

use prost::Message as _;

#[derive(Clone, PartialEq, prost::Message)]
struct Request {
    #[prost(message, repeated, tag = "1")]
    resources: Vec<ResourceSpans>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    scopes: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Resource {
    #[prost(message, repeated, tag = "1")]
    attributes: Vec<Attribute>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ScopeSpans {
    #[prost(message, repeated, tag = "2")]
    spans: Vec<Span>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Span {
    #[prost(bytes = "vec", tag = "1")]
    trace: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    id: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    parent: Vec<u8>,
    #[prost(string, tag = "5")]
    name: String,
    #[prost(fixed64, tag = "7")]
    start: u64,
    #[prost(fixed64, tag = "8")]
    end: u64,
    #[prost(message, repeated, tag = "9")]
    attributes: Vec<Attribute>,
    #[prost(message, repeated, tag = "13")]
    links: Vec<Link>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Link {
    #[prost(bytes = "vec", tag = "2")]
    span: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Attribute {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(message, optional, tag = "2")]
    value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct AnyValue {
    #[prost(oneof = "Value", tags = "1, 2, 3, 4")]
    value: Option<Value>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Value {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(bool, tag = "2")]
    Bool(bool),
    #[prost(int64, tag = "3")]
    Integer(i64),
    #[prost(double, tag = "4")]
    Float(f64),
}

/// What a request brought: its head, and its body.
type Received = Arc<Mutex<Vec<(String, Request)>>>;

/// Answers requests of one connection, until it is closed.
fn answer(stream: &TcpStream, received: &Received) {
    let mut reader = BufReader::new(stream);
    loop {
        let (mut head, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).is_ok_and(|read| read == 0) {
                return;
            }
            let line = line.trim().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().expect("it is a length");
            }
            head.push_str(&line);
            head.push('\n');
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).expect("the body is there");
        let request = Request::decode(&body[..]).expect("it is the protocol's message");
        received
            .lock()
            .expect("no thread has failed")
            .push((head, request));
        let mut stream = stream;
        stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n")
            .expect("it is read");
    }
}

/// Runs a short training that sends its spans; returns what came.
fn received(address: &str, out: &std::path::Path) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_wardian"))
        .args([
            "train",
            "--set",
            "trainer.steps=1",
            "--set",
            "eval.limit=2",
            "--set",
            "eval.samples=1",
        ])
        .args([
            "--set",
            "rollout.groups_per_step=2",
            "--set",
            "rollout.group_size=4",
            "--out",
        ])
        .arg(out)
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        .env("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=7")
        .env(
            "OTEL_RESOURCE_ATTRIBUTES",
            "deployment.environment.name=test",
        )
        .output()
        .expect("the binary starts")
}

#[test]
fn a_collector_gets_the_spans_of_a_run() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = format!("http://{}", listener.local_addr().expect("it is bound"));
    let requests = Received::default();
    let of_thread = Arc::clone(&requests);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let received = Arc::clone(&of_thread);
            std::thread::spawn(move || answer(&stream.expect("it connects"), &received));
        }
    });
    let folder = tempfile::tempdir().expect("a folder can be made");
    let out = folder.path().join("first");
    let done = received(&address, &out);
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");

    let requests = requests.lock().expect("no thread has failed");
    let (head, _) = requests.first().expect("something was sent");
    for line in [
        "post /v1/traces http/1.1",
        "content-type: application/x-protobuf",
        "x-tenant: 7",
    ] {
        assert!(head.contains(line), "{head}");
    }
    let of = |attributes: &[Attribute], key: &str| {
        let attribute = attributes.iter().find(|attribute| attribute.key == key)?;
        attribute.value.clone()?.value
    };
    let text = |value: &str| Some(Value::Text(value.to_owned()));
    let mut spans = Vec::new();
    for resource in requests.iter().flat_map(|(_, request)| &request.resources) {
        let attributes = &resource.resource.as_ref().expect("it is there").attributes;
        assert_eq!(of(attributes, "service.name"), text("wardian"));
        assert_eq!(of(attributes, "deployment.environment.name"), text("test"));
        spans.extend(resource.scopes.iter().flat_map(|scope| &scope.spans));
    }
    let by_id: BTreeMap<&[u8], &Span> = spans.iter().map(|span| (&span.id[..], *span)).collect();
    assert_eq!(by_id.len(), spans.len(), "each is sent once");
    let named = |name: &str| {
        spans
            .iter()
            .copied()
            .filter(|span| span.name == name)
            .collect::<Vec<_>>()
    };
    let parent = |span: &Span| by_id.get(&span.parent[..]).copied();

    let [run] = named("run")[..] else {
        panic!("{:?}", named("run"))
    };
    assert_eq!(of(&run.attributes, "run"), text("first"));
    let [step] = named("step")[..] else {
        panic!("{:?}", named("step"))
    };
    let measured = named("evaluate");
    assert_eq!(measured.len(), 2, "before and after");
    for part in measured.iter().copied().chain([step]) {
        assert!(
            part.parent.is_empty() && part.links[0].span == run.id,
            "{part:?}"
        );
        assert_eq!(of(&part.attributes, "run"), text("first"));
    }
    let [update] = named("update")[..] else {
        panic!("{:?}", named("update"))
    };
    assert_eq!(parent(update), Some(step));

    let rollouts = named("rollout");
    let learned: Vec<_> = rollouts
        .iter()
        .filter(|span| span.parent == step.id)
        .collect();
    assert_eq!((learned.len(), rollouts.len()), (8, 8 + 2 * 2));
    let mut ids: Vec<_> = learned
        .iter()
        .map(|span| of(&span.attributes, "rollout"))
        .collect();
    ids.sort_by_key(|id| format!("{id:?}"));
    let expected = (0..2).flat_map(|group| (0..4).map(move |sample| format!("1-{group}-{sample}")));
    assert_eq!(ids, expected.map(|id| text(&id)).collect::<Vec<_>>());
    for rollout in &rollouts {
        assert!(of(&rollout.attributes, "reward").is_some(), "{rollout:?}");
        assert!(rollout.trace == step.trace || rollout.trace != run.trace);
    }
    let turns = named("turn");
    assert!(turns.len() >= rollouts.len(), "{} turns", turns.len());
    for turn in &turns {
        assert!(
            matches!(of(&turn.attributes, "tokens"), Some(Value::Integer(1..))),
            "{turn:?}"
        );
    }
    let (tools, grades) = (named("tool"), named("grade"));
    assert!(
        !tools.is_empty() && !grades.is_empty(),
        "{} and {}",
        tools.len(),
        grades.len()
    );
    for part in turns.iter().chain(&tools).chain(&grades) {
        let rollout = parent(part).expect("it is within something that was sent");
        assert_eq!(rollout.name, "rollout", "{part:?}");
        assert!(
            rollout.start <= part.start && part.end <= rollout.end,
            "{part:?}"
        );
    }
}

#[test]
fn a_collector_that_is_not_there_is_said_and_ends_no_run() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = format!("http://{}", listener.local_addr().expect("it is bound"));
    drop(listener);
    let folder = tempfile::tempdir().expect("a folder can be made");
    let done = received(&address, &folder.path().join("run"));
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert_eq!(said.matches("does not take spans").count(), 1, "{said}");
}
