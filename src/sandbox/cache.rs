//! Prepared guests on disk: `<key>` names the content, `<content hash>.cwasm` (compiled code) and
//! `<content hash>.image` (memory) hold it. `….seen` beside them says which file was checked, and
//! `<key>.lock` who prepares a guest.
//!
//! A key is the hash of everything the compiled guest depends on. Files are written beside their
//! place and renamed into it, and a lock per key keeps two processes from doing the work twice.
//!
//! Loading machine code trusts whoever wrote it. So the folder and its files are for their owner
//! only, and are used only if they belong to the current user, nobody else may write them, and
//! the content has the hash it was stored under. That hash guards against damage, not against the
//! user, who could change it as well; so it is computed once for each file, and again when the
//! kernel's times say that the file was touched.

use std::fs::{DirBuilder, File, Metadata, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};

use blake3::{Hash, Hasher};

use super::error::SandboxError;
use super::memory::write_sparse;

/// Overrides the cache folder.
const OVERRIDE: &str = "WARDIAN_CACHE";
/// Guests that are kept; each takes about 30 MB, and each release makes a new one. The science
/// runtime, which takes ten times as much, counts twice.
const KEPT: usize = 6;
const CODE: &str = "cwasm";
const IMAGE: &str = "image";
/// Beside a file whose hash was found right: which file that was.
const SEEN: &str = "seen";

/// A prepared guest, in open files.
#[derive(Debug)]
pub(super) struct Stored {
    /// Hash of the guest that was compiled.
    pub(super) id: Hash,
    /// Compiled code.
    pub(super) code: File,
    /// The content of its memory.
    pub(super) image: File,
}

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

    /// Returns whether something was kept under `key`, sound or not.
    pub(super) fn has(&self, key: &Hash) -> bool {
        self.key_path(key).exists()
    }

    /// Returns how many guests are kept, under whatever key.
    pub(super) fn count(&self) -> usize {
        let entries = fs_err::read_dir(&self.folder).into_iter().flatten();
        let is_code = |path: PathBuf| path.extension().is_some_and(|found| found == CODE);
        entries
            .flatten()
            .filter(|entry| is_code(entry.path()))
            .count()
    }

    /// Returns the guest of `key`, if there is a sound one.
    ///
    /// # Errors
    ///
    /// Returns an error if a file cannot be read or is open to others. A damaged one counts as
    /// absent.
    pub(super) fn load(&self, key: &Hash) -> Result<Option<Stored>, SandboxError> {
        let Some(content) = self.absent_is_none(fs_err::read_to_string(self.key_path(key)))? else {
            return Ok(None);
        };
        let hashes: Vec<_> = content.lines().map(Hash::from_hex).collect();
        let [Ok(id), Ok(code), Ok(image)] = hashes[..] else {
            return Ok(None);
        };
        // Hashing is most of what a first load does.
        let (code, image) = rayon::join(
            || self.open_file(&code, CODE),
            || self.open_file(&image, IMAGE),
        );
        Ok(match (code?, image?) {
            (Some(code), Some(image)) => Some(Stored { id, code, image }),
            _ => None,
        })
    }

    /// Opens a file by the hash of its content; `None` if it is absent or damaged.
    ///
    /// # Errors
    ///
    /// As for [`Self::load`].
    pub(super) fn open_file(
        &self,
        expected: &Hash,
        extension: &str,
    ) -> Result<Option<File>, SandboxError> {
        let path = self.content_path(expected, extension);
        let Some(file) = self.absent_is_none(fs_err::File::open(&path))? else {
            return Ok(None);
        };
        let mut file = file.into_file();
        let metadata = file.metadata().map_err(|source| self.error(source))?;
        self.check_owner(&path, &metadata)?;
        let seen_path = path.with_extension(format!("{extension}.{SEEN}"));
        let identity = identity(&metadata);
        if self
            .absent_is_none(fs_err::read_to_string(&seen_path))?
            .as_ref()
            == Some(&identity)
        {
            return Ok(Some(file));
        }
        let mut hasher = Hasher::new();
        hasher
            .update_reader(&mut file)
            .map_err(|source| self.error(source))?;
        if hasher.finalize() != *expected {
            tracing::warn!(path = %path.display(), "cached guest is damaged; building it again");
            return Ok(None);
        }
        // In a folder that cannot be written, each load hashes.
        let _ = self.write(&seen_path, |file| file.write_all(identity.as_bytes()));
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

    /// Keeps a guest under `key` and forgets guests of long ago.
    pub(super) fn store(
        &self,
        key: &Hash,
        id: &Hash,
        code: &[u8],
        image: &[u8],
    ) -> Result<(), SandboxError> {
        let hashes = [blake3::hash(code), blake3::hash(image)];
        let store = || {
            self.write(&self.content_path(&hashes[0], CODE), |file| {
                file.write_all(code)
            })?;
            self.write(&self.content_path(&hashes[1], IMAGE), |file| {
                write_sparse(file, image)
            })?;
            self.write(&self.key_path(key), |file| {
                let [code, image] = hashes.map(|hash| hash.to_hex());
                writeln!(file, "{}\n{code}\n{image}", id.to_hex())
            })
        };
        store().map_err(|source| self.error(source))?;
        for extension in [CODE, IMAGE] {
            if let Err(error) = self.prune(extension) {
                // Another process may be at it, too.
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "old guests are left"
                );
            }
        }
        Ok(())
    }

    /// Keeps a file under `hash`, which is that of its content, until somebody deletes it.
    pub(super) fn store_file(
        &self,
        hash: &Hash,
        extension: &str,
        content: &[u8],
    ) -> Result<(), SandboxError> {
        self.write(&self.content_path(hash, extension), |file| {
            file.write_all(content)
        })
        .map_err(|source| self.error(source))
    }

    /// Writes a file that only its owner may read, all at once.
    fn write(
        &self,
        path: &Path,
        content: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut file = tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o600))
            .tempfile_in(&self.folder)?;
        content(file.as_file_mut())?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    }

    /// Removes all but the newest files. Processes that run a guest keep their mapping.
    fn prune(&self, extension: &str) -> io::Result<()> {
        let mut found = Vec::new();
        for entry in fs_err::read_dir(&self.folder)? {
            let entry = entry?;
            if entry
                .path()
                .extension()
                .is_some_and(|found| found == extension)
            {
                found.push((entry.metadata()?.modified()?, entry.path()));
            }
        }
        found.sort();
        let surplus = found.len().saturating_sub(KEPT);
        found.iter().take(surplus).try_for_each(|(_, path)| {
            let _ = fs_err::remove_file(path.with_extension(format!("{extension}.{SEEN}")));
            fs_err::remove_file(path)
        })
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

    fn content_path(&self, content: &Hash, extension: &str) -> PathBuf {
        self.folder
            .join(content.to_hex().as_str())
            .with_extension(extension)
    }

    fn error(&self, source: io::Error) -> SandboxError {
        SandboxError::Cache {
            path: self.folder.clone(),
            source,
        }
    }
}

