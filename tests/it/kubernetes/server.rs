//! An API server on the loopback device: discovery, objects, watches, programs in pods, and faults on demand.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequestParts as _, Request, State, WebSocketUpgrade};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::exec;
use super::kubelet::Kubelet;
use super::store::{KINDS, Kind, POD, REVIEW, Store, is_selected, merge, not_found, status};

/// An answer in place of the server's own.
#[derive(Debug, Clone)]
pub(super) struct Fault {
    pub(super) method: Method,
    /// What its path holds.
    pub(super) path: &'static str,
    pub(super) code: u16,
    /// How often it is given.
    pub(super) times: u32,
}

/// What outlives a restart.
#[derive(Debug)]
pub(super) struct Cluster {
    pub(super) store: Mutex<Store>,
    pub(super) faults: Mutex<Vec<Fault>>,
    /// Verbs and resources that are not allowed.
    pub(super) denied: Mutex<Vec<(&'static str, &'static str)>>,
    /// Groups that are not there.
    pub(super) missing: Mutex<Vec<&'static str>>,
    /// Requests so far: method, path, query.
    pub(super) requests: Mutex<Vec<String>>,
    /// Counts the times that all watches were cut.
    pub(super) cuts: watch::Sender<u64>,
    /// What the registry has: `name:tag`.
    pub(super) images: Mutex<BTreeSet<String>>,
    /// What the logs of pods hold.
    pub(super) logs: Mutex<BTreeMap<String, String>>,
    /// What clients must show.
    pub(super) token: Option<&'static str>,
    pub(super) kubelet: Kubelet,
}

impl Cluster {
    /// Whether pods can be started from an image.
    pub(super) fn has_image(&self, image: &str) -> bool {
        let name = image.split_once('/').map(|(_, name)| name);
        let images = self.images.lock().unwrap();
        image == super::kubelet::IMAGE || name.is_some_and(|name| images.contains(name))
    }

    pub(super) fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connections by TLS.
struct TlsListener {
    plain: TcpListener,
    acceptor: TlsAcceptor,
}

impl axum::serve::Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let (stream, address) = self.plain.accept().await.unwrap();
            if let Ok(stream) = self.acceptor.accept(stream).await {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.plain.local_addr()
    }
}

/// The server; it can be stopped and started again on the same port.
pub(super) struct Server {
    pub(super) cluster: Arc<Cluster>,
    address: SocketAddr,
    acceptor: Option<TlsAcceptor>,
    runtime: Option<Runtime>,
}

impl Server {
    pub(super) fn start(cluster: Arc<Cluster>, acceptor: Option<TlsAcceptor>) -> Self {
        let mut server = Self {
            cluster,
            acceptor,
            address: ([127, 0, 0, 1], 0).into(),
            runtime: None,
        };
        server.resume();
        server
    }

    pub(super) fn url(&self) -> String {
        let scheme = if self.acceptor.is_some() {
            "https"
        } else {
            "http"
        };
        format!("{scheme}://{}", self.address)
    }

    /// Ends the server and all its connections.
    pub(super) fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }

    pub(super) fn resume(&mut self) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime.block_on(TcpListener::bind(self.address)).unwrap();
        self.address = listener.local_addr().unwrap();
        let router = axum::Router::new()
            .fallback(answer)
            .with_state(Arc::clone(&self.cluster));
        let acceptor = self.acceptor.clone();
        runtime.spawn(async move {
            match acceptor {
                Some(acceptor) => {
                    let plain = listener;
                    axum::serve(TlsListener { plain, acceptor }, router)
                        .await
                        .unwrap();
                }
                None => axum::serve(listener, router).await.unwrap(),
            }
        });
        self.runtime = Some(runtime);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A request's path, understood.
struct Target {
    kind: Kind,
    name: Option<String>,
    below: Option<String>,
}

