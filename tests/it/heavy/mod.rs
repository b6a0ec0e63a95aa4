//! Tasks of Harbor and SWE-bench in a run: episodes in gVisor. The tests fail, and do not skip, where `runsc` is not
//! installed or they do not run as root.

mod builds;
mod episodes;
mod runs;

#[cfg(feature = "k8s")]
pub(crate) use builds::{BuiltTask, check_failed_apart, train_on};
#[cfg(feature = "k8s")]
pub(crate) use runs::{episodes, solve_by_script, told};

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::repository::commit_base;

/// The tasks that are carried.
const HARBOR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/harbor");

/// Mends what the tests of the instance test.
const FIXED: &str = "twice() { echo $(($1 * 2)); }";
/// What stands there at the base.
const WRONG: &str = "twice() { echo $(($1 * 0)); }";

const TEST_PATCH: &str = "\
diff --git a/tests/test_twice.sh b/tests/test_twice.sh
--- a/tests/test_twice.sh
+++ b/tests/test_twice.sh
@@ -1,2 +1,3 @@
 . src/twice.sh
 check zero $(twice 0) 0
+check two $(twice 2) 4
";

fn write(path: &Path, text: &str) {
    fs_err::create_dir_all(path.parent().expect("it is in a folder")).expect("folders are made");
    fs_err::write(path, text).expect("files are written");
}

/// Makes `FOLDER/rows.jsonl` with so many instances, and `FOLDER/repositories` with their repositories, whose tests
/// are shell scripts.
fn instances(folder: &Path, count: usize) -> (PathBuf, PathBuf) {
    let repositories = folder.join("repositories");
    let rows = (0..count).map(|number| {
        let id = format!("a__b-{number}");
        repository(&repositories.join(&id).join("testbed"));
        row(&id).to_string()
    });
    let rows: Vec<String> = rows.collect();
    let path = folder.join("rows.jsonl");
    write(&path, &rows.join("\n"));
    (path, repositories)
}

fn row(id: &str) -> Value {
    let patch = format!(
        "diff --git a/src/twice.sh b/src/twice.sh\n--- a/src/twice.sh\n+++ b/src/twice.sh\n@@ -1,2 +1,2 @@\n\
         -{WRONG}\n+{FIXED}\n # the end\n"
    );
    json!({
        "repo": "a/b", "instance_id": id, "base_commit": "base", "version": "1",
        "problem_statement": "Twice two is not four.",
        "patch": patch, "test_patch": TEST_PATCH, "log_parser": "parse_log_pytest",
        "FAIL_TO_PASS": ["two"], "PASS_TO_PASS": ["zero"], "workdir": "/testbed",
        "environment": ["export SET=by-the-task"],
        "test_command": "bad=0; . tests/conftest.py; . tests/test_twice.sh; exit $bad",
    })
}

fn repository(testbed: &Path) {
    write(
        &testbed.join("src/twice.sh"),
        &format!("{WRONG}\n# the end\n"),
    );
    write(
        &testbed.join("tests/test_twice.sh"),
        ". src/twice.sh\ncheck zero $(twice 0) 0\n",
    );
    write(
        &testbed.join("tests/conftest.py"),
        "check() { [ \"$2\" = \"$3\" ] && echo \"PASSED $1\" || { echo \"FAILED $1\"; bad=1; }; }\n",
    );
    write(&testbed.join(".gitignore"), "*.log\n");
    commit_base(testbed);
}

/// Returns the folders in a folder.
fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs_err::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| path.is_dir()).collect()
}

/// Returns the command lines of processes that name a folder.
fn processes_naming(folder: &Path) -> Vec<String> {
    crate::actor::processes_naming(&folder.to_string_lossy())
}
