//! Actors by OpenEnv's protocol: machines of other servers, whose tool runs a command of a shell.
//!
//! A `wardian sandboxd` in a pod is one, and so is any server with a tool that takes a line of a shell and gives back
//! what that prints. Each actor is a session: its reset makes the machine, or makes it anew, and its end gives it back.
//!
//! **How commands are run.** The tool prints text and no more, so a script around each command writes its streams to
//! files in the machine and prints them in base64, with their sizes and the exit code (`script`). What does not fit
//! one call is fetched by others; input goes the same way. A machine needs `sh`, `base64`, `head`, `tail`, `wc`, `tr`,
//! and `tar` for trees.
//!
//! **Whose doing.** A connection that breaks and a server that refuses are faults of ours. A shell that answers, and
//! not as the script says, has been meddled with: an actor is tried before it is given away, so that was the guest.
//!
//! **What is not known.** How well guests are kept apart, and whether they have a network, is the server's to say; the
//! options declare it.

mod actor;
mod base64;
mod script;

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use self::actor::OpenEnvActor;
use super::connect::Endpoint;
use super::slots::Slots;
use super::{Fault, RemoteConfig, patiently};
use crate::actor::background::Background;
use crate::actor::{Actor, ActorBackend, ActorError, ActorSpec, Capabilities, Isolation, RootFs};
use crate::causes::with_causes;

/// The backend's name.
const NAME: &str = "openenv";

/// What stands for the number of an actor in an address.
const SLOT: &str = "{slot}";

/// Where servers with machines are, and how a command is run in one.
#[derive(Debug, Clone, PartialEq)]
pub struct OpenEnvOptions {
    /// Address, headers, TLS and the bounds of connections and resets; what it says of actions and rewards is of no
    /// matter. `{slot}` in the address is the number of the actor, from 0, as it is in headers: of those that live at a
    /// time no two have the same.
    pub server: RemoteConfig,
    /// The tool that runs a line of a shell; where it is empty the line is a field of the action itself. Default:
    /// `bash`.
    pub tool: String,
    /// The argument, or the field, that takes the line. Default: `command`.
    pub argument: String,
    /// The one that takes the time that it may take, in seconds, after which the server ends every process of the
    /// machine. Where it is empty the session is ended with the command, and the actor with it. Default: `timeout_s`.
    pub timeout_argument: String,
    /// Further arguments of every call. Default: none.
    pub arguments: Map<String, Value>,
    /// The field of an observation that has what the line printed; where a tool's result or `stdout` is unless given.
    pub output: Option<String>,
    /// The most of what a line prints that comes back whole, in bytes. Default: 32 KiB.
    pub max_output: usize,
    /// What every reset is given. Default: nothing.
    pub reset: Map<String, Value>,
    /// The argument of a reset that takes the image of an actor; without one, machines are as they are.
    pub image_argument: Option<String>,
    /// What keeps guests in, as far as is known. Default: namespaces.
    pub isolation: Isolation,
}

impl OpenEnvOptions {
    /// Returns options with the defaults.
    #[must_use]
    pub fn new(server: RemoteConfig) -> Self {
        Self {
            server,
            tool: "bash".to_owned(),
            argument: "command".to_owned(),
            timeout_argument: "timeout_s".to_owned(),
            arguments: Map::new(),
            output: None,
            max_output: 32 << 10,
            reset: Map::new(),
            image_argument: None,
            isolation: Isolation::Namespaces,
        }
    }

    /// Returns the server of an actor.
    fn endpoint(&self, slot: usize) -> Result<Endpoint, ActorError> {
        let config = RemoteConfig {
            url: self.server.url.replace(SLOT, &slot.to_string()),
            ..self.server.clone()
        };
        Endpoint::new(&config).map_err(|error| ActorError::InvalidSpec {
            reason: named(&with_causes(&error)),
        })
    }

