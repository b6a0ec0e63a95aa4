//! A guest made ready to instantiate: started, frozen and compiled once, then kept on disk.

use std::fmt;
use std::hash::{Hash as _, Hasher as StdHasher};
use std::io;
use std::time::{Duration, Instant};

use wasmtime::{Engine, Module};

use super::cache::{Cache, CacheFolder, Stored};
use super::error::SandboxError;
use super::guest::{Guest, ModuleAndInput, Source};
use super::memory::Image;
use super::runtime::Meter;
use super::{meter, science, snapshot};

/// The sources that shape a snapshot and its meter: part of the cache's key.
const SNAPSHOT_SOURCES: [&str; 7] = [
    include_str!("snapshot/mod.rs"),
    include_str!("wasi.rs"),
    include_str!("host.rs"),
    include_str!("meter/mod.rs"),
    include_str!("meter/outline.rs"),
    include_str!("meter/shape.rs"),
    include_str!("meter/rewrite.rs"),
];

/// What [`WasmRuntime::load`](super::WasmRuntime::load) is doing, when it does more than map
/// files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// Another process prepares the same guest.
    Waiting,
    /// The interpreter is started and frozen.
    Snapshotting,
    /// The frozen interpreter is compiled.
    Compiling,
    /// The science runtime is compiled.
    CompilingScience,
    /// The guest is ready.
    Prepared {
        /// How long that took.
        elapsed: Duration,
    },
}

impl fmt::Display for Progress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Waiting => {
                formatter.write_str("Waiting for another process to prepare the sandbox")
            }
            Self::Snapshotting => {
                formatter.write_str("Preparing the Python sandbox (once, some seconds)")
            }
            Self::Compiling => formatter.write_str("Compiling the Python sandbox"),
            Self::CompilingScience => {
                formatter.write_str("Compiling the science runtime (once, a minute or more)")
            }
            Self::Prepared { elapsed } => {
                write!(
                    formatter,
                    "Prepared the Python sandbox in {:.1} s",
                    elapsed.as_secs_f64()
                )
            }
        }
    }
}

/// What the cache has of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CachedGuest {
    /// Nothing: there is no cache folder.
    NoFolder,
    /// It is there, and its content is what was stored.
    Ready,
    /// It is not there.
    Absent {
        /// Guests of other versions, machines or settings that are.
        others: usize,
    },
    /// It is there, and its content is another than what was stored, or is gone.
    Damaged,
}

impl CachedGuest {
    /// Looks a guest up without preparing it.
    pub(super) fn find(
        engine: &Engine,
        guest: &Guest,
        folder: &CacheFolder,
    ) -> Result<Self, SandboxError> {
        let Some(folder) = folder.path() else {
            return Ok(Self::NoFolder);
        };
        let cache = Cache::open(folder)?;
        let key = cache_key(engine, guest);
        Ok(match cache.load(&key)? {
            Some(_) => Self::Ready,
            None if cache.has(&key) => Self::Damaged,
            None => Self::Absent {
                others: cache.count(),
            },
        })
    }
}

/// A frozen guest, compiled for one engine.
pub(super) struct CompiledGuest {
    /// Hash of the frozen guest, which does not depend on the machine.
    pub(super) id: blake3::Hash,
    pub(super) module: Module,
    pub(super) image: Image,
}

impl CompiledGuest {
    /// Loads the guest from the cache, or prepares it and keeps it there.
    ///
    /// # Errors
    ///
    /// Returns an error if the guest is damaged, unsound or fails to start. A cache that cannot be
    /// used is only warned of.
    pub(super) fn load(
        engine: &Engine,
        guest: &Guest,
        meter: Meter,
        folder: &CacheFolder,
        progress: &mut impl FnMut(Progress),
    ) -> Result<Self, SandboxError> {
        match folder.path().map(Cache::open) {
            Some(Ok(cache)) => Self::load_or_prepare(engine, guest, meter, &cache, progress),
            Some(Err(error)) => {
                warn_of_cache(&error);
                Self::prepare(engine, guest, meter, None, progress)?.into_loaded()
            }
            None => Self::prepare(engine, guest, meter, None, progress)?.into_loaded(),
        }
    }

