//! Grades by test programs of other shapes than a list of tests, over two instances.
//!
//! The submission is loaded in the candidate's instance, as for [`unit_test`](super::unit_test);
//! `graders/judge.py` runs the tests in the grader's.

use std::sync::Arc;

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};
use serde_json::{Map, json};

use super::codec::Value;
use super::lateness::{decided, is_late, late};
use super::unit_test::{
    GraderError, PRINTED, add_usage, check_lines, load_message, loaded_reply, read_outcome,
    says_ended, why_not_loaded,
};
use super::verdict::{GradeRequest, GradeUsage, TestResult, TestStatus, Verdict};
use super::{GradeLimits, Grader};
use crate::sandbox::{Dialogue, Exit, MAX_MESSAGE, Message, Sandbox, Served};

/// The most of a reply that is read: ten thousand tests with long messages.
const MAX_REPLY: usize = 8 << 20;

/// What a test program is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProgramKind {
    /// `check(candidate)`, as in `HumanEval`; `tests` holds the program that defines it.
    Check,
    /// A program that raises if the submission is wrong, as in MBPP+.
    Script,
    /// `>>>` examples.
    Doctest,
    /// Test functions as pytest finds them, with `parametrize`, `raises`, `approx` and fixtures.
    Pytest,
    /// `unittest.TestCase` classes.
    Unittest,
    /// Calls with expected results, as APPS and `LiveCodeBench` have them; `cases` holds them.
    Calls,
    /// A user's grader: `def grade(candidate, task)`.
    Python,
}

impl ProgramKind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Check,
        Self::Script,
        Self::Doctest,
        Self::Pytest,
        Self::Unittest,
        Self::Calls,
        Self::Python,
    ];

    /// Returns the grader's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Script => "script",
            Self::Doctest => "doctest",
            Self::Pytest => "pytest",
            Self::Unittest => "unittest",
            Self::Calls => "calls",
            Self::Python => "python",
        }
    }
}

