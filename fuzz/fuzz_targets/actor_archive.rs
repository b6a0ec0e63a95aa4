//! What a guest leaves as a tar archive.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| wardian::actor::fuzz_archive(bytes));
