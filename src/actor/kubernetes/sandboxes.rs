//! What the two families of controllers have in common.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use kube::core::ApiResource;
use serde_json::Value;

use super::access::Right;
use super::agent_sandbox::AgentSandbox;
use super::cluster::Link;
use super::kruise::Kruise;
use super::options::Controller;
use super::run::{self, Run};
use crate::actor::ActorError;

/// Sandboxes of one template that are kept ready.
#[derive(Debug, Clone)]
pub(super) struct Pool {
    pub(super) name: String,
    pub(super) task: String,
    pub(super) warm: u32,
    /// Its `PodTemplateSpec`.
    pub(super) template: Value,
}

/// A sandbox that is asked for.
#[derive(Debug, Clone)]
pub(super) struct Wish {
    /// The claim's name.
    pub(super) name: String,
    /// The pool's.
    pub(super) pool: String,
    pub(super) task: String,
    /// How long the sandbox may live once it is claimed.
    pub(super) lifetime: Duration,
    /// How long it may take to be ready.
    pub(super) limit: Duration,
}

impl Wish {
    /// Returns when the controller ends the sandbox if nobody else does.
    pub(super) fn shutdown_time(&self) -> String {
        let lives = self.lifetime.saturating_add(self.limit);
        let lives = SignedDuration::try_from(lives).unwrap_or(SignedDuration::MAX);
        let now = Timestamp::now();
        // What ends after all calendars ends with the run.
        run::seconds(now.checked_add(lives).unwrap_or(Timestamp::MAX))
    }
}

/// Makes sandboxes by the controllers of one family.
#[derive(Debug, Clone)]
pub(super) enum Sandboxes {
    Kruise(Kruise),
    AgentSandbox(AgentSandbox),
}

impl Sandboxes {
    pub(super) fn new(controller: &Controller) -> Self {
        match controller {
            Controller::Kruise { group_version } => Self::Kruise(Kruise::new(group_version)),
            Controller::AgentSandbox { core, extensions } => {
                Self::AgentSandbox(AgentSandbox::new(core, extensions))
            }
        }
    }

    /// Returns the kinds in the order in which they are deleted.
    pub(super) fn kinds(&self) -> Vec<ApiResource> {
        match self {
            Self::Kruise(kinds) => kinds.kinds(),
            Self::AgentSandbox(kinds) => kinds.kinds(),
        }
    }

    /// Returns what we must be allowed to do with them.
    pub(super) fn rights(&self) -> Vec<Right> {
        match self {
            Self::Kruise(kinds) => kinds.rights(),
            Self::AgentSandbox(kinds) => kinds.rights(),
        }
    }

    /// Makes a pool, or brings it to what is given.
    pub(super) async fn prepare(
        &self,
        link: &Link,
        run: &Run,
        pool: &Pool,
    ) -> Result<(), ActorError> {
        match self {
            Self::Kruise(kinds) => kinds.prepare(link, run, pool).await,
            Self::AgentSandbox(kinds) => kinds.prepare(link, run, pool).await,
        }
    }

    /// Deletes a pool that no sandbox comes from any more.
    pub(super) async fn discard(&self, link: &Link, pool: &str) -> Result<(), ActorError> {
        let pools = match self {
            Self::Kruise(kinds) => vec![kinds.pool()],
            Self::AgentSandbox(kinds) => kinds.pools(),
        };
        for kind in pools {
            link.delete(kind, pool).await?;
        }
        Ok(())
    }

    /// Claims a sandbox and returns the name of its pod, which runs.
    ///
    /// # Errors
    ///
    /// Fails where there is none in time. What was made for the claim is the caller's to release.
    pub(super) async fn claim(
        &self,
        link: &Link,
        run: &Run,
        wish: &Wish,
    ) -> Result<String, ActorError> {
        match self {
            Self::Kruise(kinds) => kinds.claim(link, run, wish).await,
            Self::AgentSandbox(kinds) => kinds.claim(link, run, wish).await,
        }
    }

    /// Deletes a claim and its sandbox.
    pub(super) async fn release(&self, link: &Link, claim: &str) -> Result<(), ActorError> {
        match self {
            Self::Kruise(kinds) => kinds.release(link, claim).await,
            Self::AgentSandbox(kinds) => kinds.release(link, claim).await,
        }
    }
}
