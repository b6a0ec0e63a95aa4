//! Numbers from torch, and properties of draws.

use proptest::prelude::*;
use rstest::rstest;

use super::*;
use crate::engine::model::tests_support::golden;

const LOGITS: [f32; 4] = [2.0, 1.0, 0.0, -1.0];

fn random(sample: u64) -> ChaCha8Rng {
    SequenceSeed::new(7, 3, sample).generator()
}

fn sample_one(logits: &[f32], params: &SamplingParams, sample_seed: u64) -> Option<TokenLogprob> {
    sample_after(logits, params, History::default(), sample_seed).map(|sampled| sampled.chosen)
}

fn sample_after(
    logits: &[f32],
    params: &SamplingParams,
    history: History<'_>,
    sample_seed: u64,
) -> Option<Sampled> {
    sample(Row {
        guide: None,
        logits,
        params,
        history,
        random: &mut random(sample_seed),
    })
}

fn draws(params: &SamplingParams, count: u64) -> Vec<TokenLogprob> {
    (0..count)
        .map(|i| sample_one(&LOGITS, params, i).unwrap())
        .collect()
}

/// torch 2.15: `torch.log_softmax(torch.tensor([2., 1., 0., -1.]) / 0.7, -1)[1]`.
#[test]
fn logprobs_are_those_of_the_scaled_logits() {
    let params = SamplingParams {
        temperature: 0.7,
        ..SamplingParams::default()
    };
    let chosen = draws(&params, 100);
    let second = chosen.iter().find(|chosen| chosen.token == 1).unwrap();
    assert!((second.logprob - -1.699_245_2).abs() < 1e-6, "{second:?}");
    assert_eq!(second.logprob, second.kept_logprob);
}

/// At temperature 0 the untempered distribution is reported: `log_softmax(logits)[0]`.
#[test]
fn greedy_takes_the_first_of_the_best() {
    let params = SamplingParams {
        temperature: 0.0,
        ..SamplingParams::default()
    };
    let chosen = sample_one(&LOGITS, &params, 0).unwrap();
    assert_eq!(chosen.token, 0);
    assert!((chosen.logprob - -0.440_189_7).abs() < 1e-6, "{chosen:?}");
    assert_eq!(sample_one(&[1.0, 3.0, 3.0], &params, 0).unwrap().token, 1);
}

#[test]
fn a_nucleus_reports_both_logprobs() {
    let case = golden("logprob_top_p_support");
    let params = SamplingParams {
        top_p: 0.8,
        ..SamplingParams::default()
    };
    assert_eq!(case.float("inputs", "top_p"), 0.8);
    assert_eq!(case.floats("inputs", "logits"), LOGITS.map(f64::from));
    assert!(params.is_truncated());
    let chosen = draws(&params, 200);
    assert!(chosen.iter().all(|chosen| chosen.token <= 1));
    let second = chosen.iter().find(|chosen| chosen.token == 1).unwrap();
    let (whole, kept) = (f64::from(second.logprob), f64::from(second.kept_logprob));
    assert!(
        (whole - case.float("expected", "logp_full")).abs() < 1e-6,
        "{second:?}"
    );
    assert!(
        (kept - case.float("expected", "logp_renormalised")).abs() < 1e-6,
        "{second:?}"
    );
    // Which of the two is trained on is off by the kept mass, so what cuts is not trained with.
    assert!(((whole - kept).exp() - case.float("expected", "kept_mass")).abs() < 1e-6);
    assert!(params.check_trainable().is_err());
}

#[rstest]
#[case(SamplingParams { top_k: 1, ..SamplingParams::default() }, 0)]
#[case(SamplingParams { top_k: 3, ..SamplingParams::default() }, 2)]
#[case(SamplingParams { min_p: 0.3, ..SamplingParams::default() }, 1)]
#[case(SamplingParams { top_p: 0.96, min_p: 0.1, ..SamplingParams::default() }, 2)]
#[case(SamplingParams { top_k: 100, ..SamplingParams::default() }, 3)]
fn cuts_keep_the_best_tokens(#[case] params: SamplingParams, #[case] last: u32) {
    let tokens = draws(&params, 400).iter().map(|chosen| chosen.token).max();
    assert_eq!(tokens, Some(last));
}

