//! What test runners print, read as the official harness reads it.
//!
//! Each parser goes over the lines of a log and notes a status for each test that it finds; a later
//! line about the same test counts for more. Lines end at `\n`, blanks are what Python's
//! `str.split` takes for blanks.

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use indexmap::IndexMap;
use regex::Regex;
use serde::Serialize;

/// How a test went, by its runner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum TestState {
    /// It passed.
    Passed,
    /// It failed.
    Failed,
    /// It could not be run.
    Error,
    /// It was left out.
    Skipped,
    /// It failed, as it was expected to.
    Xfail,
    /// Another word that stood where a status should: as good as failed.
    #[serde(untagged)]
    Other(String),
}

/// The words of statuses, in the order in which the harness tries them.
const STATES: [&str; 5] = ["FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL"];

impl TestState {
    fn of(word: &str) -> Self {
        match word {
            "PASSED" => Self::Passed,
            "FAILED" => Self::Failed,
            "ERROR" => Self::Error,
            "SKIPPED" => Self::Skipped,
            "XFAIL" => Self::Xfail,
            other => Self::Other(other.to_owned()),
        }
    }

    /// Whether it counts as passed.
    #[must_use]
    pub fn has_passed(&self) -> bool {
        matches!(self, Self::Passed | Self::Xfail)
    }
}

/// The status of each test, in the order in which they were first seen.
pub type StatusMap = IndexMap<String, TestState>;

/// A reader of logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogParser {
    /// pytest's summary.
    Pytest,
    /// pytest's summary, with paths in parameters shortened.
    PytestOptions,
    /// pytest's summary, or its progress, with colours.
    PytestV2,
    /// Django's test runner.
    Django,
    /// pytest as seaborn runs it.
    Seaborn,
    /// `SymPy`'s test runner.
    Sympy,
    /// pytest's summary, with matplotlib's mouse buttons as numbers.
    Matplotlib,
}

/// Names of the harness for each parser.
const NAMES: [(LogParser, &[&str]); 7] = [
    (
        LogParser::Pytest,
        &[
            "parse_log_pytest",
            "parse_log_astroid",
            "parse_log_flask",
            "parse_log_marshmallow",
            "parse_log_pvlib",
            "parse_log_pyvista",
            "parse_log_sqlfluff",
            "parse_log_xarray",
        ],
    ),
    (
        LogParser::PytestOptions,
        &[
            "parse_log_pytest_options",
            "parse_log_pydicom",
            "parse_log_requests",
            "parse_log_pylint",
        ],
    ),
    (
        LogParser::PytestV2,
        &[
            "parse_log_pytest_v2",
            "parse_log_astropy",
            "parse_log_scikit",
            "parse_log_sphinx",
        ],
    ),
    (LogParser::Django, &["parse_log_django"]),
    (LogParser::Seaborn, &["parse_log_seaborn"]),
    (LogParser::Sympy, &["parse_log_sympy"]),
    (LogParser::Matplotlib, &["parse_log_matplotlib"]),
];

/// Repositories of SWE-bench in Python, with their parsers.
const REPOSITORIES: [(&str, LogParser); 18] = [
    ("astropy/astropy", LogParser::PytestV2),
    ("django/django", LogParser::Django),
    ("marshmallow-code/marshmallow", LogParser::Pytest),
    ("matplotlib/matplotlib", LogParser::Matplotlib),
    ("mwaskom/seaborn", LogParser::Seaborn),
    ("pallets/flask", LogParser::Pytest),
    ("psf/requests", LogParser::PytestOptions),
    ("pvlib/pvlib-python", LogParser::Pytest),
    ("pydata/xarray", LogParser::Pytest),
    ("pydicom/pydicom", LogParser::PytestOptions),
    ("pylint-dev/astroid", LogParser::Pytest),
    ("pylint-dev/pylint", LogParser::PytestOptions),
    ("pytest-dev/pytest", LogParser::Pytest),
    ("pyvista/pyvista", LogParser::Pytest),
    ("scikit-learn/scikit-learn", LogParser::PytestV2),
    ("sphinx-doc/sphinx", LogParser::PytestV2),
    ("sqlfluff/sqlfluff", LogParser::Pytest),
    ("sympy/sympy", LogParser::Sympy),
];

/// A name that is no parser's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no log parser `{name}`; there are those of SWE-bench's Python repositories")]
pub struct UnknownParser {
    name: String,
}

impl FromStr for LogParser {
    type Err = UnknownParser;

