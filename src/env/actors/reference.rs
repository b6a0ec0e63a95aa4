//! The control of a Harbor task: its reference solution where it brings one, else an actor that nobody touched.
//!
//! A verifier may leave no reward where nothing was done, and may break only where the task is solved. So the
//! control goes the way of the policy as far as the task shows it: `solution/solve.sh` of each part that came
//! before, and of the one that is judged. What was not solved says less, and is asked only where there is no
//! solution, or it does not work here: many want a network.

use std::path::Path;
use std::time::{Duration, Instant};

use super::control::Control;
use super::health::Sick;
use super::precedence::Precedence;
use super::start::{GroupStart, begin_part};
use super::{HarborJudgement, Workplace, judge_trial, users};
use crate::actor::{Actor, ActorCommand, ActorError, Ending, Entry};
use crate::causes::with_causes;
use crate::grader::Verification;
use crate::task::harbor::{HarborPart, HarborTask};

/// Where a solution is brought. Only actors of controls have the folder.
const SOLUTION: &str = "/solution";

/// How long a solution may take where the task does not say how long its agent may.
const SOLUTION_TIMEOUT: Duration = Duration::from_mins(30);

/// Runs a solution, which may lack the line that names its shell.
const SOLVE: &str = "/solution/solve.sh";

/// Judges what is in an actor as one part of a task.
pub(super) fn judge_part(
    place: &Workplace,
    task: &HarborTask,
    part: &HarborPart,
    actor: &dyn Actor,
) -> Result<HarborJudgement, ActorError> {
    // No variable of this machine is meant for a task.
    let job = part.verify_job(&task.config, &|_| None);
    let job = job.map_err(|error| ActorError::InvalidSpec {
        reason: with_causes(&error),
    })?;
    let spec = place.verifier_spec(task, part)?;
    let (backend, artifacts) = (place.backend(), place.artifacts());
    judge_trial(backend, &spec, &task.config, part, job, actor, artifacts)
}

/// Returns the fault of a verifier that did not run by our fault.
pub(super) fn unjudged(task: &HarborTask, verification: Verification) -> ActorError {
    ActorError::Backend {
        activity: format!("judging `{}`", task.name),
        message: verification.output,
    }
}

/// Finds out whether the verifier of a part leaves a reward where no policy has been, and did since `late`.
pub(super) fn verifies(
    start: &GroupStart,
    task: &HarborTask,
    number: usize,
    late: Option<Instant>,
) -> Result<bool, ActorError> {
    control(start, task, ("verifies", number), late, |walk| {
        let (actor, has_begun) = match walk.solved(number + 1)? {
            Some(actor) => (actor, true),
            None => walk.untouched(number)?,
        };
        Ok(has_begun && walk.judge(&*actor, number)?)
    })
}

/// Finds out whether a part but the first begins where no policy has been, and did since `late`: whether the actor takes
/// what it brings, and its health check does not fail.
pub(super) fn begins(
    start: &GroupStart,
    task: &HarborTask,
    number: usize,
    late: Option<Instant>,
) -> Result<bool, ActorError> {
    control(start, task, ("begins", number), late, |walk| {
        match walk.solved(number)? {
            Some(actor) => walk.go_on(&*actor, number),
            None => Ok(walk.untouched(number)?.1),
        }
    })
}

/// Runs a control, unless what it finds is known.
fn control(
    start: &GroupStart,
    task: &HarborTask,
    (what, number): (&str, usize),
    late: Option<Instant>,
    run: impl FnOnce(&mut Walk<'_>) -> Result<bool, ActorError>,
) -> Result<bool, ActorError> {
    let key = format!("{}\0{}\0{number}\0{what}", task.folder.display(), task.name);
    let found = start.place().controls().of(&key, late, || {
        let mut walk = Walk {
            start,
            task,
            was_late: false,
        };
        let is_sound = match run(&mut walk) {
            // What a control brings about is no policy's doing, but the task's.
            Err(error) if error.is_guests_doing() => {
                walk.was_late |= error.is_late();
                false
            }
            ran => ran?,
        };
        Ok(Control {
            is_sound,
            timed_out: !is_sound && walk.was_late,
            seconds: 0.0,
        })
    });
    Ok(found?.is_sound)
}

/// The way of a control to a part, through those before it.
struct Walk<'a> {
    start: &'a GroupStart,
    task: &'a HarborTask,
    /// Whether something on it ran out of its time.
    was_late: bool,
}

