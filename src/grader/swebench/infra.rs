//! Signs in a log that the environment broke, and not the patch.

use std::sync::LazyLock;

use regex::Regex;

/// How far a sign is to be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InfraTier {
    /// No change to the sources of a repository brings it about.
    Environment,
    /// A broken environment brings it about, and a bad patch as well.
    Ambiguous,
}

/// A sign that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InfraSign {
    /// What it is a sign of, in the harness's words.
    pub reason: &'static str,
    /// How far it is to be believed.
    pub tier: InfraTier,
}

/// Returns the first sign in a log, in the harness's order.
///
/// A program of the policy can print any of them: a sign says nothing where a suite has run.
#[must_use]
pub fn classify(log: &str) -> Option<InfraSign> {
    use InfraTier::{Ambiguous, Environment};
    static SIGNS: LazyLock<[(&str, InfraTier, Regex); 8]> = LazyLock::new(|| {
        [
            (
                "browser_launch_failed",
                Environment,
                "Failed to launch|Failed to connect to the bus",
            ),
            (
                "display_unavailable",
                Environment,
                "cannot open display|Missing X server|unable to open X display",
            ),
            (
                "out_of_memory",
                Environment,
                "(?m)Cannot allocate memory|OutOfMemoryError|^Killed$",
            ),
            (
                "container_unavailable",
                Environment,
                "Error response from daemon|Cannot connect to the Docker daemon",
            ),
            (
                "network_unreachable",
                Environment,
                "Could not resolve host|Temporary failure in name resolution",
            ),
            (
                "missing_module",
                Ambiguous,
                "Cannot find module|MODULE_NOT_FOUND|ModuleNotFoundError",
            ),
            (
                "no_tests_collected",
                Ambiguous,
                "no tests ran|collected 0 items",
            ),
            (
                "tests_timed_out",
                Ambiguous,
                r"Timeout error: \d+ seconds exceeded",
            ),
        ]
        .map(|(reason, tier, pattern)| {
            let pattern = Regex::new(pattern).expect("the pattern is fixed and tested");
            (reason, tier, pattern)
        })
    });
    (SIGNS.iter())
        .find(|(_, _, pattern)| pattern.is_match(log))
        .map(|&(reason, tier, _)| InfraSign { reason, tier })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_sign_in_order_counts() {
        let reason = |log| classify(log).map(|sign| sign.reason);
        assert_eq!(reason("collected 0 items\nKilled\n"), Some("out_of_memory"));
        assert_eq!(reason("1 Killed"), None);
        assert_eq!(
            classify("ModuleNotFoundError: x").map(|sign| sign.tier),
            Some(InfraTier::Ambiguous)
        );
        assert_eq!(reason("1 passed"), None);
    }
}
