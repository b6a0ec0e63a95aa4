//! Repositories for tests, made of the files that are there.

use std::path::Path;
use std::process::Command;

/// Runs `git` in a folder, as nobody in particular, and returns what it prints.
pub(crate) fn git(folder: &Path, arguments: &[&str]) -> String {
    let output = Command::new("git")
        .args(["-c", "user.name=a", "-c", "user.email=a@b"])
        .args(arguments)
        .current_dir(folder)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .output()
        .expect("git is installed");
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Makes a folder a repository with all that is in it as its commit `base`.
pub(crate) fn commit_base(folder: &Path) {
    git(folder, &["init", "--quiet"]);
    git(folder, &["add", "."]);
    git(folder, &["commit", "--quiet", "--message=base"]);
    git(folder, &["tag", "base"]);
}
