//! Files and folders as data: what goes into an actor and what comes out of it.

mod tar;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};

use fs_err as fs;

#[cfg(any(fuzzing, test))]
pub use self::tar::fuzz_archive;
use super::ActorError;

/// How deep a tree may be. Every entry looks at the folders above it, and the host's folders of that depth
/// can still be named.
const MAX_DEPTH: usize = 256;

/// Something in a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A folder.
    Folder,
    /// A file.
    File {
        /// What is in it.
        bytes: Vec<u8>,
        /// Whether it can be run.
        executable: bool,
    },
    /// A symbolic link. It is only ever followed inside an actor.
    Link {
        /// Where it points, which may be anywhere.
        target: PathBuf,
    },
}

/// The most that a tree may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeLimits {
    /// Bytes of all its files together.
    pub bytes: u64,
    /// Files, folders and links.
    pub entries: u64,
}

impl Default for TreeLimits {
    /// 256 MiB in 100,000 entries.
    fn default() -> Self {
        Self {
            bytes: 256 << 20,
            entries: 100_000,
        }
    }
}

/// Files, folders and links below a folder, by their paths from there.
///
/// Its paths are relative, plain and consistent: none leaves the tree, and nothing is inside a file or a
/// link. Devices, sockets and pipes are left out wherever a tree is read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileTree {
    entries: BTreeMap<PathBuf, Entry>,
}

impl FileTree {
    /// Returns an empty tree.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a tree of one file.
    ///
    /// # Errors
    ///
    /// As for [`Self::insert`].
    pub fn of_file(
        name: impl Into<PathBuf>,
        bytes: impl Into<Vec<u8>>,
    ) -> Result<Self, ActorError> {
        let mut tree = Self::new();
        tree.insert(
            name,
            Entry::File {
                bytes: bytes.into(),
                executable: false,
            },
        )?;
        Ok(tree)
    }

    /// Adds an entry, in place of a file or link of the same path.
    ///
    /// # Errors
    ///
    /// Fails on a path that is empty, absolute, has a `..` or lies inside a file or a link, and where a
    /// folder would be replaced by something else.
    pub fn insert(&mut self, path: impl Into<PathBuf>, entry: Entry) -> Result<(), ActorError> {
        let path = plain(&path.into())?;
        for folder in path.ancestors().skip(1) {
            if !matches!(self.entries.get(folder), None | Some(Entry::Folder)) {
                return Err(hostile(format!(
                    "`{}` is inside of what is no folder",
                    path.display()
                )));
            }
        }
        if entry != Entry::Folder {
            // Paths are in the order of their parts: what is inside follows at once.
            let mut others = self.entries.range(path.clone()..).map(|(other, _)| other);
            let inside = others.find(|other| **other != path);
            if inside.is_some_and(|other| other.starts_with(&path))
                || self.entries.get(&path) == Some(&Entry::Folder)
            {
                return Err(hostile(format!(
                    "`{}` is a folder and is not",
                    path.display()
                )));
            }
        }
        self.entries.insert(path, entry);
        Ok(())
    }

    /// Returns the entry at `path`.
    #[must_use]
    pub fn get(&self, path: impl AsRef<Path>) -> Option<&Entry> {
        self.entries.get(path.as_ref())
    }

    /// Returns what is in the file at `path`.
    #[must_use]
    pub fn file(&self, path: impl AsRef<Path>) -> Option<&[u8]> {
        match self.get(path)? {
            Entry::File { bytes, .. } => Some(bytes),
            Entry::Folder | Entry::Link { .. } => None,
        }
    }

