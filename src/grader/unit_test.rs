//! Grades by unit tests over two instances.
//!
//! The submission runs in one fresh instance, the tests in another one, where the submission's
//! names are stubs. A call crosses as plain data, so nothing the submission does to its own
//! interpreter — patched builtins, objects that equal everything, frames, exits — reaches a
//! comparison. See `graders/README.md` and `wasm-runtimes/cpython/CODEC.md`.
//!
//! Each test has a copy of the submission as it was loaded, with fuel of its own, so no test sees
//! what another one did. Functions of the tests that are passed to the submission stay where they
//! are: a call of one enters the tests' instance while it waits.
//!
//! The host reads two replies, both strictly: the candidate's to `load`, which can only make the
//! submission invalid, and the grader's verdict. Standard output decides nothing.
//!
//! **Who is at fault.** Once a submission was loaded, everything that goes wrong counts against
//! it, the grader's instance running out of fuel or memory or trapping included: those are reached
//! through the data it returns. An infrastructure error is what says nothing about a submission:
//! the sandbox cannot be set up, the task's own setup does not run without any submission, or the
//! deadline passed before the fuel was used, which depends on the machine's load. Lateness excuses
//! nothing that was decided without it: a test that failed by itself, or a limit that was met, takes
//! the reward all the same.
//!
//! **When the tests' instance ends.** Only the test that was running has failed by that. It runs
//! again at the head of a new pair of instances, so that what earlier tests left there is not held
//! against it; the tests behind it follow. After [`MAX_ENDS`] such tests the rest has failed too.

use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use super::Grader;
use super::codec::Value;
use super::lateness::{decided, excuse_late, is_late, late};
use super::verdict::{
    DEFAULT_GRADER, GradeRequest, GradeUsage, TestResult, TestStatus, Verdict, test_name,
};
use crate::causes::with_causes;
use crate::sandbox::{
    Dialogue, DialogueOutcome, Exit, Limits, MAX_MESSAGE, Message, Sandbox, SandboxError, Served,
    Usage,
};

/// The most of a candidate's reply to `load` that is read: an error message has 500 characters.
const MAX_LOAD_REPLY: usize = 16 << 10;
/// The most of a grader's reply that is read, for each test and once more: a message has some 330
/// characters, a value 200.
const MAX_TEST_REPLY: usize = 4 << 10;
/// The tests that may end the tests' instance before the rest is given up.
const MAX_ENDS: usize = 3;
/// What a submission may print for its tests to read, at a time.
pub(super) const PRINTED: ByteSize = ByteSize::kib(64);
/// No call of the sandbox takes longer.
const MAX_DEADLINE: Duration = Duration::from_hours(24);

const NO_PROPER_REPLY: &str = "the submission gave no proper reply";

/// How the guests' graders report a submission that no longer answers. No exception is reported so.
const SUBMISSION_ENDED: [&str; 2] = [
    "the submission's instance has ended",
    "the submission ran out of time or memory",
];

/// Whether a message says that the submission no longer answers.
pub(super) fn says_ended(message: &str) -> bool {
    SUBMISSION_ENDED.contains(&message)
}

/// What a grading may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradeLimits {
    /// For loading the submission; default 50 billion fuel, 120 s, 256 MiB.
    pub loading: Limits,
    /// For the submission in one test, what loading took of memory included; default 50 billion
    /// fuel, 120 s, 256 MiB. That is enough for the slowest reference solution of MBPP, which takes
    /// 35 billion.
    pub candidate: Limits,
    /// For one test; default 200 billion fuel, 480 s, 512 MiB. What the submission takes of either
    /// is its own.
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
        let candidate = Limits {
            fuel: 50_000_000_000,
            deadline: Duration::from_secs(120),
            ..silent
        };
        Self {
            grader: Limits {
                memory: ByteSize::mib(512),
                fuel: 200_000_000_000,
                deadline: Duration::from_secs(480),
                ..candidate.clone()
            },
            loading: candidate.clone(),
            candidate,
        }
    }
}

impl GradeLimits {
    /// Gives a submission `candidate`, for loading and for each test, and the tests as much as lets
    /// the submission reach its own limits first.
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
                deadline: silent.deadline.saturating_mul(4).min(MAX_DEADLINE),
                ..silent.clone()
            },
            loading: silent.clone(),
            candidate: silent,
        }
    }
}

