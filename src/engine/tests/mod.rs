//! The engine on a toy decoder with random weights.

mod paged;
mod prefixes;
mod turns;

use candle_core::Device;
use proptest::prelude::*;

use super::model::{Adapters, ModelConfig, ModelType, RopeScaling, Trainable, random_weights};
use super::*;

const STOP: u32 = 3;

fn toy_config() -> ModelConfig {
    ModelConfig {
        model_type: ModelType::Qwen3,
        vocab_size: 24,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        max_position_embeddings: 512,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        rope_scaling: RopeScaling::Default,
        attention_bias: false,
        mlp_bias: false,
        tie_word_embeddings: true,
        bos_token_id: None,
        eos_token_id: vec![STOP],
    }
}

/// Weights ten times larger than fresh ones, so that tokens differ clearly in probability.
pub(super) fn toy_decoder() -> Arc<Decoder> {
    let mut weights = random_weights(&toy_config(), 1, DType::F32, &Device::Cpu).unwrap();
    for (name, tensor) in &mut weights {
        if !name.ends_with("norm.weight") {
            *tensor = (&*tensor * 10.0).unwrap();
        }
    }
    let build = if paged::is_paged() {
        Decoder::new_composed
    } else {
        Decoder::new
    };
    Arc::new(build(toy_config(), weights, &Device::Cpu, &Trainable::Full, 0).unwrap())
}

fn engine(config: EngineConfig) -> Engine {
    Engine::new(toy_decoder(), config).unwrap()
}

fn sampled(max_new_tokens: usize) -> SamplingParams {
    SamplingParams {
        max_new_tokens,
        stop_token_ids: vec![STOP],
        ..SamplingParams::default()
    }
}

fn seed(sample: u64) -> SequenceSeed {
    SequenceSeed::new(11, 0, sample)
}

fn prompt(index: usize) -> Vec<u32> {
    (0..3 + 7 * index)
        .map(|i| u32::try_from(4 + (i * 5 + index) % 20).unwrap())
        .collect()
}

/// Steps until nothing runs; returns what finished by sequence.
fn drain(engine: &mut Engine) -> BTreeMap<SequenceId, Finished> {
    let mut all = BTreeMap::new();
    for _ in 0..100_000 {
        for finished in engine.step().unwrap() {
            assert_eq!(finished.tokens.len(), finished.logprobs.len());
            all.insert(finished.id, finished);
        }
        assert!(engine.cached_tokens() <= engine.config.max_cache_tokens);
        if engine.running() == 0 {
            return all;
        }
    }
    panic!("the engine does not come to an end");
}

/// Runs one request in an engine of its own.
fn alone(prompt: Vec<u32>, params: SamplingParams, seed: SequenceSeed) -> Finished {
    let mut engine = engine(EngineConfig::default());
    let id = engine.add(prompt, params, seed).unwrap();
    drain(&mut engine).remove(&id).unwrap()
}

fn assert_same(a: &Finished, b: &Finished) {
    assert_eq!(a.tokens, b.tokens);
    assert_eq!(a.finish_reason, b.finish_reason);
    if paged::is_paged() {
        // The tensor library's products have other kernels for other numbers of rows.
        for (a, b) in a.logprobs.iter().zip(&b.logprobs) {
            assert!((a - b).abs() < 1e-4, "{a} {b}");
        }
        return;
    }
    let bits = |finished: &Finished| -> Vec<u32> {
        finished
            .logprobs
            .iter()
            .map(|logprob| logprob.to_bits())
            .collect()
    };
    assert_eq!(
        bits(a),
        bits(b),
        "log-probabilities are equal to the last bit"
    );
}

