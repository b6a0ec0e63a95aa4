//! Environments over OpenEnv's protocol, version 0.10.
//!
//! A session is an environment behind a WebSocket (`/ws`): `reset`, `step`, `state`, one reply a
//! request. HTTP has the descriptions, stateless `reset` and `step`, JSON-RPC (`/mcp`), the task
//! routes, `/metrics`, `/health` and `/ready`. What is served is an [`Environment`].
//!
//! - **Slots.** A session takes one of [`ServerConfig::max_sessions`] slots, not an interpreter: that
//!   comes with its first step, and an idle one is put to rest as the pages it changed. The slot of
//!   a client that goes away is free at once, and what it was running ends.
//! - **Steps** run on threads of their own, short ones first (`steps`). A step ends by fuel, or by the
//!   deadline at the latest; its observation says so, and the next step says that the state was lost.
//! - **A fault of ours** is an error frame, never an observation.
//!
//! What differs from OpenEnv's own server is in `docs/openenv.md`.
//!
//! [`client`] is the other side: environments of other servers.

pub mod client;
mod coding;
mod gym;
mod interpreter;
mod metrics;
mod python;
mod routes;
mod rpc;
mod sessions;
mod shell;
mod socket;
mod steps;
mod tasks;
mod validate;
mod wire;

#[cfg(test)]
mod tests;

use std::fmt;
use std::num::NonZero;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};
use serde_json::{Map, Value, json};
use tokio::sync::{oneshot, watch};

#[cfg(any(fuzzing, test))]
pub use self::socket::fuzz_frame;
use crate::actor::sandboxd::Machine;
use crate::env::ToolEnvironmentConfig;
use crate::grader::Grader;
use crate::http::{
    self, ApiKey, Bodies, BodyError, Listener, Rate, RateLimit, is_cross_site, name_request,
    retry_after,
};
use crate::sandbox::{Cancel, Limits, Sandbox, SandboxError, WasmRuntime};
use crate::task::TaskSet;

use coding::CodingGym;
use gym::{Episode, Gym, Observation, StepError};
use interpreter::Source;
use metrics::Metrics;
use python::PythonGym;
use sessions::{Session, Sessions};
use shell::ShellGym;
use steps::{Steps, Weight};
use tasks::TaskGym;

/// How often idle sessions are looked at.
const KEEP_EVERY: Duration = Duration::from_secs(1);

/// How often a step that finds no interpreter asks another session for its own.
const MAX_PARKED_FOR_ONE: usize = 64;

/// What is served.
pub enum Environment {
    /// CPython whose state persists across the steps of an episode.
    Python {
        /// Where it runs.
        runtime: WasmRuntime,
        /// What a session may use; fuel and deadline are a step's.
        limits: Limits,
    },
    /// OpenEnv's `coding_env`, emulated.
    CodingEnv {
        /// Where it runs.
        runtime: WasmRuntime,
        /// What a session may use; fuel and deadline are a step's.
        limits: Limits,
    },
    /// Tasks with tools and a grader.
    Tasks {
        /// What routes call it.
        name: String,
        /// The tasks.
        tasks: TaskSet,
        /// Where tools run.
        sandbox: Arc<dyn Sandbox>,
        /// What scores submissions.
        grader: Arc<dyn Grader>,
        /// Turns, limits, rewards.
        config: Arc<ToolEnvironmentConfig>,
    },
    /// Commands of the machine that this runs in. It is one, so one session at a time can have it.
    Shell {
        /// The machine.
        machine: Machine,
    },
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Python { .. } => "Python",
            Self::CodingEnv { .. } => "CodingEnv",
            Self::Tasks { .. } => "Tasks",
            Self::Shell { .. } => "Shell",
        })
    }
}

/// Which routes there are, as OpenEnv names it. No mode isolates anything: sockets take the same frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// All of them.
    #[default]
    Simulation,
    /// All but `/reset`, `/step` and `/state`, which control an environment without a session.
    Production,
}

