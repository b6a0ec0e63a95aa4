//! Environments of other servers.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use super::validate::Issues;
use super::{RewardAggregation, RunConfig, units};
use crate::address::shown;
use crate::task::Split;

/// The longest wait that a run file may ask for.
const MAX_WAIT: Duration = Duration::from_hours(24);

/// Environments of another server, in place of the sandbox and its graders: a session of it for each episode
/// at a time (docs/openenv.md). Its episodes are those of `task.path`, JSON Lines with a `prompt` in each row
/// whose other fields are given to the reset, or `episodes` of them. It rewards: `[reward]` and `[sandbox]` say
/// nothing about it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RemoteConfig {
    /// Which protocol the server speaks; `openenv` unless given.
    pub kind: RemoteKind,
    /// Its address, `http://HOST:PORT` or `https://HOST:PORT`, up to and without `/ws`; has to be given.
    pub url: String,
    /// Headers of every connection; none unless given. In their values `{slot}` is the number of the
    /// rollout's slot, from 0, and any other `{NAME}` the environment variable of that name, which is where
    /// tokens belong.
    pub headers: BTreeMap<String, String>,
    /// Certificates, where the address begins with `https://`; the roots of the web are trusted and none is
    /// shown unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// In place of `task.path`, so many different episodes, told apart by the seeds of their resets, which
    /// open with what the reset says; none unless given. A fifth of them is held out to measure on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub episodes: Option<u32>,
    /// How the policy's turns become actions; `auto` unless given.
    pub actions: ActionStyle,
    /// The field of an action that takes the text of a turn; the only one that can unless given. Of a field
    /// `code` only the turn's last block of code is sent, where it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action_field: Option<String>,
    /// The field of an observation that the policy is shown; what a program printed, the `instruction`, the
    /// only text, or all of it as JSON unless given. What a tool gave back is shown where there is no such
    /// field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observation: Option<String>,
    /// Which reward of an episode's steps is the episode's; `last` unless given. One that never had any has 0.
    pub reward: RewardRule,
    /// The reward from which an episode counts as passed, in pass rates; 1 unless given.
    pub pass_reward: f64,
    /// The longest that connecting may take; 10s unless given.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub connect_timeout: Duration,
    /// The longest that a reset may take; 1m unless given.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub reset_timeout: Duration,
    /// The longest that a step may take; 1m unless given.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub step_timeout: Duration,
    /// How long a connection is tried again that cannot be made, or that the server or a router has no room
    /// for; 1m unless given. Steps are never tried again.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub retry_timeout: Duration,
    /// The largest message that is read; 8MiB unless given.
    #[serde(with = "units::byte_size")]
    #[schemars(with = "units::SizeText")]
    pub max_message_size: ByteSize,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            kind: RemoteKind::OpenEnv,
            url: String::new(),
            headers: BTreeMap::new(),
            tls: None,
            episodes: None,
            actions: ActionStyle::Auto,
            action_field: None,
            observation: None,
            reward: RewardRule::Last,
            pass_reward: 1.0,
            connect_timeout: Duration::from_secs(10),
            reset_timeout: Duration::from_mins(1),
            step_timeout: Duration::from_mins(1),
            retry_timeout: Duration::from_mins(1),
            max_message_size: ByteSize::mib(8),
        }
    }
}

/// Files of certificates, in PEM. They are read again when they change.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TlsConfig {
    /// The roots that the server's certificate must lead to; those of the web unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// The certificate to show to the server; none unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate: Option<PathBuf>,
    /// Its private key; in the same file unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
}

/// Which protocol a server speaks.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum RemoteKind {
    /// That of OpenEnv 0.10.
    #[default]
    OpenEnv,
}

/// How the policy's turns become actions.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum ActionStyle {
    /// By tools where the environment lists some, as text where its actions are one text, else by one tool,
    /// `step`, with the fields of an action as its arguments.
    #[default]
    Auto,
    /// As text: each turn is an action, until the environment ends the episode or `rollout.max_turns` does.
    Text,
    /// By tools, those that are listed or `step`: a turn that calls none ends the episode, as in TRL.
    Tools,
}

/// Which reward of an episode's steps is the episode's.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum RewardRule {
    /// The last, which is what TRL's examples take.
    #[default]
    Last,
    /// All together.
    Sum,
}

