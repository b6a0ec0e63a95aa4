//! Task sets read from files, and the entry points of all of MBPP.

use std::path::{Path, PathBuf};

use rstest::rstest;
use wardian::task::{Split, Task, TaskError, TaskSet};

/// Returns a folder of the shared reference data, or says why the test does nothing.
#[expect(
    clippy::print_stderr,
    reason = "a test that does nothing has to say so"
)]
fn shared(path: &str) -> Option<PathBuf> {
    let Some(root) = std::env::var_os("WARDIAN_SHARED") else {
        eprintln!("skipped: WARDIAN_SHARED does not name the folder of reference data");
        return None;
    };
    Some(PathBuf::from(root).join(path))
}

fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    fs_err::create_dir_all(path.parent().expect("files are in a folder")).expect("folder is made");
    fs_err::write(&path, text).expect("file is written");
    path
}

fn row(id: u32) -> String {
    format!(
        r#"{{"task_id": {id}, "prompt": "Do {id}.", "code": "def f{id}(): return 1", "test_imports": [], "test_list": ["assert f{id}() == 1"]}}"#
    )
}

fn ids(set: &TaskSet) -> Vec<&str> {
    set.tasks().iter().map(|task| task.id.as_str()).collect()
}

fn message(error: &TaskError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[test]
fn json_and_json_lines_give_the_same_tasks() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [row(601), row(7), row(20)];
    let array = write(folder.path(), "a.json", &format!("[{}]", rows.join(",\n")));
    let lines = write(
        folder.path(),
        "b.jsonl",
        &format!("{}\n\n", rows.join("\n")),
    );
    let read = TaskSet::open(&array, None, 1).unwrap();
    assert_eq!(read, TaskSet::open(&lines, None, 1).unwrap());
    assert_eq!(ids(&read), ["601", "7", "20"]);
    assert_eq!(
        ids(&TaskSet::open(&array, Some(Split::Train), 1).unwrap()),
        ["601"]
    );
}

#[test]
fn a_folder_has_a_file_for_each_split() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "set/train-00000-of-00002.jsonl", &row(1));
    write(folder.path(), "set/train-00001-of-00002.jsonl", &row(2));
    write(
        folder.path(),
        "set/data/test.json",
        &format!("[{}]", row(3)),
    );
    let set = folder.path().join("set");
    assert_eq!(
        ids(&TaskSet::open(&set, Some(Split::Train), 1).unwrap()),
        ["1", "2"]
    );
    assert_eq!(ids(&TaskSet::open(&set, None, 1).unwrap()), ["1", "2"]);
    assert_eq!(
        ids(&TaskSet::open(&set, Some(Split::Test), 1).unwrap()),
        ["3"]
    );
    let error = TaskSet::open(&set, Some(Split::Validation), 1).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("has no file for split `validation`; it has split `test`, split `train`"),
        "{error}"
    );
    let error = TaskSet::open(folder.path(), Some(Split::Train), 1).unwrap_err();
    assert!(error.to_string().contains("it has folder `"), "{error}");
}

#[rstest]
#[case::cut_array("a.json", format!("[{}, {}", row(1), &row(2)[..40]), "a.json` row 2 is not valid JSON; it may be cut short, so fetch or fix the file: EOF while parsing an object at line 1 column")]
#[case::text_after_array("a.json", format!("[{}] x", row(1)), "row 2 is not valid JSON")]
#[case::no_array(
    "a.json",
    row(1),
    "row 1 is an object, not an object with named fields"
)]
#[case::array_of_numbers("a.json", "[1]".to_owned(), "row 1 is a number, not an object with named fields")]
#[case::cut_line("a.jsonl", format!("{}\n{}", row(1), &row(2)[..40]), "a.jsonl` row 2 is not valid JSON")]
#[case::repeated_id("a.jsonl", format!("{}\n{}", row(1), row(1)), "row 2 repeats task id `1` of an earlier row")]
#[case::not_parquet(
    "a.parquet",
    row(1),
    "a.parquet` is not a readable parquet file; it may be cut short, so fetch it again"
)]
#[case::unknown_ending(
    "a.csv",
    row(1),
    "ends in none of `.json`, `.jsonl` and `.parquet`; rename or convert it"
)]
#[case::empty("a.jsonl", "\n".to_owned(), "has no row in split `all`; give a file that has rows")]
fn a_bad_file_is_refused_with_its_row(
    #[case] name: &str,
    #[case] text: String,
    #[case] expected: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), name, &text);
    let error = message(&TaskSet::open(&path, None, 1).unwrap_err());
    assert!(error.contains(expected) && error.contains(name), "{error}");
}

#[test]
fn a_split_of_a_file_without_mbpp_ids_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "own.jsonl", &row(5000));
    let error = TaskSet::open(&path, Some(Split::Test), 1)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("has no row in split `test`; in a single file splits are"),
        "{error}"
    );
    let error = TaskSet::open(&folder.path().join("gone.jsonl"), None, 1)
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("no file or folder `"), "{error}");
}

