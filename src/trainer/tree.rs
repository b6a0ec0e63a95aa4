//! Advantages of episodes that share beginnings: trees of forks, whose leaves are the episodes.

use std::collections::BTreeMap;

use super::TrainerError;
use super::advantage::{AdvantageConfig, Advantages, GroupMember, group_advantages};

/// Returns each leaf's advantage in its tree plus that among all leaves of its task (Tree-GRPO,
/// arXiv:2509.21240). `trees` says which tree each member is a leaf of; none counts that a member's
/// group does not have.
///
/// # Errors
///
/// Fails if a reward is not finite, or if there is not one tree for each member.
pub fn tree_group_advantages<K: Ord + Copy>(
    members: &[GroupMember<K>],
    trees: &[usize],
    config: AdvantageConfig,
) -> Result<Advantages, TrainerError> {
    if trees.len() != members.len() {
        return Err(TrainerError::Length {
            what: "trees against members",
            found: trees.len(),
            expected: members.len(),
        });
    }
    let in_trees: Vec<GroupMember<(K, usize)>> = (members.iter().zip(trees))
        .map(|(member, &tree)| GroupMember {
            group: (member.group, tree),
            reward: member.reward,
            sampled_tokens: member.sampled_tokens,
            loss_tokens: member.loss_tokens,
        })
        .collect();
    let within = group_advantages(&in_trees, config)?;
    let mut among = group_advantages(members, config)?;
    for (value, within) in among.values.iter_mut().zip(within.values) {
        *value = value.zip(within).map(|(among, within)| among + within);
    }
    Ok(among)
}

/// Returns the advantage of each stretch between forks, for leaves that are given by the forks on their
/// way from the root and their rewards: how much the value of a stretch's end, which is the mean reward
/// of the leaves behind it, lies above that of its beginning (`VinePPO`, arXiv:2410.01679; `TreeRL`,
/// arXiv:2506.11902). One list for each leaf, from the root on, its own stretch last.
///
/// At every fork these sum to 0 over the leaves behind it.
pub fn edge_advantages(leaves: &[(&[usize], f64)]) -> Vec<Vec<f64>> {
    let mut sums: BTreeMap<&[usize], (f64, usize)> = BTreeMap::new();
    for (path, reward) in leaves {
        for depth in 0..=path.len() {
            let (sum, count) = sums.entry(&path[..depth]).or_default();
            (*sum, *count) = (*sum + reward, *count + 1);
        }
    }
    let value = |path: &[usize]| {
        let (sum, count) = sums[path];
        sum / count as f64
    };
    let edges = |(path, reward): &(&[usize], f64)| {
        let forks = (1..=path.len()).map(|depth| value(&path[..depth]) - value(&path[..depth - 1]));
        forks.chain([reward - value(path)]).collect()
    };
    leaves.iter().map(edges).collect()
}

#[cfg(test)]
mod tests {
    use super::super::batch::{TrainSequence, pack};
    use super::super::loss::LossConfig;
    use super::*;
    use crate::engine::model::tests_support::golden;

