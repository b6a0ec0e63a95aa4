use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Arc;

use proptest::prelude::*;
use wasmtime::{Config, Engine, Func, Instance, Module, Store, Val};

use crate::sandbox::host::Host;
use crate::sandbox::instance::on_own_stack;
use crate::sandbox::limits::Limits;
use crate::sandbox::runtime::{Interface, link};
use crate::sandbox::science::Files;

/// All functions that the guest imports, with their parameters: `w` of 32 bits, `d` of 64.
const FUNCTIONS: [(&str, &str, &str); 43] = [
    ("host", "call", "wwww"),
    (WASI, "args_get", "ww"),
    (WASI, "args_sizes_get", "ww"),
    (WASI, "environ_get", "ww"),
    (WASI, "environ_sizes_get", "ww"),
    (WASI, "clock_res_get", "ww"),
    (WASI, "clock_time_get", "wdw"),
    (WASI, "fd_advise", "wddw"),
    (WASI, "fd_close", "w"),
    (WASI, "fd_datasync", "w"),
    (WASI, "fd_fdstat_get", "ww"),
    (WASI, "fd_fdstat_set_flags", "ww"),
    (WASI, "fd_filestat_get", "ww"),
    (WASI, "fd_filestat_set_size", "wd"),
    (WASI, "fd_filestat_set_times", "wddw"),
    (WASI, "fd_pread", "wwwdw"),
    (WASI, "fd_prestat_get", "ww"),
    (WASI, "fd_prestat_dir_name", "www"),
    (WASI, "fd_pwrite", "wwwdw"),
    (WASI, "fd_read", "wwww"),
    (WASI, "fd_readdir", "wwwdw"),
    (WASI, "fd_seek", "wdww"),
    (WASI, "fd_sync", "w"),
    (WASI, "fd_tell", "ww"),
    (WASI, "fd_write", "wwww"),
    (WASI, "path_create_directory", "www"),
    (WASI, "path_filestat_get", "wwwww"),
    (WASI, "path_filestat_set_times", "wwwwddw"),
    (WASI, "path_link", "wwwwwww"),
    (WASI, "path_open", "wwwwwddww"),
    (WASI, "path_readlink", "wwwwww"),
    (WASI, "path_remove_directory", "www"),
    (WASI, "path_rename", "wwwwww"),
    (WASI, "path_symlink", "wwwww"),
    (WASI, "path_unlink_file", "www"),
    (WASI, "poll_oneoff", "wwww"),
    (WASI, "sched_yield", ""),
    (WASI, "random_get", "ww"),
    (WASI, "sock_accept", "www"),
    (WASI, "sock_recv", "wwwwww"),
    (WASI, "sock_send", "wwwww"),
    (WASI, "sock_shutdown", "ww"),
    (WASI, "proc_exit", "w"),
];
const WASI: &str = "wasi_snapshot_preview1";

/// Where the guest's memory holds paths, and where buffers.
const PATHS: &str = "a b/c ../tmp tmp/a tmp/b usr/lib/zip tmp tmp/../tmp/a/b . / //tmp \u{e9}";

/// A guest that does nothing but call each function with what it is called with.
fn module() -> Vec<u8> {
    let mut imports = String::new();
    let mut calls = String::new();
    for (index, (module, name, parameters)) in FUNCTIONS.iter().enumerate() {
        let mut list = String::new();
        let mut gets = String::new();
        for (at, kind) in parameters.chars().enumerate() {
            list += if kind == 'w' { " i32" } else { " i64" };
            write!(gets, "(local.get {at})").unwrap();
        }
        let (result, exported) = match *name {
            "proc_exit" => ("", ""),
            _ => ("(result i32)", "(result i32)"),
        };
        writeln!(
            imports,
            r#"(import "{module}" "{name}" (func $f{index} (param{list}) {result}))"#
        )
        .unwrap();
        writeln!(
            calls,
            r#"(func (export "{index}") (param{list}) {exported} (call $f{index} {gets}))"#
        )
        .unwrap();
    }
    wat::parse_str(format!(
        r#"(module {imports} (memory (export "memory") 1) {calls}
            (func (export "host_alloc") (param i32) (result i32) (i32.const 4096)))"#
    ))
    .unwrap()
}

