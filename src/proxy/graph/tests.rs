use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::proxy::record::test_call;

/// A call with these ids; a completion's log-probability is minus its id over 100.
fn call(prompt: &[u32], completion: &[u32]) -> Call {
    let logprobs = completion.iter().map(|id| *id as f32 / -100.0).collect();
    let tokens = CallTokens::new(prompt.to_vec(), completion.to_vec(), logprobs, |_| true);
    Call {
        tokens: Some(tokens.unwrap()),
        ..test_call()
    }
}

fn with_tools(call: Call) -> Call {
    Call {
        tools: Arc::from([json!({"type": "function"})]),
        ..call
    }
}

fn graph(calls: impl IntoIterator<Item = Call>) -> CallGraph {
    let mut graph = CallGraph::default();
    for call in calls {
        graph.push(call, None);
    }
    graph
}

/// The ids, the mask and the role of each row.
fn rows(graph: &CallGraph) -> Vec<(Vec<u32>, Vec<u8>, Role)> {
    let parts = |row: &Row| {
        let trace = &row.trace;
        (trace.ids().to_vec(), trace.loss_mask().to_vec(), row.role)
    };
    graph.rows().iter().map(parts).collect()
}

#[test]
fn a_conversation_is_one_row() {
    let graph = graph([
        call(&[1, 2], &[3, 4]),
        call(&[1, 2, 3, 4, 5], &[6]),
        call(&[1, 2, 3, 4, 5, 6], &[7]),
    ]);
    let all = graph.rows();
    assert_eq!(all.len(), 1);
    assert_eq!(all[0].calls, [0, 1, 2]);
    assert_eq!(all[0].trace.ids(), [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(all[0].trace.loss_mask(), [0, 0, 1, 1, 0, 1, 1]);
    assert_eq!(
        all[0].trace.logprobs(),
        [0.0, 0.0, -0.03, -0.04, 0.0, -0.06, -0.07]
    );
    assert_eq!(all[0].trace.prompt_len(), 2);
}

#[test]
fn the_longest_prefix_is_the_parent() {
    let graph = graph([
        call(&[1], &[2]),
        call(&[1, 2, 3], &[4]),
        call(&[1, 2, 3, 4, 5], &[6]),
    ]);
    assert_eq!(graph.parent(2), Some(1));
    assert_eq!(graph.root(2), 0);
}

/// An agent that asks the same thing twice and goes on with the second answer.
#[test]
fn a_retry_that_was_not_used_is_discarded() {
    let of_a_later_call = graph([
        call(&[1], &[2]),
        call(&[1, 2, 3], &[4]),
        call(&[1, 2, 3], &[5]),
        call(&[1, 2, 3, 5, 6], &[7]),
    ]);
    assert_eq!(
        rows(&of_a_later_call),
        [
            (vec![1, 2, 3, 4], vec![0, 1, 0, 1], Role::Discarded),
            (vec![1, 2, 3, 5, 6, 7], vec![0, 1, 0, 1, 0, 1], Role::Agent),
        ]
    );
    let of_the_first_call = graph([call(&[1], &[2]), call(&[1], &[3]), call(&[1, 3, 4], &[5])]);
    assert_eq!(of_the_first_call.rows()[0].role, Role::Discarded);
    assert_eq!(of_the_first_call.rows()[1].role, Role::Agent);
    assert_eq!(of_the_first_call.stats().n_discarded, 1);
}

#[test]
fn answers_to_one_prompt_that_all_end_count_all() {
    let graph = graph([call(&[1], &[2]), call(&[1], &[3])]);
    assert!(graph.rows().iter().all(Row::is_trainable));
    assert_eq!(graph.stats().n_roots, 2);
}

/// Two retries may say the same: the later one is gone on with.
#[test]
fn equal_answers_have_one_continuation() {
    let graph = graph([call(&[1], &[2]), call(&[1], &[2]), call(&[1, 2, 3], &[4])]);
    assert_eq!(graph.parent(2), Some(1));
    let roles: Vec<Role> = graph.rows().iter().map(|row| row.role).collect();
    assert_eq!(roles, [Role::Discarded, Role::Agent]);
}

/// Two tools of one turn, each of which asks a question of its own, are no retries of each other.
#[test]
fn parallel_calls_are_rows_of_their_own() {
    let graph = graph([
        call(&[1], &[2]),
        call(&[1, 2, 3], &[5]),
        call(&[1, 2, 4], &[6]),
        call(&[1, 2, 4, 6, 7], &[8]),
    ]);
    let rows = rows(&graph);
    assert_eq!(rows.len(), 2);
    assert_eq!(rows[0].0, [1, 2, 3, 5]);
    assert_eq!(rows[1].0, [1, 2, 4, 6, 7, 8]);
    assert!(rows.iter().all(|row| row.2 == Role::Agent));
    assert_eq!(graph.stats().n_forks, 1);
}

#[test]
fn a_rewritten_history_is_a_new_root() {
    let graph = graph([
        call(&[1, 2, 3], &[4]),
        call(&[1, 2, 3, 4, 5], &[6]),
        call(&[1, 9, 5], &[7]),
        call(&[1, 9, 5, 7, 8], &[2]),
    ]);
    assert_eq!(graph.stats().n_roots, 2);
    let rows = rows(&graph);
    assert_eq!(rows[1].0, [1, 9, 5, 7, 8, 2]);
    assert_eq!(rows[1].1, [0, 0, 0, 1, 0, 1]);
}

/// A stop string cuts an answer, and the agent sends back what is before it: the prompt shares a part
/// of the sampled ids, which are no targets a second time.
#[test]
fn a_branch_inside_an_answer_is_a_new_root() {
    let graph = graph([call(&[1], &[2, 3, 4]), call(&[1, 2, 3, 5], &[6])]);
    assert_eq!(graph.parent(1), None);
    assert_eq!(
        rows(&graph)[1],
        (vec![1, 2, 3, 5, 6], vec![0, 0, 0, 0, 1], Role::Agent)
    );
}

#[test]
fn an_empty_answer_is_nobodys_parent() {
    let graph = graph([call(&[1, 2], &[]), call(&[1, 2], &[3])]);
    assert_eq!(graph.parent(1), None);
    assert!(!graph.rows()[0].is_trainable());
}

#[test]
fn a_call_without_tools_is_auxiliary_only_beside_some_with() {
    let graph = graph([
        with_tools(call(&[1], &[2])),
        call(&[7], &[8]),
        // A call that goes on with the tools' conversation and has none itself is the agent's.
        call(&[1, 2, 3], &[4]),
    ]);
    let roles: Vec<Role> = graph.rows().iter().map(|row| row.role).collect();
    assert_eq!(roles, [Role::Auxiliary, Role::Agent]);
}

#[test]
fn calls_without_ids_hang_on_what_they_continue_and_make_no_row() {
    let mut graph = graph([call(&[1], &[2])]);
    let middle = graph.push(test_call(), Some(0));
    graph.push(test_call(), Some(middle));
    assert_eq!(graph.parent(2), Some(1));
    assert_eq!(graph.stats().n_roots, 1);
    assert_eq!(graph.rows().len(), 1, "the call with ids is still a leaf");
}

#[test]
fn ids_that_were_not_drawn_are_context() {
    let mut forced = call(&[1], &[2, 3, 4]);
    let logprobs = vec![-0.5, f32::NAN, -0.25];
    let tokens = CallTokens::new(vec![1], vec![2, 3, 4], logprobs, |at| at != 1);
    forced.tokens = Some(tokens.unwrap());
    let mut unknown = call(&[1, 2, 3, 4, 5], &[]);
    unknown.tokens = Some(CallTokens::context(vec![1, 2, 3, 4, 5], vec![6]));
    let graph = graph([forced, unknown, call(&[1, 2, 3, 4, 5, 6], &[7])]);
    let row = &graph.rows()[0];
    assert_eq!(row.trace.ids(), [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(row.trace.loss_mask(), [0, 1, 0, 1, 0, 0, 1]);
    assert_eq!(
        row.trace.logprobs(),
        [0.0, -0.5, 0.0, -0.25, 0.0, 0.0, -0.07]
    );
}

#[test]
fn lengths_and_values_are_checked() {
    let refused = |logprobs: &[f32]| {
        CallTokens::new(vec![1], vec![2, 3], logprobs.to_vec(), |_| true)
            .unwrap_err()
            .to_string()
    };
    assert!(refused(&[-1.0]).ends_with("2 ids were sampled but 1 log-probabilities told"));
    assert!(refused(&[-1.0, f32::NAN]).ends_with("NaN was told as a log-probability"));
    assert!(refused(&[0.5, 0.0]).ends_with("0.5 was told as a log-probability"));
    let rounded = CallTokens::new(vec![1], vec![2], vec![1e-6], |_| true).unwrap();
    assert_eq!(rounded.logprobs(), [0.0]);
}

/// What the graph should say, by comparing every pair.
fn expected_parent(calls: &[(Vec<u32>, Vec<u32>)], place: usize) -> Option<usize> {
    let prompt = &calls[place].0;
    (0..place)
        .filter(|&other| {
            let (fed, sampled) = &calls[other];
            !sampled.is_empty() && prompt.starts_with(&[fed.as_slice(), sampled].concat())
        })
        .max_by_key(|&other| (calls[other].0.len() + calls[other].1.len(), other))
}

proptest! {
    /// Conversations over few ids, so that prefixes, retries and branches come up all the time.
    #[test]
    fn parents_and_rows_are_what_comparing_every_pair_gives(
        calls in proptest::collection::vec(
            (proptest::collection::vec(0_u32..2, 1..7), proptest::collection::vec(0_u32..2, 0..3)),
            1..24,
        ),
    ) {
        let graph = graph(calls.iter().map(|(prompt, completion)| call(prompt, completion)));
        for place in 0..calls.len() {
            prop_assert_eq!(graph.parent(place), expected_parent(&calls, place));
        }
        let rows = graph.rows();
        prop_assert_eq!(rows.len(), graph.stats().n_leaves);
        let mut seen: BTreeSet<usize> = BTreeSet::new();
        for row in &rows {
            let leaf = &calls[row.calls[row.calls.len() - 1]];
            let whole = [leaf.0.as_slice(), &leaf.1].concat();
            prop_assert_eq!(row.trace.ids(), &whole[..], "a row is its leaf, token by token");
            let sampled: usize = row.calls.iter().map(|place| calls[*place].1.len()).sum();
            prop_assert_eq!(row.trace.sampled_len(), sampled);
            seen.extend(row.calls.iter().copied());
        }
        prop_assert_eq!(seen.len(), calls.len(), "every call is in a row");
    }
}
