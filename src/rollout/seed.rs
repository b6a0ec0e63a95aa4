//! Seeds of everything random in a rollout.

/// Returns the seed of one visit to a task, a hash of what it belongs to.
///
/// Seeds do not depend on scheduling, so the same run seed samples the same tokens whatever the
/// batch size or the number of cores.
#[must_use]
pub fn derive_seed(run_seed: u64, purpose: &str, step: u64, task_id: &str) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&run_seed.to_le_bytes());
    hasher.update(purpose.as_bytes());
    hasher.update(&[0]);
    hasher.update(&step.to_le_bytes());
    hasher.update(task_id.as_bytes());
    let mut seed = [0; 8];
    hasher.finalize_xof().fill(&mut seed);
    u64::from_le_bytes(seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_changes_the_seed() {
        let base = derive_seed(0, "train", 1, "7");
        assert_eq!(base, derive_seed(0, "train", 1, "7"));
        for other in [
            derive_seed(1, "train", 1, "7"),
            derive_seed(0, "eval", 1, "7"),
            derive_seed(0, "train", 2, "7"),
            derive_seed(0, "train", 1, "8"),
        ] {
            assert_ne!(base, other);
        }
    }
}
