//! Supervised fine-tuning from demonstrations or episodes to a saved model.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::algorithm::optimizer_config;
use super::evaluate::{by_environment, evaluate};
use super::memory::{memory_guard, micro_batches, policy_request};
use super::train::new_engine;
use super::workbench::evaluation_tasks;
use super::{Observer, Policy, RunError, RunEvent, Workbench};
use crate::chat::Message;
use crate::collective::Solo;
use crate::config::RunConfig;
use crate::eval::EvalReport;
use crate::rollout::trace_demonstration;
use crate::trainer::{
    AdamW, AdamWConfig, LrSchedule, PlanRequest, ScheduleKind, SftConfig, SftTrainer, TrainerError,
};
use crate::trajectory::TokenTrace;

/// How demonstrations are imitated.
#[derive(Debug, Clone)]
pub struct SftOptions<'a> {
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
    /// Once true, the model is written as it is after the step that is being done.
    pub stop: &'a AtomicBool,
}

/// What fine-tuning came to.
#[derive(Debug, Clone)]
pub struct SftOutcome {
    /// The last measurement, if there was one.
    pub report: Option<EvalReport>,
    /// Steps done.
    pub steps: usize,
    /// Whether it was asked to stop before its end.
    pub is_stopped: bool,
}

impl SftOptions<'_> {
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

/// Lays demonstrations out as `policy` would have sampled them.
///
/// # Errors
///
/// Fails where one cannot be rendered.
pub fn demonstration_traces(
    demonstrations: &[Vec<Message>],
    policy: &Policy,
    workbench: &Workbench,
) -> Result<Vec<TokenTrace>, RunError> {
    let tools = workbench.demonstrated_tools();
    let mut traces = Vec::with_capacity(demonstrations.len());
    for (index, messages) in demonstrations.iter().enumerate() {
        let trace = trace_demonstration(
            messages,
            &tools,
            &policy.template,
            &policy.tokenizer,
            workbench.render(),
            &(index + 1).to_string(),
        )?;
        check_length(policy, &trace, || format!("demonstration {}", index + 1))?;
        traces.push(trace);
    }
    Ok(traces)
}

/// Refuses what the model has no positions for.
pub(super) fn check_length(
    policy: &Policy,
    trace: &TokenTrace,
    name: impl FnOnce() -> String,
) -> Result<(), RunError> {
    let (length, limit) = (trace.len(), policy.decoder.config().max_position_embeddings);
    if length <= limit {
        return Ok(());
    }
    Err(RunError::ExampleTooLong {
        name: name(),
        length,
        limit,
    })
}

/// Tunes `policy` on traces, whose sampled tokens it imitates, and writes the model to `out`.
///
/// # Errors
///
/// Fails where an option makes no sense, where the model cannot be trained or measured, or where `out`
/// cannot be written.
pub fn sft(
    config: &RunConfig,
    options: &SftOptions<'_>,
    traces: &[TokenTrace],
    policy: &Policy,
    workbench: &Workbench,
    out: &Path,
    observer: &mut Observer<'_>,
) -> Result<SftOutcome, RunError> {
    options.check()?;
    let optimizer = AdamWConfig {
        weight_decay: options.weight_decay,
        ..optimizer_config(config)
    };
    let request = memory_request(policy_request(config, policy), traces, options);
    let micro = micro_batches(config, policy, &request)?;
    let mut trainer = SftTrainer::new(
        traces,
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
    )?
    .with_memory_guard(memory_guard(config, policy));
    let mut measured = (options.measure_every > 0)
        .then(|| Ok::<_, RunError>((evaluation_tasks(config)?, new_engine(config, policy)?)))
        .transpose()?;
    let mut outcome = SftOutcome {
        report: None,
        steps: 0,
        is_stopped: false,
    };
    let is_asked_to_stop = || options.stop.load(Ordering::Relaxed);
    for step in 1..=options.steps {
        let metrics = trainer.step(&policy.decoder)?;
        outcome.steps = step;
        for change in trainer.take_memory_changes() {
            let message = change.to_string();
            observer(RunEvent::Memory {
                step,
                message: &message,
            });
        }
        observer(RunEvent::SftStep {
            step,
            loss: metrics.loss,
        });
        let is_due = step % options.measure_every.max(1) == 0 || step == options.steps;
        if let Some((tasks, engine)) = measured.as_mut().filter(|_| is_due) {
            let stop = options.stop;
            let report = evaluate(
                config, policy, workbench, engine, tasks, stop, &Solo, observer,
            );
            let report = match report {
                Err(error) if error.is_stop() => {
                    outcome.is_stopped = true;
                    break;
                }
                report => report?,
            };
            observer(RunEvent::Evaluated {
                step,
                report: &report,
                environments: &by_environment(config, &report),
            });
            let pass_at_1 = report.pass_at_1;
            outcome.report = Some(report);
            if options.stop_at.is_some_and(|share| pass_at_1 >= share) {
                break;
            }
        }
        if step < options.steps && is_asked_to_stop() {
            outcome.is_stopped = true;
            break;
        }
    }
    policy.save(out)?;
    Ok(outcome)
}

/// Returns what imitation asks of memory: its sequences are the demonstrations, whatever the limits of
/// episodes, no value is learned, and keys and values are held only to measure.
fn memory_request(
    run: PlanRequest,
    traces: &[TokenTrace],
    options: &SftOptions<'_>,
) -> PlanRequest {
    PlanRequest {
        longest: traces.iter().map(TokenTrace::len).max().unwrap_or(0),
        cache_tokens: if options.measure_every > 0 {
            run.cache_tokens
        } else {
            0
        },
        critic: false,
        // Sums of gradients are of one process here, and a step has one pass and no episodes.
        parts: 1,
        iterations: 1,
        overlaps: false,
        ..run
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::engine::model::{Trainable, WeightFormat};
    use crate::trainer::Place;

    fn options(stop: &AtomicBool) -> SftOptions<'_> {
        SftOptions {
            steps: 1,
            batch_size: 1,
            learning_rate: 1e-4,
            warmup_steps: 0,
            weight_decay: 0.0,
            stop_at: Some(1.0),
            measure_every: 0,
            stop,
        }
    }

    #[test]
    fn memory_is_planned_for_the_demonstrations() {
        let never = AtomicBool::new(false);
        let trace = |tokens: usize| {
            let mut trace = TokenTrace::new();
            trace.push_prompt(&vec![1; tokens]).unwrap();
            trace
        };
        let traces = [trace(70), trace(9000), trace(3)];
        let run = PlanRequest {
            place: Place::Cpu,
            dtype: DType::F32,
            format: WeightFormat::Wide,
            trainable: Trainable::Full,
            critic: true,
            recompute: false,
            micro_batch_tokens: 1024,
            longest: 4096,
            cache_tokens: 65_536,
            parts: 8,
            iterations: 2,
            overlaps: true,
        };
        let planned = memory_request(run.clone(), &traces, &options(&never));
        let expected = PlanRequest {
            longest: 9000,
            cache_tokens: 0,
            critic: false,
            parts: 1,
            iterations: 1,
            overlaps: false,
            ..run.clone()
        };
        assert_eq!(planned, expected);
        let measured = SftOptions {
            measure_every: 5,
            ..options(&never)
        };
        let planned = memory_request(run, &traces[..1], &measured);
        assert_eq!((planned.longest, planned.cache_tokens), (70, 65_536));
    }

    #[test]
    fn options_that_make_no_sense_are_refused_by_name() {
        let never = AtomicBool::new(false);
        let sound = options(&never);
        sound.check().unwrap();
        let refused = |options: SftOptions<'_>, field: &str| {
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
