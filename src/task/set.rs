//! A collection of tasks, read from a file or a folder.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use rand::seq::SliceRandom as _;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng as _;
use serde_json::Value;

use super::repository::{harbor_tasks, is_harbor_folder};
use super::rows::read_rows;
use super::{RepositoryTask, Split, Task, TaskError, TaskOptions, schema, swebench};

/// A row of a task file.
#[derive(Debug)]
pub struct TaskRow {
    /// Its number in its file, counted from 1.
    pub row: u64,
    /// What it says, or why that is no task.
    pub task: Result<Task, TaskError>,
}

/// The tasks of one split, in file order, with ids of their own.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskSet {
    tasks: Vec<Task>,
}

impl TaskSet {
    /// Reads the tasks at `path`, showing the policy `visible_tests` tests of each.
    ///
    /// A folder of Harbor's tasks, or one of them, is read whole; it has no splits.
    ///
    /// A file (`.json` with an array of rows, `.jsonl`, `.parquet`) is read whole without a split;
    /// with one, its rows are chosen by the published ranges of MBPP's `task_id`
    /// ([`Split::of_mbpp`]). A folder must have a split's files: `train.jsonl`, `train.json` or
    /// `train-00000-of-00001.parquet`, there or in its `data` folder.
    ///
    /// # Errors
    ///
    /// Fails when nothing is there, when a row is malformed, or when no row is left.
    pub fn open(
        path: &Path,
        split: Option<Split>,
        visible_tests: usize,
    ) -> Result<Self, TaskError> {
        Self::open_with(
            path,
            &TaskOptions {
                split,
                visible_tests,
                ..TaskOptions::default()
            },
        )
    }