    fn load_or_prepare(
        engine: &Engine,
        guest: &Guest,
        meter: Meter,
        cache: &Cache,
        progress: &mut impl FnMut(Progress),
    ) -> Result<Self, SandboxError> {
        let key = cache_key(engine, guest);
        let load = || Self::find(engine, cache, &key);
        if let Some(loaded) = load()? {
            return Ok(loaded);
        }
        let lock = cache.lock(&key, || progress(Progress::Waiting));
        if lock.is_ok()
            && let Some(loaded) = load()?
        {
            return Ok(loaded);
        }
        // Without a lock the work may be done twice, but what is stored is the same.
        let prepared = Self::prepare(engine, guest, meter, Some(cache), progress)?;
        prepared.store(cache, &key)?;
        prepared.into_loaded()
    }

    /// Returns what is in the cache under `key`, if it can be used.
    fn find(
        engine: &Engine,
        cache: &Cache,
        key: &blake3::Hash,
    ) -> Result<Option<Self>, SandboxError> {
        match cache.load(key) {
            Ok(stored) => stored
                .map(|stored| Self::from_cache(engine, stored))
                .transpose(),
            Err(error) => {
                warn_of_cache(&error);
                Ok(None)
            }
        }
    }

    fn prepare(
        engine: &Engine,
        guest: &Guest,
        meter: Meter,
        cache: Option<&Cache>,
        progress: &mut impl FnMut(Progress),
    ) -> Result<Prepared, SandboxError> {
        let started = Instant::now();
        let prepared = match guest.source() {
            Source::Module(guest) => Self::prepare_module(engine, guest, meter, progress)?,
            Source::Science(parts) => Self::prepare_science(engine, parts, cache, progress)?,
        };
        progress(Progress::Prepared {
            elapsed: started.elapsed(),
        });
        Ok(prepared)
    }

    fn prepare_module(
        engine: &Engine,
        guest: &ModuleAndInput,
        meter: Meter,
        progress: &mut impl FnMut(Progress),
    ) -> Result<Prepared, SandboxError> {
        progress(Progress::Snapshotting);
        let frozen = snapshot::snapshot(guest)?;
        let id = id(&frozen.code, &frozen.image);
        progress(Progress::Compiling);
        let code = match meter {
            Meter::Loops => meter::meter(&frozen.code)?,
            Meter::Instructions => frozen.code,
        };
        let module =
            Module::new(engine, code).map_err(SandboxError::engine("compiling the guest"))?;
        Ok(Prepared {
            id,
            module,
            image: frozen.image,
        })
    }

    /// The module that is not started yet is kept, too: compiling it is nearly all the work, and
    /// what it is started with changes more often.
    fn prepare_science(
        engine: &Engine,
        parts: &science::Parts,
        cache: Option<&Cache>,
        progress: &mut impl FnMut(Progress),
    ) -> Result<Prepared, SandboxError> {
        let key = unstarted_key(engine);
        let found = match cache {
            Some(cache) => Self::find(engine, cache, &key)?,
            None => None,
        };
        let unstarted = if let Some(found) = found {
            found
        } else {
            progress(Progress::CompilingScience);
            let shaped = science::shape(parts)?;
            let module = Module::new(engine, &shaped.code)
                .map_err(SandboxError::engine("compiling the science runtime"))?;
            let compiled = Prepared {
                id: id(&shaped.code, &shaped.data),
                module,
                image: shaped.data,
            };
            if let Some(cache) = cache {
                compiled.store(cache, &key)?;
            }
            compiled.into_loaded()?
        };
        progress(Progress::Snapshotting);
        let image = science::start(engine, &unstarted.module, unstarted.image, parts)?;
        Ok(Prepared {
            id: id(unstarted.id.as_bytes(), &image),
            module: unstarted.module,
            image,
        })
    }

