//! Tasks with a sandbox of their own, as tasks of a set.

use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::harbor::{HarborError, HarborTask};
use super::swebench::SwebenchInstance;
use super::{Task, TaskError};

/// What stands in the place of a grader's name.
const HARBOR: &str = "harbor";
const SWEBENCH: &str = "swebench";

/// The most bytes of a task's folder.
const MAX_FOLDER: u64 = 4 << 30;

/// A task that is worked on in a sandbox of its own, with a shell.
#[derive(Debug, Clone, PartialEq)]
pub enum RepositoryTask {
    /// A folder in Harbor's format.
    Harbor(Box<HarborTask>),
    /// A row of SWE-bench.
    Swebench(Box<SwebenchInstance>),
}

impl Task {
    /// Makes a task of a folder of Harbor's.
    ///
    /// # Errors
    ///
    /// Fails where a file of it cannot be read.
    pub(super) fn of_harbor(task: HarborTask) -> Result<Self, HarborError> {
        let digest = folder_digest(&task.folder)?;
        let first = task.parts.first();
        Ok(Self {
            id: task.name.clone(),
            prompt: first.map_or_else(String::new, |part| part.instruction.trim().to_owned()),
            grader: HARBOR.to_owned(),
            options: digest_option(&digest),
            repository: Some(Arc::new(RepositoryTask::Harbor(Box::new(task)))),
            ..Self::default()
        })
    }

    /// Makes a task of a row of SWE-bench.
    pub(super) fn of_swebench(instance: SwebenchInstance, row: &Map<String, Value>) -> Self {
        let text = Value::Object(row.clone()).to_string();
        let digest = blake3::hash(text.as_bytes()).to_hex();
        Self {
            id: instance.instance_id.clone(),
            prompt: instance.prompt(),
            grader: SWEBENCH.to_owned(),
            reference: Some(instance.reference()),
            options: digest_option(&digest),
            repository: Some(Arc::new(RepositoryTask::Swebench(Box::new(instance)))),
            ..Self::default()
        }
    }
}

/// What stands for the tests, by which sets are told apart.
fn digest_option(digest: &str) -> Map<String, Value> {
    let mut options = Map::new();
    options.insert("digest".to_owned(), json!(digest));
    options
}

/// Returns what tells a folder from others: what its files hold, are called and whether they can be run.
fn folder_digest(root: &Path) -> Result<String, HarborError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| HarborError::Io { path, source }
    };
    let mut hasher = blake3::Hasher::new();
    let mut left = MAX_FOLDER;
    // Sorted, each behind the folder that it is in.
    let mut waiting: Vec<PathBuf> = vec![root.to_owned()];
    while let Some(path) = waiting.pop() {
        let name = path.strip_prefix(root).unwrap_or(&path);
        let name = name.as_os_str().as_encoded_bytes();
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name);
        // Links lead to what is in the folder: that was checked when it was read.
        let status = fs_err::metadata(&path).map_err(io(&path))?;
        if status.is_dir() {
            if fs_err::symlink_metadata(&path)
                .map_err(io(&path))?
                .is_symlink()
            {
                continue;
            }
            let entries = fs_err::read_dir(&path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
            let mut entries: Vec<PathBuf> = (entries.map_err(io(&path))?.iter())
                .map(fs_err::DirEntry::path)
                .collect();
            entries.sort_by(|one, other| other.cmp(one));
            waiting.extend(entries);
            continue;
        }
        if !status.is_file() {
            continue;
        }
        left = left
            .checked_sub(status.len())
            .ok_or_else(|| HarborError::TooLarge {
                path: root.to_owned(),
                what: "bytes",
                limit: MAX_FOLDER,
            })?;
        let is_executable = status.permissions().mode() & 0o100 != 0;
        hasher.update(&[u8::from(is_executable)]);
        hasher.update(&status.len().to_le_bytes());
        let file = fs_err::File::open(&path).map_err(io(&path))?;
        (hasher.update_reader(file.take(status.len()))).map_err(io(&path))?;
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Returns whether a folder is a task of Harbor's or holds some.
#[must_use]
pub fn is_harbor_folder(path: &Path) -> bool {
    let is_task = |folder: &Path| folder.join("task.toml").is_file();
    if is_task(path) {
        return true;
    }
    let entries = fs_err::read_dir(path).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| is_task(&entry.path()))
}

