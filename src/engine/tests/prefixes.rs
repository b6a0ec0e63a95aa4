//! What sequences share, and that it changes no bit.

use super::*;

/// Prompts that begin alike in several ways.
fn mixed_prompts(count: usize) -> Vec<Vec<u32>> {
    let text = |salt: usize, len: usize| -> Vec<u32> {
        (0..len)
            .map(|i| u32::try_from(4 + (i * 7 + i * i * salt + salt) % 20).unwrap())
            .collect()
    };
    (0..count)
        .map(|i| {
            let system = text(i % 3, [40, 64, 97][i % 3]);
            let turn = text(i % 7, 5 + 11 * (i % 5));
            [system, turn, text(i, i % 4)].concat()
        })
        .collect()
}

/// Runs all prompts, which arrive over time, and keeps no finished sequence.
fn run_all(config: EngineConfig, prompts: &[Vec<u32>]) -> (Vec<Finished>, Engine) {
    let mut engine = engine(config);
    let mut finished = BTreeMap::new();
    let step = |engine: &mut Engine, finished: &mut BTreeMap<SequenceId, Finished>| {
        for turn in engine.step().unwrap() {
            engine.release(turn.id).unwrap();
            finished.insert(turn.id, turn);
        }
        let blocks = engine.cache.blocks();
        assert!(
            blocks * KEYS_PER_BLOCK <= engine.config.max_cache_tokens,
            "{blocks} blocks"
        );
    };
    for (prompt, i) in prompts.iter().zip(0..) {
        engine.add(prompt.clone(), sampled(20), seed(i)).unwrap();
        for _ in 0..i % 5 {
            step(&mut engine, &mut finished);
        }
    }
    while engine.running() > 0 {
        step(&mut engine, &mut finished);
    }
    (finished.into_values().collect(), engine)
}

#[test]
pub(super) fn prefixes_that_are_used_again_change_no_bit() {
    // The kernels' twins are slow where nothing is optimised.
    let count = if paged::is_paged() { 30 } else { 100 };
    let prompts = mixed_prompts(count);
    let off = EngineConfig {
        prefix_caching: PrefixCaching::Off,
        ..EngineConfig::default()
    };
    let (expected, engine) = run_all(off, &prompts);
    assert_eq!(engine.stats().prefix_hit_tokens, 0);
    let all: u64 = prompts.iter().map(|prompt| prompt.len() as u64).sum();
    // A last token that is alone in its step counts as generation.
    let is_all = |tokens: u64| (all - count as u64..=all).contains(&tokens);
    assert!(is_all(engine.stats().prefill_tokens));

    for max_cache_tokens in [65_536, 640, 256] {
        let config = EngineConfig {
            max_cache_tokens,
            prefill_chunk: 48,
            ..EngineConfig::default()
        };
        let (found, engine) = run_all(config, &prompts);
        let stats = engine.stats();
        for (found, expected) in found.iter().zip(&expected) {
            assert_same(found, expected);
        }
        assert!(
            stats.prefix_hit_tokens > all / 5,
            "{max_cache_tokens}: {stats:?}"
        );
        assert_eq!(engine.cached_tokens(), 0);
        if max_cache_tokens == 65_536 {
            assert!(
                is_all(stats.prefix_hit_tokens + stats.prefill_tokens),
                "{stats:?}"
            );
            let hits: u64 = found.iter().map(|turn| turn.prefix_hit_tokens as u64).sum();
            assert_eq!(stats.prefix_hit_tokens, hits);
        } else {
            assert!(engine.cache.blocks() > 0, "what there is room for stays");
        }
    }
}

