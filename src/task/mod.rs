//! What to solve: tasks and task sets.
//!
//! A [`Task`] is one problem: what the policy reads ([`Task::instruction`]) and what the grader is
//! given ([`Task::grade_request`]). It names its grader, so that training, evaluation,
//! `wardian grade` and `wardian task validate` all judge it alike. A [`TaskSet`] holds the tasks of
//! one split, read from a JSON, JSON Lines or parquet file or from a folder in the Hugging Face data
//! set layout; [`TaskSource`] says where that is.
//!
//! The grader never takes names from the policy's program other than the entry points, so they are
//! fixed here, from the reference solution and the tests, before any policy has been asked.
//!
//! # Schemas
//!
//! | data set | known by | grader |
//! |---|---|---|
//! | MBPP, full and sanitized; MBPP+ | `test_list` | `unit_tests` |
//! | `HumanEval`, `HumanEval`+ | `canonical_solution` | `check` |
//! | APPS | `input_output` | `stdio` or `calls` |
//! | `LiveCodeBench` | `public_test_cases` | `stdio` or `calls` |
//! | GSM8K | `question` and `answer` | `numeric` |
//! | one's own | `grader` | the one named |
//!
//! Rows for an environment elsewhere ([`TaskOptions::remote`]) have no schema: they say how it is reset.
//! Tasks that need a sandbox of their own, with a shell, are read by [`harbor`] and [`swebench`], and are tasks of
//! a set like any other ([`RepositoryTask`]): a folder of Harbor's, or rows with `FAIL_TO_PASS`.

mod answers;
mod contest;
mod error;
mod fields;
pub mod harbor;
mod humaneval;
mod json_text;
mod mbpp;
mod own;
mod python;
mod remote;
mod repository;
mod rows;
mod schema;
mod set;
mod source;
pub mod swebench;
mod validation;

use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::grader::{
    DEFAULT_GRADER, GradeRequest, RewardTerms, SubmissionFacts, SubmissionKind, TestCase,
};

pub use error::TaskError;
pub use remote::ResetRow;
pub use repository::{RepositoryTask, is_harbor_folder};
pub use set::{TaskRow, TaskSet, epoch_order};
pub use source::{Split, TaskSource};
pub use validation::{Finding, FindingKind, TaskReport, validate};

/// How task files are read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TaskOptions {
    /// The split; see [`TaskSet::open`].
    pub split: Option<Split>,
    /// How many tests of each task the policy is shown.
    pub visible_tests: usize,
    /// Whether MBPP's `challenge_test_list` is used, too.
    pub challenge_tests: bool,
    /// What grades every task, in place of what its row says.
    pub grader: Option<GraderChoice>,
    /// Whether the rows are for an environment elsewhere, which rewards: they have prompts and arguments of
    /// its reset, and nothing that grades.
    pub remote: bool,
}

/// What grades a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GraderChoice {
    /// The grader of this name.
    Name(String),
    /// A user's grader: Python with `def grade(candidate, task)`.
    Source(String),
}

impl GraderChoice {
    /// Reads a choice: a name, or the path of a Python file, which is read.
    ///
    /// # Errors
    ///
    /// Fails when the file cannot be read or is too large.
    pub fn read(text: &str) -> Result<Self, TaskError> {
        if own::is_python_file(text) {
            own::read_grader(Path::new(text)).map(Self::Source)
        } else {
            Ok(Self::Name(text.to_owned()))
        }
    }
}

/// One problem: its prompt for the policy and its tests for the grader.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Task {
    /// Identifies the task in its set; for MBPP the decimal `task_id`.
    pub id: String,
    /// The statement of the problem, without tests.
    pub prompt: String,
    /// Names a submission must bind at top level and that the tests use, in the order of the
    /// reference solution; empty where what the submission defines does not matter.
    pub entry_points: Vec<String>,
    /// Python statements, imports as a rule, that the grader runs before the tests.
    pub setup: Vec<String>,
    /// Test programs: for most graders one, for `unit_tests` one for each test.
    pub tests: Vec<String>,
    /// Inputs with their outputs, for graders that compare those.
    pub cases: Vec<TestCase>,
    /// A solution that passes the tests, where the data set has one. Never shown to the policy.
    pub reference: Option<String>,
    /// How many of the first tests or cases the policy is shown; never more than there are.
    pub visible_tests: usize,
    /// The name of the grader.
    pub grader: String,
    /// Settings of the grader.
    pub options: Map<String, Value>,
    /// What a submission earns; what the run says unless given.
    pub reward: Option<RewardTerms>,
    /// The weight of each test in `test_fraction`; 1 where there is none.
    pub test_weights: Vec<f64>,
    /// What is worked on in a sandbox with a shell, and judged there; for such tasks alone.
    #[serde(skip)]
    pub repository: Option<Arc<RepositoryTask>>,
}

impl Default for Task {
    fn default() -> Self {
        Self {
            id: String::new(),
            prompt: String::new(),
            entry_points: Vec::new(),
            setup: Vec::new(),
            tests: Vec::new(),
            cases: Vec::new(),
            reference: None,
            visible_tests: 0,
            grader: DEFAULT_GRADER.to_owned(),
            options: Map::new(),
            reward: None,
            test_weights: Vec::new(),
            repository: None,
        }
    }
}