    /// Returns the entries, folders before what is in them.
    pub fn iter(&self) -> impl Iterator<Item = (&Path, &Entry)> {
        self.entries
            .iter()
            .map(|(path, entry)| (path.as_path(), entry))
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Reads a folder of the host; links are kept as links, and not followed.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be read, and where it is larger than `limits`.
    pub fn read_from(folder: &Path, limits: TreeLimits) -> Result<Self, ActorError> {
        let reading = |source| ActorError::Files {
            activity: "reading a tree",
            source,
        };
        let mut tree = Self::new();
        let mut bytes = 0;
        let mut folders = vec![PathBuf::new()];
        while let Some(inside) = folders.pop() {
            for found in fs::read_dir(folder.join(&inside)).map_err(reading)? {
                let found = found.map_err(reading)?;
                let path = inside.join(found.file_name());
                let kind = found.file_type().map_err(reading)?;
                let entry = if kind.is_dir() {
                    folders.push(path.clone());
                    Entry::Folder
                } else if kind.is_symlink() {
                    let target = fs::read_link(found.path()).map_err(reading)?;
                    Entry::Link { target }
                } else if kind.is_file() {
                    read_file(&found.path(), limits.bytes, &mut bytes)?
                } else {
                    continue;
                };
                tree.insert(path, entry)?;
                if tree.len() as u64 > limits.entries {
                    return Err(too_many(limits));
                }
            }
        }
        Ok(tree)
    }

    /// Writes it to a new folder of the host. Links are left out, so that nothing that reads the folder is
    /// led elsewhere.
    ///
    /// # Errors
    ///
    /// Fails where `folder` is there already, and where it cannot be written.
    pub fn write_to(&self, folder: &Path) -> Result<(), ActorError> {
        let writing = |source| ActorError::Files {
            activity: "writing a tree",
            source,
        };
        fs::create_dir(folder).map_err(writing)?;
        for (path, entry) in self.iter() {
            // The folder is new and holds no link, so no path leads out of it.
            let path = folder.join(path);
            match entry {
                Entry::Folder => fs::create_dir_all(&path).map_err(writing)?,
                Entry::File { bytes, executable } => {
                    if let Some(above) = path.parent() {
                        fs::create_dir_all(above).map_err(writing)?;
                    }
                    fs::write(&path, bytes).map_err(writing)?;
                    let mode = if *executable { 0o755 } else { 0o644 };
                    fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))
                        .map_err(writing)?;
                }
                Entry::Link { .. } => {}
            }
        }
        Ok(())
    }
}

/// Reads a file that the host's tree names, unless it has become something else; `bytes` counts.
pub(in crate::actor) fn read_file(
    path: &Path,
    limit: u64,
    bytes: &mut u64,
) -> Result<Entry, ActorError> {
    let reading = |source| ActorError::Files {
        activity: "reading a tree",
        source,
    };
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .map_err(reading)?;
    let status = file.metadata().map_err(reading)?;
    let mut content = Vec::new();
    file.take(limit.saturating_sub(*bytes).saturating_add(1))
        .read_to_end(&mut content)
        .map_err(reading)?;
    *bytes += content.len() as u64;
    if *bytes > limit {
        return Err(ActorError::TreeTooLarge {
            limit,
            unit: "bytes",
        });
    }
    Ok(Entry::File {
        bytes: content,
        executable: status.permissions().mode() & 0o100 != 0,
    })
}

/// Returns the path without `.`, if it stays below where it starts.
fn plain(path: &Path) -> Result<PathBuf, ActorError> {
    let mut plain = PathBuf::new();
    let mut depth = 0;
    for part in path.components() {
        match part {
            Component::Normal(name) => {
                plain.push(name);
                depth += 1;
            }
            Component::CurDir => {}
            Component::RootDir | Component::ParentDir | Component::Prefix(_) => {
                return Err(hostile(format!("`{}` leads out of it", path.display())));
            }
        }
    }
    if depth > MAX_DEPTH {
        return Err(hostile(format!(
            "a path of it has {depth} parts, of at most {MAX_DEPTH}"
        )));
    }
    let bytes = plain.as_os_str().as_encoded_bytes();
    if bytes.is_empty() || bytes.len() > 4096 || bytes.contains(&0) {
        return Err(hostile(format!("`{}` is no path", path.display())));
    }
    Ok(plain)
}

fn hostile(reason: String) -> ActorError {
    ActorError::HostileTree { reason }
}

fn too_many(limits: TreeLimits) -> ActorError {
    ActorError::TreeTooLarge {
        limit: limits.entries,
        unit: "entries",
    }
}

#[cfg(test)]
mod tests;
