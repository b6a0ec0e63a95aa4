//! The value head under a model: its gradients, and that it learns what episodes earn.

use super::*;
use crate::collective::Solo;
use crate::rollout::RolloutGroup;
use crate::trajectory::{Status, TokenTrace, Trajectory, Usage};

const CONFIG: ValueConfig = ValueConfig {
    learning_rate: 0.1,
    clip: 0.2,
    trunk_coef: 0.7,
};

/// Returns a head that says something, for the toys.
fn head(width: usize) -> ValueHead {
    let mut head = ValueHead::new(width, CONFIG, AdamWConfig::default());
    for (i, parameter) in head.parameters_mut().iter_mut().enumerate() {
        *parameter = 0.3 * (i as f64 * 1.7).sin();
    }
    head
}

/// Returns sequences with old values and returns, some of them out of the bound's reach.
fn credited(count: usize) -> Vec<TrainSequence> {
    let mut sequences = sequences(count);
    for (i, sequence) in sequences.iter_mut().enumerate() {
        let wave = |t: usize, scale: f64| scale * ((3 * t + i) as f64).sin();
        let tokens = sequence.tokens.len();
        sequence.credit = Some(TokenCredit {
            advantages: (0..tokens).map(|t| wave(t, 1.0)).collect(),
            values: (0..tokens).map(|t| wave(t + 1, 0.5)).collect(),
            returns: (0..tokens).map(|t| wave(t + 2, 2.0)).collect(),
        });
    }
    sequences
}

/// Returns the policy loss, and the value loss, without any backward pass.
fn losses(decoder: &Decoder, head: &ValueHead, sequences: &[TrainSequence]) -> (f64, f64) {
    let config = loss_config();
    let totals = config.totals(sequences.iter().map(TrainSequence::trainable_tokens));
    let (mut tokens, mut value_sum) = (0, 0.0);
    for micro in pack(sequences, usize::MAX, &config, totals).unwrap() {
        let hidden = decoder.hidden(&micro.batch, Adapters::On).unwrap();
        for (i, value) in head
            .values(&hidden, &micro)
            .unwrap()
            .into_iter()
            .enumerate()
        {
            value_sum += value_loss(value, micro.values[i], micro.returns[i], CONFIG.clip).0;
            tokens += 1;
        }
    }
    (
        loss(decoder, sequences, PassConfig::default()),
        value_sum / f64::from(tokens),
    )
}

#[rstest]
fn the_value_loss_has_the_gradient_of_finite_differences(
    #[values(ModelType::Qwen3, ModelType::Llama)] kind: ModelType,
    #[values(Trainable::Full, lora())] trainable: Trainable,
    #[values(20, usize::MAX)] budget: usize,
) {
    let decoder = decoder(kind, DType::F64, &trainable);
    let mut head = head(decoder.config().hidden_size);
    let sequences = credited(3);
    let config = loss_config();
    let totals = config.totals(sequences.iter().map(TrainSequence::trainable_tokens));
    let mut gradients = decoder.zero_gradients();
    for micro in pack(&sequences, budget, &config, totals).unwrap() {
        let critic = Some((&mut head, 1.0 / totals.tokens as f64));
        let pass = PassConfig::default();
        accumulate_actor_critic_gradient(&decoder, &micro, &config, pass, &mut gradients, critic)
            .unwrap();
    }
    let found = head.gradient().to_vec();
    let step = 1e-5;
    for (i, found) in found.iter().enumerate() {
        let mut at = |by: f64| {
            head.parameters_mut()[i] += by;
            let (_, value) = losses(&decoder, &head, &sequences);
            head.parameters_mut()[i] -= by;
            value
        };
        let slope = (at(step) - at(-step)) / (2.0 * step);
        assert!((slope - found).abs() < 1e-8, "{i}: {slope} {found}");
    }
    assert!(found.iter().all(|slope| slope.abs() > 1e-9));
    for (index, (name, var)) in decoder.variables().iter().enumerate() {
        let original = var.as_detached_tensor().copy().unwrap();
        let direction: Vec<f64> = (0..var.elem_count())
            .map(|i| ((i * 5 + 1) as f64).cos())
            .collect();
        let gradient = gradients.tensor(index).unwrap().flatten_all().unwrap();
        let gradient = gradient.to_vec1::<f64>().unwrap();
        let expected: f64 = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
        let direction = Tensor::from_vec(direction, var.shape(), &Device::Cpu).unwrap();
        let at = |by: f64| {
            var.set(&(&original + (&direction * by).unwrap()).unwrap())
                .unwrap();
            decoder.mark_updated();
            losses(&decoder, &head, &sequences)
        };
        let (above, below) = (at(step), at(-step));
        let slope = |of: fn((f64, f64)) -> f64| (of(above) - of(below)) / (2.0 * step);
        let value = slope(|losses| losses.1);
        let sum = slope(|losses| losses.0) + CONFIG.trunk_coef * value;
        assert!(
            (sum - expected).abs() < 1e-8 + 1e-5 * expected.abs(),
            "{name}: {sum} {expected}"
        );
        // The head reads all that lies below it. An untied output head does not.
        assert_eq!(
            value.abs() > 1e-9,
            !name.contains("lm_head"),
            "{name}: {value}"
        );
        var.set(&original).unwrap();
        decoder.mark_updated();
    }
}

