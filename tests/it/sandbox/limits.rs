//! Limits and host functions, over a guest small enough to read.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use rstest::rstest;
use wardian::sandbox::{
    CacheFolder, Cancel, ExecOutcome, ExecRequest, Exit, Guest, Limits, Meter, Progress,
    RuntimeOptions, SandboxError, WasmRuntime,
};

/// `step` does what the first letter of the program says.
const GUEST: &str = r#"(module
    (import "wasi_snapshot_preview1" "fd_write"
        (func $write (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "random_get" (func $random (param i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
    (import "bridge" "call" (func $call (param i32 i32) (result i32)))
    (memory (export "memory") 2)
    (global (export "__stack_pointer") (mut i32) (i32.const 1024))
    (global $buffer i32 (i32.const 65536))

    (func (export "_initialize"))
    (func (export "init"))
    (func (export "buf") (param i32) (result i32) (global.get $buffer))
    (func (export "serve") (param i32) (result i32) (i32.const -1))
    (func (export "reply_ptr") (result i32) (i32.const 0))

    ;; Writes `length` bytes of the buffer to `fd`.
    (func $print (param $fd i32) (param $length i32)
        (i32.store (i32.const 16) (global.get $buffer))
        (i32.store (i32.const 20) (local.get $length))
        (drop (call $write (local.get $fd) (i32.const 16) (i32.const 1) (i32.const 24))))
    ;; A loop with a loop inside asks the host; the other one does not.
    (func $forever (loop $again (loop) (br $again)))
    (func $unasked (loop $again (br $again)))
    (func $recurse (result i32) (i32.add (call $recurse) (i32.const 1)))

    (func (export "step") (param $length i32) (param $seed i64) (result i32)
        (local $letter i32)
        (local.set $letter (i32.load8_u (global.get $buffer)))
        ;; L: loop
        (if (i32.eq (local.get $letter) (i32.const 0x4c)) (then (call $forever)))
        ;; U: loop without asking the host
        (if (i32.eq (local.get $letter) (i32.const 0x55)) (then (call $unasked)))
        ;; T: trap
        (if (i32.eq (local.get $letter) (i32.const 0x54)) (then (unreachable)))
        ;; R: recurse
        (if (i32.eq (local.get $letter) (i32.const 0x52)) (then (return (call $recurse))))
        ;; E: exit
        (if (i32.eq (local.get $letter) (i32.const 0x45)) (then (call $exit (i32.const 7))))
        ;; M: grow by 64 MiB, fail if that is denied
        (if (i32.eq (local.get $letter) (i32.const 0x4d))
            (then (return (i32.eq (memory.grow (i32.const 1024)) (i32.const -1)))))
        ;; D: be denied memory, succeed all the same
        (if (i32.eq (local.get $letter) (i32.const 0x44))
            (then (drop (memory.grow (i32.const 1024))) (return (i32.const 0))))
        ;; P: print 64 KiB
        (if (i32.eq (local.get $letter) (i32.const 0x50))
            (then (call $print (i32.const 1) (i32.const 65536))
                  (call $print (i32.const 2) (i32.const 65536))))
        ;; Q: print 8 random bytes
        (if (i32.eq (local.get $letter) (i32.const 0x51))
            (then (drop (call $random (global.get $buffer) (i32.const 8)))
                  (call $print (i32.const 1) (i32.const 8))))
        ;; I: echo standard input
        (if (i32.eq (local.get $letter) (i32.const 0x49))
            (then (i32.store (i32.const 16) (global.get $buffer))
                  (i32.store (i32.const 20) (i32.const 100))
                  (drop (call $read (i32.const 0) (i32.const 16) (i32.const 1) (i32.const 24)))
                  (call $print (i32.const 1) (i32.load (i32.const 24)))))
        ;; W: write from beyond the end of memory, answer with the errno
        (if (i32.eq (local.get $letter) (i32.const 0x57))
            (then (i32.store (i32.const 16) (i32.const -16))
                  (i32.store (i32.const 20) (i32.const 64))
                  (return (call $write (i32.const 1) (i32.const 16) (i32.const 1)
                      (i32.const 24)))))
        ;; B: call a peer, answer with 2 if there is none
        (if (i32.eq (local.get $letter) (i32.const 0x42))
            (then (return (i32.sub (i32.const 1) (call $call (i32.const 0) (i32.const 1))))))
        (i32.const 0)))"#;

fn guest() -> Guest {
    Guest::new(wat::parse_str(GUEST).unwrap(), Vec::new())
}

fn runtime() -> &'static WasmRuntime {
    static RUNTIME: OnceLock<WasmRuntime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let options = RuntimeOptions {
            guest: guest(),
            cache: CacheFolder::Disabled,
            max_instances: 4,
            ..RuntimeOptions::default()
        };
        WasmRuntime::load(&options, |_| {}).unwrap()
    })
}

fn limits() -> Limits {
    Limits {
        memory: ByteSize::mib(32),
        ..Limits::default()
    }
}

fn exec(program: &str, limits: &Limits) -> ExecOutcome {
    runtime().exec(&ExecRequest::new(program), limits).unwrap()
}

#[test]
fn a_loop_ends_when_its_fuel_does() {
    let limits = Limits {
        fuel: 1_000_000,
        ..limits()
    };
    let outcome = exec("L", &limits);
    assert_eq!(outcome.exit, Exit::OutOfFuel { limit: 1_000_000 });
    assert_eq!(outcome.usage.fuel, 1_000_000);
}

#[test]
fn a_loop_ends_at_its_deadline() {
    let deadline = Duration::from_millis(100);
    let limits = Limits {
        fuel: i64::MAX as u64,
        deadline,
        ..limits()
    };
    let started = Instant::now();
    let outcome = exec("L", &limits);
    let Exit::DeadlineExceeded { limit, elapsed } = outcome.exit else {
        panic!("ended with {}", outcome.exit);
    };
    assert_eq!(limit, deadline);
    assert!(elapsed >= deadline && started.elapsed() < Duration::from_secs(30));
}

/// No loop of a sound interpreter takes so long without asking; a wrecked one ends all the same.
#[test]
fn a_loop_that_never_asks_runs_out_of_fuel() {
    let limits = Limits {
        fuel: i64::MAX as u64,
        deadline: Duration::from_secs(600),
        ..limits()
    };
    let started = Instant::now();
    let outcome = exec("U", &limits);
    assert_eq!(outcome.exit, Exit::OutOfFuel { limit: limits.fuel });
    assert_eq!(outcome.usage.fuel, limits.fuel);
    assert!(started.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_failure_after_denied_memory_is_out_of_memory() {
    let outcome = exec("M", &limits());
    let requested = Some((2 + 1024) * 65_536);
    assert_eq!(
        outcome.exit,
        Exit::OutOfMemory {
            limit: 32 << 20,
            requested
        }
    );
}

#[test]
fn granted_memory_counts_as_used() {
    let outcome = exec(
        "M",
        &Limits {
            memory: ByteSize::mib(128),
            ..limits()
        },
    );
    assert!(outcome.exit.is_success(), "{}", outcome.exit);
    assert_eq!(outcome.usage.memory_bytes, (2 + 1024) * 65_536);
}

#[test]
fn denied_memory_alone_is_no_failure() {
    assert!(exec("D", &limits()).exit.is_success());
}

#[test]
fn a_trap_is_an_end() {
    let exit = exec("T", &limits()).exit;
    assert!(
        matches!(&exit, Exit::Trapped { reason } if reason.contains("unreachable")),
        "{exit}"
    );
}

#[test]
fn endless_recursion_is_an_end() {
    let exit = exec("R", &limits()).exit;
    assert!(
        matches!(&exit, Exit::Trapped { reason } if reason.contains("stack")),
        "{exit}"
    );
}

#[test]
fn recursion_is_contained_on_a_small_thread() {
    // Compiling the guest needs a stack of its own size; running it must not.
    runtime();
    let thread = std::thread::Builder::new().stack_size(128 << 10);
    let exit = thread
        .spawn(|| exec("R", &limits()).exit)
        .unwrap()
        .join()
        .unwrap();
    assert!(matches!(exit, Exit::Trapped { .. }), "{exit}");
}

#[test]
fn an_exit_is_an_end() {
    assert_eq!(exec("E", &limits()).exit, Exit::Exited { code: 7 });
}

#[test]
fn output_past_its_limit_is_dropped_and_flagged() {
    let limits = Limits {
        stdout: ByteSize::kib(8),
        ..limits()
    };
    let outcome = exec("P", &limits);
    assert!(outcome.exit.is_success());
    assert_eq!(
        (outcome.stdout.len(), outcome.stdout_truncated),
        (8 << 10, true)
    );
    assert_eq!(
        (outcome.stderr.len(), outcome.stderr_truncated),
        (64 << 10, false)
    );
}

#[test]
fn standard_input_is_what_was_given() {
    let request = ExecRequest {
        stdin: "to read".to_owned(),
        ..ExecRequest::new("I")
    };
    let outcome = runtime().exec(&request, &limits()).unwrap();
    assert_eq!(outcome.stdout_text(), "to read");
}

#[test]
fn random_bytes_follow_the_seed() {
    let draw = |seed| {
        let request = ExecRequest {
            seed,
            ..ExecRequest::new("Q")
        };
        runtime().exec(&request, &limits()).unwrap().stdout
    };
    assert_eq!(draw(Some(1)), draw(Some(1)));
    assert_ne!(draw(Some(1)), draw(Some(2)));
    assert_eq!(draw(None), draw(Some(0)));
}

#[test]
fn a_guest_that_wants_files_of_the_host_does_not_load() {
    let wat = r#"(module
        (import "wasi_snapshot_preview1" "path_open"
            (func (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
        (memory (export "memory") 1)
        (global (export "__stack_pointer") (mut i32) (i32.const 1024))
        (func (export "_initialize")) (func (export "init")))"#;
    let options = RuntimeOptions {
        guest: Guest::new(wat::parse_str(wat).unwrap(), Vec::new()),
        cache: CacheFolder::Disabled,
        max_instances: 1,
        ..RuntimeOptions::default()
    };
    let error = WasmRuntime::load(&options, |_| {}).unwrap_err();
    assert!(
        matches!(&error, SandboxError::UnknownImport { name, .. } if name == "path_open"),
        "{error}"
    );
}

#[test]
fn pointers_out_of_bounds_are_faults_of_the_guest() {
    const EFAULT: u32 = 21;
    assert_eq!(exec("W", &limits()).exit, Exit::Exited { code: EFAULT });
}

#[test]
fn a_guest_without_a_peer_calls_nobody() {
    assert_eq!(exec("B", &limits()).exit, Exit::Exited { code: 2 });
}

#[test]
fn a_limit_below_the_guest_is_our_error() {
    let limits = Limits {
        memory: ByteSize::kib(64),
        ..limits()
    };
    let error = runtime().exec(&ExecRequest::new("N"), &limits).unwrap_err();
    assert!(
        matches!(
            error,
            SandboxError::MemoryLimitTooSmall {
                limit: 65_536,
                minimum: 131_072
            }
        ),
        "{error}"
    );
}

#[test]
fn a_full_pool_is_our_error_and_passes() {
    let options = RuntimeOptions {
        guest: guest(),
        cache: CacheFolder::Disabled,
        max_instances: 2,
        ..RuntimeOptions::default()
    };
    let runtime = WasmRuntime::load(&options, |_| {}).unwrap();
    let sessions: Vec<_> = (0..2)
        .map(|_| runtime.session(&limits()).unwrap())
        .collect();
    let error = runtime.session(&limits()).unwrap_err();
    assert!(error.is_retryable(), "{error}");
    drop(sessions);
    runtime.session(&limits()).unwrap();
}

#[test]
fn a_trap_ends_its_session_only() {
    let mut session = runtime().session(&limits()).unwrap();
    session.step(&ExecRequest::new("T")).unwrap();
    assert!(session.ended().is_some());
    let error = session.step(&ExecRequest::new("N")).unwrap_err();
    assert!(
        matches!(error, SandboxError::SessionEnded { .. }),
        "{error}"
    );
    assert!(exec("N", &limits()).exit.is_success());
}

#[test]
fn a_session_refuels_for_each_step() {
    let limits = Limits {
        fuel: 10_000,
        ..limits()
    };
    let mut session = runtime().session(&limits).unwrap();
    // Printing is paid for.
    let print = ExecRequest::new("P");
    let used = session.step(&print).unwrap().usage.fuel;
    assert!(used > 0);
    for _ in 0..10_000 / used + 1 {
        assert!(session.step(&print).unwrap().exit.is_success());
    }
}

#[test]
fn a_guest_without_its_interface_is_our_error() {
    let wat = r#"(module (memory (export "memory") 1)
        (global (export "__stack_pointer") (mut i32) (i32.const 1024))
        (func (export "_initialize")) (func (export "init")))"#;
    let options = RuntimeOptions {
        guest: Guest::new(wat::parse_str(wat).unwrap(), Vec::new()),
        cache: CacheFolder::Disabled,
        max_instances: 1,
        ..RuntimeOptions::default()
    };
    let runtime = WasmRuntime::load(&options, |_| {}).unwrap();
    let error = runtime.session(&Limits::default()).unwrap_err();
    assert!(
        matches!(error, SandboxError::MissingExport { name: "buf" }),
        "{error}"
    );
}

#[test]
fn a_second_load_comes_from_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let options = RuntimeOptions {
        guest: guest(),
        cache: CacheFolder::At(folder.path().join("cache")),
        max_instances: 1,
        ..RuntimeOptions::default()
    };
    let load = || {
        let mut steps = Vec::new();
        let runtime = WasmRuntime::load(&options, |progress| steps.push(progress)).unwrap();
        assert!(
            runtime
                .exec(&ExecRequest::new("N"), &limits())
                .unwrap()
                .exit
                .is_success()
        );
        steps
    };
    let first = load();
    assert!(matches!(
        first[..],
        [
            Progress::Snapshotting,
            Progress::Compiling,
            Progress::Prepared { .. }
        ]
    ));
    assert_eq!(load(), []);
}

#[test]
fn loads_at_the_same_time_do_the_work_once() {
    let folder = tempfile::tempdir().unwrap();
    let options = RuntimeOptions {
        guest: guest(),
        cache: CacheFolder::At(folder.path().join("cache")),
        max_instances: 1,
        ..RuntimeOptions::default()
    };
    let prepared: usize = std::thread::scope(|scope| {
        let load = || {
            let mut prepared = 0;
            WasmRuntime::load(&options, |progress| {
                prepared += usize::from(progress == Progress::Compiling);
            })
            .unwrap();
            prepared
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(load)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .sum()
    });
    assert_eq!(prepared, 1);
}

#[test]
fn an_unusable_cache_is_done_without() {
    let folder = tempfile::tempdir().unwrap();
    let occupied = folder.path().join("file");
    fs_err::write(&occupied, "not a folder").unwrap();
    let options = RuntimeOptions {
        guest: guest(),
        cache: CacheFolder::At(occupied.join("cache")),
        max_instances: 1,
        ..RuntimeOptions::default()
    };
    let runtime = WasmRuntime::load(&options, |_| {}).unwrap();
    assert!(
        runtime
            .exec(&ExecRequest::new("N"), &limits())
            .unwrap()
            .exit
            .is_success()
    );
}

#[rstest]
#[case(Meter::Loops)]
#[case(Meter::Instructions)]
fn a_cancelled_program_ends(#[case] meter: Meter) {
    let options = RuntimeOptions {
        guest: guest(),
        cache: CacheFolder::Disabled,
        meter,
        ..RuntimeOptions::default()
    };
    let runtime = WasmRuntime::load(&options, |_| {}).unwrap();
    let endless = Limits {
        fuel: i64::MAX as u64,
        deadline: Duration::from_secs(600),
        ..limits()
    };
    let cancel = Cancel::new();
    let outcome = std::thread::scope(|scope| {
        let program =
            scope.spawn(|| runtime.exec_cancellable(&ExecRequest::new("L"), &endless, &cancel));
        std::thread::sleep(Duration::from_millis(50));
        cancel.cancel();
        program.join().unwrap().unwrap()
    });
    assert_eq!(outcome.exit, Exit::Cancelled);
    // What is cancelled already does not begin.
    let outcome = runtime.exec_cancellable(&ExecRequest::new("L"), &endless, &cancel);
    assert_eq!(outcome.unwrap().exit, Exit::Cancelled);
    let outcome = runtime.exec(&ExecRequest::new("N"), &endless).unwrap();
    assert!(outcome.exit.is_success());
}
