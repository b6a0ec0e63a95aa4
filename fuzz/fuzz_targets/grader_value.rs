//! Values as guests send them to the grader's host side.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| wardian::grader::fuzz_value(bytes));