    /// Reads the tasks at `path` as [`TaskSet::open`] does.
    ///
    /// # Errors
    ///
    /// As for [`TaskSet::open`].
    pub fn open_with(path: &Path, options: &TaskOptions) -> Result<Self, TaskError> {
        let tasks = Self::rows(path, options)?
            .into_iter()
            .map(|row| row.task)
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self { tasks })
    }

    /// Reads the rows at `path`: each a task, or why it is none.
    ///
    /// # Errors
    ///
    /// Fails when nothing is there, when a file cannot be read, or when no row is left.
    pub fn rows(path: &Path, options: &TaskOptions) -> Result<Vec<TaskRow>, TaskError> {
        let split = options.split;
        if path.is_dir() && is_harbor_folder(path) {
            if let Some(split) = split {
                return Err(TaskError::NoSplit {
                    path: path.to_owned(),
                    split: split.to_string(),
                    available: "Harbor's tasks, which have none: leave the split out".to_owned(),
                });
            }
            let rows = harbor_tasks(path)?.map(|(row, task)| TaskRow { row, task });
            return Ok(rows.collect());
        }
        let files = if path.is_dir() {
            split_files(path, split.unwrap_or(Split::Train))?
        } else if path.exists() {
            vec![path.to_owned()]
        } else {
            return Err(TaskError::NotFound {
                path: path.display().to_string(),
            });
        };
        let by_range = if path.is_dir() { None } else { split };
        let mut rows = Vec::new();
        let mut ids = HashSet::new();
        for file in &files {
            for (row, fields) in read_rows(file)? {
                let mut task = schema::parse(file, row, &fields, options);
                if let Ok(Task { id, .. }) = &task {
                    if by_range.is_some() && Split::of_mbpp(id) != by_range {
                        continue;
                    }
                    if !ids.insert(id.clone()) {
                        task = Err(TaskError::DuplicateId {
                            path: file.clone(),
                            row,
                            id: id.clone(),
                        });
                    }
                }
                rows.push(TaskRow { row, task });
            }
        }
        if rows.is_empty() {
            return Err(TaskError::Empty {
                path: path.to_owned(),
                split: split.map_or_else(|| "all".to_owned(), |split| split.to_string()),
                remedy: if by_range.is_some() {
                    "in a single file splits are MBPP's id ranges, so leave the split out or give a \
                     folder with a file for each split"
                } else {
                    "give a file that has rows"
                },
            });
        }
        Ok(rows)
    }

    /// Returns so many tasks of an environment elsewhere, at least one, that differ in their resets' seeds,
    /// from 0.
    #[must_use]
    pub fn of_seeds(count: u32) -> Self {
        let task = |seed: u32| {
            let arguments = [("seed".to_owned(), Value::from(seed))];
            Task::for_remote(seed.to_string(), &[], &arguments.into_iter().collect())
        };
        Self {
            tasks: (0..count.max(1)).map(task).collect(),
        }
    }

    /// Returns how many tasks there are; never zero.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "a set without a task can not be opened"
    )]
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Returns the tasks in file order.
    #[must_use]
    pub fn tasks(&self) -> &[Task] {
        &self.tasks
    }

    /// Returns the task with this id.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<&Task> {
        self.tasks.iter().find(|task| task.id == id)
    }

    /// Divides the tasks into those to learn from and a fifth, at least one, to measure on.
    ///
    /// The fifth is chosen by a hash of the ids, so it is the same in every run and does not depend
    /// on the order of the file. Of instances of SWE-bench each repository gives its share
    /// ([`swebench::divide`], with the seed 0).
    #[must_use]
    pub fn divide(self) -> (Self, Self) {
        if let Some(instances) = self.instances() {
            let chosen = swebench::held_out(instances.into_iter(), (self.len() / 5).max(1), 0);
            let is_held_out = |task: &Task| chosen.contains(&task.id);
            return self.parted(is_held_out);
        }
        let mut ranked: Vec<_> = (self.tasks.iter())
            .map(|task| {
                (
                    *blake3::hash(task.id.as_bytes()).as_bytes(),
                    task.id.clone(),
                )
            })
            .collect();
        ranked.sort_unstable();
        ranked.truncate((self.tasks.len() / 5).max(1));
        self.parted(|task: &Task| ranked.iter().any(|(_, id)| *id == task.id))
    }

    /// Returns the ids of a set of SWE-bench, each with its repository.
    fn instances(&self) -> Option<Vec<(&str, &str)>> {
        (self.tasks.iter())
            .map(|task| match task.repository.as_deref() {
                Some(RepositoryTask::Swebench(instance)) => {
                    Some((task.id.as_str(), instance.repo.as_str()))
                }
                _ => None,
            })
            .collect()
    }

    fn parted(self, is_held_out: impl Fn(&Task) -> bool) -> (Self, Self) {
        let (mut training, mut held_out) = (self.clone(), self);
        training.tasks.retain(|task| !is_held_out(task));
        held_out.tasks.retain(is_held_out);
        (training, held_out)
    }

    /// Keeps the first `limit` tasks in file order, at least one.
    pub fn truncate(&mut self, limit: usize) {
        self.tasks.truncate(limit.max(1));
    }

    /// Returns the tasks as those of one of several environments: their ids begin with its name and a
    /// slash, so that they are no other environment's.
    #[must_use]
    pub fn of_environment(mut self, name: &str) -> Self {
        for task in &mut self.tasks {
            task.id.insert(0, '/');
            task.id.insert_str(0, name);
        }
        self
    }

    /// Returns the tasks of both; no id may be in both.
    #[must_use]
    pub fn with(mut self, others: Self) -> Self {
        self.tasks.extend(others.tasks);
        self
    }

    /// Returns a digest (BLAKE3) of what is asked and tested, in order: sets with the same one give the same
    /// episodes and the same scores, but for how many of the tests the policy is shown.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for task in &self.tasks {
            let Task {
                id,
                prompt,
                setup,
                tests,
                cases,
                entry_points,
                grader,
                options,
                ..
            } = task;
            let asked = (id, prompt, entry_points);
            let tested = (grader, setup, tests, cases, options);
            let text = serde_json::json!([asked, tested]).to_string();
            hasher.update(blake3::hash(text.as_bytes()).as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Returns `count` tasks from place `first` on of an endless sequence of epochs, each a new
    /// permutation by `seed` (see [`epoch_order`]). A resumed run that asks for the same place gets the
    /// same tasks.
    pub fn stretch(&self, seed: u64, first: u64, count: usize) -> Vec<&Task> {
        let len = self.tasks.len() as u64;
        let mut order = (u64::MAX, Vec::new());
        (first..first + count as u64)
            .filter_map(|position| {
                let epoch = position / len;
                if order.0 != epoch {
                    order = (epoch, epoch_order(self.tasks.len(), seed, epoch));
                }
                let place = usize::try_from(position % len).ok()?;
                order.1.get(place).and_then(|index| self.tasks.get(*index))
            })
            .collect()
    }
}

/// Returns the order of `len` tasks in one epoch: a Fisher–Yates permutation from a `ChaCha`
/// stream of its own, so that any epoch can be had without the ones before it.
#[must_use]
pub fn epoch_order(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(epoch);
    let mut order: Vec<usize> = (0..len).collect();
    order.shuffle(&mut rng);
    order
}

