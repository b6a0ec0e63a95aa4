//! How turns end, and what else a request may ask for.

use super::*;

/// Every token is a byte, so that text and tokens are told apart.
fn engine_with_text() -> Engine {
    let mut engine = engine(EngineConfig::default());
    engine.set_tokenizer(Tokenizer::byte_level(&[]).unwrap());
    engine
}

fn run(engine: &mut Engine, params: &SamplingParams) -> Finished {
    let id = engine.add(prompt(2), params.clone(), seed(5)).unwrap();
    drain_releasing(engine).remove(&id).unwrap()
}

#[test]
pub(super) fn a_stop_string_ends_the_turn_and_cuts_its_text_alone() {
    let mut engine = engine_with_text();
    let params = SamplingParams {
        max_new_tokens: 40,
        ..SamplingParams::default()
    };
    let whole = run(&mut engine, &params);
    let tokenizer = Tokenizer::byte_level(&[]).unwrap();
    let text = whole.text(&tokenizer).unwrap();
    // Three tokens from the middle, which occur nowhere before.
    let (at, stop) = (10..30)
        .map(|at| (at, &text[at..at + 3]))
        .find(|(at, stop)| text.find(stop) == Some(*at))
        .unwrap();
    let params = SamplingParams {
        stop: vec!["never".to_owned(), stop.to_owned()],
        ..params
    };
    let cut = run(&mut engine, &params);
    assert_eq!(cut.finish_reason, FinishReason::StopText);
    assert_eq!(cut.tokens, whole.tokens[..at + 3]);
    assert_eq!(cut.logprobs, whole.logprobs[..at + 3]);
    assert_eq!(
        cut.stop_text,
        Some(StopText {
            text: stop.to_owned(),
            at
        })
    );
    assert_eq!(cut.text(&tokenizer).unwrap(), text[..at]);

    let params = SamplingParams {
        min_new_tokens: at + 4,
        ..params
    };
    let later = run(&mut engine, &params);
    assert!(later.tokens.len() > at + 3, "{later:?}");

    let error = engine_without_text(&params);
    assert!(error.contains("`Engine::set_tokenizer`"), "{error}");
}

fn engine_without_text(params: &SamplingParams) -> String {
    let mut engine = engine(EngineConfig::default());
    let added = engine.add(prompt(2), params.clone(), seed(5));
    added.unwrap_err().to_string()
}

#[test]
pub(super) fn penalties_and_biases_count_from_the_turn_that_is_sampled() {
    let greedy = SamplingParams {
        temperature: 0.0,
        max_new_tokens: 12,
        ..SamplingParams::default()
    };
    let biased = SamplingParams {
        logit_bias: [(9, 100.0)].into(),
        ..greedy.clone()
    };
    let finished = alone(prompt(2), biased, seed(0));
    assert_eq!(finished.tokens, [9; 12]);
    assert!(
        finished
            .kept_logprobs
            .iter()
            .all(|&logprob| logprob > -1e-6)
    );
    assert_ne!(finished.kept_logprobs, finished.logprobs);

    // 100 for the bias are taken off again after 50 repetitions of 2 each.
    let tired = SamplingParams {
        logit_bias: [(9, 100.0)].into(),
        frequency_penalty: 2.0,
        max_new_tokens: 100,
        ..greedy
    };
    let mut engine = engine(EngineConfig::default());
    let id = engine.add(vec![9; 60], tired, seed(0)).unwrap();
    for _ in 0..2 {
        let turn = drain(&mut engine).remove(&id).unwrap();
        let repeated = turn.tokens.iter().filter(|&&token| token == 9).count();
        assert!(
            (40..70).contains(&repeated),
            "{repeated}: the prompt does not count"
        );
        engine.extend(id, &[5]).unwrap();
    }
}

#[test]
pub(super) fn the_likeliest_tokens_come_with_each_token() {
    let params = SamplingParams {
        top_logprobs: 3,
        temperature: 0.0,
        ..sampled(10)
    };
    let finished = alone(prompt(3), params, seed(0));
    assert_eq!(finished.top_logprobs.len(), finished.tokens.len());
    for (at, top) in finished.top_logprobs.iter().enumerate() {
        assert_eq!(top.len(), 3);
        assert_eq!(top[0].token, finished.tokens[at]);
        assert_eq!(top[0].logprob.to_bits(), finished.logprobs[at].to_bits());
    }
}