/// Settings of the server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Which routes there are. Default: all.
    pub mode: Mode,
    /// Sessions at a time, those of single requests among them; more are told `CAPACITY_REACHED`. Default:
    /// 4096.
    pub max_sessions: usize,
    /// What clients must send as `Authorization: Bearer`; `None` lets everybody in. Default: none.
    pub api_key: Option<ApiKey>,
    /// How often a client may ask, by its key or else by its address; `None` is no limit. Frames on a socket do
    /// not count, its opening does. Default: none.
    pub rate_limit: Option<Rate>,
    /// Largest message or body that is read. Default: 8 MiB.
    pub max_message_bytes: usize,
    /// Threads for short steps, and as many for long ones. Default: the number of cores.
    pub threads: usize,
    /// Steps that may run longer than expected at a time, beside those. Default: 64.
    pub max_running: usize,
    /// How long a session may be idle before its interpreter is put to rest. Default: 30 s.
    pub park_after: Duration,
    /// How long a session without a socket is kept. Default: 1 h.
    pub session_timeout: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            mode: Mode::Simulation,
            max_sessions: 4096,
            api_key: None,
            rate_limit: None,
            max_message_bytes: 8 << 20,
            threads: std::thread::available_parallelism().map_or(1, NonZero::get),
            max_running: 64,
            park_after: Duration::from_secs(30),
            session_timeout: Duration::from_hours(1),
        }
    }
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenEnvError {
    /// The environment's interpreter cannot be prepared.
    #[error("the environment's interpreter could not be prepared")]
    Sandbox(#[from] SandboxError),
    /// The threads for steps cannot be started.
    #[error("the threads for steps could not be started")]
    Threads(#[source] std::io::Error),
    /// There are no tasks.
    #[error("the task set `{name}` has no tasks")]
    NoTasks {
        /// Its name.
        name: String,
    },
}

/// What all requests share.
struct App {
    gym: Arc<dyn Gym>,
    config: ServerConfig,
    sessions: Sessions,
    steps: Steps,
    metrics: Metrics,
    bodies: Bodies,
    rate_limit: Option<RateLimit>,
    is_stopping: watch::Sender<bool>,
    /// How many sockets are open: no request of HTTP is, once its connection became one.
    sockets: watch::Sender<usize>,
}

/// A server of one environment.
pub struct Server {
    app: Arc<App>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("gym", &self.app.gym)
            .field("config", &self.app.config)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// Prepares what sessions start from.
    ///
    /// # Errors
    ///
    /// Fails where there are no tasks, or the interpreter or threads cannot be had.
    pub fn new(environment: Environment, config: ServerConfig) -> Result<Self, OpenEnvError> {
        let source = |runtime, limits| Source {
            runtime,
            limits: Arc::new(limits),
            template: None,
        };
        let gym: Arc<dyn Gym> = match environment {
            Environment::Python { runtime, limits } => {
                limits.validate()?;
                Arc::new(PythonGym {
                    source: source(runtime, limits),
                })
            }
            Environment::CodingEnv { runtime, limits } => {
                Arc::new(CodingGym::new(source(runtime, limits))?)
            }
            Environment::Tasks { name, tasks, .. } if tasks.tasks().is_empty() => {
                return Err(OpenEnvError::NoTasks { name });
            }
            Environment::Tasks {
                name,
                tasks,
                sandbox,
                grader,
                config,
            } => Arc::new(TaskGym::new(name, &tasks, sandbox, grader, config)),
            Environment::Shell { machine } => Arc::new(ShellGym::new(machine)),
        };
        let steps =
            Steps::start(config.threads, config.max_running).map_err(OpenEnvError::Threads)?;
        Ok(Self {
            app: Arc::new(App {
                gym,
                sessions: Sessions::new(config.max_sessions),
                steps,
                metrics: Metrics::default(),
                bodies: Bodies::new(config.max_message_bytes),
                rate_limit: config.rate_limit.map(RateLimit::new),
                is_stopping: watch::Sender::new(false),
                sockets: watch::Sender::new(0),
                config,
            }),
        })
    }

    /// Returns the name of what is served.
    #[must_use]
    pub fn name(&self) -> &str {
        self.app.gym.name()
    }

    /// Returns the server as a service.
    pub fn router(&self) -> Router {
        let app = &self.app;
        let guarded = Router::new()
            .route("/metadata", get(routes::metadata))
            .route("/schema", get(routes::schema))
            .route("/mcp", post(routes::mcp).get(routes::mcp_socket))
            .route("/ws", get(routes::frames))
            .route("/openapi.json", get(routes::openapi))
            .route("/sessions/{id}/fork", post(routes::fork))
            .route("/list_environments", get(routes::list_environments))
            .route("/{env_name}/splits", get(routes::splits))
            .route("/{env_name}/tasks", post(routes::list_tasks))
            .route("/{env_name}/num_tasks", post(routes::num_tasks))
            .route("/{env_name}/task", post(routes::one_task))
            .route("/{env_name}/task_range", post(routes::task_range));
        let guarded = match app.config.mode {
            Mode::Simulation => guarded
                .route("/state", get(routes::state))
                .route("/reset", post(routes::reset))
                .route("/step", post(routes::step)),
            Mode::Production => guarded,
        };
        let guarded = guarded
            .route_layer(middleware::from_fn_with_state(Arc::clone(app), read_body))
            .route_layer(middleware::from_fn_with_state(Arc::clone(app), authorize));
        guarded
            .route("/health", get(routes::health))
            .route("/ready", get(routes::ready))
            .route("/metrics", get(routes::metrics))
            .fallback(async || routes::detail(StatusCode::NOT_FOUND, "Not Found"))
            .method_not_allowed_fallback(async || {
                routes::detail(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
            })
            .layer(middleware::from_fn_with_state(Arc::clone(app), count))
            .layer(middleware::from_fn(name_request))
            .layer(DefaultBodyLimit::max(app.config.max_message_bytes))
            .with_state(Arc::clone(app))
    }

    /// Serves until `shutdown` is ready. Then idle sockets are closed at once, and those with a step
    /// under way after it, within `grace`.
    pub async fn serve(
        self,
        listener: impl Into<Listener>,
        shutdown: impl Future<Output = ()> + Send + 'static,
        grace: Duration,
    ) {
        let router = self.router();
        self.serve_as(router, listener, shutdown, grace).await;
    }

    /// As [`Self::serve`], by a service that has the routes of [`Self::router`] among others.
    pub async fn serve_as(
        self,
        router: Router,
        listener: impl Into<Listener>,
        shutdown: impl Future<Output = ()> + Send + 'static,
        grace: Duration,
    ) {
        let app = &self.app;
        let keeper = tokio::spawn(keep(Arc::clone(app)));
        let stopping = Arc::clone(app);
        let shutdown = async move {
            shutdown.await;
            stopping.is_stopping.send_replace(true);
        };
        let overdue = async {
            app.stopping().await;
            tokio::time::sleep(grace).await;
        };
        let mut sockets = app.sockets.subscribe();
        let served = async {
            http::serve(listener, router, shutdown, grace).await;
            // The sender is a part of `app`.
            let _ = sockets.wait_for(|open| *open == 0).await;
        };
        tokio::select! {
            () = served => {}
            () = overdue => {
                tracing::warn!(?grace, "steps were cut off at the end of the time to finish");
            }
        }
        keeper.abort();
    }
}

/// Looks after idle sessions.
async fn keep(app: Arc<App>) {
    let mut ticks = tokio::time::interval(KEEP_EVERY);
    loop {
        ticks.tick().await;
        app.metrics
            .count_reaped(app.sessions.reap(app.config.session_timeout));
        for session in app.sessions.idle_for(app.config.park_after) {
            let resting = Arc::clone(&app);
            app.steps.submit(Weight::Heavy, move || {
                let Some(mut episode) = session.idle_episode() else {
                    return;
                };
                match episode.park() {
                    Ok(true) => resting.metrics.count_parked(),
                    Ok(false) => {}
                    Err(error) => {
                        tracing::error!(error = %error.describe(), "a session was not put to rest");
                    }
                }
            });
        }
    }
}

/// Ends a step whose client no longer waits for it.
struct CancelOnDrop<'a> {
    app: &'a App,
    session: &'a Session,
    cancel: Cancel,
    is_done: bool,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        // Who may come back finds the step done.
        if !self.is_done && !self.app.sessions.outlives_socket(&self.session.id) {
            self.cancel.cancel();
            self.app.metrics.count_cancelled();
        }
    }
}

impl App {
    fn is_stopping(&self) -> bool {
        *self.is_stopping.borrow()
    }

    /// Is ready once the server stops.
    async fn stopping(&self) {
        let mut stopping = self.is_stopping.subscribe();
        // The sender is a part of this.
        let _ = stopping.wait_for(|stops| *stops).await;
    }

    /// Counts and logs a step that has no observation.
    fn note(&self, error: &StepError) {
        if let StepError::StateLost { .. } | StepError::Taken { .. } = error {
            self.metrics.count_lost();
        }
        if error.is_fault() {
            tracing::error!(error = %error.describe(), "a step failed");
        }
    }

    /// Runs `work` with a session's environment on a thread for steps. Dropped, it ends what runs.
    ///
    /// Requests of one session wait for each other before they take a thread.
    ///
    /// `work` is done anew where it found no free interpreter, and an idle session gave its own up.
    async fn on_episode<T: Send + 'static>(
        self: &Arc<Self>,
        session: &Arc<Session>,
        mut work: impl FnMut(&mut dyn Episode, &Cancel) -> Result<T, StepError> + Send + 'static,
    ) -> Result<T, StepError> {
        let turn = session.turn().await?;
        let cancel = Cancel::new();
        let mut guard = CancelOnDrop {
            app: self,
            session,
            cancel: cancel.clone(),
            is_done: false,
        };
        let (sender, receiver) = oneshot::channel();
        let (app, used) = (Arc::clone(self), Arc::clone(session));
        self.steps.submit(session.weight(), move || {
            let mut episode = used.episode();
            let mut parked = 0;
            let result = loop {
                match work(&mut **episode, &cancel) {
                    Err(StepError::Full { limit }) if parked < MAX_PARKED_FOR_ONE => {
                        parked += 1;
                        match app.sessions.park_one() {
                            true => app.metrics.count_parked(),
                            false => break Err(StepError::Full { limit }),
                        }
                    }
                    result => break result,
                }
            };
            drop(episode);
            drop(turn);
            // Nobody may wait for it any more.
            let _ = sender.send(result);
        });
        let result = receiver.await;
        guard.is_done = true;
        result.unwrap_or_else(|_| {
            Err(StepError::Environment {
                message: "the step panicked".to_owned(),
            })
        })
    }

    async fn reset(
        self: &Arc<Self>,
        session: &Arc<Session>,
        arguments: Map<String, Value>,
    ) -> Result<Observation, StepError> {
        let reset =
            move |episode: &mut dyn Episode, cancel: &Cancel| episode.reset(&arguments, cancel);
        let mut observation = self.on_episode(session, reset).await?;
        if self.gym.names_sessions() {
            let id = json!(session.id);
            observation.metadata.insert("session_id".to_owned(), id);
        }
        Ok(observation)
    }

    async fn step(
        self: &Arc<Self>,
        session: &Arc<Session>,
        action: Map<String, Value>,
        limit: Option<Duration>,
    ) -> Result<Observation, StepError> {
        let started = Instant::now();
        let step =
            move |episode: &mut dyn Episode, cancel: &Cancel| episode.step(&action, limit, cancel);
        let observation = self.on_episode(session, step).await?;
        session.burnt(observation.fuel);
        self.metrics.observe_step(started.elapsed());
        Ok(observation)
    }
}