impl Walk<'_> {
    /// Returns an actor in which the first `count` parts were solved by their references, each but the last judged; none
    /// where one has no reference, or it does not work here, however it breaks down.
    fn solved(&mut self, count: usize) -> Result<Option<Box<dyn Actor>>, ActorError> {
        let parts = self.task.parts.get(..count).unwrap_or_default();
        let has_solution = |part: &HarborPart| {
            (part.solution.as_ref()).is_some_and(|folder| folder.join("solve.sh").is_file())
        };
        if parts.is_empty() || !parts.iter().all(has_solution) {
            return Ok(None);
        }
        let actor = self.start.actor_with(SOLUTION)?;
        match self.solve_all(&*actor, parts) {
            Ok(is_solved) => Ok(is_solved.then_some(actor)),
            Err(error) if error.is_guests_doing() => {
                self.was_late |= error.is_late();
                self.complain(&with_causes(&error));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn solve_all(&mut self, actor: &dyn Actor, parts: &[HarborPart]) -> Result<bool, ActorError> {
        for (number, part) in parts.iter().enumerate() {
            if number > 0 && !self.go_on(actor, number)? {
                return Ok(false);
            }
            if !self.solve(actor, part)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns an actor that nobody touched at the beginning of a part, and whether that has begun. The parts before
    /// were judged, whether they began or not: a verifier may leave what the next part rests on.
    fn untouched(&mut self, number: usize) -> Result<(Box<dyn Actor>, bool), ActorError> {
        let actor = self.start.actor()?;
        let mut has_begun = true;
        for number in 1..=number {
            has_begun = self.go_on(&*actor, number)?;
        }
        Ok((actor, has_begun))
    }

    /// Judges the part before and begins the next one; returns whether that begins.
    fn go_on(&mut self, actor: &dyn Actor, number: usize) -> Result<bool, ActorError> {
        if let Some(before) = number.checked_sub(1) {
            self.judge(actor, before)?;
        }
        let begun = begin_part(self.start.place(), actor, self.task, number)?;
        self.was_late |= begun.as_ref().is_err_and(Sick::is_late);
        Ok(begun.is_ok())
    }

    /// Judges a part; returns whether its verifier leaves a reward.
    fn judge(&mut self, actor: &dyn Actor, number: usize) -> Result<bool, ActorError> {
        let Some(part) = self.task.parts.get(number) else {
            return Ok(false);
        };
        let verification = judge_part(self.start.place(), self.task, part, actor)?.verification;
        self.was_late |= verification.timed_out;
        match verification.rewards {
            Err(_) if verification.is_our_fault => Err(unjudged(self.task, verification)),
            rewards => Ok(rewards.is_ok()),
        }
    }

    /// Runs the reference of a part; returns whether it succeeds.
    fn solve(&mut self, actor: &dyn Actor, part: &HarborPart) -> Result<bool, ActorError> {
        let config = &self.task.config;
        let (Some(folder), Ok(env)) = (&part.solution, config.solution_env(&|_| None)) else {
            return Ok(false);
        };
        let place = self.start.place();
        let mut tree = match place.read_tree(folder) {
            Ok(tree) => tree,
            Err(error) => {
                self.complain(&with_causes(&error));
                return Ok(false);
            }
        };
        if let Some(script) = tree.file("solve.sh").map(<[u8]>::to_vec) {
            let script = Entry::File {
                bytes: script,
                executable: true,
            };
            tree.insert("solve.sh", script)?;
        }
        let _first = Precedence::of(actor);
        actor.put(Path::new(SOLUTION), &tree)?;
        let mut command = ActorCommand::shell(SOLVE);
        command.user = users::find(place.backend(), actor, part.agent_user(config))?;
        command.env.extend(env);
        command.timeout = (part.agent_timeout_sec)
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .unwrap_or(SOLUTION_TIMEOUT);
        let output = actor.exec(&command)?;
        self.was_late |= matches!(output.ending, Ending::TimedOut { .. });
        if !output.is_success() {
            let said: String = output.stderr.text().chars().take(300).collect();
            self.complain(&format!("{:?}: {said}", output.ending));
        }
        Ok(output.is_success())
    }

    fn complain(&self, why: &str) {
        tracing::warn!(
            task = self.task.name,
            why,
            "the reference solution of a task fails here; its control is an untouched sandbox"
        );
    }
}