/// A task's settings of this grader.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct UnitTestOptions {
    /// Whether the submission works on copies of a call's arguments, so that what it changes in
    /// place is not seen by the test.
    read_only_arguments: bool,
    /// Whether `==` and `!=` in the tests' asserts tell numbers of different types apart: `True`,
    /// `1` and `1.0`, in containers as well.
    strict_types: bool,
    /// Whether tests can read what the submission prints, by `printed()`.
    printed_output: bool,
}

/// Grades submissions by unit tests.
///
/// Cheap to clone; may be used by many threads at once. A submission with three asserts takes
/// about 0.4 ms.
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
        let options: UnitTestOptions =
            (request.read_options()).map_err(|source| GraderError::Options {
                grader: DEFAULT_GRADER,
                source,
            })?;
        let load = load_message(&request.code);
        if load.len() > MAX_MESSAGE {
            let message = format!("the submission takes {} bytes", request.code.len());
            return Ok(Judgement::Invalid(message));
        }
        let count = request.tests.len();
        let mut results = Vec::with_capacity(count);
        let mut ends = 0;
        while results.len() < count {
            let first = results.len();
            let outcome = self
                .sandbox
                .converse(&self.dialogue(request, options, &load, first)?)?;
            add_usage(usage, &outcome);
            let Some((served, _)) = &outcome.caller else {
                return match late(&outcome.callee) {
                    Some(exit) => Err(GraderError::late("submission", exit)),
                    None => Ok(Judgement::Invalid(why_not_loaded(&outcome.callee))),
                };
            };
            // What follows upon the tests' own rounds explains them, and decides nothing.
            let rounds = &outcome.rounds[..outcome.rounds.len().min(count - first)];
            let why = match served {
                Served::Reply(reply) => match read_verdict(reply, first, count - first) {
                    Some(GraderReply::Results(mut verdict)) => {
                        excuse_late(&mut verdict, rounds);
                        for (result, round) in verdict.iter_mut().zip(rounds) {
                            explain(result, round.ended.as_ref());
                        }
                        results.append(&mut verdict);
                        continue;
                    }
                    Some(GraderReply::Invalid(message)) => {
                        let last = rounds.last();
                        let ended = last.and_then(|round| round.ended.as_ref());
                        return match ended {
                            Some(exit) if last.is_some_and(is_late) => {
                                Err(GraderError::late("submission", exit))
                            }
                            _ => Ok(Judgement::Invalid(explained(&message, ended))),
                        };
                    }
                    // It was found before the submission was asked anything.
                    Some(GraderReply::Broken(reason)) => {
                        return Err(GraderError::broken(reason));
                    }
                    None => "the grader gave no verdict".to_owned(),
                },
                Served::Ended(exit) => format!("the grader's instance {exit}"),
            };
            let late_grader = late(served);
            let finished = match (outcome.rounds.split_last(), late_grader) {
                (None, Some(exit)) => return Err(GraderError::late("grader", exit)),
                // No test was begun: the submission had no part in it.
                (None, None) => return Err(GraderError::broken(why)),
                (Some((_, before)), _) => before.get(..count - first).unwrap_or(before),
            };
            for round in finished {
                let note = Value::decode(&round.note, MAX_TEST_REPLY).ok();
                let Some(mut result) = note.and_then(|note| read_result(results.len(), note))
                else {
                    return Ok(Judgement::AllFailed(why));
                };
                excuse_late(
                    std::slice::from_mut(&mut result),
                    std::slice::from_ref(round),
                );
                explain(&mut result, round.ended.as_ref());
                results.push(result);
            }
            if late_grader.is_some() {
                let rest = results.len()..count;
                results.extend(rest.map(|index| {
                    TestResult::new(test_name(index), TestStatus::NotRun, why.as_str())
                }));
                continue;
            }
            // All tests were over if it ended while it explained one.
            if finished.is_empty() {
                let limit = match served {
                    Served::Ended(exit) if exit.is_limit() => Some(why.clone()),
                    _ => None,
                };
                results.push(TestResult {
                    limit,
                    ..TestResult::new(test_name(first), TestStatus::Failed, why.as_str())
                });
                ends += 1;
            }
            if ends == MAX_ENDS {
                let message = format!("not begun: {MAX_ENDS} tests before have ended so: {why}");
                let rest = results.len()..count;
                results.extend(rest.map(|index| {
                    TestResult::new(test_name(index), TestStatus::Failed, message.as_str())
                }));
            }
        }
        decided(results).map(Judgement::Results)
    }

    /// Makes the dialogue about the tests from the one at `first` on.
    fn dialogue(
        &self,
        request: &GradeRequest,
        options: UnitTestOptions,
        load: &[u8],
        first: usize,
    ) -> Result<Dialogue, GraderError> {
        let tests = &request.tests[first..];
        let count = u32::try_from(tests.len()).unwrap_or(u32::MAX);
        let mut round = self.limits.candidate.clone();
        if options.printed_output {
            (round.stdout, round.stderr) = (PRINTED, PRINTED);
        }
        let mut grader = self.limits.grader.clone();
        grader.deadline = grader.deadline.saturating_mul(count).min(MAX_DEADLINE);
        Ok(Dialogue {
            callee: Message {
                limits: self.limits.loading.clone(),
                bytes: load.to_vec(),
            },
            proceed_on: loaded_reply(),
            round,
            // A test that failed runs once more, for what it compared.
            max_rounds: count.saturating_mul(2),
            caller: Message {
                limits: grader,
                bytes: grade_message(request, options, tests)?,
            },
        })
    }
}

