//! Every golden case is tested, with the values that known bugs give, and none is forgotten.
//!
//! The table says which test holds each case of `tests/golden/rl.json`. The test must read the case by
//! its name and each of its `mutants` by its key.

use std::path::Path;

use serde_json::Value;
use wardian::eval::{pass_at_k, pass_hat_k};

/// Source file, and in it the cases, each with its test.
const COVERED: &[(&str, &[(&str, &str)])] = &[
    (
        "src/trainer/advantage.rs",
        &[
            ("adv_grpo_group_norm", "groups_are_normalised_as_trl_does"),
            (
                "adv_grpo_zero_variance_group",
                "equal_rewards_have_advantage_exactly_zero",
            ),
            ("adv_group_of_one", "a_group_of_one_has_no_advantage"),
            ("adv_dr_grpo", "each_estimator_is_the_published_one"),
            ("adv_rloo", "each_estimator_is_the_published_one"),
            (
                "adv_nemo_loo_norm",
                "the_deviation_of_the_others_does_not_cancel",
            ),
            ("adv_maxrl", "each_estimator_is_the_published_one"),
            (
                "adv_multi_reward_sum_vs_gdpo",
                "rewards_are_summed_or_each_normalised_first",
            ),
            ("adv_scale_batch", "a_step_can_share_one_deviation"),
            (
                "adv_group_by_id_not_by_position",
                "groups_are_told_apart_by_their_key",
            ),
            (
                "adv_ignore_zero_action_sibling",
                "a_sibling_without_tokens_does_not_move_the_baseline",
            ),
            (
                "adv_unscorable_none_reward",
                "what_could_not_be_scored_leaves_the_statistics",
            ),
        ],
    ),
    (
        "src/trainer/loss/tests.rs",
        &[
            ("loss_grpo", "sequence_mean_matches_trl"),
            (
                "loss_dapo",
                "token_mean_with_a_higher_upper_clip_matches_trl",
            ),
            ("loss_dr_grpo", "constant_length_matches_trl"),
            (
                "loss_on_policy_first_step",
                "on_policy_the_gradient_is_the_plain_policy_gradient",
            ),
            (
                "loss_dual_clip_c3",
                "dual_clip_bounds_the_loss_of_bad_tokens",
            ),
            ("loss_gspo_wide_clip", "gspo_compares_sequences"),
            ("loss_gspo_paper_clip", "gspo_compares_sequences"),
            (
                "loss_cispo_trl_eps_max5",
                "cispo_keeps_the_gradient_of_clipped_tokens",
            ),
            (
                "loss_cispo_verl_slime_1pm",
                "cispo_keeps_the_gradient_of_clipped_tokens",
            ),
            ("loss_sapo", "sapo_gates_softly"),
            (
                "loss_dppo_tv_prime_rl_default",
                "dppo_bounds_how_far_a_probability_moves",
            ),
            ("kl_estimators", "the_estimators_are_the_published_ones"),
            (
                "kl_k3_bias_corrected",
                "corrected_by_the_ratio_the_divergence_has_the_gradient_of_the_reverse_kl",
            ),
            (
                "loss_grpo_with_kl_beta",
                "the_divergence_is_added_behind_the_clip",
            ),
            (
                "kl_gradient_survives_zero_variance",
                "the_divergence_pulls_on_groups_without_advantages_too",
            ),
            (
                "tis_weights",
                "the_sampler_is_corrected_for_by_token_or_sequence",
            ),
            (
                "loss_dapo_with_token_tis",
                "a_truncated_weight_multiplies_the_surrogate",
            ),
            (
                "off_policy_sequence_mask",
                "bad_sequences_of_another_policy_are_left_out",
            ),
            (
                "grad_accumulation_token_mean",
                "micro_batches_sum_to_the_whole_step",
            ),
            ("padding_invariance", "no_denominator_sees_padding"),
            (
                "mask_truncated_completions",
                "truncated_sequences_count_or_not_as_configured",
            ),
            (
                "tool_tokens_equal_removal",
                "tool_tokens_count_as_if_they_were_absent",
            ),
        ],
    ),
    (
        "src/engine/model/ops/softmax.rs",
        &[
            ("logprob_temperature", "the_temperature_divides_the_logits"),
            (
                "logprob_bf16_logits_drift",
                "logits_are_not_rounded_on_their_way_to_a_logprob",
            ),
            (
                "entropy_bonus_gradient",
                "an_entropy_bonus_spreads_the_distribution",
            ),
            (
                "policy_gradient_wrt_logits",
                "the_policy_gradient_carries_one_over_the_temperature",
            ),
        ],
    ),
    (
        "src/engine/sampling/tests.rs",
        &[("logprob_top_p_support", "a_nucleus_reports_both_logprobs")],
    ),
    (
        "src/trainer/credit.rs",
        &[
            (
                "gae_skips_observation_tokens",
                "estimates_skip_what_was_not_sampled",
            ),
            (
                "reinforce_pp_returns_through_mask",
                "returns_pass_by_what_was_not_sampled",
            ),
        ],
    ),
    (
        "src/trainer/value.rs",
        &[(
            "value_loss_clipped",
            "the_clipped_value_loss_is_that_of_verl",
        )],
    ),
    (
        "src/trainer/shaping.rs",
        &[(
            "overlong_penalty_dapo",
            "long_answers_are_punished_as_dapo_does",
        )],
    ),
    (
        "src/rollout/group.rs",
        &[(
            "dynamic_sampling_filter",
            "groups_whose_rewards_differ_are_informative",
        )],
    ),
    (
        "src/grader/reward.rs",
        &[(
            "fuel_shaped_reward",
            "fuel_is_a_share_of_what_passing_earns",
        )],
    ),
    (
        "tests/it/golden.rs",
        &[
            ("pass_at_k", "pass_at_k_is_the_published_estimate"),
            ("pass_hat_k", "pass_hat_k_is_the_published_estimate"),
        ],
    ),
    (
        "src/trainer/tree.rs",
        &[
            (
                "tree_grpo_intra_plus_inter",
                "a_leaf_is_compared_in_its_tree_and_among_all",
            ),
            (
                "tree_edge_advantage",
                "a_stretch_is_credited_with_the_rise_in_value",
            ),
            (
                "tree_shared_prefix_gradient",
                "a_shared_beginning_has_the_gradients_of_all_its_leaves",
            ),
        ],
    ),
    (
        "src/engine/model/fused/linear.rs",
        &[
            (
                "lora_forward_and_init_gradient",
                "a_fresh_adapter_adds_nothing_and_only_b_has_a_gradient",
            ),
            (
                "lora_merged_equals_unmerged",
                "a_trained_adapter_computes_what_the_merged_weight_does",
            ),
        ],
    ),
    (
        "src/trainer/tests/mod.rs",
        &[
            ("adamw_one_step_with_clip", "adamw_takes_the_golden_step"),
            ("next_token_shift", "the_golden_next_token_shift_holds"),
        ],
    ),
    (
        "src/engine/model/ops/rope.rs",
        &[("rope_half_split", "the_golden_rotation_is_half_split")],
    ),
];

