//! The engine as it runs on a GPU, on the CPU: blocks in one tensor, the kernels' twins, tokens chosen
//! where the logits are.

use std::cell::Cell;

use super::*;

thread_local! {
    static IS_PAGED: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread's toys are the ones for a GPU.
pub(super) fn is_paged() -> bool {
    IS_PAGED.get()
}

/// Runs `test` with such toys. `any_order_of_requests_ends_within_bounds` is left out: who holds which
/// block is the same code, and it takes a minute.
fn on_pages<R>(test: impl FnOnce() -> R) -> R {
    IS_PAGED.set(true);
    let result = test();
    IS_PAGED.set(false);
    result
}

/// Runs tests of the engine once more.
macro_rules! again_on_pages {
    ($($module:ident::$test:ident,)*) => {
        $(
            #[test]
            fn $test() {
                on_pages(super::$module::$test);
            }
        )*
    };
}

mod all {
    pub(super) use super::super::*;
}

again_on_pages! {
    prefixes::a_conversation_that_is_sent_again_is_computed_once,
    prefixes::a_prompt_of_whole_blocks_leaves_one_block_to_compute,
    prefixes::answers_are_kept_only_where_that_is_asked_for,
    prefixes::prefixes_end_with_the_weights_that_made_them,
    prefixes::prefixes_that_are_used_again_change_no_bit,
    turns::a_group_and_a_full_cache_close_reasoning_as_one_sequence_does,
    turns::penalties_and_biases_count_from_the_turn_that_is_sampled,
    turns::the_likeliest_tokens_come_with_each_token,
}

/// The same for tests that stand above this module.
macro_rules! again_from_above {
    ($($test:ident,)*) => {
        $(
            #[test]
            fn $test() {
                on_pages(all::$test);
            }
        )*
    };
}

again_from_above! {
    a_full_cache_delays_sequences_and_changes_nothing,
    a_group_samples_what_its_members_sample_alone,
    a_group_survives_the_release_of_its_leader,
    an_extended_sequence_continues_as_if_it_had_been_one_prompt,
    counters_count_tokens,
    diverged_weights_are_an_error_that_names_the_sequence,
    forks_share_the_past_and_draw_their_own_future,
    logprobs_are_those_of_the_whole_text_scored_at_once,
    tokens_do_not_depend_on_the_batch,
}

/// Runs eight sampled and eight greedy requests.
fn generate(params: &SamplingParams) -> Vec<Finished> {
    let mut engine = engine(EngineConfig::default());
    for temperature in [0.0, 0.8] {
        let params = SamplingParams {
            temperature,
            ..params.clone()
        };
        for i in 0..8 {
            let seed = seed(i as u64);
            engine.add(prompt(i), params.clone(), seed).unwrap();
        }
    }
    drain(&mut engine).into_values().collect()
}

#[test]
fn tokens_are_those_of_the_cpus_own_kernels() {
    let expected = generate(&sampled(40));
    let found = on_pages(|| generate(&sampled(40)));
    on_pages(|| {
        for (found, expected) in found.iter().zip(&expected) {
            assert_same(found, expected);
        }
    });
    assert!(expected.iter().any(|turn| turn.tokens.len() > 10));
}

#[test]
fn where_a_token_is_chosen_makes_no_difference() {
    let plain = sampled(40);
    // Asks for more than the device tells, and changes nothing.
    let asking = SamplingParams {
        top_logprobs: 1,
        ..plain.clone()
    };
    assert!(plain.is_plain() && !asking.is_plain());
    let [on_device, on_host] = [plain, asking].map(|params| on_pages(|| generate(&params)));
    for (device, host) in on_device.iter().zip(&on_host) {
        assert_eq!(device.tokens, host.tokens);
        assert_eq!(device.logprobs, host.logprobs);
        assert_eq!(device.kept_logprobs, host.kept_logprobs);
    }
}

#[test]
fn a_guide_leads_a_turn_whose_temperature_is_all_else() {
    // The tokens of this vocabulary are the bytes below 24.
    let tokenizer = Tokenizer::byte_level(&[]).unwrap();
    let factory = GuideFactory::new(&tokenizer, toy_config().vocab_size, &[STOP]).unwrap();
    on_pages(|| {
        let mut engine = engine(EngineConfig::default());
        let [free, guided] = [0, 1].map(|_| engine.add(prompt(3), sampled(9), seed(4)).unwrap());
        let guide = factory.compile(r"start: /[\t\n]{5}/".to_owned()).unwrap();
        engine.set_guide(guided, guide).unwrap();
        let finished = drain(&mut engine);
        let text = finished[&guided].text(&tokenizer).unwrap();
        let is_led = |byte| matches!(byte, b'\t' | b'\n');
        assert!(text.len() == 5 && text.bytes().all(is_led), "{text:?}");
        assert_ne!(finished[&free].text(&tokenizer).unwrap(), text);
    });
}
