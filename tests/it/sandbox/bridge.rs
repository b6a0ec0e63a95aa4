//! The bridge between two guests: re-entry, rounds, ends and limits, over a guest small enough to
//! read.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::num::NonZeroU32;
use std::sync::OnceLock;
use std::time::Duration;

use bytesize::ByteSize;
use rstest::rstest;
use wardian::sandbox::{
    CacheFolder, Dialogue, DialogueOutcome, Exit, Guest, Limits, Message, Meter, Round,
    RuntimeOptions, Sandbox as _, SandboxError, Served, WasmRuntime,
};

/// Does what the first letter of a message says, whoever sent it.
///
/// A reply is a number of four bytes, or what another guest replied.
const GUEST: &str = r#"(module
    (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
    (import "wasi_snapshot_preview1" "fd_write"
        (func $write (param i32 i32 i32 i32) (result i32)))
    (import "bridge" "call" (func $call (param i32 i32) (result i32)))
    (import "bridge" "take" (func $take (param i32 i32) (result i32)))
    (import "bridge" "open" (func $open (param i32 i32) (result i32)))
    (import "bridge" "printed" (func $printed (param i32) (result i32)))
    (memory (export "memory") 4)
    (global (export "__stack_pointer") (mut i32) (i32.const 1024))

    (func (export "_initialize"))
    (func (export "init") (i32.store (i32.const 8) (i32.const 131072)))
    (func (export "buf") (param i32) (result i32) (i32.const 65536))
    (func (export "reply_ptr") (result i32) (i32.const 1024))
    (func (export "step") (param i32 i64) (result i32) (i32.const 0))

    (func $number (param $value i32) (result i32)
        (i32.store (i32.const 1024) (local.get $value))
        (i32.const 4))
    (func $taken (param $length i32) (result i32)
        (if (result i32) (i32.lt_s (local.get $length) (i32.const 0))
            (then (call $number (local.get $length)))
            (else (call $take (i32.const 1024) (local.get $length)))))
    (func $forward (param $at i32) (param $length i32) (result i32)
        (call $taken (call $call (local.get $at) (local.get $length))))
    (func $recurse (result i32) (i32.add (call $recurse) (i32.const 1)))
    ;; Forwards from the bottom of a deep recursion.
    (func $deep (param $frames i32) (param $at i32) (param $length i32) (result i32)
        (if (result i32) (local.get $frames)
            (then (i32.add (i32.const 0) (call $deep (i32.sub (local.get $frames) (i32.const 1))
                (local.get $at) (local.get $length))))
            (else (call $forward (local.get $at) (local.get $length)))))

    (func $do (param $at i32) (param $length i32) (result i32)
        (local $letter i32) (local $rest i32) (local $left i32) (local $first i32)
        (local.set $letter (i32.load8_u (local.get $at)))
        (local.set $rest (i32.add (local.get $at) (i32.const 1)))
        (local.set $left (i32.sub (local.get $length) (i32.const 1)))
        ;; f: forward the rest
        (if (i32.eq (local.get $letter) (i32.const 0x66))
            (then (return (call $forward (local.get $rest) (local.get $left)))))
        ;; s: do the message of that length (after it), then the rest
        (if (i32.eq (local.get $letter) (i32.const 0x73)) (then
            (local.set $first (i32.load8_u (local.get $rest)))
            ;; The buffer is for whoever calls meanwhile.
            (local.set $at (i32.load (i32.const 8)))
            (memory.copy (local.get $at) (i32.add (local.get $rest) (i32.const 1))
                (local.get $left))
            (i32.store (i32.const 8) (i32.add (local.get $at) (local.get $left)))
            (drop (call $do (local.get $at) (local.get $first)))
            (return (call $do (i32.add (local.get $at) (local.get $first))
                (i32.sub (i32.sub (local.get $left) (i32.const 1)) (local.get $first))))))
        ;; n: count, c: the count
        (if (i32.eq (local.get $letter) (i32.const 0x6e))
            (then (i32.store (i32.const 16) (i32.add (i32.load (i32.const 16)) (i32.const 1)))))
        (if (i32.or (i32.eq (local.get $letter) (i32.const 0x6e))
                (i32.eq (local.get $letter) (i32.const 0x63)))
            (then (return (call $number (i32.load (i32.const 16))))))
        ;; k: keep the last number, K: the kept number
        (if (i32.eq (local.get $letter) (i32.const 0x6b)) (then
            (i32.store (i32.const 20) (i32.load (i32.const 1024)))
            (return (i32.const 4))))
        (if (i32.eq (local.get $letter) (i32.const 0x4b))
            (then (return (call $number (i32.load (i32.const 20))))))
        ;; o: open a round, noting the rest
        (if (i32.eq (local.get $letter) (i32.const 0x6f))
            (then (return (call $number (call $open (local.get $rest) (local.get $left))))))
        ;; p: print the rest, q: what the peer printed
        (if (i32.eq (local.get $letter) (i32.const 0x70)) (then
            (i32.store (i32.const 32) (local.get $rest))
            (i32.store (i32.const 36) (local.get $left))
            (return (call $number
                (call $write (i32.const 1) (i32.const 32) (i32.const 1) (i32.const 40))))))
        (if (i32.eq (local.get $letter) (i32.const 0x71))
            (then (return (call $taken (call $printed (i32.const 1))))))
        ;; t: trap, e: exit, l: loop, r: recurse, g: grow
        (if (i32.eq (local.get $letter) (i32.const 0x74)) (then unreachable))
        (if (i32.eq (local.get $letter) (i32.const 0x65)) (then (call $exit (i32.const 7))))
        (if (i32.eq (local.get $letter) (i32.const 0x6c))
            (then (loop $again (loop) (br $again))))
        (if (i32.eq (local.get $letter) (i32.const 0x72)) (then (return (call $recurse))))
        ;; m: let the other side do the same, M: from deep down
        (if (i32.eq (local.get $letter) (i32.const 0x6d))
            (then (return (call $forward (local.get $at) (local.get $length)))))
        (if (i32.eq (local.get $letter) (i32.const 0x4d))
            (then (return (call $deep (i32.const 40000) (local.get $at) (local.get $length)))))
        ;; R: the same, and recurse when the other side does not answer
        (if (i32.eq (local.get $letter) (i32.const 0x52)) (then
            (drop (call $deep (i32.const 40000) (local.get $at) (local.get $length)))
            (if (i32.lt_s (i32.load (i32.const 1024)) (i32.const 0))
                (then (return (call $recurse))))
            (return (i32.const 4))))
        (call $number (i32.const 0)))

    (func (export "serve") (export "answer") (param $length i32) (result i32)
        (call $do (i32.const 65536) (local.get $length))))"#;

