//! Whether the log of an evaluation is evidence, and of what.

use std::sync::LazyLock;

use regex::Regex;

use super::parser::{LogParser, StatusMap, TestState};

/// What the harness writes where an evaluation went wrong before or in the tests.
const BAD_CODES: [&str; 4] = [
    ">>>>> Patch Apply Failed",
    ">>>>> Reset Failed",
    ">>>>> Tests Errored",
    ">>>>> Tests Timed Out",
];

/// Lines around the runner's output, and the one with its exit status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Markers {
    /// Before the first line of the runner.
    pub start: String,
    /// After its last line.
    pub end: String,
    /// Before its exit status, on a line after `end`.
    pub exit: String,
    /// Whether the words are the harness's own, which any program can print.
    is_fixed: bool,
}

impl Markers {
    /// Returns the harness's own, for logs that it wrote.
    #[must_use]
    pub fn official() -> Self {
        Self {
            start: ">>>>> Start Test Output".to_owned(),
            end: ">>>>> End Test Output".to_owned(),
            exit: ">>>>> Test Exit Code".to_owned(),
            is_fixed: true,
        }
    }

    /// Returns marks with `nonce`, which has to be new for each evaluation and unknown to every
    /// program in it.
    #[must_use]
    pub fn with_nonce(nonce: &str) -> Self {
        Self {
            start: format!("wardian-{nonce} start"),
            end: format!("wardian-{nonce} end"),
            exit: format!("wardian-{nonce} exit"),
            is_fixed: false,
        }
    }
}

/// Why a log is no evidence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LogFault {
    /// The harness noted a failure.
    #[error("the log holds `{code}`")]
    BadCode {
        /// What it noted.
        code: &'static str,
    },
    /// The runner was not started or not waited for.
    #[error("the log lacks the marks around the tests' output")]
    NoMarkers,
    /// Nothing shows that a suite ran.
    #[error("the log names no test, and nothing in it shows that a suite ran")]
    NoTests,
    /// The runner failed and its output says that nothing did.
    #[error("the test command exited with {code}, but its output shows no failure")]
    Contradiction {
        /// The exit status.
        code: i32,
    },
}

/// A log that is evidence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvalLog {
    /// The status of each test.
    pub tests: StatusMap,
    /// The runner's exit status, where it is known.
    pub exit_code: Option<i32>,
}

impl EvalLog {
    /// Reads the log of an evaluation.
    ///
    /// `exit_code` is the runner's exit status where it is known otherwise than from the log, which
    /// any program in the evaluation may have written. Line ends are read as Python reads them.
    ///
    /// # Errors
    ///
    /// Fails where the log is no evidence.
    pub fn read(
        log: &str,
        markers: &Markers,
        parser: LogParser,
        exit_code: Option<i32>,
    ) -> Result<Self, LogFault> {
        let log = log.replace("\r\n", "\n").replace('\r', "\n");
        // With a nonce these are nobody's words but the program's.
        if markers.is_fixed
            && let Some(code) = BAD_CODES.into_iter().find(|code| log.contains(code))
        {
            return Err(LogFault::BadCode { code });
        }
        let after_start = log.split_once(&markers.start).map(|(_, rest)| rest);
        let inside = after_start.filter(|_| log.contains(&markers.end));
        let Some(inside) = inside else {
            return Err(LogFault::NoMarkers);
        };
        let until = |text: &str, mark: &str| text.find(mark).unwrap_or(text.len());
        let mut inside = &inside[..until(inside, &markers.end)];
        if markers.is_fixed {
            // The harness stops at a second start, too: a shell that traces writes each mark twice.
            inside = &inside[..until(inside, &markers.start)];
        }
        let mut tests = parser.parse(inside);
        if tests.is_empty() && markers.is_fixed {
            // Where the output came in another order than it was written in.
            tests = parser.parse(&log);
        }
        if tests.is_empty() && !has_suite_run(&log) {
            return Err(LogFault::NoTests);
        }
        let exit_code = exit_code.or_else(|| exit_in(&log, &markers.exit));
        let has_failure = |tests: &StatusMap| {
            let mut states = tests.values();
            states.any(|state| matches!(state, TestState::Failed | TestState::Error))
        };
        match exit_code {
            Some(code) if code != 0 && !tests.is_empty() && !has_failure(&tests) => {
                Err(LogFault::Contradiction { code })
            }
            _ => Ok(Self { tests, exit_code }),
        }
    }
}

/// Returns the first exit status behind its mark.
fn exit_in(log: &str, mark: &str) -> Option<i32> {
    log.match_indices(mark).find_map(|(at, _)| {
        let rest = log[at + mark.len()..].strip_prefix(':')?.trim_start();
        let digits = rest.strip_prefix('-').unwrap_or(rest);
        let end = digits
            .find(|letter: char| !letter.is_ascii_digit())
            .unwrap_or(digits.len());
        rest[..end + rest.len() - digits.len()].parse().ok()
    })
}

/// Whether a line shows that a suite ran, for parsers that note failures alone. Counts of 0 do not.
fn has_suite_run(log: &str) -> bool {
    static RAN: LazyLock<Regex> = LazyLock::new(|| {
        let pattern = concat!(
            r"(?m)Executed [1-9]\d* of \d+",
            r"|TOTAL: [1-9]\d* (?:SUCCESS|FAILED)",
            r"|[1-9]\d* passing",
            r"|Tests:\s+[1-9]\d*",
            r"|Test Suites:\s+(?:\d+ \w+, )*[1-9]\d* total",
            r"|^# tests [1-9]\d*",
            r"|[1-9]\d* specs?, \d+ failures?",
            r"|': ok$",
        );
        Regex::new(pattern).expect("the pattern is fixed and tested")
    });
    RAN.is_match(log)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(log: &str, exit_code: Option<i32>) -> Result<EvalLog, LogFault> {
        EvalLog::read(
            log,
            &Markers::with_nonce("7f"),
            LogParser::Pytest,
            exit_code,
        )
    }

    #[test]
    fn words_that_any_program_can_print_are_no_marks() {
        let official = ">>>>> Start Test Output\nPASSED t.py::a\n>>>>> End Test Output\n";
        assert_eq!(read(official, Some(0)), Err(LogFault::NoMarkers));
        let log = format!(
            "wardian-7f start\n>>>>> Tests Errored\nPASSED t.py::b\nwardian-7f end\n{official}"
        );
        let read = read(&log, Some(0)).unwrap();
        let tests: Vec<&String> = read.tests.keys().collect();
        assert_eq!(tests, ["t.py::b"]);
    }

    #[test]
    fn the_script_is_believed_before_the_log() {
        let log = "wardian-7f start\nPASSED t.py::a\nwardian-7f end\nwardian-7f exit: 0\n";
        assert_eq!(read(log, None).unwrap().exit_code, Some(0));
        assert_eq!(read(log, Some(3)), Err(LogFault::Contradiction { code: 3 }));
    }

    #[test]
    fn exit_statuses_are_read_behind_their_mark() {
        assert_eq!(exit_in("x: -1\nx: 2", "x"), Some(-1));
        assert_eq!(exit_in("x\nx: 2", "x"), Some(2));
        assert_eq!(exit_in("x: y", "x"), None);
    }
}
