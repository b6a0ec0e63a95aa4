//! Environments of other servers, as a policy here acts in them.
//!
//! It is in this room, and not in `env`, since it speaks the protocol of this room; `env` knows of it only
//! that an environment may fail elsewhere.
//!
//! - **Sessions.** Each episode that runs has a slot with a number, and each slot a session of the server,
//!   which is kept for the slot's next episode. A task per session reads its socket all the time
//!   (`session`), on one thread for all; who acts waits on a thread of its own.
//! - **Faults.** A session that is lost, late or wrong fails its episode, which has no reward then, and
//!   no other. The slot's next episode opens another session.
//! - **Again** is tried only what never reached the environment: a connection that cannot be made, a
//!   router that has nobody to pass it to, a server without room, all before a reset was answered. Besides,
//!   a reset on a session that ended while it was idle is sent on a new one. A step is never sent twice.
//! - **Turns.** What a policy can do is what the server's `/schema` says (`actions`): tools, which are
//!   listed at the server and called by OpenEnv's action for that; one text; or fields, which are the
//!   arguments of one tool then.

mod actions;
pub mod actors;
mod connect;
mod environment;
mod error;
mod frames;
mod observe;
mod session;
mod slots;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::runtime::Runtime;

use self::actions::Actions;
use self::connect::{Endpoint, patiently};
use self::environment::remote;
use self::session::{FAREWELL, Session};
use self::slots::Slots;
use crate::chat::ToolSpec;
use crate::env::{EnvError, Environment};
use crate::http::tls::TlsFiles;

pub use self::environment::{EpisodeSettings, Opening, RemoteEnvironment};
pub use self::error::{ClientError, Fault};

/// How the policy's turns become actions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ActionStyle {
    /// By tools where the environment lists some, as text where its actions are one text, else by a tool
    /// that takes the fields of an action.
    #[default]
    Auto,
    /// As text.
    Text,
    /// By tools.
    Tools,
}

/// Which of the rewards of an episode's steps is the episode's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RewardRule {
    /// The last.
    #[default]
    Last,
    /// All together.
    Sum,
}

/// Where an environment is, and within which bounds it is used.
#[derive(Debug, Clone, PartialEq)]
pub struct RemoteConfig {
    /// Its address, up to `/ws`.
    pub url: String,
    /// Headers of every connection. `{slot}` in a value is the number of the rollout's slot, any other
    /// `{NAME}` the environment variable of that name.
    pub headers: BTreeMap<String, String>,
    /// Whom it trusts and what it shows, where the address is `https://` or `wss://`.
    pub tls: TlsFiles,
    /// How turns become actions.
    pub actions: ActionStyle,
    /// The field of an action that takes the text of a turn; the only one that can unless given.
    pub action_field: Option<String>,
    /// The field of an observation that the policy is shown.
    pub observation: Option<String>,
    /// Which reward is the episode's.
    pub reward: RewardRule,
    /// The reward from which an episode counts as passed. Default: 1.
    pub pass_reward: f64,
    /// The longest that connecting may take. Default: 10 s, as OpenEnv's client has it.
    pub connect_timeout: Duration,
    /// The longest that a reset may take. Default: 60 s, as OpenEnv's client has it.
    pub reset_timeout: Duration,
    /// The longest that a step may take. Default: 60 s, as OpenEnv's client has it.
    pub step_timeout: Duration,
    /// How long a connection that is refused is tried again. Default: 60 s.
    pub retry_timeout: Duration,
    /// The largest message that is read. Default: 8 MiB.
    pub max_message_bytes: usize,
}

impl RemoteConfig {
    /// Returns the settings for the server at `url`.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            headers: BTreeMap::new(),
            tls: TlsFiles::default(),
            actions: ActionStyle::Auto,
            action_field: None,
            observation: None,
            reward: RewardRule::Last,
            pass_reward: 1.0,
            connect_timeout: Duration::from_secs(10),
            reset_timeout: Duration::from_secs(60),
            step_timeout: Duration::from_secs(60),
            retry_timeout: Duration::from_secs(60),
            max_message_bytes: 8 << 20,
        }
    }
}