    #[expect(unsafe_code, reason = "loading a precompiled guest")]
    fn from_cache(engine: &Engine, stored: Stored) -> Result<Self, SandboxError> {
        // SAFETY: the file was written by `load_or_prepare` of this version for this engine (the
        // cache's key says so), belongs to the current user, is writable by nobody else, and has
        // the hash of what was written: `Cache::load` found that on this very descriptor, now or
        // before, with the same inode, size and times. Files in the cache are replaced by rename,
        // never changed in place.
        let module = unsafe { Module::deserialize_open_file(engine, stored.code) }
            .map_err(SandboxError::engine("loading the compiled guest"))?;
        Ok(Self {
            id: stored.id,
            module,
            image: Image::map(stored.image).map_err(image_error)?,
        })
    }
}

/// A guest prepared in this process, its memory not yet where slots can map it.
struct Prepared {
    id: blake3::Hash,
    module: Module,
    image: Vec<u8>,
}

impl Prepared {
    /// Keeps the guest in the cache, if that can be used.
    fn store(&self, cache: &Cache, key: &blake3::Hash) -> Result<(), SandboxError> {
        let code = self
            .module
            .serialize()
            .map_err(SandboxError::engine("serialising the compiled guest"))?;
        if let Err(error) = cache.store(key, &self.id, &code, &self.image) {
            warn_of_cache(&error);
        }
        Ok(())
    }

    fn into_loaded(self) -> Result<CompiledGuest, SandboxError> {
        Ok(CompiledGuest {
            id: self.id,
            module: self.module,
            image: Image::new(&self.image).map_err(image_error)?,
        })
    }
}

/// Tells one frozen guest from another.
fn id(code: &[u8], image: &[u8]) -> blake3::Hash {
    let mut id = blake3::Hasher::new();
    id.update(code).update(image);
    id.finalize()
}

fn image_error(source: io::Error) -> SandboxError {
    SandboxError::Memory {
        activity: "mapping the guest's memory image",
        source,
    }
}

fn warn_of_cache(error: &SandboxError) {
    tracing::warn!(
        error = error as &dyn std::error::Error,
        "sandbox cache is unusable; the guest is prepared for this process only"
    );
}

/// Hashes by blake3 whatever can be hashed.
struct KeyHasher(blake3::Hasher);

impl StdHasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&self) -> u64 {
        0 // unused: the key is the whole blake3 hash
    }
}

/// Hashes everything that the science runtime's compiled module depends on.
fn unstarted_key(engine: &Engine) -> blake3::Hash {
    let mut hasher = KeyHasher(blake3::Hasher::new());
    "not started".hash(&mut hasher);
    science::SHAPE.hash(&mut hasher);
    science::Parts::hashes().hash(&mut hasher);
    engine.precompile_compatibility_hash().hash(&mut hasher);
    hasher.0.finalize()
}

/// Hashes everything that a compiled guest depends on.
fn cache_key(engine: &Engine, guest: &Guest) -> blake3::Hash {
    let mut hasher = KeyHasher(blake3::Hasher::new());
    env!("CARGO_PKG_VERSION").hash(&mut hasher);
    match guest.source() {
        Source::Module(guest) => {
            SNAPSHOT_SOURCES.hash(&mut hasher);
            guest.module().hash(&mut hasher);
            guest.stdin().hash(&mut hasher);
        }
        Source::Science(_) => {
            SNAPSHOT_SOURCES[..3].hash(&mut hasher);
            science::Parts::hashes().hash(&mut hasher);
            for source in science::sources() {
                source.hash(&mut hasher);
            }
        }
    }
    // wasmtime's version, the target's CPU features and every setting that shapes the code.
    engine.precompile_compatibility_hash().hash(&mut hasher);
    hasher.0.finalize()
}