/// What changes when a file is replaced or written to.
fn identity(metadata: &Metadata) -> String {
    format!(
        "{}:{} {} {}.{} {}.{}",
        metadata.dev(),
        metadata.ino(),
        metadata.len(),
        metadata.mtime(),
        metadata.mtime_nsec(),
        metadata.ctime(),
        metadata.ctime_nsec(),
    )
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
        cache.store(&key, &key, b"code", b"memory").unwrap();
        let stored = cache.load(&key).unwrap().expect("just stored");
        assert_eq!(stored.code.metadata().unwrap().mode() & 0o777, 0o600);
        assert_eq!(
            fs_err::metadata(&cache.folder).unwrap().mode() & 0o777,
            0o700
        );
    }

    #[test]
    fn damaged_content_counts_as_absent() {
        let (_folder, cache) = cache();
        let key = blake3::hash(b"key");
        cache.store(&key, &key, b"code", b"memory").unwrap();
        cache.load(&key).unwrap().expect("found right, and noted");
        fs_err::write(cache.content_path(&blake3::hash(b"code"), CODE), b"c0de").unwrap();
        assert!(cache.load(&key).unwrap().is_none());
    }

    #[test]
    fn a_file_that_others_may_write_is_refused() {
        let (_folder, cache) = cache();
        let key = blake3::hash(b"key");
        cache.store(&key, &key, b"code", b"memory").unwrap();
        let path = cache.content_path(&blake3::hash(b"code"), CODE);
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
                .store(
                    &blake3::hash(name.as_bytes()),
                    &blake3::hash(b"id"),
                    name.as_bytes(),
                    b"memory",
                )
                .unwrap();
        }
        let kept = fs_err::read_dir(&cache.folder)
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().path().extension() == Some(CODE.as_ref()))
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
