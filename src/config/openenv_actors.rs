//! Actors at servers of OpenEnv's protocol: what the backend `openenv` is told.

use std::collections::BTreeMap;
use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::actor::require_time;
use super::validate::Issues;
use super::{TlsConfig, units};
use crate::address::shown;

/// Servers of OpenEnv's protocol whose machines are actors: `wardian sandboxd`, or any server with a tool that runs a
/// line of a shell (docs/heavy-tier.md).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OpenEnvActorConfig {
    /// Their address, `http://HOST:PORT` or `https://HOST:PORT`, up to and without `/ws`; has to be given. `{slot}` in
    /// it is the number of the actor, from 0: of those that live at a time no two have the same.
    pub url: String,
    /// Headers of every connection; none unless given. In their values `{slot}` is the number of the actor and any
    /// other `{NAME}` the environment variable of that name, which is where tokens belong.
    pub headers: BTreeMap<String, String>,
    /// Certificates, where the address begins with `https://`; the roots of the web are trusted and none is shown
    /// unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// What keeps their guests in, as far as you know and answer for it; `namespaces` unless given.
    pub isolation: DeclaredIsolation,
    /// The tool that runs a line of a shell; `bash` unless given. Where it is empty the line is a field of the action
    /// itself.
    pub tool: String,
    /// The argument of the tool, or the field, that takes the line; `command` unless given.
    pub argument: String,
    /// The one that takes the seconds that the line may take, after which the server ends all that runs in the machine;
    /// `timeout_s` unless given. Where it is empty the session is ended with the command, and the actor with it.
    pub timeout_argument: String,
    /// Further arguments of every call; none unless given.
    pub arguments: BTreeMap<String, Value>,
    /// The field of an observation that has what the line printed; what the tool gave back, or `stdout`, unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    /// How much of what a line prints comes back uncut; 32KiB unless given. More is fetched by further calls.
    #[serde(with = "units::byte_size")]
    #[schemars(with = "units::SizeText")]
    pub max_output: ByteSize,
    /// What every reset is given; nothing unless given.
    pub reset: BTreeMap<String, Value>,
    /// The argument of a reset that takes the image of the task; unless given, machines are as they are, which
    /// `actor.root = "host"` says, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_argument: Option<String>,
    /// The longest that connecting may take; 10s unless given.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub connect_timeout: Duration,
    /// The longest that a reset may take; 2m unless given.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub reset_timeout: Duration,
    /// How much longer than a command an answer may take; 30s unless given.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub step_timeout: Duration,
    /// How long a connection is tried again that cannot be made, or that the server or a router has no room for; 2m
    /// unless given.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub retry_timeout: Duration,
    /// The largest message that is read; 8MiB unless given.
    #[serde(with = "units::byte_size")]
    #[schemars(with = "units::SizeText")]
    pub max_message_size: ByteSize,
}

impl Default for OpenEnvActorConfig {
    fn default() -> Self {
        Self {
            url: String::new(),
            headers: BTreeMap::new(),
            tls: None,
            isolation: DeclaredIsolation::Namespaces,
            tool: "bash".to_owned(),
            argument: "command".to_owned(),
            timeout_argument: "timeout_s".to_owned(),
            arguments: BTreeMap::new(),
            output: None,
            max_output: ByteSize::kib(32),
            reset: BTreeMap::new(),
            image_argument: None,
            connect_timeout: Duration::from_secs(10),
            reset_timeout: Duration::from_mins(2),
            step_timeout: Duration::from_secs(30),
            retry_timeout: Duration::from_mins(2),
            max_message_size: ByteSize::mib(8),
        }
    }
}

/// What keeps the guests of machines in that are elsewhere.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum DeclaredIsolation {
    /// Nothing more than namespaces, or nothing that is known.
    #[default]
    Namespaces,
    /// A kernel of their own: gVisor, or a virtual machine.
    Gvisor,
}

/// Checks what a run says of its servers.
pub(super) fn validate(config: &OpenEnvActorConfig, issues: &mut Issues) {
    let key = |key: &str| format!("actor.openenv.{key}");
    let schemes = ["http://", "https://", "ws://", "wss://"];
    issues.require(
        schemes.iter().any(|scheme| config.url.starts_with(scheme)),
        key("url"),
        shown(&config.url),
        "give the server's address, such as `http://127.0.0.1:8000`",
    );
    issues.require(
        shown(&config.url) == config.url,
        key("url"),
        shown(&config.url),
        "leave the user out; send a token with `actor.openenv.headers`",
    );
    let is_secure = config.url.starts_with("https://") || config.url.starts_with("wss://");
    issues.require(
        is_secure || config.tls.is_none(),
        key("tls"),
        "a table",
        "leave it out, or give an address that begins with `https://`",
    );
    issues.require(
        !config.argument.is_empty(),
        key("argument"),
        "",
        "name what takes the line of a shell",
    );
    issues.require(
        (ByteSize::kib(1)..=ByteSize::mib(64)).contains(&config.max_output),
        key("max_output"),
        config.max_output,
        "make it from 1KiB to 64MiB",
    );
    issues.require(
        (ByteSize::kib(4)..=ByteSize::gib(1)).contains(&config.max_message_size)
            && config.max_message_size.as_u64() / 2 >= config.max_output.as_u64(),
        key("max_message_size"),
        config.max_message_size,
        "make it at most 1GiB, and at least twice `max_output`",
    );
    for (name, time) in [
        ("connect_timeout", config.connect_timeout),
        ("reset_timeout", config.reset_timeout),
        ("step_timeout", config.step_timeout),
        ("retry_timeout", config.retry_timeout),
    ] {
        require_time(issues, key(name), time);
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{ConfigError, RunConfig};

    fn load(text: &str) -> Result<RunConfig, ConfigError> {
        let text =
            format!("model.path = 'm'\ntask.path = 't'\n[actor]\nbackend = 'openenv'\n{text}");
        RunConfig::from_toml::<&str>(&text, &[])
    }

    #[test]
    fn servers_read_back() {
        let config = load(
            "[actor.openenv]\nurl = 'http://shell-{slot}.example.org'\nheaders = { a = '{TOKEN}' }\n\
             isolation = 'gvisor'\ntool = 'run'\ntimeout_argument = ''\narguments = { n = 1, s = 'x' }\n\
             reset = { kind = 'small' }\nimage_argument = 'image'",
        )
        .unwrap();
        let again = RunConfig::from_toml::<&str>(&config.to_toml().unwrap(), &[]).unwrap();
        assert_eq!(config, again);
    }

    #[test]
    fn what_is_missing_or_makes_no_sense_is_named() {
        let with = |more: &str| format!("[actor.openenv]\nurl = 'http://a'\n{more}");
        for (text, key) in [
            (String::new(), "actor.openenv"),
            (
                "[actor.openenv]\ntool = 'a'".to_owned(),
                "actor.openenv.url",
            ),
            (
                "[actor.openenv]\nurl = 'a:1'".to_owned(),
                "actor.openenv.url",
            ),
            (
                "[actor.openenv]\nurl = 'http://me:secret@a'".to_owned(),
                "actor.openenv.url",
            ),
            (with("tls.ca = 'f'"), "actor.openenv.tls"),
            (with("argument = ''"), "actor.openenv.argument"),
            (with("max_output = '10B'"), "actor.openenv.max_output"),
            (
                with("max_output = '8MiB'"),
                "actor.openenv.max_message_size",
            ),
            (with("step_timeout = '0s'"), "actor.openenv.step_timeout"),
        ] {
            match load(&text) {
                Err(ConfigError::Invalid { issues }) => assert_eq!(issues[0].key, key, "{text}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}
