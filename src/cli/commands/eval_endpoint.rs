//! `wardian eval --endpoint`: the model is elsewhere, tasks, tools and graders are here.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::serving::secret;
use super::setup::{self, Resolved};
use crate::address::shown;
use crate::cli::args::{parse_duration, require_http, require_tls_for};
use crate::cli::failure::Failure;
use crate::cli::printer::Printer;
use crate::cli::progress::{Progress, counted};
use crate::config::{EvalConfig, RemoteConfig, RunConfig};
use crate::eval::endpoint::{
    EndpointConfig, EndpointError, EndpointUsage, EpisodeRecord, ResultsFile, evaluate_endpoint,
    only_model,
};
use crate::eval::{EvalReport, TaskScore};
use crate::http::tls::TlsFiles;
use crate::proxy::UpstreamConfig;
use crate::rollout::CollectionSeed;
use crate::run::{RunError, Workbench, evaluation_tasks};
use crate::trajectory::Status;

/// The longest answer that is read, in bytes: far more than a model says in a turn, as often as there are
/// episodes at a time.
const MAX_ANSWER: usize = 16 << 20;

/// How a model elsewhere is asked.
#[derive(Debug, Args)]
#[command(next_help_heading = "With --endpoint")]
pub(super) struct EndpointArgs {
    /// Measure the model behind this OpenAI-compatible address, which ends in `/v1`; `--model` is its
    /// name there [default: the only one that it lists]
    #[arg(long, value_name = "URL")]
    endpoint: Option<String>,
    /// Environment variable that holds the endpoint's key
    #[arg(long, value_name = "NAME", requires = "endpoint")]
    api_key_env: Option<String>,
    /// Roots that the endpoint's certificate must lead to (PEM) [default: those of the web]
    #[arg(long, value_name = "FILE", requires = "endpoint")]
    tls_ca: Option<PathBuf>,
    /// Certificate that the endpoint is shown (PEM)
    #[arg(long, value_name = "FILE", requires = "endpoint")]
    tls_cert: Option<PathBuf>,
    /// Private key of `--tls-cert` (PEM) [default: in the same file]
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Keep each episode in this file as it ends, and go on from what it holds
    #[arg(long, value_name = "FILE", requires = "endpoint")]
    out: Option<PathBuf>,
    /// Episodes at a time
    #[arg(long, value_name = "N", default_value_t = 16, requires = "endpoint")]
    concurrency: usize,
    /// Further tries of a request that failed, with growing pauses or those that the endpoint asks for
    #[arg(long, value_name = "N", default_value_t = 5, requires = "endpoint")]
    retries: u32,
    /// Longest that an answer may take
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10m", requires = "endpoint")]
    request_timeout: Duration,
    /// Describe no tools to the model: it answers with code blocks
    #[arg(long, requires = "endpoint")]
    no_tools: bool,
    /// Fields of every request, as JSON, in the place of ours; null leaves one out
    #[arg(long, value_name = "JSON", requires = "endpoint")]
    extra: Option<String>,
    /// Price of a million tokens of prompts
    #[arg(long, value_name = "PRICE", requires = "endpoint")]
    prompt_price: Option<f64>,
    /// Price of a million tokens of answers
    #[arg(long, value_name = "PRICE", requires = "endpoint")]
    completion_price: Option<f64>,
}

/// What an endpoint did.
#[derive(Debug, Serialize)]
pub(super) struct EndpointReport {
    url: String,
    model: String,
    /// What all episodes cost that the file holds.
    #[serde(flatten)]
    usage: EndpointUsage,
    /// Episodes whose first prompt was longer than what the model reads.
    too_long: usize,
    /// In the unit of the prices, where they are given.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
}

impl EndpointReport {
    /// Returns what it did, for people.
    pub(super) fn describe(&self) -> String {
        let EndpointUsage {
            requests,
            retries,
            uncounted,
            prompt_tokens,
            completion_tokens,
        } = self.usage;
        let cost = (self.cost).map_or_else(String::new, |cost| format!(", for {cost:.4}"));
        let mut told = vec![format!(
            "{} answered {requests} requests ({retries} made again) with {prompt_tokens} tokens of prompts and \
             {completion_tokens} of answers{cost}",
            self.model
        )];
        if uncounted > 0 {
            told.push(format!(
                "{uncounted} of the answers did not say how many tokens they took (`usage`), which are missing here"
            ));
        }
        if self.too_long > 0 {
            told.push(format!(
                "{} of tasks that are longer than what it reads, and failed",
                counted(self.too_long, "episode")
            ));
        }
        told.join("; ")
    }
}

