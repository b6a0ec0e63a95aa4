//! The sandbox in worker processes.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use wardian::grader::{GradeLimits, GradeRequest, Grader as _, UnitTestGrader};
use wardian::sandbox::{Cancel, ExecRequest, Exit, Limits, SandboxError, WorkerOptions, Workers};

use super::python;

fn start(count: usize) -> Workers {
    python(); // prepared once for all
    let options = WorkerOptions {
        count,
        command: vec![
            env!("CARGO_BIN_EXE_wardian").into(),
            "sandbox-worker".into(),
        ],
        ..WorkerOptions::default()
    };
    Workers::start(&options, |_| {}).unwrap()
}

/// Workers for the tests that end none of them.
fn workers() -> &'static Workers {
    static WORKERS: OnceLock<Workers> = OnceLock::new();
    WORKERS.get_or_init(|| start(2))
}

fn kill(process: u32) {
    let killed = Command::new("kill")
        .args(["-KILL", &process.to_string()])
        .status();
    assert!(killed.unwrap().success());
}

#[test]
fn a_worker_answers_as_this_process_does() {
    let request = ExecRequest {
        stdin: "in".to_owned(),
        ..ExecRequest::new(
            "import sys, random; print(input(), random.random()); \
             sys.stdout.buffer.write(b'\\xff\\x00'); sys.stderr.write('err'); sys.exit(4)",
        )
    };
    let here = python().exec(&request, &Limits::default()).unwrap();
    let there = workers().exec(&request, &Limits::default()).unwrap();
    assert_eq!(there.exit, Exit::Exited { code: 4 });
    assert_eq!((&there.stdout, &there.stderr), (&here.stdout, &here.stderr));
    assert_eq!(there.usage.fuel, here.usage.fuel);
    assert_eq!(there.usage.memory_bytes, here.usage.memory_bytes);
}

#[test]
fn sessions_live_in_workers() {
    let mut session = workers().session(&Limits::default()).unwrap();
    session.step(&ExecRequest::new("x = 20")).unwrap();
    let mut children = session.fork(2).unwrap();
    children[0].step(&ExecRequest::new("x = 0")).unwrap();
    let print = ExecRequest::new("x += 1; print(x)");
    assert_eq!(children[1].step(&print).unwrap().stdout_text(), "21\n");
    let snapshot = session.snapshot().unwrap();
    let mut resumed = workers().resume(&snapshot, &Limits::default()).unwrap();
    assert_eq!(resumed.step(&print).unwrap().stdout_text(), "21\n");
    let mut here = python().resume(&snapshot, &Limits::default()).unwrap();
    assert_eq!(here.step(&print).unwrap().stdout_text(), "21\n");
    let end = session
        .step(&ExecRequest::new("import os; os._exit(0)"))
        .unwrap();
    assert!(end.exit.is_success());
    assert_eq!(session.ended(), Some(&Exit::Exited { code: 0 }));
    let error = session.step(&print).unwrap_err();
    assert!(
        matches!(error, SandboxError::SessionEnded { .. }),
        "{error}"
    );
}

#[test]
fn a_grader_works_over_workers() {
    let grader = UnitTestGrader::new(
        std::sync::Arc::new(workers().clone()),
        GradeLimits::default(),
    );
    let mut request = GradeRequest {
        code: "def add(a, b):\n    return a + b\n".to_owned(),
        setup: Vec::new(),
        tests: vec!["assert add(1, 2) == 3".to_owned()],
        entry_points: vec!["add".to_owned()],
        ..GradeRequest::default()
    };
    assert_eq!(grader.grade(&request).reward, Some(1.0));
    request.code = "def add(a, b):\n    return a\n".to_owned();
    assert_eq!(grader.grade(&request).reward, Some(0.0));
    // Callbacks, and tests that do not see each other, one of which runs out.
    request.code = "import os\nn = 0\ndef add(g, x):\n    global n\n    n += 1\n    \
                    return g(x) + n if x else os._exit(3)\n"
        .to_owned();
    let tests = ["assert add(lambda x: x * 2, 4) == 9", "add(None, 0)"];
    request.tests = tests.repeat(2).into_iter().map(str::to_owned).collect();
    let verdict = grader.grade(&request);
    let messages: Vec<_> = verdict.tests.iter().map(|test| &test.message[..]).collect();
    let ended = "the submission exited with code 3";
    assert_eq!(messages, ["", ended, "", ended], "{verdict:?}");
}

#[test]
fn limits_are_refused_with_their_reason() {
    let limits = Limits {
        memory: bytesize::ByteSize::mib(1),
        ..Limits::default()
    };
    let error = workers()
        .exec(&ExecRequest::new("pass"), &limits)
        .unwrap_err();
    assert!(
        matches!(error, SandboxError::MemoryLimitTooSmall { .. }),
        "{error}"
    );
}

