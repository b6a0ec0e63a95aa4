//! Trees into and out of the machine that this runs in.
//!
//! What is below the folder that the client names is its guests': a link there may lead to anything that this
//! process may write and they may not. So it is entered folder by folder, and no link is followed.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid, chownat, mkdirat, openat, statat, symlinkat,
    unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::actor::{ActorError, Entry, FileTree, TreeLimits, User};

/// Writes `tree` below `folder`, which is made where it is missing. What is there already is replaced.
///
/// # Errors
///
/// Fails where something is in the way, or the system refuses it.
pub(super) fn write(folder: &Path, tree: &FileTree, owner: User) -> Result<(), ActorError> {
    let unwritable = |path: &Path| {
        let path = path.to_owned();
        move |error: std::io::Error| ActorError::Unwritable {
            path,
            message: error.to_string(),
        }
    };
    let root = open_root(folder, owner).map_err(unwritable(folder))?;
    for (path, entry) in tree.iter() {
        write_entry(&root, path, entry, owner).map_err(unwritable(&folder.join(path)))?;
    }
    Ok(())
}

/// Makes `folder` hold what `tree` does, and nothing else.
///
/// # Errors
///
/// As for [`write`], and where something cannot be deleted.
pub(super) fn put_back(folder: &Path, tree: &FileTree, owner: User) -> Result<(), ActorError> {
    let empty = || -> std::io::Result<()> {
        let listed = match fs_err::read_dir(folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            listed => listed?,
        };
        for entry in listed {
            let entry = entry?;
            // Neither follows links.
            match entry.file_type()?.is_dir() {
                true => fs_err::remove_dir_all(entry.path())?,
                false => fs_err::remove_file(entry.path())?,
            }
        }
        Ok(())
    };
    empty().map_err(|error| ActorError::Unwritable {
        path: folder.to_owned(),
        message: error.to_string(),
    })?;
    write(folder, tree, owner)
}

/// Reads the folder, or the one file, at `path`.
///
/// # Errors
///
/// Fails where there is neither, and where it is larger than `limits`.
pub(super) fn read(path: &Path, limits: TreeLimits) -> Result<FileTree, ActorError> {
    let unreadable = |message: String| ActorError::Unreadable {
        path: path.to_owned(),
        message,
    };
    let status = std::fs::symlink_metadata(path).map_err(|error| unreadable(error.to_string()))?;
    let read = if status.is_dir() {
        FileTree::read_from(path, limits)
    } else if status.is_file() {
        let name = path
            .file_name()
            .ok_or_else(|| unreadable("it has no name".to_owned()))?;
        read_one(path, Path::new(name), limits)
    } else {
        return Err(unreadable("it is neither a file nor a folder".to_owned()));
    };
    read.map_err(|error| match error {
        ActorError::Files { source, .. } => unreadable(source.to_string()),
        error => error,
    })
}

fn read_one(path: &Path, name: &Path, limits: TreeLimits) -> Result<FileTree, ActorError> {
    let mut bytes = 0;
    let entry = crate::actor::tree::read_file(path, limits.bytes, &mut bytes)?;
    let mut tree = FileTree::new();
    tree.insert(name, entry)?;
    Ok(tree)
}

/// Opens the folder itself, by whatever links the client's name for it goes through.
fn open_root(folder: &Path, owner: User) -> std::io::Result<OwnedFd> {
    let mut missing: Vec<PathBuf> = Vec::new();
    for above in folder.ancestors() {
        match std::fs::metadata(above) {
            Ok(_) => break,
            Err(_) => missing.push(above.to_owned()),
        }
    }
    while let Some(path) = missing.pop() {
        match mkdirat(CWD, &path, Mode::from_raw_mode(0o755)) {
            Ok(()) if path == folder => give(CWD, &path, owner)?,
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(CWD, folder, flags, Mode::empty())?)
}

fn write_entry(root: &OwnedFd, path: &Path, entry: &Entry, owner: User) -> std::io::Result<()> {
    let mut folder = root.try_clone()?;
    let mut names: Vec<&std::ffi::OsStr> = Vec::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => names.push(name),
            // Trees have plain paths.
            _ => return Err(std::io::ErrorKind::InvalidInput.into()),
        }
    }
    let Some(last) = names.pop() else {
        return Err(std::io::ErrorKind::InvalidInput.into());
    };
    for name in names {
        folder = enter(&folder, name, owner)?;
    }
    match entry {
        Entry::Folder => enter(&folder, last, owner).map(drop),
        Entry::File { bytes, executable } => {
            remove(&folder, last)?;
            let flags =
                OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mut file = File::from(openat(&folder, last, flags, Mode::from_raw_mode(0o600))?);
            file.write_all(bytes)?;
            let mode = if *executable { 0o755 } else { 0o644 };
            file.set_permissions(std::fs::Permissions::from_mode(mode))?;
            give(&folder, last, owner)
        }
        Entry::Link { target } => {
            remove(&folder, last)?;
            symlinkat(target, &folder, last)?;
            give(&folder, last, owner)
        }
    }
}