impl EndpointArgs {
    /// Returns the address, if the model is elsewhere.
    pub(super) fn endpoint(&self) -> Option<&str> {
        self.endpoint.as_deref()
    }

    /// Returns how the endpoint's model is asked; `model` is its name, if that is given.
    fn config(
        &self,
        url: &str,
        model: Option<&str>,
        config: &RunConfig,
    ) -> Result<EndpointConfig, Failure> {
        require_http("--endpoint", url)?;
        let extra = match self.extra.as_deref().map(serde_json::from_str::<Value>) {
            None => Map::new(),
            Some(Ok(Value::Object(extra))) => extra,
            Some(Ok(_)) => {
                return Err(Failure::usage(anyhow::anyhow!(
                    "`--extra` is not a JSON object"
                )));
            }
            Some(Err(error)) => {
                return Err(Failure::usage(anyhow::anyhow!(
                    "`--extra` is not JSON: {error}"
                )));
            }
        };
        let tls = TlsFiles {
            certificate: self.tls_cert.clone(),
            key: self.tls_key.clone(),
            ca: self.tls_ca.clone(),
        };
        require_tls_for(&tls, "--tls-", "--endpoint", url)?;
        let mut upstream = UpstreamConfig {
            api_key: secret(self.api_key_env.as_deref()).map_err(Failure::usage)?,
            tls,
            max_response_bytes: MAX_ANSWER,
            asks_for_ids: false,
            timeout: self.request_timeout,
            max_calls: self.concurrency,
            ..UpstreamConfig::new(url)
        };
        let model = match model {
            Some(model) => model.to_owned(),
            None => only_model(upstream.clone())?,
        };
        upstream.model = Some(model);
        Ok(EndpointConfig {
            upstream,
            temperature: config.eval.temperature,
            max_new_tokens: config.rollout.max_new_tokens,
            max_total_tokens: config.rollout.max_total_tokens,
            use_tools: !self.no_tools,
            extra,
            concurrency: self.concurrency,
            retries: self.retries,
        })
    }

    fn cost(&self, usage: EndpointUsage) -> Option<f64> {
        if self.prompt_price.is_none() && self.completion_price.is_none() {
            return None;
        }
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
        let cost = |tokens: u64, price: Option<f64>| tokens as f64 / 1e6 * price.unwrap_or(0.0);
        let prompts = cost(usage.prompt_tokens, self.prompt_price);
        Some(prompts + cost(usage.completion_tokens, self.completion_price))
    }
}

/// Refuses settings that change what a model says, and that a model elsewhere cannot be held to.
fn check_config(config: &RunConfig) -> Result<(), Failure> {
    let rollout = &config.rollout;
    let refused = [
        (
            "agent",
            rollout.agent.is_some(),
            "leave the section out: the turns and tools here are measured, and agents only with a model that is \
             loaded here",
        ),
        (
            "max_thinking_tokens",
            rollout.max_thinking_tokens.is_some(),
            "leave it out; a field of the server's own is given with `--extra`",
        ),
        (
            "enable_thinking",
            rollout.enable_thinking,
            "leave it out; a field of the server's own is given with `--extra`, such as \
             `{\"chat_template_kwargs\": {\"enable_thinking\": true}}`",
        ),
    ];
    for (key, is_set, remedy) in refused {
        if is_set {
            return Err(Failure::usage(anyhow::anyhow!(
                "`rollout.{key}` has no effect with `--endpoint`: {remedy}"
            )));
        }
    }
    Ok(())
}

