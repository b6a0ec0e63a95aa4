//! A grading from end to end: the patch goes in, the tests are restored and run, the log is judged.

use std::time::Duration;

use super::apply::{PATCH_PATH, apply_attempts, reverse_check};
use super::diff::{TestPaths, split_patch};
use super::infra::classify;
use super::log::EvalLog;
use super::parser::LogParser;
use super::report::{EvalType, Expected};
use super::score::{
    EvalOutcome, PatchOutcome, SwebenchBonus, SwebenchFacts, failed, swebench_verdict,
};
use super::script::{EvalPlan, TEST_PATCH_PATH};
use crate::grader::{
    GradingCommand, GradingEnd, GradingFault, GradingOutput, GradingSandbox, Verdict,
};

/// How long one step before the tests may take.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);

/// How long restoring the tests and installing may take; scikit-learn builds for minutes.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(1800);

/// The most characters of a program's complaint that a message quotes.
const MAX_QUOTED: usize = 400;

/// What is graded, and by what.
#[derive(Debug, Clone)]
pub struct PatchJob<'a> {
    /// The policy's patch.
    pub patch: &'a str,
    /// The folder of the repository, at its base.
    pub workdir: &'a str,
    /// Which files belong to the tests.
    pub tests: &'a TestPaths,
    /// The task's patch of the tests.
    pub test_patch: &'a str,
    /// The evaluation.
    pub plan: &'a EvalPlan,
    /// The reader of the runner's output.
    pub parser: LogParser,
    /// The tests that count.
    pub expected: &'a Expected,
    /// How they are judged.
    pub eval_type: EvalType,
    /// How long the tests may take; 1800 s is usual.
    pub timeout: Duration,
    /// Rewards on top.
    pub bonus: SwebenchBonus,
    /// Lines that the reference adds or removes.
    pub reference_size: usize,
    /// Seconds that the tests take with the reference, where that was measured.
    pub reference_seconds: Option<f64>,
}

/// A verdict, and what it rests on.
#[derive(Debug, Clone, PartialEq)]
pub struct PatchGrade {
    /// The verdict.
    pub verdict: Verdict,
    /// The log of the tests; empty where they were not run.
    pub log: String,
    /// Files whose changes were left out.
    pub dropped: Vec<String>,
    /// How long the tests took, in seconds.
    pub seconds: f64,
    /// What happened, where the patch may have brought it about and a broken environment as well; there is no
    /// reward then. Where the instance's reference passes in the same environment, it was the patch:
    /// [`Self::held_against_the_patch`].
    pub doubt: Option<String>,
    /// Whether a step ran out of its time, as it also may on a machine that is busy with something else.
    pub timed_out: bool,
}

impl PatchGrade {
    /// Returns the grade once it is known that the environment is sound: what was in doubt has failed.
    #[must_use]
    pub fn held_against_the_patch(self, expected: &Expected) -> Self {
        let Some(doubt) = self.doubt else {
            return self;
        };
        let message = format!("{doubt}; with the reference it is not so");
        Self {
            verdict: failed(expected, &message),
            doubt: None,
            ..self
        }
    }
}

/// Why an evaluation did not get to its end.
enum Trouble {
    /// The sandbox failed.
    Fault(GradingFault),
    /// The patch may have brought it about.
    Broken(String),
    /// A step before the tests ran out of its time.
    Late(String),
}

impl From<GradingFault> for Trouble {
    fn from(fault: GradingFault) -> Self {
        Self::Fault(fault)
    }
}

impl From<Trouble> for EvalOutcome {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Fault(fault) => Self::NotRun(told(&fault)),
            Trouble::Broken(why) | Trouble::Late(why) => Self::Broken(why),
        }
    }
}

/// Grades a patch in a fresh sandbox that holds the repository at its base.
#[must_use]
pub fn grade_patch(sandbox: &dyn GradingSandbox, job: &PatchJob<'_>) -> PatchGrade {
    let mut facts = SwebenchFacts {
        reference_size: job.reference_size,
        reference_seconds: job.reference_seconds,
        ..SwebenchFacts::default()
    };
    let (mut log, mut dropped) = (String::new(), Vec::new());
    let applied = match split_patch(job.patch, job.tests) {
        Err(fault) => Ok(PatchOutcome::Refused(fault.to_string())),
        Ok(split) => {
            facts.patch_size = split.size;
            dropped = split.dropped;
            apply(sandbox, job, &split.kept)
        }
    };
    let (patch, evaluated) = match applied {
        Ok(PatchOutcome::Applied) => (PatchOutcome::Applied, evaluate(sandbox, job)),
        Ok(other) => {
            let nothing = (EvalOutcome::NotRun(String::new()), String::new(), 0.0);
            (other, Ok(nothing))
        }
        // Where nothing is known of the patch, nothing is held against it.
        Err(trouble) => (PatchOutcome::Applied, Err(trouble)),
    };
    let mut timed_out = match &evaluated {
        Err(Trouble::Late(_)) => true,
        Err(Trouble::Fault(fault)) => fault.timed_out,
        Err(Trouble::Broken(_)) | Ok(_) => false,
    };
    let outcome = match evaluated {
        Ok((outcome, text, seconds)) => {
            log = text;
            facts.test_seconds = seconds;
            timed_out |= matches!(outcome, EvalOutcome::TimedOut { .. });
            outcome
        }
        Err(trouble) => trouble.into(),
    };
    let doubt = (patch == PatchOutcome::Applied)
        .then(|| outcome.doubt())
        .flatten();
    let verdict = swebench_verdict(
        &patch,
        &outcome,
        job.expected,
        job.eval_type,
        job.bonus,
        facts,
    );
    PatchGrade {
        verdict,
        log,
        dropped,
        seconds: facts.test_seconds,
        doubt,
        timed_out,
    }
}