fn target(path: &str) -> Option<Target> {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let (group_version, rest) = match parts.as_slice() {
        ["api", version, rest @ ..] => ((*version).to_owned(), rest),
        ["apis", group, version, rest @ ..] => (format!("{group}/{version}"), rest),
        _ => return None,
    };
    let rest = match rest {
        ["namespaces", namespace, rest @ ..] if *namespace == super::NAMESPACE => rest,
        rest => rest,
    };
    let plural = rest.first()?;
    let kind = KINDS
        .iter()
        .find(|kind| kind.group_version == group_version && kind.plural == *plural)?;
    Some(Target {
        kind: kind.clone(),
        name: rest.get(1).map(|name| (*name).to_owned()),
        below: rest.get(2).map(|name| (*name).to_owned()),
    })
}

/// Returns the values of a query's parameter, decoded.
pub(super) fn parameters(query: &str, name: &str) -> Vec<String> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let found = pairs.filter(|(found, _)| *found == name);
    found.map(|(_, value)| decode(value)).collect()
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'+' => bytes.push(b' '),
            b'%' => {
                let digits = [rest.next().unwrap(), rest.next().unwrap()];
                let digits = std::str::from_utf8(&digits).unwrap().to_owned();
                bytes.push(u8::from_str_radix(&digits, 16).unwrap());
            }
            byte => bytes.push(byte),
        }
    }
    String::from_utf8(bytes).unwrap()
}

fn reply(code: u16, body: &Value) -> Response {
    let code = StatusCode::from_u16(code).unwrap();
    (
        [(header::CONTENT_TYPE, "application/json")],
        body.to_string(),
    )
        .into_response()
        .with(code)
}

trait With {
    fn with(self, code: StatusCode) -> Self;
}

impl With for Response {
    fn with(mut self, code: StatusCode) -> Self {
        *self.status_mut() = code;
        self
    }
}

fn refuse(refusal: &Value) -> Response {
    let code = refusal["code"]
        .as_u64()
        .and_then(|code| u16::try_from(code).ok());
    reply(code.unwrap_or(500), refusal)
}

