//! Isolation benchmarks: what a fresh or live interpreter costs per step, beside a native one.
//!
//! `cargo bench --bench sandbox [FILTER]`

#![expect(
    clippy::print_stdout,
    reason = "a benchmark reports on standard output"
)]

use std::cell::LazyCell;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group};
use wardian::grader::{GradeLimits, GradeRequest, Grader as _, UnitTestGrader};
use wardian::sandbox::{ExecRequest, Limits, RuntimeOptions, WasmRuntime};

const PRINT: &str = "print(1+1)";
const FUNCTION_ASSERTS: &str = "\
def add(a, b):
    return a + b
assert add(1, 2) == 3
assert add(-1, 1) == 0
assert [add(i, i) for i in range(50)][-1] == 98
";
const TRACEBACK: &str = "x = [1, 2, 3]\nprint(x[10])";
const JSON: &str = "\
import collections, json, re
text = json.dumps({'a': [1, 2.5, None], 'b': 'text'})
print(json.loads(text), re.findall(r'\\d+', 'a1b22'), collections.Counter('hello'))
";

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
        ("json", JSON),
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
    criterion.bench_function("grade/three_asserts", |bencher| {
        let grader = UnitTestGrader::new(Arc::new(runtime.clone()), GradeLimits::default());
        let request = GradeRequest {
            code: "def add(a, b):\n    return a + b\n".to_owned(),
            setup: Vec::new(),
            tests: (1..=3)
                .map(|n| format!("assert add({n}, 1) == {}", n + 1))
                .collect(),
            entry_points: vec!["add".to_owned()],
        };
        bencher.iter(|| assert_eq!(grader.grade(&request).reward, Some(1.0)));
    });
    criterion.bench_function("native_subprocess/print", |bencher| {
        let python = native_python();
        bencher.iter(|| native_subprocess(&python, PRINT));
    });
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
}

criterion_group! {
    name = benches;
    config = Criterion::default().measurement_time(Duration::from_secs(3));
    targets = sandbox
}

fn main() {
    benches();
    Criterion::default().configure_from_args().final_summary();
    // Under `cargo test` every benchmark is run once, as a test.
    if std::env::args().any(|argument| argument == "--bench") {
        compare();
    }
}
