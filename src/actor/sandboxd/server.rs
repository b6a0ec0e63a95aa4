//! The server: who may use it, whose turn it is, and what is done then.

use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post, put};
use serde::Deserialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, Semaphore};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;

use super::files;
use super::machine::{Machine, MachineConfig};
use super::processes::{Processes, Program};
use super::token::BearerToken;
use super::wire::{
    CLAIM, Claim, Claimed, Exec, MAX_LINE, MAX_WAIT, PROTOCOL, Reason, Refusal, SERVER, TURN,
    output_frame, unframed,
};
use crate::actor::{ActorError, FileTree, TreeLimits, User};
use crate::http::{self, ApiKey, Listener};

/// How long the body of a request may take.
const SEND_WITHIN: Duration = Duration::from_secs(120);
/// Bodies that are read at a time.
const READ_AT_A_TIME: usize = 2;
/// How often children that ended are looked for where no signal says that there are any.
const BURY_EVERY: Duration = Duration::from_secs(1);
/// The longest name of a claim.
const MAX_CLAIM: usize = 128;
/// Time between looks at whether the machine has been taken back.
const RELEASE_POLL: Duration = Duration::from_millis(10);

/// The most that a server takes and gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerLimits {
    /// A tree, in or out.
    pub tree: TreeLimits,
    /// What is kept of a stream of a command, in bytes.
    pub max_output: usize,
    /// The input of a command, in bytes.
    pub max_stdin: usize,
}

impl Default for ServerLimits {
    /// Trees of 256 MiB in 100,000 entries, 64 MiB of a stream, 64 MiB of input.
    fn default() -> Self {
        Self {
            tree: TreeLimits::default(),
            max_output: 64 << 20,
            max_stdin: 64 << 20,
        }
    }
}

/// A server inside an actor. It is the only one of its process, which starts no children otherwise.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(super) struct Shared {
    key: ApiKey,
    pub(super) limits: ServerLimits,
    pub(super) processes: Processes,
    state: Mutex<Turns>,
    changed: Notify,
    bodies: Semaphore,
    /// Whether all processes are being ended: how a command ends then is not its doing.
    is_stopping: AtomicBool,
}

/// Whose turn it is.
#[derive(Debug, Default)]
struct Turns {
    claim: Option<String>,
    /// The number that was taken last.
    turn: u64,
    work: Work,
    /// Processes are left that cannot be ended.
    is_broken: bool,
    /// The machine is being taken back: what is started now would be killed with the rest.
    is_released: bool,
}

/// What became of the last turn.
#[derive(Debug, Default)]
enum Work {
    #[default]
    None,
    Running,
    Done(Answer),
}

/// An answer that can be given again.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    status: StatusCode,
    body: Bytes,
}

impl Answer {
    fn into_response(self) -> Response {
        (self.status, self.body).into_response()
    }
}