const DEAD: i32 = -1;
const EXHAUSTED: i32 = -2;
const TOO_DEEP: i32 = -3;

fn runtime() -> &'static WasmRuntime {
    static RUNTIME: OnceLock<WasmRuntime> = OnceLock::new();
    RUNTIME.get_or_init(|| load(2, Meter::Loops))
}

fn load(max_instances: u32, meter: Meter) -> WasmRuntime {
    let options = RuntimeOptions {
        guest: Guest::new(wat::parse_str(GUEST).unwrap(), Vec::new()),
        cache: CacheFolder::Disabled,
        max_instances,
        audit_every: NonZeroU32::new(1),
        meter,
        ..RuntimeOptions::default()
    };
    WasmRuntime::load(&options, |_| {}).unwrap()
}

fn limits() -> Limits {
    Limits {
        memory: ByteSize::mib(1),
        fuel: 50_000_000,
        deadline: Duration::from_secs(60),
        ..Limits::default()
    }
}

fn number(value: i32) -> Served {
    Served::Reply(value.to_le_bytes().to_vec())
}

/// First one message, then another one.
fn both(first: &[u8], second: &[u8]) -> Vec<u8> {
    let length = u8::try_from(first.len()).unwrap();
    [b"s", &[length][..], first, second].concat()
}

/// As [`both`], for more.
fn all(messages: &[&[u8]]) -> Vec<u8> {
    let (last, before) = messages.split_last().unwrap();
    let append = |rest: Vec<u8>, message: &&[u8]| both(message, &rest);
    before.iter().rev().fold(last.to_vec(), append)
}

fn converse(callee: &[u8], proceed_on: Vec<u8>, caller: &[u8]) -> DialogueOutcome {
    // The tests of this file share two instances, which is what a dialogue takes.
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    let message = |bytes: &[u8]| Message {
        limits: limits(),
        bytes: bytes.to_vec(),
    };
    let outcome = runtime()
        .converse(&Dialogue {
            callee: message(callee),
            proceed_on,
            round: limits(),
            max_rounds: 3,
            caller: message(caller),
        })
        .unwrap();
    let statistics = runtime().statistics();
    assert_eq!((statistics.in_use, statistics.failed), (0, 0));
    outcome
}

