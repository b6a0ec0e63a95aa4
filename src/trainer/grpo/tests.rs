use candle_core::{DType, Device};

use super::super::loss::{CorrectionLevel, OutOfBounds, SamplerCorrection};
use super::*;
use crate::collective::Solo;
use crate::engine::model::tests_support::toy;
use crate::engine::model::{LoraConfig, ModelType, Trainable, random_weights};
use crate::trajectory::{Status, TokenTrace, Usage};

/// Returns an episode that sampled `sampled`, each at the same log-probability.
fn episode(sample: u32, sampled: &[u32], reward: Option<f64>, parts: &[(&str, f64)]) -> Trajectory {
    let mut trace = TokenTrace::new();
    trace.push_prompt(&[1, 2]).unwrap();
    let logprobs = vec![-2.9; sampled.len()];
    trace.push_sampled(sampled, &logprobs).unwrap();
    Trajectory {
        task_id: "1".to_owned(),
        group: 0,
        sample,
        policy_step: 0,
        segments: Vec::new(),
        messages: Vec::new(),
        turns: Vec::new(),
        trace,
        reward,
        rewards: (parts.iter())
            .map(|&(name, value)| (name.to_owned(), value))
            .collect::<IndexMap<_, _>>(),
        passed: None,
        status: Status::Finished,
        usage: Usage::default(),
    }
}

fn group(trajectories: Vec<Trajectory>) -> RolloutGroup {
    RolloutGroup {
        task_id: "1".to_owned(),
        trajectories,
    }
}

#[test]
fn a_reward_is_shuffled_together_with_its_parts() {
    let episodes = (0..).zip((0..8).map(f64::from));
    let mut groups = [group(
        episodes
            .map(|(sample, reward)| {
                let reward_or_none = (sample != 3).then_some(reward);
                episode(sample, &[3], reward_or_none, &[("tests", reward)])
            })
            .collect(),
    )];
    shuffle_rewards(&mut groups, 5);
    let [group] = groups;
    let found = group.rewards();
    assert_eq!(found[3], None, "what could not be scored stays so");
    assert_eq!(group.trajectories[3].rewards["tests"], 3.0);
    for episode in &group.trajectories {
        let part = episode.rewards["tests"];
        assert!(episode.reward.is_none_or(|reward| reward == part));
    }
    let mut sorted: Vec<f64> = found.iter().copied().flatten().collect();
    assert_ne!(sorted, [0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0]);
    sorted.sort_by(f64::total_cmp);
    assert_eq!(sorted, [0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0]);
}

#[test]
fn rows_of_an_episode_have_one_reward_shuffled_or_not() {
    // Three rows of the first episode, one of each other.
    let rows = [(0, 1.0), (0, 1.0), (0, 1.0), (1, 0.0), (2, 0.5)];
    let rows =
        rows.map(|(sample, reward)| episode(sample, &[3], Some(reward), &[("tests", reward)]));
    let mut orders = std::collections::BTreeSet::new();
    for seed in 0..20 {
        let mut groups = [group(rows.to_vec())];
        shuffle_rewards(&mut groups, seed);
        let [group] = groups;
        let found: Vec<f64> = (group.trajectories.iter())
            .filter_map(|row| row.reward)
            .collect();
        assert!(found[0] == found[1] && found[1] == found[2], "{found:?}");
        for row in &group.trajectories {
            assert_eq!(row.reward, Some(row.rewards["tests"]));
        }
        let mut of_episodes: Vec<f64> = group.rewards().into_iter().flatten().collect();
        orders.insert(format!("{of_episodes:?}"));
        of_episodes.sort_by(f64::total_cmp);
        assert_eq!(of_episodes, [0.0, 0.5, 1.0]);
    }
    assert_eq!(orders.len(), 6);
}

/// A trainer and a toy for it, whose adapter moves what it says.
fn trainer(config: GrpoConfig) -> (GrpoTrainer, Decoder) {
    trainer_with_dropout(config, 0.0)
}