async fn answer(State(cluster): State<Arc<Cluster>>, request: Request) -> Response {
    let (mut parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let query = parts.uri.query().unwrap_or_default().to_owned();
    let method = parts.method.clone();
    cluster
        .requests
        .lock()
        .unwrap()
        .push(format!("{method} {path}?{query}"));
    let shown = parts.headers.get(header::AUTHORIZATION);
    let shown = shown.map(|value| value.to_str().unwrap());
    if let Some(token) = cluster.token
        && shown != Some(&format!("Bearer {token}"))
    {
        return refuse(&status(401, "Unauthorized", "Unauthorized", None));
    }
    if let Some(code) = fault(&cluster, &method, &path, &query) {
        let (reason, message) = match code {
            429 => ("TooManyRequests", "storage is (re)initializing"),
            410 => ("Expired", "too old resource version: 1 (330)"),
            _ => ("InternalError", "an error on the server"),
        };
        let details = (code == 429).then(|| json!({ "retryAfterSeconds": 1 }));
        return refuse(&status(code, reason, message, details));
    }
    if let Some(listed) = discovery(&cluster, &path) {
        return listed;
    }
    let Some(target) = target(&path) else {
        return refuse(&status(
            404,
            "NotFound",
            "the server could not find the requested resource",
            None,
        ));
    };
    if let (Some("exec"), Some(name)) = (target.below.as_deref(), &target.name) {
        if cluster.store().get(&POD, name).is_none() {
            return refuse(&not_found(&POD, name));
        }
        let upgrade = match WebSocketUpgrade::from_request_parts(&mut parts, &()).await {
            Ok(upgrade) => upgrade,
            Err(rejection) => return rejection.into_response(),
        };
        let program = exec::Program {
            pod: name.clone(),
            argv: parameters(&query, "command"),
            has_input: parameters(&query, "stdin") == ["true"],
        };
        return upgrade
            .protocols(["v5.channel.k8s.io"])
            .on_upgrade(move |socket| exec::serve(cluster, socket, program));
    }
    if let (Some("log"), Some(name)) = (target.below.as_deref(), &target.name) {
        return match cluster.logs.lock().unwrap().get(name) {
            Some(log) => log.clone().into_response(),
            None => refuse(&not_found(&POD, name)),
        };
    }
    let body = axum::body::to_bytes(body, 4 << 20).await.unwrap();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    if target.kind == REVIEW {
        return reply(201, &review(&cluster, body));
    }
    match (&method, target.name.as_deref()) {
        (&Method::GET, None) if parameters(&query, "watch") == ["true"] => {
            watch_kind(&cluster, target.kind, &query)
        }
        (&Method::GET, None) => list(&cluster, &target.kind, &query),
        (&Method::GET, Some(name)) => match cluster.store().get(&target.kind, name) {
            Some(object) => reply(200, object),
            None => refuse(&not_found(&target.kind, name)),
        },
        (&Method::POST, None) => match cluster.store().create(&target.kind, body) {
            Ok(object) => reply(201, &object),
            Err(refusal) => refuse(&refusal),
        },
        (&Method::PATCH, Some(name)) => {
            let content = parts
                .headers
                .get(header::CONTENT_TYPE)
                .map(|value| value.to_str().unwrap());
            patch(
                &cluster,
                &target,
                name,
                content.unwrap_or_default(),
                &query,
                &body,
            )
        }
        (&Method::DELETE, Some(name)) => match cluster.store().delete(&target.kind, name) {
            Ok(done) => reply(200, &done),
            Err(refusal) => refuse(&refusal),
        },
        _ => refuse(&status(
            405,
            "MethodNotAllowed",
            "the server does not allow this method",
            None,
        )),
    }
}

fn fault(cluster: &Cluster, method: &Method, path: &str, query: &str) -> Option<u16> {
    let mut faults = cluster.faults.lock().unwrap();
    let asked = format!("{path}?{query}");
    let fault = faults
        .iter_mut()
        .find(|fault| fault.times > 0 && fault.method == *method && asked.contains(fault.path))?;
    fault.times -= 1;
    Some(fault.code)
}

fn discovery(cluster: &Cluster, path: &str) -> Option<Response> {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let group_version = match parts.as_slice() {
        ["api", version] => (*version).to_owned(),
        ["apis", group, version] => format!("{group}/{version}"),
        ["version"] => return Some(reply(200, &json!({ "major": "1", "minor": "36" }))),
        _ => return None,
    };
    let missing = cluster.missing.lock().unwrap();
    let resources: Vec<Value> = KINDS
        .iter()
        .filter(|kind| kind.group_version == group_version && !missing.contains(&kind.group()))
        .map(|kind| {
            json!({ "name": kind.plural, "singularName": "", "namespaced": true, "kind": kind.kind, "verbs": [
                "create", "delete", "get", "list", "patch", "watch",
            ] })
        })
        .collect();
    Some(match resources.is_empty() {
        true => refuse(&status(
            404,
            "NotFound",
            "the server could not find the requested resource",
            None,
        )),
        false => reply(
            200,
            &json!({
                "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version,
                "resources": resources,
            }),
        ),
    })
}

fn review(cluster: &Cluster, mut body: Value) -> Value {
    let attributes = &body["spec"]["resourceAttributes"];
    let mut resource = attributes["resource"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    if let Some(below) = attributes["subresource"].as_str() {
        resource = format!("{resource}/{below}");
    }
    let verb = attributes["verb"].as_str().unwrap_or_default();
    let is_denied = cluster
        .denied
        .lock()
        .unwrap()
        .contains(&(verb_of(verb), resource_of(&resource)));
    body["status"] = json!({ "allowed": !is_denied });
    body
}

fn verb_of(verb: &str) -> &'static str {
    let verbs = ["create", "delete", "get", "list", "patch", "watch"];
    verbs
        .iter()
        .find(|known| **known == verb)
        .copied()
        .unwrap_or("")
}

fn resource_of(resource: &str) -> &'static str {
    if let Some(known) = ["pods/exec", "pods/log"]
        .into_iter()
        .find(|known| *known == resource)
    {
        return known;
    }
    let plurals = KINDS.map(|kind| kind.plural);
    plurals
        .into_iter()
        .find(|known| *known == resource)
        .unwrap_or("")
}