/// Reads the tasks of a folder of Harbor's, each with its number from 1: a task, or why it is none.
///
/// # Errors
///
/// Fails where the folder cannot be listed, or has two tasks of one name.
pub(super) fn harbor_tasks(
    path: &Path,
) -> Result<impl Iterator<Item = (u64, Result<Task, TaskError>)>, TaskError> {
    let tasks = HarborTask::read_all(path)?;
    let tasks = tasks.into_iter().map(|task| Ok(Task::of_harbor(task?)?));
    Ok((1..).zip(tasks))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::{TaskOptions, TaskSet};

    fn write(folder: &Path, name: &str, text: &str) {
        let path = folder.join(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, text).unwrap();
    }

    fn harbor(folder: &Path, name: &str) {
        let file = |file: &str| format!("{name}/{file}");
        write(
            folder,
            &file("task.toml"),
            "environment.docker_image = \"a\"\n",
        );
        write(folder, &file("instruction.md"), "Say hello.\n");
        write(folder, &file("tests/test.sh"), "#!/bin/sh\n");
    }

    fn open(path: &Path) -> Result<TaskSet, TaskError> {
        TaskSet::open_with(path, &TaskOptions::default())
    }

    #[test]
    fn a_folder_of_harbor_tasks_is_a_set_told_by_what_it_holds() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b", "a"] {
            harbor(folder.path(), name);
        }
        let set = open(folder.path()).unwrap();
        let ids: Vec<&str> = set.tasks().iter().map(|task| task.id.as_str()).collect();
        assert_eq!(ids, ["a", "b"]);
        assert_eq!(set.tasks()[0].instruction(), "Say hello.");
        assert!(matches!(
            set.tasks()[0].repository.as_deref(),
            Some(RepositoryTask::Harbor(_))
        ));
        // The same elsewhere, and another once a test is.
        let copy = tempfile::tempdir().unwrap();
        for name in ["a", "b"] {
            harbor(copy.path(), name);
        }
        let copied = open(copy.path()).unwrap();
        assert_eq!(copied.digest(), set.digest());
        write(copy.path(), "a/tests/test.sh", "#!/bin/bash\n");
        assert_ne!(open(copy.path()).unwrap().digest(), set.digest());
        // One task is a set, too.
        assert_eq!(open(&folder.path().join("a")).unwrap().len(), 1);
        let (training, held_out) = set.divide();
        assert_eq!((training.len(), held_out.len()), (1, 1));
    }

    #[test]
    fn what_is_no_harbor_task_is_named() {
        let folder = tempfile::tempdir().unwrap();
        harbor(folder.path(), "a");
        write(folder.path(), "b/task.toml", "version = \"9\"\n");
        let rows = TaskSet::rows(folder.path(), &TaskOptions::default()).unwrap();
        assert!(rows[0].task.is_ok() && rows[1].task.is_err());
        let options = TaskOptions {
            split: Some(crate::task::Split::Test),
            ..TaskOptions::default()
        };
        let error = TaskSet::rows(folder.path(), &options).unwrap_err();
        assert!(error.to_string().contains("leave the split out"), "{error}");
    }

    fn row(id: &str, repo: &str) -> Value {
        json!({
            "repo": repo, "instance_id": id, "base_commit": "base", "version": "1",
            "problem_statement": "Mend it.", "patch": "",
            "test_patch": "--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-a\n+b\n",
            "log_parser": "parse_log_pytest", "test_command": "true",
            "FAIL_TO_PASS": ["a"], "PASS_TO_PASS": [],
        })
    }

    #[test]
    fn rows_of_swebench_are_a_set_divided_by_repository() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let rows = (0..20).map(|number| {
            let repo = if number < 15 { "a/b" } else { "c/d" };
            row(&format!("i-{number}"), repo).to_string()
        });
        fs_err::write(&path, rows.collect::<Vec<_>>().join("\n")).unwrap();
        let set = open(&path).unwrap();
        assert_eq!(set.len(), 20);
        assert!(set.tasks()[0].instruction().contains("Mend it."));
        let digest = set.digest();
        let (training, held_out) = set.divide();
        assert_eq!((training.len(), held_out.len()), (16, 4));
        let of_second = held_out.tasks().iter().filter(|task| {
            matches!(
                task.repository.as_deref(),
                Some(RepositoryTask::Swebench(instance)) if instance.repo == "c/d"
            )
        });
        assert_eq!(of_second.count(), 1, "each repository gives its share");

        let mut changed: Vec<Value> = (0..20)
            .map(|number| row(&format!("i-{number}"), "a/b"))
            .collect();
        changed[0]["PASS_TO_PASS"] = json!(["b"]);
        let text: Vec<String> = changed.iter().map(Value::to_string).collect();
        fs_err::write(&path, text.join("\n")).unwrap();
        assert_ne!(open(&path).unwrap().digest(), digest);
    }
}
