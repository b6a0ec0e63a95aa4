//! `wardian plan`: where the memory of a run goes, without loading anything.

use std::path::Path;

use bytesize::ByteSize;
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::setup;
use crate::cli::ExitStatus;
use crate::cli::args::{ConfigArgs, Format};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::engine::model::{ModelConfig, WeightFormat};
use crate::hub::{Hub, HubRepo, HubRepoKind};
use crate::run::{keep_to_budget, plan_request};
use crate::trainer::{MemoryPlan, Place, PlanRequest, plan, trained_numbers};

/// Arguments of `wardian plan`.
#[derive(Debug, Args)]
pub(in crate::cli) struct PlanArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Where the model would run
    #[arg(long, value_enum, default_value_t)]
    on: Device,
    /// Memory to keep below, as `trainer.memory_budget`: says how micro-batches would
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// How to print the plan
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Where a model would run.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum Device {
    /// The CPU, in f32
    #[default]
    Cpu,
    /// A GPU, in bf16 unless `model.dtype` says otherwise
    Gpu,
}

/// What is printed as JSON.
#[derive(Serialize)]
struct Report {
    micro_batch_tokens: usize,
    recompute: bool,
    place: Place,
    training_bytes: u64,
    sampling_bytes: u64,
    peak_bytes: u64,
    /// Numbers that are trained.
    trained: u64,
    #[serde(flatten)]
    plan: MemoryPlan,
}

pub(in crate::cli) fn run(args: &PlanArgs, printer: &Printer) -> Outcome {
    let mut config_args = args.config.clone();
    if let Some(memory) = args.memory {
        let budget = format!("trainer.memory_budget={}", memory.as_u64());
        config_args.overrides.push(budget);
    }
    let config = setup::resolve(&config_args)?.config;
    let model = model_config(&config.model.path)?;
    let place = match args.on {
        Device::Cpu => Place::Cpu,
        Device::Gpu => Place::Gpu,
    };
    let request = plan_request(&config, &model, place);
    let chosen = keep_to_budget(&config, &model, &request).map_err(Failure::from)?;
    let request = PlanRequest {
        micro_batch_tokens: chosen.micro_batch_tokens,
        recompute: chosen.recompute || place == Place::Gpu,
        ..request
    };
    let plan = plan(&model, &request);
    let trained = trained_numbers(&model, &request.trainable);
    if args.format == Format::Json {
        let report = Report {
            micro_batch_tokens: request.micro_batch_tokens,
            recompute: request.recompute,
            place,
            training_bytes: plan.training(),
            sampling_bytes: plan.sampling(),
            peak_bytes: plan.peak(),
            trained,
            plan,
        };
        printer.json(&report).map_err(Failure::internal)?;
        return Ok(ExitStatus::Success);
    }
    printer
        .data(&table(&plan, &request, trained))
        .map_err(Failure::internal)?;
    Ok(ExitStatus::Success)
}

/// Reads `config.json`, which is given, in a folder that is, or in a repository of the hub.
fn model_config(source: &str) -> Result<ModelConfig, Failure> {
    let path = Path::new(source);
    let file = match source.parse::<HubRepo>() {
        _ if path.is_dir() => path.join("config.json"),
        _ if path
            .extension()
            .is_some_and(|extension| extension == "json") =>
        {
            path.to_owned()
        }
        Ok(repository) if !path.exists() => Hub::from_env()
            .file(&repository, HubRepoKind::Model, "config.json")
            .map_err(|error| {
                let here = format!(
                    "`{source}` is no folder and no file here, and not to be had from the hub"
                );
                Failure::usage(anyhow::Error::new(error).context(here))
            })?,
        _ => {
            return Err(Failure::usage(anyhow::anyhow!(
                "`{source}` is no folder, no `config.json` and no repository of the hub; a plan reads nothing else"
            )));
        }
    };
    ModelConfig::from_file(&file).map_err(Failure::usage)
}

fn table(plan: &MemoryPlan, request: &PlanRequest, trained: u64) -> String {
    let again = if request.recompute {
        "layers run again"
    } else {
        "layers kept"
    };
    let kept = match request.format {
        WeightFormat::Wide => String::new(),
        WeightFormat::Bf16Products => " with products in bf16".to_owned(),
        format => format!(" with {} weights", format.name()),
    };
    let place = match request.place {
        Place::Cpu => "the CPU",
        Place::Gpu => "a GPU",
    };
    let mut lines = vec![format!(
        "{}{kept} on {place}, micro-batches of {} tokens, {again}, {trained} trained numbers",
        request.dtype.as_str(),
        request.micro_batch_tokens.max(request.longest),
    )];
    let gibibytes = |bytes: u64| bytes as f64 / bytesize::GIB as f64;
    for (what, bytes) in [
        ("weights", plan.weights),
        ("adapter and panels", plan.adapter),
        ("optimizer", plan.optimizer),
        ("value head", plan.critic),
        ("program", plan.program),
        ("training: gradients", plan.gradients),
        ("training: activations", plan.activations),
        ("training: one layer", plan.workspace),
        ("training: logits", plan.logits),
        ("sampling: keys and values", plan.cache),
        ("peak while training", plan.training()),
        ("peak while sampling", plan.sampling()),
        ("peak", plan.peak()),
    ] {
        lines.push(format!("{what:<26} {:>9.3} GiB", gibibytes(bytes)));
    }
    lines.join("\n")
}
