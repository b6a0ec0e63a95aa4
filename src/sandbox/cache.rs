//! Compiled guests on disk: `<key>` names the content, `<content hash>.cwasm` holds it.
//!
//! A key is the hash of everything the compiled guest depends on. Files are written beside their
//! place and renamed into it, and a lock per key keeps two processes from doing the work twice.
//!
//! Loading machine code trusts whoever wrote it. So the folder and its files are for their owner
//! only, and are used only if they belong to the current user, nobody else may write them, and
//! the content has the hash it was stored under.

use std::fs::{DirBuilder, File, Metadata, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};

use blake3::{Hash, Hasher};

use super::error::SandboxError;

/// Overrides the cache folder.
const OVERRIDE: &str = "WARDIAN_CACHE";
/// Compiled guests that are kept; each takes about 50 MB, and each release makes a new one.
const KEPT: usize = 4;
const COMPILED: &str = "cwasm";

/// Where compiled guests are kept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CacheFolder {
    /// `$WARDIAN_CACHE`, else `$XDG_CACHE_HOME/wardian`, else `~/.cache/wardian`.
    #[default]
    User,
    /// This folder, created if need be.
    At(PathBuf),
    /// Nowhere: the guest is compiled anew in each process.
    Disabled,
}

impl CacheFolder {
    /// Returns the folder's path, if there is to be one.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        match self {
            Self::Disabled => None,
            Self::At(path) => Some(path.clone()),
            Self::User => variable(OVERRIDE)
                .map(PathBuf::from)
                .or_else(|| variable("XDG_CACHE_HOME").map(|path| Path::new(&path).join("wardian")))
                .or_else(|| variable("HOME").map(|path| Path::new(&path).join(".cache/wardian"))),
        }
    }
}

/// An open cache folder.
#[derive(Debug)]
pub(super) struct Cache {
    folder: PathBuf,
    owner: u32,
}

