//! A long run of mixed programs, half of them hostile, that looks for wrong answers and for memory
//! that does not come back.
//!
//! `cargo bench --bench sandbox -- soak [STEPS]`

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bytesize::ByteSize;
use wardian::sandbox::{ExecRequest, Exit, Limits, RuntimeOptions, WasmRuntime};

const DEFAULT_STEPS: u64 = 1_000_000;
/// Looks at memory over the run.
const LOOKS: u64 = 20;
/// What memory may grow by from the second look on, when every kind of program has run.
const MAX_GROWTH: ByteSize = ByteSize::mib(16);

/// A program, and what is right for it to answer: how it ends, and its output.
type Program = (&'static str, fn(&Exit) -> bool, Option<&'static str>);

fn succeeds(exit: &Exit) -> bool {
    exit.is_success()
}
fn fails(exit: &Exit) -> bool {
    matches!(exit, Exit::Exited { code } if *code != 0)
}
fn out_of_fuel(exit: &Exit) -> bool {
    matches!(exit, Exit::OutOfFuel { .. })
}
fn out_of_memory(exit: &Exit) -> bool {
    matches!(exit, Exit::OutOfMemory { .. })
}
/// At whichever limit it meets first.
fn is_stopped(exit: &Exit) -> bool {
    anyhow(exit) && !exit.is_success()
}
/// However a wrecked interpreter ends.
fn anyhow(exit: &Exit) -> bool {
    !matches!(exit, Exit::DeadlineExceeded { .. })
}

const ORDINARY: [Program; 8] = [
    (include_str!("../steps/print.py"), succeeds, Some("2\n")),
    (
        include_str!("../steps/function_asserts.py"),
        succeeds,
        Some(""),
    ),
    (include_str!("../steps/traceback.py"), fails, Some("")),
    (
        include_str!("../steps/json.py"),
        succeeds,
        Some(
            "{'a': [1, 2.5, None], 'b': 'text'} ['1', '22'] Counter({'l': 2, 'h': 1, 'e': 1, 'o': 1})\n",
        ),
    ),
    (
        "import random; print(random.random(), hash('x') == hash('x'))",
        succeeds,
        Some("0.8444218515250481 True\n"),
    ),
    (
        "print(sorted({3: 'c', 1: 'a'}.items()), 2 ** 100)",
        succeeds,
        Some("[(1, 'a'), (3, 'c')] 1267650600228229401496703205376\n"),
    ),
    (
        "open('f', 'w').write('kept'); print(open('f').read())",
        succeeds,
        Some("kept\n"),
    ),
    ("import os; print(os.listdir())", succeeds, Some("[]\n")),
];

const HOSTILE: [Program; 12] = [
    ("while True: pass", out_of_fuel, None),
    ("sum(range(10**12))", out_of_fuel, None),
    (
        "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
        out_of_fuel,
        None,
    ),
    ("x = 'x'\nwhile True: x += x", out_of_memory, None),
    ("bytearray(1 << 30)", out_of_memory, None),
    (
        "def f(): f()\ntry: f()\nexcept RecursionError: print('deep')",
        succeeds,
        Some("deep\n"),
    ),
    (
        "import sys; sys.setrecursionlimit(10**9)\nclass A:\n  def __repr__(s): return repr(s)\nrepr(A())",
        anyhow,
        None,
    ),
    ("import os; os._exit(7)", fails, None),
    (
        "print('x' * (1 << 20)); print('y' * (1 << 20))",
        succeeds,
        None,
    ),
    (
        "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))",
        is_stopped,
        None,
    ),
    (
        "def f(): pass\nf.__code__ = f.__code__.replace(co_code=bytes(range(1, 201)))\nf()",
        anyhow,
        None,
    ),
    (
        "import builtins, sys\nbuiltins.print = None\nsys.modules.clear()\nsys.stdout = None",
        succeeds,
        None,
    ),
];

/// Runs the programs in random order on all cores; fails on the first kind of wrong answer.
pub(crate) fn run(steps: Option<u64>) -> ExitCode {
    let steps = steps.unwrap_or(DEFAULT_STEPS);
    let runtime = WasmRuntime::load(&RuntimeOptions::default(), |progress| {
        println!("{progress}");
    })
    .expect("the guest loads");
    let limits = Limits {
        memory: ByteSize::mib(64),
        fuel: 50_000_000,
        stdout: ByteSize::kib(64),
        ..Limits::default()
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut randoms: Vec<u64> = (0..threads as u64)
        .map(|thread| 88_172_645_463_325_252 + thread)
        .collect();
    let (begun, wrong) = (AtomicU64::new(0), AtomicU64::new(0));
    let started = Instant::now();
    let mut memory = Vec::new();
    for look in 1..=LOOKS {
        let until = steps * look / LOOKS;
        // Memory is looked at while no guest runs.
        std::thread::scope(|scope| {
            for random in &mut randoms {
                scope.spawn(|| {
                    while begun.fetch_add(1, Ordering::Relaxed) < until {
                        if !is_answered_right(&runtime, &limits, random) {
                            wrong.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        begun.store(until, Ordering::Relaxed);
        memory.push(resident());
        let seconds = started.elapsed().as_secs();
        println!("{:>3} %: {seconds} s, {}", look * 100 / LOOKS, resident());
    }
    let statistics = runtime.statistics();
    let growth = memory[memory.len() - 1].0.saturating_sub(memory[1].0);
    println!(
        "{steps} steps in {:.0?}: {statistics:?}, {} wrong, memory grew by {}",
        started.elapsed(),
        wrong.load(Ordering::Relaxed),
        ByteSize(growth)
    );
    let is_clean = wrong.into_inner() == 0 && statistics.failed == 0 && growth <= MAX_GROWTH.0;
    if is_clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Runs a program that `random`, which it moves on, decides; prints what was wrong.
fn is_answered_right(runtime: &WasmRuntime, limits: &Limits, random: &mut u64) -> bool {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    let programs: &[Program] = if *random & 1 == 0 {
        &ORDINARY
    } else {
        &HOSTILE
    };
    let index = (*random >> 8) % programs.len() as u64;
    let (code, is_right, stdout) = programs[usize::try_from(index).expect("an index")];
    let outcome = runtime.exec(&ExecRequest::new(code), limits);
    let right = outcome.as_ref().is_ok_and(|outcome| {
        is_right(&outcome.exit) && stdout.is_none_or(|stdout| outcome.stdout == stdout.as_bytes())
    });
    if !right {
        println!("wrong: {code:?} gave {outcome:?}");
    }
    right
}

/// Memory of this process that is in use now.
fn resident() -> ByteSize {
    let pages = fs_err::read_to_string("/proc/self/statm").expect("Linux has it");
    let pages = pages.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    ByteSize::kib(4 * pages.unwrap_or(0_u64))
}
