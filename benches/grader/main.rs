//! Grading benchmarks: what a verdict costs, beside running the same tests in a subprocess.
//!
//! `cargo bench --bench grader [FILTER]`. The rows are sanitized MBPP's where `WARDIAN_SHARED` names
//! the folder of reference data, else the carried tasks; the ids are the same.

#![expect(
    clippy::print_stdout,
    reason = "a benchmark reports on standard output"
)]

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group};
use wardian::grader::{GradeLimits, GradeRequest, Grader as _, GraderRegistry, TestCase};
use wardian::sandbox::{RuntimeOptions, Sandbox, WasmRuntime};
use wardian::task::{Task, TaskSet};

/// Threads of `throughput` and of the comparison.
const THREADS: usize = 2;
/// Rows of the comparison.
const COMPARED_ROWS: usize = 200;

/// Calls of a submission in one test: what a call costs, beside what a grade does.
const BRIDGE_CALLS: u64 = 2000;
/// Submissions of `typical` that are graded in one go.
const TYPICAL_ROWS: usize = 512;
/// The tests of a typical row of MBPP.
const TYPICAL_ASSERTS: [&str; 3] = [
    "assert f(1) == 2",
    "assert f('a') == 'aa'",
    "assert f([1]) == [1, 1]",
];

const CHECK: &str = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate([1]) == [1, 1]\n    assert candidate('a') == 'aa'\n";
const PYTEST: &str = "import pytest\nfrom solution import f\n\n@pytest.mark.parametrize('x, y', [(1, 2), ('a', 'aa'), ([1], [1, 1])])\ndef test_f(x, y):\n    assert f(x) == y\n";
const UNITTEST: &str = "import unittest\nfrom solution import f\n\nclass TestF(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 2)\n        self.assertEqual(f('a'), 'aa')\n        self.assertEqual(f([1]), [1, 1])\n";
const DOCTEST: &str = ">>> f(1)\n2\n>>> f('a')\n'aa'\n>>> f([1])\n[1, 1]\n";
const USER: &str =
    "def grade(candidate, task):\n    return sum(candidate.f(n) == 2 * n for n in range(3)) / 3\n";

fn graders() -> GraderRegistry {
    let runtime = WasmRuntime::load(&RuntimeOptions::default(), |progress| {
        println!("{progress}");
    })
    .expect("the guest loads");
    let sandbox: Arc<dyn Sandbox> = Arc::new(runtime);
    GraderRegistry::standard(&sandbox, &GradeLimits::default())
}

/// Returns the rows that are graded, and what they are.
fn rows() -> (Vec<Task>, &'static str) {
    let shared = std::env::var_os("WARDIAN_SHARED")
        .map(|root| Path::new(&root).join("data/mbpp/sanitized-mbpp.open.json"))
        .filter(|path| path.is_file());
    let (path, name) = match shared {
        Some(path) => (path, "sanitized MBPP"),
        None => (
            Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/starter/tasks/train.jsonl"),
            "the carried tasks",
        ),
    };
    let tasks = TaskSet::open(&path, None, 0).expect("the tasks can be read");
    (tasks.tasks().to_vec(), name)
}

fn requests(tasks: &[Task]) -> Vec<GradeRequest> {
    let reference = |task: &Task| task.reference.clone().expect("rows have references");
    let request = |task: &Task| task.grade_request(&reference(task));
    tasks.iter().map(request).collect()
}

/// Grades every request on `THREADS` threads.
fn grade_all(graders: &GraderRegistry, requests: &[GradeRequest]) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let Some(request) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
                    assert_eq!(graders.grade(request).reward, Some(1.0));
                }
            });
        }
    });
}

fn one(grader: &str, test: &str, cases: &[(&str, &str)]) -> GradeRequest {
    let code = match grader {
        "stdio" => "print(2 * int(input()))",
        _ => "def f(x):\n    return 2 * x\n",
    };
    GradeRequest {
        grader: grader.to_owned(),
        code: code.to_owned(),
        tests: (!test.is_empty())
            .then(|| test.to_owned())
            .into_iter()
            .collect(),
        entry_points: vec!["f".to_owned()],
        cases: cases
            .iter()
            .map(|(input, output)| TestCase {
                input: (*input).to_owned(),
                output: (*output).to_owned(),
            })
            .collect(),
        ..GradeRequest::default()
    }
}