#[test]
fn a_frozen_trunk_has_the_policys_gradient_alone() {
    let decoder = decoder(ModelType::Qwen3, DType::F64, &Trainable::Full);
    let frozen = ValueConfig {
        trunk_coef: 0.0,
        ..CONFIG
    };
    let width = decoder.config().hidden_size;
    let mut head = ValueHead::new(width, frozen, AdamWConfig::default());
    let sequences = credited(3);
    let config = loss_config();
    let totals = config.totals(sequences.iter().map(TrainSequence::trainable_tokens));
    let [micro] = pack(&sequences, 1000, &config, totals)
        .unwrap()
        .try_into()
        .unwrap();
    let (mut with, mut without) = (decoder.zero_gradients(), decoder.zero_gradients());
    let pass = PassConfig::default();
    let critic = Some((&mut head, 0.1));
    accumulate_actor_critic_gradient(&decoder, &micro, &config, pass, &mut with, critic).unwrap();
    accumulate_policy_gradient(&decoder, &micro, &config, pass, &mut without).unwrap();
    assert!(head.gradient().iter().any(|slope| *slope != 0.0));
    for index in 0..with.len() {
        let read = |gradients: &crate::engine::model::Gradients| {
            let gradient = gradients.tensor(index).unwrap();
            gradient.flatten_all().unwrap().to_vec1::<f64>().unwrap()
        };
        assert_eq!(read(&with), read(&without));
    }
}

/// Returns a group of episodes that earn 1 for an answer that begins with 3, and 0 for others, with the
/// log-probabilities of the policy.
fn episodes(decoder: &Decoder) -> RolloutGroup {
    let episode = |sample: u32| {
        let mut trace = TokenTrace::new();
        trace.push_prompt(&[1, 2]).unwrap();
        let first = if sample.is_multiple_of(2) { 3 } else { 4 };
        let answer = [first, 5, 6 + sample % 3];
        let tokens = [&[1, 2][..], &answer].concat();
        let hidden = decoder
            .hidden(&PackedBatch::from_sequences(&[tokens]), Adapters::On)
            .unwrap();
        let targets = Targets {
            positions: vec![1, 2, 3],
            tokens: answer.to_vec(),
        };
        let scores = score(decoder, &hidden, &targets, Adapters::On, 1.0).unwrap();
        #[expect(clippy::cast_possible_truncation, reason = "they are f32 values")]
        let logprobs: Vec<f32> = scores
            .logprobs
            .iter()
            .map(|&logprob| logprob as f32)
            .collect();
        trace.push_sampled(&answer, &logprobs).unwrap();
        Trajectory {
            task_id: "1".to_owned(),
            group: 0,
            sample,
            policy_step: 0,
            segments: Vec::new(),
            messages: Vec::new(),
            turns: Vec::new(),
            trace,
            reward: Some(f64::from(u8::from(first == 3))),
            rewards: indexmap::IndexMap::new(),
            passed: None,
            status: Status::Finished,
            usage: Usage::default(),
        }
    };
    RolloutGroup {
        task_id: "1".to_owned(),
        trajectories: (0..6).map(episode).collect(),
    }
}

