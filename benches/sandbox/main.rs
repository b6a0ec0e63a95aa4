//! Isolation benchmarks: what a fresh or live interpreter costs per step, beside a native one.
//!
//! `cargo bench --bench sandbox [FILTER]`; `cargo bench --bench sandbox -- measure` answers the
//! requests of `scripts/compare/sandbox.py` instead, and `-- science` measures the science runtime.

#![expect(
    clippy::print_stdout,
    reason = "a benchmark reports on standard output"
)]

mod measure;
mod science;
mod soak;

use std::cell::LazyCell;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion, Throughput, criterion_group};
use wardian::grader::{GradeLimits, GradeRequest, Grader as _, UnitTestGrader};
use wardian::sandbox::{ExecRequest, Limits, RuntimeOptions, WasmRuntime};

// `scripts/compare/sandbox.py` runs the same programs.
const PRINT: &str = include_str!("../steps/print.py");
const FUNCTION_ASSERTS: &str = include_str!("../steps/function_asserts.py");
const TRACEBACK: &str = include_str!("../steps/traceback.py");
const JSON: &str = include_str!("../steps/json.py");

/// What the parent of the forks holds.
const SESSION_STATE: &str = "\
import random
board = [[random.randint(0, 9) for _ in range(9)] for _ in range(9)]
names = {index: str(index) for index in range(500)}
squares = (n * n for n in range(1000))
next(squares)
";
/// Children of one call in `session_fork/further`.
const FURTHER_FORKS: u64 = 16;
/// Steps of each thread in one iteration of `throughput`.
const STEPS_PER_THREAD: u64 = 500;
/// Calls in the comparison at the end.
const COMPARED_CALLS: u32 = 100;

fn runtime() -> WasmRuntime {
    WasmRuntime::load(&RuntimeOptions::default(), |progress| {
        println!("{progress}");
    })
    .expect("the guest loads")
}

fn fresh_step(runtime: &WasmRuntime, request: &ExecRequest) {
    runtime
        .exec(request, &Limits::default())
        .expect("the sandbox works");
}

/// Returns the interpreter that `python3` stands for, which may be a slow wrapper.
fn native_python() -> String {
    let show = Command::new("python3")
        .args(["-c", "import sys; print(sys.executable)"])
        .output();
    let path = show.expect("python3 is installed").stdout;
    String::from_utf8(path)
        .expect("a path in UTF-8")
        .trim()
        .to_owned()
}

fn native_subprocess(python: &str, code: &str) {
    let output = Command::new(python).args(["-I", "-c", code]).output();
    assert!(output.expect("python3 is installed").status.success());
}

fn sandbox(criterion: &mut Criterion) {
    let runtime = LazyCell::new(runtime);
    let limits = Limits::default();

    criterion.bench_function("instantiate", |bencher| {
        bencher.iter(|| runtime.session(&limits).expect("the sandbox works"));
    });
    let mut group = criterion.benchmark_group("fresh_step");
    for (name, code) in [
        ("print", PRINT),
        ("function_asserts", FUNCTION_ASSERTS),
        ("traceback", TRACEBACK),
        ("json_re", JSON),
    ] {
        let request = ExecRequest::new(code);
        group.bench_function(name, |bencher| {
            bencher.iter(|| fresh_step(&runtime, &request));
        });
    }
    group.finish();
    criterion.bench_function("session_step/print", |bencher| {
        let mut session = runtime.session(&limits).expect("the sandbox works");
        let request = ExecRequest::new(PRINT);
        bencher.iter(|| session.step(&request).expect("the sandbox works"));
    });
    forks(criterion, &runtime);
    throughput(criterion, &runtime);
    criterion.bench_function("grade/three_asserts", |bencher| {
        let grader = UnitTestGrader::new(Arc::new(runtime.clone()), GradeLimits::default());
        let request = GradeRequest {
            code: "def add(a, b):\n    return a + b\n".to_owned(),
            setup: Vec::new(),
            tests: (1..=3)
                .map(|n| format!("assert add({n}, 1) == {}", n + 1))
                .collect(),
            entry_points: vec!["add".to_owned()],
            ..GradeRequest::default()
        };
        bencher.iter(|| assert_eq!(grader.grade(&request).reward, Some(1.0)));
    });
    criterion.bench_function("native_subprocess/print", |bencher| {
        let python = native_python();
        bencher.iter(|| native_subprocess(&python, PRINT));
    });
}

