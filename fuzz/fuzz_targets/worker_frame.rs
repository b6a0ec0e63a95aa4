//! Messages between a process and its sandbox workers.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    wardian::sandbox::fuzzing::worker_frame(bytes);
});
