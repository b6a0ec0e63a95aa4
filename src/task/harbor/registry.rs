//! Data sets by name: Harbor's registry file, and bringing the tasks that it lists here.
//!
//! A registry is a JSON list of data sets, each a `name`, a `version` and its `tasks`; a task is a
//! folder of a git repository at a commit, or a folder of this machine, relative to the file.

use std::collections::HashSet;
use std::fmt;
use std::io::Read as _;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use indexmap::IndexMap;
use serde::Deserialize;

use super::HarborError;
use super::git::Checkout;
use super::layout::{HarborTask, check_tree};

/// The largest registry that is read; the public one has 20 MB.
const MAX_REGISTRY_BYTES: u64 = 256 << 20;

/// The most bytes of one task.
const MAX_TASK_BYTES: u64 = 2 << 30;

/// `harbor:NAME@VERSION`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetReference {
    /// The data set.
    pub name: String,
    /// Its version; the newest where none.
    pub version: Option<String>,
}

impl FromStr for DatasetReference {
    type Err = HarborError;

    fn from_str(text: &str) -> Result<Self, HarborError> {
        let wrong = || HarborError::Reference {
            text: text.to_owned(),
        };
        let rest = text.strip_prefix("harbor:").ok_or_else(wrong)?;
        let (name, version) = match rest.split_once('@') {
            Some((name, version)) => (name, Some(version)),
            None => (rest, None),
        };
        let is_name = |name: &str| {
            let parts: Vec<&str> = name.split('/').collect();
            parts.len() <= 2 && parts.into_iter().all(is_folder_name)
        };
        if !is_name(name) || version.is_some_and(str::is_empty) {
            return Err(wrong());
        }
        Ok(Self {
            name: name.to_owned(),
            version: version.map(str::to_owned),
        })
    }
}

impl fmt::Display for DatasetReference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.version {
            Some(version) => write!(formatter, "harbor:{}@{version}", self.name),
            None => write!(formatter, "harbor:{}", self.name),
        }
    }
}

fn is_folder_name(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '_')
        && name.len() <= 255
        && (name.bytes()).all(|byte| byte.is_ascii_alphanumeric() || b"._-+".contains(&byte))
}

/// A registry's data sets.
#[derive(Debug, Clone, PartialEq)]
pub struct Registry {
    path: PathBuf,
    datasets: Vec<DatasetSpec>,
}

/// A data set at a version.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct DatasetSpec {
    /// The name.
    pub name: String,
    /// The version; `head` is newer than any other.
    pub version: String,
    /// For people.
    #[serde(default)]
    pub description: String,
    /// The tasks.
    pub tasks: Vec<RegistryTask>,
}

/// Where a task is.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RegistryTask {
    /// The name.
    pub name: String,
    /// The repository; none for a folder of this machine.
    #[serde(default)]
    pub git_url: Option<String>,
    /// The commit, branch or tag; the repository's default branch where none.
    #[serde(default)]
    pub git_commit_id: Option<String>,
    /// The folder.
    pub path: String,
}