fn trainer_with_dropout(config: GrpoConfig, dropout: f64) -> (GrpoTrainer, Decoder) {
    let model = toy(ModelType::Llama);
    let weights = random_weights(&model, 3, DType::F32, &Device::Cpu).unwrap();
    let lora = Trainable::Lora(LoraConfig {
        rank: 2,
        alpha: 4.0,
        dropout,
        ..LoraConfig::default()
    });
    let decoder = Decoder::new(model, weights, &Device::Cpu, &lora, 4).unwrap();
    let optimizer = AdamW::new(&decoder, super::super::AdamWConfig::default()).unwrap();
    let schedule = LrSchedule {
        learning_rate: 1e-2,
        warmup_steps: 0,
        total_steps: 10,
        kind: super::super::ScheduleKind::Constant,
    };
    (GrpoTrainer::new(config, schedule, optimizer), decoder)
}

/// One process that watches nothing.
fn alone<'a>(watch: &'a Watch<'a>) -> Parts<'a> {
    Parts {
        ranks: &Solo,
        count: 1,
        watch,
    }
}

fn config() -> GrpoConfig {
    GrpoConfig {
        advantage: AdvantageConfig::default(),
        decoupled: None,
        token_level: None,
        overlong: None,
        reward_kl_coef: 0.0,
        loss: LossConfig::default(),
        pass: PassConfig::default(),
        micro_batch_tokens: 1000,
        iterations: 1,
        recompute_old: false,
        max_kl_sample_train: 10.0,
        max_ratio: f64::INFINITY,
        mask_truncated: false,
        parts: 1,
    }
}

/// Returns the advantages of one group, given each episode's divergence from the reference.
fn advantages_of(
    config: GrpoConfig,
    trajectories: &[Trajectory],
    divergences: &[f64],
) -> Vec<Option<f64>> {
    let (trainer, _) = trainer(config);
    let episodes: Vec<_> = trajectories.iter().map(|episode| (0, episode)).collect();
    let mut sequences = sequences(&episodes);
    for (sequence, divergence) in sequences.iter_mut().zip(divergences) {
        let mut reference = sequence.logprobs.clone();
        *reference.last_mut().unwrap() -= divergence;
        sequence.reference = Some(reference);
    }
    trainer.advantages(&episodes, &sequences).unwrap().values
}

#[test]
fn penalties_are_normalised_apart_and_weighed_by_their_own_weights() {
    let lengths = [3, 5, 8, 8];
    let trajectories: Vec<_> = (0..)
        .zip(lengths)
        .map(|(sample, length)| {
            let passed = f64::from(sample % 2);
            episode(
                sample,
                &vec![3; length],
                Some(passed),
                &[("passed", passed)],
            )
        })
        .collect();
    let divergences = [0.3, -0.1, 0.2, 0.0];
    let of = |overlong: f64, kl: f64| {
        let config = GrpoConfig {
            decoupled: Some(vec![("passed".to_owned(), 1.0)]),
            overlong: Some(OverlongPenalty {
                limit: 8,
                margin: 4,
                weight: overlong,
            }),
            reward_kl_coef: kl,
            ..config()
        };
        advantages_of(config, &trajectories, &divergences)
    };
    let members: Vec<_> = (trajectories.iter())
        .map(|episode| GroupMember {
            group: 0,
            reward: episode.reward,
            sampled_tokens: 1,
            loss_tokens: 1,
        })
        .collect();
    for (overlong, kl) in [(1.0, 0.5), (0.25, 0.5), (1.0, 2.0)] {
        let parts = [
            (1.0, vec![0.0, 1.0, 0.0, 1.0]),
            (overlong, vec![0.0, -0.25, -1.0, -1.0]),
            (kl, divergences.map(|divergence| -divergence).to_vec()),
        ];
        let expected = decoupled_advantages(&members, &parts, AdvantageConfig::default());
        let expected = expected.unwrap().values;
        for (found, expected) in of(overlong, kl).into_iter().zip(expected) {
            let (found, expected) = (found.unwrap(), expected.unwrap());
            assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        }
    }
    // A weight is a weight: it is not normalised away.
    assert_ne!(of(1.0, 0.5), of(0.25, 0.5));
}

