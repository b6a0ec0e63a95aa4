//! Patches as git writes them, and others.

use rstest::rstest;

use super::*;

const CHANGE: &str = "diff --git a/src/a.py b/src/a.py\nindex 1..2 100644\n--- a/src/a.py\n+++ b/src/a.py\n@@ -1,2 +1,2 @@ def f():\n-x\n+y\n z\n";

fn file(path: &str) -> String {
    CHANGE.replace("src/a.py", path)
}

#[test]
fn files_are_told_apart_with_their_lines() {
    let patch = format!(
        "From: me\n\n{CHANGE}{}diff --git a/old.py b/new name.py\nsimilarity index 100%\nrename from old.py\n\
         rename to new name.py\ndiff --git a/gone.py b/gone.py\ndeleted file mode 100644\n--- a/gone.py\n\
         +++ /dev/null\n@@ -1 +0,0 @@\n--- a/trap.py\n\\ No newline at end of file\n\
         diff --git a/empty b/empty\nnew file mode 100644\nindex 0000000..e69de29\n",
        file("b.py")
    );
    let files = parse_diff(&patch).unwrap();
    let paths: Vec<_> = (files.iter())
        .map(|file| (file.old.as_deref(), file.new.as_deref()))
        .collect();
    assert_eq!(
        paths,
        [
            (Some("src/a.py"), Some("src/a.py")),
            (Some("b.py"), Some("b.py")),
            (Some("old.py"), Some("new name.py")),
            (Some("gone.py"), None),
            (None, Some("empty")),
        ]
    );
    assert_eq!((files[0].added, files[0].removed), (1, 1));
    // The removed line `-- a/trap.py` looks like the head of a file.
    assert_eq!((files[3].added, files[3].removed), (0, 1));
    let text: String = files.iter().map(|file| file.text.as_str()).collect();
    assert_eq!(format!("From: me\n\n{text}"), patch);
}

#[test]
fn a_patch_without_heads_of_git_is_read_too() {
    let patch = "--- a/x.py\t2026-01-01\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n--- a/y.py\n+++ b/y.py\n@@ -1 +1 @@\n-a\n+b\n";
    let files = parse_diff(patch).unwrap();
    let paths: Vec<&str> = files
        .iter()
        .filter_map(|file| file.new.as_deref())
        .collect();
    assert_eq!(paths, ["x.py", "y.py"]);
}

/// `patch` takes the path of a line without a tab to end at its first blank, and would write another file.
#[rstest]
#[case::hunk("--- /dev/null\n+++ b/conftest.py x\n@@ -0,0 +1 @@\n+b\n")]
#[case::hunk_of_git(
    "diff --git a/conftest.py x b/conftest.py x\nnew file mode 100644\n--- /dev/null\n+++ b/conftest.py x\n@@ -0,0 +1 @@\n+b\n"
)]
#[case::rename("diff --git a/x.py b/y.py\nrename from x.py\nrename to conftest.py x\n")]
fn a_path_with_blanks_ends_where_git_says(#[case] patch: &str) {
    let error = parse_diff(patch).unwrap_err();
    assert!(matches!(error, DiffError::Malformed { .. }), "{error}");
    let closed = patch.replace("+++ b/conftest.py x", "+++ b/conftest.py x\t");
    if closed != patch {
        let files = parse_diff(&closed).unwrap();
        assert_eq!(files[0].new.as_deref(), Some("conftest.py x"));
        assert!(
            files[0].text.contains("+++ b/conftest.py x\t\n"),
            "the tab is kept"
        );
    }
}

#[test]
fn quoted_paths_are_read() {
    let patch = file("src/a.py").replace("a/src/a.py", "\"a/\\303\\251 \\\"q\\\".py\"");
    let patch = patch.replace("b/src/a.py", "\"b/\\303\\251 \\\"q\\\".py\"");
    let files = parse_diff(&patch).unwrap();
    assert_eq!(files[0].new.as_deref(), Some("é \"q\".py"));
}

#[rstest]
#[case::up("../../etc/cron.d/x")]
#[case::inside_up("src/../../x")]
#[case::absolute("/etc/passwd")]
#[case::git(".git/hooks/pre-commit")]
#[case::git_in_a_folder("vendor/.GIT/config")]
#[case::backslash("..\\\\x")]
#[case::dot("./x")]
fn a_path_outside_refuses_the_patch(#[case] path: &str) {
    let error = parse_diff(&format!("{CHANGE}{}", file(path))).unwrap_err();
    assert!(matches!(error, DiffError::Outside { .. }), "{error}");
}

#[test]
fn a_path_with_a_line_end_refuses_the_patch() {
    let patch = CHANGE.replace("a/src/a.py", "\"a/x\\n.py\"");
    let patch = patch.replace("b/src/a.py", "\"b/x\\n.py\"");
    let error = parse_diff(&patch).unwrap_err();
    assert!(matches!(error, DiffError::Outside { .. }), "{error}");
}

#[rstest]
#[case::new_link("new file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc/passwd\n")]
#[case::changed_link("index 1..2 120000\n--- a/l\n+++ b/l\n@@ -1 +1 @@\n-a\n+/etc/passwd\n")]
#[case::submodule(
    "new file mode 160000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+Subproject commit 1\n"
)]
#[case::becomes_a_link("old mode 100644\nnew mode 120000\n")]
fn links_and_submodules_refuse_the_patch(#[case] rest: &str) {
    let error = parse_diff(&format!("diff --git a/l b/l\n{rest}")).unwrap_err();
    assert!(matches!(error, DiffError::Special { .. }), "{error}");
}