/// Adds what a dialogue used.
pub(super) fn add_usage(usage: &mut GradeUsage, outcome: &DialogueOutcome) {
    let add = |sum: &mut Usage, more: &Usage| {
        sum.fuel = sum.fuel.saturating_add(more.fuel);
        sum.memory_bytes = sum.memory_bytes.max(more.memory_bytes);
        sum.wall += more.wall;
    };
    add(&mut usage.candidate, &outcome.callee_usage);
    for round in &outcome.rounds {
        add(&mut usage.candidate, &round.usage);
    }
    if let Some((_, more)) = &outcome.caller {
        add(&mut usage.grader, more);
    }
}

impl Grader for UnitTestGrader {
    fn grade(&self, request: &GradeRequest) -> Verdict {
        let count = request.tests.len();
        let mut usage = GradeUsage::default();
        let verdict = match self.try_grade(request, &mut usage) {
            Ok(Judgement::Results(mut tests)) => {
                check_lines(&mut tests, &request.code);
                Verdict::judged(tests, usage)
            }
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
        "{what}, before its fuel was used: the machine is too busy, or the deadline too short for \
         the fuel"
    )]
    Deadline { what: String },
    #[error("the task's setup or tests are broken: {reason}")]
    BrokenTask { reason: String },
    #[error("the sandbox failed")]
    Sandbox(#[from] SandboxError),
}

impl GraderError {
    /// Says whose deadline passed.
    pub(super) fn late(side: &str, exit: &Exit) -> Self {
        Self::Deadline {
            what: format!("the {side}'s instance {exit}"),
        }
    }