impl Task {
    /// Returns what the policy is asked: the prompt and the first `visible_tests` tests, worded as
    /// in the MBPP paper (Austin et al. 2021, arXiv:2108.07732, section 3.1).
    ///
    /// With no visible test the entry points are named instead, since a submission that calls its
    /// function something else can not be graded. Programs are told that they read standard input;
    /// answers, how to mark them.
    ///
    /// # Examples
    ///
    /// ```
    /// use wardian::task::Task;
    ///
    /// let task = Task {
    ///     prompt: "Write a function to double a number.".to_owned(),
    ///     entry_points: vec!["double".to_owned()],
    ///     tests: vec!["assert double(2) == 4".to_owned(), "assert double(0) == 0".to_owned()],
    ///     visible_tests: 1,
    ///     ..Task::default()
    /// };
    /// assert_eq!(
    ///     task.instruction(),
    ///     "Write a function to double a number.\n\n\
    ///      Your code should pass this test:\n\nassert double(2) == 4"
    /// );
    /// ```
    #[must_use]
    pub fn instruction(&self) -> String {
        let mut parts = vec![self.prompt.trim_end().to_owned()];
        match self.grader.as_str() {
            "stdio" => {
                parts.push(
                    "Your program should read standard input and write standard output.".to_owned(),
                );
                parts.extend(self.visible_cases().iter().map(|case| {
                    format!(
                        "For the input\n\n{}\n\nit should print\n\n{}",
                        case.input.trim_end(),
                        case.output.trim_end()
                    )
                }));
            }
            "numeric" => parts.push(
                "End your answer with a line that holds `####` and the number alone.".to_owned(),
            ),
            _ => {
                parts.extend(self.definitions());
                parts.extend(self.visible_cases().iter().map(|case| {
                    format!(
                        "For the arguments `{}` it should return `{}`.",
                        case.input, case.output
                    )
                }));
            }
        }
        parts.join("\n\n")
    }

    /// Says what the submission has to define: by the visible tests, or by name.
    fn definitions(&self) -> Option<String> {
        let visible = self.visible();
        let is_said = |name: &String| {
            ["def", "class"]
                .iter()
                .any(|keyword| self.prompt.contains(&format!("{keyword} {name}")))
        };
        match visible.len() {
            0 if self.entry_points.iter().all(is_said) => None,
            0 => Some(format!(
                "Your code should define: {}",
                self.entry_points.join(", ")
            )),
            1 => Some(format!(
                "Your code should pass this test:\n\n{}",
                visible[0]
            )),
            _ => Some(format!(
                "Your code should pass these tests:\n\n{}",
                visible.join("\n")
            )),
        }
    }

    /// Returns what the grader is asked about a submission.
    #[must_use]
    pub fn grade_request(&self, code: &str) -> GradeRequest {
        GradeRequest {
            grader: self.grader.clone(),
            code: code.to_owned(),
            setup: self.setup.clone(),
            tests: self.tests.clone(),
            entry_points: self.entry_points.clone(),
            cases: self.cases.clone(),
            options: self.options.clone(),
        }
    }

    /// Returns the program that `completion` makes of the prompt, where the prompt is a program to
    /// be completed, as in `HumanEval`.
    #[must_use]
    pub fn completed(&self, completion: &str) -> Option<String> {
        let program = self.setup.first().filter(|_| self.grader == "check")?;
        let is_completed = |reference: &String| reference.starts_with(program.as_str());
        self.reference
            .as_ref()
            .is_some_and(is_completed)
            .then(|| format!("{program}{completion}"))
    }

    /// Returns what a verdict on `code` does not say about it, for [`RewardTerms::score`].
    #[must_use]
    pub fn submission_facts(&self, code: &str, fuel_limit: u64) -> SubmissionFacts<'_> {
        SubmissionFacts {
            length: code.chars().count(),
            fuel_limit,
            test_weights: &self.test_weights,
            format: None,
        }
    }

    /// Returns whether a submission is a program or a text.
    #[must_use]
    pub fn submission_kind(&self) -> SubmissionKind {
        let is_text = match self.grader.as_str() {
            "numeric" | "exact_match" => true,
            "python" => self.options.get("submission").and_then(Value::as_str) == Some("text"),
            _ => false,
        };
        if is_text {
            SubmissionKind::Text
        } else {
            SubmissionKind::Code
        }
    }

    /// Whether each of `tests` is a test, which can be shown by itself.
    fn has_listed_tests(&self) -> bool {
        match self.grader.as_str() {
            DEFAULT_GRADER | "stdio" | "calls" => true,
            "numeric" | "exact_match" => false,
            _ => self.tests.is_empty(),
        }
    }

    /// Returns the tests that the policy is shown.
    #[must_use]
    pub fn visible(&self) -> &[String] {
        &self.tests[..self.visible_tests.min(self.tests.len())]
    }

    /// Returns the cases that the policy is shown.
    #[must_use]
    pub fn visible_cases(&self) -> &[TestCase] {
        &self.cases[..self.visible_tests.min(self.cases.len())]
    }

    /// Returns the tests that the policy is not shown.
    #[must_use]
    pub fn hidden(&self) -> &[String] {
        &self.tests[self.visible_tests.min(self.tests.len())..]
    }

    /// Returns the cases that the policy is not shown.
    #[must_use]
    pub fn hidden_cases(&self) -> &[TestCase] {
        &self.cases[self.visible_tests.min(self.cases.len())..]
    }
}
