//! Gradings from end to end: a repository whose tests are shell scripts, in a folder of the test's.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use indexmap::IndexMap;
use wardian::grader::swebench::{
    EvalPlan, EvalSetup, EvalType, Expected, LogParser, PatchGrade, PatchJob, SwebenchBonus,
    TestPaths, grade_patch, parse_diff,
};
use wardian::grader::{
    GradingCommand, GradingEnd, GradingFault, GradingFile, GradingOutput, GradingSandbox,
    VerdictStatus,
};

use crate::repository::commit_base;

/// Commands on this machine, with the sandbox's paths below a folder. It keeps nothing in: the tests
/// here run their own scripts alone.
pub(super) struct Folder(PathBuf);

impl Folder {
    fn inside(&self, text: &str) -> String {
        let root = self.0.display();
        text.replace("/testbed", &format!("{root}/testbed"))
            .replace("/tmp/wardian", &format!("{root}/wardian"))
    }
}

impl GradingSandbox for Folder {
    fn exec(&self, command: &GradingCommand) -> Result<GradingOutput, GradingFault> {
        let started = Instant::now();
        let folder = command.workdir.as_deref().unwrap_or("/testbed");
        let argv: Vec<String> = command.argv.iter().map(|word| self.inside(word)).collect();
        let output = Command::new(&argv[0])
            .args(&argv[1..])
            .current_dir(self.inside(folder))
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .output()
            .map_err(|source| GradingFault {
                what: "run a command",
                source: Box::new(source),
                is_guests_doing: false,
                timed_out: false,
            })?;
        Ok(GradingOutput {
            end: GradingEnd::Exited(output.status.code().unwrap_or(137)),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            elapsed: started.elapsed(),
        })
    }

    fn put(&self, path: &str, content: &[u8]) -> Result<(), GradingFault> {
        fs_err::write(self.inside(path), content).map_err(|source| GradingFault {
            what: "write a file",
            source: Box::new(source),
            is_guests_doing: false,
            timed_out: false,
        })
    }

    fn put_all(
        &self,
        folder: &str,
        files: &IndexMap<String, GradingFile>,
    ) -> Result<(), GradingFault> {
        for (path, file) in files {
            self.put(&format!("{folder}/{path}"), &file.content)?;
        }
        Ok(())
    }

    fn get(&self, path: &str, _: u64) -> Result<Option<Vec<u8>>, GradingFault> {
        Ok(fs_err::read(self.inside(path)).ok())
    }
}

pub(super) const TEST_PATCH: &str = "\
diff --git a/tests/test_twice.sh b/tests/test_twice.sh
--- a/tests/test_twice.sh
+++ b/tests/test_twice.sh
@@ -1,2 +1,3 @@
 . src/twice.sh
 check zero $(twice 0) 0
+check two $(twice 2) 4
";

pub(super) const GOLD: &str = "\
diff --git a/src/twice.sh b/src/twice.sh
--- a/src/twice.sh
+++ b/src/twice.sh
@@ -1,4 +1,4 @@
-twice() { echo $(($1 * $1 * 0)); }
+twice() { echo $(($1 * 2)); }
 # one
 # two
 # three
";

