//! Grades programs by what they print for an input, as APPS and `LiveCodeBench` do.
//!
//! Each case is a run of its own in a fresh interpreter, with all of the submission's limits. Only
//! bytes come back, and they are compared here, so this needs no grader's instance; the expected
//! output never goes into the submission's. [`compare`](super::compare) states the rules.

use std::sync::Arc;

use bytesize::ByteSize;
use serde::Deserialize;

use super::compare::{Whitespace, difference};
use super::lateness::decided;
use super::safe_text::shorten;
use super::unit_test::GraderError;
use super::verdict::{GradeRequest, GradeUsage, TestResult, TestStatus, Verdict, test_name};
use super::{GradeLimits, Grader};
use crate::sandbox::{ExecOutcome, ExecRequest, Exit, Limits, MAX_MESSAGE, Sandbox};

/// What a program may print beyond what is expected, before it is cut.
const SPARE_OUTPUT: u64 = 64 << 10;
/// What is kept of its error output: the end of a traceback is in it.
const ERROR_OUTPUT: ByteSize = ByteSize::kib(16);
/// Characters of a message, an expected line or a line that came.
const MAX_TEXT: usize = 200;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    whitespace: Whitespace,
    float_tolerance: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            whitespace: Whitespace::default(),
            float_tolerance: 1e-6,
        }
    }
}

/// Grades programs by their standard output.
///
/// Reads `cases`, and of the options `whitespace` (`lines`, `tokens` or `exact`) and
/// `float_tolerance` (1e-6). A program that does not exit with code 0 fails the case. Once one has
/// met a limit, the cases after it are not run.
#[derive(Debug, Clone)]
pub struct StdioGrader {
    sandbox: Arc<dyn Sandbox>,
    limits: Limits,
}

impl StdioGrader {
    /// The grader's name.
    pub const NAME: &'static str = "stdio";

    /// Makes a grader that runs programs in `sandbox`, each under `limits.candidate`.
    #[must_use]
    pub fn new(sandbox: Arc<dyn Sandbox>, limits: &GradeLimits) -> Self {
        Self {
            sandbox,
            limits: limits.candidate.clone(),
        }
    }

    fn run(&self, request: &GradeRequest, index: usize) -> Result<ExecOutcome, GraderError> {
        let case = &request.cases[index];
        let program = ExecRequest {
            code: request.code.clone(),
            stdin: case.input.clone(),
            seed: Some(0),
            ..ExecRequest::default()
        };
        let limits = Limits {
            stdout: ByteSize(case.output.len() as u64 + SPARE_OUTPUT),
            stderr: ERROR_OUTPUT,
            ..self.limits.clone()
        };
        Ok(self.sandbox.exec(&program, &limits)?)
    }

    fn try_grade(
        &self,
        request: &GradeRequest,
        usage: &mut GradeUsage,
    ) -> Result<Verdict, GraderError> {
        let options: Options = request.read_options().map_err(|source| {
            let grader = Self::NAME;
            GraderError::Options { grader, source }
        })?;
        if request.cases.is_empty() {
            return Err(GraderError::NoTests);
        }
        let size = request.code.len();
        if size > MAX_MESSAGE {
            let message = format!("the submission takes {size} bytes");
            return Ok(Verdict::invalid(request.cases.len(), &message, *usage));
        }
        let mut results: Vec<TestResult> = Vec::with_capacity(request.cases.len());
        let mut not_run = None;
        for (index, case) in request.cases.iter().enumerate() {
            if let Some(message) = &not_run {
                results.push(TestResult::new(
                    test_name(index),
                    TestStatus::NotRun,
                    message,
                ));
                continue;
            }
            let outcome = self.run(request, index)?;
            usage.runs += 1;
            usage.candidate.fuel += outcome.usage.fuel;
            usage.candidate.wall += outcome.usage.wall;
            let memory = &mut usage.candidate.memory_bytes;
            *memory = (*memory).max(outcome.usage.memory_bytes);
            if index == 0 && is_syntax_error(&outcome) {
                let message = last_line(&outcome.stderr_text());
                return Ok(Verdict::invalid(request.cases.len(), &message, *usage));
            }
            if outcome.exit.is_limit() {
                let exit = &outcome.exit;
                not_run = Some(format!("not run: the submission {exit} in an earlier test"));
            }
            if let exit @ Exit::DeadlineExceeded { .. } = &outcome.exit {
                let message = format!("the submission {exit}");
                results.push(TestResult::new(
                    test_name(index),
                    TestStatus::NotRun,
                    message,
                ));
                continue;
            }
            results.push(judge(index, &case.output, &outcome, &options));
        }
        Ok(Verdict::judged(decided(results)?, *usage))
    }
}

impl Grader for StdioGrader {
    fn grade(&self, request: &GradeRequest) -> Verdict {
        let mut usage = GradeUsage::default();
        self.try_grade(request, &mut usage)
            .unwrap_or_else(|error| error.verdict(request.cases.len(), usage))
    }
}

fn judge(index: usize, expected: &str, outcome: &ExecOutcome, options: &Options) -> TestResult {
    let failed = |message: String| TestResult::new(test_name(index), TestStatus::Failed, message);
    if let Exit::Exited { code } = outcome.exit
        && code != 0
    {
        let reason = last_line(&outcome.stderr_text());
        return failed(if reason.is_empty() {
            format!("the program exited with code {code}")
        } else {
            reason
        });
    }
    if !outcome.exit.is_success() {
        let limit = outcome.exit.to_string();
        return TestResult {
            limit: Some(limit.clone()),
            ..failed(format!("the program {limit}"))
        };
    }
    if outcome.stdout_truncated {
        let limit = expected.len() as u64 + SPARE_OUTPUT;
        return failed(format!("the program printed more than {limit} bytes"));
    }
    let Ok(got) = std::str::from_utf8(&outcome.stdout) else {
        return failed("the output is not UTF-8".to_owned());
    };
    match difference(expected, got, options.whitespace, options.float_tolerance) {
        None => TestResult::new(test_name(index), TestStatus::Passed, ""),
        Some(found) => {
            let [expected, got] = [found.expected, found.got].map(|text| shorten(text, MAX_TEXT));
            let place = match options.whitespace {
                Whitespace::Tokens => "word",
                Whitespace::Lines | Whitespace::Exact => "line",
            };
            TestResult {
                expected: Some(expected.clone()),
                got: Some(got.clone()),
                ..failed(format!(
                    "{place} {} of the output: expected `{expected}`, got `{got}`",
                    found.line
                ))
            }
        }
    }
}

/// Whether the program was not even compiled. One that only claims so gains nothing: it failed.
fn is_syntax_error(outcome: &ExecOutcome) -> bool {
    let text = outcome.stderr_text();
    let last = last_line(&text);
    outcome.exit == (Exit::Exited { code: 1 })
        && !text.contains("Traceback (most recent call last)")
        && ["SyntaxError:", "IndentationError:", "TabError:"]
            .iter()
            .any(|kind| last.starts_with(kind))
}

fn last_line(text: &str) -> String {
    let last = text.trim_end().lines().next_back();
    shorten(last.unwrap_or_default(), MAX_TEXT)
}
