//! `wardian eval --endpoint`: the model is elsewhere, tasks, tools and graders are here.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::runtime::load_sandboxes;
use super::serving::secret;
use super::setup::{self, Resolved};
use crate::cli::args::{parse_duration, require_http};
use crate::cli::failure::Failure;
use crate::cli::printer::Printer;
use crate::cli::progress::Progress;
use crate::config::RunConfig;
use crate::eval::endpoint::{
    EndpointConfig, EndpointError, EndpointUsage, ResultsFile, evaluate_endpoint, only_model,
};
use crate::eval::{EvalReport, TaskScore};
use crate::http::tls::TlsFiles;
use crate::proxy::UpstreamConfig;
use crate::rollout::CollectionSeed;
use crate::run::{RunError, Workbench, evaluation_tasks};

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
    #[serde(flatten)]
    usage: EndpointUsage,
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
            prompt_tokens,
            completion_tokens,
        } = self.usage;
        let cost = (self.cost).map_or_else(String::new, |cost| format!(", for {cost:.4}"));
        format!(
            "{} answered {requests} requests ({retries} made again) with {prompt_tokens} tokens of prompts and \
             {completion_tokens} of answers{cost}",
            self.model
        )
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
        let mut upstream = UpstreamConfig {
            api_key: secret(self.api_key_env.as_deref()).map_err(Failure::usage)?,
            tls: TlsFiles {
                certificate: self.tls_cert.clone(),
                key: self.tls_key.clone(),
                ca: self.tls_ca.clone(),
            },
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
    let endpoint = args.config(url, model, &config)?;
    let tasks = evaluation_tasks(&config).map_err(Failure::from)?;
    let model = endpoint.upstream.model.clone().unwrap_or_default();
    let mut asked = json!({
        "model": model,
        "tasks": config.task.eval_path.as_ref().unwrap_or(&config.task.path),
        "seed": config.seed,
        "temperature": endpoint.temperature,
        "max_new_tokens": config.rollout.max_new_tokens,
        "max_total_tokens": endpoint.max_total_tokens,
        "max_turns": config.rollout.max_turns,
        "system_prompt": config.rollout.system_prompt,
        "tools": endpoint.use_tools,
        "extra": endpoint.extra,
    });
    if let Some(env) = &config.env {
        asked["environment"] = json!({"url": env.url, "episodes": env.episodes});
    }
    let mut results = match (&args.out, asked.as_object()) {
        (Some(path), Some(asked)) => ResultsFile::open(path, asked)?,
        _ => ResultsFile::in_memory(),
    };
    let sandboxes = load_sandboxes(&config.sandbox, printer)?;
    let graders = setup::graders(&config, &sandboxes);
    let workbench = Workbench::for_endpoint(
        &config,
        endpoint.use_tools,
        sandboxes.tools,
        Arc::new(graders),
    )
    .map_err(Failure::from)?;
    let seed = CollectionSeed {
        run: config.seed,
        purpose: "eval",
        step: 0,
        draw: 0,
    };
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
    let records = results.into_records();
    let mut usage = EndpointUsage::default();
    for record in &records {
        usage.add(record.usage);
    }
    let mut scores = TaskScore::count(records.iter().map(|record| &record.trajectory));
    // They came in the order of their ends.
    let places: HashMap<&str, usize> = (tasks.tasks().iter().enumerate())
        .map(|(place, task)| (task.id.as_str(), place))
        .collect();
    scores.sort_by_key(|score| places.get(score.task_id.as_str()).copied());
    let report = EvalReport::new(scores, &config.eval.k, config.seed);
    if report.samples == 0 {
        return Err(Failure::internal(RunError::NothingScored {
            reason: "the endpoint or the grader failed every episode".to_owned(),
        }));
    }
    let endpoint = EndpointReport {
        url: url.to_owned(),
        model,
        usage,
        cost: args.cost(usage),
    };
    Ok(Some((config, report, endpoint)))
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