impl Cache {
    /// Opens `folder`, creating it for the current user only.
    ///
    /// # Errors
    ///
    /// Returns [`SandboxError::Cache`] if it cannot be created, and
    /// [`SandboxError::UntrustedCache`] if others may write to it.
    pub(super) fn open(folder: PathBuf) -> Result<Self, SandboxError> {
        let open = || {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&folder)?;
            // The only way to ask for the user's id without a C call: our own process is ours.
            Ok((
                fs_err::metadata(&folder)?,
                fs_err::metadata("/proc/self")?.uid(),
            ))
        };
        let (metadata, owner) = open().map_err(|source| SandboxError::Cache {
            path: folder.clone(),
            source,
        })?;
        let cache = Self { folder, owner };
        cache.check_owner(&cache.folder, &metadata)?;
        Ok(cache)
    }

    /// Returns the compiled guest of `key`, if there is a sound one.
    ///
    /// # Errors
    ///
    /// Returns an error if a file cannot be read or is open to others. A damaged one counts as
    /// absent.
    pub(super) fn load(&self, key: &Hash) -> Result<Option<File>, SandboxError> {
        let Some(content) = self.absent_is_none(fs_err::read_to_string(self.key_path(key)))? else {
            return Ok(None);
        };
        let Ok(expected) = Hash::from_hex(content.trim()) else {
            return Ok(None);
        };
        let path = self.content_path(&expected);
        let Some(file) = self.absent_is_none(fs_err::File::open(&path))? else {
            return Ok(None);
        };
        let mut file = file.into_file();
        let metadata = file.metadata().map_err(|source| self.error(source))?;
        self.check_owner(&path, &metadata)?;
        let mut hasher = Hasher::new();
        hasher
            .update_reader(&mut file)
            .map_err(|source| self.error(source))?;
        if hasher.finalize() != expected {
            tracing::warn!(path = %path.display(), "cached guest is damaged; building it again");
            return Ok(None);
        }
        Ok(Some(file))
    }

    /// Waits until no other process prepares `key`; the lock ends with the returned file.
    ///
    /// `waiting` is called if there is something to wait for.
    pub(super) fn lock(&self, key: &Hash, waiting: impl FnOnce()) -> Result<File, SandboxError> {
        let lock = || {
            let file = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .open(self.folder.join(format!("{}.lock", key.to_hex())))?;
            if file.try_lock().is_err() {
                waiting();
                file.lock()?;
            }
            Ok(file)
        };
        lock().map_err(|source| self.error(source))
    }

    /// Keeps `compiled` under `key` and forgets guests of long ago.
    pub(super) fn store(&self, key: &Hash, compiled: &[u8]) -> Result<(), SandboxError> {
        let content = blake3::hash(compiled);
        let store = || {
            self.write(&self.content_path(&content), compiled)?;
            self.write(&self.key_path(key), content.to_hex().as_bytes())
        };
        store().map_err(|source| self.error(source))?;
        if let Err(error) = self.prune() {
            // Another process may be at it, too.
            tracing::debug!(
                error = &error as &dyn std::error::Error,
                "old guests are left"
            );
        }
        Ok(())
    }

    /// Writes a file that only its owner may read, all at once.
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut file = tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o600))
            .tempfile_in(&self.folder)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    }

    /// Removes all but the newest compiled guests. Processes that run one keep their mapping.
    fn prune(&self) -> io::Result<()> {
        let mut found = Vec::new();
        for entry in fs_err::read_dir(&self.folder)? {
            let entry = entry?;
            if entry
                .path()
                .extension()
                .is_some_and(|extension| extension == COMPILED)
            {
                found.push((entry.metadata()?.modified()?, entry.path()));
            }
        }
        found.sort();
        let surplus = found.len().saturating_sub(KEPT);
        found
            .iter()
            .take(surplus)
            .try_for_each(|(_, path)| fs_err::remove_file(path))
    }

    fn check_owner(&self, path: &Path, metadata: &Metadata) -> Result<(), SandboxError> {
        if metadata.uid() == self.owner && metadata.mode() & 0o022 == 0 {
            Ok(())
        } else {
            Err(SandboxError::UntrustedCache {
                path: path.to_owned(),
            })
        }
    }

    fn absent_is_none<T>(&self, result: io::Result<T>) -> Result<Option<T>, SandboxError> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(self.error(source)),
        }
    }

    fn key_path(&self, key: &Hash) -> PathBuf {
        self.folder.join(key.to_hex().as_str())
    }

    fn content_path(&self, content: &Hash) -> PathBuf {
        self.folder
            .join(content.to_hex().as_str())
            .with_extension(COMPILED)
    }

    fn error(&self, source: io::Error) -> SandboxError {
        SandboxError::Cache {
            path: self.folder.clone(),
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> (tempfile::TempDir, Cache) {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path().join("cache")).unwrap();
        (folder, cache)
    }

    #[test]
    fn what_was_stored_is_loaded() {
        let (_folder, cache) = cache();
        let key = blake3::hash(b"key");
        assert!(cache.load(&key).unwrap().is_none());
        cache.store(&key, b"code").unwrap();
        let file = cache.load(&key).unwrap().expect("just stored");
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600);
        assert_eq!(
            fs_err::metadata(&cache.folder).unwrap().mode() & 0o777,
            0o700
        );
    }

    #[test]
    fn damaged_content_counts_as_absent() {
        let (_folder, cache) = cache();
        let key = blake3::hash(b"key");
        cache.store(&key, b"code").unwrap();
        fs_err::write(cache.content_path(&blake3::hash(b"code")), b"c0de").unwrap();
        assert!(cache.load(&key).unwrap().is_none());
    }

    #[test]
    fn a_file_that_others_may_write_is_refused() {
        let (_folder, cache) = cache();
        let key = blake3::hash(b"key");
        cache.store(&key, b"code").unwrap();
        let path = cache.content_path(&blake3::hash(b"code"));
        fs_err::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        let error = cache.load(&key).expect_err("writable by all");
        assert!(matches!(error, SandboxError::UntrustedCache { .. }));
    }

    #[test]
    fn a_folder_that_others_may_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs_err::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        let error = Cache::open(folder.path().to_owned()).expect_err("writable by all");
        assert!(matches!(error, SandboxError::UntrustedCache { .. }));
    }

    #[test]
    fn old_guests_are_forgotten() {
        let (_folder, cache) = cache();
        for index in 0..KEPT + 2 {
            let name = index.to_string();
            cache
                .store(&blake3::hash(name.as_bytes()), name.as_bytes())
                .unwrap();
        }
        let kept = fs_err::read_dir(&cache.folder)
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().path().extension() == Some(COMPILED.as_ref()))
            .count();
        assert_eq!(kept, KEPT);
    }

    #[test]
    fn a_lock_is_held_until_it_is_dropped() {
        let (_folder, cache) = cache();
        let key = blake3::hash(b"key");
        let held = cache.lock(&key, || panic!("nobody holds it")).unwrap();
        let second = File::options()
            .write(true)
            .open(cache.folder.join(format!("{}.lock", key.to_hex())));
        assert!(second.unwrap().try_lock().is_err());
        drop(held);
        cache.lock(&key, || panic!("it was released")).unwrap();
    }
}
