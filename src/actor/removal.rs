//! Removing folders whatever guests left in them.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;

/// A folder that ends with this, whatever was left in it.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Makes an empty one among the files for some time.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be made.
    pub(crate) fn new() -> io::Result<Self> {
        let path = tempfile::tempdir()?.keep();
        Ok(Self { path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.path) {
            tracing::warn!(%error, "a folder is left over");
        }
    }
}

/// Removes a folder however deep it is: one level after the other, since to go down with it takes a stack
/// and descriptors that a guest could use up. Folders that may not be written to are made so, and links are
/// not followed.
///
/// # Errors
///
/// Fails where something in it cannot be removed.
pub(super) fn remove_tree(root: &Path) -> io::Result<()> {
    let unlock =
        |folder: &Path| fs::set_permissions(folder, std::fs::Permissions::from_mode(0o700));
    unlock(root)?;
    // Folders are moved up to here, so that no path gets longer.
    let trash = tempfile::tempdir_in(root)?.keep();
    let mut moved: u64 = 0;
    let mut waiting = vec![root.to_owned()];
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let path = entry.path();
            if path == trash {
                continue;
            }
            if entry.file_type()?.is_dir() {
                unlock(&path)?;
                let place = trash.join(moved.to_string());
                moved += 1;
                fs::rename(&path, &place)?;
                waiting.push(place);
            } else {
                fs::remove_file(path)?;
            }
        }
        if folder != root {
            fs::remove_dir(&folder)?;
        }
    }
    fs::remove_dir(&trash)?;
    fs::remove_dir(root)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_ends_with_whatever_is_in_it() {
        let folder = Scratch::new().unwrap();
        let path = folder.path().to_owned();
        // As deep as paths and stacks are not.
        let deep = path.join("deep");
        for _ in 0..3000 {
            let above = path.join("above");
            fs::create_dir(&above).unwrap();
            if deep.exists() {
                fs::rename(&deep, above.join("d")).unwrap();
            }
            fs::rename(&above, &deep).unwrap();
        }
        let outside = tempfile::NamedTempFile::new().unwrap();
        let locked = path.join("locked");
        fs::create_dir(&locked).unwrap();
        fs::write(locked.join("file"), "").unwrap();
        std::os::unix::fs::symlink(outside.path(), locked.join("link")).unwrap();
        std::os::unix::fs::symlink("/", locked.join("root")).unwrap();
        fs::set_permissions(&locked, std::fs::Permissions::from_mode(0o500)).unwrap();
        drop(folder);
        assert!(!path.exists());
        assert!(outside.path().exists(), "links are not followed");
    }
}
