//! Whose doing it was that a judgement broke down.
//!
//! Tests that loop, eat the memory, or print that a module is missing may do so by what the policy did, or
//! because the environment is broken. Were the latter assumed, a policy could leave every bad reward out of its
//! statistics by breaking the tests; were the former, it would be punished for what we did. So the same tests are
//! run where no policy has been. Where they do what they should there, the policy broke them.
//!
//! A control that runs out of its own time says nothing of the task: this machine is busy. What is judged then is
//! excused, but no task is without end, or policies that keep the machine busy could leave out whatever they like:
//! see [`EXCUSES`].

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::workplace::run_ends;
use crate::actor::ActorError;

/// What a control found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Control {
    /// Whether the tests did what they should.
    pub(super) is_sound: bool,
    /// Whether they did not because their time was over.
    pub(super) timed_out: bool,
    /// How long they took, in seconds.
    pub(super) seconds: f64,
}

/// How often a control is run that does not do what it should: one bad moment of this machine must not excuse
/// whatever comes later.
const TRIES: u32 = 3;

/// How many judgements of a task are excused because its control was late, too, once another was in time. Whoever is
/// late after that is so by itself: by then it is rather the policy that keeps this machine busy than an accident.
const EXCUSES: u32 = 8;

/// What nobody knows: whether the tests work.
const LATE: Control = Control {
    is_sound: false,
    timed_out: true,
    seconds: 0.0,
};

/// What the controls of a task have found so far.
#[derive(Debug, Default)]
struct Known {
    /// What the last one found that was in time, and when it was begun.
    found: Option<(Control, Instant)>,
    /// How many were in time and did not do what they should.
    failures: u32,
    /// When the last one began and ended that was late.
    late: Option<(Instant, Instant)>,
    /// How long those took together that were late.
    wasted: Duration,
    /// How many judgements were excused by one that was late, while another had been in time.
    excused: u32,
    /// Whether somebody runs one.
    is_running: bool,
}

impl Known {
    fn sound(&self) -> Option<(Control, Instant)> {
        self.found.filter(|(control, _)| control.is_sound)
    }

    /// Returns what is to be held of a judgement that broke down, and began at `late` where it was late, as far as
    /// that is known at `now`.
    fn answer(&mut self, late: Option<Instant>, now: Instant) -> Option<Control> {
        if let Some((control, began)) = self.sound() {
            let is_of_that_time = late.is_none_or(|late| began >= late);
            if is_of_that_time || self.excused >= EXCUSES {
                return Some(control);
            }
        } else if self.failures >= TRIES {
            return self.found.map(|(control, _)| control);
        }
        let (began, ended) = self.late?;
        let was_late_then = late.is_some_and(|late| began >= late);
        // Where none has ever been in time, trying takes less and less of the time.
        let is_too_soon =
            self.sound().is_none() && now.saturating_duration_since(ended) < self.wasted;
        (was_late_then || is_too_soon).then(|| self.excuse())
    }

    fn excuse(&mut self) -> Control {
        self.excused += u32::from(self.sound().is_some());
        LATE
    }

    /// Notes what a control found; returns what that says.
    fn note(&mut self, control: Control, began: Instant, ended: Instant) -> Control {
        let before = self.sound();
        if !control.is_sound && (control.timed_out || before.is_some()) {
            // It was the moment's doing, and not the task's.
            self.late = Some((began, ended));
            self.wasted += ended.saturating_duration_since(began);
            return self.excuse();
        }
        self.failures += u32::from(!control.is_sound);
        // What the reference takes on a quiet machine is what patches are compared with.
        let seconds = before.map_or(control.seconds, |(last, _)| {
            control.seconds.min(last.seconds)
        });
        let control = Control { seconds, ..control };
        self.found = Some((control, began));
        control
    }
}

#[derive(Debug, Default)]
struct State {
    tasks: HashMap<String, Known>,
    is_closed: bool,
}

