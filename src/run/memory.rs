//! A run's memory: what it is planned to be, and how micro-batches keep to a budget, by calculation and
//! by measurement.

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use super::RunError;
use super::policy::{Policy, held_in, trainable};
use crate::config::{AdvantageEstimator, RunConfig};
use crate::engine::PeakMemory;
use crate::engine::model::{ModelConfig, Trainable};
use crate::trainer::{
    MemoryGuard, MicroBatches, Place, PlanRequest, choose, parameter_count, plan,
};

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
            needed: ByteSize(plan(model, &least).peak()),
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

/// Returns what holds a policy's passes to the budget by measurement, or sees that a GPU has no room.
pub(super) fn memory_guard(config: &RunConfig, policy: &Policy) -> Option<MemoryGuard> {
    if !policy.decoder.device().is_cpu() {
        return Some(MemoryGuard::of_device());
    }
    let budget = config.trainer.memory_budget?;
    if PeakMemory::restart().is_none() {
        tracing::warn!(
            "the system does not tell what a pass takes, so the memory budget is kept by calculation alone"
        );
    }
    Some(MemoryGuard::new(budget.as_u64(), Box::new(PeakMemory)))
}

/// How micro-batches go through the model since a pass took more than the budget: a run that goes on
/// does not find out again, which it might at another step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MeasuredChoice {
    /// What was chosen by calculation.
    planned: MicroBatches,
    budget: Option<u64>,
    measured: MicroBatches,
}

impl MeasuredChoice {
    /// Returns what is to be remembered where measuring changed what was planned.
    pub(super) fn new(
        config: &RunConfig,
        planned: MicroBatches,
        measured: MicroBatches,
    ) -> Option<Self> {
        (planned != measured).then(|| Self {
            planned,
            budget: config.trainer.memory_budget.map(|budget| budget.as_u64()),
            measured,
        })
    }

    /// Returns what was found for a run that is planned so; nothing if it has other settings now.
    pub(super) fn of(&self, config: &RunConfig, planned: MicroBatches) -> Option<MicroBatches> {
        let again = Self::new(config, planned, self.measured);
        (again.as_ref() == Some(self)).then_some(self.measured)
    }
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

    #[test]
    fn what_was_found_holds_for_the_settings_that_it_was_found_with() {
        let mut config = RunConfig::default();
        config.trainer.memory_budget = Some(ByteSize::gib(8));
        let choice = |micro_batch_tokens| MicroBatches {
            micro_batch_tokens,
            recompute: false,
        };
        assert_eq!(MeasuredChoice::new(&config, choice(64), choice(64)), None);
        let found = MeasuredChoice::new(&config, choice(64), choice(32)).unwrap();
        let text = serde_json::to_string(&found).unwrap();
        let found: MeasuredChoice = serde_json::from_str(&text).unwrap();
        assert_eq!(found.of(&config, choice(64)), Some(choice(32)));
        // Another plan, or another budget, is measured anew.
        assert_eq!(found.of(&config, choice(128)), None);
        config.trainer.memory_budget = Some(ByteSize::gib(9));
        assert_eq!(found.of(&config, choice(64)), None);
    }
}