/// Returns what a score depends on: what one file of results is of.
fn asked_for(
    config: &RunConfig,
    endpoint: &EndpointConfig,
    tasks: &str,
) -> serde_json::Result<Map<String, Value>> {
    let (task, rollout) = (&config.task, &config.rollout);
    let mut asked = Map::new();
    let mut set = |name: &str, value: Value| asked.insert(name.to_owned(), value);
    set("model", json!(endpoint.upstream.model));
    set("seed", json!(config.seed));
    set("temperature", json!(endpoint.temperature));
    set("max_new_tokens", json!(rollout.max_new_tokens));
    set("max_total_tokens", json!(endpoint.max_total_tokens));
    set("max_turns", json!(rollout.max_turns));
    set("system_prompt", json!(rollout.system_prompt));
    set("tools", json!(endpoint.use_tools));
    set("extra", json!(endpoint.extra));
    set("tool_output", json!(rollout.tool_output.0));
    set("visible_tests", json!(task.visible_tests));
    set("challenge_tests", json!(task.challenge_tests));
    set("grader", json!(task.grader));
    set("eval_split", json!(task.eval_split));
    add_keys(&mut asked, "reward", serde_json::to_value(&config.reward)?);
    let mut sandbox = serde_json::to_value(&config.sandbox)?;
    remove_keys(&mut sandbox, &["workers", "restore", "audit_every"]);
    add_keys(&mut asked, "sandbox", sandbox);
    for (name, environment) in &config.environments {
        let name = format!("environments.{name}");
        add_server(&mut asked, &format!("{name}.env"), environment.env.as_ref())?;
        let mut environment = serde_json::to_value(environment)?;
        // Of learning; and the tasks themselves have a digest.
        let keys = ["weight", "path", "split", "limit", "curriculum", "env"];
        remove_keys(&mut environment, &keys);
        add_keys(&mut asked, &name, environment);
    }
    add_server(&mut asked, "env", config.env.as_ref())?;
    asked.insert("tasks".to_owned(), Value::from(tasks));
    Ok(asked)
}

/// Adds how the episodes of another server are played, without how it is reached.
fn add_server(
    keys: &mut Map<String, Value>,
    name: &str,
    env: Option<&RemoteConfig>,
) -> serde_json::Result<()> {
    let mut env = serde_json::to_value(env)?;
    let of_network = [
        "headers",
        "tls",
        "connect_timeout",
        "reset_timeout",
        "step_timeout",
        "retry_timeout",
    ];
    remove_keys(&mut env, &of_network);
    add_keys(keys, name, env);
    Ok(())
}

/// Adds each key of a section under its whole name.
fn add_keys(keys: &mut Map<String, Value>, name: &str, value: Value) {
    let Value::Object(fields) = value else {
        keys.insert(name.to_owned(), value);
        return;
    };
    for (key, value) in fields {
        add_keys(keys, &format!("{name}.{key}"), value);
    }
}

fn remove_keys(section: &mut Value, keys: &[&str]) {
    if let Some(fields) = section.as_object_mut() {
        fields.retain(|key, _| !keys.contains(&key.as_str()));
    }
}