async fn authorize(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let api_key = app.config.api_key.as_ref();
    let shown = api_key.and_then(|key| key.shown(request.headers()));
    if let Some(limit) = &app.rate_limit
        && let Err(wait) = limit.admit(shown, &request)
    {
        let message = "this client asks too often; come back when `Retry-After` says";
        let mut refused = routes::detail(StatusCode::TOO_MANY_REQUESTS, message);
        let headers = refused.headers_mut();
        headers.insert(header::RETRY_AFTER, retry_after(wait));
        return refused;
    }
    if api_key.is_some() && shown.is_none() {
        let mut refused = routes::detail(
            StatusCode::UNAUTHORIZED,
            "missing or wrong token; send it as `Authorization: Bearer TOKEN`",
        );
        let scheme = HeaderValue::from_static("Bearer");
        refused
            .headers_mut()
            .insert(header::WWW_AUTHENTICATE, scheme);
        return refused;
    }
    if api_key.is_none() && is_cross_site(request.headers()) {
        return routes::detail(
            StatusCode::FORBIDDEN,
            "pages of other sites are not answered by a server without a token; start it with \
             `--api-key-env`",
        );
    }
    next.run(request).await
}

async fn read_body(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let refuse = |error: BodyError| {
        let status = match error {
            BodyError::TooLarge { .. } | BodyError::TooManyValues => StatusCode::PAYLOAD_TOO_LARGE,
            BodyError::TooSlow => StatusCode::REQUEST_TIMEOUT,
            BodyError::Busy => StatusCode::SERVICE_UNAVAILABLE,
            BodyError::Broken => StatusCode::BAD_REQUEST,
        };
        routes::detail(status, error.to_string())
    };
    app.bodies.read(request, next, refuse).await
}

async fn count(
    State(app): State<Arc<App>>,
    path: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response {
    app.metrics.responses.counted(path, request, next).await
}
