//! The commands of an evaluation: the tests as the task has them, and then their runner.

use super::diff::FilePatch;
use super::log::Markers;

/// Where the task's patch of the tests lies in the sandbox.
pub const TEST_PATCH_PATH: &str = "/tmp/wardian-tests.diff";

/// The line with the runner's exit status in a script of the harness.
const OFFICIAL_STATUS: &str = "SWEBENCH_TEST_EXIT_CODE";

/// What an evaluation runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EvalSetup {
    /// The folder of the repository.
    pub workdir: String,
    /// Shell commands before any other: an environment that is to be active.
    pub environment: Vec<String>,
    /// The commit that the tests are restored from.
    pub base_commit: String,
    /// The task's patch of the tests.
    pub test_files: Vec<FilePatch>,
    /// The shell command that installs what the patch changed; it may fail.
    pub install: Option<String>,
    /// The shell command that runs the tests.
    pub test_command: String,
}

/// The scripts of an evaluation, for `bash`, and what their output becomes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvalPlan {
    /// Brings the tests to the task's state; a failure of it is the environment's.
    pub prepare: Option<String>,
    /// Runs the tests; its exit status is the runner's.
    pub test: String,
    markers: Markers,
    /// Whether `test` prints the marks.
    is_marked: bool,
}

impl EvalPlan {
    /// Plans an evaluation. `nonce` has to be new for each.
    ///
    /// The files of the tests are restored from the base, whatever became of them, before the
    /// task's patch of them is applied; it has to lie at [`TEST_PATCH_PATH`]. The marks around the
    /// output are put there outside of the sandbox, so that nothing in it can know them.
    #[must_use]
    pub fn new(setup: &EvalSetup, nonce: &str) -> Self {
        let EvalSetup {
            workdir,
            environment,
            base_commit,
            test_files,
            install,
            test_command,
        } = setup;
        let folder = quote(workdir);
        let mut prepare = vec!["set -euo pipefail".to_owned(), format!("cd {folder}")];
        let list = |paths: Vec<&str>| paths.into_iter().map(quote).collect::<Vec<_>>().join(" ");
        let old: Vec<&str> = test_files
            .iter()
            .filter_map(|file| file.old.as_deref())
            .collect();
        let new: Vec<&str> = (test_files.iter())
            .filter(|file| file.old != file.new)
            .filter_map(|file| file.new.as_deref())
            .collect();
        // Before the tests are restored: it runs what the patch may have changed.
        if let Some(install) = install {
            let steps = environment
                .iter()
                .map(String::as_str)
                .chain([install.as_str()]);
            let steps: Vec<&str> = steps.collect();
            prepare.push(format!("( set +eu\n{}\n) || true", steps.join("\n")));
        }
        if !new.is_empty() {
            prepare.push(format!("rm -rf -- {}", list(new)));
        }
        if !old.is_empty() {
            let base = quote(base_commit);
            prepare.push(format!("git checkout --quiet {base} -- {}", list(old)));
        }
        if !test_files.is_empty() {
            prepare.push(format!("git apply --verbose {TEST_PATCH_PATH}"));
        }
        let mut test = vec!["exec 2>&1".to_owned()];
        test.extend(environment.iter().cloned());
        test.push(format!("cd {folder}"));
        test.push(test_command.clone());
        Self {
            prepare: Some(script(&prepare)),
            test: script(&test),
            markers: Markers::with_nonce(nonce),
            is_marked: false,
        }
    }

