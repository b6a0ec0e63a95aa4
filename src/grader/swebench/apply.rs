//! How a patch is brought into a repository: four ways, each from a clean tree, and a last look.

/// Where the policy's patch lies in the sandbox.
pub const PATCH_PATH: &str = "/tmp/wardian-patch.diff";

/// One way of applying a patch, as commands without a shell in the repository's folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApplyAttempt {
    /// What makes the tree clean again first, for an attempt that failed leaves a part behind.
    pub clean: Vec<Vec<String>>,
    /// The way itself; it has succeeded where this exits with 0.
    pub apply: Vec<String>,
}

/// Returns the ways of applying the patch at [`PATCH_PATH`], in the harness's order.
#[must_use]
pub fn apply_attempts() -> Vec<ApplyAttempt> {
    let ways: [&[&str]; 4] = [
        &["git", "apply", "--verbose"],
        &["git", "apply", "--verbose", "--3way"],
        &["git", "apply", "--verbose", "--reject"],
        &["patch", "--batch", "--forward", "--fuzz=5", "-p1", "-i"],
    ];
    let owned = |words: &[&str]| {
        words
            .iter()
            .map(|word| (*word).to_owned())
            .collect::<Vec<_>>()
    };
    (ways.into_iter().enumerate())
        .map(|(attempt, way)| ApplyAttempt {
            clean: if attempt == 0 {
                Vec::new()
            } else {
                vec![
                    // `--3way` leaves its part in the index, too.
                    owned(&["git", "reset", "--quiet", "--hard", "HEAD"]),
                    owned(&["git", "clean", "--quiet", "--force", "-d"]),
                ]
            },
            apply: owned(&[way, &[PATCH_PATH]].concat()),
        })
        .collect()
}

/// Returns the last look, after every way has failed: where it exits with 0 the whole patch is in
/// the tree all the same.
#[must_use]
pub fn reverse_check() -> Vec<String> {
    ["git", "apply", "--check", "--reverse", PATCH_PATH]
        .map(str::to_owned)
        .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_but_the_first_starts_from_a_clean_tree() {
        let attempts = apply_attempts();
        let cleaned: Vec<bool> = (attempts.iter())
            .map(|attempt| !attempt.clean.is_empty())
            .collect();
        assert_eq!(cleaned, [false, true, true, true]);
        assert!(
            attempts
                .iter()
                .all(|attempt| attempt.apply.ends_with(&[PATCH_PATH.to_owned()]))
        );
    }
}
