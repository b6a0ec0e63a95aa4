//! Grading a patch of SWE-bench, each in an actor of its own.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::control::Control;
use super::precedence::Precedence;
use super::{ActorSandbox, Controls};
use crate::actor::{Actor, ActorBackend, ActorCommand, ActorError, ActorSpec};
use crate::grader::VerdictStatus;
use crate::grader::swebench::{PatchGrade, PatchJob, SwebenchBonus, grade_patch};
use crate::task::swebench::SwebenchInstance;

/// How long the tests of an instance may take unless said otherwise, as in the official harness.
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

/// Starts an actor with the repository of an instance at its base.
///
/// `spec` is what the instance starts from, with the repository in the instance's folder, or in `/base`, from
/// which it is then copied.
pub(super) fn start_instance(
    backend: &dyn ActorBackend,
    spec: &ActorSpec,
    instance: &SwebenchInstance,
) -> Result<Box<dyn Actor>, ActorError> {
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
            message: format!("{:?}: {}", ready.ending, ready.stderr.text().trim()),
        });
    }
    Ok(actor)
}

/// Grades patches of an instance, each in a new actor.
#[derive(Debug, Clone, Copy)]
pub struct InstanceGrader<'a> {
    /// Where actors come from.
    pub backend: &'a dyn ActorBackend,
    /// What the instance starts from, with the repository at its base in the instance's folder, or in `/base`,
    /// from which it is then copied.
    pub spec: &'a ActorSpec,
    /// The instance.
    pub instance: &'a SwebenchInstance,
    /// Rewards on top.
    pub bonus: SwebenchBonus,
    /// How long the tests may take.
    pub timeout: Duration,
    /// What is known of the instances' references.
    pub controls: &'a Controls,
}

impl InstanceGrader<'_> {
    /// Grades a patch. Where its tests break down, or a bonus compares them with the reference's, the reference
    /// is graded, too, once for each instance: a patch fails whose tests break down where the reference passes.
    /// Tests that run out of time are run once more, and the reference's after them.
    ///
    /// # Errors
    ///
    /// Fails where an actor cannot be started or prepared; however the grading ends is in the verdict.
    pub fn grade(&self, patch: &str) -> Result<PatchGrade, ActorError> {
        let is_compared = self.bonus.faster_tests != 0.0;
        let seconds = match is_compared {
            true => {
                let control = self.control(None)?;
                control.is_sound.then_some(control.seconds)
            }
            false => None,
        };
        let began = Instant::now();
        let mut grade = self.grade_alone(patch, seconds)?;
        let mut late = None;
        if grade.timed_out {
            // What others do to this machine makes tests late, too: only who is late twice, while the reference is
            // in time, is so by itself.
            late = Some(began);
            grade = self.grade_alone(patch, seconds)?;
        }
        if grade.doubt.is_some() && self.control(late)?.is_sound {
            return Ok(grade.held_against_the_patch(&self.instance.expected));
        }
        Ok(grade)
    }

    /// Returns whether the reference passes here, and passed since `late`.
    fn control(&self, late: Option<Instant>) -> Result<Control, ActorError> {
        self.controls.of(&self.instance.instance_id, late, || {
            let grade = self.grade_alone(&self.instance.reference(), None)?;
            Ok(Control {
                is_sound: grade.verdict.status == VerdictStatus::Passed,
                timed_out: grade.timed_out,
                seconds: grade.seconds,
            })
        })
    }

    fn grade_alone(
        &self,
        patch: &str,
        reference_seconds: Option<f64>,
    ) -> Result<PatchGrade, ActorError> {
        let instance = self.instance;
        let actor = start_instance(self.backend, self.spec, instance)?;
        // New for each grading, and unknown to every program in it.
        let nonce = format!("{:032x}", rand::random::<u128>());
        let job = PatchJob {
            patch,
            workdir: instance.workdir(),
            tests: &instance.test_paths(),
            test_patch: &instance.test_patch,
            plan: &instance.eval_plan(&nonce),
            parser: instance.log_parser,
            expected: &instance.expected,
            eval_type: instance.eval_type,
            timeout: self.timeout,
            bonus: self.bonus,
            reference_size: instance.reference_size(),
            reference_seconds,
        };
        let grade = {
            let _first = Precedence::of(&*actor);
            grade_patch(&ActorSandbox::new(&*actor), &job)
        };
        actor.destroy()?;
        Ok(grade)
    }
}