struct Guest {
    store: Store<Host>,
    functions: Vec<Func>,
}

fn guest() -> Guest {
    static LINKED: std::sync::OnceLock<(Engine, Module)> = std::sync::OnceLock::new();
    let (engine, module) = LINKED.get_or_init(|| {
        let engine = Engine::new(&Config::new()).unwrap();
        let compiled = Module::new(&engine, module()).unwrap();
        (engine, compiled)
    });
    let mut library = tempfile::tempfile().unwrap();
    library.write_all(b"a library").unwrap();
    let mut files = Files::new();
    files
        .mount(&["usr", "lib"], "zip", Arc::new(library))
        .unwrap();
    files.seal_all_but(&[&["tmp"]]);
    let mut host = Host::new(&Limits::default());
    host.carried.files = Some(Box::new(files));
    let mut store = Store::new(engine, host);
    let linked = link(engine, module, Interface::Science).unwrap();
    let instance: Instance = on_own_stack(linked.instantiate_async(&mut store)).unwrap();
    let memory = instance.get_memory(&mut store, "memory").unwrap();
    memory.write(&mut store, 0, PATHS.as_bytes()).unwrap();
    // Two buffers of 16 bytes.
    let buffers = [200_u32, 16, 300, 16].map(u32::to_le_bytes).concat();
    memory.write(&mut store, 128, &buffers).unwrap();
    let functions = (0..FUNCTIONS.len())
        .map(|index| instance.get_func(&mut store, &index.to_string()).unwrap())
        .collect();
    Guest { store, functions }
}

impl Guest {
    fn call(&mut self, function: usize, arguments: &[u64]) {
        let values: Vec<_> = FUNCTIONS[function]
            .2
            .chars()
            .zip(arguments)
            .map(|(kind, &value)| match kind {
                'w' => Val::I32(u32::try_from(value).unwrap_or(u32::MAX).cast_signed()),
                _ => Val::I64(value.cast_signed()),
            })
            .collect();
        let mut results = vec![Val::I32(0); usize::from(FUNCTIONS[function].1 != "proc_exit")];
        let function = self.functions[function];
        // Exits are errors; a panic is what must not be.
        let _ = on_own_stack(function.call_async(&mut self.store, &values, &mut results));
    }
}

/// Small numbers, which are descriptors, flags, and places in memory; and those at the limits.
fn argument() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0_u64..12,
        3 => 0_u64..100,
        1 => Just(128),
        1 => 0_u64..70_000,
        1 => Just(u64::from(u32::MAX)),
        1 => Just(u64::MAX),
        1 => any::<u64>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_a_guest_calls_the_host_stands(
        calls in prop::collection::vec(
            (0..FUNCTIONS.len(), prop::collection::vec(argument(), 9)),
            1..200,
        )
    ) {
        let mut guest = guest();
        for (function, arguments) in calls {
            guest.call(function, &arguments);
        }
        let files = guest.store.data().carried.files.as_ref().unwrap();
        prop_assert!(files.is_sound());
    }
}

#[test]
fn a_folder_is_read_from_any_place() {
    let mut guest = guest();
    let read = FUNCTIONS
        .iter()
        .position(|(_, name, _)| *name == "fd_readdir")
        .unwrap();
    for cookie in [0, 1, u64::MAX - 1, u64::MAX] {
        guest.call(read, &[3, 1000, 64, cookie, 1100]);
    }
}

#[test]
fn files_are_reached_by_their_paths() {
    let mut guest = guest();
    let open = FUNCTIONS
        .iter()
        .position(|(_, name, _)| *name == "path_open")
        .unwrap();
    let write = FUNCTIONS
        .iter()
        .position(|(_, name, _)| *name == "fd_write")
        .unwrap();
    let at = PATHS.find("tmp/a").unwrap() as u64;
    // Created, for reading and writing; then two buffers are written.
    guest.call(open, &[3, 0, at, 5, 1, 1 << 1 | 1 << 6, 0, 0, 1000]);
    guest.call(write, &[4, 128, 2, 1004]);
    let files = guest.store.data().carried.files.as_ref().unwrap();
    assert_eq!(files.status(3, "tmp/a").unwrap().size, 32);
}
