//! Starts a guest once and freezes it: module in, code and memory image out.
//!
//! The guest's start-up code runs on the same host functions as later programs, with the clock
//! and randomness of seed 0, so the same inputs give the same snapshot bit for bit.
//!
//! What is frozen is linear memory and `__stack_pointer`. [`check`] proves from the module's code
//! that this is all the state it has. The frozen module has no data: whoever instantiates it
//! provides the memory with the image in it.

use bytesize::ByteSize;
use wasm_encoder::reencode::{Reencode as _, RoundtripReencoder};
use wasmparser::{ExternalKind, Operator, Parser, Payload, RefType, TypeRef, ValType};
use wasmtime::{Config, Engine, Module, OptLevel, RegallocAlgorithm, Store};

use super::error::SandboxError;
use super::guest::ModuleAndInput;
use super::host::{Host, Input};
use super::instance::on_own_stack;
use super::limits::Limits;
use super::runtime::{self, Interface, link};

/// The one mutable global a guest may have.
pub(super) const STACK_POINTER: &str = "__stack_pointer";
/// How much of a failed start's output goes into the error.
const OUTPUT_SHOWN: usize = 2000;

/// A started guest at rest.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Frozen {
    /// The module, less its data, with a memory of the image's size.
    pub(super) code: Vec<u8>,
    /// All of linear memory.
    pub(super) image: Vec<u8>,
}

/// Runs the guest's start-up code and returns what it is afterwards.
///
/// # Errors
///
/// Returns an error if the module is damaged, has state that a snapshot would miss, or fails to
/// start.
pub(super) fn snapshot(guest: &ModuleAndInput) -> Result<Frozen, SandboxError> {
    let wasm = guest.wasm()?;
    check(&wasm, Throws::Refused)?;
    // This code runs once, for a second: compile it fast.
    let mut config = Config::new();
    runtime::refuse_exceptions(&mut config);
    config
        .cranelift_opt_level(OptLevel::None)
        .cranelift_regalloc_algorithm(RegallocAlgorithm::SinglePass)
        .max_wasm_stack(Interface::Own.wasm_stack())
        .async_stack_size(Interface::Own.async_stack());
    let engine =
        Engine::new(&config).map_err(SandboxError::engine("setting up the snapshot engine"))?;
    let module = Module::new(&engine, &wasm)
        .map_err(SandboxError::engine("compiling the guest for its snapshot"))?;
    let limits = Limits {
        memory: ByteSize::gib(1),
        ..Limits::default()
    };
    let mut store = Store::new(&engine, Host::new(&limits));
    store.limiter(|host| &mut host.memory);
    store.data_mut().stdin = Input::new(guest.stdin().to_vec());

    let instance = link(&engine, &module, Interface::Own)?
        .instantiate(&mut store)
        .map_err(SandboxError::engine(
            "instantiating the guest for its snapshot",
        ))?;
    for name in ["_initialize", "init"] {
        let function = instance
            .get_typed_func::<(), ()>(&mut store, name)
            .map_err(|_| SandboxError::MissingExport { name })?;
        if let Err(error) = on_own_stack(function.call_async(&mut store, ())) {
            return Err(SandboxError::Snapshot {
                output: printed(store.data_mut()),
                source: error.into(),
            });
        }
    }
    let memory = instance
        .get_memory(&mut store, "memory")
        .ok_or(SandboxError::MissingExport { name: "memory" })?;
    let stack_pointer = instance
        .get_global(&mut store, STACK_POINTER)
        .and_then(|global| global.get(&mut store).i32())
        .ok_or(SandboxError::MissingExport {
            name: STACK_POINTER,
        })?;
    let image = memory.data(&store).to_vec();
    Ok(Frozen {
        code: without_data(&wasm, memory.size(&store), stack_pointer)?,
        image,
    })
}

/// Returns the module without data, with a memory of `pages` and a new initial `__stack_pointer`.
fn without_data(wasm: &[u8], pages: u64, stack_pointer: i32) -> Result<Vec<u8>, SandboxError> {
    let malformed = |error: wasm_encoder::reencode::Error| SandboxError::UnsoundGuest {
        reason: format!("malformed: {error}"),
    };
    let mut encoder = RoundtripReencoder;
    let mut module = wasm_encoder::Module::new();
    for payload in Parser::new(0).parse_all(wasm) {
        match payload.map_err(|error| malformed(error.into()))? {
            Payload::MemorySection(section) => {
                let mut memories = wasm_encoder::MemorySection::new();
                for memory in section {
                    let mut memory = encoder
                        .memory_type(memory.map_err(|error| malformed(error.into()))?)
                        .map_err(malformed)?;
                    memory.minimum = pages;
                    memories.memory(memory);
                }
                module.section(&memories);
            }
            Payload::GlobalSection(section) => {
                let mut globals = wasm_encoder::GlobalSection::new();
                for global in section {
                    let global = global.map_err(|error| malformed(error.into()))?;
                    let kind = encoder.global_type(global.ty).map_err(malformed)?;
                    let initial = if kind.mutable {
                        // `check` found that this is the only one.
                        wasm_encoder::ConstExpr::i32_const(stack_pointer)
                    } else {
                        encoder.const_expr(global.init_expr).map_err(malformed)?
                    };
                    globals.global(kind, &initial);
                }
                module.section(&globals);
            }
            Payload::DataSection(_) | Payload::DataCountSection { .. } => {}
            // Names and the like.
            Payload::CustomSection(_) => {}
            payload => {
                if let Some((id, range)) = payload.as_section() {
                    let data = &wasm[range];
                    module.section(&wasm_encoder::RawSection { id, data });
                }
            }
        }
    }
    Ok(module.finish())
}

