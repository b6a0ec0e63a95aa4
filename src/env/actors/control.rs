//! Whose doing it was that a judgement broke down.
//!
//! Tests that loop, eat the memory, or print that a module is missing may do so by what the policy did, or
//! because the environment is broken. Were the latter assumed, a policy could leave every bad reward out of its
//! statistics by breaking the tests; were the former, it would be punished for what we did. So the same tests are
//! run where no policy has been. Where they do what they should there, the policy broke them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::actor::ActorError;

/// What a control found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Control {
    /// Whether the tests did what they should.
    pub(super) is_sound: bool,
    /// How long they took, in seconds.
    pub(super) seconds: f64,
}

/// What controls have found, by task: each is run once, when it is first needed.
#[derive(Debug, Default)]
pub struct Controls {
    known: Mutex<HashMap<String, Arc<Mutex<Option<Control>>>>>,
}

impl Controls {
    /// Returns what the control of `task` found, which `run` runs where nobody has; others wait for it.
    pub(super) fn of(
        &self,
        task: &str,
        run: impl FnOnce() -> Result<Control, ActorError>,
    ) -> Result<Control, ActorError> {
        let of_task = {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(known.entry(task.to_owned()).or_default())
        };
        let mut found = of_task.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = *found {
            return Ok(found);
        }
        let control = run()?;
        if !control.is_sound {
            tracing::warn!(
                task,
                "the tests of a task do not work even where no policy has been; episodes that break them have no \
                 reward"
            );
        }
        *found = Some(control);
        Ok(control)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_is_run_once_unless_it_fails() {
        let controls = Controls::default();
        let failed = controls.of("a", || {
            Err(ActorError::InvalidSpec {
                reason: String::new(),
            })
        });
        failed.unwrap_err();
        let control = Control {
            is_sound: true,
            seconds: 1.0,
        };
        assert_eq!(controls.of("a", || Ok(control)).unwrap(), control);
        let again = controls.of("a", || unreachable!("it is known"));
        assert_eq!(again.unwrap(), control);
    }
}
