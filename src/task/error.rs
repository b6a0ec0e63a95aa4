//! Why a task set could not be read: always which file, which row and which key.

use std::path::PathBuf;

/// A failure to read a task set; never a fault of a policy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TaskError {
    // === Where ===
    /// Nothing is at the path and it can not be a repository name.
    #[error(
        "no file or folder `{path}`, and it is not a data set name either; \
         give a path that exists or `owner/name`"
    )]
    NotFound {
        /// The path as it was given.
        path: String,
    },
    /// The repository could not be had from the hub.
    #[error("fetching data set `{repo}` at revision `{revision}`")]
    Hub {
        /// The repository, `owner/name`.
        repo: String,
        /// The branch, tag or commit asked for.
        revision: String,
        /// What the hub said.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The file has an ending that names no known format.
    #[error("`{path}` ends in none of `.json`, `.jsonl` and `.parquet`; rename or convert it")]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// A row, or who reads it, names a grader that does not exist.
    #[error(
        "`{path}` row {row}: there is no grader `{name}`; there are {known}, and Python files that \
         define `grade(candidate, task)`"
    )]
    UnknownGrader {
        /// The file.
        path: PathBuf,
        /// The row, from 1.
        row: u64,
        /// The name that was given.
        name: String,
        /// The names that there are.
        known: String,
    },
    /// The folder has no file for the split.
    #[error("`{path}` has no file for split `{split}`; it has {available}")]
    NoSplit {
        /// The folder.
        path: PathBuf,
        /// The split asked for.
        split: String,
        /// The splits or sub-folders that are there, for the message.
        available: String,
    },
    /// No row was left after selecting the split.
    #[error("`{path}` has no row in split `{split}`; {remedy}")]
    Empty {
        /// The file.
        path: PathBuf,
        /// The split asked for, or `all`.
        split: String,
        /// What the reader can do.
        remedy: &'static str,
    },

    /// A folder of Harbor's tasks, or one of them, cannot be used.
    #[error(transparent)]
    Harbor(Box<super::harbor::HarborError>),

    // === Files ===
    /// The file could not be read.
    #[error("reading task file `{path}`")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        source: std::io::Error,
    },
    /// The file, line or table is over a limit.
    #[error("`{path}` is too large: {what} {found} > {limit}; split the file")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// What was measured, with its unit.
        what: &'static str,
        /// How much there is, or how much had been seen when reading stopped.
        found: u64,
        /// How much is read at most.
        limit: u64,
    },
    /// The parquet container is damaged or uses an unsupported feature.
    #[error("`{path}` is not a readable parquet file; it may be cut short, so fetch it again")]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What the parquet reader said.
        #[source]
        source: parquet::errors::ParquetError,
    },
    /// A row is not JSON.
    #[error("`{path}` row {row} is not valid JSON; it may be cut short, so fetch or fix the file")]
    Json {
        /// The file.
        path: PathBuf,
        /// The row, counted from 1.
        row: u64,
        /// What the JSON parser said, with line and column.
        #[source]
        source: serde_json::Error,
    },

    // === Rows ===
    /// A row is JSON but not an object, or the file is not an array of them.
    #[error("`{path}` row {row} is {found}, not an object with named fields")]
    NotAnObject {
        /// The file.
        path: PathBuf,
        /// The row, counted from 1.
        row: u64,
        /// The JSON type that is there.
        found: &'static str,
    },
    /// A row lacks a field.
    #[error("`{path}` row {row} has no `{key}`; its fields are {fields}; {remedy}")]
    MissingField {
        /// The file.
        path: PathBuf,
        /// The row, counted from 1.
        row: u64,
        /// The field, or its alternatives.
        key: &'static str,
        /// The fields that the row has.
        fields: String,
        /// What the reader can do.
        remedy: &'static str,
    },
    /// A field has another type than its schema says.
    #[error("`{path}` row {row} has {found} in `{key}`; make it {expected}")]
    WrongType {
        /// The file.
        path: PathBuf,
        /// The row, counted from 1.
        row: u64,
        /// The field.
        key: &'static str,
        /// The type it must have.
        expected: &'static str,
        /// The JSON type that is there.
        found: &'static str,
    },
    /// A field does not have the form that it must have.
    #[error("`{path}` row {row} has {} that is not {expected}", with_article(key))]
    Field {
        /// The file.
        path: PathBuf,
        /// The row, counted from 1.
        row: u64,
        /// The field.
        key: &'static str,
        /// What it must be.
        expected: &'static str,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// A field is no patch.
    #[error(
        "`{path}` row {row} has {} that is not what `git diff` writes",
        with_article(key)
    )]
    Diff {
        /// The file.
        path: PathBuf,
        /// The row, counted from 1.
        row: u64,
        /// The field.
        key: &'static str,
        /// What is wrong with it.
        #[source]
        source: crate::grader::swebench::DiffError,
    },
    /// A field holds something that no grader can use.
    #[error(
        "`{path}` row {row} has {} that cannot be used; {remedy}",
        with_article(key)
    )]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The row, counted from 1.
        row: u64,
        /// The field.
        key: &'static str,
        /// What the reader can do.
        remedy: &'static str,
    },
    /// A field is there but says nothing.
    #[error("`{path}` row {row} has an empty `{key}`; fill it in or drop the row")]
    EmptyField {
        /// The file.
        path: PathBuf,
        /// The row, counted from 1.
        row: u64,
        /// The field.
        key: &'static str,
    },
    /// The tests use nothing that the reference solution defines.
    #[error(
        "`{path}` row {row} (task `{id}`) has no entry point: its tests use none of the names that \
         `code` defines ({defined}); fix the row or name them in `entry_points`"
    )]
    NoEntryPoint {
        /// The file.
        path: PathBuf,
        /// The row, counted from 1.
        row: u64,
        /// The task.
        id: String,
        /// The names that the reference solution binds.
        defined: String,
    },
    /// Two rows have the same task id.
    #[error("`{path}` row {row} repeats task id `{id}` of an earlier row; give each its own")]
    DuplicateId {
        /// The file.
        path: PathBuf,
        /// The later row, counted from 1.
        row: u64,
        /// The id.
        id: String,
    },
}

impl From<super::harbor::HarborError> for TaskError {
    fn from(error: super::harbor::HarborError) -> Self {
        Self::Harbor(Box::new(error))
    }
}

fn with_article(key: &str) -> String {
    let article = if key.starts_with(['a', 'e', 'i', 'o', 'u']) {
        "an"
    } else {
        "a"
    };
    format!("{article} `{key}`")
}