/// Turns every test green, as a `conftest.py` can.
pub(super) const CHEAT: &str = "\
diff --git a/tests/conftest.py b/tests/conftest.py
--- a/tests/conftest.py
+++ b/tests/conftest.py
@@ -1 +1 @@
-check() { [ \"$2\" = \"$3\" ] && echo \"PASSED $1\" || { echo \"FAILED $1\"; bad=1; }; }
+check() { echo \"PASSED $1\"; }
";

pub(super) fn repository() -> (tempfile::TempDir, Folder) {
    let root = tempfile::tempdir().expect("a folder can be made");
    let testbed = root.path().join("testbed");
    let write = |name: &str, text: &str| {
        let path = testbed.join(name);
        fs_err::create_dir_all(path.parent().expect("it is in a folder"))
            .expect("folders are made");
        fs_err::write(path, text).expect("files are written");
    };
    write(
        "src/twice.sh",
        "twice() { echo $(($1 * $1 * 0)); }\n# one\n# two\n# three\n",
    );
    write(
        "tests/test_twice.sh",
        ". src/twice.sh\ncheck zero $(twice 0) 0\n",
    );
    // What a runner reads before the tests; the name is one that pytest reads by itself.
    write(
        "tests/conftest.py",
        "check() { [ \"$2\" = \"$3\" ] && echo \"PASSED $1\" || { echo \"FAILED $1\"; bad=1; }; }\n",
    );
    commit_base(&testbed);
    let folder = Folder(root.path().to_owned());
    (root, folder)
}

fn graded_with(patch: &str, tests: &TestPaths, plan: &dyn Fn(&mut EvalSetup)) -> PatchGrade {
    let (_root, folder) = repository();
    let mut setup = EvalSetup {
        workdir: "/testbed".to_owned(),
        environment: Vec::new(),
        base_commit: "base".to_owned(),
        test_files: parse_diff(TEST_PATCH).expect("it is a patch"),
        install: None,
        test_command: "bad=0; . tests/conftest.py; . tests/test_twice.sh; exit $bad".to_owned(),
    };
    plan(&mut setup);
    let expected = Expected {
        fail_to_pass: vec!["two".to_owned()],
        pass_to_pass: vec!["zero".to_owned()],
    };
    let job = PatchJob {
        patch,
        workdir: "/testbed",
        tests,
        test_patch: TEST_PATCH,
        plan: &EvalPlan::new(&setup, "7f"),
        parser: LogParser::Pytest,
        expected: &expected,
        eval_type: EvalType::PassAndFail,
        timeout: Duration::from_secs(60),
        bonus: SwebenchBonus::default(),
        reference_size: 2,
        reference_seconds: None,
    };
    grade_patch(&folder, &job)
}

fn graded(patch: &str) -> PatchGrade {
    let test_patch = parse_diff(TEST_PATCH).expect("it is a patch");
    let reference = parse_diff(GOLD).expect("it is a patch");
    graded_with(patch, &TestPaths::new(&test_patch, &reference), &|_| {})
}

#[test]
fn the_reference_resolves_and_nothing_does_not() {
    let gold = graded(GOLD);
    assert_eq!(
        (gold.verdict.reward, gold.verdict.status),
        (Some(1.0), VerdictStatus::Passed)
    );
    assert!(gold.log.contains("PASSED two"), "{}", gold.log);
    for patch in ["", "words of a model that are no patch"] {
        let nothing = graded(patch);
        assert_eq!(nothing.verdict.reward, Some(0.0));
        assert_eq!(nothing.verdict.status, VerdictStatus::Invalid);
    }
    let other = graded(&GOLD.replace("$(($1 * 2))", "4"));
    assert_eq!(
        (other.verdict.reward, other.verdict.status),
        (Some(0.0), VerdictStatus::Failed)
    );
    assert_eq!(other.verdict.tests[1].message, "it passed before");
}

#[test]
fn a_patch_of_the_runners_settings_turns_nothing_green() {
    let harmless = GOLD.replace("* 2", "* 3");
    let cheat = format!("{CHEAT}{harmless}");
    // The attack works where the whole patch is applied.
    let reached = graded_with(&cheat, &everything_is_source(&cheat), &|_| {});
    assert_eq!(reached.verdict.reward, Some(1.0), "{}", reached.log);
    let met = graded(&cheat);
    assert_eq!(
        (met.verdict.reward, met.verdict.status),
        (Some(0.0), VerdictStatus::Failed)
    );
    assert_eq!(met.dropped, ["tests/conftest.py"]);
    let only = graded(CHEAT);
    assert_eq!(
        (only.verdict.reward, only.verdict.status),
        (Some(0.0), VerdictStatus::Invalid)
    );
}

fn everything_is_source(patch: &str) -> TestPaths {
    TestPaths::new(&[], &parse_diff(patch).expect("it is a patch"))
}

#[test]
fn tests_that_a_patch_weakens_are_restored() {
    let weaken = "--- a/tests/test_twice.sh\n+++ b/tests/test_twice.sh\n@@ -1,2 +1,3 @@\n . src/twice.sh\n check zero $(twice 0) 0\n+check two 4 4\n";
    let patch = format!("{weaken}{}", GOLD.replace("* 2", "* 3"));
    // Even where the change is not left out of the patch: the file is restored from the base.
    let restored = graded_with(&patch, &everything_is_source(&patch), &|_| {});
    assert_eq!(restored.verdict.reward, Some(0.0), "{}", restored.log);
    assert!(restored.log.contains("FAILED two"), "{}", restored.log);
}

#[test]
fn a_patch_that_is_there_already_counts_as_applied() {
    // Of two files one has the change: no way applies it, and yet all of it is in the tree.
    let twice = format!("{GOLD}{}", GOLD.replace("twice.sh", "thrice.sh"));
    let refused = graded(&twice);
    assert_eq!(refused.verdict.status, VerdictStatus::Invalid);
    let message = &refused.verdict.tests[0].message;
    assert!(
        message.contains("the patch does not apply") && message.contains("thrice.sh"),
        "{message}"
    );
}

#[test]
fn a_patch_with_other_lines_around_it_is_fitted() {
    let fuzzy = GOLD.replace("# three", "# other");
    let graded = graded(&fuzzy);
    assert_eq!(
        graded.verdict.reward,
        Some(1.0),
        "{:?}",
        graded.verdict.tests
    );
}

#[test]
fn tests_that_cannot_be_restored_are_nobodys_fault() {
    let test_patch = parse_diff(TEST_PATCH).expect("it is a patch");
    let tests = TestPaths::new(&test_patch, &[]);
    let lost = graded_with(GOLD, &tests, &|setup| setup.base_commit = "gone".to_owned());
    assert_eq!(
        (lost.verdict.reward, lost.verdict.status),
        (None, VerdictStatus::InfraError)
    );
    let killed = graded_with(GOLD, &tests, &|setup| {
        setup.test_command = "echo Killed; exit 137".to_owned();
    });
    assert_eq!(killed.verdict.status, VerdictStatus::InfraError);
    let silent = graded_with(GOLD, &tests, &|setup| {
        setup.test_command = "echo PASSED two; echo PASSED zero; exit 1".to_owned();
    });
    assert_eq!(
        (silent.verdict.reward, silent.verdict.status),
        (Some(0.0), VerdictStatus::Failed)
    );
}

/// The rows that `scripts/demo/swebench_instances.py` makes.
#[test]
fn the_rows_of_the_examples_are_instances() {
    let rows = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/swebench/instances.jsonl");
    let instances = wardian::task::swebench::SwebenchInstance::read_file(&rows).unwrap();
    let counts: Vec<(usize, usize)> = (instances.iter())
        .map(|one| {
            (
                one.expected.fail_to_pass.len(),
                one.expected.pass_to_pass.len(),
            )
        })
        .collect();
    assert_eq!(counts, [(1, 76), (1, 24), (1, 57)]);
    for instance in &instances {
        assert!(
            instance
                .eval_plan("7f")
                .test
                .contains("python3 -m pytest -rA")
        );
        assert!(instance.test_paths().contain("tests/conftest.py"));
    }
}