/// Returns a fault with what is behind it.
fn told(fault: &GradingFault) -> String {
    format!("{fault}: {}", fault.source)
}

fn quoted(output: &GradingOutput) -> String {
    let said = format!("{}\n{}", output.stderr.trim(), output.stdout.trim());
    let end: Vec<char> = said.trim().chars().rev().take(MAX_QUOTED).collect();
    end.into_iter().rev().collect()
}

fn apply(
    sandbox: &dyn GradingSandbox,
    job: &PatchJob<'_>,
    kept: &str,
) -> Result<PatchOutcome, Trouble> {
    if kept.is_empty() {
        return Ok(PatchOutcome::Empty);
    }
    sandbox.put(PATCH_PATH, kept.as_bytes())?;
    let exec = |argv: Vec<String>| {
        let output = sandbox.exec(&GradingCommand::new(argv, STEP_TIMEOUT).within(job.workdir))?;
        match output.end {
            GradingEnd::Exited(_) => Ok(output),
            GradingEnd::TimedOut => Err(Trouble::Late(told(&not_run(&output)))),
            GradingEnd::Killed(_) => Err(Trouble::Broken(told(&not_run(&output)))),
        }
    };
    let head = ["git", "rev-parse", "--quiet", "--verify", "HEAD"].map(str::to_owned);
    let repository = exec(head.to_vec())?;
    if repository.end != GradingEnd::Exited(0) {
        return Err(Trouble::Fault(not_run(&repository)));
    }
    let mut complaint = String::new();
    for attempt in apply_attempts() {
        for command in attempt.clean {
            exec(command)?;
        }
        let output = exec(attempt.apply)?;
        if output.end == GradingEnd::Exited(0) {
            return Ok(PatchOutcome::Applied);
        }
        if complaint.is_empty() {
            complaint = quoted(&output); // the strictest way says best what is wrong
        }
    }
    if exec(reverse_check())?.end == GradingEnd::Exited(0) {
        return Ok(PatchOutcome::Applied);
    }
    Ok(PatchOutcome::Refused(format!(
        "the patch does not apply: {complaint}"
    )))
}

fn not_run(output: &GradingOutput) -> GradingFault {
    GradingFault {
        what: "applying a patch",
        source: format!("{:?}: {}", output.end, quoted(output)).into(),
        is_guests_doing: false,
        timed_out: output.end == GradingEnd::TimedOut,
    }
}

fn evaluate(
    sandbox: &dyn GradingSandbox,
    job: &PatchJob<'_>,
) -> Result<(EvalOutcome, String, f64), Trouble> {
    if let Some(script) = &job.plan.prepare {
        sandbox.put(TEST_PATCH_PATH, job.test_patch.as_bytes())?;
        let output = sandbox.exec(&GradingCommand::bash(script, PREPARE_TIMEOUT))?;
        if output.end != GradingEnd::Exited(0) {
            let why = format!("the tests could not be restored: {}", quoted(&output));
            return Err(match output.end {
                GradingEnd::TimedOut => Trouble::Late(why),
                _ => Trouble::Broken(why),
            });
        }
    }
    let output = sandbox.exec(&GradingCommand::bash(&job.plan.test, job.timeout))?;
    let log = job.plan.log(&output.stdout);
    let outcome = match output.end {
        GradingEnd::Exited(code) => EvalOutcome::Run {
            log: EvalLog::read(&log, job.plan.markers(), job.parser, Some(code)),
            sign: classify(&log),
        },
        GradingEnd::TimedOut => EvalOutcome::TimedOut {
            limit: job.timeout.as_secs(),
        },
        GradingEnd::Killed(why) => EvalOutcome::Broken(format!("the tests were ended: {why}")),
    };
    Ok((outcome, log, output.elapsed.as_secs_f64()))
}
