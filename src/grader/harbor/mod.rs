//! What a Harbor verifier says, and what that is worth.
//!
//! A verifier is a script that leaves its reward in a file. [`Rewards::read`] takes `reward.json`,
//! or `reward.txt` where there is none; anything but finite numbers is an error of the verifier,
//! which has no reward, and not a reward of 0. [`ErrorPolicy`] says of each way in which a trial
//! can end whether it is graded and whether its reward counts. [`harbor_verdict`] puts both
//! together.

mod policy;
mod rewards;
mod verify;

use super::{GradeUsage, Verdict};

pub use policy::ErrorPolicy;
pub use rewards::{MAX_REWARD_BYTES, RewardFault, Rewards};
pub use verify::{Verification, VerifyJob, verify};

/// Judges a trial by how it ended and by the rewards that its verifier left.
///
/// `ended` is the name of the exception that ended the trial, where one did. The reward is used
/// only where the policy of that end says that it counts.
#[must_use]
pub fn harbor_verdict(
    ended: Option<&str>,
    rewards: &Result<Rewards, RewardFault>,
    usage: GradeUsage,
) -> Verdict {
    if let Some(name) = ended {
        let policy = ErrorPolicy::of(name);
        if !policy.has_valid_reward {
            let message = format!("the trial ended with {name}, after which no reward counts");
            return Verdict::infra_error(1, &message, usage);
        }
    }
    let found = (rewards.as_ref().map_err(RewardFault::to_string))
        .and_then(|rewards| Ok((rewards, rewards.main().map_err(|fault| fault.to_string())?)));
    match found {
        Err(message) => Verdict::infra_error(1, &message, usage),
        Ok((rewards, reward)) => {
            let message = if reward >= 1.0 {
                String::new()
            } else {
                format!("the verifier gave {reward}")
            };
            Verdict::scored(reward, rewards.others(), reward >= 1.0, &message, usage)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grader::VerdictStatus;

    fn verdict(ended: Option<&str>, json: &str) -> Verdict {
        let rewards = Rewards::read(Some(json.as_bytes()), None);
        harbor_verdict(ended, &rewards, GradeUsage::default())
    }

    #[test]
    fn a_full_reward_passes_and_a_part_fails() {
        let full = verdict(None, r#"{"reward": 1, "style": 0.5}"#);
        assert_eq!(
            (full.reward, full.status),
            (Some(1.0), VerdictStatus::Passed)
        );
        assert_eq!(full.rewards["style"], 0.5);
        let part = verdict(None, r#"{"reward": 0.5}"#);
        assert_eq!(
            (part.reward, part.status),
            (Some(0.5), VerdictStatus::Failed)
        );
    }

    #[test]
    fn what_the_agent_did_is_graded_and_what_we_did_is_not() {
        let reward = |ended| verdict(Some(ended), r#"{"reward": 1}"#).reward;
        assert_eq!(reward("AgentTimeoutError"), Some(1.0));
        assert_eq!(reward("NonZeroAgentExitCodeError"), Some(1.0));
        assert_eq!(reward("SandboxLikelyOutOfMemoryError"), None);
        assert_eq!(reward("VerifierTimeoutError"), None);
        assert_eq!(reward("ApiRateLimitError"), None);
    }

    #[test]
    fn no_reward_is_not_a_reward_of_0() {
        for json in ["", "{}", "{\"reward\": NaN}"] {
            let verdict = verdict(None, json);
            assert_eq!(verdict.status, VerdictStatus::InfraError, "{json}");
            assert_eq!(verdict.reward, None);
        }
    }
}