#[test]
fn frequencies_follow_the_probabilities() {
    let params = SamplingParams::default();
    let count = 20_000;
    let chosen = draws(&params, count);
    for token in 0..4_u32 {
        let seen = chosen.iter().filter(|chosen| chosen.token == token).count() as f64;
        let logits = LOGITS.map(f64::from);
        let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
        let probability = logits[token as usize].exp() / total;
        let deviation = (probability * (1.0 - probability) / count as f64).sqrt();
        let difference = seen / count as f64 - probability;
        assert!(
            difference.abs() < 4.0 * deviation,
            "token {token}: {difference}"
        );
    }
}

#[test]
fn streams_differ_in_every_part_of_the_seed() {
    let first = |seed: SequenceSeed| seed.generator().next_u64();
    let seeds = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3)];
    let mut numbers: Vec<u64> = seeds
        .iter()
        .map(|&(run, task, sample)| first(SequenceSeed { run, task, sample }))
        .collect();
    assert_eq!(first(SequenceSeed::new(1, 2, 3)), numbers[0]);
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), seeds.len());
}

#[test]
fn logits_that_are_not_numbers_are_noticed() {
    let params = SamplingParams::default();
    for logits in [
        &[0.0, f32::NAN][..],
        &[f32::INFINITY, 0.0],
        &[f32::NEG_INFINITY; 2],
        &[],
    ] {
        assert_eq!(sample_one(logits, &params, 0), None, "{logits:?}");
    }
    let masked = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
    let chosen = sample_one(&masked, &params, 0).unwrap();
    assert_eq!((chosen.token, chosen.logprob), (1, 0.0));
}

#[rstest]
#[case(SamplingParams { temperature: -1.0, ..SamplingParams::default() }, "temperature")]
#[case(SamplingParams { temperature: f32::NAN, ..SamplingParams::default() }, "temperature")]
#[case(SamplingParams { top_p: 0.0, ..SamplingParams::default() }, "top_p")]
#[case(SamplingParams { min_p: 1.5, ..SamplingParams::default() }, "min_p")]
#[case(SamplingParams { max_new_tokens: 0, ..SamplingParams::default() }, "max_new_tokens")]
fn parameters_out_of_range_are_named(#[case] params: SamplingParams, #[case] field: &str) {
    let error = params.validate().unwrap_err();
    assert!(
        error.to_string().starts_with(&format!("invalid `{field}`")),
        "{error}"
    );
}

/// transformers 5.24: `RepetitionPenaltyLogitsProcessor(1.5)(tensor([[0, 3, 3]]), logits[None])`,
/// then `torch.log_softmax(…, -1)`.
#[test]
fn repetition_is_penalised_in_prompt_and_turn() {
    let params = SamplingParams {
        repetition_penalty: 1.5,
        top_logprobs: 4,
        ..SamplingParams::default()
    };
    let history = History {
        prompt: &[0, 3],
        output: &[3],
    };
    let sampled = sample_after(&LOGITS, &params, history, 0).unwrap();
    let expected = [-0.712_432_5, -1.045_765_9, -2.045_765_9, -3.545_765_9];
    for (token, expected) in expected.into_iter().enumerate() {
        let entry = sampled.top.iter().find(|top| top.token as usize == token);
        let found = entry.unwrap().kept_logprob;
        assert!((found - expected).abs() < 1e-6, "token {token}: {found}");
    }
}