/// What controls have found, by task: each is run when it is first needed, once where it is sound.
#[derive(Debug, Default)]
pub struct Controls {
    /// Never held while a control is run.
    state: Mutex<State>,
    changed: Condvar,
}

/// That a control is run; others of its task wait until this is dropped.
struct Running<'a>(&'a Controls, &'a str);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        if let Some(known) = state.tasks.get_mut(self.1) {
            known.is_running = false;
        }
        self.0.changed.notify_all();
    }
}

impl Controls {
    /// Returns what the control of `task` found, which `run` runs where nobody has. Who needs one that is being run
    /// waits for it, but no longer than until this is [closed](Self::close).
    ///
    /// `late` is when a judgement began that ran out of its time. A control that was begun before says nothing of
    /// how busy this machine was meanwhile, so it is run again. One that is late itself is held against nobody, for
    /// some times, and the task stays as sound as it was.
    pub(super) fn of(
        &self,
        task: &str,
        late: Option<Instant>,
        run: impl FnOnce() -> Result<Control, ActorError>,
    ) -> Result<Control, ActorError> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return Err(run_ends());
            }
            let known = state.tasks.entry(task.to_owned()).or_default();
            if let Some(control) = known.answer(late, Instant::now()) {
                return Ok(control);
            }
            if !known.is_running {
                known.is_running = true;
                break;
            }
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        let _running = Running(self, task);
        let began = Instant::now();
        let control = run()?;
        let mut state = self.lock();
        if state.is_closed {
            // What was run was ended with everything else.
            return Err(run_ends());
        }
        let known = state.tasks.entry(task.to_owned()).or_default();
        let found = known.note(control, began, Instant::now());
        tell(task, found, known.excused);
        Ok(found)
    }

    /// Lets those go who wait for a control: the run ends.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says what a control found that was not sound.