#[test]
fn an_episode_of_several_rows_is_as_long_as_they_are_together() {
    // Six tokens each, twelve together: the whole penalty, so that the first episode earns what the
    // second does, and nothing is left of the credit once it is whitened.
    let rows = [
        episode(0, &[3; 6], Some(1.0), &[]),
        episode(0, &[4; 6], Some(1.0), &[]),
        episode(1, &[5; 4], Some(0.0), &[]),
    ];
    let config = GrpoConfig {
        overlong: Some(OverlongPenalty {
            limit: 8,
            margin: 4,
            weight: 1.0,
        }),
        token_level: Some(TokenLevel::Returns { gamma: 1.0 }),
        ..config()
    };
    let (trainer, decoder) = trainer(config);
    let episodes: Vec<_> = rows.iter().map(|row| (0, row)).collect();
    let mut sequences = sequences(&episodes);
    let watch = Watch::new(None, false);
    trainer
        .credit(&decoder, &episodes, &mut sequences, &[0; 3], alone(&watch))
        .unwrap();
    for sequence in &sequences {
        let credit = sequence.credit.as_ref().unwrap();
        assert!(credit.advantages.iter().all(|&advantage| advantage == 0.0));
    }
}

#[test]
fn a_truncated_answer_pays_for_its_divergence_though_it_is_not_learned_from() {
    let mut long = episode(0, &[3, 4, 5, 6], Some(1.0), &[]);
    long.status = Status::Truncated;
    let groups = [group(vec![long, episode(1, &[7, 8], Some(1.0), &[])])];
    let config = GrpoConfig {
        reward_kl_coef: 0.5,
        mask_truncated: true,
        ..config()
    };
    let (mut trainer, decoder) = trainer(config);
    let metrics = trainer.step(&decoder, &groups, &Solo).unwrap();
    // The reference is the model itself: it diverges by what was sampled less what it says.
    let episodes: Vec<_> = groups[0].trajectories.iter().map(|t| (0, t)).collect();
    let mut scored = sequences(&episodes);
    let (fresh, decoder) = self::trainer(trainer.config.clone());
    fresh
        .score_references(
            &decoder,
            &mut scored,
            &[0, 0],
            alone(&Watch::new(None, false)),
        )
        .unwrap();
    let divergences: Vec<f64> = scored.iter().map(TrainSequence::divergence).collect();
    assert!(divergences.iter().all(|divergence| divergence.abs() > 0.01));
    let mean = 1.0 - 0.5 * divergences.iter().sum::<f64>() / 2.0;
    assert!(
        (metrics.reward - mean).abs() < 1e-9,
        "{} {mean}",
        metrics.reward
    );
    // The loss has the whole answer's tokens alone.
    assert!(metrics.grad_norm > 0.0);
}

#[test]
fn an_episode_without_a_reward_is_not_run() {
    let trajectories = [
        episode(0, &[3, 4], None, &[]),
        episode(1, &[7, 8], Some(1.0), &[]),
    ];
    let episodes: Vec<_> = trajectories.iter().map(|episode| (0, episode)).collect();
    let mut scored = sequences(&episodes);
    let (trainer, decoder) = trainer(config());
    trainer
        .score_references(
            &decoder,
            &mut scored,
            &[0, 0],
            alone(&Watch::new(None, false)),
        )
        .unwrap();
    assert_eq!(scored[0].reference, None);
    assert!(scored[1].reference.is_some());
}

/// Returns the log-probabilities of each episode's sampled tokens as the policy has them now.
fn logprobs_now(decoder: &Decoder, episodes: &[Trajectory]) -> Vec<Vec<f64>> {
    let episodes: Vec<_> = episodes.iter().map(|episode| (0, episode)).collect();
    let sequences = sequences(&episodes);
    let groups = vec![0; sequences.len()];
    let score = |micro: &MicroBatch| {
        let scores = score_micro_batch(decoder, micro, Adapters::On, 1.0)?;
        Ok(scores.logprobs)
    };
    let budget = (1000, &LossConfig::default());
    alone(&Watch::new(None, false))
        .score("scoring", (&sequences, &groups), budget, score)
        .unwrap()
}