fn list(cluster: &Cluster, kind: &Kind, query: &str) -> Response {
    let selector = parameters(query, "labelSelector").concat();
    let store = cluster.store();
    let objects = store.list(kind);
    let mut objects: Vec<Value> = objects
        .into_iter()
        .filter(|object| is_selected(object, &selector))
        .collect();
    let first: usize = parameters(query, "continue").concat().parse().unwrap_or(0);
    objects.drain(..first.min(objects.len()));
    let limit: usize = parameters(query, "limit")
        .concat()
        .parse()
        .unwrap_or(usize::MAX);
    let mut metadata = json!({ "resourceVersion": store.version().to_string() });
    if objects.len() > limit {
        metadata["continue"] = (first + limit).to_string().into();
        metadata["remainingItemCount"] = (objects.len() - limit).into();
        objects.truncate(limit);
    }
    reply(
        200,
        &json!({
            "apiVersion": kind.group_version, "items": objects, "kind": format!("{}List", kind.kind),
            "metadata": metadata,
        }),
    )
}

fn patch(
    cluster: &Cluster,
    target: &Target,
    name: &str,
    content: &str,
    query: &str,
    body: &Value,
) -> Response {
    let mut store = cluster.store();
    let done = match content {
        "application/apply-patch+yaml" => {
            let manager = parameters(query, "fieldManager").concat();
            let force = parameters(query, "force") == ["true"];
            store.apply(&target.kind, name, &manager, force, body)
        }
        _ => {
            let part = match target.below.as_deref() {
                Some("status") => json!({ "status": body["status"] }),
                _ => body.clone(),
            };
            let changed = store.update(&target.kind, name, |object| merge(object, &part, false));
            changed
                .map(|object| (false, object))
                .ok_or_else(|| not_found(&target.kind, name))
        }
    };
    match done {
        Ok((true, object)) => reply(201, &object),
        Ok((false, object)) => reply(200, &object),
        Err(refusal) => refuse(&refusal),
    }
}

fn watch_kind(cluster: &Arc<Cluster>, kind: Kind, query: &str) -> Response {
    let selector = parameters(query, "labelSelector").concat();
    let from: u64 = parameters(query, "resourceVersion")
        .concat()
        .parse()
        .unwrap_or(0);
    let seconds: u64 = parameters(query, "timeoutSeconds")
        .concat()
        .parse()
        .unwrap_or(300);
    let until = tokio::time::Instant::now() + Duration::from_secs(seconds);
    let cuts = cluster.cuts.subscribe();
    let changes = cluster.store().changes();
    let cluster = Arc::clone(cluster);
    let first = (from, changes, cuts, false);
    let events = stream::unfold(first, move |(from, mut changes, mut cuts, is_over)| {
        let (cluster, kind, selector) = (Arc::clone(&cluster), kind.clone(), selector.clone());
        async move {
            if is_over {
                return None;
            }
            loop {
                changes.mark_unchanged();
                let (found, now) = {
                    let store = cluster.store();
                    (store.events_after(&kind, from), store.version())
                };
                let Some(found) = found else {
                    let message = format!("too old resource version: {from} ({now})");
                    let line = json!({ "type": "ERROR", "object": status(410, "Expired", &message, None) });
                    return Some((
                        Ok(Bytes::from(format!("{line}\n"))),
                        (from, changes, cuts, true),
                    ));
                };
                let mut lines = String::new();
                for event in found
                    .iter()
                    .filter(|event| is_selected(&event.object, &selector))
                {
                    let line = json!({ "type": event.what, "object": event.object });
                    writeln!(lines, "{line}").unwrap();
                }
                if !lines.is_empty() {
                    // That others have changed something is worth a bookmark.
                    let mark = json!({ "type": "BOOKMARK", "object": {
                        "apiVersion": kind.group_version, "kind": kind.kind,
                        "metadata": { "resourceVersion": now.to_string() },
                    } });
                    writeln!(lines, "{mark}").unwrap();
                    return Some((Ok(Bytes::from(lines)), (now, changes, cuts, false)));
                }
                tokio::select! {
                    _ = changes.changed() => {}
                    _ = cuts.changed() => {
                        let cut = std::io::Error::other("cut");
                        return Some((Err(cut), (now, changes, cuts, true)));
                    }
                    () = tokio::time::sleep_until(until) => return None,
                }
            }
        }
    });
    let mut response = Response::new(Body::from_stream(events));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/json"),
    );
    response
}
