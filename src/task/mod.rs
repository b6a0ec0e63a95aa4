//! What to solve: tasks and task sets.
//!
//! A [`Task`] is one programming problem: what the policy reads ([`Task::instruction`]) and what
//! the grader is given ([`Task::setup`], [`Task::tests`], [`Task::entry_points`]). A [`TaskSet`]
//! holds the tasks of one split, read from a JSON, JSON Lines or parquet file or from a folder in
//! the Hugging Face data set layout; [`TaskSource`] says where that is.
//!
//! The grader never takes names from the policy's program other than the entry points, so they are
//! fixed here, from the reference solution and the tests, before any policy has been asked.

mod error;
mod mbpp;
mod python;
mod rows;
mod set;
mod source;

use serde::{Deserialize, Serialize};

pub use error::TaskError;
pub use set::{SkippedRow, TaskSet, epoch_order};
pub use source::{Split, TaskSource};

/// One problem: its prompt for the policy and its tests for the grader.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// Identifies the task in its set; for MBPP the decimal `task_id`.
    pub id: String,
    /// The statement of the problem, without tests.
    pub prompt: String,
    /// Names a submission must bind at top level and that the tests use, in the order of the
    /// reference solution; never empty.
    pub entry_points: Vec<String>,
    /// Python statements, imports as a rule, that the grader runs before the tests.
    pub setup: Vec<String>,
    /// Python assertions, one test each; never empty.
    pub tests: Vec<String>,
    /// A solution that passes the tests, where the data set has one. Never shown to the policy.
    pub reference: Option<String>,
    /// How many of the first tests the policy is shown; never more than there are.
    pub visible_tests: usize,
}

impl Task {
    /// Returns what the policy is asked: the prompt and the first `visible_tests` tests, worded as
    /// in the MBPP paper (Austin et al. 2021, arXiv:2108.07732, section 3.1).
    ///
    /// With no visible test the entry points are named instead, since a submission that calls its
    /// function something else can not be graded.
    ///
    /// # Examples
    ///
    /// ```
    /// use wardian::task::Task;
    ///
    /// let task = Task {
    ///     id: "1".to_owned(),
    ///     prompt: "Write a function to double a number.".to_owned(),
    ///     entry_points: vec!["double".to_owned()],
    ///     setup: vec![],
    ///     tests: vec!["assert double(2) == 4".to_owned(), "assert double(0) == 0".to_owned()],
    ///     reference: None,
    ///     visible_tests: 1,
    /// };
    /// assert_eq!(
    ///     task.instruction(),
    ///     "Write a function to double a number.\n\n\
    ///      Your code should pass this test:\n\nassert double(2) == 4"
    /// );
    /// ```
    #[must_use]
    pub fn instruction(&self) -> String {
        let visible = self.visible();
        let prompt = self.prompt.trim_end();
        match visible.len() {
            0 => format!(
                "{prompt}\n\nYour code should define: {}",
                self.entry_points.join(", ")
            ),
            1 => format!(
                "{prompt}\n\nYour code should pass this test:\n\n{}",
                visible[0]
            ),
            _ => format!(
                "{prompt}\n\nYour code should pass these tests:\n\n{}",
                visible.join("\n")
            ),
        }
    }

    /// Returns the tests that the policy is shown.
    #[must_use]
    pub fn visible(&self) -> &[String] {
        &self.tests[..self.visible_tests.min(self.tests.len())]
    }

    /// Returns the tests that the policy is not shown.
    #[must_use]
    pub fn hidden(&self) -> &[String] {
        &self.tests[self.visible_tests.min(self.tests.len())..]
    }
}
