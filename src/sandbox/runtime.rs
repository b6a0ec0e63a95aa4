//! The wasmtime engine, the compiled guest, and the clock that ends overlong calls.

use std::fmt;
use std::hash::{Hash as _, Hasher as StdHasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wasmtime::{
    Config, Enabled, Engine, InstanceAllocationStrategy, InstancePre, Linker, Module,
    PoolConcurrencyLimitError, PoolingAllocationConfig, Store,
};

use super::cache::{Cache, CacheFolder};
use super::error::SandboxError;
use super::guest::Guest;
use super::host::Host;
use super::instance::Instance;
use super::limits::Limits;
use super::outcome::{ExecOutcome, ExecRequest};
use super::session::Session;
use super::{Sandbox, bridge, snapshot, wasi};

/// How often running guests check their deadline. Waking 200 times a second costs nothing that
/// can be measured; deadlines are seconds.
pub(super) const EPOCH_TICK: Duration = Duration::from_millis(5);

const MIB: usize = 1 << 20;
/// Native stack for guest code. Python's own limit on nested C calls needs less, so a program
/// that recurses meets `RecursionError`, not a trap.
pub(super) const WASM_STACK: usize = 4 * MIB;
/// The stack guest calls run on: guest code, and the host functions it calls.
pub(super) const ASYNC_STACK: usize = WASM_STACK + 2 * MIB;
/// Dirty memory of an instance that is reset by copying rather than given back and faulted in
/// again. A short program dirties 0.2–0.6 MiB.
const KEEP_RESIDENT: usize = 4 * MIB;
/// Reserved for each memory, so that no access needs a bounds check.
const MEMORY_RESERVATION: u64 = 4 << 30;
/// Room for the guest's function table, which has about 10 000 entries.
const TABLE_ELEMENTS: usize = 60_000;
/// A memory image must be mapped, never copied, however sparse it is.
const DENSE_IMAGE: u64 = 1 << 30;

/// The sources that shape a snapshot: part of the cache's key.
const SNAPSHOT_SOURCES: [&str; 3] = [
    include_str!("snapshot/mod.rs"),
    include_str!("wasi.rs"),
    include_str!("host.rs"),
];

/// How to load a [`WasmRuntime`].
#[derive(Debug, Clone)]
pub struct RuntimeOptions {
    /// The guest; default the embedded CPython.
    pub guest: Guest,
    /// Where its compiled form is kept; default the user's cache folder.
    pub cache: CacheFolder,
    /// The most instances at one time, sessions and gradings (two each) included; default 1024.
    ///
    /// Each reserves 4 GiB of address space, which costs nothing until used.
    pub max_instances: u32,
}

impl Default for RuntimeOptions {
    fn default() -> Self {
        Self {
            guest: Guest::python(),
            cache: CacheFolder::User,
            max_instances: 1024,
        }
    }
}

/// What [`WasmRuntime::load`] is doing, when it does more than map a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// Another process prepares the same guest.
    Waiting,
    /// The interpreter is started and frozen.
    Snapshotting,
    /// The frozen interpreter is compiled.
    Compiling,
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

/// A compiled guest, ready to be instantiated: the wasm implementation of [`Sandbox`].
///
/// Loading takes some seconds the first time and some milliseconds afterwards; make one per process
/// and clone it, which is cheap. All methods may be called from many threads at once.
///
/// # Examples
///
/// ```no_run
/// # // No run: the first load of the Python guest takes up to a minute.
/// # fn main() -> Result<(), wardian::sandbox::SandboxError> {
/// use wardian::sandbox::{ExecRequest, Limits, RuntimeOptions, WasmRuntime};
///
/// let runtime = WasmRuntime::load(&RuntimeOptions::default(), |progress| {
///     eprintln!("{progress}");
/// })?;
/// let outcome = runtime.exec(&ExecRequest::new("print(6 * 7)"), &Limits::default())?;
/// assert!(outcome.exit.is_success());
/// assert_eq!(outcome.stdout_text(), "42\n");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct WasmRuntime {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Engine,
    guest: InstancePre<Host>,
    guest_memory: u64,
    max_instances: u32,
    /// Dropped last: running guests need its ticks.
    _ticker: Ticker,
}

impl fmt::Debug for Inner {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Inner")
            .field("guest_memory", &self.guest_memory)
            .field("max_instances", &self.max_instances)
            .finish_non_exhaustive()
    }
}

