//! What the fuzz targets of `fuzz/` run: the host's side of all that a guest, a file or a worker
//! may say. Each function panics when something is wrong; the tests run them on random bytes.

use std::io;
use std::num::NonZeroU32;

use bytesize::ByteSize;

use super::workers::Frame;
use super::{
    CacheFolder, Dialogue, DialogueOutcome, Guest, Limits, Message, RuntimeOptions, Sandbox as _,
    SandboxError, Snapshot, WasmRuntime,
};

/// A guest that does what a message says, and nothing but that: it calls the host, writes and reads
/// its memory, traps, or loops until it has no fuel.
///
/// A message is a reply pointer (4 bytes), a reply length (4 bytes), then records of 17 bytes: a
/// function's number and four arguments. The message stays at 65536, so that arguments can point
/// into it.
pub const HOST_CALLS_GUEST: &str = r#"(module
    (import "wasi_snapshot_preview1" "fd_write"
        (func $fd_write (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_read"
        (func $fd_read (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "poll_oneoff"
        (func $poll_oneoff (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "clock_time_get"
        (func $clock_time_get (param i32 i64 i32) (result i32)))
    (import "wasi_snapshot_preview1" "random_get" (func $random_get (param i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "proc_exit" (func $proc_exit (param i32)))
    (import "bridge" "call" (func $bridge_call (param i32 i32) (result i32)))
    (import "bridge" "take" (func $bridge_take (param i32 i32) (result i32)))
    (import "bridge" "open" (func $bridge_open (param i32 i32) (result i32)))
    (import "bridge" "printed" (func $bridge_printed (param i32) (result i32)))
    (import "meter" "refill" (func $meter_refill))
    (memory (export "memory") 4)
    (global (export "__stack_pointer") (mut i32) (i32.const 1024))
    (func (export "_initialize"))
    (func (export "init"))
    (func (export "buf") (param i32) (result i32) (i32.const 65536))
    (func (export "step") (param i32 i64) (result i32) (i32.const 0))
    (func (export "reply_ptr") (result i32) (i32.load (i32.const 65536)))

    (func $call (param $at i32)
        (local $function i32) (local $a i32) (local $b i32) (local $c i32) (local $d i32)
        (local.set $function (i32.load8_u (local.get $at)))
        (local.set $a (i32.load offset=1 (local.get $at)))
        (local.set $b (i32.load offset=5 (local.get $at)))
        (local.set $c (i32.load offset=9 (local.get $at)))
        (local.set $d (i32.load offset=13 (local.get $at)))
        (block $done (block $14 (block $13 (block $12 (block $11 (block $10 (block $9 (block $8 (block $7 (block $6
        (block $5 (block $4 (block $3 (block $2 (block $1 (block $0
            (br_table $0 $1 $2 $3 $4 $5 $6 $7 $8 $9 $10 $11 $12 $13 $14 $done
                (local.get $function)))
            (drop (call $fd_write (local.get $a) (local.get $b) (local.get $c) (local.get $d)))
            (br $done))
            (drop (call $fd_read (local.get $a) (local.get $b) (local.get $c) (local.get $d)))
            (br $done))
            (drop (call $poll_oneoff (local.get $a) (local.get $b) (local.get $c) (local.get $d)))
            (br $done))
            (drop (call $clock_time_get (local.get $a) (i64.extend_i32_u (local.get $b))
                (local.get $c)))
            (br $done))
            (drop (call $random_get (local.get $a) (local.get $b)))
            (br $done))
            (call $proc_exit (local.get $a))
            (br $done))
            (drop (call $bridge_call (local.get $a) (local.get $b)))
            (br $done))
            (drop (call $bridge_take (local.get $a) (local.get $b)))
            (br $done))
            (drop (memory.grow (i32.and (local.get $a) (i32.const 7))))
            (br $done))
            (call $meter_refill)
            (br $done))
            (i32.store (local.get $a) (local.get $b))
            (br $done))
            (drop (i32.load (local.get $a)))
            (br $done))
            (loop $forever (br $forever)))
            (drop (call $bridge_open (local.get $a) (local.get $b)))
            (br $done))
            (drop (call $bridge_printed (local.get $a)))))

    (func (export "serve") (export "answer") (param $length i32) (result i32)
        (local $at i32) (local $end i32)
        (local.set $at (i32.const 65544))
        (local.set $end (i32.add (i32.const 65536) (local.get $length)))
        (block $over
            (loop $next
                (br_if $over (i32.gt_u (i32.add (local.get $at) (i32.const 17)) (local.get $end)))
                (call $call (local.get $at))
                (local.set $at (i32.add (local.get $at) (i32.const 17)))
                (br $next)))
        (i32.load (i32.const 65540))))"#;

/// Guests that call the host with whatever numbers they are given.
#[derive(Debug)]
pub struct HostCalls {
    runtime: WasmRuntime,
    limits: Limits,
}

impl HostCalls {
    /// Prepares the guest, given [`HOST_CALLS_GUEST`] as a binary module.
    ///
    /// # Panics
    ///
    /// Panics if the guest does not load.
    #[must_use]
    pub fn new(guest: Vec<u8>) -> Self {
        let options = RuntimeOptions {
            guest: Guest::new(guest, Vec::new()),
            cache: CacheFolder::Disabled,
            audit_every: NonZeroU32::new(1),
            ..RuntimeOptions::default()
        };
        Self {
            runtime: WasmRuntime::load(&options, |_| {}).expect("the guest loads"),
            limits: Limits {
                memory: ByteSize::mib(2),
                fuel: 10_000_000,
                stdout: ByteSize::kib(64),
                stderr: ByteSize::kib(64),
                ..Limits::default()
            },
        }
    }

    /// Has two guests call the host, one of them with the other as its peer, and returns what came
    /// of it unless a message was too large.
    ///
    /// # Panics
    ///
    /// Panics if the host fails, or leaves something of these guests to the next ones.
    pub fn run(&self, bytes: &[u8]) -> Option<DialogueOutcome> {
        let (callee, caller) = bytes.split_at(bytes.len() / 2);
        let message = |bytes: &[u8]| Message {
            limits: self.limits.clone(),
            bytes: bytes.to_vec(),
        };
        let outcome = self.runtime.converse(&Dialogue {
            callee: message(callee),
            // Whatever it answers: a reply of no bytes is what most messages give.
            proceed_on: Vec::new(),
            round: self.limits.clone(),
            max_rounds: 4,
            caller: message(caller),
        });
        let outcome = match outcome {
            Ok(outcome) => Some(outcome),
            Err(SandboxError::RequestTooLarge { .. }) => None,
            Err(error) => panic!("the host failed: {error:?}"),
        };
        let statistics = self.runtime.statistics();
        assert_eq!(
            (statistics.in_use, statistics.failed),
            (0, 0),
            "{statistics:?}"
        );
        outcome
    }
}

/// Reads bytes as a session's snapshot: as a file, as one with the hash that it should have, and
/// as what a file unpacks to. What can be read is written and read as it was. Returns whether
/// anything could.
///
/// # Panics
///
/// Panics if what is read is not what is written.
pub fn session_snapshot(bytes: &[u8]) -> bool {
    const MAX_BYTES: u64 = 1 << 20;
    let is_sound = |read: io::Result<Snapshot>| {
        let Ok(snapshot) = read else {
            return false;
        };
        assert!(snapshot.state.content.len() as u64 <= MAX_BYTES);
        let written = snapshot.to_bytes().expect("it fits");
        let again = Snapshot::from_bytes(&written, MAX_BYTES).expect("we wrote it");
        assert_same(&again, &snapshot);
        assert_eq!(again.to_bytes().expect("it fits"), written);
        true
    };
    let mut hashed = bytes.to_vec();
    if let Some((body, hash)) = hashed.split_last_chunk_mut::<32>() {
        *hash = *blake3::hash(body).as_bytes();
    }
    is_sound(Snapshot::from_bytes(bytes, MAX_BYTES))
        | is_sound(Snapshot::from_bytes(&hashed, MAX_BYTES))
        | is_sound(Snapshot::from_body(bytes))
}

fn assert_same(a: &Snapshot, b: &Snapshot) {
    assert_eq!((a.guest, a.is_seeded), (b.guest, b.is_seeded));
    let (a, b) = (&a.state, &b.state);
    assert_eq!((a.memory_bytes, &a.pages), (b.memory_bytes, &b.pages));
    assert!(a.content == b.content, "the pages differ");
    let (a, b) = (&a.carried, &b.carried);
    assert_eq!(a.random, b.random);
    assert_eq!(a.clock, b.clock);
}

/// Reads bytes as a message between a process and its worker, and as a message's head. What can be
/// read is written and read as it was. Returns whether anything could.
///
/// # Panics
///
/// Panics if what is read is not what is written.
pub fn worker_frame(bytes: &[u8]) -> bool {
    Frame::read_any(bytes)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::sandbox::{Exit, Served};

    /// Each function once, with arguments that it accepts, so that it is known to be reached.
    fn each_host_function() -> Vec<u8> {
        const NOTHING: u8 = 0xff;
        const EXIT: u8 = 5;
        let message = |last: u8| {
            let mut message = [0_u32; 2].map(u32::to_le_bytes).concat();
            for (function, arguments) in [
                (0, [1, 65536, 1, 16]),
                (1, [0, 65536, 1, 16]),
                (2, [65536, 128, 1, 16]),
                (3, [0, 0, 128, 0]),
                (4, [128, 64, 0, 0]),
                (6, [65536, 8, 0, 0]),
                (7, [128, 0, 0, 0]),
                (8, [1, 0, 0, 0]),
                (9, [0; 4]),
                (10, [200_000, 7, 0, 0]),
                (11, [200_000, 0, 0, 0]),
                (13, [65536, 8, 0, 0]),
                (6, [65536, 8, 0, 0]),
                (14, [1, 0, 0, 0]),
                (last, [3, 0, 0, 0]),
            ] {
                message.push(function);
                message.extend(arguments.map(u32::to_le_bytes).concat());
            }
            message
        };
        // The callee lives on, so that the caller is asked and reaches it.
        [message(NOTHING), message(EXIT)].concat()
    }

    /// Messages of up to eight calls, mostly of the bridge and with places that mean something: a
    /// guest that asks its peer with its own message is asked the same back.
    fn messages() -> impl Strategy<Value = Vec<u8>> {
        let number = prop_oneof![
            3 => prop::sample::select(vec![0_u32, 1, 8, 16, 32, 64, 65_536, 65_600, 200_000]),
            1 => any::<u32>(),
        ];
        let function = prop_oneof![prop::sample::select(vec![6_u8, 7, 13, 14]), 0_u8..15];
        let call = (function, prop::array::uniform4(number)).prop_map(|(function, arguments)| {
            let mut call = vec![function];
            call.extend(arguments.map(u32::to_le_bytes).concat());
            call
        });
        let reply = prop::array::uniform2(prop_oneof![Just(0_u32), Just(65_536), any::<u32>()]);
        let calls = prop::collection::vec(call, 0..9);
        (reply, calls).prop_map(|(reply, calls)| {
            [reply.map(u32::to_le_bytes).concat(), calls.concat()].concat()
        })
    }

    /// What a session's snapshot of one changed page unpacks to.
    fn unpacked_snapshot() -> Vec<u8> {
        [
            &[7; 32][..],
            &[1, 0],
            &5_u64.to_le_bytes(),
            &9_u64.to_le_bytes(),
            &[3; 32],
            &70_u128.to_le_bytes(),
            &(2_u64 << 16).to_le_bytes(),
            &1_u32.to_le_bytes(),
            &20_u32.to_le_bytes(),
            &[b'p'; 4096],
        ]
        .concat()
    }

    /// What the targets begin with: the name under `fuzz/seeds/`, and the bytes.
    fn seeds() -> Vec<(String, Vec<u8>)> {
        let snapshot = Snapshot::from_body(&unpacked_snapshot()).unwrap();
        let mut seeds = vec![
            ("host_calls/each_function".to_owned(), each_host_function()),
            (
                "session_snapshot/packed".to_owned(),
                snapshot.to_bytes().unwrap(),
            ),
            ("session_snapshot/unpacked".to_owned(), unpacked_snapshot()),
        ];
        for (name, bytes) in Frame::examples() {
            seeds.push((format!("worker_frame/{name}"), bytes));
        }
        seeds
    }

    #[test]
    fn host_calls_are_survived() {
        let calls = HostCalls::new(wat::parse_str(HOST_CALLS_GUEST).unwrap());
        let outcome = calls.run(&each_host_function()).unwrap();
        let exited = Served::Ended(Exit::Exited { code: 3 });
        assert_eq!(outcome.caller.unwrap().0, exited);
        for (function, reason) in [(10, "out of bounds"), (11, "out of bounds"), (12, "fuel")] {
            let callee = [&[0; 8][..], &[function], &[0xff; 16]].concat();
            let outcome = calls.run(&callee.repeat(2)).unwrap();
            let Served::Ended(exit) = outcome.callee else {
                panic!("{function} ends the guest");
            };
            assert!(exit.to_string().contains(reason), "{exit}");
        }
        proptest!(ProptestConfig::with_cases(300), |(callee in messages(), caller in messages())| {
            let length = callee.len().max(caller.len());
            let padded = |mut message: Vec<u8>| {
                message.resize(length, 0xff);
                message
            };
            calls.run(&[padded(callee), padded(caller)].concat());
        });
    }

    /// With `WARDIAN_WRITE_SEEDS=1` they are written first.
    #[test]
    fn seeds_of_the_fuzz_targets_are_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds");
        for (name, bytes) in seeds() {
            let path = folder.join(&name);
            if std::env::var_os("WARDIAN_WRITE_SEEDS").is_some() {
                fs_err::create_dir_all(path.parent().unwrap()).unwrap();
                fs_err::write(&path, bytes).unwrap();
            }
            let bytes = fs_err::read(&path).unwrap();
            let is_read = match name.split_once('/').unwrap().0 {
                "session_snapshot" => session_snapshot(&bytes),
                "worker_frame" => worker_frame(&bytes),
                _ => true, // any bytes are calls
            };
            assert!(is_read, "{name}");
        }
    }

    proptest! {
        #[test]
        fn snapshots_are_read_or_refused(bytes: Vec<u8>) {
            session_snapshot(&bytes);
            session_snapshot(&[b"wardian\0\x01\0\0\0", &bytes[..]].concat());
        }

        #[test]
        fn frames_are_read_or_refused(bytes: Vec<u8>) {
            worker_frame(&bytes);
        }
    }
}
