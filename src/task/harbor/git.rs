//! `git`, run so that a repository can neither run anything here nor ask anything.
//!
//! The program sees no configuration but ours, no credentials and no terminal: no hooks, filters,
//! helpers or submodules, only the transports named below, and every object is checked as it comes.
//! Each call is bounded in time.

use std::io::{Read, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::HarborError;

/// How long one call may take; the largest public task repository takes about a minute.
const TIMEOUT: Duration = Duration::from_secs(600);

/// How often a call is looked after.
const POLL: Duration = Duration::from_millis(20);

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
                url: url.to_owned(),
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
            url: self.url.to_owned(),
            ended,
            said: said.trim().replace(char::is_control, " "),
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
            ])
            // A group of its own, so that its helpers end with it.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let child = command
            .spawn()
            .map_err(|source| HarborError::NoGit { source })?;
        let mut child = Running(child);
        let mut stdin = child.0.stdin.take();
        let (stdout, stderr) = (child.0.stdout.take(), child.0.stderr.take());
        let (status, stdout, stderr) = std::thread::scope(|scope| {
            scope.spawn(move || {
                // It may have ended without reading.
                let _ = stdin
                    .take()
                    .map(|mut pipe| pipe.write_all(input.as_bytes()));
            });
            let stdout = scope.spawn(|| read_start(stdout));
            let stderr = scope.spawn(|| read_start(stderr));
            let status = child.wait(TIMEOUT);
            (
                status,
                stdout.join().unwrap_or_default(),
                stderr.join().unwrap_or_default(),
            )
        });
        match status {
            Some(status) if status.success() => Ok(stdout),
            Some(status) => Err(failed(format!("ended with {status}"), &stderr)),
            None => {
                let ended = format!("was stopped after {} s", TIMEOUT.as_secs());
                Err(failed(ended, &stderr))
            }
        }
    }
}

/// Whether `revision` is a commit in full.
pub(super) fn is_commit(revision: &str) -> bool {
    matches!(revision.len(), 40 | 64)
        && (revision.bytes()).all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Reads to the end and keeps the start.
fn read_start(pipe: Option<impl Read>) -> String {
    let mut kept = Vec::new();
    let mut buffer = [0; 4096];
    if let Some(mut pipe) = pipe {
        while let Ok(count @ 1..) = pipe.read(&mut buffer) {
            let room = MAX_OUTPUT.saturating_sub(kept.len()).min(count);
            kept.extend_from_slice(&buffer[..room]);
        }
    }
    String::from_utf8_lossy(&kept).into_owned()
}

/// A process that ends, with its group, when nobody waits for it any more.
struct Running(Child);

impl Running {
    /// Waits for its end; stops it, and says nothing, where that takes longer than `timeout`.
    fn wait(&mut self, timeout: Duration) -> Option<std::process::ExitStatus> {
        let until = Instant::now() + timeout;
        loop {
            match self.0.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < until => std::thread::sleep(POLL),
                _ => {
                    self.stop();
                    return None;
                }
            }
        }
    }

    fn stop(&self) {
        if let Some(group) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            // It may be gone with all of them.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
        let _ = self.0.wait();
    }
}