/// What a connection needs to know.
#[derive(Debug)]
struct Link {
    config: RemoteConfig,
    endpoint: Endpoint,
}

/// What the episodes of one server share.
struct Shared {
    link: Arc<Link>,
    actions: Actions,
    slots: Arc<Slots>,
    /// Taken when this ends.
    runtime: Option<Runtime>,
}

impl Shared {
    fn runtime(&self) -> &Runtime {
        self.runtime
            .as_ref()
            .expect("it is taken when this is dropped")
    }

    /// Says that a session failed.
    fn failed(&self, slot: usize, asked: &'static str, source: Fault) -> EnvError {
        remote(ClientError::Session {
            url: self.link.endpoint.url().to_owned(),
            slot,
            asked,
            source,
        })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else {
            return;
        };
        let sessions = self.slots.take_sessions().into_iter();
        let farewells: Vec<_> = sessions.map(Session::end).collect();
        // Servers are told, so that their slots are free at once; where this may wait.
        if tokio::runtime::Handle::try_current().is_err() {
            runtime.block_on(async {
                let all = async {
                    for farewell in farewells {
                        let _ = farewell.await;
                    }
                };
                let _ = tokio::time::timeout(FAREWELL, all).await;
            });
        }
        runtime.shutdown_background();
    }
}

/// An environment of another server.
#[derive(Clone)]
pub struct Remote {
    shared: Arc<Shared>,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The headers stay out of every log.
        f.debug_struct("Remote")
            .field("url", &self.shared.link.endpoint.url())
            .field("actions", &self.shared.actions)
            .finish_non_exhaustive()
    }
}

impl Remote {
    /// Asks the server what can be done in its environment. Waits on this thread, which must not be one of
    /// an async runtime's.
    ///
    /// # Errors
    ///
    /// Fails where the server cannot be reached or does not say, or where no policy can do it.
    pub fn connect(config: RemoteConfig) -> Result<Self, ClientError> {
        let endpoint = Endpoint::new(&config)?;
        let link = Arc::new(Link { config, endpoint });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("environments")
            .enable_all()
            .build()
            .map_err(|source| ClientError::Threads { source })?;
        let actions = runtime.block_on(link.actions())?;
        Ok(Self {
            shared: Arc::new(Shared {
                link,
                actions,
                slots: Arc::default(),
                runtime: Some(runtime),
            }),
        })
    }

    /// Returns whether it can be acted on only by a policy that calls tools.
    #[must_use]
    pub fn needs_tools(&self) -> bool {
        !matches!(self.shared.actions, Actions::Text { .. })
    }

    /// Returns the tools that a policy is told of; none where it acts in text.
    #[must_use]
    pub fn tools(&self) -> &[ToolSpec] {
        self.shared.actions.tools()
    }

    /// Returns an episode.
    #[must_use]
    pub fn episode(
        &self,
        opening: Arc<Opening>,
        settings: Arc<EpisodeSettings>,
    ) -> Box<dyn Environment> {
        let shared = Arc::clone(&self.shared);
        Box::new(RemoteEnvironment::new(shared, opening, settings))
    }
}

impl Link {
    /// Asks what can be done.
    async fn actions(&self) -> Result<Actions, ClientError> {
        let (endpoint, limit) = (&self.endpoint, self.config.retry_timeout);
        let described = |asked| {
            move |source| ClientError::Described {
                url: endpoint.url().to_owned(),
                asked,
                source,
            }
        };
        let schema = patiently(limit, 0, || endpoint.ask("/schema", None));
        let schema = schema.await.map_err(described("/schema"))?;
        let actions = Actions::of_schema(&schema, &self.config);
        let actions = actions.map_err(|reason| ClientError::Unsuitable {
            url: endpoint.url().to_owned(),
            reason,
        })?;
        if let Some(actions) = actions {
            return Ok(actions);
        }
        // What lists tools does nothing, so it may be asked again, too.
        let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"});
        let tools = patiently(limit, 0, || endpoint.ask("/mcp", Some(&list)));
        let tools = tools.await.map_err(described("tools/list"))?;
        Actions::of_tools(&tools).map_err(described("tools/list"))
    }
}