impl Server {
    /// Makes this process the one that looks after all below it.
    ///
    /// # Errors
    ///
    /// Fails where the system refuses that.
    pub fn new(token: &BearerToken, limits: ServerLimits) -> std::io::Result<Self> {
        let shared = Shared {
            key: ApiKey::new(token.text()),
            limits,
            processes: Processes::adopt()?,
            state: Mutex::default(),
            changed: Notify::new(),
            bodies: Semaphore::new(READ_AT_A_TIME),
            is_stopping: AtomicBool::new(false),
        };
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Returns the machine, for a protocol that is served beside this one's.
    ///
    /// # Errors
    ///
    /// Fails where `config` cannot be, and where the system has no thread left.
    pub fn machine(&self, config: MachineConfig) -> Result<Machine, ActorError> {
        Machine::new(Arc::clone(&self.shared), config)
    }

    /// Returns the token, for a protocol that is served beside this one's.
    #[must_use]
    pub fn api_key(&self) -> ApiKey {
        self.shared.key.clone()
    }

    /// Returns this server as a service, with the routes of `beside`; those answer for themselves who is let in.
    pub fn router(&self, beside: Router) -> Router {
        router(&self.shared)
            .merge(beside)
            .layer(middleware::map_response(sign))
    }

    /// Serves until `shutdown` is ready, gives what runs up to `grace`, and ends every process below.
    ///
    /// # Errors
    ///
    /// Fails where the system does not tell of children that end.
    pub async fn serve(
        self,
        listener: impl Into<Listener>,
        shutdown: impl Future<Output = ()> + Send + 'static,
        grace: Duration,
    ) -> std::io::Result<()> {
        let router = self.router(Router::new());
        self.look_after(http::serve(listener, router, shutdown, grace))
            .await
    }

    /// Looks after processes while somebody serves the [`Self::router`], and ends every one below when that is
    /// over.
    ///
    /// # Errors
    ///
    /// Fails where the system does not tell of children that end.
    pub async fn look_after(self, serving: impl Future<Output = ()>) -> std::io::Result<()> {
        let undertaker = undertaker(Arc::clone(&self.shared))?;
        serving.await;
        let shared = self.shared;
        shared.is_stopping.store(true, Ordering::SeqCst);
        let _ = spawn_blocking(move || shared.processes.kill_all()).await;
        undertaker.abort();
        Ok(())
    }
}

/// Buries children as they end.
fn undertaker(shared: Arc<Shared>) -> std::io::Result<JoinHandle<()>> {
    let mut ended = signal(SignalKind::child())?;
    Ok(tokio::spawn(async move {
        loop {
            // Signals of a kind become one, and what is missed is found a moment later.
            let _ = timeout(BURY_EVERY, ended.recv()).await;
            shared.processes.bury();
        }
    }))
}

fn router(shared: &Arc<Shared>) -> Router {
    let asked = Router::new()
        .route("/v1/claim", post(claim))
        .route("/v1/exec", post(exec))
        .route("/v1/turn", get(turn))
        .route("/v1/tree", put(put_tree).get(get_tree))
        .route("/v1/release", post(release))
        .layer(middleware::from_fn_with_state(Arc::clone(shared), let_in));
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .merge(asked)
        .with_state(Arc::clone(shared))
}

async fn sign(mut response: Response) -> Response {
    let version = HeaderValue::from_static("1");
    response.headers_mut().insert(SERVER, version);
    response
}

async fn let_in(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    match shared.key.admits(request.headers()) {
        true => next.run(request).await,
        false => {
            let mut response =
                refusal(Reason::Token, "the token is missing or another").into_response();
            let challenge = HeaderValue::from_static("Bearer");
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, challenge);
            response
        }
    }
}

async fn ready(State(shared): State<Arc<Shared>>) -> Response {
    match shared.lock().is_broken {
        true => (StatusCode::SERVICE_UNAVAILABLE, "broken\n").into_response(),
        false => "ready\n".into_response(),
    }
}

async fn claim(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    match shared.grant(request).await {
        Ok(answer) | Err(answer) => answer.into_response(),
    }
}

async fn exec(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    match shared.exec(request).await {
        Ok(response) => response,
        Err(answer) => answer.into_response(),
    }
}

async fn turn(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    match Place::of(&headers) {
        Ok(place) => shared.wait(&place).await,
        Err(answer) => answer.into_response(),
    }
}

async fn put_tree(
    State(shared): State<Arc<Shared>>,
    Query(at): Query<PutQuery>,
    request: Request,
) -> Response {
    match shared.put(at, request).await {
        Ok(response) => response,
        Err(answer) => answer.into_response(),
    }
}

async fn get_tree(
    State(shared): State<Arc<Shared>>,
    Query(at): Query<GetQuery>,
    headers: HeaderMap,
) -> Response {
    match shared.get(at, &headers).await {
        Ok(answer) | Err(answer) => answer.into_response(),
    }
}

