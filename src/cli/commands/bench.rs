//! `wardian bench`: how fast this machine generates, beside a server that is given the same work.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use serde_json::{Value, json};

use super::setup;
use crate::cli::ExitStatus;
use crate::cli::args::{Format, ModelArgs};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::engine::measure::{Prefilled, Workload, prefill, prompt};
use crate::engine::model::Decoder;
use crate::run::RunError;

/// Longest that a server may take for one answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(600);

/// Largest answer that is read.
const MAX_ANSWER_BYTES: u64 = 16 << 20;

/// Arguments of `wardian bench`.
#[derive(Debug, Args)]
pub(in crate::cli) struct BenchArgs {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    /// Measure prompts and decoding of a model, in tokens per second
    Engine(EngineArgs),
}

#[derive(Debug, Args)]
struct EngineArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Where the model runs
    #[arg(long, value_enum, default_value_t)]
    device: BenchDevice,
    /// Sequences at a time; several, with commas, are measured one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 8, 32])]
    batch: Vec<usize>,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value_t = 128)]
    prompt_tokens: usize,
    /// Tokens that each prompt is continued by
    #[arg(long, value_name = "N", default_value_t = 64)]
    new_tokens: usize,
    /// Times that all is measured; the fastest counts
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// OpenAI-compatible server to measure in turn, such as vLLM with the same model:
    /// `http://127.0.0.1:8000/v1`. It must take token ids as prompts and know `ignore_eos`
    #[arg(long, value_name = "URL")]
    endpoint: Option<String>,
    /// How to print the result
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Where a model runs.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum BenchDevice {
    /// On a GPU if there is one
    #[default]
    Auto,
    /// On the CPU
    Cpu,
    /// On the first GPU
    Cuda,
}

/// What is printed as JSON.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    model: String,
    device: &'static str,
    dtype: &'static str,
    prompt_tokens: usize,
    new_tokens: usize,
    rounds: usize,
    endpoint: Option<String>,
    results: Vec<BatchResult>,
}

#[derive(Debug, Serialize)]
struct BatchResult {
    batch: usize,
    ours: Speed,
    peer: Option<Speed>,
    /// Ours by the peer's.
    ratio: Option<Speed>,
}

/// Tokens per second, or ratios of them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Speed {
    /// Of prompts, up to the first token of each.
    prefill: f64,
    /// Of tokens behind them.
    decode: f64,
}

/// The shortest times of one batch.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Times {
    prefill: Duration,
    decode: Duration,
}

impl Times {
    const LONGEST: Self = Self {
        prefill: Duration::MAX,
        decode: Duration::MAX,
    };

    fn shorter(self, other: Self) -> Self {
        Self {
            prefill: self.prefill.min(other.prefill),
            decode: self.decode.min(other.decode),
        }
    }

    fn speed(self, workload: Workload) -> Speed {
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        Speed {
            prefill: rate(workload.sequences * workload.prompt_tokens, self.prefill),
            decode: rate(workload.sequences * workload.steps, self.decode),
        }
    }
}