#[test]
fn tokens_do_not_depend_on_the_batch() {
    let expected: Vec<Finished> = (0..8)
        .map(|i| alone(prompt(i), sampled(40), seed(i as u64)))
        .collect();
    assert!(
        expected
            .iter()
            .any(|finished| finished.finish_reason == FinishReason::Stop)
    );

    // All at once.
    let mut together = engine(EngineConfig::default());
    let ids: Vec<SequenceId> = (0..8)
        .map(|i| {
            together
                .add(prompt(i), sampled(40), seed(i as u64))
                .unwrap()
        })
        .collect();
    let finished = drain(&mut together);
    for (id, expected) in ids.iter().zip(&expected) {
        assert_same(&finished[id], expected);
    }

    // Longest first, one arriving every other step, prompts in small chunks.
    let config = EngineConfig {
        prefill_chunk: 5,
        max_batch_tokens: 9,
        ..EngineConfig::default()
    };
    let mut staggered = engine(config);
    let mut finished = BTreeMap::new();
    let mut ids = BTreeMap::new();
    for i in (0..8).rev() {
        ids.insert(
            i,
            staggered
                .add(prompt(i), sampled(40), seed(i as u64))
                .unwrap(),
        );
        for _ in 0..2 {
            finished.extend(staggered.step().unwrap().into_iter().map(|f| (f.id, f)));
        }
    }
    finished.extend(drain(&mut staggered));
    for (i, expected) in expected.iter().enumerate() {
        assert_same(&finished[&ids[&i]], expected);
    }
}

#[test]
fn a_group_samples_what_its_members_sample_alone() {
    let seeds: Vec<SequenceSeed> = (0..6).map(seed).collect();
    let mut engine = engine(EngineConfig {
        prefill_chunk: 16,
        ..EngineConfig::default()
    });
    let prompt = prompt(6);
    let ids = engine.add_group(&prompt, &sampled(30), &seeds).unwrap();
    let finished = drain(&mut engine);
    for (id, &seed) in ids.iter().zip(&seeds) {
        assert_same(&finished[id], &alone(prompt.clone(), sampled(30), seed));
    }
    assert_eq!(
        engine.stats().prefill_tokens,
        prompt.len() as u64,
        "the prompt is computed once"
    );
    let distinct: BTreeSet<_> = finished.values().map(|finished| &finished.tokens).collect();
    assert!(distinct.len() > 3, "members draw from streams of their own");
}

#[test]
fn a_full_cache_delays_sequences_and_changes_nothing() {
    let config = EngineConfig {
        max_cache_tokens: 160,
        ..EngineConfig::default()
    };
    let mut small = engine(config);
    let params = SamplingParams {
        max_new_tokens: 60,
        ..SamplingParams::default()
    };
    let ids: Vec<SequenceId> = (0..8)
        .map(|i| {
            small
                .add(prompt(i), params.clone(), seed(i as u64))
                .unwrap()
        })
        .collect();
    let finished = drain_releasing(&mut small);
    assert!(small.stats().evictions > 0, "{:?}", small.stats());
    for (i, id) in ids.iter().enumerate() {
        assert_same(
            &finished[id],
            &alone(prompt(i), params.clone(), seed(i as u64)),
        );
    }
    assert_eq!(small.cached_tokens(), 0);
}

fn drain_releasing(engine: &mut Engine) -> BTreeMap<SequenceId, Finished> {
    let finished = drain(engine);
    for &id in finished.keys() {
        engine.release(id).unwrap();
    }
    finished
}

#[test]
fn an_extended_sequence_continues_as_if_it_had_been_one_prompt() {
    for config in [
        EngineConfig::default(),
        // Too small for both sequences: the paused one loses its keys and values.
        EngineConfig {
            max_cache_tokens: 96,
            ..EngineConfig::default()
        },
    ] {
        let mut engine = engine(config);
        let id = engine.add(prompt(2), sampled(12), seed(1)).unwrap();
        let other = engine.add(prompt(4), sampled(40), seed(2)).unwrap();
        let first = drain(&mut engine).remove(&id).unwrap();
        let suffix = [7, 8, 9];
        engine.extend(id, &suffix).unwrap();
        let greedy = |max_new_tokens| SamplingParams {
            temperature: 0.0,
            ..sampled(max_new_tokens)
        };
        engine.sequence_mut(id).unwrap().params = greedy(12);
        let second = drain(&mut engine).remove(&id).unwrap();

        let whole = [prompt(2), first.tokens, suffix.to_vec()].concat();
        assert_same(&second, &alone(whole.clone(), greedy(12), seed(1)));
        assert_eq!(engine.tokens(id).unwrap(), [whole, second.tokens].concat());
        engine.release(id).unwrap();
        engine.release(other).unwrap();
        assert_eq!(engine.cached_tokens(), 0);
    }
}

