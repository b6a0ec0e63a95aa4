//! An actor that is reached through the server inside it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};

use super::link::{Answered, Asked, Endpoint, Fault, escaped, value};
use super::server::archive_size;
use super::token::BearerToken;
use super::wire::{
    CLAIM, Claim, Claimed, Exec, MAX_LINE, MAX_WAIT, PROTOCOL, Reason, Refusal, TURN, framed,
    millis, read_output,
};
use crate::actor::background::Background;
use crate::actor::{
    Actor, ActorCommand, ActorError, ActorOutput, ActorSnapshot, ActorSpec, Ending, FileTree,
    TreeLimits, User, transfer,
};
use crate::causes::with_causes;
use crate::http::tls::TlsFiles;
use crate::http::uuid4;
use crate::process;

/// How much longer than the server waits an answer is waited for.
const SLACK: Duration = Duration::from_secs(20);
/// How long a tree may take to be carried and written.
const TREE: Duration = Duration::from_secs(150);
/// How long a server may take to end what runs over its time.
const ENDING: Duration = Duration::from_secs(10);
/// How long a claim may take to be given back.
const RELEASE: Duration = Duration::from_secs(6);
/// The largest answer that is neither output nor a tree.
const MAX_ANSWER: usize = 64 << 10;

/// Where a server is, and how it is spoken to.
#[derive(Debug, Clone)]
pub struct SandboxdOptions {
    /// Its address: `http://HOST:PORT` or `https://HOST`, with a path where it is below one.
    pub url: String,
    /// The token that it was started with.
    pub token: BearerToken,
    /// Headers of every request, besides: what a router needs to find it.
    pub headers: Vec<(String, String)>,
    /// Whom an `https://` address must be of, and what is shown to it. The files are read again as they
    /// change.
    pub tls: TlsFiles,
    /// How long a connection may take. Default: 5 s.
    pub connect_timeout: Duration,
    /// How long a request that gets no answer is tried again. Default: 30 s.
    pub patience: Duration,
    /// How long a server may take to answer for the first time. Default: 60 s.
    pub ready_timeout: Duration,
}

impl SandboxdOptions {
    /// Returns options with the defaults.
    #[must_use]
    pub fn new(url: impl Into<String>, token: BearerToken) -> Self {
        Self {
            url: url.into(),
            token,
            headers: Vec::new(),
            tls: TlsFiles::default(),
            connect_timeout: Duration::from_secs(5),
            patience: Duration::from_secs(30),
            ready_timeout: Duration::from_secs(60),
        }
    }
}

/// An actor somewhere else, by the server inside it. Dropped, its processes are ended and the server is free
/// for another; what it runs in is its owner's to end.
#[derive(Debug)]
pub struct SandboxdActor {
    backend: &'static str,
    id: String,
    spec: ActorSpec,
    endpoint: Arc<Endpoint>,
    background: Arc<Background>,
    patience: Duration,
    claim: HeaderValue,
    until: Instant,
    /// Held while something is asked.
    turns: Mutex<Turns>,
    is_released: AtomicBool,
}

#[derive(Debug, Default)]
struct Turns {
    last: u64,
    /// Why nothing can be asked any more: it is not known what was done of the last request, or what was
    /// there is gone.
    lost: Option<String>,
}

/// What takes a turn.
struct Request {
    activity: &'static str,
    method: Method,
    target: String,
    body: Vec<u8>,
    /// The largest answer.
    most: usize,
    /// How long one try may take, and all of it.
    limits: (Duration, Duration),
}

impl SandboxdActor {
    /// Claims a server, once it answers, and makes the folders of `spec`. Its root filesystem is whatever the
    /// server runs in, and limits but for the lifetime are whatever is set there.
    ///
    /// # Errors
    ///
    /// Fails where the spec has folders of this machine to show, the address cannot be used, and the server
    /// does not answer or refuses.
    pub fn connect(options: &SandboxdOptions, spec: &ActorSpec) -> Result<Self, ActorError> {
        let background = Arc::new(Background::start()?);
        let id = options.url.clone();
        Self::connect_on(super::NAME, id, background, options, spec)
    }