pub(in crate::cli) fn run(args: &BenchArgs, printer: &Printer) -> Outcome {
    let BenchCommand::Engine(args) = &args.command;
    check(args).map_err(Failure::usage)?;
    let mut model = args.model.clone();
    let device = match args.device {
        BenchDevice::Auto => "auto",
        BenchDevice::Cpu => "cpu",
        BenchDevice::Cuda => "cuda",
    };
    model
        .overrides
        .insert(0, format!("model.device=\"{device}\""));
    let loaded = setup::load_model(&model)?;
    let decoder = &loaded.policy.decoder;
    let peer = args.endpoint.as_deref().map(Peer::new).transpose();
    let peer = peer.map_err(Failure::usage)?;
    let (mut results, mut sent) = (Vec::new(), 0);
    for &batch in &args.batch {
        let workload = Workload {
            sequences: batch,
            prompt_tokens: args.prompt_tokens,
            // The first token comes with the prompt.
            steps: args.new_tokens - 1,
        };
        let (mut ours, mut theirs) = (Times::LONGEST, Times::LONGEST);
        for round in 0..args.rounds {
            printer.redraw(&format!("batch {batch}, round {}", round + 1));
            let times = measure(decoder, workload).map_err(RunError::from);
            ours = ours.shorter(times.map_err(Failure::from)?);
            if let Some(peer) = &peer {
                let vocab_size = decoder.config().vocab_size;
                let times = peer.measure(workload, vocab_size, &mut sent);
                theirs = theirs.shorter(times.map_err(Failure::usage)?);
            }
        }
        printer.redraw("");
        let ours = ours.speed(workload);
        let peer = (peer.as_ref()).map(|_| Peer::times(theirs).speed(workload));
        results.push(BatchResult {
            batch,
            ours,
            peer,
            ratio: peer.map(|peer| Speed {
                prefill: ours.prefill / peer.prefill,
                decode: ours.decode / peer.decode,
            }),
        });
    }
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        model: loaded.name.clone(),
        device: match decoder.device().is_cpu() {
            true => "cpu",
            false => "cuda",
        },
        dtype: decoder.dtype().as_str(),
        prompt_tokens: args.prompt_tokens,
        new_tokens: args.new_tokens,
        rounds: args.rounds,
        endpoint: args.endpoint.clone(),
        results,
    };
    match args.format {
        Format::Json => printer.json(&report),
        Format::Text => printer.data(&table(&report)),
    }
    .map_err(Failure::internal)?;
    Ok(ExitStatus::Success)
}

fn check(args: &EngineArgs) -> anyhow::Result<()> {
    let most = 4096;
    for &batch in &args.batch {
        ensure!(
            (1..=most).contains(&batch),
            "`--batch` is {batch}, not in 1..={most}"
        );
    }
    for (name, value, least) in [
        ("--prompt-tokens", args.prompt_tokens, 1),
        ("--new-tokens", args.new_tokens, 2),
        ("--rounds", args.rounds, 1),
    ] {
        ensure!(value >= least, "`{name}` is {value}, less than {least}");
    }
    Ok(())
}

/// Runs the workload once.
fn measure(
    decoder: &Arc<Decoder>,
    workload: Workload,
) -> Result<Times, crate::engine::EngineError> {
    Ok(Times {
        prefill: prefill(decoder, workload)?,
        decode: Prefilled::new(decoder, workload)?.decode()?,
    })
}

fn table(report: &Report) -> String {
    let mut lines = vec![format!(
        "{} on {} in {}, prompts of {} tokens continued by {}, best of {}, tokens per second:",
        report.model,
        report.device,
        report.dtype,
        report.prompt_tokens,
        report.new_tokens,
        report.rounds
    )];
    let mut columns = vec!["prefill", "decode"];
    if let Some(endpoint) = &report.endpoint {
        lines.push(format!(
            "(peer: {endpoint}; ratios are of ours by the peer's)"
        ));
        columns.extend(["peer", "peer", "ratio", "ratio"]);
    }
    let row = |first: &str, cells: &[String]| {
        let cells: String = cells.iter().map(|cell| format!(" {cell:>12}")).collect();
        format!("{first:>6}{cells}")
    };
    let columns: Vec<String> = columns.into_iter().map(str::to_owned).collect();
    lines.push(row("batch", &columns));
    for result in &report.results {
        let cells = |speed: Speed, digits: usize| {
            [speed.prefill, speed.decode].map(|number| format!("{number:.digits$}"))
        };
        let mut all = cells(result.ours, 0).to_vec();
        all.extend(result.peer.iter().flat_map(|peer| cells(*peer, 0)));
        all.extend(result.ratio.iter().flat_map(|ratio| cells(*ratio, 2)));
        lines.push(row(&result.batch.to_string(), &all));
    }
    lines.join("\n")
}

/// A server that speaks OpenAI's protocol.
#[derive(Debug)]
struct Peer {
    endpoint: String,
    model: String,
    agent: ureq::Agent,
}

