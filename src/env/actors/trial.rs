//! A Harbor task while it is worked on: which part the policy is at, and what the earlier ones earned.

use std::time::Instant;

use super::reference::{begins, judge_part, verifies};
use super::start::{GroupStart, begin_part};
use super::{HarborJudgement, reference};
use crate::actor::{Actor, ActorError};
use crate::causes::with_causes;
use crate::grader::{GradeUsage, RewardFault, Rewards, Verdict, harbor_verdict};
use crate::task::harbor::HarborTask;

/// The parts of a task that were judged.
#[derive(Debug, Default)]
pub(super) struct Trial {
    earned: Vec<Rewards>,
}

/// How a trial goes on behind a part.
#[derive(Debug)]
pub(super) enum Judged {
    /// With the next part.
    GoesOn,
    /// Not at all.
    Over(Verdict),
}

impl Trial {
    /// Returns the number of the part that the policy is at, from 0.
    pub(super) fn part(&self) -> usize {
        self.earned.len()
    }

    /// Takes the part as one that earned nothing: there is no actor any more that it could be judged in.
    pub(super) fn lose(mut self, task: &HarborTask, why: &str) -> Verdict {
        self.forgo(task);
        let verdict = self.verdict(task);
        match verdict.reward {
            Some(reward) => {
                Verdict::scored(reward, verdict.rewards, false, why, GradeUsage::default())
            }
            None => verdict,
        }
    }

    /// Judges the part that the policy is at. `is_cut_off` says that it can work on no other.
    ///
    /// A part whose verifier leaves no reward has earned nothing where it leaves one for an actor in which no
    /// policy has been, and otherwise cannot be judged. Likewise a next part that does not begin ends the trial where
    /// it does begin without the policy.
    ///
    /// # Errors
    ///
    /// Fails where an actor does, by our fault.
    pub(super) fn judge(
        &mut self,
        start: &GroupStart,
        task: &HarborTask,
        actor: Box<dyn Actor>,
        is_cut_off: bool,
    ) -> Result<(Judged, Option<Box<dyn Actor>>), ActorError> {
        let number = self.part();
        let Some(part) = task.parts.get(number) else {
            return Ok((Judged::Over(self.verdict(task)), Some(actor)));
        };
        let began = Instant::now();
        let (rewards, actor) = match judge_part(start.place(), task, part, &*actor) {
            Ok(HarborJudgement { verification, .. }) => match verification.rewards {
                Ok(rewards) => (rewards, Some(actor)),
                Err(_) if verification.is_our_fault => {
                    return Err(reference::unjudged(task, verification));
                }
                Err(fault) => {
                    let ended = verification.ended;
                    actor.destroy()?;
                    let late = verification.timed_out.then_some(began);
                    match verifies(start, task, number, late)? {
                        true => (nothing(), None),
                        false => return Ok((Judged::Over(unjudged(ended, &fault)), None)),
                    }
                }
            },
            Err(error) if error.is_guests_doing() => {
                tracing::warn!(task = task.name, error = %with_causes(&error), "a part cannot be judged");
                drop(actor);
                let late = error.is_late().then_some(began);
                match verifies(start, task, number, late)? {
                    true => (nothing(), None),
                    false => return Err(error),
                }
            }
            Err(error) => return Err(error),
        };
        let goes_on = (part.step.as_ref()).is_none_or(|step| step.goes_on(Ok(&rewards)));
        self.earned.push(rewards);
        let has_next = number + 1 < task.parts.len();
        if !goes_on || !has_next {
            return Ok((Judged::Over(self.verdict(task)), actor));
        }
        let actor = match actor {
            Some(actor) if !is_cut_off => {
                let began = Instant::now();
                let Err(sick) = begin_part(start.place(), &*actor, task, number + 1)? else {
                    return Ok((Judged::GoesOn, Some(actor)));
                };
                drop(actor);
                let late = sick.is_late().then_some(began);
                if !begins(start, task, number + 1, late)? {
                    return Ok((Judged::Over(sick.verdict()), None));
                }
                None
            }
            // Without the actor there is nothing to go on with.
            actor => actor,
        };
        self.forgo(task);
        Ok((Judged::Over(self.verdict(task)), actor))
    }

    /// Counts what the policy did not come to as parts that earned nothing: else it would be better off to stop
    /// before a part that it cannot do.
    fn forgo(&mut self, task: &HarborTask) {
        let left = task.parts.len().saturating_sub(self.earned.len());
        self.earned
            .extend(std::iter::repeat_with(nothing).take(left));
    }

    fn verdict(&self, task: &HarborTask) -> Verdict {
        let usage = GradeUsage::default();
        if task.parts.len() <= 1 {
            let rewards = self.earned.first().cloned();
            return harbor_verdict(None, &rewards.ok_or(RewardFault::Missing), usage);
        }
        let steps: Vec<_> = self.earned.iter().cloned().map(Ok).collect();
        harbor_verdict(None, &task.config.rewards_of_steps(&steps), usage)
    }
}

/// Returns what a part has earned that earned nothing.
fn nothing() -> Rewards {
    Rewards::read(None, Some(b"0")).unwrap_or_default()
}

fn unjudged(ended: Option<&'static str>, fault: &RewardFault) -> Verdict {
    harbor_verdict(ended, &Err(fault.clone()), GradeUsage::default())
}