#[test]
fn forks_share_the_past_and_draw_their_own_future() {
    let mut engine = engine(EngineConfig::default());
    let id = engine.add(prompt(5), sampled(5), seed(1)).unwrap();
    drain(&mut engine);
    let forks: Vec<SequenceId> = (10..14)
        .map(|sample| engine.fork(id, seed(sample)).unwrap())
        .collect();
    let before = engine.stats().prefill_tokens;
    for &fork in &forks {
        engine.set_max_new_tokens(fork, 20).unwrap();
        engine.extend(fork, &[5, 6]).unwrap();
    }
    let whole = engine.tokens(forks[0]).unwrap().to_vec();
    let finished = drain(&mut engine);
    assert_eq!(
        engine.stats().prefill_tokens - before,
        4 * 3,
        "the last token and the suffix"
    );
    for (&fork, sample) in forks.iter().zip(10..) {
        assert_same(
            &finished[&fork],
            &alone(whole.clone(), sampled(20), seed(sample)),
        );
    }
}

#[test]
fn logprobs_are_those_of_the_whole_text_scored_at_once() {
    let params = SamplingParams {
        temperature: 0.7,
        ..sampled(30)
    };
    let finished = alone(prompt(3), params, seed(4));
    let whole = [prompt(3), finished.tokens.clone()].concat();
    let decoder = toy_decoder();
    let batch = PackedBatch::from_sequences([&whole]);
    let hidden = decoder.hidden(&batch, Adapters::On).unwrap();
    let logits = decoder.logits(&hidden).unwrap().to_vec2::<f32>().unwrap();
    for (offset, (&token, &logprob)) in finished.tokens.iter().zip(&finished.logprobs).enumerate() {
        let row: Vec<f64> = logits[prompt(3).len() - 1 + offset]
            .iter()
            .map(|&x| f64::from(x) / 0.7)
            .collect();
        let log_sum = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        let expected = row[token as usize] - log_sum;
        assert!(
            (f64::from(logprob) - expected).abs() < 1e-5,
            "{logprob} against {expected}"
        );
    }
}

#[test]
fn turns_end_at_stop_tokens_and_limits() {
    let finished = alone(prompt(1), sampled(200), seed(3));
    assert_eq!(finished.finish_reason, FinishReason::Stop);
    assert_eq!(
        finished.tokens.iter().position(|&token| token == STOP),
        Some(finished.tokens.len() - 1)
    );

    let endless = SamplingParams {
        max_new_tokens: 9,
        ..SamplingParams::default()
    };
    let finished = alone(prompt(1), endless, seed(3));
    assert_eq!(
        (finished.tokens.len(), finished.finish_reason),
        (9, FinishReason::Length)
    );

    // The context ends first.
    let mut engine = engine(EngineConfig {
        max_context: 20,
        ..EngineConfig::default()
    });
    let endless = SamplingParams {
        max_new_tokens: 900,
        ..SamplingParams::default()
    };
    let id = engine.add(prompt(1), endless, seed(3)).unwrap();
    let finished = drain(&mut engine).remove(&id).unwrap();
    assert_eq!(
        (finished.tokens.len(), finished.finish_reason),
        (10, FinishReason::Length)
    );

    // Nothing is left for another turn: an ending, not an error.
    engine.extend(id, &[5; 30]).unwrap();
    let finished = drain(&mut engine).remove(&id).unwrap();
    assert_eq!(
        (finished.tokens.len(), finished.finish_reason),
        (0, FinishReason::Length)
    );
}

