//! How a trial ended, and what follows from that.
//!
//! The names and what they mean are Harbor's (0.26), so that its results read here as they do
//! there.

/// What follows from the end of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorPolicy {
    /// Whether another try may end otherwise.
    pub should_retry: bool,
    /// Whether the verifier is run.
    pub should_grade: bool,
    /// Whether its reward says something about the policy.
    pub has_valid_reward: bool,
}

impl ErrorPolicy {
    const fn new(should_retry: bool, should_grade: bool, has_valid_reward: bool) -> Self {
        Self {
            should_retry,
            should_grade,
            has_valid_reward,
        }
    }

    /// Returns what follows from an exception of this name.
    ///
    /// Of a name that is not known nothing can be said, so its reward does not count; Harbor lets
    /// it count.
    #[must_use]
    pub fn of(name: &str) -> Self {
        (POLICIES.iter())
            .find(|(_, names)| names.contains(&name))
            .map_or(Self::new(true, true, false), |(policy, _)| *policy)
    }
}

/// Ends of trials by what follows from them.
const POLICIES: [(ErrorPolicy, &[&str]); 5] = [
    // The sandbox failed.
    (
        ErrorPolicy::new(true, false, false),
        &[
            "EnvironmentStartTimeoutError",
            "SandboxBuildFailedError",
            "AgentSetupTimeoutError",
            "HealthcheckError",
            "SandboxLikelyOutOfMemoryError",
            "MemoryLimitExceededError",
            "SSHAccessError",
            "GKEExecStreamClosedError",
            "GKEPodNotFoundError",
            "RuntimeRequestError",
            "AddTestsDirError",
            "DownloadVerifierDirError",
        ],
    ),
    // The model's server failed.
    (
        ErrorPolicy::new(true, true, false),
        &[
            "ApiError",
            "ApiRateLimitError",
            "ApiInternalServerError",
            "ApiOverloadedError",
            "ApiConnectionClosedError",
            "ApiResponseStalledError",
            "UnknownApiError",
            "NetworkConnectionError",
            "ApiConnectionError",
            "ApiUsageLimitError",
            "RateLimitError",
            "InternalServerError",
            "ServiceUnavailableError",
            "APIConnectionError",
            "APIError",
            "Timeout",
        ],
    ),
    // The request or the verifier is wrong, and would be again.
    (
        ErrorPolicy::new(false, true, false),
        &[
            "UnsupportedModelParametersError",
            "BadRequestError",
            "UnprocessableEntityError",
            "UnsupportedParamsError",
            "APIResponseValidationError",
            "BudgetExceededError",
            "VerifierTimeoutError",
            "RewardFileNotFoundError",
            "RewardFileEmptyError",
            "VerifierOutputParseError",
        ],
    ),
    // Nothing can be run at all.
    (
        ErrorPolicy::new(false, false, false),
        &[
            "AgentAuthenticationError",
            "ModelNotFoundError",
            "ApiProviderResourceNotFoundError",
            "AuthenticationError",
            "PermissionDeniedError",
            "NotFoundError",
            "ServiceOperationsUnsupportedError",
            "VercelScopeError",
            "DspyImportError",
            "MissingExtraError",
            "RegradeError",
            "CancelledError",
        ],
    ),
    // The policy's own doing.
    (
        ErrorPolicy::new(false, true, true),
        &[
            "NonZeroAgentExitCodeError",
            "AgentTimeoutError",
            "ContextWindowExceededError",
            "OutputTokenExceededError",
            "ContextLengthExceededError",
            "OutputLengthExceededError",
            "AgentSafetyRefusalError",
            "ContentPolicyViolationError",
        ],
    ),
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_end_has_one_policy() {
        let mut seen = HashSet::new();
        for name in POLICIES.iter().flat_map(|(_, names)| names.iter()) {
            assert!(seen.insert(name), "{name} is there twice");
        }
        assert_eq!(seen.len(), 58);
    }

    #[test]
    fn only_the_policys_own_doing_counts() {
        let counts = |(policy, _): &&(ErrorPolicy, &[&str])| policy.has_valid_reward;
        let counted: Vec<_> = POLICIES.iter().filter(counts).collect();
        assert_eq!(counted.len(), 1);
        assert!(counted[0].1.contains(&"AgentTimeoutError"));
        assert!(!ErrorPolicy::of("SomethingNewError").has_valid_reward);
    }
}
