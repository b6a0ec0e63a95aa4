//! What a policy changed in a repository, as a patch.
//!
//! The patch is taken in the policy's own actor, with whatever became of `git` there. That gives nothing away: a
//! patch is text that the policy may write as it likes, is taken apart by hostile-minded readers, and is judged in
//! another actor. Who breaks `git` has no patch.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::control::Control;
use super::precedence::Precedence;
use super::start::GroupStart;
use crate::actor::{Actor, ActorCommand, ActorError, ActorOutput, Ending};
use crate::task::swebench::SwebenchInstance;

/// How long `git` may take to look at all files.
const TIMEOUT: Duration = Duration::from_secs(300);

/// The most of a patch that is taken; graders read less.
const MAX_PATCH: usize = 10 << 20;

/// Notes the state of all files as a tree of git's, beside the index and the commits: these are the policy's.
/// What is built or cached is no part of it, nor what the repository ignores and does not hold. Prints its name.
const NOTE: &str = r#"
set -e
export GIT_INDEX_FILE="$(mktemp -u)"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
git read-tree "$1"
git -c core.fsmonitor=false -c core.autocrlf=false add --all -- . \
    ':(exclude,glob)**/__pycache__/**' ':(exclude,glob)**/*.pyc' ':(exclude,glob)**/.pytest_cache/**' >&2
git write-tree
rm -f "$GIT_INDEX_FILE"
"#;

/// Prints what differs from a tree that was noted.
const COMPARE: &str = r#"
exec git diff --no-color --no-ext-diff --no-textconv --no-renames --src-prefix=a/ --dst-prefix=b/ "$1" "$2" --
"#;

/// The state that a policy's changes are told from.
#[derive(Debug, Clone)]
pub(super) struct Base(String);

impl Base {
    /// Notes the state of the repository in `folder`, before any policy is there.
    pub(super) fn note(actor: &dyn Actor, folder: &str) -> Result<Self, ActorError> {
        let output = run(actor, folder, NOTE, &["HEAD"])?;
        name_of(&output)
            .map(Self)
            .ok_or_else(|| ActorError::Backend {
                activity: format!("noting the state of `{folder}`"),
                message: format!("{:?}: {}", output.ending, output.stderr.text().trim()),
            })
    }

    /// Returns what differs from it by now, or why that cannot be told. That is the policy's doing, unless it is late
    /// and [is so without it](Self::is_told_in_time).
    pub(super) fn changes(
        &self,
        actor: &dyn Actor,
        folder: &str,
    ) -> Result<Result<String, Untold>, ActorError> {
        let _first = Precedence::of(actor);
        let noted = run_patiently(actor, folder, NOTE, &[&self.0])?;
        let Some(now) = name_of(&noted) else {
            return Ok(Err(Untold::of("noting the state", &noted)));
        };
        let output = run_patiently(actor, folder, COMPARE, &[&self.0, &now])?;
        if !output.is_success() {
            return Ok(Err(Untold::of("comparing", &output)));
        }
        if output.stdout.is_truncated() {
            return Ok(Err(Untold {
                why: format!("the patch has more than {MAX_PATCH} bytes"),
                timed_out: false,
            }));
        }
        Ok(Ok(output.stdout.text()))
    }

    /// Finds out whether it is told in time what differs where no policy has been, and was since `late`.
    pub(super) fn is_told_in_time(
        &self,
        start: &GroupStart,
        instance: &SwebenchInstance,
        late: Instant,
    ) -> Result<bool, ActorError> {
        let key = format!("{}\0changes", instance.instance_id);
        let found = start.place().controls().of(&key, Some(late), || {
            let actor = start.actor()?;
            let told = self.changes(&*actor, instance.workdir())?;
            Ok(Control {
                is_sound: told.is_ok(),
                timed_out: told.is_err_and(|untold| untold.timed_out),
                seconds: 0.0,
            })
        });
        Ok(found?.is_sound)
    }
}

/// Why it cannot be told what a policy changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Untold {
    pub(super) why: String,
    /// Whether `git` ran out of its time, as it also may on a machine that is busy with something else.
    pub(super) timed_out: bool,
}

impl Untold {
    fn of(what: &str, output: &ActorOutput) -> Self {
        let said = output.stderr.text();
        let said: String = said.trim().chars().take(300).collect();
        Self {
            why: format!(
                "{what} of the repository failed ({:?}): {said}",
                output.ending
            ),
            timed_out: is_late(output),
        }
    }
}

fn is_late(output: &ActorOutput) -> bool {
    matches!(output.ending, Ending::TimedOut { .. })
}

/// Runs a script, and once more where it ran out of its time.
fn run_patiently(
    actor: &dyn Actor,
    folder: &str,
    script: &str,
    arguments: &[&str],
) -> Result<ActorOutput, ActorError> {
    let output = run(actor, folder, script, arguments)?;
    match is_late(&output) {
        true => run(actor, folder, script, arguments),
        false => Ok(output),
    }
}

fn run(
    actor: &dyn Actor,
    folder: &str,
    script: &str,
    arguments: &[&str],
) -> Result<ActorOutput, ActorError> {
    let argv = [&["/bin/sh", "-c", script, "sh"], arguments].concat();
    actor.exec(&ActorCommand {
        cwd: Some(PathBuf::from(folder)),
        timeout: TIMEOUT,
        max_output: MAX_PATCH,
        ..ActorCommand::new(argv)
    })
}

/// Returns the name of a tree that was printed.
fn name_of(output: &ActorOutput) -> Option<String> {
    let text = output.stdout.text();
    let name = text.trim();
    let is_name =
        (40..=64).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    (output.is_success() && is_name).then(|| name.to_owned())
}
