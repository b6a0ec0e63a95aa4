//! The folder of an episode.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;

/// A folder that ends with this, whatever an agent left in it.
#[derive(Debug)]
pub(super) struct EpisodeFolder {
    path: PathBuf,
}

impl EpisodeFolder {
    /// Makes an empty one among the files for some time.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be made.
    pub(super) fn new() -> io::Result<Self> {
        let path = tempfile::tempdir()?.keep();
        Ok(Self { path })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for EpisodeFolder {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.path) {
            tracing::warn!(%error, "the folder of an agent's episode is left over");
        }
    }
}

/// Removes a folder however deep it is: one level after the other, since to go down with it takes a stack
/// and descriptors that an agent could use up. Folders that may not be written to are made so.
fn remove(root: &Path) -> io::Result<()> {
    // Folders are moved up to here, so that no path gets longer.
    let trash = tempfile::Builder::new().tempdir_in(root.parent().unwrap_or(root))?;
    let mut moved: u64 = 0;
    let mut waiting = Vec::new();
    let mut take = |folder: &Path, waiting: &mut Vec<PathBuf>| {
        fs::set_permissions(folder, std::fs::Permissions::from_mode(0o700))?;
        let place = trash.path().join(moved.to_string());
        moved += 1;
        fs::rename(folder, &place)?;
        waiting.push(place);
        io::Result::Ok(())
    };
    take(root, &mut waiting)?;
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => take(&entry.path(), &mut waiting)?,
                false => fs::remove_file(entry.path())?,
            }
        }
        fs::remove_dir(&folder)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_ends_with_whatever_is_in_it() {
        let folder = EpisodeFolder::new().unwrap();
        let path = folder.path().to_owned();
        // As deep as paths and stacks are not.
        let mut deep = path.join("deep");
        for _ in 0..20_000 {
            let above = path.join("above");
            fs::create_dir(&above).unwrap();
            if deep.exists() {
                fs::rename(&deep, above.join("d")).unwrap();
            }
            fs::rename(&above, &deep).unwrap();
            deep = path.join("deep");
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