fn grader(criterion: &mut Criterion) {
    let graders = graders();
    let mut group = criterion.benchmark_group("grader");
    let mut typical = one("unit_tests", "", &[]);
    typical.tests = TYPICAL_ASSERTS.map(str::to_owned).to_vec();
    for request in [
        typical.clone(),
        one("check", CHECK, &[]),
        one("pytest", PYTEST, &[]),
        one("unittest", UNITTEST, &[]),
        one("doctest", DOCTEST, &[]),
        one("python", USER, &[]),
        one(
            "calls",
            "",
            &[("[1]", "2"), ("[\"a\"]", "\"aa\""), ("[[1]]", "[1, 1]")],
        ),
        one("stdio", "", &[("1", "2"), ("2", "4"), ("3", "6")]),
    ] {
        group.bench_function(&request.grader, |bencher| {
            bencher.iter(|| assert_eq!(graders.grade(&request).reward, Some(1.0)));
        });
    }
    let mut calls = one("unit_tests", "", &[]);
    let range = format!("range({BRIDGE_CALLS})");
    calls.tests = vec![format!(
        "assert [f(i) for i in {range}] == [2 * i for i in {range}]"
    )];
    group.throughput(Throughput::Elements(BRIDGE_CALLS));
    group.bench_function(format!("bridge/{BRIDGE_CALLS}_calls"), |bencher| {
        bencher.iter(|| assert_eq!(graders.grade(&calls).reward, Some(1.0)));
    });
    group.throughput(Throughput::Elements(TYPICAL_ROWS as u64));
    let rows_alike = vec![typical; TYPICAL_ROWS];
    group.bench_function(format!("typical/{THREADS}_threads"), |bencher| {
        bencher.iter(|| grade_all(&graders, &rows_alike));
    });
    let requests = requests(&rows().0);
    group.throughput(Throughput::Elements(requests.len() as u64));
    group.bench_function(format!("rows/{THREADS}_threads"), |bencher| {
        bencher.iter(|| grade_all(&graders, &requests));
    });
    group.finish();
}

/// Returns the interpreter that `python3` stands for, which may be a slow wrapper.
fn native_python() -> String {
    let show = Command::new("python3")
        .args(["-c", "import sys; print(sys.executable)"])
        .output();
    let path = show.expect("python3 is installed").stdout;
    let path = String::from_utf8(path).expect("a path in UTF-8");
    path.trim().to_owned()
}

/// Grades as is common: submission and tests in one subprocess, whose exit code is the verdict.
fn in_subprocesses(python: &str, requests: &[GradeRequest]) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let Some(request) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let program = [
                        request.setup.join("\n"),
                        request.code.clone(),
                        request.tests.join("\n"),
                    ];
                    let status = Command::new(python)
                        .args(["-I", "-c", &program.join("\n")])
                        .stdout(Stdio::null())
                        .status();
                    assert!(status.expect("python3 starts").success());
                }
            });
        }
    });
}

/// Prints grades a second here and in subprocesses, on the same rows.
fn compare() {
    let graders = graders();
    let (mut tasks, name) = rows();
    tasks.truncate(COMPARED_ROWS);
    let requests = requests(&tasks);
    let rate = |grade: &dyn Fn()| {
        grade(); // once to warm up
        let started = Instant::now();
        grade();
        requests.len() as f64 / started.elapsed().as_secs_f64()
    };
    let ours = rate(&|| grade_all(&graders, &requests));
    let python = native_python();
    let subprocesses = rate(&|| in_subprocesses(&python, &requests));
    println!(
        "{} rows of {name}, {THREADS} threads: {ours:.0} grades/s, in subprocesses \
         {subprocesses:.0}, ratio {:.0}",
        requests.len(),
        ours / subprocesses
    );
}

criterion_group! {
    name = benches;
    config = Criterion::default().measurement_time(Duration::from_secs(3));
    targets = grader
}

fn main() {
    benches();
    Criterion::default().configure_from_args().final_summary();
    // Under `cargo test` every benchmark is run once, as a test.
    if std::env::args().any(|argument| argument == "--bench") {
        compare();
    }
}
