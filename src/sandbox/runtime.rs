//! The wasmtime engine, the compiled guest, and the clock that ends overlong calls.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use wasmtime::{Config, Engine, InstancePre, Linker, Module, Store};

use super::bridge::{Dialogue, DialogueOutcome};
use super::cache::CacheFolder;
use super::cancel::Cancel;
use super::compiled::{CachedGuest, CompiledGuest, Progress};
use super::error::SandboxError;
use super::guest::{Guest, Source};
use super::host::Host;
use super::limits::Limits;
use super::memory::{Creator, EXCEPTIONS, Image, Pagemap, Slot};
use super::outcome::{ExecOutcome, ExecRequest, Exit};
use super::pool::{Lease, Pool, Statistics};
use super::saved::Snapshot;
use super::science::{self, Files};
use super::session::Session;
use super::{Sandbox, bridge, budget, wasi};

/// How often running guests check their deadline. Waking 200 times a second costs nothing that
/// can be measured; deadlines are seconds.
pub(super) const EPOCH_TICK: Duration = Duration::from_millis(5);

const MIB: usize = 1 << 20;
/// Reserved for each memory, so that no access needs a bounds check.
const MEMORY_RESERVATION: u64 = 4 << 30;
/// Unmapped behind that, for constant offsets.
pub(super) const MEMORY_GUARD: usize = 32 * MIB;

/// What a guest and the host ask of each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Interface {
    /// As `wasm-runtimes/README.md` says.
    Own,
    /// That of the science runtime's guest.
    Science,
}

impl Interface {
    /// Returns the native stack for guest code. Python's own limit on nested C calls needs less, so
    /// a program that recurses meets `RecursionError`, not a trap; the science runtime's guest
    /// has none that can be relied on.
    pub(super) fn wasm_stack(self) -> usize {
        match self {
            Self::Own => 4 * MIB,
            Self::Science => 16 * MIB,
        }
    }

    /// Returns the stack that guest calls run on: guest code, and the host functions it calls.
    pub(super) fn async_stack(self) -> usize {
        self.wasm_stack() + 2 * MIB
    }
}

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
    /// How an instance is made fresh for its next guest.
    pub restore: Restore,
    /// Compares all memory of an instance with the image after every so many restores; default
    /// never. Each time takes some milliseconds.
    pub audit_every: Option<NonZeroU32>,
    /// How fuel is counted; default [`Meter::Loops`].
    pub meter: Meter,
}

/// How a guest's fuel is counted and its deadline kept.
///
/// With either, every program ends, and the same program uses the same fuel; the two meters count
/// differently.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Meter {
    /// By loop iterations and calls, weighed by the code in them: about one unit per operator.
    ///
    /// Slows Python down by 3 to 5 %.
    #[default]
    Loops,
    /// By executed operators, exactly, by wasmtime's fuel and epochs.
    ///
    /// Slows Python down by a third and more.
    Instructions,
}

/// How an instance is made fresh for its next guest.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Restore {
    /// Its memory is put back page by page, its stack pointer reset. Sound because these are all
    /// the state a guest has, which is proved from the module's code before it is used.
    #[default]
    InPlace,
    /// In addition all its memory is given back to the kernel, and a new WebAssembly instance is
    /// made: some 100 µs slower, and independent of that proof.
    Reinstantiate,
}