/// Measures the model at `url`; returns nothing if it is stopped, with what is done in the file.
pub(super) fn measure(
    args: &EndpointArgs,
    url: &str,
    model: Option<&str>,
    resolved: Resolved,
    printer: &Printer,
) -> Result<Option<(RunConfig, EvalReport, EndpointReport)>, Failure> {
    let Resolved {
        config,
        scratch: _scratch,
        ..
    } = resolved;
    check_config(&config)?;
    let mut endpoint = args.config(url, model, &config)?;
    // A file of results goes on with more of the same tasks, and with fewer.
    let all_tasks = evaluation_tasks(&RunConfig {
        eval: EvalConfig {
            limit: None,
            ..config.eval.clone()
        },
        ..config.clone()
    })
    .map_err(Failure::from)?;
    let digest = all_tasks.digest();
    let tasks = match config.eval.limit {
        None => all_tasks,
        Some(_) => evaluation_tasks(&config).map_err(Failure::from)?,
    };
    let model = endpoint.upstream.model.clone().unwrap_or_default();
    let asked = asked_for(&config, &endpoint, &digest).map_err(Failure::internal)?;
    let mut results = match &args.out {
        Some(path) => ResultsFile::open(path, &asked)?,
        None => ResultsFile::in_memory(),
    };
    let programs = setup::programs(&config, printer)?;
    let workbench = Workbench::for_endpoint(&config, endpoint.use_tools, programs);
    let workbench = workbench.map_err(Failure::from)?;
    let at_once = workbench.episodes_at_once(endpoint.concurrency, 1);
    if at_once < endpoint.concurrency {
        printer.note(&format!(
            "{} at a time, as in training (`rollout.group_size` times `rollout.groups_per_step`): each has a \
             session of the environment's server",
            counted(at_once, "episode")
        ));
        endpoint.concurrency = at_once;
    }
    let seed = CollectionSeed {
        run: config.seed,
        purpose: "eval",
        step: 0,
        draw: 0,
    };
    (workbench.admit(&config, tasks.tasks().iter())).map_err(Failure::from)?;
    let samples = config.eval.samples;
    let requests = tasks.tasks().iter();
    let requests = requests.map(|task| workbench.group(task, samples, seed, 0));
    let stop = match args.out {
        Some(_) => setup::stop_on_signals().map_err(Failure::internal)?,
        // Nothing is kept that an end in good order would save.
        None => Arc::new(AtomicBool::new(false)),
    };
    let mut progress = Progress::new(printer, "measuring", tasks.len() * samples);
    let mut is_first = true;
    let outcome = evaluate_endpoint(
        &endpoint,
        requests.collect(),
        seed,
        &mut results,
        &stop,
        &mut |done| {
            if std::mem::take(&mut is_first) {
                progress.restart_after(done);
            }
            progress.update(done, "");
        },
    );
    progress.finish();
    match outcome {
        Err(error @ EndpointError::Stopped { .. }) => {
            printer.note(&error.to_string());
            return Ok(None);
        }
        outcome => outcome?,
    }
    let usage = results.usage();
    let places: HashMap<&str, usize> = (tasks.tasks().iter().enumerate())
        .map(|(place, task)| (task.id.as_str(), place))
        .collect();
    // The file may hold more tasks and more samples.
    let records = results.into_records(|task_id, sample| {
        places.contains_key(task_id) && usize::try_from(sample).is_ok_and(|sample| sample < samples)
    });
    let mut scores = TaskScore::count(records.iter().map(|record| &record.trajectory));
    // They came in the order of their ends.
    scores.sort_by_key(|score| places.get(score.task_id.as_str()).copied());
    let report = EvalReport::new(scores, &config.eval.k, config.seed);
    if report.samples == 0 {
        return Err(Failure::internal(RunError::NothingScored {
            reason: why_unscored(&records),
        }));
    }
    let is_too_long =
        |record: &&EpisodeRecord| record.trajectory.passed.is_some() && record.usage.requests == 0;
    let too_long = records.iter().filter(is_too_long).count();
    if too_long as u64 == report.samples {
        return Err(Failure::usage(anyhow::anyhow!(
            "no task fits into the context of `{model}`; lower `rollout.max_new_tokens`, which is kept free for \
             each answer"
        )));
    }
    let endpoint = EndpointReport {
        url: shown(url),
        model,
        usage,
        too_long,
        cost: args.cost(usage),
    };
    Ok(Some((config, report, endpoint)))
}

/// Returns why the last episode failed that did.
fn why_unscored(records: &[EpisodeRecord]) -> String {
    let mut reasons = records
        .iter()
        .rev()
        .filter_map(|record| match &record.trajectory.status {
            Status::Failed { reason } => Some(reason.clone()),
            _ => None,
        });
    let unknown = || "the endpoint or the grader failed every episode".to_owned();
    reasons.next().unwrap_or_else(unknown)
}

