//! Headers of GGUF files, as downloads from anywhere.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| wardian::engine::fuzz_gguf(bytes));