impl Peer {
    /// Asks a server for its model.
    fn new(endpoint: &str) -> anyhow::Result<Self> {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(ANSWER_TIMEOUT))
            .max_idle_connections(1024)
            .max_idle_connections_per_host(1024);
        let agent = ureq::Agent::new_with_config(config.build());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let models: Value = agent
            .get(format!("{endpoint}/models"))
            .call()
            .and_then(|mut answer| {
                let body = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES);
                body.read_json()
            })
            .with_context(|| format!("asking `{endpoint}` for its models"))?;
        let model = models["data"][0]["id"].as_str();
        let model = model.with_context(|| format!("`{endpoint}` names no model"))?;
        Ok(Self {
            model: model.to_owned(),
            endpoint,
            agent,
        })
    }

    /// Runs the workload once: prompts up to one token, then other prompts up to all. `decode` is the time
    /// of the latter whole, of which [`Peer::times`] makes that of decoding. No prompt is sent twice, or
    /// the server would find it in its prefix cache; `sent` counts them.
    fn measure(
        &self,
        workload: Workload,
        vocab_size: usize,
        sent: &mut usize,
    ) -> anyhow::Result<Times> {
        let mut complete = |new_tokens| {
            let first = *sent;
            *sent += workload.sequences;
            self.complete(workload, vocab_size, first, new_tokens)
        };
        Ok(Times {
            prefill: complete(1)?,
            decode: complete(workload.steps + 1)?,
        })
    }

    /// Returns the times of prompts and of decoding, of the shortest of each: those of one round may have
    /// been disturbed apart.
    fn times(shortest: Times) -> Times {
        Times {
            decode: shortest.decode.saturating_sub(shortest.prefill),
            ..shortest
        }
    }

    /// Sends all prompts at a time; returns when the last answer is there.
    fn complete(
        &self,
        workload: Workload,
        vocab_size: usize,
        first: usize,
        new_tokens: usize,
    ) -> anyhow::Result<Duration> {
        let start = Instant::now();
        std::thread::scope(|scope| {
            let requests: Vec<_> = (first..first + workload.sequences)
                .map(|index| {
                    let prompt = prompt(index, workload.prompt_tokens, vocab_size);
                    scope.spawn(move || self.complete_one(&prompt, new_tokens))
                })
                .collect();
            for request in requests {
                let answered = request.join();
                answered.map_err(|_| anyhow::anyhow!("a request panicked"))??;
            }
            Ok(start.elapsed())
        })
    }

    fn complete_one(&self, prompt: &[u32], new_tokens: usize) -> anyhow::Result<()> {
        let request = json!({
            "model": self.model,
            "prompt": prompt,
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": true,
        });
        let answer: BTreeMap<String, Value> = self
            .agent
            .post(format!("{}/completions", self.endpoint))
            .send_json(&request)
            .and_then(|mut answer| {
                let body = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES);
                body.read_json()
            })
            .with_context(|| format!("asking `{}` for a completion", self.endpoint))?;
        let found = answer
            .get("usage")
            .and_then(|usage| usage["completion_tokens"].as_u64());
        ensure!(
            found == Some(new_tokens as u64),
            "`{}` generated {} of {new_tokens} tokens",
            self.endpoint,
            found.map_or_else(|| "an unknown number".to_owned(), |found| found.to_string()),
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_tokens_by_the_shortest_times() {
        let workload = Workload {
            sequences: 4,
            prompt_tokens: 100,
            steps: 10,
        };
        let times = |prefill, decode| Times {
            prefill: Duration::from_millis(prefill),
            decode: Duration::from_millis(decode),
        };
        let best = Times::LONGEST
            .shorter(times(200, 50))
            .shorter(times(100, 80));
        assert_eq!(best, times(100, 50));
        let speed = best.speed(workload);
        assert!((speed.prefill - 4000.0).abs() < 1e-6);
        assert!((speed.decode - 800.0).abs() < 1e-6);
    }
}
