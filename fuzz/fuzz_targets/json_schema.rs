//! A JSON schema that an answer should keep to.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| wardian::openai::fuzz_schema(bytes));
