//! Bringing the tasks of a registry's data set here.

use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};

use indexmap::IndexMap;

use super::HarborError;
use super::git::Checkout;
use super::layout::{HarborTask, check_tree};
use super::registry::{DatasetReference, Registry, RegistryTask, is_folder_name};

/// The most bytes of one task.
const MAX_TASK_BYTES: u64 = 2 << 30;

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
