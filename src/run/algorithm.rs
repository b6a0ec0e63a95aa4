//! From a run file's keys to the trainer's settings.

use super::RunError;
use super::memory::{micro_batches, policy_request};
use super::policy::Policy;
use crate::config::{self, LossType, RunConfig, TrainerConfig};
use crate::grader::RewardTerms;
use crate::trainer::{
    AdamWConfig, AdvantageConfig, Aggregation, CorrectionLevel, Discount, Estimator, GrpoConfig,
    KlEstimator, LossConfig, LrSchedule, OutOfBounds, OverlongPenalty, PassConfig, RatioLevel,
    RewardScale, SamplerCorrection, ScheduleKind, Surrogate, TokenLevel, ValueConfig, ValueHead,
};

pub(super) fn grpo_config(config: &RunConfig, policy: &Policy) -> Result<GrpoConfig, RunError> {
    let trainer = &config.trainer;
    let loss = loss_config(config);
    let micro = micro_batches(config, policy, &policy_request(config, policy))?;
    Ok(GrpoConfig {
        advantage: advantage_config(trainer),
        decoupled: match trainer.reward_aggregation {
            config::RewardAggregation::Sum => None,
            config::RewardAggregation::Gdpo => Some(part_weights(&config.reward)),
        },
        token_level: token_level(trainer),
        overlong: trainer.overlong_limit.map(|limit| OverlongPenalty {
            limit,
            margin: trainer.overlong_margin,
            weight: trainer.overlong_weight,
        }),
        reward_kl_coef: if trainer.kl_in_reward {
            trainer.beta
        } else {
            0.0
        },
        recompute_old: loss.correction.is_some(),
        loss,
        pass: PassConfig {
            temperature: config.rollout.temperature,
            recompute: micro.recompute,
            dropout_seed: Some(config.seed),
        },
        micro_batch_tokens: micro.micro_batch_tokens,
        iterations: trainer.num_iterations,
        // Where it is only to be told of, it must not keep the update away.
        max_kl_sample_train: match config.watch.drift {
            config::Response::Warn => f64::INFINITY,
            _ => trainer.max_kl_sample_train,
        },
        max_ratio: match config.watch.ratio {
            config::Response::Warn => f64::INFINITY,
            _ => config.watch.max_ratio,
        },
        mask_truncated: trainer.mask_truncated,
        parts: trainer.max_processes,
    })
}

fn token_level(trainer: &TrainerConfig) -> Option<TokenLevel> {
    let gamma = trainer.gamma;
    match trainer.advantage {
        config::AdvantageEstimator::Gae => Some(TokenLevel::Gae(Discount {
            gamma,
            lambda: trainer.gae_lambda,
        })),
        config::AdvantageEstimator::ReinforcePlusPlus => Some(TokenLevel::Returns { gamma }),
        _ => None,
    }
}

/// Returns the value head of a run that needs one.
pub(super) fn critic(config: &RunConfig, policy: &Policy) -> Option<ValueHead> {
    let trainer = &config.trainer;
    let value = ValueConfig {
        learning_rate: trainer.value_learning_rate,
        clip: trainer.value_clip,
        trunk_coef: trainer.value_trunk_coef,
    };
    let width = policy.decoder.config().hidden_size;
    (trainer.advantage == config::AdvantageEstimator::Gae)
        .then(|| ValueHead::new(width, value, optimizer_config(config)))
}

pub(super) fn advantage_config(trainer: &TrainerConfig) -> AdvantageConfig {
    use config::AdvantageEstimator as Named;
    AdvantageConfig {
        estimator: match trainer.advantage {
            Named::Group => Estimator::Group,
            Named::Rloo => Estimator::Rloo,
            Named::LeaveOneOut => Estimator::LeaveOneOut,
            Named::MaxRl => Estimator::MaxRl,
            Named::ReinforcePlusPlusBaseline => Estimator::ReinforcePlusPlusBaseline,
            // Their advantages are those of tokens; groups are for statistics alone.
            Named::ReinforcePlusPlus | Named::Gae => Estimator::Group,
        },
        scale: match trainer.scale_rewards {
            config::ScaleRewards::Group => RewardScale::Group,
            config::ScaleRewards::Batch => RewardScale::Batch,
            config::ScaleRewards::None => RewardScale::None,
        },
        eps: trainer.advantage_epsilon,
        ..AdvantageConfig::default()
    }
}

