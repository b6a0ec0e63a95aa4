//! Environments of other servers in a run.

use std::sync::Arc;

use serde_json::Value;

use super::RunError;
use crate::address::shown;
use crate::chat::{Message, ToolSpec};
use crate::config::{self, RunConfig};
use crate::env::Environment;
use crate::http::tls::TlsFiles;
use crate::openenv::client::{self, EpisodeSettings, Opening, Remote};
use crate::rollout::{CollectionSeed, derive_seed};
use crate::task::{ResetRow, Task};

/// Seeds that every server takes as a number: 31 bits.
const SEED_BITS: u32 = 31;

/// The environment of another server, with what a run says of its episodes.
#[derive(Debug, Clone)]
pub(super) struct RemoteSetting {
    remote: Remote,
    settings: Arc<EpisodeSettings>,
}

impl RemoteSetting {
    /// Connects to the environment that `config` has, if it has one; `use_tools` says whether the policy
    /// is told of tools.
    pub(super) fn connect(config: &RunConfig, use_tools: bool) -> Result<Option<Self>, RunError> {
        let Some(env) = &config.env else {
            return Ok(None);
        };
        let remote = Remote::connect(client_config(env))?;
        if remote.needs_tools() && !use_tools {
            return Err(RunError::NoTools {
                url: shown(&env.url),
            });
        }
        let rollout = &config.rollout;
        let settings = EpisodeSettings {
            system_prompt: rollout.system_prompt.clone(),
            max_turns: rollout.max_turns,
            max_output_chars: usize::try_from(rollout.tool_output.0).unwrap_or(usize::MAX),
        };
        Ok(Some(Self {
            remote,
            settings: Arc::new(settings),
        }))
    }

    /// Returns the tools that a policy is told of.
    pub(super) fn tools(&self) -> &[ToolSpec] {
        self.remote.tools()
    }

    /// Returns `samples` episodes of a task, which all begin alike.
    pub(super) fn episodes(
        &self,
        task: &Task,
        samples: usize,
        seed: CollectionSeed<'_>,
        visit: u64,
    ) -> Vec<Box<dyn Environment>> {
        let opening = Arc::new(opening(task, seed, visit));
        (0..samples)
            .map(|_| {
                self.remote
                    .episode(Arc::clone(&opening), Arc::clone(&self.settings))
            })
            .collect()
    }
}

/// Returns what the episodes of a task begin with. Without a seed of its own it has one that depends on the
/// run's and on when it is met.
fn opening(task: &Task, seed: CollectionSeed<'_>, visit: u64) -> Opening {
    let row = task.reset_row();
    let messages = row.map_or(&[][..], |row| row.messages);
    let message = |message: &Value| {
        let message = serde_json::from_value::<Message>(message.clone());
        message.expect("rows with other messages are refused when they are read")
    };
    let mut arguments = row
        .map(|ResetRow { arguments, .. }| arguments.clone())
        .unwrap_or_default();
    match arguments.get("seed") {
        Some(Value::Null) => {
            arguments.shift_remove("seed");
        }
        Some(_) => {}
        None => {
            let of_task = seed.of_task("reset", &task.id);
            let drawn = derive_seed(of_task, "reset", visit, &task.id);
            let drawn = drawn & ((1 << SEED_BITS) - 1);
            arguments.insert("seed".to_owned(), Value::from(drawn));
        }
    }
    Opening {
        messages: messages.iter().map(message).collect(),
        arguments,
    }
}

fn client_config(env: &config::RemoteConfig) -> client::RemoteConfig {
    let config::RemoteKind::OpenEnv = env.kind;
    client::RemoteConfig {
        headers: env.headers.clone(),
        tls: match &env.tls {
            None => TlsFiles::default(),
            Some(tls) => TlsFiles {
                certificate: tls.certificate.clone(),
                key: tls.key.clone(),
                ca: tls.ca.clone(),
            },
        },
        actions: match env.actions {
            config::ActionStyle::Auto => client::ActionStyle::Auto,
            config::ActionStyle::Text => client::ActionStyle::Text,
            config::ActionStyle::Tools => client::ActionStyle::Tools,
        },
        action_field: env.action_field.clone(),
        observation: env.observation.clone(),
        reward: match env.reward {
            config::RewardRule::Last => client::RewardRule::Last,
            config::RewardRule::Sum => client::RewardRule::Sum,
        },
        pass_reward: env.pass_reward,
        connect_timeout: env.connect_timeout,
        reset_timeout: env.reset_timeout,
        step_timeout: env.step_timeout,
        retry_timeout: env.retry_timeout,
        max_message_bytes: usize::try_from(env.max_message_size.as_u64()).unwrap_or(usize::MAX),
        ..client::RemoteConfig::new(env.url.clone())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::task::{TaskOptions, TaskSet};

    fn seed(step: u64) -> CollectionSeed<'static> {
        CollectionSeed {
            run: 7,
            purpose: "train",
            step,
            draw: 0,
        }
    }

    #[test]
    fn a_reset_has_the_rows_seed_or_the_runs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let rows = [
            json!({"prompt": "Go.", "level": 2}),
            json!({"prompt": "Go.", "seed": 5}),
            json!({"prompt": "Go.", "seed": null}),
        ];
        let text: Vec<String> = rows.iter().map(Value::to_string).collect();
        fs_err::write(&path, text.join("\n")).unwrap();
        let options = TaskOptions {
            remote: true,
            ..TaskOptions::default()
        };
        let tasks = TaskSet::open_with(&path, &options).unwrap();
        let [drawn, own, none] = tasks.tasks() else {
            unreachable!("there are three rows");
        };
        let first = opening(drawn, seed(1), 0);
        assert_eq!(first.messages, [Message::user("Go.")]);
        assert_eq!(first.arguments["level"], 2);
        let of = |opening: &Opening| opening.arguments["seed"].as_u64().unwrap();
        assert!(of(&first) < 1 << 31);
        assert_eq!(first, opening(drawn, seed(1), 0));
        assert_ne!(of(&first), of(&opening(drawn, seed(1), 1)));
        assert_ne!(of(&first), of(&opening(drawn, seed(2), 0)));
        let again = CollectionSeed { draw: 1, ..seed(1) };
        assert_ne!(of(&first), of(&opening(drawn, again, 0)));
        assert_eq!(opening(own, seed(1), 0), opening(own, seed(2), 1));
        assert_eq!(opening(own, seed(1), 0).arguments["seed"], 5);
        assert!(!opening(none, seed(1), 0).arguments.contains_key("seed"));
    }

    #[test]
    fn seeds_make_episodes_of_their_own() {
        let (learned, measured) = TaskSet::of_seeds(10).divide();
        assert_eq!((learned.len(), measured.len()), (8, 2));
        let tasks = learned.tasks().iter().chain(measured.tasks());
        let mut seeds: Vec<u64> = tasks
            .map(|task| {
                opening(task, seed(1), 3).arguments["seed"]
                    .as_u64()
                    .unwrap()
            })
            .collect();
        seeds.sort_unstable();
        assert_eq!(seeds, (0..10).collect::<Vec<_>>());
    }
}
