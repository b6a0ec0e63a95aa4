//! Folders whose files are read, and nothing outside them.
//!
//! The first folder is opened by its path, as the operator named it. From there on each name is opened
//! beneath the folder that is open already, is one name and no path, and is no link: whatever is renamed
//! or replaced meanwhile, what is read lies in the folder. Pipes and devices are not opened to be waited
//! for.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, statat};

/// Most names of a folder that are told.
pub(super) const MAX_NAMES: usize = 10_000;
/// The longest name, as of file systems.
const MAX_NAME: usize = 255;

/// Which bytes a file has, without reading them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Version {
    device: u64,
    file: u64,
    length: u64,
    modified: (i64, i64),
}

impl Version {
    /// Returns that of an open file.
    pub(super) fn of(file: &File) -> io::Result<Self> {
        let about = file.metadata()?;
        Ok(Self {
            device: about.dev(),
            file: about.ino(),
            length: about.len(),
            modified: (about.mtime(), about.mtime_nsec()),
        })
    }

    /// Returns how many bytes there are.
    pub(super) fn length(&self) -> u64 {
        self.length
    }
}

/// An open folder.
#[derive(Debug)]
pub(super) struct Folder(OwnedFd);

impl Folder {
    /// Opens the folder that the operator named.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self(rustix::fs::open(path, flags, Mode::empty())?))
    }

    /// Opens a folder in it.
    pub(super) fn folder(&self, name: &str) -> io::Result<Self> {
        check(name)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = openat(&self.0, name, flags, Mode::empty());
        folder.map(Self).map_err(absent)
    }

    /// Opens a file in it for reading.
    pub(super) fn file(&self, name: &str) -> io::Result<File> {
        check(name)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(&self.0, name, flags, Mode::empty()).map_err(absent)?);
        if file.metadata()?.is_file() {
            return Ok(file);
        }
        Err(no_such())
    }

    /// Reads a file of at most `limit` bytes whole.
    pub(super) fn read(&self, name: &str, limit: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.file(name)?.take(limit + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > limit {
            let message = format!("it is longer than {limit} bytes");
            return Err(io::Error::other(message));
        }
        Ok(bytes)
    }

    /// Returns the names in it that may be opened and have a key, those with the largest keys if there are more
    /// than `most`, in the order of their keys; and whether there are more.
    pub(super) fn largest<K: Ord>(
        &self,
        most: usize,
        key: impl Fn(&str) -> Option<K>,
    ) -> io::Result<(Vec<(K, String)>, bool)> {
        let mut kept = BinaryHeap::new();
        let mut is_cut_off = false;
        for entry in Dir::read_from(&self.0)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else {
                continue;
            };
            let Some(key) = check(name).ok().and_then(|()| key(name)) else {
                continue;
            };
            kept.push(Reverse((key, name.to_owned())));
            if kept.len() > most {
                kept.pop();
                is_cut_off = true;
            }
        }
        let mut names: Vec<_> = kept.into_iter().map(|Reverse(entry)| entry).collect();
        names.sort_unstable();
        Ok((names, is_cut_off))
    }

    /// Returns when what has this name was changed; none where that cannot be told.
    pub(super) fn changed_at(&self, name: &str) -> Option<(i64, i64)> {
        let about = statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        Some((about.st_mtime, i64::try_from(about.st_mtime_nsec).ok()?))
    }

    /// Returns the version of a file in it; none where there is none.
    pub(super) fn version(&self, name: &str) -> Option<Version> {
        let about = statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        Some(Version {
            device: about.st_dev,
            file: about.st_ino,
            length: u64::try_from(about.st_size).ok()?,
            modified: (about.st_mtime, i64::try_from(about.st_mtime_nsec).ok()?),
        })
    }

    /// Opens the folder once more, for a lock of its own.
    pub(super) fn again(&self) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(File::from(openat(&self.0, ".", flags, Mode::empty())?))
    }
}

/// Refuses what is not the name of something in a folder. Names that begin with a dot are of nobody's run.
fn check(name: &str) -> io::Result<()> {
    let is_name = !name.is_empty()
        && name.len() <= MAX_NAME
        && !name.starts_with('.')
        && !name.contains(['/', '\0']);
    if is_name { Ok(()) } else { Err(no_such()) }
}