    /// Plans an evaluation by a script of the harness, with a nonce in the place of its marks and
    /// the runner's exit status as its own.
    ///
    /// Such a script prepares and runs in one shell, so it has to print the marks itself.
    #[must_use]
    pub fn official(eval_script: &str, nonce: &str) -> Self {
        let (official, markers) = (Markers::official(), Markers::with_nonce(nonce));
        let mut lines = vec!["exec 2>&1".to_owned()];
        let mut has_end = false;
        for line in eval_script.lines() {
            if !has_end && line.contains(&official.end) {
                has_end = true;
                lines.push(format!("{OFFICIAL_STATUS}=$?"));
            }
            let line = line.replace(&official.start, &markers.start);
            lines.push(line.replace(&official.end, &markers.end));
        }
        if has_end {
            lines.push(format!("exit ${OFFICIAL_STATUS}"));
        }
        Self {
            prepare: None,
            test: script(&lines),
            markers,
            is_marked: true,
        }
    }

    /// Returns the marks in [`log`](Self::log).
    #[must_use]
    pub fn markers(&self) -> &Markers {
        &self.markers
    }

    /// Makes what `test` printed a log.
    #[must_use]
    pub fn log(&self, output: &str) -> String {
        if self.is_marked {
            output.to_owned()
        } else {
            format!("{}\n{output}\n{}\n", self.markers.start, self.markers.end)
        }
    }
}

fn script(lines: &[String]) -> String {
    let mut script = lines.join("\n");
    script.push('\n');
    script
}

/// Writes a word so that a shell reads it as it is.
pub(super) fn quote(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./=:,@%+".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::grader::swebench::{EvalLog, LogParser, parse_diff};

    fn bash(script: &str) -> (String, Option<i32>) {
        let output = Command::new("bash").arg("-c").arg(script).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (text, output.status.code())
    }

    #[test]
    fn the_plan_of_a_task_restores_its_tests_and_runs_them() {
        let patch = "--- a/t/old test.py\t\n+++ b/t/old test.py\t\n@@ -1 +1 @@\n-a\n+b\n\
                     --- /dev/null\n+++ b/t/new.py\n@@ -0,0 +1 @@\n+b\n";
        let setup = EvalSetup {
            workdir: "/testbed".to_owned(),
            environment: vec!["export A=1".to_owned()],
            base_commit: "abc".to_owned(),
            test_files: parse_diff(patch).unwrap(),
            install: Some("pip install .".to_owned()),
            test_command: "pytest -rA 't/new.py'".to_owned(),
        };
        let plan = EvalPlan::new(&setup, "7f");
        assert_eq!(
            plan.prepare.as_deref(),
            Some(
                "set -euo pipefail\ncd /testbed\n( set +eu\nexport A=1\npip install .\n) || true\n\
                 rm -rf -- t/new.py\ngit checkout --quiet abc -- 't/old test.py'\n\
                 git apply --verbose /tmp/wardian-tests.diff\n"
            )
        );
        assert_eq!(
            plan.test,
            "exec 2>&1\nexport A=1\ncd /testbed\npytest -rA 't/new.py'\n"
        );
        assert!(!plan.test.contains("7f"), "a test could read the nonce");
    }

    #[test]
    fn a_script_of_the_harness_ends_as_its_tests_do() {
        let eval_script = "#!/bin/bash\nset -uxo pipefail\n: '>>>>> Start Test Output'\n\
                           echo PASSED t.py::a; echo 'FAILED t.py::b - x'; (exit 4)\n\
                           : '>>>>> End Test Output'\necho PASSED t.py::b\n";
        let plan = EvalPlan::official(eval_script, "7f");
        let (output, code) = bash(&plan.test);
        assert_eq!(code, Some(4));
        let log = EvalLog::read(&plan.log(&output), plan.markers(), LogParser::Pytest, code);
        let tests = log.unwrap().tests;
        assert_eq!(tests.len(), 2, "{tests:?}");
        assert!(!tests["t.py::b"].has_passed());
    }

    #[test]
    fn words_reach_the_shell_as_they_are() {
        for word in ["a", "", "it's", "$(x) `y` \"z\" \\", "a b;c"] {
            let (output, _) = bash(&format!("printf %s {}", quote(word)));
            assert_eq!(output, word);
        }
    }
}