/// Grades submissions by a test program.
///
/// Reads `setup`, `entry_points`, and `tests`, which are joined to one program. `graders/README.md`
/// says what each kind makes of it and which options it has.
#[derive(Debug, Clone)]
pub struct ProgramGrader {
    kind: ProgramKind,
    sandbox: Arc<dyn Sandbox>,
    limits: GradeLimits,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ProgramOptions {
    /// What the tests import the submission as.
    module: Option<String>,
    /// Whether what the submission changes in place is not seen by the tests.
    read_only_arguments: bool,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct CallOptions {
    /// What is called; the first entry point unless given.
    call: Option<String>,
    float_tolerance: f64,
    /// Whether `[x]` stands for `x` in what is expected, as it may in APPS.
    unwrap: bool,
}

impl Default for CallOptions {
    fn default() -> Self {
        Self {
            call: None,
            float_tolerance: 1e-6,
            unwrap: false,
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct PythonOptions {
    /// What the grader gets as `task`.
    task: Map<String, serde_json::Value>,
    submission: SubmissionKind,
    /// Whether what the submission changes in place is not seen by the grader.
    read_only_arguments: bool,
}

/// What a submission is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SubmissionKind {
    /// A Python program.
    #[default]
    Code,
    /// Text, which is not run.
    Text,
}

/// What a grading came to before its cost is known.
enum Judgement {
    Results(Vec<TestResult>),
    Scored {
        reward: f64,
        passed: bool,
        message: String,
        named: IndexMap<String, f64>,
    },
    Failed(String),
    Invalid(String),
}

impl ProgramGrader {
    /// Makes a grader that runs its guests in `sandbox` under `limits`.
    #[must_use]
    pub fn new(kind: ProgramKind, sandbox: Arc<dyn Sandbox>, limits: GradeLimits) -> Self {
        Self {
            kind,
            sandbox,
            limits,
        }
    }

    /// Returns the program to load and the message to the grader.
    fn messages(&self, request: &GradeRequest) -> Result<(String, Vec<u8>), GraderError> {
        let grader = self.kind.name();
        let fault = |source| GraderError::Options { grader, source };
        let mut code = request.code.clone();
        let options = match self.kind {
            ProgramKind::Calls => {
                let options: CallOptions = request.read_options().map_err(fault)?;
                let cases: Vec<_> = (request.cases.iter())
                    .map(|case| [&case.input, &case.output])
                    .collect();
                let call = options
                    .call
                    .or_else(|| request.entry_points.first().cloned());
                json!({
                    "call": call.unwrap_or_default(),
                    "cases": cases,
                    "float_tolerance": options.float_tolerance,
                    "unwrap": options.unwrap,
                })
            }
            ProgramKind::Python => {
                let options: PythonOptions = request.read_options().map_err(fault)?;
                if options.submission == SubmissionKind::Text {
                    code.clear();
                }
                json!({
                    "task": options.task,
                    "source": request.code,
                    "read_only_arguments": options.read_only_arguments,
                })
            }
            _ => {
                let options: ProgramOptions = request.read_options().map_err(fault)?;
                json!({
                    "module": options.module,
                    "read_only_arguments": options.read_only_arguments,
                })
            }
        };
        let entries = self.entries(request);
        let message = Value::Tuple(vec![
            Value::text("judge"),
            Value::text(grader),
            Value::text(request.setup.join("\n")),
            Value::text(request.tests.join("\n")),
            Value::texts(&entries),
            Value::text(options.to_string()),
        ])
        .encode();
        Ok((code, message))
    }

    /// Returns the names that are taken from the submission: what is called, too.
    fn entries(&self, request: &GradeRequest) -> Vec<String> {
        let mut entries = request.entry_points.clone();
        if self.kind == ProgramKind::Calls
            && let Some(call) = request.options.get("call").and_then(|call| call.as_str())
        {
            let name: String = call
                .chars()
                .take_while(|letter| *letter == '_' || letter.is_alphanumeric())
                .collect();
            if !name.is_empty() && !entries.contains(&name) {
                entries.push(name);
            }
        }
        entries
    }

    fn check(&self, request: &GradeRequest) -> Result<(), GraderError> {
        let is_empty = match self.kind {
            ProgramKind::Calls => request.cases.is_empty(),
            // What it calls is `entry_points[0]`.
            ProgramKind::Check => request.tests.is_empty() || request.entry_points.is_empty(),
            _ => request.tests.is_empty(),
        };
        if is_empty {
            return Err(GraderError::NoTests);
        }
        super::unit_test::check_entry_points(&request.entry_points)
    }

    fn try_grade(
        &self,
        request: &GradeRequest,
        usage: &mut GradeUsage,
    ) -> Result<Judgement, GraderError> {
        self.check(request)?;
        let (code, message) = self.messages(request)?;
        let load = load_message(&code);
        if load.len() > MAX_MESSAGE {
            let message = format!("the submission takes {} bytes", code.len());
            return Ok(Judgement::Invalid(message));
        }
        let size = message.len();
        if size > MAX_MESSAGE {
            // A user's grader gets the submission's text as well, in JSON.
            let text = serde_json::to_string(&request.code).map_or(0, |text| text.len());
            if self.kind == ProgramKind::Python && size - text.min(size) <= MAX_MESSAGE {
                let message = format!("the submission takes {text} bytes, written as JSON");
                return Ok(Judgement::Invalid(message));
            }
            return Err(GraderError::TestsTooLarge { size });
        }
        let mut limits = self.limits.candidate.clone();
        if self.kind == ProgramKind::Doctest {
            // What it prints is what examples show. Of the other kinds nobody reads it.
            limits.stdout = PRINTED;
        }
        let outcome = self.sandbox.converse(&Dialogue {
            callee: Message {
                limits: self.limits.loading.clone(),
                bytes: load,
            },
            proceed_on: loaded_reply(),
            round: limits,
            max_rounds: 1,
            caller: Message {
                limits: self.limits.grader.clone(),
                bytes: message,
            },
        })?;
        add_usage(usage, &outcome);
        let Some((served, _)) = &outcome.caller else {
            return match late(&outcome.callee) {
                Some(exit) => Err(GraderError::late("submission", exit)),
                None => Ok(Judgement::Invalid(why_not_loaded(&outcome.callee))),
            };
        };
        let round = outcome.rounds.first();
        let ended = round.and_then(|round| round.ended.as_ref());
        match served {
            Served::Reply(reply) => {
                let read = read_reply(reply).unwrap_or_else(|| {
                    Ok(Judgement::Failed("the grader gave no verdict".to_owned()))
                });
                read.and_then(|judgement| match ended {
                    Some(exit) if round.is_some_and(is_late) => excuse_late(judgement, exit),
                    Some(exit) => Ok(explain(judgement, exit)),
                    None => Ok(judgement),
                })
            }
            Served::Ended(exit) => {
                let message = format!("the grader's instance {exit}");
                let has_met_limit =
                    ended.is_some_and(Exit::is_limit) && !round.is_some_and(is_late);
                match round {
                    _ if late(served).is_some() && !has_met_limit => {
                        Err(GraderError::late("grader", exit))
                    }
                    Some(_) => Ok(Judgement::Failed(message)),
                    // The submission had no part in it.
                    None => Err(GraderError::broken(message)),
                }
            }
        }
    }
}

impl Grader for ProgramGrader {
    fn grade(&self, request: &GradeRequest) -> Verdict {
        let count = match self.kind {
            ProgramKind::Calls => request.cases.len(),
            _ => 1,
        };
        let mut usage = GradeUsage::default();
        match self.try_grade(request, &mut usage) {
            Ok(Judgement::Results(mut tests)) => {
                check_lines(&mut tests, &request.code);
                Verdict::judged(tests, usage)
            }
            Ok(Judgement::Scored {
                reward,
                passed,
                message,
                named,
            }) => Verdict::scored(reward, named, passed, &message, usage),
            Ok(Judgement::Failed(message)) => Verdict::all_failed(count, &message, usage),
            Ok(Judgement::Invalid(message)) => Verdict::invalid(count, &message, usage),
            Err(error) => error.verdict(count, usage),
        }
    }
}

/// Reads the grader's reply. `None` is a malformed one.
fn read_reply(reply: &[u8]) -> Option<Result<Judgement, GraderError>> {
    match Value::decode(reply, MAX_REPLY).ok()? {
        Value::List(entries) if !entries.is_empty() => {
            let results: Option<Vec<_>> = entries.iter().map(read_result).collect();
            results.map(|results| Ok(Judgement::Results(results)))
        }
        Value::Tuple(members) => match &members[..] {
            [Value::Str(status), Value::Str(message)] => {
                let message = message.clone();
                match status.as_str() {
                    "invalid" => Some(Ok(Judgement::Invalid(message))),
                    "broken" => Some(Err(GraderError::BrokenTask { reason: message })),
                    "missing" => Some(Err(GraderError::MissingModule { name: message })),
                    _ => None,
                }
            }
            [
                Value::Str(status),
                Value::Str(reward),
                Value::Bool(passed),
                Value::Str(message),
                Value::List(named),
            ] if status == "scored" => {
                let named: Option<IndexMap<_, _>> = named.iter().map(read_named).collect();
                Some(Ok(Judgement::Scored {
                    reward: reward.parse().ok()?,
                    passed: *passed,
                    message: message.clone(),
                    named: named?,
                }))
            }
            _ => None,
        },
        _ => None,
    }
}

fn read_result(entry: &Value) -> Option<TestResult> {
    let Value::List(members) = entry else {
        return None;
    };
    let [
        Value::Str(name),
        Value::Str(status),
        Value::Str(message),
        expected,
        got,
        line,
    ] = &members[..]
    else {
        return None;
    };
    let line = match line {
        Value::None => None,
        Value::Int(line) => u32::try_from(*line).ok(),
        _ => return None,
    };
    let result = read_outcome(name.clone(), status, message, [expected, got])?;
    Some(TestResult { line, ..result })
}

fn read_named(entry: &Value) -> Option<(String, f64)> {
    let Value::Tuple(members) = entry else {
        return None;
    };
    match &members[..] {
        [Value::Str(name), Value::Str(value)] => Some((name.clone(), value.parse().ok()?)),
        _ => None,
    }
}

/// Judges a submission that met its deadline by what was decided before, if anything was.
fn excuse_late(judgement: Judgement, exit: &Exit) -> Result<Judgement, GraderError> {
    match judgement {
        Judgement::Results(mut tests) => {
            let is_excused =
                |test: &TestResult| test.status == TestStatus::Failed && says_ended(&test.message);
            if let Some(first) = tests.iter().position(is_excused) {
                for test in &mut tests[first..] {
                    if test.status == TestStatus::Failed {
                        test.status = TestStatus::NotRun;
                    }
                }
            }
            match explain(Judgement::Results(tests), exit) {
                Judgement::Results(tests) => decided(tests).map(Judgement::Results),
                other => Ok(other),
            }
        }
        Judgement::Scored { message, .. } | Judgement::Invalid(message) if says_ended(&message) => {
            Err(GraderError::late("submission", exit))
        }
        decided => Ok(explain(decided, exit)),
    }
}

/// Says how the submission's instance ended, where the guest only knows that it did.
fn explain(judgement: Judgement, exit: &Exit) -> Judgement {
    let told = |message: &mut String| {
        let ended = says_ended(message);
        if ended {
            *message = format!("the submission {exit}");
        }
        ended && exit.is_limit()
    };
    match judgement {
        Judgement::Results(mut tests) => {
            for test in &mut tests {
                if told(&mut test.message) {
                    test.limit = Some(exit.to_string());
                }
            }
            Judgement::Results(tests)
        }
        Judgement::Scored {
            reward,
            passed,
            mut message,
            named,
        } => {
            told(&mut message);
            Judgement::Scored {
                reward,
                passed,
                message,
                named,
            }
        }
        Judgement::Invalid(mut message) => {
            told(&mut message);
            Judgement::Invalid(message)
        }
        failed @ Judgement::Failed(_) => failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(status: &str, line: Value) -> Value {
        Value::List(vec![
            Value::text("test_1"),
            Value::text(status),
            Value::text("message"),
            Value::text("1"),
            Value::None,
            line,
        ])
    }

    #[test]
    fn results_are_read_strictly() {
        let good = Value::List(vec![entry("failed", Value::Int(7))]).encode();
        let Some(Ok(Judgement::Results(results))) = read_reply(&good) else {
            panic!("one result is a verdict");
        };
        assert_eq!(
            (results[0].line, results[0].expected.as_deref()),
            (Some(7), Some("1"))
        );
        let forged = Value::List(vec![entry("failed", Value::Int(-1))]).encode();
        let Some(Ok(Judgement::Results(results))) = read_reply(&forged) else {
            panic!("a line that no file has is left out");
        };
        assert_eq!(results[0].line, None);
        for bad in [
            Value::List(vec![]),
            Value::List(vec![entry("skipped", Value::None)]),
            Value::List(vec![entry("passed", Value::text("1"))]),
            Value::Tuple(vec![Value::text("passed"), Value::text("")]),
            Value::text("passed"),
        ] {
            assert!(read_reply(&bad.encode()).is_none(), "{bad:?}");
        }
    }

    #[test]
    fn a_score_is_a_number_and_its_names() {
        let scored = |reward: &str| {
            let named = Value::Tuple(vec![Value::text("style"), Value::text("0.25")]);
            Value::Tuple(vec![
                Value::text("scored"),
                Value::text(reward),
                Value::Bool(false),
                Value::text("so so"),
                Value::List(vec![named]),
            ])
            .encode()
        };
        let Some(Ok(Judgement::Scored { reward, named, .. })) = read_reply(&scored("0.5")) else {
            panic!("a score is a verdict");
        };
        assert_eq!((reward, named["style"]), (0.5, 0.25));
        assert!(read_reply(&scored("half")).is_none());
        // What is not finite is refused where the verdict is made.
        let verdict = Verdict::scored(f64::NAN, IndexMap::new(), true, "", GradeUsage::default());
        assert_eq!(verdict.reward, None);
    }

    proptest::proptest! {
        #[test]
        fn any_reply_is_read_or_refused(
            bytes in proptest::collection::vec(proptest::sample::select(b"NTFist\x01\x02\x05".to_vec()), 0..60),
        ) {
            let _ = read_reply(&bytes);
        }
    }
}
