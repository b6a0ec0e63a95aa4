//! A run's memory: what it is planned to be, and how micro-batches keep to a budget.

use super::RunError;
use super::policy::{Policy, held_in, trainable};
use crate::config::{AdvantageEstimator, RunConfig};
use crate::engine::model::{ModelConfig, Trainable};
use crate::trainer::{MicroBatches, Place, PlanRequest, choose, parameter_count, plan};

/// Parameters above which layers are run again in the backward pass instead of kept: small models
/// fit without, and save a third of the arithmetic.
const RECOMPUTE_ABOVE: usize = 20_000_000;

/// Returns what a run asks of memory.
#[must_use]
pub fn plan_request(config: &RunConfig, model: &ModelConfig, place: Place) -> PlanRequest {
    let held = held_in(&config.model, place);
    PlanRequest {
        place,
        dtype: held.computed_in,
        format: held.format,
        trainable: trainable(config),
        critic: config.trainer.advantage == AdvantageEstimator::Gae,
        recompute: parameter_count(model) > RECOMPUTE_ABOVE,
        micro_batch_tokens: config.trainer.micro_batch_tokens,
        longest: config.rollout.max_total_tokens,
        cache_tokens: config.rollout.max_cache_tokens,
        parts: config.trainer.max_processes,
        iterations: config.trainer.num_iterations,
        overlaps: config.trainer.async_level > 0,
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
            longest: request.longest,
            needed: bytesize::ByteSize(plan(model, &least).peak()),
        }
    })
}

/// Returns what a run with `policy` asks of memory.
pub(super) fn policy_request(config: &RunConfig, policy: &Policy) -> PlanRequest {
    let decoder = &policy.decoder;
    let place = if decoder.is_fused() {
        Place::Cpu
    } else {
        Place::Gpu
    };
    PlanRequest {
        dtype: decoder.dtype(),
        // An adapter that is gone on from has its own shape, a model from scratch is trained whole.
        trainable: match decoder.lora() {
            Some(lora) => Trainable::Lora(lora.clone()),
            None if decoder.variables().is_empty() => Trainable::Frozen,
            None => Trainable::Full,
        },
        ..plan_request(config, decoder.config(), place)
    }
}

/// Returns how a policy's micro-batches go through it.
pub(super) fn micro_batches(
    config: &RunConfig,
    policy: &Policy,
    request: &PlanRequest,
) -> Result<MicroBatches, RunError> {
    let chosen = keep_to_budget(config, policy.decoder.config(), request)?;
    if config.trainer.memory_budget.is_some() {
        let (tokens, recompute) = (chosen.micro_batch_tokens, chosen.recompute);
        tracing::info!(tokens, recompute, "micro-batches within the memory budget");
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::config::{ComputeDtype, Dtype};
    use crate::engine::model::WeightFormat;

    #[test]
    fn a_plan_holds_the_model_as_the_run_does() {
        let folder = tempfile::tempdir().unwrap();
        let starter = crate::run::Starter::unpack(folder.path()).unwrap();
        let model = ModelConfig::from_file(&starter.model().join("config.json")).unwrap();
        let mut config = RunConfig::default();
        for (dtype, place, numbers, format) in [
            (Dtype::Auto, Place::Cpu, DType::F32, WeightFormat::Wide),
            (Dtype::F32, Place::Cpu, DType::F32, WeightFormat::Wide),
            (Dtype::Bf16, Place::Cpu, DType::F32, WeightFormat::Bf16),
            (Dtype::Int8, Place::Cpu, DType::F32, WeightFormat::Int8),
            (Dtype::Auto, Place::Gpu, DType::BF16, WeightFormat::Wide),
            (Dtype::Bf16, Place::Gpu, DType::BF16, WeightFormat::Wide),
            (Dtype::F32, Place::Gpu, DType::F32, WeightFormat::Wide),
        ] {
            config.model.dtype = dtype;
            let request = plan_request(&config, &model, place);
            assert_eq!((request.dtype, request.format), (numbers, format));
            assert!(!request.critic);
        }
        config.model.dtype = Dtype::Auto;
        config.model.compute_dtype = ComputeDtype::Bf16;
        for (place, format) in [
            (Place::Cpu, WeightFormat::Bf16Products),
            (Place::Gpu, WeightFormat::Wide),
        ] {
            assert_eq!(plan_request(&config, &model, place).format, format);
        }
        config.trainer.advantage = AdvantageEstimator::Gae;
        assert!(plan_request(&config, &model, Place::Cpu).critic);
    }
}
