//! What one guest did is gone before the next one starts, byte by byte.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::num::NonZeroU32;

use rstest::rstest;
use wardian::sandbox::{Cancel, ExecRequest, Exit, Limits, Restore, RuntimeOptions, WasmRuntime};

const ORDINARY: &str =
    "import json; print(json.dumps({'a': [1, 2.5, None]}), hash('x'), id(object()))";

/// Whether a program ended as it should.
type Ends = fn(&Exit) -> bool;

/// Programs that leave as much behind as they can: pages, grown memory, a stack in mid-call; and
/// how they end, which shows that they did.
const HOSTILE: [(&str, Ends); 8] = [
    (
        "secret = ['s3cret' + str(i) for i in range(100_000)]",
        Exit::is_success,
    ),
    ("raw = bytes([3]) * (150 << 20)", Exit::is_success),
    ("import os; secret = 's3cret' * 1000; os._exit(3)", |exit| {
        *exit == Exit::Exited { code: 3 }
    }),
    ("while True: pass", |exit| {
        matches!(exit, Exit::OutOfFuel { .. })
    }),
    (
        "def f(n): return f(n + 1) + g(n)\nimport sys; sys.setrecursionlimit(10**9)\nf(0)",
        |exit| !exit.is_success(),
    ),
    (
        "class A:\n    def __repr__(self): return repr(self)\nrepr(A())",
        |exit| *exit == Exit::Exited { code: 1 },
    ),
    (
        "import builtins, sys; builtins.print = None; sys.modules.clear(); sys.stdout = None",
        Exit::is_success,
    ),
    ("import os; os.abort()", |exit| {
        matches!(exit, Exit::Trapped { .. })
    }),
];

fn audited(restore: Restore) -> WasmRuntime {
    let options = RuntimeOptions {
        restore,
        audit_every: NonZeroU32::new(1),
        ..RuntimeOptions::default()
    };
    WasmRuntime::load(&options, |_| {}).unwrap()
}

/// So little fuel that an endless loop is soon over.
fn limits() -> Limits {
    Limits {
        fuel: 2_000_000_000,
        ..Limits::default()
    }
}

#[rstest]
#[case(Restore::InPlace)]
#[case(Restore::Reinstantiate)]
fn nothing_is_left_of_a_guest(#[case] restore: Restore) {
    let runtime = audited(restore);
    let exec = |code| runtime.exec(&ExecRequest::new(code), &limits()).unwrap();
    let first = exec(ORDINARY);
    assert!(first.exit.is_success(), "{}", first.stderr_text());
    let mut restored = 1;
    for _ in 0..6 {
        for (program, ends_so) in HOSTILE {
            let exit = exec(program).exit;
            assert!(ends_so(&exit), "{program} {exit}");
            let again = exec(ORDINARY);
            assert_eq!(again.stdout, first.stdout, "after {program}");
            assert_eq!(again.usage.fuel, first.usage.fuel, "after {program}");
            restored += 2;
        }
    }
    // Every restore was audited, and each program ran on the same instance.
    let statistics = runtime.statistics();
    assert_eq!((statistics.restored, statistics.failed), (restored, 0));
    assert_eq!((statistics.in_use, statistics.idle), (0, 1));
}

/// What the host keeps of a guest goes with it, too.
#[test]
fn arguments_input_and_clock_do_not_reach_the_next_guest() {
    let runtime = audited(Restore::InPlace);
    let look = ExecRequest::new("import sys, time; print(sys.argv, sys.stdin.read(), time.time())");
    let first = runtime.exec(&look, &limits()).unwrap();
    let request = ExecRequest {
        stdin: "unread".to_owned(),
        argv: vec!["secret".to_owned()],
        start_time: Some(5),
        seed: Some(9),
        ..ExecRequest::new("import time; time.sleep(1e6); print('x', end='')")
    };
    runtime.exec(&request, &limits()).unwrap();
    let again = runtime.exec(&look, &limits()).unwrap();
    assert_eq!(again.stdout_text(), first.stdout_text());
    assert_eq!(again.usage.fuel, first.usage.fuel);
    assert_eq!(runtime.statistics().idle, 1, "it was the same instance");
}

#[test]
fn who_waits_for_an_instance_can_be_cancelled() {
    let options = RuntimeOptions {
        max_instances: 1,
        ..RuntimeOptions::default()
    };
    let runtime = WasmRuntime::load(&options, |_| {}).unwrap();
    let _session = runtime.session(&Limits::default()).unwrap();
    let cancel = Cancel::new();
    let outcome = std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            runtime.exec_cancellable(&ExecRequest::new("pass"), &Limits::default(), &cancel)
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        cancel.cancel();
        waits.join().unwrap().unwrap()
    });
    assert_eq!(outcome.exit, Exit::Cancelled);
}

#[test]
fn an_audited_runtime_takes_back_sessions_and_forks() {
    let runtime = audited(Restore::InPlace);
    for _ in 0..10 {
        let mut session = runtime.session(&limits()).unwrap();
        session
            .step(&ExecRequest::new("kept = [str(i) for i in range(10_000)]"))
            .unwrap();
        let mut children = session.fork(4).unwrap();
        for child in &mut children {
            child.step(&ExecRequest::new("kept.append(1)")).unwrap();
        }
    }
    let statistics = runtime.statistics();
    assert_eq!((statistics.restored, statistics.failed), (50, 0));
}

#[test]
fn a_program_waits_while_all_instances_are_in_use() {
    let options = RuntimeOptions {
        max_instances: 1,
        ..RuntimeOptions::default()
    };
    let runtime = WasmRuntime::load(&options, |_| {}).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|index| {
                let runtime = &runtime;
                scope.spawn(move || {
                    let request = ExecRequest::new(format!("print({index})"));
                    runtime
                        .exec(&request, &Limits::default())
                        .unwrap()
                        .stdout_text()
                })
            })
            .collect();
        for (index, thread) in threads.into_iter().enumerate() {
            assert_eq!(thread.join().unwrap(), format!("{index}\n"));
        }
    });
    assert_eq!(runtime.statistics().idle, 1);
}
