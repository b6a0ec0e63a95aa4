//! Headers of safetensors files, as downloads from anywhere.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| wardian::engine::model::fuzz_safetensors(bytes));
