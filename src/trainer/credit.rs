//! Credit token by token: returns and advantages of PPO and REINFORCE++.
//!
//! An episode earns its reward with its last sampled token, and each sampled token may cost something.
//! What was not sampled, such as tool output, is no action: it is skipped, and neither discounts nor
//! values pass through it.

/// How far ahead a token is credited for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Discount {
    /// Factor of what the next sampled token earns.
    pub gamma: f64,
    /// Factor of how far estimates look past the next value: 0 trusts the values alone, 1 the rewards
    /// alone.
    pub lambda: f64,
}

/// Advantages and returns of the tokens of one episode.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenCredit {
    /// Advantage of each token; read only where the loss mask is true, as are all of these lists.
    pub advantages: Vec<f64>,
    /// What the value head said before the step; empty without one.
    pub values: Vec<f64>,
    /// What the value head is to say; empty without one.
    pub returns: Vec<f64>,
}

/// Returns generalised advantage estimates and the returns that they imply (Schulman et al. 2016,
/// arXiv:1506.02438, equation 16), 0 for what is not in `mask`. All lists are as long as `mask`.
pub fn generalized_advantages(
    rewards: &[f64],
    values: &[f64],
    mask: &[bool],
    discount: Discount,
) -> TokenCredit {
    let mut credit = TokenCredit {
        advantages: vec![0.0; mask.len()],
        values: values.to_vec(),
        returns: vec![0.0; mask.len()],
    };
    let (mut next_value, mut next_advantage) = (0.0, 0.0);
    for token in (0..mask.len()).rev().filter(|&token| mask[token]) {
        let surprise = rewards[token] + discount.gamma * next_value - values[token];
        next_advantage = surprise + discount.gamma * discount.lambda * next_advantage;
        next_value = values[token];
        credit.advantages[token] = next_advantage;
        credit.returns[token] = next_advantage + values[token];
    }
    credit
}

/// Returns what each token in `mask` earns from itself on, discounted (REINFORCE++, Hu et al. 2025,
/// arXiv:2501.03262), 0 for others.
pub fn discounted_returns(rewards: &[f64], mask: &[bool], gamma: f64) -> Vec<f64> {
    let mut returns = vec![0.0; mask.len()];
    let mut next = 0.0;
    for token in (0..mask.len()).rev().filter(|&token| mask[token]) {
        next = rewards[token] + gamma * next;
        returns[token] = next;
    }
    returns
}

/// Takes the mean over the masked tokens of all episodes off their advantages and divides by the
/// standard deviation, plus `eps`.
pub fn whiten(advantages: &mut [(&mut [f64], &[bool])], eps: f64) {
    let values = || {
        let tokens = advantages
            .iter()
            .flat_map(|(values, mask)| values.iter().zip(*mask));
        tokens
            .filter(|(_, in_loss)| **in_loss)
            .map(|(value, _)| *value)
    };
    let count = values().count() as f64;
    if count < 2.0 {
        // Nothing to compare with.
        advantages
            .iter_mut()
            .for_each(|(values, _)| values.fill(0.0));
        return;
    }
    let mean = values().sum::<f64>() / count;
    let squares: f64 = values().map(|value| (value - mean).powi(2)).sum();
    let std = (squares / (count - 1.0)).sqrt();
    for (values, mask) in advantages {
        for (value, _) in values
            .iter_mut()
            .zip(*mask)
            .filter(|(_, in_loss)| **in_loss)
        {
            *value = (*value - mean) / (std + eps);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::tests_support::{GoldenCase, golden};

    fn mask(case: &GoldenCase) -> Vec<bool> {
        case.floats("inputs", "mask")
            .iter()
            .map(|&m| m > 0.0)
            .collect()
    }

    #[track_caller]
    fn assert_close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        }
    }

    #[test]
    fn estimates_skip_what_was_not_sampled() {
        let case = golden("gae_skips_observation_tokens");
        let discount = Discount {
            gamma: case.float("inputs", "gamma"),
            lambda: case.float("inputs", "lam"),
        };
        let (rewards, values) = (
            case.floats("inputs", "rewards"),
            case.floats("inputs", "values"),
        );
        let found = generalized_advantages(&rewards, &values, &mask(&case), discount);
        assert_close(&found.advantages, &case.floats("expected", "advantages"));
        assert_close(&found.returns, &case.floats("expected", "returns"));
        // The known bug is what this gives if all tokens were sampled.
        let mutant = case.floats("mutants", "observation_tokens_treated_as_actions");
        let all = generalized_advantages(&rewards, &values, &[true; 5], discount);
        assert_close(&all.advantages, &mutant);
        assert!((found.advantages[0] - mutant[0]).abs() > 1e-3);
    }

    #[test]
    fn returns_pass_by_what_was_not_sampled() {
        let case = golden("reinforce_pp_returns_through_mask");
        let (rewards, gamma) = (
            case.floats("inputs", "token_rewards"),
            case.float("inputs", "gamma"),
        );
        let expected = case.floats("expected", "returns");
        assert_close(
            &discounted_returns(&rewards, &mask(&case), gamma),
            &expected,
        );
        // Whitened, they have mean 0 and deviation 1 over what was sampled.
        let mask = mask(&case);
        let mut returns = expected;
        whiten(&mut [(&mut returns, &mask)], 0.0);
        assert_eq!(returns[2], 0.0);
        assert!(returns.iter().sum::<f64>().abs() < 1e-12);
        let squares: f64 = returns.iter().map(|value| value * value).sum();
        assert!((squares / 3.0 - 1.0).abs() < 1e-12);
        let mut alone = [3.0];
        whiten(&mut [(&mut alone, &[true])], 0.0);
        assert_eq!(alone, [0.0]);
    }
}