async fn release(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    match shared.release(&headers).await {
        Ok(answer) | Err(answer) => answer.into_response(),
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PutQuery {
    path: PathBuf,
    uid: u32,
    gid: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GetQuery {
    path: PathBuf,
    bytes: u64,
    entries: u64,
}

/// Where a request belongs.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) claim: String,
    pub(super) turn: u64,
}

/// Why a turn cannot be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Denied {
    Lost,
    Taken,
    Busy,
    Broken,
}

impl Denied {
    fn answer(self) -> Answer {
        match self {
            Self::Lost => lost(),
            Self::Taken => refusal(Reason::Taken, "this turn was taken"),
            Self::Busy => refusal(Reason::Busy, "the turn before is not over"),
            Self::Broken => refusal(Reason::Broken, BROKEN),
        }
    }
}

/// What is said of a machine that nobody can use any more.
pub(super) const BROKEN: &str = "processes are left that do not end";

impl Place {
    fn of(headers: &HeaderMap) -> Result<Self, Answer> {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let turn = text(TURN).and_then(|turn| turn.parse().ok());
        match text(CLAIM).map(str::to_owned).zip(turn) {
            Some((claim, turn)) => Ok(Self { claim, turn }),
            None => Err(refusal(
                Reason::Invalid,
                "a request needs a claim and a turn",
            )),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Turns> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn read(&self, body: Body, limit: usize) -> Result<Bytes, Answer> {
        let invalid = |message: &str| refusal(Reason::Invalid, message);
        let read = async {
            let _turn = self.bodies.acquire().await;
            to_bytes(body, limit).await
        };
        match timeout(SEND_WITHIN, read).await {
            Ok(Ok(bytes)) => Ok(bytes),
            Ok(Err(_)) => Err(invalid(&format!(
                "the body broke off, or is larger than {limit} bytes"
            ))),
            Err(_) => Err(invalid("the body did not come in time")),
        }
    }

    async fn grant(&self, request: Request) -> Result<Answer, Answer> {
        let body = self.read(request.into_body(), 4096).await?;
        let asked: Claim = serde_json::from_slice(&body)
            .map_err(|_| refusal(Reason::Invalid, "a claim is `{\"claim\": NAME}`"))?;
        let is_name = |name: &str| name.bytes().all(|byte| byte.is_ascii_graphic());
        if asked.claim.is_empty() || asked.claim.len() > MAX_CLAIM || !is_name(&asked.claim) {
            let message = format!("a claim is up to {MAX_CLAIM} printable characters");
            return Err(refusal(Reason::Invalid, &message));
        }
        // Soon over, and after it the machine is anybody's.
        while self.lock().is_released {
            tokio::time::sleep(RELEASE_POLL).await;
        }
        (self.claim(&asked.claim))
            .map_err(|_| refusal(Reason::Busy, "another claim has a turn"))?;
        json(
            StatusCode::OK,
            &Claimed {
                protocol: PROTOCOL,
                version: env!("CARGO_PKG_VERSION").to_owned(),
            },
        )
    }

    async fn exec(self: &Arc<Self>, request: Request) -> Result<Response, Answer> {
        let (head, body) = request.into_parts();
        let place = Place::of(&head.headers)?;
        let most = self.limits.max_stdin.saturating_add(MAX_LINE);
        let body = self.read(body, most).await?;
        let invalid = |message: &str| refusal(Reason::Invalid, message);
        let (asked, stdin) = unframed::<Exec>(&body)
            .filter(|(asked, stdin)| asked.stdin == stdin.len())
            .ok_or_else(|| invalid("it is no command with its input"))?;
        let user = User {
            uid: asked.uid,
            gid: asked.gid,
        };
        if asked.argv.first().is_none_or(String::is_empty) {
            return Err(invalid("a command needs a program"));
        }
        if asked.max_output > self.limits.max_output {
            let message = format!("at most {} bytes are kept", self.limits.max_output);
            return Err(invalid(&message));
        }
        if !Processes::can_be(user) {
            let message = "this server is not root, and runs commands as its own user alone";
            return Err(refusal(Reason::Unsupported, message));
        }
        let program = Program {
            argv: asked.argv,
            env: asked.env,
            cwd: absolute(Path::new(&asked.cwd))?,
            user,
            stdin: stdin.to_vec(),
            timeout: Duration::from_millis(asked.timeout_ms),
            max_output: asked.max_output,
        };
        drop(body);
        self.begin(&place, move |shared| {
            let (output, is_well) = shared.processes.run(&program);
            if !is_well {
                shared.lock().is_broken = true;
            }
            if shared.is_stopping.load(Ordering::SeqCst) {
                return internal("the server stops");
            }
            match output_frame(&output) {
                Ok(frame) => Answer {
                    status: StatusCode::OK,
                    body: frame.into(),
                },
                Err(error) => internal(&error.to_string()),
            }
        })?;
        Ok(self.wait(&place).await)
    }

    async fn put(self: &Arc<Self>, at: PutQuery, request: Request) -> Result<Response, Answer> {
        let (head, body) = request.into_parts();
        let place = Place::of(&head.headers)?;
        let folder = absolute(&at.path)?;
        let limits = self.limits.tree;
        let archive = self.read(body, archive_size(limits)).await?;
        let owner = User {
            uid: at.uid,
            gid: at.gid,
        };
        self.begin(&place, move |_| {
            let written = FileTree::from_tar(&archive, Path::new(""), limits)
                .and_then(|tree| files::write(&folder, &tree, owner));
            match written {
                Ok(()) => Answer {
                    status: StatusCode::NO_CONTENT,
                    body: Bytes::new(),
                },
                Err(error) => refused(&error),
            }
        })?;
        Ok(self.wait(&place).await)
    }

    async fn get(&self, at: GetQuery, headers: &HeaderMap) -> Result<Answer, Answer> {
        let place = Place::of(headers)?;
        self.check(&place)?;
        let path = absolute(&at.path)?;
        let most = self.limits.tree;
        let limits = TreeLimits {
            bytes: at.bytes.min(most.bytes),
            entries: at.entries.min(most.entries),
        };
        let read = spawn_blocking(move || {
            let tree = files::read(&path, limits)?;
            Ok(tree.to_tar(User::default()))
        });
        match read.await {
            Ok(Ok(archive)) => Ok(Answer {
                status: StatusCode::OK,
                body: archive.into(),
            }),
            Ok(Err(error)) => Err(refused(&error)),
            Err(error) => Err(internal(&error.to_string())),
        }
    }

    /// Ends what runs, and gives the claim back.
    async fn release(self: &Arc<Self>, headers: &HeaderMap) -> Result<Answer, Answer> {
        let place = Place::of(headers)?;
        {
            let mut turns = self.lock();
            if turns.claim.as_ref() != Some(&place.claim) {
                return Err(lost());
            }
            turns.claim = None;
            turns.is_released = true;
        }
        let shared = Arc::clone(self);
        // Whether or not somebody waits for the answer.
        let released = tokio::spawn(async move {
            let theirs = Arc::clone(&shared);
            let is_well = spawn_blocking(move || theirs.processes.kill_all()).await;
            let mut turns = shared.lock();
            turns.is_broken |= !is_well.unwrap_or(false);
            turns.is_released = false;
        });
        let _ = released.await;
        Ok(Answer {
            status: StatusCode::NO_CONTENT,
            body: Bytes::new(),
        })
    }

    /// Takes a turn, and does `job` in it.
    fn begin(
        self: &Arc<Self>,
        place: &Place,
        job: impl FnOnce(&Self) -> Answer + Send + 'static,
    ) -> Result<(), Answer> {
        self.take(place).map_err(Denied::answer)?;
        let shared = Arc::clone(self);
        tokio::spawn(async move {
            let theirs = Arc::clone(&shared);
            let done = spawn_blocking(move || job(&theirs)).await;
            let answer = done.unwrap_or_else(|error| internal(&error.to_string()));
            shared.finish(Work::Done(answer));
        });
        Ok(())
    }

    /// Takes a turn, which [`Self::finish`] ends.
    pub(super) fn take(&self, place: &Place) -> Result<(), Denied> {
        let mut turns = self.lock();
        if turns.claim.as_ref() != Some(&place.claim) {
            return Err(Denied::Lost);
        }
        if turns.turn == place.turn {
            return Err(Denied::Taken);
        }
        if turns.turn.checked_add(1) != Some(place.turn) {
            return Err(Denied::Lost);
        }
        if matches!(turns.work, Work::Running) {
            return Err(Denied::Busy);
        }
        if turns.is_broken {
            return Err(Denied::Broken);
        }
        turns.turn = place.turn;
        turns.work = Work::Running;
        Ok(())
    }

    fn finish(&self, work: Work) {
        self.lock().work = work;
        self.changed.notify_waiters();
    }

    /// Ends a turn that has no answer to give again.
    pub(super) fn end(&self, is_well: bool) {
        self.lock().is_broken |= !is_well;
        self.finish(Work::None);
    }

    /// Gives the machine to who asks, unless a turn of another's goes on.
    pub(super) fn claim(&self, claim: &str) -> Result<(), Denied> {
        let mut turns = self.lock();
        if turns.claim.as_deref() != Some(claim) {
            if turns.is_released || matches!(turns.work, Work::Running) {
                return Err(Denied::Busy);
            }
            turns.claim = Some(claim.to_owned());
            turns.turn = 0;
            turns.work = Work::None;
        }
        Ok(())
    }

    /// Takes the machine back, if it is still theirs.
    pub(super) fn give_back(&self, claim: &str) {
        let mut turns = self.lock();
        if turns.claim.as_deref() == Some(claim) {
            turns.claim = None;
        }
    }

    /// Returns how a turn ended, or that it has not, as of now or of a while later.
    async fn wait(&self, place: &Place) -> Response {
        let running = async {
            loop {
                let changed = self.changed.notified();
                {
                    let turns = self.lock();
                    if (turns.claim.as_ref(), turns.turn) != (Some(&place.claim), place.turn) {
                        return lost();
                    }
                    match &turns.work {
                        Work::Running => {}
                        Work::Done(answer) => return answer.clone(),
                        Work::None => return lost(),
                    }
                }
                changed.await;
            }
        };
        match timeout(MAX_WAIT, running).await {
            Ok(answer) => answer.into_response(),
            Err(_) => StatusCode::ACCEPTED.into_response(),
        }
    }

    /// Checks that nothing has happened since a turn.
    fn check(&self, place: &Place) -> Result<(), Answer> {
        let turns = self.lock();
        match (turns.claim.as_ref(), turns.turn) == (Some(&place.claim), place.turn) {
            true => Ok(()),
            false => Err(lost()),
        }
    }
}

/// Returns the largest archive of a tree.
pub(super) fn archive_size(limits: TreeLimits) -> usize {
    let most = limits
        .bytes
        .saturating_add(limits.entries.saturating_mul(2048))
        .saturating_add(64 << 10);
    usize::try_from(most).unwrap_or(usize::MAX)
}

pub(super) fn absolute(path: &Path) -> Result<PathBuf, Answer> {
    let is_plain = path
        .components()
        .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    match path.is_absolute() && is_plain {
        true => Ok(path.to_owned()),
        false => Err(refusal(
            Reason::Invalid,
            "a path must be absolute, without `..`",
        )),
    }
}

fn lost() -> Answer {
    refusal(
        Reason::Lost,
        "this server knows nothing of this claim and turn",
    )
}

fn internal(message: &str) -> Answer {
    tracing::error!(message, "a turn failed");
    Answer {
        status: StatusCode::INTERNAL_SERVER_ERROR,
        body: Bytes::new(),
    }
}

fn refusal(error: Reason, message: &str) -> Answer {
    refusal_at(error, message, None)
}

fn refusal_at(error: Reason, message: &str, limit: Option<u64>) -> Answer {
    let status = match error {
        Reason::Token => StatusCode::UNAUTHORIZED,
        Reason::Invalid => StatusCode::BAD_REQUEST,
        Reason::Unsupported => StatusCode::NOT_IMPLEMENTED,
        Reason::Lost | Reason::Taken | Reason::Busy => StatusCode::CONFLICT,
        Reason::Broken => StatusCode::GONE,
        Reason::TooManyBytes | Reason::TooManyEntries => StatusCode::PAYLOAD_TOO_LARGE,
        Reason::Unreadable | Reason::Unwritable | Reason::Hostile => {
            StatusCode::UNPROCESSABLE_ENTITY
        }
    };
    let refusal = Refusal {
        error,
        message: message.to_owned(),
        limit,
    };
    json(status, &refusal).unwrap_or_else(|answer| answer)
}

/// Returns what a client is told of a tree that was not written or read.
fn refused(error: &ActorError) -> Answer {
    match error {
        ActorError::Unreadable { message, .. } => refusal(Reason::Unreadable, message),
        ActorError::Unwritable { path, message } => refusal(
            Reason::Unwritable,
            &format!("{}: {message}", path.display()),
        ),
        ActorError::TreeTooLarge { limit, unit } => {
            let reason = match *unit {
                "entries" => Reason::TooManyEntries,
                _ => Reason::TooManyBytes,
            };
            refusal_at(reason, "the tree is too large", Some(*limit))
        }
        ActorError::HostileTree { reason } => refusal(Reason::Hostile, reason),
        error => internal(&error.to_string()),
    }
}

fn json(status: StatusCode, message: &impl serde::Serialize) -> Result<Answer, Answer> {
    match serde_json::to_vec(message) {
        Ok(body) => Ok(Answer {
            status,
            body: body.into(),
        }),
        Err(error) => Err(internal(&error.to_string())),
    }
}
