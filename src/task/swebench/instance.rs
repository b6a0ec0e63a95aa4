//! One row of SWE-bench.

use std::collections::HashSet;
use std::path::Path;

use serde_json::{Map, Value};

use super::repository::{self, Repository};
use crate::grader::swebench::{
    DiffError, EvalPlan, EvalSetup, EvalType, Expected, FilePatch, LogParser, TestPaths, parse_diff,
};
use crate::task::TaskError;
use crate::task::fields::Fields;
use crate::task::rows::read_rows;

/// The folder of the repository in the images of the data set.
const WORKDIR: &str = "/testbed";

/// Endings of files that are no tests even where the tests' patch changes them.
const NO_TESTS: [&str; 11] = [
    ".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml",
];

/// An issue of a repository, its reference and its tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwebenchInstance {
    /// The id, `OWNER__NAME-NUMBER`.
    pub instance_id: String,
    /// The repository, `owner/name`.
    pub repo: String,
    /// The commit that the policy starts from.
    pub base_commit: String,
    /// The version of the repository, which its commands depend on.
    pub version: String,
    /// The issue.
    pub problem_statement: String,
    /// What was said about it before it was mended. Not shown.
    pub hints_text: String,
    /// The reference.
    pub patch: Vec<FilePatch>,
    /// The patch of the tests, as the row has it.
    pub test_patch: String,
    /// The same, taken apart.
    pub test_files: Vec<FilePatch>,
    /// The tests that count.
    pub expected: Expected,
    /// The reader of the runner's output.
    pub log_parser: LogParser,
    /// How the tests that count are judged.
    pub eval_type: EvalType,
    /// The image that the row names.
    image: Option<String>,
    /// The harness's script, where the row has it.
    eval_script: Option<String>,
    setup: EvalSetup,
}

impl SwebenchInstance {
    /// Reads the rows of a `.json`, `.jsonl` or `.parquet` file, in its order.
    ///
    /// Rows of the data set as it was first published have none of `image`, `log_parser`,
    /// `eval_type` and `eval_script`; these then follow from the repository and its version. One's
    /// own rows may give `workdir`, `test_command` and `environment`, a list of shell commands.
    ///
    /// # Errors
    ///
    /// Fails with the row's number where one is no instance or repeats an id.
    pub fn read_file(path: &Path) -> Result<Vec<Self>, TaskError> {
        let mut ids = HashSet::new();
        let mut instances = Vec::new();
        for (row, fields) in read_rows(path)? {
            let instance = Self::read(path, row, &fields)?;
            if !ids.insert(instance.instance_id.clone()) {
                return Err(TaskError::DuplicateId {
                    path: path.to_owned(),
                    row,
                    id: instance.instance_id,
                });
            }
            instances.push(instance);
        }
        if instances.is_empty() {
            return Err(TaskError::Empty {
                path: path.to_owned(),
                split: "all".to_owned(),
                remedy: "give a file that has rows",
            });
        }
        Ok(instances)
    }

