//! Grades by unit tests over two instances.
//!
//! The submission runs in one fresh instance, the tests in another one, where the submission's
//! names are stubs. A call crosses as plain data, so nothing the submission does to its own
//! interpreter — patched builtins, objects that equal everything, frames, exits — reaches a
//! comparison. See `graders/README.md` and `wasm-runtimes/cpython/CODEC.md`.
//!
//! The host reads two replies, both strictly: the candidate's to `load`, which can only make the
//! submission invalid, and the grader's verdict. Standard output decides nothing.
//!
//! **Who is at fault.** Once a submission was loaded, everything that goes wrong counts against
//! it, the grader's instance running out of fuel or memory or trapping included: those are reached
//! through the data it returns. An infrastructure error is what says nothing about a submission:
//! the sandbox cannot be set up, the task's own setup does not run without any submission, or the
//! deadline passed before the fuel was used, which depends on the machine's load.
//!
//! Callables cannot be passed to a submission: that would let it run code in the grader's
//! instance. Such a test fails with a message that says so.

use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use super::Grader;
use super::codec::Value;
use super::verdict::{GradeRequest, GradeUsage, TestResult, TestStatus, Verdict, test_name};
use crate::sandbox::{
    Dialogue, Exit, Limits, MAX_MESSAGE, Message, Sandbox, SandboxError, Served, with_causes,
};

/// The most of a candidate's reply to `load` that is read: an error message has 500 characters.
const MAX_LOAD_REPLY: usize = 16 << 10;
/// The most of a grader's reply that is read, for each test and once more: a message has 300
/// characters.
const MAX_TEST_REPLY: usize = 2 << 10;

const NO_PROPER_REPLY: &str = "the submission gave no proper reply";

/// How `graders/unit_tests.py` reports a submission that no longer answers.
pub(super) const SUBMISSION_ENDED: [&str; 2] = [
    "the submission's instance has ended",
    "the submission ran out of time or memory",
];

/// What a grading may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradeLimits {
    /// For the submission, from its loading to the last test; default 50 billion fuel, 120 s,
    /// 256 MiB. That is enough for the slowest reference solution of MBPP, which takes 35 billion.
    pub candidate: Limits,
    /// For the tests; default 200 billion fuel, 240 s, 512 MiB. Its deadline includes the
    /// submission's time.
    pub grader: Limits,
}

impl Default for GradeLimits {
    fn default() -> Self {
        // Nobody reads what either prints.
        let silent = Limits {
            stdout: ByteSize(0),
            stderr: ByteSize(0),
            ..Limits::default()
        };
        Self {
            candidate: Limits {
                fuel: 50_000_000_000,
                deadline: Duration::from_secs(120),
                ..silent.clone()
            },
            grader: Limits {
                memory: ByteSize::mib(512),
                fuel: 200_000_000_000,
                deadline: Duration::from_secs(240),
                ..silent
            },
        }
    }
}

impl GradeLimits {
    /// Gives a submission `candidate`, and its tests as much as lets the submission reach its own
    /// limits first.
    #[must_use]
    pub fn for_candidate(candidate: &Limits) -> Self {
        let defaults = Self::default();
        let silent = Limits {
            stdout: ByteSize(0),
            stderr: ByteSize(0),
            ..candidate.clone()
        };
        Self {
            grader: Limits {
                memory: silent.memory.max(defaults.grader.memory),
                fuel: silent.fuel.saturating_mul(4).min(i64::MAX as u64),
                deadline: silent.deadline * 2,
                ..silent.clone()
            },
            candidate: silent,
        }
    }
}

/// Grades submissions by unit tests.
///
/// Cheap to clone; may be used by many threads at once. A submission with three asserts takes
/// about 1 ms.
#[derive(Debug, Clone)]
pub struct UnitTestGrader {
    sandbox: Arc<dyn Sandbox>,
    limits: GradeLimits,
}

/// What a grading came to before its cost is known.
enum Judgement {
    Results(Vec<TestResult>),
    AllFailed(String),
    Invalid(String),
}

impl UnitTestGrader {
    /// Makes a grader that runs its guests in `sandbox` under `limits`.
    #[must_use]
    pub fn new(sandbox: Arc<dyn Sandbox>, limits: GradeLimits) -> Self {
        Self { sandbox, limits }
    }