fn tell(task: &str, found: Control, excused: u32) {
    match found {
        Control { is_sound: true, .. } => {}
        Control {
            timed_out: true, ..
        } => tracing::warn!(
            task,
            excused,
            of = EXCUSES,
            "the tests of a task were late where no policy has been, too: this machine is too busy, or too slow for \
             them; lower `actor.max_actors` or raise the tests' time. Once they have been in time, only so many \
             episodes are excused by that"
        ),
        Control { .. } => tracing::warn!(
            task,
            "the tests of a task do not work even where no policy has been; episodes that break them have no reward"
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    const SOUND: Control = Control {
        is_sound: true,
        timed_out: false,
        seconds: 1.0,
    };
    const BROKEN: Control = Control {
        is_sound: false,
        ..SOUND
    };

    #[test]
    fn a_control_is_run_once_unless_it_fails() {
        let controls = Controls::default();
        let failed = controls.of("a", None, || {
            Err(ActorError::InvalidSpec {
                reason: String::new(),
            })
        });
        failed.unwrap_err();
        assert_eq!(controls.of("a", None, || Ok(SOUND)).unwrap(), SOUND);
        let again = controls.of("a", None, || unreachable!("it is known"));
        assert_eq!(again.unwrap(), SOUND);
        // One that breaks down has further tries.
        for _ in 0..TRIES {
            assert_eq!(controls.of("b", None, || Ok(BROKEN)).unwrap(), BROKEN);
        }
        let given_up = controls.of("b", None, || unreachable!("it was tried enough"));
        assert_eq!(given_up.unwrap(), BROKEN);
        controls.of("c", None, || Ok(BROKEN)).unwrap();
        assert_eq!(controls.of("c", None, || Ok(SOUND)).unwrap(), SOUND);
    }

    /// What was found in a quiet moment says nothing of a busy one.
    #[test]
    fn a_late_judgement_is_compared_with_a_control_of_its_own_time() {
        let controls = Controls::default();
        let of = |late, found| controls.of("a", late, || Ok(found)).unwrap().is_sound;
        let before = Instant::now();
        assert!(of(None, SOUND));
        // The control was begun since.
        assert!(of(Some(before), LATE));
        let late = Instant::now();
        assert!(!of(Some(late), LATE), "it is not run again");
        // That was the moment's, and not the task's.
        assert!(of(None, BROKEN));
        assert!(!of(Some(Instant::now()), BROKEN));
        assert!(of(None, BROKEN));
        assert!(of(Some(Instant::now()), SOUND));
        assert!(of(Some(late), LATE), "it was run in that time");
    }

    /// A busy moment at the first use of a task says nothing of the task.
    #[test]
    fn controls_that_are_late_are_not_counted_and_are_run_again_later() {
        let mut known = Known::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut now = 0;
        for run in 1..=u64::from(TRIES) + 1 {
            let began = at(now);
            assert_eq!(known.answer(None, began), None);
            assert_eq!(known.note(LATE, began, at(now + 10)), LATE);
            // Each takes 10 s, and as long as all took there is no other.
            now += 10 + 10 * run;
            assert_eq!(known.answer(None, at(now - 1)), Some(LATE));
            // Whoever was late in its time needs no other, either.
            assert_eq!(known.answer(Some(began), at(now + 1)), Some(LATE));
        }
        assert_eq!(known.answer(None, at(1000)), None);
        assert_eq!(known.note(SOUND, at(1000), at(1001)), SOUND);
        assert_eq!(known.answer(None, at(1002)), Some(SOUND));
    }

    /// Else policies that keep this machine busy could leave out whatever they like.
    #[test]
    fn late_controls_excuse_some_judgements_of_a_task_that_works_and_no_more() {
        let controls = Controls::default();
        let of = |late| controls.of("a", late, || Ok(LATE)).unwrap();
        controls.of("a", None, || Ok(SOUND)).unwrap();
        for _ in 0..EXCUSES {
            assert_eq!(of(Some(Instant::now())), LATE);
        }
        let late = Some(Instant::now());
        let held = controls.of("a", late, || unreachable!("it says nothing any more"));
        assert_eq!(held.unwrap(), SOUND);
        // Those who were late in the time of one control count one by one.
        controls.of("b", None, || Ok(SOUND)).unwrap();
        let late = Some(Instant::now());
        for _ in 0..EXCUSES {
            assert_eq!(controls.of("b", late, || Ok(LATE)).unwrap(), LATE);
        }
        assert_eq!(controls.of("b", late, || Ok(LATE)).unwrap(), SOUND);
    }

    #[test]
    fn who_needs_what_is_known_does_not_wait_for_a_control_that_is_run() {
        let controls = Controls::default();
        controls.of("a", None, || Ok(SOUND)).unwrap();
        let [begins, ends] = [(); 2].map(|()| Barrier::new(2));
        std::thread::scope(|scope| {
            let running = scope.spawn(|| {
                controls.of("a", Some(Instant::now()), || {
                    begins.wait();
                    ends.wait();
                    Ok(LATE)
                })
            });
            begins.wait();
            let known = controls.of("a", None, || unreachable!("it is known"));
            assert_eq!(known.unwrap(), SOUND);
            assert_eq!(controls.of("b", None, || Ok(BROKEN)).unwrap(), BROKEN);
            ends.wait();
            assert_eq!(running.join().unwrap().unwrap(), LATE);
        });
    }

    #[test]
    fn who_waits_for_a_control_is_let_go_when_the_run_ends() {
        let controls = Controls::default();
        let [begins, ends] = [(); 2].map(|()| Barrier::new(2));
        std::thread::scope(|scope| {
            let running = scope.spawn(|| {
                controls.of("a", None, || {
                    begins.wait();
                    ends.wait();
                    Ok(SOUND)
                })
            });
            begins.wait();
            let waiting = scope.spawn(|| controls.of("a", None, || unreachable!("one is run")));
            controls.close();
            waiting.join().unwrap().unwrap_err();
            ends.wait();
            // What was ended with the run says nothing.
            running.join().unwrap().unwrap_err();
        });
    }
}
