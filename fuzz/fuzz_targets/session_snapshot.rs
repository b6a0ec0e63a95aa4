//! Session snapshots, as files from anywhere.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    wardian::sandbox::fuzzing::session_snapshot(bytes);
});
