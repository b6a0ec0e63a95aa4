//! Names that tell whose an object is, and until when somebody may need it.
//!
//! Objects of the control plane have no labels. So their names are `wardian-OWNER-EXPIRY-RUN-NUMBER`: the
//! moment after which nobody needs it, in seconds since 1970, and the run, both in eight hexadecimal digits.

use std::time::Duration;

use crate::actor::ActorError;
use crate::http::unix_seconds;

/// What all names begin with.
const PREFIX: &str = "wardian-";
/// The owner where none is named.
const NOBODY: &str = "run";
/// The longest owner: a name has at most 63 characters.
const MAX_OWNER: usize = 24;

/// Whose names they are.
#[derive(Debug, Clone)]
pub(super) struct Names {
    owner: String,
    run: String,
    /// Whether nobody else works under the owner's name at the same time.
    is_alone: bool,
}

impl Names {
    /// Takes the names of a new run.
    ///
    /// # Errors
    ///
    /// Fails on an owner that cannot be in a name.
    pub(super) fn new(owner: Option<&str>) -> Result<Self, ActorError> {
        let name = owner.unwrap_or(NOBODY);
        let is_plain = name
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
        let is_open = name.starts_with('-') || name.ends_with('-') || name.is_empty();
        if !is_plain || is_open || name.len() > MAX_OWNER {
            return Err(ActorError::InvalidSpec {
                reason: format!(
                    "the owner `{name}` must have 1 to {MAX_OWNER} of a to z, 0 to 9 and, inside, `-`"
                ),
            });
        }
        Ok(Self {
            owner: name.to_owned(),
            run: format!("{:08x}", rand::random::<u32>()),
            is_alone: owner.is_some(),
        })
    }

    /// Returns the name of an object that is needed for at most `time`.
    pub(super) fn name(&self, number: u64, time: Duration) -> String {
        let expiry = unix_seconds().saturating_add(time.as_secs());
        let expiry = u32::try_from(expiry).unwrap_or(u32::MAX);
        format!("{PREFIX}{}-{expiry:08x}-{}-{number}", self.owner, self.run)
    }

    /// Whether nobody needs an object of this name any more: its time is over, or its run was one before this
    /// of the same owner.
    pub(super) fn is_left_over(&self, name: &str) -> bool {
        self.is_left_over_at(name, unix_seconds())
    }

    fn is_left_over_at(&self, name: &str, now: u64) -> bool {
        let Some(rest) = name.strip_prefix(PREFIX) else {
            return false;
        };
        let mut parts = rest.rsplitn(4, '-');
        let parts = [(); 4].map(|()| parts.next());
        let [Some(number), Some(run), Some(expiry), Some(owner)] = parts else {
            return false;
        };
        let is_hex = |text: &str| text.len() == 8 && u32::from_str_radix(text, 16).is_ok();
        if number.parse::<u64>().is_err() || !is_hex(run) || !is_hex(expiry) || run == self.run {
            return false;
        }
        let expiry = u64::from_str_radix(expiry, 16).unwrap_or(u64::MAX);
        expiry < now || (self.is_alone && owner == self.owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_over_is_told_by_its_name() {
        let names = Names::new(Some("job-1")).unwrap();
        let other = Names::new(Some("job-1")).unwrap();
        let hour = Duration::from_secs(3600);
        let mine = names.name(7, hour);
        assert!(
            mine.len() <= 63 && mine.starts_with("wardian-job-1-"),
            "{mine}"
        );
        let later = unix_seconds() + 4000;
        assert!(!names.is_left_over_at(&mine, later), "it is this run's");
        assert!(other.is_left_over(&mine), "it is an earlier run's");
        let anybody = Names::new(None).unwrap();
        assert!(!anybody.is_left_over(&mine), "its run may live");
        assert!(anybody.is_left_over_at(&mine, later), "its time is over");
        let nobodys = anybody.name(1, hour);
        assert!(!Names::new(None).unwrap().is_left_over(&nobodys));
        for foreign in [
            "wardian",
            "wardian-x",
            "other-job-1-00000000-00000000-1",
            "wardian-job-1-zzzzzzzz-00000000-1",
            "wardian-job-1-00000000-00000000-x",
        ] {
            assert!(!names.is_left_over_at(foreign, later), "{foreign}");
        }
    }

    #[test]
    fn owners_can_be_in_names() {
        for wrong in ["", "A", "a_b", "-a", "a-", "a".repeat(25).as_str(), "a/b"] {
            Names::new(Some(wrong)).unwrap_err();
        }
    }
}