/// Mutants that a test rejects by inputs of its own, as the file's give them the right numbers.
const BY_OTHER_INPUTS: &[(&str, &str)] = &[("adv_group_by_id_not_by_position", "sliding_window")];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn cases() -> Vec<Value> {
    let text = fs_err::read_to_string(root().join("tests/golden/rl.json")).expect("the file");
    let file: Value = serde_json::from_str(&text).expect("JSON");
    file["cases"].as_array().expect("a list").clone()
}

fn case(name: &str) -> Value {
    let found = cases().into_iter().find(|case| case["name"] == name);
    found.expect("the case is there")
}

fn name_of(case: &Value) -> &str {
    case["name"].as_str().expect("a name")
}

/// Returns the text of a function, from its name to the brace that closes it.
fn body<'a>(source: &'a str, function: &str) -> Option<&'a str> {
    let start = source.find(&format!("fn {function}("))?;
    let line = source[..start].rfind('\n').map_or(0, |newline| newline + 1);
    let indent = &source[line..start];
    let end = source[start..].find(&format!("\n{indent}}}\n"))?;
    Some(&source[start..start + end])
}

#[test]
fn every_case_has_a_test_that_rejects_its_mutants() {
    let cases = cases();
    assert_eq!(cases.len(), 55);
    let mut listed: Vec<&str> = Vec::new();
    for (file, tests) in COVERED {
        let source = fs_err::read_to_string(root().join(file)).expect("the source");
        for (name, test) in *tests {
            listed.push(name);
            let body = body(&source, test).unwrap_or_else(|| panic!("no test `{test}` in {file}"));
            let reads = |text: &str| body.contains(&format!("\"{text}\""));
            assert!(reads(name), "`{test}` does not read `{name}`");
            let case = cases.iter().find(|case| name_of(case) == *name);
            let case = case.unwrap_or_else(|| panic!("no case `{name}`"));
            for mutant in case["mutants"]
                .as_object()
                .into_iter()
                .flat_map(|all| all.keys())
            {
                let is_waived = BY_OTHER_INPUTS.contains(&(name, mutant.as_str()));
                let is_named = is_waived && body.contains(mutant.as_str());
                assert!(
                    is_named || reads(mutant),
                    "`{test}` does not reject `{mutant}`"
                );
            }
        }
    }
    listed.sort_unstable();
    let mut expected: Vec<&str> = cases.iter().map(name_of).collect();
    expected.sort_unstable();
    assert_eq!(listed, expected, "each case once");
}

/// Returns the counts of a case, and an estimate for each.
fn estimates(case: &Value, key: &str) -> Vec<((u32, u32, u32), f64)> {
    let read = |key: &str, index: usize| -> u32 {
        let number = case["inputs"][key][index].as_u64().expect("a count");
        u32::try_from(number).expect("a small one")
    };
    let expected = case["expected"][key].as_array().expect("a list");
    (expected.iter().enumerate())
        .map(|(index, value)| {
            let counts = (read("n", index), read("c", index), read("k", index));
            (counts, value.as_f64().expect("a number"))
        })
        .collect()
}

#[test]
fn pass_at_k_is_the_published_estimate() {
    let case = case("pass_at_k");
    let biased = case["mutants"]["biased_1_minus_1_minus_p_pow_k"].clone();
    let mut told_apart = 0;
    for (index, ((n, c, k), expected)) in estimates(&case, "pass_at_k").into_iter().enumerate() {
        let found = pass_at_k(n, c, k).expect("enough samples");
        assert!((found - expected).abs() < 1e-9, "{n} {c} {k}: {found}");
        let mutant = biased[index].as_f64().expect("a number");
        told_apart += usize::from((found - mutant).abs() > 1e-3);
    }
    assert_eq!(told_apart, 3);
}

#[test]
fn pass_hat_k_is_the_published_estimate() {
    for ((n, c, k), expected) in estimates(&case("pass_hat_k"), "pass_hat_k") {
        let found = pass_hat_k(n, c, k).expect("enough samples");
        assert!((found - expected).abs() < 1e-12, "{n} {c} {k}: {found}");
    }
}
