//! A guest that calls every host function with whatever numbers it is given.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use wardian::sandbox::fuzzing::{HOST_CALLS_GUEST, HostCalls};

static HOST_CALLS: LazyLock<HostCalls> =
    LazyLock::new(|| HostCalls::new(wat::parse_str(HOST_CALLS_GUEST).expect("the guest is sound")));

fuzz_target!(|bytes: &[u8]| {
    HOST_CALLS.run(bytes);
});