    fn from_str(name: &str) -> Result<Self, UnknownParser> {
        (NAMES.iter())
            .find(|(_, names)| names.contains(&name))
            .map(|(parser, _)| *parser)
            .ok_or_else(|| UnknownParser {
                name: name.to_owned(),
            })
    }
}

impl fmt::Display for LogParser {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = NAMES.iter().find(|(parser, _)| parser == self);
        formatter.write_str(names.map_or("", |(_, names)| names[0]))
    }
}

impl LogParser {
    /// Returns the parser of a repository, `owner/name`.
    #[must_use]
    pub fn of_repository(repository: &str) -> Option<Self> {
        let found = REPOSITORIES.iter().find(|(name, _)| *name == repository);
        found.map(|(_, parser)| *parser)
    }

    /// Reads a log.
    #[must_use]
    pub fn parse(self, log: &str) -> StatusMap {
        match self {
            Self::Pytest => pytest(log.split('\n').map(str::to_owned), str::to_owned),
            Self::PytestOptions => pytest(log.split('\n').map(str::to_owned), short_option),
            Self::Matplotlib => {
                let lines = log.split('\n').map(|line| {
                    line.replace("MouseButton.LEFT", "1")
                        .replace("MouseButton.RIGHT", "3")
                });
                pytest(lines, str::to_owned)
            }
            Self::PytestV2 => pytest_v2(log),
            Self::Django => django(log),
            Self::Seaborn => seaborn(log),
            Self::Sympy => sympy(log),
        }
    }
}

/// Whether Python takes `letter` for a blank; besides Unicode's blanks these are four separators.
fn is_blank(letter: char) -> bool {
    letter.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&letter)
}

fn words(line: &str) -> Vec<&str> {
    (line.split(is_blank))
        .filter(|word| !word.is_empty())
        .collect()
}

fn starts_with_state(line: &str) -> bool {
    STATES.iter().any(|state| line.starts_with(state))
}

/// Whether the word after `SKIPPED` is a count, as in `SKIPPED [2] path: reason`, and no test.
fn is_skip_count(state: &str, name: &str) -> bool {
    let digits = name
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    state == "SKIPPED"
        && digits.is_some_and(|digits| !digits.is_empty() && digits.chars().all(char::is_numeric))
}

fn pytest(lines: impl Iterator<Item = String>, name: fn(&str) -> String) -> StatusMap {
    let mut found = StatusMap::new();
    for mut line in lines.filter(|line| starts_with_state(line)) {
        if line.starts_with("FAILED") {
            line = line.replace(" - ", " ");
        }
        let words = words(&line);
        let [state, test, ..] = words.as_slice() else {
            continue;
        };
        if !is_skip_count(state, test) {
            found.insert(name(test), TestState::of(state));
        }
    }
    found
}

/// Keeps of a parameter that is a path its last part, as it depends on where the tests ran.
fn short_option(test: &str) -> String {
    let Some((open, close)) = test.find('[').zip(test.rfind(']')) else {
        return test.to_owned();
    };
    if close < open {
        return test.to_owned();
    }
    let (main, option) = (&test[..open], &test[open + 1..close]);
    let is_path = option.starts_with('/') && !option.starts_with("//") && !option.contains('*');
    let last = option.rsplit('/').next().unwrap_or_default();
    if is_path {
        format!("{main}[/{last}]")
    } else {
        format!("{main}[{option}]")
    }
}

fn pytest_v2(log: &str) -> StatusMap {
    static COLOR: LazyLock<Regex> = LazyLock::new(|| pattern(r"\[(\d+)m"));
    let mut found = StatusMap::new();
    for line in log.split('\n') {
        let line = COLOR.replace_all(line, "");
        let line: String = line
            .chars()
            .filter(|letter| !('\u{1}'..' ').contains(letter))
            .collect();
        let line = line.as_str();
        if starts_with_state(line) {
            let line = match line.split_once(" - ") {
                Some((line, _)) if line.starts_with("FAILED") => line,
                _ => line,
            };
            if let [state, test @ ..] = words(line).as_slice()
                && let Some(first) = test.first()
                && !is_skip_count(state, first)
            {
                found.insert(test.join(" "), TestState::of(state));
            }
        } else if STATES.iter().any(|state| line.ends_with(state))
            && let [test @ .., state] = words(line).as_slice()
            && !test.is_empty()
        {
            found.insert(test.join(" "), TestState::of(state));
        }
    }
    found
}

