//! The `config.json` of a model.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| wardian::engine::model::fuzz_config(bytes));
