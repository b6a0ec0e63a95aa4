//! Runs to look at in a browser: live curves, what became of programs, episodes token by token.
//!
//! [`Dashboard`] serves a page and a JSON API over run folders, as `docs/dashboard.md` says. It reads and
//! never writes, while runs are written: rows of `metrics.jsonl` from a place in the file on, episodes by
//! an index of where each begins. Nothing is read but what lies in the folder that it was given, whatever
//! names and links it meets there (`folder`), and what is read at a time is bounded.
//!
//! Everything in a run folder that a model or a task wrote is hostile to the page. It travels as JSON and
//! is only ever set as text; the policy of the page's content (`guard`) forbids what is not.

mod assets;
mod episode;
mod error;
mod folder;
mod guard;
mod index;
mod metrics;
mod prometheus;
mod routes;
mod runs;

use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::middleware;
use axum::routing::get;
use tokio::sync::Semaphore;

use self::episode::Tokenizers;
use self::index::Indexes;
use self::runs::Glances;
use crate::engine::Tokenizer;
use crate::http::{ApiKey, Rate, RateLimit, ResponseCounts, name_request};

/// Most requests that read files at a time; more wait.
const MAX_READERS: usize = 4;
/// Beside a trainer: what it holds counts as the trainer's, whose passes keep to a budget by what its process has.
const MAX_READERS_BESIDE: usize = 1;

/// Which runs are shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Runs {
    /// Those right below a folder, or the one that it is.
    Below(PathBuf),
    /// One run, which need not be there yet, and whose trainer this process may be.
    One(PathBuf),
}

/// Settings of the dashboard.
#[derive(Debug, Clone)]
pub struct DashboardConfig {
    /// Which runs are shown.
    pub runs: Runs,
    /// What clients must send as `Authorization: Bearer`; `None` lets everybody in that reaches it, but
    /// for pages of other sites.
    pub api_key: Option<ApiKey>,
    /// How often a client may ask; `None` is no limit.
    pub rate_limit: Option<Rate>,
    /// What turns ids into text; what a run folder holds unless given.
    pub tokenizer: Option<Tokenizer>,
}

impl DashboardConfig {
    /// Shows `runs` to everybody.
    #[must_use]
    pub fn new(runs: Runs) -> Self {
        Self {
            runs,
            api_key: None,
            rate_limit: None,
            tokenizer: None,
        }
    }
}

/// What all requests share.
#[derive(Debug)]
struct App {
    config: DashboardConfig,
    indexes: Indexes,
    glances: Glances,
    tokenizers: Tokenizers,
    readers: Arc<Semaphore>,
    rate_limit: Option<RateLimit>,
    responses: ResponseCounts,
}

/// The dashboard.
#[derive(Debug)]
pub struct Dashboard {
    app: Arc<App>,
}

impl Dashboard {
    /// Prepares the dashboard. Nothing is read before it is asked for.
    #[must_use]
    pub fn new(config: DashboardConfig) -> Self {
        let readers = match config.runs {
            Runs::Below(_) => MAX_READERS,
            Runs::One(_) => MAX_READERS_BESIDE,
        };
        Self {
            app: Arc::new(App {
                indexes: Indexes::default(),
                glances: Glances::default(),
                tokenizers: Tokenizers::default(),
                readers: Arc::new(Semaphore::new(readers)),
                rate_limit: config.rate_limit.map(RateLimit::new),
                responses: ResponseCounts::default(),
                config,
            }),
        }
    }

    /// Returns the dashboard as a service.
    pub fn router(&self) -> Router {
        let app = &self.app;
        let episode = "/api/runs/{run}/steps/{step}/episodes/{row}";
        let api = Router::new()
            .route("/api/about", get(routes::about))
            .route("/api/charts", get(routes::charts))
            .route("/api/runs", get(routes::runs))
            .route("/api/runs/{run}", get(routes::run))
            .route("/api/runs/{run}/metrics", get(routes::metrics))
            .route("/api/runs/{run}/load", get(routes::load))
            .route("/api/runs/{run}/steps", get(routes::steps))
            .route(
                "/api/runs/{run}/steps/{step}/episodes",
                get(routes::episodes),
            )
            .route(episode, get(routes::episode))
            .route(&format!("{episode}/raw"), get(routes::raw))
            .route_layer(middleware::from_fn_with_state(
                Arc::clone(app),
                guard::authorize,
            ));
        api.route("/", get(routes::page))
            .route("/assets/{name}", get(routes::asset))
            .route("/health", get(routes::health))
            .route("/metrics", get(routes::counts))
            .fallback(routes::nothing)
            .method_not_allowed_fallback(routes::read_only)
            .layer(middleware::from_fn_with_state(
                Arc::clone(app),
                guard::own_names,
            ))
            .layer(middleware::from_fn_with_state(
                Arc::clone(app),
                guard::count,
            ))
            .layer(middleware::from_fn(guard::secure))
            .layer(middleware::from_fn(name_request))
            .with_state(Arc::clone(app))
    }
}
