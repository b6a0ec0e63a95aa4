//! Whose doing it was that a judgement broke down.
//!
//! Tests that loop, eat the memory, or print that a module is missing may do so by what the policy did, or
//! because the environment is broken. Were the latter assumed, a policy could leave every bad reward out of its
//! statistics by breaking the tests; were the former, it would be punished for what we did. So the same tests are
//! run where no policy has been. Where they do what they should there, the policy broke them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::actor::ActorError;

/// What a control found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Control {
    /// Whether the tests did what they should.
    pub(super) is_sound: bool,
    /// How long they took, in seconds.
    pub(super) seconds: f64,
}

/// How often a control is run that does not do what it should: one bad moment of this machine must not excuse
/// whatever comes later.
const TRIES: u32 = 3;

/// What the controls of a task have found so far.
#[derive(Debug, Default)]
struct Known {
    control: Option<Control>,
    /// When it was begun.
    began: Option<Instant>,
    tries: u32,
}

/// What controls have found, by task: each is run when it is first needed, once where it is sound.
#[derive(Debug, Default)]
pub struct Controls {
    known: Mutex<HashMap<String, Arc<Mutex<Known>>>>,
}

impl Controls {
    /// Returns what the control of `task` found, which `run` runs where nobody has; others wait for it.
    ///
    /// `late` is when a judgement began that ran out of its time. A control that was begun before says nothing of
    /// how busy this machine was meanwhile, so it is run again. Where it is too late itself by then, that is held
    /// against nobody, and the task stays as sound as it was.
    pub(super) fn of(
        &self,
        task: &str,
        late: Option<Instant>,
        run: impl FnOnce() -> Result<Control, ActorError>,
    ) -> Result<Control, ActorError> {
        let of_task = {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(known.entry(task.to_owned()).or_default())
        };
        let mut found = of_task.lock().unwrap_or_else(PoisonError::into_inner);
        let is_recent = late.is_none_or(|late| found.began.is_some_and(|began| began >= late));
        if let Some(control) = found.control
            && ((control.is_sound && is_recent) || found.tries >= TRIES)
        {
            return Ok(control);
        }
        let was_sound = found.control.is_some_and(|control| control.is_sound);
        let began = Instant::now();
        let control = run()?;
        if !control.is_sound && was_sound {
            tracing::warn!(
                task,
                "the tests of a task that work otherwise were late where no policy has been, too: this machine is too \
                 busy; lower `actor.max_actors` or raise the tests' time"
            );
            return Ok(control);
        }
        found.began = Some(began);
        if !control.is_sound {
            found.tries += 1;
            tracing::warn!(
                task,
                "the tests of a task do not work even where no policy has been; episodes that break them have no \
                 reward"
            );
        }
        // What the reference takes on a quiet machine is what patches are compared with.
        let last = found
            .control
            .filter(|last| last.is_sound && control.is_sound);
        let control = Control {
            seconds: last.map_or(control.seconds, |last| control.seconds.min(last.seconds)),
            ..control
        };
        found.control = Some(control);
        Ok(control)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_is_run_once_unless_it_fails() {
        let controls = Controls::default();
        let failed = controls.of("a", None, || {
            Err(ActorError::InvalidSpec {
                reason: String::new(),
            })
        });
        failed.unwrap_err();
        let control = Control {
            is_sound: true,
            seconds: 1.0,
        };
        assert_eq!(controls.of("a", None, || Ok(control)).unwrap(), control);
        let again = controls.of("a", None, || unreachable!("it is known"));
        assert_eq!(again.unwrap(), control);
        // One that breaks down has further tries.
        let broken = Control {
            is_sound: false,
            ..control
        };
        for _ in 0..TRIES {
            assert_eq!(controls.of("b", None, || Ok(broken)).unwrap(), broken);
        }
        let given_up = controls.of("b", None, || unreachable!("it was tried enough"));
        assert_eq!(given_up.unwrap(), broken);
        controls.of("c", None, || Ok(broken)).unwrap();
        assert_eq!(controls.of("c", None, || Ok(control)).unwrap(), control);
    }

    /// What was found in a quiet moment says nothing of a busy one.
    #[test]
    fn a_late_judgement_is_compared_with_a_control_of_its_own_time() {
        let controls = Controls::default();
        let of = |late, is_sound| {
            let seconds = 1.0;
            let run = || Ok(Control { is_sound, seconds });
            controls.of("a", late, run).unwrap().is_sound
        };
        let before = Instant::now();
        assert!(of(None, true));
        // The control was begun since.
        assert!(of(Some(before), false));
        let late = Instant::now();
        assert!(!of(Some(late), false), "it is not run again");
        // That was the moment's, and not the task's: neither for others nor in the long run.
        assert!(of(None, false));
        for _ in 0..=TRIES {
            assert!(!of(Some(Instant::now()), false));
        }
        assert!(of(Some(late), true));
        assert!(of(Some(late), false), "it was run in that time");
    }
}