/// Returns the weights of the parts that a reward can have.
pub(super) fn part_weights(terms: &RewardTerms) -> Vec<(String, f64)> {
    let own = [
        "passed",
        "fuel",
        "test_fraction",
        "loads",
        "format",
        "length",
    ];
    let names = own.into_iter().map(str::to_owned);
    (names.chain(terms.named.keys().cloned()))
        .map(|name| {
            let weight = terms.weight(&name);
            (name, weight)
        })
        .filter(|(_, weight)| *weight != 0.0)
        .collect()
}

fn loss_config(config: &RunConfig) -> LossConfig {
    let trainer = &config.trainer;
    let clipped = Surrogate::Clipped {
        low: 1.0 - trainer.clip_low,
        high: 1.0 + trainer.clip_high,
        dual_clip: trainer.dual_clip,
    };
    let (surrogate, aggregation) = match trainer.loss {
        LossType::Grpo | LossType::Gspo => (clipped, Aggregation::Grpo),
        LossType::Dapo | LossType::Bnpo => (clipped, Aggregation::Dapo),
        LossType::DrGrpo => (clipped, Aggregation::DrGrpo),
        LossType::Cispo => {
            let (low, high) = (trainer.cispo_min, trainer.cispo_max);
            (Surrogate::Cispo { low, high }, Aggregation::Dapo)
        }
        LossType::Sapo => {
            let surrogate = Surrogate::Sapo {
                tau_positive: trainer.sapo_tau_positive,
                tau_negative: trainer.sapo_tau_negative,
            };
            (surrogate, Aggregation::Grpo)
        }
        LossType::Dppo => {
            let surrogate = Surrogate::Dppo {
                low: trainer.dppo_threshold,
                high: trainer.dppo_threshold,
                kl: trainer.dppo_kl,
            };
            (surrogate, Aggregation::Dapo)
        }
    };
    LossConfig {
        surrogate,
        ratio_level: match trainer.loss {
            LossType::Gspo => RatioLevel::Sequence,
            _ => RatioLevel::Token,
        },
        aggregation,
        correction: correction(trainer),
        off_policy_threshold: trainer.off_policy_threshold,
        kl_coef: if trainer.kl_in_reward {
            0.0
        } else {
            trainer.beta
        },
        kl_estimator: match trainer.kl_estimator {
            config::KlEstimator::K1 => KlEstimator::K1,
            config::KlEstimator::K2 => KlEstimator::K2,
            config::KlEstimator::K3 => KlEstimator::K3,
        },
        kl_bias_correction: trainer.kl_bias_correction,
        entropy_coef: trainer.entropy_coef,
        max_completion_length: config.rollout.max_total_tokens,
        ..LossConfig::default()
    }
}

fn correction(trainer: &TrainerConfig) -> Option<SamplerCorrection> {
    use config::SamplerCorrection as Named;
    let (level, out_of_bounds) = match trainer.sampler_correction {
        Named::Off => return None,
        Named::TokenTruncate => (CorrectionLevel::Token, OutOfBounds::Truncate),
        Named::TokenMask => (CorrectionLevel::Token, OutOfBounds::Mask),
        Named::SequenceTruncate => (CorrectionLevel::Sequence, OutOfBounds::Truncate),
        Named::SequenceMask => (CorrectionLevel::Sequence, OutOfBounds::Mask),
        Named::GeometricMask => (CorrectionLevel::Geometric, OutOfBounds::Mask),
    };
    Some(SamplerCorrection {
        level,
        out_of_bounds,
        max: trainer.sampler_correction_max,
        min: trainer.sampler_correction_min,
    })
}

pub(super) fn schedule(config: &RunConfig) -> LrSchedule {
    LrSchedule {
        learning_rate: config.trainer.learning_rate,
        warmup_steps: usize::try_from(config.trainer.warmup_steps).unwrap_or(usize::MAX),
        total_steps: usize::try_from(config.trainer.steps).unwrap_or(usize::MAX),
        kind: match config.trainer.lr_schedule {
            config::LrSchedule::Constant => ScheduleKind::Constant,
            config::LrSchedule::Linear => ScheduleKind::Linear,
            config::LrSchedule::Cosine => ScheduleKind::Cosine,
        },
    }
}

pub(super) fn optimizer_config(config: &RunConfig) -> AdamWConfig {
    let trainer = &config.trainer;
    AdamWConfig {
        beta1: trainer.adam_beta1,
        beta2: trainer.adam_beta2,
        eps: trainer.adam_epsilon,
        weight_decay: trainer.weight_decay,
        max_grad_norm: Some(trainer.max_grad_norm),
    }
}
