//! What the steps of a task make of each other's rewards.

use super::config::{MinReward, StepConfig, StepRewards, TaskConfig};
use crate::grader::{RewardFault, Rewards};

impl StepConfig {
    /// Returns whether the steps after this one are run, by what it earned. A step whose verifier
    /// failed is below any threshold.
    #[must_use]
    pub fn goes_on(&self, earned: Result<&Rewards, &RewardFault>) -> bool {
        let least: Vec<(&str, f64)> = match &self.min_reward {
            None => return true,
            Some(MinReward::Reward(least)) => vec![("reward", *least)],
            Some(MinReward::ByName(names)) => {
                let names = names.iter();
                names.map(|(name, least)| (name.as_str(), *least)).collect()
            }
        };
        earned.is_ok_and(|rewards| rewards.reach(&least))
    }
}

impl TaskConfig {
    /// Returns the task's rewards from those of the steps that were run: the mean of those that were
    /// judged, or those of the last.
    ///
    /// # Errors
    ///
    /// Fails where none was judged, or where the last one counts and was not.
    pub fn rewards_of_steps(
        &self,
        steps: &[Result<Rewards, RewardFault>],
    ) -> Result<Rewards, RewardFault> {
        if self.multi_step_reward_strategy == Some(StepRewards::Final) {
            return steps.last().cloned().unwrap_or(Err(RewardFault::Missing));
        }
        let judged: Vec<Rewards> = steps.iter().filter_map(|step| step.clone().ok()).collect();
        match judged.as_slice() {
            [] => Err(RewardFault::Missing),
            judged => Ok(Rewards::mean(judged)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewards(json: &str) -> Rewards {
        Rewards::read(Some(json.as_bytes()), None).unwrap()
    }

    fn config(text: &str) -> TaskConfig {
        TaskConfig::parse(text).unwrap().0
    }

    #[test]
    fn a_threshold_ends_the_task_below_it() {
        let goes_on = |least: &str, earned: Result<&Rewards, &RewardFault>| {
            let text = format!("[[steps]]\nname = \"a\"\n{least}");
            config(&text).steps.unwrap()[0].goes_on(earned)
        };
        let half = rewards(r#"{"reward": 0.5, "style": 1}"#);
        assert!(goes_on("", Err(&RewardFault::Missing)));
        assert!(goes_on("min_reward = 0.5", Ok(&half)));
        assert!(!goes_on("min_reward = 0.6", Ok(&half)));
        assert!(goes_on("min_reward = {style = 1}", Ok(&half)));
        assert!(!goes_on("min_reward = {speed = 0}", Ok(&half)));
        assert!(!goes_on("min_reward = -1", Err(&RewardFault::Missing)));
    }

    #[test]
    fn steps_are_averaged_or_the_last_one_counts() {
        let steps = [
            Ok(rewards(r#"{"reward": 1}"#)),
            Err(RewardFault::Missing),
            Ok(rewards(r#"{"reward": 0}"#)),
        ];
        let main = |text: &str, steps: &[_]| {
            let rewards = config(text).rewards_of_steps(steps);
            rewards.and_then(|rewards| rewards.main())
        };
        assert_eq!(main("", &steps), Ok(0.5));
        let last = "multi_step_reward_strategy = \"final\"";
        assert_eq!(main(last, &steps), Ok(0.0));
        assert_eq!(main(last, &steps[..2]), Err(RewardFault::Missing));
        assert_eq!(main("", &steps[1..2]), Err(RewardFault::Missing));
    }
}