/// Has each episode's tokens sampled at these log-probabilities.
fn sampled_at(episodes: &mut [Trajectory], sampled: &[Vec<f64>]) {
    for (episode, logprobs) in episodes.iter_mut().zip(sampled) {
        #[expect(clippy::cast_possible_truncation, reason = "logits are f32")]
        let logprobs: Vec<f32> = logprobs.iter().map(|&logprob| logprob as f32).collect();
        let ids = episode.trace.ids()[2..].to_vec();
        episode.trace = TokenTrace::new();
        episode.trace.push_prompt(&[1, 2]).unwrap();
        episode.trace.push_sampled(&ids, &logprobs).unwrap();
    }
}

/// Episodes of a policy, a good one and a bad one, and the same policy some updates later.
fn off_policy(config: GrpoConfig) -> (GrpoTrainer, Decoder, Vec<Trajectory>) {
    let (mut trainer, decoder) = trainer(config);
    let mut episodes = vec![
        episode(0, &[3, 4, 5], Some(1.0), &[]),
        episode(1, &[6, 7], Some(0.0), &[]),
    ];
    let sampled = logprobs_now(&decoder, &episodes);
    sampled_at(&mut episodes, &sampled);
    // What is learned meanwhile makes each of them likelier or less likely.
    let other = group(vec![
        episode(0, &[3, 4, 9], Some(0.0), &[]),
        episode(1, &[6, 8], Some(1.0), &[]),
    ]);
    for _ in 0..8 {
        let other = std::slice::from_ref(&other);
        trainer.step(&decoder, other, &Solo).unwrap();
    }
    (trainer, decoder, episodes)
}

/// The loss of episodes with rewards 1 and 0, given each token's term for its ratio and advantage.
fn loss_by_hand(
    sampled: &[Trajectory],
    now: &[Vec<f64>],
    term: impl Fn(f64, f64) -> f64,
) -> (f64, Vec<f64>) {
    // Half of the difference, by the deviation of two rewards that are 1 apart.
    let advantage = 0.5 / (0.5_f64.sqrt() + AdvantageConfig::default().eps);
    let (mut terms, mut ratios) = (Vec::new(), Vec::new());
    for ((episode, now), advantage) in sampled.iter().zip(now).zip([advantage, -advantage]) {
        for (sampled, now) in episode.trace.logprobs()[2..].iter().zip(now) {
            let ratio = (now - f64::from(*sampled)).exp();
            terms.push(term(ratio, advantage));
            ratios.push(ratio);
        }
    }
    (terms.iter().sum::<f64>() / terms.len() as f64, ratios)
}

#[test]
fn episodes_of_an_older_policy_are_weighed_by_their_ratio_to_it() {
    let (mut trainer, decoder, episodes) = off_policy(config());
    let now = logprobs_now(&decoder, &episodes);
    let (expected, ratios) = loss_by_hand(&episodes, &now, |ratio, advantage| {
        -(ratio * advantage).min(ratio.clamp(0.8, 1.2) * advantage)
    });
    assert!(
        ratios.iter().any(|ratio| (ratio - 1.0).abs() > 0.05),
        "{ratios:?}"
    );
    let below: f64 = ratios.iter().map(|ratio| -ratio.ln()).sum::<f64>() / ratios.len() as f64;
    let metrics = trainer.step(&decoder, &[group(episodes)], &Solo).unwrap();
    assert!(
        (metrics.loss - expected).abs() < 1e-6,
        "{} {expected}",
        metrics.loss
    );
    // How far the policy that learns is from the one that sampled: what `drift` watches.
    assert!((metrics.kl_sample_train - below).abs() < 1e-6);
}