#[test]
fn impossible_requests_are_refused_with_the_numbers() {
    let mut engine = engine(EngineConfig {
        max_cache_tokens: 64,
        ..EngineConfig::default()
    });
    let mut refuse =
        |prompt: Vec<u32>, params| engine.add(prompt, params, seed(0)).unwrap_err().to_string();
    assert_eq!(refuse(vec![], sampled(1)), "prompt is empty");
    assert!(refuse(vec![5; 64], sampled(1)).starts_with("prompt too long: 64 tokens"));
    assert_eq!(
        refuse(vec![24], sampled(1)),
        "token 24 is outside the vocabulary of 24"
    );
    assert!(refuse(vec![5], sampled(0)).starts_with("invalid `max_new_tokens`"));
    assert!(engine.sequences.is_empty());

    let id = engine.add(vec![5; 4], sampled(5), seed(0)).unwrap();
    let error = engine.extend(id, &[5]).unwrap_err();
    assert!(
        matches!(error, EngineError::StillGenerating { .. }),
        "{error}"
    );
    engine.release(id).unwrap();
    let error = engine.extend(id, &[5]).unwrap_err();
    assert!(
        matches!(error, EngineError::UnknownSequence { .. }),
        "{error}"
    );
    let config = EngineConfig {
        max_cache_tokens: 3,
        ..EngineConfig::default()
    };
    let error = Engine::new(toy_decoder(), config).unwrap_err();
    assert_eq!(error.to_string(), "invalid `max_cache_tokens`: 3 < 32");
}

#[test]
fn a_group_survives_the_release_of_its_leader() {
    let seeds: Vec<SequenceSeed> = (0..4).map(seed).collect();
    for steps in 0..4 {
        let mut engine = engine(EngineConfig {
            prefill_chunk: 10,
            ..EngineConfig::default()
        });
        let ids = engine.add_group(&prompt(4), &sampled(10), &seeds).unwrap();
        let mut finished = BTreeMap::new();
        for _ in 0..steps {
            finished.extend(engine.step().unwrap().into_iter().map(|f| (f.id, f)));
        }
        engine.release(ids[0]).unwrap();
        engine.release(ids[2]).unwrap();
        finished.extend(drain(&mut engine));
        for member in [1, 3] {
            assert_same(
                &finished[&ids[member]],
                &alone(prompt(4), sampled(10), seeds[member]),
            );
            engine.release(ids[member]).unwrap();
        }
        assert_eq!(engine.cached_tokens(), 0);
    }
}

#[test]
fn an_update_of_the_weights_reaches_sequences_that_are_under_way() {
    let decoder = toy_decoder();
    let mut engine = Engine::new(Arc::clone(&decoder), EngineConfig::default()).unwrap();
    let greedy = SamplingParams {
        temperature: 0.0,
        ..sampled(10)
    };
    let id = engine.add(prompt(4), greedy.clone(), seed(0)).unwrap();
    for _ in 0..3 {
        assert_eq!(engine.step().unwrap(), []);
    }
    let so_far = engine.tokens(id).unwrap().to_vec();
    for (name, variable) in decoder.variables() {
        if name.contains("v_proj") {
            variable.set(&variable.neg().unwrap()).unwrap();
        }
    }
    decoder.mark_updated();
    let finished = drain(&mut engine).remove(&id).unwrap();
    let mut fresh = Engine::new(decoder, EngineConfig::default()).unwrap();
    let again = SamplingParams {
        max_new_tokens: 7,
        ..greedy.clone()
    };
    let id = fresh.add(so_far, again, seed(0)).unwrap();
    let expected = drain(&mut fresh).remove(&id).unwrap();
    assert_eq!(finished.tokens[3..], expected.tokens);
    assert_eq!(finished.logprobs[3..], expected.logprobs);
    assert_ne!(
        finished.logprobs,
        alone(prompt(4), greedy, seed(0)).logprobs
    );
}

#[test]
fn diverged_weights_are_an_error_that_names_the_sequence() {
    let decoder = toy_decoder();
    let (_, variable) = &decoder.variables()[0];
    variable
        .set(&(variable.as_tensor() * f64::NAN).unwrap())
        .unwrap();
    let mut engine = Engine::new(decoder, EngineConfig::default()).unwrap();
    let id = engine.add(prompt(0), sampled(4), seed(0)).unwrap();
    let error = engine.step().unwrap_err();
    assert!(
        matches!(error, EngineError::NonFiniteLogits { id: at } if at == id),
        "{error}"
    );
}