/// Returns the files of a split in a folder, in name order.
fn split_files(folder: &Path, split: Split) -> Result<Vec<PathBuf>, TaskError> {
    let mut available: Vec<String> = Vec::new();
    for place in [folder.to_owned(), folder.join("data")] {
        if !place.is_dir() {
            continue;
        }
        let mut files = Vec::new();
        for path in list(&place)? {
            match split_of(&path) {
                Some(found) if found == split => files.push(path),
                Some(found) => available.push(format!("split `{found}`")),
                None => {
                    // A configuration, as `full` and `sanitized` of MBPP.
                    let holds_split = |path: &PathBuf| split_of(path).is_some();
                    if path.is_dir()
                        && !path.ends_with("data")
                        && list(&path)?.iter().any(holds_split)
                    {
                        available.push(format!("folder `{}`", path.display()));
                    }
                }
            }
        }
        if !files.is_empty() {
            return Ok(files);
        }
    }
    available.sort();
    available.dedup();
    Err(TaskError::NoSplit {
        path: folder.to_owned(),
        split: split.to_string(),
        available: if available.is_empty() {
            "none".to_owned()
        } else {
            available.join(", ")
        },
    })
}

fn list(folder: &Path) -> Result<Vec<PathBuf>, TaskError> {
    let io = |source| TaskError::Io {
        path: folder.to_owned(),
        source,
    };
    let mut paths: Vec<PathBuf> = fs_err::read_dir(folder)
        .and_then(|entries| {
            entries
                .map(|entry| entry.map(|entry| entry.path()))
                .collect()
        })
        .map_err(io)?;
    paths.sort();
    Ok(paths)
}

/// Returns the split that a file's name says: `test.jsonl` or `test-00000-of-00001.parquet`.
fn split_of(path: &Path) -> Option<Split> {
    let known = ["json", "jsonl", "parquet"];
    let extension = path.extension()?.to_str()?;
    let stem = path.file_stem()?.to_str()?;
    let name = stem.split_once('-').map_or(stem, |(name, _)| name);
    known.contains(&extension).then_some(())?;
    Split::ALL.into_iter().find(|split| split.as_str() == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_is_a_permutation_and_the_next_one_is_another() {
        let order = epoch_order(50, 7, 3);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        assert_eq!(order, epoch_order(50, 7, 3));
        assert_ne!(order, epoch_order(50, 7, 4));
        assert_ne!(order, epoch_order(50, 8, 3));
    }

    #[test]
    fn steps_run_through_each_epoch_once() {
        let task = |id: usize| Task {
            id: id.to_string(),
            tests: vec!["assert f()".to_owned()],
            ..Task::default()
        };
        let set = TaskSet {
            tasks: (0..7).map(task).collect(),
        };
        let seen: Vec<&str> = (0..7)
            .flat_map(|step| set.stretch(1, step * 3, 3))
            .map(|task| task.id.as_str())
            .collect();
        assert_eq!(seen.len(), 21);
        for epoch in seen.chunks(7) {
            let distinct: HashSet<_> = epoch.iter().collect();
            assert_eq!(distinct.len(), 7);
        }
        assert_eq!(set.stretch(1, 12, 3), set.stretch(1, 12, 3));
        // Stretches of other lengths go over the same sequence.
        let ids = |tasks: Vec<&Task>| -> Vec<String> {
            tasks.into_iter().map(|task| task.id.clone()).collect()
        };
        let pieces: Vec<String> = [(0, 5), (5, 0), (5, 1), (6, 15)]
            .into_iter()
            .flat_map(|(first, count)| ids(set.stretch(1, first, count)))
            .collect();
        assert_eq!(pieces, ids(set.stretch(1, 0, 21)));
        assert_eq!(pieces, seen);
    }

    #[test]
    fn environments_have_ids_of_their_own() {
        let set = || TaskSet {
            tasks: vec![Task {
                id: "a/1".to_owned(),
                ..Task::default()
            }],
        };
        let both = set().of_environment("x").with(set().of_environment("y"));
        let ids: Vec<&str> = both.tasks().iter().map(|task| task.id.as_str()).collect();
        assert_eq!(ids, ["x/a/1", "y/a/1"]);
    }

    #[test]
    fn file_names_say_their_split() {
        let split = |name: &str| split_of(Path::new(name));
        assert_eq!(split("a/train-00000-of-00002.parquet"), Some(Split::Train));
        assert_eq!(split("validation.jsonl"), Some(Split::Validation));
        assert_eq!(
            (split("train.txt"), split("training.json"), split("train")),
            (None, None, None)
        );
    }
}
