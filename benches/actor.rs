//! What an actor costs, beside an interpreter in WebAssembly: medians of each step; and how
//! exact the limit of memory is.
//!
//! `cargo bench --bench actor [-- ROUNDS]` prints a table. It needs `runsc`, `bwrap` and root.

#![expect(
    clippy::print_stdout,
    reason = "a benchmark reports on standard output"
)]

use std::time::{Duration, Instant};

use wardian::actor::bwrap::BwrapBackend;
use wardian::actor::runsc::{RunscBackend, RunscOptions};
use wardian::actor::{ActorBackend, ActorCommand, ActorSpec, Ending, RootFs};
use wardian::sandbox::{ExecRequest, Limits, RuntimeOptions, WasmRuntime};

/// The program that every tier runs.
const PRINT: &str = "print(sum(range(1000)))";

/// The steps, in the order of the columns.
const STEPS: &[&str] = &[
    "create",
    "exec true",
    "exec Python",
    "snapshot",
    "restore",
    "delete",
    "all deleted",
];

fn main() {
    let rounds = std::env::args()
        .skip(1)
        .find_map(|argument| argument.parse().ok())
        .unwrap_or(20);
    println!("| tier | {} |", STEPS.join(" | "));
    println!("|---|{}", "---|".repeat(STEPS.len()));
    wasm(rounds);
    let bwrap = BwrapBackend::open(None).expect("bubblewrap is installed");
    actors(bwrap, rounds);
    let runsc = || RunscBackend::open(&RunscOptions::default()).expect("gVisor is installed");
    actors(runsc(), rounds);
    overshoot(&runsc());
}

/// Tells how far a program that only takes memory gets beyond its limit before it is ended.
fn overshoot(backend: &impl ActorBackend) {
    let mut spec = ActorSpec::new(RootFs::Host);
    spec.limits.memory = 192 << 20;
    spec.limits.disk = 64 << 20;
    let hog = "held = []\nwhile True:\n    held.append(bytearray(b'x') * (1 << 20))\n";
    let beyond = (0..5).map(|_| {
        let actor = backend.create(&spec).expect("an actor starts");
        let output = actor.exec(&ActorCommand::new(["python3", "-c", hog]));
        match output.expect("the backend works").ending {
            Ending::OutOfMemory { limit, used } => (used - limit) >> 20,
            other => panic!("the hog ended otherwise: {other:?}"),
        }
    });
    let most = beyond.max().expect("it ran");
    println!(
        "\n{}: a hog passed its limit of 256 MiB by {most} MiB at most",
        backend.name()
    );
}

/// Measures a backend; the last column is the wait for all that goes on in the background, once.
fn actors(backend: impl ActorBackend, rounds: u32) {
    let name = backend.name();
    let spec = ActorSpec::new(RootFs::Host);
    let mut steps: [Vec<Duration>; 6] = Default::default();
    let exec = |actor: &dyn wardian::actor::Actor, argv: &[&str]| {
        let output = actor.exec(&ActorCommand::new(argv.iter().copied()));
        let output = output.expect("the backend works");
        assert!(output.is_success(), "{output:?}");
    };
    for _ in 0..rounds {
        let actor = timed(&mut steps[0], || backend.create(&spec)).expect("an actor starts");
        timed(&mut steps[1], || exec(&*actor, &["true"]));
        timed(&mut steps[2], || exec(&*actor, &["python3", "-c", PRINT]));
        let snapshot = timed(&mut steps[3], || actor.snapshot()).expect("it is kept");
        let member = timed(&mut steps[4], || snapshot.restore()).expect("another one starts");
        timed(&mut steps[5], || member.destroy()).expect("it is ended");
    }
    let mut last = Vec::new();
    timed(&mut last, || drop(backend));
    row(name, steps.iter().chain([&last]));
}

/// Measures sessions of the WebAssembly sandbox.
fn wasm(rounds: u32) {
    let runtime = WasmRuntime::load(&RuntimeOptions::default(), |progress| {
        println!("{progress}");
    })
    .expect("the guest loads");
    let limits = Limits::default();
    let request = ExecRequest::new(PRINT);
    let mut steps: [Vec<Duration>; 5] = Default::default();
    for _ in 0..10 * rounds {
        let mut session = timed(&mut steps[0], || runtime.session(&limits)).expect("it starts");
        timed(&mut steps[1], || session.step(&request)).expect("it runs");
        let snapshot = timed(&mut steps[2], || session.snapshot()).expect("it is kept");
        let resumed = timed(&mut steps[3], || runtime.resume(&snapshot, &limits));
        timed(&mut steps[4], || drop(resumed.expect("another one starts")));
    }
    let none = Vec::new();
    let [create, exec, snapshot, restore, delete] = &steps;
    row(
        "wasm",
        [create, &none, exec, snapshot, restore, delete, &none].into_iter(),
    );
}

fn timed<T>(into: &mut Vec<Duration>, step: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let result = step();
    into.push(started.elapsed());
    result
}

fn row<'a>(name: &str, steps: impl Iterator<Item = &'a Vec<Duration>>) {
    let cells: Vec<String> = steps
        .map(|durations| {
            let mut sorted = durations.clone();
            sorted.sort();
            match sorted.get(sorted.len() / 2) {
                None => "–".to_owned(),
                Some(median) if *median < Duration::from_millis(1) => {
                    format!("{:.0} µs", median.as_secs_f64() * 1e6)
                }
                Some(median) => format!("{:.1} ms", median.as_secs_f64() * 1e3),
            }
        })
        .collect();
    println!("| {name} | {} |", cells.join(" | "));
}
