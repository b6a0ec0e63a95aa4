//! An actor as what graders are written against.

use std::path::{Path, PathBuf};

use indexmap::IndexMap;

use crate::actor::{Actor, ActorCommand, ActorError, Ending, Entry, FileTree, TreeLimits, User};
use crate::grader::{
    GradingCommand, GradingEnd, GradingFault, GradingFile, GradingOutput, GradingSandbox,
    GradingUser,
};

/// The most of each stream of a command that is kept. The longest logs of SWE-bench, of Django's
/// tests, have a few MiB.
const MAX_OUTPUT: usize = 16 << 20;

/// An actor as a sandbox for a grading.
#[derive(Debug, Clone, Copy)]
pub struct ActorSandbox<'a> {
    actor: &'a dyn Actor,
}

impl<'a> ActorSandbox<'a> {
    /// Grades in this actor.
    #[must_use]
    pub fn new(actor: &'a dyn Actor) -> Self {
        Self { actor }
    }
}

fn fault(what: &'static str) -> impl Fn(ActorError) -> GradingFault {
    move |source| GradingFault {
        what,
        is_guests_doing: source.is_guests_doing(),
        timed_out: source.is_late(),
        source: Box::new(source),
    }
}

impl GradingSandbox for ActorSandbox<'_> {
    fn exec(&self, command: &GradingCommand) -> Result<GradingOutput, GradingFault> {
        let mut asked = ActorCommand::new(command.argv.clone());
        asked.cwd = command.workdir.as_ref().map(PathBuf::from);
        asked.env = command.env.clone().into_iter().collect();
        asked.user = command
            .user
            .map(|GradingUser { uid, gid }| User { uid, gid });
        asked.timeout = command.timeout;
        asked.max_output = MAX_OUTPUT;
        let output = self.actor.exec(&asked).map_err(fault("run a command"))?;
        let end = match &output.ending {
            Ending::Exited { code } => GradingEnd::Exited(*code),
            Ending::TimedOut { .. } => GradingEnd::TimedOut,
            Ending::OutOfMemory { limit, used } => {
                GradingEnd::Killed(format!("the sandbox held {used} bytes > {limit}"))
            }
            Ending::Killed { reason } => GradingEnd::Killed(reason.clone()),
        };
        Ok(GradingOutput {
            end,
            stdout: output.stdout.text(),
            stderr: output.stderr.text(),
            elapsed: output.elapsed,
        })
    }

    fn put(&self, path: &str, content: &[u8]) -> Result<(), GradingFault> {
        let path = Path::new(path);
        let (folder, name) = (path.parent(), path.file_name());
        let (folder, name) = (folder.unwrap_or(path), name.unwrap_or_default());
        FileTree::of_file(name, content)
            .and_then(|tree| self.actor.put(folder, &tree))
            .map_err(fault("write a file"))
    }

    fn put_all(
        &self,
        folder: &str,
        files: &IndexMap<String, GradingFile>,
    ) -> Result<(), GradingFault> {
        let mut tree = FileTree::new();
        for (path, file) in files {
            let entry = Entry::File {
                bytes: file.content.clone(),
                executable: file.executable,
            };
            tree.insert(path, entry).map_err(fault("write files"))?;
        }
        self.actor
            .put(Path::new(folder), &tree)
            .map_err(fault("write files"))
    }

    fn get(&self, path: &str, limit: u64) -> Result<Option<Vec<u8>>, GradingFault> {
        let limits = TreeLimits {
            bytes: limit,
            entries: 1,
        };
        match self.actor.get(Path::new(path), limits) {
            // What is no file says as little as an empty one.
            Ok(tree) => Ok(Some(match tree.iter().next() {
                Some((_, Entry::File { bytes, .. })) => bytes.clone(),
                _ => Vec::new(),
            })),
            Err(ActorError::Unreadable { .. }) => Ok(None),
            Err(source) => Err(fault("read a file")(source)),
        }
    }
}
