//! Work that is done once for all who ask for it at the same time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::actor::ActorError;

/// How long work is left alone that has failed twice; twice as long after each further time.
const PAUSE: Duration = Duration::from_mins(1);
/// The longest that it is left alone.
const MAX_PAUSE: Duration = Duration::from_hours(1);

/// What came of some work so far.
#[derive(Debug, Default)]
struct Turn {
    is_done: bool,
    /// When it failed last, and why.
    failed: Option<(Instant, String)>,
    failures: u32,
}

/// Builds by what they build.
#[derive(Debug, Default)]
pub(in crate::actor) struct Turns {
    turns: Mutex<HashMap<String, Arc<Mutex<Turn>>>>,
}

impl Turns {
    /// Does the work that makes `image` be there, unless it was done. Of many who ask at the same time one does it,
    /// and all have its result. Work that failed is done again for who asks later, but from its second failure on
    /// not at once: every rollout of a task asks, and what fails for its recipe's sake fails again.
    ///
    /// # Errors
    ///
    /// Fails where the work has.
    pub(in crate::actor) fn once(
        &self,
        image: &str,
        work: impl FnOnce() -> Result<(), ActorError>,
    ) -> Result<(), ActorError> {
        let asked = Instant::now();
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(turns.entry(image.to_owned()).or_default())
        };
        let mut turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        if turn.is_done {
            return Ok(());
        }
        if let Some((ended, message)) = &turn.failed
            // It failed while we waited for it, or a moment ago.
            && (*ended >= asked || ended.elapsed() < pause(turn.failures))
        {
            return Err(ActorError::Backend {
                activity: format!("getting the image `{image}`"),
                message: message.clone(),
            });
        }
        let done = work();
        match &done {
            Ok(()) => turn.is_done = true,
            Err(error) => {
                let message = match error {
                    ActorError::Backend { message, .. } => message.clone(),
                    other => crate::causes::with_causes(other),
                };
                turn.failed = Some((Instant::now(), message));
                turn.failures = turn.failures.saturating_add(1);
            }
        }
        done
    }
}

/// Returns how long work is left alone after so many failures.
fn pause(failures: u32) -> Duration {
    match failures.checked_sub(2) {
        None => Duration::ZERO,
        Some(more) => PAUSE.saturating_mul(1 << more.min(16)).min(MAX_PAUSE),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn failure() -> Result<(), ActorError> {
        Err(ActorError::Backend {
            activity: "x".to_owned(),
            message: "no such package".to_owned(),
        })
    }

    #[test]
    fn one_works_for_all() {
        let (turns, count) = (Turns::default(), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let work = || {
                        count.fetch_add(1, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(20));
                        Ok(())
                    };
                    turns.once("a", work).unwrap();
                });
            }
        });
        assert_eq!(count.load(Ordering::SeqCst), 1);
        turns.once("a", || unreachable!("it is done")).unwrap();
        turns.once("b", || Ok(())).unwrap();
    }

    #[test]
    fn who_waited_for_a_failure_has_it_too() {
        let turns = Turns::default();
        // Those who have the turn in hand: the list of turns, who works and who waits.
        let have_it = || {
            let turns = turns.turns.lock().unwrap();
            turns.get("a").map_or(0, Arc::strong_count)
        };
        std::thread::scope(|scope| {
            let works = scope.spawn(|| {
                turns.once("a", || {
                    while have_it() < 3 {
                        std::thread::yield_now();
                    }
                    failure()
                })
            });
            while have_it() < 2 {
                std::thread::yield_now();
            }
            let waited = turns.once("a", || unreachable!("it has failed meanwhile"));
            assert!(waited.unwrap_err().to_string().contains("no such package"));
            works.join().unwrap().unwrap_err();
        });
    }

    #[test]
    fn failures_are_tried_again_but_not_on_and_on() {
        let turns = Turns::default();
        turns.once("a", failure).unwrap_err();
        turns.once("a", failure).unwrap_err();
        let error = turns
            .once("a", || unreachable!("it is left alone"))
            .unwrap_err();
        assert!(error.to_string().contains("no such package"), "{error}");
        assert!(!error.is_guests_doing());
        assert_eq!(pause(0), Duration::ZERO);
        assert_eq!(pause(2), PAUSE);
        assert_eq!(pause(3), 2 * PAUSE);
        assert_eq!(pause(u32::MAX), MAX_PAUSE);
        turns.once("b", failure).unwrap_err();
        turns.once("b", || Ok(())).unwrap();
    }
}