impl Registry {
    /// Reads a registry file.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be read, is too large or is not of the published form.
    pub fn read(path: &Path) -> Result<Self, HarborError> {
        let mut text = Vec::new();
        fs_err::File::open(path)
            .and_then(|file| file.take(MAX_REGISTRY_BYTES + 1).read_to_end(&mut text))
            .map_err(|source| HarborError::Io {
                path: path.to_owned(),
                source,
            })?;
        if text.len() as u64 > MAX_REGISTRY_BYTES {
            return Err(HarborError::TooLarge {
                path: path.to_owned(),
                what: "bytes",
                limit: MAX_REGISTRY_BYTES,
            });
        }
        let datasets = serde_json::from_slice(&text).map_err(|source| HarborError::Registry {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self {
            path: path.to_owned(),
            datasets,
        })
    }

    /// Finds a data set; without a version `head`, else the highest, else the last by name.
    ///
    /// # Errors
    ///
    /// Fails where there is none of this name, or not in this version.
    pub fn find(&self, reference: &DatasetReference) -> Result<&DatasetSpec, HarborError> {
        let unknown = |what: String, mut names: Vec<&str>| {
            names.sort_unstable();
            names.dedup();
            let shown: Vec<String> = names
                .iter()
                .take(20)
                .map(|name| format!("`{name}`"))
                .collect();
            HarborError::Unknown {
                path: self.path.clone(),
                what,
                available: match shown.len() {
                    0 => "none".to_owned(),
                    _ => shown.join(", "),
                },
            }
        };
        let named: Vec<&DatasetSpec> = (self.datasets.iter())
            .filter(|spec| spec.name == reference.name)
            .collect();
        let newest = named.iter().max_by_key(|spec| rank(&spec.version));
        let Some(newest) = newest else {
            let names = self
                .datasets
                .iter()
                .map(|spec| spec.name.as_str())
                .collect();
            return Err(unknown(format!("data set `{}`", reference.name), names));
        };
        let Some(version) = &reference.version else {
            return Ok(newest);
        };
        // The last entry counts, as in Harbor.
        let found = named.iter().rev().find(|spec| spec.version == *version);
        found.copied().ok_or_else(|| {
            let what = format!("version `{version}` of `{}`", reference.name);
            unknown(
                what,
                named.iter().map(|spec| spec.version.as_str()).collect(),
            )
        })
    }
}

/// Orders versions: what is no version, versions by their numbers (a pre-release before its
/// release, a post-release after it), `head`.
fn rank(version: &str) -> (u8, Vec<u64>, i8, u64, &str) {
    if version == "head" {
        return (2, Vec::new(), 0, 0, version);
    }
    let text = version.strip_prefix('v').unwrap_or(version);
    let end = text
        .find(|letter: char| !letter.is_ascii_digit() && letter != '.')
        .unwrap_or(text.len());
    let (numbers, suffix) = text.split_at(end);
    let mut release = Vec::new();
    for number in numbers.trim_end_matches('.').split('.') {
        match number.parse() {
            Ok(number) => release.push(number),
            Err(_) => return (0, Vec::new(), 0, 0, version),
        }
    }
    while release.len() > 1 && release.last() == Some(&0) {
        release.pop(); // 1.0 is 1
    }
    let suffix = suffix.split('+').next().unwrap_or_default();
    let letters = suffix.trim_start_matches(['-', '_', '.']);
    let word = letters.trim_end_matches(|letter: char| !letter.is_ascii_alphabetic());
    let number = letters[word.len()..].trim_start_matches(['-', '_', '.']);
    let phase = match word {
        "" => 0,
        "post" | "rev" | "r" => 1,
        "rc" | "c" | "pre" | "preview" => -1,
        "b" | "beta" => -2,
        "a" | "alpha" => -3,
        "dev" => -4,
        _ => return (0, Vec::new(), 0, 0, version),
    };
    (1, release, phase, number.parse().unwrap_or_default(), "")
}

/// A task that was brought here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Downloaded {
    /// Its name in the registry.
    pub name: String,
    /// Where it is now.
    pub folder: PathBuf,
    /// The commit that it is of; none for a folder of this machine.
    pub commit: Option<String>,
}

/// Where an entry's folder is.
enum Place {
    /// In a repository.
    Git { folder: String },
    /// On this machine.
    Local(PathBuf),
}