#[rstest]
#[case::two_names("diff --git a/x b/x\n--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n")]
#[case::other_name("diff --git a/x b/x\n--- a/y\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n")]
#[case::other_rename(
    "diff --git a/x b/y\nrename from x\nrename to y\n--- a/x\n+++ b/z\n@@ -1 +1 @@\n-a\n+b\n"
)]
#[case::no_name("diff --git a/x b/y\nindex 1..2 100644\n")]
#[case::new_but_old(
    "diff --git a/x b/x\nnew file mode 100644\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
)]
#[case::too_short("diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,3 +1 @@\n-a\n+b\n")]
#[case::too_long("diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n+c\n")]
#[case::ed_script("diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n1d\n!touch /tmp/x\n")]
#[case::index_line(
    "Index: y\ndiff --git a/x b/x\nIndex: y\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
)]
#[case::open_quote("diff --git a/x b/x\n--- \"a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")]
#[case::no_marks("diff --git x x\n--- x\n+++ x\n@@ -1 +1 @@\n-a\n+b\n")]
fn what_git_does_not_write_is_refused(#[case] patch: &str) {
    let error = parse_diff(patch).unwrap_err();
    assert!(matches!(error, DiffError::Malformed { .. }), "{error}");
}

#[test]
fn tests_are_left_out_and_sources_kept() {
    let test_patch = parse_diff(&file("pkg/test/unit.py")).unwrap();
    let reference = parse_diff(&file("setup.cfg")).unwrap();
    let tests = TestPaths::new(&test_patch, &reference);
    let names = [
        "src/a.py",
        "setup.cfg",
        "pkg/testing.py",
        "lib/test/client.py",
        "pkg/test/unit.py",
        "pkg/test/helpers.py",
        "tests/data/x.json",
        "conftest.py",
        "src/conftest.py",
        "sitecustomize.py",
        "a.pth",
        "tox.ini",
        "pyproject.toml",
        "src/test_a.py",
        "src/a_test.py",
    ];
    let patch: String = names.iter().map(|name| file(name)).collect();
    let split = split_patch(&patch, &tests).unwrap();
    assert_eq!(split.dropped, names[4..]);
    assert_eq!(
        split.kept,
        names[..4].iter().map(|name| file(name)).collect::<String>()
    );
    assert_eq!(split.size, 8);
}

#[test]
fn a_test_renamed_to_a_source_is_left_out() {
    let patch = "diff --git a/tests/x.py b/src/x.py\nsimilarity index 100%\nrename from tests/x.py\nrename to src/x.py\n";
    let split = split_patch(patch, &TestPaths::default()).unwrap();
    assert_eq!((split.kept.as_str(), split.dropped.len()), ("", 1));
}

#[test]
fn files_that_are_not_text_are_left_out() {
    let patch = format!(
        "diff --git a/x.bin b/x.bin\nindex 1..2 100644\nGIT binary patch\nliteral 3\nKcmZQz\n\nliteral 0\nHc\n\n\
         diff --git a/y.bin b/y.bin\nindex 1..2 100644\nBinary files a/y.bin and b/y.bin differ\n{CHANGE}"
    );
    let split = split_patch(&patch, &TestPaths::default()).unwrap();
    assert_eq!(split.dropped, ["x.bin", "y.bin"]);
    assert_eq!(split.kept, CHANGE);
}

proptest::proptest! {
    #[test]
    fn what_is_kept_reads_as_itself(
        patch in "(diff --git a/x b/x\n|--- a/x\n|\\+\\+\\+ b/x\n|@@ -1 \\+1 @@\n|-a\n|\\+b\n| c\n|\n|new file mode 100644\n){0,14}"
    ) {
        if let Ok(files) = parse_diff(&patch) {
            let text: String = files.iter().map(|file| file.text.as_str()).collect();
            proptest::prop_assert_eq!(parse_diff(&text).unwrap(), files);
        }
    }
}

#[rstest::rstest]
#[case("src/sitecustomize/__init__.py", true)]
#[case("src/x.dist-info/entry_points.txt", true)]
#[case("src/x.egg-info/entry_points.txt", true)]
#[case("pytest.py", true)]
#[case("toxfile.py", true)]
#[case("pytest/__main__.py", true)]
#[case("_pytest/config/__init__.py", true)]
#[case("pluggy.cpython-312-x86_64-linux-gnu.so", true)]
#[case("bin/test", true)]
#[case("bin/doctest", false)]
#[case("src/pytest.py", false)]
#[case("src/flask/customize.py", false)]
fn what_a_runner_reads_by_itself_is_of_the_tests(#[case] path: &str, #[case] expected: bool) {
    assert_eq!(TestPaths::default().contain(path), expected);
}

#[test]
fn the_runners_own_repository_is_mended_as_others_are() {
    let reference = parse_diff(&file("_pytest/mark.py")).unwrap();
    let tests = TestPaths::new(&[], &reference);
    assert!(!tests.contain("_pytest/mark.py"));
    assert!(!tests.contain("_pytest/python.py"));
    assert!(tests.contain("pluggy/__init__.py"));
}