    pub(in crate::task) fn read(
        path: &Path,
        row: u64,
        map: &Map<String, Value>,
    ) -> Result<Self, TaskError> {
        let fields = Fields::new(path, row, map);
        let required = |key: &'static str| {
            fields.text(&[key], "give a row of SWE-bench, with all of its fields")
        };
        let optional = |key| fields.optional_text(key).map(Option::unwrap_or_default);
        let repo = required("repo")?;
        let version = optional("version")?;
        let test_patch = required("test_patch")?;
        let diff = |key: &'static str, text: &str| {
            parse_diff(text).map_err(|fault: DiffError| TaskError::Diff {
                path: path.to_owned(),
                row,
                key,
                source: fault,
            })
        };
        let patch = diff("patch", &optional("patch")?)?;
        let test_files = diff("test_patch", &test_patch)?;
        let known = Repository::of(&repo, &version);
        let log_parser = match fields.optional_text("log_parser")? {
            Some(name) => name.parse().ok(),
            None => LogParser::of_repository(&repo),
        };
        let log_parser = log_parser.ok_or_else(|| {
            fields.unsupported(
                if fields.has("log_parser") {
                    "log_parser"
                } else {
                    "repo"
                },
                "only repositories in Python can be graded; name one of their parsers in \
                 `log_parser`",
            )
        })?;
        let eval_type = match optional("eval_type")?.as_str() {
            "" => EvalType::of_repository(&repo),
            "pass_and_fail" => EvalType::PassAndFail,
            "fail_only" => EvalType::FailOnly,
            _ => {
                let remedy = "make it `pass_and_fail` or `fail_only`";
                return Err(fields.unsupported("eval_type", remedy));
            }
        };
        let eval_script = fields.optional_text("eval_script")?;
        let base_commit = required("base_commit")?;
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "._-/".contains(letter);
        if base_commit.starts_with('-') || !base_commit.chars().all(is_plain) {
            return Err(fields.unsupported("base_commit", "give a commit, branch or tag"));
        }
        let own_command = fields.optional_text("test_command")?;
        let command = own_command.or_else(|| {
            let known = known.as_ref()?;
            Some(known.test_command(&directives(&test_files, &repo)))
        });
        if command.is_none() && eval_script.is_none() {
            let remedy = "its commands are not known; give `test_command` or `eval_script`";
            return Err(fields.unsupported("repo", remedy));
        }
        let environment = match fields.list("environment")? {
            Some(commands) => commands,
            None if fields.has("test_command") => Vec::new(),
            None => known
                .as_ref()
                .map(Repository::environment)
                .unwrap_or_default(),
        };
        let own_workdir = fields.optional_text("workdir")?;
        let install = (known.as_ref()).filter(|_| !fields.has("test_command"));
        let setup = EvalSetup {
            workdir: own_workdir.unwrap_or_else(|| WORKDIR.to_owned()),
            environment,
            base_commit: base_commit.clone(),
            test_files: test_files.clone(),
            install: install.map(|known| known.install.to_owned()),
            test_command: command.unwrap_or_default(),
        };
        Ok(Self {
            instance_id: fields.id("instance_id")?,
            problem_statement: required("problem_statement")?,
            hints_text: optional("hints_text")?,
            expected: Expected {
                fail_to_pass: test_list(fields, "FAIL_TO_PASS")?,
                pass_to_pass: test_list(fields, "PASS_TO_PASS")?,
            },
            image: fields.optional_text("image")?,
            repo,
            base_commit,
            version,
            patch,
            test_patch,
            test_files,
            log_parser,
            eval_type,
            eval_script,
            setup,
        })
    }

    /// Returns what the policy is asked.
    #[must_use]
    pub fn prompt(&self) -> String {
        format!(
            "The repository `{}` lies in `{}`. An issue has been reported for it:\n\n\
             <issue>\n{}\n</issue>\n\n\
             Change the sources of the repository so that the issue is resolved. Change no tests: \
             those for this issue are kept apart, and your changes to tests are undone before they \
             run. You need not commit anything; what counts is the state of the files when you are \
             done.",
            self.repo,
            self.workdir(),
            self.problem_statement.trim()
        )
    }

    /// Returns the shell commands before any other: an environment that is to be active.
    #[must_use]
    pub fn environment(&self) -> &[String] {
        &self.setup.environment
    }

    /// Returns the folder of the repository in the sandbox.
    #[must_use]
    pub fn workdir(&self) -> &str {
        &self.setup.workdir
    }

    /// Returns the image to start from: the row's, or the published one of the instance.
    #[must_use]
    pub fn image(&self) -> String {
        self.image.clone().unwrap_or_else(|| {
            let id = self.instance_id.replace("__", "_1776_").to_lowercase();
            format!("swebench/sweb.eval.x86_64.{id}:latest")
        })
    }

    /// Returns the folder-safe name of the instance, as for a resource of a cluster.
    #[must_use]
    pub fn resource_name(&self) -> String {
        let name = self.instance_id.to_lowercase();
        name.replace("__", "-")
            .replace(|letter: char| !letter.is_ascii_alphanumeric(), "-")
    }

    /// Returns which files belong to the tests.
    #[must_use]
    pub fn test_paths(&self) -> TestPaths {
        TestPaths::new(&self.test_files, &self.patch)
    }

    /// Returns the reference as one text.
    #[must_use]
    pub fn reference(&self) -> String {
        self.patch.iter().map(|file| file.text.as_str()).collect()
    }

    /// Returns how many lines the reference adds or removes.
    #[must_use]
    pub fn reference_size(&self) -> usize {
        self.patch
            .iter()
            .map(|file| file.added + file.removed)
            .sum()
    }

    /// Plans the evaluation; `nonce` has to be new for each.
    #[must_use]
    pub fn eval_plan(&self, nonce: &str) -> EvalPlan {
        match &self.eval_script {
            Some(script) => EvalPlan::official(script, nonce),
            None => EvalPlan::new(&self.setup, nonce),
        }
    }
}

/// Reads a list of tests: JSON as text in the published files, or a list.
fn test_list(fields: Fields<'_>, key: &'static str) -> Result<Vec<String>, TaskError> {
    let list = match fields.value(key) {
        Some(Value::String(text)) => {
            serde_json::from_str(text).map_err(|source| TaskError::Field {
                path: fields.path.to_owned(),
                row: fields.row,
                key,
                expected: "a list of tests",
                source,
            })?
        }
        Some(_) => fields.list(key)?.unwrap_or_default(),
        None => return Err(fields.missing(key, "give a row of SWE-bench, with all of its fields")),
    };
    if key == "FAIL_TO_PASS" && list.is_empty() {
        return Err(fields.empty(key));
    }
    Ok(list)
}

/// Returns what the runner is told to run: the files of the tests' patch.
fn directives(test_files: &[FilePatch], repo: &str) -> Vec<String> {
    (test_files.iter())
        .filter_map(|file| file.new.as_deref())
        .filter(|path| !NO_TESTS.iter().any(|ending| path.ends_with(ending)))
        .map(|path| repository::directive(repo, path))
        .collect()
}