    #[track_caller]
    fn assert_close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
    }

    #[test]
    fn a_leaf_is_compared_in_its_tree_and_among_all() {
        let case = golden("tree_grpo_intra_plus_inter");
        let members: Vec<_> = (case.floats("inputs", "leaf_rewards").into_iter())
            .map(|reward| GroupMember {
                group: 0,
                reward: Some(reward),
                sampled_tokens: 1,
                loss_tokens: 1,
            })
            .collect();
        let config = AdvantageConfig {
            eps: case.float("inputs", "eps"),
            ..AdvantageConfig::default()
        };
        let found = tree_group_advantages(&members, &[0, 0, 0, 1, 1, 1], config).unwrap();
        let found: Vec<f64> = found.values.into_iter().flatten().collect();
        assert_close(&found, &case.floats("expected", "advantage"));
        assert!((found[0] - case.floats("expected", "inter")[0]).abs() > 0.1);
        assert!((found[0] - case.floats("expected", "intra")[0]).abs() > 0.1);
        let error = tree_group_advantages(&members, &[0], config).unwrap_err();
        assert_eq!(error.to_string(), "trees against members: 1 != 6");
    }

    #[test]
    fn a_stretch_is_credited_with_the_rise_in_value() {
        let case = golden("tree_edge_advantage");
        let tree = &case.value("inputs", "tree")["root"];
        let mut leaves: Vec<(&[usize], f64)> = Vec::new();
        for (path, name) in [(&[0_usize][..], "a"), (&[1], "b")] {
            let rewards = tree[name].as_array().unwrap();
            leaves.extend(
                rewards
                    .iter()
                    .map(|reward| (path, reward.as_f64().unwrap())),
            );
        }
        let found = edge_advantages(&leaves);
        let [to_a, to_b] = ["A_root_to_a", "A_root_to_b"].map(|key| case.float("expected", key));
        let firsts: Vec<f64> = found.iter().map(|edges| edges[0]).collect();
        assert_close(&firsts, &[to_a, to_a, to_a, to_b, to_b, to_b]);
        let own: Vec<f64> = found.iter().map(|edges| edges[1]).collect();
        assert_close(&own, &case.floats("expected", "A_leaf"));
        for sum in [&own[..3], &own[3..], &firsts[..]].map(|edges| edges.iter().sum::<f64>()) {
            assert!(sum.abs() < 1e-12, "{sum}");
        }
    }

    #[test]
    fn a_shared_beginning_has_the_gradients_of_all_its_leaves() {
        let case = golden("tree_shared_prefix_gradient");
        let advantages = case.floats("inputs", "leaf_advantages");
        let suffixes = case.value("inputs", "suffix_tokens").as_array().unwrap();
        let suffix = |leaf: usize| usize::try_from(suffixes[leaf].as_u64().unwrap()).unwrap();
        let mut next = 100_u32;
        let sequences: Vec<_> = (0..6)
            .map(|leaf| {
                // A prompt token, the tree's four, and the leaf's own, unlike all others.
                let tree = 10 * (1 + leaf / 3);
                let mut tokens: Vec<u32> = std::iter::once(1).chain(tree..tree + 4).collect();
                let leaf = leaf as usize;
                while tokens.len() < 5 + suffix(leaf) {
                    tokens.push(next);
                    next += 1;
                }
                TrainSequence {
                    loss_mask: (0..tokens.len()).map(|token| token > 0).collect(),
                    logprobs: vec![-1.0; tokens.len()],
                    advantage: advantages[leaf],
                    tokens,
                    ..TrainSequence::default()
                }
            })
            .collect();
        let config = LossConfig::default();
        let totals = config.totals(sequences.iter().map(TrainSequence::trainable_tokens));
        assert_eq!(
            totals.tokens as f64,
            case.float("expected", "flat_token_count")
        );
        let [micro] = pack(&sequences, 1000, &config, totals)
            .unwrap()
            .try_into()
            .unwrap();
        // Less the six last tokens, which predict nothing, and with the prompt.
        let stood = case.float("expected", "tree_token_count") - 6.0 + 1.0;
        assert_eq!(micro.batch.len() as f64, stood);
        let terms: Vec<_> = (0..micro.targets.len())
            .flat_map(|target| config.terms(micro.tokens(target..target + 1, &[-1.0])))
            .collect();
        for token in 10..14 {
            let at = (0..terms.len()).filter(|&target| micro.targets.tokens[target] == token);
            let weight: f64 = at
                .map(|target| terms[target].gradient * micro.weights[target])
                .sum();
            let expected = case.float("expected", "weight_on_each_prefix_token_a");
            assert!((weight - expected).abs() < 1e-12, "{weight} {expected}");
            let once = case.float("expected", "weight_if_prefix_counted_once");
            assert!((weight - once).abs() > 1e-3);
        }
    }
}