/// Whether a module may throw exceptions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Throws {
    /// It has no instruction for it.
    Refused,
    /// It may: exceptions live on the stack, or in a store that no two guests share.
    Allowed,
}

/// Checks that linear memory and `__stack_pointer` are all the state the module has.
///
/// State of a core instance is its memories, tables, globals, and which segments were dropped
/// (WebAssembly core specification, section 4.2.11). So a module qualifies if it imports nothing
/// but functions, has one memory, has no other mutable global, and holds no instruction that
/// changes a table or a segment or, unless that is allowed, throws. An exception lives in the store;
/// a module that throws must hold no reference to one at rest, so its tables are of functions.
pub(super) fn check(wasm: &[u8], throws: Throws) -> Result<(), SandboxError> {
    let unsound = |reason: String| SandboxError::UnsoundGuest { reason };
    let malformed = |error: wasmparser::BinaryReaderError| unsound(format!("malformed: {error}"));

    let mut memories = 0;
    let mut mutable_globals = Vec::new();
    let mut stack_pointer = None;
    for payload in Parser::new(0).parse_all(wasm) {
        match payload.map_err(malformed)? {
            Payload::ImportSection(imports) => {
                for import in imports.into_imports() {
                    let import = import.map_err(malformed)?;
                    if !matches!(import.ty, TypeRef::Func(_)) {
                        let (module, name) = (import.module, import.name);
                        return Err(unsound(format!("`{module}::{name}` is not a function")));
                    }
                }
            }
            Payload::MemorySection(section) => memories += section.count(),
            Payload::TableSection(section) => {
                for table in section {
                    let table = table.map_err(malformed)?.ty;
                    if table.element_type != RefType::FUNCREF {
                        return Err(unsound(
                            "it has a table of other things than functions".to_owned(),
                        ));
                    }
                }
            }
            Payload::GlobalSection(section) => {
                for (index, global) in (0_u32..).zip(section) {
                    let global = global.map_err(malformed)?.ty;
                    if global.mutable {
                        mutable_globals.push((index, global.content_type));
                    }
                }
            }
            Payload::ExportSection(section) => {
                for export in section {
                    let export = export.map_err(malformed)?;
                    if export.kind == ExternalKind::Global && export.name == STACK_POINTER {
                        stack_pointer = Some((export.index, ValType::I32));
                    }
                }
            }
            Payload::StartSection { .. } => {
                return Err(unsound("it has a start function".to_owned()));
            }
            Payload::CodeSectionEntry(body) => {
                let mut operators = body.get_operators_reader().map_err(malformed)?;
                while !operators.eof() {
                    let operator = operators.read().map_err(malformed)?;
                    if changes_hidden_state(&operator, throws) {
                        return Err(unsound(format!("it holds `{operator:?}`")));
                    }
                }
            }
            _ => {}
        }
    }
    if memories != 1 {
        return Err(unsound(format!("it has {memories} memories, not 1")));
    }
    if mutable_globals != Vec::from_iter(stack_pointer) {
        return Err(unsound(format!(
            "its mutable globals are {mutable_globals:?}, not one i32 exported as \
             `{STACK_POINTER}`"
        )));
    }
    Ok(())
}

fn changes_hidden_state(operator: &Operator<'_>, throws: Throws) -> bool {
    let is_throw = matches!(operator, Operator::Throw { .. } | Operator::ThrowRef);
    matches!(
        operator,
        Operator::TableSet { .. }
            | Operator::TableGrow { .. }
            | Operator::TableFill { .. }
            | Operator::TableCopy { .. }
            | Operator::TableInit { .. }
            | Operator::ElemDrop { .. }
            | Operator::MemoryInit { .. }
            | Operator::DataDrop { .. }
    ) || (is_throw && throws == Throws::Refused)
}

/// The end of what the guest printed, for an error message.
pub(super) fn printed(host: &mut Host) -> String {
    let mut bytes = host.stdout.take().0;
    bytes.extend(host.stderr.take().0);
    let shown = bytes.len().saturating_sub(OUTPUT_SHOWN);
    String::from_utf8_lossy(&bytes[shown..]).trim().to_owned()
}

#[cfg(test)]
mod tests;