    /// As [`Self::connect`], for a backend that has threads for it.
    pub(in crate::actor) fn connect_on(
        backend: &'static str,
        id: String,
        background: Arc<Background>,
        options: &SandboxdOptions,
        spec: &ActorSpec,
    ) -> Result<Self, ActorError> {
        spec.check()?;
        if !spec.mounts.is_empty() {
            return Err(ActorError::Unsupported {
                backend,
                ability: "show folders of this machine; put them into its image, or use `put`",
            });
        }
        let invalid = |reason: String| ActorError::InvalidSpec { reason };
        let mut headers = HeaderMap::new();
        for (name, value) in &options.headers {
            let known = HeaderName::try_from(name).ok();
            let value = HeaderValue::try_from(value).ok();
            let (name, value) = known
                .zip(value)
                .ok_or_else(|| invalid(format!("the header `{name}` cannot be sent")))?;
            headers.insert(name, value);
        }
        headers.insert(header::AUTHORIZATION, options.token.header());
        let endpoint = Endpoint::new(&options.url, &options.tls, headers, options.connect_timeout);
        let claim = uuid4();
        let actor = Self {
            backend,
            id,
            spec: spec.clone(),
            endpoint: Arc::new(endpoint.map_err(invalid)?),
            background,
            patience: options.patience,
            claim: value(&claim).map_err(|fault| failed("claiming a server", &fault))?,
            until: process::deadline(spec.limits.lifetime),
            turns: Mutex::default(),
            // Nothing is claimed yet.
            is_released: AtomicBool::new(true),
        };
        actor.claim(claim, options.ready_timeout)?;
        actor.is_released.store(false, Ordering::Relaxed);
        for folder in spec.writable.iter().chain([&spec.workdir]) {
            actor.put(folder, &FileTree::new())?;
        }
        Ok(actor)
    }

