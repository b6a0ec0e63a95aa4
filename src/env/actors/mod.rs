//! Gradings that need a shell, in the heavy tier: each in an actor of its own.

mod harbor;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::actor::{
    Actor, ActorBackend, ActorCommand, ActorError, ActorSpec, Ending, Entry, FileTree, TreeLimits,
};
use crate::grader::swebench::{PatchGrade, PatchJob, SwebenchBonus, grade_patch};
use crate::grader::{GradingCommand, GradingEnd, GradingFault, GradingOutput, GradingSandbox};
use crate::task::swebench::SwebenchInstance;

pub use harbor::{HarborJudgement, KeptArtifact, judge_trial};

/// The most of each stream of a command that is kept. The longest logs of SWE-bench, of Django's
/// tests, have a few MiB.
const MAX_OUTPUT: usize = 16 << 20;

/// How long the tests of an instance may take, as in the official harness.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(1800);

/// How long copying the repository may take.
const COPY_TIMEOUT: Duration = Duration::from_secs(300);

/// Copies the repository to its folder where it is not there.
const PREPARE: &str = r#"if [ -d /base ]; then mkdir -p "$1" && cp -a /base/. "$1"; fi"#;

/// Lets `git` work on files whatever their owner: there is nobody else in the sandbox.
const GIT_TRUST: [(&str, &str); 3] = [
    ("GIT_CONFIG_COUNT", "1"),
    ("GIT_CONFIG_KEY_0", "safe.directory"),
    ("GIT_CONFIG_VALUE_0", "*"),
];

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
        source: Box::new(source),
    }
}

impl GradingSandbox for ActorSandbox<'_> {
    fn exec(&self, command: &GradingCommand) -> Result<GradingOutput, GradingFault> {
        let mut asked = ActorCommand::new(command.argv.clone());
        asked.cwd = command.workdir.as_ref().map(PathBuf::from);
        asked.env = command.env.clone().into_iter().collect();
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

/// Grades a patch of an instance in a new actor of `backend`.
///
/// `spec` is what the instance starts from, with the repository at its base in the instance's
/// folder, or in `/base`, from which it is then copied. `nonce` has to be new for each grading.
///
/// # Errors
///
/// Fails where the actor cannot be started or prepared; however the grading ends is in the verdict.
pub fn grade_instance(
    backend: &dyn ActorBackend,
    spec: &ActorSpec,
    instance: &SwebenchInstance,
    patch: &str,
    nonce: &str,
    bonus: SwebenchBonus,
) -> Result<PatchGrade, ActorError> {
    let mut spec = spec.clone();
    spec.writable.push(PathBuf::from(instance.workdir()));
    let trust = GIT_TRUST.map(|(name, value)| (name.to_owned(), value.to_owned()));
    spec.env.extend(trust);
    let actor = backend.create(&spec)?;
    let mut prepare = ActorCommand::new(["/bin/sh", "-c", PREPARE, "sh", instance.workdir()]);
    prepare.timeout = COPY_TIMEOUT;
    let ready = actor.exec(&prepare)?;
    if !ready.is_success() {
        return Err(ActorError::Backend {
            activity: format!("preparing `{}`", instance.instance_id),
            message: ready.stderr.text(),
        });
    }
    let tests = instance.test_paths();
    let job = PatchJob {
        patch,
        workdir: instance.workdir(),
        tests: &tests,
        test_patch: &instance.test_patch,
        plan: &instance.eval_plan(nonce),
        parser: instance.log_parser,
        expected: &instance.expected,
        eval_type: instance.eval_type,
        timeout: TEST_TIMEOUT,
        bonus,
        reference_size: instance.reference_size(),
        reference_seconds: None,
    };
    let grade = grade_patch(&ActorSandbox::new(actor.as_ref()), &job);
    actor.destroy()?;
    Ok(grade)
}
