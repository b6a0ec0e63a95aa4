//! A run's memory: what it is planned to be, and how micro-batches keep to a budget.

use super::RunError;
use super::policy::{Policy, trainable};
use crate::config::RunConfig;
use crate::engine::model::ModelConfig;
use crate::trainer::{MicroBatches, Place, PlanRequest, choose, parameter_count, plan};

/// Parameters above which layers are run again in the backward pass instead of kept: small models
/// fit without, and save a third of the arithmetic.
const RECOMPUTE_ABOVE: usize = 20_000_000;

/// Returns what a run asks of memory.
#[must_use]
pub fn plan_request(config: &RunConfig, model: &ModelConfig, place: Place) -> PlanRequest {
    PlanRequest {
        place,
        trainable: trainable(config),
        recompute: parameter_count(model) > RECOMPUTE_ABOVE,
        micro_batch_tokens: config.trainer.micro_batch_tokens,
        longest: config.rollout.max_total_tokens,
        cache_tokens: config.rollout.max_cache_tokens,
        parts: config.trainer.max_processes,
        iterations: config.trainer.num_iterations,
    }
}

/// Returns how micro-batches go through a model: as the settings say, or as the budget has it.
///
/// # Errors
///
/// Fails if the budget is below what the least needs.
pub fn keep_to_budget(
    config: &RunConfig,
    model: &ModelConfig,
    request: &PlanRequest,
) -> Result<MicroBatches, RunError> {
    let Some(budget) = config.trainer.memory_budget else {
        return Ok(MicroBatches {
            micro_batch_tokens: request.micro_batch_tokens,
            recompute: request.recompute,
        });
    };
    choose(model, request, budget.as_u64()).ok_or_else(|| {
        let least = PlanRequest {
            recompute: true,
            micro_batch_tokens: request.longest,
            ..request.clone()
        };
        RunError::MemoryBudget {
            budget,
            needed: bytesize::ByteSize(plan(model, &least).peak()),
        }
    })
}

/// Returns how a policy's micro-batches go through it.
pub(super) fn micro_batches(config: &RunConfig, policy: &Policy) -> Result<MicroBatches, RunError> {
    let decoder = &policy.decoder;
    let place = if decoder.is_fused() {
        Place::Cpu
    } else {
        Place::Gpu
    };
    let request = plan_request(config, decoder.config(), place);
    let chosen = keep_to_budget(config, decoder.config(), &request)?;
    if config.trainer.memory_budget.is_some() {
        let (tokens, recompute) = (chosen.micro_batch_tokens, chosen.recompute);
        tracing::info!(tokens, recompute, "micro-batches within the memory budget");
    }
    Ok(chosen)
}