    fn try_grade(
        &self,
        request: &GradeRequest,
        usage: &mut GradeUsage,
    ) -> Result<Judgement, GraderError> {
        check(request)?;
        let load = load_message(&request.code);
        if load.len() > MAX_MESSAGE {
            let message = format!("the submission takes {} bytes", request.code.len());
            return Ok(Judgement::Invalid(message));
        }
        let outcome = self.sandbox.converse(&Dialogue {
            callee: Message {
                limits: self.limits.candidate.clone(),
                bytes: load,
            },
            proceed_on: loaded_reply(),
            caller: Message {
                limits: self.limits.grader.clone(),
                bytes: grade_message(request)?,
            },
        })?;
        usage.candidate = outcome.callee_usage;
        if let Some(exit @ Exit::DeadlineExceeded { .. }) = outcome.callee_ended {
            let side = "submission";
            return Err(GraderError::Deadline { side, exit });
        }
        let Some((served, grader_usage)) = outcome.caller else {
            return Ok(Judgement::Invalid(why_not_loaded(&outcome.callee)));
        };
        usage.grader = grader_usage;
        let reply = match served {
            Served::Reply(reply) => reply,
            Served::Ended(exit @ Exit::DeadlineExceeded { .. }) => {
                let side = "grader";
                return Err(GraderError::Deadline { side, exit });
            }
            Served::Ended(exit) => {
                return Ok(Judgement::AllFailed(format!(
                    "the grader's instance {exit}"
                )));
            }
        };
        let mut judgement = match read_verdict(&reply, request.tests.len()) {
            Some(GraderReply::Results(results)) => Judgement::Results(results),
            Some(GraderReply::Invalid(message)) => Judgement::Invalid(message),
            // It was found before the submission was asked anything.
            Some(GraderReply::Broken(reason)) => return Err(GraderError::broken(reason)),
            None => Judgement::AllFailed("the grader gave no verdict".to_owned()),
        };
        if let Some(exit) = &outcome.callee_ended {
            explain(&mut judgement, exit);
        }
        Ok(judgement)
    }
}

impl Grader for UnitTestGrader {
    fn grade(&self, request: &GradeRequest) -> Verdict {
        let count = request.tests.len();
        let mut usage = GradeUsage::default();
        let verdict = match self.try_grade(request, &mut usage) {
            Ok(Judgement::Results(tests)) => Verdict::judged(tests, usage),
            Ok(Judgement::AllFailed(message)) => Verdict::all_failed(count, &message, usage),
            Ok(Judgement::Invalid(message)) => Verdict::invalid(count, &message, usage),
            Err(error) => error.verdict(count, usage),
        };
        tracing::debug!(status = ?verdict.status, usage = ?verdict.usage, "submission graded");
        verdict
    }
}

