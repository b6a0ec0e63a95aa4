//! Whether a sandbox is ready, as the health checks of a Harbor task have it.

use std::path::Path;
use std::time::{Duration, Instant};

use super::Workplace;
use crate::actor::{Actor, ActorCommand, ActorError, Ending};
use crate::causes::with_causes;
use crate::grader::{GradeUsage, Verdict};
use crate::task::harbor::{HarborTask, Healthcheck};

/// The longest that one try may take, and one pause.
const LONGEST: Duration = Duration::from_secs(120);

/// Why a sandbox is not ready. Whose doing that is depends on who was there before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sick {
    why: String,
    /// Whether something ran out of its time, as it also may on a machine that is busy with something else.
    timed_out: bool,
}

impl Sick {
    /// Returns that of an actor that does not take what it is brought.
    pub(super) fn of_error(error: &ActorError) -> Self {
        Self {
            why: with_causes(error),
            timed_out: error.is_late(),
        }
    }

    /// Whether something ran out of its time.
    pub(super) fn is_late(&self) -> bool {
        self.timed_out
    }

    /// Returns the fault of one where no policy has been.
    pub(super) fn fault(self, task: &HarborTask) -> ActorError {
        ActorError::Backend {
            activity: format!("checking the health of the sandbox for `{}`", task.name),
            message: self.why,
        }
    }

    /// Returns the verdict of a trial that nobody can go on with.
    pub(super) fn verdict(self) -> Verdict {
        let message = format!("the next step does not begin: {}", self.why);
        Verdict::infra_error(1, &message, GradeUsage::default())
    }
}

/// Waits until a sandbox says that it is ready. Where the last try runs out of its time, there is one more.
///
/// # Errors
///
/// Fails where the actor does, and where the run ends.
pub(super) fn wait_healthy(
    place: &Workplace,
    actor: &dyn Actor,
    check: &Healthcheck,
) -> Result<Result<(), Sick>, ActorError> {
    let seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or(LONGEST);
    let mut command = ActorCommand::shell(&check.command);
    command.cwd = Some(Path::new("/").to_owned());
    command.timeout = seconds(check.timeout_sec);
    let started = Instant::now();
    let mut left = check.retries.max(1);
    let (mut has_extra, mut was_late) = (true, false);
    loop {
        let output = actor.exec(&command)?;
        if output.is_success() {
            return Ok(Ok(()));
        }
        let timed_out = matches!(output.ending, Ending::TimedOut { .. });
        was_late |= timed_out;
        let is_starting = started.elapsed() < seconds(check.start_period_sec);
        left -= i64::from(!is_starting);
        if left <= 0 {
            if timed_out && std::mem::take(&mut has_extra) {
                continue;
            }
            return Ok(Err(Sick {
                why: format!("{:?}: {}", output.ending, output.stderr.text().trim()),
                timed_out: was_late,
            }));
        }
        let pause = match is_starting {
            true => check.start_interval_sec,
            false => check.interval_sec,
        };
        place.pause(seconds(pause).min(LONGEST))?;
    }
}
