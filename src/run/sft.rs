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
use crate::collective::Solo;
use crate::config::RunConfig;
use crate::env::ToolEnvironment;
use crate::eval::EvalReport;
use crate::grader::SubmissionKind;
use crate::rollout::trace_demonstration;
use crate::trainer::{
    AdamW, AdamWConfig, LrSchedule, ScheduleKind, SftConfig, SftTrainer, TrainerError,
};

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

impl SftOptions {
    /// Checks that each value makes sense.
    ///
    /// # Errors
    ///
    /// Fails with the first that does not.
    pub fn check(&self) -> Result<(), RunError> {
        let invalid = |field, reason: String| {
            let error = TrainerError::InvalidConfig { field, reason };
            Err(RunError::from(error))
        };
        for (field, count) in [("steps", self.steps), ("batch_size", self.batch_size)] {
            if count == 0 {
                return invalid(field, "0 teaches nothing, make it at least 1".to_owned());
            }
        }
        let (rate, decay) = (self.learning_rate, self.weight_decay);
        if !(rate > 0.0 && rate <= 0.1) {
            let reason = format!("{rate} is not above 0 and at most 0.1");
            return invalid("learning_rate", reason);
        }
        if !(decay >= 0.0 && decay.is_finite()) {
            return invalid("weight_decay", format!("{decay} is not a number from 0 up"));
        }
        match self.stop_at {
            Some(share) if !(0.0..=1.0).contains(&share) => {
                invalid("stop_at", format!("{share} is not a share from 0 to 1"))
            }
            _ => Ok(()),
        }
    }
}

/// Tunes `policy` on demonstrations and writes the model to `out`.
///
/// Returns the last measurement, if there was one, and the steps done.
///
/// # Errors
///
/// Fails where an option makes no sense, where a demonstration cannot be rendered, where the model cannot be trained or measured,
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
    options.check()?;
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
                &Solo,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_make_no_sense_are_refused_by_name() {
        let sound = SftOptions {
            steps: 1,
            batch_size: 1,
            learning_rate: 1e-4,
            warmup_steps: 0,
            weight_decay: 0.0,
            stop_at: Some(1.0),
            measure_every: 0,
        };
        sound.check().unwrap();
        let refused = |options: SftOptions, field: &str| {
            let error = options.check().unwrap_err();
            assert!(error.to_string().contains(field), "{error}");
            assert!(error.is_usage());
        };
        for learning_rate in [f64::NAN, -1e-4, 0.0, f64::INFINITY] {
            refused(
                SftOptions {
                    learning_rate,
                    ..sound
                },
                "learning_rate",
            );
        }
        for weight_decay in [f64::NAN, -0.1, f64::INFINITY] {
            refused(
                SftOptions {
                    weight_decay,
                    ..sound
                },
                "weight_decay",
            );
        }
        for share in [f64::NAN, -0.1, 1.1] {
            let stop_at = Some(share);
            refused(SftOptions { stop_at, ..sound }, "stop_at");
        }
        refused(SftOptions { steps: 0, ..sound }, "steps");
        refused(
            SftOptions {
                batch_size: 0,
                ..sound
            },
            "batch_size",
        );
    }
}
