//! Server-sent events of an upstream.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| wardian::proxy::fuzz_sse(bytes));
