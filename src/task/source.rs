//! Where a task set is, and which part of it is meant.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::TaskError;

/// A part of a data set, by the names MBPP uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// Tasks to learn from.
    Train,
    /// Tasks to choose settings by.
    Validation,
    /// Tasks to report numbers on.
    Test,
    /// Tasks set aside as few-shot examples.
    Prompt,
}

impl Split {
    /// All splits.
    pub const ALL: [Self; 4] = [Self::Train, Self::Validation, Self::Test, Self::Prompt];

    /// Returns the split's name as it stands in file names.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
            Self::Test => "test",
            Self::Prompt => "prompt",
        }
    }

    /// Returns the split that MBPP's README puts a `task_id` in: 1–10 prompt, 11–510 test, 511–600
    /// validation, 601–974 train.
    #[must_use]
    pub fn of_mbpp(task_id: &str) -> Option<Self> {
        match task_id.parse().ok()? {
            1..=10_u32 => Some(Self::Prompt),
            11..=510 => Some(Self::Test),
            511..=600 => Some(Self::Validation),
            601..=974 => Some(Self::Train),
            _ => None,
        }
    }
}

impl fmt::Display for Split {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// Where a task set is: on this machine, or a data set on the hub.
///
/// Written as a path, or as `owner/name`, `owner/name/config` and either with `@revision`; a path
/// that exists is always a path.
///
/// # Examples
///
/// ```
/// use wardian::task::TaskSource;
///
/// let source: TaskSource = "google-research-datasets/mbpp/sanitized@main".parse()?;
/// assert_eq!(
///     source,
///     TaskSource::Hub {
///         repo: "google-research-datasets/mbpp".to_owned(),
///         config: Some("sanitized".to_owned()),
///         revision: "main".to_owned(),
///     }
/// );
/// assert!("missing/folder/of/tasks.jsonl".parse::<TaskSource>().is_err());
/// # Ok::<(), wardian::task::TaskError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaskSource {
    /// A file, or a folder in the data set layout.
    Local(PathBuf),
    /// A data set on the hub.
    Hub {
        /// The repository, `owner/name`.
        repo: String,
        /// The configuration: a sub-folder of the repository.
        config: Option<String>,
        /// A branch, tag or commit; `main` unless given.
        revision: String,
    },
}

impl TaskSource {
    /// Returns the file or folder on this machine, using `dataset` to bring a hub repository's
    /// folder here: it is given the repository and the revision.
    ///
    /// # Errors
    ///
    /// Fails when `dataset` does.
    pub fn locate<E>(
        &self,
        dataset: impl FnOnce(&str, &str) -> Result<PathBuf, E>,
    ) -> Result<PathBuf, TaskError>
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        match self {
            Self::Local(path) => Ok(path.clone()),
            Self::Hub {
                repo,
                config,
                revision,
            } => {
                let mut folder = dataset(repo, revision).map_err(|source| TaskError::Hub {
                    repo: repo.clone(),
                    revision: revision.clone(),
                    source: Box::new(source),
                })?;
                folder.extend(config);
                Ok(folder)
            }
        }
    }
}

impl FromStr for TaskSource {
    type Err = TaskError;

    fn from_str(text: &str) -> Result<Self, TaskError> {
        if Path::new(text).exists() {
            return Ok(Self::Local(PathBuf::from(text)));
        }
        let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
        let parts: Vec<&str> = name.split('/').collect();
        let word = |part: &&str| {
            part.starts_with(|c: char| c.is_ascii_alphanumeric())
                && part
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        let file = Path::new(name).extension().is_some_and(|extension| {
            ["json", "jsonl", "parquet"]
                .iter()
                .any(|known| extension == *known)
        });
        match parts.as_slice() {
            [owner, name, config @ ..]
                if config.len() <= 1 && !file && !revision.is_empty() && parts.iter().all(word) =>
            {
                Ok(Self::Hub {
                    repo: format!("{owner}/{name}"),
                    config: config.first().map(|config| (*config).to_owned()),
                    revision: revision.to_owned(),
                })
            }
            _ => Err(TaskError::NotFound {
                path: text.to_owned(),
            }),
        }
    }
}

impl fmt::Display for TaskSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(path) => write!(formatter, "{}", path.display()),
            Self::Hub {
                repo,
                config: Some(config),
                revision,
            } => {
                write!(formatter, "{repo}/{config}@{revision}")
            }
            Self::Hub {
                repo,
                config: None,
                revision,
            } => write!(formatter, "{repo}@{revision}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_exists_is_a_path_and_what_looks_like_a_name_is_on_the_hub() {
        assert_eq!(
            "src/task".parse::<TaskSource>().unwrap(),
            TaskSource::Local("src/task".into())
        );
        for (text, shown) in [
            ("openai/humaneval_x", "openai/humaneval_x@main"),
            ("owner/name/full@v1.0", "owner/name/full@v1.0"),
        ] {
            assert_eq!(text.parse::<TaskSource>().unwrap().to_string(), shown);
        }
        for text in [
            "",
            "mbpp",
            "/no/where",
            "./no",
            "a/b/c/d",
            "a//b",
            "no/tasks.json",
            "../a",
            "a/b@",
        ] {
            let message = text.parse::<TaskSource>().unwrap_err().to_string();
            assert!(
                message.starts_with(&format!("no file or folder `{text}`")),
                "{message}"
            );
        }
    }

    #[test]
    fn the_configuration_is_a_folder_of_the_repository() {
        let source: TaskSource = "o/n/full@dev".parse().unwrap();
        let found = source.locate(|repo, revision| {
            Ok::<_, std::io::Error>(PathBuf::from(format!("/cache/{repo}/{revision}")))
        });
        assert_eq!(found.unwrap(), PathBuf::from("/cache/o/n/dev/full"));
        let failed = source.locate(|_, _| Err(std::io::Error::other("offline")));
        assert_eq!(
            failed.unwrap_err().to_string(),
            "fetching data set `o/n` at revision `dev`"
        );
    }

    #[test]
    fn mbpp_ids_fall_into_the_published_splits() {
        let split = |id: &str| Split::of_mbpp(id);
        assert_eq!(split("10"), Some(Split::Prompt));
        assert_eq!(split("11"), Some(Split::Test));
        assert_eq!(split("511"), Some(Split::Validation));
        assert_eq!(split("601"), Some(Split::Train));
        assert_eq!((split("975"), split("own-1")), (None, None));
    }
}