impl WasmRuntime {
    /// Loads the guest from the cache, or prepares it and keeps it there.
    ///
    /// `progress` is called only if there is something to wait for. If the cache cannot be used,
    /// a warning is logged and the guest is prepared for this process only.
    ///
    /// # Errors
    ///
    /// Returns an error if the guest is damaged, unsound or fails to start, or if wasmtime cannot
    /// be set up on this machine.
    pub fn load(
        options: &RuntimeOptions,
        mut progress: impl FnMut(Progress),
    ) -> Result<Self, SandboxError> {
        let engine = engine(options.max_instances)?;
        let cache = options
            .cache
            .path()
            .and_then(|folder| match Cache::open(folder) {
                Ok(cache) => Some(cache),
                Err(error) => {
                    warn_of_cache(&error);
                    None
                }
            });
        let module = match cache {
            Some(cache) => load_or_prepare(&engine, &options.guest, &cache, &mut progress)?,
            None => prepare(&engine, &options.guest, &mut progress)?,
        };
        let guest_memory = module
            .get_export("memory")
            .and_then(|export| {
                export
                    .memory()
                    .map(|memory| memory.minimum() * memory.page_size())
            })
            .ok_or(SandboxError::MissingExport { name: "memory" })?;
        let guest = link(&engine, &module)?;
        let ticker = Ticker::start(&engine)?;
        Ok(Self {
            inner: Arc::new(Inner {
                engine,
                guest,
                guest_memory,
                max_instances: options.max_instances,
                _ticker: ticker,
            }),
        })
    }

    /// Runs a program in a fresh interpreter.
    ///
    /// # Errors
    ///
    /// Returns an error only if the sandbox is at fault; however the program ends is in the
    /// outcome.
    pub fn exec(
        &self,
        request: &ExecRequest,
        limits: &Limits,
    ) -> Result<ExecOutcome, SandboxError> {
        let mut instance = self.instance(limits)?;
        if request.seed.is_some() {
            return instance.step(request);
        }
        instance.step(&ExecRequest {
            seed: Some(0),
            ..request.clone()
        })
    }

    /// Opens a live interpreter.
    ///
    /// # Errors
    ///
    /// Returns an error if the limits are not usable or every instance is taken.
    pub fn session(&self, limits: &Limits) -> Result<Session, SandboxError> {
        self.instance(limits).map(Session::new)
    }

    /// Makes a fresh guest instance.
    ///
    /// # Errors
    ///
    /// Returns an error if the limits are not usable or every instance is taken.
    pub(crate) fn instance(&self, limits: &Limits) -> Result<Instance, SandboxError> {
        Instance::new(self, limits)
    }

    /// Returns the memory a fresh guest has, in bytes: the least that a limit may be.
    #[must_use]
    pub fn guest_memory(&self) -> u64 {
        self.inner.guest_memory
    }

    pub(super) fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    pub(super) fn instantiate(
        &self,
        store: &mut Store<Host>,
    ) -> Result<wasmtime::Instance, SandboxError> {
        self.inner.guest.instantiate(store).map_err(|error| {
            if error.is::<PoolConcurrencyLimitError>() {
                SandboxError::PoolExhausted {
                    limit: self.inner.max_instances,
                }
            } else {
                SandboxError::engine("instantiating the guest")(error)
            }
        })
    }
}

impl Sandbox for WasmRuntime {
    fn exec(&self, request: &ExecRequest, limits: &Limits) -> Result<ExecOutcome, SandboxError> {
        Self::exec(self, request, limits)
    }
}

/// Resolves the guest's imports.
pub(super) fn link(engine: &Engine, module: &Module) -> Result<InstancePre<Host>, SandboxError> {
    let mut linker = Linker::new(engine);
    wasi::add_to_linker(&mut linker)
        .and_then(|()| bridge::add_to_linker(&mut linker))
        .map_err(SandboxError::engine("defining the host functions"))?;
    let mut probe = Store::new(engine, Host::new(&Limits::default()));
    for import in module.imports() {
        if linker.get_by_import(&mut probe, &import).is_none() {
            return Err(SandboxError::UnknownImport {
                module: import.module().to_owned(),
                name: import.name().to_owned(),
            });
        }
    }
    linker
        .instantiate_pre(module)
        .map_err(SandboxError::engine("linking the guest"))
}

