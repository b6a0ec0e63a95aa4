//! The patch of a policy.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wardian::grader::swebench::{TestPaths, parse_diff, split_patch};

fuzz_target!(|patch: &str| {
    let tests = TestPaths::new(&[], &[]);
    let Ok(split) = split_patch(patch, &tests) else {
        return;
    };
    // What is kept is a patch that keeps all of itself, and changes no tests.
    let again = split_patch(&split.kept, &tests).expect("what was written is read");
    assert_eq!(again.kept, split.kept);
    assert_eq!(again.size, split.size);
    assert!(again.dropped.is_empty());
    for file in parse_diff(&split.kept).expect("what was written is read") {
        for path in file.paths() {
            assert!(!tests.contain(path), "{path}");
            assert!(!path.split('/').any(|part| matches!(part, "" | ".." | ".git")), "{path}");
        }
    }
});