/// One line for each task: id, entry points and setup, tab-separated.
fn digest_text(set: &TaskSet) -> String {
    let line = |task: &Task| {
        format!(
            "{}\t{}\t{}\n",
            task.id,
            task.entry_points.join(","),
            task.setup.join(";")
        )
    };
    let rows = set
        .tasks()
        .iter()
        .filter(|task| !["367", "927"].contains(&&*task.id));
    rows.map(line).collect()
}

/// The digests are of what CPython's `ast` module finds, with every import given once: the names
/// bound by top-level definitions and single-name assignments that `ast.walk` finds as a `Name` in
/// the tests, without those that `test_imports` and the needed imports of the code bind. The files
/// are the rows of sanitized and full MBPP outside the hold-out, 299 and 846; the digest leaves out
/// the two rows of the full file whose setup runs after the submission.
#[rstest]
#[case::sanitized(
    "sanitized-mbpp.open.json",
    299,
    "a399f69fd1b3464058ee8e52be5df888d51e9407fd0e39803b0e2a78ebb62124"
)]
#[case::full(
    "mbpp.open.jsonl",
    846,
    "19da44544ccf24ae8c2dfecb14a9ca3176b20508ed00bada9a942510b8b6d893"
)]
fn entry_points_of_mbpp_are_those_that_ast_finds(
    #[case] file: &str,
    #[case] count: usize,
    #[case] expected: &str,
) {
    let Some(data) = shared("data/mbpp") else {
        return;
    };
    let set = TaskSet::open(&data.join(file), None, 1).unwrap();
    assert_eq!(set.len(), count);
    let text = digest_text(&set);
    assert_eq!(
        blake3::hash(text.as_bytes()).to_hex().as_str(),
        expected,
        "{text}"
    );
}

#[test]
fn parquet_splits_of_mbpp_equal_the_json_file() {
    let Some(data) = shared("data/mbpp") else {
        return;
    };
    for (split, count) in [
        (Split::Prompt, 7),
        (Split::Train, 120),
        (Split::Validation, 43),
        (Split::Test, 129),
    ] {
        let table = TaskSet::open(&data.join("hf/sanitized"), Some(split), 2).unwrap();
        let json = TaskSet::open(&data.join("sanitized-mbpp.open.json"), Some(split), 2).unwrap();
        assert_eq!(table.len(), count);
        assert_eq!(table, json);
    }
    let error = TaskSet::open(&data.join("hf"), Some(Split::Train), 1)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("full`") && error.contains("sanitized`"),
        "{error}"
    );
}

#[test]
fn full_mbpp_runs_the_setup_of_two_rows_after_the_submission() {
    let Some(data) = shared("data/mbpp") else {
        return;
    };
    let set = TaskSet::open(&data.join("mbpp.open.jsonl"), None, 1).unwrap();
    for (id, function) in [("367", "is_tree_balanced"), ("927", "max_height")] {
        let task = set.get(id).unwrap();
        assert_eq!(task.entry_points, ["Node", function]);
        for test in &task.tests {
            assert!(
                test.starts_with("root = Node(1)") && test.contains("\nassert "),
                "{test}"
            );
        }
    }
    let table = TaskSet::open(&data.join("hf/full"), Some(Split::Train), 1).unwrap();
    let lines = TaskSet::open(&data.join("mbpp.open.jsonl"), Some(Split::Train), 1).unwrap();
    assert_eq!(table.tasks(), lines.tasks());
}

#[rstest]
#[case::humaneval("data/humaneval/HumanEval.jsonl", None, 164, "check")]
#[case::humaneval_table("data/humaneval/hf/openai_humaneval", Some(Split::Test), 164, "check")]
#[case::humaneval_plus("data/humaneval_plus/hf", Some(Split::Test), 164, "check")]
#[case::mbpp_plus("data/mbpp_plus/hf", Some(Split::Test), 267, "unit_tests")]
#[case::gsm8k("data/gsm8k/test.jsonl", None, 1319, "numeric")]
#[case::gsm8k_table("data/gsm8k/hf/main", Some(Split::Train), 1000, "numeric")]
fn published_data_sets_are_read(
    #[case] path: &str,
    #[case] split: Option<Split>,
    #[case] count: usize,
    #[case] grader: &str,
) {
    let Some(path) = shared(path) else {
        return;
    };
    let set = TaskSet::open(&path, split, 1).unwrap();
    assert_eq!(set.len(), count);
    for task in set.tasks() {
        assert_eq!(task.grader, grader);
        assert!(task.reference.is_some() && task.tests.len().max(task.cases.len()) > 0);
    }
}

#[test]
fn tables_hold_what_the_lines_hold() {
    let Some(data) = shared("data") else {
        return;
    };
    let lines = TaskSet::open(&data.join("humaneval/HumanEval.jsonl"), None, 0).unwrap();
    let folder = data.join("humaneval/hf/openai_humaneval");
    let table = TaskSet::open(&folder, Some(Split::Test), 0).unwrap();
    assert_eq!(lines, table);
}