/// Brings the tasks of a data set into `output`, each into a folder of its name.
///
/// Every task is read and checked before it is put in place; a folder that is there already is
/// replaced. Nothing is put in place where one of them fails.
///
/// # Errors
///
/// Fails where the data set is unknown, an entry leads out of its repository, `git` fails, or what
/// it brings is no task.
pub fn download(
    registry: &Registry,
    reference: &DatasetReference,
    output: &Path,
) -> Result<Vec<Downloaded>, HarborError> {
    let spec = registry.find(reference)?;
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| HarborError::Io { path, source }
    };
    fs_err::create_dir_all(output).map_err(io(output))?;
    let work = tempfile::Builder::new()
        .prefix(".download-")
        .tempdir_in(output)
        .map_err(io(output))?;
    // One fetch for each repository and commit.
    type Source<'a> = Option<(String, Option<&'a str>)>;
    let mut groups: IndexMap<Source<'_>, Vec<(&RegistryTask, Place)>> = IndexMap::new();
    let mut names = HashSet::new();
    for task in &spec.tasks {
        if !names.insert(folder_name(registry, task)?) {
            return Err(entry(registry, task, "another task has the same name"));
        }
        let place = place_of(registry, task)?;
        let source = (task.git_url.as_deref())
            .map(|url| {
                let url = repository(registry, task, url)?;
                Ok::<_, HarborError>((url, revision_of(registry, task)?))
            })
            .transpose()?;
        groups.entry(source).or_default().push((task, place));
    }
    let staged = work.path().join("tasks");
    fs_err::create_dir(&staged).map_err(io(&staged))?;
    let mut brought = Vec::new();
    for (number, (source, tasks)) in groups.iter().enumerate() {
        let folder = work.path().join(format!("git-{number}"));
        fs_err::create_dir(&folder).map_err(io(&folder))?;
        let checkout = match source {
            Some((url, revision)) => {
                let checkout = Checkout::fetch(&folder, url, *revision)?;
                let paths: Vec<&str> = tasks
                    .iter()
                    .filter_map(|(_, place)| match place {
                        Place::Git { folder } => Some(folder.as_str()),
                        Place::Local(_) => None,
                    })
                    .collect();
                checkout.write(&paths)?;
                Some(checkout)
            }
            None => None,
        };
        for (task, place) in tasks {
            let from = match place {
                Place::Git { folder: inside } => folder.join(inside),
                Place::Local(path) => path.clone(),
            };
            let name = folder_name(registry, task)?;
            let to = staged.join(&name);
            HarborTask::read(&from)?;
            check_tree(&from)?;
            copy(&from, &to, &mut 0)?;
            brought.push(Downloaded {
                name: task.name.clone(),
                folder: output.join(name),
                commit: checkout.as_ref().map(|checkout| checkout.commit.clone()),
            });
        }
    }
    for task in &brought {
        let name = task.folder.file_name().unwrap_or_default();
        if task.folder.exists() {
            fs_err::remove_dir_all(&task.folder).map_err(io(&task.folder))?;
        }
        fs_err::rename(staged.join(name), &task.folder).map_err(io(&task.folder))?;
    }
    Ok(brought)
}

fn entry(registry: &Registry, task: &RegistryTask, reason: &str) -> HarborError {
    HarborError::Entry {
        path: registry.path.clone(),
        task: task.name.clone(),
        reason: reason.to_owned(),
    }
}

/// Returns the folder that a task is put into: its name without the owner.
fn folder_name(registry: &Registry, task: &RegistryTask) -> Result<String, HarborError> {
    let name = task.name.rsplit('/').next().unwrap_or_default();
    if is_folder_name(name) {
        Ok(name.to_owned())
    } else {
        Err(entry(registry, task, "its name is no folder's"))
    }
}

fn place_of(registry: &Registry, task: &RegistryTask) -> Result<Place, HarborError> {
    let path = Path::new(&task.path);
    if task.git_url.is_none() {
        let beside = registry.path.parent().unwrap_or_else(|| Path::new(""));
        return Ok(Place::Local(beside.join(path)));
    }
    let mut folder = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::Normal(name) if !name.eq_ignore_ascii_case(".git") => folder.push(name),
            _ => {
                let reason = "its `path` leads out of the repository; give it from the top";
                return Err(entry(registry, task, reason));
            }
        }
    }
    match folder.to_str() {
        None | Some("") => Err(entry(registry, task, "its `path` is empty")),
        Some(folder) => Ok(Place::Git {
            folder: folder.to_owned(),
        }),
    }
}