/// Makes the engine that guests run on.
fn engine(max_instances: u32) -> Result<Engine, SandboxError> {
    let mut pool = PoolingAllocationConfig::new();
    pool.total_core_instances(max_instances)
        .total_memories(max_instances)
        .total_tables(max_instances)
        .total_stacks(max_instances)
        .table_elements(TABLE_ELEMENTS)
        .linear_memory_keep_resident(KEEP_RESIDENT)
        .table_keep_resident(MIB)
        .pagemap_scan(Enabled::Auto);
    let mut config = Config::new();
    config
        .consume_fuel(true)
        .epoch_interruption(true)
        .max_wasm_stack(WASM_STACK)
        .async_stack_size(ASYNC_STACK)
        .memory_reservation(MEMORY_RESERVATION)
        .memory_may_move(false)
        .memory_guaranteed_dense_image_size(DENSE_IMAGE)
        .table_lazy_init(true)
        .wasm_backtrace_max_frames(None)
        .generate_address_map(false)
        .native_unwind_info(false)
        .allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    Engine::new(&config).or_else(|error| {
        // A limit on address space (`ulimit -v`) rules the pool out, not the sandbox.
        tracing::warn!(
            error = error.as_ref() as &dyn std::error::Error,
            "no instance pool; every instance will be mapped anew"
        );
        config.allocation_strategy(InstanceAllocationStrategy::OnDemand);
        Engine::new(&config).map_err(SandboxError::engine("setting up wasmtime"))
    })
}

fn load_or_prepare(
    engine: &Engine,
    guest: &Guest,
    cache: &Cache,
    progress: &mut impl FnMut(Progress),
) -> Result<Module, SandboxError> {
    let key = cache_key(engine, guest);
    let load = || match cache.load(&key) {
        Ok(file) => file.map(|file| deserialize(engine, file)).transpose(),
        Err(error) => {
            warn_of_cache(&error);
            Ok(None)
        }
    };
    if let Some(module) = load()? {
        return Ok(module);
    }
    let lock = cache.lock(&key, || progress(Progress::Waiting));
    if lock.is_ok()
        && let Some(module) = load()?
    {
        return Ok(module);
    }
    let module = prepare(engine, guest, progress)?;
    let compiled = module
        .serialize()
        .map_err(SandboxError::engine("serialising the compiled guest"))?;
    // Without a lock the work may have been done twice, but what is stored is the same.
    if let Err(error) = cache.store(&key, &compiled) {
        warn_of_cache(&error);
    }
    Ok(module)
}

fn warn_of_cache(error: &SandboxError) {
    tracing::warn!(
        error = error as &dyn std::error::Error,
        "sandbox cache is unusable; the guest is prepared for this process only"
    );
}

fn prepare(
    engine: &Engine,
    guest: &Guest,
    progress: &mut impl FnMut(Progress),
) -> Result<Module, SandboxError> {
    let started = Instant::now();
    progress(Progress::Snapshotting);
    let snapshot = snapshot::snapshot(guest)?;
    progress(Progress::Compiling);
    let module =
        Module::new(engine, snapshot).map_err(SandboxError::engine("compiling the guest"))?;
    progress(Progress::Prepared {
        elapsed: started.elapsed(),
    });
    Ok(module)
}

#[expect(unsafe_code, reason = "loading a precompiled guest")]
fn deserialize(engine: &Engine, file: std::fs::File) -> Result<Module, SandboxError> {
    // SAFETY: the file was written by `load_or_prepare` of this version for this engine (the cache's key
    // says so), belongs to the current user, is writable by nobody else, and has the hash of what
    // was written; `Cache::load` checked that on this very descriptor. Files in the cache are
    // replaced by rename, never changed in place.
    unsafe { Module::deserialize_open_file(engine, file) }
        .map_err(SandboxError::engine("loading the compiled guest"))
}

/// Hashes everything that a compiled guest depends on.
fn cache_key(engine: &Engine, guest: &Guest) -> blake3::Hash {
    struct KeyHasher(blake3::Hasher);
    impl StdHasher for KeyHasher {
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }
        fn finish(&self) -> u64 {
            0 // unused: the key is the whole blake3 hash
        }
    }
    let mut hasher = KeyHasher(blake3::Hasher::new());
    env!("CARGO_PKG_VERSION").hash(&mut hasher);
    SNAPSHOT_SOURCES.hash(&mut hasher);
    guest.module().hash(&mut hasher);
    guest.stdin().hash(&mut hasher);
    // wasmtime's version, the target's CPU features and every setting that shapes the code.
    engine.precompile_compatibility_hash().hash(&mut hasher);
    hasher.0.finalize()
}

/// The thread that advances the engine's epoch.
struct Ticker {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    fn start(engine: &Engine) -> Result<Self, SandboxError> {
        let stop = Arc::new(AtomicBool::new(false));
        let (engine, stopped) = (engine.weak(), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("wardian-epoch".to_owned())
            .spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    std::thread::park_timeout(EPOCH_TICK);
                    match engine.upgrade() {
                        Some(engine) => engine.increment_epoch(),
                        None => return,
                    }
                }
            })
            .map_err(|source| SandboxError::Engine {
                activity: "starting the deadline thread",
                source: source.into(),
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It cannot panic; if it did, there is nothing left to stop.
            let _ = thread.join();
        }
    }
}
