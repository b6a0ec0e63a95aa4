//! The control of a Harbor task: its reference solution where it brings one, else an actor that nobody touched.
//!
//! A verifier may leave no reward where nothing was done, and may break only where the task is solved. So the
//! control goes the way of the policy as far as the task shows it: `solution/solve.sh` of each part that came
//! before, and of the one that is judged. What was not solved says less, and is asked only where there is no
//! solution, or it does not work here: many want a network.

use std::path::Path;
use std::time::{Duration, Instant};

use super::control::Control;
use super::start::{GroupStart, begin_part};
use super::{HarborJudgement, Workplace, judge_trial, users};
use crate::actor::{Actor, ActorCommand, ActorError, Entry, FileTree, TreeLimits};
use crate::causes::with_causes;
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
    let environment =
        (task.config.verifier_environment(part.step.as_ref())).unwrap_or(&task.config.environment);
    let spec = place.harbor_spec(task, environment)?;
    let (backend, artifacts) = (place.backend(), place.artifacts());
    judge_trial(backend, &spec, &task.config, part, job, actor, artifacts)
}

/// Finds out whether the verifier of a part leaves a reward where no policy has been, and did since `late`.
pub(super) fn verifies(
    start: &GroupStart,
    task: &HarborTask,
    number: usize,
    late: Option<Instant>,
) -> Result<bool, ActorError> {
    let Some(part) = task.parts.get(number) else {
        return Ok(false);
    };
    control(start, task, ("verifies", number), late, || {
        let solved = solved(start, task, number + 1)?;
        let actor = match solved {
            Some(solved) => solved,
            None => {
                let actor = start.actor()?;
                if number > 0 && begin_part(start.place(), &*actor, task, number)?.is_err() {
                    return Ok(false);
                }
                actor
            }
        };
        let judged = judge_part(start.place(), task, part, &*actor)?;
        actor.destroy()?;
        Ok(judged.verification.rewards.is_ok())
    })
}

/// Finds out whether a part begins where no policy has been: whether its health check does not fail.
pub(super) fn begins(
    start: &GroupStart,
    task: &HarborTask,
    number: usize,
) -> Result<bool, ActorError> {
    control(start, task, ("begins", number), None, || {
        let actor = match solved(start, task, number)? {
            Some(solved) => {
                let before = number.checked_sub(1).and_then(|at| task.parts.get(at));
                if let Some(before) = before {
                    judge_part(start.place(), task, before, &*solved)?;
                }
                solved
            }
            None => start.actor()?,
        };
        let begun = begin_part(start.place(), &*actor, task, number)?;
        actor.destroy()?;
        Ok(begun.is_ok())
    })
}

/// Runs a control, unless what it finds is known.
fn control(
    start: &GroupStart,
    task: &HarborTask,
    (what, number): (&str, usize),
    late: Option<Instant>,
    run: impl FnOnce() -> Result<bool, ActorError>,
) -> Result<bool, ActorError> {
    let key = format!("{}\0{}\0{number}\0{what}", task.folder.display(), task.name);
    let found = start.place().controls().of(&key, late, || {
        // What a control brings about is no policy's doing, but the task's.
        let is_sound = match run() {
            Err(error) if error.is_guests_doing() => false,
            ran => ran?,
        };
        Ok(Control {
            is_sound,
            seconds: 0.0,
        })
    });
    Ok(found?.is_sound)
}

/// Returns an actor in which the first `count` parts were solved by their references, each but the last judged; none
/// where one has no reference, or it does not work here.
fn solved(
    start: &GroupStart,
    task: &HarborTask,
    count: usize,
) -> Result<Option<Box<dyn Actor>>, ActorError> {
    let parts = task.parts.get(..count).unwrap_or_default();
    let has_solution = |part: &HarborPart| {
        (part.solution.as_ref()).is_some_and(|folder| folder.join("solve.sh").is_file())
    };
    if parts.is_empty() || !parts.iter().all(has_solution) {
        return Ok(None);
    }
    let actor = start.own_actor(&[SOLUTION])?;
    for (number, part) in parts.iter().enumerate() {
        let before = number.checked_sub(1).and_then(|before| parts.get(before));
        if let Some(before) = before {
            // A verifier may leave what the next part rests on.
            judge_part(start.place(), task, before, &*actor)?;
            if begin_part(start.place(), &*actor, task, number)?.is_err() {
                return Ok(None);
            }
        }
        if !solve(start.place(), &*actor, task, part)? {
            return Ok(None);
        }
    }
    Ok(Some(actor))
}

/// Runs the reference of a part; returns whether it succeeds.
fn solve(
    place: &Workplace,
    actor: &dyn Actor,
    task: &HarborTask,
    part: &HarborPart,
) -> Result<bool, ActorError> {
    let (Some(folder), Ok(env)) = (&part.solution, task.config.solution_env(&|_| None)) else {
        return Ok(false);
    };
    let mut tree = FileTree::read_from(folder, TreeLimits::default())?;
    if let Some(script) = tree.file("solve.sh").map(<[u8]>::to_vec) {
        let script = Entry::File {
            bytes: script,
            executable: true,
        };
        tree.insert("solve.sh", script)?;
    }
    actor.put(Path::new(SOLUTION), &tree)?;
    let asked = part.agent_user(&task.config);
    let mut command = ActorCommand::shell(SOLVE);
    command.user = users::find(place.backend(), actor, asked)?;
    command.env.extend(env);
    command.timeout = (part.agent_timeout_sec)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .unwrap_or(SOLUTION_TIMEOUT);
    let output = actor.exec(&command)?;
    if !output.is_success() {
        tracing::warn!(
            task = task.name,
            ending = ?output.ending,
            complaint = %output.stderr.text().chars().take(300).collect::<String>(),
            "the reference solution of a task fails here; its control is an untouched sandbox"
        );
    }
    Ok(output.is_success())
}
