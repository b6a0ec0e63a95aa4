//! Supervised fine-tuning from demonstrations to a saved model.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use super::algorithm::optimizer_config;
use super::evaluate::evaluate;
use super::memory::micro_batches;
use super::train::new_engine;
use super::workbench::evaluation_tasks;
use super::{Observer, Policy, RunError, RunEvent, Workbench};
use crate::chat::Message;
use crate::config::RunConfig;
use crate::env::ToolEnvironment;
use crate::eval::EvalReport;
use crate::grader::SubmissionKind;
use crate::rollout::trace_demonstration;
use crate::trainer::{AdamW, AdamWConfig, LrSchedule, ScheduleKind, SftConfig, SftTrainer};

/// How demonstrations are imitated.
#[derive(Debug, Clone, PartialEq)]
pub struct SftOptions {
    /// Most optimizer steps.
    pub steps: usize,
    /// Demonstrations of one step.
    pub batch_size: usize,
    /// Highest step size; it falls along half a cosine.
    pub learning_rate: f64,
    /// Steps over which the step size rises.
    pub warmup_steps: usize,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Stop at the first measurement that passes this share of samples; `None` runs all steps.
    pub stop_at: Option<f64>,
    /// Steps between measurements on the evaluation tasks; 0 measures never.
    pub measure_every: usize,
}

/// Tunes `policy` on demonstrations and writes the model to `out`.
///
/// Returns the last measurement, if there was one, and the steps done.
///
/// # Errors
///
/// Fails where a demonstration cannot be rendered, where the model cannot be trained or measured,
/// or where `out` cannot be written.
pub fn sft(
    config: &RunConfig,
    options: &SftOptions,
    demonstrations: &[Vec<Message>],
    policy: &Policy,
    workbench: &Workbench,
    out: &Path,
    observer: &mut Observer<'_>,
) -> Result<(Option<EvalReport>, usize), RunError> {
    let tools = if workbench.uses_tools() {
        ToolEnvironment::tool_specs(SubmissionKind::Code)
    } else {
        Vec::new()
    };
    let mut traces = Vec::with_capacity(demonstrations.len());
    for (index, messages) in demonstrations.iter().enumerate() {
        traces.push(trace_demonstration(
            messages,
            &tools,
            &policy.template,
            &policy.tokenizer,
            workbench.render(),
            &(index + 1).to_string(),
        )?);
    }
    let optimizer = AdamWConfig {
        weight_decay: options.weight_decay,
        ..optimizer_config(config)
    };
    let micro = micro_batches(config, policy)?;
    let mut trainer = SftTrainer::new(
        &traces,
        SftConfig {
            batch_size: options.batch_size,
            micro_batch_tokens: micro.micro_batch_tokens,
            recompute: micro.recompute,
            seed: config.seed,
        },
        LrSchedule {
            learning_rate: options.learning_rate,
            warmup_steps: options.warmup_steps,
            total_steps: options.steps,
            kind: ScheduleKind::Cosine,
        },
        AdamW::new(&policy.decoder, optimizer)?,
    )?;
    let tasks = (options.measure_every > 0)
        .then(|| evaluation_tasks(config))
        .transpose()?;
    let mut engine = new_engine(config, policy)?;
    let never = AtomicBool::new(false);
    let mut last = None;
    let mut done = 0;
    for step in 1..=options.steps {
        let metrics = trainer.step(&policy.decoder)?;
        done = step;
        observer(RunEvent::SftStep {
            step,
            loss: metrics.loss,
        });
        let Some(tasks) = &tasks else { continue };
        if step % options.measure_every == 0 || step == options.steps {
            let report = evaluate(
                config,
                policy,
                workbench,
                &mut engine,
                tasks,
                &never,
                observer,
            )?;
            observer(RunEvent::Evaluated {
                step,
                report: &report,
            });
            let is_enough = options
                .stop_at
                .is_some_and(|share| report.pass_at_1 >= share);
            last = Some(report);
            if is_enough {
                break;
            }
        }
    }
    policy.save(out)?;
    Ok((last, done))
}