/// A fork of a session with some state: into an instance that is used again, and into ones that
/// are made for it.
fn forks(criterion: &mut Criterion, runtime: &WasmRuntime) {
    let mut parent = runtime
        .session(&Limits::default())
        .expect("the sandbox works");
    parent
        .step(&ExecRequest::new(SESSION_STATE))
        .expect("the sandbox works");
    let mut group = criterion.benchmark_group("session_fork");
    group.bench_function("first", |bencher| {
        bencher.iter_batched(
            || (),
            |()| parent.fork(1).expect("the sandbox works"),
            BatchSize::PerIteration,
        );
    });
    group.throughput(Throughput::Elements(FURTHER_FORKS));
    group.bench_function("further", |bencher| {
        let count = usize::try_from(FURTHER_FORKS).expect("a small number");
        bencher.iter_batched(
            || (),
            |()| parent.fork(count).expect("the sandbox works"),
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

/// Fresh steps of several threads at once.
fn throughput(criterion: &mut Criterion, runtime: &WasmRuntime) {
    let mut group = criterion.benchmark_group("throughput");
    let request = ExecRequest::new(PRINT);
    for threads in [1, 2] {
        group.throughput(Throughput::Elements(threads * STEPS_PER_THREAD));
        group.bench_function(format!("{threads}_threads"), |bencher| {
            bencher.iter(|| {
                std::thread::scope(|scope| {
                    for _ in 0..threads {
                        scope.spawn(|| {
                            for _ in 0..STEPS_PER_THREAD {
                                fresh_step(runtime, &request);
                            }
                        });
                    }
                });
            });
        });
    }
    group.finish();
}

/// Returns the median time of a call.
fn median(mut call: impl FnMut()) -> Duration {
    let mut times: Vec<_> = (0..COMPARED_CALLS)
        .map(|_| {
            let started = Instant::now();
            call();
            started.elapsed()
        })
        .collect();
    times.sort();
    times[times.len() / 2]
}

/// Prints how much cheaper a fresh sandboxed interpreter is than a native one.
fn compare() {
    let runtime = runtime();
    let request = ExecRequest::new(PRINT);
    let fresh = median(|| fresh_step(&runtime, &request));
    let python = native_python();
    let native = median(|| native_subprocess(&python, PRINT));
    println!(
        "medians of {COMPARED_CALLS}: fresh_step/print {fresh:.1?}, native_subprocess/print \
         {native:.1?}, ratio native/fresh {:.0}",
        native.as_secs_f64() / fresh.as_secs_f64()
    );
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/compare/sandbox.py");
    // With the peers that an earlier run of the script has installed.
    let compared = Command::new("python3")
        .args([script, "--offline", "--quick", "--bench"])
        .arg(std::env::current_exe().expect("this program has a path"))
        .status();
    if !compared.is_ok_and(|status| status.success()) {
        println!("{script} did not run: no comparison with other sandboxes");
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().measurement_time(Duration::from_secs(3));
    targets = sandbox
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("measure") => {
            measure::serve().expect("standard streams work");
            return ExitCode::SUCCESS;
        }
        Some("science") => {
            return match science::run() {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    println!("{error}");
                    ExitCode::FAILURE
                }
            };
        }
        Some("soak") => return soak::run(arguments.get(1).and_then(|steps| steps.parse().ok())),
        _ => {}
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
    // Under `cargo test` every benchmark is run once, as a test.
    if arguments.iter().any(|argument| argument == "--bench") {
        compare();
    }
    ExitCode::SUCCESS
}