/// torch, on the logits of the other tests, in vLLM's order:
///
/// ```python
/// l = logits.clone(); l[2] += 3.
/// l = RepetitionPenaltyLogitsProcessor(1.3)(tensor([[0, 2, 2]]), l[None])[0]
/// c = tensor([0., 0., 2., 0.]); l = l - 0.4 * c - 0.6 * (c > 0)
/// torch.log_softmax(l / 0.8, -1), torch.log_softmax(logits / 0.8, -1)
/// ```
#[test]
fn biases_and_penalties_make_one_distribution_and_leave_the_other() {
    let params = SamplingParams {
        temperature: 0.8,
        repetition_penalty: 1.3,
        presence_penalty: 0.6,
        frequency_penalty: 0.4,
        logit_bias: [(2, 3.0)].into(),
        top_logprobs: 4,
        ..SamplingParams::default()
    };
    let history = History {
        prompt: &[0],
        output: &[2, 2],
    };
    let sampled = sample_after(&LOGITS, &params, history, 0).unwrap();
    let kept = [-0.696_419_1, -1.369_496_1, -1.484_880_7, -3.869_496_3];
    let whole = [-0.330_818_8, -1.580_818_8, -2.830_818_7, -4.080_818_7];
    let order: Vec<u32> = sampled.top.iter().map(|top| top.token).collect();
    assert_eq!(order, [0, 1, 2, 3]);
    for (top, (kept, whole)) in sampled.top.iter().zip(kept.into_iter().zip(whole)) {
        assert!((top.kept_logprob - kept).abs() < 1e-6, "{top:?}");
        assert!((top.logprob - whole).abs() < 1e-6, "{top:?}");
    }
}

#[test]
fn a_turn_that_is_too_short_cannot_stop() {
    let params = SamplingParams {
        temperature: 0.0,
        min_new_tokens: 2,
        stop_token_ids: vec![0, 1],
        ..SamplingParams::default()
    };
    let best = |output: &[u32]| {
        let history = History {
            prompt: &[],
            output,
        };
        let sampled = sample_after(&LOGITS, &params, history, 0).unwrap();
        sampled.chosen.token
    };
    assert_eq!([best(&[]), best(&[2]), best(&[2, 2])], [2, 2, 0]);
}

#[test]
fn the_likeliest_tokens_come_best_first_and_only_if_they_could_be_drawn() {
    let tokens = |params: SamplingParams| -> Vec<u32> {
        let params = SamplingParams {
            top_logprobs: 3,
            ..params
        };
        let sampled = sample_after(&LOGITS, &params, History::default(), 1).unwrap();
        sampled.top.iter().map(|top| top.token).collect()
    };
    assert_eq!(tokens(SamplingParams::default()), [0, 1, 2]);
    let greedy = SamplingParams {
        temperature: 0.0,
        ..SamplingParams::default()
    };
    assert_eq!(tokens(greedy), [0, 1, 2]);
    let cut = SamplingParams {
        top_k: 2,
        ..SamplingParams::default()
    };
    assert_eq!(tokens(cut), [0, 1]);
    // `top_k` leaves more than there is.
    let excluded = SamplingParams {
        top_k: 3,
        min_new_tokens: 1,
        stop_token_ids: vec![0, 1],
        ..SamplingParams::default()
    };
    assert_eq!(tokens(excluded), [2, 3]);
}

#[rstest]
#[case(SamplingParams { temperature: 0.0, ..SamplingParams::default() }, "temperature")]
#[case(SamplingParams { top_p: 0.9, ..SamplingParams::default() }, "top_p")]
#[case(SamplingParams { top_k: 5, ..SamplingParams::default() }, "top_k")]
#[case(SamplingParams { min_p: 0.1, ..SamplingParams::default() }, "min_p")]
#[case(SamplingParams { repetition_penalty: 1.1, ..SamplingParams::default() }, "repetition_penalty")]
#[case(SamplingParams { presence_penalty: 0.1, ..SamplingParams::default() }, "presence_penalty")]
#[case(SamplingParams { frequency_penalty: 0.1, ..SamplingParams::default() }, "frequency_penalty")]
#[case(SamplingParams { logit_bias: [(1, 1.0)].into(), ..SamplingParams::default() }, "logit_bias")]
#[case(SamplingParams { min_new_tokens: 1, ..SamplingParams::default() }, "min_new_tokens")]
fn training_refuses_what_it_cannot_recompute(#[case] params: SamplingParams, #[case] field: &str) {
    params.validate().unwrap();
    let error = params.check_trainable().unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("`{field}` cannot be used in training")),
        "{error}"
    );
}

