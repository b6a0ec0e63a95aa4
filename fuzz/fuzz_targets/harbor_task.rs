//! The configuration of a Harbor task.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    // What was refused has a reason that can be said.
    if let Err(error) = wardian::task::harbor::TaskConfig::parse(text) {
        assert!(!error.to_string().is_empty());
    }
});
