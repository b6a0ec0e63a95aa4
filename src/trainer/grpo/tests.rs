use candle_core::{DType, Device};
use indexmap::IndexMap;

use super::*;
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
    let rewards = (0..8).map(f64::from);
    let episodes = (0..).zip(rewards.clone());
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
