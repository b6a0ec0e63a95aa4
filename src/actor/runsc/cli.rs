//! The program `runsc`, each call of it bounded in time.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use fs_err as fs;

use crate::actor::ActorError;
use crate::actor::cpu::CpuShare;
use crate::process::{self, Finished};

/// The longest that a call may take that only does something with a sandbox.
pub(super) const CALL: Duration = Duration::from_secs(30);
/// What is kept of its output.
const MAX_OUTPUT: usize = 64 << 10;

/// How `runsc` is called.
#[derive(Debug, Clone)]
pub(super) struct Runsc {
    program: PathBuf,
    /// Where it keeps its state.
    state: PathBuf,
    /// What traps the guests' calls: `ptrace` works everywhere, `systrap` and `kvm` where they do.
    platform: String,
}

impl Runsc {
    pub(super) fn new(program: PathBuf, state: PathBuf, platform: String) -> Self {
        Self {
            program,
            state,
            platform,
        }
    }

    /// Returns a command with the flags that all calls share.
    pub(super) fn command(&self, arguments: &[&str]) -> Command {
        self.with_flags(Command::new(&self.program), arguments)
    }

    fn with_flags(&self, mut command: Command, arguments: &[&str]) -> Command {
        command
            .arg(format!("--root={}", self.state.display()))
            .arg(format!("--platform={}", self.platform))
            // Files that a guest writes stay in the sandbox's memory; the host's are only read.
            .args([
                "--network=none",
                "--ignore-cgroups",
                "--overlay2=all:memory",
            ])
            .args(arguments)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command
    }

    /// Makes a call that ends with 0.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be made, takes too long or ends otherwise.
    pub(super) fn call(&self, activity: &str, arguments: &[&str]) -> Result<Finished, ActorError> {
        let mut command = self.command(arguments);
        let finished = process::run(&mut command, &[], CALL, MAX_OUTPUT, |_| false, |_| ())
            .map_err(|source| self.failed(source))?;
        if finished.timed_out {
            return Err(hung(activity));
        }
        match finished.is_success() {
            true => Ok(finished),
            false => Err(ActorError::Backend {
                activity: activity.to_owned(),
                message: finished.stderr.text().trim().to_owned(),
            }),
        }
    }

    /// Makes a call that starts a sandbox, which stays within `share`. What it complains about goes to the file `log`: the sandbox keeps
    /// the streams that it is given.
    ///
    /// # Errors
    ///
    /// As for [`Self::call`].
    pub(super) fn start(
        &self,
        activity: &str,
        arguments: &[&str],
        share: &CpuShare,
        log: &Path,
    ) -> Result<(), ActorError> {
        let files = |source| ActorError::Files {
            activity: "writing the log of an actor",
            source,
        };
        let stderr = fs::File::create(log).map_err(files)?;
        let mut child = self
            .with_flags(share.command(&self.program), arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr.into_file())
            .spawn()
            .map_err(|source| self.failed(source))?;
        let until = Instant::now() + CALL;
        let status = loop {
            if let Some(status) = child.try_wait().map_err(|source| self.failed(source))? {
                break status;
            }
            if Instant::now() >= until {
                let _ = child.kill();
                let _ = child.wait();
                return Err(hung(activity));
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        share.check()?;
        match status.success() {
            true => Ok(()),
            false => {
                let told = fs::read_to_string(log).unwrap_or_default();
                Err(ActorError::Backend {
                    activity: activity.to_owned(),
                    message: match told.trim() {
                        "" => format!("it ended with {status} and said nothing; is the disk full?"),
                        told => told.to_owned(),
                    },
                })
            }
        }
    }

    pub(super) fn failed(&self, source: std::io::Error) -> ActorError {
        ActorError::Run {
            program: self.program.display().to_string(),
            source,
        }
    }
}

fn hung(activity: &str) -> ActorError {
    ActorError::Hung {
        activity: activity.to_owned(),
        limit: CALL,
    }
}