const OPEN: u32 = 1;
const CLOSE: u32 = 2;

fn thinking(max_tokens: usize, max_new_tokens: usize) -> SamplingParams {
    SamplingParams {
        thinking: Some(ThinkingBudget {
            max_tokens,
            start_token_id: OPEN,
            end_token_id: CLOSE,
            close_token_ids: vec![20, CLOSE, 20],
        }),
        // The model itself neither opens nor closes.
        logit_bias: [(OPEN, -100.0), (CLOSE, -100.0)].into(),
        max_new_tokens,
        ..SamplingParams::default()
    }
}

#[test]
pub(super) fn reasoning_is_closed_at_its_budget_by_tokens_that_are_not_sampled() {
    let prompt = [prompt(4), vec![OPEN, 20]].concat();
    let finished = alone(prompt.clone(), thinking(6, 16), seed(3));
    assert_eq!(finished.tokens.len(), 16);
    assert_eq!(finished.tokens[6..9], [20, CLOSE, 20]);
    let sampled: Vec<bool> = (0..16).map(|at| !(6..9).contains(&at)).collect();
    assert_eq!(finished.is_sampled, sampled);
    assert_eq!(finished.logprobs[6..9], [0.0; 3]);
    assert!(
        finished
            .logprobs
            .iter()
            .filter(|&&logprob| logprob < 0.0)
            .count()
            >= 12
    );

    // What follows is what the model says to such a text.
    let so_far = [prompt.clone(), finished.tokens[..9].to_vec()].concat();
    let whole = [so_far, finished.tokens[9..].to_vec()].concat();
    let decoder = toy_decoder();
    let batch = PackedBatch::from_sequences([&whole]);
    let hidden = decoder.hidden(&batch, Adapters::On).unwrap();
    let logits = decoder.logits(&hidden).unwrap().to_vec2::<f32>().unwrap();
    for at in 9..16 {
        let row = &logits[prompt.len() + at - 1];
        let log_sum = row.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
        let expected = f64::from(row[finished.tokens[at] as usize]) - log_sum;
        assert!((f64::from(finished.logprobs[at]) - expected).abs() < 1e-5);
    }

    // Without a mark in the prompt's end nothing is open, so nothing is closed.
    let free = alone([vec![OPEN], vec![20; 9]].concat(), thinking(6, 16), seed(3));
    assert!(free.is_sampled.iter().all(|&sampled| sampled));
    // No room for the closing tokens: the turn ends.
    let short = alone(prompt.clone(), thinking(6, 8), seed(3));
    assert_eq!(
        (short.tokens.len(), short.finish_reason),
        (6, FinishReason::Length)
    );
    // No reasoning at all.
    let none = alone(prompt, thinking(0, 8), seed(3));
    assert_eq!(none.tokens[..3], [20, CLOSE, 20]);
    assert_eq!(
        none.is_sampled,
        [false, false, false, true, true, true, true, true]
    );
}

#[test]
pub(super) fn a_group_and_a_full_cache_close_reasoning_as_one_sequence_does() {
    let prompt = [prompt(4), vec![OPEN]].concat();
    for budget in [0, 7] {
        let mut engine = engine(EngineConfig {
            max_cache_tokens: 128,
            prefill_chunk: 10,
            ..EngineConfig::default()
        });
        let seeds: Vec<SequenceSeed> = (0..4).map(seed).collect();
        let ids = engine
            .add_group(&prompt, &thinking(budget, 30), &seeds)
            .unwrap();
        let finished = drain_releasing(&mut engine);
        for (id, &seed) in ids.iter().zip(&seeds) {
            let expected = alone(prompt.clone(), thinking(budget, 30), seed);
            assert_same(&finished[id], &expected);
            assert_eq!(finished[id].is_sampled, expected.is_sampled);
        }
    }
}