/// Refuses keys that say nothing about an environment elsewhere: of splits where its episodes are drawn by
/// seeds, and those of grading here. Those that are not given are `None`; all begin with `prefix`.
pub(super) fn validate_tasks(
    env: &RemoteConfig,
    prefix: &str,
    splits: [(&str, Option<Split>); 2],
    of_grading: &[(&str, Option<String>)],
    issues: &mut Issues,
) {
    let splits = splits.iter().filter(|_| env.episodes.is_some());
    for (key, split) in splits {
        issues.require(
            split.is_none(),
            format!("{prefix}{key}"),
            split.map_or_else(String::new, |split| split.to_string()),
            "leave it out: episodes of `env.episodes` have no splits, and a fifth of them is held out",
        );
    }
    for (key, value) in of_grading {
        issues.require(
            value.is_none(),
            format!("{prefix}{key}"),
            value.as_deref().unwrap_or_default(),
            "leave it out: the environment of `env` runs and rewards its episodes itself",
        );
    }
}

/// Checks what a run says of an environment elsewhere, and with it; `run` has that environment alone, and its
/// keys begin with `prefix`.
pub(super) fn validate(run: &RunConfig, prefix: &str, issues: &mut Issues) {
    let Some(env) = &run.env else { return };
    let key = |key: &str| format!("{prefix}env.{key}");
    let schemes = ["http://", "https://", "ws://", "wss://"];
    issues.require(
        schemes.iter().any(|scheme| env.url.starts_with(scheme)),
        key("url"),
        shown(&env.url),
        "give the server's address, such as `http://127.0.0.1:8000`",
    );
    issues.require(
        shown(&env.url) == env.url,
        key("url"),
        shown(&env.url),
        "leave the user out; send a token with `env.headers`",
    );
    let is_secure = env.url.starts_with("https://") || env.url.starts_with("wss://");
    issues.require(
        is_secure || env.tls.is_none(),
        key("tls"),
        "a table",
        "leave it out, or give an address that begins with `https://`",
    );
    issues.require(
        env.episodes.is_none_or(|episodes| episodes >= 2),
        key("episodes"),
        env.episodes.unwrap_or_default(),
        "make it at least 2: one of them is held out to measure on",
    );
    let tasks = &run.task;
    issues.require(
        env.episodes.is_some() || !tasks.path.is_empty(),
        key("episodes"),
        "not given",
        "give it, or a `path` of JSON Lines with prompts",
    );
    issues.require(
        env.episodes.is_none() || (tasks.path.is_empty() && tasks.eval_path.is_none()),
        key("episodes"),
        env.episodes.unwrap_or_default(),
        "leave it out, or the paths of tasks: both say what the episodes are",
    );
    issues.require(
        env.action_field.is_none() || env.actions != ActionStyle::Tools,
        key("action_field"),
        env.action_field.as_deref().unwrap_or_default(),
        "leave it out, or `env.actions`: with `\"tools\"` no turn is an action as text",
    );
    issues.require(
        env.pass_reward.is_finite(),
        key("pass_reward"),
        env.pass_reward,
        "make it a number",
    );
    for (name, wait) in [
        ("connect_timeout", env.connect_timeout),
        ("reset_timeout", env.reset_timeout),
        ("step_timeout", env.step_timeout),
    ] {
        issues.require(
            (Duration::from_millis(1)..=MAX_WAIT).contains(&wait),
            key(name),
            format!("{wait:?}"),
            "make it from 1ms to 24h",
        );
    }
    issues.require(
        env.retry_timeout <= MAX_WAIT,
        key("retry_timeout"),
        format!("{:?}", env.retry_timeout),
        "make it at most 24h",
    );
    issues.require(
        (ByteSize::kib(1)..=ByteSize::gib(1)).contains(&env.max_message_size),
        key("max_message_size"),
        env.max_message_size,
        "make it from 1KiB to 1GiB: so much is held for each session",
    );
    issues.require(
        run.rollout.agent.is_none(),
        key("url"),
        shown(&env.url),
        "leave out `rollout.agent`: a program has tools of its own, and acts in no environment elsewhere",
    );
    issues.require(
        run.trainer.reward_aggregation == RewardAggregation::Sum,
        key("reward"),
        "a single number",
        "make `trainer.reward_aggregation` \"sum\": a reward from elsewhere has no parts",
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigError;

    fn issues(text: &str) -> Vec<(String, String)> {
        let text = format!("model.path = 'm'\n{text}");
        match RunConfig::from_toml::<&str>(&text, &[]) {
            Err(ConfigError::Invalid { issues }) => (issues.into_iter())
                .map(|issue| (issue.key, issue.remedy))
                .collect(),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn an_environment_elsewhere_reads_back_alone_and_among_others() {
        let alone = "model.path = 'm'\n[env]\nkind = 'openenv'\nurl = 'http://x'\nepisodes = 2\n\
                     reward = 'sum'\nstep_timeout = '90s'\nheaders = { a = '{slot}' }";
        let among = "model.path = 'm'\nenvironments.a.env = { url = 'wss://x', episodes = 9, tls.ca = 'ca.pem' }\n\
                     environments.b.path = 't'\nenvironments.b.env.url = 'http://y'\n\
                     environments.c.path = 't'";
        for text in [alone, among] {
            let config = RunConfig::from_toml::<&str>(text, &[]).unwrap();
            let again = RunConfig::from_toml::<&str>(&config.to_toml().unwrap(), &[]).unwrap();
            assert_eq!(config, again);
        }
        let config = RunConfig::from_toml::<&str>(alone, &[]).unwrap();
        let env = config.env.unwrap();
        assert_eq!(env.headers["a"], "{slot}");
        assert_eq!(
            (env.reward, env.step_timeout.as_secs()),
            (RewardRule::Sum, 90)
        );
        let config = RunConfig::from_toml(among, &["environments.a.env.episodes=7"]).unwrap();
        assert_eq!(
            config.environments["a"].env.as_ref().unwrap().episodes,
            Some(7)
        );
    }

    #[test]
    fn what_makes_no_sense_is_named_with_its_key() {
        for (text, key, remedy) in [
            (
                "env.url = 'http://x'",
                "env.episodes",
                "JSON Lines with prompts",
            ),
            ("env.episodes = 3", "env.url", "such as `http://"),
            (
                "env = { url = 'x:1', episodes = 3 }",
                "env.url",
                "such as `http://",
            ),
            (
                "env = { url = 'http://x', episodes = 1 }",
                "env.episodes",
                "at least 2",
            ),
            (
                "task.path = 't'\nenv = { url = 'http://x', episodes = 3 }",
                "env.episodes",
                "both say what the episodes are",
            ),
            (
                "task.path = 't'\nenv = { url = 'http://x', tls.ca = 'ca.pem' }",
                "env.tls",
                "begins with `https://`",
            ),
            (
                "task.path = 't'\nenv = { url = 'http://x', step_timeout = '0s' }",
                "env.step_timeout",
                "from 1ms",
            ),
            (
                "task.path = 't'\nenv = { url = 'http://x', max_message_size = '2GiB' }",
                "env.max_message_size",
                "to 1GiB",
            ),
            (
                "task.path = 't'\nenv.url = 'http://x'\nrollout.agent.command = ['a']",
                "env.url",
                "leave out `rollout.agent`",
            ),
            (
                "task.path = 't'\nenv.url = 'http://x'\ntrainer.reward_aggregation = 'gdpo'",
                "env.reward",
                "has no parts",
            ),
            (
                "task.path = 't'\nenv = { url = 'http://x', actions = 'tools', action_field = 'code' }",
                "env.action_field",
                "or `env.actions`",
            ),
            (
                "env = { url = 'http://x', episodes = 3 }\ntask.split = 'train'",
                "task.split",
                "have no splits",
            ),
            (
                "env = { url = 'http://x', episodes = 3 }\ntask.eval_split = 'test'",
                "task.eval_split",
                "have no splits",
            ),
            (
                "task.path = 't'\nenv.url = 'http://x'\ntask.grader = 'exact'",
                "task.grader",
                "rewards its episodes itself",
            ),
            (
                "environments.a = { env = { url = 'http://x', episodes = 3 }, split = 'train' }",
                "environments.a.split",
                "have no splits",
            ),
            (
                "environments.a = { path = 't', env.url = 'http://x', fuel = 2000000000 }",
                "environments.a.fuel",
                "rewards its episodes itself",
            ),
            (
                "environments.a = { path = 't', env.url = 'http://x', reward.passed = 0.5 }",
                "environments.a.reward",
                "rewards its episodes itself",
            ),
            (
                "task.path = 't'\nenv.url = 'http://me:secret@x'",
                "env.url",
                "send a token with `env.headers`",
            ),
            (
                "env = { url = 'http://x', episodes = 3 }\nenvironments.a.path = 't'",
                "env",
                "`environments.NAME.env`",
            ),
            (
                "environments.a.env = { url = 'http://x' }",
                "environments.a.env.episodes",
                "JSON Lines with prompts",
            ),
        ] {
            let found = issues(text);
            let is_there = |(found, text): &(String, String)| found == key && text.contains(remedy);
            assert!(found.iter().any(is_there), "{text}: {found:?}");
        }
    }
}
