use rstest::rstest;

use super::*;

/// A guest whose start-up code reads randomness, the clock and its input into memory.
const GUEST: &str = r#"(module
    (import "wasi_snapshot_preview1" "random_get" (func $random (param i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "clock_time_get"
        (func $clock (param i32 i64 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))
    (memory (export "memory") 1)
    (data (i32.const 16) "\00\20\00\00\08\00\00\00")
    (global (export "__stack_pointer") (mut i32) (i32.const 1024))
    (func (export "_initialize"))
    (func (export "init")
        (drop (call $random (i32.const 4096) (i32.const 16)))
        (drop (call $clock (i32.const 0) (i64.const 0) (i32.const 4112)))
        (drop (call $read (i32.const 0) (i32.const 16) (i32.const 1) (i32.const 24)))))"#;

fn guest(wat: &str, stdin: &str) -> ModuleAndInput {
    ModuleAndInput::new(wat::parse_str(wat).unwrap(), stdin.as_bytes().to_vec())
}

#[test]
fn equal_inputs_give_equal_snapshots() {
    let snapshot = |stdin| snapshot(&guest(GUEST, stdin)).unwrap();
    assert_eq!(snapshot("abcdefgh"), snapshot("abcdefgh"));
    assert_ne!(snapshot("abcdefgh"), snapshot("hgfedcba"));
}

#[test]
fn what_start_up_wrote_is_in_the_snapshot() {
    let snapshot = snapshot(&guest(GUEST, "needle42")).unwrap();
    assert!(
        snapshot
            .image
            .windows(8)
            .any(|window| window == b"needle42")
    );
}

#[test]
fn a_failed_start_shows_its_output() {
    let guest = guest(
        r#"(module
            (import "wasi_snapshot_preview1" "fd_write"
                (func $write (param i32 i32 i32 i32) (result i32)))
            (memory (export "memory") 1)
            (data (i32.const 16) "\20\00\00\00\04\00\00\00")
            (data (i32.const 32) "oops")
            (global (export "__stack_pointer") (mut i32) (i32.const 1024))
            (func (export "_initialize"))
            (func (export "init")
                (drop (call $write (i32.const 2) (i32.const 16) (i32.const 1) (i32.const 24)))
                unreachable))"#,
        "",
    );
    let error = snapshot(&guest).expect_err("it traps");
    assert!(
        matches!(&error, SandboxError::Snapshot { output, .. } if output == "oops"),
        "{error}"
    );
}

#[test]
fn an_unknown_import_is_named() {
    let guest = guest(
        r#"(module
            (import "env" "system" (func (param i32) (result i32)))
            (memory (export "memory") 1)
            (global (export "__stack_pointer") (mut i32) (i32.const 1024))
            (func (export "_initialize"))
            (func (export "init")))"#,
        "",
    );
    let error = snapshot(&guest).expect_err("unknown import");
    assert!(error.to_string().contains("`env::system`"), "{error}");
}

/// Modules with state that a snapshot would miss; each is sound but for the part given.
#[rstest]
#[case::two_memories("(memory 1)", "2 memories")]
#[case::another_global("(global (mut i32) (i32.const 0))", "mutable globals")]
#[case::imported_memory(r#"(import "env" "memory" (memory 1))"#, "`env::memory`")]
#[case::table_set(
    "(table 1 funcref) (func (table.set (i32.const 0) (ref.null func)))",
    "TableSet"
)]
#[case::table_grow(
    "(table 1 funcref) (func (drop (table.grow (ref.null func) (i32.const 1))))",
    "TableGrow"
)]
#[case::elem_drop("(elem func) (func (elem.drop 0))", "ElemDrop")]
#[case::memory_init(
    r#"(data "x") (func (memory.init 0 (i32.const 0) (i32.const 0) (i32.const 1)))"#,
    "MemoryInit"
)]
#[case::data_drop(r#"(data "x") (func (data.drop 0))"#, "DataDrop")]
#[case::throw("(tag) (func (throw 0))", "Throw")]
fn hidden_state_is_refused(#[case] part: &str, #[case] reason: &str) {
    let module = |part: &str| {
        let (imports, rest) = if part.starts_with("(import") {
            (part, "")
        } else {
            ("", part)
        };
        let wat = format!(
            r#"(module {imports} (memory (export "memory") 1)
                (global (export "__stack_pointer") (mut i32) (i32.const 1024)) {rest})"#
        );
        wat::parse_str(wat).unwrap()
    };
    check(&module(""), Throws::Refused).unwrap();
    let error = check(&module(part), Throws::Refused).expect_err(part);
    assert!(error.to_string().contains(reason), "{error}");
}

#[test]
fn a_module_may_throw_if_it_keeps_no_exception() {
    let module = |part: &str| {
        let wat = format!(
            r#"(module (memory (export "memory") 1) (tag)
                (global (export "__stack_pointer") (mut i32) (i32.const 1024))
                (func (throw 0)) {part})"#
        );
        wat::parse_str(wat).unwrap()
    };
    check(&module("(table 1 funcref)"), Throws::Allowed).unwrap();
    for (kept, reason) in [
        ("(table 1 exnref)", "other things than functions"),
        ("(global (mut exnref) (ref.null exn))", "mutable globals"),
    ] {
        let error = check(&module(kept), Throws::Allowed).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn a_hidden_stack_pointer_is_refused() {
    let wasm = wat::parse_str(
        r#"(module (memory (export "memory") 1) (global (mut i32) (i32.const 1024)))"#,
    );
    let error = check(&wasm.unwrap(), Throws::Refused).unwrap_err();
    assert!(error.to_string().contains("mutable globals"), "{error}");
}