fn django(log: &str) -> StatusMap {
    // A message in the place of the result, which then stands alone on the next line.
    static SPLIT: LazyLock<[Regex; 3]> = LazyLock::new(|| {
        [
            r"(?m)^(.*?)\s\.\.\.\sTesting against Django installed in ((?s:.*?)) silenced\)\.\nok$",
            r"(?m)^(.*?)\s\.\.\.\sInternal Server Error: /(.*)/\nok$",
            r"(?m)^(.*?)\s\.\.\.\sSystem check identified no issues \(0 silenced\)\nok$",
        ]
        .map(pattern)
    });
    let mut found = StatusMap::new();
    let mut note = |test: &str, state| found.insert(test.to_owned(), state);
    let mut previous: Option<String> = None;
    for line in log.split('\n') {
        let mut line = line.trim_matches(is_blank);
        if line.contains("--version is equivalent to version") {
            note("--version is equivalent to version", TestState::Passed);
        }
        if let Some((test, _)) = line.split_once(" ... ") {
            previous = Some(test.to_owned());
        }
        if let Some(suffix) = [" ... ok", " ... OK", " ...  OK"]
            .into_iter()
            .find(|suffix| line.ends_with(suffix))
        {
            // One test of django-7188 prints before its own name.
            if line.starts_with("Applying sites.0002_alter_domain_unique...test_no_migrations") {
                line =
                    (line.split_once("...").map_or(line, |(_, rest)| rest)).trim_matches(is_blank);
            }
            let test = line.rsplit_once(suffix).map_or(line, |(test, _)| test);
            note(test, TestState::Passed);
        }
        if let Some((test, _)) = line.split_once(" ... skipped") {
            note(test, TestState::Skipped);
        }
        for (end, start, state) in [
            (" ... FAIL", "FAIL:", TestState::Failed),
            (" ... ERROR", "ERROR:", TestState::Error),
        ] {
            if line.ends_with(end)
                && let Some((test, _)) = line.split_once(end)
            {
                note(test, state.clone());
            }
            if line.starts_with(start)
                && let Some(test) = words(line).get(1)
            {
                note(test, state);
            }
        }
        if line.starts_with("ok")
            && let Some(test) = &previous
        {
            note(test, TestState::Passed);
        }
    }
    for pattern in SPLIT.iter() {
        for matched in pattern.captures_iter(log) {
            note(&matched[1], TestState::Passed);
        }
    }
    found
}

fn seaborn(log: &str) -> StatusMap {
    let mut found = StatusMap::new();
    for line in log.split('\n') {
        let words = words(line);
        let [first, second, ..] = words.as_slice() else {
            continue;
        };
        if line.starts_with("FAILED") {
            found.insert((*second).to_owned(), TestState::Failed);
        } else if line.contains(" PASSED ") {
            if *second == "PASSED" {
                found.insert((*first).to_owned(), TestState::Passed);
            }
        } else if line.starts_with("PASSED") {
            found.insert((*second).to_owned(), TestState::Passed);
        }
    }
    found
}

fn sympy(log: &str) -> StatusMap {
    static HEAD: LazyLock<Regex> = LazyLock::new(|| pattern(r"(_*) (.*)\.py:(.*) (_*)"));
    let mut found = StatusMap::new();
    for matched in HEAD.captures_iter(log) {
        let test = format!("{}.py:{}", &matched[2], &matched[3]);
        found.insert(test, TestState::Failed);
    }
    for line in log.split('\n') {
        let line = line.trim_matches(is_blank);
        let Some(test) = words(line).first().copied() else {
            continue;
        };
        if !line.starts_with("test_") {
            continue;
        }
        for (end, state) in [
            (" E", TestState::Error),
            (" F", TestState::Failed),
            (" ok", TestState::Passed),
        ] {
            if line.ends_with(end) {
                found.insert(test.to_owned(), state);
            }
        }
    }
    found
}

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("the pattern is fixed and tested")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_leads_to_a_parser_and_back() {
        for (parser, names) in NAMES {
            for name in names {
                assert_eq!(name.parse(), Ok(parser));
            }
            assert_eq!(parser.to_string().parse(), Ok(parser));
        }
        let unknown = "parse_log_cargo".parse::<LogParser>().unwrap_err();
        assert!(unknown.to_string().contains("`parse_log_cargo`"));
        assert_eq!(
            LogParser::of_repository("sympy/sympy"),
            Some(LogParser::Sympy)
        );
        assert_eq!(LogParser::of_repository("a/b"), None);
    }

    proptest::proptest! {
        #[test]
        fn no_log_is_too_odd(log in "(?s).{0,80}|([A-Z]{4,7}|[ .\\[\\]/_\n-]| \\.\\.\\. |ok){0,30}") {
            for (parser, _) in NAMES {
                let _ = parser.parse(&log);
            }
        }
    }
}