#[test]
fn training_accepts_what_leaves_the_distribution_alone() {
    let params = SamplingParams {
        temperature: 0.7,
        stop: vec!["END".to_owned()],
        top_logprobs: 5,
        thinking: Some(ThinkingBudget {
            max_tokens: 9,
            start_token_id: 1,
            end_token_id: 2,
            close_token_ids: vec![2],
        }),
        ..SamplingParams::default()
    };
    params.check_trainable().unwrap();
    assert!(!params.is_truncated() && !params.is_adjusted());
}

proptest! {
    /// A row's token does not depend on the rows around it or on their order.
    #[test]
    fn rows_do_not_depend_on_the_batch(
        rows in prop::collection::vec(prop::collection::vec(-5.0..5.0_f32, 7), 1..9),
        temperature in 0.1..2.0_f32,
    ) {
        let params = SamplingParams { temperature, ..SamplingParams::default() };
        let alone: Vec<_> = (0..rows.len())
            .map(|i| sample_after(&rows[i], &params, History::default(), i as u64))
            .collect();
        let mut streams: Vec<_> = (0..rows.len()).map(|i| random(i as u64)).collect();
        let mut batch: Vec<_> = rows
            .iter()
            .zip(&mut streams)
            .map(|(logits, random)| Row { logits, params: &params, history: History::default(), guide: None, random })
            .collect();
        batch.reverse();
        let mut together = sample_rows(batch);
        together.reverse();
        prop_assert_eq!(alone, together);
    }

    /// The distribution that is sampled from sums to 1, whatever is asked; the chosen token is
    /// among the likeliest if all are reported, with the same numbers.
    #[test]
    fn every_distribution_is_normalised(
        logits in prop::collection::vec(-8.0..8.0_f32, 2..20),
        (temperature, top_p, top_k, min_p) in (0.2..2.0_f32, 0.1..=1.0_f32, 0_usize..6, 0.0..0.3_f32),
        (repetition, presence, frequency) in (0.5..2.0_f32, -2.0..2.0_f32, -2.0..2.0_f32),
        prompt in prop::collection::vec(0_u32..25, 0..6),
        output in prop::collection::vec(0_u32..25, 0..6),
        bias in prop::collection::btree_map(0_u32..25, -5.0..5.0_f32, 0..4),
        seed in any::<u64>(),
    ) {
        let params = SamplingParams {
            temperature, top_p, top_k, min_p,
            repetition_penalty: repetition,
            presence_penalty: presence,
            frequency_penalty: frequency,
            logit_bias: bias,
            top_logprobs: 1024,
            ..SamplingParams::default()
        };
        params.validate().unwrap();
        let history = History { prompt: &prompt, output: &output };
        let sampled = sample_after(&logits, &params, history, seed).unwrap();
        let mass: f64 = sampled.top.iter().map(|top| f64::from(top.kept_logprob).exp()).sum();
        prop_assert!((mass - 1.0).abs() < 1e-5, "{mass}");
        prop_assert!(sampled.top.contains(&sampled.chosen));
        prop_assert!(sampled.top.is_sorted_by(|a, b| a.kept_logprob >= b.kept_logprob));
    }

    /// Parameters at their neutral values give the same bits as none.
    #[test]
    fn neutral_parameters_change_nothing(
        logits in prop::collection::vec(-8.0..8.0_f32, 2..20),
        output in prop::collection::vec(0_u32..25, 1..6),
        seed in any::<u64>(),
    ) {
        let plain = SamplingParams { stop_token_ids: vec![1], ..SamplingParams::default() };
        let neutral = SamplingParams { min_new_tokens: 1, ..plain.clone() };
        let history = History { prompt: &[], output: &output };
        prop_assert_eq!(
            sample_after(&logits, &plain, history, seed),
            sample_after(&logits, &neutral, history, seed)
        );
    }
}
