//! Trees into and out of an actor, by the `tar` of its own root filesystem.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{ActorCommand, ActorError, ActorOutput, ActorSpec, Ending, FileTree, TreeLimits, User};
use crate::actor::Actor;

/// How long a tree may take.
const TIMEOUT: Duration = Duration::from_secs(120);
/// What an archive has for each entry besides its bytes, at most on average: a header, names, padding.
const ENTRY: u64 = 2048;
/// What an archive has besides its entries.
const ARCHIVE: u64 = 64 << 10;

/// An actor that can be told who runs a command.
pub(super) trait Shell: Actor {
    /// As [`Actor::exec`], as `user`.
    fn exec_as(&self, command: &ActorCommand, user: User) -> Result<ActorOutput, ActorError>;

    /// Returns who may write everywhere.
    fn root(&self) -> User {
        User::default()
    }
}

/// Writes `tree` below `folder`.
pub(super) fn put(actor: &impl Shell, folder: &Path, tree: &FileTree) -> Result<(), ActorError> {
    let ActorSpec { user, .. } = actor.spec();
    let script = format!(
        "[ -d \"$1\" ] || {{ mkdir -p -- \"$1\" && chown {}:{} -- \"$1\"; }} && exec tar -C \"$1\" -xpf -",
        user.uid, user.gid
    );
    let command = ActorCommand {
        cwd: Some(PathBuf::from("/")),
        stdin: tree.to_tar(*user),
        timeout: TIMEOUT,
        ..ActorCommand::new(["/bin/sh", "-c", &script, "sh", text(folder)?])
    };
    let output = actor.exec_as(&command, actor.root())?;
    finish(actor, &output).map_err(|problem| match problem {
        Problem::Ended(error) => error,
        Problem::Failed(message) => ActorError::Unwritable {
            path: folder.to_owned(),
            message,
        },
    })
}

/// Reads what is at `path`.
pub(super) fn get(
    actor: &impl Shell,
    path: &Path,
    limits: TreeLimits,
) -> Result<FileTree, ActorError> {
    let unreadable = |message: String| ActorError::Unreadable {
        path: path.to_owned(),
        message,
    };
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(unreadable("it has no name".to_owned()));
    };
    let name = format!("./{}", text(Path::new(name))?);
    let most = limits
        .bytes
        .saturating_add(limits.entries.saturating_mul(ENTRY))
        .saturating_add(ARCHIVE);
    let command = ActorCommand {
        cwd: Some(PathBuf::from("/")),
        timeout: TIMEOUT,
        max_output: usize::try_from(most).unwrap_or(usize::MAX),
        ..ActorCommand::new(["tar", "-C", text(above)?, "-cf", "-", &name])
    };
    let output = actor.exec_as(&command, actor.root())?;
    // 1 is a file that changed while it was read.
    if output.code() != Some(1) {
        finish(actor, &output).map_err(|problem| match problem {
            Problem::Ended(error) => error,
            Problem::Failed(message) => unreadable(message),
        })?;
    }
    if output.stdout.is_truncated() {
        return Err(ActorError::TreeTooLarge {
            limit: limits.bytes,
            unit: "bytes",
        });
    }
    let name = PathBuf::from(&name[2..]);
    let whole = FileTree::from_tar(&output.stdout.head, Path::new(""), limits)?;
    match whole.file(&name) {
        Some(_) => Ok(whole),
        None => FileTree::from_tar(&output.stdout.head, &name, limits),
    }
}

enum Problem {
    Ended(ActorError),
    Failed(String),
}

fn finish(actor: &impl Shell, output: &ActorOutput) -> Result<(), Problem> {
    match &output.ending {
        Ending::Exited { code: 0 } => Ok(()),
        Ending::Exited { .. } => Err(Problem::Failed(output.stderr.text().trim().to_owned())),
        Ending::TimedOut { .. } => Err(Problem::Failed("its time was over".to_owned())),
        ending @ (Ending::OutOfMemory { .. } | Ending::Killed { .. }) => {
            Err(Problem::Ended(ended(actor.id(), ending)))
        }
    }
}

/// Returns the error of an actor that can do nothing any more.
pub(super) fn ended(id: &str, ending: &Ending) -> ActorError {
    let reason = match ending {
        Ending::Killed { reason } => reason.clone(),
        Ending::OutOfMemory { limit, used } => {
            format!("it held {used} bytes, of at most {limit}")
        }
        Ending::TimedOut { limit } => format!("its {} s were over", limit.as_secs()),
        Ending::Exited { code } => format!("it exited with {code}"),
    };
    ActorError::Ended {
        id: id.to_owned(),
        reason,
    }
}

/// Checks what a command cannot be told.
pub(super) fn check(command: &ActorCommand) -> Result<(), ActorError> {
    let invalid = |reason: &str| {
        Err(ActorError::InvalidSpec {
            reason: reason.to_owned(),
        })
    };
    if command.argv.first().is_none_or(String::is_empty) {
        return invalid("a command needs a program");
    }
    let mut variables = command.env.iter();
    if command.argv.iter().any(|argument| argument.contains('\0'))
        || variables.any(|(name, value)| {
            name.is_empty() || name.contains(['=', '\0']) || value.contains('\0')
        })
    {
        return invalid("a command holds a zero byte, or a variable without a name");
    }
    match &command.cwd {
        Some(cwd) if !cwd.is_absolute() => invalid("a command's folder must be an absolute path"),
        _ => Ok(()),
    }
}

fn text(path: &Path) -> Result<&str, ActorError> {
    path.to_str()
        .filter(|text| !text.contains('\0'))
        .ok_or_else(|| ActorError::InvalidSpec {
            reason: format!("`{}` is not UTF-8", path.display()),
        })
}