/// Lets a caller do `message` within one round; returns its answer and what came of the callee.
fn ask(message: &[u8]) -> (Served, Round) {
    let outcome = converse(b"c", vec![0; 4], &both(b"o", message));
    let [round] = &outcome.rounds[..] else {
        panic!("one round: {outcome:?}");
    };
    (outcome.caller.unwrap().0, round.clone())
}

#[test]
fn each_side_reaches_the_other() {
    assert_eq!(ask(b"fn").0, number(1));
    // There and back, three times; the counts are each side's own.
    assert_eq!(ask(b"fffn").0, number(1));
    assert_eq!(ask(&all(&[b"n", b"n", b"fn", b"ffn"])).0, number(3));
    assert_eq!(ask(&all(&[b"n", b"n", b"fn", b"fffn"])).0, number(2));
}

/// A guest that waits is entered again in the midst of its call, and goes on afterwards.
#[test]
fn a_call_goes_on_after_a_callback() {
    let callback_then_count = [b"f", &both(b"fn", b"n")[..]].concat();
    let (served, round) = ask(&both(&callback_then_count, b"c"));
    // One callback counted on the caller's side.
    assert_eq!(served, number(1));
    assert_eq!(round.ended, None);
}

#[rstest]
#[case::plain(b"m")]
#[case::from_deep_down(b"M")]
fn calls_that_wait_for_each_other_are_bounded(#[case] message: &[u8]) {
    let (served, round) = ask(message);
    assert_eq!(served, number(TOO_DEEP));
    assert_eq!(round.ended, None);
}

/// Every entry has a stack of its own: with 32 of them, each with a recursion of 40,000 frames, the
/// innermost guest still meets its own limit and nothing else.
#[test]
fn recursion_on_both_sides_ends_in_a_trap() {
    let (served, round) = ask(b"R");
    let exhausted = |exit: &Exit| exit.to_string().contains("call stack exhausted");
    let ends = [
        match &served {
            Served::Ended(exit) => Some(exit),
            Served::Reply(_) => None,
        },
        round.ended.as_ref(),
    ];
    // The innermost one ends by it, then the other one finds itself alone.
    assert!(ends.into_iter().flatten().all(exhausted), "{ends:?}");
    assert!(ends.iter().any(Option::is_some), "{ends:?}");
}

#[rstest]
#[case(b"t", "trapped: wasm `unreachable` instruction executed", DEAD)]
#[case(b"e", "exited with code 7", DEAD)]
#[case(b"r", "trapped: call stack exhausted", DEAD)]
#[case(b"l", "ran out of fuel: used 50000000 of 50000000", EXHAUSTED)]
fn a_callee_that_ends_is_dead_for_this_round(
    #[case] end: &[u8],
    #[case] exit: &str,
    #[case] length: i32,
) {
    let (served, round) = ask(&[b"f", end].concat());
    assert_eq!(served, number(length));
    assert_eq!(round.ended.unwrap().to_string(), exit);
    // In the next round it is as it was prepared.
    let tail = all(&[b"o", &[b"f", end].concat(), b"o", b"fn"]);
    let outcome = converse(b"n", vec![1, 0, 0, 0], &tail);
    assert_eq!(outcome.caller.unwrap().0, number(2));
    assert_eq!(outcome.rounds.len(), 2);
    assert_eq!(outcome.rounds[1].ended, None);
}

/// The callee ends in a callback's callback, while another frame of it waits: that frame must not
/// go on.
#[rstest]
#[case(b"t", "unreachable")]
#[case(b"e", "code 7")]
#[case(b"l", "fuel")]
fn a_waiting_frame_of_an_ended_callee_is_unwound(#[case] end: &[u8], #[case] exit: &str) {
    // The callee: ask the caller to ask it to end, then count and report.
    let inner = [b"ff", end].concat();
    let message = [b"f", &both(&inner, b"n")[..]].concat();
    let (served, round) = ask(&message);
    assert!(matches!(served, Served::Reply(_)), "{served:?}");
    assert_ne!(served, number(1), "the callee went on after its end");
    let ended = round.ended.unwrap().to_string();
    assert!(ended.contains(exit), "{ended}");
    // And it is not asked again by whoever waits in between.
    let in_between = all(&[&[b"f", end].concat(), b"fn", b"k"]);
    let message = all(&[&[b"ff", &in_between[..]].concat(), b"K"]);
    assert_eq!(ask(&message).0, number(DEAD));
}