/// Takes repositories that are reached in a way that runs nothing and asks nothing.
fn repository(registry: &Registry, task: &RegistryTask, url: &str) -> Result<String, HarborError> {
    let is_plain = !url.contains(|letter: char| letter.is_control() || letter == ' ');
    if is_plain && (url.starts_with("https://") || url.starts_with("ssh://")) {
        return Ok(url.to_owned());
    }
    let path = url.strip_prefix("file://").unwrap_or(url);
    let is_path = path.starts_with('/') || path.starts_with("./") || path.starts_with("../");
    if is_plain && is_path {
        let beside = registry.path.parent().unwrap_or_else(|| Path::new(""));
        let real = fs_err::canonicalize(beside.join(path)).map_err(|source| HarborError::Io {
            path: PathBuf::from(path),
            source,
        })?;
        if let Some(real) = real.to_str() {
            return Ok(real.to_owned());
        }
    }
    let reason = "its `git_url` is none of `https://`, `ssh://`, `file://` and a path";
    Err(entry(registry, task, reason))
}

fn revision_of<'a>(
    registry: &Registry,
    task: &'a RegistryTask,
) -> Result<Option<&'a str>, HarborError> {
    let Some(revision) = task.git_commit_id.as_deref() else {
        return Ok(None);
    };
    let is_taken = revision.starts_with(|first: char| first.is_ascii_alphanumeric())
        && !revision.contains("..")
        && (revision.bytes()).all(|byte| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte));
    if is_taken {
        Ok(Some(revision))
    } else {
        let reason = "its `git_commit_id` is no commit, branch or tag";
        Err(entry(registry, task, reason))
    }
}

/// Copies a folder that was checked; links, which stay inside it, become what they point to.
fn copy(from: &Path, to: &Path, total: &mut u64) -> Result<(), HarborError> {
    let io = |source| HarborError::Io {
        path: from.to_owned(),
        source,
    };
    fs_err::create_dir(to).map_err(io)?;
    for found in fs_err::read_dir(from).map_err(io)? {
        let found = found.map_err(io)?;
        let (path, target) = (found.path(), to.join(found.file_name()));
        let kind = found.file_type().map_err(io)?;
        if kind.is_symlink() && path.is_dir() {
            return Err(HarborError::Outside { path }); // it may lead to a folder that holds it
        }
        if kind.is_dir() {
            copy(&path, &target, total)?;
        } else {
            *total += fs_err::metadata(&path).map_err(io)?.len();
            if *total > MAX_TASK_BYTES {
                return Err(HarborError::TooLarge {
                    path,
                    what: "bytes in a task",
                    limit: MAX_TASK_BYTES,
                });
            }
            fs_err::copy(&path, &target).map_err(io)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_name_a_data_set() {
        let read = |text: &str| text.parse::<DatasetReference>();
        let reference = read("harbor:terminal-bench@2.0").unwrap();
        assert_eq!(reference.name, "terminal-bench");
        assert_eq!(reference.version.as_deref(), Some("2.0"));
        assert_eq!(read("harbor:owner/name").unwrap().version, None);
        for text in [
            "terminal-bench",
            "harbor:",
            "harbor:a@",
            "harbor:../a",
            "harbor:a/b/c",
            "harbor:-a",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_newest_version_is_head_then_by_number() {
        let newest = |versions: &[&str]| {
            let dataset = |version: &&str| DatasetSpec {
                name: "a".to_owned(),
                version: (*version).to_owned(),
                description: String::new(),
                tasks: Vec::new(),
            };
            let registry = Registry {
                path: PathBuf::from("registry.json"),
                datasets: versions.iter().map(dataset).collect(),
            };
            let reference = "harbor:a".parse().unwrap();
            registry.find(&reference).unwrap().version.clone()
        };
        assert_eq!(newest(&["9.0", "head", "10.0"]), "head");
        assert_eq!(newest(&["9.0", "10.0", "zeta"]), "10.0");
        assert_eq!(newest(&["1.0rc1", "1.0", "1.0.dev3"]), "1.0");
        assert_eq!(newest(&["1.0", "1.0.post1"]), "1.0.post1");
        assert_eq!(newest(&["v1.2", "1.1"]), "v1.2");
        assert_eq!(newest(&["beta", "alpha"]), "beta");
    }
}
