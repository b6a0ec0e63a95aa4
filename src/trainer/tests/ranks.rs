//! Steps that several processes share, and steps that are refused.

use std::sync::atomic::AtomicBool;

use super::*;
use crate::collective::tests_support::{QUICK, launches, on_ranks};
use crate::collective::{Collective, Solo};
use crate::rollout::RolloutGroup;
use crate::trajectory::{Status, TokenTrace, Trajectory, Usage};

/// Groups whose episodes the toy might have sampled, of several lengths; one is flat.
pub(super) fn groups() -> Vec<RolloutGroup> {
    let episode = |group: u32, sample: u32| {
        let tokens = random_tokens(
            3 + (group as usize * 2 + sample as usize) % 5,
            19,
            u64::from(group * 7 + sample),
        );
        let logprobs: Vec<f32> = (0..tokens.len())
            .map(|i| -2.5 + 0.3 * ((i as f32) + sample as f32).sin())
            .collect();
        let mut trace = TokenTrace::new();
        trace.push_prompt(&[1, group, 2]).unwrap();
        trace.push_sampled(&tokens, &logprobs).unwrap();
        let reward = if group == 2 {
            1.0
        } else {
            f64::from((sample * 5 + group) % 3)
        };
        Trajectory {
            task_id: group.to_string(),
            group: group.into(),
            sample,
            policy_step: 0,
            segments: Vec::new(),
            messages: Vec::new(),
            turns: Vec::new(),
            trace,
            // One episode that we failed.
            reward: ((group, sample) != (1, 2)).then_some(reward),
            rewards: [
                ("passed".to_owned(), reward),
                ("format".to_owned(), f64::from(sample % 2)),
            ]
            .into(),
            passed: None,
            status: if sample == 3 {
                Status::Truncated
            } else {
                Status::Finished
            },
            usage: Usage::default(),
        }
    };
    (0..5)
        .map(|group| RolloutGroup {
            task_id: group.to_string(),
            trajectories: (0..4).map(|sample| episode(group, sample)).collect(),
        })
        .collect()
}

pub(super) fn config() -> GrpoConfig {
    GrpoConfig {
        advantage: AdvantageConfig::default(),
        decoupled: None,
        token_level: None,
        overlong: None,
        reward_kl_coef: 0.0,
        loss: LossConfig::default(),
        pass: PassConfig::default(),
        micro_batch_tokens: 20,
        iterations: 1,
        recompute_old: false,
        max_kl_sample_train: f64::INFINITY,
        max_ratio: f64::INFINITY,
        mask_truncated: false,
        parts: 4,
    }
}

pub(super) fn trainer(config: GrpoConfig, decoder: &Decoder) -> GrpoTrainer {
    let schedule = LrSchedule {
        learning_rate: 1e-2,
        warmup_steps: 0,
        total_steps: 100,
        kind: ScheduleKind::Constant,
    };
    let value = ValueConfig {
        learning_rate: 0.05,
        clip: 0.2,
        trunk_coef: 0.1,
    };
    let optimizer = AdamW::new(decoder, AdamWConfig::default()).unwrap();
    let head = ValueHead::new(decoder.config().hidden_size, value, AdamWConfig::default());
    let critic = matches!(config.token_level, Some(TokenLevel::Gae(_))).then_some(head);
    GrpoTrainer::new(config, schedule, optimizer).with_critic(critic)
}

/// All numbers that a trainer changes.
#[derive(Debug, PartialEq)]
pub(super) struct Bits {
    weights: Vec<Vec<f32>>,
    moments: Vec<Vec<f32>>,
    steps: usize,
    head: Vec<f64>,
}

pub(super) fn bits(decoder: &Decoder, trainer: &GrpoTrainer) -> Bits {
    let read = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let state = trainer.optimizer().state().unwrap();
    Bits {
        weights: decoder
            .variables()
            .iter()
            .map(|(_, var)| read(var))
            .collect(),
        moments: state.iter().map(|(_, moment)| read(moment)).collect(),
        steps: trainer.optimizer().steps(),
        head: (trainer.critic()).map_or(Vec::new(), |head| head.parameters().to_vec()),
    }
}

pub(super) fn gae() -> GrpoConfig {
    GrpoConfig {
        token_level: Some(TokenLevel::Gae(Discount {
            gamma: 0.99,
            lambda: 0.9,
        })),
        reward_kl_coef: 0.1,
        iterations: 2,
        ..config()
    }
}

/// Takes three steps of which the second learns nothing.
fn three_steps(
    decoder: &Decoder,
    config: &GrpoConfig,
    ranks: &dyn Collective,
) -> (Bits, Vec<StepMetrics>) {
    let mut trainer = trainer(config.clone(), decoder);
    let groups = groups();
    let metrics = vec![
        trainer.step(decoder, &groups, ranks).unwrap(),
        trainer.skip(&groups).unwrap(),
        trainer.step(decoder, &groups[1..3], ranks).unwrap(),
    ];
    (bits(decoder, &trainer), metrics)
}