/// Why a grading is not the submission's fault.
#[derive(Debug, thiserror::Error)]
pub(super) enum GraderError {
    #[error("the task has no tests")]
    NoTests,
    #[error("the task's options for grader `{grader}` cannot be used")]
    Options {
        grader: &'static str,
        #[source]
        source: serde_json::Error,
    },
    #[error(
        "the tests import `{name}`, which the Python runtime does not have; add it, for example as \
         a wheel with `--wheel` or `sandbox.wheels`, or use a runtime that has it"
    )]
    MissingModule { name: String },
    #[error("entry point `{name}` is not a Python identifier")]
    EntryPoint { name: String },
    #[error("the task's tests take {size} bytes, more than {MAX_MESSAGE}")]
    TestsTooLarge { size: usize },
    #[error(
        "the {side}'s instance {exit}, before its fuel was used: the machine is too busy, or the \
         deadline too short for the fuel"
    )]
    Deadline { side: &'static str, exit: Exit },
    #[error("the task's setup or tests are broken: {reason}")]
    BrokenTask { reason: String },
    #[error("the sandbox failed")]
    Sandbox(#[from] SandboxError),
}

impl GraderError {
    /// Says what is broken; of a module that is missing, by its name.
    fn broken(reason: String) -> Self {
        let missing = reason
            .strip_prefix("ModuleNotFoundError: No module named '")
            .and_then(|rest| rest.strip_suffix('\''));
        match missing {
            Some(name) => Self::MissingModule {
                name: name.to_owned(),
            },
            None => Self::BrokenTask { reason },
        }
    }

    /// Returns the verdict that there is none, and logs what is trouble of ours. What is wrong
    /// with a task is so for each of its submissions, and each verdict says it.
    pub(super) fn verdict(&self, count: usize, usage: GradeUsage) -> Verdict {
        let message = with_causes(self);
        match self {
            Self::Sandbox(_) | Self::Deadline { .. } => tracing::error!(message, "grading failed"),
            _ => tracing::debug!(message, "the task cannot be graded"),
        }
        Verdict::infra_error(count, &message, usage)
    }
}

fn check(request: &GradeRequest) -> Result<(), GraderError> {
    if request.tests.is_empty() {
        return Err(GraderError::NoTests);
    }
    check_entry_points(&request.entry_points)
}

pub(super) fn check_entry_points(names: &[String]) -> Result<(), GraderError> {
    let is_identifier = |name: &str| {
        name.starts_with(|first: char| first == '_' || first.is_alphabetic())
            && name
                .chars()
                .all(|letter| letter == '_' || letter.is_alphanumeric())
    };
    match names.iter().find(|name| !is_identifier(name)) {
        Some(name) => Err(GraderError::EntryPoint { name: name.clone() }),
        None => Ok(()),
    }
}

pub(super) fn load_message(code: &str) -> Vec<u8> {
    Value::Tuple(vec![Value::text("load"), Value::text(code)]).encode()
}

/// The reply to a submission that loads: no exception, no value, no changed argument.
pub(super) fn loaded_reply() -> Vec<u8> {
    Value::Tuple(vec![Value::Int(0), Value::None, Value::None]).encode()
}

/// Says why a submission does not load, from its instance's reply.
pub(super) fn why_not_loaded(served: &Served) -> String {
    let reply = match served {
        Served::Reply(reply) => reply,
        Served::Ended(exit) => return format!("while loading, the submission {exit}"),
    };
    match Value::decode(reply, MAX_LOAD_REPLY) {
        Ok(Value::Tuple(members)) => match &members[..] {
            [
                Value::Int(1),
                Value::Str(_),
                Value::Str(kind),
                Value::Str(message),
                _,
            ] => format!("{kind}: {message}"),
            _ => NO_PROPER_REPLY.to_owned(),
        },
        _ => NO_PROPER_REPLY.to_owned(),
    }
}

fn grade_message(request: &GradeRequest) -> Result<Vec<u8>, GraderError> {
    let message = Value::Tuple(vec![
        Value::text("grade"),
        Value::text(request.setup.join("\n")),
        Value::texts(&request.tests),
        Value::texts(&request.entry_points),
    ])
    .encode();
    if message.len() > MAX_MESSAGE {
        return Err(GraderError::TestsTooLarge {
            size: message.len(),
        });
    }
    Ok(message)
}

/// What the grader's instance says.
enum GraderReply {
    Results(Vec<TestResult>),
    /// The submission lacks an entry point.
    Invalid(String),
    /// The task cannot be graded, whatever is submitted.
    Broken(String),
}

/// Reads the grader's reply. `None` is a malformed one.
fn read_verdict(reply: &[u8], count: usize) -> Option<GraderReply> {
    match Value::decode(reply, MAX_TEST_REPLY * (count + 1)).ok()? {
        Value::List(entries) if entries.len() == count => entries
            .into_iter()
            .enumerate()
            .map(read_result)
            .collect::<Option<_>>()
            .map(GraderReply::Results),
        Value::Tuple(members) => match &members[..] {
            [Value::Str(status), Value::Str(message)] => match status.as_str() {
                "invalid" => Some(GraderReply::Invalid(message.clone())),
                "broken" => Some(GraderReply::Broken(message.clone())),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    }
}

fn read_result((index, entry): (usize, Value)) -> Option<TestResult> {
    let Value::Tuple(members) = entry else {
        return None;
    };
    let [Value::Str(status), Value::Str(message)] = &members[..] else {
        return None;
    };
    let status = match status.as_str() {
        "passed" => TestStatus::Passed,
        "failed" => TestStatus::Failed,
        _ => return None,
    };
    Some(TestResult::new(test_name(index), status, message))
}

/// Says how the submission's instance ended, where the guest only knows that it did.
fn explain(judgement: &mut Judgement, exit: &Exit) {
    let messages: Vec<&mut String> = match judgement {
        Judgement::Results(tests) => tests.iter_mut().map(|test| &mut test.message).collect(),
        Judgement::Invalid(message) => vec![message],
        Judgement::AllFailed(_) => Vec::new(),
    };
    for message in messages {
        if SUBMISSION_ENDED
            .iter()
            .any(|ended| message.ends_with(ended))
        {
            *message = format!("the submission {exit}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(status: &str) -> Value {
        Value::Tuple(vec![Value::text(status), Value::text("message")])
    }

    #[test]
    fn a_verdict_must_cover_every_test() {
        let reply = Value::List(vec![pair("passed"), pair("failed")]).encode();
        let Some(GraderReply::Results(results)) = read_verdict(&reply, 2) else {
            panic!("two results for two tests are a verdict");
        };
        assert_eq!(results[0].status, TestStatus::Passed);
        assert_eq!(results[1].status, TestStatus::Failed);
        assert!(read_verdict(&reply, 1).is_none());
        assert!(read_verdict(&reply, 3).is_none());
    }

    #[test]
    fn an_unknown_status_is_no_verdict() {
        assert!(read_verdict(&Value::List(vec![pair("skipped")]).encode(), 1).is_none());
        assert!(read_verdict(&pair("passed").encode(), 1).is_none());
        assert!(read_verdict(b"garbage", 1).is_none());
    }

    #[test]
    fn requests_that_cannot_be_graded_are_our_fault() {
        let request = GradeRequest {
            entry_points: vec!["f".to_owned()],
            ..Default::default()
        };
        assert!(matches!(check(&request), Err(GraderError::NoTests)));
        let request = GradeRequest {
            tests: vec!["pass".to_owned()],
            entry_points: vec!["f, g".to_owned()],
            ..Default::default()
        };
        assert!(matches!(
            check(&request),
            Err(GraderError::EntryPoint { .. })
        ));
    }
}
