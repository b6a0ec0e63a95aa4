//! A frame of a client of an environment.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| wardian::openenv::fuzz_frame(bytes));