#[test]
fn a_correction_takes_the_policy_before_the_update_for_the_ratio_and_weighs_the_step_between() {
    // Decoupled PPO (AReaL, arXiv:2505.24298, equation 5) with truncated weights.
    let correction = SamplerCorrection {
        level: CorrectionLevel::Token,
        out_of_bounds: OutOfBounds::Truncate,
        max: 1.05,
        min: None,
    };
    let decoupled = GrpoConfig {
        recompute_old: true,
        loss: LossConfig {
            correction: Some(correction),
            ..LossConfig::default()
        },
        ..config()
    };
    let (mut trainer, decoder, episodes) = off_policy(decoupled);
    let now = logprobs_now(&decoder, &episodes);
    let weigh = |ratio: f64, advantage: f64| -ratio.min(1.05) * advantage;
    let (expected, ratios) = loss_by_hand(&episodes, &now, weigh);
    assert!(ratios.iter().any(|&ratio| ratio > 1.05), "{ratios:?}");
    let metrics = trainer.step(&decoder, &[group(episodes)], &Solo).unwrap();
    assert!(
        (metrics.loss - expected).abs() < 1e-6,
        "{} {expected}",
        metrics.loss
    );
    assert!(
        (metrics.ratio_mean - 1.0).abs() < 1e-9,
        "{}",
        metrics.ratio_mean
    );
    let mean = ratios.iter().map(|ratio| ratio.min(1.05)).sum::<f64>() / ratios.len() as f64;
    assert!((metrics.correction_mean - mean).abs() < 1e-6);
}

#[test]
fn a_gradient_that_is_not_applied_changes_nothing() {
    let (mut trainer, decoder, episodes) = off_policy(config());
    let before = logprobs_now(&decoder, &episodes);
    let groups = [group(episodes.clone())];
    let version = decoder.version();
    drop(trainer.gradient(&decoder, &groups, &Solo).unwrap());
    assert_eq!(decoder.version(), version);
    assert_eq!(logprobs_now(&decoder, &episodes), before);
    // Done later, the step is the same one.
    let metrics = trainer.step(&decoder, &groups, &Solo).unwrap();
    let (mut other, twin, _) = off_policy(config());
    let pending = other.gradient(&twin, &groups, &Solo).unwrap();
    let applied = other.apply(&twin, pending, &groups, &Solo).unwrap();
    assert_eq!(applied, metrics);
    assert_eq!(
        logprobs_now(&twin, &episodes),
        logprobs_now(&decoder, &episodes)
    );
}

/// With dropout a pass computes other log-probabilities than were sampled. Its ratio is that of one mask to
/// itself, and whether sampler and trainer agree is seen without dropout.
#[test]
fn dropout_moves_neither_the_first_ratio_nor_the_drift() {
    let run = |dropout: f64, seed: u64, iterations: usize| {
        let config = GrpoConfig {
            pass: PassConfig {
                dropout_seed: Some(seed),
                ..PassConfig::default()
            },
            iterations,
            max_kl_sample_train: 1e-6,
            ..config()
        };
        let (mut trainer, decoder) = trainer_with_dropout(config, dropout);
        // A fresh adapter adds nothing, dropped or not.
        for (name, var) in decoder.variables() {
            if name.contains("lora_B") {
                var.set(&var.ones_like().unwrap()).unwrap();
            }
        }
        decoder.mark_updated();
        let mut steps = Vec::new();
        for _ in 0..2 {
            let mut episodes = vec![
                episode(0, &[3, 4, 5], Some(1.0), &[]),
                episode(1, &[7, 8], Some(0.0), &[]),
            ];
            // As the policy that is being trained samples.
            let sampled = logprobs_now(&decoder, &episodes);
            sampled_at(&mut episodes, &sampled);
            let groups = [group(episodes)];
            steps.push(trainer.step(&decoder, &groups, &Solo).unwrap());
        }
        steps
    };
    let without = run(0.0, 1, 1);
    for iterations in [1, 2] {
        let with = run(0.3, 1, iterations);
        for step in &with {
            assert_eq!((step.ratio_mean, step.kl_sample_train), (1.0, 0.0));
            assert_eq!(step.logprob_difference_max, 0.0);
            assert_eq!(step.ratio_max == 1.0, iterations == 1, "{step:?}");
        }
        assert_ne!(with[0].grad_norm, without[0].grad_norm);
        assert_eq!(run(0.3, 1, iterations), with, "the masks are the run's");
        let other = run(0.3, 2, iterations);
        assert_ne!(
            other[0].grad_norm, with[0].grad_norm,
            "and another run's are others"
        );
    }
}
