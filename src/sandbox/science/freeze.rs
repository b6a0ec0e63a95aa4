//! Starts the science runtime's guest once and freezes it: module in, memory image out.
//!
//! Compiling takes a minute or more, so the guest is started in the same compiled code that later
//! programs run in ([`shape`]): the module's data is taken out beforehand and is the first image.
//! While it starts, the guest's memory grows; fresh guests are grown to that when they are made.

use std::sync::Arc;

use serde_json::json;
use wasm_encoder::reencode::{Reencode as _, RoundtripReencoder};
use wasmparser::{DataKind, Operator, Parser, Payload};
use wasmtime::{Engine, Module, Store};

use super::files::Files;
use super::wheel::Parts;
use crate::sandbox::error::SandboxError;
use crate::sandbox::host::Host;
use crate::sandbox::instance::on_own_stack;
use crate::sandbox::limits::Limits;
use crate::sandbox::memory::{Image, Slot, WASM_PAGE};
use crate::sandbox::runtime::{Interface, MEMORY_GUARD, link};
use crate::sandbox::snapshot::{self, STACK_POINTER, Throws};

/// The most pages of memory that the module may start with.
const MAX_PAGES: usize = 4096;

/// The interpreter's library, where it looks for it.
const LIBRARY_FOLDER: [&str; 3] = ["usr", "local", "lib"];
const LIBRARY_NAME: &str = "python315.zip";

/// What the interpreter is started with, in the order of loading.
const BOOT_MODULES: [(&str, &str); 2] = [
    (
        "_wardian_loop",
        include_str!("../../../wasm-runtimes/cpython/boot/_wardian_loop.py"),
    ),
    (
        "_wardian_science",
        include_str!("../../../wasm-runtimes/science/boot/_wardian_science.py"),
    ),
];
/// Loads them.
const START: &str = include_str!("../../../wasm-runtimes/science/start.py");

/// What decides how the module is compiled, beside the engine and the wheel: raised when [`shape`]
/// changes.
pub(in crate::sandbox) const SHAPE: u32 = 2;

/// What decides the started guest's memory, beside that.
pub(in crate::sandbox) fn sources() -> impl Iterator<Item = &'static str> {
    let host = [
        include_str!("freeze.rs"),
        include_str!("files/mod.rs"),
        include_str!("wasi/mod.rs"),
        include_str!("door.rs"),
        START,
    ];
    let boot = BOOT_MODULES.iter().map(|(_, source)| *source);
    host.into_iter().chain(boot)
}

/// Returns the files that every fresh guest finds.
pub(in crate::sandbox) fn fresh_files(parts: &Parts) -> Result<Files, SandboxError> {
    let mut files = Files::new();
    files
        .mount(&LIBRARY_FOLDER, LIBRARY_NAME, Arc::clone(&parts.library))
        .map_err(|source| SandboxError::Memory {
            activity: "opening the science runtime's library",
            source,
        })?;
    files.seal_all_but(&[&["work"], &["tmp"]]);
    Ok(files)
}

/// A module whose data is beside it.
pub(in crate::sandbox) struct Shaped {
    pub(in crate::sandbox) code: Vec<u8>,
    /// The memory's initial content.
    pub(in crate::sandbox) data: Vec<u8>,
}

/// Reads the module, takes its data out of it, and checks it.
///
/// # Errors
///
/// Returns an error if the module cannot be read, or has state that a snapshot would miss.
pub(in crate::sandbox) fn shape(parts: &Parts) -> Result<Shaped, SandboxError> {
    let wasm = parts.module().map_err(|source| SandboxError::Memory {
        activity: "reading the science runtime's module",
        source,
    })?;
    let shaped = without_data(&wasm)?;
    snapshot::check(&shaped.code, Throws::Allowed)?;
    Ok(shaped)
}

/// Takes the data and the names out of a module, and exports its stack pointer: the only mutable
/// global, as `snapshot::check` finds afterwards.
fn without_data(wasm: &[u8]) -> Result<Shaped, SandboxError> {
    let unsound = |reason: String| SandboxError::UnsoundGuest { reason };
    let malformed = |error: wasm_encoder::reencode::Error| unsound(format!("malformed: {error}"));
    let mut encoder = RoundtripReencoder;
    let mut module = wasm_encoder::Module::new();
    let mut data = Vec::new();
    let mut stack_pointer = None;
    for payload in Parser::new(0).parse_all(wasm) {
        match payload.map_err(|error| malformed(error.into()))? {
            Payload::MemorySection(section) => {
                for memory in section.clone() {
                    let pages = memory.map_err(|error| malformed(error.into()))?.initial;
                    let size = usize::try_from(pages)
                        .ok()
                        .filter(|&pages| pages <= MAX_PAGES);
                    let size = size.ok_or_else(|| unsound(format!("it has {pages} pages")))?;
                    data.resize(size * WASM_PAGE, 0);
                }
                raw(&mut module, &Payload::MemorySection(section), wasm);
            }
            Payload::GlobalSection(section) => {
                for (index, global) in (0_u32..).zip(section.clone()) {
                    if global.map_err(|error| malformed(error.into()))?.ty.mutable {
                        stack_pointer = Some(index);
                    }
                }
                raw(&mut module, &Payload::GlobalSection(section), wasm);
            }
            Payload::ExportSection(section) => {
                let mut exports = wasm_encoder::ExportSection::new();
                encoder
                    .parse_export_section(&mut exports, section)
                    .map_err(malformed)?;
                if let Some(index) = stack_pointer {
                    exports.export(STACK_POINTER, wasm_encoder::ExportKind::Global, index);
                }
                module.section(&exports);
            }
            Payload::DataSection(section) => {
                for segment in section {
                    let segment = segment.map_err(|error| malformed(error.into()))?;
                    let (offset, content) = active(&segment).ok_or_else(|| {
                        unsound("it has data that is not put in place".to_owned())
                    })?;
                    data.get_mut(offset..offset + content.len())
                        .ok_or_else(|| unsound("it has data outside its memory".to_owned()))?
                        .copy_from_slice(content);
                }
            }
            Payload::DataCountSection { .. } | Payload::CustomSection(_) => {}
            payload => raw(&mut module, &payload, wasm),
        }
    }
    Ok(Shaped {
        code: module.finish(),
        data,
    })
}