    /// Says what is broken; of a module that is missing, by its name.
    pub(super) fn broken(reason: String) -> Self {
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
    let Ok(Value::Tuple(members)) = Value::decode(reply, MAX_LOAD_REPLY) else {
        return NO_PROPER_REPLY.to_owned();
    };
    match &members[..] {
        [Value::Int(1), Value::Str(kind), Value::Str(text), line] => {
            let place = match line {
                // A syntax error's text has it already.
                Value::Int(line) if !text.contains("(solution.py") => {
                    format!(" (solution.py, line {line})")
                }
                _ => String::new(),
            };
            let separator = if text.is_empty() { "" } else { ": " };
            format!("{kind}{separator}{text}{place}")
        }
        _ => NO_PROPER_REPLY.to_owned(),
    }
}

fn grade_message(
    request: &GradeRequest,
    options: UnitTestOptions,
    tests: &[String],
) -> Result<Vec<u8>, GraderError> {
    let options = [
        (options.read_only_arguments, "read_only_arguments"),
        (options.strict_types, "strict_types"),
        (options.printed_output, "printed_output"),
    ];
    let options = options.into_iter().filter(|(is_on, _)| *is_on);
    let message = Value::Tuple(vec![
        Value::text("grade"),
        Value::text(request.setup.join("\n")),
        Value::texts(tests),
        Value::texts(&request.entry_points),
        Value::List(options.map(|(_, name)| Value::text(name)).collect()),
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

/// Reads the grader's reply about `count` tests from the one at `first` on. `None` is a malformed
/// one.
fn read_verdict(reply: &[u8], first: usize, count: usize) -> Option<GraderReply> {
    match Value::decode(reply, MAX_TEST_REPLY * (count + 1)).ok()? {
        Value::List(entries) if entries.len() == count => entries
            .into_iter()
            .zip(first..)
            .map(|(entry, index)| read_result(index, entry))
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

fn read_result(index: usize, entry: Value) -> Option<TestResult> {
    let Value::List(members) = entry else {
        return None;
    };
    let [Value::Str(status), Value::Str(message), expected, got, line] = &members[..] else {
        return None;
    };
    let line = match line {
        Value::None => None,
        Value::Int(line) => u32::try_from(*line).ok(),
        _ => return None,
    };
    let result = read_outcome(test_name(index), status, message, [expected, got])?;
    Some(TestResult { line, ..result })
}

/// Takes out the lines that the submission does not have: an instance that it has taken over may say
/// anything.
pub(super) fn check_lines(results: &mut [TestResult], code: &str) {
    let last = code.lines().count();
    for result in results {
        result.line = (result.line).filter(|line| (1..=last).contains(&(*line as usize)));
    }
}

/// Reads what the guests' graders say of a test in the same words: how it went, and what was
/// compared.
pub(super) fn read_outcome(
    name: String,
    status: &str,
    message: &str,
    [expected, got]: [&Value; 2],
) -> Option<TestResult> {
    let status = match status {
        "passed" => TestStatus::Passed,
        "failed" => TestStatus::Failed,
        _ => return None,
    };
    let text = |value: &Value| match value {
        Value::None => Some(None),
        Value::Str(text) => Some(Some(text.clone())),
        _ => None,
    };
    Some(TestResult {
        expected: text(expected)?,
        got: text(got)?,
        ..TestResult::new(name, status, message)
    })
}

/// Says how the submission's instance ended, where the guest only knows that it did.
fn explain(result: &mut TestResult, ended: Option<&Exit>) {
    if result.status == TestStatus::Passed {
        return;
    }
    result.message = explained(&result.message, ended);
    result.limit = ended
        .filter(|exit| exit.is_limit())
        .map(|exit| format!("the submission {exit}"));
}

fn explained(message: &str, ended: Option<&Exit>) -> String {
    match ended {
        Some(exit) if says_ended(message) => format!("the submission {exit}"),
        _ => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(status: &str) -> Value {
        Value::Tuple(vec![Value::text(status), Value::text("message")])
    }

    fn result(status: &str) -> Value {
        let nothing = || Value::None;
        Value::List(vec![
            Value::text(status),
            Value::text("message"),
            Value::text("1"),
            nothing(),
            nothing(),
        ])
    }

    #[test]
    fn a_verdict_must_cover_every_test() {
        let reply = Value::List(vec![result("passed"), result("failed")]).encode();
        let Some(GraderReply::Results(results)) = read_verdict(&reply, 3, 2) else {
            panic!("two results for two tests are a verdict");
        };
        assert_eq!(results[0].status, TestStatus::Passed);
        assert_eq!(results[1].status, TestStatus::Failed);
        assert_eq!(results[1].name, "test_5");
        assert_eq!(results[1].expected.as_deref(), Some("1"));
        assert!(read_verdict(&reply, 0, 1).is_none());
        assert!(read_verdict(&reply, 0, 3).is_none());
    }

    #[test]
    fn an_unknown_status_is_no_verdict() {
        assert!(read_verdict(&Value::List(vec![result("skipped")]).encode(), 0, 1).is_none());
        assert!(read_verdict(&pair("passed").encode(), 0, 1).is_none());
        assert!(read_verdict(b"garbage", 0, 1).is_none());
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

    #[test]
    fn lines_that_a_submission_does_not_have_are_left_out() {
        for (line, code, shown) in [
            (Some(2), "a\nb", Some(2)),
            (Some(3), "a\nb", None),
            (Some(0), "a\nb", None),
            (None, "a", None),
        ] {
            let mut results = [TestResult {
                line,
                ..TestResult::new("test_1", TestStatus::Failed, "")
            }];
            check_lines(&mut results, code);
            assert_eq!(results[0].line, shown);
        }
    }
}