/// Opens a folder in a folder; it is made where it is missing, or something else is in its place.
fn enter(folder: &OwnedFd, name: &std::ffi::OsStr, owner: User) -> std::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match openat(folder, name, flags, Mode::empty()) {
        Err(Errno::NOTDIR | Errno::LOOP) => remove(folder, name)?,
        Err(Errno::NOENT) => {}
        opened => return Ok(opened?),
    }
    mkdirat(folder, name, Mode::from_raw_mode(0o755))?;
    give(folder, name, owner)?;
    Ok(openat(folder, name, flags, Mode::empty())?)
}

/// Removes what is no folder, if there is something.
fn remove(folder: &OwnedFd, name: &std::ffi::OsStr) -> std::io::Result<()> {
    let is_folder = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|found| FileType::from_raw_mode(found.st_mode).is_dir());
    if is_folder {
        return Err(std::io::ErrorKind::IsADirectory.into());
    }
    match unlinkat(folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Gives it to its owner, if this process may.
fn give(folder: impl AsFd, name: impl rustix::path::Arg, owner: User) -> std::io::Result<()> {
    if !geteuid().is_root() {
        return Ok(());
    }
    let (user, group) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    let flags = AtFlags::SYMLINK_NOFOLLOW;
    Ok(chownat(folder, name, Some(user), Some(group), flags)?)
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::*;

    fn own() -> User {
        User {
            uid: geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        }
    }

    fn tree(entries: &[(&str, &str)]) -> FileTree {
        let mut tree = FileTree::new();
        for (path, bytes) in entries {
            let entry = Entry::File {
                bytes: bytes.as_bytes().to_vec(),
                executable: false,
            };
            tree.insert(*path, entry).unwrap();
        }
        tree
    }

    #[test]
    fn no_link_below_the_folder_is_followed() {
        let outer = tempfile::tempdir().unwrap();
        let (kept, folder) = (outer.path().join("kept"), outer.path().join("folder"));
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("a"), "kept").unwrap();
        fs::create_dir(&folder).unwrap();
        let link = |target: &Path, name: &str| {
            std::os::unix::fs::symlink(target, folder.join(name)).unwrap();
        };
        link(&kept, "away");
        link(&kept.join("a"), "file");
        write(&folder, &tree(&[("away/a", "new"), ("file", "new")]), own()).unwrap();
        assert_eq!(fs::read(kept.join("a")).unwrap(), b"kept");
        // The links were in the way of a folder and of a file.
        for path in ["away/a", "file"] {
            assert_eq!(fs::read(folder.join(path)).unwrap(), b"new", "{path}");
        }
        assert!(fs::symlink_metadata(folder.join("away")).unwrap().is_dir());
    }

    #[test]
    fn a_folder_is_not_replaced_by_a_file() {
        let outer = tempfile::tempdir().unwrap();
        fs::create_dir(outer.path().join("a")).unwrap();
        let error = write(outer.path(), &tree(&[("a", "x")]), own()).unwrap_err();
        assert!(matches!(error, ActorError::Unwritable { .. }), "{error}");
    }

    #[test]
    fn what_is_no_file_and_no_folder_is_not_read() {
        let outer = tempfile::tempdir().unwrap();
        let link = outer.path().join("link");
        std::os::unix::fs::symlink("/etc/passwd", &link).unwrap();
        for path in [&link, Path::new("/dev/zero"), &outer.path().join("none")] {
            let error = read(path, TreeLimits::default()).unwrap_err();
            assert!(matches!(error, ActorError::Unreadable { .. }), "{error}");
        }
        let limits = TreeLimits {
            bytes: 3,
            entries: 10,
        };
        let file = outer.path().join("file");
        fs::write(&file, "four").unwrap();
        let error = read(&file, limits).unwrap_err();
        assert!(matches!(error, ActorError::TreeTooLarge { .. }), "{error}");
    }
}
