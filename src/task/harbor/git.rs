//! `git`, run so that a repository can neither run anything here nor ask anything.
//!
//! The program sees no configuration but ours, no credentials and no terminal: no hooks, filters,
//! helpers or submodules, only the transports named below, and every object is checked as it comes.
//! Each call is bounded in time.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::HarborError;
use crate::address::{shown, shown_in};
use crate::process;

/// How long one call may take; the largest public task repository takes about a minute.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Bytes kept of what a call prints.
const MAX_OUTPUT: usize = 64 << 10;

/// Settings of every call.
const SETTINGS: [&str; 13] = [
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.protectHFS=true",
    "core.protectNTFS=true",
    "credential.helper=",
    "fetch.fsckObjects=true",
    "submodule.recurse=false",
    "gc.auto=0",
    "protocol.allow=never",
    "protocol.https.allow=always",
    "protocol.ssh.allow=always",
];

/// A repository with the files of one commit.
#[derive(Debug)]
pub(super) struct Checkout<'a> {
    folder: &'a Path,
    url: &'a str,
    /// The commit, in full.
    pub(super) commit: String,
}

impl<'a> Checkout<'a> {
    /// Fetches one commit, and nothing else, of the repository at `url` into the empty `folder`.
    ///
    /// # Errors
    ///
    /// Fails where `git` does, and where it brings another commit than the one asked for.
    pub(super) fn fetch(
        folder: &'a Path,
        url: &'a str,
        revision: Option<&str>,
    ) -> Result<Self, HarborError> {
        let mut checkout = Self {
            folder,
            url,
            commit: String::new(),
        };
        checkout.git(&["init", "--quiet", "--template="], "")?;
        let revision = revision.unwrap_or("HEAD");
        checkout.git(
            &[
                "fetch",
                "--quiet",
                "--depth=1",
                "--no-tags",
                "--no-recurse-submodules",
                "--",
                url,
                revision,
            ],
            "",
        )?;
        let commit = checkout.git(&["rev-parse", "--verify", "FETCH_HEAD^{commit}"], "")?;
        commit.trim().clone_into(&mut checkout.commit);
        if is_commit(revision) && checkout.commit != revision {
            return Err(HarborError::Git {
                command: "fetch".to_owned(),
                url: shown(url),
                ended: format!("brought commit {}", checkout.commit),
                said: format!("asked for {revision}"),
            });
        }
        Ok(checkout)
    }

    /// Writes the files under `paths` into the folder.
    ///
    /// # Errors
    ///
    /// Fails where the commit has none of them, or `git` fails.
    pub(super) fn write(&self, paths: &[&str]) -> Result<(), HarborError> {
        let list: String = paths.iter().flat_map(|path| [*path, "\0"]).collect();
        let arguments = [
            "--literal-pathspecs",
            "checkout",
            "--quiet",
            "--force",
            "--no-recurse-submodules",
            "--pathspec-from-file=-",
            "--pathspec-file-nul",
            &self.commit,
        ];
        self.git(&arguments, &list).map(drop)
    }

    fn git(&self, arguments: &[&str], input: &str) -> Result<String, HarborError> {
        let name = arguments.iter().find(|word| !word.starts_with('-'));
        let failed = |ended: String, said: &str| HarborError::Git {
            command: name.copied().unwrap_or_default().to_owned(),
            url: shown(self.url),
            ended,
            said: shown_in(said.trim()).replace(char::is_control, " "),
        };
        let mut command = Command::new("git");
        for setting in SETTINGS {
            command.args(["-c", setting]);
        }
        // Only where the registry names a folder of this machine.
        if self.url.starts_with('/') {
            command.args(["-c", "protocol.file.allow=always"]);
        }
        command
            .args(arguments)
            .current_dir(self.folder)
            .env_clear()
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .envs([
                ("HOME", "/nonexistent"),
                ("LC_ALL", "C"),
                ("GIT_ASKPASS", "false"),
                ("GIT_ATTR_NOSYSTEM", "1"),
                ("GIT_CONFIG_GLOBAL", "/dev/null"),
                ("GIT_CONFIG_NOSYSTEM", "1"),
                ("GIT_LFS_SKIP_SMUDGE", "1"),
                ("GIT_SSH_COMMAND", "ssh -oBatchMode=yes"),
                ("GIT_TERMINAL_PROMPT", "0"),
                ("SSH_ASKPASS", "false"),
            ]);
        let finished = process::run(
            &mut command,
            input.as_bytes(),
            TIMEOUT,
            MAX_OUTPUT,
            |_| false,
            |_| (),
        )
        .map_err(|source| HarborError::NoGit { source })?;
        let stderr = finished.stderr.text();
        match finished.status {
            _ if finished.timed_out => {
                let ended = format!("was stopped after {} s", TIMEOUT.as_secs());
                Err(failed(ended, &stderr))
            }
            Some(status) if status.success() => Ok(finished.stdout.text()),
            Some(status) => Err(failed(format!("ended with {status}"), &stderr)),
            None => Err(failed("did not end".to_owned(), &stderr)),
        }
    }
}

/// Whether `revision` is a commit in full.
pub(super) fn is_commit(revision: &str) -> bool {
    matches!(revision.len(), 40 | 64)
        && (revision.bytes()).all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}