#[test]
fn counters_count_tokens() {
    let mut engine = engine(EngineConfig::default());
    let ids = engine
        .add_group(&prompt(2), &sampled(8), &[seed(1), seed(2)])
        .unwrap();
    let finished = drain(&mut engine);
    let sampled: usize = ids.iter().map(|id| finished[id].tokens.len()).sum();
    let stats = engine.stats();
    assert_eq!(stats.generated_tokens, sampled as u64);
    assert_eq!(stats.prefill_tokens, prompt(2).len() as u64);
    assert!(stats.tokens_per_second() > 0.0);
}

/// What an owner may do between steps.
#[derive(Debug, Clone)]
enum Action {
    Add(usize),
    Group(usize, usize),
    Steps(usize),
    Extend(prop::sample::Index, usize),
    Fork(prop::sample::Index),
    Release(prop::sample::Index),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        (1_usize..50).prop_map(Action::Add),
        (1_usize..50, 1_usize..6).prop_map(|(length, size)| Action::Group(length, size)),
        (1_usize..12).prop_map(Action::Steps),
        (any::<prop::sample::Index>(), 0_usize..20).prop_map(|(at, len)| Action::Extend(at, len)),
        any::<prop::sample::Index>().prop_map(Action::Fork),
        any::<prop::sample::Index>().prop_map(Action::Release),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Whatever its owner does, the engine stays within its memory, every turn ends, and the
    /// tokens of each sequence are the ones it would have sampled alone.
    #[test]
    fn any_order_of_requests_ends_within_bounds(
        actions in prop::collection::vec(action(), 1..25),
        max_cache_tokens in 96_usize..300,
        prefill_chunk in 1_usize..40,
        max_batch_tokens in 1_usize..60,
    ) {
        let config = EngineConfig {
            max_running: 6, max_cache_tokens, prefill_chunk, max_batch_tokens, max_context: 90, ..EngineConfig::default()
        };
        let mut engine = engine(config);
        // Of each sequence: its first prompt and seed, for single turns.
        let mut requests: BTreeMap<SequenceId, (Vec<u32>, SequenceSeed)> = BTreeMap::new();
        let mut finished: BTreeMap<SequenceId, Finished> = BTreeMap::new();
        let mut samples = 0..;
        for action in actions {
            let live: Vec<SequenceId> = engine.sequences.keys().copied().collect();
            match action {
                Action::Add(length) => {
                    let (prompt, seed) = (vec![5; length], seed(samples.next().unwrap()));
                    let id = engine.add(prompt.clone(), sampled(15), seed).unwrap();
                    requests.insert(id, (prompt, seed));
                }
                Action::Group(length, size) => {
                    let prompt = vec![6; length];
                    let seeds: Vec<_> = samples.by_ref().take(size).map(seed).collect();
                    let ids = engine.add_group(&prompt, &sampled(15), &seeds).unwrap();
                    for (id, seed) in ids.into_iter().zip(seeds) {
                        requests.insert(id, (prompt.clone(), seed));
                    }
                }
                Action::Steps(count) => for _ in 0..count {
                    for turn in engine.step().unwrap() {
                        finished.entry(turn.id).or_insert(turn);
                    }
                    prop_assert!(engine.cached_tokens() <= max_cache_tokens);
                },
                Action::Extend(at, length) if !live.is_empty() => {
                    let _ = engine.extend(*at.get(&live), &[7; 20][..length]);
                }
                Action::Fork(at) if !live.is_empty() => {
                    let _ = engine.fork(*at.get(&live), seed(samples.next().unwrap()));
                }
                Action::Release(at) if !live.is_empty() => engine.release(*at.get(&live)).unwrap(),
                Action::Extend(..) | Action::Fork(_) | Action::Release(_) => {}
            }
        }
        for (id, turn) in drain(&mut engine) {
            finished.entry(id).or_insert(turn);
        }
        for (id, (prompt, seed)) in requests {
            if let Some(turn) = finished.get(&id) {
                assert_same(turn, &alone(prompt, sampled(15), seed));
            }
        }
        let live: Vec<SequenceId> = engine.sequences.keys().copied().collect();
        for id in live {
            engine.release(id).unwrap();
        }
        prop_assert_eq!(engine.cached_tokens(), 0);
        prop_assert_eq!(engine.cache.rows(), 0);
    }
}