/// The same for the caller, which a callback ends.
#[rstest]
#[case(b"t", "unreachable")]
#[case(b"e", "code 7")]
#[case(b"r", "call stack exhausted")]
#[case(b"l", "fuel")]
fn a_waiting_frame_of_an_ended_caller_is_unwound(#[case] end: &[u8], #[case] exit: &str) {
    let message = both(&[b"ff", end].concat(), b"n");
    let (served, round) = ask(&message);
    let Served::Ended(ended) = served else {
        panic!("the caller went on after its end: {served:?}");
    };
    assert!(ended.to_string().contains(exit), "{ended}");
    // The callee, which asked for it, is told that nobody answers.
    assert_eq!(round.ended, None);
}

/// Each side pays for what it does itself, wherever it is called from.
#[test]
fn fuel_is_charged_to_whoever_runs() {
    let (served, round) = ask(b"ffl");
    let Served::Ended(Exit::OutOfFuel { .. }) = served else {
        panic!("{served:?}");
    };
    assert!(round.usage.fuel < 20_000, "{round:?}");
    let (_, round) = ask(b"fl");
    assert_eq!(round.usage.fuel, 50_000_000);
}

/// What the host copies is paid for by whoever sends it, a reply as well as a request.
#[test]
fn messages_are_charged_to_whoever_sends_them() {
    let fuel = |message: &[u8]| {
        let outcome = converse(b"c", vec![0; 4], &both(b"o", message));
        let (served, usage) = outcome.caller.unwrap();
        (served, usage.fuel, outcome.rounds[0].usage.fuel)
    };
    // What the callee does not look at makes its request longer.
    let (served, caller, callee) = fuel(b"fc");
    let (longer, longer_caller, longer_callee) = fuel(&[b"fc", &[0; 100][..]].concat());
    assert_eq!(longer, served);
    // The guest copies it once itself, which costs half.
    assert_eq!((longer_caller - caller, longer_callee - callee), (150, 0));
    // What it printed, the caller hands out, from within a callback.
    let ask_for = |printed: &[u8]| {
        let prints = [b"p", printed].concat();
        fuel(&[b"f", &both(&prints, b"fq")[..]].concat())
    };
    let (served, caller, callee) = ask_for(b"");
    let (longer, longer_caller, longer_callee) = ask_for(&[b'x'; 100]);
    let (Served::Reply(short), Served::Reply(long)) = (served, longer) else {
        panic!("both are answered");
    };
    assert_eq!(long.len() - short.len(), 100);
    // It goes there as a reply of the caller's and back as one of the callee's; the request with the
    // text to print was the caller's, too.
    assert!(longer_caller - caller >= 200, "{longer_caller} {caller}");
    assert!(longer_callee - callee >= 100, "{longer_callee} {callee}");
}

/// A guest cannot make the host work for nothing: each call costs something, an empty one too.
#[test]
fn calls_are_bounded_by_fuel() {
    let callee = |message: &[u8]| ask(message).1.usage.fuel;
    let calls = callee(b"ffffc") - callee(b"ffc");
    assert!((10_000..12_000).contains(&calls), "{calls}");
}

/// While a guest waits for the other one, or for being asked at all, the time is not its own.
#[test]
fn a_guests_clock_runs_while_the_guest_does() {
    // The caller works in a callback, then by itself.
    for message in [&b"ffl"[..], b"l"] {
        let outcome = converse(b"c", vec![0; 4], &both(b"o", message));
        let (_, caller) = outcome.caller.unwrap();
        let callee = &outcome.rounds[0].usage;
        assert!(callee.wall < caller.wall / 2, "{callee:?} {caller:?}");
    }
    // The callee does.
    let outcome = converse(b"c", vec![0; 4], &both(b"o", b"fl"));
    let (_, caller) = outcome.caller.unwrap();
    let callee = &outcome.rounds[0].usage;
    assert!(caller.wall < callee.wall / 2, "{callee:?} {caller:?}");
}

#[test]
fn rounds_do_not_see_each_other() {
    let caller = all(&[b"o", b"fn", b"fn", b"ofirst", b"fn", b"osecond", b"fc"]);
    let outcome = converse(b"n", vec![1, 0, 0, 0], &caller);
    assert_eq!(outcome.caller.as_ref().unwrap().0, number(1));
    let notes: Vec<_> = outcome.rounds.iter().map(|round| &round.note[..]).collect();
    assert_eq!(notes, [&b"first"[..], b"second", b""]);
}