#[rstest]
#[case::all_weights(Trainable::Full, config())]
#[case::over_the_step(lora(), GrpoConfig {
    advantage: AdvantageConfig { scale: RewardScale::Batch, ..AdvantageConfig::default() },
    loss: LossConfig { kl_coef: 0.1, entropy_coef: 0.05, ..LossConfig::default() },
    overlong: Some(OverlongPenalty { limit: 6, margin: 4, weight: 0.5 }),
    mask_truncated: true,
    ..config()
})]
#[case::by_parts_of_the_reward(lora(), GrpoConfig {
    decoupled: Some(vec![("passed".to_owned(), 1.0), ("format".to_owned(), 0.3)]),
    recompute_old: true,
    loss: LossConfig {
        aggregation: Aggregation::Grpo,
        ratio_level: RatioLevel::Sequence,
        ..LossConfig::default()
    },
    ..config()
})]
#[case::over_the_tokens(Trainable::Full, GrpoConfig {
    advantage: AdvantageConfig {
        estimator: Estimator::ReinforcePlusPlusBaseline,
        ..AdvantageConfig::default()
    },
    ..config()
})]
#[case::with_values(lora(), gae())]
#[case::with_dropout(lora_with_dropout(), GrpoConfig {
    pass: PassConfig { dropout_seed: Some(5), ..PassConfig::default() },
    iterations: 2,
    ..config()
})]
fn a_step_has_the_same_bits_for_any_number_of_processes(
    #[case] trainable: Trainable,
    #[case] config: GrpoConfig,
) {
    let fresh = || decoder(ModelType::Qwen3, DType::F32, &trainable);
    let alone = three_steps(&fresh(), &config, &Solo);
    assert!(alone.1[0].grad_norm > 0.0 && alone.1[2].grad_norm > 0.0);
    for world_size in [2, 3, 4] {
        let found = on_ranks(&launches(world_size), QUICK, |ranks| {
            three_steps(&fresh(), &config, &ranks)
        });
        for found in found {
            assert!(found.0 == alone.0, "{world_size} processes");
            assert_eq!(found.1, alone.1, "{world_size} processes");
        }
    }
    // In one part it is the same but for rounding.
    let config = GrpoConfig { parts: 1, ..config };
    let whole = three_steps(&fresh(), &config, &Solo);
    assert!(whole.0 != alone.0, "the order of a sum shows");
    let pairs = whole
        .0
        .weights
        .iter()
        .flatten()
        .zip(alone.0.weights.iter().flatten());
    let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-3, "{worst}");
    assert!((whole.1[0].grad_norm - alone.1[0].grad_norm).abs() < 1e-5);
}

/// Tensors that no kernel of ours sums take the way over host memory.
#[test]
fn tensors_are_summed_over_processes_too() {
    let fresh = || {
        let model = toy(ModelType::Llama);
        let weights = random_weights(&model, 1, DType::F32, &Device::Cpu).unwrap();
        Decoder::new_composed(model, weights, &Device::Cpu, &lora(), 2).unwrap()
    };
    let alone = three_steps(&fresh(), &config(), &Solo);
    let found = on_ranks(&launches(2), QUICK, |ranks| {
        three_steps(&fresh(), &config(), &ranks)
    });
    assert!(found.iter().all(|found| *found == alone));
}

#[test]
fn a_process_that_fails_within_a_step_leaves_all_as_before_it() {
    let ranks_done = AtomicBool::new(false);
    let found = on_ranks(&launches(2), QUICK, |ranks| {
        let decoder = decoder(ModelType::Qwen3, DType::F32, &lora());
        let mut trainer = trainer(gae(), &decoder);
        trainer.step(&decoder, &groups(), &ranks).unwrap();
        if ranks.rank() == 1 {
            // It scores values, and breaks off before the passes.
            ranks
                .all_gather("scoring the reference", Vec::new())
                .unwrap();
            ranks.abort("out of memory");
            ranks_done.store(true, std::sync::atomic::Ordering::Relaxed);
            return String::new();
        }
        let before = bits(&decoder, &trainer);
        let error = trainer.step(&decoder, &groups(), &ranks).unwrap_err();
        assert!(bits(&decoder, &trainer) == before);
        error.to_string()
    });
    assert!(!found[0].is_empty(), "{found:?}");
}

#[rstest]
fn a_step_that_is_refused_in_a_later_pass_changes_nothing(
    #[values(Trainable::Full, lora())] trainable: Trainable,
    #[values(false, true)] has_values: bool,
    #[values(false, true)] is_composed: bool,
) {
    let fresh = || {
        let config = toy(ModelType::Qwen3);
        let weights = random_weights(&config, 1, DType::F32, &Device::Cpu).unwrap();
        let make = if is_composed {
            Decoder::new_composed
        } else {
            Decoder::new
        };
        make(config, weights, &Device::Cpu, &trainable, 2).unwrap()
    };
    let several = GrpoConfig {
        iterations: 3,
        recompute_old: true,
        ..if has_values { gae() } else { config() }
    };
    let decoder = fresh();
    let mut found = trainer(several.clone(), &decoder);
    let first = found.step(&decoder, &groups(), &Solo).unwrap();
    assert!(
        first.ratio_max > 1.01,
        "later passes move the policy: {}",
        first.ratio_max
    );
    let before = bits(&decoder, &found);
    let strict = GrpoConfig {
        max_ratio: 1.0001,
        ..several.clone()
    };
    let (optimizer, critic) = (found.optimizer().clone(), found.critic().cloned());
    let mut found = GrpoTrainer::new(strict, *found.schedule(), optimizer)
        .with_critic(critic)
        .resume_after(1);
    let error = found.step(&decoder, &groups(), &Solo).unwrap_err();
    assert!(
        matches!(error, TrainerError::RatioTooLarge { .. }),
        "{error}"
    );
    assert!(bits(&decoder, &found) == before);

    // What follows is as if the step had never been tried.
    let (optimizer, critic) = (found.optimizer().clone(), found.critic().cloned());
    let mut found = GrpoTrainer::new(several.clone(), *found.schedule(), optimizer)
        .with_critic(critic)
        .resume_after(1);
    let again = found.step(&decoder, &groups(), &Solo).unwrap();
    let untried = fresh();
    let mut expected = trainer(several, &untried);
    expected.step(&untried, &groups(), &Solo).unwrap();
    assert_eq!(expected.step(&untried, &groups(), &Solo).unwrap(), again);
    assert!(bits(&untried, &expected) == bits(&decoder, &found));
}
