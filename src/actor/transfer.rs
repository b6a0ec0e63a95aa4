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
pub(crate) trait Shell: Actor {
    /// As [`Actor::exec`], as `user`.
    fn exec_as(&self, command: &ActorCommand, user: User) -> Result<ActorOutput, ActorError>;

    /// Returns who may write everywhere.
    fn root(&self) -> User {
        User::default()
    }
}

/// Writes `tree` below `folder`.
pub(crate) fn put(actor: &impl Shell, folder: &Path, tree: &FileTree) -> Result<(), ActorError> {
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
    let output = run(actor, folder, &command)?;
    match output.code() {
        Some(0) => Ok(()),
        _ => Err(ActorError::Unwritable {
            path: folder.to_owned(),
            message: output.stderr.text().trim().to_owned(),
        }),
    }
}

/// Reads what is at `path`.
pub(crate) fn get(
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
    let output = run(actor, path, &command)?;
    // 1 is a file that changed while it was read.
    if !matches!(output.code(), Some(0 | 1)) {
        return Err(unreadable(output.stderr.text().trim().to_owned()));
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

/// Runs what moves a tree to its end, and once more where it ran out of its time: what others do to this machine makes
/// it late, too.
fn run(actor: &impl Shell, path: &Path, command: &ActorCommand) -> Result<ActorOutput, ActorError> {
    let mut is_second = false;
    loop {
        let output = actor.exec_as(command, actor.root())?;
        match &output.ending {
            Ending::Exited { .. } => return Ok(output),
            Ending::TimedOut { .. } if !is_second => is_second = true,
            // Some that do not end in time are ended with their actor.
            Ending::TimedOut { .. } | Ending::Killed { .. } if is_second => {
                return Err(ActorError::TreeLate {
                    path: path.to_owned(),
                    limit: command.timeout,
                });
            }
            ending => return Err(ended(actor.id(), ending)),
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
pub(crate) fn check(command: &ActorCommand) -> Result<(), ActorError> {
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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::actor::{ActorSnapshot, Captured, RootFs};

    /// An actor whose commands end as it is told, the last first.
    #[derive(Debug)]
    struct Told(ActorSpec, Mutex<Vec<Ending>>);

    impl Shell for Told {
        fn exec_as(&self, _: &ActorCommand, _: User) -> Result<ActorOutput, ActorError> {
            let ending = self.1.lock().unwrap().pop().expect("one is left");
            Ok(ActorOutput {
                stderr: Captured {
                    head: b"no room".to_vec(),
                    ..Captured::default()
                },
                ..ActorOutput::of(ending)
            })
        }
    }

    impl Actor for Told {
        fn id(&self) -> &str {
            "told"
        }

        fn spec(&self) -> &ActorSpec {
            &self.0
        }

        fn exec(&self, _: &ActorCommand) -> Result<ActorOutput, ActorError> {
            unreachable!("trees are moved by root")
        }

        fn put(&self, folder: &Path, tree: &FileTree) -> Result<(), ActorError> {
            put(self, folder, tree)
        }

        fn get(&self, path: &Path, limits: TreeLimits) -> Result<FileTree, ActorError> {
            get(self, path, limits)
        }

        fn snapshot(&self) -> Result<Arc<dyn ActorSnapshot>, ActorError> {
            unreachable!("nobody asks")
        }

        fn logs(&self) -> String {
            String::new()
        }

        fn destroy(self: Box<Self>) -> Result<(), ActorError> {
            Ok(())
        }
    }

    #[test]
    fn a_tree_that_is_late_is_moved_again_and_may_be_late_by_nobodys_doing() {
        let late = || Ending::TimedOut { limit: TIMEOUT };
        let killed = || Ending::Killed {
            reason: "it did not end".to_owned(),
        };
        let exited = |code| Ending::Exited { code };
        for (endings, expected) in [
            (vec![exited(0)], Ok(())),
            (vec![exited(0), late()], Ok(())),
            (vec![exited(2)], Err("no room")),
            (vec![exited(2), late()], Err("no room")),
            (vec![killed()], Err("has ended: it did not end")),
            (vec![late(), late()], Err("took longer than 120 s, twice")),
            (vec![killed(), late()], Err("took longer than 120 s, twice")),
        ] {
            let told = format!("{endings:?}");
            let actor = || Told(ActorSpec::new(RootFs::Host), Mutex::new(endings.clone()));
            let (putting, getting) = (actor(), actor());
            let path = Path::new("/a/b");
            let put = putting.put(path, &FileTree::new());
            let got = getting.get(path, TreeLimits::default()).map(drop);
            for (actor, done) in [(putting, put), (getting, got)] {
                match (done, expected) {
                    (Ok(()), Ok(())) => {}
                    // The archive is empty, but it was read.
                    (
                        Err(ActorError::Unreadable { .. } | ActorError::HostileTree { .. }),
                        Ok(()),
                    ) => {}
                    (Err(error), Err(message)) => {
                        assert!(error.to_string().contains(message), "{told}: {error}");
                        assert!(error.is_guests_doing(), "{told}: {error}");
                        assert_eq!(
                            error.is_late(),
                            message.contains("twice"),
                            "{told}: {error}"
                        );
                    }
                    (done, _) => panic!("{told}: {done:?}"),
                }
                assert!(actor.1.lock().unwrap().is_empty(), "{told}");
            }
        }
    }
}