/// Copies a section as it is.
fn raw(module: &mut wasm_encoder::Module, payload: &Payload<'_>, wasm: &[u8]) {
    if let Some((id, range)) = payload.as_section() {
        let data = &wasm[range];
        module.section(&wasm_encoder::RawSection { id, data });
    }
}

/// Returns where a segment goes, and its content, if it is a plain one.
fn active<'a>(segment: &wasmparser::Data<'a>) -> Option<(usize, &'a [u8])> {
    let DataKind::Active {
        memory_index: 0,
        offset_expr,
    } = &segment.kind
    else {
        return None;
    };
    match offset_expr.get_operators_reader().read().ok()? {
        Operator::I32Const { value } => Some((value.cast_unsigned() as usize, segment.data)),
        _ => None,
    }
}

/// Runs the start-up code over the module's data, and returns all of memory afterwards.
///
/// # Errors
///
/// Returns an error if the guest fails to start, or is left with state beside its memory.
pub(in crate::sandbox) fn start(
    engine: &Engine,
    module: &Module,
    data: Image,
    parts: &Parts,
) -> Result<Vec<u8>, SandboxError> {
    let slot =
        Slot::new(&Arc::new(data), None, MEMORY_GUARD).map_err(|source| SandboxError::Memory {
            activity: "making memory for the science runtime",
            source,
        })?;
    let files = fresh_files(parts)?;
    let limits = Limits {
        memory: bytesize::ByteSize::gib(1),
        ..Limits::default()
    };
    let mut host = Host::new(&limits);
    host.carried.files = Some(Box::new(files.clone()));
    let mut store = Store::new(engine, host);
    store.limiter(|host| &mut host.memory);
    store
        .set_fuel(u64::MAX)
        .map_err(SandboxError::engine("setting the fuel"))?;
    // Our own code runs here; it is not interrupted.
    store.set_epoch_deadline(u64::MAX >> 1);
    let guest = link(engine, module, Interface::Science)?;
    let instance = slot
        .hand_over(|| guest.instantiate(&mut store))
        .map_err(SandboxError::engine("instantiating the science runtime"))?;
    let missing = |name| move |_| SandboxError::MissingExport { name };
    let initialize = instance
        .get_typed_func::<(), ()>(&mut store, "_initialize")
        .map_err(missing("_initialize"))?;
    let allocate = instance
        .get_typed_func::<u32, u32>(&mut store, "host_alloc")
        .map_err(missing("host_alloc"))?;
    let turn = instance
        .get_typed_func::<(u32, u32), i32>(&mut store, "turn")
        .map_err(missing("turn"))?;
    let memory = instance
        .get_memory(&mut store, "memory")
        .ok_or(SandboxError::MissingExport { name: "memory" })?;
    let stack_pointer =
        instance
            .get_global(&mut store, STACK_POINTER)
            .ok_or(SandboxError::MissingExport {
                name: STACK_POINTER,
            })?;
    let at_rest = stack_pointer.get(&mut store).i32();

    let source = start_source();
    let length = u32::try_from(source.len()).expect("the boot modules are small");
    let mut run = || {
        on_own_stack(initialize.call_async(&mut store, ()))?;
        let pointer = on_own_stack(allocate.call_async(&mut store, length))?;
        memory.write(&mut store, pointer as usize, source.as_bytes())?;
        let status = on_own_stack(turn.call_async(&mut store, (pointer, length)))?;
        wasmtime::ensure!(status == 0, "its start-up code ended with status {status}");
        Ok(())
    };
    let ran: wasmtime::Result<()> = run();
    if let Err(error) = ran {
        return Err(SandboxError::Snapshot {
            output: snapshot::printed(store.data_mut()),
            source: error.into(),
        });
    }
    let unsound = |reason: String| Err(SandboxError::UnsoundGuest { reason });
    if stack_pointer.get(&mut store).i32() != at_rest {
        return unsound("its stack pointer is not where it was".to_owned());
    }
    let left = &store.data().carried.files;
    if !left.as_ref().is_some_and(|left| left.is_as_before(&files)) {
        return unsound("its start-up code left files open or changed".to_owned());
    }
    Ok(memory.data(&store).to_vec())
}

/// The program that loads the boot modules.
fn start_source() -> String {
    let modules: serde_json::Map<_, _> = BOOT_MODULES
        .iter()
        .map(|(name, source)| ((*name).to_owned(), json!(source)))
        .collect();
    let modules = serde_json::Value::Object(modules).to_string();
    // A string of JSON is a string of Python's, too.
    format!(
        "{START}\n\n_start(__import__('json').loads({}))\n",
        json!(modules)
    )
}