fn ppo(decoder: &Decoder, token_level: TokenLevel) -> GrpoTrainer {
    let config = GrpoConfig {
        advantage: AdvantageConfig::default(),
        decoupled: None,
        token_level: Some(token_level),
        overlong: None,
        reward_kl_coef: 0.0,
        loss: LossConfig::default(),
        pass: PassConfig::default(),
        micro_batch_tokens: 10,
        iterations: 1,
        recompute_old: false,
        max_kl_sample_train: 0.05,
        max_ratio: f64::INFINITY,
        mask_truncated: false,
        parts: 1,
    };
    let schedule = LrSchedule {
        learning_rate: 1e-2,
        warmup_steps: 0,
        total_steps: 100,
        kind: ScheduleKind::Constant,
    };
    let value = ValueConfig {
        learning_rate: 0.05,
        clip: 10.0,
        trunk_coef: 0.1,
    };
    let optimizer = AdamW::new(decoder, AdamWConfig::default()).unwrap();
    let head = ValueHead::new(decoder.config().hidden_size, value, AdamWConfig::default());
    let critic = matches!(token_level, TokenLevel::Gae(_)).then_some(head);
    GrpoTrainer::new(config, schedule, optimizer).with_critic(critic)
}

const GAE: TokenLevel = TokenLevel::Gae(Discount {
    gamma: 1.0,
    lambda: 0.95,
});

#[rstest]
fn token_credit_raises_what_is_rewarded(
    #[values(GAE, TokenLevel::Returns { gamma: 1.0 })] level: TokenLevel,
) {
    let decoder = decoder(ModelType::Qwen3, DType::F32, &Trainable::Full);
    let mut trainer = ppo(&decoder, level);
    let mut values = Vec::new();
    let chance = |group: &RolloutGroup| f64::from(group.trajectories[0].trace.logprobs()[2]);
    let before = chance(&episodes(&decoder));
    for _ in 0..40 {
        let metrics = trainer
            .step(&decoder, &[episodes(&decoder)], &Solo)
            .unwrap();
        values.extend(metrics.value);
    }
    let after = chance(&episodes(&decoder));
    assert!(after > before + 0.3, "{before} {after}");
    if level == GAE {
        let (first, last) = (values[0], values[values.len() - 1]);
        // A head of zeros explains nothing.
        assert_eq!((first.explained_variance, first.mean), (0.0, 0.0));
        // What begins with 3 is worth 1 from there on, and nothing else is.
        assert!(last.explained_variance > 0.5, "{last:?}");
        assert!(last.loss < first.loss / 2.0, "{first:?} {last:?}");
        assert!(last.grad_norm > 0.0 && first.grad_norm > 0.0);
    } else {
        assert!(values.is_empty());
    }
}

#[test]
fn a_value_head_is_saved_and_goes_on_to_the_same_bits() {
    let run = tempfile::tempdir().unwrap();
    let state = TrainState {
        step: 3,
        seed: 0,
        extra: serde_json::Value::Null,
    };
    let whole = decoder(ModelType::Qwen3, DType::F32, &Trainable::Full);
    let mut trainer = ppo(&whole, GAE);
    let steps = |trainer: &mut GrpoTrainer, decoder: &Decoder| {
        for _ in 0..3 {
            trainer.step(decoder, &[episodes(decoder)], &Solo).unwrap();
        }
    };
    steps(&mut trainer, &whole);
    let (optimizer, critic) = (trainer.optimizer(), trainer.critic());
    let path =
        save_checkpoint(run.path(), &whole, optimizer, critic, &state, None, nothing).unwrap();
    steps(&mut trainer, &whole);

    let resumed = decoder(ModelType::Qwen3, DType::F32, &Trainable::Full);
    let fresh = ppo(&resumed, GAE);
    let mut head = fresh.critic().unwrap().clone();
    let mut optimizer = AdamW::new(&resumed, AdamWConfig::default()).unwrap();
    load_checkpoint(&path, &resumed, &mut optimizer, Some(&mut head)).unwrap();
    let mut again = GrpoTrainer::new(fresh.config().clone(), *fresh.schedule(), optimizer)
        .with_critic(Some(head))
        .resume_after(3);
    steps(&mut again, &resumed);
    let parameters = |trainer: &GrpoTrainer| trainer.critic().unwrap().parameters().to_vec();
    assert_eq!(parameters(&again), parameters(&trainer));
    fs_err::remove_file(path.join("value_head.safetensors")).unwrap();
    let mut head = fresh.critic().unwrap().clone();
    let mut optimizer = AdamW::new(&resumed, AdamWConfig::default()).unwrap();
    let error = load_checkpoint(&path, &resumed, &mut optimizer, Some(&mut head)).unwrap_err();
    assert!(error.to_string().contains("value_head"), "{error}");
}