    /// Returns the action that runs a line.
    fn action(&self, line: &str, limit: Duration) -> Value {
        let mut arguments = self.arguments.clone();
        arguments.insert(self.argument.clone(), json!(line));
        if !self.timeout_argument.is_empty() {
            // Some take whole seconds alone.
            let seconds = match limit.subsec_nanos() {
                0 => json!(limit.as_secs()),
                _ => json!(limit.as_secs_f64()),
            };
            arguments.insert(self.timeout_argument.clone(), seconds);
        }
        match self.tool.as_str() {
            "" => Value::Object(arguments),
            tool => json!({"type": "call_tool", "tool_name": tool, "arguments": arguments}),
        }
    }
}

/// Says it with this backend's keys: they have the names of those of `env`.
fn named(message: &str) -> String {
    message.replace("`env.", "`actor.openenv.")
}

/// Starts actors at servers of OpenEnv's protocol.
#[derive(Debug)]
pub struct OpenEnvBackend {
    shared: Arc<Shared>,
}

/// What the actors of a run share.
#[derive(Debug)]
struct Shared {
    options: OpenEnvOptions,
    slots: Arc<Slots>,
    background: Background,
}

impl OpenEnvBackend {
    /// Looks whether the first server answers.
    ///
    /// # Errors
    ///
    /// Fails where the options make no sense, and where it does not.
    pub fn open(options: OpenEnvOptions) -> Result<Self, ActorError> {
        if options.argument.is_empty() || options.max_output < script::MIN_OUTPUT {
            return Err(ActorError::InvalidSpec {
                reason: format!(
                    "a command needs an argument that takes it, and at least {} bytes of output",
                    script::MIN_OUTPUT
                ),
            });
        }
        let endpoint = options.endpoint(0)?;
        let background = Background::start()?;
        let url = endpoint.url().to_owned();
        let retry = options.server.retry_timeout;
        let most = retry + options.server.connect_timeout + options.server.reset_timeout;
        let asking = async move { patiently(retry, 0, || endpoint.ask("/schema", None)).await };
        let asked = background.run("asking a server what it does", most, asking)?;
        asked.map_err(|fault| ActorError::Unusable {
            backend: NAME,
            reason: format!("has no server at `{url}`: {}", named(&with_causes(&fault))),
        })?;
        Ok(Self {
            shared: Arc::new(Shared {
                options,
                slots: Arc::default(),
                background,
            }),
        })
    }
}

impl ActorBackend for OpenEnvBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            isolation: self.shared.options.isolation,
            shell: true,
            network: false,
            root_folder: false,
            image: self.shared.options.image_argument.is_some(),
            // As far as the server's user may.
            writable_root: true,
            background: true,
            users: false,
            snapshot: false,
            snapshot_memory: false,
            fork: false,
        }
    }

    fn create(&self, spec: &ActorSpec) -> Result<Box<dyn Actor>, ActorError> {
        spec.check()?;
        let unsupported = |ability| {
            Err(ActorError::Unsupported {
                backend: NAME,
                ability,
            })
        };
        if !spec.mounts.is_empty() {
            return unsupported(
                "show folders of this machine; put them into its machines, or use `put`",
            );
        }
        let mut reset = self.shared.options.reset.clone();
        match (&spec.root, &self.shared.options.image_argument) {
            (RootFs::Host, _) => {}
            (RootFs::Image(image), Some(argument)) => {
                reset.insert(argument.clone(), json!(image));
            }
            (RootFs::Image(_), None) => {
                return unsupported(
                    "choose an image; name the argument of a reset that does \
                     (`actor.openenv.image_argument`), or take machines as they are (`actor.root = \"host\"`)",
                );
            }
            (RootFs::Folder(_), _) => {
                return unsupported("start from a folder of this machine");
            }
        }
        Ok(Box::new(OpenEnvActor::start(&self.shared, spec, &reset)?))
    }

    fn shut_down(&self) {
        self.shared.background.close();
    }
}

/// Returns the error of a fault: nobody knows what became of what was asked.
fn lost(id: &str, fault: &Fault) -> ActorError {
    ActorError::Lost {
        id: id.to_owned(),
        reason: named(&with_causes(fault)),
    }
}