impl Default for RuntimeOptions {
    fn default() -> Self {
        Self {
            guest: Guest::python(),
            cache: CacheFolder::User,
            max_instances: 1024,
            restore: Restore::default(),
            audit_every: None,
            meter: Meter::default(),
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
    // Instances go first.
    pool: Pool,
    prepared: Prepared,
    /// For [`Meter::Instructions`]; dropped last: running guests need its ticks.
    _ticker: Option<Ticker>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Inner")
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

/// What instances are made of.
pub(super) struct Prepared {
    engine: Engine,
    guest: InstancePre<Host>,
    guest_id: blake3::Hash,
    interface: Interface,
    /// What a fresh guest finds, if the host keeps its files.
    files: Option<Box<Files>>,
    image: Arc<Image>,
    /// Absent on kernels that cannot tell which pages were written, and where it is not wanted.
    pagemap: Option<Arc<Pagemap>>,
    restore: Restore,
    meter: Meter,
    audit_every: Option<NonZeroU32>,
    restores: AtomicU32,
}

impl Prepared {
    fn new(
        engine: Engine,
        compiled: CompiledGuest,
        options: &RuntimeOptions,
    ) -> Result<Self, SandboxError> {
        let pagemap = match options.restore {
            Restore::Reinstantiate => None,
            Restore::InPlace => Pagemap::open()
                .inspect_err(|error| {
                    tracing::warn!(
                        error = error as &dyn std::error::Error,
                        "this kernel cannot tell which pages were written (Linux 6.7 can); \
                         fresh steps take some 100 µs longer"
                    );
                })
                .ok(),
        };
        let interface = options.guest.interface();
        let files = match options.guest.source() {
            Source::Module(_) => None,
            Source::Science(parts) => Some(Box::new(science::fresh_files(parts)?)),
        };
        Ok(Self {
            guest: link(&engine, &compiled.module, interface)?,
            guest_id: compiled.id,
            interface,
            files,
            engine,
            image: Arc::new(compiled.image),
            pagemap: pagemap.map(Arc::new),
            restore: options.restore,
            meter: options.guest.meter(options.meter),
            audit_every: options.audit_every,
            restores: AtomicU32::new(0),
        })
    }

    pub(super) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(super) fn guest(&self) -> &InstancePre<Host> {
        &self.guest
    }

    /// Returns the hash of the frozen guest: of its code and its memory.
    pub(super) fn guest_id(&self) -> &blake3::Hash {
        &self.guest_id
    }

    /// Returns the memory of a fresh guest, in bytes.
    pub(super) fn image_size(&self) -> usize {
        self.image.len()
    }

    pub(super) fn meter(&self) -> Meter {
        self.meter
    }

    pub(super) fn interface(&self) -> Interface {
        self.interface
    }

    /// Makes the host's side of a fresh guest.
    pub(super) fn host(&self, limits: &Limits) -> Host {
        let mut host = Host::new(limits);
        host.carried.files.clone_from(&self.files);
        host
    }

    /// Returns whether every guest gets a store of its own: where that is asked for, and where a
    /// guest may leave exceptions in its store.
    pub(super) fn reinstantiates(&self) -> bool {
        self.restore == Restore::Reinstantiate || self.interface == Interface::Science
    }

    /// Returns whether a guest may be taken back to an earlier state of its own without being made
    /// fresh in between: where nothing more cautious is asked for.
    pub(super) fn rewinds(&self) -> bool {
        !self.reinstantiates() && self.audit_every.is_none()
    }

    /// Counts a restore, and returns whether it is to be audited.
    pub(super) fn is_audited(&self) -> bool {
        self.audit_every.is_some_and(|every| {
            let restores = self
                .restores
                .fetch_add(1, Ordering::Relaxed)
                .wrapping_add(1);
            restores % every == 0
        })
    }

    /// Makes address space for one instance.
    pub(super) fn slot(&self) -> Result<Slot, SandboxError> {
        Slot::new(&self.image, self.pagemap.as_ref(), MEMORY_GUARD).map_err(|source| {
            SandboxError::Memory {
                activity: "reserving memory for a guest",
                source,
            }
        })
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
        let meter = options.guest.meter(options.meter);
        let engine = engine(meter, options.guest.interface())?;
        let guest = CompiledGuest::load(
            &engine,
            &options.guest,
            meter,
            &options.cache,
            &mut progress,
        )?;
        let ticker = match meter {
            Meter::Loops => None,
            Meter::Instructions => Some(Ticker::start(&engine)?),
        };
        Ok(Self {
            inner: Arc::new(Inner {
                pool: Pool::new(options.max_instances),
                prepared: Prepared::new(engine, guest, options)?,
                _ticker: ticker,
            }),
        })
    }

    /// Returns what the cache has of the guest of `options`, without preparing it.
    ///
    /// # Errors
    ///
    /// Returns an error if the cache cannot be used, or if wasmtime cannot be set up on this machine.
    pub fn cached(options: &RuntimeOptions) -> Result<CachedGuest, SandboxError> {
        let meter = options.guest.meter(options.meter);
        let engine = engine(meter, options.guest.interface())?;
        CachedGuest::find(&engine, &options.guest, &options.cache)
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
        self.exec_cancellable(request, limits, &Cancel::new())
    }

    /// As [`Self::exec`], until `cancel` ends it.
    ///
    /// # Errors
    ///
    /// As for [`Self::exec`].
    pub fn exec_cancellable(
        &self,
        request: &ExecRequest,
        limits: &Limits,
        cancel: &Cancel,
    ) -> Result<ExecOutcome, SandboxError> {
        // While others use all instances, wait: as long as the program itself might take.
        match Lease::new(self, limits, limits.deadline, cancel) {
            Ok(mut instance) => instance.step(request, Some(0), cancel),
            Err(SandboxError::PoolExhausted { .. }) if cancel.is_cancelled() => {
                Ok(ExecOutcome::never_run(Exit::Cancelled))
            }
            Err(error) => Err(error),
        }
    }

    /// Opens a live interpreter.
    ///
    /// # Errors
    ///
    /// Returns an error if the limits are not usable or every instance is taken.
    pub fn session(&self, limits: &Limits) -> Result<Session, SandboxError> {
        self.instance(limits).map(Session::in_process)
    }

    /// Opens a live interpreter that goes on where a saved one was.
    ///
    /// # Errors
    ///
    /// Returns [`SandboxError::OtherGuest`] if the snapshot was made with another guest, or an
    /// error if the limits are not usable or every instance is taken.
    pub fn resume(&self, snapshot: &Snapshot, limits: &Limits) -> Result<Session, SandboxError> {
        let expected = self.prepared().guest_id();
        if snapshot.guest != *expected {
            return Err(SandboxError::OtherGuest {
                found: snapshot.guest.to_hex().to_string(),
                expected: expected.to_hex().to_string(),
            });
        }
        Session::resumed(self.instance(limits)?, snapshot)
    }

    /// Takes a fresh guest instance.
    ///
    /// # Errors
    ///
    /// Returns an error if the limits are not usable or every instance is taken.
    pub(super) fn instance(&self, limits: &Limits) -> Result<Lease, SandboxError> {
        Lease::new(self, limits, Duration::ZERO, &Cancel::new())
    }

    /// Returns what happened to the runtime's instances so far.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.inner.pool.statistics()
    }

    /// Returns the memory a fresh guest has, in bytes: the least that a limit may be.
    #[must_use]
    pub fn guest_memory(&self) -> u64 {
        self.inner.prepared.image_size() as u64
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.inner.pool
    }

    pub(super) fn prepared(&self) -> &Prepared {
        &self.inner.prepared
    }
}

impl Sandbox for WasmRuntime {
    fn exec_cancellable(
        &self,
        request: &ExecRequest,
        limits: &Limits,
        cancel: &Cancel,
    ) -> Result<ExecOutcome, SandboxError> {
        Self::exec_cancellable(self, request, limits, cancel)
    }

    fn session(&self, limits: &Limits) -> Result<Session, SandboxError> {
        Self::session(self, limits)
    }

    fn converse(&self, dialogue: &Dialogue) -> Result<DialogueOutcome, SandboxError> {
        bridge::converse(self, dialogue)
    }
}

/// Resolves the guest's imports.
pub(super) fn link(
    engine: &Engine,
    module: &Module,
    interface: Interface,
) -> Result<InstancePre<Host>, SandboxError> {
    let mut linker = Linker::new(engine);
    let defined = match interface {
        Interface::Own => wasi::add_to_linker(&mut linker)
            .and_then(|()| bridge::add_to_linker(&mut linker))
            .and_then(|()| budget::add_to_linker(&mut linker)),
        Interface::Science => science::add_to_linker(&mut linker),
    };
    defined.map_err(SandboxError::engine("defining the host functions"))?;
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
fn engine(meter: Meter, interface: Interface) -> Result<Engine, SandboxError> {
    let counts_instructions = meter == Meter::Instructions;
    let mut config = Config::new();
    config
        .consume_fuel(counts_instructions)
        .epoch_interruption(counts_instructions)
        .max_wasm_stack(interface.wasm_stack())
        .async_stack_size(interface.async_stack())
        .memory_reservation(MEMORY_RESERVATION)
        .memory_guard_size(MEMORY_GUARD as u64)
        .memory_may_move(false)
        .with_host_memory(Arc::new(Creator))
        .table_lazy_init(true)
        .wasm_backtrace_max_frames(None)
        .generate_address_map(false)
        .native_unwind_info(false);
    match interface {
        Interface::Own => refuse_exceptions(&mut config),
        Interface::Science => {
            config
                .wasm_gc(false)
                .wasm_exceptions(true)
                // Exceptions are all that is in it.
                .gc_heap_reservation(EXCEPTIONS as u64)
                .gc_heap_guard_size(0)
                .gc_heap_may_move(false);
        }
    }
    Engine::new(&config).map_err(SandboxError::engine("setting up wasmtime"))
}

/// Leaves off what no guest of ours needs.
pub(super) fn refuse_exceptions(config: &mut Config) {
    config
        .wasm_exceptions(false)
        .wasm_gc(false)
        .wasm_function_references(false)
        .gc_support(false);
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