#[test]
fn rounds_have_fuel_of_their_own() {
    // A third of it each time, by a caller and by a callee that loop to the end in the last round.
    let outcome = converse(
        b"c",
        vec![0; 4],
        &all(&[b"o", b"fl", b"o", b"fl", b"o", b"fl"]),
    );
    let fuel: Vec<_> = outcome
        .rounds
        .iter()
        .map(|round| round.usage.fuel)
        .collect();
    assert_eq!(fuel, [50_000_000; 3]);
    let (served, usage) = outcome.caller.unwrap();
    assert_eq!(served, number(EXHAUSTED));
    assert!(usage.fuel < 100_000, "{usage:?}");
}

/// No round is opened but by the caller, at rest, and as often as it may.
#[test]
fn rounds_are_opened_by_the_caller_alone() {
    // By the callee, and by the caller in a callback.
    assert_eq!(ask(b"fo").0, number(DEAD));
    assert_eq!(ask(b"ffo").0, number(DEAD));
    let outcome = converse(b"o", DEAD.to_le_bytes().to_vec(), b"c");
    assert_eq!(outcome.rounds, []);
    assert!(outcome.caller.is_some(), "the callee has no stage either");
    let outcome = converse(b"c", vec![0; 4], &all(&[b"o", b"o", b"o", b"o"]));
    assert_eq!(outcome.caller.unwrap().0, number(DEAD));
    assert_eq!(outcome.rounds.len(), 3);
}

/// Without a round there is nobody to ask, the prepared callee least of all.
#[test]
fn there_is_no_peer_before_the_first_round() {
    let outcome = converse(b"c", vec![0; 4], b"fn");
    assert_eq!(outcome.caller.unwrap().0, number(DEAD));
    assert_eq!(outcome.rounds, []);
}

#[test]
fn the_caller_reads_what_the_callee_printed() {
    let printed = Served::Reply(b"text".to_vec());
    assert_eq!(ask(&all(&[b"fptext", b"q"])).0, printed);
    assert_eq!(
        ask(&all(&[b"fptext", b"q", b"q"])).0,
        Served::Reply(Vec::new())
    );
    // Also in a callback.
    let message = [b"f", &both(b"ptext", b"fq")[..]].concat();
    assert_eq!(ask(&message).0, printed);
}

#[test]
fn a_note_that_is_no_memory_opens_nothing() {
    let outcome = converse(b"c", vec![0; 4], &[b"o", &[b'x'; 65 << 10][..]].concat());
    assert_eq!(outcome.caller.unwrap().0, number(DEAD));
}

fn dialogue(caller: &[u8], max_rounds: u32) -> Dialogue {
    let message = |bytes: &[u8]| Message {
        limits: limits(),
        bytes: bytes.to_vec(),
    };
    Dialogue {
        callee: message(b"c"),
        proceed_on: vec![0; 4],
        round: limits(),
        max_rounds,
        caller: message(caller),
    }
}

#[test]
fn a_dialogue_takes_two_instances() {
    let runtime = load(1, Meter::Loops);
    let error = runtime.converse(&dialogue(b"o", 1)).unwrap_err();
    assert!(
        matches!(error, SandboxError::PoolExhausted { .. }),
        "{error}"
    );
    assert_eq!(runtime.statistics().in_use, 0);
}

#[test]
fn a_round_needs_an_interpreters_memory() {
    let mut dialogue = dialogue(b"o", 1);
    dialogue.round.memory = ByteSize::kib(64);
    let error = runtime().converse(&dialogue).unwrap_err();
    assert!(
        matches!(error, SandboxError::MemoryLimitTooSmall { .. }),
        "{error}"
    );
}

/// The other meter counts in the store itself, which is entered again and refuelled all the same.
#[test]
fn wasmtimes_own_meter_counts_through_re_entry() {
    let runtime = load(2, Meter::Instructions);
    let caller = all(&[b"o", b"ffn", b"fl", b"o", b"ffl"]);
    let outcome = runtime.converse(&dialogue(&caller, 2)).unwrap();
    let Some((Served::Ended(Exit::OutOfFuel { .. }), usage)) = outcome.caller else {
        panic!("{outcome:?}");
    };
    assert!(usage.fuel >= 50_000_000, "{usage:?}");
    let ends: Vec<_> = outcome.rounds.iter().map(|round| &round.ended).collect();
    assert!(
        matches!(ends[..], [Some(Exit::OutOfFuel { .. }), None]),
        "{ends:?}"
    );
}