#[test]
fn large_and_odd_requests_reach_a_worker_whole() {
    let request = ExecRequest {
        stdin: "\0".repeat(30 << 20),
        argv: vec!["\u{1}".repeat(1000)],
        ..ExecRequest::new("import sys; print(len(sys.stdin.read()), len(sys.argv[1]))")
    };
    let processes = workers().process_ids();
    let outcome = workers().exec(&request, &Limits::default()).unwrap();
    assert_eq!(outcome.stdout_text(), "31457280 1000\n");
    let request = ExecRequest {
        argv: vec!["\u{1}".repeat(40 << 20)],
        ..ExecRequest::new("pass")
    };
    let error = workers().exec(&request, &Limits::default()).unwrap_err();
    assert!(error.to_string().contains("larger"), "{error}");
    assert_eq!(workers().process_ids(), processes, "no worker died of it");
    let mut session = workers().session(&Limits::default()).unwrap();
    let error = session.fork(usize::MAX).unwrap_err();
    assert!(
        matches!(error, SandboxError::PoolExhausted { .. }),
        "{error}"
    );
}

#[test]
fn a_program_in_a_worker_is_cancelled() {
    let endless = Limits {
        fuel: i64::MAX as u64,
        deadline: Duration::from_secs(600),
        ..Limits::default()
    };
    let request = ExecRequest::new("while True: pass");
    let mut session = workers().session(&endless).unwrap();
    for is_session in [false, true] {
        let cancel = Cancel::new();
        let outcome = std::thread::scope(|scope| {
            let program = scope.spawn(|| {
                if is_session {
                    session.step_cancellable(&request, &cancel)
                } else {
                    workers().exec_cancellable(&request, &endless, &cancel)
                }
            });
            std::thread::sleep(Duration::from_millis(100));
            cancel.cancel();
            program.join().unwrap().unwrap()
        });
        assert_eq!(outcome.exit, Exit::Cancelled);
    }
    assert_eq!(session.ended(), Some(&Exit::Cancelled));
}

/// Programs are lost or doubled by no death of a worker, however often one dies.
#[test]
fn every_program_is_answered_once_while_workers_die() {
    const PROGRAMS: usize = 600;
    let workers = start(2);
    let done = AtomicBool::new(false);
    let (answers, killed) = std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            let mut killed = BTreeSet::new();
            while !done.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(150));
                let process = workers.process_ids()[killed.len() % 2];
                // The other one may still be starting; two deaths under one call are an error.
                if killed.len() < 4 && killed.insert(process) {
                    kill(process);
                }
            }
            killed.len()
        });
        let callers: Vec<_> = (0..4)
            .map(|caller| {
                let workers = &workers;
                scope.spawn(move || {
                    (caller..PROGRAMS)
                        .step_by(4)
                        .map(|index| {
                            let code = format!("print({index}, sum(range(20_000)))");
                            let outcome = workers.exec(&ExecRequest::new(code), &Limits::default());
                            outcome.unwrap().stdout_text()
                        })
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        let answers: Vec<_> = callers
            .into_iter()
            .map(|caller| caller.join().unwrap())
            .collect();
        done.store(true, Ordering::Relaxed);
        (answers, killer.join().unwrap())
    });
    for (caller, answers) in answers.iter().enumerate() {
        for (index, answer) in (caller..PROGRAMS).step_by(4).zip(answers) {
            assert_eq!(*answer, format!("{index} 199990000\n"));
        }
    }
    assert!(killed > 0, "no worker was killed while programs ran");
}

#[test]
fn a_session_is_lost_with_its_worker() {
    let workers = start(1);
    let mut session = workers.session(&Limits::default()).unwrap();
    session.step(&ExecRequest::new("x = 1")).unwrap();
    let process = workers.process_ids()[0];
    kill(process);
    let error = session.step(&ExecRequest::new("print(x)")).unwrap_err();
    assert!(matches!(error, SandboxError::SessionLost), "{error}");
    // The place has a new process, in which the name means nothing.
    let pass = ExecRequest::new("pass");
    workers.exec(&pass, &Limits::default()).unwrap();
    assert_ne!(workers.process_ids()[0], process);
    let error = session.step(&ExecRequest::new("print(x)")).unwrap_err();
    assert!(matches!(error, SandboxError::SessionLost), "{error}");
}

#[test]
fn no_process_outlives_its_workers() {
    let workers = start(2);
    let processes = workers.process_ids();
    let session = workers.session(&Limits::default()).unwrap();
    drop(workers);
    let exists = |process: &u32| std::path::Path::new(&format!("/proc/{process}")).exists();
    assert!(processes.iter().all(exists), "a session keeps them");
    drop(session);
    assert!(!processes.iter().any(exists));
}

#[test]
fn a_worker_that_cannot_start_is_named() {
    let options = WorkerOptions {
        count: 1,
        command: vec!["/nonexistent/wardian".into()],
        ..WorkerOptions::default()
    };
    let error = Workers::start(&options, |_| {}).unwrap_err();
    assert!(
        error.to_string().contains("/nonexistent/wardian"),
        "{error}"
    );
}