/// Tells of a link as of what is not there.
fn absent(error: rustix::io::Errno) -> io::Error {
    match error {
        rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR | rustix::io::Errno::NXIO => no_such(),
        error => error.into(),
    }
}

fn no_such() -> io::Error {
    io::ErrorKind::NotFound.into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn is_absent<T>(result: io::Result<T>) -> bool {
        matches!(result, Err(error) if error.kind() == io::ErrorKind::NotFound)
    }

    #[test]
    fn only_what_lies_in_a_folder_is_opened() {
        let root = tempfile::tempdir().unwrap();
        let runs = root.path().join("runs");
        fs_err::create_dir_all(runs.join("a")).unwrap();
        fs_err::write(root.path().join("secret"), "s").unwrap();
        fs_err::write(runs.join("a/file"), "f").unwrap();
        symlink(root.path().join("secret"), runs.join("a/link")).unwrap();
        symlink(root.path(), runs.join("out")).unwrap();
        let folder = Folder::open(&runs).unwrap();
        let run = folder.folder("a").unwrap();
        assert_eq!(run.read("file", 1).unwrap(), b"f");
        // Each of these would lead out if it were followed.
        for name in ["..", ".", "", "../secret", "a/../../secret", "out", "a\0"] {
            assert!(is_absent(folder.folder(name)), "{name}");
            assert!(is_absent(folder.file(name)), "{name}");
        }
        assert!(is_absent(run.file("link")));
        assert!(is_absent(
            run.file(root.path().join("secret").to_str().unwrap())
        ));
        assert!(
            fs_err::read(runs.join("a/link")).is_ok(),
            "the link leads there"
        );
    }

    #[test]
    fn folders_are_no_files_and_pipes_are_not_waited_for() {
        let root = tempfile::tempdir().unwrap();
        fs_err::create_dir(root.path().join("a")).unwrap();
        let made = std::process::Command::new("mkfifo")
            .arg(root.path().join("pipe"))
            .status();
        assert!(made.unwrap().success());
        let folder = Folder::open(root.path()).unwrap();
        assert!(is_absent(folder.file("a")));
        assert!(is_absent(folder.file("pipe")));
        assert!(is_absent(folder.folder("pipe")));
    }

    #[test]
    fn a_file_over_the_limit_is_refused() {
        let root = tempfile::tempdir().unwrap();
        fs_err::write(root.path().join("file"), "abc").unwrap();
        let folder = Folder::open(root.path()).unwrap();
        assert_eq!(folder.read("file", 3).unwrap(), b"abc");
        let error = folder.read("file", 2).unwrap_err();
        assert_eq!(error.to_string(), "it is longer than 2 bytes");
    }
    #[test]
    fn of_many_names_the_latest_are_told() {
        let root = tempfile::tempdir().unwrap();
        for step in 1..=12 {
            fs_err::write(root.path().join(format!("step-{step}")), "").unwrap();
        }
        fs_err::write(root.path().join("other"), "").unwrap();
        let folder = Folder::open(root.path()).unwrap();
        let step = |name: &str| name.strip_prefix("step-")?.parse::<u64>().ok();
        let (found, is_cut_off) = folder.largest(3, step).unwrap();
        let steps: Vec<u64> = found.into_iter().map(|(step, _)| step).collect();
        assert_eq!((steps, is_cut_off), (vec![10, 11, 12], true));
        assert!(!folder.largest(12, step).unwrap().1);
    }

    #[test]
    fn a_file_that_was_replaced_has_another_version() {
        let root = tempfile::tempdir().unwrap();
        fs_err::write(root.path().join("file"), "a").unwrap();
        let folder = Folder::open(root.path()).unwrap();
        let before = folder.version("file").unwrap();
        let opened = folder.file("file").unwrap();
        assert_eq!(before, Version::of(&opened).unwrap());
        fs_err::write(root.path().join("other"), "b").unwrap();
        fs_err::rename(root.path().join("other"), root.path().join("file")).unwrap();
        assert_ne!(folder.version("file"), Some(before));
        assert_eq!(folder.version("none"), None);
    }
}