#[test]
pub(super) fn a_conversation_that_is_sent_again_is_computed_once() {
    let mut engine = engine(EngineConfig::default());
    let first = prompt(9);
    let id = engine.add(first.clone(), sampled(40), seed(1)).unwrap();
    let turn = drain_releasing(&mut engine).remove(&id).unwrap();
    let second = [first, turn.tokens, vec![7; 10]].concat();
    let before = engine.stats();
    let id = engine.add(second.clone(), sampled(5), seed(2)).unwrap();
    let found = drain(&mut engine).remove(&id).unwrap();
    assert_same(&found, &alone(second.clone(), sampled(5), seed(2)));
    // All but the last full block's rest; the last sampled token was never computed.
    let cached = (second.len() - 11) / KEYS_PER_BLOCK * KEYS_PER_BLOCK;
    assert!(cached >= 64);
    assert_eq!(found.prefix_hit_tokens, cached);
    let computed = engine.stats().prefill_tokens - before.prefill_tokens;
    assert_eq!(computed, (second.len() - cached) as u64);
}

#[test]
pub(super) fn answers_are_kept_only_where_that_is_asked_for() {
    for (prefix_caching, hits) in [
        (PrefixCaching::Off, 0),
        (PrefixCaching::Prompts, 2 * KEYS_PER_BLOCK),
        (PrefixCaching::All, 3 * KEYS_PER_BLOCK),
    ] {
        let mut engine = engine(EngineConfig {
            prefix_caching,
            ..EngineConfig::default()
        });
        let endless = |max_new_tokens| SamplingParams {
            max_new_tokens,
            ..SamplingParams::default()
        };
        let first = prompt(9);
        let id = engine.add(first.clone(), endless(50), seed(1)).unwrap();
        let turn = drain_releasing(&mut engine).remove(&id).unwrap();
        let second = [first, turn.tokens].concat();
        let id = engine.add(second.clone(), endless(5), seed(2)).unwrap();
        let found = drain_releasing(&mut engine).remove(&id).unwrap();
        assert_same(&found, &alone(second, endless(5), seed(2)));
        assert_eq!(found.prefix_hit_tokens, hits, "{prefix_caching:?}");
    }
}

#[test]
pub(super) fn a_prompt_of_whole_blocks_leaves_one_block_to_compute() {
    let mut engine = engine(EngineConfig::default());
    for hits in [0, KEYS_PER_BLOCK] {
        let id = engine.add(vec![5; 64], sampled(3), seed(1)).unwrap();
        let turn = drain_releasing(&mut engine).remove(&id).unwrap();
        assert_same(&turn, &alone(vec![5; 64], sampled(3), seed(1)));
        assert_eq!(turn.prefix_hit_tokens, hits);
    }
}

#[test]
pub(super) fn prefixes_end_with_the_weights_that_made_them() {
    let decoder = toy_decoder();
    let mut engine = Engine::new(Arc::clone(&decoder), EngineConfig::default()).unwrap();
    let run = |engine: &mut Engine| {
        let id = engine.add(prompt(9), sampled(10), seed(1)).unwrap();
        drain_releasing(engine).remove(&id).unwrap()
    };
    let before = run(&mut engine);
    for (name, variable) in decoder.variables() {
        if name.contains("v_proj") {
            variable.set(&variable.neg().unwrap()).unwrap();
        }
    }
    decoder.mark_updated();
    let after = run(&mut engine);
    assert_eq!(after.prefix_hit_tokens, 0);
    assert_ne!(before.logprobs, after.logprobs);
    assert_eq!(
        run(&mut engine).prefix_hit_tokens,
        64,
        "the new ones are kept, too"
    );
    assert!(engine.cache.blocks() > 0);
    engine.trim();
    assert_eq!(engine.cache.blocks(), 0);
    assert_same(&run(&mut engine), &after);
}

#[test]
pub(super) fn a_budget_in_bytes_is_one_in_tokens() {
    // 2 layers, 2 heads of 8 numbers, keys and values, 4 bytes each.
    let token = 2 * 2 * 8 * 2 * 4;
    let with = |bytes| EngineConfig {
        max_cache_bytes: Some(bytes),
        ..EngineConfig::default()
    };
    let engine = engine(with(token * 100));
    assert_eq!(engine.config().max_cache_tokens, 96);
    assert_eq!(engine.max_context(), 96);
    let error = Engine::new(toy_decoder(), with(token * 31)).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("invalid `max_cache_bytes`: {} < {}", token * 31, token * 32)
    );
}
