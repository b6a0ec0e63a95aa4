//! A model's chat template, and what a user says.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| wardian::chat::fuzz_template(bytes));