impl From<EndpointError> for Failure {
    fn from(error: EndpointError) -> Self {
        if error.is_usage() {
            Self::usage(error)
        } else {
            Self::internal(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::trajectory::{TokenTrace, Trajectory, Usage};

    fn config(sets: &[&str]) -> RunConfig {
        RunConfig::from_toml(
            "model.path = 'm'\ntask.path = 't'\neval.temperature = 1",
            sets,
        )
        .unwrap()
    }

    fn asked(config: &RunConfig) -> Map<String, Value> {
        let endpoint = EndpointConfig {
            upstream: UpstreamConfig::new("http://localhost/v1"),
            temperature: config.eval.temperature,
            max_new_tokens: config.rollout.max_new_tokens,
            max_total_tokens: config.rollout.max_total_tokens,
            use_tools: true,
            extra: Map::new(),
            concurrency: 1,
            retries: 0,
        };
        asked_for(config, &endpoint, "digest").unwrap()
    }

    #[test]
    fn a_file_of_results_is_of_all_that_a_score_depends_on() {
        let before = asked(&config(&[]));
        let changed = |set: &str| -> Vec<String> {
            let after = asked(&config(&[set]));
            let keys: BTreeSet<&String> = after.keys().chain(before.keys()).collect();
            let keys = keys
                .into_iter()
                .filter(|key| before.get(*key) != after.get(*key));
            keys.cloned().collect()
        };
        for (set, key) in [
            ("sandbox.fuel=1000000000", "sandbox.fuel"),
            ("sandbox.grade_deadline=1m", "sandbox.grade_deadline"),
            ("rollout.tool_output=8KiB", "tool_output"),
            ("rollout.max_turns=2", "max_turns"),
            ("task.visible_tests=0", "visible_tests"),
            ("task.grader=stdio", "grader"),
            ("task.eval_split=validation", "eval_split"),
        ] {
            assert_eq!(changed(set), [key], "{set}");
        }
        // Each of the terms by its name.
        let terms = before.keys().filter(|key| key.starts_with("reward."));
        assert!(terms.count() > 0, "{before:?}");
        for set in [
            "sandbox.workers=2",
            "eval.samples=4",
            "eval.limit=2",
            "trainer.steps=9",
        ] {
            assert_eq!(changed(set), [""; 0], "{set}");
        }
        let of = |set: &str| {
            let toml = "model.path = 'm'\nenvironments.limit.path = 't'";
            asked(&RunConfig::from_toml(toml, &[set]).unwrap())
        };
        let one = of("environments.limit.weight=1");
        assert_eq!(one, of("environments.limit.weight=2"));
        assert_ne!(one, of("environments.limit.fuel=1000000000"));
    }

    #[test]
    fn what_an_endpoint_cannot_be_held_to_is_refused() {
        check_config(&config(&["rollout.deadline=1m"])).unwrap();
        for (set, key) in [
            ("rollout.agent.command=['a']", "rollout.agent"),
            (
                "rollout.max_thinking_tokens=9",
                "rollout.max_thinking_tokens",
            ),
            ("rollout.enable_thinking=true", "rollout.enable_thinking"),
        ] {
            let error = format!("{:?}", check_config(&config(&[set])).unwrap_err());
            assert!(
                error.contains(key) && error.contains("has no effect"),
                "{error}"
            );
        }
    }

    #[test]
    fn why_no_episode_was_scored_is_told() {
        let record = |status: Status| EpisodeRecord {
            trajectory: Trajectory {
                task_id: "1".to_owned(),
                group: 0,
                sample: 0,
                policy_step: 0,
                segments: Vec::new(),
                messages: Vec::new(),
                turns: Vec::new(),
                trace: TokenTrace::new(),
                reward: None,
                rewards: indexmap::IndexMap::new(),
                passed: None,
                status,
                usage: Usage::default(),
            },
            usage: EndpointUsage::default(),
        };
        let reason = "the server of `[env]` is down".to_owned();
        let (failed, finished) = (Status::Failed { reason }, Status::Finished);
        let told = why_unscored(&[record(failed), record(finished)]);
        assert_eq!(told, "the server of `[env]` is down");
        assert!(why_unscored(&[]).contains("every episode"));
    }

    #[test]
    fn what_was_not_counted_and_what_did_not_fit_is_told() {
        let report = |uncounted, too_long| EndpointReport {
            url: String::new(),
            model: "m".to_owned(),
            usage: EndpointUsage {
                requests: 3,
                uncounted,
                ..EndpointUsage::default()
            },
            too_long,
            cost: Some(0.0),
        };
        let told = report(0, 0).describe();
        assert!(
            !told.contains("usage") && !told.contains("longer"),
            "{told}"
        );
        let told = report(2, 1).describe();
        assert!(
            told.contains("2 of the answers did not say how many tokens"),
            "{told}"
        );
        assert!(
            told.contains("1 episode of tasks that are longer"),
            "{told}"
        );
    }
}
