//! Capturing for a trainer in the same process: sessions are opened and closed here, and agents find the
//! routes of models alone.

use std::sync::Arc;

use axum::Router;
use serde_json::{Map, json};

use super::backend::Backend;
use super::graph::CallGraph;
use super::session::{Purpose, SessionOptions, Snapshot};
use super::{App, ProxyConfig, ProxyError, data_plane, service};

/// A proxy without routes to control it.
#[derive(Debug)]
pub struct Capture {
    app: Arc<App>,
}

/// What came of a session.
#[derive(Debug, Default)]
pub struct Captured {
    /// Its calls that were answered.
    pub graph: CallGraph,
    /// Calls that failed by no fault of the agent's: ours, the engine's, the upstream's.
    pub faults: u64,
    /// Calls that were refused for what they asked.
    pub refusals: u64,
}

/// How the calls of a session are answered that is learned from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainingSession {
    /// The temperature of all calls, whatever the agent asks for.
    pub temperature: f64,
    /// Tokens of an answer at the most, and where the agent says nothing of it.
    pub max_new_tokens: usize,
    /// Whether the model thinks where the agent does not say.
    pub enable_thinking: bool,
    /// Calls; the next one is answered with a stop. 0 is no limit.
    pub max_model_calls: u64,
    /// What the random numbers of the calls are made of.
    pub seed: u64,
}

impl Capture {
    /// Prepares to capture what `backend` answers.
    #[must_use]
    pub fn new(backend: Backend, config: ProxyConfig) -> Self {
        Self {
            app: App::new(backend, config),
        }
    }

    /// Returns the routes of agents as a service.
    pub fn router(&self) -> Router {
        service(Arc::clone(&self.app), data_plane(&self.app))
    }

    /// Opens a session; `id` is the key of its agent.
    ///
    /// # Errors
    ///
    /// Fails where the id cannot be one or is taken, or where there are as many sessions as are kept.
    pub fn open(&self, id: &str, session: TrainingSession) -> Result<(), ProxyError> {
        let mut sampling = Map::new();
        sampling.insert("temperature".to_owned(), json!(session.temperature));
        let options = SessionOptions {
            purpose: Purpose::Train,
            sampling,
            max_new_tokens: Some(session.max_new_tokens),
            enable_thinking: Some(session.enable_thinking),
            max_model_calls: session.max_model_calls,
            seed: Some(session.seed),
            ..SessionOptions::default()
        };
        self.app.sessions.create(Some(id.to_owned()), options)?;
        Ok(())
    }

    /// Closes a session and returns what came of it; what comes back late is refused.
    pub fn close(&self, id: &str) -> Option<Captured> {
        let session = self.app.sessions.remove(id)?;
        let Snapshot { gate, graph } = session.take();
        Some(Captured {
            graph,
            faults: gate.faults,
            refusals: gate.refusals,
        })
    }

    /// Returns whether there is nobody left to answer.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.app.backend.is_stopped()
    }
}