    fn claim(&self, claim: String, limit: Duration) -> Result<(), ActorError> {
        const ACTIVITY: &str = "claiming a server";
        let body = serde_json::to_vec(&Claim { claim }).map_err(|error| ActorError::Backend {
            activity: ACTIVITY.to_owned(),
            message: error.to_string(),
        })?;
        let asked = Asked {
            method: Method::POST,
            target: "/v1/claim".to_owned(),
            headers: HeaderMap::new(),
            body: body.into(),
            most: MAX_ANSWER,
            limit: SLACK,
        };
        let endpoint = Arc::clone(&self.endpoint);
        let asking = endpoint.ask_patiently(asked, process::deadline(limit));
        let answered = (self.background)
            .run(ACTIVITY, limit + SLACK, asking)?
            .map_err(|fault| failed(ACTIVITY, &fault))?;
        if answered.status != StatusCode::OK {
            return Err(self.refused(ACTIVITY, None, &answered));
        }
        let claimed: Option<Claimed> = serde_json::from_slice(&answered.body).ok();
        match claimed {
            Some(Claimed { protocol, .. }) if protocol == PROTOCOL => Ok(()),
            Some(Claimed { protocol, version }) => Err(ActorError::Unusable {
                backend: self.backend,
                reason: format!(
                    "has a server of version {version} that speaks {protocol}, not {PROTOCOL}; take the \
                     same version on both sides"
                ),
            }),
            None => Err(nonsense(ACTIVITY)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn headers(&self, turn: u64) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(CLAIM, self.claim.clone());
        headers.insert(TURN, HeaderValue::from(turn));
        headers
    }

    /// Has a request done in the next turn, once, and returns how that ended.
    fn take_turn(&self, turns: &mut Turns, request: Request) -> Result<Answered, ActorError> {
        let Request {
            activity,
            method,
            target,
            body,
            most,
            limits: (limit, whole),
        } = request;
        if let Some(lost) = &turns.lost {
            return Err(ActorError::Backend {
                activity: activity.to_owned(),
                message: lost.clone(),
            });
        }
        let headers = self.headers(turns.last + 1);
        let asked = Asked {
            method,
            target,
            headers: headers.clone(),
            body: Bytes::from(body),
            most,
            limit,
        };
        let later = Asked {
            method: Method::GET,
            target: "/v1/turn".to_owned(),
            headers,
            body: Bytes::new(),
            most,
            limit: MAX_WAIT + SLACK,
        };
        let (endpoint, patience) = (Arc::clone(&self.endpoint), self.patience);
        let until = process::deadline(whole + 2 * patience);
        let done = async move {
            let first = Arc::clone(&endpoint);
            let mut answered = first
                .ask_patiently(asked, Instant::now() + patience)
                .await?;
            while is_under_way(&answered) {
                if Instant::now() >= until {
                    return Err(Fault::Late { limit: whole });
                }
                answered = Arc::clone(&endpoint)
                    .ask_patiently(later.clone(), Instant::now() + patience)
                    .await?;
            }
            Ok(answered)
        };
        let all = whole + 2 * patience + 2 * (limit + MAX_WAIT + SLACK);
        let result = match self.background.run_while_open(activity, all, done) {
            Ok(Ok(answered)) => Ok(answered),
            Ok(Err(fault)) => Err(failed(activity, &fault)),
            Err(error) => Err(error),
        };
        match &result {
            Ok(_) => turns.last += 1,
            Err(_) => {
                turns.lost = Some("what was done of an earlier request is not known".to_owned());
            }
        }
        result
    }

    /// Returns the error of a server's refusal; `path` is what was asked for.
    fn refused(&self, activity: &str, path: Option<&Path>, answered: &Answered) -> ActorError {
        let backend = self.backend;
        let Some(Refusal {
            error,
            message,
            limit,
        }) = refusal(answered)
        else {
            return ActorError::Backend {
                activity: activity.to_owned(),
                message: format!("its server answered with status {}", answered.status),
            };
        };
        let path = path.unwrap_or_else(|| Path::new("/")).to_owned();
        let too_large = |unit| ActorError::TreeTooLarge {
            limit: limit.unwrap_or_default(),
            unit,
        };
        match error {
            Reason::Token => ActorError::Unusable {
                backend,
                reason: "has a server that was started with another token; give that one"
                    .to_owned(),
            },
            Reason::Invalid => ActorError::InvalidSpec { reason: message },
            Reason::Unsupported => ActorError::Unsupported {
                backend,
                ability: "run commands as another user than its server; start that as root",
            },
            Reason::Broken => ActorError::Ended {
                id: self.id.clone(),
                reason: message,
            },
            Reason::Unreadable => ActorError::Unreadable { path, message },
            Reason::Unwritable => ActorError::Unwritable { path, message },
            Reason::TooManyBytes => too_large("bytes"),
            Reason::TooManyEntries => too_large("entries"),
            Reason::Hostile => ActorError::HostileTree { reason: message },
            Reason::Lost => ActorError::Backend {
                activity: activity.to_owned(),
                message: "its server was started anew or put back; what was there is lost"
                    .to_owned(),
            },
            Reason::Taken | Reason::Busy => ActorError::Backend {
                activity: activity.to_owned(),
                message,
            },
        }
    }

    /// Gives the server back, once.
    fn release(&self) -> Result<(), ActorError> {
        const ACTIVITY: &str = "giving a server back";
        if self.is_released.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let asked = Asked {
            method: Method::POST,
            target: "/v1/release".to_owned(),
            headers: self.headers(self.lock().last),
            body: Bytes::new(),
            most: MAX_ANSWER,
            limit: RELEASE,
        };
        let endpoint = Arc::clone(&self.endpoint);
        let asking = async move { endpoint.ask(&asked).await };
        let answered = self.background.run(ACTIVITY, RELEASE, asking)?;
        let answered = answered.map_err(|fault| failed(ACTIVITY, &fault))?;
        match answered.status {
            StatusCode::NO_CONTENT => Ok(()),
            _ => Err(self.refused(ACTIVITY, None, &answered)),
        }
    }

    /// Does something while no request is under way.
    #[cfg(feature = "k8s")]
    pub(in crate::actor) fn at_rest<T>(&self, job: impl FnOnce() -> T) -> T {
        let _turns = self.lock();
        job()
    }

    /// Whether there is no server any more, as far as what lies in between says for as long as `limit`.
    #[cfg(feature = "k8s")]
    pub(in crate::actor) fn is_gone(&self, limit: Duration) -> bool {
        let asked = Asked {
            method: Method::GET,
            target: "/healthz".to_owned(),
            headers: HeaderMap::new(),
            body: Bytes::new(),
            most: MAX_ANSWER,
            limit: SLACK,
        };
        let asking = Arc::clone(&self.endpoint).ask_patiently(asked, Instant::now() + limit);
        let answered = (self.background).run("looking for a server", limit + SLACK, asking);
        let is_away = |fault: &Fault| {
            matches!(
                fault,
                Fault::Foreign {
                    status: 502..=504,
                    ..
                }
            )
        };
        matches!(answered, Ok(Err(fault)) if is_away(&fault))
    }

    /// Has it released by nobody: what it runs in is ended.
    #[cfg(feature = "k8s")]
    pub(in crate::actor) fn forget(&self) {
        self.is_released.store(true, Ordering::Relaxed);
    }
}

/// Whether an answer is that a turn goes on, or that a request was there before and its answer went missing.
fn is_under_way(answered: &Answered) -> bool {
    answered.status == StatusCode::ACCEPTED
        || refusal(answered).is_some_and(|refusal| refusal.error == Reason::Taken)
}

fn refusal(answered: &Answered) -> Option<Refusal> {
    let is_refusal = answered.status.is_client_error() || answered.status.is_server_error();
    is_refusal
        .then(|| serde_json::from_slice(&answered.body).ok())
        .flatten()
}

fn failed(activity: &str, fault: &Fault) -> ActorError {
    ActorError::Backend {
        activity: activity.to_owned(),
        message: with_causes(fault),
    }
}

fn nonsense(activity: &str) -> ActorError {
    ActorError::Backend {
        activity: activity.to_owned(),
        message: "the answer makes no sense".to_owned(),
    }
}

fn text(path: &Path) -> Result<&str, ActorError> {
    path.to_str().ok_or_else(|| ActorError::InvalidSpec {
        reason: format!("`{}` is not UTF-8", path.display()),
    })
}

impl Actor for SandboxdActor {
    fn id(&self) -> &str {
        &self.id
    }

    fn spec(&self) -> &ActorSpec {
        &self.spec
    }

    fn exec(&self, command: &ActorCommand) -> Result<ActorOutput, ActorError> {
        const ACTIVITY: &str = "running a command";
        transfer::check(command)?;
        let User { uid, gid } = command.user.unwrap_or(self.spec.user);
        let lifetime = self.spec.limits.lifetime;
        let mut turns = self.lock();
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(ActorOutput::of(Ending::TimedOut { limit: lifetime }));
        }
        let timeout = command.timeout.min(left);
        let cwd = command.cwd.as_deref().unwrap_or(&self.spec.workdir);
        let exec = Exec {
            argv: command.argv.clone(),
            env: self.spec.variables(User { uid, gid }, &command.env),
            cwd: text(cwd)?.to_owned(),
            uid,
            gid,
            timeout_ms: millis(timeout),
            max_output: command.max_output,
            stdin: command.stdin.len(),
        };
        let body = framed(&exec, &[&command.stdin]).map_err(|error| ActorError::InvalidSpec {
            reason: format!("the command is no JSON: {error}"),
        })?;
        if body.len() - command.stdin.len() > MAX_LINE {
            return Err(ActorError::InvalidSpec {
                reason: format!("the command has more than {MAX_LINE} bytes besides its input"),
            });
        }
        let answered = self.take_turn(
            &mut turns,
            Request {
                activity: ACTIVITY,
                method: Method::POST,
                target: "/v1/exec".to_owned(),
                body,
                most: command
                    .max_output
                    .saturating_mul(2)
                    .saturating_add(MAX_ANSWER),
                limits: (sending(command.stdin.len()), timeout.saturating_add(ENDING)),
            },
        )?;
        if answered.status == StatusCode::OK {
            let limit = command.timeout.min(lifetime);
            return read_output(&answered.body, limit, command.max_output)
                .ok_or_else(|| nonsense(ACTIVITY));
        }
        match self.refused(ACTIVITY, None, &answered) {
            ActorError::Ended { reason, .. } => Ok(ActorOutput::of(Ending::Killed { reason })),
            error => Err(lose(&mut turns, error)),
        }
    }

    fn put(&self, folder: &Path, tree: &FileTree) -> Result<(), ActorError> {
        const ACTIVITY: &str = "putting a tree";
        let User { uid, gid } = self.spec.user;
        let path = escaped(text(folder)?);
        let mut turns = self.lock();
        let answered = self.take_turn(
            &mut turns,
            Request {
                activity: ACTIVITY,
                method: Method::PUT,
                target: format!("/v1/tree?path={path}&uid={uid}&gid={gid}"),
                body: tree.to_tar(self.spec.user),
                most: MAX_ANSWER,
                limits: (TREE, TREE),
            },
        )?;
        match answered.status {
            StatusCode::NO_CONTENT => Ok(()),
            _ => {
                let error = self.refused(ACTIVITY, Some(folder), &answered);
                Err(lose(&mut turns, error))
            }
        }
    }

    fn get(&self, path: &Path, limits: TreeLimits) -> Result<FileTree, ActorError> {
        const ACTIVITY: &str = "getting a tree";
        let target = format!(
            "/v1/tree?path={}&bytes={}&entries={}",
            escaped(text(path)?),
            limits.bytes,
            limits.entries
        );
        let turns = self.lock();
        let asked = Asked {
            method: Method::GET,
            target,
            headers: self.headers(turns.last),
            body: Bytes::new(),
            most: archive_size(limits),
            limit: TREE,
        };
        let endpoint = Arc::clone(&self.endpoint);
        let asking = endpoint.ask_patiently(asked, Instant::now() + self.patience);
        let answered = (self.background)
            .run(ACTIVITY, TREE + self.patience, asking)?
            .map_err(|fault| failed(ACTIVITY, &fault))?;
        drop(turns);
        match answered.status {
            StatusCode::OK => FileTree::from_tar(&answered.body, Path::new(""), limits),
            _ => Err(self.refused(ACTIVITY, Some(path), &answered)),
        }
    }

    fn snapshot(&self) -> Result<Arc<dyn ActorSnapshot>, ActorError> {
        Err(ActorError::Unsupported {
            backend: self.backend,
            ability: "keep an actor: a server inside it cannot",
        })
    }

    fn logs(&self) -> String {
        String::new()
    }

    fn destroy(self: Box<Self>) -> Result<(), ActorError> {
        self.release()
    }
}

/// Returns how long a try may take to send so many bytes of input, and to be told that the command runs.
fn sending(bytes: usize) -> Duration {
    const SECOND: usize = 1 << 20;
    let seconds = u64::try_from(bytes / SECOND).unwrap_or(u64::MAX);
    (MAX_WAIT + SLACK).saturating_add(Duration::from_secs(seconds))
}

/// Remembers that nothing can be asked any more, where that is so.
fn lose(turns: &mut Turns, error: ActorError) -> ActorError {
    if let ActorError::Backend { message, .. } = &error {
        turns.lost = Some(message.clone());
    }
    error
}

impl Drop for SandboxdActor {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            tracing::debug!(error = with_causes(&error), "a server was not given back");
        }
    }
}
